"""What the tools advise: each piece of advice once, and when it applies.

A tool defines its remedies beside the rules that choose among them. A test in `tests/remedies`
makes the situation of each and does what its sentence says; `python tools/list_remedies.py` lists
every remedy with its test, and a remedy without one fails the tests.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """A piece of advice."""

    code: str  # such as "nonfinite.log": the tool, and what it is about
    when: str  # the situation, as a clause
    text: str  # the sentences, with {names} for what is only known in the situation

    def sentence(self, **facts: object) -> str:
        """The text with the facts filled in."""
        return self.text.format(**facts)


REMEDIES: dict[str, Remedy] = {}
"""All remedies of the modules that were imported, by code."""


def remedy(code: str, when: str, text: str) -> Remedy:
    """Define a remedy and return it; raises `ValueError` if there is one of that code."""
    if code in REMEDIES:
        raise ValueError(f"there is a remedy {code!r} already")
    REMEDIES[code] = Remedy(code, when, text)
    return REMEDIES[code]
