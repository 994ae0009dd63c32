"""The colours of the figures, their style, and how one is saved."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from amp_lab.errors import OptionError

# One look per precision in every figure. The colours differ in lightness too, and bars are hatched.
COLOURS = {
    "fp32": "#1b1b3a",
    "tf32": "#4a4e9e",
    "bf16": "#d9822b",
    "fp16": "#b3446c",
    "fp8": "#8fbcbb",
}
HATCHES = {"fp32": "", "tf32": "..", "bf16": "//", "fp16": "xx", "fp8": "--"}


def use_style() -> None:
    """Set the collection's matplotlib style for this process; call it once, at the top."""
    plt.rcParams.update(
        {
            "figure.dpi": 80,
            "figure.figsize": (8.0, 3.5),
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "legend.frameon": False,
        }
    )


def save(path, draw, *arguments) -> None:
    """Draw a figure and write it as a PNG file, without a window and without pyplot's list of them.

    `draw` is one of the functions here that take a figure. Raises `OptionError` if it cannot be
    written.
    """
    use_style()
    figure = draw(*arguments, Figure())
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written ({error.strerror})") from error
