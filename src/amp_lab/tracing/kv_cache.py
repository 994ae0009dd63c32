"""The cache of keys and values (KV cache) that a language model returns: its size and growth."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from amp_lab.core.errors import TraceError
from amp_lab.core.report import short_name
from amp_lab.tracing.kv_cache_result import CacheForecast
from amp_lab.tracing.ops_seen import storage_key, tensors_in
from amp_lab.tracing.structures import is_cache, parts_of

# Names of what holds a cache, and of what is none although it grows with the tokens.
_CACHE = re.compile(r"cache|past_key|(^|_)kv|^presents?$", re.IGNORECASE)
_OTHER = re.compile(r"attention|hidden|logits|loss", re.IGNORECASE)


@dataclass(frozen=True)
class CachedTensor:
    """A tensor of a cache, as far as its size matters."""

    path: tuple[str, ...]  # in the output: ("output", "past_key_values", "layers", "0", "keys")
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of its values; a slice may hold on to a larger storage
    is_named: bool  # a name says that it is of a cache; if not, it is one only if it grows


class _Leaf(NamedTuple):
    path: tuple[str, ...]
    tensor: torch.Tensor
    is_named: bool
    in_pair: bool  # of a key and a value


def cached_tensors(output: object) -> tuple[CachedTensor, ...]:
    """The tensors in a model's output that are a cache, or may be one.

    These are all in what is named a cache, such as `past_key_values` of transformers; and without
    such a name, pairs of a key and a value, and tensors of four dimensions or more besides the
    first output. Tensors that share their memory count once.
    """
    cached: dict[tuple, CachedTensor] = {}
    for number, leaf in enumerate(_leaves({"output": output}, (), False, set())):
        if not _may_be_cached(leaf, is_first=number == 0):
            continue
        tensor = leaf.tensor
        key = (storage_key(tensor), tensor.storage_offset(), tensor.shape)
        if key not in cached:
            cached[key] = CachedTensor(
                path=leaf.path,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                nbytes=_bytes_of(tensor),
                is_named=leaf.is_named,
            )
    return tuple(cached.values())


def _may_be_cached(leaf: _Leaf, is_first: bool) -> bool:
    """Whether a tensor of the output is part of a cache, or may be; `is_first` of the output."""
    tensor = leaf.tensor
    if leaf.is_named:
        return tensor.ndim > 1  # others are counters and sizes of windows
    if not tensor.is_floating_point():
        return False
    is_large = tensor.ndim > 3 and not is_first
    if not leaf.in_pair and not is_large:
        return False
    return not any(_OTHER.search(name) for name in leaf.path)


def _leaves(
    thing: object, path: tuple[str, ...], is_named: bool, known: set[int]
) -> Iterator[_Leaf]:
    """The tensors in a structure, and in the attributes of dataclasses and of caches."""
    if id(thing) in known:
        return
    known.add(id(thing))
    parts = parts_of(thing, opened=is_named or dataclasses.is_dataclass(thing))
    in_pair = len(path) > 1 and _is_pair(list(parts.values()))
    for name, part in parts.items():
        part_path = (*path, name)
        part_is_named = is_named or is_cache(part) or _CACHE.search(name) is not None
        if isinstance(part, torch.Tensor):
            yield _Leaf(part_path, part, part_is_named, in_pair)
        else:
            yield from _leaves(part, part_path, part_is_named, known)


def _is_pair(parts: list) -> bool:
    """Whether these are a key and a value, whose last sizes may differ."""
    if len(parts) != 2:
        return False
    key, value = parts
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return key.ndim > 2 and key.shape[:-1] == value.shape[:-1]


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its values; those that an expanded dimension repeats count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.itemsize


Arguments = tuple[tuple, dict[str, Any]]  # positional ones, and keywords


def token_count(given: Arguments) -> int | None:
    """The tokens of each sequence: T of ids (B, T), or else of embeddings (B, T, C); or None.

    Of a model with a decoder of its own, those of the decoder.
    """
    tensors = tensors_in(_decoder_arguments(given))
    for tensor in tensors:
        if tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor.shape[1]
    for tensor in tensors:
        if tensor.ndim == 3 and tensor.is_floating_point():
            return tensor.shape[1]
    return None


def with_tokens(given: Arguments, count: int) -> Arguments:
    """The same arguments for `count` tokens: ids, embeddings, masks, positions and labels."""
    given_count = token_count(given)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return _resize(tensor, given_count, count)

    args, kwargs = given
    args_of_decoder, kwargs_of_decoder = tree_map_only(
        torch.Tensor, resized, _decoder_arguments(given)
    )
    return args_of_decoder or args, kwargs | kwargs_of_decoder


def _decoder_arguments(given: Arguments) -> Arguments:
    """The arguments that grow with the tokens, where an encoder has ids of its own."""
    _, kwargs = given
    if kwargs.get("decoder_input_ids") is None:
        return given
    names = [name for name in kwargs if name.startswith("decoder_") or name == "labels"]
    return (), {name: kwargs[name] for name in names}


def _resize(tensor: torch.Tensor, given_count: int | None, count: int) -> torch.Tensor:
    shape = list(tensor.shape)
    for dimension in _dimensions_of_tokens(tensor):
        if shape[dimension] == given_count:
            shape[dimension] = count
    if shape == list(tensor.shape):
        return tensor
    return tensor.new_empty(shape)


def _dimensions_of_tokens(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions that may be those of tokens in an input."""
    if tensor.ndim == 1:  # positions (T,)
        return (0,)
    if tensor.ndim == 2 or (tensor.ndim == 3 and tensor.is_floating_point()):
        return (1,)  # ids (B, T), embeddings (B, T, C)
    if tensor.ndim == 3:  # masks (B, T, T)
        return (1, 2)
    if tensor.ndim != 4:
        return ()
    _, heads, queries, keys = tensor.shape
    if heads == 1 and queries == keys:  # masks (B, 1, T, T)
        return (2, 3)
    return ()


def forecast_cache(
    found: tuple[CachedTensor, ...],
    traced_with: Callable[[int], tuple[CachedTensor, ...]],
    *,
    sequences: int,
    tokens: int | None,
    asked: int | None = None,
) -> CacheForecast | None:
    """The forecast of the cache whose tensors a pass has returned; None if there is none.

    `traced_with` gives the tensors for another number of tokens, and may raise `TraceError`. How
    many bytes a token takes is the difference between two passes. With `asked`, a third pass has
    so many tokens: a sliding window may stop growing before.
    """
    if not found:
        return None
    growth = _growth(found, traced_with, tokens)
    tensors = growth.tensors
    if not tensors:
        return None
    dtypes = {short_name(tensor.dtype) for tensor in tensors}
    forecast = CacheForecast(
        place=_place(tensors),
        tensors=len(tensors),
        dtype=" + ".join(sorted(dtypes)),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        sequences=sequences,
        tokens=tokens,
        tokens_asked=asked,
        remarks=growth.remarks,
    )
    if growth.per_token:
        forecast = dataclasses.replace(forecast, per_token=growth.per_token // sequences)
    if asked is None:
        return forecast
    if not growth.per_token:
        return _with_remark(forecast, f"Nothing is extrapolated to {asked:,} tokens.")
    return _with_asked(forecast, growth, traced_with, asked)


def _with_remark(forecast: CacheForecast, remark: str) -> CacheForecast:
    return dataclasses.replace(forecast, remarks=(*forecast.remarks, remark))


@dataclass(frozen=True)
class _Growth:
    """How a cache grows with the tokens."""

    tensors: tuple[CachedTensor, ...]  # of the cache
    per_token: int = 0  # bytes, of all sequences together; 0: it does not grow, or nobody knows
    remarks: tuple[str, ...] = ()


def _growth(
    found: tuple[CachedTensor, ...],
    traced_with: Callable[[int], tuple[CachedTensor, ...]],
    tokens: int | None,
) -> _Growth:
    if tokens is None:
        named = tuple(tensor for tensor in found if tensor.is_named)
        return _Growth(named, remarks=("No input has tokens (B, T) that it could grow with.",))
    # Fewer, if that can be: a model may have a table of as many places as tokens were given.
    other_tokens = tokens // 2 if tokens > 1 else 2
    try:
        other_tensors = {tensor.path: tensor for tensor in traced_with(other_tokens)}
    except TraceError as error:
        likely = tuple(tensor for tensor in found if tensor.is_named or tokens in tensor.shape)
        return _Growth(likely, remarks=(f"How it grows cannot be told: {error}.",))
    bytes_per_token = {}
    for tensor in found:
        other = other_tensors.get(tensor.path)
        count = _bytes_of_a_token(tensor, other, tokens - other_tokens)
        if count or tensor.is_named:
            bytes_per_token[tensor] = count
    fewer, more = sorted([other_tokens, tokens])
    return _growth_of_counts(bytes_per_token, f"{fewer:,} and {more:,} tokens")


def _growth_of_counts(bytes_per_token: dict[CachedTensor, int | None], passes: str) -> _Growth:
    """The growth of tensors by so many bytes for each token, as two `passes` have shown it."""
    tensors = tuple(bytes_per_token)
    counts = [count for count in bytes_per_token.values() if count is not None]
    if len(counts) < len(tensors):
        return _Growth(tensors, remarks=(f"It is not a multiple of the tokens ({passes}).",))
    if not any(counts):
        kinds = "a static cache, a full sliding window or a state"
        return _Growth(tensors, remarks=(f"It is as large with {passes}: {kinds}.",))
    remarks = [f"Per token: the difference between passes with {passes}."]
    fixed = counts.count(0)
    if fixed:
        remarks.append(f"{fixed} of its {len(counts)} tensors do not grow.")
    return _Growth(tensors, sum(counts), tuple(remarks))


def _bytes_of_a_token(tensor: CachedTensor, other: CachedTensor | None, more: int) -> int | None:
    """Bytes by which a tensor grows with each of `more` tokens; None if not by as many for each.

    `more` is below 0 if the other has more tokens.
    """
    if other is None or len(other.shape) != len(tensor.shape):
        return None
    differences = []
    for size, size_of_other in zip(tensor.shape, other.shape, strict=True):
        if size != size_of_other:
            differences.append(size - size_of_other)
    if not differences:
        return 0
    if len(differences) > 1:
        return None
    sizes_per_token, rest = divmod(differences[0], more)
    if rest or sizes_per_token < 0:
        return None
    return (tensor.nbytes - other.nbytes) // more


def _with_asked(
    forecast: CacheForecast,
    growth: _Growth,
    traced_with: Callable[[int], tuple[CachedTensor, ...]],
    asked: int,
) -> CacheForecast:
    """The forecast with the bytes for the tokens that were asked for."""
    paths = {tensor.path for tensor in growth.tensors}
    try:
        nbytes = sum(tensor.nbytes for tensor in traced_with(asked) if tensor.path in paths)
    except TraceError as error:
        return _with_remark(forecast, f"For {asked:,} tokens it cannot be told: {error}.")
    more_tokens = asked - (forecast.tokens or 0)
    in_proportion = forecast.nbytes + growth.per_token * more_tokens
    if nbytes < in_proportion:
        remark = f"With {asked:,} tokens part of it has stopped growing, as a sliding window does."
        forecast = _with_remark(forecast, remark)
    return dataclasses.replace(forecast, nbytes_asked=nbytes)


def _place(tensors: tuple[CachedTensor, ...]) -> str:
    """Where in the output all of these are."""
    common = tensors[0].path
    for tensor in tensors:
        while tensor.path[: len(common)] != common:
            common = common[:-1]
    return ".".join(common)
