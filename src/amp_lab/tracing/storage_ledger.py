"""Record when each storage is allocated and freed while ops run on a device."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, get_plain_tensors
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.report import listed, short_name
from amp_lab.core.tensors import LOWER_DTYPES, storage_key, stored_values, tensors_in
from amp_lab.tracing.fake_device import is_composite, takes_wrappers
from amp_lab.tracing.memory_result import amount
from amp_lab.tracing.records import LOSS, place_of

KINDS = (
    *("weights", "buffers", "inputs", "gradients", "optimizer"),
    *("activations", "cast_cache", "temporaries"),
)
"""The kinds of memory that are counted, in the order of the tables."""

_DEVICE_OF = torch.ops.prim.device.default
_TO_COPY = torch.ops.aten._to_copy.default


def _promoted(dtype: torch.dtype, arguments: Iterable[Any]) -> torch.dtype:
    """The dtype to which torch promotes `dtype` with the dtypes of the tensors in `arguments`."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            dtype = torch.promote_types(dtype, argument.dtype)
    return dtype


def _empty_batch_norm(x, weight, bias, mean, variance, training, *_):
    """The three results of `native_batch_norm`, as empty tensors, instead of running it.

    They are the output (N, C, …), and the mean and the inverse deviation of the batch, (C,) each.
    The last two have the widest dtype among the arguments and, except on a CPU, fp32 at the least,
    as kernels return them.
    """
    dtype = _promoted(x.dtype, (weight, bias, mean, variance))
    if x.fake_device.type != "cpu":
        dtype = torch.promote_types(dtype, torch.float32)
    size = x.size(1) if training else 0  # one value a channel; empty in evaluation
    output = torch.empty_like(x)
    batch_mean = x.new_empty(size, dtype=dtype)
    batch_deviation = x.new_empty(size, dtype=dtype)
    return output, batch_mean, batch_deviation


def _layer_or_group_norm(op: OpOverload, x, *arguments):
    """Run a layer or group norm on fake tensors; return its statistics as wide as its weight.

    The results are the output, the mean and the inverse deviation. The fake kernel of a CPU gives
    the last two the dtype of the input, unlike the real kernel.
    """
    output, mean, deviation = op(x, *arguments)
    dtype = _promoted(mean.dtype, arguments)
    wide_mean = mean.new_empty(mean.shape, dtype=dtype)
    wide_deviation = deviation.new_empty(deviation.shape, dtype=dtype)
    return output, wide_mean, wide_deviation


def _empty_batch_norm_backward(gradient, x, weight, *settings):
    """The gradients of a batch norm's input, weight and bias, as empty tensors; None if not needed.

    `settings` are the other arguments of the op. The last of them says which gradients are needed,
    in three booleans.
    """
    weight_like = weight
    if weight is None:
        weight_like = x.new_empty(x.size(1), dtype=torch.float32)
    bias_like = weight_like
    output_mask = settings[-1]
    gradients = []
    for values, is_needed in zip((x, weight_like, bias_like), output_mask, strict=True):
        gradients.append(torch.empty_like(values) if is_needed else None)
    return tuple(gradients)


# Functions that run instead of these ops on fake tensors. Those for batch norms save time: torch's
# own fake kernels compute them step by step in Python, so that a step of ResNet-50 takes twice as
# long.
_FAKE_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _empty_batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _empty_batch_norm_backward,
}
for _op in (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default):
    _FAKE_KERNELS[_op] = functools.partial(_layer_or_group_norm, _op)

_TRANSIENT_KINDS = ("activations", "cast_cache", "temporaries")  # freed within a step
_LARGE_SHARE = 0.05  # of the peak: a smaller tensor is not worth a line


class Maker(NamedTuple):
    """The op that made a storage."""

    op: str  # without "aten::"; "": no op that the ledger saw
    place: str  # ``'head'``, ``the loss``, ``the backward pass``; "" if it is not known
    values: str  # ``fp32 values``; for both fp16 and bf16 ``16-bit values``


class Event(NamedTuple):
    """A moment at which a storage was allocated or freed."""

    storage: int  # its number; storages are numbered in the order of their allocation
    change: int  # 1: it was allocated, -1: it was freed


class StorageLedger(TorchDispatchMode):
    """A mode that records when each storage on a device is allocated and freed.

    `kinds` has the tensors that exist at the beginning, by their kind, such as "weights".
    """

    def __init__(self, device_type: str, **kinds: Iterable[torch.Tensor]):
        super().__init__()
        self._device_type = device_type
        self._sizes: list[int] = []  # of each storage, in bytes
        self._makers: list[Maker] = []  # of each storage
        self._log: list[Event] = []  # all allocations and frees, in order
        self._marks: dict[str, int] = {}  # name of a moment: length of the log at that moment
        self._kinds: dict[int, str] = {}  # by number; a storage without a kind is a temporary
        self._saved: set[int] = set()  # numbers of storages that autograd saves
        self._numbers: dict[int, int] = {}  # by the key of a living storage
        self._watches: dict[int, weakref.ref] = {}  # by number; they note when a storage is freed
        self._custom_ops: dict[str, None] = {}  # ops that are not torch's, as an ordered set
        # Names of the running modules, the innermost last; None outside of `naming_modules`.
        self._running: list[str] | None = None
        for kind, tensors in kinds.items():
            self.set_kind(kind, tensors)

    @contextmanager
    def naming_modules(self, model: nn.Module) -> Iterator[None]:
        """The block in which the ledger notes which module of `model` makes a storage.

        The hooks are torch's global hooks, because hooks on a module may change its behaviour: with
        hooks, `nn.TransformerEncoderLayer` does not use its fast path.
        """
        names = {module: name for name, module in model.named_modules()}
        running = [LOSS]  # an op that runs outside of all modules belongs to the loss
        self._running = running

        def enter(module: nn.Module, args: Any) -> None:
            # A module that is not in the model, such as one in a loss, goes by the name around it.
            name = names.get(module, running[-1])
            running.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if len(running) > 1:  # the first name, `LOSS`, stays
                running.pop()

        before = module_hooks.register_module_forward_pre_hook(enter)
        with before, module_hooks.register_module_forward_hook(leave, always_call=True):
            yield

    def _maker(self, op: str, tensor: torch.Tensor) -> Maker:
        """The maker of a new tensor: the op, and the running module or the backward pass."""
        place = ""
        if "forward" in self._marks:  # the forward pass is over
            place = "the backward pass"
        elif self._running:
            place = place_of(self._running[-1])
        dtype = "16-bit" if tensor.dtype in LOWER_DTYPES else short_name(tensor.dtype)
        return Maker(op, place, f"{dtype} values")

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        """Run an op, or its function in `_FAKE_KERNELS`, and note the storages of its results."""
        if takes_wrappers(types):
            return NotImplemented  # the subclass of torch.Tensor then calls ops on what it wraps
        kwargs = kwargs or {}
        if is_composite(func):  # arrives undecomposed only in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        run = func
        if args and isinstance(args[0], FakeTensor):
            run = _FAKE_KERNELS.get(func, func)
        result = run(*args, **kwargs)
        if func is _DEVICE_OF:  # the most frequent op, which allocates nothing
            return result
        namespace, _, op = func._schema.name.rpartition("::")
        if namespace != "aten":
            self._custom_ops[func._schema.name] = None
        for tensor in tensors_in(result):
            self._storage_number(tensor, op)
        if func is _TO_COPY and result.dtype != args[0].dtype:
            self._note_cast(args[0], result)
        return result

    def _note_cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Set the kind of `result` to "cast_cache" if it is a cast of a weight.

        A cast by autocast and one that the model itself makes count alike.
        """
        source_number = self._storage_number(source)
        result_number = self._storage_number(result)
        if source_number is None or result_number is None:
            return
        if self._kinds.get(source_number) == "weights":
            self._kinds[result_number] = "cast_cache"

    def _storage_number(self, tensor: torch.Tensor, op: str = "") -> int | None:
        """The number of a tensor's storage; a new storage is noted first, as made by `op`.

        None for a tensor on another device, or without a storage. `op` is "" if no op made it.
        """
        # A fake tensor's `device` goes through all modes, which takes long; `fake_device` does not.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self._device_type:
            return None
        key = storage_key(tensor)
        if key is None:
            return None
        number = self._numbers.get(key)
        if number is not None:
            return number
        storage = stored_values(tensor).untyped_storage()
        return self._note_storage(key, storage, self._maker(op, tensor))

    def _note_storage(self, key: int, storage: torch.UntypedStorage, maker: Maker) -> int:
        """Log that a storage was allocated, and later that it is freed; return its number.

        `key` is the `storage_key` of its tensor.
        """
        number = len(self._sizes)
        self._numbers[key] = number
        self._sizes.append(storage.nbytes())
        self._makers.append(maker)
        self._log.append(Event(number, 1))

        def note_end(_: weakref.ref) -> None:
            self._log.append(Event(number, -1))
            del self._numbers[key]  # another storage may get the same key
            del self._watches[number]

        self._watches[number] = weakref.ref(storage, note_end)
        return number

    @contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """The block in which resizing a storage counts as freeing it and making a new one.

        FSDP2 frees and allocates gathered weights by resizing. If autograd saves gathered weights,
        they do not count as activations.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            key = storage._cdata  # as `storage_key` returns it for a tensor
            number = self._numbers.get(key)
            if number is not None:
                self._log.append(Event(number, -1))
                # Without the weak reference, the end of this storage is not logged once more.
                del self._watches[number]
            new_number = self._note_storage(key, storage, Maker(op="", place="", values=""))
            self._kinds[new_number] = "gathered"  # not in KINDS: `trace` counts it as temporary
            return result

        torch.UntypedStorage.resize_ = resize_and_note  # pyrefly: ignore[bad-assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def _numbers_of(self, tensor: torch.Tensor) -> list[int]:
        """The numbers of a tensor's storages: a quantised weight, for one, has several."""
        numbers = []
        for inner in get_plain_tensors(tensor, out=[]):  # the tensor itself, if it has no others
            if not isinstance(inner, torch.Tensor):
                continue
            number = self._storage_number(inner)
            if number is not None:
                numbers.append(number)
        return numbers

    def set_kind(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Set the kind of the storages of these tensors; a storage with a kind keeps it."""
        for tensor in tensors:
            for number in self._numbers_of(tensor):
                self._kinds.setdefault(number, kind)

    def noting_saved(self) -> AbstractContextManager:
        """The block in which tensors that autograd saves for the backward pass are noted.

        `trace` counts them as activations if they still exist at the end of the forward pass. What
        autograd gets from the hook is the same tensor, or a detached view if it has a graph.
        """

        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._saved.update(self._numbers_of(tensor))
            if tensor.grad_fn is None:
                return tensor
            # Detached: a node that saves its own output would hold itself and never be freed.
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def mark(self, name: str) -> None:
        """Give the present moment a name, which is then in the `marks` of the trace."""
        self._marks[name] = len(self._log)

    def trace(self, activations_at: str | None = None) -> "StorageTrace":
        """The trace up to the last mark.

        `activations_at` is the name of a mark: a storage is an activation if autograd has saved it
        and it exists at that moment. With None there are no activations.
        """
        self._watches.clear()  # storages that are freed from here on are no longer noted
        log = np.array(self._ordered_events(), np.int64).reshape(-1, 2)  # (0, 2) without events
        kinds = [self._kinds.get(number, "temporaries") for number in range(len(self._sizes))]
        if activations_at is not None:
            is_alive = _alive(log[: self._marks[activations_at]], len(kinds))
            for number in self._saved:
                # An input counts as an activation once autograd saves it; a weight stays a weight.
                if is_alive[number] and kinds[number] in ("inputs", "temporaries"):
                    kinds[number] = "activations"
        # Weights that FSDP2 gathers are freed again, like other temporaries.
        kinds = ["temporaries" if kind == "gathered" else kind for kind in kinds]
        return StorageTrace(
            sizes=np.array(self._sizes, np.int64),
            kinds=np.array([KINDS.index(kind) for kind in kinds], np.int64),
            log=log,
            marks=dict(self._marks),
            makers=tuple(self._makers),
            custom_ops=tuple(self._custom_ops),
        )

    def _ordered_events(self) -> list[Event]:
        """The log up to the last mark, with frees that follow each other sorted.

        Autocast's cache is a hash table, whose tensors are freed in any order. The traces of two
        batches are compared event by event, and need the same order.
        """
        events: list[Event] = []
        # From mark to mark, so that no event moves across one.
        for start, stop in itertools.pairwise([0, *self._marks.values()]):
            frees: list[Event] = []  # those since the last allocation
            for event in self._log[start:stop]:
                if event.change == -1:
                    frees.append(event)
                    continue
                events += sorted(frees)
                frees = []
                events.append(event)
            events += sorted(frees)
        return events


def _alive(log: np.ndarray, storages: int) -> np.ndarray:
    """Whether each storage is alive after these events: (storages,) bool.

    `log` has the events, as in `StorageTrace`, and `storages` is how many storages there are.
    """
    numbers, changes = log.T
    # The changes of a storage add up to 1 if it was allocated, and to 0 if it was freed too.
    return np.bincount(numbers, weights=changes, minlength=storages) > 0


@dataclass(frozen=True, eq=False)
class StorageTrace:
    """The allocations and frees of storages, as arrays; made by `StorageLedger.trace`."""

    sizes: np.ndarray  # (storages,) bytes
    kinds: np.ndarray  # (storages,) index into KINDS
    log: np.ndarray  # (events, 2), the fields of an `Event`: number of a storage, 1 or -1
    marks: dict[str, int]  # name of a moment: how many events came before it
    makers: tuple[Maker, ...] = ()  # of each storage
    custom_ops: tuple[str, ...] = ()  # ops that are not torch's, such as ``mine::op``

    @property
    def caveat(self) -> str:
        """A sentence on custom ops, whose kernels may allocate unseen memory; "" without any."""
        if not self.custom_ops:
            return ""
        return (
            f"For {listed(self.custom_ops, 3)}, only the results are counted, not the memory "
            "that the kernel allocates."
        )

    def equals(self, other: "StorageTrace") -> bool:
        """Whether two traces have the same storages and events; the makers may differ."""
        return (
            self.marks == other.marks
            and np.array_equal(self.log, other.log)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.kinds, other.kinds)
        )

    def in_use(self) -> np.ndarray:
        """Bytes in use after each event: (events,) int64."""
        numbers, changes = self.log.T
        return np.cumsum(changes * self.sizes[numbers])

    def by_kind(self, events: int) -> dict[str, int]:
        """Bytes of each kind in use after the first `events` of the log."""
        nbytes = self._bytes_in_use(events)
        sums = np.bincount(self.kinds, weights=nbytes, minlength=len(KINDS))
        return {kind: int(total) for kind, total in zip(KINDS, sums, strict=True)}

    def _bytes_in_use(self, events: int) -> np.ndarray:
        """Bytes of each storage, 0 if it is not alive after the first `events`: (storages,)."""
        is_alive = _alive(self.log[:events], len(self.sizes))
        return np.where(is_alive, self.sizes, 0)

    def largest(self, events: int, peak: int) -> str:
        """Describe the largest activation, cast or temporary in use after the first `events`.

        An example is ``the result of addmm in 'head', fp32 values, 96 MiB, 20 % of the peak``. The
        text is "" if the tensor is small compared with the `peak`, in bytes, or if the op that made
        it is unknown.
        """
        if not len(self.sizes):
            return ""
        is_transient = np.isin(self.kinds, [KINDS.index(kind) for kind in _TRANSIENT_KINDS])
        transient_bytes = np.where(is_transient, self._bytes_in_use(events), 0)
        number = int(np.argmax(transient_bytes))
        nbytes = int(transient_bytes[number])
        maker = self.makers[number]
        if not maker.op or nbytes < _LARGE_SHARE * peak:
            return ""
        op = "a cast" if maker.op == "_to_copy" else maker.op
        where = f" in {maker.place}" if maker.place else ""
        size = f"{amount(nbytes)}, {100 * nbytes / peak:.0f} % of the peak"
        return f"the result of {op}{where}, {maker.values}, {size}"
