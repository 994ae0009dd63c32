"""Models of segmentation-models-pytorch."""

import importlib

import torch

NAMES = "Unet", "FPN", "DeepLabV3Plus"


def build(name):
    library = importlib.import_module("segmentation_models_pytorch")
    model = getattr(library, name)("resnet18", encoder_weights=None, classes=3)
    return model, (torch.randn(2, 3, 64, 64),), {}


MODELS = {f"segmentation {name}": lambda name=name: build(name) for name in NAMES}
