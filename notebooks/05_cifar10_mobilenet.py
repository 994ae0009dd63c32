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
# train it in FP32 and with AMP, and compare what they reach. Then look at the places where such a
# loop goes wrong: a network that AMP makes slower, an interrupted run, and clipped gradients.
#
# **What you'll learn.**
# - which lines of the loop change, and how one function serves every precision;
# - how to tell whether reduced precision has cost accuracy;
# - why a network can lose time under autocast, how to find the layers to blame, and what to do;
# - how to save and resume, and how to clip gradients, when there is a scaler.
#
# **What you need.** [Notebook 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`, [notebook
# 04](04_fp32_vs_amp.ipynb) for the AMP step and for measuring. It runs on a CPU, without a
# download; on a GPU it takes the network and the number of epochs in full.
#
# Network, data and task are those of a notebook called *Mixed Precision Training (PyTorch, TF2.X)*.

# %% tags=["nbval-ignore-output"]
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import MobileNetV2

from course import figures, start

from amp_lab import Precision, compare, describe_device, load_checkpoint, save_checkpoint
from amp_lab.core.errors import CheckpointError
from amp_lab.train.checkpoint import random_states, restore_random_states
from amp_lab.train.data import batches, load_dataset

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# Autocast needs no change to this network. Before you run this cell: which of these four will be bf16,
# the logits, the loss, the weights or their gradients?

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
# Only the logits are bf16: they come from a linear layer. The loss would be fp32 in any case; with
# `float()` the log-softmax inside it is fp32 too, [which it otherwise is not on a
# GPU](09_xray_your_model.ipynb#The-surprise-in-cross-entropy). The weights and their gradients stay
# fp32 as well, so the optimizer does not notice that anything has changed, and this is why a few lines
# of the loop are enough.
#
# ## Settings and data
#
# The full scale is that of the notebook named above: the whole network, and batches of 128. The
# quick scale takes a narrower network with fewer blocks, so that two CPU cores can train it six
# times in a short time.

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
# `batches` serves the images as float32 tensors (B, 3, 32, 32), already normalised. The training
# images are moved about a little. How they are moved and in which order they come depends only on the
# seed and the epoch, so every precision sees the same
# pixels. <!-- tests/train/data/test_images.py -->


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
# This is the loop as we would write it for FP32.
# [`channels_last`](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html) is
# a layout in memory that, as a rule of thumb, convolutions prefer. FP32 gets it too, since a
# comparison is only worth something against the best baseline. We sum the loss on the device and
# read it once per epoch, because every `loss.item()` makes the CPU [wait for the
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
# The lines that compute something new are marked, and the function takes two more arguments. The
# forward pass and the loss go under autocast, and the scaler takes over
# `backward` and `step`. <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->
#
# Both autocast and `GradScaler` take `enabled=`. When it is false, autocast casts nothing, and the
# scaler leaves the loss as it is and only calls `optimizer.step`. We enable autocast for fp16 and bf16
# and the scaler for fp16 alone, so that one loop serves every precision. With two loops, a bug is
# easily fixed in only one of them. <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->
#
# `outputs.float()` has the whole loss computed in FP32. Without it the backend decides: a CPU computes
# cross-entropy in FP32 anyway, but CUDA rounds the log-probabilities inside it to the narrow format
# before they are averaged ([notebook 09](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) shows
# this). Where the outputs are FP32 already, it does nothing.


# %%
def train_epoch(model, loader, optimizer, scheduler, scaler, dtype):
    """Train for one pass over `loader`, in any precision; returns the mean loss."""
    narrow = dtype is not torch.float32  # AMP: fp16 or bf16
    model.train()
    loss_sum, samples = torch.zeros((), device=device), 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        targets = targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype, enabled=narrow):  # AMP
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
# Evaluation runs under the same autocast. It needs no scaler, since there are no gradients.


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
# A run has a network, an optimizer, a schedule, and *one* scaler that lives as long as the run. A new
# scaler in each epoch would start from its initial scale again ([below](#Resume:-to-the-last-bit)).
# `fused=True` gives an optimizer that the scaler can tell to skip a step without waiting for the
# device, as [notebook 03](03_grad_scaler_step_by_step.ipynb) counts.


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
# ## Train in each precision
#
# A recent NVIDIA GPU [runs FP32 convolutions in
# TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)
# unless told not to. `float32_mode` of a precision sets that for the whole step, forward and backward:
# TF32 is off for FP32 and on for TF32. For fp16 and bf16 it sets
# nothing. <!-- tests/core/test_precision.py -->


# %%
def train(precision, seed):
    """Train a new network; returns its mean loss and held-out accuracy by epoch, (2, epochs)."""
    steps = config["epochs"] * len(train_loader(0, seed))
    run, history = new_run(precision.dtype, seed, steps), []
    with precision.float32_mode(device.type):
        for epoch in range(config["epochs"]):
            loss = train_epoch(loader=train_loader(epoch, seed), dtype=precision.dtype, **run)
            accuracy = evaluate(run["model"], test_loader(), precision.dtype)
            history.append((loss, accuracy))
    return torch.tensor(history).T


# %% [markdown]
# We compare FP32 with the precisions that this device accelerates. On a CPU fp16 is left out, since
# it is slow on [CPUs that emulate it](../docs/hardware.md) (`amp-lab doctor` says whether it is on
# yours). If none is left, we take bf16. Each precision trains three times, with three seeds.
#
# Before you run this: how far apart do you expect the two curves of the training loss to be, compared
# with the curves of two seeds?

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
_ = figures.loss_and_accuracy(losses, accuracies)
assert all((loss[:, -1] < 0.5 * loss[:, 0]).all() for loss in losses.values())  # it has learned

# %% [markdown]
# The training loss is on the left, and on the right the accuracy on images that were not trained on.
# Each line is the mean over three seeds, and the band around it reaches from the lowest seed to the
# highest. In the run above the loss of bf16 falls like that of FP32. In the second epoch, two seeds
# of one precision differ far more in accuracy than the means of the two precisions do.
#
# ## Has accuracy been kept?
#
# Two things that have nothing to do with precision make accuracies differ. Seeds differ among
# themselves, and $n$ test images show an accuracy $p$ only to within about $\sqrt{p (1 - p) / n}$,
# its standard error. As a rough yardstick we add both together: a difference counts if it is larger
# than the spread of the seeds plus two standard errors.

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
# In the run above the precisions differ by less than the yardstick, so the difference does not
# count. To see a smaller one, test on more images, or train more seeds and compare means by their
# standard errors: the range of the seeds, which we use here, does not shrink with their number.
#
# ## Is it faster?
#
# To find out, we time one training step of the real, full-width network over a range of image sizes. A
# step is `train_epoch` with a single batch, which is on the device already.

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
# We compare FP32 with the fastest of those precisions above that need autocast. As in [notebook
# 04](04_fp32_vs_amp.ipynb#Time-of-a-training-step), `compare` takes turns and watches whether the
# machine is busy, `in_mode` keeps TF32 off in FP32, and `is_possible` checks that a speed-up is not
# far larger than the device can give.

# %%
amp = next((p for p in fit_for if p.dtype is not torch.float32), Precision.BF16)
both = (Precision.FP32, amp)
assert amp.dtype in (torch.float16, torch.bfloat16)


def in_mode(precision, function):
    """The function, with TF32 off for FP32 and on for TF32 each time it is called."""

    def call():
        with precision.float32_mode(device.type):
            return function()

    return call


def is_possible(times, name):
    """Whether the device can gain so much over FP32: by its rates, or 2x from half the bytes."""
    gain = times.ratio(Precision.FP32, name)
    limit = 1.5 * max(2, report.speedup(amp))  # with islands too; a convolution may gain more
    return gain.median <= limit or not (gain.trusted and report.trusted)


# %% [markdown]
# Now we time the steps, each size for about six seconds, or until its speed-up is known to 5 %. Before
# you run this: at which size do you expect autocast to help most?

# %% tags=["nbval-ignore-output"]
step_times = {}
for size in step_sizes:
    steps = {p: in_mode(p, new_step(p.dtype, size)) for p in both}
    step_times[size] = times = compare(steps, device=device, precision=0.05, budget_s=6)
    print(f"{size} pixels", times, sep="\n")
    assert is_possible(times, amp)
small, large = (step_times[size] for size in (step_sizes[0], step_sizes[-1]))
for p in both:  # 25 times as many pixels or more take longer
    assert not small.time_s(p).is_above(large.time_s(p).interval[1]) or not large.trusted

# %% [markdown]
# The number beside each time of autocast is its speed-up over FP32, with its interval. Only an
# interval wholly above or below 1x says that one of the two is faster. On this CPU bf16 *costs*
# time on small images, and gains a little only at 160 pixels. Your device may draw
# the line elsewhere. *Cores apart*: the host of a virtual machine moves its cores, so some timings
# jump. If a line says that the machine was busy, stop what else runs there, and run
# the cell again. <!-- tests/core/test_timing.py -->
#
# ## Find the layers to blame
#
# But for its first, MobileNetV2 has two kinds of convolution. A *pointwise* one has 1x1 kernels and is a
# matrix product over the channels. A *depthwise* one has 3x3 kernels, each of which sees a single
# channel. A hook notes the shapes of every convolution; on the meta device this computes nothing.
# <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->


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
# We time the layers of each kind by themselves, forward and backward, and see which kind loses.


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


depthwise = [m for m, _, _ in convolutions(32) if kind(m).startswith("depthwise")]
assert all(m.kernel_size == (3, 3) and m.groups == m.in_channels for m in depthwise)


# %% [markdown]
# We time all layers of a kind together, at 64 pixels. Only four of the 52 convolutions are
# depthwise with stride 2. Before you run this: how much of the time can they take?

# %% tags=["nbval-ignore-output"]
kinds = ("first", "pointwise", "depthwise", "depthwise, stride 2")
kind_times = {}
for name in kinds:
    calls = {p: in_mode(p, all_layers(name, 64, p.dtype)) for p in both}
    kind_times[name] = compare(calls, device=device, budget_s=2)
_ = figures.time_by_kind(kind_times)
assert all(is_possible(times, amp) for times in kind_times.values())
found = [kind(layer) for layer, _, _ in convolutions(64)]
assert (len(found), found.count("depthwise, stride 2")) == (52, 4)

# %% [markdown]
# The picture has a pair of bars for each kind of layer: FP32 on the left, and beside it, hatched,
# autocast with its speed-up above the bar. The thin lines are the intervals, and grey bars say that
# the machine was too busy. On this CPU the first layer and the pointwise ones gain a little from
# bf16, and the depthwise ones lose. The four with stride 2 take about ten times as long, and lose far
# more than all others gain. On another device, look for a kind of layer that autocast makes much slower.
#
# To see which kernel is slow where oneDNN computes a layer, set
# [`ONEDNN_VERBOSE=1`](https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html): it then prints
# the kernel of every call.
#
# ## Leave those layers in FP32
#
# Autocast can be disabled inside autocast. The depthwise layers that lost in the figure above, which
# means that their whole interval lies below 1x, become FP32 islands. The rest stays as it
# is. <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->


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
# What does that buy? At each size, the step with islands takes turns with a step in FP32 and with
# one in plain autocast, so that we can compare it with both:

# %% tags=["nbval-ignore-output"]
print("kept in fp32:", " and ".join(losers) or "nothing, since nothing is known to have lost")
labels = (f"{amp} with islands, over plain {amp}", f"{amp} with islands, over fp32")
speedups = {label: [] for label in labels}
for size in step_sizes:
    steps = {p: in_mode(p, new_step(p.dtype, size)) for p in both}
    steps["islands"] = in_mode(Precision.FP32, new_step(amp.dtype, size, make_islands))
    times = compare(steps, device=device, precision=0.05, budget_s=8)
    for label, name in zip(labels, (amp, Precision.FP32), strict=True):
        speedups[label].append(times.ratio(name, "islands"))
        print(f"{size:3d} pixels: {label} {speedups[label][-1]}")
    assert is_possible(times, "islands")
_ = figures.speedup_over_size(step_sizes, speedups)

# %% [markdown]
# The picture shows how many times as fast a step with islands is as the other two, against the size
# of the images. The solid line compares it with plain autocast and lies above 1 here at every size,
# so the islands have paid. The dashed line compares it with FP32: on small images it lies near 1,
# so not much is lost any more, and at 160 pixels well above 1, so that autocast is worth it there.
# If nothing lost, the solid line lies near 1. Grey points are not
# to be trusted. <!-- tests/plots/test_plots.py -->
#
# The lesson is not about one layer of one library. One part of a network can lose what all the
# others gain, and timing the layers by kind can find that part. [Notebook
# 04](04_fp32_vs_amp.ipynb) has the other case, a network of large matrix products.
#
# ## Resume: to the last bit
#
# What has to be in the file? Everything that changes during a run: here network, optimizer, schedule,
# scaler, the random states (dropout draws from them), and how far the run has come. To test that
# nothing is missing, an interrupted run must end with *the same weights, bit for bit*, as one that was
# not interrupted.
#
# The run is a tiny one in fp16, on digits of 8x8 pixels. Its scaler starts far too high and grows after
# five good steps in a row, so that it has something to remember within 16 steps.

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
folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "checkpoint.pt")
save_checkpoint(path, **half, random=random_states(device), epochs_done=2)
scales = [run["scaler"].get_scale() for run in (new_tiny_run(seed=0), half, whole)]
print("loss scale at the start, in the middle, at the end:", scales)
assert scales[0] > scales[1]  # it has skipped steps

# %% [markdown]
# The scaler came down from 2^24 to 262,144, which is 2^18, before the run was saved: it skipped six
# of eight steps. To resume, we make everything anew, fill it from the file, and go on. The new
# network starts from another seed, so its weights cannot be right by accident.


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
# Now we forget one state at a time. Before you run this: which of the four can we do without?


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

# %% [markdown]
# None of them: the weights end up to 0.03 away, without any error. A new scaler starts from its
# initial scale, a new optimizer starts Adam's averages from zero, a new schedule starts from its
# first learning rate, and from another random state dropout drops other values.
#
# `amp-lab train` runs such a loop. It draws its curves, and saves after each epoch:
#
# ```bash
# pdm run amp-lab train --dataset cifar10 --precision bf16 --out runs/x
# ```
#
# `--dataset digits` needs no download, `--clip-norm` clips unscaled gradients, `--checkpoint-every`
# saves more often, and `--resume` continues a run that was
# stopped or killed. <!-- tests/train/test_run.py --> <!-- tests/train/test_loop.py -->
#
# ## Clip gradients: unscale first (optional)
#
# [Notebook 03](03_grad_scaler_step_by_step.ipynb) had this as an exercise. Here are the numbers.
# With a scaler, the gradients in `.grad` after `backward` are multiplied by the loss scale, by default
# 65,536 at the start. Clipping compares their norm with `max_norm`, so it must see the real ones:
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
# With plain SGD and a learning rate of 1, the weights move by the gradient that the optimizer gets. We
# try it with a `max_norm` of 0.5, with and without the line that matters:

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
# Without `unscale_`, clipping sees a norm of 59,241 in place of 0.90. It cuts this down to 0.5, and
# then the scaler divides what is left by 65,536, so the weights move by 7.6e-06. `max_norm` has
# lost its meaning, and its effect changes whenever the scale does.
#
# Adam divides by the size of the gradients. Before you run this: will the mistake show there?

# %%
adam = torch.optim.AdamW
_, right_move = clipped_step(adam, max_norm=0.5, unscale_first=True)
_, wrong_move = clipped_step(adam, max_norm=0.5, unscale_first=False)
print(f"AdamW: with unscale_ {right_move:.2f}, without {wrong_move:.2f}")
assert abs(wrong_move / right_move - 1) < 0.02

# %% [markdown]
# It hardly shows: the weights move by 6.00 and 5.94, because Adam nearly cancels a factor that all
# gradients share. But now any gradient with a norm above 7.6e-06 is clipped, and not just the rare
# huge one that clipping was meant for.
#
# ## Save: the whole file or none (optional)
#
# A run of hours will be interrupted one day, perhaps while it is saving. `torch.save` writes over the
# old file, so if it does not get to the end, the old checkpoint is lost and the new one is not there.
# Here we imitate a disk that runs full in the middle, with an object that cannot be written:


# %%
class FullDisk:
    """Fails when it is saved, in the middle of a file."""

    def __reduce__(self):
        raise OSError("no space left on device")


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
# Both checkpoints are gone. The remedy has three parts: write under another name, make sure that
# the file is on the disk, and only then give it the real name, which is done [at once or not at
# all](https://docs.python.org/3/library/os.html#os.replace). This is what *atomic* means, and
# `amp_lab.save_checkpoint` does it. It also adds a checksum, so that `load_checkpoint` can tell if
# a file has been damaged. Here one byte in the middle is changed: <!-- tests/train/checkpoint/test_checkpoint_file.py -->

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
folder.cleanup()

# %% [markdown]
# ## Why depthwise layers have little to gain (optional)
#
# 16 bits halve the bytes that a layer moves. A depthwise layer does little arithmetic for every byte,
# so even a good kernel may not gain much more than a factor of two. Counting is simple. Each value of
# the output takes as many multiplications and additions as one filter has weights; and we count the
# bytes of input, weights and output once each.


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
_ = figures.flops_per_byte({f"{size} pixels": values for size, values in intensity.items()})

# %% [markdown]
# The picture shows on a logarithmic axis how many FLOPs a layer does for each byte it moves.
# Depthwise layers (triangles) lie at the bottom in both panels, those with stride 2 (black) the
# lowest. Pointwise ones (circles) climb at 224 pixels. At 32 the last of them fall again, where the
# maps have shrunk to one pixel and most bytes are weights. The medians are:

# %%
for size, values in intensity.items():
    middle = {
        name: statistics.median(value for found, value in values if found.startswith(name))
        for name in ("depthwise", "pointwise")
    }
    print(f"{size} pixels, median FLOPs per byte:", {k: round(v, 1) for k, v in middle.items()})
    assert middle["depthwise"] < 2.5 < middle["pointwise"]

# %% [markdown]
# In batches of 8, the median depthwise layer does about 2 FLOPs a byte at either size, the median
# pointwise one 10.1 at 32 pixels and 26.5 at 224. As a rule of thumb, a layer with few FLOPs per
# byte [waits for
# memory](https://rocm.docs.amd.com/projects/HIP/en/latest/understand/performance_optimization.html),
# or for its start-up if it is small. A 16-bit number has half the bytes of an fp32 one, which does
# not shorten a start-up. Arithmetic may gain more, on hardware with units for it.
#
# ## Summary
#
# - AMP changed or added six marked lines. With `enabled=`, one loop serves every precision, and one
#   scaler serves the whole run.
# - The precisions differed by no more than our yardstick. So few images would not have shown a loss
#   of a few points.
# - Time autocast on your shapes. If it loses, time the layers by kind, and leave those that lose in
#   FP32.
# - Call `unscale_` before clipping, or `max_norm` is compared with scaled gradients; with Adam the
#   mistake hardly shows.
# - A checkpoint needs the scaler, the random states and an atomic write. Bitwise equality is the test
#   that nothing is missing.
#
# Next, [notebook 06](06_caltech256_resnet50.ipynb) trains twice the batch in the same memory.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("05_cifar10_mobilenet")

# %% [markdown]
# ### 1. Which difference counts?
#
# Two precisions are tested on 900 images, and FP32 classifies 90 % of them right. The seeds of both
# differ by up to 0.5 points. By the yardstick of this notebook, how many points must lie between
# the two precisions before the difference counts?

# %%
needed_difference = ...  # in percentage points
exercises.check_needed_difference(needed_difference)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The standard error is the root of p (1 - p) / n, with p = 0.9 and n = 900. How many of them are
# allowed, and what comes on top?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# needed_difference = 2.5
# ```
#
# The standard error is 0.01, which is 1 point. Twice that and the spread of 0.5 points make 2.5.
#
# </details>
#
# ### 2. One bad part
#
# A step takes 100 ms in FP32: 60 ms in pointwise layers, 30 ms in depthwise ones, and 10 ms elsewhere.
# Autocast makes the pointwise layers twice as fast, the depthwise ones half as fast, and leaves the
# rest as it is. What is the speed-up of the step, and what is it if the depthwise layers stay in FP32?

# %%
speedups = ...  # two numbers in brackets: with plain autocast, and with the layers in FP32
exercises.check_speedups(speedups)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Work out how many milliseconds each part takes, and add them up. Speed-ups themselves cannot be
# averaged.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# speedups = (100 / (30 + 60 + 10), 100 / (30 + 30 + 10))
# ```
#
# The depthwise layers lose the 30 ms that the pointwise ones gain, so plain autocast gives 1.00x. With
# them in FP32 the step takes 70 ms, which is 1.43x.
#
# </details>
#
# ### 3. Mend this loop
#
# This loop for fp16 has two mistakes. Mend both, and return the scaler in place of the dots.


# %%
def mended_loop(model, optimizer, epochs):
    """Train for these epochs, each a list of batches (images, targets)."""
    for batches_of_epoch in epochs:
        scaler = torch.amp.GradScaler(device.type)
        for images, targets in batches_of_epoch:
            with torch.autocast(device.type, dtype=torch.float16):
                loss = F.cross_entropy(model(images).float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.step()
            scaler.update()
            optimizer.zero_grad()
    return ...


exercises.check_mended_loop(mended_loop)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compare it with `train_epoch`, line by line. How long does a scaler live, and who decides whether a
# step is skipped?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def mended_loop(model, optimizer, epochs):
#     scaler = torch.amp.GradScaler(device.type)
#     for batches_of_epoch in epochs:
#         for images, targets in batches_of_epoch:
#             with torch.autocast(device.type, dtype=torch.float16):
#                 loss = F.cross_entropy(model(images).float(), targets)
#             scaler.scale(loss).backward()
#             scaler.step(optimizer)
#             scaler.update()
#             optimizer.zero_grad()
#     return scaler
# ```
#
# The scaler was made anew in every epoch, and `optimizer.step()` steps even if a gradient is infinite.
# `scaler.step` asks first. It would also have unscaled, so `unscale_` may stay or go.
#
# </details>
#
# ### 4. What this checkpoint can do without
#
# A run trains in **bf16**, with Adam, a learning-rate schedule, a disabled scaler, and a network
# *without* dropout. Which of these four may be left out of its checkpoint, so that the run still ends
# with the same weights, bit for bit: `"optimizer"`, `"scheduler"`, `"scaler"`, `"random"`?

# %%
superfluous = ...  # a set of names
exercises.check_superfluous(superfluous)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Ask of each of them whether this run changes it, and whether what follows depends on it.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# superfluous = {"scaler", "random"}
# ```
#
# A disabled scaler has no state, and without dropout nothing draws from the random states once the
# run has begun: the order of the images depends on seed and epoch alone. (A `DataLoader` that
# shuffles would draw from them.) Save both all the same. It costs little, and checkpoints
# stay complete when somebody adds dropout or
# trains in fp16. <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->
#
# </details>
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
