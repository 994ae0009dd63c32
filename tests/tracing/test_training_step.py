"""The forecast of what an optimizer needs, held against real optimizers."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from memory_models import Meter
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree

from amp_lab import forecast_memory
from amp_lab.cli import main
from amp_lab.core.errors import TraceError
from amp_lab.core.optimizers import OPTIMIZERS, Optimizer
from amp_lab.tracing.optimizer_state import optimizer_bytes

DOCS = Path(__file__).parents[2] / "docs"
QUANTIZED = [row.name for row in OPTIMIZERS.values() if row.quantized is not None]
OF_TORCH = [row for row in OPTIMIZERS.values() if row.in_torch and not row.rest]


@pytest.mark.parametrize(
    ("name", "foreach"),
    [(row.name, each) for row in OF_TORCH for each in ([False] if row.loops else [False, True])],
)
def test_optimizer_state_and_temporaries_are_those_of_torch(name, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 50))
    optimizer = OPTIMIZERS[name].make(model.parameters(), foreach=foreach)
    for _ in range(2):  # the first step makes the state
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        meter = Meter()
        for tensor in pytree.tree_leaves([list(model.parameters()), optimizer.state_dict()]):
            if isinstance(tensor, torch.Tensor):
                meter.see(tensor, count=False)
        for parameter in model.parameters():
            meter.see(parameter.grad, count=False)
        with meter:
            optimizer.step()
    state = [
        tensor
        for tensors in optimizer.state.values()
        for tensor in tensors.values()
        if isinstance(tensor, torch.Tensor)
    ]
    shapes = [(tuple(p.shape), p.dtype) for p in model.parameters()]
    steps = sum(t.nbytes for t in state if not t.dim())
    found_state, found_work = optimizer_bytes(name, shapes, "cuda" if foreach else "cpu")
    assert found_state == sum(t.nbytes for t in state) - (steps if foreach else 0)
    assert found_work == pytest.approx(meter.most, abs=64)  # scalars of the host


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("class_name", ["RMSprop", "Adagrad", "Adadelta"])
def test_a_row_is_enough_for_an_optimizer_whose_temporaries_overlap(
    class_name, foreach, monkeypatch
):
    row = Optimizer(f"new-{class_name}", class_name, overlaps=True)
    monkeypatch.setitem(OPTIMIZERS, row.name, row)
    test_optimizer_state_and_temporaries_are_those_of_torch(row.name, foreach)


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_in_torch_says_whether_torch_has_the_class(row):
    assert row.in_torch == hasattr(torch.optim, row.class_name)


def test_muon_is_for_matrices_and_adamw_for_the_rest():
    given = [(128, 64), (128,), (64, 128), (128, 128)]
    parameters = [nn.Parameter(torch.rand(shape)) for shape in given]
    matrices, meter = [p for p in parameters if p.dim() == 2], Meter()
    optimizer = torch.optim.Muon(matrices)
    for parameter in matrices:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = [tensor for one in optimizer.state.values() for tensor in one.values()]
    for tensor in (*matrices, *(p.grad for p in matrices), *state):
        meter.see(tensor, count=False)
    with meter:
        optimizer.step()
    found_state, found_work = optimizer_bytes("muon", [(s, torch.float32) for s in given], "cpu")
    of_bias, _ = optimizer_bytes("adamw", [((128,), torch.float32)], "cpu")
    assert found_state == sum(tensor.nbytes for tensor in state) + of_bias
    assert found_work == meter.most


SHAPES = [(128, 64), (64, 65), (4095,), (4096,), (3, 4096)]  # small, of no multiple of a block, …


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantised_state_is_that_of_torchao(name, shape, dtype):
    optim = pytest.importorskip("torchao.optim")
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = getattr(optim, OPTIMIZERS[name].class_name)([parameter])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    tensors = [part for state in optimizer.state[parameter].values() for part in parts(state)]
    state, _ = optimizer_bytes(name, [(shape, dtype)], "cpu")
    assert state == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.weekly
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_step_with_quantised_state_takes_what_inductor_allocates(name):
    optim = pytest.importorskip("torchao.optim")
    parameter = nn.Parameter(torch.rand(512, 256))
    parameter.grad = torch.rand_like(parameter)
    optimizer = getattr(optim, OPTIMIZERS[name].class_name)([parameter])
    optimizer.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    events = seen.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    _, work = optimizer_bytes(name, [((512, 256), torch.float32)], "cpu")
    assert work == pytest.approx(max(itertools.accumulate(changes)), rel=0.05)


def test_the_help_the_page_and_the_error_name_every_optimizer(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # argparse breaks a line at a hyphen
    with pytest.raises(SystemExit):
        main(["memory", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert f"one of {', '.join(OPTIMIZERS)} (default" in help_text
    with pytest.raises(TraceError, match=f"give one of {', '.join(OPTIMIZERS)}$"):
        forecast_memory(nn.Linear(2, 2), torch.rand(2, 2), precision="fp32", optimizer="no-such")
    page = (DOCS / "your_model.md").read_text(encoding="utf-8")
    sentence = page.partition("`--optimizer` takes ")[2].partition(". ")[0]
    assert re.findall("`(.+?)`", sentence) == list(OPTIMIZERS)


def parts(tensor):
    """The plain tensors that a tensor is made of."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [getattr(tensor, name) for name in names] or [tensor]
