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
# **What you'll do.** Find out which dtype an op returns under `torch.autocast`. Follow the casts through a
# forward and a backward pass. Compare the rules of a CPU with those of CUDA.
#
# **What you'll learn.**
# - three questions that predict the dtype of an op;
# - how to disable autocast for one region, and what the cache of weight casts does;
# - how to make an `autograd.Function` work under autocast;
# - why a model may behave differently under autocast on a CPU and on a GPU.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb), which explains fp32, fp16 and bf16. You need
# no GPU.

# %% tags=["nbval-ignore-output"]
import torch
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd

from course import figures, start
from course.autocast_rules import OPS, SHORT, OpLog, error_of, outcome, policy_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
_ = torch.manual_seed(0)

# %% [markdown]
# ## The idea in five lines
#
# We run three ops on fp32 tensors under autocast. Before you run this: which dtype does each result have?
#
# In this notebook, `low` is the 16-bit dtype that autocast casts to. We use the default of the *backend* (the
# type of device): bf16 on a CPU and fp16 on a GPU.

# %%
low = torch.get_autocast_dtype(device.type)
x, y = torch.rand(1024, 1, device=device), torch.rand(1024, 1, device=device)
with torch.autocast(device.type, dtype=low):
    product, total, outer = x @ y.T, x + y, torch.outer(x.flatten(), y.flatten())
print(f"x @ y.T is {product.dtype}, x + y is {total.dtype}, torch.outer is {outer.dtype}")
assert product.dtype is low
assert total.dtype is outer.dtype is x.dtype is torch.float32
defaults = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda", "xpu", "mps")]
assert defaults == [torch.bfloat16] + [torch.float16] * 3

# %% [markdown]
# Autocast casts the inputs of matmuls, because matmuls can be [much
# faster](https://docs.pytorch.org/docs/stable/amp.html) in 16 bits. Autocast does not change an addition.
# `torch.outer` computes the same matrix as the matmul, but in fp32: the dtype depends on which *op* is called.
#
# Autocast passes 16-bit *copies* of the inputs to the matmul, so `x` is still fp32. **The parameters of a model stay
# fp32 in the same way.** Do not call `.half()` or `.bfloat16()` on a model that you train under autocast: you would
# lose its fp32 weights, which [small updates need](01_number_formats.ipynb#Swamping).
#
# ## Four things that can happen to an op
#
# Each backend has a [list of ops](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference). An op
# on the list usually has one of three policies. Autocast does not change any other op.
#
# | policy | what autocast does | typical ops |
# |---|---|---|
# | lower precision | casts the inputs to `low` | `linear`, `conv2d`, `matmul` |
# | fp32 | runs the op in fp32 | `mse_loss`, `prod`; on CUDA also `exp`, `softmax` and `layer_norm` |
# | promote | casts the inputs to fp32 if one of them is fp32 | `index_copy` and `cat` on a CPU |
# | (not on the list) | nothing | `relu`, `add`, `mean` |
#
# <!-- tests/notebooks/test_02_autocast_dtypes.py -->
#
# You can predict the dtype of an op with three questions, in this order:
#
# 1. **Is the call eligible?** [Some tensors and some calls](#What-is-eligible,-and-what-is-not) are not eligible.
# 2. **Is the op on the list of this backend?** If not, PyTorch's usual rules apply: the sum of an fp32
#    matrix and a 16-bit matrix is fp32. (Such an op may call a listed op: on a CPU, `einsum("ij,jk->ik", a, b)` calls
#    `bmm` and returns bf16.) <!-- tests/notebooks/test_02_autocast_dtypes.py -->
# 3. **Which policy does the op have there?**
#
# ## Find the policy of an op
#
# To find the policy of an op, call it with an fp32 matrix and then with a matrix in low precision. We do
# this for common ops ([`course/autocast_rules.py`](course/autocast_rules.py)). Before you look: for which
# ops do both calls return the same dtype?

# %%
table = {}
print(f"{'op under autocast':<24}{'fp32 input':<14}{SHORT[low]} input")
for name, op in OPS.items():
    with torch.autocast(device.type, dtype=low):
        table[name] = [outcome(op, device, dtype) for dtype in (torch.float32, low)]
    print(f"{name:<24}{table[name][0]:<14}{table[name][1]}")
assert table["linear"] == table["matmul"] == table["conv2d"] == [SHORT[low]] * 2
assert table["mse_loss"] == table["cross_entropy"] == table["add fp32"] == ["fp32"] * 2
assert table["relu"] == table["add"] == table["mean"] == ["fp32", SHORT[low]]

# %% [markdown]
# Each row shows the policy of the op, or of an op that it calls:
#
# - **Low precision in both columns:** *lower precision*.
# - **fp32 in both columns:** *fp32*. The row `add fp32` is an exception: its second summand is always fp32, so
#   PyTorch itself promotes the sum.
# - **The input's dtype in each column:** the op is not on the list of this device. (An op with the policy
#   *promote* would look the same, because we pass a single matrix.)
#
# ## What is eligible, and what is not
#
# Autocast casts the inputs of *eligible* calls only. We multiply fp32 matrices in four ways. We also call
# `prod`, whose policy is fp32, on a matrix in low precision, with and without a `dtype`. Which of the six
# results will be in low precision?


# %%
def dtype_of(op, *args):
    """The dtype that `op(*args)` returns under autocast."""
    with torch.autocast(device.type, dtype=low):
        return op(*args).dtype


wide = torch.rand(4, 4, device=device)
narrow = wide.to(low)
buffer, elsewhere = torch.zeros(4, 4, device=device), torch.empty(4, 4, device="meta")
found = {
    "a @ b": dtype_of(torch.matmul, wide, wide),
    "in place": dtype_of(buffer.addmm_, wide, wide),
    "with out=": dtype_of(lambda: torch.mm(wide, wide, out=buffer)),
    "on another device": dtype_of(torch.matmul, elsewhere, elsewhere),
    "prod": dtype_of(torch.prod, narrow),
    "prod with dtype=": dtype_of(lambda: torch.prod(narrow, dtype=low)),
}
for name, dtype in found.items():
    print(f"{name:<18} {dtype}")
assert list(found.values()) == [low] + [torch.float32] * 4 + [low]

# %% [markdown]
# Autocast runs only the first matmul in low precision. Plain `prod` follows its policy and returns fp32. The other
# four calls keep their dtypes:
#
# - **In-place ops and `out=`** write into an existing tensor, whose dtype cannot change.
# - **Tensors on another device** are not cast. Pass the device type of your tensors, `x.device.type`, to
#   `torch.autocast`. <!-- tests/notebooks/test_02_autocast_dtypes.py -->
# - **An explicit `dtype=`** sets the dtype of the result.
#
# Autocast does not cast float64 and integer tensors either. <!-- tests/notebooks/test_02_autocast_dtypes.py -->
#
# ## What leaves the block
#
# A result keeps its dtype when the block ends. Outside the block, we add a 16-bit result to an fp32 matrix,
# and we multiply the two. What will happen in each case?

# %%
with torch.autocast(device.type, dtype=low):
    inside = wide @ wide
print("sum:   ", (inside + wide).dtype)
print("matmul:", error_of(torch.matmul, inside, wide))
assert (inside + wide).dtype is torch.float32
assert (inside.float() @ wide).dtype is torch.float32

# %% [markdown]
# The addition promotes to fp32, but the matmul raises an error. Call `.float()` on the 16-bit tensor, or
# move the matmul into the block. The loss [belongs in the
# block](https://docs.pytorch.org/docs/stable/amp.html#torch.autocast) anyway.
#
# ## Backward: no autocast there
#
# `OpLog` records the ops that PyTorch runs, and the dtypes of their arguments. A cast by autocast appears as
# `_to_copy`, with the dtype *before* the cast. We run a forward pass under autocast and the backward pass outside.
# Before you run this: in which dtype will the backward pass multiply?

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
# The forward pass casts both inputs down and multiplies in low precision. Then it casts the result up and computes the
# loss in fp32. The backward pass multiplies in low precision as well, because the saved tensors are in low precision.
# Then it casts the gradient of `weight` back to fp32.
#
# **Keep `backward()` out of the block**, as [PyTorch
# recommends](https://docs.pytorch.org/docs/stable/amp.html#torch.autocast). Inside the block, autocast would
# run the backward of an fp32 matmul in low precision. <!-- tests/notebooks/test_02_autocast_dtypes.py -->
#
# ## Nest and disable autocast
#
# Put code that needs fp32 into a nested block with `enabled=False`. We call this block an *fp32 island*. Before you
# run this: which of the two matmuls in the island runs in fp32?

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
# Only the second matmul runs in fp32. `enabled=False` switches off *casting*, so low-precision inputs are
# still multiplied in low precision. **An fp32 island needs `.float()` on its 16-bit inputs.**
#
# ## The cache of weight casts
#
# If a block uses a weight five times, one cast is enough. Autocast therefore has a cache of weight casts. We count the
# casts of a trained weight, a frozen weight, and a weight that is computed from another tensor.


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
# Only the trained weight, with the cache, was cast just once. The cache keeps the casts of fp32 **parameters that
# require a gradient** until the outermost block ends. <!-- tests/notebooks/test_02_autocast_dtypes.py --> In
# `torch.inference_mode()` the cache stays empty. <!-- tests/tracing/test_inference_memory.py -->
#
# If a weight changes inside the block, the cached cast is out of date. We double a weight inside a block.

# %%
identity = torch.eye(4, device=device)
with torch.autocast(device.type, dtype=low):
    before = identity @ weight
    with torch.no_grad():
        weight.mul_(2)  # as optimizer.step() would
    stale = identity @ weight
with torch.autocast(device.type, dtype=low):
    fresh = identity @ weight
for name, result in {"same block": stale, "new block": fresh}.items():
    print(f"{name}: the product is {(result / before).mean():g} times as large as before")
assert torch.equal(stale, before)
assert torch.equal(fresh, 2 * before)

# %% [markdown]
# The weight has doubled, but the matmul in the same block still uses the old cast. **Put one block around
# each forward pass, and never one around the whole training loop.**
#
# ## Your own autograd functions
#
# We call a `torch.autograd.Function` inside an autocast block. Its `backward` runs outside the block, so autocast
# casts only in `forward`. Do the dtypes in `backward` match?


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # the fp32 arguments, not autocast's casts
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # grad has the dtype of the output
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


with torch.autocast(device.type, dtype=low):
    output = Product.apply(wide, weight)
assert output.dtype is low
print(error_of(output.float().sum().backward))

# %% [markdown]
# The backward pass raises an error, because `grad` and the saved tensors differ in dtype. [Two
# decorators](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.custom_fwd) repair the function: `custom_fwd`
# saves the state of autocast in `forward`, and `custom_bwd` restores it for `backward`. If your function works only in
# fp32, pass `cast_inputs=torch.float32` to `custom_fwd`.


# %%
class AmpProduct(torch.autograd.Function):
    forward = staticmethod(custom_fwd(Product.forward, device_type=device.type))
    backward = staticmethod(custom_bwd(Product.backward, device_type=device.type))


weight.grad = None
with torch.autocast(device.type, dtype=low):
    output = AmpProduct.apply(wide, weight)
output.float().sum().backward()
print(f"output {output.dtype}, gradient {weight.grad.dtype}")
assert (output.dtype, weight.grad.dtype) == (low, torch.float32)
exact = wide.T @ torch.ones(4, 4, device=device)
torch.testing.assert_close(weight.grad, exact, rtol=0.02, atol=0)  # about five roundings of 2^-8

# %% [markdown]
# Now the backward pass succeeds.
#
# ## Ask for any backend's policy
#
# You can see which dtypes autocast uses on CUDA, even without a GPU. A **fake tensor** has a device, a shape
# and a dtype, but no data, so its device need not exist. We give each op a fake tensor in low precision.
# Before you look: which ops will return fp32 on CUDA, but not on the CPU?

# %%
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
here = grid.get(device.type, {})  # fake tensors are a model of a device: compare it with the device
assert all(table[name][1] == predicted for name, predicted in here.items())

# %% [markdown]
# The figure shows the dtype that each op returns for an input in low precision:
#
# - From `linear` to `add fp32`, an op has the same policy on all four backends.
#   <!-- tests/notebooks/test_02_autocast_dtypes.py -->
# - From `sum` to `layer_norm`, the result is in low precision on the CPU and in fp32 on CUDA. You therefore cannot
#   infer a GPU's dtypes from autocast on the CPU.
# - `binary_cross_entropy` raises an error on CUDA and XPU: use `binary_cross_entropy_with_logits` ([notebook
#   08](08f_ops_and_devices.ipynb#BCELoss-is-refused-on-a-GPU) says why).
#
# `amp-lab ops --device cuda` [prints CUDA's list with the policy of each
# op](../docs/your_model.md#what-would-autocast-do-to-my-model). <!-- tests/tracing/test_op_table.py -->
#
# ## Summary
#
# Three questions predict the dtype of an op:
#
# | question | answer |
# |---|---|
# | Is the call eligible? | Calls in place or with `out=` usually are not. Tensors that are float64, integer or on another device are not. |
# | Is the op on the list? | `matmul` is listed, `add` is not. Each backend has its own list. |
# | Which policy does the op have? | Lower precision, fp32, or promote. |
#
# - fp32 parameters and their gradients stay fp32. A result keeps its dtype after the block.
# - Put one block around the forward pass and the loss. Call `backward()` and `step()` outside.
# - An fp32 island needs `enabled=False`, and `.float()` on its 16-bit inputs.
#
# Next: [notebook 03](03_grad_scaler_step_by_step.ipynb) follows a `GradScaler` through a training step. Training in
# fp16 usually needs a scaler.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("02_autocast_dtypes")

# %% [markdown]
# ### 1. Predict five dtypes
#
# `x` and `w` are fp32 matrices on the CPU. Which dtypes do `a` to `e` have? Answer with a list of five
# strings, each `"fp32"` or `"bf16"`.
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
# Which of the ops are on the list? For the other ops, look at the dtypes of their inputs.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# dtypes = ["bf16", "bf16", "fp32", "fp32", "bf16"]
# ```
#
# The matmul returns bf16. `relu` is not listed, so `b` is bf16 too. PyTorch promotes the mixed inputs of the sum to
# fp32. The loss has the policy fp32. `a` keeps its dtype outside the block, so `e` is bf16.
#
# </details>
#
# ### 2. Repair an island
#
# This function should compute `matrix @ matrix` in fp32, for an fp32 or a bf16 matrix, with and without
# autocast. It does not. Repair it.
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
# Switching autocast off does not change the dtype of an input tensor.
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
# Without `.float()`, a bf16 matrix is multiplied in bf16. Without `enabled=False`, autocast would cast the
# fp32 matrices down again.
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
# Each matmul has two fp32 inputs. Which input's cast is cached?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# number_of_casts = 4
# ```
#
# The weight is cast once and cached. The input requires no gradient, so it is cast in each of the three
# matmuls.
#
# </details>
#
# ### 4. Find the policy of an op
#
# Complete `policy`. It calls `op` under the CPU's autocast in bf16 and returns `"lower precision"`,
# `"fp32"` or `"not listed"`. You may ignore *promote*.


# %%
def policy(op):
    return ...


exercises.check_policy(policy)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Call `op` with an fp32 matrix and with a bf16 matrix.
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
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision package](https://docs.pytorch.org/docs/stable/amp.html): the lists of
#   ops, and the reference for `torch.autocast`, `custom_fwd` and `custom_bwd`.
# - PyTorch, [Automatic Mixed Precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): custom autograd functions.
