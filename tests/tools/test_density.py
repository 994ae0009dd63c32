"""Counts of `tools/density.py`, on small programs whose counts can be seen."""

import pytest

from density import Density, by_folder, density, density_of, formatted

PROGRAM = '''"""A module."""

import os  # a comment

NAMES = ["a"]
"""What a name may be."""


def first(path):
    """The first name."""
    # another
    return path
'''


def test_nodes_statements_and_lines_are_those_of_the_code_without_docstrings():
    found = density(PROGRAM)
    # import; assignment with target, list and text; function; return with its name
    assert (found.statements, found.nodes, found.lines, found.comments) == (4, 8, 4, 2)
    assert found.nodes_per_statement == 2
    assert found.nodes_per_line == 2
    assert found.per_1000_lines("comments") == 500


def test_a_docstring_changes_nothing_and_a_returned_text_is_code():
    told = density('def f():\n    """Of two\n    lines."""\n    return "text"\n')
    assert told == density('def f():\n    return "text"\n')
    assert told.nodes == 3


def test_a_text_over_two_lines_is_two_lines_of_code():
    assert density('x = """a\nb"""\n').lines == 2


@pytest.mark.parametrize(
    ("line", "habit", "count"),
    [
        ("a, b = 1, 2", "tuple_assignments", 1),
        ("a, b = f()", "tuple_assignments", 0),
        ("a = 1, 2", "tuple_assignments", 0),
        ("a = 1 if b else 2 if c else 3", "conditional_expressions", 2),
        ("f(1, *a, **b)", "dict_calls", 1),
        ("f(1, *a, b=2)", "dict_calls", 0),
        ("'s' * (n > 1)", "texts_times_flag", 1),
        ("flag * f'{n}'", "texts_times_flag", 1),
        ("2 * n", "texts_times_flag", 0),
        ("[x for y in z for x in y]", "nested_comprehensions", 1),
        ("[[x for x in y] for y in z]", "nested_comprehensions", 1),
        ("{x: f(x) for x in y if x}", "nested_comprehensions", 0),
    ],
)
def test_a_habit_is_counted_where_it_stands(line, habit, count):
    assert getattr(density(line), habit) == count


def test_counts_add_up():
    assert density("a = 1\n") + density("b, c = 1, 2\n") == density("a = 1\nb, c = 1, 2\n")
    assert Density().nodes_per_line == 0


def test_lines_are_counted_as_ruff_writes_them(tmp_path):
    (tmp_path / "inside").mkdir()
    crowded = tmp_path / "inside" / "crowded.py"
    crowded.write_text("x = 1; y = 2\n")
    assert formatted(crowded) == "x = 1\ny = 2\n"
    assert density_of([crowded]).lines == 2
    beside = tmp_path / "beside.py"
    beside.write_text("")
    assert by_folder(tmp_path) == {".": [beside], "inside": [crowded]}
