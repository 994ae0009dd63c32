"""torchvision's classifiers by name: their heads, frozen backbones and pretrained weights."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import torchvision

from amp_lab.core.errors import RunError
from amp_lab.models.build import build_model, model_names
from amp_lab.models.gpt import SIZES, Gpt

ROOT = Path(__file__).parents[2]
SMALL = "squeezenet1_1"  # whose head is a convolution
NAMES = [SMALL, "shufflenet_v2_x0_5", "mobilenet_v3_small", "mnasnet0_5", "regnet_y_400mf"]


def trained(model: torch.nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_language_models_are_as_large_as_their_page_says():
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"`(gpt-\w+)`\s\((\d+)", page))
    assert set(named) == {"gpt-nano", "gpt-micro", "gpt-mini", "gpt-small"}
    for name, millions in named.items():
        with torch.device("meta"):
            model = Gpt(SIZES[name], vocabulary=100)
        without_embedding = count_parameters(model) - count_parameters(model.token)
        assert round(without_embedding / 1e6) == int(millions), name


def count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_all_classifiers_are_known_and_nothing_else():
    assert {"resnet50", "mobilenet_v2", "vit_b_16", "inception_v3"} <= set(model_names())
    assert not any("mask" in name or "r3d" in name or "quant" in name for name in model_names())


def test_an_unknown_name_is_refused_with_the_near_ones():
    with pytest.raises(RunError, match=r"'resnet51'; similar names: resnet50"):
        build_model("resnet51", 10)
    with pytest.raises(RunError, match=r"'zzz'$"):
        build_model("zzz", 10)


@pytest.mark.parametrize("name", NAMES)
def test_it_has_as_many_outputs_as_classes(name):
    model = build_model(name, 7).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_a_second_head_is_left_out(name):
    with torch.device("meta"):
        model = build_model(name, 7)
        assert model(torch.zeros(2, 3, 299, 299)).shape == (2, 7)


@pytest.mark.parametrize("name", NAMES)
def test_freeze_trains_the_head_alone(name):
    head = {
        "shufflenet_v2_x0_5": "fc",
        "mobilenet_v3_small": "classifier.3",
        "regnet_y_400mf": "fc",
    }
    prefix = head.get(name, "classifier.1")
    assert trained(build_model(name, 7, freeze=True)) == [f"{prefix}.weight", f"{prefix}.bias"]
    assert len(trained(build_model(name, 7))) > 10


@pytest.fixture
def weights_file(tmp_path, monkeypatch):
    """Where torchvision keeps the weights of `SMALL`, in an empty cache."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    url = torchvision.models.get_model_weights(SMALL).DEFAULT.url
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints" / url.rpartition("/")[2]


@pytest.mark.parametrize("classes", [7, 1000])
def test_pretrained_weights_go_into_all_but_the_head(weights_file, classes):
    theirs = torchvision.models.get_model(SMALL, weights=None).state_dict()
    torch.save(theirs, weights_file)
    ours = build_model(SMALL, classes, pretrained=True).state_dict()
    changed = {
        name
        for name in ours
        if ours[name].shape != theirs[name].shape or not torch.equal(ours[name], theirs[name])
    }
    head = {"classifier.1.weight", "classifier.1.bias"}
    assert changed == (head if classes == 7 else {"classifier.1.weight"})  # a bias starts at zero


def test_weights_that_cannot_be_fetched_are_said_in_a_line(weights_file, monkeypatch, capfd):
    def no_network(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr(torch.hub, "urlopen", no_network)
    with pytest.raises(RunError) as caught:
        build_model(SMALL, 7, pretrained=True)
    said = str(caught.value)
    assert "\n" not in said
    assert "no network" in said
    assert str(weights_file.parent) in said
    assert capfd.readouterr() == ("", "")
