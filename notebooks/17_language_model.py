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
# **What you'll do.** Write a small GPT with parts of today's that matter for dtypes: RMSNorm,
# rotary embeddings and fused attention. Find where fp32 comes into it, train it on Python's own
# source code in fp32, fp16 and bf16, fine-tune it with LoRA, and let it write.
#
# **What you'll learn.**
# - which parts of a transformer leave 16 bits, and the messages when dtypes do not agree;
# - what the loss over a large vocabulary costs, and how to pay less;
# - in which dtypes a LoRA adapter and its base are kept, and what merging loses;
# - why the same prompt can give another text in bf16, or with a cache;
# - how to find out whether a model that was trained in bf16 survives fp16.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb), on autocast's rules. You need no GPU,
# no download and no weights: the text is the source of Python's standard library.

# %% tags=["nbval-ignore-output"]
import argparse
import copy
import inspect
import statistics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course import figures, start

from amp_lab import xray

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# A linear layer under bf16 autocast returns bf16. Rotary embeddings multiply that by a table of
# sines and cosines, and such a table is usually in fp32. Before you run this: what dtype comes out?

# %%
angles = torch.arange(8)[:, None] * torch.tensor([1.0, 0.1])
with torch.autocast("cpu", dtype=torch.bfloat16):
    query = nn.Linear(4, 4)(torch.randn(8, 4))
    rotated = query[:, :2] * angles.cos() - query[:, 2:] * angles.sin()
print("from the layer", query.dtype, " after the rotation", rotated.dtype)
assert (query.dtype, rotated.dtype) == (torch.bfloat16, torch.float32)

# %% [markdown]
# Here bf16 meets fp32, and the result is fp32. It stays fp32, at twice the memory, until the next
# product casts it down. That is not wrong, and often it is wanted, but you should know where it
# happens. In the model below the places are norms, rotations, the residual stream and the loss.
#
# ## A small GPT


# %%
class Rotation(nn.Module):
    """Rotary embeddings: rotates pairs in (B, heads, T, size) by angles that grow along T."""

    def __init__(self, size, length):
        super().__init__()
        rates = 10_000 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
        return turned.to(x.dtype)  # an fp32 table makes it fp32; it is handed on as it came


# %%
class Attention(nn.Module):
    """Causal attention over (B, T, width)."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.rotate = Rotation(width // heads, length)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, size)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


# %%
class Block(nn.Module):
    """Attention and a network of two layers, each behind a norm, added to the residual stream."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, length)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# %%
class GPT(nn.Module):
    """Tokens (B, T) to logits (B, T, vocabulary); input and output share one embedding."""

    def __init__(self, vocabulary, width=64, heads=4, depth=2, length=64):
        super().__init__()
        self.length = length
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads, length) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.token.weight, std=width**-0.5)

    def forward(self, tokens):
        x = self.norm(self.blocks(self.token(tokens)))
        return F.linear(x, self.token.weight)


# %% [markdown]
# The text is the source of the module `argparse`, a character a token. The last tenth is kept for
# the test.
# <!-- code -->

# %%
text = inspect.getsource(argparse)
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text])
train_data, test_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def draw(data, count, generator, length=64):
    """Tokens (count, length) from places at random, and those that follow each."""
    places = torch.randint(len(data) - length, (count,), generator=generator)
    rows = torch.stack([data[i : i + length + 1] for i in places]).to(device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# %% [markdown]
# ## Where fp32 comes in
#
# X-ray runs the model on tensors without memory and says what autocast would do on a device that
# need not be here. We ask about bf16 on a CUDA card:

# %% tags=["nbval-ignore-output"]
inputs, targets = draw(train_data, 4, torch.Generator().manual_seed(0))
small = GPT(len(characters))
result = xray(small, inputs.cpu(), device_type="cuda", dtype=torch.bfloat16)
assert result.low_share == 1  # of the work of products
result

# %% [markdown]
# The matmuls run in bf16. The residual stream is fp32 because the embedding is: bf16 added to fp32
# gives fp32. That helps, because every block adds a small amount and bf16 would round each sum; it
# costs memory. The norms read this stream, so they are fp32 too. (An RMSNorm that reads bf16
# returns fp32 under CUDA's autocast [from torch 2.12
# on](https://github.com/pytorch/pytorch/issues/188955), and bf16 under a CPU's.) Hooks say the same
# of a real forward pass on this device:
# <!-- tests/tracing/test_advice.py -->


# %%
def dtypes_in(model, inputs):
    """The dtype that each module returns, by its name, under bf16 autocast."""
    found = {}

    def note(name):
        return lambda module, given, output: found.update({name: output.dtype})

    hooks = [m.register_forward_hook(note(name)) for name, m in model.named_modules() if name]
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16), torch.no_grad():
        found["logits"] = model(inputs).dtype
    for hook in hooks:
        hook.remove()
    return found


found = dtypes_in(copy.deepcopy(small).to(device), inputs)
for name in ("token", "blocks.0.attention.qkv", "blocks.0.attention.rotate", "blocks.0", "logits"):
    print(f"{name:<26}{str(found[name]).removeprefix('torch.')}")
assert found["token"] == found["blocks.0"] == torch.float32
assert found["blocks.0.attention.rotate"] == found["logits"] == torch.bfloat16

# %% [markdown]
# The logits leave in bf16. On a GPU `cross_entropy` rounds its log-softmax to the dtype that it is
# given, under autocast too ([notebook 09](09_xray_your_model.ipynb#The-surprise-in-cross-entropy)).
# So `loss_of` calls `.float()` on the logits, as
# [transformers](https://github.com/huggingface/transformers/blob/main/src/transformers/loss/loss_utils.py)
# does.
#
# A cast model has a bf16 stream, and one more trap: its rotations. What may be bf16 there, and what
# may not? We round each part in turn and look at the cosines of 4,096 places:

# %%
rates = 10_000 ** (-torch.arange(0, 64, 2) / 64)
places = torch.arange(4096.0)[:, None]
exact = (places * rates).cos()
rounded = {
    "the cosines": exact.bfloat16().float(),
    "the rates": (places * rates.bfloat16().float()).cos(),
    "the places": (places.bfloat16().float() * rates).cos(),
}
off = {what: (cosines - exact).abs().max().item() for what, cosines in rounded.items()}
print("bf16 for …", {what: f"{value:.1g} off" for what, value in off.items()})
assert off["the cosines"] < 2**-8
assert min(off["the rates"], off["the places"]) > 1

# %% [markdown]
# The table of cosines may be bf16. The rates and the places may not: far along a text the angles
# are then simply wrong. `model.to(torch.bfloat16)` casts buffers too, and a Llama of transformers
# keeps the rates in one, so **load** a model in the dtype that you want (`from_pretrained(…,
# dtype=…)`, which leaves the rates in fp32) and do not cast it afterwards. For a full fine-tuning
# load it in fp32 and use autocast, since bf16 weights can stand still ([notebook
# 19](19_choose_your_precision.ipynb#What-frameworks-call-it)); for LoRA, below, bf16 is right. <!-- tests/notebooks/test_17_language_model.py -->
#
# ### One dtype for q, k and v
#
# If you forget the `.to(x.dtype)` in `Rotation`, q and k are fp32 and v is in 16 bits. Under autocast
# attention casts all three. Outside, it refuses:

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
# Which kernel runs depends on the dtype too. By [PyTorch's
# rules](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
# for NVIDIA GPUs,
#
# - *flash attention* takes fp16 and bf16, on Ampere and later, with heads of one size, at most 256,
#   no mask of your own, and with `is_causal` as many queries as keys;
# - cuDNN's kernel wants 16 bits and Ampere as well, and takes a mask. It is the first choice on an
#   H100 if cuDNN is newer than 9.15. There its gradients can be NaN with a mask, [in torch 2.11 and
#   some later](https://github.com/pytorch/pytorch/issues/196678);
# - anything else goes to another kernel, usually a slower one, without a word: a model in fp32, any
#   model on a T4.
#
# To be sure of a kernel, select it: it raises if it cannot run, and the warnings before say why:

# %%
import warnings

from torch.nn.attention import SDPBackend, sdpa_kernel

odd = torch.randn(1, 2, 8, 12)  # v with another size of the heads than q and k
with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings(record=True) as reasons:
    warnings.simplefilter("always")
    try:
        F.scaled_dot_product_attention(q, q, odd)
    except RuntimeError as error:
        print(error)
print("because:", str(reasons[-1].message).partition(".")[0])
assert len(reasons) > 1

# %% [markdown]
# ## Train it in each precision
#
# Three seeds each, with the loss on the test text, always computed in fp32, so that it is the
# training that we compare. fp16 gets its scaler, with a first scale that is small enough to skip no
# step.

# %%
SIZES = {"quick": (60, 8), "full": (2000, 32)}
steps, batch = SIZES[scale]


def train(model, precision, data, seed, steps, lr=3e-3):
    """Train a model in place, and return the losses."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    is_scaled = precision == torch.float16
    scaler = torch.amp.GradScaler(device.type, 2.0**10, 2.0, 0.5, steps + 1, is_scaled)
    draws, losses = torch.Generator().manual_seed(seed), []
    low = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
    for _ in range(steps):
        inputs, targets = draw(data, batch, draws)
        with low:
            loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() in (1, 2.0**10)  # 1 without a scaler; no step was skipped
    return losses


# %%
def loss_on(model, data, precision=torch.float32):
    """The mean loss over 64 pieces of a text, in nats for each character."""
    inputs, targets = draw(data, 64, torch.Generator().manual_seed(0))
    low = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
    with torch.no_grad(), low:
        return loss_of(model(inputs), targets).item()


# %% tags=["nbval-ignore-output"]
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
losses, tests, models = {}, {}, {}
for name, dtype in PRECISIONS.items():
    losses[name], tests[name] = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        models[name] = GPT(len(characters)).to(device)
        losses[name].append(train(models[name], dtype, train_data, seed, steps))
        tests[name].append(loss_on(models[name], test_data))
for name, values in tests.items():
    print(f"{name}: {statistics.mean(values):.3f}   by seed", *(f"{value:.3f}" for value in values))
_ = figures.loss_by_format(losses)

# %% [markdown]
# The picture shows the loss of training, the mean of three seeds, and the three curves lie on each
# other. With the same seed, how far does a precision move the test loss, and how far do the seeds lie
# apart?

# %% tags=["nbval-ignore-output"]
between_seeds = max(tests["fp32"]) - min(tests["fp32"])
moved = {}
for name in ("fp16", "bf16"):
    pairs = zip(tests[name], tests["fp32"], strict=True)
    moved[name] = max(abs(low - full) for low, full in pairs)
    print(f"{name} moves it by at most {moved[name]:.4f}; the seeds lie {between_seeds:.4f} apart")
    assert moved[name] < between_seeds

# %% [markdown]
# What the precision changes is a small part of what the seed changes. That is what you should see
# with a model of your own, and if you do not, [notebook 08](08_when_amp_breaks.ipynb) is the place.
#
# ## The loss over a large vocabulary
#
# Our vocabulary is a few characters. Language models have far larger ones (Llama 3 has [128,256
# tokens](https://github.com/pytorch/torchtune/blob/main/torchtune/models/llama3/_model_builders.py)),
# and with many tokens in a batch the logits can be the largest tensor of the step.
# At the peak of the backward pass four tensors with as many values are alive. For a batch of 8 x
# 2048 tokens:
# <!-- tests/notebooks/test_17_language_model.py -->

# %%
values = 8 * 2048 * 128_256
gib = {"logits in bf16, kept as output": 2, "their log-softmax in fp32": 4}
gib |= {"its gradient in fp32": 4, "the gradient of its input": 4}
for name, size in gib.items():
    print(f"{name:<32}{values * size / 2**30:5.1f} GiB")
total = sum(gib.values()) * values / 2**30
print(f"{'all':<32}{total:5.1f} GiB")
assert 27 < total < 28

# %% [markdown]
# Autocast does not help, since the loss needs fp32. What helps is never to have all of it at once:
# compute the loss **in chunks** of tokens, with checkpointing, so that each chunk's logits are made
# again in the backward pass and thrown away. The sum of the chunks is the same loss, up to
# rounding:


# %%
def chunked_loss(hidden, weight, targets, chunks):
    """The mean cross entropy of hidden (N, width), with the logits of a chunk at a time."""

    def of_chunk(hidden, targets):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    sums = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / len(targets)


# %%
def kept_bytes(function):
    """The bytes that autograd keeps for the backward pass of what a function returns."""
    seen = {}

    def note(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(seen.values())


# %%
torch.manual_seed(0)
hidden = torch.randn(1024, 64, requires_grad=True)
weight, words = (torch.randn(8000, 64) / 8).requires_grad_(), torch.randint(8000, (1024,))
F.cross_entropy(F.linear(hidden, weight), words).backward()
wanted = [hidden.grad, weight.grad]
hidden.grad = weight.grad = None
direct = kept_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), words))
parts = kept_bytes(lambda: chunked_loss(hidden, weight, words, 16))
chunked_loss(hidden, weight, words, 16).backward()
print(f"kept for the backward pass: {direct / 2**20:.1f} MiB, in 16 chunks {parts / 2**20:.1f} MiB")
torch.testing.assert_close([hidden.grad, weight.grad], wanted, rtol=1e-4, atol=1e-7)
assert parts < direct / 5

# %% [markdown]
# The gradients agree to rounding. (The figures are of what is kept between the passes; in the
# backward pass one chunk at a time comes on top.) Checkpointing remembers autocast's state and
# enters it again for its second forward pass, so it needs no change under autocast ([notebook
# 07](07_training_recipes.ipynb#Checkpoint-activations) has the exception). It has to be
# `use_reentrant=False` for a part whose inputs need no gradient, such as the first block over a
# frozen base: the reentrant kind gives that part [no
# gradients](https://docs.pytorch.org/docs/stable/checkpoint.html#torch.utils.checkpoint.checkpoint).
# <!-- tests/notebooks/test_17_language_model.py -->
#
# ## The same loss, built in (optional)
#
# From torch 2.13 on,
# [`F.linear_cross_entropy`](https://docs.pytorch.org/docs/2.13/generated/torch.nn.functional.linear_cross_entropy.html)
# with `options` is such a loss, and [Liger Kernel](https://github.com/linkedin/Liger-Kernel) has it
# in Triton. PyTorch's has two surprises: with `options` it takes no part in autocast, and from bf16
# inputs it returns a loss in bf16.

# %% tags=["nbval-ignore-output"]
if hasattr(F, "linear_cross_entropy"):  # torch 2.13 or later
    options = nn.LinearCrossEntropyOptions()
    with torch.no_grad():
        plain = F.linear_cross_entropy(hidden, weight, words, options=options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = F.linear_cross_entropy(hidden, weight, words, options=options)
        halves = hidden.bfloat16(), weight.bfloat16()
        low = F.linear_cross_entropy(*halves, words, options=options)
    print(f"{plain:.5f}, under autocast {again:.5f}, from bf16 inputs {low:.5f}")
    assert torch.equal(plain, again)
    assert low.dtype is torch.bfloat16

# %% [markdown]
# ## Fine-tune with LoRA
#
# LoRA freezes a weight and learns a product of two narrow matrices beside it. The frozen base can
# be kept in bf16, since it never changes, and the adapters in fp32, since they are updated by small
# steps ([notebook 16](16_low_precision_state.ipynb) shows what bf16 weights do with those). That is
# how they are *stored*: under bf16 autocast their products run in bf16 as the others do, and
# outside of it in fp32. What they add takes the dtype of what the base returns, or else fp32 could
# spread from here:


# %%
class LoRA(nn.Module):
    """A frozen linear layer, and beside it two narrow matrices in fp32 that learn."""

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
        """What has been learned, as a weight in fp32."""
        return self.scaling * (self.up @ self.down)


# %%
def with_lora(model):
    """A copy whose base is bf16 and frozen, with adapters in fp32 on its linear layers."""
    model = copy.deepcopy(model).bfloat16().requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, LoRA(layer).to(layer.weight.device))
    return model


# %% [markdown]
# The text to learn is another module, `inspect`, of which we keep the last tenth for the test. The
# base is the model that was trained in fp32. We train the adapters under bf16 autocast:

# %% tags=["nbval-ignore-output"]
other = "".join(c for c in inspect.getsource(inspect) if c in characters)
own_data = torch.tensor([characters.index(c) for c in other])
own_train, own_test = own_data[: len(own_data) * 9 // 10], own_data[len(own_data) * 9 // 10 :]
model = models["fp32"]
adapted = with_lora(model)
was, before = loss_on(model, own_test), loss_on(adapted, own_test, torch.bfloat16)
train(adapted, torch.bfloat16, own_train, seed=0, steps=2 * steps, lr=1e-2)
after = loss_on(adapted, own_test, torch.bfloat16)
print(f"the new text: {was:.3f} in fp32, {before:.3f} in bf16, {after:.3f} after fine-tuning")
assert abs(was - before) < 0.01
assert after < before - 0.03

# %%
sizes = dict.fromkeys((torch.bfloat16, torch.float32), 0)
for parameter in adapted.parameters():
    sizes[parameter.dtype] += parameter.numel()
print(f"{sizes[torch.bfloat16]:,} frozen values in bf16, {sizes[torch.float32]:,} learned in fp32")
found = dtypes_in(adapted, inputs)
assert found["blocks.0.attention.qkv"] == found["blocks.1"] == torch.bfloat16  # no fp32 came in

# %% [markdown]
# On a card that has fp16 and no fast bf16, keep the base in fp16, the adapters in fp32, and use
# fp16 autocast with the scaler, which refuses adapters in fp16 ([notebook
# 08](08_when_amp_breaks.ipynb)).
#
# ### Merge, and what it loses
#
# For use, the update is added to the weight, and the adapter is gone. If the sum is stored in bf16, each value
# of it is rounded. How much of the update arrives? Our update is almost as large as the weights. Fine-tuning
# with a small learning rate makes smaller updates, so we also try fractions of ours. Before you run this: what
# is left of a thousandth?

# %% tags=["nbval-ignore-output"]
layer = adapted.blocks[1].up
weight, update = layer.base.weight.detach().float(), layer.update().detach()
arrived, stayed = {}, {}
for part in (1, 100, 1000, 10_000):
    small_update = update / part
    merged = (weight + small_update).bfloat16().float()
    size = (small_update.norm() / weight.norm()).item()
    stayed[part] = (merged == weight).float().mean().item()
    along = ((merged - weight) * small_update).sum() / small_update.square().sum()
    arrived[part] = along.item()
    print(f"update {size:.2g} of the weight: {stayed[part]:.0%} did not move, {along:.0%} arrived")
assert arrived[1] > 0.98
assert arrived[10_000] < arrived[1000] < 0.5 < stayed[1000]

# %% [markdown]
# bf16 numbers are 0.4 to 0.8 % apart. While the update is larger than that, rounding is noise, and
# on the whole the update arrives. At a tenth of that most values do not move at all, and more than
# half of the update is gone.
#
# So **keep the adapter** beside the base; or merge into a copy in **fp32**; or, if it has to be bf16,
# merge in fp32 and round **once**. A base that was quantised for training
# ([QLoRA](https://arxiv.org/abs/2305.14314)) is part of what was trained: dequantise it and merge
# into that.
#
# The tests hold this `LoRA` against that of [peft](https://huggingface.co/docs/peft): outputs, dtypes
# and merged weights are the same. peft too keeps adapters in fp32 where the base is in 16 bits, unless
# you pass `autocast_adapter_dtype=False`. Its `merge_and_unload` rounds once, and with
# `safe_merge=True` twice. <!-- tests/notebooks/test_17_language_model.py -->
#
# ## The same prompt, another text
#
# We let the model continue a prompt, always with the likeliest character, in fp32 and in bf16.
# Before you run this: will the texts agree?


# %%
@torch.no_grad()
def write(model, prompt, count=120, precision=torch.float32):
    """The prompt and what follows it, and at each place the gap between the two best logits."""
    tokens = [characters.index(c) for c in prompt]
    low = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
    gaps = []
    for _ in range(count):
        with low:
            logits = model(torch.tensor([tokens[-model.length :]], device=device))[0, -1].float()
        best = logits.topk(2)
        gaps.append((best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
    return "".join(characters[i] for i in tokens), gaps


# %% tags=["nbval-ignore-output"]
rows = draw(test_data, 33, torch.Generator().manual_seed(1))[0]
with torch.no_grad():
    logits = model(rows)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        error = (model(rows).float() - logits).abs().max().item()
parted = 0
for prompt in ("def ", "class ", "    return ", "import ", "# ", "if ", "for ", "self."):
    in_fp32, gaps = write(model, prompt)
    in_bf16, _ = write(model, prompt, precision=torch.bfloat16)
    pairs = zip(in_fp32[len(prompt) :], in_bf16[len(prompt) :], strict=True)
    places = [place for place, (a, b) in enumerate(pairs) if a != b]
    if places:
        parted, first = parted + 1, places[0]
        print(f"{prompt!r:<14} parts after {first:>3} characters, at a gap of {gaps[first]:.3f}")
        assert (
            gaps[first] < 4 * error
        )  # two logits move, and these may move farther than our sample
print(f"{parted} of 8 texts part; bf16 moves a logit by up to {error:.3f}")

# %% tags=["nbval-ignore-output"]
in_fp32, in_bf16 = loss_on(model, test_data), loss_on(model, test_data, torch.bfloat16)
print(f"loss of the test in fp32 {in_fp32:.4f}, in bf16 {in_bf16:.4f}")
assert abs(in_bf16 - in_fp32) < 0.01

# %% [markdown]
# A text parts where bf16 moves logits by more than the gap between the two best. From there on
# it goes its own way, since each character depends on those before. It is not that bf16 writes
# worse: at such a place both were about as good, and the loss is nearly the same. So compare models
# by their loss, or by the share of single decisions that agree, and not by whole texts. (And
# compute the last layer in fp32 if the likeliest token matters to you: in bf16 two logits can be
# *equal*, and then `argmax` takes [the
# first](https://docs.pytorch.org/docs/stable/generated/torch.argmax.html) of the vocabulary.)
#
# The same can happen without any change of precision. A matmul of another shape may be summed in
# another order, so the same prompt in another batch, with another length or with a cache can give
# logits that differ a little. Here are those of each place, from the whole text and from a text
# that ends there:

# %% tags=["nbval-ignore-output"]
for name, low in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
    cast = copy.deepcopy(model).to(low)
    with torch.no_grad():
        whole = cast(rows[:1]).float()
        prefixes = [cast(rows[:1, :length])[:, -1].float() for length in range(1, 65)]
    off = max((row - whole[:, i]).abs().max().item() for i, row in enumerate(prefixes))
    print(f"{name}: up to {off:.1e} apart")
    assert off < (1e-3 if name == "fp32" else 0.5)

# %% [markdown]
# Servers that need the same answer whatever else is in the batch can use *batch-invariant* kernels
# for that ([notebook 18](18_inference_and_export.ipynb#The-same-answer-twice)).
#
# What the **cache** holds is worth a look. Under autocast over fp32 weights, a Llama of
# transformers rotates with fp32 cosines, so that its cache is fp32, of twice the size (the tests
# check it on a small one). For generation take a model in bf16, without autocast. <!-- tests/notebooks/test_17_language_model.py -->
#
# ## Trained in bf16, on a card without it
#
# A model that was trained in bf16 may overflow in fp16: its residual stream, or the values inside a
# block, may pass 65504, which bf16 never noticed ([T5
# did](https://github.com/huggingface/transformers/pull/9487)). We plant that. The last norm hides
# it: no logit is large.

# %%
planted = copy.deepcopy(model)
with torch.no_grad():
    planted.blocks[0].down.weight *= 1e5
    print("the largest logit:", f"{planted(rows).abs().max():.1f}")

# %% [markdown]
# So look before you cast. `largest_values` (its idea is in [notebook
# 19](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it)) runs a model over some text
# and says the largest magnitude that each module computes:

# %%
from amp_lab.numerics import largest_values

END = torch.finfo(torch.float16).max
over = [name for name, value in largest_values(planted, rows).items() if value > END]
print(f"beyond {END:.0f}: {', '.join(over)}")
assert over[0] == "blocks.0.down"
with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
    assert not planted(rows[:1]).isfinite().all()

# %% [markdown]
# The first name is the layer that has to stay in fp32, and behind it the stream. Autocast alone
# does not help, as the last assertion shows: its stream is fp32, but the layer returns fp16. Models
# of transformers can name such layers in `_keep_in_fp32_modules`, as T5
# does. <!-- tests/notebooks/test_17_language_model.py -->
#
# [Notebook 19](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) has the other way
# out, and says why to leave a margin.
#
# ## A model of your own (optional)
#
# Name a folder that `save_pretrained` of transformers made, or that you downloaded, and the same is
# asked of that model. Weights are read from safetensors alone, never from a pickle, which could run
# anything. Without a folder nothing happens. <!-- tests/notebooks/test_17_language_model.py -->

# %%
import importlib

folder = ""  # such as "/models/Qwen3-0.6B"


def examine(folder):
    """The dtypes of the weights of a causal model, and the modules whose values pass 65504."""
    transformers = importlib.import_module("transformers")
    how = {"local_files_only": True, "use_safetensors": True, "dtype": "auto"}
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    tokens = torch.randint(own.config.vocab_size, (1, 64))
    largest = largest_values(own, tokens)
    over = [name for name, value in largest.items() if value > END]
    return {parameter.dtype for parameter in own.parameters()}, over


if folder:
    print(*examine(folder))

# %% [markdown]
# ## Summary
#
# - Under autocast over fp32 weights the matmuls of this GPT are in 16 bits, and norms, rotations
#   and the residual stream [in fp32](#Where-fp32-comes-in). Over bf16 weights the stream is bf16.
# - Give the loss its logits in fp32: `.float()`.
# - Cosines may be rounded to bf16, rates and places not: load in a dtype, do not cast afterwards.
# - Outside of autocast q, k and v need one dtype, and on CUDA flash attention wants 16 bits.
# - The logits can be the largest tensor of a step. Compute their loss in chunks.
# - LoRA: the base frozen in bf16, the adapters stored in fp32, merged in fp32 if at all.
# - Texts can part at near ties, by precision, batch or cache. Compare losses and single decisions.
# - Before a bf16 model goes to fp16, look at the largest value of each module.
#
# `amp-lab train --dataset stdlib --model gpt-nano` trains a larger one of these from the command
# line, and `--resume` goes on after a crash ([train](../docs/train.md)). Sharded over several
# processes: [notebook 11](11_scale_out.ipynb).
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("17_language_model")

# %% [markdown]
# ### 1. How large are the logits?
#
# How many GiB do logits in bf16 and their copy in fp32 take together, for 4 sequences of 4096 tokens
# and the vocabulary of Qwen 3, 151,936?

# %%
gibibytes = ...
exercises.check_logits(gibibytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two bytes and four bytes for each token and each word.
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
# Complete `attend`, which is called outside of autocast: q and k come in fp32 from a rotation, v in
# 16 bits. It has to return the attention in the dtype of v, computed in that dtype.


# %%
def attend(q, k, v):
    return ...


exercises.check_agreement(attend)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Cast q and k down, rather than v up.
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
# The targets of padding are -100, and no part of the mean. Complete `mean_of_chunks`: the mean
# cross entropy of `logits` (N, vocabulary) over the targets that are not -100, from two chunks of
# tokens.


# %%
def mean_of_chunks(logits, targets):
    return ...


exercises.check_chunked(mean_of_chunks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The mean of two means is wrong if one chunk has more padding: add up sums and divide by the count.
# `F.cross_entropy` leaves out -100 by itself.
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
# Complete `merge`: the weight of a base in bf16, matrices `up` (out, rank) and `down` (rank, in) in
# fp32 and their scaling become one weight in bf16, rounded once.


# %%
def merge(weight, up, down, scaling):
    return ...


exercises.check_merge(merge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The sum has to be taken in fp32, so cast the weight up first, and the sum down last.
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
# - [scaled_dot_product_attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html),
#   and which kernel takes what.
# - [Liger Kernel](https://github.com/linkedin/Liger-Kernel): the loss without all logits at once.
# - H. He, [Defeating nondeterminism in LLM
#   inference](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/), 2025:
#   batch invariance.
