"""Language models: trained on text, killed and resumed, on several processes, and made to write."""

import math
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rank_processes import CONTEXT, LOADED, lose_a_worker, run_ranks
from run_folders import arguments, assert_equal, outcome, read_rows, refused
from tiny_gpt import NAME

from amp_lab import load_checkpoint, save_checkpoint
from amp_lab.cli import main
from amp_lab.models import gpt
from amp_lab.train.data.tokens import BytePairs
from amp_lab.train.export import export_checkpoint

KILLS = int(os.environ.get("AMP_LAB_KILLS", "1"))
TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(400))
STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "squares.txt"
    file.write_text(TEXT)
    return file


def line(out, text, **changed):
    usual = {"model": NAME, "dataset": "text", "data": text, "image_size": None, "context": 16}
    return arguments(out, **usual | {"workers": 0} | changed)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(line(out, text)) == 0
    return out


def test_it_says_what_it_does(text, tmp_path, capsys):
    assert main(line(tmp_path / "x", text, epochs=1)) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert re.search("text: 32 .* 4 test .* 16 characters, 18 different", printed)
    row = read_rows(tmp_path / "x")[0]
    assert f"perplexity {math.exp(float(row['test_loss'])):.4g}  " in printed
    assert " tokens/s, peak memory " in printed


def kill_in_a_save(number, arguments):
    """`amp-lab`, killed as it has written its checkpoint so many times; -9 is its exit code."""
    torch.set_num_threads(1)
    replace, left = os.replace, [number]

    def replace_or_die(source, target):
        replace(source, target)
        left[0] -= os.fspath(target).endswith("checkpoint.pt")
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_or_die
    raise SystemExit(main(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kill_9_and_resume_ends_bitwise_equal(text, tmp_path, precision):
    CONTEXT.set_forkserver_preload(LOADED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(line(tmp_path / "undisturbed", text, precision=precision)) == 0
    expected, chance = outcome(tmp_path / "undisturbed"), random.Random(precision)
    for number in range(KILLS):
        out = tmp_path / f"{number}"
        given = line(out, text, precision=precision)
        process = CONTEXT.Process(target=kill_in_a_save, args=(chance.randint(1, STEPS), given))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert main([*given, "--resume"]) == 0
        assert_equal(outcome(out), expected)
    torch.set_num_threads(threads)


def command(*arguments):
    raise SystemExit(main(list(arguments)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(text, tmp_path, finished, kind):
    ended = run_ranks(command, 2, *line(tmp_path / "x", text, parallel=kind))
    assert [one.code for one in ended] == [0, 0], ended
    export_checkpoint(tmp_path / "x", tmp_path / "whole.pt")
    found = load_checkpoint(tmp_path / "whole.pt")
    wanted = load_checkpoint(finished / "checkpoint.pt")
    assert found["characters"] == wanted["characters"]
    for name, tensor in wanted["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_lost_worker_changes_nothing(text, tmp_path, kind, precision):
    given = {"parallel": kind, "precision": precision, "checkpoint_every": 1, "timeout": 60}
    ended = run_ranks(command, 2, *line(tmp_path / "undisturbed", text, **given))
    assert [one.code for one in ended] == [0, 0], ended

    def whole(out):
        export_checkpoint(out, out.with_suffix(".pt"))
        return load_checkpoint(out.with_suffix(".pt"))["model"], outcome(out)["rows"]

    expected, chance = whole(tmp_path / "undisturbed"), random.Random(kind + precision)
    for number in range(KILLS):
        out = tmp_path / f"{number}"
        lose_a_worker(out, line(out, text, **given), chance)
        assert_equal(whole(out), expected)


@pytest.mark.parametrize("compiled", [None, pytest.param(True, marks=pytest.mark.weekly)])
def test_every_option_of_the_loop_runs(text, tmp_path, compiled):
    options = {"accumulate": 3, "clip_norm": 0.5, "compile": compiled, "precision": "bf16"}
    assert main(line(tmp_path / "x", text, epochs=1, **options)) == 0


def test_it_writes_what_the_seed_and_the_model_say(finished, capsys):
    def written(*options):
        assert main(["sample", str(finished), "--tokens", "40", *options]) == 0
        return capsys.readouterr().out

    first = written("--prompt", "7 times")
    assert first.startswith("7 times")
    assert len(first) == len("7 times") + 40 + 1
    assert written("--prompt", "7 times") == first
    assert written("--prompt", "7 times", "--seed", "1") != first
    likeliest = written("--temperature", "0", "--precision", "bf16")
    assert written("--temperature", "0", "--seed", "5", "--precision", "bf16") == likeliest


def test_byte_pairs_are_learned_kept_and_written(text, tmp_path, capsys):
    given = line(tmp_path / "x", text, tokenizer="bpe", vocabulary=300, epochs=1)
    assert main(given) == 0
    assert "16 byte pairs, 300 different" in capsys.readouterr().out
    assert main(["sample", str(tmp_path / "x"), "--prompt", "ß 7 times", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("ß 7 times")  # a byte pair for what was never seen
    content = load_checkpoint(tmp_path / "x" / "checkpoint.pt")["tokenizer"]
    assert len(BytePairs(content).encode([" times"])[0]) == 1  # which is in every line


def test_a_run_goes_on_with_the_tokens_it_began_with(text, tmp_path, capsys):
    file = tmp_path / "tokenizer.json"
    (content,) = BytePairs.of([TEXT], 300).saved.values()
    file.write_text(content)
    given = line(tmp_path / "x", text, tokenizer=file, epochs=1)
    assert main(given) == 0
    (content,) = BytePairs.of([TEXT], 290).saved.values()
    file.write_text(content)
    assert "the text or the tokens differ" in refused(capsys, [*given, "--resume"])
    file.write_text(content[:100])
    said = refused(capsys, [*given, "--resume"])
    assert f"{file} is not a tokenizer.json (" in said


def test_a_trained_model_has_learned_something(finished):
    losses = [float(row["test_loss"]) for row in read_rows(finished)]
    assert losses[-1] < losses[0] < math.log(18) + 0.2


def test_rotation_depends_on_the_distance_alone():
    rotate = gpt.Rotation(8)
    q, k = torch.randn(2, 8)
    both = [rotate(x.expand(1, 1, 20, 8))[0, 0] for x in (q, k)]
    products = both[0] @ both[1].T
    for distance in (0, 3, 7):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert rotate(q.expand(1, 1, 20, 8).bfloat16()).dtype is torch.bfloat16


def test_no_token_sees_what_follows_it():
    model = gpt.Gpt(gpt.SIZES[NAME], 10)
    tokens = torch.randint(10, (2, 12))
    other = tokens.clone()
    other[:, 8:] = (other[:, 8:] + 1) % 10
    torch.testing.assert_close(model(tokens)[:, :8], model(other)[:, :8])


def test_an_exported_text_run_decides_as_its_source(finished, text, tmp_path, capsys):
    file = tmp_path / "model.pt2"
    assert main(["export", str(finished), str(file), "--data", str(text), "--dtype", "bf16"]) == 0
    assert "decisions agree with fp32" in capsys.readouterr().out
    tokens = torch.randint(18, (3, 16))
    assert torch.export.load(file).module()(tokens).shape == (3, 16, 18)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "resnet18"}, "text .*resnet18 cannot take: .*gpt-nano"),
        ({"dataset": "digits", "context": None}, "use a classifier of torchvision"),
        ({"dataset": "digits", "model": "resnet18"}, "context .*leave it out for digits"),
        ({"image_size": 32}, "image size .*leave it out for text"),
        ({"channels_last": True}, "channels last is for images"),
        ({"pretrained": True}, "no pretrained weights"),
        ({"context": 4096}, "too few for passages of 4096"),
        ({"data": "nowhere.txt"}, "nowhere.txt: no such file"),
        ({"tokenizer": "none.json"}, "none.json: cannot be read"),
        ({"tokenizer": "."}, ": cannot be read"),
        ({"vocabulary": 300}, "give --tokenizer bpe too"),
        ({"tokenizer": "bpe", "vocabulary": 256}, "from 257 .*, not 256"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_does_not_go_together_is_told_in_a_line(text, tmp_path, capsys, changed, says):
    assert re.search(says, refused(capsys, line(tmp_path / "x", text, **changed)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tokens", "0"], "--tokens 0 must be"),
        (["--temperature", "-1"], "--temperature -1.0 must be"),
        (["--temperature", "nan"], "--temperature nan must be"),
        (["--prompt", ""], "value of prompt is empty"),
        (["--prompt", "ß"], "'ß' is not in"),
        (["--precision", "fp8"], "unknown precision 'fp8'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_sample_is_told_in_a_line(finished, capsys, options, says):
    capsys.readouterr()
    assert main(["sample", str(finished), *options]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said)
    assert len(said.splitlines()) == 1


def test_it_begins_with_what_the_text_has_where_that_has_no_lines(tmp_path, capsys):
    file = tmp_path / "one_line.txt"
    file.write_text(TEXT.replace("\n", " "))
    assert main(line(tmp_path / "x", file, epochs=1)) == 0
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "x"), "--tokens", "40"]) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) >= 40
    assert main(["sample", str(tmp_path / "x"), "--prompt", "7\n"]) == 2
    assert "'\\n' is not in" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["1e-320", "1e-45", "1e-30", "1e300"])
def test_any_temperature_is_one(finished, capsys, temperature):
    options = ["--tokens", "40", "--prompt", "7 times", "--temperature"]
    assert main(["sample", str(finished), *options, temperature]) == 0
    written = capsys.readouterr().out
    if float(temperature) < 1:
        assert main(["sample", str(finished), *options, "0"]) == 0
        assert capsys.readouterr().out == written


@pytest.fixture
def tampered(finished, tmp_path):
    """A copy of the run, with other values in its checkpoint and a checksum that fits them."""

    def tamper(**changed):
        out = Path(shutil.copytree(finished, tmp_path / "tampered"))
        state = load_checkpoint(out / "checkpoint.pt")
        save_checkpoint(out / "checkpoint.pt", **state | changed)
        return out

    return tamper


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_run_that_diverged_is_told_in_a_line(tampered, finished, capsys, precision, temperature):
    model = load_checkpoint(finished / "checkpoint.pt")["model"]
    out = tampered(model={name: value * math.nan for name, value in model.items()})
    given = ["--prompt", "7", "--precision", precision, "--temperature", temperature]
    assert main(["sample", str(out), *given]) == 2
    said = capsys.readouterr().err
    assert "NaN" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"characters": 5},
        {"characters": "ab"},
        {"characters": ""},
        {"tokenizer": 5},
        {"tokenizer": "{}"},
        {"classes": 10**9},
        {"classes": "18"},
        {"classes": 0},
        {"config": {}},
        {"config": []},
        {"ranks": 5},
        {"model": []},
        {"shards": "x"},
        {"shards": {"folder": "..", "files": {}}},
        {"shards": {"folder": "a/b", "files": {}}},
        {"shards": {"folder": "x", "files": {"../checkpoint.pt": ""}}},
        {"shards": {"folder": "x", "files": ["y"]}},
    ],
    ids=lambda changed: "-".join(f"{name}={value}" for name, value in changed.items()),
)
@pytest.mark.parametrize("command", ["sample", "export", "train"])
def test_other_values_in_a_checkpoint_are_told_in_a_line(
    tampered, text, tmp_path, capsys, changed, command
):
    out = tampered(**changed)
    given = {
        "sample": ["sample", str(out), "--tokens", "2", "--prompt", "7"],
        "export": ["export", str(out), str(tmp_path / "x.safetensors"), "--data", str(text)],
        "train": ["train", "--out", str(out), "--resume", "--data", str(text), "--epochs", "4"],
    }
    is_of_text = {"characters", "tokenizer"} & changed.keys()
    if command == "sample" or not is_of_text:  # the others do not read these
        assert main(given[command]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert str(out) in said


@pytest.mark.parametrize(
    "progress", [{"batch": 10**9}, {"batch": 3}, {"samples": 0, "batch": 1}, {"batch": "1"}]
)
def test_progress_beyond_the_run_is_told_in_a_line(tampered, finished, text, capsys, progress):
    (own,) = load_checkpoint(finished / "checkpoint.pt")["ranks"]
    out = tampered(ranks=[own | {"progress": own["progress"] | progress}])
    said = refused(capsys, ["train", "--out", str(out), "--resume", "--data", str(text)])
    assert "checkpoint.pt: does not fit" in said


def test_progress_of_another_number_of_steps_is_told_in_a_line(tampered, finished, text, capsys):
    (own,) = load_checkpoint(finished / "checkpoint.pt")["ranks"]
    epochs = own["progress"]["epochs"][:-1]
    out = tampered(ranks=[own | {"progress": own["progress"] | {"epochs": epochs}}])
    said = refused(capsys, ["train", "--out", str(out), "--resume", "--data", str(text)])
    described = f"{len(epochs)} epochs and 0 batches, which do not match the number of steps"
    assert described in said
