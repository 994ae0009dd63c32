"""Tables as text, as Markdown and as HTML, and the text of their cells."""

import html
import json
import math
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

_SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


_GAP = "  "  # between two columns
_NARROWEST = 12  # characters: no column of text is made narrower than this


@dataclass(frozen=True)
class Table:
    """A table with a head, and the sentences above and below it."""

    head: list[str]
    rows: list[list[str]]
    caption: str = ""
    facts: Sequence[str] = ()  # sentences below the table
    advice: Sequence[str] = ()  # sentences below the facts, as a list under "Look at:"
    foot: list[list[str]] = field(default_factory=list)  # rows that sum up the others
    right: Container[int] = ()  # indices of the columns that are aligned to the right

    def text(self, width: int | None = None) -> str:
        """The table in columns, with rules under the head and above the foot.

        With a `width`, in characters, longer cells and sentences are wrapped. Numbers and words in
        the head are not broken, so a table with many columns may still be wider.
        """
        advice = _wrapped_all(self.advice, width, bullet="- ")
        if self.advice:
            advice = ["Look at:", *advice]
        parts = [
            _wrapped(self.caption, width),
            self._in_columns(width),
            _wrapped_all(self.facts, width),
            advice,
        ]
        blocks = ["\n".join(lines) for lines in parts if any(lines)]  # without empty parts
        return "\n\n".join(blocks)

    def _in_columns(self, width: int | None) -> list[str]:
        """The lines of the head, the rows and the foot; none if there is nothing below the head."""
        if not self.rows and not self.foot:
            return []
        widths = self._widths(width)
        head = list(self._rows_in_columns([self.head], widths))
        rows = list(self._rows_in_columns(self.rows, widths))
        foot = list(self._rows_in_columns(self.foot, widths))
        longest = max(map(len, [*head, *rows, *foot]))
        rule = "-" * longest
        lines = [*head, rule, *rows]
        if foot:
            lines += [rule, *foot]
        return lines

    def _widths(self, width: int | None) -> list[int]:
        """The width of each column: of its longest cell, or less if the table would not fit."""
        body = [*self.rows, *self.foot]
        columns = list(zip(self.head, *body, strict=True))  # the cells of each column
        widths = [max(map(len, column)) for column in columns]
        if width is None:
            return widths
        minimum = [self._minimum_width(index, column) for index, column in enumerate(columns)]
        available = width - len(_GAP) * (len(columns) - 1)
        while sum(widths) > available and widths != minimum:
            # One character less for the widest of the columns that may shrink.
            can_shrink = [i for i in range(len(widths)) if widths[i] > minimum[i]]
            widest = max(can_shrink, key=lambda i: widths[i])
            widths[widest] -= 1
        return widths

    def _minimum_width(self, index: int, column: Sequence[str]) -> int:
        """The width below which a column is not shrunk, in characters.

        `column` has the cells of the column with this index, the head first. A cell that is aligned
        to the right, such as a number, is never wrapped.
        """
        head, *body = column
        longest_word = max(map(len, head.split()), default=0)
        longest_cell = max(map(len, body), default=0)
        if index in self.right:
            return max(longest_word, longest_cell)
        return max(longest_word, min(longest_cell, _NARROWEST))

    def _rows_in_columns(self, rows: list[list[str]], widths: list[int]) -> Iterator[str]:
        """The lines of rows; a row takes several if one of its cells is wrapped."""
        for row in rows:
            cells: list[list[str]] = []  # the lines of each cell
            for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
                cells.append(self._cell_in_column(index, cell, width))
            height = max(map(len, cells))  # lines of the tallest cell
            for lines, width in zip(cells, widths, strict=True):
                blank = " " * width
                lines.extend([blank] * (height - len(lines)))  # now all cells are as tall
            for line in zip(*cells, strict=True):
                yield _GAP.join(line).rstrip()

    def _cell_in_column(self, index: int, cell: str, width: int) -> list[str]:
        """The lines of a cell in the column with this index, each padded to `width` characters."""
        pieces = [cell]
        if len(cell) > width:
            pieces = textwrap.wrap(cell, width, break_on_hyphens=False)
        if index in self.right:
            return [piece.rjust(width) for piece in pieces]
        return [piece.ljust(width) for piece in pieces]

    def markdown(self) -> str:
        """The table and its sentences in Markdown; the foot is bold."""
        parts = []
        if self.caption:
            parts.append(f"**{self.caption}**")
        if self.rows or self.foot:
            parts.append("\n".join(self._markdown_lines()))
        parts += self.facts
        if self.advice:
            parts.append("\n".join(f"- {sentence}" for sentence in self.advice))
        return "\n\n".join(parts)

    def _markdown_lines(self) -> Iterator[str]:
        """The lines of the table in Markdown: the head, the rule, the rows and the foot in bold."""
        yield _markdown_line(self.head)
        yield _markdown_line([self._markdown_rule(index) for index in range(len(self.head))])
        for row in self.rows:
            yield _markdown_line(row)
        for row in self.foot:
            yield _markdown_line([f"**{cell}**" for cell in row])

    def _markdown_rule(self, index: int) -> str:
        """The rule under the head of the column with this index; it gives the alignment."""
        if index in self.right:
            return "---:"
        return "---"

    def html(self) -> str:
        """The table and its sentences in HTML."""
        parts = []
        if self.rows or self.foot:
            parts.append(self._html_table())
        else:
            parts.append(f"<p>{html.escape(self.caption)}</p>")
        facts = "<br>".join(map(html.escape, self.facts))
        if facts:
            parts.append(f"<p>{facts}</p>")
        advice = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.advice)
        if advice:
            parts.append(f"<p>Look at:</p><ul>{advice}</ul>")
        return "".join(parts)

    def _html_table(self) -> str:
        """The element ``<table>``, with the caption."""
        caption = ""
        if self.caption:
            caption = f"<caption>{html.escape(self.caption)}</caption>"
        head = _html_rows("thead", [self.head], "th")
        body = _html_rows("tbody", self.rows, "td")
        foot = _html_rows("tfoot", self.foot, "th")
        return f"<table>{caption}{head}{body}{foot}</table>"


def _markdown_line(row: list[str]) -> str:
    """A row in Markdown, ``| a | b |``; a bar in a cell would end it, so it is escaped."""
    cells = [cell.replace("|", r"\|") for cell in row]
    return f"| {' | '.join(cells)} |"


def _html_rows(section: str, rows: list[list[str]], cell_tag: str) -> str:
    """A section of a table, such as ``tbody``; empty if it has no rows."""
    if not rows:
        return ""
    lines = ""
    for row in rows:
        cells = [f"<{cell_tag}>{html.escape(cell)}</{cell_tag}>" for cell in row]
        lines += f"<tr>{''.join(cells)}</tr>"
    return f"<{section}>{lines}</{section}>"


class Printed:
    """Base class of results that print as the table that `_table` returns."""

    def _table(self) -> Table:
        """The table to print; each subclass defines it."""
        raise NotImplementedError

    def _contents(self) -> Any:
        """The value that `to_json` writes, after `to_plain`."""
        return self

    def to_json(self) -> str:
        """The whole result as JSON; dtypes by names such as ``float16``."""
        return json.dumps(to_plain(self._contents()), indent=1)

    def to_markdown(self) -> str:
        """The table in Markdown."""
        return self._table().markdown()

    def _repr_html_(self) -> str:
        return self._table().html()

    def text(self, width: int | None = None) -> str:
        """The table as text; wrapped to `width` characters, if given."""
        return self._table().text(width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)


def _wrapped(sentence: str, width: int | None, bullet: str = "") -> list[str]:
    """The lines of a sentence; a word, such as a path or a call, is never broken.

    `bullet` is put before the first line, and the others are indented by its width.
    """
    if width is None:
        return [bullet + sentence]
    return textwrap.wrap(
        sentence,
        width,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped_all(sentences: Sequence[str], width: int | None, bullet: str = "") -> list[str]:
    """The lines of sentences, each of which begins a new line."""
    lines = []
    for sentence in sentences:
        lines += _wrapped(sentence, width, bullet)
    return lines


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def short_name(dtype: torch.dtype | None) -> str:
    """A dtype's short name: ``fp16`` for float16; its own name for int64; ``-`` for None."""
    if dtype is None:
        return "-"
    return _SHORT.get(dtype, dtype_name(dtype))


def to_plain(value: Any) -> Any:
    """A value that `json.dumps` takes: dataclasses become dicts, dtypes names, NaN and inf None.

    Fields of dataclasses that are not printed (``repr=False``) are left out.
    """
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if is_dataclass(value) and not isinstance(value, type):
        shown = [f.name for f in fields(value) if f.repr]
        return {name: to_plain(getattr(value, name)) for name in shown}
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return value


def percent(part: float, whole: float) -> str:
    """A share in percent, without the sign: ``12.5``; ``-`` if `whole` is 0.

    ``0`` and ``100`` stand for exactly none and all, so other shares become ``<0.01``, ``>99.9``.
    """
    if not whole:
        return "-"
    share = 100 * part / whole
    if part and share < 0.01:
        return "<0.01"
    if part < whole and share > 99.9:
        return ">99.9"
    return f"{share:.3g}"


def share_text(part: float, whole: float) -> str:
    """A share in percent with one decimal, such as ``12.5 %`` or ``<0.1 %``; ``-`` for 0."""
    if not part:
        return "-"
    if part >= 0.0005 * whole:  # less would be rounded to 0.0 %
        return f"{100 * part / whole:.1f} %"
    return "<0.1 %"


def bytes_text(count: float) -> str:
    """A size with one decimal in KiB or MiB: ``1.5 MiB``."""
    if count >= 2**20:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB"


def rate_text(per_second: float | None, unit: str) -> str:
    """A rate with three digits and a prefix, such as ``1.5 TFLOP/s``; ``-`` for None."""
    if per_second is None:
        return "-"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {prefix}{unit}"
    return f"{per_second:.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 cast``, ``1,000 casts``."""
    if count != 1:
        noun = f"{noun}s"
    return f"{count:,} {noun}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """At most `most` names, and the number of other names: ``a, b and 3 more``."""
    shown = ", ".join(names[:most])
    more = len(names) - most
    if more <= 0:
        return shown
    return f"{shown} and {more} more"
