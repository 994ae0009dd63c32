# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Repair clipping, the loop and a resumed run
#
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [Clipping leaves next to nothing of the gradients](#Clipping-leaves-next-to-nothing-of-the-gradients);
# - [Clipping refuses a norm that is not finite](#Clipping-refuses-a-norm-that-is-not-finite);
# - [The state of the scaler cannot be loaded](#The-state-of-the-scaler-cannot-be-loaded);
# - [The loss stands still because the whole loop is in one block](#The-loss-stands-still-because-the-whole-loop-is-in-one-block);
# - [After resuming the loss jumps or is NaN](#After-resuming-the-loss-jumps-or-is-NaN).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from course import figures, start
from course.failures import make, message_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## Clipping leaves next to nothing of the gradients
#
# `AMP0015` <!-- failure
# symptoms = [
#   "the loss does not fall, or stops falling",
#   "logged gradients are 65536 times too large, or jump by a factor of 2",
# ]
# -->
#
# **What you see.** There is no message. The model learns without clipping, but hardly with it.
#
# **The smallest program that does it.** We clip to a norm of 1 straight after `backward`.


# %%
def clipped_step(unscale):
    """One step with clipping; returns the norm that was found, and how far the weights moved."""
    model, optimizer = make(lr=1.0)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).square().sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - start
    return norm.item(), moved.norm().item()


norm, moved = clipped_step(unscale=False)
print(f"norm before clipping {norm:.1e}, moved by {moved:.1e}")
assert moved < 2e-5

# %% [markdown]
# **Why.** The gradients were still scaled by 65536 when they were cut to a norm of 1. They were
# divided *afterwards*, so that only 1.5e-5 is left. Adam rescales its gradients and so hides most
# of it ([notebook 05](05_cifar10_mobilenet.ipynb) shows how well), but nearly *every* step is
# clipped.
#
# **The fix.** Call `scaler.unscale_(optimizer)` before you clip.

# %%
norm, moved = clipped_step(unscale=True)
print(f"norm before clipping {norm:.1e}, moved by {moved:.1e}")
assert abs(moved - 1) < 1e-3  # the full length that clipping allows

# %% [markdown]
# What reads gradients in `backward()` sees them scaled too: a hook (`register_hook`), `wandb.watch`
# ([a report](https://github.com/wandb/wandb/issues/4369)), or [Lightning's
# `on_after_backward`](https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/core/hooks.py).
# Log them after `unscale_`.

# %%
seen = []
weight = nn.Parameter(torch.ones(1))
weight.register_hook(lambda gradient: seen.append(gradient.item()))
scaler = torch.amp.GradScaler("cpu")
scaler.scale(2 * weight.sum()).backward()
scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
assert (seen, weight.grad.item()) == ([131072.0], 2.0)

# %% [markdown]
# **Notice it earlier.** Log the norm that `clip_grad_norm_` returns: here it is 2.9e5 when it is
# still scaled, and 4.5 when it is not.

# %% [markdown]
# ## Clipping refuses a norm that is not finite
#
# `AMP0016` <!-- failure
# messages = [
#   "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.",
# ]
# -->
#
# **What you see.** `clip_grad_norm_` raises
# ``The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.``
#
# **The smallest program that does it.** We tell clipping to be strict, in a step that overflows.


# %%
def overflowing_step(strict):
    """A step with an infinite gradient; returns whether the weights are as before."""
    model, optimizer = make()
    before = model[0].weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=strict)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(model[0].weight, before)


message = message_of(lambda: overflowing_step(strict=True))
print(message)
assert (
    "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped."
    in message
)

# %% [markdown]
# **Why.** In fp32 an infinite gradient is a fault, and strict clipping finds it. With a scaler,
# an overflow now and then is normal, and `scaler.step` deals with it in the next line.
#
# **The fix.** In fp16, leave `error_if_nonfinite=False`, the default. `unscale_` has noted the
# infinity, so `step` skips the optimizer. In bf16 the scaler is disabled and skips nothing, so keep
# the error: without it, an infinite gradient makes its weight NaN, and a NaN gradient all weights that
# are clipped with it. <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
assert overflowing_step(strict=False)

# %% [markdown]
# **Notice it earlier.** Count the norms that are not finite: each skipped step has one.

# %% [markdown]
# ## The state of the scaler cannot be loaded
#
# `AMP0017` <!-- failure
# messages = [
#   "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.",
# ]
# -->
#
# **What you see.** `scaler.load_state_dict` raises
# `The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.`
#
# **The smallest program that does it.** We load the checkpoint of a bf16 run into an fp16 run.

# %%
from_bf16 = torch.amp.GradScaler("cpu", enabled=False).state_dict()
scaler = torch.amp.GradScaler("cpu")
message = message_of(lambda: scaler.load_state_dict(from_bf16))
print(message)
assert (
    "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
    in message
)

# %% [markdown]
# **Why.** A disabled scaler has no state, and saves an empty dict. The other way round nothing is
# raised, because a disabled scaler ignores what it is told to load.
#
# **The fix.** Load the state only if there is one. A fresh scaler finds a lower scale in a few steps;
# upwards it doubles after 2000 steps without an overflow, by default ([notebook
# 03](03_grad_scaler_step_by_step.ipynb)).

# %%
for saved in (from_bf16, torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()):
    scaler = torch.amp.GradScaler("cpu")
    if saved:
        scaler.load_state_dict(saved)
    print(f"resumed with a scale of {scaler.get_scale():.0f}")
assert scaler.get_scale() == 1024
disabled = torch.amp.GradScaler("cpu", enabled=False)
disabled.load_state_dict(saved)  # nothing is raised
assert disabled.get_scale() == 1

# %% [markdown]
# **Notice it earlier.** Save the precision in the checkpoint, and compare it when you resume.

# %% [markdown]
# ## The loss stands still because the whole loop is in one block
#
# `AMP0026` <!-- failure
# symptoms = [
#   "the loss does not fall, or stops falling",
# ]
# -->
#
# **What you see.** On the same batch the loss is the same in every step, if all trained weights are
# cast and nothing in the model is random. Otherwise it may fall too slowly.
#
# **The smallest program that does it.** We put a second autocast block around the whole loop.


# %%
def losses_of(outer):
    """The losses of three steps inside the context manager `outer`."""
    model, optimizer = make()
    losses = []
    with outer:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), torch.ones(1, 2))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


stuck = losses_of(torch.autocast("cpu", dtype=torch.bfloat16))
print("one block around the loop:", *[f"{loss:.1f}" for loss in stuck])
assert stuck[0] == stuck[1] == stuck[2]

# %% [markdown]
# **Why.** The casts of trained weights are kept until the outermost block ends. The optimizer changes
# the weights, but the forward pass still uses the old casts, so the loss is 0.3 in all three steps.
# An outer block with `enabled=False` has the same effect.
#
# **The fix.** Use one block for each forward pass, and none around it. The casts also go stale if
# you load other values into the weights between two forward passes, such as averaged ones (EMA). The
# second pass would then still use the first ones. End the block before you swap them.

# %%
learning = losses_of(nullcontext())
print("one block a forward pass: ", *[f"{loss:.1f}" for loss in learning])
assert learning[0] == stuck[0]
assert learning[2] < learning[1] < learning[0]
assert losses_of(torch.autocast("cpu", enabled=False)) == stuck
model, _ = make()
other = {name: 2 * value for name, value in model.state_dict().items()}
with torch.autocast("cpu", dtype=torch.bfloat16):
    before = model(x)
    model.load_state_dict(other)
    assert torch.equal(model(x), before)  # the swap is not seen
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert not torch.equal(model(x), before)

# %% [markdown]
# **Notice it earlier.** Stop and look when two losses of the same batch are equal.

# %% [markdown]
# ## After resuming the loss jumps or is NaN
#
# `AMP0046` <!-- failure
# symptoms = [
#   "the loss is NaN or jumps after resuming from a checkpoint",
#   "a resumed run deviates from one without a break, or its optimizer counts wrong steps",
#   "the loaded model is worse than the one that was saved",
# ]
# -->
#
# **What you see.** A run was fine when its checkpoint was saved. After loading it, the loss is NaN in
# the second step or much higher than before, or the first steps are skipped.
#
# **The smallest program that does it.** We save the state of Adam for an fp32 weight, and load it
# for the same weight in fp16 and in fp32.


# %%
def step_of_adam(weight, state=None):
    """One step with a gradient of 1e-5, from a saved state; returns the optimizer."""
    adam = torch.optim.Adam([weight])
    if state is not None:
        adam.load_state_dict(state)
    weight.grad = torch.full_like(weight, 1e-5)
    adam.step()
    return adam


saved = step_of_adam(nn.Parameter(torch.ones(1))).state_dict()
for dtype in (torch.float16, torch.float32):
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    moment = step_of_adam(weight, saved).state[weight]["exp_avg_sq"]
    print(f"{dtype}: second moment {moment.item():.0e}, weight {weight.item():.3f}")
    assert moment.dtype is dtype
    assert weight.isfinite().all() == (dtype is torch.float32)

# %% [markdown]
# **Why.** `load_state_dict` of an optimizer casts its state to the dtype of the weights. Adam's second
# moments are squares of gradients. In fp16 small ones become 0, and the step divides by 0 (unless Adam
# is fused). In bf16 they keep 8 bits. Five other causes: <!-- tests/notebooks/test_08_when_amp_breaks.py -->
# - The weights were saved with `.half()`. Digits are lost, and a running variance above 65504 is infinite.
#   Save what you go on from in fp32.
# - The state of the *optimizer* was saved in 16 bits. Loading casts the moments back, but not Adam's
#   `step`, which is a tensor too: in bf16 301 is 300, and 300 + 1 is 300 again. Save the state as it is.
#   In an old file, set `step` to the true number, in fp32, before you load it.
# - The state of the *scaler* was not loaded. A fresh one starts at 65536, so the gradients may overflow
#   and the first steps are skipped. That makes no weight NaN.
# - `dcp.load` filled a new optimizer's own `state_dict()`, which is empty, and so the moments are
#   missing. Use `get_state_dict` ([notebook 11](11_scale_out.ipynb#Save-on-four,-resume-on-two-(optional))).
# - The NaN is in the checkpoint, often in the buffers of batch normalisation
#   ([section 7](08a_values.ipynb#Training-is-fine-but-evaluation-is-NaN)).
#
# **The fix.** Keep the weights in fp32, and make and load the optimizer after that. Save and load the
# state of the scaler too. If the weights are in 16 bits on purpose, and the state in fp32 (an optimizer
# of your own, as in [notebook 16](16_low_precision_state.ipynb)), put the saved tensors back after
# loading:

# %%
weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
adam = torch.optim.Adam([weight])
adam.load_state_dict(saved)
assert adam.state[weight]["exp_avg_sq"].dtype is torch.bfloat16
parameters = [weight for group in adam.param_groups for weight in group["params"]]
for number, state in saved["state"].items():  # numbered in the order of the parameters
    adam.state[parameters[number]].update(state)
assert torch.equal(adam.state[weight]["exp_avg_sq"], saved["state"][0]["exp_avg_sq"])
weight.grad = torch.ones(1, dtype=torch.bfloat16)
assert "expected dtype float for `end`" in message_of(adam.step)  # PyTorch's own Adam refuses it
assert torch.tensor(1e5).half().isinf()
saved["state"][0]["step"] = torch.tensor(301.0).bfloat16()
weight = nn.Parameter(torch.ones(1))
assert step_of_adam(weight, saved).state[weight]["step"] == 300  # 301 and one step
saved["state"][0]["step"] = torch.tensor(301.0)
assert step_of_adam(weight, saved).state[weight]["step"] == 302

# %% [markdown]
# PyTorch's own Adam refuses this state in another dtype than the weight, as it does if the model is cast
# between two steps. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# A scaler that was loaded does not skip the first step:


# %%
def first_step_is_skipped(scaler):
    """Whether a step with a gradient of 10 in fp16 overflows at the scaler's present scale."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((10 * weight.half()).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.item() == 1


fresh = torch.amp.GradScaler("cpu")
assert first_step_is_skipped(fresh)
loaded = torch.amp.GradScaler("cpu")
loaded.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict())
assert not first_step_is_skipped(loaded)

# %% [markdown]
# **Notice it earlier.** Before you save, check that all parameters and buffers are finite. `amp-lab
# migrate` finds a checkpoint without the state of the scaler. <!-- tests/migrate/test_mistakes.py -->

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
