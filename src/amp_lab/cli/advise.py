"""`amp-lab advise`: recommend a precision for a model, and print the lines to write."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_lab.cli.config_target import imports_and_call, is_config
from amp_lab.cli.memory_check import require_memory
from amp_lab.cli.model_argument import LoadedModel, add_model, parse_arguments, trace_model
from amp_lab.cli.printing import require_output, show
from amp_lab.cli.user_code import find_target, user_code_guard
from amp_lab.core.errors import OptionError
from amp_lab.core.requirements import require_matplotlib

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from amp_lab.advisor import Advice


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    advise = commands.add_parser(
        "advise",
        help="recommend a precision for your model on this machine, with the code for it",
        description="Recommend a precision for a model on this machine. The command compares a few "
        "training steps in each precision with fp32, times training and inference, and forecasts "
        "the memory. It prints a ranking and the code to write.",
    )
    add_model(advise)
    option = advise.add_argument
    device = "device to measure (default: AMP_LAB_DEVICE, else the accelerator, else cpu)"
    option("--device", metavar="NAME", help=device)
    gpu = (
        "forecast for a GPU that is not in this machine (h100, rtx-4090, t4, …), or for a device "
        "type (cuda, xpu, mps)"
    )
    option("--for", dest="gpu", metavar="GPU", help=gpu)
    option(
        "--minutes",
        type=float,
        default=2.0,
        metavar="N",
        help="about how many minutes to measure (default: 2)",
    )
    option("--memory", metavar="SIZE", help="memory budget, such as 24GiB")
    option("--html", metavar="FILE", help="also write the advice to a web page")
    advise.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure on this machine, or forecast for the GPU of --for, and print the advice."""
    _check_options(options)
    if options.gpu:
        advice = _forecast_advice(options)
    else:
        advice = _measured_advice(options)
    if options.html:
        advice.to_html(options.html)
    show(advice, options.format)


def _forecast_advice(options: argparse.Namespace) -> "Advice":
    """The advice for the GPU of --for, which need not be in this machine: nothing is timed."""
    import torch

    from amp_lab.advisor import forecast, trace_and_forecast
    from amp_lab.core.gpus import absent_gpu

    gpu = absent_gpu(options.gpu)
    device = torch.device(gpu.architecture.device_type)

    def trace(loaded: LoadedModel) -> "Advice":
        outlook = trace_and_forecast(loaded.call, device, options.memory, gpu)
        return forecast(loaded.call, outlook, gpu)

    return trace_model(options, trace)


def _measured_advice(options: argparse.Namespace) -> "Advice":
    """The advice for a device of this machine: training and inference are timed on it."""
    from amp_lab.advisor import measured, trace_and_forecast
    from amp_lab.core.device import pick_device

    end = time.perf_counter() + 60 * options.minutes
    device = pick_device(options.device)
    # Checked before inputs get values; `measured` checks again, for a step with AdamW.
    require_memory(options, options.device, "fp32, the baseline")

    def trace(loaded: LoadedModel) -> tuple[LoadedModel, Any]:
        """X-ray the model and forecast its memory; return the model and this `Outlook`."""
        return loaded, trace_and_forecast(loaded.call, device, options.memory, None)

    loaded, outlook = trace_model(options, trace, with_values=True)
    # `trace_model` puts hooks on the model, which would be timed and compiled. So the model is
    # measured only now, when they are gone.
    seconds = end - time.perf_counter()
    # In seconds, three times --minutes: to measure, and then to run each of the two programs.
    timeout = max(options.timeout, 180 * options.minutes)
    with user_code_guard(repr(options.target), timeout):
        return measured(loaded.call, outlook, seconds, _setup_lines(options, loaded))


def _check_options(options: argparse.Namespace) -> None:
    """Raise `OptionError` for impossible options, and `RequirementError` without matplotlib."""
    if not 0 < options.minutes <= 1440:  # a day
        raise OptionError(f"--minutes {options.minutes:.15g}: give a number above 0 and up to 1440")
    if options.html:  # fail now, and not after minutes
        require_matplotlib("advise --html")
        require_output(options.html)
    if options.gpu and options.device:
        raise OptionError("--device measures and --for forecasts: give only one of the two")


def _setup_lines(options: argparse.Namespace, loaded: LoadedModel) -> str:
    """The code that makes ``model``, ``args``, ``kwargs`` and, if there is one, ``loss_fn``.

    It stands before the recommended code, so that the user can run the whole.
    """
    model_imports, model_code = _model_code(options)
    input_imports, input_lines = _input_lines(options, loaded)
    loss_imports, loss_lines = _loss_lines(options)
    model_lines = ["torch.manual_seed(0)", f"{_returned_names(options, loaded)} = {model_code}"]
    if options.eval:
        model_lines.append("model.eval()")
    imports = dict.fromkeys([*model_imports, *input_imports, *loss_imports])  # each line once
    return "\n".join([*imports, "", *model_lines, *input_lines, *loss_lines])


def _returned_names(options: argparse.Namespace, loaded: LoadedModel) -> str:
    """The left side of the assignment: names for the model, or for the tuple with the model."""
    if not loaded.returned:  # the target is a model alone, not a tuple
        return "model"
    if loaded.call.loss_fn is not None and not options.loss:
        return "model, *_, loss_fn"
    return "model, *_"


def _input_lines(options: argparse.Namespace, loaded: LoadedModel) -> tuple[list[str], list[str]]:
    """Lines that import what ``args`` and ``kwargs`` need, and lines that make them."""
    if not options.batch:
        call = loaded.call
        return [], [f"args = {_code_for(call.args)}", f"kwargs = {_code_for(call.kwargs)}"]
    imports, batch = _import_target(options.batch)  # `batch` is the code for the batch
    if callable(find_target(options.batch)):
        batch = f"{batch}()"
    return imports, [f"args, kwargs = {loaded.form.format(batch)}"]  # see `python_form`


def _loss_lines(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Lines that import what ``loss_fn`` needs, and a line that makes it; none without --loss.

    The line finds the loss as `_find_loss` in `model_argument` does.
    """
    if not options.loss:
        return [], []
    if options.loss.startswith("."):
        name = options.loss[1:]
        value = f"output[{name!r}] if isinstance(output, dict) else output.{name}"
        return [], [f"loss_fn = lambda output: {value}"]
    imports, loss = _import_target(options.loss)
    if isinstance(find_target(options.loss), type):
        loss = f"{loss}()"
    return imports, [f"loss_fn = {loss}"]


def _model_code(options: argparse.Namespace) -> tuple[list[str], str]:
    """Lines that import the target, and an expression for the model that it is or returns.

    If the target returns a tuple that begins with a model, the expression is for the tuple.
    """
    from torch import nn

    arguments = parse_arguments(options.arguments or ())
    if is_config(options.target):
        return imports_and_call(options.target, arguments)
    imports, name = _import_target(options.target)
    if isinstance(find_target(options.target), nn.Module):
        return imports, name
    values = [f"{argument}={value!r}" for argument, value in arguments.items()]
    return imports, f"{name}({', '.join(values)})"


def _import_target(target: str) -> tuple[list[str], str]:
    """Lines that import a target such as ``FILE.py:CALLABLE``, and the name that it then has."""
    module, _, name = target.rpartition(":")
    imported_name = name.partition(".")[0]  # of `Class.method` the class is imported
    if not module.endswith(".py"):
        return [f"from {module} import {imported_name}"], name
    path = Path(module).resolve()
    folder = str(path.parent)
    lines = [
        "import sys",
        f"sys.path.insert(0, {folder!r})",
        f"from {path.stem} import {imported_name}",
    ]
    return lines, name


def _code_for(value: Any) -> str:
    """Python code for an input: random tensors of its shape and range, other values as they are."""
    import torch

    if isinstance(value, dict):
        items = [f"{name!r}: {_code_for(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(_code_for, value))
        if isinstance(value, tuple) and value:
            return f"({items},)"  # (,) would be no Python, so an empty tuple becomes a list
        return f"[{items}]"
    if isinstance(value, torch.Tensor):
        return _code_for_tensor(value)
    return repr(value)


def _code_for_tensor(tensor: Any) -> str:
    """Code for a random tensor of this shape and dtype; integers and bools in the same range."""
    import torch

    shape = str(tuple(tensor.shape))
    if tensor.dtype not in (torch.float32, torch.int64):  # the defaults of randn and randint
        shape += f", dtype={tensor.dtype}"
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return f"torch.randn({shape})"
    low = int(tensor.min())
    high = int(tensor.max()) + 1
    return f"torch.randint({low}, {high}, {shape})"
