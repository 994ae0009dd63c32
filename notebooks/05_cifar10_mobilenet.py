# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Put AMP into an image-classification loop, and keep accuracy
#
# **What you'll do.** Write an ordinary training loop for MobileNetV2, put AMP into it line by line,
# train it in several precisions, and compare what they reach. Then look at the places where such a
# loop goes wrong: a network that AMP makes slower, clipped gradients, and an interrupted run.
#
# **What you'll learn.**
# - which lines of the loop change, and how one function serves every precision;
# - how to tell whether reduced precision has cost accuracy;
# - why a network can lose time under autocast, how to find the layers to blame, and what to do;
# - how to clip gradients, and how to save and resume, when there is a scaler;
# - whether sizes in multiples of 8 matter on your device.
#
# **What you need.** [Notebook 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`, [notebook
# 04](04_fp32_vs_amp.ipynb) for the AMP step and for measuring. It runs on a CPU in a minute or two,
# without a download; on a GPU it takes the network and the number of epochs in full.
#
# Network, data and task are those of a widely shared notebook, *Mixed Precision Training (PyTorch,
# TF2.X)*.

# %% tags=["nbval-ignore-output"]
import os
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import MobileNetV2

from amp_lab import Precision, compare, describe_device, load_checkpoint, plots, save_checkpoint
from amp_lab.checkpoint import random_states, restore_random_states
from amp_lab.data import batches, load_dataset
from amp_lab.errors import CheckpointError
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# What AMP changes in a network that you have not touched, and what it leaves alone, in a few lines:

# %%
torch.manual_seed(0)
model = MobileNetV2(num_classes=10, width_mult=0.25).to(device)
with torch.autocast(device.type, dtype=torch.bfloat16):
    logits = model(torch.randn(4, 3, 32, 32, device=device))
    loss = F.cross_entropy(logits.float(), torch.arange(4, device=device))
loss.backward()
weight = model.features[0][0].weight
print(
    f"logits {logits.dtype}; loss {loss.dtype}; weights {weight.dtype}; grads {weight.grad.dtype}"
)
assert logits.dtype is torch.bfloat16
assert loss.dtype is weight.dtype is weight.grad.dtype is torch.float32

# %% [markdown]
# The activations become narrow. The weights and their gradients stay FP32, so the optimizer never
# notices. Everything below rests on that.
#
# ## Settings
#
# The full scale is that of the source: the whole network, and batches of 128. The quick scale takes
# a network with a third of the channels and a quarter of the blocks, which two CPU cores can train
# six times while you read on.

# %%
DOWNLOAD = False  # True: fetch CIFAR-10 (170 MB) into data/ if it is not there
stages = [[1, 16, 1, 2], [6, 24, 1, 2], [6, 32, 1, 2], [6, 64, 1, 1]]  # of the small network:
# expansion, channels, blocks, and the stride of the first block
config = {
    "quick": {
        "network": {"width_mult": 0.35, "inverted_residual_setting": stages},
        "limit": 900,  # training images at most
        "batch_size": 64,
        "epochs": 5,
        "lr": 1e-2,  # the highest of the schedule
    },
    "full": {"network": {}, "limit": None, "batch_size": 128, "epochs": 30, "lr": 5e-3},
}[scale]
seeds = (0, 1, 2)  # one training run each, for every precision

# %% [markdown]
# ## The data
#
# CIFAR-10 is used if it is in `data/`, or if you set `DOWNLOAD` above. Otherwise the network learns
# scikit-learn's handwritten digits, enlarged to the same 32x32 pixels.

# %% tags=["nbval-ignore-output"]
root = Path("data") if Path("data").is_dir() else Path("../data")  # the notebook may run in either
cifar10 = DOWNLOAD or (root / "cifar-10-batches-py").is_dir()
name = "cifar10" if cifar10 else "digits"
data = load_dataset(name, root, limit=config["limit"], download=DOWNLOAD)
print("generated pictures in place of" if data.stand_in else "the real", data.name, end=": ")
print(f"{len(data.train)} training and {len(data.test)} test images of {data.image_size} pixels")
assert len(data.train) > config["batch_size"]
assert data.image_size == 32

# %% [markdown]
# One test image of each class, with the name of the class above it:

# %% tags=["nbval-ignore-output"]
first = [data.test.targets.tolist().index(target) for target in range(len(data.classes))]
_ = plots.class_pictures([data.test[index][0] for index in first], data.classes)

# %% [markdown]
# `batches` serves them as float32 tensors (B, 3, 32, 32), already normalised. The training images
# are moved about a little, and come in an order that depends on nothing but seed and epoch, so
# every precision sees the same pixels.


# %%
def train_loader(epoch, seed):
    """Batches of training images and targets, shuffled."""
    size = config["batch_size"]
    return batches(data.train, size, epoch=epoch, seed=seed, drop_last=True, device=device)


def test_loader():
    """Batches of held-out images and targets."""
    return batches(data.test, 256, device=device)


once, again, later = (next(iter(train_loader(epoch, seed=0)))[0] for epoch in (0, 0, 1))
assert torch.equal(once, again)  # the same seed and epoch: the same pixels
assert not torch.equal(once, later)


# %% [markdown]
# ## The plain loop
#
# As one would write it without a thought of precision. `channels_last` is a layout in memory that,
# as a rule of thumb, convolutions prefer; FP32 gets it too, since a comparison is only worth
# something against the best baseline. The loss is summed on the device, and read once per epoch,
# because every `loss.item()` makes the CPU [wait for the
# GPU](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization).


# %%
def train_epoch_fp32(model, loader, optimizer, scheduler):
    """Train for one pass over `loader`; returns the mean loss."""
    model.train()
    loss_sum, samples = torch.zeros((), device=device), 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        targets = targets.to(device, non_blocking=True)
        outputs = model(images)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        loss_sum += loss.detach() * len(targets)
        samples += len(targets)
    return loss_sum.item() / samples


# %% [markdown]
# ## The same loop with AMP
#
# The marked lines are new or changed, and nothing else is. The forward pass and the loss go under
# autocast; the scaler takes over `backward` and `step`.
#
# `outputs.float()` has the whole loss computed in FP32. Without it the backend decides: a CPU
# computes cross-entropy in FP32 anyway, but CUDA rounds the log-probabilities inside it to the
# narrow format before they are averaged ([notebook
# 09](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) shows this). Where the outputs are FP32
# already, it does nothing.


# %%
def train_epoch_amp(model, loader, optimizer, scheduler, scaler, dtype):
    """Train for one pass over `loader` under autocast; returns the mean loss."""
    model.train()
    loss_sum, samples = torch.zeros((), device=device), 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        targets = targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype):  # AMP
            outputs = model(images)
            loss = F.cross_entropy(outputs.float(), targets)  # AMP: in fp32
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP
        optimizer.zero_grad()
        scheduler.step()
        loss_sum += loss.detach() * len(targets)
        samples += len(targets)
    return loss_sum.item() / samples


# %% [markdown]
# ## One loop for every precision
#
# Two loops are one too many: sooner or later a bug is fixed in only one of them. Both autocast and
# `GradScaler` take `enabled=`, and do nothing when it is false. So one loop serves all, if autocast
# is enabled for fp16 and bf16, and the scaler for fp16 alone.


# %%
def train_epoch(model, loader, optimizer, scheduler, scaler, dtype):
    """Train for one pass over `loader`, in any precision; returns the mean loss."""
    model.train()
    loss_sum, samples = torch.zeros((), device=device), 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        targets = targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            outputs = model(images)
            loss = F.cross_entropy(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        loss_sum += loss.detach() * len(targets)
        samples += len(targets)
    return loss_sum.item() / samples


# %% [markdown]
# Evaluation needs autocast and no scaler, since there are no gradients.


# %%
@torch.inference_mode()
def evaluate(model, loader, dtype):
    """Share of the images in `loader` that `model` classifies right, from 0 to 1."""
    model.eval()
    correct, samples = torch.zeros((), dtype=torch.int64, device=device), 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        targets = targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            outputs = model(images)
        correct += (outputs.argmax(1) == targets).sum()
        samples += len(targets)
    return correct.item() / samples


# %% [markdown]
# A run has a network, an optimizer, a schedule, and *one* scaler that lives as long as the run. A
# new scaler in each epoch would forget the loss scale it had found, and look for it again by
# skipping steps. `fused=True` gives an optimizer that the scaler can tell to skip a step without
# waiting for the device, as [notebook 03](03_grad_scaler_step_by_step.ipynb) counts.


# %%
def new_run(dtype, seed, steps):
    """Everything that changes while a network is trained, by name."""
    torch.manual_seed(seed)
    model = MobileNetV2(num_classes=len(data.classes), **config["network"])
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=steps)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


# %% [markdown]
# Does the one loop compute what the two did? Two batches in each, from the same start. On a CPU the
# losses are equal to the last bit; a GPU [may add up in another order each
# time](https://docs.pytorch.org/docs/stable/notes/randomness.html).

# %%
pair = [data.train.batch(range(16)), data.train.batch(range(16, 32))]
for dtype, other_loop in ((torch.float32, train_epoch_fp32), (torch.bfloat16, train_epoch_amp)):
    loss = train_epoch(loader=pair, dtype=dtype, **new_run(dtype, seed=0, steps=2))
    run = new_run(dtype, seed=0, steps=2)
    if dtype is torch.float32:
        del run["scaler"]  # the plain loop has none
        expected = other_loop(loader=pair, **run)
    else:
        expected = other_loop(loader=pair, dtype=dtype, **run)
    assert loss == expected if device.type == "cpu" else abs(loss - expected) < 1e-2

# %% [markdown]
# ## Train in each precision
#
# A recent NVIDIA GPU [runs FP32 convolutions in
# TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices) unless told not to, so FP32 and TF32 are set
# for the whole pass, forward and backward, as in notebook 04.


# %%
def float32_mode(precision):
    """TF32 off for FP32, on for TF32; nothing to set for the others."""
    return precision.autocast(device.type) if precision.dtype is torch.float32 else nullcontext()


def train(precision, seed):
    """Train a new network; returns its mean loss and held-out accuracy by epoch, (2, epochs)."""
    steps = config["epochs"] * len(train_loader(0, seed))
    run, history = new_run(precision.dtype, seed, steps), []
    with float32_mode(precision):
        for epoch in range(config["epochs"]):
            loss = train_epoch(loader=train_loader(epoch, seed), dtype=precision.dtype, **run)
            accuracy = evaluate(run["model"], test_loader(), precision.dtype)
            history.append((loss, accuracy))
    return torch.tensor(history).T


# %% [markdown]
# The precisions are FP32, and those that this device accelerates; bf16 if it accelerates none. fp16
# is left out on a CPU, since few CPUs have fast arithmetic for it (`amp-lab doctor` says whether
# yours has). Each precision trains three times.

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
fit_for = [p for p in report.accelerated if device.type != "cpu" or p != "fp16"]
precisions = [Precision.FP32, *reversed(fit_for or [Precision.BF16])]
print("comparing", ", ".join(precisions))
if not report.trusted:
    print("not trusted: the machine was busy, so another choice may be better")
runs = {p: torch.stack([train(p, seed) for seed in seeds]) for p in precisions}
# each (seeds, 2, epochs): losses and accuracies
losses, accuracies = ({p: run[:, i] for p, run in runs.items()} for i in (0, 1))
_ = plots.loss_and_accuracy(losses, accuracies)
assert all((loss[:, -1] < 0.5 * loss[:, 0]).all() for loss in losses.values())  # it has learned

# %% [markdown]
# Left the training loss, right the accuracy on images that were not trained on. Each line is the
# mean over three seeds, and the band around it reaches from the lowest seed to the highest. The
# question is whether a line leaves the band of FP32.
#
# ## Has accuracy been kept?
#
# Two things make accuracies differ that have nothing to do with precision. Seeds differ among
# themselves. And a test set of $n$ images knows an accuracy $p$ only to within about $\sqrt{p (1 -
# p) / n}$, its standard error. A rough yardstick is both together: a difference counts if it is
# larger than the spread of seeds and two standard errors.

# %% tags=["nbval-ignore-output"]
final = {precision: accuracy[:, -1] for precision, accuracy in accuracies.items()}  # (seeds,) each
base = final[Precision.FP32].mean().item()
spread = max((found.max() - found.min()).item() for found in final.values())
error = (base * (1 - base) / len(data.test)) ** 0.5
for precision, found in final.items():
    difference = found.mean().item() - base
    print(f"{precision}: {found.mean():.1%}, {100 * difference:+.1f} points against fp32")
    assert abs(difference) <= spread + 2 * error
    assert found.mean() > 1.5 / len(data.classes)  # chance is 1 / classes
print(f"seeds differ by up to {100 * spread:.1f} points, the standard error is {100 * error:.1f}")

# %% [markdown]
# The difference between the precisions is within what chance explains. That is all that three seeds
# can say: with more of them, or a larger test set, a smaller difference would show.
#
# ## Is it faster?
#
# Not necessarily. For this we time one training step of the real, full-width network over a range
# of image sizes. A step is `train_epoch` with a single batch, which is on the device already.

# %%
step_sizes, step_batch = {
    "quick": ((32, 64, 96, 160), 8),
    "full": ((32, 64, 96, 128, 160, 224), 128),
}[scale]


def new_step(dtype, size, prepare=lambda model: None):
    """A function that takes a training step on `step_batch` images of `size` pixels a side."""
    torch.manual_seed(0)
    model = MobileNetV2(num_classes=10).to(device, memory_format=torch.channels_last)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    images = torch.randn(step_batch, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    loader = [(images, torch.arange(step_batch, device=device) % 10)]
    return partial(train_epoch, model, loader, optimizer, scheduler, scaler, dtype)


# %% [markdown]
# FP32 is compared with the fastest of the precisions that need autocast.

# %%
amp = next((p for p in fit_for if p.dtype is not torch.float32), Precision.BF16)
both = (Precision.FP32, amp)
assert amp.dtype in (torch.float16, torch.bfloat16)

# %% [markdown]
# `compare` takes turns and watches whether the machine is busy, as [notebook
# 04](04_fp32_vs_amp.ipynb#Time-of-a-training-step) explains. TF32 is off in FP32, as in training.


# %%
def in_mode(precision, function):
    """The function, with TF32 off for FP32 and on for TF32 each time it is called."""

    def call():
        with float32_mode(precision):
            return function()

    return call


# %% [markdown]
# What a device cannot do, it has not done. The rates that `describe_device` measured limit how many
# FLOPs it does in a second and how much it gains over FP32; what waits for memory gains at most 2,
# the ratio of the bytes. We allow half as much again, since a convolution is not the square matrix
# product of which those rates are.


# %%
def is_possible(times, flops=0):
    """Whether the device can be as fast as the comparison of FP32 and AMP says, for these FLOPs."""
    if not (times.trusted and report.trusted):
        return True  # nothing has been claimed
    limits = {p: report.rates[p] for p in both}  # FLOP/s
    limits[amp] = max(limits.values())  # what is emulated is computed in FP32
    within_rates = all(flops / times.median_s(p) <= 1.5 * limits[p] for p in both)
    return within_rates and times.ratio(*both).median <= 1.5 * max(2, report.speedup(amp))


# %% [markdown]
# Now the steps, at one size after the other, until each speed-up is known to 5 %:

# %% tags=["nbval-ignore-output"]
step_times = {}
for size in step_sizes:
    steps = {p: in_mode(p, new_step(p.dtype, size)) for p in both}
    step_times[size] = compare(steps, device=device, precision=0.05, budget_s=6)
    print(f"{size} pixels", step_times[size], sep="\n")
    assert is_possible(step_times[size])

# %% [markdown]
# The figure beside each time of autocast is its speed-up over FP32, with its interval. Below 1.00x
# autocast costs time. What follows from the intervals, in words:


# %%
def verdict(speedup):
    """What a speed-up says, as far as it was measured."""
    if not speedup.trusted:
        return "too busy to tell"
    if speedup.is_above(1):
        return "faster than fp32"
    return "slower than fp32" if speedup.is_below(1) else "as fast as fp32, or too close to tell"


# %% tags=["nbval-ignore-output"]
for size, times in step_times.items():
    print(f"{size:3d} pixels, {amp}: {verdict(times.ratio(*both))}")
small, large = (step_times[size] for size in (step_sizes[0], step_sizes[-1]))
for p in both:  # 25 times as many pixels or more take longer
    assert not small.time_s(p).is_above(large.time_s(p).interval[1]) or not large.trusted

# %% [markdown]
# If it is slower in the first line and faster in the last, the image size decides on your machine,
# for one and the same network. If a line says that the machine was too busy, stop what else runs
# there, and run the cell above again.
#
# ## Why: little arithmetic for every byte
#
# MobileNetV2 alternates two kinds of convolution. A *pointwise* one has 1x1 kernels, and is a
# matrix product over the channels. A *depthwise* one has 3x3 kernels, each of which sees a single
# channel. A hook notes the shapes of every layer; on the meta device that costs nothing.


# %%
def convolutions(size):
    """Each convolution of MobileNetV2, with the shapes of its input and output, in their order."""
    found = []
    with torch.device("meta"):
        model, images = MobileNetV2(num_classes=10), torch.zeros(step_batch, 3, size, size)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, x, y: found.append((m, x[0].shape, y.shape)))
    model(images)
    return found


def kind(layer):
    """What kind of convolution this is."""
    if layer.groups == 1:
        return "pointwise" if layer.kernel_size == (1, 1) else "first"
    return "depthwise, stride 2" if layer.stride == (2, 2) else "depthwise"


# %% [markdown]
# Counting is simple. Each value of the output takes as many products and sums as one filter has
# weights; and input, weights and output each have to travel between memory and the cores.


# %%
def work(layer, input_shape, output_shape):
    """FLOPs of the forward pass of a convolution, and the bytes it reads and writes in fp32."""
    flops = 2 * output_shape.numel() * layer.weight[0].numel()
    return flops, 4 * (input_shape.numel() + layer.weight.numel() + output_shape.numel())


# %%
intensity = {}
for size in (32, 224):
    layers = [(kind(layer), work(layer, x, y)) for layer, x, y in convolutions(size)]
    intensity[size] = [(name, flops / moved) for name, (flops, moved) in layers]
    total = sum(flops for _, (flops, _) in layers) / step_batch
    pointwise = sum(flops for name, (flops, _) in layers if name == "pointwise") / step_batch
    print(f"{size} pixels: {total / 1e6:.0f} MFLOP an image, {pointwise / total:.0%} pointwise")
assert 590e6 < total < 610e6  # the paper counts 300 million products and sums at 224 pixels
for size, times in step_times.items():  # the backward pass takes twice as many as the forward one
    assert is_possible(times, 3 * sum(work(*found)[0] for found in convolutions(size)))
_ = plots.flops_per_byte({f"{size} pixels": values for size, values in intensity.items()})

# %% [markdown]
# Upwards, on a logarithmic axis, how many FLOPs a layer does for each byte it moves. Depthwise
# layers (triangles) lie at the bottom in both panels, those with stride 2 (black) the lowest.
# Pointwise ones (circles) climb at 224 pixels, and come down at 32: their maps have shrunk to a few
# pixels, and the weights make up much of the bytes, in a small batch most of them.

# %%
small_maps = [found for found in convolutions(32) if kind(found[0]) == "pointwise"]
moved = sum(work(*found)[1] for found in small_maps)
share = sum(4 * layer.weight.numel() for layer, _, _ in small_maps) / moved
print(f"32 pixels, batch {step_batch}: weights are {share:.0%} of the bytes of pointwise layers")
assert share > 0.5 or step_batch > 8
for size, values in intensity.items():
    middle = {
        name: statistics.median(value for found, value in values if found.startswith(name))
        for name in ("depthwise", "pointwise")
    }
    print(f"{size} pixels, median FLOPs per byte:", {k: round(v, 1) for k, v in middle.items()})
    assert middle["depthwise"] < 2.5 < middle["pointwise"]

# %% [markdown]
# A 16-bit number has half the bytes of an fp32 one, so memory traffic gets at most twice as fast;
# arithmetic may gain several times as much where the hardware has units for it. As a rule of thumb,
# a layer with few FLOPs per byte waits for memory, or for its own start-up, and has little to win.
#
# ## Why: casts, whatever the size of the images
#
# In every step autocast casts each weight to the narrow format, and the gradient of each back to
# FP32 ([notebook 02](02_autocast_dtypes.ipynb#The-cache-of-weight-casts) counts such casts). The
# weights do not grow with the images, so this takes as long for small images as for large ones. It
# is measured here by itself, and held against the step at the smallest and the largest size:

# %% tags=["nbval-ignore-output"]
model = MobileNetV2(num_classes=10).to(device)
weights = [weight.detach() for weight in model.parameters() if weight.dim() > 1]
casts = {"casts": lambda: [weight.to(amp.dtype).float() for weight in weights]}
cast_times = compare(casts, device=device, budget_s=1)
print(f"{len(weights)} weights there and back:", cast_times)
for size in (step_sizes[0], step_sizes[-1]):
    step = step_times[size].time_s(amp)
    share = cast_times.time_s("casts").times(1 / step.median)
    if not (share.trusted and step.trusted):
        print(f"{size} pixels: too busy to tell what part of a step that is")
    else:
        print(f"{size} pixels: {share.median:.1%} of a step in {amp}")
        assert share.median < 1  # it is a part of it
assert len(weights) == 53  # 52 convolutions and the classifier

# %% [markdown]
# The share of a step tells whether casts matter on your device: the faster the step, the more.
#
# ## Why: a kernel that is not there
#
# Both reasons explain why little is gained, but not why much is lost. For that we time the layers of
# each kind by themselves, forward and backward.


# %%
def new_layer_call(layer, input_shape, dtype):
    """A function that runs this convolution forward and backward on random images."""
    channels, options = (layer.in_channels, layer.out_channels), {"groups": layer.groups}
    options |= {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding")}
    layer = nn.Conv2d(*channels, bias=False, **options)
    layer = layer.to(device, memory_format=torch.channels_last)
    images = torch.randn(input_shape, device=device).to(dtype, memory_format=torch.channels_last)
    images.requires_grad_()

    def call():
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            output = layer(images)
        output.backward(output.detach())

    return call


def all_layers(name, size, dtype):
    """A function that runs all convolutions of one kind."""
    calls = [new_layer_call(m, x, dtype) for m, x, _ in convolutions(size) if kind(m) == name]
    return lambda: [call() for call in calls]


# %% [markdown]
# At 64 pixels, all layers of a kind together. They are parts of the step that was timed above, so
# together they take no more than it does, but for a little: the first layer need not pass on a
# gradient in a step, and each part finds other data in the caches. We allow a quarter.

# %% tags=["nbval-ignore-output"]
kinds = ("first", "pointwise", "depthwise", "depthwise, stride 2")
kind_times = {}
for name in kinds:
    calls = {p: in_mode(p, all_layers(name, 64, p.dtype)) for p in both}
    kind_times[name] = compare(calls, device=device, budget_s=2)
    flops = 3 * sum(work(*layer)[0] for layer in convolutions(64) if kind(layer[0]) == name)
    assert is_possible(kind_times[name], flops)
_ = plots.time_by_kind(kind_times)
if all(times.trusted for times in [step_times[64], *kind_times.values()]):
    for p in both:
        parts_s = sum(times.median_s(p) for times in kind_times.values())
        assert parts_s < 1.25 * step_times[64].median_s(p)
assert [kind(layer) for layer, _, _ in convolutions(64)].count("depthwise, stride 2") == 4

# %% [markdown]
# A pair of bars for each kind of layer: FP32 on the left, and beside it, hatched, autocast with its
# speed-up above the bar; the thin lines are the intervals, and grey bars tell that the machine was
# too busy. Look for a kind whose second bar is much the higher one, although there is
# less work in it than in others.
#
# On a CPU, look at the depthwise layers with stride 2 first, which are only four out of 52. oneDNN
# computes convolutions there, and `ONEDNN_VERBOSE=1` in the environment makes it print the kernel of
# every call. On a CPU with AVX-512 and bf16 we read `jit_dw`, a kernel made for depthwise layers, for
# the gradient of the input at stride 1, and `brgconv_strided`, a general one, at stride 2. Depthwise
# layers with stride 1 may lose as well: the cell of the next figure prints what lost here.
#
# ## The remedy: leave those layers in FP32
#
# Autocast can be disabled inside autocast. The depthwise layers that lost in the figure above, which
# means that their whole interval lies below 1x, become FP32 islands. The rest stays as it is.


# %%
def keep_in_fp32(layer):
    """Make `layer` compute in fp32, inside an autocast block as well."""
    forward = layer.forward

    def forward_in_fp32(x):
        with torch.autocast(device.type, enabled=False):
            return forward(x.float())

    layer.forward = forward_in_fp32


losers = [
    name
    for name in ("depthwise", "depthwise, stride 2")
    if kind_times[name].ratio(*both).is_below(1)
]


def make_islands(model):
    """Keep the layers of those kinds in fp32."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and kind(module) in losers:
            keep_in_fp32(module)


# %% [markdown]
# First, that it does what it says:

# %%
layer = nn.Conv2d(8, 8, 3, groups=8).to(device)
images = torch.randn(1, 8, 4, 4, device=device)
with torch.autocast(device.type, dtype=amp.dtype):
    assert layer(images).dtype is amp.dtype
    keep_in_fp32(layer)
    assert layer(images).dtype is torch.float32
network = MobileNetV2(num_classes=10)
make_islands(network)
assert any("forward" in vars(m) for m in network.modules()) == bool(losers)  # only where one lost

# %% [markdown]
# And then what it buys. The step with islands takes turns with a step in FP32 and with one in plain
# autocast, at each size, so that we can hold it against both:

# %% tags=["nbval-ignore-output"]
print("kept in fp32:", " and ".join(losers) or "nothing, since nothing is known to have lost")
labels = (f"{amp} with islands, over plain {amp}", f"{amp} with islands, over fp32")
speedups = {label: [] for label in labels}
for size in step_sizes:
    steps = {p: in_mode(p, new_step(p.dtype, size)) for p in both}
    steps["islands"] = new_step(amp.dtype, size, make_islands)
    times = compare(steps, device=device, precision=0.05, budget_s=8)
    for label, name in zip(labels, (amp, Precision.FP32), strict=True):
        speedups[label].append(times.ratio(name, "islands"))
        print(f"{size:3d} pixels: {label} {speedups[label][-1]}")
    assert is_possible(times)
_ = plots.speedup_over_size(step_sizes, speedups)

# %% [markdown]
# The picture shows how many times as fast a step with islands is as the other two, against the size
# of the images. Where the solid line lies above 1 with its whole interval, the islands are worth
# their five lines. Where the dashed one does, autocast with islands beats FP32. On a device where
# nothing lost, the solid line lies at 1, up to noise. Points in grey were measured while the machine
# was too busy.
#
# Each interval holds for the seconds in which it was measured. On a host that shares its memory with
# others, the same step may gain more or less a few minutes later, so compare only what took turns.
#
# The lesson is not about one layer of one library. It is that a speed-up is the sum of many parts,
# that a single bad part can eat it up, and that a timing by kind of layer finds it in a minute.
# [Notebook 04](04_fp32_vs_amp.ipynb) has the other case: hardly anything but large matrix products.
#
# ## Clip gradients: unscale first
#
# With a scaler, the gradients in `.grad` after `backward` are multiplied by the loss scale, 65,536
# at the start. Clipping compares their norm with `max_norm`, so it must see the real ones:
# `scaler.unscale_(optimizer)` divides them, and `scaler.step` then knows not to do so again.


# %%
def clipped_step(optimizer_class, max_norm, unscale_first):
    """Take one fp16 step; returns the norm that clipping saw, and how far the weights moved."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(device)
    optimizer = optimizer_class(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device.type)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with torch.autocast(device.type, dtype=torch.float16):
        loss = model(torch.ones(2, 8, device=device)).float().square().sum()
    scaler.scale(loss / 16).backward()
    if unscale_first:
        scaler.unscale_(optimizer)  # the line that matters
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return norm.item(), (after - before).norm().item()


# %% [markdown]
# With plain SGD and a learning rate of 1, the weights move by exactly the clipped gradient. Here
# are both ways, with a `max_norm` of 0.5:

# %%
right_norm, right_move = clipped_step(torch.optim.SGD, max_norm=0.5, unscale_first=True)
wrong_norm, wrong_move = clipped_step(torch.optim.SGD, max_norm=0.5, unscale_first=False)
print(f"with unscale_:    norm {right_norm:8.2f}, weights move by {right_move:.1e}")
print(f"without unscale_: norm {wrong_norm:8.0f}, weights move by {wrong_move:.1e}")
assert 0.5 < right_norm < 10
assert abs(wrong_norm / right_norm / 65_536 - 1) < 1e-3
assert abs(right_move - 0.5) < 1e-3
assert abs(wrong_move * 65_536 - 0.5) < 1e-3

# %% [markdown]
# Without `unscale_` the norm is 65,536 times too large. Every gradient is cut to a norm of 0.5, and
# the scaler divides what is left by 65,536: the step is next to nothing. `max_norm` has lost its
# meaning, and its effect changes whenever the scale does. (The source of this notebook leaves
# `unscale_` out, and sets `max_norm='inf'`, which clips nothing.)
#
# With Adam the mistake hides. Adam divides by the size of the gradients, so that a factor common to
# all steps cancels out:

# %%
adam = torch.optim.AdamW
_, right_move = clipped_step(adam, max_norm=0.5, unscale_first=True)
_, wrong_move = clipped_step(adam, max_norm=0.5, unscale_first=False)
print(f"AdamW: with unscale_ {right_move:.2f}, without {wrong_move:.2f}")
assert abs(wrong_move / right_move - 1) < 0.02

# %% [markdown]
# The loss falls and nothing looks wrong, but now *every* gradient is clipped, large or small, and
# the rare huge one that clipping was meant for is not told from the others. If a gradient has
# overflowed, its norm is infinite or NaN, and the scaler skips the step as always.
#
# ## Save: the whole file or none
#
# A run of hours will be interrupted one day, perhaps while it is saving. `torch.save` writes over
# the old file, so that if it does not get to the end, both are lost. Here the disk runs full in the
# middle, imitated by an object that cannot be written:


# %%
class FullDisk:
    """Fails when it is saved, in the middle of a file."""

    def __reduce__(self):
        raise OSError("no space left on device")


folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "checkpoint.pt")
torch.save({"epoch": 1}, path)
try:
    torch.save({"epoch": 2, "more": FullDisk()}, path)
except OSError as error:
    print(error)
try:
    torch.load(path)
    survived = True
except RuntimeError:
    survived = False
assert not survived  # neither epoch 2 nor epoch 1

# %% [markdown]
# Both checkpoints are gone. The remedy has three parts: write under another name, make sure that the
# file is on the disk, and only then give it the real name, which the file system does at once or
# not at all. This is what *atomic* means.


# %%
def save_atomically(state, path):
    """Save `state` so that `path` is the old file or the new one, never a part of it."""
    partial_path = path.with_suffix(".partial")
    with open(partial_path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk, not only on its way there
    os.replace(partial_path, path)


save_atomically({"epoch": 1}, path)
try:
    save_atomically({"epoch": 2, "more": FullDisk()}, path)
except OSError as error:
    print(error)
assert torch.load(path) == {"epoch": 1}

# %% [markdown]
# `amp_lab.save_checkpoint` does that, and adds a checksum, so that `load_checkpoint` can tell if a
# file has been damaged. Here one byte in the middle is changed:

# %%
save_checkpoint(path, weights=torch.ones(1000))
content = bytearray(path.read_bytes())
content[len(content) // 2] ^= 1
path.write_bytes(content)
try:
    load_checkpoint(path)
    damage = None
except CheckpointError as error:
    damage = str(error).partition(": ")[2]
print(damage)
assert "checksum" in damage

# %% [markdown]
# ## Resume: to the last bit
#
# What has to be in the file? Everything that changes during a run: network, optimizer, schedule,
# scaler, the random states (dropout draws from them), and how far the run has come. The test of
# completeness: an interrupted run must end with *the same weights, bit for bit*, as one that was
# not.
#
# The run is a tiny one in fp16, on digits of 8x8 pixels. Its scaler starts far too high and grows
# every five steps, so that it has something to remember within 16 steps.

# %%
tiny = load_dataset("digits", image_size=8, limit=64)


def new_tiny_run(seed):
    """As `new_run`, for a network so small that fp16 is no burden to a CPU."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=16)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def go_on(run, epochs):
    """Train `run` for these epochs, of four steps each."""
    for epoch in epochs:
        loader = batches(tiny.train, 16, epoch=epoch, seed=0)
        train_epoch(loader=loader, dtype=torch.float16, **run)


# %% [markdown]
# One run goes through, and another is saved in the middle. The order of the images needs no saving,
# because it depends on seed and epoch alone.

# %%
whole = new_tiny_run(seed=0)
go_on(whole, range(4))

half = new_tiny_run(seed=0)
go_on(half, range(2))
save_checkpoint(path, **half, random=random_states(device), epochs_done=2)
scales = [run["scaler"].get_scale() for run in (new_tiny_run(seed=0), half, whole)]
print("loss scale at the start, in the middle, at the end:", scales)
assert scales[0] > scales[1]  # it has skipped steps

# %% [markdown]
# To resume is to make everything anew, fill it from the file, and go on. The new network starts
# from another seed, so that whatever is missing from the file cannot be right by accident.


# %%
def resume(path, forget=()):
    """Go on with the run saved under `path`; the states named in `forget` are not restored."""
    state = load_checkpoint(path)
    run = new_tiny_run(seed=1)
    for name, part in run.items():
        if name not in forget:
            part.load_state_dict(state[name])
    if "random" not in forget:
        restore_random_states(state["random"], device)
    go_on(run, range(state["epochs_done"], 4))
    return run


# %%
resumed = resume(path)
for mine, theirs in zip(resumed["model"].parameters(), whole["model"].parameters(), strict=True):
    assert torch.equal(mine, theirs)
    for key, value in whole["optimizer"].state[theirs].items():
        assert torch.equal(resumed["optimizer"].state[mine][key], value)
assert resumed["scaler"].state_dict() == whole["scaler"].state_dict()
assert resumed["scheduler"].state_dict() == whole["scheduler"].state_dict()
print("bitwise equal: weights, optimizer, scaler, schedule")

# %% [markdown]
# Now the same with one of the states forgotten. How far do the weights end from where they should?


# %%
def distance(run):
    """Largest difference between a weight of `run` and the same of the whole run."""
    mine, theirs = (
        nn.utils.parameters_to_vector(r["model"].parameters()).detach() for r in (run, whole)
    )
    return (mine - theirs).abs().max().item()


for name in ("optimizer", "scheduler", "scaler", "random"):
    forgetful = resume(path, forget=[name])
    print(f"{name} forgotten: weights are off by up to {distance(forgetful):.3f}")
    assert distance(forgetful) > 0
assert distance(resumed) == 0
folder.cleanup()

# %% [markdown]
# None of them raises an error; only the comparison shows it. A forgotten scaler starts again from
# its initial scale, and skips steps until it has found one that works. A forgotten optimizer starts
# Adam's averages from zero.
#
# ## Sizes in multiples of 8: measure
#
# A [common piece of
# advice](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html),
# meant for Tensor Cores, is to choose channels and batch sizes as multiples of 8. Whether it matters depends on device, library and shape, so here is the
# experiment: the rate of three operations at sizes around a multiple of 8. It is the rate, FLOPs
# per second, that is compared, since larger sizes take longer anyway.

# %%
middle_sizes = {
    "quick": {"matrix n x n": 256, "channels": 96, "batch size": 64},
    "full": {"matrix n x n": 4096, "channels": 256, "batch size": 256},
}[scale]
images_shape = {"quick": (8, 14, 14), "full": (128, 28, 28)}[scale]  # batch, height, width


def new_product(what, n, dtype):
    """A matrix product or a 1x1 convolution with a size of `n`: the function, and its FLOPs."""
    if what == "channels":
        batch, height, width = images_shape
        layer = nn.Conv2d(n, n, 1, bias=False).to(device, dtype, memory_format=torch.channels_last)
        images = torch.randn(batch, n, height, width, device=device, dtype=dtype)
        images = images.to(memory_format=torch.channels_last)
        return partial(layer, images), 2 * images.numel() * n
    rows, inner = (n, n) if what == "matrix n x n" else (n, 1280)  # 1280: MobileNetV2's head
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, inner, device=device, dtype=dtype)
    return partial(torch.matmul, left, right), 2 * rows * inner * inner


# %% [markdown]
# All sizes in both precisions take turns, forward only, so that they can be held against each other
# round by round. `compare` repeats a call that is too short for the clock.


# %%
def without_graph(function):
    """The function, with nothing kept for a backward pass."""
    return torch.inference_mode()(in_mode(Precision.FP32, function))


def sizes(what):
    """Sizes around the middle one, three of them multiples of 8."""
    return [middle_sizes[what] + offset for offset in (-9, -8, -7, -4, -1, 0, 1, 4, 7, 8, 9)]


def compare_sizes(what):
    """Times of an operation in both precisions at all sizes, and the FLOPs of each, by name."""
    calls = {f"{p} {n}": new_product(what, n, p.dtype) for p in both for n in sizes(what)}
    functions = {name: without_graph(call) for name, (call, _) in calls.items()}
    flops = {name: count for name, (_, count) in calls.items()}
    return compare(functions, device=device, budget_s=4), flops


# %% [markdown]
# The rate is FLOPs by time, and must again be one that this device can reach:

# %% tags=["nbval-ignore-output"]
found = {what: compare_sizes(what) for what in middle_sizes}
rates = {what: {p: {} for p in both} for what in middle_sizes}
for what, (times, flops) in found.items():
    for p in both:
        for n in sizes(what):
            rates[what][p][n] = flops[f"{p} {n}"] / times.median_s(f"{p} {n}")
    print(f"{what}:", *times.remarks() or [f"{times.rounds} rounds"])
    highest = max(max(line.values()) for line in rates[what].values())
    possible = highest <= 1.5 * max(report.rates[p] for p in both)
    assert possible or not (times.trusted and report.trusted)
_ = plots.rate_over_size(rates, multiple=8)

# %% [markdown]
# One panel for each operation, one line for each precision: its rate at every size, as a multiple
# of the line's median. The vertical lines stand at multiples of 8. If those sizes were special, the
# lines would have a peak on each vertical line. In numbers, how many times as fast the multiples of
# 8 are as the sizes between them, with the interval over the rounds:


# %%
def multiples_over_others(what, precision):
    """Rate at multiples of 8 over that at other sizes: a median of each in every round."""
    (times, flops), turns = found[what], {"multiples": [], "others": []}
    for n in sizes(what):
        name = f"{precision} {n}"
        seconds_per_flop = [seconds / flops[name] for seconds in times.samples_s[name]]
        turns["others" if n % 8 else "multiples"].append(seconds_per_flop)
    medians = {
        kind: tuple(statistics.median(one_round) for one_round in zip(*lists, strict=True))
        for kind, lists in turns.items()
    }
    return replace(times, samples_s=medians).ratio("others", "multiples")


# %% tags=["nbval-ignore-output"]
for what in middle_sizes:
    for precision in both:
        ratio = multiples_over_others(what, precision)
        print(f"{what:12s} {precision}: {ratio}")
        # At worst the other sizes do without the fast units, or a vector is half empty.
        assert not ratio.is_above(1.5 * max(2, report.speedup(amp))) or not report.trusted

# %% [markdown]
# If the interval holds 1.00x, the size does not matter on this device, or so little that this does
# not show it. Well above 1.00x it does, and rounding the
# channels of a layer up to the next multiple of 8 may make it faster *and* larger. torchvision does
# so for MobileNetV2 anyway:

# %%
channels = {
    m.out_channels for m in MobileNetV2(width_mult=0.35).modules() if isinstance(m, nn.Conv2d)
}
print("output channels at width 0.35:", sorted(channels))
assert all(count % 8 == 0 for count in channels)

# %% [markdown]
# ## The ready-made version
#
# `amp-lab train` is this loop as a command, with what a long run needs: it saves in the middle of
# an epoch too, goes on after being killed, and draws its curves. (The project's tests kill it.)
#
# ```bash
# pdm run amp-lab train --dataset cifar10 --precision bf16 --out runs/x
# ```
#
# `--dataset digits` needs no download; `--clip-norm` clips unscaled gradients; `--resume` goes on.
#
# ## Summary
#
# - AMP changed or added five lines of the loop. With `enabled=`, one loop serves every precision,
#   and one scaler serves the whole run.
# - Accuracy was kept: the precisions differed by no more than seeds and a finite test set explain.
# - Autocast pays where there is arithmetic to speed up. Time it on your shapes; if it loses, time
#   the layers by kind, and leave those that lose in FP32.
# - `unscale_` before clipping, or `max_norm` means nothing; with Adam the mistake does not show.
# - A checkpoint needs the scaler, the random states and an atomic write; bitwise equality is the
#   test that nothing is missing.
# - Whether multiples of 8 matter is a question for a measurement.
#
# ## Exercises
#
# 1. Train in bf16 and evaluate in FP32, then the other way round. Does the accuracy change by more
#    than the standard error?
# 2. Set the learning rate ten times as high. Do the precisions still agree? Is the spread of seeds
#    still the same?
# 3. Remove `channels_last` from `new_step`, in both precisions. Where is the crossover now, and
#    which of the two gained from the layout?
# 4. Add clipping to `train_epoch`. How often does `max_norm=1` really clip? Check your loop against
#    `amp_lab.fit(…, clip_norm=1.0)`: the weights should be equal, bit for bit.
# 5. Make `resume` work from the middle of an epoch. `batches` has an argument for it; what else
#    must be in the file?
#
# ## Further reading
#
# - [Sandler et al., *MobileNetV2: Inverted Residuals and Linear
#   Bottlenecks*](https://arxiv.org/abs/1801.04381): the network.
# - [Automatic mixed precision examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html):
#   clipping, accumulation, several losses, in PyTorch's own words.
# - [Saving and loading models](https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html),
#   and [reproducibility](https://docs.pytorch.org/docs/stable/notes/randomness.html): what bitwise
#   equality takes elsewhere.
# - [NVIDIA, *Matrix multiplication background user's
#   guide*](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html):
#   where the advice about multiples of 8 comes from.
