# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Replace ops and devices that refuse half precision
#
# **What you'll do.** Look up a failure by its error message or its symptom.
#
# **What you'll learn.** You will know how to repair these failures:
# - [BCELoss is refused on a GPU](#BCELoss-is-refused-on-a-GPU);
# - [An op does not exist in half precision](#An-op-does-not-exist-in-half-precision);
# - [NumPy does not support bf16](#NumPy-does-not-support-bf16);
# - [Autocast refuses the device or its dtype](#Autocast-refuses-the-device-or-its-dtype);
# - [The GPU has no bf16](#The-GPU-has-no-bf16);
# - [An FFT is refused in half precision](#An-FFT-is-refused-in-half-precision);
# - [MPS has no float64](#MPS-has-no-float64);
# - [Flash attention refuses fp32](#Flash-attention-refuses-fp32);
# - [Attention finds no kernel](#Attention-finds-no-kernel).
#
# **What you need.** You need no GPU. Read only the section about your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `message_of(call)` returns the error message that `call` raises,
# and `warnings_of(call)` returns the warnings.

# %% tags=["nbval-ignore-output"]
from contextlib import nullcontext
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from course import start
from course.failures import cuda_rules, message_of, warnings_of

from amp_lab import xray

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## BCELoss is refused on a GPU
#
# `AMP0022` <!-- failure
# messages = ["torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."]
# symptoms = [
#   "BCELoss raises an error under mixed precision but runs in fp32",
#   "binary_cross_entropy is unsafe to autocast, but my model ends with a sigmoid",
#   "BCELoss works under autocast on the CPU and fails on the GPU",
#   "after replacing BCELoss by BCEWithLogitsLoss the loss stays above 0.3",
#   "sigmoid and BCE in the forward pass stop under autocast, which loss do I take instead",
# ]
# words = "BCE sigmoid binary segmentation detector YOLO objectness DETR matcher GAN discriminator"
# -->
#
# **What you see.** Under autocast on CUDA or XPU, the loss raises
# `torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.` Under autocast on a CPU or on
# MPS, the loss raises no error. <!-- tests/notebooks/test_08f_ops_and_devices.py -->
#
# **A small example.** `cuda_rules` runs CUDA's autocast on fake tensors, which have no data and
# need no GPU.

# %%
with cuda_rules():
    p = torch.rand(4, device="cuda").sigmoid()
    message = message_of(lambda: nn.BCELoss()(p, p)).splitlines()[0]
    assert p.dtype is torch.float32  # refused all the same
print(message)
if torch.cuda.is_available():  # the real thing
    with torch.autocast("cuda", dtype=torch.float16):
        p = torch.rand(4, device="cuda")
        assert message in message_of(lambda: nn.BCELoss()(p, p))

# %% [markdown]
# **Why.** For a target of 1 and a small probability p in fp16, the gradient -1/p can overflow. For this reason,
# autocast on CUDA and XPU [refuses the loss](https://docs.pytorch.org/docs/stable/amp.html), even for fp32
# inputs.
#
# **The fix.** Remove the sigmoid, and pass the logits to `nn.BCEWithLogitsLoss`. If you must keep
# `nn.BCELoss`, compute it inside `with torch.autocast(device_type, enabled=False):` from the probabilities
# `logits.float().sigmoid()`. <!-- tests/notebooks/test_08f_ops_and_devices.py -->
#
# **Not this.** Do not pass probabilities to `nn.BCEWithLogitsLoss`, because it applies a second sigmoid. Even a
# perfect prediction then has a loss of at least 0.31.

# %%
with cuda_rules():
    logits = torch.rand(4, device="cuda").half()
    assert F.binary_cross_entropy_with_logits(logits, logits).dtype is torch.float32
unlikely = torch.tensor([2.0**-24], requires_grad=True)  # fp16 can hold this probability
F.binary_cross_entropy(unlikely, torch.ones(1)).backward()
assert unlikely.grad.half().isinf()  # but not its gradient
perfect, target = torch.ones(1), torch.ones(1)
assert F.binary_cross_entropy(perfect, target) == 0
assert F.binary_cross_entropy_with_logits(perfect, target) > 0.31  # the second sigmoid

# %% [markdown]
# ## An op does not exist in half precision
#
# `AMP0023` <!-- failure
# messages = [
#   "\"{name}\" not implemented for 'half'", "\"{name}\" not implemented for 'Bfloat16'",
#   "quantile() input tensor must be either float or double dtype",
#   "{name}: Low precision dtypes not supported. Got {dtype}",
#   "This function doesn't handle types other than float and double",
#   "view_as_complex is only supported for half, float and double tensors, but got a tensor of",
# ]
# quoted = [
#   "expected a tensor with 2 or more dimensions of float, double, cfloat or cdouble types",
#   "Expected both inputs to be Half, Float or Double tensors but got BFloat16",
#   "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS",
# ]
# symptoms = [
#   "SVD, QR, Cholesky or the inverse of a matrix fails in fp16 or bf16",
#   "interpolate with antialias or bicubic fails in half precision",
#   "a CUDA extension fails with mixed precision and works in fp32",
#   "an op is still refused in half precision after I called .float()",
#   "quantile, cdist or the CTC loss is refused in half precision",
#   "an op such as cumsum, sort, grid_sample, SVD or inverse has no half kernel, what now",
#   "loading a model in bf16 fails in its initialization, erfinv or trunc_normal_ is missing",
# ]
# words = """
# linalg eigh det pinv lstsq matrix_rank pca_lowrank pdist upsample_bilinear2d erfinv
# trunc_normal_ compute_indices_weights_cubic gamma dirichlet sparse torch_scatter torch_cluster
# kernel rotary rope polar missing unsupported op initialization"""
# -->
#
# **What you see.** An op raises one of these messages, possibly with other names and dtypes:
# - `"lu_cpu" not implemented for 'Half'`
# - `linalg.inv: Low precision dtypes not supported. Got Half`
# - `quantile() input tensor must be either float or double dtype`
#
# **A small example.** We pass 16-bit tensors to six ops. The last op runs under CUDA's autocast rules.

# %%
half, brain = torch.eye(2).half(), torch.eye(2).bfloat16()
for call in (
    lambda: torch.linalg.det(half),
    lambda: torch.cdist(brain, brain),
    lambda: torch.linalg.inv(half),
    lambda: torch.linalg.lstsq(half, half),
    lambda: torch.view_as_complex(brain),
):
    print(message_of(call))
with cuda_rules():
    print(message_of(lambda: torch.rand(2, device="cuda").half().quantile(0.5)))

# %% [markdown]
# **Why.** The op does not support this dtype on this device. Under autocast, the layer before the op often
# returns a 16-bit tensor. Autocast casts this tensor to fp32 for the ops on the [fp32 list of the
# device](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference), but not for this op.
#
# **The fix.** Call `.float()` on the input of the op. If the op is still refused under autocast, also run it inside
# `with torch.autocast(device_type, enabled=False):`. In this case, autocast probably casts the inputs to 16 bits
# again, as in `torch.sparse.mm`. If the op initializes weights, create the model in fp32 and then cast the model.

# %%
for op in (torch.linalg.det, torch.linalg.inv):
    assert op(half.float()).dtype is torch.float32
adjacency, features = torch.eye(2).to_sparse(), torch.ones(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.sparse.mm(adjacency.float(), features.float()).dtype is torch.bfloat16
    with torch.autocast("cpu", enabled=False):
        assert torch.sparse.mm(adjacency.float(), features.float()).dtype is torch.float32


# %% [markdown]
# ## NumPy does not support bf16
#
# `AMP0024` <!-- failure
# messages = ["Got unsupported ScalarType BFloat16", "Unsupported dtype in DLTensor."]
# quoted = ["can't convert np.ndarray of type {any}Bfloat16. The only supported types are"]
# symptoms = [
#   "a bf16 tensor cannot be converted to a NumPy array",
#   "matplotlib, sklearn or a metric fails on a bf16 prediction",
#   "embeddings from a model in bf16 cannot be saved with np.save",
#   "torch.from_numpy refuses a bfloat16 array that comes from JAX",
#   "saving embeddings, plotting a loss or computing a metric from a bf16 tensor fails at .numpy()",
# ]
# words = """
# numpy array asarray plot matplotlib pandas sklearn metric ml_dtypes jax dlpack fp8 TypeError
# embeddings reranker .numpy() argsort save"""
# -->
#
# **What you see.** `.numpy()`, or a function that calls it, raises `Got unsupported ScalarType BFloat16`.
#
# **A small example.** We convert a prediction to an array for a plot or a metric.

# %%
with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
    prediction = nn.Linear(2, 2)(torch.ones(1, 2))
print(message_of(prediction.numpy))
print(message_of(lambda: np.from_dlpack(prediction)))

# %% [markdown]
# **Why.** NumPy itself has no bf16 or FP8 dtype. <!-- tests/notebooks/test_08f_ops_and_devices.py -->
#
# **The fix.** Convert to fp32 first: `prediction.detach().float().cpu().numpy()`. For a NumPy array in bf16,
# such as one from JAX, write `torch.from_numpy(array.astype("float32")).bfloat16()`.
#
# **Not this.** Do not convert with `.half().numpy()`: numbers of 65520 or more become infinite.

# %%
assert prediction.float().numpy().dtype == "float32"
assert torch.tensor([1e6]).bfloat16().half().isinf()
assert (prediction.half().numpy() + 1).dtype == "float16"

# %% [markdown]
# ## Autocast refuses the device or its dtype
#
# `AMP0036` <!-- failure
# messages = [
#   "User specified an unsupported autocast device_type",
#   "unknown device type for autocast in get_autocast_dispatch_key_from_device_type",
#   "Expected `device_type` of type `str`, got",
#   "In {name} autocast, but the target dtype is not supported. Disabling autocast.",
#   "{name} Autocast only supports dtypes of torch.bfloat16, torch.float16 currently.",
# ]
# quoted = [
#   "RuntimeError: unsupported scalarType", "{name} Autocast only supports dtype of {dtype} currently.",
#   "User specified autocast device_type must be",
#   "Currently, AutocastCPU only support Bfloat16 as the autocast_cpu_dtype",
#   "Tried to use AMP with the `{name}` backend, but the backend has not registered a module",
# ]
# symptoms = [
#   "torch.autocast does not work on a Mac",
#   "autocast switches itself off with a warning about the target dtype",
#   "autocast with dtype float32 works on CUDA and is disabled on CPU, MPS or XPU",
#   "autocast does not accept cuda:0", "autocast fails on the meta device",
#   "which device_type do I pass to autocast for an AMD or Intel GPU",
#   "autocast on an Intel or AMD GPU: which device_type, cuda, xpu or hip",
#   "bf16 autocast on MPS falls back or is refused, float16 works",
# ]
# words = "mps xpu npu hip rocm meta hpu privateuseone device_type maybe_autocast rotary nnsight"
# -->
#
# **What you see.** You get one of these messages:
# - `User specified an unsupported autocast device_type 'meta'`, or another device type
# - `unsupported scalarType`
# - ``Expected `device_type` of type `str`, got``, followed by a type
# - `In MPS autocast, but the target dtype is not supported. Disabling autocast.` (a warning)
# - `unknown device type for autocast`, from `torch.is_autocast_enabled`
#
# **A small example.** We make three calls for the device `meta` (tensors without data). Then we
# pass a `torch.device` instead of a string, and ask for fp32 on MPS.

# %%
print(message_of(lambda: torch.autocast("meta", dtype=torch.bfloat16)))
print(message_of(lambda: torch.autocast("meta", enabled=False)))  # no default dtype to look up
print(message_of(lambda: torch.is_autocast_enabled("meta")))
print(message_of(lambda: torch.autocast(torch.device("cpu"))))
print(warnings_of(lambda: torch.autocast("mps", dtype=torch.float32)))

# %% [markdown]
# **Why.** `torch.autocast` takes the type of a device as a string, such as `"cuda"`, `"cpu"`, `"mps"` or
# `"xpu"`. Some types, such as `"meta"`, do not support autocast. On a CPU, MPS or XPU, the dtype has to be fp16 or
# bf16. With another dtype, autocast warns and switches itself off. <!-- tests/notebooks/test_08f_ops_and_devices.py
# -->
#
# **The fix.** Pass `tensor.device.type`, not `tensor.device`. On an AMD GPU the type is
# [`"cuda"`](https://docs.pytorch.org/docs/stable/notes/hip.html), not `"hip"`. If autocast refuses fp16 or bf16 on a
# CPU or on MPS, update torch. To run a block in fp32, write `enabled=False` instead of `dtype=torch.float32`, and call
# `.float()` on its inputs. To find out whether a device type has autocast, call
# `torch.amp.is_autocast_available(device_type)`. If the message contains `has not registered a module`, import or
# update the package of the backend. <!-- tests/notebooks/test_08f_ops_and_devices.py -->


# %%
def fp32_block(device_type):
    """Autocast off, where there is one to be switched off."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


for device_type in ("meta", "cpu"):
    layer, x = nn.Linear(2, 2, device=device_type), torch.ones(1, 2, device=device_type)
    with torch.autocast("cpu", dtype=torch.bfloat16), fp32_block(device_type):
        assert layer(x).dtype is torch.float32
assert warnings_of(lambda: torch.autocast("mps", enabled=False)) == ""


# %% [markdown]
# ## The GPU has no bf16
#
# `AMP0160` <!-- failure
# messages = ["Current CUDA Device does not support bfloat16. Please switch dtype to float16."]
# quoted = [
#   "Cannot select: intrinsic %llvm.amdgcn.fdot2.bf16.bf16", "does not support bfloat16 compilation",
#   "CUBLAS_STATUS_NOT_SUPPORTED when calling {any}CUDA_R_16BF",
#   "Feature {any}.bf16{any} requires .target sm_80 or higher",
#   "Sparse operations with CUDA tensors of BFloat16 type are not supported on GPUs with compute",
#   "sparse_mm: CUDA BFloat16 requires compute", "type at::BFloat16 and output type float is only",
# ]
# symptoms = [
#   "bf16 is slower than fp32 on a T4 or V100",
#   "torch.cuda.is_bf16_supported returns True on a T4, although it has no bf16",
#   "bf16 crashes on an old GPU such as an M40, P40, P100 or GTX 1080",
#   "Triton cannot compile a bf16 kernel on a T4",
#   "which precision for Colab's T4 or Kaggle's P100",
#   "does a V100, T4, RTX 2080 or P100 support bf16",
#   "a config has bfloat16 hardcoded, how do I use half on a V100",
#   "is_bf16_supported is True on a Radeon RX 6000 and the bf16 kernel does not compile",
# ]
# words = """
# RTX 2080 Turing Volta Pascal Maxwell pre-Ampere emulated emulation cublasGemmStridedBatchedEx
# ptxas bf16 support GPU Kaggle Colab RDNA Radeon LLVM fdot2"""
# -->
#
# **What you see.** On a GPU without bf16, bf16 may be slower than fp32, or the program raises one of these errors:
# - `Current CUDA Device does not support bfloat16. Please switch dtype to float16.`
# - `CUBLAS_STATUS_NOT_SUPPORTED when calling`, followed by a function with `CUDA_R_16BF` among its arguments
#   ([on an M40](https://github.com/opendatalab/MinerU/issues/1508), [on a
#   P100](https://github.com/pytorch/pytorch/issues/57773))
# - `Feature '.bf16' requires .target sm_80 or higher`, from Triton, which `torch.compile` uses ([on a
#   T4](https://github.com/unslothai/unsloth/issues/501))
#
# **A small example.** To imitate a GPU without any bf16, even emulated, we replace two PyTorch functions.

# %%
without_bf16 = mock.patch.multiple(
    torch.cuda, is_available=lambda: True, is_bf16_supported=lambda: False
)
with without_bf16:
    print(message_of(lambda: torch.autocast("cuda", dtype=torch.bfloat16)))

# %% [markdown]
# **Why.** NVIDIA GPUs support bf16 from compute capability 8.0 (Ampere) on. On a V100, T4 or RTX 20, PyTorch [emulates
# bf16](../docs/hardware.md#t4-v100-and-rtx-20) slowly, and some libraries refuse bf16. AMD's Radeon RX 5000 and RX
# 6000 do not [support bf16](https://rocm.docs.amd.com/projects/HIP/en/docs-6.3.2/reference/hardware_features.html).
#
# **The fix.** If the GPU is fast in fp16, use fp16, and train with a `GradScaler`. If the GPU is slow in fp16, use
# fp32. Also use fp32 if the model was trained in bf16 and [gives NaN in
# fp16](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it).

# %%
with without_bf16:
    assert torch.autocast("cuda", dtype=torch.float16).fast_dtype is torch.float16  # no error

# %% [markdown]
# **Not this.** Do not choose bf16 because `torch.cuda.is_bf16_supported()` returns True: it also returns True
# on a GPU that only emulates bf16. On an NVIDIA GPU, pass
# `including_emulation=False`. <!-- tests/notebooks/test_19_choose_your_precision.py --> On an AMD GPU, look in [AMD's
# table](https://rocm.docs.amd.com/projects/HIP/en/docs-6.3.2/reference/hardware_features.html).
#
# **Notice the failure earlier.** To measure which dtypes are fast on your GPU, run `amp-lab doctor`.
# <!-- tests/core/test_device.py -->

# %% [markdown]
# ## An FFT is refused in half precision
#
# `AMP0038` <!-- failure
# messages = ["Unsupported dtype half", "Unsupported dtype Bfloat16"]
# quoted = [
#   "cuFFT only supports dimensions whose sizes are powers of two when computing in",
#   "cuFFT doesn't support bfloat16 with compute capability", "FFT doesn't support transforms of type",
#   "cuFFT doesn't support signals of half type with compute capability less than",
#   "MKL FFT doesn't support tensors of type", "\"{name}\" not implemented for 'Complexhalf'",
# ]
# symptoms = [
#   "torch.fft or rfft fails under autocast or with model.half()",
#   "stft or a mel spectrogram fails in fp16",
#   "a Fourier neural operator fails in mixed precision",
#   "complex numbers in half precision have no matmul",
#   "an FFT in fp16 runs for 512 pixels and fails for 500",
#   "a spectrogram, mel loss or FFT layer stops training with fp16 when the length is no power of two",
# ]
# words = """
# rfft2 irfft istft audio vocoder FNO neuraloperator inpainting FFC complex32 chalf power of two
# torchaudio spectrogram mel loss time series image size"""
# -->
#
# **What you see.** In fp16, the FFT raises one of these messages:
# - `cuFFT only supports dimensions whose sizes are powers of two when computing in half precision`, on CUDA
#   ([its source](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/CuFFTPlanCache.h))
# - `Unsupported dtype Half`, on a CPU with MKL
#
# **A small example.** We try to compute the spectrum of 100 numbers in fp16 and in bf16.

# %%
signal = torch.ones(100)
for dtype in (torch.float16, torch.bfloat16):
    print(message_of(lambda: torch.fft.rfft(signal.to(dtype))))  # noqa: B023 (called at once)
if torch.cuda.is_available():
    on_cuda = message_of(lambda: torch.fft.rfft(signal.half().cuda()))
    assert "cuFFT only supports dimensions whose sizes are powers of two" in on_cuda

# %% [markdown]
# **Why.** The FFT's input is a 16-bit tensor, for example the 16-bit output of a layer. On CUDA, autocast does not
# cast the inputs of an FFT. In 16 bits, cuFFT (NVIDIA's FFT library) does not support some older GPUs. On other GPUs,
# the size must be a power of two, and bf16 needs [torch 2.14 or
# later](https://github.com/pytorch/pytorch/pull/180890). PyTorch has no 16-bit FFT kernels for a CPU.
# <!-- tests/notebooks/test_08f_ops_and_devices.py, tests/tracing/test_kernel_limits.py -->
#
# `torch.stft` uses the same FFT kernels. On CUDA, `torch.fft.rfft` in fp16 returns the dtype `ComplexHalf`. PyTorch
# has no CUDA matmul for this dtype. <!-- tests/tracing/test_kernel_limits.py -->
#
# **The fix.** Run the transform inside `with torch.autocast(device_type, enabled=False):`, and call `.float()` on its
# input. Keep the matmuls on the spectrum in this block too. Then cast the result to the dtype of the next layer.
#
# `model.half()` also casts buffers such as a window. After `model.half()`, call `.float()` on the module that computes
# the spectrogram.
# <!-- tests/notebooks/test_08f_ops_and_devices.py -->


# %%
assert torch.fft.rfft(signal.half().float()).dtype is torch.complex64


# %% [markdown]
# ## MPS has no float64
#
# `AMP0039` <!-- failure
# quoted = [
#   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
#   "Cannot convert a float64 Tensor to MPS as the MPS framework doesn't support float64.",
#   "Required aspect fp64 is not supported on the device", "uses-fp64-math",
# ]
# symptoms = [
#   "moving a tensor to the GPU of a Mac fails because of float64",
#   "code with .double() runs on CUDA and fails on a Mac",
#   "a float64 NumPy array cannot be moved to mps",
#   "GradScaler fails on MPS or on an Intel Arc because of fp64",
#   "a script runs in Colab on cuda and on a MacBook it stops because something is double",
# ]
# words = """
# mps Mac M1 M2 M3 Apple Silicon double float64 numpy xpu Intel Arc A770 complex128 from_numpy
# Colab cuda works MacBook stops"""
# -->
#
# **What you see.** With a float64 tensor, you get one of these errors:
# - `Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.`, on a Mac
#   ([its source](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/EmptyTensor.cpp))
# - `Required aspect fp64 is not supported on the device`, on an Intel Arc A ([a
#   report](https://github.com/intel/torch-xpu-ops/issues/1742))
#
# **A small example.** We convert a NumPy array to a tensor and, on a Mac, try to move the
# tensor to the GPU.

# %%
weights = torch.from_numpy(np.ones(3))
print(weights.dtype)
if torch.backends.mps.is_available():
    assert "the MPS framework doesn't support float64" in message_of(lambda: weights.to("mps"))

# %% [markdown]
# **Why.** Apple's GPUs and Intel's Arc A GPUs do not support float64. NumPy's floating-point arrays are float64 by
# default. `GradScaler.unscale_` also creates a float64 tensor. On MPS, only older versions of torch create
# this tensor ([issue 142397](https://github.com/pytorch/pytorch/issues/142397)).
#
# **The fix.** Convert the tensor to fp32 before you move it: `torch.from_numpy(array).float().to("mps")`. In the
# model, replace `.double()` with `.float()`, and `torch.float64` with `torch.float32`. If `GradScaler` fails on MPS,
# update torch. If it fails on an Intel Arc A, train in bf16 [without a
# `GradScaler`](https://github.com/pytorch/pytorch/issues/147731).

# %%
assert weights.dtype is torch.float64
assert weights.float().to(device).dtype is torch.float32

# %% [markdown]
# ## Flash attention refuses fp32
#
# `AMP0043` <!-- failure
# quoted = [
#   "FlashAttention only support fp16 and bf16 data type", "assert qkv.dtype in [",
#   "Expected q_dtype == torch::kFloat16", "cuDNN attention only supports float16 and bfloat16",
# ]
# symptoms = [
#   "flash_attention_2 fails because the model is in float32",
#   "flash attention works in training under autocast and fails in inference",
#   "q and k are fp32 after the rotary embedding and v is bf16",
#   "flash attention gets fp32 after a LoRA fine-tuning with PEFT",
#   "flash attention complains about the data type after a LoRA or DoRA fine-tuning",
#   "a reranker or embedding model was loaded without a dtype and flash attention stops",
#   "does flash attention support float32",
#   "hidden layers are in fp32 and flash attention crashes",
# ]
# words = """
# flash-attn flash_attn_func flash_attention_2 FA2 attn_implementation torch_dtype QKNorm rope
# LoRA AutoModel predict unsloth"""
# -->
#
# **What you see.** The package `flash-attn` raises [`FlashAttention only support fp16 and bf16 data
# type`](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp).
#
# **A small example.** The kernel needs a GPU, so we only show how q becomes fp32. Inside an autocast block, we
# multiply a bf16 tensor by fp32 cosines, as in a rotary embedding.

# %%
cosines = torch.ones(2)  # fp32, as rotary embeddings often keep them
with torch.autocast("cpu", dtype=torch.bfloat16):
    v = nn.Linear(2, 2)(torch.ones(1, 1, 1, 2))  # batch, heads, tokens, features
    q = v * cosines
print(f"v is {v.dtype}, q is {q.dtype}")
assert q.dtype is torch.float32

# %% [markdown]
# **Why.** Flash attention does not support fp32. Autocast does not cast the inputs of [`flash-attn`'s
# functions](https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py). Usually, the
# model runs in fp32 without autocast, or a norm or rotary embedding returns q and k in fp32.
#
# **The fix.** Cast q, k and v to one 16-bit dtype right before the call. Or call
# `F.scaled_dot_product_attention` under autocast, which casts q, k and v. For inference with transformers,
# load the model in 16 bits: `from_pretrained(..., dtype=torch.bfloat16)` ([an
# example](https://github.com/QwenLM/Qwen3/issues/406)).

# %%
assert q.to(v.dtype).dtype is torch.bfloat16
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert F.scaled_dot_product_attention(q, q, v).dtype is torch.bfloat16

# %% [markdown]
# **Not this.** Do not cast a model with `.half()` or `.bfloat16()` before training to silence this message: [rounding
# then removes small updates](08b_learning.ipynb#Half-precision-weights-stop-moving).


# %% [markdown]
# ## Attention finds no kernel
#
# `AMP0162` <!-- failure
# messages = ["No available kernel. Aborting execution"]
# quoted = [
#   "No viable backend for scaled_dot_product_attention was found.",
#   "Expected query, key and value to all be of dtype: {", "Flash attention kernel not used because:",
#   "Flash attention only supports gpu architectures in the range",
#   "cutlassF: no kernel found to launch!",
# ]
# symptoms = [
#   "scaled_dot_product_attention fails inside sdpa_kernel",
#   "attention runs in fp16 and fails in fp32",
#   "flash attention was forced, and sampling or evaluation in fp32 fails",
#   "sdp_kernel with enable_math=False fails in fp32",
#   "generation or sampling during training stops inside attention, training steps work",
# ]
# words = """
# sdpa sdpa_kernel sdp_kernel SDPBackend FLASH_ATTENTION EFFICIENT_ATTENTION CUDNN enable_math
# head_dim sampling milestone save attend flash=True"""
# -->
#
# **What you see.** `F.scaled_dot_product_attention` raises `No available kernel. Aborting execution.` Before the
# error, PyTorch gives the reasons as warnings, for example
# `Expected query, key and value to all be of dtype: {Half, BFloat16}`.
#
# **A small example.** A model allows only flash attention, but its inputs are fp32. We check the model with
# [X-ray](09_xray_your_model.ipynb), which applies CUDA's rules and needs no GPU.


# %%
class FlashOnly(nn.Module):
    """Attention that allows only one kernel."""

    def forward(self, x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(x, x, x)


tokens = torch.rand(1, 2, 16, 64)  # batch, heads, tokens, features
print(message_of(lambda: xray(FlashOnly(), tokens, dtype=torch.float32)).split(";")[0])

# %% [markdown]
# **Why.** None of the allowed attention kernels supports this call. On NVIDIA GPUs, PyTorch's own flash
# attention and cuDNN kernels need an Ampere GPU or newer, and support only fp16 and bf16. If training works, a call
# outside autocast may get fp32 inputs, for example [during
# sampling](https://github.com/lucidrains/denoising-diffusion-pytorch/issues/239). <!--
# tests/tracing/test_kernel_limits.py -->
#
# **The fix.** If q, k and v are in fp32, run the call under autocast, or cast them to a 16-bit dtype. On NVIDIA GPUs
# before Ampere, use fp16. For fp32, and on these GPUs, also allow `SDPBackend.EFFICIENT_ATTENTION`. If the
# call still fails, allow `SDPBackend.MATH`. <!--
# tests/tracing/test_kernel_limits.py -->
#
# With `dtype=torch.bfloat16`, X-ray checks the model under autocast. Now the model runs without an error:

# %%
assert not xray(FlashOnly(), tokens, dtype=torch.bfloat16).raised

# %% [markdown]
# ## Further reading
#
# - [Which ops autocast casts on each device](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
# - [Known problems of each device](19_choose_your_precision.ipynb#Known-problems-of-each-device).
