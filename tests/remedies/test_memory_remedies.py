"""What `memory` advises where a step does not fit: each way is taken, and saves what it said."""

import functools
import re

import pytest
import torch
from remedy_tests import does, says
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from amp_lab import forecast_memory
from amp_lab.core.errors import TraceError
from amp_lab.model_call import ModelCall
from amp_lab.tracing.memory import memory_table
from amp_lab.tracing.memory_arguments import parse_bytes
from amp_lab.tracing.memory_result import MemoryTable

WIDTH, DEPTH = 512, 6
INPUTS = torch.empty(16, WIDTH, device="meta")


class Block(nn.Sequential):
    def __init__(self, width: int = WIDTH):
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def new_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(DEPTH)))


def table(memory: str, **options) -> MemoryTable:
    options = {"precisions": ["fp32", "bf16"], "optimizer": "adamw"} | options
    return memory_table(ModelCall(new_model(), (INPUTS,)), memory_bytes=memory, **options)


def advised(code: str, found: MemoryTable) -> str:
    (line,) = [line for line in found.ways_out if says(code, line)]
    return line


def claimed_bytes(line: str) -> int:
    number = re.search(r"saves about ([\d.,]+ [MG]iB)", line)[1]
    return parse_bytes(number.replace(",", ""))


def peak(model: nn.Module, **options) -> int:
    options = {"precision": "bf16", "optimizer": "adamw"} | options
    return forecast_memory(model, INPUTS, **options).peak


@pytest.fixture(scope="module")
def too_large() -> MemoryTable:
    return table("150MiB")


@does("memory.eight_bit_state")
def test_adams_state_in_eight_bits(too_large):
    """AMP0172 and AMP0230."""
    line = advised("memory.eight_bit_state", too_large)
    assert "--optimizer adamw-8bit" in line
    saved = peak(new_model()) - peak(new_model(), optimizer="adamw-8bit")
    assert claimed_bytes(line) == pytest.approx(saved, rel=0.05)


@does("memory.shard")
def test_more_ranks(too_large):
    """AMP0172."""
    line = advised("memory.shard", too_large)
    ranks = int(re.search(r"--fsdp-ranks (\d+)", line)[1])
    assert line.endswith("and the step then fits")
    assert peak(new_model(), fsdp_ranks=ranks) < peak(new_model()) - 0.8 * claimed_bytes(line)


@does("memory.low_weights")
def test_weights_in_bf16(too_large):
    line = advised("memory.low_weights", too_large)
    cast = forecast_memory(
        new_model().bfloat16(), INPUTS.bfloat16(), precision="fp32", optimizer="adamw"
    )
    saved = peak(new_model()) - cast.peak
    assert claimed_bytes(line) <= 1.05 * saved
    assert claimed_bytes(line) > 0.8 * saved


@does("memory.adapters")
def test_frozen_weights_with_adapters(too_large):
    """AMP0172."""

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear):
            super().__init__()
            self.layer = layer
            self.down = nn.Linear(layer.in_features, 2, bias=False, device="meta")
            self.up = nn.Linear(2, layer.out_features, bias=False, device="meta")

        def forward(self, x):
            return self.layer(x) + self.up(self.down(x))

    line = advised("memory.adapters", too_large)
    model = new_model().requires_grad_(False)
    for block in model:
        block[0], block[2] = Adapted(block[0]), Adapted(block[2])
    saved = peak(new_model()) - peak(model)
    assert claimed_bytes(line) <= 1.05 * saved
    assert claimed_bytes(line) > 0.8 * saved  # a part that is there at the peak alone


@does("memory.checkpoint")
def test_checkpointed_blocks():
    """AMP0230."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    inputs = torch.empty(20_000, WIDTH, device="meta")
    found = memory_table(
        ModelCall(new_model(), (inputs,)), memory_bytes="300MiB", precisions=["bf16"]
    )
    line = advised("memory.checkpoint", found)
    assert "torch.utils.checkpoint" in line
    assert "use_reentrant=False" in line
    with torch.device("meta"):
        model = Checkpointed(*(Block() for _ in range(DEPTH)))
    plain, kept = (forecast_memory(each, inputs, precision="bf16") for each in (new_model(), model))
    assert kept.peak < 0.5 * plain.peak
    assert f"of {plain.activations / 2**30:.2g} GiB" in line
    assert kept.activations == pytest.approx(DEPTH * inputs.nbytes / 2, rel=0.4)


def test_nothing_is_advised_where_the_step_fits_or_nobody_asks():
    assert table("24GiB").ways_out == ()
    without = memory_table(ModelCall(new_model(), (INPUTS,)), precisions=["bf16"])
    assert without.ways_out == ()


def test_a_way_that_is_not_open_is_not_named(too_large):
    frozen = new_model().requires_grad_(False)
    found = memory_table(ModelCall(frozen, (INPUTS,)), memory_bytes="1MiB")
    assert not [line for line in found.ways_out if says("memory.adapters", line)]
    sgd = table("1MiB", optimizer="sgd")
    assert not [line for line in sgd.ways_out if says("memory.eight_bit_state", line)]
    assert all("still missing" in line for line in sgd.ways_out if "saves about" in line)
    assert "Look at:" in str(too_large)


# Selective checkpointing


def keep_matmuls(context, op, *args, **kwargs):
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


class SharedLayer(nn.Module):
    """A layer that is used in two regions, under an autocast of its own if `cache` says how."""

    def __init__(self, device_type="cpu", cache=None):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.device_type, self.cache = device_type, cache

    def forward(self, x):
        if self.cache is None:
            return self.regions(x)
        with torch.autocast(self.device_type, torch.bfloat16, cache_enabled=self.cache):
            return self.regions(x)

    def regions(self, x):
        select = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False, context_fn=select)
        return x


@does("dtype.selective_checkpoint")
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")  # the forecast has one
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_selective_checkpointing_of_a_shared_weight_with_the_cache_off(device_type):
    x, options = torch.randn(4, 8), {"device_type": device_type, "precision": "bf16"}
    with pytest.raises(TraceError) as refused:
        forecast_memory(SharedLayer(), x, **options)
    assert says("dtype.selective_checkpoint", str(refused.value))
    (setting,) = re.findall(r"cache_enabled=(\w+)", str(refused.value))
    off = {"False": False}[setting]
    as_told = forecast_memory(SharedLayer(device_type, off), x, **options)
    assert as_told.cast_cache == 0
    assert as_told.peak > 0
    for cache in (True, off):  # as training does it
        model = SharedLayer()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = model(x).float().sum()
        if cache:
            with pytest.raises(RuntimeError, match="not found in storage"):
                loss.backward()
        else:
            loss.backward()
            assert model.layer.weight.grad is not None
