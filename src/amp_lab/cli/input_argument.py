"""Read the inputs of a model from the command line.

An ``--input`` is a text such as ``8,3,224,224`` or ``labels=int64:2,128<32000``. ``--batch`` names
a function of the user.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_lab.cli.user_code import call_user_function, find_target
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    import torch

_INTEGERS = {"int64": 63, "int32": 31, "int16": 15, "int8": 7, "uint8": 8}  # bits of the value
_DTYPES = ("float32", "float64", "float16", "bfloat16", *_INTEGERS, "bool", "complex64")
_MOST_SIZES = 64  # dimensions that torch's own kernels take


@dataclass(frozen=True)
class InputSpec:
    """One input: the tensor's dtype and shape, and the argument that it is for."""

    name: str | None  # of the argument; None for one that is passed by position
    dtype: str
    shape: tuple[int, ...]
    below: int | None = None  # integers are drawn from 0 to below this

    def tensor(self, *, with_values: bool, generator: "torch.Generator") -> "torch.Tensor":
        """The tensor, on ``meta`` if no values are needed.

        Floating-point values are drawn from a normal distribution, integers from 0 up to `below`,
        and bools from both. Integers without `below` are 0, which is a row of every embedding.
        Raises `OptionError` if memory is short.
        """
        import torch

        from amp_lab.core.device_facts import memory_bytes

        dtype = getattr(torch, self.dtype)
        if not with_values:  # on meta a large input takes no memory
            return torch.empty(self.shape, dtype=dtype, device="meta")
        # Checked first: Linux would grant too much memory, and kill the process when it is used.
        memory = memory_bytes(torch.device("cpu"))
        if memory is not None and math.prod(self.shape) * dtype.itemsize > memory:
            raise OptionError(
                f"an input of shape {self.shape} needs more memory than this process may use"
            )
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(self.shape, dtype=dtype, generator=generator)
        high = self.below or 1
        if dtype is torch.bool:
            high = 2
        return torch.randint(high, self.shape, dtype=dtype, generator=generator)


def parse_input(text: str) -> InputSpec:
    """The input that a text describes, such as ``labels=int64:2,128<32000``.

    Raises `OptionError`, in one line, for any other text.
    """
    name, rest = _split_name(text)
    dtype_text, _, rest = rest.rpartition(":")
    dtype = dtype_text.strip() or "float32"
    if dtype not in _DTYPES:
        problem = f"unknown dtype {_quote(dtype)}: {_dtype_hint(dtype)}"
        raise OptionError(f"--input {_quote(text)}: {problem}")
    sizes, less_than, limit = rest.partition("<")
    shape = parse_shape(sizes)
    if math.prod(shape) >= 2**57:  # torch counts bytes in 63 bits, with up to 8 for each value
        raise OptionError(f"--input {_quote(text)}: a tensor of this shape fits into no memory")
    below = None
    if less_than:
        below = _parse_bound(text, limit, dtype)
    return InputSpec(name, dtype, shape, below)


def _split_name(text: str) -> tuple[str | None, str]:
    """The name of the argument, or None without ``NAME=``, and the text that comes after it.

    Raises `OptionError` if the name cannot be that of an argument.
    """
    stripped = text.strip()
    if "=" not in stripped:
        return None, stripped
    name, _, rest = stripped.partition("=")
    if not name.isidentifier():
        raise OptionError(f"--input {_quote(text)}: {_quote(name)} is not a valid name")
    return name, rest


def _dtype_hint(dtype: str) -> str:
    """Which dtype to give instead of an unknown one."""
    near = difflib.get_close_matches(dtype, _DTYPES, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"give one of {', '.join(_DTYPES)}"


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that a text such as ``8,3,224,224`` gives. Raises `OptionError` for any other."""
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise OptionError(
            f"{_quote(text)} is not a shape: give sizes such as 8,3,224,224"
        ) from None
    if min(shape) < 1:  # there is nothing to trace in 0 rows, and -1 is no wildcard here
        raise OptionError(f"shape {_quote(text)}: every size must be 1 or more")
    if len(shape) > _MOST_SIZES:
        most = f"a tensor has at most {_MOST_SIZES}"
        raise OptionError(f"shape {_quote(text)} has {len(shape):,} sizes: {most}")
    return shape


def draw_inputs(specs: Iterable[InputSpec], with_values: bool) -> tuple[tuple, dict[str, Any]]:
    """The inputs, by position and by name, drawn with seed 0; on ``meta`` without `with_values`.

    Raises `OptionError` for a name that is given twice.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    args = []
    kwargs = {}
    for spec in specs:
        tensor = spec.tensor(with_values=with_values, generator=generator)
        if spec.name is None:
            args.append(tensor)
        elif spec.name in kwargs:
            raise OptionError(f"--input {spec.name}= is given twice: give each argument once")
        else:
            kwargs[spec.name] = tensor
    return tuple(args), kwargs


def load_batch(target: str) -> tuple[tuple, dict[str, Any], str]:
    """The arguments that ``--batch`` returns, and their `python_form`. Raises `OptionError`."""
    what = f"--batch {target!r}"
    batch = find_target(target)
    if callable(batch):
        batch = call_user_function(what, batch, {})
    args, kwargs = split_arguments(batch, what)
    if not args and not kwargs:
        raise OptionError(f"{what} gives no inputs: give at least one tensor")
    return args, kwargs, python_form(batch)


def split_arguments(inputs: Any, what: str) -> tuple[tuple, dict[str, Any]]:
    """The arguments by position and by name that the user's function or batch gives.

    `inputs` is a tensor, a tuple of them, a dict by name, or ``(args, kwargs)``. Raises
    `OptionError` for anything else; `what` begins the message.
    """
    import torch

    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    args: Any = ()
    kwargs: Any = {}
    if isinstance(inputs, Mapping):
        kwargs = inputs
    elif not isinstance(inputs, (tuple, list)):
        kinds = "a tensor, a tuple, a dict or (args, kwargs)"
        kind = type(inputs).__name__
        raise OptionError(f"{what} returns a {kind} as the inputs: return {kinds}")
    elif _is_args_and_kwargs(inputs):
        args, kwargs = inputs
    else:
        args = inputs
    if not all(isinstance(name, str) for name in kwargs):
        raise OptionError(f"{what}: the keys of the inputs are not strings: {list(kwargs)[:3]}")
    return tuple(args), dict(kwargs)


def python_form(inputs: Any) -> str:
    """A template for `str.format` of the Python code that turns such inputs into ``args, kwargs``.

    ``{}`` is to be replaced by the name of the inputs: for a tensor ``x`` it gives ``(x,), {}``.
    """
    if isinstance(inputs, Mapping):
        return "(), dict({})"
    if not isinstance(inputs, (tuple, list)):
        return "({},), {{}}"
    if _is_args_and_kwargs(inputs):
        return "{}"
    return "tuple({}), {{}}"


def _is_args_and_kwargs(inputs: Sequence) -> bool:
    """Whether a sequence is ``(args, kwargs)``, and not a tuple of arguments."""
    if len(inputs) != 2:
        return False
    args, kwargs = inputs
    return isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)


def _parse_bound(text: str, limit: str, dtype: str) -> int:
    """The number N of ``<N``, below which integers are drawn.

    `limit` is the text after ``<``, and `text` the whole ``--input``. Raises `OptionError` if the
    limit is not a number from 1 on that the dtype holds, or if the dtype is not one of integers.
    """
    if dtype not in _INTEGERS:
        raise OptionError(
            f"--input {_quote(text)}: <{limit} needs a dtype of integers: give {_as_int64(text)}"
        )
    digits = limit.strip()
    bound = 0
    if digits.isdecimal() and len(digits) < 20:  # 2^63 has 19; Python refuses thousands
        bound = int(digits)
    most = 2 ** _INTEGERS[dtype]
    what = f"a whole number from 1 to 2^{_INTEGERS[dtype]}"
    if dtype == "int64":  # torch gets the bound itself as an int64
        most -= 1
        what += " - 1"
    if not 1 <= bound <= most:
        raise OptionError(f"--input {_quote(text)}: <{_quote(limit)}: give {what}")
    return bound


def _as_int64(text: str) -> str:
    """The text of an ``--input`` with int64 as its dtype, before the shape and after the name."""
    name, equals, rest = text.rpartition("=")
    return f"{name}{equals}int64:{rest.rpartition(':')[2]}"


def _quote(text: str) -> str:
    """A text in quotes, shortened so that a message stays a line."""
    if len(text) > 60:
        text = f"{text[:57]}..."
    return repr(text)
