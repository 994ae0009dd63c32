"""Denoisers and an autoencoder of diffusers."""

import importlib

import torch

IMAGE, LATENT = (2, 3, 32, 32), (2, 4, 16, 16)
UNET = {"block_out_channels": (32, 64), "norm_num_groups": 8, "attention_head_dim": 8}


def build(name, *args, config, **kwargs):
    return getattr(importlib.import_module("diffusers"), name)(**config), args, kwargs


def steps():
    return torch.tensor([1, 2])


def unet():
    config = UNET | {"sample_size": 32}
    config["down_block_types"] = "DownBlock2D", "AttnDownBlock2D"
    config["up_block_types"] = "AttnUpBlock2D", "UpBlock2D"
    return build("UNet2DModel", torch.randn(IMAGE), steps(), config=config)


def conditional_unet():
    config = UNET | {"sample_size": 16, "cross_attention_dim": 32}
    config["down_block_types"] = "CrossAttnDownBlock2D", "DownBlock2D"
    config["up_block_types"] = "UpBlock2D", "CrossAttnUpBlock2D"
    inputs = torch.randn(LATENT), steps(), torch.randn(2, 5, 32)
    return build("UNet2DConditionModel", *inputs, config=config)


def dit():
    config = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
    config |= {"num_layers": 2, "sample_size": 16, "num_embeds_ada_norm": 10}
    labels = {"timestep": steps(), "class_labels": steps()}
    return build("DiTTransformer2DModel", torch.randn(LATENT), config=config, **labels)


def vae():
    config = {"block_out_channels": (32, 64), "norm_num_groups": 8, "sample_size": 32}
    config["down_block_types"] = ("DownEncoderBlock2D",) * 2
    config["up_block_types"] = ("UpDecoderBlock2D",) * 2
    return build("AutoencoderKL", torch.randn(IMAGE), config=config)


MODELS = {"unet": unet, "conditional unet": conditional_unet, "dit": dit, "vae": vae}
