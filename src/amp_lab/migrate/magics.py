"""Blanks the IPython syntax in a notebook's cell: magics, shell commands, questions such as ``x?``.

Each character becomes a blank, so that all others keep their positions.
"""

import re

from amp_lab.migrate.tree.amp_names import SUBMODULES

# Regular expressions in verbose layout: blanks do not count, and # begins a comment.
_TO_LINE_END = r"(?:\\\r?\n|[^\n])*"  # a backslash at its end continues a line
_LINE = rf"""
    ^[ \t]*(?:
        [%!?] {_TO_LINE_END}                           # %time f(), !ls or ?f
      | (?:cd|ls|pip|conda|mkdir|rm|cp|mv|cat)[ \t]+   # cd folder: a command without a sign,
        (?!(?:and|else|for|if|in|is|not|or)\b)         # but not a variable: ls if x else y
        -*[\w.~/] {_TO_LINE_END}
      | [\w.]+\?\??[ \t]*$                             # f? or f??
    )
"""
_ASSIGNED = rf"""
    (?<=[^=!<>]=)[ \t]*                                # after =, but not after == or <=
    (?: ! | %(?=[a-z]) ) {_TO_LINE_END}                # files = !ls or out = %sql select 1
"""
# A string may have lines that look like magics. An open string ends with its line or the cell.
_STRING = r"""
    (?P<quotes>\"{3}|'{3}) (?: \\[\s\S] | (?!(?P=quotes))[\s\S] )* (?:(?P=quotes))?
  | " (?: \\[\s\S] | [^"\\\n] )* "?
  | ' (?: \\[\s\S] | [^'\\\n] )* '?
"""
_COMMENT = r"\#[^\n]*"
_CONTINUATION = r"\\\r?\n[ \t]*[%!?]?"  # after it, % is the operator
_BRACKET = r"[(\[{)\]}]"  # inside brackets, a line may begin with the operator %
# The alternatives are tried in this order. A character that matches none of them is passed over.
_MAGIC_OR_CONTEXT = re.compile(
    rf"(?P<line>{_LINE}) | (?P<assigned>{_ASSIGNED}) | {_STRING} | {_COMMENT} | {_CONTINUATION}"
    rf"| (?P<bracket>{_BRACKET})",
    re.VERBOSE | re.MULTILINE,
)
# Names whose import has to stay while a magic uses them: autocast, torch.cuda.amp, amp.initialize(
_OLD_NAME = re.compile(
    rf"[\w.]*\b(?:{'|'.join(SUBMODULES)})\b|\btorch\.(?:cuda|cpu)\.amp\b"
    r"|(?<![\w.])(?:(?:apex|amp)\.[\w.]+|Fused\w+|FP16_\w+)(?=\()"  # calls of Apex
)


def without_magics(cell: str) -> str:
    """The code of a cell with its IPython syntax blanked. Its length does not change.

    An old name in a magic remains as a statement: ``%time autocast()`` becomes ``autocast``. So no
    rule removes an import that the magic needs. The value of an assignment keeps no names.
    """
    if cell.lstrip().startswith("%%"):  # such as %%bash: the whole cell may be another language
        return _blank(cell)
    parts = []
    copied = 0  # how many characters of the cell are in `parts`
    depth = 0  # how many brackets are open
    match = _MAGIC_OR_CONTEXT.search(cell)
    while match is not None:
        search_from = match.end()
        may_be_magic = bool(match["line"] or match["assigned"])
        if match["bracket"]:
            depth = _depth_after(match["bracket"], depth)
        elif may_be_magic and depth > 0:
            # In brackets it is no magic: a line may begin with the operator %. The match has taken
            # the whole line, so search its rest for brackets and strings.
            search_from = match.start() + len(_indent(match[0])) + 1
        elif may_be_magic:
            is_assigned = match["assigned"] is not None
            parts += [cell[copied : match.start()], _blank(match[0], is_assigned)]
            copied = match.end()
        # else a string, a comment or a continued line, which is passed over
        match = _MAGIC_OR_CONTEXT.search(cell, search_from)
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


def _blank(magic: str, is_assigned: bool = False) -> str:
    """Replace a magic by blanks, except for the old names in it. Its lines keep their lengths.

    `is_assigned` says that it is the value of an assignment, as in ``files = !ls``.
    """
    # Group 1 keeps the line ends: line, end, line, end, line.
    first_line, *others = re.split(r"(\r?\n)", magic)
    parts = [_blank_first_line(first_line, is_assigned)]
    for line_end, line in zip(others[0::2], others[1::2], strict=True):
        names = "" if is_assigned else _old_names(line)
        parts += [line_end, names.ljust(len(line))]
    return "".join(parts)


def _blank_first_line(line: str, is_assigned: bool) -> str:
    """Replace the first line of a magic by blanks, and by code where Python needs some.

    An assigned value becomes a 0, without its old names: as a value, a name would count as a use
    of it. Any other line keeps its indent and its old names. If it is indented and has no old name,
    it becomes a 0, so that its block is not empty.
    """
    indent = _indent(line)
    code = ""
    if line.strip():
        code = "0" if is_assigned else _old_names(line)
        if indent and not code:
            code = "0"
    return f"{indent}{code}".ljust(len(line))


def _old_names(line: str) -> str:
    """The old names in a line, as statements: ``autocast;GradScaler``."""
    return ";".join(_OLD_NAME.findall(line))
