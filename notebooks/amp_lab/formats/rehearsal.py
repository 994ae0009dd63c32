"""`rehearse`: what a model's products become below 16 bits, and what it makes of that."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.advisor.recipes import INFERENCE, TRAINING, Case
from amp_lab.errors import AmpLabError, NumericsError, OptionError, TraceError, with_type
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
from amp_lab.remedies import remedy
from amp_lab.report import listed
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
    forms = [format_of(name) for name in dict.fromkeys(("bf16", *formats))]
    on = card_of(card) if card else None
    kind = _kind(model, use)
    _check_steps(kind, steps, seeds)
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    case = Case(model, inputs, kwargs, loss_fn, place)
    with _random_numbers_kept(place), torch.enable_grad():
        try:
            rehearsed = Training(case, steps, seeds) if kind is Training else Inference(case)
            layers, reports = _first_step(rehearsed, forms, on)
        except AmpLabError:
            raise
        except Exception as error:  # the user's model and loss raise what they like
            failed = f"{type(model).__name__} fails in {kind.step}"
            raise TraceError(f"{failed}: {with_type(error)}") from error
        return _result(rehearsed, layers, reports, card)


def _random_numbers_kept(place: torch.device) -> AbstractContextManager:
    """The block after which random numbers go on as before it."""
    if place.type == "cpu":
        return torch.random.fork_rng([], device_type="cuda")
    return torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=place.type)


def _result(
    use: Use, layers: list[LayerReport], reports: list[FormatReport], card: str | None
) -> Rehearsal:
    """The verdicts, and torchao's lines for the best format."""
    use.judge()
    for report in reports[1:]:
        if card and report.name not in card_of(card).formats:
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
    use: Use, forms: list[Format], on: Card | None
) -> tuple[list[LayerReport], list[FormatReport]]:
    """Each layer in each format, what is left out, and the whole model without that."""
    passages = _measured(use, forms)
    if not passages:
        name, others = type(use.case.model).__name__, _left_to_torch(use)
        what = f"; it has {', '.join(others)}: {_IN_16_BITS.text}" if others else ""
        raise NumericsError(f"{name} multiplies by no parameter that can be rounded{what}")
    layers = [passage.report(form) for passage in passages for form in forms]
    given = named_tensors((use.case.args, use.case.kwargs))
    reads_ids = not any(x.is_floating_point() for _, x in given)
    _leave_out(use, layers, on, reads_ids)
    return layers, [_whole_model(use, form.name, layers, on) for form in forms]


def _left_to_torch(use: Use) -> list[str]:
    return [f"{op} with {listed([*weights], 3)}" for op, weights in use.others.items()]


def _not_rehearsed(use: Use) -> list[str]:
    return [f"Not rehearsed: {what}, which torch computes." for what in sorted(_left_to_torch(use))]


@dataclass
class _Passage:
    """A layer's products in one step, exactly and in each format; several calls add up."""

    use: Use
    layer: Layer
    forms: list[Format]
    rows: int = 0
    summed: set[int] = field(default_factory=set)  # rows that a gradient of the weight sums over
    signal: dict[str, float] = field(default_factory=dict)  # squares, by product
    noise: dict[tuple[str, str], float] = field(default_factory=dict)  # by format and product
    loss_change: dict[str, float] = field(default_factory=dict)
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)  # by format and operand
    peaks: dict[str, float] = field(default_factory=dict)  # by operand

    def note(self, which: str, left: Tensor, right: Tensor, exact: Tensor) -> None:
        """Repeat one of the products in each format."""
        self.signal[which] = self.signal.get(which, 0.0) + _squares(exact)
        if which == GRAD_WEIGHT:
            self.summed.add(left.shape[1])
        for name, values in zip(_OPERANDS[which], (left, right), strict=True):
            mean_square = _squares(values) / values.numel() or 1.0
            peak = float(values.abs().max()) / math.sqrt(mean_square)
            self.peaks[name] = max(self.peaks.get(name, 0.0), peak)
        for form in self.forms:
            found = self.counts.setdefault(form.name, {})
            counts = [found.setdefault(name, Counts()) for name in _OPERANDS[which]]
            rounded = self.use.formats(form).product(which, left, right, counts)
            key = form.name, which
            self.noise[key] = self.noise.get(key, 0.0) + _squares(rounded - exact)

    def note_loss(self, values: Tensor, weight: Tensor, grad: Tensor) -> None:
        """What the errors of the output add to the loss, to first order."""
        exact = torch.linalg.vecdot((values @ weight.T).flatten(), grad.flatten())
        for form in self.forms:
            rounded = self.use.formats(form).product(FORWARD, values, weight)
            change = float(torch.linalg.vecdot(rounded.flatten(), grad.flatten()) - exact)
            self.loss_change[form.name] = self.loss_change.get(form.name, 0.0) + change

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
            usual = _typical(self.use.formats(form), self.use.typical)
            report.left_out = self._why_not(report, *usual)
        return report

    def _why_not(self, report: LayerReport, decibels: float, flushed: float) -> str:
        """Why a layer is worse off than normally distributed values; empty if it is not."""
        which, least = report.worst
        flushes, most = max((s["flushed"], operand) for operand, s in report.shares.items())[::-1]
        for operand, shares in report.shares.items():
            if shares["nonfinite"]:
                return f"{shares['nonfinite']:.2g} of its {operand} are not finite"
        if most > flushed + _FLUSHED:
            return f"{most:.0%} of its {flushes} become 0"
        if least >= decibels - _UNLIKE:
            return ""
        operand = max(self.peaks, key=lambda name: self.peaks[name])
        why = "its sums cancel"
        if self.peaks[operand] > _PEAK:
            why = f"its {operand} reaches {self.peaks[operand]:.0f} times its root mean square"
        return f"{which}: {least:.0f} dB where {decibels:.0f} are usual: {why}"


class _Measured(torch.autograd.Function):
    """``values @ weight.T``, computed exactly, and noted in a passage, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, passage: _Passage) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.passage = passage
        out = values @ weight.T
        passage.rows += len(values)
        passage.note(FORWARD, values, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None, None]
        for at, which in enumerate((GRAD_INPUT, GRAD_WEIGHT)):
            if ctx.needs_input_grad[at]:
                left, right = operands(which, *ctx.saved_tensors, *grads)
                found[at] = exact = left @ right.T
                ctx.passage.note(which, left, right, exact)
        ctx.passage.note_loss(*ctx.saved_tensors, *grads)
        return *found, None


def _measured(use: Use, forms: list[Format]) -> list[_Passage]:
    passages: dict[Layer, _Passage] = {}

    def product_of(layer: Layer) -> Product:
        fit = [form for form in forms if not use.misfit(layer, form)]
        passage = passages.setdefault(layer, _Passage(use, layer, fit))
        return lambda values, weight: _Measured.apply(values, weight, passage)

    use.measure(product_of)
    return list(passages.values())


def _custom(layers: list[Layer], reads_ids: bool) -> dict[Layer, str]:
    """The layers, in the order of their calls, that stay in bf16 by custom, and what they are.

    These are embeddings, what reads the inputs unless they are ids, routers and the head, as in
    DeepSeek-V3's report (arXiv 2412.19437, section 3.3.1) and torchao's example of FP8 training.
    """
    found = {}
    for layer in layers:
        *around, own = layer.name.lower().split(".")
        if any("embed" in name for name in (*around[-1:], own)):
            found[layer] = "an embedding"
        elif own in _ROUTERS and layer.outer < layer.inner:
            found[layer] = "a router"
    if len(layers) > _FEW:
        found.setdefault(layers[-1], "the head")
        first = next((layer for layer in layers if layer not in found), None)
        if first is not None and not reads_ids:
            found[first] = "the layer that reads the inputs"
    return found


def _leave_out(use: Use, layers: list[LayerReport], on: Card | None, reads_ids: bool) -> None:
    """Say which of the layers that could be converted are better left in bf16."""
    kept = _custom(list(dict.fromkeys(report.layer for report in layers)), reads_ids)
    for report in layers:
        if report.format == "bf16" or report.left_out:
            continue
        layer, gain = report.layer, math.inf
        if on and report.format in on.formats:
            gain = use.gain(on, report.format, [(report.rows, layer.inner, layer.outer)])
        if layer in kept:
            report.left_out = f"{kept[layer]}, by custom"
        elif gain < 1:
            report.left_out = f"too small to gain: a forecast of {gain:.2f}x"


def _converted(form: str, layers: Iterable[LayerReport]) -> list[LayerReport]:
    return [r for r in layers if r.format == form and not r.left_out]


def _products(formats: ProductFormats, chosen: Iterable[LayerReport]) -> ProductOf:
    """The products of the layers that are converted."""
    layers = {report.layer for report in chosen}

    def product(values: Tensor, weight: Tensor) -> Tensor:
        return quantized_linear(values, weight, formats).to(values.dtype)

    return lambda layer: product if layer in layers else None


def _whole_model(use: Use, form: str, layers: list[LayerReport], on: Card | None) -> FormatReport:
    """Run the model in a format, but for what is left out, and compare it with fp32."""
    chosen = _converted(form, layers)
    left_out = len({report.layer for report in layers}) - len(chosen)
    report = use.report(form, len(chosen), left_out, _products(use.formats(form), chosen))
    if on and chosen and form in on.formats:
        sizes = [(r.rows, r.layer.inner, r.layer.outer) for r in chosen]
        report.gain = use.gain(on, form, sizes)
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
        failed = "" if untried else use.torchao.failure(use.case, code)
        if not failed:
            watch += [f"The lines below were not run here: {untried}."] if untried else []
            return form, code
        watch.append(f"{form} is not recommended: torchao's lines for it fail here ({failed}).")
    return None, ""


def _program(use: Use, best: str, layers: list[LayerReport], watch: list[str]) -> str:
    """The lines that convert the model to a format; empty if torchao converts none of it."""
    modules = dict(use.case.model.named_modules())
    chosen = _converted(best, layers)
    linear = [r for r in chosen if use.torchao.converts(best, modules.get(r.layer.name))]
    if len(linear) < len(chosen):
        many = f"{len(chosen) - len(linear)} of {len(chosen)} layers"
        kind = use.torchao.converted_kind(best)
        watch.append(f"torchao's lines are for {kind} alone, and so leave {many} in 16 bits.")
    left = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    left = [name for name in left if name not in {r.layer.name for r in linear}]
    return use.torchao.lines(best, left) if linear else ""


@functools.cache
def _typical(formats: ProductFormats, which: str) -> tuple[float, float]:
    """SQNR in dB of a product of normally distributed values, and the share that become 0."""
    draws = torch.Generator().manual_seed(0)
    left, right = torch.randn(256, 256, generator=draws), torch.randn(256, 256, generator=draws)
    exact, counts = left @ right.T, Counts()
    rounded = formats.product(which, left, right, (counts, None))
    return _decibels(_squares(exact), _squares(rounded - exact)), counts.shares()["flushed"]


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
