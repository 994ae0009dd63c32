"""The examples of old code in tests/migrate/snippets."""

import re
from pathlib import Path

SNIPPETS = Path(__file__).parents[1] / "migrate" / "snippets"


def snippets(name: str) -> dict[str, str]:
    """The examples of a file, by their titles."""
    text = (SNIPPETS / f"{name}.txt").read_text()
    parts = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
