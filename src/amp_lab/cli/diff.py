"""`amp-lab diff`: find the first op where two runs diverge by more than rounding explains."""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_lab.cli.input_argument import parse_shape
from amp_lab.cli.memory_check import require_memory
from amp_lab.cli.model_argument import add_model, load_model
from amp_lab.cli.printing import require_figure, show
from amp_lab.cli.user_code import FORM, user_code_guard
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    from amp_lab.model_call import ModelCall

_FP32_MODES = ("fp32", "tf32")
_VARIANTS = "--precision, --compile, --batch-sizes or --device"


@dataclass(frozen=True)
class _Setting:
    """The device, precision and batch size of one of the two runs."""

    device: str
    precision: str | None  # None: the model in the dtypes that it has
    size: int | None  # batch size, in evaluation mode; None: the inputs and mode as they are


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    diff = commands.add_parser(
        "diff",
        help="find the first op where two runs of a model diverge by more than rounding",
        description="Run two models, or one model in two ways, on the same inputs. Find the first "
        "op where the runs diverge by more than rounding explains. "
        "Only the forward pass runs, so gradients are not compared. Each op is repeated in fp64, "
        "with its weights, so a loop over tokens takes long: try it with few tokens.",
    )
    add_model(diff)
    option = diff.add_argument
    option(
        "other",
        nargs="?",
        metavar="B",
        help=f"a second model, as {FORM}; without B, give {_VARIANTS}",
    )
    of_which_run = "of the second run, or of both runs with B, --batch-sizes or --compile"
    option(
        "--precision", choices=("fp32", "tf32", "fp16", "bf16"), help=f"precision {of_which_run}"
    )
    option("--device", metavar="NAME", help=f"device {of_which_run}: cpu, cuda, xpu or mps")
    option("--compile", action="store_true", help="compile the second run, and compare by module")
    option("--batch-sizes", metavar="N,M", help="compare two batch sizes, in evaluation mode")
    option("--same-weights", action="store_true", help="give B the weights of A")
    option("--figure", metavar="FILE", help="draw a figure of how the errors grow, as PNG or SVG")
    diff.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Compare the runs, print the result, and draw it with --figure."""
    sizes = _check_options(options)
    largest = None
    if sizes is not None:
        largest = max(sizes)
    require_memory(options, options.device or "cpu", "the two runs", largest)
    comparison = _run_both(options, sizes)
    if options.figure:
        from amp_lab import plots

        module = None  # the one to mark in the figure, where the runs diverge
        if comparison.first:
            module = comparison.first.module
        plots.save(options.figure, plots.error_growth, comparison.growth, module)
    show(comparison, options.format)


def _check_options(options: argparse.Namespace) -> tuple[int, ...] | None:
    """The two batch sizes of --batch-sizes; None if they are not given.

    Raises `OptionError` unless there are two runs to compare, and for options that do not go
    together.
    """
    variants = (options.compile, options.batch_sizes, options.precision, options.device)
    if not options.other and not any(variants):
        raise OptionError(f"there is no second run: give a second model B, or {_VARIANTS}")
    if options.other and (options.compile or options.batch_sizes):
        raise OptionError("--compile and --batch-sizes define the second run: leave out B")
    if options.compile and options.batch_sizes:
        raise OptionError("give --compile or --batch-sizes, not both")
    if options.figure:  # fail now, and not after both runs
        require_figure(options.figure, "diff --figure")
    if options.same_weights and not options.other:
        raise OptionError("--same-weights copies weights to a second model: give B too")
    if not options.batch_sizes:
        return None
    with contextlib.suppress(OptionError):
        sizes = parse_shape(options.batch_sizes)
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            return sizes
    raise OptionError(
        f"--batch-sizes {options.batch_sizes!r}: give two different sizes such as 16,64"
    )


def _run_both(options: argparse.Namespace, sizes: tuple[int, ...] | None) -> Any:
    """Load the models that the options name, run them, and return the `RunComparison`.

    `sizes` are the batch sizes of the two runs, or None.
    """
    with load_model(options, with_values=True) as loaded:
        if options.other:
            with load_model(options, with_values=True, target=options.other) as other:
                if options.same_weights:
                    _share_weights(loaded.call.model, other.call.model)
                return _compare(options, loaded.call, other.call.model, sizes)
        if not options.compile:
            return _compare(options, loaded.call, loaded.call.copy().model, sizes)
    # Outside of the block above, since the compiler would trace its hooks too.
    with user_code_guard(repr(options.target), options.timeout):
        return _compare_compiled(options, loaded.call)


def _compare(
    options: argparse.Namespace, call: "ModelCall", other: Any, sizes: tuple[int, ...] | None
) -> Any:
    """Compare run A, of the model of `call`, with run B, of the model `other`.

    The options give the settings of run B. If they name a second model, which is then `other`, or
    two batch sizes, they are the settings of run A too. Otherwise `other` is a copy of the first
    model, and run A is on the CPU in the precision of `_baseline_precision`.

    `sizes` are the batch sizes of the two runs, or None. Returns the `RunComparison`.
    """
    from amp_lab.difference import compare_runs

    size_a, size_b = sizes or (None, None)
    setting_b = _Setting(_device(options), options.precision, size_b)
    if options.other or sizes:
        setting_a = dataclasses.replace(setting_b, size=size_a)
    else:
        precision_a = _baseline_precision(options.precision, call.model)
        setting_a = _Setting("cpu", precision_a, size_a)
    remarks = [
        *_input_remarks("A", call, setting_a.precision),
        *_input_remarks("B", dataclasses.replace(call, model=other), setting_b.precision),
    ]
    # If run A casts the inputs to 16 bits, run B gets the same rounded values.
    call = _cast_inputs(call, _input_dtype(call.model, setting_a.precision))
    run_a = _make_run(call, setting_a)
    run_b = _make_run(dataclasses.replace(call, model=other), setting_b)
    comparison = compare_runs(run_a, run_b)
    return dataclasses.replace(comparison, remarks=(*comparison.remarks, *remarks))


def _baseline_precision(precision: str | None, model: Any) -> str | None:
    """The precision of a model's run A, if run B is the same model in `precision`.

    None is the model in the dtypes that it has.
    """
    if not precision:
        return None
    if precision in _FP32_MODES and _has_low_weights(model):
        return None  # a model in 16 bits is compared with its own copy in fp32
    return "fp32"


def _has_low_weights(model: Any) -> bool:
    """Whether a parameter is fp16 or bf16."""
    from amp_lab.core.tensors import LOWER_DTYPES

    return any(parameter.dtype in LOWER_DTYPES for parameter in model.parameters())


def _input_dtype(model: Any, precision: str | None) -> Any:
    """The dtype to cast the inputs to: that of the weights, if they all have one; else None.

    With a precision, autocast casts where it has to, so the inputs stay as they are: None.
    """
    if precision is not None:
        return None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return None
    return dtypes.pop()


def _is_cast(tensor: Any, dtype: Any) -> bool:
    """Whether `_cast_inputs` casts this tensor to `dtype`; never if `dtype` is None."""
    import torch

    from amp_lab.core.tensors import LOWER_DTYPES

    castable = (torch.float32, *LOWER_DTYPES)
    if dtype not in castable or tensor.dtype not in castable:
        return False
    return tensor.dtype is not dtype


def _cast_inputs(call: "ModelCall", dtype: Any) -> "ModelCall":
    """The call with its inputs in fp32, fp16 and bf16 cast to `dtype`, if it is one of these.

    Unchanged for any other `dtype`, and for None.
    """

    def cast(tensor: Any) -> Any:
        if _is_cast(tensor, dtype):
            return tensor.to(dtype)
        return tensor

    return call.map_inputs(cast)


def _input_remarks(run: str, call: "ModelCall", precision: str | None) -> Iterator[str]:
    """A remark if the inputs of a run are cast to the dtype of the model's weights, else nothing.

    `run` is the name of the run in the remark: "A", "B" or "both". `precision` is that of the run.
    """
    from amp_lab.core.report import short_name

    dtype = _input_dtype(call.model, precision)
    if any(_is_cast(tensor, dtype) for tensor in call.tensors):
        cast = f"cast to {short_name(dtype)}, the dtype of its weights"
        yield f"The floating-point inputs of {run} were {cast}."


def _make_run(call: "ModelCall", setting: _Setting) -> Callable[[], Any]:
    """Prepare the model for a run, and return a function that runs it, with its loss if any.

    The model itself is moved to the device of `setting`, cast to fp32 if this is its precision and
    the model has weights in 16 bits, and put into evaluation mode if a batch size is set.
    """
    import torch

    if setting.size is not None:
        call = call.with_batch(setting.size)
        call.model.eval()
    call = call.to(setting.device)
    dtype = _input_dtype(call.model, setting.precision)
    if setting.precision in _FP32_MODES and _has_low_weights(call.model):
        dtype = torch.float32
        call.model.to(dtype)
    call = _cast_inputs(call, dtype)

    def run() -> Any:
        with _autocast(setting.precision, setting.device):
            return call.result()

    return run


def _compare_compiled(options: argparse.Namespace, call: "ModelCall") -> Any:
    """Compare the model with itself compiled, and return the `RunComparison`."""
    import torch

    from amp_lab.difference import compare_runs

    device = _device(options)
    remarks = _input_remarks("both", call, options.precision)
    call = _cast_inputs(call.to(device), _input_dtype(call.model, options.precision))
    with _autocast(options.precision, device):
        compiled = torch.compile(call.model)
        comparison = compare_runs(call.model, compiled, *call.args, **call.kwargs)
    return dataclasses.replace(comparison, remarks=(*comparison.remarks, *remarks))


def _device(options: argparse.Namespace) -> str:
    """The name of the device that --device gives, checked to be here; the CPU by default."""
    from amp_lab.core.device import pick_device

    return str(pick_device(options.device or "cpu"))


def _autocast(precision: str | None, device: str) -> contextlib.AbstractContextManager:
    """The context of a precision on a device such as ``cuda:1``; it does nothing for None."""
    from amp_lab.core.precision import Precision

    if not precision:
        return contextlib.nullcontext()
    device_type = device.partition(":")[0]
    return Precision(precision).autocast(device_type)


def _share_weights(model: Any, other: Any) -> None:
    """Copy the weights of `model`, A, into `other`, B. Raises `OptionError` if they do not fit."""
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]  # one line, of a message that may have hundreds
        raise OptionError(f"--same-weights: the weights of A do not fit B: {reason}") from error
