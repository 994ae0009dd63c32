"""The edition of the notebooks for Colab and Kaggle, which is generated and never edited.

Each notebook gets a first cell, `tools/first_cell.py`, which installs the package and fetches
`course/` from one commit. Notebook 10 also gets a last cell, `tools/record_cell.py`, which records
the device. `pdm run notebooks --edition FOLDER` writes them; links in their text
lead to the published places. `write_archive` packs them with `course/`, the package and the pages
that they link to, for the download on the site.

The address of the repository is one setting: `Repository` in `[project.urls]` of pyproject.toml.
The environment variable GITHUB_REPOSITORY, which GitHub sets to ``OWNER/NAME``, overrides it.
Without an address, the first cell says what to set.
"""

import html
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = "notebooks/[0-9]*.ipynb"
CELL = Path(__file__).resolve().parent / "first_cell.py"
RECORD_CELL = CELL.with_name("record_cell.py")
RECORDED = "10_speed_ladder.ipynb"  # the notebook that ends with `RECORD_CELL`
BRANCH = "colab"  # which .github/workflows/pages.yml writes
ARCHIVE = "amp-lab-notebooks.zip"
GITHUB = "https://github.com/"
# A link inside the project: ``](``, the path (empty for the same page), and ``#fragment`` or None.
# The name of a section may contain parentheses, as in "#Sums-in-14-bits-(optional)".
LINK = re.compile(r"(\]\()(?!https?:|mailto:)([^)\s#]*)(#(?:[^()\s]|\([^()\s]*\))*)?(?=[)\s])")
HEADING = re.compile(r"^#{1,4} +(.+?) *#*$", re.MULTILINE)
# What else the archive contains: what the notebooks import, and the pages that they link to.
ARCHIVED = (
    "LICENSE",
    "notebooks/course/**/*",
    "src/**/*",
    "docs/*.md",
    "data/results/*",
    "tools/*.py",
    "tools/measure/*.py",
)
EXTRAS = ("export", "migrate")  # of pyproject.toml, which the notebooks use


class EditionError(Exception):
    """Something to tell the user in one line."""


def repository(root: Path = ROOT) -> str:
    """The address of the repository without a slash at its end; empty if none is set."""
    name = os.environ.get("GITHUB_REPOSITORY", "")
    if name:
        address = name if "://" in name else GITHUB + name
    else:
        address = _project(root).get("urls", {}).get("Repository", "")
    return address.rstrip("/").removesuffix(".git")


def colab_address(address: str, name: str) -> str:
    """Where Colab opens the notebook of this file name; empty unless the address is GitHub's."""
    if not address.startswith(GITHUB):
        return ""
    path = address.removeprefix(GITHUB)
    return f"https://colab.research.google.com/github/{path}/blob/{BRANCH}/{name}"


def requirements(root: Path = ROOT) -> list[str]:
    """What the package and the notebooks need besides torch, as in pyproject.toml."""
    project = _project(root)
    extras = project["optional-dependencies"]
    packages = list(project["dependencies"])
    extras_to_read = list(EXTRAS)
    while extras_to_read:
        for requirement in extras[extras_to_read.pop()]:
            # An extra may consist of other extras: ``amp-lab[data,plots]``.
            others = re.fullmatch(r"amp-lab\[(.*)\]", requirement)
            if others is not None:
                extras_to_read += others[1].split(",")
            else:
                packages.append(requirement)
    return sorted(packages)


def _project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def first_cell(address: str, commit: str, packages: list[str]) -> str:
    """The code of the first cell, with its three names filled in."""
    code = CELL.read_text(encoding="utf-8").strip()
    for name, value in {"REPOSITORY": address, "COMMIT": commit, "PACKAGES": packages}.items():
        line = f"{name} = {json.dumps(value)}"
        # A function, since `re.sub` would interpret the backslashes of a text.
        code = re.sub(rf"^{name} = .*$", lambda _, line=line: line, code, flags=re.MULTILINE)
    return code


def packages_of(notebook: dict[str, Any], root: Path = ROOT) -> list[str]:
    """`requirements`, and the packages that the notebook's call of `start` names."""
    code = "\n".join("".join(cell["source"]) for cell in _cells(notebook, "code"))
    start_call = re.search(r"= start\(([^)]*)\)", code)  # group 1: its arguments
    names = re.findall(r'"(\w+)"', start_call[1]) if start_call else []
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)["dependency-groups"]
    packages = requirements(root)
    for name in names:  # a group has the name of its package, beside which it may list others
        for requirement in groups[name]:
            package, _, _ = requirement.partition(">")  # of ``lunr>=0.8``
            if package == name:
                packages.append(requirement)
    return packages


def _cells(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


class Edition:
    """The notebooks of a checkout with a first cell, at one commit."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.address = repository(root)
        self.commit = _commit(root)
        self.notebooks = {
            path.name: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(root.glob(NOTEBOOKS))
        }
        if not self.notebooks:
            raise EditionError(f"{root / 'notebooks'} has no notebooks: run `pdm run notebooks`")
        self.anchors = {name: _anchors(notebook) for name, notebook in self.notebooks.items()}

    def text(self, name: str, *, is_published: bool) -> str:
        """The notebook as JSON; if it `is_published`, its links lead to the published places."""
        notebook = json.loads(json.dumps(self.notebooks[name]))  # a copy, which is changed below
        cells = notebook["cells"]
        linked = _linked_sections(notebook)
        for cell in cells:
            cell["metadata"]["id"] = cell["id"]  # to which Colab scrolls
            if is_published and cell["cell_type"] == "markdown":
                text = _with_anchors("".join(cell["source"]), linked)
                text = with_links(text, self._published)
                cell["source"] = text.splitlines(keepends=True)
        code = first_cell(self.address, self.commit, packages_of(notebook, self.root))
        cells.insert(0, _code_cell(code, "set-up"))
        if name == RECORDED:
            cells.append(_code_cell(RECORD_CELL.read_text(encoding="utf-8").strip(), "record"))
        return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"

    def _published(self, target: str, fragment: str) -> str:
        """Where a link of a notebook leads, once it is published."""
        path = os.path.normpath(Path("notebooks") / unquote(target)).replace(os.sep, "/")
        folder, _, name = path.rpartition("/")
        if folder == "notebooks" and name in self.notebooks:
            opened = colab_address(self.address, name)
            if not opened:
                return target + fragment
            cell = self.anchors[name].get(unquote(fragment[1:]))
            return f"{opened}#scrollTo={cell}" if cell else opened
        if not self.address.startswith("http"):
            return target + fragment
        return f"{self.address}/blob/{self.commit}/{path}{fragment}"


def with_links(text: str, new: Callable[[str, str], str]) -> str:
    """The text with `new(target, fragment)` for each link to another file of the repository."""

    def replace(match: re.Match[str]) -> str:
        if not match[2]:  # to a section of the same notebook
            return match[0]
        return match[1] + new(match[2], match[3] or "")

    return LINK.sub(replace, text)


def _anchors(notebook: dict[str, Any]) -> dict[str, str]:
    """The id of the cell that has the heading, for each anchor as Jupyter makes them."""
    id_of: dict[str, str] = {}
    for cell in _cells(notebook, "markdown"):
        for heading in HEADING.findall("".join(cell["source"])):
            id_of.setdefault(heading.replace(" ", "-"), cell["id"])
    return id_of


def _linked_sections(notebook: dict[str, Any]) -> set[str]:
    """The anchors that the notebook's own text links to."""
    text = "\n".join("".join(cell["source"]) for cell in _cells(notebook, "markdown"))
    return {unquote(fragment[1:]) for _, path, fragment in LINK.findall(text) if not path}


def _with_anchors(text: str, linked: set[str]) -> str:
    """The text with an anchor before each heading in `linked`, since Colab makes no anchors."""

    def anchored(match: re.Match[str]) -> str:
        name = match[1].replace(" ", "-")
        if name not in linked:
            return match[0]
        return f'<a name="{html.escape(name)}"></a>\n\n{match[0]}'

    return HEADING.sub(anchored, text)


def _code_cell(code: str, name: str) -> dict[str, Any]:
    """A code cell with the id `name`, whose code is folded away in Colab and on Kaggle."""
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {"cellView": "form", "_kg_hide-input": True, "id": name},
        "outputs": [],
        "source": code.splitlines(keepends=True),
    }


def _commit(root: Path) -> str:
    """The full hash of the commit; empty where there is no repository or no git."""
    try:
        process = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return process.stdout.strip()


def write(out: Path, root: Path = ROOT) -> list[Path]:
    """Write the edition into the folder `out`; return its files.

    Raises `EditionError` if there is no commit to fetch from, or if `out` cannot be written.
    """
    edition = Edition(root)
    if not edition.commit:
        raise EditionError("an edition names its commit: write it in a clone made with git")
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in edition.notebooks:
            path = out / name
            path.write_text(edition.text(name, is_published=True), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise EditionError(f"{out} cannot be written ({error.strerror}): name another") from error
    return written


def write_archive(path: Path, root: Path = ROOT) -> None:
    """Write a zip of the notebooks with `course/`, the package and the pages they link to."""
    edition = Edition(root)
    files: dict[str, str | bytes] = {
        f"notebooks/{name}": edition.text(name, is_published=False) for name in edition.notebooks
    }
    for pattern in ARCHIVED:
        for file in root.glob(pattern):
            if file.is_file() and "__pycache__" not in file.parts:
                files[file.relative_to(root).as_posix()] = file.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"amp-lab/{name}", (1980, 1, 1, 0, 0, 0))  # always the same zip
            entry.external_attr = 0o644 << 16  # the permissions of a file, in the upper 16 bits
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED)


def main(arguments: list[str]) -> int:
    """Write the edition into the folder named; return 0, or 2 if that fails.

    This needs no package besides Python itself.
    """
    if len(arguments) != 1:
        print("edition: name one folder to write to", file=sys.stderr)
        return 2
    try:
        written = write(Path(arguments[0]))
    except EditionError as error:
        print(f"edition: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(written)} notebooks to {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
