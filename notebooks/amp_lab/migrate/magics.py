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
    parts, done, depth, start = [], 0, 0, 0
    while (piece := _PIECE.search(cell, start)) is not None:
        start = piece.end()
        if bracket := piece["bracket"]:
            depth = max(0, depth + (1 if bracket in "([{" else -1))
        elif (piece["line"] or piece["assigned"]) and depth:
            # an operator in brackets, such as a % that begins a line
            start = piece.start() + len(piece[0]) - len(piece[0].lstrip()) + 1
        elif piece["line"] or piece["assigned"]:
            parts += [cell[done : piece.start()], _blank(piece[0], bool(piece["assigned"]))]
            done = start
    return "".join([*parts, cell[done:]])


def _blank(text: str, is_value: bool = False) -> str:
    """Blanks of the same length, with the old names in them; 0 keeps a block from being empty."""
    lines = []
    for number, line in enumerate(re.split(r"(\r?\n)", text)):
        indent = line[: len(line) - len(line.lstrip())] if number == 0 else ""
        names = [] if is_value else _KEPT.findall(line)
        stands_for = "0" if number == 0 and (indent or is_value) and line.strip() else ""
        what = ";".join(names) or stands_for
        lines.append(line if line.endswith("\n") else f"{indent}{what}".ljust(len(line)))
    return "".join(lines)
