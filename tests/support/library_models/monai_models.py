"""Models of MONAI for volumes, and one of its losses."""

import importlib

import torch
from torch import nn


def nets():
    return importlib.import_module("monai.networks.nets")


def volume(size):
    return torch.randn(1, 1, size, size, size)


def net():
    return nets().UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2)
    )


def unet():
    return net(), (volume(16),), {}


def segresnet():
    model = nets().SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2)
    return model, (volume(16),), {}


def unetr():
    model = nets().UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(32, 32, 32),
        feature_size=4,
        hidden_size=24,
        mlp_dim=48,
        num_heads=4,
    )
    return model, (volume(32),), {}


class WithLoss(nn.Module):
    """A model that returns its loss for a volume of labels."""

    def __init__(self, net, loss):
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, images, labels):
        return self.loss(self.net(images), labels)


def dice():
    loss = importlib.import_module("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
    labels = (volume(16) > 0).float()
    return WithLoss(net(), loss), (volume(16), labels), {}


MODELS = {
    "monai unet": unet,
    "monai segresnet": segresnet,
    "monai unetr": unetr,
    "monai unet, DiceCE": dice,
}
