"""Print the routes of this Jupyter server as JSON: an example path that matches each pattern.

Runs in the container: it sets up the server as `tools/lab.py` does, without starting it, and reads
the patterns off the server itself.
"""

import json
import re
import re._constants as kinds
import re._parser as parser
import sys

from jupyterlab.labapp import LabApp


def example(pattern: str) -> str:
    """A short text that matches a regular expression."""
    return "".join(_parts(parser.parse(pattern)))


def _parts(tokens) -> list[str]:
    parts = []
    for kind, value in tokens:
        if kind is kinds.LITERAL:
            parts.append(chr(value))
        elif kind is kinds.ANY or kind is kinds.NOT_LITERAL:
            parts.append("x")
        elif kind is kinds.IN:
            parts.append(_member(value))
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
            least, _, repeated = value
            parts += _parts(repeated) * max(
                least, 1
            )  # an optional part is tried with something in it
        elif kind is kinds.SUBPATTERN:
            parts += _parts(value[-1])
        elif kind is kinds.BRANCH:
            parts += _parts(value[1][0])
        elif kind not in (kinds.AT, kinds.ASSERT, kinds.ASSERT_NOT):
            raise ValueError(f"no example for {kind} yet")
    return parts


def _member(choices) -> str:
    """A character from a set such as [a-z], [^/]+ or \\w."""
    pattern = re.compile("^" + _rebuild(choices) + "$")
    return next(c for c in "x1-_./" if pattern.match(c))


def _rebuild(choices) -> str:
    text = ""
    for kind, value in choices:
        if kind is kinds.NEGATE:
            text += "^"
        elif kind is kinds.LITERAL:
            text += re.escape(chr(value))
        elif kind is kinds.RANGE:
            text += f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
        elif kind is kinds.CATEGORY:
            text += {"WORD": r"\w", "DIGIT": r"\d"}[str(value).removeprefix("CATEGORY_")]
    return f"[{text}]"


def main() -> None:
    """Print {"path": the name of its handler} for every route."""
    server = LabApp.initialize_server(["--no-browser", "--port=0", "--ServerApp.root_dir=/work"])
    routes = {}
    for group in server.web_app.default_router.rules + server.web_app.wildcard_router.rules:
        for rule in getattr(group.target, "rules", [group]):
            if hasattr(rule.matcher, "regex"):
                name = getattr(rule.target, "__name__", type(rule.target).__name__)
                routes[example(rule.matcher.regex.pattern)] = name
    json.dump(routes, sys.stdout)


if __name__ == "__main__":
    main()
