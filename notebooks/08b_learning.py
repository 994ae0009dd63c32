# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Find out why a model learns nothing
#
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [The loss scale falls towards 0](#The-loss-scale-falls-towards-0);
# - [A layer does not learn because its gradients underflow](#A-layer-does-not-learn-because-its-gradients-underflow);
# - [Weights get no gradient after an evaluation pass](#Weights-get-no-gradient-after-an-evaluation-pass);
# - [The scaler runs with bf16 or the dtype is not the one you meant](#The-scaler-runs-with-bf16-or-the-dtype-is-not-the-one-you-meant);
# - [Half precision weights stop moving](#Half-precision-weights-stop-moving);
# - [Positions or counts are wrong beyond 256](#Positions-or-counts-are-wrong-beyond-256).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]
import math
from itertools import pairwise

import torch
from torch import nn

from course import figures, start
from course.failures import make, message_of

from amp_lab.numerics import ScaleLog, gradient_underflow

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## The loss scale falls towards 0
#
# `AMP0002` <!-- failure
# symptoms = [
#   "the loss scale keeps falling, or every step is skipped",
#   "the weights do not change in some steps",
# ]
# -->
#
# **What you see.** Every step is skipped, and the scale halves each time, from 65536 down to 0. The
# loss itself may look perfectly good.
#
# **The smallest program that does it.** A parameter starts at exactly zero, and the loss takes a
# square root. `train` is an ordinary loop that notes the scale.


# %%
def train(loss_of, scaler, steps):
    """Train two weights with a scaler; return their final values and the scale after each step."""
    weights = nn.Parameter(torch.tensor([0.0, 2.0]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights.detach(), scales


def sick_loss(weights):
    return weights.square().sqrt().sum()  # as in a distance or a standard deviation


weights, scales = train(sick_loss, torch.amp.GradScaler("cpu"), steps=170)
print(f"the loss is {sick_loss(weights):.1f}")
print("scale after 1, 17 and 166 steps:", *[scales[step - 1] for step in (1, 17, 166)])
assert weights.tolist() == [0.0, 2.0]  # nothing was learned
assert scales[164] == 2.0**-149  # the smallest number that fp32 has
assert scales[165:] == [0.0] * 5  # from where no doubling leads back

# %% [markdown]
# **Why.** The slope of the square root at 0 is infinite, and infinity times the inner slope, 0, is
# NaN at *any* scale. The scaler tries smaller scales in vain. After 166 steps the scale is 0, and it
# stays there. Anything else that makes a gradient infinite or NaN in every step and at any scale does
# the same, such as `log(0)`, 0/0, or a NaN in the data.
#
# **The fix.** Repair the loss and leave the scaler alone. Here we add a small number under the
# root, which keeps it away from 0.


# %%
def healthy_loss(weights):
    return (weights.square() + 1e-4).sqrt().sum()


scaler = torch.amp.GradScaler("cpu", growth_interval=20)  # the default is 2000
learned, healthy = train(healthy_loss, scaler, steps=60)
_ = figures.loss_scales({"NaN in every gradient": scales[:60], "healthy": healthy})
for sick in (lambda w: w.log().sum(), lambda w: (w / w).sum(), lambda w: math.nan * w.sum()):
    assert train(sick, torch.amp.GradScaler("cpu"), steps=170)[1] == scales
assert learned.abs().max() < 0.2
assert healthy == [2.0**16] * 19 + [2.0**17] * 20 + [2.0**18] * 20 + [2.0**19]

# %% [markdown]
# The picture shows the scale after each of 60 steps on a logarithmic axis. The healthy scale climbs
# in stairs. The other halves in every step, and after 17 steps it is below 1, the dotted line.
#
# **Notice it earlier.** Stop the run when `scaler.get_scale() < 1`. `ScaleLog` keeps the history:

# %%
scaler = torch.amp.GradScaler("cpu")
with ScaleLog(scaler) as log:
    train(sick_loss, scaler, steps=20)
print(f"{len(log.skipped)} of {len(log.scales)} steps skipped; lowest scale {min(log.scales):g}")
assert log.skipped == list(range(20))

# %% [markdown]
# ## A layer does not learn because its gradients underflow
#
# `AMP0003` <!-- failure
# symptoms = [
#   "the loss does not fall, or stops falling",
#   "some gradients are zero",
# ]
# -->
#
# **What you see.** There is no message. The loss falls slowly or not at all, and some gradients are
# exactly zero.
#
# **The smallest program that does it.** We use fp16 without a scaler. The loss has a small weight
# and is a mean over many outputs.


# %%
def gradient_of(weight, scaler):
    """The gradient of a small loss, by way of fp16."""
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = torch.ones(256, 4) @ weight  # (256, 64)
        loss = 1e-4 * outputs.float().mean()
    (gradient,) = torch.autograd.grad(scaler.scale(loss), weight)
    return gradient / scaler.get_scale()


weight = torch.ones(4, 64, requires_grad=True)
lost = gradient_of(weight, torch.amp.GradScaler("cpu", enabled=False))
print("largest gradient:", lost.max().item())
assert lost.count_nonzero() == 0

# %% [markdown]
# **Why.** The gradient of each of the 16,384 outputs is 1e-4 / 16384 = 6e-9. That is less than half
# of fp16's smallest number, 6e-8, so it becomes zero when it is cast to fp16 on its way back.
#
# **The fix.** Use a scaler. Here the gradient is then as in exact arithmetic, up to rounding in fp16:

# %%
kept = gradient_of(weight, torch.amp.GradScaler("cpu"))
exact = 256 * 1e-4 / 16384
print(f"with a scaler {kept.mean():.3e}, in exact arithmetic {exact:.3e}")
torch.testing.assert_close(kept, torch.full_like(kept, exact), rtol=2e-3, atol=0)  # 11 bits

# %% [markdown]
# **Notice it earlier.** `gradient_underflow` counts, layer by layer, what fp16 would lose. Here that
# is every gradient of the outputs, and a scale of 8 keeps them from vanishing:

# %%
model, _ = make(nn.Linear(4, 64))
loss = 1e-4 * model(torch.ones(256, 4)).mean()
report = gradient_underflow(model, loss)
print(f"fp16 loses {report.outputs.lost(1.0):.0%} of the gradients of the outputs")
print(f"and keeps 99.9 % of all with a scale of {report.smallest_scale:.0f} or more")
assert report.outputs.lost(1.0) == 1
assert report.smallest_scale == 8

# %% [markdown]
# ## Weights get no gradient after an evaluation pass
#
# `AMP0025` <!-- failure
# messages = [
#   "element 0 of tensors does not require grad and does not have a grad_fn",
# ]
# symptoms = [
#   "some gradients are `None`",
# ]
# -->
#
# **What you see.** In older versions, some gradients are `None`, or `backward()` raises
# `element 0 of tensors does not require grad and does not have a grad_fn`
#
# **The smallest program that does it.** We run one pass without gradients and one with gradients,
# in the same block.


# %%
def evaluate_then_train():
    """The gradient after an evaluation pass in the same block."""
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            evaluated = model(x)
        trained = model(x)
    trained.sum().backward()
    return evaluated, model[0].weight.grad


evaluated, gradient = evaluate_then_train()
message = message_of(evaluated.sum().backward)  # what older versions said of `trained`
print(message)
assert "element 0 of tensors does not require grad and does not have a grad_fn" in message
assert torch.equal(gradient, x.expand(2, 2))  # right, in this version

# %% [markdown]
# **Why.** The pass without gradients put the cast of the weight into autocast's cache. That cast
# had no history, and older versions used it again for training. This [is
# repaired](https://github.com/pytorch/pytorch/pull/165068) in the versions that this page runs on: a cached cast has its history even if
# it was made without gradients. But the cache still holds *values* (section 26), and the casts of
# the evaluation pass take up memory until the block ends.
#
# **The fix.** Give the evaluation a block of its own, which works in older versions too.

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
    model(x)
with torch.autocast("cpu", dtype=torch.bfloat16):
    trained = model(x)
trained.sum().backward()
assert torch.equal(model[0].weight.grad, x.expand(2, 2))

# %% [markdown]
# **Notice it earlier.** After one step, assert that no trained parameter's `.grad` is `None`.

# %% [markdown]
# ## The scaler runs with bf16 or the dtype is not the one you meant
#
# `AMP0028` <!-- failure
# symptoms = [
#   "the loss scale grows and grows",
# ]
# -->
#
# **What you see.** The loss scale grows and grows, or a run that was meant to be bf16 overflows.
#
# **The smallest program that does it.** We use bf16 with a scaler. Its growth interval is 1 (2000
# is the default), so that 150 steps are enough.


# %%
def scales_in(dtype, enabled):
    """The loss scale over 150 steps."""
    model, optimizer = make(lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1, enabled=enabled)
    scales = []
    for _ in range(150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


pointless = scales_in(torch.bfloat16, enabled=True)
_ = figures.loss_scales({"bf16 with a scaler": pointless, "fp16": scales_in(torch.float16, True)})
assert max(scales_in(torch.float16, enabled=True)) < 2.0**17
assert max(pointless) > 2.0**120
assert any(after < before for before, after in pairwise(pointless))

# %% [markdown]
# The picture shows both scales over 150 steps on a logarithmic axis. In fp16 the scale meets fp16's
# limit at once and stays near it. In bf16 it climbs in a straight line for about 110 steps to the end
# of fp32, where it too skips steps.
#
# **Why.** Two defaults meet here. A scaler is enabled unless you say otherwise, and in bf16 hardly
# anything stops it before fp32 ends. Autocast without `dtype=` is fp16 on a GPU, but bf16 on a CPU.
#
# **The fix.** Name the dtype in one place, and let it decide whether the scaler is enabled.

# %%
assert torch.get_autocast_dtype("cuda") is torch.float16
assert torch.get_autocast_dtype("cpu") is torch.bfloat16
for dtype in (torch.bfloat16, torch.float16):
    scaler = torch.amp.GradScaler("cpu", enabled=(dtype is torch.float16))
    assert scaler.is_enabled() is (dtype is torch.float16)
assert set(scales_in(torch.bfloat16, enabled=False)) == {1.0}

# %% [markdown]
# **Notice it earlier.** `ScaleLog` shows a scale that climbs on and on, as bf16's does above.

# %% [markdown]
# ## Half precision weights stop moving
#
# `AMP0029` <!-- failure
# symptoms = [
#   "the loss does not fall, or stops falling",
#   "parameters are NaN after one step of Adam",
#   "weight decay, or an average of weights (EMA), does nothing in bf16",
#   "weights of norms stay exactly 1.0, though the loss falls",
# ]
# -->
#
# **What you see.** The loss stops falling, while with fp32 weights it goes on. Or the parameters
# are NaN after the first step of Adam.
#
# **The smallest program that does it.** We load weights from a bf16 checkpoint with `assign=True`,
# and make a hundred small updates.


# %%
def after_updates(model):
    """The first weight after 100 updates of 1e-3, from 1 on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    for _ in range(100):
        optimizer.step()
    return next(model.parameters()).flatten()[0].item()


checkpoint = {name: value.bfloat16() for name, value in make()[0].state_dict().items()}
model, _ = make()
model.load_state_dict(checkpoint, assign=True)
print(f"weights in {model[0].weight.dtype}: 1 -> {after_updates(model):.2f}")
assert after_updates(model) == 1.0

# %% [markdown]
# **Why.** `assign=True` took over the dtype of the checkpoint. Just below 1, bf16 numbers are 2^-8
# apart, and a change of less than half of that is rounded away. The weights of norms start at exactly
# 1, so they may stay there while the loss falls, since smaller weights still move. So it goes with a
# weight decay that changes a weight by 1e-4 of it (`lr * weight_decay`), and with a moving average in bf16.
# Code that writes `self.W.data = self.W.to(x.dtype)` in a forward pass casts a parameter for good: cast
# a copy, or what the module gets. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
# The moments of Adam have the dtype of
# the parameters. In fp16 its epsilon of 1e-8 is 0, so in the first step (unless it is fused) a weight
# whose gradient is 0 is changed by 0/0, which is NaN:

# %%
half = nn.Parameter(torch.ones(1).half())
half.grad = torch.zeros(1).half()
adam = torch.optim.Adam([half])
adam.step()
assert adam.state[half]["exp_avg_sq"].dtype is torch.float16
assert half.isnan().all()
half.data.fill_(1.0)
torch.optim.Adam([half], fused=True).step()
assert half.item() == 1

# %% [markdown]
# **The fix.** Use fp32 weights. Without `assign`, loading copies into them, and `.float()` repairs
# a model that is in half precision already. Make the optimizer after that. If you round
# stochastically instead ([notebook 16](16_low_precision_state.ipynb)), round once in a step, after the
# decay *and* the update: a small decay in bf16 before it is lost.
#
# If an average of weights never changes, even where it should take over half of each weight, the
# cause is not rounding. Look for a list of dtypes without `torch.bfloat16`
# ([a report](https://github.com/lucidrains/ema-pytorch/pull/18)), which leaves all weights out, and
# ask `is_floating_point()` instead.

# %%
model, _ = make()
model.load_state_dict(checkpoint)
print(f"weights in {model[0].weight.dtype}: 1 -> {after_updates(model):.2f}")
assert abs(after_updates(model) - 0.9) < 1e-4
ones = torch.ones(3, dtype=torch.bfloat16)
assert torch.equal(
    ones * (1 - 1e-3 * 0.1), ones
)  # lr 1e-3, weight decay 0.1: nothing is left of it
assert 0.02 * ones[0] - 1e-4 < 0.02 * ones[0]  # a small weight moves
assert ones.lerp(0 * ones, 0.5)[0] == 0.5  # half of each weight is more than rounding
assert ones.dtype not in (torch.float32, torch.float16)
assert ones.is_floating_point()
assert torch.equal(ones.lerp(2 * ones, 1e-3), ones)  # nor of a step of a moving average

# %% [markdown]
# **Notice it earlier.** Use the assertion of section 9 right before you make the optimizer.

# %% [markdown]
# ## Positions or counts are wrong beyond 256
#
# `AMP0030` <!-- failure
# symptoms = [
#   "NaN, or a wrong result, only after another call was made, such as `add_noise` of a scheduler",
#   "results are good on short inputs and bad on long ones, or many positions give the same embedding",
#   "an index is out of range, or two timesteps are the same",
#   "the same box is detected twice: NMS leaves duplicates",
#   "a mask or a grid has a row or a column too many on a large image, in fp16 beyond 2048",
#   "the logged loss moves in steps, stands still or falls to 0 in bf16, and `loss.item()` is right",
# ]
# -->
#
# **What you see.** Often there is no message. A model that is good on short inputs fails on long
# ones, a count stops at 256, two timesteps of a diffusion model are the same, or non-maximum
# suppression (NMS) keeps boxes twice. A mask has a row too many on large images. A logged loss moves in
# steps or falls to 0. Or an index is out of range: 999 becomes 1000.
#
# **The smallest program that does it.** We compute the angles of rotary position embeddings, which
# are positions times frequencies. Here we write this as a matrix product, which autocast computes
# in bf16.


# %%
def angles(length):
    """Position times frequency, (length, 1); the frequency is 1."""
    return torch.arange(length, dtype=torch.float32)[:, None] @ torch.ones(1, 1)


with torch.autocast("cpu", dtype=torch.bfloat16):
    print(f"{angles(1024).unique().numel()} different angles for 1024 positions")
    assert angles(1024).unique().numel() == 513
one = torch.ones((), dtype=torch.bfloat16)
assert sum([one] * 1000, start=0 * one) == 256  # 256 + 1 is 256

# %% [markdown]
# **Why.** bf16 has 8 significant bits. It counts in steps of 1 up to 256, of 2 up to 512, and of 4 up
# to 1024. fp16 counts in steps of 1 up to 2048, and of 2 up to 4096. Beyond 256, neighbouring
# positions get the same angle, so 1024 positions have only 513 angles. This has happened [in
# well-known models](https://github.com/huggingface/transformers/pull/29285).
#
# The same happens without autocast where the code itself casts whole numbers, with
# `.to(torch.bfloat16)` or `dtype=`, or where `model.bfloat16()` casts a buffer of rates (`inv_freq`), for
# which `.float()` afterwards comes too late ([notebook 17](17_language_model.ipynb)). Cast the sines and
# cosines, and not the timestep. And it happens to coordinates with a large offset:
# [`batched_nms`](https://github.com/pytorch/vision/blob/main/torchvision/ops/boxes.py) may shift the
# boxes of class k by k times more than the largest coordinate.
# Near 53,000, numbers in fp16 are 32 apart and in bf16 256, so the edges of a box of 30 pixels are
# one spacing apart, or none. An `arange` in the dtype of fp16 boxes has no 2049, so a mask that is
# made of it gets a row too many ([a report](https://github.com/kornia/kornia/pull/4336)). `amp-lab
# diff` names the `arange` if one of the two versions casts the boxes; `--precision fp16` does not,
# since autocast leaves boxes as they are. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# A *sum of losses* in bf16 stops when a loss is less than half of the spacing. If its growth is what is
# logged, that falls to 0. The training itself is not affected. The sum has to be fp32: with `+=` it
# keeps its own dtype, whatever is added.
#
# A *table*, such as the schedule of a diffusion model, loses what counts as well: 0.9999 is 1 in bf16,
# and 1 - 1 is 0, so a division gives NaN, or no noise is added. Some code stores its table in the dtype
# of an input ([a report](https://github.com/huggingface/diffusers/pull/3005)), and every later call
# gets the rounded one. Keep the table in fp32, compute with it, and cast the result. An epsilon would hide
# the fault.
#
# **The fix.** Make an island, as in section 1; where the code itself casts, leave out the cast. Never
# keep indices, positions, coordinates, counters or sums of losses in half precision: call `.float()`
# on boxes *before* NMS. bf16 is no repair here, since it counts less far than fp16.

# %%
with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
    assert angles(1024).unique().numel() == 1024
assert torch.tensor([998, 999]).to(torch.bfloat16).tolist() == [1000, 1000]
rates = nn.Module()
rates.register_buffer("inv_freq", torch.tensor([1 / 3]))
assert rates.bfloat16().float().inv_freq != torch.tensor([1 / 3])
boxes = torch.tensor([53000.0, 53030.0])  # two edges, 30 pixels apart
assert boxes.half().diff() == 32
assert boxes.bfloat16().diff() == 0
assert torch.tensor([2048.0, 2049.0]).half().diff() == 0  # fp16 counts to 2048
assert torch.arange(2048, 2051, dtype=torch.float16).tolist() == [2048, 2048, 2050]
assert torch.arange(2048, 2051, dtype=torch.float32).tolist() == [2048, 2049, 2050]

# %%
loss, total, sum_in_fp32 = torch.tensor(1.5), torch.tensor(512.0).bfloat16(), torch.tensor(512.0)
total += loss.float()
sum_in_fp32 += loss.bfloat16()
assert total == 512
assert sum_in_fp32 == 513.5
schedule = torch.tensor([0.9999, 0.98])  # how much of an image is left after each step
assert (1 - schedule.bfloat16()).sqrt()[0] == 0
assert (1 - schedule).sqrt().bfloat16()[0] > 0

# %% [markdown]
# **Notice it earlier.** Compare the outputs in bf16 and in fp32 on the longest input you allow. `amp-lab
# xray` says where autocast casts whole numbers. <!-- tests/remedies/test_xray_remedies.py -->

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
