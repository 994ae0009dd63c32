"""The result of `rehearse`: a table of layers and formats, with verdicts and torchao's code."""

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_lab.core.report import Printed, Table, listed
from amp_lab.formats.interception import Layer

# Errors that a format may have, relative to fp32's value.
_GRADIENTS_OFF = 0.5  # of all gradients together, in the Euclidean norm
_LOSS_OFF = 0.1  # noise 10 dB below an output adds this share to the output's mean square
OUTPUT_OFF = 0.3
"""The largest error of the output in inference that passes: noise about 10 dB below the output."""
_TIMES_BF16 = 1.5  # a larger error passes too if it is at most this many times the error of bf16
# The last loss may differ from bf16's by this share of the fall of bf16's loss, even if the losses
# of several seeds differ less.
_LEARNED_OFF = 0.05


@dataclass
class LayerReport:
    """The errors of a layer in a format."""

    layer: Layer
    rows: int  # rows of its input, in all calls together
    format: str
    decibels: dict[str, float] = field(default_factory=dict)
    """Signal to quantisation noise ratio (SQNR) of each matmul of the layer; three in training."""
    loss_change: float | None = None
    """The first-order change of the loss in training, caused by the error of the layer's output."""
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """By operand (``input``, ``weight``, ``gradient``), the shares of values that are ``clipped``,
    ``flushed`` to zero, ``subnormal`` and ``nonfinite``."""
    hopper_sums: float | None = None
    """SQNR in dB of the forward matmul's sums on an H100 with `use_fast_accum`, for FP8."""
    left_out: str = ""
    """The reason to leave the layer in bf16; empty if you can convert the layer."""

    @property
    def worst(self) -> tuple[str, float]:
        """The matmul with the most noise, such as ``forward``, and its SQNR in dB."""
        return min(self.decibels.items(), key=lambda item: item[1])


@dataclass
class FormatReport:
    """The whole model in a format, with some layers left in bf16."""

    name: str  # of the format
    layers: int  # how many layers are converted
    left_out: int  # how many layers are left in bf16
    gain: float | None = None  # forecast of the speed-up over bf16 of the converted layers
    verdict: str = ""

    @property
    def passes(self) -> bool:
        """Whether the verdict is that the format is accurate enough."""
        return self.verdict.startswith(("accurate enough", "passes"))


@dataclass
class TrainingReport(FormatReport):
    """A training step of the whole model in a format, and its losses after several steps."""

    loss_off: float = 0.0  # difference of the loss, relative to fp32's
    gradients_off: float = 0.0  # norm of the gradients' error, relative to the norm of fp32's
    losses: list[float] = field(default_factory=list)  # the last loss with each seed
    learned: float = 0.0  # the fall of the loss, with the last seed

    def judge(self, bf16: "TrainingReport") -> None:
        """Set the verdict: ``accurate enough``, ``… in one step``, or why the format fails."""
        self.verdict = self._find_verdict(bf16)

    def _find_verdict(self, bf16: "TrainingReport") -> str:
        """The verdict, where an error may be larger if bf16's is large too."""
        if not self.layers:
            return "no layer can be converted"
        if not math.isfinite(self.loss_off):
            return "its loss is not finite"
        # "not <=" instead of ">", so that gradients with NaN fail.
        if not self.gradients_off <= _allowed(_GRADIENTS_OFF, bf16.gradients_off):
            return f"its gradients are off by {self.gradients_off:.0%}"
        if self.losses:
            if self._learns_as(bf16):
                return "accurate enough"
            return "its last loss differs from that of bf16"
        if abs(self.loss_off) <= _allowed(_LOSS_OFF, bf16.loss_off):
            return "accurate enough in one step"
        return f"its loss is off by {self.loss_off:+.0%}"

    def _learns_as(self, bf16: "TrainingReport") -> bool:
        """Whether the mean last loss differs from bf16's by at most two standard deviations.

        Small differences, relative to the fall of bf16's loss, always pass.
        """
        difference = statistics.mean(self.losses) - statistics.mean(bf16.losses)
        spread = max(_spread(self.losses), _spread(bf16.losses))
        return abs(difference) <= max(2 * spread, _LEARNED_OFF * abs(bf16.learned))


def _allowed(error: float, of_bf16: float | None) -> float:
    """The largest error that passes: `error`, or more if bf16 itself is far off."""
    if of_bf16 is None:
        return error
    return max(error, _TIMES_BF16 * abs(of_bf16))


def _spread(losses: list[float]) -> float:
    """The standard deviation over seeds; 0 for a single seed."""
    if len(losses) < 2:
        return 0.0
    return statistics.stdev(losses)


@dataclass
class InferenceReport(FormatReport):
    """The output of the whole model in a format."""

    output_off: float | None = 0.0
    """Norm of the output's error, relative to the fp32 output's norm; None if shapes differ."""

    def judge(self, bf16: "InferenceReport") -> None:
        """Set the verdict: ``passes the check``, or the reason why it fails."""
        self.verdict = self._find_verdict(bf16)

    def _find_verdict(self, bf16: "InferenceReport") -> str:
        """The verdict, where the error may be larger if bf16's is large too."""
        if not self.layers:
            return "no layer can be converted"
        if self.output_off is None:
            return "its output and the fp32 output have different shapes"
        if not math.isfinite(self.output_off):
            return "its output is not finite"
        if self.output_off > _allowed(OUTPUT_OFF, bf16.output_off):
            return f"its output is off by {self.output_off:.0%}"
        return "passes the check"


@dataclass(frozen=True, repr=False)
class Rehearsal(Printed):
    """The errors of a model in formats below 16 bits; `str` of it is the table."""

    title: str
    layers: list[LayerReport]  # by layer in the order of a step, then by format
    formats: Sequence[FormatReport]  # bf16 first
    recommended: str | None  # the format that `program` converts to, if one passes
    program: str  # Python code that converts the model with torchao; may be empty
    gpu: str | None  # the GPU that gains are forecast for
    watch: list[str]  # sentences for the reader: limits of the result, and advice

    def of(self, layer: str, form: str) -> LayerReport:
        """The report of a layer in a format, by their names; raises `KeyError` if none is."""
        reports = {(report.layer.name, report.format): report for report in self.layers}
        return reports[layer, form]

    def _model_rows(self) -> dict[str, list[str]]:
        """The rows of the table for the whole model: by heading, a cell for each format."""
        raise NotImplementedError

    def _facts(self) -> tuple[str, list[str]]:
        """The sentence that explains the numbers of layers, and those about the checks."""
        raise NotImplementedError

    def _table(self) -> Table:
        """A row for each layer and a column for each format; the whole model is at the foot."""
        names = [report.name for report in self.formats]
        by_layer: dict[Layer, list[LayerReport]] = {}
        for report in self.layers:
            by_layer.setdefault(report.layer, []).append(report)
        rows = [_row(layer, reports) for layer, reports in by_layer.items()]
        foot = self._model_rows()
        if self.gpu:
            foot[f"forecast for {self.gpu}"] = [_gain_text(report) for report in self.formats]
        foot["layers"] = [f"{r.layers} of {r.layers + r.left_out}" for r in self.formats]
        numbers, checks = self._facts()
        verdicts = [f"{report.name}: {report.verdict}." for report in self.formats[1:]]  # not bf16
        return Table(
            ["layer", "size (in x out)", *names],
            rows,
            caption=self.title,
            facts=[numbers, *verdicts, *checks],
            advice=[*self._reasons(), *self.watch],
            foot=[[name, "", *cells] for name, cells in foot.items()],
            right=range(2, 2 + len(names)),
        )

    def _reasons(self) -> list[str]:
        """Sentences on layers left out: ``head: the head usually stays in bf16 (mxfp8).``

        Layers that share the reason and the formats share a sentence.
        """
        # By layer and reason, the formats as an ordered set.
        formats: dict[tuple[str, str], dict[str, None]] = {}
        for report in self.layers:
            if report.left_out:
                layer_and_reason = (report.layer.name, report.left_out)
                formats.setdefault(layer_and_reason, {})[report.format] = None
        # By formats and reason, the names of the layers.
        layers: dict[tuple[str, str], list[str]] = {}
        for (layer, reason), names in formats.items():
            formats_and_reason = (", ".join(names), reason)
            layers.setdefault(formats_and_reason, []).append(layer)
        reasons = []
        for (forms, reason), names in layers.items():
            reasons.append(f"{listed(names, 3)}: {reason} ({forms}).")
        return reasons

    def _contents(self) -> dict[str, Any]:
        """All fields for JSON, with each layer as a dict."""
        layers = [vars(r) | {"layer": vars(r.layer)} for r in self.layers]
        return vars(self) | {"layers": layers}

    def text(self, width: int | None = None) -> str:
        """The table and the program, wrapped to `width` characters, if given."""
        return super().text(width) + self._with_program("\n\n{}\n\n{}").rstrip()

    def to_markdown(self) -> str:
        """The table and the program, in Markdown."""
        return super().to_markdown() + self._with_program("\n\n{}\n\n```python\n{}```")

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self._with_program("<p>{}</p><pre>{}</pre>", html.escape)

    def _with_program(self, template: str, escape: Any = str) -> str:
        """A template with its two ``{}`` filled by a heading and the program; ``""`` without one.

        `escape` is applied to the program's text, such as `html.escape`.
        """
        if not self.program:
            return ""
        heading = f"The torchao code for {self.recommended}:"
        return template.format(heading, escape(self.program))


@dataclass(frozen=True, repr=False)
class TrainingRehearsal(Rehearsal):
    """The errors of a training step below 16 bits."""

    formats: Sequence[TrainingReport]
    steps: int = 0

    def _model_rows(self) -> dict[str, list[str]]:
        """Rows of the errors of gradients and loss, and of the last loss if it was trained."""
        rows = {
            "error of the gradients": [_gradients_text(r) for r in self.formats],
            "error of the loss": [_loss_error_text(r) for r in self.formats],
        }
        if self.steps:
            rows[f"loss in step {self.steps}"] = [_loss_text(r) for r in self.formats]
        return rows

    def _facts(self) -> tuple[str, list[str]]:
        """Explain the numbers, and the check of one step unless the model was trained."""
        numbers = (
            "Each number is the SQNR in dB (signal-to-quantisation-noise ratio) of the worst "
            "of the layer's matmuls in a training step. A higher SQNR means a smaller error. Leave "
            "layers with * in bf16."
        )
        if self.steps:
            return numbers, []
        bf16 = self.formats[0]
        gradients = _allowed(_GRADIENTS_OFF, bf16.gradients_off)
        loss = _allowed(_LOSS_OFF, bf16.loss_off)
        checks = (
            f"A format passes if the gradients differ from fp32 by at most {gradients:.0%} and the "
            f"loss by at most {loss:.0%}."
        )
        return numbers, [checks, "Learning was not tested. Use more steps to test learning."]


@dataclass(frozen=True, repr=False)
class InferenceRehearsal(Rehearsal):
    """The errors of a forward pass below 16 bits."""

    formats: Sequence[InferenceReport]

    def _model_rows(self) -> dict[str, list[str]]:
        return {"error of the output": [_error_text(r) for r in self.formats]}

    def _facts(self) -> tuple[str, list[str]]:
        """Explain the numbers, and the check of the output."""
        numbers = (
            "Each number is the SQNR in dB (signal-to-quantisation-noise ratio) of the "
            "layer's forward matmul. A higher SQNR means a smaller error. Leave layers with * in "
            "bf16."
        )
        output = _allowed(OUTPUT_OFF, self.formats[0].output_off)
        checks = (
            f"A format passes the check if the output differs from fp32 by at most {output:.0%} on "
            "these inputs (Euclidean norms)."
        )
        return numbers, [checks]


def _gain_text(report: FormatReport) -> str:
    """The forecast of the speed-up, such as ``1.62x``; ``-`` without one."""
    if report.gain is None:
        return "-"
    return f"{report.gain:.2f}x"


def _gradients_text(report: TrainingReport) -> str:
    """The error of the gradients in percent; ``-`` if no layer can be converted."""
    if not report.layers:
        return "-"
    return f"{100 * report.gradients_off:.2g} %"


def _loss_error_text(report: TrainingReport) -> str:
    """The error of the first loss in percent; ``-`` if no layer can be converted."""
    if not report.layers:
        return "-"
    return f"{100 * report.loss_off:+.2g} %"


def _loss_text(report: TrainingReport) -> str:
    """The last loss, the mean over seeds; ``-`` if the model was not trained."""
    if not report.losses:
        return "-"
    return f"{statistics.mean(report.losses):.4g}"


def _error_text(report: InferenceReport) -> str:
    """The error of the output in percent; ``-`` if there is none to compare."""
    if not report.layers or report.output_off is None:
        return "-"
    return f"{100 * report.output_off:.2g} %"


def _row(layer: Layer, reports: list[LayerReport]) -> list[str]:
    """The cells of a layer: its name, its sizes, and a cell for each format."""
    return [layer.name, f"{layer.inner} x {layer.outer}", *map(_worst_text, reports)]


def _worst_text(report: LayerReport) -> str:
    """The SQNR of the worst matmul; with a star if the layer is better left in bf16."""
    text = "-"
    if report.decibels:
        _, decibels = report.worst
        text = f"{decibels:.1f}"
    if report.left_out:
        text += "*"
    return text
