"""Images that a model is given, or makes."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from amp_lab.plots import style


def side_by_side(pictures: Mapping[str, Tensor], values: str = "brightness") -> Figure:
    """Pictures {title: (1, 1, H, W)} with `values` in [0, 1], on one grey scale."""
    figure, axes = style.subplots(1, len(pictures), size=(2.6 * len(pictures) + 0.8, 3.0))
    for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
        image = ax.imshow(picture[0, 0].cpu().numpy(), cmap="gray", vmin=0, vmax=1)  # one scale
        ax.set_title(title)
        ax.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label=values)
    return figure


def augmentation_grid(rows: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Images {title: [(3, H, W) in epoch 0, …]} with values in [0, 1], a row for each title."""
    columns = len(next(iter(rows.values())))
    size = (1.3 * columns, 1.3 * len(rows) + 0.3)
    figure, axes = style.subplots(len(rows), columns, size=size, squeeze=False)
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            # In 16 levels a channel: noise in all 256 would fill a notebook's file.
            levels = (image.clip(0, 1) * 15).round() / 15
            ax.imshow(levels.permute(1, 2, 0).numpy(), interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        line[0].set_ylabel(title, fontsize=9)
    for epoch, ax in enumerate(axes[0]):
        ax.set_title(f"epoch {epoch}", fontsize=11)
    return figure
