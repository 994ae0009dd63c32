"""What is allocated when: the coming and going of every storage while ops run on a device."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, get_plain_tensors
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.report import short_name
from amp_lab.tracing.fake_device import is_composite, takes_wrappers
from amp_lab.tracing.memory_result import amount
from amp_lab.tracing.ops_seen import LOWER_DTYPES, storage_key, stored_values, tensors_in
from amp_lab.tracing.records import LOSS, place_of

KINDS = (
    *("weights", "buffers", "inputs", "gradients", "optimizer"),
    *("activations", "cast_cache", "temporaries"),
)
"""What a byte may belong to, in the order of the tables."""

_DEVICE_OF = torch.ops.prim.device.default
_TO_COPY = torch.ops.aten._to_copy.default


def _widest(dtype: torch.dtype, given: Iterable[Any]) -> torch.dtype:
    """The dtype, or a wider one of the tensors among some arguments."""
    dtypes = (tensor.dtype for tensor in given if isinstance(tensor, torch.Tensor))
    return functools.reduce(torch.promote_types, dtypes, dtype)


def _batch_norm(x, weight, bias, mean, variance, training, *_):
    """The output, the mean and the deviation.

    The last two are in fp32 at least, as kernels have them; on a CPU only if some argument is.
    """
    dtype = _widest(x.dtype, (weight, bias, mean, variance))
    if x.fake_device.type != "cpu":
        dtype = torch.promote_types(dtype, torch.float32)
    size = x.size(1) if training else 0
    output = torch.empty_like(x)
    batch_mean = x.new_empty(size, dtype=dtype)
    batch_deviation = x.new_empty(size, dtype=dtype)
    return output, batch_mean, batch_deviation


def _norm(op: OpOverload) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The rule of fake tensors for a norm, with statistics as wide as its weight.

    On a CPU that rule has them in the dtype of the input, unlike the kernels.
    """

    def run(x, *given):
        output, mean, deviation = op(x, *given)
        dtype = _widest(mean.dtype, given)
        wide_mean = mean.new_empty(mean.shape, dtype=dtype)
        wide_deviation = deviation.new_empty(deviation.shape, dtype=dtype)
        return output, wide_mean, wide_deviation

    return run


def _batch_norm_backward(gradient, x, weight, *settings):
    """The gradients of input, weight and bias, as far as they are wanted."""
    scale = weight
    if weight is None:
        scale = x.new_empty(x.size(1), dtype=torch.float32)
    gradients = []
    for values, is_wanted in zip((x, scale, scale), settings[-1], strict=True):
        gradients.append(torch.empty_like(values) if is_wanted else None)
    return tuple(gradients)


# For batch norms, fake tensors take a long way through Python, which also gives the statistics
# another dtype than kernels do. A step of ResNet-50 would take twice as long.
_SHORTCUTS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten.native_layer_norm.default: _norm(torch.ops.aten.native_layer_norm.default),
    torch.ops.aten.native_group_norm.default: _norm(torch.ops.aten.native_group_norm.default),
}


_TRANSIENT = ("activations", "cast_cache", "temporaries")
_LARGE = 0.05  # of the peak: a smaller tensor is not worth a line


class Maker(NamedTuple):
    """The op that made a storage."""

    op: str  # "": none that was seen
    place: str  # ``'head'``, ``the loss``, ``the backward pass``; "" if it is not known
    values: str  # ``fp32 values``; of fp16 and bf16 alike ``16-bit values``


class LargestTensor(NamedTuple):
    """The largest activation or temporary that is alive at a peak."""

    maker: Maker
    nbytes: int
    share: float  # of the peak

    def __str__(self) -> str:
        op, place, values = self.maker
        if op == "_to_copy":
            op = "a cast"
        where = f" in {place}" if place else ""
        size = f"{amount(self.nbytes)}, {100 * self.share:.0f} % of the peak"
        return f"the result of {op}{where}, {values}, {size}"


class StorageLedger(TorchDispatchMode):
    """The mode in which each storage on a device is noted when it is made and when it ends."""

    def __init__(self, device_type: str):
        super().__init__()
        self._device_type = device_type
        self._sizes: list[int] = []  # of each storage, in bytes
        self._log: list[int] = []  # i: storage i was made; ~i: it ended
        self._marks: dict[str, int] = {}  # name: length of the log then
        self._kinds: dict[int, str] = {}  # of storages; all others are temporaries
        self._kept: set[int] = set()  # what autograd keeps
        self._numbers: dict[int, int] = {}  # key of a living storage: its number
        self._watches: dict[int, weakref.ref] = {}
        self._makers: list[Maker] = []  # of each storage
        self._op = ""  # the op that runs
        self._running: list[str] | None = None  # names of modules that run, the innermost last

    @contextmanager
    def naming_modules(self, model: nn.Module) -> Iterator[None]:
        """The block in which the ledger knows which module of `model` runs.

        The hooks are torch's global ones: a module with hooks of its own may take another course,
        such as `nn.TransformerEncoderLayer` without its fast path.
        """
        names = {module: name for name, module in model.named_modules()}
        running = self._running = [LOSS]

        def enter(module: nn.Module, args: Any) -> None:
            running.append(names.get(module, running[-1]))  # of a loss, it is no module of ours

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if len(running) > 1:
                running.pop()

        before = module_hooks.register_module_forward_pre_hook(enter)
        with before, module_hooks.register_module_forward_hook(leave, always_call=True):
            yield

    def _maker(self, leaf: torch.Tensor) -> Maker:
        place = ""
        if "forward" in self._marks:
            place = "the backward pass"
        elif self._running:
            place = place_of(self._running[-1])
        dtype = "16-bit" if leaf.dtype in LOWER_DTYPES else short_name(leaf.dtype)
        return Maker(self._op, place, f"{dtype} values")

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if takes_wrappers(types):
            return NotImplemented
        kwargs = kwargs or {}
        if is_composite(func):  # whole only under inference_mode: its parts make what it needs
            with self:
                return func.decompose(*args, **kwargs)
        run = func
        if args and isinstance(args[0], FakeTensor):
            run = _SHORTCUTS.get(func, func)
        result = run(*args, **kwargs)
        if func is _DEVICE_OF:  # asked for more often than all else, and makes nothing
            return result
        self._op = func._schema.name.rpartition("::")[2]
        for tensor in tensors_in(result):
            self._number(tensor)
        self._op = ""
        if func is _TO_COPY and result.dtype != args[0].dtype:
            self._note_cast(args[0], result)
        return result

    def _note_cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Note that a cast of a weight is autocast's copy of it, whoever asked for the cast."""
        before = self._number(source)
        after = self._number(result)
        if before is None or after is None:
            return
        if self._kinds.get(before) == "weights":
            self._kinds[after] = "cast_cache"

    def _number(self, leaf: torch.Tensor) -> int | None:
        """The number of a tensor's storage, a new one if it is new; None if it is elsewhere."""
        # A fake's own attribute: asking for .device goes through all modes, and takes long.
        device = leaf.fake_device if isinstance(leaf, FakeTensor) else leaf.device
        if device.type != self._device_type:
            return None
        key = storage_key(leaf)
        if key is None:
            return None
        number = self._numbers.get(key)
        if number is not None:
            return number
        storage = stored_values(leaf).untyped_storage()
        return self._begin(key, storage, self._maker(leaf))

    def _begin(self, key: int, storage: torch.UntypedStorage, maker: Maker) -> int:
        number = len(self._sizes)
        self._numbers[key] = number
        self._sizes.append(storage.nbytes())
        self._makers.append(maker)
        self._log.append(number)

        def end(_: weakref.ref) -> None:
            self._log.append(~number)
            # Another storage may get the same key.
            del self._numbers[key]
            del self._watches[number]

        self._watches[number] = weakref.ref(storage, end)
        return number

    @contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """The block in which a storage that gets another size ends, and another begins.

        FSDP2 frees and makes gathered weights in this way, which stay weights for autograd too.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            key = storage._cdata
            old = self._numbers.get(key)
            if old is not None:
                self._log.append(~old)
                del self._watches[old]
            new = self._begin(key, storage, Maker("", "", ""))
            self._kinds[new] = "gathered"
            return result

        torch.UntypedStorage.resize_ = resize_and_note  # pyrefly: ignore[bad-assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def _numbers_of(self, tensor: torch.Tensor) -> list[int]:
        """The numbers of its storages: a wrapper, such as a quantised weight, may have several."""
        numbers = []
        for part in get_plain_tensors(tensor, out=[]):
            number = self._number(part) if isinstance(part, torch.Tensor) else None
            if number is not None:
                numbers.append(number)
        return numbers

    def set_kind(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say to which kind the storages of these tensors belong, unless it was said before."""
        for tensor in tensors:
            for number in self._numbers_of(tensor):
                self._kinds.setdefault(number, kind)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook for what autograd saves."""
        self._kept.update(self._numbers_of(tensor))
        if tensor.grad_fn is None:
            return tensor
        # Detached, or a node that saves its own output would hold itself and never be freed.
        return tensor.detach()

    def mark(self, name: str) -> None:
        """Give this moment a name, by which the trace knows it."""
        self._marks[name] = len(self._log)

    def trace(self, kept_at: str | None = None) -> "StorageTrace":
        """What was noted up to the last mark; what autograd keeps at `kept_at` is activations."""
        self._watches.clear()  # what still lives ends after this, and nobody should be told
        log = np.array(self._ordered_events(), np.int64)
        kinds = [self._kinds.get(number, "temporaries") for number in range(len(self._sizes))]
        if kept_at is not None:
            alive = _alive(log[: self._marks[kept_at]], len(kinds))
            for number in self._kept:
                # An input counts as an activation once autograd keeps it; a weight stays a weight.
                if alive[number] and kinds[number] in ("inputs", "temporaries"):
                    kinds[number] = "activations"
        kinds = ["temporaries" if kind == "gathered" else kind for kind in kinds]
        return StorageTrace(
            sizes=np.array(self._sizes, np.int64),
            kinds=np.array([KINDS.index(kind) for kind in kinds], np.int64),
            log=log,
            marks=dict(self._marks),
            makers=tuple(self._makers),
        )

    def _ordered_events(self) -> list[int]:
        """The log, in which storages that end together do so in the order of their numbers.

        Since autocast's cache is a hash table, they end in any order. Sorted, so that the traces of
        two batches can be compared event by event.
        """
        events: list[int] = []
        for start, stop in itertools.pairwise([0, *self._marks.values()]):
            runs = itertools.groupby(self._log[start:stop], lambda event: event >= 0)
            for are_begins, run in runs:
                events += run if are_begins else sorted(run)
        return events


def _decode_events(log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each event the storage, and 1 if it was made or -1 if it ended."""
    is_begin = log >= 0
    return np.where(is_begin, log, ~log), np.where(is_begin, 1, -1)


def _alive(log: np.ndarray, storages: int) -> np.ndarray:
    """For each storage whether it lives after these events, as 1.0 or 0.0."""
    numbers, changes = _decode_events(log)
    return np.bincount(numbers, changes, storages)


@dataclass(frozen=True, eq=False)
class StorageTrace:
    """The coming and going of storages, as arrays."""

    sizes: np.ndarray  # (storages,) bytes
    kinds: np.ndarray  # (storages,) index into KINDS
    log: np.ndarray  # (events,) i: storage i was made; ~i: it ended
    marks: dict[str, int]  # name of a moment: how many events lie before it
    makers: tuple[Maker, ...] = ()  # of each storage

    def equals(self, other: "StorageTrace") -> bool:
        """Whether all storages come and go alike."""
        return (
            self.marks == other.marks
            and np.array_equal(self.log, other.log)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.kinds, other.kinds)
        )

    def in_use(self) -> np.ndarray:
        """Bytes in use after each event."""
        numbers, changes = _decode_events(self.log)
        return np.cumsum(changes * self.sizes[numbers])

    def by_kind(self, events: int) -> dict[str, int]:
        """Bytes of each kind in use after the first `events` of the log."""
        in_use = self._in_use_after(events)
        sums = np.bincount(self.kinds, in_use, minlength=len(KINDS))
        return {kind: int(total) for kind, total in zip(KINDS, sums, strict=True)}

    def _in_use_after(self, events: int) -> np.ndarray:
        """Bytes of each storage that lives after the first `events` of the log, else 0."""
        return _alive(self.log[:events], len(self.sizes)) * self.sizes

    def largest(self, events: int, peak: int) -> LargestTensor | None:
        """The largest activation or temporary in use after the first `events` of the log.

        None if an op made none that is worth a line next to the `peak`, in bytes.
        """
        is_transient = np.isin(self.kinds, [KINDS.index(kind) for kind in _TRANSIENT])
        in_use = self._in_use_after(events) * is_transient
        if not len(in_use):
            return None
        number = int(np.argmax(in_use))
        nbytes = int(in_use[number])
        maker = self.makers[number]
        if not maker.op or nbytes < _LARGE * peak:
            return None
        return LargestTensor(maker, nbytes, nbytes / peak)
