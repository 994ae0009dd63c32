"""Models of other libraries, small and from their configs: nothing is downloaded.

Each entry of `MODELS` builds (model, args, kwargs); its library is imported when it is built.
"""

import pytest
import torch

from library_models import (
    diffusers_models,
    geometric_models,
    monai_models,
    peft_models,
    segmentation_models,
    timm_models,
    torchaudio_models,
    torchvision_models,
    transformers_models,
    ultralytics_models,
)

BY_LIBRARY = {
    "timm": timm_models.MODELS,
    "transformers": transformers_models.MODELS,
    "peft": peft_models.MODELS,
    "diffusers": diffusers_models.MODELS,
    "torchvision": torchvision_models.MODELS,
    "torchaudio": torchaudio_models.MODELS,
    "torch_geometric": geometric_models.MODELS,
    "monai": monai_models.MODELS,
    "segmentation_models_pytorch": segmentation_models.MODELS,
    "ultralytics": ultralytics_models.MODELS,
}
LIBRARY_OF = {name: library for library, models in BY_LIBRARY.items() for name in models}
MODELS = {name: build for models in BY_LIBRARY.values() for name, build in models.items()}
# Those whose loss is computed in training mode alone, and which have no dropout.
TRAINED = {*torchvision_models.TRAINED, *ultralytics_models.TRAINED}
# What cannot be traced for cuda, and words of the line that says so. On the CPU all can be.
REFUSED = {"torchvision fasterrcnn": "--device cpu --real"}


def built_for_test(name):
    """A model of the list with its inputs, in the mode in which a test can follow it."""
    pytest.importorskip(LIBRARY_OF[name])
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    model.train(name in TRAINED)  # else dropout would draw other numbers
    return model, args, kwargs
