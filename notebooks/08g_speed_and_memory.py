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
# **What you'll do.** Look up a failure by its error message or its symptom.
#
# **What you'll learn.** You will know how to repair these failures:
# - [Autocast or the scaler is switched off](#Autocast-or-the-scaler-is-switched-off);
# - [A thread runs without autocast or in another dtype](#A-thread-runs-without-autocast-or-in-another-dtype);
# - [Autocast makes the model no faster](#Autocast-makes-the-model-no-faster);
# - [The memory is not halved](#The-memory-is-not-halved);
# - [Inference under autocast takes more memory](#Inference-under-autocast-takes-more-memory);
# - [A size is not a multiple of 16 or 8](#A-size-is-not-a-multiple-of-16-or-8);
# - [CUDA is out of memory](#CUDA-is-out-of-memory);
# - [Memory grows with each step or in evaluation](#Memory-grows-with-each-step-or-in-evaluation).
#
# **What you need.** You need no GPU. Read only the section about your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `make` returns a model and its optimizer. `message_of(call)`
# returns the error message that `call` raises, and `warnings_of(call)` returns the warnings.

# %% tags=["nbval-ignore-output"]
import math
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course import start
from course.failures import make, message_of, warnings_of
from course.measuring import saved_bytes

from amp_lab import forecast_memory, largest_batch

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of some programs below
wide, _ = make(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

# %% [markdown]
# ## Autocast or the scaler is switched off
#
# `AMP0031` <!-- failure
# messages = [
#   "CUDA is not available or torch_xla is imported. Disabling autocast.",
#   "torch.cuda.amp.GradScaler is enabled, but CUDA is not available. Disabling.",
# ]
# quoted = [
#   "User provided device_type of 'cuda', but CUDA is not available. Disabling",
#   "CPU Autocast only supports dtype of torch.bfloat16 currently.",
# ]
# symptoms = [
#   "autocast or the GradScaler is disabled, and training goes on in fp32",
#   "mixed precision is ignored on the CPU or on a machine without a GPU",
#   "`scaler.get_scale()` is 1, or the scaler is not enabled",
#   "on a Mac with mps the code falls into the cpu branch and trains in fp32",
#   "autocast('cuda') and GradScaler('cuda') silently do nothing without CUDA",
# ]
# words = """
# warning disabled ignored torch_xla TPU Colab Kaggle MPS XPU HPU CPU-only yolov5 Mac silently"""
# -->
#
# **What you see.** The log contains one of the warnings below. Training is as
# slow as in fp32.
#
# **A small example.** We enable autocast and the scaler for CUDA, and pass
# `dtype=torch.float32` to autocast for the CPU.

# %%
warned = warnings_of(lambda: (torch.autocast("cuda"), torch.amp.GradScaler("cuda")))
wrong_dtype = warnings_of(lambda: torch.autocast("cpu", dtype=torch.float32))
for line in [*warned.splitlines(), *wrong_dtype.splitlines()]:
    print(" ".join(line.split()))
assert ("CUDA is not available" in warned) is not torch.cuda.is_available()
assert "In CPU autocast, but the target dtype is not supported." in wrong_dtype

# %% [markdown]
# **Why.** You use autocast for CUDA, but PyTorch finds no GPU. Or you use autocast for another device with a dtype
# that autocast does not support there. In both cases, autocast warns and is disabled, so training continues in fp32.
# Without a GPU, a scaler for CUDA also warns and is disabled.
#
# If an `"xpu"` or `"mps"` device is missing, PyTorch does not warn. Autocast stays enabled, but tensors on the CPU
# stay in fp32. <!-- tests/notebooks/test_08g_speed_and_memory.py -->
#
# **The fix.** Pass the device type of the tensors and a 16-bit dtype: `torch.autocast(x.device.type,
# dtype=torch.bfloat16)`. If `torch.cuda.is_available()` is False on a machine with an NVIDIA or AMD GPU,
# you may need [another build of PyTorch](../docs/hardware.md#install-another-build-of-torch) that fits the GPU and its
# driver.


# %%
with torch.autocast(x.device.type, dtype=torch.bfloat16):
    assert (x @ x.T).dtype is torch.bfloat16
with torch.autocast("xpu", dtype=torch.float16):  # neither a warning nor an effect
    assert torch.is_autocast_enabled("xpu")
    assert (x @ x.T).dtype is torch.float32

# %% [markdown]
# **Notice the failure earlier.** Check `torch.is_autocast_enabled(x.device.type)` inside the block.
# <!-- tests/notebooks/test_08g_speed_and_memory.py -->

# %% [markdown]
# ## A thread runs without autocast or in another dtype
#
# `AMP0032` <!-- failure
# symptoms = [
#   "autocast is off in a thread, such as that of a server, a callback or a ThreadPoolExecutor",
#   "nn.DataParallel ignores autocast, or computes in fp16 in place of bf16",
#   "bf16 overflows only in DataParallel, with several GPUs in one process",
#   "the output of a DataParallel replica has another dtype than autocast",
# ]
# words = "threading thread-local ThreadPoolExecutor to_thread FastAPI Gradio replicas parallel_apply"
# -->
#
# **What you see.** A model that runs in a thread is as slow as in fp32, or computes in the wrong 16-bit
# dtype.
#
# **A small example.** We call two functions in a thread, from inside an fp16 block.
# The second function enters autocast itself, but does not pass a dtype.


# %%
def in_a_thread(function):
    """What `function()` returns when another thread calls it inside an fp16 block."""
    with torch.autocast("cpu", dtype=torch.float16), ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def enter_again(**options):
    with torch.autocast("cpu", **options):
        return (x @ x.T).dtype


found = in_a_thread(lambda: (x @ x.T).dtype), in_a_thread(enter_again)
print("in the thread:", *found)
assert found == (torch.float32, torch.bfloat16)

# %% [markdown]
# **Why.** Autocast and its dtype are set separately in each thread. A new thread starts with autocast off and with
# autocast's default dtype, which is fp16 on CUDA. With several GPUs, `nn.DataParallel` starts a thread for each GPU.
# Each thread enters autocast without a dtype, so bf16 becomes fp16.
# <!-- tests/notebooks/test_08g_speed_and_memory.py -->
#
# **The fix.** Enter autocast with its dtype inside the function that the thread runs, or decorate the
# model's `forward` with `torch.autocast`. Replace `nn.DataParallel` with `DistributedDataParallel`, which uses
# processes ([notebook 11](11_scale_out.ipynb#DDP)).

# %%
assert in_a_thread(lambda: enter_again(dtype=torch.float16)) is torch.float16
decorated = torch.autocast("cpu", dtype=torch.float16)(lambda: (x @ x.T).dtype)
assert in_a_thread(decorated) is torch.float16

# %% [markdown]
# ## Autocast makes the model no faster
#
# `AMP0033` <!-- failure
# symptoms = [
#   "AMP or fp16 training is slower than fp32", "a step is no faster than before, or even slower",
#   "mixed precision gives no speed-up, an epoch takes the same time",
#   "`--fp16`, `--amp` or `precision=16` makes no difference to the speed",
#   "inference is not faster, or slower, with autocast",
#   "GPU utilisation is low with AMP, or the same as in fp32",
#   "fp16 is no faster with channels_last, cudnn.benchmark or compile",
#   "a profile of a server or a sampler in fp16 is full of casts and copies",
#   "an epoch with amp takes longer than a normal one, 0.22 s instead of 0.11 s per batch",
#   "precision 16 and precision 32 need the same time per epoch on an A40 or RTX 30",
#   "iterations per second drop when fp16 is on, and go up again when I turn it off",
#   "autocast costs time per iteration in inference, casting the model once with half() is quicker",
#   "only 1.2 or 1.5 times the speed in half precision, is that normal",
#   "an epoch with apex O1 or amp takes just as long, only some memory is saved",
#   "forward of a T5 or BERT after model.half() takes more ms than in full precision",
#   "the GPU is not faster with --amp because the data loader or a small batch limits it",
# ]
# words = """
# speedup slowdown _to_copy profiler utilization data loader bottleneck convolution quicker
# longer throughput it/s seconds per iteration images per second TF32 ms pass forward apex O1"""
# -->
#
# **What you see.** A step takes as long as in fp32, or longer. A profile shows many casts (`_to_copy`).
#
# **A small example.** We count the ops of five small layers.


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
# **Why.** AMP speeds up large matrix multiplications and convolutions on hardware with fast 16-bit units. Small layers
# can become slower, because autocast adds casts of weights, biases and inputs. If a GPU mostly waits for the data
# loader or the CPU, faster matmuls [save little
# time](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html#speedup-with-amp-is-minor).
#
# Other causes:
# - **The hardware** has no fast units for this dtype ([known
#   problems](19_choose_your_precision.ipynb#Known-problems-of-each-device)).
# - **Frozen weights**, and under `torch.inference_mode()` all weights, are cast again at each use.
# - **Large ops stay in fp32**. `amp-lab xray` lists them ([notebook 09](09_xray_your_model.ipynb)).
# - **Sizes** are [not multiples of 8](#A-size-is-not-a-multiple-of-16-or-8).
# - **Convolutions** do not use
#   [`channels_last`](https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html).
# - **The fp32 run** already used [TF32](19_choose_your_precision.ipynb#What-fp32-means), which can be faster than fp32.
# - **The clock** was read [before the GPU had finished](04_fp32_vs_amp.ipynb#How-not-to-measure).
#
# **The fix.** Time one step in each precision, on a batch that is already on the GPU. If AMP is faster on this batch,
# another part of the loop limits the speed, such as the data loader. If AMP is not faster, try larger batches and the
# dtype that `amp-lab doctor` recommends. For inference, cast the weights once. <!-- tests/cli/test_cli.py -->
#
# **Not this.** Do not avoid the casts by a call of `model.half()` before training: fp16 weights lose small updates.

# %%
frozen = nn.Linear(16, 16).requires_grad_(False)
with CountOps() as again, torch.autocast("cpu", dtype=torch.bfloat16):
    frozen(inputs), frozen(inputs)
small.bfloat16()
with CountOps() as once:
    small(inputs.bfloat16())
assert (again.casts, once.casts) == (6, 1)  # the only cast is that of the inputs
assert torch.tensor(1.0).half() + 1e-4 == 1  # an update of an fp16 weight

# %% [markdown]
# ## The memory is not halved
#
# `AMP0034` <!-- failure
# symptoms = [
#   "training with AMP uses as much memory as before, or more",
#   "fp16 or bf16 does not halve the GPU memory",
#   "GPU memory usage of training is the same with and without autocast",
#   "mixed precision training takes 16 or 18 bytes per parameter",
#   "the batch size can grow by only ten percent with mixed precision",
#   "the recipe of the tutorial reports a higher peak memory with use_amp than without",
#   "fine-tuning a transformer with fp16 takes more GPU memory than in fp32",
#   "are gradients stored in 2 or 4 bytes per parameter under AMP",
#   "the VRAM is as full as before with the fp16 switch",
#   "with precision bf16 the parameters print as float32 and the memory saving is small",
#   "fp16 reduces the memory by a few percent only",
# ]
# words = """
# VRAM usage reduce half saves activations Adam states large model max_memory_allocated peak
# halve fuller GB readme table Lightning"""
# -->
#
# **What you see.** The peak memory of a training step is about the same as in fp32, or higher.
#
# **A small example.** The weights are large, and the batch has only one sample. We add up the tensors that the forward
# pass saves for the backward pass, without the parameters.


# %%
def saved(batch, enabled):
    """Bytes that the forward pass of `wide` saves, with autocast on or off."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        return saved_bytes(wide, lambda model: model(batch).square().mean())


single = torch.ones(1, 512)
fp32, amp = saved(single, enabled=False), saved(single, enabled=True)
print(f"batch of 1: fp32 {fp32 / 1024:.0f} KiB, autocast {amp / 1024:.0f} KiB")
assert amp > 50 * fp32

# %% [markdown]
# **Why.** Autocast makes many activations smaller, but not the weights, gradients and optimizer state. With Adam,
# these take 16 bytes per parameter in fp32. Autocast also adds 16-bit copies of weights, so a large model with a small
# batch can need more memory than in fp32.
# <!-- tests/notebooks/test_08g_speed_and_memory.py -->
#
# **The fix.** Use a larger batch to gain more from AMP, because AMP saves memory only on activations. If activations
# fill the memory, use gradient checkpointing. If weights and Adam's state fill the memory, use an optimizer with less
# state, LoRA or sharding (FSDP). <!-- tests/remedies/test_memory_remedies.py -->
#
# **Not this.** Do not train with `model.bfloat16()` to save memory, because the optimizers of `torch.optim` then round
# small updates away ([notebook 16](16_low_precision_state.ipynb#Weights-in-bf16)).

# %%
many = torch.ones(2048, 512)
fp32, amp = saved(many, enabled=False), saved(many, enabled=True)
print(f"batch of 2048: fp32 {fp32 / 2**20:.1f} MiB, autocast {amp / 2**20:.1f} MiB")
assert 0.5 < amp / fp32 < 0.6
assert torch.tensor(1.0).bfloat16() + 1e-3 == 1  # an update of a bf16 weight


# %% [markdown]
# ## Inference under autocast takes more memory
#
# `AMP0171` <!-- failure
# symptoms = [
#   "inference inside torch.autocast has a higher max memory than the float run",
#   "evaluation runs out of memory with no_grad and autocast around the whole dataloader loop",
#   "inference uses more memory with autocast than without",
#   "memory grows under `no_grad` inside the autocast block",
#   "a loop of forward passes in the validation step leaks memory only with precision=16 or AMP on",
#   "out of memory in `generate` or in sampling only with fp16 or autocast",
#   "evaluation with `--fp16` needs more memory than in fp32",
#   "sampling takes more VRAM inside the autocast context than the full-precision model",
# ]
# words = "no_grad cache_enabled clear_autocast_cache weights twice sampling serving"
# -->
#
# **What you see.** A model needs more memory for inference with autocast than in fp32. The memory grows with
# each layer ([a report](https://github.com/ecmwf/anemoi-core/issues/134)).
#
# **A small example.** We run a layer twice inside one block and count the casts. If
# the second pass makes fewer casts, autocast has kept copies from the first.


# %%
def casts_of_two_passes(mode, **options):
    layer = nn.Linear(2, 2)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, **options)
    with mode, autocast, CountOps() as counted:
        layer(x), layer(x)
    return counted.casts


kept = casts_of_two_passes(torch.no_grad())
freed = casts_of_two_passes(torch.inference_mode())
print(f"casts: {kept} under no_grad, {freed} under inference_mode")
assert kept == 4  # weight and bias once, the input twice
assert freed == 6  # all of them twice

# %% [markdown]
# **Why.** The fp32 weights stay in memory. In eager mode under `torch.no_grad()`, autocast by default also caches
# 16-bit copies of weights that require a gradient. These copies stay in memory until the outermost autocast block
# ends.
# <!-- tests/notebooks/test_02_autocast_dtypes.py -->
#
# **The fix.** Use `torch.inference_mode()` or `torch.autocast(…, cache_enabled=False)`. Autocast then keeps no copies.
# If you use the model only for inference, you can also cast it once with `model.bfloat16()`. This halves the memory of
# fp32 weights ([notebook 18](18_inference_and_export.ipynb#Ways-to-run-it)).
#
# **Not this.** `torch.cuda.empty_cache()` [releases only unused
# memory](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html), so it does not
# free the copies.

# %%
assert casts_of_two_passes(torch.no_grad(), cache_enabled=False) == freed
assert all(p.nbytes == 2 * p.numel() for p in nn.Linear(2, 2).bfloat16().parameters())


# %% [markdown]
# ## A size is not a multiple of 16 or 8
#
# `AMP0044` <!-- failure
# messages = [
#   "Expected self.size(1) to be divisible by 16, but got self.size(1)=",
#   "Expected both dimensions of mat2 to be {name} by 16 but got",
#   "stride along {any} dim to be multiple of 16 bytes, got",
# ]
# quoted = [
#   "Expected trailing dimension of {name} to be divisible by 16",
#   "Expected mat_b shape to be divisible by 16", "mat2 shape ({any}) must be divisible by 16",
#   "FP8 execution requires the product of all dimensions except the last to be divisible by",
#   "FP8 execution requires 2D input matrices with height divisible by 8",
#   "Tensor dimensions are not compatible for FP8 execution", "MXFP8 requires tensor dims",
#   "is not divisible by weight quantization block_{name} = {n}", "dims=[{n}, {n}] not divisible by",
# ]
# symptoms = [
#   "FP8 fails for some layers or batch sizes",
#   "a size is not a multiple of 8 or 16 in fp16 or FP8",
#   "pad the vocabulary or the batch to a multiple of 8, 16 or 64 for fp16 tensor cores",
#   "a linear layer with 10 or 15 outputs cannot run in FP8",
#   "vocabulary of 50257 tokens is slow in half precision, 50304 is quicker",
# ]
# words = """
# divisible padding alignment shape torchao Transformer Engine vLLM SGLang _scaled_mm 50257 50304
# outputs classes odd"""
# -->
#
# **What you see.** A matmul in FP8 raises one of the messages below.
#
# **A small example.** Tensors on the `meta` device have no data, but PyTorch checks their sizes
# [as for CUDA](https://github.com/pytorch/pytorch/blob/main/torch/_meta_registrations.py). We try three FP8
# matmuls: one with an inner size of 100, one with the 50257 columns of GPT-2's vocabulary, and a grouped
# matmul.


# %%
def fp8(rows, columns):
    return torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")


def product_shape(rows, inner, columns):
    one = torch.ones((), device="meta")  # the scale of both
    return torch._scaled_mm(fp8(rows, inner), fp8(columns, inner).T, one, one).shape


scales = torch.ones(32, device="meta"), torch.ones(64, device="meta")
print(message_of(lambda: product_shape(32, 100, 64)))
print(message_of(lambda: product_shape(32, 64, 50257)))
print(message_of(lambda: torch._scaled_grouped_mm(fp8(32, 100), fp8(64, 100).T, *scales)))

# %% [markdown]
# **Why.** In an FP8 matmul, some sizes must be multiples of a certain number, often 16. In fp16 and bf16,
# a matmul with another size runs, but may be slower: NVIDIA
# [recommends](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#requirements-tc)
# multiples of 8, and on an A100 multiples of 64.
#
# **The fix.** Pad the vocabulary to a multiple of 64. To train in FP8, also drop an incomplete last batch with
# `drop_last=True`. In the collate function, pad the tokens to a multiple of 16 if a tensor or a row has one scale, or
# to a multiple of [32](https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/csrc/quantizer.cpp)
# for MXFP8. Or keep the layer in bf16. <!-- tests/notebooks/test_08g_speed_and_memory.py --> If [vLLM](https://github.com/vllm-project/vllm/issues/42384) or
# [SGLang](https://github.com/sgl-project/sglang/issues/3345) refuses the sizes of an FP8 checkpoint, try a smaller
# tensor-parallel size.
#
# If you pad the vocabulary, leave out the logits of the padding when you choose a token.

# %%
padded = math.ceil(50257 / 64) * 64
assert product_shape(33, 112, padded) == (33, 50304)  # any number of rows
head, larger = (nn.Linear(2, size, bias=False) for size in (5, 8))
with torch.no_grad():
    larger.weight[:5] = head.weight
torch.testing.assert_close(larger(x)[:, :5], head(x))


# %% [markdown]
# ## CUDA is out of memory
#
# `AMP0045` <!-- failure
# quoted = [
#   "CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError",
#   "HIP out of memory", "XPU out of memory", "MPS backend out of memory",
#   "CUDA error: out of memory", "CUDA driver error: out of memory",
#   "cuda runtime error (2) : out of memory", "CUDA ran out of memory outside PyTorch's allocator",
#   "Allocation on device {any} would exceed allowed memory. (out of memory)",
#   "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
# ]
# symptoms = [
#   "out of memory (OOM) in fp16 or bf16 too", "the largest batch that fits into GPU memory",
#   "GPU memory is full, the model does not fit", "how much VRAM does fp16 or bf16 training need",
#   "how much VRAM is needed to fine-tune a 7B, 8B or 13B model",
#   "full fine-tuning on a 24 GB card such as a 3090 or 4090",
#   "the model does not fit on an 80 GB card, how was it trained",
#   "batch size 1 does not fit into 24 GB in bf16",
# ]
# words = """
# OOM VRAM OutOfMemoryError GiB capacity allocated batch size checkpointing smaller fit XL train
# without 80GB 24GB"""
# -->
#
# **What you see.** A step raises `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …`. On other GPUs the
# message begins with `HIP`, `XPU` or [`MPS
# backend`](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/MPSAllocator.mm).
#
# **A small example.** `forecast_memory` counts the bytes of a step without running it. We
# assume a GPU with 24 MiB of memory. <!-- tests/tracing/test_memory.py -->


# %%
def peak_of(batch):
    """Bytes of a training step of `wide` with Adam, under bf16 autocast on a GPU."""
    inputs = torch.empty(batch, 512, device="meta")
    return forecast_memory(wide, inputs, precision="bf16").peak


memory = 24 * 2**20  # bytes
print(f"4096 examples need {peak_of(4096) / 2**20:.0f} MiB of {memory / 2**20:.0f} MiB")
assert peak_of(4096) > memory
assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError

# %% [markdown]
# **Why.** The weights, gradients, optimizer state and activations do not all fit into the free memory of the device.
#
# Look at when the error occurs to find its cause:
# - **In the forward or backward pass**: the activations, because the batch, image or sequence is too large.
# - **In the first `optimizer.step()`**: the optimizer state, which Adam allocates there.
# - **After many steps, or in evaluation**: [memory grows](#Memory-grows-with-each-step-or-in-evaluation).
# - **Only after resuming**: the checkpoint is also on the GPU. <!-- tests/notebooks/test_08g_speed_and_memory.py -->
# - **With much memory "reserved but unallocated"**: the memory may be fragmented. Set
#   [`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`](../docs/memory_in_practice.md#pytorch_cuda_alloc_conf-or-pytorch_alloc_conf).
#
# **The fix.** Use smaller batches of equal size and accumulate gradients: divide each mean loss by the number of
# batches in a step. Or use gradient checkpointing. If a batch of one does not fit, use LoRA or sharding. Load
# checkpoints with `map_location="cpu"`. `amp-lab memory my_model.py:MODEL --input 8,3,224,224 --memory 24GiB`
# forecasts the largest batch. <!-- tests/tracing/test_largest_batch.py -->
# <!-- tests/remedies/test_memory_remedies.py -->
#
# **Not this.** `torch.cuda.empty_cache()` in each step rarely helps, because PyTorch [already reuses cached
# memory](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html).

# %%
fits = largest_batch(wide, (512,), memory_bytes=memory, precision="bf16")
print(f"{fits} examples fit")
assert peak_of(fits) <= memory < peak_of(fits + 1)

# %% [markdown]
# ## Memory grows with each step or in evaluation
#
# `AMP0170` <!-- failure
# quoted = ["return torch.cat((tensor1, tensor2), dim=0){any}out of memory"]
# symptoms = [
#   "GPU memory grows with each iteration or epoch until it is full", "memory leak in a loop",
#   "memory runs out only in evaluation or validation",
#   "evaluation collects logits until memory is full", "a list of losses keeps memory",
#   "Trainer runs out of memory in `evaluate` or `compute_metrics`",
#   "each validation adds some GB of GPU memory",
#   "RAM of the machine, not of the GPU, creeps up during evaluation",
#   "the memory explodes in the middle of the validation loop",
#   "model.eval() takes more and more GPU memory",
#   "allocated memory climbs with each training step until it is full",
#   "validation is out of memory in the first epoch, training fits",
#   "after a validation or a saved checkpoint the memory rises by some GB and never falls back",
# ]
# words = """
# OOM increases accumulate eval_accumulation_steps preprocess_logits_for_metrics detach item leak
# creeps RAM gc.collect validation batches no_grad climbs allocation full"""
# -->
#
# **What you see.** Each training step, or each batch of an evaluation, needs more memory than the previous one.
#
# **A small example.** We evaluate three batches, and keep the loss of each as a tensor or as
# a number. `held_by` counts the tensors that the autograd graphs still hold at the end.


# %%
alive = weakref.WeakSet()


class Saved:
    """A tensor that a graph holds for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()
        alive.add(self)


def held_by(collect):
    """How many tensors graphs hold if we keep `collect(logits)` of three batches."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        kept.extend(collect(wide(torch.ones(4, 512))) for _ in range(3))
    return len(alive)


losses = held_by(lambda logits: logits.mean())
numbers = held_by(lambda logits: logits.mean().item())
print(f"tensors held by three losses: {losses}, by three numbers: {numbers}")
assert losses > numbers == 0

# %% [markdown]
# **Why.** If you keep a loss or an output that requires a gradient, its autograd graph stays in memory too. Until
# `backward()`, this graph holds activations. Even without a graph, the logits that you keep can fill the memory.
#
# **The fix.** Evaluate under `torch.inference_mode()`, and add up `loss.item()`. Keep `logits.argmax(-1).cpu()`
# instead of the logits. In [transformers' Trainer](https://huggingface.co/docs/transformers/main_classes/trainer), set
# `eval_accumulation_steps`, or reduce the logits in `preprocess_logits_for_metrics`.
#
# **Not this.** `model.eval()` alone does not stop PyTorch from building graphs.

# %%
assert held_by(lambda logits: logits.mean().backward() or logits) == 0
assert held_by(lambda logits: logits.argmax(-1)) == 0
with torch.inference_mode():
    assert held_by(lambda logits: logits) == 0
assert wide.eval()(torch.ones(1, 512)).requires_grad

# %% [markdown]
# ## Further reading
#
# - [CUDA's memory management](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management):
#   what PyTorch allocates, reserves and caches.
