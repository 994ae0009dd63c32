"""The reference: every failure that has a code, with its messages, its cause and its cure.

The failures are written in notebooks 08a to 08h and in `notebooks/course/other_failures/`.
`tools/write_failures.py` gathers them into the folder `data`, which this module and the site read:
a file for each of the notebooks, and `search.json` for pages and words.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from amp_lab.failures.patterns import Pattern, pattern
from amp_lab.failures.words import build_index

SEARCH = "search.json"
"""The file of pages and words; each other file has the failures of a notebook."""


@dataclass(frozen=True)
class Failure:
    """A failure of the reference."""

    code: str
    """Its stable code, such as ``AMP0004``."""
    title: str
    """What goes wrong, in a few words."""
    cause: str
    """Why it happens."""
    cure: str
    """What to do."""
    page: str
    """Where more is written: a path in the repository, with the anchor of the section."""
    unsafe: str = ""
    """A cure that people find elsewhere, and why it is unsafe; empty if there is none."""
    messages: tuple[str, ...] = ()
    """The messages that lead here, with placeholders such as ``{dtype}``."""
    symptoms: tuple[str, ...] = ()
    """What people see and describe where no message is printed."""
    words: str = ""
    """Other words that people search for."""
    general: bool = False
    """Whether its messages often have other causes, so that they count only beside a word of the
    subject."""
    torch: str = ""
    """Which versions of torch raise it; empty if all supported versions do."""
    sources: tuple[str, ...] = ()
    """Addresses of reports and of documentation."""


@dataclass(frozen=True)
class Page:
    """A page that is not about one failure, such as a notebook."""

    title: str
    page: str
    words: str
    """Its headings, and the questions that it answers."""


@dataclass(frozen=True)
class Reference:
    """All failures and pages, and what finds them."""

    failures: dict[str, Failure]
    """By code."""
    patterns: tuple[Pattern, ...]
    pages: dict[str, Page]
    """By path."""
    subject_words: frozenset[str]
    """Words of which a message about precision has at least one, as `terms_of` gives them."""
    symptom_words: frozenset[str]
    """Further words of which a description without a message may have one instead."""
    synonyms: dict[str, str]
    """A word that people type, and the word that the index has for it."""

    @functools.cached_property
    def index(self) -> Any:
        """A lunr index of failures by code and pages by path. A message is found without it."""
        return build_index(self.failures.values(), self.pages.values(), self.synonyms)


@functools.cache
def load_reference() -> Reference:
    """Read the reference that comes with the package."""
    return reference_from(read_data(resources.files("amp_lab.failures").joinpath("data")))


def read_data(folder: Traversable) -> dict[str, Any]:
    """Read the files of the reference: the content of `search.json`, with all ``failures``."""
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(".json")}
    data = json.loads(files.pop(SEARCH).read_text(encoding="utf-8"))
    data["failures"] = []
    for name in sorted(files):  # in the order of the notebooks
        data["failures"] += json.loads(files[name].read_text(encoding="utf-8"))
    return data


def reference_from(data: dict[str, Any]) -> Reference:
    """Make the reference from what `read_data` returns."""
    failures = {}
    patterns = []
    for row in data["failures"]:
        failure = Failure(**{name: _frozen(value) for name, value in row.items()})
        failures[failure.code] = failure
        for message in failure.messages:
            patterns.append(pattern(failure.code, message, general=failure.general))
    return Reference(
        failures=failures,
        patterns=tuple(patterns),
        pages={row["page"]: Page(**row) for row in data["pages"]},
        subject_words=frozenset(data["subject_words"]),
        symptom_words=frozenset(data["symptom_words"]),
        synonyms=data["synonyms"],
    )


def _frozen(value: Any) -> Any:
    """The value; a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value
