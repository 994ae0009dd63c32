"""The cache of keys and values (KV cache) that a language model returns: its size and growth."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from amp_lab.errors import TraceError
from amp_lab.report import short_name
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
    found: dict[tuple, CachedTensor] = {}
    for number, leaf in enumerate(_leaves({"output": output}, (), False, set())):
        tensor = leaf.tensor
        if leaf.is_named:
            counts = tensor.ndim > 1  # others are counters and sizes of windows
        else:
            is_large = tensor.ndim > 3 and number > 0
            is_other = any(_OTHER.search(name) for name in leaf.path)
            counts = tensor.is_floating_point() and (leaf.in_pair or is_large) and not is_other
        key = storage_key(tensor), tensor.storage_offset(), tensor.shape
        if counts and key not in found:
            shape = tuple(tensor.shape)
            found[key] = CachedTensor(
                leaf.path, shape, tensor.dtype, _bytes_of(tensor), leaf.is_named
            )
    return tuple(found.values())


def _leaves(
    thing: object, path: tuple[str, ...], is_named: bool, known: set[int]
) -> Iterator[_Leaf]:
    """The tensors in a structure, and in the attributes of dataclasses and of caches."""
    if id(thing) in known:
        return
    known.add(id(thing))
    parts = parts_of(thing, opened=is_named or dataclasses.is_dataclass(thing))
    in_pair = len(path) > 1 and _is_pair([*parts.values()])
    for name, part in parts.items():
        part_is_named = is_named or is_cache(part) or _CACHE.search(name) is not None
        if isinstance(part, torch.Tensor):
            yield _Leaf((*path, name), part, part_is_named, in_pair)
        else:
            yield from _leaves(part, (*path, name), part_is_named, known)


def _is_pair(parts: list) -> bool:
    """Whether these are a key and a value, whose last sizes may differ."""
    if len(parts) != 2 or not all(isinstance(part, torch.Tensor) for part in parts):
        return False
    key, value = parts
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
    tensors = tensors_in(_of_decoder(given))
    ids = [t for t in tensors if t.ndim == 2 and not t.is_floating_point()]
    embeddings = [t for t in tensors if t.ndim == 3 and t.is_floating_point()]
    return next((t.shape[1] for t in [*ids, *embeddings]), None)


def with_tokens(given: Arguments, count: int) -> Arguments:
    """The same arguments for `count` tokens: ids, embeddings, masks, positions and labels."""
    before = token_count(given)
    args, kwargs = _of_decoder(given)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return _resized(tensor, before, count)

    args, kwargs = tree_map_only(torch.Tensor, resized, (args, kwargs))
    return args or given[0], given[1] | kwargs


def _of_decoder(given: Arguments) -> Arguments:
    """The arguments that grow with the tokens, where an encoder has ids of its own."""
    _, kwargs = given
    if kwargs.get("decoder_input_ids") is None:
        return given
    names = [name for name in kwargs if name.startswith("decoder_") or name == "labels"]
    return (), {name: kwargs[name] for name in names}


def _resized(tensor: torch.Tensor, before: int | None, count: int) -> torch.Tensor:
    shape = [*tensor.shape]
    for dimension in _dimensions_of_tokens(tensor):
        if shape[dimension] == before:
            shape[dimension] = count
    return tensor if shape == [*tensor.shape] else tensor.new_empty(shape)


def _dimensions_of_tokens(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions that may be those of tokens in an input."""
    if tensor.ndim == 1:  # positions (T,)
        return (0,)
    if tensor.ndim == 2 or (tensor.ndim == 3 and tensor.is_floating_point()):
        return (1,)  # ids (B, T), embeddings (B, T, C)
    if tensor.ndim == 3:  # masks (B, T, T)
        return (1, 2)
    is_mask = tensor.ndim == 4 and tensor.shape[1] == 1  # (B, 1, T, T)
    return (2, 3) if is_mask and tensor.shape[2] == tensor.shape[3] else ()


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
    if not growth.tensors:
        return None
    forecast = CacheForecast(
        place=_place(growth.tensors),
        tensors=len(growth.tensors),
        dtype=" + ".join(sorted({short_name(tensor.dtype) for tensor in growth.tensors})),
        nbytes=sum(tensor.nbytes for tensor in growth.tensors),
        sequences=sequences,
        tokens=tokens,
        tokens_asked=asked,
        remarks=growth.remarks,
    )
    if not growth.per_token:
        if asked is None:
            return forecast
        remark = f"Nothing is extrapolated to {asked:,} tokens."
        return dataclasses.replace(forecast, remarks=(*growth.remarks, remark))
    forecast = dataclasses.replace(forecast, per_token=growth.per_token // sequences)
    return forecast if asked is None else _with_asked(forecast, growth, traced_with, asked)


@dataclass(frozen=True)
class _Growth:
    """How a cache grows with the tokens."""

    tensors: tuple[CachedTensor, ...]  # that are of it
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
    other = tokens // 2 if tokens > 1 else 2
    try:
        compared = {tensor.path: tensor for tensor in traced_with(other)}
    except TraceError as error:
        likely = tuple(t for t in found if t.is_named or tokens in t.shape)
        return _Growth(likely, remarks=(f"How it grows cannot be told: {error}.",))
    grown = {}
    for tensor in found:
        count = _bytes_of_a_token(tensor, compared.get(tensor.path), tokens - other)
        if count or tensor.is_named:
            grown[tensor] = count
    passes = f"{min(other, tokens):,} and {max(other, tokens):,} tokens"
    return _counted(grown, passes)


def _counted(grown: dict[CachedTensor, int | None], passes: str) -> _Growth:
    """The growth of tensors by so many bytes for each token, as two `passes` have shown it."""
    tensors = tuple(grown)
    counts = [count for count in grown.values() if count is not None]
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
    sizes = zip(tensor.shape, other.shape, strict=True)
    differences = [size - size_of_other for size, size_of_other in sizes if size != size_of_other]
    if not differences:
        return 0
    if len(differences) > 1 or differences[0] % more or differences[0] // more < 0:
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
        remark = f"For {asked:,} tokens it cannot be told: {error}."
        return dataclasses.replace(forecast, remarks=(*forecast.remarks, remark))
    remarks = forecast.remarks
    in_proportion = forecast.nbytes + growth.per_token * (asked - (forecast.tokens or 0))
    if nbytes < in_proportion:
        remark = f"With {asked:,} tokens part of it has stopped growing, as a sliding window does."
        remarks = (*remarks, remark)
    return dataclasses.replace(forecast, nbytes_asked=nbytes, remarks=remarks)


def _place(tensors: tuple[CachedTensor, ...]) -> str:
    """Where in the output all of these are."""
    common = tensors[0].path
    for tensor in tensors:
        while tensor.path[: len(common)] != common:
            common = common[:-1]
    return ".".join(common)
