"""Gradients that fp16 would lose, and the loss scale that keeps them."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_lab.errors import NumericsError, first_line
from amp_lab.numerics.checks import checked_model, log2_of, power
from amp_lab.numerics.gradient_histogram import Buffers, GradientCount, Histogram, together
from amp_lab.report import Printed, Table, listed, percent

# What autocast runs in low precision, by the name of its backward node. The gradient of an op's
# output has the dtype of that output, so these are the nodes that fp16 gradients arrive at.
_LOW_PRECISION_NODES = (
    "Addbmm", "Addmm", "Addmv", "Addr", "Baddbmm", "Bmm", "Convolution", "CudnnConvolution",
    "CudnnRnn", "Dot", "Linear", "MiopenConvolution", "MiopenRnn", "MkldnnConvolution",
    "MkldnnLinear", "MkldnnRnnLayer", "Mm", "Mps", "Mv", "ScaledDotProduct", "SlowConv",
    "ThnnConv", "ThnnFused",
)  # fmt: skip
_RESHAPING = {"ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Alias"}


@dataclass(frozen=True, repr=False)
class UnderflowReport(Printed):
    """What `gradient_underflow` found."""

    rows: tuple[GradientCount, ...]
    """The outputs of layers, in the order of the forward pass, then the parameters."""
    outputs: GradientCount
    """All outputs of layers together."""
    parameters: GradientCount
    """All parameters together."""
    scales: tuple[float, ...]
    unused: tuple[str, ...]
    """Parameters that require a gradient and get none from this loss."""
    half: bool
    """Whether some of the gradients were fp16 already, so that what it flushed counts as zero."""

    @property
    def total(self) -> GradientCount:
        """Outputs and parameters together."""
        return together("", (self.outputs, self.parameters))

    @property
    def smallest_scale(self) -> float | None:
        """The smallest power of two at which 99.9 % of all non-zero values stay so in fp16."""
        return self.total.smallest_scale

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two at which no value becomes infinite in fp16."""
        return self.total.largest_scale

    def __str__(self) -> str:
        worst = sorted(self.rows, key=lambda row: row.lost(self.scales[0]), reverse=True)[:20]
        shown = [row for row in self.rows if any(row is other for other in worst)]
        return self._table(shown).text()

    def _table(self, rows: Sequence[GradientCount] | None = None) -> Table:
        rows = self.rows if rows is None else rows
        head, missing = self._header(), len(self.rows) - len(rows)
        return Table(
            head,
            [self._cells(row) for row in rows],
            foot=[self._cells(row) for row in (self.outputs, self.parameters)],
            facts=[
                *([f"… and {missing} that lose no more; see .rows."] if missing else []),
                *self._summary(),
            ],
            right=range(2, len(head)),
        )

    def plot(self):
        """The exponents of all gradient values against fp16's range, one panel for each scale."""
        from amp_lab import plots  # matplotlib only where a figure is drawn

        return plots.exponents_against_fp16(
            {"outputs": self.outputs.histogram, "parameters": self.parameters.histogram},
            self.scales,
        )

    def _header(self) -> list[str]:
        cells = ["layer", "gradient of", "values", "zero %"]
        for scale in self.scales:
            cells += [f"lost % at {power(scale)}", "subn. %"]
            cells += ["inf %"] if self.total.inf_in_fp16(scale) else []
        return [*cells, "keep at"]

    def _cells(self, row: GradientCount) -> list[str]:
        cells = [
            row.layer or "(model)",
            row.what,
            f"{row.values:,}",
            percent(row.zero, row.values),
        ]
        for scale in self.scales:
            counts = [row.zero_in_fp16(scale), row.subnormal_in_fp16(scale)]
            counts += [row.inf_in_fp16(scale)] if self.total.inf_in_fp16(scale) else []
            cells += [percent(count, row.nonzero) for count in counts]
        return [*cells, power(row.smallest_scale)]

    def _summary(self) -> list[str]:
        total = self.total
        smallest, largest = total.smallest_scale, total.largest_scale
        lines = [
            "zero %: of all values, those that are zero in any precision. Of the others, in fp16 "
            "at each loss scale:",
            "lost: zero; subn.: subnormal, with fewer bits; inf: overflow. keep at: the smallest "
            "scale that loses at most 0.1 %.",
        ]
        if smallest and largest:
            lines.append(
                f"A loss scale from {power(smallest)} to {power(largest)} keeps 99.9 % of all "
                "and overflows none."
                if smallest <= largest
                else f"No loss scale keeps 99.9 % and overflows none: {power(largest)}, the "
                f"largest that does not overflow, loses {100 * total.lost(largest):.2g} %. bf16 "
                "has the range for all."
            )
        if total.nonfinite:
            lines.append(f"{total.nonfinite:,} values are inf or NaN already: see find_nonfinite.")
        if self.half:
            lines.append(
                "Some gradients are fp16 already: what it flushed counts as zero here. Compute "
                "the loss in fp32 or bf16 to see it."
            )
        if self.unused:
            lines.append(f"No gradient from this loss: {listed(self.unused)}.")
        return lines


def gradient_underflow(
    model: nn.Module,
    loss: torch.Tensor,
    *,
    scales: Iterable[float] = (1.0, 2.0**8, 2.0**16),
) -> UnderflowReport:
    """Count, layer by layer, the gradient values that fp16 would lose at each loss scale.

    `loss` is a scalar that `model` was used to compute, without a loss scale, and in fp32 or bf16:
    fp16 has lost its values before they can be counted. One backward pass runs from it, with the
    graph kept, so that ``loss.backward()`` still works after it. No `.grad` is written.

    Two kinds of gradients are counted, because fp16 holds both under autocast: those of the
    parameters, and those that arrive at the outputs of matrix products, convolutions and recurrent
    layers on their way back, which are the most and the first to be lost. They are named after the
    module whose parameters the op uses or, for a product of activations as in attention, after
    that of the nearest parameters before it. Every value is counted, as it would be after
    ``(gradient * scale).to(torch.float16)``: magnitudes up to 2^-25 become zero, those below
    2^-14 - 2^-25 subnormal, and those from 65520 on infinite. Of a sparse gradient the stored
    values count, of a complex one real and imaginary parts.

    Scales are powers of two, as those of `torch.amp.GradScaler` are. The idea of the histogram is
    that of Micikevicius et al., "Mixed Precision Training", 2018, figure 3.

    Raises `NumericsError` if no parameter requires a gradient, a scale is no power of two from
    2^-64 to 2^64, or the loss is no scalar, does not lead to the model, or has no graph, one that
    was freed, or a compiled one.
    """
    scales = tuple(float(scale) for scale in scales)
    parameters = _checked(model, loss, scales)
    sites = _low_precision_sites(loss.grad_fn, parameters)
    rows = {key: Histogram(layer, what) for key, layer, what in sites.values()}
    counter = _Counter()
    handles = [
        node.register_prehook(functools.partial(counter.count, rows[key]))
        for node, (key, _, _) in sites.items()
    ]
    wanted = list(parameters)
    try:
        # The graph is kept for the caller, who has yet to call backward.
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise NumericsError(
            f"gradient_underflow: no backward pass from this loss ({reason}); call it before "
            "loss.backward(), with the loss of a model that is not compiled"
        ) from error
    finally:
        for handle in handles:  # also after an error: hooks would count on in the caller's backward
            handle.remove()
    by_name = dict(zip(parameters.values(), gradients, strict=True))
    used = {name: gradient for name, gradient in by_name.items() if gradient is not None}
    if not used:
        raise NumericsError("gradient_underflow: the loss does not depend on the model")

    outputs = [row.count() for row in rows.values() if row.seen]
    parameter_rows = []
    for name, gradient in used.items():
        layer, _, what = name.rpartition(".")
        row = Histogram(layer, what)
        counter.count(row, (gradient,))
        parameter_rows.append(row.count())
    return UnderflowReport(
        rows=(*outputs, *parameter_rows),
        outputs=together("outputs", outputs),
        parameters=together("parameters", parameter_rows),
        scales=scales,
        unused=tuple(name for name in by_name if name not in used),
        half=counter.half,
    )


def _checked(model: object, loss: object, scales: tuple[float, ...]) -> dict[torch.Tensor, str]:
    """The names of the parameters that require a gradient; `NumericsError` for what cannot be."""
    for scale in scales:
        log2_of(scale)
    if not scales:
        raise NumericsError("gradient_underflow: scales is empty; give at least one")
    named = checked_model(model, "gradient_underflow").named_parameters()
    parameters: dict[torch.Tensor, str] = {p: name for name, p in named if p.requires_grad}
    if not parameters:
        raise NumericsError("gradient_underflow: no parameter of the model requires a gradient")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise NumericsError(f"gradient_underflow: the loss must be one number, not {shape}")
    if loss.grad_fn is None:
        raise NumericsError(
            "gradient_underflow: the loss has no graph; compute it with gradients enabled, and "
            "pass the tensor itself, not .item() or .detach()"
        )
    return parameters


class _Counter:
    """Puts gradients into histograms, and remembers whether any was fp16 already."""

    def __init__(self):
        self.half = False
        self._buffers: dict[torch.device, Buffers] = {}

    def count(self, row: Histogram, gradients: tuple[torch.Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self.half |= gradient.dtype in (torch.float16, torch.complex32)
                row.add(gradient, self._buffers)


def _low_precision_sites(
    root: torch.autograd.graph.Node, parameters: dict[torch.Tensor, str]
) -> dict[torch.autograd.graph.Node, tuple[object, str, str]]:
    """The nodes that fp16 gradients arrive at: {node: (key, layer, what)}, first op first.

    Uses of the same parameters, as by the steps of a recurrent network, share a key.
    """
    low = [node for node in _graph(root) if node.name().startswith(_LOW_PRECISION_NODES)]
    sites: dict[Any, tuple[object, str, str]] = {}
    products: Counter[tuple[str, str]] = Counter()
    for node in sorted(
        low, key=lambda node: node._sequence_nr()
    ):  # in the order of the forward pass
        op = node.name().partition("Backward")[0].lower()
        inputs = (_own(below, parameters) for below, _ in node.next_functions)
        own = tuple(name for name in inputs if name)
        if own:  # a layer's product; else one of activations, as in attention
            layer = own[-1].rpartition(".")[0]
            sites[node] = ((own, op), layer, f"output of {op}")
            continue
        layer = _nearest(node, parameters).rpartition(".")[0]
        products[layer, op] += 1
        number = products[layer, op]
        sites[node] = ((layer, op, number), layer, f"output of {op} {number}")
    return sites


def _graph(root: torch.autograd.graph.Node) -> set[torch.autograd.graph.Node]:
    """All nodes that `root` leads to, itself among them."""
    nodes, stack = {root}, [root]
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None and below not in nodes:
                nodes.add(below)
                stack.append(below)
    return nodes


def _own(node: Any, parameters: dict[torch.Tensor, str]) -> str | None:
    """The parameter that this input of an op is, behind casts and transpositions."""
    while node is not None:
        if hasattr(node, "variable"):  # AccumulateGrad
            return parameters.get(node.variable)
        if len(node.next_functions) != 1:
            return None
        if node.name().partition("Backward")[0] not in _RESHAPING:
            return None
        node = node.next_functions[0][0]
    return None


def _nearest(node: Any, parameters: dict[torch.Tensor, str]) -> str:
    """The parameter that the fewest ops lie between and this node."""
    level, seen = [node], {node}
    while level:
        following = []
        for node in level:
            for below, _ in node.next_functions:
                if below is None or below in seen:
                    continue
                if hasattr(below, "variable") and below.variable in parameters:
                    return parameters[below.variable]
                seen.add(below)
                following.append(below)
        level = following
    return ""
