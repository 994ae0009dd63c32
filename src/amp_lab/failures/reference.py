"""The reference: every failure that has a code, with its messages, its cause and its cure.

The failures are written in notebooks 08a to 08h and in `notebooks/course/other_failures/`.
`tools/write_failures.py` gathers them into `reference.json`, which this module and the site read.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from amp_lab.core.requirements import needed_for


@dataclass(frozen=True)
class Failure:
    """A failure of the reference."""

    code: str
    """Its stable code, such as ``AMP0004``."""
    title: str
    """What goes wrong, in a few words."""
    cause: str
    """Why it happens."""
    cure: str
    """What to do."""
    page: str
    """Where more is written: a path in the repository, with the anchor of the section."""
    unsafe: str = ""
    """A cure that people find elsewhere, and why it is unsafe; empty if there is none."""
    messages: tuple[str, ...] = ()
    """The messages that lead here, with placeholders such as ``{dtype}``."""
    symptoms: tuple[str, ...] = ()
    """What people see and describe where no message is printed."""
    torch: str = ""
    """Which versions of torch raise it; empty if all supported versions do."""
    sources: tuple[str, ...] = ()
    """Addresses of reports and of documentation."""


@dataclass(frozen=True)
class Page:
    """A page that is not about one failure, such as a notebook."""

    title: str
    page: str


class Pattern(NamedTuple):
    """A message as a regular expression. Python and JavaScript read it alike."""

    code: str
    regex: str
    literal: int
    """How many characters have to be as they are written. More of them make a better match."""
    fragment: str
    """The longest run of those characters, in lower case: a text without it cannot match."""
    exact: str
    """The message in lower case if it has no placeholder, else empty."""
    general: bool
    """Whether it also has other causes, so that it counts only in a text about precision."""


@dataclass(frozen=True)
class Reference:
    """All failures and pages, and what finds them."""

    failures: dict[str, Failure]
    """By code."""
    patterns: tuple[Pattern, ...]
    pages: dict[str, Page]
    """By path."""
    subject_words: frozenset[str]
    """Words of which a message about precision has at least one, as `terms_of` gives them."""
    symptom_words: frozenset[str]
    """Further words of which a description without a message may have one instead."""
    synonyms: dict[str, str]
    """A word that people type, and the word that the index has for it."""
    index_data: dict[str, Any]

    @functools.cached_property
    def index(self) -> Any:
        """A lunr index of failures by code and pages by path. A message is found without it."""
        with needed_for("finding a text by its words"):
            import lunr.index

        return lunr.index.Index.load(self.index_data)


@functools.cache
def load_reference() -> Reference:
    """Read the reference that comes with the package."""
    file = resources.files("amp_lab.failures").joinpath("reference.json")
    return reference_from(json.loads(file.read_text(encoding="utf-8")))


def reference_from(data: dict[str, Any]) -> Reference:
    """Make the reference from the data of `reference.json`."""
    failures = {}
    for row in data["failures"]:
        failure = Failure(**{name: _frozen(value) for name, value in row.items()})
        failures[failure.code] = failure
    return Reference(
        failures=failures,
        patterns=tuple(Pattern(**row) for row in data["patterns"]),
        pages={row["page"]: Page(**row) for row in data["pages"]},
        subject_words=frozenset(data["subject_words"]),
        symptom_words=frozenset(data["symptom_words"]),
        synonyms=data["synonyms"],
        index_data=data["index"],
    )


def _frozen(value: Any) -> Any:
    """The value; a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value
