"""Count the communication of this process: every collective with its dtype and its bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.errors import ParallelError
from amp_lab.core.report import Printed, Table, plural, short_name
from amp_lab.core.tensors import tensors_in

# Rows of (kind of collective, position of the argument with the whole payload, names of its ops).
# _RESULT: the payload is what the op returns. The names are those of torch without underscores at
# the ends, "_coalesced" and "_out". DDP's reducer, the communication hooks and FSDP2 call the ops
# of Ops.cpp in c10d, DTensor the functional collectives.
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
    """{name of an op: (kind, position of its payload)} from rows like those of `_C10D`."""
    ops = {}
    for kind, position, names in rows:
        for name in names.split():
            ops[name] = (kind, position)
    return ops


_OPS = {  # by namespace of torch.ops
    "c10d": _by_name(_C10D),
    "_c10d_functional": _by_name(_FUNCTIONAL),
    "_c10d_functional_autograd": _by_name(_FUNCTIONAL),
}
_NO_PAYLOAD = {"barrier", "monitored_barrier"}


def _sent_share(kind: str, ranks: int) -> float:
    """The bytes that a rank has to send, relative to `Collective.payload_bytes`.

    `kind` is one of those in `_C10D`. Each share is the bus bandwidth factor of NCCL's tests
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), which is relative to the
    whole tensor, with two exceptions. The payload of ``gather`` is only the rank's own part, all of
    which is sent. A ``recv`` sends nothing.
    """
    if kind == "all_reduce":  # a reduce_scatter, then an all_gather
        return 2 * (ranks - 1) / ranks
    # All but the rank's own part of the tensor.
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "scatter"):
        return (ranks - 1) / ranks
    if kind in ("broadcast", "reduce"):
        return min(1, ranks - 1)  # 0 for a rank alone
    if kind == "gather":  # the payload is only the rank's own part
        return min(1, ranks - 1)
    return {"send": 1, "recv": 0}[kind]


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as one rank sees it."""

    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast, …
    dtype: torch.dtype
    # Of the whole tensor: the result of all_gather, the argument of reduce_scatter. In a gather, of
    # the rank's own part.
    elements: int
    ranks: int  # in the process group

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor; in a gather, of the rank's own part."""
        return self.elements * self.dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """The minimum number of bytes that a rank has to send.

        A ring algorithm sends no more (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
        for clusters of workstations", 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). A library
        may send more: gloo sends twice as much if it makes a `reduce_scatter` from an `all_reduce`.
        """
        return round(_sent_share(self.kind, self.ranks) * self.payload_bytes)


@dataclass(repr=False)
class Communication(Printed):
    """The collectives of this process in the block of `count_communication`, in their order."""

    calls: list[Collective] = field(default_factory=list)

    def of(self, kind: str | None = None, dtype: torch.dtype | None = None) -> "Communication":
        """The collectives of this kind and dtype; None stands for any."""
        calls = list(self.calls)
        if kind is not None:
            calls = [call for call in calls if call.kind == kind]
        if dtype is not None:
            calls = [call for call in calls if call.dtype == dtype]
        return Communication(calls)

    @property
    def elements(self) -> int:
        """Elements of the tensors of all collectives."""
        return sum(call.elements for call in self.calls)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors of all collectives."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def sent_bytes(self) -> int:
        """The minimum number of bytes that this rank has to send: see `Collective.sent_bytes`."""
        return sum(call.sent_bytes for call in self.calls)

    def totals(self) -> dict[tuple[str, torch.dtype], "Communication"]:
        """The collectives grouped by (kind, dtype), in the order of the first call of each."""
        keys = dict.fromkeys((call.kind, call.dtype) for call in self.calls)
        return {(kind, dtype): self.of(kind, dtype) for kind, dtype in keys}

    def _table(self) -> Table:
        head = ["collective", "dtype", "calls", "elements", "payload bytes", "sent by a rank"]
        caption = f"{plural(len(self.calls), 'collective')} of this process"
        rows = []
        for (kind, dtype), group in self.totals().items():
            rows.append([kind, short_name(dtype), *group._numbers()])
        foot = []
        if rows:
            foot.append(["all", "", *self._numbers()])
        return Table(head, rows, caption, foot=foot, right=range(2, 6))

    def _numbers(self) -> list[str]:
        """The cells of these collectives in the table: calls, elements, payload and sent bytes."""
        numbers = (len(self.calls), self.elements, self.payload_bytes, self.sent_bytes)
        return [f"{number:,}" for number in numbers]


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Record every collective that this thread issues in the block, also in backward passes.

        with count_communication() as sent:
            train_step()
        print(sent)

    The block counts collectives of DDP's reducer, its communication hooks, FSDP2, DTensor and calls
    of `torch.distributed`, on any backend. It does not count

    - collectives of another thread, such as a callback of a hook's future;
    - barriers, which have no payload;
    - the sizes of Python objects, which are sent through a store.

    A collective with an unknown payload raises `ParallelError` in the block.
    """
    with _Counter() as counter:
        yield counter.communication


class _Counter(TorchDispatchMode):
    """Adds every collective that is dispatched to `communication`."""

    def __init__(self):
        super().__init__()
        self.communication = Communication()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # DTensor then calls collectives on its local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A higher-order op has no packet, and is no collective.
        packet = getattr(func, "_overloadpacket", "")
        namespace, _, name = str(packet).partition(".")  # "c10d", "allreduce_"
        if namespace in _OPS:
            name = name.strip("_").removesuffix("_coalesced").removesuffix("_out")
            self._note(namespace, name, [*args, *kwargs.values()], result)
        return result

    def _note(self, namespace: str, name: str, args: list, result: object) -> None:
        """Add the call of an op to `communication`; `name` is a key of `_OPS[namespace]`.

        `args` has all arguments, and `result` is what the op returned. Raises `ParallelError` for
        another name. An op without a process group is no communication.
        """
        group = _group_of(args)
        if group is None or name in _NO_PAYLOAD:
            return
        if name not in _OPS[namespace]:
            op = f"{namespace}::{name}"
            raise ParallelError(
                f"{op}: count_communication does not know how many bytes this op sends"
            )
        kind, position = _OPS[namespace][name]
        payload = tensors_in(result if position == _RESULT else args[position])
        # A rank that does not send has no payload, such as one that receives from a scatter. Its
        # call is counted with 0 elements, in the dtype of the other tensors.
        dtypes = {tensor.dtype for tensor in payload or tensors_in([args, result])}
        for dtype in dtypes:  # mostly one, since FSDP2 and DDP send one dtype at a time
            elements = sum(tensor.numel() for tensor in payload if tensor.dtype is dtype)
            self.communication.calls.append(Collective(kind, dtype, elements, group.size()))


def _group_of(args: list) -> dist.ProcessGroup | None:
    """The process group among the arguments of an op; None if there is none.

    c10d ops take the group itself as a script object, functional collectives its name at the end.
    """
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str):
            # pyrefly: ignore[bad-argument-type]  # a `NewType` that not every torch has
            return _resolve_process_group(arg)
    return None
