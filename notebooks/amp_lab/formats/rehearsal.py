"""`rehearse`: what a model's products become below 16 bits, and what it makes of that."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from amp_lab.advisor.learning import distance
from amp_lab.advisor.recipes import OWN_LOSS, TRAINING, Case, Recipe, Step, loss_of
from amp_lab.errors import AmpLabError, NumericsError, OptionError, TraceError, with_type
from amp_lab.formats import torchao_code
from amp_lab.formats.cards import Card
from amp_lab.formats.cards import card as card_of
from amp_lab.formats.interception import Layer, Product, intercepted
from amp_lab.formats.products import (
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    operands,
    quantized_linear,
    recipe,
)
from amp_lab.formats.rehearsal_result import FormatReport, LayerReport, Rehearsal
from amp_lab.formats.scaling import Counts, Format, format_of
from amp_lab.precision import Precision
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
_FEW = 3  # layers: of no more, the first and the last are converted too
_ROUTERS = {"gate", "gating", "router", "switch"}
_PAD_ROWS = remedy(
    "rehearse.pad_rows",
    "kernels of a format cannot sum over so many rows",
    "its weight gradient sums over {rows} rows, not a multiple of {multiple}: pad batch x tokens",
)
_TRAIN = remedy(
    "rehearse.train",
    "the gradients in bf16 are far from fp32's already",
    "bf16 gradients differ {off:.0%} from fp32's: train instead (steps=20, or --steps 20).",
)
_LR, _JITTER = 1e-3, 2.0**-9


def rehearse(
    model: nn.Module,
    *inputs: Any,
    formats: Sequence[str] = DEFAULT,
    loss_fn: Callable[[Any], Any] | None = None,
    steps: int = 0,
    seeds: int = 3,
    card: str | None = None,
    **kwargs: Any,
) -> Rehearsal:
    """What becomes of a model whose products are computed in formats below 16 bits, on any machine.

    One step in fp32 is taken with `inputs` and `kwargs`, a batch as the model takes it, and each
    product of linear layers, convolutions and grouped experts is repeated with operands that are
    rounded to each of the `formats`, names of `FORMATS`: forward, for the gradient of the input
    (dgrad) and of the weight (wgrad). Then the model runs with all of them but those that are
    better left in bf16. `loss_fn` makes a loss of the output, which is else its own or its mean
    square. With `steps` it is trained on that batch by AdamW, beside bf16 autocast, with so many
    `seeds`. `card`, of `cards.CARDS`, leaves out what would not be faster there, by a forecast.

    It cannot tell how fast a format is, nor whether a long training converges. It works on copies,
    where the model is. Raises `NumericsError` for a format that does not exist and for a model
    without such products, `OptionError` for an unknown card, and `TraceError` if its step fails.
    """
    forms = [format_of(name) for name in dict.fromkeys(("bf16", *formats))]
    on, name = card_of(card) if card else None, type(model).__name__
    if steps < 0 or seeds < 1:
        raise OptionError(f"rehearse: {steps} steps with {seeds} seeds cannot be")
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    case, watch = Case(model, inputs, kwargs, loss_fn, place), list[str]()
    if TRAINING not in case.uses:
        raise NumericsError(f"{name} has no weight to be trained")
    devices = [] if place.type == "cpu" else [torch.accelerator.current_device_index()]
    kept = torch.random.fork_rng(devices, device_type="cuda" if place.type == "cpu" else place.type)
    with kept, torch.enable_grad():
        try:
            case = _with_loss(case, watch)
            layers, reports = _first_step(case, forms, on, watch)
        except AmpLabError:
            raise
        except Exception as error:  # the user's model and loss raise what they like
            raise TraceError(f"{name} fails in an fp32 step: {with_type(error)}") from error
        _train(case, reports, layers, steps, seeds)
        for report in reports[1:]:
            if on and report.name not in on.formats:
                report.verdict = f"{card} does not multiply it"
        sound = {r.name for r in reports if r.verdict.startswith("holds")}
        candidates = [form for form in _CAUTIOUS if form in sound]
        best, program = _recommended(case, candidates, layers, watch)
    watch.append("Neither its speed nor the convergence of a long training can be known from this.")
    title = f"{name}, rehearsed on {place}"
    return Rehearsal(title, layers, reports, best, program, card, steps, watch)


def _first_step(
    case: Case, forms: list[Format], on: Card | None, watch: list[str]
) -> tuple[list[LayerReport], list[FormatReport]]:
    """Each layer in each format, what is left out, and the whole model without that."""
    run = _Run(case)
    passages, exact = _measured(run, forms)
    others = [f"{op} with {listed([*weights], 3)}" for op, weights in run.others.items()]
    if not passages:
        name, what = type(case.model).__name__, f"; it has {', '.join(others)}" if others else ""
        raise NumericsError(f"{name} multiplies by no parameter that can be rounded{what}")
    layers = [passage.report(form) for passage in passages for form in forms]
    reads_ids = not any(x.is_floating_point() for _, x in named_tensors((case.args, case.kwargs)))
    _leave_out(layers, on, reads_ids)
    reports = [_whole_model(run, form, layers, exact, on) for form in forms]
    if reports[0].gradients_off > 0.5:
        watch.append(_TRAIN.said(off=reports[0].gradients_off))
    watch += [f"Not rehearsed: {what}, which torch computes." for what in sorted(others)]
    return layers, reports


def _with_loss(case: Case, watch: list[str]) -> Case:
    if case.loss_fn is not None:
        return case
    loss = loss_of(Step(case, Recipe(TRAINING)).output())
    if loss is None:
        raise NumericsError("no gradient leads from its output to a weight: give a loss")
    watch.append(OWN_LOSS.said(loss=loss))
    return replace(case, loss_fn=eval(f"lambda output: {loss}"))


@dataclass
class _Passage:
    """A layer's products in one step, exactly and in each format; several calls add up."""

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
            rounded = recipe(form).product(which, left, right, counts)
            key = form.name, which
            self.noise[key] = self.noise.get(key, 0.0) + _squares(rounded - exact)

    def note_loss(self, values: Tensor, weight: Tensor, grad: Tensor) -> None:
        """What the errors of the output add to the loss, to first order."""
        exact = torch.linalg.vecdot((values @ weight.T).flatten(), grad.flatten())
        for form in self.forms:
            rounded = recipe(form).product(FORWARD, values, weight)
            change = float(torch.linalg.vecdot(rounded.flatten(), grad.flatten()) - exact)
            self.loss_change[form.name] = self.loss_change.get(form.name, 0.0) + change

    def report(self, form: Format) -> LayerReport:
        """What was found in a format, also in one that does not fit."""
        misfit = self.layer.misfit(form) or self._odd_rows(form)
        report = LayerReport(self.layer, self.rows, form.name, left_out=misfit)
        if report.left_out:
            return report
        for which, signal in self.signal.items():
            report.decibels[which] = _decibels(signal, self.noise[form.name, which])
        report.loss_change = self.loss_change.get(form.name)
        for operand, counts in self.counts[form.name].items():
            report.shares[operand] = counts.shares()
        report.left_out = "" if form.name == "bf16" else self._why_not(report, *_typical(form))
        return report

    def _odd_rows(self, form: Format) -> str:
        """Why kernels cannot compute the weight's gradient; empty if they can."""
        odd = [rows for rows in sorted(self.summed) if rows % form.multiple]
        if not odd or self.layer.kind != "linear":
            return ""
        return _PAD_ROWS.said(rows=odd[0], multiple=form.multiple)

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


_ProductOf = Callable[[Layer], Product | None]


class _Run:
    """A copy of a model, whose first step in fp32 can be taken again with other products."""

    def __init__(self, case: Case):
        assert case.loss_fn is not None
        self._loss_fn, self._step = case.loss_fn, Step(case, Recipe(TRAINING))
        self._buffers = [buffer.clone() for buffer in self._step.model.buffers()]
        self.others = dict[str, dict[str, None]]()  # what multiplies and cannot be replaced

    def __call__(self, product_of: _ProductOf) -> tuple[float, list[Tensor]]:
        """Loss and gradients."""
        step, model = self._step, self._step.model
        for buffer, first in zip(model.buffers(), self._buffers, strict=True):
            buffer.copy_(first)
        model.zero_grad()
        torch.manual_seed(0)  # the same dropout in each run
        with Precision.FP32.autocast(step.trained[0].device.type):
            with intercepted(model, product_of) as others:
                loss = self._loss_fn(model(*step.names["args"], **step.names["kwargs"]))
            loss.backward()
        self.others |= others
        return float(loss.detach()), [p.grad for p in step.trained if p.grad is not None]


def _measured(run: _Run, forms: list[Format]) -> tuple[list[_Passage], tuple[float, list[Tensor]]]:
    passages: dict[Layer, _Passage] = {}

    def product_of(layer: Layer) -> Product:
        fit = [form for form in forms if not layer.misfit(form)]
        passage = passages.setdefault(layer, _Passage(layer, fit))
        return lambda values, weight: _Measured.apply(values, weight, passage)

    exact = run(product_of)
    return list(passages.values()), exact


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


def _leave_out(layers: list[LayerReport], on: Card | None, reads_ids: bool) -> None:
    """Say which of the layers that could be converted are better left in bf16."""
    kept = _custom(list(dict.fromkeys(report.layer for report in layers)), reads_ids)
    for report in layers:
        if report.format == "bf16" or report.left_out:
            continue
        layer, gain = report.layer, math.inf
        if on and report.format in on.formats:
            gain = on.gain(report.format, report.rows, layer.inner, layer.outer)
        if layer in kept:
            report.left_out = f"{kept[layer]}, by custom"
        elif gain < 1:
            report.left_out = f"too small to gain: a forecast of {gain:.2f}x"


def _products(report: FormatReport, layers: list[LayerReport]) -> _ProductOf:
    """The products of the layers that are converted."""
    chosen = {r.layer for r in _converted(report.name, layers)}

    def product(values: Tensor, weight: Tensor) -> Tensor:
        return quantized_linear(values, weight, report.name).to(values.dtype)

    return lambda layer: product if layer in chosen else None


def _converted(form: str, layers: Iterable[LayerReport]) -> list[LayerReport]:
    return [r for r in layers if r.format == form and not r.left_out]


def _whole_model(
    run: _Run,
    form: Format,
    layers: list[LayerReport],
    exact: tuple[float, list[Tensor]],
    on: Card | None,
) -> FormatReport:
    """Run the model in a format, but for what is left out, and hold it against fp32."""
    chosen = _converted(form.name, layers)
    report = FormatReport(form.name, len(chosen), len({r.layer for r in layers}) - len(chosen))
    if chosen:
        loss, gradients = run(_products(report, layers))
        report.loss_off = (loss - exact[0]) / (abs(exact[0]) or 1.0)
        report.gradients_off = distance(gradients, exact[1])
    if on and chosen and form.name in on.formats:
        sizes = [(r.rows, r.layer.inner, r.layer.outer) for r in chosen]
        low, bf16 = (sum(on.step_s(n, *size) for size in sizes) for n in (form.name, "bf16"))
        report.gain = bf16 / low
    return report


def _train(
    case: Case, reports: list[FormatReport], layers: list[LayerReport], steps: int, seeds: int
) -> None:
    """Train in each format for some steps, and give each its verdict."""
    runs = [(r, seed) for r in reports if r.layers and steps for seed in range(seeds)]
    for report, seed in tqdm(runs, unit="run", leave=False, disable=None):
        # Of bf16 it is autocast itself that rounds.
        is_bf16 = report.name == "bf16"
        precision, converted = (Precision.BF16, []) if is_bf16 else (Precision.FP32, layers)
        torch.manual_seed(seed)
        step = Step(case, Recipe(TRAINING, precision), lr=_LR)
        with torch.no_grad():  # so that seeds differ where nothing is drawn
            for p in step.trained:
                p.mul_(1 + _JITTER * torch.randn_like(p))
        with intercepted(step.model, _products(report, converted)):
            losses = [float(step()) for _ in range(steps)]
        report.losses.append(losses[-1])
        report.learned = losses[0] - losses[-1]
    for report in reports:
        report.judge(reports[0])


def _recommended(
    case: Case, candidates: list[str], layers: list[LayerReport], watch: list[str]
) -> tuple[str | None, str]:
    """The first format whose lines do not fail on a copy of the model, and those lines."""
    for form in candidates:
        code = _program(case, form, layers, watch)
        if not code:
            return form, ""
        untried = torchao_code.untried_reason(form, code)
        failed = "" if untried else torchao_code.failure(case, code)
        if not failed:
            watch += [f"The lines below were not run here: {untried}."] if untried else []
            return form, code
        watch.append(f"{form} is not recommended: torchao's lines for it fail here ({failed}).")
    return None, ""


def _program(case: Case, best: str, layers: list[LayerReport], watch: list[str]) -> str:
    """The lines that convert the model to a format; empty if torchao converts none of it."""
    modules = dict(case.model.named_modules())
    chosen = _converted(best, layers)
    linear = [r for r in chosen if torchao_code.converts(best, modules.get(r.layer.name))]
    if len(linear) < len(chosen):
        many = f"{len(chosen) - len(linear)} of {len(chosen)} layers"
        kind = "nn.Linear without a bias" if best == "mxfp8" else "nn.Linear"
        watch.append(f"torchao converts {kind} alone, and so leaves {many} in 16 bits.")
    left = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    left = [name for name in left if name not in {r.layer.name for r in linear}]
    return torchao_code.lines(best, left) if linear else ""


@functools.cache
def _typical(form: Format) -> tuple[float, float]:
    """SQNR in dB of a product of normally distributed values, and the share that become 0."""
    draws = torch.Generator().manual_seed(0)
    left, right = torch.randn(256, 256, generator=draws), torch.randn(256, 256, generator=draws)
    exact, counts = left @ right.T, Counts()
    rounded = recipe(form).product(GRAD_INPUT, left, right, (counts, None))
    return _decibels(_squares(exact), _squares(rounded - exact)), counts.shares()["flushed"]


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
