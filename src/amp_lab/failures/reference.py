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
    """The code of the failure, such as ``AMP0004``. It never changes."""
    title: str
    """A short description of the failure."""
    cause: str
    """The cause of the failure."""
    cure: str
    """The way to fix the failure."""
    page: str
    """The section with more detail: a path in the repository with an anchor."""
    unsafe: str = ""
    """An unsafe cure that people find elsewhere, and the reason why it is unsafe; empty if there is
    none."""
    messages: tuple[str, ...] = ()
    """The messages of this failure, with placeholders such as ``{dtype}``."""
    symptoms: tuple[str, ...] = ()
    """What people notice if no message is printed."""
    words: str = ""
    """Other words that people search for."""
    general: bool = False
    """Whether the messages often have other causes. Such a message counts only if the text also has
    a subject word or a clue."""
    torch: str = ""
    """The versions of torch with this failure; empty if all supported versions have it."""
    sources: tuple[str, ...] = ()
    """Addresses of reports and of documentation."""


@dataclass(frozen=True)
class Page:
    """A page that is not about one failure, such as a notebook."""

    title: str
    page: str
    words: str
    """The headings of the page, and the questions that the page answers."""


@dataclass(frozen=True)
class Reference:
    """All failures and pages, with the data for the search."""

    failures: dict[str, Failure]
    """By code."""
    patterns: tuple[Pattern, ...]
    pages: dict[str, Page]
    """By path."""
    subject_words: frozenset[str]
    """Subject words. A message about precision has at least one, in the form that `terms_of`
    returns."""
    alarms: frozenset[str]
    """The subject words that a log has only if something goes wrong, such as NaN."""
    synonyms: dict[str, str]
    """The index word for each synonym that people type."""
    clues: dict[str, dict[str, list[str]]]
    """For a failure whose messages have many causes: by the code of each cause, the clues to it.
    All parts of a clue stand in the text, in any order."""
    one_cause: list[str]
    """Parts of messages, in lower case, that have one cause: no clue to another counts."""
    other_subjects: list[str]
    """Parts of messages, in lower case, that have nothing to do with precision."""
    named: dict[str, dict[str, list[str]]]
    """Devices, frameworks and other things that a description names: the ``words`` for each, and
    the ``codes`` of the failures that have one of them."""
    described: dict[str, list[list[list[str]]]]
    """By code, the facts that point to a failure when they stand together in a description: each
    is a list of parts, and each part a list of stems of which one is in the text. If a part begins
    with ``"!"``, none of its other stems is in the text."""
    contradicted: dict[str, list[list[list[str]]]]
    """By code, the facts that speak against a failure when they stand together; see `described`."""

    @functools.cached_property
    def index(self) -> Any:
        """The lunr index of failures by code and pages by path, for texts without a message."""
        return build_index(self.failures.values(), self.pages.values(), self.synonyms)


@functools.cache
def load_reference() -> Reference:
    """Read the reference that is part of the package."""
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
        alarms=frozenset(data["alarms"]),
        synonyms=data["synonyms"],
        clues=data["clues"],
        one_cause=data["one_cause"],
        other_subjects=data["other_subjects"],
        named=data["named"],
        described=data["described"],
        contradicted=data["contradicted"],
    )


def _frozen(value: Any) -> Any:
    """The value; a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value
