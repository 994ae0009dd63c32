"""Gather the failures into the reference that `amp-lab explain` and the site read.

    python tools/write_failures.py           write what is generated
    python tools/write_failures.py --check   fail if it is out of date

A failure is a section of one of the notebooks 08a, 08b and so on. Below the heading stand its code
and a comment in TOML, which nobody sees who reads the notebook:

    ## A mask value does not fit into fp16

    `AMP0004` <!-- failure
    messages = ["value cannot be converted to type c10::Half without overflow"]
    -->

- `messages`: as torch prints them; the cells of the section have to produce each. Other dtypes and
  numbers match too, and `{dtype}`, `{n}`, `{name}` and `{any}` stand for what else differs; see
  `amp_lab.failures.patterns` for all of them.
- `quoted`: further messages that no cell can produce, such as those of a GPU.
- `symptoms`: what people describe where there is no message.
- `words`: other words that people search for.
- `torch`: which versions raise it, if not all do.
- `general`: true if its messages often have causes that are not about precision. They then count
  only in a text that has a word of the subject, such as autocast, or a clue of clues.toml.

The first paragraphs after **Why.**, **The fix.** and **Not this.** are the cause, the cure, and a
cure that is unsafe.

`notebooks/course/asked_words.toml` has more words for a failure, in which people ask about it.
`notebooks/course/clues.toml` says which failure is meant if a message has many causes, and which
facts decide between failures that are described in similar words.

Failures that no cell can show, or that another page explains, are rows of a file with the name of
the notebook in `notebooks/course/other_failures/`. They have the same keys and `title`, `cause`,
`cure`, `unsafe`, `sources` and `page`, where more is written.

Generated are the files in `src/amp_lab/failures/data/`, one for each notebook and one for the words
of the search, and the index in notebook 08.
"""

import argparse
import functools
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import build_pairs
from amp_lab.failures.words import stems_of, terms_of

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "src" / "amp_lab" / "failures" / "data"
SEARCH = DATA / "search.json"
OTHERS = ROOT / "notebooks" / "course" / "other_failures"
VOCABULARY = ROOT / "notebooks" / "course" / "search_words.toml"
ASKED = ROOT / "notebooks" / "course" / "asked_words.toml"
CLUES = ROOT / "notebooks" / "course" / "clues.toml"
INDEX = ROOT / "notebooks" / "08_when_amp_breaks.py"
PAGES = ("docs/*.md", "README.md", "CHEATSHEET.md", "data/README.md")

# What Markdown has in a notebook or a page, each with its groups.
_HEADING = re.compile(r"^##+ (.+?)$", re.MULTILINE)  # the text of "## Text" or "### Text"
# The code and the TOML of "`AMP0004` <!-- failure", some lines of TOML, "-->".
_ENTRY = re.compile(r"^`(AMP\d{4})` <!-- failure\n(.*?)^-->", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")  # the text of "[text](address)"
_ADDRESS = re.compile(r"\]\((https?://[^)\s]+)\)")  # the address of such a link, if on the web
_BEGIN, _END = "# <!-- index of failures -->\n", "# <!-- end of the index -->\n"
_KEYS = {"messages", "quoted", "symptoms", "words", "torch", "general"}


class FailureError(Exception):
    """An entry that is incomplete, or that has a code twice."""


class Entry(NamedTuple):
    """A failure as it is written: a section of a notebook, or a row in `other_failures/`."""

    code: str  # such as ``AMP0004``
    title: str
    page: str  # in the repository, with an anchor
    notebook: str  # the name of its file, without suffix
    area: str  # the title of its notebook
    data: dict[str, Any]  # its TOML: the keys in `_KEYS`
    cause: str
    cure: str
    unsafe: str
    sources: list[str]


def entries() -> list[Entry]:
    """Every failure, in the order of the notebooks; raises `FailureError`."""
    failures = []
    for source in series():
        failures += in_notebook(source)
        failures += others(source)
    codes = [entry.code for entry in failures]
    for code in codes:
        if codes.count(code) > 1:
            raise FailureError(f"{code} stands twice")
    return failures


def series() -> list[Path]:
    """The notebooks on failures, without the index."""
    return [source for source in build_pairs.find(["08"]) if source != INDEX]


def in_notebook(source: Path) -> list[Entry]:
    """The failures that are sections of a notebook."""
    text = _markdown(source)
    area = _title(text)
    failures = []
    _, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)  # without the introduction
    for section in sections:
        heading = section.partition("\n")[0].removeprefix("## ")
        comment = _ENTRY.search(section)
        if comment is None:  # the section is not about a failure
            continue
        code, toml = comment.groups()
        data = tomllib.loads(toml)
        cause = _part(section, "Why")
        cure = _part(section, "The fix")
        if not cause or not cure:
            raise FailureError(f"{source.name}, {heading}: needs **Why.** and **The fix.**")
        _check(code, data)
        failures.append(
            Entry(
                code=code,
                title=heading,
                page=f"notebooks/{source.stem}.ipynb#{heading.replace(' ', '-')}",
                notebook=source.stem,
                area=area,
                data=data,
                cause=cause,
                cure=cure,
                unsafe=_part(section, "Not this"),
                sources=_ADDRESS.findall(section),
            )
        )
    return failures


def others(source: Path) -> list[Entry]:
    """The failures of the notebook's area that are not sections of it."""
    path = OTHERS / f"{source.stem}.toml"
    if not path.exists():
        return []
    area = _title(_markdown(source))
    failures = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["failure"]:
        data = {key: row[key] for key in _KEYS & set(row)}
        _check(row["code"], data)
        failures.append(
            Entry(
                code=row["code"],
                title=row["title"],
                page=row["page"],
                notebook=source.stem,
                area=area,
                data=data,
                cause=row["cause"],
                cure=row["cure"],
                unsafe=row.get("unsafe", ""),
                sources=row.get("sources", []),
            )
        )
    return failures


def _markdown(source: Path) -> str:
    """The text of a notebook's Markdown cells."""
    cells = build_pairs.read_source(source).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def _title(markdown: str) -> str:
    """The heading in the first line: ``Title`` of ``# Title``."""
    return markdown.partition("\n")[0].removeprefix("# ")


def _check(code: str, data: dict[str, Any]) -> None:
    """Raise `FailureError` for an entry that cannot be found, or with an unknown key."""
    if set(data) - _KEYS:
        raise FailureError(f"{code}: no such key: {set(data) - _KEYS}")
    if not data.get("messages") and not data.get("quoted") and not data.get("symptoms"):
        raise FailureError(f"{code}: give a message or a symptom")


def _part(section: str, name: str) -> str:
    """The paragraph that begins with a name such as **Why.**, as plain text; "" without one."""
    begin = rf"^\*\*{name}\.\*\* "
    end = r"(?:\n\s*\n|\Z)"  # an empty line, or the end of the section
    match = re.search(f"{begin}(.+?){end}", section, re.MULTILINE | re.DOTALL)
    return _plain(match[1]) if match else ""


def _plain(markdown: str) -> str:
    """Markdown without comments, links and emphasis, on one line."""
    text = _COMMENT.sub("", markdown)
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"\*+([^*]+)\*+", r"\1", text)  # the text of *text* and **text**
    text = text.replace("&nbsp;", " ")
    return " ".join(text.split())


def pages() -> list[dict[str, str]]:
    """The pages that are not about one failure: path, title and headings."""
    result = []
    for source in build_pairs.find():
        if source not in series():
            result.append(_page(f"notebooks/{source.stem}.ipynb", _markdown(source)))
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            address = path.relative_to(ROOT).as_posix()
            result.append(_page(address, path.read_text(encoding="utf-8")))
    return result


def _page(path: str, markdown: str) -> dict[str, str]:
    """Path, title and headings of a page with this text."""
    title = path
    match = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    if match:
        title = match[1]
    headings = " ".join(_HEADING.findall(markdown))
    return {"page": path, "title": title, "headings": _plain(headings)}


def reference() -> dict[str, Any]:
    """The reference as `amp_lab.failures.reference.read_data` returns it."""
    return {"failures": [_row(entry) for entry in entries()], **search_data()}


def search_data() -> dict[str, Any]:
    """The data of `search.json`: pages, and the words of the search."""
    vocabulary = tomllib.loads(VOCABULARY.read_text(encoding="utf-8"))
    questions = vocabulary["questions"]
    synonyms = {}  # for each word or phrase, the word that is searched for instead
    for table in ("synonyms", "phrases"):
        for word, others_of_word in vocabulary[table].items():
            synonyms |= dict.fromkeys(others_of_word, word)
    all_pages = []
    for page in pages():
        path = page["page"]
        without_suffix = path.rpartition(".")[0]
        questions_of_page = questions.get(without_suffix, [])
        words = " ".join([page["headings"], *questions_of_page])
        all_pages.append({"page": path, "title": page["title"], "words": words})
    return {
        "pages": all_pages,
        "subject_words": vocabulary["subject_words"],
        "alarms": vocabulary["alarms"],
        "synonyms": synonyms,
        "clues": clues(),
        "one_cause": _clues_file()["one_cause"]["messages"],
        "other_subjects": _clues_file()["other_subjects"]["messages"],
        "named": named(synonyms),
        "described": facts_of("described", synonyms),
        "contradicted": facts_of("contradicted", synonyms),
        "questions": questions,
    }


def clues() -> dict[str, dict[str, list[str]]]:
    """The clues of each failure whose messages have many causes."""
    found = {}
    for family in _clues_file()["family"]:
        causes = {name: parts for name, parts in family.items() if name != "messages_of"}
        for code in family["messages_of"]:
            found[code] = {cause: parts for cause, parts in causes.items() if cause != code}
    return found


def named(synonyms: dict[str, str]) -> dict[str, dict[str, list[str]]]:
    """What a description may name: the words for it, and the codes of the failures with one."""
    words_of_failures = {}
    for entry in entries():
        row = _row(entry)
        texts = [row["title"], row["cause"], row["cure"], row.get("words", "")]
        text = " ".join([*texts, *row.get("symptoms", []), *row.get("messages", [])])
        words_of_failures[entry.code] = set(terms_of(text, synonyms))
    found = {}
    for name, words in _clues_file()["named"].items():
        terms = sorted({_term(word, synonyms) for word in words})
        codes = [code for code, has in words_of_failures.items() if not has.isdisjoint(terms)]
        found[name] = {"words": terms, "codes": codes}
    return found


def facts_of(table: str, synonyms: dict[str, str]) -> dict[str, list[list[list[str]]]]:
    """The facts of a table of clues.toml that stand together, by the code of a failure."""
    found = {}
    for code, descriptions in _clues_file()[table].items():
        found[code] = [_parts(description, synonyms) for description in descriptions]
    return found


def _parts(description: str, synonyms: dict[str, str]) -> list[list[str]]:
    """The stems of each part of ``"slow cpu|gtx16 !tpu"``; a ``"!"`` before those of `!tpu`."""
    parts = []
    for part in description.split():
        words = part.removeprefix("!").split("|")
        stems = sorted(stems_of(_term(word, synonyms) for word in words))
        parts.append(["!", *stems] if part.startswith("!") else stems)
    return parts


def _term(word: str, synonyms: dict[str, str]) -> str:
    """The word as the index has it; raises `FailureError` if the index has several for it."""
    terms = terms_of(word, synonyms)
    if len(terms) != 1:
        raise FailureError(f"clues.toml: the index divides {word!r} into {terms}, name one of them")
    return terms[0]


@functools.cache
def _clues_file() -> dict[str, Any]:
    """The content of `clues.toml`."""
    return tomllib.loads(CLUES.read_text(encoding="utf-8"))


@functools.cache
def asked_words() -> dict[str, str]:
    """Further words that people search for, by the code of the failure."""
    return tomllib.loads(ASKED.read_text(encoding="utf-8"))


def _row(entry: Entry) -> dict[str, Any]:
    """The failure as `amp_lab.failures.Failure` reads it, without empty values."""
    words = [entry.data.get("words", ""), asked_words().get(entry.code, "")]
    row = {
        "code": entry.code,
        "title": entry.title,
        "cause": entry.cause,
        "cure": entry.cure,
        "unsafe": entry.unsafe,
        "page": entry.page,
        "messages": _messages(entry),
        "symptoms": entry.data.get("symptoms", []),
        "words": " ".join(words).strip(),
        "general": entry.data.get("general", False),
        "torch": entry.data.get("torch", ""),
        "sources": list(dict.fromkeys(entry.sources)),  # each once
    }
    return {name: value for name, value in row.items() if value}


def _messages(entry: Entry) -> list[str]:
    """All messages of a failure."""
    return [*entry.data.get("messages", []), *entry.data.get("quoted", [])]


def index_of_failures(failures: list[Entry]) -> str:
    """The tables of notebook 08, as lines of its `.py`: a table for each area."""
    lines = []
    for area in dict.fromkeys(entry.area for entry in failures):  # each once
        lines += ["", f"### {area}", "", "| what goes wrong | what you see |", "|---|---|"]
        for entry in failures:
            if entry.area == area:
                lines.append(f"| {_link(entry)} | {_what_you_see(entry)} |")
    comments = [f"# {line}".rstrip() + "\n" for line in lines]
    return "".join(comments)


def _link(entry: Entry) -> str:
    """A Markdown link to a failure, from notebook 08, and the code of the failure."""
    if entry.page.startswith("notebooks/"):
        address = entry.page.removeprefix("notebooks/")
    else:
        address = f"../{entry.page}"
    return f"[{entry.title}]({address}) `{entry.code}`"


def _what_you_see(entry: Entry) -> str:
    """The first message of a failure, or its first symptom, for a cell of a table."""
    messages = _messages(entry)
    if messages:
        readable = re.sub(r"\{\w+\}", "…", messages[0])  # a placeholder, such as {dtype}
        text = f"`` {readable} ``"
    else:
        text = entry.data["symptoms"][0]
    return text.replace("|", "\\|")


def generated() -> dict[Path, str]:
    """The text of each file that is generated."""
    failures = entries()
    files = {INDEX: _notebook_with_index(failures)}
    for source in series():
        rows = [_row(entry) for entry in failures if entry.notebook == source.stem]
        files[DATA / f"{source.stem}.json"] = _one_row_a_line(rows) + "\n"
    parts = []
    for name, value in search_data().items():
        text = json.dumps(value, ensure_ascii=False)
        if name == "pages":
            text = _one_row_a_line(value)
        parts.append(f"{json.dumps(name)}: {text}")
    files[SEARCH] = "{\n" + ",\n".join(parts) + "\n}\n"
    return files


def _notebook_with_index(failures: list[Entry]) -> str:
    """The text of notebook 08, with a new index between its two marks."""
    text = INDEX.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    if not after:
        raise FailureError(f"{INDEX.name}: no place for the index between {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}{index_of_failures(failures)}{_END}{after}"


def _one_row_a_line(rows: list[dict[str, Any]]) -> str:
    """JSON with a line for each failure or page, so that a change of one is a line in a diff."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with ``--check`` compare them; return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    options = parser.parse_args(arguments)
    try:
        files = generated()
    except FailureError as error:
        print(f"write_failures: {error}", file=sys.stderr)
        return 2
    stale = []
    for path, text in files.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    unused = [path for path in DATA.glob("*.json") if path not in files]  # of a renamed notebook
    if options.check:
        for path in [*stale, *unused]:
            print(f"{path.relative_to(ROOT)} is out of date: python tools/write_failures.py")
        return 1 if stale or unused else 0
    for path in unused:
        path.unlink()
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
