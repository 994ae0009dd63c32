"""Text, a character a token: Python's standard library, which is always there, or any of yours."""

import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from amp_lab.data.images import ImageData, ImageSet, fingerprint, generator
from amp_lab.errors import DataError, first_line

OFFSET = 3  # what random numbers are for, as `SHUFFLE` and `AUGMENT`
TEXTS = ("stdlib", "text")
UNKNOWN = "\ufffd"  # stands for rare characters
CONTEXT, _LONGEST_CONTEXT = 256, 2**16  # characters
_RAREST = 10  # a character that occurs less often is no token of its own
_PIECE, _TEST_EVERY = 10_000, 10  # characters; every tenth piece is of the test
_MOST_BYTES = 2**30
_MOST_CHARACTERS = 2**15  # different ones: what int16 holds
# Parts of the standard library that are programs, tests, or not everywhere.
_LEFT_OUT = {
    "__pycache__",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "turtledemo",
}


class Passages(ImageSet):
    """Passages of a text, packed: tokens int64 (T,), and those that follow each, (T,).

    With a `seed`, each epoch cuts the text at other places.
    """

    def __init__(self, tokens: np.ndarray, context: int, limit: int | None, seed: int | None):
        self._tokens, self._context, self._seed = torch.from_numpy(tokens), context, seed
        count = (len(tokens) - context) // context  # so that there is room to shift them
        kept = min(count, limit or count)
        self._step = count // kept * context  # those that a limit keeps come from all of the text
        self.targets = torch.zeros(kept, dtype=torch.int64)

    def batch(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, T) and the next ones (B, T) of these keys; `IndexError` for a negative one."""
        places = self._epochs_and_indices(keys)
        starts = [self._start(epoch) + index * self._step for epoch, index in places]
        rows = torch.stack([self._tokens[i : i + self._context + 1] for i in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def _start(self, epoch: int) -> int:
        if self._seed is None:
            return 0
        draws = generator(self._seed, epoch, OFFSET)
        return int(torch.randint(self._context, (), generator=draws))


def load_text(
    name: str,
    folder: str | Path = "data",
    *,
    context: int | None = None,
    limit: int | None = None,
    seed: int | None = 0,
) -> ImageData:
    """The text called `name`, one of `TEXTS`, a character a token.

    - ``stdlib``: the sources of Python's standard library, under the licence of the PSF.
    - ``text``: your own; `folder` is a file, or a folder whose .txt and .md files are read.

    A sample is a passage of `context` characters (default: 256): tokens int64 (T,), and those that
    follow each, (T,). Every tenth piece of 10,000 characters is for the test. The passages of an
    epoch begin at places that depend on the `seed` and the epoch; None: always at the same.
    Characters that hardly occur become one. `limit` keeps at most so many passages.

    Raises `DataError` for a wrong value, and for a text that is missing, empty or too short, has
    bytes of zero, is not UTF-8, or larger than 1 GiB.
    """
    if context is not None and not 1 <= context <= _LONGEST_CONTEXT:
        raise DataError(f"context={context} must be between 1 and {_LONGEST_CONTEXT} characters")
    try:
        texts = _of_stdlib() if name == "stdlib" else _of_files(Path(folder))
        return _split(name, "\n".join(texts), context or CONTEXT, limit, seed)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {first_line(error)}") from error


def _of_stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if _LEFT_OUT.isdisjoint(p.relative_to(root).parts)]
    return (file.read_text(encoding="utf-8", errors="replace") for file in sorted(files))


def _of_files(place: Path) -> Iterator[str]:
    if not place.exists():
        raise DataError(f"{place}: no such file or folder")
    files = (
        [place] if place.is_file() else sorted(place.rglob("*.txt")) + sorted(place.rglob("*.md"))
    )
    if not files:
        raise DataError(f"{place}: no file there ends in .txt or .md")
    size = sum(file.stat().st_size for file in files)
    if size > _MOST_BYTES:
        raise DataError(f"{place}: {size / 2**30:.1f} GiB of text, and at most 1 GiB is taken")
    for file in files:
        content = file.read_bytes()
        if b"\0" in content:
            raise DataError(f"{file}: not a text, for it has bytes of zero")
        try:
            yield content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 (at byte {error.start:,})") from None


def _split(name: str, text: str, context: int, limit: int | None, seed: int | None) -> ImageData:
    counts = Counter(text)
    usual = {c for c, count in counts.items() if count >= min(_RAREST, len(text) // 1000)}
    characters = sorted(usual | ({UNKNOWN} if len(usual) < len(counts) else set()))
    if len(characters) > _MOST_CHARACTERS:
        raise DataError(
            f"{name}: {len(characters):,} different characters; at most 32,768 are taken"
        )
    tokens = encode(text, tuple(characters))
    is_test = np.arange(len(tokens)) // _PIECE % _TEST_EVERY == _TEST_EVERY - 1
    if len(tokens) < _PIECE * _TEST_EVERY:  # too short for such pieces: its end is the test
        is_test = np.arange(len(tokens)) >= len(tokens) * (_TEST_EVERY - 1) // _TEST_EVERY
    train, test = tokens[~is_test], tokens[is_test]
    if len(test) < 2 * context:
        raise DataError(
            f"{name}: {len(tokens):,} characters are too few for passages of {context}: it takes "
            f"{2 * context * _TEST_EVERY:,}; give more text or a smaller --context"
        )
    test_limit = None if limit is None else -(-limit // (_TEST_EVERY - 1))
    return ImageData(
        name=name,
        train=Passages(train, context, limit, seed),
        test=Passages(test, context, test_limit, None),
        classes=tuple(characters),
        image_size=context,
        fingerprint=fingerprint(tokens, np.array([context])),
        is_text=True,
    )


def encode(text: str, characters: Sequence[str]) -> np.ndarray:
    """The numbers int16 of a text's characters; what is not among them becomes `UNKNOWN`.

    Raises `DataError` for such a character where `UNKNOWN` is not one of them either.
    """
    table = {character: number for number, character in enumerate(characters)}
    unknown = table.get(UNKNOWN)
    strange = set(text) - table.keys()
    if strange and unknown is None:
        raise DataError(f"the character {min(strange)!r} is not in the text of the training")
    return np.fromiter((table.get(c, unknown) for c in text), np.int16, len(text))
