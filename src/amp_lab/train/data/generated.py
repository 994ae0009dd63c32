"""Generated pictures in the on-disk layout of real data sets, to run the code without real data."""

import itertools
import json
import pickle
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10

from amp_lab.core.errors import DataError, first_line
from amp_lab.train.data import caltech256, cifar10
from amp_lab.train.data.downloads import md5_of
from amp_lab.train.data.images import MARKER

_ROW_BYTES = 3 * 32 * 32  # a picture is a row in a batch of CIFAR-10: channel, height, width


def make_stand_in(
    name: str,
    folder: str | Path,
    *,
    images_per_class: int | None = None,
    classes: int | None = None,
    seed: int = 0,
) -> Path:
    """Generate pictures in the layout of a data set that cannot be downloaded.

    `load_dataset` with the same folder reads these pictures, and sets `stand_in`. Each class is a
    shape with stripes of one colour and direction.

    Args:
        name: "cifar10" or "caltech256".
        folder: The folder to put the data set into.
        images_per_class: The number of training and test images together, at least 6. The default
            is 600 for cifar10 and 10 for caltech256.
        classes: The number of classes, at least 2. The default is the number in the real data set:
            10 or 256.
        seed: The seed of the pictures; 0 or more.

    Returns:
        The folder of the new data set, inside `folder`.

    Raises:
        DataError: If a value is wrong, if the data set already exists in `folder`, or if it cannot
            be written.

    Example:
        make_stand_in("cifar10", "data", images_per_class=6, classes=2)
        print(load_dataset("cifar10", "data").summary)
    """
    if name not in _LAYOUTS:
        names = " or ".join(_LAYOUTS)
        raise DataError(f"there is no stand-in for {name!r}; use {names}")
    layout = _LAYOUTS[name]
    if classes is None:
        classes = layout.max_classes
    count = images_per_class
    if count is None:
        count = layout.images_per_class
    if not 2 <= classes <= layout.max_classes:
        raise DataError(f"classes={classes} must be between 2 and {layout.max_classes}")
    if count < 6:  # CIFAR-10 needs one for each of its five batches, and one for the test
        raise DataError(f"images_per_class={count} must be at least 6")
    if seed < 0:
        raise DataError(f"seed={seed} must not be negative")
    dataset = layout.dataset
    root = dataset.find_folder(Path(folder)) or Path(folder, dataset.FOLDER)
    if root.exists():
        raise DataError(f"{root} exists already; delete it first, or use another folder")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name, so that an unfinished folder is not taken for a complete one.
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{root.name}.") as temporary:
            draft = Path(temporary, root.name)
            draft.mkdir()
            checksums = layout.write(draft, classes, count, seed)
            _write_marker(draft / MARKER, checksums)
            draft.rename(root)
    except OSError as error:
        raise DataError(f"{root} cannot be written: {first_line(error)}") from error
    return root


def _write_marker(marker: Path, checksums: dict[str, str]) -> None:
    """Write the file that marks a data set as generated; `checksums` has the MD5 of each file."""
    description = "generated pictures in the layout of a real data set"
    content = {"what": description, "md5": checksums}
    text = json.dumps(content, indent=1)
    marker.write_text(text + "\n")


def _write_cifar10(root: Path, classes: int, count: int, seed: int) -> dict[str, str]:
    """Write the six batches and the names of the classes into `root`, as in the real CIFAR-10.

    A class has `count` pictures. Returns the MD5 of each file, by file name.
    """
    test_count = count // 6  # as in the real one: 1,000 of 6,000
    targets = range(classes)
    test = list(itertools.product(targets, range(test_count)))  # (target, number) of each picture
    train = list(itertools.product(targets, range(test_count, count)))
    rng = np.random.default_rng(seed)
    rng.shuffle(train)
    _write_batch(root / "test_batch", "testing batch 1 of 1", test, seed)
    for i in range(5):
        number = i + 1
        path = root / f"data_batch_{number}"
        label = f"training batch {number} of 5"
        _write_batch(path, label, train[i::5], seed)  # every fifth picture
    meta = {
        "num_cases_per_batch": len(train) // 5,
        "label_names": [f"generated-{target}" for target in targets],
        "num_vis": _ROW_BYTES,
    }
    meta_path = root / CIFAR10.meta["filename"]
    _write_python2_pickle(meta_path, meta)
    return {name: md5_of(root / name) for name in cifar10.CHECKSUMS}


def _write_batch(path: Path, label: str, pictures: list[tuple[int, int]], seed: int) -> None:
    """Write a batch file of CIFAR-10, called `label` in it.

    `pictures` are (target, number among those of its class).
    """
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    filenames: list[str] = []
    for target, number in pictures:
        pixels.append(_draw(seed, target, number, side=32))
        labels.append(int(target))
        filenames.append(f"generated_{target}_{number}.png")
    images = np.stack(pixels)
    channels_first = images.transpose(0, 3, 1, 2)
    rows = channels_first.reshape(len(pictures), _ROW_BYTES)
    batch = {
        "batch_label": label,
        "labels": labels,
        "data": rows,
        "filenames": filenames,
    }
    _write_python2_pickle(path, batch)


_Pickler: Any = pickle._Pickler  # the Python version of the C class, with a table of types


class _Python2Pickler(_Pickler):
    """Writes str and bytes as the byte strings of Python 2, as in the real batches.

    The reader's `encoding` decides whether they load as str or bytes.
    """

    dispatch = dict(_Pickler.dispatch)  # noqa: RUF012 - it is the name that Pickler reads

    def _save_text(self, text: str | bytes) -> None:
        """Write `text` as a byte string of Python 2; a str in UTF-8."""
        if isinstance(text, str):
            content = text.encode()
        else:
            content = text
        length = struct.pack("<i", len(content))
        self.write(pickle.BINSTRING + length + content)
        self.memoize(text)

    dispatch[str] = _save_text
    dispatch[bytes] = _save_text


def _write_python2_pickle(path: Path, content: dict) -> None:
    """Pickle `content`, a batch or the names of the classes, as Python 2 would."""
    with path.open("wb") as file:
        _Python2Pickler(file, protocol=2).dump(content)


def _write_caltech256(root: Path, classes: int, count: int, seed: int) -> dict[str, str]:
    """Write `count` JPEG files of various sizes into a folder for each class and into 257.clutter.

    Returns an empty dict in place of checksums: the real data set has none for its files either.
    """
    folders: dict[int, str] = {}
    for number in range(1, classes + 1):
        folders[number] = f"{number:03}.generated-{number:03}"
    folders[257] = "257.clutter"
    for name in folders.values():
        (root / name).mkdir()

    def write(picture: tuple[int, int]) -> None:
        number, index = picture
        image = _photograph(seed, number, index)
        file_name = f"{number:03}_{index:04}.jpg"
        path = root / folders[number] / file_name
        image.save(path, quality=85)

    indices = range(1, count + 1)
    pictures = list(itertools.product(folders, indices))
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, pictures))  # `list` waits, and raises what a thread has raised
    return {}


def _photograph(seed: int, number: int, index: int) -> Image.Image:
    """A picture of class folder `number`, which counts from 1, and `index` in it, of random size.

    Some are grey, as among the real ones.
    """
    pixels = _draw(seed, number - 1, index, side=48)
    rng = np.random.default_rng([seed, number, index, 1])  # not the numbers that `_draw` uses
    width, height = map(int, rng.integers(120, 320, size=2))
    size = (width, height)
    image = Image.fromarray(pixels)
    image = image.resize(size, Image.Resampling.BICUBIC)
    if rng.random() < 1 / 16:
        image = image.convert("L")
    return image


def _draw(seed: int, target: int, number: int, side: int) -> np.ndarray:
    """Draw a picture of class `target`, uint8 (side, side, 3): a striped shape on a noisy ground.

    The class decides on shape, stripes and hue. Position, size, phase and background are random,
    and depend on `seed`, `target` and `number` alone.
    """
    # Keep the order of the random draws: another one would change the pictures of every seed.
    rng = np.random.default_rng([seed, target, number])
    radius = rng.uniform(0.4, 0.8)  # of the shape; the picture reaches from -1 to 1
    line = np.linspace(-1, 1, side)
    centre_x = rng.uniform(-0.3, 0.3)
    x = ((line - centre_x) / radius)[None, :]  # (1, side), relative to centre and radius
    centre_y = rng.uniform(-0.3, 0.3)
    y = ((line - centre_y) / radius)[:, None]  # (side, 1)
    shape = _shape(target % 4, x, y)
    # An irrational step, here 1 / 1.3247 (the plastic number), spreads the angles of any number of
    # classes evenly, and so does the golden ratio for the hues.
    angle = np.pi * (target * 0.7549) + rng.normal(0, 0.1)
    across = x * np.cos(angle) + y * np.sin(angle)  # position across the stripes
    frequency = 5 + 3 * (target % 3)  # wide, medium or narrow stripes
    phase = rng.uniform(0, 2 * np.pi)
    wave = np.sin(frequency * across + phase)
    stripes = 0.7 + 0.3 * wave  # brightness, from 0.4 to 1
    hue = target * 0.618 + rng.normal(0, 0.05)
    inside = stripes[..., None] * _colour(hue)  # (side, side, 3)
    colour = rng.uniform(0, 1, 3)
    slope = rng.uniform(-0.3, 0.3)
    background = colour + slope * x[..., None]  # (1, side, 3): lighter to one side
    image = np.where(shape[..., None], inside, background)
    noise = rng.normal(0, 0.1, image.shape)
    image = image + noise
    levels = 255 * image.clip(0, 1)
    return levels.astype(np.uint8)


def _colour(hue: float) -> np.ndarray:
    """Red, green and blue (3,) in [0, 1] of a hue; hues that differ by 1 are the same."""
    thirds = np.array([0, 1 / 3, 2 / 3])
    phase = 2 * np.pi * (hue + thirds)
    return 0.5 + 0.5 * np.cos(phase)


def _shape(kind: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The mask, bool (side, side), of a shape.

    `kind` is 0 for a disc, 1 for a square, 2 for a diamond, 3 for a ring. `x` (1, side) and `y`
    (side, 1) are coordinates; 0 is the centre, and 1 the edge of a shape, but for the ring, which
    reaches from a radius of 0.35 to 1.05.
    """
    radius = np.hypot(x, y)
    if kind == 0:
        distance = radius
    elif kind == 1:
        distance = np.maximum(abs(x), abs(y))
    elif kind == 2:
        distance = abs(x) + abs(y)
    else:
        from_middle_of_ring = abs(radius - 0.7)
        distance = 2 * from_middle_of_ring + 0.3  # below 1 within 0.35 of the middle
    return distance < 1


class _Layout(NamedTuple):
    """A data set whose layout can be written."""

    max_classes: int
    images_per_class: int  # by default
    dataset: Any  # the module that loads it
    write: Callable[[Path, int, int, int], dict[str, str]]
    """Takes the folder to write into, classes, images per class and seed; returns the MD5 of each
    file by name."""


_LAYOUTS = {
    "cifar10": _Layout(10, 600, cifar10, _write_cifar10),
    "caltech256": _Layout(256, 10, caltech256, _write_caltech256),
}
