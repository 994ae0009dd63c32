"""One run, op by op: where each ran, what it returned in fp64, and how far rounding took it."""

import contextlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from amp_lab.core.backends import BACKENDS
from amp_lab.core.errors import AmpLabError
from amp_lab.difference import rounding
from amp_lab.difference.merged_values import Merged, merged
from amp_lab.difference.raised import Failure, RunRaised, failure_above_ops
from amp_lab.difference.result import located
from amp_lab.tracing.operands import Kind, Operand, Source
from amp_lab.tracing.ops_seen import LOWER_DTYPES, computes_nothing, storage_key, tensors_in
from amp_lab.tracing.structures import named_tensors

# Ops that leave values as they are, but for the rounding of a cast. Logs are aligned without them.
_NEUTRAL = frozenset(("_to_copy", "clone", "copy_", "lift_fresh", "lift_fresh_copy", "detach"))
_SETTINGS = (bool, int, float, str, torch.dtype)  # arguments of an op that are no values


@dataclass(frozen=True)
class Place:
    """The module whose code runs, and which call of it in this run, from 1."""

    module: str = ""
    module_type: str = ""
    call: int = 0


@dataclass(eq=False)  # two are never the same, and stand in sets
class OpRecord:
    """One op that computed something."""

    log: "RunLog" = field(repr=False)
    place: Place
    op: str  # without namespace and overload: ``addmm``
    is_neutral: bool  # whether it leaves values as they are, in exact arithmetic
    dtype: torch.dtype  # of its output
    exact: Tensor  # its output in fp64, as if nothing before it had rounded
    noise: float  # the relative error that may have
    total: float  # the sum of `exact`
    size: float  # its root mean square
    error: float  # of the output against `exact`, relative, root mean square
    nonfinite: str  # what the output has where `exact` has numbers, or ""
    roundoff: float  # effective, of this op alone
    allowed: float  # what fp32 arithmetic adds to the roundoff of a format in this op
    producers: tuple["OpRecord", ...] = field(repr=False)  # its inputs came from these
    leaves: tuple[str, ...]  # names of parameters and buffers among its inputs
    settings: tuple  # its arguments that are numbers or names: an eps, a dimension
    merged: Merged | None = None  # what its inputs have lost, of different values


@dataclass
class RunLog:
    """What was seen of a run."""

    name: str  # "A" or "B"
    records: list[OpRecord] = field(default_factory=list)
    sinks: set[OpRecord] = field(default_factory=set)  # the run's results came from these
    leaves: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers, by name
    unnamed: list[Tensor] = field(default_factory=list)  # inputs, and constants in the code
    format: torch.dtype = torch.float32  # what most of it is meant to compute in
    device_type: str = "cpu"
    kind: tuple = ()  # runs of the same kind are expected to compute each op in the same format
    batch: int | None = None  # first size of the first input of the model
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # and in fp64

    @property
    def end(self) -> float:
        """The error of the run's results, relative, of the one that is off most."""
        if not self.results:
            return self.records[-1].error
        return max(rounding.relative_error(result, exact) for result, exact in self.results)


def record_run(name: str, run: Callable[[], Any], other: RunLog | None = None) -> RunLog:
    """Run it and note each op. The leaves of `other` are its own, where only their formats differ.

    Buffers are afterwards what they were. Raises `RunRaised` if the run raises.
    """
    recorder = _Recorder(RunLog(name), other)
    has_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a whole layer as one op
    try:
        with torch.no_grad(), torch.random.fork_rng(), recorder.modules(), recorder:
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
    def __init__(self, log: RunLog, other: RunLog | None):
        super().__init__()
        self.log = log
        self._other = other
        self._shadows = WeakTensorKeyDictionary()  # of each tensor that lives, in fp64
        self._noise = rounding.EXACT  # the relative error that they may have by now
        self._coarsest = 0.0  # unit roundoff of any format so far
        self._autocast: torch.dtype | None = None
        self._names: dict[nn.Module, str] = {}
        self._by_storage: dict[int | None, str] = {}  # names of parameters and buffers
        self._stack: list[tuple[nn.Module | None, Place]] = [(None, Place())]
        self._calls: Counter[nn.Module] = Counter()
        self._writers: dict[int | None, tuple[StorageWeakRef, tuple[OpRecord, ...]]] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # and values
        self._draws: Counter[tuple] = Counter()
        self._inputs: dict[int | None, str] = {}  # of the first module that is called, by storage
        self._failure: Failure | None = None  # the last of an op

    # Modules

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Follow the calls of all modules; at the end, give buffers their values back."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        with before, after:
            try:
                yield
            finally:
                for module, name, buffer, value in self._buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer

    @property
    def _place(self) -> Place:
        """Where an op runs now."""
        return self._stack[-1][1]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            self._learn(module)
        if not self._calls:
            self._note_autocast()
            self.log.batch = _batch(args)
            for path, tensor in named_tensors(args):
                self._inputs[storage_key(tensor)] = f"input {path[1:]}"
        self._calls[module] += 1
        place = Place(self._names[module], type(module).__name__, self._calls[module])
        self._stack.append((module, place))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while len(self._stack) > 1 and self._stack.pop()[0] is not module:
            pass  # left without a call of its hooks
        if len(self._stack) == 1:
            self.log.sinks.update(self._producers(output))

    def _learn(self, root: nn.Module) -> None:
        """The names of a module that no other that was called holds, and of all below it."""
        prefix = type(root).__name__ if self._names else ""
        for name, module in root.named_modules():
            if prefix:
                name = f"{prefix}.{name}".rstrip(".")
            name = name.replace("_orig_mod.", "")
            self._names.setdefault(module, name)
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None:
                    self._learn_tensor(module, key, f"{name}.{key}".lstrip("."), tensor)

    def _learn_tensor(self, module: nn.Module, key: str, name: str, tensor: Tensor) -> None:
        """A parameter or a buffer: `key` is its name in the module, `name` in the model."""
        self.log.leaves[name] = tensor
        self._by_storage.setdefault(storage_key(tensor), name)
        if key in module._buffers:
            with _disable_current_modes():  # the copy is no op of the run
                self._buffers.append((module, key, tensor, tensor.clone()))

    def _note_autocast(self) -> None:
        """What it is set to where the first module is called, or, if none is, at any op."""
        for device_type in BACKENDS:
            if torch.is_autocast_enabled(device_type):
                self._autocast = torch.get_autocast_dtype(device_type)

    def finish(self, result: Any) -> None:
        """Note what the run is meant to compute in, and what its results came from."""
        log = self.log
        sizes = Counter({torch.float32: 0})  # numbers in the weights, by dtype
        for tensor in log.leaves.values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                sizes[tensor.dtype] += tensor.numel()
                log.device_type = tensor.device.type
        log.format = self._autocast or sizes.most_common(1)[0][0]
        mode = rounding.float32_roundoff("mm", log.device_type)
        log.kind = (log.format, self._autocast, mode, log.device_type)
        for tensor in filter(_is_real, tensors_in(result)):
            if tensor in self._shadows:
                log.results.append((tensor.detach(), self._shadows[tensor]))
        log.batch = log.batch or _batch(result)
        # What it returns, or else what its outermost modules did.
        producers = self._producers(result)
        if producers:
            log.sinks = set(producers)
        elif not log.sinks:
            log.sinks = set(log.records[-1:])

    # Ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._calls:
            self._note_autocast()
        with torch._C._DisableAutocast():  # fp64 would not be cast, but the modes are above us
            try:
                return self._follow(func, args, kwargs or {})
            except Exception as error:
                self._failure = self._failure_of(error, func, (args, kwargs))
                raise

    def _follow(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op on its arguments and on their shadows, and note what came of it."""
        name = _op_name(func)
        inputs = (args, kwargs)
        merged_input = None
        if name not in _NEUTRAL and not computes_nothing(func):
            merged_input = self._merged_input(inputs)  # first, since the op may write into it
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name:
            out, exact, wide_inputs = self._draw(func, name, args, kwargs)
        else:
            out, exact, wide_inputs = self._compute(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            return exact  # both runs go on with the same number
        self._note_shadows(func, tensors_in(out), tensors_in(exact))
        self._note(func, name, inputs, out, wide_inputs, merged_input)
        return out

    def _merged_input(self, inputs: tuple) -> Merged | None:
        """The first input of an op in which 16 bits make different values equal."""
        for tensor in tensors_in(inputs):
            if tensor.dtype not in LOWER_DTYPES:
                continue
            found = merged(tensor, self._shadow(tensor))
            if found is not None:
                return found
        return None

    def _note_shadows(self, func: Any, outs: list[Tensor], exact: list[Tensor]) -> None:
        """Note what an op returned in fp64 as the shadows of what it really returned."""
        if len(exact) not in (1, len(outs)):  # it is not known which is which
            exact = []
        for tensor, shadow in itertools.zip_longest(outs, exact[: len(outs)]):
            self._coarsest = max(self._coarsest, rounding.unit_roundoff(tensor.dtype))
            if shadow is None or shadow.shape != tensor.shape:
                shadow = rounding.widened(tensor)
                if tensor is outs[0]:  # of others, as a kernel's logsumexp, nothing comes
                    self._noise = max(self._noise, 64 * self._coarsest)  # all that was rounded
            self._cast_shadow(func, tensor, shadow)

    def _cast_shadow(self, func: Any, tensor: Tensor, shadow: Tensor) -> None:
        """Note the shadow of a result, or write it into the one of an argument that was written.

        Integers and bools are decisions: the run is made to take those that fp64 takes, so that a
        tie that rounding breaks sends two runs the same way.
        """
        computes = not computes_nothing(func)
        if tensor in self._shadows:
            shadow = self._shadows[tensor].copy_(shadow)
        elif computes and _is_real(tensor):
            shadow = rounding.laid_out_as(tensor, shadow)
        if computes and not _is_real(tensor):
            tensor.copy_(shadow)
        self._shadows[tensor] = shadow

    def _compute(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """What an op returns, what it returns of the shadows, and, but for a view, its inputs."""
        if not tensors_in((args, kwargs)):  # arange, full: as they would be in fp64
            out = func(*args, **kwargs)
            if _is_real(out):
                kwargs = kwargs | {"dtype": torch.float64}
            return out, rounding.in_doubles(func, args, kwargs), (args, kwargs)
        # All before the op itself, which may write into its arguments.
        wide_inputs = None
        if not computes_nothing(func):
            wide_inputs = rounding.wide_inputs(name, args, kwargs)
        shadows = tree_map_only(Tensor, self._shadow, (args, kwargs))
        exact = rounding.in_doubles(func, *shadows)
        out = func(*args, **kwargs)
        return out, exact, wide_inputs

    def _draw(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """The same for an op that draws random numbers: the same ones in each run, unrounded."""
        place = self._place
        self._draws[place, name] += 1
        key = (place, name, self._draws[place, name])
        torch.manual_seed(zlib.crc32(repr(key).encode()))
        out = func(*args, **kwargs)
        if name != "native_dropout":
            exact = [rounding.widened(tensor) for tensor in tensors_in(out)]
            return out, exact, None
        inputs, probability, is_training = args
        mask = out[1]
        scale = _dropout_scale(probability, is_training)
        exact = self._shadow(inputs) * mask.to(torch.float64) * scale
        return out, (exact, mask), None

    def _shadow(self, tensor: Tensor) -> Tensor:
        """The fp64 counterpart of an argument."""
        if tensor not in self._shadows:
            self._shadows[tensor] = self._leaf(tensor)
        return self._shadows[tensor]

    def _leaf(self, tensor: Tensor) -> Tensor:
        """The shadow of what no op made: of a parameter, a buffer, an input, a constant.

        Where the other run has the same in a wider or a narrower format, both take the other's: the
        formats of weights and inputs are no difference in what is computed.
        """
        name = self._by_storage.get(storage_key(tensor))
        if name is None:
            self.log.unnamed.append(tensor)
        if tensor.is_floating_point():
            for candidate in self._counterparts(name):
                if candidate.dtype != tensor.dtype and same_values(candidate, tensor):
                    return rounding.widened(candidate).to(tensor.device)
        return rounding.widened(tensor)

    def _counterparts(self, name: str | None) -> list[Tensor]:
        """What the other run may have in the place of a tensor: that of its name, or any."""
        if self._other is None:
            return []
        if name is not None and name in self._other.leaves:
            return [self._other.leaves[name]]
        return self._other.unnamed

    # Errors

    def raised(self, error: Exception) -> RunRaised:
        """What to say of an error that ended the run."""
        failure = self._failure
        if failure is None or failure.error is not error:
            failure = failure_above_ops(error, self._names)
        leaves = self.log.leaves.values()
        device_type = next((tensor.device.type for tensor in leaves), "cpu")
        has_low_weights = any(tensor.dtype in LOWER_DTYPES for tensor in leaves)
        return RunRaised(self.log.name, failure, device_type, has_low_weights)

    def _failure_of(self, error: Exception, func: Any, inputs: tuple) -> Failure:
        place = self._place
        operands = []
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point():
                operands.append(Operand(tensor.dtype, self._source(tensor)))
        return Failure(error, _op_name(func), place.module, place.module_type, tuple(operands))

    def _source(self, tensor: Tensor) -> Source:
        """What an operand came from, in words."""
        key = storage_key(tensor)
        if key in self._by_storage:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            return Source(Kind.OWN, f"{kind} {self._by_storage[key]}")
        if key in self._inputs:
            return Source(Kind.INPUT, self._inputs[key])
        producers = self._producers(tensor)
        if not producers:
            return Source(Kind.COMPUTED, "a tensor that the model makes")
        place = producers[-1].place
        op = located(producers[-1].op, place.module, place.module_type)
        return Source(Kind.COMPUTED, f"the output of {op}")

    # Records

    def _producers(self, structure: Any) -> tuple[OpRecord, ...]:
        """The records that the tensors in a structure came from."""
        found: list[OpRecord] = []
        for tensor in tensors_in(structure):
            storage, records = self._writers.get(storage_key(tensor), (None, ()))
            if storage is not None and not storage.expired():
                found += records
        return tuple(dict.fromkeys(found))

    def _note(
        self,
        func: Any,
        name: str,
        inputs: tuple,
        out: Any,
        wide_inputs: tuple | None,
        merged_input: Merged | None,
    ) -> None:
        """Keep a record of an op that computed something, and what wrote into which memory."""
        outs = tensors_in(out)
        producers = self._producers(inputs)
        if outs and _is_real(outs[0]) and not computes_nothing(func):
            roundoff = 0.0
            if wide_inputs:
                roundoff = rounding.effective_roundoff(func, wide_inputs, outs[0])
            record = self._record(name, inputs, outs[0], roundoff, producers)
            record.merged = merged_input
            self.log.records.append(record)
            producers = (record,)
        if func.is_view:
            return
        for tensor in outs:
            key = storage_key(tensor)
            if key is not None:
                # The weak reference keeps the address from being used again for another storage.
                self._writers[key] = (StorageWeakRef(tensor.untyped_storage()), producers)

    def _record(
        self,
        name: str,
        inputs: tuple,
        result: Tensor,
        roundoff: float,
        producers: tuple,
    ) -> OpRecord:
        exact = self._shadow(result)
        values, _ = rounding.unmasked(exact, exact)
        leaves = [self._by_storage.get(storage_key(tensor)) for tensor in tensors_in(inputs)]
        settings = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, _SETTINGS)]
        return OpRecord(
            log=self.log,
            place=self._place,
            op=name,
            is_neutral=name in _NEUTRAL,
            dtype=result.dtype,
            exact=exact.clone(),
            noise=self._noise,
            total=float(values.sum()),
            size=rounding.rms(values),
            error=rounding.relative_error(result, exact),
            nonfinite=rounding.nonfinite(result, exact),
            roundoff=roundoff,
            allowed=rounding.allowance(name, inputs, result),
            producers=producers,
            leaves=tuple(filter(None, leaves)),
            settings=tuple(settings),
        )


def same_values(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether one tensor is the other, or the other rounded."""
    if one is None or other is None:
        return False
    if one.shape != other.shape or _is_real(one) != _is_real(other):
        return False
    one = one.detach().to(other.device)
    other = other.detach()
    if torch.equal(one.to(other.dtype), other):
        return True
    return torch.equal(other.to(one.dtype), one)


def _op_name(func: Any) -> str:
    """The op's name without namespace and overload."""
    return func._schema.name.rpartition("::")[2]


def _dropout_scale(probability: float, is_training: bool | None) -> float:
    """What dropout multiplies the values by that it keeps."""
    kept = 1 - probability
    if is_training is not False and kept:
        return 1 / kept
    return float(kept != 0)


def _batch(structure: Any) -> int | None:
    """The first size of the first tensor that has one."""
    for tensor in tensors_in(structure):
        if tensor.dim():
            return len(tensor)
    return None


def _is_real(value: Any) -> bool:
    """Whether it is a tensor of floating-point or complex numbers."""
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.is_complex()
