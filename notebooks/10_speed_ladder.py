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
# faster, one change at a time: predict what the change will give, make it, measure it, and find out
# why it gave more or less. Beside every figure stands the limit of your device, measured too.
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
# [notebook 09](09_xray_your_model.ipynb) for memory forecasts. It runs on a CPU in about a minute.
# Rungs that compile need a C++ compiler.

# %% tags=["nbval-ignore-output"]
from functools import partial
from itertools import takewhile
from unittest import mock

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from amp_lab import Precision, advise, compare, forecast_memory, plots, xray
from amp_lab.bench import ConvModel, FusedStep, count_step, measure_ceilings, quantized_sine
from amp_lab.cli import main as amp_lab_command
from amp_lab.device import describe_device, matrix_product, recommend_precision
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# The low precision to climb in is the one that `amp-lab doctor` recommends here; where it
# recommends none, bf16 shows what that costs.

# %% tags=["nbval-ignore-output"]
config = {
    "quick": {
        "size": 128,
        "hidden": 256,
        "steps": 1,  # in a row, to be timed
        "sizes": (16, 32, 64),
        "widths": (16, 64, 256),
    },
    "full": {
        "size": 512,
        "hidden": 256,
        "steps": 3,
        "sizes": (32, 128, 512),
        "widths": (16, 64, 256),
    },
}[scale]
recommended = recommend_precision(device)
low = recommended if recommended in ("fp16", "bf16") else Precision.BF16
print(f"{device}, {scale} scale, from fp32 to {low}")
assert low.dtype.itemsize == 2

# %% [markdown]
# ## The limit: what can this device do?
#
# A step multiplies matrices and moves data. Both have a highest rate, which can be measured: that
# of one large matrix product, in each precision, and that of memory: a copy or a sum, whichever is
# faster. What fits in a cache is read faster, so there is a rate for each size. All of it is measured
# in turns with a small product that shows whether something else was using the machine: if it was,
# `limits.trusted` says so, and nothing below is concluded from these figures.

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
# ## The work: what must a step do?
#
# The ConvModel learns a picture from its coordinates. Its 1x1 convolutions multiply, for each of
# the P pixels, a matrix of outputs x inputs with a vector: 2 FLOPs for each weight, one
# multiplication and one addition. The backward pass does that twice more, for the gradient of the
# weights and for that of the input; only the first convolution needs none of its input.

# %%
inputs, target = quantized_sine(config["size"], device)  # (1, 2, H, W), (1, 1, H, W)
pixels, hidden = target.numel(), config["hidden"]
weights = [2 * hidden, hidden * hidden, hidden * hidden, hidden]
flops = 2 * pixels * (3 * sum(weights) - weights[0])
print(f"{pixels:,} pixels, {sum(weights):,} weights: {flops / 1e9:.2f} GFLOP a step")

# %% [markdown]
# torch can count too, by watching the ops of a real step. Here is the recipe as one finds it
# everywhere; the loss is read after every step, to be printed, for which a GPU's host [has to
# wait](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization).


# %%
def new_model():
    """The network and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = ConvModel(hidden).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def recipe(inputs=inputs, target=target):
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
    recipe()()
print(f"counted by torch: {counter.get_total_flops() / 1e9:.2f} GFLOP")
assert counter.get_total_flops() == flops

# %% [markdown]
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

# %% [markdown]
# Write down what you expect: how much of that promise will the change to AMP alone keep?
#
# ## Climb
#
# Each rung is a function that makes a step, as `recipe` does. Before it is timed, a rung has to prove
# that it computes the same: the losses of its first five steps are held against those of FP32.
# `float32_mode` switches TF32 off for FP32, which an NVIDIA GPU may otherwise use, and does nothing
# for AMP.


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
# The rungs take turns, so that a machine that slows down in the meantime slows all of them. `compare`
# does that: it pairs the times of each round, gives every ratio with an interval, and leaves out the
# rounds in which another program used the machine. On a GPU we time three steps in a row, since the
# device must be free to begin the next step before the host has seen the end of the last.


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
    return compare(functions, device=device, budget_s=8)


# %% [markdown]
# **The ground: FP32**, as the recipe has it.

# %%
ladder = Ladder()
assert ladder.add("recipe", Precision.FP32, recipe()) == 0
assert ladder.losses["recipe"][-1] < ladder.losses["recipe"][0]  # it learns

# %% [markdown]
# **Rung 1: AMP.** Autocast around the forward pass, and in fp16 a scaler. From here on each rung
# keeps what the one below it has, so the step takes its parts as arguments.


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
# **Rung 2: channels last.** An image is stored channel by channel, N, C, H, W. A 1x1 convolution is
# a matrix product over the channels of each pixel, so it wants those side by side: N, H, W, C. The
# shape of the tensor stays; only its strides change.

# %%
model, optimizer = new_model()
model.to(memory_format=torch.channels_last)  # rung 2
inputs_last = inputs.to(memory_format=torch.channels_last)  # rung 2
off = ladder.add("channels last", low, amp_step(model, optimizer, inputs_last, target))
assert inputs_last.shape == inputs.shape
assert inputs_last.stride()[1] == 1  # from one channel to the next

# %% [markdown]
# **Rung 3: a fused optimizer, and no waiting.** `fused=True` updates all weights in one kernel. With
# a scaler, that kernel also unscales the gradients and decides whether to skip the step; the check
# for overflow still takes a pass of its own. And the loss is no longer read after each step: it stays
# on the device until someone looks. On a CPU, which has nothing to wait for, the second part does
# nothing.


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
# Is the check for overflow really still there? We count its calls in one step of the scaler, and
# look at a gradient before and after:

# %%
model, optimizer = new_fused_model()
scaler = torch.amp.GradScaler(device.type)
scaler.scale(model(inputs_last[..., :8, :8]).square().mean()).backward()
gradient, check = model[0].weight.grad, "_amp_foreach_non_finite_check_and_unscale_"
before = gradient.clone()
with mock.patch.object(torch, check, wraps=getattr(torch, check)) as calls:
    scaler.step(optimizer)
assert calls.call_count == 1  # a pass over the gradients
assert calls.call_args.args[2] == 1  # that divides by nothing
assert torch.allclose(gradient, before / 65536)  # the optimizer's kernel did

# %% [markdown]
# **Rung 4: torch.compile.** Convolution, normalisation and ReLU each read their input from memory
# and write their output to it. The compiler turns what lies between two matrix products into one
# kernel, and does the same for the backward pass.

# %% tags=["nbval-ignore-output"]
model, optimizer = new_fused_model()
compiled = torch.compile(model)  # rung 4
off = ladder.add(
    "compiled", low, amp_step(compiled, optimizer, inputs_last, target, read_loss=False)
)
print(f"the losses of five steps differ by {off:.1e} from FP32's")
assert off > 0  # it rounds, unlike FP32

# %% [markdown]
# **Rung 5: by hand.** What a compiler may not do is change the computation. Batch normalisation
# needs the mean of a whole layer before the next layer may begin, so a step takes five passes over
# the pixels. `FusedStep` makes just these five, as its source shows, which is worth reading:
# `amp_lab/bench/fused_convmodel.py`, some 200 lines. On a CPU it works on a block of pixels at a
# time, small enough for the cache; it computes the first layer anew where it is needed instead of
# storing it; and of all activations it keeps two. It scales no gradients, so it computes in bf16.

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
# Now all of them, in turns. The speed-up is how many times as fast as the recipe a rung is, with the
# interval in which it lies.

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
    assert not (climbed.trusted and limits.trusted) or limit < 1.1 * took.median
for remark in climbed.remarks():
    print(remark)

# %% [markdown]
# As a picture: each bar is the time of a step with its interval, the black tick is where the matrix
# products alone would end. No bar may end left of its tick, which the cell above asserts with a tenth
# to spare for the measurement of the limit.

# %% tags=["nbval-ignore-output"]
_ = plots.speed_ladder({f"ConvModel, {config['size']}x{config['size']} pixels": bars})

# %% [markdown]
# Compare with what you wrote down: how much of the promise did AMP alone keep, and which rung brought
# the rest nearer? The sections below explain what a rung can change.
#
# ## Explain: bytes, not FLOPs
#
# `count_step` watches every op of an eager step, and adds up what it reads and writes. Between two
# matrix products there are normalisation, ReLU and their gradients. They compute next to nothing,
# but each reads and writes all of the pixels.

# %% tags=["nbval-ignore-output"]
counts = {}
for precision in (Precision.FP32, low):
    model, optimizer = new_model()
    step = amp_step(model, optimizer, inputs, target) if precision is low else recipe()
    with precision.float32_mode(device.type):
        counts[precision] = count_step(step, model, inputs, training=True)
    moved = counts[precision].moved_bytes
    print(f"{precision}: {moved / 2**20:,.0f} MiB, {flops / moved:.0f} FLOPs for each byte")
assert counts[low].flops == flops
assert counts[low].moved_bytes < counts["fp32"].moved_bytes

# %% [markdown]
# The step by hand stores two activations and one gradient of P x 256 values in two bytes each.
# According to its source it writes each once, and reads the first activation three times, the second
# twice and the gradient once. On a CPU that is all, as long as its blocks stay in the cache. On a GPU
# it takes all pixels as one block, which no cache holds, so that what passes from one kernel to the
# next is written and read as well.

# %%
moved_by_hand = (3 + 3 + 2 + 1) * 2 * pixels * hidden  # bytes
print(f"by hand: {moved_by_hand / 2**20:,.0f} MiB, {flops / moved_by_hand:.0f} FLOPs for each byte")
assert 5 * moved_by_hand < counts[low].moved_bytes

# %% [markdown]
# That also explains how a ladder can gain more than the matrix products promise: the rungs save bytes
# as well as time in products. A step that is nothing but products and bytes gains at most the larger of
# the two ratios, so this is what no rung may exceed:

# %% tags=["nbval-ignore-output"]
fewer_bytes = counts["fp32"].moved_bytes / moved_by_hand
most = max(promise, floor_ms["fp32"] / floor_ms["bf16"], fewer_bytes)
print(f"products promise {promise:.2f}x, fewer bytes {fewer_bytes:.2f}x")
print(f"the highest rung reaches {speedups['by hand']}")
assert not limits.trusted or not any(s.is_above(1.1 * most) for s in speedups.values())

# %% [markdown]
# The **roofline** puts both limits into one picture. To the right, upwards: FLOPs for each byte
# moved, and FLOP/s achieved. Under the slope, moving the data takes longer; under the flat part,
# the arithmetic. A lower precision raises the flat part, and does nothing for the slope: a step
# that is under the slope gains only what the smaller tensors save.

# %% tags=["nbval-ignore-output"]
moved_bytes = {
    "recipe": counts["fp32"].moved_bytes,
    "AMP": counts[low].moved_bytes,
    "by hand": moved_by_hand,
}
points = []
for precision, name, took, _, _ in bars:
    if name in moved_bytes:
        rate = took.rate(1e3 * flops)  # FLOP/s
        points.append((name, precision, flops / moved_bytes[name], rate.median))
        # A cache may feed it faster than memory: as fast as a copy of one of its activations.
        fastest = limits.stream_rate(2 * pixels * hidden) * flops / moved_bytes[name]
        assert not (limits.trusted and climbed.trusted) or rate.median < 1.1 * fastest
roofs = {p: limits.flops_per_s[p] for p in dict.fromkeys(("fp32", str(low), points[-1][1]))}
assert points[0][2] < points[1][2] < points[2][2]  # each moves less than the one before
_ = plots.roofline(roofs, limits.memory_bytes_per_s, points)

# %% [markdown]
# The slope is that of memory; a point may lie above it where the data fits in a cache, which is the
# aim of working in blocks; how far above, the rate of a copy that fits there limits, which the cell
# asserts. A point far below both limits wastes time in other ways, as a rule with
# threads that wait for each other, calls from Python, or arithmetic that is no matrix product.
#
# ## Where AMP loses
#
# What we conclude from a measurement goes by its interval. If all of it lies above 1, AMP pays; if all
# of it lies below, AMP costs. Otherwise we saw no difference, or the machine was too busy to tell.


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
# without any of them gains nothing, and pays for what autocast does at each call.

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
# **Many small ops.** Fifty layers of 32 x 32: each computes for less time than it takes to call it,
# and under autocast every call comes with casts, which are counted here. A GPU would be waiting for
# the host [*(not yet seen on a GPU)*](../data/results/README.md "small-ops").

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
assert not limits.trusted or not speedup.is_above(1.1 * max(1, promise))

# %% [markdown]
# **A format that the hardware does not have.** fp16 on many CPUs is emulated, and then it is not
# slower by a little. The product is small for that reason. Some CPUs do have it, and run it at the
# rate of fp32, which is no reason to use it either.

# %% tags=["nbval-ignore-output"]
products = {p: matrix_product(device, Precision(p), 128) for p in ("fp32", "fp16", "bf16")}
products = compare(products, device=device, budget_s=2)
print(products)
for name in products.samples_s:
    rate, limit = products.time_s(name).rate(2 * 128**3), limits.flops_per_s[name]
    # Of a format that is emulated the limit is not known: it was tried at one size, in passing.
    emulated = limit < limits.flops_per_s["fp32"] / 2
    assert emulated or not limits.trusted or not rate.is_above(1.1 * limit), name

# %% [markdown]
# Each line has the time of a product, and how many times as fast as in fp32 it is. Such a small product
# stays far below the limit of a device, which the cell above asserts for the formats that it has.
#
# ## From which size on does AMP pay?
#
# Forward and backward pass with channels last, in FP32 and with AMP, while the picture, the batch or
# the network grows. The time is measured; the memory, of a whole training step with Adam, is the
# forecast of notebook 09.


# %%
def grown_problem(size=32, batch=2, width=64):
    """The network and its data, of one size."""
    torch.manual_seed(0)
    images, wanted = quantized_sine(size, device)
    images, wanted = (t.repeat(batch, 1, 1, 1) for t in (images, wanted))
    images = images.to(memory_format=torch.channels_last)
    return ConvModel(width).to(device, memory_format=torch.channels_last), images, wanted


# %% [markdown]
# FP32 and AMP take turns again. Each must stay below the limit of its precision, like the rungs.


# %%
def speedup_and_memory(model, images, wanted):
    """Speed-up by AMP, and its share of FP32's memory."""

    def passes(precision):
        with precision.float32_mode(device.type):
            with torch.autocast(device.type, dtype=low.dtype, enabled=precision is low):
                loss = nn.functional.mse_loss(model(images), wanted)
            loss.backward()

    both = (Precision.FP32, low)
    with FlopCounterMode(display=False) as counter:
        passes(Precision.FP32)
    found = compare({p: partial(passes, p) for p in both}, device=device, budget_s=2)
    for p in both:
        rate = found.time_s(p).rate(counter.get_total_flops())
        assert not limits.trusted or not rate.is_above(1.1 * limits.flops_per_s[p])
    peaks = [
        forecast_memory(model, images, device_type=device.type, precision=p).peak for p in both
    ]
    return found.ratio(Precision.FP32, low), peaks[1] / peaks[0]


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
_ = plots.growth(growth)

# %% [markdown]
# Above the line at 1 AMP pays, below it costs, and where a bar of uncertainty crosses the line nobody
# can say. Memory behaves better: the more of it is activations, the nearer AMP comes to half.
#
# How far can we trust these intervals? One problem stands in two of the panels, pictures of 32 pixels
# in 64 channels, and was measured twice. The two have to agree. And AMP saves time in two ways, by the
# faster products and by moving half the bytes, which may then even fit into a cache: so it gains
# neither more than the products promise, nor more than twice what the fastest cache gains over memory.

# %% tags=["nbval-ignore-output"]
(sizes, by_size, _), _, (widths, by_width, _) = growth.values()
one, other = by_size[sizes.index(32)], by_width[widths.index(64)]
print(f"the same problem twice: {one} and {other}")
if one.trusted and other.trusted:  # a tenth for a machine that is slower a minute later
    assert one.interval[0] < 1.1 * other.interval[1]
    assert other.interval[0] < 1.1 * one.interval[1]
cached = max(limits.stream_bytes_per_s.values()) / limits.memory_bytes_per_s
most = 1.1 * max(promise, 2 * cached)
assert not limits.trusted or not any(s.is_above(most) for s in by_size + by_width)

# %%
for what in ("picture (pixels along an edge)", "batch (pictures)"):
    shares = growth[what][2]
    assert shares[-1] < shares[0]  # pictures make activations, and no weights
    assert shares[-1] < 0.7

# %% [markdown]
#
# ## What to do on your machine
#
# From the ladder, computed: the rung to climb to is the lowest that takes at most 1.1 times as long
# as the fastest, as far as its interval can tell, since each comes with all below it. And AMP pays
# from the size on from which all larger ones gain for certain.


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
# For other models there is a command. `amp-lab bench` climbs the same rungs with MobileNetV2,
# ResNet-50, a language model and matrix products of awkward shapes, holds every rung's losses
# against FP32's, and writes a table, a picture and a file. `--quick` takes fewer rounds;
# `--compare FILE` puts your machine beside [recorded ones](../data/results/README.md).

# %%
assert amp_lab_command(["bench", "--list"]) == 0

# %% [markdown]
# ## Let the computer climb
#
# For a model of your own, `advise` does what this notebook did by hand, on a copy. It forecasts the
# memory in each precision, trains the model for some steps and holds losses and gradients against
# FP32's, times in turns what is sound, and ends with the lines to write. On the command line that is
# `amp-lab advise`, and takes about two minutes. Here it gets a small ConvModel and less time.

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
# Read the last column first. One recipe for training and one for inference are *recommended*: the
# first that surely beat the simpler ones by enough to be worth a change to your program. The others
# say why they are not: too slow, unlike FP32, or not tried, since the time was up. What does not learn
# as FP32 does is never recommended, however fast it is. The lines below the table are the very lines
# that were timed here.

# %%
assert {best.verdict for best in advice.chosen.values()} == {"recommended"}
assert all(candidate.verdict for candidate in advice.candidates)

# %% [markdown]
# ## Summary
#
# - Count first. FLOPs at the measured rate give the time that no rung can beat; bytes at the
#   measured rate say why you are not there yet.
# - A lower precision speeds up matrix products, and halves what the rest has to move. The first
#   part is the promise, the second often decides.
# - Channels last, a fused optimizer, no reading of the loss, `torch.compile`: each is one line, and
#   each pays on some devices and not on others. Measure in turns, on yours.
# - `advise` climbs with a model of yours, and never to a rung that does not learn as FP32 does.
# - AMP can lose where there is nothing to multiply, where the ops are small, and in a format that
#   the hardware does not have.
#
# ## Exercises
#
# 1. Compile with `mode="max-autotune"`. How long does it take, and after how many steps has it paid
#    for itself?
# 2. Set `hidden` to 255. Which rungs suffer, and does the compiler help?
# 3. Write the inference ladder: fold each batch normalisation into the convolution before it
#    (`torch.nn.utils.fusion.fuse_conv_bn_eval`), and convert the weights once instead of using
#    autocast. Compare with `amp-lab bench --workload convmodel-inference`.
# 4. `FusedStep` computes the first layer twice. Store it instead. Is it faster or slower, and what
#    does the count of bytes say?
# 5. On a GPU, profile the recipe with `torch.profiler` before and after rung 3. Where did the gaps
#    go?
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
