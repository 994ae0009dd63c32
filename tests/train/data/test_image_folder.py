"""A folder of one's own images: its layouts, its split, and what is refused."""

import os
import re
import shutil

import numpy as np
import pytest
import torch
from data_sets import all_of, refusal
from PIL import Image
from torchvision.datasets import ImageFolder

from amp_lab import load_dataset
from amp_lab.train.data.images import read_picture

pytest_plugins = ("data_sets",)


def draw(path, colour=(200, 100, 50)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 8), colour).save(path)
    return path


def draw_classes(folder, **counts):
    """So many pictures in a folder for each class; returns their folder."""
    for name, count in counts.items():
        for number in range(count):
            draw(folder / name / f"{name} {number:02}.png", (number, 0, 0))
    return folder


def names_in(image_set):
    return {os.path.basename(path) for path in image_set._source}


def load(folder, **options):
    return load_dataset("folder", folder, **{"image_size": 16} | options)


def test_class_folders_alone_hold_out_a_share_of_each_class(tmp_path):
    made = load(draw_classes(tmp_path, cat=20, dog=30, rare=2))
    assert made.classes == ("cat", "dog", "rare")
    assert torch.bincount(made.test.targets).tolist() == [2, 3, 1]
    assert torch.bincount(made.train.targets).tolist() == [18, 27, 1]
    assert names_in(made.train).isdisjoint(names_in(made.test))
    assert all_of(made.train)[0].shape == (46, 3, 16, 16)


def test_what_is_held_out_is_always_the_same_and_not_the_first(tmp_path):
    draw_classes(tmp_path / "one", cat=20, dog=30)
    made, other_seed = load(tmp_path / "one"), load(tmp_path / "one", seed=5)
    moved = load(shutil.copytree(tmp_path / "one", tmp_path / "two"))
    assert names_in(made.test) == names_in(other_seed.test) == names_in(moved.test)
    assert made.fingerprint == other_seed.fingerprint == moved.fingerprint
    assert names_in(made.test) != {"cat 00.png", "cat 01.png", *(f"dog 0{i}.png" for i in range(3))}
    (tmp_path / "two" / "cat" / "cat 00.png").unlink()
    assert load(tmp_path / "two").fingerprint != made.fingerprint


@pytest.mark.parametrize("name", ["val", "test"])
def test_a_folder_for_training_and_one_for_testing_are_used_as_they_are(tmp_path, name):
    draw_classes(tmp_path / "train", cat=3, dog=4)
    draw_classes(tmp_path / name, cat=2, dog=1)
    made = load(tmp_path)
    assert made.classes == ("cat", "dog")
    assert (len(made.train), len(made.test)) == (7, 3)
    for image_set, part in ((made.train, "train"), (made.test, name)):
        assert {path.parts[-3] for path in image_set._source} == {part}


def test_val_is_the_test_where_both_are_there(tmp_path):
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        draw_classes(tmp_path / part, cat=count, dog=count)
    assert len(load(tmp_path).test) == 4


def test_folders_called_train_and_test_may_be_classes(tmp_path):
    made = load(draw_classes(tmp_path, train=10, test=10))
    assert made.classes == ("test", "train")


def test_classes_and_images_are_those_of_torchvision(tmp_path):
    draw_classes(tmp_path, b=3, a=2, **{"two words": 2})
    draw(tmp_path / "a" / "deeper" / "still" / "x.JPG")
    for suffix in (".jpeg", ".bmp", ".webp", ".ppm", ".tif"):
        draw(tmp_path / "b" / f"x{suffix}")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "README.md").write_text("no class")
    expected = ImageFolder(tmp_path)
    made = load(tmp_path, augment=False)
    assert list(made.classes) == expected.classes
    found = {
        os.fspath(path): target
        for part in (made.train, made.test)
        for path, target in zip(part._source, part.targets.tolist(), strict=True)
    }
    assert found == dict(expected.samples)
    for part in (made.train, made.test):
        all_of(part)


def test_a_class_that_is_a_link_is_followed_and_a_circle_ends(tmp_path):
    draw_classes(tmp_path / "elsewhere", cat=4)
    draw_classes(tmp_path / "images", dog=4)
    (tmp_path / "images" / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (tmp_path / "images" / "dog" / "circle").symlink_to(tmp_path / "images" / "dog")
    made = load(tmp_path / "images")
    assert len(made.train) + len(made.test) == 8


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    draw_classes(tmp_path, cat=3, dog=3)
    draw(tmp_path / ".ipynb_checkpoints" / "x.png")
    (tmp_path / "cat" / "._cat 00.png").write_bytes(b"of macOS")
    made = load(tmp_path)
    assert made.classes == ("cat", "dog")
    assert len(made.train) + len(made.test) == 6


def test_pixels_are_those_of_the_file(tmp_path):
    draw_classes(tmp_path, cat=2, dog=2)
    draw(tmp_path / "train.png", (255, 0, 0))
    for name in ("cat", "dog"):
        for path in (tmp_path / name).iterdir():
            shutil.copy(tmp_path / "train.png", path)
    red = load(tmp_path, augment=False).train[0][0].mean((1, 2))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    torch.testing.assert_close(red.double(), torch.tensor((np.array([1, 0, 0]) - mean) / std))


def test_default_images_are_224_pixels_wide(tmp_path):
    assert load_dataset("folder", draw_classes(tmp_path, a=2, b=2)).train[0][0].shape[-1] == 224


def test_a_limit_keeps_a_share_of_each_class_and_checks_those_alone(tmp_path):
    draw_classes(tmp_path, cat=40, dog=40)
    made = load(tmp_path, limit=8)
    assert torch.bincount(made.train.targets).tolist() == [4, 4]
    left_out = next(path for path in (tmp_path / "cat").iterdir() if path not in made.train._source
                    and path not in made.test._source)  # fmt: skip
    left_out.write_text("no image")
    assert load(tmp_path, limit=8).fingerprint == made.fingerprint
    looked_at_all = load(tmp_path, limit=8, skip_damaged=True)
    assert looked_at_all.skipped == (os.fspath(left_out.relative_to(tmp_path)),)
    assert "1 of 80 images cannot be read" in refusal(load, tmp_path)


def nothing(folder):
    folder.mkdir()


def images_alone(folder):
    draw(folder / "x.png")


def one_class(folder):
    draw_classes(folder, cat=4)


def only_train(folder):
    draw_classes(folder / "train", cat=4, dog=4)


def empty_class(folder):
    draw_classes(folder, cat=4, dog=4)
    (folder / "bird").mkdir()


def one_image(folder):
    draw_classes(folder, cat=4, dog=1)


def strange_class_in_val(folder):
    draw_classes(folder / "train", cat=4, dog=4)
    draw_classes(folder / "val", cat=4, bird=4)


def empty_val(folder):
    draw_classes(folder / "train", cat=4, dog=4)
    (folder / "val").mkdir()


def unread_format(folder):
    draw_classes(folder, cat=4, dog=4)
    (folder / "cat" / "a.HEIC").write_bytes(b"of a phone")


def a_file(folder):
    folder.write_text("no folder")


BAD = [
    (nothing, "{} contains no folders; put the images of each class into a folder"),
    (images_alone, "{} contains no folders; put the images of each class into a folder"),
    (one_class, "{} contains only one class, cat; give a folder with two or more"),
    (only_train, "{} contains train, but neither val nor test"),
    (empty_class, "{}/bird contains no image that ends in .jpg"),
    (
        one_image,
        "{}/dog: 1 image that can be read; a class needs 2, because one becomes",
    ),
    (strange_class_in_val, "{}/val/bird: there is no class of this name in {}/train"),
    (empty_val, "{}/val contains no folders"),
    (unread_format, "{}/cat/a.HEIC: .heic images are not supported"),
    (a_file, "{} is a file; give a folder that contains a folder for each class"),
    (lambda folder: None, "{}: no such folder"),
]


@pytest.mark.parametrize(("make", "said"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_folder_is_refused_in_a_line(tmp_path, make, said):
    folder = tmp_path / "my images"
    make(folder)
    assert refusal(load, folder).startswith(said.replace("{}", str(folder)))


def test_train_alone_is_split_as_the_message_says(tmp_path):
    only_train(tmp_path)
    said = refusal(load, tmp_path)
    assert f"with --data {tmp_path / 'train'}, a share" in said
    assert len(load(tmp_path / "train").test) == 2


def damage(folder):
    """Damage some images of `folder`, each in another way."""
    paths = sorted((folder / "cat").iterdir())
    Image.effect_noise((64, 64), 50).save(paths[0])
    paths[0].write_bytes(paths[0].read_bytes()[:500])
    paths[1].write_text("a page that says 404")
    paths[2].write_bytes(b"")
    paths[3].unlink()
    os.mkfifo(paths[3])
    paths[4].unlink()
    paths[4].symlink_to("/dev/zero")
    os.truncate(paths[5], 2**34)
    paths[6].unlink()
    paths[6].symlink_to(paths[6])
    return paths[:7]


@pytest.mark.skipif(os.name != "posix", reason="pipes, links and files with holes")
def test_what_is_no_image_is_counted_and_named_or_left_out(tmp_path):
    draw_classes(tmp_path, cat=20, dog=20)
    damaged = damage(tmp_path)
    said = refusal(load, tmp_path)
    assert said.startswith("7 of 40 images cannot be read, ")
    assert f"{damaged[0].relative_to(tmp_path)}, {damaged[1].relative_to(tmp_path)}, " in said
    assert "--skip-damaged" in said
    made = load(tmp_path, skip_damaged=True)
    assert len(made.train) + len(made.test) == 33
    assert made.skipped == tuple(os.fspath(path.relative_to(tmp_path)) for path in damaged)
    all_of(made.train)
    all_of(made.test)


@pytest.mark.skipif(os.name != "posix", reason="pipes and files with holes")
def test_a_pipe_or_a_huge_file_is_not_read_as_an_image(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert "not a regular file" in refusal(read_picture, tmp_path / "pipe.png")
    huge = draw(tmp_path / "huge.png")
    os.truncate(huge, 2**34)
    assert "17,179,869,184 bytes" in refusal(read_picture, huge)


def test_a_class_whose_images_are_all_damaged_is_refused(tmp_path):
    draw_classes(tmp_path, cat=4, dog=4)
    for path in (tmp_path / "cat").iterdir():
        path.write_text("no image")
    said = refusal(load, tmp_path, skip_damaged=True)
    assert re.match(f"{tmp_path}/cat: 0 images .* needs 2", said)
