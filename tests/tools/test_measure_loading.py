"""Every way of reading images hands out the same kind of batches."""

import pytest
import torch
from PIL import Image

from measure import loading


@pytest.mark.weekly
@pytest.mark.parametrize("factor", loading.PARTS.values())
def test_every_way_reads_images_of_the_size_into_normalised_batches(factor, tmp_path):
    folder = loading.make_files(tmp_path, factor, classes=2)
    with Image.open(next(folder.rglob("*.jpg"))) as image:
        assert factor * 120 <= min(image.size) <= max(image.size) < factor * 320
    ways = loading.ways(folder, torch.device("cpu"), workers=0)
    assert list(ways) == ["torchvision", "timm", "amp_lab"]
    for name, way in ways.items():
        images, targets = next(iter(way()))
        assert images.dtype is torch.float32, name
        assert images.shape == (len(targets), 3, 224, 224), name
        assert -2.2 < images.min() < 0 < images.max() < 2.7, name  # (0 or 1 - mean) / std
        loading.read(way, 1, torch.device("cpu"))
