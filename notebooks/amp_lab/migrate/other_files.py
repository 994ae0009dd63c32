"""Old names that a file gets from another file, which the migration of that one changes.

``from common import autocast`` gives what ``common.py`` imports: once that is ``torch.amp``'s, each
call needs its device. Only files that lie where the import says are looked at.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import libcst as cst

from amp_lab.migrate.nodes import arguments, dotted, is_star
from amp_lab.migrate.python_tree import Binding, Use
from amp_lab.migrate.rewriter import Rewriter

TRIGGERS = ("autocast", "GradScaler", "torch custom_fwd", "torch custom_bwd")
_UP = 3  # folders above a file's own in which an absolute import is looked for
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_IMPORTS = re.compile(
    r"^([ \t]*)from +torch(?:\.(cuda|cpu))?(?:\.amp)?(?:\.\w+)? +import +(?:\(([^)]*)\)|([^\n]*))",
    re.MULTILINE,
)
_NEWER = re.compile(r"\btorch\.amp\b")
_DEVICE = re.compile(r"(?i)dev|cuda|cpu|[\"']")


class Rule(Rewriter):
    """The old names in one file that come from files beside it."""

    def run(self) -> None:
        """Look at each use of a name that a file beside this one may have from torch."""
        read: dict[Path, dict[str, str]] = {}
        for use in self.tree.uses if self.path is not None else ():
            for home, name in self._sources(use):
                if home not in read:
                    read[home] = _devices(home)
                if name in read[home] and self._lacks_device(use, name, read[home][name]):
                    file = "/".join(home.parts[-2:]) if home.stem == "__init__" else home.name
                    what = f"{'.'.join(use.parts)} comes from {file}, which has it from torch.amp"
                    advice = _advice(name, read[home][name] or "cuda")
                    self.say(use.node, "by hand", f"{what} once it is migrated: {advice}")
                    break

    def _lacks_device(self, use: Use, name: str, device: str) -> bool:
        """Whether a use would not do what it did, with what torch.amp has by that name."""
        name, call = name.rpartition(".")[2], self.tree.call_of(use.node)
        if call is None:
            return name.startswith("custom") and isinstance(
                self.tree.parents[use.node], cst.Decorator
            )
        if arguments(call).keys() & {"device", "device_type"}:
            return False
        by_place = bool(call.args) and call.args[0].keyword is None
        if name.startswith("custom") or not by_place:
            return name != "GradScaler" or device == "cpu"  # GradScaler's default is CUDA
        return not _DEVICE.search(self.tree.code(call.args[0]))

    def _sources(self, use: Use) -> Iterator[tuple[Path, str]]:
        """The files that a use may be of something in, as far as they are there, with its name."""
        bound, is_named = use.scope.find(use.parts[0]), use.parts[-1] in _NAMES
        if bound is None:  # only a star can bring it
            if is_named:
                yield from self._sources_of_stars(use)
            return
        bindings = [b for b in bound.bindings[use.parts[0]] if isinstance(b.node, cst.ImportAlias)]
        for binding in bindings:
            if is_named if len(use.parts) > 1 else binding.node.evaluated_name in _NAMES:
                yield from self._sources_of_import(use, binding)

    def _sources_of_stars(self, use: Use) -> Iterator[tuple[Path, str]]:
        for star, _ in self.tree.imports:
            if is_star(star):
                for home in self._files(len(star.relative), dotted(star.module) or ()):
                    yield home, ".".join(use.parts)

    def _sources_of_import(self, use: Use, binding: Binding) -> Iterator[tuple[Path, str]]:
        node, dots, module = self.tree.parents[binding.node], 0, ()
        if isinstance(node, cst.Import):
            whole = (*binding.origin.split("."), *use.parts[1:])
        else:
            dots, module = len(node.relative), dotted(node.module) or ()
            whole = (*module, binding.node.name.value, *use.parts[1:])
        for n in range(len(module), len(whole)):  # where the module ends, and names in it begin
            if len(whole) - n <= 2 and (n or dots):
                for home in self._files(dots, whole[:n]):
                    yield home, ".".join(whole[n:])

    def _files(self, dots: int, parts: tuple[str, ...]) -> Iterator[Path]:
        """Where a module may be, as a file imports it; `dots` are those of a relative import."""
        if parts[:1] in (("torch",), ("apex",)):  # not a file of this project
            return
        own = self.path.resolve()
        above = own.parents
        # the root of a project may be above
        for folder in above[dots - 1 : dots] if dots else above[: _UP + 1]:
            module = folder.joinpath(*parts)
            files = [module.with_suffix(".py")] if parts else []
            for file in (*files, module / "__init__.py"):
                if file != own and file.is_file():
                    yield file


def _advice(name: str, device: str) -> str:
    if name.startswith("custom"):
        return f'give it device_type="{device}"'
    return f'give it "{device}" first, and the rest by keyword'


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
