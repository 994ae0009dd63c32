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
# **What you'll do.** Train one network on one picture, first in plain FP32, then with automatic
# mixed precision; compare what they learn, how long a step takes and how much memory it needs; and
# do the same for inference.
#
# **What you'll learn.**
# - which lines of a training loop AMP changes, and which it does not;
# - how to tell whether reduced precision costs accuracy: by comparing with the spread between
#   seeds;
# - how to measure time and memory so that the figures mean something, and how easily they do not.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast`, [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. It runs on a CPU in less than a minute;
# on a GPU it takes the problem in its full size.
#
# Problem and network come from an [article by
# AMD](https://rocm.blogs.amd.com/artificial-intelligence/automatic-mixed-precision/README.html),
# which trained them on an AMD GPU. The last section looks at what it measured, and how.

# %% tags=["nbval-ignore-output"]
import time
from contextlib import nullcontext
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from amp_lab import Precision, compare, describe_device, measure, plots
from amp_lab.bench import ConvModel, quantized_sine
from amp_lab.notebook import start
from amp_lab.timing import Rounds

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# The full scale is exactly the article's. The quick one keeps network and optimizer, and takes a
# smaller picture and fewer epochs.

# %%
config = {
    "quick": {
        "size": 48,  # pixels along each edge of the picture
        "hidden": 256,  # channels between the convolutions
        "epochs": 70,  # one step each, since there is one picture
        "lr": 1e-3,  # of Adam
        "seeds": (0, 1, 2),  # one training run each
    },
    "full": {"size": 512, "hidden": 256, "epochs": 512, "lr": 1e-3, "seeds": (0, 1, 2)},
}[scale]

# %% [markdown]
# ## The problem: a picture, from its coordinates
#
# The network gets two numbers for each pixel, its x and its y coordinate, and has to say how bright
# that pixel is. The brightness is a sum of two cosine waves, rounded to four levels.

# %%
inputs, target = quantized_sine(config["size"], device)  # (1, 2, H, W), (1, 1, H, W)
_ = plots.picture_problem(inputs, target)
assert target.unique().numel() == 4

# %% [markdown]
# Left and middle, the two inputs: x grows from black to white to the right, y downwards. Right, the
# target: diamonds in four greys, four across and two down. The inputs are smooth and the target has
# sharp edges, which makes this harder than it looks.
#
# ## The network
#
# Its convolutions have 1x1 kernels, so each is a matrix product over the channels of every pixel. As
# a rule of thumb, that is the kind of work that reduced precision speeds up most.

# %%
model = ConvModel(config["hidden"])
print(model)
convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
assert all(layer.kernel_size == (1, 1) for layer in convolutions)

# %% [markdown]
# ## The plain step
#
# Nothing here knows about precision. The loss stays on the device, because reading it
# (`loss.item()`) would make the CPU [wait for the
# GPU](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization)
# in every step.


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
# ## The same step with AMP
#
# The marked lines are new or changed: autocast around the forward pass and the loss, and a scaler
# around the backward pass and the optimizer.


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
# A run is a network, an optimizer, and for AMP one scaler. The scaler is enabled for fp16 only;
# with bf16 it does nothing, so that one step function serves both.


# %%
def new_run(precision, seed):
    """A new network, and the function that trains it for one step."""
    torch.manual_seed(seed)
    model = ConvModel(config["hidden"]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    if precision.dtype is torch.float32:
        return model, partial(step_fp32, model, optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=(precision is Precision.FP16))  # AMP
    return model, partial(step_amp, model, optimizer, scaler, precision.dtype)


# %% [markdown]
# One thing has to be done before anything else runs: time the very first step of this process. It
# is for later, when we look at how not to measure.

# %%
_, step = new_run(Precision.FP32, seed=0)
with Precision.FP32.autocast(device.type):  # TF32 off, of which more in a moment
    first_step = measure(step, device=device, warmup=0, repeats=1)

# %% [markdown]
# ## Which precisions to compare
#
# FP32, and those that this device accelerates: `describe_device` tries a matrix product in each. If
# it accelerates none, bf16 is in the comparison all the same, to show what that costs.

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
precisions = [Precision.FP32, *reversed(report.accelerated or [Precision.BF16])]
print(f"{report.name}: comparing", ", ".join(precisions))
if not report.trusted:
    print("not trusted: the machine was busy, so another choice may be better")
assert all(report.rates[precision] for precision in precisions)  # each can be had here

# %% [markdown]
# The name FP32 needs care. PyTorch lets a recent NVIDIA GPU [run fp32 convolutions in
# TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices) unless it
# is told not to, and a speed-up over that is no speed-up over FP32. `Precision.FP32.autocast`
# switches TF32 off for a block, `Precision.TF32.autocast` on. AMP steps have their autocast already.

# %%
assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # the default
with Precision.FP32.autocast("cpu"):
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"


# %%
def float32_mode(precision):
    """TF32 off for FP32, on for TF32; nothing to set for the others."""
    return precision.autocast(device.type) if precision.dtype is torch.float32 else nullcontext()


def train(precision, seed):
    """Train a new network; return it and its loss in each epoch (epochs,)."""
    model, step = new_run(precision, seed)
    with float32_mode(precision):
        return model, torch.stack([step() for _ in range(config["epochs"])]).cpu()


# %% [markdown]
# ## Do they learn the same?
#
# Each precision trains with three seeds. One run would prove little: the seeds differ among
# themselves, and it is this spread that a difference between precisions has to be held against.

# %% tags=["nbval-ignore-output"]
runs = {precision: [train(precision, seed) for seed in config["seeds"]] for precision in precisions}
losses = {precision: torch.stack([loss for _, loss in runs[precision]]) for precision in precisions}
_ = plots.loss_curves(losses)
for loss in losses.values():  # (seeds, epochs)
    assert (loss[:, -1] < 0.3 * loss[:, 0]).all()  # every run has learned most of what it will

# %% [markdown]
# Each line is the mean loss over the seeds, on a logarithmic axis, and the band around it reaches
# from the lowest seed to the highest. Watch whether a line leaves the band of FP32.
#
# In numbers: the loss of a run is its mean over the last ten epochs, because a single epoch jumps
# up and down. Compare the difference between two precisions with that between two seeds, which is
# printed last.

# %% tags=["nbval-ignore-output"]
final = {
    precision: loss[:, -10:].mean(dim=1) for precision, loss in losses.items()
}  # (seeds,) each
spread = (final[Precision.FP32].max() - final[Precision.FP32].min()).item()
for precision, loss in final.items():
    difference = (loss.mean() - final[Precision.FP32].mean()).item()
    print(f"{precision}: mean loss {loss.mean():.5f}, {difference:+.5f} against fp32")
    assert abs(difference) < 0.2 * final[Precision.FP32].mean()  # about what a seed can do
print(f"from seed to seed, fp32 differs by {spread:.5f}")

# %% [markdown]
# A difference smaller than that spread is not proven to be zero, though. Both precisions start each
# seed from the same weights, so seeds can be compared in pairs, and with many pairs a small but
# steady difference shows. Here are the losses of twenty seeds, made up, and the same ones a little
# worse:

# %%
many = 1 + 0.1 * torch.randn(20, generator=torch.Generator().manual_seed(0))
worse = many + 0.02 + 0.005 * torch.randn(20, generator=torch.Generator().manual_seed(1))
pairs = worse - many
assert pairs.mean() < many.std() / 3  # lost in the spread of the seeds
assert pairs.mean() > 5 * pairs.std() / 20**0.5  # and yet five standard errors from zero

# %% [markdown]
# ## What they drew
#
# The outputs of the first seed, beside the target. `inference_mode` records nothing for a backward
# pass. `eval` is another switch: it makes batch normalisation use its running statistics, and would
# turn dropout off if there were any.


# %%
@torch.inference_mode()
def predict(model, precision):
    """The picture (1, 1, H, W) that a network draws, in fp32."""
    with precision.autocast(device.type):
        return model.eval()(inputs).float()


norm, shifted = nn.BatchNorm1d(1), torch.tensor([[4.0], [6.0]])
with torch.inference_mode():
    assert norm.eval()(shifted).mean() > 4.9  # by its running mean, 0: hardly changed
    assert norm.train()(shifted).mean().abs() < 1e-5  # by the batch's mean, 5
    assert norm.running_mean != 0  # and inference_mode did not keep it from being updated


# %% tags=["nbval-ignore-output"]
pictures = {str(precision): predict(runs[precision][0][0], precision) for precision in precisions}
_ = plots.side_by_side({"target": target} | pictures)
for precision in precisions[1:]:
    difference = (pictures[precision] - pictures["fp32"]).abs().mean().item()
    print(f"{precision} and fp32 differ by {difference:.3f} on average, levels by {1 / 3:.3f}")
    assert difference < 1 / 6  # half a level

# %% [markdown]
# On the left the target, beside it what each precision drew. The networks blur the same edges, and
# miss in the same places. Single pixels differ, because two runs that round differently drift
# apart.
#
# ## Time of a training step
#
# `compare` times functions against each other. They take turns, forwards and then backwards, with
# the device synchronised around each turn, so that a drift of the machine meets all of them alike.
# In between it times a small product of its own and asks the operating system who had the cores: a
# round that another program disturbed is left out, and if too few rounds remain, the result says
# that it is not to be trusted. From the ratios within each round come the median and, in brackets,
# an interval that holds the true one in 95 of 100 cases.
#
# No clock is beyond doubt, so we also count how much arithmetic a step takes, and ask whether the
# device can do as much in that time.


# %%
def in_mode(precision, function):
    """The function, with TF32 off for FP32 and on for TF32 each time it is called."""

    def call():
        with float32_mode(precision):
            return function()

    return call


def flops_of(function):
    """Multiplications and additions of one call, counted and not timed."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# %% [markdown]
# The limit is the rate of the matrix product that `describe_device` timed. A convolution may come
# out a bit better than that product, whose shape is another one, so we allow half as much again. A
# speed-up is limited twice: arithmetic gains at most the ratio of those rates, and whatever waits
# for memory at most 2, because a 16-bit number has half the bytes.


# %%
def is_possible(times, precision, flops):
    """Whether the device can do so many FLOPs in the time measured, and gain so much over FP32."""
    if not (times.trusted and report.trusted):
        return True  # nothing has been claimed
    fp32_rate, own_rate = report.rates[Precision.FP32], report.rates[precision]  # FLOP/s
    rate = times.time_s(precision).rate(flops)
    gain = times.ratio(Precision.FP32, precision)
    # What is emulated is computed in fp32, and in a convolution perhaps better than in a product.
    within_rate = rate.median <= 1.5 * max(own_rate, fp32_rate)
    return within_rate and gain.median <= 1.5 * max(2, own_rate / fp32_rate)


# %% [markdown]
# Now the steps themselves. `budget_s` is how many seconds they may take together:

# %% tags=["nbval-ignore-output"]
steps = {p: in_mode(p, new_run(p, seed=0)[1]) for p in precisions}
training = compare(steps, device=device, budget_s=4)
training_flops = flops_of(steps[Precision.FP32])
print(training)
print(f"{training_flops / 1e9:.1f} GFLOP a step")
assert all(is_possible(training, p, training_flops) for p in precisions)
fastest = training.ratio(Precision.FP32, precisions[-1])
assert device.type == "cpu" or not fastest.is_below(1)

# %% [markdown]
# Each line has the time of a step, and then the speed-up over FP32 with its interval. If the
# interval lies above 1x, AMP is faster on this device; if it holds 1x, this measurement cannot tell
# them apart. *Too busy to tell* means that something else kept the machine busy: stop it, and run the
# cell again.
#
# ## Memory of a training step
#
# A GPU's allocator counts its bytes, and `measure`, which times one function by itself, also reads
# their peak. A CPU has no such count, but
# most of the memory of a training step can be counted on any device: the tensors that the forward
# pass keeps for the backward pass. Autograd shows each of them to a hook. One storage counts once,
# and the parameters do not count, since they are there anyway.


# %%
def kept_for_backward(model, precision):
    """Bytes that the forward pass keeps for the backward pass, beside the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        precision.autocast(device.type),
    ):
        loss = nn.functional.mse_loss(model(inputs), target)
    assert loss.requires_grad  # the graph is alive, so no storage has been reused for another
    return sum(size for address, size in kept.items() if address not in parameters)


# %% [markdown]
# Both figures, side by side:

# %% tags=["nbval-ignore-output"]
kept_mib = {
    p: kept_for_backward(ConvModel(config["hidden"]).to(device), p) / 2**20 for p in precisions
}
peak_bytes = {p: measure(steps[p], device=device, repeats=1).peak_bytes for p in precisions}
peak_mib = {p: size / 2**20 for p, size in peak_bytes.items() if size is not None}
for precision in precisions:
    peak = f"peak {peak_mib[precision]:.0f} MiB" if peak_mib else "peak not known on this device"
    share = kept_mib[precision] / kept_mib[Precision.FP32]
    print(f"{precision}: kept {kept_mib[precision]:6.1f} MiB, {share:.0%} of fp32; {peak}")
    assert not peak_mib or peak_mib[precision] > kept_mib[precision]  # which is a part of it
    if precision.dtype is not torch.float32 and device.type != "mps":
        assert 0.45 < share < 0.75  # the activations are half as wide

# %% [markdown]
# What is kept falls to about half: activations are half as wide, and they are nearly all of it. (On
# Apple's MPS autocast runs batch normalisation in fp32, so that more is kept, not less.) The peak
# also holds the weights, their gradients and the state of Adam, which stay fp32: little here, but
# most of the memory of a large model with a small batch.
#
# Time and memory in one picture, time on the left:

# %% tags=["nbval-ignore-output"]
_ = plots.time_and_memory(
    training, peak_mib or kept_mib, "peak" if peak_mib else "kept for backward"
)

# %% [markdown]
# FP32 is the bar on the left of each half. The label above each remaining bar gives its speed-up, or
# its share of FP32's memory. The thin line on top of a time is its interval. Memory is counted, and
# has none. If the machine was too busy to time anything, the bars of time are grey and say so.
#
# ## Inference
#
# Inference is the forward pass alone, so autocast is all there is to switch on, and no scaler is
# involved. Under `inference_mode` nothing is kept for a backward pass that never comes.

# %% tags=["nbval-ignore-output"]
passes = {p: partial(predict, runs[p][0][0], p) for p in precisions}
inference = compare(passes, device=device, budget_s=3)
inference_flops = flops_of(passes[Precision.FP32])
print(inference)
print(f"{inference_flops / 1e9:.1f} GFLOP a pass")
assert all(is_possible(inference, p, inference_flops) for p in precisions)
assert inference_flops < 0.5 * training_flops  # the backward pass is most of a step
part = inference.time_s(Precision.FP32)  # of a step
assert not part.is_above(training.time_s(Precision.FP32).interval[1]) or not training.trusted

# %% [markdown]
# The table reads as the one for training. Inference may gain less than training, or nothing: there
# is no backward pass, which is most of the arithmetic of a step, and the weights are cast anew in
# every pass.
#
# ## How not to measure
#
# The article that this problem comes from reports the figures below, from an AMD GPU that it does
# not name. It calls the first of them a speed-up of 46 %.

# %%
article = {"training": (13.98, 7.50, 2061, 1035), "inference": (4.24, 2.87, 3338, 1676)}
for task, (fp32_s, amp_s, fp32_mb, amp_mb) in article.items():
    less, speedup = 1 - amp_s / fp32_s, fp32_s / amp_s
    print(f"{task}: {less:.1%} less time is {speedup:.2f}x; memory {amp_mb / fp32_mb - 1:+.1%}")
    assert (round(less, 3), round(speedup, 2)) in [(0.464, 1.86), (0.323, 1.48)]
assert article["inference"][2] > article["training"][2]

# %% [markdown]
# *Less time* and *speed-up* are different numbers, so say which: half the time is a speed-up of 2x.
# And something is wrong with the memory: how can inference need more of it than training?
#
# **It kept what it did not need.** Its inference ran without `no_grad`, so each pass stored its
# activations for a backward pass. That alone is less than a training step needs. But the loop wrote
# `outputs = model(inputs)`, and the old `outputs` keep their graph alive until the new ones are
# there: two graphs at once. We can count all of this at the article's own size, on fake tensors,
# which have a shape but no data ([notebook 06](06_caltech256_resnet50.ipynb) explains both tools).


# %%
class LivePeak(TorchDispatchMode):
    """Notes the most bytes that the tensors made in its block took up at any moment."""

    def __init__(self):
        super().__init__()
        self.live, self.peak_bytes = WeakKeyDictionary(), 0  # a storage: its bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.live[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return result


# %% [markdown]
# Two steps of training and two passes of inference in FP32, the passes with one graph, with two at
# once as in the article, and with none:


# %%
def peak_of(task, passes=2, graph=True):
    """MiB at the worst moment, for 512x512 pixels and 256 channels in fp32."""
    with FakeTensorMode(), LivePeak() as live, torch.set_grad_enabled(graph):
        model, picture = ConvModel(256), torch.empty(1, 2, 512, 512)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(passes):
            outputs = model(picture)
            if task == "training":
                optimizer.zero_grad()
                nn.functional.mse_loss(outputs, torch.empty(1, 1, 512, 512)).backward()
                optimizer.step()
    return live.peak_bytes / 2**20


trained, two_graphs = peak_of("training"), peak_of("inference")
one_graph, no_graph = peak_of("inference", passes=1), peak_of("inference", graph=False)
print(f"training {trained:.0f} MiB, article {article['training'][2]}")
print(f"inference with two graphs {two_graphs:.0f} MiB, article {article['inference'][2]}")
print(f"inference with one graph {one_graph:.0f} MiB, with none {no_graph:.0f} MiB")

# %% [markdown]
# Both of the article's figures come out to within a few MiB. One graph would have needed less than
# training, and `no_grad` or `inference_mode` would have needed a quarter of it.

# %%
assert abs(trained - article["training"][2]) < 20
assert abs(two_graphs - article["inference"][2]) < 20
assert no_graph < 0.3 * trained < one_graph < trained < two_graphs

# %% [markdown]
# **It stopped the clock too early.** Work on a GPU runs after the call that asked for it has
# returned. Read the clock before synchronising, and you time how fast the CPU queues work
# [*(not yet seen on a GPU)*](../data/results/README.md "clock-too-early"). On a CPU
# both are the same. (FP32 shows it best: with fp16 the scaler waits for the device in every step
# anyway.)
#
# `compare` always waits, so for the clock that does not we write the loop ourselves. `Rounds` is
# the part of `compare` that watches the machine:


# %%
def wait_for_device():
    """Return when everything that was asked of the device has been done."""
    if device.type != "cpu":  # a CPU is done when the call returns
        torch.accelerator.synchronize()


def seconds_of_step(wait):
    """Seconds of an FP32 step, by a clock that waits for the device or by one that does not."""
    wait_for_device()
    started = time.perf_counter()
    steps[Precision.FP32]()
    if wait:
        wait_for_device()
    return time.perf_counter() - started  # without `wait` it may still be running


# %% [markdown]
# The clock that waits times the same FP32 step as further up, so both must agree. We allow a factor
# of 1.5 beyond their intervals: a comparison vouches for ratios within its own turns, while a time by
# itself moves with the clock rate of the processor, and with what else its host has to do.


# %%
def agree(one, other):
    """Whether two estimates of the same time overlap, or nearly so."""
    if not (one.trusted and other.trusted):
        return True
    return max(one.interval[0], other.interval[0]) <= 1.5 * min(one.interval[1], other.interval[1])


# %% [markdown]
# Both clocks take turns, twenty times, and every other time in reverse:

# %% tags=["nbval-ignore-output"]
rounds, waits = Rounds(device), {"synchronised": True, "not synchronised": False}
for number in range(20):
    with rounds.next() as seconds:
        for name in list(waits)[:: 1 if number % 2 == 0 else -1]:
            seconds[name] = seconds_of_step(waits[name])
clocks = rounds.comparison(["synchronised", "not synchronised"])
print(clocks)
assert agree(clocks.time_s("synchronised"), training.time_s(Precision.FP32))
hidden = clocks.ratio("synchronised", "not synchronised")  # above 1 where the clock was hurried
assert not hidden.is_below(0.9)
assert device.type != "cpu" or not hidden.is_above(1.1)

# %% [markdown]
# A figure well above 1x in the second line is the speed-up that the hurried clock would report for
# nothing at all: it is the same step.
#
# **It counted the first step.** The first steps load kernels, choose algorithms and allocate
# memory. FP32 always ran first and paid for all of it, which makes AMP look better than it is. Here
# is the very first step of this notebook, timed at the top, beside the later ones, as they were
# compared above:

# %% tags=["nbval-ignore-output"]
later = training.time_s(Precision.FP32).times(1e3)
low, high = later.interval
known = f"{later.median:.1f} ms" if later.trusted else "too busy to tell"
print(f"first step {1e3 * first_step.median_s:.1f} ms")
print(f"later steps {known} ({low:.1f} to {high:.1f} ms)")
assert not later.is_above(1e3 * first_step.median_s)  # the first does all that they do, and more

# %% [markdown]
# **It compared one run with one run.** Its loss fell from 0.0100 in FP32 to 0.0083 with AMP, with
# no seed set. Beside it, how far the seeds of FP32 lie apart here:

# %% tags=["nbval-ignore-output"]
article_gain = 1 - 0.0083 / 0.0100
seed_spread = spread / final[Precision.FP32].mean().item()
print(f"the article: {article_gain:.0%} of the loss; our seeds, {scale} scale: {seed_spread:.0%}")
assert round(article_gain, 2) == 0.17

# %% [markdown]
# With one run each, the difference may be chance. Only several seeds at the article's own scale can
# tell, which is what this notebook runs on a GPU.
#
# ## Summary
#
# AMP changed or added four lines in the training step, and one that makes the scaler; network, data
# and optimizer stayed as they were. What that gave on this device:

# %% tags=["nbval-ignore-output"]
memory_mib = peak_mib or kept_mib
for precision in precisions[1:]:
    memory = memory_mib[precision] / memory_mib[Precision.FP32]
    print(f"{precision}: training {training.ratio(Precision.FP32, precision)},", end=" ")
    print(f"inference {inference.ratio(Precision.FP32, precision)}, memory {memory:.0%}")
    assert is_possible(training, precision, training_flops)  # the same measurements as above
    assert is_possible(inference, precision, inference_flops)
    assert memory < 1 or precision is Precision.TF32 or device.type == "mps"

# %% [markdown]
# - Compare the losses of several seeds, in pairs. With three of them you only see a loss of accuracy
#   that is larger than the spread between seeds; a smaller one takes more pairs.
# - Synchronise, warm up, repeat, take turns, give an interval, and say what the baseline is: FP32,
#   or TF32? A busy machine cannot tell, and then your table should say that.
# - Weights, gradients and optimizer state stay fp32, so memory falls towards half only where
#   activations are most of it.
#
# ## Exercises
#
# 1. Set `hidden` to 16. Does AMP still pay? Find the width at which it begins to.
# 2. Move `loss.backward()` of the AMP step into the autocast block. What changes, in the losses and
#    in the time? Why do PyTorch's documents advise against it?
# 3. Convert model, inputs and target with `.bfloat16()` and train without autocast. How does the
#    loss differ, and why? ([Notebook 01](01_number_formats.ipynb) has a word for it.)
# 4. Convert model and inputs `.to(memory_format=torch.channels_last)`, and measure again.
# 5. Leave out the scaler in fp16, on a GPU. Which gradients become zero, and does the loss notice?
#
# ## Further reading
#
# - [Automatic mixed precision
#   recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html): the same few lines,
#   in PyTorch's own tutorial.
# - [PyTorch benchmark recipe](https://docs.pytorch.org/tutorials/recipes/recipes/benchmark.html):
#   how `torch.utils.benchmark` measures.
# - [TF32 on NVIDIA
#   GPUs](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices):
#   what is on by default.
