"""What notebook 06 trains on: Caltech-256 and pretrained weights, or what takes their place."""

from pathlib import Path
from typing import Any

import torch
from torchvision.models import ResNet50_Weights

from amp_lab import load_dataset, make_stand_in
from amp_lab.train.data.samples import DataSplits

_FOLDER = "256_ObjectCategories"


def load_caltech256(
    folder: str | Path, *, image_size: int, download: bool, stand_in: dict[str, Any]
) -> DataSplits:
    """Caltech-256 from ``data/``, or else pictures in its layout, generated in `folder`.

    With `download` it is fetched if it is missing. `stand_in` are options of `make_stand_in`.
    """
    # The notebook may run in its folder, or in the one above.
    root = Path("data") if Path("data").is_dir() else Path("../data")
    places = [root / _FOLDER, root / "caltech256" / _FOLDER]
    if download or any(place.is_dir() for place in places):
        place = root
    else:
        place = make_stand_in("caltech256", folder, **stand_in)
    data = load_dataset("caltech256", place, image_size=image_size, download=download)
    print("generated pictures, not Caltech-256" if data.stand_in else "the real Caltech-256")
    return data


def pretrained_weights(*, download: bool) -> ResNet50_Weights | None:
    """Weights trained on ImageNet, if torchvision has them in its cache or may `download` them."""
    weights = ResNet50_Weights.IMAGENET1K_V2
    cached = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    if cached.exists() or download:
        print("pretrained weights")
        return weights
    print("random weights: the accuracy will mean little")
    return None
