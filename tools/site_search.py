"""The search of the site: an index of its sections that does not need every word (lunr, BM25).

Sphinx's own search finds only pages that have all words, so a pasted message finds nothing.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import failure_pages

# And how much each counts.
_FIELDS = {"title": 1, "heading": 1, "messages": 2, "words": 1, "text": 1}
_B, _K1 = 0.3, 0.6  # of BM25; found with practice queries
_EXCERPT = 180  # characters
_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,3}) +(.+?) *#*$", re.MULTILINE)
_NOISE = re.compile(
    r"<!--.*?-->|<[^>]+>|^---\n.*?^---\n|\{[\w:]+\}|-{3,}", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Section:
    """A section of a page: what is found, and where it leads."""

    page: str  # its path on the site
    anchor: str
    title: str  # of the page
    heading: str
    text: str
    excerpt: str  # shown below the title
    messages: str = ""  # of a page about a failure; or the questions that a page answers
    words: str = ""  # in which people ask about a failure; no page shows them


def data_script(root: Path, sources: Path) -> str:
    """The index and its sections as a script, since a page from a file cannot fetch data."""
    import lunr

    from amp_lab.failures.words import damp_rare_words, terms_of

    reference = failure_pages.read_reference(root)
    all_sections = sections(sources, reference)
    documents = []
    for number, section in enumerate(all_sections):
        fields = {name: getattr(section, name) for name in _FIELDS}
        terms = {
            name: " ".join(terms_of(text, reference["synonyms"])) for name, text in fields.items()
        }
        documents.append({"key": str(number)} | terms)
    builder = lunr.get_default_builder()
    builder.ref("key")
    builder.b(_B)
    builder.k1(_K1)
    for name, boost in _FIELDS.items():
        builder.field(name, boost)
    for document in documents:
        builder.add(document)
    index = builder.build()
    damp_rare_words(index, builder.document_count)
    shown = [[s.page, s.anchor, s.title, s.heading, s.excerpt] for s in all_sections]
    data = json.dumps({"sections": shown, "index": index.serialize()}, ensure_ascii=False)
    return f'"use strict";\nconst AmpSearchData = {data};\n'


def sections(sources: Path, reference: dict[str, Any]) -> list[Section]:
    """The sections of all pages among the sources of the site."""
    failures = {failure["code"]: failure for failure in reference["failures"]}
    questions = reference["questions"]
    all_sections: list[Section] = []
    for path in sorted([*sources.rglob("*.md"), *sources.rglob("*.ipynb")]):
        name = path.relative_to(sources).as_posix()
        page = re.sub(r"\.(md|ipynb)$", ".html", name)
        failure = failures.get(path.stem)
        if failure is not None:
            all_sections.append(_of_failure(page, failure, _markdown(path)))
        elif not name.startswith("notebooks/08"):  # its failures have pages of their own
            questions_of_page = questions.get(page.removesuffix(".html"), [])
            sections_of_page = _of_page(page, _markdown(path), " ".join(questions_of_page))
            all_sections += sections_of_page
            # A question is also searched alone, so that the other questions do not dilute it.
            first = sections_of_page[0]
            for question in questions_of_page:
                all_sections.append(replace(first, heading="", text="", messages=question))
    return all_sections


def _of_failure(page: str, failure: dict[str, Any], markdown: str) -> Section:
    """A page about a failure is one section."""
    return Section(
        page=page,
        anchor="",
        title=failure["title"],
        heading=" ".join(failure["symptoms"]),
        messages=" ".join(failure["messages"]),
        words=failure.get("words", ""),
        text=_plain(markdown),
        excerpt=failure["cause"],
    )


def _of_page(page: str, markdown: str, questions: str) -> list[Section]:
    """The sections of a page, each with its heading; the first has the questions as well."""
    # A comment in code would look like a heading.
    markdown = _FENCE.sub(lambda fence: fence[0].replace("#", " "), markdown)
    # `split` returns what stands before the first heading, and then for each heading its two groups
    # and the text below it: "##", heading, text, "##", heading, text.
    _, *parts = _HEADING.split(markdown)
    title = ""
    found = []
    for heading_markdown, text_markdown in zip(parts[1::3], parts[2::3], strict=True):
        heading = _plain(heading_markdown)
        text = _plain(text_markdown)
        anchor = heading.replace(" ", "-")
        if not title:  # the first heading is the page's title
            title = heading
            anchor = ""
        found.append(Section(page, anchor, title, heading, text, _excerpt(text), questions))
        questions = ""
    return found


def _excerpt(text: str) -> str:
    """The first words of a text."""
    if len(text) <= _EXCERPT:
        return text
    return text[:_EXCERPT].rpartition(" ")[0] + " …"


def _markdown(path: Path) -> str:
    """The Markdown of a page; the code cells of a notebook are fenced."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```\n{source}\n```")
    return "\n\n".join(parts)


def _plain(markdown: str) -> str:
    """Markdown as plain text on one line."""
    text = _NOISE.sub(" ", markdown)
    text = _LINK.sub(r"\1", text)  # of a link its text alone
    text = re.sub(r"[`*|]|^```\w*", " ", text)  # marks of code, emphasis and tables
    return " ".join(text.split())
