# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Repair dtypes that do not match
#
# **What you'll do.** Look up a failure by its error message or its symptom.
#
# **What you'll learn.** You will know how to repair these failures:
# - [A half precision output leaves the block](#A-half-precision-output-leaves-the-block);
# - [The model is in half precision but its input is
#   fp32](#The-model-is-in-half-precision-but-its-input-is-fp32);
# - [Writing into a buffer fails](#Writing-into-a-buffer-fails);
# - [A custom autograd function fails in backward](#A-custom-autograd-function-fails-in-backward);
# - [fp16 and bf16 are mixed in one model](#fp16-and-bf16-are-mixed-in-one-model);
# - [The input is float64 or an integer](#The-input-is-float64-or-an-integer).
#
# **What you need.** You need no GPU. Read only the section about your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb).
#
# **The names of dtypes.** Here, *half precision* means fp16 or bf16. In the messages, `Half` is only fp16, `Float` is
# fp32 and `Double` is float64. `Long` is int64, and `Byte` is uint8.
# <!-- tests/notebooks/test_08e_dtypes.py -->

# %% tags=["nbval-ignore-output"]

import torch
import torch.nn.functional as F
from torch import nn

from course import start
from course.failures import make, message_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below
HALF = (torch.float16, torch.bfloat16)


# %%
def layers():
    """One layer of each kind that checks its dtypes."""
    linear = [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]
    return nn.ModuleList([*linear, nn.Conv1d(1, 1, 1), nn.GRU(2, 2), nn.LayerNorm(2), nn.PReLU()])


def refusals(calls, *inputs):
    """Print and return the message of each of the `calls` that raises an error."""
    messages = []
    for call in calls:
        try:
            call(*inputs)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    print(*messages, sep="\n")
    return messages


# %% [markdown]
# ## A half precision output leaves the block
#
# `AMP0018` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got Half and Float",
#   "mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
#   "expected m1 and m2 to have the same dtype, but got: c10::Half != float",
#   "expected scalar type Half but found Float", "expected scalar type Float but found Half",
#   "expected scalar type BFloat16 but found Float", "expected scalar type Float but found BFloat16",
#   "Input type (c10::Half) and bias type (float) should be the same",
#   "RNN input dtype (torch.float16) does not match weight dtype (torch.float32).",
#   "prelu: Type promoting not supported. Got Half and Float", "both inputs should have same dtype",
#   "dot : expected both vectors to have same dtype, but found Half and Float",
#   "All tensors must have the same dtype, got input1: c10::Half, input2: float, weight: float",
#   "Input dtypes must be the same, got: input float, batch1: c10::Half, batch2: c10::Half",
#   "addmv input tensors must have the same dtype, but got Float, Half, and Float",
#   "Found dtype Float but expected Half", "expected dtype c10::Half for `end` but got dtype float",
# ]
# quoted = [
#   "expected mat1 and mat2 to have the same dtype, but got: c10::Half != float",
#   "mat1 and mat2 must have the same dtype", "expected m1 and m2 to have the same dtype",
#   "expected mat1 and mat2 to have the same dtype", "of type {dtype} and B of type {dtype} instead",
#   "expected type torch.cuda.FloatTensor but got torch.cuda.HalfTensor",
#   "expected half but found float", "expected float but found half", "expected Bfloat16 but found",
#   "Expected object of type torch.cuda.HalfTensor but found type torch.cuda.FloatTensor",
#   "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (CUDABFloat16Type) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (CPUBFloat16Type) and weight type (torch.FloatTensor) should be the same",
#   "Input type (torch.HalfTensor) and weight type (torch.FloatTensor) should be the same",
#   "Expected object of scalar type Float but got scalar type Half",
#   "expected dtype Float but got dtype Half", "same dtype, but got Half and Float",
# ]
# symptoms = [
#   "only forward runs under autocast, and the loss outside raises about half and float",
#   "the criterion gets a float16 output and a float32 target",
#   "the error comes after the autocast block, in the line that uses the output",
#   "metrics or the loss outside of autocast complain about two dtypes",
#   "the classifier head or loss outside of the block gets half features",
# ]
# words = "linear matmul bmm baddbmm einsum tensordot conv2d lerp huber_loss mse_loss bce criterion head"
# -->
#
# **What you see.** An op after the autocast block raises one of these errors. The first message gives the dtype of a
# layer's input, then the dtype of its weights: <!-- tests/notebooks/test_08e_dtypes.py -->
# - `mat1 and mat2 must have the same dtype, but got Half and Float`
# - `expected scalar type Half but found Float`
# - `Found dtype Float but expected Half`, raised by the backward pass of a loss
#   ([report](https://github.com/pytorch/pytorch/issues/50941))
# - ``expected dtype c10::Half for `end` but got dtype float``, raised by `lerp`. If `optimizer.step()` raises
#   this error, see [notebook 08d](08d_loop_and_resume.ipynb#Weights-and-optimizer-state-have-different-dtypes).
#
# **A small example.** We compute a tensor in an autocast block and use it after the block.

# %%
OPS = [
    lambda h: h[None] @ torch.eye(2)[None],  # bmm, which einsum calls too
    lambda h: torch.eye(2)[None] @ h.expand(1, 2, 2),
    lambda h: torch.baddbmm(torch.eye(2)[None], h[None].mT, h[None]),
    lambda h: h @ torch.ones(2),  # mv
    lambda h: h[0] @ torch.ones(2),  # dot
    lambda h: torch.tensordot(h, torch.eye(2), 1),
    lambda h: nn.Bilinear(2, 2, 2)(h, x),
    lambda h: F.huber_loss(h, x).backward(),
    lambda h: h.lerp(x, 0.5),
]
model, _ = make()  # one linear layer, in fp32
for dtype in HALF:
    with torch.autocast("cpu", dtype=dtype):
        h = model(x)  # (1, 2), in half precision
    messages = refusals([*layers(), *OPS], h)
    assert len(messages) == 5 + len(OPS)  # of the 6 layers, only LayerNorm accepts half precision

# %% [markdown]
# **Why.** A tensor that was computed in half precision in an autocast block keeps this dtype after the block,
# where autocast no longer casts inputs. The op that fails gets a half-precision tensor and an fp32 tensor.
#
# In these cases, the cause is different:
# - A layer raises `mat1 and mat2 must have the same dtype, but got Float and Half`: [the model is in half precision
#   but its input is fp32](#The-model-is-in-half-precision-but-its-input-is-fp32).
# - The message contains `BFloat16 and Half`: [fp16 and bf16 are mixed in one
#   model](#fp16-and-bf16-are-mixed-in-one-model).
# - The message contains `Double`, `Long` or `Byte`: [one tensor is float64 or an
#   integer](#The-input-is-float64-or-an-integer).
# - The traceback contains `user_fn`: [a custom autograd function fails in
#   backward](#A-custom-autograd-function-fails-in-backward).
#
# **The fix.** Convert the tensors that leave the block to fp32 with `.float()`. If a linear layer or a
# convolution fails, you can also move it into the autocast block.
#
# **Not this.** Do not call `model.half()` to make the dtypes match. Weights in fp16 lose small updates.

# %%
with torch.autocast("cpu", dtype=torch.float16):
    output = model(x)
    inside = model(output)
outside = model(output.float())
torch.testing.assert_close(inside.float(), outside, rtol=2e-3, atol=2e-3)  # fp16 has 11 bits
F.huber_loss(output.float(), x).backward()
weight, update = torch.tensor(1.0), 1e-4
assert weight - update < 1
assert weight.half() - update == 1  # a weight in fp16 loses the update


# %% [markdown]
# ## The model is in half precision but its input is fp32
#
# `AMP0150` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got Float and Half",
#   "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
#   "expected m1 and m2 to have the same dtype, but got: float != c10::Half",
#   "Input type (float) and bias type (c10::Half) should be the same",
#   "RNN input dtype (torch.float32) does not match weight dtype (torch.float16).",
#   "RNN input dtype (torch.float32) does not match weight dtype (torch.bfloat16).",
#   "mixed dtype (CPU): expect parameter to have scalar type of Float",
#   "prelu: Type promoting not supported. Got Float and Half",
# ]
# quoted = [
#   "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
#   "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
#   "(torch.FloatTensor) and weight type (torch.HalfTensor)", "same dtype, but got Float and Half",
#   "Input type (torch.cuda.FloatTensor) and weight type (CUDABFloat16Type) should be the same",
#   "(torch.FloatTensor) and weight type (CPUBFloat16Type)", "expect input to have scalar type of",
#   "to have the same type as tensor for argument #2 'weight'; but type torch.cuda.",
# ]
# symptoms = [
#   "the model was loaded in float16 and its first layer refuses the input",
#   "model.half() and then the input does not match the weights",
#   "inference with torch_dtype=torch.bfloat16 fails because the input is float32",
#   "the pipeline was loaded in half precision and the vae or text encoder complains about float",
#   "an image encoder such as SigLIP or CLIP in float16 gets float32 pixels and its first conv refuses",
#   "encode_image fails in fp16 and encode_text works",
#   "an embedding server loads the model in float16 and does not cast the pictures",
#   "Whisper, InternVL or LLaVA in bf16 gets float32 features",
# ]
# words = """
# torch_dtype from_pretrained pixel_values input_features layernorm batchnorm diffusers comfyui
# first conv patch embedding pixels encode_image CLIP SigLIP ViT infinity cast server"""
# -->
#
# **What you see.** A layer raises one of these errors. In the first two messages, the dtype of the input comes first:
# - `mat1 and mat2 must have the same dtype, but got Float and Half`
# - `Input type (float) and bias type (c10::Half) should be the same`
# - `mixed dtype (CPU): expect parameter to have scalar type of Float`, raised by a norm on a CPU
# - `Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'weight'`, raised
#   by a norm on CUDA ([report](https://github.com/GVCLab/PersonaLive/issues/57))
#
# **A small example.** We convert layers to half precision, but leave their input in fp32.

# %%
for dtype in HALF:
    messages = refusals(layers().to(dtype), x)
    assert len(messages) == len(layers())

# %% [markdown]
# **Why.** The weights are in half precision, but the input is in fp32. Without autocast, layers such as `nn.Linear` do
# not convert their input.
#
# If the input is in half precision too, look for an fp32 tensor inside the model, such as a table of positions. If you
# add such a tensor to a half-precision tensor, the sum is in fp32.
#
# On a CPU, a norm in half precision can refuse an fp32 input even inside an autocast block.
# <!-- tests/notebooks/test_08e_dtypes.py -->
#
# **The fix.** For inference, cast the input to the dtype of the weights:
# `x.to(next(model.parameters()).dtype)`. For training, keep the weights in fp32 and use autocast. If `forward` creates
# a tensor, give it the dtype of the activations.
#
# **Not this.** Do not cast integer ids and labels to half precision with the rest of the batch: fp16 rounds an
# id of 2049 to 2048.

# %%
loaded = layers().half()
dtype = next(loaded.parameters()).dtype
assert refusals(loaded, x.to(dtype)) == []
with torch.autocast("cpu", dtype=torch.float16):
    assert refusals(layers(), x) == []
    assert "mixed dtype" in message_of(lambda: nn.LayerNorm(2).half()(x))
half = x.half()
for wider in (half + x, torch.cat([half, x]), torch.stack([half, x]), torch.where(x > 1, half, x)):
    assert wider.dtype is torch.float32
assert (half + torch.arange(2, dtype=half.dtype, device=half.device)).dtype is torch.float16
assert torch.tensor(2049).half() == 2048  # an id that was cast

# %% [markdown]
# ## Writing into a buffer fails
#
# `AMP0019` <!-- failure
# messages = [
#   "Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.",
#   "index_add_(): self (Float) and source (Half) must have the same scalar type",
#   "index_reduce_(): self (Float) and source (Half) must have the same scalar type",
#   "index_copy_(): self and source expected to have the same dtype, but got (self) Float and (source) Half",
#   "put_(): self and source expected to have the same dtype, but got self.dtype = Float and source.dtype = Half",
#   "masked_scatter: expected self and source to have same dtypes but got",
#   "scatter(): Expected self.dtype to be equal to src.dtype",
#   "Expected out tensor to have dtype c10::Half, but got float instead",
# ]
# quoted = [
#   "masked_scatter_: expected self and source to have same dtypes but got",
#   "Expected out tensor to have dtype float, but got c10::Half instead",
# ]
# symptoms = [
#   "assigning to a slice of a tensor by index fails under autocast",
#   "image features cannot be merged into the text embeddings because of their dtype",
#   "writing to the kv cache by index raises in bfloat16",
#   "scatter_add or index_add in a graph network fails with amp",
#   "the out= tensor has the wrong dtype, float instead of half",
#   "index_add_, scatter or masked assignment of a half result into a zeros tensor fails",
#   "a preallocated output tensor is float32 and the layer writes half",
# ]
# words = """
# index_put masked_scatter scatter_reduce kv cache inputs_embeds image_features llava moe zeros
# preallocated assignment index_add_ masked PyG"""
# -->
#
# **What you see.** A line that writes into an existing tensor, the *buffer*, raises one of these errors:
# - `Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.`
# - `scatter(): Expected self.dtype to be equal to src.dtype`, raised by `scatter` and also by `scatter_add_`
# - `masked_scatter: expected self and source to have same dtypes but got`
#
# **A small example.** We create a buffer with `torch.zeros` and write fp16 values to it.


# %%
def filled(write):
    """Return the buffer into which `write(buffer, index, features)` has written under autocast."""
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        buffer, features = torch.zeros(4, 2), model(x)  # fp32, and (1, 2) in fp16
        write(buffer, torch.tensor([2]), features)
    return buffer


WRITES = [
    lambda b, i, f: b.__setitem__(i, f),  # b[i] = f
    lambda b, i, f: b.index_add_(0, i, f),
    lambda b, i, f: b.index_reduce_(0, i, f, "mean"),
    lambda b, i, f: b.index_copy_(0, i, f),
    lambda b, i, f: b.put_(i, f[0, :1]),
    lambda b, i, f: b.masked_scatter(b == 0, f),
    lambda b, i, f: b.scatter_add(0, i[None].expand(1, 2), f),
    lambda b, i, f: torch.bmm(f[None].detach(), x.half().mT[None], out=b[:1, :1, None]),
]
assert len(refusals([lambda write=write: filled(write) for write in WRITES])) == len(WRITES)

# %% [markdown]
# **Why.** The buffer and the values that you write into it have different dtypes. For example, `torch.zeros` by
# default creates an fp32 tensor, even under autocast, but the values are in half precision. For most ops that write
# into an existing tensor, autocast does not cast the inputs.
#
# `masked_scatter`, `scatter` and `index_add` can raise the error too, although they return a new tensor.
# <!-- tests/notebooks/test_08e_dtypes.py -->
#
# **The fix.** Cast the values `f` that you write into the buffer: `buffer[i] = f.to(buffer.dtype)`. Or create
# the buffer in the dtype of the values, with `f.new_zeros(shape)`.

# %%
assert filled(lambda b, i, f: b.__setitem__(i, f.to(b.dtype)))[2].any()
assert filled(lambda b, i, f: b.index_add_(0, i, f.to(b.dtype)))[2].any()
assert x.half().new_zeros(4, 2).dtype is torch.float16

# %% [markdown]
# ## A custom autograd function fails in backward
#
# `AMP0020` <!-- failure
# quoted = [
#   "user_fn(self, *args){any}expected scalar type Half but found Float",
#   "user_fn(self, *args){any}mat1 and mat2 must have the same dtype, but got Half and Float",
#   "user_fn(self, *args){any}expected mat1 and mat2 to have the same dtype, but got: c10::Half != float",
#   "user_fn(self, *args){any}expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
#   "object has no attribute '_fwd_used_autocast'",
# ]
# symptoms = [
#   "the backward of my autograd.Function gets a half gradient and float tensors",
#   "my custom autograd.Function works without autocast and fails with it",
#   "custom_fwd and custom_bwd: which dtype does the kernel get",
#   "gradients of a checkpointed block are less exact, or overflow, and the loss is the same",
#   "my checkpoint function forgets the dtype of autocast",
#   "the backward of a custom function computes in float16 although autocast is bfloat16",
#   "a checkpointed layer is recomputed in another 16-bit dtype under bf16 autocast",
#   "a Triton kernel stops in the backward pass because one operand is bf16 and the other fp32",
# ]
# words = """
# torch.autograd.Function save_for_backward custom_fwd custom_bwd cast_inputs triton kernel
# tl.dot operand compiler backward dies gradient mamba printing"""
# -->
#
# **What you see.** `backward()` raises `expected scalar type Half but found Float`, or another message from
# [the first section](#A-half-precision-output-leaves-the-block). The traceback contains the line
# [`return user_fn(self, *args)`](https://github.com/pytorch/pytorch/blob/main/torch/autograd/function.py).
#
# **A small example.** We write a batched matmul as an `autograd.Function`.


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # a and b are still in fp32: autocast casts inside the matmul
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # grad is in fp16, like the output
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


def backward_through(function):
    weight = torch.eye(2)[None].requires_grad_()  # (1, 2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        output = function.apply(weight, weight)
    output.sum().backward()
    return weight.grad


message = message_of(lambda: backward_through(Product))
print(message)
assert "expected scalar type Half but found Float" in message

# %% [markdown]
# **Why.** The custom `forward` runs inside the autocast block, but `backward` usually runs outside, where autocast
# does not cast. An op in `backward` therefore combines a 16-bit gradient with an fp32 tensor that `forward` saved. If
# you decorate only `backward`, the message names `_fwd_used_autocast`. <!-- tests/notebooks/test_08e_dtypes.py -->
#
# **The fix.** On CUDA, decorate `forward` with `torch.amp.custom_fwd(device_type="cuda")` and `backward` with
# `torch.amp.custom_bwd(device_type="cuda")`. For a kernel whose inputs autocast does not cast, such as a Triton
# kernel, pass `cast_inputs=torch.float32` to `custom_fwd`, and let `forward` [return
# fp32](02_autocast_dtypes.ipynb#Your-own-autograd-functions). If `custom_bwd` uses fp16 under bf16 autocast, update
# torch ([fixed in 2022](https://github.com/pytorch/pytorch/pull/88029)).


# %%
def decorated(**options):
    class Decorated(torch.autograd.Function):
        forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu", **options))
        backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))

    return Decorated


for options in ({}, {"cast_inputs": torch.float32}):
    assert torch.equal(backward_through(decorated(**options)), torch.full((1, 2, 2), 2.0))

# %% [markdown]
# If you wrote custom activation checkpointing, check that it stores the dtype of autocast. If it stores only whether
# autocast was on, `backward()` recomputes the layers in autocast's default dtype, which is fp16 on CUDA. Use
# `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)` instead. <!-- tests/remedies/test_migrate_remedies.py -->


# %% [markdown]
# ## fp16 and bf16 are mixed in one model
#
# `AMP0021` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got BFloat16 and Half",
#   "mat1 and mat2 must have the same dtype, but got Half and BFloat16",
#   "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Half",
#   "Input type (c10::BFloat16) and bias type (c10::Half) should be the same",
#   "RNN input dtype (torch.bfloat16) does not match weight dtype (torch.float16).",
#   "RNN input dtype (torch.float16) does not match weight dtype (torch.bfloat16).",
#   "Unexpected floating ScalarType in",
# ]
# quoted = [
#   "expected scalar type BFloat16 but found Half", "expected scalar type Half but found BFloat16",
#   "expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != c10::Half",
#   "Input type (CUDABFloat16Type) and weight type (torch.cuda.HalfTensor) should be the same",
#   "Input type (torch.cuda.HalfTensor) and weight type (CUDABFloat16Type) should be the same",
#   "Input type (CPUBFloat16Type) and weight type (torch.HalfTensor) should be the same",
#   "Input type (torch.HalfTensor) and weight type (CPUBFloat16Type) should be the same",
# ]
# symptoms = [
#   "bfloat16 and float16 are mixed, for weights and inputs",
#   "bf16 autocast around a model that was loaded in fp16", "two autocast dtypes for a shared layer",
#   "a bf16 block inside an fp16 block uses the wrong weights",
#   "torch.cat under autocast fails with a bfloat16 tensor",
#   "a bf16 picture meets an fp16 patch embedding in a server, crash at the first image",
#   "half is multiplied by bfloat16 in the log-probability pass of GRPO",
#   "autocast runs with its default fp16 around a bf16 model because no dtype was set",
#   "text encoder, VAE and transformer of a pipeline have two 16-bit dtypes",
# ]
# words = """
# nested autocast cache cache_enabled promote cat stack addcmul bnb_4bit_compute_dtype GRPO
# sglang multimodal tower crops ACCELERATE_MIXED_PRECISION default dtype"""
# -->
#
# **What you see.** An op raises one of these errors:
# - `mat1 and mat2 must have the same dtype, but got BFloat16 and Half`
# - `Unexpected floating ScalarType in at::autocast::prioritize`
#
# **A small example.** We mix fp16 and bf16 in three ways:
# 1. We pass a bf16 input to fp16 layers, and an fp16 input to bf16 layers.
# 2. We nest a bf16 autocast block in an fp16 block, and call the same fp32 model in both blocks.
# 3. We concatenate bf16 tensors in an fp16 block.


# %%
def nested(**options):
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        model(x)  # autocast casts the weight to fp16 and stores the copy in its cache
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            return model(x)


def joined(tensor):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.cat([tensor, tensor])


for dtype, other in (HALF, HALF[::-1]):
    refusals(layers().to(dtype), x.to(other))
messages = refusals([nested, lambda: joined(x.bfloat16())])
assert "mat1 and mat2 must have the same dtype, but got BFloat16 and Half" in messages[0]
assert "Unexpected floating ScalarType in at::autocast::prioritize" in messages[1]

# %% [markdown]
# **Why.** An op has an fp16 and a bf16 input. Or its inputs are in fp16 inside a bf16 autocast block, or in bf16 inside
# an fp16 block. If the weights are in fp32, look for two nested blocks, one in fp16 and one in bf16. Both blocks share
# a cache of cast weights, so the inner block can use the outer block's copies.
#
# The message with `prioritize` comes from an op that autocast runs in the widest dtype of its inputs
# ([notebook 02](02_autocast_dtypes.ipynb)), such as `cat` on a CPU.
# <!-- tests/notebooks/test_08e_dtypes.py -->
#
# **The fix.** Use either fp16 or bf16 everywhere: for half-precision weights, for the inputs and for the
# autocast block. If you nest an fp16 and a bf16 block on purpose, open the inner block with
# `cache_enabled=False`.
#
# **Not this.** Do not convert a bf16 model to fp16 to make the dtypes match: weights and
# [activations](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) of 65520 or more become
# infinite.

# %%
assert refusals(layers().bfloat16(), x.bfloat16()) == []
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype is torch.bfloat16
assert nested(cache_enabled=False).dtype is torch.bfloat16
assert torch.tensor(1e5).bfloat16().half() == torch.inf  # why not to convert bf16 to fp16

# %% [markdown]
# ## The input is float64 or an integer
#
# `AMP0151` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got Double and Float",
#   "mat1 and mat2 must have the same dtype, but got Long and Float",
#   "mat1 and mat2 must have the same dtype, but got Byte and Float",
#   "mat1 and mat2 must have the same dtype, but got Double and BFloat16",
#   "expected m1 and m2 to have the same dtype, but got: double != float",
#   "expected m1 and m2 to have the same dtype, but got: long int != float",
#   "Input type (double) and bias type (float) should be the same",
#   "Input type (long int) and bias type (float) should be the same",
#   "Input type (unsigned char) and bias type (float) should be the same",
#   "RNN input dtype (torch.float64) does not match weight dtype (torch.float32).",
#   "mixed dtype (CPU): all inputs must share same datatype.", "Found dtype Double but expected Float",
#   "Found dtype Long but expected Float",
# ]
# quoted = [
#   "expected scalar type Double but found Float", "expected scalar type Long but found Float",
#   "mat1 and mat2 must have the same dtype, but got Float and Double",
#   "mat1 and mat2 must have the same dtype, but got Double and Half",
#   "mat1 and mat2 must have the same dtype, but got BFloat16 and Double",
#   "mat1 and mat2 must have the same dtype, but got Int and Float",
#   "expected mat1 and mat2 to have the same dtype, but got: double != float",
#   "expected scalar type Float but found Double", "expected scalar type Double but found Half",
#   "expected scalar type Float but found Long", "expected scalar type Long but found Int",
#   "expected target dtype to be Long or Byte, but got",
#   "Expected object of scalar type Float but got scalar type Double",
#   "Expected object of scalar type Long but got scalar type Float",
#   "Input type (double) and bias type (c10::Half) should be the same",
#   "Input type (unsigned char) and bias type (c10::Half) should be the same",
#   "Input type (torch.cuda.DoubleTensor) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (torch.DoubleTensor) and weight type (torch.FloatTensor) should be the same",
#   "Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (torch.cuda.ByteTensor) and weight type (CUDABFloat16Type) should be the same",
#   "could not infer output dtype. Input dtype must be either a floating point or complex dtype",
# ]
# symptoms = [
#   "a tensor from a numpy array or a pandas frame is double and the model float32",
#   "torch.from_numpy gives float64 and the layer wants float32",
#   "uint8 images do not go into a float32 model", "cross_entropy wants targets of dtype long",
#   "a DataFrame column or np.array became torch.float64 and the linear layer wants float",
#   "labels are int32 or float where cross_entropy wants long", "autocast does not cast float64",
# ]
# words = """
# numpy pandas from_numpy torch.tensor double long byte uint8 int64 targets labels DataFrame
# column np array regression one-hot int32 LongTensor"""
# -->
#
# **What you see.** Most of these messages name `Double`, `Long`, `Int` or `Byte`:
# - `mat1 and mat2 must have the same dtype, but got Double and Float`
# - `expected scalar type Double but found Float`
# - `mixed dtype (CPU): all inputs must share same datatype.`, raised by a norm on a CPU
# - `expected target dtype to be Long or Byte, but got Float`, raised by `cross_entropy` on a CPU if the class
#   targets are floats (from torch 2.12 on)
#
# **A small example.** We pass arrays in float64, int64 and uint8 to layers and to a loss. Then we pass float targets
# to `cross_entropy`, and a float64 input to a layer under autocast.

# %%
huber = lambda target: F.huber_loss(x.clone().requires_grad_(), target).backward()  # noqa: E731
for array in (x.double().numpy(), x.long().numpy(), x.byte().numpy()):
    refusals([*layers(), huber], torch.from_numpy(array))
print(message_of(lambda: F.cross_entropy(x, torch.tensor([1.0]))))
with torch.autocast("cpu", dtype=torch.bfloat16):
    (message,) = refusals([nn.Linear(2, 2)], x.double())
assert "but got Double and BFloat16" in message

# %% [markdown]
# **Why.** A tensor, often the input, is float64 or an integer, but the op needs another dtype, such as the dtype of
# the weights. Or the class targets of `cross_entropy` have a dtype other than int64 and uint8. NumPy's floating-point
# arrays are float64 by default, and `torch.from_numpy` keeps this dtype. <!-- tests/notebooks/test_08e_dtypes.py -->
# Autocast does not cast float64 or integers.
# <!-- tests/notebooks/test_02_autocast_dtypes.py -->
#
# **The fix.** Where you load or create the tensor, convert it with `.float()`, as in
# `torch.from_numpy(array).float()`. If the weights are in half precision, convert the input to the dtype of the
# weights. Convert the class targets of `cross_entropy` with `.long()`.
#
# **Not this.** Do not call `model.double()` or `torch.set_default_dtype(torch.float64)`: autocast does not run float64
# layers in half precision.

# %%
for array in (x.double().numpy(), x.long().numpy(), x.byte().numpy()):
    assert refusals([*layers(), huber], torch.from_numpy(array).float()) == []
F.cross_entropy(x, torch.tensor([1.0]).long())
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert nn.Linear(2, 2).double()(x.double()).dtype is torch.float64  # autocast does not cast

# %% [markdown]
# ## Further reading
#
# - [Autocast op reference](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference) of PyTorch.
