"""Image models of timm."""

import importlib

import torch

SIZES = {
    "resnet18": 64,
    "convnext_atto": 64,
    "efficientnet_b0": 64,
    "mobilenetv3_small_050": 64,
    "regnetx_002": 64,
    "vit_tiny_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "mixer_s16_224": 224,
    "deit_tiny_patch16_224": 224,
    "maxvit_tiny_tf_224": 224,
}


def build(name):
    size = SIZES[name]
    model = importlib.import_module("timm").create_model(name)
    return model, (torch.randn(2, 3, size, size),), {}


def resnet_in_bf16():
    model, (images,), kwargs = build("resnet18")
    return model.bfloat16(), (images.bfloat16(),), kwargs


MODELS = {f"timm {name}": lambda name=name: build(name) for name in SIZES}
MODELS["resnet18, weights in bf16"] = resnet_in_bf16
