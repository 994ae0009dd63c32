"""The docstrings of the public names: complete, true to the signature, with examples that run."""

import ast

import pytest

import amp_lab
import api_pages
from measure_code import PACKAGE

ENTRIES = {entry.name.removeprefix("amp_lab."): entry for entry in api_pages.public_names(PACKAGE)}
PUBLIC = {name: ENTRIES[name] for name in amp_lab.__all__}
CALLED = {  # what people call themselves; the other classes are results and errors
    name: entry
    for name, entry in PUBLIC.items()
    if isinstance(entry.node, ast.FunctionDef) or api_pages.arguments(entry.node)
}
DOCSTRING = """Add two numbers.

Args:
    left: The first number, in `metres`. It
        may be negative.
    *more: Further numbers, or None | 0.

Returns:
    The sum.

Raises:
    DataError: For a text.

Example:
    total = evaluate(1)
    torch.ones(total)
"""


def sections_of(name: str) -> dict[str, str]:
    return api_pages.sections(ast.get_docstring(PUBLIC[name].node) or "")


def test_a_docstring_is_split_into_its_sections():
    parts = api_pages.sections(DOCSTRING)
    assert parts[""] == "Add two numbers."
    assert api_pages.items(parts["Args"]) == {
        "left": "The first number, in `metres`. It may be negative.",
        "*more": "Further numbers, or None | 0.",
    }
    assert api_pages.items(parts["Raises"]) == {"DataError": "For a text."}
    assert parts["Example"] == "total = evaluate(1)\ntorch.ones(total)"


def test_sections_become_tables_and_code(tmp_path):
    body = f'"""{DOCSTRING}"""'.replace("\n", "\n    ")
    folder = tmp_path / "train"
    folder.mkdir()
    folder.joinpath("__init__.py").write_text('"""Train."""\n')
    folder.joinpath("loop.py").write_text(f"def evaluate(left: int = 1, *more: 'int'):\n    {body}")
    (tmp_path / "__init__.py").write_text('"""Doc."""\n_EXPORTS = {"evaluate": "train.loop"}\n')
    page = api_pages.pages(tmp_path)["train.md"]
    assert "| argument | type, default | meaning |\n| --- | --- | --- |\n" in page
    assert "| `left` | `int` = `1` | The first number, in `metres`. It may be negative. |" in page
    assert "or None \\| 0. |" in page
    assert "| raises | when |\n| --- | --- |\n| `DataError` | For a text. |" in page
    assert "**Returns:** The sum." in page
    imports = "import torch\nfrom amp_lab import evaluate\n\n"
    assert f"```python\n{imports}total = evaluate(1)\ntorch.ones(total)\n```" in page


@pytest.mark.parametrize("name", CALLED)
def test_each_argument_result_and_error_is_described(name):
    parts = sections_of(name)
    node = CALLED[name].node
    assert list(api_pages.items(parts.get("Args", ""))) == list(api_pages.arguments(node))
    assert parts.get("Raises"), "no section Raises:"
    if (
        isinstance(node, ast.FunctionDef)
        and ast.unparse(node.returns or ast.Constant(None)) != "None"
    ):
        assert parts.get("Returns"), "no section Returns:"
    assert parts.get("Example"), "no section Example:"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_section_ends_with_the_next_heading(name):
    """A line that is not indented would become part of the section above it."""
    lines = (ast.get_docstring(PUBLIC[name].node) or "").splitlines()
    headings = [number for number, line in enumerate(lines) if api_pages.SECTION.match(line)]
    below = lines[headings[0] :] if headings else []
    below = [line for line in below if line and not api_pages.SECTION.match(line)]
    assert all(line.startswith("    ") for line in below)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - set(CALLED)))
def test_each_attribute_of_a_result_is_described(name):
    entry = PUBLIC[name]
    undescribed = []
    for member in api_pages.members(entry, {}):
        heading, *body = member.splitlines()
        text = [line for line in body[:-1] if line and not line.startswith(":")]
        if not text:
            undescribed.append(heading)
    assert undescribed == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if "Example" in sections_of(name)])
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = api_pages.example_code(sections_of(name)["Example"], set(amp_lab.__all__))
    exec(compile(code, f"example of {name}", "exec"), {"__name__": "__main__"})
