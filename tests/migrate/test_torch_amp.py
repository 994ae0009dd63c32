"""Old names of torch: what is rewritten gives the same without a warning; the rest stays."""

import ast
import random
import re
import sysconfig
import textwrap
import warnings
from pathlib import Path

import pytest
from migrate_snippets import run, snippets

from amp_lab.migrate import migrate_source

REWRITTEN = {title: text.split("--- becomes\n") for title, text in snippets("torch").items()}
LEFT = snippets("left")


@pytest.fixture
def as_if_with_cuda(monkeypatch):
    """Let autocast and the scaler for CUDA be made, and their state be asked, without a GPU."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)


def test_there_are_sixty_snippets():
    assert len(REWRITTEN) >= 60


@pytest.mark.parametrize("title", REWRITTEN)
def test_what_is_rewritten_is_what_was_expected_and_a_second_time_changes_nothing(title):
    old, expected = REWRITTEN[title]
    new, findings = migrate_source(old)
    assert new == expected
    again, findings_again = migrate_source(new)
    assert again == new
    assert [f for f in findings_again if f.kind == "rewritten"] == []
    assert {f.line for f in findings} <= set(range(1, old.count("\n") + 1))


@pytest.mark.parametrize("title", REWRITTEN)
def test_what_is_rewritten_gives_the_same_without_a_warning(as_if_with_cuda, title):
    old, new = REWRITTEN[title]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        before = run(old)
    assert run(new) == before


@pytest.mark.parametrize("title", [t for t, (old, new) in REWRITTEN.items() if old != new])
def test_each_snippet_that_changes_warned_before(as_if_with_cuda, title):
    with pytest.warns(FutureWarning, match="is deprecated"):
        run(REWRITTEN[title][0])


@pytest.mark.parametrize("ending", ["\r\n", "\r"])
@pytest.mark.parametrize("title", REWRITTEN)
def test_other_line_endings_stay(title, ending):
    old, new = (text.replace("\n", ending) for text in REWRITTEN[title])
    assert migrate_source(old)[0] == new


@pytest.mark.parametrize("title", LEFT)
def test_what_is_not_certain_stays_and_is_told_with_its_line(title):
    said = [f"{f.kind} {f.line}" for f in migrate_source(LEFT[title])[1]]
    assert migrate_source(LEFT[title])[0] == LEFT[title]
    expected = title.rpartition(": ")[2]
    assert expected in said or (expected == "nothing" and said == [])


def test_one_use_that_stays_keeps_the_import_for_itself():
    old = "import torch\nfrom torch.cuda.amp import autocast\nwith autocast():\n    f = autocast\n"
    new, findings = migrate_source(old)
    assert new == old.replace(
        "with autocast()", 'with torch.amp.autocast("cuda", dtype=torch.float16)'
    )
    assert [(f.line, f.kind) for f in findings] == [(3, "rewritten"), (4, "by hand")]


def test_a_name_that_is_deleted_keeps_its_import():
    old = "from torch.cuda.amp import custom_fwd\nf = custom_fwd(print)\ndel custom_fwd\n"
    new, findings = migrate_source(old)
    assert new == "import torch\n" + old.replace(
        "custom_fwd(print)", 'torch.amp.custom_fwd(print, device_type="cuda")'
    )
    assert [(f.line, f.kind) for f in findings] == [(2, "rewritten"), (3, "by hand")]


def sources() -> list[Path]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    short = [path for path in files if path.stat().st_size < 20_000]
    return random.Random(0).sample(short, 25)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_a_file_without_the_names_is_never_changed(path):
    text = path.read_bytes().decode() + "# torch.cuda.amp.autocast, apex, .scale(\n"
    new, findings = migrate_source(text)
    assert new == text
    assert findings == []


NAMES = ["torch", "cuda", "amp", "autocast", "GradScaler", "cast", "x", "scaler", "model", "loss"]


def random_program(random_: random.Random) -> str:
    """Statements of many kinds about names, of which none is imported from torch."""
    name = lambda: random_.choice(NAMES)  # noqa: E731
    kinds = [
        lambda: f"import {name()}x as {name()}",
        lambda: f"from .{name()} import {name()} as {name()}",
        lambda: f"{name()} = {name()}(1, {name()}={name()}.{name()})  # torch.cuda.amp.autocast()",
        lambda: f"with {name()}.y.amp.{name()}() as {name()}:\n    pass",
        lambda: f"def {name()}({name()}=1):\n    return '{name()}.cuda.amp.GradScaler()'",
        lambda: f"@{name()}.{name()}\nclass {name()}({name()}):\n    {name()}: {name()} = 3",
        lambda: f"{name()} = [{name()} for {name()} in {name()}]",
        lambda: f"for {name()} in {name()}:\n\t{name()}.step()",
    ]
    lines = [random_.choice(kinds)() for _ in range(12)]
    return random_.choice(["\n", "\r\n"]).join("\n".join(lines).split("\n"))


def two_snippets(random_: random.Random) -> str:
    """Two snippets of any kind in one file, the first at times in a function or a method."""
    texts = [text.partition("--- becomes\n")[0] for text in snippets("torch").values()]
    texts += [t for name in ("left", "right", "wrong", "notes") for t in snippets(name).values()]
    first, second = random_.sample([t for t in texts if "__future__" not in t], 2)
    head, indent = random_.choice(
        [("", ""), ("def outer():\n", "    "), ("class Outer:\n    def outer(self):\n", " " * 8)]
    )
    if "import *" in first or "\f" in first:  # which cannot be indented
        head, indent = "", ""
    return head + textwrap.indent(first, indent) + second


@pytest.mark.parametrize("seed", range(300))
def test_snippets_that_share_a_file_stay_python_and_a_second_time_nothing_changes(seed):
    old = two_snippets(random.Random(seed))
    ast.parse(old)
    new, _ = migrate_source(old)
    ast.parse(new)
    assert migrate_source(new)[0] == new


@pytest.mark.parametrize("seed", range(60))
def test_a_program_made_at_random_with_other_things_of_these_names_is_never_changed(seed):
    text = random_program(random.Random(seed))
    text = re.sub(r"\btorch\b(?=\.)", "touch", text)  # an unbound torch is torch
    assert migrate_source(text)[0] == text


def test_a_global_name_is_not_that_of_a_function_around():
    old = """from torch.cuda.amp import GradScaler

def outer():
    GradScaler = None
    def inner():
        global GradScaler
        return GradScaler()
"""
    assert 'return GradScaler("cuda")' in migrate_source(old)[0]
