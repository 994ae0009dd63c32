"""A training step of one among many ranks of FSDP2: torch's own code, on fake tensors."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_lab.distributed.ranks import Parallel, Ranks
from amp_lab.errors import TraceError
from amp_lab.precision import Precision
from amp_lab.tracing.decisions import Replay
from amp_lab.tracing.ops_seen import tensors_in
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace
from amp_lab.tracing.structures import named_tensors

if TYPE_CHECKING:
    from amp_lab.tracing.training_step import TrainingStep


def trace_sharded(
    step: "TrainingStep", inputs: tuple, kwargs: dict[str, Any], replay: Replay
) -> tuple[list[torch.Tensor], StorageTrace]:
    """The shards that are trained, and what the second step allocates; the first makes buffers.

    Each step takes the decisions of a real run that `replay` has.
    """
    given = [tensor for _, tensor in named_tensors((inputs, kwargs), opened=True)]
    with group_of(step.ranks):
        model = sharded(step.run.model, step.run.parameters | step.run.buffers, step.precision)
        weights = [_local(parameter) for parameter in model.parameters()]
        for _ in range(2):
            model.zero_grad()
            replay.restart()
            ledger = StorageLedger("cpu")
            ledger.own("weights", weights)
            ledger.own("buffers", model.buffers())
            ledger.own("inputs", given)
            with ledger, ledger.seeing_resizes():
                _run_passes(step, model, inputs, kwargs, ledger)
                trained = [p for p in model.parameters() if p.grad is not None]
                ledger.own("gradients", [_local(parameter.grad) for parameter in trained])
                ledger.mark("backward")
        return [_local(parameter) for parameter in trained], ledger.trace(kept_at="forward")


def _run_passes(
    step: "TrainingStep",
    model: nn.Module,
    inputs: tuple,
    kwargs: dict[str, Any],
    ledger: StorageLedger,
) -> None:
    """Run the forward and the backward pass; what only the graph holds ends with it."""
    with torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda tensor: tensor):
        output = step.output(model, inputs, kwargs)
    ledger.mark("cached")
    ledger.mark("forward")
    roots = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if roots:  # none of a frozen model
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def sharded(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    precision: Precision,
    reduce_dtype: str = "fp32",
) -> nn.Module:
    """A copy of the model with fake tensors in place of its own, sharded as `train` does it."""
    named = (*model.named_parameters(), *model.named_buffers())
    # Anew for each trace, since FSDP2 frees what it has cut into shards.
    fakes = {id(own): torch.empty_like(tensors[name]) for name, own in named}
    ranks = Ranks(Parallel.FSDP, reduce_dtype=reduce_dtype)
    with unset_fake_temporarily():
        assert ranks.mesh  # it is made of numbers, which fakes do not have
    return ranks.wrap(_copied(model, fakes, {}), precision)


def _copied(
    module: nn.Module, fakes: dict[int, torch.Tensor], done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """A module whose own tensors are fakes; what else it holds, it shares, such as hooks."""
    if module in done:
        return done[module]
    copied = module.__new__(type(module))
    done[module] = copied
    for name, value in vars(module).items():
        vars(copied)[name] = copy.copy(value) if isinstance(value, dict) else value
    for name, own in module._parameters.items():
        if own is None:
            continue
        fake = fakes[id(own)]
        if not isinstance(fake, nn.Parameter):  # one that is tied is one for both
            fake = nn.Parameter(fake, own.requires_grad)
            fakes[id(own)] = fake
        copied._parameters[name] = fake  # pyrefly: ignore[unsupported-operation]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            copied._buffers[name] = fakes[id(buffer)]
    for name, inner in module._modules.items():
        if inner is not None:
            copied._modules[name] = _copied(inner, fakes, done)
    return copied


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """The block in which this process is the first of so many; the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which makes the back-end

    if dist.is_initialized():
        raise TraceError("this process is one of a group: forecast FSDP2's memory in another")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _local(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor
