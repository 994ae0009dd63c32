"""Tables as text, as Markdown and as HTML, and the words that stand in them."""

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
_NARROWEST = 12  # characters of a text that a column keeps, if it has so many


@dataclass(frozen=True)
class Table:
    """Cells under a head, and what is said around them."""

    head: list[str]
    rows: list[list[str]]
    caption: str = ""
    facts: Sequence[str] = ()  # sentences below the table
    advice: Sequence[str] = ()  # sentences below those, as a list under "Look at:"
    foot: list[list[str]] = field(default_factory=list)  # rows that sum up the others
    right: Container[int] = ()  # numbers of the columns whose text is set to the right

    def text(self, width: int | None = None) -> str:
        """The table in columns, with rules under the head and above the foot.

        With a `width`, in characters, what is longer goes on in the next line. Numbers and words of
        the head are never broken, so a table of very many columns may still be wider.
        """
        parts = [[self.caption], self._in_columns(width), list(self.facts)]
        if width is not None:
            parts[0] = _wrapped(self.caption, width)
            parts[2] = [line for fact in self.facts for line in _wrapped(fact, width)]
        if self.advice:
            parts.append(["Look at:"])
            for sentence in self.advice:
                parts[-1] += _wrapped(sentence, width, bullet="- ")
        return "\n\n".join("\n".join(part) for part in parts if any(part))

    def _in_columns(self, width: int | None) -> list[str]:
        """The lines of the head, the rows and the foot; none if there is nothing below the head."""
        if not self.rows and not self.foot:
            return []
        widths = self._widths(width)
        head = list(self._row_in_columns(self.head, widths))
        rows = [line for row in self.rows for line in self._row_in_columns(row, widths)]
        foot = [line for row in self.foot for line in self._row_in_columns(row, widths)]
        rule = "-" * max(map(len, [*head, *rows, *foot]))
        lines = [*head, rule, *rows]
        if foot:
            lines += [rule, *foot]
        return lines

    def _widths(self, width: int | None) -> list[int]:
        """How wide each column is: as its longest cell, or less if the table would not fit."""
        body = [*self.rows, *self.foot]
        columns = [*zip(self.head, *body, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        if width is None:
            return widths
        least = [self._least_width(number, column) for number, column in enumerate(columns)]
        room = width - len(_GAP) * (len(columns) - 1)
        while sum(widths) > room and widths != least:
            can_shrink = [i for i in range(len(widths)) if widths[i] > least[i]]
            widest = max(can_shrink, key=lambda i: widths[i])
            widths[widest] -= 1
        return widths

    def _least_width(self, number: int, column: Sequence[str]) -> int:
        head, *body = column
        longest_word = max(map(len, head.split()), default=0)
        longest_cell = max(map(len, body), default=0)
        if number in self.right:
            return max(longest_word, longest_cell)
        return max(longest_word, min(longest_cell, _NARROWEST))

    def _row_in_columns(self, row: list[str], widths: list[int]) -> Iterator[str]:
        """The lines of a row: more than one where a cell is longer than its column is wide."""
        columns = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            pieces = [cell]
            if len(cell) > width:
                pieces = textwrap.wrap(cell, width, break_on_hyphens=False)
            is_number = number in self.right
            columns.append([p.rjust(width) if is_number else p.ljust(width) for p in pieces])
        height = max(map(len, columns))
        for pieces, width in zip(columns, widths, strict=True):
            pieces += [" " * width] * (height - len(pieces))
        for line in zip(*columns, strict=True):
            yield _GAP.join(line).rstrip()

    def markdown(self) -> str:
        """The same in Markdown; the foot is bold."""
        rules = ["---:" if i in self.right else "---" for i in range(len(self.head))]
        foot = [[f"**{cell}**" for cell in row] for row in self.foot]
        rows = [[c.replace("|", r"\|") for c in row] for row in [self.head, *self.rows, *foot]]
        lines = ["| " + " | ".join(row) + " |" for row in [rows[0], rules, *rows[1:]]]
        parts = [f"**{self.caption}**"] if self.caption else []
        parts += ["\n".join(lines)] if len(rows) > 1 else []
        parts += self.facts
        parts += ["\n".join(f"- {sentence}" for sentence in self.advice)] if self.advice else []
        return "\n\n".join(parts)

    def html(self) -> str:
        """The same in HTML."""

        def tr(row: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

        def part(tag: str, rows: list[list[str]], cell: str) -> str:
            return f"<{tag}>{''.join(tr(row, cell) for row in rows)}</{tag}>" if rows else ""

        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        facts = "<br>".join(map(html.escape, self.facts))
        advice = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.advice)
        table = (
            f"<table>{caption}{part('thead', [self.head], 'th')}{part('tbody', self.rows, 'td')}"
            f"{part('tfoot', self.foot, 'th')}</table>"
        )
        return (
            (table if self.rows or self.foot else f"<p>{html.escape(self.caption)}</p>")
            + (f"<p>{facts}</p>" if facts else "")
            + (f"<p>Look at:</p><ul>{advice}</ul>" if advice else "")
        )


class Printed:
    """Base of results that print as the table that their `_table` makes."""

    def _table(self) -> Table:
        raise NotImplementedError

    def _contents(self) -> Any:
        """What `to_json` writes; dtypes and records in it are made plain."""
        return self

    def to_json(self) -> str:
        """All that it holds, as JSON; dtypes by names such as ``float16``."""
        return json.dumps(to_plain(self._contents()), indent=1)

    def to_markdown(self) -> str:
        """The table of `str`, in Markdown."""
        return self._table().markdown()

    def _repr_html_(self) -> str:
        return self._table().html()

    def text(self, width: int | None = None) -> str:
        """What `str` says, for a terminal so many characters wide."""
        return self._table().text(width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)


def _wrapped(sentence: str, width: int | None, bullet: str = "") -> list[str]:
    """The lines of a sentence; a word, such as a path or a call, is never broken."""
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


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for torch.float16."""
    return str(dtype).removeprefix("torch.")


def short_name(dtype: torch.dtype | None) -> str:
    """``fp16`` for torch.float16, and so on; ``-`` for None. Integers' names are short already."""
    return _SHORT.get(dtype, dtype_name(dtype)) if dtype else "-"


def to_plain(value: Any) -> Any:
    """What `json.dumps` takes, made of records, dtypes, and lists and mappings of them."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return [to_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def percent(part: float, whole: float) -> str:
    """A share as the number of percent, which is never 0 or 100 unless it is exactly that."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if part and share < 0.01:
        return "<0.01"
    if part < whole and share > 99.9:  # "100" would say that none is left
        return ">99.9"
    return f"{share:.3g}"


def share_text(part: float, whole: float) -> str:
    """A share with one decimal and its sign, ``12.5 %``; ``-`` for none."""
    if not part:
        return "-"
    return f"{100 * part / whole:.1f} %" if part >= 0.0005 * whole else "<0.1 %"


def bytes_text(count: float) -> str:
    """A size with one decimal in KiB or MiB: ``1.5 MiB``."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def rate_text(per_second: float | None, unit: str) -> str:
    """A rate with three digits, in the prefix that suits it; ``-`` for None."""
    if per_second is None:
        return "-"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {prefix}{unit}"
    return f"{per_second:.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """A count and what is counted: ``1 cast``, ``1,000 casts``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
