"""Messages as regular expressions, and the text in which they are searched.

A message is written as torch prints it. Dtypes, numbers, quotation marks and line breaks may
differ, because they change from one program to the next. The word "the" and a comma or colon may
be missing, because people type messages from memory. Devices may not differ, because a tensor on
another device has nothing to do with precision. Placeholders stand for other differences:
``{dtype}``, ``{n}`` for a number, ``{name}`` for a word, ``{any}`` for up to 300 characters,
``{dtypes_differ}`` for the tensors that a checkpoint lists, if the dtype of one differs.
`site/explain/explain.js` reads a text in the same way; a test compares the two.
"""

import re
from typing import NamedTuple

DTYPE = (
    r"(?:(?:struct |c10::|at::|torch\.(?:cuda\.)?|CUDA|CPU)*"
    r"(?:complex(?:half|float|double|\d+)?|u?int\d*|b?float\d*(?:_\w+)?|half|double|long|bool|char"
    r"|byte|short|b?fp?\d+|tf32)(?:tensor|type)?)"
)
NUMBER = r"-?\d[\d.,]*(?:e[+-]?\d+)?"
# After the message of a checkpoint: no list of tensors, or one with a tensor whose dtype differs.
_DTYPES_DIFFER = (
    r"(?:(?!.{0,60}saved metadata)|.{0,5000}?saved metadata: [^}]*dtype\W+(torch\.\w+)\b[^}]*"
    r"\} recomputed metadata: [^}]*dtype\W+(?!\1\b)torch\.)"
)
_PLACEHOLDERS = {
    "{dtype}": DTYPE,
    "{n}": NUMBER,
    "{name}": r"[^\s'\"`]+",
    "{any}": r".{0,300}?",
    "{dtypes_differ}": _DTYPES_DIFFER,
}
# What a message is divided into: a placeholder, a dtype as torch prints it, a number, a quotation
# mark, what people leave out, a blank, or any other character.
_PARTS = re.compile(
    r"(?P<placeholder>\{(?:dtype|n|name|any|dtypes_differ)\})"
    r"|(?P<dtype>(?<![\w.:])(?:(?:c10|at)::\w+|torch\.(?:cuda\.)?\w*(?:float|Float|half|Half)\w*"
    r"|(?:Half|BFloat16|Float|Double|ComplexHalf|HalfTensor|FloatTensor"
    r"|float16|bfloat16|float32|float64|fp16|bf16|fp32)(?![\w(])))"
    r"|(?P<number>(?<![\w.])\d+(?:\.\d+)*(?![\w]))"
    r"|(?P<quote>['\"`‘’“”]+)"
    r"|(?P<article>\b[Tt]he\s+)"
    r"|(?P<punctuation>[,:;](?=\s|$))"
    r"|(?P<blank>\s+)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"^[ \t]*\[(?:rank)?\d+\]:", re.MULTILINE)
_FRAME = re.compile(r"[│╭╮╰╯─❱┃]")
_BLANKS = re.compile(r"\s+")
_OMISSIBLE = re.compile(r"\bthe |[,:;](?= |$)")


class Pattern(NamedTuple):
    """A message as a regular expression. Python and JavaScript read it alike."""

    code: str
    regex: str
    literal: int
    """How many characters have to be as they are written. More of them make a better match."""
    fragment: str
    """The longest run of those characters and of blanks, in lower case: a text without it cannot
    match."""
    exact: str
    """The message `essential` if it has no placeholder, else empty."""
    general: bool
    """Whether it also has other causes, so that it counts only beside a subject word or a clue."""


def pattern(code: str, message: str, *, general: bool = False) -> Pattern:
    """The pattern of a message of the failure `code`; see `Pattern` for `general`."""
    message = message.removesuffix(".")  # people often leave it out
    regex = ""
    literal = 0
    runs = [""]  # in lower case; a part that may differ ends a run
    for part in _PARTS.finditer(message):
        kind, text = str(part.lastgroup), part.group()
        if kind == "other":
            regex += _escaped(text)
            runs[-1] += text.lower()
            literal += 1
        elif kind == "blank":  # in the run, but not counted
            regex += " "
            runs[-1] += " "
        else:
            regex += _regex_of_variable(kind, text)
            runs.append("")
    has_placeholder = any(placeholder in message for placeholder in _PLACEHOLDERS)
    exact = "" if has_placeholder else essential(flat(message))
    return Pattern(code, regex, literal, max(runs, key=len), exact, general)


def _escaped(text: str) -> str:
    """As `re.escape`, but only with escapes that JavaScript has as well."""
    return re.sub(r"[.*+?^${}()|\[\]\\/]", r"\\\g<0>", text)


def _regex_of_variable(kind: str, text: str) -> str:
    """What may stand in place of a placeholder, a dtype, a number, a quote or an article."""
    if kind == "placeholder":
        return _PLACEHOLDERS[text]
    if kind == "dtype":
        return _dtype(text)
    if kind == "number":
        return NUMBER
    if kind == "article":
        return "(?:the )?"
    if kind == "punctuation":
        return "[,:;]?"
    return "['\"`‘’“”]*"


def essential(text: str) -> str:
    """The text in lower case, without what people leave out: "the", commas and colons."""
    return _OMISSIBLE.sub("", text.lower())


def _dtype(text: str) -> str:
    """Any dtype in place of that of the message, on the same device if the message names one."""
    if re.fullmatch(r"torch\.cuda\.\w+Tensor", text):
        return r"(?:torch\.cuda\.\w+Tensor|CUDA\w+Type)"
    if re.fullmatch(r"torch\.\w+Tensor", text):
        return r"(?:torch\.\w+Tensor|CPU\w+Type)"
    return DTYPE


def flat(text: str) -> str:
    """The text on one line, without colours, frames of tables, and the marks of ranks."""
    for what in (_ANSI, _RANK, _FRAME):
        text = what.sub(" ", text)
    return _BLANKS.sub(" ", text).strip()
