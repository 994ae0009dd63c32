# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Repair errors of the GradScaler
#
# **What you'll do.** Look up one failure: its symptom, a small example, the reason and the fix.
#
# **What you'll learn.** You will know how to repair these failures:
# - [The parameters are fp16](#The-parameters-are-fp16);
# - [Gradients are unscaled twice](#Gradients-are-unscaled-twice);
# - [An optimizer has no gradients](#An-optimizer-has-no-gradients);
# - [Scaler methods are called in the wrong order](#Scaler-methods-are-called-in-the-wrong-order);
# - [The optimizer steps without the scaler](#The-optimizer-steps-without-the-scaler);
# - [The optimizer needs a closure](#The-optimizer-needs-a-closure);
# - [The scheduler warns that it came before the optimizer](#The-scheduler-warns-that-it-came-before-the-optimizer).
#
# **What you need.** You need no GPU. Read only the section about your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `make` returns an `nn.Sequential` with one linear layer,
# and its optimizer. `message_of` and `warnings_of` return the error message and the warnings of a call.

# %% tags=["nbval-ignore-output"]
import math
import pickle
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from course import start
from course.failures import make, message_of, warnings_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below
# make() returns a model of one linear layer, and its SGD optimizer.

# %% [markdown]
# ## The parameters are fp16
#
# `AMP0009` <!-- failure
# quoted = [
#   "to unscale FP16 gradients",
# ]
# messages = [
#   "Attempting to unscale FP16 gradients.",
# ]
# symptoms = [
#   "LoRA fine-tuning with fp16 mixed precision fails in clip_grad_norm_ of accelerate",
#   "Trainer with fp16=True and a model loaded with torch_dtype=torch.float16 fails at the first step",
#   "resuming a DreamBooth LoRA training in fp16 raises a ValueError of the GradScaler",
#   "how to train a model that was converted with model.half() with a GradScaler",
#   "stops at the first clipping in a text-to-image or DreamBooth script with mixed_precision fp16, other precisions work",
#   "V100 without bf16: half model, LoRA and fp16=True",
# ]
# words = "unscale lora 8bit diffusers peft accelerate kohya cogvideo text-to-image v100"
# -->
#
# **What you see.** `scaler.step` or `scaler.unscale_` raises
# `Attempting to unscale FP16 gradients.`
#
# **A small example.** We convert a model with `.half()` and train it with a scaler.


# %%
def step_with_parameters_in(dtype):
    model, _ = make()
    optimizer = torch.optim.SGD(model.to(dtype).parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x.to(dtype)).abs().sum()).backward()
    scaler.step(optimizer)


message = message_of(lambda: step_with_parameters_in(torch.float16))
print(message)
assert "Attempting to unscale FP16 gradients." in message

# %% [markdown]
# **Why.** At least one parameter that you train is in fp16, so by default its gradient is in fp16 too. The
# scaler refuses to divide a gradient by the scale in fp16, because small values could become zero. <!--
# tests/notebooks/test_08c_scaler.py -->
#
# Two causes are easy to miss:
# - By default, Transformers 5 loads a checkpoint in the dtype given in the checkpoint's config. <!--
#   tests/notebooks/test_08c_scaler.py -->
# - By default, PEFT trains a layer in `modules_to_save` in the dtype of the base
#   model. <!-- tests/notebooks/test_08c_scaler.py -->
#
# **The fix.** Convert every parameter that you train to fp32, and let autocast make the fp16 copies. Frozen
# weights may stay in fp16. Load the model with `dtype=torch.float32`. For LoRA, call PEFT's
# `cast_mixed_precision_params(model, torch.float16)` or [Diffusers'
# `cast_training_params(model)`](https://github.com/huggingface/diffusers/blob/main/src/diffusers/training_utils.py).
#
# Without a library, convert the parameters in a loop:

# %%
adapted = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)).half()
for parameter in adapted.parameters():
    if parameter.requires_grad:
        parameter.data = parameter.data.float()
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = adapted(x).sum()
scaler.scale(loss).backward()
scaler.step(torch.optim.SGD(adapted[1].parameters(), lr=0.1))
assert adapted[1].weight.grad.dtype is torch.float32

# %% [markdown]
# **Not this.** Do not change `allow_fp16` to `True` in the source of `GradScaler`: small gradients can then become
# zero when they are divided by the scale. <!-- tests/notebooks/test_08c_scaler.py -->

# %% [markdown]
# ## Gradients are unscaled twice
#
# `AMP0010` <!-- failure
# messages = [
#   "unscale_() has already been called on this optimizer since the last update().",
# ]
# symptoms = [
#   "gradient accumulation with AMP and gradient clipping raises a RuntimeError",
#   "gradient_accumulation_steps above 1 fails in clip_grad_norm_ with fp16",
#   "error in the next iteration after I skip optimizer steps with a large gradient norm",
#   "the Trainer fails at the end of the first epoch with gradient accumulation in fp16",
#   "if the grad norm is over a limit I skip the step, and the iteration right after crashes in the scaler",
#   "works with accumulation 1, not with 2",
# ]
# words = "accelerator sync_gradients max_grad_norm SAM claims skip"
# -->
#
# **What you see.** `scaler.unscale_` raises
# `unscale_() has already been called on this optimizer since the last update().`
#
# **A small example.** We accumulate over two batches, and clip after each of
# them.


# %%
def accumulate(clip_each):
    """Sum the gradients of two batches, clip them, and step; returns the weights."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    for i, batch in enumerate((x, -x)):
        scaler.scale(model(batch).square().mean() / 2).backward()
        if clip_each or i == 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return model[0].weight.detach()


message = message_of(lambda: accumulate(clip_each=True))
print(message)
assert "unscale_() has already been called on this optimizer since the last update()." in message

# %% [markdown]
# **Why.** `unscale_` divides the gradients in place, so call it at most once for each optimizer between two calls of
# `scaler.update()`. A usual cause is a loop that clips after every batch of an accumulation, or that leaves out
# `update()` when it skips a step.
# <!-- tests/notebooks/test_08c_scaler.py -->
#
# **The fix.** Call `unscale_` and clip only once, after the last batch of the accumulation. Call `scaler.update()` at
# the end, even if you skip the step. With Accelerate, [clip only `if
# accelerator.sync_gradients`](https://huggingface.co/docs/accelerate/package_reference/accelerator). If the error
# comes [from the Trainer](https://github.com/huggingface/transformers/issues/23935), update Transformers and
# Accelerate.
#
# Up to rounding, the weights are now the same as after a loop without a scaler:

# %%
model, optimizer = make()
for batch in (x, -x):
    (model(batch).square().mean() / 2).backward()
nn.utils.clip_grad_norm_(model.parameters(), 0.5)
optimizer.step()
torch.testing.assert_close(accumulate(clip_each=False), model[0].weight.detach())

# %% [markdown]
# **Not this.** Do not call `scaler.update()` after every batch of the accumulation: the message disappears, but
# scaled gradients are then added to unscaled ones. <!-- tests/notebooks/test_08c_scaler.py -->

# %% [markdown]
# ## An optimizer has no gradients
#
# `AMP0011` <!-- failure
# messages = [
#   "No inf checks were recorded for this optimizer.",
# ]
# symptoms = [
#   "without the scaler the loss does not change at all, with it there is an AssertionError",
#   "scaler.step raises an AssertionError with my custom loss",
#   "AssertionError of scaler.step after freezing the backbone",
#   "optimizer made before model.cuda(), or from another copy of the model",
#   "loss built with torch.tensor or numpy, the parameters are never updated",
#   "the second optimizer in Lightning 16-mixed fails",
# ]
# words = "found_inf_per_device requires_grad detach custom loss unused frozen"
# -->
#
# **What you see.** `scaler.step` raises
# `No inf checks were recorded for this optimizer.`
#
# **A small example.** A model has two parts, and each part has an optimizer. The body
# is frozen: it runs under `no_grad`. Only the head therefore has a gradient.


# %%
def two_parts(step_both):
    body, body_optimizer = make()
    head, head_optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    with torch.no_grad():  # the body is frozen
        features = body(x)
    scaler.scale(head(features).sum()).backward()
    for optimizer in (body_optimizer, head_optimizer):
        if step_both or any(p.grad is not None for p in optimizer.param_groups[0]["params"]):
            scaler.step(optimizer)
    scaler.update()
    return [part[0].weight.grad is not None for part in (body, head)]


message = message_of(lambda: two_parts(step_both=True))
print(message)
assert "No inf checks were recorded for this optimizer." in message

# %% [markdown]
# **Why.** All parameters of this optimizer had a `.grad` of `None` when the scaler checked them. For example, the
# parameters are frozen or belong to another copy of the model. Or you called `unscale_` before `backward()`. Or the
# loss does not depend on the parameters: `.item()`, `.detach()`, `torch.tensor(...)` and ops without a derivative, such
# as `argmax`, disconnect the loss from the parameters. <!-- tests/notebooks/test_08c_scaler.py -->
#
# **The fix.** If the parameters should not be trained in this step, do not call `scaler.step` for their optimizer. If
# you leave out `unscale_` and `step` for all optimizers, leave out `scaler.update()` too. If the parameters should be
# trained, unfreeze them, or build the optimizer from the model that computes the loss. Call `unscale_` after
# `backward()`. Remove `no_grad`, and combine losses with `+` or `torch.stack`. <!-- tests/notebooks/test_08c_scaler.py
# -->

# %%
assert two_parts(step_both=False) == [False, True]
model, _ = make()
torch.stack([*model(x)[0]]).sum().backward()
assert model[0].weight.grad is not None

# %% [markdown]
# **Not this.** Do not call `loss.requires_grad_()` or [pass `requires_grad=True` to
# `torch.tensor`](https://github.com/open-mmlab/mmsegmentation/issues/3230). With such a loss, `backward()` runs, but the
# weights still get no gradient.

# %%
model, _ = make()
loss = torch.tensor(model(x).sum().item()).requires_grad_()
loss.backward()
assert model[0].weight.grad is None

# %% [markdown]
# **Notice the failure earlier.** After one `backward()`, print the names of the parameters whose `.grad` is `None`.

# %% [markdown]
# ## Scaler methods are called in the wrong order
#
# `AMP0012` <!-- failure
# quoted = [
#   "Attempted unscale_ but _scale is None",
#   "Attempted step but _scale is None",
# ]
# messages = [
#   "step() has already been called since the last update().",
#   "unscale_() is being called after step().",
#   "No inf checks were recorded prior to update.",
#   "Attempted unscale_ but _scale is None.",
#   "Attempted step but _scale is None.",
#   "Attempted update but _scale is None.",
#   "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler.update().",
# ]
# symptoms = [
#   "right order of scale, unscale_, clip, step and update of the GradScaler",
#   "scaler.update() fails with accelerate although scaler.step is commented out",
#   "may I use accelerator.scaler by hand",
# ]
# words = "manual_backward Lightning Fabric deepcopy"
# -->
#
# **What you see.** The scaler raises one of the seven messages that are printed below.
#
# **A small example.** Each line of the output shows the calls that we make after one
# backward pass, and the message that they raise. `_scale is None` means that this scaler has not scaled
# a loss yet.


# %%
def call(*names, scaled=True):
    """One backward pass, then methods of the scaler in this order; returns the scaler."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    loss = model(x).sum()
    (scaler.scale(loss) if scaled else loss).backward()
    for name in names:
        getattr(scaler, name)(*([] if name == "update" else [optimizer]))
    return scaler


messages = {"step, pickle": message_of(lambda: pickle.dumps(call("step")))}
for calls in ("step, step", "step, unscale_", "update"):
    messages[calls] = message_of(lambda calls=calls: call(*calls.split(", ")))
for name in ("step", "unscale_", "update"):
    message = message_of(lambda name=name: call(name, scaled=False))
    messages[f"no scale, {name}"] = message.split("  ")[0]
for calls, message in messages.items():
    print(f"{calls:<20}{message}")
assert len(set(messages.values())) == 7

# %% [markdown]
# **Why.** Call the methods of an enabled scaler in a fixed order. Between two calls of `update`, call `unscale_` and
# `step` at most once for each optimizer. Call `unscale_` before `step`. A call can also raise an error if an earlier
# call is missing. After `unscale_` or `step`, call `update` before you pickle the scaler. `update` can also fail if the
# `step` of a fused optimizer found no gradients. <!-- tests/notebooks/test_08c_scaler.py -->
#
# **The fix.** For [every optimizer step](https://docs.pytorch.org/docs/stable/notes/amp_examples.html), first call
# `scaler.scale(loss).backward()` for each batch. If you clip, call `scaler.unscale_(optimizer)` next. Call
# `scaler.step(optimizer)` for each optimizer, and `scaler.update()` once at the end. With Accelerate or Lightning, do
# not call the scaler yourself: replace `loss.backward()` with `accelerator.backward(loss)`, `fabric.backward(loss)` or
# Lightning's `self.manual_backward(loss)`. If your order is right, see [An optimizer has no
# gradients](#An-optimizer-has-no-gradients). <!-- tests/notebooks/test_08c_scaler.py -->

# %%
call("unscale_", "step", "update")
_ = pickle.dumps(call("step", "update"))

# %% [markdown]
# ## The optimizer steps without the scaler
#
# `AMP0131` <!-- failure
# symptoms = [
#   "optimizer.step() is called instead of scaler.step(optimizer)",
#   "optimizer.step() and scaler.step(optimizer) are both called",
#   "with GradScaler and SGD the weights explode at the first step",
#   "AMP works with Adam but diverges at once with SGD",
#   "with my own loss scale AdamW is fine, but the loss is inf after the first step with SGD",
#   "fp16_util of guided-diffusion divides only some master gradients by the loss scale",
#   "nan after 4k iterations whichever learning rate: optimizer.step() stands after the if and runs as well",
#   "GAN or voice training calls optim_g.step() and optim_d.step() with a scaler",
# ]
# words = "bypass twice 65536 explodes optimizer.step after scaler.update if else duplicate own hand-written"
# -->
#
# **What you see.** With SGD the loss can be huge or NaN after one step. With Adam the run may look normal until
# the weights become NaN.
#
# **A small example.** The loss is scaled, but the loop still calls
# `optimizer.step()`.


# %%
def weight_after_step(optimizer_class, by_scaler, gradient=1.0):
    """A weight of 1 after one step with a learning rate of 0.1."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = optimizer_class([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(gradient * weight.sum()).backward()
    scaler.step(optimizer) if by_scaler else optimizer.step()
    return weight.item()


for optimizer_class in (torch.optim.SGD, torch.optim.Adam):
    moved = weight_after_step(optimizer_class, by_scaler=False)
    print(f"{optimizer_class.__name__:<6}the weight of 1 becomes {moved:.1f}")
assert weight_after_step(torch.optim.SGD, by_scaler=False) < -6000
assert math.isnan(weight_after_step(torch.optim.Adam, by_scaler=False, gradient=math.inf))

# %% [markdown]
# **Why.** After `scaler.scale(loss).backward()` the gradients are multiplied by the scale, which by default starts at
# 65536. `scaler.step(optimizer)` divides the gradients by the scale if `unscale_` has not done so yet. `scaler.step`
# also skips the step if a gradient is infinite or NaN. `optimizer.step()` neither divides nor skips. Adam's steps
# hardly depend on the size of the gradients, but an infinite gradient makes the weight NaN.
#
# **The fix.** Replace every `optimizer.step()` with `scaler.step(optimizer)`, and call `scaler.update()` afterwards.
# Do not [call both steps](https://github.com/IAHispano/Applio/pull/860): the weights would be updated twice. If your
# code scales the loss itself, divide the gradients in all parameter groups by the scale before the step. <!--
# tests/notebooks/test_08c_scaler.py, tests/remedies/test_nonfinite_remedies.py -->

# %%
assert math.isclose(weight_after_step(torch.optim.SGD, by_scaler=True), 0.9, rel_tol=1e-4)
assert weight_after_step(torch.optim.Adam, by_scaler=True, gradient=math.inf) == 1  # skipped


# %% [markdown]
# ## The optimizer needs a closure
#
# `AMP0013` <!-- failure
# messages = [
#   "Closure use is not currently supported if GradScaler is enabled.",
# ]
# quoted = [
#   "AMP and the LBFGS optimizer are not compatible.",
# ]
# symptoms = [
#   "SAM, or another optimizer with two passes, gives NaN in fp16",
#   "how to use L-BFGS with mixed precision",
#   "scaler.step with first_step and second_step of SAM, another backward between them, can't unscale twice",
#   "the optimizer needs two forward and backward passes per iteration",
# ]
# words = "LBFGS first_step second_step Lightning sharpness aware closure"
# -->
#
# **What you see.** `scaler.step` raises
# `Closure use is not currently supported if GradScaler is enabled.` Lightning raises `AMP and the LBFGS optimizer are
# not compatible.` <!-- tests/notebooks/test_08c_scaler.py -->
#
# **A small example.** L-BFGS [needs a
# closure](https://docs.pytorch.org/docs/stable/optim.html) to evaluate the loss several times in a step.


# %%
def lbfgs(scaler, dtype):
    """One step of L-BFGS under autocast; returns the loss before and after."""
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    losses = []

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(model(x), torch.ones(1, 2))
        losses.append(loss.item())
        scaler.scale(loss).backward()
        return loss.detach()

    scaler.step(optimizer, closure=closure)
    return losses[0], closure().item()


message = message_of(lambda: lbfgs(torch.amp.GradScaler("cpu"), torch.float16))
print(message)
assert "Closure use is not currently supported if GradScaler is enabled." in message

# %% [markdown]
# **Why.** The optimizer runs `backward` inside its step, or needs several backward passes for one step. The scaler
# then cannot unscale all gradients and check them for infinities before the weights change.
#
# SAM (*sharpness-aware minimization*) has a similar problem: you call the first of its two steps without the scaler.
# If gradients overflow, this step is not skipped, so the weights can become NaN. <!--
# tests/notebooks/test_08c_scaler.py -->
#
# **The fix.** Use bf16 or fp32 with `GradScaler(enabled=False)`, which passes the closure on to the optimizer. In
# Lightning, use `precision="bf16-mixed"`. <!-- tests/notebooks/test_08c_scaler.py -->
#
# In bf16, our loss falls:

# %%
before, after = lbfgs(torch.amp.GradScaler("cpu", enabled=False), torch.bfloat16)
print(f"loss {before:.1f} -> {after:.1f}")
assert after < 0.01 * before

# %% [markdown]
# **Not this.** Do not write `scaler.step(optimizer, closure)`. The scaler does not reject a closure that is passed by
# position, so the optimizer can step with scaled gradients. <!-- tests/notebooks/test_08c_scaler.py
# -->

# %% [markdown]
# ## The scheduler warns that it came before the optimizer
#
# `AMP0014` <!-- failure
# messages = [
#   "Detected call of `lr_scheduler.step()` before `optimizer.step()`.",
# ]
# quoted = [
#   "Detected call of `scheduler.step()` before `optimizer.step()`.",
#   "`lr_scheduler.step()` before `optimizer.step()`",
# ]
# symptoms = [
#   "warning about the order of the scheduler and the optimizer although I call scaler.step first",
#   "lr_scheduler is ahead of the optimizer because scaler.step skipped steps",
#   "how to know whether the scaler skipped optimizer.step",
#   "warning at the very start about the learning rate scheduler, together with a line about gradient overflow",
#   "learning rate differs after resuming because a step was skipped",
#   "is the scheduler warning with fp16 harmless",
# ]
# words = "OneCycleLR warmup UserWarning Lightning order"
# -->
#
# **What you see.** The scheduler warns
# ``Detected call of `lr_scheduler.step()` before `optimizer.step()`.``
#
# **A small example.** The loop has the right order, but the first step overflows.


# %%
def schedule(only_if_stepped):
    """Three steps, the first of which overflows; returns the learning rate after each."""
    model, optimizer = make(lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for factor in (torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).sum() * factor).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not only_if_stepped or scaler.get_scale() >= before:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


message = warnings_of(lambda: schedule(only_if_stepped=False)).partition(" In PyTorch")[0]
print(message)
assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`." in message

# %% [markdown]
# **Why.** If `scaler.step` comes before `scheduler.step()` in your loop, the scaler usually
# [skipped](https://github.com/pytorch/pytorch/issues/44511) `optimizer.step()` because of an overflow. The scheduler
# advanced anyway, so the schedule is ahead of the training. <!-- tests/notebooks/test_08c_scaler.py -->
#
# **The fix.** Call `scheduler.step()` after `scaler.update()`. With one optimizer, compare `scaler.get_scale()` before
# and after `scaler.update()`. If the scale fell, do not call `scheduler.step()`.
# <!-- tests/numerics/test_scale_log.py -->
#
# In Lightning, if your schedulers have `interval="step"`, override these two methods of your `LightningModule`:
# <!-- tests/notebooks/test_08c_scaler.py -->
#
# ```python
# def optimizer_step(self, *args):
#     scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # None except in fp16
#     before = scaler.get_scale() if scaler else None
#     super().optimizer_step(*args)
#     self.stepped = scaler is None or scaler.get_scale() >= before
#
# def lr_scheduler_step(self, scheduler, metric):
#     if self.stepped:
#         super().lr_scheduler_step(scheduler, metric)
# ```

# %%
assert warnings_of(lambda: schedule(only_if_stepped=True)) == ""
assert schedule(only_if_stepped=True) == [1.0, 0.5, 0.25]

# %% [markdown]
# **Not this.** Do not filter the warning. Do not call `optimizer.step()` once before the loop either. In both cases,
# the schedule would still be ahead. <!-- tests/notebooks/test_08c_scaler.py -->

# %%
with warnings.catch_warnings(action="ignore"):
    assert schedule(only_if_stepped=False) == [0.5, 0.25, 0.125]  # one step ahead

# %% [markdown]
# **Notice the failure earlier.** `amp_lab.ScaleLog` lists the skipped steps.
# <!-- tests/numerics/test_scale_log.py -->

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
