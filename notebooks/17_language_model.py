# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train and fine-tune a language model in each precision
#
# **What you'll do.** Train a small GPT in fp32, fp16 and bf16. Find out which parts of the GPT run in fp32. Then
# fine-tune it with LoRA and generate text.
#
# **What you'll learn.**
# - which parts of a transformer run in fp32 under autocast, and what to do when dtypes do not match;
# - how large the logits of a large vocabulary are, and how to reduce the memory of the loss;
# - which dtypes to use for a LoRA adapter and its base, and what merging loses;
# - why the same prompt can give a different text in bf16.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb), on autocast's rules. You need no GPU and no download.

# %% tags=["nbval-ignore-output"]
import argparse
import copy
import inspect

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course import language_model as lm
from course import start

from amp_lab import xray

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## The idea in five lines
#
# Under bf16 autocast, an fp32 linear layer returns bf16. Rotary embeddings multiply this output by a table of
# sines and cosines. Our table is in fp32. Before you run this: what is the dtype of the result?

# %%
angles = torch.arange(8)[:, None] * torch.tensor([1.0, 0.1])
with torch.autocast("cpu", dtype=torch.bfloat16):
    query = nn.Linear(4, 4)(torch.randn(8, 4))
    rotated = query[:, :2] * angles.cos() - query[:, 2:] * angles.sin()
print("from the layer", query.dtype, " after the rotation", rotated.dtype)
assert (query.dtype, rotated.dtype) == (torch.bfloat16, torch.float32)

# %% [markdown]
# The bf16 output times the fp32 table gives fp32. In this way, parts of a transformer can run in fp32 under autocast.
#
# ## A small GPT
#
# Our [GPT](../src/amp_lab/models/gpt.py) has these parts:
#
# - The *residual stream* begins as the embedding of the tokens, and each block adds to it.
# - A block consists of causal attention and an MLP, with an RMSNorm before each of the two.
# - In the attention, rotary embeddings rotate the queries (q) and keys (k), but not the values (v).
#
# We train this GPT on the source code of Python's module `argparse`, with one token per character. <!-- code -->

# %%
text = inspect.getsource(argparse)
characters = sorted(set(text))
train_data, test_data = lm.split(text, characters)
small = lm.new_model(vocabulary=len(characters))
print(f"{sum(p.numel() for p in small.parameters()):,} parameters, {len(text):,} characters")

# %% [markdown]
# ## Where fp32 comes in
#
# `xray` shows what autocast does to each module. We ask about bf16 on a CUDA GPU. You do not need such a GPU, because
# `xray` uses *fake tensors*, which have a dtype and a device but no data: <!-- tests/tracing/test_xray.py -->

# %% tags=["nbval-ignore-output"]
inputs = torch.zeros(4, lm.LENGTH, dtype=torch.int64)
result = xray(small, inputs, device_type="cuda", dtype=torch.bfloat16)
dtypes = {row.name: row.outputs[0][""][0] for row in result.modules}
assert result.low_share == 1  # of the FLOPs of matmuls
assert dtypes["token"] == dtypes["blocks.0.norm1"] == dtypes["blocks.0"] == torch.float32
assert dtypes["blocks.0.qkv"] == dtypes["blocks.0.rotate"] == dtypes[""] == torch.bfloat16
result

# %% [markdown]
# The column `work in` shows the dtype of the matmuls, and `other ops in` shows the dtype of the other ops. All matmuls
# run in bf16. Three parts run in fp32:
#
# - **The residual stream**: it begins with the fp32 embedding. Each block adds a bf16 output, and fp32 plus bf16 gives
#   fp32.
# - **The norms**: their input is the fp32 residual stream.
# - **The rotary embeddings**: bf16 queries and keys times fp32 cosines give fp32. The model casts the result back to
#   bf16 with `.to(x.dtype)`.
#
# **Call `.float()` on the logits** before the loss, as `lm.loss_of` does. [Notebook
# 09](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) shows why.
#
# ### The dtype of a pretrained model
#
# With the transformers library, choose the dtype when you load a model: `from_pretrained(…, dtype=…)`. On a GPU with
# fast bf16:
#
# - **fp32 for full fine-tuning**, with autocast. bf16 weights [can lose small
#   updates](16_low_precision_state.ipynb#Weights-in-bf16).
# - **bf16 for generation**, without autocast.
# - **bf16 for the frozen base** of [LoRA](#Fine-tune-with-LoRA).
#
# Do not cast the model afterwards: `model.to(torch.bfloat16)` [also casts
# buffers](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) that should stay in fp32.
# <!-- tests/notebooks/test_17_language_model.py -->
#
# ### One dtype for q, k and v
#
# Without the cast after the rotation, q and k would be in fp32, and v in bf16. Under autocast, this is no problem,
# because PyTorch casts all three to one dtype. Without autocast, such q, k and v raise an error:

# %%
q, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16).bfloat16()
with torch.autocast("cpu", dtype=torch.bfloat16):
    print("under autocast:", F.scaled_dot_product_attention(q, q, v).dtype)
try:
    F.scaled_dot_product_attention(q, q, v)
except RuntimeError as error:
    message = str(error)
print("outside:", message)
assert message.startswith("Expected query, key, and value to have the same dtype")

# %% [markdown]
# ## Train it in each precision
#
# We train with three seeds in each precision. Before you run this: what changes the test loss more, the precision or
# the seed? <!-- code -->

# %% tags=["nbval-ignore-output"]
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = {"quick": (60, 8), "full": (2000, 32)}
steps, batch = SIZES[scale]
tests, models = {}, {}
for name, precision in PRECISIONS.items():
    tests[name] = []
    for seed in range(3):
        torch.manual_seed(seed)
        models[name] = lm.new_model(len(characters)).to(device)
        lm.train(models[name], precision, train_data, seed=seed, steps=steps, batch=batch)
        tests[name].append(lm.loss_on(models[name], test_data))
means = {name: sum(losses) / 3 for name, losses in tests.items()}
between_seeds = max(tests["fp32"]) - min(tests["fp32"])
for name, mean in means.items():
    print(f"{name}: mean test loss {mean:.3f}")
    assert abs(mean - means["fp32"]) < between_seeds
print(f"two seeds in fp32 differ by up to {between_seeds:.2g}")

# %% [markdown]
# Here, the seed changes the loss more than the precision. If your own model is clearly worse in 16 bits than in fp32,
# look for the cause in [notebook 08](08_when_amp_breaks.ipynb).
#
# ## The loss over a large vocabulary
#
# The vocabulary of Llama 3 has [128,256
# entries](https://github.com/pytorch/torchtune/blob/main/torchtune/models/llama3/_model_builders.py). The logits have a
# value for each token and each entry. We compute their size for a batch of 8 x 2048 tokens:

# %%
values = 8 * 2048 * 128_256
print(f"logits: {values * 2 / 2**30:.1f} GiB in bf16, {values * 4 / 2**30:.1f} GiB in fp32")
assert 3.9 < values * 2 / 2**30 < 4

# %% [markdown]
# In eager mode, the backward pass needs several tensors of the size of the fp32 logits, such as the log-softmax and
# its gradient.
# <!-- tests/notebooks/test_17_language_model.py -->
#
# To save memory, compute the loss **in chunks** of tokens, and checkpoint each chunk. The backward pass then recomputes
# the logits one chunk at a time: <!-- tests/notebooks/test_17_language_model.py -->


# %%
def chunked_loss(hidden, weight, targets, chunks):
    """The mean cross entropy of hidden (N, width), with the logits of one chunk at a time."""

    def of_chunk(hidden, targets):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    sums = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / len(targets)


# %% [markdown]
# We check that this loss has the same gradients as the usual one, up to rounding:

# %%
torch.manual_seed(0)
hidden = torch.randn(1024, 64, requires_grad=True)
weight, words = (torch.randn(8000, 64) / 8).requires_grad_(), torch.randint(8000, (1024,))
direct = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), words), [hidden, weight])
in_chunks = torch.autograd.grad(chunked_loss(hidden, weight, words, 16), [hidden, weight])
torch.testing.assert_close(in_chunks, direct, rtol=1e-4, atol=1e-7)
print(f"fp32 logits: {1024 * 8000 * 4 / 2**20:.1f} MiB, one chunk: {64 * 8000 * 4 / 2**20:.1f} MiB")

# %% [markdown]
# From torch 2.13 on, PyTorch can compute a loss in chunks: call
# [`F.linear_cross_entropy`](https://docs.pytorch.org/docs/2.13/generated/torch.nn.functional.linear_cross_entropy.html)
# with the argument `options`.
# <!-- tests/notebooks/test_17_language_model.py -->
#
# ## Fine-tune with LoRA
#
# LoRA freezes a weight (the *base*) and trains two narrow matrices (the *adapter*). Their scaled product (the *update*)
# is added to the weight. Use these dtypes:
#
# - **bf16 for the frozen base**, if the GPU has fast bf16;
# - **fp32 for the adapters**, because in bf16 small steps of the optimizer [can be
#   lost](16_low_precision_state.ipynb#Weights-in-bf16). By default, peft creates fp32 adapters for a 16-bit base.
#
# The next class is a linear layer with an adapter:
# <!-- tests/notebooks/test_17_language_model.py -->


# %%
class LoRA(nn.Module):
    """A frozen linear layer, and two narrow matrices in fp32 that are trained."""

    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))  # so it begins as the base
        self.scaling = alpha / rank

    def forward(self, x):
        below = self.base(x)
        beside = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up) * self.scaling
        return below + beside.to(below.dtype)

    def update(self):
        """The update that was learned, as a weight in fp32."""
        return self.scaling * (self.up @ self.down)


# %% [markdown]
# The next function puts such layers into a model:


# %%
def with_lora(model):
    """A copy whose base is bf16 and frozen, with adapters in fp32 on its linear layers."""
    model = copy.deepcopy(model).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # the buffers stay in fp32
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, LoRA(layer).to(layer.weight.device))
    return model


# %% [markdown]
# The base is the model that we trained in fp32 above. We fine-tune it under bf16 autocast on a new text, the source
# code of the module `inspect`:

# %% tags=["nbval-ignore-output"]
own_train, own_test = lm.split(inspect.getsource(inspect), characters)
model = models["fp32"]
adapted = with_lora(model)
was, before = lm.loss_on(model, own_test), lm.loss_on(adapted, own_test, torch.bfloat16)
lm.train(adapted, torch.bfloat16, own_train, seed=0, steps=2 * steps, batch=batch, lr=1e-2)
after = lm.loss_on(adapted, own_test, torch.bfloat16)
print(f"loss on the new text: {was:.3f} in fp32, {before:.3f} in bf16, {after:.3f} fine-tuned")
assert abs(was - before) < 0.01
assert after < before - 0.03

# %% [markdown]
# Casting the base to bf16 hardly changed the loss, and fine-tuning lowered the loss.
#
# ### What merging loses
#
# Merging stores the sum of the weight and the update. In bf16, each value of the sum is rounded.
#
# As an example, we scale the update of one layer so that its norm is a thousandth of the weight's norm. Before you run
# this: if we merge in bf16, how many of the layer's values will stay the same?

# %% tags=["nbval-ignore-output"]
layer = adapted.blocks[1].up
weight, update = layer.base.weight.detach(), layer.update().detach()
update *= weight.float().norm() / update.norm() / 1000
merged = (weight.float() + update).bfloat16()
unchanged = (merged == weight).float().mean().item()
print(f"{unchanged:.0%} of the values stayed the same")
assert unchanged > 0.5

# %% [markdown]
# Neighbouring [normal bf16 numbers](01_number_formats.ipynb) are 0.4 to 0.8 % apart. If the update of a value is less
# than half of this distance, rounding restores the old value.
#
# **Keep the adapter separate, or merge into an fp32 copy of the base**.
#
# ## The same prompt, another text
#
# Now we take the model trained in fp32, without LoRA. We let it continue 32 prompts, once in fp32 and once under bf16
# autocast. It always chooses the likeliest character, the one with the largest logit. At a *near tie*, the two largest
# logits are so close that rounding to bf16 can change their order. Before you run this: how many of the 32 texts will
# differ? <!-- code -->

# %% tags=["nbval-ignore-output"]
prompts = lm.draw(test_data, 32, torch.Generator().manual_seed(1))[0][:, :16].to(device)
in_fp32, gaps = lm.continue_text(model, prompts, torch.float32)  # (32, 120)
in_bf16, _ = lm.continue_text(model, prompts, torch.bfloat16)
differ = in_fp32 != in_bf16
diverged, first = differ.any(1), differ.int().argmax(1)
largest = max(gaps[torch.arange(32), first][diverged].tolist(), default=0)
print(f"{diverged.sum()} of 32 texts differ")
print(f"where they begin to differ, the two largest fp32 logits are at most {largest:.2g} apart")
assert largest < 1

# %% [markdown]
# Is the model worse in bf16? We compare its test loss in both dtypes:

# %% tags=["nbval-ignore-output"]
in_fp32, in_bf16 = lm.loss_on(model, test_data), lm.loss_on(model, test_data, torch.bfloat16)
print(f"test loss: {in_fp32:.3f} in fp32, {in_bf16:.3f} in bf16")
assert abs(in_bf16 - in_fp32) < 0.01

# %% [markdown]
# The test loss is nearly the same, so the model is not worse in bf16. Compare models by their loss, not by their texts.
#
# Even in one precision, the same prompt can [give two
# texts](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/). With a different batch size or
# text length, a matmul may add the same numbers in a different order, with different rounding.
#
# To get the same text every time, you need two things: the same choice and the same rounding. For the same choice,
# take the likeliest token, as above, or fix the seed. For the same rounding:
#
# - If the batch size changes, use
#   [batch-invariant](https://github.com/thinking-machines-lab/batch_invariant_ops) kernels.
# - For the same batch on the same machine and PyTorch version, use
#   [`torch.use_deterministic_algorithms`](https://docs.pytorch.org/docs/stable/notes/randomness.html).
#
# ## Summary
#
# - With fp32 weights under autocast on CUDA, the matmuls of this GPT run in 16 bits. Norms, rotations and the
#   residual stream are [fp32](#Where-fp32-comes-in).
# - Cast the logits to fp32 for the loss: `.float()`. Over a large vocabulary, compute the loss in
#   chunks.
# - Load a model in the dtype that you want, and do not cast it afterwards.
# - LoRA: keep the frozen base in bf16 and the adapters in fp32. If you merge, merge into an fp32 copy of the base.
# - At near ties, texts can diverge if the precision or the batch size differs. Compare models by their loss.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("17_language_model")

# %% [markdown]
# ### 1. How large are the logits?
#
# A batch has 4 sequences of 4096 tokens, and the vocabulary has 151,936 entries. How many GiB do the bf16 logits and
# their fp32 copy take together?

# %%
gibibytes = ...
exercises.check_logits(gibibytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The logits have one number for each token and each entry of the vocabulary. How many bytes do bf16 and
# fp32 take for each number?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gibibytes = 4 * 4096 * 151_936 * (2 + 4) / 2**30
# ```
#
# </details>
#
# ### 2. Bring them to one dtype
#
# Complete `attend`. It is called outside autocast, with q and k in fp32 and v in 16 bits. Compute the attention in the
# dtype of v, and return it in this dtype.


# %%
def attend(q, k, v):
    return ...


exercises.check_agreement(attend)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Cast q and k to the dtype of v.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def attend(q, k, v):
#     return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
# ```
#
# </details>
#
# ### 3. A loss in chunks
#
# Complete `mean_of_chunks`. It splits the N tokens into two chunks, and returns the mean cross entropy of `logits`
# (N, vocabulary). Tokens with the target -100 are padding and do not count in the mean.


# %%
def mean_of_chunks(logits, targets):
    return ...


exercises.check_chunked(mean_of_chunks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Add up the losses of both chunks, and divide by the number of tokens that are not padding. By default,
# `F.cross_entropy` ignores the target -100.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def mean_of_chunks(logits, targets):
#     parts = zip(logits.chunk(2), targets.chunk(2), strict=True)
#     total = sum(F.cross_entropy(*part, reduction="sum") for part in parts)
#     return total / (targets != -100).sum()
# ```
#
# </details>
#
# ### 4. Merge without rounding twice
#
# Complete `merge`. Its inputs are a base weight in bf16, the fp32 matrices `up` (out, rank) and `down` (rank, in), and
# their scaling. It returns the merged weight in bf16, rounded only once.


# %%
def merge(weight, up, down, scaling):
    return ...


exercises.check_merge(merge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute the sum in fp32: cast the weight to fp32 first, and the sum to bf16 last.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def merge(weight, up, down, scaling):
#     return (weight.float() + scaling * (up @ down)).to(weight.dtype)
# ```
#
# </details>
#
# ## Further reading
#
# - E. Hu et al., [LoRA](https://arxiv.org/abs/2106.09685), 2021.
# - J. Su et al., [RoFormer: rotary embeddings](https://arxiv.org/abs/2104.09864), 2021.
# - [Liger Kernel](https://github.com/linkedin/Liger-Kernel): the loss without all logits at once.
