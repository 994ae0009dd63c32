"""Files are whole or not there, and nothing that is not ours is replaced."""

import os
import stat
import subprocess
import sys

import pytest

from amp_lab import AmpLabError, load_checkpoint, save_checkpoint
from amp_lab.bench import load_results
from amp_lab.core.files import atomic_write, read_json, read_regular
from amp_lab.train.checkpoint import is_checkpoint

posix = pytest.mark.skipif(os.name != "posix", reason="links and devices of POSIX")


def test_a_new_file_is_written_and_an_old_one_replaced_with_nothing_left_beside(tmp_path):
    path = tmp_path / "x"
    for content in (b"one", b"another"):
        atomic_write(path, [content[:1], content[1:]])
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_the_users_with_a_similar_name_stays(tmp_path):
    (tmp_path / "x.partial").write_text("thesis")
    atomic_write(tmp_path / "x", [b"new"])
    assert (tmp_path / "x.partial").read_text() == "thesis"


def test_two_writers_of_a_file_do_not_share_one(tmp_path):
    """One begins while the other is in the middle; the last one to end has its file whole."""
    path, inside = tmp_path / "x", []

    def parts(letter: bytes, between=None):
        yield 1000 * letter
        if between is not None:
            between()
        yield 1000 * letter

    def write_another():
        atomic_write(path, parts(b"b"))
        inside.append(path.read_bytes())

    atomic_write(path, parts(b"a", write_another))
    assert inside == [2000 * b"b"]
    assert path.read_bytes() == 2000 * b"a"
    assert os.listdir(tmp_path) == ["x"]


def test_many_processes_may_write_one_file(tmp_path):
    code = """
import sys
from pathlib import Path
from amp_lab.core.files import atomic_write
for _ in range(20):
    atomic_write(Path(sys.argv[1]), [100_000 * sys.argv[2].encode() for _ in range(10)])
"""
    path = tmp_path / "x"
    writers = [subprocess.Popen([sys.executable, "-c", code, path, x]) for x in "abcd"]
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4
    content = path.read_bytes()
    assert content == 1_000_000 * content[:1]
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path):
    names = [".x.0123.amp-lab-partial", ".x.4567.amp-lab-partial", ".xy.0123.amp-lab-partial"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in (names[0], names[2]):  # the second may be another process's that writes now
        os.utime(tmp_path / name, (0, 0))
    atomic_write(tmp_path / "x", [b"new"])
    assert sorted(os.listdir(tmp_path)) == [*names[1:], "x"]


@posix
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_regular_file_is_refused(tmp_path, kind):
    path, target = tmp_path / "x", tmp_path / "target"
    target.write_text("mine")
    path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        atomic_write(path, [b"new"])
    assert target.read_text() == "mine"
    assert path.is_symlink() == (kind == "link")


@posix
def test_owner_and_mode_are_there_before_the_file_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o750)
    atomic_write(path, [b"new"], like=path.stat())
    assert stat.S_IMODE(path.stat().st_mode) == 0o750

    def refuse(*arguments):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(PermissionError):
        atomic_write(path, [b"newer"], like=path.stat())
    assert path.read_bytes() == b"new"  # left as it was, as an error message says
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="permissions of folders as on Linux")
def test_a_folder_that_may_be_written_and_not_read_is_no_error(tmp_path, monkeypatch):
    real = os.open

    def refuse_folders(path, *arguments, **options):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_folders)
    atomic_write(tmp_path / "x", [b"new"])
    assert (tmp_path / "x").read_bytes() == b"new"


@posix
@pytest.mark.parametrize("read", [load_checkpoint, load_results, read_json])
def test_from_a_pipe_nothing_is_awaited(tmp_path, read):
    os.mkfifo(tmp_path / "x")
    with pytest.raises((AmpLabError, OSError), match="not a regular file"):
        read(tmp_path / "x")


def test_a_file_that_is_too_large_or_too_deep_is_refused(tmp_path):
    path = tmp_path / "x"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_regular(path, max_bytes=99)


def test_a_checkpoint_is_told_from_other_files(tmp_path):
    save_checkpoint(tmp_path / "ours", step=1)
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "thesis.tex").write_text("a" * 500)
    assert is_checkpoint(tmp_path / "ours")
    assert not any(is_checkpoint(tmp_path / name) for name in ("short", "thesis.tex", "none", "."))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("NaN", "is no number in JSON"),
        ("-Infinity", "is no number in JSON"),
        ("1e400", "does not fit into 64 bits"),
    ],
)
def test_json_holds_numbers_of_64_bits(tmp_path, number, said):
    (tmp_path / "x.json").write_text(f'{{"a": [{number}]}}')
    with pytest.raises(ValueError, match=f"^{number} {said}"):
        read_json(tmp_path / "x.json")


def test_a_longer_integer_is_read_as_other_languages_do(tmp_path):
    (tmp_path / "x.json").write_text(f"[{2**63}, {2**62}]")
    large, small = read_json(tmp_path / "x.json")
    assert (type(large), large, type(small), small) == (float, 2.0**63, int, 2**62)
