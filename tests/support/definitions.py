"""What a notebook defines, for tests of its functions; its other cells are not run."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

_DEFINITIONS = ast.FunctionDef | ast.ClassDef


def definitions(source: Path, settings: Iterable[str] = (), **given: object) -> dict:
    """The notebook's imports, functions and classes, and the variables in `settings`, by name.

    `given` is there before them: what they need of other cells, or what is to take its place.
    """
    settings = set(settings)

    def is_kept(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return not settings.isdisjoint(_targets(node))
        return isinstance(node, ast.Import | ast.ImportFrom | _DEFINITIONS)

    kept = [node for node in _tree(source).body if is_kept(node)]
    namespace = {"__name__": source.stem, **given}
    exec(compile(ast.Module(kept, []), source, "exec"), namespace)
    assert settings <= namespace.keys()
    return namespace


def names_defined(source: Path) -> list[str]:
    """The notebook's functions and classes, in their order."""
    return [node.name for node in _tree(source).body if isinstance(node, _DEFINITIONS)]


def check_marks(
    source: Path, plain: str, changed: str, mark: str, plain_source: Path | None = None
) -> None:
    """Assert that every changed line of a loop is marked by a comment, and nothing else changed.

    The plain loop may be in another file, `plain_source`; a docstring there does not count.

    Without its lines with ``# mark``, `changed` is `plain` without those that a comment says were
    replaced (``# mark: was …``) or moved (``# mark: was in …``).
    """
    before, after = _lines(plain_source or source, plain), _lines(source, changed)
    unmarked = [line for line in after if f"# {mark}" not in line]
    replaced = [
        match[1]
        for line in after
        if (match := re.search(rf"# {mark}: was (?:in )?(.+?)(\(…\))?$", line))
    ] + [line.partition("  #")[0] for line in after if f"# {mark}: was in " in line]
    assert len(after) > len(unmarked)
    for line in before:
        if unmarked and line == unmarked[0]:
            unmarked.pop(0)
        else:
            assert any(old in line for old in replaced), f"{line!r} went, and no comment says so"
    assert unmarked == []


def _tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _targets(node: ast.Assign) -> list[str]:
    target = node.targets[0]
    return [name.id for name in getattr(target, "elts", [target]) if isinstance(name, ast.Name)]


def _lines(source: Path, name: str) -> list[str]:
    """The lines of a definition, without its first one and without indentation."""
    node = next(n for n in _tree(source).body if isinstance(n, _DEFINITIONS) and n.name == name)
    text = source.read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in text[node.lineno : node.end_lineno] if line.strip()]
    return [line for line in lines if not line.startswith('"""')]
