# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Keep values inside the range of fp16
#
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [The loss is NaN because an activation exceeds 65504](#The-loss-is-NaN-because-an-activation-exceeds-65504);
# - [A mask value does not fit into fp16](#A-mask-value-does-not-fit-into-fp16);
# - [NaN because an epsilon of 1e-8 is zero in fp16](#NaN-because-an-epsilon-of-1e-8-is-zero-in-fp16);
# - [A norm written by hand overflows above 256](#A-norm-written-by-hand-overflows-above-256);
# - [Training is fine but evaluation is NaN](#Training-is-fine-but-evaluation-is-NaN);
# - [Anomaly detection stops at a harmless overflow](#Anomaly-detection-stops-at-a-harmless-overflow).
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
from course.failures import cuda_rules, make, message_of

from amp_lab.numerics import find_nonfinite

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## The loss is NaN because an activation exceeds 65504
#
# `AMP0001` <!-- failure
# symptoms = [
#   "the loss is NaN, in the first step or later",
# ]
# -->
#
# **What you see.** The loss is `nan`. In fp32 all is well.
#
# **The smallest program that does it.** We take a layer with large weights, normalise its output,
# and compute a loss. The same function computes it in fp32, fp16 and bf16.


# %%
def loss_in(dtype, model):
    """The loss of `model` under autocast to `dtype`; fp32 means no autocast."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        return F.mse_loss(model(10 * x), torch.ones(1, 2))


model, _ = make(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
with torch.no_grad():
    model[0].weight.copy_(torch.tensor([[5000.0, 5000.0], [500.0, 500.0]]))
for dtype in (torch.float32, torch.float16):
    print(f"{dtype}: loss {loss_in(dtype, model).item():.2f}")
assert loss_in(torch.float16, model).isnan()

# %% [markdown]
# **Why.** The first layer gives 150,000 (30 times 5000), which is infinite in fp16. The mean that
# the normalisation takes is then infinite too, and infinity minus infinity is NaN. Activations of
# large trained transformers can get that large; [those of
# T5](https://github.com/huggingface/transformers/issues/5651) are a well-known case.
#
# **The fix.** Use bf16, which has nearly the range of fp32. Or make an fp32 *island* of the part that
# overflows: switch autocast off there, and cast the inputs by hand. Both are needed. Weights in fp32
# are not enough, since autocast casts them: the model above has no others.
#
# An island returns fp32, and the next matmul under autocast casts that to fp16 again. So it has to
# go on until the values are small, here up to the norm. It also has to begin before the overflow: in
# T5 1.1 that was found [before the last
# layer](https://github.com/huggingface/transformers/issues/9295) of a feed-forward block.
#
# `Island` puts a module around the layer: the layer's weight is then `island.module.weight`, also in
# the `state_dict`, and code that reads `layer.weight` breaks. Where there is such code, make the
# island a subclass of the layer, with the same two lines around
# `super().forward`. <!-- tests/notebooks/test_08_when_amp_breaks.py -->


# %%
class Island(nn.Module):
    """Runs a module in fp32, whatever autocast says outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.module(x.float())


exact = loss_in(torch.float32, model)
repaired = nn.Sequential(Island(model[0]), *model[1:])
torch.testing.assert_close(loss_in(torch.bfloat16, model), exact, rtol=0.05, atol=0)  # 8 bits
torch.testing.assert_close(loss_in(torch.float16, repaired), exact, rtol=0.01, atol=0)  # 11 bits
assert "0.module.weight" in repaired.state_dict()
assert not hasattr(repaired[0], "weight")
unnormed = nn.Sequential(model[0], model[2])  # the values are still large between the two
assert not loss_in(torch.float16, nn.Sequential(Island(unnormed[0]), unnormed[1])).isfinite()
assert loss_in(torch.float16, Island(unnormed)).isfinite()

# %% [markdown]
# **Notice it earlier.** `find_nonfinite` watches a step and names the place, here `addmm` in the
# first layer. Without it, switch off the scaler and then autocast, one at a time. If the NaN is
# gone without autocast, low precision is the likely cause. Try bf16 next. If that helps, it was
# probably the range of fp16. A NaN in bf16 can come from its spacing: two numbers that differ in
# fp32 round to the same one, and something is divided by their difference, as in `stretch`.


# %%
def stretch(h):
    """Numbers with their mean subtracted, divided by the largest of what is left."""
    centred = h - h.mean()
    return centred / centred.abs().max()


with find_nonfinite(model) as finder:
    loss_in(torch.float16, model).backward()
print(f"made by {finder.report.op} in module {finder.report.where}: {finder.report.value}")
assert finder.report.module == "0"
close = torch.tensor([1.0, 1.001])  # no range is involved here
assert stretch(close).isfinite().all()
assert stretch(close.half()).isfinite().all()
assert stretch(close.bfloat16()).isnan().all()

# %% [markdown]
# ## A mask value does not fit into fp16
#
# `AMP0004` <!-- failure
# messages = [
#   "value cannot be converted to type c10::Half without overflow",
# ]
# symptoms = [
#   "the loss is NaN, in the first step or later",
# ]
# -->
#
# **What you see.** A call such as `masked_fill` raises
# `value cannot be converted to type c10::Half without overflow`
# ([`type at::Half`](https://github.com/NVIDIA/apex/issues/1052) in older versions). Or there is no
# message, and a row that is masked everywhere is NaN.
#
# **The smallest program that does it.** We mask attention scores in two customary ways: we fill in
# -1e9, or we add it.

# %%
with torch.autocast("cpu", dtype=torch.float16):
    scores = x.T @ x  # (2, 2), fp16
mask = torch.tensor([[True, True], [False, True]])  # True: hidden, so row 0 sees nothing
message = message_of(lambda: scores.masked_fill(mask, -1e9))
print(message)
assert "value cannot be converted to type c10::Half without overflow" in message
added = (scores + mask.half() * -1e9).softmax(-1)
print(added)
assert added[0].isnan().all()

# %% [markdown]
# **Why.** -1e9 lies outside fp16. `masked_fill` checks its number and refuses it. Arithmetic does
# not check: it gives -inf, and a softmax over nothing but -inf is 0/0.
#
# **The fix.** Fill in the lowest number of the scores' dtype, or give a boolean mask to
# `F.scaled_dot_product_attention`, which needs no such number. Do not *add* that number: in fp16,
# with a score of -16 or less the sum rounds to -inf again, and so does the sum of two such masks. If
# that happens to all scores of a row, it is NaN as before.

# %%
lowest = torch.finfo(scores.dtype).min
attention = scores.masked_fill(mask, lowest).softmax(-1)
print(attention)
assert attention.tolist() == [[0.5, 0.5], [1.0, 0.0]]
added = (-20 * scores + mask.half() * lowest).softmax(-1)
assert added[0].isnan().all()
assert (torch.tensor([-16.0, -15.0]).half() + lowest).isinf().tolist() == [True, False]
assert (-20 * scores).masked_fill(mask, lowest).softmax(-1)[0].tolist() == [0.5, 0.5]
query = scores[None]  # (1, 2, 2); for this mask, True means: not hidden
assert F.scaled_dot_product_attention(query, query, query, attn_mask=~mask).isfinite().all()

# %% [markdown]
# **Notice it earlier.** `amp-lab xray --dtype fp16` finds a fill that raises, without a GPU.
# `find_nonfinite` names the line where the added mask becomes infinite. <!-- tests/tracing/test_advice.py, tests/remedies/test_nonfinite_remedies.py -->

# %% [markdown]
# ## NaN because an epsilon of 1e-8 is zero in fp16
#
# `AMP0005` <!-- failure
# symptoms = [
#   "the loss is NaN, in the first step or later",
# ]
# -->
#
# **What you see.** Some values are NaN, such as those of a row of zeros.
#
# **The smallest program that does it.** We divide each row by its own largest value, and one row is
# all zeros.


# %%
def rescale(h, eps=1e-8):
    return h / (h.abs().amax(-1, keepdim=True) + eps)


h = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
print(rescale(h.half()))
assert rescale(h).isfinite().all()
assert rescale(h.half())[1].isnan().all()
assert torch.tensor(1e-8).half() == 0

# %% [markdown]
# **Why.** 1e-8 is less than half of the smallest fp16 number, so it rounds to zero and protects
# against nothing. On the CPU the same happens in `F.normalize`, whose epsilon is 1e-12; on CUDA
# autocast takes its norm in fp32. Adam's 1e-8 is the same trap once the parameters are fp16, unless
# it is fused ([section 29](08b_learning.ipynb#Half-precision-weights-stop-moving)).
#
# **The fix.** Compute this part in fp32, on `h.float()`, with an epsilon of 1e-3 or more if you
# train. An epsilon that fp16 can hold, at least `torch.finfo(dtype).tiny`, keeps a row of zeros
# finite. In training it is too small: at a loss scale of 65536 the gradients
# often overflow. In a model that is in fp16 itself, cast the result back,
# `.to(h.dtype)`. <!-- tests/remedies/test_nonfinite_remedies.py -->

# %%
assert F.normalize(h.half())[1].isnan().all()
with cuda_rules():
    fake = torch.rand(2, 2, device="cuda").half()
    assert F.normalize(fake).dtype is torch.float32
    assert rescale(fake).dtype is torch.float16  # no help from autocast there either
tiny = torch.finfo(torch.float16).tiny
for repaired in (rescale(h.half(), eps=tiny), rescale(h.float()), F.normalize(h.half(), eps=tiny)):
    assert repaired.isfinite().all()

# %% [markdown]
# **Notice it earlier.** Feed the model one batch of zeros, and check that its output is finite.

# %% [markdown]
# ## A norm written by hand overflows above 256
#
# `AMP0006` <!-- failure
# symptoms = [
#   "some gradients are zero",
#   "the output of a layer is all zeros",
#   "a Dice or IoU loss is NaN",
# ]
# -->
#
# **What you see.** There is no NaN and no message. The output of a layer is exactly zero, and no
# layer before it learns through it.
#
# **The smallest program that does it.** We write root-mean-square normalisation out.


# %%
def rms_norm(h):
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-4)


with torch.autocast("cpu", dtype=torch.float16):
    h = (150 * x) @ torch.eye(2)  # (1, 2): 150 and 300, in fp16
    print(rms_norm(h))
    assert rms_norm(h).count_nonzero() == 0
    weight = torch.eye(2, requires_grad=True)
    rms_norm((150 * x) @ weight).sum().backward()
assert weight.grad.count_nonzero() == 0

# %% [markdown]
# **Why.** 300 times 300 is 90,000, which is infinite in fp16. The root of the mean is infinite too,
# and a number divided by infinity is 0. Autocast leaves a multiplication as it is (on CUDA it runs
# `pow` in fp32), so it stays in fp16. Squares, variances and distances that are written by hand can
# overflow long before their inputs do. So can a sum over the pixels of an image, as in a Dice or
# IoU loss: 512 x 512 ones are 262,144. (Autocast for CUDA returns a sum in fp32, but a model in
# fp16 does not.) A sum that is written as a matmul, such as the costs of a matcher, overflows under
# autocast on CUDA too.
#
# **The fix.** Use the library's function, here `F.rms_norm`, which does not overflow, or call
# `.float()` on the input, such as the logits of a loss. For a matmul that is not enough, since
# autocast casts it again: make an island, as in section 1, or divide by the number before it. (In
# bf16 nothing overflows, but costs that are close may become equal.)

# %%
exact = rms_norm(150 * x)
with torch.autocast("cpu", dtype=torch.float16):
    torch.testing.assert_close(rms_norm(h.float()), exact, rtol=1e-3, atol=0)  # 11 bits
    library = F.rms_norm(h, (2,)).float()
    torch.testing.assert_close(library, exact, rtol=1e-3, atol=0)
with cuda_rules():
    fake = torch.rand(2, device="cuda").half()
    assert ((fake * fake).dtype, fake.pow(2).dtype) == (torch.float16, torch.float32)
    assert fake.sum().dtype is torch.float32
pixels = torch.ones(512, 512).half().sum()
assert pixels.isinf()
assert (2 * pixels / (pixels + pixels)).isnan()  # a Dice score

# %%
points = torch.full((1, 1000), 10.0)
with torch.autocast("cpu", dtype=torch.float16):
    assert (points @ points.T / 1000).isinf()  # fp32 points, and 100,000 in fp16
    assert (points / 1000) @ points.T == 100
    with torch.autocast("cpu", enabled=False):
        assert points @ points.T / 1000 == 100
assert torch.tensor([1.2266, 1.2250]).bfloat16().diff() == 0

# %% [markdown]
# **Notice it earlier.** Look at the gradients of a step. If a whole layer has only zeros, find out
# why. `find_nonfinite` names the op that made an infinity which something was then divided by, or
# which was still there when an error ended the block, as that of SciPy's matcher
# does. <!-- tests/numerics/test_nonfinite.py -->

# %% [markdown]
# ## Training is fine but evaluation is NaN
#
# `AMP0007` <!-- failure
# symptoms = [
#   "training works, but evaluation gives NaN",
# ]
# -->
#
# **What you see.** After one bad batch and one skipped step, training goes on as if nothing had
# happened. Later the model gives NaN in evaluation.
#
# **The smallest program that does it.** A model has batch normalisation, and one batch overflows.


# %%
def train_step(model, optimizer, scaler, batch):
    """An ordinary AMP step; returns the loss."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(batch), torch.ones(8, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


# %% [markdown]
# The second of the four batches has values that are too large for fp16.

# %%
model, optimizer = make(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
scaler = torch.amp.GradScaler("cpu")
batches = [torch.randn(8, 2) * factor for factor in (1, 1e6, 1, 1)]  # the second overflows
losses = [train_step(model, optimizer, scaler, batch) for batch in batches]
print("training, loss finite:", *[math.isfinite(loss) for loss in losses])
print("evaluation:", model.eval()(x).item())
assert [math.isfinite(loss) for loss in losses] == [True, False, True, True]
assert model(x).isnan()
assert not all(b.isfinite().all() for b in model.buffers())

# %% [markdown]
# **Why.** The scaler skips the optimizer, which protects only the *parameters*. The running mean
# and variance of batch normalisation are *buffers*, and the forward pass has already updated them.
# Training does not use them, but evaluation does.
#
# **The fix.** Let `update_bn` measure the statistics anew, on good batches. Then repair the
# overflow.

# %%
assert all(parameter.isfinite().all() for parameter in model.parameters())
good = [batches[0], batches[2], batches[3]]
torch.optim.swa_utils.update_bn(good, model)
print("evaluation, output finite:", model.eval()(x).isfinite().item())
assert model(x).isfinite()

# %% [markdown]
# **Notice it earlier.** Before each checkpoint, check
# `all(b.isfinite().all() for b in model.buffers())`.

# %% [markdown]
# ## Anomaly detection stops at a harmless overflow
#
# `AMP0008` <!-- failure
# messages = [
#   "Function 'MulBackward0' returned nan values in its 0th output.",
# ]
# -->
#
# **What you see.** `backward` raises
# `Function 'MulBackward0' returned nan values in its 0th output.`
# (or names another function). It does so only with anomaly detection switched on, in a run that
# trains well without it.
#
# **The smallest program that does it.** A gradient overflows at the present scale, and a mask
# multiplies it by 0.


# %%
def masked_step(scaler):
    """Forward and backward of a masked sum in fp16, under anomaly detection."""
    weights = torch.ones(2, requires_grad=True)
    keep = torch.tensor([0.0, 1.0]).half()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # the traceback of the forward call
        scaler.scale((weights.half() * keep).sum()).backward()
    return weights.grad


message = message_of(lambda: masked_step(torch.amp.GradScaler("cpu", init_scale=2.0**17)))
print(message)
assert "Function 'MulBackward0' returned nan values in its 0th output." in message

# %% [markdown]
# **Why.** Overflows are how the scaler finds its scale
# ([notebook 03](03_grad_scaler_step_by_step.ipynb)). Infinity times 0 is NaN, and the scaler would
# skip the step and halve the scale. Anomaly detection does not know that, and raises first.
#
# **The fix.** Use a scale that does not overflow. A NaN that you find then is not the scaler's.

# %%
calm = torch.amp.GradScaler("cpu", init_scale=1.0)  # or enabled=False, in bf16 or fp32
assert masked_step(calm).tolist() == [0.0, 1.0]

# %% [markdown]
# **Notice it earlier.** If the NaN ends once `ScaleLog` shows a halved scale, it was probably only
# the scaler at work.

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
