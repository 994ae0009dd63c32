"""A model built on meta is what it would be with values, or it is not taken."""

import sys

import pytest
import torch
from cases import some_of
from torch import nn
from torchvision import models

from amp_lab import forecast_memory, xray
from amp_lab.tracing.meta_build import build_on_meta


def build(factory):
    return build_on_meta(factory, lambda built: (built, ()))


class Net(nn.Module):
    def __init__(self, table=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4))
        self.table = table

    def forward(self, x):
        return self.linear(x)


def test_a_plain_model_is_built_without_memory():
    model = build(lambda: nn.Sequential(Net(), nn.BatchNorm2d(3), nn.Linear(2**20, 2**20)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.empty(1).device.type == "cpu"  # meta was the default in the call alone


def test_what_reads_values_is_not_taken():
    def reads():
        return Net(float(torch.linspace(0, 1, 4)[1]))

    def compares():
        net = Net()
        return net if net.linear.weight.abs().sum() > 0 else nn.Identity()

    def moves():
        return Net().to("cpu")

    for factory in (reads, compares, moves):
        assert build(factory) is None


def test_a_table_besides_the_weights_would_have_no_values():
    """The forward pass may read it: in an attribute, in a closure or in a cache of its own."""

    def in_a_closure():
        scale = torch.linspace(1, 2, 4)
        net = Net()
        net.register_forward_hook(lambda module, args, out: out * scale)
        return net

    assert build(lambda: Net(table=torch.linspace(0, 1, 4))) is None
    assert build(lambda: Net(table=[{"a": torch.ones(3)}])) is None
    assert build(in_a_closure) is None


def test_views_of_the_weights_are_no_table():
    def shares():
        net = Net()
        net.table = net.linear.weight.detach()[0]
        return net

    assert build(shares) is not None


def test_numbers_that_are_written_down_keep_their_values():
    model = build(lambda: Net(table=torch.tensor([1.0, 2.0])))
    assert model.table.tolist() == [1, 2]


def test_inputs_may_be_on_meta_and_ids_have_values():
    def factory():
        return Net(), (torch.randn(2, 4), torch.randint(0, 9, (2, 4)))

    _, (images, ids) = build_on_meta(factory, lambda built: built)
    assert images.is_meta
    assert int(ids.max()) < 9


def test_a_module_imported_meanwhile_is_as_always(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("import torch; TABLE = torch.linspace(0, 1, 3)")
    monkeypatch.syspath_prepend(tmp_path)

    def factory():
        import late_module  # as transformers does

        return Net(late_module.TABLE)

    try:
        assert build(factory).table.tolist() == [0, 0.5, 1]
    finally:
        sys.modules.pop("late_module", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of("mobilenet_v3_small", "swin_t", "shufflenet_v2_x0_5"))
def test_what_is_traced_is_the_same_with_values_and_without(name):
    """With a table of positions, statistics of batch norm, and drop rates."""
    found = []
    for factory in (getattr(models, name), lambda: build(getattr(models, name))):
        model, images = factory(), torch.empty(2, 3, 64, 64, device="meta")
        seen = xray(model, images, device_type="cuda")
        forecast = forecast_memory(model, images, precision="fp16")
        found.append((seen.rows, seen.casts, forecast))
    assert found[0] == found[1]


@pytest.mark.parametrize("raised", [RuntimeError("no"), MemoryError()])
def test_an_error_is_left_to_the_call_with_values(raised):
    def factory():
        raise raised

    assert build(factory) is None


def test_what_is_no_model_is_left_to_the_caller():
    assert build(lambda: 3) == 3
