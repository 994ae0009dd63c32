"""Find the first inf or NaN, and the op that made it."""

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.errors import NumericsError
from amp_lab.core.tensors import storage_key, stored_values, tensors_in
from amp_lab.numerics.call_stack import applied_loss_scale, is_in_scaler, user_line
from amp_lab.numerics.error_notes import add_note
from amp_lab.numerics.model_weights import (
    trains_fp16_weights,
    watch_gathered,
    weights_dtype,
)
from amp_lab.numerics.nonfinite_report import NonfiniteReport, left_by_error
from amp_lab.numerics.op_constants import (
    constant_beyond,
    divisor,
    exponent,
    infinite_at_zero,
    keeps_zero,
    lost_eps,
)
from amp_lab.numerics.stored_parts import is_sharded, parts_of
from amp_lab.numerics.tensor_summary import TensorSummary, is_finite, summarise
from amp_lab.numerics.watched_ops import REDUCTIONS, Call, Site, among, argument_summaries, outputs

_OUTSIDE = Site()  # of an op that runs outside of all modules


class find_nonfinite(TorchDispatchMode):  # lower case, as torch.no_grad, which follows `with` too
    """Find the module and the op that made the first inf or NaN, in forward and backward.

    All ops of the block are watched, also those in the loss, under autocast, in activation
    checkpointing and in custom functions. The report is on an inf or NaN that reaches a gradient,
    the output of the model, or a single number outside the model, such as the loss. A mask of -inf
    is therefore not reported. If no inf or NaN arrives there, the report is on an inf in a divisor,
    or on an inf in a tensor that still existed when an error ended the block. An inf or NaN in a
    parameter or running statistic is reported when its module is called.

    Compiled functions, optimizers that work on lists of tensors, and other threads are not watched.
    In a model of FSDP2, each rank looks at its own shards.
    The host waits for each op, so use the block for one step only.

    Args:
        model: The model. Its results stay the same to the last bit.
        raise_on_first: Whether to end the block with a `NumericsError` that contains the report.

    Raises:
        NumericsError: If `model` is not an nn.Module, or if another find_nonfinite is active.

    Example:
        model = nn.Linear(4, 1)
        with find_nonfinite(model) as finder:
            loss = (model(torch.ones(2, 4)) * 0).log().mean()
            loss.backward()
        print(finder.report)  # a `NonfiniteReport`; None if no inf or NaN mattered
    """

    _active: ClassVar["find_nonfinite | None"] = None

    def __init__(self, model: nn.Module, *, raise_on_first: bool = False):
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise NumericsError(f"find_nonfinite: the model must be an nn.Module, not {kind}")
        super().__init__()
        self._model = model
        self._raise = raise_on_first
        self.report: NonfiniteReport | None = None
        self._reset()

    def _reset(self) -> None:
        self._names: dict[nn.Module, str] = {}  # of the modules in the model
        self._stack: list[tuple[nn.Module, Site]] = []  # being called, the innermost last
        self._calls: Counter[nn.Module] = Counter()  # in this forward pass
        self._site_by_node: dict[int, Site] = {}  # by the sequence number of autograd's node
        # The op that made each inf or NaN, by the storage that holds it now; not all will matter.
        self._origins: dict[int | None, tuple[StorageWeakRef, NonfiniteReport]] = {}
        self._all_origins: list[NonfiniteReport] = []
        self._watched: set[str] = set()  # names of parameters whose gradients are watched
        self._loss_scale: float | None = None  # what a scaler multiplied the loss by
        # By storage: an eps that was added to the tensor and is 0 in its dtype.
        self._lost_eps: dict[int | None, tuple[StorageWeakRef, float]] = {}
        self._divided_away: NonfiniteReport | None = None  # an inf that something was divided by
        self._bypassed = False  # whether an optimizer stepped without the scaler
        self._watching = False  # whether ops are looked at now

    def __enter__(self) -> "find_nonfinite":
        if find_nonfinite._active is not None:
            raise NumericsError(
                "find_nonfinite: one is active already; they cannot be nested, so leave that first"
            )
        self.report = None
        self._thread = threading.get_ident()
        self._first = torch._C._autograd._get_sequence_nr()  # of the nodes made in this block
        # If installing the hooks fails, those that are there are removed.
        with contextlib.ExitStack() as self._installed:
            self._install()
            self._installed = self._installed.pop_all()
        find_nonfinite._active = self
        self._watching = True
        return super().__enter__()

    def _install(self) -> None:
        """Install the hooks, and note the gradients that are not finite already."""
        for name, module in self._model.named_modules():
            self._names[module] = name
            before = module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._leave, always_call=True)
            self._installed.callback(before.remove)
            self._installed.callback(after.remove)
            if any(map(is_sharded, module.parameters(recurse=False))):
                gathered = watch_gathered(module, name, self._watch_gradient)
                self._installed.callback(gathered.remove)
        self._watch_parameters()
        self._installed.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        for parameter in self._model.parameters():
            if parameter.grad is not None and not is_finite(parameter.grad):
                self._origin_of(parameter.grad)

    def _watch_parameters(self) -> None:
        """Watch the gradients of parameters that are not watched yet."""
        for name, parameter in self._model.named_parameters():
            has_gradient = parameter.requires_grad and not nn.parameter.is_lazy(parameter)
            if has_gradient and name not in self._watched:
                self._watched.add(name)
                self._watch_gradient(parameter, name)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if find_nonfinite._active is not self:
            raise NumericsError(
                "find_nonfinite: use it in a with statement; it was left without being entered"
            )
        super().__exit__(exc_type, exc_val, exc_tb)
        add_note(exc_val, "find_nonfinite")
        find_nonfinite._active = None
        self._installed.close()
        try:
            if self._divided_away is not None and self.report is None and exc_val is None:
                self._end_with(self._divided_away, "a divisor: what was divided by it became 0")
            if self.report is None and isinstance(exc_val, Exception):
                origins = [origin for _, origin in _living(self._origins).values()]
                self.report = left_by_error(exc_val, origins)
        finally:
            self._reset()  # the object may outlive its block, and must not keep modules alive

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note if an optimizer steps on the gradients of a scaled loss without the scaler."""
        if self._loss_scale is None or is_in_scaler("step", "_maybe_opt_step"):
            return
        optimized: set[int] = set()
        for group in optimizer.param_groups:
            optimized.update(map(id, group["params"]))
        if optimized.isdisjoint(map(id, self._model.parameters())):
            return
        self._bypassed = True
        if self.report is not None:
            self.report = dataclasses.replace(self.report, bypassed=True)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A hook before a module: count its call, and check its parameters and the inputs."""
        is_recomputed = _in_backward()  # activation checkpointing calls modules once more
        is_outermost = not self._stack and not is_recomputed
        if is_outermost:
            self._calls.clear()
            self._loss_scale = None
        if not is_recomputed:
            self._calls[module] += 1
        site = Site(self._names[module], type(module).__name__, self._calls[module])
        self._stack.append((module, site))
        if self._watching:
            with self._unwatched():
                if is_outermost:
                    self._check_inputs(site, args, kwargs)
                self._check_state(module, site)

    def _leave(self, module: nn.Module, args: tuple, output: object) -> None:
        """A hook after a module; the output of the outermost one, the model, is checked."""
        while self._stack and self._stack.pop()[0] is not module:
            pass  # a module inside was left by an exception that skipped its hooks
        if not self._stack and not _in_backward():
            self._watch_parameters()  # lazy parameters exist after the first call
            for tensor in tensors_in(output):
                self._check(tensor, "the output of the model", masks=True)

    def _check(self, tensor: Tensor, reached: str, *, masks: bool = False) -> None:
        """Report a tensor, which matters, unless it is finite or, with `masks`, may be a mask."""
        if not self._watching or not self._origins:
            return
        with self._unwatched():
            if is_finite(tensor):
                return
            kinds = summarise(reached, tensor).kinds
            origin = self._origin_of(tensor)
        # -inf may be a mask for a loss that can take it, unless it is a single number.
        is_mask = origin.placed or (kinds == {"-inf"} and tensor.numel() > 1)
        if masks and is_mask:
            return
        self._end_with(origin, reached)

    def _check_inputs(self, site: Site, args: tuple, kwargs: dict[str, Any]) -> None:
        """Watch the gradients of the model's inputs, and note those that are not finite."""
        by_name = {f"argument {index}": argument for index, argument in enumerate(args)}
        by_name |= kwargs
        for name, argument in by_name.items():
            for tensor in tensors_in(argument):
                if tensor.requires_grad and tensor.is_leaf:
                    self._watch_gradient(tensor, name)
                if not is_finite(tensor) and self._noted(tensor) is None:
                    self._note_earlier(tensor, "input", name, site)

    def _check_state(self, module: nn.Module, site: Site) -> None:
        """Report a module's own parameter or running statistic that is not finite."""
        statistics = {
            name: buffer for name, buffer in module._buffers.items() if name.startswith("running_")
        }
        for name, tensor in (module._parameters | statistics).items():
            if tensor is None or is_finite(tensor):
                continue
            # An op of this block may have written it, as into a batch norm's running mean.
            origin = self._noted(tensor)
            if origin is None:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                full_name = f"{site.module}.{name}".lstrip(".")
                origin = self._note_earlier(tensor, kind, full_name, site)
            is_mask = origin.placed and not tensor.requires_grad
            if not is_mask:
                self._end_with(origin, "the forward pass")
                return

    def _watch_gradient(self, tensor: Tensor, name: str) -> None:
        def check(gradient: Tensor) -> None:
            self._check(gradient, f"the gradient of {name}")

        hook = tensor.register_hook(check)
        self._installed.callback(hook.remove)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self._watching and func is not _DETACH:
            self._check_op(func, args, kwargs or {}, out)
        return out

    def _check_op(self, func: Any, args: tuple, kwargs: dict[str, Any], out: object) -> None:
        """Look at the results of an op; called for every op, below autograd and autocast."""
        node = torch._C._current_autograd_node()
        site = self._site_of(node)
        if node is None and not self._stack and func is torch.ops.aten.mul.Tensor:
            self._loss_scale = applied_loss_scale(args) or self._loss_scale
        returned = outputs(func, out, all_finite=not self._origins)
        bad = [tensor for tensor in returned if not is_finite(tensor)]
        is_recomputed = bool(node and self._stack)
        call = Call(func, args, kwargs, node, site, is_recomputed)
        if bad:
            self._handle_nonfinite(call, bad)
        elif self._origins:
            self._check_divisor(call)
            self._forget(returned)
        self._follow_eps(call, returned)

    def _check_divisor(self, call: Call) -> None:
        """Note the first division by an inf that an op made."""
        tensor = divisor(call)
        if tensor is None:
            return
        origin = self._noted(tensor)
        if origin is None or origin.placed or origin.phase == "before":
            return
        is_overwritten = tensor is call.args[0] and call.name.endswith("_")  # by the result
        if self._divided_away is None and (is_overwritten or not is_finite(tensor)):
            self._divided_away = origin

    def _follow_eps(self, call: Call, returned: list[Tensor]) -> None:
        """Note results to which an eps was added that is 0 in their dtype, and their roots."""
        for tensor in returned:
            eps = lost_eps(call, tensor.dtype)
            if eps is None and self._lost_eps and keeps_zero(call):
                eps = self._eps_of(tensors_in((call.args, call.kwargs)))
            if eps is None:
                continue
            if len(self._lost_eps) > 10_000:
                self._lost_eps = _living(self._lost_eps)
            self._lost_eps[storage_key(tensor)] = (_storage(tensor), eps)

    def _eps_of(self, tensors: list[Tensor]) -> float | None:
        """The lost eps of the first of these tensors that has one, and a zero."""
        for tensor in tensors:
            noted = self._lost_eps.get(storage_key(tensor))
            if noted is not None and not all(part.all() for part in parts_of(tensor)):
                _, eps = noted
                return eps
        return None

    def _site_of(self, node: Any) -> Site:
        """The site of an op, noted for its node: the module called, else where `node` was made."""
        if self._stack:
            site = self._stack[-1][1]
        elif node is not None:
            site = self._site_by_node.get(node._sequence_nr(), _OUTSIDE)
        else:
            site = _OUTSIDE
        # Autograd makes an op's node, with the next number, just before it runs the op. An op
        # without a node of its own would overwrite the last number, hence `setdefault`.
        number = torch._C._autograd._get_sequence_nr() - 1
        if number >= self._first and threading.get_ident() == self._thread:
            self._site_by_node.setdefault(number, site)
            if len(self._site_by_node) > 2**18:  # thousands of steps
                del self._site_by_node[next(iter(self._site_by_node))]  # the oldest
        return site

    def _handle_nonfinite(self, call: Call, bad: list[Tensor]) -> None:
        """Find where the inf or NaN in an op's results comes from, and report it if it matters."""
        values = [summarise("output", tensor) for tensor in bad]
        kinds = frozenset().union(*(value.kinds for value in values))
        source = self._source(call, bad)
        origin = source
        # An op passes a mask on if the result has only the mask's kind; else the op made it.
        if origin is None or (origin.placed and not kinds <= origin.value.kinds):
            origin = self._originate(call, bad, values[0], source)
        for tensor in bad:
            self._note(tensor, origin)
        for tensor in call.statistics_written:
            if not is_finite(tensor):
                self._note(tensor, origin)
        if call.node is not None:
            if call.node.name().endswith("AccumulateGrad"):
                self._end_with(origin, "a gradient that was accumulated")
        elif call.site.module is None and any(tensor.numel() == 1 for tensor in bad):
            # A constant such as a mask matters once it is averaged.
            is_averaged = origin is source and call.name.startswith(REDUCTIONS)
            if is_averaged or not origin.placed:
                self._end_with(origin, "a single number outside the model, such as the loss")

    def _source(self, call: Call, bad: list[Tensor]) -> NonfiniteReport | None:
        """The earliest origin among the op's inputs, masks last; None if they are finite."""
        origins = []
        if call.name not in ("copy_", "fill_"):  # these overwrite all of their first argument
            origins = [self._noted(tensor) for tensor in bad if among(tensor, call.args)]
        written = bad + call.statistics_written
        for tensor in tensors_in((call.args, call.kwargs)):
            if not among(tensor, written) and not is_finite(tensor):
                origins.append(self._origin_of(tensor))
        known = [origin for origin in origins if origin is not None]
        return min(known, key=lambda origin: (origin.placed, origin.number), default=None)

    def _originate(
        self, call: Call, bad: list[Tensor], first_bad: TensorSummary, mask: NonfiniteReport | None
    ) -> NonfiniteReport:
        """Make the origin for this op; for a recomputed op, return that of the forward pass."""
        if call.recomputed:
            here = ("forward", call.site.module, call.name)
            for origin in self._all_origins:
                if (origin.phase, origin.module, origin.op) == here:
                    return origin
        # Fields of the report.
        facts: dict[str, Any] = {"phase": "forward", "op": call.name, "tensor": "output"}
        if call.is_backward:
            node = call.node.name().rpartition("::")[2]
            facts = {"phase": "backward", "op": node, "tensor": "gradient"}
        else:
            facts["line"] = user_line()
        if mask is not None:
            facts["placed_by"] = mask.place
        placed = call.places_nonfinite(first_bad.kinds)
        if not placed:
            written = bad + call.statistics_written
            facts["inputs"] = tuple(argument_summaries(call, written))
        return self._new(
            call.site,
            first_bad,
            placed=placed,
            kernel=call.name,
            name="output",
            constant=constant_beyond(call, first_bad.dtype),
            exponent=exponent(call),
            eps=self._eps_of(infinite_at_zero(call)),
            **facts,
        )

    def _new(self, site: Site, value: TensorSummary, **facts: Any) -> NonfiniteReport:
        """Make an origin; `facts` are the fields of the report that are not filled in here."""
        origin = NonfiniteReport(
            module=site.module,
            module_type=site.module_type,
            call=site.call,
            value=value,
            number=len(self._all_origins),
            loss_scale=self._loss_scale,
            weights=weights_dtype(self._model, site.module),
            half_weights=trains_fp16_weights(self._model),
            **facts,
        )
        self._all_origins.append(origin)
        return origin

    def _note_earlier(self, tensor: Tensor, kind: str, name: str, site: Site) -> NonfiniteReport:
        """Make and note the origin of a tensor that was not finite before any op of the block."""
        value = summarise(name, tensor)
        placed = value.kinds == {"-inf"}
        origin = self._new(site, value, placed=placed, phase="before", tensor=kind, name=name)
        self._note(tensor, origin)
        return origin

    def _origin_of(self, tensor: Tensor) -> NonfiniteReport:
        """The noted origin of a tensor, or a new one: it was there before the block."""
        noted = self._noted(tensor)
        if noted is not None:
            return noted
        for kind, name, held in self._state():
            if storage_key(held) == storage_key(tensor):
                owner = name.rpartition(".")[0]
                module = self._model.get_submodule(owner)
                site = Site(owner, type(module).__name__, self._calls[module])
                return self._note_earlier(tensor, kind, name, site)
        site = self._stack[-1][1] if self._stack else _OUTSIDE
        return self._note_earlier(tensor, "constant", "a tensor from elsewhere", site)

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        """The tensors that the model holds, each with its kind and its name."""
        for name, parameter in self._model.named_parameters():
            yield "parameter", name, parameter
        for name, buffer in self._model.named_buffers():
            yield "buffer", name, buffer
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield "gradient", name, parameter.grad

    def _noted(self, tensor: Tensor) -> NonfiniteReport | None:
        _, origin = self._origins.get(storage_key(tensor), (None, None))
        return origin

    def _note(self, tensor: Tensor, origin: NonfiniteReport) -> None:
        key = storage_key(tensor)
        if key is None:  # the tensor has no storage
            return
        if len(self._origins) > 10_000:  # a long block, and masks in every step
            self._origins = _living(self._origins)
        self._origins[key] = (_storage(tensor), origin)

    def _forget(self, overwritten: list[Tensor]) -> None:
        """Drop the origins of memory that was overwritten with finite values."""
        for tensor in overwritten:
            key = storage_key(tensor)
            nbytes = tensor.numel() * tensor.itemsize
            # If only a part was overwritten, the rest may still hold an inf or NaN.
            if key in self._origins and nbytes == tensor.untyped_storage().nbytes():
                del self._origins[key]

    def _end_with(self, origin: NonfiniteReport, reached: str) -> None:
        """Make this origin the report, and stop watching, since it is the first; raise if asked."""
        self.report = dataclasses.replace(origin, reached=reached, bypassed=self._bypassed)
        self._watching = False
        if self._raise:
            raise NumericsError(f"find_nonfinite:\n{self.report}")

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """The block for checks in hooks, whose ops must be neither watched nor recorded."""
        was_watching = self._watching
        self._watching = False
        try:
            with torch.no_grad():
                yield
        finally:
            self._watching = was_watching and self.report is None


def _storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference; while it exists, no other storage gets the same address."""
    return StorageWeakRef(stored_values(tensor).untyped_storage())


def _living(by_storage: dict) -> dict:
    """The entries, tuples that begin with a weak reference to a storage, whose storage lives."""
    return {key: entry for key, entry in by_storage.items() if not entry[0].expired()}


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # outside of backward passes it is -1


# A third of all calls. It computes nothing and has no node, so it is not looked at.
_DETACH = torch.ops.aten.detach.default
