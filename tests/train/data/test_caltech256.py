"""Caltech-256: where it is found, its list of images, and damaged ones."""

import csv
import functools
import io
import os
import sys

import numpy as np
import pytest
import torch
from data_sets import CALTECH256_FOLDER, all_of, image_paths, refusal
from PIL import Image
from torchvision.transforms import v2

from amp_lab import load_dataset
from amp_lab.core.errors import DataError
from amp_lab.train.data.images import IMAGENET_MEAN_STD, ImagesOnDisk, jitter, read_picture, split

pytest_plugins = ("data_sets",)


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
    train, test = split(targets, every=10)
    assert (len(train), len(test)) == (26802, 2978)
    assert sorted([*train, *test]) == list(range(29780))
    assert np.abs(np.bincount(targets[test]) - sizes / 10).max() <= 1
    again = split(targets, every=10)
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


@functools.cache
def huge_picture() -> bytes:
    """A sound picture of few bytes, which would be 1.2 GB in RGB."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def damage(folder) -> list[str]:
    """Damage five images, each in another way; their paths relative to the folder."""
    paths = image_paths(folder)[7:12]
    paths[0].write_bytes(paths[0].read_bytes()[:2000])
    paths[1].write_text("a page that says 404")
    paths[2].write_bytes(b"")
    paths[3].unlink()
    paths[3].mkdir()  # as good as one that may not be read, which root may
    paths[4].write_bytes(huge_picture())
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
    assert "contains 9 readable images" in refusal(load_dataset, "caltech256", caltech256_copy)
    for path in image_paths(caltech256_copy):
        path.unlink()
    assert "contains no images" in refusal(load_dataset, "caltech256", caltech256_copy)


def transform_of(picture, path, size=32):
    """What an untouched image set makes of this picture."""
    picture.save(path)
    [image], _ = ImagesOnDisk([path], np.array([0]), size, IMAGENET_MEAN_STD).batch([0])
    return pixels_of(image)


def test_a_picture_of_another_format_is_not_opened_whatever_its_name(tmp_path):
    """Pillow would start Ghostscript for an EPS."""
    Image.new("RGB", (4, 4)).save(tmp_path / "picture.eps")
    path = (tmp_path / "picture.eps").rename(tmp_path / "picture.jpg")
    with pytest.raises(DataError, match=r"picture\.jpg cannot be read"):
        read_picture(path)


def two_ramps(path):
    """A picture whose red tells the column and whose green tells the row; blue is full."""
    line = np.arange(256, dtype=np.uint8)
    columns, rows = np.meshgrid(line, line)
    Image.fromarray(np.stack([columns, rows, np.full_like(rows, 255)], axis=-1)).save(path)
    return path


def pixels_of(images):
    """Those that were normalised, from 0 to 255."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET_MEAN_STD)
    return 255 * (images * std + mean)


def test_photographs_are_mirrored_turned_scaled_and_cropped(tmp_path):
    """From which column and row a pixel comes is an affine map, which least squares finds."""
    paths = [two_ramps(tmp_path / "ramps.png")] * 200
    options = np.zeros(200), 224, IMAGENET_MEAN_STD, 0, jitter
    images = pixels_of(ImagesOnDisk(paths, *options).batch(range(200))[0])
    line = torch.arange(224) - 223 / 2
    places = torch.stack([*torch.meshgrid(line, line, indexing="xy"), torch.ones(224, 224)], -1)
    found = []
    for image in images:
        inside = image[2] > 254  # no black in it
        found.append(torch.linalg.lstsq(places[inside], image[:2, inside].T).solution.T)
    maps = torch.stack(found)  # (200, 2, 3): column and row from x, y and 1
    size = torch.linalg.det(maps[:, :, :2]).abs().sqrt()
    angle = torch.atan2(-maps[:, 0, 1], maps[:, 1, 1]).rad2deg()
    moved = maps[:, :, 2] - 255 / 2
    shares = maps[:, 0, 0].sign(), angle / 15, (1 / size - 1) / 0.1, *(moved / 16).T
    for share in shares:
        assert -1.05 < share.min() < -0.9, share
        assert 0.9 < share.max() < 1.05, share
        assert abs(share.float().mean()) < 0.2, share  # 2.8 standard errors of a coin
    turned = maps[:, :, :2] / size[:, None, None]
    assert torch.allclose(turned @ turned.mT, torch.eye(2).expand(200, 2, 2), atol=0.01)


def test_an_image_that_is_not_augmented_is_what_torchvision_makes_of_it(caltech256_folder):
    made = load_dataset("caltech256", caltech256_folder, augment=False).train
    crop = [v2.PILToTensor(), v2.Resize((256, 256), antialias=True), v2.CenterCrop(224)]
    for index in range(0, 54, 9):
        with Image.open(made._source[index]) as picture:
            expected = v2.Compose(crop)(picture.convert("RGB")).float()
        found = pixels_of(made[index][0])
        # Both round to whole levels after each of two passes, some kernels in between as well: a
        # half of one of 255 levels on average, where a picture shifted by a pixel is off by more.
        assert (found - expected).abs().mean() < 0.5
        assert (found[:, 1:] - expected[:, :-1]).abs().mean() > 1
        assert (found - expected).abs().max() < 4


def test_images_are_handed_on_in_a_quarter_of_the_bytes(caltech256_folder):
    made = load_dataset("caltech256", caltech256_folder, image_size=32).train
    images, targets = made.read([3, 4])
    assert images.dtype == torch.uint8
    assert images.shape == (2, 3, 32, 32)
    whole, same = made.batch([3, 4])
    assert whole.dtype == torch.float32
    assert torch.equal(made.finish(images), whole)
    assert torch.equal(targets, same)


def test_what_torchvision_cannot_decode_pillow_does(caltech256_copy, monkeypatch):
    paths = image_paths(caltech256_copy)
    before = [read_picture(path) for path in paths]
    monkeypatch.setattr(sys.modules["amp_lab.train.data.images"], "decode_image", None)
    for path, pixels in zip(paths, before, strict=True):
        assert (read_picture(path).float() - pixels.float()).abs().max() < 4
    monkeypatch.undo()
    paths[0].write_bytes(paths[0].read_bytes()[:2000])
    assert "image file is truncated" in refusal(read_picture, paths[0])


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
    assert torch.allclose(image.mean(dim=(1, 2)), torch.tensor(expected).float(), atol=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("path,target", "file,target"), "line 1: no column 'path'"),
        (lambda text: text.replace("path,target", "path,class"), "line 1: no column 'target'"),
        (lambda text: text.replace("1.jpg,0", "1.jpg,cat", 1), "line 2: target 'cat' should be 0"),
        (lambda text: text.replace("1.jpg,0", "1.jpg,3", 1), "line 2: target '3' should be 0"),
        (lambda text: text.replace("1.jpg,0", "1.jpg,-1", 1), "line 2: target '-1' should be 0"),
        (lambda text: text.replace("1.jpg,0", "1.jpg", 1), "line 2: target None should be 0"),
        (lambda text: text.replace("001_0001", "001_9999", 1), "line 2: there is no image"),
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
    assert "line 2: there is no image '256_ObjectCategories/001.generated-001/001_0001.jpg'" in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_pipe_among_the_images_is_a_damaged_one(caltech256_copy):
    image = next((caltech256_copy / CALTECH256_FOLDER).glob("*/*.jpg"))
    image.unlink()
    os.mkfifo(image)
    said = refusal(load_dataset, "caltech256", caltech256_copy)
    assert "1 of" in said
    assert image.name in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_a_pipe_in_place_of_the_list_is_named(caltech256_copy):
    os.mkfifo(caltech256_copy / "caltech256.csv")
    said = refusal(load_dataset, "caltech256", caltech256_copy)
    assert "caltech256.csv cannot be read" in said
