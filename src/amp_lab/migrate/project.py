"""The torch version that the migrated code needs, and the one that its project asks for."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from amp_lab.migrate.amp_names import FIRST_TORCH
from amp_lab.migrate.files import Result
from amp_lab.migrate.rewriter import Finding
from amp_lab.migrate.torch_amp_remedies import FOR_BOTH, FOR_OLDER_AUTOCAST, OLDER_TORCH

_REQUIREMENT_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "requirements*.txt")
_MAX_PARENTS = 3  # how many folders above the migrated one may have the project's files
# Matches torch>=1.8, torch = "^1.8", torch = {version = "~1.8"}, "torch (==1.8.1)"
_TORCH_REQUIREMENT = re.compile(
    r"""(?m)^[^#\n]*?(?<![\w.-])torch(?:\[[^]\n]*\])?["']?\s*(?:=\s*)?(?:\{\s*version\s*=\s*)?["'(\s]*"""
    r"""(?:[=~>^]=?=?|<=?)\s*(?P<version>\d+(?:\.\d+)*)""",
)


def needed_torch(results: Iterable[Result]) -> tuple[int, int] | None:
    """The oldest torch, as (major, minor), that has all names in the rewritten code.

    None if nothing was rewritten.
    """
    messages = _rewritten_messages(results)
    needs = []
    for name, version in FIRST_TORCH.items():
        if any(f"is torch.amp.{name}" in message for message in messages):
            needs.append(version)
    return max(needs, default=None)


def for_older_torch(results: Iterable[Result]) -> list[str]:
    """The texts on how to write what was rewritten so that it runs with older torch too.

    The text on autocast is only given if there is no other.
    """
    messages = _rewritten_messages(results)
    advice = []
    for names, remedy in FOR_BOTH.items():
        message_starts = tuple(f"torch.cuda.amp.{name} is" for name in names)
        if any(message.startswith(message_starts) for message in messages):
            advice.append(remedy.text)
    if not advice and any("is torch.amp.autocast" in message for message in messages):
        advice.append(FOR_OLDER_AUTOCAST.text)
    return advice


def _rewritten_messages(results: Iterable[Result]) -> list[str]:
    """The messages of all findings of the kind ``rewritten``: ``… is torch.amp.autocast …``."""
    lines = [line for result in results for line in result.lines]
    return [line.message for line in lines if line.kind == "rewritten"]


def older_torch(paths: Iterable[str | Path], needed: tuple[int, int]) -> Iterator[Result]:
    """Yield a result for each line of the project's files that asks for a torch before `needed`.

    Parameters
    ----------
    paths : Iterable
        The migrated files and folders; the project's files are beside or above them.
    needed : tuple
        The version that the migrated code needs, such as ``(2, 3)``.
    """
    files: dict[Path, None] = {}  # in order
    for path in paths:
        files.update(dict.fromkeys(_requirement_files(Path(path).resolve())))
    major, minor = needed
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        for requirement in _TORCH_REQUIREMENT.finditer(text):
            asked = requirement["version"]
            # at least two numbers: "2" is 2.0
            numbers = [int(number) for number in f"{asked}.0".split(".")]
            if tuple(numbers[:2]) < needed:
                line = text.count("\n", 0, requirement.start("version")) + 1
                message = OLDER_TORCH.sentence(asked=asked, needed=f"{major}.{minor}")
                yield Result(_relative_to_here(file), [Finding(line, "by hand", message)])


def _relative_to_here(file: Path) -> Path:
    """The path from the working directory; `file` itself if it is not below that."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _requirement_files(path: Path) -> list[Path]:
    """The requirement files in the nearest folder, up from `path`, that has any; else empty.

    The search ends at the top of a git repository, or after `_MAX_PARENTS` folders.
    """
    folder = path if path.is_dir() else path.parent
    for candidate in (folder, *folder.parents[:_MAX_PARENTS]):
        requirement_files: list[Path] = []
        for name in _REQUIREMENT_FILES:
            requirement_files += [file for file in sorted(candidate.glob(name)) if file.is_file()]
        if requirement_files or (candidate / ".git").exists():
            return requirement_files
    return []
