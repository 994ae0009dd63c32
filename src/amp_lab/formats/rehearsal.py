"""`rehearse`: what a model's products become below 16 bits, and what it makes of that."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.advisor.recipes import INFERENCE, TRAINING, Case
from amp_lab.core.errors import AmpLabError, NumericsError, OptionError, TraceError, with_type
from amp_lab.core.remedies import remedy
from amp_lab.core.report import listed
from amp_lab.formats.cards import Card
from amp_lab.formats.cards import card as card_of
from amp_lab.formats.interception import Layer, Product
from amp_lab.formats.products import (
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    ProductFormats,
    operands,
    quantized_linear,
)
from amp_lab.formats.rehearsal_result import FormatReport, LayerReport, Rehearsal
from amp_lab.formats.scaling import Counts, Format, format_of
from amp_lab.formats.uses import Inference, ProductOf, Training, Use
from amp_lab.tracing.structures import named_tensors

DEFAULT = ("fp8", "fp8-rowwise", "mxfp8", "mxfp4", "nvfp4")
_CAUTIOUS = ("fp8-rowwise", "mxfp8", "fp8", "nvfp4", "mxfp4")  # as tried as libraries hold them
_UNLIKE = 6.0  # dB below what a format makes of normally distributed values: twice the error
_FLUSHED = 0.25  # of the values, above the share that a format makes 0 of normally distributed ones
_PEAK = 20.0  # the largest magnitude over the root mean square
_OPERANDS = {
    FORWARD: ("input", "weight"),
    GRAD_INPUT: ("gradient", "weight"),
    GRAD_WEIGHT: ("gradient", "input"),
}
_IN_16_BITS = remedy(
    "rehearse.in_16_bits",
    "no matmul of a model can be rehearsed: all are of conv3d, say, or of computed weights",
    "run it in 16 bits, under torch.autocast(device_type, torch.bfloat16)",
)
_FEW = 3  # layers: of no more, the first and the last are converted too
_ROUTERS = {"gate", "gating", "router", "switch"}


def rehearse(
    model: nn.Module,
    *inputs: Any,
    formats: Sequence[str] = DEFAULT,
    loss_fn: Callable[[Any], Any] | None = None,
    steps: int = 0,
    seeds: int = 3,
    card: str | None = None,
    use: str | None = None,
    **kwargs: Any,
) -> Rehearsal:
    """What becomes of a model whose products are computed in formats below 16 bits, on any machine.

    `use` is ``"training"`` or ``"inference"``; if it is left out, a model in evaluation mode is
    rehearsed for inference.

    For training one step in fp32 is taken with `inputs` and `kwargs`, a batch as the model takes
    it, and each product of linear layers, convolutions and grouped experts is repeated with
    operands that are rounded to each of the `formats`, names of `FORMATS`: forward, for the
    gradient of the input (dgrad) and of the weight (wgrad). Then the model runs with all of them
    but those that are better left in bf16. `loss_fn` makes a loss of the output, which is else its
    own or its mean square. With `steps` it is trained on that batch by AdamW, beside bf16 autocast,
    with so many `seeds`.

    For inference the forward product alone is repeated, and the model's output is compared with
    fp32's. `card`, of `cards.CARDS`, leaves out what would not be faster there, by a forecast.

    It cannot tell how fast a format is, whether a long training converges, or how accurate the
    model is on other data. It works on copies, where the model is. Raises `NumericsError` for a
    format that does not exist, for a model without such products, and for one that cannot be
    trained or returns nothing to compare; `OptionError` for an unknown card or use, and for steps
    of inference; `TraceError` if its step fails.
    """
    names = dict.fromkeys(("bf16", *formats))  # each once
    forms = [format_of(name) for name in names]
    facts = card_of(card) if card else None
    kind = _kind(model, use)
    _check_steps(kind, steps, seeds)
    case = Case(model, inputs, kwargs, loss_fn, _device_of(model))
    with case.random_numbers_kept(), torch.enable_grad():
        try:
            rehearsed = Training(case, steps, seeds) if kind is Training else Inference(case)
            layers, reports = _first_step(rehearsed, forms, facts)
        except AmpLabError:
            raise
        except Exception as error:  # the user's model and loss raise what they like
            failed = f"{type(model).__name__} fails in {kind.step}"
            raise TraceError(f"{failed}: {with_type(error)}") from error
        return _result(rehearsed, layers, reports, card)


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def _result(
    use: Use, layers: list[LayerReport], reports: list[FormatReport], card: str | None
) -> Rehearsal:
    """The verdicts, and torchao's lines for the best format."""
    use.judge()
    if card:
        for report in reports[1:]:
            if report.name not in card_of(card).formats:
                report.verdict = f"{card} does not multiply it"
    passing = {report.name for report in reports if report.passes}
    candidates = [form for form in _CAUTIOUS if form in passing]
    watch = [*use.remarks, *_not_rehearsed(use)]
    best, program = _recommended(use, candidates, layers, watch)
    watch.append(use.limits)
    name = type(use.case.model).__name__
    return use.result(
        name, layers=layers, recommended=best, program=program, card=card, watch=watch
    )


def _kind(model: nn.Module, use: str | None) -> type[Use]:
    """What is rehearsed: as `use` says, or else as the mode of the model does."""
    if use is None:
        return Training if model.training else Inference
    kinds: dict[str, type[Use]] = {TRAINING: Training, INFERENCE: Inference}
    if use not in kinds:
        raise OptionError(f"rehearse: use {use!r} is none of {', '.join(kinds)}")
    return kinds[use]


def _check_steps(kind: type[Use], steps: int, seeds: int) -> None:
    if steps < 0 or seeds < 1:
        raise OptionError(f"rehearse: {steps} steps with {seeds} seeds cannot be")
    if steps and kind is Inference:
        raise OptionError(
            'rehearse: steps are for training, and this is inference: pass use="training", or '
            "leave steps out"
        )


def _first_step(
    use: Use, forms: list[Format], card: Card | None
) -> tuple[list[LayerReport], list[FormatReport]]:
    """Each layer in each format, what is left out, and the whole model without that."""
    errors = _measure(use, forms)
    if not errors:
        raise NumericsError(_no_matmul(use))
    layers = []
    for errors_of_layer in errors:
        layers += [errors_of_layer.report(form) for form in forms]
    inputs = named_tensors((use.case.args, use.case.kwargs))
    reads_ids = not any(tensor.is_floating_point() for _, tensor in inputs)
    _leave_out(use, layers, card, reads_ids)
    return layers, [_whole_model(use, form.name, layers, card) for form in forms]


def _no_matmul(use: Use) -> str:
    problem = f"{type(use.case.model).__name__} multiplies by no parameter that can be rounded"
    others = _left_to_torch(use)
    if not others:
        return problem
    return f"{problem}; it has {', '.join(others)}: {_IN_16_BITS.text}"


def _left_to_torch(use: Use) -> list[str]:
    names = {op: listed([*weights], 3) for op, weights in use.others.items()}
    return [f"{op} with {weights}" for op, weights in names.items()]


def _not_rehearsed(use: Use) -> list[str]:
    others = sorted(_left_to_torch(use))
    return [f"Not rehearsed: {other}, which torch computes." for other in others]


def _sums() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclass
class _LayerErrors:
    """A layer's products in one step, exactly and in each format; several calls add up."""

    use: Use
    layer: Layer
    forms: list[Format]
    rows: int = 0
    summed: set[int] = field(default_factory=set)  # rows that a gradient of the weight sums over
    signal: dict[str, float] = field(default_factory=_sums)  # squares, by product
    noise: dict[tuple[str, str], float] = field(default_factory=_sums)  # by format and product
    loss_change: dict[str, float] = field(default_factory=_sums)  # by format
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)  # by format and operand
    peaks: dict[str, float] = field(default_factory=dict)  # by operand

    def note(self, which: str, left: Tensor, right: Tensor, exact: Tensor) -> None:
        """Repeat one of the products in each format."""
        self.signal[which] += _squares(exact)
        if which == GRAD_WEIGHT:
            self.summed.add(left.shape[1])
        for operand, values in zip(_OPERANDS[which], (left, right), strict=True):
            self.peaks[operand] = max(self.peaks.get(operand, 0.0), _peak(values))
        for form in self.forms:
            by_operand = self.counts.setdefault(form.name, {})
            counts = [by_operand.setdefault(operand, Counts()) for operand in _OPERANDS[which]]
            rounded = self.use.formats(form).product(which, left, right, counts)
            self.noise[form.name, which] += _squares(rounded - exact)

    def note_loss(self, values: Tensor, weight: Tensor, grad: Tensor) -> None:
        """What the errors of the output add to the loss, to first order."""
        grad = grad.flatten()
        output = values @ weight.T
        exact = torch.linalg.vecdot(output.flatten(), grad)
        for form in self.forms:
            output = self.use.formats(form).product(FORWARD, values, weight)
            rounded = torch.linalg.vecdot(output.flatten(), grad)
            self.loss_change[form.name] += float(rounded - exact)

    def report(self, form: Format) -> LayerReport:
        """What was found in a format, also in one that does not fit."""
        report = LayerReport(self.layer, self.rows, form.name)
        report.left_out = self.use.misfit(self.layer, form)
        if not report.left_out:
            report.left_out = self.use.misfit_of_rows(self.layer, form, sorted(self.summed))
        if report.left_out:
            return report
        for which, signal in self.signal.items():
            report.decibels[which] = _decibels(signal, self.noise[form.name, which])
        report.loss_change = self.loss_change.get(form.name)
        for operand, counts in self.counts[form.name].items():
            report.shares[operand] = counts.shares()
        if form.name != "bf16":
            report.left_out = self._noise_reason(report, self.use.formats(form))
        return report

    def _noise_reason(self, report: LayerReport, formats: ProductFormats) -> str:
        """Why a layer is worse off than normally distributed values; empty if it is not."""
        for operand, shares in report.shares.items():
            if shares["nonfinite"]:
                return f"{shares['nonfinite']:.2g} of its {operand} are not finite"
        usual_decibels, usual_flushed = _typical(formats, self.use.typical)
        flushed, operand = max((s["flushed"], name) for name, s in report.shares.items())
        if flushed > usual_flushed + _FLUSHED:
            return f"{flushed:.0%} of its {operand} become 0"
        which, decibels = report.worst
        if decibels >= usual_decibels - _UNLIKE:
            return ""
        noise = f"{which}: {decibels:.0f} dB where {usual_decibels:.0f} are usual"
        operand, peak = max(self.peaks.items(), key=lambda item: item[1])
        if peak > _PEAK:
            return f"{noise}: its {operand} reaches {peak:.0f} times its root mean square"
        return f"{noise}: its sums cancel"


class _MeasuredProduct(torch.autograd.Function):
    """``values @ weight.T``, computed exactly; its errors are noted, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, errors: _LayerErrors) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.errors = errors
        out = values @ weight.T
        errors.rows += len(values)
        errors.note(FORWARD, values, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found: list[Tensor | None] = [None, None]
        for i, which in enumerate((GRAD_INPUT, GRAD_WEIGHT)):
            if ctx.needs_input_grad[i]:
                left, right = operands(which, *saved, *grads)
                exact = left @ right.T
                ctx.errors.note(which, left, right, exact)
                found[i] = exact
        ctx.errors.note_loss(*saved, *grads)
        return *found, None


def _measure(use: Use, forms: list[Format]) -> list[_LayerErrors]:
    """The errors of each layer in the formats that its kernels can take, by order of calls."""
    by_layer: dict[Layer, _LayerErrors] = {}

    def product_of(layer: Layer) -> Product:
        if layer not in by_layer:
            fitting = [form for form in forms if not use.misfit(layer, form)]
            by_layer[layer] = _LayerErrors(use, layer, fitting)
        errors = by_layer[layer]
        return lambda values, weight: _MeasuredProduct.apply(values, weight, errors)

    use.measure(product_of)
    return list(by_layer.values())


def _kept_by_custom(layers: list[Layer], reads_ids: bool) -> dict[Layer, str]:
    """The layers, in the order of their calls, that stay in bf16 by custom, and what they are.

    These are embeddings, what reads the inputs unless they are ids, routers and the head, as in
    DeepSeek-V3's report (arXiv 2412.19437, section 3.3.1) and torchao's example of FP8 training.
    """
    kept = {}
    for layer in layers:
        names = layer.name.lower().split(".")
        if any("embed" in name for name in names[-2:]):
            kept[layer] = "an embedding"
        elif names[-1] in _ROUTERS and layer.outer < layer.inner:
            kept[layer] = "a router"
    if len(layers) <= _FEW:
        return kept
    kept.setdefault(layers[-1], "the head")
    others = [layer for layer in layers if layer not in kept]
    if others and not reads_ids:
        kept[others[0]] = "the layer that reads the inputs"
    return kept


def _leave_out(use: Use, layers: list[LayerReport], card: Card | None, reads_ids: bool) -> None:
    """Say which of the layers that could be converted are better left in bf16."""
    in_order = dict.fromkeys(report.layer for report in layers)
    kept = _kept_by_custom(list(in_order), reads_ids)
    for report in layers:
        if report.format == "bf16" or report.left_out:
            continue
        gain = _gain(use, report.format, [report], card)
        if report.layer in kept:
            report.left_out = f"{kept[report.layer]}, by custom"
        elif gain is not None and gain < 1:
            report.left_out = f"too small to gain: a forecast of {gain:.2f}x"


def _gain(use: Use, form: str, layers: list[LayerReport], card: Card | None) -> float | None:
    """How many times as fast as in bf16 layers would be; None unless a card has the format."""
    if card is None or form not in card.formats:
        return None
    sizes = [(r.rows, r.layer.inner, r.layer.outer) for r in layers]
    return use.gain(card, form, sizes)


def _converted(form: str, layers: Iterable[LayerReport]) -> list[LayerReport]:
    return [report for report in layers if report.format == form and not report.left_out]


def _products(formats: ProductFormats, converted: Iterable[LayerReport]) -> ProductOf:
    """The products of the layers that are converted."""
    layers = {report.layer for report in converted}

    def product(values: Tensor, weight: Tensor) -> Tensor:
        return quantized_linear(values, weight, formats).to(values.dtype)

    return lambda layer: product if layer in layers else None


def _whole_model(use: Use, form: str, layers: list[LayerReport], card: Card | None) -> FormatReport:
    """Run the model in a format, but for what is left out, and compare it with fp32."""
    converted = _converted(form, layers)
    left_out = len({report.layer for report in layers}) - len(converted)
    products = _products(use.formats(form), converted)
    report = use.report(form, len(converted), left_out, products)
    if converted:
        report.gain = _gain(use, form, converted, card)
    return report


def _recommended(
    use: Use, candidates: list[str], layers: list[LayerReport], watch: list[str]
) -> tuple[str | None, str]:
    """The first format whose lines do not fail on a copy of the model, and those lines."""
    for form in candidates:
        code = _program(use, form, layers, watch)
        if not code:
            return form, ""
        untried = use.torchao.untried_reason(form, use.case.device)
        if untried:
            watch.append(f"The lines below were not run here: {untried}.")
            return form, code
        failure = use.torchao.failure(use.case, code)
        if not failure:
            return form, code
        watch.append(f"{form} is not recommended: torchao's lines for it fail here ({failure}).")
    return None, ""


def _program(use: Use, form: str, layers: list[LayerReport], watch: list[str]) -> str:
    """The lines that convert the model to a format; empty if torchao converts none of it."""
    modules = dict(use.case.model.named_modules())
    rounded = [report.layer.name for report in _converted(form, layers)]
    converted = []
    for name in rounded:
        if use.torchao.converts(form, modules.get(name)):
            converted.append(name)
    left = len(rounded) - len(converted)
    if left:
        kind = use.torchao.converted_kind(form)
        many = f"{left} of {len(rounded)} layers"
        watch.append(f"torchao's lines are for {kind} alone, and so leave {many} in 16 bits.")
    if not converted:
        return ""
    left_out = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and name not in converted:
            left_out.append(name)
    return use.torchao.lines(form, left_out)


@functools.cache
def _typical(formats: ProductFormats, which: str) -> tuple[float, float]:
    """SQNR in dB of a product of normally distributed values, and the share that become 0."""
    draws = torch.Generator().manual_seed(0)
    left = torch.randn(256, 256, generator=draws)
    right = torch.randn(256, 256, generator=draws)
    exact = left @ right.T
    counts = Counts()
    rounded = formats.product(which, left, right, (counts, None))
    decibels = _decibels(_squares(exact), _squares(rounded - exact))
    return decibels, counts.shares()["flushed"]


def _peak(values: Tensor) -> float:
    """The largest magnitude over the root mean square; 0 for zeros."""
    largest = float(values.abs().max())
    mean_square = _squares(values) / values.numel()
    return largest / math.sqrt(mean_square or 1.0)


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return math.inf
    if not signal:
        return -math.inf
    return 10 * math.log10(signal / noise)
