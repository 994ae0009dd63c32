"""Find the cause of an error message or a symptom in the reference of failures."""

from amp_lab.failures.explanation import Explanation, OwnLine, explain, read_explanation
from amp_lab.failures.reference import Failure, Page, Reference, load_reference

__all__ = [
    "Explanation",
    "Failure",
    "OwnLine",
    "Page",
    "Reference",
    "explain",
    "load_reference",
    "read_explanation",
]
