# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Predict the dtype of every op under autocast
#
# **What you'll do.** Ask PyTorch, op by op, which dtype comes out of `torch.autocast`. Follow the
# casts through a forward and a backward pass, count them, switch them off, and put your own
# function under the same rules. At the end, print the table for your device, and see it beside
# CUDA's, whether or not you own such a GPU.
#
# **What you'll learn.**
# - the four things autocast can do with an op, and three questions that tell which;
# - which tensors it leaves alone;
# - how to nest and disable it, and what its cache of weight casts does for you and to you;
# - why a model that is fine under autocast on a CPU may behave differently on a GPU.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb) for what fp32, fp16 and bf16 are. No
# GPU.

# %% tags=["nbval-ignore-output"]
import threading
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import DeviceError, Precision, plots
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()
_ = torch.manual_seed(0)

# %% [markdown]
# ## The idea in five lines
#
# Two column vectors in fp32, and two things to do with them. The dtype that autocast lowers to is
# called `low` on this page; here it is the backend's default: bf16 on a CPU, fp16 on a GPU. In your
# own code, write out the one you mean.

# %%
low = torch.get_autocast_dtype(device.type)
x, y = torch.rand(1024, 1, device=device), torch.rand(1024, 1, device=device)
with torch.autocast(device.type, dtype=low):
    product, total = x @ y.T, x + y
print(f"x @ y.T is {product.dtype}, x + y is {total.dtype}")
assert product.dtype is low
assert total.dtype is torch.float32

# %% [markdown]
# Nobody called `.to()`. A matrix product is where low precision pays, so autocast casts its inputs
# on the way in. For an addition, casting would be as much work as adding, so autocast stays out of
# it.
#
# The decision is made per *op*, and not per line of mathematics. The outer product of two vectors
# can also be computed by `torch.outer`. That is a multiplication inside, not a matrix product, and
# so:

# %%
with torch.autocast(device.type, dtype=low):
    outer = torch.outer(x.flatten(), y.flatten())
assert outer.shape == product.shape
assert outer.dtype is torch.float32

# %% [markdown]
# ## The dtypes of a network, in a picture
#
# The same thing happens all the way through a network. Here are seven steps of one, with a residual
# connection and a loss; after each, the dtype is noted.

# %%
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
features, target = torch.rand(4, 8, device=device), torch.rand(4, 8, device=device)
steps = {
    "linear": nn.Linear(8, 8).to(device),
    "relu": nn.ReLU(),
    "layer_norm": nn.LayerNorm(8).to(device),
    "linear, again": nn.Linear(8, 8).to(device),
    "softmax": nn.Softmax(dim=-1),
    "+ input": lambda h: h + features,
    "mse_loss": lambda h: F.mse_loss(h, target),
}

# %%
h, track = features, [("input", "fp32")]
with torch.autocast(device.type, dtype=low):
    for name, step in steps.items():
        h = step(h)
        track.append((name, SHORT[h.dtype]))
_ = plots.dtype_track(track)

# %% [markdown]
# The picture has one dot per step, from the input on the left to the loss on the right: dots on the
# upper line are fp32 tensors, dots on the lower line are in low precision. The two linear layers
# pull the values down, and `relu` keeps them there. Adding the fp32 input lifts them up again, and
# the loss is fp32. What `layer_norm` and `softmax` do depends on the backend: on a CPU they stay
# below, as in the picture here, on a GPU both go up.

# %%
on_cpu = device.type == "cpu"
expected = {"linear": low, "relu": low, "+ input": torch.float32, "mse_loss": torch.float32}
expected |= dict.fromkeys(["layer_norm", "softmax"], low if on_cpu else torch.float32)
assert all(dict(track)[name] == SHORT[dtype] for name, dtype in expected.items())
assert all(parameter.dtype is torch.float32 for parameter in steps["linear"].parameters())

# %% [markdown]
# The last line holds everywhere: **the parameters stay fp32.** Autocast hands low-precision
# *copies* to the op. So do not call `.half()` or `.bfloat16()` on a model that you train under
# autocast.
#
# ## Four things that can happen to an op
#
# Each backend has a list of ops, each with a policy. An op that is not on the list is not touched.
#
# | policy | what autocast does | typical ops |
# |---|---|---|
# | lower precision | casts the inputs to `low` | `linear`, `conv2d`, `matmul`, attention |
# | fp32 | casts the inputs to fp32, or asks for an fp32 result | losses; on a GPU `exp`, `softmax`, norms |
# | promote | casts the inputs to fp32 if one of them is fp32, else to `low` | a few ops that would refuse mixed inputs |
# | (not on the list) | nothing: the op runs in the dtype that comes in | `relu`, `add`, `mean`, pooling |
#
# One op of each kind but *promote*, which comes after them, is called with an fp32 and with a
# low-precision matrix. `dtype_of` is how to ask PyTorch about any op.


# %%
def dtype_of(op, *args):
    """The dtype that `op(*args)` returns under autocast."""
    with torch.autocast(device.type, dtype=low):
        return op(*args).dtype


wide = torch.rand(4, 4, device=device)
narrow = wide.to(low)
one_of_each = {"lower precision": torch.matmul, "fp32": F.mse_loss, "not listed": torch.add}
for policy, op in one_of_each.items():
    both = [SHORT[dtype_of(op, a, a)] for a in (wide, narrow)]
    print(f"{policy:<16}{op.__name__:<10}fp32 -> {both[0]}   {SHORT[low]} -> {both[1]}")

# %% [markdown]
# In the first two rows it does not matter what comes in: `matmul` returns low precision, `mse_loss`
# returns fp32. The op that is not listed returns what it was given.

# %%
assert [dtype_of(torch.matmul, a, a) for a in (wide, narrow)] == [low, low]
assert [dtype_of(F.mse_loss, a, a) for a in (wide, narrow)] == [torch.float32, torch.float32]
assert [dtype_of(torch.add, a, a) for a in (wide, narrow)] == [torch.float32, low]

# %% [markdown]
# The policy *promote* is for inputs that differ. Most ops that combine tensors, `add` and `cat`
# among them, promote mixed inputs by themselves, with autocast or without. A few refuse them, and
# for some of those autocast steps in. Which ones depends on the backend.

# %%
first_row = torch.zeros(1, dtype=torch.long, device=device)


def promoting(a, b):
    """An op that has the policy promote on this backend."""
    if on_cpu:
        return a.index_copy(0, first_row, b[:1])
    return torch.dot(a[0], b[0])


def error_of(call, *args):
    """The message of the error that `call(*args)` must raise."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("this was expected to fail")


# %% [markdown]
# `error_of` returns the message of a call that must fail. Without autocast, this one does:

# %%
print(error_of(promoting, wide, narrow))
assert dtype_of(promoting, wide, narrow) is torch.float32  # with autocast: the widest
for op in (torch.add, lambda a, b: torch.cat([a, b])):
    assert dtype_of(op, wide, narrow) is op(wide, narrow).dtype is torch.float32  # with and without

# %% [markdown]
# *Promote* knows two dtypes only, fp32 and the one that autocast lowers to. If a tensor of the
# *other* half precision reaches such an op, say a bf16 tensor in an fp16 block, autocast does not
# know which of the two is wider and raises an error. It does so even if all inputs have that one
# dtype and the op would have taken them without autocast:

# %%
other = torch.float16 if low is torch.bfloat16 else torch.bfloat16
stranger = wide.to(other)
assert promoting(stranger, stranger).dtype is other  # without autocast
print(error_of(dtype_of, promoting, stranger, stranger))
message = "Unexpected floating ScalarType in at::autocast::prioritize"
assert message in error_of(dtype_of, promoting, stranger, stranger)
if on_cpu:  # here `cat` has the policy promote as well
    assert message in error_of(dtype_of, lambda a, b: torch.cat([a, b]), stranger, stranger)

# %% [markdown]
# If you meet this message, a tensor or a weight has the other half precision: make it fp32, or let
# the block use its dtype. [Notebook 08](08_when_amp_breaks.ipynb) has the same failure in a network.
#
# So the dtype of every op follows from three questions, asked in this order:
#
# 1. **Is the call eligible?** Are there tensors that autocast may cast? (Next section.)
# 2. **Is the op on the list of this backend?** If not: nothing happens, and the usual promotion
#    applies.
# 3. **Which policy does it have there?**
#
# ## What is eligible, and what is not
#
# It does not matter how a call is spelled, as long as it ends in the same op: operator, function,
# method and module are all alike. An op that is not listed may also be made of ops that are, as
# `einsum` is on the CPU.

# %%
spellings = [
    torch.matmul,
    lambda a, b: a @ b,
    lambda a, b: a.matmul(b),
    F.linear,
    lambda a, b: torch.einsum("ij,jk->ik", a, b),
]
assert [dtype_of(op, wide, wide) for op in spellings] == [low] * len(spellings)

# %% [markdown]
# **In-place ops and `out=`** write into a tensor that exists, whose dtype cannot change. Autocast
# leaves such calls alone, so they run in what they are given; nothing is cast, and nothing gets
# faster.

# %%
buffer = torch.zeros(4, 4, device=device)
assert dtype_of(torch.addmm, buffer, wide, wide) is low
assert dtype_of(buffer.addmm_, wide, wide) is torch.float32  # in place
assert dtype_of(lambda: torch.mm(wide, wide, out=buffer)) is torch.float32  # out=

# %% [markdown]
# The other side of the coin: since nothing is cast, an in-place product with the low-precision
# result of an earlier op fails, where the ordinary spelling works.

# %%
print(error_of(dtype_of, buffer.addmm_, narrow, narrow))

# %% [markdown]
# **An explicit dtype wins** over the fp32 policy. `prod` is on that list on every backend. A
# `dtype=` is also the way to get fp32 from an op that is *not* listed, as `softmax` on the CPU.

# %%
assert dtype_of(torch.prod, narrow) is torch.float32
assert dtype_of(lambda a: torch.prod(a, dtype=low), narrow) is low
assert dtype_of(lambda a: a.softmax(-1, dtype=torch.float32), narrow) is torch.float32

# %% [markdown]
# **float64 and integers** are not cast. A product of two float64 matrices stays float64; mixed with
# fp32 it fails, because only one side is lowered. (Apple's MPS has no float64 to try it with.)

# %%
counts = torch.ones(4, 4, dtype=torch.long, device=device)
assert dtype_of(torch.prod, counts) is torch.long  # the fp32 policy, but no floating-point input
if device.type != "mps":
    assert dtype_of(torch.matmul, wide.double(), wide.double()) is torch.float64
    print(error_of(dtype_of, torch.matmul, wide.double(), wide))

# %% [markdown]
# **Tensors elsewhere** are not cast: the first argument of `torch.autocast` names one type of
# device, and only tensors on it are eligible. A tensor on the `meta` device stands in for
# "elsewhere" here.

# %%
elsewhere = torch.empty(4, 4, device="meta")
assert dtype_of(torch.matmul, elsewhere, elsewhere) is torch.float32

# %% [markdown]
# ## What leaves the block
#
# At the end of the block, autocast stops, but its results keep their dtype. Elementwise ops then
# promote, silently. A matrix product with an fp32 tensor fails.

# %%
with torch.autocast(device.type, dtype=low):
    inside = wide @ wide
assert (inside + wide).dtype is torch.float32  # promotion: no error, and fp32 from here on
print(error_of(torch.matmul, inside, wide))
assert (inside.float() @ wide).dtype is torch.float32

# %% [markdown]
# The cure is either `.float()`, or to move the line into the block. The loss belongs in the block
# anyway. Convert anything that leaves the block for good, such as predictions, to fp32 right there.
#
# ## Backward: no autocast there
#
# To see the casts themselves, listen to the dispatcher. `OpLog` writes down every op that reaches a
# kernel, with the dtypes of its inputs; autocast's casts show up as `_to_copy`.


# %%
class OpLog(TorchDispatchMode):
    """While active, notes each op and the dtypes of its tensor arguments in `calls`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [SHORT.get(arg.dtype) for arg in args if isinstance(arg, torch.Tensor)]
        self.calls.append((func.overloadpacket.__name__, dtypes))
        return func(*args, **(kwargs or {}))

    def dtypes(self, name):
        """The input dtypes of each call of op `name`."""
        return [dtypes for called, dtypes in self.calls if called == name]


# %% [markdown]
# One training step with a single weight, the forward pass under autocast, the backward pass not:

# %%
weight = torch.rand(4, 4, device=device, requires_grad=True)
with OpLog() as forward, torch.autocast(device.type, dtype=low):
    loss = F.mse_loss(wide @ weight, wide)
with OpLog() as backward:
    loss.backward()
for title, log in (("forward", forward), ("backward", backward)):
    print(title, *(f"  {name}({', '.join(dtypes)})" for name, dtypes in log.calls), sep="\n")

# %% [markdown]
# Forward: two casts down, the product in low precision, one cast up, the loss in fp32. Backward:
# the same in reverse. Each backward op runs in the dtype that autocast chose for its forward op,
# for the simple reason that those are the dtypes of the tensors that were saved, and the backward
# of a cast is the cast back. So the gradient of `weight` arrives in the dtype of `weight`.

# %%
assert forward.dtypes("mm") == [[SHORT[low]] * 2]
assert backward.dtypes("mm") == [[SHORT[low]] * 2]
assert weight.grad.dtype is weight.dtype is torch.float32

# %% [markdown]
# **Keep `backward()` out of the block.** Inside, autocast would apply its list once more, to the
# backward ops. Then a product that ran in fp32 on purpose gets its gradient from a low-precision
# one:

# %%
with torch.autocast(device.type, enabled=False):
    fp32_loss = (wide @ weight).sum()  # fp32 on purpose
with OpLog() as outside:
    fp32_loss.backward(retain_graph=True)
with OpLog() as within, torch.autocast(device.type, dtype=low):
    fp32_loss.backward()
for place, log in (("outside", outside), ("inside", within)):
    print(f"backward {place} the block: mm({', '.join(*log.dtypes('mm'))})")
assert outside.dtypes("mm") == [["fp32"] * 2]
assert within.dtypes("mm") == [[SHORT[low]] * 2]

# %% [markdown]
# ## Nest it, disable it
#
# Blocks nest. `enabled=False` makes an fp32 island for a part that needs the precision or the
# range. Two functions tell the present state.


# %%
def state():
    """Whether autocast is on, and its dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


assert state() == (False, low)
with torch.autocast(device.type, dtype=low):
    assert state() == (True, low)
    hidden = wide @ wide
    with torch.autocast(device.type, enabled=False):
        assert state() == (False, low)
        careless = hidden @ hidden
        careful = hidden.float() @ hidden.float()
    assert state() == (True, low)
    assert (careful @ wide).dtype is low
assert (careless.dtype, careful.dtype) == (low, torch.float32)

# %% [markdown]
# Note `careless`: the island switches *casting* off, and nothing more. A low-precision input stays
# one, and the product is computed in it. **An island needs `.float()` on its inputs.** On the way
# back nothing is needed: autocast casts again.
#
# A block can also switch to the other half precision, for instance to bf16 for one part of an fp16 model
# that overflows.

# %%
with torch.autocast(device.type, dtype=low):
    with torch.autocast(device.type, dtype=other):
        assert (hidden @ hidden).dtype is other
    assert (hidden @ hidden).dtype is low

# %% [markdown]
# As a decorator, autocast wraps a whole function, which suits a `forward` that must work no matter
# who calls it:


# %%
@torch.autocast(device.type, dtype=low)
def apply(a, b):
    return a @ b


assert apply(wide, wide).dtype is low

# %% [markdown]
# **The state belongs to the thread.** A thread that is started inside the block begins without
# autocast. Code that runs a model in threads of its own has to enter autocast in each of them; this
# is another reason for the decorator.

# %%
seen = {}
with torch.autocast(device.type, dtype=low):
    for name, function in {"plain": torch.matmul, "decorated": apply}.items():
        thread = threading.Thread(
            target=lambda n, f: seen.update({n: f(wide, wide).dtype}), args=(name, function)
        )
        thread.start()
        thread.join()
print(seen)
assert seen == {"plain": torch.float32, "decorated": low}

# %% [markdown]
# ## The cache of weight casts
#
# A weight that is used five times, in a recurrent network say, need not be cast five times.
# Autocast keeps the cast until the outermost block ends, at the price of the memory it takes.
# `OpLog` counts; the input is in low precision already, so that every cast is one of the weight.


# %%
def casts(weight, uses=5, **options):
    """How many casts it takes to use `weight` several times in one autocast block."""
    with OpLog() as log, torch.autocast(device.type, dtype=low, **options):
        for _ in range(uses):
            narrow @ weight
    return len(log.dtypes("_to_copy"))


cached, uncached = casts(weight), casts(weight, cache_enabled=False)
print(f"five uses of a weight: {cached} cast; without the cache: {uncached}")
assert (cached, uncached) == (1, 5)

# %% [markdown]
# Only **leaf tensors that require a gradient**, that is, parameters being trained, are cached.
# A frozen weight is cast anew in every use, and so is the result of a computation.

# %%
frozen, computed = weight.detach(), weight * 1
print("frozen:", casts(frozen), "casts; computed:", casts(computed), "casts")
assert casts(frozen) == casts(computed) == 5

# %% [markdown]
# The end of the **outermost** block clears the cache. Five blocks one after the other cast five
# times; the same five inside another block, once.

# %%
with OpLog() as separate:
    for _ in range(5):
        apply(narrow, weight)
with OpLog() as nested, torch.autocast(device.type, dtype=low):
    for _ in range(5):
        apply(narrow, weight)
apart, together = (len(log.dtypes("_to_copy")) for log in (separate, nested))
print(f"separate blocks: {apart}  inside one block: {together}")
assert (apart, together) == (5, 1)

# %% [markdown]
# That is why a training step has one block around its forward pass, and why the block must not
# contain the whole training loop: a cached cast does not notice that the optimizer has changed the
# weight.

# %%
identity = torch.eye(4, device=device)
with torch.autocast(device.type, dtype=low):
    before = identity @ weight
    with torch.no_grad():
        weight.mul_(2)  # as optimizer.step() would
    stale = identity @ weight
fresh = apply(identity, weight)
assert torch.equal(stale, before)  # the old weight, silently
assert torch.equal(fresh, 2 * before)

# %% [markdown]
# Two more things to know about the cache. The first is a trap that is gone: in older versions of
# PyTorch, a pass under `no_grad` left a cached cast without a graph, and a later pass in the same
# block then lost the gradients of its weights. Many workarounds on the web still deal with that. In
# PyTorch 2.11 and later it is fixed:

# %%
with torch.autocast(device.type, dtype=low):
    with torch.no_grad():
        wide @ weight  # an evaluation pass, say
    output = wide @ weight
(gradient,) = torch.autograd.grad(output.float().sum(), weight)
assert gradient.count_nonzero() == gradient.numel()

# %% [markdown]
# The second is a trap that is still there: the cache does not note the dtype of its entries. Nest
# two dtypes, use the same weight in both, and the inner block gets the cast of the outer one, which
# fails. `cache_enabled=False` on the inner block avoids it.

# %%
with torch.autocast(device.type, dtype=low):
    wide @ weight  # caches the weight in `low`
    with torch.autocast(device.type, dtype=other):
        print(error_of(torch.matmul, wide, weight))
    with torch.autocast(device.type, dtype=other, cache_enabled=False):
        assert (wide @ weight).dtype is other

# %% [markdown]
# ## Your own autograd functions
#
# A `torch.autograd.Function` calls its `forward` inside the block, where autocast works, and its
# `backward` outside, where it does not. Between the two, dtypes stop matching.


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # fp32: these are the arguments, not autocast's casts of them
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # in the dtype of the output
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


# %% [markdown]
# The forward pass succeeds. The error comes with the backward pass, which may be far away.

# %%
with torch.autocast(device.type, dtype=low):
    output = Product.apply(wide, weight)
assert output.dtype is low
print(error_of(output.float().sum().backward))

# %% [markdown]
# Two decorators repair it. `custom_fwd` remembers the state of autocast, and `custom_bwd` restores
# it for the backward pass; that is the one place where autocast around a backward is right. Both
# need to be told the type of device.


# %%
class AmpProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=device.type)  # new
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type=device.type)  # new
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


# %%
def train_step(function):
    """Run `function` forward and backward; return both dtypes, and the gradient of the weight."""
    weight.grad = None
    with torch.autocast(device.type, dtype=low):
        output = function.apply(wide, weight)
    output.float().sum().backward()
    return output.dtype, weight.grad.dtype, weight.grad


exact = wide.T @ torch.ones(4, 4, device=device)
*dtypes, gradient = train_step(AmpProduct)
assert dtypes == [low, torch.float32]
torch.testing.assert_close(
    gradient, exact, rtol=0.02, atol=0
)  # bf16 is off by up to 2^-9 in each rounding

# %% [markdown]
# The other use is a function that works in one dtype only, such as a kernel of your own written for
# fp32. With `cast_inputs` its arguments are cast before they come in, and autocast is off inside,
# in both directions. The bodies are the same as before, so only the decoration is new.


# %%
class Fp32Product(torch.autograd.Function):
    forward = staticmethod(
        torch.amp.custom_fwd(Product.forward, device_type=device.type, cast_inputs=torch.float32)
    )
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type=device.type))


*dtypes, gradient = train_step(Fp32Product)
assert dtypes == [torch.float32, torch.float32]
torch.testing.assert_close(gradient, exact)

# %% [markdown]
# ## Autocast for a device that is not there
#
# What if the name does not match the device that the tensors are on: a script written for a GPU, on
# a machine without one? The tensors in this cell are on the CPU. What is printed depends on the
# machine, so the lines below the cell are those of a machine without any GPU.


# %% tags=["nbval-ignore-output"]
def try_on_cpu_tensors(device_type):
    """Autocast for `device_type`: its warnings, whether it is on, what a CPU matmul returns."""
    a = torch.rand(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autocast(device_type):
            return (
                [str(w.message) for w in caught],
                torch.is_autocast_enabled(device_type),
                (a @ a).dtype,
            )


for name in ("cuda", "xpu", "mps"):
    messages, enabled, dtype = try_on_cpu_tensors(name)
    print(f"{name:<5} enabled: {enabled!s:<6} matmul: {dtype}   warns: {messages or 'nothing'}")
    assert dtype is torch.float32  # in no case did autocast do anything
    assert torch.amp.is_autocast_available(name)  # and yet

# %% [markdown]
# For `cuda` there is a warning, which is easily lost in a log, and the block runs in fp32. For
# `xpu` and `mps` there is not even that: autocast reports that it is on, for a device that does not
# exist. And `is_autocast_available` is true every time, because it tells what PyTorch was built to
# know, not what is plugged in. A training run goes through all the same, in fp32, slower and larger
# than planned.

# %%
messages, enabled, _ = try_on_cpu_tensors("cuda")
assert enabled is torch.cuda.is_available()
assert any("Disabling autocast" in message for message in messages) is not torch.cuda.is_available()
messages, enabled, _ = try_on_cpu_tensors(
    "mps" if torch.xpu.is_available() else "xpu"
)  # the one that is absent
assert enabled
assert not messages

# %% [markdown]
# Two remedies. In your own code, take the name from where the tensors are, as every cell on this
# page does: `torch.autocast(device.type, …)`. And where the name comes from a user, check it first.
# The `Precision` of this collection's package does, and raises:

# %% tags=["nbval-ignore-output"]
absent = "xpu" if torch.cuda.is_available() else "cuda"
try:
    Precision.BF16.autocast(absent)
    message = None
except DeviceError as error:
    message = str(error)
print(message)
assert absent in message

# %% [markdown]
# ## CPU is no stand-in for CUDA
#
# Each backend has its own list, and PyTorch can read them out, with or without the device. (The
# leading underscore says that this is no public interface; it is for looking, not for building on.)


# %%
def listed(backend):
    """The names of the ATen ops that autocast handles on `backend`, without their overloads."""
    entries = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{backend}")
    return {
        entry.removeprefix("aten::").split(".")[0]
        for entry in entries
        if entry.startswith("aten::")
    }


cpu, cuda = listed("CPU"), listed("CUDA")
for backend in ("CPU", "CUDA", "XPU", "MPS"):
    print(f"{backend}: {len(listed(backend))} ops")
print(f"CPU and CUDA: {len(cpu & cuda)}   only one: {len(cpu - cuda)} and {len(cuda - cpu)}")

# %% [markdown]
# Expect the numbers to change a little from one version of PyTorch to the next. The pattern here is
# that the lists share the heavy ops and the losses, and little else. Some names to go with the
# numbers:

# %%
groups = {
    "both": (cpu & cuda, ["linear", "conv2d", "matmul", "mse_loss", "nll_loss", "prod"]),
    "CPU only": (
        cpu - cuda,
        ["cat", "stack", "index_copy", "cross_entropy_loss", "fft_fft", "linalg_svd"],
    ),
    "CUDA only": (
        cuda - cpu,
        ["exp", "log", "pow", "sum", "softmax", "layer_norm", "group_norm", "cumsum", "mv"],
    ),
}
for group, (members, examples) in groups.items():
    print(f"{group:<10} {', '.join(examples)}")
    assert set(examples) <= members

# %% [markdown]
# The third line matters. `exp`, `sum`, `softmax` and `layer_norm` run in fp32 on CUDA, since their
# results or their inner sums easily leave the range of fp16. On the CPU, whose default is bf16,
# they are not listed, and stay in low precision. A test on a CPU tells little about what a GPU will
# do.
#
# ## Ask for any backend's policy
#
# Can one see CUDA's dtypes without CUDA? Yes, since the policy is applied *before* a kernel is
# chosen. A **fake tensor** has a device, a shape and a dtype, but no data, and needs no such
# device. `torch.autocast("cuda")` refuses without a GPU, so the switch beneath it is set by hand.


# %%
@contextmanager
def policy_of(device_type, dtype=None):
    """Inside: fake tensors only, and the policy of `device_type`, in `dtype` or its default."""
    enabled, default = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype or default)
    try:
        with FakeTensorMode():
            yield dtype or default
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, default)


# %% [markdown]
# A matrix product, a softmax and a ReLU on CUDA, in its default dtype and in bf16. The list is the
# same for both: it goes with the backend, and not with the dtype.

# %%
three = {"matmul": lambda a: a @ a, "softmax": lambda a: a.softmax(-1), "relu": torch.relu}
for dtype in (torch.float16, torch.bfloat16):
    with policy_of("cuda", dtype):
        fake = torch.empty(4, 4, device="cuda", dtype=dtype)
        found = {name: op(fake).dtype for name, op in three.items()}
    print(f"CUDA in {SHORT[dtype]}:", {name: SHORT[result] for name, result in found.items()})
    assert found == {"matmul": dtype, "softmax": torch.float32, "relu": dtype}
with policy_of("cuda") as default:
    assert default is torch.float16

# %% [markdown]
# Now for a list of ops that models are made of. Each takes a 4x4 matrix of any dtype; weights and
# filters are made from it as well.

# %%
OPS = {
    "linear": lambda a: F.linear(a, a),
    "matmul": lambda a: a @ a,
    "conv2d": lambda a: F.conv2d(a.reshape(1, 1, 4, 4), a.reshape(1, 1, 4, 4)),
    "relu": torch.relu,
    "max_pool2d": lambda a: F.max_pool2d(a.reshape(1, 1, 4, 4), 2),
    "add": lambda a: a + a,
    "add fp32": lambda a: a + a.float(),
    "cat with fp32": lambda a: torch.cat([a, a.float()]),
    "mean": torch.mean,
    "sum": torch.sum,
    "exp": torch.exp,
    "softmax": lambda a: a.softmax(-1),
    "log_softmax": lambda a: a.log_softmax(-1),
}

# %% [markdown]
# Norms and losses come in a cell of their own. The last one is special on CUDA: it is *banned*.

# %%
OPS |= {
    "layer_norm": lambda a: F.layer_norm(a, (4,)),
    "batch_norm": lambda a: F.batch_norm(
        a, torch.zeros(4, device=a.device), torch.ones(4, device=a.device)
    ),
    "mse_loss": lambda a: F.mse_loss(a, a),
    "nll_loss": lambda a: F.nll_loss(a, torch.zeros(4, dtype=torch.long, device=a.device)),
    "cross_entropy": lambda a: F.cross_entropy(
        a, torch.zeros(4, dtype=torch.long, device=a.device)
    ),
    "binary_cross_entropy": lambda a: F.binary_cross_entropy(a, a),
}


def outcome(op, device, dtype):
    """The dtype that `op` returns for an input of `dtype`, shortened; "error" if it refuses."""
    try:
        return SHORT[op(torch.full((4, 4), 0.5, device=device, dtype=dtype)).dtype]
    except RuntimeError:
        return "error"


# %% [markdown]
# All of them, on four backends, with a low-precision input, which is where the backends differ:

# %%
grid = {}
for backend in ("cpu", "cuda", "xpu", "mps"):
    with policy_of(backend) as backend_low:
        grid[backend] = {name: outcome(op, backend, backend_low) for name, op in OPS.items()}
_ = plots.dtype_grid(grid)

# %% [markdown]
# One row per op, one column per backend; each field tells the dtype that comes out when a
# low-precision tensor goes in. Dark fields are fp32. `cuda` stands for AMD's GPUs as well, which
# ROCm presents under that name. The upper half is alike in all columns: `linear` to `add` stay low,
# mixed inputs become fp32. The lower half is not. From `sum` to `layer_norm` the CPU column stays
# low where the GPUs go to fp32. Note also `mean`, which is on no list, unlike `sum`; and
# `batch_norm`, which is on that of MPS alone.

# %%
differ = ["sum", "exp", "softmax", "log_softmax", "layer_norm"]
assert all(grid["cpu"][name] == "bf16" and grid["cuda"][name] == "fp32" for name in differ)
assert grid["cuda"]["mean"] == "fp16"
assert "mean" not in cpu | cuda | listed("XPU") | listed("MPS")
assert grid["mps"]["batch_norm"] == "fp32"
assert "batch_norm" in listed("MPS") - cpu - cuda - listed("XPU")
assert grid["cuda"]["binary_cross_entropy"] == grid["xpu"]["binary_cross_entropy"] == "error"
assert grid["cpu"]["binary_cross_entropy"] == "fp32"

# %% [markdown]
# `binary_cross_entropy` is refused on CUDA, because its gradient can be too large for fp16, and a
# cast to fp32 would not help: on the way back the gradient has to pass through fp16 again. Autocast
# refuses it whatever the dtype of its inputs, so fp32 probabilities are refused as well. The error
# says what to use in its place, which takes the values from before the sigmoid.

# %%
with policy_of("cuda") as cuda_low:
    for dtype in (cuda_low, torch.float32):
        fake = torch.empty(4, 4, device="cuda", dtype=dtype)
        assert "binary_cross_entropy_with_logits" in error_of(F.binary_cross_entropy, fake, fake)
        assert F.binary_cross_entropy_with_logits(fake, fake).dtype is torch.float32
unlikely = torch.tensor([2.0**-24], requires_grad=True)  # the smallest probability in fp16
F.binary_cross_entropy(unlikely, torch.ones(1)).backward()
assert unlikely.grad.isfinite()
assert unlikely.grad.half().isinf()  # its gradient does not fit

# %% [markdown]
# Fake tensors are a model of the device, so the model has to be checked where it can be: on this
# device, every op returns in earnest what was predicted. Notebook 09 does the same for a whole
# network.
#
# ## The table to keep
#
# Here is what this device really returns, for fp32 and for low-precision inputs.

# %%
print(f"{'under autocast':<24}{'fp32 in':<10}{SHORT[low]} in")
for name, op in OPS.items():
    with torch.autocast(device.type, dtype=low):
        found = [outcome(op, device, dtype) for dtype in (torch.float32, low)]
    print(f"{name:<24}{found[0]:<10}{found[1]}")
    assert device.type not in grid or found[1] == grid[device.type][name]  # as predicted

# %% [markdown]
# Read it by row. Twice the same low dtype: the op lowers precision. Twice fp32: it runs in fp32, or
# one of its inputs was fp32. The same out as in: it is not on the list of this device.
#
# ## Summary
#
# | question | answer |
# |---|---|
# | is the call eligible? | floats but not float64, on the named device, not in-place, no `out=` |
# | is the op on the list? | ops, not mathematics: `x @ y.T` is, `torch.outer` is not; each backend has its own list |
# | which policy? | lower precision, fp32, or promote; ops that are not listed take what comes in |
#
# - An explicit `dtype=` wins.
# - Parameters and their gradients stay fp32; what leaves the block keeps its dtype.
# - One block around forward pass and loss; `backward()` and `step()` outside.
# - Islands: `enabled=False` and `.float()` on what goes in.
# - The cache keeps casts of trained parameters until the outermost block ends. Do not change
#   weights or nest dtypes over the same weight inside it.
# - Custom functions need `custom_fwd` and `custom_bwd`.
# - `torch.autocast` for a device that is not there does nothing. Take the name from `device.type`.
#
# ## Exercises
#
# 1. Predict, then check with `dtype_of`: `F.gelu`, `torch.bmm`, `torch.norm`, `torch.var`, and
#    `torch.stack` of `wide` and `narrow`. Which of your answers would change on CUDA? Ask
#    `policy_of`.
# 2. Add `F.rms_norm`, `F.scaled_dot_product_attention` and `F.interpolate` to `OPS`. Where a field
#    says "error", find out whether the policy or the fake tensor refuses.
# 3. Write a version of the seven-step network whose `softmax` is fp32 on every device. Do it once
#    with an island and once with `dtype=`. How many casts does each need? Let `OpLog` count.
# 4. In `policy_of("cuda")`, run `F.cross_entropy` on an fp16 input under `OpLog`, and then
#    `F.nll_loss` of `F.log_softmax`. One of them casts *after* `_log_softmax`. So in which dtype
#    does that op hand on its result in each? (`F.cross_entropy` passes it a `dtype`.) Which is the
#    more accurate?
# 5. Define an op with `torch.library.custom_op`. What does autocast do with it? Give it a policy
#    with `torch.library.register_autocast`, and find it among the registrations that `listed`
#    reads.
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html): the
#   op reference for CUDA, XPU and CPU, and the reference of all functions on this page.
# - PyTorch, [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): custom autograd
#   functions, several models and losses.
# - PyTorch, [Fake tensors](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html):
#   what they are made for.
# - AMD, [Automatic mixed precision in PyTorch using AMD
#   GPUs](https://rocm.blogs.amd.com/artificial-intelligence/automatic-mixed-precision/README.html),
#   2024: where the five-line demo comes from.
# - [Pull request 165068](https://github.com/pytorch/pytorch/pull/165068): how the `no_grad` trap
#   was fixed.
