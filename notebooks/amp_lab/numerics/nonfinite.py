"""The first value that is not finite, and the op that made it."""

import contextlib
import dataclasses
import linecache
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amp_lab
from amp_lab.errors import NumericsError
from amp_lab.numerics.checks import checked_model
from amp_lab.numerics.nonfinite_report import NonfiniteReport
from amp_lab.numerics.tensor_summary import TensorSummary, is_finite, summarise
from amp_lab.numerics.watched_ops import (
    REDUCTIONS,
    Call,
    Site,
    among,
    argument_summaries,
    outputs,
    tensors,
)
from amp_lab.tracing.ops_seen import storage_key, stored_values


@dataclass
class _Origin:
    """A place where a tensor turned non-finite, which may or may not come to matter."""

    report: NonfiniteReport
    number: int
    placed: bool  # written there on purpose, as a mask of -inf is


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
        self._model_ = checked_model(model, "find_nonfinite")
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
        self._stack: list[tuple[nn.Module, Site]] = []
        self._calls: Counter[nn.Module] = Counter()
        self._made: dict[int, Site] = {}  # by autograd's sequence number
        self._origins: dict[int | None, tuple[StorageWeakRef, _Origin]] = {}  # by storage
        self._all: list[_Origin] = []
        self._lazy: dict[str, nn.Parameter] = {}  # not there until the first call
        self._loss_scale: float | None = None
        self._thread = threading.get_ident()
        self._first = torch._C._autograd._get_sequence_nr()  # older nodes were not seen
        self._watching = True
        with contextlib.ExitStack() as stack:
            for name, module in self._model_.named_modules():
                self._names[module] = name
                before = module.register_forward_pre_hook(
                    self._enter, prepend=True, with_kwargs=True
                )
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for name, parameter in self._model_.named_parameters():
                if nn.parameter.is_lazy(parameter):
                    self._lazy[name] = parameter
                elif parameter.requires_grad:
                    self._watch_gradient(stack, parameter, f"the gradient of {name}")
                if parameter.grad is not None and not is_finite(parameter.grad):
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
        # A finder may outlive its block: it then holds neither modules nor an entry for each op.
        for held in (self._stack, self._made, self._origins, self._all, self._lazy):
            held.clear()
        self._names.clear()
        self._calls.clear()

    # Modules

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        recomputed = _in_backward()  # activation checkpointing calls modules once more
        if not recomputed:
            if not self._stack:
                self._calls.clear()
                self._loss_scale = None
            self._calls[module] += 1
        site = Site(self._names[module], type(module).__name__, self._calls[module])
        outermost = not self._stack and not recomputed
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
        outermost = not self._stack and not _in_backward()
        if outermost and self._origins:
            for tensor in tensors(output):
                self._check_output(tensor)

    def _check_output(self, tensor: torch.Tensor) -> None:
        if not self._watching:
            return
        with self._unwatched():
            if is_finite(tensor):
                return
            value, origin = summarise("output", tensor), self._origin_of(tensor)
        # A -inf may be a mask, for a loss that can take it; a single number is no mask.
        harmful = value.kinds - {"-inf"} or tensor.numel() == 1
        if harmful and not origin.placed:
            self._judge(origin, "the output of the model")

    def _check_inputs(self, site: Site, args: tuple, kwargs: dict[str, Any]) -> None:
        names = [f"argument {place}" for place in range(len(args))]
        for name, given in [*zip(names, args, strict=True), *kwargs.items()]:
            for tensor in tensors(given):
                if tensor.requires_grad and tensor.is_leaf:
                    self._watch_gradient(self._installed, tensor, f"the gradient of {name}")
                if not is_finite(tensor) and self._noted(tensor) is None:
                    self._note(tensor, self._before(tensor, "input", name, site))

    def _check_state(self, module: nn.Module, site: Site) -> None:
        statistics = {n: b for n, b in module._buffers.items() if n.startswith("running_")}
        for name, tensor in (module._parameters | statistics).items():
            if tensor is None or is_finite(tensor):
                continue
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            origin = self._before(tensor, kind, f"{site.module}.{name}".lstrip("."), site)
            self._note(tensor, origin)
            if not origin.placed or tensor.requires_grad:  # else a mask that is a parameter
                self._judge(origin, "the forward pass")
                return

    def _watch_gradient(
        self, stack: contextlib.ExitStack, tensor: torch.Tensor, reached: str
    ) -> None:
        def hook(gradient: torch.Tensor) -> None:
            if not self._watching or not self._origins:
                return
            with self._unwatched():
                origin = None if is_finite(gradient) else self._origin_of(gradient)
            if origin is not None:
                self._judge(origin, reached)

        stack.callback(tensor.register_hook(hook).remove)

    # Ops

    def _see(self, func: Any, args: tuple, kwargs: dict[str, Any], out: object) -> None:
        """Look at what an op returned; this runs below autograd and autocast, for every op."""
        if not self._watching:
            return
        node = torch._C._current_autograd_node()
        call = Call(func, args, kwargs, node, self._site_of(node))
        if node is None and not self._stack and func is torch.ops.aten.mul.Tensor:
            self._loss_scale = _loss_scale(args) or self._loss_scale
        returned = outputs(func, out)
        bad = [tensor for tensor in returned if not is_finite(tensor)]
        if bad:
            self._suspect(call, bad)
        elif self._origins:
            self._forget(returned)

    def _site_of(self, node: Any) -> Site:
        """Where an op runs: in the module that is being called; in backward, its node's."""
        site = self._stack[-1][1] if self._stack else Site()
        if not self._stack and node is not None:
            site = self._made.get(node._sequence_nr(), site)
        # Autograd numbers its nodes, and makes an op's node just before it runs the op; an op that
        # comes after without a node of its own finds the number taken.
        number = torch._C._autograd._get_sequence_nr() - 1
        if number >= self._first and threading.get_ident() == self._thread:
            self._made.setdefault(number, site)
            if len(self._made) > 2**18:  # thousands of steps
                del self._made[next(iter(self._made))]
        return site

    def _suspect(self, call: Call, bad: list[torch.Tensor]) -> None:
        """Find the origin of what an op returned that is not finite, and whether it matters."""
        values = [summarise("output", tensor) for tensor in bad]
        kinds = frozenset().union(*(value.kinds for value in values))
        source = self._source(call, bad)
        # An op passes on what was placed on purpose if it is the same kind; else it made it.
        inherited = source is not None and (not source.placed or kinds <= source.report.value.kinds)
        origin = source if inherited else self._originate(call, bad, values[0], source)
        for tensor in bad:
            self._note(tensor, origin)
        self._judge_op(call, bad, origin, inherited)

    def _judge_op(
        self, call: Call, bad: list[torch.Tensor], origin: _Origin, inherited: bool
    ) -> None:
        """Whether what the op returned shows by itself that its values matter."""
        if call.node is not None:
            if call.node.name().endswith("AccumulateGrad"):
                self._judge(origin, "a gradient that was accumulated")
            return
        # A mask or another constant that was written on purpose counts once it is averaged.
        counts = not origin.placed or (inherited and call.name.startswith(REDUCTIONS))
        single = any(tensor.numel() == 1 for tensor in bad)
        if counts and single and call.site.module is None:
            self._judge(origin, "a single number outside the model, such as the loss")

    def _source(self, call: Call, bad: list[torch.Tensor]) -> _Origin | None:
        """The earliest origin of what the op was given; before those placed on purpose, any."""
        origins = []
        if call.name not in ("copy_", "fill_"):  # which keep nothing of what they write into
            origins = [self._noted(tensor) for tensor in bad if among(tensor, call.args)]
        for tensor in tensors((call.args, call.kwargs)):
            if not among(tensor, bad) and not is_finite(tensor):
                origins.append(self._origin_of(tensor))
        known = [origin for origin in origins if origin is not None]
        return min(known, key=lambda origin: (origin.placed, origin.number), default=None)

    def _originate(
        self, call: Call, bad: list[torch.Tensor], value: TensorSummary, source: _Origin | None
    ) -> _Origin:
        recomputed = call.node is not None and bool(self._stack)
        earlier = self._seen_forward(call) if recomputed else None
        if earlier is not None:
            return earlier
        numbers = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, float)]
        backward = call.node is not None and not recomputed
        placed = not backward and not all(map(math.isfinite, numbers))
        report = self._report(
            call.site,
            value,
            phase="backward" if backward else "forward",
            op=call.node.name().rpartition("::")[2] if backward else call.name,
            kernel=call.name,
            tensor="gradient" if backward else "output",
            name="output",
            inputs=() if placed else tuple(argument_summaries(call, bad)),
            line=None if backward else _user_line(),
            placed_by=source.report.place if source else None,
        )
        return self._new(report, placed)

    def _seen_forward(self, call: Call) -> _Origin | None:
        """The origin in the forward pass of what is recomputed now, if it was seen there."""
        place = ("forward", call.site.module, call.name)
        for origin in self._all:
            seen = origin.report
            if (seen.phase, seen.module, seen.op) == place:
                return origin
        return None

    # Origins

    def _report(self, site: Site, value: TensorSummary, **seen: Any) -> NonfiniteReport:
        place = dataclasses.asdict(site)
        return NonfiniteReport(value=value, loss_scale=self._loss_scale, **place, **seen)

    def _new(self, report: NonfiniteReport, placed: bool) -> _Origin:
        self._all.append(_Origin(report, len(self._all), placed))
        return self._all[-1]

    def _before(self, tensor: torch.Tensor, kind: str, name: str, site: Site) -> _Origin:
        value = summarise(name, tensor)
        report = self._report(site, value, phase="before", tensor=kind, name=name)
        return self._new(report, placed=value.kinds == {"-inf"})

    def _outside(self, tensor: torch.Tensor) -> _Origin:
        """For a tensor that no op seen here has made."""
        key = storage_key(tensor)
        for kind, named in (
            ("parameter", self._model_.named_parameters()),
            ("buffer", self._model_.named_buffers()),
            ("gradient", ((n, p.grad) for n, p in self._model_.named_parameters())),
        ):
            for name, known in named:
                if known is not None and storage_key(known) == key:
                    owner = name.rpartition(".")[0]
                    module = self._model_.get_submodule(owner)
                    site = Site(owner, type(module).__name__, self._calls[module])
                    return self._before(tensor, kind, name, site)
        site = self._stack[-1][1] if self._stack else Site()
        return self._before(tensor, "constant", "a tensor from elsewhere", site)

    def _origin_of(self, tensor: torch.Tensor) -> _Origin:
        origin = self._noted(tensor)
        if origin is None:
            origin = self._outside(tensor)
            self._note(tensor, origin)
        return origin

    def _noted(self, tensor: torch.Tensor) -> _Origin | None:
        return self._origins.get(storage_key(tensor), (None, None))[1]

    def _note(self, tensor: torch.Tensor, origin: _Origin) -> None:
        key = storage_key(tensor)
        if key is None:
            return
        if len(self._origins) > 10_000:  # a long block, and masks in every step
            self._origins = {k: v for k, v in self._origins.items() if not v[0].expired()}
        # The weak reference keeps the address from being used again for another storage.
        self._origins[key] = StorageWeakRef(stored_values(tensor).untyped_storage()), origin

    def _forget(self, overwritten: list[torch.Tensor]) -> None:
        """Drop what was known of memory that finite values have been written over."""
        for tensor in overwritten:
            key, size = storage_key(tensor), tensor.numel() * tensor.itemsize
            # A part of it may leave a value that is not finite in the rest.
            if key in self._origins and size == tensor.untyped_storage().nbytes():
                del self._origins[key]

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
    *(os.path.dirname(module.__file__) + os.sep for module in (torch, amp_lab)),
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
