"""Old names that a file gets from another file, which the migration of that one changes.

``from common import autocast`` gives what ``common.py`` imports: once that is ``torch.amp``'s, each
call needs its device. Only files that lie where the import says are looked at.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import libcst as cst

from amp_lab.migrate.python_tree import Finding, Tree, Use, dotted

_UP = 3  # folders above a file's own in which an absolute import is looked for
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_IMPORTS = re.compile(
    r"^([ \t]*)from +torch(?:\.(cuda|cpu))?(?:\.amp)?(?:\.\w+)? +import +(?:\(([^)]*)\)|([^\n]*))",
    re.MULTILINE,
)
_NEWER = re.compile(r"\btorch\.amp\b")
_DEVICE = re.compile(r"(?i)dev|cuda|cpu|[\"']")


def find(tree: Tree, path: Path) -> list[Finding]:
    """What there is to say of uses in the file at `path`, by their lines."""
    found, read = [], {}
    for use in tree.uses:
        for home, name in _sources(tree, use, path):
            if home not in read:
                read[home] = _devices(home)
            if name in read[home] and _lacks_device(
                tree, use, name.split(".")[-1], read[home][name]
            ):
                file = "/".join(home.parts[-2:]) if home.stem == "__init__" else home.name
                found.append(
                    Finding(
                        tree.line(use.node),
                        "by hand",
                        f"{'.'.join(use.parts)} comes from {file}, which has it from torch.amp "
                        f"once it is migrated: {_advice(name, read[home][name])}",
                    )
                )
                break
    return found


def _advice(name: str, device: str) -> str:
    if name.startswith("custom"):
        return f'give it device_type="{device or "cuda"}"'
    return f'give it "{device or "cuda"}" first, and the rest by keyword'


def _lacks_device(tree: Tree, use: Use, name: str, device: str) -> bool:
    """Whether a use would not do what it did, with what torch.amp has by that name."""
    call = tree.call_of(use.node)
    args = list(call.args) if call is not None else []
    if any(a.keyword is not None and a.keyword.value in ("device", "device_type") for a in args):
        return False
    if name.startswith("custom"):
        return call is not None or isinstance(tree.parents[use.node], cst.Decorator)
    by_place = bool(args) and args[0].keyword is None
    if call is None or (by_place and _DEVICE.search(tree.code(args[0]))):
        return False
    return by_place or name == "autocast" or device == "cpu"  # GradScaler's default is CUDA


def _sources(tree: Tree, use: Use, path: Path) -> Iterator[tuple[Path, str]]:
    """The files that a use may be of something in, as far as they are there, and its name there."""
    bound, is_named = use.scope.find(use.parts[0]), use.parts[-1] in _NAMES
    if not is_named and (bound is None or len(use.parts) > 1):
        return
    if bound is None:
        for node, _ in tree.imports:
            if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
                for home in _files(path, len(node.relative), dotted(node.module) or ()):
                    yield home, ".".join(use.parts)
        return
    for binding in bound.bindings[use.parts[0]]:
        if not isinstance(binding.node, cst.ImportAlias):
            continue
        if len(use.parts) == 1 and binding.node.evaluated_name not in _NAMES:
            continue
        node, dots, module = tree.parents[binding.node], 0, ()
        if isinstance(node, cst.Import):
            whole = (*binding.origin.split("."), *use.parts[1:])
        else:
            dots, module = len(node.relative), dotted(node.module) or ()
            whole = (*module, binding.node.name.value, *use.parts[1:])
        for n in range(len(module), len(whole)):  # where the module ends, and names in it begin
            if len(whole) - n <= 2 and (n or dots):
                for home in _files(path, dots, whole[:n]):
                    yield home, ".".join(whole[n:])


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
    """The names that a file imports from torch's mixed precision, each with its device, or "".

    One that is imported in a block is for an old torch, if the file has today's names too.
    """
    text = path.read_bytes().decode(errors="replace")  # which names the file itself can have
    found = {}
    for indent, device, bracketed, plain in _IMPORTS.findall(text):
        if indent and _NEWER.search(text):
            continue
        names = re.findall(r"\w+(?:\s+as\s+\w+)?", re.sub(r"#.*", "", bracketed or plain))
        for name in {*names} & {*_NAMES}:
            found[name] = device
        if "amp" in names and device:  # the module
            found.update({f"amp.{name}": device for name in _NAMES})
    return found
