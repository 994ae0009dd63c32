# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Move from Apex to torch.amp
#
# **What you'll do.** Rebuild NVIDIA Apex's four optimization levels in a few lines each, and put
# beside each what does its work today. Then move code from Apex and from `torch.cuda.amp` to
# `torch.amp`, continue a training from a checkpoint that Apex wrote, and turn ten pieces of common
# advice about AMP into experiments.
#
# **What you'll learn.**
# - what O0, O1, O2 and O3 did to weights, activations, gradients and optimizer, and at what cost;
# - which line of an old loop becomes which line of a new one;
# - where the new names have other defaults than the old ones, and say nothing;
# - what a checkpoint of Apex holds, and what it lacks;
# - which of the ten practices matter, by how much, and which are half true.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. No GPU, and no Apex, which removed its `amp`
# in 2025. It takes about half a minute.

# %% tags=["nbval-ignore-output"]
import difflib
import functools
import json
import os
import statistics
import tempfile
import warnings
from collections import Counter, OrderedDict
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from amp_lab import Precision, compare, plots
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# And what comes from torch, with the tools of `amp_lab` that the X-ray of a loss and the practices
# need.

# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50

from amp_lab import describe_device, gradient_underflow, largest_batch, load_dataset, xray
from amp_lab.device import matrix_product
from amp_lab.numerics import ScaleLog

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
names = {fp32: "fp32", fp16: "fp16", bf16: "bf16"}
threads = torch.get_num_threads()
torch.set_num_threads(1)  # the tensors are too small to share among CPU cores, up to the practices

# %% [markdown]
# ## The names, then and now
#
# For years Apex was the usual way to train PyTorch models in mixed precision. In 2020 its ideas
# went into PyTorch 1.6, as `torch.cuda.amp`, and later into `torch.amp`, which serves every device.
#
# | Apex | today |
# |---|---|
# | `amp.initialize(model, optimizer, opt_level="O1")` | `torch.autocast` around forward pass and loss |
# | the loss scaler inside it | `torch.amp.GradScaler` |
# | `amp.scale_loss(loss, optimizer)` | `scaler.scale(loss)` |
# | `amp.master_params(optimizer)` | `model.parameters()`, after `scaler.unscale_` |
# | `amp.state_dict()` | `scaler.state_dict()` |
# | `amp.disable_casts()` | `torch.autocast(…, enabled=False)` |
# | `amp.float_function`, `amp.half_function` | `torch.autocast(…, enabled=False)` in the function, and `.float()` or `.half()` |
# | `apex.optimizers.FusedAdam` | `torch.optim.AdamW(…, weight_decay=0, fused=True)` |
# | `apex.parallel.DistributedDataParallel` | `torch.nn.parallel.DistributedDataParallel` |
# | `apex.parallel.convert_syncbn_model` | `torch.nn.SyncBatchNorm.convert_sync_batchnorm` |
# | `apex.normalization.FusedLayerNorm` | `torch.nn.LayerNorm` |
#
# All of the right column is there:

# %%
TODAY = (
    "autocast amp.GradScaler.scale amp.GradScaler.unscale_ amp.GradScaler.state_dict "
    "amp.custom_fwd optim.AdamW nn.parallel.DistributedDataParallel nn.LayerNorm "
    "nn.SyncBatchNorm.convert_sync_batchnorm"
)
for name in TODAY.split():
    assert callable(functools.reduce(getattr, name.split("."), torch)), name
weight = nn.Parameter(torch.ones(1, device=device))
assert torch.optim.AdamW([weight], weight_decay=0, fused=True).defaults["weight_decay"] == 0
assert torch.optim.AdamW([weight]).defaults["weight_decay"] == 0.01  # FusedAdam's was 0
print(f"{len(TODAY.split())} names of today found")

# %% [markdown]
# ## A toy Apex
#
# Since 2025 `from apex import amp` is an ImportError ([pull request
# 1896](https://github.com/NVIDIA/apex/pull/1896) removed it). But what it did is quickly told, and what
# follows does the same in plain torch. A level was nothing but five settings:


# %%
class Level(NamedTuple):
    """What an optimization level stood for, under Apex's names."""

    cast_model_type: torch.dtype | None  # weights and inputs are cast to it
    patch_torch_functions: bool  # ops cast their inputs
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None  # the optimizer has fp32 copies of the weights
    loss_scale: float | str


LEVELS = {
    "O0": Level(fp32, False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level(fp16, False, True, True, "dynamic"),
    "O3": Level(fp16, False, False, False, 1.0),
}
assert [name for name, level in LEVELS.items() if level.master_weights] == ["O2"]

# %% [markdown]
# **The dynamic loss scale** began at 2^16. An overflow halved it, and 2000 good steps in a row
# doubled it, up to 2^24. A fixed scale stays as it is, and skips no step.


# %%
class LossScale:
    """A loss scale as Apex had it."""

    def __init__(self, loss_scale):
        self.dynamic = loss_scale == "dynamic"
        self.scale = 2.0**16 if self.dynamic else loss_scale
        self.unskipped, self.window, self.highest = 0, 2000, 2.0**24

    def update(self, overflow):
        """Change the scale after a backward pass; whether to skip the step."""
        if overflow and self.dynamic:
            self.scale, self.unskipped = self.scale / 2, 0
            return True
        self.unskipped += 1
        if self.unskipped == self.window and self.dynamic:
            self.scale, self.unskipped = min(self.highest, 2 * self.scale), 0
        return False


# %% [markdown]
# Its three numbers are `GradScaler`'s defaults to this day. Only the highest scale is gone: the new
# one has none.

# %%
scaler = torch.amp.GradScaler("cpu")
loss_scale = LossScale("dynamic")
assert scaler.get_scale() == loss_scale.scale
assert scaler.get_growth_interval() == loss_scale.window
assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2, 0.5)
assert [loss_scale.update(True), loss_scale.scale] == [True, 2.0**15]
print("as Apex's:", scaler.state_dict())
at_the_top = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1)
weight = nn.Parameter(torch.zeros(1))
at_the_top.scale(weight.sum()).backward()
at_the_top.step(torch.optim.SGD([weight]))
at_the_top.update()
assert at_the_top.get_scale() == 2.0**25
fixed = LossScale(128.0)
assert [fixed.update(overflow=True), fixed.scale] == [False, 128]

# %% [markdown]
# **Patched functions.** O1 replaced functions of torch by others that cast their inputs first: to
# fp16 for those on a white list, which multiply matrices, to fp32 for those on a black list, such
# as softmax and losses. Here a `TorchFunctionMode`, which sees every call of a torch function, does
# so for a few of them.

# %%
WHITE = {F.linear, F.conv2d, torch.matmul}
BLACK = {F.mse_loss, F.cross_entropy, F.softmax, torch.exp}


def cast(values, dtype):
    """The same values, with floating-point tensors in this dtype."""
    is_float = [isinstance(v, torch.Tensor) and v.is_floating_point() for v in values]
    return tuple(v.to(dtype) if f else v for v, f in zip(values, is_float, strict=True))


class PatchedFunctions(TorchFunctionMode):
    """Casts the inputs of functions on the lists, as O1 did."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in WHITE or func in BLACK:
            args = cast(args, fp16 if func in WHITE else fp32)
        return func(*args, **(kwargs or {}))


x = torch.ones(2, 2, device=device)
with PatchedFunctions():
    assert (F.linear(x, x).dtype, F.softmax(x.half(), 1).dtype) == (fp16, fp32)

# %% [markdown]
# **A model in fp16.** O2 and O3 called `half()` on the model; O2 left batch normalisation in fp32.
# Inputs are cast on their way in, and outputs on their way out, back to fp32.


# %%
def cast_model(model, dtype, keep_batchnorm_fp32):
    """Cast a model's weights, and from now on its inputs; its outputs are fp32."""
    model.to(dtype)
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.float()
    model.register_forward_pre_hook(lambda _, args: cast(args, dtype))
    model.register_forward_hook(lambda _, args, output: output.float())


# %% [markdown]
# **Master weights.** O2 put an fp32 copy of each fp16 weight into the optimizer, in its place.


# %%
def make_masters(optimizer):
    """Replace fp16 parameters in the optimizer by fp32 copies; pairs of model's and master."""
    pairs = []
    for group in optimizer.param_groups:
        for i, weight in enumerate(group["params"]):
            if weight.dtype is fp16:
                group["params"][i] = weight.detach().float().requires_grad_()
                pairs.append((weight, group["params"][i]))
    return pairs


# %% [markdown]
# **The backward pass.** `amp.scale_loss` hands out the scaled loss. When its block ends, the
# gradients go to the masters, are unscaled and checked, and the scale is updated.


# %%
class Scaling:
    """The part of Apex's `amp` that a training loop called."""

    def master_params(self, optimizer):
        return (p for group in optimizer.param_groups for p in group["params"])

    @contextmanager
    def scale_loss(self, loss, optimizer):
        for weight, _ in self.pairs:
            weight.grad = None
        used = self.loss_scale.scale
        yield loss.float() * used
        for weight, master in self.pairs:
            master.grad = weight.grad.float()
        gradients = [p.grad for p in self.master_params(optimizer)]
        overflow = not all(g.isfinite().all() for g in gradients)
        for gradient in gradients:
            gradient.mul_(1 / used)
        self.skip = self.loss_scale.update(overflow)


# %% [markdown]
# **`amp.initialize`** put these together, and replaced the optimizer's `step`: by nothing after an
# overflow, else by one that copies the masters back to the model. Apex patched torch for good; here
# the patches end with a `with` block.


# %%
class ToyApex(Scaling, ExitStack):
    """What Apex's `amp` did, in a block: `with ToyApex() as amp`."""

    def initialize(self, model, optimizer, opt_level="O1"):
        level = LEVELS[opt_level]
        if level.cast_model_type is fp16:
            cast_model(model, fp16, level.keep_batchnorm_fp32)
        if level.patch_torch_functions:
            self.enter_context(PatchedFunctions())
        self.pairs = make_masters(optimizer) if level.master_weights else []
        self.loss_scale, self.skip = LossScale(level.loss_scale), False
        optimizer.step = functools.partial(self.step, optimizer.step)
        return model, optimizer

    @torch.no_grad()
    def step(self, original):
        if not self.skip:
            original()
            for weight, master in self.pairs:
                weight.copy_(master)


# %% [markdown]
# ## What each level did, and what does it today
#
# A network with batch normalisation, so small that fp16 is quick on a CPU too. The loss is 12 times
# too large, so that the first scale is too: a few steps have to be skipped.

# %%
torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = inputs.sin().mean(dim=1, keepdim=True)
pairs = zip(inputs.split(16), targets.split(16), strict=True)
batches = [(x.to(device), y.to(device)) for x, y in pairs]


def new_model():
    """The same network every time; its first layer notes the dtype of what it puts out."""
    torch.manual_seed(1)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
    model = nn.Sequential(*layers).to(device)
    model[0].register_forward_hook(lambda layer, _, out: setattr(layer, "puts_out", out.dtype))
    return model


def new_adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


# %% [markdown]
# Training in Apex's way looked like this:


# %%
class Run(NamedTuple):
    """A training that is over."""

    losses: list[float]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scale: float


def train_apex(level, steps=24):
    model = new_model()
    optimizer = new_adam(model)
    losses = []
    with ToyApex() as amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        for step in range(steps):
            losses.append(apex_step(amp, model, optimizer, step))
        return Run(losses, model, optimizer, amp.loss_scale.scale)


# %% [markdown]
# In the step, two lines are Apex's, the block and the first line in it:


# %%
def apex_step(amp, model, optimizer, step):
    x, y = batches[step % len(batches)]
    optimizer.zero_grad()
    loss = 12 * F.mse_loss(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


# %% [markdown]
# And in today's way. `dtype` is None for fp32. Nothing is done to the model or the optimizer.


# %%
def today_step(model, optimizer, scaler, dtype, step):
    x, y = batches[step % len(batches)]
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        loss = 12 * F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def train_today(dtype, steps=24, model=None):
    model = model or new_model()
    optimizer = new_adam(model)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is fp16)
    losses = [today_step(model, optimizer, scaler, dtype, step) for step in range(steps)]
    return Run(losses, model, optimizer, scaler.get_scale())


# %% [markdown]
# What are the dtypes in each? For O3, one step has to do; we will see why.


# %%
def dtypes(run):
    """The dtype of each kind of tensor after a training."""
    weight, updated = run.model[0].weight, run.optimizer.param_groups[0]["params"][0]
    found = {
        "weights": weight.dtype,
        "batch norm": run.model[1].weight.dtype,
        "activations": run.model[0].puts_out,
        "gradients": weight.grad.dtype,
        "Adam updates": updated.dtype,
        "Adam's state": run.optimizer.state[updated]["exp_avg"].dtype,
    }
    return {what: names[dtype] for what, dtype in found.items()}


runs = {level: train_apex(level, 1 if level == "O3" else 24) for level in LEVELS}
runs |= {"fp32 today": train_today(None), "autocast": train_today(fp16)}
table = {name: dtypes(run) for name, run in runs.items()}
print(f"{'':<13}" + "".join(f"{what:<14}" for what in table["O0"]))
for name, found in table.items():
    print(f"{name:<13}" + "".join(f"{dtype:<14}" for dtype in found.values()))
assert table["O0"] == table["fp32 today"]
assert table["O1"] == table["autocast"]

# %% [markdown]
# Read it by rows. O1 changed nothing but what ops compute in, and that is autocast. O2 had two
# kinds of weights, and so two kinds of gradients. The rest of this section looks at the levels one
# by one.

# %%
assert set(table["O0"].values()) == {"fp32"}
assert [what for what, dtype in table["O1"].items() if dtype == "fp16"] == ["activations"]
low_in_o2 = [what for what, dtype in table["O2"].items() if dtype == "fp16"]
assert low_in_o2 == ["weights", "activations", "gradients"]
assert set(table["O3"].values()) == {"fp16"}

# %% [markdown]
# ### O0: fp32, to compare with
#
# Today it is the same loop with autocast and scaler disabled, as `train_today(None)` has it.


# %%
SAME = 0 if device.type == "cpu" else 2**-9  # sums in another order: 4 roundings of fp16


def distance(found, reference):
    """Largest difference of two lists of numbers, relative to the largest number."""
    found, reference = torch.as_tensor(found), torch.as_tensor(reference)
    return ((found - reference).abs().max() / reference.abs().max()).item()


def check_close(found, reference, tolerance=SAME):
    """Assert that two runs have the same losses and scale; `tolerance` 0: to the last bit."""
    assert distance(found.losses, reference.losses) <= tolerance
    assert found.scale == reference.scale
    how = f"within {tolerance:.0e} of the largest" if tolerance else "the last bit"
    print(f"the losses are equal to {how}; the loss scale is {found.scale:.0f} in both")


check_close(runs["fp32 today"], runs["O0"])
assert runs["O0"].losses[-1] < runs["O0"].losses[0] / 4  # it learns

# %% [markdown]
# ### O1: casts around ops
#
# Today: `torch.autocast` with `dtype=torch.float16`, and `GradScaler`. The idea is the same, with
# other lists of ops. For the ops of this network the lists agree, and so do the results:

# %%
check_close(runs["autocast"], runs["O1"])
assert runs["O1"].scale == 2.0**13  # three steps skipped, in both

# %% [markdown]
# To the last bit, on a CPU. (On a GPU, where a sum may be formed in another order, four roundings
# of fp16 are allowed, 2^-9 [*(not yet seen on a GPU)*](../data/results/README.md "apex-o1").) What became better is *where* casts happen: below Python, so that ops
# called from C++ are cast too, only inside the block, and on every device.
#
# Where the lists differ, results do. The one that matters for every classifier is `cross_entropy`:
# Apex had it on its black list and computed all of it in fp32. Autocast on CUDA leaves the call alone,
# and its log-softmax returns fp16 for fp16 logits ([notebook
# 09](09_xray_your_model.ipynb#The-surprise-in-cross-entropy)). `amp-lab migrate`, further down, does
# not tell you. So write `F.cross_entropy(logits.float(), targets)` when you move a classifier from O1:


# %%
def log_softmax_on_cuda(loss_function):
    """The dtype that the log-softmax of a loss returns under autocast to fp16, by CUDA's rules."""
    found = xray(nn.Linear(4, 10), torch.ones(8, 4), dtype=fp16, loss_fn=loss_function)
    (row,) = [row for row in found.rows if row.op == "_log_softmax"]
    return row.out_dtypes[0]


def first_class(logits):
    """Targets for these logits: the first class for each of them."""
    return torch.zeros(len(logits), dtype=torch.long, device=logits.device)


logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)).half()
with PatchedFunctions():  # O1 casts the logits to fp32 first
    in_o1 = F.cross_entropy(logits, first_class(logits))
assert in_o1 == F.cross_entropy(logits.float(), first_class(logits))
assert log_softmax_on_cuda(lambda z: F.cross_entropy(z, first_class(z))) is fp16
assert log_softmax_on_cuda(lambda z: F.cross_entropy(z.float(), first_class(z))) is fp32

# %% [markdown]
# ### O2: fp16 weights, fp32 masters
#
# Today: the same autocast and scaler. The parameters *are* the master weights, and the fp16 copies
# that O2 kept are the casts that autocast makes. How close are the two?

# %%
check_close(runs["autocast"], runs["O2"], tolerance=2**-9)  # 4 roundings of fp16
assert distance(runs["autocast"].losses, runs["O2"].losses) > 0

# %% [markdown]
# Close, but not equal. The difference is at the very start: Apex made the masters *after* it had
# cast the model, so they begin with the 11 bits of fp16. Start today's run from such weights, and
# nothing is left of the difference:

# %%
rounded = new_model()
rounded.load_state_dict({k: v.half() for k, v in new_model().state_dict().items()})  # and to fp32
assert rounded[0].weight.dtype is fp32
check_close(train_today(fp16, model=rounded), runs["O2"])

# %% [markdown]
# So O2 is autocast with weights cast once a step and not once a forward pass, and there is no
# reason to rebuild it.
#
# ### O3: everything in fp16
#
# Today: `model.half()` or `model.bfloat16()`, and the optimizer on what that gives. Apex offered it
# as "a performance ceiling", with no promise that it trains. Two things go wrong. The first: beside
# a weight of 1, an update of 0.0001 is less than half the spacing of fp16, and is swallowed.


# %%
def after_small_updates(level, steps=100):
    """A weight of 1, after so many updates by -0.0001 each."""
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
    with ToyApex() as amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = 0.5 * model(torch.ones(1, 1, device=device)).float().sum()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return model.weight.item()


moved = {level: after_small_updates(level) for level in LEVELS}
print({level: round(weight, 4) for level, weight in moved.items()})
assert moved["O3"] == 1  # as if it had not been trained
assert all(abs(moved[level] - 0.99) < 2**-11 for level in ("O0", "O1", "O2"))  # fp16 spacing

# %% [markdown]
# A hundred updates move the weight to 0.99 in every level but O3, where it has not moved at all
# ([notebook 01](01_number_formats.ipynb) calls that swamping). The second is what Adam makes of small
# gradients. It divides by the root of an average of their squares, plus 1e-8. A new square has a weight
# of 0.001 in that average; for a gradient of 0.0005 that is zero in fp16, and so is 1e-8. Look at the
# weights after a single step:

# %%
run = train_apex("O3", 1)
for name, weight in run.model.named_parameters():
    infinite = weight.isinf().any().item()
    is_small = (weight.grad.abs().max() < 1e-3).item()
    print(f"{name}: infinite {infinite!s:<5}  gradients all below 0.001 {is_small}")
    assert infinite == is_small == (name == "0.bias")
assert 0.001 * torch.tensor(5e-4).half() ** 2 == 0 == torch.tensor(1e-8).half()

# %% [markdown]
# The bias in front of batch normalisation does nothing, since the mean is subtracted after it. Its
# gradient is only what rounding left, its average of squares is zero, and something divided by zero is
# inf. In the next forward pass, inf minus inf makes NaN of all:

# %%
losses = train_apex("O3", 3).losses
print("losses in O3:", *(f"{loss:.1f}" for loss in losses))
assert losses[0] > 0
assert losses[1] != losses[1]  # NaN
one = torch.ones(())
assert torch.tensor(1e-8).bfloat16() > 0
assert one.bfloat16() - 0.001 == 1 != one.half() - 0.001  # swallowed in bf16, not in fp16

# %% [markdown]
# With `model.bfloat16()` squares and 1e-8 survive, but updates are
# swallowed earlier, since bf16 has 8 bits; it is for inference, or for those who add master weights
# or stochastic rounding by hand.
#
# ### What it costs in memory
#
# Count the bytes that each level holds for a parameter when the optimizer steps.


# %%
def held(model, optimizer):
    """Bytes per parameter, of each kind of tensor."""
    weights = list(model.parameters())
    own = {id(weight) for weight in weights}
    masters = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
    kinds = {
        "weights": weights,
        "gradients": [p.grad for p in weights],
        "master weights": masters,
        "their gradients": [p.grad for p in masters],
        "Adam": [t for s in optimizer.state.values() for t in s.values() if t.dim()],
    }
    count = sum(weight.numel() for weight in weights)
    return {k: sum(t.nbytes for t in v if t is not None) / count for k, v in kinds.items()}


per_parameter = held(runs["O0"].model, runs["O0"].optimizer)
print(per_parameter)
assert sum(per_parameter.values()) == 16

# %% [markdown]
# Beside the levels stand three of today's set-ups. In the second, each weight takes its step as
# soon as `backward` has its gradient, which is then freed. (That works in bf16, not with a scaler,
# which must see all gradients first.) The third is O3's successor.


# %%
def adam_in_backward(model):
    """Let each parameter step during `backward`, and free its gradient; the optimizers as one."""
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    states = {p: o.state[p] for p, o in optimizers.items()}
    return SimpleNamespace(param_groups=[{"params": list(optimizers)}], state=states)


model = new_model()
optimizer = adam_in_backward(model)
with torch.autocast(device.type, dtype=bf16):
    loss = F.mse_loss(model(batches[0][0]), batches[0][1])
loss.backward()
in_backward = held(model, optimizer)
assert in_backward["gradients"] == 0
assert all(p.grad is None for p in model.parameters())  # a scaler would find nothing to check

# %% [markdown]
# Take a single linear layer for all of them, since batch normalisation, which O2 kept in fp32,
# would blur the figures of so small a network.


# %%
def new_layer(dtype=fp32):
    return nn.Linear(8, 16).to(device, dtype)


def bytes_at_level(level):
    """Bytes per parameter after one step at a level of Apex."""
    layer = new_layer()
    with ToyApex() as amp:
        layer, optimizer = amp.initialize(layer, new_adam(layer), opt_level=level)
        loss = layer(batches[0][0]).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return held(layer, optimizer)


# %% [markdown]
# And with plain torch:


# %%
def bytes_today(layer, block, make_optimizer=new_adam):
    """The same today; `block` is around the forward pass."""
    optimizer = make_optimizer(layer)
    with block:
        loss = layer(batches[0][0].to(layer.weight.dtype)).float().square().mean()
    loss.backward()
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.step()
    return held(layer, optimizer)


assert sum(bytes_today(new_layer(), nullcontext()).values()) == 16

# %% [markdown]
# As a picture:

# %%
autocast = torch.autocast(device.type, dtype=bf16)
sizes = {level: bytes_at_level(level) for level in LEVELS}
sizes["autocast"] = bytes_today(new_layer(), autocast)
sizes["autocast, Adam in backward"] = bytes_today(new_layer(), autocast, adam_in_backward)
sizes["bf16 weights"] = bytes_today(new_layer(bf16), nullcontext())
_ = plots.bytes_per_parameter(sizes)
assert [sum(parts.values()) for parts in sizes.values()] == [16, 16, 20, 8, 16, 12, 8]

# %% [markdown]
# Seven stacked bars. O2 holds the most, 20 bytes: what fp16 saves on weights and gradients, the
# masters and their gradients more than use up. Autocast holds 16, as fp32 does. (Its casts of the
# weights live for a forward and backward pass only, and are not counted.) So if memory is short, do
# not look for O2. Let the optimizer step in `backward` (12), divide the state over several devices
# ([notebook 11](11_scale_out.ipynb)), or recompute activations ([notebook
# 07](07_training_recipes.ipynb#Checkpoint-activations)), which O1, O2 and autocast hold in fp16
# alike, and which in many models are the larger part ([notebook 09](09_xray_your_model.ipynb)).
#
# ## The loop, line by line
#
# Here is a loop as it stood in many repositories, with clipping. It is text, and it still runs,
# with the toy in place of Apex:

# %%
OLD_LOOP = """
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x, y in batches:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    clip_grad_norm_(amp.master_params(optimizer), 0.1)
    optimizer.step()
"""


def flat(model):
    """All weights of a model as one vector."""
    return parameters_to_vector(model.parameters()).detach()


old_model = new_model()
with ToyApex() as amp:
    given = {"amp": amp, "model": old_model, "optimizer": new_adam(old_model)}
    exec(OLD_LOOP, globals() | given)
assert old_model[0].weight.grad.norm() <= 0.1  # the last gradient is clipped

# %% [markdown]
# And the same today, with each changed line marked:

# %%
model = new_model()
optimizer = new_adam(model)
scaler = torch.amp.GradScaler(device.type)  # was amp.initialize(…)
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):  # new
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()  # was scaled_loss.backward(), in with amp.scale_loss(…)
    scaler.unscale_(optimizer)  # new: Apex had done it at the end of its block
    clip_grad_norm_(model.parameters(), 0.1)  # was amp.master_params(optimizer)
    scaler.step(optimizer)  # was optimizer.step()
    scaler.update()  # new: Apex had done it at the end of its block
assert distance(flat(model), flat(old_model)) <= SAME

# %% [markdown]
# The weights are the same. The one line that is easily forgotten is `unscale_`: without it,
# clipping looks at scaled gradients, and nearly nothing is left of them ([notebook
# 07](07_training_recipes.ipynb#Clip-gradients)).
#
# What of the options?
#
# | Apex | today |
# |---|---|
# | `delay_unscale=True`, to accumulate | `scale(loss).backward()` as often as you like, then one `step` |
# | `num_losses=2`, `loss_id=1` | one scaler for all losses; one *per optimizer* at most |
# | `loss_scale=128.0` | `scaler.update(128.0)` in place of `update()` |
# | `min_loss_scale`, `max_loss_scale` | check `get_scale()`; `scaler.update(new_scale)` |
# | `keep_batchnorm_fp32` | nothing: its weights and statistics are fp32, and stay so |
# | `cast_model_outputs` | `.float()` on the output, after the block |
# | `cast_model_type=torch.bfloat16` | `dtype=torch.bfloat16`, and no scaler |
#
# **Two losses and accumulation** need the same: several backward passes, one `unscale_`. The
# gradient is that of the sum, up to four roundings of fp16.

# %%
model, (x, y) = new_model(), batches[0]
(F.mse_loss(model(x), y) + F.l1_loss(model(x), y)).backward()
reference = model[0].weight.grad.clone()
model.zero_grad()
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)
for loss_function in (F.mse_loss, F.l1_loss):
    with torch.autocast(device.type, dtype=fp16):
        loss = loss_function(model(x), y)
    scaler.scale(loss).backward()
scaler.unscale_(torch.optim.SGD(model.parameters()))
assert (model[0].weight.grad - reference).norm() < 2**-9 * reference.norm()
assert {model[1].weight.dtype, model[1].running_mean.dtype} == {fp32}  # keep_batchnorm_fp32

# %% [markdown]
# **Limits for the scale.** Apex stopped at 2^24. `GradScaler` goes on, which does no harm: when the
# scale is too high, a step is skipped. Whoever wants limits sets them after `update`. (On a GPU,
# `get_scale` [waits for the
# device](https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling).)


# %%
def update_within(scaler, lowest, highest):
    """`scaler.update()`, and Apex's min_loss_scale and max_loss_scale."""
    scaler.update()
    wanted = min(max(scaler.get_scale(), lowest), highest)
    if wanted != scaler.get_scale():
        scaler.update(wanted)


# %% [markdown]
# With a scale that wants to grow after each good step, and is let no further than one doubling:


# %%
def scales_for(gradients, lowest, highest):
    """The scale after each of some steps, with these gradients."""
    weight = nn.Parameter(torch.ones(1, device=device))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**23, growth_interval=1)
    found = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale(gradient * weight).sum().backward()
        scaler.step(optimizer)
        update_within(scaler, lowest, highest)
        found.append(scaler.get_scale())
    return found


bad = float("inf")
scaler.update(128.0)
assert scaler.get_scale() == 128  # loss_scale=128.0
assert scales_for([0.1, 0.1, 0.1, bad, bad], 2.0**23, 2.0**24) == [2.0**24] * 3 + [2.0**23] * 2

# %% [markdown]
# ## From torch.cuda.amp to torch.amp
#
# The second generation of code is from 2020 to 2024. Its names still work, and warn:


# %%
def warnings_of(call):
    """The categories of all warnings that `call()` gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning.category for warning in caught]


old_names = {
    "torch.cuda.amp.autocast": lambda: torch.cuda.amp.autocast(enabled=False),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(enabled=False),
    "torch.cuda.amp.GradScaler": lambda: torch.cuda.amp.GradScaler(enabled=False),
    "torch.cpu.amp.GradScaler": lambda: torch.cpu.amp.GradScaler(enabled=False),
    "torch.cuda.amp.custom_fwd": lambda: torch.cuda.amp.custom_fwd(print),
    "torch.cuda.amp.custom_bwd": lambda: torch.cuda.amp.custom_bwd(print),
}
for name, call in old_names.items():
    assert warnings_of(call) == [FutureWarning], name
print(f"{len(old_names)} old names warn that they will go")

# %% [markdown]
# The new ones do not:

# %%
new_names = {
    "torch.autocast": lambda: torch.autocast("cuda", dtype=fp16, enabled=False),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cuda", enabled=False),
    "torch.amp.custom_fwd": lambda: torch.amp.custom_fwd(print, device_type="cuda"),
    "torch.amp.custom_bwd": lambda: torch.amp.custom_bwd(print, device_type="cuda"),
}
assert torch.autocast is torch.amp.autocast  # two names of one class
for name, call in new_names.items():
    assert warnings_of(call) == [], name

# %% [markdown]
# It looks like a change of name. There are two traps in it.
#
# **The default dtype.** The old classes had one of their own, fp16 for CUDA and bf16 for the CPU.
# The new one takes what is in force, which is the same at first, but not inside another block, and
# not after `torch.set_autocast_dtype`. So write the dtype out:

# %%
x = torch.ones(2, 2)
with torch.autocast("cpu", dtype=fp16), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with torch.cpu.amp.autocast():
        old = (x @ x).dtype
    with torch.autocast("cpu"):
        renamed = (x @ x).dtype
    with torch.autocast("cpu", dtype=bf16):
        written_out = (x @ x).dtype
print(f"old {names[old]}, renamed {names[renamed]}, written out {names[written_out]}")
assert (old, renamed, written_out) == (bf16, fp16, bf16)

# %% [markdown]
# **The order of arguments.** A device was put in front of all the others, and `dtype` came before
# `enabled`:
#
# | old | new |
# |---|---|
# | `autocast(enabled, dtype, cache_enabled)` | `autocast(device_type, dtype, enabled, cache_enabled)` |
# | `GradScaler(init_scale, growth_factor, …)` | `GradScaler(device, init_scale, growth_factor, …)` |
#
# With autocast the mistake raises an error. With the scaler it does not: the initial scale is taken
# for a device, and forgotten.


# %%
def enter_with_old_order():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", True, bf16):
            pass


try:
    enter_with_old_order()
except TypeError as error:
    print("TypeError:", str(error).splitlines()[0])
else:
    raise AssertionError("autocast took True for a dtype")
asked, got = torch.amp.GradScaler("cpu", 1024.0), torch.amp.GradScaler(1024.0)
print(f"GradScaler(1024.0) has the scale {got.get_scale():.0f}")
assert (asked.get_scale(), got.get_scale()) == (1024, 65536)

# %% [markdown]
# **Functions of your own** say for which device their decorators are meant:


# %%
class Exponential(torch.autograd.Function):
    """exp in fp32, whatever autocast says."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=device.type, cast_inputs=fp32)  # was without device_type
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.amp.custom_bwd(device_type=device.type)  # was @torch.cuda.amp.custom_bwd
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


x = torch.full((2, 2), 12.0, device=device, dtype=fp16, requires_grad=True)
with torch.autocast(device.type, dtype=fp16):
    y = Exponential.apply(x)
assert (y.dtype, y.isfinite().all().item()) == (fp32, True)  # fp16 overflows above 11.09
assert x.exp().isinf().all()

# %% [markdown]
# ### Let a tool do it
#
# `amp-lab migrate PATH` rewrites files and notebooks: the old names with exactly the behaviour that
# they had, and the names of Apex for which torch has an exact equal. It marks what is left, and
# reports mistakes that it can prove. Here is a program such as people wrote in 2021, which runs in
# bf16 on a CPU and in fp16 on a GPU:

# %%
OLD_PROGRAM = """
from torch.cuda.amp import GradScaler, autocast
from torch.cpu import amp as cpu_amp

use_cuda = device.type == "cuda"
scaler = GradScaler(2.0**12, enabled=use_cuda)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in batches:
    optimizer.zero_grad()
    with autocast(use_cuda), cpu_amp.autocast(not use_cuda):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""

# %% [markdown]
# Run it as it is. It warns:


# %%
where = device if device.type == "cuda" else torch.device("cpu")  # it knows no others


def run_program(text, action):
    """The losses of a program, with warnings treated as `action` says."""
    moved = [(x.to(where), y.to(where)) for x, y in batches]
    namespace = globals() | {"device": where, "model": new_model().to(where), "batches": moved}
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        exec(text, namespace)
    return namespace["losses"]


old_losses = run_program(OLD_PROGRAM, "ignore")
assert FutureWarning in warnings_of(lambda: run_program(OLD_PROGRAM, "always"))
off = OLD_PROGRAM.replace("(use_cuda), ", "(False), ").replace("(not use_cuda)", "(False)")
assert run_program(off, "ignore") != old_losses  # so autocast was on

# %% [markdown]
# The tool needs `libcst`, which comes with this project's environment. Without it, the rest of the
# notebook runs all the same.

# %%
if find_spec("libcst") is None:
    print("amp-lab migrate needs libcst, which is not here: pip install libcst")
else:
    from amp_lab.migrate import migrate_source

    new_program, _ = migrate_source(OLD_PROGRAM)
    old_lines, new_lines = OLD_PROGRAM.splitlines(), new_program.splitlines()
    changes = list(difflib.unified_diff(old_lines, new_lines, lineterm="", n=0))[2:]
    print("\n".join(line for line in changes if not line.startswith("@@")))
    assert run_program(new_program, "error") == old_losses
    assert migrate_source(new_program)[0] == new_program  # nothing is left to do

# %% [markdown]
# Lines with a minus went, those with a plus came. The new program runs with warnings as errors, and
# its losses are those of the old one, to the last bit. Note that the dtype is written out, and that
# the scale has moved to its new place: both traps are avoided.
#
# And the loop of Apex, from above? What `amp.initialize` and `amp.scale_loss` did is spread over
# model, optimizer and loop, so the tool leaves these lines as they are. It tells you for each of
# them what to write instead, and puts that into the file, as a comment above the line:

# %%
if find_spec("libcst") is not None:
    marked_loop, findings = migrate_source("from apex import amp\n" + OLD_LOOP)
    for finding in findings:
        print(f"line {finding.line}: {finding.message}\n")
    marks = [line for line in marked_loop.splitlines() if "# amp-lab migrate: " in line]
    assert len(marks) == len(findings) == 3
    assert [line for line in marked_loop.splitlines() if line not in marks][1:] == (
        OLD_LOOP.splitlines()
    )

# %% [markdown]
# With these three lines of advice you arrive at the loop that we wrote above, line by line.
#
# ## Checkpoints that Apex wrote
#
# Apex's manual asked for a file with three parts: the states of model, optimizer and `amp`, the
# last of which is an `OrderedDict` of the loss scalers. Many files have more, or differ:
#
# - names begin with `module.` where the model was wrapped for several GPUs;
# - at O2 weights look like fp32, but are fp16: Apex's `state_dict` only casts them;
# - before Apex did so, in 2019, and in files made by hand, they are fp16;
# - the master weights are not in the file, unless someone put them there, as the BERT of NVIDIA's
#   [DeepLearningExamples](https://github.com/NVIDIA/DeepLearningExamples) did, under `master params`:
#   `list(amp.master_params(optimizer))`, in the order of the optimizer's groups.
#
# Our optimizer has two groups, matrices and the rest, as for weight decay. So its order is not the
# model's:


# %%
def grouped_adam(model):
    """Adam with the matrices in its first group, and all else in its second."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.Adam([{"params": matrices}, {"params": others}], lr=1e-2)


shapes = [tuple(p.shape) for g in grouped_adam(new_model()).param_groups for p in g["params"]]
print("model:    ", [tuple(p.shape) for p in new_model().parameters()])
print("optimizer:", shapes)
assert shapes != [tuple(p.shape) for p in new_model().parameters()]

# %% [markdown]
# Train with the toy for eight steps, write such a file, and go on for eight more, which are the
# reference. With a window of 6 in place of 2000, the scale grows in between, and the counter of
# good steps matters.

# %%
folder = tempfile.TemporaryDirectory()
PATH = Path(folder.name) / "apex.pt"
HALF, WINDOW = 8, 6


def apex_state(amp, model, optimizer):
    """What `torch.save` was given."""
    weights = {k: v.float() if v.dtype is fp16 else v for k, v in model.state_dict().items()}
    scaler = {"loss_scale": amp.loss_scale.scale, "unskipped": amp.loss_scale.unskipped}
    return {
        "model": OrderedDict((f"module.{name}", value) for name, value in weights.items()),
        "optimizer": optimizer.state_dict(),
        "amp": OrderedDict(loss_scaler0=scaler),
        "master params": [p.detach() for p in amp.master_params(optimizer)],
    }


# %% [markdown]
# The whole run, which writes the file half-way:


# %%
def train_and_save(level):
    """Losses of the second half, and the scale at the end; the file is from after the first."""
    model = new_model()
    optimizer = grouped_adam(model)
    with ToyApex() as amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        amp.loss_scale.window = WINDOW
        for step in range(HALF):
            apex_step(amp, model, optimizer, step)
        torch.save(apex_state(amp, model, optimizer), PATH)
        losses = [apex_step(amp, model, optimizer, step) for step in range(HALF, 2 * HALF)]
        return Run(losses, model, optimizer, amp.loss_scale.scale)


whole = train_and_save("O1")
state = torch.load(PATH, weights_only=True)["amp"]
print(dict(state))
assert state["loss_scaler0"]["unskipped"] > 0

# %% [markdown]
# Such a file holds tensors, numbers and dictionaries only, so it can be read with
# `weights_only=True`, which runs no code from it. The scaler's state is translated by hand:
# `unskipped` is today's `_growth_tracker`.


# %%
def scaler_state(amp_state, number=0, growth_interval=2000):
    """The state of a GradScaler that goes on where a loss scaler of Apex stopped."""
    old = amp_state[f"loss_scaler{number}"]
    return {
        "scale": old["loss_scale"],
        "growth_factor": 2.0,  # Apex knew no other
        "backoff_factor": 0.5,
        "growth_interval": growth_interval,
        "_growth_tracker": old["unskipped"],
    }


known = torch.amp.GradScaler("cpu").state_dict().keys()
assert scaler_state(state).keys() == known

# %% [markdown]
# Then resume. The optimizer's state needs nothing: it is numbered in the order of its groups, and
# was fp32 at O1 and O2.


# %%
def resume(use_masters=False, leave_out=()):
    """The second half again, today, from the file."""
    file = torch.load(PATH, weights_only=True, map_location=device)
    consume_prefix_in_state_dict_if_present(file["model"], "module.")
    model = new_model()
    optimizer = grouped_adam(model)
    scaler = torch.amp.GradScaler(device.type, growth_interval=WINDOW)
    model.load_state_dict(file["model"])
    if "optimizer" not in leave_out:
        optimizer.load_state_dict(file["optimizer"])
    if "amp" not in leave_out:
        scaler.load_state_dict(scaler_state(file["amp"], growth_interval=WINDOW))
    if use_masters:
        weights = (p for group in optimizer.param_groups for p in group["params"])
        with torch.no_grad():
            for weight, master in zip(weights, file["master params"], strict=True):
                weight.copy_(master)
    steps = range(HALF, 2 * HALF)
    losses = [today_step(model, optimizer, scaler, fp16, step) for step in steps]
    return Run(losses, model, optimizer, scaler.get_scale())


# %% [markdown]
# From O1 the training goes on as if nothing had happened. Each part is needed for that:

# %%
check_close(resume(), whole)
for part in ("optimizer", "amp"):
    off = distance(resume(leave_out=[part]).losses, whole.losses)
    print(f"without {part!r}: the losses differ by more than 10 %: {off > 0.1}")
    assert off > 0.1

# %% [markdown]
# From O2 it goes on nearly so. What is missing are the bits of the masters that fp16 does not have.
# (Apex itself lost them too: on loading it made new masters from the fp16 weights.) With the
# masters, nothing is missing:

# %%
whole = train_and_save("O2")
check_close(resume(), whole, tolerance=2**-9)  # 4 roundings of fp16
assert resume().losses != whole.losses
check_close(resume(use_masters=True), whole)

# %% [markdown]
# And a file with fp16 weights? `load_state_dict` copies values *into* the parameters, which stay
# fp32; only `assign=True` would make them fp16 ([notebook
# 07](07_training_recipes.ipynb#Load-half-precision-weights)).

# %%
half_weights = {name: value.half() for name, value in whole.model.state_dict().items()}
model = new_model()
model.load_state_dict(half_weights)
assert {p.dtype for p in model.parameters()} == {fp32}
folder.cleanup()

# %% [markdown]
# ## Ten practices, tried
#
# An article about the way from Apex to `torch.amp` ends with ten pieces of advice. Most of them are
# good. But advice without a figure is hard to weigh, so here is an experiment for each.
# Those about time run on your device, with all of its cores; those about numbers are tiny, and run in
# fp16.

# %% tags=["nbval-ignore-output"]
config = {
    "quick": {"size": 1024, "seeds": 5, "epochs": 6, "batches": (1, 4, 16, 64, 256)},
    "full": {"size": 8192, "seeds": 10, "epochs": 20, "batches": (1, 8, 64, 512, 4096)},
}[scale]
torch.set_num_threads(threads)  # before the doctor measures
report = describe_device(device)
low = fp16 if report.recommended == "fp16" else bf16
fp32_rate, low_rate = (report.rates[names[dtype]] for dtype in (fp32, low))  # FLOP/s
print(f"{device}, {scale} scale, low precision: {names[low]}")
# No step below may multiply faster than the product. A quarter is to spare, since the doctor measured
# at one size, and at another moment; and a format that is emulated may be as fast as fp32.
most_flops = {"fp32": 1.25 * fp32_rate, names[low]: 1.25 * max(fp32_rate, low_rate)}
assert low is bf16 or report.speedup("fp16") >= 1.25  # what the doctor calls faster

# %% [markdown]
# ### 1. Know the hardware
#
# `amp-lab doctor` measures a matrix product in each precision, and says which to use. Measure one
# more, of the size that it takes on most devices, to see how far to trust it:

# %% tags=["nbval-ignore-output"]
print(f"{report.name}: use {report.recommended}, since {report.why}")
size, both = config["size"], ("fp32", names[low])
products = {p: matrix_product(device, Precision(p), size) for p in both}
ratio = compare(products, device=device, budget_s=3).ratio(*both)
found = report.speedup(names[low])
print(f"{names[low]} against fp32, {size} x {size}: {ratio}; the doctor says {found:.2f}x")
if ratio.trusted and report.trusted:  # a tenth, since the doctor's figure has an interval too
    assert ratio.interval[0] < 1.1 * found
    assert found < 1.1 * ratio.interval[1]

# %% [markdown]
# If the recommendation is fp32, AMP will save memory here, and no time. **Verdict: right, and it
# takes one command.** Do not go by the data sheet of the card: measure
# ([notebook 10](10_speed_ladder.ipynb)).
#
# ### 2. Start with the defaults
#
# The first scale, 65,536, is often too high, and the first steps are lost until it fits. Is it
# worth setting? Here the loss is 180 times too large:


# %%
def train_weighted(weight, steps, dtype=fp16, **options):
    """Train with a loss `weight` times too large, and a learning rate that makes up for it."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / weight)
    scaler = torch.amp.GradScaler(device.type, **options)
    losses = []
    with ScaleLog(scaler) as log:
        for step in range(steps):
            x, y = batches[step % len(batches)]
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
                loss = weight * F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item() / weight)
    return log, losses


# %% [markdown]
# With the default scale, and with the one that it settled at:

# %%
by_default, _ = train_weighted(180, 40)
fitting = by_default.scales[-1]
tuned, _ = train_weighted(180, 40, init_scale=fitting)
print(f"default: {len(by_default.skipped)} steps lost, then {fitting:.0f} fits")
print(f"tuned:   {len(tuned.skipped)} lost")
assert len(tuned.skipped) < len(by_default.skipped) == 7
assert by_default.skipped == list(range(7))  # at the start, and never again

# %% [markdown]
# Each lost step halves the scale, so the search takes the logarithm of the misfit. **Verdict:
# right.** A handful of steps matter in a run of forty, and not in one of forty thousand.
#
# ### 3. Watch the accuracy
#
# Watch it against what? Against the spread between seeds. A classifier of digits, in fp32 and in
# low precision, with the same seeds:

# %%
digits = load_dataset("digits", image_size=8, augment=False)


def tensors(part):
    """Images (N, 64) and targets (N,) of a part of the data; the three channels are alike."""
    x, y = part.batch(range(len(part)))
    return x[:, 0].flatten(1).to(device), y.to(device)


(train_x, train_y), (test_x, test_y) = tensors(digits.train), tensors(digits.test)
assert (len(train_x), len(test_x)) == (1438, 359)

# %% [markdown]
# One training, from a seed:


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
# As a picture, each dot a seed:

# %% tags=["nbval-ignore-output"]
scores = {names[d]: [accuracy(s, d) for s in range(config["seeds"])] for d in (fp32, low)}
means = [statistics.mean(found) for found in scores.values()]
spread = max(map(statistics.stdev, scores.values()))
print(f"means differ by {abs(means[0] - means[1]):.2f} points; seeds by {spread:.2f} (one sigma)")
_ = plots.scores_by_seed(scores)
assert min(means) > 90
assert abs(means[0] - means[1]) < min(max(found) - min(found) for found in scores.values())

# %% [markdown]
# Two rows of dots, one a seed, with a bar at each mean. The bars are nearer to each other than the
# outer dots of a row. **Verdict: right, with several seeds.** One run in each precision shows the luck of the
# seed.
#
# ### 4. Only the forward pass in autocast
#
# What happens if `backward` runs in the block too? Ops in the backward pass have the dtype of their
# forward ops, so it may look as if nothing changed. To see more, let us note every op and its
# dtypes. (These cells run on the CPU, whatever your device.)


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


with OpLog() as log:
    torch.ones(2, 2) @ torch.ones(2, 2)
assert log.products() == ["fp32"]

# %% [markdown]
# The model has an fp32 *island*, a layer that someone has taken out of autocast because it needs
# the precision.


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


# %% [markdown]
# Once with autocast on during `backward`, and once without:

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

# %% [markdown]
# After the block, the island's two products run in fp32, as they should. Inside, autocast casts
# them: the island has lost its precision in the backward pass, and casts are added. (The third
# product, of the layer that is not on the island, is in bf16 either way.) And nothing shows it: the
# gradients are fp32 tensors both times.

# %%
assert exact.dtype is blurred.dtype is fp32

# %% [markdown]
# **Verdict: right**, and with the optimizer in the block it gets worse: the cast of a weight is
# kept until the block ends, so the next forward pass sees old weights ([notebook
# 08](08_when_amp_breaks.ipynb#26-The-loss-stands-still-because-the-whole-loop-is-in-one-block)).
#
# ### 5. No casts by hand
#
# Code that was made for O2 or for early fp16 is full of `.half()` and `.float()`. Under autocast
# they are not needed. What do they cost?


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
# Two weights, two biases and the input are cast by autocast; casts by hand add three, each of which
# reads and writes an activation. That is time. The other cost is range, where a cast by hand
# overrules autocast's choice. A sum of squares that was fp32 becomes infinite:

# %%
error = torch.full((4, 8), 300.0)
with torch.autocast("cpu", dtype=fp16):
    left_alone, by_hand = error.square().sum(), error.half().square().sum()
print(f"left alone {left_alone.item():,.0f}, with .half() {by_hand.item()}")
assert (left_alone.item(), by_hand.item()) == (32 * 300**2, float("inf"))

# %% [markdown]
# **Verdict: right.** The exception is an island: in a block with autocast off, the inputs have to
# be cast, by `.float()`, as in practice 4.
#
# ### 6. Use the scaler
#
# The article says: always. Take a loss with a small weight, one term among others, and look at its
# gradients first:

# %%
WEIGHT = 2.0**-22
model, (x, y) = new_model(), batches[0]
underflow = gradient_underflow(model, WEIGHT * F.mse_loss(model(x), y))
for loss_scale in (1.0, 2.0**16):
    print(f"loss scale {loss_scale:<7.0f}: fp16 loses {underflow.outputs.lost(loss_scale):.0%}")
assert underflow.outputs.lost(1.0) > 0.9
assert underflow.outputs.lost(2.0**16) < 0.01

# %% [markdown]
# At scale 1 all of the gradients at the outputs of layers are zero in fp16, or nearly all. Now
# train, with a learning rate that makes up for the weight, in each precision, with a scaler and
# without. In the article's sample the loop has a scaler and no autocast, which is here called
# "fp32, scaler".

# %%
curves = {
    f"{names[dtype]}, {'scaler' if scaled else 'no scaler'}": train_weighted(
        WEIGHT, 40, dtype, enabled=scaled
    )[1]
    for dtype in (fp32, fp16, bf16)
    for scaled in (False, True)
}
shown = [name for name in curves if name not in ("fp32, scaler", "bf16, scaler")]
_ = plots.losses_by_setting({name: curves[name] for name in shown})

# %% [markdown]
# Four lines on a logarithmic axis. Three lie on each other; fp16 without a scaler stays above them.
# Two more are not drawn, since they are equal to others to the last bit:

# %%
last = {name: statistics.mean(losses[-4:]) for name, losses in curves.items()}
for name, loss in last.items():
    print(f"{name:<16} {loss:.1g}")
for name in ("fp16, scaler", "bf16, no scaler"):
    assert abs(last[name] / last["fp32, no scaler"] - 1) < 0.1, name  # within the width of the line
assert last["fp16, no scaler"] > 1.5 * last["fp32, no scaler"]
for name in ("fp32", "bf16"):
    off = distance(curves[f"{name}, scaler"], curves[f"{name}, no scaler"])
    assert off <= (0 if device.type == "cpu" else 2**-6), name

# %% [markdown]
# **Verdict: for fp16 alone.** bf16 has the range of fp32: multiplying by a power of two and
# dividing again changes no bit, and costs a pass over all gradients. And a scaler without autocast,
# as in the article's sample, is fp32, multiplied and divided: no mixed precision at all. One loop
# serves all with `GradScaler(enabled=dtype is torch.float16)`.
#
# ### 7. Tune initial scale and growth interval
#
# The scale grows after `growth_interval` good steps, and when it has grown too far a step is
# skipped. So a short interval skips often, and a long one starts too low for long, if it starts too
# low:

# %% tags=["nbval-ignore-output"]
settings = {
    "default": {},
    "interval 50": {"growth_interval": 50},
    "interval 10": {"growth_interval": 10},
    "interval 10, from 1": {"growth_interval": 10, "init_scale": 1.0},
    "from 1": {"init_scale": 1.0},
}
logs = {name: train_weighted(180, 300, **options)[0] for name, options in settings.items()}
_ = plots.scales_by_setting({name: (log.scales, log.skipped) for name, log in logs.items()})
skipped = {name: len(log.skipped) for name, log in logs.items()}
assert skipped["default"] < skipped["interval 50"] < skipped["interval 10"]
assert logs["from 1"].scales == [1.0] * 300

# %% [markdown]
# Five panels, with the scale of each step on a logarithmic axis, and a cross where a step was
# skipped. By default the scale falls, and stays. With an interval of 10 it knocks at the limit
# again and again. From 1 with the default interval it would need 2000 steps for each doubling: for
# 300 steps there is no scale to speak of.
#
# **Verdict: rarely needed.** Falling is quick, as practice 2 showed, and growing is slow. So start
# too high rather than too low, and leave both alone. Once the scale has found its place, an
# interval of n costs about one step in n:

# %% tags=["nbval-ignore-output"]
for interval in (50, 10):
    late = [step for step in logs[f"interval {interval}"].skipped if step >= 100]
    print(f"interval {interval}: {len(late)} of 200 later steps skipped")
    assert len(late) <= 2 * 200 / interval  # now and then it takes two to find the scale again

# %% [markdown]
# ### 8. Stay current
#
# What did the versions bring? Each row can be tried.

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
assert warnings_of(old_names["torch.cuda.amp.GradScaler"]) == [FutureWarning]

# %% [markdown]
# And which are here?

# %% tags=["nbval-ignore-output"]
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}")
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

# %% [markdown]
# **Verdict: right**, and the way to notice is to let tests fail on warnings, with
# `python -W error::FutureWarning`.
#
# ### 9. Try batch sizes
#
# Memory first. What fits on a card of 24 GiB can be computed without owning it
# ([notebook 09](09_xray_your_model.ipynb)): ResNet-50 with Adam on images of 224x224.

# %%
model = resnet50()
largest = {
    precision: largest_batch(model, (3, 224, 224), memory_bytes="24GiB", precision=precision)
    for precision in ("fp32", "fp16", "bf16")
}
print("largest batch:", largest)
assert 1.8 * largest["fp32"] < largest["fp16"] == largest["bf16"] < 2 * largest["fp32"]

# %% [markdown]
# Nearly twice the batch, since activations are halved, and weights are not. Does a larger batch
# make AMP pay more? Three wide layers, forward and backward:


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


with OpLog() as one, torch.autocast("cpu", dtype=bf16):
    nn.Linear(8, 8)(torch.ones(1, 8))
with OpLog() as many, torch.autocast("cpu", dtype=bf16):
    nn.Linear(8, 8)(torch.ones(256, 8))
assert one.count("_to_copy") == many.count("_to_copy") == 3  # weight, bias and input


# %% [markdown]
# Throughput on the left, its ratio on the right, both with their intervals. No step may multiply
# faster than the product of practice 1. Each weight takes part in two products per sample in the
# backward pass, but for those of the first layer, whose input needs no gradient.

# %% tags=["nbval-ignore-output"]
measured, speedups = {}, {}
for batch in config["batches"]:
    steps = {names[dtype]: passes(dtype, batch) for dtype in (fp32, low)}
    measured[batch] = compare(steps, device=device, budget_s=2)
    speedups[batch] = measured[batch].ratio(*steps)
    print(f"batch {batch:>4}: speed-up {speedups[batch]}")
    flops = 2 * batch * 512**2 * (3 * 3 - 1)
    for name in steps:
        rate = measured[batch].time_s(name).rate(flops)
        assert not report.trusted or not rate.is_above(most_flops[name])
_ = plots.throughput_over_batch(measured)

# %% [markdown]
# On the left, samples per second over the batch, both logarithmic; on the right, the speed-up, with
# a line at 1, below which AMP loses. Does the largest batch gain more than the smallest? We say so
# only if their intervals do not overlap:

# %% tags=["nbval-ignore-output"]
smallest, *_, largest_one = speedups.values()
if largest_one.is_above(smallest.interval[1]) and smallest.trusted:
    print("AMP gains more at the largest batch")
elif largest_one.is_below(smallest.interval[0]) and smallest.trusted:
    print("AMP gains less at the largest batch")
else:
    print("cannot tell here")
assert one.count("_to_copy") > many.count("_to_copy") / 256  # casts for each sample

# %% [markdown]
# Weights are cast once for each batch, as we counted before the figure: at batch 1 for a single
# sample, at the largest for all of them together. **Verdict: right.** But a larger batch is another
# training: it needs another learning rate.
#
# ### 10. Profile before and after
#
# Last, the proof that AMP does what it should: profile one step of a small convolutional network in
# fp32 and in low precision. `record_shapes` records the dtypes of each op as well, and the trace is
# a JSON file that can be read here, or looked at in a browser.

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
# Count each op by the dtype of its first input. A cast is a copy between two dtypes. To try it, a
# product of two tensors in bf16, each of them cast:

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


x = torch.ones(2, 2, device=device)
_, events = profile_once(lambda: x.bfloat16() @ x.bfloat16())
assert count_ops(events)["mm", "bf16"] == 1
assert count_ops(events)["cast", "bf16"] == 2

# %% [markdown]
# The step, and the two profiles:


# %% tags=["nbval-ignore-output"]
def convolutional_step(dtype):
    """A training step of three convolutions in a dtype; fp32 is without autocast."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 32**2, 16)).to(device)
    x = torch.randn(16, 64, 32, 32, device=device)

    def step():
        model.zero_grad()
        with Precision(names[dtype]).float32_mode(device.type):
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
                loss = model(x).square().mean()
            loss.backward()

    return step


profiles = {names[dtype]: profile_once(convolutional_step(dtype)) for dtype in (fp32, low)}
counts = {precision: count_ops(events) for precision, (_, events) in profiles.items()}
ARITHMETIC = ("convolution", "convolution_backward", "addmm", "mm")
for precision, ops in counts.items():
    found = {op: [p for (o, p) in ops if o == op and p] for op in ARITHMETIC}
    print(f"{precision}: {found}")
    assert all(dtypes == [precision] for dtypes in found.values())

# %% [markdown]
# All convolutions and products of the first profile ran in fp32, and all of the second in low
# precision, those of the backward pass too. What did they cost, and what did the casts?

# %% tags=["nbval-ignore-output"]
times = {}
self_time = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
for precision, (found, _) in profiles.items():
    averages = [e for e in found.key_averages() if e.key.startswith("aten::")]
    own = {e.key.removeprefix("aten::"): getattr(e, self_time) / 1e3 for e in averages}  # ms
    times[precision] = sum(own.values())
    casts = sum(count for (op, _), count in counts[precision].items() if op == "cast")
    print(f"{precision}: {times[precision]:.1f} ms, {casts} casts")
    for op in sorted(own, key=own.get, reverse=True)[:4]:
        print(f"    {op:<30}{own[op]:8.2f} ms")
    assert (casts == 0) == (precision == "fp32")

# %% [markdown]
# A profile slows down what it watches, and one step is no measurement. So how much faster the step is
# we ask `compare`. (A 3x3 convolution may get by with a quarter of the multiplications, by Winograd's
# method, and then seems to exceed the limit of the device.)

# %% tags=["nbval-ignore-output"]
steps = {names[dtype]: convolutional_step(dtype) for dtype in (fp32, low)}
measured = compare(steps, device=device, budget_s=4)
print("as fast as in fp32:", measured.ratio(*steps))
forward = 2 * 16 * 32**2 * 3 * 64 * 64 * 3**2
for name in steps:
    rate = measured.time_s(name).rate(3 * forward)
    assert not report.trusted or not rate.is_above(4 * most_flops[name])

# %% [markdown]
# Each profile has its four most expensive ops, by the time spent in the op itself. A `copy_` among
# them is a cast, or a change of layout, which convolutions on a CPU may need. **Verdict: right.** If a
# product stays in fp32, or casts are high on the list, you know where to look.
#
# ## Summary
#
# - Apex's levels were five settings. O1 is autocast with `GradScaler`, to the last bit where their
#   lists of ops agree; for cross-entropy they do not, so give it `logits.float()`. O2 is the same
#   with weights stored twice, for 20 bytes per parameter in place of 16. O3 is `model.half()`, and
#   swallows small updates.
# - In the loop, `scale_loss` becomes `scale(loss).backward()`, and what Apex did at the end of its block
#   is now written out: `unscale_` before clipping, `step`, `update`.
# - From `torch.cuda.amp`, write out the dtype, and pass arguments by keyword; `amp-lab migrate` does.
# - An Apex checkpoint holds the loss scale under other names, and at O2 no master weights. With both the
#   training goes on exactly.
# - Of the ten practices, eight hold as they stand: know the hardware, start with the defaults, watch
#   accuracy, keep `backward` out of the block, cast nothing by hand, stay current, try batch sizes,
#   profile. Tuning the scaler pays only where the first scale is too low. And "always use the scaler"
#   holds for fp16 alone.
#
# ## Exercises
#
# 1. Give the toy `min_loss_scale` and `max_loss_scale`, and hold it against `update_within`.
# 2. Apex cached the casts of weights at O1. Let a model use one weight twice, count the casts under
#    `PatchedFunctions` and under autocast, and add a cache. When must it be cleared?
# 3. Train O3 with `keep_batchnorm_fp32` and a fixed loss scale of 128, as people did. Do its two
#    failures go away? Would they with SGD?
# 4. Write a loop with two losses and two scalers, one for each optimizer. What is wrong with one scaler
#    for each *loss*?
# 5. Run `amp-lab migrate` on a project of yours from before 2024. Which of its findings are mistakes
#    that were there before?
#
# ## Further reading
#
# - NVIDIA, [Apex](https://github.com/NVIDIA/apex): [its `amp` as it last
#   was](https://github.com/NVIDIA/apex/tree/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp), whose
#   `frontend.py` has the levels, and the [manual](https://nvidia.github.io/apex/amp.html).
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html): the
#   reference, with the list of deprecated names, and [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html).
# - M. Carilli, who wrote much of both, [torch.cuda.amp > apex
#   amp](https://github.com/NVIDIA/apex/issues/818), 2020: why the one replaced the other.
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018:
#   master weights and loss scaling.
