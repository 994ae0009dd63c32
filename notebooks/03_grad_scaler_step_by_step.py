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
# **What you'll do.** Train a network of one weight and one bias: one step in fp32, then one step in
# mixed precision. Then make the gradients overflow on purpose, and watch the scaler recover.
#
# **What you'll learn.**
# - what `scale`, `unscale_`, `step` and `update` do, and in which order to call them;
# - why the scaler sometimes skips a step, and why this is usually not an error;
# - how the scaler finds a good loss scale.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb) and [notebook 02](02_autocast_dtypes.ipynb). You
# need no GPU.

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
# We convert a gradient of 2^-26 to fp16 and back to fp32. Then we convert it again, but multiply it by 4096 before the
# conversion and divide by 4096 afterwards. Before you run this: what do you expect in each case?

# %%
gradient = torch.tensor(2.0**-26)
lost = gradient.half().float()
kept = (gradient * 4096).half().float() / 4096
print(f"{gradient:.3e} becomes {lost:.3e} in fp16, or {kept:.3e} if it is scaled first")
assert lost == 0
assert kept == gradient

# %% [markdown]
# Without scaling, the gradient becomes zero. With scaling, the result is exactly the original gradient.
#
# Under autocast in fp16, linear layers [compute gradients in
# fp16](02_autocast_dtypes.ipynb#Backward:-no-autocast-there). We have to scale *before* backpropagation, so we scale
# the loss. Backpropagation is linear: if the loss is 4096 times as large, every gradient is 4096 times as large, apart
# from rounding. The factor is called the **loss scale**. `torch.amp.GradScaler` scales the loss, and divides the
# gradients by the scale before the optimizer uses them. It also adjusts the scale during training.
#
# ## A network of two parameters
#
# A linear layer with one input and one output has two parameters. Its output serves as the loss.


# %%
def make():
    """Return the same layer, input and optimizer every time."""
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
# `check` compares the parameters with the expected values, to four decimals. We show the layer before training.


# %%
def check(layer, weight, bias, grads=None):
    """Assert that the parameters, and gradients if given, have the printed values."""
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
# The forward pass computes weight times input plus bias.

# %%
output = layer(x)
print(f"output {output.item():.4f}, {output.dtype}")
assert output.dtype is torch.float32
assert abs(output.item() - -0.8473) < 0.5e-4

# %% [markdown]
# The derivative of `weight * x + bias` is `x` for the weight and 1 for the bias, so we expect the gradients
# -0.0591 and 1.

# %%
output.backward()
show("after backward", layer)
check(layer, -0.8939, -0.9002, [-0.0591, 1.0])

# %% [markdown]
# The learning rate is 1, so the optimizer subtracts each gradient unchanged from its parameter.

# %%
optimizer.step()
optimizer.zero_grad()
show("after step", layer)
check(layer, -0.8348, -1.9002)

# %% [markdown]
# ## One step with autocast and GradScaler
#
# Now we train the same layer in mixed precision. Our scaler starts at 4096. The default is 65536 (2^16).
# The comment `# AMP` marks new and changed lines.

# %%
scaler = torch.amp.GradScaler(device.type, init_scale=4096)  # AMP: once, before the loop
assert torch.amp.GradScaler(device.type).get_scale() == 65536

with torch.autocast(device.type, dtype=torch.float16):  # AMP: the forward pass and the loss
    output = layer(x)
print(f"output {output.item():.4f}, {output.dtype}; the parameters stay {layer.weight.dtype}")
assert output.dtype is torch.float16
assert layer.weight.dtype is torch.float32
assert abs(output.item() - -1.8506) < 0.5e-4

# %% [markdown]
# The output is in fp16, because autocast runs a linear layer in fp16. The parameters stay in fp32.
#
# `scale` multiplies the loss by 4096. Before you run the next cell: what will the two gradients be?

# %%
scaler.scale(output).backward()  # AMP: was output.backward()
show("after backward", layer)
check(layer, -0.8348, -1.9002, [-242.25, 4096.0])
assert layer.weight.grad.dtype is torch.float32

# %% [markdown]
# Both gradients are 4096 times too large. The backward pass computed them in fp16 and converted them to
# fp32, the dtype of their parameters.
#
# `unscale_` divides the gradients by the scale, in place, and records whether any of them is infinite or
# NaN. Call `unscale_` before you read or change gradients, for example to clip them. Without this call, `step`
# [unscales the gradients itself](https://docs.pytorch.org/docs/stable/notes/amp_examples.html).

# %%
scaler.unscale_(optimizer)  # AMP: optional
show("after unscale_", layer)
check(layer, -0.8348, -1.9002, [-0.0591, 1.0])

# %% [markdown]
# Now the gradients equal those of the fp32 step, to four decimals. `scaler.step` skips the optimizer's step if
# `unscale_` found an inf or NaN.

# %%
scaler.step(optimizer)  # AMP: was optimizer.step()
show("after step", layer)
check(layer, -0.7756, -2.9002, [-0.0591, 1.0])

# %% [markdown]
# `update` adjusts the scale for the next iteration.

# %%
scaler.update()  # AMP
optimizer.zero_grad()
good_steps = scaler.state_dict()["_growth_tracker"]
print(f"scale {scaler.get_scale():.0f}, good steps in a row {good_steps}")
assert (scaler.get_scale(), good_steps) == (4096, 1)

# %% [markdown]
# No gradient overflowed, so `update` counted a *good* step and left the scale at 4096.
#
# After `backward`, call the methods [in this order](https://docs.pytorch.org/docs/stable/notes/amp_examples.html):
#
# 1. `unscale_`, at most once for each optimizer;
# 2. `step`, once for each optimizer;
# 3. `update`, once.
#
# A second `unscale_` for the same optimizer before `update` [raises an
# error](08c_scaler.ipynb#Gradients-are-unscaled-twice).
#
# ## An overflow: the step is skipped, the scale halves
#
# The scaled loss of our network is scale x output, so the gradient with respect to the output equals the scale. This
# gradient is in fp16, like the output. The largest fp16 number is 65504. With a scale of 131072 (2^17), the gradient
# therefore becomes infinite.
#
# `train_step` is the step above without `unscale_`.


# %%
def train_step(layer, x, optimizer, scaler):
    """Take one AMP step; return whether the scaler skipped it."""
    with torch.autocast(device.type, dtype=torch.float16):
        output = layer(x)
    scaler.scale(output).backward()
    scaler.step(optimizer)  # unscales, and steps if all gradients are finite
    before = scaler.get_scale()
    scaler.update()
    show(f"scale {before:.0f}", layer)
    optimizer.zero_grad()
    return scaler.get_scale() < before


# %% [markdown]
# We take four steps and start with a scale of 2^17. How many steps will the scaler skip?

# %%
layer, x, optimizer = make()
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**17)
skipped = [train_step(layer, x, optimizer, scaler) for _ in range(4)]
print("skipped:", skipped)
assert skipped == [True, True, False, False]
assert scaler.get_scale() == 2.0**15
check(layer, -0.7756, -2.9002)

# %% [markdown]
# The scaler skipped two steps, because 2^17 and 2^16 are too large for fp16. In a skipped step, the
# parameters do not change, and by default the scale halves. At 2^15 the gradients are finite, so training
# continues. **A skipped step is usually not an error: the scaler lowers a scale that is too large.** A few skipped
# steps at the start and an occasional skipped step later [are
# normal](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py). If the scale keeps falling, see
# [notebook 08b](08b_learning.ipynb#The-loss-scale-falls-towards-0).
#
# ## Growth: after enough good steps, the scale doubles
#
# If the scale is too low, small gradients become zero. By default, the scaler therefore doubles the scale after 2000
# good steps in a row. We set this `growth_interval` to 3.

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
# ## The scale over a whole training run
#
# In a long run, the scale typically climbs until a gradient overflows. Then it halves and climbs again. To plot the
# scale, we fit a linear layer to noisy data, with a growth interval of 10. This time the loss is in fp32, so the scale
# may exceed 65504. The scaled gradients still have to fit into fp16.

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
# After a skipped step, the scale is half as large.

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
# Each cross marks an overflow: the step is skipped and the scale halves. The loss still ends at the level of
# the noise.
#
# ## What a scaler costs
#
# A scaler makes one pass over all gradients in each step. If the optimizer is not fused, the CPU also [waits for the
# GPU](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization),
# to find out whether a gradient overflowed. <!-- tests/notebooks/test_03_grad_scaler_step_by_step.py -->
#
# ## A scaler written by hand
#
# The rules of the scaler fit in a few lines.


# %%
@dataclass
class HandScaler:
    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def scale(self, loss):
        return loss * self.value

    def step(self, optimizer):
        grads = [p.grad.div_(self.value) for p in optimizer.param_groups[0]["params"]]  # unscale_
        self.overflow = not all(grad.isfinite().all() for grad in grads)
        if not self.overflow:
            optimizer.step()

    def update(self):
        self.good_steps = 0 if self.overflow else self.good_steps + 1
        if self.overflow:
            self.value *= 0.5
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def get_scale(self):
        return self.value


# %% [markdown]
# We take six steps with `GradScaler` and six with `HandScaler`. Both start at 2^17, with a growth interval
# of 3. Which steps will they skip?

# %%
ends = []
for scaler in (
    torch.amp.GradScaler(device.type, init_scale=2.0**17, growth_interval=3),
    HandScaler(2.0**17, growth_interval=3),
):
    layer, x, optimizer = make()
    skipped = [train_step(layer, x, optimizer, scaler) for _ in range(6)]
    ends.append((skipped, scaler.get_scale(), layer.weight.item(), layer.bias.item()))
assert ends[0] == ends[1]
assert skipped == [True, True, False, False, False, True]

# %% [markdown]
# Both scalers skip the same steps, and end with the same scale and parameters.
# <!-- tests/notebooks/test_03_grad_scaler_step_by_step.py -->
#
# ## When there is nothing to scale
#
# bf16 has [as many exponent bits as fp32](01_number_formats.ipynb#What-the-bits-mean), so gradients underflow less
# often than in fp16. If you disable the scaler, the same loop works in bf16: a disabled scaler returns the loss
# unchanged, and its `step` [only calls
# `optimizer.step`](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py).

# %%
for dtype in (torch.float16, torch.bfloat16):
    scaler = torch.amp.GradScaler(device.type, enabled=(dtype is torch.float16))
    loss = torch.ones((), device=device)
    scaled = scaler.scale(loss).item()
    print(f"{dtype!s:<15} scaler enabled: {scaler.is_enabled()!s:<5}  1 scaled: {scaled:g}")
    assert scaled == (65536 if dtype is torch.float16 else 1)

# %% [markdown]
# ## Summary
#
# | line | what it does |
# |---|---|
# | `scaler.scale(loss).backward()` | multiplies the loss, and thereby every gradient, by the scale |
# | `scaler.unscale_(optimizer)` | divides the gradients by the scale in place and checks for inf and NaN; call it before you clip |
# | `scaler.step(optimizer)` | first unscales the gradients if they are still scaled; skips the optimizer's step if unscaling found inf or NaN |
# | `scaler.update()` | by default halves the scale after a skipped step, and doubles it after 2000 good steps in a row |
#
# Use one scaler for the whole training run, and [save its state in the
# checkpoint](05_cifar10_mobilenet.ipynb#Resume:-to-the-last-bit). Enable the scaler for fp16, not for bf16.
#
# Next: [notebook 04](04_fp32_vs_amp.ipynb) measures the time and memory of a whole network in fp32 and with
# AMP.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("03_grad_scaler_step_by_step")

# %% [markdown]
# ### 1. Which scale saves this gradient?
#
# What is the smallest loss scale that keeps a gradient of 2^-26 from becoming zero in fp16? The scale has to
# be a power of two.

# %%
smallest_scale = ...
exercises.check_smallest_scale(smallest_scale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The smallest positive fp16 number is 2^-24. A number halfway between 0 and 2^-24 is rounded to 0.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# smallest_scale = 4
# ```
#
# 2^-26 times 4 is 2^-24. With a scale of 2 we get 2^-25, which is rounded to 0.
#
# </details>
#
# ### 2. Where does the scale end?
#
# A scaler starts at 1024 with a growth interval of 3. It takes ten steps, of which the second and the
# eighth overflow. Work out on paper the scale after the tenth step.

# %%
scale_at_the_end = ...
exercises.check_scale_after(scale_at_the_end)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Count the good steps in a row. Set this count back to zero whenever the scale halves or doubles.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# scale_at_the_end = 512
# ```
#
# Step 2 halves the scale to 512. Steps 3, 4 and 5 are good, so the scale doubles to 1024. Step 8 overflows, so the
# scaler halves the scale to 512 again.
#
# </details>
#
# ### 3. Clip, with a scaler
#
# Complete `clipped_step` so that the norm of the gradients is at most 1 when the optimizer uses them.
# The check compares the weights with those of an fp32 step that clips.


# %%
def clipped_step(loss, model, optimizer, scaler):
    return ...  # backward, clip to a norm of 1, step, update


exercises.check_clipped_step(clipped_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which method of the scaler divides the gradients by the scale before `step`?
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
# Without `unscale_`, you clip the *scaled* gradients to a norm of 1. With a scale of 1024, `step` then divides them by
# 1024.
#
# </details>
#
# ### 4. Resume after an interruption
#
# `state` is the `scaler.state_dict()` of an interrupted run. Return a scaler that resumes as if there had
# been no interruption.


# %%
def resumed_scaler(state):
    return ...


exercises.check_resumed(resumed_scaler)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `print(torch.amp.GradScaler(device.type).state_dict())` shows what the state contains.
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
# If you restore only the old scale (`init_scale=state["scale"]`), the new scaler counts its good steps from zero.
# <!-- tests/notebooks/test_exercises.py -->
#
# </details>
#
# ## Further reading
#
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018.
# - [`torch.amp`](https://docs.pytorch.org/docs/stable/amp.html): the reference for `GradScaler`.
