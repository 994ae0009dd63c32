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
# **What you'll do.** Look up a failure by its error message or its symptom.
#
# **What you'll learn.** You will know how to repair these failures:
# - [Gradients are clipped while they are still scaled](#Gradients-are-clipped-while-they-are-still-scaled);
# - [Clipping refuses a norm that is not finite](#Clipping-refuses-a-norm-that-is-not-finite);
# - [The loss stands still because the whole loop is in one
#   block](#The-loss-stands-still-because-the-whole-loop-is-in-one-block);
# - [After resuming the loss jumps or is NaN](#After-resuming-the-loss-jumps-or-is-NaN);
# - [Weights and optimizer state have different dtypes](#Weights-and-optimizer-state-have-different-dtypes);
# - [The state of the scaler cannot be loaded](#The-state-of-the-scaler-cannot-be-loaded);
# - [torch.load refuses a checkpoint with a scaler](#torch.load-refuses-a-checkpoint-with-a-scaler).
#
# **What you need.** You need no GPU. Read only the section about your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `make` returns a linear layer and its SGD optimizer.
# `message_of(call)` returns the error message that `call` raises.

# %% tags=["nbval-ignore-output"]
import io
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from course import start
from course.failures import make, message_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## Gradients are clipped while they are still scaled
#
# `AMP0015` <!-- failure
# symptoms = [
#   "the loss stops decreasing when I add clip_grad_norm_ with torch.cuda.amp",
#   "the logged gradient norm is huge in fp16, such as 80000",
#   "logged gradients are 65536 times too large",
#   "the logged grad_norm of clip_grad_norm_ jumps by a factor of 2 in fp16",
#   "clip_grad_norm_ is called before unscale_ in fp16",
#   "adaptive gradient clipping (AGC) and mixed precision together make the loss increase",
#   "the gradient norm doubles or halves every 2000 steps, without mixed precision it does not",
#   "max_norm 1.0 practically halts training with AMP, I have to pass 1e5 or 1e6, and the value changes during the run",
#   "gradients are super small after clipping with precision=16, close to the limit in 32",
#   "max_norm has to be huge before anything trains with amp",
#   "detection or classification quality collapses when 16 bit precision and gradient clipping are both on",
# ]
# words = "clipping clip_grad_norm_ clip_grad_value_ max_grad_norm wandb hook halts"
# -->
#
# **What you see.** There is no message. Once you clip the gradients, a model trained with SGD hardly learns.
# The logged gradient norm is huge, and sometimes jumps by a factor of 2.
#
# **A small example.** We clip to a norm of 1 right after `backward`.


# %%
def clipped_step(unscale):
    """One step with clipping; returns the norm before it, and how far the weights moved."""
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
# **Why.** The gradients were clipped or logged while they were still multiplied by the loss scale, for example by
# 65536. `scaler.step` then divides the clipped gradients by the scale, so they become almost zero. The logged norm
# doubles or halves with the scale. <!-- tests/notebooks/test_08d_loop_and_resume.py -->
#
# **The fix.** Call `scaler.unscale_(optimizer)` after the last backward pass of a step, before you clip or log
# gradients.

# %%
norm, moved = clipped_step(unscale=True)
print(f"norm before clipping {norm:.1e}, moved by {moved:.1e}")
assert abs(moved - 1) < 1e-3  # the full length that clipping allows

# %% [markdown]
# **Not this.** Do not raise `max_norm` to the size of the scaled gradients, because the scale changes during training.
# <!-- tests/notebooks/test_08d_loop_and_resume.py -->
#
# Hooks that run during `backward()`, such as the hooks of [`wandb.watch`](https://github.com/wandb/wandb/issues/4369),
# also read scaled gradients.
# <!-- tests/notebooks/test_08d_loop_and_resume.py -->


# %% [markdown]
# ## Clipping refuses a norm that is not finite
#
# `AMP0016` <!-- failure
# messages = [
#   "The total norm of order {any} for gradients from `parameters` is non-finite, so it cannot be clipped.",
# ]
# symptoms = [
#   "clip_grad_norm_ raises because the gradient norm is inf, although the scaler would skip the step",
#   "error_if_nonfinite stops training in fp16",
#   "lightly-train or Fabric aborts in the first steps of 16-mixed",
#   "how to set error_if_nonfinite=False",
# ]
# words = "Fabric clip_gradients"
# -->
#
# **What you see.** `clip_grad_norm_` raises
# ``The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.``
#
# **A small example.** We clip with `error_if_nonfinite=True` in a step that overflows.
# Lightning Fabric's `clip_gradients` [sets this option by
# default](https://github.com/lightly-ai/lightly-train/issues/255).


# %%
def overflowing_step(strict, replace=False):
    """The scale after a step with an infinite gradient."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum() * torch.inf).backward()
    if replace:
        for parameter in model.parameters():
            parameter.grad.nan_to_num_()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=strict)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


message = message_of(lambda: overflowing_step(strict=True))
print(message)
assert "of order 2.0 for gradients from `parameters` is non-finite" in message

# %% [markdown]
# **Why.** The norm of the gradients is infinite or NaN, usually because a gradient is infinite or NaN. With
# `error_if_nonfinite=True`, `clip_grad_norm_` raises an error for such a norm. With a `GradScaler`, an occasional
# overflow is normal: `scaler.step` skips the step, and `scaler.update` lowers the scale.
#
# **The fix.** With a `GradScaler`, pass `error_if_nonfinite=False` (PyTorch's default). If a gradient is infinite or
# NaN, the scaler skips the step. If you train without a scaler, the optimizer also steps with such gradients, so set
# `error_if_nonfinite=True` and find the cause.
# <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
assert overflowing_step(strict=False) == 32768  # half of 65536: the step was skipped

# %% [markdown]
# **Not this.** Do not replace infinite gradients with finite numbers (`nan_to_num_`) before `unscale_`. The scaler
# then finds no overflow, so the optimizer steps with wrong gradients.

# %%
assert overflowing_step(strict=False, replace=True) == 65536

# %% [markdown]
# ## The loss stands still because the whole loop is in one block
#
# `AMP0026` <!-- failure
# symptoms = [
#   "the loss stays exactly the same in every step, autocast is around the whole training loop",
#   "the KL to the reference model stays 0, or swapping in other weights (EMA, reference) has no effect",
#   "flat loss with fp32 master weights, the same code trains with bf16 weights",
#   "swapped-in EMA or reference weights give the same output",
# ]
# words = "stale cache cache_enabled frozen flat GRPO DPO"
# -->
#
# **What you see.** On the same batch, the loss can be exactly the same in every step. A KL divergence from a reference
# model can stay 0 ([a report](https://github.com/X-GenGroup/Flow-Factory/pull/186)).
#
# **A small example.** We put a second autocast block around the whole loop.


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
# **Why.** In eager training, autocast by default keeps the 16-bit copies of trainable fp32 weights until the
# outermost block ends. Inside one block around the loop, the optimizer changes the weights, but the
# forward pass uses the old copies.
#
# The copies can also become outdated if you load other weights, such as averages (EMA), inside a block.
#
# **The fix.** Open one autocast block for each forward pass, not one around the loop. End the block before you step,
# evaluate, or load other weights.
#
# If a library opens the outer block, call `torch.clear_autocast_cache()` after each change of the weights.

# %%
learning = losses_of(nullcontext())
print("one block a forward pass: ", *[f"{loss:.1f}" for loss in learning])
assert learning[0] == stuck[0]
assert learning[2] < learning[1] < learning[0]

model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16):
    before = model(x)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    assert torch.equal(model(x), before)  # the loaded weights are not used
    torch.clear_autocast_cache()
    assert not torch.equal(model(x), before)

# %% [markdown]
# ## After resuming the loss jumps or is NaN
#
# `AMP0046` <!-- failure
# symptoms = [
#   "the loss jumps after resuming from a checkpoint in mixed precision",
#   "the loss is NaN after resuming from a checkpoint",
#   "the scaler skips the first steps after resuming, or at the start of every epoch",
#   "the loss of a resumed run deviates from one without a break, or Adam counts wrong steps",
#   "the loss is worse after resuming from a checkpoint that was saved in fp16",
#   "loss spikes when the training is restarted with amp, O2 or DDP, fine if mixed precision is disabled",
#   "reload the checkpoint and continue: the loss shoots up to 30 in spite of warmup, later it recovers",
#   "the resumed run overflows at once, an uninterrupted one does not",
#   "Fp16 grad scale is 0 after resuming and the loss stays where it is",
#   "after restarting from a checkpoint the loss goes back to a high value",
#   "the loss explodes in the first steps after a checkpoint is loaded with amp",
# ]
# words = "spike bump restart continue restore scaler.pt rng_state grad_norm reload jump curve"
# -->
#
# **What you see.** A run was fine when you saved its checkpoint. After you load the checkpoint, the loss is higher or
# NaN. Or the scaler skips the first steps. Or the losses differ from those of an uninterrupted run.
#
# **A small example.** We take steps of Adam with gradients of 1 and -1. Then we take one step with a gradient of 0.01:
# first with a new Adam, then with the saved state.


# %%
def train(gradients, state=None):
    """One step of Adam for each gradient; returns its state, and how far the weight moved."""
    weight = nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([weight], lr=1e-3)
    if state is not None:
        adam.load_state_dict(state)
    for gradient in gradients:
        weight.grad = torch.full((1,), gradient)
        adam.step()
    return adam.state_dict(), weight.abs().item()


state, _ = train([1.0, -1.0] * 50)
_, with_new = train([0.01])
_, with_saved = train([0.01], state)
print(f"first step: {with_saved:.0e} with the saved Adam, {with_new:.0e} with a new one")
assert with_new > 10 * with_saved

# %% [markdown]
# **Why.** Some of the run's state is missing, was not loaded or has wrong values.
#
# Missing state: <!-- tests/notebooks/test_08d_loop_and_resume.py -->
# - Without the optimizer's state, the new Adam above moves the weight by the full learning rate in its first step.
# - Without the scaler's state, a new `GradScaler` starts at 65536 by default, so the first steps may overflow and be
#   skipped.
#
# Wrong values: <!-- tests/notebooks/test_08d_loop_and_resume.py -->
# - The model was saved with `.half()`. A running variance of 100,000 becomes infinite in fp16.
# - The optimizer's state was saved in bf16. Adam's `step` is then rounded too: 301 becomes 300. In bf16, 300 + 1 is
#   300 again.
# - The checkpoint contained NaN already, for example in [buffers of batch
#   normalisation](08a_values.ipynb#Training-is-fine-but-evaluation-is-NaN).
#
# **The fix.** Save and load the states of the model, the optimizer, the scaler and the learning rate scheduler. Also
# save the random state and the position in the data. Save each tensor in the dtype that it has in training. Create the
# scaler once, not in each epoch. <!-- tests/notebooks/test_08d_loop_and_resume.py -->

# %%
scaler = torch.amp.GradScaler("cpu")
scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict())
assert scaler.get_scale() == 1024
assert torch.tensor(1e5).half().isinf()
step = torch.tensor(301.0).bfloat16()
assert step == step + 1 == 300

# %% [markdown]
# **Not this.** If loading the optimizer's state makes the loss NaN, do not start with a new optimizer: its
# first steps can be too large. Repair the state or its dtype instead.
#
# **Notice the failure earlier.** Before you save, check that the parameters and running statistics are finite.

# %% [markdown]
# ## Weights and optimizer state have different dtypes
#
# `AMP0140` <!-- failure
# messages = [
#   "expected dtype {dtype} for `end` but got dtype {dtype}",
# ]
# quoted = [
#   "expected dtype {dtype} for `end`, but got dtype {dtype}",
#   "params, grads, {any} must have same dtype, device, and layout",
#   "parameter in optimizer({name}) is not FP32",
# ]
# symptoms = [
#   "optimizer.step() fails with a dtype error after the model was cast or a checkpoint was loaded",
#   "dtype error when a moving average (EMA) in fp32 is updated with bf16 weights",
#   "loading the optimizer state casts fp32 moments to bf16 or fp16, parameters become NaN",
#   "Muon's momentum buffer is fp32 and gradients are bf16 after a DeepSpeed resume",
# ]
# words = "lerp_ exp_avg exp_avg_sq AdamW Muon momentum_buffer ema_pytorch"
# -->
#
# **What you see.** `optimizer.step()`, or the update of a moving average of the weights (EMA), raises an error such
# as:
# - ``expected dtype float for `end` but got dtype c10::BFloat16``
# - ``expected dtype torch.float32 for `end`, but got dtype torch.bfloat16`` (under `torch.compile`)
# - `params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout` ([fused, on a
#   GPU](https://github.com/pytorch/pytorch/issues/110758))
#
# Or there is no error, but the weights become infinite or NaN soon after you load the optimizer's state.
#
# **A small example.** We cast the model between two steps.

# %%
model = nn.Linear(2, 1)
adam = torch.optim.Adam(model.parameters())
model(x).sum().backward()
adam.step()
model.bfloat16()
message = message_of(adam.step)
print(message)
assert "expected dtype float for `end` but got dtype c10::BFloat16" in message

# %% [markdown]
# **Why.** The moments of the optimizer, or the averaged weights, have a different dtype from the weights, for example
# because the model was cast after the optimizer's first step. Some optimizers, such as
# [IPEX's AdamW](https://github.com/intel/intel-extension-for-pytorch/blob/6d71c53e0195af39a16b60cf430b41a163173cb1/intel_extension_for_pytorch/optim/_functional.py),
# also refuse weights that are not in fp32. A fused optimizer on a GPU can also refuse a gradient whose
# [strides](https://github.com/pytorch/pytorch/issues/106951) differ from the strides of its weight.
#
# **The fix.** Cast the model first. Then create the optimizer and the averaged weights. Load their states last. If you
# use autocast, [do not cast the model](https://docs.pytorch.org/docs/stable/amp.html) at all. For an fp32 average of
# bf16 weights, cast in the update: `average.lerp_(weight.float(), 0.1)`. If DeepSpeed's Muon has an fp32 momentum
# after resuming, cast this momentum to the [dtype of the
# gradients](https://github.com/deepspeedai/DeepSpeed/issues/7746). If all dtypes agree, remove `fused=True`.
# <!-- tests/notebooks/test_08d_loop_and_resume.py -->

# %%
adam = torch.optim.Adam(model.parameters())
adam.step()
assert adam.state[model.weight]["exp_avg"].dtype is torch.bfloat16

# %% [markdown]
# **Not this.** Do not load fp32 state into the optimizer of an fp16 model: small second moments and Adam's epsilon of
# 1e-8 become 0 in fp16, so by default Adam divides by 0. <!-- tests/notebooks/test_08d_loop_and_resume.py -->
#
# We load a second moment of 1e-13 into the optimizer of an fp16 weight, and of an fp32 weight:

# %%
weight = nn.Parameter(torch.ones(1))
weight.grad = torch.full_like(weight, 1e-5)
trained = torch.optim.Adam([weight])
trained.step()
for dtype in (torch.float16, torch.float32):
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    weight.grad = torch.full_like(weight, 1e-5)
    adam = torch.optim.Adam([weight])
    adam.load_state_dict(trained.state_dict())
    adam.step()
    print(f"{dtype}: weight {weight.item():.3f} after a step")
    assert weight.isfinite().all() == (dtype is torch.float32)


# %% [markdown]
# ## The state of the scaler cannot be loaded
#
# `AMP0017` <!-- failure
# messages = [
#   "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.",
# ]
# symptoms = [
#   "scaler.load_state_dict fails because the checkpoint is of a bf16 or fp32 run",
#   "the checkpoint was saved without AMP and I want to resume with AMP",
#   "resume on a GPU from a checkpoint of a CPU run",
#   "the state dict of the GradScaler is empty",
# ]
# words = "resume"
# -->
#
# **What you see.** `scaler.load_state_dict` raises
# `The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.`
#
# **A small example.** We load the scaler's state from a bf16 run into the scaler of an fp16 run.

# %%
from_bf16 = torch.amp.GradScaler("cpu", enabled=False).state_dict()
scaler = torch.amp.GradScaler("cpu")
message = message_of(lambda: scaler.load_state_dict(from_bf16))
print(message)
assert "The source state dict is empty, possibly because it was saved from a disabled" in message

# %% [markdown]
# **Why.** Usually, the checkpoint was saved by a run whose scaler was disabled, such as a run in bf16, in fp32, or on
# a machine without a GPU. The `state_dict()` of a disabled `GradScaler` is empty.
#
# **The fix.** If the saved dict is empty, do not load the scaler's state. A new scaler finds a suitable scale
# automatically ([notebook 03](03_grad_scaler_step_by_step.ipynb) shows how).

# %%
for saved in (from_bf16, torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()):
    scaler = torch.amp.GradScaler("cpu")
    if saved:
        scaler.load_state_dict(saved)
    print(f"resumed with a scale of {scaler.get_scale():.0f}")
assert scaler.get_scale() == 1024

# %% [markdown]
# ## torch.load refuses a checkpoint with a scaler
#
# `AMP0142` <!-- failure
# messages = [
#   "Unsupported global: GLOBAL torch.amp.grad_scaler.GradScaler was not an allowed global by default.",
# ]
# quoted = [
#   "Unsupported global: GLOBAL torch.cuda.amp.grad_scaler.GradScaler was not an allowed global by default.",
#   "Unsupported global: GLOBAL deepspeed.runtime.fp16.loss_scaler.{name} was not an allowed global by default.",
# ]
# symptoms = [
#   "torch.load fails with weights_only since PyTorch 2.6, the checkpoint contains the GradScaler",
#   "Weights only load failed when resuming, LossScaler or GradScaler is not an allowed global",
#   "resume_from_checkpoint fails since I upgraded PyTorch",
# ]
# words = "UnpicklingError WeightsUnpickler add_safe_globals pickle upgrade"
# torch = "2.6 and later, by default"
# -->
#
# **What you see.** `torch.load` raises `Weights only load failed.` Further down, the message contains `Unsupported
# global: GLOBAL torch.amp.grad_scaler.GradScaler was not an allowed global by default.` For a DeepSpeed checkpoint,
# the message names [a DeepSpeed class](https://github.com/modelscope/ms-swift/issues/5808) instead.
#
# **A small example.** We save the scaler itself.


# %%
def saved_and_loaded(content):
    """What `torch.load` returns after `content` was saved."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # the default since PyTorch 2.6


scaler = torch.amp.GradScaler("cpu")
message = message_of(lambda: saved_and_loaded({"scaler": scaler}))
refused = "Unsupported global: GLOBAL torch.amp.grad_scaler.GradScaler was not an allowed global"
assert refused in message
print(message[message.index(refused) :].partition(" Please")[0])

# %% [markdown]
# **Why.** The checkpoint contains the scaler instead of its `state_dict()`. [From PyTorch 2.6
# on](https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only), `torch.load` by default reads only a
# few types, such as tensors, numbers, strings and dicts.
#
# **The fix.** Save `scaler.state_dict()`, and load it with `scaler.load_state_dict`. Load your old file once with
# `weights_only=False`, and save it again with `scaler.state_dict()`. If DeepSpeed saved the file, [update
# DeepSpeed](https://github.com/axolotl-ai-cloud/axolotl/issues/2610). In older versions of DeepSpeed, you can set
# `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1` in the environment instead. <!-- tests/notebooks/test_08d_loop_and_resume.py -->

# %%
state = saved_and_loaded({"scaler": scaler.state_dict(), "dtype": torch.float16})
assert state["scaler"]["scale"] == 65536

# %% [markdown]
# **Not this.** Do not turn off `weights_only` for a file from somebody else, because the file can run any code on your
# machine.

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
