"""What a text is cut into: its characters, or byte pairs, which Hugging Face's tokenizers find."""

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

UNKNOWN = "\ufffd"  # stands for rare characters
BPE = "bpe"
VOCABULARY = 4096  # byte pairs that are learned by default
_SMALLEST = 257  # every byte and a pair
_LARGEST = 2**18  # more than any model of today has
_RAREST = 10  # a character that occurs less often is no token of its own
_LEARN_FROM = 2**24  # characters, from all of a text: more change next to nothing
_MOST_BYTES = 2**28  # of a tokenizer.json


class Characters:
    """A character a token; the rare ones are one token together."""

    def __init__(self, characters: Sequence[str]):
        self.names = tuple(characters)
        self.saved = {"characters": "".join(characters)}

    @classmethod
    def of(cls, text: str) -> "Characters":
        """Those of a text, in the order of their code points."""
        counts = Counter(text)
        least = min(_RAREST, len(text) // 1000)
        tokens = {character for character, count in counts.items() if count >= least}
        if len(tokens) < len(counts):
            tokens.add(UNKNOWN)
        return cls(sorted(tokens))

    def knows(self, text: str) -> bool:
        """Whether `encode` takes a text."""
        return UNKNOWN in self.names or set(text) <= set(self.names)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers int32 (T,) of each text; what is no token becomes `UNKNOWN`.

        Raises `DataError` for such a character where `UNKNOWN` is none either.
        """
        table = {character: number for number, character in enumerate(self.names)}
        unknown = table.get(UNKNOWN)
        strange = set().union(*texts) - table.keys()
        if strange and unknown is None:
            raise DataError(f"the character {min(strange)!r} is not in the text of the training")
        rows = []
        for text in texts:
            numbers = (table.get(character, unknown) for character in text)
            rows.append(np.fromiter(numbers, np.int32, len(text)))
        return rows

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of some numbers."""
        return "".join(self.names[number] for number in numbers)


class BytePairs:
    """The tokens of a ``tokenizer.json``, as `tokenizers` and `transformers` write it.

    Raises `DataError` if `content` is none. `called` is what the message calls it.
    """

    def __init__(self, content: str, called: str = "the tokenizer"):
        with needed_for("byte pairs"):
            from tokenizers import Tokenizer
        with _library_errors(f"{called}: no tokenizer.json"):
            self._tokenizer = Tokenizer.from_str(content)
        # A file may have been saved with these on, for a model with inputs of one length: they
        # would cut off each text, or fill it up, without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        size = self._tokenizer.get_vocab_size()
        if not 1 < size <= _LARGEST:
            raise DataError(f"{called}: has {size:,} tokens; from 2 to {_LARGEST:,} are taken")
        self.saved = {"tokenizer": content}

    @classmethod
    def of(cls, texts: Sequence[str], vocabulary: int) -> "BytePairs":
        """As many byte pairs as asked for, learned from texts; the same texts give the same."""
        with needed_for("byte pairs"):
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # so that no text is unknown
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
        )
        characters = sum(map(len, texts))
        every = math.ceil(characters / _LEARN_FROM) or 1
        tokenizer.train_from_iterator(texts[::every], trainer)
        return cls(tokenizer.to_str())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tokens as the tokenizer writes them, by number."""
        count = self._tokenizer.get_vocab_size()
        return tuple(self._tokenizer.id_to_token(number) or "" for number in range(count))

    def knows(self, text: str) -> bool:
        """Whether a text has a token."""
        return len(self.encode([text])[0]) > 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers int32 (T,) of each text. Raises `DataError` for one beyond the vocabulary."""
        with _library_errors("the tokenizer does not take the text"):
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        numbers = [np.array(one.ids, np.int32) for one in found]
        largest = max((int(row.max()) for row in numbers if len(row)), default=0)
        count = len(self.names)
        if largest >= count:
            raise DataError(f"the tokenizer has {count:,} tokens and gives the number {largest:,}")
        return numbers

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of some numbers."""
        with _library_errors("the tokenizer cannot write the tokens"):
            return self._tokenizer.decode(list(numbers), skip_special_tokens=False)


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """The block in which whatever the tokenizers library raises is a `DataError`.

    It has no kind of its own, and a panic of its code in Rust is no `Exception`: such a one also
    prints many lines, past Python.
    """
    try:
        with _nothing_on_stderr():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem} ({first_line(error)})") from error


@contextlib.contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    real = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(real, 2)
        os.close(real)


Tokens = Characters | BytePairs


def make_tokens(texts: Sequence[str], tokenizer: str | None, vocabulary: int | None) -> Tokens:
    """The tokens for texts: characters for None, `BPE` to learn byte pairs, or those of a file.

    `vocabulary` is how many byte pairs are learned (default: `VOCABULARY`). Raises `DataError` for
    a file that cannot be read or is no tokenizer, and for a vocabulary that makes no sense.
    """
    if vocabulary is not None and tokenizer != BPE:
        raise DataError("a vocabulary is for byte pairs that are learned: give --tokenizer bpe too")
    if tokenizer is None:
        return Characters.of("".join(texts))
    if tokenizer == BPE:
        size = vocabulary
        if size is None:
            size = VOCABULARY
        if not _SMALLEST <= size <= _LARGEST:
            raise DataError(f"a vocabulary of {size:,}: from {_SMALLEST} to {_LARGEST:,} are taken")
        return BytePairs.of(texts, size)
    try:
        content = read_regular(Path(tokenizer), _MOST_BYTES).decode()
    except OSError as error:
        raise DataError(f"{tokenizer}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise DataError(f"{tokenizer}: no tokenizer.json (not UTF-8)") from None
    return BytePairs(content, tokenizer)


def saved_tokens(state: dict[str, Any]) -> Tokens | None:
    """Those that a run's checkpoint has; None for a run on images.

    Raises `DataError` for a text that is none, and for other tokens than the run's classes.
    """
    name = "characters"
    if "tokenizer" in state:
        name = "tokenizer"
    if name not in state:
        return None
    saved = state[name]
    if not isinstance(saved, str):
        raise DataError(f"the {name} of the checkpoint is {type(saved).__name__}, no text")
    tokens: Tokens
    if name == "tokenizer":
        tokens = BytePairs(saved)
    else:
        tokens = Characters(saved)
    count = len(tokens.names)
    classes = state["classes"]
    if count != classes:
        counts = f"{count:,} tokens, and the model {classes:,}"
        raise DataError(f"the {name} of the checkpoint has {counts}")
    return tokens
