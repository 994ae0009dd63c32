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
# **What you'll do.** Train one network on one picture, first in plain FP32 and then with automatic
# mixed precision. Compare what both learn, how long a step takes and how much memory it needs, and
# do the same for inference.
#
# **What you'll learn.**
# - which lines of a training loop AMP changes, and which it does not;
# - how to tell whether reduced precision costs accuracy: by comparing with the spread between
#   seeds;
# - how to measure time and memory so that the numbers mean something, and what makes them mislead.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast`, [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. It runs on a CPU in under a minute. On a
# GPU it takes the problem in its full size.
#
# Problem and network come from an [article by
# AMD](https://rocm.blogs.amd.com/artificial-intelligence/automatic-mixed-precision/README.html),
# which trained them on an AMD GPU. A section near the end looks at what it measured, and how.

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

from course import emulates_bf16, figures, start

from amp_lab import Precision, compare, describe_device, measure
from amp_lab.bench import ConvModel, quantized_sine
from amp_lab.core.timing import Rounds

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We run one layer forward and backward with a single line of AMP. Before you run this: which of the
# output, the weight and its gradient will be in bf16?

# %%
layer, x = nn.Linear(64, 64).to(device), torch.rand(8, 64, device=device)
with torch.autocast(device.type, dtype=torch.bfloat16):  # AMP
    output = layer(x)
output.float().mean().backward()
for name, tensor in {
    "output": output,
    "weight": layer.weight,
    "gradient": layer.weight.grad,
}.items():
    print(f"{name:<9} {tensor.dtype}, {tensor.element_size()} bytes a number")
assert output.dtype is torch.bfloat16
assert layer.weight.dtype is layer.weight.grad.dtype is torch.float32

# %% [markdown]
# Only the output is in bf16. It takes half the memory, and the matrix product behind it can be [much
# faster](https://docs.pytorch.org/docs/stable/amp.html) in 16 bits. The weight and its gradient stay
# fp32, so that training can go on as before. So we expect AMP to save time, to save memory, and to learn the same. This notebook
# measures all three.
#
# ## The problem: a picture, from its coordinates
#
# The full scale has the sizes of the article. The quick one keeps the network and the optimizer,
# and takes a smaller picture and fewer epochs.

# %%
config = {
    "quick": {
        "size": 48,  # pixels along each edge of the picture
        "hidden": 256,  # channels between the convolutions
        "epochs": 200,  # one step each, since there is one picture
        "lr": 1e-3,  # of Adam
        "seeds": (0, 1, 2),  # one training run each
    },
    "full": {"size": 512, "hidden": 256, "epochs": 512, "lr": 1e-3, "seeds": (0, 1, 2)},
}[scale]
if emulates_bf16(device):
    config |= {"size": 16}

# %% [markdown]
# For each pixel the network gets two numbers, its x and its y coordinate, and has to say how bright
# that pixel is. The brightness is a sum of two cosine waves, rounded to four
# levels. <!-- tests/bench/test_convmodel.py -->

# %%
inputs, target = quantized_sine(config["size"], device)  # (1, 2, H, W), (1, 1, H, W)
pictures = {"input: x": inputs[:, :1], "input: y": inputs[:, 1:], "target": target}
_ = figures.side_by_side(pictures)
assert target.unique().numel() == 4

# %% [markdown]
# On the left and in the middle you see the two inputs: x grows from black to white to the right,
# and y downwards. On the right is the target, which has diamonds in four greys, four across and two
# down. The inputs are smooth and the target has sharp edges. We shall see whether the network can
# draw those.
#
# The network's convolutions have 1x1 kernels, so each is a matrix product over the channels of
# every pixel. As a rule of thumb, that is the kind of work that reduced precision speeds up most.

# %%
model = ConvModel(config["hidden"])
print(model)
convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
assert all(layer.kernel_size == (1, 1) for layer in convolutions)

# %% [markdown]
# ## The plain step, and the same step with AMP
#
# The plain step knows nothing about precision. The loss stays on the device, because reading it
# with `loss.item()` would make the CPU [wait for the
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
# With AMP, autocast goes around the forward pass and the loss, and a scaler around the backward
# pass and the optimizer. The marked lines are new or changed.


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
# A run consists of a network, an optimizer, and for AMP one scaler. We enable the scaler for fp16
# only. With bf16 it is disabled and scales nothing, so that one step
# function serves both. <!-- tests/core/test_precision.py -->


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
# One thing has to be done before the network runs for the first time: we time its very first step.
# We need it later, when we look at how not to measure.

# %%
_, step = new_run(Precision.FP32, seed=0)
with Precision.FP32.autocast(device.type):  # TF32 off, of which more in a moment
    first_step = measure(step, device=device, warmup=0, repeats=1)

# %% [markdown]
# ## Which precisions to compare
#
# We compare FP32 with whatever this device accelerates. To find out, `describe_device` times a
# matrix product in each precision. If the device accelerates none, bf16 is in the comparison all
# the same, to show what that costs. <!-- tests/core/test_device.py -->

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
precisions = [Precision.FP32, *reversed(report.accelerated or [Precision.BF16])]
print(f"{report.name}: comparing", ", ".join(precisions))
if not report.trusted:
    print("not trusted: the machine was busy, so another choice may be better")
assert all(report.rates[precision] for precision in precisions)  # each can be had here

# %% [markdown]
# On this page that leaves FP32 and bf16, so the scaler stays disabled here.
#
# The name FP32 needs care. PyTorch lets a recent NVIDIA GPU [run fp32 convolutions in
# TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)
# unless you tell it not to, and a speed-up over that is no speed-up over FP32. So
# `Precision.FP32.autocast` switches TF32 off for a block, and `Precision.TF32.autocast` switches it
# on.


# %%
def float32_mode(precision):
    """TF32 off for FP32, on for TF32; nothing to set for the others."""
    return precision.autocast(device.type) if precision.dtype is torch.float32 else nullcontext()


def train(precision, seed):
    """Train a new network; return it and its loss in each epoch (epochs,)."""
    model, step = new_run(precision, seed)
    with float32_mode(precision):
        return model, torch.stack([step() for _ in range(config["epochs"])]).cpu()


assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # the default
with Precision.FP32.autocast("cpu"):
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"

# %% [markdown]
# ## Do they learn the same?
#
# Each precision trains with three seeds. A single run would prove little, because the seeds differ
# among themselves, and a difference between precisions has to be compared with that spread. Before
# you run this: will the line of bf16 lie above that of FP32, below it, or on it?

# %% tags=["nbval-ignore-output"]
runs = {precision: [train(precision, seed) for seed in config["seeds"]] for precision in precisions}
losses = {precision: torch.stack([loss for _, loss in runs[precision]]) for precision in precisions}
_ = figures.loss_curves(losses)
for loss in losses.values():  # (seeds, epochs)
    assert (loss[:, -1] < 0.1 * loss[:, 0]).all()  # every run has learned most of what it will

# %% [markdown]
# Each line is the mean loss over the seeds, on a logarithmic axis, and the band around it reaches
# from the lowest seed to the highest. On two CPU cores the two lines fall together, and the bands
# cover each other nearly all the way. The seeds are far apart for much of the fall, and close
# together once it has levelled off at about 0.009, with a jump now and then.
#
# To put a number on it, we take as the loss of a run its mean over the last ten epochs, and compare
# the difference between two precisions with the spread between the seeds, which is printed last.

# %% tags=["nbval-ignore-output"]
final = {
    precision: loss[:, -10:].mean(dim=1) for precision, loss in losses.items()
}  # (seeds,) each
spread = (final[Precision.FP32].max() - final[Precision.FP32].min()).item()
for precision, loss in final.items():
    difference = (loss.mean() - final[Precision.FP32].mean()).item()
    print(f"{precision}: mean loss {loss.mean():.5f}, {difference:+.5f} against fp32")
    assert abs(difference) < 0.2 * final[Precision.FP32].mean()  # what seeds differ by on the way
print(f"from seed to seed, fp32 differs by {spread:.5f}")

# %% [markdown]
# The mean losses differ by 0.00001, and the seeds of FP32 by 0.00048. So we see no loss of accuracy
# in bf16. On your device the numbers will be others, but read them in the same way: a difference
# that is smaller than the spread may be chance.
#
# That does not prove the difference to be zero. Both precisions start each seed from the same
# weights, so you can compare the seeds in pairs, and many pairs can show a small but steady difference.
# The third exercise does this.
#
# ## What they drew
#
# Does a loss of that size mean that the picture is right? We let the networks of the first seed
# draw it. `inference_mode` records nothing for a backward pass. `eval` is another switch: it makes
# batch normalisation use its running statistics. <!-- tests/notebooks/test_04_fp32_vs_amp.py -->


# %%
@torch.inference_mode()
def predict(model, precision):
    """The picture (1, 1, H, W) that a network draws, in fp32."""
    with precision.autocast(device.type):
        return model.eval()(inputs).float()


# %% tags=["nbval-ignore-output"]
pictures = {str(precision): predict(runs[precision][0][0], precision) for precision in precisions}
_ = figures.side_by_side({"target": target} | pictures)
for name, picture in pictures.items():
    right = ((picture - target).abs() < 1 / 6).float().mean().item()  # less than half a level off
    print(f"{name}: {right:.0%} of the pixels are nearest to their level")
    assert right > 0.6

# %% [markdown]
# On the left is the target, and beside it what each precision drew. Both networks learned the
# picture: every diamond is in its place, and more than nine pixels in ten are nearest to their own
# level. (That bf16 has more of them here may be luck: one seed proves little.) Neither learned the sharp
# edges: both blur them. To see where exactly they differ, we subtract the pictures and draw the
# differences three times as bright, so that 1.0 on the scale, white, is a difference of a whole level.

# %% tags=["nbval-ignore-output"]
differences = {f"{name} and target": (p - target).abs() for name, p in pictures.items()}
for name in list(pictures)[1:]:
    differences[f"{name} and fp32"] = (pictures[name] - pictures["fp32"]).abs()
brighter = {name: 3 * d.clamp(max=1 / 3) for name, d in differences.items()}
_ = figures.side_by_side(brighter, "difference (levels)")
for name, difference in differences.items():
    print(f"{name}: {difference.mean():.3f} on average, where a level is {1 / 3:.3f}")
    assert difference.mean() < 1 / 6  # half a level
between = [difference.mean() for name, difference in differences.items() if "target" not in name]
assert all(one < differences["fp32 and target"].mean() for one in between)

# %% [markdown]
# Black means no difference. The first two pictures show the same rings: each network is off most
# where the target jumps from one level to the next. The last one, bf16 against fp32, has no rings but
# a few brighter patches, and is darker on the whole, since these two differ by less. Two runs
# that round differently drift apart, but here they stay nearer to each other than to the target.
#
# ## Time of a training step
#
# `compare` times functions against each other. They take turns, forwards and then backwards, with the
# device synchronised around each turn, so that a drift of the machine meets all of them alike. In
# between it times a small product of its own and, on Linux, asks the operating system who had the
# cores. A round that another program disturbed is left out, and if too few rounds remain, the result
# says that it is not to be trusted. From the ratios within each round come the median and, in
# brackets, its 95 % interval. <!-- tests/core/test_timing.py -->
#
# A measured time can still be wrong. So we also count the arithmetic of a step, and check whether
# the device can do that much in the time.


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
# The limit is the rate of the matrix product that `describe_device` timed. A convolution may come out
# somewhat better than that product, so we allow half as much again. We limit a speed-up as well: to the
# ratio of those rates, or to 2 if that is more, because a 16-bit number has half the bytes. There, too,
# we allow half as much again. <!-- tests/notebooks/test_04_fp32_vs_amp.py -->


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
# Now we time the steps themselves. `budget_s` is about how many seconds they may take together. Before
# you run this: how much faster do you expect the step to be in 16 bits?

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
# Each line has the time of a step, and all but FP32's the speed-up over FP32 with its interval. On the two
# CPU cores used here, a step took less than two thirds of the time. On your device, AMP is faster if the
# interval lies above 1x and slower if it lies below. If it contains 1x, this measurement cannot
# tell. *Too busy to tell* means that something else kept the machine busy. Stop it and run the cell
# again. <!-- tests/core/test_timing.py -->
#
# ## Memory of a training step
#
# The allocator of an NVIDIA, AMD or Intel GPU counts its bytes, and `measure`, which times one function by
# itself, also reads their peak. It reads none on a CPU or on Apple's GPU. But most of the memory of *this*
# step is what the forward pass keeps for the backward pass, and that can be counted on any device. Autograd
# shows those tensors to a hook. We count each storage once, and leave out the parameters, which are there
# anyway. <!-- tests/core/test_timing.py -->


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
# We print what is kept and, where there is one, the peak.

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
# With bf16 the step keeps 52% of what it keeps in fp32: nearly all of it is activations, which are
# half as wide. (Autocast on Apple's MPS runs batch normalisation in fp32, as notebook 02 shows, so
# there more is kept.) The peak also holds the weights, their gradients and the state of Adam, which
# stay fp32. They can be [most of the memory in a large model with a small
# batch](09_xray_your_model.ipynb#Seven-billion-parameters,-no-memory).
#
# The picture has both, with the time on the left.

# %% tags=["nbval-ignore-output"]
_ = figures.time_and_memory(
    training, peak_mib or kept_mib, "peak" if peak_mib else "kept for backward"
)

# %% [markdown]
# FP32 is the bar on the left of each half. The label above each other bar gives its speed-up, or
# its share of FP32's memory. The thin line on top of a time is its interval; memory is counted and
# has none. If the machine was too busy to tell, the bars of time are grey
# and say so. <!-- tests/plots/test_plots.py -->
#
# ## Inference
#
# Inference is the forward pass alone, so autocast is all you need to switch on, and there is no
# scaler. Before you run this: will inference gain more than training, or less?

# %% tags=["nbval-ignore-output"]
passes = {p: partial(predict, runs[p][0][0], p) for p in precisions}
inference = compare(passes, device=device, budget_s=3)
inference_flops = flops_of(passes[Precision.FP32])
print(inference)
print(f"{inference_flops / 1e9:.1f} GFLOP a pass")
assert all(is_possible(inference, p, inference_flops) for p in precisions)
assert inference_flops < 0.5 * training_flops  # the backward pass is most of a step

# %% [markdown]
# You read the table like the one for training. Here bf16 was faster as well. It may gain less than
# in training, or more: without the backward pass only 0.6 of 1.8 GFLOP are left. So measure both.
#
# ## How not to measure
#
# The
# [article](https://rocm.blogs.amd.com/artificial-intelligence/automatic-mixed-precision/README.html)
# that this problem comes from reports the figures below, from an AMD GPU that it does not name. It calls
# the gain in training a speed-up of 46 %.

# %%
article = {"training": (13.98, 7.50, 2061, 1035), "inference": (4.24, 2.87, 3338, 1676)}
for task, (fp32_s, amp_s, fp32_mb, amp_mb) in article.items():
    less, speedup = 1 - amp_s / fp32_s, fp32_s / amp_s
    print(f"{task}: {less:.1%} less time is {speedup:.2f}x; memory {amp_mb / fp32_mb - 1:+.1%}")
    assert (round(less, 3), round(speedup, 2)) in [(0.464, 1.86), (0.323, 1.48)]
assert article["inference"][2] > article["training"][2]

# %% [markdown]
# *Less time* and *speed-up* are different numbers, so always say which you mean: 46.4 % less time
# is a speed-up of 1.86x. But something else is wrong here. Before you read on: how can inference,
# with 3338 MB, need more memory than training with 2061 MB?
#
# **It kept what it did not need.** The article's inference ran without `no_grad`, so each pass
# stored its activations for a backward pass. That alone is less than a training step needs. But the
# loop wrote `outputs = model(inputs)`, and the old `outputs` keep their graph alive until the new
# ones are there, so that two graphs exist at once. We can count all of this at the article's own
# size with fake tensors, which have a shape but no data, and a mode that sees the ops ([notebook
# 06](06_caltech256_resnet50.ipynb) explains both).


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


# %% [markdown]
# We count two steps of training in FP32, and inference with two graphs at once as in the article,
# with one graph, and with none.

# %%
trained, two_graphs = peak_of("training"), peak_of("inference")
one_graph, no_graph = peak_of("inference", passes=1), peak_of("inference", graph=False)
print(f"training {trained:.0f} MiB, article {article['training'][2]}")
print(f"inference with two graphs {two_graphs:.0f} MiB, article {article['inference'][2]}")
print(f"inference with one graph {one_graph:.0f} MiB, with none {no_graph:.0f} MiB")
assert abs(trained - article["training"][2]) < 20
assert abs(two_graphs - article["inference"][2]) < 20
assert no_graph < 0.3 * trained < one_graph < trained < two_graphs

# %% [markdown]
# Both of the article's figures come out to within ten MiB. One graph would have needed less than
# training, and without a graph a quarter of what training needs is enough: 516 MiB.
#
# **It stopped the clock too early.** Work on a GPU runs after the call that asked for it has
# returned. If you read the clock before you synchronise, you time how fast the CPU queues work
# [*(not yet seen on a GPU)*](../data/results/README.md "clock-too-early"). On a CPU
# it makes no difference. (We time FP32, because with fp16 the scaler [usually
# waits](03_grad_scaler_step_by_step.ipynb#An-overflow:-the-step-is-skipped,-the-scale-halves) for the
# device in every step anyway.)
#
# `compare` always waits, so we write a loop of our own for the clock that does not. `Rounds` is the
# part of `compare` that watches the machine. <!-- tests/core/test_timing.py -->


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
# Both clocks time the same step. They take turns, twenty times, and every other time in reverse.

# %% tags=["nbval-ignore-output"]
rounds, waits = Rounds(device), {"synchronised": True, "not synchronised": False}
for number in range(20):
    with rounds.next() as seconds:
        for name in list(waits)[:: 1 if number % 2 == 0 else -1]:
            seconds[name] = seconds_of_step(waits[name])
clocks = rounds.comparison(["synchronised", "not synchronised"])
print(clocks)
hidden = clocks.ratio("synchronised", "not synchronised")  # above 1 where the clock was hurried
assert not hidden.is_below(0.9)
assert device.type != "cpu" or not hidden.is_above(1.1)

# %% [markdown]
# On this CPU the interval in the second line contains 1x, as it should. If it is well above 1x on your
# device, the hurried clock reports a speed-up where there is none, since both time the same step.
#
# **It counted the first step.** The first step can be slow, for example because it [loads a
# library](https://docs.pytorch.org/tutorials/recipes/recipes/benchmark.html).
# In the article FP32 always ran first and paid for whatever the runs share, which makes AMP look
# better than it is. We timed the very first step of this notebook at the top. Here it is beside the
# later ones.

# %% tags=["nbval-ignore-output"]
later = training.time_s(Precision.FP32).times(1e3)
low, high = later.interval
known = f"{later.median:.1f} ms" if later.trusted else "too busy to tell"
print(f"first step {1e3 * first_step.median_s:.1f} ms")
print(f"later steps {known} ({low:.1f} to {high:.1f} ms)")
assert not later.is_above(1e3 * first_step.median_s)  # the first does all that they do, and more

# %% [markdown]
# The first step took longer than a later one, so warm up before you measure.
#
# **It compared one run with one run.** The article's loss fell from 0.0100 in FP32 to 0.0083 with
# AMP, with no seed set. We put beside that how far the seeds of FP32 lie apart here, early in the
# training and at its end.

# %% tags=["nbval-ignore-output"]
print(f"the article: AMP's loss is {1 - 0.0083 / 0.0100:.0%} lower")
seed_spread = {}
for epochs in (70, config["epochs"]):
    of_seeds = losses[Precision.FP32][:, epochs - 10 : epochs].mean(dim=1)  # (seeds,)
    seed_spread[epochs] = ((of_seeds.max() - of_seeds.min()) / of_seeds.mean()).item()
    print(f"our seeds, {scale} scale, after {epochs} epochs: {seed_spread[epochs]:.0%} apart")
assert 0 < seed_spread[config["epochs"]] < 1

# %% [markdown]
# After 70 epochs our seeds lie 20% apart, which is more than the 17 % of the article, and after 200
# epochs they are far closer. So one run of each cannot tell whether 17 % is an effect or
# chance; it depends on where the training stands. Only several seeds at the article's own scale can
# tell, which is what this notebook runs on a GPU.
#
# ## Summary
#
# We trained the same network in FP32 and with AMP. AMP changed or added four lines in the training
# step, and one that makes the scaler. The network, the data and the optimizer stayed as they were.
# On this device, that gave:

# %% tags=["nbval-ignore-output"]
memory_mib = peak_mib or kept_mib
for precision in precisions[1:]:
    memory = memory_mib[precision] / memory_mib[Precision.FP32]
    print(f"{precision}: training {training.ratio(Precision.FP32, precision)},", end=" ")
    print(f"inference {inference.ratio(Precision.FP32, precision)}, memory {memory:.0%}")
    assert memory < 1 or precision is Precision.TF32 or device.type == "mps"

# %% [markdown]
# - A step took less than two thirds of the time and kept 52% of the memory, and the mean losses
#   differed by less than the seeds do. [Notebook 10](10_speed_ladder.ipynb) times the same network at
#   other sizes and layouts, where AMP gains differently.
# - To see whether reduced precision costs accuracy, compare the losses of several seeds. With few
#   seeds you only see a difference that is larger than their spread; pairs can show smaller ones with
#   fewer runs.
# - To measure time, synchronise, warm up, repeat, take turns and give an interval, and say what the
#   baseline is: FP32, or TF32? If the machine was busy, say that it was.
# - Weights, gradients and optimizer state [stay
#   fp32](08_when_amp_breaks.ipynb#34-The-memory-is-not-halved), so memory falls towards half only where
#   activations are most of it.
#
# Next: [notebook 05](05_cifar10_mobilenet.ipynb) puts AMP into an ordinary training loop, with real
# pictures and a network for which it does not always pay.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("04_fp32_vs_amp")

# %% [markdown]
# ### 1. From less time to a speed-up
#
# A report says that with AMP a step takes 40 % less time than in FP32. Which speed-up is that? Give
# it to two decimals.

# %%
speedup = ...
exercises.check_speedup(speedup)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Say the step took 100 ms in FP32. How long does it take with AMP?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# speedup = 1.67
# ```
#
# 100 ms become 60 ms, and 100 / 60 is 1.67.
#
# </details>
#
# ### 2. Repair a stopwatch
#
# This stopwatch should return the seconds that the device needs for one step. `step()` only queues
# the work and returns at once, and `wait()` returns when all work that was queued has been done.
#
# ```python
# def seconds_of(step, wait):
#     started = time.perf_counter()
#     step()
#     return time.perf_counter() - started
# ```
#
# It is wrong in two cases: when the device still has work from before, and when the step itself is
# still running as the clock is read. Repair both.


# %%
def seconds_of(step, wait):
    return ...  # the seconds that the device needs for one step


exercises.check_seconds_of(seconds_of)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What has to be true of the device at each of the two moments when you read the clock?
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
# Without the first `wait` you also time older work, and without the second one you only time how
# fast the CPU queues the step.
#
# </details>
#
# ### 3. Compare in pairs
#
# Two tensors hold the losses of the same seeds in the same order, in FP32 and in bf16. Return two
# numbers: the mean difference (bf16 minus FP32), and its standard error, computed from the pairs.
# If the first is several times the second, bf16 very likely differs, even if the spread of the seeds is
# much larger.


# %%
def paired(fp32_losses, bf16_losses):
    return ...  # the mean difference, and its standard error


exercises.check_paired(paired)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Subtract first. The standard error of a mean of n numbers is their standard deviation divided by
# the square root of n.
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
# What a seed does to both losses alike cancels in the subtraction. If you took the spread of each
# precision by itself, it would be in both, and a small difference could be lost in it.
#
# </details>
#
# ### 4. How much memory does AMP save?
#
# In FP32 a training step with Adam needs 4 bytes for each parameter, 4 for its gradient, and 8 for
# the two numbers that Adam keeps. A network has 100 million parameters, and its activations take
# 400 MB in FP32. Work out on paper which share of the memory of FP32 a step with AMP needs. Take
# activations as half as wide, leave out the temporary copies of weights, and give a number between
# 0 and 1 to two decimals.

# %%
memory_share = ...
exercises.check_memory_share(memory_share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which of the four parts become smaller with AMP? The others stay fp32.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# memory_share = 0.9
# ```
#
# Weights, gradients and Adam's state take 1600 MB in either. The activations shrink from 400 MB to
# 200 MB, so 2000 MB become 1800 MB.
#
# </details>
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
