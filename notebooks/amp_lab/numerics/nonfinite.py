"""The first value that is not finite, and the op that made it."""

import cmath
import contextlib
import dataclasses
import functools
import linecache
import math
import os
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amp_lab
from amp_lab.errors import NumericsError
from amp_lab.numerics.checks import checked_model, percent
from amp_lab.report import dtype_name


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
        text = f"{dtype_name(self.dtype)} {self.shape}"
        if not self.values:
            return f"{text}, no values"
        bad = self.nan + self.inf + self.neg_inf
        if bad:
            counts = (("NaN", self.nan), ("inf", self.inf), ("-inf", self.neg_inf))
            kinds = [f"{count:,} {kind}" for kind, count in counts if count]
            text += f", {percent(bad, self.values)} % non-finite ({', '.join(kinds)})"
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
            f"The result exceeds the range of {dtype_name(report.value.dtype)}: "
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
