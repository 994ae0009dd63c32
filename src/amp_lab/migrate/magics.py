"""What of a notebook's cell is IPython's and not Python's: magics, shell commands and questions.

They are blanked for reading, character by character, so that every other character keeps its place.
"""

import re

from amp_lab.migrate.amp_names import HOMES

# In turn: a magic, with or without a sign, or a question where a statement may begin, one that is
# assigned, and what holds lines that only look so: strings, comments, continued lines, brackets.
_PIECE = re.compile(
    r"""(?P<line>^[ \t]*(?:(?:[%!?]|(?:cd|ls|pip|conda|mkdir|rm|cp|mv|cat)[ \t]+
          (?!(?:and|else|for|if|in|is|not|or)\b)-*[\w.~/])(?:\\\r?\n|[^\n])*|[\w.]+\?\??[ \t]*$))
      | (?P<assigned>(?<=[^=!<>]=)[ \t]*(?:!|%(?=[a-z]))(?:\\\r?\n|[^\n])*)
      | (?P<quotes>\"{3}|'{3})(?:\\[\s\S]|(?!(?P=quotes))[\s\S])*(?:(?P=quotes))?
      | "(?:\\[\s\S]|[^"\\\n])*"?
      | '(?:\\[\s\S]|[^'\\\n])*'?
      | \#[^\n]*
      | \\\r?\n[ \t]*[%!?]?
      | (?P<bracket>[(\[{)\]}])""",
    re.VERBOSE | re.MULTILINE,
)
# Names that would stop working if their import were migrated without the line that uses them.
_KEPT = re.compile(
    rf"[\w.]*\b(?:{'|'.join(HOMES)})\b|\btorch\.(?:cuda|cpu)\.amp\b"
    r"|(?<![\w.])(?:(?:apex|amp)\.[\w.]+|Fused\w+|FP16_\w+)(?=\()"  # calls of Apex
)


def without_magics(cell: str) -> str:
    """The text of a cell, as long as before, with what is no Python blanked.

    Old names in what is blanked stay, as statements: their imports have to stay for them.
    """
    if cell.lstrip().startswith("%%"):  # to whom the rest of the cell belongs is the magic's affair
        return _blank(cell)
    parts = []
    done = 0  # how much of the cell is in `parts`
    depth = 0  # how many brackets are open
    piece = _PIECE.search(cell)
    while piece is not None:
        start = piece.end()
        if piece["bracket"]:
            depth = _depth_after(piece["bracket"], depth)
        elif piece["line"] or piece["assigned"]:
            if depth == 0:
                is_value = piece["assigned"] is not None
                parts += [cell[done : piece.start()], _blank(piece[0], is_value)]
                done = start
            else:  # an operator in brackets, such as a % that begins a line
                indent = _indent(piece[0])
                start = piece.start() + len(indent) + 1
        piece = _PIECE.search(cell, start)
    parts.append(cell[done:])
    return "".join(parts)


def _depth_after(bracket: str, depth: int) -> int:
    if bracket in "([{":
        return depth + 1
    return max(0, depth - 1)


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _blank(text: str, is_value: bool = False) -> str:
    """Blanks of the same length, with the old names in them; 0 keeps a block from being empty."""
    first, *rest = re.split(r"(\r?\n)", text)
    blanks = [_blank_first_line(first, is_value)]
    for line in rest:
        names = "" if is_value else _old_names(line)
        blanks.append(line if line.endswith("\n") else names.ljust(len(line)))
    return "".join(blanks)


def _blank_first_line(line: str, is_value: bool) -> str:
    """As `_blank`; it keeps its indent, and what is assigned keeps a value."""
    indent = _indent(line)
    code = "" if is_value else _old_names(line)
    if not code and line.strip() and (indent or is_value):
        code = "0"
    return f"{indent}{code}".ljust(len(line))


def _old_names(line: str) -> str:
    """The old names in a line, as statements."""
    return ";".join(_KEPT.findall(line))
