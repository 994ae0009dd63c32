"""The shape of the package in figures, and what breaks the rules of ARCHITECTURE.md.

`python tools/measure_code.py` prints the tables that CONTRIBUTING.md asks for: lines, long modules,
long and branching functions, comments, public names, folders and what they import,
and then how dense each is (`density.py`). `complaints` is what the tests call.
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
PACKAGE = ROOT / "src" / "amp_lab"
COURSE = ROOT / "notebooks" / "course"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))

FOLDERS = (
    "core", "plots", "failures", "migrate", "models", "parallel", "model_call", "tracing",
    "recipes", "numerics", "difference", "advisor", "formats", "bench", "train", "cli",
)  # fmt: skip
"""From the lowest to the highest: a folder imports only those before it."""

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
    density.print_table([PACKAGE, COURSE, ROOT / "tools"])
    problems = complaints(PACKAGE, NOTEBOOKS)
    print("\n".join(problems))
    return 1 if problems else 0


def complaints(package: Path, notebooks: list[Path]) -> list[str]:
    """What breaks the rules, a line each with its place and what to do about it."""
    return [
        *_files_of_folders(package, notebooks),
        *_wrong_imports(package),
        *_sizes(package),
    ]


def table(package: Path) -> dict[str, str]:
    """The figures of the package by their names."""
    modules = _modules(package)
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules]
    functions = [node for path in modules for node in _functions(path)]
    branching = branching_functions(package)
    sloc, comments = _comments(package)
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
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
        "folders": str(len(folders)),
        "imports from folder to folder": str(len(_pairs_of_folders(package))),
    }


def _pairs_of_folders(package: Path) -> set[tuple[str, str]]:
    """Each folder with every other folder that it imports."""
    pairs = set()
    for path in _modules(package):
        here = path.relative_to(package).parts[0]
        for found in _imports(path):
            pairs |= {(here, target) for target in _imported_folders(found) if target != here}
    return {(here, target) for here, target in pairs if here in FOLDERS}


def branching_functions(package: Path) -> list[str]:
    """The functions, methods and classes whose complexity is over the limit, with their places."""
    lines = []
    for path, blocks in _radon("cc", "--json", package).items():
        for block in blocks:
            if block["complexity"] > MAX_COMPLEXITY:
                place = f"{Path(path).relative_to(package.parent)}:{block['lineno']}"
                lines.append(f"{place}: {block['name']} has complexity {block['complexity']}")
    return lines


def _comments(package: Path) -> tuple[int, int]:
    """Lines of code, and comments in them, as radon counts both."""
    raw = _radon("raw", "--json", package).values()
    return sum(file["sloc"] for file in raw), sum(file["comments"] for file in raw)


def _radon(*command: object) -> dict:
    """What a command of radon prints as JSON: by the path of a file, what it has counted there."""
    process = subprocess.run(
        [sys.executable, "-m", "radon", *map(str, command)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def _files_of_folders(package: Path, notebooks: list[Path]) -> Iterator[str]:
    """Notebooks take names from a folder, not from a file in it; core has nothing but files."""
    for path in notebooks:
        for found in _imports(path):
            folder = _folder_of_module(package, found.module)
            place = package.joinpath(*folder.split("."))
            # `from amp_lab.folder.file import name`, or `from amp_lab.folder import file`, unless
            # the folder exports a name that is also that of a file.
            names_of_files = {name for name in found.names if (place / f"{name}.py").exists()}
            imports_files = bool(names_of_files - _names_exported(place))
            is_file = found.module != folder or imports_files
            if is_file and found.module.partition(".")[0] != "core":
                yield (
                    f"{path.name}:{found.line}: imports a file of amp_lab.{folder}; take what it "
                    "needs from there (or add it to its __init__.py), or from amp_lab"
                )


def _names_exported(folder: Path) -> set[str]:
    """What the `__init__` of a folder imports, which may have the name of a file beside it."""
    return {name for found in _imports(folder / "__init__.py") for name in found.names}


def _folder_of_module(package: Path, module: str) -> str:
    """``train.data`` of ``train.data.images``: as far as the parts of a module are folders."""
    path = package
    folders = []
    for part in module.split("."):
        path = path / part
        if not path.is_dir():
            break
        folders.append(part)
    return ".".join(folders)


def _wrong_imports(package: Path) -> Iterator[str]:
    """Imports of a folder further up, or from a folder inside of another of the files around it."""
    for path in _modules(package):
        here, *inside = path.relative_to(package).with_suffix("").parts
        place = path.relative_to(package.parent)
        if here in ("__init__", "__main__"):
            continue
        if here not in FOLDERS:
            yield f"{place}: in no folder that {Path(__file__).name} knows; add it"
            continue
        for found in _imports(path):
            for target in _imported_folders(found):
                if FOLDERS.index(target) > FOLDERS.index(here):
                    yield (
                        f"{place}:{found.line}: {here}/ imports {target}/, which is above it in "
                        "ARCHITECTURE.md; move what it needs further down"
                    )
            # A module of train/data/ takes nothing from a file of train/, such as train/run.py.
            is_in_inner_folder = len(inside) > 1
            is_from_here = found.module.startswith(f"{here}.")
            is_of_file = is_from_here and _folder_of_module(package, found.module) == here
            if is_in_inner_folder and is_of_file:
                yield f"{place}:{found.line}: imports a file of {here}/, which holds its folder"


def _imported_folders(found: Import) -> list[str]:
    """The folder that an import names; `from amp_lab import x` may name several, or none."""
    first = found.module.partition(".")[0]
    candidates = (first,) if first else found.names
    return [name for name in candidates if name in FOLDERS]


def _sizes(package: Path) -> Iterator[str]:
    """A line for each module and each function that is too long."""
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
