# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Follow a GradScaler step by step
#
# **What you'll do.** Train a network of one weight and one bias for one step in fp32 and for one step
# in mixed precision, and look at the numbers on the way. Then make the gradients overflow on purpose,
# see the scaler recover, and write a scaler of your own that keeps the scale as PyTorch's does.
#
# **What you'll learn.**
# - what `scale`, `unscale_`, `step` and `update` each do, in which order, and why;
# - why a step is sometimes skipped, and why that is no error;
# - how the loss scale finds its value, and how to read its curve.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb) for why small gradients vanish in fp16,
# and [notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast`. You need no GPU.

# %% tags=["nbval-ignore-output"]
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from course import figures, start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# A gradient of 2^-26 is too small for fp16. We send it through fp16 once as it is, and once multiplied
# by 4096 before and divided by 4096 afterwards, in fp32. Before you run this: what will come out in
# each case?

# %%
gradient = torch.tensor(2.0**-26)
lost = gradient.half().float()
kept = (gradient * 4096).half().float() / 4096
print(f"{gradient:.3e} through fp16: {lost:.3e}; scaled, through fp16, unscaled: {kept:.3e}")
assert lost == 0
assert kept == gradient

# %% [markdown]
# As it is, the gradient becomes zero; scaled, it comes back exactly as it was.
#
# We cannot multiply the gradients *before* they are computed. But backpropagation is linear: if the
# loss is 4096 times as large, so is every gradient. So we scale the loss, which costs one
# multiplication, and that factor is the **loss scale**. `torch.amp.GradScaler` does this for us, undoes
# it before the optimizer sees the gradients, and looks for a good scale while we train.
#
# ## A network of two parameters
#
# One linear layer with one input and one output has two parameters, so we can print all of them. The
# output itself serves as the loss. Everything is drawn on the CPU and then moved, so that the numbers
# are the same on every device.


# %%
def make():
    """The same layer, input and optimizer every time."""
    torch.manual_seed(47)
    layer = nn.Linear(1, 1)
    x = torch.randn(1, 1)
    layer.to(device)
    return layer, x.to(device), torch.optim.SGD(layer.parameters(), lr=1.0)


def show(stage, layer):
    """Print both parameters and their gradients."""
    line = f"{stage:<18}"
    for name, p in layer.named_parameters():
        gradient = "none" if p.grad is None else f"{p.grad.item():.4f}"
        line += f"{name} {p.item():7.4f}, gradient {gradient:<12}"
    print(line.rstrip())


# %% [markdown]
# The numbers in the text come from these cells, and `check` asserts parameters and gradients, to half a
# unit of the fourth decimal.


# %%
def check(layer, weight, bias, grads=None):
    """Assert the printed values: parameters, and gradients where there are any."""
    found = [layer.weight.item(), layer.bias.item()]
    if grads is not None:
        found += [layer.weight.grad.item(), layer.bias.grad.item()]
    torch.testing.assert_close(found, [weight, bias, *(grads or [])], atol=0.5e-4, rtol=0)


layer, x, optimizer = make()
show("at the start", layer)
print(f"input {x.item():.4f}")
assert abs(x.item() - -0.0591) < 0.5e-4
check(layer, -0.8939, -0.9002)

# %% [markdown]
# ## One step in FP32
#
# We begin with the forward pass: weight times input plus bias.

# %%
output = layer(x)
print(f"output {output.item():.4f}, {output.dtype}")
assert output.dtype is torch.float32
assert abs(output.item() - -0.8473) < 0.5e-4

# %% [markdown]
# Next comes the backward pass. The derivative of `weight * x + bias` is `x` for the weight, and 1 for
# the bias, so we expect the gradients -0.0591 and 1.

# %%
output.backward()
show("after backward", layer)
check(layer, -0.8939, -0.9002, [-0.0591, 1.0])

# %% [markdown]
# The optimizer subtracts each gradient as it is, since the learning rate is 1.

# %%
optimizer.step()
optimizer.zero_grad()
show("after step", layer)
check(layer, -0.8348, -1.9002)

# %% [markdown]
# The weight went from -0.8939 to -0.8348, and the bias from -0.9002 to -1.9002. That is all there is to
# an ordinary step: forward, backward, step. Now we go on with the same layer in mixed precision.
#
# ## One step with autocast and GradScaler
#
# Our scaler starts at 4096, so that the numbers are easy to follow; by default it starts at 65536
# (2^16). Lines that an fp32 loop does not have are marked `# AMP`.

# %%
scaler = torch.amp.GradScaler(device.type, init_scale=4096)  # AMP: once, before the training loop
assert torch.amp.GradScaler(device.type).get_scale() == 65536

with torch.autocast(device.type, dtype=torch.float16):  # AMP: the forward pass and the loss
    output = layer(x)
print(f"output {output.item():.4f}, {output.dtype}; the parameters stay {layer.weight.dtype}")
assert output.dtype is torch.float16
assert layer.weight.dtype is torch.float32
assert abs(output.item() - -1.8506) < 0.5e-4

# %% [markdown]
# The output is fp16, because a linear layer runs in fp16 under autocast. The parameters are the fp32
# **master weights**: autocast used [fp16 copies](02_autocast_dtypes.ipynb) of them for this one call.
#
# `scale` multiplies the loss by 4096. Before you run the next cell: what will the two gradients be
# after `backward`?

# %%
scaler.scale(output).backward()  # AMP: was output.backward()
show("after backward", layer)
check(layer, -0.8348, -1.9002, [-242.25, 4096.0])
assert layer.weight.grad.dtype is torch.float32

# %% [markdown]
# Both gradients are 4096 times too large, -242.25 and 4096. They passed through fp16 on the way, and
# arrived in fp32, the dtype of their parameters.
#
# `unscale_` divides them by the scale, in place, and notes whether any of them is infinite or NaN.
# If your loop does not look at its gradients, you may leave this line out, because `step` does it
# then. If it clips or logs gradients, you need it here: until now they are 4096 times too large.

# %%
scaler.unscale_(optimizer)  # AMP: optional
show("after unscale_", layer)
check(layer, -0.8348, -1.9002, [-0.0591, 1.0])

# %% [markdown]
# The gradients are those of the fp32 step again, within the precision of fp16. To see what is left of
# the difference we print more digits: the derivative for the weight is the input, rounded to the 11
# significant bits of fp16.

# %%
print(f"in fp32 {x.item():.8f}, through fp16 {layer.weight.grad.item():.8f}")
assert layer.weight.grad.item() == x.half().item()

# %% [markdown]
# The two differ from the sixth decimal on. Now `step` calls `optimizer.step()`, but only if
# `unscale_` found no infinity and no NaN. It found none, so the parameters move as in fp32.

# %%
scaler.step(optimizer)  # AMP: was optimizer.step()
show("after step", layer)
check(layer, -0.7756, -2.9002, [-0.0591, 1.0])

# %% [markdown]
# `update` comes last in the iteration, after `step` has been called for every optimizer. It adjusts the
# scale for the next iteration, and makes the scaler forget which optimizers it has unscaled.

# %%
scaler.update()  # AMP
optimizer.zero_grad()
good_steps = scaler.state_dict()["_growth_tracker"]
print(f"scale {scaler.get_scale():.0f}, good steps in a row {good_steps}")
assert (scaler.get_scale(), good_steps) == (4096, 1)

# %% [markdown]
# Nothing overflowed, so `update` counted one good step and left the scale at 4096.
#
# Keep to this order. Unscaling twice, for example, would divide by 4096 twice, so the scaler
# refuses it until `update` has been called. [Notebook 08](08_when_amp_breaks.ipynb) has the others.

# %%
scaler.scale(layer(x)).backward()
scaler.unscale_(optimizer)
try:
    scaler.unscale_(optimizer)
except RuntimeError as error:
    message = str(error)
print(message)
assert "unscale_() has already been called" in message

# %% [markdown]
# ## An overflow: the step is skipped, the scale halves
#
# The largest fp16 number is 65504. In our network the loss is an fp16 tensor, and its gradient is
# the scale itself. A scale of 131072 (2^17) does not fit into fp16, so this gradient becomes
# infinite. `train_step` is the whole loop body from above, with a report.


# %%
def train_step(layer, x, optimizer, scaler):
    """One AMP step; returns whether it was skipped."""
    with torch.autocast(device.type, dtype=torch.float16):
        output = layer(x)
    scaler.scale(output).backward()
    scaler.step(optimizer)  # unscales, looks for inf and NaN, and perhaps steps
    before = scaler.get_scale()
    scaler.update()
    show(f"scale {before:.0f}", layer)
    optimizer.zero_grad()
    return scaler.get_scale() < before


# %% [markdown]
# We take four steps, beginning with that scale. How many of them do you expect to be skipped?

# %%
layer, x, optimizer = make()
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**17)
skipped = [train_step(layer, x, optimizer, scaler) for _ in range(4)]
print("skipped:", skipped)
assert skipped == [True, True, False, False]
assert scaler.get_scale() == 2.0**15
check(layer, -0.7756, -2.9002)

# %% [markdown]
# Two steps were skipped, because 2^17 and 2^16 are both above 65504. The gradients were infinite,
# so the parameters did not move, and the scale fell to 2^15, with which training goes on.
# **A skipped step is not a fault: it is how the scaler searches.** As a rule of thumb, a few at the
# start and one now and then are normal. If the scale goes on falling, the gradients are probably bad
# at *any* scale: see [notebook 08](08_when_amp_breaks.ipynb), section 2.
#
# A scaler costs one pass over all gradients in each step. With an ordinary optimizer it also makes the
# CPU [wait for a
# GPU](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization)
# once in each step, because `step` has to read whether anything overflowed. A fused optimizer
# (`fused=True`) gets that answer on the device and needs no wait. `get_scale()` waits too, once the
# scaler has scaled a loss. <!-- tests/notebooks/test_03_grad_scaler_step_by_step.py -->
#
# ## Growth: after enough good steps, the scale doubles
#
# If the scale could only fall, one unlucky batch could leave it too low for good. So after
# `growth_interval` good steps in a row (2000 by default, 3 here) it doubles, to see whether there is
# room.

# %%
layer, x, optimizer = make()
scaler = torch.amp.GradScaler(device.type, init_scale=4096, growth_interval=3)
scales = []
for _ in range(7):
    scales.append(scaler.get_scale())
    train_step(layer, x, optimizer, scaler)
assert scales == [4096] * 3 + [8192] * 3 + [16384]
assert torch.amp.GradScaler(device.type).get_growth_interval() == 2000

# %% [markdown]
# The scale doubles after three good steps, to 8192, and after six, to 16384.
#
# ## The scale over a whole training run
#
# Both rules together make the scale climb until a gradient overflows, fall by half, and climb
# again. To see this in a picture, we fit a linear layer to noisy data, with a growth interval of 10.
# The loss is in the block as well. Autocast computes it in fp32, so here the scale may exceed
# 65504: only the gradients behind it have to fit into fp16.

# %%
torch.manual_seed(0)
layer = nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=10)
scales, truth = [], torch.randn(8, 1)
for _ in range(300):
    inputs = torch.randn(16, 8)
    targets = inputs @ truth + 0.1 * torch.randn(16, 1)
    scales.append(scaler.get_scale())
    with torch.autocast(device.type, dtype=torch.float16):
        outputs = layer(inputs.to(device))
        loss = nn.functional.mse_loss(outputs, targets.to(device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

# %% [markdown]
# The scale halves in exactly those steps that were skipped, so we can read them from the list.

# %%
after_each = pairwise([*scales, scaler.get_scale()])
skipped = [step for step, (now, after) in enumerate(after_each) if after < now]
_ = figures.scale_over_time(scales, skipped)
print(f"{len(skipped)} of {len(scales)} steps skipped")
print(f"final loss {loss.item():.3f}; the noise alone gives {0.1**2:.3f}")
assert 0 < len(skipped) < 0.1 * len(scales)
assert loss.item() < 0.03
assert loss.dtype is torch.float32
assert max(scales) > 65504

# %% [markdown]
# The scale climbs one stair every ten steps until a gradient overflows. There, at a cross, the step is
# skipped, the scale halves, and the climb begins again. The crosses are not all at the same height,
# since every batch has its own largest gradient. The loss still ends at the level of the noise. With
# the default interval of 2000, at most one step in 2000 is skipped in the long run, since a rise has to
# make up for every fall, unless the scale falls for good.
#
# ## A scaler written by hand
#
# The rules for the scale fit in 20 lines. PyTorch's own scaler can do more: it serves [several
# optimizers](https://docs.pytorch.org/docs/stable/notes/amp_examples.html), catches some calls in the wrong
# order, and does not wait for the device once for each gradient.


# %%
@dataclass
class HandScaler:
    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def scale(self, loss):
        return loss * self.value

    def step(self, optimizer):
        grads = [p.grad for p in optimizer.param_groups[0]["params"]]
        self.overflow = not all(grad.isfinite().all() for grad in grads)
        for grad in grads:
            grad /= self.value  # unscale_
        if not self.overflow:
            optimizer.step()

    def update(self):
        self.good_steps = 0 if self.overflow else self.good_steps + 1
        if self.overflow:
            self.value *= 0.5
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


# %% [markdown]
# We compare it with `GradScaler` for 500 steps of Adam on two copies of a network. In about one step in
# ten, drawn at random, we multiply the loss by infinity, so that both must skip it.


# %%
def run(scaler, steps=500):
    """Train a small network; return its parameters and the scale after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(steps):
        inputs, overflow = torch.randn(16, 8).to(device), torch.rand(()) < 0.1
        loss = model(inputs).square().mean() * (torch.inf if overflow else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        value = scaler.value if isinstance(scaler, HandScaler) else scaler.get_scale()
        history.append((value, nn.utils.parameters_to_vector(model.parameters()).detach().clone()))
    return history


# %% [markdown]
# Every scale and every parameter has to be equal after every step, to the last bit. We can ask for that
# much because the scales are powers of two, so that scaling and unscaling round nothing.

# %%
theirs = run(torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=7))
ours = run(HandScaler(2.0**10, growth_interval=7))
assert len(theirs) == len(ours) == 500
assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in zip(theirs, ours, strict=True))

values = [value for value, _ in theirs]
falls = sum(after < now for now, after in pairwise([2.0**10, *values]))
print(f"500 steps equal to the last bit; {falls} of them skipped")
print(f"scale between {min(values):g} and {max(values):g}")
assert 30 < falls < 70  # one in ten of 500, give or take three standard deviations

# %% [markdown]
# All 500 steps are equal. So many skips bring the scale far down, though nothing here is in fp16: a
# scaler only looks for inf and NaN, wherever they come from.
#
# ## When there is nothing to scale
#
# bf16 has the exponents of fp32, so gradients rarely vanish for want of range, and a scaler has little
# to do. You can still write one loop for both: a disabled scaler returns the loss as it is, and its
# `step` [only calls the optimizer](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler).

# %%
for dtype in (torch.float16, torch.bfloat16):
    scaler = torch.amp.GradScaler(device.type, enabled=(dtype is torch.float16))
    loss = torch.ones((), device=device)
    scaled = scaler.scale(loss).item()
    print(f"{dtype!s:<15} scaler enabled: {scaler.is_enabled()!s:<5}  1 scaled: {scaled:g}")
    assert scaled == (65536 if dtype is torch.float16 else 1)

# %% [markdown]
# The enabled scaler made 65536 of a loss of 1, and the disabled one left it alone.
#
# ## Summary
#
# This is what each line does:
#
# | line | what it does |
# |---|---|
# | `scaler.scale(loss).backward()` | multiplies the loss, and with it every gradient, by the scale |
# | `scaler.unscale_(optimizer)` | divides the gradients in place and looks for inf and NaN; you need it before clipping |
# | `scaler.step(optimizer)` | unscales if that was not done yet; lets the optimizer change the weights unless something was not finite |
# | `scaler.update()` | by default halves the scale after a bad step, and doubles it after 2000 good ones in a row |
#
# A skipped step is how the scaler searches for its value. One scaler lives as long as the training
# does, and [belongs in the checkpoint](05_cifar10_mobilenet.ipynb#Resume:-to-the-last-bit). We enable it
# for fp16, and not for bf16.
#
# In [notebook 04](04_fp32_vs_amp.ipynb) we train a whole network in each precision, and measure what
# that buys in time and memory.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("03_grad_scaler_step_by_step")

# %% [markdown]
# ### 1. Which scale saves this gradient?
#
# A gradient is 2^-26. What is the smallest power of two that keeps it from becoming zero in fp16?

# %%
smallest_scale = ...
exercises.check_smallest_scale(smallest_scale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The smallest positive number of fp16 is 2^-24. What becomes of a number that lies exactly halfway
# between 0 and it?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# smallest_scale = 4
# ```
#
# 2^-26 times 4 is 2^-24, which fp16 has. With a scale of 2 the product is 2^-25, halfway between 0
# and 2^-24, and rounding to even makes it 0.
#
# </details>
#
# ### 2. Where does the scale end?
#
# A scaler starts at 1024 with a growth interval of 3. Of ten steps, the second and the eighth
# overflow. Work out on paper what the scale is after the tenth.

# %%
scale_at_the_end = ...
exercises.check_scale_after(scale_at_the_end)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write two columns, the scale and the number of good steps in a row. Both a fall and a rise set the
# second one back to zero.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# scale_at_the_end = 512
# ```
#
# Step 2 halves 1024 to 512. Steps 3, 4 and 5 are good, so the scale doubles to 1024. Steps 6 and 7
# are good, which is one too few, and step 8 halves it to 512 again. Steps 9 and 10 are good.
#
# </details>
#
# ### 3. Clip, with a scaler
#
# Complete `clipped_step`, so that the norm of the gradients is at most 1 when the optimizer sees
# them. The check compares the weights with those of an fp32 step that clips, and looks whether the
# scaler has counted the step.


# %%
def clipped_step(loss, model, optimizer, scaler):
    return ...  # backward, clip to a norm of 1, step, update


exercises.check_clipped_step(clipped_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# After `backward` the gradients are multiplied by the scale. Which of the scaler's methods undoes
# that before `step` does?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def clipped_step(loss, model, optimizer, scaler):
#     scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)
#     nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     scaler.step(optimizer)
#     scaler.update()
# ```
#
# Without `unscale_` the norm is 1024 times too large (the scale in the check is 1024), so that
# clipping shrinks the gradients to almost nothing.
#
# </details>
#
# ### 4. Go on after an interruption
#
# A run was stopped, and `state` is what `scaler.state_dict()` gave. Return a scaler that goes on as
# if nothing had happened.


# %%
def resumed_scaler(state):
    return ...


exercises.check_resumed(resumed_scaler)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `print(torch.amp.GradScaler(device.type).state_dict())` shows what there is besides the scale.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def resumed_scaler(state):
#     scaler = torch.amp.GradScaler(device.type)
#     scaler.load_state_dict(state)
#     return scaler
# ```
#
# A scaler that only gets the old scale (`init_scale=state["scale"]`) would count its good steps from
# zero. Without any state it starts at 65536, and may have to skip a few steps until it has found its
# value again.
#
# </details>
#
# ## Further reading
#
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018:
#   loss scaling, and how large the scale has to be.
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): clipping, accumulation,
#   several losses and optimizers with one scaler.
# - [`torch.amp`](https://docs.pytorch.org/docs/stable/amp.html): the reference for `GradScaler`.
