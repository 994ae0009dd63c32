"""`amp-lab ops`, `xray` and `memory`: what they print, and what they refuse in one line."""

import json
import re
import sys

import pytest

from amp_lab.cli import main

pytestmark = pytest.mark.slow

NET = "torchvision.models:squeezenet1_1"
WIDE = ("torch.nn:Linear", "--with", "in_features=1000000", "--with", "out_features=1000000")
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
    assert re.search(rf"100\.0 % of the work .* in {low}\.", out)


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


def test_each_parameters_dtypes_when_several_processes_share_it(capsys, tmp_path):
    out = printed(capsys, "xray", NET, *INPUT, "--parallel", "fsdp", "--device", "cpu")
    assert "SqueezeNet under FSDP2" in out
    assert "Inputs: argument 0 fp32 → bf16." in out
    ddp = ("--parallel", "ddp", "--precision", "fp16", "--reduce-dtype", "bf16")
    found = json.loads(printed(capsys, "xray", NET, *INPUT, *ddp, "--format", "json"))
    (dtypes,) = {(p["stored"], p["computed"], p["reduced"]) for p in found["parameters"]}
    assert dtypes == ("float32", "float16", "bfloat16")
    own = tmp_path / "own.py"
    own.write_text(SHARDED)
    for name, kind in (("by_fsdp", "fsdp"), ("by_ddp", "ddp")):
        target = (f"{own}:{name}", "--input", "2,4", "--parallel", kind)
        found = json.loads(printed(capsys, "xray", *target, "--format", "json"))
        assert {p["computed"] for p in found["parameters"]} == {
            "float16" if kind == "fsdp" else "float32"
        }
    again = ("xray", f"{own}:by_fsdp", "--input", "2,4", "--parallel", "fsdp")
    refused(capsys, (*again, "--precision", "bf16"), "is already sharded: leave out precision")


SHARDED = """
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

def by_fsdp():
    return fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.float16))

def by_ddp():
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
"""


@pytest.mark.parametrize(
    ("options", "title"),
    [
        (("--against", "mps"), "cuda fp16 against mps fp16"),
        (("--against", "cpu"), "cuda fp16 against cpu bf16"),
        (("--against", "bf16"), "cuda fp16 against cuda bf16"),
        (("--against", "cpu:fp16"), "cuda fp16 against cpu fp16"),
        (("--dtype", "bf16", "--against", "mps"), "cuda bf16 against mps bf16"),
        (("--dtype", "bf16", "--against", "fp32"), "cuda bf16 against cuda fp32"),
        (("--device", "cpu", "--against", "fp32", "--real"), "cpu bf16 against cpu fp32"),
    ],
)
def test_two_side_by_side(capsys, options, title):
    out = printed(capsys, "xray", NET, *INPUT, *options)
    assert f"SqueezeNet: {title}" in out
    differ, total = map(int, re.search(r"(\d+) of (\d+) ops differ", out).groups())
    assert differ <= total
    assert bool(differ) == ("mps" not in title)  # what this model calls, both treat alike


def test_a_row_for_each_module_down_to_a_depth(capsys):
    asked = ("xray", NET, *INPUT, "--depth")
    out = printed(capsys, *asked, "1")
    assert re.search(r"^classifier +Sequential +\(2, 1000, 1, 1\) +fp16 +513,000 +0$", out, re.M)
    assert "classifier.1" not in out
    deeper = printed(capsys, *asked, "2")
    assert re.search(r"^classifier\.1 +Conv2d .* 513,000 +513,000$", deeper, re.M)
    assert re.search(r"^total +1,235,496$", out, re.M)
    assert "1,235,496 parameters (4.7 MiB): 1,235,496 trainable, 0 frozen" in out
    assert "| classifier | Sequential |" in printed(capsys, *asked, "1", "--format", "markdown")
    found = json.loads(printed(capsys, *asked, "1", "--format", "json"))
    assert [row["name"] for row in found["rows"]] == ["", "features", "classifier"]
    assert found["total"]["parameters"] == 1235496
    real = printed(capsys, *asked, "9", "--device", "cpu", "--real")
    assert re.search(r"^classifier\.1 +Conv2d +\(2, 1000, \d, \d\) +bf16 +513,000", real, re.M)


def test_two_op_tables_side_by_side(capsys):
    assert re.search(r"^op +cuda +cpu$", printed(capsys, "ops", "--against", "cpu"), re.M)


MODELS = """
import torch
from torch import nn
class Pairs(nn.Linear):
    def forward(self, x): return (super().forward(x) @ x.t()).exp()
class Eight(nn.Linear):
    def forward(self, x): return super().forward(x.view(8, -1))
def pairs(): return Pairs(4, 4)
def only_of_eight(): return Eight(4, 4)
class Language(nn.Sequential):
    def __init__(self): super().__init__(nn.Embedding(50, 16), nn.Linear(16, 50))
    def forward(self, ids, labels=None):
        logits = super().forward(ids)
        if labels is None: return logits
        return {"loss": cross_entropy(logits, labels), "logits": logits}
def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
def loss(logits): return cross_entropy(logits, torch.zeros(logits.shape[:2], dtype=torch.int64))
def translator(): return nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.other = nn.Embedding(10, 16), nn.Linear(16, 16)
    def forward(self, tokens, x, mask):
        return (self.token(tokens) + self.other(x)).masked_fill(mask[..., None], 0)
"""
TRANSLATOR = ("my_inputs:translator", "--input", "2,5,16", "--input", "2,4,16")
MASKED = ("my_inputs:Masked", "--input", "int64:2,5<10", "--input", "2,5,16")
MASKED += ("--input", "mask=bool:2,5")


@pytest.fixture
def my_inputs(tmp_path, monkeypatch):
    (tmp_path / "my_inputs.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_inputs", None)


@pytest.mark.usefixtures("my_inputs")
def test_a_model_may_have_several_inputs_of_several_dtypes(capsys):
    assert "Output: fp32 (2, 4, 16)." in printed(capsys, "xray", *TRANSLATOR)
    assert "Output: fp32 (2, 5, 16)." in printed(capsys, "xray", *MASKED)
    assert "(2, 5, 16)" in printed(capsys, "xray", *MASKED, "--device", "cpu", "--real")
    out = printed(capsys, "memory", *MASKED, "--memory", "1GiB")
    assert out.startswith("Masked, input 2x5, 2x5x16, 2x5, one training step")
    assert "largest batch in 1 GiB" in out


@pytest.mark.usefixtures("my_inputs")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("xray", *TRANSLATOR[:3]), "'tgt'"),
        (("xray", *TRANSLATOR, "--input", "2,4,x"), "'2,4,x' is not a shape"),
        (("memory", *TRANSLATOR[:3]), "'tgt'"),
        (("memory", *TRANSLATOR[:4], "3,4,16"), "src and tgt"),
    ],
)
def test_wrong_inputs_are_one_line_and_exit_2(capsys, arguments, said):
    refused(capsys, arguments, said)


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


def test_whether_it_fits_is_said_with_a_reserve(capsys):
    asked = ("memory", NET, *INPUT, "--precision", "fp32")
    in_1_gib = printed(capsys, *asked, "--memory", "1GiB")
    assert re.search(r"^fp32: fits, .*\d+ MiB", in_1_gib, re.M)
    assert re.search("reserves 10 % .*for the driver", in_1_gib)
    peak = json.loads(printed(capsys, *asked, "--format", "json"))["forecasts"][0]["peak"]
    for reserve, fits in (("0", True), ("1", False)):  # exactly as much memory as it needs
        budget = ("--memory", str(peak), "--reserve", reserve, "--format", "json")
        found = json.loads(printed(capsys, *asked, *budget))
        assert found["fits"] == {"fp32": fits}
        assert (found["largest_batch"]["fp32"] >= 2) == fits
        assert found["spare_bytes"]["fp32"] == int(peak * (1 - int(reserve) / 100)) - peak
    short = printed(capsys, *asked, "--memory", str(peak // 2), "--reserve", "50")
    assert re.search(r"^fp32: does not fit, \d+ MiB", short, re.M)


@pytest.mark.parametrize("use", [(), ("--eval",)])
def test_the_memory_of_a_named_gpu_is_the_budget(capsys, use):
    command = ("memory", NET, *INPUT, *use)
    named = printed(capsys, *command, "--for", "rtx-4090")
    assert named == printed(capsys, *command, "--device", "cuda", "--memory", "24GiB")
    less = ("--memory", "1GiB")
    assert printed(capsys, *command, "--for", "h100", *less) == printed(capsys, *command, *less)


@pytest.mark.parametrize(("gpu", "device"), [("h100", "cuda"), ("arc-a770", "xpu"), ("mps", "mps")])
def test_a_named_gpu_is_one_of_its_type(capsys, gpu, device):
    for command in (("xray", NET, *INPUT), ("ops",)):
        named = printed(capsys, *command, "--for", gpu)
        assert named == printed(capsys, *command, "--device", device)


@pytest.mark.usefixtures("my_inputs")
def test_a_batch_that_is_not_linear_is_forecast_and_not_extrapolated(capsys):
    for model, inputs in (("pairs", "6,4"), ("only_of_eight", "8,4")):
        asked = ("memory", f"my_inputs:{model}", "--input", inputs, "--memory", "1MiB")
        out = printed(capsys, *asked)
        assert "The largest batch in 1 MiB is unknown for fp32, fp16, bf16: " in out
        assert "fp32: fits, with about" in out
    assert "tried with a batch of 3" in out
    refused(capsys, ("memory", "my_inputs:only_of_eight", "--input", "7,4"), r"shape \(7, 4\)")


@pytest.mark.usefixtures("my_inputs")
def test_a_language_models_loss_is_missed_loudly(capsys):
    ids = ("--input", "int64:2,8<50", "--memory", "1MiB")
    without = printed(capsys, "memory", "my_inputs:Language", *ids)
    assert re.search("too low: .*logits of 50 tokens", without)
    given = ("--loss", "my_inputs:loss")
    with_loss = printed(capsys, "memory", "my_inputs:Language", *ids, *given)
    assert "too low" not in with_loss
    largest = [
        int(re.search(r"largest batch .*?MiB +(\d+)", out)[1]) for out in (without, with_loss)
    ]
    assert largest[0] > largest[1]
    labels = ("--input", "labels=int64:2,8<50")
    own = ("memory", "my_inputs:Language", *ids, *labels)
    assert "'loss': add --loss .loss" in printed(capsys, *own)
    assert "the output has" not in printed(capsys, *own, "--loss", ".loss")
    assert "too low" not in printed(capsys, "memory", *TRANSLATOR)  # whose output is no logits


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("xray", "nowhere.models:net", *INPUT), "no module 'nowhere'"),
        (("xray", "torchvision.models:nothing", *INPUT), "has no 'nothing'"),
        (("xray", "torchvision.models", *INPUT), "write PACKAGE.MODULE:CALLABLE"),
        (("xray", "math:pi", *INPUT), "is of type float"),
        (("xray", "torch:zeros", *INPUT), "cannot be called without arguments"),
        (("xray", "builtins:dict", *INPUT), "a dict: return an nn.Module"),
        (("xray", NET), "SqueezeNet needs x: .*--input"),
        (("xray", NET, "--input", "banana"), "'banana' is not a shape"),
        (("xray", NET, "--input", "2,0,64,64"), "'2,0,64,64': every size"),
        (("xray", NET, "--input", "2,4,64,64"), "2, 4, 64, 64"),
        (("xray", NET, *INPUT, "--device", "tpu"), "device type 'tpu'"),
        (("xray", NET, *INPUT, "--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("xray", NET, *INPUT, "--device", "xpu", "--real"), "xpu"),
        (
            ("xray", *WIDE, "--input", "8,1000000", "--device", "cpu", "--real"),
            "a step needs about",
        ),
        (("xray", NET, *INPUT, "--against", "tpu"), "device type 'tpu'"),
        (("xray", NET, *INPUT, "--against", "fp8"), "device type 'fp8'"),
        (("xray", NET, *INPUT, "--against", ""), "value of against is empty"),
        (
            ("xray", NET, *INPUT, "--against", "cpu:fp8"),
            r"'cpu:fp8': give a device \(cuda, xpu, mps, cpu\), a dtype \(fp16, bf16, fp32\), or",
        ),
        (("xray", NET, *INPUT, "--against", "cpu:"), "'cpu:': give a device"),
        (("xray", NET, *INPUT, "--against", ":bf16"), "device type ''"),
        (("xray", NET, *INPUT, "--against", "cuda:1"), "or both, as cpu:bf16"),
        (("xray", NET, *INPUT, "--against", "cuda"), "'cuda' has the same device and dtype"),
        (("xray", NET, *INPUT, "--against", "cuda:fp16"), "'cuda:fp16' has the same device"),
        (("xray", NET, *INPUT, "--precision", "bf16"), "need --parallel"),
        (("xray", NET, *INPUT, "--parallel", "ddp", "--real"), "with --dtype, --against, --real"),
        (("xray", NET, *INPUT, "--parallel", "ddp", "--depth", "1"), "--real or --depth"),
        (("xray", NET, *INPUT, "--against", "cpu", "--depth", "1"), "leave one out"),
        (("xray", NET, *INPUT, "--depth", "0"), "'0': .*whole number of 1"),
        (("xray", NET, *INPUT, "--depth", "-1"), "'-1': .*whole number of 1"),
        (("xray", NET, *INPUT, "--depth", "1.5"), "'1.5': .*whole number of 1"),
        (("xray", NET, *INPUT, "--depth", "all"), "'all': .*whole number of 1"),
        (("xray", NET, *INPUT, "--depth", ""), "'': .*whole number of 1"),
        (("xray", NET, *INPUT, "--parallel", "tp"), "invalid choice: 'tp'"),
        (("memory", NET, *INPUT, "--memory", "24G"), "24GiB"),
        (("memory", NET, *INPUT, "--memory=-1GiB"), "'-1GiB'"),
        (("memory", NET, *INPUT, "--precision", "fp8"), "fp8"),
        (("memory", NET, *INPUT, "--optimizer", "magic"), "magic"),
        (("memory", NET, "--input", "1,4,64,64"), r"with input of shape \(1, 4, 64, 64\)"),
        (("memory", NET, *INPUT, "--reserve", "100"), "'100': give a percentage from 0 to below"),
        (("ops", "--device", "tpu"), "device type 'tpu'"),
        (("memory", NET, *INPUT, "--for", "rtx-6090"), "'rtx-6090' is not .*rtx-5090"),
        (("xray", NET, *INPUT, "--for", "banana"), "'banana' is not .*use one of gtx-1080-ti"),
        (("xray", NET, *INPUT, "--for", "t4", "--device", "cuda"), "--for .*leave out --device"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(capsys, arguments, said):
    refused(capsys, arguments, said)


def refused(capsys, arguments, said):
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # what argparse refuses
        code = stop.code
    found = capsys.readouterr()
    assert code == 2
    assert found.out == ""
    assert len(found.err.splitlines()) == 1
    assert re.search(said, found.err)


def test_memory_of_inference(capsys):
    asked = ("memory", NET, "--input", "2,3,64,64", "--eval")
    out = printed(capsys, *asked, "--memory", "1GiB")
    assert "inference_mode on cuda" in out
    head = next(line for line in out.splitlines() if line.startswith("in MiB"))
    assert re.split(r"  +", head) == ["in MiB", "fp32", "bf16 autocast", "bf16 weights"]
    found = json.loads(printed(capsys, *asked, "--precision", "fp16", "--format", "json"))
    assert [forecast["way"] for forecast in found["forecasts"]][:2] == [
        "fp16 autocast",
        "fp16 weights",
    ]


@pytest.mark.parametrize("tokens", ["0", "-1", "8k", "1.5", "", "9" * 5000])
def test_tokens_that_are_no_number_of_them_are_refused(capsys, tokens):
    asked = ("memory", NET, *INPUT, "--eval", f"--tokens={tokens}")
    refused(capsys, asked, "number of tokens from 1 to 1,000,000,000")


def test_tokens_are_refused_for_a_training_step(capsys):
    asked = ("memory", NET, *INPUT, "--tokens", "8192")
    refused(capsys, asked, "--tokens .*KV cache .*--eval")


def test_of_tokens_for_a_model_without_a_cache_a_line_is_printed(capsys):
    out = printed(capsys, "memory", NET, *INPUT, "--eval", "--tokens", "8192")
    assert re.search("no KV cache.*8,192 tokens", out)


@pytest.mark.parametrize("option", [("--optimizer", "sgd"), ("--fsdp-ranks", "2")])
def test_what_belongs_to_training_is_refused_for_inference(capsys, option):
    refused(capsys, ("memory", NET, *INPUT, "--eval", *option), f"{option[0]} is for training")


@pytest.mark.parametrize(
    "arguments",
    [
        ["xray", NET, *INPUT],
        ["xray", NET, *INPUT, "--parallel", "fsdp"],
        ["xray", NET, *INPUT, "--parallel", "ddp"],
        ["memory", NET, *INPUT],
        ["diff", NET, *INPUT],
        ["ops"],
    ],
    ids=" ".join,
)
def test_a_device_that_torch_lacks_is_told_in_a_line(capsys, arguments):
    assert main([*arguments, "--device", "banana"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert "'banana'" in line
