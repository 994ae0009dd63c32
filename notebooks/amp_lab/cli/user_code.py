"""The user's own code: found by its name, and kept from printing, exiting and hanging."""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import io
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from amp_lab.cli.printing import tell
from amp_lab.errors import AmpLabError, OptionError, with_type
from amp_lab.remedies import remedy

FORM = "PACKAGE.MODULE:CALLABLE"
_GUARD = remedy(
    "cli.guard_script",
    "a file has the model, and runs into an error behind it, as a script that trains may",
    "line {line} of {file} runs when the file is imported: put it, and what else is not needed for "
    '{name}, under if __name__ == "__main__":',
)
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
_END_AT_ONCE = os._exit


def find(target: str) -> Any:
    """What ``PACKAGE.MODULE:NAME`` or ``path/to/model.py:NAME`` stands for.

    Modules in the current folder are found too. Raises `OptionError` for whatever goes wrong.
    """
    module_name, colon, path = target.rpartition(":")
    names = path.split(".")
    is_file = module_name.endswith(".py")
    parts = names if is_file else [*module_name.split("."), *names]
    if not colon or not all(part.isidentifier() for part in parts):
        hint = _did_you_mean(target) or ", such as torchvision.models:resnet50"
        raise OptionError(f"{target!r}: write {FORM}, or FILE.py:CALLABLE{hint}")
    module = _from_file(target, module_name) if is_file else _imported(target, module_name)
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)  # a path, so that methods of a class can be named
        except AttributeError:
            hint = _near_name(module_name, module, path)
            raise OptionError(f"{target!r}: {module_name} has no {path!r}{hint}") from None
    return found


@contextlib.contextmanager
def kept_in_bounds(what: str, timeout: float) -> Iterator[None]:
    """The block in which the user's code runs.

    What it prints goes nowhere, since it is no part of the table or the JSON; the current folder is
    on the path; ``sys.argv`` has no options of ours. Whatever it raises is an `OptionError` that
    begins with `what`, and after `timeout` seconds the whole process ends with 2.
    """
    before = sys.argv, list(sys.path)
    with _time_limit(what, timeout), _nothing_printed(), _exits_told():
        sys.argv = sys.argv[:1]
        sys.path.append(os.getcwd())  # at the end, so that no file here hides a package
        try:
            yield
        except (AmpLabError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, and whatever else user's code raises
            raise OptionError(f"{what}: {_said(error)}") from error
        finally:
            sys.argv, sys.path[:] = before


def called(what: str, function: Any, arguments: dict[str, Any]) -> Any:
    """What the user's function returns; `OptionError` for what it raises."""
    try:
        return function(**arguments)
    except (KeyboardInterrupt, AmpLabError):
        raise
    except BaseException as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        # An error of the call itself has no frame of the function.
        is_of_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
        how = f"cannot be called {f'with {given}' if given else 'without arguments'}"
        remedy = _missing(function, arguments) if is_of_call else ""
        said = f"{how if is_of_call else 'fails when it is called'}: {with_type(error)}{remedy}"
        raise OptionError(f"{what} {said}") from error


def _missing(function: Any, arguments: dict[str, Any]) -> str:
    """What to do if it has arguments without a default, as the end of a sentence."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some in C have none
        return "; write a function without parameters that calls it"
    needed = [
        f"--with {p.name}=…"
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if p.name not in arguments
    ]
    wanted = f"add {' '.join(needed)}, or write a function without parameters that calls it"
    return f"; {wanted}" if needed else ""


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"exits by itself ({with_type(error)}): give code that returns"
    return with_type(error)


@contextlib.contextmanager
def _time_limit(what: str, timeout: float) -> Iterator[None]:
    def end() -> None:
        tell(f"amp-lab: {what}: not done after {timeout:g} s; give --timeout SECONDS for longer")
        _END_AT_ONCE(2)  # the only way out of code that catches everything, or is in C

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _exits_told() -> Iterator[None]:
    """The block in which `os._exit` raises `SystemExit`, except in processes forked there."""
    here = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() == here:
            raise SystemExit(status)
        _END_AT_ONCE(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = _END_AT_ONCE


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """The block in which nothing reaches standard output, from Python or below it."""
    sys.stdout.flush()
    real = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.dup2(real, 1)
        os.close(real)


def _imported(target: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except BaseException as error:  # whatever the user's code raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if module_name.endswith(".ipynb"):
            what = "a notebook cannot be imported: put the model into a file FILE.py"
            raise OptionError(f"{target!r}: {what}") from None
        # A module that the user's own imports is another matter: there the whole error is of use.
        if missing and f"{module_name}.".startswith(f"{missing}."):
            here = [path.stem for path in Path().glob("*.py")]
            near = difflib.get_close_matches(module_name, here, 1)
            hint = f"; did you mean {near[0]}:{target.rpartition(':')[2]}?" if near else ""
            what = f"{target!r}: no module {missing!r} is installed, or in this folder{hint}"
            raise OptionError(what) from None
        raise _not_imported(target, error) from error


def _from_file(target: str, file: str) -> ModuleType:
    path = Path(file).resolve()
    if not path.is_file():
        raise OptionError(f"{target!r}: there is no file {file}")
    # Under its own name where that is free, for classes that are looked up by their module's name.
    name = path.stem if path.stem.isidentifier() else "target_file"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(f"_{name}" if known else name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # first, as for `python FILE.py`
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(spec.name, None)
        raise _not_imported(target, error) from error
    return module


def _not_imported(target: str, error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    hint = ""
    if "relative import" in str(error):
        hint = "; give it as a module of its package, as PACKAGE.MODULE:CALLABLE"
    else:
        hint = _guard(target.rpartition(":")[2], error)
    return OptionError(f"{target!r} cannot be imported: {_said(error)}{hint}")


def _guard(path: str, error: BaseException) -> str:
    """What to do if a statement behind the definition of the target fails, as the end of a line."""
    name = path.partition(".")[0]
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>" and name in frame.f_globals:
            file = Path(frame.f_code.co_filename)
            if not file.is_file() or _is_definition(file, line):
                return ""
            return f"; {_GUARD.said(line=line, file=file.name, name=path)}"
    return ""


def _is_definition(file: Path, line: int) -> bool:
    """Whether the statement of a module at a line defines or imports something."""
    statements = ast.parse(file.read_bytes()).body
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or one.lineno)]
    return any(isinstance(one, _DEFINITIONS) for one in around)


def _near_name(module_name: str, module: ModuleType, path: str) -> str:
    """The name that was meant, as the end of a sentence."""
    names = [name for name in vars(module) if not name.startswith("_")]
    near = difflib.get_close_matches(path, names, 1) or _models_of(module)[:1]
    return f"; did you mean {module_name}:{near[0]}?" if near else ""


def _models_of(module: ModuleType) -> list[str]:
    """The classes of models that a module defines itself, the last first: it holds the others."""
    from torch import nn

    return [
        name
        for name, value in reversed(vars(module).items())
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]


def _did_you_mean(target: str) -> str:
    """The same for a target without a colon: a file, a module, or a name with a dot before it."""
    bare = target.rstrip(":")
    before, _, name = bare.rpartition(".")
    names: list[str] = []
    with contextlib.suppress(OptionError):
        if bare.endswith(".py"):
            names = _models_of(_from_file(target, bare))
        elif all(part.isidentifier() for part in bare.split(".")):
            try:
                names = _models_of(_imported(target, bare))
            except OptionError:
                if before and hasattr(_imported(target, before), name):
                    bare, names = before, [name]
    meant = " or ".join(f"{bare}:{name}" for name in names[:3])
    return f"; did you mean {meant}?" if meant else ""
