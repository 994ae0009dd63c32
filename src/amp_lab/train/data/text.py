"""Text for language models: Python's standard library, which is always there, or any of yours."""

import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import read_regular
from amp_lab.train.data.images import ImageData, ImageSet, fingerprint, generator
from amp_lab.train.data.tokens import make_tokens

OFFSET = 3  # what random numbers are for, as `SHUFFLE` and `AUGMENT`
TEXTS = ("stdlib", "text")
CONTEXT = 256  # tokens
_LONGEST_CONTEXT = 2**16
_PIECE = 10_000  # characters
_TEST_EVERY = 10  # pieces, of which one is of the test
_MOST_BYTES = 2**30
_NONE = np.zeros(0, np.int32)  # tokens
# Parts of the standard library that are programs, tests, or not everywhere.
_SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "turtledemo"}


class Passages(ImageSet):
    """Passages of a text, packed: tokens int64 (T,), and those that follow each, (T,).

    With a `seed`, each epoch cuts the text at other places.
    """

    def __init__(self, tokens: np.ndarray, context: int, limit: int | None, seed: int | None):
        self._tokens = torch.from_numpy(tokens)
        self._context = context
        self._seed = seed
        usable = len(tokens) - context  # so that there is room to shift them
        count = usable // context
        kept = min(count, limit or count)
        # Those that a limit keeps come from all of the text.
        self._step = count // kept * context
        self.targets = torch.zeros(kept, dtype=torch.int64)

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, T) and the next ones (B, T) of these keys; `IndexError` for a negative one."""
        places = self._epochs_and_indices(keys)
        passages: list[torch.Tensor] = []
        for epoch, index in places:
            start = self._start(epoch) + index * self._step
            end = start + self._context + 1  # with the token that follows the last
            passages.append(self._tokens[start:end])
        rows = torch.stack(passages).long()
        return rows[:, :-1], rows[:, 1:]

    def _start(self, epoch: int) -> int:
        if self._seed is None:
            return 0
        rng = generator(self._seed, epoch, OFFSET)
        offset = torch.randint(self._context, (), generator=rng)
        return int(offset)


def load_text(
    name: str,
    folder: str | Path = "data",
    *,
    context: int | None = None,
    limit: int | None = None,
    seed: int | None = 0,
    tokenizer: str | None = None,
    vocabulary: int | None = None,
) -> ImageData:
    """The text called `name`, one of `TEXTS`, cut into tokens.

    - ``stdlib``: the sources of Python's standard library, under the licence of the PSF.
    - ``text``: your own; `folder` is a file, or a folder whose .txt and .md files are read.

    A sample is a passage of `context` tokens (default: 256): int64 (T,), and those that follow
    each, (T,). Every tenth piece of 10,000 characters is for the test. The passages of an epoch
    begin at places that depend on the `seed` and the epoch; None: always at the same. `limit` keeps
    at most so many passages. A token is a character, of which those that hardly occur become one;
    with a `tokenizer` it is what `make_tokens` says.

    Raises `DataError` for a wrong value, a tokenizer that is none, and for a text that is missing,
    empty or too short, has bytes of zero, is not UTF-8, or larger than 1 GiB.
    """
    if context is not None and not 1 <= context <= _LONGEST_CONTEXT:
        raise DataError(f"context={context} must be between 1 and {_LONGEST_CONTEXT} tokens")
    try:
        if name == "stdlib":
            sources = _of_stdlib()
        else:
            sources = _of_files(Path(folder))
        text = "\n".join(sources)
        pieces = _pieces(text)
        tokens = make_tokens(pieces, tokenizer, vocabulary)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {first_line(error)}") from error
    context = context or CONTEXT
    train, test = _split(tokens.encode(pieces))
    least_in_test = 2 * context
    if len(test) < least_in_test:
        total = len(train) + len(test)
        least = least_in_test * _TEST_EVERY
        raise DataError(
            f"{name}: {total:,} tokens are too few for passages of {context}: it takes {least:,}; "
            "give more text or a smaller --context"
        )
    test_limit = None
    if limit is not None:
        train_for_each_test = _TEST_EVERY - 1
        test_limit = math.ceil(limit / train_for_each_test)
    return ImageData(
        name=name,
        train=Passages(train, context, limit, seed),
        test=Passages(test, context, test_limit, None),
        classes=tokens.names,
        image_size=context,
        fingerprint=fingerprint(train, test, np.array([context])),
        tokens=tokens,
    )


def _split(pieces: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of training and of the test, from those of each piece."""
    for_test = slice(_TEST_EVERY - 1, None, _TEST_EVERY)
    test = pieces[for_test]
    train = list(pieces)
    del train[for_test]
    return np.concatenate([*train, _NONE]), np.concatenate([*test, _NONE])


def _pieces(text: str) -> list[str]:
    """A text in pieces, at least as many as it takes for one of them to be the test."""
    longest = len(text) // _TEST_EVERY
    length = max(1, min(_PIECE, longest))
    return [text[start : start + length] for start in range(0, len(text), length)]


def _of_stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts):
            yield file.read_text(encoding="utf-8", errors="replace")


def _of_files(place: Path) -> Iterator[str]:
    if not place.exists():
        raise DataError(f"{place}: no such file or folder")
    if place.is_file():
        files = [place]
    else:
        files = [*sorted(place.rglob("*.txt")), *sorted(place.rglob("*.md"))]
    if not files:
        raise DataError(f"{place}: no file there ends in .txt or .md")
    size = sum(file.stat().st_size for file in files)
    if size > _MOST_BYTES:
        gib = size / 2**30
        raise DataError(f"{place}: {gib:.1f} GiB of text, and at most 1 GiB is taken")
    for file in files:
        content = read_regular(file, _MOST_BYTES)  # not from a pipe or a device, without end
        if b"\0" in content:
            raise DataError(f"{file}: not a text, for it has bytes of zero")
        try:
            yield content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 (at byte {error.start:,})") from None
