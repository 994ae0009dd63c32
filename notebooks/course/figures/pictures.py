"""Images: inputs of a model, and its outputs."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from amp_lab.plots import style

_ONE_SCALE = {"cmap": "gray", "vmin": 0, "vmax": 1}  # the same for all, to compare pictures
_LEVELS = 15  # in a channel; with all 256, noise compresses badly and notebooks become large


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


def augmentation_grid(rows: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Images {title: [(3, H, W) in epoch 0, …]} with values in [0, 1], a row for each title."""
    first_row, *_ = rows.values()
    columns = len(first_row)
    width = 1.3 * columns
    count = len(rows)
    height = 1.3 * count + 0.3
    size = (width, height)
    figure, axes = style.subplots(count, columns, size, squeeze=False)
    for row, title, images in style.by_panel(axes, rows):
        for ax, image in zip(row, images, strict=True):
            _show(ax, image)
        row[0].set_ylabel(title, fontsize=9)
    for epoch, ax in enumerate(axes[0]):
        ax.set_title(f"epoch {epoch}", fontsize=11)
    return figure


def _show(ax: Axes, image: Tensor) -> None:
    """Show an image (3, H, W) with few levels in each channel, and without axes."""
    scaled = image.clip(0, 1) * _LEVELS
    rounded = scaled.round() / _LEVELS
    pixels = rounded.permute(1, 2, 0)
    ax.imshow(pixels.numpy(), interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
