"""Gradients that fp16 would lose, and the loss scale that keeps them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from amp_lab.errors import NumericsError, first_line
from amp_lab.numerics.checks import LARGEST_POWER, checked_model, log2_of, power
from amp_lab.report import Printed, Table, listed, percent

KEEP = 0.999
"""The share of the non-zero gradient values that `smallest_scale` keeps."""

# What autocast runs in low precision, by the name of its backward node. The gradient of an op's
# output has the dtype of that output, so these are the nodes that fp16 gradients arrive at.
_LOW_PRECISION_NODES = (
    "Addbmm", "Addmm", "Addmv", "Addr", "Baddbmm", "Bmm", "Convolution", "CudnnConvolution",
    "CudnnRnn", "Dot", "Linear", "MiopenConvolution", "MiopenRnn", "MkldnnConvolution",
    "MkldnnLinear", "MkldnnRnnLayer", "Mm", "Mps", "Mv", "ScaledDotProduct", "SlowConv",
    "ThnnConv", "ThnnFused",
)  # fmt: skip
_RESHAPING = {"ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Alias"}
_CHUNK = 2**17  # values at a time: the buffers for them stay in a core's cache


@dataclass
class GradientCount:
    """How the gradient values of one layer, or of several together, would fare in fp16.

    A value fares as ``(gradient * scale).to(torch.float16)`` does. Scales are powers of two from
    2^-64 to 2^64.
    """

    layer: str
    """Qualified name of the module."""
    what: str
    """The parameter's name, or ``output of OP``: the gradient that arrives there."""
    values: int = 0
    zero: int = 0
    """Values that are exactly zero before any cast."""
    nonfinite: int = 0
    """Values that are infinite or NaN before any cast; counted nowhere else."""
    _classes: Counter[int] = field(default_factory=Counter)  # see _Histogram

    @property
    def nonzero(self) -> int:
        """Values that are finite and not zero: those that fp16 could lose."""
        return self.values - self.zero - self.nonfinite

    def zero_in_fp16(self, scale: float) -> int:
        """Number of values that are not zero, and would be in fp16 at this loss scale."""
        # fp16's smallest number is 2^-24. Half of it lies between that and zero and goes to the
        # even one of the two, which is zero; what is larger goes to 2^-24.
        below = -25 - log2_of(scale)
        return sum(n for key, n in self._classes.items() if _exponents(key)[0] < below)

    def subnormal_in_fp16(self, scale: float) -> int:
        """Number of values that would be kept with fewer than fp16's 11 significant bits."""
        below = -14 - log2_of(scale)
        small = sum(n for key, n in self._classes.items() if _exponents(key)[1] < below)
        return small - self.zero_in_fp16(scale)

    def inf_in_fp16(self, scale: float) -> int:
        """Number of finite values that would be infinite."""
        top = 16 - log2_of(scale)
        return sum(n for key, n in self._classes.items() if _exponents(key)[2] >= top)

    def lost(self, scale: float) -> float:
        """Share of the non-zero values, from 0 to 1, that would be zero."""
        return self.zero_in_fp16(scale) / self.nonzero if self.nonzero else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """Exponent k: number of values with a magnitude in (2^k, 2^(k+1)]; -127: all below, too."""
        result: Counter[int] = Counter()
        for key, count in self._classes.items():
            result[_exponents(key)[0]] += count
        return dict(sorted(result.items()))

    @property
    def smallest_scale(self) -> float | None:
        """The smallest power of two, 1 or more, at which 99.9 % of the non-zero values stay so.

        None if there are no such values, or 2^64 would not do.
        """
        allowed = (1 - KEEP) * self.nonzero
        scales = (2.0**p for p in range(LARGEST_POWER + 1))
        return next((s for s in scales if self.nonzero and self.zero_in_fp16(s) <= allowed), None)

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two at which no value becomes infinite; None without values."""
        scales = (2.0**p for p in range(LARGEST_POWER, -LARGEST_POWER - 1, -1))
        return next((s for s in scales if self.nonzero and not self.inf_in_fp16(s)), None)

    def _add(self, other: "GradientCount") -> None:
        self.values += other.values
        self.zero += other.zero
        self.nonfinite += other.nonfinite
        self._classes.update(other._classes)


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
        total = GradientCount("all", "")
        total._add(self.outputs)
        total._add(self.parameters)
        return total

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
    for scale in scales:
        log2_of(scale)
    if not scales:
        raise NumericsError("gradient_underflow: scales is empty; give at least one")
    named = checked_model(model, "gradient_underflow").named_parameters()
    parameters = {p: name for name, p in named if p.requires_grad}
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

    sites = _low_precision_sites(loss.grad_fn, parameters)
    rows = {key: _Histogram(layer, what) for key, layer, what in sites.values()}
    buffers: dict[torch.device, _Buffers] = {}
    half = False

    def count(row: _Histogram, gradient: torch.Tensor | None) -> None:
        nonlocal half
        if gradient is not None:
            half |= gradient.dtype in (torch.float16, torch.complex32)
            row.add(gradient, buffers)

    def watch(node: torch.autograd.graph.Node, row: _Histogram):
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            for gradient in gradients:
                count(row, gradient)

        return node.register_prehook(hook)

    handles = [watch(node, rows[key]) for node, (key, _, _) in sites.items()]
    try:
        gradients = torch.autograd.grad(
            loss, list(parameters), retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        reason = first_line(error).partition(". ")[0]
        raise NumericsError(
            f"gradient_underflow: no backward pass from this loss ({reason}); call it before "
            "loss.backward(), with the loss of a model that is not compiled"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if all(gradient is None for gradient in gradients):
        raise NumericsError("gradient_underflow: the loss does not depend on the model")

    outputs = [row.count() for row in rows.values() if row.seen]
    parameter_rows = []
    for name, gradient in zip(parameters.values(), gradients, strict=True):
        if gradient is not None:
            layer, _, what = name.rpartition(".")
            row = _Histogram(layer, what)
            count(row, gradient)
            parameter_rows.append(row.count())
    return UnderflowReport(
        rows=(*outputs, *parameter_rows),
        outputs=_together("outputs", outputs),
        parameters=_together("parameters", parameter_rows),
        scales=scales,
        unused=tuple(n for n, g in zip(parameters.values(), gradients, strict=True) if g is None),
        half=half,
    )


def _together(what: str, rows: Iterable[GradientCount]) -> GradientCount:
    total = GradientCount("all", what)
    for row in rows:
        total._add(row)
    return total


class _Buffers:
    """Room for the steps of one chunk, used again for the next."""

    def __init__(self, device: torch.device):
        self.size = _CHUNK if device.type == "cpu" else 2**24
        self.magnitude, self.exponent, self.sum = (
            torch.empty(self.size, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.key = torch.empty(self.size, dtype=torch.int16, device=device)


class _Histogram:
    """Counts gradient values by where they lie between powers of two, exactly as fp16 rounds.

    fp32's own exponents make the bins: the bits of a magnitude, as an integer, shifted right by
    its 23 bits of mantissa. An offset before the shift moves the edges of the bins to where fp16
    rounds, for every power of two as a scale:

    - -1 lets a bin end with its power of two, since 2^-25 itself still rounds to zero;
    - 2^13 lets it begin earlier, since 2^-14 - 2^-25 already rounds to the smallest normal number;
    - 2^12 likewise, since 65520 = 2^16 - 2^4 already rounds to infinity.

    The second is the first or one more, and the third likewise and never more than the second, so
    that their sum tells all three (`_exponents`), and one pass of `bincount` serves for all.
    """

    def __init__(self, layer: str, what: str):
        self._layer, self._what = layer, what
        self._bins: torch.Tensor | None = None
        self._values = self._nonfinite = self._tiny = 0

    @property
    def seen(self) -> bool:
        return self._values > 0

    @torch.no_grad()
    def add(self, gradient: torch.Tensor, buffers: dict[torch.device, _Buffers]) -> None:
        gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient.values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        if gradient.device not in buffers:
            buffers[gradient.device] = _Buffers(gradient.device)
        room = buffers[gradient.device]
        self._values += gradient.numel()
        if self._bins is None:
            self._bins = torch.zeros(_KEYS, dtype=torch.int64, device=gradient.device)
        for chunk in _as_it_lies(gradient).split(room.size):
            bins = self._count(chunk.to(torch.float32), room)
            if bins[-2:].any():  # inf or NaN, or the last numbers before inf
                finite = chunk.to(torch.float64).isfinite()
                chunk = chunk[finite]
                self._nonfinite += finite.numel() - chunk.numel()
                # float64 values that are too large for fp32 are too large for every scale.
                largest = torch.finfo(torch.float32).max
                chunk = chunk.clamp(-largest, largest)
                bins = self._count(chunk.to(torch.float32), room)
            self._bins += bins
            if chunk.dtype is torch.float64:  # or too small
                self._tiny += int(((chunk.to(torch.float32) == 0) & (chunk != 0)).sum())

    @staticmethod
    def _count(values: torch.Tensor, room: _Buffers) -> torch.Tensor:
        """Number of values by key, (765 + 2,)."""
        size = values.numel()
        magnitude, exponent, total, key = (
            buffer[:size] for buffer in (room.magnitude, room.exponent, room.sum, room.key)
        )
        torch.abs(values, out=magnitude.view(torch.float32))
        torch.sub(magnitude, 1, out=total).bitwise_right_shift_(23)
        for offset in (2**13, 2**12):
            torch.add(magnitude, offset, out=exponent).bitwise_right_shift_(23)
            total += exponent
        key.copy_(total).add_(1)  # of zero the first exponent is -1
        return torch.bincount(key, minlength=_KEYS)

    def count(self) -> GradientCount:
        result = GradientCount(self._layer, self._what, self._values, nonfinite=self._nonfinite)
        if self._bins is not None:
            bins = self._bins.tolist()
            result.zero = bins[0] - self._tiny
            bins[0], bins[1] = 0, bins[1] + self._tiny
            result._classes = Counter({key: n for key, n in enumerate(bins) if n})
        return result


_KEYS = 3 * 255 + 2


def _exponents(key: int) -> tuple[int, int, int]:
    """The three exponents of a key: for rounding to zero, to normal numbers, and to infinity."""
    first, more = divmod(key - 1, 3)
    return first - 127, first - 127 + (more > 0), first - 127 + (more > 1)


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The values in one dimension, without a copy if they are dense in memory in any order."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)))[::-1]
    return tensor.permute(order).reshape(-1)


def _low_precision_sites(
    root: torch.autograd.graph.Node, parameters: dict[torch.Tensor, str]
) -> dict[torch.autograd.graph.Node, tuple[object, str, str]]:
    """The nodes that fp16 gradients arrive at: {node: (key, layer, what)}, first op first.

    Uses of the same parameters, as by the steps of a recurrent network, share a key.
    """
    nodes, stack = {root}, [root]
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None and below not in nodes:
                nodes.add(below)
                stack.append(below)
    low = [node for node in nodes if node.name().startswith(_LOW_PRECISION_NODES)]
    sites, products = {}, Counter()
    for node in sorted(low, key=lambda node: node._sequence_nr()):
        op = node.name().partition("Backward")[0].lower()
        own = tuple(name for below, _ in node.next_functions if (name := _own(below, parameters)))
        if own:
            layer = own[-1].rpartition(".")[0]
            sites[node] = ((own, op), layer, f"output of {op}")
            continue
        layer = _nearest(node, parameters).rpartition(".")[0]
        products[layer, op] += 1
        number = products[layer, op]
        sites[node] = ((layer, op, number), layer, f"output of {op} {number}")
    return sites


def _own(node, parameters) -> str | None:
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


def _nearest(node, parameters) -> str:
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
