"""Your own text: a file, or the .txt and .md files of a folder."""

from collections.abc import Iterator
from pathlib import Path

from amp_lab.core.errors import DataError
from amp_lab.core.files import read_regular
from amp_lab.train.data.samples import DataSplits, LoadOptions
from amp_lab.train.data.text import load_text

_MAX_TEXT_BYTES = 2**30


def load(options: LoadOptions) -> DataSplits:
    """Load the text of a file, or of all files in a folder. See `load_text`."""
    return load_text("text", read_texts(options.folder), options)


def read_texts(path: Path) -> Iterator[str]:
    """The text of a file, or of each .txt and .md file in a folder.

    Raises `DataError` for a text that is missing, not UTF-8, larger than 1 GiB, or has bytes of
    zero, and `OSError` if a file cannot be read.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        files = [path]
    else:
        files = [*sorted(path.rglob("*.txt")), *sorted(path.rglob("*.md"))]
    if not files:
        raise DataError(f"{path} contains no file that ends in .txt or .md")
    size = sum(file.stat().st_size for file in files)
    if size > _MAX_TEXT_BYTES:
        gib = size / 2**30
        raise DataError(f"{path} contains {gib:.1f} GiB of text; the limit is 1 GiB")
    for file in files:
        # It refuses pipes and devices, which may never end.
        content = read_regular(file, _MAX_TEXT_BYTES)
        if b"\0" in content:
            raise DataError(f"{file} is not a text file: it contains null bytes")
        try:
            yield content.decode("utf-8-sig")  # without a byte order mark
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 (at byte {error.start:,}): convert the file"
            ) from None
