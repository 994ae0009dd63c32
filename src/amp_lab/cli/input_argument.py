"""The inputs of a model as the command line names them.

An ``--input`` is a text such as ``8,3,224,224`` or ``labels=int64:2,128<32000``; ``--batch`` names
the user's own function.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_lab.cli.user_code import call_user_function, find
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    import torch

_INTEGERS = {"int64": 63, "int32": 31, "int16": 15, "int8": 7, "uint8": 8}  # and their bits
_DTYPES = ("float32", "float64", "float16", "bfloat16", *_INTEGERS, "bool", "complex64")
_MOST_SIZES = 64  # what torch's own kernels take


@dataclass(frozen=True)
class InputSpec:
    """One input: a tensor's dtype and shape, and what tells it from the others."""

    name: str | None  # of the argument; None: it is given by its position
    dtype: str
    shape: tuple[int, ...]
    below: int | None = None  # integers are from 0 up to this one, which is left out

    def tensor(self, *, with_values: bool, generator: "torch.Generator") -> "torch.Tensor":
        """The input itself, on ``meta`` if it needs no values.

        Floating-point values are normal; integers are drawn from their range, and 0 where there is
        none, which every embedding has; bools are drawn too. Raises `OptionError` if memory is
        short.
        """
        import torch

        from amp_lab.core.device import memory_bytes

        dtype = getattr(torch, self.dtype)
        if not with_values:  # on meta a large input takes no memory
            return torch.empty(self.shape, dtype=dtype, device="meta")
        # Asked for now, since a system that grants more than there is kills who then uses it.
        memory = memory_bytes(torch.device("cpu"))
        if memory is not None and math.prod(self.shape) * dtype.itemsize > memory:
            raise OptionError(f"an input of {self.shape} does not fit into memory here")
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(self.shape, dtype=dtype, generator=generator)
        high = self.below or 1
        if dtype is torch.bool:
            high = 2
        return torch.randint(high, self.shape, dtype=dtype, generator=generator)


def parse_input(text: str) -> InputSpec:
    """The input that a text describes. Raises `OptionError`, in one line, for any other text."""
    name, rest = _name_and_rest(text)
    kind, _, rest = rest.rpartition(":")
    dtype = kind.strip() or "float32"
    if dtype not in _DTYPES:
        problem = f"{_shown(dtype)} is no dtype here: {_known_dtypes(dtype)}"
        raise OptionError(f"--input {_shown(text)}: {problem}")
    sizes, less, limit = rest.partition("<")
    shape = parse_shape(sizes)
    if math.prod(shape) >= 2**57:  # torch counts bytes in 63 bits
        raise OptionError(f"--input {_shown(text)}: no memory holds a tensor of that shape")
    below = None
    if less:
        below = _bound(text, limit, dtype)
    return InputSpec(name, dtype, shape, below)


def _name_and_rest(text: str) -> tuple[str | None, str]:
    """The name of the argument, if one stands before ``=``, and what comes after it."""
    stripped = text.strip()
    if "=" not in stripped:
        return None, stripped
    name, _, rest = stripped.partition("=")
    if not name.isidentifier():
        raise OptionError(f"--input {_shown(text)}: {_shown(name)} is no name of an argument")
    return name, rest


def _known_dtypes(dtype: str) -> str:
    """What to give instead of a dtype that there is not."""
    near = difflib.get_close_matches(dtype, _DTYPES, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"give one of {', '.join(_DTYPES)}"


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that a text such as ``8,3,224,224`` gives. Raises `OptionError` for any other."""
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise OptionError(f"{_shown(text)} is no shape: give sizes such as 8,3,224,224") from None
    if min(shape) < 1:  # nothing could be traced, and -1 is no wildcard here
        raise OptionError(f"shape {_shown(text)}: every size must be 1 or more")
    if len(shape) > _MOST_SIZES:
        most = f"a tensor has at most {_MOST_SIZES}"
        raise OptionError(f"shape {_shown(text)} has {len(shape):,} sizes: {most}")
    return shape


def drawn(specs: Iterable[InputSpec], with_values: bool) -> tuple[tuple, dict[str, Any]]:
    """The inputs that `parse_input` read, by position and by name; drawn with seed 0."""
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


def batch_of(target: str) -> tuple[tuple, dict[str, Any], str]:
    """The arguments that ``--batch`` returns, and its form. Raises `OptionError` if it does not."""
    what = f"--batch {target!r}"
    batch = find(target)
    if callable(batch):
        batch = call_user_function(what, batch, {})
    args, kwargs = arguments_in(batch, what)
    if not args and not kwargs:
        raise OptionError(f"{what} returns no arguments")
    return args, kwargs, form_of(batch)


def arguments_in(made: Any, what: str) -> tuple[tuple, dict[str, Any]]:
    """The arguments in a tensor, a tuple of them, a dict by name, or ``(args, kwargs)``."""
    import torch

    if isinstance(made, torch.Tensor):
        return (made,), {}
    args: Any = made
    kwargs: Any = {}
    if isinstance(made, Mapping):
        args = ()
        kwargs = made
    elif not isinstance(made, (tuple, list)):
        kinds = "a tensor, a tuple, a dict or (args, kwargs)"
        raise OptionError(f"{what} returns a {type(made).__name__} as the inputs: give {kinds}")
    elif _has_both(made):
        args, kwargs = made
    if not all(isinstance(name, str) for name in kwargs):
        raise OptionError(f"{what}: the names of arguments are strings: {list(kwargs)[:3]}")
    return tuple(args), dict(kwargs)


def form_of(made: Any) -> str:
    """How Python makes args and kwargs of such inputs, whose name is to stand at ``{}``."""
    if isinstance(made, Mapping):
        return "(), dict({})"
    if not isinstance(made, (tuple, list)):
        return "({},), {{}}"
    if _has_both(made):
        return "{}"
    return "tuple({}), {{}}"


def _has_both(made: Sequence) -> bool:
    """Whether it is ``(args, kwargs)``, and not a tuple of arguments."""
    if len(made) != 2:
        return False
    args, kwargs = made
    return isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)


def _bound(text: str, below: str, dtype: str) -> int:
    """The N of ``<N``, which integers stay below."""
    if dtype not in _INTEGERS:
        raise OptionError(f"--input {_shown(text)}: <{below} is for integers: give int64:{text}")
    digits = below.strip()
    bound = 0
    if digits.isdecimal() and len(digits) < 20:
        bound = int(digits)
    if not 1 <= bound <= 2 ** _INTEGERS[dtype]:
        what = f"a whole number from 1 on that {dtype} holds"
        raise OptionError(f"--input {_shown(text)}: <{_shown(below)}: give {what}")
    return bound


def _shown(text: str) -> str:
    """A text in quotes, shortened so that a message stays a line."""
    if len(text) > 60:
        text = f"{text[:57]}..."
    return repr(text)
