"""Checks for notebook 02, Predict the dtype of every op under autocast."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course.exercises import call, exercise, need

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_REASONS = {
    "a": "`x @ w` is a matmul.",
    "b": "`relu` is not on the list.",
    "c": "`+` is not on the list, and its inputs have different dtypes.",
    "d": "`mse_loss` is on the list. Which policy does it have?",
    "e": "after the block, autocast no longer casts, and `e` already exists.",
}


@exercise
def check_dtypes(dtypes: list[str]) -> str:
    """The dtypes of five results, four of them computed under the CPU's autocast."""
    x, w = torch.rand(4, 4), torch.rand(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ w
        b = a.relu()
        c = b + x
        d = F.mse_loss(a, b)
    e = a * 2
    right = [_SHORT[tensor.dtype] for tensor in (a, b, c, d, e)]
    need(
        isinstance(dtypes, list | tuple)
        and len(dtypes) == len(right)
        and all(dtype in _SHORT.values() for dtype in dtypes),
        'The answer is a list of five strings, each "fp32" or "bf16".',
    )
    for name, given, found in zip(_REASONS, dtypes, right, strict=True):
        need(given == found, f"`{name}` is not {given}. A hint: {_REASONS[name]}")
    return (
        "The matmul returns bf16, the mixed sum and the loss are fp32, and `e` has the "
        "dtype of `a`."
    )


@exercise
def check_island(square_in_fp32: Callable[..., Any]) -> str:
    """A product in fp32, under autocast and without, of an fp32 and of a bf16 matrix."""
    torch.manual_seed(0)
    wide = torch.rand(8, 8)
    for matrix in (wide, wide.bfloat16()):
        for enabled in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                found = call(square_in_fp32, matrix)
            where = (
                f"For an input in {_SHORT[matrix.dtype]}, with autocast "
                f"{'on' if enabled else 'off'},"
            )
            need(
                found.dtype is torch.float32,
                f"{where} the result is {found.dtype}: "
                + (
                    "`enabled=False` turns casting off, but does not change the dtype of the "
                    "inputs."
                    if matrix.dtype is torch.bfloat16
                    else "autocast has cast the matrix to bf16 again."
                ),
            )
            right = matrix.double() @ matrix.double()
            need(
                torch.allclose(found.double(), right, rtol=1e-5),
                f"{where} the result is fp32, but its values are rounded to bf16: the cast "
                "comes too late.",
            )
    return "Every matmul runs in fp32, for each input dtype, with and without autocast."


class _Casts(TorchDispatchMode):
    """While active, counts the casts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "_to_copy"
        return func(*args, **(kwargs or {}))


@exercise
def check_casts(number: int) -> str:
    """How many casts three products of an input and a trained weight take."""
    x, w = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
    with _Casts() as casts, torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            x @ w
    need(
        number != 6,
        "6 would be right without a cache. But autocast casts one of the two tensors only once.",
    )
    need(
        number != 2,
        "2 would be right if the cache stored both casts. Which tensors does the cache store?",
    )
    need(
        number == casts.count,
        f"{number} is wrong. Count the casts of `x` and the casts of `w` separately.",
    )
    return f"{casts.count} casts: `x` is cast in every matmul, and `w` only once."


@exercise
def check_policy(policy: Callable[..., Any]) -> str:
    """A function that tells an op's policy on the CPU."""
    wide = torch.rand(4, 4)
    names = {"lower precision", "fp32", "not listed"}
    for name, op in {
        "matmul": lambda a: a @ a,
        "relu": torch.relu,
        "mse_loss": lambda a: F.mse_loss(a, a),
        "softmax": lambda a: a.softmax(-1),
        "linear": lambda a: F.linear(a, a),
        "prod": torch.prod,
        "add": lambda a: a + a,
    }.items():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = [op(wide).dtype, op(wide.bfloat16()).dtype]
        right = "not listed"
        if out[0] is out[1]:
            right = "fp32" if out[0] is torch.float32 else "lower precision"
        found = call(policy, op)
        need(
            found in names,
            f"For `{name}`, your function returns {found!r}, which is not one"
            " of the three policies.",
        )
        need(
            found == right,
            f"For `{name}`, your function returns {found!r}. With an fp32 matrix, the op "
            f"returns {_SHORT[out[0]]}, and with a bf16 matrix {_SHORT[out[1]]}. You need both"
            " calls to tell the three policies apart.",
        )
    return "The two output dtypes of an op tell the three policies apart."
