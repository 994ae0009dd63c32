"""What migrate leaves to people: the code before, and the code that does what the message says."""

import json
import re
import warnings

import nbformat
import pytest
import torch
from migrate_snippets import run, snippets
from remedy_tests import does, says

from amp_lab.cli import main
from amp_lab.migrate import migrate_source

CASES = {title: text.split("--- becomes\n") for title, text in snippets("by_hand").items()}
SAYS = dict(title.split(": ", 1) for title in CASES)  # by remedy: words of its message
_CALL = re.compile(r"torch\.amp\.\w+")


def by_hand(code: str) -> list[str]:
    return [finding.message for finding in migrate_source(code)[1] if finding.kind == "by hand"]


@pytest.fixture
def as_if_with_cuda(monkeypatch):
    """Let autocast and the scaler for CUDA be made, and their state be asked, without a GPU."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)


@does(*(f"migrate.{name}" for name in SAYS))
@pytest.mark.parametrize("title", CASES)
def test_code_that_was_changed_as_it_says_gives_the_same(as_if_with_cuda, title):
    old, new = CASES[title]
    name, words = title.split(": ", 1)
    said = [message for message in by_hand(old) if says(f"migrate.{name}", message)]
    assert any(words in message for message in said), by_hand(old)
    named = {today for message in said for today in _CALL.findall(message)}
    assert all(today.rpartition(".")[2] in new for today in named)
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        before = run(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert run(new) == before
    text, findings = migrate_source(new)
    assert text == new
    assert findings == []


@does("migrate.device_as_scale")
@pytest.mark.parametrize("device", ['"cpu"', "device", "self.device.type", "args.device_type"])
def test_a_device_given_to_the_old_scaler_is_not_taken_along_as_the_scale(device):
    code = f"from torch.cpu.amp import GradScaler\nscaler = GradScaler({device})\n"
    (message,) = by_hand(code)
    assert says("migrate.device_as_scale", message)
    assert f"write torch.amp.GradScaler({device}) " in message
    loss = torch.ones(())
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        scaler = torch.cpu.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match="must be Number, not str"):
        scaler.scale(loss)
    assert torch.amp.GradScaler("cpu").scale(loss) == 65536.0


@pytest.mark.parametrize("scale", ["1024.0", "scale", "init_scale=2.0", "args.scale", "*args"])
def test_a_scale_given_to_the_old_scaler_is_taken_along(scale):
    code = f"from torch.cuda.amp import GradScaler\nscaler = GradScaler({scale})\n"
    assert f'GradScaler("cuda", {scale})' in migrate_source(code)[0]


@does("migrate.in_magic")
def test_a_magic_that_was_changed_is_found_no_more(tmp_path, capsys):
    file = tmp_path / "a.ipynb"
    for line, code in [
        ("%time torch.cuda.amp.GradScaler()", 1),
        ("%time torch.amp.GradScaler()", 0),
    ]:
        cells = [nbformat.v4.new_code_cell(text) for text in ("import torch", line)]
        file.write_text(json.dumps(nbformat.v4.new_notebook(cells=cells)))
        assert main(["migrate", "--check", str(file)]) == code
        assert says("migrate.in_magic", capsys.readouterr().out) is bool(code)
    assert torch.amp.GradScaler("cpu").get_scale() == 65536.0
