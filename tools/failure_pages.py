"""The pages of the site that are about one failure each, and the data of its box.

They are made of `src/amp_lab/failures/data/` and of the notebooks 08a, 08b and so on, with
their committed outputs. The title of a page is the message that people paste into a search.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOX = '<div class="explain" data-depth="{depth}">\n<p>This box needs JavaScript.</p>\n</div>'

# What the file leaves out where it is empty.
_LEFT_OUT: dict[str, Any] = {"messages": [], "symptoms": [], "unsafe": "", "sources": []}
# The data of a failure below its heading, which the page does not show.
_ENTRY = re.compile(r"^`AMP\d{4}` <!-- failure\n.*?^-->\n*", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`(AMP\d{4})`")
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def read_reference(root: Path) -> dict[str, Any]:
    """The data of the reference in the repository at `root`."""
    from amp_lab.failures.reference import read_data

    data = read_data(root / "src" / "amp_lab" / "failures" / "data")
    data["failures"] = [_LEFT_OUT | failure for failure in data["failures"]]
    return data


def pages(root: Path) -> dict[str, str]:
    """The text of each page by its path: `failures/AMP0004.md` and so on."""
    texts = {}
    for failure in read_reference(root)["failures"]:
        texts[f"failures/{failure['code']}.md"] = _page(root, failure)
    return texts


def data_script(root: Path) -> str:
    """What the box reads: the reference, its patterns and its index.

    It is a script, since a page that is opened from a file cannot fetch data.
    """
    from amp_lab.failures.reference import reference_from

    data = read_reference(root)
    reference = reference_from(data)
    data["patterns"] = [pattern._asdict() for pattern in reference.patterns]
    data["index"] = reference.index.serialize()
    return f'"use strict";\nconst AmpReference = {json.dumps(data, ensure_ascii=False)};\n'


def link_codes(text: str) -> str:
    """The text with each code of a failure as a link to its page, from the folder `notebooks`."""
    return _CODE.sub(r"[\1](../failures/\1.md)", text)


def _page(root: Path, failure: dict[str, Any]) -> str:
    """The page of a failure in Markdown: what people see, then its section or a short answer."""
    messages = [_readable(message) for message in failure["messages"]]
    lines = ["---", "orphan: true", "---", f"# {_title(failure, messages)}", ""]
    lines += [f"**{failure['code']}: {failure['title']}.**", ""]
    if len(messages) > 1:
        lines += ["Other messages with this cause:", ""]
        lines += [f"- {_code(message)}" for message in messages[1:]] + [""]
    if failure["symptoms"]:
        lines += ["What people see:", ""]
        lines += [f"- {symptom}" for symptom in failure["symptoms"]] + [""]
    lines += [_section(root, failure) or _short(failure)]
    lines += [
        "",
        "**See also.** All failures are in the [index](../notebooks/08_when_amp_breaks.ipynb).",
    ]
    return "\n".join(lines) + "\n"


def _title(failure: dict[str, Any], messages: list[str]) -> str:
    return _code(messages[0]) if messages else failure["title"]


def _readable(message: str) -> str:
    """A message with dots where it has a placeholder."""
    return re.sub(r"\{\w+\}", "…", message)


def _code(text: str) -> str:
    """The text as code in Markdown; it may contain backquotes."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _short(failure: dict[str, Any]) -> str:
    """The body of a page about a failure that no notebook reproduces."""
    parts = [("Why", "cause"), ("The fix", "cure"), ("Not this", "unsafe")]
    lines = [f"**{name}.** {failure[key]}\n" for name, key in parts if failure[key]]
    lines += [f"Source: <{address}>\n" for address in failure["sources"]]
    lines += [f"More is in [the page on it](../{failure['page']})."]
    return "\n".join(lines)


def _section(root: Path, failure: dict[str, Any]) -> str:
    """The section of the failure in a notebook, as Markdown with its outputs; "" if it has none."""
    path, _, anchor = failure["page"].partition("#")
    if not re.fullmatch(r"notebooks/08[a-z]_\w+\.ipynb", path):
        return ""
    notebook = json.loads((root / path).read_text(encoding="utf-8"))
    lines: list[str] = []
    for cell in _cells_below(notebook, anchor, failure["code"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [_fitted(_ENTRY.sub("", source), path), ""]
            continue
        lines += [f"```python\n{source}\n```", ""]
        printed = _printed(cell)
        if printed:
            lines += ["It prints:", "", f"```text\n{printed.rstrip()}\n```", ""]
    if lines:
        lines += [f"You can run these programs in [the notebook](../{failure['page']})."]
    return "\n".join(lines)


def _cells_below(
    notebook: dict[str, Any], anchor: str, failure_code: str
) -> Iterator[dict[str, Any]]:
    """Yield the cells below the heading with an anchor, if its section has the failure's code.

    A Markdown cell is cut at its headings: of it, only the part in this section is yielded,
    without the heading.
    """
    inside = False  # also for the code cells after the heading, until the next heading
    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown":
            if inside:
                yield cell
            continue
        for part in re.split(r"^(?=## )", "".join(cell["source"]), flags=re.MULTILINE):
            body = part
            if part.startswith("## "):
                heading, _, body = part.partition("\n")
                is_anchor = heading.removeprefix("## ").replace(" ", "-") == anchor
                # Other failures may lead to this heading without having their entry here.
                inside = is_anchor and failure_code in part
            if inside:
                yield {"cell_type": "markdown", "source": body}


def _printed(cell: dict[str, Any]) -> str:
    """What a code cell printed. Each output has its text as a list of lines."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def _fitted(markdown: str, path: str) -> str:
    """The Markdown of a notebook with its links as they have to be in the folder `failures`."""

    def fitted(link: re.Match[str]) -> str:
        target = link[1]
        if target.startswith("#"):  # a section of the same notebook
            return f"](../{path}{target})"
        if target.startswith("../"):  # from `failures` it leads to the same place
            return f"]({target})"
        return f"](../notebooks/{target})"

    return _LINK.sub(fitted, markdown)
