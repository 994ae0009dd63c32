"""docs/memory_in_practice.md: its code runs, and PyTorch does what the page says."""

import functools
import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from amp_lab import forecast_memory

PAGE = (Path(__file__).parents[2] / "docs" / "memory_in_practice.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
MIB = 2**20

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore:.*CUDA"),
]


def code_of(words: str) -> str:
    """The code of the section whose heading contains these words."""
    (section,) = (text for heading, text in SECTIONS.items() if words in heading)
    (code,) = FENCE.findall(section)
    return code


class Blocks(nn.Module):
    """Eight blocks of an MLP, checkpointed in a number of parts; 0 for no checkpoint.

    `checkpoint_sequential` does not checkpoint its last part, so a single part needs `checkpoint`.
    """

    def __init__(self, parts: int):
        super().__init__()
        blocks = [
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
            for _ in range(8)
        ]
        self.blocks, self.parts = nn.Sequential(*blocks), parts

    def forward(self, x):
        if not self.parts:
            return self.blocks(x)
        if self.parts == 1:
            return checkpoint(self.blocks, x, use_reentrant=False)
        return checkpoint_sequential(self.blocks, self.parts, x, use_reentrant=False)


@functools.cache
def forecast(parts: int = 0, batch: int = 2048):
    """The forecast of a step of `Blocks` under bf16 autocast with Adam."""
    return forecast_memory(Blocks(parts), torch.empty(batch, 256, device="meta"), precision="bf16")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="what happens without an accelerator")
def test_the_memory_functions_run_without_an_accelerator(capsys):
    exec(code_of("measure the peak"), {"torch": torch, "train_step": len, "batch": []})
    assert capsys.readouterr().out == "0.00 GiB\n"


def expandable_segments(**variables: str) -> str:
    """What the line of the page prints in a process with these environment variables."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import torch\n" + code_of("CUDA_ALLOC_CONF")],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "deprecated" not in done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="a build without CUDA's allocator")
def test_both_names_of_the_variable_work_and_the_old_one_wins():
    """AMP0270."""
    on, off = "expandable_segments:True", "expandable_segments:False"
    assert expandable_segments(PYTORCH_CUDA_ALLOC_CONF=on) == "True"
    assert expandable_segments(PYTORCH_ALLOC_CONF=on) == "True"
    assert expandable_segments(PYTORCH_CUDA_ALLOC_CONF=off, PYTORCH_ALLOC_CONF=on) == "False"


def test_an_unknown_option_of_the_allocator_raises():
    """AMP0270."""
    with pytest.raises(ValueError, match="Unrecognized key 'expandeable_segments'"):
        torch._C._accelerator_setAllocatorSettings("expandeable_segments:True")


def test_small_batches_peak_in_the_optimizer():
    assert forecast(batch=64).peak_phase == "optimizer"
    assert forecast(batch=2048).peak_phase == "backward"
    assert forecast(batch=64).peak == pytest.approx(forecast(batch=32).peak, rel=1e-3)


def test_the_parts_of_a_peak_in_the_backward_pass_add_up_to_more():
    """Some gradients are not yet allocated then."""
    found = forecast(batch=2048)
    parts = found.weights + found.gradients + found.optimizer + found.activations
    assert found.peak < parts


def test_adam_allocates_8_bytes_per_parameter_in_its_first_step():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    assert not optimizer.state
    optimizer.step()
    moments = [
        value for state in optimizer.state.values() for value in state.values() if value.ndim
    ]
    assert sum(value.nbytes for value in moments) == 8 * sum(p.numel() for p in model.parameters())


def peak_of_accumulation(batch: int, count: int) -> float:
    """The peak in MiB of the backward passes of `count` batches."""
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.ones(batch, 512)
    tracker.track_external(model)
    with tracker:
        for _ in range(count):
            (model(x).square().mean() / count).backward()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / MIB


def test_the_peak_does_not_depend_on_the_number_of_accumulated_batches():
    """AMP0272."""
    assert peak_of_accumulation(1024, 1) == pytest.approx(20, abs=0.1)
    assert peak_of_accumulation(256, 4) == pytest.approx(12, abs=0.1)
    assert peak_of_accumulation(256, 2) == peak_of_accumulation(256, 4)
    assert peak_of_accumulation(256, 1) == pytest.approx(8.5, abs=0.1)


def test_each_checkpointed_part_keeps_its_input():
    """AMP0272."""
    kept = [round(forecast(parts).activations / MIB) for parts in (0, 4, 8)]
    assert kept == [88, 26, 19]


def test_checkpointing_under_autocast_changes_no_gradient():
    model, x = Blocks(0), torch.randn(4, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model.blocks(x)
    plain.float().square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    names = {
        "torch": torch,
        "checkpoint_sequential": checkpoint_sequential,
        "blocks": model.blocks,
        "x": x,
        "device_type": "cpu",
    }
    exec(code_of("checkpointing work under autocast"), names)
    names["hidden"].float().square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_where_checkpointing_does_not_lower_the_peak():
    """AMP0272."""
    assert forecast(parts=1).activations < 0.05 * forecast(parts=0).activations
    assert forecast(parts=1).peak == pytest.approx(forecast(parts=0).peak, rel=1e-3)
    assert forecast(parts=4).peak < 0.7 * forecast(parts=0).peak
    assert forecast(parts=8).peak_phase == "optimizer"


def test_a_run_is_resumed_from_a_file_that_is_mapped(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    names = {"torch": torch}
    exec(code_of("when I resume"), names)
    resumed = nn.Linear(2, 2)
    other = torch.optim.Adam(resumed.parameters())
    names["resume"](path, resumed, other)
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(
        other.state[resumed.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_the_logits_of_an_evaluation_fill_a_gpu():
    logits = torch.empty(1000, 512, 30522, device="meta")
    assert round(logits.nbytes / 2**30) == 58
    assert logits.argmax(-1).nbytes < 4 * MIB


def test_a_caught_exception_keeps_the_tensors_of_the_failed_step():
    """AMP0271."""
    alive = weakref.WeakSet()

    def train_step(batch):
        activation = batch.clone()
        alive.add(activation)
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(alive)

    batch = torch.ones(4)
    try:
        train_step(batch)
    except torch.OutOfMemoryError:
        assert len(alive) == 1
    assert not alive
    model = nn.Linear(1, 1)
    names = {
        "torch": torch,
        "train_step": train_step,
        "optimizer": torch.optim.SGD(model.parameters()),
    }
    exec(code_of("the retry fails"), names)
    assert names["step_or_smaller"](batch) == [1, 1]  # only its own activation is alive


def test_a_notebook_keeps_the_tensors_of_the_last_error_only():
    """AMP0271."""
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    alive = weakref.WeakSet()
    shell = shells.InteractiveShell()
    shell.user_ns.update(torch=torch, alive=alive)
    shell.run_cell(
        "def step():\n    x = torch.ones(2)\n    alive.add(x)\n    raise RuntimeError('memory')"
    )
    for cell, count in (("step()", 1), ("2 + 2", 1), ("1/0", 0)):
        shell.run_cell(cell)
        gc.collect()
        assert len(alive) == count
