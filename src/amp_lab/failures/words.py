"""Compare texts by their words: the terms of a text, and the index of failures and pages."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from amp_lab.core.requirements import needed_for
from amp_lab.failures.patterns import flat

if TYPE_CHECKING:
    from amp_lab.failures.reference import Failure, Page

# Found with practice questions: how much each field counts, and how much less a long text does.
_BOOST = {"title": 2, "symptoms": 2, "messages": 0.3, "words": 1, "text": 1}
_B, _K1 = 0.5, 0.8  # of BM25
_PREFIX = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception|Warning)\b:?\s*)+")
_WORD = re.compile(r"[a-z0-9]+")
# lunr's stemmers in Python and JavaScript treat a "y" after a vowel differently.
_VOWEL_Y = re.compile(r"([aeiou])ys?$")


def terms_of(text: str, synonyms: dict[str, str]) -> list[str]:
    """The words of a text as the index has them, without the names of exceptions before it."""
    words = _WORD.findall(_PREFIX.sub("", flat(text)).lower())
    return [_VOWEL_Y.sub(r"\1i", synonyms.get(word, word)) for word in words]


def build_index(
    failures: Iterable["Failure"], pages: Iterable["Page"], synonyms: dict[str, str]
) -> Any:
    """A lunr index that finds failures by their code, and pages by their path."""
    with needed_for("finding a text by its words"):
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
    return builder.build()


def _document(key: str, fields: dict[str, str], synonyms: dict[str, str]) -> dict[str, str]:
    """The fields of the index, with the words that a search for them would have."""
    document = {"key": key}
    for name in _BOOST:
        document[name] = " ".join(terms_of(fields.get(name, ""), synonyms))
    return document
