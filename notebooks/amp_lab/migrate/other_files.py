"""Old names that a file gets from another file, which the migration of that one changes.

``from common import autocast`` gives what ``common.py`` imports: once that is ``torch.amp``'s, each
call needs its device. Only files that lie where the import says are looked at.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import HOMES, NAMED
from amp_lab.migrate.python_tree import Use
from amp_lab.migrate.rewriter import Rewriter

TRIGGERS = NAMED
_UP = 3  # folders above a file's own in which an absolute import is looked for
_IMPORTS = re.compile(
    r"(?m)^([ \t]*)from +torch(?:\.(cuda|cpu))?(?:\.amp)?(?:\.\w+)? +import +"
    r"(?:\(([^)]*)\)|([^\n]*))"
)
_NEWER = re.compile(r"\btorch\.amp\b")
_DEVICE = re.compile(r"(?i)dev|cuda|cpu|[\"']")


class Rule(Rewriter):
    """The old names in one file that come from files beside it."""

    def run(self) -> None:
        """Look at each use of a name that a file beside this one may have from torch."""
        read: dict[Path, dict[str, str]] = {}
        for use in self.tree.uses:
            for home, name in self._sources(use, self.path) if self.path else ():
                if home not in read:
                    read[home] = _devices(home)
                device = read[home].get(name)
                if device is not None and self._lacks_device(use, name, device):
                    self._say_device(use, home, name, device or "cuda")
                    break

    def _say_device(self, use: Use, home: Path, name: str, device: str) -> None:
        file = "/".join(home.parts[-2:]) if home.stem == "__init__" else home.name
        advice = f'give it "{device}" first, and the rest by keyword'
        if name.startswith("custom"):
            advice = f'give it device_type="{device}"'
        what = f"{'.'.join(use.parts)} comes from {file}, which has it from torch.amp"
        self.say(use.node, "by hand", f"{what} once it is migrated: {advice}")

    def _lacks_device(self, use: Use, name: str, device: str) -> bool:
        """Whether a use would not do what it did, with what torch.amp has by that name."""
        name, call = name.rpartition(".")[2], self.tree.call_of(use.node)
        if call is None:
            parent = self.tree.parents[use.node]
            return name.startswith("custom") and isinstance(parent, cst.Decorator)
        if nodes.arguments(call.args).keys() & {"device", "device_type"}:
            return False
        by_place = bool(call.args) and call.args[0].keyword is None
        if name.startswith("custom") or not by_place:
            return name != "GradScaler" or device == "cpu"  # GradScaler's default is CUDA
        return not _DEVICE.search(self.tree.code(call.args[0]))

    def _sources(self, use: Use, path: Path) -> Iterator[tuple[Path, str]]:
        """The files that a use may be of something in, as far as they are there, with its name."""
        bindings = use.scope.bound(use.parts[0])
        if use.parts[-1] in HOMES and not bindings:  # only a star can bring it
            yield from self._sources_of_stars(use, path)
        for alias in (binding.node for binding in bindings):
            if not isinstance(alias, cst.ImportAlias):
                continue
            if (use.parts[-1] if len(use.parts) > 1 else alias.evaluated_name) in HOMES:
                yield from self._sources_of_import(use, alias, path)

    def _sources_of_stars(self, use: Use, path: Path) -> Iterator[tuple[Path, str]]:
        for star in self.tree.stars:
            for home in _files(path, len(star.relative), nodes.dotted(star.module) or ()):
                yield home, ".".join(use.parts)

    def _sources_of_import(
        self, use: Use, alias: cst.ImportAlias, path: Path
    ) -> Iterator[tuple[Path, str]]:
        node, dots, module = self.tree.parents[alias], 0, ()
        named = tuple(alias.evaluated_name.split("."))
        if isinstance(node, cst.ImportFrom):
            dots, module = len(node.relative), nodes.dotted(node.module) or ()
        elif alias.asname is None:
            named = named[:1]  # import a.b binds a alone
        whole = (*module, *named, *use.parts[1:])
        for n in range(len(module), len(whole)):  # where the module ends, and names in it begin
            if len(whole) - n <= 2 and (n or dots):
                for home in _files(path, dots, whole[:n]):
                    yield home, ".".join(whole[n:])


def _files(path: Path, dots: int, parts: tuple[str, ...]) -> Iterator[Path]:
    """Where a module may be, as the file `path` imports it; `dots` are of a relative import."""
    if parts[:1] in (("torch",), ("apex",)):  # not a file of this project
        return
    own = path.resolve()
    above = own.parents
    # the root of a project may be above
    for folder in above[dots - 1 : dots] if dots else above[: _UP + 1]:
        module = folder.joinpath(*parts)
        files = [module.with_suffix(".py")] if parts else []
        for file in (*files, module / "__init__.py"):
            if file != own and file.is_file():
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
        found.update({name: device for name in names if name in HOMES})
        if "amp" in names and device:  # the module
            found.update({f"amp.{name}": device for name in HOMES})
    return found
