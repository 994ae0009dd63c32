"""A training step on one of the ranks of FSDP2: the code of torch, on fake tensors."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_lab.core.errors import TraceError
from amp_lab.core.precision import Precision
from amp_lab.core.tensors import tensors_in
from amp_lab.model_call import ModelCall
from amp_lab.parallel.ranks import Parallel, Ranks
from amp_lab.tracing.decisions import Replay
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace
from amp_lab.tracing.training_step import TrainingStep, checked_result


def trace_sharded(
    step: TrainingStep, call: ModelCall, replay: Replay
) -> tuple[list[torch.Tensor], StorageTrace]:
    """Run two steps on one rank of FSDP2, and record the allocations of the second.

    The first step allocates buffers that FSDP2 uses again. In both steps, `replay` gives ops that
    depend on values the results that they had in a real run.

    Returns:
        This rank's shard of each parameter that got a gradient, and the allocations.
    """
    with group_of(step.ranks):
        model = sharded(step.run.model, step.run.parameters | step.run.buffers, step.precision)
        weights = [_local(parameter) for parameter in model.parameters()]
        for _ in range(2):
            model.zero_grad()
            replay.restart()
            ledger = StorageLedger(  # a new one for each step: the second step's is returned
                "cpu",
                weights=weights,
                buffers=model.buffers(),
                inputs=call.tensors,
            )
            with ledger, ledger.seeing_resizes():
                _run_passes(dataclasses.replace(call, model=model), ledger)
                trained = [p for p in model.parameters() if p.grad is not None]
                ledger.set_kind("gradients", [_local(parameter.grad) for parameter in trained])
                ledger.mark("backward")
        return [_local(parameter) for parameter in trained], ledger.trace(activations_at="forward")


def _run_passes(call: ModelCall, ledger: StorageLedger) -> None:
    """Run the forward and the backward pass; the autograd graph is freed when this returns.

    Marks the end of the forward pass in the ledger, as "cached" and "forward".
    """
    with ledger.noting_saved():
        result = checked_result(call)
    ledger.mark("cached")  # at the same moment as "forward": without autocast there is no cache
    ledger.mark("forward")
    roots = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
    if roots:  # the outputs of a frozen model have no graph
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def sharded(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    precision: Precision,
    reduce_dtype: str = "fp32",
) -> nn.Module:
    """A copy of the model, sharded as in `train`, with fake tensors.

    `tensors` has a fake tensor for each parameter and buffer, by name. `reduce_dtype` is the short
    name of the dtype in which gradients are summed. Needs a process group, as from `group_of`.
    """
    # New fakes for each trace: FSDP2 frees a parameter once it is cut into shards.
    fakes = {}  # by the id of the model's own parameter or buffer
    for name, buffer in model.named_buffers():
        fakes[id(buffer)] = torch.empty_like(tensors[name])
    for name, parameter in model.named_parameters():
        fake = torch.empty_like(tensors[name])
        fakes[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    ranks = Ranks(Parallel.FSDP, reduce_dtype=reduce_dtype)
    with unset_fake_temporarily():
        # The first access makes the mesh. It reads ranks from a tensor, which must not be fake.
        assert ranks.mesh
    copied = _copy_with_fakes(model, fakes, copies={})
    return ranks.wrap(copied, precision)


def _copy_with_fakes(
    module: nn.Module, fakes: dict[int, torch.Tensor], copies: dict[nn.Module, nn.Module]
) -> nn.Module:
    """A copy of a module and its submodules, with fakes in place of parameters and buffers.

    `fakes` has the fakes by the id of the original tensor. Other attributes, such as hooks, are
    shared with the original module. `copies` has the modules that are copied already, by the
    original, so that a module in two places is copied once. It is empty in the first call, and each
    call adds to it.
    """
    if module in copies:
        return copies[module]
    copied = module.__new__(type(module))  # without __init__
    copies[module] = copied
    for name, attribute in vars(module).items():
        if isinstance(attribute, dict):  # _parameters, _buffers, …, which are changed below
            attribute = copy.copy(attribute)
        vars(copied)[name] = attribute
    for tensors in (copied._parameters, copied._buffers):
        for name, original in tensors.items():
            if original is not None:
                tensors[name] = fakes[id(original)]  # pyrefly: ignore[unsupported-operation]
    for name, submodule in module._modules.items():
        if submodule is not None:
            copied._modules[name] = _copy_with_fakes(submodule, fakes, copies)
    return copied


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """The block in which this process is rank 0 of a process group; its other ranks do not exist.

    `ranks` is the size of the group. torch's "fake" backend communicates nothing. Raises
    `TraceError` if the process is in a group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake"

    if dist.is_initialized():
        raise TraceError(
            "this process is already in a process group: forecast FSDP2's memory in another process"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor
