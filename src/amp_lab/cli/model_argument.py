"""What the command line is given to work on: a model, its inputs and its loss.

`add_model` gives a command the options, and `given_model` the model that they name.
"""

import argparse
import ast
import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amp_lab.cli.config_target import is_config, model_of
from amp_lab.cli.input_argument import InputSpec, arguments_in, batch_of, drawn, parse_input
from amp_lab.cli.printing import add_format
from amp_lab.cli.user_code import FORM, call_user_function, find, user_code_guard
from amp_lab.core.errors import AmpLabError, OptionError, TraceError

if TYPE_CHECKING:
    from torch import nn

    from amp_lab.cli.model_checks import Observer


_TIMEOUT_S = 600


@dataclass
class GivenModel:
    """A model, and what a call and a loss of it take: ``loss_fn(model(*args, **kwargs))``."""

    model: "nn.Module"
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None  # gets the output
    returned: int = 0  # parts of the tuple that the callable returned; 0: the model alone
    form: str = ""  # of what --batch returns, see `form_of`
    observer: "Observer" = field(init=False)
    """What a run of the model in the block of `given_model` has shown."""

    def passed_to(self, tool: Callable[..., Any], **options: Any) -> Any:
        """What a tool returns that takes a model, what a call of it takes, and options."""
        return tool(self.model, *self.args, **options, **self.kwargs)


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the options that name a model, its inputs, its loss and the format."""
    option = command.add_argument
    target = (
        "returns the model when it is called; or FILE.py:CALLABLE; or a config.json of transformers"
    )
    argument = "an argument of the callable, such as n_layers=2; may be repeated"
    shapes = (
        "such as 8,3,224,224 (float32), 'int64:2,128<32000' (ids below 32000) or labels=int64:8 "
        "(a keyword); repeat it for several inputs"
    )
    batch = "returns the arguments instead: a tensor, a tuple, a dict, or (args, kwargs)"
    loss = "makes a loss of the output; or .NAME, which is an attribute of the output"
    limit = f"of the whole command, in case the model hangs (default: {_TIMEOUT_S})"
    option("target", metavar=FORM, help=target)
    option("--with", action="append", dest="arguments", metavar="NAME=VALUE", help=argument)
    option("--input", action="append", metavar="[NAME=][DTYPE:]SIZES", help=shapes)
    option("--batch", metavar=FORM, help=batch)
    option("--loss", metavar=FORM, help=loss)
    option("--eval", action="store_true", help="put the model into evaluation mode")
    option("--timeout", type=_seconds, default=_TIMEOUT_S, metavar="SECONDS", help=limit)
    add_format(command)


def add_absent_device(command: argparse.ArgumentParser) -> None:
    """Add the option ``--device`` of what need not be here."""
    names = "cuda (also for ROCm; the default), xpu, mps, cpu"
    command.add_argument("--device", default="cuda", metavar="NAME", help=names)


@contextlib.contextmanager
def given_model(
    options: argparse.Namespace, *, with_values: bool, target: str | None = None
) -> Iterator[GivenModel]:
    """The block in which the model that `add_model`'s options name can be run.

    With `with_values` it is built for real, on the CPU, with seed 0, and the inputs have values;
    else on ``meta`` wherever that makes no difference to a trace. `target` is the one of several.

    The user's code prints nothing here, and what it does wrong is an error in one line: in the
    block too, so run the model there. Raises `AmpLabError`.
    """
    target = target or options.target
    with user_code_guard(repr(target), options.timeout):
        given = _loaded(options, target, with_values)
        observer = given.observer
        try:
            with observer.watching():
                yield given
        except AmpLabError as error:
            if observer.problem:
                raise OptionError(f"{target!r}: {observer.problem}") from error
            if _lacks_values(error):
                raise  # for `traced`, which builds it with values
            if isinstance(error, TraceError) and type(given.model).__name__ in str(error):
                raise TraceError(f"{error}{_remedy(given, str(error))}") from error
            raise
        if observer.problem:
            raise OptionError(f"{target!r}: {observer.problem}")


def traced(
    options: argparse.Namespace, trace: Callable[[GivenModel], Any], *, with_values: bool = False
) -> Any:
    """What `trace` returns of the model in `options`, which has values if its course needs them."""
    try:
        with given_model(options, with_values=with_values) as given:
            return trace(given)
    except TraceError as error:
        if not _lacks_values(error):
            raise
    with given_model(options, with_values=True) as given:
        return trace(given)


def _lacks_values(error: AmpLabError) -> bool:
    from amp_lab.tracing.decisions import NoValues

    return isinstance(error, NoValues)


def _seconds(text: str) -> float:
    seconds = float(text)  # argparse says what is wrong with another text
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of seconds above 0")
    return seconds


def _loaded(options: argparse.Namespace, target: str, with_values: bool) -> GivenModel:
    from amp_lab.cli.model_checks import Observer

    if options.input and options.batch:
        raise OptionError("--input and --batch both give the inputs: give one of them")
    specs = [parse_input(text) for text in options.input or ()]  # before anything slow
    given = _built(target, parse_arguments(options.arguments or ()), with_values)
    if specs:
        given.args, given.kwargs = drawn(specs, with_values)
    elif options.batch:
        given.args, given.kwargs, given.form = batch_of(options.batch)
    _check_there_are_inputs(given)
    observer = Observer(given.model, given.args, given.kwargs, _bounds(specs))
    given.observer = observer
    if options.loss:
        given.loss_fn = observer.watched_loss(_loss(options.loss), f"--loss {options.loss}")
    elif given.loss_fn is not None:
        given.loss_fn = observer.watched_loss(given.loss_fn, f"the loss of {target}")
    if options.eval:
        given.model.eval()
    return given


def _bounds(specs: list[InputSpec]) -> list[int | None]:
    """What the values of each input stay below, those given by position first."""
    by_position = [spec.below for spec in specs if spec.name is None]
    by_name = [spec.below for spec in specs if spec.name is not None]
    return [*by_position, *by_name]


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """The arguments that ``--with`` names: values of Python, or words, which are strings.

    Raises `OptionError`.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"--with {text!r}: write NAME=VALUE, such as n_layers=2")
        found[name] = _value(text, value)
    return found


def _value(text: str, value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    meant = value.capitalize()
    if meant in ("True", "False", "None"):
        raise OptionError(f"--with {text!r}: write {meant}")
    if re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return value
    name = text.partition("=")[0]
    quoted = f'''--with "{name}='{value}'"'''
    problem = "the value is no number, True, None, list, word or string of Python"
    raise OptionError(f"--with {text!r}: {problem}; a string has quotes, as {quoted}")


def _built(target: str, arguments: dict[str, Any], with_values: bool) -> GivenModel:
    """The model that a target is or returns, with the inputs and the loss that it returns."""
    from torch import nn

    if is_config(target):
        built = _call(target, functools.partial(model_of, target, arguments), {}, with_values)
        return _returned(target, built)
    found = find(target)
    if isinstance(found, nn.Module):  # a finished model is callable too, but with inputs
        if arguments:
            raise OptionError(f"{target!r} is a finished model: --with is for what builds one")
        return GivenModel(found)
    if not callable(found):
        kind = f"{target!r} is of type {type(found).__name__}"
        raise OptionError(f"{kind}: give a callable that returns an nn.Module")
    return _returned(target, _call(target, found, arguments, with_values))


def _call(
    target: str, build: Callable[..., Any], arguments: dict[str, Any], with_values: bool
) -> Any:
    """What the callable returns, built on ``meta`` if that is possible and no values are asked."""
    import torch

    from amp_lab.tracing.meta_build import build_on_meta

    torch.manual_seed(0)  # so that two builds have the same weights
    if not with_values:
        built = build_on_meta(functools.partial(build, **arguments), _model_and_inputs)
        if built is not None:
            return built
    return call_user_function(repr(target), build, arguments)


def _returned(target: str, built: Any) -> GivenModel:
    """The model, the inputs and the loss that a callable has returned. Raises `OptionError`."""
    from torch import nn

    model, inputs, loss_fn = _parts(built)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise OptionError(f"{target!r} returns a {kind}, not an nn.Module, or a tuple of one")
    if loss_fn is not None and not callable(loss_fn):
        kind = type(loss_fn).__name__
        raise OptionError(f"{target!r} returns a {kind} as the loss: give a callable")
    args, kwargs = arguments_in(inputs, repr(target))
    returned = len(built) if isinstance(built, tuple) else 0
    return GivenModel(model, args, kwargs, loss_fn, returned)


def _model_and_inputs(built: Any) -> tuple[Any, Any]:
    model, inputs, _ = _parts(built)
    return model, inputs


def _parts(built: Any) -> tuple[Any, Any, Any]:
    """Model, inputs and loss of ``model`` and of ``(model, args, kwargs, loss)``, or the first."""
    if not isinstance(built, tuple) or not 1 <= len(built) <= 4:
        return built, (), None
    padded = [*built, None, None, None]
    model, args, kwargs, loss_fn = padded[:4]
    if args is None:
        args = ()
    if kwargs is None:
        return model, args, loss_fn
    if not isinstance(args, (tuple, list)):
        args = (args,)
    return model, (args, kwargs), loss_fn


def _loss(text: str) -> Callable[[Any], Any]:
    """The loss that ``--loss`` names: ``.loss`` of the output, or the user's function."""
    if text.startswith("."):

        def loss(output: Any) -> Any:
            return _loss_in(output, text)

        return loss
    found = find(text)
    if isinstance(found, type):  # a class such as nn.MSELoss: one of it is the loss
        found = call_user_function(f"--loss {text!r}", found, {})
    if not callable(found):
        kind = type(found).__name__
        raise OptionError(f"--loss {text!r} is of type {kind}: give a callable, or .NAME")
    return found


def _loss_in(output: Any, text: str) -> Any:
    """The part of the output that is its loss, as ``.loss``. Raises `OptionError` without it."""
    name = text[1:]
    if isinstance(output, Mapping):
        value = output.get(name)
    else:
        value = getattr(output, name, None)
    if value is not None:
        return value
    kind = type(output).__name__
    if hasattr(output, "is_meta"):
        kind = "Tensor"
    has = f"the model returns a {kind}, which has no {name!r}"
    raise OptionError(f"--loss {text}: {has}; some have it only if labels are given")


def _check_there_are_inputs(given: GivenModel) -> None:
    from amp_lab.cli.model_checks import parameters_of

    needed = [p.name for p in parameters_of(given.model) if p.default is p.empty]
    if given.args or given.kwargs or not needed:
        return
    raise OptionError(
        f"{type(given.model).__name__} takes {', '.join(needed)}: add --input for each, such as "
        f"--input 8,3,224,224, or --input {_ids(given.model)} for token ids, or --batch"
    )


def _ids(model: "nn.Module") -> str:
    """How token ids of this model are written."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return f"'int64:2,128<{module.num_embeddings}'"
    return "'int64:2,128<32000'"


def _remedy(given: GivenModel, error: str) -> str:
    """What to change in the inputs, as the end of a sentence, or else what was given."""
    from amp_lab.cli.model_checks import named_inputs, parameters_of
    from amp_lab.core.report import dtype_name

    takes = ", ".join(parameter.name for parameter in parameters_of(given.model))
    missing = re.search(r"missing \d+ required .*arguments?: (.*)", error)
    if missing:
        names = re.findall(r"'(\w+)'", missing[1])
        wanted = " ".join(f"--input {name}=SIZES" for name in names)
        return f"; it takes {takes}: add {wanted} ({_ids(given.model)} for token ids)"
    if "unexpected keyword argument" in error or "positional argument" in error:
        return f"; it takes {takes}"
    inputs = named_inputs(given.model, given.args, given.kwargs)
    if len(inputs) < 2:
        return ""
    shown = [f"{name} {dtype_name(t.dtype)} {tuple(t.shape)}" for name, t in inputs]
    return f"; the inputs are {', '.join(shown)}"


def dtype_of(name: str | None):
    """The dtype that a precision is named for; None for None."""
    from amp_lab.core.precision import Precision

    if name is None:
        return None
    return Precision(name).dtype
