"""The door of the data room: any data set by its name, and what is said of a wrong call."""

import re
import shutil
from pathlib import Path

import pytest
from data_sets import CALTECH256_FOLDER, CIFAR10_FOLDER, refusal

from amp_lab import load_dataset, make_stand_in
from amp_lab.train.data import DATASETS

pytest_plugins = ("data_sets",)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["data/README.md", "docs/train.md"])
def test_the_pages_list_all_data_sets_and_no_others(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert table == list(DATASETS)


def test_fingerprints_tell_data_apart_and_nothing_else(cifar10_folder, caltech256_folder, tmp_path):
    found = {
        name: load_dataset(name, folder).fingerprint
        for name, folder in [
            ("digits", "data"),
            ("cifar10", cifar10_folder),
            ("caltech256", caltech256_folder),
        ]
    }
    assert (
        load_dataset("digits", seed=5, augment=False, image_size=16).fingerprint in found.values()
    )
    moved = shutil.copytree(caltech256_folder, tmp_path / "elsewhere")
    assert load_dataset("caltech256", moved).fingerprint == found["caltech256"]
    make_stand_in("cifar10", tmp_path, images_per_class=12, seed=1)
    others = [
        load_dataset("digits", limit=100).fingerprint,
        load_dataset("cifar10", tmp_path).fingerprint,
        load_dataset("caltech256", caltech256_folder, limit=20).fingerprint,
    ]
    assert len({*found.values(), *others}) == 6


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("mnist",), {}, "'mnist': .*digits, cifar10, caltech256"),
        (("",), {}, "unknown data set ''"),
        (("digits",), {"limit": 0}, "limit=0"),
        (("digits",), {"limit": -5}, "limit=-5"),
        (("digits",), {"image_size": 0}, "image_size=0"),
        (("digits",), {"image_size": -32}, "image_size=-32"),
        (("digits",), {"image_size": 100_000}, "image_size=100000"),
        (("digits",), {"seed": -1}, "seed=-1"),
        (("digits",), {"skip_damaged": True}, "not for digits"),
        (("cifar10",), {"skip_damaged": True}, "skip damaged .*caltech256 .*not for cifar10"),
        (("stdlib",), {"skip_damaged": True}, "not for stdlib"),
    ],
)
def test_wrong_values_are_refused(arguments, options, said):
    assert re.search(said, refusal(load_dataset, *arguments, **options))


@pytest.mark.parametrize("name", ["cifar10", "caltech256"])
def test_a_missing_or_empty_folder_is_named_with_the_way_out(name, tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        said = refusal(load_dataset, name, folder, download=False)
        assert str(folder) in said
        assert "https://" in said
        assert f"make_stand_in({name!r}, {str(folder)!r})" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cifar10", "caltech256"])
def test_a_file_in_place_of_the_folder_is_refused(name, tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in refusal(load_dataset, name, tmp_path / "file")
    assert "cannot be written" in refusal(make_stand_in, name, tmp_path / "file")


@pytest.mark.parametrize("name", ["cifar10", "caltech256"])
def test_an_empty_folder_of_the_right_name_is_refused(name, tmp_path):
    place = tmp_path / {"cifar10": CIFAR10_FOLDER, "caltech256": CALTECH256_FOLDER}[name]
    place.mkdir()
    said = refusal(load_dataset, name, tmp_path)
    assert str(place) in said
    assert "delete" in said
