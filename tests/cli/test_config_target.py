"""A config of transformers as the model: `amp-lab memory config.json`."""

import json
import sys

import pytest
from cases import some_of

from amp_lab.cli import advise, main
from amp_lab.cli.config_target import is_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "dtype": "bfloat16",
}
IDS = ("--input", "input_ids=int64:2,8<100", "--input", "labels=int64:2,8<100", "--loss", ".loss")


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)


def parameters(capsys, target: str, *more: str) -> int:
    assert main(["memory", target, *IDS, *more, "--format", "json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    (fp32, *_) = json.loads(said.out)["forecasts"]
    return fp32["weights"] // 4


@pytest.mark.parametrize("target", some_of("llama/config.json", "llama", "./llama"))
def test_a_config_stands_for_its_model(capsys, target):
    whole = parameters(capsys, target)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    assert whole == sum(parameter.numel() for parameter in own.parameters())
    assert parameters(capsys, target, "--with", "num_hidden_layers=1") < whole


def test_what_is_printed_makes_the_same_model(capsys):
    command = ["advise", "llama", *IDS, "--minutes", "0.05", "--with", "num_hidden_layers=1"]
    options = advise_options(command)
    imports, call = advise._model_code(options)
    names: dict = {}
    exec("\n".join(imports), names)
    model = eval(call, names)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == 1


def advise_options(command: list[str]):
    from amp_lab import cli

    return cli._parser().parse_args(command)


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("no.json", {}, "this file does not exist"),
        ("some/name", {}, "is not on this disk"),
        ("bad.json", {"architectures": None}, "names no architecture"),
        ("bad.json", {"architectures": ["LlamaForDogs"]}, "has no class LlamaForDogs"),
        ("bad.json", {"model_type": "unheard_of"}, "transformers cannot read the config"),
        ("bad.json", {"model_type": None}, "transformers cannot read the config"),
        ("bad.json", {"hidden_size": "wide"}, "bad.json"),
    ],
)
def test_a_config_that_is_none_is_told_in_a_line(tmp_path, capsys, target, changes, said):
    (tmp_path / "bad.json").write_text(json.dumps(CONFIG | changes))
    assert main(["memory", target, *IDS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert target in line
    assert said in line


def test_a_file_that_is_no_json_or_has_no_such_setting_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    for arguments in (["bad.json"], ["llama", "--with", "layers=3"]):
        assert main(["memory", *arguments, *IDS]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert arguments[0] in line


def test_code_that_comes_with_a_config_is_not_run(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\nclass Net: pass\n"
    )
    own = CONFIG | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert main(["memory", "./config.json", *IDS]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("target", ["torchvision.models:resnet18", "net.py:Net", "net.py", "a.b"])
def test_other_targets_stay_what_they_are(target):
    assert not is_config(target)


def test_the_kv_cache_of_a_context_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ids = ("--input", "input_ids=int64:2,8<100")
    assert main(["memory", "llama/config.json", *ids, "--eval", "--tokens", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line[:25].strip(): line[25:].split() for line in lines}
    # 2 layers, one head of keys and one of values, each of 16
    assert rows["cache, KiB per token"][::2] == ["0.25", "0.125", "0.125"], lines
    # The name of this row, "cache, 2 x 8,192 tokens", goes on in the next line.
    assert rows["cache, 2 x 8,192"][::2] == ["4", "2", "2"]


def test_without_transformers_the_error_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["memory", "llama/config.json", *IDS]) == 2
    error = capsys.readouterr().err
    assert "'llama/config.json' needs transformers: pip install transformers" in error
