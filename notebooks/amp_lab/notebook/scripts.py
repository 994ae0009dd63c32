"""A function of a notebook as a script for another process, and plain data between the two."""

import builtins
import dis
import inspect
import pickle
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from amp_lab.errors import ParallelError, first_line

_LAST_LINES = 12  # of what a process said, in an error


def script_of(function: Callable, needed: tuple[Callable, ...], call: str) -> str:
    """The source of a script that defines `function` and what it needs, and ends with `call`.

    A name of another module is imported as it was here; a function of the same notebook must be in
    `needed`; data must come as an argument.

    Raises `ParallelError` for a function without source, or with a name that cannot be had there.
    """
    functions = [*needed, function]
    known = {each.__name__ for each in functions}
    sources, imports = [], {}
    for each in functions:
        source = _source(each)
        code = compile(source, each.__name__, "exec")
        namespace = inspect.unwrap(each).__globals__
        names = set(_global_names(code)) - known - vars(builtins).keys()  # IPython has its own open
        for name in sorted(names & namespace.keys()):
            imports[name] = _import_line(name, namespace[name], each)
        sources.append(source)
    return "\n\n".join(["\n".join(imports.values()), *sources, call])


def _source(function: Callable) -> str:
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType) or plain.__name__ == "<lambda>":
        raise ParallelError(f"{function!r}: give a function that is defined with def")
    if plain.__code__.co_freevars:
        names = ", ".join(plain.__code__.co_freevars)
        raise ParallelError(
            f"{plain.__name__} uses {names} of the function around it; make it an argument"
        )
    try:
        return textwrap.dedent(inspect.getsource(plain))
    except (OSError, TypeError) as error:
        raise ParallelError(
            f"{plain.__name__} has no source to be sent ({first_line(error)}); define it in a cell "
            "or a file"
        ) from error


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that a piece of code, and the functions in it, look up outside of themselves."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _import_line(name: str, value: object, user: Callable) -> str:
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if qualified is None or module is None:
        raise ParallelError(f"{user.__name__} uses {name}, which is data; make it an argument")
    if module in ("__main__", user.__module__):
        raise ParallelError(
            f"{user.__name__} uses {name}, which is defined beside it; give it too, after the "
            "function that is to run"
        )
    if getattr(sys.modules.get(module), qualified, None) is not value:
        raise ParallelError(
            f"{user.__name__} uses {name}, which cannot be imported from {module}; import it "
            "inside of the function"
        )
    return f"from {module} import {qualified} as {name}"


def save_plain(value: object, path: Path, what: str) -> None:
    """Write numbers, text, dtypes, tensors, and dicts, lists and tuples of them.

    Raises `ParallelError` for anything else; `what` says what it is.
    """
    try:
        torch.save(value, path)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ParallelError(f"{what} is not plain data: {first_line(error)}") from error
    if unsafe:
        raise ParallelError(f"{what} is not plain data: {', '.join(unsafe)}")


def load_plain(path: Path) -> object:
    """What `save_plain` wrote."""
    return torch.load(path, map_location="cpu", weights_only=True)


def answer(function: Callable[..., object], folder: Path, suffix: str = "") -> None:
    """Call `function` with the arguments in a folder, and leave the result, or the error, there."""
    try:
        arguments = load_plain(folder / "arguments.pt")
        save_plain(function(**arguments), folder / f"result{suffix}.pt", "the result")
    except BaseException as error:
        frames = error.__traceback__.tb_next  # without this one
        text = "".join(traceback.format_exception(error.with_traceback(frames)))
        (folder / f"error{suffix}.txt").write_text(text, encoding="utf-8")
        raise


def end_of(text: str) -> str:
    """The last lines of what a process said, for an error."""
    return textwrap.indent("\n".join(text.strip().splitlines()[-_LAST_LINES:]), "  ")
