"""Files and notebooks: what changes, what stays byte for byte, and what cannot be done is named."""

import argparse
import encodings
import inspect
import json
import os
import stat
import sys
from pathlib import Path

import libcst as cst
import pytest

from amp_lab.cli import main
from amp_lab.migrate import files

OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
NEW = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'


def migrate(*arguments) -> int:
    return main(["migrate", *map(str, arguments)])


def notebook(*sources: str | list[str], **cell) -> dict:
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "source": source}
        | {"execution_count": None}
        | cell
        for i, source in enumerate(sources)
    ]
    return {
        "cells": cells,
        "metadata": {"kernelspec": {"display_name": "Python 3 é", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_without_write_a_diff_is_printed_and_nothing_changes(tmp_path, capsys):
    path = tmp_path / "a.py"
    path.write_text(OLD)
    assert migrate(path) == 0
    assert path.read_text() == OLD
    printed = capsys.readouterr().out
    assert "-scaler = torch.cuda.amp.GradScaler()" in printed
    assert '+scaler = torch.amp.GradScaler("cuda")' in printed
    assert f"{path}:2: rewritten: " in printed


def test_the_code_is_never_run(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{OLD}")
    assert migrate("--write", path) == 0
    assert not (tmp_path / "ran").exists()


def test_check_exits_1_until_everything_is_done(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(OLD)
    assert migrate("--check", path) == 1
    assert path.read_text() == OLD
    assert migrate("--write", path) == 0
    assert path.read_text() == NEW
    assert migrate("--check", path) == 0
    path.write_text("from torch.cuda.amp import *\n")
    assert migrate("--check", path) == 1


def test_check_asks_for_nothing_where_code_is_made_for_several_versions(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "try:\n    from torch.amp import GradScaler\n"
        "except ImportError:\n    from torch.cuda.amp import GradScaler\n"
    )
    assert migrate("--check", path) == 0


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("", "utf-8"),
        ("\ufeff", "utf-8"),
        ("# -*- coding: latin-1 -*-\n", "latin-1"),
        ("#!/usr/bin/python\n# vim: set fileencoding=cp1251 :\n", "cp1251"),
        ("# coding: euc_jp\n", "euc_jp"),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_everything_else_stays_byte_for_byte(tmp_path, head, encoding, ending):
    word = {"cp1251": "Привет", "euc_jp": "日本語"}.get(encoding, "é")
    text = f"{head}# {word} \x0c\t\nx = '{word}'  \n{OLD}# no last line end: {word}"
    path = tmp_path / "a.py"
    path.write_bytes(text.replace("\n", ending).encode(encoding))
    path.chmod(0o751)
    assert migrate("--write", path) == 0
    expected = text.replace(OLD, NEW).replace("\n", ending).encode(encoding)
    assert path.read_bytes() == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert os.listdir(tmp_path) == ["a.py"]


def test_line_endings_may_be_mixed(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(b"import torch\r\nx = 1\ns = torch.cuda.amp.GradScaler()\r\ny = 2\n\r\n")
    assert migrate("--write", path) == 0
    new = b'import torch\r\nx = 1\ns = torch.amp.GradScaler("cuda")\r\ny = 2\n\r\n'
    assert path.read_bytes() == new


def _hard_link(path):
    path.write_text(OLD)
    os.link(path, path.with_name("other.txt"))


def _read_only(path):
    path.write_text(OLD)
    path.chmod(0o444)


BAD = {  # what is wrong: how the file is made, what is said of it
    "does not parse": (lambda p: p.write_text(OLD + "x = (\n"), "does not parse as Python"),
    "Python 2": (lambda p: p.write_text(OLD + "print 'x'\n"), "line 3 does not parse"),
    "not UTF-8": (lambda p: p.write_bytes(OLD.encode() + b"# \xe9\n"), "line 3 is not utf-8"),
    "not its encoding": (
        lambda p: p.write_bytes(b"# coding: ascii\n" + OLD.encode() + b"# \xe9\n"),
        "line 4 is not ascii",
    ),
    "an unknown encoding": (lambda p: p.write_text("# coding: nope\n" + OLD), "unknown encoding"),
    "a hard link": (_hard_link, "hard links"),
    "read-only": (_read_only, "is read-only"),
    "10 MB": (
        lambda p: p.write_text(OLD + "x = 1\n" * 1_750_000),
        "bytes of Python exceed the limit of 524,288: split",
    ),
    "nested too deeply": (
        lambda p: p.write_text(OLD + "x = " + "-" * 2_000 + "1\n"),
        "line 3 is nested too deeply",
    ),
    "binary": (
        lambda p: p.write_bytes(b"\x7fELF\x02\0torch.cuda.amp\0GradScaler\xff\n"),
        "contains a null byte, so it is not Python",
    ),
    "a null": (lambda p: p.write_bytes(OLD.encode() + b"x = '\0'\n"), "contains a null byte"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named_and_left_and_the_others_are_done(tmp_path, capsys, kind):
    make, said = BAD[kind]
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    good.write_text(OLD)
    make(bad)
    before = bad.read_bytes()
    assert migrate("--write", tmp_path) == 2
    assert bad.read_bytes() == before
    assert good.read_text() == NEW
    (line,) = capsys.readouterr().err.splitlines()
    assert str(bad) in line
    assert said in line


def test_a_link_in_a_folder_is_passed_over_with_a_line(tmp_path, capsys):
    project, other = tmp_path / "project", tmp_path / "other"
    for folder in (project, other):
        folder.mkdir()
        (folder / "a.py").write_text(OLD)
    (project / "b.py").symlink_to(other / "a.py")
    (project / "c.py").symlink_to("nowhere")
    (project / "folder").symlink_to(other)
    assert migrate("--write", project) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in said] == [
        f"{project / name} was skipped, because it is a link" for name in ("b.py", "c.py", "folder")
    ]
    assert (project / "a.py").read_text() == NEW
    assert (other / "a.py").read_text() == OLD


def test_a_link_that_is_given_by_name_is_an_error(tmp_path, capsys):
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").symlink_to(tmp_path / "a.py")
    assert migrate("--write", tmp_path / "b.py") == 2
    assert "b.py: the path is a link: give" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == OLD


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    (tmp_path / "good.py").write_text(OLD)
    assert migrate("--write", tmp_path / "none.py", tmp_path) == 2
    assert "none.py: cannot be read" in capsys.readouterr().err
    assert (tmp_path / "good.py").read_text() == NEW


def test_a_folder_without_python_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text(OLD)
    assert migrate("--write", tmp_path / "empty", tmp_path / "mine") == 2
    assert "empty contains no Python file" in capsys.readouterr().err
    assert (tmp_path / "mine" / "a.py").read_text() == NEW


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, capsys, monkeypatch):
    shut = tmp_path / "shut"
    shut.mkdir()
    (tmp_path / "a.py").write_text(OLD)
    scandir = os.scandir

    def refuse(path):
        if Path(path) == shut:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert migrate("--write", tmp_path) == 2
    assert f"{shut}: cannot be read" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == NEW


def test_in_a_folder_that_cannot_be_written_a_file_stays_whole(tmp_path, capsys, monkeypatch):
    def refuse(*paths):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.py").write_text(OLD)
    monkeypatch.setattr(os, "replace", refuse)
    assert migrate("--write", tmp_path) == 2
    assert "a.py: Permission denied; not changed" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.py"]
    assert (tmp_path / "a.py").read_text() == OLD


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_named_like_a_file_but_is_none(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.py")  # nothing will ever write to it
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "folder.py" / "a.py").write_text(OLD)
    (tmp_path / "dangling.py").symlink_to("nowhere")
    (tmp_path / "empty.py").touch()
    assert migrate("--write", tmp_path) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "dangling.py was skipped, because it is a link" in line
    assert (tmp_path / "folder.py" / "a.py").read_text() == NEW


def test_check_asks_for_nothing_where_there_is_a_note_alone(tmp_path, capsys):
    path = tmp_path / "a.py"
    path.write_text("import torch\nwith torch.autocast('cuda'):\n    loss.backward()\n")
    assert migrate("--check", path) == 0
    assert ":3: note: backward runs inside autocast" in capsys.readouterr().out


def test_the_summary_counts_in_words_that_fit(tmp_path, capsys):
    path = tmp_path / "a.py"
    late = "    scaler.scale(loss).backward()\nscaler.step(optimizer)\n"
    path.write_text(OLD + "with torch.autocast('cuda'):\n" + late)
    assert migrate(path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1 rewritten, 0 by hand, 0 left, 1 mistake, 1 note; 1 file ")
    assert last.endswith(" --write")
    assert migrate("--write", path) == 0
    assert capsys.readouterr().out.endswith(" 1 mistake, 1 note; 1 file changed\n")
    assert migrate("--write", path) == 0
    assert capsys.readouterr().out.endswith(" 1 mistake, 1 note; 0 files changed\n")
    path.write_text(NEW)
    assert migrate("--write", path) == 0
    assert capsys.readouterr().out == "nothing to do\n"


@pytest.mark.parametrize("happens", ["vanishes", "is changed"])
def test_a_file_that_changes_meanwhile_is_named(tmp_path, capsys, monkeypatch, happens):
    path = tmp_path / "a.py"
    path.write_text(OLD)

    def migrate_and_meddle(text, wanted):
        path.unlink() if happens == "vanishes" else path.write_text("x = 1\n")
        return edits_and_findings(text)

    edits_and_findings = files.edits_and_findings
    monkeypatch.setattr(files, "edits_and_findings", migrate_and_meddle)
    assert migrate("--write", path) == 2
    assert "a.py" in capsys.readouterr().err
    assert not path.exists() if happens == "vanishes" else path.read_text() == "x = 1\n"


def test_folders_of_others_are_passed_over(tmp_path):
    for folder in (".git", "__pycache__", "node_modules", "env/lib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(OLD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text(OLD)
    (tmp_path / "mine" / "a.txt").write_text(OLD)
    assert files.find_source_files(tmp_path) == [tmp_path / "mine" / "a.py"]


def test_a_file_without_the_names_is_not_parsed(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = (\n")
    monkeypatch.setattr(files, "edits_and_findings", pytest.fail)
    assert list(files.migrate_paths([tmp_path])) == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_file_in_an_encoding_that_python_cannot_read_is_an_error(encoding, tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(f"\ufeff{OLD}".encode(encoding))  # as PowerShell writes it
    (result,) = files.migrate_paths([path])
    assert str(path) in result.error
    assert not result.written


def test_a_file_without_triggers_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(cst, "parse_module", None)  # to call it would raise
    path = tmp_path / "a.py"
    path.write_bytes(Path(argparse.__file__).read_bytes())
    assert not files.has_trigger(path)
    assert list(files.migrate_paths([path])) == []


# Notebooks.

FORMS = {
    "indented": lambda n: json.dumps(n, indent=1, ensure_ascii=False) + "\n",
    "escaped": lambda n: json.dumps(n, indent=4),
    "in one line": lambda n: json.dumps(n, separators=(",", ":")),
    "with other line endings": lambda n: json.dumps(n, indent=2).replace("\n", "\r\n"),
}
FIRST = ["from torch.cuda.amp import GradScaler, autocast\n", "é = '\\t\"\\u2028😀'\n", "x = 3"]
SECOND = ["scaler = GradScaler() # 😀\n", "with autocast():\n", '    print(f"{x}\\n")']
FIRST_NEW = ["import torch\n", "from torch.amp import GradScaler, autocast\n", *FIRST[1:]]
SECOND_NEW = [
    'scaler = GradScaler("cuda") # 😀\n',
    'with autocast("cuda", dtype=torch.float16):\n',
    SECOND[2],
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("joined", [False, True])
def test_a_notebook_keeps_everything_but_the_lines_that_change(tmp_path, form, joined):
    def kept(lines: list[str]) -> str | list[str]:
        return "".join(lines) if joined else lines

    path = tmp_path / "a.ipynb"
    old = notebook(kept(FIRST), kept(["x = 1"]), kept(SECOND))
    new = notebook(kept(FIRST_NEW), kept(["x = 1"]), kept(SECOND_NEW))
    path.write_bytes(FORMS[form](old).encode())
    assert migrate("--write", path) == 0
    assert path.read_bytes() == FORMS[form](new).encode()
    assert migrate("--check", path) == 0


def test_lines_of_a_notebook_are_told_by_cell(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook(["import torch\n", "x = 1"], OLD)))
    assert migrate(path) == 0
    assert f"{path}:cell 2:2: rewritten" in capsys.readouterr().out


def test_the_text_of_a_notebook_and_its_outputs_stay(tmp_path):
    path = tmp_path / "a.ipynb"
    old = notebook(OLD, cell_type="markdown")
    path.write_text(json.dumps(old))
    assert migrate("--check", path) == 0
    other = notebook(OLD)
    other["metadata"]["kernelspec"]["language"] = "julia"
    path.write_text(json.dumps(other))
    assert migrate("--check", path) == 0


BAD_NOTEBOOKS = {
    "not Python": (json.dumps(notebook(OLD, "x = (")), "cell 2:1 does not parse"),
    "cut off": (json.dumps(notebook(OLD))[:-20], "the notebook is incomplete"),
    "empty": ("torch.autocast", "the notebook is incomplete"),
    "no notebook": ('["torch.autocast"]', "not a notebook"),
    "no cells": ('{"metadata": {}, "torch.autocast": 1}', "not a notebook"),
    "a source that is no text": (json.dumps(notebook([OLD, 3])), "not a notebook"),
}


@pytest.mark.parametrize("kind", BAD_NOTEBOOKS)
def test_a_bad_notebook_is_named_and_left_and_the_others_are_done(tmp_path, capsys, kind):
    text, said = BAD_NOTEBOOKS[kind]
    bad, good = tmp_path / "bad.ipynb", tmp_path / "good.ipynb"
    bad.write_text(text)
    good.write_text(json.dumps(notebook(OLD)))
    assert migrate("--write", tmp_path) == 2
    assert bad.read_text() == text
    assert good.read_text() == json.dumps(notebook(NEW))
    (line,) = capsys.readouterr().err.splitlines()
    assert str(bad) in line
    assert said in line


PARTS = [
    [
        "from torch.cuda.amp import (\n",
        "    autocast,\n",
        "    GradScaler,\n",
        "    common,\n",
        ")\n",
        "print(common, 'é\\u2028')",
    ],
    ["scaler = GradScaler()\n", "\n", "# 😀\n", "with autocast(): pass"],
]
PARTS_NEW = [
    [
        "import torch\n",
        "from torch.amp import autocast, GradScaler\n",
        "from torch.cuda.amp import (\n",
        "    common,\n",
        *PARTS[0][4:],
    ],
    [
        'scaler = GradScaler("cuda")\n',
        *PARTS[1][1:3],
        'with autocast("cuda", dtype=torch.float16): pass',
    ],
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("joined", [False, True])
def test_lines_of_a_notebook_may_be_joined(tmp_path, form, joined):
    def made(cells: list[list[str]]) -> bytes:
        return FORMS[form](
            notebook(*("".join(cell) if joined else cell for cell in cells))
        ).encode()

    path = tmp_path / "a.ipynb"
    path.write_bytes(made(PARTS))
    assert migrate("--write", path) == 0
    assert path.read_bytes() == made(PARTS_NEW)
    assert migrate("--check", path) == 0


DEEP = {  # kinds of code that a parser follows by recursion, a number of levels deep
    "sum": lambda levels: "x = " + "1 + " * (levels // 2) + "1",
    "chain": lambda levels: "x = a" + ".b" * (levels // 2),
    "signs": lambda levels: "x = " + "-" * levels + "1",
    "calls": lambda levels: "x = f" + "()" * (levels // 2),
    "lambdas": lambda levels: "x = " + "lambda a, b: " * (levels // 5) + "1",
    "comprehension": lambda levels: "x = [0" + " for a, b in c" * (levels // 6) + "]",
    "f-string": lambda levels: 'x = f"{' + "-" * levels + '1}"',
    "elif": lambda levels: "if a:\n    pass\n" + "elif a:\n    pass\n" * levels,
}


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("levels_to_spare", [60, 100_000], ids=["low limit", "high limit"])
def test_deep_code_gets_one_answer_whatever_the_recursion_limit(tmp_path, kind, levels_to_spare):
    old = "from torch.cuda.amp import autocast\nautocast()\n"
    for name, levels in (("fits", 1_900), ("deep", 30_000)):
        (tmp_path / f"{name}.py").write_text(old + DEEP[kind](levels) + "\n")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + levels_to_spare)
    try:
        deep, fits = files.migrate_paths([tmp_path], write=True)
    finally:
        sys.setrecursionlimit(before)
    assert "is nested too deeply" in deep.error
    assert fits.error is None
    assert fits.written


def test_brackets_and_blocks_within_each_other_are_counted(tmp_path):
    old = "from torch.cuda.amp import autocast\nautocast()\n"
    blocks = "".join(" " * level + "if a:\n" for level in range(99))
    for name, code in {
        "a_fits": f"x = {'(' * 99}1{')' * 99}\n",
        "b_deep": f"x = {'(' * 100}1{')' * 100}\n",
        "c_fits": f"{blocks}{' ' * 99}pass\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(old + code)
    errors = [result.error for result in files.migrate_paths([tmp_path])]
    assert [error is None for error in errors] == [True, False, True]


@pytest.mark.parametrize(
    "code",
    [
        f"x = [{'1, ' * 10_000}]\n",
        f"x = [{'lambda a, b: a, ' * 1_000}]\n",
        "if a:\n    pass\nelif b:\n    pass\n" * 1_500,
        "x = 1; " * 1_000 + "y = 2\n",
        f'x = f"""{"a few words and {one + field} " * 1_000}"""\n',
    ],
    ids=["items", "lambdas", "chains of elif", "semicolons", "fields"],
)
def test_long_code_is_not_deep(tmp_path, code):
    old = "from torch.cuda.amp import autocast\nautocast()\n"
    (tmp_path / "long.py").write_text(old + code)
    assert [result.error for result in files.migrate_paths([tmp_path])] == [None]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a device that never ends")
def test_what_never_ends_is_not_read(tmp_path):
    zero_path = tmp_path / "zero.py"
    zero_path.symlink_to("/dev/zero")
    with open(tmp_path / "huge.py", "wb") as file:
        file.truncate(40 * 2**30)  # of blocks that are nowhere
    huge, zero = sorted(
        files.migrate_paths([tmp_path / "huge.py", zero_path]), key=lambda result: result.path
    )
    assert "has more than 67108864 bytes" in huge.error
    assert "not a regular file" in zero.error


@pytest.mark.parametrize(
    "codec", sorted({*encodings.aliases.aliases.values(), "idna", "undefined"})
)
def test_no_encoding_keeps_other_files_from_being_reported(tmp_path, codec, capsys):
    """Some are of bytes, such as hex and zlib; some name no language's letters."""
    odd = f"# coding: {codec}\nfrom torch.cuda.amp import autocast\nautocast()\n".encode()
    (tmp_path / "a.py").write_bytes(odd)
    (tmp_path / "b.py").write_text("from torch.cuda.amp import autocast\nautocast()\n")
    assert main(["migrate", "--check", str(tmp_path)]) in (1, 2)
    said = capsys.readouterr()
    assert "b.py" in said.out
    assert "Traceback" not in said.err
    main(["migrate", "--write", str(tmp_path)])
    found = (tmp_path / "a.py").read_bytes()
    assert found == odd or b"torch.amp" in found


def test_a_null_byte_in_a_cell_is_refused(tmp_path):
    source = "from torch.cuda.amp import autocast\nautocast()\nx = '\0'\n"
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": []}
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4}))
    before = path.read_bytes()
    result = files.migrate_file(path, write=True)
    assert result.error is not None
    assert "cell 1 contains a null byte" in result.error
    assert path.read_bytes() == before
