"""The results of `measure` and `compare`: seconds of each call, as text and for JSON."""

import statistics
from dataclasses import dataclass

import numpy as np

from amp_lab.core.estimates import Estimate, Ratio, estimate_median


@dataclass(frozen=True)
class Measurement:
    """The result of `measure`: the time and the peak memory of one call of the function."""

    samples_s: tuple[float, ...]
    """Seconds of each repeat, in the order in which the repeats ran."""
    peak_bytes: int | None
    """Largest number of bytes in tensors at any moment, including tensors from before the call.
    None if the backend keeps no count, as on a CPU."""
    reserved_bytes: int | None
    """Largest number of bytes that the caching allocator reserved; at least `peak_bytes`."""

    @property
    def median_s(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the samples, in seconds: the spread of the middle half."""
        if len(self.samples_s) == 1:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return third - first

    def __str__(self) -> str:
        median = time_text(self.median_s)
        spread = time_text(self.iqr_s)
        text = f"{median} (IQR {spread}, {len(self.samples_s)} repeats)"
        if self.peak_bytes is None:
            return text
        return f"{text}, peak {self.peak_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: the time of one call of each function, in each round."""

    samples_s: dict[str, tuple[float, ...]]
    """By name, one value for each round. A trusted result leaves out the disturbed rounds."""
    disturbed: int
    """Number of rounds in which another program used the machine."""
    reason: str
    """Why you should not trust the result; empty if you can."""
    apart: bool = False
    """Whether cores were moved or far apart, as on a VM. Some ratios depend on their place."""

    @property
    def trusted(self) -> bool:
        """Whether enough rounds were undisturbed."""
        return not self.reason

    @property
    def rounds(self) -> int:
        """Number of rounds in the samples."""
        return len(next(iter(self.samples_s.values())))  # all functions have as many samples

    def median_s(self, name: str) -> float:
        """Median of one function's samples, in seconds."""
        return statistics.median(self.samples_s[name])

    def time_s(self, name: str) -> Estimate:
        """Return `median_s` with a bootstrap interval, as in `ratio`."""
        median, interval = estimate_median(np.array(self.samples_s[name]))
        return Estimate(median, interval, self.trusted)

    def ratio(self, name: str, to: str) -> Ratio:
        """Return the time of `name` divided by the time of `to`: 2 means `to` is twice as fast.

        The ratio is the median of the ratios within each round. Its bootstrap interval is seeded
        (Efron and Tibshirani 1993, percentile method). Raises `KeyError` for an unknown name.
        """
        ratios = np.array(self.samples_s[name]) / np.array(self.samples_s[to])
        median, interval = estimate_median(ratios)
        return Ratio(median, interval, self.trusted)

    def to_json(self) -> dict:
        """Return the samples in seconds, and whether you can trust them, for a JSON file."""
        return {
            "samples_s": {str(name): list(samples) for name, samples in self.samples_s.items()},
            "median_s": {str(name): self.median_s(name) for name in self.samples_s},
            "disturbed": self.disturbed,
            "trusted": self.trusted,
            "reason": self.reason,
            "apart": self.apart,
        }

    def __str__(self) -> str:
        """A line for each function, with the first one's time over its own: its speed-up."""
        names = list(self.samples_s)
        first = names[0]
        width = max(map(len, names))
        lines = []
        for name in names:
            line = f"{name:<{width}}  {time_text(self.median_s(name)):>8}"
            if name != first:
                line += f"  {self.ratio(first, name)}"
            lines.append(line)
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """Return the reasons why the times are uncertain; an empty list if there are none."""
        remarks = []
        if self.reason:
            remarks.append(f"not trusted: {self.reason}")
        if self.apart:
            remarks.append(
                "cores apart: the host of this VM moves its cores, so some ratios may be off"
            )
        return remarks


def time_text(seconds: float) -> str:
    """Seconds with three digits, in s from 1 s on, else in ms: ``1.5 s``, ``0.25 ms``."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"
