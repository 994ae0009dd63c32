"""The results of memory forecasts for inference: as text, as a table and as JSON."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from amp_lab.core.report import Printed, Table
from amp_lab.tracing.kv_cache_result import CacheForecast, cache_rows
from amp_lab.tracing.memory_result import (
    amount,
    in_unit,
    largest_line,
    memory_text,
    reserve_line,
    shapes_text,
    unit_for_all,
)

_ATTRIBUTES_BY_LABEL = {
    "weights": "weights",
    "buffers": "buffers",
    "inputs": "inputs",
    "weight casts at the peak": "weight_casts",
    "temporaries at the peak": "temporaries",
}


@dataclass(frozen=True, repr=False)
class InferenceForecast(Printed):
    """The memory of one forward pass in bytes; made by `forecast_inference`.

    Each part is what is in use at the peak. The parts add up to `peak`.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    device_type: str
    way: str  # "fp32", "bf16 autocast", "bf16 cast", "int8"
    weights: int
    buffers: int
    inputs: int
    weight_casts: int  # copies of weights that autocast made, alive at the peak
    temporaries: int  # activations, and temporary memory of kernels
    kept_under_no_grad: int = 0  # how much higher the peak is under `torch.no_grad`
    cache: CacheForecast | None = None  # the KV cache in the output, if there is one
    decisions: str = ""  # remark on decisions that were taken from a run on the CPU
    largest_at_peak: str = field(default="", compare=False)
    """The largest activation or temporary at the peak, if it is large."""

    @property
    def peak(self) -> int:
        """The most bytes that are in use at one time."""
        return self.weights + self.buffers + self.inputs + self.weight_casts + self.temporaries

    def with_smaller_weights(self, way: str, saved: int) -> "InferenceForecast":
        """The forecast of a way that differs only in weights that take `saved` bytes less."""
        weights = self.weights - saved
        # The text on the largest tensor has its share of the peak, which is another one here.
        return dataclasses.replace(self, way=way, weights=weights, largest_at_peak="")

    def _contents(self) -> dict[str, Any]:
        """The values for JSON."""
        contents = {**vars(self), "peak": self.peak}
        if self.cache is not None:
            contents["cache"] = {**vars(self.cache), "per_sequence": self.cache.per_sequence}
        return contents

    def _table(self) -> Table:
        return InferenceTable((self,))._table()

    @property
    def weights_and_cache(self) -> int | None:
        """Bytes of the weights plus the KV cache for the tokens that were asked for, if any."""
        if self.cache is None or self.cache.nbytes_asked is None:
            return None
        return self.weights + self.cache.nbytes_asked


@dataclass(frozen=True, repr=False)
class InferenceTable(Printed):
    """Forecasts for one model side by side; made by `inference_table`."""

    forecasts: tuple[InferenceForecast, ...]
    memory_bytes: int | None = None
    largest: dict[str, int] = field(default_factory=dict)  # batch that fits, by way
    reserve: float = 0.0  # share of the memory that is left to the driver and to fragmentation
    failed: dict[str, str] = field(default_factory=dict)  # why there is no forecast, by way
    no_largest: dict[str, str] = field(default_factory=dict)  # why there is no batch, by way
    tokens: int | None = None  # for each sequence; the user asked for the KV cache of so many
    places: int | None = None  # the most positions, so tokens, that the model's config allows

    def __getitem__(self, way: str) -> InferenceForecast:
        """The forecast of a way, such as "bf16 cast"."""
        return next(forecast for forecast in self.forecasts if forecast.way == way)

    @property
    def spare(self) -> dict[str, int]:
        """By way, the bytes of usable memory that a pass leaves free; negative if it needs more.

        Without `memory_bytes` the values have no meaning.
        """
        return {forecast.way: self._usable - forecast.peak for forecast in self.forecasts}

    @property
    def _usable(self) -> int:
        """The memory in bytes without its reserve; 0 if no memory was given."""
        return int((self.memory_bytes or 0) * (1 - self.reserve))

    def _contents(self) -> dict[str, Any]:
        """The values for JSON; those of a memory size only if one was given."""
        contents: dict[str, Any] = {}
        contents["forecasts"] = [forecast._contents() for forecast in self.forecasts]
        if self.memory_bytes is not None:
            contents["memory_bytes"] = self.memory_bytes
            contents["reserve"] = self.reserve
            contents["spare_bytes"] = self.spare
            contents["largest_batch"] = self.largest
            contents["no_largest_batch"] = self.no_largest
        contents["failed"] = self.failed
        return contents

    def _table(self) -> Table:
        first = self.forecasts[0]
        shapes = shapes_text(first.input_shapes)
        forward = f"one forward pass under inference_mode on {first.device_type}"
        ways = [forecast.way for forecast in self.forecasts]
        peaks = [forecast.peak for forecast in self.forecasts]
        # One unit for all cells, so that they can be compared at a glance.
        # A forecast without a cache counts as 0, which is never the largest.
        with_cache = [forecast.weights_and_cache or 0 for forecast in self.forecasts]
        unit, unit_name = unit_for_all([*peaks, *with_cache])
        return Table(
            [f"in {unit_name}", *ways],
            self._rows(unit),
            caption=f"{first.model}, input {shapes}, {forward}",
            facts=list(self._facts()),
            foot=list(self._foot(unit)),
            right=range(1, 1 + len(ways)),
        )

    def _rows(self, unit: int) -> list[list[str]]:
        """A row for each part of the peak, with a cell for each way; sizes are in `unit` bytes."""
        rows = []
        for label, attribute in _ATTRIBUTES_BY_LABEL.items():
            cells = [in_unit(getattr(forecast, attribute), unit) for forecast in self.forecasts]
            rows.append([label, *cells])
        return rows

    def _foot(self, unit: int) -> Iterator[list[str]]:
        """The rows below the parts: peak, largest batch and KV cache; sizes are in `unit` bytes."""
        peaks = [in_unit(forecast.peak, unit) for forecast in self.forecasts]
        yield ["peak", *peaks]
        if self.memory_bytes is not None and self.largest:
            batches = [self._largest_text(forecast.way) for forecast in self.forecasts]
            yield [f"largest batch in {memory_text(self.memory_bytes)}", *batches]
        weights = [forecast.weights for forecast in self.forecasts]
        caches = [forecast.cache for forecast in self.forecasts]
        yield from cache_rows(caches, weights, unit)

    def _largest_text(self, way: str) -> str:
        """The cell with the largest batch of a way; "-" if there is none for it."""
        if way not in self.largest:
            return "-"
        return f"{self.largest[way]:,}"

    def _facts(self) -> Iterator[str]:
        """The sentences below the table."""
        for way, error in self.failed.items():
            yield f"No forecast for {way}: {error}."
        yield from self._fit_facts()
        for forecast in self.forecasts:
            yield from largest_line(forecast.way, forecast.largest_at_peak)
        for forecast in self.forecasts:
            if forecast.kept_under_no_grad:
                extra = amount(forecast.kept_under_no_grad)
                yield (
                    f"{forecast.way}: under no_grad instead of inference_mode, autocast keeps its "
                    f"casts of weights until its block ends, and the peak is {extra} higher."
                )
        if any(forecast.way.startswith("int") for forecast in self.forecasts):
            yield (
                "int8 and int4: the weights of linear layers as torchao stores them, all else as "
                "cast. What a kernel takes to unpack them is not counted."
            )
        if self.forecasts[0].decisions:
            yield self.forecasts[0].decisions
        yield from self._cache_facts()

    def _fit_facts(self) -> Iterator[str]:
        """Sentences on what does not fit, and on why there is no largest batch."""
        if self.memory_bytes is None:
            return
        for way, spare in self.spare.items():
            if spare < 0:
                yield f"{way}: does not fit, {amount(-spare)} too much."
        for forecast in self.forecasts:
            # Without a KV cache for `tokens` this is negative, and nothing is said.
            excess = (forecast.weights_and_cache or 0) - self._usable
            if excess > 0:
                parts = f"weights and the KV cache of {self.tokens:,} tokens"
                yield f"{forecast.way}: {parts} do not fit, {amount(excess)} too much."
        for reason, ways in _ways_by_text(self.no_largest).items():
            batch = f"The largest batch in {memory_text(self.memory_bytes)}"
            yield f"{batch} for {ways}: cannot tell: {reason}."
        if self.reserve:
            yield reserve_line(self.memory_bytes, self.reserve)

    def _cache_facts(self) -> Iterator[str]:
        """Sentences on the KV cache, equal ones once for their ways, and on what is left out."""
        sentences_by_way = {}
        for forecast in self.forecasts:
            if forecast.cache is not None:
                sentences_by_way[forecast.way] = forecast.cache.sentences
        if not sentences_by_way:
            if self.tokens is not None:
                yield f"The output holds no KV cache: nothing is said of {self.tokens:,} tokens."
            yield "Not counted: a cache of keys and values, and what the driver takes for itself."
            return
        ways_by_sentences = _ways_by_text(sentences_by_way)
        for sentences, ways in ways_by_sentences.items():
            if len(ways_by_sentences) == 1:  # true of all ways, so none is named
                yield sentences
            else:
                yield f"{ways}: {sentences}"
        if self.tokens and self.places and self.tokens > self.places:
            limit = f"max_position_embeddings of the model's config, {self.places:,}"
            yield f"{self.tokens:,} tokens are more than {limit}."
        yield "The KV cache of the input is counted among the temporaries."
        yield "Not counted: what the driver takes for itself."


def _ways_by_text(texts: dict[str, str]) -> dict[str, str]:
    """For each different text, the ways that have it, joined: ``fp32, bf16 cast``.

    `texts` has the text of each way.
    """
    ways: dict[str, list[str]] = {}
    for way, text in texts.items():
        ways.setdefault(text, []).append(way)
    return {text: ", ".join(names) for text, names in ways.items()}
