"""given_model: the model that the command line names, and whatever the user's code does."""

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from amp_lab.cli import main
from amp_lab.cli.model_argument import add_model, load_model, parse_arguments

MODULE = """
import argparse
import os
import torch
from torch import nn
print("imported")
argparse.ArgumentParser().parse_args()  # as a script does, which finds no options of its own
finished = nn.Linear(2, 3)
number = 3
class Holder:
    inner = nn.ReLU
class TwoTower(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.user, self.item = nn.Embedding(100, width), nn.Linear(8, width)
    def forward(self, user, item):
        print("forward")
        os.system("echo from a shell")
        return self.user(user).mean(1) * self.item(item)
class Reads(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = float(self.weight.abs().max())
class Exits(nn.Linear):
    def forward(self, x): raise SystemExit(4)
class Weird(BaseException): pass
def build(): print("built"); os.system("echo built"); return nn.Linear(4, 5)
def needs(width): return nn.Linear(width, 1)
def fails(): raise RuntimeError("missing:\\n  weight")
def empty(): pass
def exits(): raise SystemExit(3)
def ends_a_generator(): raise GeneratorExit
def weird(): raise Weird("first\\nsecond")
def exits_in_forward(): return Exits(4, 4)
def ends_a_generator_in_forward():
    class Ends(nn.Linear):
        def forward(self, x): raise GeneratorExit("why")
    return Ends(4, 4)
def ids(high=100): return torch.randint(high, (2, 5))
def whole(high=100):
    return TwoTower(), (ids(high),), {"item": torch.randn(2, 8)}, loss
def with_loss_number(): return TwoTower(), (), {}, 3
def loss(output): return output.float().mean()
def no_scalar(output): return output
def batch(): return ids(), torch.randn(2, 8)
def batch_by_name(): return {"user": ids(), "item": torch.randn(2, 8)}
def batch_of_both(): return (ids(),), {"item": torch.randn(2, 8)}
def batch_fails(): torch.randn(2); raise ValueError("in the middle\\nof it")
def batch_too_high(): return ids(1000), torch.randn(2, 8)
def hangs():
    import time
    while True:
        try: time.sleep(0.1)
        except BaseException: pass
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a file.py").write_text("from beside import Net")
    (tmp_path / "folder" / "beside.py").write_text("from torch import nn; Net = nn.ReLU")
    (tmp_path / "folder" / "relative.py").write_text("from .beside import Net")
    (tmp_path / "my_broken.py").write_text("import no_such_thing")
    (tmp_path / "my_syntax.py").write_text("def")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before
    for name in ("my_models", "my_broken", "my_syntax", "beside", "target_file"):
        sys.modules.pop(name, None)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model(parser)
    return parser.parse_args(arguments)


def load(*arguments: str, with_values: bool = False):
    with load_model(parsed(*arguments), with_values=with_values) as loaded:
        return loaded.call


def test_a_model_of_a_package_by_function_and_by_class(here):
    squeezenet = load("torchvision.models:squeezenet1_1", "--input", "1,3,64,64").model
    assert type(squeezenet).__name__ == "SqueezeNet"
    assert isinstance(load("torch.nn:ReLU", "--input", "1").model, nn.ReLU)


def test_a_model_of_this_folder_in_every_form(here):
    assert load("my_models:build", "--input", "1,4").model.in_features == 4
    assert load("my_models:finished", "--input", "1,2").model.in_features == 2
    assert isinstance(load("my_models:Holder.inner", "--input", "1").model, nn.ReLU)
    assert load("my_models.py:build", "--input", "1,4").model.in_features == 4
    assert isinstance(load("folder/a file.py:Net", "--input", "1").model, nn.ReLU)
    assert load("my_models:needs", "--with", "width=7", "--input", "1,7").model.in_features == 7


def test_a_model_is_built_without_values_where_that_makes_no_difference(here):
    two_tower = ("my_models:TwoTower", "--batch", "my_models:batch")
    assert next(load(*two_tower).model.parameters()).is_meta
    real = load(*two_tower, with_values=True).model
    assert not next(real.parameters()).is_meta
    again = load(*two_tower, with_values=True).model
    assert torch.equal(real.item.weight, again.item.weight)  # two builds are comparable
    reads = load("my_models:Reads", "--input", "2,4").model
    assert reads.scale > 0
    assert not reads.weight.is_meta


def test_evaluation_mode_only_if_asked_for(here):
    assert load("my_models:build", "--input", "1,4").model.training
    assert not load("my_models:build", "--input", "1,4", "--eval").model.training


def test_a_factory_may_bring_inputs_and_loss(here):
    given = load("my_models:whole", with_values=True)
    assert given.args[0].shape == (2, 5)
    assert given.kwargs["item"].shape == (2, 8)
    assert given.loss_fn(torch.ones(3)) == 1
    other = load("my_models:whole", "--input", "int64:3,5<9", "--input", "item=3,8")
    assert other.args[0].shape == (3, 5)
    assert list(other.kwargs) == ["item"]


@pytest.mark.parametrize("batch", ["batch", "batch_by_name", "batch_of_both"])
def test_a_batch_of_the_users_own_in_each_form(here, batch):
    given = load("my_models:TwoTower", "--batch", f"my_models:{batch}", with_values=True)
    assert given.model(*given.args, **given.kwargs).shape == (2, 16)


def test_a_loss_is_a_function_a_class_or_a_part_of_the_output(here):
    output = argparse.Namespace(loss=torch.tensor(2.0))
    one = ("my_models:build", "--input", "1,4", "--loss")
    assert load(*one, "my_models:loss").loss_fn(torch.ones(3)) == 1
    assert load(*one, ".loss").loss_fn(output) == 2
    assert load(*one, ".loss").loss_fn({"loss": output.loss}) == 2
    assert isinstance(load(*one, "torch.nn:ReLU").loss_fn(torch.ones(1)), torch.Tensor)


X = ("--input", "2,4")
TOWER = ("my_models:TwoTower", "--input", "int64:2,5<100", "--input", "2,8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("torchvision.models", *X), "write PACKAGE.MODULE:CALLABLE"),
        (("", *X), "value of target is empty"),
        ((":resnet50", *X), "write PACKAGE.MODULE:CALLABLE"),
        (("torchvision.models:", *X), "write PACKAGE.MODULE:CALLABLE"),
        (("a b:c", *X), "write PACKAGE.MODULE:CALLABLE"),
        (("my_models", *X), "my_models:Exits or my_models:Reads"),
        (("my_models.py", *X), r"my_models.py:TwoTower\?"),
        (("my_models.TwoTower", *X), r"mean my_models:TwoTower\?"),
        (("my_models:TwoTowr", *X), r"no 'TwoTowr'; .* my_models:TwoTower\?"),
        (("my_model:TwoTower", *X), r"mean my_models:TwoTower\?"),
        (("no_such_package.models:net", *X), "no module 'no_such_package'"),
        (("torchvision.no_such:net", *X), "no module 'torchvision.no_such'"),
        (("torchvision.models:resnet51", *X), r"mean torchvision.models:resnet50\?"),
        (("nowhere.py:Net", *X), "no file nowhere.py"),
        (("folder/relative.py:Net", *X), "belongs to a package"),
        (("my_models:number", *X), "type int: .*nn.Module"),
        (("my_models:needs", *X), "called without arguments: TypeError"),
        (("my_models:needs", *X), "add --with width=…"),
        (("my_models:needs", *X, "--with", "height=3"), "called with height=3: TypeError"),
        (("my_models:needs", *X, "--with", "width"), "--with 'width': .*NAME=VALUE"),
        (("my_models:needs", *X, "--with", "width=two words"), "put a string in quotes"),
        (
            ("my_models:needs", *X, "--with", "width=false"),
            "--with 'width=false': write the value as False",
        ),
        (("my_models:needs", *X, "--with", "width=big"), "fails .*: TypeError"),
        (("my_models:finished", *X, "--with", "width=2"), "is a model, so it takes no arguments"),
        (("my_models:fails", *X), "fails .*: RuntimeError: missing: weight"),
        (("my_models:exits", *X), r"the code ends the process \(SystemExit: 3\)"),
        (("my_models:ends_a_generator", *X), "GeneratorExit"),
        (
            ("my_models:ends_a_generator_in_forward", *X),
            "GeneratorExit: why",
        ),
        (("my_models:weird", *X), "Weird: first"),
        (("my_models:exits_in_forward", *X), r"the code ends the process \(SystemExit: 4\)"),
        (("my_models:empty", *X), "a NoneType: return an nn.Module"),
        (("my_models:with_loss_number", *X), "a int as the loss"),
        (("my_broken:net", *X), "module named 'no_such_thing'"),
        (("my_syntax:net", *X), "cannot be imported: SyntaxError"),
        (("my_models:TwoTower",), "TwoTower needs user, item: .*--input"),
        (("my_models:TwoTower",), "for token ids --input 'int64:2,128<100'"),
        (("my_models:TwoTower", *X), "the model takes user, item: .* item=SIZES"),
        (("my_models:TwoTower", *X, "--input", "2,8"), "'user' is float32, .*embedding"),
        (("my_models:TwoTower", *X, "--input", "2,8"), r"give int64:2,4 \('int64:2,4<100'"),
        ((*TOWER[:2], "int64:2,5<101", *TOWER[3:]), "'user' has ids .* 100, .*embedding"),
        ((*TOWER[:4], "2,9"), r"user int64 \(2, 5\), item float32 \(2, 9\)"),
        ((*TOWER, "--input", "2,8"), "the model takes user, item"),
        ((*TOWER[:3], "--input", "items=2,8"), "'items'; the model takes user, item"),
        ((*TOWER, "--batch", "my_models:batch"), "--input and --batch both"),
        (("my_models:whole", "--with", "high=1000"), "embedding 'user' has 100 rows"),
        ((*TOWER[:1], "--batch", "my_models:batch_too_high"), "embedding 'user' has 100 rows"),
        ((*TOWER[:1], "--batch", "my_models:batch_fails"), "ValueError: in the middle"),
        ((*TOWER[:1], "--batch", "my_models:number"), "returns a int as the inputs"),
        ((*TOWER[:1], "--batch", "my_models:nothing"), "my_models has no 'nothing'"),
        ((*TOWER, "--loss", "my_models:no_scalar"), r"one number, .*\(2, 16\)"),
        ((*TOWER, "--loss", ".loss"), "a Tensor, .* no 'loss'"),
        ((*TOWER, "--loss", "my_models:number"), "--loss .*type int: .*NAME"),
        ((*TOWER, "--loss", "torch.nn.functional:mse_loss"), "mse_loss.*output: TypeError"),
        ((*TOWER, "--timeout", "0"), "give a number of seconds above 0"),
        ((*TOWER, "--timeout", "1e300"), r"a number of seconds above 0, up to \d+"),
        ((*TOWER, "--input", ",".join("2" * 5000)), "has 5,000 sizes"),
    ],
)
@pytest.mark.parametrize("command", ["xray", pytest.param("memory", marks=pytest.mark.slow)])
def test_whatever_is_wrong_is_told_in_one_line_and_exit_2(here, capfd, command, arguments, said):
    try:
        code = main([command, *arguments])
    except SystemExit as stop:  # what argparse refuses
        code = stop.code
    printed = capfd.readouterr()
    assert code == 2
    assert printed.out == ""
    assert re.search(said, printed.err)
    assert len(printed.err.splitlines()) == 1


def test_a_target_may_print_and_json_stays_json(here, capfd):
    """From Python and from a shell below it, when it is imported, built and called."""
    for command in ("xray", "memory"):
        assert main([command, *TOWER, "--format", "json"]) == 0
        assert json.loads(capfd.readouterr().out)


def test_a_loss_given_by_name_reaches_the_xray(here, capsys):
    assert main(["xray", *TOWER, "--loss", "my_models:loss"]) == 0
    assert "Loss: fp32." in capsys.readouterr().out


# It starts a process of its own, since it ends one.
@pytest.mark.slow
def test_a_target_that_hangs_is_ended(here):
    done = subprocess.run(
        [sys.executable, "-m", "amp_lab", "xray", "my_models:hangs", *X, "--timeout", "1"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.search("'my_models:hangs': .*after 1 s; .*--timeout", done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_a_word_is_a_string():
    found = parse_arguments(["name=resnet18", "path=a/b-1.0", "n=2", "quoted='two words'"])
    assert found == {"name": "resnet18", "path": "a/b-1.0", "n": 2, "quoted": "two words"}
