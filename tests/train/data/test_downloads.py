"""Downloads: whole or not there, gone on with, and told in one line."""

import errno
import hashlib
import http.server
import io
import os
import re
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from data_sets import CALTECH256_FOLDER, CIFAR10_FOLDER, refusal
from torchvision.datasets import CIFAR10

from amp_lab import load_dataset
from amp_lab.train.data import caltech256
from amp_lab.train.data.downloads import download
from amp_lab.train.registry import DATASETS, downloaded_text

pytest_plugins = ("data_sets",)


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` under any name; every connection ends after `cut` bytes of it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.cut, self.ranges, self.status = b"", None, True, None
        self.requests = []  # the Range of each
        self.url = f"http://127.0.0.1:{self.server_port}/archive.tar"
        # The default interval of half a second is what each shutdown would wait for.
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers["Range"]
        server.requests.append(asked)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if server.status or (start and start >= len(server.content)):
            self.send_error(server.status or 416)
            return
        self.send_response(206 if start else 200)
        if start:
            end = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        rest = server.content[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        server.content = np.random.default_rng(0).bytes(100_000)
        yield server
        server.shutdown()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_download_is_whole_or_not_there(server, tmp_path):
    path = tmp_path / "new" / "file"
    download(server.url, path, checksum=md5(server.content))
    assert path.read_bytes() == server.content
    assert list(path.parent.iterdir()) == [path]


def test_a_connection_that_breaks_off_is_taken_up_again(server, tmp_path):
    server.cut = 30_000
    download(server.url, tmp_path / "file", checksum=md5(server.content))
    assert (tmp_path / "file").read_bytes() == server.content
    assert server.requests == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]


def test_a_download_goes_on_where_an_earlier_call_stopped(server, tmp_path):
    path, part = tmp_path / "file", tmp_path / "file.part"
    part.write_bytes(server.content[:40_000])
    server.cut = 0  # nothing comes any more
    said = refusal(download, server.url, path, checksum=md5(server.content))
    assert server.url in said
    assert "ended after 40000 of 100000 bytes" in said
    assert part.stat().st_size == 40_000
    assert not path.exists()
    server.cut = None
    download(server.url, path, checksum=md5(server.content))
    assert path.read_bytes() == server.content
    assert server.requests[-1] == "bytes=40000-"


def test_a_server_that_cannot_resume_sends_it_all_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "file.part").write_bytes(b"x" * 40_000)
    download(server.url, tmp_path / "file", checksum=md5(server.content))
    assert (tmp_path / "file").read_bytes() == server.content


@pytest.mark.parametrize("size", [40_000, 100_000, 150_000])
def test_the_rest_of_another_version_is_noticed_and_all_is_fetched(size, server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * size)
    download(server.url, tmp_path / "file", checksum=md5(server.content))
    assert (tmp_path / "file").read_bytes() == server.content


def test_a_file_that_was_whole_already_is_not_fetched_again(server, tmp_path):
    (tmp_path / "file.part").write_bytes(server.content)
    download(server.url, tmp_path / "file", checksum=md5(server.content))
    assert server.requests == ["bytes=100000-"]  # answered with 416, without content


@pytest.mark.parametrize(("checksum", "name"), [(md5, "MD5"), (sha256, "SHA256")])
def test_a_wrong_file_is_refused_and_not_kept(checksum, name, server, tmp_path):
    said = refusal(download, server.url, tmp_path / "file", checksum=checksum(b"other"))
    assert f"its {name} is {checksum(server.content)} instead of {checksum(b'other')}" in said
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_of_another_length_is_refused_before_the_download(server, tmp_path):
    with pytest.raises(ValueError, match=r"'123': give an MD5 \(32 digits\) or a SHA-256"):
        download(server.url, tmp_path / "file", checksum="123")
    assert server.requests == []


@pytest.mark.parametrize(("status", "said"), [(404, "404"), (403, "403"), (500, "500")])
def test_a_server_that_refuses_is_quoted(status, said, server, tmp_path):
    server.status = status
    assert said in refusal(download, server.url, tmp_path / "file", checksum=md5(b""))
    assert list(tmp_path.iterdir()) == []


def test_without_a_server_it_says_so(tmp_path):
    said = refusal(download, "http://127.0.0.1:1/file", tmp_path / "file", checksum=md5(b""))
    assert "http://127.0.0.1:1/file" in said
    assert "refused" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told(server, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    said = refusal(download, server.url, tmp_path / "file", checksum=md5(server.content))
    assert os.strerror(errno.ENOSPC) in said
    assert not (tmp_path / "file").exists()


def test_a_folder_that_cannot_be_made_is_told(server, tmp_path):
    (tmp_path / "file").touch()
    said = refusal(download, server.url, tmp_path / "file" / "in", checksum=md5(server.content))
    assert str(tmp_path / "file") in said


def archive(folder) -> bytes:
    """The folders in this one, in a tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in folder.iterdir():
            if path.is_dir():
                tar.add(path, path.name)
    return packed.getvalue()


@pytest.mark.parametrize("name", ["cifar10", "caltech256"])
def test_a_missing_data_set_is_fetched_unpacked_and_read(
    name, server, cifar10_folder, caltech256_folder, tmp_path, monkeypatch
):
    server.content = archive({"cifar10": cifar10_folder, "caltech256": caltech256_folder}[name])
    server.cut = 50_000
    monkeypatch.setattr(CIFAR10, "url", server.url)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(server.content))
    monkeypatch.setattr(caltech256, "URL", server.url)
    monkeypatch.setattr(caltech256, "MD5", md5(server.content))
    folder = tmp_path / "new"
    made = load_dataset(name, folder)
    assert len(made.train) == {"cifar10": 100, "caltech256": 54}[name]
    visible = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert visible <= {CIFAR10_FOLDER, CALTECH256_FOLDER, "caltech256.csv"}
    asked = len(server.requests)
    load_dataset(name, folder)
    assert len(server.requests) == asked


@pytest.mark.parametrize("content", [b"no archive", archive])
def test_an_archive_that_does_not_hold_the_data_set_is_told(content, server, tmp_path, monkeypatch):
    server.content = content if isinstance(content, bytes) else content(tmp_path)
    monkeypatch.setattr(CIFAR10, "url", server.url)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(server.content))
    said = refusal(load_dataset, "cifar10", tmp_path / "data")
    assert "cifar10 cannot be downloaded" in said
    assert "make_stand_in" in said
    assert not (tmp_path / "data" / CIFAR10_FOLDER).exists()


def test_data_that_cannot_be_fetched_names_the_address_and_the_stand_in(
    server, tmp_path, monkeypatch
):
    server.status = 404
    monkeypatch.setattr(CIFAR10, "url", server.url)
    said = refusal(load_dataset, "cifar10", tmp_path)
    assert server.url in said
    assert str(tmp_path) in said
    assert "404" in said
    assert "make_stand_in('cifar10'" in said


@pytest.fixture(params=[md5, sha256])
def poem(request, server, monkeypatch):
    """The name of a text that the server has, and that one row describes."""
    server.content = b"a poem of many words\n" * 1000
    row = downloaded_text(server.url, checksum=request.param(server.content))
    monkeypatch.setitem(DATASETS, "poem", row)
    return "poem"


def test_a_text_of_one_file_needs_a_row_alone(poem, server, tmp_path):
    server.cut = 10_000
    data = load_dataset(poem, tmp_path / "new", limit=4)
    assert (data.name, data.is_text, len(data.train)) == ("poem", True, 4)
    assert (tmp_path / "new" / "poem.txt").read_bytes() == server.content
    asked = len(server.requests)
    load_dataset(poem, tmp_path / "new", download=False)
    assert len(server.requests) == asked


@pytest.mark.parametrize("download", [True, False])
def test_a_text_that_cannot_be_fetched_names_the_address_and_its_place(
    download, poem, server, tmp_path
):
    server.status = 404
    said = refusal(load_dataset, poem, tmp_path, download=download)
    place = tmp_path / "poem.txt"
    assert said.startswith("poem cannot be downloaded: ")
    assert said.endswith(f"Instead, save {server.url} as {place}")
    assert ("turned off" in said) != download
    place.write_bytes(server.content)  # by hand
    assert load_dataset(poem, tmp_path).name == "poem"


def test_a_text_that_was_altered_is_refused(poem, server, tmp_path):
    (tmp_path / "poem.txt").write_bytes(server.content + b"more")
    said = refusal(load_dataset, poem, tmp_path)
    assert "poem.txt was damaged or changed; delete" in said
    (tmp_path / "poem.txt").unlink()
    assert load_dataset(poem, tmp_path).name == "poem"
