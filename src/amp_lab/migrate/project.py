"""Which torch the migrated code needs, and which one its project asks for."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from amp_lab.migrate.amp_names import NEEDS
from amp_lab.migrate.files import Result
from amp_lab.migrate.rewriter import Finding
from amp_lab.migrate.torch_amp_remedies import FOR_BOTH, FOR_OLDER_AUTOCAST, OLDER_TORCH

_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "requirements*.txt")
_UP = 3  # folders above what is migrated
# torch>=1.8, torch = "^1.8", torch = {version = "~1.8"}, "torch (==1.8.1)"; not torchvision
_ASKED = re.compile(
    r"""(?m)^[^#\n]*?(?<![\w.-])torch(?:\[[^]\n]*\])?["']?\s*(?:=\s*)?(?:\{\s*version\s*=\s*)?["'(\s]*"""
    r"""(?:[=~>^]=?=?|<=?)\s*(?P<version>\d+(?:\.\d+)*)""",
)


def needed_torch(results: Iterable[Result]) -> tuple[int, int] | None:
    """The oldest torch that has all names that were written; None if none was."""
    messages = _rewritten(results)
    needs = []
    for name, version in NEEDS.items():
        if any(f"is torch.amp.{name}" in message for message in messages):
            needs.append(version)
    return max(needs, default=None)


def for_older_torch(results: Iterable[Result]) -> list[str]:
    """What to write instead, so that the code runs on older versions of torch as well."""
    messages = _rewritten(results)
    advice = []
    for names, found in FOR_BOTH.items():
        olds = tuple(f"torch.cuda.amp.{name} is" for name in names)
        if any(message.startswith(olds) for message in messages):
            advice.append(found.text)
    if not advice and any("is torch.amp.autocast" in message for message in messages):
        advice.append(FOR_OLDER_AUTOCAST.text)
    return advice


def _rewritten(results: Iterable[Result]) -> list[str]:
    lines = [line for result in results for line in result.lines]
    return [line.message for line in lines if line.kind == "rewritten"]


def older_torch(paths: Iterable[str | Path], needed: tuple[int, int]) -> Iterator[Result]:
    """The files of a project, as they lie beside or above `paths`, that ask for an older torch."""
    files: dict[Path, None] = {}  # in order
    for path in paths:
        files.update(dict.fromkeys(_files(Path(path).resolve())))
    major, minor = needed
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        for found in _ASKED.finditer(text):
            asked = found["version"]
            numbers = [int(number) for number in f"{asked}.0".split(".")]
            if tuple(numbers[:2]) < needed:
                line = text.count("\n", 0, found.start("version")) + 1
                message = OLDER_TORCH.said(asked=asked, needed=f"{major}.{minor}")
                yield Result(_as_seen_from_here(file), [Finding(line, "by hand", message)])


def _as_seen_from_here(file: Path) -> Path:
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _files(path: Path) -> list[Path]:
    """What says which packages a project needs, in the nearest folder that has it."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, *folder.parents[:_UP]):
        found: list[Path] = []
        for name in _FILES:
            found += [file for file in sorted(place.glob(name)) if file.is_file()]
        if found or (place / ".git").exists():
            return found
    return []
