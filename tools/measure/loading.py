"""Measure how fast images are read: `python tools/measure/loading.py --out FILE`.

Each reads the same JPEG files in the layout of Caltech-256, 64 at a time in two processes, shuffled
and augmented, until float32 batches (64, 3, 224, 224) lie in the memory of the device:

- amp_lab: `load_dataset("caltech256")` and `batches`, as `amp-lab train` reads them;
- torchvision: the loop of its reference scripts, `ImageFolder` with `RandomResizedCrop`;
- timm: the way of its `train.py`, with uint8 until a whole batch is normalised.

The parts are two sizes of files, those that `make_stand_in` writes and twice that. All are read in
a process of their own, so that this one, which watches the machine, finds busy only what is.
"""

import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from amp_lab.core.allocator import keep_memory
from amp_lab.core.device import pick_device
from amp_lab.core.timing import Rounds
from amp_lab.train.data import batches, load_dataset
from amp_lab.train.data.caltech256 import FOLDER
from amp_lab.train.data.generated import make_stand_in
from amp_lab.train.data.images import IMAGENET_MEAN_STD
from recording import parser, record, times_as_fast

PARTS = {"as generated": 1, "twice the size": 2}
BATCH = 64
SIZE = 224  # of an image: 224 x 224 pixels
WORKERS = 2
WAYS = ("torchvision", "timm", "amp_lab")


def make_files(folder: Path, factor: int, *, classes: int = 64) -> Path:
    """Write files in the layout of Caltech-256 into `folder`, and return it.

    The pictures have `factor` times the usual width and height.
    """
    make_stand_in("caltech256", folder, classes=classes)
    if factor == 1:
        return folder
    for path in folder.rglob("*.jpg"):
        with Image.open(path) as image:
            larger = image.resize((factor * image.width, factor * image.height))
        larger.save(path, quality=85)
    return folder


def torchvision_loader(folder: Path, workers: int) -> Iterable:
    """As `references/classification` of torchvision has it, in its default backend, PIL."""
    transforms = [
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(*IMAGENET_MEAN_STD),
    ]
    files = ImageFolder(folder / FOLDER, v2.Compose(transforms))
    return DataLoader(files, BATCH, shuffle=True, num_workers=workers)


def timm_loader(folder: Path, workers: int, device: torch.device) -> Iterator:
    """As timm's `train.py` has it, without its colour jitter: uint8 until the batch is there."""
    transforms = [
        v2.RandomResizedCrop(SIZE, interpolation=v2.InterpolationMode.BICUBIC),
        v2.RandomHorizontalFlip(),
        v2.Lambda(np.asarray),  # uint8 (SIZE, SIZE, 3)
    ]
    files = ImageFolder(folder / FOLDER, v2.Compose(transforms))
    loader = DataLoader(files, BATCH, shuffle=True, num_workers=workers, collate_fn=_collate)
    # One value for each channel, for pixels from 0 to 255.
    mean, std = (255 * torch.tensor(v, device=device).view(1, 3, 1, 1) for v in IMAGENET_MEAN_STD)
    for images, targets in loader:
        pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2)  # (N, 3, SIZE, SIZE)
        yield pixels.float().sub_(mean).div_(std), targets


def _collate(pairs: list) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of pairs (image, target)."""
    images, targets = zip(*pairs, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(targets)


def ways(folder: Path, device: torch.device, workers: int = WORKERS) -> dict[str, Callable]:
    """Functions that return an iterator over one epoch, by whose way it is."""
    data = load_dataset("caltech256", folder, image_size=SIZE).train
    return {
        "torchvision": lambda: torchvision_loader(folder, workers),
        "timm": lambda: timm_loader(folder, workers, device),
        "amp_lab": lambda: batches(data, BATCH, seed=0, workers=workers, device=device),
    }


def read(epoch: Callable[[], Iterable], images: int, device: torch.device) -> None:
    """Read at least `images` images, to the device."""
    count = 0
    for batch, _ in epoch():
        count += len(batch.to(device, non_blocking=True))
        if count >= images:
            return


def serve(requests: Connection, folder: Path, images: int, device: torch.device) -> None:
    """Receive the names of ways until "" comes; answer each with the seconds to read `images`."""
    # This process was spawned. Its workers are started in the default way of the system.
    multiprocessing.set_start_method(None, force=True)
    keep_memory()  # as `record` does in the process that started this one
    epochs = ways(folder, device)
    name = requests.recv()
    while name:
        start = time.perf_counter()
        read(epochs[name], images, device)
        requests.send(time.perf_counter() - start)
        name = requests.recv()


def measure(factor: int, device: torch.device, budget_s: float) -> dict:
    """Seconds for the same number of images, and how many times as fast as torchvision's loop."""
    images = 8 * BATCH
    rounds = Rounds(device)
    spawn = multiprocessing.get_context("spawn")
    requests, answers = spawn.Pipe()
    with tempfile.TemporaryDirectory() as place:
        folder = make_files(Path(place), factor)
        reader = spawn.Process(target=serve, args=(answers, folder, images, device))
        reader.start()
        answers.close()  # so that this process learns of the reader's end

        def seconds_of(name: str) -> float:
            requests.send(name)
            return requests.recv()

        for name in WAYS:  # a warm-up
            seconds_of(name)
        order = list(WAYS)
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end or not rounds.all:
            with rounds.next() as seconds:  # a dict to fill
                for name in order:
                    seconds[name] = seconds_of(name)
            order.reverse()  # so that no way is always first
        requests.send("")  # ends the reader
        reader.join()
    compared = rounds.comparison(list(WAYS))
    rates = {name: images / compared.median_s(name) for name in WAYS}
    return times_as_fast(compared) | {"images per s": rates}


def main() -> None:
    """Measure both parts on the default device."""
    options = parser(__doc__ or "", PARTS, budget_s=120).parse_args()
    device = pick_device()
    measures = {
        part: functools.partial(measure, factor, device, options.budget)
        for part, factor in PARTS.items()
    }
    record(measures, options, device)


if __name__ == "__main__":
    main()
