"""Notebooks 08 and 08a to 08h: the same parts for every failure, whose cells print its messages."""

import re
from pathlib import Path

import nbformat
import pytest
from failure_messages import printed

import write_failures
from amp_lab.failures import read_explanation
from amp_lab.failures.patterns import flat, pattern

PARTS = ["What you see.", "A small example.", "Why.", "The fix."]
OPTIONAL = ["Not this.", "Notice the failure earlier."]
SERIES = write_failures.series()
each_notebook = pytest.mark.parametrize("source", SERIES, ids=[path.stem for path in SERIES])


def sections(source: Path) -> dict[str, list[nbformat.NotebookNode]]:
    """The cells of each failure of a notebook, in its committed pair, by its heading."""
    found: dict[str, list[nbformat.NotebookNode]] = {}
    current = None
    for cell in nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells:
        if cell.cell_type == "markdown":
            heading = re.match(r"## (.+)", cell.source)
            if heading:
                current = heading[1] if "<!-- failure" in cell.source else None
        if current:
            found.setdefault(current, []).append(cell)
    return found


def markdown(cells: list[nbformat.NotebookNode]) -> str:
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def test_what_is_generated_is_up_to_date():
    assert write_failures.main(["--check"]) == 0, "run: python tools/write_failures.py"


@each_notebook
def test_a_failure_is_a_section_with_the_same_parts_in_order(source):
    assert len(sections(source)) >= 5
    for heading, cells in sections(source).items():
        parts = re.findall(r"^\*\*(.+?)\*\*", markdown(cells), re.MULTILINE)
        known = [part for part in parts if part in PARTS + OPTIONAL]
        assert [part for part in known if part in PARTS] == PARTS, heading
        assert known == sorted(known, key=(PARTS + OPTIONAL).index), heading
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        assert any("assert" in cell for cell in code), heading


@each_notebook
def test_the_cells_of_a_failure_print_its_messages(source):
    cells_of = sections(source)
    for entry in write_failures.in_notebook(source):
        outputs = [out for cell in cells_of[entry.title] for out in cell.get("outputs", [])]
        output = flat("\n".join(out.get("text", "") for out in outputs))
        for message in entry.data.get("messages", []):
            regex = pattern(entry.code, message).regex
            assert re.search(regex, output, re.IGNORECASE), (entry.code, message)


@each_notebook
def test_what_the_cells_print_leads_to_their_failure(source):
    cells_of = sections(source)
    for entry in write_failures.in_notebook(source):
        for message in entry.data.get("messages", []):
            found = read_explanation(printed(message)).failures
            assert found[0].code == entry.code, message
        assert cells_of[entry.title]


def test_every_page_of_a_failure_is_there():
    for entry in write_failures.entries():
        path, _, anchor = entry.page.partition("#")
        assert (write_failures.ROOT / path).exists(), entry
        if anchor and path.endswith(".ipynb"):
            source = (write_failures.ROOT / path).with_suffix(".py")
            text = source.read_text(encoding="utf-8")
            headings = re.findall(r"^# ##+ (.+)$", text, re.MULTILINE)
            assert anchor in [heading.replace(" ", "-") for heading in headings], entry.page


SECTION = """# # Repair it
#
# ## It breaks
#
# `AMP9001` <!-- failure
# messages = ["it broke"]
# -->
# **Why.** It was old, [said he](https://example.org).
#
# **The fix.** Make it anew.
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("**Why.**", "Why"), "needs **Why.** and **The fix.**"),
        (("messages", "masseges"), "no such key"),
        (('messages = ["it broke"]', ""), "give a message or a symptom"),
    ],
)
def test_an_incomplete_entry_is_refused(tmp_path, change, said):
    source = tmp_path / "08z_test.py"
    source.write_text(f"# %% [markdown]\n{SECTION}")
    (entry,) = write_failures.in_notebook(source)
    assert (entry.code, entry.cause) == ("AMP9001", "It was old, said he.")
    assert entry.sources == ["https://example.org"]
    source.write_text(f"# %% [markdown]\n{SECTION.replace(*change)}")
    with pytest.raises(write_failures.FailureError, match=re.escape(said)):
        write_failures.in_notebook(source)


def test_a_code_that_stands_twice_is_refused(monkeypatch):
    monkeypatch.setattr(write_failures, "series", lambda: [SERIES[0], SERIES[0]])
    with pytest.raises(write_failures.FailureError, match="stands twice"):
        write_failures.entries()


def test_a_stale_file_is_named(monkeypatch, capsys, tmp_path):
    stale = write_failures.ROOT / "stale.json"
    monkeypatch.setattr(write_failures, "generated", lambda: {stale: "new"})
    assert write_failures.main(["--check"]) == 1
    assert "stale.json is out of date" in capsys.readouterr().out
    assert not stale.exists()


def test_the_file_of_a_notebook_that_is_gone_is_removed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(write_failures, "ROOT", tmp_path)
    monkeypatch.setattr(write_failures, "DATA", tmp_path)
    monkeypatch.setattr(write_failures, "generated", dict)
    (tmp_path / "gone.json").write_text("[]")
    assert write_failures.main(["--check"]) == 1
    assert "gone.json is out of date" in capsys.readouterr().out
    assert write_failures.main([]) == 0
    assert not (tmp_path / "gone.json").exists()


def test_the_output_of_explain_in_notebook_08_is_not_old():
    notebook = Path(write_failures.__file__).parents[1] / "notebooks" / "08_when_amp_breaks.ipynb"
    cells = nbformat.read(notebook, as_version=4).cells
    (cell,) = (cell for cell in cells if "explain(message)" in cell.source)
    (output,) = cell.outputs
    (failure,) = read_explanation("AMP0018").failures
    assert output.text.splitlines() == [
        f"{failure.code} {failure.title}",
        f"Why: {failure.cause}",
        f"The fix: {failure.cure}",
    ]
