"""A state whose checksum fits, with anything in any place: refused in a line, or it trains on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_lab import load_checkpoint
from amp_lab.core.errors import CheckpointError
from amp_lab.parallel.ranks import ALONE
from amp_lab.train.loop import Progress
from amp_lab.train.run_state import CHECKPOINT, TrainingObjects, restore_run, save_run

STEPS = 4
STRANGE = [
    None, True, -1, 5, 10**9, 10**30, -1.5, float("nan"), "", "x", [], [1], {}, {"a": 1}, (),
    torch.zeros(()), torch.zeros(3), torch.zeros(3, dtype=torch.int64),
]  # fmt: skip
progress_of = Progress.from_state_dict


def training_objects() -> TrainingObjects:
    """The parts of a run of a few numbers, after one step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    parts = TrainingObjects(model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=8))
    step(parts)
    return parts


def step(parts: TrainingObjects) -> None:
    loss = parts.model(torch.ones(1, 3)).sum()
    parts.scaler.scale(loss).backward()
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.scheduler.step()


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(
        folder, ALONE, training_objects(), Progress(batch=1, samples=8).state_dict(), {"classes": 2}
    )
    return folder


@pytest.fixture(scope="module")
def state(out) -> dict:
    return load_checkpoint(out / CHECKPOINT)


def places(value: object) -> list[tuple]:
    """The keys and indices that lead to each value within one."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value[:3]))  # the rest of a generator's numbers is alike
    else:
        return []
    return [place for key, one in items for place in ((key,), *((key, *p) for p in places(one)))]


def replaced(value: Any, place: tuple, new: object) -> Any:
    """A copy of a nested value with something else in one place."""
    if not place:
        return new
    key, *rest = place
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[key] = replaced(value[key], tuple(rest), new)
    return tuple(changed) if isinstance(value, tuple) else changed


def test_what_was_saved_goes_on(out, state):
    progress = restore_run(out, state, ALONE, training_objects(), progress_of)
    assert (progress.batch, progress.samples) == (1, 8)
    assert resumes(out, state) == ""


def resumes(out: Path, state: dict) -> str:
    """Restore a state and do a step; what it was refused with."""
    parts = training_objects()
    try:
        restore_run(out, state, ALONE, parts, progress_of)
    except CheckpointError as error:
        return str(error)
    step(parts)
    return ""


@pytest.mark.slow
def test_whatever_is_in_it_is_refused_in_a_line_or_trains_on(out, state):
    read = ("model", "optimizer", "scheduler", "scaler", "ranks")
    of_all_epochs = ("total_steps", "_schedule_phases")  # which a run puts in anew
    for place in places(state):
        if place[0] not in read or (place[1:2] and place[1] in of_all_epochs):
            continue
        for value in STRANGE:
            refused = resumes(out, replaced(state, place, value))
            assert len(refused.splitlines()) <= 1, (place, value)


@pytest.mark.parametrize("name", ["batch", "samples"])
def test_less_than_nothing_is_no_progress(state, name):
    saved = state["ranks"][0]["progress"]
    with pytest.raises(ValueError, match=f"{name} is -1"):
        Progress.from_state_dict(saved | {name: -1})
