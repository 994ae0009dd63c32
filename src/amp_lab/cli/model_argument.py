"""Load the model, the inputs and the loss that the options of a command name.

`add_model` adds the options to a command, and `load_model` loads the model.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amp_lab.cli.config_target import build_from_config, is_config
from amp_lab.cli.input_argument import (
    InputSpec,
    draw_inputs,
    load_batch,
    parse_input,
    split_arguments,
)
from amp_lab.cli.printing import add_format
from amp_lab.cli.user_code import FORM, call_user_function, find_target, user_code_guard
from amp_lab.core.errors import AmpLabError, OptionError, TraceError

if TYPE_CHECKING:
    from torch import nn

    from amp_lab.cli.model_checks import Observer
    from amp_lab.model_call import ModelCall


DTYPE_NAMES = ("fp16", "bf16", "fp32")
"""The names of dtypes that options such as ``--against`` take; fp32 turns autocast off."""
_TIMEOUT_S = 600


@dataclass
class LoadedModel:
    """The model that the options name, with further facts that a command needs."""

    call: "ModelCall"  # the model with its inputs and its loss
    returned: int = 0  # length of the tuple that the callable returned; 0 for a model alone
    form: str = ""  # the `python_form` of what --batch returns; "" without --batch
    observer: "Observer" = field(init=False)
    """Notes mistakes in the inputs and the loss when the model runs."""


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the options that name a model, its inputs, its loss and the format."""
    option = command.add_argument
    target = (
        "a callable that returns the model; or FILE.py:CALLABLE; or a config.json of transformers"
    )
    argument = "an argument of the callable, such as n_layers=2; repeat the option for several"
    shapes = (
        "shape of an input, such as 8,3,224,224 (float32), 'int64:2,128<32000' (ids below 32000) "
        "or labels=int64:8 (a keyword argument); repeat the option for several inputs"
    )
    batch = (
        "instead of --input: a callable that returns the inputs as a tensor, a tuple, a dict, or "
        "(args, kwargs)"
    )
    loss = "a callable that computes the loss from the output; or .NAME, an attribute of the output"
    limit = f"time limit, for example for a model that hangs (default: {_TIMEOUT_S})"
    option("target", metavar=FORM, help=target)
    option("--with", action="append", dest="arguments", metavar="NAME=VALUE", help=argument)
    option("--input", action="append", metavar="[NAME=][DTYPE:]SIZES", help=shapes)
    option("--batch", metavar=FORM, help=batch)
    option("--loss", metavar=FORM, help=loss)
    option("--eval", action="store_true", help="put the model into evaluation mode")
    option("--timeout", type=_seconds, default=_TIMEOUT_S, metavar="SECONDS", help=limit)
    add_format(command)


def add_absent_device(command: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--for``, which may name a device that is not in this machine."""
    names = "device type: cuda (default; also for ROCm), xpu, mps or cpu"
    command.add_argument("--device", metavar="NAME", help=names)
    gpus = "a GPU, even one that is not in this machine: h100, rtx-4090, t4, …"
    command.add_argument("--for", dest="gpu", metavar="GPU", help=gpus)


def use_absent_device(options: argparse.Namespace) -> None:
    """Set the device, and the memory if none is given, from the GPU that ``--for`` names.

    Raises `OptionError` for an unknown GPU, and if ``--device`` is given too.
    """
    from amp_lab.core.gpus import absent_gpu

    if not options.gpu:
        options.device = options.device or "cuda"
        return
    if options.device:
        raise OptionError("--for sets the device already: leave out --device")
    gpu = absent_gpu(options.gpu)
    options.device = gpu.architecture.device_type
    if "memory" in options and options.memory is None:
        options.memory = gpu.memory_bytes


@contextlib.contextmanager
def load_model(
    options: argparse.Namespace, *, with_values: bool, target: str | None = None
) -> Iterator[LoadedModel]:
    """The block in which the model that the options name can be run.

    With `with_values`, the model is built on the CPU with seed 0, and the inputs have values.
    Otherwise the model is built on ``meta`` if a trace needs no values. `target` replaces the
    target of the options.

    Run the model in the block: the user's code prints nothing there, and its exceptions become
    errors of one line. Raises `AmpLabError`.
    """
    target = target or options.target
    with user_code_guard(repr(target), options.timeout):
        loaded = _load(options, target, with_values)
        observer = loaded.observer
        try:
            with observer.watching():
                yield loaded
        except AmpLabError as error:
            if observer.problem:  # it says more than the error
                raise OptionError(f"{target!r}: {observer.problem}") from error
            if _lacks_values(error):
                raise  # unchanged: `trace_model` catches it, and builds the model with values
            is_about_model = type(loaded.call.model).__name__ in str(error)
            if isinstance(error, TraceError) and is_about_model:
                raise TraceError(f"{error}{_inputs_hint(loaded.call, str(error))}") from error
            raise
        if observer.problem:  # a mistake that raised no error, since fake tensors have no values
            raise OptionError(f"{target!r}: {observer.problem}")


def trace_model(
    options: argparse.Namespace, trace: Callable[[LoadedModel], Any], *, with_values: bool = False
) -> Any:
    """Load the model that the options name, call `trace` with it, and return its result.

    If the model turns out to depend on values, it is loaded again with values and traced again.
    """
    try:
        with load_model(options, with_values=with_values) as loaded:
            return trace(loaded)
    except TraceError as error:
        if not _lacks_values(error):
            raise
    with load_model(options, with_values=True) as loaded:
        return trace(loaded)


def _lacks_values(error: AmpLabError) -> bool:
    """Whether a trace failed because the model depends on values, but was built on ``meta``."""
    from amp_lab.tracing.decisions import NoValues

    return isinstance(error, NoValues)


def _seconds(text: str) -> float:
    """The seconds that --timeout gives."""
    seconds = float(text)  # argparse says what is wrong with another text
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        most = f"{threading.TIMEOUT_MAX:.0f}"
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number of seconds above 0, up to {most}"
        )
    return seconds


def _load(options: argparse.Namespace, target: str, with_values: bool) -> LoadedModel:
    """Build the model that `target` names, and give it the inputs and the loss of the options.

    What the options leave out is what the target itself returns. Raises `OptionError`.
    """
    from amp_lab.cli.model_checks import Observer

    if options.input and options.batch:
        raise OptionError("--input and --batch both give the inputs: use only one of them")
    # Read first, so that a mistake is reported before the model is built.
    specs = [parse_input(text) for text in options.input or ()]
    loaded = _build(target, parse_arguments(options.arguments or ()), with_values)
    call = loaded.call
    if specs:
        args, kwargs = draw_inputs(specs, with_values)
        call = dataclasses.replace(call, args=args, kwargs=kwargs)
    elif options.batch:
        args, kwargs, loaded.form = load_batch(options.batch)
        call = dataclasses.replace(call, args=args, kwargs=kwargs)
    _require_inputs(call)
    loaded.observer = Observer(call, _upper_bounds(specs))
    loss_fn = call.loss_fn
    loss_name = f"the loss of {target}"
    if options.loss:
        loss_fn = _find_loss(options.loss)
        loss_name = f"--loss {options.loss}"
    if loss_fn is not None:
        loss_fn = loaded.observer.watch_loss(loss_fn, loss_name)
    loaded.call = dataclasses.replace(call, loss_fn=loss_fn)
    if options.eval:
        call.model.eval()
    return loaded


def _upper_bounds(specs: list[InputSpec]) -> list[int | None]:
    """The `below` of each input, in the order of `ModelCall.named_inputs`: by position, by name."""
    by_position = [spec.below for spec in specs if spec.name is None]
    by_name = [spec.below for spec in specs if spec.name is not None]
    return [*by_position, *by_name]


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """The arguments of ``--with``; a value is a literal of Python, or a word without quotes.

    Raises `OptionError`.
    """
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"--with {text!r}: write NAME=VALUE, such as n_layers=2")
        arguments[name] = _parse_value(text, value)
    return arguments


def _parse_value(text: str, value: str) -> Any:
    """The value in ``NAME=VALUE``, which is `text` as a whole. Raises `OptionError`."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    capitalized = value.capitalize()  # true, false and none, as other languages write them
    if capitalized in ("True", "False", "None"):
        raise OptionError(f"--with {text!r}: write the value as {capitalized}")
    if re.fullmatch(r"[A-Za-z_][\w./-]*", value):  # a word such as relu, or org/model-1.5
        return value
    name = text.partition("=")[0]
    quoted = f'''--with "{name}='{value}'"'''
    problem = "the value is neither a Python literal nor a word"
    raise OptionError(f"--with {text!r}: {problem}; put a string in quotes: {quoted}")


def _build(target: str, arguments: dict[str, Any], with_values: bool) -> LoadedModel:
    """The model that a target is or returns, with the inputs and the loss if it returns them too.

    `arguments` are those of --with.
    """
    from torch import nn

    from amp_lab.model_call import ModelCall

    if is_config(target):
        build = functools.partial(build_from_config, target, arguments)
        return _unpack(target, _call_builder(target, build, {}, with_values))
    model_or_builder = find_target(target)
    if isinstance(model_or_builder, nn.Module):  # it is callable too, but must not be called
        if arguments:
            raise OptionError(f"{target!r} is a model, so it takes no arguments: leave out --with")
        return LoadedModel(ModelCall(model_or_builder))
    if not callable(model_or_builder):
        kind = f"{target!r} is of type {type(model_or_builder).__name__}"
        raise OptionError(f"{kind}: give a callable that returns an nn.Module")
    return _unpack(target, _call_builder(target, model_or_builder, arguments, with_values))


def _call_builder(
    target: str, build: Callable[..., Any], arguments: dict[str, Any], with_values: bool
) -> Any:
    """Call `build`, which the target names, with the `arguments`, and return what it returns.

    Unless `with_values` is set, the model is built on ``meta``, if that is possible.
    """
    import torch

    from amp_lab.tracing.meta_build import build_on_meta

    torch.manual_seed(0)  # so that two builds have the same weights
    if not with_values:
        built = build_on_meta(functools.partial(build, **arguments), _model_and_inputs)
        if built is not None:
            return built
    return call_user_function(repr(target), build, arguments)


def _unpack(target: str, built: Any) -> LoadedModel:
    """The model, inputs and loss in what a callable returned. Raises `OptionError`."""
    from torch import nn

    from amp_lab.model_call import ModelCall

    model, inputs, loss_fn = _split_tuple(built)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise OptionError(f"{target!r} returns a {kind}: return an nn.Module, or a tuple with one")
    if loss_fn is not None and not callable(loss_fn):
        kind = type(loss_fn).__name__
        raise OptionError(f"{target!r} returns a {kind} as the loss: return a callable")
    args, kwargs = split_arguments(inputs, repr(target))
    returned = len(built) if isinstance(built, tuple) else 0
    return LoadedModel(ModelCall(model, args, kwargs, loss_fn), returned)


def _model_and_inputs(built: Any) -> tuple[Any, Any]:
    """The model and the inputs in what a callable returned, as `_split_tuple` finds them."""
    model, inputs, _ = _split_tuple(built)
    return model, inputs


def _split_tuple(built: Any) -> tuple[Any, Any, Any]:
    """The model, inputs and loss in ``model``, or in a tuple ``(model, args, kwargs, loss)``.

    The tuple may be shorter; anything else is returned as the model. The inputs are in a form that
    `split_arguments` takes. The loss is None if there is none.
    """
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


def _find_loss(text: str) -> Callable[[Any], Any]:
    """The loss that ``--loss`` names, as a function of the output. Raises `OptionError`.

    ``.NAME`` is an attribute of the output, anything else the user's own function.
    """
    if text.startswith("."):

        def loss(output: Any) -> Any:
            return _loss_of_output(output, text)

        return loss
    loss_fn = find_target(text)
    if isinstance(loss_fn, type):  # a class such as nn.MSELoss, of which the loss is an instance
        loss_fn = call_user_function(f"--loss {text!r}", loss_fn, {})
    if not callable(loss_fn):
        kind = type(loss_fn).__name__
        raise OptionError(f"--loss {text!r} is of type {kind}: give a callable, or .NAME")
    return loss_fn


def _loss_of_output(output: Any, text: str) -> Any:
    """The output's attribute or key that ``.NAME`` names. Raises `OptionError` if it has none."""
    name = text[1:]
    if isinstance(output, Mapping):
        value = output.get(name)
    else:
        value = getattr(output, name, None)
    if value is not None:
        return value
    kind = type(output).__name__
    if hasattr(output, "is_meta"):  # the type may be one that stands for a tensor in a trace
        kind = "Tensor"
    has = f"the model returns a {kind}, which has no {name!r}"
    raise OptionError(f"--loss {text}: {has}; if it returns a loss only with labels, give them too")


def _require_inputs(call: "ModelCall") -> None:
    """Raise `OptionError` if the model needs arguments and none are given."""
    from amp_lab.model_call import arguments_of

    if call.args or call.kwargs:
        return
    needed = [p.name for p in arguments_of(call.model) if p.default is p.empty]
    needed += [f"{p.name}=…" for p in _keyword_only(call.model) if p.default is p.empty]
    if not needed:
        return
    raise OptionError(
        f"{type(call.model).__name__} needs {', '.join(needed)}: add an --input for each, such as "
        f"--input 8,3,224,224 (for token ids --input {_ids_option(call.model)}), or give --batch"
    )


def _keyword_only(model: "nn.Module") -> list[inspect.Parameter]:
    """The arguments that a model takes by keyword alone."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _ids_option(model: "nn.Module") -> str:
    """The value of an ``--input`` that gives this model token ids, below its first vocabulary."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return f"'int64:2,128<{module.num_embeddings}'"
    return "'int64:2,128<32000'"


def _inputs_hint(call: "ModelCall", error: str) -> str:
    """A hint on the inputs for the end of an error message, with "; " before it, or "".

    `error` is the message of the failed trace. If it says that arguments are missing or too many,
    the hint is what the model takes; else, if there are several inputs, their names and shapes.
    """
    from amp_lab.core.report import dtype_name
    from amp_lab.model_call import arguments_of

    arguments = [*arguments_of(call.model), *_keyword_only(call.model)]
    takes = ", ".join(argument.name for argument in arguments)
    # Python's "forward() missing 2 required positional arguments: 'x' and 'mask'"
    missing = re.search(r"missing \d+ required .*arguments?: (.*)", error)
    if missing:
        names = re.findall(r"'(\w+)'", missing[1])
        wanted = " ".join(f"--input {name}=SIZES" for name in names)
        return f"; the model takes {takes}: add {wanted} ({_ids_option(call.model)} for token ids)"
    if "unexpected keyword argument" in error or "positional argument" in error:
        return f"; the model takes {takes}"
    inputs = call.named_inputs()
    if len(inputs) < 2:
        return ""
    shown = [f"{name} {dtype_name(t.dtype)} {tuple(t.shape)}" for name, t in inputs]
    return f"; the inputs are {', '.join(shown)}"


def other_side(text: str, device: str, dtype: str | None) -> tuple[str, str | None]:
    """The device and dtype that ``--against`` names: ``mps``, ``bf16`` or ``cpu:bf16``.

    `device` and `dtype` are those of the first side, for what `text` leaves out. Raises
    `OptionError` for a dtype that is not in `DTYPE_NAMES`. The device is not checked.
    """
    from amp_lab.core.backends import BACKENDS

    first, colon, second = text.partition(":")
    if not colon and first in DTYPE_NAMES:
        return device, first
    if not colon:
        return first, dtype
    if second not in DTYPE_NAMES:
        devices = f"a device ({', '.join(BACKENDS)})"
        dtypes = f"a dtype ({', '.join(DTYPE_NAMES)})"
        raise OptionError(f"--against {text!r}: give {devices}, {dtypes}, or both, as cpu:bf16")
    return first, second


def dtype_of(name: str | None):
    """The dtype of the precision of this name; None for None."""
    from amp_lab.core.precision import Precision

    if name is None:
        return None
    return Precision(name).dtype
