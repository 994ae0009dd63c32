"""The marks of what was not yet seen on a GPU: the texts as they are, and every way to be wrong."""

import json
import re
from pathlib import Path

import pytest

import first_gpu
import first_gpu_parts
import gpu_marks
from gpu_marks import Statement, complaints, mark, seen, without_marks

NOTEBOOK, README = gpu_marks.ROOT / "notebooks" / "04_x.py", gpu_marks.ROOT / "README.md"
LIST = {
    "fast": Statement("it is fast", ("bench",)),
    "fits": Statement("it fits", ("memory", "xray")),
}


def text(*keys: str, place: Path = NOTEBOOK) -> dict[Path, str]:
    return {place: "\n".join(f"# It is so {mark(key, place)}." for key in keys)}


def record(
    folder: Path, device: str = "cuda", tiny: bool = False, name: str = "h100", **parts: str
) -> Path:
    path = folder / f"first-gpu-{name}.json"
    told = [{"part": part, "status": status} for part, status in parts.items()]
    path.write_text(json.dumps({"device": device, "tiny": tiny, "parts": told}))
    return path


def test_marks_and_list_agree(capsys):
    assert gpu_marks.main(["--check"]) == 0, capsys.readouterr().err


def test_every_statement_names_parts_that_exist():
    parts = {part.name for part in first_gpu_parts.PARTS}
    for key, statement in gpu_marks.STATEMENTS.items():
        assert statement.parts, key
        assert set(statement.parts) <= parts, key


def test_links_of_marks_lead_to_the_recorded_results():
    for place in (NOTEBOOK, README):
        to = mark("fast", place).partition("](")[2].partition(" ")[0]
        assert (place.parent / to).resolve() == gpu_marks.RESULTS / "README.md"
        assert (place.parent / to).exists()


def test_a_text_with_every_mark_is_in_order():
    assert complaints(text("fast", "fits") | text("fast", place=README), LIST, {}) == []


def test_a_mark_may_be_wrapped_anywhere():
    wrapped = mark("fast", NOTEBOOK).replace(" ", "\n# ", 3)
    assert complaints({NOTEBOOK: wrapped} | text("fits", place=README), LIST, {}) == []


@pytest.mark.parametrize(
    ("texts", "shown", "said"),
    [
        (text("fast", "fits", "slow"), {}, "04_x.py:3: no statement 'slow'"),
        (text("fast"), {}, "'fits' .*no text"),
        (text("fast", "fits"), {"fits": "a.json"}, "04_x.py:2: 'fits' was shown in a.json"),
        (text("fast", "fits"), {"fits": "a.json"}, r"\(--write\)"),
        ({NOTEBOOK: text("fast", "fits")[NOTEBOOK] + "\n# (not yet\n# seen on a GPU)"}, {}, "04_x"),
        ({README: text("fast", "fits")[NOTEBOOK]}, {}, r"README.md:1: should be \[\*"),
    ],
)
def test_what_is_wrong_is_said(texts, shown, said):
    assert any(re.search(said, line) for line in complaints(texts, LIST, shown))


def test_a_statement_that_was_seen_needs_no_mark_any_more():
    assert complaints(text("fast"), LIST, {"fits": "a.json"}) == []


def test_only_a_whole_run_on_a_gpu_shows_something(tmp_path):
    held = dict.fromkeys(("bench", "memory", "xray"), "held")
    assert seen([record(tmp_path, **held)], LIST) == dict.fromkeys(LIST, "first-gpu-h100.json")
    assert list(seen([record(tmp_path, **held | {"xray": "failed"})], LIST)) == ["fast"]
    for rehearsal in ({"device": "cpu"}, {"device": "pretend"}, {"tiny": True}):
        assert seen([record(tmp_path, **rehearsal, **held)], LIST) == {}


def test_parts_of_a_statement_may_have_held_in_different_runs(tmp_path):
    first = record(tmp_path, name="1", memory="held", xray="failed")
    second = record(tmp_path, name="2", memory="failed", xray="held")
    assert seen([first, second], LIST) == {"fits": "first-gpu-1.json, first-gpu-2.json"}
    assert seen([first], LIST) == {}


def test_a_run_as_first_gpu_writes_it_can_be_read(tmp_path):
    outcomes = [first_gpu.Outcome("bench", "held")]
    first_gpu.write(outcomes, first_gpu.Settings("cuda", False, tmp_path))
    assert list(seen([tmp_path / "first-gpu.json"], LIST)) == ["fast"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# It is so {}.\n", "# It is so.\n"),
        ("# It is so\n# {}. And more\n", "# It is so. And more\n"),
        ("# It is {} so.\n", "# It is so.\n"),
        ("# It is so. {}\n# More\n", "# It is so. More\n".replace(" More", "\n# More")),
        ("#\n# {} It is so.\n", "#\n# It is so.\n"),
        ("It is so {}, and so.", "It is so, and so."),
    ],
)
def test_a_mark_that_goes_leaves_a_sentence(before, after):
    with_mark = before.format(mark("fast", NOTEBOOK))
    assert without_marks(with_mark, {"fast": "a.json"}) == after
    assert without_marks(with_mark, {"fits": "a.json"}) == with_mark


def test_write_removes_what_was_seen_and_check_is_content(tmp_path, monkeypatch, capsys):
    (tmp_path / "notebooks").mkdir()
    place, results = tmp_path / "notebooks" / "04_x.py", tmp_path / "data" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(gpu_marks, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_marks, "RESULTS", results)
    monkeypatch.setattr(gpu_marks, "STATEMENTS", LIST)
    (tmp_path / "README.md").write_text(f"It fits {mark('fits', tmp_path / 'README.md')}.")
    (tmp_path / "CHEATSHEET.md").write_text("Nothing that only a GPU can show.")
    place.write_text(f"# It is fast {mark('fast', place)}.\n")
    assert gpu_marks.main(["--check"]) == 0
    record(results, bench="held")
    assert gpu_marks.main(["--check"]) == 2
    assert re.search("04_x.py:1: 'fast' .* first-gpu-h100.json", capsys.readouterr().err)
    assert gpu_marks.main(["--write"]) == 0
    assert place.read_text() == "# It is fast.\n"
    assert gpu_marks.main(["--check"]) == 0
