"""Blanks the IPython syntax in a notebook's cell: magics, shell commands, questions such as ``x?``.

Each character becomes a blank, so that all others keep their positions.
"""

import re

from amp_lab.migrate.tree.amp_names import SUBMODULES

# What may look like a magic, and what may contain something that only looks like one. In turn:
# - line: %time f(), !ls, ?f, "cd folder" without a sign, or f?, at the start of a line
# - assigned: files = !ls
# - quotes: a triple-quoted string; then other strings, a comment, a continued line
# - bracket: inside brackets a line may begin with the operator %
_MAGIC_OR_CONTEXT = re.compile(
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
# Names whose import has to stay while a magic uses them: autocast, torch.cuda.amp, amp.initialize(
_OLD_NAME = re.compile(
    rf"[\w.]*\b(?:{'|'.join(SUBMODULES)})\b|\btorch\.(?:cuda|cpu)\.amp\b"
    r"|(?<![\w.])(?:(?:apex|amp)\.[\w.]+|Fused\w+|FP16_\w+)(?=\()"  # calls of Apex
)


def without_magics(cell: str) -> str:
    """A text of the same length as a cell, with its IPython syntax blanked.

    Old names in a blanked line remain as a statement, so a rule sees that the line uses them.
    """
    if cell.lstrip().startswith("%%"):  # such as %%bash: the whole cell may be another language
        return _blank(cell)
    parts = []
    copied = 0  # how many characters of the cell are in `parts`
    depth = 0  # how many brackets are open
    match = _MAGIC_OR_CONTEXT.search(cell)
    while match is not None:
        next_start = match.end()
        if match["bracket"]:
            depth = _depth_after(match["bracket"], depth)
        elif match["line"] or match["assigned"]:
            if depth == 0:
                is_assigned = match["assigned"] is not None
                parts += [cell[copied : match.start()], _blank(match[0], is_assigned)]
                copied = next_start
            else:  # the operator % at the start of a line: search on behind it
                indent = _indent(match[0])
                next_start = match.start() + len(indent) + 1
        match = _MAGIC_OR_CONTEXT.search(cell, next_start)
    parts.append(cell[copied:])
    return "".join(parts)


def _depth_after(bracket: str, depth: int) -> int:
    """How many brackets are open after `bracket`, if `depth` were open before it."""
    if bracket in "([{":
        return depth + 1
    return max(0, depth - 1)  # a closing bracket too many is passed over


def _indent(text: str) -> str:
    """The blanks at the start of a text."""
    return text[: len(text) - len(text.lstrip())]


def _blank(text: str, is_assigned: bool = False) -> str:
    """A text of the same length and lines as a magic: blanks, and the old names in it.

    `is_assigned` says that it is the value of an assignment, as in ``files = !ls``.
    """
    first, *rest = re.split(r"(\r?\n)", text)  # the lines, and the line ends between them
    blanks = [_blank_first_line(first, is_assigned)]
    for piece in rest:
        names = "" if is_assigned else _old_names(piece)
        blanks.append(piece if piece.endswith("\n") else names.ljust(len(piece)))
    return "".join(blanks)


def _blank_first_line(line: str, is_assigned: bool) -> str:
    """The first line of a magic as blanks with the old names, after its indent.

    If there are none it becomes a 0 where code is needed: in a block, or as an assigned value.
    """
    indent = _indent(line)
    code = "" if is_assigned else _old_names(line)
    if not code and line.strip() and (indent or is_assigned):
        code = "0"
    return f"{indent}{code}".ljust(len(line))


def _old_names(line: str) -> str:
    """The old names in a line, as statements: ``autocast;GradScaler``."""
    return ";".join(_OLD_NAME.findall(line))
