"""What the memory forecasts return: one or several, as text, as a table, as JSON, as a figure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from amp_lab.core.precision import Precision
from amp_lab.core.report import Printed, Table

# The label of each row of the table, and the bytes of a forecast that it shows.
_ROWS: dict[str, Callable[["MemoryForecast"], int]] = {
    "weights": lambda f: f.weights,
    "buffers": lambda f: f.buffers,
    "gradients": lambda f: f.gradients,
    "optimizer state": lambda f: f.optimizer,
    "activations kept for backward": lambda f: f.activations,
    "weights cast by autocast": lambda f: f.cast_cache,
    "weight casts alive at the peak": lambda f: f.at_peak["cast_cache"],
    "temporaries at the peak": lambda f: f.at_peak["temporaries"],
    "peak of the step": lambda f: f.peak,  # the first row below the table's rule
}


@dataclass(frozen=True, repr=False)
class MemoryForecast(Printed):
    """The memory of one training step, in bytes; made by `forecast_memory`.

    Weights, gradients and so on do not add up to the peak, since they are not all there at one
    time. The numbers in `at_peak` do.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    device_type: str
    precision: Precision
    optimizer_name: str
    weights: int
    buffers: int
    gradients: int  # of all parameters, each in its dtype, before the optimizer's step
    optimizer: int  # state that the optimizer keeps from step to step
    activations: int
    """What autograd keeps for the backward pass when the forward pass ends, with inputs that it
    needs. Each storage counts once; parameters and casts of them do not count."""
    cast_cache: int  # copies of weights in low precision, which live while the autocast block lasts
    cast_kept: int  # bytes of `cast_cache` that live on after the block, kept by autograd
    phases: dict[str, int]  # the most in use at one time in "forward", "backward" and "optimizer"
    at_peak: dict[str, int]  # bytes in use at the peak by kind, one of `storage_ledger.KINDS`
    caveats: tuple[str, ...] = ()  # sentences on what the forecast may be wrong about
    fsdp_ranks: int = 1  # of FSDP2; the forecast is the memory of each rank
    largest_at_peak: str = field(default="", compare=False)
    """The largest activation or temporary at the peak, in words; "" if it is small."""

    @property
    def peak(self) -> int:
        """The most bytes in use at one time in the step: the largest of `phases`."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak is reached: "forward", "backward" or "optimizer"."""
        return max(self.phases, key=self.phases.__getitem__)

    def _contents(self) -> dict[str, Any]:
        return {**vars(self), "peak": self.peak, "peak_phase": self.peak_phase}

    def _table(self) -> Table:
        return MemoryTable((self,))._table()


@dataclass(frozen=True, repr=False)
class MemoryTable(Printed):
    """Forecasts for one model side by side; made by `compare_memory`."""

    forecasts: tuple[MemoryForecast, ...]
    memory_bytes: int | None = None
    largest: dict[str, int] = field(default_factory=dict)  # the largest batch, by precision
    # Batches and the peak at each, by precision, for the plot.
    curves: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    reserve: float = 0.0  # share of the memory that is left to the driver and to fragmentation
    not_extrapolated: str = ""  # why there is no largest batch
    fixed_shapes: tuple[tuple[int, ...], ...] = ()  # of inputs that do not grow with the batch
    failed: dict[str, str] = field(default_factory=dict)  # why a precision has no forecast
    loss_left_out: str | None = None  # why the forecast, made without a loss, is too low
    ways_out: tuple[str, ...] = ()  # how to make the step smaller, if no precision fits

    @property
    def spare(self) -> dict[str, int]:
        """By precision, the bytes that the step leaves free; below 0 if it does not fit.

        The reserve does not count as free. Without `memory_bytes` the values have no meaning.
        """
        usable = int((self.memory_bytes or 0) * (1 - self.reserve))
        return {str(forecast.precision): usable - forecast.peak for forecast in self.forecasts}

    def __getitem__(self, precision: str) -> MemoryForecast:
        """The forecast in a precision, such as "bf16"."""
        return next(forecast for forecast in self.forecasts if forecast.precision == precision)

    def plot(self) -> Any:
        """Axes of matplotlib: memory against batch for each precision, and `memory_bytes`."""
        from amp_lab import plots  # matplotlib only where a figure is drawn

        return plots.memory_against_batch(self.curves, self.memory_bytes)

    def _contents(self) -> dict[str, Any]:
        contents: dict[str, Any] = {}
        contents["forecasts"] = [forecast._contents() for forecast in self.forecasts]
        if self.memory_bytes is not None:
            spare = self.spare
            contents["memory_bytes"] = self.memory_bytes
            contents["reserve"] = self.reserve
            contents["spare_bytes"] = spare
            contents["fits"] = {precision: count >= 0 for precision, count in spare.items()}
            contents["largest_batch"] = self.largest
            contents["not_extrapolated"] = self.not_extrapolated
        contents["failed"] = self.failed
        contents["loss_left_out"] = self.loss_left_out
        contents["ways_out"] = list(self.ways_out)
        return contents

    def _table(self) -> Table:
        first = self.forecasts[0]
        shapes = shapes_text(first.input_shapes)
        step = f"one training step with {first.optimizer_name} on {first.device_type}"
        precisions = [str(forecast.precision) for forecast in self.forecasts]
        unit, unit_name = self._unit()
        *rows, peaks = self._rows(unit)
        return Table(
            [f"in {unit_name}", *precisions],
            rows,
            caption=f"{first.model}, input {shapes}, {step}",
            facts=list(self._facts()),
            advice=self.ways_out,
            foot=[peaks, *self._foot()],
            right=range(1, 1 + len(precisions)),
        )

    def _unit(self) -> tuple[int, str]:
        """The bytes and the name of the unit of the table's cells."""
        return unit_for_all(forecast.peak for forecast in self.forecasts)

    def _rows(self, unit: int) -> list[list[str]]:
        """A row for each of `_ROWS`, in `unit` bytes; the last one is the peak."""
        rows = []
        for label, bytes_of in _ROWS.items():
            cells = [in_unit(bytes_of(forecast), unit) for forecast in self.forecasts]
            rows.append([label, *cells])
        return rows

    def _foot(self) -> Iterator[list[str]]:
        """The rows below the peak: the phase that reaches it, and the largest batch."""
        yield ["reached in", *(forecast.peak_phase for forecast in self.forecasts)]
        if self.memory_bytes is None:
            return
        batches = [self._largest_batch_text(forecast.precision) for forecast in self.forecasts]
        yield [f"largest batch in {memory_text(self.memory_bytes)}", *batches]

    def _largest_batch_text(self, precision: str) -> str:
        if precision not in self.largest:
            return "cannot tell"
        return f"{self.largest[precision]:,}"

    def _facts(self) -> Iterator[str]:
        """The sentences below the table."""
        first = self.forecasts[0]
        for precision, error in self.failed.items():
            yield f"No forecast in {precision}: {error}."
        if self.loss_left_out:
            yield f"Too low: {self.loss_left_out}."
        yield from self._fit_facts()
        for forecast in self.forecasts:
            yield from largest_line(str(forecast.precision), forecast.largest_at_peak)
        yield "The parts are not all there at one time, so they do not add up to the peak."
        if first.gradients:
            yield self._data_parallel_fact()
        yield "Not counted: what the driver and its libraries take for themselves."
        yield from first.caveats

    def _data_parallel_fact(self) -> str:
        """A sentence on the memory that DDP would add, or on the ranks of FSDP2 in the forecast."""
        first = self.forecasts[0]
        if first.fsdp_ranks > 1:
            ranks = f"each of {first.fsdp_ranks} ranks of FSDP2"
            return f"Of {ranks}, forecast with the CPU's kernels, in one stream."
        unit, unit_name = self._unit()
        gradients = f"{in_unit(first.gradients, unit)} {unit_name}"
        buckets = f"buckets as large as the gradients, {gradients}"
        return f"DDP adds {buckets}; none with gradient_as_bucket_view=True."

    def _fit_facts(self) -> Iterator[str]:
        """Sentences on whether the given batch fits, and on what limits the largest batch."""
        if self.memory_bytes is not None:
            for precision, spare in self.spare.items():
                if spare >= 0:
                    yield f"{precision}: fits, about {amount(spare)} to spare."
                else:
                    yield f"{precision}: does not fit, {amount(-spare)} too much."
            if self.reserve:
                yield reserve_line(self.memory_bytes, self.reserve)
        if self.not_extrapolated:
            reason = f"The largest batch cannot be extrapolated: {self.not_extrapolated}."
            yield f"{reason} The forecast is for the batch that was given."
        elif self.fixed_shapes and self.memory_bytes is not None:
            shapes = ", ".join(map(str, self.fixed_shapes))
            yield f"Held as they are for every batch: inputs of shape {shapes}."


def shapes_text(shapes: Iterable[tuple[int, ...]]) -> str:
    """The shapes of inputs in a caption: ``2x3x64x64, 2x10``."""
    texts = []
    for shape in shapes:
        texts.append("x".join(map(str, shape)))
    return ", ".join(texts)


def reserve_line(memory_bytes: int, reserve: float) -> str:
    """A line on `reserve`, the share of the memory, from 0 to 1, that is held in reserve."""
    share = f"Of the {memory_text(memory_bytes)}, {100 * reserve:.3g} %"
    return f"{share} are held in reserve for the driver and for fragmentation."


def largest_line(name: str, largest: str) -> Iterator[str]:
    """A line on the largest tensor at the peak, if there is one.

    `name` is the precision or way of the forecast, and `largest` its text on the tensor, or "".
    """
    if largest:
        yield f"{name}: the largest tensor at the peak is {largest}."


def unit_for_all(counts: Iterable[int]) -> tuple[int, str]:
    """The bytes and the name of one unit for all cells, for these numbers of bytes: MiB or GiB."""
    if max(counts) >= 10 * 2**30:  # in MiB it would have five digits
        return 2**30, "GiB"
    return 2**20, "MiB"


def amount(count: int) -> str:
    """A number of bytes in about two digits: ``4.1 GiB``, ``130 MiB``."""
    unit = 2**20
    name = "MiB"
    if count >= 2**30:
        unit = 2**30
        name = "GiB"
    value = count / unit
    if count < 10 * unit:
        return f"{value:.2g} {name}"
    return f"{value:,.0f} {name}"


def in_unit(count: int, unit: int) -> str:
    """A number of bytes in this unit, in about three digits, without the unit's name."""
    value = count / unit
    if value >= 100 or not count:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def memory_text(count: int) -> str:
    """The memory of a device, in a unit in which it is a whole number: ``24 GiB``, ``80 GB``.

    If there is no such unit, it is rounded, to GiB or MiB.
    """
    for name, unit in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6)):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.3g} MiB"
