"""One run, op by op: where each ran, what it returned in fp64, and how far rounding took it."""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from amp_lab.backends import BACKENDS
from amp_lab.difference import rounding
from amp_lab.difference.merged_values import Merged, merged
from amp_lab.difference.raised import Failure, RunRaised, failure_above_ops
from amp_lab.difference.result import located
from amp_lab.errors import AmpLabError
from amp_lab.tracing.operands import Kind, Operand, Source
from amp_lab.tracing.ops_seen import LOWER_DTYPES, computes_nothing, storage_key, tensors_in
from amp_lab.tracing.structures import named_tensors

# Ops that leave values as they are, but for the rounding of a cast. Logs are aligned without them.
_NEUTRAL = frozenset(("_to_copy", "clone", "copy_", "lift_fresh", "lift_fresh_copy", "detach"))


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
    exact: torch.Tensor  # its output in fp64, as if nothing before it had rounded
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
    merged: Merged | None  # what its inputs have lost, of different values


@dataclass
class RunLog:
    """What was seen of a run."""

    name: str  # "A" or "B"
    records: list[OpRecord] = field(default_factory=list)
    sinks: set[OpRecord] = field(default_factory=set)  # the run's results came from these
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters and buffers, by name
    unnamed: list[torch.Tensor] = field(default_factory=list)  # inputs, and constants in the code
    format: torch.dtype = torch.float32  # what most of it is meant to compute in
    device_type: str = "cpu"
    kind: tuple = ()  # runs of the same kind are expected to compute each op in the same format
    batch: int | None = None  # first size of the first input of the model
    results: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # and in fp64

    @property
    def end(self) -> float:
        """The error of the run's results, relative, of the one that is off most."""
        errors = [rounding.relative_error(*pair) for pair in self.results]
        return max(errors) if errors else self.records[-1].error


def record_run(name: str, run: Callable[[], Any], other: RunLog | None = None) -> RunLog:
    """Run it and note each op. The leaves of `other` are its own, where only their formats differ.

    Buffers are afterwards what they were. Raises `RunRaised` if the run raises.
    """
    watch = _Watch(RunLog(name), other)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a whole layer as one op
    try:
        with torch.no_grad(), torch.random.fork_rng(), watch.modules(), watch:
            torch.manual_seed(0)
            watch.finish(run())
    except AmpLabError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise watch.raised(error) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return watch.log


class _Watch(TorchDispatchMode):
    def __init__(self, log: RunLog, other: RunLog | None):
        super().__init__()
        self.log, self._other = log, other
        self._shadows = WeakTensorKeyDictionary()  # of each tensor that lives, in fp64
        self._noise = rounding.EXACT  # the relative error that they may have by now
        self._coarsest = 0.0  # unit roundoff of any format so far
        self._autocast: torch.dtype | None = None
        self._names: dict[nn.Module, str] = {}
        self._by_storage: dict[int | None, str] = {}  # names of parameters and buffers
        self._stack: list[tuple[nn.Module | None, Place]] = [(None, Place())]
        self._calls: Counter[nn.Module] = Counter()
        self._writers: dict[int | None, tuple[StorageWeakRef, tuple[OpRecord, ...]]] = {}
        self._kept: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._draws: Counter[tuple] = Counter()
        self._inputs: dict[int | None, str] = {}  # of the first module that is called, by storage
        self._failure: Failure | None = None  # the last of an op

    # Modules

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Follow the calls of all modules; at the end, give buffers their values back."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        with before, hooks.register_module_forward_hook(self._leave, always_call=True):
            try:
                yield
            finally:
                for module, name, buffer, value in self._kept:
                    buffer.copy_(value)
                    module._buffers[name] = buffer

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            self._learn(module)
        if not self._calls:
            self._note_autocast()
            self.log.batch = _batch(args)
            self._inputs = {storage_key(t): f"input {path[1:]}" for path, t in named_tensors(args)}
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
            name = ".".join(part for part in (prefix, name) if part).replace("_orig_mod.", "")
            self._names.setdefault(module, name)
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is None:
                    continue
                full_name = f"{name}.{key}".lstrip(".")
                self.log.leaves[full_name] = tensor
                self._by_storage.setdefault(storage_key(tensor), full_name)
                if key in module._buffers:
                    with _disable_current_modes():  # the copy is no op of the run
                        self._kept.append((module, key, tensor, tensor.clone()))

    def _note_autocast(self) -> None:
        """What it is set to where the first module is called, or, if none is, at any op."""
        for device_type in BACKENDS:
            if torch.is_autocast_enabled(device_type):
                self._autocast = torch.get_autocast_dtype(device_type)

    def finish(self, result: Any) -> None:
        """Note what the run is meant to compute in, and what its results came from."""
        log, sizes = self.log, Counter({torch.float32: 0})
        for tensor in log.leaves.values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                sizes[tensor.dtype] += tensor.numel()
                log.device_type = tensor.device.type
        log.format = self._autocast or sizes.most_common(1)[0][0]
        mode = rounding.float32_roundoff("mm", log.device_type)
        log.kind = log.format, self._autocast, mode, log.device_type
        for tensor in filter(_is_real, tensors_in(result)):
            if tensor in self._shadows:
                log.results.append((tensor.detach(), self._shadows[tensor]))
        log.batch = log.batch or _batch(result)
        # What it returns, or else what its outermost modules did.
        log.sinks = set(self._producers(result)) or log.sinks or set(log.records[-1:])

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
        name = func._schema.name.rpartition("::")[2]
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
        do = self._draw if draws else self._compute
        is_neutral = name in _NEUTRAL or computes_nothing(func)
        lost = None if is_neutral else self._merged_input((args, kwargs))  # it may write into them
        out, exact, alone = do(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            return exact  # so that both runs go on with the same number
        outs, found = tensors_in(out), tensors_in(exact)
        unknown = [None] * len(outs)
        found = [*found, *unknown] if len(found) in (1, len(outs)) else unknown
        for tensor, shadow in zip(outs, found, strict=False):
            self._coarsest = max(self._coarsest, rounding.unit_roundoff(tensor.dtype))
            if shadow is None or shadow.shape != tensor.shape:
                shadow = rounding.widened(tensor)
                if tensor is outs[0]:  # of others, as a kernel's logsumexp, nothing comes
                    self._noise = max(self._noise, 64 * self._coarsest)  # all that was rounded
            self._cast_shadow(func, tensor, shadow)
        self._note(func, name, (args, kwargs), out, alone, lost)
        return out

    def _merged_input(self, given: tuple) -> Merged | None:
        """The first input of an op in which 16 bits make different values equal."""
        low = (tensor for tensor in tensors_in(given) if tensor.dtype in LOWER_DTYPES)
        found = (merged(tensor, self._shadow(tensor)) for tensor in low)
        return next(filter(None, found), None)

    def _cast_shadow(self, func: Any, tensor: torch.Tensor, shadow: torch.Tensor) -> None:
        """Note the shadow of a result, or write it into the one of an argument that was written.

        Integers and bools are decisions: the run is made to take those that fp64 takes, so that a
        tie that rounding breaks sends two runs the same way.
        """
        if tensor in self._shadows:
            shadow = self._shadows[tensor].copy_(shadow)
        elif not computes_nothing(func) and _is_real(tensor):
            shadow = rounding.laid_out_as(tensor, shadow)
        if not computes_nothing(func) and not _is_real(tensor):
            tensor.copy_(shadow)
        self._shadows[tensor] = shadow

    def _compute(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """What an op returns, what it returns of the shadows, and, but for a view, its inputs."""
        if not tensors_in((args, kwargs)):  # arange, full: as they would be in fp64
            out = func(*args, **kwargs)
            wide = args, kwargs | ({"dtype": torch.float64} if _is_real(out) else {})
            return out, rounding.in_doubles(func, *wide), wide
        # All before the op itself, which may write into its arguments.
        alone = None if computes_nothing(func) else rounding.wide_inputs(name, args, kwargs)
        shadows = tree_map_only(torch.Tensor, self._shadow, (args, kwargs))
        exact = rounding.in_doubles(func, *shadows)
        return func(*args, **kwargs), exact, alone

    def _draw(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """The same for an op that draws random numbers: the same ones in each run, unrounded."""
        place = self._stack[-1][1]
        self._draws[place, name] += 1
        torch.manual_seed(zlib.crc32(repr((place, name, self._draws[place, name])).encode()))
        out = func(*args, **kwargs)
        if name == "native_dropout":
            kept = 1 - args[1]
            scale = 1 / kept if args[2] is not False and kept else float(kept != 0)
            return out, (self._shadow(args[0]) * out[1].to(torch.float64) * scale, out[1]), None
        return out, list(map(rounding.widened, tensors_in(out))), None

    def _shadow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fp64 counterpart of an argument."""
        if tensor not in self._shadows:
            self._shadows[tensor] = self._leaf(tensor)
        return self._shadows[tensor]

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of what no op made: of a parameter, a buffer, an input, a constant.

        Where the other run has the same in a wider or a narrower format, both take the other's: the
        formats of weights and inputs are no difference in what is computed.
        """
        name = self._by_storage.get(storage_key(tensor))
        if name is None:
            self.log.unnamed.append(tensor)
        if self._other is not None and tensor.is_floating_point():
            named = self._other.leaves.get(name) if name else None
            for same in [named] if named is not None else self._other.unnamed:
                if same.dtype != tensor.dtype and same_values(same, tensor):
                    return rounding.widened(same).to(tensor.device)
        return rounding.widened(tensor)

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

    def _failure_of(self, error: Exception, func: Any, given: tuple) -> Failure:
        place = self._stack[-1][1]
        floats = [tensor for tensor in tensors_in(given) if tensor.is_floating_point()]
        operands = tuple(Operand(tensor.dtype, self._source(tensor)) for tensor in floats)
        name = func._schema.name.rpartition("::")[2]
        return Failure(error, name, place.module, place.module_type, operands)

    def _source(self, tensor: torch.Tensor) -> Source:
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
        last = producers[-1]
        made_by = located(last.op, last.place.module, last.place.module_type)
        return Source(Kind.COMPUTED, f"the output of {made_by}")

    # Records

    def _producers(self, given: Any) -> tuple[OpRecord, ...]:
        """The records that the tensors in a structure came from."""
        found: list[OpRecord] = []
        for tensor in tensors_in(given):
            storage, records = self._writers.get(storage_key(tensor), (None, ()))
            if storage is not None and not storage.expired():
                found += records
        return tuple(dict.fromkeys(found))

    def _note(
        self,
        func: Any,
        name: str,
        given: tuple,
        out: Any,
        alone: tuple | None,
        lost: Merged | None,
    ) -> None:
        """Keep a record of an op that computed something, and what wrote into which memory."""
        outs, producers = tensors_in(out), self._producers(given)
        if outs and _is_real(outs[0]) and not computes_nothing(func):
            roundoff = rounding.effective_roundoff(func, alone, outs[0]) if alone else 0.0
            self.log.records.append(self._record(name, given, outs[0], roundoff, producers, lost))
            producers = (self.log.records[-1],)
        for tensor in outs if not func.is_view else ():
            key = storage_key(tensor)
            if key is not None:
                # The weak reference keeps the address from being used again for another storage.
                self._writers[key] = StorageWeakRef(tensor.untyped_storage()), producers

    def _record(
        self,
        name: str,
        given: tuple,
        result: torch.Tensor,
        roundoff: float,
        producers: tuple,
        lost: Merged | None,
    ) -> OpRecord:
        exact = self._shadow(result)
        values, _ = rounding.unmasked(exact, exact)
        leaves = [self._by_storage.get(storage_key(tensor)) for tensor in tensors_in(given)]
        kinds = (bool, int, float, str, torch.dtype)
        return OpRecord(
            log=self.log,
            place=self._stack[-1][1],
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
            allowed=rounding.allowance(name, given, result),
            producers=producers,
            leaves=tuple(filter(None, leaves)),
            settings=tuple(leaf for leaf in tree_leaves(given) if isinstance(leaf, kinds)),
            merged=lost,
        )


def same_values(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether one tensor is the other, or the other rounded."""
    if one is None or other is None or one.shape != other.shape or _is_real(one) != _is_real(other):
        return False
    one, other = one.detach().to(other.device), other.detach()
    return torch.equal(one.to(other.dtype), other) or torch.equal(other.to(one.dtype), one)


def _batch(structure: Any) -> int | None:
    """The first size of the first tensor that has one."""
    return next((len(tensor) for tensor in tensors_in(structure) if tensor.dim()), None)


def _is_real(value: Any) -> bool:
    """Whether it is a tensor of floating-point or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
