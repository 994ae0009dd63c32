"""The shape of the package in figures, and what breaks the rules of ARCHITECTURE.md.

`python tools/measure_code.py` prints the tables that CONTRIBUTING.md asks for: lines, long modules,
long and branching functions, comments, public names, rooms and arrows, and then how dense each
folder is (`density.py`). `complaints` is what the tests call.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import density

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "notebooks" / "amp_lab"

GROUND = (
    "__init__", "errors", "files", "requirements", "report", "precision", "backends", "allocator",
    "cpu", "remedies", "torch_versions", "estimates", "timing", "device",
)  # fmt: skip
"""Modules that lie beside the rooms, and that every room may import."""

ROOMS = (
    "plots", "migrate", "data", "distributed", "checkpoint", "tracing", "numerics", "difference",
    "advisor", "formats", "training", "bench", "notebook", "cli",
)  # fmt: skip
"""From the lowest to the highest: a room may import those before it, and the ground."""

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_COMPLEXITY = 10  # as radon counts it: the branches of a function, with its boolean operators


@dataclass(frozen=True)
class Import:
    """One import of this package, in one of its modules or in a notebook."""

    path: Path
    line: int
    module: str
    """What is imported, without the package's own name: ``tracing.xray``, or empty."""
    names: tuple[str, ...]


def main() -> int:
    """Print the table; return 1 if a rule is broken."""
    for name, value in table(PACKAGE).items():
        print(f"{name:<46}{value:>8}")
    print()
    density.print_table([PACKAGE, ROOT / "tools"])
    found = complaints(PACKAGE, sorted(PACKAGE.parent.glob("[0-9]*.py")))
    print("\n".join(found))
    return 1 if found else 0


def complaints(package: Path, notebooks: list[Path]) -> list[str]:
    """What breaks the rules, a line each with its place and what to do about it."""
    return [
        *_doors(notebooks),
        *_arrows(package),
        *_sizes(package),
    ]


def table(package: Path) -> dict[str, str]:
    """The figures of the package by their names."""
    modules = _modules(package)
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules]
    functions = [node for path in modules for node in _functions(path)]
    branching = branching_functions(package)
    sloc, comments = _comments(package)
    rooms = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    long_modules = sum(count > MAX_MODULE_LINES for count in lines)
    long_functions = sum(_length(node) > MAX_FUNCTION_LINES for node in functions)
    branching_share = 100 * len(branching) / len(functions)
    comment_share = 100 * comments / sloc
    return {
        "lines": f"{sum(lines):,}",
        f"modules over {MAX_MODULE_LINES} lines": str(long_modules),
        f"functions over {MAX_FUNCTION_LINES} lines": str(long_functions),
        f"blocks of complexity over {MAX_COMPLEXITY} per 100 functions": f"{branching_share:.1f}",
        "comments per 100 lines of code": f"{comment_share:.1f}",
        "public names": str(len(_public_names(package))),
        "rooms": str(len(rooms)),
        "arrows between rooms": str(len(_pairs_of_rooms(package))),
    }


def _pairs_of_rooms(package: Path) -> set[tuple[str, str]]:
    """Each room with every other room that it imports."""
    pairs = set()
    for path in _modules(package):
        room = _room(package, path)
        for found in _imports(path):
            target = found.module.partition(".")[0]
            if room != target and room in ROOMS and target in ROOMS:
                pairs.add((room, target))
    return pairs


def branching_functions(package: Path) -> list[str]:
    """The functions, methods and classes whose complexity is over the limit, with their places."""
    found = []
    for path, blocks in _radon("cc", "--json", package).items():
        for block in blocks:
            if block["complexity"] > MAX_COMPLEXITY:
                place = f"{Path(path).relative_to(package.parent)}:{block['lineno']}"
                found.append(f"{place}: {block['name']} has complexity {block['complexity']}")
    return found


def _comments(package: Path) -> tuple[int, int]:
    """Lines of code, and comments in them, as radon counts both."""
    raw = _radon("raw", "--json", package).values()
    return sum(file["sloc"] for file in raw), sum(file["comments"] for file in raw)


def _radon(*command: object) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "radon", *map(str, command)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _doors(notebooks: list[Path]) -> Iterator[str]:
    for path in notebooks:
        for found in _imports(path):
            if "." in found.module:
                room = found.module.partition(".")[0]
                yield (
                    f"{path.name}:{found.line}: imports a file of a room, amp_lab.{found.module}; "
                    f"take it from the door, amp_lab.{room} (or add it there), or from amp_lab"
                )


def _arrows(package: Path) -> Iterator[str]:
    for path in _modules(package):
        here = _room(package, path)
        place = path.relative_to(package.parent)
        if here not in (*GROUND, *ROOMS, "__main__"):
            yield f"{place}: neither ground nor a room that {Path(__file__).name} knows; add it"
            continue
        for found in _imports(path):
            there = found.module.partition(".")[0]
            # `from amp_lab import x` names a module of the ground, a room, or a name of the face.
            targets = [there] if there else [name for name in found.names if name in ROOMS]
            for target in targets:
                if target not in ROOMS or target == here or here == "__main__":
                    continue
                if target == "notebook":
                    yield f"{place}:{found.line}: imports notebook/, which is for notebooks alone"
                elif here not in ROOMS:
                    yield f"{place}:{found.line}: the ground imports no room, but this {target}/"
                elif ROOMS.index(target) > ROOMS.index(here):
                    yield (
                        f"{place}:{found.line}: {here}/ imports {target}/, which is above it in "
                        "ARCHITECTURE.md; move what it needs further down"
                    )


def _sizes(package: Path) -> Iterator[str]:
    for path in _modules(package):
        place = path.relative_to(package.parent)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_MODULE_LINES:
            yield f"{place}: {lines} lines; split a module of more than {MAX_MODULE_LINES}"
        for node in _functions(path):
            if _length(node) > MAX_FUNCTION_LINES:
                yield (
                    f"{place}:{node.lineno}: {node.name} has {_length(node)} lines; split a "
                    f"function of more than {MAX_FUNCTION_LINES}"
                )


def _modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def _room(package: Path, path: Path) -> str:
    """The room that a module lies in, or its own name if it lies beside the rooms."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[0]


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None  # the parser always sets it
    return node.end_lineno - node.lineno + 1


def _imports(path: Path) -> Iterator[Import]:
    """The imports of this package, wherever they stand in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = tuple(alias.name for alias in node.names)
            modules = [(node.module, names)]
        elif isinstance(node, ast.Import):
            modules = [(alias.name, ()) for alias in node.names]
        else:
            continue
        for module, names in modules:
            package, _, rest = module.partition(".")
            if package == "amp_lab":
                yield Import(path, node.lineno, rest, names)


def _public_names(package: Path) -> list[str]:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EXPORTS":
            return list(ast.literal_eval(node.value))
    return []


if __name__ == "__main__":
    sys.exit(main())
