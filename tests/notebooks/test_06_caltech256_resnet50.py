"""Notebook 06: its step computes what `amp_lab.train` does; its counts hold."""

import copy
from collections import Counter

import pytest
import torch
from definitions import definitions
from torch import nn
from torchvision.models import resnet50

from course.autocast_rules import policy_of

import build_pairs
from amp_lab import Precision
from amp_lab.train.loop import fit

SOURCE = build_pairs.FOLDER / "06_caltech256_resnet50.py"
CPU = torch.device("cpu")


@pytest.fixture
def notebook() -> dict:
    """What the notebook defines, by name."""
    return definitions(SOURCE, device=CPU)


def tiny_model() -> nn.Module:
    """A convolution and a batch normalisation, frozen, and a head."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return model.requires_grad_(False).append(nn.Linear(4, 3))


def tiny_batches(epoch: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(epoch)
    return [
        (torch.randn(n, 3, 6, 6, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in (4, 4, 3)
    ]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_the_step_trains_bitwise_as_fit_does(notebook, precision, frozen):
    """Weights, running averages and losses are equal after two epochs."""
    model = tiny_model().requires_grad_(True) if not frozen else tiny_model()
    theirs = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    optimizer, their_optimizer = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (model, theirs)
    )
    scaler = torch.amp.GradScaler("cpu", enabled=precision is Precision.FP16)
    step = notebook["train_step"]
    for epoch in range(2):
        for images, targets in tiny_batches(epoch):
            step(model, images, targets, optimizer, scaler, precision.dtype)
    fit(
        theirs,
        lambda epoch, batch: tiny_batches(epoch),
        optimizer=their_optimizer,
        precision=precision,
        device=CPU,
        epochs=2,
    )
    for key, value in model.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key]), key
        moved = not torch.equal(value, start[key])
        assert moved == (not frozen or key.startswith("5.") or "running" in key or "num" in key)


def test_live_tensors_are_counted_once_and_until_they_are_freed(notebook):
    with notebook["LiveTensors"]() as live:
        first = torch.ones(1000)  # 4000 bytes
        view = first.view(10, 100)  # noqa: F841 - brings no memory of its own
        second = first + 1  # 8000 in all
        del second
        third = first.bfloat16()  # 6000
    assert third.nbytes == 2000
    assert live.peak_bytes == 8000
    assert Counter(live.peak) == {((1000,), torch.float32, 4000): 2}
    assert sum(size for _, _, size in live.live.values()) == 6000


def test_adamw_has_no_state_before_the_end_of_its_first_step():
    """Why the notebook counts two steps."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model[-1].parameters())
    model(torch.ones(2, 3, 6, 6)).sum().backward()
    assert not optimizer.state
    optimizer.step()
    assert {moment.dtype for s in optimizer.state.values() for moment in s.values()} == {
        torch.float32
    }


@pytest.mark.parametrize("frozen", [True, False])
def test_only_the_head_saves_for_backward_if_the_rest_is_frozen(frozen):
    model, saved = tiny_model().requires_grad_(not frozen), []
    model[-1].requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, id):
        model(torch.ones(2, 3, 6, 6))
    assert (set(saved) == {(2, 4)}) == frozen


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_amp_halves_the_output_of_every_layer(device_type):
    dtypes = set()
    with policy_of(device_type) as low, torch.device(device_type):
        model = resnet50()
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
        model(torch.rand(2, 3, 64, 64))
    assert dtypes == {low}
