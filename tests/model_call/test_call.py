"""A model with its inputs and its loss: what is copied, moved, named and resized."""

import copy

import pytest
import torch
from small_models import Remembers
from torch import nn

from amp_lab.model_call import ModelCall

VALUES = torch.randn(16, 16)


class Masked(nn.Linear):
    """Takes several arguments."""

    def forward(self, x, mask=None, *, scale=1.0):
        return super().forward(x["image"]) * scale


def has_run():
    model = Remembers(16, 16)
    model(VALUES)
    return model


def test_what_a_model_keeps_of_a_graph_is_copied_without_it():
    model = has_run()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    found = ModelCall(model).copy().model
    assert found.last is found.history[0]
    assert found.last is not model.last
    assert torch.equal(found.last, model.last)
    assert found.last.grad_fn is None
    assert model.last.grad_fn is not None
    assert torch.equal(found.weight, model.weight)
    assert found.weight is not model.weight


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_is_computed_in_the_copy_too():
    model = torch.nn.utils.weight_norm(nn.Linear(16, 16))
    found = ModelCall(model).copy().model
    found(VALUES).sum().backward()
    assert found.weight_v.grad is not None
    assert model.weight_v.grad is None
    assert torch.equal(found(VALUES), model(VALUES))


def test_what_is_copied_together_shares_what_it_did():
    model = has_run()
    call = ModelCall(model, (model.weight, VALUES), {"again": [VALUES]}).copy()
    weight, values = call.args
    assert weight is call.model.weight
    assert call.kwargs["again"][0] is values
    assert torch.equal(values, VALUES)
    assert values is not VALUES


def test_an_input_of_a_graph_is_copied_without_it():
    leaf = torch.ones(2, requires_grad=True)
    kept, computed = ModelCall(nn.Identity(), (leaf, 2 * leaf)).copy().args
    assert kept.requires_grad
    assert not computed.requires_grad


def test_a_call_returns_its_output_and_its_loss():
    call = ModelCall(nn.Identity(), (VALUES,))
    assert call.output() is VALUES
    assert call.result() is VALUES
    call = ModelCall(nn.Identity(), (VALUES,), loss_fn=torch.sum)
    assert call.output() is VALUES
    assert call.result() == VALUES.sum()


def test_a_copy_is_moved_and_cast_and_the_original_is_not():
    ids = torch.arange(4)
    call = ModelCall(nn.Linear(16, 16), (VALUES,), {"ids": ids})
    cast = call.copy().to("cpu", torch.bfloat16)
    assert cast.model.weight.dtype is cast.args[0].dtype is torch.bfloat16
    assert cast.kwargs["ids"].dtype is torch.int64
    assert call.model.weight.dtype is call.args[0].dtype is torch.float32
    assert (call.device.type, call.copy().to("meta").device.type) == ("cpu", "meta")
    assert ModelCall(nn.Identity()).device.type == "cpu"


def test_inputs_have_the_names_of_their_arguments():
    call = ModelCall(Masked(4, 4), ({"image": VALUES}, VALUES, 3, VALUES), {"scale": VALUES})
    names = [name for name, _ in call.named_inputs()]
    assert names == ["x", "mask", "input 3", "scale"]


def test_inputs_of_any_structure_grow_where_they_have_the_batch():
    x = torch.arange(4 * 8).reshape(4, 8)
    position = torch.empty(1, 8)
    step = torch.tensor(1)
    call = ModelCall(nn.Identity(), ({"x": x},), {"rest": [position, step], "flag": True})
    assert (call.batch, ModelCall(nn.Identity()).batch) == (4, 1)
    assert call.fixed_shapes == ((1, 8), ())
    empty = call.without_values(7, "meta")
    assert empty.shapes == ((7, 8), (1, 8), ())
    assert empty.kwargs["rest"][1].dtype is torch.int64
    assert empty.kwargs["flag"] is True
    assert empty.tensors[0].is_meta
    repeated = call.with_batch(6)
    assert torch.equal(repeated.args[0]["x"], torch.cat([x, x[:2]]))
    assert repeated.kwargs["rest"] == [position, step]
    assert torch.equal(call.with_batch(3).args[0]["x"], x[:3])
