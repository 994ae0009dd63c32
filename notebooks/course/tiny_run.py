"""A training run so small that fp16 is no burden to a CPU: for notebook 05."""

import torch
from torch import nn

from amp_lab.train.data import load_dataset


def tiny_digits():
    """64 digits of 8x8 pixels, and as many classes as digits."""
    return load_dataset("digits", image_size=8, limit=64)


def new_tiny_run(seed: int, device: torch.device) -> dict:
    """Network, optimizer, schedule and scaler of a run of 16 steps, by name.

    The scaler starts far too high and grows after five good steps in a row, so that its state
    matters within these steps.
    """
    torch.manual_seed(seed)
    hidden = [nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=16)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def largest_difference(run: dict, other: dict) -> float:
    """The largest difference between a weight of one run and the same weight of another."""
    weights = [nn.utils.parameters_to_vector(r["model"].parameters()) for r in (run, other)]
    return (weights[0] - weights[1]).abs().max().item()
