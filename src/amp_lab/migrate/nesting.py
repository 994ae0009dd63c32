"""How deeply Python code is nested, counted before it is parsed.

libcst's parser follows nested code by recursion in native code, and ends the process where the
stack is used up. Its tree is then walked by recursion in Python, up to the interpreter's own limit.
Both limits differ between machines and change while a program runs. So the levels are counted
first, code with more than `MAX_LEVELS` is refused, and all other code gets enough of both.
"""

import concurrent.futures
import io
import re
import sys
import threading
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from amp_lab.core.errors import OptionError

MAX_LEVELS = 2_000
"""Of nested code in one statement, such as the operators of a sum or the names of ``a.b.c``."""
MAX_BRACKETS = 100
"""Within each other, and as many blocks; Python's own limits are 200 and 100."""
# libcst and the rules were seen to take at most 5.3 frames and 10 KiB of stack for a level.
_FRAMES_PER_LEVEL = 10
_STACK_BYTES = 64 * 2**20

_Answer = TypeVar("_Answer")


@dataclass
class _Bracket:
    """An open bracket, or a statement outside of all brackets."""

    is_open: bool = True
    tokens: int = 0  # since the last comma that starts something which is not nested in it
    open_lambdas: int = 0  # whose commas separate their parameters
    is_comprehension: bool = False  # whose commas separate the names that it assigns

    def count(self, token: tokenize.TokenInfo) -> None:
        """Count one token that neither opens nor closes a bracket."""
        if token.type == tokenize.STRING:
            self.tokens += _levels_of_fields(token.string)
        elif token.string in (",", ";"):
            if not self.open_lambdas and not self.is_comprehension:
                self.tokens = 0
        elif token.string == "lambda":
            self.open_lambdas += 1
        elif token.string == ":":
            self.open_lambdas = max(0, self.open_lambdas - 1)
        elif token.string == "for":
            self.is_comprehension = self.is_open


def check_nesting(text: str) -> None:
    """Raise `OptionError` for code that is nested too deeply, with its line.

    Each token of a statement counts as a level until a comma: an upper bound, since each operator
    of a sum and each name of a chain is a level of libcst's tree.
    """
    brackets = [_Bracket(is_open=False)]
    blocks = _Blocks()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            _count(brackets, token)
            blocks.count(token)
            levels = sum(bracket.tokens for bracket in brackets) + sum(blocks.elifs)
            if levels > MAX_LEVELS or max(len(brackets), len(blocks.elifs)) > MAX_BRACKETS:
                raise OptionError(
                    f"line {token.start[0]} is nested too deeply: over {MAX_LEVELS:,} levels, or "
                    f"{MAX_BRACKETS} brackets or blocks; split it"
                )
    except (tokenize.TokenError, SyntaxError):  # not Python, which the parser will say
        return


class _Blocks:
    """The blocks that are open, by indentation."""

    def __init__(self) -> None:
        self.elifs = [0]  # in a row, in each of them: each is a level below the one before
        self._starts_statement = True

    def count(self, token: tokenize.TokenInfo) -> None:
        """Count one token."""
        if token.type == tokenize.NEWLINE:
            self._starts_statement = True
        elif token.type == tokenize.INDENT:
            self.elifs.append(0)
        elif token.type == tokenize.DEDENT:
            self.elifs.pop()
        elif self._starts_statement and token.type not in (tokenize.NL, tokenize.COMMENT):
            self._starts_statement = False
            if token.string == "elif":
                self.elifs[-1] += 1
            else:
                self.elifs[-1] = 0


def _count(brackets: list[_Bracket], token: tokenize.TokenInfo) -> None:
    """Count one token in the brackets that are open."""
    last = brackets[-1]
    last.tokens += 1
    if token.type == tokenize.NEWLINE:
        brackets[:] = [_Bracket(is_open=False)]
    elif token.string in ("(", "[", "{"):
        brackets.append(_Bracket())
    elif token.string in (")", "]", "}"):
        brackets[:] = brackets[:-1] or [_Bracket(is_open=False)]
    else:
        last.count(token)


def _levels_of_fields(string: str) -> int:
    """Levels of the deepest field of an f-string, which is a single token before Python 3.12."""
    prefix = re.match(r"[a-zA-Z]*", string)
    if prefix is None or "f" not in prefix[0].lower():
        return 0
    deepest = levels = open_braces = 0
    for piece in re.findall(r"\{\{|\w+|[^\w\s]", string):
        if open_braces:
            levels += len(piece) if piece == "{{" else 1
            open_braces += piece.count("{") - piece.count("}")
            deepest = max(deepest, levels)
        elif piece == "{":  # two of them are a brace of the text
            levels = 0
            open_braces = 1
    return deepest


def with_room_to_recurse(function: Callable[..., _Answer], *arguments: object) -> _Answer:
    """Call a function that follows code up to `MAX_LEVELS` deep; return what it returns.

    It runs in a thread, whose stack does not depend on the operating system or on the caller.
    """
    recursion_limit = sys.getrecursionlimit()
    stack_bytes = threading.stack_size(_STACK_BYTES)
    sys.setrecursionlimit(max(recursion_limit, _FRAMES_PER_LEVEL * MAX_LEVELS))
    try:
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(function, *arguments).result()
    finally:
        threading.stack_size(stack_bytes)
        sys.setrecursionlimit(recursion_limit)
