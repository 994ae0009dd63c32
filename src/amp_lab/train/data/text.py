"""Shared by the texts: cut into tokens, and into passages for a language model."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from amp_lab.core.errors import DataError
from amp_lab.train.data.samples import (
    OFFSET,
    DataSplits,
    LoadOptions,
    SampleSet,
    fingerprint,
    generator,
)
from amp_lab.train.data.tokens import make_tokens

_MAX_CONTEXT = 2**16
_PIECE_LENGTH = 10_000  # characters
_TEST_EVERY = 10  # one piece of text in so many is for the test
_NO_TOKENS = np.zeros(0, np.int32)  # since `np.concatenate` refuses an empty list


class Passages(SampleSet):
    """Passages of T = `context` tokens, cut from one long text: inputs and targets, int64 (T,).

    The targets are the inputs shifted by one token. `tokens` are the tokens of the text, int32
    (L,), and there are at most `limit` passages. With a `seed`, the passages of each epoch begin at
    another random offset in the text.
    """

    def __init__(self, tokens: np.ndarray, context: int, limit: int | None, seed: int | None):
        self._tokens = torch.from_numpy(tokens)
        self._context = context
        self._seed = seed
        # The passages may begin up to `context` tokens later in another epoch, so as many tokens
        # stay free at the end of the text.
        available = (len(tokens) - context) // context  # passages in the text
        self._count = min(available, limit or available)
        # With a limit, only every k-th passage is used, so that they are spread over the text.
        every = available // self._count
        self._step = every * context  # tokens from the start of a passage to the start of the next

    def __len__(self) -> int:
        return self._count

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


def load_text(name: str, texts: Iterable[str], options: LoadOptions) -> DataSplits:
    """Join texts, such as those of several files, and cut them into tokens and passages.

    `name` is the name of the data set.

    A sample is a passage of T = `options.context` tokens, int64 (T,), and the token that follows
    each of them, (T,). Every tenth piece of 10,000 characters is for the test. The positions of the
    passages depend on `options.seed` and the epoch; with None they are always the same. There are
    at most `options.limit` training passages. A token is a character, and rare characters share one
    token; for a tokenizer and its vocabulary, see `make_tokens`.

    Raises `DataError` for a wrong option, for a file that is not a tokenizer, and for a text that
    is too short.
    """
    context = options.context
    if not 1 <= context <= _MAX_CONTEXT:
        raise DataError(f"context={context} must be between 1 and {_MAX_CONTEXT} tokens")
    text = "\n".join(texts)
    pieces = _cut_into_pieces(text)
    tokens = make_tokens(pieces, options.tokenizer, options.vocabulary)
    train, test = _split(tokens.encode(pieces))
    min_test_tokens = 2 * context  # one passage, and room for an offset
    if len(test) < min_test_tokens:
        total = len(train) + len(test)
        min_total = min_test_tokens * _TEST_EVERY
        raise DataError(
            f"{name}: {total:,} tokens are too few for passages of {context}, which need "
            f"{min_total:,}; give more text or a smaller --context"
        )
    limit = options.limit
    test_limit = None
    if limit is not None:  # the same share of the test, which has one piece in ten
        train_for_each_test = _TEST_EVERY - 1
        test_limit = math.ceil(limit / train_for_each_test)
    return DataSplits(
        name=name,
        train=Passages(train, context, limit, options.seed),
        test=Passages(test, context, test_limit, seed=None),
        classes=tokens.names,
        sample_shape=(context,),
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
