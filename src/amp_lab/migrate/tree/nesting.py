"""Count how deeply Python code is nested, before the code is parsed.

libcst's parser uses recursion in native code, and ends the process when the stack is full. The
parsed tree is then walked by recursion in Python, up to the limit of the interpreter. Both limits
differ between machines and change while a program runs. So the levels are counted first. Code with
more than `MAX_LEVELS` is refused, and both limits are large enough for all other code.
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
"""The most levels of one statement, such as the operators of a sum or the names of ``a.b.c``."""
MAX_BRACKETS = 100
"""The most brackets, or blocks, inside each other; Python's own limits are 200 and 100."""
# libcst and the rules were measured to take at most 5.3 frames and 10 KiB of stack for a level.
_FRAMES_PER_LEVEL = 10
_STACK_BYTES = 64 * 2**20

_Result = TypeVar("_Result")


@dataclass
class _Bracket:
    """The tokens directly in an open bracket, or in a statement outside of all brackets."""

    is_open: bool = True
    """False for a statement outside of all brackets."""
    tokens: int = 0
    """How many tokens follow the last comma that separates elements: these may be nested."""
    open_lambdas: int = 0
    """How many lambdas have no colon yet: commas separate their parameters."""
    is_comprehension: bool = False
    """Whether there was a ``for``: commas separate its target names."""

    def count(self, token: tokenize.TokenInfo) -> None:
        """Follow a token that is no bracket, after `_count` has added it to `tokens`.

        A comma or ``;`` starts the count anew; an f-string adds the levels of its fields.
        """
        if token.type == tokenize.STRING:
            self.tokens += _f_string_levels(token.string)
        elif token.string in (",", ";"):
            if not self.open_lambdas and not self.is_comprehension:
                self.tokens = 0
        elif token.string == "lambda":
            self.open_lambdas += 1
        elif token.string == ":":
            self.open_lambdas = max(0, self.open_lambdas - 1)
        elif token.string == "for":
            self.is_comprehension = self.is_open  # outside of brackets, it is a loop


def check_nesting(text: str) -> None:
    """Raise `OptionError` with the line of the first code that is nested too deeply, if any.

    Each token of a statement counts as a level, up to the next comma. This is an upper bound,
    because only some tokens are a level of libcst's tree: each operator of a sum, each name of a
    chain. A text that is not Python passes, up to its error.
    """
    brackets = [_Bracket(is_open=False)]
    elifs = [0]
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            _count(brackets, token)
            _count_block(elifs, token)
            levels = sum(bracket.tokens for bracket in brackets) + sum(elifs)
            deepest = max(len(brackets), len(elifs))
            if levels > MAX_LEVELS or deepest > MAX_BRACKETS:
                raise OptionError(
                    f"line {token.start[0]} is nested too deeply: over {MAX_LEVELS:,} levels, or "
                    f"{MAX_BRACKETS} brackets or blocks; split it"
                )
    except (tokenize.TokenError, SyntaxError):  # no Python: the parser reports it
        return


def _count_block(elifs: list[int], token: tokenize.TokenInfo) -> None:
    """Follow the open blocks and their chains of ``elif`` over one token.

    Changes `elifs`, which has for each open block how many ``elif`` its last `if` has: each is
    nested in the one before.
    """
    if token.type == tokenize.INDENT:
        elifs.append(0)
    elif token.type == tokenize.DEDENT:
        elifs.pop()
    elif token.string == "elif":
        elifs[-1] += 1
    elif token.string == "if" and not token.line[: token.start[1]].strip():
        elifs[-1] = 0  # it starts a line, so it is no part of an expression


def _count(brackets: list[_Bracket], token: tokenize.TokenInfo) -> None:
    """Count a token in the innermost bracket, and open or close one if it is a bracket.

    Changes `brackets`, which has the statement first and the innermost bracket last.
    """
    innermost = brackets[-1]
    innermost.tokens += 1
    if token.type == tokenize.NEWLINE:
        brackets[:] = [_Bracket(is_open=False)]  # a new statement
    elif token.string in ("(", "[", "{"):
        brackets.append(_Bracket())
    elif token.string in (")", "]", "}"):
        # a bracket may close that nothing opened: the parser reports it
        brackets[:] = brackets[:-1] or [_Bracket(is_open=False)]
    else:
        innermost.count(token)


def _f_string_levels(string: str) -> int:
    """The most words and symbols after one ``{`` of an f-string; 0 for any other string.

    Python before 3.12 gives the whole f-string as one token, but the expression after a ``{`` may
    be nested. As in `check_nesting`, each of its tokens counts as a level.
    """
    if not re.match(r"(?i)r?fr?['\"]", string):
        return 0
    fields = re.findall(r"\{([^{}]*)", string.replace("{{", ""))  # {{ is a brace of the text
    return max((len(re.findall(r"\w+|[^\w\s]", field)) for field in fields), default=0)


def with_room_to_recurse(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function that recurses over code up to `MAX_LEVELS` deep, and return its result.

    The function runs in a separate thread, because the stack size of a thread can be chosen, and
    the frames of the caller take no room there.
    """
    old_recursion_limit = sys.getrecursionlimit()
    old_stack_bytes = threading.stack_size(_STACK_BYTES)  # sets it, and returns the old one
    sys.setrecursionlimit(max(old_recursion_limit, _FRAMES_PER_LEVEL * MAX_LEVELS))
    try:
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(function, *arguments).result()
    finally:
        threading.stack_size(old_stack_bytes)
        sys.setrecursionlimit(old_recursion_limit)
