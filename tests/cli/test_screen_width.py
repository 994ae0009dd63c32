"""What the commands print fits the terminal; a pipe gets each row on a line of its own."""

import pytest

from amp_lab.cli import main

pytestmark = pytest.mark.slow

NET = ("torchvision.models:squeezenet1_1", "--input", "2,3,64,64")
LINEAR = ("torch.nn:Linear", "--with", "in_features=64", "--with", "out_features=64")
COMMANDS = {
    "xray": NET,
    "xray --depth 9": NET,
    "memory": (*NET, "--memory", "8GiB"),
    "memory --eval": (*NET, "--eval"),
    "xray --parallel fsdp": NET,
    "diff": (*NET, "--precision", "bf16"),
    "rehearse": (*LINEAR, "--input", "32,64"),
    "rehearse --eval": (*LINEAR, "--input", "32,64"),
    "advise": (*NET, "--for", "cuda", "--memory", "8GiB"),
    "ops": ("--device", "cpu"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), *COMMANDS[command]]) == 0
    report, _, _ = capsys.readouterr().out.partition("The lines for")  # code, which is copied
    too_wide = [line for line in report.splitlines() if len(line) > 80]
    assert too_wide == []
    assert len(report.splitlines()) > 2


def test_a_pipe_gets_a_row_on_a_line(capsys):
    assert main(["ops", "--device", "cpu"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " conv2d " in line]
    assert len(rows) == 1
