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
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [BCELoss is refused on a GPU](#BCELoss-is-refused-on-a-GPU);
# - [An op does not exist in half precision](#An-op-does-not-exist-in-half-precision);
# - [NumPy does not know bf16](#NumPy-does-not-know-bf16);
# - [Autocast refuses the device or its dtype](#Autocast-refuses-the-device-or-its-dtype);
# - [An FFT is refused in half precision](#An-FFT-is-refused-in-half-precision);
# - [MPS has no float64](#MPS-has-no-float64);
# - [Flash attention refuses fp32](#Flash-attention-refuses-fp32).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from course import figures, start
from course.failures import cuda_rules, make, message_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## BCELoss is refused on a GPU
#
# `AMP0022` <!-- failure
# messages = [
#   "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.",
# ]
# -->
#
# **What you see.** On CUDA and ROCm, but not on the CPU, the loss raises
# `torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.`
#
# **The smallest program that does it.** The program needs the rules of CUDA. If CUDA or ROCm is
# there, it runs on the GPU as well.


# %%
def bce():
    logits, target = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    nn.BCELoss()(logits.sigmoid(), target)


with cuda_rules():
    message = message_of(bce).splitlines()[0]
    assert torch.rand(4, device="cuda").sigmoid().dtype is torch.float32  # refused even so
print(message)
assert (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
    in message
)
if torch.cuda.is_available():  # the real thing
    with torch.autocast("cuda", dtype=torch.float16):
        assert message in message_of(bce)

# %% [markdown]
# **Why.** The loss takes the logarithm of a probability p, and the gradient of that is 1/p. For a
# small p this is more than fp16 can hold. If p is fp16, its gradient has to be fp16 too, so a cast
# to fp32 in between would not help. This is the reason that [PyTorch's
# documents](https://docs.pytorch.org/docs/stable/amp.html) give. Besides, a probability very close to 1 rounds to exactly
# 1 in fp16. Autocast refuses fp32 inputs as well. On the CPU it computes the loss in fp32.
#
# **The fix.** Leave out the sigmoid, and give the logits to the loss that has it built in. Up to
# rounding, that loss has the same value unless the sigmoid saturates, where it is the right one, and
# autocast computes it in fp32.
#
# Where there are only probabilities, as in the cost of a matching, leave autocast for that line:
# `with torch.autocast("cuda", enabled=False):`, on `p.float()`. Do not give *them* to the loss with
# logits: it would take their sigmoid once more. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %%
with cuda_rules():
    logits = torch.rand(4, device="cuda").half()
    assert F.binary_cross_entropy_with_logits(logits, logits).dtype is torch.float32
logits, target = torch.tensor([-2.0, 0.5, 20.0]), torch.tensor([0.0, 1.0, 1.0])
expected = F.binary_cross_entropy(logits.sigmoid(), target)
torch.testing.assert_close(F.binary_cross_entropy_with_logits(logits, target), expected)
saturated = torch.tensor(200.0), torch.tensor(0.0)  # the loss is log(1 + exp(200)), which is 200
assert F.binary_cross_entropy_with_logits(*saturated) == 200
assert F.binary_cross_entropy(saturated[0].sigmoid(), saturated[1]) == 100
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert F.binary_cross_entropy(logits.sigmoid().bfloat16(), target).dtype is torch.float32
assert torch.tensor(20.0).half().sigmoid() == 1  # the log of 1 minus this is minus infinity
unlikely = torch.tensor([2.0**-24], requires_grad=True)  # a probability that fp16 can hold
F.binary_cross_entropy(unlikely, torch.ones(1)).backward()
assert unlikely.grad.isfinite()
assert unlikely.grad.half().isinf()  # its gradient is none that fp16 can hold

# %% [markdown]
# **Notice it earlier.** Test the loss under `cuda_rules` in a unit test, which needs no GPU.

# %% [markdown]
# ## An op does not exist in half precision
#
# `AMP0023` <!-- failure
# messages = [
#   "quantile() input tensor must be either float or double dtype",
#   "linalg.inv: Low precision dtypes not supported. Got Half",
#   "\"lu_cpu\" not implemented for 'Half'",
# ]
# -->
#
# **What you see.** An op raises one of these:
# - `quantile() input tensor must be either float or double dtype`
# - `linalg.inv: Low precision dtypes not supported. Got Half`
# - `"lu_cpu" not implemented for 'Half'`, or another name in the quotes.
#
# **The smallest program that does it.** We take a quantile under the rules of CUDA, and the inverse
# and the determinant of a matrix that is already fp16.

# %%
with cuda_rules():
    a = torch.rand(2, 2, device="cuda") @ torch.rand(2, 2, device="cuda")
    quantile = message_of(lambda: a.quantile(0.5))
inverse = message_of(lambda: torch.linalg.inv(torch.eye(2).half()))
determinant = message_of(lambda: torch.linalg.det(torch.eye(2).half()))
print(quantile, inverse, determinant, sep="\n")
assert "quantile() input tensor must be either float or double dtype" in quantile
assert "linalg.inv: Low precision dtypes not supported. Got Half" in inverse
assert "\"lu_cpu\" not implemented for 'Half'" in determinant

# %% [markdown]
# **Why.** These ops have no half-precision kernel, and autocast does not help everywhere. On the
# CPU it casts for the quantile and the inverse, but on CUDA it casts for neither.
#
# **The fix.** Call `.float()` on the input of that one op. If the message stays, autocast casts it
# again, since the op is on its list, as `mm` and `addmm` are. `torch.sparse.mm` calls `addmm`, and
# has no kernel for 16 bits on some devices, such as `"addmm_sparse_cuda"`
# ([a report](https://github.com/Lightning-AI/pytorch-lightning/issues/5282)). Then switch autocast off
# *and* call `.float()`, inside:

# %%
adjacency, features = torch.eye(2).to_sparse(), torch.ones(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.sparse.mm(adjacency.float(), features.float()).dtype is torch.bfloat16
    with torch.autocast("cpu", enabled=False):
        assert torch.sparse.mm(adjacency.float(), features.float()).dtype is torch.float32

# %%
with cuda_rules():
    a = torch.rand(2, 2, device="cuda") @ torch.rand(2, 2, device="cuda")
    assert a.float().quantile(0.5).dtype is torch.float32
with torch.autocast("cpu", dtype=torch.float16):
    for op in (torch.linalg.inv, partial(torch.quantile, q=0.5)):
        assert op(torch.eye(2).half()).dtype is torch.float32
listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
assert not any("quantile" in op or "linalg_inv" in op for op in listed)
assert torch.linalg.det(torch.eye(2).half().float()) == 1

# %% [markdown]
# **Notice it earlier.** Run `amp-lab xray` on the model ([notebook 09](09_xray_your_model.ipynb)). It
# stops at an op that refuses the dtype itself, as the quantile and the inverse do. A missing kernel,
# such as that of the determinant, shows in a real run alone: `--real`. <!-- tests/remedies/test_dtype_remedies.py -->

# %% [markdown]
# ## NumPy does not know bf16
#
# `AMP0024` <!-- failure
# messages = [
#   "Got unsupported ScalarType BFloat16",
# ]
# -->
#
# **What you see.** `.numpy()` raises
# `Got unsupported ScalarType BFloat16`
#
# **The smallest program that does it.** We turn a prediction into an array, for a plot or a metric.

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
    prediction = model(x)
message = message_of(prediction.numpy)
print(message)
assert "Got unsupported ScalarType BFloat16" in message

# %% [markdown]
# **Why.** NumPy has no bf16. It does have fp16, so an fp16 prediction gives no message, and
# adding 1 to it stays in fp16.
#
# **The fix.** Convert what leaves the block to fp32. A list needs no conversion.

# %%
assert prediction.float().numpy().dtype == "float32"
assert prediction.tolist() == prediction.float().tolist()
assert (prediction.half().numpy() + 1).dtype == "float16"  # and so it goes on

# %% [markdown]
# **Notice it earlier.** As in section 18, let `forward` end with `.float()`.

# %% [markdown]
# ## Autocast refuses the device or its dtype
#
# `AMP0036` <!-- failure
# messages = [
#   "Current CUDA Device does not support bfloat16. Please switch dtype to float16.",
#   "User specified an unsupported autocast device_type",
#   "unsupported scalarType",
# ]
# quoted = [
#   "CUBLAS_STATUS_NOT_SUPPORTED",
# ]
# -->
#
# **What you see.** The line that makes the block raises one of these:
# - `Current CUDA Device does not support bfloat16. Please switch dtype to float16.`
# - `User specified an unsupported autocast device_type 'meta'`, or another type in its place
# - `unsupported scalarType`
#
# Or a matmul in the block raises `CUBLAS_STATUS_NOT_SUPPORTED`
# when calling a function with `CUDA_R_16BF` among its arguments.
#
# **The smallest program that does it.** We ask for bf16 on a card for which PyTorch says that it has
# none. There may be no such card here, so we replace two functions of PyTorch. Then
# a block takes the type from its input, which is on `meta`. The island of section 1 does so without
# a dtype.


# %%
@contextmanager
def card_without_bf16():
    """Inside: PyTorch believes that CUDA is here, on a card that cannot hold bf16."""
    common = torch.cuda.amp.common
    with (
        mock.patch.object(common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=False),
    ):
        yield


with card_without_bf16():
    no_bf16 = message_of(lambda: torch.autocast("cuda", dtype=torch.bfloat16))
on_meta, meta_x = nn.Linear(2, 2, device="meta"), x.to("meta")
no_autocast = message_of(lambda: torch.autocast(meta_x.device.type, dtype=torch.bfloat16))
no_dtype = message_of(lambda: Island(on_meta)(meta_x))
print(no_bf16, no_autocast, no_dtype, sep="\n")
assert no_bf16.endswith("does not support bfloat16. Please switch dtype to float16.")
assert no_autocast == "User specified an unsupported autocast device_type 'meta'"
assert no_dtype == "unsupported scalarType"  # there is no default to look up

# %% [markdown]
# **Why.** NVIDIA's GPUs have bf16 [from capability 8
# on](https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py), which is Ampere. PyTorch
# asks whether the card can hold a bf16 tensor, which may be emulated
# ([`is_bf16_supported`](https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_bf16_supported.html)).
# So bf16 may not pay even if there is no message, and on a P100 cuBLAS [refused its
# matmuls](https://github.com/pytorch/pytorch/issues/57773). `meta`, like some other types, has no
# autocast and no dtype for it, and even a block that switches autocast off is refused. On AMD's
# GPUs the type is [`"cuda"`](https://docs.pytorch.org/docs/stable/notes/hip.html), and `"hip"` has no
# autocast.
#
# **The fix.** Use fp16 on such a card, as the message says, and train with a scaler
# ([notebook 19](19_choose_your_precision.ipynb#The-decision) has the choice for each kind of card).
# If the type comes from a tensor, ask whether it has autocast before you make a block.

# %%
with card_without_bf16():
    assert torch.autocast("cuda", dtype=torch.float16).fast_dtype is torch.float16  # no error


def fp32_block(device_type):
    """Autocast off, where there is one to be switched off."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


for inputs, layer in ((meta_x, on_meta), (x, nn.Linear(2, 2))):
    with torch.autocast("cpu", dtype=torch.bfloat16), fp32_block(inputs.device.type):
        assert layer(inputs).dtype is torch.float32
assert not torch.amp.is_autocast_available("hip")

# %% [markdown]
# **Notice it earlier.** Before the first run, `recommend_precision(device)` of this collection's
# package measures what a device is fast in. <!-- tests/core/test_device.py -->

# %% [markdown]
# ## An FFT is refused in half precision
#
# `AMP0038` <!-- failure
# messages = [
#   "Unsupported dtype Half",
#   "MKL FFT doesn't support tensors of type: Half`; an op that has no kernel for `ComplexHalf",
# ]
# quoted = [
#   "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision",
# ]
# -->
#
# **What you see.** The transform raises one of these:
# - `cuFFT only supports dimensions whose sizes are powers of two when computing in half precision`, on CUDA
#   ([its source](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/CuFFTPlanCache.h))
# - `Unsupported dtype Half`, on the CPU
#
# **The smallest program that does it.** We take the spectrum of 100 fp16 numbers.
# A GPU runs the same line, if one is
# here [*(not yet seen on a GPU)*](../data/results/README.md "notebooks").

# %%
signal = torch.ones(100)
message = message_of(lambda: torch.fft.rfft(signal.half()))
print(message)
assert message == "Unsupported dtype Half"
if torch.cuda.is_available():
    on_cuda = message_of(lambda: torch.fft.rfft(signal.half().cuda()))
    assert "cuFFT only supports dimensions whose sizes are powers of two" in on_cuda

# %% [markdown]
# **Why.** On CUDA no transform is on autocast's list, so it gets whatever the layer before it
# returned. cuFFT has half-precision kernels only for powers of two, and 100 is not one. The CPU has
# none at all, but autocast casts there for all but `hfft2`, `hfftn` and their inverses.
#
# `torch.stft` calls the same kernels. A CPU words it differently there: `MKL FFT doesn't support tensors
# of type: Half`, or without MKL `expected scalar type Double but found Half`. On CUDA the complex
# numbers in 16 bits (`ComplexHalf`) that come out have no matmul. <!-- tests/tracing/test_kernel_limits.py -->
#
# **The fix.** Call `.float()` before the transform. On CUDA you can also pad to a power of two. In a
# model that was cast by `.half()` the window and the filters are buffers, and were cast too: call
# `.float()` on the part that makes the features, *after* `model.half()`, give it an fp32 signal, and
# cast the features to the dtype of the next layer.
# (For bf16, older versions raise
# [`Unsupported dtype BFloat16`](https://github.com/pytorch/pytorch/issues/117844) on CUDA too, for
# any size.)

# %%
assert torch.fft.rfft(signal.half().float()).dtype is torch.complex64
with torch.autocast("cpu", dtype=torch.float16):
    assert torch.fft.rfft(signal.half()).dtype is torch.complex64
kinds = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
transforms = {f"aten::fft_{kind}{dims}" for kind in kinds for dims in ("", "2", "n")}
missing = transforms.difference(
    torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
)
assert missing == {f"aten::fft_{name}" for name in ("hfft2", "hfftn", "ihfft2", "ihfftn")}
listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
assert not any("fft" in op for op in listed)


# %%
class Features(nn.Module):
    """The power of a short-time Fourier transform, through filters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.ones(16))
        self.register_buffer("filters", torch.ones(2, 9))

    def forward(self, x):
        spectrum = torch.stft(x.float(), 16, window=self.window, return_complex=True)
        return self.filters @ spectrum.abs().square()


model = nn.ModuleDict({"features": Features(), "encoder": nn.Conv1d(2, 2, 1)}).half()
assert "the same dtype" in message_of(lambda: model["features"](signal.half()))  # the filters
model["features"].float()
features = model["features"](signal.half()).to(model["encoder"].weight.dtype)
assert model["encoder"](features).dtype is torch.float16
assert torch.fft.rfft(torch.ones(400)).abs().square().max() > 65504

# %% [markdown]
# **Notice it earlier.** Search the model for `torch.fft` and `stft`, and put these calls into an
# fp32 island, together with a matrix product that follows, such as that of a mel spectrogram: the
# power of a spectrum may exceed 65504, as that of 400 ones does.

# %% [markdown]
# ## MPS has no float64
#
# `AMP0039` <!-- failure
# quoted = [
#   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
# ]
# -->
#
# **What you see.** On a Mac, moving a tensor to the device raises
# `Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.`
# It goes on with `Please use float32 instead.` We quote it from PyTorch's
# [source](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/EmptyTensor.cpp).
#
# **The smallest program that does it.** We send a NumPy array to the device. Nobody asked for
# float64, but it is NumPy's default.

# %%
weights = torch.from_numpy(np.ones(3))
print(weights.dtype)
assert weights.dtype is torch.float64
if torch.backends.mps.is_available():
    assert "the MPS framework doesn't support float64" in message_of(lambda: weights.to("mps"))

# %% [markdown]
# **Why.** Apple's framework does not support float64. It can slip in with all that is computed with
# NumPy, such as class weights or targets. The tensor need not be yours:
# `GradScaler.unscale_` made one in older versions ([issue
# 142397](https://github.com/pytorch/pytorch/issues/142397)).
#
# **The fix.** Convert to fp32 on the host, before you move the tensor.


# %%
def to_fp32_device(tensor, device):
    """The tensor on the device, and in fp32 if it was float64."""
    return (tensor.float() if tensor.dtype is torch.float64 else tensor).to(device)


assert to_fp32_device(weights, device).dtype is torch.float32
assert to_fp32_device(torch.tensor([1]), device).dtype is torch.int64

# %% [markdown]
# **Notice it earlier.** Assert in the data set that no tensor is float64. That check runs on any
# machine.

# %% [markdown]
# ## Flash attention refuses fp32
#
# `AMP0043` <!-- failure
# quoted = [
#   "FlashAttention only support fp16 and bf16 data type",
# ]
# -->
#
# **What you see.** The package `flash-attn`, or PyTorch's copy of its kernel, raises
# `FlashAttention only support fp16 and bf16 data type`
# We quote it from its
# [source](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp).
#
# **The smallest program that does it.** The kernel needs a GPU, but how q becomes fp32 can be seen
# anywhere. We multiply it by cosines in fp32, as a rotation does, inside an autocast block.

# %%
cosines = torch.ones(2)  # fp32, as rotary embeddings often keep them
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16):
    v = model(x)[None, None]  # (1, 1, 1, 2): batch, heads, tokens, features
    q = v * cosines
print(f"v is {v.dtype}, q is {q.dtype}")
assert v.dtype is torch.bfloat16
assert q.dtype is torch.float32

# %% [markdown]
# **Why.** This kernel takes 16 bits alone, and autocast casts for PyTorch's ops, not for a function of
# another package. Its inputs are fp32 if the model was loaded in fp32 and runs without
# autocast ([an example](https://github.com/QwenLM/Qwen3/issues/406)), or if a norm or a rotation
# before the kernel returns fp32.
#
# **The fix.** Cast q, k and v to 16 bits right before the call. Or call PyTorch's own attention, for
# which autocast casts. A model that only runs inference can be loaded in bf16.

# %%
q_cast = q.to(v.dtype)
assert q_cast.dtype is torch.bfloat16
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert F.scaled_dot_product_attention(q, q, v).dtype is torch.bfloat16

# %% [markdown]
# **Notice it earlier.** Assert `q.dtype is k.dtype is v.dtype` before the call, and print the dtype once.

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
