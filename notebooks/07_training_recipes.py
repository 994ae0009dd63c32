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
# **What you'll do.** Add AMP to seven things that training loops do besides forward, backward and step.
# In the training loops, comments mark the lines that AMP adds or changes. Then see what happens if you leave
# such a line out.
#
# **What you'll learn.**
# - two rules about scaled gradients, from which most recipes follow;
# - which parts of a loop need no change under AMP;
# - what a missing line does.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast` and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. You need no GPU. Run the cells up to the first
# recipe, then go to the one you need.
#
# | what the loop does | recipe |
# |---|---|
# | clips or inspects gradients | [Clip gradients](#Clip-gradients) |
# | sums gradients over several batches | [Accumulate gradients](#Accumulate-gradients) |
# | uses gradients in the loss | [Penalise gradients](#Penalise-gradients) |
# | changes the learning rate | [Schedule the learning rate](#Schedule-the-learning-rate) |
# | recomputes activations to save memory | [Checkpoint activations](#Checkpoint-activations) |
# | has several losses or optimizers | [Use several losses and optimizers](#Use-several-losses-and-optimizers) |
# | starts from half precision weights | [Load half precision weights](#Load-half-precision-weights) |
# | does something else | [More recipes](#More-recipes) |

# %% tags=["nbval-ignore-output"]
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.checkpoint import checkpoint

from course import figures, recipes, start
from course.recipes import GROUP, MAX_NORM, PENALTY, decay, sgd

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
torch.set_num_threads(1)  # the tensors here are too small to share among CPU cores

# %% [markdown]
# ## The idea in five lines
#
# We want to clip a gradient of length 0.5 to a length of 0.1. Under AMP with fp16, `backward` gives us
# this gradient multiplied by the loss scale, 65,536. Before you run this: does it matter whether we
# divide by the scale before or after we clip?

# %%
scaled = torch.tensor([0.3, 0.4]) * 65536  # the gradient after backward
divided_first = scaled / 65536
divided_first *= 0.1 / divided_first.norm()  # clip
clipped_first = scaled * 0.1 / scaled.norm() / 65536
print(f"divided first: {divided_first.norm():.1e}, clipped first: {clipped_first.norm():.1e}")
assert math.isclose(divided_first.norm(), 0.1, rel_tol=1e-6)
assert math.isclose(clipped_first.norm(), 0.1 / 65536, rel_tol=1e-6)

# %% [markdown]
# It matters. If we divide first, the gradient has the length 0.1 that we asked for. If we clip first, the
# gradient is 65,536 times too short, so SGD hardly changes the weights, and no error is raised. Most recipes
# follow from two rules:
#
# - **Code that reads or changes gradients belongs after `unscale_`.**
# - **Code that computes gradients starts from `scaler.scale(…)`.**
#
# Code that reads only weights needs no change, if it runs outside of the autocast block: the weights
# themselves stay in fp32. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## The setting
#
# We train a small network on five small batches.

# %%
problem = recipes.SmallProblem(device)
batches, new_model = problem.batches, problem.new_model
assert [len(x) for x, _ in batches] == [16, 16, 16, 16, 8]

# %% [markdown]
# This is the AMP loop. Each line marked `# AMP` is new. If it replaces a line of the fp32 loop, the
# comment shows what it replaces. The fp32 loops are in [`course/recipes.py`](course/recipes.py).
# <!-- tests/notebooks/test_07_training_recipes.py -->


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
# The scaler is for fp16. For bf16 we [disable](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py)
# it: then `scale` returns the loss unchanged, and `step` only calls `optimizer.step()`. So one training loop
# works for fp16 and for bf16. Create its scaler with
# `torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)`.
#
# ## How a recipe is checked
#
# `check_same` trains the same network with the fp32 loop, and with the AMP loop in fp16 and in bf16. Then it
# compares how much each training changed the weights. The relative difference from fp32 must be below 1/512
# in fp16 and below 1/64 in bf16. This is four times the rounding error of the format.

# %%
problem.check_same(recipes.train_plain, train_amp)

# %% [markdown]
# The AMP loop changes the weights in nearly the same way as the fp32 loop. With the next helpers, we look at
# single steps.


# %%
def new_run(make_optimizer=sgd):
    """A new model, optimizer and fp16 scaler."""
    model = new_model()
    return model, make_optimizer(model), torch.amp.GradScaler(device.type)


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
# ## Clip gradients
#
# Clipping reads gradients, so `unscale_` comes first. `step` notices that the gradients are already
# unscaled, and does not divide them again.


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


problem.check_same(recipes.clip_plain, clip_amp)

# %% [markdown]
# We can follow the length of the gradient through one step:

# %%
model, optimizer, scaler = new_run()
backward(model, scaler)
norms = {"backward": gradient_norm(model)}
scaler.unscale_(optimizer)
norms["unscale_"] = gradient_norm(model)
clip_grad_norm_(model.parameters(), MAX_NORM)
norms["clip"] = gradient_norm(model)
scaler.step(optimizer)
norms["step"] = gradient_norm(model)
_ = figures.gradient_norm_in_step(norms, scaled=["backward"])
assert math.isclose(norms["backward"] / norms["unscale_"], 2**16, rel_tol=1e-6)
assert math.isclose(norms["step"], MAX_NORM, rel_tol=1e-3)

# %% [markdown]
# After `backward` the gradient is 65,536 times too long. `unscale_` restores its true length, and
# clipping shortens it to 0.1.
#
# **If a gradient overflows**, the scaler skips the step in fp16. In bf16 nothing skips the step, so
# weights become NaN. To get an error in bf16 instead, call `clip_grad_norm_` with
# `error_if_nonfinite=True`. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Accumulate gradients
#
# You need this if the batch that you want does not fit into memory. Instead, add up the gradients of a group
# of small batches before one step. We weight each batch by its share of the samples, so the result is also
# right if the last group is shorter. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# Call `scale` for every batch. Call `step` and `update` only at the end of a group, because all gradients
# in a sum must have the same scale. If you clip as well, call `unscale_` at the end of the group.


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


problem.check_same(recipes.accumulate_plain, accumulate_amp)

# %% [markdown]
# ## Penalise gradients
#
# You need this if the loss itself contains gradients.
#
# 1. Compute these *inner gradients* from the scaled loss, so that fewer of them underflow in fp16.
# 2. [Unscale them by hand](https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty),
#    because `unscale_` changes only `.grad`.
# 3. Compute the penalty under autocast, because it is part of the forward pass.
#
# If an inner gradient overflows in fp16, the loss overflows as well, and the scaler skips the step.
# <!-- tests/notebooks/test_07_training_recipes.py -->


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


problem.check_same(recipes.penalty_plain, penalty_amp)

# %% [markdown]
# **Without the division by hand** every gradient in the penalty is 2^16 times too large in fp16, at the
# initial loss scale. The penalty is a sum of their squares, so it is 2^32 times too large. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Schedule the learning rate
#
# The fp32 loop calls `scheduler.step()` after every step.
#
# With AMP the scaler may skip a step, and the schedule should not count this step. `scaler.step` does not
# report a skipped step, but the loss scale shows it: after a skipped step, [`scaler.update` lowers the
# scale](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py).


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


problem.check_same(recipes.schedule_plain, schedule_amp)

# %% [markdown]
# **Without this check** skipped steps use up the schedule.
# <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Checkpoint activations
#
# You need this if activations fill the memory. By default, a checkpointed part of the model [does not save
# its activations](https://docs.pytorch.org/docs/stable/checkpoint.html), but runs a second time in the
# backward pass. Here we checkpoint the first two layers.


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
# AMP needs no change here. The second run happens outside of the autocast block, but `checkpoint` has
# recorded the state of autocast and restores it. Here, checkpointing changes no bit of the weights in
# fp16: <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
problem.check_same(recipes.train_plain, train_amp, make_model=Checkpointed)
recomputed = problem.change(train_amp, torch.float16, make_model=Checkpointed)
assert torch.equal(recomputed, problem.change(train_amp, torch.float16))

# %% [markdown]
# **Without `use_reentrant`** you get the older kind of checkpoint, and a warning. If its input needs no
# gradient, such as a batch of data, the parameters inside get no gradient either. So the checkpointed part
# never learns. If other layers follow that do learn, no error is raised.
# <!-- tests/notebooks/test_07_training_recipes.py -->
#
# **A rare error** (torch 2.15): with its argument `context_fn`, `checkpoint` can save the results of the
# matmuls. If two parts that are checkpointed in this way use the same trained linear layer, `backward` raises
# `… not found in storage`. To prevent this error, pass `cache_enabled=False` to autocast.
# <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Use several losses and optimizers
#
# Use one scaler for all losses and optimizers. Call `scale` for every loss, `step` for every optimizer,
# and `update` once, at the end. An `update` between two steps may change the scale, but the second
# optimizer's gradients are still multiplied by the old scale. In the next cell, we put infinities
# into a gradient of the first optimizer:


# %%
def pair(model):
    """An optimizer for each layer."""
    return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]


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
# With the early `update`, the gradients of the second optimizer were multiplied by 65,536, but divided by
# 32,768.
#
# With `update` at the end, the scaler still decides for each optimizer alone: it can skip the step of the
# first and not that of the second. To skip both, use one optimizer with two parameter groups.
# <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Load half precision weights
#
# By default, `load_state_dict` copies values *into* the parameters, which stay fp32. So a file of fp16 weights needs
# no change. But with `assign=True` or after `.half()`, the parameters can be in 16 bits:
#
# - If they are fp16, the scaler refuses to unscale their gradients. (With a [fused
#   optimizer](08c_scaler.ipynb#The-parameters-are-fp16), there may be no error.)
# - If they are bf16, small updates are rounded away.
#
# In both cases, call `model.float()` before you create the optimizer.
# <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
half_weights = {name: tensor.half() for name, tensor in new_model().state_dict().items()}
model, _, scaler = new_run()
model.load_state_dict(half_weights)
assert model[0].weight.dtype is torch.float32

model.load_state_dict(half_weights, assign=True)
backward(model, scaler)
try:
    scaler.step(sgd(model))
except ValueError as error:
    message = str(error)
print(message)
assert message == "Attempting to unscale FP16 gradients."

# %% [markdown]
# ## More recipes
#
# These recipes are short. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# - **Average the weights (EMA).** AMP needs no change, because the weights are fp32. Keep the average in
#   fp32 too: in 16 bits, its small updates may be rounded away.
# - **Compile the model.** Call `torch.compile(model)` as without AMP. Use the same autocast settings in
#   every call, also in evaluation, or PyTorch compiles the model again ([notebook
#   18](18_inference_and_export.ipynb#What-torch.compile-changes)).
# - **Evaluate during training.** Do not evaluate inside the autocast block of a training step. By
#   default, the block keeps 16-bit copies of the weights, which are out of date after the optimizer step. Use
#   a separate block.
#
# ## Summary
#
# Code that computes gradients starts from `scaler.scale(…)`. Code that reads or changes gradients comes
# after `unscale_`. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# | recipe | what AMP adds | what goes wrong without it |
# |---|---|---|
# | [Clip](#Clip-gradients) | `scaler.unscale_(optimizer)` before clipping | fp16: SGD nearly stands still |
# | [Accumulate](#Accumulate-gradients) | `scale` per batch; `step` and `update` per group; if you clip, `unscale_` per group | fp16: a second `unscale_` in a group raises an error |
# | [Penalise](#Penalise-gradients) | scale the inner loss, divide its gradients by `get_scale()` | fp16: the penalty is 2^32 times too large at the initial scale |
# | [Schedule](#Schedule-the-learning-rate) | `scheduler.step()` only if the scale did not fall | skipped steps use up the schedule |
# | [Checkpoint](#Checkpoint-activations) | nothing, but use `use_reentrant=False` | parameters may get no gradient |
# | [Several](#Use-several-losses-and-optimizers) | one scaler, one `update` at the end | a step may be twice as long as it should be |
# | [Load](#Load-half-precision-weights) | `model.float()` if parameters are fp16 or bf16 | fp16: an error (with a fused optimizer, perhaps none); bf16: small updates vanish |
#
# If your training still breaks, continue with [notebook 08](08_when_amp_breaks.ipynb), which starts from
# the error message.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("07_training_recipes")

# %% [markdown]
# ### 1. How long is the clipped gradient?
#
# A loop clips to a norm of 0.5, but its author forgot `unscale_`. The loss scale is 1024. The true
# gradient has a length of 6 in one batch, and of 0.0003 in another. Work out on paper the lengths of the
# two gradients that the optimizer gets.

# %%
lengths = ...  # a pair of numbers
exercises.check_lengths(lengths)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How long is each scaled gradient just before clipping? Which of them is longer than 0.5? After clipping,
# `step` divides both by the scale.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# lengths = (0.5 / 1024, 0.0003)
# ```
#
# The first scaled gradient has a length of 6144. Clipping shortens it to 0.5, and `step` divides it by the
# scale. The second has a length of 0.3072, so clipping does not change it. Large gradients should get a
# length of 0.5, but they become far too short.
#
# </details>
#
# ### 2. Accumulate and clip
#
# Complete the step for one group. It should add up the gradients of all `losses` and clip the sum to a
# norm of 0.1. The losses are already weighted by their share of the samples.


# %%
def group_step(losses, model, optimizer, scaler):
    return ...  # backward for each loss; clip, step and update


exercises.check_group_step(group_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which calls belong to every loss, and which to the whole group? What has to come before clipping?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def group_step(losses, model, optimizer, scaler):
#     for loss in losses:
#         scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)
#     clip_grad_norm_(model.parameters(), 0.1)
#     scaler.step(optimizer)
#     scaler.update()
# ```
#
# If you call `unscale_` and clip after each loss, the second `unscale_` raises an error in fp16.
# <!-- tests/notebooks/test_07_training_recipes.py -->
#
# </details>
#
# ### 3. Correct the schedule
#
# `end_of_step` should call `scheduler.step()`, but not after a skipped step. This version always calls
# `scheduler.step()`. Find the mistake and write the correct function.
#
# ```python
# def end_of_step(optimizer, scaler, scheduler):
#     scaler.step(optimizer)
#     scaler.update()
#     before = scaler.get_scale()
#     if scaler.get_scale() >= before:
#         scheduler.step()
# ```


# %%
def end_of_step(optimizer, scaler, scheduler):
    return ...  # the five lines above, corrected


exercises.check_end_of_step(end_of_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which call changes the scale? Note that the scale may also *rise*, after many good steps.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def end_of_step(optimizer, scaler, scheduler):
#     scaler.step(optimizer)
#     before = scaler.get_scale()
#     scaler.update()
#     if scaler.get_scale() >= before:
#         scheduler.step()
# ```
#
# Only `update` changes the scale here, so read `before` before you call `update`.
#
# </details>
#
# ### 4. What has to come after `unscale_`?
#
# A loop does five more things between `backward` and `scaler.step`. Which of them go wrong if they
# come before `unscale_`?
#
# - `log` records the norm of the gradients;
# - `clamp` limits every element of a gradient to ±0.1;
# - `noise` adds noise with a standard deviation of 0.01 to the gradients;
# - `freeze` sets the gradient of the bias to zero;
# - `average` updates a moving average of the weights.

# %%
after_unscale = ...  # a set of these names, such as {"log", "freeze"}
exercises.check_after_unscale(after_unscale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Ask two questions about each of the five things. Does it read or change gradients at all? Would the
# result differ if the gradients were 65,536 times too large and were divided afterwards?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# after_unscale = {"log", "clamp", "noise"}
# ```
#
# A gradient of zero stays zero when it is divided, and an average of the weights does not read gradients.
# <!-- tests/notebooks/test_exercises.py -->
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): clipping, accumulation,
#   gradient penalty, several losses, custom functions.
# - PyTorch, [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html): what
#   it restores for the second run, and how the two kinds differ.
