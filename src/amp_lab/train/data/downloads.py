"""Download files and archives, resuming after an interruption, and unpack the archives."""

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import open_regular

_ALGORITHMS = {32: "MD5", 64: "SHA256"}  # by the number of hexadecimal digits of a checksum


def fetch(name: str, url: str, checksum: str, folder: Path, *, may_download: bool) -> None:
    """Download the archive of the data set `name`, and unpack `folder` from it.

    The archive, at `url` with this `checksum`, has one folder at its top, with the same name as
    `folder`. An existing archive is not downloaded again. Several processes may call this function
    at once: one process downloads, and the others wait. Raises `DataError` if the download fails or
    is not allowed; the message says how to download the archive by hand.
    """
    parent = folder.parent

    def download_and_unpack() -> None:
        file_name = url.rpartition("/")[2]
        archive = parent / file_name
        if not archive.exists():
            download(url, archive, checksum=checksum)
        unpack(archive, folder)

    by_hand = (
        f"unpack {url} in {parent}, or generate pictures: make_stand_in({name!r}, {str(parent)!r})"
    )
    _fetch(name, folder, download_and_unpack, by_hand, may_download=may_download)


def fetch_file(name: str, url: str, checksum: str, path: Path, *, may_download: bool) -> None:
    """Download the data set `name` to `path`: it is the one file at `url` with this `checksum`.

    Several processes may call this function at once: one process downloads, and the others wait.
    Raises `DataError` if the download fails or is not allowed; the message says how to download the
    file by hand.
    """
    by_hand = f"save {url} as {path}"

    def get() -> None:
        download(url, path, checksum=checksum)

    _fetch(name, path, get, by_hand, may_download=may_download)


def _fetch(
    name: str, path: Path, get: Callable[[], None], by_hand: str, *, may_download: bool
) -> None:
    """Call `get` in one process, which makes `path`, the file or the folder of a data set.

    Raises `DataError` if that fails or is not allowed; the message ends with `by_hand`.
    """
    parent = path.parent
    if parent.exists() and not parent.is_dir():
        raise DataError(f"{str(parent)!r} is a file; give the folder that contains {name}")
    try:
        if not may_download:
            raise DataError(f"{path} does not exist, and downloading is turned off")
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{name}.lock"):
            if not path.exists():  # another process may have made it while this one waited
                get()
    except (OSError, DataError) as error:
        problem = f"{name} cannot be downloaded: {first_line(error)}"
        raise DataError(f"{problem}. Instead, {by_hand}") from error


def download(url: str, path: Path, *, checksum: str) -> None:
    """Download `url` to `path`, which exists only once the file is complete with this `checksum`.

    `checksum` is an MD5 or a SHA-256, see `algorithm_of`. Until then the bytes are in
    ``path.part``. A later call resumes from them if the server can. Raises `DataError` if the
    download fails, or if the file has another checksum.
    """
    algorithm = algorithm_of(checksum)
    partial = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_resumed = partial.exists()
        _receive(url, partial)
        # The server's file may have changed between the two calls: then download all of it.
        if is_resumed and digest_of(partial, algorithm) != checksum:
            partial.unlink()
            _receive(url, partial)
        actual = digest_of(partial, algorithm)
        if actual != checksum:
            partial.unlink()
            raise DataError(
                f"{url} is the wrong file: its {algorithm} is {actual} instead of {checksum}"
            )
        partial.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} cannot be fetched to {path}: {first_line(error)}; "
            "try again later to resume the download"
        ) from error


def _receive(url: str, partial: Path) -> None:
    """Download the rest of the file `partial`; reconnect as long as each connection adds bytes."""
    while True:
        size = partial.stat().st_size if partial.exists() else 0
        try:
            return _receive_once(url, partial, size)
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            is_larger = partial.exists() and partial.stat().st_size > size
            if not is_larger:  # give up: this connection added nothing
                raise


def _receive_once(url: str, partial: Path, present_bytes: int) -> None:
    """Append what one connection sends to the file `partial`, which has `present_bytes` so far.

    A server that cannot resume sends the complete file, which then replaces those bytes. Raises
    `ConnectionError` if the connection ends too early.
    """
    headers = {"User-Agent": "amp-lab"}
    if present_bytes:
        headers["Range"] = f"bytes={present_bytes}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and present_bytes:
            return  # the server has no more bytes; `download` compares the checksum
        raise
    except urllib.error.URLError as error:  # it wraps the OSError, whose text says what happened
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise
    with response:
        # Otherwise the server sends the complete file.
        is_resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        start = present_bytes if is_resumed else 0
        total = None  # bytes of the complete file; unknown if the server does not send a length
        if response.length is not None:
            total = start + response.length
        bar = tqdm.wrapattr(response, "read", total, desc=partial.stem, initial=start, disable=None)
        with partial.open("ab" if start else "wb") as file, bar as body:
            shutil.copyfileobj(body, file, length=2**20)
    size = partial.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection ended after {size} of {total} bytes")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive with one folder to `folder`, of the same name; delete the archive.

    Raises `DataError` if the archive is damaged.
    """
    try:
        # Unpacked elsewhere and then renamed, so that `folder` is never there with files missing.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            with tarfile.open(archive) as tar:
                # Refuses paths outside of the folder. Early releases of Python 3.11 lack filters.
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(temporary)
            Path(temporary, folder.name).rename(folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive} cannot be unpacked: {first_line(error)}; delete the file and try again"
        ) from error
    archive.unlink()


def algorithm_of(checksum: str) -> str:
    """The algorithm of a checksum in hexadecimal digits: ``MD5`` (32 digits) or ``SHA256`` (64).

    Raises `ValueError` for another number of digits.
    """
    algorithm = _ALGORITHMS.get(len(checksum))
    if algorithm is None:
        raise ValueError(f"checksum {checksum!r}: give an MD5 (32 digits) or a SHA-256 (64 digits)")
    return algorithm


def digest_of(path: Path, algorithm: str) -> str:
    """The checksum of a file, in hexadecimal digits; `algorithm` as from `algorithm_of`."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return digest.hexdigest()


def md5_of(path: Path) -> str:
    """MD5 of a file, in hexadecimal digits."""
    return digest_of(path, "MD5")
