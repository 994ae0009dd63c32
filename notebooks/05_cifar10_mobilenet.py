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
# **What you'll do.** Add AMP to an ordinary training loop for MobileNetV2, and compare the accuracy with
# FP32. Find the layers that AMP makes slower. Then resume an interrupted run, and check its weights.
#
# **What you'll learn.**
# - which lines of the loop change, and how to write one training loop for FP32, bf16 and fp16;
# - how to tell whether reduced precision has cost accuracy;
# - how to find the layers that are slower under autocast;
# - what to save and load so that a run with a scaler can be resumed.
#
# **What you need.** [Notebook 03](03_grad_scaler_step_by_step.ipynb), for `GradScaler`, and [notebook
# 04](04_fp32_vs_amp.ipynb), for the AMP step. This notebook runs on a CPU without a download.

# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision.models import MobileNetV2

from course import figures, start
from course.layer_times import KINDS, run_layers_of
from course.tiny_run import largest_difference, new_tiny_run, tiny_digits

from amp_lab import Precision, compare, describe_device, load_checkpoint, save_checkpoint
from amp_lab.train.checkpoint import random_states, restore_random_states
from amp_lab.train.data import batches, load_dataset

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We run a small MobileNetV2 under autocast. Before you run this: which will be in bf16, the logits, the
# loss, the weights or their gradients?

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
# Only the logits are in bf16: autocast runs the last layer, a linear layer, in bf16. `logits.float()` converts
# the logits to fp32, so the loss is in fp32.
#
# ## Settings and data

# %%
DOWNLOAD = False  # True: fetch CIFAR-10 (170 MB) into data/ if it is not there
stages = [[1, 16, 1, 2], [6, 24, 1, 2], [6, 32, 1, 2], [6, 64, 1, 1]]  # of the small network
small = {"width_mult": 0.35, "inverted_residual_setting": stages}
config = {
    "quick": {"network": small, "limit": 900, "batch_size": 64, "epochs": 5, "lr": 1e-2},
    "full": {"network": {}, "limit": None, "batch_size": 128, "epochs": 30, "lr": 5e-3},
}[scale]
seeds = (0, 1, 2)  # one training run each, for every precision

# %% [markdown]
# We train on CIFAR-10 if it is in `data/` or if `DOWNLOAD` is `True`. Otherwise we use
# scikit-learn's handwritten digits. <!-- tests/train/data/test_images.py -->

# %% tags=["nbval-ignore-output"]
root = Path("data") if Path("data").is_dir() else Path("../data")  # the notebook may run in either
cifar10 = DOWNLOAD or (root / "cifar-10-batches-py").is_dir()
name = "cifar10" if cifar10 else "digits"
data = load_dataset(name, root, limit=config["limit"], download=DOWNLOAD)
kind_of_data = "generated pictures" if data.stand_in else data.name
print(f"{kind_of_data}: {len(data.train)} training and {len(data.test)} test images")
assert len(data.train) > config["batch_size"]

# %% [markdown]
# The training images are shuffled and changed slightly at random. The order and the changes depend only on the
# seed and the epoch, so the images are the same in every precision.
# <!-- tests/train/data/test_images.py -->


# %%
def train_loader(epoch, seed):
    """Batches of training images and targets, shuffled."""
    return batches(data.train, config["batch_size"], epoch=epoch, seed=seed, drop_last=True)


# %% [markdown]
# ## The same loop with AMP
#
# The comment `# AMP` marks what AMP adds or changes in an ordinary training loop.
# <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->
#
# Both autocast and `GradScaler` take `enabled=`, so one loop works in FP32, bf16 and fp16:
#
# - We enable autocast for bf16 and fp16.
# - We enable the scaler only for fp16. With `enabled=False`, the scaler leaves the loss unchanged, and its `step` only
#   calls `optimizer.step`.
# <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->


# %%
def train_epoch(model, loader, optimizer, scheduler, scaler, dtype):
    """Train for one pass over `loader`, in any precision; returns the mean loss."""
    narrow = dtype is not torch.float32  # AMP: true for fp16 and bf16
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
# Evaluation runs under the same autocast. It computes no gradients, so it needs no scaler.


# %%
@torch.inference_mode()
def evaluate(model, loader, dtype):
    """Share of the images in `loader` that `model` classifies right, from 0 to 1."""
    model.eval()
    correct, samples = torch.zeros((), dtype=torch.int64, device=device), 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        targets = targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):  # AMP
            outputs = model(images)
        correct += (outputs.argmax(1) == targets).sum()
        samples += len(targets)
    return correct.item() / samples


# %% [markdown]
# Each run uses *one* scaler from start to end.


# %%
def new_run(dtype, seed, steps):
    """Return everything that changes during training, by name."""
    torch.manual_seed(seed)
    model = MobileNetV2(num_classes=len(data.classes), **config["network"])
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=steps)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)  # AMP
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


# %% [markdown]
# ## Train in each precision
#
# Our baseline is FP32 without TF32, so `float32_mode` turns TF32 off in the FP32 runs. <!--
# tests/core/test_precision.py -->


# %%
def train(precision, seed):
    """Train a new network; returns its mean loss and held-out accuracy by epoch, (2, epochs)."""
    steps = config["epochs"] * len(train_loader(0, seed))
    run, history = new_run(precision.dtype, seed, steps), []
    with precision.float32_mode(device.type):
        for epoch in range(config["epochs"]):
            loss = train_epoch(loader=train_loader(epoch, seed), dtype=precision.dtype, **run)
            accuracy = evaluate(run["model"], batches(data.test, 256), precision.dtype)
            history.append((loss, accuracy))
    return torch.tensor(history).T


# %% [markdown]
# On a CPU, we compare FP32 with bf16. On a GPU, we compare FP32 with each precision in which `describe_device`
# measured clearly faster matmuls, or with bf16 if there is none. <!-- code -->
#
# Before you run this: which will differ more in accuracy, two precisions or two seeds?

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
assert all((loss[:, -1] < 0.5 * loss[:, 0]).all() for loss in losses.values())  # all have learned

# %% [markdown]
# Each line is the mean over three seeds, and the shaded areas show the range of the seeds.
#
# ## Is the accuracy the same?
#
# Even in one precision, the accuracy depends on the seed and on the choice of test images. We measure both effects in
# percentage points:
#
# - The *spread of the seeds*: the largest difference in accuracy between two seeds of the same precision.
# - The *standard error*: how much the accuracy would typically change with other test images. For an accuracy
#   $p$ on $n$ images it is about $\sqrt{p (1 - p) / n}$.
#
# Our rough yardstick is the spread plus two standard errors. A difference between two precisions counts
# only if it is larger than this yardstick.

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
print(f"seeds differ by up to {100 * spread:.1f} points, standard error {100 * error:.1f} points")

# %% [markdown]
# Here, the precisions differ in accuracy about as much as the seeds do. The difference between the precisions is
# smaller than our yardstick (the spread plus two standard errors), so it does not count.
#
# ## Find the slow layers
#
# On a CPU, AMP can make MobileNetV2 *slower*. To find the slow layers, we time each kind of convolution
# separately: <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->
#
# - the *first* convolution;
# - *pointwise* convolutions, which have 1x1 kernels;
# - *depthwise* convolutions with stride 1;
# - *depthwise* convolutions with *stride 2*.
#
# We compare FP32 with one 16-bit precision.

# %%
amp = next((p for p in fit_for if p.dtype is not torch.float32), Precision.BF16)
both = (Precision.FP32, amp)
assert amp.dtype in (torch.float16, torch.bfloat16)


def in_mode(precision, function):
    """Wrap the function: for FP32, each call turns TF32 off."""

    def call():
        with precision.float32_mode(device.type):
            return function()

    return call


# %% [markdown]
# We time all 52 convolutions of the original MobileNetV2, forward and backward. Only four of them are depthwise
# with stride 2. Before you run this: what share of the time will these four take in FP32 and under
# autocast? <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->

# %% tags=["nbval-ignore-output"]
kind_times = {}
step_batch = {"quick": 8, "full": 128}[scale]
for name in KINDS:
    runs_by_precision = {
        p: in_mode(p, run_layers_of(name, step_batch, 64, p.dtype, device)) for p in both
    }
    kind_times[name] = compare(runs_by_precision, device=device, budget_s=2)
_ = figures.time_by_kind(kind_times)
assert list(kind_times) == list(KINDS)

# %% [markdown]
# The number above a hatched bar is the speed-up of autocast.
#
# On the CPU of this run, the four depthwise layers with stride 2 take less than a tenth of the total time in FP32, but
# more than a third of the total time under autocast. These layers lose far more time than the pointwise layers save.
# You can run such layers with autocast [disabled](02_autocast_dtypes.ipynb#Nest-and-disable-autocast).
# <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->
#
# ## Resume: to the last bit
#
# A checkpoint must contain everything that changes during a run:
#
# - the network, the optimizer, the schedule and the scaler;
# - the number of finished epochs;
# - the states of the random number generators, because dropout uses them.
#
# We check that a resumed run ends with the same weights as an uninterrupted run, *bit for bit*.
#
# We use a tiny run of 16 steps in fp16 ([`course/tiny_run.py`](course/tiny_run.py)). The loss scale starts far too high,
# so the scaler has to lower it in the first steps.


# %%
def continue_run(run, epochs):
    """Train `run` for these epochs, of four steps each."""
    for epoch in epochs:
        loader = batches(tiny_digits().train, 16, epoch=epoch, seed=0)
        train_epoch(loader=loader, dtype=torch.float16, **run)


# %% [markdown]
# We train one run to the end. We train a second run halfway and save it.

# %%
whole = new_tiny_run(0, device)
continue_run(whole, range(4))

half = new_tiny_run(0, device)
continue_run(half, range(2))
folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "checkpoint.pt")
save_checkpoint(path, **half, random=random_states(device), epochs_done=2)
scales = [run["scaler"].get_scale() for run in (new_tiny_run(0, device), half, whole)]
print("loss scale at the start, in the middle, at the end:", scales)
assert scales[0] > scales[1]  # the scaler has skipped steps

# %% [markdown]
# To resume, we load the saved states into a new run and continue.


# %%
def resume(path, forget=()):
    """Resume the run saved under `path`; the states named in `forget` are not restored."""
    state = load_checkpoint(path)
    run = new_tiny_run(1, device)
    for name, part in run.items():
        if name not in forget:
            part.load_state_dict(state[name])
    if "random" not in forget:
        restore_random_states(state["random"], device)
    continue_run(run, range(state["epochs_done"], 4))
    return run


# %% [markdown]
# We resume the saved run and compare it with the uninterrupted run:

# %%
resumed = resume(path)
for mine, theirs in zip(resumed["model"].parameters(), whole["model"].parameters(), strict=True):
    assert torch.equal(mine, theirs)
    for key, value in whole["optimizer"].state[theirs].items():
        assert torch.equal(resumed["optimizer"].state[mine][key], value)
for name in ("scaler", "scheduler"):
    assert resumed[name].state_dict() == whole[name].state_dict()
print("bitwise equal: weights, optimizer, scaler, schedule")

# %% [markdown]
# Now we leave out one state at a time: optimizer, schedule, scaler or random states. Before you run this: which of
# these states must we restore to get the same final weights?

# %%
for name in ("optimizer", "scheduler", "scaler", "random"):
    difference = largest_difference(resume(path, forget=[name]), whole)
    print(f"{name} not restored: weights differ by up to {difference:.3f}")
    assert difference > 0
assert largest_difference(resumed, whole) == 0
folder.cleanup()

# %% [markdown]
# This run needs all four states. If a state is not restored, PyTorch raises no error here, but the final weights are
# different.
#
# ## Summary
#
# - With `enabled=`, one loop works in FP32, bf16 and fp16.
# - By our yardstick, a difference in accuracy counts if it is larger than the spread of the seeds plus
#   two standard errors.
# - If autocast makes your network slower, time its layers by kind. Run the slow kinds with [autocast
#   disabled](02_autocast_dtypes.ipynb#Nest-and-disable-autocast).
# - If the scaler is enabled, save its state in each checkpoint. If the network has dropout, save the random states.
#
# Next, [notebook 06](06_caltech256_resnet50.ipynb) shows where the memory of a training step goes.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("05_cifar10_mobilenet")

# %% [markdown]
# ### 1. Which difference counts?
#
# You test two precisions on 900 images. In FP32, 90 % of the images are classified correctly. In each precision, the
# accuracy differs by up to 0.5 points between seeds. How large, in points, must the difference between the two
# precisions be to count by the yardstick of this notebook?

# %%
needed_difference = ...  # in percentage points
exercises.check_needed_difference(needed_difference)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The standard error is the square root of p (1 - p) / n, with p = 0.9 and n = 900. How many standard
# errors does the yardstick contain, and what else?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# needed_difference = 2.5
# ```
#
# The standard error is 0.01, which is 1 point. Two standard errors plus the spread of 0.5 points make
# 2.5 points.
#
# </details>
#
# ### 2. One bad part
#
# A step takes 100 ms in FP32: 60 ms in pointwise layers, 30 ms in depthwise layers, and 10 ms elsewhere.
# Autocast makes the pointwise layers twice as fast and the depthwise layers half as fast. The other 10 ms do not
# change. What is the speed-up of the step? What is the speed-up if the depthwise layers stay in FP32?

# %%
speedups = ...  # two numbers in brackets: plain autocast, depthwise layers in FP32
exercises.check_speedups(speedups)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Work out how many milliseconds each part takes, and add them up. Do not average the speed-ups.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# speedups = (100 / (30 + 60 + 10), 100 / (30 + 30 + 10))
# ```
#
# Autocast saves 30 ms in the pointwise layers but loses 30 ms in the depthwise layers, so its speed-up is 1.00x. With
# the depthwise layers in FP32 the step takes 70 ms, which is 1.43x.
#
# </details>
#
# ### 3. Fix this loop
#
# This fp16 loop has two mistakes. Correct both, and return the scaler in place of the dots.


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
# Compare the loop with `train_epoch`, line by line. How many scalers does a run need? Which call decides
# whether a step is skipped?
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
# The loop created a new scaler in every epoch, so the loss scale started over. It also called `optimizer.step()`, which
# changes the weights even if a gradient is infinite. `scaler.step` skips such a step.
#
# </details>
#
# ### 4. What can you leave out of this checkpoint?
#
# A run in **bf16** uses this notebook's `train_loader`, Adam, a learning-rate schedule and a disabled scaler. Its
# network has *no* dropout. A resumed run must end with the weights of an uninterrupted run, bit for bit. Which of
# these four can you leave out of the checkpoint: `"optimizer"`, `"scheduler"`, `"scaler"`, `"random"`?

# %%
superfluous = ...  # a set of names
exercises.check_superfluous(superfluous)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each of the four states, ask whether this run changes it and whether later steps depend on it.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# superfluous = {"scaler", "random"}
# ```
#
# A disabled scaler has no state. Without dropout, this run does not use the random states.
# <!-- tests/notebooks/test_exercises.py --> <!-- tests/train/data/test_batches.py -->
#
# </details>
#
# ## Further reading
#
# - [Sandler et al., *MobileNetV2: Inverted Residuals and Linear
#   Bottlenecks*](https://arxiv.org/abs/1801.04381): the network.
# - [Reproducibility](https://docs.pytorch.org/docs/stable/notes/randomness.html): what else you need for
#   bitwise equality.
