"""The errors of a layer's matmuls in each format, measured while the model runs in fp32."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_lab.formats.accumulation import noise_of_hopper_sums
from amp_lab.formats.interception import Layer
from amp_lab.formats.matmul import (
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    MatmulFormats,
    needed_backward_matmuls,
)
from amp_lab.formats.noise import peak_of, squares, to_decibels, usual_noise
from amp_lab.formats.rehearsal_result import LayerReport
from amp_lab.formats.scaling import Counts, Format
from amp_lab.formats.uses import Use

# A layer is left out where it is so much worse than normally distributed values in the same format.
_WORSE_DB = 6.0  # lower SQNR: twice the error
_MORE_FLUSHED = 0.25  # higher share of values that become 0
_OUTLIER = 20.0  # a largest magnitude of this many times the root mean square explains the noise
_OPERANDS = {
    FORWARD: ("input", "weight"),
    GRAD_INPUT: ("gradient", "weight"),
    GRAD_WEIGHT: ("gradient", "input"),
}
"""The operands ``(left, right)`` of each matmul, as the reports name them."""


def _sums() -> defaultdict[Any, float]:
    """A dict whose values start at 0, to add to."""
    return defaultdict(float)


@dataclass
class LayerErrors:
    """The errors of a layer's matmuls in one step, in each format; several calls add up.

    Formats and matmuls are keys by name: "mxfp8", "grad_weight" (see `MATMULS`).
    """

    use: Use
    layer: Layer
    forms: list[Format]
    rows: int = 0  # of the layer's input
    wgrad_rows: set[int] = field(default_factory=set)  # numbers of rows that wgrad summed over
    signal: dict[str, float] = field(default_factory=_sums)  # sum of squares, by matmul
    noise: dict[tuple[str, str], float] = field(default_factory=_sums)  # by format and matmul
    loss_change: dict[str, float] = field(default_factory=_sums)  # by format
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)  # by format and operand
    peaks: dict[str, float] = field(default_factory=dict)  # by operand, see `peak_of`
    hopper_sums: tuple[float, float] = (0.0, 0.0)  # signal and noise of sums of FP8 products

    def add_matmul(self, which: str, left: Tensor, right: Tensor, exact: Tensor) -> None:
        """Repeat one of the layer's matmuls in each format, and add its errors.

        `which` is one of `MATMULS`, and `exact` is ``left @ right.T`` in fp32.
        """
        self.signal[which] += squares(exact)
        if which == FORWARD and any(form.matmul == "fp8" for form in self.forms):
            earlier_signal, earlier_noise = self.hopper_sums
            signal, noise = noise_of_hopper_sums(left, right)
            self.hopper_sums = (earlier_signal + signal, earlier_noise + noise)
        if which == GRAD_WEIGHT:
            self.wgrad_rows.add(left.shape[1])
        for operand, values in zip(_OPERANDS[which], (left, right), strict=True):
            self.peaks[operand] = max(self.peaks.get(operand, 0.0), peak_of(values))
        for form in self.forms:
            # The counts of both operands in this format, to which the matmul adds its own.
            counts_of_form = self.counts.setdefault(form.name, {})
            counts = [counts_of_form.setdefault(operand, Counts()) for operand in _OPERANDS[which]]
            rounded = self.use.formats(form).matmul(which, left, right, counts)
            self.noise[form.name, which] += squares(rounded - exact)

    def add_loss_change(self, values: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Add the change of the loss by the output's error, to first order: grad · error.

        `grad` is the gradient of ``values @ weight.T``.
        """
        grad = grad.flatten()
        output = values @ weight.T
        exact = torch.linalg.vecdot(output.flatten(), grad)
        for form in self.forms:
            output = self.use.formats(form).matmul(FORWARD, values, weight)
            rounded = torch.linalg.vecdot(output.flatten(), grad)
            self.loss_change[form.name] += float(rounded - exact)

    def report(self, form: Format) -> LayerReport:
        """Return the report in a format, with only a reason if the format does not fit."""
        report = LayerReport(self.layer, self.rows, form.name)
        report.left_out = self.use.misfit(self.layer, form)
        if not report.left_out:
            report.left_out = self.use.misfit_of_rows(self.layer, form, sorted(self.wgrad_rows))
        if report.left_out:
            return report
        for which, signal in self.signal.items():
            report.decibels[which] = to_decibels(signal, self.noise[form.name, which])
        if form.matmul == "fp8":
            report.hopper_sums = to_decibels(*self.hopper_sums)
        report.loss_change = self.loss_change.get(form.name)
        for operand, counts in self.counts[form.name].items():
            report.shares[operand] = counts.shares()
        if form.name != "bf16":
            report.left_out = self._noise_reason(report, self.use.formats(form))
        return report

    def _noise_reason(self, report: LayerReport, formats: MatmulFormats) -> str:
        """The reason why a layer is much worse than normally distributed values; empty if not.

        `report` has the layer's errors and shares in a format, `formats` those of its operands.
        """
        for operand, shares in report.shares.items():
            if shares["nonfinite"]:
                return f"a share of {shares['nonfinite']:.2g} of its {operand} is not finite"
        usual_decibels, usual_flushed = usual_noise(formats, self.use.reference_matmul)
        flushed_shares = [(shares["flushed"], name) for name, shares in report.shares.items()]
        flushed, operand = max(flushed_shares)
        if flushed > usual_flushed + _MORE_FLUSHED:
            return f"{flushed:.0%} of its {operand} become 0"
        which, decibels = report.worst
        if decibels >= usual_decibels - _WORSE_DB:
            return ""
        noise = f"{which}: {decibels:.0f} dB instead of the usual {usual_decibels:.0f} dB"
        # Either an outlier makes the other values of its block inaccurate, or large terms cancel.
        operand, peak = max(self.peaks.items(), key=lambda item: item[1])
        if peak > _OUTLIER:
            size = f"{peak:.0f} times the root mean square"
            return f"{noise}, because of an outlier in its {operand} ({size})"
        return f"{noise}, because large terms cancel in its sums"


class MeasuredMatmul(torch.autograd.Function):
    """``values @ weight.T`` in fp32, which repeats its three matmuls in the formats.

    Its result and its gradients are fp32's; the errors are added to `errors`.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, errors: LayerErrors) -> Tensor:
        """``values @ weight.T``, (rows, in) and (out, in); adds its errors to `errors`."""
        ctx.save_for_backward(values, weight)
        ctx.errors = errors
        out = values @ weight.T
        errors.rows += len(values)
        errors.add_matmul(FORWARD, values, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `values` and `weight`, from the gradient (rows, out)."""
        gradients: list[Tensor | None] = [None, None]
        for index, which, left, right in needed_backward_matmuls(ctx, *grads):
            exact = left @ right.T
            ctx.errors.add_matmul(which, left, right, exact)
            gradients[index] = exact
        ctx.errors.add_loss_change(*ctx.saved_tensors, *grads)
        return *gradients, None  # None for `errors`, the third argument of `forward`
