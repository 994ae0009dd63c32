"""Copies of models that have already been run."""

import pytest
import torch
from small_models import Remembers
from torch import nn

from amp_lab import rehearse, xray

VALUES = torch.randn(16, 16)


def has_run():
    model = Remembers(16, 16)
    model(VALUES)
    return model


def weight_normed():
    return torch.nn.utils.weight_norm(nn.Linear(16, 16))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("build", [has_run, weight_normed])
def test_tools_that_work_on_copies_take_such_models(build):
    model = build()
    assert xray(model, VALUES, device_type="cpu", dtype=torch.float32, real=True).rows


def test_a_model_that_has_run_is_rehearsed():
    assert rehearse(has_run(), VALUES, formats=("fp8",)).layers
