"""Other libraries' loops at toy size: they train what a bare loop trains, and take turns."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from amp_lab import Precision
from amp_lab.core.errors import OptionError
from amp_lab.models import gpt
from measure import peers

CPU = torch.device("cpu")
MODULES = {"fabric": "lightning_fabric", "accelerate": "accelerate", "keras": "keras"}

pytestmark = [
    pytest.mark.weekly,  # a tool of ours for a recorded comparison, which few changes touch
    pytest.mark.usefixtures("one_thread_and_seed"),
]


@pytest.fixture(params=peers.PEERS)
def peer(request, monkeypatch, tmp_path) -> str:
    """Each library; skipped where it is not installed, as in the images."""
    module = MODULES.get(request.param)
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"no {module}: its dependency group is not installed")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # where it writes its settings
    return request.param


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 4))


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 6, 6), torch.randint(4, (8,))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_every_library_trains_what_a_bare_loop_trains(peer, precision, model, batch):
    start, expected = weights(model), copy.deepcopy(model)
    peers.torch_loop(expected, batch, precision, CPU)(3)
    run = peers.PEERS[peer](model, batch, precision, CPU)
    run(1)
    run(2)  # it goes on where it ended
    moved = (weights(expected) - start).abs().max()
    # Keras's Adam rounds in another order, and has its epsilon in another place.
    allowed = 1e-2 * moved if peer == "keras" else 0
    assert (weights(model) - weights(expected)).abs().max() <= allowed


@pytest.mark.parametrize(("name", "instead"), [("fabric", "bf16"), ("accelerate", "fp32")])
def test_fp16_on_a_cpu_is_refused_where_it_would_be_another(name, instead, model, batch):
    pytest.importorskip(MODULES[name])
    with pytest.raises(OptionError, match=f"trains in {instead} when asked for fp16"):
        peers.PEERS[name](model, batch, Precision.FP16, CPU)


@pytest.mark.parametrize(
    "name", ["nanogpt", "amp_lab, compiled", "torch, compiled", "nanogpt, compiled"]
)
def test_a_language_model_is_trained_as_in_a_bare_loop(name):
    torch.manual_seed(0)
    model, tokens = gpt.Gpt(gpt.Size(16, 2, 1), 11), torch.randint(11, (4, 9))
    batch, how = (tokens[:, :-1], tokens[:, 1:]), (Precision.FP32, CPU)
    bare = peers.nanogpt if "nanogpt" in name else peers.torch_loop
    expected = copy.deepcopy(model)
    bare(expected, batch, *how)(3)
    start = weights(model)
    peers.TEXT_PEERS[name](model, batch, *how)(3)
    moved = (weights(expected) - start).abs().max()
    assert moved > 1e-5
    # Compiled code sums in another order, and Adam's first steps divide by what is near 0.
    assert (weights(model) - weights(expected)).abs().max() <= 0.1 * moved


def test_peers_take_turns_with_a_bare_loop(model, batch):
    def refuses(*arguments):
        raise OptionError("fp32 is not for us")

    def breaks(*arguments):
        raise RuntimeError("no kernel\nand more")

    ours = {name: peers.PEERS[name] for name in ("torch", "amp_lab")}
    both = ours | {"third": refuses, "fourth": breaks}
    how = {"precisions": [Precision.FP32]}
    before = weights(model)
    rows = list(peers.measure_peers("net", both, model, batch, CPU, **how, rounds=3))
    bare, own, third, fourth = rows
    assert (bare["status"], bare["ratio"], bare["workload"]) == ("ok", 1.0, "net 8x3x6x6")
    ratios = [a / b for a, b in zip(own["samples_s"], bare["samples_s"], strict=True)]
    assert own["ratio"] == sorted(ratios)[1]
    low, high = own["interval"]
    assert low <= min(ratios) <= max(ratios) <= high
    assert not own["trusted"]  # after three rounds
    assert own["reason"] == bare["reason"] != ""
    assert (third["status"], third["reason"]) == ("not run", "fp32 is not for us")
    assert (fourth["status"], fourth["reason"], fourth["samples_s"]) == ("failed", "no kernel", [])
    assert torch.equal(weights(model), before)  # each trained a model of its own


def test_without_the_bare_loop_there_is_no_ratio(model, batch):
    def breaks(*arguments):
        raise RuntimeError("no kernel")

    amp_lab = peers.PEERS["amp_lab"]
    both = {"torch": breaks, "amp_lab": amp_lab}
    how = {"precisions": [Precision.FP32]}
    _, own = peers.measure_peers("net", both, model, batch, CPU, **how, rounds=1)
    assert (own["status"], own["ratio"], len(own["samples_s"])) == ("ok", None, 1)
