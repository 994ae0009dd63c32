"""Tables as text, Markdown and HTML; the words that several modules print."""

import importlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
import torch

from amp_lab.core.errors import first_line, with_type
from amp_lab.core.report import (
    Printed,
    Table,
    bytes_text,
    dtype_name,
    listed,
    percent,
    plural,
    rate_text,
    share_text,
    short_name,
    to_plain,
)

TABLE = Table(
    ["op", "count"],
    [["conv", "1,000"], ["a | b <c>", "2"]],
    caption="Ops & <counts>",
    facts=["2 < 3.", "Two lines."],
    advice=["Take conv & go."],
    foot=[["all", "1,002"]],
    right=(1,),
)


class Shown(Printed):
    def _table(self):
        return TABLE


def test_text_is_aligned_with_rules_under_the_head_and_above_the_foot():
    assert TABLE.text() == (
        "Ops & <counts>\n"
        "\n"
        "op         count\n"
        "----------------\n"
        "conv       1,000\n"
        "a | b <c>      2\n"
        "----------------\n"
        "all        1,002\n"
        "\n"
        "2 < 3.\n"
        "Two lines.\n"
        "\n"
        "Look at:\n"
        "- Take conv & go."
    )


WIDE = Table(
    ["module", "op that it runs", "lost % at 2^16"],
    [
        ["encoder.layers.0.self_attention.out_proj", "scaled_dot_product_attention", "1,234,567"],
        ["head", "a few words that say what it does", "1"],
    ],
    caption="A title of many words, which does not fit the screen of a narrow terminal at all",
    facts=["A sentence of many words that does not fit either, and goes on in the next line."],
    advice=["Look at https://docs.pytorch.org/docs/stable/notes for more of it."],
    foot=[["all of them together, whatever they are", "", "1,234,568"]],
    right=(2,),
)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_table_fits_the_terminal_and_loses_nothing(width):
    lines = WIDE.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert signs_of("".join(lines)) == signs_of(WIDE.text())


def signs_of(text):
    """How often each sign occurs, but for blanks and rules, which depend on the width."""
    return Counter(re.sub(r"[\s-]", "", text))


def test_a_number_and_a_link_are_never_broken():
    text = WIDE.text(40)
    for whole in ("1,234,567", "1,234,568", "https://docs.pytorch.org/docs/stable/notes"):
        assert whole in text


def test_a_longer_cell_goes_on_below_itself():
    table = Table(["layer", "ms"], [["one two three four", "1"], ["five", "22"]], right=(1,))
    assert table.text(18) == (
        "layer           ms\n------------------\none two three    1\nfour\nfive            22"
    )
    assert table.text() == table.text(100)


def test_markdown_has_a_cell_for_each_cell_whatever_is_in_it():
    assert TABLE.markdown() == (
        "**Ops & <counts>**\n"
        "\n"
        "| op | count |\n"
        "| --- | ---: |\n"
        "| conv | 1,000 |\n"
        "| a \\| b <c> | 2 |\n"
        "| **all** | **1,002** |\n"
        "\n"
        "2 < 3.\n"
        "\n"
        "Two lines.\n"
        "\n"
        "- Take conv & go."
    )


class Texts(HTMLParser):
    """The text of each innermost element, and whether all elements are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.found = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.found.append((self.open[-1], data))


def test_html_escapes_and_closes_everything():
    page = Texts(TABLE.html())
    assert page.open == []
    assert page.found == [
        ("caption", "Ops & <counts>"),
        *[("th", "op"), ("th", "count")],
        *[("td", "conv"), ("td", "1,000"), ("td", "a | b <c>"), ("td", "2")],
        *[("th", "all"), ("th", "1,002")],
        *[("p", "2 < 3."), ("p", "Two lines.")],
        *[("p", "Look at:"), ("li", "Take conv & go.")],
    ]


def test_what_is_not_there_leaves_no_trace():
    bare = Table(["a", "b"], [["1", ""]])
    assert bare.text() == "a  b\n----\n1"
    assert bare.markdown() == "| a | b |\n| --- | --- |\n| 1 |  |"
    assert bare.html() == (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td></td></tr></tbody></table>"
    )
    empty = Table(["a"], [], caption="None of them.", facts=["0 rows."])
    for printed in (empty.text(), empty.markdown(), empty.html()):
        words = re.sub(r"<[^>]*>|\*", " ", printed).split()
        assert words == ["None", "of", "them.", "0", "rows."]


def test_a_result_prints_as_its_table():
    shown = Shown()
    assert str(shown) == repr(shown) == TABLE.text()
    assert (shown.to_markdown(), shown._repr_html_()) == (TABLE.markdown(), TABLE.html())


@pytest.mark.parametrize(
    ("dtype", "name", "short"),
    [
        (torch.float16, "float16", "fp16"),
        (torch.bfloat16, "bfloat16", "bf16"),
        (torch.float32, "float32", "fp32"),
        (torch.float64, "float64", "fp64"),
        (torch.int64, "int64", "int64"),
    ],
)
def test_names_of_dtypes(dtype, name, short):
    assert (dtype_name(dtype), short_name(dtype)) == (name, short)


def test_counts_and_lists():
    assert [plural(n, "cast") for n in (0, 1, 1000)] == ["0 casts", "1 cast", "1,000 casts"]
    assert listed(("a", "b", "c"), 3) == "a, b, c"
    assert listed(["a", "b", "c", "d"], 3) == "a, b, c and 1 more"


@pytest.mark.parametrize(
    ("error", "line", "typed"),
    [
        (ValueError("  no such size.\nmore\n"), "no such size", "ValueError: no such size"),
        (
            ValueError("missing:\n\n\tweight\n\tbias"),
            "missing: weight",
            "ValueError: missing: weight",
        ),
        (KeyError("x"), "'x'", "KeyError: 'x'"),
        (AssertionError(), "AssertionError", "AssertionError"),
    ],
)
def test_an_error_is_told_in_a_line(error, line, typed):
    assert (first_line(error), with_type(error)) == (line, typed)


def test_shares_sizes_and_rates_have_the_digits_that_say_something():
    assert [percent(n, 10**6) for n in (0, 1, 250, 999_999, 10**6)] == [
        "0", "<0.01", "0.025", ">99.9", "100"
    ]  # fmt: skip
    assert percent(0, 0) == "-"
    assert [share_text(n, 10_000) for n in (0, 4, 5, 10_000)] == ["-", "<0.1 %", "0.1 %", "100.0 %"]
    assert [bytes_text(n) for n in (512, 1536, 3 * 2**19)] == ["0.5 KiB", "1.5 KiB", "1.5 MiB"]
    assert [rate_text(n, "FLOP/s") for n in (None, 1.234e9, 5e12)] == [
        "-",
        "1.23 GFLOP/s",
        "5 TFLOP/s",
    ]
    assert rate_text(2e6, "B/s") == "2 MB/s"
    assert rate_text(20, "B/s") == "20 B/s"


@dataclass(frozen=True)
class Point:
    dtype: torch.dtype
    at: tuple[int, ...]
    more: dict


def test_json_has_no_number_that_is_not_finite():
    assert to_plain({"x": [1.5, math.nan, -math.inf]}) == {"x": [1.5, None, None]}


def test_records_become_what_json_takes():
    point = Point(torch.float16, (1, 2), {"inside": [Point(torch.int8, (), {})], 3: None})
    assert json.loads(json.dumps(to_plain(point))) == {
        "dtype": "float16",
        "at": [1, 2],
        "more": {"inside": [{"dtype": "int8", "at": [], "more": {}}], "3": None},
    }


def test_every_result_shows_its_table_when_a_cell_ends_with_it():
    """A dataclass would write its fields, unless it is told not to."""
    for module in ("bench.results", "difference", "parallel.collectives", "numerics", "tracing"):
        importlib.import_module(f"amp_lab.{module}")
    shown = Printed.__subclasses__()
    assert len(shown) > 8
    assert [kind for kind in shown if kind.__repr__ is not Printed.__repr__] == []
