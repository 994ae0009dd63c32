"""Text: which characters are tokens, how it is cut, and what is refused."""

import os

import pytest
import torch
from data_sets import load_text

from amp_lab.core.errors import DataError
from amp_lab.train.data import batches, load_dataset
from amp_lab.train.data.tokens import UNKNOWN


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.md").write_text("second " * 300)
    (tmp_path / "a.txt").write_text("first " * 300 + "ß")
    (tmp_path / "c.py").write_text("no text")
    return tmp_path


def test_the_standard_library_is_always_there():
    data = load_dataset("stdlib", limit=50)
    assert data.is_text
    assert (len(data.train), len(data.test), data.sample_shape) == (50, 6, (256,))
    assert {"a", " ", "\n", UNKNOWN} <= set(data.classes)
    assert load_dataset("stdlib", limit=50, seed=5).fingerprint == data.fingerprint


def test_targets_are_the_next_tokens(folder):
    data = load_text(folder, context=8, seed=None)
    tokens, following = data.train.batch([0, 1])
    assert tokens.dtype == following.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert "".join(data.classes[i] for i in tokens[0]) == "first fi"
    assert "".join(data.classes[i] for i in tokens[1]) == "rst " + "first"[:4]
    assert UNKNOWN in data.classes  # for the one character that hardly occurs


def test_each_epoch_cuts_at_other_places_and_always_the_same(folder):
    first, again = (load_text(folder, context=16, seed=3).train for _ in range(2))
    length = len(first)
    starts = {tuple(first.batch([epoch * length])[0][0].tolist()) for epoch in range(8)}
    assert len(starts) > 2
    for epoch in range(3):
        keys = [epoch * length, epoch * length + length - 1]
        assert torch.equal(first.batch(keys)[0], again.batch(keys)[0])


def test_a_limit_keeps_passages_of_all_of_the_text(folder):
    data = load_text(folder, context=8, limit=4, seed=None)
    words = {"".join(data.classes[i] for i in row) for row in data.train.batch(range(4))[0]}
    assert any("f" in word for word in words)  # of "first"
    assert any("d" in word for word in words)  # of "second"


def test_two_processes_share_each_batch(folder):
    train = load_text(folder, context=8).train
    whole = [b[0] for b in batches(train, 8, seed=1, drop_last=True)]
    shares = [{"share": (rank, 2), "seed": 1, "drop_last": True} for rank in (0, 1)]
    halves = [[b[0] for b in batches(train, 8, **share)] for share in shares]
    for batch, left, right in zip(whole, *halves, strict=True):
        assert torch.equal(batch[::2], left)
        assert torch.equal(batch[1::2], right)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 tokens are too few"),
        (b"short", "5 tokens are too few"),
        (b"\0" * 100_000, "not a text file: .*null bytes"),
        ("ä".encode("latin-1") * 100_000, "not UTF-8"),
    ],
    ids=["empty", "short", "binary", "latin-1"],
)
def test_what_is_no_text_is_told_in_a_line(tmp_path, content, says):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as told:
        load_text(file)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("length", [20, 81, 99, 101, 99_999, 100_001])
def test_every_length_that_is_enough_has_a_test(tmp_path, length):
    file = tmp_path / "text.txt"
    file.write_text("ab" * (length // 2) + "a" * (length % 2))
    data = load_text(file, context=1)
    assert len(data.test) > 0
    assert len(data.train) > 5 * len(data.test)


def test_what_cannot_be_is_refused(tmp_path, folder, monkeypatch):
    with pytest.raises(DataError, match="no such file"):
        load_text(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file that ends in"):
        load_text(tmp_path / "empty")
    with pytest.raises(DataError, match="context=0 must be"):
        load_text(folder, context=0)
    with pytest.raises(DataError, match="leave out image_size"):
        load_dataset("stdlib", image_size=32)
    monkeypatch.setattr("amp_lab.train.data.text_files._MAX_TEXT_BYTES", 100)
    with pytest.raises(DataError, match="the limit is 1 GiB"):
        load_text(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_among_the_texts_is_told_in_a_line(tmp_path, make):
    (tmp_path / "a.txt").write_text("a" * 10_000)
    make(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"text .*read: .*regular file.*b\.txt"):
        load_text(tmp_path, context=4)
