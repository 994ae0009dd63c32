"""Gradients that fp16 would lose, and the loss scale that keeps them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from amp_lab.core.errors import NumericsError, first_line
from amp_lab.core.remedies import remedy
from amp_lab.core.report import Printed, Table, listed, percent
from amp_lab.numerics.gradient_histogram import KEEP, GradientCount, log2_of, together
from amp_lab.numerics.stored_parts import is_sharded
from amp_lab.tracing.backward import nodes_below

# What autocast runs in low precision, by the name of its backward node. The gradient of an op's
# output has the dtype of that output, so these are the nodes that fp16 gradients arrive at.
_LOW_PRECISION_NODES = (
    "Addbmm", "Addmm", "Addmv", "Addr", "Baddbmm", "Bmm", "Convolution", "CudnnConvolution",
    "CudnnRnn", "Dot", "Linear", "MiopenConvolution", "MiopenRnn", "MkldnnConvolution",
    "MkldnnLinear", "MkldnnRnnLayer", "Mm", "Mps", "Mv", "ScaledDotProduct", "SlowConv",
    "ThnnConv", "ThnnFused",
)  # fmt: skip
_SCALE = remedy(
    "underflow.scale",
    "some loss scale keeps the gradients in fp16's range",
    "Loss scales from {low} to {high} keep 99.9 % of all values, and no value overflows.",
    failure="AMP0003",
)
_NO_SCALE = remedy(
    "underflow.no_scale",
    "the gradients span more than fp16's range, whatever the loss scale",
    "No loss scale keeps 99.9 % of the values without overflow. The largest scale without "
    "overflow, {high}, loses {lost:.2g} %. Use bf16, which has the range for all values.",
    failure="AMP0003",
)
_SCALE_BELOW_ONE = remedy(
    "underflow.scale_below_one",
    "gradients overflow in fp16 at a loss scale of 1, and a smaller scale keeps them",
    "A loss scale of {high} keeps 99.9 % of all values, and no value overflows. At a larger scale, "
    "some values overflow.",
    failure="AMP0003",
)
_NONFINITE = remedy(
    "underflow.nonfinite",
    "some gradients are inf or NaN without any loss scale",
    "{count:,} values are already inf or NaN. Use find_nonfinite to find the op.",
    failure="AMP0002",
)
_FP16_ALREADY = remedy(
    "underflow.fp16_already",
    "some gradients were computed in fp16",
    "Some gradients were computed in fp16. The smallest may have become zero before this report "
    "could count them, so it cannot show how many values fp16 loses or which loss scale helps. "
    "Compute the loss again in fp32 or bf16, with fp32 weights and without fp16 autocast.",
)
_ABOUT = (
    "zero %: share of all values that are zero in any precision. The other columns count nonzero "
    "values in fp16, at each loss scale.",
    "lost: become zero. subn.: become subnormal and lose bits. inf: overflow. keep at: smallest "
    "scale that loses at most 0.1 %.",
)
_ABOUT_HALF = (
    "zero %: share of all values that are zero. This includes values that fp16 rounded to zero.",
    "subn. %: share of the other values that are subnormal in fp16, with fewer bits.",
)
_HALF = (torch.float16, torch.complex32)
_PLAIN_CELLS = (
    "layer", "what", "values", "sample", "zero", "nonfinite", "smallest_scale", "largest_scale",
)  # fmt: skip
_Names: TypeAlias = dict[Tensor, str]  # of the parameters that require a gradient
# Backward nodes that may stand between a parameter and the op that uses it.
_RESHAPING = {"ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Alias"}


@dataclass(frozen=True, repr=False)
class UnderflowReport(Printed):
    """The result of `gradient_underflow`."""

    rows: tuple[GradientCount, ...]  # outputs of layers in forward order, then parameters
    outputs: GradientCount  # all outputs of layers together
    parameters: GradientCount  # all parameters together
    scales: tuple[float, ...]  # loss scales, as given
    unused: tuple[str, ...]  # parameters that require a gradient and get none from this loss

    @property
    def total(self) -> GradientCount:
        """The counts of outputs and parameters together."""
        return together("", (self.outputs, self.parameters))

    @property
    def half(self) -> bool:
        """Whether some gradients were already fp16, so that lost values cannot be counted."""
        return self.total.half

    @property
    def smallest_scale(self) -> float | None:
        """The smallest power of two at which 99.9 % of all non-zero values stay non-zero in fp16.

        None if there is no such scale, if all values are zero, or if `half`.
        """
        return self.total.smallest_scale

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two at which no value overflows in fp16."""
        return self.total.largest_scale

    def __str__(self) -> str:
        indices = range(len(self.rows))
        by_loss = sorted(indices, key=lambda i: self._share_lost(self.rows[i]), reverse=True)
        shown = sorted(by_loss[:20])  # the 20 that lose most, in the order of `rows`
        return self._table([self.rows[i] for i in shown]).text()

    def _share_lost(self, row: GradientCount) -> float:
        """The share that is lost at the first scale; the share of zeros if `half`."""
        if not self.half:
            return row.lost(self.scales[0])
        if not row.values:
            return 0.0
        return row.zero / row.values

    def _table(self, rows: Sequence[GradientCount] | None = None) -> Table:
        """The table of these rows, by default of all."""
        if rows is None:
            rows = self.rows
        head = self._header()
        return Table(
            head,
            [self._cells(row) for row in rows],
            foot=[self._cells(self.outputs), self._cells(self.parameters)],
            facts=self._facts(len(self.rows) - len(rows)),
            caption=_FP16_ALREADY.text if self.half else "",
            right=range(2, len(head)),  # the numbers
        )

    def _contents(self) -> dict[str, Any]:
        """The fields for JSON, with each count as `_json_cells` writes it, and `half`."""
        contents = dict(vars(self))
        contents["outputs"] = self._json_cells(self.outputs)
        contents["parameters"] = self._json_cells(self.parameters)
        contents["rows"] = [self._json_cells(row) for row in self.rows]
        contents["half"] = self.half
        return contents

    def _json_cells(self, count: GradientCount) -> dict[str, Any]:
        """A count for JSON: its `_PLAIN_CELLS`, and how many values each scale loses."""
        cells = {name: getattr(count, name) for name in _PLAIN_CELLS}
        for scale in self.scales:
            cells[f"lost at {scale:g}"] = None
            if not self.half:
                cells[f"lost at {scale:g}"] = count.zero_in_fp16(scale)
        return cells

    def plot(self):
        """Draw the exponents of all gradient values and fp16's range, with a panel for each scale.

        If `half`, values that were flushed to zero are missing. Returns a list of matplotlib axes.
        """
        from amp_lab import plots  # matplotlib only where a figure is drawn

        histograms = {
            self.outputs.what: self.outputs.histogram,
            self.parameters.what: self.parameters.histogram,
        }
        return plots.exponents_against_fp16(histograms, self.scales)

    def _header(self) -> list[str]:
        """The head of the table; scales at which nothing overflows have no column for inf."""
        cells = ["layer", "gradient of", "values", "zero %"]
        if self.half:
            return [*cells, "subn. %"]
        for scale in self.scales:
            cells += [f"lost % at {_power(scale)}", "subn. %"]
            if self.total.inf_in_fp16(scale):
                cells.append("inf %")
        return [*cells, "keep at"]

    def _cells(self, row: GradientCount) -> list[str]:
        """The cells of a row, as many as `_header` has."""
        cells = [row.layer or "(model)", row.what, f"{row.values:,}", percent(row.zero, row.values)]
        if self.half:
            return [*cells, percent(row.subnormal_in_fp16(1.0), row.nonzero)]
        for scale in self.scales:
            cells.append(percent(row.zero_in_fp16(scale), row.nonzero))
            cells.append(percent(row.subnormal_in_fp16(scale), row.nonzero))
            if self.total.inf_in_fp16(scale):
                cells.append(percent(row.inf_in_fp16(scale), row.nonzero))
        return [*cells, _power(row.smallest_scale)]

    def _facts(self, missing: int) -> list[str]:
        """The sentences below a table from which `missing` rows were left out."""
        total = self.total
        lines = []
        if missing:
            shown = len(self.rows) - missing
            why = "with most zeros" if self.half else f"that lose most at {_power(self.scales[0])}"
            lines.append(f"The table shows {shown} rows {why}; .rows has all {len(self.rows)}.")
        if self.half:
            lines += _ABOUT_HALF
        else:
            lines += _ABOUT
            lines += self._advice_on_scales()
        if total.nonfinite:
            lines.append(_NONFINITE.sentence(count=total.nonfinite))
        if self.unused:
            lines.append(f"The loss does not use these parameters: {listed(self.unused)}.")
        if total.sample:
            # Two standard deviations of a share p of n values are 2 sqrt(p (1 - p) / n), which is
            # at most 1 / sqrt(n).
            off = f"{100 / total.sample**0.5:.2f} percentage points (95 %)"
            lines.append(f"Large gradients were sampled, so shares may be off by {off}.")
        return lines

    def _advice_on_scales(self) -> list[str]:
        """A sentence on the loss scales that keep the gradients; none if unknown."""
        smallest = self.smallest_scale
        largest = self.largest_scale
        if smallest is None or largest is None:
            return []
        low = _power(smallest)
        high = _power(largest)
        lost = self.total.lost(largest)
        if smallest <= largest:
            return [_SCALE.sentence(low=low, high=high)]
        if lost <= 1 - KEEP:  # a scale below 1
            return [_SCALE_BELOW_ONE.sentence(high=high)]
        return [_NO_SCALE.sentence(high=high, lost=100 * lost)]


def gradient_underflow(
    model: nn.Module, loss: Tensor, *, scales: Iterable[float] = (1.0, 2.0**8, 2.0**16)
) -> UnderflowReport:
    """Count, layer by layer, the gradient values that fp16 would lose at each loss scale.

    The report covers the gradients that are fp16 under autocast: gradients of the parameters, and
    gradients of the outputs of matmuls, convolutions and recurrent layers. One backward pass runs
    and keeps the graph, so ``loss.backward()`` still works afterwards. No `.grad` is written.

    Args:
        model: The model whose parameters get the gradients.
        loss: A tensor with one number, computed with `model` in fp32 or bf16 without a loss scale.
            With a loss in fp16, small gradients are lost before they can be counted. In this case
            `half` is true, and the report has neither lost shares nor a smallest scale.
        scales: Loss scales: powers of two from 2^-64 to 2^64.

    Returns:
        An `UnderflowReport`. Print it to see the lost shares by layer, or read `smallest_scale`.

    Raises:
        NumericsError: If no parameter requires a gradient, if a scale is not a power of two in this
            range, if the loss is not a single number or does not depend on the model, or if the
            graph of the loss is missing, freed or compiled.

    Source:
        The histogram of Micikevicius et al., "Mixed Precision Training", 2018, figure 3. Each value
        is cast as ``(gradient * scale).to(torch.float16)``. For a gradient of 262,144 or more
        values, only a fixed sample and the extremes are counted. The report shows how far a share
        may be off.

    Example:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        loss = model(torch.randn(32, 64)).square().mean()
        report = gradient_underflow(model, loss)
        print(report)
        print(report.smallest_scale, report.largest_scale)
    """
    scales = tuple(float(scale) for scale in scales)
    parameters = _checked_parameters(model, loss, scales)
    arrivals = _low_precision_nodes(loss, parameters, _names_in_layers(model, parameters))
    gradients = _compute_gradients(loss, list(parameters), arrivals)
    # `dict.fromkeys` leaves each count once, since the calls of a layer share one.
    outputs = [count for count in dict.fromkeys(arrivals.values()) if count.values]
    half = _has_fp16(loss)
    for output in outputs:
        output.half = half
    rows = []
    unused = []
    for name, gradient in zip(parameters.values(), gradients, strict=True):
        if gradient is None:
            unused.append(name)
            continue
        layer, _, what = name.rpartition(".")
        row = GradientCount(layer, what, half=half)
        row.add((gradient,))
        rows.append(row)
    if not rows:
        if any(map(is_sharded, parameters)):
            raise NumericsError(
                "gradient_underflow: the loss depends on gathered copies of sharded parameters. "
                "Call gradient_underflow before fully_shard."
            )
        raise NumericsError("gradient_underflow: the loss does not depend on the model")
    return UnderflowReport(
        rows=(*outputs, *rows),
        outputs=together("outputs", outputs),
        parameters=together("parameters", rows),
        scales=scales,
        unused=tuple(unused),
    )


def _checked_parameters(model: object, loss: object, scales: tuple[float, ...]) -> _Names:
    """The parameters that require a gradient, with their names.

    Raises `NumericsError` if one of the arguments of `gradient_underflow` is wrong.
    """
    for scale in scales:
        log2_of(scale)  # raises if it is no power of two
    if not scales:
        raise NumericsError("gradient_underflow: scales is empty. Give at least one scale.")
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise NumericsError(f"gradient_underflow: the model must be an nn.Module, not {kind}")
    parameters: _Names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise NumericsError("gradient_underflow: no parameter of the model requires a gradient")
    _check_loss(loss)
    return parameters


def _check_loss(loss: object) -> None:
    """Raise `NumericsError` if the loss is no single number with a graph."""
    complaint = "gradient_underflow: the loss must be one number, not"
    if not isinstance(loss, Tensor):
        raise NumericsError(f"{complaint} {type(loss).__name__}")
    if loss.numel() != 1:
        raise NumericsError(f"{complaint} {tuple(loss.shape)}")
    if loss.grad_fn is None:
        raise NumericsError(
            "gradient_underflow: the loss has no graph. Compute it with gradients enabled, and "
            "pass the tensor itself, not .item() or .detach()."
        )


def _names_in_layers(model: nn.Module, parameters: _Names) -> _Names:
    """The parameters, with weights of linear layers named after the layer that multiplies by them.

    `named_parameters` gives a weight that embedding and head share once, named after the embedding.
    Here it is named after the head.
    """
    names = dict(parameters)
    # Reversed, so that of several layers with one weight the first gives the name.
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Linear):
            weight = module._parameters.get("weight")
            if weight is not None:  # None in a parametrized layer, which computes its weight
                names[weight] = f"{name}.weight"
    return names


def _has_fp16(loss: Tensor) -> bool:
    """Whether a gradient anywhere in the graph of the loss is fp16."""
    for node in nodes_below([loss.grad_fn]):
        # Shapes and dtypes of the gradients that arrive at the node.
        if any(gradient.dtype in _HALF for gradient in node._input_metadata):
            return True
    return False


def _compute_gradients(
    loss: Tensor, parameters: list[Tensor], arrivals: dict[Node, GradientCount]
) -> Sequence[Tensor | None]:
    """The gradients of the parameters, in their order; None for one that the loss does not use.

    The gradients that arrive at the nodes of `arrivals` are added to their counts on the way.
    """
    hooks = [node.register_prehook(row.add) for node, row in arrivals.items()]
    try:
        # The graph is kept, since the caller will call backward.
        return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise NumericsError(
            f"gradient_underflow: the backward pass failed ({reason}). Call gradient_underflow "
            "before loss.backward(), with a model that is not compiled."
        ) from error
    finally:
        for hook in hooks:  # they would count again in the caller's backward pass
            hook.remove()


def _low_precision_nodes(
    loss: Tensor, parameters: _Names, names_in_layers: _Names
) -> dict[Node, GradientCount]:
    """The nodes at which gradients are fp16 under autocast, in forward order, with empty counts.

    `parameters` has the name of each parameter, and `names_in_layers` is what `_names_in_layers`
    returns. The nodes of a layer that is called several times share one count.
    """
    nodes = nodes_below([loss.grad_fn])
    low = [node for node in nodes if node.name().startswith(_LOW_PRECISION_NODES)]
    low.sort(key=lambda node: node._sequence_nr())  # as the forward pass ran them
    counts: dict[Node, GradientCount] = {}
    layer_counts: dict[tuple[tuple[str, ...], str], GradientCount] = {}  # by weights and op
    matmuls: Counter[tuple[str, str]] = Counter()  # of activations, by layer and op
    for node in low:
        op = _op_of(node).lower()
        weights = _weights_of(node, names_in_layers)
        if not weights:  # a matmul of activations, as in attention
            layer = _layer_of(_nearest_parameter(node, parameters))
            matmuls[layer, op] += 1
            counts[node] = GradientCount(layer, f"output of {op} {matmuls[layer, op]}")
            continue
        if (weights, op) not in layer_counts:
            layer = _layer_of(weights[-1])
            layer_counts[weights, op] = GradientCount(layer, f"output of {op}")
        counts[node] = layer_counts[weights, op]
    return counts


def _op_of(node: Any) -> str:
    """The op of a backward node: ``Addmm`` of ``AddmmBackward0``."""
    return node.name().partition("Backward")[0]


def _layer_of(parameter: str) -> str:
    """The module of a parameter: ``layers.0`` of ``layers.0.weight``."""
    return parameter.rpartition(".")[0]


def _weights_of(node: Any, names_in_layers: _Names) -> tuple[str, ...]:
    """Names of the parameters among the inputs of an op; none for a product of activations."""
    inputs = [_parameter_behind(inner, names_in_layers) for inner, _ in node.next_functions]
    return tuple(name for name in inputs if name)


def _parameter_behind(node: Any, names_in_layers: _Names) -> str | None:
    """Name of the parameter that an input of an op is, perhaps cast or transposed; else None."""
    while node is not None:
        if hasattr(node, "variable"):  # AccumulateGrad
            return names_in_layers.get(node.variable)
        if _op_of(node) not in _RESHAPING:
            return None
        node = node.next_functions[0][0]
    return None


def _nearest_parameter(node: Any, parameters: _Names) -> str:
    """Name of the parameter that is the fewest ops before this node; empty if there is none."""
    for below in nodes_below([node]):
        if hasattr(below, "variable") and below.variable in parameters:
            return parameters[below.variable]
    return ""


def _power(scale: float | None) -> str:
    """A power of two as text: ``8``, ``2^16``, or ``none``."""
    if scale is None:
        return "none"
    power = log2_of(scale)
    if abs(power) <= 3:
        return f"{scale:g}"
    return f"2^{power}"
