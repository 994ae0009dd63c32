"""Old names that a file gets from another file, which the migration of that one changes.

``from common import autocast`` gives what ``common.py`` imports: once that is ``torch.amp``'s, each
call needs its device. Only files that lie where the import says are looked at.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import libcst as cst

from amp_lab.migrate.tree import Finding, Tree, Use, dotted

_NAMES = ("autocast", "GradScaler")  # what takes its device first
_UP = 3  # folders above a file's own in which an absolute import is looked for
_IMPORTS = re.compile(
    r"^from +torch\.(?:(cuda|cpu)\.)?amp(?:\.\w+)? +import +(?:\(([^)]*)\)|([^\n]*))", re.MULTILINE
)
_DEVICE = re.compile(r"(?i)dev|cuda|cpu|[\"']")


def find(tree: Tree, path: Path) -> list[Finding]:
    """What there is to say of calls in the file at `path`, by their lines."""
    found, read = [], {}
    for use in tree.uses:
        call = tree.parents[use.node]
        if use.parts[-1] not in _NAMES or not isinstance(call, cst.Call):
            continue
        if call.func is not use.node or (call.args and _DEVICE.search(tree.code(call.args[0]))):
            continue
        for home in _homes(tree, use, path):
            devices = read[home] if home in read else read.setdefault(home, _devices(home))
            if use.parts[-1] in devices:
                name, device = ".".join(use.parts), devices[use.parts[-1]] or "cuda"
                file = "/".join(home.parts[-2:]) if home.stem == "__init__" else home.name
                found.append(
                    Finding(
                        tree.line(use.node),
                        "by hand",
                        f"{name} comes from {file}, which has it from torch.amp once it is "
                        f'migrated: give it "{device}" first, and the rest by keyword',
                    )
                )
                break
    return found


def _homes(tree: Tree, use: Use, path: Path) -> Iterator[Path]:
    """The files that a name may be imported from, as far as they are there."""
    bound = use.scope.find(use.parts[0])
    if bound is None:
        for node, _ in tree.imports:
            if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
                yield from _files(path, len(node.relative), dotted(node.module) or ())
        return
    for binding in bound.bindings[use.parts[0]]:
        if not isinstance(binding.node, cst.ImportAlias):
            continue
        node = tree.parents[binding.node]
        if isinstance(node, cst.Import):
            parts = (*binding.origin.split("."), *use.parts[1:-1])
            yield from _files(path, 0, parts)
        else:
            within = (binding.node.name.value, *use.parts[1:-1]) if len(use.parts) > 1 else ()
            parts = (*(dotted(node.module) or ()), *within)
            yield from _files(path, len(node.relative), parts)


def _files(path: Path, dots: int, parts: tuple[str, ...]) -> Iterator[Path]:
    """Where a module may be, as a file imports it; `dots` are those of a relative import."""
    if parts[:1] in (("torch",), ("apex",)):
        return
    above = path.resolve().parents
    for folder in above[dots - 1 : dots] if dots else above[: _UP + 1]:
        module = folder.joinpath(*parts)
        files = [module.with_suffix(".py")] if parts else []
        for file in (*files, module / "__init__.py"):
            if file != path.resolve() and file.is_file():
                yield file


def _devices(path: Path) -> dict[str, str]:
    """The names that a file imports from torch's mixed precision, each with its device, or ""."""
    text = path.read_bytes().decode(errors="replace")  # which names the file itself can have
    return {
        name: device
        for device, bracketed, plain in _IMPORTS.findall(text)
        for name in _NAMES
        if re.search(rf"(?:^|,)\s*{name}\s*(?:$|,)", re.sub(r"#.*", "", bracketed or plain))
    }
