"""Record a run op by op: in which module, its result in fp64, and its rounding error."""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from amp_lab.core.autocast_inside import autocast_inside_kernels
from amp_lab.core.backends import BACKENDS
from amp_lab.core.errors import AmpLabError
from amp_lab.core.tensors import LOWER_DTYPES, named_tensors, storage_key, tensors_in
from amp_lab.difference import rounding
from amp_lab.difference.merged_values import MergedValues, find_merged_values
from amp_lab.difference.raised import Failure, RunRaised, failure_above_ops
from amp_lab.difference.records import Caller, CheckedOp, RunLog
from amp_lab.difference.result import location_text
from amp_lab.tracing.operands import Operand, Source, SourceKind
from amp_lab.tracing.ops_seen import computes_nothing, op_name

# Without rounding, these leave values as they are. Runs in different formats have different casts.
_CASTS_AND_COPIES = frozenset(
    ("_to_copy", "clone", "copy_", "lift_fresh", "lift_fresh_copy", "detach")
)
_SETTINGS = (bool, int, float, str, torch.dtype)  # types of an op's arguments besides tensors


class _OpRun(NamedTuple):
    """What an op returned, and what it would have returned without rounding."""

    out: Any  # the result, which the model gets
    exact: Any  # the result on the shadows of the inputs, in fp64; None if fp64 cannot run the op
    wide_inputs: tuple | None  # (args, kwargs), copied to fp64 before the op; None if not needed


def record_run(name: str, run: Callable[[], Any], other: RunLog | None = None) -> RunLog:
    """Call `run`; return the log of its ops. The buffers of its models are restored afterwards.

    `name` is "A" or "B". `other` is the log of the run to compare with: a weight or input that
    differs from one of that run only in its dtype gets the same fp64 values, so the cast of a model
    alone is no difference. Raises `RunRaised` if the run raises.
    """
    recorder = _Recorder(RunLog(name), other)
    has_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would run a whole layer as one op
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            autocast_inside_kernels(),
            recorder.follow_modules(),
            recorder,
        ):
            torch.manual_seed(0)
            recorder.finish(run())
    except AmpLabError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise recorder.raised(error) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fastpath)
    return recorder.log


class _Recorder(TorchDispatchMode):
    """A mode that runs each op, runs it in fp64 too, and adds a record to the log.

    The fp64 counterpart of a tensor, computed in fp64 from the beginning of the run, is called its
    shadow.
    """

    def __init__(self, log: RunLog, other: RunLog | None):
        super().__init__()
        self.log = log
        self._other = other
        self._shadows = WeakTensorKeyDictionary()  # by tensor, as long as it lives
        self._noise = rounding.EXACT  # the relative error that shadows may have by now
        self._largest_roundoff = 0.0  # unit roundoff of the coarsest format so far
        self._autocast_dtype: torch.dtype | None = None
        self._names: dict[nn.Module, str] = {}
        self._by_storage: dict[int | None, str] = {}  # names of parameters and buffers
        # The module calls that are running, the innermost last; the first is the code outside.
        self._callers = [Caller()]
        self._calls: Counter[nn.Module] = Counter()  # how often each module was called
        # Reference to a storage, and the ops that wrote into it last, by address of the storage.
        self._last_writers: dict[int | None, tuple[StorageWeakRef, tuple[CheckedOp, ...]]] = {}
        # (module, name in the module, buffer, copy of its first value)
        self._initial_buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._random_op_calls: Counter[tuple] = Counter()  # by caller and op
        # Of parameters, buffers and the inputs of the first module that is called, by storage.
        self._sources: dict[int | None, Source] = {}
        self._failure: Failure | None = None  # of the last op that raised

    # Modules

    @contextlib.contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Follow the calls of all modules in the block, and restore buffers at its end."""
        # Hooks for all modules in the process, since the run may call any model.
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        with before, after:
            try:
                yield
            finally:
                for module, name, buffer, value in self._initial_buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer  # the run may have put another in its place

    def _enter(self, module: nn.Module, args: Any) -> None:
        """A hook before a module: note its call; of the first one, also its inputs and autocast."""
        if module not in self._names:
            self._register_modules(module)
        if not self._calls:
            self._note_autocast()
            self.log.batch = _batch_size(args)
            for path, tensor in named_tensors(args):
                source = Source(SourceKind.INPUT, f"input {path[1:]}")
                self._sources.setdefault(storage_key(tensor), source)
        self._calls[module] += 1
        caller = Caller(self._names[module], type(module).__name__, self._calls[module])
        self._callers.append(caller)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook after a module: end its call; of an outermost one, note the ops of its output."""
        name = self._names[module]
        # A module inside may have ended without a call of its hooks: then its call ends here, too.
        while len(self._callers) > 1:
            caller = self._callers.pop()
            if caller.module == name:
                break
        if len(self._callers) == 1:
            self.log.result_ops.update(self._producers_of(output))

    def _register_modules(self, root: nn.Module) -> None:
        """Register the names of an outermost module, of all modules inside it, and of tensors."""
        # A run may call several models: the names of all but the first begin with their class.
        prefix = type(root).__name__ if self._names else ""
        for name, module in root.named_modules():
            if prefix:
                name = f"{prefix}.{name}".rstrip(".")
            name = name.replace("_orig_mod.", "")  # a module inside that torch.compile has wrapped
            self._names.setdefault(module, name)
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is None:
                    continue
                self._register_tensor(f"{name}.{key}".lstrip("."), tensor)
                if key in module._buffers:
                    with _disable_current_modes():  # the copy is no op of the run
                        self._initial_buffers.append((module, key, tensor, tensor.clone()))

    def _register_tensor(self, name: str, tensor: Tensor) -> None:
        """Register a parameter or buffer by its qualified name and its storage."""
        key = storage_key(tensor)
        noun = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        self.log.leaves[name] = tensor
        self._by_storage.setdefault(key, name)
        self._sources.setdefault(key, Source(SourceKind.OWN, f"{noun} {name}"))

    def _note_autocast(self) -> None:
        """Note the dtype of autocast if it is on now; if it is off, keep what was noted before.

        This is called with the first module and, as long as none is called, with each op.
        """
        for device_type in BACKENDS:
            if torch.is_autocast_enabled(device_type):
                self._autocast_dtype = torch.get_autocast_dtype(device_type)

    def finish(self, result: Any) -> None:
        """Complete the log with the run's formats, its result, and the ops that computed it."""
        log = self.log
        self._note_precision()
        for tensor in tensors_in(result):
            if _is_inexact(tensor) and tensor in self._shadows:
                log.results.append((tensor.detach(), self._shadows[tensor]))
        log.batch = log.batch or _batch_size(result)
        producers = self._producers_of(result)
        if producers:
            log.result_ops = set(producers)
        elif not log.result_ops:  # `_leave` adds what the outermost modules returned
            log.result_ops = set(log.records[-1:])  # the last op, if there is one

    def _note_precision(self) -> None:
        """Note the format, the device and the precision settings of the run in the log."""
        log = self.log
        sizes = Counter({torch.float32: 0})  # weights in each dtype; fp32 if there are none
        for tensor in log.leaves.values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                sizes[tensor.dtype] += tensor.numel()
                log.device_type = tensor.device.type
        most_frequent_dtype = max(sizes, key=sizes.__getitem__)
        log.format = self._autocast_dtype or most_frequent_dtype
        matmul_roundoff = rounding.float32_roundoff("mm", log.device_type)  # tells fp32 from TF32
        log.precision_settings = (
            log.format,
            self._autocast_dtype,
            matmul_roundoff,
            log.device_type,
        )

    # Ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._calls:
            self._note_autocast()
        # Autocast has cast the arguments already; the ops that run here must not cast again.
        with torch._C._DisableAutocast():
            try:
                return self._run_op(func, args, kwargs or {})
            except Exception as error:
                self._failure = self._describe_failure(error, func, (args, kwargs))
                raise

    def _run_op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op on its arguments and on their shadows, record it, and return its result."""
        name = op_name(func)
        merged = None
        if name not in _CASTS_AND_COPIES and not computes_nothing(func):
            # Before the op runs, since it may write into its inputs.
            merged = self._merged_values_in((args, kwargs))
        # Attention runs on the shadows like other ops: it is random only with dropout.
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name:
            run = self._run_random_op(func, name, args, kwargs)
        else:
            run = self._run_with_shadows(func, name, args, kwargs)
        if name == "_local_scalar_dense":  # of tensor.item()
            # The number from fp64 instead of the run's own, so that a branch on it is the same in
            # both runs.
            return run.exact
        self._set_shadows(func, tensors_in(run.out), tensors_in(run.exact))
        self._add_record(func, (args, kwargs), run, merged)
        return run.out

    def _merged_values_in(self, inputs: tuple) -> MergedValues | None:
        """The values that 16 bits make equal, in the first input that has any; else None."""
        for tensor in tensors_in(inputs):
            if tensor.dtype in LOWER_DTYPES:
                merged = find_merged_values(tensor, self._shadow_of(tensor))
                if merged is not None:
                    return merged
        return None

    def _set_shadows(self, func: Any, outs: list[Tensor], exact: list[Tensor]) -> None:
        """Make `exact`, the results of an op in fp64, the shadows of its real results `outs`.

        A result without a match in `exact` gets a copy of itself in fp64 as its shadow.
        """
        if len(exact) not in (1, len(outs)):  # unclear which result belongs to which
            exact = []
        for i, tensor in enumerate(outs):
            roundoff = rounding.unit_roundoff(tensor.dtype)
            self._largest_roundoff = max(self._largest_roundoff, roundoff)
            # One exact result, as of attention, is that of the first output.
            if i < len(exact) and exact[i].shape == tensor.shape:
                shadow = exact[i]
            else:
                shadow = rounding.widen(tensor)
                # The copy keeps all rounding so far, estimated as 64 roundings in the coarsest
                # format. Results after the first, such as the logsumexp of attention, do not
                # matter, since no other op uses them.
                if i == 0:
                    self._noise = max(self._noise, 64 * self._largest_roundoff)
            self._set_shadow(tensor, shadow, is_computed=not computes_nothing(func))

    def _set_shadow(self, tensor: Tensor, shadow: Tensor, is_computed: bool) -> None:
        """Make `shadow` the shadow of `tensor`, a result of an op.

        `is_computed` is False for a view and for empty memory, whose values no op has computed.
        """
        if tensor in self._shadows:
            # An in-place op. Its shadow is written in place too, for the views of it.
            shadow = self._shadows[tensor].copy_(shadow)
        elif is_computed and _is_inexact(tensor):
            shadow = rounding.with_strides_of(tensor, shadow)
        if is_computed and not _is_inexact(tensor):
            # Integers and bools, such as an argmax, are set to those of fp64. Otherwise rounding
            # could break a tie in another way in each run, and they would take different branches.
            tensor.copy_(shadow)
        self._shadows[tensor] = shadow

    def _run_with_shadows(
        self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> _OpRun:
        """Run an op on its inputs, and in fp64 on their shadows.

        `wide_inputs` of the result are for `rounding.effective_roundoff`, and None for a view.
        """
        if not tensors_in((args, kwargs)):  # such as arange or full, which can be made in fp64
            out = func(*args, **kwargs)
            if _is_inexact(out):
                kwargs = kwargs | {"dtype": torch.float64}
            return _OpRun(out, rounding.run_in_fp64(func, args, kwargs), (args, kwargs))
        # The op itself runs last, since it may write into its arguments.
        wide_inputs = None
        if not computes_nothing(func):
            wide_inputs = rounding.widen_inputs(name, args, kwargs)
        shadow_args, shadow_kwargs = tree_map_only(Tensor, self._shadow_of, (args, kwargs))
        exact = rounding.run_in_fp64(func, shadow_args, shadow_kwargs)
        out = func(*args, **kwargs)
        return _OpRun(out, exact, wide_inputs)

    def _run_random_op(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> _OpRun:
        """Run an op that draws random numbers, such as dropout.

        The seed depends on the module, the op and the count of its calls, so that both runs draw
        the same numbers. They count as exact: the result in fp64 is a copy of the result or, for
        dropout, the shadow of the input with the same mask. `wide_inputs` are None, since the
        roundoff of these ops is not measured.
        """
        caller = self._callers[-1]
        self._random_op_calls[caller, name] += 1
        key = (caller, name, self._random_op_calls[caller, name])
        torch.manual_seed(zlib.crc32(repr(key).encode()))
        out = func(*args, **kwargs)
        if name != "native_dropout":
            exact = [rounding.widen(tensor) for tensor in tensors_in(out)]
            return _OpRun(out, exact, wide_inputs=None)
        inputs, probability, is_training = args
        keep_probability = 1 - probability
        scale = 1.0
        if keep_probability == 0:
            scale = 0.0
        elif is_training is not False:  # None counts as True
            scale = 1 / keep_probability
        _, mask = out
        exact = self._shadow_of(inputs) * mask.to(torch.float64) * scale
        return _OpRun(out, (exact, mask), wide_inputs=None)

    def _shadow_of(self, tensor: Tensor) -> Tensor:
        """The shadow of an argument, which is made now if no op of the run computed it."""
        if tensor not in self._shadows:
            self._shadows[tensor] = self._new_shadow(tensor)
        return self._shadows[tensor]

    def _new_shadow(self, tensor: Tensor) -> Tensor:
        """Make the shadow of a parameter, a buffer, an input or a constant.

        If the other run has the same values in another format, the shadow is a copy of those, so
        that the formats of weights and inputs do not count as a difference. Inputs and constants
        have no name; they are noted in the log, where the other run finds them by their values.
        """
        name = self._by_storage.get(storage_key(tensor))
        if name is None:
            self.log.unnamed.append(tensor)
        if self._other is not None and tensor.is_floating_point():
            candidates = self._other.unnamed
            if name in self._other.leaves:
                candidates = [self._other.leaves[name]]
            for candidate in candidates:
                if candidate.dtype != tensor.dtype and have_same_values(candidate, tensor):
                    return rounding.widen(candidate).to(tensor.device)
        return rounding.widen(tensor)

    # Errors

    def raised(self, error: Exception) -> RunRaised:
        """The `RunRaised` for an error that ended the run: it says where, and what to do."""
        failure = self._failure
        if failure is None or failure.error is not error:  # no op raised this error
            failure = failure_above_ops(error, self._names)
        leaves = self.log.leaves.values()
        device_type = next((tensor.device.type for tensor in leaves), "cpu")
        has_low_weights = any(tensor.dtype in LOWER_DTYPES for tensor in leaves)
        return RunRaised(self.log.name, failure, device_type, has_low_weights)

    def _describe_failure(self, error: Exception, func: Any, inputs: tuple) -> Failure:
        """Describe an error that an op raised; `inputs` are its (args, kwargs)."""
        floats = [tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()]
        operands = [Operand(tensor.dtype, self._describe_source(tensor)) for tensor in floats]
        caller = self._callers[-1]
        return Failure(
            error, op_name(func), caller.module, caller.module_type, operands=tuple(operands)
        )

    def _describe_source(self, tensor: Tensor) -> Source:
        """Describe the origin of an op's argument: "parameter head.weight", "input 0", or an op."""
        key = storage_key(tensor)
        if key in self._sources:
            return self._sources[key]
        producers = self._producers_of(tensor)
        if not producers:
            return Source(SourceKind.COMPUTED, "a tensor that the model makes")
        caller = producers[-1].caller
        op = location_text(producers[-1].op, caller.module, caller.module_type)
        return Source(SourceKind.COMPUTED, f"the output of {op}")

    # Records

    def _producers_of(self, structure: Any) -> tuple[CheckedOp, ...]:
        """The ops that computed the tensors in a structure, each once."""
        producers: list[CheckedOp] = []
        for tensor in tensors_in(structure):
            entry = self._last_writers.get(storage_key(tensor))
            if entry is None:
                continue
            storage, records = entry
            # If it was freed, another storage, that of this tensor, has got its address.
            if not storage.expired():
                producers += records
        return tuple(dict.fromkeys(producers))

    def _add_record(
        self, func: Any, inputs: tuple, run: _OpRun, merged: MergedValues | None
    ) -> None:
        """Record an op unless it only makes a view, and note that it wrote into its outputs.

        `inputs` are its (args, kwargs), and `merged` is what `_merged_values_in` found in them.
        """
        outs = tensors_in(run.out)
        if outs and _is_inexact(outs[0]) and not computes_nothing(func):
            record = self._new_record(func, inputs, outs[0], run.wide_inputs, merged)
            self.log.records.append(record)
            writers = (record,)
        else:  # an op without a record, such as argmax, stands for those that computed its inputs
            writers = self._producers_of(inputs)
        if func.is_view:
            return
        for tensor in outs:
            key = storage_key(tensor)
            if key is not None:
                # The key is an address. The weak reference keeps it from being reused.
                self._last_writers[key] = (StorageWeakRef(tensor.untyped_storage()), writers)

    def _new_record(
        self,
        func: Any,
        inputs: tuple,
        result: Tensor,
        wide_inputs: tuple | None,
        merged: MergedValues | None,
    ) -> CheckedOp:
        """Compare the first result of an op with its shadow, and make the record of the op."""
        name = op_name(func)
        roundoff = 0.0
        if wide_inputs:
            roundoff = rounding.effective_roundoff(func, wide_inputs, result)
        exact = self._shadow_of(result)
        values, _ = rounding.without_masks(exact, exact)
        leaves = [self._by_storage.get(storage_key(tensor)) for tensor in tensors_in(inputs)]
        settings = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, _SETTINGS)]
        return CheckedOp(
            log=self.log,
            caller=self._callers[-1],
            op=name,
            is_cast_or_copy=name in _CASTS_AND_COPIES,
            dtype=result.dtype,
            exact=exact.clone(),
            noise=self._noise,
            total=float(values.sum()),
            rms=rounding.rms(values),
            error=rounding.relative_error(result, exact),
            nonfinite=rounding.nonfinite(result, exact),
            roundoff=roundoff,
            allowed=rounding.allowance(name, inputs, result),
            producers=self._producers_of(inputs),
            leaves=tuple(filter(None, leaves)),
            settings=tuple(settings),
            merged=merged,
        )


def have_same_values(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal, or one is the other rounded to its dtype."""
    if one is None or other is None:
        return False
    if one.shape != other.shape or _is_inexact(one) != _is_inexact(other):
        return False
    one = one.detach().to(other.device)
    other = other.detach()
    if torch.equal(one.to(other.dtype), other):
        return True
    return torch.equal(other.to(one.dtype), one)


def _batch_size(structure: Any) -> int | None:
    """The first size of the first tensor in a structure that has dimensions; None without one."""
    return next((len(tensor) for tensor in tensors_in(structure) if tensor.dim()), None)


def _is_inexact(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers: NumPy's `inexact`."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
