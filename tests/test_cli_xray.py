"""`amp-lab ops`, `xray` and `memory`: what they print, and what they refuse in one line."""

import json
import re

import pytest

from amp_lab.cli import main

NET = "torchvision.models:squeezenet1_1"
INPUT = ("--input", "2,3,64,64")


def printed(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cpu"])
def test_a_model_is_xrayed_for_any_backend(capsys, device):
    out = printed(capsys, "xray", NET, *INPUT, "--device", device)
    low = "bf16" if device == "cpu" else "fp16"
    assert f"SqueezeNet on {device}, autocast {low}" in out
    assert "100.0 % of the work of matrix products and convolutions" in out


def test_the_dtype_can_be_chosen_and_autocast_left_off(capsys):
    assert "autocast bf16" in printed(capsys, "xray", NET, *INPUT, "--dtype", "bf16")
    out = printed(capsys, "xray", NET, *INPUT, "--dtype", "fp32")
    assert "fp16" not in out
    assert "bf16" not in out


def test_a_real_run_and_a_fake_one_print_the_same_table(capsys):
    cpu = ("xray", NET, *INPUT, "--device", "cpu", "--format", "json")
    fake, real = json.loads(printed(capsys, *cpu)), json.loads(printed(capsys, *cpu, "--real"))
    assert (fake.pop("real"), real.pop("real")) == (False, True)
    assert fake == real


def test_two_backends_side_by_side(capsys):
    assert "cuda fp16 against mps fp16" in printed(capsys, "xray", NET, *INPUT, "--against", "mps")
    assert "cuda" in printed(capsys, "ops", "--against", "cpu")


@pytest.mark.parametrize(
    "command",
    [("ops", "--device", "cpu"), ("xray", NET, *INPUT), ("memory", NET, *INPUT)],
    ids=lambda c: c[0],
)
def test_each_format_is_what_it_says(capsys, command):
    assert json.loads(printed(capsys, *command, "--format", "json"))
    assert re.search(r"^\|( *-+:? *\|)+$", printed(capsys, *command, "--format", "markdown"), re.M)
    assert not re.search(r"^\|", printed(capsys, *command), re.M)


def test_memory_in_each_precision_and_the_largest_batch(capsys):
    out = printed(capsys, "memory", NET, "--input", "1,3,64,64", "--memory", "1GiB")
    assert all(f" {precision}" in out for precision in ("fp32", "fp16", "bf16"))
    assert "largest batch in 1 GiB" in out
    one = printed(capsys, "memory", NET, *INPUT, "--precision", "bf16", "--optimizer", "sgd")
    assert "fp16" not in one
    assert "largest batch" not in one


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("xray", "nowhere.models:net", *INPUT), "no module 'nowhere'"),
        (("xray", "torchvision.models:nothing", *INPUT), "has no 'nothing'"),
        (("xray", "torchvision.models", *INPUT), "write PACKAGE.MODULE:CALLABLE"),
        (("xray", "math:pi", *INPUT), "is of type float"),
        (("xray", "torch:zeros", *INPUT), "cannot be called without arguments"),
        (("xray", "builtins:dict", *INPUT), "returns a dict, not an nn.Module"),
        (("xray", NET), "--input"),
        (("xray", NET, "--input", "banana"), "'banana' is no shape"),
        (("xray", NET, "--input", "2,0,64,64"), "every size must be 1 or more"),
        (("xray", NET, "--input", "2,4,64,64"), "2, 4, 64, 64"),
        (("xray", NET, *INPUT, "--device", "tpu"), "device type 'tpu'"),
        (("xray", NET, *INPUT, "--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("xray", NET, *INPUT, "--device", "xpu", "--real"), "xpu"),
        (("memory", NET, *INPUT, "--memory", "24G"), "24GiB"),
        (("memory", NET, *INPUT, "--memory=-1GiB"), "'-1GiB'"),
        (("memory", NET, *INPUT, "--precision", "fp8"), "fp8"),
        (("memory", NET, *INPUT, "--optimizer", "magic"), "magic"),
        (("memory", NET, "--input", "1,4,64,64"), "tried with a batch of 3"),
        (("ops", "--device", "tpu"), "device type 'tpu'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(capsys, arguments, said):
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # what argparse refuses
        code = stop.code
    found = capsys.readouterr()
    assert code == 2
    assert found.out == ""
    assert len(found.err.splitlines()) == 1
    assert said in found.err
