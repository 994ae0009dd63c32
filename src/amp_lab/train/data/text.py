"""Text for language models: the sources of Python's standard library, or your own files."""

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

OFFSET = 3  # a purpose of random numbers, as `SHUFFLE` and `AUGMENT`
TEXTS = ("stdlib", "text")
CONTEXT = 256  # tokens in a passage, by default
_MAX_CONTEXT = 2**16
_PIECE_LENGTH = 10_000  # characters
_TEST_EVERY = 10  # one piece of text in so many is for the test
_MAX_TEXT_BYTES = 2**30
_NO_TOKENS = np.zeros(0, np.int32)  # since `np.concatenate` refuses an empty list
# Folders of the standard library with programs or tests, or that not every Python has.
_SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "turtledemo"}


class Passages(ImageSet):
    """Passages of T = `context` tokens, cut from one long text: inputs and targets, int64 (T,).

    The targets are the inputs shifted by one token. `tokens` are those of the text, int32 (L,), and
    there are at most `limit` passages. With a `seed`, the passages of each epoch begin at another
    random offset in the text.
    """

    def __init__(self, tokens: np.ndarray, context: int, limit: int | None, seed: int | None):
        self._tokens = torch.from_numpy(tokens)
        self._context = context
        self._seed = seed
        usable = len(tokens) - context  # the rest leaves room for the offset of an epoch
        count = usable // context
        kept = min(count, limit or count)
        # A limit keeps passages that are spread evenly over the text, and not those at its start.
        self._step = count // kept * context  # tokens from the start of a passage to the next one's
        self.targets = torch.zeros(kept, dtype=torch.int64)  # for `len`; `read` makes them

    def read(self, keys: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each (B, T), of these keys. `IndexError` for a negative key."""
        passages: list[torch.Tensor] = []
        for epoch, index in self._epochs_and_indices(keys):
            start = self._offset(epoch) + index * self._step
            end = start + self._context + 1  # one token more, the target of the last
            passages.append(self._tokens[start:end])
        rows = torch.stack(passages).long()
        return rows[:, :-1], rows[:, 1:]

    def _offset(self, epoch: int) -> int:
        """The token at which the first passage of an epoch begins."""
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
    """Load the text `name`, one of `TEXTS`, and cut it into tokens and passages.

    - ``stdlib``: the sources of Python's standard library, under the licence of the PSF.
    - ``text``: your own; `folder` is a file, or a folder whose .txt and .md files are read.

    A sample is a passage of T = `context` tokens (default: 256), int64 (T,), and the token that
    follows each of them, (T,). Every tenth piece of 10,000 characters is for the test. Where the
    passages begin depends on the `seed` and the epoch; with None it is always the same. `limit`
    keeps at most so many training passages. A token is a character, and rare characters share one
    token; for a `tokenizer` and its `vocabulary`, see `make_tokens`.

    Raises `DataError` for a wrong value or a file that is no tokenizer, and for a text that is
    missing, empty, too short, not UTF-8, larger than 1 GiB, or has bytes of zero.
    """
    if context is not None and not 1 <= context <= _MAX_CONTEXT:
        raise DataError(f"context={context} must be between 1 and {_MAX_CONTEXT} tokens")
    try:
        if name == "stdlib":
            sources = _read_stdlib()
        else:
            sources = _read_files(Path(folder))
        text = "\n".join(sources)  # this reads the files, since `sources` is a generator
        pieces = _cut_into_pieces(text)
        tokens = make_tokens(pieces, tokenizer, vocabulary)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {first_line(error)}") from error
    context = context or CONTEXT
    train, test = _split(tokens.encode(pieces))
    min_test_tokens = 2 * context  # one passage, and room for an offset
    if len(test) < min_test_tokens:
        total = len(train) + len(test)
        min_total = min_test_tokens * _TEST_EVERY
        raise DataError(
            f"{name}: {total:,} tokens are too few for passages of {context}: it takes "
            f"{min_total:,}; give more text or a smaller --context"
        )
    test_limit = None
    if limit is not None:  # the same share of the test, which has one piece in ten
        train_for_each_test = _TEST_EVERY - 1
        test_limit = math.ceil(limit / train_for_each_test)
    return ImageData(
        name=name,
        train=Passages(train, context, limit, seed),
        test=Passages(test, context, test_limit, seed=None),
        classes=tokens.names,
        image_size=context,
        fingerprint=fingerprint(train, test, np.array([context])),
        tokens=tokens,
    )


def _split(pieces: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the training and of the test, int32 (T,), given the tokens of each piece.

    Every tenth piece is for the test.
    """
    every_tenth = slice(_TEST_EVERY - 1, None, _TEST_EVERY)
    test = pieces[every_tenth]
    train = list(pieces)
    del train[every_tenth]
    return np.concatenate([*train, _NO_TOKENS]), np.concatenate([*test, _NO_TOKENS])


def _cut_into_pieces(text: str) -> list[str]:
    """Cut a text into pieces of equal length, but for the last, which may be shorter.

    A text of ten characters or more has at least ten, so that one of them is for the test.
    """
    max_length = len(text) // _TEST_EVERY
    length = max(1, min(_PIECE_LENGTH, max_length))
    return [text[start : start + length] for start in range(0, len(text), length)]


def _read_stdlib() -> Iterator[str]:
    """The source of each module of Python's standard library, without the folders `_SKIPPED`."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts):
            yield file.read_text(encoding="utf-8", errors="replace")


def _read_files(path: Path) -> Iterator[str]:
    """The text of a file, or of each .txt and .md file in a folder.

    Raises `DataError` as `load_text` says, and `OSError` if a file cannot be read.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        files = [path]
    else:
        files = [*sorted(path.rglob("*.txt")), *sorted(path.rglob("*.md"))]
    if not files:
        raise DataError(f"{path}: no file there ends in .txt or .md")
    size = sum(file.stat().st_size for file in files)
    if size > _MAX_TEXT_BYTES:
        gib = size / 2**30
        raise DataError(f"{path}: {gib:.1f} GiB of text, and at most 1 GiB is taken")
    for file in files:
        # It refuses pipes and devices, which may never end.
        content = read_regular(file, _MAX_TEXT_BYTES)
        if b"\0" in content:
            raise DataError(f"{file}: not a text, for it has bytes of zero")
        try:
            yield content.decode("utf-8-sig")  # without a byte order mark
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 (at byte {error.start:,})") from None
