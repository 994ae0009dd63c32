"""Small data sets for tests, and what tests do with them: fixtures, and functions to import.

PYTEST_DONT_REWRITE: test modules import it before it becomes a plugin, which pytest warns of.
"""

import shutil

import pytest
import torch

from amp_lab import load_dataset, make_stand_in
from amp_lab.core.errors import DataError
from amp_lab.train.data import DataSplits, LoadOptions, batches, load

CIFAR10_FOLDER, CALTECH256_FOLDER = "cifar-10-batches-py", "256_ObjectCategories"


@pytest.fixture(scope="session")
def digits():
    return load_dataset("digits")


@pytest.fixture(scope="session")
def cifar10_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar10")
    make_stand_in("cifar10", folder, images_per_class=12)
    return folder


@pytest.fixture(scope="session")
def caltech256_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caltech256")
    make_stand_in("caltech256", folder, classes=4, images_per_class=15)
    return folder


@pytest.fixture
def cifar10_copy(cifar10_folder, tmp_path):
    return shutil.copytree(cifar10_folder, tmp_path / "copy")


@pytest.fixture
def caltech256_copy(caltech256_folder, tmp_path):
    """A folder with the pictures, and without a list of them."""
    folder = shutil.copytree(caltech256_folder, tmp_path / "copy")
    (folder / "caltech256.csv").unlink(missing_ok=True)
    return folder


@pytest.fixture(params=["digits", "cifar10", "caltech256"])
def any_data(request, cifar10_folder, caltech256_folder):
    """Each data set in turn, small."""
    folder = {"cifar10": cifar10_folder, "caltech256": caltech256_folder}.get(request.param, "data")
    size = 24 if request.param == "caltech256" else None
    limit = 100 if request.param == "digits" else None
    return load_dataset(request.param, folder, image_size=size, limit=limit, download=False)


def load_text(path, **options) -> DataSplits:
    """The text of a file or a folder; `options` are those of `LoadOptions`."""
    return load("text", LoadOptions(path, **options))


def all_of(dataset, batch_size=16, **options):
    """Images and targets of one pass, each as one tensor."""
    images, targets = zip(*batches(dataset, batch_size, **options), strict=True)
    return torch.cat(images), torch.cat(targets)


def refusal(call, *arguments, **options) -> str:
    """The one line with which this call is refused."""
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def image_paths(folder):
    return sorted((folder / CALTECH256_FOLDER).glob("00*/*.jpg"))
