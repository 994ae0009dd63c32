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
# **What you'll do.** Look up one failure: its symptom, a small example, the reason and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [The loss is NaN because an activation exceeds 65504](#The-loss-is-NaN-because-an-activation-exceeds-65504);
# - [A mask value does not fit into fp16](#A-mask-value-does-not-fit-into-fp16);
# - [Attention is NaN for a row that is masked everywhere](#Attention-is-NaN-for-a-row-that-is-masked-everywhere);
# - [Sampling finds inf or NaN in the probabilities](#Sampling-finds-inf-or-NaN-in-the-probabilities);
# - [NaN because an epsilon of 1e-8 is zero in fp16](#NaN-because-an-epsilon-of-1e-8-is-zero-in-fp16);
# - [The logarithm of a probability is -inf](#The-logarithm-of-a-probability-is--inf);
# - [A norm written by hand overflows above 256](#A-norm-written-by-hand-overflows-above-256);
# - [Training is fine but evaluation is NaN](#Training-is-fine-but-evaluation-is-NaN);
# - [Anomaly detection stops at a harmless overflow](#Anomaly-detection-stops-at-a-harmless-overflow).
#
# **What you need.** You need no GPU. Read only the section of your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `make` returns a model and its optimizer, and `message_of`
# returns the message of the error that a call raises.

# %% tags=["nbval-ignore-output"]
import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from course import start
from course.failures import make, message_of

from amp_lab.numerics import find_nonfinite

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## The loss is NaN because an activation exceeds 65504
#
# `AMP0001` <!-- failure
# quoted = [
#   "Loss is nan, stopping training", "Loss is inf, stopping training",
#   "Loss became infinite or NaN at iteration={n}", "NaN or Inf found in input tensor.",
#   "FloatingPointError: gradients are Nan/Inf", "contain Inf/NaN. Training has diverged",
#   "found NaN in local grad norm", "in grad norm for bucket", "found NaN in local forward loss",
#   "Loss is not finite", "Parameter is not finite: Parameter containing", "train_loss nan",
#   "train loss : nan", "Detected inf/nan during batch_number={n}", "inf output[{n}]", "nan output[{n}]",
# ]
# symptoms = [
#   "NaN from a later stage of the backbone in fp16, where qkv or the output was cast to float before",
#   "validation loss is NaN in the very first evaluation when fp16 is on, without fp16 it is a number",
#   "NaN loss with mixed precision", "loss nan in fp16",
#   "T5 fine-tuning in fp16 gives NaN, in fp32 it is fine",
#   "attention scores, bmm of query and key or a self-attention module overflow to inf",
#   "fp16=True in the trainer makes my loss nan, others train with it",
#   "all well at first, NaN between epoch 10 and 30 with fp16, not without",
#   "loss turns nan suddenly after thousands of iterations or 20 to 200 epochs, disabling amp fixes it",
#   "activations overflow in fp16: lower lr, warmup, gradient and weight clipping did not help",
#   "a few batches are nan and ruin the accumulated loss of the epoch",
#   "lost value becomes nan",
# ]
# words = "t5 mt5 gemma overflow activation diverges explosion fine-tuning fp16 hidden states tensorboard conformer mamba barlow performer collapse query key bmm conv"
# -->
#
# **What you see.** The loss is `nan` in fp16. In fp32 the loss is fine.
#
# **A small example.** We pass the output of a layer with large weights to a normalisation.


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
# **Why.** In fp16, an output of 65520 or more becomes infinite. Infinity minus infinity, as in a normalisation, is
# NaN.
#
# **The fix.** If inf or NaN appears only in fp16, use bf16, because bf16 has nearly the range of fp32. Or keep the
# overflowing layers in fp32: switch autocast off around them, and cast their inputs with `.float()`. If NaN appears in
# fp32 too, look for NaN in the data, and use `amp_lab.numerics.find_nonfinite` to find the op that produces the NaN.
#
# Under autocast, the next matmul casts its input to fp16 again, so this input must be small. Here, the normalisation
# makes it small. <!-- tests/notebooks/test_08a_values.py -->


# %%
class Island(nn.Module):
    """Runs a module in fp32, even inside an autocast block."""

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

# %% [markdown]
# **Not this.** Do not clamp the activations to 65504. A value of 150,000 then silently becomes 65504.

# %%
assert torch.tensor(150_000.0).half().clamp(max=65504) == 65504

# %% [markdown]
# **Notice the failure earlier.** `find_nonfinite` reports the op and the module that produced the inf:

# %%
with find_nonfinite(model) as finder:
    loss_in(torch.float16, model).backward()
print(f"made by {finder.report.op} in module {finder.report.where}: {finder.report.value}")
assert finder.report.module == "0"

# %% [markdown]
# ## A mask value does not fit into fp16
#
# `AMP0004` <!-- failure
# messages = [
#   "value cannot be converted to type c10::Half without overflow",
#   "value cannot be converted to type c10::BFloat16 without overflow",
# ]
# quoted = ["value cannot be converted to type at::Half without overflow"]
# symptoms = [
#   "masked_fill with -1e9 fails in half precision",
#   "an attention mask of -1e10 works in fp32 only",
#   "masking the padding with -1e15 before the softmax gives NaN gradients in float16",
#   "the mask constant of a policy, roformer or seq2seq is out of range with --fp16",
# ]
# words = "masked_fill fill_ full clamp pad index_fill attention mask scores -1e9 -1e10 1e20 finfo min transformers big_neg neginf"
# -->
#
# **What you see.** `masked_fill`, `full` or `pad` raises `value cannot be converted to type c10::Half without
# overflow`. In other cases there is no message, but attention is NaN.
#
# **A small example.** We fill fp16 scores with -1e9, and bf16 scores with the lowest number of
# fp32. Then we add -1e9 to the fp16 scores.

# %%
with torch.autocast("cpu", dtype=torch.float16):
    scores = x.T @ x  # (2, 2), fp16
mask = torch.tensor([[True, True], [False, True]])  # True: hidden, so row 0 sees nothing
print(message_of(lambda: scores.masked_fill(mask, -1e9)))
print(message_of(lambda: scores.bfloat16().masked_fill(mask, torch.finfo(torch.float32).min)))
added = (scores + mask.half() * -1e9).softmax(-1)
print(added)
assert added[0].isnan().all()

# %% [markdown]
# **Why.** The mask constant, such as -1e9 in fp16, does not fit into the tensor's dtype, so `masked_fill` can raise an
# error. In eager mode, addition and `torch.where` in fp16 give -inf instead. If every score in a row is -inf, the
# softmax gives NaN.
# <!-- tests/notebooks/test_08a_values.py -->
#
# **The fix.** Use a constant that fits, such as `torch.finfo(scores.dtype).min` for a mask.

# %%
lowest = torch.finfo(scores.dtype).min
attention = scores.masked_fill(mask, lowest).softmax(-1)
print(attention)
assert attention.tolist() == [[0.5, 0.5], [1.0, 0.0]]
assert torch.where(mask, -1e9, scores).isinf().any()

# %% [markdown]
# **Not this.** Do not *add* the dtype's lowest number to the scores: in eager fp16, the sum is -inf again if the score
# is -16 or less.

# %%
added = (-20 * scores + mask.half() * lowest).softmax(-1)
assert added[0].isnan().all()
assert (torch.tensor([-16.0, -15.0]).half() + lowest).isinf().tolist() == [True, False]

# %% [markdown]
# ## Attention is NaN for a row that is masked everywhere
#
# `AMP0110` <!-- failure
# symptoms = [
#   "sdpa in bfloat16 returns nan for shorter sentences of a padded batch, eager does not",
#   "attention gives NaN with padding", "softmax of a row of -inf is NaN",
#   "MultiheadAttention returns NaN when a whole sequence is padding",
#   "a TransformerEncoder gives NaN in eval mode only",
#   "one prompt at a time is fine, in a batch the rows with padding on the left return an empty string",
#   "batch size 1 works, larger batches have nan logits for the shorter sequences",
#   "boolean mask with rows of all False",
#   "nan of padded positions spreads to the other tokens in the next layer",
# ]
# words = "key_padding_mask src_key_padding_mask left padding fully masked softmax sdpa scaled_dot_product_attention attn_mask causal empty sequence bert gemma batched prefill"
# -->
#
# **What you see.** Attention returns NaN for padded positions. Then the loss or the gradients can be NaN.
#
# **A small example.** We mask all keys for the first of two positions.


# %%
def attend(v, hidden):
    weights = torch.zeros(2, 2).masked_fill(hidden, -math.inf).softmax(-1)
    return weights @ v


hidden = torch.tensor([[True, True], [False, True]])  # (query, key)
v = torch.ones(2, 2, requires_grad=True)
print(attend(v, hidden))
assert attend(v, hidden)[0].isnan().all()

# %% [markdown]
# **Why.** All scores of the masked row are -inf. Softmax subtracts the largest score of a row, and -inf minus -inf is
# NaN.
#
# **The fix.** Unmask each fully masked row, and exclude these rows from the loss. In transformers, try
# `attn_implementation="eager"`, which masks with a finite number. <!-- tests/notebooks/test_08a_values.py -->

# %%
ones = torch.ones(1, 2, 2)
assert F.scaled_dot_product_attention(ones, ones, ones, attn_mask=~hidden)[0, 0].tolist() == [0, 0]
nowhere = hidden.all(-1, keepdim=True)
assert attend(v, hidden & ~nowhere).tolist() == [[1, 1], [1, 1]]

# %% [markdown]
# PyTorch's modules can return NaN for such a row: <!-- tests/notebooks/test_08a_values.py -->
#
# - `nn.MultiheadAttention` when it returns its weights (the default): pass `need_weights=False`;
# - `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in evaluation without gradients: call
#   `torch.backends.mha.set_fastpath_enabled(False)`.
#
# **Not this.** Do not apply `nan_to_num` to the output of attention: the output is then finite, but the gradients can
# still be NaN.

# %%
attend(v, hidden).nan_to_num().sum().backward()
assert v.grad.isnan().all()

# %% [markdown]
# ## Sampling finds inf or NaN in the probabilities
#
# `AMP0065` <!-- failure
# messages = [
#   "probability tensor contains either `inf`, `nan` or element < 0",
#   "Expected parameter logits (Tensor of shape {any}) of distribution Categorical(logits: {any}) to satisfy the constraint {any}, but found invalid values",
# ]
# quoted = [
#   "next_tokens = torch.multinomial(probs, num_samples=1)",
#   "Expected parameter probs (Tensor of shape {any}) of distribution Categorical(probs: {any}) to satisfy the constraint Simplex(), but found invalid values",
#   "satisfy the constraint Simplex()",
#   "invalid multinomial distribution (encountering probability entry = infinity or NaN)",
# ]
# symptoms = [
#   "model.generate fails in float16", "the generated text is only exclamation marks in float16",
#   "sampling fails on a V100 or T4, in bf16 it works",
#   "crashes while sampling the next token, for some prompts or long inputs only",
#   "deleting the bad prompt only moves the crash to another one",
#   "after 8-bit, AWQ or GPTQ quantization, or after SFT or QLoRA, generate crashes",
#   "do_sample=False runs, but the answer is <unk> or ? over and over",
# ]
# words = "torch.multinomial generate do_sample temperature categorical llm llama qwen gemma inference garbage output device-side assert unk awq gptq bloom"
# -->
#
# **What you see.** `generate` or `torch.multinomial` fails with ``probability tensor contains either `inf`, `nan` or
# element < 0``. Without sampling, the text can be one repeated token, [such as
# `!!!!`](https://github.com/vllm-project/vllm/issues/14126).
#
# **A small example.** The logits overflow in fp16.


# %%
def logits_in(dtype):
    with torch.autocast("cpu", dtype=dtype):
        return (100 * x) @ torch.full((2, 2), 500.0)


def sample(logits):
    return torch.distributions.Categorical(logits=logits).sample()


logits = logits_in(torch.float16)
probabilities = logits.softmax(-1)
print(message_of(lambda: torch.multinomial(probabilities, 1)))
print(message_of(lambda: sample(logits)))
assert probabilities.isnan().all()
assert probabilities.argmax() == 0  # so greedy decoding chooses token 0

# %% [markdown]
# **Why.** The logits are usually inf or NaN, for example because the model was trained in bf16 and its hidden values
# overflow in fp16. `Categorical` can also raise an error (`Simplex()`) for finite 16-bit probabilities if their
# rounded sum is too far from 1.
# <!-- tests/notebooks/test_08a_values.py -->
#
# **The fix.** Load the model in the dtype in which it was trained, such as `dtype=torch.bfloat16`. On a GPU without
# bf16, use fp32, or keep the overflowing layers in fp32. If the logits are still not finite, look for NaN in the
# weights. If the logits are finite, pass `logits.float()` or `probs.float()` to the distribution.

# %%
assert torch.multinomial(logits_in(torch.bfloat16).softmax(-1), 1).item() in (0, 1)

# %% [markdown]
# [Notebook 19](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) shows how to find the layers
# that overflow.
#
# **Not this.** Do not just turn sampling off or set `remove_invalid_values=True`: the error disappears, but the model
# still computes NaN or inf. <!-- tests/notebooks/test_08a_values.py -->

# %% [markdown]
# ## NaN because an epsilon of 1e-8 is zero in fp16
#
# `AMP0005` <!-- failure
# symptoms = [
#   "eps is too small for half precision", "division by zero in fp16 although an epsilon is added",
#   "F.normalize gives NaN in float16",
#   "contrastive (NT-Xent) or cosine similarity loss is nan in half, in float32 not",
#   "eps = 1e-15 in a graph layer gives inf or nan in half-precision models",
#   "nan only for empty, constant or all-zero rows, features or embeddings",
# ]
# words = "eps epsilon 1e-8 1e-12 underflow normalize cosine similarity adam division by zero glide simclr"
# -->
#
# **What you see.** Some values are NaN, for example in a row of zeros.
#
# **A small example.** We divide each row by its largest absolute value. One row is all zeros.


# %%
def rescale(h, eps=1e-8):
    return h / (h.abs().amax(-1, keepdim=True) + eps)


h = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
print(rescale(h.half()))
assert rescale(h).isfinite().all()
assert rescale(h.half())[1].isnan().all()
assert torch.tensor(1e-8).half() == 0

# %% [markdown]
# **Why.** The smallest positive number of fp16 is 6e-8. An epsilon of 1e-8 or 1e-12 rounds to zero, so it no longer
# prevents a division by zero.
#
# With its default epsilon of 1e-12, `F.normalize` can return NaN for a row of zeros in fp16.
#
# **The fix.** Divide in fp32: cast the tensor with `.float()` first. If you train, also use a larger epsilon, such as
# 1e-3, because a tiny epsilon makes the gradient of a row of zeros huge. <!--
# tests/remedies/test_nonfinite_remedies.py -->

# %%
assert F.normalize(h.half())[1].isnan().all()
assert rescale(h.half().float(), eps=1e-3).isfinite().all()

# %% [markdown]
# ## The logarithm of a probability is -inf
#
# `AMP0111` <!-- failure
# symptoms = [
#   "focal loss is NaN in mixed precision", "clamp(eps, 1 - eps) does nothing in fp16 or bf16",
#   "a GAN loss with log(sigmoid) becomes inf", "cross entropy written by hand gives NaN in bf16",
#   "EfficientDet, RetinaNet or CenterNet loss is nan with amp after some epochs",
#   "torch.clamp rounds up to 1 in half",
#   "I already add 1e-8 inside the log of the softmax and still get nan",
# ]
# words = "focal loss bce sigmoid log log1p clamp eps 1e-6 1e-7 gan discriminator hinge centernet efficientdet varifocal dtype"
# -->
#
# **What you see.** A loss that takes `log(p)` and `log(1 - p)` is inf or NaN, although `p` is clamped.
#
# **A small example.** We write binary cross-entropy by hand.


# %%
def cross_entropy(p, target, eps=1e-6):
    p = p.clamp(eps, 1 - eps)
    return -(target * p.log() + (1 - target) * (1 - p).log()).mean()


logits, target = torch.tensor([15.0, -15.0]), torch.tensor([1.0, 0.0])
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    p = logits.to(dtype).sigmoid()
    print(f"{dtype}: loss {cross_entropy(p, target):.1e}")
    assert cross_entropy(p, target).isnan() == (dtype is not torch.float32)

# %% [markdown]
# **Why.** In 16 bits `1 - 1e-6` rounds to 1, so the clamp does not change a `p` of 1. In fp16 `1e-8` rounds to 0, so
# adding `1e-8` to `p` does not help. The logarithm of 0 is -inf, and 0 times -inf is NaN.
#
# **The fix.** Compute the loss from logits: `F.binary_cross_entropy_with_logits`, `F.cross_entropy` or
# `F.logsigmoid`. If the formula needs probabilities, compute them in fp32 with `logits.float().sigmoid()` and an
# epsilon of 1e-7 or more.

# %%
for dtype in (torch.float16, torch.bfloat16):
    half = logits.to(dtype)
    assert F.binary_cross_entropy_with_logits(half, target.to(dtype)).isfinite()
    assert cross_entropy(half.float().sigmoid(), target).isfinite()

# %% [markdown]
# **Not this.** Do not just raise eps: in bf16 even `1 - 1e-3` is 1.

# %%
assert torch.tensor(1 - 1e-3).bfloat16() == 1

# %% [markdown]
# ## A norm written by hand overflows above 256
#
# `AMP0006` <!-- failure
# symptoms = [
#   "eval_loss is nan with fp16_full_eval and label smoothing over a large vocabulary",
#   "a mean over a million half values is wrong",
#   "the gradients of all layers before a norm of my own are zero",
#   "the output of a norm is all zeros in half precision", "a Dice or IoU loss is NaN",
#   "RMSNorm or LayerNorm of my own gives zeros in fp16",
#   "the mean or sum of many fp16 numbers is nan or inf",
#   "the norm of a perturbation or of all gradients is inf, its squares are summed in half",
#   "metrics over the whole validation split are NaN or 0 with 16-mixed, right with precision 32",
#   "gradient overflow in every step as soon as I use Dice loss",
#   "the loss is always 0 because the number of elements does not fit into half",
# ]
# words = "rmsnorm layernorm variance square distance sum dice iou soft_dice_score segmentation overflow zeros"
# -->
#
# **What you see.** The output of a layer is exactly zero, and the layers before it do not learn. A Dice loss can also
# be NaN.
#
# **A small example.** We write root-mean-square normalisation by hand.


# %%
def rms_norm(h):
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-4)


weight = torch.eye(2, requires_grad=True)
with torch.autocast("cpu", dtype=torch.float16):
    h = (150 * x) @ weight  # (1, 2): 150 and 300, in fp16
    print(rms_norm(h))
    rms_norm(h).sum().backward()
assert rms_norm(h).count_nonzero() == 0
assert weight.grad.count_nonzero() == 0

# %% [markdown]
# **Why.** In fp16 the square of 256 is infinite, and a sum of many values can be infinite too. Dividing by infinity
# gives 0 or NaN.
#
# In eager mode, autocast leaves the multiplication `h * h` in fp16. In a Dice loss, 512 x 512 ones add up to 262,144.
#
# **The fix.** Use PyTorch's function, such as `F.rms_norm`, or call `.float()` on the input of the formula, such as
# the logits of a loss.

# %%
exact = rms_norm(150 * x)
with torch.autocast("cpu", dtype=torch.float16):
    torch.testing.assert_close(rms_norm(h.float()), exact, rtol=1e-3, atol=0)  # 11 bits
    torch.testing.assert_close(F.rms_norm(h, (2,)).float(), exact, rtol=1e-3, atol=0)
pixels = torch.ones(512, 512).half().sum()
assert (2 * pixels / (pixels + pixels)).isnan()  # a Dice score

# %% [markdown]
# ## Training is fine but evaluation is NaN
#
# `AMP0007` <!-- failure
# symptoms = [
#   "every output is a normal number in train(), but NaN after model.eval()",
#   "validation outputs are NaN only in eval mode, running_mean and running_var are inf",
#   "model.eval() gives NaN, model.train() does not",
#   "validation loss is NaN and training loss is fine with AMP",
#   "a checkpoint of a good run predicts NaN",
#   "validation result becomes nan in epoch 34 while the train loss looks healthy",
#   "the running mean of a batchnorm layer is nan, seen in eval only",
#   "one overflow in training with AMP leaves inf in running_mean, and evaluation is NaN from then on",
# ]
# words = "batchnorm batch norm running_mean running_var buffers eval validation inference batchnorm1d"
# -->
#
# **What you see.** The scaler skipped one step, but training went on. Later the model returns NaN in evaluation.
#
# **A small example.** We train a model with batch normalisation. The second batch overflows.

# %%
model, optimizer = make(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
scaler = torch.amp.GradScaler("cpu")
batches = [torch.randn(8, 2) * factor for factor in (1, 1e6, 1, 1)]
for batch in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(batch), torch.ones(8, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"last training loss {loss.item():.2f}, evaluation {model.eval()(x).item():.2f}")
assert loss.isfinite()
assert model(x).isnan()
assert all(parameter.isfinite().all() for parameter in model.parameters())
assert not all(buffer.isfinite().all() for buffer in model.buffers())

# %% [markdown]
# **Why.** If a batch overflows, the running mean or variance of a batch norm can become inf or NaN. A skipped optimizer
# step does not protect these buffers. Batch norm normalises with these buffers only in evaluation mode.
#
# **The fix.** Measure the running statistics again on good batches, with `torch.optim.swa_utils.update_bn(loader,
# model, device)`. Then repair the overflow.

# %%
torch.optim.swa_utils.update_bn([batches[0], batches[2], batches[3]], model)
assert model.eval()(x).isfinite()

# %% [markdown]
# **Notice the failure earlier.** Before you save a checkpoint, check that the running statistics are finite:
# `all(b.isfinite().all() for name, b in model.named_buffers() if "running" in name)`.

# %% [markdown]
# ## Anomaly detection stops at a harmless overflow
#
# `AMP0008` <!-- failure
# messages = ["Function '{name}' returned nan values in its {n}th output."]
# quoted = ["returned nan values in its {n}th output"]
# symptoms = [
#   "set_detect_anomaly raises with AMP, without it training is fine",
#   "backward returned nan values, but the loss is finite",
#   "stopped in epoch 33 with autograd's anomaly check switched on, goes on smoothly without it",
#   "I added set_detect_anomaly(True) and half precision fails at step 6, inputs have no nan",
#   "is it safe to remove the anomaly check",
# ]
# words = "detect_anomaly set_detect_anomaly CudnnBatchNormBackward MmBackward0 LogSoftmaxBackward0 SoftmaxBackward0 DivBackward0"
# -->
#
# **What you see.** With anomaly detection, `backward` raises
# `Function 'MulBackward0' returned nan values in its 0th output.` Without anomaly detection, the run trains well.
#
# **A small example.** A gradient overflows at the current loss scale. Then a mask
# multiplies the gradient by 0.


# %%
def masked_step(scaler):
    """Forward and backward of a masked sum in fp16, under anomaly detection."""
    weights = torch.ones(2, requires_grad=True)
    keep = torch.tensor([0.0, 1.0]).half()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # the traceback of the forward call
        scaler.scale((weights.half() * keep).sum()).backward()
    return weights.grad


print(message_of(lambda: masked_step(torch.amp.GradScaler("cpu", init_scale=2.0**17))))

# %% [markdown]
# **Why.** By default, `GradScaler` raises the scale until gradients overflow. Infinity times 0 then gives NaN. Anomaly
# detection stops at this NaN, although the scaler would skip the step. <!-- tests/notebooks/test_08a_values.py -->
#
# **The fix.** Search for the NaN with a scale of 1 that does not grow: `GradScaler(init_scale=1.0,
# growth_interval=10**9)`. If the error remains, look for the cause at the op named in the message. Without a scaler,
# start with this op.

# %%
assert masked_step(torch.amp.GradScaler("cpu", init_scale=1.0)).tolist() == [0.0, 1.0]

# %% [markdown]
# **Not this.** Do not remove the scaler from an fp16 run to silence this message: without a scaler, small gradients
# [can become zero](08b_learning.ipynb#A-layer-does-not-learn-because-its-gradients-underflow). Switch anomaly
# detection off instead.

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
