# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Find the speed and the memory that AMP should save
#
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [Autocast or the scaler is switched off](#Autocast-or-the-scaler-is-switched-off);
# - [A thread runs without autocast or in another dtype](#A-thread-runs-without-autocast-or-in-another-dtype);
# - [Autocast makes the model no faster](#Autocast-makes-the-model-no-faster);
# - [The memory is not halved](#The-memory-is-not-halved);
# - [A size is not a multiple of 16 or 8](#A-size-is-not-a-multiple-of-16-or-8);
# - [CUDA is out of memory](#CUDA-is-out-of-memory).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]
import inspect
import math
import re
import threading
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course import figures, start
from course.failures import make, message_of, warnings_of

from amp_lab import DeviceError, Precision, compare, forecast_memory, largest_batch

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## Autocast or the scaler is switched off
#
# `AMP0031` <!-- failure
# messages = [
#   "CUDA is not available or torch_xla is imported. Disabling autocast.",
#   "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.",
#   "In CPU autocast, but the target dtype is not supported. Disabling autocast.",
# ]
# symptoms = [
#   "a step is no faster than before, or even slower",
#   "training uses as much memory as before, or more",
# ]
# -->
#
# **What you see.** One of these warnings appears, and is easily lost in a log:
# - `CUDA is not available or torch_xla is imported. Disabling autocast.`
# - `torch.cuda.amp.GradScaler is enabled, but CUDA is not available.`
# - `In CPU autocast, but the target dtype is not supported. Disabling autocast.`
#
# **The smallest program that does it.** A script for a GPU runs on a machine without one, or asks
# for a dtype that autocast does not know. (Where CUDA or ROCm is there, the first two do not warn.)

# %%
warned = {
    "autocast": warnings_of(lambda: torch.autocast("cuda")),
    "scaler": " ".join(warnings_of(lambda: torch.amp.GradScaler("cuda")).split()),
    "dtype": warnings_of(lambda: torch.autocast("cpu", dtype=torch.float32)).partition("\n")[0],
}
print(*warned.values(), sep="\n")
expected = {
    "autocast": "CUDA is not available or torch_xla is imported. Disabling autocast.",
    "scaler": "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.",
    "dtype": "In CPU autocast, but the target dtype is not supported. Disabling autocast.",
}
for what, message in expected.items():
    assert (message in warned[what]) is (what == "dtype" or not torch.cuda.is_available())
with mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False):
    assert not warnings_of(lambda: (torch.autocast("cuda"), torch.amp.GradScaler("cuda")))

# %% [markdown]
# **Why.** For `"cuda"` autocast and the scaler switch themselves off, and the run goes on in fp32.
# For `"xpu"` and `"mps"` both stay on, without a warning, and products of CPU tensors are fp32
# ([notebook 02](02_autocast_dtypes.ipynb)).
#
# **The fix.** Take the name from the device that the tensors are on, and refuse a device that is
# not there. `Precision` of this collection's package raises an error.

# %%
with torch.autocast(x.device.type, dtype=torch.bfloat16):
    assert (x @ x.T).dtype is torch.bfloat16
for name in ("xpu", "mps"):
    assert not warnings_of(lambda name=name: (torch.autocast(name), torch.amp.GradScaler(name)))
    assert torch.amp.GradScaler(name).is_enabled()
    with torch.autocast(name, dtype=torch.float16):
        assert torch.is_autocast_enabled(name)
        assert (x @ x.T).dtype is torch.float32
absent = "xpu" if torch.cuda.is_available() else "cuda"
try:
    Precision.BF16.autocast(absent)
    raised = False
except DeviceError:
    raised = True
assert raised

# %% [markdown]
# **Notice it earlier.** Use `warnings.simplefilter("error")` in tests, and print the dtype of one
# output.

# %% [markdown]
# ## A thread runs without autocast or in another dtype
#
# `AMP0032` <!-- failure
# symptoms = [
#   "a step is no faster than before, or even slower",
# ]
# -->
#
# **What you see.** Code that runs a model in threads may be as slow as in fp32, or use the wrong half
# precision.
#
# **The smallest program that does it.** We start two threads, each inside an fp16 block. The second
# enters autocast again, but does not say in which dtype.


# %%
def in_a_thread(function):
    """What `function()` returns when another thread calls it inside an fp16 block."""
    results = []
    with torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        thread.join()
    return results[0]


def enter_again(**options):
    with torch.autocast("cpu", **options):
        return (x @ x.T).dtype


found = in_a_thread(lambda: (x @ x.T).dtype), in_a_thread(enter_again)
print("in the thread:", *found)
assert found == (torch.float32, torch.bfloat16)

# %% [markdown]
# **Why.** Autocast's switch and its dtype both belong to a thread, and a new thread has the
# defaults. On several GPUs `nn.DataParallel` has a thread for each. It enters autocast again there,
# but leaves out the dtype, as `enter_again()` does. What was meant to be bf16 therefore runs in fp16.
# Its source shows it:

# %%
source = inspect.getsource(nn.parallel.parallel_apply)
(block,) = re.findall(r"autocast\([^)]*enabled=autocast_enabled[^)]*\)", source)
print(block)
assert "dtype" not in block
assert torch.get_autocast_dtype("cuda") is torch.float16

# %% [markdown]
# **The fix.** Enter autocast with its dtype in the function that the thread runs, or use it as a
# decorator of `forward`. Replace `DataParallel` by DDP, which has processes
# ([notebook 11](11_scale_out.ipynb)).

# %%
assert in_a_thread(lambda: enter_again(dtype=torch.float16)) is torch.float16
decorated = torch.autocast("cpu", dtype=torch.float16)(lambda: (x @ x.T).dtype)
assert in_a_thread(decorated) is torch.float16

# %% [markdown]
# **Notice it earlier.** In `forward`, assert `torch.is_autocast_enabled(device.type)`, and the dtype
# that `torch.get_autocast_dtype(device.type)` gives.

# %% [markdown]
# ## Autocast makes the model no faster
#
# `AMP0033` <!-- failure
# symptoms = [
#   "a profile of a server or a sampler is full of casts and copies",
#   "a step is no faster than before, or even slower",
# ]
# -->
#
# **What you see.** A step takes as long as before, or longer.
#
# **The smallest program that does it.** We use a network of five small layers. `CountOps` counts
# the ops that are not views.


# %%
class CountOps(TorchDispatchMode):
    """While active, counts ops, and how many of them are casts; views do not count."""

    ops = casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += not func.is_view
        self.casts += func.overloadpacket.__name__ in ("_to_copy", "to")  # "to": in inference mode
        return func(*args, **(kwargs or {}))


small, _ = make(*[nn.Linear(16, 16) for _ in range(5)])
inputs = torch.ones(4, 16)
with CountOps() as plain:
    small(inputs)
with CountOps() as amp, torch.autocast("cpu", dtype=torch.bfloat16):
    small(inputs)
print(f"fp32: {plain.ops} ops; autocast: {amp.ops} ops, {amp.casts} of them casts")
assert (plain.ops, amp.ops, amp.casts) == (5, 16, 11)

# %% [markdown]
# **Why.** Each forward pass casts five weights, five biases and the input, so 5 ops became 16. This
# pays only from some size of the products on ([notebook
# 10](10_speed_ladder.ipynb#From-which-size-on-does-AMP-pay?)). Seven other reasons:
# - The hardware has no fast path for the dtype ([your hardware](../docs/hardware.md)).
# - The limit is the data loader or the launching of kernels, and not arithmetic ([notebook
#   10](10_speed_ladder.ipynb#Where-AMP-loses)).
# - Each use of a weight casts it anew. So it is under `torch.inference_mode()`, where a server or a
#   sampler of many steps has one block around all of them
#   ([section 34](#The-memory-is-not-halved) counts). Cast the weights once, and the inputs too,
#   or take `torch.no_grad()` ([notebook 18](18_inference_and_export.ipynb#Ways-to-run-it)).
# - Large ops stay in fp32. `amp-lab xray` lists them ([notebook 09](09_xray_your_model.ipynb)).
#   For one product of an island on CUDA,
#   [`torch.mm(…, out_dtype=torch.float32)`](https://github.com/pytorch/torchtitan/issues/4273) keeps
#   16-bit inputs and returns fp32, but has no backward pass of its own.
# - Sizes are not multiples of 8, or of 16 in FP8
#   ([section 44](#A-size-is-not-a-multiple-of-16-or-8)).
# - The "fp32" you compare with is really TF32
#   ([section 37](08h_compile_and_processes.ipynb#TF32-is-set-in-the-old-and-in-the-new-way)).
# - The clock was read before the GPU had finished ([notebook
#   04](04_fp32_vs_amp.ipynb#How-not-to-measure)).
#
# **The fix.** Use large products in a dtype that the device accelerates; the command [`amp-lab
# doctor`](../docs/hardware.md) says which. We time the forward pass of a linear layer, small and
# large:


# %% tags=["nbval-ignore-output"]
def forward(layer, batch, enabled):
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
        return layer(batch)


for width in (16, 512):
    layer, batch = nn.Linear(width, width).to(device), torch.ones(width, width, device=device)
    steps = {p: partial(forward, layer, batch, p == "bf16") for p in ("fp32", "bf16")}
    timed = compare(steps, device=device, budget_s=2)
    print(f"width {width}:", timed, sep="\n")
assert forward(layer, batch, enabled=True).dtype is torch.bfloat16

# %% [markdown]
# The last column is the speed-up, with its interval. Here the small layer was slower in bf16, where
# it needs casts, and the large one was faster. Whether a large layer gains depends on the hardware.
#
# **Notice it earlier.** Measure one step in each precision before the long run.
# [Notebook 04](04_fp32_vs_amp.ipynb) shows how.

# %% [markdown]
# ## The memory is not halved
#
# `AMP0034` <!-- failure
# symptoms = [
#   "training uses as much memory as before, or more",
#   "inference uses more memory with autocast than without, or memory grows under `no_grad`",
# ]
# -->
#
# **What you see.** The peak memory is the same as in fp32, or higher, in training or in inference.
#
# **The smallest program that does it.** The weights are large, and the batch is a single example.
# `kept_bytes` adds up what the forward pass keeps for the backward pass, beside the parameters.


# %%
def kept_bytes(model, batch, enabled):
    """Bytes of the tensors that are kept for backward, each storage once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled),
    ):
        loss = model(batch).square().mean()
    assert loss.requires_grad  # the graph is alive, so no storage was used twice
    return sum(s.nbytes() for address, s in kept.items() if address not in parameters)


wide, _ = make(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
single = [kept_bytes(wide, torch.ones(1, 512), enabled) for enabled in (False, True)]
print(f"batch of 1: fp32 {single[0] / 1024:.0f} KiB, autocast {single[1] / 1024:.0f} KiB")
assert single[1] > 50 * single[0]

# %% [markdown]
# **Why.** Autocast narrows *activations*. The weights, the gradients and the two moments of Adam stay
# fp32 and take 16 bytes for each parameter. The casts of the weights take 2 bytes more, and those
# that a gradient needs are kept for the backward pass. With many weights and few activations, that is
# more than before: 515 KiB here in place of 6.
#
# Another cause is a parameter in fp32 that meets an activation outside of the ops that autocast
# casts, such as a gate with a number for each channel. The product is fp32, and so is what follows,
# up to the next op that autocast casts. Cast the parameter: `h * gate.to(h.dtype)`.
#
# And the cast of an *expanded* tensor is written out in full, though the tensor itself is not. Cast it
# before you expand it.
#
# **The fix.** AMP usually saves memory on a large batch, so make the batch larger. With 2048 examples
# it keeps 6.5 MiB in place of 12. Other means are gradient checkpointing, sharding, or an optimizer
# with less state. <!-- tests/remedies/test_memory_remedies.py -->

# %%
batch = torch.ones(2048, 512)
fp32, amp = (kept_bytes(wide, batch, enabled) for enabled in (False, True))
print(f"batch of 2048: fp32 {fp32 / 2**20:.1f} MiB, autocast {amp / 2**20:.1f} MiB")
assert 0.5 < amp / fp32 < 0.6
adam = torch.optim.Adam(wide.parameters())
wide(batch).sum().backward()
adam.step()
moments = [t for state in adam.state.values() for t in state.values() if t.dim() > 0]
always = [*wide.parameters(), *(p.grad for p in wide.parameters()), *moments]
assert sum(t.nbytes for t in always) == 16 * sum(p.numel() for p in wide.parameters())
h, gate = torch.ones(1, 2, dtype=torch.bfloat16), nn.Parameter(torch.ones(2))
assert (h * gate).dtype is torch.float32
assert (h * gate.to(h.dtype)).dtype is torch.bfloat16
assert gate.expand(1024, 2).to(h.dtype).untyped_storage().nbytes() == 1024 * 2 * 2
assert gate.to(h.dtype).expand(1024, 2).untyped_storage().nbytes() == 2 * 2

# %% [markdown]
# In inference under `no_grad`, the block keeps the casts of weights that require a gradient until
# it ends. If all weights are cast, that is half as much again as the fp32 weights take. Use
# `torch.inference_mode()`, which keeps none, or an autocast with `cache_enabled=False`. Or cast the model once, `model.bfloat16()`, which
# halves the weights ([notebook 18](18_inference_and_export.ipynb#Ways-to-run-it)). We count the
# casts of two passes:


# %%
def casts_of_two_passes(mode):
    """How many casts two passes through a linear layer make inside one block."""
    layer, _ = make()
    with mode, torch.autocast("cpu", dtype=torch.bfloat16), CountOps() as counted:
        layer(x)
        layer(x)
    return counted.casts


held = casts_of_two_passes(torch.no_grad())
released = casts_of_two_passes(torch.inference_mode())
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
    with CountOps() as counted:
        layer, _ = make()
        layer(x), layer(x)
    assert counted.casts == released
print(f"casts: {held} under no_grad, {released} under inference_mode")
assert held == 4  # weight and bias once, the input twice
assert released == 6  # all of them twice, since none was kept
assert all(p.dtype is torch.bfloat16 for p in make()[0].bfloat16().parameters())

# %% [markdown]
# **Notice it earlier.** Count before you run: with Adam 16 bytes a parameter, under autocast two
# more for the casts, plus the activations. `amp-lab memory` does it for your model, and for inference with `--eval`. <!-- tests/tracing/test_inference_memory.py -->

# %% [markdown]
# ## A size is not a multiple of 16 or 8
#
# `AMP0044` <!-- failure
# messages = [
#   "Expected self.size(1) to be divisible by 16, but got self.size(1)=",
#   "Expected both dimensions of mat2 to be divisible by 16",
# ]
# quoted = [
#   "Expected trailing dimension of mat1 to be divisible by 16",
# ]
# symptoms = [
#   "a step is no faster than before, or even slower",
# ]
# -->
#
# **What you see.** A matrix product in FP8 raises one of these, on a GPU or when it is compiled:
# - `Expected trailing dimension of mat1 to be divisible by 16`, or `mat_a` in place of `mat1`
# - `Expected self.size(1) to be divisible by 16, but got self.size(1)=`, followed by the size
# - `Expected both dimensions of mat2 to be divisible by 16`
#
# In fp16 and bf16 there is no message, but the product may be slower than it could be.
#
# **The smallest program that does it.** We multiply in FP8 on the device `meta`, whose tensors have
# no data. PyTorch checks their sizes by the rules of CUDA. First the inner size is 100, then there
# are as many columns as GPT-2 has tokens in its vocabulary, 50257. (The first message is that of
# [the kernel itself](https://github.com/pytorch/ao/issues/571).)


# %%
def shape_in_fp8(rows, inner, columns):
    """The shape of a product of (rows, inner) and (inner, columns) in FP8, without data."""
    left = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device="meta")
    right = torch.empty(columns, inner, dtype=torch.float8_e4m3fn, device="meta")
    one = torch.ones((), device="meta")  # the scale of either
    return torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16).shape


inner_message = message_of(lambda: shape_in_fp8(32, 100, 64))
columns_message = message_of(lambda: shape_in_fp8(32, 64, 50257))
print(inner_message, columns_message, sep="\n")
assert "Expected self.size(1) to be divisible by 16, but got self.size(1)=" in inner_message
assert "Expected both dimensions of mat2 to be divisible by 16" in columns_message

# %% [markdown]
# **Why.** Tensor cores take pieces of 16 bytes: 16 numbers in FP8, 8 in fp16 and bf16, 4 in TF32.
# PyTorch's FP8 products refuse other inner sizes and numbers of columns. In 16 bits other sizes run
# too, but multiples of 16 bytes are more efficient, and on an A100 those of 128 bytes, which are 64
# numbers ([NVIDIA's
# guide](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#requirements-tc)).
# The sizes of a linear layer are its inputs, its outputs, and the rows, which are batch x tokens:
# the gradient of the weight sums over them.
#
# **The fix.** Pad. nanoGPT makes GPT-2's vocabulary of 50257 a [multiple of
# 64](https://github.com/karpathy/nanoGPT/blob/master/model.py), which is 50304. No token has the new
# numbers, and the logits of the others stay the same. Leave the new ones out before you choose a
# token. Drop the last batch if it is smaller (`drop_last=True`), and pad the tokens.


# %%
def padded(size, multiple):
    """The smallest multiple that is not below `size`."""
    return math.ceil(size / multiple) * multiple


assert padded(50257, 64) == 50304
assert shape_in_fp8(33, padded(100, 16), 50304) == (33, 50304)  # any number of rows will do
head = nn.Linear(2, 5, bias=False)  # a vocabulary of 5
larger = nn.Linear(2, padded(5, 8), bias=False)
with torch.no_grad():
    larger.weight[:5] = head.weight
torch.testing.assert_close(larger(x)[:, :5], head(x))

# %% [markdown]
# **Notice it earlier.** `amp-lab xray` names the products on a GPU whose sizes are not multiples of 8.
# `amp-lab rehearse` leaves out the layers that FP8 would refuse, and says why. <!-- tests/tracing/test_advice.py, tests/formats/test_rehearsal.py -->

# %% [markdown]
# ## CUDA is out of memory
#
# `AMP0045` <!-- failure
# quoted = [
#   "torch.OutOfMemoryError: CUDA out of memory.",
# ]
# -->
#
# **What you see.** A step raises
# `torch.OutOfMemoryError: CUDA out of memory.`
# It goes on with `Tried to allocate` and a size. Older versions say `torch.cuda.OutOfMemoryError`, which
# is the same class. We quote it from PyTorch's
# [source](https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp).
#
# **The smallest program that does it.** We need no GPU to see that a step does not fit:
# `forecast_memory` counts its bytes without running it. The card of this example has 24 MiB.

# %%
card = 24 * 2**20  # bytes


def peak_of(batch):
    """Bytes of a training step of section 34's model with Adam, under bf16 autocast on a GPU."""
    inputs = torch.empty(batch, 512, device="meta")
    return forecast_memory(wide, inputs, precision="bf16").peak


print(f"4096 examples need {peak_of(4096) / 2**20:.0f} MiB of {card / 2**20:.0f} MiB")
assert peak_of(4096) > card
assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError

# %% [markdown]
# **Why.** Weights, gradients, optimizer state and saved activations have to fit at the same time.
# - If the *first* step fails, they are too large, or another process uses the GPU (`nvidia-smi`).
# - If memory grows in *each* step, your code probably keeps graphs: a running total of `loss` holds all
#   of them, and one of `loss.item()` none.
# - If only *evaluation* fails, check that it runs under `torch.inference_mode()` (section 34).
# - If the message says that much memory is reserved but unallocated, it may be fragmented. Set
#   `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, as the message says. (On RDNA4 it [has given
#   NaN](https://github.com/pytorch/pytorch/issues/195202).)
#
# **The fix.** Ask `amp-lab memory my_model.py:MODEL --input 8,3,224,224 --memory 24GiB` with your
# model and card: it forecasts each precision and the largest batch, and if that is too little, says
# what saves how much ([Will it fit?](../docs/your_model.md#will-it-fit)). Then use a batch that fits,
# and add up the gradients of several, which gives the gradient of the large one, up to rounding and
# without batch normalisation.


# %%
def gradient_of_batches(batches):
    """The gradient of the mean loss over batches of one size."""
    wide.zero_grad()
    for batch in batches:
        (wide(batch).square().mean() / len(batches)).backward()
    return wide[0].weight.grad.clone()


fits = largest_batch(wide, (512,), memory_bytes=card, precision="bf16")
print(f"{fits} examples fit")
assert peak_of(fits) <= card < peak_of(fits + 1)
large = torch.randn(8, 512)
torch.testing.assert_close(gradient_of_batches(large.split(4)), gradient_of_batches([large]))
loss = wide(large).square().mean()
total = 0.0 + loss  # a running total
assert total.requires_grad  # so it holds the graph
assert isinstance(loss.item(), float)

# %% [markdown]
# **Notice it earlier.** Run `amp-lab memory` before you rent the card.

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
