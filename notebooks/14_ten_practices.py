# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Weigh ten common practices
#
# **What you'll do.** Take ten pieces of advice that are often given for mixed precision, and try
# each of them in a small experiment of its own.
#
# **What you'll learn.**
# - which of the ten practices hold as they stand, which matter little, and which are half true;
# - what most of them are worth, in lost steps, in casts, in accuracy, in memory or in time;
# - how to weigh a piece of advice yourself: against the spread of seeds, or with an interval.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU.

# %% tags=["nbval-ignore-output"]
import json
import os
import statistics
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from course import figures, start

from amp_lab import Precision, compare

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# The other imports:

# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50

from amp_lab import describe_device, gradient_underflow, largest_batch, load_dataset
from amp_lab.core.device import make_matmul
from amp_lab.numerics import ScaleLog

figures.use_style()
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
names = {fp32: "fp32", fp16: "fp16", bf16: "bf16"}
threads = torch.get_num_threads()

# %% [markdown]
# ## The idea in five lines
#
# Advice without a figure is hard to weigh. "Always use a `GradScaler`", for example, is easily
# tried: we round 1000 small gradients to 16 bits, with a scale of 65536 that we divide out again
# and without. In which format do you expect the two to differ, fp16 or bf16?

# %%
torch.manual_seed(0)
small = 1e-6 * torch.randn(1000)
for dtype in (fp16, bf16):
    plain, scaled = small.to(dtype).float(), (65536 * small).to(dtype).float() / 65536
    print(f"{names[dtype]}: scaling changes {(plain != scaled).sum()} of 1000 gradients")
    assert (plain != scaled).any() == (dtype is fp16)

# %% [markdown]
# In fp16 scaling changes 995 of these small gradients, because it saves their bits from underflow.
# In bf16 it changes none of them, so there a scaler gains nothing for them, and the advice is only
# half true. Each of the ten practices below gets a verdict.
#
# ## What the experiments share
#
# The doctor of `amp_lab` measures your device and says which precision to use. The experiments
# about time and accuracy use fp16 if the doctor recommends it, and bf16 otherwise. Those about the
# scaler are tiny, since fp16 can be slow.

# %% tags=["nbval-ignore-output"]
config = {
    "quick": {"size": 1024, "seeds": 5, "epochs": 6, "batches": (1, 4, 16, 64, 256)},
    "full": {"size": 8192, "seeds": 10, "epochs": 20, "batches": (1, 8, 64, 512, 4096)},
}[scale]
report = describe_device(device)
low = fp16 if report.recommended == "fp16" else bf16
print(f"{device}, {scale} scale, low precision: {names[low]}")
assert low is bf16 or report.speedup("fp16") >= 1.25  # what the doctor calls faster

# %% [markdown]
# A small network learns a smooth function, always from the same weights and the same batches. The
# loss has a factor, with which we make it too large or too small for fp16 on purpose. The learning
# rate makes up for it, so that without rounding the training would stay the same.

# %%
torch.manual_seed(0)
samples = torch.randn(64, 8).split(16)
batches = [(x.to(device), x.sin().mean(dim=1, keepdim=True).to(device)) for x in samples]


def new_model():
    """The same network every time."""
    torch.manual_seed(1)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
    return nn.Sequential(*layers).to(device)


def train_weighted(weight, steps, dtype=torch.float16, **options):
    """Train with a loss `weight` times too large; `options` are the scaler's."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / weight)
    scaler = torch.amp.GradScaler(device.type, **options)
    losses = []
    with ScaleLog(scaler) as log:
        for step in range(steps):
            loss = weighted_step(model, optimizer, scaler, dtype, weight, step)
            losses.append(loss / weight)
    return log, losses


# %% [markdown]
# The log has the scale of each step and the steps that were skipped. A step is an ordinary one:


# %%
def weighted_step(model, optimizer, scaler, dtype, weight, step):
    x, y = batches[step % len(batches)]
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
        loss = weight * F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


# %% [markdown]
# ## The ten practices
#
# ### 1. Know the hardware
#
# `amp-lab doctor` measures a matrix product in several precisions. To see how far it can be
# trusted, we measure one more product.

# %% tags=["nbval-ignore-output"]
print(f"{report.name}: use {report.recommended}, since {report.reason}")
size, both = config["size"], ("fp32", names[low])
products = {p: make_matmul(device, Precision(p), size) for p in both}
ratio = compare(products, device=device, budget_s=3).ratio(*both)
found = report.speedup(names[low])
print(f"{names[low]} against fp32, {size} x {size}: {ratio}; the doctor says {found:.2f}x")
low_end, high_end = ratio.interval
agree = low_end / 1.1 < found < 1.1 * high_end  # a tenth, since the doctor's figure varies too
print("they agree to within a tenth:", agree)
assert products[names[low]]().dtype is low

# %% [markdown]
# The lines have both figures for the speed of the low precision against fp32, and say whether they
# agree. **Verdict: right, and it takes one command.** Do not go by the data sheet, measure
# ([notebook 10](10_speed_ladder.ipynb)).
#
# ### 2. Start with the defaults
#
# The first loss scale, 65536, is often too high, and then the first steps are lost until it fits.
# Is it worth setting a better one? With a loss that is 180 times as large, we train with the
# default scale, and once more with the scale that it settled at.

# %%
torch.set_num_threads(1)
by_default, _ = train_weighted(180, 40)
fitting = by_default.scales[-1]
tuned, _ = train_weighted(180, 40, init_scale=fitting)
print(f"default: {len(by_default.skipped)} steps lost, then {fitting:.0f} fits")
print(f"tuned:   {len(tuned.skipped)} lost")
assert len(tuned.skipped) < len(by_default.skipped) == 7
assert by_default.skipped == list(range(7))  # at the start, and never again

# %% [markdown]
# The default loses the first 7 steps, and none after them. Each lost step halves the scale, so the
# search takes only the logarithm of the misfit: 65536 divided by 2^7 is 512. **Verdict: right.** As
# a rule of thumb, seven lost steps matter in a run of forty, and not in one of forty thousand.
#
# ### 3. Watch the accuracy
#
# One run in each precision can hardly tell you whether low precision costs accuracy, because two
# fp32 runs from different seeds differ as well. So we train a classifier of digits in both, from
# several seeds. Which do you expect to be larger, the difference between the precisions or that
# between the seeds?


# %%
def tensors(part):
    """Images (N, 64) and targets (N,) of a part of the data; the three channels are alike."""
    x, y = part.batch(range(len(part)))
    return x[:, 0].flatten(1).to(device), y.to(device)


digits = load_dataset("digits", image_size=8, augment=False)
(train_x, train_y), (test_x, test_y) = tensors(digits.train), tensors(digits.test)
assert (len(train_x), len(test_x)) == (1438, 359)

# %% [markdown]
# This is one training, from a seed:


# %%
def accuracy(seed, dtype):
    """Test accuracy in percent after training from a seed; fp32 is without autocast."""
    torch.manual_seed(seed)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is fp16)
    for _ in range(config["epochs"]):
        for batch in torch.randperm(len(train_x)).split(64):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
                loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return 100 * (model(test_x).argmax(1) == test_y).float().mean().item()


# %% [markdown]
# Now we train from each seed in both precisions, and draw a dot for each training:

# %% tags=["nbval-ignore-output"]
scores = {names[d]: [accuracy(s, d) for s in range(config["seeds"])] for d in (fp32, low)}
means = [statistics.mean(found) for found in scores.values()]
spread = max(map(statistics.stdev, scores.values()))
print(f"means differ by {abs(means[0] - means[1]):.2f} points; seeds by {spread:.2f} (one sigma)")
_ = figures.scores_by_seed(scores)
assert min(means) > 90
assert abs(means[0] - means[1]) < min(max(found) - min(found) for found in scores.values())

# %% [markdown]
# The picture has a row of dots for each precision, and a bar at the mean of each row. The bars lie
# nearer to each other than the outer dots of a row: here the means happen to differ by 0.00 points,
# while seeds differ by 0.87 points (one standard deviation). **Verdict: right, with several
# seeds.** One run in each precision may show you no more than the luck of the seed.
#
# ### 4. Only the forward pass in autocast
#
# What happens if `backward` runs in the block too? To see it, we note the ops and the dtypes of
# their inputs. (The cells of this practice and the next run on the CPU, whatever your device.)


# %%
class OpLog(TorchDispatchMode):
    """Notes the name and the dtypes of every op in a block."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [names.get(a.dtype) for a in args if isinstance(a, torch.Tensor)]
        self.ops.append((func._schema.name.removeprefix("aten::"), dtypes))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(op == name for op, _ in self.ops)

    def products(self):
        return [dtypes[0] for op, dtypes in self.ops if op in ("mm", "addmm")]


# %% [markdown]
# The model has an fp32 *island*, a layer that someone has taken out of autocast because it needs the
# precision. Do you expect the island's ops in the backward pass to stay fp32, if autocast is on while
# they run?


# %%
def island_gradient(inside, width=32, log=None):
    """The gradient of an island's weight, from a backward pass with autocast on, or off."""
    torch.manual_seed(0)
    first, island = nn.Linear(width, width), nn.Linear(width, width)
    x = torch.randn(2 * width, width)
    with torch.autocast("cpu", dtype=bf16):
        hidden = first(x)
        with torch.autocast("cpu", enabled=False):
            loss = island(hidden.float()).square().mean()
    with torch.autocast("cpu", dtype=bf16, enabled=inside), log or nullcontext():
        loss.backward()
    return island.weight.grad


# %%
after, within = OpLog(), OpLog()
exact, blurred = island_gradient(False, log=after), island_gradient(True, log=within)
for what, log in {"after the block": after, "inside": within}.items():
    print(f"backward {what:<16} products in {log.products()}, {log.count('_to_copy')} casts")
error = ((blurred - exact).norm() / exact.norm()).item()
print(f"the island's gradient is off by {error:.0e}")
assert after.products() == ["fp32", "fp32", "bf16"]
assert set(within.products()) == {"bf16"}
assert after.count("_to_copy") < within.count("_to_copy")
assert 2**-12 < error < 2**-7  # roundings of bf16
assert exact.dtype is blurred.dtype is fp32

# %% [markdown]
# After the block, the island's two products run in fp32, as they should. Inside it, autocast casts
# them to bf16: the island has lost its precision in the backward pass, and its gradient is off by
# 2e-03. There are 9 casts instead of 3 as well. (The third product belongs to the layer that is not
# on the island, and is in bf16 either way.) Their dtype does not show it: the gradients are fp32
# tensors both times.
#
# **Verdict: right.** If one block holds the whole loop, it gets worse, because the next forward pass
# still sees the old weights ([notebook 08](08_when_amp_breaks.ipynb) shows it).
#
# ### 5. No casts by hand
#
# What do `.half()` and `.float()` in a model cost under autocast? We count the casts of a forward pass
# of two layers, without them and with them.


# %%
class ByHand(nn.Module):
    """Two layers, with or without casts around them."""

    def __init__(self, casts):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.casts = nn.Linear(8, 8), nn.Linear(8, 8), casts

    def forward(self, x):
        if not self.casts:
            return self.second(self.first(x).relu())
        x = self.first(x.half()).float().relu()
        return self.second(x.half()).float()


counts = {}
for casts in (False, True):
    with torch.autocast("cpu", dtype=fp16), OpLog() as log:
        ByHand(casts)(torch.ones(4, 8))
    counts[casts] = log.count("_to_copy")
print(f"casts in a forward pass: {counts[False]} without casts by hand, {counts[True]} with")
assert counts == {False: 5, True: 8}

# %% [markdown]
# Autocast makes 5 casts, of two weights, two biases and the input. Casts by hand bring them to 8.
# The other cost is range, where a manual cast overrides autocast's choice. Left alone, this sum of
# squares stays in fp32:

# %%
error = torch.full((4, 8), 300.0)
with torch.autocast("cpu", dtype=fp16):
    left_alone, by_hand = error.square().sum(), error.half().square().sum()
print(f"left alone {left_alone.item():,.0f}, with .half() {by_hand.item()}")
assert (left_alone.item(), by_hand.item()) == (32 * 300**2, float("inf"))

# %% [markdown]
# Left alone it is 2,880,000, and with `.half()` it is infinite. **Verdict: right.** One exception
# is an island: in a block with autocast off you have to cast the inputs, by `.float()`, as practice
# 4 did.
#
# ### 6. Use the scaler
#
# The advice is: always. We take a loss with a factor of 2^-22, as it may be one term among others,
# and look at its gradients first:

# %%
WEIGHT = 2.0**-22
model, (x, y) = new_model(), batches[0]
underflow = gradient_underflow(model, WEIGHT * F.mse_loss(model(x), y))
for loss_scale in (1.0, 2.0**16):
    print(f"loss scale {loss_scale:<7.0f}: fp16 loses {underflow.outputs.lost(loss_scale):.0%}")
assert underflow.outputs.lost(1.0) > 0.9
assert underflow.outputs.lost(2.0**16) < 0.01

# %% [markdown]
# With a scale of 1, fp16 loses practically all of the gradients at the outputs of layers, and with
# a scale of 65536 practically none. Now we train in each precision, with a scaler and without. In
# which of the three precisions do you expect the scaler to change the result?

# %%
curves = {
    f"{names[dtype]}, {'scaler' if scaled else 'no scaler'}": train_weighted(
        WEIGHT, 40, dtype, enabled=scaled
    )[1]
    for dtype in (fp32, fp16, bf16)
    for scaled in (False, True)
}
shown = [name for name in curves if name not in ("fp32, scaler", "bf16, scaler")]
_ = figures.losses_by_setting({name: curves[name] for name in shown})

# %% [markdown]
# The picture shows the loss over the steps for four of the trainings, on a logarithmic axis. Three
# of the lines are nearly the same, and fp16 without a scaler stays far above them. Two more are not
# drawn: those of fp32 and bf16 with a scaler are equal to those without, on a CPU to the last bit.

# %%
last = {name: statistics.mean(losses[-4:]) for name, losses in curves.items()}
for name, loss in last.items():
    print(f"{name:<16} {loss:.1g}")
for name in ("fp16, scaler", "bf16, no scaler"):
    assert abs(last[name] / last["fp32, no scaler"] - 1) < 0.1, name  # within the width of the line
assert last["fp16, no scaler"] > 1.5 * last["fp32, no scaler"]
for name in ("fp32", "bf16"):
    pairs = zip(curves[f"{name}, scaler"], curves[f"{name}, no scaler"], strict=True)
    off = max(abs(a - b) for a, b in pairs) / curves[f"{name}, no scaler"][0]
    assert off <= (0 if device.type == "cpu" else 2**-6), name

# %% [markdown]
# Five of the six trainings end at a loss of 0.009, and fp16 without a scaler ends at 0.2.
# **Verdict: right for fp16 alone.** bf16 has nearly the range of fp32, so for gradients of usual
# size multiplying by a power of two and dividing again changes no bit. With
# `GradScaler(device.type, enabled=dtype is torch.float16)` one loop serves all three.
#
# ### 7. Tune initial scale and growth interval
#
# The scale grows after `growth_interval` good steps in a row, and when it has grown too far, a step
# is skipped. So a short interval skips often. A long one takes long to climb if the scale starts
# too low. We try five settings on the loss of practice 2:

# %% tags=["nbval-ignore-output"]
settings = {
    "default": {},
    "interval 50": {"growth_interval": 50},
    "interval 10": {"growth_interval": 10},
    "interval 10, from 1": {"growth_interval": 10, "init_scale": 1.0},
    "from 1": {"init_scale": 1.0},
}
logs = {name: train_weighted(180, 300, **options)[0] for name, options in settings.items()}
_ = figures.scales_by_setting({name: (log.scales, log.skipped) for name, log in logs.items()})
skipped = {name: len(log.skipped) for name, log in logs.items()}
print("steps skipped:", ", ".join(f"{count} ({name})" for name, count in skipped.items()))
assert skipped["default"] < skipped["interval 50"] < skipped["interval 10"]
assert logs["from 1"].scales == [1.0] * 300
for interval in (50, 10):
    late = [step for step in logs[f"interval {interval}"].skipped if step >= 100]
    assert len(late) <= 2 * 200 / interval  # now and then it takes two to find the scale again

# %% [markdown]
# The picture has a panel for each setting, with the scale of each step on a logarithmic axis, and a
# cross where a step was skipped. By default the scale falls in the first steps and stays there in
# these 300. With an interval of 10 it runs into the limit again and again, and 29 of the 300 steps
# are skipped. From 1 with an interval of 10 the scale climbs for about 120 steps before it meets the
# limit. From 1 with the default interval it would need 2000 steps for each doubling, so in these 300
# it never moves.
#
# **Verdict: rarely needed.** Falling is quick and growing is slow, so start too high rather than too
# low, and leave the interval alone.
#
# ### 8. Stay current
#
# What did the [versions of PyTorch](https://github.com/pytorch/pytorch/releases) bring? For each row,
# the cell checks a name or a call of it:

# %%
VERSIONS = {  # from the release notes; and whether it is here
    "1.6": ("torch.cuda.amp, after Apex", hasattr(torch.cuda.amp, "GradScaler")),
    "1.10": ("torch.autocast for CPUs, bf16", torch.amp.is_autocast_available("cpu")),
    "2.3": ("torch.amp.GradScaler(device)", torch.amp.GradScaler("cpu").is_enabled()),
    "2.4": ("custom_fwd(device_type); old names warn", hasattr(torch.amp, "custom_fwd")),
    "2.9": ("fp32_precision, for TF32", hasattr(torch.backends.cuda.matmul, "fp32_precision")),
}
for version, (what, here) in VERSIONS.items():
    print(f"{version:<6}{what}")
    assert here, version

# %% [markdown]
# The old names in `torch.cuda.amp` still work, but they warn ([notebook 13](13_from_apex.ipynb)
# shows it, and moves such code). **Verdict: right**, and one way to notice in time is to let your
# tests fail on these warnings, with `python -W error::FutureWarning`.
#
# ### 9. Try batch sizes
#
# We look at memory first. `largest_batch` computes what fits on a card that you need not own ([notebook
# 09](09_xray_your_model.ipynb) explains how). We ask for ResNet-50 with Adam on images of 224x224, and
# a card of 24 GiB. By what factor do you expect the batch to grow in half precision?

# %%
model = resnet50()
largest = {
    precision: largest_batch(model, (3, 224, 224), memory_bytes="24GiB", precision=precision)
    for precision in ("fp32", "fp16", "bf16")
}
print("largest batch:", largest)
assert 1.8 * largest["fp32"] < largest["fp16"] == largest["bf16"] < 2 * largest["fp32"]

# %% [markdown]
# The largest batch grows from 293 to 567, nearly twice as many, since most activations are halved,
# and weights and optimizer state are not. Does a larger batch make AMP pay more in time? We time
# the forward and backward pass of three wide layers:


# %%
def passes(dtype, batch):
    """Forward and backward pass in a dtype, as a function; fp32 without autocast, and no TF32."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(512, 512), nn.ReLU())]
    model, x = nn.Sequential(*layers).to(device), torch.randn(batch, 512, device=device)

    def step():
        model.zero_grad()
        with Precision(names[dtype]).float32_mode(device.type):
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
                loss = model(x).square().mean()
            loss.backward()

    return step


# %% tags=["nbval-ignore-output"]
torch.set_num_threads(threads)  # from here on all of the device's cores
measured, speedups = {}, {}
for batch in config["batches"]:
    steps = {names[dtype]: passes(dtype, batch) for dtype in (fp32, low)}
    measured[batch] = compare(steps, device=device, budget_s=2)
    speedups[batch] = measured[batch].ratio(*steps)
    print(f"batch {batch:>4}: speed-up {speedups[batch]}")
_ = figures.throughput_over_batch(measured)

# %% [markdown]
# The picture shows samples per second over the batch on the left, and the speed-up on the right, both
# with their intervals; below the line at 1, AMP loses. Here AMP loses at batch 1 and clearly wins at
# batch 256. For your device, the next cell speaks of a gain only if the intervals do not overlap:

# %% tags=["nbval-ignore-output"]
smallest, *_, largest_one = speedups.values()
is_more = largest_one.is_above(smallest.interval[1]) and smallest.trusted
print("AMP gains more at the largest batch" if is_more else "no gain can be told from this")
casts = []
for batch in (1, 256):
    with OpLog() as log, torch.autocast("cpu", dtype=bf16):
        nn.Linear(8, 8)(torch.ones(batch, 8))
    casts.append(log.count("_to_copy"))
assert casts == [3, 3]  # weight, bias and input: as many for one sample as for 256

# %% [markdown]
# One reason is that the weights are cast once for each batch, whether it has one sample or 256.
# **Verdict: right for memory; for speed, measure it on your device.** And a larger batch makes
# another training of it, which may need another learning rate.
#
# ### 10. Profile before and after
#
# To check that AMP does what it should, we profile a step of a small convolutional network in fp32
# and in low precision. With `record_shapes` the trace, a JSON file, has the dtype of each tensor that
# an op takes. (Of lists of tensors, as `cat` takes, it has none.)
# <!-- tests/notebooks/test_14_ten_practices.py -->

# %%
os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's own log would fill this page


def profile_once(step):
    """The profile of a step, and the events of its trace."""
    step()  # not the first one, which makes and loads kernels
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        return found, json.loads(Path(folder, "trace.json").read_text())["traceEvents"]


# %% [markdown]
# We count each op by the dtype of its first input. A cast is a copy between two dtypes.

# %%
SHORT = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}


def count_ops(events):
    """How often each op ran with a first input of each dtype; and "cast"."""
    ops = Counter()
    for event in events:
        kinds = [SHORT.get(kind) for kind in event.get("args", {}).get("Input type", [])]
        if kinds:
            ops[event["name"].removeprefix("aten::"), kinds[0]] += 1
        if event["name"] == "aten::copy_" and None not in kinds[:2] and kinds[0] != kinds[1]:
            ops["cast", kinds[0]] += 1
    return ops


# %% [markdown]
# These are the step and its two profiles. Do you expect the backward pass to be in low precision too?


# %% tags=["nbval-ignore-output"]
def convolutional_step(dtype):
    """A training step of three convolutions in a dtype; fp32 is without autocast."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(16, 64, 32, 32, device=device)

    def step():
        model.zero_grad()
        with Precision(names[dtype]).float32_mode(device.type):
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
                loss = model(x).square().mean()
            loss.backward()

    return step


profiles = {names[dtype]: profile_once(convolutional_step(dtype)) for dtype in (fp32, low)}
for precision, (_, events) in profiles.items():
    used = {op: p for op, p in count_ops(events) if op.startswith("convolution") and p}
    print(f"{precision}: {used}")
    assert used == {"convolution": precision, "convolution_backward": precision}

# %% [markdown]
# All convolutions of the first profile ran in fp32, and all of the second in low precision, those of
# the backward pass too. What did they cost, and what did the casts?

# %% tags=["nbval-ignore-output"]
self_time = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
for precision, (found, events) in profiles.items():
    averages = [e for e in found.key_averages() if e.key.startswith("aten::")]
    own = {e.key.removeprefix("aten::"): getattr(e, self_time) / 1e3 for e in averages}  # ms
    casts = sum(count for (op, _), count in count_ops(events).items() if op == "cast")
    print(f"{precision}: {sum(own.values()):.1f} ms, {casts} casts")
    for op in sorted(own, key=own.get, reverse=True)[:4]:
        print(f"    {op:<30}{own[op]:8.2f} ms")
    assert (casts == 0) == (precision == "fp32")

# %% [markdown]
# Each profile lists its four most expensive ops, by the time spent in the op itself. The backward
# pass of the convolutions comes first in both. In bf16 it takes much less, and there are casts. For
# the speed-up itself use `compare`, as in practice 9.
# **Verdict: right.** If an op stays in fp32, or casts come first, you know where to look.
#
# ## Summary
#
# | practice | verdict | what we found |
# |---|---|---|
# | 1. Know the hardware | right | one command measures it, and you can check it with a second measurement |
# | 2. Start with the defaults | right | a scale that was 128 times too high cost 7 steps, at the start |
# | 3. Watch the accuracy | right | but only with several seeds: their spread was larger |
# | 4. Only the forward pass in autocast | right | inside the block, the backward pass of an fp32 island was in bf16 |
# | 5. No casts by hand | right | 8 casts instead of 5, and a sum that was finite became infinite |
# | 6. Always use the scaler | for fp16 alone | in fp32 and bf16 it changed no bit (on a CPU) |
# | 7. Tune scale and interval | rarely needed | a short interval lost 29 of 300 steps |
# | 8. Stay current | right | old names warn, so let tests fail on the warnings |
# | 9. Try batch sizes | right | nearly twice the batch fits; here AMP gained more at large ones |
# | 10. Profile before and after | right | the dtypes of ops, and their times, show where to look |
#
# Where to go next depends on your question: the README's [table](../README.md) lists what each notebook
# answers.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("14_ten_practices")

# %% [markdown]
# ### 1. How many steps are lost?
#
# A training starts with the default scale of 65536, and the largest scale that its gradients bear is
# 3000. How many steps are lost at the start?

# %%
lost_steps = ...
exercises.check_lost_steps(lost_steps)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each lost step halves the scale. Write the scales down until one of them is small enough.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# lost_steps = 5
# ```
#
# 65536, 32768, 16384, 8192 and 4096 are too large, and each of them costs a step. 2048 fits.
#
# </details>
#
# ### 2. Count the casts
#
# Under autocast to fp16, an fp32 input goes through three linear layers with bias, and a ReLU after
# each of the first two. Nothing is cast by hand. How many casts does the forward pass have?

# %%
casts_in_forward = ...
exercises.check_casts(casts_in_forward)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two layers had 5 casts in practice 5. Which of them does a third layer add?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# casts_in_forward = 3 + 3 + 1  # weights, biases and the input
# ```
#
# What comes out of a layer is fp16, and ReLU keeps it so. Only the first layer's input is cast.
#
# </details>
#
# ### 3. Mend this step
#
# This step goes against three of the practices. Write it anew, so that it is right in fp16, bf16 and
# fp32; for bf16 and fp32 the scaler that it is given is disabled.
#
# ```python
# def mended_step(model, x, y, optimizer, scaler, dtype):
#     optimizer.zero_grad()
#     with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
#         loss = F.mse_loss(model(x.half()), y)
#         loss.backward()
#         optimizer.step()
# ```


# %%
def mended_step(model, x, y, optimizer, scaler, dtype):
    return ...  # zero_grad, forward pass, backward, step, update


exercises.check_mended_step(mended_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which calls belong inside the autocast block? Which dtype should the input have when `dtype` is
# bf16 or fp32? Who divides the gradients?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def mended_step(model, x, y, optimizer, scaler, dtype):
#     optimizer.zero_grad()
#     with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
#         loss = F.mse_loss(model(x), y)
#     scaler.scale(loss).backward()
#     scaler.step(optimizer)
#     scaler.update()
# ```
#
# </details>
#
# ### 4. Say it only if you can
#
# You have measured two speed-ups, each with an interval `(low, high)`. Complete `verdict`, so that it
# says of the second one "more", "less" or "cannot tell", compared with the first.


# %%
def verdict(first, second):
    return ...


exercises.check_verdict(verdict)

# %% [markdown]
# <details><summary>Hint</summary>
#
# If two intervals overlap, both speed-ups may be the same number.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def verdict(first, second):
#     if second[0] > first[1]:
#         return "more"
#     if second[1] < first[0]:
#         return "less"
#     return "cannot tell"
# ```
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision
#   recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html): the loop of most of
#   these practices, with advice for when things go wrong.
# - PyTorch, [Performance tuning
#   guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html): more practices, of
#   which AMP is one.
# - PyTorch, [`torch.profiler`](https://docs.pytorch.org/docs/stable/profiler.html): how to read what
#   practice 10 records.
