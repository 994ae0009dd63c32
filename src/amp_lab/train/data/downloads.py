"""Downloads that can be broken off at any moment, and go on from there; and unpacking them."""

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import open_regular


def fetch(name: str, url: str, md5: str, place: Path, may_download: bool) -> None:
    """Download an archive and unpack `place` from it; a `DataError` says what to do instead."""
    folder = place.parent
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{str(folder)!r} is a file; give the folder that holds {name}")
    try:
        if not may_download:
            raise DataError(f"there is no {place}, and downloading is switched off")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{name}.lock"):  # all processes of a distributed run come here
            if not place.exists():
                archive = folder / url.rpartition("/")[2]
                if not archive.exists():
                    download(url, archive, md5=md5)
                unpack(archive, place)
    except (OSError, DataError) as error:
        raise DataError(
            f"no {name}: {first_line(error)}. To do it by hand, unpack {url} in {folder}; to try "
            f"without, make pictures: make_stand_in({name!r}, {str(folder)!r})"
        ) from error


def download(url: str, path: Path, *, md5: str) -> None:
    """Fetch `url` to `path`, which exists only once all of it is there and has this MD5.

    What has come so far is in `path`.part, and a later call goes on from there if the server can.
    Raises `DataError` if that fails in any way: nothing comes, or it is not the right file.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.exists()
        _receive(url, part)
        if resumed and md5_of(part) != md5:  # the two parts are of different versions: start afresh
            part.unlink()
            _receive(url, part)
        found = md5_of(part)
        if found != md5:
            part.unlink()
            raise DataError(f"{url} has the MD5 {found} instead of {md5}: not the right file")
        part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} cannot be fetched to {path}: {first_line(error)}; "
            "try again later: it goes on from where it stopped"
        ) from error


def _receive(url: str, part: Path) -> None:
    """Fetch the rest of `part`, over more connections as long as each brings something."""
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _receive_once(url, part, before)
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            if not part.exists() or part.stat().st_size <= before:
                raise


def _receive_once(url: str, part: Path, before: int) -> None:
    """Append to `part`, which has `before` bytes; a server that cannot resume sends all again."""
    headers = {"User-Agent": "amp-lab"}
    if before:
        headers["Range"] = f"bytes={before}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and before:
            return  # there is no more: the checksum tells whether that is all of it
        raise
    except urllib.error.URLError as error:  # a wrapper, whose text hides what went wrong
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise
    with response:
        is_the_rest = response.status == http.HTTPStatus.PARTIAL_CONTENT
        start = before if is_the_rest else 0
        total = None
        if response.length is not None:
            total = start + response.length
        bar = tqdm.wrapattr(response, "read", total, desc=part.stem, initial=start, disable=None)
        with part.open("ab" if start else "wb") as file, bar as body:
            shutil.copyfileobj(body, file, 2**20)
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection ended after {size} of {total} bytes")


def unpack(archive: Path, place: Path) -> None:
    """Unpack the folder `place` from an archive that holds it, and delete the archive."""
    try:
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
            with tarfile.open(archive) as tar:
                # The first releases of Python 3.11 have no filters, and leave this unread.
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(temporary)
            Path(temporary, place.name).rename(place)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked: {first_line(error)}; delete it") from error
    archive.unlink()


def md5_of(path: Path) -> str:
    """MD5 of a file, in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
