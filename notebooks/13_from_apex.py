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
# This notebook is for people with old AMP code.
#
# **What you'll do.** Train a small network at each of Apex's four optimization levels, and compare each level
# with the code that you would write today. Then move old code to `torch.amp`, by hand and with `amp-lab
# migrate`, and resume from a checkpoint that Apex wrote.
#
# **What you'll learn.**
# - what O0, O1, O2 and O3 did to weights, activations, gradients and optimizer, and at what cost;
# - which line of an old loop becomes which line of a new one;
# - where the new names have other defaults than the old ones, without a warning;
# - what a checkpoint of Apex holds, and what it lacks.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU, and no Apex either, which
# removed its `amp` in 2025.

# %% tags=["nbval-ignore-output"]
import difflib
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

from course import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# The rest comes from torch. The tensors below are small, so we use one thread.

# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

torch.set_num_threads(1)
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
names = {fp32: "fp32", fp16: "fp16", bf16: "bf16"}

# %% [markdown]
# ## The idea in five lines
#
# At its default level, O1, [Apex](https://nvidia.github.io/apex/amp.html#properties) replaced functions
# such as `F.linear` by others that cast their inputs to fp16 first. We make the casts by hand, as Apex
# did, and then let autocast make them. Before you run the cell: how many of the outputs will differ?

# %%
torch.manual_seed(0)
layer, x = nn.Linear(8, 16).to(device), torch.randn(64, 8).to(device)
as_apex_did = F.linear(x.half(), layer.weight.half(), layer.bias.half())
with torch.autocast(device.type, dtype=fp16):
    today = layer(x)
print(f"{(today != as_apex_did).sum()} of {today.numel()} outputs differ")
assert torch.equal(today, as_apex_did)

# %% [markdown]
# None of them differs. So moving is mostly a matter of names, and of the places where the two behave
# differently.
#
# ## The names, then and now
#
# In 2020 [PyTorch 1.6](https://github.com/pytorch/pytorch/releases/tag/v1.6.0) brought
# `torch.cuda.amp`, and later came [`torch.amp`](https://docs.pytorch.org/docs/stable/amp.html), which
# serves CPUs and several kinds of accelerators. In 2025 Apex removed its `amp` ([pull request
# 1896](https://github.com/NVIDIA/apex/pull/1896)).
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
# (The default of `weight_decay` is 0.01 in `AdamW`, and was 0 in `FusedAdam`.) <!-- tests/migrate/test_apex.py -->
#
# ## What an optimization level was
#
# A level stood for [five settings](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/frontend.py):
#
# | | O0 | O1 | O2 | O3 |
# |---|---|---|---|---|
# | model and inputs cast to | fp32 | | fp16 | fp16 |
# | functions of torch cast their inputs | | yes | | |
# | batch norm stays in fp32 | | | yes | no |
# | the optimizer has fp32 master weights | | | yes | no |
# | loss scale | 1 | dynamic | dynamic | 1 |
#
# - **Patched functions** (O1): functions that multiply matrices cast their inputs to fp16, and
#   functions such as softmax and the losses cast them to fp32.
# - **Master weights** (O2): the optimizer updates an fp32 copy of each fp16 weight.
# - **The dynamic loss scale** [began at
#   2^16](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/scaler.py).
#   An overflow halved it, and 2000 good steps in a row doubled it. `GradScaler` has the same defaults,
#   without Apex's highest scale of 2^24. <!-- tests/notebooks/test_13_from_apex.py -->
#
# Apex needs a GPU, so we use a toy of it, which does the same in about a hundred lines of plain torch
# ([`course/toy_apex.py`](course/toy_apex.py)).
#
# ## What each level did, and what does it today
#
# We train one small network at each level with the toy, and again in today's way
# ([`course/apex_training.py`](course/apex_training.py)). It has a layer of batch normalisation,
# because the levels treated that differently. Its loss is made 12 times too large, so that the first
# loss scale is too large as well, and a few steps have to be skipped.
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
# Now we train at each level and in both of today's ways, and look at the dtype of each kind of
# tensor. (O3 gets a single step, since its second loss is NaN.) Before you run this: in which
# columns do you expect O1, which cast the inputs of functions, to show fp16?


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
# At O1 only the activations are fp16, and its row is the same as autocast's. O2 kept its weights and
# their gradients in fp16, and fp32 masters for Adam to update. At O3 all of these are fp16.
#
# ### O0 and O1: fp32, and casts around ops
#
# Today O0 is a loop with autocast and scaler disabled, and O1 is `torch.autocast` with
# `dtype=torch.float16` and a `GradScaler`. To compare two trainings we look at all their losses. On a
# CPU they have to be equal to the last bit. On a GPU, where a sum may be computed in another order,
# we allow four roundings of fp16, which is 2^-9
# [*(not yet seen on a GPU)*](../data/results/README.md "apex-o1").

# %%
SAME = 0 if device.type == "cpu" else 2**-9
check_close(runs["fp32 today"], runs["O0"], SAME)
check_close(runs["autocast"], runs["O1"], SAME)
assert runs["O1"].scale == 2.0**13  # three steps skipped, in both

# %% [markdown]
# Both pairs agree. At O1 both runs skipped three steps, until the scale was down from 65536 to 8192.
#
# Apex had other lists of ops than autocast has. A difference that matters for classifiers is
# `cross_entropy`, which Apex ran in
# [fp32](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/lists/functional_overrides.py).
# Under autocast on CUDA its log-softmax returns fp16 for fp16 logits ([notebook
# 09](09_xray_your_model.ipynb) shows it). So write `F.cross_entropy(logits.float(), targets)` when you
# move a classifier from O1.
#
# ### O2: fp16 weights, fp32 masters
#
# Today this is the same autocast and the same scaler. The parameters *are* the master weights now,
# and the fp16 copies that O2 kept are the casts that autocast makes. How close are the two?

# %%
check_close(runs["autocast"], runs["O2"], tolerance=2**-9)  # 4 roundings of fp16
assert runs["autocast"].losses != runs["O2"].losses

# %% [markdown]
# They are close, but not equal: Apex made the masters *after* it had cast the model, so they begin
# with the 11 significant bits of fp16. O2 also had no lists of ops, so a softmax inside the model ran
# in fp16, where autocast on CUDA [runs it in
# fp32](https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32).
#
# ### O3: everything in fp16
#
# Today this is `model.half()`, with the optimizer on the fp16 weights. Apex offered it for
# ["establishing a performance ceiling"](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/frontend.py).
# Small updates of a weight are rounded away ([notebook 16](16_low_precision_state.ipynb)). And Adam
# divides by the root of an average of squares, plus 1e-8. For a gradient of 0.0005 both are zero in
# fp16, so Adam, unless it is fused, divides by zero:

# %%
assert 0.001 * torch.tensor(5e-4).half() ** 2 == 0 == torch.tensor(1e-8).half()
losses = train_apex("O3", batches, new_model(device), steps=3).losses
print("losses in O3:", *(f"{loss:.1f}" for loss in losses))
assert losses[1] != losses[1]  # NaN

# %% [markdown]
# ### What it costs in memory
#
# With Adam, each level held this many bytes for a parameter when the optimizer stepped:
# <!-- tests/notebooks/test_13_from_apex.py -->
#
# | | weights | gradients | masters | their gradients | Adam's state | together |
# |---|---|---|---|---|---|---|
# | O0, O1, autocast | 4 | 4 | | | 8 | 16 |
# | O2 | 2 | 2 | 4 | 4 | 8 | 20 |
# | O3 | 2 | 2 | | | 4 | 8 |
#
# O2 held the most: the master weights and their gradients cost more than fp16 saves on weights and
# gradients. (The casts that autocast makes of the weights are not counted.)
#
# ## The loop, line by line
#
# Here is a loop with clipping, as people wrote it with Apex. It is text, so that the tool below
# can read it, and it still runs, with the toy in the place of Apex:

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
# This is the same loop today, with each changed line marked. It ends with the same weights:

# %%
model = new_model(device)
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
ours, theirs = (parameters_to_vector(m.parameters()) for m in (model, old_model))
torch.testing.assert_close(ours, theirs, rtol=SAME, atol=SAME)

# %% [markdown]
# A line that is easily forgotten is `unscale_`. Without it, clipping looks at gradients that are
# still scaled, and leaves almost nothing of them ([notebook 07](07_training_recipes.ipynb)).
#
# Apex's options have their counterparts too:
#
# | Apex | today |
# |---|---|
# | `delay_unscale=True`, to accumulate | `scale(loss).backward()` as often as you like, then one `step` |
# | `num_losses=2`, `loss_id=1` | one scaler for all losses; with several optimizers, a `step` for each, then one `update` |
# | `loss_scale=128.0` | `init_scale=128.0`, and `scaler.update(128.0)` in place of `update()`; an overflow still skips the step |
# | `min_loss_scale`, `max_loss_scale` | `scaler.update(float(limit))` after `update()` when `get_scale()` is beyond it |
# | `keep_batchnorm_fp32` | nothing: its weights and statistics are fp32, and stay so |
# | `cast_model_outputs` | `.float()` on the output, after the block |
# | `cast_model_type=torch.bfloat16` | `dtype=torch.bfloat16`, and no scaler | <!-- tests/notebooks/test_13_from_apex.py -->
#
# ## From torch.cuda.amp to torch.amp
#
# From 2020 to 2024 code was written with `torch.cuda.amp`. Its names still work in torch 2.15, and warn
# that they are deprecated:

# %%
for old_name in (torch.cuda.amp.autocast, torch.cpu.amp.autocast, torch.cuda.amp.GradScaler):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old_name(enabled=False)
    assert [warning.category for warning in caught] == [FutureWarning]

# %% [markdown]
# There are two traps in moving to the new ones.
#
# **The default dtype.** The old classes had one of their own, fp16 for CUDA and bf16 for the CPU.
# The new class takes the dtype that is in force, which may be another inside a block. Which dtype will
# each of these three have?

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
# Only renamed, the block computes in fp16 where it was bf16 before. So always write the dtype out.
#
# **The order of arguments.** [A device comes
# first now](https://docs.pytorch.org/docs/stable/amp.html), and `dtype` before `enabled`:
#
# | old | new |
# |---|---|
# | `autocast(enabled, dtype, cache_enabled)` | `autocast(device_type, dtype, enabled, cache_enabled)` |
# | `GradScaler(init_scale, growth_factor, …)` | `GradScaler(device, init_scale, growth_factor, …)` |
#
# Without a device in the first place, autocast raises an error. The scaler does not:
# <!-- tests/notebooks/test_13_from_apex.py -->

# %%
asked, got = torch.amp.GradScaler("cpu", 1024.0), torch.amp.GradScaler(1024.0)
print(f"GradScaler(1024.0) has the scale {got.get_scale():.0f}")
assert (asked.get_scale(), got.get_scale()) == (1024, 65536)

# %% [markdown]
# The scaler begins at 65536, because 1024.0 was taken for the device, and the initial scale kept
# its default. If you pass these arguments by keyword, this cannot happen.
#
# Your own autograd functions change too: `torch.amp.custom_fwd` and `custom_bwd` want a
# `device_type` ([notebook 02](02_autocast_dtypes.ipynb) has an example).
#
# ### Let a tool do it
#
# `amp-lab migrate PATH` rewrites files and notebooks: the old names with the behaviour that
# they had, and those names of Apex for which torch has an equal. It leaves magics and choices
# between versions, reports the rest, and mistakes that it can prove. This is part of an old program,
# which runs in fp16 on a GPU, and in bf16 on a CPU. Both traps are in it: <!-- tests/migrate/test_apex.py, tests/migrate/test_magics.py, tests/migrate/test_files.py, tests/migrate/test_mistakes.py -->

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
# The tool needs `libcst`, which comes with this project's environment. Lines with a minus are those
# that went, lines with a plus those that came:

# %%
if find_spec("libcst") is None:
    print("amp-lab migrate needs libcst, which is not here: pip install libcst")
else:
    from amp_lab.migrate import migrate_source

    new_program, _ = migrate_source(OLD_PROGRAM)
    old_lines, new_lines = OLD_PROGRAM.splitlines(), new_program.splitlines()
    changes = list(difflib.unified_diff(old_lines, new_lines, lineterm="", n=0))[2:]
    print("\n".join(line for line in changes if not line.startswith("@@")))
    assert migrate_source(new_program)[0] == new_program  # nothing is left to do

# %% [markdown]
# The tool has written each dtype out, and moved the scale to its new place. It cannot do as much for
# Apex's loop from above, because what `amp.initialize` and `amp.scale_loss` did is spread over model,
# optimizer and loop. It leaves these lines as they are, and says for each of them what to write
# instead, and with `--mark` as a comment in the file. That leads to the loop that we wrote above:

# %%
if find_spec("libcst") is not None:
    marked_loop, findings = migrate_source("from apex import amp\n" + OLD_LOOP, mark=True)
    for finding in findings:
        print(f"line {finding.line}: {finding.message}\n")
    marks = [line for line in marked_loop.splitlines() if "# amp-lab migrate: " in line]
    assert len(marks) == len(findings) == 3

# %% [markdown]
# ## Checkpoints that Apex wrote
#
# [Apex's manual](https://nvidia.github.io/apex/amp.html#checkpointing) asked for a file with three
# parts: the states of model, optimizer and `amp`, the last of which is an `OrderedDict` of the loss
# scalers. Many files have more, or differ:
#
# - names begin with `module.` where the model was wrapped for several GPUs;
# - at O2 weights look like fp32, but hold fp16 values, because Apex's `state_dict` [cast
#   them](https://github.com/NVIDIA/apex/blob/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp/_initialize.py);
# - the master weights are not in the file, unless someone put them there, as NVIDIA's BERT in
#   [DeepLearningExamples](https://github.com/NVIDIA/DeepLearningExamples/blob/e5428044f7af25e02bfc719be9cbee4fe65943e5/PyTorch/LanguageModeling/BERT/run_pretraining.py) did, under `master params`:
#   `list(amp.master_params(optimizer))`, in the order of the optimizer's groups.
#
# The whole run trains for eight steps, writes such a file, and goes on for eight more, which are our
# reference. With a growth interval of 6 instead of 2000 the scale grows in between, so that the
# counter of good steps matters.

# %%
from course.apex_training import Run, today_step, train_and_save

folder = tempfile.TemporaryDirectory()
PATH = Path(folder.name) / "apex.pt"
INTERVAL = 6
whole = train_and_save("O1", batches, new_model(device), PATH, INTERVAL)

# %% [markdown]
# The file holds tensors, numbers, lists and dictionaries, so we can read it with
# `weights_only=True`, which [is meant to run no code from
# it](https://docs.pytorch.org/docs/stable/notes/serialization.html). The scaler's state has to be
# translated: Apex's `unskipped` is today's `_growth_tracker`.


# %%
def scaler_state(amp_state, number=0, growth_interval=2000):
    """The state of a GradScaler that goes on where Apex's loss scaler stopped."""
    old = amp_state[f"loss_scaler{number}"]
    return {
        "scale": old["loss_scale"],
        "growth_factor": 2.0,  # Apex knew no other
        "backoff_factor": 0.5,
        "growth_interval": growth_interval,
        "_growth_tracker": old["unskipped"],
    }


state = torch.load(PATH, weights_only=True)["amp"]
print(dict(state))
assert scaler_state(state).keys() == torch.amp.GradScaler("cpu").state_dict().keys()

# %% [markdown]
# Now we resume. `load_state_dict` copies values *into* the model's parameters, which are fp32. The
# optimizer's state needs no change: it is numbered in the order of the groups, and was fp32 at O1 and
# O2.


# %%
def resume(use_masters=False):
    """The second half again, today, from the file."""
    file = torch.load(PATH, weights_only=True, map_location=device)
    consume_prefix_in_state_dict_if_present(file["model"], "module.")
    model = new_model(device)
    optimizer = new_adam(model)
    scaler = torch.amp.GradScaler(device.type)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    scaler.load_state_dict(scaler_state(file["amp"], growth_interval=INTERVAL))
    if use_masters:
        weights = (p for group in optimizer.param_groups for p in group["params"])
        for weight, master in zip(weights, file["master params"], strict=True):
            weight.data.copy_(master)
    losses = [today_step(model, optimizer, scaler, fp16, batches[i % 4]) for i in range(8)]
    return Run(losses, model, optimizer, scaler.get_scale())


check_close(resume(), whole, SAME)

# %% [markdown]
# From O1 the training resumes exactly. What do you expect from O2, where the weights in the file
# have been rounded to fp16?

# %%
whole = train_and_save("O2", batches, new_model(device), PATH, INTERVAL)
check_close(resume(), whole, tolerance=2**-9)  # 4 roundings of fp16
assert resume().losses != whole.losses
check_close(resume(use_masters=True), whole, SAME)
folder.cleanup()

# %% [markdown]
# Without the masters it resumes nearly as before, since the bits that fp16 does not have are lost.
# With the masters from the file it resumes exactly.
#
# ## Summary
#
# - Apex's levels were five settings. O1 is autocast with `GradScaler`, here to the last bit, since their
#   lists of ops agree; for cross-entropy they do not, so give it `logits.float()`. O2 is the same
#   with weights stored twice, with Adam 20 bytes per parameter where autocast holds 16. O3 is
#   `model.half()`, which swallows small updates and made our loss NaN in its second step.
# - In the loop, `scale_loss` becomes `scale(loss).backward()`, and what Apex did at the end of its
#   block is now written out: `unscale_` before clipping, then `step` and `update`.
# - Coming from `torch.cuda.amp`, write out the dtype, and the device before arguments that are given by
#   position. `amp-lab migrate` does this for you.
# - An Apex checkpoint holds the loss scale under other names, and at O2 often no master weights. With
#   both, the training went on exactly here.
#
# Next, [notebook 14](14_ten_practices.ipynb) reviews ten common practices.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("13_from_apex")

# %% [markdown]
# ### 1. Count bytes with momentum
#
# You train with SGD and momentum, which keeps one fp32 value for each parameter where Adam keeps two.
# Work out on paper how many bytes per parameter O2 held when the optimizer stepped, and how many
# autocast holds.

# %%
o2_bytes = ...
autocast_bytes = ...
exercises.check_momentum_bytes(o2_bytes, autocast_bytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Look at the row of O2 in the table of bytes, and put momentum in the place of Adam's state.
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
# ### 2. Mend a move
#
# An old program had `torch.cuda.amp.GradScaler(1024.0, growth_interval=500)`. A colleague only changed
# the name, to `torch.amp.GradScaler(1024.0, growth_interval=500)`. Write the line so that the scaler
# begins as the old one did, on the notebook's `device`.

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
# Complete `update_within`, which does what `scaler.update()` did with Apex's `min_loss_scale` and
# `max_loss_scale`. The check lets the scale rise and fall with it.


# %%
def update_within(scaler, lowest, highest):
    return ...  # update, then bring the scale back if it is beyond a limit


exercises.check_limits(update_within)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `scaler.update()` first, because it has to see whether the step was good. The table of options above
# says how to set a scale after that.
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
#         scaler.update(wanted)
# ```
#
# On a GPU `get_scale` waits for the device, so limits cost some time in each step.
#
# </details>
#
# ### 4. Two losses, two optimizers
#
# With Apex, a GAN used `num_losses=2`. Complete its step with a single scaler: both losses go
# backward, both optimizers step, and the scale is adjusted once.


# %%
def step_of_both(losses, optimizers, scaler):
    return ...  # two losses and two optimizers, in two lists


exercises.check_two_optimizers(step_of_both)

# %% [markdown]
# <details><summary>Hint</summary>
#
# If the scale changes between the two steps, by what are the gradients of the second one divided?
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
# With an `update` after each `step`, a scale that has just changed would divide gradients that were
# multiplied by the old one.
#
# </details>
#
# ## Further reading
#
# - NVIDIA, [Apex](https://github.com/NVIDIA/apex): [its `amp` as it last
#   was](https://github.com/NVIDIA/apex/tree/e13873debc4699d39c6861074b9a3b2a02327f92/apex/amp), whose
#   `frontend.py` has the levels, and the [manual](https://nvidia.github.io/apex/amp.html).
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html), with
#   the list of deprecated names.
# - M. Carilli, [torch.cuda.amp > apex amp](https://github.com/NVIDIA/apex/issues/818), 2020.
