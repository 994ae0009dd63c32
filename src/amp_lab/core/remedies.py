"""The advice of the tools: each remedy once, with the situation in which it applies.

A tool defines its remedies next to the rules that choose among them. For each remedy, a test in
`tests/remedies` creates the situation and follows the advice. `python tools/list_remedies.py` lists
every remedy with its test. A remedy without a test fails the tests.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """A piece of advice."""

    code: str  # such as "nonfinite.log": the tool, and what it is about
    when: str  # the situation, as a clause
    text: str  # the sentences, with {names} for what is only known in the situation
    failure: str = ""  # the failure that it is about, such as "AMP0004", which ends the text too

    def sentence(self, **facts: object) -> str:
        """The text with the facts filled in."""
        return self.text.format(**facts)


REMEDIES: dict[str, Remedy] = {}
"""All remedies of the modules that were imported, by code."""


def remedy(code: str, when: str, text: str, failure: str = "") -> Remedy:
    """Define a remedy and return it.

    Args:
        code: The tool and the subject of the remedy.
        when: The situation, as a clause.
        text: The sentences, with ``{names}`` for facts that are known only in the situation.
        failure: The code of the failure in the reference of `amp_lab.failures` that the remedy is
            about; empty if there is none. The text then ends with the code, so every tool that
            prints the text shows the code.

    Raises:
        ValueError: If a remedy with this code already exists.
    """
    if code in REMEDIES:
        raise ValueError(f"a remedy {code!r} already exists")
    if failure:
        text = _with_failure(text, failure)
    REMEDIES[code] = Remedy(code, when, text, failure)
    return REMEDIES[code]


def _with_failure(text: str, failure: str) -> str:
    """The text with the code of its failure in brackets at the end, before the last full stop."""
    without_stop = text.removesuffix(".")
    stop = text[len(without_stop) :]
    return f"{without_stop} ({failure}){stop}"
