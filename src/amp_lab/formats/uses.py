"""The two uses of a model that `rehearse` runs: a training step and a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from amp_lab.core.errors import NumericsError
from amp_lab.core.gpus import Gpu
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.formats import roofline, torchao_code, torchao_inference
from amp_lab.formats.interception import Layer, Matmul, intercepted
from amp_lab.formats.matmul import (
    FORWARD,
    GRAD_INPUT,
    MatmulFormats,
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
from amp_lab.formats.scaling import FORMATS, Format
from amp_lab.model_call import ModelCall
from amp_lab.recipes import (
    INFERENCE,
    OWN_LOSS,
    TRAINING,
    Recipe,
    Step,
    distance,
    floats,
    loss_of,
    uses_of,
)

MatmulChoice = Callable[[Layer], Matmul | None]
"""A function that returns the matmul of a layer, or None to let torch compute it."""

_PAD_ROWS = remedy(
    "rehearse.pad_rows",
    "the number of rows does not fit the kernels of a format",
    "its weight gradient sums over {rows} rows (batch x tokens): pad them to a multiple of "
    "{multiple}",
    failure="AMP0044",
)
_TRAIN = remedy(
    "rehearse.train",
    "the gradients in bf16 already differ much from the gradients in fp32",
    "The bf16 gradients differ by {off:.0%} from the fp32 gradients, so one step cannot judge a "
    "format. Train instead: steps=20 (--steps 20).",
)
_LR = 1e-3
_MULTIPLE = 16  # kernels of FP8 and of four bits need multiples of this in a weight's sizes


def _leave_to_torch(layer: Layer) -> Matmul | None:
    """A `MatmulChoice` that leaves every matmul to torch."""
    return None


class Use(ABC):
    """Runs a copy of a model with other matmuls, for training or for inference.

    Call `measure` first, then `report` for each format, bf16 before the others, then `judge` and
    `result`. `remarks` are sentences for the reader. `unreplaced` has the weights, by op, with
    matmuls that cannot be replaced, see `intercepted`.
    """

    step: ClassVar[str]  # names the run in an error, such as "an fp32 step"
    reference_matmul: ClassVar[str]  # one of `MATMULS`: a layer's noise is compared with its noise
    limits: ClassVar[str]  # a sentence on what the result does not tell
    torchao: ClassVar[ModuleType]  # `torchao_code` or `torchao_inference`, the code that converts

    def __init__(self, call: ModelCall, recipe: Recipe):
        self.call = call
        self.remarks: list[str] = []
        self.unreplaced: dict[str, dict[str, None]] = {}
        self._copy = Step(call, recipe)
        self._buffers = [buffer.clone() for buffer in self._copy.model.buffers()]

    @abstractmethod
    def formats(self, form: Format | str) -> MatmulFormats:
        """The formats of all operands when torchao uses a format."""

    @abstractmethod
    def misfit(self, layer: Layer, form: Format) -> str:
        """The reason why a format's kernels cannot multiply a layer's sizes; empty if they can."""

    def misfit_of_rows(self, layer: Layer, form: Format, wgrad_rows: Sequence[int]) -> str:
        """The reason why wgrad's kernels cannot sum over these numbers of rows; empty if they can.

        By default empty, for a use without wgrad.
        """
        return ""

    @abstractmethod
    def seconds(self, gpu: Gpu, form: Format, rows: int, inner: int, outer: int) -> float:
        """Forecast of the seconds that a layer takes on a GPU, for an input of `rows` rows."""

    def gain(self, gpu: Gpu, form: Format, sizes: Sequence[tuple[int, int, int]]) -> float:
        """Forecast of the total speed-up over bf16 for layers of ``(rows, inner, outer)``."""
        bf16_s = sum(self.seconds(gpu, FORMATS["bf16"], *size) for size in sizes)
        form_s = sum(self.seconds(gpu, form, *size) for size in sizes)
        return bf16_s / form_s

    @abstractmethod
    def measure(self, choose_matmul: MatmulChoice) -> None:
        """Run the model in fp32, and store the results, because `report` compares with them.

        `choose_matmul` returns a function for the fp32 matmul of a layer. The function also
        measures the rounding errors of the layer.
        """

    @abstractmethod
    def report(
        self, form: str, layers: int, left_out: int, choose_matmul: MatmulChoice
    ) -> FormatReport:
        """Run the model with the matmuls of a format, unless `layers` is 0; compare with fp32.

        `layers` and `left_out` count the layers that are converted and those that stay in bf16.
        """

    @abstractmethod
    def judge(self) -> None:
        """Set the verdict of each report."""

    @abstractmethod
    def result(self, name: str, **fields: Any) -> Rehearsal:
        """The result for a model with this name; `fields` are the other fields of `Rehearsal`."""

    def _reset(self) -> None:
        """Restore the buffers that a run may change, and seed torch, so that runs draw the same."""
        for buffer, original in zip(self._copy.model.buffers(), self._buffers, strict=True):
            buffer.copy_(original)
        torch.manual_seed(0)


class Training(Use):
    """A training step: three matmuls of each layer, and the loss and gradients of the model.

    Raises `NumericsError` for a model without a trainable weight or without a loss.
    """

    step = "an fp32 step"
    reference_matmul = GRAD_INPUT
    limits = "This report does not show the speed, or whether a long training converges."
    torchao = torchao_code

    def __init__(self, call: ModelCall, steps: int, seeds: int):
        if TRAINING not in uses_of(call.model):
            raise NumericsError(f"{type(call.model).__name__} has no trainable weight")
        remarks = []
        if call.loss_fn is None:
            loss = loss_of(Step(call, Recipe(TRAINING)).output())
            if loss is None:
                raise NumericsError("the output has no gradient for any weight: give a loss")
            remarks.append(OWN_LOSS.sentence(loss=loss))
            call = replace(call, loss_fn=loss)
        super().__init__(call, Recipe(TRAINING))
        self.remarks = remarks
        self._steps = steps
        self._seeds = seeds
        self._loss = 0.0
        self._gradients: list[Tensor] = []
        self._reports: list[tuple[TrainingReport, MatmulChoice]] = []  # bf16 first

    def formats(self, form: Format | str) -> MatmulFormats:
        """The formats of torchao's training recipe; some round gradients to another format."""
        return recipe(form)

    def misfit(self, layer: Layer, form: Format) -> str:
        """The reason why a size of the weight does not fit; empty if both fit.

        Both have to, since a matmul of the step sums over each of them.
        """
        return layer.misfit(form.multiple, form.multiple)

    def misfit_of_rows(self, layer: Layer, form: Format, wgrad_rows: Sequence[int]) -> str:
        """How to pad the batch of a linear layer whose rows do not fit; empty if they fit.

        They have to, since wgrad sums over the rows.
        """
        misfits = [rows for rows in sorted(wgrad_rows) if rows % form.multiple]
        if not misfits or layer.kind != "linear":
            return ""
        return _PAD_ROWS.sentence(rows=misfits[0], multiple=form.multiple)

    def seconds(self, gpu: Gpu, form: Format, rows: int, inner: int, outer: int) -> float:
        """Forecast of the three matmuls and the casts."""
        return roofline.step_s(gpu, form, rows, inner, outer)

    def measure(self, choose_matmul: MatmulChoice) -> None:
        """Run a step in fp32, and store the loss and the gradients."""
        self._loss, self._gradients = self._run(choose_matmul)

    def report(
        self, form: str, layers: int, left_out: int, choose_matmul: MatmulChoice
    ) -> TrainingReport:
        """Run the same step in a format, unless `layers` is 0, and compare it with fp32."""
        report = TrainingReport(form, layers, left_out)
        if layers:
            loss, gradients = self._run(choose_matmul)
            report.loss_off = (loss - self._loss) / (abs(self._loss) or 1.0)  # no division by 0
            report.gradients_off = distance(gradients, self._gradients)
        # If even bf16 is 50 % off, the step is too sensitive to judge the other formats by.
        if form == "bf16" and report.gradients_off > 0.5 and not self._steps:
            self.remarks.append(_TRAIN.sentence(off=report.gradients_off))
        self._reports.append((report, choose_matmul))
        return report

    def _run(self, choose_matmul: MatmulChoice) -> tuple[float, list[Tensor]]:
        """Return the loss and the gradients of one step with these matmuls, without an update.

        Weights whose matmuls cannot be replaced are added to `unreplaced`.
        """
        self._reset()
        model = self._copy.model
        model.zero_grad()
        with torch.enable_grad(), Precision.FP32.autocast(self.call.device.type):
            with intercepted(model, choose_matmul) as unreplaced:
                loss = self._copy.call.result()
            loss.backward()
        self.unreplaced |= unreplaced
        gradients = [p.grad for p in self._copy.trained if p.grad is not None]
        return float(loss.detach()), gradients

    def judge(self) -> None:
        """Train in each format if there are steps, and set the verdicts by comparing with bf16."""
        if self._steps:
            self._train_in_all_formats()
        bf16, _ = self._reports[0]
        for report, _ in self._reports:
            report.judge(bf16)

    def _train_in_all_formats(self) -> None:
        """Train a copy of the model in each format with each seed, behind one progress bar."""
        runs = []
        for report, choose_matmul in self._reports:
            if report.layers:
                runs += [(report, choose_matmul, seed) for seed in range(self._seeds)]
        for report, choose_matmul, seed in tqdm(runs, unit="run", leave=False, disable=None):
            self._train(report, choose_matmul, seed)

    def _train(self, report: TrainingReport, choose_matmul: MatmulChoice, seed: int) -> None:
        """Train a copy of the model; add its last loss to the report, and set `report.learned`."""
        precision = Precision.FP32
        if report.name == "bf16":  # real autocast, which needs no other matmuls
            precision = Precision.BF16
            choose_matmul = _leave_to_torch
        torch.manual_seed(seed)
        step = Step(self.call, Recipe(TRAINING, precision), lr=_LR)
        step.add_noise()  # since not every model draws random numbers
        with torch.enable_grad(), intercepted(step.model, choose_matmul):
            losses = [float(step()) for _ in range(self._steps)]
        report.losses.append(losses[-1])
        report.learned = losses[0] - losses[-1]

    def result(self, name: str, **fields: Any) -> TrainingRehearsal:
        """The result, with the errors of loss and gradients, and the losses after the steps."""
        title = f"{name}, rehearsed on {self.call.device}"
        reports = [report for report, _ in self._reports]
        return TrainingRehearsal(title=title, formats=reports, steps=self._steps, **fields)


class Inference(Use):
    """A forward pass: one matmul of each layer, and the output of the model."""

    step = "an fp32 forward pass"
    reference_matmul = FORWARD
    limits = "This report does not show how fast a format is, or how accurate it is on your data."
    torchao = torchao_inference

    def __init__(self, call: ModelCall):
        super().__init__(call, Recipe(INFERENCE))
        self._output: list[Tensor] = []  # floating-point tensors of the output in fp32
        self._reports: list[InferenceReport] = []  # bf16 first
        if call.loss_fn is not None:
            self.remarks.append(
                "The loss is not used: for inference, rehearse compares the output."
            )

    def formats(self, form: Format | str) -> MatmulFormats:
        """The formats of torchao's forward matmul in inference."""
        return inference_recipe(form)

    def misfit(self, layer: Layer, form: Format) -> str:
        """The reason why a size of the weight does not fit; empty if both fit.

        The inner size has to be a multiple of `form.multiple`. The outer size has to be a multiple
        of 16, and, if a block has several rows, a multiple of the number of these rows. The number
        of input rows is not limited.
        """
        # The least of the two, since bf16 needs no multiple.
        outer_multiple = min(form.multiple, max(_MULTIPLE, form.block[0]))
        return layer.misfit(form.multiple, outer_multiple)

    def seconds(self, gpu: Gpu, form: Format, rows: int, inner: int, outer: int) -> float:
        """Forecast of the matmul and of the input's cast."""
        return roofline.forward_s(gpu, form, rows, inner, outer)

    def measure(self, choose_matmul: MatmulChoice) -> None:
        """Run the model in fp32, and store the output.

        Raises `NumericsError` if every number in the output is inf or NaN.
        """
        self._output = self._run(choose_matmul)
        total = 0
        finite = 0
        for tensor in self._output:
            total += tensor.numel()
            finite += int(tensor.isfinite().sum())
        if not finite:
            name = type(self.call.model).__name__
            raise NumericsError(f"{name} returns no finite floating-point number to compare")
        if finite < total:
            share = 1 - finite / total
            self.remarks.append(
                f"{share:.2g} of the output is not finite in fp32, so this part is not compared."
            )

    def report(
        self, form: str, layers: int, left_out: int, choose_matmul: MatmulChoice
    ) -> InferenceReport:
        """Run the model in a format, unless `layers` is 0, and compare the output with fp32."""
        report = InferenceReport(form, layers, left_out)
        self._reports.append(report)
        if layers:
            report.output_off = self._error(self._run(choose_matmul))
        off = report.output_off
        # A format may be 1.5 times as far off as bf16, which allows much if bf16 is far off.
        if form == "bf16" and off is not None and off > OUTPUT_OFF:
            self.remarks.append(
                f"In bf16, the output is already off by {off:.0%} from fp32, so a passed check "
                "says little."
            )
        return report

    def _error(self, output: list[Tensor]) -> float | None:
        """The norm of the output's error over the norm of fp32's output; None for other shapes.

        Only values that are finite in fp32 count.
        """
        if [x.shape for x in output] != [x.shape for x in self._output]:
            return None
        output_values = []
        fp32_output_values = []
        for values, fp32_values in zip(output, self._output, strict=True):
            is_finite = fp32_values.isfinite()
            output_values.append(values[is_finite])
            fp32_output_values.append(fp32_values[is_finite])
        return distance(output_values, fp32_output_values)

    def _run(self, choose_matmul: MatmulChoice) -> list[Tensor]:
        """Run with these matmuls; return the floating-point tensors of the output.

        Weights whose matmuls cannot be replaced are added to `unreplaced`.
        """
        self._reset()
        fp32 = Precision.FP32.autocast(self.call.device.type)
        with torch.no_grad(), fp32, intercepted(self._copy.model, choose_matmul) as unreplaced:
            output = self._copy.call.output()
        self.unreplaced |= unreplaced
        return [tensor.clone() for tensor in floats(output)]

    def judge(self) -> None:
        """Set the verdicts by comparing with bf16."""
        bf16 = self._reports[0]
        for report in self._reports:
            report.judge(bf16)

    def result(self, name: str, **fields: Any) -> InferenceRehearsal:
        """The result, with the error of the output in each format."""
        title = f"{name}, rehearsed for inference on {self.call.device}"
        return InferenceRehearsal(title=title, formats=self._reports, **fields)
