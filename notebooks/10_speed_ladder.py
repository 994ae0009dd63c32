# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Climb from FP32 to the limit of your hardware
#
# **What you'll do.** Take the training step of [notebook 04](04_fp32_vs_amp.ipynb) and make it
# faster, one change at a time. We predict what AMP can give, make the changes, measure them, and look
# for the reasons why they gave more or less. We also measure the limits of your device.
#
# **What you'll learn.**
# - how to count what a step has to do, and how long that takes at least;
# - what each rung of the ladder changes: precision, memory format, optimizer, compiler, and last a
#   step written anew;
# - when AMP loses: small problems, problems without matrix products, and formats that the hardware
#   does not have;
# - which of it pays on *your* machine.
#
# **What you need.** [Notebook 04](04_fp32_vs_amp.ipynb) for the problem and for how to measure;
# [notebook 09](09_xray_your_model.ipynb) for memory forecasts. On a CPU, rungs that compile need a
# C++ compiler.

# %% tags=["nbval-ignore-output"]
from functools import partial
from itertools import takewhile

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course import emulates_bf16, figures, start

from amp_lab import Precision, advise, compare, forecast_memory, xray
from amp_lab.bench import ConvModel, FusedStep, count_step, measure_ceilings, quantized_sine
from amp_lab.cli import main as amp_lab_command
from amp_lab.core.allocator import keep_memory, memory_taken
from amp_lab.core.device import describe_device, make_matmul, recommend_precision

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# A step computes, and it moves data. Take a device that does 200 GFLOP/s and reads or writes 30 GB
# a second, a matrix product and a ReLU, both on matrices of 1024 x 1024 fp32 numbers. Before you run
# this: which of the two gains from hardware that computes twice as fast?

# %%
side = 1024
for name, operations, numbers in (
    ("product", 2 * side**3, 3 * side**2),
    ("ReLU", side**2, 2 * side**2),
):
    compute_ms, move_ms = 1e3 * operations / 200e9, 1e3 * 4 * numbers / 30e9
    print(f"{name:<8} computes for {compute_ms:6.3f} ms and moves data for {move_ms:.3f} ms")
    assert (compute_ms > move_ms) == (name == "product")

# %% [markdown]
# The product does; the ReLU hardly gains. The product computes for 10.737 ms and moves data for 0.419 ms,
# while the ReLU computes for 0.005 ms and moves data for 0.280 ms. A 16-bit precision helps both, but in
# different ways: it multiplies faster where the hardware can, and it halves the bytes.
#
# ## The settings
#
# We climb in the low precision that `amp-lab doctor` recommends here. Where it recommends none, we
# use bf16, and see what that costs.

# %% tags=["nbval-ignore-output"]
config = {
    "quick": {
        "size": 128,
        "steps": 1,  # in a row, to be timed
        "sizes": (16, 32, 64),
    },
    "full": {"size": 512, "steps": 3, "sizes": (32, 128, 512)},
}[scale]
config |= {"hidden": 256, "widths": (16, 64, 256)}
if emulates_bf16(device):
    config |= {"size": 32, "widths": (16, 32, 64)}
recommended = recommend_precision(device)
low = recommended if recommended in ("fp16", "bf16") else Precision.BF16
print(f"{device}, {scale} scale, from fp32 to {low}")
assert low.dtype.itemsize == 2

# %% [markdown]
# ## First, keep the memory (optional)
#
# On a CPU there is something to put right before we compare. By default glibc, the usual C library of Linux, gives
# large blocks [back to the operating system](https://man7.org/linux/man-pages/man3/mallopt.3.html) when a tensor is
# freed: on 64-bit systems from 32 MiB on, and often below. The next tensor gets new pages, which the system fills with
# zeros first. We take a small ConvModel and a large picture:


# %%
def grown_problem(size=32, batch=2, width=64):
    """The network and its data, of one size."""
    torch.manual_seed(0)
    images, wanted = quantized_sine(size, device)
    images, wanted = (t.repeat(batch, 1, 1, 1) for t in (images, wanted))
    images = images.to(memory_format=torch.channels_last)
    return ConvModel(width).to(device, memory_format=torch.channels_last), images, wanted


def passes(model, images, wanted, precision):
    """Forward and backward pass."""
    with precision.float32_mode(device.type):
        with torch.autocast(device.type, dtype=low.dtype, enabled=precision is low):
            loss = nn.functional.mse_loss(model(images), wanted)
        loss.backward()


# %% [markdown]
# After `keep_memory()` the memory of a tensor stays with the process, and new tensors reuse it. We time
# FP32 and AMP before this call and after. Which of the two do you expect to get faster?

# %% tags=["nbval-ignore-output"]
large = grown_problem(384, batch=1)
both = {p: partial(passes, *large, p) for p in (Precision.FP32, low)}
anew = {}  # MiB
for kept in (False, True):
    has_kept = kept and keep_memory()  # False where there is no such C library
    timed = compare(both, device=device, budget_s=12)
    print(f"{'memory kept' if kept else 'as it is'}: AMP {timed.ratio(*both)}")
    for p, run in both.items():
        anew[p, kept] = min(memory_taken(run) for _ in range(5)) / 2**20  # the first ones grow
        print(f"  {p}  {1e3 * timed.median_s(p):4.0f} ms, {anew[p, kept]:4.0f} MiB anew")
assert device.type != "cpu" or not has_kept or anew["fp32", True] < anew["fp32", False] / 10

# %% [markdown]
# Both get faster by far. FP32, which took more memory anew, gains more than AMP. Memory is kept for the
# rest of this notebook. Before you compare precisions on such a CPU elsewhere, call `keep_memory`, or
# set `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1000000000000` in the environment of a program. Other
# allocators keep memory too ([PyTorch's tuning
# guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#switch-memory-allocator)).
# The price is memory, which stays with the process. <!-- tests/core/test_allocator.py -->

# %% [markdown]
# ## The limit: what can this device do?
#
# Computing and moving data both have a highest rate, and we can measure it: with one large matrix
# product in each precision, and with a copy or a sum, whichever is faster. What fits in a cache is
# read faster, so there is a rate for each size. If something else was seen to use the machine,
# `limits.trusted` is false, and no speed-up below is checked against these figures.

# %% tags=["nbval-ignore-output"]
limits = measure_ceilings(device)
for precision, rate in limits.flops_per_s.items():
    print(f"{precision}: {'not here' if rate is None else f'{rate / 1e9:,.0f} GFLOP/s'}")
for nbytes in (2**20, max(limits.stream_bytes_per_s)):
    print(f"memory, {nbytes / 2**20:,.0f} MiB: {limits.stream_bytes_per_s[nbytes] / 1e9:.0f} GB/s")
if not limits.trusted:
    print("the machine was too busy to trust these figures")
doctor = describe_device(device).rates  # the same product, at a smaller size
assert all(limits.flops_per_s[p] >= rate for p, rate in doctor.items() if rate is not None)
assert not limits.trusted or min(limits.stream_bytes_per_s.values()) > 1e8  # a disk is faster

# %% [markdown]
# How much faster bf16 multiplies than fp32 depends on the CPU: in the gallery most with AMX, Intel's units for products
# of small matrices. Where a CPU has no instructions for fp16, they are emulated, and that is far slower. [The
# gallery](../data/results/README.md#the-gallery) has both kinds.
#
# ## The work: what must a step do?
#
# The ConvModel learns a picture from its coordinates. Its 1x1 convolutions multiply, for each of
# the P pixels, a matrix of outputs x inputs with a vector: 2 FLOPs for each weight, one
# multiplication and one addition. The backward pass does that twice more, for the gradient of the
# weights and for that of the input; only the first convolution needs none of its input.

# %% tags=["nbval-ignore-output"]
inputs, target = quantized_sine(config["size"], device)  # (1, 2, H, W), (1, 1, H, W)
pixels, hidden = target.numel(), config["hidden"]
weights = [2 * hidden, hidden * hidden, hidden * hidden, hidden]
flops = 2 * pixels * (3 * sum(weights) - weights[0])
print(f"{pixels:,} pixels, {sum(weights):,} weights: {flops / 1e9:.2f} GFLOP a step")
assert 0.98 < 12 * pixels * hidden**2 / flops <= 1  # nearly all of it in the two in the middle

# %% [markdown]
# That makes 12.94 GFLOP for a step at the quick scale. PyTorch can count too, by watching the ops of a real step. Here
# is the plain recipe. It reads the loss after every step, as one does to print it, and for that a GPU's host [has to
# wait](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization).


# %% tags=["nbval-ignore-output"]
def new_model():
    """The network and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = ConvModel(hidden).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def recipe(inputs, target):
    """The plain recipe; returns a function that does one step and returns the loss."""
    model, optimizer = new_model()

    def step():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


with FlopCounterMode(display=False) as counter:
    recipe(inputs, target)()
print(f"counted by torch: {counter.get_total_flops() / 1e9:.2f} GFLOP")
assert counter.get_total_flops() == flops

# %% [markdown]
# Both counts agree.
#
# ## Predict
#
# If the step did nothing but multiply matrices at the measured rate, it would take:

# %% tags=["nbval-ignore-output"]
floor_ms = {p: 1e3 * flops / limits.flops_per_s[p] for p in ("fp32", low, "bf16")}
for precision, floor in floor_ms.items():
    print(f"{precision}: at least {floor:.2f} ms")
promise = floor_ms["fp32"] / floor_ms[low]
print(f"so the low precision promises {promise:.2f}x")
assert not limits.trusted or promise > 1 or low != recommended  # the doctor says the same


def is_possible(speedup):
    """Whether the device can gain so much: what the products promise, or 2x from half the bytes."""
    return not limits.trusted or not speedup.is_above(1.5 * max(2, promise))


# %% [markdown]
# That is what the matrix products promise. Before you go on, write down how much of that promise you
# expect the change to AMP alone to keep.
#
# ## Climb
#
# Each rung is a function that does one step, as `recipe` returns it. Before we time a rung, it has to show
# that it learns alike: we compare the losses of its first five steps with those of FP32.
# `float32_mode` switches TF32 off for FP32, which an NVIDIA GPU may otherwise use, and does nothing
# for AMP. <!-- tests/core/test_precision.py -->


# %%
class Ladder:
    """Steps by name, and their losses."""

    def __init__(self):
        self.steps, self.losses = {}, {}

    def add(self, name, precision, step):
        """Put a rung on top, after checking its losses against the lowest one's."""
        with precision.float32_mode(device.type):
            losses = torch.tensor([float(step()) for _ in range(5)])
        first = next(iter(self.losses.values()), losses)
        off = ((losses - first).norm() / first.norm()).item()
        assert off < 0.06, name  # for bf16 16 roundings of 2^-8, about one for each op
        self.steps[name], self.losses[name] = (precision, step), losses
        return off


# %% [markdown]
# The rungs take turns, so that a machine that slows down in the meantime slows all of them down. `compare` pairs the
# times of each round, gives every ratio with an interval, and leaves out the rounds in which another program used the
# machine. At [full scale](../docs/hardware.md#choose-the-device-and-the-scale), a GPU's default, we time three steps in
# a row, since the device must be free to begin the next step before the host has seen the end of the
# last. <!-- tests/core/test_timing.py -->


# %%
def climb(ladder):
    """Time all rungs in turns; returns the comparison, of `config["steps"]` steps each."""

    def timed(precision, step):
        def run():
            with precision.float32_mode(device.type):
                for _ in range(config["steps"]):
                    step()

        return run

    functions = {name: timed(*rung) for name, rung in ladder.steps.items()}
    return compare(functions, device=device, budget_s=16)


# %% [markdown]
# **The ground: FP32.** We start with the recipe as it is.

# %%
ladder = Ladder()
assert ladder.add("recipe", Precision.FP32, recipe(inputs, target)) == 0
assert ladder.losses["recipe"][-1] < ladder.losses["recipe"][0]  # it learns

# %% [markdown]
# **Rung 1: AMP.** We put autocast around the forward pass and, in fp16, use a scaler. Up to rung 4
# each rung keeps what the one below it has, so the step takes its parts as arguments.


# %%
def amp_step(model, optimizer, inputs, target, read_loss=True):
    """One AMP training step; returns a function."""
    scaler = low.grad_scaler(device.type, init_scale=2.0**12)  # no step overflows: losses compare

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=low.dtype):  # rung 1
            loss = nn.functional.mse_loss(model(inputs), target)
        scaler.scale(loss).backward()  # rung 1
        scaler.step(optimizer)  # rung 1
        scaler.update()  # rung 1
        return loss.item() if read_loss else loss.detach()

    return step


off = ladder.add("AMP", low, amp_step(*new_model(), inputs, target))
assert off > 0  # it rounds, unlike FP32

# %% [markdown]
# **Rung 2: channels last.** By default an image is stored channel by channel, N, C, H, W. A 1x1 convolution is a matrix
# product over the channels of each pixel, so it can be faster if those lie side by side, in the order N, H, W, C. The
# shape of the tensor stays the same; its order in memory changes, and so its strides.

# %%
model, optimizer = new_model()
model.to(memory_format=torch.channels_last)  # rung 2
inputs_last = inputs.to(memory_format=torch.channels_last)  # rung 2
off = ladder.add("channels last", low, amp_step(model, optimizer, inputs_last, target))
assert inputs_last.shape == inputs.shape
assert inputs_last.stride()[1] == 1  # from one channel to the next

# %% [markdown]
# **Rung 3: a fused optimizer, and no waiting.**
# [`fused=True`](https://docs.pytorch.org/docs/stable/optim.html) computes Adam's whole update in a fused kernel.
# With a scaler, that kernel also unscales the gradients and decides whether to skip the step; the
# check for overflow still takes a pass of its own, as [notebook
# 03](03_grad_scaler_step_by_step.ipynb) counts. We also stop reading the loss after each step, so
# that it stays on the device until we look at it. On a CPU, which has nothing to wait for, this
# second part does nothing.


# %%
def new_fused_model():
    """The same with channels last and the fused optimizer."""
    model, _ = new_model()
    model.to(memory_format=torch.channels_last)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # rung 3


parts = *new_fused_model(), inputs_last, target
off = ladder.add("fused Adam, no waiting", low, amp_step(*parts, read_loss=False))
assert off > 0  # it rounds, unlike FP32

# %% [markdown]
# **Rung 4: torch.compile.** Convolution, normalisation and ReLU each read their input from memory
# and write their output to it. The compiler can [merge elementwise
# ops](https://docs.pytorch.org/docs/stable/torch.compiler_get_started.html) into few kernels.

# %% tags=["nbval-ignore-output"]
model, optimizer = new_fused_model()
compiled = torch.compile(model)  # rung 4
off = ladder.add(
    "compiled", low, amp_step(compiled, optimizer, inputs_last, target, read_loss=False)
)
print(f"the losses of five steps differ by {off:.1e} from FP32's")
assert off > 0  # it rounds, unlike FP32

# %% [markdown]
# **Rung 5: by hand.** Last, we rearrange the step. Batch normalisation needs the mean of a whole layer
# before the next layer can begin, so a step takes five passes over the pixels. `FusedStep` makes these
# five ([its source](../src/amp_lab/bench/fused_convmodel.py)). On a CPU it works on a block of pixels
# at a time, of 2 MiB, so that it may stay in the cache. It computes the first layer again instead of
# storing it, and keeps only two of all activations. It scales no gradients, so it computes in bf16.

# %% tags=["nbval-ignore-output"]
model, optimizer = new_fused_model()
by_hand = FusedStep(model, torch.bfloat16)  # rung 5


def step_by_hand():
    """Forward and backward in one call, then the optimizer."""
    loss = by_hand(inputs, target)
    optimizer.step()
    return loss


off = ladder.add("by hand", Precision.BF16, step_by_hand)
print(f"the losses of five steps differ by {off:.1e} from FP32's")
assert off > 0  # it rounds, unlike FP32

# %% [markdown]
# Now we time all of them in turns. The speed-up says how many times as fast as the recipe a rung is,
# with its interval. Which rung do you expect to bring the largest gain?

# %% tags=["nbval-ignore-output"]
climbed = climb(ladder)
bars, speedups = [], {}
for name, (precision, _) in ladder.steps.items():
    took = climbed.time_s(name).times(1e3 / config["steps"])  # ms
    limit, speedups[name] = floor_ms[precision], climbed.ratio("recipe", name)
    text = f"{speedups[name].median:.2f}x" if climbed.trusted else ""
    bars.append((str(precision), name, took, limit, text))
    of_limit = f"{limit / took.median:4.0%} of limit"
    print(f"{name:<24}{took.median:8.2f} ms  {of_limit}  {speedups[name]}")
for remark in climbed.remarks():
    print(remark)
assert list(climbed.samples_s) == list(ladder.steps)  # every rung was timed

# %% [markdown]
# In the picture each bar is the time of a step with its interval, and the black tick is where the
# matrix products alone would end. If a bar ends to the left of its tick, the machine was probably slower
# when we measured its limits.

# %% tags=["nbval-ignore-output"]
_ = figures.speed_ladder({f"ConvModel, {config['size']}x{config['size']} pixels": bars})

# %% [markdown]
# AMP alone keeps only a part of the promise. With the images and the weights in channels last, a change of
# two lines, it gains much more. The likely reason is copies: a kernel for
# [channels last](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html) has to bring
# each tensor of another layout into its own first. The next two rungs make hardly a difference. On a GPU,
# as a rule of thumb, they do more, since each small kernel and wait [costs time
# there](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
#
# ## Explain: count the bytes too
#
# `count_step` watches every op of an eager step and adds up what it reads and
# writes. <!-- tests/bench/test_limits.py -->
#
# Between two matrix products there are normalisation, ReLU and their gradients. They compute next to
# nothing, but each of them reads and writes all of the pixels, as the ReLU in our five lines does.

# %% tags=["nbval-ignore-output"]
counts = {}
for precision in (Precision.FP32, low):
    model, optimizer = new_model()
    step = recipe(inputs, target)
    if precision is low:
        step = amp_step(model, optimizer, inputs, target)
    with precision.float32_mode(device.type):
        counts[precision] = count_step(step, model, inputs, training=True)
    moved = counts[precision].moved_bytes
    print(f"{precision}: {moved / 2**20:,.0f} MiB, {flops / moved:.0f} FLOPs for each byte")
assert counts[low].flops == flops
assert counts[low].moved_bytes < counts["fp32"].moved_bytes

# %% [markdown]
# The FP32 step moves 732 MiB, and AMP about half of it, 373 MiB. The step by hand stores two activations
# and one gradient of P x 256 values in two bytes each. According to [its
# source](../src/amp_lab/bench/fused_convmodel.py) it writes each once, and reads the first activation
# three times, the second twice and the gradient once. On a CPU that is nearly all, as long as its blocks
# stay in the cache. On a GPU it takes all pixels as one block, and what passes from one kernel to the
# next is written and read as well, unless a cache holds it.

# %% tags=["nbval-ignore-output"]
moved_by_hand = (3 + 3 + 2 + 1) * 2 * pixels * hidden  # bytes
print(f"by hand: {moved_by_hand / 2**20:,.0f} MiB, {flops / moved_by_hand:.0f} FLOPs for each byte")
assert 5 * moved_by_hand < counts[low].moved_bytes

# %% [markdown]
# Only 72 MiB are left. So a ladder can gain more than the matrix products promise, because its
# rungs save bytes as well as time in products. A step that consists of products and moved bytes
# alone gains at most the larger of the two ratios, so no rung may exceed that by far:

# %% tags=["nbval-ignore-output"]
fewer_bytes = counts["fp32"].moved_bytes / moved_by_hand
most = max(promise, floor_ms["fp32"] / floor_ms["bf16"], fewer_bytes)
print(f"products promise {promise:.2f}x, fewer bytes {fewer_bytes:.2f}x")
print(f"the highest rung reaches {speedups['by hand']}")
assert not limits.trusted or not any(s.is_above(1.5 * most) for s in speedups.values())

# %% [markdown]
# The **roofline** puts both limits into one picture. The horizontal axis shows how many FLOPs there
# are for each byte moved, the vertical axis the FLOP/s achieved. Under the slope, moving the data
# takes longer; under the flat part, the arithmetic does. A faster precision raises the flat part and
# not the slope, so a step under the slope gains only what the smaller tensors save.

# %% tags=["nbval-ignore-output"]
moved_bytes = {
    "recipe": counts["fp32"].moved_bytes,
    "AMP": counts[low].moved_bytes,
    "by hand": moved_by_hand,
}
points = []
for precision, name, took, limit, _ in bars:
    if name in moved_bytes:
        rate = took.rate(1e3 * flops)  # FLOP/s
        points.append((name, precision, flops / moved_bytes[name], rate))
        copied = 1e3 * moved_bytes[name] / limits.memory_bytes_per_s
        print(f"{name}: products {limit:.0f} ms, memory {copied:.0f} ms, all {took.median:.0f} ms")
roofs = {p: limits.flops_per_s[p] for p in dict.fromkeys(("fp32", str(low), points[-1][1]))}
assert points[0][2] < points[1][2] < points[2][2]  # each moves less than the one before
_ = figures.roofline(roofs, limits.memory_bytes_per_s, points)

# %% [markdown]
# From point to point the step moves fewer bytes, and so lies farther to the right. The roof of bf16 is
# higher, and its corner lies farther to the right too: what products limit in fp32, memory may limit in bf16.
# The step by hand, with a tenth of the bytes, lies farthest from the slope. The slope is that of memory, and a
# point may lie above it if the data fits in a cache. As a rule of thumb, what is missing to the roof goes to
# copies inside an op (not counted here), to threads that wait, and to arithmetic other than matrix products.
#
# ## A rung above: in tiles (optional)
#
# By hand, a block of 4,096 pixels may stay in the cache, and still it goes through one op after another,
# and each of them reads and writes it. In C++ we can do better: take 32 pixels from what they are read
# from to the sums of what they become, in one go. Of the activations only the boxes in black leave the core:

# %% tags=["nbval-ignore-output"]
PASSES = {
    "layer 2": ["layer 1 again", "normalise, ReLU", "product", "sums", "write z2"],
    "layer 3": ["read z2", "normalise, ReLU", "product", "sums", "write z3"],
    "loss": ["read z3", "normalise, ReLU", "layer 4, loss", "sums"],
    "back 3": ["read z2, z3", "gradient of z3", "two products", "sums", "write g2"],
    "back 2": ["read z2, g2", "layer 1 again", "two products", "sums"],
}
_ = figures.passes(PASSES)

# %% [markdown]
# *z2* and *z3* are what the second and the third layer return, before they are normalised, and *g2* is
# a gradient. What is cheap is computed again, such as the first layer with its two inputs, and every
# mask of a ReLU. The *sums* are those that batch normalisation, the bias and the next pass need; only
# they make it five passes and not one. Let us count:

# %% tags=["nbval-ignore-output"]
trips = [box for chain in PASSES.values() for box in chain if box.startswith(("read", "write"))]
matrices = sum(1 + box.count(",") for box in trips)  # each of P x 256 values in bf16
products = sum({"product": 1, "two products": 2}.get(box, 0) for c in PASSES.values() for box in c)
print(f"{products} products, and {matrices * 2 * pixels * hidden / 2**20:,.0f} MiB of memory")
assert matrices * 2 * pixels * hidden == moved_by_hand
assert 0.98 < products * 2 * pixels * hidden**2 / flops <= 1

# %% [markdown]
# So memory moves as much as by hand, and what is saved are the trips through the cache. It takes a CPU
# with AVX-512 and its bf16 instructions, and a C++ compiler, which `amp-lab bench` calls at first use:
#
# ```bash
# pdm run amp-lab bench --workload convmodel --precision bf16 --rung by-hand --rung tiles
# ```
#
# What it gave on a CPU stands with [the recorded runs](../data/results/README.md#the-gallery). For a GPU
# the same passes are written in Triton, in `amp_lab/bench/triton_tiles.py` [*(not yet seen on a
# GPU)*](../data/results/README.md "triton-tiles"). For a model of your own it is rarely worth the work;
# it shows how far the limit is from what the usual rungs
# reach. <!-- tests/bench/test_tiled_convmodel.py -->
#
# ## Where AMP loses
#
# We judge by the interval. If all of it lies above 1, AMP pays; if all of it lies below, AMP costs.
# Otherwise we saw no difference, or the machine was too busy to tell.


# %%
def verdict(speedup):
    """A speed-up by AMP, and what it says, in words."""
    if not speedup.trusted:
        return str(speedup)
    if speedup.is_above(1):
        return f"{speedup}, AMP pays"
    return f"{speedup}, AMP costs" if speedup.is_below(1) else f"{speedup}, no difference seen"


# %% [markdown]
# **No matrix products.** Autocast has a list of ops that it runs in the low precision. A model
# without any of them gains nothing, and may pay for what autocast does at each call.

# %% tags=["nbval-ignore-output"]
gate = nn.Sequential(nn.LayerNorm(1024), nn.GELU(), nn.LayerNorm(1024), nn.Softmax(-1)).to(device)
rows = torch.randn(512, 1024, device=device)


@torch.no_grad()
def gate_in(enabled):
    """The forward pass, with or without autocast."""
    with torch.autocast(device.type, dtype=low.dtype, enabled=enabled):
        return gate(rows)


gated = compare(
    {"fp32": lambda: gate_in(False), "AMP": lambda: gate_in(True)}, device=device, budget_s=2
)
print(f"norms, GELU and softmax: {verdict(gated.ratio('fp32', 'AMP'))}")
assert gate_in(True).dtype is torch.float32  # autocast has cast nothing down
assert not gated.ratio("fp32", "AMP").is_above(1.1)  # so there is nothing to gain

# %% [markdown]
# The interval includes 1 or comes close to it: there is nothing to gain.
#
# **Many small ops.** Here are fifty layers of 32 x 32. Each of them computes very little, and under
# autocast each call comes with casts, which we count. Before you run this: will AMP be faster or slower?
# A GPU would be waiting for the host [*(not yet seen on a GPU)*](../data/results/README.md "small-ops").

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
print(f"fifty thin layers: {verdict(speedup)}; {casts} casts for 50 products")
assert casts >= 2 * 50  # of weights and biases; inputs and outputs stay low in between
assert is_possible(speedup)

# %% [markdown]
# AMP makes this network slower. It adds 101 casts to its 50 products.
#
# **A format that the hardware does not speed up.** [Some CPUs](../docs/hardware.md) emulate fp16, and then it is slower
# by far, which is why the product is small here. If yours has it, the list of rates at the top shows whether fp16 beats
# fp32.

# %% tags=["nbval-ignore-output"]
products = {p: make_matmul(device, Precision(p), 128) for p in ("fp32", "fp16", "bf16")}
products = compare(products, device=device, budget_s=2)
print(products)
assert all(is_possible(products.ratio("fp32", name)) for name in products.samples_s)

# %% [markdown]
# Each line has the time of a product, and the later ones say how many times as fast as in fp32 it is. In a
# product as small as this, bf16 gains less here than in the large one at the top, and fp16 costs time.
#
# **Sizes that are not multiples of 8.** On tensor cores they usually gain less: [notebook
# 08](08_when_amp_breaks.ipynb#44-A-size-is-not-a-multiple-of-16-or-8) lists the efficient sizes, and pads the others.
#
# ## From which size on does AMP pay?
#
# We let the picture, the batch or the network of `grown_problem` grow, and time forward and backward pass
# with channels last, in FP32 and with AMP. The memory of a whole training step with Adam is the forecast of
# [notebook 09](09_xray_your_model.ipynb). Which of the three do you expect to help AMP most?


# %%
def speedup_and_memory(*problem):
    """Speed-up by AMP, and its share of FP32's memory."""
    both = {p: partial(passes, *problem, p) for p in (Precision.FP32, low)}
    speedup = compare(both, device=device, budget_s=2).ratio(Precision.FP32, low)
    assert is_possible(speedup)
    forecasts = (forecast_memory(*problem[:2], device_type=device.type, precision=p) for p in both)
    peaks = [forecast.peak for forecast in forecasts]
    return speedup, peaks[1] / peaks[0]


# %% tags=["nbval-ignore-output"]
growth = {}
for what, name, values in (
    ("picture (pixels along an edge)", "size", config["sizes"]),
    ("batch (pictures)", "batch", (1, 4, 16)),
    ("width (channels)", "width", config["widths"]),
):
    found = [speedup_and_memory(*grown_problem(**{name: value})) for value in values]
    growth[what] = values, *map(list, zip(*found, strict=True))
    for value, (speedup, _) in zip(values, found, strict=True):
        print(f"{what} {value:>3}: {verdict(speedup)}")
assert all(0 < share < 1.2 for _, _, shares in growth.values() for share in shares)
_ = figures.growth(growth)

# %% [markdown]
# The upper row of the picture shows the speed-up by AMP, the lower row its share of FP32's memory. Here
# AMP gains more with every kind of growth. At the largest width the share of memory is larger again,
# since the weights stay fp32. The more of it is activations, the nearer it comes to half, but on MPS,
# [whose batch norm stays fp32](09_xray_your_model.ipynb#Four-models,-three-backends):

# %%
for what in ("picture (pixels along an edge)", "batch (pictures)"):
    shares = growth[what][2]
    assert shares[-1] < shares[0]  # pictures make activations, and no weights
    assert shares[-1] < 0.7 or device.type == "mps"  # whose batch norm is fp32
shares = growth["width (channels)"][2]
assert shares[-1] > shares[-2]  # weights grow with the square of the width

# %% [markdown]
# ## Let the computer climb
#
# For a model of your own, `advise` does much of what this notebook did by hand, on a copy. It forecasts the
# memory in each precision, trains the model for some steps and compares losses and gradients with
# FP32's, times in turns what passes, and ends with the lines to write. On the command line that is
# `amp-lab advise`. <!-- tests/advisor/test_advise.py -->
#
# Here it gets a small ConvModel and less time.

# %% tags=["nbval-ignore-output"]
small, wanted = quantized_sine(64, device)


def loss_of(output):
    """The loss of any number of pictures, since larger batches are forecast too."""
    return nn.functional.mse_loss(output, wanted.expand_as(output))


minutes = {"quick": 0.25, "full": 1.0}[scale]
advice = advise(ConvModel(64).to(device), small, loss_fn=loss_of, device=device, minutes=minutes)
assert advice.recommended is not None  # fp32 at the least
advice

# %% [markdown]
# Read the last column first. One recipe for training and one for inference are *recommended*. A recipe
# takes the place of a simpler one only if it surely takes less time, and [at least 3 %
# less](../src/amp_lab/advisor/session.py). (The next section asks for a tenth, since each rung is work
# for you.) For the others a few words say why they are not, and the lines below the table say more. For
# training, only a recipe that learns as FP32 does in the few steps that were tried can be
# recommended. <!-- tests/advisor/test_advise.py -->

# %%
assert {best.verdict for best in advice.chosen.values()} == {"recommended"}
assert all(candidate.verdict for candidate in advice.candidates)

# %% [markdown]
# ## What to do on your machine (optional)
#
# We can now compute some advice. Up to rung 4 each comes with all below it, so climb to the lowest one that
# may take at most 1.1 times as long as the fastest, as far as its interval can tell. And AMP pays
# from a size on if it gains for certain at this size and at all larger ones.


# %%
def rung_to_climb_to(climbed):
    """The lowest rung that may be within a tenth of the fastest."""
    if not climbed.trusted:
        return "cannot tell here"
    fastest = min(climbed.samples_s, key=climbed.median_s)
    over_fastest = {name: climbed.ratio(name, fastest) for name in climbed.samples_s}
    return next(name for name, ratio in over_fastest.items() if ratio.interval[0] <= 1.1)


def pays(values, speedups):
    """From which value on AMP pays, in words."""
    from_largest = list(zip(values, speedups, strict=True))[::-1]
    sure = list(takewhile(lambda pair: pair[1].is_above(1), from_largest))
    if sure:
        return f"AMP pays from {sure[-1][0]} on"
    costs = all(speedup.is_below(1) for speedup in speedups)
    return "AMP costs at all of these sizes" if costs else "cannot tell here"


# %% tags=["nbval-ignore-output"]
rung = rung_to_climb_to(climbed)
print(f"climb to: {rung}" + (f", {speedups[rung]}" if climbed.trusted else ""))
for what, (values, gains, _) in growth.items():
    print(f"{what}: {pays(values, gains)}")
assert climbed.trusted == (rung in ladder.steps)

# %% [markdown]
# The advice is the lowest rung that the fastest does not surely beat by a tenth. `amp-lab bench` climbs
# these rungs and more with other models, and compares the losses or the outputs with FP32's.
# `--compare FILE` puts your machine beside [recorded
# ones](../data/results/README.md). <!-- tests/bench/test_rungs.py -->

# %%
assert amp_lab_command(["bench", "--list"]) == 0

# %% [markdown]
# ## Summary
#
# - On a CPU with Linux call `keep_memory` first, or you may take the cost of new memory for a gain by AMP.
# - Count first. FLOPs at the measured rate give a limit for the time of a step; bytes at the
#   measured rate help to say why you are not there yet.
# - A 16-bit precision speeds up matrix products where the hardware can, and halves most of what the rest has to move.
#   The first part is the promise, and the second often decides.
# - Channels last, a fused optimizer, not reading the loss, `torch.compile`: each is a line or two. As a
#   rule of thumb, each pays on some devices and not on others. Measure them in turns, on yours.
# - AMP gains nothing where there is nothing to multiply. It lost with many small ops, and loses in a
#   format that the hardware emulates.
# - The gain depends on the size, the layout and what else is switched on: the same network gains
#   differently in [notebook 04](04_fp32_vs_amp.ipynb), with a smaller picture. Compare ratios of one run.
# - `advise` climbs with a model of yours. For training it recommends no rung that, in the few steps that
#   it tries, does not learn as FP32 does.
#
# Next, [notebook 11](11_scale_out.ipynb) takes training to several devices.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("10_speed_ladder")

# %% [markdown]
# ### 1. Count the FLOPs of a layer
#
# A 1x1 convolution from 64 to 128 channels works on one picture of 32 x 32 pixels. It is not the first
# layer. How many FLOPs does it take for forward and backward pass together?

# %%
layer_flops = ...
exercises.check_layer_flops(layer_flops)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The forward pass has one matrix product, and the backward pass two. How many FLOPs does each take for
# a weight and a pixel?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# layer_flops = 3 * 2 * (32 * 32) * (64 * 128)
# ```
#
# These are 50,331,648: three products, with a multiplication and an addition for each of 1,024
# pixels and 8,192 weights.
#
# </details>
#
# ### 2. Draw the roof
#
# Complete the function: how many milliseconds does a step take at least that computes `flops` and
# moves `nbytes`, on a device with these rates? It may compute and move data at the same time.


# %%
def least_ms(flops, nbytes, flops_per_s, bytes_per_s):
    return ...


exercises.check_least_ms(least_ms)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Work out the time for each alone, as in the five lines at the top. Which of the two has to be over
# before the step can be over?
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
# Both have to be over, so the slower one sets the limit.
#
# </details>
#
# ### 3. Mend the memory format
#
# This function should bring a model and its images into channels last, but the images stay as they
# were. Find the mistake and write the function as it should be.
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
# A tensor's `to` returns a new tensor, which the function above threw away.
#
# </details>
#
# ### 4. From which size on does AMP pay?
#
# You have measured the speed-up by AMP for pictures of four sizes, and got these intervals: 16 pixels
# 1.02x to 1.10x, 32 pixels 0.96x to 1.08x, 64 pixels 1.05x to 1.20x, 128 pixels 1.30x to 1.50x. Choose
# the size from which on AMP pays for certain.

# %%
pays_from = ...
exercises.check_pays_from(pays_from)

# %% [markdown]
# <details><summary>Hint</summary>
#
# AMP has to gain at the size you choose and at all larger ones. What says that it gains?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# pays_from = 64
# ```
#
# The interval of 32 pixels includes 1. That of 16 pixels does not, but "from 16 on" would include 32.
#
# </details>
#
# ## Further reading
#
# - [Roofline: an insightful visual performance model](https://doi.org/10.1145/1498765.1498785), by
#   Williams, Waterman and Patterson (2009).
# - [Making deep learning go brrrr from first principles](https://horace.io/brrr_intro.html), by Horace
#   He: compute, memory and overhead.
# - [PyTorch's performance tuning
#   guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html): more rungs.
# - [Channels last memory
#   format](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html).
