"""The checkpoint of a run: what it holds, how it is written, restored, and made one file.

config, classes      the run's settings and its number of classes, to build the model anew
scheduler, scaler    state dicts
ranks                for each rank its own: progress, and random states
model, optimizer     state dicts; or, of a sharded run, in their place
shards               the folder beside the file, and the digests of what is in it
"""

import reprlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from amp_lab.core.errors import CheckpointError, first_line
from amp_lab.parallel.ranks import Parallel, Ranks
from amp_lab.train.checkpoint.file import load_checkpoint, save_checkpoint
from amp_lab.train.checkpoint.random_state import random_states, restore_random_states
from amp_lab.train.distributed.process_group import is_lost

CHECKPOINT = "checkpoint.pt"
SHARDS = "shards"
_T = TypeVar("_T")
_Parts = dict[str, Any]
"""Model, optimizer, scheduler and scaler, by these names."""
WRONG_CONTENT = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What it raises to read a state that is whole, and holds other things than a run's."""
_MAX_CLASSES = 2**18  # more than any tokenizer is taken with


def save_run(out: Path, ranks: Ranks, parts: _Parts, progress: dict, description: dict) -> None:
    """Save a run into its folder, so that at any moment the last state or this one is there, whole.

    `parts` are model, optimizer, scheduler and scaler, by these names; `progress` is that of this
    rank; `description` has ``config`` and ``classes``. All ranks must call it. Raises
    `CheckpointError` on every rank if one cannot write.
    """
    ranks.share_buffers(parts["model"])  # rank 0 saves its own, and all go on with those
    own = {"progress": progress, "random": random_states(ranks.device)}
    state = description | parts
    state["ranks"] = ranks.gather(own)
    folder = None
    if ranks.kind is Parallel.FSDP:
        from amp_lab.train.checkpoint.shards import save_shards

        # A folder of its own, so that the one that checkpoint.pt names stays whole until then.
        epochs = len(progress["epochs"])
        folder = f"{SHARDS}-{epochs}-{progress['batch']}"
        model = state.pop("model")
        optimizer = state.pop("optimizer")
        state["shards"] = save_shards(out / folder, model, optimizer, ranks)
    ranks.first(lambda: save_checkpoint(out / CHECKPOINT, **state))
    if ranks.rank == 0:
        _remove_shards(out, keep=folder)


def _remove_shards(out: Path, keep: str | None) -> None:
    """Remove the folders of earlier states."""
    for folder in out.glob(f"{SHARDS}-[0-9]*-[0-9]*"):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)  # one that cannot go does no harm


def load_run(out: Path, config: dict) -> dict | None:
    """The state of a run of these settings but `epochs`, or None; else a `CheckpointError`."""
    path = out / CHECKPOINT
    if not path.exists():
        return None
    state = load_checkpoint(path)
    if not _is_same_run(state.get("config"), config):
        raise CheckpointError(f"{path}: of another run than config.json beside it describes")
    require_run(path, state)
    return state


def _is_same_run(saved: Any, config: dict) -> bool:
    """Whether the settings in a checkpoint are these, of which `epochs` may be others."""
    if not isinstance(saved, dict) or not saved:
        return False
    expected = config | {"epochs": saved.get("epochs")}
    # A setting that the checkpoint does not know of was added since.
    return saved.items() <= expected.items()


def require_run(path: Path, state: dict) -> None:
    """Raise `CheckpointError` for a state that `save_run` has not written, as far as it shows."""
    for name, kind in {"config": dict, "classes": int, "ranks": list}.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(f"{path}: not of a run (its {name!r} is no {kind.__name__})")
    classes = state["classes"]
    if not 1 <= classes <= _MAX_CLASSES:
        raise CheckpointError(f"{path}: not of a run (it has {classes} classes)")


def restore_run(
    out: Path, state: dict, ranks: Ranks, parts: _Parts, progress: Callable[[dict], _T]
) -> _T:
    """Put the state of `load_run` into the parts of a run; return the progress of this rank.

    It may have been saved on another number of ranks, sharded or not. `progress` makes it of what
    was saved. Raises `CheckpointError` for the state of another model.
    """
    before = _settings(parts)
    try:
        _restore_tensors(out, state, ranks, parts["model"], parts["optimizer"])
        for name in ("scheduler", "scaler"):
            parts[name].load_state_dict(state[name])
        _require_alike(parts, before)
        return progress(_restore_own(state["ranks"], ranks))
    except WRONG_CONTENT as error:
        if is_lost(error):
            raise
        problem = f"does not fit this run ({first_line(error)})"
        raise CheckpointError(f"{out / CHECKPOINT}: {problem}") from error


def _restore_tensors(out: Path, state: dict, ranks: Ranks, model: Any, optimizer: Any) -> None:
    # shards is imported where it is needed, since torch's part of it takes a second to load.
    if "shards" in state:
        from amp_lab.train.checkpoint.shards import load_shards

        load_shards(out, state["shards"], model, optimizer, ranks)
    elif ranks.kind is Parallel.FSDP:
        from amp_lab.train.checkpoint.shards import load_whole

        load_whole(state["model"], state["optimizer"], model, optimizer)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def _settings(parts: _Parts) -> dict:
    """What the parts of a run hold besides the tensors of the model and of the optimizer."""
    return {
        "scheduler": parts["scheduler"].state_dict(),
        "scaler": parts["scaler"].state_dict(),
        "optimizer": parts["optimizer"].state_dict()["param_groups"],
    }


def _require_alike(parts: _Parts, before: dict) -> None:
    """Raise `ValueError` for loaded parts with which the next step would fail."""
    after = _settings(parts)
    for name in before:
        _require_kind(after[name], before[name], name)
    done = after["scheduler"]["last_epoch"]
    total = before["scheduler"]["total_steps"]
    if not 0 <= done <= total:
        raise ValueError(f"the scheduler has done {done} of {total} steps")
    for group in after["optimizer"]:
        betas = group["betas"]
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"the optimizer's betas are {betas}")
    for parameter, values in parts["optimizer"].state.items():
        if values != {}:  # of a parameter without gradients
            _require_adam_state(values, parameter.shape)


def _require_adam_state(values: dict, shape: torch.Size) -> None:
    """Raise `ValueError` unless this is what the optimizer keeps of a parameter of this shape."""
    shapes = {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}
    if values.keys() != shapes.keys():
        names = ", ".join(map(str, values))
        raise ValueError(f"the optimizer keeps {names}")
    for name, value in values.items():
        has_shape = isinstance(value, torch.Tensor) and value.shape == shapes[name]
        if not has_shape:
            raise ValueError(f"{name} of the optimizer is of another shape")
    steps = values["step"]
    if not steps >= 0:  # NaN is not
        raise ValueError(f"the optimizer has done {steps.item()} steps")


def _require_kind(value: Any, wanted: Any, name: str) -> None:
    """Raise `ValueError` for a value of another kind than the one that it takes the place of."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            raise ValueError(f"{name} has other entries")
        for key, wanted_entry in wanted.items():
            _require_kind(value[key], wanted_entry, f"{name}: {key}")
    elif isinstance(wanted, list | tuple):
        for entry, wanted_entry in zip(value, wanted, strict=True):
            _require_kind(entry, wanted_entry, name)
    elif not _may_replace(value, wanted):
        raise ValueError(f"{name} is {reprlib.repr(value)}")


def _may_replace(value: object, wanted: object) -> bool:
    """Whether a value may take the place of one: of a number another, of an integer an integer."""
    if wanted is None or isinstance(wanted, str | bool):
        return value == wanted
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return isinstance(value, float) and isinstance(wanted, float)


def _restore_own(states: list[dict], ranks: Ranks) -> dict:
    """What this rank had for itself; another number of ranks shares it out anew."""
    rank = ranks.rank
    if rank < len(states):  # a rank that was not there before keeps what its seed gave it
        restore_random_states(states[rank]["random"], ranks.device)
    progress = [state["progress"] for state in states]
    if ranks.size == len(states):
        return progress[rank]
    # The sums are added up over the ranks in the end, so it is enough that one of them has them.
    is_first = rank == 0
    own = {}
    for name in ("loss_sum", "correct"):
        total = sum(p[name] for p in progress)
        own[name] = total * is_first
    samples = sum(p["samples"] for p in progress)
    own["samples"] = samples // ranks.size
    return progress[0] | own
