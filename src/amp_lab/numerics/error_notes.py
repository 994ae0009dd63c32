"""Add a remedy, as a note, to errors of torch that low precision causes."""

from amp_lab.core.cpu import NO_PRIMITIVE, NO_PRIMITIVE_REMEDY
from amp_lab.numerics.nonfinite_remedies import HALF_WEIGHTS, MASK_VALUE

_NOTES = {  # a part of the error's message: the remedy
    NO_PRIMITIVE: NO_PRIMITIVE_REMEDY,
    "Half without overflow": MASK_VALUE.text,
    "Attempting to unscale FP16 gradients": HALF_WEIGHTS.text,
}


def add_note(error: BaseException | None, tool: str) -> None:
    """Add the remedy to an error as a note, once. Python shows a note below the error.

    An error without a remedy stays unchanged. The note begins with `tool`.
    """
    if error is None:
        return
    notes = " ".join(getattr(error, "__notes__", []))
    for message, remedy in _NOTES.items():
        if message in str(error) and remedy not in notes:
            error.add_note(f"{tool}: {remedy}")
