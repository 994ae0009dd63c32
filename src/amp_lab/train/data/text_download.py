"""A text that is one file to download: what the registry says about it is all that it needs."""

from amp_lab.core.errors import DataError
from amp_lab.train.data.downloads import algorithm_of, digest_of, fetch_file
from amp_lab.train.data.samples import DataSplits, LoadOptions
from amp_lab.train.data.text import load_text
from amp_lab.train.data.text_files import read_texts


def load_downloaded_text(name: str, url: str, checksum: str, options: LoadOptions) -> DataSplits:
    """Load the text at `url` with this `checksum`, which is the file NAME.txt in `options.folder`.

    If the file is missing, it is downloaded. See `load_text`. Raises `DataError` if the download
    fails, or if the file is damaged or altered.
    """
    path = options.folder / f"{name}.txt"
    if not path.exists():
        fetch_file(name, url, checksum, path, may_download=options.download)
    if digest_of(path, algorithm_of(checksum)) != checksum:
        raise DataError(f"{path} was damaged or changed; delete the file to download it again")
    return load_text(name, read_texts(path), options)
