"""Find the KV cache in the output of a language model, and forecast its size and growth.

The KV cache holds the keys and values of attention for all tokens so far.
"""

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
from amp_lab.core.tensors import is_cache, parts_of, storage_key, tensors_in
from amp_lab.model_call import ModelCall
from amp_lab.tracing.inference_result import CacheForecast

# Names of caches, such as "past_key_values", "kv_cache" and "presents"; and names of other outputs
# that grow with the tokens, such as "hidden_states" and "attentions".
_CACHE_NAME = re.compile(r"cache|past_key|(^|_)kv|^presents?$", re.IGNORECASE)
_OTHER_OUTPUT_NAME = re.compile(r"attention|hidden|logits|loss", re.IGNORECASE)


@dataclass(frozen=True)
class CachedTensor:
    """The size of a tensor in a model's output that is, or may be, part of a cache."""

    path: tuple[str, ...]  # in the output: ("output", "past_key_values", "layers", "0", "keys")
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of its values; the storage of a slice may be larger
    is_named: bool  # whether a name in the path is that of a cache; else it has to grow to be one


class _OutputTensor(NamedTuple):
    """A tensor in a model's output."""

    path: tuple[str, ...]
    tensor: torch.Tensor
    is_named: bool  # as in `CachedTensor`
    in_pair: bool  # whether it is one of a pair (key, value)


def cached_tensors(output: object) -> tuple[CachedTensor, ...]:
    """Return the tensors in a model's output that are, or may be, part of a cache.

    - Inside a value with the name of a cache, such as transformers' `past_key_values`, all tensors
      of two or more dimensions.
    - Without such a name: pairs of a key and a value, and floating-point tensors of four or more
      dimensions, except the first tensor of the output, and tensors with a name such as
      "attentions".

    If tensors with the same shape are the same part of a storage, they count once.
    """
    cached: dict[tuple, CachedTensor] = {}  # by the part of a storage, which counts once
    outputs = _tensors_of_output({"output": output}, path=(), is_named=False, seen_ids=set())
    for number, output_tensor in enumerate(outputs):
        if not _may_be_of_cache(output_tensor, is_first=number == 0):
            continue
        tensor = output_tensor.tensor
        key = (storage_key(tensor), tensor.storage_offset(), tensor.shape)
        if key not in cached:
            cached[key] = CachedTensor(
                path=output_tensor.path,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                nbytes=_bytes_of(tensor),
                is_named=output_tensor.is_named,
            )
    return tuple(cached.values())


def _may_be_of_cache(output_tensor: _OutputTensor, is_first: bool) -> bool:
    """Whether a tensor of the output is part of a cache, or may be.

    `is_first` says that it is the first tensor of the output, so probably the logits.
    """
    tensor = output_tensor.tensor
    if output_tensor.is_named:
        return tensor.ndim > 1  # the others are counters, such as the number of tokens so far
    if not tensor.is_floating_point():
        return False
    has_cache_dimensions = tensor.ndim > 3 and not is_first  # such as (B, H, T, D)
    if not output_tensor.in_pair and not has_cache_dimensions:
        return False
    return not any(_OTHER_OUTPUT_NAME.search(name) for name in output_tensor.path)


def _tensors_of_output(
    value: object, path: tuple[str, ...], is_named: bool, seen_ids: set[int]
) -> Iterator[_OutputTensor]:
    """Yield the tensors in a structure, also in attributes of dataclasses and of caches.

    `path` is that of the structure in the output; `is_named` says whether a name in the path is
    that of a cache. `seen_ids` has the `id` of each value that was visited, since structures may
    have circles; the function adds to it.
    """
    if id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    parts = parts_of(value, open_objects=is_named or dataclasses.is_dataclass(value))
    # The output itself, ("output",), may be a pair of something else, such as (logits, hidden).
    in_pair = len(path) > 1 and _is_pair(list(parts.values()))
    for name, part in parts.items():
        part_path = (*path, name)
        part_is_named = is_named or is_cache(part) or _CACHE_NAME.search(name) is not None
        if isinstance(part, torch.Tensor):
            yield _OutputTensor(part_path, part, part_is_named, in_pair)
        else:
            yield from _tensors_of_output(part, part_path, part_is_named, seen_ids)


def _is_pair(parts: list) -> bool:
    """Whether these are a key (…, T, D) and a value (…, T, V)."""
    if len(parts) != 2:
        return False
    key, value = parts
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return key.ndim > 2 and key.shape[:-1] == value.shape[:-1]


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the values of a tensor. Values repeated by an expanded dimension count once."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    # The stride of an expanded dimension is 0.
    return math.prod(size for size, stride in dimensions if stride) * tensor.itemsize


def token_count(call: ModelCall) -> int | None:
    """How many tokens each sequence has: T of ids (B, T), or else of embeddings (B, T, C).

    In an encoder-decoder model these are the tokens of the decoder. None if no input has such a
    shape.
    """
    tensors = tensors_in(_decoder_arguments(call))
    for tensor in tensors:
        if tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor.shape[1]
    for tensor in tensors:
        if tensor.ndim == 3 and tensor.is_floating_point():
            return tensor.shape[1]
    return None


def with_tokens(call: ModelCall, count: int) -> ModelCall:
    """The call with `count` tokens in each sequence; unchanged if no input has tokens.

    The function resizes ids, embeddings, masks, positions and labels, whose values are lost.
    """
    current_count = token_count(call)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return _resize(tensor, current_count, count)

    args, kwargs = tree_map_only(torch.Tensor, resized, _decoder_arguments(call))
    if not args:  # all resized arguments are keywords, so the positional ones stay as they are
        args = call.args
    return dataclasses.replace(call, args=args, kwargs=call.kwargs | kwargs)


def _decoder_arguments(call: ModelCall) -> tuple[tuple, dict[str, Any]]:
    """The arguments (args, kwargs) of a call that have tokens of the sequences with the cache.

    In an encoder-decoder model these are the keywords of the decoder; else all arguments.
    """
    kwargs = call.kwargs
    if kwargs.get("decoder_input_ids") is None:
        return call.args, kwargs
    names = [name for name in kwargs if name.startswith("decoder_") or name == "labels"]
    return (), {name: kwargs[name] for name in names}


def _resize(tensor: torch.Tensor, current_count: int | None, count: int) -> torch.Tensor:
    """Resize the token dimensions of an input from `current_count` to `count`.

    An input without a dimension of `current_count` is returned as it is.
    """
    shape = list(tensor.shape)
    for dimension in _dimensions_of_tokens(tensor):
        if shape[dimension] == current_count:
            shape[dimension] = count
    if shape == list(tensor.shape):
        return tensor
    return tensor.new_empty(shape)  # the tensors are fake, so there are no values to keep


def _dimensions_of_tokens(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of an input that may be its tokens, judged by its number of dimensions."""
    if tensor.ndim == 1:  # positions (T,)
        return (0,)
    if tensor.ndim == 2:  # ids (B, T)
        return (1,)
    if tensor.ndim == 3 and tensor.is_floating_point():  # embeddings (B, T, C)
        return (1,)
    if tensor.ndim == 3:  # masks (B, T, T)
        return (1, 2)
    if tensor.ndim == 4:
        _, heads, queries, keys = tensor.shape
        if heads == 1 and queries == keys:  # masks (B, 1, T, T)
            return (2, 3)
    return ()


def forecast_cache(
    candidates: tuple[CachedTensor, ...],
    trace_with_tokens: Callable[[int], tuple[CachedTensor, ...]],
    *,
    sequences: int,
    tokens: int | None,
    tokens_asked: int | None = None,
) -> CacheForecast | None:
    """Forecast the cache in the output of a pass; None if there is none.

    The bytes of a token are the difference between two passes. If the cache grows, a third pass
    has `tokens_asked` tokens, since a sliding window may stop growing before.

    Args:
        candidates: The tensors that `cached_tensors` returned for the first pass.
        trace_with_tokens: Runs a pass with this many tokens in each sequence; returns its
            `cached_tensors`. It may raise `TraceError`.
        sequences: The number of sequences in the first pass.
        tokens: The tokens in each sequence of the first pass; None if no input has tokens.
        tokens_asked: The tokens for which the user wants the size of the cache, if any.
    """
    if not candidates:
        return None
    growth = _measure_growth(candidates, trace_with_tokens, tokens)
    cache = list(growth.bytes_per_token)  # the tensors
    if not cache:
        return None
    nbytes = sum(tensor.nbytes for tensor in cache)
    remarks = list(growth.remarks)
    nbytes_asked = None
    if tokens_asked is not None and not growth.total:
        remarks.append(f"The size of the cache is not extrapolated to {tokens_asked:,} tokens.")
    elif tokens_asked is not None:
        try:
            nbytes_asked = _bytes_with_tokens(cache, trace_with_tokens(tokens_asked))
        except TraceError as error:
            remarks.append(f"The cache cannot be forecast for {tokens_asked:,} tokens: {error}.")
        else:
            more_tokens = tokens_asked - (tokens or 0)  # never None: the growth was measured
            if nbytes_asked < nbytes + growth.total * more_tokens:
                remarks.append(
                    f"With {tokens_asked:,} tokens, part of the cache no longer grows, as with a "
                    "sliding window."
                )
    per_token = None  # not known, or the cache does not grow
    if growth.total >= sequences:
        per_token = growth.total // sequences
    return CacheForecast(
        place=_common_path(cache),
        tensors=len(cache),
        dtype=" + ".join(sorted({short_name(tensor.dtype) for tensor in cache})),
        nbytes=nbytes,
        sequences=sequences,
        tokens=tokens,
        per_token=per_token,
        tokens_asked=tokens_asked,
        nbytes_asked=nbytes_asked,
        remarks=tuple(remarks),
    )


def _bytes_with_tokens(cache: list[CachedTensor], tensors: tuple[CachedTensor, ...]) -> int:
    """Bytes of a cache in another pass: of those of its `tensors` that have the same paths."""
    paths = {tensor.path for tensor in cache}
    return sum(tensor.nbytes for tensor in tensors if tensor.path in paths)


class _Growth(NamedTuple):
    """How many bytes the tensors of a cache grow if each sequence gets one more token."""

    # By tensor of the cache, for all sequences together. 0: it does not grow, or it is not known.
    # None: it changes, but not in proportion to the tokens.
    bytes_per_token: dict[CachedTensor, int | None]
    remarks: list[str]  # sentences

    @property
    def total(self) -> int:
        """Bytes per token of the cache as a whole; 0: it does not grow, or it is not known."""
        total = 0
        for count in self.bytes_per_token.values():
            if count is None:
                return 0
            total += count
        return total


def _measure_growth(
    candidates: tuple[CachedTensor, ...],
    trace_with_tokens: Callable[[int], tuple[CachedTensor, ...]],
    tokens: int | None,
) -> _Growth:
    """Compare the pass of the candidates with one that has another number of tokens.

    The cache in the result is the candidates that grow, and those with the name of a cache. If
    there is no second pass, names and shapes decide, and a remark says so. The arguments are those
    of `forecast_cache`.
    """
    if tokens is None:
        named = [tensor for tensor in candidates if tensor.is_named]
        remark = (
            "No input has the shape of tokens (B, T), so the forecast does not know how the "
            "cache grows."
        )
        return _Growth(dict.fromkeys(named, 0), [remark])
    # Fewer if possible: the model may have no positions for more tokens than in its input.
    other_tokens = tokens // 2 if tokens > 1 else 2
    try:
        other_tensors = {tensor.path: tensor for tensor in trace_with_tokens(other_tokens)}
    except TraceError as error:
        # Without a second pass, tensors with a size that is the number of tokens are taken to grow.
        likely = [tensor for tensor in candidates if tensor.is_named or tokens in tensor.shape]
        return _Growth(
            dict.fromkeys(likely, 0),
            [f"The growth of the cache is unknown, because a second pass failed: {error}."],
        )
    growth = {}
    for tensor in candidates:
        other = other_tensors.get(tensor.path)
        count = _bytes_per_token(tensor, other, more_tokens=tokens - other_tokens)
        if count or tensor.is_named:
            growth[tensor] = count
    fewer, more = sorted([other_tokens, tokens])
    remarks = _growth_remarks(list(growth.values()), f"{fewer:,} and {more:,} tokens")
    return _Growth(growth, remarks)


def _growth_remarks(counts: list[int | None], passes: str) -> list[str]:
    """Sentences on the growth of the tensors; `passes` are the two compared: "8 and 16 tokens".

    `counts` are the values of `_Growth.bytes_per_token`.
    """
    if None in counts:
        return [f"The cache does not grow linearly with the tokens ({passes})."]
    if not any(counts):
        kinds = "a static cache, a full sliding window or a state"
        return [f"The cache has the same size with {passes}, like {kinds}."]
    remarks = [f"The size per token is the difference between passes with {passes}."]
    fixed_count = counts.count(0)
    if fixed_count:
        remarks.append(
            f"{fixed_count} of the {len(counts)} tensors in the cache do not grow with the number "
            "of tokens."
        )
    return remarks


def _bytes_per_token(
    tensor: CachedTensor, other: CachedTensor | None, more_tokens: int
) -> int | None:
    """Bytes by which a tensor grows with each token; 0 if it does not grow.

    `other` is the same tensor in another pass, or None. `more_tokens` are the tokens of this pass
    minus those of the other one, and may be negative. Returns None if the tensor changes in another
    way, or is not in the other pass.
    """
    if other is None or len(other.shape) != len(tensor.shape):
        return None
    differences = []
    for size, other_size in zip(tensor.shape, other.shape, strict=True):
        if size != other_size:
            differences.append(size - other_size)
    if not differences:
        return 0
    if len(differences) > 1:  # only one dimension can be the tokens
        return None
    size_per_token, remainder = divmod(differences[0], more_tokens)
    if remainder or size_per_token < 0:
        return None
    return (tensor.nbytes - other.nbytes) // more_tokens


def _common_path(tensors: list[CachedTensor]) -> str:
    """The longest common beginning of the paths: "output.past_key_values.layers"."""
    common = tensors[0].path
    for tensor in tensors:
        while tensor.path[: len(common)] != common:
            common = common[:-1]
    return ".".join(common)
