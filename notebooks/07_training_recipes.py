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
# **What you'll do.** Add AMP to seven things that training loops do besides forward, backward and step. See what
# happens if you leave a line out.
#
# **What you'll learn.**
# - two rules about scaled gradients, from which most recipes follow;
# - which parts of a loop need no change under AMP;
# - what goes wrong if a line is missing.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast` and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. You need no GPU. Run the cells up to the first
# recipe, then go to the recipe that you need.
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
# We want to clip a gradient of length 0.5 to a length of 0.1. In fp16 with a `GradScaler`, `backward` gives us
# this gradient multiplied by the loss scale, here 65,536. Before you run this: does it matter whether we divide by the
# scale before or after we clip?

# %%
scaled = torch.tensor([0.3, 0.4]) * 65536  # the gradient after backward
divided_first = scaled / 65536
divided_first *= 0.1 / divided_first.norm()  # clip
clipped_first = scaled * 0.1 / scaled.norm() / 65536
print(f"divided first: {divided_first.norm():.1e}, clipped first: {clipped_first.norm():.1e}")
assert math.isclose(divided_first.norm(), 0.1, rel_tol=1e-6)
assert math.isclose(clipped_first.norm(), 0.1 / 65536, rel_tol=1e-6)

# %% [markdown]
# Here, clipping first makes the gradient 65,536 times too short, so SGD hardly changes the weights. No error is
# raised. Most recipes follow from two rules:
#
# - **Read or change gradients only after `unscale_`**, which divides the gradients by the scale.
# - **Compute gradients from the scaled loss, `scaler.scale(loss)`.**
#
# ## The setting
#
# We train a small network on five small batches.

# %%
problem = recipes.SmallProblem(device)
batches, new_model = problem.batches, problem.new_model
assert [len(x) for x, _ in batches] == [16, 16, 16, 16, 8]

# %% [markdown]
# This is the AMP loop. The comment `# AMP` marks the lines of the loop that differ from the fp32 loop in
# [`course/recipes.py`](course/recipes.py). <!-- tests/notebooks/test_07_training_recipes.py -->


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
# The loop works for fp16 and for bf16. Create its scaler with
# `torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)`. For bf16 this scaler is
# [disabled](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py): `scale` returns the loss
# unchanged, and `unscale_` and `update` do nothing. `step` only calls `optimizer.step()`.
#
# ## How a recipe is checked
#
# `check_same` trains the same network with the fp32 loop, and with the AMP loop in fp16 and in bf16. Then it
# compares how the AMP loop and the fp32 loop changed the weights:

# %%
problem.check_same(recipes.train_plain, train_amp)

# %% [markdown]
# We use the next helpers to look at single steps.


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
# Clipping compares the norm of the gradients with a limit, so `unscale_` comes first. Afterwards, `step` does not
# divide the gradients again.


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
# `unscale_` restores the gradient's true length, and clipping shortens the gradient to 0.1.
#
# **If a gradient is infinite**, clipping multiplies it by 0.1 / inf = 0, so it becomes NaN. In fp16 the scaler
# skips the step. In bf16 the step is not skipped, so weights become NaN. To get an error in bf16 instead, call
# `clip_grad_norm_` with `error_if_nonfinite=True`. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Accumulate gradients
#
# If a batch does not fit into memory, add up the gradients of a group of small batches before one step. We weight
# each small batch by its share of the samples, because the last batch may be smaller. <!--
# tests/notebooks/test_07_training_recipes.py -->
#
# Call `scale` for every batch. Call `step` and `update` [only at the end of a
# group](https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation), because all gradients in a
# sum must have the same scale. If you clip, call `unscale_` at the end of the group.


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
# A gradient penalty is a term of the loss that is computed from gradients. Under AMP, it takes [three
# steps](https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty):
#
# 1. Compute the gradients in the penalty (the *inner gradients*) from the scaled loss.
# 2. Unscale the inner gradients by hand, because `unscale_` changes only `.grad`.
# 3. Compute the penalty under autocast, like the rest of the loss.


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
# **Without step 2** each inner gradient is 2^16 times too large in fp16, at the initial loss scale. The penalty
# sums their squares, so it is 2^32 times too large. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Schedule the learning rate
#
# The fp32 loop calls `scheduler.step()` after every step. In fp16 the scaler may skip a step, but the schedule should
# not count a skipped step. The loss scale shows which step was skipped: after such a step, [`scaler.update` lowers the
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
# By default, a checkpointed part of the model [does not save its
# activations](https://docs.pytorch.org/docs/stable/checkpoint.html), but runs a second time in the backward pass. Here
# we checkpoint the first two layers.


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
# This code needs no change for AMP, because `checkpoint` restores autocast for the second run. Here, the fp16 run
# gives the same weights with and without checkpointing: <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
problem.check_same(recipes.train_plain, train_amp, make_model=Checkpointed)
recomputed = problem.change(train_amp, torch.float16, make_model=Checkpointed)
assert torch.equal(recomputed, problem.change(train_amp, torch.float16))

# %% [markdown]
# **Without `use_reentrant=False`** you get the older kind of checkpoint in torch 2.15. If the input of the
# checkpointed part needs no gradient (such as a batch of data), this part does not learn. PyTorch may raise no error.
# <!-- tests/notebooks/test_07_training_recipes.py -->
#
# **If `backward` raises `… not found in storage`**, try autocast with `cache_enabled=False`. If you call `checkpoint`
# with `context_fn`, two checkpointed parts that share a weight can cause this error. <!--
# tests/notebooks/test_07_training_recipes.py -->
#
# ## Use several losses and optimizers
#
# [One
# scaler](https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers)
# is enough for several losses and optimizers. Call `scale` for every loss, and `step` for every optimizer. Call
# `update` once, at the end. An `update` between two steps may change the scale, but the second optimizer's gradients
# are still multiplied by the old scale. In the next cell, we put infinities into a gradient of the first optimizer:


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
# ## Load half precision weights
#
# By default, `load_state_dict` copies values *into* the parameters, so fp32 parameters stay fp32 if the file has fp16
# weights. But with `assign=True` or after `.half()`, the parameters can be in 16 bits:
#
# - If parameters are fp16, the scaler [can refuse](08c_scaler.ipynb#The-parameters-are-fp16) to unscale their
#   gradients.
# - If parameters are bf16, small updates can be rounded away.
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
# - **Average the weights (EMA).** The code needs no change for AMP, because the weights are fp32. Keep the average in
#   fp32 too: in 16 bits, its small updates may be rounded away.
# - **Compile the model.** Call `torch.compile(model)` in the same way as without AMP. Use the same autocast settings
#   in every call, because other settings make PyTorch compile the model again ([notebook
#   18](18_inference_and_export.ipynb#What-torch.compile-changes)).
# - **Evaluate during training.** Evaluate in a separate autocast block. By default, the block of a training step
#   caches 16-bit copies of the weights. These copies are out of date after the optimizer step.
#
# ## Summary
#
# | recipe | what AMP adds | what goes wrong without it |
# |---|---|---|
# | [Clip](#Clip-gradients) | `scaler.unscale_(optimizer)` before clipping | fp16: SGD nearly stands still |
# | [Accumulate](#Accumulate-gradients) | `scale` per batch; `step`, `update` and (if you clip) `unscale_` per group | fp16: a second `unscale_` in a group raises an error |
# | [Penalise](#Penalise-gradients) | scale the inner loss, divide its gradients by `get_scale()` | fp16: without the division, the penalty is far too large |
# | [Schedule](#Schedule-the-learning-rate) | `scheduler.step()` only if the scale did not fall | skipped steps use up the schedule |
# | [Checkpoint](#Checkpoint-activations) | nothing, but use `use_reentrant=False` | parameters may get no gradient |
# | [Several](#Use-several-losses-and-optimizers) | one scaler, one `update` at the end | a step may be twice as long as it should be |
# | [Load](#Load-half-precision-weights) | `model.float()` if parameters are fp16 or bf16 | fp16: often an error; bf16: small updates can vanish |
#
# If your training still breaks, continue with [notebook 08](08_when_amp_breaks.ipynb).
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("07_training_recipes")

# %% [markdown]
# ### 1. What is the norm of the clipped gradient?
#
# A loop clips to a norm of 0.5, but its author forgot `unscale_`. The loss scale is 1024. The true
# gradient has a norm of 6 in one batch, and of 0.0003 in another. Which norms do these gradients have when the
# optimizer uses them?

# %%
norms = ...  # a pair of numbers
exercises.check_norms(norms)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What is the norm of each scaled gradient just before clipping? Which norm is above 0.5? After clipping, `step` divides
# both gradients by the scale.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# norms = (0.5 / 1024, 0.0003)
# ```
#
# The first scaled gradient has a norm of 6144. Clipping reduces the norm to 0.5, and then `step` divides the gradient
# by the scale. The second scaled gradient has a norm of 0.3072, so clipping does not change it.
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
# it. Write the correct function.
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
# Which call can change the scale?
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
# `update` can change the scale, so call `get_scale` before `update`.
#
# </details>
#
# ### 4. What has to come after `unscale_`?
#
# A loop does five more things between `backward` and `scaler.step`. Which of these five go wrong if they come before
# `unscale_`?
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
# Would the result differ if the gradients were 65,536 times too large and were divided afterwards?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# after_unscale = {"log", "clamp", "noise"}
# ```
#
# A gradient of zero stays zero when it is divided. An average of the weights does not depend on gradients.
# <!-- tests/notebooks/test_exercises.py -->
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html).
# - PyTorch, [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html): how the two kinds of
#   checkpoint differ.
