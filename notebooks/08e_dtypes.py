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
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [A half precision output leaves the block](#A-half-precision-output-leaves-the-block);
# - [The model is in half precision but its input is
#   fp32](#The-model-is-in-half-precision-but-its-input-is-fp32);
# - [Writing into a buffer fails](#Writing-into-a-buffer-fails);
# - [A custom autograd function fails in backward](#A-custom-autograd-function-fails-in-backward);
# - [fp16 and bf16 are mixed in one model](#fp16-and-bf16-are-mixed-in-one-model);
# - [The input is float64 or an integer](#The-input-is-float64-or-an-integer).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb). Most programs call one layer of each kind, and print the
# message of each layer that refuses its input.

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
    conv = [nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1, bias=False)]
    return nn.ModuleList([*linear, *conv, nn.GRU(2, 2), nn.LayerNorm(2), nn.PReLU()])


def refusals(calls, *inputs):
    """Print and return the messages of those `calls` that refuse the inputs."""
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
#   "prelu: Type promoting not supported. Got Half and Float",
#   "dot : expected both vectors to have same dtype, but found Half and Float",
#   "both inputs should have same dtype",
#   "All tensors must have the same dtype, got input1: c10::Half, input2: float, weight: float",
#   "Input dtypes must be the same, got: input float, batch1: c10::Half, batch2: c10::Half",
#   "addmv input tensors must have the same dtype, but got Float, Half, and Float",
#   "Found dtype Float but expected Half", "expected dtype c10::Half for `end` but got dtype float",
# ]
# quoted = [
#   "expected mat1 and mat2 to have the same dtype, but got: c10::Half != float",
#   "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (CUDABFloat16Type) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (CPUBFloat16Type) and weight type (torch.FloatTensor) should be the same",
#   "Expected object of scalar type Float but got scalar type Half",
# ]
# symptoms = [
#   "only forward runs under autocast, and the loss outside raises about half and float",
#   "the criterion gets a float16 output and a float32 target",
#   "the error comes after the autocast block, in the line that uses the output",
#   "metrics or the loss outside of autocast complain about two dtypes",
# ]
# words = "linear matmul bmm baddbmm einsum tensordot conv2d lerp huber_loss mse_loss bce criterion head"
# -->
#
# **What you see.** An op after the block raises one of these. For a layer, the first dtype is that of
# the input, and the second one is that of the weights: <!-- tests/notebooks/test_08e_dtypes.py -->
# - `mat1 and mat2 must have the same dtype, but got Half and Float`
# - `expected m1 and m2 to have the same dtype, but got: c10::Half != float`
# - `expected scalar type Half but found Float`
# - `Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same`
#   ([a report](https://github.com/baaivision/See3D/issues/11))
# - `Found dtype Float but expected Half`, of a loss ([a
#   report](https://github.com/pytorch/pytorch/issues/50941))
# - ``expected dtype c10::Half for `end` but got dtype float``, where weights are averaged (from
#   `optimizer.step()`, see [notebook 08d](08d_loop_and_resume.ipynb#After-resuming-the-loss-jumps-or-is-NaN))
#
# **The smallest program that does it.** We use the output of a block after the block has ended.

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
model, _ = make()
for dtype in HALF:
    with torch.autocast("cpu", dtype=dtype):
        h = model(x)  # (1, 2), in half precision
    messages = refusals([*layers(), *OPS], h)
    assert len(messages) == 6 + len(OPS)  # LayerNorm takes it

# %% [markdown]
# **Why.** Autocast casts inputs only inside its block, but what the block returned stays in half precision.
# The next op outside then gets a half-precision input and fp32 weights. If you do not use autocast, you
# probably converted the input by hand but not the model.
#
# If the message names other dtypes, the cause is different:
# - `Float and Half`: [the model is in half precision but its input is
#   fp32](#The-model-is-in-half-precision-but-its-input-is-fp32).
# - `BFloat16 and Half`: [fp16 and bf16 are mixed in one model](#fp16-and-bf16-are-mixed-in-one-model).
# - `Double`, `Long` or `Byte`: [the input is float64 or an
#   integer](#The-input-is-float64-or-an-integer).
# - If `backward()` raises it: [a custom autograd function fails in
#   backward](#A-custom-autograd-function-fails-in-backward).
# - `self and mat2`: the weight and the bias of one layer have two dtypes.
#
# Inside the block, ops that write in place (`addmm_`) or into `out=` raise it too, because autocast casts for
# neither ([notebook 02](02_autocast_dtypes.ipynb#What-is-eligible,-and-what-is-not)). Use the op that
# returns a new tensor, such as `addmm`. <!-- tests/remedies/test_dtype_remedies.py -->
#
# **The fix.** Move the line into the block, or convert what leaves the block with `.float()`.
#
# **Not this.** Do not call `model.half()` to make the dtypes match. Weights in fp16 ignore small updates,
# and `GradScaler` refuses [their gradients](08c_scaler.ipynb#The-parameters-are-fp16).

# %%
with torch.autocast("cpu", dtype=torch.float16):
    output = model(x)
    inside = model(output)
outside = model(output.float())
torch.testing.assert_close(inside.float(), outside, rtol=2e-3, atol=2e-3)  # fp16 has 11 bits
F.huber_loss(output.float(), x).backward()
weight, update = torch.tensor(1.0), 1e-4
assert weight - update < 1
assert weight.half() - update == 1  # fp16 weights lose the update

# %% [markdown]
# **Notice it earlier.** End `forward` with `.float()` on its result.

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
#   "Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same",
#   "Input type (torch.cuda.FloatTensor) and weight type (CUDABFloat16Type) should be the same",
#   "Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same",
#   "argument #1 'input' to have the same type as tensor for argument #2 'weight'; but type torch.cuda.",
# ]
# symptoms = [
#   "the model was loaded in float16 and its first layer refuses the input",
#   "model.half() and then the input does not match the weights",
#   "inference with torch_dtype=torch.bfloat16 fails because the input is float32",
#   "the pipeline was loaded in half precision and the vae or text encoder complains about float",
# ]
# words = "torch_dtype from_pretrained pixel_values input_features layernorm batchnorm diffusers comfyui"
# -->
#
# **What you see.** A layer raises one of these, with the dtype of its input first:
# - `mat1 and mat2 must have the same dtype, but got Float and Half`
# - `Input type (float) and bias type (c10::Half) should be the same`
# - `mixed dtype (CPU): expect parameter to have scalar type of Float`
# - `Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'weight'`, of a
#   norm on CUDA ([a report](https://github.com/GVCLab/PersonaLive/issues/57))
#
# **The smallest program that does it.** We convert the layers and not their input.

# %%
for dtype in HALF:
    messages = refusals(layers().to(dtype), x)
    assert len(messages) == len(layers())

# %% [markdown]
# **Why.** The weights were loaded in half precision (`dtype=torch.float16`) or converted with `.half()`. The
# input is fp32, and no autocast is on. A layer does not convert its input.
#
# If the input is in half precision too, look for an fp32 tensor inside the model. Often it is a table of
# positions, or a mask that `forward` creates with `torch.zeros` or with `torch.arange` of floats. `+`, `*`,
# `torch.cat`, `torch.stack` and `torch.where` then return fp32 without a message, and a later layer raises.
#
# Autocast does not help in every layer. On a CPU, a norm whose weights are in half precision refuses an fp32
# input inside the block too.
#
# **The fix.** For inference, cast the input to the dtype of the weights:
# `x.to(next(model.parameters()).dtype)`. For training, keep the weights in fp32 and use autocast. Create
# tensors inside `forward` with the dtype and the device of the tensors that they are combined with.
#
# **Not this.** Do not cast the whole batch to half precision. Ids and labels are integers, and fp16 rounds
# 2049 to 2048.

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
# **Notice it earlier.** Print `{p.dtype for p in model.parameters()}` after loading a model.

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
# ]
# words = "index_put masked_scatter scatter_reduce kv cache inputs_embeds image_features llava moe zeros"
# -->
#
# **What you see.** The line that writes raises one of these:
# - `Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.`
# - `index_add_(): self (Float) and source (Half) must have the same scalar type`
# - `scatter(): Expected self.dtype to be equal to src.dtype`, also of `scatter_add_`
# - `masked_scatter: expected self and source to have same dtypes but got`
#
# **The smallest program that does it.** We write features into a tensor that was made with `torch.zeros`.


# %%
def filled(write):
    """A buffer that `write(buffer, index, features)` has filled inside an autocast block."""
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
# **Why.** `torch.zeros` makes an fp32 buffer, with or without autocast, but the features are in half
# precision. Autocast does not cast for ops that write into a tensor, because it cannot change the dtype of
# an existing tensor.
#
# If the index is a number or a slice, nothing is raised: `buffer[2] = f` casts. `masked_scatter`, `scatter`
# and `index_add` return a new tensor, but they raise the error too, because no list of autocast names them.
# Models of images and text [merge
# features](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llava/modeling_llava.py)
# with `masked_scatter`. <!-- tests/notebooks/test_08e_dtypes.py -->
#
# In the other direction, an fp32 tensor is written into a half-precision buffer. It is often an fp32
# parameter, such as the embedding of a mask, or the output of a layer with a dtype of its own. Quantized
# layers have one, and `model.to()` does not change it, so set it when you quantize. `amp-lab xray` names
# the layer. <!-- tests/remedies/test_dtype_remedies.py -->
#
# **The fix.** Cast what you write, `buffer[i] = f.to(buffer.dtype)`, or make the buffer in the dtype of the
# features with `f.new_zeros(shape)`. Gradients flow through the cast.

# %%
assert filled(lambda b, i, f: b.__setitem__(i, f.to(b.dtype)))[2].any()
assert filled(lambda b, i, f: b.index_add_(0, i, f.to(b.dtype)))[2].any()
assert filled(lambda b, i, f: b.__setitem__(2, f[0]))[2].any()  # b[2] = f[0] casts
assert x.half().new_zeros(4, 2).dtype is torch.float16
embedding, activation = nn.Parameter(torch.ones(2)), torch.zeros(3, 2).half()
activation[torch.tensor([1])] = embedding.to(activation.dtype)
activation.sum().backward()
assert embedding.grad.tolist() == [1.0, 1.0]

# %% [markdown]
# **Notice it earlier.** Look for `torch.zeros` and `torch.empty` inside every `forward`.

# %% [markdown]
# ## A custom autograd function fails in backward
#
# `AMP0020` <!-- failure
# quoted = [
#   "user_fn(self, *args){any}expected scalar type Half but found Float",
#   "user_fn(self, *args){any}mat1 and mat2 must have the same dtype, but got Half and Float",
#   "user_fn(self, *args){any}expected mat1 and mat2 to have the same dtype, but got: c10::Half != float",
#   "user_fn(self, *args){any}expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
# ]
# symptoms = [
#   "the backward of my autograd.Function gets a half gradient and float tensors",
#   "my custom autograd.Function works without autocast and fails with it",
#   "custom_fwd and custom_bwd: which dtype does the kernel get",
#   "gradients of a checkpointed block are less exact, or overflow, and the loss is the same",
#   "my checkpoint function forgets the dtype of autocast",
# ]
# words = "torch.autograd.Function save_for_backward custom_fwd custom_bwd cast_inputs triton kernel"
# -->
#
# **What you see.** `backward()` raises `expected scalar type Half but found Float`, or another message of
# [the first section](#A-half-precision-output-leaves-the-block). The traceback ends in a `backward` that
# you or a library wrote, after the line `return user_fn(self, *args)`.
#
# **The smallest program that does it.** We write a batched matmul as an `autograd.Function`.


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # the arguments in fp32, not autocast's casts of them
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # fp16, like the output
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
# **Why.** The function's `forward` runs inside the block, where autocast casts for each op. Its `backward`
# runs outside the block and combines an fp16 gradient with the saved fp32 tensors.
#
# **The fix.** Decorate `forward` with `torch.amp.custom_fwd` and `backward` with `torch.amp.custom_bwd`, so
# that `backward` runs under autocast if `forward` did. With `cast_inputs=torch.float32`, both run in fp32
# without autocast. Use this for a kernel that was written for one dtype.
#
# [Notebook 02](02_autocast_dtypes.ipynb#Your-own-autograd-functions) shows both ways.


# %%
def decorated(**options):
    class Decorated(torch.autograd.Function):
        forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu", **options))
        backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))

    return Decorated


for options in ({}, {"cast_inputs": torch.float32}):
    assert torch.equal(backward_through(decorated(**options)), torch.full((1, 2, 2), 2.0))

# %% [markdown]
# If you write your own activation checkpointing, it can go wrong without a message. If it stores only
# whether autocast was on, it recomputes the block in the default dtype (fp16 on CUDA, bf16 on a CPU), so
# gradients are less exact or overflow. Store `torch.get_autocast_dtype(device_type)` too, or use
# `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)`. `amp-lab migrate` finds such code.
# <!-- tests/remedies/test_migrate_remedies.py -->
#
# Autocast does not cast the inputs of a kernel from another package, or of an op made with `torch.library`.
# Cast their inputs, or give your op a rule with `torch.library.register_autocast`. Under `torch.vmap`, the
# backward pass of a norm [may raise the message](https://github.com/pytorch/pytorch/issues/184890) too.
# <!-- tests/notebooks/test_08e_dtypes.py -->
#
# **Notice it earlier.** Test each function of your own once under autocast, with a backward pass.

# %% [markdown]
# ## fp16 and bf16 are mixed in one model
#
# `AMP0021` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got BFloat16 and Half",
#   "mat1 and mat2 must have the same dtype, but got Half and BFloat16",
#   "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Half",
#   "Input type (c10::BFloat16) and bias type (c10::Half) should be the same",
#   "expected scalar type BFloat16 but found Half", "expected scalar type Half but found BFloat16",
#   "RNN input dtype (torch.bfloat16) does not match weight dtype (torch.float16).",
#   "RNN input dtype (torch.float16) does not match weight dtype (torch.bfloat16).",
#   "Unexpected floating ScalarType in",
# ]
# quoted = [
#   "expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != c10::Half",
#   "Input type (CUDABFloat16Type) and weight type (torch.cuda.HalfTensor) should be the same",
#   "Input type (torch.cuda.HalfTensor) and weight type (CUDABFloat16Type) should be the same",
# ]
# symptoms = [
#   "bfloat16 and float16 are mixed, for weights and inputs",
#   "bf16 autocast around a model that was loaded in fp16",
#   "a bf16 block inside an fp16 block uses the wrong weights",
#   "torch.cat under autocast fails with a bfloat16 tensor", "two autocast dtypes for one shared layer",
# ]
# words = "nested autocast cache cache_enabled promote cat stack addcmul bnb_4bit_compute_dtype"
# -->
#
# **What you see.** An op raises one of these:
# - `mat1 and mat2 must have the same dtype, but got BFloat16 and Half`
# - `Input type (c10::BFloat16) and bias type (c10::Half) should be the same`
#   ([a report](https://github.com/vladmandic/sdnext/issues/1431))
# - `Unexpected floating ScalarType in at::autocast::prioritize`
#
# **The smallest program that does it.** We call layers in one dtype with an input in the other. Then we nest
# a bf16 block in an fp16 block, and use one fp32 weight in both. Last, we join bf16 tensors in an fp16 block.


# %%
def nested(**options):
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        model(x)  # the fp16 cast of the weight goes into the cache
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
# **Why.** One tensor is fp16 and the other one is bf16. Usually the weights were loaded in one of the two,
# and the input, the autocast block or a quantized layer uses the other. With fp32 weights, one block is
# nested in a block of the other dtype. Both use the same cache of casts, so the inner block gets weights in
# the outer dtype.
#
# The cache keeps the cast of a trained fp32 weight until the outermost block ends, and does not store its
# dtype. So the inner block casts the input to bf16, but finds an fp16 weight.
#
# `prioritize` belongs to the ops that autocast runs in the widest dtype of their inputs ([notebook
# 02](02_autocast_dtypes.ipynb)), such as `cat` on a CPU and `addcmul` on CUDA. They accept only fp32 and the
# dtype of the block. <!-- tests/notebooks/test_08e_dtypes.py -->
#
# **The fix.** Use one of the two dtypes for the weights, the inputs and the autocast block. If you nest
# blocks of two dtypes on purpose, open the inner one with `cache_enabled=False`.
#
# **Not this.** Do not convert a bf16 model to fp16. Values beyond 65504 become infinite, in the weights
# and [in the activations](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504).

# %%
assert refusals(layers().bfloat16(), x.bfloat16()) == []
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype is torch.bfloat16
assert nested(cache_enabled=False).dtype is torch.bfloat16
assert torch.tensor(1e5).bfloat16().half() == torch.inf  # the unsafe way

# %% [markdown]
# **Notice it earlier.** Print the dtype of the weights next to the dtype that you give to `autocast`.

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
#   "expected scalar type Double but found Float", "expected scalar type Long but found Float",
#   "Input type (double) and bias type (float) should be the same",
#   "Input type (long int) and bias type (float) should be the same",
#   "Input type (unsigned char) and bias type (float) should be the same",
#   "RNN input dtype (torch.float64) does not match weight dtype (torch.float32).",
#   "mixed dtype (CPU): all inputs must share same datatype.", "Found dtype Double but expected Float",
#   "Found dtype Long but expected Float",
# ]
# quoted = [
#   "mat1 and mat2 must have the same dtype, but got Float and Double",
#   "mat1 and mat2 must have the same dtype, but got Double and Half",
#   "mat1 and mat2 must have the same dtype, but got BFloat16 and Double",
#   "mat1 and mat2 must have the same dtype, but got Int and Float",
#   "expected mat1 and mat2 to have the same dtype, but got: double != float",
#   "expected scalar type Float but found Double", "expected scalar type Double but found Half",
#   "expected scalar type Float but found Long", "expected scalar type Long but found Int",
#   "expected target dtype to be Long or Byte, but got",
#   "Expected object of scalar type Float but got scalar type Double",
#   "Input type (double) and bias type (c10::Half) should be the same",
#   "Input type (unsigned char) and bias type (c10::Half) should be the same",
#   "Input type (torch.cuda.DoubleTensor) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (torch.DoubleTensor) and weight type (torch.FloatTensor) should be the same",
#   "Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.FloatTensor) should be the same",
#   "Input type (torch.cuda.ByteTensor) and weight type (CUDABFloat16Type) should be the same",
# ]
# symptoms = [
#   "a tensor from a numpy array or a pandas frame is double and the model float32",
#   "torch.from_numpy gives float64 and the layer wants float32",
#   "uint8 images do not go into a float32 model", "cross_entropy wants targets of dtype long",
#   "autocast does not cast a float64 input",
# ]
# words = "numpy pandas from_numpy torch.tensor double long byte uint8 int64 targets labels"
# -->
#
# **What you see.** The message names `Double`, `Long`, `Int` or `Byte`:
# - `mat1 and mat2 must have the same dtype, but got Double and Float`
# - `Input type (double) and bias type (float) should be the same`
# - `expected scalar type Double but found Float`
# - `mixed dtype (CPU): all inputs must share same datatype.`
# - `expected scalar type Long but found Float`, of `cross_entropy` with targets that are floats. Newer
#   versions say `expected target dtype to be Long or Byte, but got Float`.
#
# **The smallest program that does it.** We call layers and a loss with float64, int64 and uint8 arrays.

# %%
huber = lambda target: F.huber_loss(x.clone().requires_grad_(), target).backward()  # noqa: E731
for array in (x.double().numpy(), x.long().numpy(), x.byte().numpy()):
    refusals([*layers(), huber], torch.from_numpy(array))
print(message_of(lambda: F.cross_entropy(x, torch.tensor([1.0]))))
with torch.autocast("cpu", dtype=torch.bfloat16):
    (message,) = refusals([nn.Linear(2, 2)], x.double())
assert "but got Double and BFloat16" in message

# %% [markdown]
# **Why.** The input is not fp32. `torch.from_numpy` keeps the dtype of an array, and NumPy and pandas
# compute in float64. Ids are int64, and pixels are uint8. Autocast does not help, because it casts neither
# float64 nor integers.
#
# **The fix.** Convert the input where you load it: `torch.from_numpy(array).float()`, and `/ 255` for
# pixels. Class targets of `cross_entropy` need `.long()`.
#
# **Not this.** Do not call `model.double()` or `torch.set_default_dtype(torch.float64)`. Autocast leaves
# float64 alone, so nothing runs in half precision, and the memory doubles.

# %%
for array in (x.double().numpy(), x.long().numpy(), x.byte().numpy()):
    assert refusals([*layers(), huber], torch.from_numpy(array).float()) == []
F.cross_entropy(x, torch.tensor([1.0]).long())
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert nn.Linear(2, 2).double()(x.double()).dtype is torch.float64  # the unsafe way

# %% [markdown]
# **Notice it earlier.** Check the dtypes of one batch: `assert batch.dtype is torch.float32`.

# %% [markdown]
# ## Further reading
#
# - [Autocast op reference](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference): the ops that
#   autocast casts for, and the dtypes in which they run.
