"""What `rehearse` returns: a table by layer and format, and the lines that follow from it."""

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_lab.core.report import Printed, Table, listed
from amp_lab.formats.interception import Layer

_GRADIENTS_OFF = 0.5  # of the gradients, in their norm
_LOSS_OFF = 0.1  # of the loss: noise 10 dB below an output adds so much to its mean square
OUTPUT_OFF = 0.3
"""What a format may add to the output in inference: noise that is about 10 dB below it."""
_TIMES_BF16 = 1.5  # what bf16 is off, so many times, is always allowed
_LEARNED_OFF = 0.05  # of what bf16 learns may a loss be away from its own, whatever seeds say


@dataclass
class LayerReport:
    """A layer in a format; `left_out` says why it had better stay in bf16, if it had."""

    layer: Layer
    rows: int  # that were multiplied, in all calls
    format: str
    decibels: dict[str, float] = field(default_factory=dict)
    """Signal to quantisation noise (SQNR) of each product, three for training."""
    loss_change: float | None = None
    """What the error of its output adds to the loss in training, to first order."""
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of ``input``, ``weight`` and ``gradient``: clipped, flushed to zero, subnormal, nonfinite."""
    left_out: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """The product with the most noise, and its SQNR in dB."""
        return min(self.decibels.items(), key=lambda item: item[1])


@dataclass
class FormatReport:
    """The whole model in a format, but for the layers that are left out."""

    name: str
    layers: int
    left_out: int
    gain: float | None = None  # over bf16 of the layers that are converted: a forecast
    verdict: str = ""

    @property
    def passes(self) -> bool:
        """Whether the verdict speaks for the format."""
        return self.verdict.startswith(("holds", "passes"))


@dataclass
class TrainingReport(FormatReport):
    """A training step of the whole model in a format, and what it learns in several."""

    loss_off: float = 0.0  # relative to fp32's
    gradients_off: float = 0.0  # in their norm, relative to fp32's
    losses: list[float] = field(default_factory=list)  # the last of each seed
    learned: float = 0.0  # by so much the loss fell

    def judge(self, bf16: "TrainingReport") -> None:
        """Give the verdict: ``holds``, ``holds in one step``, or what speaks against it."""
        self.verdict = self._find_verdict(bf16)

    def _find_verdict(self, bf16: "TrainingReport") -> str:
        if not self.layers:
            return "no layer is left"
        if not math.isfinite(self.loss_off):
            return "its loss is not finite"
        if not self.gradients_off <= max(_GRADIENTS_OFF, _TIMES_BF16 * bf16.gradients_off):
            return f"its gradients are {self.gradients_off:.0%} off"
        if self.losses:
            return "holds" if self._learns_as(bf16) else "it does not learn as bf16 does"
        if abs(self.loss_off) <= max(_LOSS_OFF, _TIMES_BF16 * abs(bf16.loss_off)):
            return "holds in one step"
        return f"its loss is {self.loss_off:+.0%} off"

    def _learns_as(self, bf16: "TrainingReport") -> bool:
        """Whether the last losses are as near to bf16's as those of two seeds are."""
        difference = statistics.mean(self.losses) - statistics.mean(bf16.losses)
        spread = max(_spread(self.losses), _spread(bf16.losses))
        return abs(difference) <= max(2 * spread, _LEARNED_OFF * abs(bf16.learned))


def _spread(losses: list[float]) -> float:
    """The standard deviation over seeds; 0 for one alone."""
    if len(losses) < 2:
        return 0.0
    return statistics.stdev(losses)


@dataclass
class InferenceReport(FormatReport):
    """The output of the whole model in a format."""

    output_off: float | None = 0.0
    """The norm of its error, relative to the norm of fp32's output; None if shapes differ."""

    def judge(self, bf16: "InferenceReport") -> None:
        """Give the verdict: ``passes the check``, or what speaks against it."""
        self.verdict = self._find_verdict(bf16)

    def _find_verdict(self, bf16: "InferenceReport") -> str:
        if not self.layers:
            return "no layer is left"
        if self.output_off is None:
            return "its output has other shapes than fp32's"
        if not math.isfinite(self.output_off):
            return "its output is not finite"
        allowed = OUTPUT_OFF
        if bf16.output_off is not None:
            allowed = max(allowed, _TIMES_BF16 * bf16.output_off)
        if self.output_off > allowed:
            return f"its output is {self.output_off:.0%} off"
        return "passes the check"


@dataclass(frozen=True, repr=False)
class Rehearsal(Printed):
    """What becomes of a model below 16 bits; `str` of it is made to be read."""

    title: str
    layers: list[LayerReport]  # by layer in the order of a step, then by format
    formats: Sequence[FormatReport]  # bf16 first
    recommended: str | None  # a format
    program: str  # that converts the model with torchao
    card: str | None
    watch: list[str]

    def of(self, layer: str, form: str) -> LayerReport:
        """The report of a layer in a format, by their names; raises `KeyError`."""
        found = {(report.layer.name, report.format): report for report in self.layers}
        return found[layer, form]

    def _of_model(self) -> dict[str, list[str]]:
        """What was found of the whole model: a cell for each format, by the name of the row."""
        raise NotImplementedError

    def _facts(self) -> tuple[str, list[str]]:
        """What the numbers of the layers are, and against what the formats were checked."""
        raise NotImplementedError

    def _table(self) -> Table:
        names = [report.name for report in self.formats]
        by_layer: dict[Layer, list[LayerReport]] = {}
        for report in self.layers:
            by_layer.setdefault(report.layer, []).append(report)
        rows = [_row(layer, reports) for layer, reports in by_layer.items()]
        foot = self._of_model()
        if self.card:
            foot[f"forecast for {self.card}"] = [_gain(report) for report in self.formats]
        foot["layers"] = [f"{r.layers} of {r.layers + r.left_out}" for r in self.formats]
        numbers, checks = self._facts()
        verdicts = [f"{report.name}: {report.verdict}." for report in self.formats[1:]]
        return Table(
            ["layer", "inner x outer", *names],
            rows,
            caption=self.title,
            facts=[numbers, *verdicts, *checks],
            advice=[*self._reasons(), *self.watch],
            foot=[[name, "", *cells] for name, cells in foot.items()],
            right=range(2, 2 + len(names)),
        )

    def _reasons(self) -> list[str]:
        """Why layers are left out, one line for all that share it."""
        formats: dict[tuple[str, str], dict[str, None]] = {}  # a set in order, by layer and reason
        for report in self.layers:
            if report.left_out:
                layer_and_reason = (report.layer.name, report.left_out)
                formats.setdefault(layer_and_reason, {})[report.format] = None
        by_reason: dict[tuple[str, str], list[str]] = {}
        for (layer, reason), forms in formats.items():
            by_reason.setdefault((", ".join(forms), reason), []).append(layer)
        reasons = []
        for (forms, reason), layers in by_reason.items():
            reasons.append(f"{listed(layers, 3)}: {reason} ({forms}).")
        return reasons

    def _contents(self) -> dict[str, Any]:
        layers = [vars(r) | {"layer": vars(r.layer)} for r in self.layers]
        return vars(self) | {"layers": layers}

    def text(self, width: int | None = None) -> str:
        """The table and the lines, for a terminal so many characters wide."""
        return super().text(width) + self._with_program("\n\n{}\n\n{}").rstrip()

    def to_markdown(self) -> str:
        """The table and the lines, in Markdown."""
        return super().to_markdown() + self._with_program("\n\n{}\n\n```python\n{}```")

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self._with_program("<p>{}</p><pre>{}</pre>", html.escape)

    def _with_program(self, form: str, escape: Any = str) -> str:
        if not self.program:
            return ""
        return form.format(f"The lines for {self.recommended}, of torchao:", escape(self.program))


@dataclass(frozen=True, repr=False)
class TrainingRehearsal(Rehearsal):
    """What becomes of a training step below 16 bits."""

    formats: Sequence[TrainingReport]
    steps: int = 0

    def _of_model(self) -> dict[str, list[str]]:
        found = {
            "gradients of the model": [f"{100 * r.gradients_off:.2g} %" for r in self.formats],
            "loss of the model": [f"{100 * r.loss_off:+.2g} %" for r in self.formats],
        }
        if self.steps:
            found[f"loss after {self.steps} steps"] = [_last_loss(r) for r in self.formats]
        return found

    def _facts(self) -> tuple[str, list[str]]:
        numbers = (
            "SQNR in dB of the worst of three products; with * a layer is better left in bf16."
        )
        if self.steps:
            return numbers, []
        limits = f"gradients within {_GRADIENTS_OFF:.0%} and loss within {_LOSS_OFF:.0%} of fp32's"
        checks = f"Looked at in one step: {limits}, or {_TIMES_BF16} times as far off as bf16."
        return numbers, [checks, "Learning was not tried: that takes steps."]


@dataclass(frozen=True, repr=False)
class InferenceRehearsal(Rehearsal):
    """What becomes of a forward pass below 16 bits."""

    formats: Sequence[InferenceReport]

    def _of_model(self) -> dict[str, list[str]]:
        return {"error of the output": [_error(r) for r in self.formats]}

    def _facts(self) -> tuple[str, list[str]]:
        numbers = "SQNR in dB of the forward matmul; with * a layer is better left in bf16."
        limit = f"at most {OUTPUT_OFF:.0%} of fp32's output, or {_TIMES_BF16} times bf16's error"
        checks = f"The check, on these inputs: an output error of {limit} (Euclidean norms)."
        return numbers, [checks]


def _gain(report: FormatReport) -> str:
    if report.gain is None:
        return "-"
    return f"{report.gain:.2f}x"


def _last_loss(report: TrainingReport) -> str:
    """The mean of all seeds."""
    if not report.losses:
        return "-"
    return f"{statistics.mean(report.losses):.4g}"


def _error(report: InferenceReport) -> str:
    if not report.layers or report.output_off is None:
        return "-"
    return f"{100 * report.output_off:.2g} %"


def _row(layer: Layer, reports: list[LayerReport]) -> list[str]:
    return [layer.name, f"{layer.inner} x {layer.outer}", *map(_worst, reports)]


def _worst(report: LayerReport) -> str:
    """The most noise, with a star if the layer is better left in bf16."""
    text = "-"
    if report.decibels:
        _, decibels = report.worst
        text = f"{decibels:.1f}"
    if report.left_out:
        text += "*"
    return text
