"""Which torch the migrated code needs, and which one its project asks for."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from amp_lab.migrate.amp_names import NEEDS
from amp_lab.migrate.files import Result
from amp_lab.migrate.rewriter import Finding
from amp_lab.migrate.torch_amp_remedies import OLDER_TORCH

_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "requirements*.txt")
_UP = 3  # folders above what is migrated
# torch>=1.8, torch = "^1.8", torch = {version = "~1.8"}, "torch (==1.8.1)"; not torchvision
_ASKED = re.compile(
    r"""(?m)^[^#\n]*?(?<![\w.-])torch(?:\[[^]\n]*\])?["']?\s*(?:=\s*)?(?:\{\s*version\s*=\s*)?["'(\s]*"""
    r"""(?:[=~>^]=?=?|<=?)\s*(?P<version>\d+(?:\.\d+)*)""",
)


def needed_torch(results: Iterable[Result]) -> tuple[int, int] | None:
    """The oldest torch that has all names that were written; None if any recent one has."""
    said = [line.message for r in results for line in r.lines if line.kind == "rewritten"]
    needs = (NEEDS[name] for name in NEEDS if any(f"is torch.amp.{name}" in m for m in said))
    return max(needs, default=None)


def older_torch(paths: Iterable[str | Path], needed: tuple[int, int]) -> Iterator[Result]:
    """The files of a project, as they lie beside or above `paths`, that ask for an older torch."""
    for file in dict.fromkeys(file for path in paths for file in _files(Path(path).resolve())):
        text = file.read_text(encoding="utf-8", errors="replace")
        for found in _ASKED.finditer(text):
            asked = found["version"]
            if tuple(map(int, f"{asked}.0".split(".")))[:2] < needed:
                line = text.count("\n", 0, found.start("version")) + 1
                says = OLDER_TORCH.said(asked=asked, needed=f"{needed[0]}.{needed[1]}")
                yield Result(_as_seen_from_here(file), [Finding(line, "by hand", says)])


def _as_seen_from_here(file: Path) -> Path:
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _files(path: Path) -> list[Path]:
    """What says which packages a project needs, in the nearest folder that has it."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, *folder.parents[:_UP]):
        found = [file for name in _FILES for file in sorted(place.glob(name)) if file.is_file()]
        if found or (place / ".git").exists():
            return found
    return []
