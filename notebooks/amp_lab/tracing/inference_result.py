"""Forecasts of the memory of inference: as text, as a table and as JSON."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from amp_lab.report import Printed, Table
from amp_lab.tracing.kv_cache_result import CacheForecast, cache_rows
from amp_lab.tracing.memory_result import amount, in_unit, largest_lines, memory_text

_ROWS = {
    "weights": "weights",
    "buffers": "buffers",
    "inputs": "inputs",
    "weight casts at the peak": "weight_casts",
    "temporaries at the peak": "temporaries",
}


@dataclass(frozen=True, repr=False)
class InferenceForecast(Printed):
    """What one forward pass takes, in bytes; made by `forecast_inference`.

    The parts are those at the peak, and add up to it.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    device_type: str
    way: str  # "fp32", "bf16 autocast", "bf16 cast", "int8"
    weights: int
    buffers: int
    inputs: int
    weight_casts: int  # copies of weights that autocast made, alive at the peak
    temporaries: int  # activations, and what kernels take
    kept_under_no_grad: int = 0  # how much higher the peak is under `torch.no_grad`
    cache: CacheForecast | None = None  # the KV cache in the output, if there is one
    decisions: str = ""  # what to say if it took decisions of a run on the CPU
    largest_at_peak: str = field(default="", compare=False)
    """The largest activation or temporary then, if it is large."""

    @property
    def peak(self) -> int:
        """The most that is in use at one time."""
        return self.weights + self.buffers + self.inputs + self.weight_casts + self.temporaries

    def with_smaller_weights(self, way: str, saved: int) -> "InferenceForecast":
        """The same with weights that take `saved` bytes less."""
        smaller = dataclasses.replace(self, way=way, weights=self.weights - saved)
        return dataclasses.replace(smaller, largest_at_peak="")

    def _contents(self) -> dict[str, Any]:
        contents = {**vars(self), "peak": self.peak}
        if self.cache is not None:
            contents["cache"] = {**vars(self.cache), "per_sequence": self.cache.per_sequence}
        return contents

    def _table(self) -> Table:
        return InferenceTable((self,))._table()

    @property
    def weights_and_cache(self) -> int | None:
        """Bytes of the weights, and of the KV cache for the tokens that were asked for."""
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
    failed: dict[str, str] = field(default_factory=dict)  # why there is none, by way
    no_largest: dict[str, str] = field(default_factory=dict)  # why there is no batch, by way
    tokens: int | None = None  # of each sequence, for whose KV cache it was asked
    places: int | None = None  # the most tokens that the model's config has places for

    def __getitem__(self, way: str) -> InferenceForecast:
        return next(forecast for forecast in self.forecasts if forecast.way == way)

    @property
    def spare(self) -> dict[str, int]:
        """Bytes that a pass leaves of the memory without its reserve; below 0 if it is short."""
        return {forecast.way: self._usable - forecast.peak for forecast in self.forecasts}

    @property
    def _usable(self) -> int:
        return int((self.memory_bytes or 0) * (1 - self.reserve))

    def _contents(self) -> dict[str, Any]:
        contents: dict[str, Any] = {"forecasts": [f._contents() for f in self.forecasts]}
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
        shapes = ", ".join("x".join(map(str, shape)) for shape in first.input_shapes)
        most = max(max(f.peak, f.weights_and_cache or 0) for f in self.forecasts)
        is_large = most >= 10 * 2**30
        unit, name = (2**30, "GiB") if is_large else (2**20, "MiB")
        rows = []
        for label, attribute in _ROWS.items():
            cells = [in_unit(getattr(forecast, attribute), unit) for forecast in self.forecasts]
            rows.append([label, *cells])
        foot = [["peak", *(in_unit(forecast.peak, unit) for forecast in self.forecasts)]]
        if self.memory_bytes is not None and self.largest:
            counts = [self._largest_text(forecast.way) for forecast in self.forecasts]
            foot.append([f"largest batch in {memory_text(self.memory_bytes)}", *counts])
        weights = [forecast.weights for forecast in self.forecasts]
        foot += cache_rows([forecast.cache for forecast in self.forecasts], weights, unit)
        return Table(
            [f"in {name}", *(forecast.way for forecast in self.forecasts)],
            rows,
            caption=f"{first.model}, input {shapes}, one forward pass under inference_mode on "
            f"{first.device_type}",
            facts=[*self._facts()],
            foot=foot,
            right=range(1, 1 + len(self.forecasts)),
        )

    def _largest_text(self, way: str) -> str:
        return f"{self.largest[way]:,}" if way in self.largest else "-"

    def _facts(self) -> Iterator[str]:
        for way, error in self.failed.items():
            yield f"No forecast for {way}: {error}."
        yield from self._fits()
        yield from largest_lines((f.way, f.largest_at_peak) for f in self.forecasts)
        for forecast in self.forecasts:
            if forecast.kept_under_no_grad:
                more = amount(forecast.kept_under_no_grad)
                yield (
                    f"{forecast.way}: under no_grad instead of inference_mode, autocast keeps its "
                    f"casts of weights until its block ends, and the peak is {more} higher."
                )
        if any(forecast.way.startswith("int") for forecast in self.forecasts):
            yield (
                "int8 and int4: the weights of linear layers as torchao stores them, all else as "
                "cast. What a kernel takes to unpack them is not counted."
            )
        if self.forecasts[0].decisions:
            yield self.forecasts[0].decisions
        yield from self._facts_of_the_cache()

    def _fits(self) -> Iterator[str]:
        """What does not fit into the memory, and what cannot be told of other batches."""
        if self.memory_bytes is None:
            return
        for way, spare in self.spare.items():
            if spare < 0:
                yield f"{way}: does not fit, {amount(-spare)} too much."
        for forecast in self.forecasts:
            over = (forecast.weights_and_cache or 0) - self._usable
            if over > 0:
                what = f"weights and the KV cache of {self.tokens:,} tokens"
                yield f"{forecast.way}: {what} do not fit, {amount(over)} too much."
        for reason, ways in _ways_by_text(self.no_largest).items():
            batch = f"The largest batch in {memory_text(self.memory_bytes)}"
            yield f"{batch} for {ways}: cannot tell: {reason}."
        if self.reserve:
            share = f"Of the {memory_text(self.memory_bytes)}, {100 * self.reserve:.3g} %"
            yield f"{share} are held in reserve for the driver and for fragmentation."

    def _facts_of_the_cache(self) -> Iterator[str]:
        found = {f.way: f.cache.sentences for f in self.forecasts if f.cache is not None}
        if not found:
            if self.tokens is not None:
                yield f"The output holds no KV cache: nothing is said of {self.tokens:,} tokens."
            yield "Not counted: a cache of keys and values, and what the driver takes for itself."
            return
        for sentences, ways in _ways_by_text(found).items():
            is_of_all = len(set(found.values())) == 1
            yield sentences if is_of_all else f"{ways}: {sentences}"
        if self.tokens and self.places and self.tokens > self.places:
            limit = f"max_position_embeddings of the model's config, {self.places:,}"
            yield f"{self.tokens:,} tokens are more than {limit}."
        yield "The KV cache of the input is counted among the temporaries."
        yield "Not counted: what the driver takes for itself."


def _ways_by_text(texts: dict[str, str]) -> dict[str, str]:
    """For each text the ways that it is about: ``fp32, bf16 cast``."""
    ways: dict[str, list[str]] = {}
    for way, text in texts.items():
        ways.setdefault(text, []).append(way)
    return {text: ", ".join(names) for text, names in ways.items()}
