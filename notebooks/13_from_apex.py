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
# Apex is an NVIDIA package that offered mixed precision before PyTorch did.
#
# **What you'll do.** Train a small network at Apex's four optimization levels, O0 to O3, and compare them with today's
# code. Then move old code to `torch.amp`, by hand and with `amp-lab migrate`, and resume from a checkpoint in Apex's
# format.
#
# **What you'll learn.**
# - what each level did to weights, activations, gradients and optimizer, and to memory;
# - how to translate an old training loop line by line;
# - which defaults and argument positions changed;
# - what an Apex checkpoint contains, and what is missing.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU and no Apex.

# %% tags=["nbval-ignore-output"]
import difflib
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

from course import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# These imports come from torch:

# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

torch.set_num_threads(1)
fp16, bf16 = torch.float16, torch.bfloat16

# %% [markdown]
# ## The idea in five lines
#
# At [Apex's default level, O1](https://nvidia.github.io/apex/amp.html#properties), functions such as `F.linear`
# first cast their inputs to fp16. We run a linear layer with these casts by hand, and then under autocast. Before
# you run the cell: how many of the outputs will differ?

# %%
torch.manual_seed(0)
layer, x = nn.Linear(8, 16).to(device), torch.randn(64, 8).to(device)
as_apex_did = F.linear(x.half(), layer.weight.half(), layer.bias.half())
with torch.autocast(device.type, dtype=fp16):
    today = layer(x)
print(f"{(today != as_apex_did).sum()} of {today.numel()} outputs differ")
assert torch.equal(today, as_apex_did)

# %% [markdown]
# Autocast made the same casts.
#
# ## The names, then and now
#
# Apex removed its `amp` [in 2025](https://github.com/NVIDIA/apex/pull/1896). Replace Apex's names with these names
# of torch.
# <!-- tests/migrate/test_apex.py --> <!-- tests/remedies/test_apex_remedies.py -->
#
# | Apex | today |
# |---|---|
# | `amp.initialize(model, optimizer, opt_level="O1")` | `torch.autocast` around forward pass and loss |
# | the loss scaler of `amp.initialize` | `torch.amp.GradScaler` |
# | `amp.scale_loss(loss, optimizer)` | `scaler.scale(loss)` |
# | `amp.master_params(optimizer)` | the optimizer's parameters, usually `model.parameters()` |
# | `amp.state_dict()` | `scaler.state_dict()` |
# | `amp.disable_casts()` | `torch.autocast(…, enabled=False)` |
# | `amp.float_function` | `.float()` for the inputs, in a `torch.autocast(…, enabled=False)` block |
# | `apex.optimizers.FusedAdam` | `torch.optim.AdamW(…, weight_decay=0, fused=True)` |
# | `apex.parallel.DistributedDataParallel` | `torch.nn.parallel.DistributedDataParallel` |
# | `apex.parallel.convert_syncbn_model` | `torch.nn.SyncBatchNorm.convert_sync_batchnorm` |
# | `apex.normalization.FusedLayerNorm` | `torch.nn.LayerNorm` |
#
# ## What an optimization level was
#
# Each level had [these
# options](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/frontend.py):
#
# | | O0 | O1 | O2 | O3 |
# |---|---|---|---|---|
# | model and inputs cast to | fp32 | no cast | fp16 | fp16 |
# | functions of torch cast their inputs | no | yes | no | no |
# | batch norm stays in fp32 | yes | yes | yes | no |
# | the optimizer updates fp32 weights | yes | yes | yes, as master weights | no |
# | loss scale | 1 | dynamic | dynamic | 1 |
#
# - **Casts in functions of torch** (O1): functions such as `F.linear` and `F.conv2d` cast their inputs to fp16.
#   Functions such as softmax and `cross_entropy` cast [their inputs to
#   fp32](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/lists/functional_overrides.py).
# - **Master weights** (O2): the optimizer updates an fp32 copy of each fp16 weight.
# - **The dynamic loss scale** (O1 and O2) [changed during
#   training](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/scaler.py), as the
#   scale of a `GradScaler` does.
#
# ## What each level did, and what replaces it today
#
# We train one small network at each level with [a toy version of Apex's `amp`](course/toy_apex.py), and then with
# [today's code](course/apex_training.py).
# %%
from course.apex_training import (
    check_close,
    dtypes,
    new_adam,
    new_model,
    small_batches,
    train_apex,
    train_today,
)
from course.toy_apex import ToyApex

batches = small_batches(device)

# %% [markdown]
# We print the dtypes of each run. At O3 we train for one step only, because the second loss is NaN. Before you run
# this: which tensors do you expect to be fp16 at O1?


# %%
runs = {
    level: train_apex(level, batches, new_model(device), steps=1 if level == "O3" else 24)
    for level in ("O0", "O1", "O2", "O3")
}
for name, dtype in (("fp32 today", None), ("autocast", fp16)):
    runs[name] = train_today(dtype, batches, new_model(device))
table = {name: dtypes(run) for name, run in runs.items()}
print(f"{'':<13}" + "".join(f"{what:<14}" for what in table["O0"]))
for name, found in table.items():
    print(f"{name:<13}" + "".join(f"{dtype:<14}" for dtype in found.values()))
assert [what for what, dtype in table["O1"].items() if dtype == "float16"] == ["activations"]
assert table["O1"] == table["autocast"]
assert table["O0"] == table["fp32 today"]

# %% [markdown]
# The rows of O1 and autocast are the same: only the activations are fp16.
#
# ### O0 and O1: fp32, and casts around ops
#
# Today O0 is a loop in fp32, without autocast. O1 is `torch.autocast` with `dtype=torch.float16` and a
# `GradScaler`. For each level, we compare the losses of the toy Apex and of today's code:

# %%
SAME = 0 if device.type == "cpu" else 2**-9
check_close(runs["fp32 today"], runs["O0"], SAME)
check_close(runs["autocast"], runs["O1"], SAME)
assert runs["O1"].scale == 2.0**13  # it began at 2**16: three steps were skipped

# %% [markdown]
# A classifier needs one more change: write `F.cross_entropy(logits.float(), targets)`. O1 computed `cross_entropy` in
# fp32, but autocast on CUDA [can round an intermediate result to
# fp16](09_xray_your_model.ipynb#The-surprise-in-cross-entropy).
#
# ### O2: fp16 weights, fp32 masters
#
# Today's code for O2 is the same as for O1. It needs no separate master weights: the model's parameters stay in fp32.
# Before you run this: how close are the losses of O2 and autocast?

# %%
check_close(runs["autocast"], runs["O2"], tolerance=2**-9)
assert runs["autocast"].losses != runs["O2"].losses

# %% [markdown]
# The losses are close, but not equal. In `amp.initialize`, Apex [copied the master weights from fp16
# weights](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/_process_optimizer.py),
# which are rounded.
#
# ### O3: everything in fp16
#
# Today O3 is `model.half()` with fp16 inputs. Two problems follow:
#
# - Small weight updates are rounded away ([notebook 16](16_low_precision_state.ipynb)).
# - In fp16, Adam's usual `eps` of 1e-8 becomes zero, so Adam can divide by zero.
#
# We check that 1e-8 becomes zero, and train at O3 for three steps:

# %%
assert torch.tensor(1e-8).half() == 0
losses = train_apex("O3", batches, new_model(device), steps=3).losses
print("losses at O3:", *(f"{loss:.1f}" for loss in losses))
assert losses[1] != losses[1]  # NaN

# %% [markdown]
# ### What it costs in memory
#
# The table shows the bytes that each parameter of a linear layer takes in training, without activations and autocast's
# copies:
# <!-- tests/notebooks/test_13_from_apex.py -->
#
# | | weights | gradients | master weights | gradients of masters | Adam's state | total |
# |---|---|---|---|---|---|---|
# | O0, O1, autocast | 4 | 4 | | | 8 | 16 |
# | O2 | 2 | 2 | 4 | 4 | 8 | 20 |
# | O3 | 2 | 2 | | | 4 | 8 |
#
# O2 took the most memory per parameter.
#
# ## The loop, line by line
#
# Here is an Apex loop with gradient clipping. We run it with the toy Apex:

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
old_model = new_model(device)
with ToyApex() as amp:
    exec(OLD_LOOP, globals() | {"model": old_model, "optimizer": new_adam(old_model)})
assert old_model[0].weight.grad.norm() <= 0.1  # the last gradient is clipped

# %% [markdown]
# Here is today's loop. On a CPU, it computes exactly the same final weights:

# %%
model = new_model(device)
optimizer = new_adam(model)
scaler = torch.amp.GradScaler(device.type)  # was amp.initialize(…)
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):  # new
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()  # was scaled_loss.backward(), in with amp.scale_loss(…)
    scaler.unscale_(optimizer)  # new: Apex did this at the end of its block
    clip_grad_norm_(model.parameters(), 0.1)  # was amp.master_params(optimizer)
    scaler.step(optimizer)  # was optimizer.step()
    scaler.update()  # new: Apex did this at the end of its block
ours, theirs = (parameters_to_vector(m.parameters()) for m in (model, old_model))
torch.testing.assert_close(ours, theirs, rtol=SAME, atol=SAME)

# %% [markdown]
# Without `unscale_`, you clip gradients that are still scaled ([notebook 07](07_training_recipes.ipynb)).
#
# Other options of Apex have these replacements:
#
# | Apex | today |
# |---|---|
# | `delay_unscale=True`, to accumulate | `scale(loss).backward()` for each micro-batch, then `step` and `update` once |
# | `num_losses=2`, `loss_id=1` | one scaler for all losses, as in [exercise 4](#4.-Two-losses,-two-optimizers) |
# | `min_loss_scale`, `max_loss_scale` | check the scale after each `update()`, as in [exercise 3](#3.-Keep-the-scale-within-limits) |
# | `keep_batchnorm_fp32` | not needed | <!-- tests/notebooks/test_13_from_apex.py -->
#
# ## From torch.cuda.amp to torch.amp
#
# `torch.cuda.amp.autocast`, `torch.cpu.amp.autocast` and `torch.cuda.amp.GradScaler` still work in torch 2.15,
# with a deprecation warning:

# %%
for old_name in (torch.cuda.amp.autocast, torch.cpu.amp.autocast, torch.cuda.amp.GradScaler):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old_name(enabled=False)
    assert [warning.category for warning in caught] == [FutureWarning]

# %% [markdown]
# Two things can go wrong when you replace these names with names of `torch.amp`.
#
# **The default dtype.** `torch.cuda.amp.autocast` always defaults to fp16, and `torch.cpu.amp.autocast` to bf16.
# `torch.autocast` has the same defaults, but not inside another autocast block for the same device type. There it
# defaults to the dtype of the outer block: <!-- tests/notebooks/test_13_from_apex.py -->

# %%
x = torch.ones(2, 2)
with torch.autocast("cpu", dtype=fp16):
    with torch.autocast("cpu"):  # was torch.cpu.amp.autocast(), in bf16
        renamed = (x @ x).dtype
    with torch.autocast("cpu", dtype=bf16):
        written_out = (x @ x).dtype
print(f"without dtype: {renamed}, with dtype=bf16: {written_out}")
assert (renamed, written_out) == (fp16, bf16)

# %% [markdown]
# So always pass `dtype`.
#
# **The order of arguments.** [The device now comes first](https://docs.pytorch.org/docs/stable/amp.html):
#
# | old | new |
# |---|---|
# | `autocast(enabled, dtype, cache_enabled)` | `autocast(device_type, dtype, enabled, cache_enabled)` |
# | `GradScaler(init_scale, growth_factor, …)` | `GradScaler(device, init_scale, growth_factor, …)` |
#
# `torch.autocast(True)` raises an error, but `torch.amp.GradScaler(1024.0)` does not:
# <!-- tests/notebooks/test_13_from_apex.py -->

# %%
wrong_scaler = torch.amp.GradScaler(1024.0)
print(f"GradScaler(1024.0) has the scale {wrong_scaler.get_scale():.0f}")
assert wrong_scaler.get_scale() == 65536

# %% [markdown]
# The scaler took 1024.0 as the device, and used its default scale. Pass `init_scale` by keyword to avoid this.
#
# ## Let a tool do it (optional)
#
# In files and notebooks, `amp-lab migrate PATH --write` rewrites old names of torch, and [parts of
# Apex](../docs/migrate.md#apex). The command also reports what you have to change by hand.
# <!-- tests/migrate/test_files.py, tests/migrate/test_apex.py -->
#
# This old program relies on the old default dtypes and on the old order of arguments:

# %%
OLD_PROGRAM = """
from torch.cuda.amp import GradScaler, autocast
from torch.cpu import amp as cpu_amp

scaler = GradScaler(2.0**12, enabled=use_cuda)
for x, y in batches:
    with autocast(use_cuda), cpu_amp.autocast(not use_cuda):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
"""

# %% [markdown]
# A minus marks the old lines and a plus marks the new lines:

# %%
if find_spec("libcst") is None:
    print("amp-lab migrate needs libcst, which is not installed: pip install libcst")
else:
    from amp_lab.migrate import migrate_source

    new_program, _ = migrate_source(OLD_PROGRAM)
    old_lines, new_lines = OLD_PROGRAM.splitlines(), new_program.splitlines()
    changes = list(difflib.unified_diff(old_lines, new_lines, lineterm="", n=0))[2:]
    print("\n".join(line for line in changes if not line.startswith("@@")))
    assert migrate_source(new_program)[0] == new_program  # nothing is left to do

# %% [markdown]
# ## Checkpoints that Apex wrote
#
# [Apex's manual](https://nvidia.github.io/apex/amp.html#checkpointing) recommended a checkpoint with the states of the
# model, the optimizer and `amp`. In such a checkpoint:
#
# - Parameter names begin with `module.` if the saved model was wrapped in `DistributedDataParallel`.
# - At O2, the file contains the fp16 weights, [cast to
#   fp32](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/_initialize.py). The
#   file does not contain the master weights, which are more accurate.
#
# Our reference run trains for eight steps, writes a checkpoint, and trains for eight more steps. A resumed run
# should reproduce the last eight steps.
# <!-- tests/notebooks/test_13_from_apex.py -->

# %%
from course.apex_training import Run, today_step, train_and_save

folder = tempfile.TemporaryDirectory()
PATH = Path(folder.name) / "apex.pt"
INTERVAL = 6  # good steps until the scale grows
whole = train_and_save("O1", batches, new_model(device), PATH, INTERVAL)

# %% [markdown]
# We translate the scaler's state. Each scaler counts the good steps since its scale last changed. Apex calls this
# count `unskipped`, and `GradScaler` calls it `_growth_tracker`.


# %%
def scaler_state(amp_state, number=0, growth_interval=2000):
    """The state of a GradScaler that continues where Apex's loss scaler stopped."""
    old = amp_state[f"loss_scaler{number}"]
    return {
        "scale": old["loss_scale"],
        "growth_factor": 2.0,  # Apex had no other
        "backoff_factor": 0.5,
        "growth_interval": growth_interval,
        "_growth_tracker": old["unskipped"],
    }


state = torch.load(PATH, weights_only=True)["amp"]
print(dict(state))
assert scaler_state(state).keys() == torch.amp.GradScaler("cpu").state_dict().keys()

# %% [markdown]
# Now we resume the run at O1 with today's code. The state of torch's Adam needs no change:


# %%
def resume():
    """Train the last eight steps with today's code, from the file."""
    file = torch.load(PATH, weights_only=True, map_location=device)
    consume_prefix_in_state_dict_if_present(file["model"], "module.")
    model = new_model(device)
    optimizer = new_adam(model)
    scaler = torch.amp.GradScaler(device.type)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    scaler.load_state_dict(scaler_state(file["amp"], growth_interval=INTERVAL))
    losses = [today_step(model, optimizer, scaler, fp16, batches[i % 4]) for i in range(8)]
    return Run(losses, model, optimizer, scaler.get_scale())


check_close(resume(), whole, SAME)

# %% [markdown]
# At O2, we resume from the rounded weights. How close will the resumed run be to the reference run?

# %%
whole = train_and_save("O2", batches, new_model(device), PATH, INTERVAL)
resumed = resume()
check_close(resumed, whole, tolerance=2**-9)
assert resumed.losses != whole.losses
folder.cleanup()

# %% [markdown]
# The losses are close, but not equal. If your program also saved the master weights, copy them into the parameters
# before you resume. <!-- tests/notebooks/test_13_from_apex.py -->
#
# ## Summary
#
# - O1 is autocast with `GradScaler`. For cross-entropy, pass `logits.float()`.
# - O2 took more memory per parameter than autocast.
# - In the loop, `scale_loss` becomes `scale(loss).backward()`, and `optimizer.step()` becomes
#   `scaler.step(optimizer)`. Call `unscale_` before you clip, and `update` after the step.
# - When you move from `torch.cuda.amp`, pass the dtype, and pass the device as the first argument.
# - A checkpoint at O2 that follows Apex's manual lacks the fp32 master weights.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("13_from_apex")

# %% [markdown]
# ### 1. Count bytes with momentum
#
# You train with SGD with momentum, which stores one fp32 value per parameter. How many bytes per parameter of a linear
# layer did O2 need in training? How many does autocast need?

# %%
o2_bytes = ...
autocast_bytes = ...
exercises.check_momentum_bytes(o2_bytes, autocast_bytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Take the row of O2 in the table of bytes, and replace Adam's state with the momentum.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# o2_bytes = 2 + 2 + 4 + 4 + 4  # weight, its gradient, master weight, its gradient, momentum
# autocast_bytes = 4 + 4 + 4  # weight, its gradient, momentum
# ```
#
# </details>
#
# ### 2. Repair a renamed call
#
# An old program had `torch.cuda.amp.GradScaler(1024.0, growth_interval=500)`. A colleague changed only
# the name, to `torch.amp.GradScaler(1024.0, growth_interval=500)`. Create the old scaler with the new class, for
# the notebook's `device`.

# %%
moved_scaler = ...
exercises.check_moved_scaler(moved_scaler)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What is the first argument of the new class?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# moved_scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=500)
# ```
#
# </details>
#
# ### 3. Keep the scale within limits
#
# Complete `update_within`. It updates the scaler and keeps the scale between two limits. To set the scale to a float
# `x`, call `scaler.update(x)`.


# %%
def update_within(scaler, lowest, highest):
    return ...  # update, then set the scale to a limit if it is beyond that limit


exercises.check_limits(update_within)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Call `scaler.update()` first.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def update_within(scaler, lowest, highest):
#     scaler.update()
#     wanted = min(max(scaler.get_scale(), lowest), highest)
#     if wanted != scaler.get_scale():
#         scaler.update(float(wanted))
# ```
#
# </details>
#
# ### 4. Two losses, two optimizers
#
# Complete `step_of_both` with a single scaler: run backward for both losses, step both optimizers, and update the scale
# once.


# %%
def step_of_both(losses, optimizers, scaler):
    return ...  # two losses and two optimizers, in two lists


exercises.check_two_optimizers(step_of_both)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Suppose the scale changes between the two steps. By which scale does the second step divide its
# gradients?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def step_of_both(losses, optimizers, scaler):
#     for loss in losses:
#         scaler.scale(loss).backward()
#     for optimizer in optimizers:
#         scaler.step(optimizer)
#     scaler.update()
# ```
#
# </details>
#
# ## Further reading
#
# - NVIDIA, the [last version of Apex's
#   `amp`](https://github.com/NVIDIA/apex/tree/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp) and its
#   [manual](https://nvidia.github.io/apex/amp.html).
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html).
