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
# **What you'll do.** Take seven things that real training loops do besides forward, backward and step,
# and add AMP to each of them. Every line that AMP adds or changes is marked. Then see what happens if
# you leave such a line out.
#
# **What you'll learn.**
# - the one rule behind most recipes: ask who looks at the gradients, and whether they are scaled
#   at that moment;
# - which parts of a loop need no change under AMP;
# - how each omission shows itself, since most of them raise no error.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast` and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. You need no GPU. Run the cells up to the
# first recipe, then go to the one that you need.
#
# | what the loop does | recipe |
# |---|---|
# | limits or inspects gradients | [Clip gradients](#Clip-gradients) |
# | sums gradients over several batches | [Accumulate gradients](#Accumulate-gradients) |
# | has gradients in the loss | [Penalise gradients](#Penalise-gradients) |
# | changes the learning rate | [Schedule the learning rate](#Schedule-the-learning-rate) |
# | recomputes activations to save memory | [Checkpoint activations](#Checkpoint-activations) |
# | has several losses or optimizers | [Use several losses and optimizers](#Use-several-losses-and-optimizers) |
# | starts from half precision weights | [Load half precision weights](#Load-half-precision-weights) |
# | does something else | [More recipes](#More-recipes) |

# %% tags=["nbval-ignore-output"]
import math
import warnings

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
# A gradient of length 0.5 is to be clipped to a length of 0.1. Under AMP with fp16 it first arrives
# multiplied by the loss scale, 65,536. Before you run this: does it matter whether we divide by the
# scale before or after we clip?

# %%
scaled = torch.tensor([0.3, 0.4]) * 65536  # what backward leaves
divided_first = scaled / 65536
divided_first *= 0.1 / divided_first.norm()  # clip
clipped_first = scaled * 0.1 / scaled.norm() / 65536
print(f"divided first: {divided_first.norm():.1e}, clipped first: {clipped_first.norm():.1e}")
assert math.isclose(divided_first.norm(), 0.1, rel_tol=1e-6)
assert math.isclose(clipped_first.norm(), 0.1 / 65536, rel_tol=1e-6)

# %% [markdown]
# It matters. If we divide first, the gradient has the length 0.1 that we asked for. If we clip first,
# it is 65,536 times too short: with SGD the training nearly stands still, without any error. So the
# rule behind the recipes is this: **whatever looks at gradients belongs after `unscale_`, and whatever
# makes gradients starts from `scaler.scale(…)`.** What looks only at weights needs no change, because
# autocast leaves the weights in fp32.
#
# ## The setting
#
# We train a small network on five small batches. Even fp16 on a CPU is quick on so little data.

# %%
problem = recipes.SmallProblem(device)
batches, new_model = problem.batches, problem.new_model
assert [len(x) for x, _ in batches] == [16, 16, 16, 16, 8]

# %% [markdown]
# This is the AMP loop. Each line marked `# AMP` is new, and where it replaces another line, the comment
# says which. Without these lines it is the fp32 loop. The fp32 loops of all recipes are in
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
# We enable the scaler for fp16 alone. For bf16 it is
# [disabled](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py): `scale` returns the
# loss unchanged, and `step` only calls `optimizer.step()`. So one function serves both.
#
# ## How a recipe is checked
#
# `check_same` trains a new network with the fp32 loop, in fp16 and in bf16, and compares how far every
# weight has moved. The tolerance is four rounding errors, since a value is rounded several times on its
# way through the network. One rounding has a relative error of up to 2^-11 in fp16 and up to 2^-8 in
# bf16.

# %%
problem.check_same(recipes.train_plain, train_amp)

# %% [markdown]
# The AMP loop moves the weights as the fp32 loop does. Two more helpers show what goes wrong. `backward`
# does the first half of an AMP step, up to the scaled gradients.


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
# You need this if some batches have gradients large enough to throw the training off course.
# Clipping looks at gradients, so `unscale_` comes first. `step` notices that the gradients are unscaled
# already, and does not divide them again.


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
# We can follow the length of the gradient through one such step:

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
# The figure has a logarithmic axis. After `backward` the gradient is 65,536 times too long. `unscale_`
# brings it down to its true length, and clipping shortens it to 0.1.
#
# **Without `unscale_`** we would clip the scaled gradient, in the grey part of the figure. If a gradient
# overflows in fp16, the scaler skips the step. In bf16 nothing skips it: call `clip_grad_norm_` with
# `error_if_nonfinite=True`, or the step makes weights NaN. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Accumulate gradients
#
# You need this if the batch that you want does not fit into memory. Several small batches add up their
# gradients before one step. Each batch is weighted by its share of the samples, so the result is also
# right if the last group is shorter. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# `scale` belongs to every batch. `step` and `update` belong to the end of a group, because all gradients
# that are added up must have the same scale. If you clip as well, put `unscale_` there too.


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
# **With `unscale_` and `update` after every batch** the scaler raises no error, because `update`
# makes it forget that the gradients were unscaled. In the next cell the gradients of two batches
# are 1 and 2, and the learning rate is 1. The weight should move by 3. Before you run it: will it
# move too far or too little?

# %%
weight = nn.Parameter(torch.zeros(1, device=device))
optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler(device.type)
for gradient in (1.0, 2.0):
    scaler.scale(gradient * weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()  # too early, and no error
scaler.step(optimizer)
print(f"the weight moves by {-weight.item():.1e}, and should move by 3")
assert -weight.item() < 1e-4

# %% [markdown]
# The second `unscale_` divided the first gradient again, and `step` divided both once more. Call
# `unscale_` once per group, after its last backward pass.
#
# ## Penalise gradients
#
# You need this if the loss itself contains gradients, for example to keep a function smooth.
#
# We make the inner gradient from the scaled loss, so that it survives fp16, and [unscale it by
# hand](https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty), because
# `unscale_` knows only `.grad`. The penalty belongs to the forward pass, so it is under autocast again.
# If the inner gradient overflows in fp16, so does the loss, and the step is
# skipped. <!-- tests/notebooks/test_07_training_recipes.py -->


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
# **Without the division by hand** every gradient in the penalty is 2^16 times too large. The penalty
# adds up their squares, so it is 2^32 times too large. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Schedule the learning rate
#
# You need this nearly always. The fp32 loop calls `scheduler.step()` after every step.
#
# With AMP a step may be skipped, and the schedule should count only the steps that were taken.
# `scaler.step` does not tell us, but the scale does: with one optimizer, and until it is 0, [it
# falls](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py) if, and only if, the step
# was skipped.


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
# **Without this check** skipped steps use up the schedule. A few lost steps of ten thousand do not
# matter, as a rule of thumb. They matter in a short warm-up, because that is when the scaler searches
# for its scale. PyTorch warns only if the very first step was skipped and the optimizer is not fused.
# <!-- tests/notebooks/test_07_training_recipes.py --> `get_scale` waits for the device, as [notebook
# 03](03_grad_scaler_step_by_step.ipynb) says.
#
# ## Checkpoint activations
#
# You need this if activations fill the memory. A checkpointed part [keeps only its
# input](https://docs.pytorch.org/docs/stable/checkpoint.html) and runs a second time in the backward
# pass. Here the first two layers do so.


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
# AMP changes nothing here. The second run happens outside of the autocast block, but `checkpoint` has
# recorded the state of autocast and restores it. In fp16 the weights are the same to the last bit, with
# and without checkpointing: <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
problem.check_same(recipes.train_plain, train_amp, make_model=Checkpointed)
recomputed = problem.change(train_amp, torch.float16, make_model=Checkpointed)
assert torch.equal(recomputed, problem.change(train_amp, torch.float16))

# %% [markdown]
# In torch 2.15 selective checkpointing (`context_fn`) is an exception: if a region uses a weight that
# was cast before, as where two share one, backward raises `… not found in storage`, unless autocast has
# `cache_enabled=False`. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# **Without `use_reentrant=False`** you get the older kind of checkpoint, with a warning that asks you to
# choose. It cuts the graph if no *input* requires a gradient, as with a batch of data. The parameters
# inside then get no gradient. If your optimizer has other parameters too, you see no error: the
# checkpointed part just never learns. <!-- tests/notebooks/test_07_training_recipes.py --> If it has no
# others, the scaler complains:


# %%
def error_of(call, *args):
    """The error that `call(*args)` must raise, as text."""
    try:
        call(*args)
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    raise LookupError("this was expected to fail")


model, _, scaler = new_run()
body, head = model[:2], model[2]
with warnings.catch_warnings(action="ignore"), torch.autocast(device.type, dtype=torch.float16):
    loss = head(checkpoint(body, batches[0][0])).float().sum()
scaler.scale(loss).backward()
message = error_of(scaler.step, sgd(body))
print(message)
assert all(p.grad is None for p in body.parameters())
assert "No inf checks were recorded for this optimizer" in message

# %% [markdown]
# The message means that the scaler found no gradient in this optimizer.
#
# ## Use several losses and optimizers
#
# Use one scaler for all. Scale every loss by it, let every optimizer step through it, and call `update`
# once, at the end. An `update` between two steps may change the scale while the gradients of the second
# optimizer still have the old one. In the next cell, the gradients of the first optimizer overflow:


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
# Gradients that were multiplied by 65,536 were divided by 32,768. The second optimizer also stepped
# although the first was skipped. If that does harm in your training, use one optimizer with two
# parameter groups, which steps as a whole or not at all. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Load half precision weights
#
# `load_state_dict` copies values *into* the parameters, which stay fp32. So a file of fp16 weights needs
# no care. But `assign=True` with fp16 weights, or `.half()` on the model, makes the parameters fp16, and
# the scaler refuses to unscale their gradients. With bf16 parameters nothing complains, and small
# updates are rounded away. Call `model.float()` before you make the
# optimizer. <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
half_weights = {name: tensor.half() for name, tensor in new_model().state_dict().items()}
model, _, scaler = new_run()
model.load_state_dict(half_weights)
assert model[0].weight.dtype is torch.float32

model.load_state_dict(half_weights, assign=True)
backward(model, scaler)
message = error_of(scaler.step, sgd(model))
print(message)
assert message == "ValueError: Attempting to unscale FP16 gradients."

# %% [markdown]
# ## More recipes
#
# These need at most one line. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# - **Average the weights (EMA).** AMP changes nothing, because the weights are fp32. Keep the average in
#   fp32 too: in bf16 or fp16 its small updates are rounded away, and it may never move.
# - **Compile the model.** Call `torch.compile(model)` as without AMP. Use the same autocast block in every
#   call, also in evaluation, or the model is compiled again ([notebook
#   18](18_inference_and_export.ipynb#What-torch.compile-does-to-it)). [Notebook
#   10](10_speed_ladder.ipynb) measures what it gains.
# - **Evaluate during training.** Give evaluation an autocast block of its own. Inside the block of the
#   training step it would use stale weights: the casts that autocast cached before the step.
# - **Freeze layers.** A frozen layer may be stored in the dtype of autocast:
#   `layer.requires_grad_(False)` and `layer.to(torch.float16)`. That halves its memory. For a linear
#   layer or a convolution it does not change the output, because autocast would cast the weight anyway.
# - **Write an autograd function.** Decorate `forward` with `torch.amp.custom_fwd` and `backward` with
#   `torch.amp.custom_bwd` ([notebook 02](02_autocast_dtypes.ipynb)).
# - **Choose the optimizer.** AMP works with optimizers such as SGD and Adam. Always call
#   `scaler.step(optimizer)`. With `optimizer.step()` Adam seems to train, until the first overflow makes
#   the weights NaN.
# - **Resume a run.** Save the scaler's state too ([notebook 05](05_cifar10_mobilenet.ipynb)).
#
# ## Summary
#
# Whatever makes gradients starts from `scaler.scale(…)`. Whatever looks at them comes after `unscale_`.
# Whatever looks at weights stays the same, because weights are fp32.
#
# | recipe | what AMP adds | what goes wrong without |
# |---|---|---|
# | [Clip](#Clip-gradients) | `scaler.unscale_(optimizer)` before clipping | SGD nearly stands still |
# | [Accumulate](#Accumulate-gradients) | `scale` per batch; `step` and `update` per group | gradients are divided by the scale again |
# | [Penalise](#Penalise-gradients) | scale the inner loss, divide its gradients by `get_scale()` | the penalty is 2^32 times too large |
# | [Schedule](#Schedule-the-learning-rate) | `scheduler.step()` only if the scale did not fall | skipped steps use up the schedule |
# | [Checkpoint](#Checkpoint-activations) | nothing; `use_reentrant=False` | parameters get no gradient |
# | [Several](#Use-several-losses-and-optimizers) | one scaler, one `update` at the end | a step is twice as long as it should be |
# | [Load](#Load-half-precision-weights) | nothing; `model.float()` if parameters are half | the scaler raises (fp16), or small updates vanish (bf16) |
#
# If your training breaks all the same, go on with [notebook 08](08_when_amp_breaks.ipynb), which
# starts from the error message.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("07_training_recipes")

# %% [markdown]
# ### 1. How long is the gradient that is left?
#
# A loop clips to a norm of 0.5, but its author forgot `unscale_`. The loss scale is 1024. In one
# batch the true gradient has a length of 6, in another of 0.0003. Work out on paper how long the
# gradient is that the optimizer gets in each.

# %%
lengths = ...  # a pair of numbers
exercises.check_lengths(lengths)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How long are the two gradients when they are clipped, and which of them is longer than 0.5 then?
# `step` divides by the scale afterwards.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# lengths = (0.5 / 1024, 0.0003)
# ```
#
# The first is 6144 when it is clipped to 0.5, and is then divided by 1024. The second is 0.3072,
# which is below the limit, so that it comes through unharmed. So large gradients, which clipping
# was meant to keep at 0.5, are made far too small, and small ones pass unchanged.
#
# </details>
#
# ### 2. Accumulate and clip
#
# Complete the step for one group: the gradients of all `losses` are added up and clipped to a norm
# of 0.1. The losses are already weighted by their share of the samples.


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
# Clipping each loss on its own would limit the parts and not their sum.
#
# </details>
#
# ### 3. Mend the schedule
#
# This end of a step should leave the schedule alone if the step was skipped, and move it on
# otherwise. It always moves it on. Find the mistake and write the function as it should be.
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
    return ...  # the five lines above, mended


exercises.check_end_of_step(end_of_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which call changes the scale? After many good steps it may also *rise*.
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
# Only `update` changes the scale here, so `before` has to be read before it.
#
# </details>
#
# ### 4. What has to come after `unscale_`?
#
# A loop does five more things between `backward` and `scaler.step`. Which of them go wrong if they
# come before `unscale_`?
#
# - `log`: it writes down the norm of the gradients;
# - `clamp`: it limits every single element of a gradient to ±0.1;
# - `noise`: it adds noise with a standard deviation of 0.01 to the gradients;
# - `freeze`: it sets the gradient of the bias to zero;
# - `average`: it updates a moving average of the weights.

# %%
after_unscale = ...  # a set of these names, such as {"log", "freeze"}
exercises.check_after_unscale(after_unscale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each, ask whether it looks at gradients at all, and whether the result would differ if they were
# 65,536 times too large and divided afterwards.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# after_unscale = {"log", "clamp", "noise"}
# ```
#
# A gradient that is set to zero stays zero when it is divided, and an average of the weights does
# not look at gradients.
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
