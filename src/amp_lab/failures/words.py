"""Compare texts by their words: the terms of a text, and the index of failures and pages."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from amp_lab.core.requirements import needed_for
from amp_lab.failures.patterns import flat

if TYPE_CHECKING:
    from amp_lab.failures.reference import Failure, Page

_PURPOSE = "finding a text by its words"
# Found with practice questions: how much each field counts, and how much less a long text does.
_BOOST = {"title": 3, "symptoms": 1, "messages": 0.15, "words": 3, "text": 0.8}
_B, _K1 = 0.2, 0.6  # of BM25
_DAMPING = 0.5  # 0: rare words count as BM25 says; 1: all words count the same
_PREFIX = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception|Warning)\b:?\s*)+")
_WORD = re.compile(r"[a-z0-9]+")
# Of "doesn't" and "model's", only "does" and "model" are words.
_CONTRACTION = re.compile(r"(?:n['’]t|['’](?:s|re|ve|ll|d|m))(?![a-z0-9_])")
_MEASURED = re.compile(r"(?<![\w.])0\.\d*[1-9]\d*(?!\w)")  # such as 0.465; 0.0 is a word
_EXCLAMATION = re.compile(r"!{4,}")  # what a model of NaN prints
_LONGEST_PHRASE = 3  # words
# lunr's stemmers in Python and JavaScript treat a final "y" differently: after a vowel, and in
# words without a vowel, such as "try".
_FINAL_Y = re.compile(r"([aeiou]|^[^aeiouwy]{2,})y(?:s|ed|ing)?$")


def terms_of(text: str, synonyms: dict[str, str]) -> list[str]:
    """The words of a text as the index has them, without the names of exceptions before it.

    A synonym may consist of several words, such as ``out of memory``.
    """
    line = _MEASURED.sub(" ", _CONTRACTION.sub(" ", _PREFIX.sub("", flat(text)).lower()))
    words = _WORD.findall(_EXCLAMATION.sub(" garbage ", line))
    terms = []
    start = 0
    while start < len(words):
        length = _LONGEST_PHRASE
        while length > 1 and " ".join(words[start : start + length]) not in synonyms:
            length -= 1
        word = " ".join(words[start : start + length])
        terms.append(_FINAL_Y.sub(r"\1i", synonyms.get(word, word)))
        start += length
    return terms


def words_to_search(text: str, synonyms: dict[str, str]) -> list[str]:
    """The terms of a text that the index can find, each once: without words such as *the*."""
    with needed_for(_PURPOSE):
        from lunr.stop_word_filter import WORDS

    return [term for term in dict.fromkeys(terms_of(text, synonyms)) if term not in WORDS]


def stems_of(terms: Iterable[str]) -> set[str]:
    """The stems of terms: *drops* and *dropped* have the stem *drop*."""
    with needed_for(_PURPOSE):
        from lunr.stemmer import porter_stemmer

    return {porter_stemmer.stem(term) for term in terms}


def build_index(
    failures: Iterable["Failure"], pages: Iterable["Page"], synonyms: dict[str, str]
) -> Any:
    """A lunr index that finds failures by their code, and pages by their path."""
    with needed_for(_PURPOSE):
        import lunr

    builder = lunr.get_default_builder()
    builder.ref("key")
    builder.b(_B)
    builder.k1(_K1)
    for name, boost in _BOOST.items():
        builder.field(name, boost)
    for failure in failures:
        fields = {
            "title": failure.title,
            "symptoms": " ".join(failure.symptoms),
            "messages": " ".join(failure.messages),
            "words": failure.words,
            "text": f"{failure.cause} {failure.cure} {failure.unsafe}",
        }
        builder.add(_document(failure.code, fields, synonyms))
    for page in pages:
        builder.add(_document(page.page, {"title": page.title, "words": page.words}, synonyms))
    index = builder.build()
    damp_rare_words(index, builder.document_count)
    return index


def damp_rare_words(index: Any, documents: int) -> None:
    """Let rare words count less than BM25 says: many in a description have no meaning for it."""
    with needed_for(_PURPOSE):
        from lunr.idf import idf

    factors = {}
    for posting in index.inverted_index.values():
        factors[posting["_index"]] = idf(posting, documents) ** -_DAMPING
    for vector in index.field_vectors.values():
        # Alternately the number of a word and its score.
        for place in range(0, len(vector.elements), 2):
            damped = vector.elements[place + 1] * factors[vector.elements[place]]
            vector.elements[place + 1] = round(damped, 3)  # as lunr does


def _document(key: str, fields: dict[str, str], synonyms: dict[str, str]) -> dict[str, str]:
    """The fields of the index, with the words that a search for them would have."""
    document = {"key": key}
    for name in _BOOST:
        document[name] = " ".join(terms_of(fields.get(name, ""), synonyms))
    return document
