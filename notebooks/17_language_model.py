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
# **What you'll do.** Write a GPT as today's are built, with RMSNorm, rotary embeddings and
# fused attention. Find where fp32 comes into it, train it on Python's own source code in fp32, fp16
# and bf16, fine-tune it with LoRA, and let it write.
#
# **What you'll learn.**
# - which parts of a transformer leave 16 bits, and the messages when dtypes do not agree;
# - what the loss over a large vocabulary costs, and how to pay less;
# - in which dtypes a LoRA adapter and its base are kept, and what merging loses;
# - why the same prompt gives another text in bf16, or in another batch.
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

from amp_lab import plots, xray
from amp_lab.notebook import start
from exercises.language_model import check_agreement, check_chunked, check_logits, check_merge

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# ## The idea in five lines
#
# A layer under autocast returns bf16. Rotary embeddings multiply that by a table of sines and
# cosines, and such a table is usually in fp32. Before you run this: what dtype comes out?

# %%
angles = torch.arange(8)[:, None] * torch.tensor([1.0, 0.1])
with torch.autocast("cpu", dtype=torch.bfloat16):
    query = nn.Linear(4, 4)(torch.randn(8, 4))
    rotated = query[:, :2] * angles.cos() - query[:, 2:] * angles.sin()
print("from the layer", query.dtype, " after the rotation", rotated.dtype)
assert (query.dtype, rotated.dtype) == (torch.bfloat16, torch.float32)

# %% [markdown]
# fp32 wins where two dtypes meet, and goes on from there: twice the memory, until the next product
# casts it down. It is not wrong, and often it is wanted, but you should know where it happens. In
# a transformer the usual places are rotations, norms, the residual stream and the loss.
#
# ## A GPT in a hundred lines


# %%
class Rotation(nn.Module):
    """Rotary embeddings: turns pairs of (B, heads, T, size) by angles that grow with the place."""

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
        return turned.to(x.dtype)  # computed in fp32, and handed on as it came


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
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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
# The products run in bf16, and the norms in fp32, by autocast's own list. The residual stream is
# fp32, because the embedding is: `x + …` adds bf16 to fp32. That is good for it (every block adds
# to it, and bf16 would round each sum), and it costs memory. Hooks say the same of a real step on
# this device:


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
# The logits leave in bf16, and the loss takes them up to fp32 again, as autocast's list has it.
# What of a model that is *cast* to bf16, as most are loaded today? There the stream is bf16 too,
# and the table of the rotation has to stay in fp32: in bf16 the angles of two neighbouring places
# become the same.

# %%
places = torch.arange(2048.0)
same = (places.bfloat16()[1:] == places.bfloat16()[:-1]).float().mean().item()
print(f"as bf16 numbers, {same:.0%} of 2048 places are equal to the one before")
assert same > 0.6

# %% [markdown]
# So libraries compute the angles in fp32 and cast the cosines alone. `model.to(torch.bfloat16)`
# casts buffers as well, so that a table that was made before is rounded to two or three digits,
# and one that is made in `forward` from bf16 places is wrong.
#
# ### One dtype for q, k and v
#
# If you forget to hand the rotated tensors on in their dtype, q and k are fp32 and v is not. Under
# autocast attention casts all three. Outside, it refuses:

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
# Which kernel runs depends on the dtype too. On CUDA the flash kernel takes fp16 and bf16 alone,
# and fp32 goes to the memory-efficient one; cuDNN's takes 16 bits alone as well. A model in fp32
# therefore loses flash attention without a word. `torch.nn.attention.sdpa_kernel` asks for one kernel
# and raises with the reason if it does not fit. A causal flag keeps flash; a mask of your own does not.
#
# ## Train it in each precision
#
# Three seeds each, with the loss on the test text. fp16 gets its scaler, with a first scale that is
# small enough to skip no step.

# %%
SIZES = {"quick": (60, 8), "full": (2000, 32)}
steps, batch = SIZES[scale]


def train(model, precision, data, seed, steps, lr=3e-3):
    """Train a model in place, and return the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    scaler = torch.amp.GradScaler(device.type, 2.0**10, enabled=precision == torch.float16)
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
_ = plots.loss_by_format(losses)

# %% [markdown]
# The picture shows the loss of training, the mean of three seeds. The three curves lie on each
# other: what the precision changes is less than what the seed does. That is what you should see
# with a model of your own, and if you do not, [notebook 08](08_when_amp_breaks.ipynb) is the place.

# %%
between_seeds = max(tests["fp32"]) - min(tests["fp32"])
for name in ("fp16", "bf16"):
    off = abs(statistics.mean(tests[name]) - statistics.mean(tests["fp32"]))
    assert off < max(between_seeds, 0.02)

# %% [markdown]
# ## The loss over a large vocabulary
#
# Our vocabulary has under a hundred characters. A usual one has 50,000 to 250,000 tokens, and then
# the logits are the largest tensor of the step. They exist in bf16, once more in fp32 for the
# softmax, and their gradient again. For a batch of 8 x 2048 tokens and 128,000 words:

# %%
values = 8 * 2048 * 128_000
gib = {"logits in bf16": 2, "softmax in fp32": 4, "gradient in fp32": 4, "gradient in bf16": 2}
for name, size in gib.items():
    print(f"{name:<18}{values * size / 2**30:5.1f} GiB")
total = sum(gib.values()) * values / 2**30
print(f"{'all':<18}{total:5.1f} GiB")
assert 23 < total < 24

# %% [markdown]
# No autocast helps, since the loss needs fp32. What helps is never to have all of it at once:
# compute the loss **in chunks** of tokens, with checkpointing, so that each chunk's logits are made
# again in the backward pass and thrown away. The sum of the chunks is the same loss:


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
weight, words = torch.randn(8000, 64) / 8, torch.randint(8000, (1024,))
F.cross_entropy(F.linear(hidden, weight), words).backward()
wanted, hidden.grad = hidden.grad, None
direct = kept_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), words))
parts = kept_bytes(lambda: chunked_loss(hidden, weight, words, 16))
chunked_loss(hidden, weight, words, 16).backward()
print(f"kept for the backward pass: {direct / 2**20:.1f} MiB, in 16 chunks {parts / 2**20:.1f} MiB")
torch.testing.assert_close(hidden.grad, wanted, rtol=1e-4, atol=1e-8)
assert parts < direct / 5

# %% [markdown]
# The gradients agree to rounding. Libraries have kernels that do this without computing twice
# (*fused linear cross entropy*, as in Liger Kernel), and tensor parallelism cuts the vocabulary into
# pieces instead. Checkpointing remembers autocast's state and enters it again for the second
# forward pass, so it goes with autocast as it is ([notebook 07](07_training_recipes.ipynb)).
#
# ## Fine-tune with LoRA
#
# LoRA freezes a weight and learns a product of two narrow matrices beside it. The frozen base can be
# kept in bf16, since it never changes, and the adapters in fp32, since they are updated by small
# steps ([notebook 16](16_low_precision_state.ipynb) shows what bf16 weights do with those):


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
        beside = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up) * self.scaling
        return self.base(x) + beside.to(x.dtype)

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
# The text to learn is another module, `inspect`, and the base is the model that was trained in
# fp32. We train the adapters under bf16 autocast:

# %%
other = "".join(c for c in inspect.getsource(inspect) if c in characters)
own_data = torch.tensor([characters.index(c) for c in other])
model = models["fp32"]
adapted = with_lora(model)
before = loss_on(adapted, own_data, torch.bfloat16)
train(adapted, torch.bfloat16, own_data, seed=0, steps=2 * steps, lr=1e-2)
after = loss_on(adapted, own_data, torch.bfloat16)
sizes = dict.fromkeys((torch.bfloat16, torch.float32), 0)
for parameter in adapted.parameters():
    sizes[parameter.dtype] += parameter.numel()
print(f"loss on the new text: {before:.3f}, after fine-tuning {after:.3f}")
print(f"{sizes[torch.bfloat16]:,} frozen values in bf16, {sizes[torch.float32]:,} learned in fp32")
assert after < before - 0.03

# %% [markdown]
# ### Merge, and what it loses
#
# For use, the update is added to the weight, and the adapter is gone. If the sum is stored in bf16,
# each value of it is rounded. How much of the update survives?

# %%
layer = adapted.blocks[1].up
weight, update = layer.base.weight.detach().float(), layer.update().detach()
merged = (weight + update).bfloat16().float()
stayed = (merged == weight).float().mean().item()
kept = ((merged - weight) * update).sum() / update.square().sum()  # along the update
error = ((merged - weight - update).norm() / update.norm()).item()
print(f"{stayed:.0%} of the weights did not move; the sum is {error:.1%} of the update off")
print(f"along the update, {kept:.0%} of it arrived")
assert 0.001 < error < 0.5
assert 0.95 < kept < 1.05

# %% [markdown]
# Roundings fall to either side, so on the whole the update arrives, with noise. The smaller the
# update beside the weight, the larger the noise is in proportion. It matters where learning was
# gentle: the update shrinks, and the noise does not. With a hundredth of ours:

# %%
gentle = update / 100
merged = (weight + gentle).bfloat16().float()
stayed = (merged == weight).float().mean().item()
off = ((merged - weight - gentle).norm() / gentle.norm()).item()
print(f"a hundredth of the update: {stayed:.0%} did not move, {off:.0%} off")
assert off > 5 * error

# %% [markdown]
# Three ways to merge without loss: **keep the adapter** beside the base (that also lets one base
# serve many adapters); merge into a copy of the base in **fp32** and keep that; or merge in fp32 and
# round **once** at the end, from the base in its original precision, not from one that was
# quantised for training. And do not merge and unmerge in turns, for every round trip rounds.
#
# The tests hold this `LoRA` against that of [peft](https://huggingface.co/docs/peft): with the same
# numbers in fp32 the outputs are equal to a millionth. peft too keeps adapters in fp32 where the base is
# in 16 bits, unless you pass `autocast_adapter_dtype=False`.
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
parted = 0
for prompt in ("def ", "class ", "    return ", "import ", "# ", "if ", "for ", "self."):
    in_fp32, gaps = write(model, prompt)
    in_bf16, _ = write(model, prompt, precision=torch.bfloat16)
    pairs = zip(in_fp32[len(prompt) :], in_bf16[len(prompt) :], strict=True)
    places = [place for place, (a, b) in enumerate(pairs) if a != b]
    if places:
        parted, first = parted + 1, places[0]
        print(f"{prompt!r:<14} parts after {first:>3} characters, at a gap of {gaps[first]:.3f}")
        assert gaps[first] < 0.5
print(f"{parted} of 8 texts part")

# %% [markdown]
# A text parts where the two best logits lie closer together than the rounding of bf16, and from
# there on everything is different, since each character depends on those before. It is not that
# bf16 writes worse: at such a place both were as good. So compare models by their loss, or by the
# share of single decisions that agree, and not by whole texts.
#
# The same happens without any change of precision. A product of another shape is summed in another
# order, so the same prompt in another batch, or with a cache of keys and values, gives logits that
# differ in the last bits:

# %% tags=["nbval-ignore-output"]
rows = draw(test_data, 33, torch.Generator().manual_seed(1))[0]
for name, low in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
    cast = copy.deepcopy(model).to(low)
    with torch.no_grad():
        together, alone = cast(rows).float(), torch.cat([cast(row[None]) for row in rows]).float()
    off = (together - alone).abs().max().item()
    changed = (together.argmax(-1) != alone.argmax(-1)).float().mean().item()
    print(
        f"{name}: at most {off:.1e} apart in a batch of 33, {changed:.2%} of the decisions differ"
    )
    assert off < (1e-3 if name == "fp32" else 0.5)

# %% [markdown]
# Where it is exactly zero, this machine happened to sum alike for so small a model; nothing promises
# it, and [notebook 18](18_inference_and_export.ipynb#The-same-answer-twice) has one where it is not.
# Servers that need the same answer whatever else is in the batch have *batch-invariant* kernels for it, which are
# slower.
#
# ## Trained in bf16, on a card without it
#
# A model that was trained in bf16 may overflow in fp16: its residual stream or the values inside a
# block may pass 65504, which bf16 never noticed. [Notebook
# 19](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-card-without-it) plants such a layer and
# mends it. Here is how to look before you cast: the largest value in each part, over some text, and
# how far it is from the end of fp16.

# %%
planted = copy.deepcopy(model)
with torch.no_grad():
    planted.blocks[0].down.weight *= 1e5  # the stream becomes large, and the norm hides it
largest = {}
hooks = [
    module.register_forward_hook(
        lambda module, given, output, name=name: largest.update({name: output.abs().max().item()})
    )
    for name, module in planted.named_modules()
    if name.count(".") < 2 and name
]
with torch.no_grad():
    planted(rows)
for hook in hooks:
    hook.remove()
over = [name for name, value in largest.items() if value > torch.finfo(torch.float16).max]
print({name: f"{value:.3g}" for name, value in largest.items()})
print("beyond fp16:", over)
assert over[0] == "blocks.0"
assert "norm" not in over

# %% [markdown]
# The first name is where to begin: `blocks.0` adds something large to the stream, and all blocks
# behind it carry it on. Under fp16 *autocast* the stream of this model is fp32 and holds it, but the
# layer's own output does not.
#
# ## Summary
#
# - Under autocast the products of a transformer are in 16 bits, and norms, rotations, the residual
#   stream and the loss in fp32. In a model that is cast, the stream is in 16 bits too.
# - q, k and v need one dtype, and flash attention wants 16 bits.
# - The logits can be the largest tensor of a step. Compute their loss in chunks.
# - LoRA: the base frozen in bf16, the adapters in fp32, merged in fp32 if at all.
# - Texts part at near ties, by precision, batch or cache. Compare losses and single decisions.
#
# `amp-lab train --dataset stdlib --model gpt-nano` trains a larger one of these from the command
# line, and goes on after a crash ([train](../docs/train.md)). Sharded over several processes:
# [notebook 11](11_scale_out.ipynb).
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.
#
# ### 1. How large are the logits?
#
# How many GiB do logits in bf16 and their copy in fp32 take together, for 4 sequences of 4096 tokens
# and a vocabulary of 151,936?

# %%
gibibytes = ...
check_logits(gibibytes)

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


check_agreement(attend)

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


check_chunked(mean_of_chunks)

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


check_merge(merge)

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
# - [Liger Kernel](https://github.com/linkedin/Liger-Kernel): the loss without the logits.
# - H. He, [Defeating nondeterminism in LLM
#   inference](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/), 2025:
#   batch invariance.
