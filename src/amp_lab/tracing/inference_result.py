"""The results of memory forecasts for inference: as text, as a table and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from amp_lab.core.report import Printed, Table, plural
from amp_lab.tracing.memory_result import ForecastTable, amount, bytes_row, columns_by_text


@dataclass(frozen=True)
class CacheForecast:
    """The KV cache in the output of one forward pass, in bytes; made by `forecast_cache`."""

    place: str  # its path in the output: "output.past_key_values.layers"
    tensors: int  # how many
    dtype: str  # "bf16"; "bf16 + fp32" if some are in one and some in the other
    nbytes: int
    sequences: int  # the batch
    tokens: int | None  # of each sequence; None: no input has tokens
    per_token: int | None = None  # bytes, of one sequence; None: not known, or it does not grow
    tokens_asked: int | None = None  # the number of tokens that the user asked for
    nbytes_asked: int | None = None  # bytes if each sequence has `tokens_asked` tokens
    remarks: tuple[str, ...] = ()  # sentences on how it grows

    @property
    def per_sequence(self) -> int:
        """Bytes of the cache for one sequence of the input."""
        return self.nbytes // self.sequences

    @property
    def sentences(self) -> str:
        """Sentences on where the cache is in the output, and how it grows."""
        where = f"KV cache: {plural(self.tensors, 'tensor')} in {self.place}."
        return " ".join([where, *self.remarks])

    def label(self, tokens: int | None) -> str:
        """The label of the row with the size for `tokens` in each sequence; None: not known."""
        if tokens is None:
            return "cache"
        return f"cache, {self.sequences} x {tokens:,} tokens"


@dataclass(frozen=True, repr=False)
class InferenceForecast(Printed):
    """The memory of one forward pass in bytes; made by `forecast_inference`.

    Each part is the memory in use at the peak. The parts add up to `peak`.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    device_type: str
    way: str  # "fp32", "bf16 autocast", "bf16 weights", "int8"
    weights: int
    buffers: int
    inputs: int
    weight_casts: int  # copies of weights that autocast made, alive at the peak
    temporaries: int  # activations, and temporary memory of kernels
    kept_under_no_grad: int = 0  # how much higher the peak is under `torch.no_grad`
    cache: CacheForecast | None = None  # the KV cache in the output, if there is one
    decisions: str = ""  # remark on decisions that were taken from a run on the CPU
    caveat: str = ""  # remark on ops whose kernels may take memory that is not counted
    largest_at_peak: str = field(default="", compare=False)
    """The largest activation or temporary at the peak, if it is large."""

    @property
    def column(self) -> str:
        """The heading in a table: the way."""
        return self.way

    @property
    def run(self) -> str:
        """The run that is forecast, in words."""
        return f"one forward pass under inference_mode on {self.device_type}"

    @property
    def parts(self) -> dict[str, int]:
        """The bytes in each row of the table, by its label."""
        return {
            "weights": self.weights,
            "buffers": self.buffers,
            "inputs": self.inputs,
            "weight casts at the peak": self.weight_casts,
            "temporaries at the peak": self.temporaries,
        }

    @property
    def peak(self) -> int:
        """The most bytes that are in use at one time."""
        return sum(self.parts.values())

    def with_smaller_weights(self, way: str, saved: int) -> "InferenceForecast":
        """The forecast of a way that differs only in the weights, which take `saved` bytes less."""
        weights = self.weights - saved
        # The text on the largest tensor has its share of the peak, which is another one here.
        return replace(self, way=way, weights=weights, largest_at_peak="")

    def _contents(self) -> dict[str, Any]:
        """The values for JSON."""
        contents = {**vars(self), "peak": self.peak}
        if self.cache is not None:
            contents["cache"] = {**vars(self.cache), "per_sequence": self.cache.per_sequence}
        return contents

    def _table(self) -> Table:
        """The printed table, with one column."""
        return InferenceTable((self,))._table()

    @property
    def weights_and_cache(self) -> int | None:
        """Bytes of the weights, plus the KV cache for the given number of tokens, if any."""
        if self.cache is None or self.cache.nbytes_asked is None:
            return None
        return self.weights + self.cache.nbytes_asked


@dataclass(frozen=True, repr=False)
class InferenceTable(ForecastTable):
    """Forecasts of a forward pass for each way to run a model; made by `inference_table`."""

    forecasts: tuple[InferenceForecast, ...]
    tokens: int | None = None  # for each sequence; the user asked for the KV cache of so many
    places: int | None = None  # the most positions, so tokens, that the model's config allows

    def _largest_cells(self) -> list[int]:
        """Numbers of bytes, among them the largest one in the table."""
        # A forecast without a cache counts as 0, which is never the largest.
        with_cache = [forecast.weights_and_cache or 0 for forecast in self.forecasts]
        return [*super()._largest_cells(), *with_cache]

    def _foot(self, unit: int) -> Iterator[list[str]]:
        """The rows below the parts: peak, largest batch and KV cache; sizes are in `unit` bytes.

        Only the size of a token is in KiB.
        """
        yield from super()._foot(unit)
        caches = [forecast.cache for forecast in self.forecasts]
        existing = [cache for cache in caches if cache is not None]
        if not existing:
            return
        first = existing[0]  # `label` needs what is the same for all: sequences and tokens
        yield self._cache_row(first.label(first.tokens), "nbytes", unit)
        yield self._cache_row("cache per sequence", "per_sequence", unit)
        if any(cache.per_token for cache in existing):
            yield self._cache_row("cache, KiB per token", "per_token", 2**10)
        yield ["dtype of the cache", *(getattr(cache, "dtype", "-") for cache in caches)]
        if any(cache.nbytes_asked is not None for cache in existing):
            yield self._cache_row(first.label(first.tokens_asked), "nbytes_asked", unit)
            totals = [forecast.weights_and_cache for forecast in self.forecasts]
            yield bytes_row("weights + that cache", totals, unit)

    def _cache_row(self, label: str, attribute: str, unit: int) -> list[str]:
        """A row with an attribute of each cache, such as "nbytes", in `unit` bytes."""
        counts = [getattr(forecast.cache, attribute, None) for forecast in self.forecasts]
        return bytes_row(label, counts, unit)

    def _facts(self) -> Iterator[str]:
        """The sentences below the table."""
        yield from super()._facts()
        for forecast in self.forecasts:
            if forecast.kept_under_no_grad:
                extra = amount(forecast.kept_under_no_grad)
                yield (
                    f"{forecast.way}: under no_grad, autocast keeps its weight casts until the "
                    f"autocast block ends, so the peak is {extra} higher than under "
                    "inference_mode."
                )
        if any(forecast.way.startswith("int") for forecast in self.forecasts):
            yield (
                "int8 and int4: the weights of linear layers are counted as torchao stores them, "
                "and all other weights in 16 bits, also one that an embedding shares. Memory for "
                "unpacking in a kernel is not counted."
            )
        if self.forecasts[0].decisions:
            yield self.forecasts[0].decisions
        if self.forecasts[0].caveat:
            yield self.forecasts[0].caveat
        yield from self._cache_facts()

    def _fit_facts(self, memory: str) -> Iterator[str]:
        """Sentences on what fits into the memory, with the KV cache of `tokens` too."""
        yield from super()._fit_facts(memory)
        for forecast in self.forecasts:
            # Without a KV cache for `tokens` this is negative, and nothing is said.
            excess = (forecast.weights_and_cache or 0) - self._usable
            if excess > 0:
                parts = f"weights and the KV cache of {self.tokens:,} tokens"
                yield f"{forecast.way}: {parts} do not fit, {amount(excess)} too large."

    def _cache_facts(self) -> Iterator[str]:
        """Sentences on the KV cache of each way, and on what the forecast leaves out.

        Sentences that are equal for several ways are yielded once.
        """
        sentences_by_way = {}
        for forecast in self.forecasts:
            if forecast.cache is not None:
                sentences_by_way[forecast.way] = forecast.cache.sentences
        if not sentences_by_way:
            if self.tokens is not None:
                tokens = f"{self.tokens:,} tokens"
                yield f"The output has no KV cache, so there is no forecast for {tokens}."
            yield (
                "The peak does not include a cache of keys and values, or the memory of the driver."
            )
            return
        ways_by_sentences = columns_by_text(sentences_by_way)
        for sentences, ways in ways_by_sentences.items():
            if len(ways_by_sentences) == 1:  # true of all ways, so none is named
                yield sentences
            else:
                yield f"{ways}: {sentences}"
        if self.tokens and self.places and self.tokens > self.places:
            limit = f"max_position_embeddings in its config is {self.places:,}"
            yield f"{self.tokens:,} tokens are too many for the model: {limit}."
        yield "The KV cache of the input is counted among the temporaries."
        yield "The peak does not include the memory of the driver."
