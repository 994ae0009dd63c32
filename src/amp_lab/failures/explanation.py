"""Find the failure that a message, a log or a description is about."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from amp_lab.failures.graph_breaks import graph_break
from amp_lab.failures.patterns import essential, flat
from amp_lab.failures.ranking import facts_together, ranked
from amp_lab.failures.reference import Failure, Page, Pattern, Reference, load_reference
from amp_lab.failures.words import stems_of, terms_of, words_to_search

MOST = 3  # failures, or pages, that are shown
MAX_CHARACTERS = 1_000_000  # of a log, from its end
_LONGEST_QUESTION = 3000  # characters: a longer text is a log
_LONGEST_CONTEXT = 6000  # characters before the end of a text in which clues are searched
_LONGEST_MESSAGE = 400  # characters after the name of an error: what follows is other output
# A description may have no word of the subject. It is then known in two cases: it has three facts
# of a failure, such as two devices and a difference; or it has fewer facts, and shares six words
# and two fifths of its words with the failure. Found with descriptions of other trouble.
_FACTS_OF_A_WINNER = 3
_WORDS_OF_A_WINNER = 6
_SHARE_OF_A_WINNER = 0.4
# An error that matches no known message needs a word of the subject. It also has to share this part
# of its words with one failure; a smaller part may be chance.
_SHARE_OF_A_PRINTED_ERROR = 0.75
# A long text without an error or an alarm, such as a configuration, may have a word of the subject
# by chance. So it has to share this part of its words with one failure, or have its facts.
_WORDS_OF_A_LONG_TEXT = 24
_SHARE_OF_A_LONG_TEXT = 0.33
# The name of an error or a warning, but not in code that raises it, or an error that C++ code of
# torch logs.
_PRINTED = re.compile(
    r"(?<![A-Za-z_.])(?<!raise )[A-Za-z_.]*(?:Error|Exception|Warning|Unsupported)\b ?[:(]"
    r"|\[E(?:\d{4})? "
)
_ERROR = re.compile(r"(?<![A-Za-z_.])[A-Za-z_.]*(?:Error|Exception)\b ?:")
_CODE = re.compile(r"(?<![A-Za-z0-9_])AMP[0-9]{4}(?![A-Za-z0-9_])", re.IGNORECASE)
_LOGGED_NUMBER = re.compile(r"[\w/]+ ?[:=] ?-?\d[\w.:+-]*,?")  # such as `lr: 1.0e-03` in a log
_LOG_LINE = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG)\b|\[[IWE]\]|\b\d\d:\d\d:\d\d")
_LINES_OF_A_LOG = 2  # marks of log lines
_OPTION = re.compile(r"(?<!\S)--?[a-zA-Z][\w-]*(?:[= ](?!-)\S+)?")  # such as `--epochs 3`
_OPTIONS_OF_A_COMMAND = 4  # fewer of them may be what a description is about
_NUMBERS_OF_A_LOG = 4  # fewer of them may be settings, such as `precision=16`
# A frame of a traceback: Python's own, then IPython's.
_FRAME = re.compile(
    r"""^[ \t│]*File\ "(?P<file>[^"\n]+)",\ line\ (?P<line>\d+)(?:,\ in\ (?P<function>[^\n]+))?
        (?:\n(?P<code>[^\n]*))?
      | ^[ \t│]*(?:File\ )?(?P<ipython>Cell\ In\[\d+\]|[^\s:"]+\.py)(?:,\ line\ |:)(?P<number>\d+)
    """,
    re.MULTILINE | re.VERBOSE,
)
_LIBRARY = re.compile(r"site-packages|dist-packages|[\\/]lib[\\/]python\d|<frozen|<string>|<eval")


@dataclass(frozen=True)
class OwnLine:
    """The last line of your code in a traceback."""

    file: str
    line: int
    function: str = ""
    code: str = ""


@dataclass(frozen=True)
class Explanation:
    """The result of a search: the failures that match a text, or else the nearest pages."""

    failures: tuple[Failure, ...]
    """Best first; empty if the text is unknown."""
    nearest: tuple[Failure | Page, ...] = ()
    """For an unknown text, the pages that have the most words in common with it."""
    own_line: OwnLine | None = None
    by_message: bool = False
    """Whether the text has a known code or message; if not, the failures were found by words."""


def explain(text: str) -> list[Failure]:
    """Find the failures that match an error message, a log or the description of a symptom.

    `explain` first looks for a code such as ``AMP0004``, which the tools print at the end of their
    advice. Then it looks for a known message. Dtypes, numbers, names, prefixes and line breaks may
    differ from the known message. In a log, the last error counts most. A description is compared
    with the reference by its words (BM25, by lunr), then by the facts that decide between similar
    failures, such as the device.

    Args:
        text: The code of a failure, an error message, a warning, a whole log, or a symptom in your
            own words. Only the last million characters are read.

    Returns:
        At most three failures, the best match first. The list is empty if the text is unknown.

    Raises:
        TypeError: If `text` is not a string. For an exception, pass ``str(error)``.

    Example:
        found = explain("RuntimeError: expected scalar type BFloat16 but found Float")
        print(found[0].code, found[0].cure)
    """
    if not isinstance(text, str):
        raise TypeError(f"explain takes a string, not {type(text).__name__}: pass str(error)")
    return list(read_explanation(text).failures)


def read_explanation(text: str, reference: Reference | None = None) -> Explanation:
    """Find failures as `explain` does, and also the nearest pages and your line in a traceback."""
    reference = reference or load_reference()
    text = text[-MAX_CHARACTERS:]
    own_line = last_own_line(text)
    question = question_of(text)
    recognised = _by_code(text, reference)
    recognised += [found for found in _by_message(text, reference) if found not in recognised]
    if has_subject(question, reference):
        break_failure = graph_break(text)  # None if the text names no graph break
        if break_failure is not None:
            recognised.append(break_failure)
    if recognised:
        return Explanation(tuple(recognised[:MOST]), own_line=own_line, by_message=True)
    results = _by_words(question, reference)
    failures = [found for found in results if found["ref"] in reference.failures]
    failures = ranked(question, failures, reference)
    if failures and _is_about_precision(question, failures, reference):
        best = tuple(reference.failures[found["ref"]] for found in failures[:MOST])
        return Explanation(best, own_line=own_line)
    nearest: list[Failure | Page] = []
    for found in results[:MOST]:
        key = found["ref"]
        nearest.append(reference.failures.get(key) or reference.pages[key])
    return Explanation((), nearest=tuple(nearest), own_line=own_line)


def _by_code(text: str, reference: Reference) -> list[Failure]:
    """The failures whose codes stand in the text, in the order of the text, each once."""
    codes = dict.fromkeys(code.upper() for code in _CODE.findall(flat(text)))
    return [reference.failures[code] for code in codes if code in reference.failures]


class _Match(NamedTuple):
    """A message that stands in a text."""

    pattern: Pattern
    is_in_last_error: bool
    is_its_start: bool  # right behind the name of the last error
    is_exact: bool  # with the dtypes of the text

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """The larger, the better: in the last error, at its start, with more common characters."""
        characters = self.pattern.literal
        if self.is_exact:
            characters += 10
        return self.is_in_last_error, self.is_its_start, characters


def _by_message(text: str, reference: Reference) -> list[Failure]:
    """The failures whose messages stand in the text, best first.

    A message in the last error comes before one that was printed earlier, such as a warning. A
    message with which this error starts comes before one that was printed after it. Then the
    message with the most characters in common comes first. If the last error is about another
    subject, warnings before the first error do not count.
    """
    line = flat(text)
    errors = [error.span() for error in _ERROR.finditer(line)] or [(0, -2)]
    last_error = errors[-1][0]  # its position
    start_of_message = errors[-1][1] + 1
    begin = errors[0][0] if _is_other(line[last_error:], reference) else 0
    matches: list[_Match] = []
    lower = line.lower()
    essential_line = essential(line)
    for pattern in reference.patterns:
        if pattern.fragment not in lower:
            continue
        if pattern.general and not (
            has_subject(line, reference) or _by_clues(pattern.code, lower, reference)
        ):
            continue
        places = [found.span() for found in re.finditer(pattern.regex, line, re.IGNORECASE)]
        if places and places[-1][1] > begin:
            is_in_last_error = places[-1][1] > last_error
            is_its_start = any(start <= start_of_message < end for start, end in places)
            is_exact = pattern.exact != "" and pattern.exact in essential_line
            matches.append(_Match(pattern, is_in_last_error, is_its_start, is_exact))
    # Messages that differ only in their dtypes: the one with the dtypes of the text counts.
    exact_regexes = {match.pattern.regex for match in matches if match.is_exact}
    best_ranks: dict[str, tuple[bool, bool, int]] = {}  # by the code of a failure
    for match in matches:
        if match.is_exact or match.pattern.regex not in exact_regexes:
            code = match.pattern.code
            best_ranks[code] = max(match.rank, best_ranks.get(code, (False, False, 0)))
    codes = sorted(best_ranks)
    codes.sort(key=lambda code: best_ranks[code], reverse=True)  # of equal ranks, in this order
    if codes:
        codes = list(dict.fromkeys(_by_clues(codes[0], lower, reference) + codes))
    return [reference.failures[code] for code in codes]


def _by_clues(first: str, lower: str, reference: Reference) -> list[str]:
    """The failures to which the rest of the text points, if the message of `first` has many causes.

    For example, `expected scalar type Half but found Float` in a text with `lora` and `generate`.
    The failure with the longest clue comes first.
    """
    context = lower[-_LONGEST_CONTEXT:]
    if any(message in context for message in reference.one_cause):
        return []
    lengths: dict[str, int] = {}
    for code, clues in reference.clues.get(first, {}).items():
        for clue in clues:
            if all(part in context for part in clue.split()):
                lengths[code] = max(len(clue), lengths.get(code, 0))
    return sorted(lengths, key=lambda code: (-lengths[code], code))


def question_of(text: str) -> str:
    """What is searched for by its words: the last error or warning, or the whole of a short text.

    The files of a traceback, and the numbers and the progress of a run, would only add words that
    mean nothing.
    """
    line = flat(text)
    printed = [found.start() for found in _PRINTED.finditer(line)]
    if printed:
        return line[printed[-1] :][:_LONGEST_MESSAGE]
    if len(line) > _LONGEST_QUESTION:
        return ""
    if len(_OPTION.findall(line)) >= _OPTIONS_OF_A_COMMAND:
        line = _OPTION.sub(" ", line)
    is_log = len(_LOGGED_NUMBER.findall(line)) >= _NUMBERS_OF_A_LOG
    return _LOGGED_NUMBER.sub(" ", line) if is_log else line


def _by_words(question: str, reference: Reference) -> list[dict[str, Any]]:
    """What the index finds for the words, best first; results of equal score by their key.

    Each result of lunr has ``ref``, the key of a failure or page, ``score``, and ``match_data``,
    whose `metadata` has an entry for each word in common.
    """
    words = words_to_search(question, reference.synonyms)
    results: list[dict[str, Any]] = reference.index.search(" ".join(words)) if words else []
    results.sort(key=lambda result: (-round(result["score"], 4), result["ref"]))
    return results


def has_subject(line: str, reference: Reference) -> bool:
    """Whether the text has a word of the subject, such as fp16, NaN or autocast."""
    return not reference.subject_words.isdisjoint(terms_of(line, reference.synonyms))


def _is_about_precision(
    question: str, failures: list[dict[str, Any]], reference: Reference
) -> bool:
    """Whether the question is about precision: it has a word such as fp16, NaN or autocast.

    A printed error, or a log without an alarm such as NaN, has to be like the best of the failures
    as well. So has a long text, to a lesser degree. A description without a word of the subject
    also has to have the facts that point to this failure.
    """
    terms = terms_of(question, reference.synonyms)
    names_subject = not reference.subject_words.isdisjoint(terms)
    has_alarm = not reference.alarms.isdisjoint(terms)
    words = len(words_to_search(question, reference.synonyms))
    best = failures[0]
    common = len(best["match_data"].metadata)
    has_message = _PRINTED.search(question) is not None or _is_other(question, reference)
    is_log = len(_LOG_LINE.findall(question)) >= _LINES_OF_A_LOG
    if has_message or (is_log and not has_alarm):
        return names_subject and common >= _SHARE_OF_A_PRINTED_ERROR * words
    if has_alarm:
        return True
    facts = facts_together(best["ref"], stems_of(terms), reference)
    if names_subject:
        is_long = words >= _WORDS_OF_A_LONG_TEXT
        return facts > 0 or not is_long or common >= _SHARE_OF_A_LONG_TEXT * words
    if facts >= _FACTS_OF_A_WINNER:
        return True
    return facts > 0 and common >= max(_WORDS_OF_A_WINNER, _SHARE_OF_A_WINNER * words)


def _is_other(line: str, reference: Reference) -> bool:
    """Whether the text has a message that is not about precision."""
    lower = line.lower()
    return any(message in lower for message in reference.other_subjects)


def last_own_line(text: str) -> OwnLine | None:
    """The last frame of a traceback that is in no library; None if there is none."""
    last = None
    for frame in _FRAME.finditer(text):
        file = frame["file"] or frame["ipython"]
        if _LIBRARY.search(file):
            continue
        code = (frame["code"] or "").strip()
        number = int(frame["line"] or frame["number"])
        last = OwnLine(file, number, (frame["function"] or "").strip(), code)
    return last
