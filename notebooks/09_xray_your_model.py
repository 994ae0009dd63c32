# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # X-ray your model before you rent the GPU
#
# **What you'll do.** Write a tracer that notes the dtypes of the ops of a model. Run it on real
# tensors first, and then under CUDA's rules on a machine that need not have CUDA. After that we use
# the tool that grew out of it on a ResNet-50, a vision transformer, an LSTM and a small GPT, and
# forecast whether a training step fits into a card's memory.
#
# **What you'll learn.**
# - why autocast's decisions can be seen without the device;
# - where the backends treat the same model differently;
# - why `F.cross_entropy` on fp16 logits is less precise than it looks;
# - what the memory of a training step consists of, and which part of it AMP makes smaller;
# - in an optional section, how to tell rounding from a mistake when two runs differ.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast's rules. You need no GPU,
# and no memory for the large models, because we build them without any values.

# %% tags=["nbval-ignore-output"]
import copy
import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import models

from course import figures, start

from amp_lab import first_difference, forecast_memory, op_table, xray
from amp_lab.cli import main as amp_lab_command
from amp_lab.core.backends import BACKENDS
from amp_lab.tracing import compare_memory, compare_xrays

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
_ = torch.manual_seed(0)

# %% [markdown]
# ## The idea in five lines
#
# Before you run this: in which dtype does CUDA's autocast run each of the three layers? The machine
# that made these outputs has no GPU, and the cell asks for CUDA all the same.

# %%
tiny = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
result = xray(tiny, torch.empty(2, 8), device_type="cuda")
for row in result.rows:
    print(f"{row.op:<12}{row.dtype}")
assert [row.dtype for row in result.rows] == [torch.float16, torch.float32, torch.float32]

# %% [markdown]
# The linear layer runs in fp16, the norm and the softmax in fp32. No number was computed to find
# that out. Let us first build such a tracer ourselves.
#
# ## A short tracer
#
# PyTorch's [dispatcher](https://docs.pytorch.org/devlogs/dispatcher/2026-04-16-how-does-the-dispatcher-work/) sends
# an op past autocast and past autograd to a kernel. A `TorchDispatchMode` stands right in front of the kernel, so it
# sees what the kernel gets. Autocast's casts have been done by then, and they pass by as ops of their own, named
# `_to_copy`.

# %%
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def dtypes_of(structure):
    """The dtypes of the floating-point tensors in a structure, by their short names."""
    tensors = [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]
    return tuple(SHORT[t.dtype] for t in tensors if t.is_floating_point())


class Tracer(TorchDispatchMode):
    """While active, notes in `rows` each op, the dtypes of its inputs, and that of its result."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":  # others ask a tensor for its device, and compute nothing
            name = func.overloadpacket.__name__
            self.rows.append((name, dtypes_of(args), dtypes_of(result)[:1]))
        return result


# %% [markdown]
# We run a network of different layers on this device, under autocast:

# %%
net = nn.Sequential(
    nn.Conv2d(3, 8, 3),  # (B, 3, 8, 8) -> (B, 8, 6, 6)
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 6 * 6, 16),
    nn.LayerNorm(16),
    nn.Softmax(-1),
).to(device)
images = torch.rand(2, 3, 8, 8, device=device)
with torch.no_grad(), torch.autocast(device.type), Tracer() as tracer:
    net(images)
real_rows = tracer.rows
for op, before, after in real_rows:
    print(f"{op:<20}{', '.join(before):<20}-> {', '.join(after)}")

# %% [markdown]
# Each row is one op. The convolution needs three casts, for its input, its weight and its bias. The
# linear layer (`addmm`) needs only two, because its input is in low precision already. From there on
# the values stay in bf16: these outputs were made on a CPU, and there neither the norm nor the
# softmax is on autocast's list.

# %%
low = SHORT[torch.get_autocast_dtype(device.type)]
results = {op: after for op, _, after in real_rows}
assert results["convolution"] == results["relu"] == results["addmm"] == (low,)
assert [op for op, *_ in real_rows].count("_to_copy") >= 5
if device.type == "cpu":
    assert results["native_layer_norm"] == results["_softmax"] == ("bf16",)

# %% [markdown]
# ## The same on a device that is not here
#
# Autocast decides before a kernel is chosen, by its own state, the call (op, dtypes, a dtype that it names) and the
# type of the device, and not by the values. A [*fake
# tensor*](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html) has a dtype
# and a type of device, but no data, so the device need not be there. `torch.autocast("cuda")`
# [checks](https://github.com/pytorch/pytorch/blob/main/torch/amp/autocast_mode.py) that CUDA is there, and then sets
# a state. The check is in our way, but we can set the state by hand.


# %%
@contextmanager
def rules_of(device_type, dtype=None):
    """Inside: fake tensors only, and autocast of `device_type`, in `dtype` or its default."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype or before[1])
    torch.autocast_increment_nesting()
    try:
        with FakeTensorMode():
            yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # as at the end of the outermost torch.autocast
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


# %% [markdown]
# A model's parameters are real and must stay so. `functional_call` runs its forward pass with other
# tensors in their places, which here are fake ones of the same shapes on the device in question.
# Before you run this: which rows will differ from those of the CPU above, apart from the name of
# the low dtype?


# %%
def trace_on(device_type, model, shape):
    """The tracer's rows of one forward pass on fake tensors of `device_type`."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with rules_of(device_type), torch.no_grad():
        fakes = {name: torch.empty(size, device=device_type) for name, size in shapes.items()}
        x = torch.empty(shape, device=device_type)
        with Tracer() as tracer:
            torch.func.functional_call(model, fakes, (x,))
    return tracer.rows


kinds = dict.fromkeys((*BACKENDS, device.type))  # cuda, xpu, mps and cpu; and what is here
fake_rows = {name: trace_on(name, net, images.shape) for name in kinds}
for op, before, after in fake_rows["cuda"]:
    print(f"{op:<20}{', '.join(before):<20}-> {', '.join(after)}")

# %% [markdown]
# This is CUDA's version of the same network, in its default fp16. There is one more cast, from fp16
# up to fp32 in front of the norm, and then norm and softmax run in fp32.
#
# We can check such a prediction wherever the device is present. On the CPU the rows of the real run
# and of the fake one are equal, one by one, as the next cell asserts. For CUDA that takes such a GPU
# [*(not yet seen on a GPU)*](../data/results/README.md "real-rows"). The last lines make sure that
# autocast is off again.

# %%
assert fake_rows[device.type] == real_rows
cuda = {op: (before, after) for op, before, after in fake_rows["cuda"]}
assert cuda["addmm"] == (("fp16",) * 3, ("fp16",))
assert cuda["native_layer_norm"] == (("fp32",) * 3, ("fp32",))
assert cuda["_softmax"][1] == ("fp32",)
assert not any(torch.is_autocast_enabled(name) for name in fake_rows)
assert all(parameter.device.type == device.type for parameter in net.parameters())

# %% [markdown]
# ## The tool
#
# `amp_lab.xray` is this tracer with what real models need besides: it names modules, tells casts
# apart from ops, and knows recurrent layers, attention, tied weights and models that keep tensors in
# their attributes. <!-- tests/tracing/test_xray.py --> <!-- tests/tracing/test_fake_device.py -->

# %%
small = xray(net, images, device_type="cuda")
small

# %% [markdown]
# The table has a line for each module that computes; alike ones may share one. It says how many ops ran, the share
# of the arithmetic of matrix products and convolutions, the dtype of that work and of the other ops,
# the number of casts, and the dtype of what the module returns. The sentences under "Look at" are
# advice from this trace. Here the convolution does 62.8 % of the work, and all of the work is in
# fp16.
# <!-- tests/tracing/test_xray_result.py -->
#
# With `real=True`, `xray` traces a run on the device itself, which then has to be there.
# <!-- tests/tracing/test_xray.py -->
#
# ## Four models, three backends
#
# We take a ResNet-50 and a ViT-B/16 from torchvision, and write two more models here. The first is
# an LSTM that reads a sequence and classifies it:


# %%
class Classifier(nn.Module):
    """Two layers of LSTM over a sequence (B, T, 64); ten classes from its last state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])  # (B, 10)


# %% [markdown]
# The second is a GPT. This is one of its blocks:


# %%
class Block(nn.Module):
    """A transformer block: causal attention, then a network of two layers, both residual."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):  # (B, T, width)
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, head)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


# %% [markdown]
# The whole model has two embeddings, a stack of such blocks, a last norm and a linear head:


# %%
class GPT(nn.Module):
    """A decoder-only transformer: tokens (B, T) in, logits (B, T, vocabulary) out."""

    def __init__(self, vocabulary=50304, width=768, heads=12, depth=12, context=1024):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight[: tokens.size(1)]
        return self.head(self.norm(self.blocks(x)))


# %% [markdown]
# Only shapes matter to us, so we build everything on the [`meta`
# device](https://docs.pytorch.org/docs/stable/meta.html), where tensors have no data.

# %%
with torch.device("meta"):
    zoo = {
        "ResNet-50": (models.resnet50(), torch.empty(8, 3, 224, 224)),
        "ViT-B/16": (models.vit_b_16(), torch.empty(8, 3, 224, 224)),
        "LSTM": (Classifier(), torch.empty(8, 32, 64)),
        "GPT": (GPT(), torch.empty(2, 256, dtype=torch.long)),
    }


def mean_loss(output):
    """Cross-entropy of all predictions of a model; which class is right does not matter here."""
    logits = output.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


# %% [markdown]
# Now we put each model under the rules of three backends, its loss included. Before you run this: in
# one of the twelve rows nearly all of the work stays in fp32. In which one?

# %%
found = {
    (name, backend): xray(model, inputs, device_type=backend, loss_fn=mean_loss)
    for name, (model, inputs) in zoo.items()
    for backend in ("cuda", "mps", "cpu")
}
print(f"{'':<12}{'backend':<9}{'ops':>5}{'casts':>8}{'work in low precision':>25}")
for (name, backend), result in found.items():
    counts = f"{len(result.rows):>5}{len(result.casts):>8}{result.low_share:>25.0%}"
    print(f"{name:<12}{backend:<9}{counts}")

# %% [markdown]
# The last column is the share of the arithmetic of matrix products and convolutions that runs in
# low precision, which is, as a rule of thumb, where most of AMP's speed comes from. It is 100 % in
# eleven rows. On MPS the LSTM layer stays in fp32. The ResNet stands out on MPS as well: it
# needs 165 casts there, and only 57 on CUDA.

# %%
shares = {key: result.low_share for key, result in found.items()}
assert {key for key, share in shares.items() if share < 0.99} == {("LSTM", "mps")}
assert shares["LSTM", "mps"] < 0.01
casts = {key: len(result.casts) for key, result in found.items()}
assert casts["ResNet-50", "mps"] > 2 * casts["ResNet-50", "cuda"]

# %% [markdown]
# Here is the table of the vision transformer under CUDA's rules. Its twelve encoder layers are alike,
# so they share their lines.

# %%
found["ViT-B/16", "cuda"]

# %% [markdown]
# Matrix products, the convolution and the attention are in fp16, and so is GELU, which computes in whatever dtype it is
# given. The norms are in fp32. So is the sum of the residual stream, because it begins with `cat`, which takes fp32
# from the class token, an fp32 parameter.
#
# Where do the backends differ? For the picture we collect each kind of op that computes with
# floating-point tensors, together with the dtype that it computes in.


# %%
def dtypes_by_op(result):
    """What each kind of op in an X-ray computes in; "both" if in low precision and in fp32."""
    seen = {}
    for row in result.rows:
        if row.in_dtypes and row.dtype in SHORT:
            seen.setdefault(row.op, set()).add(SHORT[row.dtype])
    return {op: dtypes.pop() if len(dtypes) == 1 else "both" for op, dtypes in seen.items()}


grid = {}
for (name, backend), result in found.items():
    grid.setdefault(name, {})[backend] = dtypes_by_op(result)
_ = figures.dtypes_by_model(grid)

# %% [markdown]
# The picture has a panel for each model, a column for each backend and a row for each kind of op, and
# a dark field is fp32. Most rows are alike, apart from the name of the low dtype. Where a row is not,
# one of three ops is the reason:
#
# - **`batch_norm`** is fp32 on MPS, and the ops after it take what they are given, up to the next
#   convolution. That explains the many casts of the ResNet, which go up before each norm and down
#   after it.
# - **`lstm`** is fp32 on MPS.
# - **`_log_softmax`** in the loss is in fp16 on CUDA and MPS, and in fp32 on the CPU. We find out why
#   in a moment.
#
# You might have expected `layer_norm` to differ as well, because on a CPU it is on no list, as our
# first network showed. Here it is fp32 all the same, because the residual stream that it gets is
# fp32.

# %%
resnet, gpt = grid["ResNet-50"], grid["GPT"]
assert resnet["mps"]["batch_norm"] == resnet["mps"]["relu_"] == "fp32"
assert resnet["cuda"]["batch_norm"] == resnet["cuda"]["relu_"] == "fp16"
assert (grid["LSTM"]["cuda"]["lstm"], grid["LSTM"]["mps"]["lstm"]) == ("fp16", "fp32")
logs = {b: {model[b]["_log_softmax"] for model in grid.values() if b in model} for b in gpt}
assert logs == {"cuda": {"fp16"}, "mps": {"fp16"}, "cpu": {"fp32"}}
norms = [row for row in found["GPT", "cpu"].rows if row.op == "layer_norm"]
assert not any(row.widened for row in norms)  # autocast did nothing: fp32 came in
assert gpt["cpu"]["layer_norm"] == "fp32"
vit = grid["ViT-B/16"]["cuda"]
assert (vit["gelu"], vit["cat"], vit["layer_norm"]) == ("fp16", "fp32", "fp32")

# %% [markdown]
# `compare_xrays` puts two X-rays of one model side by side and lists the calls that differ. For the ResNet
# on MPS these are the 53 norms and what follows them, 120 of 230 ops:

# %%
side_by_side = compare_xrays(found["ResNet-50", "cuda"], found["ResNet-50", "mps"])
assert {a.called for a, _ in side_by_side.different} == {
    "batch_norm", "relu", "max_pool2d", "add_", "adaptive_avg_pool2d"
}  # fmt: skip
side_by_side

# %% [markdown]
# ## The rules behind it
#
# Each backend has a table of ops and policies, and `op_table` reads it out of the PyTorch that is
# installed. The dispatcher tells which ops are in the table. A call of each op, caught behind
# autocast, tells the policy. Where the op can run here, the dtype of its result confirms it. Here are
# the rows that explain the picture. A `-` says that the op is not in that table, and
# `fp32_set_opt_dtype` means "fp32, unless the call names a dtype". <!-- tests/tracing/test_op_table.py -->

# %%
tables = {backend: op_table(backend) for backend in BACKENDS}
assert all(rule.agrees is not False for table in tables.values() for rule in table)
policy_of = {
    name: {rule.op.partition(".")[0]: rule.policy for rule in table}
    for name, table in tables.items()
}
print(f"{'':<20}" + "".join(f"{name:<20}" for name in tables))
for op in ("batch_norm", "lstm_cell", "_lstm_mps", "log_softmax", "cross_entropy_loss"):
    print(f"{op:<20}" + "".join(f"{policy_of[name].get(op, '-'):<20}" for name in tables))
assert [name for name, rules in policy_of.items() if "batch_norm" in rules] == ["mps"]
assert "lstm_cell" in policy_of["mps"]  # one step of an LSTM is in the table
assert "_lstm_mps" not in policy_of["mps"]  # the op for a whole sequence is not
assert policy_of["cuda"]["log_softmax"] == "fp32_set_opt_dtype"
assert policy_of["mps"]["log_softmax"] == "fp32"
assert policy_of["cuda"]["nll_loss"] == "fp32"

# %% [markdown]
# `batch_norm` is in the table of MPS alone. `lstm_cell`, one step of an LSTM, is in that table too,
# but `_lstm_mps`, the op that runs a whole sequence on MPS, is not: that is why the LSTM stayed in
# fp32 there. The CPU [lists](https://docs.pytorch.org/docs/stable/amp.html) oneDNN's op for a
# sequence instead, so its `-` under `lstm_cell` does not contradict the 100 % above.
#
# ## The surprise in cross-entropy
#
# `log_softmax` and `nll_loss` are both in CUDA's table as ops that run in fp32, and `cross_entropy`
# with class numbers is, by default, [one after the
# other](https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html). So it is
# odd that the X-rays above show `_log_softmax` in fp16. Let us call both forms on fp16 logits,
# under the rules of each backend.


# %%
def at_once(logits, target):
    """The usual call."""
    return F.cross_entropy(logits, target)


def in_two_steps(logits, target):
    """What `cross_entropy` is by definition."""
    return F.nll_loss(F.log_softmax(logits, -1), target)


def log_softmax_dtype(backend, loss_fn):
    """The dtypes of the result of `_log_softmax`, and of the loss, for fp16 logits."""
    with rules_of(backend, torch.float16):
        logits = torch.empty(4, 10, dtype=torch.float16, device=backend)
        target = torch.empty(4, dtype=torch.long, device=backend)
        with Tracer() as tracer:
            loss = loss_fn(logits, target)
    return *next(after for op, _, after in tracer.rows if op == "_log_softmax"), SHORT[loss.dtype]


# %% [markdown]
# The next cell prints, for each backend, the dtype that `_log_softmax` returns, and behind the arrow
# that of the loss. Before you run it: do you expect the two forms to differ?

# %%
print(f"{'':<8}{'at once':<18}in two steps")
for backend in tables:
    once, twice = (log_softmax_dtype(backend, form) for form in (at_once, in_two_steps))
    print(f"{backend:<8}{' -> '.join(once):<18}{' -> '.join(twice)}")
    assert once == (("fp32" if backend == "cpu" else "fp16"), "fp32")
    assert twice == (("fp16" if backend == "cpu" else "fp32"), "fp32")

# %% [markdown]
# The loss is fp32 in every field, and still one of the two forms has been rounded to fp16 on the way.
# On the GPUs `F.cross_entropy` passes the dtype of the logits on to `log_softmax`. On CUDA and XPU a
# dtype that is named wins over the policy; on MPS the logits are cast up, and the named dtype takes
# them down again. The CPU behaves the other way round, since it has the whole loss in its table, but
# not `log_softmax`. The dtype of the loss tells you nothing about this, because `nll_loss` casts up
# what has been rounded by then.
#
# The remedy is one word, and it works on these four backends: put **`.float()` on the logits.**


# %%
def on_floats(logits, target):
    """Cross-entropy, computed in fp32."""
    return F.cross_entropy(logits.float(), target)


for backend in tables:
    assert log_softmax_dtype(backend, on_floats) == ("fp32", "fp32")

# %% [markdown]
# How much is at stake? The loss of an untrained language model is about the logarithm of its
# vocabulary, here 10.8. Between 8 and 16, neighbouring fp16 numbers are $2^{-7}$ apart and bf16
# numbers $2^{-4}$, and rounding errs by up to half of that in the loss of each token: by 0.004 in
# fp16, and by 0.03 in bf16. We check with real tensors on the CPU, without autocast so that the
# logits alone set the dtype, that the largest error of 64 tokens is of this size, and that the
# error of their mean is less than half as large:

# %%
vocabulary = 50304
assert 8 < math.log(vocabulary) < 16
target = torch.randint(vocabulary, (64,))
for dtype, spacing in ((torch.float16, 2**-7), (torch.bfloat16, 2**-4)):
    logits = torch.randn(64, vocabulary).to(dtype)
    rounded = F.cross_entropy(logits, target, reduction="none").float()
    error = (rounded - F.cross_entropy(logits.float(), target, reduction="none")).abs().max()
    assert spacing / 8 < error < spacing
    exact_loss = F.cross_entropy(logits.float(), target)
    assert abs(exact_loss - math.log(vocabulary)) < 1  # the spread of random logits adds about 0.5
    in_the_mean = (rounded.mean() - exact_loss).abs()
    assert in_the_mean < error / 2

# %% [markdown]
# The assertions hold. A mean over many tokens hides part of the error, since errors up and down
# cancel. You see it if you compare losses token by token, or turn them into a ratio of
# probabilities.
#
# ## Will it fit?
#
# The same fake tensors tell how much memory a training step takes. Each storage counts from the
# moment it is made until it is freed: weights, gradients, the optimizer's state, what autograd keeps
# for the backward pass, and autocast's copies of the
# weights. <!-- tests/tracing/test_memory.py -->
#
# Take ResNet-50 with a batch of 32 on a card of 24 GiB. Before you run this: which of these parts
# does AMP make smaller?

# %%
resnet50 = zoo["ResNet-50"][0]
memory = compare_memory(resnet50, (32, 3, 224, 224), memory_bytes="24GiB", optimizer="sgd-momentum")
memory

# %% [markdown]
# AMP makes the activations smaller. Weights, gradients and optimizer state take 97.5 MiB each in every column, and
# AMP's cast copies of the weights add 48.6 MiB. The activations fall from 2,622 to 1,336 MiB, and for this network
# they are most of the memory. That is why the last row says 569 instead of 294 images, almost twice the batch.

# %%
fp32, fp16 = memory["fp32"], memory["fp16"]
for part in ("weights", "gradients", "optimizer"):
    assert getattr(fp16, part) == getattr(fp32, part)
assert fp32.cast_cache == 0 < fp16.cast_cache
assert 0.5 < fp16.activations / fp32.activations < 0.55
assert fp32.activations > 0.8 * fp32.peak
assert 1.9 < memory.largest["fp16"] / memory.largest["fp32"] < 2
assert memory.largest["bf16"] == memory.largest["fp16"]
_ = memory.plot()

# %% [markdown]
# The picture shows the peak memory against the batch, with a line for each precision and a horizontal
# one for the card. All lines are straight and start near the same height, that of weights, gradients
# and optimizer state, and those for fp16 and bf16 lie on each other. Where a line crosses the card's
# is its largest batch. `largest_batch` finds that crossing for you. <!-- tests/tracing/test_largest_batch.py -->
#
# In practice you leave some room. The driver, the workspaces of cuDNN and cuBLAS, and the gaps between
# blocks of memory are not in the forecast, which counts tensors and nothing else. We expect it to come
# within 10 % of what a GPU's allocator counts
# [*(not yet seen on a GPU)*](../data/results/README.md "memory-forecast").
#
# ## Seven billion parameters, no memory
#
# On `meta` we can make the same GPT as large as we like. This is the shape of a 7B language model,
# and its weights take no memory.

# %%
with torch.device("meta"):
    big = GPT(vocabulary=32000, width=4096, heads=32, depth=32, context=2048)
count = sum(parameter.numel() for parameter in big.parameters())
print(f"{count / 1e9:.2f} billion parameters, {4 * count / 2**30:.1f} GiB in fp32")
assert count > 6.5e9

# %% [markdown]
# We train it with AdamW on one sequence of 2048 tokens, on a card of 139 GiB. The
# loss is computed on `.float()`, as above. Before you run this: by how much does bf16 lower the peak?


# %%
def loss_on_floats(output):
    """`mean_loss`, computed in fp32."""
    return mean_loss(output.float())


big_memory = compare_memory(
    big,
    (1, 2048),
    memory_bytes="139GiB",
    precisions=("fp32", "bf16"),
    optimizer="adamw",
    loss_fn=loss_on_floats,
    input_dtype=torch.long,
)
big_memory

# %% [markdown]
# It does not lower the peak at all: both columns say 125 GiB. For each parameter there are 4 bytes of
# weight, 4 of gradient and 8 of AdamW's state, which makes 16 bytes without any activation. The
# optimizer's step works on [all parameters at
# once](https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html) on a GPU and takes 4 more
# for a moment. That step is the peak, and it is fp32 in both columns. The cast copies of the weights
# add almost 2 bytes a parameter, but they are gone by then.

# %%
plain, mixed = big_memory["fp32"], big_memory["bf16"]
assert plain.weights == plain.gradients == 4 * count
assert plain.optimizer == 8 * count
assert plain.peak_phase == mixed.peak_phase == "optimizer"
assert plain.peak == mixed.peak
assert 19.5 * count < plain.peak < 20.5 * count
assert 1.9 * count < mixed.cast_cache < 2 * count
_ = big_memory.plot()

# %% [markdown]
# The picture has the same axes as before, and the horizontal line is the card's 139 GiB. Both lines
# begin far up and run flat together, as long as the optimizer's step is the peak. Only further to the
# right do activations take over, and from there bf16 needs less: the card holds a batch of 5 in bf16
# and of 3 in fp32.
#
# So here, at batch 1, you use AMP for its speed. What saves memory is something else: an optimizer that keeps fewer
# bytes per parameter, as plain SGD does, or parameters that are spread over several GPUs ([notebook
# 11](11_scale_out.ipynb) counts what that saves).
#
# ## Your own model
#
# Put your model and an input of its shape here, and run the rest of this section again. The model is
# built on `meta` if it can be; if its constructor wants real values, leave that line out.

# %%
with torch.device("meta"):
    my_model = models.mobilenet_v3_small()
my_shape = (8, 3, 224, 224)
mine = xray(my_model, torch.empty(my_shape), device_type="cuda")
print(f"{mine.low_share:.0%} of the work in low precision, {len(mine.casts)} casts")
print(*mine.advice, sep="\n")
assert mine.raised is None  # autocast made no op fail

# %% [markdown]
# From a terminal the same works for a model that can be imported: `pdm run amp-lab xray
# PACKAGE.MODULE:CALLABLE --input 8,3,224,224 --device cuda`. Add `--against mps`, `--against bf16` or
# `--against cpu:bf16` to see two side by side. `amp-lab ops --device cuda` prints the table of ops, and
# `amp-lab memory` makes the forecast, which we run here: <!-- tests/cli/test_tracing_commands.py -->

# %%
command = "memory torchvision.models:mobilenet_v3_small --input 1,3,224,224 --memory 8GiB"
assert amp_lab_command(command.split()) == 0

# %% [markdown]
# ## Where two runs part (optional)
#
# So far we asked what a precision would do. The other question comes when it has been done: two runs
# of one model give different numbers. Is that rounding, or is something wrong? Comparing the outputs
# does not tell, because an op passes on the errors that it gets and may add its own.
#
# `first_difference` repeats an op in fp64, once on exact inputs and once on the inputs that it
# really got. That separates what an op adds from what it inherited, and what it adds is compared
# with the rounding of the format that it computes in. We compare the small GPT in fp32 with itself
# under autocast. The logits differ. Before you run this: which op will it
# name? <!-- tests/difference/test_first_difference.py -->

# %% tags=["nbval-ignore-output"]
small_gpt = GPT(1000, 128, 4, 4, 64)
tokens = torch.randint(1000, (4, 64))


def in_bf16(tokens):
    """The GPT under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return small_gpt(tokens)


with torch.no_grad():
    apart = (in_bf16(tokens) - small_gpt(tokens)).abs().max().item()
rounding = first_difference(small_gpt, in_bf16, tokens)
print(f"logits differ by up to {apart:.2g}; first op that rounding does not explain: {rounding}")
assert apart > 1e-3
assert rounding is None

# %% [markdown]
# The logits differ by 0.01, and it names no op, because no single op adds more error than bf16
# rounding explains. Now we plant a mistake, a different epsilon in one of the layer norms:

# %% tags=["nbval-ignore-output"]
changed = copy.deepcopy(small_gpt)
changed.blocks[2].norm1.eps = 1e-4  # and not 1e-5
with torch.no_grad():
    apart = (changed(tokens) - small_gpt(tokens)).abs().max().item()
print(f"logits differ by up to {apart:.2g}")
assert apart < 1e-3  # what autocast did was larger
planted = first_difference(small_gpt, changed, tokens)
planted

# %%
assert planted.op == "native_layer_norm"
assert planted.module == "blocks.2.norm1"

# %% [markdown]
# These logits differ by 1.1e-05, where autocast's differed by 0.01, and yet the mistake is found,
# with the module and the value. The two numbers in the report say why: repeated in fp64, the two
# norms differ by 2.23e-05 of the result, and rounding would explain at most 1e-10. A threshold on
# the output, between the two, would have called the first pair wrong and the second one right. The
# same works from a terminal as `amp-lab diff`, for two batch sizes too. (Of a compiled model it
# compares modules, once the outputs differ.) <!-- tests/cli/test_diff_command.py -->
#
# ## Hold the forecast against the truth (optional)
#
# The activations of a forecast can be checked without a GPU.
# [`saved_tensors_hooks`](https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html)
# sees the tensors that autograd saves in a *real* forward pass, here on the CPU. Each storage
# counts once, and the model's own weights do not count.


# %%
def kept_by_autograd(model, inputs, precision):
    """The bytes that a real forward pass on the CPU keeps for its backward pass."""
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor  # kept: no other gets its address
        return tensor

    low = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with low, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mean_loss(model(inputs))
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in owned)


# %% [markdown]
# We take four small models, each in fp32 and in bf16. The forecast for each is the sum of two parts,
# the activations and those casts of weights that autograd keeps.

# %% tags=["nbval-ignore-output"]
kept = {}
small_images = torch.rand(4, 3, 64, 64)
small_zoo = {
    "ResNet-18": (models.resnet18(), small_images),
    "MobileNetV2": (models.mobilenet_v2(), small_images),
    "ViT": (models.VisionTransformer(64, 16, 4, 4, 128, 256), small_images),
    "GPT": (small_gpt, torch.zeros(4, 64, dtype=torch.long)),
}
for name, (model, inputs) in small_zoo.items():
    for precision in ("fp32", "bf16"):
        real = kept[name, precision] = kept_by_autograd(model, inputs, precision)
        forecast = forecast_memory(
            model, inputs, device_type="cpu", precision=precision, loss_fn=mean_loss
        )
        ratio = (forecast.activations + forecast.cast_kept) / real
        print(f"{name:<12}{precision:<6}{real / 2**20:8.2f} MiB kept, forecast {ratio:8.2%}")
        assert abs(ratio - 1) < 0.02  # kernels may differ in small buffers of their own

# %% [markdown]
# The forecast is 100.00 % of the count in all eight lines, where the cell would allow 2 % more or
# less. But here bf16 keeps *more* than fp32 for the ResNet-18 and for the ViT, 26.03 MiB against
# 6.97 for the first. In fp32 the backward pass uses the model's own weights, which are there anyway
# and are not counted. In bf16 autograd keeps a bf16 copy of each weight that it needs, and in these
# two models the copies outweigh what the small activations save.

# %%
for name in small_zoo:
    assert (kept[name, "bf16"] > kept[name, "fp32"]) == (name in ("ResNet-18", "ViT"))
low_weights = 2 * sum(p.numel() for p in small_zoo["ResNet-18"][0].parameters())  # bytes
assert 0.8 < low_weights / kept["ResNet-18", "bf16"] < 0.9

# %% [markdown]
# The forecast also names its own limit: a library's kernel for a recurrent layer may keep more than torch's.

# %%
caveats = forecast_memory(Classifier(), torch.rand(8, 32, 64), precision="fp32").caveats
print(*caveats)
assert any("LSTM" in caveat for caveat in caveats)
assert not forecast.caveats

# %% [markdown]
# ## Summary
#
# - Autocast decides by the call and the type of device, before a kernel is chosen. Fake tensors and a state that we set
#   by hand therefore show its decisions for a device that is not there. On the CPU, the predicted rows were those of
#   the real run.
# - A short `TorchDispatchMode` sees the dtypes and the casts, and `xray` adds modules and advice.
# - Backends have different tables. The same ResNet needs 57 casts on CUDA and 165 on MPS, where
#   `batch_norm` is fp32, and an LSTM stays in fp32 on MPS.
# - Under autocast, `F.cross_entropy` on fp16 logits rounds its `log_softmax` to fp16 on CUDA, XPU and
#   MPS, and still returns fp32. Give it `logits.float()`.
# - AMP nearly halved the ResNet-50's activations and made weights, gradients and optimizer state no smaller, and its copies
#   of the weights came on top. It fits with almost twice the batch. With AdamW and one sequence of
#   2,048 tokens, a 7B transformer keeps its peak of 125 GiB.
# - When two runs differ, `first_difference` names the first op that rounding does not explain, or
#   none if there is no such op.
#
# Next: [notebook 10](10_speed_ladder.ipynb) measures what each step of the way to low precision gains.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("09_xray_your_model")

# %% [markdown]
# ### 1. Count the casts
#
# How many casts does autocast insert on CUDA, in one forward pass of fp32 inputs through
# `nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))`? Work it out on
# paper; the check X-rays the network.

# %%
number_of_casts = ...
exercises.check_number_of_casts(number_of_casts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each layer, write down which of its inputs do not have the dtype that it computes in. Biases
# count, and on CUDA a norm is an op for fp32.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# number_of_casts = 6
# ```
#
# The first linear layer needs its input, weight and bias cast, the second only weight and bias,
# because ReLU hands fp16 on. The norm needs its input cast up, and its own weight and bias are fp32
# already: 3 + 2 + 1.
#
# </details>
#
# ### 2. Find the casts that go up
#
# Complete `casts_up`, which gets the rows of a `Tracer` and returns how many of them are casts from
# fp16 or bf16 to fp32. A row is `(name, dtypes of the inputs, dtype of the result)`.


# %%
def casts_up(rows):
    return ...


exercises.check_casts_up(casts_up)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The printed rows of the first section show how a cast is named. All dtypes are in tuples, with one
# element each for a cast.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def casts_up(rows):
#     return sum(
#         name == "_to_copy" and before in (("fp16",), ("bf16",)) and after == ("fp32",)
#         for name, before, after in rows
#     )
# ```
#
# The name has to be compared too, since an op such as a sum may also take fp16 and return fp32.
#
# </details>
#
# ### 3. Repair a loss
#
# Somebody noticed that the loss is imprecise and wrote `F.cross_entropy(logits, target).float()`. It
# did not help. Write the loss so that its `log_softmax` runs in fp32 under CUDA's autocast.


# %%
def precise_loss(logits, target):
    return ...  # was F.cross_entropy(logits, target).float()


exercises.check_precise_loss(precise_loss)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What has been rounded stays rounded. Which tensor has to be fp32 when `cross_entropy` begins?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def precise_loss(logits, target):
#     return F.cross_entropy(logits.float(), target)
# ```
#
# `F.nll_loss(F.log_softmax(logits, -1), target)` is right on CUDA too, but not on the CPU.
#
# </details>
#
# ### 4. What does a model cost before its first activation?
#
# A model has 3 billion parameters and is trained under bf16 autocast, with SGD and momentum. How many
# GB (10^9 bytes) do weights, gradients and optimizer state take together?

# %%
gigabytes = ...
exercises.check_gigabytes(gigabytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In the tables of memory above, which rows are the same in every column? How many numbers does
# momentum keep for each parameter, and how many does AdamW?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gigabytes = 36
# ```
#
# Each parameter takes 4 bytes of weight, 4 of gradient and 4 of momentum, all of them in fp32 under
# autocast. That makes 12 bytes, times 3 billion.
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html): the
#   op reference for CUDA, XPU and CPU.
# - PyTorch, [Fake tensors](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html): what
#   they are made for.
# - PyTorch, [Hooks for saved
#   tensors](https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html):
#   to look at, or to move, what autograd keeps.
# - Rajbhandari et al., [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054), 2019: the bytes per parameter of mixed-precision
#   training with Adam, and how to spread them.
