# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train in FP32 and with AMP, and measure both
#
# **What you'll do.** Train one network on one picture, first in plain FP32 and then with automatic mixed
# precision (AMP). Compare the loss, the time and the memory of a training step.
#
# **What you'll learn.**
# - which lines of a training loop AMP changes, and which stay the same;
# - how the spread between seeds tells you whether reduced precision costs accuracy;
# - how to measure time and memory, and which mistakes make the numbers misleading.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb), for `torch.autocast`, and [notebook
# 03](03_grad_scaler_step_by_step.ipynb), for `GradScaler`. You need no GPU.

# %% tags=["nbval-ignore-output"]
from functools import partial

import torch
from torch import nn

from course import emulates_bf16, figures, start
from course.measuring import flops_of, is_possible, saved_bytes

from amp_lab import Precision, compare, describe_device, measure
from amp_lab.bench import ConvModel, quantized_sine

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We run one layer forward and backward, with a single line of AMP. Before you run this: which will be in
# bf16, the output, the weight or its gradient?

# %%
layer, x = nn.Linear(64, 64).to(device), torch.rand(8, 64, device=device)
with torch.autocast(device.type, dtype=torch.bfloat16):  # AMP
    output = layer(x)
output.float().mean().backward()
gradient = layer.weight.grad
for name, tensor in {"output": output, "weight": layer.weight, "gradient": gradient}.items():
    print(f"{name:<9} {tensor.dtype}, {tensor.element_size()} bytes a number")
assert output.dtype is torch.bfloat16
assert layer.weight.dtype is gradient.dtype is torch.float32

# %% [markdown]
# Only the output is in bf16, so it takes half as much memory as in fp32. The matmul that computes it can be [much
# faster](https://docs.pytorch.org/docs/stable/amp.html) in 16 bits.
#
# ## The problem: a picture, from its coordinates
#
# The network gets the x and the y coordinate of each pixel and predicts the pixel's brightness. The
# picture is a sum of two cosine waves, rounded to four levels. <!-- tests/bench/test_convmodel.py -->

# %%
config = {
    "quick": {
        "size": 48,  # pixels along each edge of the picture
        "hidden": 256,  # channels between the convolutions
        "epochs": 200,  # one step each, since there is one picture
        "lr": 1e-3,  # of Adam
    },
    "full": {"size": 512, "hidden": 256, "epochs": 512, "lr": 1e-3},
}[scale]
if emulates_bf16(device):
    config |= {"size": 16}
inputs, target = quantized_sine(config["size"], device)  # (1, 2, H, W), (1, 1, H, W)
assert target.unique().numel() == 4

# %% [markdown]
# The convolutions of the network have 1x1 kernels, so each is a matmul.
# <!-- tests/notebooks/test_05_cifar10_mobilenet.py -->

# %%
model = ConvModel(config["hidden"])
print(model)
convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
assert all(layer.kernel_size == (1, 1) for layer in convolutions)

# %% [markdown]
# ## The plain step, and the same step with AMP
#
# We write one training step without AMP and one with AMP.


# %%
def step_fp32(model, optimizer):
    """One training step; returns the loss."""
    optimizer.zero_grad()
    output = model(inputs)
    loss = nn.functional.mse_loss(output, target)
    loss.backward()
    optimizer.step()
    return loss.detach()


# %% [markdown]
# With AMP, the forward pass and the loss run under autocast. A scaler scales the loss (in fp16 only) and calls
# `optimizer.step`. The comment `# AMP` marks what AMP adds or changes.


# %%
def step_amp(model, optimizer, scaler, dtype):
    """One training step under autocast; returns the loss."""
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype):  # AMP
        output = model(inputs)
        loss = nn.functional.mse_loss(output, target)
    scaler.scale(loss).backward()  # AMP: was loss.backward()
    scaler.step(optimizer)  # AMP: was optimizer.step()
    scaler.update()  # AMP
    return loss.detach()


# %% [markdown]
# By default, PyTorch lets a recent NVIDIA GPU [run fp32 convolutions in
# TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
# Our baseline is plain FP32, so `float32_mode` turns TF32 off.
# <!-- tests/core/test_precision.py -->


# %%
def new_run(precision, seed):
    """Return a new network, and a function that trains it for one step."""
    torch.manual_seed(seed)
    model = ConvModel(config["hidden"]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    scaler = torch.amp.GradScaler(device.type, enabled=(precision is Precision.FP16))  # AMP

    def step():
        with precision.float32_mode(device.type):
            if precision.dtype is torch.float32:
                return step_fp32(model, optimizer)
            return step_amp(model, optimizer, scaler, precision.dtype)

    return model, step


assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # the default
with Precision.FP32.float32_mode("cpu"):
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"

# %% [markdown]
# `describe_device` times a matmul in each precision. We will compare FP32 with each precision that is clearly faster.
# If none is, we will compare FP32 with bf16.
# <!-- tests/core/test_device.py -->

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
precisions = [Precision.FP32, *reversed(report.accelerated or [Precision.BF16])]
print(f"{report.name}: comparing", ", ".join(precisions))
if not report.trusted:
    print("not trusted: the machine was busy, so another choice may be better")
assert all(report.rates[precision] for precision in precisions)  # the device can run each of them

# %% [markdown]
# ## Do they learn the same?
#
# The loss differs from seed to seed, so a single run would prove little. We train with three seeds in
# each precision. We then compare the difference between precisions with the spread between seeds. Before you run this:
# will the bf16 loss curve lie above the FP32 curve, below it or on it?


# %% tags=["nbval-ignore-output"]
def train(precision, seed):
    """Train a new network; return it and its loss in each epoch (epochs,)."""
    model, step = new_run(precision, seed)
    return model, torch.stack([step() for _ in range(config["epochs"])]).cpu()


runs = {precision: [train(precision, seed) for seed in (0, 1, 2)] for precision in precisions}
losses = {precision: torch.stack([loss for _, loss in runs[precision]]) for precision in precisions}
_ = figures.loss_curves(losses)
for loss in losses.values():  # (seeds, epochs)
    assert (loss[:, -1] < 0.1 * loss[:, 0]).all()  # every loss fell by more than 90 %

# %% [markdown]
# Each line is the mean loss of the three seeds. The band around a line reaches from the lowest loss to the
# highest. Here the two lines nearly coincide.
#
# We average the loss of each run over the last ten epochs:

# %% tags=["nbval-ignore-output"]
final = {p: loss[:, -10:].mean(dim=1) for p, loss in losses.items()}  # (seeds,) each
fp32_final = final[Precision.FP32]
for precision, loss in final.items():
    difference = (loss.mean() - fp32_final.mean()).item()
    print(f"{precision}: mean loss {loss.mean():.5f}, difference from fp32 {difference:+.5f}")
    assert abs(difference) < 0.2 * fp32_final.mean()  # a larger difference would need a reason
print(f"the seeds of fp32 differ by up to {(fp32_final.max() - fp32_final.min()).item():.5f}")

# %% [markdown]
# Here the means of fp32 and bf16 differ by less than the fp32 seeds differ from each other, so we see no loss of
# accuracy.
#
# We plot the pictures that the networks of the first seed predict:


# %% tags=["nbval-ignore-output"]
@torch.inference_mode()
def predict(model, precision):
    """The picture (1, 1, H, W) that a network draws, in fp32."""
    with precision.autocast(device.type):
        return model.eval()(inputs).float()


pictures = {str(precision): predict(runs[precision][0][0], precision) for precision in precisions}
_ = figures.side_by_side({"target": target} | pictures)
for picture in pictures.values():
    close = (picture - target).abs() < 1 / 6  # less than half a level off
    assert close.float().mean() > 0.6

# %% [markdown]
# Here both networks draw the target's diamonds in the right places.
#
# ## Time of a training step
#
# `compare` times functions:
#
# 1. After a warm-up, `compare` measures in rounds. Every function has one turn in each round. Before and after each
#    turn, `compare` waits until the device has finished.
# 2. `compare` computes a speed-up from each undisturbed round. It shows the median of these speed-ups, with its 95 %
#    interval in brackets.
# 3. If other programs disturb too many rounds, `compare` marks the result as *not reliable*.
# <!-- tests/core/test_timing.py -->
#
# `is_possible` checks whether a time can be true. For example, it compares the floating-point operations (FLOP) per
# second of a step with those of the matmul that `describe_device` timed. If the step does many more, its time is
# wrong.
# <!-- tests/notebooks/test_04_fp32_vs_amp.py -->
#
# Before you run this: how much faster do you expect the step to be in 16 bits?

# %% tags=["nbval-ignore-output"]
steps = {p: new_run(p, seed=0)[1] for p in precisions}
training = compare(steps, device=device, budget_s=4)  # seconds for all steps together
training_flops = flops_of(steps[Precision.FP32])
print(training)
print(f"{training_flops / 1e9:.1f} GFLOP a step")
assert all(is_possible(training, p, training_flops, report) for p in precisions)
fastest = training.ratio(Precision.FP32, precisions[-1])
assert device.type == "cpu" or not fastest.is_below(1)

# %% [markdown]
# If the interval of a speed-up contains 1x, the measurement does not show which precision is faster. On our two CPU
# cores AMP is faster.
#
# Inference runs only the forward pass, so it needs autocast but no scaler. Will AMP speed up inference more than
# training, or less?

# %% tags=["nbval-ignore-output"]
passes = {p: partial(predict, runs[p][0][0], p) for p in precisions}
inference = compare(passes, device=device, budget_s=3)
inference_flops = flops_of(passes[Precision.FP32])
print(inference)
assert all(is_possible(inference, p, inference_flops, report) for p in precisions)
assert inference_flops < 0.5 * training_flops  # the backward pass is most of a step

# %% [markdown]
# On our two CPU cores, AMP sped up inference less than training.
#
# ## Memory of a training step
#
# Autograd saves tensors for the backward pass. `saved_bytes` adds up the sizes of these tensors, except the
# parameters. On most GPUs, `measure` returns the peak memory of the step.
# <!-- tests/notebooks/test_04_fp32_vs_amp.py --> <!-- tests/core/test_timing.py -->

# %% tags=["nbval-ignore-output"]
saved_mib, peak_mib = {}, {}
for precision in precisions:
    with precision.autocast(device.type):
        new_model = ConvModel(config["hidden"]).to(device)
        saved = saved_bytes(new_model, lambda m: nn.functional.mse_loss(m(inputs), target))
    saved_mib[precision] = saved / 2**20
    peak_bytes = measure(steps[precision], device=device, repeats=1).peak_bytes
    if peak_bytes is not None:  # a CPU has no such statistics
        peak_mib[precision] = peak_bytes / 2**20
        assert peak_mib[precision] > saved_mib[precision]  # the peak includes what is saved
    share = saved_mib[precision] / saved_mib[Precision.FP32]
    print(f"{precision}: saved {saved_mib[precision]:.1f} MiB, {share:.0%} of fp32")
    if precision.dtype is not torch.float32 and device.type != "mps":
        assert 0.45 < share < 0.75  # the activations are half as wide

_ = figures.time_and_memory(
    training, peak_mib or saved_mib, "peak" if peak_mib else "saved activations"
)

# %% [markdown]
# On our CPU, autograd saves about half as many bytes with bf16 as with FP32. The peak memory of a step also includes
# the weights and Adam's state, which [stay in
# fp32](06_caltech256_resnet50.ipynb#Train-the-backbone-too).
# <!-- tests/notebooks/test_04_fp32_vs_amp.py -->
#
# ## How not to measure
#
# Our picture comes from an [article by
# AMD](https://rocm.blogs.amd.com/artificial-intelligence/automatic-mixed-precision/README.html). The article calls the
# gain in training a speed-up of 46 %. The next cell uses the times in the article:

# %%
article = {"training": (13.98, 7.50), "inference": (4.24, 2.87)}  # seconds in FP32 and with AMP
for task, (fp32_s, amp_s) in article.items():
    less, speedup = 1 - amp_s / fp32_s, fp32_s / amp_s
    print(f"{task}: {less:.1%} less time is {speedup:.2f}x")
    assert (round(less, 3), round(speedup, 2)) in [(0.464, 1.86), (0.323, 1.48)]

# %% [markdown]
# **Do not report the time saved as the speed-up.** Here 46.4 % less time is a speed-up of 1.86x.
#
# **Do not count the first step.** It [can be
# slow](https://docs.pytorch.org/tutorials/recipes/recipes/benchmark.html).
#
# **Do not stop the clock too early.** A call that starts work on a GPU [usually returns before the work is
# done](https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution). If you then read the
# clock without waiting, you time how fast the CPU queues work. On a GPU, call `torch.accelerator.synchronize()` before
# you read the clock.
#
# ## Summary
#
# - AMP with a scaler takes five lines: one creates the scaler, and four are in the training step.
# - To see whether reduced precision costs accuracy, compare the losses of several seeds.
# - To measure time, warm up, synchronise and repeat. Time the precisions in turns, and give an interval. Say whether
#   the baseline is FP32 or TF32.
# - Weights, gradients and optimizer state [stay in
#   fp32](08g_speed_and_memory.ipynb#The-memory-is-not-halved), so the memory of a step nearly halves only
#   if activations take most of it.
#
# Next, [notebook 05](05_cifar10_mobilenet.ipynb) shows AMP in an ordinary training loop with real pictures.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
import time  # noqa: F401  # for your answers

from course.exercises import checks_of

exercises = checks_of("04_fp32_vs_amp")

# %% [markdown]
# ### 1. From less time to a speed-up
#
# A report says that with AMP a step takes 40 % less time than in FP32. What is the speed-up? Give the speed-up to two
# decimals.

# %%
speedup = ...
exercises.check_speedup(speedup)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Suppose that the step takes 100 ms in FP32. How long does it take with AMP?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# speedup = 1.67
# ```
#
# A step of 100 ms takes 60 ms with AMP, so the speed-up is 100 / 60 = 1.67.
#
# </details>
#
# ### 2. Repair a stopwatch
#
# This stopwatch should return the seconds that the device needs for one step. `step()` only queues the
# work and returns at once. `wait()` returns when all queued work is done.
#
# ```python
# def seconds_of(step, wait):
#     started = time.perf_counter()
#     step()
#     return time.perf_counter() - started
# ```
#
# The stopwatch has two mistakes. It starts while the device may still be busy with earlier work, and it stops while
# the step may still be running. Correct both.


# %%
def seconds_of(step, wait):
    return ...  # the seconds that the device needs for one step


exercises.check_seconds_of(seconds_of)

# %% [markdown]
# <details><summary>Hint</summary>
#
# You read the clock twice. What must the device have finished each time?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def seconds_of(step, wait):
#     wait()  # for what was queued before
#     started = time.perf_counter()
#     step()
#     wait()  # for the step itself
#     return time.perf_counter() - started
# ```
#
# </details>
#
# ### 3. Compare in pairs
#
# Two tensors hold the losses in FP32 and in bf16, each with the same seeds in the same order. Return two
# numbers: the mean difference of the pairs (bf16 minus FP32), and its standard error.


# %%
def paired(fp32_losses, bf16_losses):
    return ...  # the mean difference, and its standard error


exercises.check_paired(paired)

# %% [markdown]
# <details><summary>Hint</summary>
#
# First subtract the losses, pair by pair. The standard error of a mean of n numbers is their standard
# deviation divided by the square root of n.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def paired(fp32_losses, bf16_losses):
#     differences = bf16_losses - fp32_losses
#     return differences.mean(), differences.std() / len(differences) ** 0.5
# ```
#
# If a seed raises or lowers both losses alike, this effect cancels in the subtraction.
#
# </details>
#
# ### 4. How much memory does AMP save?
#
# In FP32 a training step with Adam needs 4 bytes for each parameter, 4 for its gradient, and 8 for the two numbers
# that Adam stores. A network has 100 million parameters, and its activations take 400 MB in FP32. Assume that AMP
# halves the memory of the activations, and leave out autocast's copies of the weights. What share of FP32's memory does
# a step with AMP need? Give a number between 0 and 1 to two decimals.

# %%
memory_share = ...
exercises.check_memory_share(memory_share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which of the four parts become smaller with AMP?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# memory_share = 0.9
# ```
#
# Weights, gradients and Adam's state take 1600 MB in both cases. The activations shrink from 400 MB to
# 200 MB, so 2000 MB become 1800 MB.
#
# </details>
#
# ## Further reading
#
# - [Automatic mixed precision
#   recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html): the same few lines in PyTorch's
#   tutorial.
# - [PyTorch benchmark recipe](https://docs.pytorch.org/tutorials/recipes/recipes/benchmark.html):
#   how `torch.utils.benchmark` measures.
