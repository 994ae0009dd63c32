"""Numerics of training in fp16: gradients that underflow, the loss scale, the first inf or NaN.

Three tools, each for one question about your own model:

- `gradient_underflow`: which gradients would fp16 lose, and which loss scale keeps them?
- `ScaleLog`: what did the `GradScaler` do, step by step?
- `find_nonfinite`: where did the NaN come from?
"""

import cmath
import contextlib
import dataclasses
import functools
import html
import linecache
import math
import os
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_lab.errors import NumericsError

FP16_MAX = 65504.0
FP16_OVERFLOW = 65520.0
"""Magnitudes from here on become infinite in fp16; those from 65504 to here round to 65504."""
KEEP = 0.999
"""The share of the non-zero gradient values that `smallest_scale` keeps."""

# ------------------------------------------------------------------------------------------------
# Gradient underflow

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
_LARGEST_POWER = 64  # scales from 2^-64 to 2^64, far from where fp32 itself underflows


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
        below = -25 - _log2(scale)
        return sum(n for key, n in self._classes.items() if _exponents(key)[0] < below)

    def subnormal_in_fp16(self, scale: float) -> int:
        """Number of values that would be kept with fewer than fp16's 11 significant bits."""
        below = -14 - _log2(scale)
        small = sum(n for key, n in self._classes.items() if _exponents(key)[1] < below)
        return small - self.zero_in_fp16(scale)

    def inf_in_fp16(self, scale: float) -> int:
        """Number of finite values that would be infinite."""
        top = 16 - _log2(scale)
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
        scales = (2.0**p for p in range(_LARGEST_POWER + 1))
        return next((s for s in scales if self.nonzero and self.zero_in_fp16(s) <= allowed), None)

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two at which no value becomes infinite; None without values."""
        scales = (2.0**p for p in range(_LARGEST_POWER, -_LARGEST_POWER - 1, -1))
        return next((s for s in scales if self.nonzero and not self.inf_in_fp16(s)), None)

    def _add(self, other: "GradientCount") -> None:
        self.values += other.values
        self.zero += other.zero
        self.nonfinite += other.nonfinite
        self._classes.update(other._classes)


@dataclass(frozen=True)
class UnderflowReport:
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
        shown = sorted(self.rows, key=lambda row: row.lost(self.scales[0]), reverse=True)[:20]
        table = [self._header()]
        table += [self._cells(row) for row in self.rows if any(row is other for other in shown)]
        table += [self._cells(row) for row in (self.outputs, self.parameters)]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        lines.insert(-2, "-" * max(map(len, lines)))
        if len(self.rows) > len(shown):
            lines.insert(-3, f"… and {len(self.rows) - len(shown)} that lose no more; see .rows")
        return "\n".join([*lines, "", *self._summary()])

    def _repr_html_(self) -> str:
        def tr(cells: Iterable[str], tag: str = "td") -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = [tr(self._cells(row)) for row in self.rows]
        foot = [tr(self._cells(row), "th") for row in (self.outputs, self.parameters)]
        summary = "<br>".join(html.escape(line) for line in self._summary())
        return (
            f"<table><thead>{tr(self._header(), 'th')}</thead><tbody>{''.join(body)}</tbody>"
            f"<tfoot>{''.join(foot)}</tfoot></table><p>{summary}</p>"
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
            cells += [f"lost % at {_power(scale)}", "subn. %"]
            cells += ["inf %"] if self.total.inf_in_fp16(scale) else []
        return [*cells, "keep at"]

    def _cells(self, row: GradientCount) -> list[str]:
        cells = [
            row.layer or "(model)",
            row.what,
            f"{row.values:,}",
            _percent(row.zero, row.values),
        ]
        for scale in self.scales:
            counts = [row.zero_in_fp16(scale), row.subnormal_in_fp16(scale)]
            counts += [row.inf_in_fp16(scale)] if self.total.inf_in_fp16(scale) else []
            cells += [_percent(count, row.nonzero) for count in counts]
        return [*cells, _power(row.smallest_scale)]

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
                f"A loss scale from {_power(smallest)} to {_power(largest)} keeps 99.9 % of all "
                "and overflows none."
                if smallest <= largest
                else f"No loss scale keeps 99.9 % and overflows none: {_power(largest)}, the "
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
            lines.append(f"No gradient from this loss: {_listed(self.unused)}.")
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
        _log2(scale)
    if not scales:
        raise NumericsError("gradient_underflow: scales is empty; give at least one")
    parameters = {p: name for name, p in _model(model, "gradient_underflow").named_parameters()
                  if p.requires_grad}  # fmt: skip
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
        reason = str(error).split(". ")[0].splitlines()[0]
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


# ------------------------------------------------------------------------------------------------
# The loss scale over time


class ScaleLog:
    """Log the loss scale of every step of a `torch.amp.GradScaler`, and the steps it skipped.

        with ScaleLog(scaler) as log:
            train(…)
        log.plot()

    A step is a call of ``scaler.update()``. The scaler goes on as before: its `step` and `update`
    are called as they are, and the scale and the found infs are copied on their device, so that
    the host waits for nothing that it did not wait for before. They are read when you ask.

    Use it as a context manager, or call `close`, which leaves the scaler as it was; the log can
    still be read. With a scaler that is disabled every scale is 1 and no step is skipped. While
    the log is open, save the scaler by its `state_dict`, as one does, and not whole.

    Raises `NumericsError` if `scaler` is no GradScaler, or has an open ScaleLog already.
    """

    def __init__(self, scaler: torch.amp.GradScaler):
        if not isinstance(scaler, torch.amp.GradScaler):
            raise NumericsError(f"ScaleLog: {type(scaler).__name__} is no torch.amp.GradScaler")
        if isinstance(getattr(vars(scaler).get("update"), "__self__", None), ScaleLog):
            raise NumericsError("ScaleLog: this scaler has an open ScaleLog; close that first")
        self._scaler = scaler
        self._steps = 0
        self._scales = _Values()  # one for each step
        self._found = _Values()  # one for each optimizer's step
        self._found_at: list[tuple[int, int]] = []  # the step and the optimizer of each
        self._optimizers: list[torch.optim.Optimizer] = []  # in the order of their first step
        self._stepped: list[torch.optim.Optimizer] = []  # since the last update
        self._open = True
        self._before = {name: vars(scaler).get(name) for name in ("step", "update")}
        self._step, self._update = scaler.step, scaler.update
        scaler.step, scaler.update = self._log_step, self._log_update

    def _log_step(self, optimizer, *args, **kwargs):
        result = self._step(optimizer, *args, **kwargs)
        if self._open:
            self._stepped.append(optimizer)
        return result

    def _log_update(self, *args, **kwargs):
        # What there is to log is gone after the update, but counts only if that succeeds.
        scaler, scale, found = self._scaler, None, []
        if self._open and scaler.is_enabled() and scaler._scale is not None:
            scale = scaler._scale.clone()
            states = scaler._per_optimizer_states
            for optimizer in self._stepped:
                flags = states[id(optimizer)]["found_inf_per_device"].values()
                # Copied, since update adds the flags of all optimizers to the first of them.
                flags = [flag.to(scale.device, non_blocking=True).clone() for flag in flags]
                if flags:
                    found.append((optimizer, sum(flags[1:], start=flags[0])))
        result = self._update(*args, **kwargs)
        if self._open:
            if scale is not None:
                self._scales.append(scale)
            indices = {id(optimizer): self._index(optimizer) for optimizer in self._stepped}
            for optimizer, flag in found:
                self._found.append(flag)
                self._found_at.append((self._steps, indices[id(optimizer)]))
            self._stepped.clear()
            self._steps += 1
        return result

    def _index(self, optimizer: torch.optim.Optimizer) -> int:
        for index, known in enumerate(self._optimizers):
            if known is optimizer:
                return index
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    @property
    def scales(self) -> list[float]:
        """The scale in force at each step; the one to come after the last is not among them."""
        return self._scales.tolist() if self._scaler.is_enabled() else [1.0] * self._steps

    @property
    def skipped(self) -> list[int]:
        """Numbers of the steps, from 0, at which at least one optimizer's step was skipped."""
        return sorted({step for steps in self.skipped_by for step in steps})

    @property
    def skipped_by(self) -> list[list[int]]:
        """The same for each optimizer, in the order in which they first stepped."""
        steps: list[list[int]] = [[] for _ in self._optimizers]
        for (step, index), found in zip(self._found_at, self._found.tolist(), strict=True):
            if found:
                steps[index].append(step)
        return steps

    def plot(self):
        """The scale at each step, with the skipped steps marked; `NumericsError` without steps."""
        from amp_lab import plots  # matplotlib only where a figure is drawn

        if not self._steps:
            raise NumericsError(
                "ScaleLog: no step was logged; call scaler.update() while it is open"
            )
        return plots.scale_over_time(self.scales, self.skipped)

    def close(self) -> None:
        """Stop logging and leave the scaler as it was; nothing happens the second time."""
        if not self._open:
            return
        self._open = False
        for name, ours in (("step", self._log_step), ("update", self._log_update)):
            if vars(self._scaler).get(name) != ours:
                continue  # wrapped by someone else since; ours then only passes the call on
            if self._before[name] is None:
                delattr(self._scaler, name)
            else:
                setattr(self._scaler, name, self._before[name])

    def __enter__(self) -> "ScaleLog":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __repr__(self) -> str:
        scales = self.scales
        if not scales:
            return "ScaleLog: no steps yet"
        text = f"ScaleLog: {_plural(len(scales), 'step')}, {len(self.skipped)} skipped"
        if not self._scaler.is_enabled():
            return f"{text}; the scaler is disabled"
        text += (
            f"; scale {scales[0]:g} at first, {scales[-1]:g} at the last, lowest {min(scales):g}"
        )
        if min(scales) < 1:
            text += ". Below 1 a scale no longer helps: something else is wrong, see find_nonfinite"
        return text


class _Values:
    """Numbers that stay on their device until they are read, in few pieces however many."""

    def __init__(self):
        self._whole: list[torch.Tensor] = []
        self._single: list[torch.Tensor] = []

    def append(self, value: torch.Tensor) -> None:
        self._single.append(value)
        if len(self._single) == 1024:  # each takes 512 bytes of a GPU's memory on its own
            self._whole.append(torch.stack(self._single))
            self._single = []

    def tolist(self) -> list[float]:
        rest = [torch.stack(self._single)] if self._single else []
        return [value for piece in (*self._whole, *rest) for value in piece.tolist()]


# ------------------------------------------------------------------------------------------------
# The first non-finite value


@dataclass(frozen=True)
class TensorSummary:
    """What a tensor held, without the tensor."""

    name: str
    """Its name among the op's arguments, e.g. ``self``, ``weight``, ``grad_output``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    """The smallest of its finite values; NaN if it has none. Of a complex tensor, a part's."""
    high: float
    """The largest of them."""
    values: int
    """How many values it has."""
    nan: int
    """How many of them are NaN."""
    inf: int
    """How many are +inf."""
    neg_inf: int
    """How many are -inf."""

    @property
    def share(self) -> float:
        """Share of its values that are not finite, from 0 to 1."""
        return (self.nan + self.inf + self.neg_inf) / self.values if self.values else 0.0

    @property
    def kinds(self) -> frozenset[str]:
        """Which of ``NaN``, ``inf`` and ``-inf`` it holds."""
        counts = {"NaN": self.nan, "inf": self.inf, "-inf": self.neg_inf}
        return frozenset(kind for kind, count in counts.items() if count)

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')} {self.shape}"
        if not self.values:
            return f"{text}, no values"
        bad = self.nan + self.inf + self.neg_inf
        if bad:
            counts = (("NaN", self.nan), ("inf", self.inf), ("-inf", self.neg_inf))
            kinds = [f"{count:,} {kind}" for kind, count in counts if count]
            text += f", {_percent(bad, self.values)} % non-finite ({', '.join(kinds)})"
        if bad < self.values:
            text += f", {'the others ' if bad else ''}from {self.low:.4g} to {self.high:.4g}"
        return text


@dataclass(frozen=True, repr=False)
class NonfiniteReport:
    """Where the first inf or NaN came from; `str` of it is made to be read."""

    phase: str
    """``forward``; ``backward``; or ``before``, if the tensor was so when it was first used."""
    module: str | None
    """Qualified name of the module whose code ran, ``""`` for the model itself; None: no module
    of the model, as for a loss that is computed outside."""
    module_type: str | None
    """Its class."""
    call: int
    """Which call of that module it was, counted from 1 in each forward pass; 0 without one."""
    op: str | None
    """The op: ``log``, ``addmm``; in backward autograd's name for it, such as ``LogBackward0``;
    None in phase ``before``."""
    kernel: str | None
    """The op that the backward of `op` ran; in forward the same as `op`."""
    tensor: str
    """``output``, ``gradient``, ``parameter``, ``buffer``, ``input`` or ``constant``."""
    name: str
    """The tensor's name: of a parameter or buffer its qualified name, else its place."""
    value: TensorSummary
    """The tensor that is not finite."""
    inputs: tuple[TensorSummary, ...]
    """What the op worked on, but not a tensor that it wrote into: its old value is gone."""
    line: str | None
    """The line of your code that called the op, where there was one."""
    reached: str
    """What it spread to: why it counts."""
    loss_scale: float | None
    """The scale that a `GradScaler` had multiplied the loss by, if one did."""
    placed_by: str | None
    """What had put a -inf there that this op turned into a NaN, if that is what happened."""

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _advise(self)

    @property
    def where(self) -> str:
        """The module in words."""
        if self.module is None:
            return "outside the model"
        text = f"{self.module!r} ({self.module_type})" if self.module else (
            f"the model itself ({self.module_type})"
        )  # fmt: skip
        return f"{text}, call {self.call}" if self.call > 1 else text

    def __str__(self) -> str:
        kinds = " and ".join(sorted(self.value.kinds, reverse=True))
        if self.phase == "before":
            head = f"{kinds} in {self.tensor} {self.name!r}, before any op: {self.where}"
        else:
            head = f"{kinds} made in {self.phase} by {self.op}: {self.where}"
        rows = []
        if self.phase == "backward" and self.kernel is not None:
            rows.append(("kernel", self.kernel))
        rows.append((self.tensor, str(self.value)))
        rows += [(f"from {summary.name}", str(summary)) for summary in self.inputs[:6]]
        if self.placed_by:
            rows.append(("-inf from", self.placed_by))
        if self.line:
            rows.append(("line", self.line))
        if self.loss_scale is not None and self.phase == "backward":
            rows.append(("loss scale", f"{self.loss_scale:g}"))
        rows += [("reached", self.reached), ("what to do", self.advice)]
        width = max(len(label) for label, _ in rows)
        lines = [head]
        for label, text in rows:
            lines += textwrap.wrap(
                text,
                98,
                initial_indent=f"  {label:<{width}}  ",
                subsequent_indent=" " * (width + 4),
            )
        return "\n".join(lines)

    __repr__ = __str__


@dataclass
class _Origin:
    """A place where a tensor turned non-finite, which may or may not come to matter."""

    report: NonfiniteReport
    number: int
    placed: bool  # written there on purpose, as a mask of -inf is
    kinds: frozenset[str]


@dataclass(frozen=True)
class _Site:
    module: str
    module_type: str
    call: int


def find_nonfinite(model: nn.Module, *, raise_on_first: bool = False) -> "NonfiniteFinder":
    """Find the module and the op that made the first inf or NaN, in forward and backward.

        with find_nonfinite(model) as finder:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
        print(finder.report)  # None if all was finite

    Every op of the block is watched, those between modules and in the loss included, and under
    autocast, activation checkpointing and in custom functions; backward ops are named after the
    module whose forward they undo. With `raise_on_first` the block ends with a `NumericsError`, as
    soon as it is certain, that carries the report.

    What counts is what spreads: to a gradient of a parameter or of an input, to the output of the
    model (inf or NaN; a -inf there may be a mask), to a single number outside the model such as
    the loss. Then the op that the value came from is reported, however far back. So a mask of -inf
    that softmax makes finite is no finding, and neither is an intermediate that is replaced: the
    backward of `torch.norm` divides by zero, and fills in zeros, at every zero vector. A parameter
    that is not finite, and a running mean or variance, is reported when its module is called. What
    a compiled function, an optimizer that works on lists of tensors, or another thread computes
    is not watched op by op: run the model eagerly.

    Each op's output is summed and the sum read back, which on a GPU waits for every op: meant for
    the step that fails, not for a whole training run. Results stay the same to the last bit. When
    the block ends, however it ends, all hooks are removed.

    Raises `NumericsError` if `model` is no `nn.Module`, or if one is active already.
    """
    return NonfiniteFinder(model, raise_on_first=raise_on_first)


class NonfiniteFinder:
    """The context manager of `find_nonfinite`; can be entered again, and then starts anew."""

    def __init__(self, model: nn.Module, *, raise_on_first: bool = False):
        self._model_ = _model(model, "find_nonfinite")
        self._raise = raise_on_first
        self._installed: contextlib.ExitStack | None = None
        self.report: NonfiniteReport | None = None

    def __enter__(self) -> "NonfiniteFinder":
        global _active
        if _active is not None:
            raise NumericsError(
                "find_nonfinite: one is active already; they cannot be nested, so leave that first"
            )
        self.report = None
        self._names: dict[nn.Module, str] = {}
        self._stack: list[tuple[nn.Module, _Site]] = []
        self._calls: Counter[nn.Module] = Counter()
        self._made: dict[int, _Site | None] = {}  # by autograd's sequence number
        self._origins: dict[int, tuple[StorageWeakRef, _Origin]] = {}  # by storage
        self._all: list[_Origin] = []
        self._lazy: dict[str, nn.Parameter] = {}  # not there until the first call
        self._loss_scale: float | None = None
        self._thread = threading.get_ident()
        self._first = torch._C._autograd._get_sequence_nr()  # older nodes were not seen
        self._watching = True
        with contextlib.ExitStack() as stack:
            for name, module in self._model_.named_modules():
                self._names[module] = name
                stack.callback(
                    module.register_forward_pre_hook(
                        self._enter, prepend=True, with_kwargs=True
                    ).remove
                )
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for name, parameter in self._model_.named_parameters():
                if nn.parameter.is_lazy(parameter):
                    self._lazy[name] = parameter
                elif parameter.requires_grad:
                    self._watch_gradient(stack, parameter, f"the gradient of {name}")
                if parameter.grad is not None and not _finite(parameter.grad):
                    self._note(parameter.grad, self._outside(parameter.grad))
            stack.enter_context(_Watch(self._see))
            stack.callback(setattr, sys.modules[__name__], "_active", None)
            _active = self
            self._installed = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        if self._installed is None:
            raise NumericsError(
                "find_nonfinite: use it in a with statement; it was left without being entered"
            )
        self._watching = False
        installed, self._installed = self._installed, None
        installed.__exit__(*error)
        self._stack.clear()
        self._made.clear()
        self._origins.clear()
        self._all.clear()
        self._lazy.clear()
        self._names.clear()
        self._calls.clear()

    # Modules

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        again = _in_backward()  # activation checkpointing calls modules once more
        if not again:
            if not self._stack:
                self._calls.clear()
                self._loss_scale = None
            self._calls[module] += 1
        site = _Site(self._names[module], type(module).__name__, self._calls[module])
        outermost = not self._stack and not again
        self._stack.append((module, site))
        if not self._watching:
            return
        with self._unwatched():
            if outermost:
                self._check_inputs(site, args, kwargs)
            self._check_state(module, site)

    def _leave(self, module: nn.Module, args: tuple, output: object) -> None:
        while self._stack and self._stack.pop()[0] is not module:
            pass  # left without a call of its hooks
        for name, parameter in list(self._lazy.items()):
            if not nn.parameter.is_lazy(parameter):
                self._watch_gradient(self._installed, parameter, f"the gradient of {name}")
                del self._lazy[name]
        if not self._watching or not self._origins or self._stack or _in_backward():
            return
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor):
                continue
            with self._unwatched():
                if _finite(tensor):
                    continue
                value = _summarise("output", tensor)
                origin = self._origin_of(tensor)
            harmful = value.kinds - {"-inf"} or tensor.numel() == 1
            if harmful and not origin.placed:
                self._judge(origin, "the output of the model")
                return

    def _check_inputs(self, site: _Site, args: tuple, kwargs: dict) -> None:
        for place, given in [*enumerate(args), *kwargs.items()]:
            for tensor in tree_leaves(given):
                if not isinstance(tensor, torch.Tensor):
                    continue
                name = f"argument {place}" if isinstance(place, int) else place
                if tensor.requires_grad and tensor.is_leaf:
                    self._watch_gradient(self._installed, tensor, f"the gradient of {name}")
                if not _finite(tensor) and self._noted(tensor) is None:
                    self._note(tensor, self._before(tensor, "input", name, site))

    def _check_state(self, module: nn.Module, site: _Site) -> None:
        state = dict(module._parameters)
        state |= {name: buffer for name, buffer in module._buffers.items()
                  if name.startswith("running_")}  # fmt: skip
        for name, tensor in state.items():
            if tensor is None or _finite(tensor):
                continue
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            origin = self._before(tensor, kind, f"{site.module}.{name}".lstrip("."), site)
            self._note(tensor, origin)
            if not (origin.placed and not tensor.requires_grad):  # a mask that is a parameter
                self._judge(origin, "the forward pass")
                return

    def _watch_gradient(
        self, stack: contextlib.ExitStack, tensor: torch.Tensor, reached: str
    ) -> None:
        def hook(gradient: torch.Tensor) -> None:
            if not self._watching or not self._origins:
                return
            with self._unwatched():
                origin = None if _finite(gradient) else self._origin_of(gradient)
            if origin is not None:
                self._judge(origin, reached)

        stack.callback(tensor.register_hook(hook).remove)

    # Ops

    def _see(self, func, args: tuple, kwargs: dict, out: object) -> None:
        """Look at what an op returned; this runs below autograd and autocast, for every op."""
        if not self._watching:
            return
        node = torch._C._current_autograd_node()
        if self._stack:
            site = self._stack[-1][1]
        else:
            site = None if node is None else self._made.get(node._sequence_nr())
        # Autograd numbers its nodes, and makes an op's node just before it runs the op; an op that
        # comes after without a node of its own finds the number taken.
        number = torch._C._autograd._get_sequence_nr() - 1
        if number >= self._first and threading.get_ident() == self._thread:
            self._made.setdefault(number, site)
            if len(self._made) > 2**18:  # thousands of steps
                del self._made[next(iter(self._made))]
        outputs = _outputs(func, out)
        bad = [tensor for tensor in outputs if not _finite(tensor)]
        if node is None and not self._stack and func is torch.ops.aten.mul.Tensor:
            self._loss_scale = _loss_scale(args) or self._loss_scale
        if bad:
            self._suspect(func, args, kwargs, bad, node, site)
        elif self._origins:
            for tensor in outputs:  # written over as a whole
                key = _storage_key(tensor)
                if key in self._origins and tensor.numel() * tensor.itemsize == (
                    tensor.untyped_storage().nbytes()
                ):
                    del self._origins[key]

    def _suspect(self, func, args, kwargs, bad, node, site) -> None:
        name = func._schema.name.partition("::")[2]
        written = [self._noted(tensor) for tensor in bad if _among(tensor, args)]
        sources = [] if name in ("copy_", "fill_") else [o for o in written if o is not None]
        for tensor in tree_leaves((args, kwargs)):
            given = isinstance(tensor, torch.Tensor) and not _among(tensor, bad)
            if given and not _finite(tensor):
                sources.append(self._origin_of(tensor))
        values = [_summarise("output", tensor) for tensor in bad]
        kinds = frozenset().union(*(value.kinds for value in values))
        source = min(sources, key=lambda o: (o.placed, o.number), default=None)
        inherited = source is not None and not (source.placed and not kinds <= source.kinds)
        if inherited:
            origin = source
        else:
            origin = self._originate(func, args, kwargs, bad, values[0], node, site, source)
        for tensor in bad:
            self._note(tensor, origin)
        if node is not None:
            if node.name().endswith("AccumulateGrad"):
                self._judge(origin, "a gradient that was accumulated")
        elif site is None and any(tensor.numel() == 1 for tensor in bad):
            # A mask or another constant that was written on purpose counts once it is averaged.
            if origin.placed and not (inherited and name.startswith(_REDUCTIONS)):
                return
            self._judge(origin, "a single number outside the model, such as the loss")

    def _originate(self, func, args, kwargs, bad, value, node, site, source) -> _Origin:
        name = func._schema.name.partition("::")[2]
        again = node is not None and bool(self._stack)
        if again:  # recomputed: the same place in the forward pass, if it was seen there
            for origin in self._all:
                seen = origin.report
                if (seen.phase, seen.module, seen.op) == ("forward", site.module, name):
                    return origin
        backward = node is not None and not again
        placed = not backward and any(
            isinstance(value, float) and not math.isfinite(value)
            for value in tree_leaves((args, kwargs))
        )
        report = NonfiniteReport(
            phase="backward" if backward else "forward",
            module=None if site is None else site.module,
            module_type=None if site is None else site.module_type,
            call=0 if site is None else site.call,
            op=node.name().rpartition("::")[2] if backward else name,
            kernel=name,
            tensor="gradient" if backward else "output",
            name="output",
            value=value,
            inputs=() if placed else tuple(_argument_summaries(func, args, kwargs, bad)),
            line=None if backward else _user_line(),
            reached="",
            loss_scale=self._loss_scale,
            placed_by=None if source is None else _place(source.report),
        )
        return self._new(report, placed)

    # Origins

    def _new(self, report: NonfiniteReport, placed: bool) -> _Origin:
        origin = _Origin(report, len(self._all), placed, report.value.kinds)
        self._all.append(origin)
        return origin

    def _before(self, tensor: torch.Tensor, kind: str, name: str, site: _Site | None) -> _Origin:
        value = _summarise(name, tensor)
        report = NonfiniteReport(
            phase="before",
            module=None if site is None else site.module,
            module_type=None if site is None else site.module_type,
            call=0 if site is None else site.call,
            op=None,
            kernel=None,
            tensor=kind,
            name=name,
            value=value,
            inputs=(),
            line=None,
            reached="",
            loss_scale=self._loss_scale,
            placed_by=None,
        )
        return self._new(report, placed=value.kinds == {"-inf"})

    def _outside(self, tensor: torch.Tensor) -> _Origin:
        """For a tensor that no op seen here has made."""
        key = _storage_key(tensor)
        for kind, named in (
            ("parameter", self._model_.named_parameters()),
            ("buffer", self._model_.named_buffers()),
            ("gradient", ((n, p.grad) for n, p in self._model_.named_parameters())),
        ):
            for name, known in named:
                if known is not None and _storage_key(known) == key:
                    owner = name.rpartition(".")[0]
                    module = self._model_.get_submodule(owner)
                    site = _Site(owner, type(module).__name__, self._calls[module])
                    return self._before(tensor, kind, name, site)
        site = self._stack[-1][1] if self._stack else None
        return self._before(tensor, "constant", "a tensor from elsewhere", site)

    def _origin_of(self, tensor: torch.Tensor) -> _Origin:
        origin = self._noted(tensor)
        if origin is None:
            origin = self._outside(tensor)
            self._note(tensor, origin)
        return origin

    def _noted(self, tensor: torch.Tensor) -> _Origin | None:
        return self._origins.get(_storage_key(tensor), (None, None))[1]

    def _note(self, tensor: torch.Tensor, origin: _Origin) -> None:
        key = _storage_key(tensor)
        if key is None:
            return
        if len(self._origins) > 10_000:  # a long block, and masks in every step
            self._origins = {k: v for k, v in self._origins.items() if not v[0].expired()}
        # The weak reference keeps the address from being used again for another storage.
        self._origins[key] = StorageWeakRef(_strided(tensor).untyped_storage()), origin

    def _judge(self, origin: _Origin, reached: str) -> None:
        """The first that came to matter is the finding; nothing is watched after it."""
        self.report = dataclasses.replace(origin.report, reached=reached)
        self._watching = False
        if self._raise:
            raise NumericsError(f"find_nonfinite:\n{self.report}")

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """For checks in hooks, which are above autograd and the watch, unlike those of `_see`."""
        self._watching, before = False, self._watching
        try:
            with torch.no_grad():
                yield
        finally:
            self._watching = before and self.report is None


_active: NonfiniteFinder | None = None


class _Watch(TorchDispatchMode):
    """Hands every op and what it returned to a function."""

    def __init__(self, see: Callable[..., None]):
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._see(func, args, kwargs, out)
        return out


# Ops that compute nothing (views, memory that is not written yet), and those on lists of tensors,
# which are optimizers and scalers: what they break is found when it is next used.
_UNSEEN = ("empty", "new_empty", "resize", "set_", "_foreach", "_fused_adam", "_fused_sgd",
           "_fused_adagrad", "_amp_", "lift")  # fmt: skip
# Ops of which only the first outputs are results; the others are workspace, with any content.
_RESULTS = {"scaled_dot_product": 1, "attention_forward": 1, "ctc_loss": 1, "rnn": 3}
# Ops that make one number of many in a way that lets every one of them count.
_REDUCTIONS = ("sum", "mean", "dot", "mse_loss", "nll_loss", "smooth_l1", "huber", "binary_cross",
               "soft_margin", "l1_loss", "linalg_vector_norm", "norm")  # fmt: skip


@functools.cache
def _looks_at(func) -> int:
    """How many of the op's outputs are to be looked at."""
    name = func._schema.name.partition("::")[2]
    if func.is_view or name.startswith(_UNSEEN) or not func._schema.returns:
        return 0
    if "backward" not in name:
        for part, count in _RESULTS.items():
            if part in name:
                return count
    return len(func._schema.returns)


def _outputs(func, out: object) -> list[torch.Tensor]:
    count = _looks_at(func)
    if not count:
        return []
    if isinstance(out, torch.Tensor):
        return [out]
    if not isinstance(out, (tuple, list)):
        return []
    leaves = tree_leaves(out[:count])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values of a sparse tensor; any other as it is."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values()
    return tensor


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite. Other than floating-point and complex ones always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or _without_values(tensor):
        return True
    tensor = _strided(tensor.detach())
    if tensor.layout is not torch.strided:  # oneDNN's own
        tensor = tensor.to_dense()
    if tensor.dtype.itemsize == 1:  # the float8 formats have no sum
        tensor = tensor.to(torch.float32)
    # A sum passes every inf and NaN on, and is the cheapest look at every value there is. It may
    # also overflow by itself, so only a finite one is an answer.
    dtype = torch.float32 if tensor.dtype is torch.float16 else None
    return cmath.isfinite(tensor.sum(dtype=dtype).item()) or bool(tensor.isfinite().all())


def _without_values(tensor: torch.Tensor) -> bool:
    """Whether there is no memory behind it: reading the zeros of autograd's would be a crash."""
    return tensor.device.type == "meta" or nn.parameter.is_lazy(tensor) or tensor._is_zerotensor()


def _summarise(name: str, tensor: torch.Tensor) -> TensorSummary:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    values = torch.zeros(shape) if _without_values(tensor) else _strided(tensor.detach())
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        # Below autograd a lazy conjugate cannot be resolved, but be made one of a conjugate.
        values = torch.view_as_real(values.conj() if values.is_conj() else values)
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)
    finite = values[values.isfinite()]
    low, high = torch.aminmax(finite) if finite.numel() else (math.nan, math.nan)
    return TensorSummary(
        name=name,
        dtype=dtype,
        shape=shape,
        low=float(low),
        high=float(high),
        values=values.numel(),
        nan=int(values.isnan().sum()),
        inf=int((values == math.inf).sum()),
        neg_inf=int((values == -math.inf).sum()),
    )


def _argument_summaries(func, args, kwargs, bad) -> Iterator[TensorSummary]:
    """The floating-point tensors an op was given, by their names in its schema."""
    names = [argument.name for argument in func._schema.arguments]
    for name, given in [*zip(names, args, strict=False), *kwargs.items()]:
        tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
        for number, tensor in enumerate(tensors):
            if _among(tensor, bad) or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            yield _summarise(f"{name}[{number}]" if len(tensors) > 1 else name, tensor)


def _among(tensor: torch.Tensor, tensors: Iterable[object]) -> bool:
    return any(tensor is other for other in tensors)


def _storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return _strided(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor without storage, such as oneDNN's
        return None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _loss_scale(args: tuple) -> float | None:
    """The scale, if this product is one that `GradScaler.scale` computes."""
    frame, scale = sys._getframe(), args[1]
    if not isinstance(scale, torch.Tensor) or scale.dim():
        return None
    for _ in range(8):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code.co_name in ("scale", "apply_scale") and isinstance(
            frame.f_locals.get("self"), torch.amp.GradScaler
        ):
            return scale.item()
    return None


_LIBRARIES = (
    *(os.path.dirname(module.__file__) + os.sep for module in (torch, sys.modules[__package__])),
    contextlib.__file__,
    "<frozen",
)


def _user_line() -> str | None:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return None
    code, number = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f"{os.path.basename(code.co_filename)}:{number}, {code.co_name}: {text}"


def _place(report: NonfiniteReport) -> str:
    if report.phase == "before":
        return f"{report.tensor} {report.name!r}"
    return f"{report.op}: {report.where}"


def _advise(report: NonfiniteReport) -> str:
    if report.phase == "before":
        return _ADVICE_BEFORE[
            "statistics" if "running_" in report.name and report.tensor == "buffer"
            else report.tensor
        ]  # fmt: skip
    kernel = report.kernel.strip("_")
    kinds, half = report.value.kinds, report.value.dtype is torch.float16
    inputs = {summary.name: summary for summary in report.inputs}
    first = report.inputs[0] if report.inputs else None
    if report.placed_by:
        if "softmax" in kernel or "scaled_dot_product" in kernel:
            return (
                "A row is masked everywhere, so softmax divides 0 by 0. Leave one position of each "
                "row unmasked, or mask with torch.finfo(dtype).min instead of -inf."
            )
        return (
            "0 * -inf and -inf - -inf are NaN. Mask after the arithmetic, with torch.where or "
            "masked_fill, or with a finite value such as torch.finfo(dtype).min."
        )
    if report.value.kinds == {"NaN"} and any(not s.values for s in report.inputs):
        return "It was given no values: the mean of nothing is NaN. Skip empty batches."
    if report.phase == "backward":
        text = ""
        if report.loss_scale is not None and kinds & {"inf", "-inf"}:
            text = (
                f"The loss was scaled by {report.loss_scale:g}. If only that makes it overflow, "
                "this is what GradScaler is there for: it skips the step and lowers the scale. "
                "It is a fault if it persists at a scale of 1 (see ScaleLog); then: "
            )
        for part, advice in _ADVICE_BACKWARD.items():
            if report.op.lower().startswith(part) and not (half and kinds & {"inf", "-inf"}):
                return text + advice
        if half and kinds & {"inf", "-inf"}:
            return text + _OVERFLOW.format(what="The gradient")
        return text + (
            "An infinite derivative, or 0 * inf: keep the input of this op away from where its "
            "derivative is infinite, before the op; torch.where behind it does not help."
        )
    if half and kinds & {"inf", "-inf"} and not _at_a_pole(kernel, inputs):
        if kernel.startswith(("bmm", "baddbmm", "matmul")):
            return _OVERFLOW.format(what="The product") + (
                " Of attention scores: divide the queries by sqrt(d) before the product, or call "
                "F.scaled_dot_product_attention."
            )
        return _OVERFLOW.format(what="The result")
    for part, advice in _ADVICE_FORWARD.items():
        if kernel.startswith(part):
            return advice
    if first is not None and kinds & {"inf", "-inf"}:
        return (
            f"The result exceeds the range of {str(report.value.dtype).removeprefix('torch.')}: "
            "see how its inputs came to be so large."
        )
    return "0 * inf, inf - inf or 0 / 0: see which of its inputs is zero or very large, and why."


def _at_a_pole(kernel: str, inputs: dict[str, TensorSummary]) -> bool:
    """Whether an input is zero where that alone makes the result infinite."""
    if kernel.startswith("div"):
        divisor = inputs.get("other")
        return divisor is not None and divisor.low <= 0 <= divisor.high
    given = inputs.get("self")
    poles = ("log", "reciprocal", "rsqrt")
    return kernel.startswith(poles) and given is not None and given.low <= 0


_OVERFLOW = (
    "{what} exceeds 65504, the largest fp16: use bf16, or compute this part in fp32 "
    "(torch.autocast(device_type, enabled=False), with inputs.float())."
)
_ADVICE_BEFORE = {
    "parameter": (
        "The weights were broken before they were used. If an optimizer step did it: the learning "
        "rate is too high, or it took gradients that are not finite (with fp16: step through "
        "GradScaler). Go back to the last good checkpoint and watch the step that breaks it."
    ),
    "statistics": (
        "The running statistics took in a batch that was not finite: call reset_running_stats(), "
        "or go back to the last good checkpoint, and find that batch."
    ),
    "buffer": "Look at what wrote this buffer, or at the checkpoint it came from.",
    "input": (
        "The model was given it. Look at the data and what prepares them: missing values, a "
        "division by a standard deviation of 0, a cast to fp16 of values over 65504."
    ),
    "gradient": "It is left from an earlier backward pass: call zero_grad() before this one.",
    "constant": (
        "No op of this block made it: look at targets, constants, what was computed before, and "
        "memory from torch.empty that was never written."
    ),
}
_ADVICE_FORWARD = {
    "log_softmax": "Look at the logits: a row is infinite, or masked everywhere.",
    "logit": "Keep the input inside (0, 1): torch.logit(x, eps=1e-6).",
    "log": (
        "The log of 0 is -inf, and of a negative number NaN: clamp the input (x.clamp_min(1e-6)), "
        "or stay in log space: log_softmax, logsigmoid, binary_cross_entropy_with_logits."
    ),
    "xlogy": "The logarithm of a negative number: clamp the second argument.",
    "div": (
        "A division by zero: add an eps to the divisor or clamp it (F.normalize has one). In fp16 "
        "an eps below 6e-8 is zero itself."
    ),
    "reciprocal": "A division by zero: clamp the input away from 0 (x.clamp_min(eps)).",
    "rsqrt": "A division by zero, or the root of a negative number: torch.rsqrt(x + eps).",
    "sqrt": "The root of a negative number: clamp the input (x.clamp_min(0)).",
    "pow": (
        "A negative base with a fractional exponent, zero with a negative one, or a result out of "
        "range: clamp the base."
    ),
    "exp": (
        "The exponential overflows fp16 from 11.1 on, and fp32 and bf16 from 88.7: subtract the "
        "largest value first, as softmax and logsumexp do, or use softplus."
    ),
    "acos": "Its input must lie in [-1, 1]: clamp it, inside of 1 if gradients are needed.",
    "asin": "Its input must lie in [-1, 1]: clamp it, inside of 1 if gradients are needed.",
    "softmax": "A row holds only -inf, or an inf: look at the scores.",
    "std": "The deviation of a single value is NaN: use correction=0, or more values.",
    "var": "The variance of a single value is NaN: use correction=0, or more values.",
    "nll_loss": (
        "The mean over no targets: all of them are ignore_index, or the class weights are 0."
    ),
    "to_copy": "The value does not fit the dtype it is cast to: clamp it first, or use bf16.",
}
_ADVICE_BACKWARD = {
    "sqrt": "The derivative of sqrt is infinite at 0: torch.sqrt(x + eps).",
    "rsqrt": "The derivative of rsqrt is infinite at 0: torch.rsqrt(x + eps).",
    "pow": "The derivative of a power below 1 is infinite at 0: (x + eps) ** p.",
    "log": (
        "The derivative of log is infinite at 0: clamp its input. Where torch.where discards the "
        "result, replace the input before the log as well; 0 * inf is NaN."
    ),
    "div": "A division by (nearly) zero, whose derivative is larger still: add an eps.",
    "norm": "The derivative of this norm is infinite or undefined at 0: add an eps inside.",
    "linalg": "Undefined at 0, at equal eigenvalues or singular values: add an eps.",
    "acos": "The derivative is infinite at -1 and 1: clamp the input inside of them.",
    "asin": "The derivative is infinite at -1 and 1: clamp the input inside of them.",
}


# ------------------------------------------------------------------------------------------------


def _model(model: object, caller: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise NumericsError(f"{caller}: the model must be an nn.Module, not {type(model).__name__}")
    return model


def _log2(scale: float) -> int:
    mantissa, exponent = math.frexp(scale) if scale > 0 and math.isfinite(scale) else (0.0, 0)
    if mantissa != 0.5 or abs(exponent - 1) > _LARGEST_POWER:
        raise NumericsError(f"loss scale {scale:g}: give a power of two from 2^-64 to 2^64")
    return exponent - 1


def _power(scale: float | None) -> str:
    """A scale, which is a power of two, as people write it."""
    if scale is None:
        return "none"
    power = _log2(scale)
    return f"2^{power}" if abs(power) > 3 else f"{scale:g}"


def _percent(part: int, whole: int) -> str:
    """A share in percent, and never 0 or 100 unless it is exactly that."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if part and percent < 0.01:
        return "<0.01"
    if part < whole and percent > 99.9:
        return ">99.9"
    return f"{percent:.3g}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
