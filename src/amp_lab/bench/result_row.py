"""A row of a benchmark: one workload in one precision on one rung, with its figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from amp_lab.core.estimates import Estimate, Ratio
from amp_lab.core.timing import Rounds
from amp_lab.core.timing_result import Comparison, Measurement

STATES = ("ok", "failed", "out of memory", "not run")
BASELINE = ("fp32", "eager")  # precision and rung that every row of a workload is compared with


@dataclass
class Row:
    """One workload in one precision on one rung."""

    workload: str
    size: str
    precision: str
    rung: str
    status: str  # one of `STATES`; only ``ok`` has figures that may be compared
    trusted: bool = False  # whether the machine was quiet, and the figures are possible
    reason: str = ""  # why it is not ok, or not trusted
    unit: str = ""
    items: int = 0  # how many of `unit` a step has
    samples_s: list[float] = field(default_factory=list)  # seconds of a step, by round
    rounds: int = 0  # in which all rungs of the workload took turns
    disturbed: int = 0  # those in which something else used the machine
    median_s: float | None = None
    iqr_s: float | None = None  # interquartile range of the samples
    speedup: float | None = None  # over fp32 eager: median of the ratios within each round
    speedup_interval: list[float] | None = None  # 95 % interval of it
    items_per_s: float | None = None
    peak_bytes: int | None = None  # most bytes in tensors; None where the device keeps no count
    flops: int | None = None  # counted for one eager step
    flops_per_s: float | None = None
    moved_bytes: int | None = None  # what the ops of the eager step read and write, counted
    least_bytes: int | None = None  # inputs, weights and optimizer state, see `limits.Count`
    floor_s: float | None = None  # the longer of FLOPs and least bytes at the measured limits
    share_of_limit: float | None = None  # `floor_s` over the median: 1 is as fast as the device can
    # Relative difference from fp32 eager, in the Euclidean norm: of the first loss when the
    # workload trains, else of the output.
    error: float | None = None
    progress: float | None = None  # fall of the loss in the first steps, over that in fp32 eager

    @property
    def title(self) -> str:
        """Workload and size."""
        return f"{self.workload} {self.size}"

    @property
    def setting(self) -> str:
        """Precision and rung."""
        return f"{self.precision} {self.rung}"

    @property
    def key(self) -> tuple[str, ...]:
        """Workload, size, precision and rung: rows of two results are compared if these agree."""
        return self.workload, self.size, self.precision, self.rung

    @property
    def is_baseline(self) -> bool:
        """Whether this row is fp32 eager, which the rows of its workload are compared with."""
        return (self.precision, self.rung) == BASELINE

    @property
    def milliseconds(self) -> Estimate:
        """The median time of a step in ms with its interval, for a row that has samples."""
        # `Comparison` computes the bootstrap interval; its only function gets the name "".
        samples = {"": tuple(self.samples_s)}
        comparison = Comparison(samples, self.disturbed, reason="")
        milliseconds = comparison.time_s("").times(1e3)
        return replace(milliseconds, trusted=self.trusted)

    @property
    def speedup_estimate(self) -> Ratio | None:
        """The speed-up over fp32 eager with its interval; None if fp32 eager was not timed."""
        if self.speedup is None or self.speedup_interval is None:
            return None
        low, high = self.speedup_interval
        return Ratio(self.speedup, (low, high), self.trusted)

    def distrust(self, reason: str) -> None:
        """Mark the figures as not to be trusted; an earlier reason is kept."""
        if self.trusted:
            self.trusted = False
            self.reason = reason

    def stop(self, status: str, reason: str) -> None:
        """Mark the row as one without a result: a status other than ``ok``, and the reason."""
        self.status = status
        self.reason = reason


def write_times(rows: Sequence[Row], timed: Rounds) -> None:
    """Write the times and speed-ups of all rounds so far into the rows of a workload."""
    rows_by_setting = {row.setting: row for row in rows if row.status == "ok"}
    comparison = timed.comparison(list(rows_by_setting))
    baseline = " ".join(BASELINE)  # the setting of fp32 eager
    for setting, row in rows_by_setting.items():
        row.trusted = comparison.trusted
        row.reason = comparison.reason
        row.rounds = len(timed.all)
        row.disturbed = comparison.disturbed
        _write_samples(row, comparison.samples_s[setting])
        if baseline in rows_by_setting:
            speedup = comparison.ratio(baseline, setting)
            row.speedup = speedup.median
            row.speedup_interval = list(speedup.interval)


def _write_samples(row: Row, samples_s: tuple[float, ...]) -> None:
    """Write the seconds of a step by round, their median and spread, and the rates into a row."""
    measurement = Measurement(samples_s, peak_bytes=None, reserved_bytes=None)
    row.samples_s = list(measurement.samples_s)
    row.median_s = measurement.median_s
    row.iqr_s = measurement.iqr_s
    row.items_per_s = row.items / measurement.median_s
    row.flops_per_s = quotient(row.flops, row.median_s)
    row.share_of_limit = quotient(row.floor_s, row.median_s)


def quotient(dividend: float | None, divisor: float | None) -> float | None:
    """The quotient of two figures; None if one of them is unknown or the divisor is 0."""
    if dividend is None or not divisor:
        return None
    return dividend / divisor
