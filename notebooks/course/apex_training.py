"""The trainings of notebook 13: one small network with the toy Apex, and as one writes it today."""

import itertools
from collections import OrderedDict, namedtuple
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from course.toy_apex import ToyApex

fp16 = torch.float16
Run = namedtuple("Run", "losses model optimizer scale")


def small_batches(device):
    """Four batches ``(x, y)`` of 16 samples, of a smooth function of 8 values."""
    torch.manual_seed(0)
    batches = []
    for x in torch.randn(64, 8).split(16):
        y = x.sin().mean(dim=1, keepdim=True)
        batches.append((x.to(device), y.to(device)))
    return batches


def new_model(device):
    """The same network every time; its first layer records the dtype of its output."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    model.to(device)

    def record(layer, inputs, output):
        layer.output_dtype = output.dtype

    model[0].register_forward_hook(record)
    return model


def new_adam(model):
    """Adam for a model."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def loss_of(model, batch):
    """The loss, made 12 times too large, so that the first loss scale is too large as well."""
    x, y = batch
    loss = F.mse_loss(model(x), y)
    return 12 * loss


def apex_step(amp, model, optimizer, batch):
    """A training step with Apex; returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


def today_step(model, optimizer, scaler, dtype, batch):
    """The same step today; `dtype` is None for fp32. Returns the loss."""
    optimizer.zero_grad()
    x, _ = batch
    is_low = dtype is not None
    with torch.autocast(x.device.type, dtype=dtype, enabled=is_low):
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def apex_steps(amp, model, optimizer, batches, steps):
    """Train with Apex, with the batches in turn; returns the loss of each step."""
    turns = itertools.islice(itertools.cycle(batches), steps)
    return [apex_step(amp, model, optimizer, batch) for batch in turns]


def train_apex(level, batches, model, steps=24):
    """Train with Apex at a level."""
    with ToyApex() as amp:
        optimizer = new_adam(model)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        losses = apex_steps(amp, model, optimizer, batches, steps)
        scale = amp.loss_scale.scale
    return Run(losses, model, optimizer, scale)


def train_today(dtype, batches, model, steps=24):
    """Train with autocast and a scaler for fp16, and without both for None."""
    optimizer = new_adam(model)
    x, _ = batches[0]
    scaler = torch.amp.GradScaler(x.device.type, enabled=dtype is fp16)
    losses = []
    for batch in itertools.islice(itertools.cycle(batches), steps):
        loss = today_step(model, optimizer, scaler, dtype, batch)
        losses.append(loss)
    scale = scaler.get_scale()
    return Run(losses, model, optimizer, scale)


def apex_state(amp, model, optimizer):
    """What a checkpoint of Apex held, with the master weights, as some programs added them."""
    weights = OrderedDict()
    for name, value in model.state_dict().items():
        if value.dtype is fp16:
            value = value.float()
        weights[f"module.{name}"] = value
    loss_scale = amp.loss_scale
    scaler = {"loss_scale": loss_scale.scale, "unskipped": loss_scale.unskipped}
    masters = [master.detach() for master in amp.master_params(optimizer)]
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "amp": OrderedDict(loss_scaler0=scaler),
        "master params": masters,
    }


def train_and_save(level, batches, model, path: Path, growth_interval):
    """Train for 8 steps, write a checkpoint, and train for 8 more, whose run is returned."""
    with ToyApex() as amp:
        optimizer = new_adam(model)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        amp.loss_scale.window = growth_interval
        apex_steps(amp, model, optimizer, batches, steps=8)  # each of the four batches twice
        checkpoint = apex_state(amp, model, optimizer)
        torch.save(checkpoint, path)
        losses = apex_steps(amp, model, optimizer, batches, steps=8)
        scale = amp.loss_scale.scale
    return Run(losses, model, optimizer, scale)


def dtypes(run):
    """The dtype of each kind of tensor after a training."""
    linear, batch_norm = run.model[:2]
    updated = run.optimizer.param_groups[0]["params"][0]
    state = run.optimizer.state[updated]
    found = {
        "weights": linear.weight.dtype,
        "batch norm": batch_norm.weight.dtype,
        "activations": linear.output_dtype,
        "gradients": linear.weight.grad.dtype,
        "Adam's params": updated.dtype,
        "Adam's state": state["exp_avg"].dtype,
    }
    return {what: str(dtype).removeprefix("torch.") for what, dtype in found.items()}


def distance(found, reference):
    """Largest difference of two lists of numbers, relative to the largest number."""
    found = torch.as_tensor(found)
    reference = torch.as_tensor(reference)
    difference = (found - reference).abs().max()
    largest = reference.abs().max()
    return (difference / largest).item()


def check_close(found, reference, tolerance):
    """Assert that two runs have the same losses, within `tolerance`, and the same scale."""
    assert distance(found.losses, reference.losses) <= tolerance
    assert found.scale == reference.scale
    how = f"within {tolerance:.0e} of the largest" if tolerance else "the last bit"
    print(f"the losses are equal to {how}; the loss scale is {found.scale:.0f} in both")
