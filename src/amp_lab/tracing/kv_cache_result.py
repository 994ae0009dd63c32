"""The forecast of a KV cache, and its rows and sentences in the table of inference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amp_lab.core.report import plural
from amp_lab.tracing.memory_result import in_unit


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


def cache_rows(
    caches: Sequence[CacheForecast | None], weights: Sequence[int], unit: int
) -> Iterator[list[str]]:
    """Yield table rows on the cache, with a column for each of `caches`; no rows if all are None.

    `caches` are those of the ways to run a model, and `weights` the bytes of the weights of each.
    Sizes are in `unit` bytes, only the size per token is in KiB.
    """
    existing = [cache for cache in caches if cache is not None]
    if not existing:
        return
    first = existing[0]  # all have the same `sequences`, `tokens` and `tokens_asked`
    yield _row(first.label(first.tokens), caches, "nbytes", unit)
    yield _row("cache per sequence", caches, "per_sequence", unit)
    if any(cache.per_token for cache in existing):
        yield _row("cache, KiB per token", caches, "per_token", 2**10)
    yield ["dtype of the cache", *map(_dtype_cell, caches)]
    if all(cache.nbytes_asked is None for cache in existing):
        return
    yield _row(first.label(first.tokens_asked), caches, "nbytes_asked", unit)
    yield _totals(caches, weights, unit)


def _totals(caches: Sequence[CacheForecast | None], weights: Sequence[int], unit: int) -> list[str]:
    """The row with weights plus the cache for `tokens_asked`, in `unit` bytes; "-" if unknown."""
    cells = []
    for cache, weight in zip(caches, weights, strict=True):
        if cache is None or cache.nbytes_asked is None:
            cells.append("-")
        else:
            cells.append(in_unit(weight + cache.nbytes_asked, unit))
    return ["weights + that cache", *cells]


def _dtype_cell(cache: CacheForecast | None) -> str:
    if cache is None:
        return "-"
    return cache.dtype


def _row(
    label: str, caches: Sequence[CacheForecast | None], attribute: str, unit: int
) -> list[str]:
    """A row with an attribute of each cache, such as "nbytes", in `unit` bytes; "-" if unknown."""
    cells = []
    for cache in caches:
        count = None if cache is None else getattr(cache, attribute)
        if count is None:
            cells.append("-")
        else:
            cells.append(in_unit(count, unit))
    return [label, *cells]
