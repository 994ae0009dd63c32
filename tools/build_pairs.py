"""Execute the notebooks and write their pairs: `pdm run notebooks [NAME …]`; `--check` compares.

People edit `NAME.py`; `NAME.ipynb` is made from it, with outputs from the CPU at the quick scale.
The machine has to be quiet, and the tree committed: `--force` writes figures that are not to be
trusted, or of no commit, all the same. On
another machine than the one that the committed outputs come from, `--keep` keeps the output of each
cell that depends on the machine and whose code did not change. If only the text changed, `--text`
runs nothing.
`--edition FOLDER` writes the notebooks for Colab and Kaggle, as `tools/edition.py` describes.
`--new 20_title` makes a notebook that passes every check, to be filled with what you have to say.
The last figure of notebook 04 is also written as a picture, for the README.
"""

import argparse
import base64
import hashlib
import io
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import torch
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from PIL import Image

import edition
from amp_lab.core.timing import Rounds

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
TEMPLATE = Path(__file__).resolve().parent / "notebook_template.txt"
# What the committed outputs are made with.
SETTINGS = {"AMP_LAB_DEVICE": "cpu", "AMP_LAB_SCALE": "quick"}
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_TIMEOUT_S = 600
IGNORED = "nbval-ignore-output"  # the tag of a cell whose output depends on the machine
UNTRUSTED = re.compile(r"not trusted|too busy")  # what a comparison prints on a busy machine
DIRTY = re.compile(r"commit [0-9a-f]{7,}\+")  # as `course.start` prints it
README_FIGURE = FOLDER / "04_fp32_vs_amp.png"  # the last figure of the notebook of that name


class Problem(Exception):
    """Something to tell the user in one line."""


def main(argv: list[str] | None = None) -> int:
    """Run this tool; return 0, or 2 for something the user can put right."""
    parser = argparse.ArgumentParser(prog="notebooks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="beginning of a file name, e.g. 04 (default: all)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="run nothing; fail if a pair is out of step"
    )
    what.add_argument("--text", action="store_true", help="run nothing; only the text changed")
    what.add_argument(
        "--edition", type=Path, metavar="FOLDER", help="run nothing; write those for Colab, Kaggle"
    )
    what.add_argument("--new", metavar="NN_NAME", help="make notebooks/NN_NAME.py from a template")
    parser.add_argument("--force", action="store_true", help="write figures of a busy machine too")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what depends on the machine, where the code did not change",
    )
    options = parser.parse_args(argv)
    try:
        if options.new is not None:
            print(new(options.new))
            return 0
        if options.edition is not None:
            check(find())
            print(f"wrote {len(edition.write(options.edition))} notebooks to {options.edition}")
            return 0
        sources = find(options.names)
        if options.check:
            check(sources)
            check_stamps(sources)
        else:
            set_up()
            if not (options.text or options.force):
                require_clean_tree()
            for source in sources:
                print(source.name, flush=True)
                prepare(source)
                if options.text:
                    notebook = with_outputs(source)
                else:
                    notebook = execute_quietly(source, options.force)
                if options.keep:
                    keep_outputs(notebook, source)
                write_pair(notebook, source)
    except (Problem, edition.EditionError) as problem:
        print(f"notebooks: {problem}", file=sys.stderr)
        return 2
    return 0


def set_up() -> None:
    """Set what the committed outputs are made with, for the kernels, which inherit it."""
    for name, value in SETTINGS.items():
        from_user = os.environ.get(name) or value
        if from_user != value:
            raise Problem(
                f"{name}={from_user!r}: committed outputs are made with {name}={value}; unset it"
            )
    os.environ.update(SETTINGS)


def find(names: Sequence[str] = ()) -> list[Path]:
    """The notebooks' `.py` files in order; with `names`, those that begin with one."""
    sources = sorted(FOLDER.glob("[0-9][0-9]*_*.py"))
    for name in names:
        if not any(source.name.startswith(name) for source in sources):
            raise Problem(
                f"no notebook begins with {name!r}; there are {', '.join(s.stem for s in sources)}"
            )
    return [source for source in sources if not names or source.name.startswith(tuple(names))]


def is_reference(source: Path) -> bool:
    """Whether a notebook is a part of the reference of failures, such as 08a, and no lesson."""
    return re.match(r"\d+[a-z]_", source.name) is not None


def new(name: str) -> str:
    """Make `name`.py from the template; return what is to be done next."""
    if not re.fullmatch(r"[0-9]{2}_[a-z0-9]+(_[a-z0-9]+)*", name):
        raise Problem(f"{name!r} is no name of a notebook; give one like 20_title")
    number, _, title = name.partition("_")
    same_number = [source.stem for source in find() if source.name.startswith(f"{number}_")]
    if same_number:
        raise Problem(f"the number {number} is taken by {same_number[0]}; give another one")
    source = FOLDER / f"{name}.py"
    words = title.replace("_", " ")
    # "x": a file that was made meanwhile is not written over.
    with source.open("x", encoding="utf-8") as file:
        file.write(TEMPLATE.read_text(encoding="utf-8").replace("{words}", words))
    return (
        f"made {source}; write it, then make its pair with `pdm run notebooks {number}`, and add "
        "it to the map in README.md"
    )


def prepare(source: Path) -> None:
    """Give a `.py` without a header one that names the kernel, and see that a pair can match it."""
    text = source.read_text(encoding="utf-8")
    if not text.startswith("# ---\n"):
        header = "# ---\n# jupyter:\n#   kernelspec:\n"
        for key, value in KERNEL.items():
            header += f"#     {key}: {value}\n"
        header += "# ---\n\n"
        text = header + text.lstrip()
        source.write_text(text, encoding="utf-8")
        print(f"{source.name}: added the header that names its kernel", flush=True)
    expected = as_text(read_source(source), source)
    lines = zip_longest(text.split("\n"), expected.split("\n"))
    for number, (line, expected_line) in enumerate(lines, 1):
        if line != expected_line:  # `check` would find it out of step for ever
            should = "not be there" if expected_line is None else f"be {expected_line!r}"
            raise Problem(f"{source.name}, line {number}: should {should}, as jupytext writes it")


def read_source(source: Path) -> nbformat.NotebookNode:
    """The notebook in a `.py` file, without outputs."""
    notebook = jupytext.read(source, config=load_jupytext_config(str(source)))
    assert isinstance(notebook, nbformat.NotebookNode)  # a list only in formats before version 3
    notebook.metadata.setdefault("kernelspec", KERNEL)
    return notebook


def as_text(notebook: nbformat.NotebookNode, source: Path) -> str:
    """What the `.py` file of this notebook should say."""
    return jupytext.writes(notebook, fmt="py:percent", config=load_jupytext_config(str(source)))


def check(sources: list[Path]) -> None:
    """Raise `Problem` if a pair is missing or says something else than its source."""
    for source in sources:
        pair = source.with_suffix(".ipynb")
        if not pair.exists():
            raise Problem(
                f"{source.name} has no pair; make it with: pdm run notebooks {source.stem}"
            )
        try:
            notebook: Any = nbformat.read(pair, as_version=4)
        except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
            reason = str(error).splitlines()[0][:100]
            raise Problem(
                f"{pair.name} is damaged ({reason}); make it again with: "
                f"pdm run notebooks {source.stem}"
            ) from error
        if as_text(notebook, source) != source.read_text(encoding="utf-8"):
            raise Problem(
                f"{pair.name} is out of step with {source.name}; "
                f"run: pdm run notebooks {source.stem}"
            )


def check_stamps(sources: list[Path]) -> None:
    """Raise `Problem` if a pair was made from changes that are in no commit."""
    for source in sources:
        match = DIRTY.search(stamp(committed(source)))
        if match:
            raise Problem(
                f"{source.stem}.ipynb was made from changes that are in no commit ({match[0]}); "
                f"commit them, then run: pdm run notebooks {source.stem}"
            )


def stamp(notebook: nbformat.NotebookNode) -> str:
    """What the first cell printed, of the machine and the commit that the outputs come from."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            return "".join(output.get("text", "") for output in cell.outputs)
    return ""


def require_clean_tree() -> None:
    """Raise `Problem` for changes to Python files that are in no commit: outputs name theirs."""
    command = ["git", "status", "--porcelain", "--untracked-files=no", ":/*.py"]
    try:
        status = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git here, and so no commit to name
        return
    if status.stdout.strip():
        first_file = status.stdout.split()[1]  # of a line such as `` M tools/record.py``
        raise Problem(f"{first_file} is changed: commit first, since a pair names its commit")


def busy_reason(seconds: float = 1.0) -> str:
    """Why timings on this machine could not be trusted now; empty if it is quiet."""
    # Rounds in which nothing is compared: their watch times a matmul, and notices other programs.
    rounds = Rounds(torch.device("cpu"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds.all) < 12:  # fewer rounds are never trusted
        with rounds.next():
            for _ in range(10):  # a round of some 10 ms
                rounds.watch.calibrate()
    return rounds.comparison([]).reason


def execute_quietly(source: Path, force: bool) -> nbformat.NotebookNode:
    """`execute` on a quiet machine; with a second try, since a neighbour may come and go."""
    for _ in range(2):
        reason = "" if force else busy_reason()
        if reason:
            continue
        notebook = execute(source)
        untrusted_lines = untrusted(notebook)
        if force or not untrusted_lines:
            return notebook
        reason = f"it printed {untrusted_lines[0]!r}"
    raise Problem(
        f"{source.name}: figures of a busy machine are not written ({reason}); stop what else runs "
        "here, or give --force (its pair is unchanged)"
    )


def keep_outputs(notebook: nbformat.NotebookNode, source: Path) -> None:
    """Give cells whose output depends on the machine what they have in the pair, if they are there.

    Raises `Problem` if there is no pair to keep them from.
    """

    def depends(cell: nbformat.NotebookNode) -> bool:
        return cell.cell_type == "code" and IGNORED in cell.metadata.get("tags", [])

    kept = {cell.source: cell.outputs for cell in committed(source).cells if depends(cell)}
    for cell in filter(depends, notebook.cells):
        cell.outputs = kept.get(cell.source, cell.outputs)


def with_outputs(source: Path) -> nbformat.NotebookNode:
    """The notebook in `source` with the outputs of its pair; `Problem` if its code is another."""

    def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
        return [cell for cell in notebook.cells if cell.cell_type == "code"]

    notebook = read_source(source)
    new_cells = code_cells(notebook)
    old_cells = code_cells(committed(source))
    if [cell.source for cell in new_cells] != [cell.source for cell in old_cells]:
        raise Problem(f"{source.name}: not only its text changed, so run it, without --text")
    for new, old in zip(new_cells, old_cells, strict=True):
        new.outputs = old.outputs
        new.execution_count = old.execution_count
    return notebook


def committed(source: Path) -> nbformat.NotebookNode:
    """The pair as it is; `Problem` if there is none."""
    pair = source.with_suffix(".ipynb")
    if not pair.exists():
        raise Problem(f"{source.name} has no pair, whose outputs could be kept")
    notebook: Any = nbformat.read(pair, as_version=4)
    return notebook


def untrusted(notebook: nbformat.NotebookNode) -> list[str]:
    """The printed lines that tell of a measurement that is not to be trusted."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    lines = "".join(output.get("text", "") for output in outputs).splitlines()
    return [line for line in lines if UNTRUSTED.search(line)]


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook in `source`, run from top to bottom on the CPU at the quick scale."""
    # On a machine with a CUDA compiler and no GPU, torch warns of that whenever it compiles.
    environment = {"TORCH_LOGS": "-torch.utils.cpp_extension"} | os.environ
    notebook = read_source(source)
    client = NotebookClient(
        notebook,
        extra_arguments=["--log-level=ERROR"],  # of the kernel: it warns of itself at every start
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        reason = f"raised {error.ename}: {error.evalue}".splitlines()[0]
    except CellTimeoutError:
        reason = f"took more than {CELL_TIMEOUT_S} s"
    except DeadKernelError:
        reason = "killed its kernel"
    else:
        return notebook
    place = _where_it_stopped(notebook, source)
    raise Problem(f"{source.name}: {place} {reason} (its pair is unchanged)")


def _where_it_stopped(notebook: nbformat.NotebookNode, source: Path) -> str:
    """The place of the last code cell that was started, such as "cell 2 (line 13)".

    The line is the line of `source`, the notebook as a Python file.
    """
    started = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count]
    if not started:  # the kernel ended before the first cell
        return "the kernel"
    cell = started[-1]  # the cell that failed, since no cell is run after it
    before, _, _ = source.read_text(encoding="utf-8").partition(cell.source)
    line = before.count("\n") + 1
    return f"cell {notebook.cells.index(cell) + 1} (line {line})"


def write_pair(notebook: nbformat.NotebookNode, source: Path) -> None:
    """Write the `.ipynb` of `source`; running again changes nothing but what the cells print."""
    # No Python version of this machine, and no header of jupytext's.
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    counts: Counter[str] = Counter()  # of cells with this digest so far
    for cell in notebook.cells:
        # An id that follows from the cell's text, where jupytext draws a random one.
        content = f"{cell.cell_type}\n{cell.source}"
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        counts[digest] += 1
        cell.id = digest
        if counts[digest] > 1:  # another cell has the same text
            cell.id = f"{digest}-{counts[digest]}"
    for data in _figure_outputs(notebook):
        png = _few_colours(base64.b64decode(data["image/png"]))
        data["image/png"] = base64.b64encode(png).decode()
    pair = source.with_suffix(".ipynb")
    draft = pair.with_suffix(".ipynb.tmp")
    nbformat.write(notebook, draft)
    draft.replace(pair)
    if source.stem == README_FIGURE.stem:
        README_FIGURE.write_bytes(figures(notebook)[-1])


def figures(notebook: nbformat.NotebookNode) -> list[bytes]:
    """The figures that the cells of an executed notebook show, in order, as PNG files."""
    return [base64.b64decode(data["image/png"]) for data in _figure_outputs(notebook)]


def _figure_outputs(notebook: nbformat.NotebookNode) -> list[dict]:
    outputs = [
        output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    return [data for data in outputs if "image/png" in data]


def _few_colours(png: bytes) -> bytes:
    """A drawing with a palette of 256 colours, which is a third of the size; a photograph as is."""
    drawing = Image.open(io.BytesIO(png))
    if drawing.mode == "P":  # it has a palette already: a second one would only change the bytes
        return png
    picture = drawing.convert("RGB")
    if picture.getcolors(maxcolors=4096) is None:  # it has more colours: a photograph
        return png
    smaller = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
    return min(smaller.getvalue(), png, key=len)


if __name__ == "__main__":
    sys.exit(main())
