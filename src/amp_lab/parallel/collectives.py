"""What this process sends to the others: every collective with its dtype and its bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_lab.core.errors import ParallelError
from amp_lab.core.report import Printed, Table, plural, short_name

# The kind of a collective; the argument that holds the payload whole (_RESULT: what it returns);
# the ops of that kind, by their names in torch without underscores at the ends, "_coalesced" and
# "_out". Arguments are those of Ops.cpp in c10d, which DDP's reducer, the comm hooks and FSDP2
# call, and of the functional collectives of DTensor.
_RESULT = -1
_C10D = (
    ("all_reduce", 0, "allreduce"),
    ("all_gather", 0, "allgather allgather_base allgather_into_tensor"),
    ("reduce_scatter", 1, "reduce_scatter reduce_scatter_base reduce_scatter_tensor"),
    ("all_to_all", 1, "alltoall alltoall_base"),
    ("broadcast", 0, "broadcast"),
    ("reduce", 0, "reduce"),
    ("gather", 1, "gather"),
    ("scatter", 1, "scatter"),
    ("send", 0, "send"),
    ("recv", 0, "recv recv_any_source"),
)
_FUNCTIONAL = (
    ("all_reduce", 0, "all_reduce"),
    ("all_gather", _RESULT, "all_gather_into_tensor"),
    ("reduce_scatter", 0, "reduce_scatter_tensor"),
    ("all_to_all", 0, "all_to_all_single"),
    ("broadcast", 0, "broadcast"),
)


def _by_name(rows: tuple[tuple[str, int, str], ...]) -> dict[str, tuple[str, int]]:
    """For the name of each op its kind, and the place of its payload."""
    ops = {}
    for kind, place, names in rows:
        for name in names.split():
            ops[name] = (kind, place)
    return ops


_OPS = {
    "c10d": _by_name(_C10D),
    "_c10d_functional": _by_name(_FUNCTIONAL),
    "_c10d_functional_autograd": _by_name(_FUNCTIONAL),
}
_NO_PAYLOAD = {"barrier", "monitored_barrier"}


def _sent_share(kind: str, ranks: int) -> float:
    """What a rank has to send of the whole tensor: NCCL's bus bandwidth factors."""
    if kind == "all_reduce":  # a reduce_scatter, then an all_gather
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "scatter"):  # all but its own part
        return (ranks - 1) / ranks
    if kind in ("broadcast", "reduce", "gather"):
        return min(1, ranks - 1)
    return {"send": 1, "recv": 0}[kind]


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as one rank sees it."""

    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast, …
    dtype: torch.dtype
    elements: int  # of the whole tensor: what all_gather returns, what reduce_scatter is given
    ranks: int  # how many take part

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank has to send, with an algorithm that sends as little as can be.

        A ring reaches it (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
        of workstations", 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). A library may send
        more: gloo sends twice as much, where it makes a `reduce_scatter` from an `all_reduce`.
        """
        return round(_sent_share(self.kind, self.ranks) * self.payload_bytes)


@dataclass(repr=False)
class Communication(Printed):
    """The collectives of this process in the block of `count_communication`, in their order."""

    calls: list[Collective] = field(default_factory=list)

    def of(self, kind: str | None = None, dtype: torch.dtype | None = None) -> "Communication":
        """Those of a kind, of a dtype, or of both."""
        calls = list(self.calls)
        if kind is not None:
            calls = [call for call in calls if call.kind == kind]
        if dtype is not None:
            calls = [call for call in calls if call.dtype == dtype]
        return Communication(calls)

    @property
    def elements(self) -> int:
        """Values in all their tensors."""
        return sum(call.elements for call in self.calls)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all their tensors."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has to send for them: see `Collective.sent_bytes`."""
        return sum(call.sent_bytes for call in self.calls)

    def totals(self) -> dict[tuple[str, torch.dtype], "Communication"]:
        """The collectives by (kind, dtype), in the order in which each was first seen."""
        keys = dict.fromkeys((call.kind, call.dtype) for call in self.calls)
        return {(kind, dtype): self.of(kind, dtype) for kind, dtype in keys}

    def _table(self) -> Table:
        head = ["collective", "dtype", "calls", "elements", "payload bytes", "sent by a rank"]
        caption = f"{plural(len(self.calls), 'collective')} of this process"
        rows = []
        for (kind, dtype), part in self.totals().items():
            rows.append([kind, short_name(dtype), *part._numbers()])
        foot = []
        if rows:
            foot.append(["all", "", *self._numbers()])
        return Table(head, rows, caption, foot=foot, right=range(2, 6))

    def _numbers(self) -> list[str]:
        numbers = (len(self.calls), self.elements, self.payload_bytes, self.sent_bytes)
        return [f"{number:,}" for number in numbers]


_counting: list[Communication] = []  # of the blocks that this process is in


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Note every collective that this thread issues in the block, backward passes included.

        with count_communication() as sent:
            train_step()
        print(sent)

    It sees what DDP's reducer, its comm hooks, FSDP2, DTensor and calls of `torch.distributed`
    issue, on any backend. What ranks on one machine hand each other through memory in place of a
    collective (`amp_lab.parallel.shared_memory`) counts as that collective. Not seen: what
    another thread issues, such as a callback of a hook's future; barriers, which carry nothing;
    and the sizes of Python objects, sent through a store.
    Raises `ParallelError` in the block for a collective of which it is not known what it sends.
    """
    with _Counter() as counter:
        _counting.append(counter.found)
        try:
            yield counter.found
        finally:
            _counting.pop()


def note_shared(kind: str, dtype: torch.dtype, elements: int, ranks: int) -> None:
    """Count what stands in for a collective, and is none of torch's."""
    for found in _counting:
        found.calls.append(Collective(kind, dtype, elements, ranks))


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Communication()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will call collectives on its local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A higher-order op has no packet, and is no collective.
        packet = getattr(func, "_overloadpacket", "")
        space, _, name = str(packet).partition(".")
        if space in _OPS:
            name = name.strip("_").removesuffix("_coalesced").removesuffix("_out")
            self._note(space, name, [*args, *kwargs.values()], result)
        return result

    def _note(self, space: str, name: str, args: list, result: object) -> None:
        group = _group_of(args)
        if group is None or name in _NO_PAYLOAD:
            return
        if name not in _OPS[space]:
            raise ParallelError(f"{space}::{name}: it is not known what it sends; count without it")
        kind, place = _OPS[space][name]
        payload = _tensors(result if place == _RESULT else args[place])
        # Those that do not send, such as the ranks that a scatter is not from, have no payload.
        dtypes = {tensor.dtype for tensor in payload or _tensors([args, result])}
        for dtype in dtypes:  # one, since FSDP2 and DDP send one dtype at a time
            elements = sum(tensor.numel() for tensor in payload if tensor.dtype is dtype)
            self.found.calls.append(Collective(kind, dtype, elements, group.size()))


def _tensors(nested: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _group_of(args: list) -> dist.ProcessGroup | None:
    """The process group: boxed, or the last text, which is its name; None if there is none."""
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str):
            # pyrefly: ignore[bad-argument-type]  # a `NewType` that not every torch has
            return _resolve_process_group(arg)
    return None
