"""The registry of data sets, which loads neither torch nor data: the command's help reads it.

To add a data set, write a file in `train/data/` with a function `load`, which takes `LoadOptions`
and returns `DataSplits`, and add a row to `DATASETS`.
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
