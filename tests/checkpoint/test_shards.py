"""Checkpoints in shards: what torch says of another rank is passed on."""

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from amp_lab.checkpoint import shards
from amp_lab.distributed.ranks import ALONE
from amp_lab.errors import CheckpointError


def test_what_one_rank_cannot_write_is_told_with_its_reason(tmp_path, monkeypatch):
    def save(*arguments, **options):
        raise CheckpointException("", {1: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(shards.dcp, "save", save)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"shards: could not be saved \(rank 1: .*No space"):
        shards.save_shards(tmp_path / "shards", model, torch.optim.AdamW(model.parameters()), ALONE)
