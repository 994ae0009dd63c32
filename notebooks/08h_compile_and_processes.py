# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Repair compiled and distributed training
#
# **What you'll do.** Look up one failure: its message or symptom, the smallest program that shows it,
# why it happens, and the fix.
#
# **What you'll learn.** You will be able to repair:
# - [A compiled model has other gradients](#A-compiled-model-has-other-gradients);
# - [The scaler is inside a compiled function](#The-scaler-is-inside-a-compiled-function);
# - [An LSTM fails under autocast on the CPU](#An-LSTM-fails-under-autocast-on-the-CPU);
# - [TF32 is set in the old and in the new way](#TF32-is-set-in-the-old-and-in-the-new-way);
# - [Old names warn](#Old-names-warn);
# - [DDP refuses the model or its step](#DDP-refuses-the-model-or-its-step).
#
# **What you need.** No GPU. This notebook is a reference: go to the section that you need. All failures
# are in the [index](08_when_amp_breaks.ipynb).

# %% tags=["nbval-ignore-output"]
import warnings
from contextlib import contextmanager

import torch
from torch import nn

from course import figures, start
from course.failures import make, message_of, warnings_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# %% [markdown]
# ## A compiled model has other gradients
#
# `AMP0027` <!-- failure
# symptoms = [
#   "`torch.compile` changes the gradients",
# ]
# -->
#
# **What you see.** With `torch.compile` the gradients differ, although the outputs are the same.
#
# **The smallest program that does it.** We compile an fp32 island, and call it inside a block. (The
# backend `aot_eager` needs no C++ compiler.)


# %%
def island(x, weight):
    with torch.autocast("cpu", enabled=False):
        return x @ weight


def called_in_a_block(function):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(torch.full((1, 2), 1.001), weight)


weight = torch.full((2, 1), 1.001, requires_grad=True)
compiled = torch.compile(island, backend="aot_eager")
gradients = {}
for name, function in {"eager": island, "compiled": compiled}.items():
    output = called_in_a_block(function)
    (gradient,) = torch.autograd.grad(output.sum(), weight)
    gradients[name] = gradient[0].item()
    print(f"{name:<10}output {output.item():.3f}  gradient {gradients[name]:.3f}")
assert (gradients["eager"], gradients["compiled"]) == (torch.tensor(1.001).item(), 1.0)

# %% [markdown]
# **Why.** The compiler plans the backward pass together with the forward pass, and assumes that the
# autocast around the call is on in `backward()` too. So the island's gradient went through bf16 and
# is 1.000, while in fp32 it is 1.001. CUDA graphs made with `torch.cuda.make_graphed_callables` [do
# so too](https://github.com/pytorch/pytorch/issues/120930), and [want
# `cache_enabled=False`](https://github.com/pytorch/pytorch/issues/71631).
#
# **The fix.** Put the block *inside* the compiled function, where the compiler sees its end. Or set
# `torch._functorch.config.backward_pass_autocast = "off"`, which is not a public interface.


# %%
@torch.compile(backend="aot_eager")
def with_its_block(x, weight):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return island(x, weight)


output = with_its_block(torch.full((1, 2), 1.001), weight)
(gradient,) = torch.autograd.grad(output.sum(), weight)
assert gradient[0].item() == gradients["eager"]
torch.compiler.reset()  # or `compiled` would keep the graph that it has
with torch._functorch.config.patch(backward_pass_autocast="off"):
    output = called_in_a_block(torch.compile(island, backend="aot_eager"))
(gradient,) = torch.autograd.grad(output.sum(), weight)
assert gradient[0].item() == gradients["eager"]

# %% [markdown]
# **Notice it earlier.** Before the long run, compare the gradients of one step, compiled and not
# compiled.

# %% [markdown]
# ## The scaler is inside a compiled function
#
# `AMP0041` <!-- failure
# messages = [
#   "Attempted to inline function marked as skipped",
# ]
# -->
#
# **What you see.** With `fullgraph=True`, the compiled function raises
# `Attempted to inline function marked as skipped`
# Without it there is no message, but the graph breaks there.
#
# **The smallest program that does it.** We compile a function that scales the loss.

# %%
scaler = torch.amp.GradScaler("cpu")
whole = torch.compile(lambda h: scaler.scale(h.sum()), backend="aot_eager", fullgraph=True)
message = message_of(lambda: whole(x))
print(message.splitlines()[0])
assert "Attempted to inline function marked as skipped" in message
assert "grad_scaler.py" in message
broken = torch._dynamo.explain(lambda h: scaler.scale(h.sum()))(x)
assert len(broken.break_reasons) == 1

# %% [markdown]
# **Why.** The compiler has been told to skip the file that defines the scaler, as the message goes on
# to say.
#
# **The fix.** Compile the model, or the function that computes the loss, including autocast. Leave
# `scale`, `step` and `update` outside.

# %%
loss_of = torch.compile(lambda h: h.sum(), backend="aot_eager", fullgraph=True)
assert scaler.scale(loss_of(x)) == 3 * scaler.get_scale()

# %% [markdown]
# **Notice it earlier.** Compile with `fullgraph=True` once, in a test, and read what it says.

# %% [markdown]
# ## An LSTM fails under autocast on the CPU
#
# `AMP0042` <!-- failure
# messages = [
#   "could not create a primitive descriptor for the LSTM forward propagation primitive",
# ]
# -->
#
# **What you see.** `nn.LSTM` on an fp32 input under `torch.autocast("cpu")` raises
# `could not create a primitive descriptor for the LSTM forward propagation primitive`
# The same program may run on another machine. `nn.GRU` and `nn.RNN` run. <!-- tests/core/test_cpu.py -->
#
# **The smallest program that does it.** We run an LSTM in both 16-bit formats. fp16 fails wherever
# oneDNN trains it; whether bf16 fails depends on your CPU. <!-- tests/core/test_cpu.py -->


# %% tags=["nbval-ignore-output"]
def outcome_of(dtype):
    """What becomes of an LSTM under autocast to `dtype` on this CPU."""
    layer, sequence = nn.LSTM(4, 8), torch.ones(3, 2, 4)  # (T, B, C)
    try:
        with torch.autocast("cpu", dtype=dtype):
            layer(sequence)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "runs"


for dtype in (torch.bfloat16, torch.float16):
    outcome = outcome_of(dtype)
    print(f"{dtype}: {outcome}")
    message = "could not create a primitive descriptor for the LSTM forward propagation primitive"
    assert outcome in ("runs", message)

# %% [markdown]
# **Why.** For an LSTM in fp32, torch picks the kernel of oneDNN, a library that comes with it. After
# that, autocast casts the tensors to 16 bits. On x86 oneDNN has an LSTM in bf16 from AVX-512 on, and
# none that trains in fp16 ([measured on one CPU, limited to older
# instructions](../data/results/cpu-ops-xeon-2-cores.json)). <!-- tests/core/test_cpu.py -->
#
# **The fix.** Run the layer in an fp32 region: switch autocast off around it, and give it fp32.

# %%
layer, sequence = nn.LSTM(4, 8), torch.ones(3, 2, 4)  # (T, B, C)


def in_fp32(sequence):
    with torch.autocast("cpu", enabled=False):
        return layer(sequence.float())


for dtype in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        output, _ = in_fp32(sequence)
    output.sum().backward()
    assert output.dtype is torch.float32
    assert layer.weight_ih_l0.grad.isfinite().all()

# %% [markdown]
# **Notice it earlier.** `amp-lab doctor` says where an LSTM fails on your CPU, and `amp-lab xray
# --device cpu` names the layers of your model that will. <!-- tests/core/test_cpu.py -->

# %% [markdown]
# ## TF32 is set in the old and in the new way
#
# `AMP0037` <!-- failure
# messages = [
#   "you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.",
# ]
# symptoms = [
#   "fp32 results differ between two GPUs",
# ]
# -->
#
# **What you see.** A message contains
# `you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.`
# It may come from code that only reads the setting, such as
# [`torch.compile`](https://github.com/pytorch/pytorch/issues/166387). Or there is no message, and
# fp32 results of two GPUs differ: each product in a sum by up to a thousandth, and the sum by more
# where it cancels.
#
# **The smallest program that does it.** One line sets TF32 by the old name, another by the new one,
# and the third reads it. This happens when a library and your script each have their own.


# %%
def read_tf32_after_both():
    """Set TF32 in the old and in the new way, and read it; leaves it off."""
    matmul = torch.backends.cuda.matmul
    try:
        matmul.allow_tf32 = True
        matmul.fp32_precision = "ieee"
        return matmul.allow_tf32
    finally:
        matmul.allow_tf32 = False


message = message_of(read_tf32_after_both)
print(message)
assert (
    "you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul"
    in message
)

# %% [markdown]
# **Why.** Since Ampere, NVIDIA's GPUs can round the inputs of fp32 products to
# [TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices),
# which has the range of fp32 and 11 significant bits. PyTorch has two sets of names for that
# switch, and refuses to answer when they contradict each other.
#
# **The fix.** Set the mode of products with `torch.set_float32_matmul_precision`, and that of
# convolutions with `torch.backends.cudnn.allow_tf32`. Whoever changes the new name, `fp32_precision`,
# by itself may get this error when anyone reads an old one. [Notebook
# 19](19_choose_your_precision.ipynb#What-fp32-means) shows what each mode changes.

# %%
matmul = torch.backends.cuda.matmul
for mode, new_name, is_tf32 in (("high", "tf32", True), ("highest", "ieee", False)):
    torch.set_float32_matmul_precision(mode)
    assert (matmul.fp32_precision, matmul.allow_tf32) == (new_name, is_tf32)
assert 2 * 2**-11 < 0.001  # two factors, each rounded to 11 bits, against fp32's 24

# %% [markdown]
# **Notice it earlier.** Search your code and your libraries for `allow_tf32` and `fp32_precision`, and
# print the setting when a run starts.

# %% [markdown]
# ## Old names warn
#
# `AMP0035` <!-- failure
# messages = [
#   "`torch.cuda.amp.autocast(args...)` is deprecated.",
#   "`torch.cuda.amp.GradScaler(args...)` is deprecated.",
#   "`torch.cuda.amp.custom_fwd(args...)` is deprecated.",
#   "full(): argument 'fill_value' (position 2) must be Number, not str",
# ]
# quoted = [
#   "ImportError: cannot import name 'amp' from 'apex'",
# ]
# -->
#
# **What you see.** One of these warnings appears, or an import fails:
# - `` `torch.cuda.amp.autocast(args...)` is deprecated. ``
# - `` `torch.cuda.amp.GradScaler(args...)` is deprecated. ``
# - `` `torch.cuda.amp.custom_fwd(args...)` is deprecated. ``, or `custom_bwd`
# - `ImportError: cannot import name 'amp' from 'apex'`
# - `full(): argument 'fill_value' (position 2) must be Number, not str`, after the warning was half
#   followed
#
# **The smallest program that does it.** We use the old names. The last line gives a device to the
# old class.

# %%
old_autocast = warnings_of(lambda: torch.cuda.amp.autocast(enabled=False))
old_scaler = warnings_of(lambda: torch.cuda.amp.GradScaler(enabled=False))
old_decorator = warnings_of(lambda: torch.cuda.amp.custom_fwd(make))
print(old_autocast, old_scaler, old_decorator, sep="\n")
assert "`torch.cuda.amp.autocast(args...)` is deprecated." in old_autocast
assert "`torch.cuda.amp.GradScaler(args...)` is deprecated." in old_scaler
assert "`torch.cuda.amp.custom_fwd(args...)` is deprecated." in old_decorator
with warnings.catch_warnings(action="ignore"):
    message = message_of(lambda: torch.cpu.amp.GradScaler("cpu").scale(torch.ones(1)))
assert "full(): argument 'fill_value' (position 2) must be Number, not str" in message

# %% [markdown]
# **Why.** The functions have moved to `torch.amp`, which serves several kinds of devices. The names
# in `torch.cuda.amp` still work, for the device `"cuda"`. The first argument of the old `GradScaler`
# is the scale and not a device, so a device stands where a number should. Apex [removed its
# `amp`](https://github.com/NVIDIA/apex/pull/1896) in 2025.
#
# **The fix.** Write `torch.autocast("cuda", dtype=…)`, `torch.amp.GradScaler("cuda")` and
# `@torch.amp.custom_fwd(device_type="cuda")`, also in place of `apex.amp`. `amp-lab migrate`
# rewrites the names of torch, and says for the lines of Apex what to write ([notebook
# 13](13_from_apex.ipynb)). If a library imports `apex.amp`, as [older versions of
# transformers](https://github.com/huggingface/transformers/issues/38095) do, update the library.

# %%
assert warnings_of(lambda: torch.autocast("cuda", dtype=torch.float16, enabled=False)) == ""
assert warnings_of(lambda: torch.amp.GradScaler("cuda", enabled=False)) == ""
assert warnings_of(lambda: torch.amp.custom_fwd(make, device_type="cuda")) == ""
with warnings.catch_warnings(action="ignore"):
    assert torch.cuda.amp.autocast(enabled=False).device == "cuda"

# %% [markdown]
# **Notice it earlier.** Run the tests with `python -W error::FutureWarning`.

# %% [markdown]
# ## DDP refuses the model or its step
#
# `AMP0040` <!-- failure
# messages = [
#   "SyncBatchNorm layers only work with GPU modules",
#   "Expected to have finished reduction in the prior iteration before starting a new one.",
#   "FSDP expects uniform original parameter dtype but got",
# ]
# quoted = [
#   "Must flatten tensors with uniform dtype but got",
# ]
# symptoms = [
#   "the ranks of a distributed run drift apart, have other gradient norms, or skip different steps",
# ]
# -->
#
# **What you see.** DDP raises one of these:
# - `SyncBatchNorm layers only work with GPU modules`
# - `Expected to have finished reduction in the prior iteration before starting a new one.`
#
# FSDP2 raises `FSDP expects uniform original parameter dtype but got`, and the older FSDP
# `Must flatten tensors with uniform dtype but got`
# ([a report](https://github.com/huggingface/trl/issues/1723)).
#
# Or there is no message, but the ranks drift apart: their losses differ, or their scalers skip
# different steps.
#
# **The smallest program that does it.** A process group of one process is enough. The first model
# has synchronised batch normalisation and is on the CPU. The second has a layer that its forward
# pass does not use. The third has trained weights in two dtypes.


# %%
@contextmanager
def group_of_one():
    """Inside: a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Unused(nn.Module):
    """Two layers, of which only the first one is used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


# %% [markdown]
# The second model fails in its second step, and the third in its forward pass:


# %%
def two_steps(**options):
    model = DistributedDataParallel(Unused(), **options)
    for _ in range(2):
        model(x).sum().backward()


with group_of_one():
    norms = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    )
    messages = [message_of(lambda: DistributedDataParallel(norms)), message_of(two_steps)]
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(mixed, mesh=mesh)
    messages.append(message_of(lambda: mixed(x)).partition(" {")[0])
print(*[message.partition(" This error")[0] for message in messages], sep="\n")
assert "SyncBatchNorm layers only work with GPU modules" in messages[0]
assert (
    "Expected to have finished reduction in the prior iteration before starting a new one."
    in messages[1]
)
assert "FSDP expects uniform original parameter dtype but got" in messages[2]

# %% [markdown]
# **Why.** DDP refuses `SyncBatchNorm` on a CPU. It averages a bucket [when each of its
# gradients is ready](https://docs.pytorch.org/docs/stable/notes/ddp.html), so a parameter that
# never gets one leaves it waiting. FSDP2 wants one dtype for all
# trained weights of a `fully_shard`. (A frozen base in bf16 with adapters in fp32 is not
# refused.) Ranks drift apart without a message when a gradient changes after the average, or when
# the scaler checks it before. [Notebook 11](11_scale_out.ipynb) shows both. And they do when the
# scalers have different scales, such as after one rank alone has loaded its state: each rank divides
# the same average by its own scale. With accumulation, put
# forward *and* backward of all batches but the last one into
# [`model.no_sync()`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
#
# **The fix.** On a CPU, test with plain batch normalisation. Take unused layers out, or set
# [`find_unused_parameters=True`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
# which costs a walk through the graph in each step. For FSDP, cast the trained weights to fp32
# (in bf16 there are no [fp32 master
# weights](../docs/several_machines.md#what-is-in-which-dtype)), or call `fully_shard` on each module
# of another dtype first. Give all ranks the scaler's state of one.

# %%
with group_of_one():
    two_steps(find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (1,))
    one_dtype = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()).float()
    fully_shard(one_dtype, mesh=mesh)
    assert one_dtype(x).dtype is torch.float32
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    for module in (own[1], own):
        fully_shard(module, mesh=mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own(x).dtype is torch.bfloat16
    base = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    frozen = nn.Sequential(nn.Linear(2, 2), base)
    fully_shard(frozen, mesh=mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert frozen(x).dtype is torch.bfloat16

# %%
with group_of_one():
    states = [torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()]  # of rank 0
    dist.broadcast_object_list(states, src=0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(states[0])
    assert scaler.get_scale() == 1024

# %%
scales = torch.tensor([1024.0, 2048.0])  # of two ranks, each with a gradient of 1
assert (scales.mean() / scales).tolist() == [1.5, 0.75]
assert not dist.is_initialized()

# %% [markdown]
# **Notice it earlier.** Run two steps in a process group of one, as here, in a unit test.

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
