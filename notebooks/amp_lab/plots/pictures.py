"""Images that a model is given, or makes."""

import matplotlib.pyplot as plt


def side_by_side(pictures) -> plt.Figure:
    """Pictures {title: (1, 1, H, W)} with values in [0, 1], on one grey scale."""
    figure, axes = plt.subplots(1, len(pictures), figsize=(2.6 * len(pictures) + 0.8, 3.0))
    for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
        image = ax.imshow(picture[0, 0].cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        ax.set_title(title)
        ax.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label="brightness")
    return figure


def picture_problem(inputs, target) -> plt.Figure:
    """The inputs (1, 2, H, W) and the target (1, 1, H, W) of the quantized-sine problem."""
    return side_by_side({"input: x": inputs[:, :1], "input: y": inputs[:, 1:], "target": target})


def augmentation_grid(rows) -> plt.Figure:
    """Images {title: [(3, H, W) in epoch 0, …]} with values in [0, 1], a row for each title.

    Drawn in 16 levels a channel: noise in all 256 would fill a notebook's file.
    """
    columns = len(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(1.3 * columns, 1.3 * len(rows) + 0.3), squeeze=False
    )
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for epoch, (ax, image) in enumerate(zip(line, images, strict=True)):
            levels = (image.permute(1, 2, 0).clip(0, 1) * 15).round() / 15
            ax.imshow(levels.numpy(), interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            if ax in axes[0]:
                ax.set_title(f"epoch {epoch}", fontsize=11)
        line[0].set_ylabel(title, fontsize=9)
    return figure


def class_pictures(images, names) -> plt.Figure:
    """One picture (3, H, W) of any range of values for each class, with its name."""
    rows = 2
    columns = -(-len(images) // rows)
    figure, axes = plt.subplots(rows, columns, figsize=(1.3 * columns, 1.6 * rows))
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, image, name in zip(axes.flat, images, names, strict=False):
        low, high = image.min(), image.max()
        levels = ((image - low) / (high - low) * 15).round() / 15  # fewer make a smaller file
        ax.imshow(levels.permute(1, 2, 0).numpy(), interpolation="nearest")
        ax.set_title(name, fontsize=11)
    return figure
