# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Climb from FP32 towards the limit of your hardware
#
# **What you'll do.** Make the training step of [notebook 04](04_fp32_vs_amp.ipynb) faster, one change (a *rung*)
# at a time. Compare the time of each rung with a limit: the time that the step's matmuls take at your device's
# peak rate.
#
# **What you'll learn.**
# - how to compute the limit of a step from its FLOPs;
# - what each rung changes;
# - why a step takes longer than its limit;
# - when AMP makes a step slower or faster.
#
# **What you need.** [Notebook 04](04_fp32_vs_amp.ipynb) for the training step and for how to measure. On a
# CPU, `torch.compile` needs a C++ compiler by default. <!-- tests/core/test_requirements.py -->

# %% tags=["nbval-ignore-output"]
from functools import partial

import torch
from torch import nn

from course import emulates_bf16, figures, start

from amp_lab import Precision, compare, xray
from amp_lab.bench import ConvModel, count_step, measure_ceilings, quantized_sine
from amp_lab.core.allocator import keep_memory
from amp_lab.core.device import recommend_precision

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# An op computes and moves data. Take a device that computes 200 GFLOP/s (200 billion floating-point
# operations a second) and moves 30 GB/s. It runs a matmul and a ReLU on fp32 matrices of 1024 x 1024. Which op would
# become faster if the device could compute twice as fast?

# %%
side = 1024
for name, operations, numbers in (
    ("matmul", 2 * side**3, 3 * side**2),
    ("ReLU", side**2, 2 * side**2),
):
    compute_ms, move_ms = 1e3 * operations / 200e9, 1e3 * 4 * numbers / 30e9
    print(f"{name:<8} computes for {compute_ms:5.2f} ms and moves data for {move_ms:.2f} ms")
    assert (compute_ms > move_ms) == (name == "matmul")

# %% [markdown]
# The matmul becomes faster, because it computes for most of its time. The ReLU hardly becomes faster,
# because it waits for its data.
#
# ## The settings
#
# The plain step runs in FP32. The rungs use the 16-bit precision that `amp-lab doctor` recommends for
# this device. If `doctor` recommends none, the rungs use bf16. <!-- tests/core/test_device.py -->
#
# On Linux on x86-64, `keep_memory()` makes glibc reuse the memory of freed CPU tensors. Without this setting, [fp32
# can look too slow](../docs/hardware.md#memory-allocation-can-make-fp32-look-slow).

# %% tags=["nbval-ignore-output"]
config = {
    "quick": {"size": 128, "steps": 1, "sizes": (16, 32, 64)},  # steps in a row
    "full": {"size": 512, "steps": 3, "sizes": (32, 128, 512)},
}[scale]
hidden = 256
if emulates_bf16(device):
    config |= {"size": 32}
keep_memory()
recommended = recommend_precision(device)
low = recommended if recommended in ("fp16", "bf16") else Precision.BF16
print(f"device {device}, {scale} scale: from fp32 to {low}")
assert low.dtype.itemsize == 2

# %% [markdown]
# ## The peak rates: what can this device do?
#
# A device has a peak rate for computing and a peak rate for moving data. We measure the computing rate
# with matmuls, and the data rate with copies and sums of large tensors.

# %% tags=["nbval-ignore-output"]
limits = measure_ceilings(device)
for precision, rate in limits.flops_per_s.items():
    print(f"{precision}: {'not supported' if rate is None else f'{rate / 1e9:,.0f} GFLOP/s'}")
print(f"memory: {limits.memory_bytes_per_s / 1e9:.0f} GB/s")
if not limits.trusted:
    print("the machine was too busy to trust these figures")
assert not limits.trusted or limits.memory_bytes_per_s > 1e8  # a disk is faster

# %% [markdown]
# ## The work: what must a step do?
#
# The network of notebook 04 has four 1x1 convolutions. For every pixel, a 1x1
# convolution multiplies a vector by a matrix of weights. This takes 2 FLOPs for each weight: one
# multiplication and one addition.
#
# In the backward pass, a convolution has two matmuls of the same size: one for the gradient of the weights, and one
# for the gradient of the input. The first convolution has only one backward matmul, because its input needs no
# gradient.

# %% tags=["nbval-ignore-output"]
inputs, target = quantized_sine(config["size"], device)  # (1, 2, H, W), (1, 1, H, W)
pixels = target.numel()
weights = [2 * hidden, hidden * hidden, hidden * hidden, hidden]
flops = 2 * pixels * (3 * sum(weights) - weights[0])
print(f"{pixels:,} pixels, {sum(weights):,} weights: {flops / 1e9:.1f} GFLOP a step")
assert 0.98 < 12 * pixels * hidden**2 / flops <= 1  # nearly all in the two middle layers

# %% [markdown]
# ## Predict the speed-up
#
# The *limit* of the step is the time that its matmuls alone would take at the measured peak rate:

# %% tags=["nbval-ignore-output"]
floor_ms = {p: 1e3 * flops / limits.flops_per_s[p] for p in ("fp32", low, "bf16")}
for precision, floor in floor_ms.items():
    print(f"{precision}: at least {floor:.2f} ms")
promise = floor_ms["fp32"] / floor_ms[low]
print(f"expected speed-up of {low} from the matmuls: {promise:.2f}x")
if limits.trusted and low == recommended:
    assert promise > 1


# %% [markdown]
# ## Climb
#
# For each rung, we make a function that does one step and returns the loss. Before we time a rung, `add`
# checks that its first five losses are close to those of FP32. As in notebook 04, `float32_mode` turns TF32 off
# for FP32. <!-- tests/notebooks/test_10_speed_ladder.py, tests/core/test_precision.py -->

# %%
rungs, losses = {}, {}


def add(name, precision, step):
    """Check the losses of a rung and add it; return how far they are from FP32's."""
    with precision.float32_mode(device.type):
        found = torch.tensor([float(step()) for _ in range(5)])
    baseline = losses.get("plain", found)
    difference = ((found - baseline).norm() / baseline.norm()).item()
    assert difference < 0.06, name  # bf16 rounds each of about 16 ops by up to 2^-8: 16/256
    rungs[name], losses[name] = (precision, step), found
    return difference


# %% [markdown]
# **The start: FP32.** The plain step reads the loss with `loss.item()`.


# %%
def new_model():
    """The network and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = ConvModel(hidden).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def plain_step(inputs, target):
    """Return a function that does one FP32 step and returns the loss."""
    model, optimizer = new_model()

    def step():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


assert add("plain", Precision.FP32, plain_step(inputs, target)) == 0
assert losses["plain"][-1] < losses["plain"][0]  # it learns

# %% [markdown]
# **Rung 1: AMP.** We run the forward pass under autocast and, in fp16, use a gradient scaler. Each later rung keeps
# the changes of the earlier rungs.


# %%
def amp_step(model, optimizer, inputs, target, read_loss=True):
    """Return a function that does one AMP training step."""
    scaler = low.grad_scaler(device.type, init_scale=2.0**12)  # so low that no step overflows

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=low.dtype):  # rung 1
            loss = nn.functional.mse_loss(model(inputs), target)
        scaler.scale(loss).backward()  # rung 1
        scaler.step(optimizer)  # rung 1
        scaler.update()  # rung 1
        return loss.item() if read_loss else loss.detach()

    return step


assert add("AMP", low, amp_step(*new_model(), inputs, target)) > 0  # it rounds, unlike FP32

# %% [markdown]
# **Rung 2: channels last.** By default, PyTorch stores an image [channel by
# channel](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html), in the order N, C,
# H, W. In the order N, H, W, C, the channels of a pixel are next to each other in memory, so the matmul over
# these channels can be faster.

# %%
model, optimizer = new_model()
model.to(memory_format=torch.channels_last)  # rung 2
inputs_last = inputs.to(memory_format=torch.channels_last)  # rung 2
assert add("channels last", low, amp_step(model, optimizer, inputs_last, target)) > 0
assert inputs_last.shape == inputs.shape
assert inputs_last.stride()[1] == 1  # from one channel to the next

# %% [markdown]
# **Rung 3: a fused optimizer, and no waiting.**
# [`fused=True`](https://docs.pytorch.org/docs/stable/optim.html) merges the ops of Adam's update. We also
# stop reading the loss, because on a GPU each read makes the host [wait for the
# device](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization).


# %%
def new_fused_model():
    """The same model with channels last and the fused optimizer."""
    model, _ = new_model()
    model.to(memory_format=torch.channels_last)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # rung 3


step = amp_step(*new_fused_model(), inputs_last, target, read_loss=False)  # rung 3
assert add("fused Adam, no waiting", low, step) > 0

# %% [markdown]
# **Rung 4: torch.compile.** The compiler [merges elementwise
# ops](https://docs.pytorch.org/docs/stable/torch.compiler_get_started.html) into fewer kernels, so less data moves.

# %% tags=["nbval-ignore-output"]
model, optimizer = new_fused_model()
compiled = torch.compile(model)  # rung 4
step = amp_step(compiled, optimizer, inputs_last, target, read_loss=False)
difference = add("compiled", low, step)
print(f"relative difference from FP32 in the losses of five steps: {difference:.1e}")
assert difference > 0

# %% [markdown]
# Which rung do you expect to bring the largest gain?


# %% tags=["nbval-ignore-output"]
def run_steps(precision, step):
    """Run `config["steps"]` steps: several at full scale, so that a GPU waits less for the host."""
    with precision.float32_mode(device.type):
        for _ in range(config["steps"]):
            step()


timed = {name: partial(run_steps, *rung) for name, rung in rungs.items()}
climbed = compare(timed, device=device, budget_s=16)
bars, speedups = [], {}
for name, (precision, _) in rungs.items():
    took = climbed.time_s(name).times(1e3 / config["steps"])  # ms
    limit, speedups[name] = floor_ms[precision], climbed.ratio("plain", name)
    text = f"{speedups[name].median:.2f}x" if climbed.trusted else ""
    bars.append((str(precision), name, took, limit, text))
    of_limit = f"{limit / took.median:4.0%} of peak"
    print(f"{name:<24}{took.median:8.2f} ms  {of_limit}  {speedups[name]}")
for remark in climbed.remarks():
    print(remark)
assert list(climbed.samples_s) == list(rungs)  # every rung was timed

# %% [markdown]
# Each line shows the time of a step and the limit as a percentage of this time (`of peak`). The last column shows the
# speed-up over the plain step, with its interval.

# %% tags=["nbval-ignore-output"]
_ = figures.speed_ladder({f"ConvModel, {config['size']}x{config['size']} pixels": bars})

# %% [markdown]
# On the CPU of this run, AMP alone (rung 1) reaches only part of the expected speed-up. Channels last (rung
# 2) brings the step much closer to the limit. Rungs 3 and 4 hardly change the time.
#
# ## Explain: count the bytes too
#
# The limit counts only matmuls. A step also has normalisation, ReLU and their gradients. These ops compute
# very little, but they read and write large activations. `count_step` counts the bytes that the ops of a step read
# and write. <!-- tests/bench/test_limits.py -->

# %% tags=["nbval-ignore-output"]
steps = {"plain": plain_step(inputs, target), "AMP": amp_step(*new_model(), inputs, target)}
moved_bytes = {}
for name, step in steps.items():
    with rungs[name][0].float32_mode(device.type):
        counted = count_step(step, new_model()[0], inputs, training=True)
    moved_bytes[name] = counted.moved_bytes
    print(f"{name}: {counted.moved_bytes / 2**20:,.0f} MiB a step")
    assert counted.flops == flops  # the same as our own count
assert moved_bytes["AMP"] < moved_bytes["plain"]

# %% [markdown]
# On the CPU of this run, autocast makes the activations and their gradients half as large, so AMP moves about
# half the bytes.
#
# The **[roofline](https://doi.org/10.1145/1498765.1498785)** shows both peak rates in one figure. Each point shows one
# step, at the number of FLOPs that the step does per byte moved. For each precision, a line shows the highest FLOP/s
# that the two peak rates allow:
#
# - **Under the slope**, moving the data takes longer than computing.
# - **Under the flat part**, computing takes longer.

# %% tags=["nbval-ignore-output"]
points = []
for precision, name, took, _, _ in bars:
    if name in moved_bytes:
        points.append((name, precision, flops / moved_bytes[name], took.rate(1e3 * flops)))
roofs = {p: limits.flops_per_s[p] for p in ("fp32", str(low))}
assert points[0][2] < points[1][2]  # AMP computes more for each byte
_ = figures.roofline(roofs, limits.memory_bytes_per_s, points)

# %% [markdown]
# AMP's point lies to the right of the FP32 point, because AMP moves fewer bytes for the same FLOPs.
#
# A point averages over all ops in a step. A large matmul alone would lie under the flat part. The point of a ReLU
# alone would lie under the slope, because moving its data takes longer than computing it. Ops such as ReLU are one
# reason why a step takes longer than its limit.
#
# ## Where AMP loses
#
# In these cases, AMP may gain nothing or make the step slower:
#
# - **No matmuls.** Autocast runs only [some
#   ops](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference) in the low precision, mainly
#   matmuls and convolutions. A model without these ops gains nothing.
# - **Many small ops.** The fp32 weights and inputs of a matmul need casts. For a small matmul, these casts can cost
#   more time than the faster matmul saves.
# - **A precision that the device emulates**, such as fp16 on [some CPUs](../docs/hardware.md).
#
# We measure the second case with fifty layers of 32 x 32:

# %% tags=["nbval-ignore-output"]
thin = nn.Sequential(*(nn.Linear(32, 32) for _ in range(50))).to(device)
few = torch.randn(8, 32, device=device)


def thin_step(enabled):
    """Forward and backward of the thin network, with or without autocast."""
    with torch.autocast(device.type, dtype=low.dtype, enabled=enabled):
        loss = thin(few).float().square().mean()
    loss.backward()


timed = {"fp32": lambda: thin_step(False), "AMP": lambda: thin_step(True)}
speedup = compare(timed, device=device, budget_s=2).ratio("fp32", "AMP")
casts = len(xray(thin, few, device_type=device.type, dtype=low.dtype).casts)
print(f"speed-up by AMP for fifty thin layers: {speedup}; {casts} casts for 50 matmuls")
assert casts >= 2 * 50  # weights and biases; the activations between layers stay low

# %% [markdown]
# ## From which size on does AMP pay?
#
# We time the forward and the backward pass for pictures of growing size, in FP32 and with AMP.


# %%
def passes(model, images, wanted, precision):
    """Run the forward and the backward pass once."""
    with precision.float32_mode(device.type):
        with torch.autocast(device.type, dtype=low.dtype, enabled=precision is low):
            loss = nn.functional.mse_loss(model(images), wanted)
        loss.backward()


# %% tags=["nbval-ignore-output"]
by_size = []
for size in config["sizes"]:
    images, wanted = quantized_sine(size, device)
    narrow = ConvModel(64).to(device, memory_format=torch.channels_last)
    problem = narrow, images.to(memory_format=torch.channels_last), wanted
    both = {p: partial(passes, *problem, p) for p in (Precision.FP32, low)}
    by_size.append(compare(both, device=device, budget_s=2).ratio(Precision.FP32, low))
    print(f"{size}x{size} pixels: {by_size[-1]}")
_ = figures.speedup_over_size(config["sizes"], {str(low): by_size})

# %% [markdown]
# On the CPU of this run, AMP gains more with a larger picture. AMP pays off from a given size if the intervals for
# this size and all larger sizes are above 1.
#
# ## Summary
#
# - The limit of a step is the FLOPs of its matmuls divided by the measured peak rate. Our steps took longer than their
#   limit. One reason is that ops such as ReLU wait for their data.
# - Each of the rungs 2 to 4 takes only a few lines of code. Time each rung on your device.
# - [AMP can make a step slower](#Where-AMP-loses) if the step has many small ops, or if the hardware emulates the
#   precision.
#
# Next, [notebook 11](11_scale_out.ipynb) shows how to train on several devices.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("10_speed_ladder")

# %% [markdown]
# ### 1. Count the FLOPs of a layer
#
# A 1x1 convolution from 64 to 128 channels runs on one picture of 32 x 32 pixels. It is not the first
# layer of its network. How many FLOPs do its forward and backward pass take together?

# %%
layer_flops = ...
exercises.check_layer_flops(layer_flops)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The forward pass has one matmul, and the backward pass has two.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# layer_flops = 3 * 2 * (32 * 32) * (64 * 128)
# ```
#
# There are three matmuls. Each matmul takes 2 FLOPs for each of 1,024 pixels and 8,192 weights.
#
# </details>
#
# ### 2. Compute the least time
#
# A step performs `flops` FLOPs and moves `nbytes` bytes. The device can compute and move data at the same time.
# Complete the function: how many milliseconds does the step take at least?


# %%
def least_ms(flops, nbytes, flops_per_s, bytes_per_s):
    return ...


exercises.check_least_ms(least_ms)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which of the two ends last: computing, or moving the data?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def least_ms(flops, nbytes, flops_per_s, bytes_per_s):
#     return 1e3 * max(flops / flops_per_s, nbytes / bytes_per_s)
# ```
#
# Both must end, so the step takes at least as long as the slower of the two.
#
# </details>
#
# ### 3. Correct the memory format
#
# This function should convert a model and its images to channels last. Correct it.
#
# ```python
# def to_channels_last(model, images):
#     model.to(memory_format=torch.channels_last)
#     images.to(memory_format=torch.channels_last)
#     return model, images
# ```


# %%
def to_channels_last(model, images):
    return ...  # a model and images


exercises.check_to_channels_last(to_channels_last)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A module's `to` changes the module. Does a tensor's `to` change the tensor?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def to_channels_last(model, images):
#     model.to(memory_format=torch.channels_last)
#     return model, images.to(memory_format=torch.channels_last)
# ```
#
# The function in the exercise does not use the result of the tensor's `to`.
#
# </details>
#
# ### 4. From which size on does AMP pay?
#
# You have measured these intervals of the speed-up by AMP:
#
# - 16 pixels: 1.02x to 1.10x
# - 32 pixels: 0.96x to 1.08x
# - 64 pixels: 1.05x to 1.20x
# - 128 pixels: 1.30x to 1.50x
#
# From which size on does AMP pay?

# %%
pays_from = ...
exercises.check_pays_from(pays_from)

# %% [markdown]
# <details><summary>Hint</summary>
#
# AMP must be faster at the size that you choose and at all larger sizes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# pays_from = 64
# ```
#
# The interval for 32 pixels includes 1, so the answer has to be larger than 32 pixels.
#
# </details>
#
# ## Further reading
#
# - [Making deep learning go brrrr from first principles](https://horace.io/brrr_intro.html), by Horace
#   He: compute, memory and overhead.
