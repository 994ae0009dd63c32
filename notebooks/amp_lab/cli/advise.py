"""`amp-lab advise`: which precision to use for a model, and the lines to write."""

import argparse
import time
from pathlib import Path
from typing import Any

from amp_lab.cli.config_target import imports_and_call, is_config
from amp_lab.cli.memory_check import require_memory
from amp_lab.cli.model_argument import GivenModel, add_model, parse_arguments, traced
from amp_lab.cli.printing import require_output, show
from amp_lab.cli.user_code import find, kept_in_bounds
from amp_lab.errors import OptionError
from amp_lab.requirements import require_matplotlib


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    advise = commands.add_parser(
        "advise",
        help="which precision to use for a model on this machine, and the lines to write",
        description="X-ray a model, forecast its memory, train it for some steps in each precision "
        "against fp32, time training and inference in turns, and print a ranking with a program.",
    )
    add_model(advise)
    option = advise.add_argument
    absent = "cuda (also for ROCm), xpu, mps: forecast for a device that is not here"
    option("--device", metavar="NAME", help="default: AMP_LAB_DEVICE, else accelerator, else cpu")
    option("--for", dest="absent", metavar="NAME", help=absent)
    option("--minutes", type=float, default=2.0, metavar="N", help="to take (default: 2)")
    option("--memory", metavar="SIZE", help="the budget that has to be enough, such as 24GiB")
    option("--html", metavar="FILE", help="write it all as a page too")
    advise.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Forecast, measure, and print the advice."""
    import torch

    from amp_lab.advisor import Case, first_look, forecast, measured
    from amp_lab.device import pick_device
    from amp_lab.tracing.fake_device import checked_backend

    if not 0 < options.minutes <= 1440:
        raise OptionError(f"--minutes {options.minutes:g}: give minutes, above 0 and up to 1440")
    if options.html:  # now, and not after minutes
        require_matplotlib("advise --html")
        require_output(options.html)
    if options.absent and options.device:
        raise OptionError("--device is measured and --for is forecast: give one of them")
    absent, end = options.absent, time.perf_counter() + 60 * options.minutes
    place = torch.device(checked_backend(absent)) if absent else pick_device(options.device)
    if not absent:  # before inputs have values; `measured` asks again, for AdamW's step
        require_memory(options, options.device, "fp32, which all is held against")

    def outlook(given: GivenModel) -> tuple[Any, ...]:
        case = Case(given.model, given.args, given.kwargs, given.loss_fn, place)
        look = first_look(case, options.memory)
        return given, case, look, forecast(case, look) if absent else None

    given, case, look, advice = traced(options, outlook, with_values=not absent)
    if advice is None:  # outside of that block, whose hooks would be timed and compiled
        seconds = end - time.perf_counter()
        with kept_in_bounds(repr(options.target), max(options.timeout, 180 * options.minutes)):
            advice = measured(case, look, seconds, _beginning(options, given))
    if options.html:
        advice.to_html(options.html)
    show(advice, options.format)


def _beginning(options: argparse.Namespace, given: GivenModel) -> str:
    """The lines that make ``model``, ``args``, ``kwargs`` and, if one is given, ``loss_fn``."""
    imports, call = _model_call(options)
    made = f"model = {call}"
    if given.returned:
        own_loss = given.loss_fn is not None and not options.loss
        made = made.replace("model", "model, *_, loss_fn" if own_loss else "model, *_", 1)
    body = ["torch.manual_seed(0)", made, *["model.eval()"] * options.eval]
    if options.batch:
        more, batch = _imported(options.batch)
        imports += more
        call = f"{batch}{'()' * callable(find(options.batch))}"
        body.append(f"args, kwargs = {given.form.format(call)}")
    else:
        body += [f"args = {_drawn(given.args)}", f"kwargs = {_drawn(given.kwargs)}"]
    if options.loss and options.loss.startswith("."):
        part = options.loss[1:]
        value = f"output[{part!r}] if isinstance(output, dict) else output.{part}"
        body.append(f"loss_fn = lambda output: {value}")
    elif options.loss:
        more, loss = _imported(options.loss)
        imports += more
        body.append(f"loss_fn = {loss}{'()' * isinstance(find(options.loss), type)}")
    return "\n".join([*dict.fromkeys(imports), "", *body])


def _model_call(options: argparse.Namespace) -> tuple[list[str], str]:
    """The lines that import what makes the model, and the expression that does so."""
    from torch import nn

    arguments = parse_arguments(options.arguments or ())
    if is_config(options.target):
        return imports_and_call(options.target, arguments)
    imports, name = _imported(options.target)
    if isinstance(find(options.target), nn.Module):
        return imports, name
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return imports, f"{name}({given})"


def _imported(target: str) -> tuple[list[str], str]:
    """The lines that import a target, and its name after them."""
    module, _, name = target.rpartition(":")
    first = name.partition(".")[0]
    if not module.endswith(".py"):
        return [f"from {module} import {first}"], name
    path = Path(module).resolve()
    found = ["import sys", f"sys.path.insert(0, {str(path.parent)!r})"]
    return [*found, f"from {path.stem} import {first}"], name


def _drawn(value: Any) -> str:
    """Python that makes such inputs: tensors of that shape and range, and all else as it is."""
    import torch

    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_drawn, value))
        return f"({inside},)" if isinstance(value, tuple) and value else f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_drawn(part)}" for name, part in value.items()) + "}"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape, dtype = tuple(value.shape), value.dtype
    kind = "" if dtype in (torch.float32, torch.int64) else f", dtype={dtype}"
    if dtype.is_floating_point or dtype.is_complex:
        return f"torch.randn({shape}{kind})"
    return f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape}{kind})"
