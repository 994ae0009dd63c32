"""Every paragraph that states what PyTorch or a tool does has something that holds it."""

from pathlib import Path

import pytest

import list_statements
from list_statements import Paragraph

STATEMENT = "`softmax` runs in fp32 on cuda."


def test_no_paragraph_is_without_support():
    assert list_statements.complaints(list_statements.all_paragraphs()) == []


def test_the_pages_and_all_notebooks_are_read():
    places = {paragraph.place for paragraph in list_statements.all_paragraphs()}
    assert {"README.md", "CHEATSHEET.md", "hardware.md", "19_choose_your_precision.py"} <= places


@pytest.mark.parametrize(
    ("text", "code", "support"),
    [
        (STATEMENT, (), ""),
        (STATEMENT, ("x = softmax(y)",), ""),
        (STATEMENT, ("assert x.dtype is torch.float32",), "assertion"),
        (STATEMENT, ("check_softmax(answer)",), "assertion"),
        (f"{STATEMENT} See [AMP](https://docs.pytorch.org/docs/stable/amp.html).", (), "source"),
        (f"{STATEMENT} See [02](02_autocast_dtypes.ipynb).", (), "source"),
        (f"{STATEMENT} [*(not yet seen on\na GPU)*](../data/results/README.md \"x\")", (), "mark"),
        (f"{STATEMENT}\n<!-- tests/core/test_cpu.py -->", (), "comment"),
    ],
)  # fmt: skip
def test_support_is_recognised(text, code, support):
    paragraph = Paragraph("page.md", text, code)
    assert paragraph.support == support
    assert bool(list_statements.complaints([paragraph])) == (not support)


def test_a_comment_that_names_no_test_is_a_complaint():
    paragraph = Paragraph("page.md", f"{STATEMENT}\n<!-- tests/test_banana.py -->")
    (line,) = list_statements.complaints([paragraph])
    assert line.startswith("no such test tests/test_banana.py: page.md")


@pytest.mark.parametrize("text", ["We begin with a small network.", "Call `softmax`:"])
def test_what_names_nothing_or_only_introduces_code_states_nothing(text):
    assert list_statements.complaints([Paragraph("page.md", text)]) == []


def test_only_code_in_the_same_section_counts(tmp_path: Path):
    source = tmp_path / "01_small.py"
    source.write_text(
        "# %% [markdown]\n# # Try a small one\n#\n# `softmax` runs in fp32.\n\n"
        "# %%\nx = 1\n\n# %% [markdown]\n# ## Another section\n\n# %%\nassert x == 1\n"
    )
    (paragraph,) = list_statements.in_notebook(source)
    assert paragraph.code == ("x = 1",)
