"""Tokens of a text: its characters, or byte pairs by Hugging Face's tokenizers."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from amp_lab.core.errors import DataError, first_line
from amp_lab.core.files import read_regular
from amp_lab.core.requirements import needed_for

UNKNOWN = "\ufffd"  # the token of all rare characters
BPE = "bpe"
VOCABULARY = 4096  # tokens that byte-pair encoding learns by default
_MIN_VOCABULARY = 257  # every byte, and one pair
_MAX_VOCABULARY = 2**18  # more than any model of today has
_MIN_OCCURRENCES = 10  # a character that occurs less often is `UNKNOWN`
_MAX_CHARACTERS_TO_LEARN_FROM = 2**24  # more hardly change the vocabulary
_MAX_FILE_BYTES = 2**28  # of a tokenizer.json


class Characters:
    """A tokenizer with one token for each character, and one for all rare characters together.

    `names` are the characters by token number; `saved` is the entry of a checkpoint that
    `saved_tokens` reads.
    """

    def __init__(self, characters: Sequence[str]):
        self.names = tuple(characters)
        self.saved = {"characters": "".join(characters)}

    @classmethod
    def of(cls, text: str) -> "Characters":
        """The tokenizer of a text: its frequent characters, in the order of their code points.

        If the text also has rare characters, `UNKNOWN` is one of the tokens.
        """
        counts = Counter(text)
        min_count = min(_MIN_OCCURRENCES, len(text) // 1000)  # a short text has few of each
        tokens = {character for character, count in counts.items() if count >= min_count}
        if len(tokens) < len(counts):
            tokens.add(UNKNOWN)
        return cls(sorted(tokens))

    def knows(self, text: str) -> bool:
        """Whether `encode` accepts a text."""
        return UNKNOWN in self.names or set(text) <= set(self.names)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token numbers of each text, int32 (T,).

        A character without a token becomes `UNKNOWN`. If there is no token `UNKNOWN`, such a
        character raises `DataError`.
        """
        number_of = {character: number for number, character in enumerate(self.names)}
        unknown = number_of.get(UNKNOWN)
        without_token = set().union(*texts) - number_of.keys()
        if without_token and unknown is None:
            character = min(without_token)
            raise DataError(f"the character {character!r} is not in the training text")
        rows = []
        for text in texts:
            numbers = (number_of.get(character, unknown) for character in text)
            rows.append(np.fromiter(numbers, np.int32, len(text)))
        return rows

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these token numbers."""
        return "".join(self.names[number] for number in numbers)


class BytePairs:
    """A tokenizer from the content of a ``tokenizer.json``, which `transformers` also writes.

    `saved` is the entry of a checkpoint that `saved_tokens` reads. Raises `DataError` for any other
    content. The message begins with `source`, such as the path of the file.
    """

    def __init__(self, content: str, source: str = "the tokenizer"):
        with needed_for("byte pairs"):
            from tokenizers import Tokenizer
        with _library_errors(f"{source} is not a tokenizer.json"):
            self._tokenizer = Tokenizer.from_str(content)
        # The file may have been saved with these on, for a model with inputs of one length: they
        # would silently cut off each text, or fill it up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        size = self._tokenizer.get_vocab_size()
        if not 1 < size <= _MAX_VOCABULARY:
            raise DataError(
                f"{source} has {size:,} tokens; a tokenizer needs 2 to {_MAX_VOCABULARY:,}"
            )
        self.saved = {"tokenizer": content}

    @classmethod
    def of(cls, texts: Sequence[str], vocabulary: int) -> "BytePairs":
        """Learn up to `vocabulary` tokens from texts; the same texts give the same tokens."""
        with needed_for("byte pairs"):
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that any text has tokens
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
        )
        characters = sum(map(len, texts))
        # Learn from every n-th text, so that the sample is spread over all texts.
        every = max(1, math.ceil(characters / _MAX_CHARACTERS_TO_LEARN_FROM))
        tokenizer.train_from_iterator(texts[::every], trainer)
        return cls(tokenizer.to_str())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tokens by number, as tokenizer.json writes them: ``Ġthe`` is " the".

        A number without a token has the empty name.
        """
        count = self._tokenizer.get_vocab_size()
        return tuple(self._tokenizer.id_to_token(number) or "" for number in range(count))

    def knows(self, text: str) -> bool:
        """Whether a text has at least one token."""
        (numbers,) = self.encode([text])
        return len(numbers) > 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token numbers of each text, int32 (T,).

        Raises `DataError` for a number beyond the vocabulary, because the model has no embedding
        for it.
        """
        with _library_errors("the tokenizer cannot encode the text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [np.array(encoding.ids, np.int32) for encoding in encodings]
        largest = max((int(row.max()) for row in rows if len(row)), default=0)
        count = len(self.names)
        if largest >= count:
            raise DataError(
                f"the tokenizer has {count:,} tokens, but returned the number {largest:,}"
            )
        return rows

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these token numbers."""
        with _library_errors("the tokenizer cannot decode the tokens"):
            return self._tokenizer.decode(list(numbers), skip_special_tokens=False)


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Turn any error of the tokenizers library in the block into a `DataError`.

    The library has no error class of its own. A panic in its Rust code is no `Exception`, and
    prints many lines to file descriptor 2, which `_nothing_on_stderr` drops.
    """
    try:
        with _nothing_on_stderr():
            yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:  # such as a KeyboardInterrupt
            raise
        raise DataError(f"{problem} ({first_line(error)})") from error


@contextlib.contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    """Drop what is written to file descriptor 2 in the block; `sys.stderr` would miss Rust's."""
    stderr_copy = os.dup(2)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


Tokens = Characters | BytePairs


def make_tokens(texts: Sequence[str], tokenizer: str | None, vocabulary: int | None) -> Tokens:
    """Make the tokenizer for texts.

    `tokenizer` is None for characters, `BPE` to learn byte pairs from the texts, or the path of a
    tokenizer.json. `vocabulary` is the number of tokens that `BPE` learns (default: `VOCABULARY`).
    Raises `DataError` for a file that cannot be read or is not a tokenizer, and for a vocabulary
    out of range.
    """
    if vocabulary is not None and tokenizer != BPE:
        raise DataError("--vocabulary sets how many tokens bpe learns: give --tokenizer bpe too")
    if tokenizer is None:
        return Characters.of("".join(texts))
    if tokenizer == BPE:
        size = vocabulary
        if size is None:
            size = VOCABULARY
        if not _MIN_VOCABULARY <= size <= _MAX_VOCABULARY:
            limits = f"from {_MIN_VOCABULARY} to {_MAX_VOCABULARY:,}"
            raise DataError(f"a vocabulary must have {limits} tokens, not {size:,}")
        return BytePairs.of(texts, size)
    try:
        content = read_regular(Path(tokenizer), _MAX_FILE_BYTES).decode()
    except OSError as error:
        raise DataError(f"{tokenizer}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise DataError(f"{tokenizer} is not a tokenizer.json: it is not UTF-8") from None
    return BytePairs(content, tokenizer)


def saved_tokens(state: dict[str, Any]) -> Tokens | None:
    """The tokenizer in the checkpoint of a run; None for a run on images.

    `state` is the content of the checkpoint: "characters" or "tokenizer" has the value of
    `Tokens.saved`. Raises `DataError` if the value is damaged, or if the number of tokens differs
    from "classes".
    """
    name = "characters"
    if "tokenizer" in state:
        name = "tokenizer"
    if name not in state:
        return None
    content = state[name]
    if not isinstance(content, str):
        raise DataError(f"the {name} of the checkpoint is a {type(content).__name__}, not a text")
    tokens: Tokens
    if name == "tokenizer":
        tokens = BytePairs(content)
    else:
        tokens = Characters(content)
    count = len(tokens.names)
    classes = state["classes"]
    if count != classes:
        counts = f"{count:,} tokens, but the model has {classes:,}"
        raise DataError(f"the {name} of the checkpoint has {counts}")
    return tokens
