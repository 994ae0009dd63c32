"""A small network that learns handwritten digits, and the gradients in it, for notebook 01."""

import torch
from sklearn.datasets import load_digits
from torch import nn


def load_images(device):
    """scikit-learn's handwritten digits: images (1797, 64) in [0, 1], and labels (1797,)."""
    data, targets = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32, device=device) / 16
    return images, torch.tensor(targets, device=device)


def new_network(device):
    """A small network for them, with the same weights every time."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*layers).to(device)


def train(model, images, labels, steps=200, batch_size=256):
    """Plain fp32 training. The batches are drawn on the CPU, so that they are the same anywhere."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (batch_size,)).to(images.device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def activation_gradients(model, inputs, targets):
    """The gradients of the mean loss with respect to the output of each layer, in fp32."""
    outputs, hidden = [], inputs
    for layer in model:
        hidden = layer(hidden)
        hidden.retain_grad()
        outputs.append(hidden)
    nn.functional.cross_entropy(hidden, targets).backward()
    return [output.grad for output in outputs]
