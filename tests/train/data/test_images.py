"""Images of any data set: size, dtype, split, and random changes that depend on three numbers."""

import pytest
import torch
from data_sets import all_of

from amp_lab import load_dataset

pytest_plugins = ("data_sets",)
# From Python 3.12 on, a fork of a process with threads, as torch always has, is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_images_are_normalised_float32_of_the_size_asked_for(any_data):
    for dataset in (any_data.train, any_data.test):
        image, target = dataset[0]
        assert image.shape == (3, any_data.image_size, any_data.image_size)
        assert image.dtype == torch.float32
        assert isinstance(target, int)
        images, targets = all_of(dataset)
        assert len(images) == len(dataset)
        assert images.abs().max() < 4  # (0 or 1 - mean) / std
        assert images.std() > 0.5
        assert torch.equal(targets, dataset.targets)
        assert targets.dtype == torch.int64
        assert targets.min() >= 0
        assert targets.max() < len(any_data.classes)


@pytest.mark.parametrize("size", [1, 8, 33, 64])
def test_any_image_size(size, cifar10_folder, caltech256_folder):
    for name, folder in [
        ("digits", "data"),
        ("cifar10", cifar10_folder),
        ("caltech256", caltech256_folder),
    ]:
        made = load_dataset(name, folder, image_size=size, limit=10)
        assert made.train[0][0].shape == made.test[0][0].shape == (3, size, size)
        assert made.image_size == size


def test_an_image_set_ends_when_iterated_over(any_data):
    assert len(list(any_data.test)) == len(any_data.test)


@pytest.mark.parametrize("limit", [7, 100, 1437])
def test_a_limit_keeps_the_share_of_each_class(limit, digits):
    small = load_dataset("digits", limit=limit)
    assert len(small.train) == limit
    assert len(small.test) == -(-359 * limit // 1438)
    share = torch.bincount(digits.train.targets) * limit / 1438
    counts = torch.bincount(small.train.targets, minlength=10)
    assert (counts - share).abs().max() <= 1


def test_a_limit_that_is_more_than_there_is_changes_nothing(digits):
    assert load_dataset("digits", limit=5000).fingerprint == digits.fingerprint


def test_an_image_depends_on_seed_epoch_and_index_alone(any_data):
    length = len(any_data.train)
    one_by_one = torch.stack([any_data.train[3 * length + i][0] for i in reversed(range(length))])
    expected = one_by_one.flip(0)
    for batch_size, workers in [(7, 0), (1000, 0), (16, 2)]:
        images, _ = all_of(any_data.train, batch_size, epoch=3, workers=workers)
        assert torch.equal(images, expected)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads if threads < 3 else 1)
    try:
        assert torch.equal(all_of(any_data.train, epoch=3)[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_another_epoch_or_seed_augments_otherwise_and_the_test_images_never_change(
    any_data, caltech256_folder, cifar10_folder
):
    folder = {"cifar10": cifar10_folder, "caltech256": caltech256_folder}.get(any_data.name, "data")
    other = load_dataset(
        any_data.name, folder, image_size=any_data.image_size, seed=1, limit=len(any_data.train)
    )
    image = any_data.train[0][0]
    assert not torch.equal(any_data.train[len(any_data.train)][0], image)
    assert not torch.equal(other.train[0][0], image)
    assert torch.equal(any_data.test[len(any_data.test)][0], any_data.test[0][0])
    assert torch.equal(other.test[0][0], any_data.test[0][0])


@pytest.mark.parametrize("name", ["digits", "cifar10", "caltech256"])
def test_without_augmentation_every_epoch_is_the_same(name, cifar10_folder, caltech256_folder):
    folder = {"cifar10": cifar10_folder, "caltech256": caltech256_folder}.get(name, "data")
    plain = load_dataset(name, folder, image_size=16, augment=False, limit=20).train
    assert torch.equal(plain[len(plain)][0], plain[0][0])


def test_keys_below_zero_are_refused(digits):
    with pytest.raises(IndexError, match="-1"):
        digits.train[-1]
