"""Shared by all data sets: their samples, and the split into training and test."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from amp_lab.train.data.tokens import Characters, Tokens
from amp_lab.train.registry import CONTEXT

# Purposes of random numbers. Each is part of the seed, so that no two purposes draw the same.
SHUFFLE = 1
AUGMENT = 2
OFFSET = 3  # of the passages of a text


class SampleSet(Dataset):
    """Samples of one shape with their targets, by epoch and index.

    A sample is a normalised image, float32 (3, S, S), or a passage of a text, int64 (T,). The
    target of an image is an int. The target of a passage contains the token after each of its
    tokens, (T,).

    `samples[epoch * len(samples) + index]` is a sample and its target. The augmentation depends
    only on the seed, the epoch and the index. Therefore every process reads bitwise the same
    sample, in any order. The global random state is neither used nor changed.
    """

    reads_files = False
    """Whether a sample is read from its file on demand. Only then do workers help."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        inputs, targets = self.batch([index])  # a key, which may also name the epoch
        target = targets[0]
        if target.dim() == 0:
            return inputs[0], int(target)
        return inputs[0], target

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Any]]:
        # Python would otherwise call `__getitem__` without end: any key names some epoch.
        return (self[index] for index in range(len(self)))

    def batch(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples (B, …) and the targets (B,) or (B, T) of these keys.

        Raises `DataError` if a file cannot be read, and `IndexError` for a negative key.
        """
        inputs, targets = self.read(keys)
        return self.finish(inputs), targets

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples and targets of these keys, before `finish`.

        Images may be uint8, because they need a quarter of the memory when a worker sends them.
        """
        raise NotImplementedError

    def finish(self, inputs: torch.Tensor) -> torch.Tensor:
        """Turn the samples of `read` into the samples of `batch`, on their device.

        The result is bitwise the same on every device.
        """
        return inputs

    def _epochs_and_indices(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """The (epoch, index) of each key. Raises `IndexError` for a negative key."""
        smallest = min(keys)
        if smallest < 0:
            raise IndexError(f"key {smallest} is negative")
        count = len(self)
        return [divmod(key, count) for key in keys]


@dataclass(frozen=True)
class DataSplits:
    """A data set of images or of a text, split into training and test samples."""

    name: str
    train: SampleSet
    test: SampleSet
    classes: tuple[str, ...]  # names of the classes, or the tokens of a text; a target is an index
    sample_shape: tuple[int, ...]  # (3, S, S) for images of S x S pixels, (T,) for passages
    fingerprint: str
    """Hash of the samples, their split and their order, but not of the augmentation. A resumed run
    compares the hash to detect changed data."""
    stand_in: bool = False  # whether the images are generated, in the layout of the real data set
    skipped: tuple[str, ...] = ()  # the damaged images that were left out
    tokens: Tokens | None = None  # the tokenizer of a text; None for images

    @property
    def num_classes(self) -> int:
        """The number of classes, or of different tokens."""
        return len(self.classes)

    @property
    def image_size(self) -> int:
        """Height and width of the images as the model sees them, in pixels."""
        return self.sample_shape[-1]

    @property
    def is_text(self) -> bool:
        """Whether the data set is a text, not images."""
        return self.tokens is not None

    @property
    def unit(self) -> str:
        """The plural noun for samples: ``images`` or ``passages``."""
        if self.is_text:
            return "passages"
        return "images"

    @property
    def summary(self) -> str:
        """One line: ``digits: 1438 training and 359 test images of 32x32, 10 classes``."""
        name = self.name
        if self.stand_in:
            name += " (generated stand-in)"
        counts = f"{name}: {len(self.train)} training and {len(self.test)} test {self.unit}"
        size = self.sample_shape[-1]
        if not self.is_text:
            return f"{counts} of {size}x{size}, {self.num_classes} classes"
        token = "byte pairs"
        if isinstance(self.tokens, Characters):
            token = "characters"
        return f"{counts} of {size} {token}, {self.num_classes:,} different ones"


@dataclass(frozen=True)
class LoadOptions:
    """The options for the `load` of a data set. `load_dataset` describes each option."""

    folder: Path  # for the user's own text, it may be a file
    limit: int | None = None
    seed: int | None = 0  # of the augmentation; None: no augmentation
    # For images.
    image_size: int = 32
    skip_damaged: bool = False
    download: bool = True
    # For a text. `make_tokens` says what the last two are for.
    context: int = CONTEXT
    tokenizer: str | None = None
    vocabulary: int | None = None


def generator(*parts: int) -> torch.Generator:
    """A random generator on the CPU, seeded with several numbers, such as (seed, epoch, SHUFFLE).

    The sum of the numbers would not work as a seed: seed 1 in epoch 2 would draw the same numbers
    as seed 2 in epoch 1.
    """
    sequence = np.random.SeedSequence(parts)
    (seed,) = sequence.generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed))


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """The BLAKE2 hash of all parts together, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            content = part.tobytes()
        else:
            content = part
        # Hash the length too: otherwise moving bytes from one part to the next keeps the hash.
        length = len(content).to_bytes(8, "little")
        digest.update(length + content)
    return digest.hexdigest()
