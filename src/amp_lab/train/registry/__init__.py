"""The registry of data sets, which loads neither torch nor data: the command's help reads it.

A text that is one file to download needs only a row in `DATASETS`, with `downloaded_text`. For any
other data set, also write a file in `train/data/` with a function `load`, which takes `LoadOptions`
and returns `DataSplits`.
"""

from dataclasses import dataclass
from enum import Enum

CONTEXT = 256  # tokens in a passage of text, by default
PHOTOGRAPH_SIZE = 224  # pixels


class Source(Enum):
    """The source of the files of a data set."""

    LIBRARY = "a library"  # it needs no folder
    DOWNLOAD = "a download"
    USER = "the user"  # it has no default folder


@dataclass(frozen=True)
class DatasetRow:
    """The facts about a data set that are known before loading."""

    module: str  # the file in `train/data/`
    source: Source
    is_text: bool = False
    image_size: int = 32  # of images, in pixels, by default
    has_image_files: bool = False  # one for each image, which may be damaged
    notice: str = ""  # a line that every run reports, such as a licence
    url: str = ""  # of a text that is one file to download
    checksum: str = ""  # of this file: its MD5 or its SHA-256


def downloaded_text(url: str, *, checksum: str, notice: str = "") -> DatasetRow:
    """The row of a text that is one file: UTF-8, at `url`.

    `checksum` is its MD5 or its SHA-256, in hexadecimal digits.
    """
    return DatasetRow(
        "text_download", Source.DOWNLOAD, is_text=True, notice=notice, url=url, checksum=checksum
    )


DATASETS = {
    "digits": DatasetRow("digits", Source.LIBRARY),
    "cifar10": DatasetRow("cifar10", Source.DOWNLOAD),
    "caltech256": DatasetRow(
        "caltech256", Source.DOWNLOAD, image_size=PHOTOGRAPH_SIZE, has_image_files=True
    ),
    "folder": DatasetRow(
        "image_folder", Source.USER, image_size=PHOTOGRAPH_SIZE, has_image_files=True
    ),
    "stdlib": DatasetRow(
        "stdlib",
        Source.LIBRARY,
        is_text=True,
        notice="The text is Python's standard library, under the PSF licence.",
    ),
    "text": DatasetRow("text_files", Source.USER, is_text=True),
}
