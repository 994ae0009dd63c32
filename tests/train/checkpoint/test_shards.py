"""Checkpoints in shards: no code of theirs is run, and what another rank says is passed on."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException

from amp_lab.core.errors import CheckpointError
from amp_lab.parallel.ranks import ALONE
from amp_lab.train.checkpoint import shards


def test_what_one_rank_cannot_write_is_told_with_its_reason(tmp_path, monkeypatch):
    def save(*arguments, **options):
        raise CheckpointException("", {1: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(shards.dcp, "save", save)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"shards: .*saved \(rank 1: .*No space"):
        shards.save_shards(tmp_path / "shards", model, torch.optim.AdamW(model.parameters()), ALONE)


class Command:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def sealed(folder: Path, files: dict) -> dict:
    """As whoever can write the files can write their digests."""
    digests = {name: shards._digest(folder / name) for name in files}
    return {"folder": folder.name, "files": digests}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_was_saved_is_loaded(tmp_path):
    model, optimizer = trained(1)
    found = shards.save_shards(tmp_path / "shards", model, optimizer, ALONE)
    other, its_optimizer = trained(2)
    shards.load_shards(tmp_path, found, other, its_optimizer, ALONE)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert its_optimizer.param_groups[0]["lr"] == 0.01
    first, second = (one.state_dict()["state"][0]["exp_avg"] for one in (optimizer, its_optimizer))
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "torch.load", "torch.os.system"])
def test_no_name_but_those_of_a_description_is_looked_up(name):
    module, _, thing = name.rpartition(".")
    for place, what in ((module, thing), *((m, name) for m, _ in shards._METADATA_GLOBALS)):
        with pytest.raises(pickle.UnpicklingError, match="metadata would load"):
            shards._MetadataUnpickler(io.BytesIO()).find_class(place, what)


def test_the_attribute_of_an_enum_is_looked_up_and_no_other():
    """As Python 3.11.2 pickles one."""
    kind = metadata._MEM_FORMAT_ENCODING
    look_up = shards._MetadataUnpickler(io.BytesIO()).find_class("builtins", "getattr")
    assert look_up(kind, "TORCH_CHANNELS_LAST") is kind.TORCH_CHANNELS_LAST
    for owner, name in ((os, "system"), (kind, "__subclasses__"), (torch, "load")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            look_up(owner, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_command_in_the_description_is_not_run(tmp_path):
    model, optimizer = trained(1)
    found = shards.save_shards(tmp_path / "shards", model, optimizer, ALONE)
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "was-run")))
    planted = sealed(tmp_path / "shards", found["files"])
    with pytest.raises(CheckpointError, match=r"not fit .*would load .*mkdir"):
        shards.load_shards(tmp_path, planted, model, optimizer, ALONE)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_command_among_the_values_is_not_run(tmp_path):
    model, optimizer = trained(1)
    group = optimizer.param_groups[0]
    group["betas"] = Command(tmp_path / "was-run")
    found = shards.save_shards(tmp_path / "shards", model, optimizer, ALONE)
    group["betas"] = (0.9, 0.999)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        shards.load_shards(tmp_path, found, model, optimizer, ALONE)
    assert not (tmp_path / "was-run").exists()
