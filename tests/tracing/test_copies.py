"""Copies of models that have already been run."""

import copy

import pytest
import torch
from torch import nn

from amp_lab import rehearse, xray
from amp_lab.model_call import ModelCall
from amp_lab.tracing.copies import copied

VALUES = torch.randn(16, 16)


class Remembers(nn.Linear):
    """Keeps what it computed last, in a list too."""

    def forward(self, x):
        self.last = super().forward(x)
        self.history = [self.last]
        return self.last


def has_run():
    model = Remembers(16, 16)
    model(VALUES)
    return model


def weight_normed():
    return torch.nn.utils.weight_norm(nn.Linear(16, 16))


def test_what_a_model_keeps_of_a_graph_is_copied_without_it():
    model = has_run()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    found = copied(model)
    assert found.last is found.history[0]
    assert found.last is not model.last
    assert torch.equal(found.last, model.last)
    assert found.last.grad_fn is None
    assert model.last.grad_fn is not None
    assert torch.equal(found.weight, model.weight)
    assert found.weight is not model.weight


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_is_computed_in_the_copy_too():
    model = weight_normed()
    found = copied(model)
    found(VALUES).sum().backward()
    assert found.weight_v.grad is not None
    assert model.weight_v.grad is None
    assert torch.equal(found(VALUES), model(VALUES))


def test_what_is_copied_together_shares_what_it_did():
    model = has_run()
    found, (inputs,) = copied(model, (model.weight,))
    assert inputs is found.weight


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("build", [has_run, weight_normed])
def test_tools_that_work_on_copies_take_such_models(build):
    model = build()
    assert xray(model, VALUES, device_type="cpu", dtype=torch.float32, real=True).rows
    assert torch.equal(ModelCall(model, (VALUES,)).copy().output(), model(VALUES))


def test_a_model_that_has_run_is_rehearsed():
    assert rehearse(has_run(), VALUES, formats=("fp8",)).layers
