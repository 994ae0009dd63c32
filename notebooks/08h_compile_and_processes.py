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
# **What you'll do.** Look up a failure by its error message or its symptom.
#
# **What you'll learn.** You will know how to repair these failures:
# - [A compiled model has different gradients](#A-compiled-model-has-different-gradients);
# - [The scaler is inside a compiled function](#The-scaler-is-inside-a-compiled-function);
# - [An LSTM fails under autocast on the CPU](#An-LSTM-fails-under-autocast-on-the-CPU);
# - [TF32 is set in the old and in the new way](#TF32-is-set-in-the-old-and-in-the-new-way);
# - [torch.cuda.amp warns that it is deprecated](#torch.cuda.amp-warns-that-it-is-deprecated);
# - [DDP waits for a parameter without a gradient](#DDP-waits-for-a-parameter-without-a-gradient);
# - [FSDP refuses parameters of two dtypes](#FSDP-refuses-parameters-of-two-dtypes);
# - [The ranks of a distributed run diverge](#The-ranks-of-a-distributed-run-diverge).
#
# **What you need.** You need no GPU. Read only the section about your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `make` returns a model and its optimizer. `message_of(call)`
# returns the error message that `call` raises, and `warnings_of(call)` returns the warnings.

# %% tags=["nbval-ignore-output"]
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from course import start
from course.failures import make, message_of, warnings_of

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below

# %% [markdown]
# ## A compiled model has different gradients
#
# `AMP0027` <!-- failure
# symptoms = [
#   "`torch.compile` changes the gradients",
#   "gradients are different after `torch.compile`, outputs are the same",
#   "a gradient of an fp32 region is infinite in the compiled model only",
#   "the compiled backward pass ignores autocast(enabled=False)",
#   "the gradient norm after torch.compile differs from eager under amp",
# ]
# words = "aot_eager AOTAutograd backward_pass_autocast island grad_norm inductor"
# -->
#
# **What you see.** With `torch.compile` the gradients differ from those in eager mode, or are
# [infinite](https://github.com/pytorch/pytorch/issues/153044), although the outputs are the same.
#
# **A small example.** A function switches autocast off to compute in fp32. We compile
# this function, and call it inside an autocast block.


# %%
def fp32_matmul(x):
    with torch.autocast("cpu", enabled=False):
        return x @ weight


def gradient(function, block=True):
    """The gradient of the weight, if `function` is called in an autocast block or outside."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=block):
        output = function(torch.full((1, 2), 1.001))
    return torch.autograd.grad(output.sum(), weight)[0][0].item()


weight = torch.full((2, 1), 1.001, requires_grad=True)
eager = gradient(fp32_matmul)
compiled = gradient(torch.compile(fp32_matmul, backend="aot_eager"))
print(f"gradient: eager {eager:.3f}, compiled {compiled:.3f}")
assert (eager, compiled) == (torch.tensor(1.001).item(), 1.0)

# %% [markdown]
# **Why.** By default, `torch.compile` plans the backward pass together with the forward pass. It [assumes that the
# autocast around the call is also on in
# `backward()`](https://docs.pytorch.org/docs/stable/torch.compiler_backward.html), so it can compute the gradients of
# an `autocast(enabled=False)` region in 16 bits.
#
# **The fix.** Move the autocast block *into* the compiled function. Or set
# `torch._functorch.config.backward_pass_autocast = "off"` before you compile.


# %%
@torch.compile(backend="aot_eager")
def with_its_block(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fp32_matmul(x)


assert gradient(with_its_block, block=False) == eager
torch.compiler.reset()  # forget the compiled code
with torch._functorch.config.patch(backward_pass_autocast="off"):
    assert gradient(torch.compile(fp32_matmul, backend="aot_eager")) == eager

# %% [markdown]
# ## The scaler is inside a compiled function
#
# `AMP0041` <!-- failure
# general = true
# messages = [
#   "Attempted to inline function marked as skipped",
#   "Dynamo developers have intentionally marked that the function `GradScaler.{name}` should not be traced.",
# ]
# quoted = [
#   "inline in skipfiles: GradScaler.{name}",
# ]
# symptoms = [
#   "torch.compile of the whole training step has a graph break at the GradScaler",
#   "fullgraph=True fails at scaler.scale(loss)",
#   "can I compile a train step with the grad scaler in it",
#   "compiling the whole train step together with scaler.step fails or breaks the graph",
# ]
# words = "dynamo Unsupported gb0008 fullgraph graph break train_step scaler.step unscale_ compile"
# -->
#
# **What you see.** With `fullgraph=True`, the compiled function raises
# `Attempted to inline function marked as skipped`. The message names a method of `GradScaler`. By default
# (`fullgraph=False`), the graph breaks at this method without a message.
#
# **A small example.** We compile a function that scales the loss.

# %%
scaler = torch.amp.GradScaler("cpu")
whole = torch.compile(lambda h: scaler.scale(h.sum()), backend="aot_eager", fullgraph=True)
message = message_of(lambda: whole(x))
print(*message.splitlines()[:2], sep="\n")
assert "Attempted to inline function marked as skipped" in message
broken = torch._dynamo.explain(lambda h: scaler.scale(h.sum()))(x)
assert len(broken.break_reasons) == 1

# %% [markdown]
# **Why.** `torch.compile` does not trace the function that the message names, such as `GradScaler.scale`.
#
# **The fix.** Compile only the model, or a function that computes the loss, including autocast. Outside the compiled
# function, call the function that the message names. Also call all methods of the scaler there.

# %%
loss_of = torch.compile(lambda h: h.sum(), backend="aot_eager", fullgraph=True)
assert scaler.scale(loss_of(x)) == 3 * scaler.get_scale()

# %% [markdown]
# ## An LSTM fails under autocast on the CPU
#
# `AMP0042` <!-- failure
# messages = [
#   "could not create a primitive descriptor for the LSTM forward propagation primitive",
# ]
# quoted = [
#   "could not create a primitive descriptor for an LSTM forward propagation primitive",
#   "could not create a primitive descriptor for the LSTM backward propagation primitive",
# ]
# symptoms = [
#   "nn.LSTM crashes under torch.autocast on a CPU but runs on a GPU",
#   "LSTM in bf16 works on one CPU and not on another",
#   "training an LSTM with precision bf16 without a GPU fails in oneDNN",
#   "an LSTM or OCR model under bf16 autocast stops on a CPU without AVX-512",
# ]
# words = "mkldnn oneDNN AVX512 avx512_bf16 recurrent ocr"
# -->
#
# **What you see.** On some CPUs, `nn.LSTM` on an fp32 tensor under `torch.autocast("cpu")` raises
# `could not create a primitive descriptor for the LSTM forward propagation primitive`.
# <!-- tests/core/test_cpu.py -->
#
# **A small example.** We run an LSTM in both 16-bit formats.

# %% tags=["nbval-ignore-output"]
sequence = torch.ones(3, 2, 4)  # (T, B, C)
message = "could not create a primitive descriptor for the LSTM forward propagation primitive"
for dtype in (torch.bfloat16, torch.float16):
    outcome = "runs"
    try:
        with torch.autocast("cpu", dtype=dtype):
            nn.LSTM(4, 8)(sequence)
    except RuntimeError as error:
        outcome = str(error).partition(".")[0]
    print(f"{dtype}: {outcome}")
    assert outcome in ("runs", message)

# %% [markdown]
# **Why.** For an LSTM on an fp32 tensor, torch can choose oneDNN's kernel. Autocast then casts the tensors to 16 bits,
# but oneDNN may have no 16-bit LSTM for your CPU. <!-- tests/core/test_cpu.py -->
#
# **The fix.** Run the layer in fp32: open `torch.autocast("cpu", enabled=False)` around it, and cast its inputs with
# `.float()`.

# %%
for dtype in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
        output, _ = nn.LSTM(4, 8)(sequence.float())
    assert output.dtype is torch.float32

# %% [markdown]
# **Notice the failure earlier.** `amp-lab doctor --device cpu` warns if an LSTM fails under autocast on your CPU.
# <!-- tests/core/test_cpu.py -->

# %% [markdown]
# ## TF32 is set in the old and in the new way
#
# `AMP0037` <!-- failure
# messages = [
#   "you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.",
#   "you have used mix of the legacy and new APIs to set the matmul precision.",
#   "you have used a mix of the legacy and new APIs to set the TF32 flags.",
# ]
# quoted = [
#   "Please use the new API settings to control TF32 behavior, such as torch.backends.cudnn.conv.fp32_precision",
# ]
# symptoms = [
#   "setting torch.backends.cuda.matmul.fp32_precision makes torch.compile fail",
#   "reading allow_tf32 raises a RuntimeError",
#   "warning about the new API for TF32 that comes from a library",
#   "many warnings about fp32_precision and allow_tf32 after an update of torch",
# ]
# words = "allow_tf32 fp32_precision set_float32_matmul_precision cudnn cublas InductorError vllm"
# -->
#
# **What you see.** An error contains
# `you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.` or a similar
# sentence about `the matmul precision` or `the TF32 flags`. The line that fails is often [inside
# `torch.compile`](https://github.com/pytorch/pytorch/issues/166387). Torch 2.9 also
# [warns](https://github.com/huggingface/transformers/issues/42371): `Please use the new API settings to control TF32
# behavior`.
#
# **A small example.** One line sets a switch by its new name, but another line reads the switch by its old name.

# %%
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
matmul.fp32_precision = "tf32"
messages = [message_of(lambda: matmul.allow_tf32)]
messages.append(message_of(torch.get_float32_matmul_precision))
cudnn.conv.fp32_precision = "ieee"
messages.append(message_of(lambda: cudnn.allow_tf32))
matmul.fp32_precision, cudnn.conv.fp32_precision = "ieee", "tf32"  # as precise as by default
print(*messages, sep="\n")
assert all("mix of the legacy and new APIs" in message for message in messages)

# %% [markdown]
# **Why.** PyTorch has old names (`allow_tf32`) and new names (`fp32_precision`) for its [TF32
# switches](19_choose_your_precision.ipynb#What-fp32-means). Setting a switch by its new name does not change its value
# under the old name. If the two values contradict each other, reading the old name raises an error. You can also get
# this error if you call `torch.set_float32_matmul_precision("high")` and then set `allow_tf32 = False`.
# <!-- tests/notebooks/test_08h_compile_and_processes.py -->
#
# **The fix.** For matmuls, set TF32 only with `torch.set_float32_matmul_precision`, which changes the value under both
# names. For convolutions, use `torch.backends.cudnn.allow_tf32`. Do not set `fp32_precision` while any library reads
# the old names. You can ignore the warning `Please use the new API settings`.

# %%
for mode, new_name, is_tf32 in (("high", "tf32", True), ("highest", "ieee", False)):
    torch.set_float32_matmul_precision(mode)
    assert (matmul.fp32_precision, matmul.allow_tf32) == (new_name, is_tf32)

# %% [markdown]
# ## torch.cuda.amp warns that it is deprecated
#
# `AMP0035` <!-- failure
# messages = [
#   "`torch.cuda.amp.autocast(args...)` is deprecated.",
#   "`torch.cpu.amp.autocast(args...)` is deprecated.",
#   "`torch.cuda.amp.GradScaler(args...)` is deprecated.",
#   "`torch.cpu.amp.GradScaler(args...)` is deprecated.",
#   "`torch.cuda.amp.custom_fwd(args...)` is deprecated.",
#   "`torch.cuda.amp.custom_bwd(args...)` is deprecated.",
#   "full(): argument 'fill_value' (position 2) must be Number, not str",
#   "autocast.__init__() missing 1 required positional argument: 'device_type'",
#   "custom_fwd() missing 1 required keyword-only argument: 'device_type'",
# ]
# quoted = [
#   "full() received an invalid combination of arguments - got (tuple, str, device=torch.device, dtype=torch.dtype)",
# ]
# symptoms = [
#   "FutureWarning from torch.cuda.amp, is it harmful",
#   "how to get rid of the autocast deprecation warning",
#   "what replaces torch.cuda.amp.GradScaler",
#   "yellow warnings about torch.cuda.amp fill the log of an old repository, can I ignore them",
#   "deprecated warning for autocast or GradScaler with args in every epoch",
# ]
# words = "FutureWarning torch.amp migrate rename custom_fwd custom_bwd yolov5"
# -->
#
# **What you see.** A `FutureWarning` says
# `` `torch.cuda.amp.autocast(args...)` is deprecated. ``, or names `GradScaler`, `custom_fwd` or `custom_bwd` instead.
# If you change only the name, you can get an error such as `missing 1 required positional argument: 'device_type'`.
#
# **A small example.** We use the old names. Then we change only the name, or only the
# arguments.

# %%
old, cpu = torch.cuda.amp, torch.cpu.amp
kinds = old.autocast, cpu.autocast, old.GradScaler, cpu.GradScaler
calls = [lambda kind=kind: kind(enabled=False) for kind in kinds]
calls += [lambda: old.custom_fwd(make), lambda: old.custom_bwd(make)]
warned = [warnings_of(call) for call in calls]
print(*warned, sep="\n")
assert all("is deprecated. Please use `torch.amp." in text for text in warned)

# %%
with warnings.catch_warnings(action="ignore"):
    print(message_of(lambda: cpu.GradScaler("cpu").scale(torch.ones(1))).partition("\n")[0])
print(message_of(lambda: torch.amp.autocast(enabled=False)))
print(message_of(lambda: torch.amp.custom_fwd(make)))

# %% [markdown]
# **Why.** The functions have moved to `torch.amp`, where the device type is a new argument. The old names still work
# in torch 2.15. <!-- tests/notebooks/test_13_from_apex.py -->
#
# The first argument of the *old* `GradScaler` is the scale. If you pass a device as this argument, an enabled scaler
# later raises an error in `full()`. <!-- tests/notebooks/test_08h_compile_and_processes.py -->
#
# **The fix.** Write `torch.autocast("cuda", dtype=torch.float16)`, `torch.amp.GradScaler("cuda")` and
# `@torch.amp.custom_fwd(device_type="cuda")`. For the CPU, write `torch.autocast("cpu", dtype=torch.bfloat16)` and
# replace `"cuda"` with `"cpu"` in the other calls. `amp-lab migrate` can rewrite the old names. If the warning comes
# from a library, [update the library](https://github.com/espnet/espnet/pull/6424).
# <!-- tests/migrate/test_torch_amp.py -->

# %%
assert warnings_of(lambda: torch.autocast("cuda", dtype=torch.float16, enabled=False)) == ""
assert warnings_of(lambda: torch.amp.GradScaler("cuda", enabled=False)) == ""
assert warnings_of(lambda: torch.amp.custom_fwd(make, device_type="cuda")) == ""

# %% [markdown]
# Always pass `dtype`. Inside another autocast block, `torch.autocast` by default uses [the dtype of that
# block](13_from_apex.ipynb#From-torch.cuda.amp-to-torch.amp).

# %% [markdown]
# ## DDP waits for a parameter without a gradient
#
# `AMP0040` <!-- failure
# general = true
# messages = [
#   "Expected to have finished reduction in the prior iteration before starting a new one.",
#   "Your training graph has changed in this iteration",
# ]
# symptoms = [
#   "DDP fails in the second step with amp because a layer is not used",
#   "parameters that were not used in producing loss",
#   "find_unused_parameters error in mixed precision after a branch is skipped",
#   "DDP with amp complains of unused parameters after a head or branch is skipped",
# ]
# words = "find_unused_parameters static_graph unused reducer DistributedDataParallel branch"
# -->
#
# **What you see.** A later step of a DDP model raises
# `Expected to have finished reduction in the prior iteration before starting a new one.`
# With `static_graph=True` the message may be `Your training graph has changed in this iteration`.
#
# **A small example.** The model has a layer that some steps do not use.


# %%
@contextmanager
def group_of_one():
    """Inside: a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Branch(nn.Sequential):
    """Two layers. `both` says whether the second one is used too."""

    def forward(self, x, both):
        return self[1](self[0](x)) if both else self[0](x)


# %%
def train(*steps, **options):
    """One step for each of `steps`, which say whether the step uses both layers."""
    model = DistributedDataParallel(Branch(nn.Linear(2, 2), nn.Linear(2, 2)), **options)
    for both in steps:
        model(x, both).sum().backward()


with group_of_one():
    unused = message_of(lambda: train(False, False))
    changed = message_of(lambda: train(False, True, static_graph=True))
print(unused.partition(" This error")[0], changed, sep="\n")
assert "Expected to have finished reduction in the prior iteration" in unused

# %% [markdown]
# **Why.** DDP averages a group of gradients [when all of them are
# ready](https://docs.pytorch.org/docs/stable/notes/ddp.html). By default, if `backward` computes no gradient for a
# trained parameter, its group is never ready. The next training step can then raise an error. With
# `static_graph=True`, the same parameters must get a gradient in each step.
# <!-- tests/notebooks/test_08h_compile_and_processes.py -->
#
# **The fix.** Remove the layers that the loss does not use, or freeze them before you create the DDP model.
# If the unused layers change from step to step, pass `find_unused_parameters=True` instead of
# `static_graph=True`.

# %%
with group_of_one():
    train(False, False, find_unused_parameters=True)

# %% [markdown]
# ## FSDP refuses parameters of two dtypes
#
# `AMP0181` <!-- failure
# messages = [
#   "FSDP expects uniform original parameter dtype but got",
#   "Must flatten tensors with uniform dtype but got",
# ]
# quoted = [
#   "`FlatParameter` requires uniform dtype but got",
#   "FSDP expects uniform reduce dtype but got",
# ]
# symptoms = [
#   "FSDP with LoRA or QLoRA fails because adapter and base model have different dtypes",
#   "fully_shard cannot mix bf16 and fp32 parameters",
#   "keep the norm layers in fp32 and the rest in bf16 with FSDP",
#   "FSDP with LoRA: float32 adapters beside bfloat16 weights cannot be flattened",
#   "Gemma or a vision tower in float32 and a bf16 language model under FSDP",
# ]
# words = "FSDP FSDP2 fully_shard peft LoRA QLoRA axolotl accelerate bnb_4bit_quant_storage use_orig_params"
# -->
#
# **What you see.** FSDP2 raises `FSDP expects uniform original parameter dtype but got`. FSDP1
# raises `Must flatten tensors with uniform dtype but got`, for example for a base model in bf16 with
# [adapters in fp32](https://github.com/huggingface/trl/pull/6343).
#
# **A small example.** We wrap a model whose trained weights have two dtypes.


# %%
def two_dtypes():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())


def run_sharded(*modules):
    """Call `fully_shard` on each of the modules, and then run the last one under autocast."""
    for module in modules:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return modules[-1](x)


with group_of_one():
    new = message_of(lambda: run_sharded(two_dtypes())).partition(" {")[0]
    cpu = torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # one process has nothing to shard
        old = message_of(lambda: FullyShardedDataParallel(two_dtypes(), device_id=cpu))
print(new, old, sep="\n")
assert new == "FSDP expects uniform original parameter dtype but got"
assert old.startswith("Must flatten tensors with uniform dtype but got")

# %% [markdown]
# **Why.** FSDP needs one dtype for all trained parameters of a unit (a module that you wrap). In FSDP1 and in [older
# versions of torch](https://github.com/pytorch/pytorch/pull/154103), the frozen parameters of the unit need this dtype
# too.
#
# **The fix.** Before you wrap the model, cast the trained weights to fp32. In FSDP1 and in old versions of torch, cast
# the frozen weights too. Let FSDP cast the weights for the computation, for example with
# `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. Or first wrap each module that has a different dtype as a
# separate unit. With QLoRA, set [`bnb_4bit_quant_storage`](https://huggingface.co/docs/bitsandbytes/fsdp_qlora) to the
# dtype of the other weights.

# %%
with group_of_one():
    assert run_sharded(two_dtypes().float()).dtype is torch.bfloat16
    model = two_dtypes()
    assert run_sharded(model[1], model).dtype is torch.bfloat16
    model = two_dtypes()
    model[1].requires_grad_(False)  # FSDP2 does not check a frozen module
    assert run_sharded(model).dtype is torch.bfloat16

# %% [markdown]
# **Not this.** `model.to(torch.bfloat16)` also removes the message, but plain optimizers then lose small
# updates.

# %%
one = torch.tensor(1.0).bfloat16()
assert one + 2**-9 == one


# %% [markdown]
# ## The ranks of a distributed run diverge
#
# `AMP0182` <!-- failure
# symptoms = [
#   "the ranks of a DDP run drift apart, have other gradient norms, or skip different steps",
#   "the GradScaler has a different scale on each GPU with DDP",
#   "DDP with fp16: parameters are no longer the same on all ranks",
#   "loss differs between ranks after resuming from a checkpoint",
#   "the loss scale of rank 0 and rank 1 differ after many steps, models drift apart",
# ]
# words = "DDP GradScaler scale rank desync out of sync join uneven inputs no_sync all_reduce"
# -->
#
# **What you see.** There is no message. The ranks (the processes of the run) have different weights or
# gradient norms, or their scalers skip different steps.
#
# **A small example.** Two ranks have different loss scales. We compute their gradients by hand:
# the true gradient of each rank is 1.

# %%
scales = torch.tensor([1024.0, 2048.0])  # of two ranks
unscaled = scales.mean() / scales  # DDP averages, and each rank divides by its own scale
assert unscaled.tolist() == [1.5, 0.75]

# %% [markdown]
# **Why.** DDP averages the *scaled* gradients, and each rank divides the average by the scale of its `GradScaler`. If
# the scales differ, [the ranks can train different models](https://github.com/pytorch/pytorch/issues/136009).
#
# Scales can differ if only one rank loads the state of its scaler, or if the ranks run [different numbers of
# steps](https://github.com/pytorch/pytorch/issues/90057).
#
# **The fix.** Load the same scaler state on every rank, and give all ranks the same number of steps.

# %%
with group_of_one():
    states = [torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()]  # of rank 0
    dist.broadcast_object_list(states, src=0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(states[0])
    assert scaler.get_scale() == 1024

# %% [markdown]
# ## Further reading
#
# - PyTorch, [`torch.compile` has different autograd
#   semantics](https://docs.pytorch.org/docs/stable/torch.compiler_backward.html).
# - PyTorch, [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html): the
#   dtypes of FSDP2.
