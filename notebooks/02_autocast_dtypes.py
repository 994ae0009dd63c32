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
# **What you'll do.** Ask PyTorch, op by op, which dtype comes out of `torch.autocast`. Then follow
# the casts through a forward and a backward pass, count them, switch them off, and put a function
# of your own under the same rules. At the end you print the table for your device and see it beside
# CUDA's, whether or not you own such a GPU.
#
# **What you'll learn.**
# - the four things autocast can do with an op, and three questions that tell which;
# - which tensors it leaves alone;
# - how to nest and disable it, and what its cache of weight casts does for you and to you;
# - why a model that is fine under autocast on a CPU may behave differently on a GPU.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb) for what fp32, fp16 and bf16 are. You
# need no GPU.

# %% tags=["nbval-ignore-output"]
import threading
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from course import figures, start

from amp_lab import DeviceError, Precision

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
_ = torch.manual_seed(0)

# %% [markdown]
# ## The idea in five lines
#
# We take two column vectors in fp32 and do three things with them under autocast: a matrix product,
# an addition, and `torch.outer`. Before you run this: which dtype does each of the three results
# have?
#
# The dtype that autocast lowers to is called `low` on this page. Here it is the backend's default,
# which is bf16 on a CPU and fp16 on a GPU. In your own code, write out the one you mean.

# %%
low = torch.get_autocast_dtype(device.type)
x, y = torch.rand(1024, 1, device=device), torch.rand(1024, 1, device=device)
with torch.autocast(device.type, dtype=low):
    product, total, outer = x @ y.T, x + y, torch.outer(x.flatten(), y.flatten())
print(f"x @ y.T is {product.dtype}, x + y is {total.dtype}, torch.outer is {outer.dtype}")
assert product.dtype is low
assert total.dtype is outer.dtype is torch.float32
defaults = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda", "xpu", "mps")]
assert defaults == [torch.bfloat16] + [torch.float16] * 3

# %% [markdown]
# We called `.to()` nowhere, and yet the product is in low precision. Matrix products can be [much
# faster there](https://docs.pytorch.org/docs/stable/amp.html), so autocast casts their inputs on the
# way in. It leaves an addition alone.
#
# By its formula the third result equals the first, but it stayed fp32. Autocast decides for each *op*,
# not for each formula, and leaves `torch.outer` alone.
#
# ## The dtypes of a network, in a picture
#
# The same thing happens all the way through a network. We follow the dtype through seven steps of
# one, with a residual connection and a loss. Before you look: which of the seven steps return fp32?

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
_ = figures.dtype_track(track)
on_cpu = device.type == "cpu"
found, of_gpu = dict(track), SHORT[low] if on_cpu else "fp32"
assert found["linear"] == found["relu"] == SHORT[low]
assert found["+ input"] == found["mse_loss"] == "fp32"
assert found["layer_norm"] == found["softmax"] == of_gpu
assert all(parameter.dtype is torch.float32 for parameter in steps["linear"].parameters())

# %% [markdown]
# Each mark is the dtype after a step, from the input on the left to the loss on the right. Marks on the
# upper line are fp32, those on the lower line low precision. The first linear layer pulls the values
# down and `relu` keeps them there. Adding the fp32 input lifts them up again, and the loss is fp32.
# What `layer_norm` and `softmax` do depends on the backend: on a CPU they stay below, as in the
# picture here, and [on a GPU](#Ask-for-any-backend's-policy) both go up to fp32.
#
# The last assert holds everywhere: **the parameters stay fp32.** Autocast hands low-precision
# *copies* of them to the op. So do not call `.half()` or `.bfloat16()` on a model that you train
# under autocast: its fp32 weights, which [small updates need](01_number_formats.ipynb#Swamping), would be
# gone.
#
# ## Four things that can happen to an op
#
# Each backend has [a list of ops](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference), each
# with a policy. An op that is neither on the list nor made of ops that are is not touched.
# (`binary_cross_entropy`, below, is on some lists only to be refused.)
#
# | policy | what autocast does | typical ops |
# |---|---|---|
# | lower precision | casts the inputs to `low` | `linear`, `conv2d`, `matmul` |
# | fp32 | casts the inputs to fp32, or asks for an fp32 result | most losses; on a GPU also `exp`, `softmax` and `layer_norm` |
# | promote | casts the inputs to fp32 if one of them is fp32, otherwise to `low` | a few ops that combine tensors, such as `index_copy` and `cat` on a CPU |
# | (not on the list) | nothing, so the op runs in the dtype that comes in | `relu`, `add`, `mean` |
#
# [A table below](#The-table-to-keep) shows most of these ops. *Promote* is rare, and has a section of its own at
# the end. For the other three we call one op each, with an fp32 and with a low-precision matrix.


# %%
def dtype_of(op, *args):
    """The dtype that `op(*args)` returns under autocast."""
    with torch.autocast(device.type, dtype=low):
        return op(*args).dtype


wide = torch.rand(4, 4, device=device)
narrow = wide.to(low)
one_of_each = {"lower precision": torch.matmul, "fp32": F.mse_loss, "not listed": torch.add}
for policy, op in one_of_each.items():
    both = [dtype_of(op, a, a) for a in (wide, narrow)]
    print(
        f"{policy:<16}{op.__name__:<10}fp32 -> {SHORT[both[0]]}   {SHORT[low]} -> {SHORT[both[1]]}"
    )
    expected = {"lower precision": [low, low], "fp32": [torch.float32] * 2}
    assert both == expected.get(policy, [torch.float32, low])

# %% [markdown]
# `matmul` returns low precision and `mse_loss` fp32, whatever comes in. The op that is not listed
# returns what it was given.
#
# So the dtype of an op follows from three questions, asked in this order:
#
# 1. **Is the call eligible?** Are there tensors that autocast may cast? The next section answers
#    this.
# 2. **Is the op on the list of this backend?** If it is not, and is not made of ops that are, nothing
#    happens, and PyTorch's usual promotion applies.
# 3. **Which policy does it have there?**
#
# ## What is eligible, and what is not
#
# It does not matter how you spell a call, as long as it ends in a listed op: we try an operator and a
# function. But for some calls autocast does not decide the dtype. We try four kinds of them.

# %%
buffer, elsewhere = torch.zeros(4, 4, device=device), torch.empty(4, 4, device="meta")
calls = {
    "a @ b": lambda: wide @ wide,
    "F.linear(a, b)": lambda: F.linear(wide, wide),
    "in place": lambda: buffer.addmm_(wide, wide),
    "with out=": lambda: torch.mm(wide, wide, out=buffer),
    "with dtype=": lambda: torch.prod(narrow, dtype=low),  # without it: fp32
    "on another device": lambda: elsewhere @ elsewhere,
}
found = {name: dtype_of(call) for name, call in calls.items()}
if device.type != "mps":  # which has no float64
    found["float64"] = dtype_of(torch.matmul, wide.double(), wide.double())
for name, dtype in found.items():
    print(f"{name:<18} {dtype}")
assert list(found.values())[:6] == [low, low, torch.float32, torch.float32, low, torch.float32]
assert found.get("float64", torch.float64) is torch.float64
assert dtype_of(torch.prod, narrow) is torch.float32
assert dtype_of(lambda: narrow.softmax(-1, dtype=torch.float32)) is torch.float32
assert dtype_of(torch.prod, wide.long()) is torch.int64

# %% [markdown]
# The first two rows are ordinary products, which are lowered in either spelling. For the others:
#
# - **In-place ops and `out=`** write into a tensor that exists, and its dtype cannot change. So
#   autocast leaves these two calls alone: the product runs in fp32.
# - **An explicit `dtype=`** decides the dtype of the result. `prod` has the policy fp32,
#   and yet the call above returns `low`. `dtype=` also gets fp32 from an op that is *not* listed, such
#   as `softmax` on a CPU.
# - **Tensors on another device** are not cast, because the first argument of `torch.autocast` names
#   one type of device. (The `meta` device stands in for "another" here.)
# - **float64 and integers** are not cast either.
#
# Where autocast casts nothing, or only one of two inputs, a call may fail whose ordinary spelling
# works. `error_of` shows the message.


# %%
def error_of(call, *args):
    """The message of the error that `call(*args)` must raise."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("this was expected to fail")


print("in place:", error_of(dtype_of, buffer.addmm_, narrow, narrow))
if device.type != "mps":
    print("float64: ", error_of(dtype_of, torch.matmul, wide.double(), wide))

# %% [markdown]
# If you meet such a message, look for an in-place product or a float64 tensor.
#
# ## What leaves the block
#
# At the end of the block autocast stops, but the results keep their dtype. What happens to a result
# in low precision when it meets an fp32 tensor outside?

# %%
with torch.autocast(device.type, dtype=low):
    inside = wide @ wide
print("sum:    ", (inside + wide).dtype)
print("product:", error_of(torch.matmul, inside, wide))
assert (inside + wide).dtype is torch.float32
assert (inside.float() @ wide).dtype is torch.float32

# %% [markdown]
# An elementwise op such as `+` promotes to fp32, and a matrix product fails. You can
# either call `.float()` on the result or move the line into the block. The loss [belongs in the
# block](https://docs.pytorch.org/docs/stable/amp.html#torch.autocast) anyway. Convert what leaves the block
# for good, such as predictions, to fp32.
#
# ## Backward: no autocast there
#
# To see the casts themselves, we listen to PyTorch's dispatcher, through which ops go on their way to a
# kernel. `OpLog` writes down each op and the dtypes of its positional tensor arguments. Autocast's casts
# show up as `_to_copy`.


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
# We run one training step with a single weight. The forward pass is under autocast, and the
# backward pass is not. Before you run this: in which dtype will the backward pass multiply?

# %%
weight = torch.rand(4, 4, device=device, requires_grad=True)
with OpLog() as forward, torch.autocast(device.type, dtype=low):
    loss = F.mse_loss(wide @ weight, wide)
with OpLog() as backward:
    loss.backward()
for title, log in (("forward", forward), ("backward", backward)):
    print(title, *(f"  {name}({', '.join(dtypes)})" for name, dtypes in log.calls), sep="\n")
assert forward.dtypes("mm") == backward.dtypes("mm") == [[SHORT[low]] * 2]
assert weight.grad.dtype is weight.dtype is torch.float32

# %% [markdown]
# The forward pass has two casts down, the product in low precision, one cast up, and the loss in
# fp32. The backward pass goes back through them, and multiplies in low precision as well. Here each
# backward op runs in the dtype that autocast chose for its forward op, simply because the tensors
# that were saved have that dtype. And since the backward of a cast is the cast back, the gradient
# of `weight` arrives in fp32.
#
# **Keep `backward()` out of the block.** Inside, autocast would apply its list to the backward ops
# once more. To see what that does, we take a product that ran in fp32 on purpose.

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
# Outside the block its gradient comes from an fp32 product, as intended. Inside the block it comes
# from a product in low precision.
#
# ## Nest it, disable it
#
# Blocks nest, and `enabled=False` makes an fp32 island for a part that needs the precision or the
# range. But be careful: of the two products on this island, which one runs in fp32?

# %%
with torch.autocast(device.type, dtype=low):
    hidden = wide @ wide
    with torch.autocast(device.type, enabled=False):
        careless = hidden @ hidden
        careful = hidden.float() @ hidden.float()
    back = careful @ wide
print(f"careless {careless.dtype}, careful {careful.dtype}, back in the block {back.dtype}")
assert (careless.dtype, careful.dtype, back.dtype) == (low, torch.float32, low)

# %% [markdown]
# Only the second one does. The island switches *casting* off and nothing more, so a product of
# inputs in low precision is computed in low precision. **An island needs `.float()` on its
# inputs.** On the way back you need nothing, because autocast casts again.
#
# As a decorator, autocast wraps a whole function, which suits a `forward` that must work no matter
# who calls it. It matters with threads, too. Before you run this: is autocast on in a thread that
# we start inside the block?

# %%
other = torch.float16 if low is torch.bfloat16 else torch.bfloat16


@torch.autocast(device.type)  # in the default dtype of the backend, which is `low`
def apply(a, b):
    return a @ b


seen = {}
with torch.autocast(device.type, dtype=low):
    for name, function in {"plain": torch.matmul, "decorated": apply}.items():
        thread = threading.Thread(
            target=lambda n, f: seen.update({n: f(wide, wide).dtype}), args=(name, function)
        )
        thread.start()
        thread.join()
    with torch.autocast(device.type, dtype=other):  # a block in the other half precision
        assert (hidden @ hidden).dtype is other
print(seen)
assert seen == {"plain": torch.float32, "decorated": low}

# %% [markdown]
# It is not: **the state belongs to the thread**, and a new one begins without autocast, so the
# product ran in fp32. If you run a model in threads of your own, enter autocast in each of them, or
# use the decorator. (An inner block can also switch to the other half precision. If it uses trained
# weights that the outer one has cast, it needs
# `cache_enabled=False`.) <!-- tests/notebooks/test_02_autocast_dtypes.py -->
#
# ## The cache of weight casts
#
# A weight that is used five times need not be cast five times. Autocast
# keeps its cast until the outermost block ends, at the price of the memory it takes. We count the
# casts for three kinds of weights.


# %%
def casts(weight, uses=5, **options):
    """How many casts it takes to use `weight` several times in one autocast block."""
    with OpLog() as log, torch.autocast(device.type, dtype=low, **options):
        for _ in range(uses):
            narrow @ weight
    return len(log.dtypes("_to_copy"))


counts = {
    "trained": casts(weight),
    "trained, cache_enabled=False": casts(weight, cache_enabled=False),
    "frozen": casts(weight.detach()),
    "computed": casts(weight * 1),
}
for kind, count in counts.items():
    print(f"{kind:<29} casts for five uses: {count}")
assert list(counts.values()) == [1, 5, 5, 5]

# %% [markdown]
# In the first row the weight was cast once, in the others five times. The cache holds only **leaf tensors
# that require a gradient**, such as parameters that are being trained. Under `torch.inference_mode` [it
# holds nothing](https://github.com/pytorch/pytorch/pull/165068), so every weight is cast for every
# use.
#
# The end of the **outermost** block clears the cache. So put one block around each forward pass, and never one
# around the whole training loop. To see what would go wrong, we change a weight inside a block, as
# `optimizer.step()` would.

# %%
identity = torch.eye(4, device=device)
with torch.autocast(device.type, dtype=low):
    before = identity @ weight
    with torch.no_grad():
        weight.mul_(2)  # as optimizer.step() would
    with torch.autocast(device.type, dtype=low):
        pass  # the end of an inner block clears nothing
    stale = identity @ weight
fresh = apply(identity, weight)
for name, product in {"inside": stale, "in a new block": fresh}.items():
    print(f"{name}: {(product / before).mean():g} times what it was")
assert torch.equal(stale, before)
assert torch.equal(fresh, 2 * before)

# %% [markdown]
# The weight has doubled, but the product inside the block still uses the old cast, without any
# error. A new block sees the new weight.
#
# ## Your own autograd functions
#
# A `torch.autograd.Function` calls its `forward` inside the block, where autocast works, and its
# `backward` outside, where it does not. Between the two, the dtypes may no longer match.


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


with torch.autocast(device.type, dtype=low):
    output = Product.apply(wide, weight)
assert output.dtype is low
print(error_of(output.float().sum().backward))

# %% [markdown]
# The forward pass succeeds, and the error comes with the backward pass, which may be far away in
# your program. Two decorators repair it: `custom_fwd` remembers the state of autocast, and
# `custom_bwd` restores it for the backward pass. Here autocast around a backward pass is right. Both
# need the [type of device](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.custom_fwd).
#
# The other use is a function that works in one dtype only, such as a kernel that you wrote for
# fp32. With [`cast_inputs`](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.custom_fwd), a call in an
# autocast block has its eligible arguments cast before they come in, and autocast is off inside, in both
# directions.


# %%
def decorated(**options):
    """`Product` with both decorators; its bodies stay as they are."""

    class Decorated(torch.autograd.Function):
        forward = staticmethod(
            torch.amp.custom_fwd(Product.forward, device_type=device.type, **options)
        )
        backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type=device.type))

    return Decorated


# %% [markdown]
# We run both variants forward and backward, and compare the gradient of the weight with the exact
# one.

# %%
exact = wide.T @ torch.ones(4, 4, device=device)
variants = {"as autocast does": decorated(), "in fp32": decorated(cast_inputs=torch.float32)}
for (name, function), dtype in zip(variants.items(), (low, torch.float32), strict=True):
    weight.grad = None
    with torch.autocast(device.type, dtype=low):
        output = function.apply(wide, weight)
    output.float().sum().backward()
    print(f"{name:<17} output {output.dtype}, gradient {weight.grad.dtype}")
    assert (output.dtype, weight.grad.dtype) == (dtype, torch.float32)
    # In bf16 each rounding is off by up to 2^-8 of the number.
    tolerance = {"rtol": 0.02, "atol": 0} if dtype is low else {}
    torch.testing.assert_close(weight.grad, exact, **tolerance)

# %% [markdown]
# Now the backward pass succeeds. The first variant multiplies in low precision and the second in
# fp32, and both gradients arrive in fp32. In your own code, write the decorators with `@` above the
# two methods.
#
# ## CPU is no stand-in for CUDA
#
# Each backend has its own list of ops, and PyTorch can read them out, with or without the device.
# (The leading underscore says that this function is not public.)
# Each of the two lists has about 110 ops. Before you run this: how many of them do you think CPU
# and CUDA have in common?


# %%
def listed(backend):
    """The names of the ATen ops that autocast handles on `backend`, without their overloads."""
    entries = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{backend}")
    return {e.removeprefix("aten::").split(".")[0] for e in entries if e.startswith("aten::")}


cpu, cuda = listed("CPU"), listed("CUDA")
groups = {"both": cpu & cuda, "CPU only": cpu - cuda, "CUDA only": cuda - cpu}
some = {
    "both": ["linear", "conv2d", "matmul", "mse_loss", "nll_loss", "prod"],
    "CPU only": ["cat", "stack", "index_copy", "cross_entropy_loss", "fft_fft", "linalg_svd"],
    "CUDA only": ["exp", "log", "pow", "sum", "softmax", "layer_norm", "cumsum", "mv"],
}
for group, ops in groups.items():
    print(f"{group:<10} {len(ops):>3} ops, such as {', '.join(some[group])}")
    assert set(some[group]) <= ops

# %% [markdown]
# They share 39 ops, such as products and losses. 75 are on the CPU's list alone, and 74 on
# CUDA's. (These numbers may change with the version of PyTorch.) The
# third line matters most: `exp`, `sum`, `softmax` and `layer_norm` run in fp32 on CUDA, since their
# results or their inner sums can leave the range of fp16. On the CPU, whose default is bf16,
# they are not listed and stay in low precision. So a test on a CPU does not tell
# you which dtypes a GPU will use.
#
# ## Ask for any backend's policy
#
# You can still see CUDA's dtypes without CUDA, because autocast casts *before* a kernel is chosen.
# A **fake tensor** has a device, a shape and a dtype, but no data, and so it needs no such device.
# We set autocast's switch for that device by hand.


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
# Now we need a list of ops that models are made of. Each is a function of one 4x4 matrix. Weights
# and targets, where an op needs some, are made of that matrix too.


# %%
def zeros(a):
    """Four zeros in fp32, where `a` is."""
    return torch.zeros(4, device=a.device)


OPS = {
    "linear": lambda a: F.linear(a, a),
    "matmul": lambda a: a @ a,
    "conv2d": lambda a: F.conv2d(a.reshape(1, 1, 4, 4), a.reshape(1, 1, 4, 4)),
    "relu": torch.relu,
    "add": lambda a: a + a,
    "add fp32": lambda a: a + a.float(),
    "mean": torch.mean,
    "sum": torch.sum,
    "exp": torch.exp,
    "softmax": lambda a: a.softmax(-1),
    "layer_norm": lambda a: F.layer_norm(a, (4,)),
    "batch_norm": lambda a: F.batch_norm(a, zeros(a), zeros(a)),
    "mse_loss": lambda a: F.mse_loss(a, a),
    "cross_entropy": lambda a: F.cross_entropy(a, zeros(a).long()),
    "binary_cross_entropy": lambda a: F.binary_cross_entropy(a, a),
}

# %% [markdown]
# We ask four backends, with a low-precision input, since this is where they differ. Before you
# look: in which rows will the CPU's column differ from CUDA's?


# %%
def outcome(op, device, dtype):
    """The dtype that `op` returns for an input of `dtype`, shortened; "error" if it refuses."""
    try:
        return SHORT[op(torch.full((4, 4), 0.5, device=device, dtype=dtype)).dtype]
    except RuntimeError:
        return "error"


grid = {}
for backend in ("cpu", "cuda", "xpu", "mps"):
    with policy_of(backend) as backend_low:
        grid[backend] = {name: outcome(op, backend, backend_low) for name, op in OPS.items()}
_ = figures.dtype_grid(grid)
differ = ["sum", "exp", "softmax", "layer_norm"]
assert all(grid["cpu"][name] == "bf16" and grid["cuda"][name] == "fp32" for name in differ)
assert grid["cuda"]["mean"] == "fp16"
assert [name for name in grid if grid[name]["batch_norm"] == "fp32"] == ["mps"]
of_bce = [column["binary_cross_entropy"] for column in grid.values()]
assert of_bce == ["fp32", "error", "error", "fp16"]

# %% [markdown]
# Each field is the dtype that comes out of an op on a backend when a low-precision tensor goes in;
# dark fields are fp32. (`cuda` stands for [AMD's GPUs](https://docs.pytorch.org/docs/stable/notes/hip.html)
# as well.) The upper part is alike in all
# columns: `linear` to `add` stay low, and mixed inputs become fp32. From `sum` to `layer_norm` the
# CPU's column stays low where CUDA goes to fp32. Note also `mean`, which stays low on CUDA, unlike
# `sum`, and `batch_norm`, which goes to fp32 on MPS alone.
#
# `binary_cross_entropy` is an error on CUDA. [PyTorch gives the
# reason](https://docs.pytorch.org/docs/stable/amp.html): its gradient can be too large for fp16, and
# a cast to fp32 would not help, since on the way back the gradient has to pass through fp16 again. So
# autocast on CUDA refuses it whatever the dtype of its inputs, and XPU's does the same. The CPU
# computes it in fp32, and MPS leaves it in fp16. Use `binary_cross_entropy_with_logits`, on the
# values before the sigmoid, as the message says.

# %%
with policy_of("cuda", torch.float16):
    fake = torch.empty(4, 4, device="cuda")  # fp32
    message = error_of(F.binary_cross_entropy, fake, fake)
    assert F.binary_cross_entropy_with_logits(fake, fake).dtype is torch.float32
print(message.partition("\n")[0])
assert "binary_cross_entropy_with_logits" in message

# %% [markdown]
# ## The table to keep
#
# Fake tensors are only a model of a device, so we check the model where we can. This is what your
# device really returns, and the second column is compared with the prediction.

# %%
print(f"{'under autocast':<24}{'fp32 in':<10}{SHORT[low]} in")
for name, op in OPS.items():
    with torch.autocast(device.type, dtype=low):
        found = [outcome(op, device, dtype) for dtype in (torch.float32, low)]
    print(f"{name:<24}{found[0]:<10}{found[1]}")
    assert device.type not in grid or found[1] == grid[device.type][name]  # as predicted

# %% [markdown]
# If both columns have the same low dtype, the op lowers the precision. If both
# are fp32, it runs in fp32, or one of its inputs was fp32. If what goes in comes out, the op is not
# on the list of this device, or only promotes. On the CPU of this page, `linear`, `matmul` and `conv2d`
# lower the precision, the three losses run in fp32, and the ops from `relu` to `batch_norm` return what
# they were given, except `add fp32`, one of whose inputs is always fp32. [Notebook
# 09](09_xray_your_model.ipynb) does the same for a whole model.
#
# ## Autocast for a device that is not there (optional)
#
# What happens if the name does not match the device of the tensors, as with a script that was
# written for a GPU and runs on a machine without one? The tensors in this cell are on the CPU. What
# is printed depends on the machine; these are the lines of a machine without a GPU.

# %% tags=["nbval-ignore-output"]
on_the_cpu = torch.rand(4, 4)
for name in ("cuda", "xpu", "mps"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autocast(name):
            enabled, dtype = torch.is_autocast_enabled(name), (on_the_cpu @ on_the_cpu).dtype
    print(f"{name:<5} enabled: {enabled!s:<6} matmul: {dtype}  {len(caught)} warning(s)")
    assert dtype is torch.float32  # in no case did autocast cast anything
    assert torch.amp.is_autocast_available(name)  # and yet

# %% [markdown]
# For `cuda` there is one warning, which is easily lost in a log, and the block runs in fp32. For
# `xpu` and `mps` there is not even that: autocast reports that it is on, for a device that does not
# exist. `is_autocast_available` is true every time, because it tells what PyTorch was built to
# know, not what is plugged in. So a training run goes through, in fp32, slower and larger than you
# planned.
#
# You have two remedies. In your own code, take the name from where the tensors are, as `dtype_of`
# does with `device.type`. And where a user gives you the name, check it first. The
# `Precision` of this collection's package does so, and raises an error:

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
# ## Promote, and a message that you may meet (optional)
#
# The policy *promote* is for inputs whose dtypes differ. Many ops that combine tensors, such as
# `add` and `cat`, promote mixed inputs by themselves. Others refuse them, and for some of those
# autocast steps in; which ones depends on the backend. We call one without autocast and with it.

# %%
first_row = torch.zeros(1, dtype=torch.long, device=device)


def promoting(a, b):
    """An op that has the policy promote on this backend."""
    if on_cpu:
        return a.index_copy(0, first_row, b[:1])
    return torch.dot(a[0], b[0])


print("without:", error_of(promoting, wide, narrow))
print("with:   ", dtype_of(promoting, wide, narrow))
assert dtype_of(promoting, wide, narrow) is torch.float32
assert torch.cat([wide, narrow]).dtype is (wide + narrow).dtype is torch.float32  # by themselves

# %% [markdown]
# Without autocast the call fails, and with it both inputs become fp32. But *promote* knows only
# fp32 and the dtype that autocast lowers to. What if a tensor has the *other* half precision, such
# as an fp16 tensor in a bf16 block?

# %%
stranger = wide.to(other)
assert promoting(stranger, stranger).dtype is other  # without autocast it works
message = error_of(dtype_of, promoting, stranger, stranger)
print(message)
assert "Unexpected floating ScalarType in at::autocast::prioritize" in message

# %% [markdown]
# Autocast does not know which of the two is wider and raises an error, even though the op would
# have worked without autocast. If you meet this message, make that tensor or weight fp32, or let
# the block use its dtype. [Notebook 08](08_when_amp_breaks.ipynb) has the same failure in a
# network.
#
# ## Summary
#
# You can now predict the dtype of an op with three questions:
#
# | question | answer |
# |---|---|
# | Is the call eligible? | The tensors are floats but not float64, on the named device, and the call is neither in place nor has `out=`. |
# | Is the op on the list? | Autocast looks at ops and not at formulas: `x @ y.T` is on it, `torch.outer` is not. Each backend has its own list. |
# | Which policy does it have? | Lower precision, fp32, or promote. An op that is not listed, nor made of listed ops, takes what comes in. |
#
# - An explicit `dtype=` decides the dtype of the result. Parameters and their gradients stay fp32,
#   and what leaves the block keeps its dtype.
# - One block goes around the forward pass and the loss. `backward()` and `step()` stay outside.
# - An island needs `enabled=False`, and `.float()` on what goes in.
# - Outside of `inference_mode` the cache keeps the casts of trained weights until the outermost block
#   ends, so do not change a weight inside it.
# - Custom functions that call listed ops usually need `custom_fwd` and `custom_bwd`.
# - Autocast for a device that is not there casts nothing, so take its name from `device.type`.
# - CPU and CUDA share only 39 of the more than 110 ops on each of their lists. `policy_of` shows
#   what CUDA would do.
#
# Next: [notebook 03](03_grad_scaler_step_by_step.ipynb) follows a `GradScaler` through a training
# step, which fp16 needs besides autocast.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("02_autocast_dtypes")

# %% [markdown]
# ### 1. Predict five dtypes
#
# `x` and `w` are fp32 matrices on the CPU. Which dtypes do `a`, `b`, `c`, `d` and `e` have? Answer
# with a list of five strings, each `"fp32"` or `"bf16"`.
#
# ```python
# with torch.autocast("cpu", dtype=torch.bfloat16):
#     a = x @ w
#     b = a.relu()
#     c = b + x
#     d = F.mse_loss(a, b)
# e = a * 2
# ```

# %%
dtypes = ...
exercises.check_dtypes(dtypes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which of the ops are on the list? For the others, look at what goes in: `c` has two inputs. And
# what becomes of `a` when it leaves the block?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# dtypes = ["bf16", "bf16", "fp32", "fp32", "bf16"]
# ```
#
# The product is lowered, and `relu` is not listed and keeps bf16. The sum is not listed either, but
# mixed inputs promote to fp32. The loss has the policy fp32. `a` keeps its dtype outside the block.
#
# </details>
#
# ### 2. Repair an island
#
# This function should multiply in fp32, no matter whether its argument is in low precision and
# whether autocast is on. It does not. Repair it, for the CPU.
#
# ```python
# def square_in_fp32(matrix):
#     with torch.autocast("cpu", enabled=False):
#         return matrix @ matrix
# ```


# %%
def square_in_fp32(matrix):
    return ...  # matrix @ matrix, multiplied in fp32


exercises.check_island(square_in_fp32)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Switching autocast off does not change the dtype of a tensor that comes in.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def square_in_fp32(matrix):
#     with torch.autocast("cpu", enabled=False):
#         return matrix.float() @ matrix.float()
# ```
#
# You need both: without `.float()` a bf16 matrix is multiplied in bf16, and without the island
# autocast would cast the fp32 matrices down again.
#
# </details>
#
# ### 3. Count the casts
#
# `x` is an fp32 input that needs no gradient, and `w` is a trained fp32 weight. How many casts does
# autocast make in this block?
#
# ```python
# with torch.autocast("cpu", dtype=torch.bfloat16):
#     for _ in range(3):
#         x @ w
# ```

# %%
number_of_casts = ...
exercises.check_casts(number_of_casts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each product has two inputs that are fp32. Which of the two does the cache keep?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# number_of_casts = 4
# ```
#
# The weight is cast once and kept. The input requires no gradient, so it is cast in each of the
# three products.
#
# </details>
#
# ### 4. Find the policy of an op
#
# Complete `policy`. It calls `op` under the CPU's autocast in bf16 and returns `"lower precision"`,
# `"fp32"` or `"not listed"`. (Promote does not occur: `op` takes a single matrix.)


# %%
def policy(op):
    return ...


exercises.check_policy(policy)

# %% [markdown]
# <details><summary>Hint</summary>
#
# One call is not enough. Which dtypes come out for an fp32 matrix and for a bf16 matrix, under each
# of the three policies?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def policy(op):
#     wide = torch.rand(4, 4)
#     with torch.autocast("cpu", dtype=torch.bfloat16):
#         from_wide, from_narrow = op(wide).dtype, op(wide.bfloat16()).dtype
#     if from_wide == from_narrow:
#         return "fp32" if from_wide is torch.float32 else "lower precision"
#     return "not listed"
# ```
#
# Here an op with one of the two policies returns the same dtype for both, and one without returns
# what it was given.
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html): the
#   op reference for CUDA, XPU and CPU, and the reference of `torch.autocast` and the two decorators.
# - PyTorch, [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): custom autograd
#   functions, several models and losses.
# - PyTorch, [Fake tensors](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html):
#   what they are made for.
# - AMD, [Automatic mixed precision in PyTorch using AMD
#   GPUs](https://rocm.blogs.amd.com/artificial-intelligence/automatic-mixed-precision/README.html),
#   2024: where the five-line demo comes from.
# - [Pull request 165068](https://github.com/pytorch/pytorch/pull/165068): in versions before 2.11 a
#   pass under `no_grad` could leave a cast without a graph in the cache. Older workarounds deal with
#   that trap, which is gone.
