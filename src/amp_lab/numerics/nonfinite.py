"""Find the first inf or NaN, and the op that made it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.autocast_inside import autocast_inside_kernels
from amp_lab.core.errors import NumericsError
from amp_lab.core.tensors import storage_key, tensors_in
from amp_lab.numerics import op_constants
from amp_lab.numerics.autocast_effect import autocast_around
from amp_lab.numerics.call_sites import CallSites
from amp_lab.numerics.call_stack import in_backward, user_line
from amp_lab.numerics.error_notes import add_note
from amp_lab.numerics.lost_eps import LostEps
from amp_lab.numerics.model_weights import (
    accumulated_into,
    own_state_of,
    state_of,
    trains_fp16_weights,
    watch_gathered,
    weights_dtype,
)
from amp_lab.numerics.nonfinite_report import NonfiniteReport, left_by_error
from amp_lab.numerics.optimizer_step import StepWatch
from amp_lab.numerics.scaler_watch import ScalerWatch
from amp_lab.numerics.storage_notes import StorageNotes
from amp_lab.numerics.stored_parts import is_sharded
from amp_lab.numerics.tensor_summary import TensorSummary, is_finite, summarise
from amp_lab.numerics.watched_ops import REDUCTIONS, Call, Site, among, argument_summaries, outputs


class find_nonfinite(TorchDispatchMode):  # lower case, as torch.no_grad, which follows `with` too
    """Find the module and the op that produced the first inf or NaN, in forward and backward.

    `find_nonfinite` watches all ops of the block, also in the loss, under autocast, in activation
    checkpointing and in custom functions. It reports an inf or NaN that reaches a gradient, the
    output of the model, or a single number outside the model, such as the loss. A mask of -inf is
    therefore not reported. If there is no such inf or NaN, it reports an inf in a divisor, or an
    inf in a tensor that still existed when an error ended the block. It reports an inf or NaN in a
    parameter or running statistic when the module is called. After the step of an optimizer, it
    reports a parameter, in the model or outside, that this step made inf or NaN.

    Compiled functions and other threads are not watched.
    With FSDP2, each rank watches the ops and gradients of its batch, and its shards of the weights.
    The host waits for each op, so use the block for one step only.

    Args:
        model: The model. The block does not change the results of the model.
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
        self._sites = CallSites()
        # The origin of each inf or NaN, by the storage that holds it now: a report on the op that
        # made it. It is `placed` if the code wrote the value on purpose, as a mask of -inf.
        self._origins = StorageNotes[NonfiniteReport]()
        self._all_origins: list[NonfiniteReport] = []  # in the order in which they were found
        self._watched: set[str] = set()  # names of parameters whose gradients are watched
        self._scaler = ScalerWatch()
        self._lost_eps = LostEps()
        self._divided_away: NonfiniteReport | None = None  # an inf that something was divided by
        self._steps = StepWatch()
        self._autocast: torch.dtype | None = None  # around the module that was called last
        self._watching = False  # whether ops are looked at now

    def __enter__(self) -> "find_nonfinite":
        if find_nonfinite._active is not None:
            raise NumericsError(
                "find_nonfinite: another find_nonfinite block is still open. The blocks cannot be "
                "nested, so leave the other block first."
            )
        self.report = None
        self._reset()
        # `__exit__` removes the hooks. If installing one fails, this block removes those before it.
        with contextlib.ExitStack() as hooks:
            self._installed = hooks
            self._install()
            self._installed = hooks.pop_all()
        find_nonfinite._active = self
        self._watching = True
        return super().__enter__()

    def _install(self) -> None:
        """Install all hooks, and note the gradients that are not finite already.

        What removes a hook is put on `self._installed`.
        """
        self._installed.enter_context(autocast_inside_kernels())
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
        before_step = optimizers.register_optimizer_step_pre_hook(self._before_step)
        self._installed.callback(before_step.remove)
        after_step = optimizers.register_optimizer_step_post_hook(self._after_step)
        self._installed.callback(after_step.remove)
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
                "find_nonfinite: __exit__ was called without __enter__. Use find_nonfinite in a "
                "with statement."
            )
        super().__exit__(exc_type, exc_val, exc_tb)
        add_note(exc_val, "find_nonfinite")
        find_nonfinite._active = None
        self._installed.close()
        try:
            if self._divided_away is not None and self.report is None and exc_val is None:
                self._end_with(self._divided_away, "a divisor: the quotient became 0")
            if self.report is None and isinstance(exc_val, Exception):
                self.report = left_by_error(exc_val, self._origins.living())
        finally:
            self._reset()  # the object may outlive its block, and must not keep modules alive

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A hook before an optimizer's step: note its state, and if it bypasses the scaler."""
        if self._watching:
            with self._unwatched():
                self._steps.start(optimizer)
        self._scaler.before_step(optimizer, self._model)
        if self.report is not None:
            self.report = dataclasses.replace(self.report, bypassed=self._scaler.bypassed)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A hook after an optimizer's step: report the first parameter that the step broke."""
        if not self._watching:
            return
        with self._unwatched():
            fields = self._steps.end(optimizer, self._model)
            if fields is not None:
                self._end_with(self._new_origin(Site(), **fields), "the weights after the step")

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A hook before a module: note its call, and check its parameters and the inputs."""
        is_recomputed = in_backward()  # activation checkpointing calls modules once more
        is_outermost = not self._sites.in_module and not is_recomputed
        if is_outermost:
            self._scaler.loss_scale = None
        self._autocast = autocast_around(module)
        site = self._sites.enter(module, self._names[module], is_recomputed=is_recomputed)
        if self._watching:
            with self._unwatched():
                if is_outermost:
                    self._check_inputs(site, args, kwargs)
                self._check_state(module, site)

    def _leave(self, module: nn.Module, args: tuple, output: object) -> None:
        """A hook after a module: note its end, and check the output of the outermost one."""
        self._sites.leave(module)
        if not self._sites.in_module and not in_backward():
            self._watch_parameters()  # lazy parameters exist after the first call
            for tensor in tensors_in(output):
                self._check(tensor, "the output of the model", allow_masks=True)

    def _check(self, tensor: Tensor, reached: str, *, allow_masks: bool = False) -> None:
        """Report a tensor in which an inf or NaN matters, unless it is finite.

        `reached` says in the report what the tensor is. With `allow_masks`, a tensor whose -inf may
        be a mask is not reported either.
        """
        if not self._watching or not self._origins:
            return
        with self._unwatched():
            if is_finite(tensor):
                return
            kinds = summarise(reached, tensor).kinds
            origin = self._origin_of(tensor)
        # -inf may be a mask for a loss that can take it, unless it is a single number.
        may_be_mask = origin.placed or (kinds == {"-inf"} and tensor.numel() > 1)
        if allow_masks and may_be_mask:
            return
        self._end_with(origin, reached)

    def _check_inputs(self, site: Site, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the model's inputs that are not finite, and watch the gradients of all inputs."""
        by_name = {f"argument {index}": argument for index, argument in enumerate(args)}
        by_name |= kwargs
        for name, argument in by_name.items():
            for tensor in tensors_in(argument):
                if tensor.requires_grad and tensor.is_leaf:
                    self._watch_gradient(tensor, name)
                if not is_finite(tensor) and self._origins.get(tensor) is None:
                    is_trained = tensor.requires_grad and tensor.is_leaf
                    kind = "trained input" if is_trained else "input"
                    self._note_earlier(tensor, kind, name, site)

    def _check_state(self, module: nn.Module, site: Site) -> None:
        """Report the first parameter or running statistic of a module that is not finite.

        Those of the modules inside it are checked when they are called.
        """
        for name, tensor in own_state_of(module):
            if is_finite(tensor):
                continue
            # An op of this block may have written it, as into a batch norm's running mean.
            origin = self._origins.get(tensor)
            if origin is None:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                full_name = f"{site.module}.{name}".lstrip(".")
                origin = self._note_earlier(tensor, kind, full_name, site)
            is_mask = origin.placed and not tensor.requires_grad
            if not is_mask:
                self._end_with(origin, "the forward pass")
                return

    def _watch_gradient(self, tensor: Tensor, name: str) -> None:
        """Check each gradient that arrives at a tensor; `name` names the tensor in the report."""

        def check(gradient: Tensor) -> None:
            self._check(gradient, f"the gradient of {name}")

        hook = tensor.register_hook(check)
        self._installed.callback(hook.remove)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._sites.in_module:
            self._scaler.note_op(func, args)
        if self._watching:
            self._note_left_gradient(args)
        out = func(*args, **(kwargs or {}))
        if self._watching and func is not _DETACH:
            self._check_op(func, args, kwargs or {}, out)
        return out

    def _note_left_gradient(self, args: tuple) -> None:
        """Note a gradient that was not finite before autograd adds the next gradient to it.

        It may belong to a tensor outside the model.
        """
        gradient = accumulated_into(torch._C._current_autograd_node(), args)
        if gradient is None or self._origins.get(gradient) is not None or is_finite(gradient):
            return
        self._note_earlier(gradient, "gradient", "a tensor outside the model", Site())

    def _check_op(self, func: Any, args: tuple, kwargs: dict[str, Any], out: object) -> None:
        """Look at the results of an op; called for every op, below autograd and autocast."""
        node = torch._C._current_autograd_node()  # None outside of a backward pass
        site = self._sites.site_of_op(node)
        results = outputs(func, out, all_finite=not self._origins)
        nonfinite = [tensor for tensor in results if not is_finite(tensor)]
        # In a backward pass, only activation checkpointing calls modules.
        is_recomputed = node is not None and self._sites.in_module
        call = Call(func, args, kwargs, node, site, is_recomputed)
        if nonfinite:
            self._handle_nonfinite(call, nonfinite)
        elif self._origins:
            self._note_division(call)
            self._forget(results)
        self._lost_eps.follow(call, results)

    def _note_division(self, call: Call) -> None:
        """Note the first division by an inf that an op made: its result, 0, hides the inf."""
        if self._divided_away is not None:
            return
        tensor = op_constants.divisor(call)
        if tensor is None:
            return
        origin = self._origins.get(tensor)
        if origin is None or origin.placed or origin.phase == "before":  # no op made the inf
            return
        # An in-place op such as reciprocal_ has overwritten the divisor with its finite result.
        is_overwritten = tensor is call.args[0] and call.name.endswith("_")
        # An origin belongs to the whole storage, of which the divisor may be a finite part.
        if is_overwritten or not is_finite(tensor):
            self._divided_away = origin

    def _handle_nonfinite(self, call: Call, nonfinite: list[Tensor]) -> None:
        """Find and note the origin of the inf or NaN in an op's results; report it if it matters.

        `nonfinite` are the results of the op that are not finite.
        """
        summaries = [summarise("output", tensor) for tensor in nonfinite]
        kinds = frozenset().union(*(summary.kinds for summary in summaries))
        input_origin = self._origin_of_inputs(call, nonfinite)
        if input_origin is None:
            origin = self._originate(call, nonfinite, summaries[0], mask=None)
        elif input_origin.placed and not kinds <= input_origin.value.kinds:
            # The op has made another kind from a mask: a NaN from -inf.
            origin = self._originate(call, nonfinite, summaries[0], mask=input_origin)
        else:
            origin = input_origin
        for tensor in nonfinite:
            self._origins.put(tensor, origin)
        for tensor in call.statistics_written:
            if not is_finite(tensor):
                self._origins.put(tensor, origin)
        is_passed_on = origin is input_origin
        self._report_if_it_matters(call, nonfinite, origin, is_passed_on=is_passed_on)

    def _report_if_it_matters(
        self, call: Call, nonfinite: list[Tensor], origin: NonfiniteReport, *, is_passed_on: bool
    ) -> None:
        """Report an origin if the op's results are a parameter's gradient or a loss.

        `is_passed_on` says whether the inf or NaN was in the inputs of the op already.
        """
        if call.node is not None:
            if call.node.name().endswith("AccumulateGrad"):
                self._end_with(origin, "a gradient that was accumulated")
            return
        is_outside = call.site.module is None
        # `_after_step` reports what the ops of an optimizer break.
        if (
            not is_outside
            or self._steps.is_in_step
            or all(tensor.numel() != 1 for tensor in nonfinite)
        ):
            return
        # A constant such as a mask matters once it is averaged.
        is_averaged = is_passed_on and call.name.startswith(REDUCTIONS)
        if is_averaged or not origin.placed:
            self._end_with(origin, "a single number outside the model, such as the loss")

    def _origin_of_inputs(self, call: Call, nonfinite: list[Tensor]) -> NonfiniteReport | None:
        """The earliest origin among an op's inputs, masks last; None if the inputs were finite.

        `nonfinite` are the results that are not finite. Those of an in-place op are inputs, too.
        """
        origins = []
        # The inputs that the op has written into: whether they were finite before is known only if
        # they have an origin.
        if call.name not in ("copy_", "fill_"):  # these overwrite all of their first argument
            overwritten = [tensor for tensor in nonfinite if among(tensor, call.args)]
            origins = [self._origins.get(tensor) for tensor in overwritten]
        # All other inputs.
        written = nonfinite + call.statistics_written
        for tensor in tensors_in((call.args, call.kwargs)):
            if not among(tensor, written) and not is_finite(tensor):
                origins.append(self._origin_of(tensor))
        known = [origin for origin in origins if origin is not None]
        return min(known, key=lambda origin: (origin.placed, origin.number), default=None)

    def _originate(
        self,
        call: Call,
        nonfinite: list[Tensor],
        first_summary: TensorSummary,
        mask: NonfiniteReport | None,
    ) -> NonfiniteReport:
        """Make the origin for this op; for a recomputed op, return that of the forward pass.

        `nonfinite` are the results that are not finite, and `first_summary` describes the first.
        `mask` is the origin of the mask from which the op made them, if it did.
        """
        if call.recomputed:
            here = ("forward", call.site.module, call.name)
            for origin in self._all_origins:
                if (origin.phase, origin.module, origin.op) == here:
                    return origin
        if call.is_backward:
            node_name = call.node.name().rpartition("::")[2]
            fields: dict[str, Any] = {"phase": "backward", "op": node_name, "tensor": "gradient"}
        else:
            fields = {"phase": "forward", "op": call.name, "tensor": "output", "line": user_line()}
        if mask is not None:
            fields["placed_by"] = mask.place
        placed = call.places_nonfinite(first_summary.kinds)
        if not placed:
            written = nonfinite + call.statistics_written
            fields["inputs"] = tuple(argument_summaries(call, written))
        return self._new_origin(
            call.site,
            first_summary,
            placed=placed,
            kernel=call.name,
            name="output",
            constant=op_constants.constant_beyond(call, first_summary.dtype),
            exponent=op_constants.exponent(call),
            eps=self._lost_eps.of(op_constants.infinite_at_zero(call)),
            autocast=self._autocast,
            **fields,
        )

    def _new_origin(self, site: Site, value: TensorSummary, **fields: Any) -> NonfiniteReport:
        """Make an origin; `fields` are the fields of the report that are not filled in here."""
        origin = NonfiniteReport(
            module=site.module,
            module_type=site.module_type,
            call=site.call,
            value=value,
            number=len(self._all_origins),
            loss_scale=self._scaler.loss_scale,
            weights=weights_dtype(self._model, site.module),
            half_weights=trains_fp16_weights(self._model),
            **fields,
        )
        self._all_origins.append(origin)
        return origin

    def _note_earlier(self, tensor: Tensor, kind: str, name: str, site: Site) -> NonfiniteReport:
        """Make and note the origin of a tensor that was not finite before any op of the block."""
        value = summarise(name, tensor)
        origin = self._new_origin(
            site,
            value,
            placed=value.kinds == {"-inf"},  # -inf alone is taken for a mask
            phase="before",
            tensor=kind,
            name=name,
        )
        self._origins.put(tensor, origin)
        return origin

    def _origin_of(self, tensor: Tensor) -> NonfiniteReport:
        """The noted origin of a tensor that is not finite, or else a new one.

        Without a noted origin, no op of the block made the inf or NaN. The new origin says if the
        tensor is a parameter, a buffer or a gradient of the model.
        """
        noted_origin = self._origins.get(tensor)
        if noted_origin is not None:
            return noted_origin
        for kind, name, state in state_of(self._model):
            if storage_key(state) == storage_key(tensor):
                owner = name.rpartition(".")[0]
                module = self._model.get_submodule(owner)
                where = self._sites.last_call(module, owner)
                return self._note_earlier(tensor, kind, name, where)
        where = self._sites.current
        return self._note_earlier(tensor, "constant", "a tensor from outside the block", where)

    def _forget(self, overwritten: list[Tensor]) -> None:
        """Drop the origins of memory that was overwritten with finite values."""
        for tensor in overwritten:
            if self._origins.get(tensor) is None:
                continue
            # If only a part was overwritten, the rest may still hold an inf or NaN.
            nbytes = tensor.numel() * tensor.itemsize
            if nbytes == tensor.untyped_storage().nbytes():
                self._origins.drop(tensor)

    def _end_with(self, origin: NonfiniteReport, reached: str) -> None:
        """Make this origin the report, and stop watching, since it is the first; raise if asked."""
        self.report = dataclasses.replace(origin, reached=reached, bypassed=self._scaler.bypassed)
        self._watching = False
        if self._raise:
            raise NumericsError(f"find_nonfinite:\n{self.report}")

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """A block for checks in hooks: the mode ignores their ops, and autograd records none."""
        was_watching = self._watching
        self._watching = False
        try:
            with torch.no_grad():
                yield
        finally:
            self._watching = was_watching and self.report is None


# A third of all calls. It computes nothing and has no node, so it is not looked at.
_DETACH = torch.ops.aten.detach.default
