"""load_model and parse_shape: what the command line is given."""

import sys

import pytest
from torch import nn

from amp_lab.cli.model_argument import load_model, parse_shape
from amp_lab.errors import AmpLabError, OptionError

MODULE = """
from torch import nn
print("imported")
finished = nn.Linear(2, 3)
number = 3
class Holder:
    inner = nn.ReLU
def build(): print("built"); return nn.Linear(4, 5)
def needs(width): return nn.Linear(width, 1)
def fails(): raise RuntimeError("missing:\\n  weight")
def empty(): pass
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("import no_such_thing")
    (tmp_path / "my_syntax.py").write_text("def")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before
    for name in ("my_models", "my_broken", "my_syntax"):
        sys.modules.pop(name, None)


def test_a_model_of_a_package_by_function_and_by_class(here):
    assert type(load_model("torchvision.models:squeezenet1_1")).__name__ == "SqueezeNet"
    assert isinstance(load_model("torch.nn:ReLU"), nn.ReLU)


def test_a_model_of_this_folder_in_every_form(here):
    assert load_model("my_models:build").in_features == 4
    assert load_model("my_models:finished").in_features == 2
    assert isinstance(load_model("my_models:Holder.inner"), nn.ReLU)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torchvision.models", "write PACKAGE.MODULE:CALLABLE"),
        ("", "write PACKAGE.MODULE:CALLABLE"),
        (":resnet50", "write PACKAGE.MODULE:CALLABLE"),
        ("torchvision.models:", "write PACKAGE.MODULE:CALLABLE"),
        ("a b:c", "write PACKAGE.MODULE:CALLABLE"),
        ("no_such_package.models:net", "no module 'no_such_package' is installed"),
        ("torchvision.no_such:net", "no module 'torchvision.no_such'"),
        ("torchvision.models:resnet51", "torchvision.models has no 'resnet51'"),
        ("my_models:number", "is of type int: give a callable"),
        ("my_models:needs", "cannot be called without arguments: TypeError"),
        ("my_models:fails", "RuntimeError: missing: weight"),
        ("my_models:empty", "returns a NoneType, not an nn.Module"),
        ("my_broken:net", "No module named 'no_such_thing'"),
        ("my_syntax:net", "cannot be imported: SyntaxError"),
    ],
)
def test_a_wrong_target_is_told_in_one_line(here, target, said):
    with pytest.raises(OptionError, match=said) as error:
        load_model(target)
    assert isinstance(error.value, AmpLabError)
    assert len(str(error.value).splitlines()) == 1


def test_shapes():
    assert parse_shape("8,3,224,224") == (8, 3, 224, 224)
    assert parse_shape(" 8, 3") == (8, 3)
    assert parse_shape("5") == (5,)


@pytest.mark.parametrize("text", ["", "8,", "8x3", "1.5", "8,0", "-1,3", "8;3"])
def test_what_is_no_shape_is_told_in_one_line(text):
    with pytest.raises(OptionError) as error:
        parse_shape(text)
    assert repr(text) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
