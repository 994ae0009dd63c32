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
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [The parameters are fp16](#The-parameters-are-fp16);
# - [Gradients are unscaled twice](#Gradients-are-unscaled-twice);
# - [An optimizer has no gradients](#An-optimizer-has-no-gradients);
# - [Scaler methods are called in the wrong order](#Scaler-methods-are-called-in-the-wrong-order);
# - [The optimizer needs a closure](#The-optimizer-needs-a-closure);
# - [The scheduler warns that it came before the optimizer](#The-scheduler-warns-that-it-came-before-the-optimizer).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]
import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from course import figures, start
from course.failures import make, message_of, warnings_of

from amp_lab.numerics import gradient_underflow

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## The parameters are fp16
#
# `AMP0009` <!-- failure
# messages = [
#   "Attempting to unscale FP16 gradients.",
# ]
# quoted = [
#   "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
# ]
# -->
#
# **What you see.** `scaler.step` or `scaler.unscale_` raises
# `Attempting to unscale FP16 gradients.`
#
# **The smallest program that does it.** A model is converted with `.half()`, or loaded from a
# checkpoint in half precision, and then trained with a scaler.


# %%
def step_with_parameters_in(dtype):
    model, optimizer = make()
    model.to(dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x.to(dtype)).sum()).backward()
    scaler.step(optimizer)


message = message_of(lambda: step_with_parameters_in(torch.float16))
print(message)
assert "Attempting to unscale FP16 gradients." in message

# %% [markdown]
# **Why.** By default a gradient has the dtype of its parameter. Divided by the scale *in fp16*, a
# small one would vanish again, which the scale is there to
# prevent. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# On the CPU, bf16 parameters are not refused, and may fail as in section 29. On CUDA the same step
# raises another error,
# `"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'`
# ([issue 127176](https://github.com/pytorch/pytorch/issues/127176)).
#
# **The fix.** Keep the parameters in fp32, and let autocast make the fp16 copies. `.float()`
# converts them back.

# %%
model, optimizer = make()
model.half().float()  # as after loading half-precision weights
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(x).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
step_with_parameters_in(torch.bfloat16)  # no message, on the CPU

# %% [markdown]
# **Notice it earlier.** Before each optimizer step, assert that every *trained* parameter is in fp32. A
# frozen base may be in 16 bits. A `model.half()` inside of an evaluation changes the weights for good,
# so that an assertion at the top of the program comes too early.


# %%
def check_trained(model):
    assert all(p.dtype is torch.float32 for p in model.parameters() if p.requires_grad)


adapted = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
check_trained(adapted)  # an adapter on a frozen base
try:
    check_trained(model.half())
except AssertionError:
    model.float()
else:
    raise AssertionError("fp16 parameters were not noticed")

# %% [markdown]
# ## Gradients are unscaled twice
#
# `AMP0010` <!-- failure
# messages = [
#   "unscale_() has already been called on this optimizer since the last update().",
# ]
# -->
#
# **What you see.** `scaler.unscale_` raises
# `unscale_() has already been called on this optimizer since the last update().`
#
# **The smallest program that does it.** We accumulate over two batches, and clip after each of
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
# **Why.** `unscale_` divides in place. After the first call, the second backward pass would add
# *scaled* gradients to unscaled ones, and the second call would divide the first batch's part
# twice.
#
# The message also comes where a step is skipped after `unscale_`, and `update` with it: call
# `scaler.update()` in every iteration that called
# `unscale_`. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Accumulate scaled gradients, and unscale and clip once, before the step. Here the
# weights are then those of a loop without a scaler:

# %%
model, optimizer = make()
for batch in (x, -x):
    (model(batch).square().mean() / 2).backward()
nn.utils.clip_grad_norm_(model.parameters(), 0.5)
optimizer.step()
torch.testing.assert_close(accumulate(clip_each=False), model[0].weight.detach())

# %% [markdown]
# **Notice it earlier.** Keep `unscale_`, clipping, `step` and `update` together in the loop.

# %% [markdown]
# ## An optimizer has no gradients
#
# `AMP0011` <!-- failure
# messages = [
#   "No inf checks were recorded for this optimizer.",
# ]
# symptoms = [
#   "some gradients are `None`",
# ]
# -->
#
# **What you see.** `scaler.step` raises
# `No inf checks were recorded for this optimizer.`
#
# **The smallest program that does it.** Two parts have an optimizer each, but only one got a
# gradient. The other is frozen, or its turn comes in another step.


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
# **Why.** `step` looks for infinities in the gradients of that optimizer, but it has none: every
# `.grad` is `None`. The same happens if you leave out `backward()`, or build the optimizer for
# another copy of the model, or if the graph is cut between the weights and the loss. It is cut by
# - `.item()`, `float()` and `.detach()`, and by `torch.tensor([loss_a, loss_b])`, which copies numbers;
# - ops without a derivative, such as `argmax`, `histc`, comparisons, and casts to whole numbers.
#
# If the loss is a tensor, `backward()` then raises the message of section 25. With `requires_grad_()`
# on it nothing is raised, and the weights still get no gradient. (`round` and `sign` do not cut the graph. Their
# derivative is 0, so the gradients are zeros.) <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** If the part is meant to be frozen, do not step its optimizer. If it is not, keep the
# losses as tensors, and put them together with `torch.stack` or `+`. In place of an op without a
# derivative take one that has a useful one, such as the cross-entropy for an accuracy.

# %%
assert two_parts(step_both=False) == [False, True]


def gradient_through(loss_of):
    """The gradient of a weight for `loss_of(outputs)`, whether or not the loss has a graph."""
    model, _ = make()
    loss = loss_of(model(x))
    if not loss.requires_grad:  # or backward() would raise
        loss.requires_grad_()
    loss.backward()
    return model[0].weight.grad


# %% [markdown]
# Seven ways to cut the graph, one to keep it, and `round` and `sign`:

# %%
cuts = (
    lambda outputs: torch.tensor(outputs.sum().item()),
    lambda outputs: outputs.sum().detach(),
    lambda outputs: torch.tensor([*outputs[0]]).sum(),
    lambda outputs: outputs.argmax().float(),
    lambda outputs: torch.histc(outputs, bins=4).sum(),
    lambda outputs: (outputs > 0).float().mean(),
    lambda outputs: outputs.long().float().mean(),
)
with warnings.catch_warnings(action="ignore"):  # torch.tensor warns that it makes numbers
    assert [gradient_through(cut) for cut in cuts] == [None] * len(cuts)
assert gradient_through(lambda outputs: torch.stack([*outputs[0]]).sum()).count_nonzero() == 4
for flat in (torch.round, torch.sign):
    assert not gradient_through(lambda outputs, flat=flat: flat(outputs).sum()).any()

# %% [markdown]
# `gradient_underflow` looks at the graph of a loss before you train with it:

# %%
model, _ = make()
copied = torch.tensor([1.0, 2.0], requires_grad=True).sum()
message = message_of(lambda: gradient_underflow(model, copied))
assert "the loss does not depend on the model" in message
message = message_of(lambda: gradient_underflow(model, model(x).sum().detach()))
assert "the loss has no graph" in message

# %% [markdown]
# **Notice it earlier.** Print the names of the parameters whose `.grad` is `None` after one step.
# Before that, `gradient_underflow(model, loss)` refuses such a loss: it has no graph, or it does
# not depend on the model. `amp-lab memory --loss` refuses a loss that has no graph. <!-- tests/tracing/test_memory.py -->

# %% [markdown]
# ## Scaler methods are called in the wrong order
#
# `AMP0012` <!-- failure
# messages = [
#   "step() has already been called since the last update().",
#   "unscale_() is being called after step().",
#   "No inf checks were recorded prior to update.",
#   "Attempted unscale_ but _scale is None.",
#   "Attempted step but _scale is None.",
# ]
# symptoms = [
#   "the logged loss is off by a factor of 2 at times",
# ]
# -->
#
# **What you see.** The scaler raises one of these:
# - `step() has already been called since the last update().`
# - `unscale_() is being called after step().`
# - `No inf checks were recorded prior to update.`
# - `Attempted step but _scale is None.`
# - `Attempted unscale_ but _scale is None.`
#
# **The smallest program that does it.** After one backward pass, we make the calls named on the
# left.


# %%
def call(*names, scaled=True):
    """One backward pass, then methods of the scaler in this order."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    loss = model(x).sum()
    (scaler.scale(loss) if scaled else loss).backward()
    for name in names:
        getattr(scaler, name)(*([] if name == "update" else [optimizer]))


messages = {
    "step, step": message_of(lambda: call("step", "step")),
    "step, unscale_": message_of(lambda: call("step", "unscale_")),
    "update": message_of(lambda: call("update")),
    "step without scale": message_of(lambda: call("step", scaled=False)).split("  ")[0],
    "unscale_, the same": message_of(lambda: call("unscale_", scaled=False)).split("  ")[0],
}
for names, message in messages.items():
    print(f"{names:<20}{message}")

# %%
assert "step() has already been called since the last update()." in messages["step, step"]
assert "unscale_() is being called after step()." in messages["step, unscale_"]
assert "No inf checks were recorded prior to update." in messages["update"]
assert "Attempted step but _scale is None." in messages["step without scale"]
assert "Attempted unscale_ but _scale is None." in messages["unscale_, the same"]
once_more = nn.Parameter(torch.zeros(1))
once_more.grad = torch.ones(1)
plain_sgd = torch.optim.SGD([once_more], lr=1.0)
plain_sgd.step(), plain_sgd.step()  # an optimizer itself does not refuse
assert once_more.item() == -2

# %% [markdown]
# **Why.** `update` ends an iteration. Without a new scale it needs the result of at least one `step`
# or `unscale_`, and makes the scaler forget it. A second `step` would apply the same gradients once
# more. Without `scale(loss)` there is nothing to undo.
#
# In Lightning's manual optimization it is `self.manual_backward(loss)` that scales, and
# `loss.backward()` does not. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Use one order in every iteration: `unscale_` if you need it, `step`, `update`. With
# several optimizers, call `step` for each and `update` [once, after
# them](https://docs.pytorch.org/docs/stable/notes/amp_examples.html).

# %%
call("unscale_", "step", "update")  # unscale_ only for those who clip or log
call("step", "update")
assert message_of(lambda: call("update", "step")) == messages["update"]

# %% [markdown]
# `get_scale()` after `update` is the scale of the next step. A loss that is divided by it is off, by
# default by a factor of 2, wherever the scale has changed. Log the loss before it is scaled.

# %%
scaler = torch.amp.GradScaler("cpu")
parameter = nn.Parameter(torch.ones(1))
parameter.grad = torch.tensor([math.inf])
scaled_loss = scaler.scale(torch.ones(()))  # the loss is 1
scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))
scaler.update()
assert scaled_loss / scaler.get_scale() == 2
scaler.update(1024.0)  # with a new scale it needs no step

# %% [markdown]
# **Notice it earlier.** A forgotten `update` raises in the second iteration. A `scale` that is left
# out later raises nothing. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %% [markdown]
# ## The optimizer needs a closure
#
# `AMP0013` <!-- failure
# messages = [
#   "Closure use is not currently supported if GradScaler is enabled.",
# ]
# symptoms = [
#   "SAM, or another optimizer with two passes, gives NaN in fp16",
# ]
# -->
#
# **What you see.** `scaler.step` raises
# `Closure use is not currently supported if GradScaler is enabled.`
#
# **The smallest program that does it.** L-BFGS [needs a
# closure](https://docs.pytorch.org/docs/stable/optim.html), with which it
# evaluates the loss several times in a step.


# %%
def lbfgs(scaler, dtype, by_position=False):
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

    closure()  # `step` of a scaler needs gradients
    if by_position:
        scaler.step(optimizer, closure)
    else:
        scaler.step(optimizer, closure=closure)
    return losses[0], closure().item()


# %% [markdown]
# An enabled scaler refuses the closure if it is passed by name:


# %%
message = message_of(lambda: lbfgs(torch.amp.GradScaler("cpu"), torch.float16))
print(message)
assert "Closure use is not currently supported if GradScaler is enabled." in message
_ = lbfgs(torch.amp.GradScaler("cpu"), torch.float16, by_position=True)  # no message

# %% [markdown]
# **Why.** The closure runs `backward` inside the optimizer, where the scaler can neither unscale the
# gradients nor look at them. It notices only a closure that is passed *by name*. With
# `scaler.step(optimizer, closure)`, once there are gradients, there is no message, and you train on
# scaled gradients that nobody checks. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# An optimizer that steps in two passes, such as SAM, has the same trouble: no scaler skips its
# first step, so a single overflow can make the weights NaN for
# good. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Use bf16 or fp32, and disable the scaler. It then hands the closure on.

# %%
before, after = lbfgs(torch.amp.GradScaler("cpu", enabled=False), torch.bfloat16)
print(f"loss {before:.1f} -> {after:.1f}")
assert after < 0.01 * before

# %% [markdown]
# **Notice it earlier.** Search your code for `closure`: it does not go together with an enabled
# scaler.

# %% [markdown]
# ## The scheduler warns that it came before the optimizer
#
# `AMP0014` <!-- failure
# messages = [
#   "Detected call of `lr_scheduler.step()` before `optimizer.step()`.",
# ]
# -->
#
# **What you see.** The scheduler warns
# ``Detected call of `lr_scheduler.step()` before `optimizer.step()`.``
#
# **The smallest program that does it.** In the usual loop, the very first step is skipped.


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
# **Why.** The order in the loop is right, but the scaler skipped `optimizer.step()` because of an
# overflow. The schedule is then one step ahead of the training.
#
# **The fix.** With one optimizer, `update` lowers the scale if and only if the step was skipped
# (unless the scale is 0 already). So advance the schedule only if the scale did not
# fall. <!-- tests/numerics/test_scale_log.py -->

# %%
assert warnings_of(lambda: schedule(only_if_stepped=True)) == ""
assert schedule(only_if_stepped=True) == [1.0, 0.5, 0.25]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    assert schedule(only_if_stepped=False) == [0.5, 0.25, 0.125]  # one step ahead

# %% [markdown]
# **Notice it earlier.** `ScaleLog` counts the skipped steps. Each puts the schedule one step ahead,
# but PyTorch checks only at the scheduler's first call. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
