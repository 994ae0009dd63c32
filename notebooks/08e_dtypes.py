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
# - [Writing into a buffer fails](#Writing-into-a-buffer-fails);
# - [A function of your own fails in backward](#A-function-of-your-own-fails-in-backward);
# - [Two dtypes are nested around one weight](#Two-dtypes-are-nested-around-one-weight).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]

import torch
import torch.nn.functional as F
from torch import nn

from course import figures, start
from course.failures import cuda_rules, make, message_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## A half precision output leaves the block
#
# `AMP0018` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got Half and Float",
#   "expected m1 and m2 to have the same dtype, but got: c10::Half != float",
#   "expected scalar type Float but found Half",
#   "Input type (c10::Half) and bias type (float) should be the same",
#   "RNN input dtype (torch.float16) does not match weight dtype (torch.float32).",
#   "mixed dtype (CPU): expect parameter to have scalar type of Float",
#   "Found dtype Float but expected Half",
#   "expected dtype c10::Half for `end` but got dtype float",
# ]
# quoted = [
#   "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
# ]
# symptoms = [
#   "short inputs work, until the first longer one raises; then all raise",
# ]
# -->
#
# **What you see.** An op raises one of these, with other dtypes too and in either order:
# - `mat1 and mat2 must have the same dtype, but got Half and Float`
# - `expected m1 and m2 to have the same dtype, but got: c10::Half != float`
# - `expected scalar type Float but found Half`
# - `Input type (c10::Half) and bias type (float) should be the same`
# - `Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same`
#   ([a report](https://github.com/baaivision/See3D/issues/11))
# - `RNN input dtype (torch.float16) does not match weight dtype (torch.float32).`
# - `mixed dtype (CPU): expect parameter to have scalar type of Float`
# - `Found dtype Float but expected Half`
# - ``expected dtype c10::Half for `end` but got dtype float``, where weights are averaged; from
#   `optimizer.step()` see
#   [section 46](08d_loop_and_resume.ipynb#After-resuming-the-loss-jumps-or-is-NaN) <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The smallest program that does it.** We use the output of a block after the block has ended.

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.float16):
    h = model(x)  # (1, 2), fp16
messages = {
    "linear": message_of(lambda: model(h)),
    "mm": message_of(lambda: h @ torch.eye(2)),
    "bmm": message_of(lambda: torch.eye(2)[None] @ h.expand(1, 2, 2)),
    "conv2d": message_of(lambda: nn.Conv2d(1, 1, 1)(h[None, None])),
    "gru": message_of(lambda: nn.GRU(2, 2)(h[None])).partition(" Convert")[0],
    "norm": message_of(lambda: nn.LayerNorm(2).half()(h.float())),
    "huber": message_of(lambda: F.huber_loss(h, h.detach().float()).backward()),
    "lerp": message_of(lambda: h.lerp(h.float(), 0.5)),
}
for name, message in messages.items():
    print(f"{name:<8}{message}")

# %%
assert "mat1 and mat2 must have the same dtype, but got Half and Float" in messages["linear"]
assert "expected m1 and m2 to have the same dtype, but got: c10::Half != float" in messages["mm"]
assert "expected scalar type Float but found Half" in messages["bmm"]
assert "Input type (c10::Half) and bias type (float) should be the same" in messages["conv2d"]
rnn = "RNN input dtype (torch.float16) does not match weight dtype (torch.float32)."
assert rnn in messages["gru"]
assert "mixed dtype (CPU): expect parameter to have scalar type of Float" in messages["norm"]
assert "Found dtype Float but expected Half" in messages["huber"]
assert "expected dtype c10::Half for `end` but got dtype float" in messages["lerp"]

# %% [markdown]
# **Why.** Autocast stops casting at the end of the block, but results in low precision stay so. A
# model or an input that you converted by hand fails in the same way, with no autocast at all. Then
# it is often a tensor beside the weights that stayed in fp32, such as the class weights of a loss,
# a sampling grid, or the initial state of an RNN. (Another wording is [`expected mat1 and mat2 to
# have the same dtype`](https://github.com/Vaibhavs10/fast-whisper-finetuning/issues/14).) <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# Inside the block an op raises such a message where it writes in place (`addmm_`) or into `out=`:
# autocast casts neither ([notebook
# 02](02_autocast_dtypes.ipynb#What-is-eligible,-and-what-is-not)). If `backward()` raises it, see
# [section 20](#A-function-of-your-own-fails-in-backward). <!-- tests/remedies/test_dtype_remedies.py -->
#
# Or it is a table that `forward` makes anew for a longer input. The new one is fp32, and the module
# keeps it, so that short inputs fail from then on. Make it with the dtype and the device of the old
# one: `longer.to(self.table)`.
#
# In quantization-aware training the fused fake-quantize module takes fp32 alone, and is not on
# autocast's list. The one that is not fused is on it: make the settings with
# `get_default_qat_qconfig_mapping("fbgemm", version=0)`. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Move the line into the block, or convert what leaves the block to fp32. Replace an op that
# writes in place by the one that returns a new tensor, such as `addmm_` by `addmm`.

# %%
with torch.autocast("cpu", dtype=torch.float16):
    inside = model(model(x))
outside = model(h.float())
torch.testing.assert_close(inside.float(), outside, rtol=2e-3, atol=2e-3)  # 11 bits
with torch.autocast("cpu", dtype=torch.float16):
    assert "must have the same dtype" in message_of(
        lambda: torch.zeros(1, 2).addmm_(h, torch.eye(2))
    )
    assert torch.addmm(torch.zeros(1, 2), h, torch.eye(2)).dtype is torch.float16
weighted = message_of(lambda: F.cross_entropy(h, torch.tensor([0]), weight=torch.ones(2)))
assert "expected scalar type Half but found Float" in weighted


# %%
class Table(nn.Module):
    """Adds a table, which it makes longer for an input that is longer than any before."""

    def __init__(self, keeps_dtype):
        super().__init__()
        self.keeps_dtype = keeps_dtype
        self.register_buffer("table", torch.zeros(2, 2))

    def forward(self, x):  # (T, 2)
        if len(x) > len(self.table):
            longer = torch.zeros(len(x), 2)
            self.table = longer.to(self.table) if self.keeps_dtype else longer
        return x + self.table[: len(x)]


for keeps_dtype, dtype in ((False, torch.float32), (True, torch.float16)):
    table, short = Table(keeps_dtype).half(), torch.ones(1, 2).half()
    assert table(short).dtype is torch.float16
    assert table(short.expand(3, 2)).dtype is dtype
    assert table(short).dtype is dtype  # the short one again

# %% [markdown]
# **Notice it earlier.** Let the model's `forward` end with `.float()` on what it returns.

# %% [markdown]
# ## Writing into a buffer fails
#
# `AMP0019` <!-- failure
# messages = [
#   "Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.",
#   "index_add_(): self (Float) and source (Half) must have the same scalar type",
#   "masked_scatter: expected self and source to have same dtypes but got",
#   "scatter(): Expected self.dtype to be equal to src.dtype",
# ]
# -->
#
# **What you see.** The line that writes raises one of these:
# - `Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.`
# - `index_add_(): self (Float) and source (Half) must have the same scalar type`
# - `scatter(): Expected self.dtype to be equal to src.dtype`
# - `masked_scatter: expected self and source to have same dtypes but got`
#
# **The smallest program that does it.** We collect features in a tensor that was made with
# `torch.zeros`.


# %%
def collect(write):
    """Call `write(buffer, index, features)` inside an autocast block."""
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        features = model(x)  # (1, 2), fp16
        write(torch.zeros(4, 2), torch.tensor([2]), features)


messages = [
    message_of(lambda: collect(lambda buffer, i, f: buffer.__setitem__(i, f))),  # buffer[i] = f
    message_of(lambda: collect(lambda buffer, i, f: buffer.index_add_(0, i, f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.scatter_(0, i[None].expand(1, 2), f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.masked_scatter_(buffer == 0, f))),
]
print(*messages, sep="\n")

# %%
assert (
    "Index put requires the source and destination dtypes match, got Float for the destination and Half for the source."
    in messages[0]
)
assert "index_add_(): self (Float) and source (Half) must have the same scalar type" in messages[1]
assert "scatter(): Expected self.dtype to be equal to src.dtype" in messages[2]
masked = "masked_scatter: expected self and source to have same dtypes but got"
assert masked in messages[3]

# %% [markdown]
# **Why.** Autocast leaves in-place operations alone, since it cannot change the dtype of a tensor
# that already exists. `torch.zeros` makes that tensor in fp32 by default, with or without autocast.
# (An index that is a number does not raise: `buffer[2] = f` casts.)
#
# Without the underscore, `masked_scatter`, `scatter` and `index_add` fail in the same way, since
# they are not on autocast's list either. `masked_scatter` is met where the features of an image
# [take their
# places](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llava/modeling_llava.py)
# among the embeddings of a text.
#
# The dtypes can also be the other way round: an fp32 parameter, such as the embedding of a mask, is
# written into an activation in 16 bits. Or the buffer is in bf16, the model was cast to bf16, and
# no autocast is on: then a layer computes in a dtype that it keeps as an attribute, as some layers with
# quantized weights do. `model.to()` does not change it, so give it the dtype when you quantize.
# `amp-lab xray` names the layer. <!-- tests/remedies/test_dtype_remedies.py -->
#
# **The fix.** Cast the features when you write them, or make the buffer in their dtype. A gradient goes
# back through the cast.

# %%
collect(lambda buffer, i, f: buffer.__setitem__(2, f[0]))  # buffer[2] = f[0]
out_of_place = [
    message_of(lambda: collect(lambda buffer, i, f: buffer.masked_scatter(buffer == 0, f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.scatter(0, i[None].expand(1, 2), f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.index_add(0, i, f))),
]
assert [message.split()[0] for message in out_of_place] == [
    "masked_scatter:",
    "scatter():",
    "index_add_():",
]
for key in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS"):
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {op.partition(".")[0] for op in listed}  # without the overload
    assert not names & {"aten::masked_scatter", "aten::scatter", "aten::index_add"}
collect(lambda buffer, i, f: buffer.__setitem__(i, f.to(buffer.dtype)))
collect(lambda buffer, i, f: buffer.index_add_(0, i, f.to(buffer.dtype)))
collect(lambda _, i, f: f.new_zeros(4, 2).scatter_(0, i[None].expand(1, 2), f))
assert h.new_zeros(4, 2).dtype is torch.float16

# %%
embedding, activation = nn.Parameter(torch.ones(2)), torch.zeros(3, 2).half()
activation[torch.tensor([1])] = embedding.to(activation.dtype)
activation.sum().backward()
assert embedding.grad.tolist() == [1.0, 1.0]


class Quantized(nn.Module):
    """A layer with int8 weights that computes in a dtype of its own."""

    def __init__(self, precision=torch.float32):
        super().__init__()
        self.precision = precision
        self.register_buffer("weight", torch.ones(2, 2, dtype=torch.int8))

    def forward(self, x):
        return F.linear(x.to(self.precision), self.weight.to(self.precision))


assert Quantized().to(torch.bfloat16)(x.bfloat16()).dtype is torch.float32
assert Quantized(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16

# %% [markdown]
# **Notice it earlier.** Look for `torch.zeros` and `torch.empty` inside every `forward`.

# %% [markdown]
# ## A function of your own fails in backward
#
# `AMP0020` <!-- failure
# messages = [
#   "expected scalar type Half but found Float",
# ]
# symptoms = [
#   "gradients of a checkpointed block are less exact, or overflow, and the loss is the same",
# ]
# -->
#
# **What you see.** `backward()` raises
# `expected scalar type Half but found Float`
# or one of the messages of section 18.
#
# **The smallest program that does it.** We write a batched product as an `autograd.Function`.


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # the arguments, fp32, and not autocast's casts of them
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
# **Why.** `forward` runs inside the block, where autocast casts for the product. `backward` runs
# outside, and meets an fp16 gradient and fp32 tensors.
#
# **The fix.** Use the two decorators of `torch.amp`. With `cast_inputs`, both directions compute in
# that dtype, without autocast. Use this for a kernel that was written for one dtype.
#
# Without `cast_inputs` the decorators cast nothing: `backward` runs under autocast if `forward` did.
# Use that where `forward` calls layers, as in a checkpoint of your own; or take
# `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)`, which does it for you. [Notebook
# 02](02_autocast_dtypes.ipynb#Your-own-autograd-functions) shows both
# decorators. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# A checkpoint of your own that notes only whether autocast was on raises nothing. It computes the
# block again in the default dtype, which is fp16 on CUDA and bf16 on a CPU, so the gradients are less
# exact or overflow. Note `torch.get_autocast_dtype(device_type)` too, and give it as `dtype=`.
# `amp-lab migrate` finds it. <!-- tests/remedies/test_migrate_remedies.py -->


# %%
class AmpProduct(torch.autograd.Function):
    forward = staticmethod(
        torch.amp.custom_fwd(Product.forward, device_type="cpu", cast_inputs=torch.float32)
    )
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


assert torch.equal(backward_through(AmpProduct), torch.full((1, 2, 2), 2.0))


class UnderAutocast(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


assert torch.equal(backward_through(UnderAutocast), torch.full((1, 2, 2), 2.0))

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.float16):
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
with torch.autocast("cpu", enabled=enabled):
    assert model(x).dtype is torch.bfloat16
with torch.autocast("cpu", enabled=enabled, dtype=dtype):
    assert model(x).dtype is torch.float16

# %% [markdown]
# A kernel of another package, or one of your own in `torch.library`, gets what comes in, 16 bits and
# fp32 mixed: autocast casts for the ops that it knows. Cast what you give it (for a loss, to fp32), or give your
# own op a rule with `torch.library.register_autocast`. If the message comes in the forward pass of a
# model in fp16, see [section 18](#A-half-precision-output-leaves-the-block). Under `torch.vmap` the
# backward pass of a norm [may raise it](https://github.com/pytorch/pytorch/issues/184890).

# %%
dtypes_seen = []


@torch.library.custom_op("notebook08::doubled", mutates_args=())
def doubled(value: torch.Tensor) -> torch.Tensor:
    dtypes_seen.append(value.dtype)
    return 2 * value


with torch.autocast("cpu", dtype=torch.bfloat16):
    doubled(torch.ones(1).bfloat16())
torch.library.register_autocast("notebook08::doubled", "cpu", torch.float32)
with torch.autocast("cpu", dtype=torch.bfloat16):
    doubled(torch.ones(1).bfloat16())
assert dtypes_seen == [torch.bfloat16, torch.float32]

# %% [markdown]
# **Notice it earlier.** Test each function of your own once under autocast, with a backward pass.

# %% [markdown]
# ## Two dtypes are nested around one weight
#
# `AMP0021` <!-- failure
# messages = [
#   "encountered during backward but not found in storage",
#   "mat1 and mat2 must have the same dtype, but got BFloat16 and Half",
#   "Unexpected floating ScalarType in at::autocast::prioritize",
# ]
# -->
#
# **What you see.** An op raises one of these:
# - `mat1 and mat2 must have the same dtype, but got BFloat16 and Half`
# - `Unexpected floating ScalarType in at::autocast::prioritize`
#
# **The smallest program that does it.** An fp16 block contains a bf16 block for a delicate part,
# and one layer is used in both. For the second message, we pass a bf16 tensor in an fp16 block to
# an op that combines tensors: `cat` on the CPU, `addcmul` on CUDA.


# %%
def nested(**options):
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        model(x)  # the cast of the weight goes into the cache
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            return model(x)


def concatenate(tensor):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.cat([tensor, tensor])


def add_products(tensor):
    return torch.addcmul(tensor, tensor, tensor)


message, promoted = message_of(nested), message_of(lambda: concatenate(x.bfloat16()))
with cuda_rules():
    on_cuda = message_of(lambda: add_products(torch.rand(2, device="cuda").bfloat16()))
print(message, promoted, on_cuda, sep="\n")
assert "mat1 and mat2 must have the same dtype, but got BFloat16 and Half" in message
assert "Unexpected floating ScalarType in at::autocast::prioritize" in promoted
assert on_cuda == promoted

# %% [markdown]
# **Why.** Autocast keeps the cast of a trained fp32 weight until the outermost block ends (except in
# `inference_mode`), and does not note its dtype. So the inner block casts the input to bf16, but
# finds an fp16 weight. The second message is about the policy *promote* ([notebook
# 02](02_autocast_dtypes.ipynb)). It looks for the widest of the inputs, and knows only fp32 and the
# dtype of the block, even if all inputs are bf16, as those of a model with bf16 weights in a block
# that is fp16 by default.
#
# The same cache breaks *selective* checkpointing if two regions use one weight. The first region
# casts the weight. The forward pass of the second finds that cast, and records none. In the backward
# pass the second region runs again, with an empty cache, so it does cast. That op was
# `encountered during backward but not found in storage`. With `cache_enabled=False` each region
# records a cast of its own. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# **The fix.** Switch the cache off in the inner block. For the second message, use one half
# precision everywhere: give the block the dtype of the weights, or make the bf16 tensor fp32.

# %%
assert nested(cache_enabled=False).dtype is torch.bfloat16
assert concatenate(x.bfloat16().float()).dtype is torch.float32
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype is torch.bfloat16

# %% [markdown]
# **Notice it earlier.** Use one dtype for the whole model, and fp32 for a delicate part
# (section 1).

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
