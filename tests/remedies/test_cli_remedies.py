"""What the command line advises about the user's own files, done."""

import textwrap

import pytest
from remedy_tests import does, says

from amp_lab.cli import main

MODEL = """
import sys

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def train():
    raise RuntimeError("no data here")

"""
BEHIND = {"raises": "train()", "exits": "sys.exit('usage: train.py DATA')",
          "in a loop": "for epoch in range(2):\n    train()"}  # fmt: skip
GUARD = 'if __name__ == "__main__":'


def said_of(file, text, capfd) -> tuple[int, str]:
    file.write_text(text)
    code = main(["xray", f"{file}:Net", "--input", "2,4", "--device", "cpu"])
    return code, capfd.readouterr().err


@does("cli.guard_script")
@pytest.mark.parametrize("name", BEHIND)
def test_a_script_that_trains_when_it_is_imported(tmp_path, capfd, name):
    code, said = said_of(tmp_path / "script.py", MODEL + BEHIND[name], capfd)
    assert code == 2
    assert says("cli.guard_script", said)
    assert GUARD in said
    assert len(said.splitlines()) == 1
    line = (MODEL + BEHIND[name]).splitlines().index(BEHIND[name].splitlines()[-1]) + 1
    assert f"line {line} of script.py" in said
    guarded = f"{MODEL}{GUARD}\n{textwrap.indent(BEHIND[name], '    ')}"
    assert said_of(tmp_path / "script.py", guarded, capfd) == (0, "")


@pytest.mark.parametrize(
    "text",
    [
        "from torch import no_such_name\n" + MODEL,  # before the model
        MODEL + "class Other(Nothing):\n    pass\n",
        MODEL + "import no_such_module\n",
        MODEL + "def (",
    ],
)
def test_an_error_of_another_kind_has_no_such_advice(tmp_path, capfd, text):
    code, said = said_of(tmp_path / "script.py", text, capfd)
    assert code == 2
    assert not says("cli.guard_script", said)
