"""Images: inputs of a model, and its outputs."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor

from amp_lab.plots import style

_ONE_SCALE = {"cmap": "gray", "vmin": 0, "vmax": 1}  # the same for all, to compare pictures


def side_by_side(pictures: Mapping[str, Tensor], values: str = "brightness") -> Figure:
    """Pictures {title: (1, 1, H, W)} with `values` in [0, 1], on one grey scale."""
    columns = len(pictures)
    width = 2.6 * columns + 0.8
    size = (width, 3.0)
    figure, axes = style.subplots(1, columns, size)
    for ax, title, picture in style.by_panel(axes, pictures):
        grey = picture[0, 0].cpu()
        pixels = grey.numpy()
        image = ax.imshow(pixels, **_ONE_SCALE)
        ax.set_title(title)
        ax.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label=values)
    return figure
