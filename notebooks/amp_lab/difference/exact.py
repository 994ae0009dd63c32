"""Every tensor of a run a second time, in fp64: what the run would compute without rounding.

As shadow values in the debugging of numerical programs (F. Benz, A. Hildebrandt and S. Hack, A
Dynamic Program Analysis to Find Floating-Point Accuracy Problems, 2012): an op is applied to the
shadows too, and a cast leaves them as they are. Views and writes in place need nothing more, since
a shadow of a view is a view of the shadow.
"""

import contextlib
import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from amp_lab.difference.rounding import EXACT, unit_roundoff
from amp_lab.tracing.ops_seen import computes_nothing, storage_key

_WITHOUT_DOUBLES = ("mps",)  # there the shadows are on the CPU
_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64,
          torch.float32: torch.float64, torch.complex64: torch.complex128}  # fmt: skip
_Failed = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


def widened(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """The tensor in fp64 if it is a floating-point one, else as it is."""
    device = "cpu" if tensor.device.type in _WITHOUT_DOUBLES else tensor.device
    return tensor.detach().to(device, _WIDER.get(tensor.dtype, tensor.dtype), copy=copy)


def in_doubles(func: Any, args: Any, kwargs: dict[str, Any], epsilon: float | None = None) -> Any:
    """What the op returns for arguments that are in fp64 already; None if it cannot say.

    `epsilon` is that of a norm which takes its own from the dtype.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "view" and func._overloadname == "dtype":
        return None  # bits that are read as another format
    args, kwargs = tree_map(_wider_setting, (args, kwargs))
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # a half that turns float: a double does not
    elif name == "_fused_rms_norm" and args[3] is None and epsilon is not None:
        args = (*args[:3], epsilon)
    with contextlib.suppress(*_Failed):
        if "dot_product" in name and "attention" in name:
            return _attention(func, args, kwargs)
        if name == "mkldnn_rnn_layer":
            return _lstm(*args, **kwargs)
        if name == "_grouped_mm":
            return _grouped_product(*args, **kwargs)
        if name in ("view", "_unsafe_view"):
            return _view(func, args)
        return func(*args, **kwargs)
    return None


def _wider_setting(value: Any) -> Any:
    """A dtype or a device that is an argument of the op."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, torch.device) and value.type in _WITHOUT_DOUBLES:
        return torch.device("cpu")
    return value


def _view(func: Any, args: Any) -> torch.Tensor:
    try:
        return func(*args)
    except RuntimeError:  # the shadow lies otherwise in memory
        return args[0].reshape(args[1])


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The kernels' common meaning, since few of them take fp64; of the output alone."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = args[:3]
    if given.get("dropout_p"):
        return None
    mask = given.get("attn_mask", given.get("attn_bias"))
    causal, scale = given.get("is_causal", False), given.get("scale")
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return F.softmax(scores, -1) @ value


def _lstm(inputs: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """oneDNN's layer, whose kernel has no fp64: (T, B, C) to (T, B, H) and the two last states."""
    weights, states, backwards, has_biases = args[:4], args[4:6], args[6], args[11]
    inputs = inputs.flip(0) if backwards else inputs
    weights = weights if has_biases else weights[:2]
    states = [state.reshape(1, *state.shape[-2:]) for state in states]
    out, *last = torch.lstm(inputs, states, weights, has_biases, 1, 0.0, False, False, False)
    return (out.flip(0) if backwards else out, *last)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: Any = None, *more: Any,
                     **settings: Any) -> torch.Tensor | None:  # fmt: skip
    """The experts' products, whose kernel has no fp64: rows up to `ends` times each matrix."""
    if left.dim() != 2 or right.dim() != 3 or ends is None:
        return None
    rows = torch.tensor_split(left, ends[:-1].cpu())
    return torch.cat([part @ matrix for part, matrix in zip(rows, right, strict=True)])


class Shadows:
    """The fp64 counterpart of each tensor that lives, and how sure it is."""

    def __init__(self):
        self._shadows = WeakTensorKeyDictionary()
        self._noise = WeakTensorKeyDictionary()
        self._coarsest = 0.0  # unit roundoff of any format so far
        # A tensor's `.data` is another tensor with the same values, that no op made.
        self._places: dict[tuple, weakref.ref[torch.Tensor]] = {}

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The shadow of a tensor; None if nothing is known of it yet."""
        known = self._shadows.get(tensor)
        if known is None and (place := self._places.get(_place(tensor))) is not None:
            known = place()
        return known

    def set(self, tensor: torch.Tensor, shadow: torch.Tensor, noise: float = EXACT) -> None:
        """Note a tensor's shadow, and the relative error that the shadow itself may have."""
        self._shadows[tensor], self._noise[tensor] = shadow, noise
        self._places[_place(tensor)] = weakref.ref(shadow)

    def noise(self, tensor: torch.Tensor) -> float:
        """The relative error that the shadow of a tensor may have."""
        return self._noise.get(tensor, EXACT)

    def follow(self, func: Any, out: Any, exact: Any, noise: float, written: list) -> float:
        """Note the shadows of what an op returned, `exact` as fp64 has it; returns their noise.

        Integers and bools are decisions: the run is made to take those that fp64 takes, so that a
        tie that rounding breaks sends two runs the same way.
        """
        outs, found = _tensors(out), _tensors(exact)
        whole = len(outs) == len(found) or (len(found) == 1 and bool(outs))
        for number, tensor in enumerate(outs):
            self._coarsest = max(self._coarsest, unit_roundoff(tensor.dtype))
            shadow = found[number] if whole and number < len(found) else None
            if shadow is None or shadow.shape != tensor.shape:
                if number == 0:  # of further ones, such as a kernel's own logsumexp, nothing comes
                    noise = max(noise, 64 * self._coarsest)  # all that was rounded before
                shadow = widened(tensor, copy=True)
                if any(tensor is one for one in written) and (old := self.find(tensor)) is not None:
                    shadow = old.copy_(shadow)
            if tensor.is_floating_point() or tensor.is_complex():
                shadow = shadow.to(_WIDER.get(tensor.dtype, tensor.dtype))
                if not computes_nothing(func) and not written:
                    shadow = _laid_out_as(tensor, shadow)
            elif not computes_nothing(func) and not torch.equal(tensor, shadow.to(tensor.device)):
                tensor.copy_(shadow)
            self.set(tensor, shadow, noise)
        return noise


def _tensors(structure: Any) -> list[torch.Tensor]:
    leaves = structure if isinstance(structure, (tuple, list)) else [structure]
    return [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor)]


def _laid_out_as(tensor: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """The shadow with the strides of its tensor, so that what is a view of one is one of both."""
    if shadow.stride() == tensor.stride() or 0 in tensor.stride():
        return shadow
    laid = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=shadow.dtype, device=shadow.device
    )
    return laid.copy_(shadow)


def _place(tensor: torch.Tensor) -> tuple:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (
        storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    )  # fmt: skip
