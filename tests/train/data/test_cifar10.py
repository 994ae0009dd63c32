"""CIFAR-10: its layout, its augmentation, and what is said of damaged files."""

import itertools
import json
import pickle
import re

import pytest
import torch
from data_sets import CIFAR10_FOLDER, refusal

from amp_lab import load_dataset
from amp_lab.train.data import cifar10
from amp_lab.train.data.downloads import md5_of

pytest_plugins = ("data_sets",)


def test_cifar10_is_mirrored_and_shifted_by_whole_pixels(cifar10_folder):
    augmented = load_dataset("cifar10", cifar10_folder).train
    plain = load_dataset("cifar10", cifar10_folder, augment=False).train
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in cifar10.MEAN_STD)
    original = plain[0][0] * std + mean
    padded = torch.nn.functional.pad(original, (4, 4, 4, 4))
    places = list(itertools.product((False, True), range(9), range(9)))
    possible = torch.stack(
        [
            (padded.flip(2) if flip else padded)[:, top : top + 32, left : left + 32]
            for flip, top, left in places
        ]
    )
    seen = set()
    for epoch in range(60):
        image = augmented[epoch * len(augmented)][0] * std + mean
        fits = torch.isclose(possible, image, atol=1e-4).flatten(1).all(dim=1).nonzero()
        assert len(fits) == 1
        seen.add(places[fits.item()])
    assert {flip for flip, _, _ in seen} == {False, True}
    assert {top for _, top, _ in seen} == {left for _, _, left in seen} == set(range(9))


def test_cifar10_reads_the_layout_of_the_real_one(cifar10_folder):
    made = load_dataset("cifar10", cifar10_folder)
    assert (len(made.train), len(made.test), len(made.classes)) == (100, 20, 10)
    assert made.stand_in
    assert torch.bincount(made.train.targets).tolist() == [10] * 10
    assert torch.bincount(made.test.targets).tolist() == [2] * 10
    plain = load_dataset("cifar10", cifar10_folder, augment=False)
    with (cifar10_folder / CIFAR10_FOLDER / "data_batch_1").open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    assert set(batch) == {b"batch_label", b"labels", b"data", b"filenames"}
    assert batch[b"batch_label"] == b"training batch 1 of 5"
    assert batch[b"data"].shape == (20, 3072)
    assert plain.train.targets[:20].tolist() == batch[b"labels"]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in cifar10.MEAN_STD)
    pixels = (plain.train[0][0] * std + mean) * 255
    assert torch.allclose(pixels.flatten(), torch.tensor(batch[b"data"][0]).float(), atol=1e-3)


def test_a_stand_in_does_not_pass_for_the_real_cifar10(cifar10_copy):
    (cifar10_copy / CIFAR10_FOLDER / "STAND_IN.json").unlink()
    assert "data_batch_1 was damaged or changed" in refusal(load_dataset, "cifar10", cifar10_copy)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_an_altered_or_missing_batch_is_named(name, cifar10_copy):
    path = cifar10_copy / CIFAR10_FOLDER / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path} was damaged or changed" in refusal(load_dataset, "cifar10", cifar10_copy)
    path.unlink()
    assert f"{path} is missing" in refusal(load_dataset, "cifar10", cifar10_copy)


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('code from the file has run')",)


def test_no_code_in_a_batch_is_run_although_its_checksum_fits(cifar10_copy):
    folder = cifar10_copy / CIFAR10_FOLDER
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": Harm(), "labels": []}))
    marker = json.loads((folder / "STAND_IN.json").read_text())
    marker["md5"]["data_batch_2"] = md5_of(folder / "data_batch_2")
    (folder / "STAND_IN.json").write_text(json.dumps(marker))
    said = refusal(load_dataset, "cifar10", cifar10_copy)
    assert re.search(r"data_batch_2 .*would load .*builtins\.exec", said)


@pytest.mark.parametrize("content", ["", "{}", '{"md5": {}}', '{"md5": {"data_batch_1": "0"}}'])
def test_a_damaged_marker_is_named(content, cifar10_copy):
    marker = cifar10_copy / CIFAR10_FOLDER / "STAND_IN.json"
    marker.write_text(content)
    assert f"{marker} is damaged" in refusal(load_dataset, "cifar10", cifar10_copy)


def reseal(folder, name, content):
    """Put other things into a file of a stand-in, and their checksum into its list."""
    (folder / name).write_bytes(pickle.dumps(content))
    marker = json.loads((folder / "STAND_IN.json").read_text())
    marker["md5"][name] = md5_of(folder / name)
    (folder / "STAND_IN.json").write_text(json.dumps(marker))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"labels": [99] * 20}, "a label is 99"),
        ({"labels": [-1] * 20}, "a label is -1"),
        ({"labels": ["cat"] * 20}, "a label is 'cat'"),
        ({"labels": [1] * 19}, "images have 99 labels"),
        ({"data": torch.zeros(19, 3072, dtype=torch.uint8).numpy()}, "99 images have 100 labels"),
        ({"data": torch.zeros(20, 3072).numpy()}, "pixels have the dtype float"),
        (
            {"data": torch.zeros(20, 7, dtype=torch.uint8).numpy()},
            "without valid images and classes",
        ),
        ({"data": 3}, "without valid images and classes"),
        ({"labels": 3}, "without valid images and classes"),
    ],
)
def test_labels_and_images_that_do_not_fit_are_named(cifar10_copy, changed, says):
    folder = cifar10_copy / CIFAR10_FOLDER
    batch = pickle.loads((folder / "data_batch_2").read_bytes(), encoding="latin1")
    reseal(folder, "data_batch_2", batch | changed)
    assert says in refusal(load_dataset, "cifar10", cifar10_copy)


@pytest.mark.parametrize("names", [[], ["cat"] * 3, [1] * 10, 5, "abcdefghij"])
def test_names_of_classes_that_do_not_fit_are_named(cifar10_copy, names):
    reseal(cifar10_copy / CIFAR10_FOLDER, "batches.meta", {"label_names": names})
    assert cifar10.FOLDER in refusal(load_dataset, "cifar10", cifar10_copy)
