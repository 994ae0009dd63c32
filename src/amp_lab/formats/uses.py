"""What `rehearse` runs, a training step or a forward pass, and all in which the two differ."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from amp_lab.advisor.learning import distance
from amp_lab.advisor.recipes import INFERENCE, OWN_LOSS, TRAINING, Case, Recipe, Step, loss_of
from amp_lab.core.errors import NumericsError
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.formats import torchao_code, torchao_inference
from amp_lab.formats.cards import Card
from amp_lab.formats.interception import Layer, Product, intercepted
from amp_lab.formats.products import (
    FORWARD,
    GRAD_INPUT,
    ProductFormats,
    inference_recipe,
    recipe,
)
from amp_lab.formats.rehearsal_result import (
    OUTPUT_OFF,
    FormatReport,
    InferenceRehearsal,
    InferenceReport,
    Rehearsal,
    TrainingRehearsal,
    TrainingReport,
)
from amp_lab.formats.scaling import Format
from amp_lab.tracing.structures import named_tensors

ProductOf = Callable[[Layer], Product | None]
"""The matmul of a layer, or None where torch computes it."""

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
_LR = 1e-3
_JITTER = 2.0**-9  # of the weights, relative: bf16's rounding error
_MULTIPLE = 16  # of the sizes of a weight, for kernels of FP8 and of four bits


def _torch_product(layer: Layer) -> Product | None:
    return None


class Use(ABC):
    """A copy of a model that is run again with other matmuls, and what it is run for.

    `measure` comes first, and then `report` for each format, bf16 before the others. `remarks` are
    sentences for the reader. `others` has the weights, by op, of what multiplies and cannot be
    replaced.
    """

    step: ClassVar[str]  # what fails if the model does
    typical: ClassVar[str]  # the product whose noise is the usual one
    limits: ClassVar[str]  # what cannot be known
    torchao: ClassVar[ModuleType]  # whose `lines` convert a model

    def __init__(self, case: Case, recipe: Recipe):
        self.case = case
        self.remarks: list[str] = []
        self.others: dict[str, dict[str, None]] = {}
        self._copy = Step(case, recipe)
        self._buffers = [buffer.clone() for buffer in self._copy.model.buffers()]

    @abstractmethod
    def formats(self, form: Format | str) -> ProductFormats:
        """What torchao rounds the operands to."""

    @abstractmethod
    def misfit(self, layer: Layer, form: Format) -> str:
        """Why kernels of a format cannot multiply a layer; empty if they can."""

    def misfit_of_rows(self, layer: Layer, form: Format, summed: Sequence[int]) -> str:
        """Why they cannot sum over so many rows; empty if they can, or do not have to."""
        return ""

    @abstractmethod
    def seconds(self, card: Card, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of a layer on a card: a forecast."""

    def gain(self, card: Card, form: str, sizes: Sequence[tuple[int, int, int]]) -> float:
        """How many times as fast as in bf16 layers of (rows, inner, outer) would be, together."""
        bf16_s = sum(self.seconds(card, "bf16", *size) for size in sizes)
        form_s = sum(self.seconds(card, form, *size) for size in sizes)
        return bf16_s / form_s

    @abstractmethod
    def measure(self, product_of: ProductOf) -> None:
        """Run the model in fp32, with matmuls that are exact; the others are compared with it."""

    @abstractmethod
    def report(self, form: str, layers: int, left_out: int, product_of: ProductOf) -> FormatReport:
        """Run the model with the matmuls of a format, if any layer has them, and compare."""

    @abstractmethod
    def judge(self) -> None:
        """Give each report its verdict."""

    @abstractmethod
    def result(self, name: str, **found: Any) -> Rehearsal:
        """What is returned of a model of that name."""

    def _begin(self) -> None:
        """Undo what a run changed, and draw the same dropout again."""
        for buffer, first in zip(self._copy.model.buffers(), self._buffers, strict=True):
            buffer.copy_(first)
        torch.manual_seed(0)


class Training(Use):
    """A training step: three products of each layer, and the loss and gradients they lead to.

    Raises `NumericsError` for a model without a weight to be trained or a loss.
    """

    step = "an fp32 step"
    typical = GRAD_INPUT
    limits = "Neither its speed nor the convergence of a long training can be known from this."
    torchao = torchao_code

    def __init__(self, case: Case, steps: int, seeds: int):
        if TRAINING not in case.uses:
            raise NumericsError(f"{type(case.model).__name__} has no weight to be trained")
        remarks = []
        if case.loss_fn is None:
            loss = loss_of(Step(case, Recipe(TRAINING)).output())
            if loss is None:
                raise NumericsError("no gradient leads from its output to a weight: give a loss")
            remarks.append(OWN_LOSS.said(loss=loss))
            case = replace(case, loss_fn=eval(f"lambda output: {loss}"))
        super().__init__(case, Recipe(TRAINING))
        assert case.loss_fn is not None
        self.remarks = remarks
        self._loss_fn = case.loss_fn
        self._steps = steps
        self._seeds = seeds
        self._loss = 0.0
        self._gradients: list[Tensor] = []
        self._reports: list[tuple[TrainingReport, ProductOf]] = []

    def formats(self, form: Format | str) -> ProductFormats:
        """Gradients have a format of their own in some recipes."""
        return recipe(form)

    def misfit(self, layer: Layer, form: Format) -> str:
        """Each size of the weight is summed over in one of the products."""
        return layer.misfit(form.multiple, form.multiple)

    def misfit_of_rows(self, layer: Layer, form: Format, summed: Sequence[int]) -> str:
        """The gradient of a weight sums over the rows of the batch."""
        odd = [rows for rows in sorted(summed) if rows % form.multiple]
        if not odd or layer.kind != "linear":
            return ""
        return _PAD_ROWS.said(rows=odd[0], multiple=form.multiple)

    def seconds(self, card: Card, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of three products and of the casts."""
        return card.step_s(form, rows, inner, outer)

    def measure(self, product_of: ProductOf) -> None:
        """Take a step in fp32."""
        self._loss, self._gradients = self._run(product_of)

    def report(
        self, form: str, layers: int, left_out: int, product_of: ProductOf
    ) -> TrainingReport:
        """Take the same step, and compare its loss and gradients."""
        report = TrainingReport(form, layers, left_out)
        if layers:
            loss, gradients = self._run(product_of)
            report.loss_off = (loss - self._loss) / (abs(self._loss) or 1.0)
            report.gradients_off = distance(gradients, self._gradients)
        if form == "bf16" and report.gradients_off > 0.5:
            self.remarks.append(_TRAIN.said(off=report.gradients_off))
        self._reports.append((report, product_of))
        return report

    def _run(self, product_of: ProductOf) -> tuple[float, list[Tensor]]:
        """Loss and gradients."""
        self._begin()
        model = self._copy.model
        model.zero_grad()
        with torch.enable_grad(), Precision.FP32.autocast(self.case.device.type):
            with intercepted(model, product_of) as others:
                loss = self._loss_fn(self._copy.call_model())
            loss.backward()
        self.others |= others
        gradients = [p.grad for p in self._copy.trained if p.grad is not None]
        return float(loss.detach()), gradients

    def judge(self) -> None:
        """Train in each format, if steps are asked for, and compare with bf16."""
        if self._steps:
            self._train_in_each()
        bf16 = self._reports[0][0]
        for report, _ in self._reports:
            report.judge(bf16)

    def _train_in_each(self) -> None:
        runs = []
        for report, product_of in self._reports:
            if report.layers:
                runs += [(report, product_of, seed) for seed in range(self._seeds)]
        for report, product_of, seed in tqdm(runs, unit="run", leave=False, disable=None):
            self._train(report, product_of, seed)

    def _train(self, report: TrainingReport, product_of: ProductOf, seed: int) -> None:
        precision = Precision.FP32
        if report.name == "bf16":  # autocast itself rounds
            precision = Precision.BF16
            product_of = _torch_product
        torch.manual_seed(seed)
        step = Step(self.case, Recipe(TRAINING, precision), lr=_LR)
        with torch.no_grad():  # so that seeds differ where nothing is drawn
            for p in step.trained:
                p.mul_(1 + _JITTER * torch.randn_like(p))
        with torch.enable_grad(), intercepted(step.model, product_of):
            losses = [float(step()) for _ in range(self._steps)]
        report.losses.append(losses[-1])
        report.learned = losses[0] - losses[-1]

    def result(self, name: str, **found: Any) -> TrainingRehearsal:
        """Loss, gradients and learning beside the layers."""
        title = f"{name}, rehearsed on {self.case.device}"
        reports = [report for report, _ in self._reports]
        return TrainingRehearsal(title=title, formats=reports, steps=self._steps, **found)


class Inference(Use):
    """A forward pass: one product of each layer, and the output it leads to."""

    step = "an fp32 forward pass"
    typical = FORWARD
    limits = "This cannot tell how fast a format is, or how accurate the model is on your data."
    torchao = torchao_inference

    def __init__(self, case: Case):
        super().__init__(case, Recipe(INFERENCE))
        self._output: list[Tensor] = []
        self._reports: list[InferenceReport] = []
        if case.loss_fn is not None:
            self.remarks.append("The loss is not used: for inference the output is compared.")

    def formats(self, form: Format | str) -> ProductFormats:
        """Of the forward product alone."""
        return inference_recipe(form)

    def misfit(self, layer: Layer, form: Format) -> str:
        """Blocks lie along the inner size alone, unless they are square; rows are free."""
        outer = min(form.multiple, max(_MULTIPLE, form.block[0]))
        return layer.misfit(form.multiple, outer)

    def seconds(self, card: Card, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of the product and of the input's cast."""
        return card.forward_s(form, rows, inner, outer)

    def measure(self, product_of: ProductOf) -> None:
        """Run the model in fp32; raises `NumericsError` if no number of its output is finite."""
        self._output = self._run(product_of)
        values = 0
        finite = 0
        for tensor in self._output:
            values += tensor.numel()
            finite += int(tensor.isfinite().sum())
        if not finite:
            name = type(self.case.model).__name__
            raise NumericsError(f"{name} returns no finite floating-point number to be compared")
        if finite < values:
            share = 1 - finite / values
            self.remarks.append(
                f"{share:.2g} of the output is not finite in fp32, and is not compared."
            )

    def report(
        self, form: str, layers: int, left_out: int, product_of: ProductOf
    ) -> InferenceReport:
        """Run the model, and compare its output."""
        report = InferenceReport(form, layers, left_out)
        self._reports.append(report)
        if layers:
            report.output_off = self._error(self._run(product_of))
        off = report.output_off
        if form == "bf16" and off is not None and off > OUTPUT_OFF:
            self.remarks.append(
                f"The output in bf16 is {off:.0%} off fp32's already: passing the check says "
                "little."
            )
        return report

    def _error(self, output: list[Tensor]) -> float | None:
        """The error relative to fp32's output, in Euclidean norms; None for other shapes.

        What is not finite in fp32 does not count.
        """
        if [x.shape for x in output] != [x.shape for x in self._output]:
            return None
        found = []
        exact = []
        for values, fp32_values in zip(output, self._output, strict=True):
            is_finite = fp32_values.isfinite()
            found.append(values[is_finite])
            exact.append(fp32_values[is_finite])
        return distance(found, exact)

    def _run(self, product_of: ProductOf) -> list[Tensor]:
        """The floating-point tensors of the output."""
        self._begin()
        fp32 = Precision.FP32.autocast(self.case.device.type)
        with torch.no_grad(), fp32, intercepted(self._copy.model, product_of) as others:
            output = self._copy.call_model()
        self.others |= others
        return [x.clone() for _, x in named_tensors(output) if x.is_floating_point()]

    def judge(self) -> None:
        """Compare each with fp32, and with bf16."""
        for report in self._reports:
            report.judge(self._reports[0])

    def result(self, name: str, **found: Any) -> InferenceRehearsal:
        """The output beside the layers."""
        title = f"{name}, rehearsed for inference on {self.case.device}"
        return InferenceRehearsal(title=title, formats=self._reports, **found)
