"""Generated pictures: the same for a seed, never written over anything, not too easy."""

import pytest
import torch
from data_sets import CALTECH256_FOLDER, all_of, refusal
from PIL import Image

from amp_lab import load_dataset, make_stand_in

pytest_plugins = ("data_sets",)


def test_a_stand_in_is_never_written_over_anything(cifar10_folder, caltech256_folder, tmp_path):
    for name, folder in [("cifar10", cifar10_folder), ("caltech256", caltech256_folder)]:
        assert "exists already" in refusal(make_stand_in, name, folder)
    elsewhere = tmp_path / "caltech256" / CALTECH256_FOLDER
    elsewhere.mkdir(parents=True)
    assert f"{elsewhere} exists already" in refusal(make_stand_in, "caltech256", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("digits",), {}, "no stand-in for 'digits'"),
        (("cifar10",), {"classes": 11}, "classes=11"),
        (("caltech256",), {"classes": 1}, "classes=1"),
        (("caltech256",), {"images_per_class": 0}, "images_per_class=0"),
        (("caltech256",), {"seed": -1}, "seed=-1"),
    ],
)
def test_wrong_values_of_a_stand_in_are_refused(arguments, options, said, tmp_path):
    assert said in refusal(make_stand_in, *arguments, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_stand_in_is_the_same_for_the_same_seed_and_leaves_nothing_else(
    caltech256_folder, tmp_path
):
    made = make_stand_in("caltech256", tmp_path, classes=4, images_per_class=15)
    assert list(tmp_path.iterdir()) == [made]
    paths = sorted(path for path in made.rglob("*.jpg"))
    assert len(paths) == 75
    original = caltech256_folder / CALTECH256_FOLDER
    assert all(p.read_bytes() == (original / p.relative_to(made)).read_bytes() for p in paths)
    sizes, modes = set(), set()
    for path in paths:
        with Image.open(path) as image:
            sizes.add(image.size)
            modes.add(image.mode)
    assert len(sizes) > 50
    assert modes == {"RGB", "L"}


def test_the_pictures_of_a_stand_in_can_be_told_apart_but_not_at_a_glance(tmp_path):
    make_stand_in("cifar10", tmp_path, images_per_class=60)
    made = load_dataset("cifar10", tmp_path, augment=False)
    (train, targets), (test, test_targets) = all_of(made.train), all_of(made.test)
    nearest = torch.cdist(test.flatten(1), train.flatten(1)).argmin(dim=1)
    raw = (targets[nearest] == test_targets).float().mean()
    assert 0.15 < raw < 0.9  # by their pixels: better than one in ten, and far from sure
    middle = slice(12, 20)
    colours = [images[:, :, middle, middle].amax(dim=(2, 3)) for images in (train, test)]
    nearest = torch.cdist(colours[1], colours[0]).argmin(dim=1)
    assert (targets[nearest] == test_targets).float().mean() > 0.3  # by the hue of the middle
