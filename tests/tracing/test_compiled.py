"""compiled: models that torch.compile has compiled are traced in eager mode, and stay compiled."""

import pytest
import torch
from torch import nn

from amp_lab import forecast_memory, xray

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
BF16 = torch.bfloat16


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.GELU(), nn.Linear(16, 8)))


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def part_wrapped(model, backend):
    model[1] = torch.compile(model[1], backend=backend)
    return model


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def part_in_place(model, backend):
    model[1].compile(backend=backend)
    return model


class CallsCompiled(nn.Module):
    """Calls a compiled function of its own."""

    def __init__(self, model, backend):
        super().__init__()
        self.layers = model
        self.function = torch.compile(lambda x: x * 2, backend=backend)

    def forward(self, x):
        return self.function(self.layers(x))


KINDS = [wrapped, part_wrapped, in_place, part_in_place]


@pytest.fixture
def compiler():
    """A compiler that counts the graphs that it gets."""
    torch.compiler.reset()

    def compile_graph(graph, inputs):
        compile_graph.count += 1
        return graph.forward

    compile_graph.count = 0
    yield compile_graph
    torch.compiler.reset()


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_has_the_rows_of_eager_mode(kind, real, compiler):
    x, options = torch.randn(4, 8), {"device_type": "cpu", "real": real}
    plain = xray(net(), x, **options)
    model = kind(net(), compiler)
    found = xray(model, x, **options)
    ops = [(row.op, row.in_dtypes, row.out_dtypes) for row in found.rows]
    assert ops == [(row.op, row.in_dtypes, row.out_dtypes) for row in plain.rows]
    assert compiler.count == 0
    assert "eager mode" in str(found)
    assert "is compiled" in str(found.by_module())
    assert "is compiled" not in str(plain)
    with torch.no_grad():
        model(x)  # as before, it is compiled
    assert compiler.count == 1


def test_the_modules_of_a_compiled_model_have_the_names_of_the_model():
    plain, found = (xray(model, torch.randn(4, 8)) for model in (net(), torch.compile(net())))
    assert found.rows == plain.rows
    assert found.casts == plain.casts
    assert found.model == plain.model == "Sequential"
    assert found.by_module().rows == plain.by_module().rows


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
@pytest.mark.parametrize("kind", KINDS)
def test_the_forecast_of_a_compiled_model_is_that_of_eager_mode(kind, compiler):
    x = torch.randn(4, 8)
    plain = forecast_memory(net(), x, precision="bf16")
    found = forecast_memory(kind(net(), compiler), x, precision="bf16")
    assert found.phases == plain.phases
    assert compiler.count == 0


def test_a_compiled_function_in_a_model_has_its_ops_too(compiler):
    found = xray(CallsCompiled(net(), compiler), torch.randn(4, 8))
    assert [row.op for row in found.rows][-1] == "mul"
    assert compiler.count == 0
