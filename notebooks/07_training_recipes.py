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
# **What you'll do.** Take what real training loops do besides forward, backward and step, and put
# AMP into each: first the plain loop, then the same loop with every changed line marked, and last
# what happens if you leave such a line out.
#
# **What you'll learn.**
# - the one rule behind most recipes: ask who looks at the gradients, and whether they are scaled
#   at that moment;
# - which parts of a loop need no change at all under AMP;
# - how each omission shows itself, since most of them raise no error.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for `torch.autocast` and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for `GradScaler`. You need no GPU. Run the cells up to the
# first recipe, and then go to the one that you need. ("Compile" and "Load" also need `error_of`,
# which is defined in the recipe on checkpoints.)
#
# | what the loop does | recipe |
# |---|---|
# | limits or inspects gradients | [Clip gradients](#Clip-gradients) |
# | sums gradients over several batches | [Accumulate gradients](#Accumulate-gradients) |
# | has gradients in the loss | [Penalise gradients](#Penalise-gradients) |
# | changes the learning rate | [Schedule the learning rate](#Schedule-the-learning-rate) |
# | keeps an average of the weights | [Average the weights](#Average-the-weights) |
# | recomputes activations to save memory | [Checkpoint activations](#Checkpoint-activations) |
# | is compiled | [Compile the model](#Compile-the-model) |
# | does something rarer | [More recipes](#More-recipes-(optional)) |

# %% tags=["nbval-ignore-output"]
import math
import warnings
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from course import figures, start

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
# It matters a great deal. If we divide first, the gradient has the length 0.1 that we asked for. If we clip first, a
# length of 1.5e-06 is left, and with SGD the training nearly stands still without any error. So the rule behind the recipes is
# this: **whatever looks at gradients belongs after `unscale_`, and whatever makes gradients starts from
# `scaler.scale(…)`.** What looks only at weights needs no change, because autocast leaves the weights in fp32.
#
# ## The setting
#
# We train a small network on five small batches. The last batch is shorter than the others, as the
# last one of an epoch often is. On so little data even fp16 on a CPU is quick.

# %%
torch.manual_seed(0)
inputs = torch.randn(72, 8)
targets = inputs.sin().mean(dim=1, keepdim=True)
batches = [
    (x.to(device), y.to(device)) for x, y in zip(inputs.split(16), targets.split(16), strict=True)
]
assert [len(x) for x, _ in batches] == [16, 16, 16, 16, 8]


def new_model():
    """The same network every time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


# %% [markdown]
# This is the plain loop that the recipes start from.


# %%
def train_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


# %% [markdown]
# And this is the same loop with AMP. A line marked `# AMP` is new; where it replaces another one, the comment says
# which. We enable the scaler for fp16 alone. For bf16 it is
# [disabled](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py): `scale` returns the loss unchanged,
# and `step` only calls `optimizer.step()`. So one function serves both.


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
# ## How a recipe is checked
#
# `change` runs a recipe on a new network and returns how far every weight has moved: in fp32 if we
# give it no dtype, and with AMP otherwise. It insists that no step was skipped, since a skipped step
# is a difference of another kind.


# %%
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def change(recipe, dtype=None, make_model=new_model, make_optimizer=sgd):
    """What `recipe` adds to the weights of a new model, as one vector."""
    model = make_model()
    optimizer = make_optimizer(model)
    before = parameters_to_vector(model.parameters()).detach().clone()
    if dtype is None:
        recipe(model, optimizer)
    else:
        scaler = torch.amp.GradScaler(device.type, enabled=(dtype is torch.float16))
        recipe(model, optimizer, scaler, dtype)
        assert scaler.get_scale() == (2**16 if scaler.is_enabled() else 1)  # nothing was skipped
    return parameters_to_vector(model.parameters()).detach() - before


# %% [markdown]
# `check_same` compares that with fp32. How close is close enough? fp16 has 11 significant bits, so
# one rounding of a normal number has a relative error of up to 2^-11; bf16 has 8, and 2^-8. A value
# is rounded several times on its way through the network, and these errors cancel in part. We
# therefore allow four roundings, which is 2^-9 in fp16 and 2^-6 in bf16.


# %%
def distance(found, reference):
    """Length of the difference of two vectors, relative to the length of the second."""
    return ((found - reference).norm() / reference.norm()).item()


def check_same(reference, amp):
    """Assert that `amp(dtype)` is `reference`, up to 4 roundings, in fp16 and in bf16."""
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        tolerance = 4 * torch.finfo(dtype).eps / 2  # eps/2 is one rounding
        assert distance(amp(dtype), reference) < tolerance, name
        print(f"{name}: the weights move as in fp32, to within 1/{1 / tolerance:.0f}")


check_same(change(train_plain), lambda dtype: change(train_amp, dtype))

# %% [markdown]
# The AMP loop moves the weights as the plain one does, to within 1/512 in fp16 and 1/64 in bf16.
# The last helpers are for cells that show what goes wrong. `backward` makes the first half of an AMP
# step, up to the scaled gradients.


# %%
def new_run(make_optimizer=sgd, **options):
    """A new model, optimizer and fp16 scaler."""
    model = new_model()
    return model, make_optimizer(model), torch.amp.GradScaler(device.type, **options)


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
# You need this if single batches have gradients large enough to throw the training off course. In
# the plain loop it is one line:

# %%
MAX_NORM = 0.1


def clip_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


# %% [markdown]
# Clipping looks at gradients, so `unscale_` comes first. `step` notices that the gradients have been
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


check_same(change(clip_plain), lambda dtype: change(clip_amp, dtype))

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
# The picture shows four dots on a logarithmic axis. After `backward`, in the grey part on the left,
# the gradient has a length of 37,244, which is 65,536 times too much. `unscale_` brings it down to
# its true length of 0.57, clipping shortens it to 0.10, and the step uses it as it is.
#
# **Without `unscale_`** we would clip in the grey part, as in the five lines above, and `step` would divide by the
# scale afterwards. If a gradient overflows in fp16, the norm is not finite, and the scaler skips the step. In bf16
# nothing skips it. There, call `clip_grad_norm_` with `error_if_nonfinite=True`: otherwise the step makes weights NaN,
# often all of them. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ## Accumulate gradients
#
# You need this if the batch that you want does not fit into memory. Several small batches add up
# their gradients before one step. We weight each batch by its share of the samples, so that the last
# group, which is shorter, comes out right as well. <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
GROUP = 2


def accumulate_plain(model, optimizer):
    for first in range(0, len(batches), GROUP):
        group = batches[first : first + GROUP]  # the last one may be shorter
        samples = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for x, y in group:
            loss = F.mse_loss(model(x), y) * (len(x) / samples)
            loss.backward()
        optimizer.step()


# %% [markdown]
# With AMP, `scale` belongs to every batch, but `step` and `update` belong to the end of a group,
# because all gradients that are added up must have the same scale. If you clip as well, put
# `unscale_` there too.


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


check_same(change(accumulate_plain), lambda dtype: change(accumulate_amp, dtype))

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
# It moves by 3.1e-05. The second `unscale_` divided the first gradient again, and `step` divided
# both once more, so about 2 / 65,536 is left. If you call `unscale_`, do it once per group, after its
# last backward pass.
#
# ## Penalise gradients
#
# You need this if the loss itself contains gradients, for example to keep a function smooth. Then a
# gradient is part of the forward pass, and is differentiated again. The plain loop adds a tenth of
# the squared length of the gradient to the loss.

# %%
PENALTY = 0.1


def penalty_plain(model, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        loss = loss + PENALTY * sum(grad.square().sum() for grad in grads)
        loss.backward()
        optimizer.step()


# %% [markdown]
# With AMP we make the inner gradient from the scaled loss, so that it survives fp16, and [unscale it by
# hand](https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty), because `unscale_` knows only
# about `.grad`. The penalty belongs to the forward pass, so we compute it under autocast again. The outer half is as
# usual. If the inner gradient overflows in fp16, so does the loss, and the step is skipped. <!-- tests/notebooks/test_07_training_recipes.py -->


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


check_same(change(penalty_plain), lambda dtype: change(penalty_amp, dtype))

# %% [markdown]
# **Without the division by hand** every gradient in the penalty is 2^16 times too large. What does
# that make of the penalty itself?

# %%
model, optimizer, scaler = new_run()
x, y = batches[0]
with torch.autocast(device.type, dtype=torch.float16):
    loss = F.mse_loss(model(x), y)
grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
forgotten = sum(grad.square().sum() for grad in grads).item()
right = sum((grad / scaler.get_scale()).square().sum() for grad in grads).item()
print(f"{forgotten / right:.1e} times too large, 2^32 is {2.0**32:.1e}")
assert math.isclose(forgotten / right, 2.0**32, rel_tol=1e-3)

# %% [markdown]
# The penalty is a square, so it is 2^32, or 4.3e+09, times too large.
#
# ## Schedule the learning rate
#
# You need this nearly always. The plain loop moves the learning rate on after every step:


# %%
def decay(optimizer):
    """A schedule from the full learning rate down to a tenth of it, in five steps."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5)


def schedule_plain(model, optimizer):
    scheduler = decay(optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()


# %% [markdown]
# With AMP a step may be skipped, and the schedule should count only the steps that were taken. `scaler.step` does not
# tell us, but the scale does: with one optimizer, and until it is 0, [it
# falls](https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py) if, and only if, the step was skipped.


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


check_same(change(schedule_plain), lambda dtype: change(schedule_amp, dtype))

# %% [markdown]
# **Without this check** skipped steps use up the schedule. We start with a scale of 2^20, which is much
# too large, so that the scaler has to search. PyTorch warns only if the very first step was skipped and
# the optimizer is not fused; we silence that here. <!-- tests/notebooks/test_07_training_recipes.py -->


# %%
def schedule_careless(model, optimizer, scaler):
    scheduler = decay(optimizer)
    for batch in range(5):
        optimizer.zero_grad()
        backward(model, scaler, batch)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


model, careless, scaler = new_run(init_scale=2.0**20)
with warnings.catch_warnings(action="ignore"):
    schedule_careless(model, careless, scaler)
skipped = round(20 - math.log2(scaler.get_scale()))
model, careful, scaler = new_run(init_scale=2.0**20)
schedule_amp(model, careful, scaler, torch.float16)
rates = [optimizer.param_groups[0]["lr"] for optimizer in (careless, careful)]
print("{} of 5 steps skipped; learning rate {:.3f}, with the check {:.3f}".format(skipped, *rates))
assert math.isclose(rates[0], 0.01)
assert math.isclose(rates[1], 0.1 * (1 - 0.9 * (5 - skipped) / 5))

# %% [markdown]
# Three of the five steps were skipped. The careless schedule has run to its end, 0.010, although
# only two steps were taken; the careful one stands at 0.064, as it should after two. As a rule of
# thumb, a few lost steps of ten thousand do not matter, but they do in a short warm-up, which is
# just when the scaler searches. The check has a price, because `get_scale` waits for the device
# ([notebook 03](03_grad_scaler_step_by_step.ipynb) counts the waits).
#
# ## Average the weights
#
# You need this if the last weights jump about: an exponential moving average (EMA) of them is
# smoother. The plain loop updates the average after every step. The last line puts it into the
# model, so that the average is what we compare.


# %%
def average_plain(model, optimizer):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


# %% [markdown]
# An average looks at weights, and autocast has left those in fp32. So AMP adds nothing but the
# usual lines.


# %%
def average_amp(model, optimizer, scaler, dtype):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


check_same(change(average_plain), lambda dtype: change(average_amp, dtype))

# %% [markdown]
# **With the average in half precision**, kept so to save memory, something else happens. A weight
# jumps from 1.0 to 1.2, and with a decay of 0.999 each update moves the average by a thousandth of
# the difference. Before you run this: where will the average stand after 2,000 updates in bf16?

# %%
followed = {}
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
    weight = nn.ParameterList([nn.Parameter(torch.tensor(1.0, dtype=dtype))])
    average = AveragedModel(weight, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(weight)  # the first call copies
    weight[0].data.fill_(1.2)
    followed[name] = []
    for _ in range(2000):
        average.update_parameters(weight)
        followed[name].append(average.module[0].item())
_ = figures.weight_over_updates(followed).set_ylabel("average of the weight")
assert followed["fp32"][-1] > 1.15
assert followed["bf16"][-1] == followed["fp16"][-1] == 1.0

# %% [markdown]
# The picture shows the average after each update. In fp32 it rises towards 1.2 in a curve that
# flattens out. In bf16 and fp16 it stays at 1.0, because each step of about 0.0002 is less than
# half the distance to the next number, and is rounded away. So make the average from an fp32 model,
# and convert a *copy* of it when you deploy it.
#
# ## Checkpoint activations
#
# You need this if activations fill the memory. Of its activations a checkpointed part [keeps only the
# input](https://docs.pytorch.org/docs/stable/checkpoint.html), and it runs a second time in the backward pass. Here the
# first two layers do so:


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
# With AMP you change nothing in this one. The second run happens in the backward pass, outside of the
# autocast block, but `checkpoint` has noted the state of autocast and restores it. So both loops
# from above train it as they are, and in fp16 the weights are equal to the last bit, with and without
# checkpointing: <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
check_same(
    change(train_plain, make_model=Checkpointed),
    lambda dtype: change(train_amp, dtype, make_model=Checkpointed),
)
assert torch.equal(
    change(train_amp, torch.float16, make_model=Checkpointed), change(train_amp, torch.float16)
)

# %% [markdown]
# In torch 2.15 selective checkpointing (`context_fn`) is an exception: if a region uses a weight that
# was cast before, as where two share one, backward raises `… not found in storage`, unless autocast has `cache_enabled=False`. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# **Without `use_reentrant=False`** you get the older kind of checkpoint, with a warning that asks you to choose. It
# cuts the graph if no *input* requires a gradient, which is so for a batch of data. Then the parameters inside get no
# gradient. If your optimizer has other parameters too, you see no error at all: the checkpointed part just never
# learns. Only an optimizer that has nothing but such parameters, as in the next cell, makes the scaler complain, in
# words that do not lead to the cause. `error_of` returns the text of an error that we expect. <!-- tests/notebooks/test_07_training_recipes.py -->


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
# These words mean that the scaler found no gradient in this optimizer. With
# `use_reentrant=False` the gradients are there.
#
# ## Compile the model
#
# You may need this for speed, most of all on a GPU, where the casts of autocast can be fused with the ops around them
# [*(not yet seen on a GPU)*](../data/results/README.md "compiled-casts"). Measure it, as [notebook
# 10](10_speed_ladder.ipynb) does. The default backend takes its time to generate kernels, so at the quick scale we use
# [`aot_eager`](https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/backends/debugging.py), which captures graphs
# and runs PyTorch's own kernels.

# %%
backend = "inductor" if scale == "full" and device.type == "cuda" else "aot_eager"


def compiled_model():
    return torch.compile(new_model(), backend=backend)


check_same(
    change(train_plain, make_model=compiled_model),
    lambda dtype: change(train_amp, dtype, make_model=compiled_model),
)

# %% [markdown]
# With AMP we change nothing in it: the compiled model passes the same check as the plain one.
#
# **Without the same autocast block in every call** the model is compiled again, since compiled code is made for one
# state of autocast. If you forget the block in evaluation, it runs in fp32. (`no_grad` alone makes it [compile
# again](18_inference_and_export.ipynb#What-torch.compile-does-to-it), with the block too.) A "stance" turns the second
# compilation into an error:

# %%
torch.compiler.reset()  # forget what has been compiled so far
model, x = compiled_model(), batches[0][0]
with torch.autocast(device.type, dtype=torch.float16):
    model(x)
with torch.compiler.set_stance("fail_on_recompile"):
    with torch.autocast(device.type, dtype=torch.float16):
        output = model(x)  # the same state: nothing to compile
    message = error_of(model, x)  # no autocast
print(message.partition(". ")[0])
assert output.dtype is torch.float16
assert "recompile" in message

# %% [markdown]
# ## More recipes (optional)
#
# These come up less often, so each gets only its rule and at most one demonstration. To resume a
# run, save the scaler's state too; [notebook 05](05_cifar10_mobilenet.ipynb) resumes one to the
# last bit.
#
# ### Use several losses and optimizers
#
# Use one scaler for all: scale every loss by it, let every optimizer step through it, and call
# `update` once, at the end. An `update` between two steps may change the scale while the gradients
# of the second optimizer still have the old one. Here the gradients of the first overflow:


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
# The second step was twice as long as it should be, because gradients that were multiplied by
# 65,536 were divided by 32,768. Notice also that the second optimizer stepped although the first
# was skipped. If that does harm in your training, use one optimizer with two parameter groups,
# which steps as a whole or not at all. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ### Write an autograd function
#
# Give a function with a backward pass of its own two decorators. `custom_fwd` notes the state of
# autocast, and `custom_bwd` runs the backward pass in it. ([Notebook 02](02_autocast_dtypes.ipynb)
# shows which tensor has which dtype on the way.) Without them, in the next cell the saved weight is
# fp32, the gradient is fp16, and `grad @ weight` raises an error. <!-- tests/notebooks/test_07_training_recipes.py -->


# %%
class LinearReLU(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=device.type)  # AMP
    def forward(ctx, x, weight):
        output = (x @ weight.T).relu()
        ctx.save_for_backward(x, weight, output)
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type=device.type)  # AMP
    def backward(ctx, grad):
        x, weight, output = ctx.saved_tensors
        grad = grad * (output > 0)
        return grad @ weight, grad.T @ x


weight = nn.Parameter(torch.ones(4, 8, device=device))
with torch.autocast(device.type, dtype=torch.float16):
    LinearReLU.apply(batches[0][0], weight).float().sum().backward()
assert weight.grad.dtype is torch.float32

# %% [markdown]
# ### Choose the optimizer
#
# AMP works with optimizers such as SGD and Adam, as long as you always call `scaler.step(optimizer)`. If you write
# `optimizer.step()` instead, nothing is unscaled. Who would notice that, a user of SGD or of Adam? <!-- tests/notebooks/test_07_training_recipes.py -->


# %%
def step_without_scaler(make):
    """How many times as far as through the scaler the optimizer itself moves a weight."""
    moves = []
    for careless in (True, False):
        model, optimizer, scaler = new_run(lambda model: make(model.parameters(), lr=1e-2))
        backward(model, scaler)
        optimizer.step() if careless else scaler.step(optimizer)
        moves.append((model[0].weight - new_model()[0].weight).norm().item())
    return moves[0] / moves[1]


for make in (torch.optim.SGD, torch.optim.Adam):
    ratio = step_without_scaler(make)
    print(f"{make.__name__:<4}: {ratio:.0f} times the right step")
    assert math.isclose(ratio, 65536 if make is torch.optim.SGD else 1, rel_tol=1e-2)

# %% [markdown]
# SGD takes a step 65,536 times too long, which is hard to overlook. Adam divides the gradient by the root of its running
# mean square, so the factor cancels and training looks right, until the first overflow turns the weights into NaN.
# (If `scaler.update()` is still there, it raises `No inf checks were recorded prior to update` at once.) <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ### Evaluate during training
#
# Give evaluation an autocast block of its own. If one block surrounds training and evaluation, autocast keeps its casts
# of the weights until that block ends, and an evaluation under `no_grad` uses the weights from before the step:


# %%
def evaluation_sees_the_step(outer_block):
    """Whether the loss that an evaluation reports right after a step differs from that before."""
    model, optimizer, scaler = new_run()
    x, y = batches[0]
    with outer_block:
        before = backward(model, scaler)
        scaler.step(optimizer)
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
            after = F.mse_loss(model(x), y)
    return not torch.equal(before, after)


assert evaluation_sees_the_step(nullcontext())
assert not evaluation_sees_the_step(torch.autocast(device.type, dtype=torch.float16))
assert not evaluation_sees_the_step(torch.autocast(device.type, enabled=False))  # not even this

# %% [markdown]
# ### Freeze layers
#
# Nothing changes if you freeze layers, but something becomes possible. No update is added to a frozen
# weight (unless your code writes to it, as to the average of an EMA), so you may store it in half precision if autocast runs its layer in that dtype
# anyway. That saves half of its memory and the casts, and changes no bit of the result. Two lines do
# it: `layer.requires_grad_(False)` and `layer.to(torch.float16)`. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# ### Load half precision weights
#
# `load_state_dict` copies values *into* the parameters, which stay fp32, so a file of fp16 or bf16
# weights needs no care. But `assign=True` with fp16 weights, or `.half()` on the model, makes the parameters
# fp16, and the scaler refuses to unscale their gradients. (With bf16 parameters nothing complains, and
# small updates are rounded away.) Call `model.float()` before you make the optimizer. <!-- tests/notebooks/test_07_training_recipes.py -->

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
# ## Summary
#
# Whatever makes gradients starts from `scaler.scale(…)`; whatever looks at them comes after
# `unscale_`; whatever looks at weights stays as it was, because weights are fp32. The lines below
# come on top of the four of every AMP loop: autocast, `scale`, `scaler.step` and `update`.
#
# | recipe | what AMP adds | what goes wrong without |
# |---|---|---|
# | [Clip](#Clip-gradients) | `scaler.unscale_(optimizer)` before clipping | SGD nearly stands still |
# | [Accumulate](#Accumulate-gradients) | `scale` per batch; `step` and `update` per group | gradients are divided twice |
# | [Penalise](#Penalise-gradients) | scale the inner loss, divide its gradients by `get_scale()` | the penalty is 2^32 times too large |
# | [Schedule](#Schedule-the-learning-rate) | `scheduler.step()` only if the scale did not fall | skipped steps use up the schedule |
# | [Average](#Average-the-weights) | nothing; keep the average in fp32 | in half precision it may never move |
# | [Checkpoint](#Checkpoint-activations) | nothing; `use_reentrant=False` | parameters get no gradient |
# | [Compile](#Compile-the-model) | nothing; always the same autocast state | the model is compiled again |
# | [Several](#Use-several-losses-and-optimizers) | one scaler, one `update` at the end | a step is twice as long as it should be |
# | [Function](#Write-an-autograd-function) | `custom_fwd` and `custom_bwd` | dtypes differ in the backward pass |
# | [Optimizer](#Choose-the-optimizer) | nothing; always `scaler.step` | `update` raises; without `update`, Adam hides it |
# | [Evaluate](#Evaluate-during-training) | an autocast block of its own | the weights are stale |
# | [Freeze](#Freeze-layers) | nothing; frozen weights may be half precision | |
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
