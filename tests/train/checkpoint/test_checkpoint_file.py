"""Checkpoints: whole or not there, checked to the last byte, and never a program."""

import errno
import hashlib
import io
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import CONTEXT, LOADED
from torch import nn

from amp_lab import load_checkpoint, save_checkpoint
from amp_lab.core.errors import CheckpointError
from amp_lab.train.checkpoint import file as checkpoint_file


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "checkpoint.pt"


@pytest.fixture
def saved(path) -> Path:
    save_checkpoint(path, step=7, weights=torch.arange(100.0))
    return path


def test_what_was_saved_comes_back(path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8)
    save_checkpoint(
        path,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        epoch=3,
        names=["a", None],
        pair=(1, 2.5),
    )
    state = load_checkpoint(path)
    assert state["epoch"] == 3
    assert state["names"] == ["a", None]
    assert state["pair"] == (1, 2.5)
    assert state["scaler"]["scale"] == 8
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name], value)
    averages = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], averages)


def test_plain_torch_reads_it_too(saved):
    assert torch.load(saved, weights_only=True)["step"] == 7


def test_saving_again_replaces_it_and_leaves_nothing_else(saved):
    save_checkpoint(saved, step=8)
    assert load_checkpoint(saved) == {"step": 8}
    assert os.listdir(saved.parent) == [saved.name]


def test_memory_format_is_kept(path):
    weights = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    save_checkpoint(path, weights=weights)
    assert load_checkpoint(path)["weights"].is_contiguous(memory_format=torch.channels_last)


def test_a_value_that_could_not_be_read_back_is_refused_at_once(saved):
    with pytest.raises(TypeError, match="PosixPath"):
        save_checkpoint(saved, folder=Path("x"))
    assert load_checkpoint(saved)["step"] == 7


# What is wrong with a file


@pytest.mark.parametrize("left", [0, 1, 3, 4, 100, 0.25, 0.5, 0.9, -200, -93, -92, -50, -1])
def test_a_truncated_file_is_said_to_be_one(saved, left):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * left) if isinstance(left, float) else left])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved)
    said = str(caught.value)
    assert said.startswith(f"{saved}: ")
    expected = {0: "empty", 1: "not a checkpoint", 3: "not a checkpoint"}
    if left in (-93, -92, -50, -1):  # only the comment, or a part of it, is missing
        assert "last bytes of the file were changed" in said or "truncated" in said
    else:
        assert expected.get(left, "truncated: the end of the file is missing") in said


def test_no_byte_can_be_altered_unnoticed(saved):
    content = saved.read_bytes()
    places = sorted({*range(0, len(content), 37), *range(len(content) - 120, len(content))})
    assert len(places) > 130
    for place in places:
        altered = bytearray(content)
        altered[place] ^= 1
        saved.write_bytes(altered)
        with pytest.raises(CheckpointError, match=r"altered|not a checkpoint|format|truncated"):
            load_checkpoint(saved)


def test_bytes_put_after_the_end_are_noticed(saved):
    saved.write_bytes(saved.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="changed"):
        load_checkpoint(saved)


@pytest.mark.parametrize(("written", "said"), [(0, "older .*format 0"), (9, "newer .*format 9")])
def test_another_version_is_named(saved, written, said):
    content = saved.read_bytes()
    saved.write_bytes(content.replace(b"amp-lab checkpoint 1", b"amp-lab checkpoint %d" % written))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(saved)


def test_a_foreign_checkpoint_is_named(path):
    torch.save({"weights": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of amp_lab"):
        load_checkpoint(path)


def test_a_text_file_is_no_checkpoint(path):
    path.write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(CheckpointError, match=r"not a checkpoint$"):
        load_checkpoint(path)


def test_a_program_in_disguise_is_never_run(path, tmp_path):
    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was-run"),)

    torch.save(Program(), path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not (tmp_path / "was-run").exists()


def sparse(path: Path, size: int, end: bytes) -> None:
    """A file that has a size and almost no bytes on the disk."""
    with path.open("wb") as file:
        file.truncate(size - len(end))
        file.seek(0, os.SEEK_END)
        file.write(end)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (b"", "not a checkpoint"),
        (b"amp-lab checkpoint 1 sha256 " + b"0" * 64, "changed after it was saved"),
    ],
    ids=["zeros", "with our last line"],
)
def test_a_file_that_is_larger_than_memory_is_not_read_whole(path, monkeypatch, end, said):
    sparse(path, 2**26, end)
    most = []
    monkeypatch.setattr(checkpoint_file, "open_regular", lambda path: Counting(path, most))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path)
    assert max(most) <= 2**20


class Counting(io.FileIO):
    """A file that notes how many bytes it is asked for at a time."""

    def __init__(self, path: Path, asked: list[int]):
        super().__init__(path)
        self._asked = asked

    def read(self, size: int | None = -1, /) -> bytes:
        self._asked.append(2**62 if size is None or size < 0 else size)
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        self._asked.append(memoryview(buffer).nbytes)
        return super().readinto(buffer)


def test_a_checkpoint_without_memory_for_it_is_said(saved, monkeypatch):
    def load(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match="does not fit into memory"):
        load_checkpoint(saved)


@pytest.mark.parametrize("content", [b"", b"\x80\x02]q\x00e.", b"\x80\x02\x8a\xff.", b"PK\x03\x04"])
def test_anything_with_a_right_checksum_is_told_in_a_line(path, content):
    last = b"amp-lab checkpoint 1 sha256 %s" % hashlib.sha256(content).hexdigest().encode()
    path.write_bytes(content + len(last).to_bytes(2, "little") + last)
    with pytest.raises(CheckpointError, match="right checksum, but amp_lab did not") as caught:
        load_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_and_unreadable_files_are_said(tmp_path):
    with pytest.raises(CheckpointError, match="none: cannot be read"):
        load_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}: cannot be read"):
        load_checkpoint(tmp_path)


# What stands in the way of saving


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: cannot be written"):
        save_checkpoint(tmp_path / "none" / "checkpoint.pt", step=1)


def test_a_name_that_is_a_folder_is_said(tmp_path):
    (tmp_path / "checkpoint.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: cannot be written"):
        save_checkpoint(tmp_path / "checkpoint.pt", step=1)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_write_that_fails_half_way_leaves_the_old_checkpoint(saved):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file may grow beyond this
    try:
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
            save_checkpoint(saved, weights=torch.zeros(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert load_checkpoint(saved)["step"] == 7
    assert os.listdir(saved.parent) == [saved.name]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_old_checkpoint(small_disk):
    path = small_disk / "checkpoint.pt"
    save_checkpoint(path, step=7)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
        save_checkpoint(path, weights=torch.zeros(100_000))
    assert load_checkpoint(path) == {"step": 7}
    assert os.listdir(small_disk) == ["checkpoint.pt"]


def save_for_ever(path: Path) -> None:
    for step in range(10**9):
        save_checkpoint(path, step=step, weights=torch.full((50_000,), float(step)))


def test_kill_9_never_leaves_a_broken_checkpoint(path):
    CONTEXT.set_forkserver_preload(LOADED)
    chance = random.Random(0)
    for _ in range(3):
        path.unlink(missing_ok=True)
        writer = CONTEXT.Process(target=save_for_ever, args=(path,))
        writer.start()
        while not path.exists():
            assert writer.is_alive()
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        writer.kill()
        writer.join()
        state = load_checkpoint(path)
        assert torch.equal(state["weights"], torch.full((50_000,), float(state["step"])))
