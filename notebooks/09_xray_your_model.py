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
# **What you'll do.** Write a tracer that notes the dtype of every op of a model. Run it on real
# tensors, then under CUDA's rules on a machine that need not have CUDA. Then use the tool that grew
# out of it on a ResNet-50, a vision transformer, an LSTM and a small GPT, and forecast whether
# their training fits into a card's memory.
#
# **What you'll learn.**
# - why autocast's decisions can be seen without the device;
# - where backends treat the same model differently;
# - why `F.cross_entropy` on fp16 logits is less precise than it looks;
# - how to tell rounding from a mistake when two runs differ;
# - what the memory of a training step consists of, and which part AMP makes smaller.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast's rules. No GPU, and no
# memory for the large model: it never gets any.

# %% tags=["nbval-ignore-output"]
import copy
import math
from collections import Counter
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import models

from amp_lab import first_difference, forecast_memory, largest_batch, op_table, plots, xray
from amp_lab.backends import BACKENDS
from amp_lab.cli import main as amp_lab_command
from amp_lab.notebook import start
from amp_lab.tracing import compare, compare_memory, differences, parse_bytes

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()
_ = torch.manual_seed(0)

# %% [markdown]
# ## A tracer in fifteen lines
#
# PyTorch's dispatcher sends each op past autograd and past autocast to a kernel. A
# `TorchDispatchMode` stands right before the kernel. What it sees is what the kernel gets, with
# autocast's casts already done: they pass by as ops of their own, named `_to_copy`.

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
# A network with one layer of each kind that matters, run for real on this device under autocast:

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
# Each row is one op. The convolution and the linear layer (`addmm`) each have three casts before
# them, or two where the input is in low precision already. From there on, the values stay low: on a
# CPU, which is where these outputs were made, neither the norm nor the softmax is on autocast's
# list.

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
# Autocast decides before a kernel is chosen, and from nothing but the op, the dtypes, and the type
# of device. A *fake tensor* has all of these and no data, so it needs no device. And
# `torch.autocast("cuda")` does two things: it checks that CUDA is there, and it sets a state. The
# check is in the way; the state can be set by hand.


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
# A model's parameters are real, and must stay so. `functional_call` runs its forward pass with
# other tensors in their places: fake ones, of the same shapes, on the device in question.


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
# That is CUDA's version of the same network, in its default fp16. There is one more cast, from fp16
# up to fp32 before the norm, and then norm and softmax run in fp32.
#
# Is it true? Where the device is here, one can look: the rows of the real run and of the fake one
# are the same, one by one. On the CPU we see that here; for CUDA it takes such a GPU
# [*(not yet seen on a GPU)*](../data/results/README.md "real-rows"). And nothing was left switched on.

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
# `amp_lab.xray` is this tracer with what real models need besides: modules by name, casts told
# apart from ops, recurrent layers, attention, tied weights, models that keep tensors in their
# attributes, errors that name the op. It takes the model as it is.

# %%
small = xray(net, images, device_type="cuda")
small

# %% [markdown]
# One line per module: how many ops, the share of the arithmetic of matrix products and
# convolutions, the dtype that this work is done in, the dtype of the other ops, the casts, and the
# dtype of what the module returns. The sentences under "Look at" are advice, and only what this
# trace proves.
#
# Behind the table are the rows. They are those of our tracer, without the casts, which are in a
# list of their own, and without views.

# %%
PASSED_OVER = {"_to_copy", "view", "t"}


def comparable(rows):
    """The tracer's rows without casts and views, and with the names that `xray` gives to norms."""
    return [(op.removeprefix("native_"), *rest) for op, *rest in rows if op not in PASSED_OVER]


for name in BACKENDS:  # those whose rules it knows
    rows = fake_rows[name]
    found = xray(net, images, device_type=name)
    theirs = [
        (row.op, *(tuple(SHORT[d] for d in dtypes) for dtypes in (row.in_dtypes, row.out_dtypes)))
        for row in found.rows
    ]
    assert theirs == comparable(rows)
    assert len(found.casts) == [op for op, *_ in rows].count("_to_copy")

# %% [markdown]
# With `real=True` it traces a run on the device itself, which must be there. Prediction and
# reality agree here too:

# %%
if device.type in BACKENDS:
    predicted = xray(net, images, device_type=device.type)
    observed = xray(net, images, device_type=device.type, real=True)
    assert predicted.rows == observed.rows
    assert predicted.casts == observed.casts

# %% [markdown]
# ## Four models, three backends
#
# A ResNet-50 and a ViT-B/16 from torchvision, and two written here. First an LSTM that reads a
# sequence and classifies it:


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
# Then a GPT: one block, and a stack of them between an embedding and a linear head.


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
# Only shapes matter, so everything is built on the `meta` device: no memory, no initialisation.

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
# Each model under each backend's rules, the loss included.

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
# low precision, which is where AMP's speed comes from. It is all of it, but for one row: on MPS the
# LSTM stays in fp32. Another row stands out by its casts: the ResNet on MPS.

# %%
shares = {key: result.low_share for key, result in found.items()}
assert {key for key, share in shares.items() if share < 0.99} == {("LSTM", "mps")}
assert shares["LSTM", "mps"] < 0.01
casts = {key: len(result.casts) for key, result in found.items()}
assert casts["ResNet-50", "mps"] > 2 * casts["ResNet-50", "cuda"]

# %% [markdown]
# An LSTM layer is one op in the X-ray, although each kind of device, and even of CPU, may run other
# kernels for it. What counts is the dtype of the matrix products inside it. There is a CPU here, so
# our own tracer can look: they are all in bf16, as predicted.

# %%
classifier, sequence = Classifier(), torch.rand(8, 32, 64)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Tracer() as tracer:
    classifier(sequence)
products = [row for row in tracer.rows if row[0] in ("mm", "addmm", "mkldnn_rnn_layer")]
assert len(products) >= 3  # two layers and the head
assert {dtype for _, before, _ in products for dtype in before} == {"bf16"}
assert {SHORT[row.dtype] for row in found["LSTM", "cpu"].rows if row.flops} == {"bf16"}

# %% [markdown]
# The table of the vision transformer under CUDA's rules. Its twelve encoder layers are alike, and
# share their lines.

# %%
found["ViT-B/16", "cuda"]

# %% [markdown]
# Matrix products, convolution and attention are in fp16, and so is GELU, which takes what comes.
# Norms are in fp32, and so is the sum of the residual stream, which begins with an fp32 parameter,
# the position embedding.
#
# Where do the backends differ? Here is each kind of op that computes with floating-point tensors,
# with the dtype that it computes in.


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
_ = plots.dtypes_by_model(grid)

# %% [markdown]
# One panel per model, one column per backend, one row per kind of op; dark fields are fp32. Most
# rows are alike but for the name of the low dtype. Where a row is not, one of three ops is behind
# it:
#
# - **`batch_norm`** is fp32 on MPS, and what follows takes what it is given, up to the next
#   convolution. Hence the many casts of the ResNet there: up before each norm, down after it.
# - **`lstm`** is fp32 on MPS.
# - **`_log_softmax`** in the loss is in fp16 on CUDA and MPS, and in fp32 on the CPU. The next but
#   one section finds out why.
#
# And one row that might have been expected is missing. On a CPU `layer_norm` is on no list, as the
# first network showed; yet here it is fp32, since the residual stream that it is given is fp32.

# %%
LOW = {"fp16": "low", "bf16": "low"}
alike = [
    len({LOW.get(column.get(op), column.get(op)) for column in columns.values()}) == 1
    for columns in grid.values()
    for op in columns["cuda"]
]
assert sum(alike) > 0.6 * len(alike)  # most rows
resnet, gpt = grid["ResNet-50"], grid["GPT"]
assert resnet["mps"]["batch_norm"] == resnet["mps"]["relu_"] == "fp32"
assert resnet["cuda"]["batch_norm"] == resnet["cuda"]["relu_"] == "fp16"
assert grid["LSTM"]["cuda"]["lstm"] == "fp16"
assert grid["LSTM"]["mps"]["lstm"] == "fp32"
logs = {b: {model[b]["_log_softmax"] for model in grid.values() if b in model} for b in gpt}
assert logs == {"cuda": {"fp16"}, "mps": {"fp16"}, "cpu": {"fp32"}}
norms = [row for row in found["GPT", "cpu"].rows if row.op == "layer_norm"]
assert not any(row.widened for row in norms)  # autocast did nothing: fp32 came in
assert gpt["cpu"]["layer_norm"] == "fp32"

# %% [markdown]
# `compare` puts two X-rays of one model side by side, and lists the calls that differ. For the
# ResNet on MPS these are the norms and all that follows them:

# %%
side_by_side = compare(found["ResNet-50", "cuda"], found["ResNet-50", "mps"])
assert {a.called for a, _ in side_by_side.different} == {
    "batch_norm", "relu", "max_pool2d", "add_", "adaptive_avg_pool2d"
}  # fmt: skip
side_by_side

# %% [markdown]
# ## The rules behind it, counted
#
# Each backend has a table of ops and policies. `op_table` reads it out of the PyTorch that is
# installed: the dispatcher tells which ops are in it, and a call of each one, caught behind
# autocast, tells the policy. Then the op is called once more, and the dtype that it returns is
# noted. No list of ops is typed anywhere.

# %%
tables = {backend: op_table(backend) for backend in BACKENDS}
policies = {name: Counter(rule.policy for rule in table) for name, table in tables.items()}
print(f"{'':<20}" + "".join(f"{name:>7}" for name in tables))
for policy in policies["cuda"]:
    print(f"{policy:<20}" + "".join(f"{policies[name][policy]:>7}" for name in tables))
for table in tables.values():
    assert all(rule.agrees is not False for rule in table)  # every call kept the policy's promise

# %% [markdown]
# `fp32_set_opt_dtype` is the policy "fp32, unless the call names a dtype". `banned` is an op that
# autocast refuses. The columns for `cuda` and `xpu` look alike, those for `mps` and `cpu` do not.
# How many ops, counting each overload, are treated differently from CUDA?

# %%
others = [name for name in tables if name != "cuda"]
against_cuda = {name: differences(tables["cuda"], tables[name]) for name in others}
for name, rows in against_cuda.items():
    print(f"{name}: {len(rows)} ops treated differently, of {len(tables[name])} in its table")
assert len(against_cuda["xpu"]) < len(against_cuda["mps"]) < len(against_cuda["cpu"])

# %% [markdown]
# The rows of the tables that explain the picture (`-`: the op is not in that table):

# %%
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
assert [name for name, rules in policy_of.items() if "cross_entropy_loss" in rules] == ["cpu"]

# %% [markdown]
# ## The surprise in cross-entropy
#
# `log_softmax` and `nll_loss` are both in CUDA's table as ops that run in fp32, and
# `cross_entropy` is one after the other. So the X-rays above show something odd:
# `_log_softmax` in fp16. Call both forms on fp16 logits, on each backend.


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
# On each backend, the dtype that `_log_softmax` returns, and that of the loss:

# %%
print(f"{'':<8}{'at once':<18}in two steps")
for backend in tables:
    once, twice = (log_softmax_dtype(backend, form) for form in (at_once, in_two_steps))
    print(f"{backend:<8}{' -> '.join(once):<18}{' -> '.join(twice)}")
    assert once == (("fp32" if backend == "cpu" else "fp16"), "fp32")
    assert twice == (("fp16" if backend == "cpu" else "fp32"), "fp32")

# %% [markdown]
# On the GPUs, `F.cross_entropy` passes its own dtype, that of the logits, to `log_softmax`. On CUDA
# and XPU an explicit dtype wins over the policy; on MPS the logits are cast up, and the dtype takes
# them down again. The CPU is the other way round: it has the whole loss in its table, but not
# `log_softmax`. And the loss itself is fp32 everywhere, since `nll_loss` casts up what has been
# rounded by then. Its dtype tells nothing.
#
# The remedy is one word, and holds on every backend: **`.float()` on the logits.**


# %%
def on_floats(logits, target):
    """Cross-entropy, computed in fp32."""
    return F.cross_entropy(logits.float(), target)


for backend in tables:
    assert log_softmax_dtype(backend, on_floats) == ("fp32", "fp32")

# %% [markdown]
# What is at stake? The loss of an untrained language model is about the logarithm of its
# vocabulary. Between 8 and 16 neighbouring fp16 numbers are $2^{-7}$ apart, and bf16 numbers
# $2^{-4}$; rounding errs by up to half of that, in each token's loss. Real tensors on the CPU,
# without autocast, so that the logits alone set the dtype:

# %%
vocabulary = 50304
assert 8 < math.log(vocabulary) < 16
target = torch.randint(vocabulary, (64,))
for dtype, spacing in ((torch.float16, 2**-7), (torch.bfloat16, 2**-4)):
    logits = torch.randn(64, vocabulary).to(dtype)
    rounded = F.cross_entropy(logits, target, reduction="none").float()
    error = (rounded - F.cross_entropy(logits.float(), target, reduction="none")).abs().max()
    assert spacing / 8 < error < spacing
    in_the_mean = (rounded.mean() - F.cross_entropy(logits.float(), target)).abs()
    assert in_the_mean < error / 2

# %% [markdown]
# A mean over many tokens hides most of this. A loss that is compared token by token, or
# exponentiated to a perplexity or to a ratio of probabilities, shows it.
#
# ## Will it fit?
#
# The same fake tensors tell how much memory a training step takes. Each storage counts from when it
# is made to when it is freed: weights, gradients, the optimizer's state, what autograd keeps for
# the backward pass, autocast's copies of the weights. Here is ResNet-50 with a batch of 32, and a
# card of 24 GiB.

# %%
resnet50 = zoo["ResNet-50"][0]
memory = compare_memory(resnet50, (32, 3, 224, 224), memory_bytes="24GiB", optimizer="sgd-momentum")
memory

# %% [markdown]
# Weights, gradients and optimizer state are fp32 in every column, so AMP saves nothing there. It
# adds the cast copies of the weights. What it halves, nearly, are the activations, and for this
# network they are most of the memory. Hence the last row: almost twice the batch.

# %%
fp32, fp16 = memory["fp32"], memory["fp16"]
for part in ("weights", "gradients", "optimizer"):
    assert getattr(fp16, part) == getattr(fp32, part)
assert fp32.cast_cache == 0 < fp16.cast_cache
assert 0.5 < fp16.activations / fp32.activations < 0.55
assert fp32.activations > 0.8 * fp32.peak
assert 1.9 < memory.largest["fp16"] / memory.largest["fp32"] < 2
assert memory.largest["bf16"] == memory.largest["fp16"]

# %%
_ = memory.plot()

# %% [markdown]
# Peak memory against the batch, a line for each precision; the horizontal line is the card. All
# lines are straight, and start near the same height, that of weights, gradients and optimizer
# state. The lines for fp16 and bf16 lie on each other. Where a line crosses the card's, there is
# its largest batch.
#
# `largest_batch` solves for that crossing. It fits, and one more does not:

# %%
limit = parse_bytes("24GiB")
settings = {"precision": "fp16", "optimizer": "sgd-momentum"}
batch = largest_batch(resnet50, (1, 3, 224, 224), memory_bytes=limit, **settings)
assert batch == memory.largest["fp16"]
fits, does_not = (
    forecast_memory(resnet50, torch.empty(n, 3, 224, 224, device="meta"), **settings).peak
    for n in (batch, batch + 1)
)
print(f"batch {batch}: {fits / limit:.2%} of the card; one more: {does_not / limit:.2%}")
assert fits <= limit < does_not

# %% [markdown]
# Leave some room: the driver, the workspaces of cuDNN and cuBLAS, and gaps between blocks of memory
# are not in the forecast, which counts tensors and nothing else. We expect it to come within 10 % of
# what a GPU's allocator counts [*(not yet seen on a GPU)*](../data/results/README.md "memory-forecast").
#
# ## Hold the forecast against the truth
#
# The largest part can be checked without a GPU. `saved_tensors_hooks` sees every tensor that
# autograd keeps in a *real* forward pass, here on the CPU. Each storage counts once, and the
# model's own do not count.


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
# Four small models, each in fp32 and in bf16. The forecast for it is the sum of two parts, the
# activations and those casts of weights that autograd keeps.

# %% tags=["nbval-ignore-output"]
kept = {}
small_images = torch.rand(4, 3, 64, 64)
small_zoo = {
    "ResNet-18": (models.resnet18(), small_images),
    "MobileNetV2": (models.mobilenet_v2(), small_images),
    "ViT": (models.VisionTransformer(64, 16, 4, 4, 128, 256), small_images),
    "GPT": (GPT(1000, 128, 4, 4, 64), torch.zeros(4, 64, dtype=torch.long)),
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
# Forecast and count agree. And there is a surprise: here bf16 keeps *more* than fp32 for the
# ResNet-18, and for the ViT. Their inputs are so small that the weights outweigh the activations,
# and autograd keeps a copy in bf16 of each weight that the backward pass needs.

# %%
for name in small_zoo:
    assert (kept[name, "bf16"] > kept[name, "fp32"]) == (name in ("ResNet-18", "ViT"))
low_weights = 2 * sum(p.numel() for p in small_zoo["ResNet-18"][0].parameters())  # bytes
assert 0.8 < low_weights / kept["ResNet-18", "bf16"] < 0.9

# %% [markdown]
# There is a limit to the forecast, and it names it: a recurrent layer has kernels of its own on
# each device, which keep what they like.

# %%
caveats = forecast_memory(Classifier(), sequence, precision="fp32").caveats
print(*caveats)
assert any("LSTM" in caveat for caveat in caveats)
assert not forecast.caveats

# %% [markdown]
# ## Seven billion parameters, no memory
#
# On `meta`, the same GPT can be built as large as you like. This is the shape of a 7B language
# model, and it takes no memory for its weights.

# %%
with torch.device("meta"):
    big = GPT(vocabulary=32000, width=4096, heads=32, depth=32, context=2048)
count = sum(parameter.numel() for parameter in big.parameters())
print(f"{count / 1e9:.2f} billion parameters, {4 * count / 2**30:.1f} GiB in fp32")
assert count > 6.5e9
assert all(parameter.is_meta for parameter in big.parameters())

# %% [markdown]
# One sequence of 2048 tokens, AdamW, and a card that is sold with 141 GB. Its data sheet counts in
# powers of ten; in powers of two, as in the figure below, that is 131 GiB. The loss is on
# `.float()`, as above.


# %%
def loss_on_floats(output):
    """`mean_loss`, computed in fp32."""
    return mean_loss(output.float())


big_memory = compare_memory(
    big,
    (1, 2048),
    memory_bytes="141GB",
    precisions=("fp32", "bf16"),
    optimizer="adamw",
    loss_fn=loss_on_floats,
    input_dtype=torch.long,
)
big_memory

# %% [markdown]
# Here AMP changes the peak of one sequence not at all. For each parameter there are 4 bytes of
# weight, 4 of gradient and 8 of AdamW's state, 16 bytes before the first activation; and the
# optimizer's step, which works on [all parameters at
# once](https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html) on a GPU, takes 4 more for a
# moment. That step is the peak, and it is fp32 in both columns. The cast copies of the weights come to almost 2
# bytes a parameter.

# %%
assert parse_bytes("141GB") // 2**30 == 131
plain, mixed = big_memory["fp32"], big_memory["bf16"]
assert plain.weights == plain.gradients == 4 * count
assert plain.optimizer == 8 * count
assert plain.peak_phase == mixed.peak_phase == "optimizer"
assert plain.peak == mixed.peak
assert 19.5 * count < plain.peak < 20.5 * count
assert 1.9 * count < mixed.cast_cache < 2 * count
assert mixed.peak > parse_bytes("80GB")  # not on such a card, in whichever precision
_ = big_memory.plot()

# %% [markdown]
# The picture has the same axes as before, but both lines begin far up, and flat, as long as the
# optimizer's step is the peak. Activations take over only further to the right, and there bf16
# begins to pay:

# %%
fp32_peaks, bf16_peaks = (peaks for _, peaks in big_memory.curves.values())
taken_over = [peak > 1.001 * plain.peak for peak in fp32_peaks]  # the inputs alone take less
assert taken_over == sorted(taken_over)  # not at first, and always from some batch on
assert not taken_over[0]
assert taken_over[-1]
assert all((b < f) == t for f, b, t in zip(fp32_peaks, bf16_peaks, taken_over, strict=True))
assert bf16_peaks[-1] < 0.75 * fp32_peaks[-1]

# %% [markdown]
# For a model of this kind AMP is for speed. What saves memory is something else: fewer bytes per
# parameter, as plain SGD has here, or parameters spread over several GPUs ([notebook
# 11](11_scale_out.ipynb) counts what that saves).

# %%
big_tokens = torch.empty(1, 2048, dtype=torch.long, device="meta")
without_state = forecast_memory(big, big_tokens, precision="bf16", optimizer="sgd")
assert without_state.optimizer == 0
assert without_state.peak < 0.7 * mixed.peak

# %% [markdown]
# ## Where two runs part
#
# So far we asked what a precision would do. The other question comes when it has been done: two runs
# of one model give different numbers. Is that rounding, or is something wrong? Comparing the outputs
# does not tell, because every op passes on the errors that it gets and adds its own.
#
# `first_difference` repeats each op in fp64, once on exact inputs and once on the inputs that it really
# got. That separates what an op adds from what it inherited, and what it adds is held against the
# format that it computes in. Here is the small GPT in fp32, against itself under autocast. The logits
# differ, so what do you expect it to name?

# %% tags=["nbval-ignore-output"]
small_gpt = small_zoo["GPT"][0]
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
# It names nothing: every op is as wrong as bf16 makes it, and no more. Now we plant a mistake that is
# made in real ports of models, another epsilon in one of the layer norms:

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
# The logits differ by less than autocast's did, and yet it is found, with the module and the value. A
# threshold on the output would have called the first pair wrong and the second one right. The same
# works for a model and its compiled form, for two batch sizes and for two devices, and from a terminal
# as `amp-lab diff`.
#
# ## Your own model
#
# Put your model and an input of its shape here, and run the rest of this section again. The model
# is built on `meta` if it can be; where its constructor wants real values, leave that line out.

# %%
with torch.device("meta"):
    my_model = models.mobilenet_v3_small()
my_shape = (8, 3, 224, 224)
mine = xray(my_model, torch.empty(my_shape), device_type="cuda")
print(f"{mine.low_share:.0%} of the work in low precision, {len(mine.casts)} casts")
print(*mine.advice, sep="\n")
assert mine.raised is None  # autocast made no op fail

# %% [markdown]
# The same from a terminal, for anything that can be imported: `pdm run amp-lab xray
# PACKAGE.MODULE:CALLABLE --input 8,3,224,224 --device cuda`, with `--against mps`, `--against bf16`
# or `--against cpu:bf16` for two side by side, `amp-lab ops --device cuda` for the op table, and the
# forecast, which runs here:

# %%
command = "memory torchvision.models:mobilenet_v3_small --input 1,3,224,224 --memory 8GiB"
assert amp_lab_command(command.split()) == 0

# %% [markdown]
# ## Summary
#
# - Autocast decides by op, dtype and type of device, before a kernel is chosen. So fake tensors and
#   a state set by hand show its decisions for a device that is not there. Where the device is
#   there, real rows and predicted rows agree.
# - A `TorchDispatchMode` of fifteen lines sees it all; `xray` adds modules, casts and advice.
# - Backends have different tables. The same ResNet casts more on MPS, where `batch_norm` is fp32.
# - `F.cross_entropy` on fp16 logits rounds its `log_softmax` to fp16 on CUDA, XPU and MPS, and
#   still returns fp32. Give it `logits.float()`.
# - AMP nearly halves activations, and nothing else; copies of weights come on top. Where activations
#   dominate, as in a ResNet on large images, nearly twice the batch fits; where weights and
#   optimizer state do, as in a large transformer at a small batch, the peak stays.
# - When two runs differ, `first_difference` names the first op that rounding does not explain, or none.
#
# ## Exercises
#
# 1. X-ray a model of your own under `cuda` and `mps`. Is there an op in fp32 that has a large share
#    of the bytes written? Which line of your code calls it?
# 2. Let `Tracer` note the module too, with forward hooks. Then find the rows of `ViT-B/16` that are
#    "both" in the picture: which additions are in fp16, and which in fp32?
# 3. The GPT's residual stream is fp32. Cast the embedding's output to fp16 under autocast, and look
#    at the picture again. Which ops change on CUDA, which on the CPU?
# 4. Give `forecast_memory` the GPT with `mean_loss` and with `loss_on_floats`. What does the
#    `.float()` cost in memory, and for which vocabulary does it matter?
# 5. Which batch of which of your models fits into your card in fp32, and in bf16? Predict it with
#    `largest_batch`, then try. How much room does the driver take?
# 6. Take `sgd` instead of `adamw` for the 7B model. How many bytes per parameter are left, and does
#    AMP change the peak now?
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
