"""The trainings of notebook 13: one small network with the toy Apex, and as one writes it today."""

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
    samples = torch.randn(64, 8).split(16)
    return [(x.to(device), x.sin().mean(dim=1, keepdim=True).to(device)) for x in samples]


def new_model(device):
    """The same network every time; its first layer records the dtype of its output."""
    torch.manual_seed(1)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
    model = nn.Sequential(*layers).to(device)
    model[0].register_forward_hook(lambda layer, _, out: setattr(layer, "output_dtype", out.dtype))
    return model


def new_adam(model):
    """Adam for a model."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def loss_of(model, batch):
    """The loss, made 12 times too large, so that the first loss scale is too large as well."""
    x, y = batch
    return 12 * F.mse_loss(model(x), y)


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
    with torch.autocast(batch[0].device.type, dtype=dtype, enabled=dtype is not None):
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def train_apex(level, batches, model, steps=24):
    """Train with Apex at a level."""
    with ToyApex() as amp:
        model, optimizer = amp.initialize(model, new_adam(model), opt_level=level)
        losses = [apex_step(amp, model, optimizer, batches[i % 4]) for i in range(steps)]
        return Run(losses, model, optimizer, amp.loss_scale.scale)


def train_today(dtype, batches, model, steps=24):
    """Train with autocast and a scaler for fp16, and without both for None."""
    optimizer = new_adam(model)
    scaler = torch.amp.GradScaler(batches[0][0].device.type, enabled=dtype is fp16)
    losses = [today_step(model, optimizer, scaler, dtype, batches[i % 4]) for i in range(steps)]
    return Run(losses, model, optimizer, scaler.get_scale())


def apex_state(amp, model, optimizer):
    """What a checkpoint of Apex held, with the master weights, as some programs added them."""
    weights = {k: v.float() if v.dtype is fp16 else v for k, v in model.state_dict().items()}
    scaler = {"loss_scale": amp.loss_scale.scale, "unskipped": amp.loss_scale.unskipped}
    return {
        "model": OrderedDict((f"module.{name}", value) for name, value in weights.items()),
        "optimizer": optimizer.state_dict(),
        "amp": OrderedDict(loss_scaler0=scaler),
        "master params": [p.detach() for p in amp.master_params(optimizer)],
    }


def train_and_save(level, batches, model, path: Path, growth_interval):
    """Train for 8 steps, write a checkpoint, and train for 8 more, whose run is returned."""
    with ToyApex() as amp:
        model, optimizer = amp.initialize(model, new_adam(model), opt_level=level)
        amp.loss_scale.window = growth_interval
        for i in range(8):
            apex_step(amp, model, optimizer, batches[i % 4])
        torch.save(apex_state(amp, model, optimizer), path)
        losses = [apex_step(amp, model, optimizer, batches[i % 4]) for i in range(8, 16)]
        return Run(losses, model, optimizer, amp.loss_scale.scale)


def dtypes(run):
    """The dtype of each kind of tensor after a training."""
    weight, updated = run.model[0].weight, run.optimizer.param_groups[0]["params"][0]
    found = {
        "weights": weight.dtype,
        "batch norm": run.model[1].weight.dtype,
        "activations": run.model[0].output_dtype,
        "gradients": weight.grad.dtype,
        "Adam's params": updated.dtype,
        "Adam's state": run.optimizer.state[updated]["exp_avg"].dtype,
    }
    return {what: str(dtype).removeprefix("torch.") for what, dtype in found.items()}


def distance(found, reference):
    """Largest difference of two lists of numbers, relative to the largest number."""
    found, reference = torch.as_tensor(found), torch.as_tensor(reference)
    return ((found - reference).abs().max() / reference.abs().max()).item()


def check_close(found, reference, tolerance):
    """Assert that two runs have the same losses, within `tolerance`, and the same scale."""
    assert distance(found.losses, reference.losses) <= tolerance
    assert found.scale == reference.scale
    how = f"within {tolerance:.0e} of the largest" if tolerance else "the last bit"
    print(f"the losses are equal to {how}; the loss scale is {found.scale:.0f} in both")
