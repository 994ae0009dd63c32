"""Where do two runs of a model part? The first op whose difference rounding does not explain."""

from amp_lab.difference.result import Difference, RunComparison
from amp_lab.difference.runs import compare_runs, first_difference

__all__ = ["Difference", "RunComparison", "compare_runs", "first_difference"]
