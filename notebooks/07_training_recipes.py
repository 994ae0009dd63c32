# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Combine AMP with the rest of your training loop
#
# **What you'll do.** Take fourteen things that real training loops do, and put AMP into each: first
# the plain version, then the AMP version with every changed line marked, then the proof that both
# compute the same, and last what happens when a line is left out.
#
# **What you'll learn.**
# - the one rule behind most recipes: who looks at the gradients, and are they scaled at that
#   moment;
# - which habits need no change at all under AMP;
# - how each omission shows, since most of them raise no error.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast`, [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. No GPU. Reading all of it takes half an
# hour, but every recipe stands on its own. After running the cells up to the first one, go to the
# one that you need:
#
# | what the loop does | recipe |
# |---|---|
# | limits or inspects gradients | [Clip gradients](#Clip-gradients) |
# | sums gradients over several batches | [Accumulate gradients](#Accumulate-gradients) |
# | has gradients in the loss | [Penalise gradients](#Penalise-gradients) |
# | has several losses, several optimizers | [Use several losses and optimizers](#Use-several-losses-and-optimizers) |
# | changes the learning rate | [Schedule the learning rate](#Schedule-the-learning-rate) |
# | keeps an average of the weights | [Average the weights](#Average-the-weights) |
# | recomputes activations to save memory | [Checkpoint activations](#Checkpoint-activations) |
# | has its own forward and backward | [Write an autograd function](#Write-an-autograd-function) |
# | has parameter groups, or a fused optimizer | [Choose optimizer and groups](#Choose-optimizer-and-groups) |
# | is compiled | [Compile the model](#Compile-the-model) |
# | evaluates in between | [Evaluate during training](#Evaluate-during-training) |
# | stops, and goes on later | [Save and resume](#Save-and-resume) |
# | trains some layers only | [Freeze layers](#Freeze-layers) |
# | starts from fp16 or bf16 weights | [Load half precision weights](#Load-half-precision-weights) |

# %% tags=["nbval-ignore-output"]
import math
import tempfile
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from amp_lab import load_checkpoint, plots, save_checkpoint
from amp_lab.checkpoint import random_states, restore_random_states
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()
torch.set_num_threads(1)  # the tensors here are too small to share among CPU cores

# %% [markdown]
# ## The setting
#
# Every recipe trains a small network on five small batches, the last of which is shorter, as the
# last batch of an epoch often is. On so little even fp16 on a CPU is quick. Full scale is no larger
# here: what is asserted does not depend on the size.

# %%
torch.manual_seed(0)
inputs = torch.randn(72, 8)
targets = inputs.sin().mean(dim=1, keepdim=True)
batches = [
    (x.to(device), y.to(device)) for x, y in zip(inputs.split(16), targets.split(16), strict=True)
]
assert [len(x) for x, _ in batches] == [16, 16, 16, 16, 8]


def new_model():
    """The same network every time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


# %% [markdown]
# This is the plain loop that the recipes start from.


# %%
def train_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


# %% [markdown]
# And this is the same loop with AMP. A line marked `# AMP` is new; where it replaces another, the
# comment says which. The scaler is enabled for fp16 alone; for bf16 its methods do nothing, so one
# function serves both.


# %%
def train_amp(model, optimizer, scaler, dtype):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP


# %% [markdown]
# ## How a recipe is checked
#
# `change` runs a recipe on a new network and returns how far every weight has moved: in fp32 when
# it gets no dtype, else with AMP. It insists that no step was skipped, since a skipped step is a
# difference of another kind.


# %%
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def change(recipe, dtype=None, make_model=new_model, make_optimizer=sgd):
    """What `recipe` adds to the weights of a new model, as one vector."""
    model = make_model()
    optimizer = make_optimizer(model)
    before = parameters_to_vector(model.parameters()).detach().clone()
    if dtype is None:
        recipe(model, optimizer)
    else:
        scaler = torch.amp.GradScaler(device.type, enabled=(dtype is torch.float16))  # AMP
        recipe(model, optimizer, scaler, dtype)
        assert scaler.get_scale() == (2**16 if scaler.is_enabled() else 1)  # nothing was skipped
    return parameters_to_vector(model.parameters()).detach() - before


# %% [markdown]
# `check_same` holds that against fp32. How close is close enough? fp16 has 11 significant bits, so
# one rounding is wrong by up to 2^-11; bf16 has 8, so by up to 2^-8. In a pass through this network
# a value is rounded about ten times, as often up as down, which cancels in part. So four roundings
# are allowed: 2^-9 in fp16, 2^-6 in bf16.


# %%
def distance(found, reference):
    """Length of the difference of two vectors, relative to the length of the second."""
    return ((found - reference).norm() / reference.norm()).item()


def check_same(reference, amp):
    """Assert that `amp(dtype)` is `reference`, up to 4 roundings, in fp16 and in bf16."""
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        tolerance = 4 * torch.finfo(dtype).eps / 2  # eps/2 is one rounding
        assert distance(amp(dtype), reference) < tolerance, name
        print(f"{name}: the weights move as in fp32, to within 1/{1 / tolerance:.0f}")


check_same(change(train_plain), lambda dtype: change(train_amp, dtype))

# %% [markdown]
# The last helper makes the first half of an AMP step, up to the scaled gradients. The cells that
# show what goes wrong start from there.


# %%
def new_run(make_optimizer=sgd, **options):
    """A new model, optimizer and fp16 scaler."""
    model = new_model()
    return model, make_optimizer(model), torch.amp.GradScaler(device.type, **options)


def backward(model, scaler, batch=0, weight=1.0):
    """Forward pass in fp16, scaled backward pass: gradients are `get_scale()` times too large."""
    x, y = batches[batch]
    with torch.autocast(device.type, dtype=torch.float16):
        loss = F.mse_loss(model(x), y) * weight
    scaler.scale(loss).backward()
    return loss.detach()


def gradient_norm(model):
    """The length of all gradients taken as one vector."""
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


# %% [markdown]
# Some mistakes raise an error. This returns its text.


# %%
def error_of(call, *args):
    """The error that `call(*args)` must raise, as text."""
    try:
        call(*args)
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    raise LookupError("this was expected to fail")


# %% [markdown]
# ## The rule behind the recipes
#
# Follow the length of the gradient through one AMP step that also clips it to 0.1.

# %%
model, optimizer, scaler = new_run()
backward(model, scaler)
norms = {"backward": gradient_norm(model)}
scaler.unscale_(optimizer)
norms["unscale_"] = gradient_norm(model)
clip_grad_norm_(model.parameters(), 0.1)
norms["clip"] = gradient_norm(model)
scaler.step(optimizer)
norms["step"] = gradient_norm(model)
scaler.update()
_ = plots.gradient_norm_in_step(norms, scaled=["backward"])
assert math.isclose(norms["backward"] / norms["unscale_"], 2**16, rel_tol=1e-6)
assert math.isclose(norms["step"], 0.1, rel_tol=1e-3)

# %% [markdown]
# Four dots on a logarithmic axis. After `backward`, in the grey part on the left, the gradient is
# 65,536 times too large. `unscale_` brings it down to its true length, clipping to 0.1, and the
# step uses it as it is. So the rule is: **whatever looks at gradients belongs after `unscale_`, and
# whatever makes gradients starts from `scaler.scale(…)`.** What looks only at weights needs no
# change.
#
# ## Clip gradients
#
# You need this when single batches have gradients large enough to throw the training off course.
# The plain version:

# %%
MAX_NORM = 0.1


def clip_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


# %% [markdown]
# Clipping looks at gradients, so `unscale_` comes first. `step` notices that this has been done,
# and does not do it again.


# %%
def clip_amp(model, optimizer, scaler, dtype):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.unscale_(optimizer)  # AMP
        clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP


check_same(change(clip_plain), lambda dtype: change(clip_amp, dtype))
assert distance(change(clip_plain), change(train_plain)) > 0.2  # clipping did something

# %% [markdown]
# **Without `unscale_`**, the limit applies to the scaled gradient. Then `step` divides by the
# scale, and next to nothing is left:

# %%
model, optimizer, scaler = new_run()
backward(model, scaler)
seen = clip_grad_norm_(model.parameters(), MAX_NORM).item()  # too early
scaler.unscale_(optimizer)  # as step would
left = gradient_norm(model)
print(f"gradient meant for the step: {MAX_NORM}; what is left of it: {left:.1e}")
assert seen > 1000 * MAX_NORM
assert math.isclose(left, MAX_NORM / 2**16, rel_tol=1e-3)

# %% [markdown]
# No error, no NaN, and a training that stands still.
#
# When a gradient overflows, its norm is infinite, and clipping turns the infinite gradients into NaN
# and all others into zero. That is harmless, because `unscale_` has found the overflow before and
# `step` will skip. So leave `error_if_nonfinite` of `clip_grad_norm_` at `False`: in fp16, such a
# norm is no error.

# %%
model, optimizer, scaler = new_run()
backward(model, scaler, weight=math.inf)
scaler.unscale_(optimizer)
norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
scaler.step(optimizer)
assert not math.isfinite(norm)
assert all(p.isfinite().all() for p in model.parameters())
assert all(
    torch.equal(p, q) for p, q in zip(model.parameters(), new_model().parameters(), strict=True)
)
weight = nn.Parameter(torch.zeros(3))
weight.grad = torch.tensor([math.inf, 1.0, 2.0])
clip_grad_norm_([weight], MAX_NORM)
assert weight.grad[0].isnan()
assert weight.grad[1:].tolist() == [0.0, 0.0]

# %% [markdown]
# ## Accumulate gradients
#
# You need this when the batch that you want does not fit into memory: several small batches add up
# their gradients before one step. The plain version weights each by its share of the samples, so
# that the last group, which is shorter, is right as well.

# %%
GROUP = 2


def accumulate_plain(model, optimizer):
    for first in range(0, len(batches), GROUP):
        group = batches[first : first + GROUP]  # the last one may be shorter
        samples = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for x, y in group:
            loss = F.mse_loss(model(x), y) * (len(x) / samples)
            loss.backward()
        optimizer.step()


# %% [markdown]
# With AMP, `scale` belongs to every batch, but `step` and `update` only to the end of a group: all
# gradients that are added up must have the same scale. To clip as well, put `unscale_` there too.


# %%
def accumulate_amp(model, optimizer, scaler, dtype):
    for first in range(0, len(batches), GROUP):
        group = batches[first : first + GROUP]  # the last one may be shorter
        samples = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for x, y in group:
            with torch.autocast(device.type, dtype=dtype):  # AMP
                loss = F.mse_loss(model(x), y) * (len(x) / samples)
            scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP


check_same(change(accumulate_plain), lambda dtype: change(accumulate_amp, dtype))

# %% [markdown]
# Two small batches also equal one large one. This holds for a loss that is a mean over the samples,
# and a model without batch normalisation, which sees the small batches only.


# %%
def large_batches(model, optimizer):
    for x, y in zip(inputs.split(32), targets.split(32), strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


assert distance(change(accumulate_plain), change(large_batches)) < 1e-5  # the order of sums differs

# %% [markdown]
# **Without the right weights** the step has the wrong length. If nothing is divided, a group of two
# takes twice the step; if every loss is divided by `GROUP`, the last group, a single batch here,
# takes half of one. Neither has to do with AMP, and neither is an error that anything reports.


# %%
def group_gradient(group, weight):
    """Length of the gradient that the batches of a group add up to, each weighted."""
    model, _, scaler = new_run(enabled=False)
    for batch in group:
        backward(model, scaler, batch, weight)
    return gradient_norm(model)


for case, group, weight in (("not divided", [0, 1], 1), ("last, divided by GROUP", [4], 1 / GROUP)):
    ratio = group_gradient(group, weight) / group_gradient(group, 1 / len(group))
    print(f"{case:<22}: {ratio:.1f} times the gradient")
    assert math.isclose(ratio, {2: 2.0, 1: 0.5}[len(group)], rel_tol=1e-2)  # fp16

# %% [markdown]
# **With `unscale_` or `update` after every batch** it would be AMP that goes wrong, since gradients
# of different scales would be added up. The scaler refuses each of them alone:

# %%
model, optimizer, scaler = new_run()
backward(model, scaler, batch=0)
update_message = error_of(scaler.update)
scaler.unscale_(optimizer)
backward(model, scaler, batch=1)
unscale_message = error_of(scaler.unscale_, optimizer)
print(update_message, unscale_message, sep="\n")
assert "No inf checks were recorded prior to update" in update_message
assert "unscale_() has already been called" in unscale_message

# %% [markdown]
# It does not refuse the two of them together, because `update` makes it forget that the gradients
# were unscaled. Then each `unscale_` divides everything that has been added up so far, and `step`
# divides once more. Here the gradients of two batches are 1 and 2, so the sum should be 3:

# %%
weight = nn.Parameter(torch.zeros(1, device=device))
optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler(device.type)
for gradient in (1.0, 2.0):
    scaler.scale(gradient * weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()  # no error
scaler.step(optimizer)
print(f"the weight moves by {-weight.item():.1e}, and should move by 3")
assert -weight.item() < 1e-4

# %% [markdown]
# ## Penalise gradients
#
# You need this when the loss itself contains gradients, to keep a function smooth: then a gradient
# is part of the forward pass, and is differentiated again. The plain version adds the squared
# length of the gradient to the loss.

# %%
PENALTY = 0.1


def penalty_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        loss = loss + PENALTY * sum(grad.square().sum() for grad in grads)
        loss.backward()
        optimizer.step()


# %% [markdown]
# With AMP the inner gradient is made from the scaled loss, so that it survives fp16, and is
# unscaled by hand, because `unscale_` knows only about `.grad`. The penalty belongs to the forward
# pass, so it is computed under autocast again. The outer half is as usual.


# %%
def penalty_amp(model, optimizer, scaler, dtype):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaled = scaler.scale(loss)  # AMP
        grads = torch.autograd.grad(scaled, model.parameters(), create_graph=True)  # AMP: was loss
        inverse = 1 / scaler.get_scale()  # AMP: once, since it waits for the device
        grads = [grad * inverse for grad in grads]  # AMP
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = loss + PENALTY * sum(grad.square().sum() for grad in grads)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP


check_same(change(penalty_plain), lambda dtype: change(penalty_amp, dtype))
assert distance(change(penalty_plain), change(train_plain)) > 0.1  # the penalty did something

# %% [markdown]
# If the inner gradient overflows, so does the loss, and the step is skipped: nothing more to do. A
# scale that is far too large shows it, five times in a row.

# %%
model, optimizer, scaler = new_run(init_scale=2.0**40)
penalty_amp(model, optimizer, scaler, torch.float16)
assert scaler.get_scale() == 2.0**35
assert all(
    torch.equal(p, q) for p, q in zip(model.parameters(), new_model().parameters(), strict=True)
)

# %% [markdown]
# **Without unscaling by hand**, the penalty is 2^16 squared times too large:

# %%
model, optimizer, scaler = new_run()
x, y = batches[0]
with torch.autocast(device.type, dtype=torch.float16):
    loss = F.mse_loss(model(x), y)
grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
forgotten = sum(grad.square().sum() for grad in grads).item()
right = sum((grad / scaler.get_scale()).square().sum() for grad in grads).item()
print(f"{forgotten / right:.1e} times too large, 2^32 is {2.0**32:.1e}")
assert math.isclose(forgotten / right, 2.0**32, rel_tol=1e-3)

# %% [markdown]
# **Without `scale`** the inner gradients pass through fp16 unprotected. For a loss that has become
# small, as losses do, many of them vanish:


# %%
def zero_share(factor):
    """Share of the inner gradients that are zero when the loss is 2^-20 of what it was."""
    with torch.autocast(device.type, dtype=torch.float16):
        loss = F.mse_loss(model(x), y) * 2.0**-20
    grads = torch.autograd.grad(loss * factor, model.parameters())
    return (torch.cat([grad.flatten() for grad in grads]) == 0).float().mean().item()


unscaled, scaled = zero_share(1.0), zero_share(scaler.get_scale())
print(f"share of zeros: {unscaled:.1f} without the scale, {scaled:.1f} with it")
assert unscaled > 0.5
assert scaled == 0

# %% [markdown]
# ## Use several losses and optimizers
#
# You need this when parts of a model learn at different rates or from different losses. Here each
# layer has an optimizer of its own, and two losses pull at both.


# %%
def pair(model):
    return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]


def several_plain(model, optimizers):
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = model(x)
        square, absolute = F.mse_loss(output, y), F.l1_loss(output, y) / 4
        square.backward(retain_graph=True)
        absolute.backward()
        for optimizer in optimizers:
            optimizer.step()


# %% [markdown]
# **One scaler for all**: every loss is scaled by it, every optimizer steps through it, and `update`
# comes once, at the end. (`retain_graph` has nothing to do with AMP. One backward pass of
# `scaler.scale(square + absolute)` would do the same.)


# %%
def several_amp(model, optimizers, scaler, dtype):
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            output = model(x)
            square, absolute = F.mse_loss(output, y), F.l1_loss(output, y) / 4
        scaler.scale(square).backward(retain_graph=True)  # AMP: was square.backward(…)
        scaler.scale(absolute).backward()  # AMP: was absolute.backward()
        for optimizer in optimizers:
            scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP


check_same(
    change(several_plain, make_optimizer=pair),
    lambda dtype: change(several_amp, dtype, make_optimizer=pair),
)

# %% [markdown]
# **With one loss not scaled**, the other outweighs it 65,536 times, and the network hardly learns
# from it. Here `absolute` was left unscaled; the gradient is that of `square` alone.

# %%
model, _, scaler = new_run()
x, y = batches[0]
gradients = {}
for case in ("square alone", "absolute forgotten"):
    model.zero_grad()
    backward(model, scaler)  # square
    if case == "absolute forgotten":
        with torch.autocast(device.type, dtype=torch.float16):
            absolute = F.l1_loss(model(x), y) / 4
        absolute.backward()  # not scaled
    gradients[case] = torch.cat([p.grad.flatten() for p in model.parameters()])
assert distance(gradients["absolute forgotten"], gradients["square alone"]) < 1e-3

# %% [markdown]
# **With a loss in fp16** every step is skipped until the scale has halved, since the gradient of
# the loss is the scale itself, and 65,536 is more than fp16 holds. Autocast computes most losses of
# `torch.nn` in fp32. One put together by hand, such as a penalty on the size of the output, stays
# in fp16, unless `.float()` makes it fp32 before the mean is taken.

# %%
with torch.autocast(device.type, dtype=torch.float16):
    output = model(x)
    losses = {"abs().mean()": output.abs().mean(), "float() first": output.float().abs().mean()}
for name, loss in losses.items():
    (gradient,) = torch.autograd.grad(scaler.scale(loss), output, retain_graph=True)
    print(f"{name:<13} {loss.dtype}, gradient finite: {gradient.isfinite().all().item()}")
    assert gradient.isfinite().all() == (loss.dtype is torch.float32)
assert [loss.dtype for loss in losses.values()] == [torch.float16, torch.float32]

# %% [markdown]
# **With an `update` between the two steps**, the scale may change while the second optimizer's
# gradients still have the old one. So it does when the first overflows: then the second step is
# taken with gradients twice too large.


# %%
def second_step(early_update):
    """Length of the second optimizer's step when the gradients of the first overflow."""
    model, (first, second), scaler = new_run(pair)
    before = parameters_to_vector(model[2].parameters()).detach().clone()
    backward(model, scaler)
    model[0].weight.grad.fill_(math.inf)
    scaler.step(first)
    if early_update:
        scaler.update()  # halves the scale
    scaler.step(second)
    scaler.update()
    assert torch.equal(model[0].bias, new_model()[0].bias)  # the first step was skipped
    return (parameters_to_vector(model[2].parameters()).detach() - before).norm().item()


ratio = second_step(early_update=True) / second_step(early_update=False)
print(f"the second step is {ratio:.1f} times as long as it should be")
assert math.isclose(ratio, 2, rel_tol=1e-3)

# %% [markdown]
# That cell shows one thing more. When one optimizer overflows, **only its own step is skipped**;
# the other's is taken. If one without the other does harm, as it may in adversarial training, use
# one optimizer with two parameter groups: it steps or skips as a whole.
#
# ## Schedule the learning rate
#
# You need this nearly always. The plain version moves the learning rate on after every step:


# %%
def decay(optimizer):
    """A schedule from the full learning rate down to a tenth of it, in five steps."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5)


def schedule_plain(model, optimizer):
    scheduler = decay(optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()


# %% [markdown]
# With AMP a step may be skipped, and the schedule should count the steps that were taken. `step`
# does not say, but the scale does: it falls when, and only when, an optimizer was skipped.


# %%
def schedule_amp(model, optimizer, scaler, dtype):
    scheduler = decay(optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        before = scaler.get_scale()  # AMP
        scaler.update()  # AMP
        if scaler.get_scale() >= before:  # AMP: not skipped
            scheduler.step()


check_same(change(schedule_plain), lambda dtype: change(schedule_amp, dtype))

# %% [markdown]
# **Without this check**, skipped steps use up the schedule. A scale that is much too large at the
# start makes this visible. If the very first step is skipped, there is a warning:


# %%
def schedule_careless(model, optimizer, scaler):
    scheduler = decay(optimizer)
    for batch in range(5):
        optimizer.zero_grad()
        backward(model, scaler, batch)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, optimizer, scaler = new_run(init_scale=2.0**20)
    schedule_careless(model, optimizer, scaler)
skipped = round(20 - math.log2(scaler.get_scale()))
print(f"{skipped} of 5 steps skipped; learning rate {optimizer.param_groups[0]['lr']:.3f}")
print(*(str(w.message).partition(". ")[0] for w in caught))
assert skipped >= 1

# %% [markdown]
# The schedule has run to its end on the steps that were skipped. `schedule_amp` stops short by as
# many:

# %%
careful_model, careful, scaler = new_run(init_scale=2.0**20)
schedule_amp(careful_model, careful, scaler, torch.float16)
print(f"learning rate {careful.param_groups[0]['lr']:.3f}")
assert math.isclose(careful.param_groups[0]["lr"], 0.1 * (1 - 0.9 * (5 - skipped) / 5))
assert math.isclose(optimizer.param_groups[0]["lr"], 0.01)
assert "lr_scheduler.step()` before `optimizer.step()`" in str(caught[0].message)

# %% [markdown]
# Do not rely on that warning. It comes only if the first step of all is skipped, and with a fused
# optimizer not even then: the scaler calls its `step` every time, and the kernel does the skipping.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, optimizer, scaler = new_run(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True), init_scale=2.0**20
    )
    schedule_careless(model, optimizer, scaler)
assert round(20 - math.log2(scaler.get_scale())) == skipped
assert not caught

# %% [markdown]
# How much does it matter? As a rule of thumb, a few steps of ten thousand do not. `get_scale` has a
# price, since it waits for the device, and with a fused optimizer nothing else in the loop does
# ([notebook 03](03_grad_scaler_step_by_step.ipynb) counts the waits). Long schedules can do without
# the check; a short warm-up, which falls into the very steps in which the scaler searches, is better
# off with it.
#
# ## Average the weights
#
# You need this when the last weights jump about: an exponential moving average (EMA) of them often
# generalises better. The plain version updates the average after every step. (The last line puts it
# into the model, so that the average is what gets compared.)


# %%
def average_plain(model, optimizer):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


# %% [markdown]
# An average looks at weights, and autocast has left those in fp32. So AMP adds nothing but the
# usual lines. (A skipped step averages the same weights in once more, which does no harm.)


# %%
def average_amp(model, optimizer, scaler, dtype):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


check_same(change(average_plain), lambda dtype: change(average_amp, dtype))

# %% [markdown]
# **With the average in half precision**, kept so to save memory, it does not follow. With a decay
# of 0.999 one update adds a thousandth of the difference, which is less than half the spacing of
# the numbers there: it is rounded away. A weight that jumps from 1.0 to 1.2 shows it.

# %%
followed = {}
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
    weight = nn.ParameterList([nn.Parameter(torch.tensor(1.0, dtype=dtype))])
    average = AveragedModel(weight, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(weight)  # the first call copies
    weight[0].data.fill_(1.2)
    followed[name] = []
    for _ in range(2000):
        average.update_parameters(weight)
        followed[name].append(average.module[0].item())
_ = plots.weight_over_updates(followed).set_ylabel("average of the weight")
assert followed["fp32"][-1] > 1.15
assert followed["bf16"][-1] == followed["fp16"][-1] == 1.0

# %% [markdown]
# The fp32 average rises towards 1.2 in a curve that flattens out. The other two, one line on top of
# the other, stay at 1.0 forever. So make the average from an fp32 model, and convert a *copy* of it
# when you deploy it.
#
# ## Checkpoint activations
#
# You need this when activations fill the memory: a checkpointed part keeps only its input, and runs
# a second time in the backward pass. In the plain version, the first two layers do so:


# %%
class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        model = new_model()
        self.body, self.head = model[:2], model[2]

    def forward(self, x):
        hidden = checkpoint(self.body, x, use_reentrant=False)
        return self.head(hidden)


# %% [markdown]
# With AMP you change nothing in it. The second run happens in the backward pass, outside of the
# autocast block, but `checkpoint` has noted the state of autocast and puts it back. So both loops
# train it as they are (there is one exception, at the end of this recipe):

# %%
check_same(
    change(train_plain, make_model=Checkpointed),
    lambda dtype: change(train_amp, dtype, make_model=Checkpointed),
)
assert torch.equal(
    change(train_amp, torch.float16, make_model=Checkpointed), change(train_amp, torch.float16)
)

# %% [markdown]
# The last line says more: with and without checkpointing, the weights are equal to the last bit.
# Here is the state of autocast in both runs of a checkpointed function:

# %%
states = []


def watched(x):
    states.append(torch.is_autocast_enabled(device.type))
    return layer(x)


layer = new_model()[0]
with torch.autocast(device.type, dtype=torch.float16):
    loss = checkpoint(watched, batches[0][0], use_reentrant=False).float().sum()
states.append(torch.is_autocast_enabled(device.type))
loss.backward()
print("first run, backward, second run:", states)
assert states == [True, False, True]

# %% [markdown]
# **Without `use_reentrant=False`** comes the older kind of checkpoint, with a warning that asks you
# to choose. If no *input* requires a gradient, and a batch of data does not, it cuts the graph: the
# parameters in it get no gradient. With AMP it is the scaler that complains, in words that do not
# lead to the cause.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, _, scaler = new_run()
    body, head = model[:2], model[2]
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    with torch.autocast(device.type, dtype=torch.float16):
        loss = head(checkpoint(body, batches[0][0])).float().sum()
    scaler.scale(loss).backward()
message = error_of(scaler.step, optimizer)
print(message, *(str(w.message).partition(". ")[0] for w in caught), sep="\n")
assert all(p.grad is None for p in body.parameters())
assert "use_reentrant parameter should be passed explicitly" in str(caught[0].message)
assert "No inf checks were recorded for this optimizer" in message

# %% [markdown]
# **With selective checkpointing and a shared weight** the backward pass fails. A *selective*
# checkpoint keeps the results of some ops, here of matrix products, and expects to see the same ops
# again in the second run. If the weight was used before in the same autocast block, its cast came
# from autocast's cache in the first run, but has to be made anew in the second one:


# %%
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def save_products(context, op, *args, **kwargs):
    """A policy that keeps the results of matrix products, and recomputes everything else."""
    keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def shared_weight(**options):
    """Use a layer, and once more in a selective checkpoint; returns the gradient of its weight."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).to(device)
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    with torch.autocast(device.type, dtype=torch.float16, **options):
        hidden = layer(batches[0][0])
        output = checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
        loss = output.float().square().mean()
    loss.backward()
    return layer.weight.grad


# %% [markdown]
# Without the cache both runs make the same casts, so `cache_enabled=False` repairs it, at the price
# of a cast for every use:

# %%
message = error_of(shared_weight)
print(message.partition(". ")[0])
assert "_to_copy" in message
assert shared_weight(cache_enabled=False).count_nonzero() > 0

# %% [markdown]
# ## Write an autograd function
#
# You need this for an op with a backward pass of your own: a fused kernel, say, or one that saves
# memory. This plain one is a linear layer with ReLU, which keeps its output and not what came
# before the ReLU.


# %%
class LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        output = (x @ weight.T).relu()
        ctx.save_for_backward(x, weight, output)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, weight, output = ctx.saved_tensors
        grad = grad * (output > 0)
        return grad @ weight, grad.T @ x


# %% [markdown]
# For AMP, two decorators: `custom_fwd` notes the state of autocast, `custom_bwd` runs the backward
# pass in it. ([Notebook 02](02_autocast_dtypes.ipynb) shows which tensor has which dtype on the
# way.)


# %%
class AmpLinearReLU(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=device.type)  # AMP
    def forward(ctx, x, weight):
        output = (x @ weight.T).relu()
        ctx.save_for_backward(x, weight, output)
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type=device.type)  # AMP
    def backward(ctx, grad):
        x, weight, output = ctx.saved_tensors
        grad = grad * (output > 0)
        return grad @ weight, grad.T @ x


# %% [markdown]
# Both as the first layer of the network, trained by the two loops from the top:


# %%
class WithFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, _, self.last = new_model()
        self.function = function

    def forward(self, x):
        return self.last(self.function.apply(x, self.first.weight) + self.first.bias)


check_same(
    change(train_plain, make_model=lambda: WithFunction(LinearReLU)),
    lambda dtype: change(train_amp, dtype, make_model=lambda: WithFunction(AmpLinearReLU)),
)

# %% [markdown]
# **Without the decorators** the forward pass goes through. The backward pass does not, since
# autocast is off there, the gradient is fp16, and the saved weight is fp32:

# %%
x, y = batches[0]
with torch.autocast(device.type, dtype=torch.float16):
    loss = F.mse_loss(WithFunction(LinearReLU)(x), y)
message = error_of(loss.backward)
print(message)
assert "same dtype" in message

# %% [markdown]
# A function that was written for fp32, or needs its range, says so with `cast_inputs`: its tensors
# are cast on the way in, and autocast is off inside, in both passes. Here one that squares, and 300
# squared is more than fp16 holds.


# %%
class Length(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=device.type, cast_inputs=torch.float32)  # AMP
    def forward(ctx, x):
        length = (x * x).sum().sqrt()
        ctx.save_for_backward(x, length)
        return length

    @staticmethod
    @torch.amp.custom_bwd(device_type=device.type)  # AMP
    def backward(ctx, grad):
        x, length = ctx.saved_tensors
        return grad * x / length


# %%
x = torch.full((4,), 300.0, device=device, dtype=torch.float16, requires_grad=True)
with torch.autocast(device.type, dtype=torch.float16):
    inside, as_it_came = Length.apply(x), (x * x).sum().sqrt()
inside.backward()
print(f"with cast_inputs {inside.item():.0f}, without {as_it_came.item()}; gradient {x.grad.dtype}")
assert inside.item() == 600
assert as_it_came.item() == math.inf
assert x.grad.tolist() == [0.5] * 4

# %% [markdown]
# ## Choose optimizer and groups
#
# You need parameter groups when some parameters want a different learning rate or, as biases and
# norms do, no weight decay; and a fused optimizer when its step takes a share of the time that you
# notice. The plain version, with the implementation as an option:


# %%
def grouped(make, **options):
    """A function that makes the optimizer `make` for a model: weights decay, biases do not."""

    def make_optimizer(model):
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 1e-2}, {"params": biases, "lr": 2e-2}]
        return make(groups, lr=1e-2, weight_decay=0.0, **options)

    return make_optimizer


# %% [markdown]
# With AMP nothing changes: `unscale_` and `step` take the optimizer, whatever groups it has, and
# the gradients arrive as the optimizer expects them. This holds for each of these, in each
# implementation:

# %%
OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
IMPLEMENTATIONS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def differences(make_optimizer):
    """Distance to fp32 in fp16 and bf16, in roundings of each."""
    reference = change(train_plain, make_optimizer=make_optimizer)
    return {
        dtype: distance(change(train_amp, dtype, make_optimizer=make_optimizer), reference)
        / (torch.finfo(dtype).eps / 2)
        for dtype in (torch.float16, torch.bfloat16)
    }


# %% [markdown]
# In the table, `same` means what it does in all recipes: not further from fp32 than 4 roundings, in
# fp16 and in bf16.

# %%
print(f"{'':<8}", *(f"{name:<10}" for name in IMPLEMENTATIONS))
for name, make in OPTIMIZERS.items():
    row = [differences(grouped(make, **options)) for options in IMPLEMENTATIONS.values()]
    assert all(value < 4 for found in row for value in found.values())
    print(f"{name:<8}", *(f"{'same':<10}" for found in row))

# %% [markdown]
# **With `optimizer.step()` in place of `scaler.step(optimizer)`** nothing is unscaled. SGD takes a
# step 65,536 times too long, which nobody overlooks. Adam divides the gradient by the root of its
# running mean square, so that the factor cancels, and the training looks perfect:


# %%
def step_without_scaler(make, weight=1.0):
    """How far a model moves in a step of the optimizer itself, and in one through the scaler."""
    moves = []
    for careless in (True, False):
        model, optimizer, scaler = new_run(lambda model: make(model.parameters(), lr=1e-2))
        before = parameters_to_vector(model.parameters()).detach().clone()
        backward(model, scaler, weight=weight)
        if careless:
            optimizer.step()
        else:
            scaler.step(optimizer)
        moves.append(parameters_to_vector(model.parameters()).detach() - before)
    return moves


for name, make in OPTIMIZERS.items():
    careless, right = step_without_scaler(make)
    print(f"{name:<5}: {(careless.norm() / right.norm()).item():.0f} times the right step")
    assert (distance(careless, right) < 1e-3) == (name != "SGD")

# %% [markdown]
# Until the first overflow. The scaler would have skipped that step; Adam alone takes it, and from
# then on the weights are NaN.

# %%
careless, right = step_without_scaler(torch.optim.Adam, weight=math.inf)
print("Adam alone:", careless[:3].tolist(), " through the scaler:", right[:3].tolist())
assert careless.isnan().any()
assert right.count_nonzero() == 0

# %% [markdown]
# ## Compile the model
#
# You need this for speed, most of all on a GPU, where the casts of autocast can be fused with the
# ops around them [*(not yet seen on a GPU)*](../data/results/README.md "compiled-casts"). The plain version is one call around the model. The default backend, `inductor`,
# generates kernels, which takes its time. At the quick scale `aot_eager` stands in for it: as
# PyTorch's documents describe it, graphs of the forward and the backward pass are captured in the
# same way, but run as they are, with PyTorch's own kernels.

# %%
backend = "inductor" if scale == "full" and device.type == "cuda" else "aot_eager"


def compiled_model():
    return torch.compile(new_model(), backend=backend)


# %% [markdown]
# With AMP you change nothing in it. The compiler sees the autocast block around the call, and puts
# the casts into its graphs. (All names in the `state_dict` get a prefix. `model.compile()`, which works
# in place, leaves them as they are.)

# %%
check_same(
    change(train_plain, make_model=compiled_model),
    lambda dtype: change(train_amp, dtype, make_model=compiled_model),
)
assert all(name.startswith("_orig_mod.") for name in compiled_model().state_dict())
in_place = new_model()
in_place.compile(backend=backend)
assert list(in_place.state_dict()) == list(new_model().state_dict())

# %% [markdown]
# There is a price that no error shows: a compiled graph does not use autocast's cache, so it casts
# its weights at every call. That is no loss for a model that is called once in a step. But a
# compiled *layer* that an uncompiled loop calls five times casts its weights five times, where the
# plain layer would do so once. We can tell the two apart by changing the weight between two calls
# in one block, which you should never do in earnest: only a weight that is cast again shows it.


# %%
def casts_again(layer):
    """Whether a second call in the same autocast block casts the weight anew."""
    x = batches[0][0]
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
        before = layer(x)
        layer.weight.mul_(2)
        return not torch.equal(layer(x), before)


plain_layer, compiled_layer = new_model()[0], torch.compile(new_model()[0], backend=backend)
print("plain:", casts_again(plain_layer), " compiled:", casts_again(compiled_layer))
assert not casts_again(plain_layer)
assert casts_again(compiled_layer)

# %% [markdown]
# **Without the same autocast block in every call**, the model is compiled again, since compiled
# code is made for one state of autocast. A block forgotten in evaluation costs that time, and then
# runs in fp32. A "stance" turns the second compilation into an error:

# %%
torch.compiler.reset()  # forget what has been compiled so far
model, x = compiled_model(), batches[0][0]
with torch.autocast(device.type, dtype=torch.float16):
    model(x)
with torch.compiler.set_stance("fail_on_recompile"):
    with torch.autocast(device.type, dtype=torch.float16):
        output = model(x)  # the same state: nothing to compile
    message = error_of(model, x)  # no autocast
print(message.partition(". ")[0])
assert output.dtype is torch.float16
assert "recompile" in message

# %% [markdown]
# ## Evaluate during training
#
# You need this to know when to stop. The plain version switches to evaluation mode and back, and
# makes no graph:

# %%
scores = []


def evaluate_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            scores.append(F.mse_loss(model(x), y).item())
        model.train()


# %% [markdown]
# With AMP, evaluation gets an autocast block of its own, so that it sees the network as it will be
# used. The scaler has no part in it: there is no gradient.


# %%
def evaluate_amp(model, optimizer, scaler, dtype):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype):  # AMP: was torch.no_grad()
            scores.append(F.mse_loss(model(x), y).item())
        model.train()


check_same(change(evaluate_plain), lambda dtype: change(evaluate_amp, dtype))
fp32_scores, fp16_scores, bf16_scores = torch.tensor(scores).split(5)
assert distance(fp16_scores, fp32_scores) < 2**-9
assert distance(bf16_scores, fp32_scores) < 2**-6
assert torch.equal(change(evaluate_amp, torch.float16), change(train_amp, torch.float16))

# %% [markdown]
# The last line: training with evaluation in between is equal to training without, bit for bit.
#
# **With one block around everything**, evaluation does not see the step. Autocast keeps its casts
# of the weights until the outermost block ends, so it goes on with the weights from before:


# %%
def evaluation_sees_the_step(outer_block):
    """Whether the loss that an evaluation reports right after a step differs from that before."""
    model, optimizer, scaler = new_run()
    x, y = batches[0]
    with outer_block:
        before = backward(model, scaler)
        scaler.step(optimizer)
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
            after = F.mse_loss(model(x), y)
    return not torch.equal(before, after)


for case, outer_block, expected in (
    ("no block around both", nullcontext(), True),
    ("one around both", torch.autocast(device.type, dtype=torch.float16), False),
    ("a disabled one", torch.autocast(device.type, enabled=False), False),
):
    sees = evaluation_sees_the_step(outer_block)
    print(f"{case:<20}: evaluation sees the step: {sees}")
    assert sees is expected

# %% [markdown]
# Note the last line: even a disabled block keeps the cache until it ends, for the blocks inside it.
#
# That is what remains of an old and better known trap. In older versions of PyTorch, an evaluation
# *before* the training pass in the same block left a cast without a graph in the cache, and the
# weights got no gradient. In 2.11 and later they do:

# %%
model, _, scaler = new_run()
with torch.autocast(device.type, dtype=torch.float16):
    with torch.no_grad():
        model(batches[0][0])
    backward(model, scaler)
assert all(p.grad.count_nonzero() > 0 for p in model.parameters())

# %% [markdown]
# ## Save and resume
#
# You need this when a run is longer than the time you are given. The plain version saves all that
# the run carries from step to step: weights, the optimizer's state, random states, the position.
# Here is a network with dropout, which draws random numbers, and Adam, which has a state.

# %%
folder = tempfile.TemporaryDirectory()
PATH = Path(folder.name) / "checkpoint.pt"


def save_plain(step, model, optimizer):
    save_checkpoint(
        PATH,
        step=step,
        model=model,
        optimizer=optimizer,
        random=random_states(device),
    )


# %% [markdown]
# With AMP there is one thing more to carry, the scaler:


# %%
def save_amp(step, model, optimizer, scaler):
    save_checkpoint(
        PATH,
        step=step,
        model=model,
        optimizer=optimizer,
        random=random_states(device),
        scaler=scaler,  # AMP
    )


# %% [markdown]
# To test it, a run of eight steps is held against one that stops after four. A new process knows
# nothing of the old one, so everything is made anew before the states are loaded. The loss is
# larger here, so that the scale of 65,536 is too much, and the scaler has to search for one.


# %%
def new_dropout_run():
    """A new model with dropout, Adam, and a scaler."""
    model = nn.Sequential(*new_model(), nn.Dropout(0.2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, torch.amp.GradScaler(device.type)


def train_steps(model, optimizer, scaler, first, last):
    for step in range(first, last):
        x, y = batches[step % 4]
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):  # AMP
            loss = 16 * F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP


# %% [markdown]
# The whole run, saved on the way:

# %%
model, optimizer, scaler = new_dropout_run()
train_steps(model, optimizer, scaler, 0, 4)
save_amp(4, model, optimizer, scaler)
print(f"loss scale after 4 steps: {scaler.get_scale():.0f}")
train_steps(model, optimizer, scaler, 4, 8)
whole, whole_scaler = parameters_to_vector(model.parameters()).detach(), scaler.state_dict()
assert scaler.get_scale() < 2**16

# %% [markdown]
# And the second half again, from the file. `leave_out` names a part that is not restored, as if it
# had not been saved.


# %%
def resume(leave_out=None):
    """Weights and scaler state after the steps from the checkpoint on."""
    model, optimizer, scaler = new_dropout_run()
    torch.manual_seed(123)  # another random state, as in a new process
    state = load_checkpoint(PATH)
    model.load_state_dict(state["model"])
    if leave_out != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if leave_out != "scaler":
        scaler.load_state_dict(state["scaler"])  # AMP
    if leave_out != "random":
        restore_random_states(state["random"], device)
    train_steps(model, optimizer, scaler, state["step"], 8)
    return parameters_to_vector(model.parameters()).detach(), scaler.state_dict()


resumed, resumed_scaler = resume()
assert torch.equal(resumed, whole)
assert resumed_scaler == whole_scaler
print("equal to the last bit, and so is the scaler:", resumed_scaler)

# %% [markdown]
# **Without the scaler** the scale starts at 65,536 again, and the steps in which it searches are
# lost. No part may be missing:

# %%
for part in ("scaler", "optimizer", "random"):
    found, _ = resume(leave_out=part)
    print(f"without {part:<9}: equal to the run without a stop: {torch.equal(found, whole)}")
    assert not torch.equal(found, whole)
folder.cleanup()

# %% [markdown]
# In bf16 the scaler is disabled, and its state is empty. An enabled one refuses it, which matters
# to whoever continues a bf16 run in fp16. Load it only if there is something in it.

# %%
disabled = torch.amp.GradScaler(device.type, enabled=False)
message = error_of(torch.amp.GradScaler(device.type).load_state_dict, disabled.state_dict())
print(message)
assert disabled.state_dict() == {}
assert "source state dict is empty" in message

# %% [markdown]
# ## Freeze layers
#
# You need this in transfer learning. The plain version switches gradients off and gives the
# optimizer what is left:


# %%
def frozen_model():
    model = new_model()
    model[0].requires_grad_(False)
    return model


def sgd_of_trained(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


# %% [markdown]
# With AMP nothing changes:

# %%
options = {"make_model": frozen_model, "make_optimizer": sgd_of_trained}
reference = change(train_plain, **options)
check_same(reference, lambda dtype: change(train_amp, dtype, **options))
weights = new_model()[0].weight.numel() + new_model()[0].bias.numel()
assert reference[:weights].count_nonzero() == 0  # frozen

# %% [markdown]
# But one thing becomes possible. Autocast casts a frozen weight anew in every use (it caches only
# what is trained), and nobody else needs it in fp32, since no update is ever added to it. So **what
# is frozen may be stored in half precision**, which saves half its memory and the casts, and
# changes no bit of the result:


# %%
def frozen_in_half():
    model = frozen_model()
    model[0].half()
    return model


in_half = change(train_amp, torch.float16, frozen_in_half, sgd_of_trained)
assert torch.equal(in_half, change(train_amp, torch.float16, frozen_model, sgd_of_trained))

# %% [markdown]
# (That holds for layers that autocast runs in half precision, linear layers and convolutions. Leave
# normalisation in fp32; its running statistics, by the way, go on moving when it is frozen, as
# [notebook 06](06_caltech256_resnet50.ipynb) shows.)
#
# **With an optimizer all of whose parameters are frozen**, the scaler has nothing to look at, and
# says so. A plain `step` would have done nothing, so leave out that optimizer as long as its part
# is frozen. If only some of its parameters are, all is well.

# %%
model = frozen_model()
scaler = torch.amp.GradScaler(device.type)
backward(model, scaler)
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
message = error_of(scaler.step, optimizer)
optimizer.step()  # the plain step does nothing
print(message)
assert torch.equal(model[0].weight, new_model()[0].weight)
assert "No inf checks were recorded for this optimizer" in message
scaler.step(sgd(model))  # frozen and trained parameters: no error

# %% [markdown]
# ## Load half precision weights
#
# You need this when the weights that you start from were published in fp16 or bf16. The plain
# version makes the model, and loads:

# %%
half_weights = {name: tensor.half() for name, tensor in new_model().state_dict().items()}


def loaded_model():
    model = new_model()
    model.load_state_dict(half_weights)
    return model


# %% [markdown]
# With AMP nothing changes: `load_state_dict` copies values *into* the parameters, and those stay
# fp32.

# %%
assert all(p.dtype is torch.float32 for p in loaded_model().parameters())
check_same(
    change(train_plain, make_model=loaded_model),
    lambda dtype: change(train_amp, dtype, make_model=loaded_model),
)

# %% [markdown]
# **With parameters that are half precision themselves**, training goes wrong. They become so by
# `.half()` on the model, by `load_state_dict(…, assign=True)`, or by a library's option to load
# weights in the dtype of the file. In fp16 the scaler notices:

# %%
model = new_model()
model.load_state_dict(half_weights, assign=True)
scaler = torch.amp.GradScaler(device.type)
backward(model, scaler)
message = error_of(scaler.step, sgd(model))
print(message)
assert message == "ValueError: Attempting to unscale FP16 gradients."

# %% [markdown]
# In bf16 nobody does. The loop runs, and updates that are small beside their weight are rounded
# away ([notebook 01](01_number_formats.ipynb) calls it swamping). With a learning rate as small as
# one for fine-tuning, count the weights that moved at all:


# %%
def moved(convert):
    """Share of the weights that five steps of SGD with a small learning rate change, in bf16."""
    steps = change(
        train_amp,
        torch.bfloat16,
        make_model=lambda: convert(loaded_model()),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
    )
    return steps.count_nonzero().item() / steps.numel()


in_fp32, in_bf16 = moved(lambda model: model), moved(lambda model: model.bfloat16())
print(f"weights that moved: fp32 {in_fp32:.1f}, bf16 {in_bf16:.1f}")
assert in_fp32 > 0.9
assert in_bf16 < 0.1

# %% [markdown]
# The cure is one call before the optimizer is made: `model.float()`. It costs nothing in accuracy,
# since fp32 holds every fp16 and every bf16 number.

# %%
model = new_model().half()
before = [p.clone() for p in model.parameters()]
model.float()
assert all(torch.equal(p, q.float()) for p, q in zip(model.parameters(), before, strict=True))
assert all(p.dtype is torch.float32 for p in model.parameters())

# %% [markdown]
# ## Summary
#
# Whatever makes gradients starts from `scaler.scale(…)`; whatever looks at them comes after
# `unscale_`; whatever looks at weights stays as it was, because weights are fp32. The lines below
# come on top of the four of every AMP loop: autocast, `scale`, `scaler.step`, `update`. If it
# breaks all the same, [notebook 08](08_when_amp_breaks.ipynb) starts from the error message.
#
# | recipe | what AMP adds | what goes wrong without |
# |---|---|---|
# | [Clip](#Clip-gradients) | `scaler.unscale_(optimizer)` before clipping | the limit applies to scaled gradients: no progress |
# | [Accumulate](#Accumulate-gradients) | `scale` per batch; `step` and `update` per group | the scaler raises, but not on `unscale_` and `update` together; a wrong divisor raises nothing |
# | [Penalise](#Penalise-gradients) | scale the inner loss, divide its gradients by `get_scale()` | a penalty 2^32 times too large, or zeros |
# | [Several](#Use-several-losses-and-optimizers) | one scaler, scale every loss, one `update` at the end | a loss is ignored; a step is too long |
# | [Schedule](#Schedule-the-learning-rate) | `scheduler.step()` only if the scale did not fall | skipped steps use up the schedule |
# | [Average](#Average-the-weights) | nothing; the average in fp32 | in half precision it never moves |
# | [Checkpoint activations](#Checkpoint-activations) | nothing; `use_reentrant=False`; no cache if it is selective and shares a weight | parameters without a gradient; an error in backward |
# | [Function](#Write-an-autograd-function) | `custom_fwd`, `custom_bwd`, both with `device_type` | dtypes that do not match in the backward pass |
# | [Optimizer](#Choose-optimizer-and-groups) | nothing; always `scaler.step` | Adam hides it, until the first overflow makes NaN |
# | [Compile](#Compile-the-model) | nothing; always the same autocast state | it compiles again; a compiled layer casts its weights at every call |
# | [Evaluate](#Evaluate-during-training) | a block of its own, no scaler | stale weights, if one block is around it all |
# | [Resume](#Save-and-resume) | `scaler.state_dict()` in the checkpoint | skipped steps, another result |
# | [Freeze](#Freeze-layers) | nothing; an optimizer of frozen parts alone is left out | `No inf checks were recorded` |
# | [Load](#Load-half-precision-weights) | nothing; `model.float()` if parameters are half | fp16 raises; bf16 stands still |
#
# ## Exercises
#
# 1. Write a loop that accumulates, clips and schedules at once, and hold it against fp32 with
#    `check_same`. Where does `unscale_` go?
# 2. Penalise the gradient with respect to the *input*, as a Wasserstein GAN does: make `x` require
#    one, and pull its length towards 1. Which of the marked lines change?
# 3. In `second_step`, replace the two optimizers by one with two groups. Which of the two parts
#    takes its step now when the other overflows?
# 4. With a fused Adam, find out without `get_scale` whether a step was skipped. (Hint: look at the
#    `step` in `optimizer.state`.) Does reading it wait for the device?
# 5. Stop the accumulating loop between the two batches of a group, and resume there, bitwise. What
#    else has to be in the checkpoint?
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): clipping, accumulation,
#   gradient penalty, several losses, custom functions.
# - PyTorch, [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html): what
#   it restores for the second run, and how the two kinds differ.
# - PyTorch, [`torch.optim`](https://docs.pytorch.org/docs/stable/optim.html): which optimizers have
#   `foreach` and `fused`; averages of weights.
# - PyTorch, [`torch.compile`](https://docs.pytorch.org/docs/stable/generated/torch.compile.html):
#   its backends and options.
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018:
#   why the weights are kept in fp32.
# - I. Gulrajani et al., [Improved Training of Wasserstein GANs](https://arxiv.org/abs/1704.00028),
#   2017: the gradient penalty.
