"""Tokens: characters and byte pairs, written down, read again, and refused where they are none."""

import base64
import json
import types

import pytest
from data_sets import load_text
from tokenizers import Tokenizer, models, pre_tokenizers

from amp_lab.core.errors import DataError
from amp_lab.train.data.tokens import UNKNOWN, BytePairs, Characters, make_tokens, saved_tokens

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(300))
ODD = "ß \N{GRINNING FACE}\r\n\ttimes\0"


def numbers(tokens, text):
    return tokens.encode([text])[0].tolist()


def test_characters_are_numbered_by_code_point_and_rare_ones_are_one():
    tokens = Characters.of("ab" * 1000 + "ß")
    assert tokens.names == ("a", "b", UNKNOWN)
    assert numbers(tokens, "aßx") == [0, 2, 2]
    assert tokens.decode([1, 0]) == "ba"


def test_a_strange_character_is_refused_where_nothing_stands_for_it():
    assert numbers(Characters("ab"), "aba") == [0, 1, 0]
    with pytest.raises(DataError, match="the character 'x' is not in"):
        Characters("ab").encode(["axb"])


def test_byte_pairs_hold_any_text_and_are_fewer_than_its_bytes():
    tokens = BytePairs.of([TEXT], 400)
    for text in (TEXT, ODD, ""):
        assert tokens.decode(numbers(tokens, text)) == text
    assert len(numbers(tokens, TEXT)) < len(TEXT) / 2
    assert len(tokens.names) <= 400


def test_the_same_text_gives_the_same_byte_pairs():
    assert BytePairs.of([TEXT], 400).saved == BytePairs.of([TEXT], 400).saved


@pytest.mark.parametrize("tokens", [Characters.of(TEXT), BytePairs.of([TEXT], 300)])
def test_what_a_checkpoint_has_is_what_was(tokens):
    again = saved_tokens({"classes": len(tokens.names)} | tokens.saved)
    assert type(again) is type(tokens)
    assert again.names == tokens.names
    assert numbers(again, TEXT) == numbers(tokens, TEXT)
    assert saved_tokens({"classes": 3}) is None


def test_no_text_is_cut_off_or_filled_up_as_a_file_asks_for():
    """Many a tokenizer.json was saved for a model with inputs of one length."""
    tokens = BytePairs.of([TEXT], 400)
    given = Tokenizer.from_str(tokens.saved["tokenizer"])
    given.enable_truncation(128, stride=16)
    given.enable_padding(length=256)
    state = {"tokenizer": given.to_str(), "classes": len(tokens.names)}
    for other in (BytePairs(given.to_str()), saved_tokens(state)):
        assert numbers(other, TEXT) == numbers(tokens, TEXT)
        assert other.decode(numbers(other, TEXT)) == TEXT
        assert numbers(other, "1") == numbers(tokens, "1")


def test_a_tokenizer_of_ones_own_is_taken(tmp_path):
    words = {word: number for number, word in enumerate(["[?]", "times", "is", *"0123456789"])}
    given = Tokenizer(models.WordLevel(words, "[?]"))
    given.pre_tokenizer = pre_tokenizers.Whitespace()
    file = tmp_path / "mine.json"
    given.save(str(file))
    (tmp_path / "text.txt").write_text(TEXT)
    data = load_text(tmp_path / "text.txt", context=4, tokenizer=str(file), seed=None)
    assert data.classes == tuple(words)
    assert data.train.batch([0])[0].tolist() == [[3, 1, 3, 2]]  # "0 times 0 is"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a tokenizer.json"),
        (b"{}", "not a tokenizer.json"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not a tokenizer.json"),
        (json.dumps({"model": {"type": "BPE"}}).encode(), "not a tokenizer.json"),
    ],
    ids=["empty", "of nothing", "binary", "deep", "half"],
)
def test_a_file_that_is_no_tokenizer_is_told_in_a_line(tmp_path, content, says):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as told:
        make_tokens([TEXT], str(file), None)
    assert "\n" not in str(told.value)
    assert str(file) in str(told.value)


def test_numbers_beyond_the_vocabulary_are_refused():
    given = Tokenizer(models.WordLevel({"a": 0, "b": 9}, "a"))  # two tokens, the numbers 0 and 9
    tokens = BytePairs(given.to_str())
    with pytest.raises(DataError, match=r"2 tokens, .*number 9"):
        tokens.encode(["b"])


def changed(given: Tokenizer, **parts) -> str:
    return json.dumps(json.loads(given.to_str()) | parts)


WORDS = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "[UNK]"))  # without the token for others
CHARSMAPS = (b"", b"\xff" * 3, b"\xff\xff\xff\x7f" + b"x" * 8, b"\x04\0\0\0" + b"\xff" * 20)
BEYOND = {"max_length": 4, "stride": 8, "strategy": "LongestFirst", "direction": "Right"}
HUGE = {"strategy": {"Fixed": 10**15}, "direction": "Right", "pad_to_multiple_of": 0}
HUGE |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}


@pytest.mark.parametrize("charsmap", CHARSMAPS)
def test_a_panic_of_the_library_is_told_in_a_line(charsmap, capfd):
    text = base64.b64encode(charsmap).decode()
    content = changed(WORDS, normalizer={"type": "Precompiled", "precompiled_charsmap": text})
    with pytest.raises(DataError, match=r"x is not a tokenizer\.json") as told:
        BytePairs(content, "x")
    assert len(str(told.value).splitlines()) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("given", [WORDS, Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)]))])
def test_a_text_with_what_is_no_token_is_told_in_a_line(given):
    with pytest.raises(DataError, match="tokenizer cannot encode"):
        BytePairs(given.to_str()).encode(["a", "c"])


@pytest.mark.parametrize("parts", [{"truncation": BEYOND}, {"padding": HUGE}])
def test_a_wrong_length_in_a_file_is_not_obeyed(parts):
    assert numbers(BytePairs(changed(WORDS, **parts)), "a") == [0]


def test_an_interrupt_stays_one(monkeypatch):
    def interrupted(content: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer", types.SimpleNamespace(from_str=interrupted))
    with pytest.raises(KeyboardInterrupt):
        BytePairs("{}")
