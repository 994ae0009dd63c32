"""Fake tensors as strict as kernels: about dtypes, sizes, and numbers too large for a dtype."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from amp_lab.core.remedies import remedy
from amp_lab.tracing.decisions import Replay, is_unmarked
from amp_lab.tracing.finite_checks import remember_check
from amp_lab.tracing.kernel_limits import OpCall, refusal_of

_WIDE_LOGITS = remedy(
    "dtype.rnnt_loss",
    "torchaudio's rnnt_loss gets logits in bf16",
    "call it with logits.float()",
)

# Ops that turn a number into the dtype of their result, and when they refuse one that is too large:
# a CPU fills in a single one without a look, and GPUs clamp in fp32.
_Refuses = Callable[[tuple, torch.Tensor], bool]
_CONVERT_IF: dict[str, _Refuses] = {
    "fill full full_like new_full": lambda args, out: out.device.type != "cpu" or out.numel() != 1,
    "masked_fill index_fill scatter": lambda args, out: True,
    "constant_pad_nd": lambda args, out: max(args[1]) > 0,
    "clamp clamp_min clamp_max hardtanh": lambda args, out: out.device.type == "cpu",
}
_CONVERTING: dict[str, _Refuses] = {}
for _names, _refuses in _CONVERT_IF.items():
    _CONVERTING |= dict.fromkeys(_names.split(), _refuses)
# Those that take the number from a tensor of one value, if they are given one.
_READING = {"masked_fill", "index_fill"}
_COPYING = {"lift_fresh", "_to_copy", "detach", "clone", "alias", "view", "expand"}


def _no_other_kernel(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """cuDNN and MIOpen take only int32 targets that are on the CPU."""
    return False


def _like_log_probs(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradient of a CTC loss, which is that of its second argument."""
    return torch.empty_like(args[1])


def _rnnt_loss(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The cost of each item, and the gradient of the logits (B, T, U, V) that goes with it.

    Raises `RuntimeError` for what torchaudio's kernels do not take (src/libtorchaudio/rnnt).
    """
    logits = args[0]
    if logits.device.type not in ("cpu", "cuda"):
        raise RuntimeError("rnnt_loss has kernels for CPUs and CUDA alone")
    if logits.dtype not in (torch.float32, torch.float16):
        raise RuntimeError(f"rnnt_loss takes logits in fp32 or fp16 alone: {_WIDE_LOGITS.text}")
    return logits.new_empty(len(logits)), torch.empty_like(logits)


def _in_parts(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the parts of an op give.

    Under inference_mode ``to`` comes whole, and torch would move a constant for real. Of its parts
    torch knows not to, where the device is absent.
    """
    return func.decompose(*args, **kwargs)


# Of ops that torch's own fake tensors cannot run, or run for real.
_RULES: dict[str, Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]] = {
    "aten::_use_cudnn_ctc_loss": _no_other_kernel,
    "aten::_use_miopen_ctc_loss": _no_other_kernel,
    "aten::_ctc_loss_backward": _like_log_probs,
    "aten::to": _in_parts,
    "torchaudio::rnnt_loss_forward": _rnnt_loss,
}


class StrictFakeMode(FakeTensorMode):
    """A mode in which tensors, a module's own too, have no values and no memory.

    An op that torch cannot run without values raises, and is never run for real on zeros, unless a
    `replay` tells what it returned in a real run. So does one that the kernels of a device refuse
    (`kernel_limits`), and one that gets a number too large for a dtype.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.replay: Replay | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        check_limits(func, args, kwargs)
        if self.replay is not None and self.replay.answers(func, args):
            return self.replay.answer(func, args, kwargs, self._empty)
        if is_unmarked(func):
            raise DynamicOutputShapeException(func)
        rule = _RULES.get(func._schema.name)
        if rule is not None:
            with self:
                return rule(func, args, kwargs)
        out: Any = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        refuses = _CONVERTING.get(name)
        if refuses is not None and _is_floating(out) and refuses(args, out):
            _require_representable(_numbers(name, args), out.dtype)
        _remember_number(name, args, out)
        remember_check(func, args, kwargs, out)
        return out

    def _empty(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Any:
        with self:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)


def check_limits(func: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise `RuntimeError` if an op gets what the kernels of its device do not take."""
    name = func._schema.name.removeprefix("aten::")
    refused = refusal_of(OpCall(name, args, kwargs.get("out")))
    if refused is not None:
        raise RuntimeError(refused)


def _is_floating(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.dtype.is_floating_point


def _require_representable(numbers: list[float], dtype: torch.dtype) -> None:
    """Raise torch's own `RuntimeError` for a number that is too large for a dtype."""
    for number in numbers:
        torch.empty(2, dtype=dtype, device="cpu").fill_(number)


def _numbers(name: str, args: tuple) -> list[float]:
    """The numbers among the arguments of an op that converts them."""
    numbers = [given for given in args if isinstance(given, (int, float))]
    if name in _READING:
        numbers += [given.known_number for given in args if hasattr(given, "known_number")]
    return numbers


def _remember_number(name: str, args: tuple, out: Any) -> None:
    """Keep the value of a fake tensor that a model made of one number, such as a mask's."""
    if not isinstance(out, FakeTensor) or out.dim() or not out.is_floating_point():
        return
    number = _number_of(name, args, out)
    attributes = vars(out)
    attributes.pop("known_number", None)  # an in-place op may have changed it
    if number is not None:
        attributes["known_number"] = number


def _number_of(name: str, args: tuple, out: FakeTensor) -> float | None:
    if out.constant is not None:
        return out.constant.item()
    if name in _COPYING:
        return getattr(args[0], "known_number", None)
    if name not in ("full", "scalar_tensor"):
        return None
    return next(given for given in args if isinstance(given, (int, float)))
