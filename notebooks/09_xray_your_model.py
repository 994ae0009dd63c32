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
# **What you'll do.** Write a small tracer that records the dtype of each op under CUDA's autocast rules.
# Apply the complete tool, `xray`, to three models. Forecast whether a training step fits into a GPU's memory.
#
# **What you'll learn.**
# - why you can see autocast's decisions for a device that you do not have;
# - where autocast treats the same model differently on CUDA, MPS and a CPU;
# - why `F.cross_entropy` on fp16 logits is less precise than it looks;
# - what takes memory in a training step, and which part AMP makes smaller.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast's rules. You need no GPU.

# %% tags=["nbval-ignore-output"]
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import models

from course import figures, start
from course.gpt import SIZES, Gpt

from amp_lab import xray
from amp_lab.core.backends import BACKENDS
from amp_lab.tracing import compare_memory

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
_ = torch.manual_seed(0)

# %% [markdown]
# ## The idea in five lines
#
# We trace a tiny network under CUDA's autocast, without a GPU. In which dtype does each layer run?

# %%
tiny = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
result = xray(tiny, torch.empty(2, 8), device_type="cuda")
for row in result.rows:
    print(f"{row.op:<12}{row.dtype}")
assert [row.dtype for row in result.rows] == [torch.float16, torch.float32, torch.float32]

# %% [markdown]
# The linear layer (`addmm`) runs in fp16. The norm and the softmax run in fp32. <!-- tests/tracing/test_xray.py -->
#
# ## A short tracer
#
# A tracer like `xray` uses two ideas.
#
# **See each op.** While a `TorchDispatchMode` is active, PyTorch calls its `__torch_dispatch__` for each op, [after
# autocast](https://docs.pytorch.org/devlogs/dispatcher/2026-04-16-how-does-the-dispatcher-work/) has cast the inputs.
# Each cast is an op too, named `_to_copy`. <!-- tests/notebooks/test_09_xray_your_model.py -->

# %%
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def dtypes_of(structure):
    """The dtypes of the floating-point tensors in a structure, by their short names."""
    tensors = [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]
    return tuple(SHORT[t.dtype] for t in tensors if t.is_floating_point())


class Tracer(TorchDispatchMode):
    """While active, records each op in `rows`, with the dtypes of its inputs and of its result."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":  # leaves out `prim.device`, which computes nothing
            name = func.overloadpacket.__name__
            self.rows.append((name, dtypes_of(args), dtypes_of(result)[:1]))
        return result


# %% [markdown]
# **Pretend to have the device.** Autocast's decisions do not depend on values. So [*fake
# tensors*](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html) are enough:
# they have a dtype and a device, but no data. Without CUDA, `torch.autocast("cuda")` [disables
# autocast](https://github.com/pytorch/pytorch/blob/main/torch/amp/autocast_mode.py), so the next cell sets autocast's
# state directly.


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


# %%
def trace_on(device_type, model, shape):
    """The tracer's rows of one forward pass on fake tensors of `device_type`."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with rules_of(device_type), torch.no_grad():
        fakes = {name: torch.empty(size, device=device_type) for name, size in shapes.items()}
        x = torch.empty(shape, device=device_type)
        with Tracer() as tracer:
            torch.func.functional_call(model, fakes, (x,))  # with `fakes` for its parameters
    return tracer.rows


# %% [markdown]
# We trace a small network under CUDA's rules. How many casts do you expect, and where?

# %%
net = nn.Sequential(
    nn.Conv2d(3, 8, 3),  # (B, 3, 8, 8) -> (B, 8, 6, 6)
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 6 * 6, 16),
    nn.LayerNorm(16),
)
fake_rows = trace_on("cuda", net, (2, 3, 8, 8))
for op, before, after in fake_rows:
    print(f"{op:<20}{', '.join(before):<20}-> {', '.join(after)}")
assert [op for op, *_ in fake_rows].count("_to_copy") == 6
assert fake_rows[-1] == ("native_layer_norm", ("fp32",) * 3, ("fp32",))

# %% [markdown]
# Each row is one op. The convolution needs three casts, for its input, weight and bias. The linear layer (`addmm`)
# needs two, because its input is already fp16. The norm runs in fp32. It needs one cast, because only its input is
# fp16.
#
# We check that a trace under the CPU's rules has the same rows as a real run on the CPU:

# %%
images = torch.rand(2, 3, 8, 8)
with torch.no_grad(), torch.autocast("cpu"), Tracer() as tracer:
    net(images)
assert tracer.rows == trace_on("cpu", net, images.shape)

# %% [markdown]
# ## The tool
#
# The complete tool, `amp_lab.xray`, prints a table. Here the batch is 32: <!-- tests/tracing/test_xray.py -->

# %%
xray(net, torch.empty(32, 3, 8, 8), device_type="cuda")

# %% [markdown]
# The table has a line for each module that computes: <!-- tests/tracing/test_xray_result.py -->
#
# - `work` is the module's share of the arithmetic in matmuls and convolutions.
# - `work in` is the dtype of these matmuls and convolutions.
# - `other ops in` is the dtype of the other ops.
#
# ## Three models, three backends
#
# Do CUDA, MPS and the CPU run a model in the same dtypes? We compare a ResNet-50, a GPT and an LSTM. We
# build the models on the [`meta` device](https://docs.pytorch.org/docs/stable/meta.html), so the weights take no memory.


# %%
class Classifier(nn.Module):
    """A two-layer LSTM over a sequence (B, T, 64); its last output gives ten classes."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])  # (B, 10)


with torch.device("meta"):
    zoo = {
        "ResNet-50": (models.resnet50(), torch.empty(8, 3, 224, 224)),
        "GPT": (Gpt(SIZES["gpt-small"], vocabulary=50304), torch.empty(2, 256, dtype=torch.long)),
        "LSTM": (Classifier(), torch.empty(8, 32, 64)),
    }


def mean_loss(output):
    """Cross-entropy of all predictions of a model; which class is right does not matter here."""
    logits = output.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


# %% [markdown]
# We trace each model with its loss under the rules of three backends. In one of the nine traces, nearly all of the
# work stays in fp32. Which model and backend do you expect?

# %%
found = {
    (name, backend): xray(model, inputs, device_type=backend, loss_fn=mean_loss)
    for name, (model, inputs) in zoo.items()
    for backend in ("cuda", "mps", "cpu")
}
print(f"{'':<12}{'backend':<9}{'casts':>6}{'work in low precision':>25}")
for (name, backend), result in found.items():
    print(f"{name:<12}{backend:<9}{len(result.casts):>6}{result.low_share:>25.0%}")
shares = {key: result.low_share for key, result in found.items()}
assert {key for key, share in shares.items() if share < 0.99} == {("LSTM", "mps")}

# %% [markdown]
# On MPS, the LSTM layer stays in fp32, and the ResNet needs far more casts than on CUDA. To see why, we draw
# the dtype in which each kind of op computes.


# %%
def dtypes_by_op(result):
    """The dtype in which each kind of op computes; "both" if in low precision and in fp32."""
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
# Dark fields are fp32. Compare three ops:
#
# - **`batch_norm`** and the `relu_` after it are fp32 on MPS, but the convolutions around them are fp16. So the ResNet
#   needs casts from fp16 to fp32 and back.
# - **`lstm`** has no rule in autocast on MPS. So it keeps the dtype of its input, here fp32.
# - **`_log_softmax`** in the loss is fp16 on CUDA and MPS, and fp32 on the CPU.

# %%
resnet = grid["ResNet-50"]
assert resnet["mps"]["batch_norm"] == resnet["mps"]["relu_"] == "fp32"
assert resnet["cuda"]["batch_norm"] == resnet["cuda"]["relu_"] == "fp16"
assert (grid["LSTM"]["cuda"]["lstm"], grid["LSTM"]["mps"]["lstm"]) == ("fp16", "fp32")
logs = {b: {model[b]["_log_softmax"] for model in grid.values()} for b in resnet}
assert logs == {"cuda": {"fp16"}, "mps": {"fp16"}, "cpu": {"fp32"}}
casts = {key: len(result.casts) for key, result in found.items()}
assert casts["ResNet-50", "mps"] > 2 * casts["ResNet-50", "cuda"]

# %% [markdown]
# ## The surprise in cross-entropy
#
# `log_softmax` is on [CUDA's list](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference) of ops that
# run in fp32. Yet in the figure, the op `_log_softmax`, which `log_softmax` runs, is fp16 on CUDA. Here,
# `F.cross_entropy` called it. We trace `F.cross_entropy` on fp16 logits, without and with `.float()` on the logits:


# %%
def plain(logits, target):
    """The usual call."""
    return F.cross_entropy(logits, target)


def on_floats(logits, target):
    """Cross-entropy, computed in fp32."""
    return F.cross_entropy(logits.float(), target)


def log_softmax_dtype(backend, loss_fn):
    """The dtypes of the result of `_log_softmax`, and of the loss, for fp16 logits."""
    with rules_of(backend, torch.float16):
        logits = torch.empty(4, 10, dtype=torch.float16, device=backend)
        target = torch.empty(4, dtype=torch.long, device=backend)
        with Tracer() as tracer:
            loss = loss_fn(logits, target)
    return *next(after for op, _, after in tracer.rows if op == "_log_softmax"), SHORT[loss.dtype]


for backend in BACKENDS:
    usual, loss = log_softmax_dtype(backend, plain)
    in_fp32, _ = log_softmax_dtype(backend, on_floats)
    print(f"{backend:<6}log_softmax in {usual}, with .float() in {in_fp32}")
    assert usual == ("fp32" if backend == "cpu" else "fp16")
    assert in_fp32 == loss == "fp32"

# %% [markdown]
# On CUDA in eager mode, `F.cross_entropy(logits, target)` [computes
# this](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/LossNLL.cpp) for fp16 logits and class
# indices:
#
# ```python
# F.nll_loss(F.log_softmax(logits, dim=1, dtype=torch.float16), target)
# ```
#
# On CUDA, this `dtype=` [overrides](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/autocast_mode.h)
# autocast's rule for `log_softmax`, so the result of `log_softmax` is rounded to fp16. Autocast casts this result to
# fp32 for `nll_loss`, which is also on the list. So the loss is fp32, but it was computed from rounded values. To
# avoid the rounding, call **`.float()` on the logits.**
#
# ## Will it fit?
#
# With fake tensors, we can also forecast how much memory a training step takes. The main parts are:
# <!-- tests/tracing/test_memory.py -->
#
# - the weights, the gradients and the optimizer state;
# - the activations saved for the backward pass;
# - autocast's 16-bit copies of the weights (`cast_cache` in the table below).
#
# We forecast the memory for a ResNet-50 with a batch of 32 on a GPU with 24 GiB. Which of these parts does AMP
# make smaller?

# %%
resnet50 = zoo["ResNet-50"][0]
memory = compare_memory(resnet50, (32, 3, 224, 224), memory_bytes="24GiB", optimizer="sgd-momentum")
fp32, fp16 = memory["fp32"], memory["fp16"]
print(f"{'in MiB':<14}{'fp32':>6}{'fp16':>6}")
for part in ("weights", "gradients", "optimizer", "activations", "cast_cache"):
    print(f"{part:<14}{getattr(fp32, part) / 2**20:>6.0f}{getattr(fp16, part) / 2**20:>6.0f}")
print(f"{'largest batch':<14}{memory.largest['fp32']:>6}{memory.largest['fp16']:>6}")

# %% [markdown]
# The batch of 32 fits, because it is smaller than the largest batch. AMP makes the activations about half as large, so
# the largest batch almost doubles. Weights, gradients and optimizer state keep their size.

# %%
for part in ("weights", "gradients", "optimizer"):
    assert getattr(fp16, part) == getattr(fp32, part)
assert fp32.cast_cache == 0 < fp16.cast_cache
assert 0.5 < fp16.activations / fp32.activations < 0.55
assert fp32.activations > 0.8 * fp32.peak
assert 1.9 < memory.largest["fp16"] / memory.largest["fp32"] < 2

# %% [markdown]
# ## Your own model
#
# Put your model and its input shape into this cell. If the model's constructor needs real values, remove
# `with torch.device("meta"):`.

# %%
with torch.device("meta"):
    my_model = models.mobilenet_v3_small()
mine = xray(my_model, torch.empty(8, 3, 224, 224), device_type="cuda")
print(f"{mine.low_share:.0%} of the work in low precision, {len(mine.casts)} casts")
print(*mine.advice, sep="\n")
assert mine.raised is None  # autocast made no op fail

# %% [markdown]
# In a terminal, use [`amp-lab xray`](../docs/your_model.md#what-would-autocast-do-to-my-model) and [`amp-lab
# memory`](../docs/your_model.md#does-training-fit-into-memory). <!-- tests/cli/test_tracing_commands.py -->
#
# ## Summary
#
# - Autocast's decisions do not depend on values. So fake tensors show these decisions for a device that you do not
#   have.
# - Under autocast on MPS, `batch_norm` and an LSTM layer with an fp32 input run in fp32.
# - Under autocast on CUDA, XPU and MPS, `F.cross_entropy` of fp16 logits can round values to fp16. Pass
#   `logits.float()`.
# - In our forecast, AMP makes the activations smaller. Weights, gradients and optimizer state keep their size.
#
# Next, [notebook 10](10_speed_ladder.ipynb) makes a step faster.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("09_xray_your_model")

# %% [markdown]
# ### 1. Count the casts
#
# An fp32 input passes through `nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4),
# nn.LayerNorm(4))`. How many casts does autocast insert on CUDA in this forward pass?

# %%
number_of_casts = ...
exercises.check_number_of_casts(number_of_casts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each layer, write down the dtype in which it computes. Then count the inputs that have another dtype.
# Weights and biases are inputs too.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# number_of_casts = 6
# ```
#
# - The first linear layer needs 3 casts: its input, weight and bias.
# - The second linear layer needs 2: its weight and bias.
# - The norm needs 1: its input.
#
# </details>
#
# ### 2. Find the casts that go up
#
# Complete `casts_up` for the rows of a `Tracer`. Return how many rows are casts from fp16 or bf16 to fp32. A row is
# `(name, dtypes of the inputs, dtype of the result)`.


# %%
def casts_up(rows):
    return ...


exercises.check_casts_up(casts_up)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The rows printed under "A short tracer" show the name of a cast. In the row of a cast up, each tuple of
# dtypes has one element.
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
# </details>
#
# ### 3. Repair a loss
#
# For fp16 logits, the loss `F.cross_entropy(logits, target).float()` is imprecise. Write the loss so that its
# `log_softmax` runs in fp32 under CUDA's autocast.


# %%
def precise_loss(logits, target):
    return ...  # was F.cross_entropy(logits, target).float()


exercises.check_precise_loss(precise_loss)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A cast to fp32 does not undo earlier rounding. Which tensor has to be fp32 when `cross_entropy` begins?
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
# </details>
#
# ### 4. What does a model cost before its first activation?
#
# We train an fp32 model with 3 billion parameters under bf16 autocast, with SGD and momentum. How many GB (10^9
# bytes) do weights, gradients and optimizer state take together?

# %%
gigabytes = ...
exercises.check_gigabytes(gigabytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# AMP does not change the size of weights, gradients and optimizer state. How many numbers for each parameter does
# SGD with momentum store?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gigabytes = 36
# ```
#
# Each parameter takes 4 bytes of weight, 4 of gradient and 4 of momentum. So 3 billion parameters take 36 GB.
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html).
# - Rajbhandari et al., [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054): the bytes for each parameter with Adam.
