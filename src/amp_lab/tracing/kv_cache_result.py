"""The forecast of a KV cache, its rows in the table of inference, and what is said of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amp_lab.core.report import plural
from amp_lab.tracing.memory_result import in_unit


@dataclass(frozen=True)
class CacheForecast:
    """The KV cache in the output of one forward pass, in bytes; made by `forecast_cache`."""

    place: str  # in the output: "output.past_key_values.layers"
    tensors: int
    dtype: str  # "bf16"; "bf16 + fp32" if some are in one and some in the other
    nbytes: int
    sequences: int  # the batch
    tokens: int | None  # of each sequence; None: no input has tokens
    per_token: int | None = None  # of one sequence; None: cannot be told, or it does not grow
    tokens_asked: int | None = None
    nbytes_asked: int | None = None  # for so many tokens of each sequence
    remarks: tuple[str, ...] = ()  # sentences on how it grows

    @property
    def per_sequence(self) -> int:
        """Bytes of the cache of one sequence of the input."""
        return self.nbytes // self.sequences

    @property
    def sentences(self) -> str:
        """Where it is, and how it grows."""
        where = f"KV cache: {plural(self.tensors, 'tensor')} in {self.place}."
        return " ".join([where, *self.remarks])

    def label(self, tokens: int | None) -> str:
        """What a row is called that has the size for so many tokens of each sequence."""
        if tokens is None:
            return "cache"
        return f"cache, {self.sequences} x {tokens:,} tokens"


def cache_rows(
    caches: Sequence[CacheForecast | None], weights: Sequence[int], unit: int
) -> Iterator[list[str]]:
    """Rows of a table: the cache in each column, and the bytes of weights beside it.

    All but the bytes of a token, in KiB, are in this unit.
    """
    found = [cache for cache in caches if cache is not None]
    if not found:
        return
    first = found[0]
    yield _row(first.label(first.tokens), caches, "nbytes", unit)
    yield _row("cache per sequence", caches, "per_sequence", unit)
    if any(cache.per_token for cache in found):
        yield _row("cache, KiB per token", caches, "per_token", 2**10)
    yield ["dtype of the cache", *map(_dtype_cell, caches)]
    if all(cache.nbytes_asked is None for cache in found):
        return
    yield _row(first.label(first.tokens_asked), caches, "nbytes_asked", unit)
    yield _totals(caches, weights, unit)


def _totals(caches: Sequence[CacheForecast | None], weights: Sequence[int], unit: int) -> list[str]:
    """The row of weights and the cache for the tokens that were asked for."""
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
    """A row of bytes, which are an attribute of each cache."""
    cells = []
    for cache in caches:
        count = None if cache is None else getattr(cache, attribute)
        if count is None:
            cells.append("-")
        else:
            cells.append(in_unit(count, unit))
    return [label, *cells]
