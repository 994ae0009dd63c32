"""The results of memory forecasts, one or several: as text, as a table, as JSON, as a figure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from amp_lab.core.precision import Precision
from amp_lab.core.report import Printed, Table


@dataclass(frozen=True, repr=False)
class ForecastTable(Printed):
    """Forecasts for one model side by side, a column each.

    A forecast has `column`, its heading, such as "bf16"; `parts`, the bytes in each row; `peak` in
    bytes; and `run`, a description of the step.
    """

    forecasts: tuple[Any, ...]
    memory_bytes: int | None = None
    largest: dict[str, int] = field(default_factory=dict)  # batch that fits, by column
    reserve: float = 0.0  # share of the memory that is left to the driver and to fragmentation
    failed: dict[str, str] = field(default_factory=dict)  # why there is no forecast, by column
    no_largest: dict[str, str] = field(default_factory=dict)  # why there is no batch, by column

    def __getitem__(self, column: str) -> Any:
        """The forecast of a column, such as "bf16 weights"; `KeyError` if there is none."""
        return {forecast.column: forecast for forecast in self.forecasts}[column]

    @property
    def spare(self) -> dict[str, int]:
        """By column, the bytes of usable memory that stay free; negative if a step needs more.

        The reserve is not usable. Without `memory_bytes` the values have no meaning.
        """
        return {forecast.column: self._usable - forecast.peak for forecast in self.forecasts}

    @property
    def _usable(self) -> int:
        """The memory in bytes without its reserve; 0 if no memory was given."""
        return int((self.memory_bytes or 0) * (1 - self.reserve))

    def _contents(self) -> dict[str, Any]:
        """The values for JSON; those of a memory size only if one was given."""
        contents: dict[str, Any] = {}
        contents["forecasts"] = [forecast._contents() for forecast in self.forecasts]
        if self.memory_bytes is not None:
            spare = self.spare
            contents["memory_bytes"] = self.memory_bytes
            contents["reserve"] = self.reserve
            contents["spare_bytes"] = spare
            contents["fits"] = {column: count >= 0 for column, count in spare.items()}
            contents["largest_batch"] = self.largest
            contents["no_largest_batch"] = self.no_largest
        contents["failed"] = self.failed
        return contents

    def _table(self) -> Table:
        """The printed table: a column for each forecast, a row for each part."""
        first = self.forecasts[0]
        shapes = ", ".join("x".join(map(str, shape)) for shape in first.input_shapes)
        columns = [forecast.column for forecast in self.forecasts]
        unit, unit_name = self._unit()
        rows = []
        for label in first.parts:
            counts = [forecast.parts[label] for forecast in self.forecasts]
            rows.append(bytes_row(label, counts, unit))
        return Table(
            [f"in {unit_name}", *columns],
            rows,
            caption=f"{first.model}, input {shapes}, {first.run}",
            facts=list(self._facts()),
            foot=list(self._foot(unit)),
            right=range(1, 1 + len(columns)),
        )

    def _unit(self) -> tuple[int, str]:
        """The bytes and the name of one unit for all cells, so that they can be compared."""
        if max(self._largest_cells()) >= 10 * 2**30:  # in MiB it would have five digits
            return 2**30, "GiB"
        return 2**20, "MiB"

    def _largest_cells(self) -> list[int]:
        """Numbers of bytes, among them the largest one in the table."""
        return [forecast.peak for forecast in self.forecasts]

    def _foot(self, unit: int) -> Iterator[list[str]]:
        """The rows below the parts: the peak in `unit` bytes, and the largest batch."""
        yield bytes_row("peak", [forecast.peak for forecast in self.forecasts], unit)
        if self.memory_bytes is None or not self.largest:
            return
        row = [f"largest batch in {memory_text(self.memory_bytes)}"]
        for forecast in self.forecasts:
            batch = self.largest.get(forecast.column)
            row.append("-" if batch is None else f"{batch:,}")
        yield row

    def _facts(self) -> Iterator[str]:
        """The sentences below the table."""
        for column, error in self.failed.items():
            yield f"No forecast for {column}: {error}."
        if self.memory_bytes is not None:
            yield from self._fit_facts(memory_text(self.memory_bytes))
        for forecast in self.forecasts:
            largest = forecast.largest_at_peak
            if largest:
                yield f"{forecast.column}: the largest tensor at the peak is {largest}."

    def _fit_facts(self, memory: str) -> Iterator[str]:
        """Sentences on what fits into the memory, and on why there is no largest batch."""
        for column, spare in self.spare.items():
            if spare >= 0:
                yield f"{column}: fits, with about {amount(spare)} to spare."
            else:
                yield f"{column}: does not fit, {amount(-spare)} too large."
        for reason, columns in columns_by_text(self.no_largest).items():
            yield f"The largest batch in {memory} is unknown for {columns}: {reason}."
        if self.reserve:
            share = f"{100 * self.reserve:.3g} % of the {memory}"
            yield f"The forecast reserves {share} for the driver and for fragmentation."


@dataclass(frozen=True, repr=False)
class MemoryForecast(Printed):
    """The memory of one training step in bytes, as `forecast_memory` returns it.

    Weights, gradients and the other parts do not add up to the peak, because they are not all in
    memory at the same time. The numbers in `at_peak` add up to the peak.
    """

    model: str  # the name of the model's class
    input_shapes: tuple[tuple[int, ...], ...]  # with the batch dimension
    device_type: str  # such as "cuda"
    precision: Precision  # of the step
    optimizer_name: str  # such as "adam"
    weights: int  # bytes of all parameters, as stored
    buffers: int  # such as running means
    gradients: int  # bytes of all gradients before the optimizer's step
    optimizer: int  # bytes of the state that the optimizer keeps from step to step
    activations: int
    """Saved activations: the tensors that autograd keeps for the backward pass, at the end of the
    forward pass. They include inputs that the backward pass needs. Each storage is counted
    once. Parameters and their casts are not counted."""
    cast_cache: int  # bytes of weights in low precision that autocast keeps until its block ends
    cast_kept: int  # bytes of `cast_cache` that autograd keeps after the block
    phases: dict[str, int]  # peak bytes in "forward", "backward" and "optimizer"
    at_peak: dict[str, int]  # bytes at the peak, by one of `storage_ledger.KINDS`
    caveats: tuple[str, ...] = ()  # reasons why the forecast may be wrong, as sentences
    fsdp_ranks: int = 1  # number of FSDP2 ranks; the forecast is for each rank
    largest_at_peak: str = field(default="", compare=False)
    """A description of the largest activation or temporary at the peak; "" if all are small."""

    @property
    def peak(self) -> int:
        """The peak of the step in bytes: the largest of `phases`."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase of the peak: "forward", "backward" or "optimizer"."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def column(self) -> str:
        """The heading of the column in a table: the precision, such as "bf16"."""
        return str(self.precision)

    @property
    def run(self) -> str:
        """A description of the forecast step."""
        return f"one training step with {self.optimizer_name} on {self.device_type}"

    @property
    def parts(self) -> dict[str, int]:
        """The bytes in each row of the table, by its label."""
        return {
            "weights": self.weights,
            "buffers": self.buffers,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "activations kept for backward": self.activations,
            "weights cast by autocast": self.cast_cache,
            "weight casts alive at the peak": self.at_peak["cast_cache"],
            "temporaries at the peak": self.at_peak["temporaries"],
        }

    def _contents(self) -> dict[str, Any]:
        """The values for JSON."""
        return {**vars(self), "peak": self.peak, "peak_phase": self.peak_phase}

    def _table(self) -> Table:
        """The printed table, with one column."""
        return MemoryTable((self,))._table()


@dataclass(frozen=True, repr=False)
class MemoryTable(ForecastTable):
    """Forecasts of a training step in several precisions; made by `compare_memory`."""

    forecasts: tuple[MemoryForecast, ...]
    # Batches and the peak at each, by precision, for the plot.
    curves: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    fixed_shapes: tuple[tuple[int, ...], ...] = ()  # of inputs that do not grow with the batch
    loss_left_out: str | None = None  # why the forecast, made without a loss, may be too low
    ways_out: tuple[str, ...] = ()  # how to make the step smaller, if no precision fits

    def plot(self) -> Any:
        """Axes of matplotlib: memory against batch for each precision, and `memory_bytes`."""
        from amp_lab import plots  # matplotlib only where a figure is drawn

        return plots.memory_against_batch(self.curves, self.memory_bytes)

    def _contents(self) -> dict[str, Any]:
        """The values for JSON."""
        more = {"loss_left_out": self.loss_left_out, "ways_out": list(self.ways_out)}
        return super()._contents() | more

    def _table(self) -> Table:
        """The printed table, with the ways to make the step smaller below it."""
        return replace(super()._table(), advice=self.ways_out)

    def _foot(self, unit: int) -> Iterator[list[str]]:
        """The peak, the phase that reaches it, and the largest batch."""
        peak_row, *other_rows = super()._foot(unit)
        yield ["peak of the step", *peak_row[1:]]
        yield ["reached in", *(forecast.peak_phase for forecast in self.forecasts)]
        yield from other_rows

    def _facts(self) -> Iterator[str]:
        """The sentences below the table."""
        first = self.forecasts[0]
        if self.loss_left_out:
            yield f"The forecast may be too low: {self.loss_left_out}."
        yield from super()._facts()
        yield "Not all parts are in memory at the same time, so they do not add up to the peak."
        if first.gradients:
            yield self._data_parallel_fact()
        yield "The peak does not include the memory of the driver and its libraries."
        yield from first.caveats

    def _data_parallel_fact(self) -> str:
        """A sentence on the memory that DDP would add, or on the ranks of FSDP2 in the forecast."""
        first = self.forecasts[0]
        if first.fsdp_ranks > 1:
            ranks = f"each of {first.fsdp_ranks} ranks of FSDP2"
            return f"The forecast is for {ranks}, with the kernels of a CPU in one stream."
        unit, unit_name = self._unit()
        gradients = f"{in_unit(first.gradients, unit)} {unit_name}"
        buckets = f"buckets as large as the gradients, {gradients}"
        return f"DDP adds {buckets}, unless you set gradient_as_bucket_view=True."

    def _fit_facts(self, memory: str) -> Iterator[str]:
        """Sentences on what fits into the memory, and on the inputs of the largest batch."""
        yield from super()._fit_facts(memory)
        if self.fixed_shapes and self.largest:
            shapes = ", ".join(map(str, self.fixed_shapes))
            yield f"These inputs have the same shape for every batch size: {shapes}."


def bytes_row(label: str, counts: Iterable[int | None], unit: int) -> list[str]:
    """A row of a table: its label, and numbers of bytes in `unit` bytes; "-" for None."""
    row = [label]
    for count in counts:
        row.append("-" if count is None else in_unit(count, unit))
    return row


def columns_by_text(texts: dict[str, str]) -> dict[str, str]:
    """For each different text, the columns with this text, joined: ``fp32, bf16 weights``.

    `texts` has the text of each column.
    """
    columns: dict[str, list[str]] = {}
    for column, text in texts.items():
        columns.setdefault(text, []).append(column)
    return {text: ", ".join(names) for text, names in columns.items()}


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
