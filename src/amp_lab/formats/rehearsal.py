"""`rehearse`: the errors of a model whose matmuls are computed in formats below 16 bits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from amp_lab.core.device import preserve_random_state
from amp_lab.core.errors import AmpLabError, NumericsError, OptionError, TraceError, with_type
from amp_lab.core.gpus import Gpu, gpu_of
from amp_lab.core.remedies import remedy
from amp_lab.core.report import listed
from amp_lab.core.tensors import named_tensors
from amp_lab.formats.interception import Layer, Matmul
from amp_lab.formats.layer_errors import LayerErrors, MeasuredMatmul
from amp_lab.formats.matmul import (
    FORWARD,
    MatmulFormats,
    quantized_linear,
)
from amp_lab.formats.rehearsal_result import FormatReport, LayerReport, Rehearsal
from amp_lab.formats.roofline import has_forecast
from amp_lab.formats.scaling import FORMATS, Format, format_of
from amp_lab.formats.uses import Inference, MatmulChoice, Training, Use
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, TRAINING
from amp_lab.tracing.fake_device import tip_for
from amp_lab.tracing.flex_attention import flex_attention_traced

DEFAULT = tuple(form.name for form in FORMATS.values() if form.torchao)
_IN_16_BITS = remedy(
    "rehearse.in_16_bits",
    "no matmul of a model can be rehearsed, as in a model of conv3d layers or computed weights",
    "Run the model in 16 bits instead, under torch.autocast(device_type, torch.bfloat16)",
)
_QUANTISED = remedy(
    "rehearse.quantised",
    "a library has quantised the weights of a model",
    "{weight} is already quantised ({kind}). Rehearse the model before you quantise it",
)
_FAST_SUMS = remedy(
    "rehearse.fast_sums",
    "the sums of a layer's FP8 products lose much in the 14 bits of a Hopper GPU",
    "A Hopper GPU with use_fast_accum adds FP8 products in about 14 bits, but this report adds "
    "them in fp32. On such a GPU, these layers would be less accurate: {layers}. To add partial "
    "sums in fp32, pass Float8GemmConfig(use_fast_accum=False) as gemm_config_output of torchao's "
    "config.",
)
_SUMS_DB = 6.0  # the noise of the sums is at most a quarter of that of the rounded operands
_FEW_LAYERS = 3  # in a model with no more layers, the first and the last are converted too
_ROUTERS = {"gate", "gating", "router", "switch"}  # names of modules that choose experts


def rehearse(
    model: nn.Module,
    *inputs: Any,
    formats: Sequence[str] = DEFAULT,
    loss_fn: Callable[[Any], Any] | None = None,
    steps: int = 0,
    seeds: int = 3,
    gpu: str | None = None,
    use: str | None = None,
    **kwargs: Any,
) -> Rehearsal:
    """Measure the errors of a model whose matmuls are computed in formats below 16 bits.

    For training, `rehearse` takes one step in fp32. In each format, it repeats the matmuls of
    linear layers, convolutions and grouped experts: forward, dgrad (gradient of the input) and
    wgrad (gradient of the weight). Then it runs the whole model in each format. For inference, it
    repeats only the forward matmul, and compares the output with that in fp32.

    The result does not show how fast a format is, whether a long training converges, or how
    accurate the model is on other data.

    Args:
        model: The model. Copies of it run on its device.
        *inputs: A batch, as the model takes it.
        formats: Names in `FORMATS`. `rehearse` always adds bf16.
        loss_fn: A function that computes the loss from the output. If None, the loss is the one in
            the output or, without one, the mean square of the output.
        steps: The number of AdamW steps to train on this batch, in each format. With 0, `rehearse`
            only runs the single step above.
        seeds: The number of seeds to train with.
        gpu: A name in `core.gpus.GPUS`. Layers whose forecast for this GPU is slower stay in bf16.
        use: "training" or "inference". If None, a model in evaluation mode is used for inference,
            and any other model for training.
        **kwargs: The keyword arguments of the call.

    Returns:
        A `Rehearsal`. Print it to see the SQNR (signal to quantization noise ratio) of each layer
        in dB, the verdicts, and torchao's lines.

    Raises:
        NumericsError: If a format is unknown, if the model has no such matmul, or if it cannot be
            trained or returns nothing to compare.
        OptionError: If `gpu` or `use` is unknown, or if `steps` or `seeds` is out of range.
        TraceError: If a step of the model fails.

    Source:
        Operands are rounded to the format and multiplied in fp32, so no special hardware is needed.

    Example:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
        print(rehearse(model, torch.randn(32, 64), formats=["mxfp8"]))
    """
    names = dict.fromkeys(("bf16", *formats))  # each once
    forms = [format_of(name) for name in names]
    gpu_facts = gpu_of(gpu) if gpu else None
    use_class = _use_class(model, use)
    _check_steps(use_class, steps, seeds)
    call = ModelCall(model, inputs, kwargs, loss_fn)
    with (
        preserve_random_state(call.device.type),
        torch.enable_grad(),
        flex_attention_traced(any_device=True),
    ):
        try:
            runner = Training(call, steps, seeds) if use_class is Training else Inference(call)
            layers, reports = _rehearse_step(runner, forms, gpu_facts)
        except AmpLabError:
            raise
        except Exception as error:  # the user's model and loss may raise any exception
            problem = f"{type(model).__name__} fails in {use_class.step}"
            reason = with_type(error)
            tip = tip_for(error, model, "rehearse", call.device.type)
            raise TraceError(f"{problem}: {reason}{tip}") from error
        return _result(runner, layers, reports, gpu_facts)


def _result(
    use: Use, layers: list[LayerReport], reports: list[FormatReport], gpu: Gpu | None
) -> Rehearsal:
    """Give the formats their verdicts, recommend one, and return the result."""
    use.judge()
    watch = [*use.remarks, *_unreplaced_remarks(use), *_remarks_on_sums(layers)]
    if gpu:
        watch += _judge_for_gpu(reports, gpu)
    passing = [format_of(report.name) for report in reports if report.passes]
    below_16_bits = [form for form in passing if form.scale != "none"]
    candidates = [form.name for form in sorted(below_16_bits, key=lambda form: form.rank)]
    best, program = _recommend(use, candidates, layers, watch)  # adds remarks to `watch`
    watch.append(use.limits)
    return use.result(
        type(use.call.model).__name__,
        layers=layers,
        recommended=best,
        program=program,
        gpu=gpu.name if gpu else None,
        watch=watch,
    )


def _remarks_on_sums(layers: list[LayerReport]) -> list[str]:
    """A sentence on the layers whose sums an H100 computes much less accurately than fp32."""
    worse = {}
    for report in layers:
        rounding = report.decibels.get(FORWARD)
        if rounding is None or report.hopper_sums is None or report.left_out:
            continue
        if report.hopper_sums < rounding + _SUMS_DB:
            worse.setdefault(report.layer.name, f"{report.hopper_sums:.0f} dB")
    if not worse:
        return []
    names = listed([f"{name} ({sums})" for name, sums in worse.items()], 3)
    return [_FAST_SUMS.sentence(layers=names)]


def _judge_for_gpu(reports: list[FormatReport], gpu: Gpu) -> list[str]:
    """Change the verdict on formats that the GPU does not have; remarks on missing forecasts."""
    remarks = []
    for report in reports[1:]:  # without bf16
        form = format_of(report.name)
        if form.matmul and form.matmul not in gpu.architecture.matmuls:
            report.verdict = f"{gpu.name} has no matmuls in this format"
        elif report.layers and report.gain is None:
            reason = f"its rate on {gpu.name} is not known"
            if not form.torchao:
                reason = "this report has no formula for this format"
            remarks.append(f"{form.name}: no forecast, because {reason}.")
    return remarks


def _use_class(model: nn.Module, use: str | None) -> type[Use]:
    """`Training` or `Inference`, by the argument `use`, or else by the mode of the model."""
    if use is None:
        return Training if model.training else Inference
    classes: dict[str, type[Use]] = {TRAINING: Training, INFERENCE: Inference}
    if use not in classes:
        raise OptionError(f"rehearse: use={use!r} is unknown; give one of {', '.join(classes)}")
    return classes[use]


def _check_steps(use_class: type[Use], steps: int, seeds: int) -> None:
    """Raise `OptionError` for numbers of steps and seeds that cannot be run."""
    if steps < 0 or seeds < 1:
        raise OptionError(
            f"rehearse: steps={steps} must be at least 0, and seeds={seeds} at least 1"
        )
    if steps and use_class is Inference:
        raise OptionError(
            'rehearse: steps are only for training, but this is inference: pass use="training", '
            "or leave steps out"
        )


def _rehearse_step(
    use: Use, forms: list[Format], gpu: Gpu | None
) -> tuple[list[LayerReport], list[FormatReport]]:
    """Return the reports of all layers, and those of the whole model, in each format.

    Raises `NumericsError` for a model without a matmul that can be replaced.
    """
    layer_errors = _measure_layers(use, forms)
    if not layer_errors:
        raise NumericsError(_no_matmul_message(use))
    layers = []
    for errors in layer_errors:
        layers += [errors.report(form) for form in forms]
    inputs = named_tensors((use.call.args, use.call.kwargs))
    reads_ids = not any(tensor.is_floating_point() for _, tensor in inputs)
    _leave_out(use, layers, gpu, reads_ids=reads_ids)
    return layers, [_report_model(use, form.name, layers, gpu) for form in forms]


def _no_matmul_message(use: Use) -> str:
    """The error for a model without a matmul that can be replaced, with advice if it has others."""
    problem = f"{type(use.call.model).__name__} has no matmul whose weight can be rounded"
    for name, parameter in use.call.model.named_parameters():
        if is_wrapper(parameter):
            kind = type(parameter).__name__
            return f"{problem}. {_QUANTISED.sentence(weight=name, kind=kind)}"
    unreplaced = _unreplaced_ops(use)
    if not unreplaced:
        return problem
    return f"{problem}, only {', '.join(unreplaced)}. {_IN_16_BITS.text}"


def _unreplaced_ops(use: Use) -> list[str]:
    """The ops that multiply by a weight and were left to torch, such as ``einsum with w``."""
    names = {op: listed([*weights], 3) for op, weights in use.unreplaced.items()}
    return [f"{op} with {weights}" for op, weights in names.items()]


def _unreplaced_remarks(use: Use) -> list[str]:
    """A sentence for each op that was left to torch."""
    ops = sorted(_unreplaced_ops(use))
    return [f"Not rehearsed: {op}. torch computes this op in fp32." for op in ops]


def _measure_layers(use: Use, forms: list[Format]) -> list[LayerErrors]:
    """The errors of each layer in the formats that fit it, in the order of the layers' calls."""
    by_layer: dict[Layer, LayerErrors] = {}

    def choose_matmul(layer: Layer) -> Matmul:
        if layer not in by_layer:
            fitting = [form for form in forms if not use.misfit(layer, form)]
            by_layer[layer] = LayerErrors(use, layer, fitting)
        errors = by_layer[layer]
        return lambda values, weight: MeasuredMatmul.apply(values, weight, errors)

    use.measure(choose_matmul)
    return list(by_layer.values())


def _roles_in_bf16(layers: list[Layer], *, reads_ids: bool) -> dict[Layer, str]:
    """The layers that stay in bf16 by custom, with their roles, such as ``the head``.

    `layers` are in the order of their calls, and `reads_ids` is whether all inputs are ids. The
    roles are embeddings, routers, the head, and the layer that reads floating-point inputs, as in
    DeepSeek-V3's report (arXiv 2412.19437, section 3.3.1) and torchao's example of FP8 training.
    A model of at most `_FEW_LAYERS` layers gets neither of the last two roles.
    """
    roles = {}
    for layer in layers:
        names = layer.name.lower().split(".")
        if any("embed" in name for name in names[-2:]):
            roles[layer] = "an embedding"
        elif names[-1] in _ROUTERS and layer.outer < layer.inner:  # a gated MLP's gate is wider
            roles[layer] = "a router"
    if len(layers) <= _FEW_LAYERS:
        return roles
    roles.setdefault(layers[-1], "the head")
    others = [layer for layer in layers if layer not in roles]
    if others and not reads_ids:
        roles[others[0]] = "the layer that reads the inputs"
    return roles


def _leave_out(use: Use, layers: list[LayerReport], gpu: Gpu | None, *, reads_ids: bool) -> None:
    """Set `left_out` where a layer stays in bf16 by custom, or where it is too small to gain."""
    in_order = dict.fromkeys(report.layer for report in layers)
    roles = _roles_in_bf16(list(in_order), reads_ids=reads_ids)
    for report in layers:
        if report.format == "bf16" or report.left_out:
            continue
        gain = _forecast_gain(use, report.format, [report], gpu)
        if report.layer in roles:
            report.left_out = f"{roles[report.layer]} usually stays in bf16"
        elif gain is not None and gain < 1:
            report.left_out = f"too small: the forecast is {gain:.2f}x"


def _forecast_gain(use: Use, form: str, layers: list[LayerReport], gpu: Gpu | None) -> float | None:
    """Forecast of the layers' speed-up over bf16; None without a GPU that has the format."""
    if gpu is None or not has_forecast(gpu, format_of(form)):
        return None
    sizes = [(r.rows, r.layer.inner, r.layer.outer) for r in layers]
    return use.gain(gpu, format_of(form), sizes)


def _converted(form: str, layers: Iterable[LayerReport]) -> list[LayerReport]:
    """The reports of the layers that are converted to a format."""
    return [report for report in layers if report.format == form and not report.left_out]


def _rounded_matmuls(formats: MatmulFormats, converted: Iterable[LayerReport]) -> MatmulChoice:
    """A function of a layer: its matmul with rounded operands if it is converted, else None."""
    layers = {report.layer for report in converted}

    def matmul(values: Tensor, weight: Tensor) -> Tensor:
        return quantized_linear(values, weight, formats).to(values.dtype)

    return lambda layer: matmul if layer in layers else None


def _report_model(use: Use, form: str, layers: list[LayerReport], gpu: Gpu | None) -> FormatReport:
    """Run the model with its converted layers in a format, and compare it with fp32."""
    converted = _converted(form, layers)
    left_out = len({report.layer for report in layers}) - len(converted)
    choose_matmul = _rounded_matmuls(use.formats(form), converted)
    # `use` keeps the report too, for its verdict.
    report = use.report(form, layers=len(converted), left_out=left_out, choose_matmul=choose_matmul)
    if converted:
        report.gain = _forecast_gain(use, form, converted, gpu)
    return report


def _recommend(
    use: Use, candidates: list[str], layers: list[LayerReport], watch: list[str]
) -> tuple[str | None, str]:
    """Return the first format whose code does not fail on a copy of the model, and its code.

    A format also counts if it has no code, or if its code cannot be tried here. Without such a
    format the result is ``(None, "")``. Remarks on the code are added to `watch`.
    """
    for form in candidates:
        if not use.torchao.lines(form, ()):
            watch.append(f"torchao 0.18 has no conversion to {form}, so there is no code below.")
            return form, ""
        code = _program(use, form, layers, watch)
        if not code:
            return form, ""
        untried = use.torchao.untried_reason(form, use.call.device)
        if untried:
            watch.append(f"The code below was not run here, because {untried}.")
            return form, code
        failure = use.torchao.failure(use.call, code)
        if not failure:
            return form, code
        watch.append(
            f"{form} is not recommended, because torchao's code for it fails here ({failure})."
        )
    return None, ""


def _program(use: Use, form: str, layers: list[LayerReport], watch: list[str]) -> str:
    """The code that converts the model to a format; empty if torchao converts none of its layers.

    If torchao cannot convert some layers that were rehearsed, a remark is added to `watch`.
    """
    modules = dict(use.call.model.named_modules())
    rehearsed = [report.layer.name for report in _converted(form, layers)]
    converted = []
    for name in rehearsed:
        if use.torchao.converts(form, modules.get(name)):
            converted.append(name)
    missing = len(rehearsed) - len(converted)
    if missing:
        kind = use.torchao.converted_kind(form)
        share = f"{missing} of {len(rehearsed)} layers"
        watch.append(f"torchao's code converts only {kind}, so {share} stay as they are.")
    if not converted:
        return ""
    left_out = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and name not in converted:
            left_out.append(name)
    return use.torchao.lines(form, left_out)
