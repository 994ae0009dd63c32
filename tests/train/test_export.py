"""A run's model as a file for use elsewhere: read with what reads such files, and nothing else."""

import contextlib
import io
import re

import pytest
import torch
from run_folders import arguments, refused

from amp_lab import load_checkpoint, save_checkpoint
from amp_lab.cli import main
from amp_lab.models.build import build_model
from amp_lab.train import export
from amp_lab.train.data import batches, load_dataset

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "run"
    assert main(arguments(out, epochs=1)) == 0
    return out


@pytest.fixture(scope="module")
def images():
    """A thousand images, of training and test."""
    data = load_dataset("digits", image_size=24, augment=False)
    return next(iter(batches(data.train, 1000)))[0]


def model_of(out):
    state = load_checkpoint(out / "checkpoint.pt")
    model = build_model(state["config"]["model"], state["classes"])
    model.load_state_dict(state["model"])
    return model.eval()


@pytest.mark.parametrize("name", DTYPES)
def test_safetensors_hold_the_weights_in_the_dtype(finished, tmp_path, capsys, name):
    load = pytest.importorskip("safetensors.torch").load_file
    file = tmp_path / "model.safetensors"
    assert main(["export", str(finished), str(file), "--dtype", name]) == 0
    model = model_of(finished).to(DTYPES[name])
    found, wanted = load(file), model.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert tensor.dtype == wanted[key].dtype
        assert torch.equal(tensor, wanted[key])
    said = capsys.readouterr().out
    cast = sum(t.is_floating_point() for t in wanted.values()) if name != "fp32" else 0
    assert f"{cast} of {len(wanted)} tensors cast to" in said
    assert "decisions agree with fp32; outputs differ by 0.0e+00" in said


@torch.no_grad()
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_pt2_file_decides_as_its_source(finished, tmp_path, images, name):
    file = tmp_path / "model.pt2"
    assert main(["export", str(finished), str(file), "--dtype", name]) == 0
    served = torch.export.load(file).module()
    model, dtype = model_of(finished).to(DTYPES[name]), DTYPES[name]
    for count in (1, 1000):  # any number of images
        wanted = model(images[:count].to(dtype)).float()
        found = served(images[:count])
        assert found.dtype == torch.float32
        assert torch.equal(found.argmax(1), wanted.argmax(1))


@torch.no_grad()
def test_an_onnx_file_decides_as_its_source(finished, tmp_path, images):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "model.onnx"
    assert main(["export", str(finished), str(file)]) == 0
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    wanted = model_of(finished)(images)
    for count in (1, 1000):
        (found,) = session.run(["logits"], {"images": images[:count].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), wanted[:count], rtol=1e-4, atol=1e-5)
    assert (found.argmax(1) == wanted.argmax(1).numpy()).all()
    # Its CPU has no bf16.
    taken = refused_with_nothing_written("export", finished, tmp_path / "b.onnx", "--dtype", "bf16")
    assert re.search("bfloat16 .*onnx: ONNX Runtime", taken)
    assert "try --dtype fp16 or fp32" in taken
    assert main(["export", str(finished), str(tmp_path / "h.onnx"), "--dtype", "fp16"]) == 0


def refused_with_nothing_written(*line):
    folder, error = line[2].parent, io.StringIO()
    before = sorted(folder.iterdir()) if folder.is_dir() else None
    with contextlib.redirect_stderr(error):
        assert main([str(part) for part in line]) == 2
    assert before == (sorted(folder.iterdir()) if folder.is_dir() else None)
    assert len(error.getvalue().splitlines()) == 1
    return error.getvalue()


def changed(finished, tmp_path, change):
    """A run whose weights were changed."""
    state = load_checkpoint(finished / "checkpoint.pt")
    change(state["model"])
    (tmp_path / "run").mkdir()
    save_checkpoint(tmp_path / "run" / "checkpoint.pt", **state)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda weights: weights["head.bias"].fill_(1e6),
            "values of head.bias exceed the largest number, 65504",
        ),
        (lambda weights: weights["head.weight"].fill_(6e4), "float16 are not finite"),
    ],
)
def test_what_fp16_cannot_hold_is_not_written(finished, tmp_path, change, says):
    def bright(weights):  # so that the head sums large values
        weights["blocks.1.norm.bias"].fill_(100)
        change(weights)

    out = changed(finished, tmp_path, bright)
    assert says in refused_with_nothing_written(
        "export", out, tmp_path / "m.safetensors", "--dtype", "fp16"
    )


def test_a_file_with_other_outputs_is_not_written(finished, tmp_path, monkeypatch):
    convert = export._convert

    def wrong(*arguments):
        converted = convert(*arguments)
        return converted._replace(outputs=1.5 * converted.outputs)

    monkeypatch.setattr(export, "_convert", wrong)
    told = refused_with_nothing_written("export", finished, tmp_path / "m.safetensors")
    assert "outputs of the safetensors file differ by 50.0%" in told


def test_nothing_of_anybody_is_replaced(finished, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    line = ["export", str(finished), str(file)]
    assert re.search(f"{file} already exists; --force", refused(capsys, line))
    assert file.read_text() == "mine"
    assert main([*line, "--force"]) == 0


@pytest.mark.parametrize(
    ("file", "options", "says"),
    [
        ("none/m.onnx", [], "m.onnx: cannot be written ("),
        ("m.pt", ["--dtype", "bf16"], "--dtype does not apply to a checkpoint"),
        ("m.onnx", ["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(finished, tmp_path, capsys, file, options, says):
    assert says in refused(capsys, ["export", str(finished), str(tmp_path / file), *options])
    assert not list(tmp_path.iterdir())


def test_a_damaged_run_is_not_exported(finished, tmp_path, capsys):
    whole = (finished / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[:-100])
    refused(capsys, ["export", str(tmp_path), str(tmp_path / "m.pt2")])
    out = changed(finished, tmp_path, lambda weights: weights.pop("head.bias"))
    said = refused(capsys, ["export", str(out), str(tmp_path / "m.pt2")])
    assert "checkpoint.pt: the file is not the checkpoint of a run" in said
    assert not (tmp_path / "m.pt2").exists()
