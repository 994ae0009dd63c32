import csv
import gc
import http.server
import io
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from amp_lab import data, load_dataset, make_stand_in
from amp_lab.data import batches
from amp_lab.data.downloads import download
from amp_lab.errors import DataError

# From Python 3.12 on, a fork of a process with threads, as torch always has, is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

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


# ------------------------------------------------------------------------------- what is in them


def test_digits_are_those_of_scikit_learn_split_four_to_one_in_each_class(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    whole = torch.bincount(torch.cat([digits.train.targets, digits.test.targets]))
    assert (torch.bincount(digits.test.targets) - whole / 5).abs().max() < 1
    assert digits.classes == tuple("0123456789")
    assert not digits.stand_in


def test_digits_look_like_the_originals(digits):
    from sklearn.datasets import load_digits

    small = load_dataset("digits", image_size=8, augment=False)
    mean, std = data._MEAN_STD["digits"]
    images = torch.cat([all_of(small.train)[0], all_of(small.test)[0]])
    pixels = images[:, 0] * std[0] + mean[0]
    originals = torch.from_numpy(load_digits().images).float() / 16
    assert pixels.sum() == pytest.approx(originals.sum().item(), rel=1e-2)  # none lost, none twice
    distances = torch.cdist(pixels[:20].flatten(1), originals.flatten(1))
    assert distances.min(dim=1).values.max() < 8 * 0.5 / 255 + 1e-3  # rounded to 8 bits
    assert digits.test[0][0].shape == (3, 32, 32)


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


# ------------------------------------------------------------------------- augmentation, batches


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


def test_cifar10_is_mirrored_and_shifted_by_whole_pixels(cifar10_folder):
    augmented = load_dataset("cifar10", cifar10_folder).train
    plain = load_dataset("cifar10", cifar10_folder, augment=False).train
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in data._MEAN_STD["cifar10"])
    original = plain[0][0] * std + mean
    padded = torch.nn.functional.pad(original, (4, 4, 4, 4))
    seen = set()
    for epoch in range(60):
        image = augmented[epoch * len(augmented)][0] * std + mean
        fits = [
            (flip, top, left)
            for flip in (False, True)
            for top in range(9)
            for left in range(9)
            if torch.allclose(
                (padded.flip(2) if flip else padded)[:, top : top + 32, left : left + 32],
                image,
                atol=1e-4,
            )
        ]
        assert len(fits) == 1
        seen.update(fits)
    assert {flip for flip, _, _ in seen} == {False, True}
    assert {top for _, top, _ in seen} == {left for _, _, left in seen} == set(range(9))


def test_digits_are_moved_a_little_and_never_mirrored(digits):
    size = torch.eye(2)
    matrices = data._jitter(torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)))
    turn = matrices[:, :, :2]
    assert (torch.linalg.det(turn) > 0.8).all()  # a mirror image has a negative one
    assert ((turn - size).abs() < 0.3).all()
    assert matrices[:, :, 2].abs().max() <= 1 / 8  # of half a side
    assert matrices.std(dim=0).min() > 0.04


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_resumed_goes_on_with_the_same_batches(any_data, workers):
    whole = list(batches(any_data.train, 8, epoch=1, seed=7))
    rest = batches(any_data.train, 8, epoch=1, seed=7, start=3, workers=workers)
    assert len(rest) == len(whole) - 3
    for (images, targets), (same_images, same_targets) in zip(rest, whole[3:], strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(targets, same_targets)


def test_a_pass_does_not_read_the_batches_before_its_start(caltech256_copy):
    made = load_dataset("caltech256", caltech256_copy, image_size=16)
    for index in range(16):
        made.train._paths[index].unlink()
    assert len(list(batches(made.train, 8, start=2))) == len(batches(made.train, 8)) - 2
    assert "cannot be read" in refusal(list, batches(made.train, 8, start=1))


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch(digits):
    def order(**options):
        keys = batches(digits.train, 100, **options)._loader.sampler
        return [key for part in keys for key in part]

    n = len(digits.train)
    assert order() == list(range(n))
    assert order(epoch=2) == list(range(2 * n, 3 * n))
    shuffled = [order(seed=0), order(seed=1), [key - n for key in order(seed=0, epoch=1)]]
    assert all(sorted(keys) == list(range(n)) for keys in shuffled)
    assert shuffled[0] != shuffled[1] != shuffled[2] != shuffled[0]
    assert order(seed=0) == shuffled[0]


def test_the_last_batch_has_the_rest_unless_it_is_dropped(digits):
    sizes = [len(targets) for _, targets in batches(digits.test, 100)]
    assert sizes == [100, 100, 100, 59]
    whole = batches(digits.test, 100, drop_last=True)
    assert len(whole) == len(list(whole)) == 3
    assert len(list(batches(digits.test, 1000, drop_last=True))) == 0
    assert len(list(batches(digits.test, 100, start=4))) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_states_are_neither_used_nor_changed(any_data, workers):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = all_of(any_data.train, seed=0, workers=workers)[0]
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(12345)
    assert torch.equal(all_of(any_data.train, seed=0, workers=workers)[0], first)


@pytest.mark.parametrize("still_starting", [False, True])
def test_workers_leave_signals_to_the_main_process(digits, monkeypatch, still_starting):
    start = data._start_worker
    monkeypatch.setattr(data, "_start_worker", lambda n: time.sleep(n * still_starting) or start(n))
    passing = iter(batches(digits.train, 8, seed=0, workers=2))
    seen = [next(passing)]  # from worker 0; worker 1 waits a second
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
    seen += passing
    assert torch.equal(torch.cat([t for _, t in seen]), all_of(digits.train, seed=0)[1])
    assert not multiprocessing.active_children()


def test_a_pass_that_was_left_ends_its_workers_however_it_was_left(digits):
    for _ in batches(digits.train, 8, workers=2):
        break
    passing = iter(batches(digits.train, 8, workers=2))
    next(passing)
    cycle = [passing]
    cycle.append(cycle)  # as in a traceback, which only the garbage collector takes apart
    del passing, cycle
    gc.collect()
    assert not multiprocessing.active_children()


def test_python_ends_at_once_although_a_pass_was_not_finished():
    code = (
        "import numpy as np; from amp_lab import data\n"
        "images, targets = np.zeros((64, 1, 8, 8), np.uint8), np.zeros(64)\n"
        "dataset = data._ArraySet(images, targets, 8, data._MEAN_STD['digits'])\n"
        "passing = iter(data.batches(dataset, 8, workers=2)); next(passing)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_damaged_since_is_told_in_one_line_by_workers_too(caltech256_copy, workers):
    made = load_dataset("caltech256", caltech256_copy, image_size=16)
    path = made.train._paths[5]
    path.write_text("no picture")
    said = refusal(list, batches(made.train, 8, workers=workers))
    assert said.startswith(f"{path} cannot be read as an image")
    assert refusal(made.train.__getitem__, 5) == said


def test_keys_below_zero_are_refused(digits):
    with pytest.raises(IndexError, match="-1"):
        digits.train[-1]


# ------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("mnist",), {}, "no data set 'mnist'; use digits, cifar10, caltech256"),
        (("",), {}, "no data set ''"),
        (("digits",), {"limit": 0}, "limit=0"),
        (("digits",), {"limit": -5}, "limit=-5"),
        (("digits",), {"image_size": 0}, "image_size=0"),
        (("digits",), {"image_size": -32}, "image_size=-32"),
        (("digits",), {"image_size": 100_000}, "image_size=100000"),
        (("digits",), {"seed": -1}, "seed=-1"),
    ],
)
def test_wrong_values_are_refused(arguments, options, said):
    assert said in refusal(load_dataset, *arguments, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"workers": -1},
        {"start": -1},
        {"epoch": -1},
        {"seed": -1},
    ],
)
def test_wrong_values_of_a_pass_are_refused(digits, options):
    ((name, value),) = options.items()
    assert f"{name}={value}" in refusal(batches, digits.train, **({"batch_size": 8} | options))


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


# --------------------------------------------------------------------------------------- CIFAR-10


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
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in data._MEAN_STD["cifar10"])
    pixels = (plain.train[0][0] * std + mean) * 255
    assert torch.allclose(pixels.flatten(), torch.tensor(batch[b"data"][0]).float(), atol=1e-3)


def test_a_stand_in_does_not_pass_for_the_real_cifar10(cifar10_copy):
    (cifar10_copy / CIFAR10_FOLDER / "STAND_IN.json").unlink()
    assert "data_batch_1 is damaged or altered" in refusal(load_dataset, "cifar10", cifar10_copy)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_an_altered_or_missing_batch_is_named(name, cifar10_copy):
    path = cifar10_copy / CIFAR10_FOLDER / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path} is damaged or altered" in refusal(load_dataset, "cifar10", cifar10_copy)
    path.unlink()
    assert f"{path} is missing" in refusal(load_dataset, "cifar10", cifar10_copy)


@pytest.mark.parametrize("content", ["", "{}", '{"md5": {}}', '{"md5": {"data_batch_1": "0"}}'])
def test_a_damaged_marker_is_named(content, cifar10_copy):
    marker = cifar10_copy / CIFAR10_FOLDER / "STAND_IN.json"
    marker.write_text(content)
    assert f"{marker} is damaged" in refusal(load_dataset, "cifar10", cifar10_copy)


# ------------------------------------------------------------------------------------ Caltech-256


def image_paths(folder):
    return sorted((folder / CALTECH256_FOLDER).glob("00*/*.jpg"))


def test_caltech256_reads_the_layout_of_the_real_one_without_clutter(caltech256_copy):
    place = caltech256_copy / CALTECH256_FOLDER
    assert len(list((place / "257.clutter").iterdir())) == 15
    (place / "001.generated-001" / "RENAME2").write_text("a script that was left behind")
    (place / "002.generated-002" / "greg").mkdir()
    made = load_dataset("caltech256", caltech256_copy)
    assert made.classes == tuple(f"generated-00{i}" for i in range(1, 5))
    assert (len(made.train), len(made.test)) == (54, 6)
    assert made.train[0][0].shape == (3, 224, 224)
    assert made.stand_in
    assert made.skipped == ()
    with (caltech256_copy / "caltech256.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    assert rows[0] == {"path": f"{CALTECH256_FOLDER}/001.generated-001/001_0001.jpg", "target": "0"}
    assert all((caltech256_copy / row["path"]).is_file() for row in rows)


def test_the_split_of_caltech256_is_one_in_ten_of_each_class():
    sizes = 80 + np.random.default_rng(0).multinomial(29780 - 256 * 80, [1 / 256] * 256)
    targets = np.repeat(np.arange(256), sizes)
    train, test = data._split(targets, every=10)
    assert (len(train), len(test)) == (26802, 2978)
    assert sorted([*train, *test]) == list(range(29780))
    assert np.abs(np.bincount(targets[test]) - sizes / 10).max() <= 1
    again = data._split(targets, every=10)
    assert np.array_equal(test, again[1])


@pytest.mark.parametrize("where", [".", "caltech256", "itself", "linked"])
def test_caltech256_is_found_where_people_have_it(where, caltech256_copy, tmp_path):
    folder, place = caltech256_copy, caltech256_copy / CALTECH256_FOLDER
    if where == "caltech256":  # where torchvision puts it
        (folder / where).mkdir()
        place = place.rename(folder / where / CALTECH256_FOLDER)
    elif where == "itself":
        folder = place
    elif where == "linked":
        folder = tmp_path / "linked"
        folder.mkdir()
        (folder / CALTECH256_FOLDER).symlink_to(place)
        place = folder / CALTECH256_FOLDER
    made = load_dataset("caltech256", folder, image_size=16)
    assert len(made.train) == 54
    assert (place.parent / "caltech256.csv").is_file()
    assert all_of(made.test)[0].shape == (6, 3, 16, 16)


def test_the_list_is_made_once_and_used_again_in_whatever_order(caltech256_copy):
    first = load_dataset("caltech256", caltech256_copy)
    table = caltech256_copy / "caltech256.csv"
    lines = table.read_text().splitlines()
    assert lines[0] == "path,target"
    table.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    changed = table.stat().st_mtime_ns
    image_paths(caltech256_copy)[0].write_text("damaged since, which only reading it can tell")
    again = load_dataset("caltech256", caltech256_copy)
    assert again.fingerprint == first.fingerprint
    assert table.stat().st_mtime_ns == changed


def damage(folder) -> list[str]:
    """Damage five images, each in another way; their paths relative to the folder."""
    paths = image_paths(folder)[7:12]
    paths[0].write_bytes(paths[0].read_bytes()[:2000])
    paths[1].write_text("a page that says 404")
    paths[2].write_bytes(b"")
    paths[3].unlink()
    paths[3].mkdir()  # as good as one that may not be read, which root may
    Image.new("1", (20_000, 20_000)).save(paths[4], "PNG")  # few bytes, 1.2 GB as RGB
    return [str(path.relative_to(folder)) for path in paths]


def test_damaged_images_are_counted_and_named(caltech256_copy):
    names = damage(caltech256_copy)
    said = refusal(load_dataset, "caltech256", caltech256_copy)
    assert said.startswith("5 of 60 images cannot be read")
    assert ", ".join(names[:3]) + " and 2 more" in said
    assert "skip_damaged=True" in said
    assert not (caltech256_copy / "caltech256.csv").exists()


def test_damaged_images_are_left_out_only_as_long_as_that_is_asked_for(caltech256_copy):
    names = damage(caltech256_copy)
    for _ in range(2):  # the second time from the list
        made = load_dataset("caltech256", caltech256_copy, image_size=16, skip_damaged=True)
        assert made.skipped == tuple(names)
        assert len(made.train) + len(made.test) == 55
        all_of(made.train)
        all_of(made.test)
    assert "5 of 60 images" in refusal(load_dataset, "caltech256", caltech256_copy)


def test_too_few_images_are_refused(caltech256_copy):
    for path in image_paths(caltech256_copy)[9:]:
        path.unlink()
    assert "has 9 images" in refusal(load_dataset, "caltech256", caltech256_copy)
    for path in image_paths(caltech256_copy):
        path.unlink()
    assert "holds no images" in refusal(load_dataset, "caltech256", caltech256_copy)


def transform_of(picture, path, size=32):
    """What an untouched image set makes of this picture."""
    picture.save(path)
    [image], _ = data._FileSet([path], np.array([0]), size).batch([0])
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in data._MEAN_STD["caltech256"])
    return image * std + mean


@pytest.mark.parametrize(
    ("mode", "colour", "suffix", "expected"),
    [
        ("RGB", (200, 100, 50), "jpg", (200, 100, 50)),
        ("L", 120, "jpg", (120, 120, 120)),
        ("CMYK", (0, 255, 255, 0), "jpg", (255, 0, 0)),
        ("CMYK", (0, 0, 0, 255), "jpg", (0, 0, 0)),
        ("RGBA", (10, 200, 30, 255), "png", (10, 200, 30)),
        ("1", 1, "png", (255, 255, 255)),
        ("P", 0, "png", (0, 0, 0)),
        ("LA", (77, 255), "png", (77, 77, 77)),
        ("I;16", 65535, "png", (255, 255, 255)),
    ],
)
@pytest.mark.parametrize("size", [(40, 30), (1, 1), (500, 2)])
def test_every_kind_of_picture_loads_in_its_colours(mode, colour, suffix, expected, size, tmp_path):
    image = transform_of(Image.new(mode, size, colour), tmp_path / f"picture.{suffix}")
    assert image.shape == (3, 32, 32)
    found = image.mean(dim=(1, 2)) * 255
    assert torch.allclose(found, torch.tensor(expected).float(), atol=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("path,target", "file,target"), "line 1: no column 'path'"),
        (lambda text: text.replace("path,target", "path,class"), "line 1: no column 'target'"),
        (lambda text: text.replace("1.jpg,0", "1.jpg,cat", 1), "line 2: target 'cat' should be 0"),
        (lambda text: text.replace("1.jpg,0", "1.jpg,3", 1), "line 2: target '3' should be 0"),
        (lambda text: text.replace("1.jpg,0", "1.jpg,-1", 1), "line 2: target '-1' should be 0"),
        (lambda text: text.replace("1.jpg,0", "1.jpg", 1), "line 2: target None should be 0"),
        (lambda text: text.replace("001_0001", "001_9999", 1), "line 2: no image"),
        (lambda text: text + text.splitlines()[-1] + "\n", "line 62: 256_"),
        (lambda text: "path,target\n", "lists no images"),
        (lambda text: "", "line 1: no column 'path'"),
        (lambda text: "\n".join(text.splitlines()[:-2]) + "\n", "lacks 256_"),
        (lambda text: text.replace("1.jpg,0", '"1.jpg,0'), ""),
        (lambda text: "\xff\xfe\x00", "line 1"),
    ],
)
def test_a_faulty_list_is_refused_with_the_line_and_the_way_out(change, said, caltech256_copy):
    load_dataset("caltech256", caltech256_copy)
    table = caltech256_copy / "caltech256.csv"
    table.write_text(change(table.read_text()))
    found = refusal(load_dataset, "caltech256", caltech256_copy)
    assert found.startswith(str(table))
    assert said in found
    assert "delete" in found


def test_a_list_that_is_no_text_or_no_file_is_refused(caltech256_copy):
    table = caltech256_copy / "caltech256.csv"
    table.write_bytes(b"path,target\n\xff\xfe")
    assert f"{table} cannot be read" in refusal(load_dataset, "caltech256", caltech256_copy)
    table.unlink()
    table.mkdir()
    assert f"{table} cannot be read" in refusal(load_dataset, "caltech256", caltech256_copy)


def test_an_image_removed_since_is_named_by_its_line(caltech256_copy):
    load_dataset("caltech256", caltech256_copy)
    image_paths(caltech256_copy)[0].unlink()
    said = refusal(load_dataset, "caltech256", caltech256_copy)
    assert "line 2: no image '256_ObjectCategories/001.generated-001/001_0001.jpg'" in said


# -------------------------------------------------------------------------------------- stand-ins


def test_a_stand_in_is_never_written_over_anything(cifar10_folder, caltech256_folder, tmp_path):
    for name, folder in [("cifar10", cifar10_folder), ("caltech256", caltech256_folder)]:
        assert "is there already" in refusal(make_stand_in, name, folder)
    elsewhere = tmp_path / "caltech256" / CALTECH256_FOLDER
    elsewhere.mkdir(parents=True)
    assert f"{elsewhere} is there already" in refusal(make_stand_in, "caltech256", tmp_path)


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


# -------------------------------------------------------------------------------------- downloads


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` under any name; every connection ends after `cut` bytes of it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.cut, self.ranges, self.status = b"", None, True, None
        self.requests = []  # the Range of each
        self.url = f"http://127.0.0.1:{self.server_port}/archive.tar"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers["Range"]
        server.requests.append(asked)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if server.status or (start and start >= len(server.content)):
            self.send_error(server.status or 416)
            return
        self.send_response(206 if start else 200)
        if start:
            end = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        rest = server.content[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        server.content = np.random.default_rng(0).bytes(100_000)
        yield server
        server.shutdown()


def md5(content: bytes) -> str:
    return data.hashlib.md5(content).hexdigest()


def test_a_download_is_whole_or_not_there(server, tmp_path):
    path = tmp_path / "new" / "file"
    download(server.url, path, md5=md5(server.content))
    assert path.read_bytes() == server.content
    assert list(path.parent.iterdir()) == [path]


def test_a_connection_that_breaks_off_is_taken_up_again(server, tmp_path):
    server.cut = 30_000
    download(server.url, tmp_path / "file", md5=md5(server.content))
    assert (tmp_path / "file").read_bytes() == server.content
    assert server.requests == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]


def test_a_download_goes_on_where_an_earlier_call_stopped(server, tmp_path):
    path, part = tmp_path / "file", tmp_path / "file.part"
    part.write_bytes(server.content[:40_000])
    server.cut = 0  # nothing comes any more
    said = refusal(download, server.url, path, md5=md5(server.content))
    assert server.url in said
    assert "ended after 40000 of 100000 bytes" in said
    assert part.stat().st_size == 40_000
    assert not path.exists()
    server.cut = None
    download(server.url, path, md5=md5(server.content))
    assert path.read_bytes() == server.content
    assert server.requests[-1] == "bytes=40000-"


def test_a_server_that_cannot_resume_sends_it_all_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "file.part").write_bytes(b"x" * 40_000)
    download(server.url, tmp_path / "file", md5=md5(server.content))
    assert (tmp_path / "file").read_bytes() == server.content


@pytest.mark.parametrize("size", [40_000, 100_000, 150_000])
def test_the_rest_of_another_version_is_noticed_and_all_is_fetched(size, server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * size)
    download(server.url, tmp_path / "file", md5=md5(server.content))
    assert (tmp_path / "file").read_bytes() == server.content


def test_a_file_that_was_whole_already_is_not_fetched_again(server, tmp_path):
    (tmp_path / "file.part").write_bytes(server.content)
    download(server.url, tmp_path / "file", md5=md5(server.content))
    assert server.requests == ["bytes=100000-"]  # answered with 416, without content


def test_a_wrong_file_is_refused_and_not_kept(server, tmp_path):
    said = refusal(download, server.url, tmp_path / "file", md5=md5(b"other"))
    assert md5(server.content) in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "said"), [(404, "404"), (403, "403"), (500, "500")])
def test_a_server_that_refuses_is_quoted(status, said, server, tmp_path):
    server.status = status
    assert said in refusal(download, server.url, tmp_path / "file", md5=md5(b""))
    assert list(tmp_path.iterdir()) == []


def test_without_a_server_it_says_so(tmp_path):
    said = refusal(download, "http://127.0.0.1:1/file", tmp_path / "file", md5="")
    assert "http://127.0.0.1:1/file" in said
    assert "refused" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told(server, tmp_path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    said = refusal(download, server.url, tmp_path / "file", md5=md5(server.content))
    assert "No space left" in said
    assert not (tmp_path / "file").exists()


def test_a_folder_that_cannot_be_made_is_told(server, tmp_path):
    (tmp_path / "file").touch()
    said = refusal(download, server.url, tmp_path / "file" / "in", md5=md5(server.content))
    assert "Not a directory" in said or "File exists" in said


def archive(folder) -> bytes:
    """The folders in this one, in a tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in folder.iterdir():
            if path.is_dir():
                tar.add(path, path.name)
    return packed.getvalue()


@pytest.mark.parametrize("name", ["cifar10", "caltech256"])
def test_a_missing_data_set_is_fetched_unpacked_and_read(
    name, server, cifar10_folder, caltech256_folder, tmp_path, monkeypatch
):
    server.content = archive({"cifar10": cifar10_folder, "caltech256": caltech256_folder}[name])
    server.cut = 50_000
    monkeypatch.setattr(CIFAR10, "url", server.url)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(server.content))
    monkeypatch.setattr(data, "CALTECH256_URL", server.url)
    monkeypatch.setattr(data, "CALTECH256_MD5", md5(server.content))
    folder = tmp_path / "new"
    made = load_dataset(name, folder)
    assert len(made.train) == {"cifar10": 100, "caltech256": 54}[name]
    visible = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert visible <= {CIFAR10_FOLDER, CALTECH256_FOLDER, "caltech256.csv"}
    asked = len(server.requests)
    load_dataset(name, folder)
    assert len(server.requests) == asked


@pytest.mark.parametrize("content", [b"no archive", archive])
def test_an_archive_that_does_not_hold_the_data_set_is_told(content, server, tmp_path, monkeypatch):
    server.content = content if isinstance(content, bytes) else content(tmp_path)
    monkeypatch.setattr(CIFAR10, "url", server.url)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(server.content))
    said = refusal(load_dataset, "cifar10", tmp_path / "data")
    assert "no cifar10" in said
    assert "make_stand_in" in said
    assert not (tmp_path / "data" / CIFAR10_FOLDER).exists()


def test_data_that_cannot_be_fetched_names_the_address_and_the_stand_in(
    server, tmp_path, monkeypatch
):
    server.status = 404
    monkeypatch.setattr(CIFAR10, "url", server.url)
    said = refusal(load_dataset, "cifar10", tmp_path)
    assert server.url in said
    assert str(tmp_path) in said
    assert "404" in said
    assert "make_stand_in('cifar10'" in said
