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

from amp_lab.checkpoint.file import load_checkpoint, save_checkpoint
from amp_lab.checkpoint.random_state import random_states, restore_random_states
from amp_lab.distributed.process_group import is_lost
from amp_lab.distributed.ranks import Parallel, Ranks
from amp_lab.errors import CheckpointError, first_line

CHECKPOINT, SHARDS = "checkpoint.pt", "shards"
_T = TypeVar("_T")
WRONG_CONTENT = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What it raises to read a state that is whole, and holds other things than a run's."""
_MOST_CLASSES = 2**18  # more than any tokenizer is taken with


def save_run(
    out: Path, ranks: Ranks, parts: dict[str, Any], progress: dict, description: dict
) -> None:
    """Save a run into its folder, so that at any moment the last state or this one is there, whole.

    `parts` are model, optimizer, scheduler and scaler, by these names; `progress` is that of this
    rank; `description` has ``config`` and ``classes``. All ranks must call it. Raises
    `CheckpointError` on every rank if one cannot write.
    """
    ranks.share_buffers(parts["model"])  # rank 0 saves its own, and all go on with those
    own = ranks.gather({"progress": progress, "random": random_states(ranks.device)})
    state, folder = description | parts | {"ranks": own}, None
    if ranks.kind is Parallel.FSDP:
        from amp_lab.checkpoint.shards import save_shards

        # A folder of its own, so that the one that checkpoint.pt names stays whole until then.
        folder = f"{SHARDS}-{len(progress['epochs'])}-{progress['batch']}"
        held = state.pop("model"), state.pop("optimizer")
        state["shards"] = save_shards(out / folder, *held, ranks)
    ranks.first(lambda: save_checkpoint(out / CHECKPOINT, **state))
    if ranks.rank == 0:
        for old in out.glob(f"{SHARDS}-[0-9]*-[0-9]*"):
            if old.name != folder:
                shutil.rmtree(old, ignore_errors=True)  # one that cannot go does no harm


def load_run(out: Path, config: dict) -> dict | None:
    """The state of a run of these settings but `epochs`, or None; else a `CheckpointError`."""
    path = out / CHECKPOINT
    if not path.exists():
        return None
    state = load_checkpoint(path)
    saved = state.get("config")
    is_dict = isinstance(saved, dict) and saved
    wanted = config | {"epochs": saved.get("epochs")} if is_dict else config
    # A setting that the checkpoint does not know of was added since.
    if not is_dict or not saved.items() <= wanted.items():
        raise CheckpointError(f"{path}: of another run than config.json beside it describes")
    require_run(path, state)
    return state


def require_run(path: Path, state: dict) -> None:
    """Raise `CheckpointError` for a state that `save_run` has not written, as far as it shows."""
    for name, kind in {"config": dict, "classes": int, "ranks": list}.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(f"{path}: not of a run (its {name!r} is no {kind.__name__})")
    if not 1 <= state["classes"] <= _MOST_CLASSES:
        raise CheckpointError(f"{path}: not of a run (it has {state['classes']} classes)")


def restore_run(
    out: Path, state: dict, ranks: Ranks, parts: dict[str, Any], progress: Callable[[dict], _T]
) -> _T:
    """Put the state of `load_run` into the parts of a run; return the progress of this rank.

    It may have been saved on another number of ranks, sharded or not. `progress` makes it of what
    was saved. Raises `CheckpointError` for the state of another model.
    """
    before = _settings(parts)
    try:
        model, optimizer = parts["model"], parts["optimizer"]
        # shards is imported where it is needed, since torch's part of it takes a second to load.
        if "shards" in state:
            from amp_lab.checkpoint.shards import load_shards

            load_shards(out, state["shards"], model, optimizer, ranks)
        elif ranks.kind is Parallel.FSDP:
            from amp_lab.checkpoint.shards import load_whole

            load_whole(state["model"], state["optimizer"], model, optimizer)
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for name in ("scheduler", "scaler"):
            parts[name].load_state_dict(state[name])
        _require_alike(parts, before)
        return progress(_restore_own(state["ranks"], ranks))
    except WRONG_CONTENT as error:
        if is_lost(error):
            raise
        problem = f"does not fit this run ({first_line(error)})"
        raise CheckpointError(f"{out / CHECKPOINT}: {problem}") from error


def _settings(parts: dict[str, Any]) -> dict[str, Any]:
    """What the parts of a run hold besides the tensors of the model and of the optimizer."""
    settings = {name: parts[name].state_dict() for name in ("scheduler", "scaler")}
    return settings | {"optimizer": parts["optimizer"].state_dict()["param_groups"]}


def _require_alike(parts: dict[str, Any], before: dict[str, Any]) -> None:
    """Raise `ValueError` for loaded parts with which the next step would fail."""
    after = _settings(parts)
    for name in before:
        _require_kind(after[name], before[name], name)
    done, most = after["scheduler"]["last_epoch"], before["scheduler"]["total_steps"]
    if not 0 <= done <= most:
        raise ValueError(f"the scheduler has done {done} of {most} steps")
    for group in after["optimizer"]:
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"the optimizer's betas are {group['betas']}")
    for parameter, values in parts["optimizer"].state.items():
        if values != {}:  # of a parameter without gradients
            _require_of_adam(values, parameter.shape)


def _require_of_adam(values: dict[str, Any], shape: torch.Size) -> None:
    """Raise `ValueError` unless this is what the optimizer keeps of a parameter of this shape."""
    shapes = {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}
    if values.keys() != shapes.keys():
        raise ValueError(f"the optimizer keeps {', '.join(map(str, values))}")
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != shapes[name]:
            raise ValueError(f"{name} of the optimizer is of another shape")
    if not values["step"] >= 0:
        raise ValueError(f"the optimizer has done {values['step'].item()} steps")


def _require_kind(value: Any, wanted: Any, name: str) -> None:
    """Raise `ValueError` for a value of another kind than the one that it takes the place of."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            raise ValueError(f"{name} has other entries")
        for key, one in wanted.items():
            _require_kind(value[key], one, f"{name}: {key}")
    elif isinstance(wanted, list | tuple):
        for one, other in zip(value, wanted, strict=True):
            _require_kind(one, other, name)
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
    rank, size = ranks.rank, ranks.size
    if rank < len(states):  # a rank that was not there before keeps what its seed gave it
        restore_random_states(states[rank]["random"], ranks.device)
    progress = [state["progress"] for state in states]
    if size == len(states):
        return progress[rank]
    # The sums are added up over the ranks in the end, so it is enough that one of them has them.
    shared = {key: sum(p[key] for p in progress) * (rank == 0) for key in ("loss_sum", "correct")}
    samples = sum(p["samples"] for p in progress) // size
    return progress[0] | shared | {"samples": samples}
