"""Find the user's own code by its name, and keep it from printing, exiting and hanging."""

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
from amp_lab.core.errors import AmpLabError, OptionError, with_type
from amp_lab.core.remedies import remedy

FORM = "PACKAGE.MODULE:CALLABLE"
_GUARD = remedy(
    "cli.guard_script",
    "a file defines the model and then fails, such as a script that trains on import",
    "line {line} of {file} runs when the file is imported: put this line, and other code that "
    '{name} does not need, under if __name__ == "__main__":',
)
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
_END_AT_ONCE = os._exit  # the real one, which `_trap_exit` replaces for a while


def find_target(target: str) -> Any:
    """The object that ``PACKAGE.MODULE:NAME`` or ``path/to/model.py:NAME`` names.

    Modules in the current folder are found too. Raises `OptionError` if there is none, and if the
    import fails.
    """
    # `module_name` is the path of a file for FILE.py:NAME, and `path` is NAME, which may have dots.
    module_name, colon, path = target.rpartition(":")
    is_file = module_name.endswith(".py")
    names = path if is_file else f"{module_name}.{path}"
    if not colon or not _are_identifiers(names):
        hint = _model_hint(target) or ", such as torchvision.models:resnet50"
        raise OptionError(f"{target!r}: write {FORM}, or FILE.py:CALLABLE{hint}")
    if is_file:
        module = _import_file(target, module_name)
    else:
        module = _import_module(target, module_name)
    named_object: Any = module
    for name in path.split("."):  # NAME may be a method: Class.method
        try:
            named_object = getattr(named_object, name)
        except AttributeError:
            hint = _near_name_hint(module_name, module, path)
            raise OptionError(f"{target!r}: {module_name} has no {path!r}{hint}") from None
    return named_object


def _are_identifiers(path: str) -> bool:
    """Whether each part of a dotted path is a Python identifier."""
    return all(name.isidentifier() for name in path.split("."))


@contextlib.contextmanager
def user_code_guard(what: str, timeout: float) -> Iterator[None]:
    """The block in which the user's code runs.

    The output of the code is dropped, since it would mix with the table or the JSON. The current
    folder is on ``sys.path``, and ``sys.argv`` has no options of ours. An exception of the code
    becomes an `OptionError` that begins with `what`. After `timeout` seconds the whole process ends
    with exit code 2.
    """
    arguments = sys.argv
    path = list(sys.path)
    with _time_limit(what, timeout), _silence_output(), _trap_exit():
        sys.argv = sys.argv[:1]
        sys.path.append(os.getcwd())  # last, so that no file here hides an installed package
        try:
            yield
        except (AmpLabError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too
            raise OptionError(f"{what}: {_format_error(error)}") from error
        finally:
            sys.argv = arguments
            sys.path[:] = path


def call_user_function(what: str, function: Any, arguments: dict[str, Any]) -> Any:
    """Call the user's function; its exceptions become an `OptionError` that begins with `what`."""
    try:
        return function(**arguments)
    except (KeyboardInterrupt, AmpLabError):
        raise
    except BaseException as error:
        raise OptionError(f"{what} {_call_problem(function, arguments, error)}") from error


def _call_problem(function: Any, arguments: dict[str, Any], error: BaseException) -> str:
    """Why a call of the user's function failed, as the end of a sentence."""
    frames = error.__traceback__
    # With wrong arguments the traceback ends at our call; else it has a frame of the function.
    has_wrong_arguments = frames is not None and frames.tb_next is None
    if not has_wrong_arguments:
        return f"fails when it is called: {with_type(error)}"
    how = "without arguments"
    if arguments:
        values = [f"{name}={value!r}" for name, value in arguments.items()]
        how = f"with {', '.join(values)}"
    hint = _missing_arguments_hint(function, arguments)
    return f"cannot be called {how}: {with_type(error)}{hint}"


def _missing_arguments_hint(function: Any, arguments: dict[str, Any]) -> str:
    """How to give the arguments that a function needs besides `arguments`, to end a sentence.

    Empty if it needs no more.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return "; write a function without parameters that calls it"
    missing = [p.name for p in parameters if _is_required(p) and p.name not in arguments]
    if not missing:
        return ""
    options = " ".join(f"--with {name}=…" for name in missing)
    return f"; add {options}, or write a function without parameters that calls it"


def _is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call has to give this parameter: it has no default, and is no ``*args``."""
    takes_any_number = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in takes_any_number


def _format_error(error: BaseException) -> str:
    """The error in a line, as the end of a sentence."""
    if isinstance(error, SystemExit):
        cure = "remove the call to exit(), parse_args() or another function that ends the process"
        return f"the code ends the process ({with_type(error)}): {cure}"
    return with_type(error)


@contextlib.contextmanager
def _time_limit(what: str, timeout: float) -> Iterator[None]:
    """End the process, with a message about `what`, if the block takes over `timeout` seconds."""

    def end() -> None:
        tell(f"amp-lab: {what}: not finished after {timeout:g} s; use --timeout to allow more")
        _END_AT_ONCE(2)  # code in C, or code that catches everything, cannot be stopped otherwise

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _trap_exit() -> Iterator[None]:
    """The block in which `os._exit` raises `SystemExit`.

    The real one would end the process without a message of ours. Processes that are forked in the
    block still have the real one.
    """
    process_id = os.getpid()

    def exit_by_exception(status: int) -> NoReturn:
        if os.getpid() == process_id:
            raise SystemExit(status)
        _END_AT_ONCE(status)

    os._exit = exit_by_exception
    try:
        yield
    finally:
        os._exit = _END_AT_ONCE


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    """The block in which nothing reaches standard output, neither from Python nor from C."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)  # 1 is standard output; C writes to it directly
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def _import_module(target: str, module_name: str) -> ModuleType:
    """Import the module of a target. Raises `OptionError` if that fails."""
    try:
        return importlib.import_module(module_name)
    except BaseException as error:  # the user's code may raise anything
        if module_name.endswith(".ipynb"):
            problem = "a notebook cannot be imported: put the model into a file FILE.py"
            raise OptionError(f"{target!r}: {problem}") from None
        missing = ""
        if isinstance(error, ModuleNotFoundError):
            missing = error.name or ""
        # Whether the module itself or a package around it is missing, not one that it imports.
        is_target_missing = f"{module_name}.".startswith(f"{missing}.")
        if missing and is_target_missing:
            problem = f"there is no module {missing!r}, neither installed nor in this folder"
            hint = _near_file_hint(target, module_name)
            raise OptionError(f"{target!r}: {problem}{hint}") from None
        raise _import_error(target, error) from error


def _near_file_hint(target: str, module_name: str) -> str:
    """A file in this folder with a similar name, as the end of a sentence; empty if none has."""
    files = [path.stem for path in Path().glob("*.py")]
    near = difflib.get_close_matches(module_name, files, 1)
    if not near:
        return ""
    name = target.rpartition(":")[2]
    return f"; did you mean {near[0]}:{name}?"


def _import_file(target: str, file: str) -> ModuleType:
    """Import a file of Python code, once. Raises `OptionError` if that fails.

    Its folder stays on ``sys.path`` until the block of `user_code_guard` ends.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise OptionError(f"{target!r}: there is no file {file}")
    # Under the file's own name if that is free: pickle looks classes up by their module's name.
    name = path.stem if path.stem.isidentifier() else "target_file"
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
        name = f"_{name}"  # another module has this name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # first, as for `python FILE.py`
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(spec.name, None)
        raise _import_error(target, error) from error
    return module


def _import_error(target: str, error: BaseException) -> BaseException:
    """The error to raise for one that an import raised: an `OptionError` with what to do.

    Ctrl-C stays as it is.
    """
    if isinstance(error, KeyboardInterrupt):
        return error
    if "relative import" in str(error):
        hint = "; the file belongs to a package: write PACKAGE.MODULE:CALLABLE"
    else:
        name = target.rpartition(":")[2]
        hint = _main_guard_hint(name, error)
    return OptionError(f"{target!r} cannot be imported: {_format_error(error)}{hint}")


def _main_guard_hint(path: str, error: BaseException) -> str:
    """What to do if a statement after the target's definition fails, as the end of a sentence.

    `path` is the target's name in its module, such as ``Net`` or ``Net.build``. Empty if something
    else fails.
    """
    name = path.partition(".")[0]
    for frame, line in traceback.walk_tb(error.__traceback__):
        is_module_code = frame.f_code.co_name == "<module>"
        if not is_module_code or name not in frame.f_globals:
            continue
        # The outermost module that has defined the name, and then failed at this line.
        file = Path(frame.f_code.co_filename)
        if not file.is_file() or _is_definition(file, line):
            return ""
        return f"; {_GUARD.sentence(line=line, file=file.name, name=path)}"
    return ""


def _is_definition(file: Path, line: int) -> bool:
    """Whether the statement at this line of a module is a definition or an import."""
    for statement in ast.parse(file.read_bytes()).body:
        last_line = statement.end_lineno or statement.lineno
        if statement.lineno <= line <= last_line and isinstance(statement, _DEFINITIONS):
            return True
    return False


def _near_name_hint(module_name: str, module: ModuleType, path: str) -> str:
    """A name in the module that is like `path`, or else its last model, as the end of a sentence.

    Empty if there is neither. `module_name` is the module or file as the target names it.
    """
    names = [name for name in vars(module) if not name.startswith("_")]
    near = difflib.get_close_matches(path, names, 1) or _models_defined_in(module)
    if not near:
        return ""
    return f"; did you mean {module_name}:{near[0]}?"


def _models_defined_in(module: ModuleType) -> list[str]:
    """Names of the model classes that a module defines, the last first: it may use the others."""
    from torch import nn

    models = []
    for name, value in reversed(vars(module).items()):
        is_model = isinstance(value, type) and issubclass(value, nn.Module)
        if is_model and value.__module__ == module.__name__:
            models.append(name)
    return models


def _model_hint(target: str) -> str:
    """What to write for a target without a name, such as ``models.py`` or ``torchvision.models:``.

    The end of a sentence with the targets of models that are there; empty if there are none.
    """
    path = target.rstrip(":")
    try:
        targets = _targets_in(target, path)
    except OptionError:  # there is no such module
        return ""
    if not targets:
        return ""
    return f"; did you mean {' or '.join(targets[:3])}?"


def _targets_in(target: str, path: str) -> list[str]:
    """The targets of the models in a file or module, such as ``models.py:Net``.

    `path` is the file or module; of ``PACKAGE.MODULE.NAME``, the target of that name. `target` is
    for messages. Raises `OptionError` if there is no such module.
    """
    if path.endswith(".py"):
        module = _import_file(target, path)
    elif not _are_identifiers(path):
        return []
    else:
        try:
            module = _import_module(target, path)
        except OptionError:
            module_name, _, name = path.rpartition(".")
            if module_name and hasattr(_import_module(target, module_name), name):
                return [f"{module_name}:{name}"]
            raise
    return [f"{path}:{name}" for name in _models_defined_in(module)]
