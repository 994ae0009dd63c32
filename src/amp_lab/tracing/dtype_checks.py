"""Make fake tensors raise like kernels: for dtypes, sizes, and numbers too large for a dtype."""

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
from amp_lab.tracing.kernel_limits import check_limits

_WIDE_LOGITS = remedy(
    "dtype.rnnt_loss",
    "torchaudio's rnnt_loss gets logits in bf16",
    "call it with logits.float()",
    failure="AMP0023",
)

# Ops that convert a number to the dtype of their result. For each a function of the op's args and
# its result: whether real kernels check that the number is not too large for that dtype. A CPU does
# not check it for a tensor of one value; GPUs clamp in fp32.
_ChecksNumber = Callable[[tuple, torch.Tensor], bool]
_CHECKS_BY_OPS: dict[str, _ChecksNumber] = {
    "fill full full_like new_full": lambda args, out: out.device.type != "cpu" or out.numel() != 1,
    "masked_fill index_fill scatter": lambda args, out: True,
    "constant_pad_nd": lambda args, out: max(args[1]) > 0,  # only if it adds values
    "clamp clamp_min clamp_max hardtanh": lambda args, out: out.device.type == "cpu",
}
_CHECKS_BY_OP: dict[str, _ChecksNumber] = {}
for _names, _checks_number in _CHECKS_BY_OPS.items():
    for _name in _names.split():
        _CHECKS_BY_OP[_name] = _checks_number
# Ops whose number may come as a tensor of one value.
_TAKE_NUMBER_FROM_TENSOR = {"masked_fill", "index_fill"}
# Ops after which a tensor of one value still has the same value.
_KEEP_NUMBER = {"lift_fresh", "_to_copy", "detach", "clone", "alias", "view", "expand"}


def _rnnt_loss(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The costs (B,), and the gradient of the logits, `args[0]`, in their shape (B, T, U, V).

    Raises `RuntimeError` for logits that torchaudio's kernels do not take (src/libtorchaudio/rnnt).
    """
    logits = args[0]
    if logits.device.type not in ("cpu", "cuda"):
        raise RuntimeError("rnnt_loss has kernels only for CPU and CUDA")
    if logits.dtype not in (torch.float32, torch.float16):
        raise RuntimeError(f"rnnt_loss takes only fp32 or fp16 logits: {_WIDE_LOGITS.text}")
    return logits.new_empty(len(logits)), torch.empty_like(logits)


# Ops that torch's own fake tensors cannot run, or would run for real, and what runs instead. A rule
# gets the op, its args and its kwargs, and returns the op's result.
_RULES: dict[str, Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]] = {
    # torch's own kernel runs: cuDNN and MIOpen take only int32 targets on the CPU.
    "aten::_use_cudnn_ctc_loss": lambda func, args, kwargs: False,
    "aten::_use_miopen_ctc_loss": lambda func, args, kwargs: False,
    # The gradient of log_probs, in their shape.
    "aten::_ctc_loss_backward": lambda func, args, kwargs: torch.empty_like(args[1]),
    # Under inference_mode ``to`` arrives undecomposed, and torch would really move a constant to
    # the device. The ops that ``to`` is made of do not.
    "aten::to": lambda func, args, kwargs: func.decompose(*args, **kwargs),
    "torchaudio::rnnt_loss_forward": _rnnt_loss,
}


class StrictFakeMode(FakeTensorMode):
    """A fake tensor mode that raises where the kernels of the device would raise.

    Three kinds of ops raise:

    - ops with a result that depends on values, except if `replay` is set: it has the results of a
      run with values on the CPU (see `decisions`);
    - ops that the kernels of a device refuse (`kernel_limits`);
    - ops that get a number too large for their dtype.

    Unlike torch's mode, this mode never runs an op on real tensors of zeros.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.replay: Replay | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Return the result of an op with fake tensors, or raise as a kernel would."""
        kwargs = kwargs or {}
        check_limits(func, args, kwargs)
        if self.replay is not None and self.replay.answers(func, args):
            return self.replay.answer(func, args, kwargs, self._empty)
        if is_unmarked(func):  # torch's own mode would not raise
            raise DynamicOutputShapeException(func)
        rule = _RULES.get(func._schema.name)
        if rule is not None:
            with self:  # torch has switched the mode off while it handles an op
                return rule(func, args, kwargs)
        out: Any = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.removeprefix("aten::").rstrip("_")  # also of an in-place op
        _check_numbers(name, args, out)
        _set_known_number(name, args, out)
        remember_check(func, args, kwargs, out)
        return out

    def _empty(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """A fake tensor, as `Replay.answer` needs them."""
        with self:  # else the tensor would be real
            return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _check_numbers(name: str, args: tuple, out: Any) -> None:
    """Raise torch's error if a number among the args is too large for the dtype of the result.

    `name` is that of the op, without "aten::" and the underscore of an in-place op. Fake tensors
    ignore such a number; real kernels raise.
    """
    checks_number = _CHECKS_BY_OP.get(name)
    if checks_number is None or not out.dtype.is_floating_point or not checks_number(args, out):
        return
    # A real tensor raises the error. It has two values, since a CPU does not check for one value.
    for number in _numbers(name, args):
        torch.empty(2, dtype=out.dtype, device="cpu").fill_(number)


def _numbers(name: str, args: tuple) -> list[float]:
    """The numbers among the arguments of an op, for some ops also those in tensors of one value.

    `name` is as in `_check_numbers`.
    """
    numbers = [argument for argument in args if isinstance(argument, (int, float))]
    if name in _TAKE_NUMBER_FROM_TENSOR:
        numbers += [argument.known_number for argument in args if hasattr(argument, "known_number")]
    return numbers


def _set_known_number(name: str, args: tuple, out: Any) -> None:
    """Store the value of a fake tensor of one number, if known, as its attribute `known_number`.

    `out` is the result of the op with this name and these args. Models make such tensors to fill a
    mask: ``torch.tensor(-1e9)``.
    """
    if not isinstance(out, FakeTensor) or out.dim() or not out.is_floating_point():
        return
    number = _known_number(name, args, out)
    attributes = vars(out)
    attributes.pop("known_number", None)  # after an in-place op the old number is wrong
    if number is not None:
        attributes["known_number"] = number


def _known_number(name: str, args: tuple, out: FakeTensor) -> float | None:
    """The value of a fake tensor of one number, the result of an op; None if it is not known."""
    if out.constant is not None:
        return out.constant.item()
    if name in _KEEP_NUMBER:
        return getattr(args[0], "known_number", None)
    if name not in ("full", "scalar_tensor"):
        return None
    # The args are (number,), or (size, number) with the size as a list.
    for argument in args:
        if isinstance(argument, (int, float)):
            return argument
    return None
