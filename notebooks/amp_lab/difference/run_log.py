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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from amp_lab.backends import BACKENDS
from amp_lab.difference import rounding
from amp_lab.difference.exact import Shadows, in_doubles, widened
from amp_lab.errors import AmpLabError, NumericsError, with_type
from amp_lab.tracing.ops_seen import computes_nothing, storage_key, tensors_in

# Ops that leave values as they are, but for the rounding of a cast. Logs are aligned without them.
NEUTRAL = frozenset(("_to_copy", "clone", "copy_", "lift_fresh", "lift_fresh_copy", "detach"))
_MOVES = frozenset(("embedding", "index_select", "gather", "clone", "index", "cat", "stack", "flip",
                    "roll", "select", "repeat", "constant_pad_nd", "lift_fresh"))  # fmt: skip
_PERTURBATION = 2.0**-20


@dataclass(frozen=True)
class Place:
    """The module whose code runs, and which call of it in this run, from 1."""

    module: str = ""
    module_type: str = ""
    call: int = 0


@dataclass
class OpRecord:
    """One op that computed something."""

    place: Place
    op: str  # without namespace and overload: ``addmm``
    dtype: torch.dtype  # of its output
    exact: torch.Tensor  # its output in fp64, as if nothing before it had rounded
    noise: float  # the relative error that may have
    error: float  # of the output against `exact`, root mean square; so is the next
    size: float
    roundoff: float  # effective, of this op alone
    allowed: float  # what fp32 arithmetic adds to the roundoff of a format in this op
    producers: tuple[int, ...]  # records that its inputs came from
    leaves: tuple[str, ...]  # names of parameters and buffers among its inputs
    settings: tuple  # its arguments that are no tensors

    @property
    def is_neutral(self) -> bool:
        """Whether it leaves values as they are, in exact arithmetic."""
        return self.op in NEUTRAL


@dataclass
class RunLog:
    """What was seen of a run."""

    name: str  # "A" or "B"
    records: list[OpRecord] = field(default_factory=list)
    sinks: set[int] = field(default_factory=set)  # records that the run's results came from
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters and buffers, by name
    unnamed: list[torch.Tensor] = field(default_factory=list)  # inputs, and constants in the code
    format: torch.dtype = torch.float32  # what most of it is meant to compute in
    float32_mode: float = 0.0  # the roundoff of a float32 product
    device_type: str = "cpu"
    autocast: torch.dtype | None = None
    batch: int | None = None  # first size of the first input of the model
    results: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # and in fp64

    @property
    def kind(self) -> tuple:
        """Runs of the same kind are expected to compute each op in the same format."""
        return self.format, self.autocast, self.float32_mode, self.device_type


def record_run(name: str, run: Callable[[], Any], other: RunLog | None = None) -> RunLog:
    """Run it and note each op. The leaves of `other` are its own, where only their formats differ.

    Random numbers are the same in each run; buffers are afterwards what they were. Raises
    `NumericsError` if the run raises, or computes nothing.
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
        raise NumericsError(f"run {name} raises {with_type(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if not watch.log.records:
        raise NumericsError(f"run {name} calls no op of torch on floating-point values")
    return watch.log


class _Watch(TorchDispatchMode):
    def __init__(self, log: RunLog, other: RunLog | None):
        super().__init__()
        self.log, self._other = log, other
        self._shadows = Shadows()
        self._names: dict[nn.Module, str] = {}
        self._by_storage: dict[int | None, str] = {}  # names of parameters and buffers
        self._stack: list[tuple[nn.Module, Place]] = []
        self._calls: Counter[nn.Module] = Counter()
        self._writers: dict[int | None, tuple[StorageWeakRef, tuple[int, ...]]] = {}
        self._kept: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._draws: Counter[tuple] = Counter()
        self._started = self._paused = False

    # Modules

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Follow the calls of all modules; at the end, give buffers their values back."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            for module, name, buffer, value in self._kept:
                buffer.copy_(value)
                module._buffers[name] = buffer

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            self._learn(module)
        if not self._calls:
            self._start()
            self.log.batch = _batch(args)
        self._calls[module] += 1
        place = Place(self._names[module], type(module).__name__, self._calls[module])
        self._stack.append((module, place))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop()[0] is not module:
            pass  # left without a call of its hooks
        if not self._stack:
            self._note_sinks(output)

    def _learn(self, root: nn.Module) -> None:
        """The names of a module that no other that was called holds, and of all below it."""
        prefix = f"{type(root).__name__}" if self._names else ""
        for name, module in root.named_modules():
            name = ".".join(part for part in (prefix, name) if part).replace("_orig_mod.", "")
            self._names.setdefault(module, name)
            own = {k: p for k, p in module._parameters.items() if p is not None}
            for key, tensor in own.items():
                self._name_leaf(f"{name}.{key}".lstrip("."), tensor)
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                self._paused = True
                self._kept.append((module, key, buffer, buffer.clone()))
                self._paused = False
                self._name_leaf(f"{name}.{key}".lstrip("."), buffer)

    def _name_leaf(self, name: str, tensor: torch.Tensor) -> None:
        self.log.leaves[name] = tensor
        self._by_storage.setdefault(storage_key(tensor), name)

    def _start(self) -> None:
        """What autocast is set to: where the first module is called, or else the first op."""
        for device_type in BACKENDS:
            if torch.is_autocast_enabled(device_type):
                self.log.autocast = torch.get_autocast_dtype(device_type)
        self._started = True

    def _conclude(self) -> None:
        """What the run is meant to compute in: autocast's dtype, or that of most parameters."""
        log, sizes = self.log, Counter[torch.dtype]()
        for tensor in log.leaves.values():
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                sizes[tensor.dtype] += tensor.numel()
                log.device_type = tensor.device.type
        if sizes:
            log.format = sizes.most_common(1)[0][0]
        log.format = log.autocast or log.format
        log.float32_mode = rounding.float32_roundoff("mm", log.device_type)

    # Ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if not self._started:
            self._start()
        with torch._C._DisableAutocast():  # fp64 would not be cast, but the modes are above us
            given = tensors_in((args, kwargs))
            for tensor in given:
                if self._shadows.find(tensor) is None:
                    self._shadows.set(tensor, self._leaf(tensor))
            return self._follow(func, func._schema.name.rpartition("::")[2], args, kwargs)

    def _follow(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op on its arguments, on their shadows, and by itself in fp64."""
        given, written = tensors_in((args, kwargs)), _written(func, args, kwargs)
        noise = max(map(self._shadows.noise, given), default=rounding.EXACT)
        producers = self._producers(given)
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
        exact = local = None
        if draws:
            self._seed(name)
        elif given:  # before the op itself, which may write into its arguments
            local = None if _rounds_nothing(func, name, given) else _Alone(func, args, kwargs)
            exact = in_doubles(func, *self._shadows_of(args, kwargs))
        out = func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return out if exact is None else exact  # so that both runs go on with the same number
        if draws:
            exact = self._drawn(name, args, out, written)
        elif not given:  # arange, full: as they would be in fp64
            dtype = {"dtype": torch.float64} if _is_real(out) else {}
            exact = in_doubles(func, args, kwargs | dtype)
            local = _Alone.known(exact)
        if exact is not None and _decides_a_shape(out, exact):
            out = exact.clone().to(out.device)
        noise = self._shadows.follow(func, out, exact, noise, written)
        self._note(func, name, (args, kwargs), out, local, noise, producers)
        return out

    def _seed(self, name: str) -> None:
        """For an op that draws random numbers: the same in each run, whatever was drawn before."""
        place = self._stack[-1][1] if self._stack else Place()
        self._draws[place, name] += 1
        torch.manual_seed(zlib.crc32(repr((place, name, self._draws[place, name])).encode()))

    def _drawn(self, name: str, args: tuple, out: Any, written: list[torch.Tensor]) -> Any:
        """What such an op has returned, in fp64: what was drawn is no rounding."""
        if name == "native_dropout":
            kept = 1 - args[1]
            scale = 1 / kept if args[2] is not False and kept else float(kept != 0)
            return self._shadow(args[0]) * out[1].to(torch.float64) * scale, out[1]
        exact = [widened(tensor, copy=True) for tensor in tensors_in(out)]
        if written:
            return [self._shadow(t).copy_(e) for t, e in zip(written, exact, strict=False)]
        return exact

    def _shadows_of(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        return tree_map_only(torch.Tensor, self._shadow, (args, kwargs))

    def _shadow(self, tensor: torch.Tensor) -> torch.Tensor:
        shadow = self._shadows.find(tensor)
        assert shadow is not None  # every argument was given one
        return shadow

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
                if same.shape == tensor.shape and _differ_in_format(same, tensor):
                    return widened(same, copy=True).to(tensor.device)
        return widened(tensor, copy=True)

    # Records

    def _producers(self, given: list[torch.Tensor]) -> tuple[int, ...]:
        found: set[int] = set()
        for tensor in given:
            storage, numbers = self._writers.get(storage_key(tensor), (None, ()))
            if storage is not None and not storage.expired():
                found.update(numbers)
        return tuple(sorted(found))

    def _note(
        self,
        func: Any,
        name: str,
        given: tuple,
        out: Any,
        local: "_Alone | None",
        noise: float,
        producers: tuple[int, ...],
    ) -> None:
        outs = tensors_in(out)
        if outs and _is_real(outs[0]) and not computes_nothing(func):
            self.log.records.append(self._record(name, given, outs[0], local, noise, producers))
            producers = (len(self.log.records) - 1,)
        if func.is_view:
            return
        for tensor in outs:
            key = storage_key(tensor)
            if key is not None:
                # The weak reference keeps the address from being used again for another storage.
                self._writers[key] = StorageWeakRef(tensor.untyped_storage()), producers

    def _record(
        self,
        name: str,
        given: tuple,
        result: torch.Tensor,
        local: "_Alone | None",
        noise: float,
        producers: tuple[int, ...],
    ) -> OpRecord:
        shadow = self._shadow(result)
        left, right = rounding.unmasked(result.to(shadow.device), shadow)
        device, terms = result.device.type, rounding.terms_of(given, result)
        leaves = [self._by_storage.get(storage_key(tensor)) for tensor in tensors_in(given)]
        return OpRecord(
            place=self._stack[-1][1] if self._stack else Place(),
            op=name,
            dtype=result.dtype,
            exact=shadow.clone(),
            noise=noise,
            error=rounding.rms(left - right),
            size=rounding.rms(right),
            roundoff=local.roundoff(result) if local else 0.0,
            allowed=rounding.allowance(0.0, rounding.float32_roundoff(name, device), terms),
            producers=producers,
            leaves=tuple(leaf for leaf in leaves if leaf),
            settings=_settings(given),
        )

    def _note_sinks(self, result: Any) -> None:
        self.log.sinks.update(self._producers(tensors_in(result)))

    def finish(self, result: Any) -> None:
        """Note what the results came from: of what the run returns, of its outermost modules."""
        self._conclude()
        for tensor in filter(_is_real, tensors_in(result)):
            if (shadow := self._shadows.find(tensor)) is not None:
                self.log.results.append((tensor.detach(), shadow))
        self.log.batch = self.log.batch or _batch(result)
        found = self._producers(tensors_in(result))
        if found:
            self.log.sinks = set(found)
        elif not self.log.sinks and self.log.records:
            self.log.sinks = {len(self.log.records) - 1}


class _Alone:
    """One op in fp64, on the inputs that it really gets."""

    def __init__(self, func: Any, args: tuple, kwargs: dict[str, Any]):
        first = next((t for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
        self._epsilon = None if first is None else torch.finfo(first.dtype).eps
        self._func = func
        self._given = tree_map_only(torch.Tensor, lambda t: widened(t, copy=True), (args, kwargs))
        self.exact = self._run(self._given)

    @classmethod
    def known(cls, exact: Any) -> "_Alone":
        """Of an op without inputs, whose exact result is there already."""
        alone = cls.__new__(cls)
        alone.exact = exact
        alone._given = None
        return alone

    def _run(self, given: Any) -> torch.Tensor | None:
        given = tree_map_only(torch.Tensor, torch.clone, given)  # for an op that writes into them
        args, kwargs = given
        found = tensors_in(in_doubles(self._func, args, kwargs, self._epsilon))
        return found[0] if found else None

    def roundoff(self, result: torch.Tensor) -> float:
        """The op's effective unit roundoff; 0 if fp64 cannot tell."""
        if not isinstance(self.exact, torch.Tensor) or self.exact.shape != result.shape:
            return 0.0
        return rounding.effective_roundoff(result.to(self.exact.device), self.exact, self._moved)

    def _moved(self, seed: int) -> torch.Tensor | None:
        """How far the result moves, per unit, if the inputs are changed at random."""
        if self._given is None:
            return None
        leaves, shape = tree_flatten(self._given)
        changed = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                source = torch.Generator(leaf.device).manual_seed(1000 * seed + number)
                by = torch.rand(leaf.shape, generator=source, device=leaf.device) * 2 - 1
                leaf = leaf * (1 + by * _PERTURBATION)
            changed.append(leaf)
        moved = self._run(tree_unflatten(changed, shape))
        if moved is None or self.exact is None:
            return None
        left, right = rounding.unmasked(moved, self.exact)
        return (left - right) / _PERTURBATION


def _batch(structure: Any) -> int | None:
    """The first size of the first tensor that has one."""
    return next((len(tensor) for tensor in tensors_in(structure) if tensor.dim()), None)


def _is_real(value: Any) -> bool:
    """Whether it is a tensor of floating-point or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _decides_a_shape(out: Any, exact: Any) -> bool:
    """Whether it is a list of indices, such as boxes that are kept, of another length in fp64."""
    both = isinstance(out, torch.Tensor) and isinstance(exact, torch.Tensor)
    return both and not _is_real(out) and out.shape != exact.shape


def _rounds_nothing(func: Any, name: str, given: list[torch.Tensor]) -> bool:
    """Whether the op only moves numbers, or gives none; it then need not be done again in fp64."""
    if name == "copy_":
        return given[0].dtype == given[1].dtype
    return computes_nothing(func) or name in _MOVES or not any(map(_is_real, given))


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the op writes into."""
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    into = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([given.get(name) for name in into])


def _differ_in_format(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two leaves are of different formats, and one is the other, rounded."""
    if one.dtype == other.dtype or not one.is_floating_point():
        return False
    one = one.detach().to(other.device)
    other = other.detach()
    return torch.equal(one.to(other.dtype), other) or torch.equal(other.to(one.dtype), one)


def _settings(given: tuple) -> tuple:
    """The arguments that are numbers or names, as they stand: an eps, a dimension."""
    leaves = tree_flatten(given)[0]
    kinds = (bool, int, float, str, torch.dtype)
    return tuple(leaf for leaf in leaves if isinstance(leaf, kinds))
