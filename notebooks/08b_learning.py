# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Find out why a model learns nothing
#
# **What you'll do.** Look up one failure: its symptom, a small example, the reason and the fix.
#
# **What you'll learn.** You will be able to repair:
# - a loss scale that [falls to 0](#The-loss-scale-falls-towards-0) or [grows and
#   grows](#The-scaler-runs-with-bf16,-or-the-dtype-is-not-the-one-you-meant);
# - gradients that [underflow](#A-layer-does-not-learn-because-its-gradients-underflow) or [are
#   missing](#Weights-get-no-gradient-after-an-evaluation-pass);
# - weights that [stop moving](#Half-precision-weights-stop-moving), [become NaN in
#   Adam](#Adam-makes-fp16-weights-NaN) or [were cast to FP8](#Weights-were-cast-to-FP8-without-a-scale);
# - wrong [positions and counts](#Positions-or-counts-are-wrong-beyond-256), and a wrong [logged
#   loss](#A-loss-summed-up-in-bf16-is-too-small).
#
# **What you need.** You need no GPU. Read only the section of your failure. For other failures, see the
# [index](08_when_amp_breaks.ipynb). In the programs, `make` returns a model and its optimizer, and `message_of`
# returns the message of the error that a call raises.

# %% tags=["nbval-ignore-output"]
import torch
from torch import nn

from course import figures, start
from course.failures import make, message_of

from amp_lab.numerics import gradient_underflow

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of several programs below

# %% [markdown]
# ## The loss scale falls towards 0
#
# `AMP0002` <!-- failure
# quoted = [
#   "grad_scale is too small, exiting",
# ]
# symptoms = [
#   "the loss scale keeps falling, or every step is skipped",
#   "GradScaler halves the scale at every iteration until it is 0",
#   "scaler.get_scale() returns 0 or a tiny number",
#   "the scale goes below 1 and the weights stay as they were, although the loss is finite",
#   "Fp16 Grad Scale: 0 and Loss nan after 20 iterations, no matter which learning rate",
#   "scale went less than 1",
#   "trained well for some thousand steps, then each step overflows and nothing is learned any more",
# ]
# words = "get_scale backoff_factor loss_scale ShardedGradScaler skipped steps found_inf 65536 32768 arcface insightface"
# -->
#
# **What you see.** Every step is skipped, and the scale halves each time, from 65536 down to 0. The
# loss itself may look good.
#
# **A small example.** The loss sums the square root of each squared weight. One weight starts at zero.


# %%
def train(loss_of, scaler, steps):
    """Train two weights; return their final values and the scale after each step."""
    weights = nn.Parameter(torch.tensor([0.0, 2.0]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights.detach(), scales


def sick_loss(weights):
    return weights.square().sqrt().sum()  # as in a distance or a standard deviation


weights, scales = train(sick_loss, torch.amp.GradScaler("cpu"), steps=170)
print("scale after 1, 17 and 166 steps:", scales[0], scales[16], scales[165])
assert weights.tolist() == [0.0, 2.0]  # nothing was learned
assert scales[165:] == [0.0] * 5  # twice 0 is 0: it stays there

# %% [markdown]
# **Why.** At any scale, at least one gradient is infinite or NaN, so a smaller scale does not help. Typical sources
# are ops such as `log(0)`, 0/0 and a square root at 0. Other sources are a NaN in the data or an activation that
# overflows in fp16.
# <!-- tests/notebooks/test_08b_learning.py -->
#
# **The fix.** Run one step inside `amp_lab.numerics.find_nonfinite(model)`, which reports where the inf or NaN comes
# from. Then change this op or the data. For a square root, add a small number under the root.
# <!-- tests/notebooks/test_08b_learning.py -->


# %%
def healthy_loss(weights):
    return (weights.square() + 1e-4).sqrt().sum()


scaler = torch.amp.GradScaler("cpu", growth_interval=20)  # the default is 2000
_, healthy = train(healthy_loss, scaler, steps=60)
_ = figures.loss_scales({"NaN in every step": scales[:60], "healthy": healthy})
assert (healthy[0], healthy[-1]) == (2.0**16, 2.0**19)

# %% [markdown]
# The scale of the healthy run doubles every 20 steps, because of `growth_interval=20`.
#
# **Not this.** Do not switch the scaler off: weights with such a gradient can then become infinite or NaN.

# %%
unscaled, _ = train(sick_loss, torch.amp.GradScaler("cpu", enabled=False), steps=1)
assert unscaled.isnan().any()

# %% [markdown]
# ## A layer does not learn because its gradients underflow
#
# `AMP0003` <!-- failure
# symptoms = [
#   "in fp16 some gradients are exactly zero",
#   "gradients vanish in fp16 and the layer does not learn",
#   "fp16 without GradScaler: the loss flattens earlier than in fp32",
#   "zero gradients or a gradient norm of 0 in fp16, not in fp32",
#   "half precision without loss scaling: BLEU or accuracy rises at first and then sinks",
#   "the loss does not move in half precision, in float it learns, no nan and no error",
#   "accuracy stays at chance or decreases in fp16",
#   "only the small terms of a multi-task loss stop improving",
#   "the gradient norm on wandb is about 1e-9 with fp16, and the loss does not converge",
#   "does not converge at all in fp16, in fp32 the same code does",
# ]
# words = "vanishing flush denormal subnormal small loss weight mean reduction no scaler underflow"
# -->
#
# **What you see.** The loss falls slowly or not at all, and some gradients are exactly zero.
#
# **A small example.** We use fp16 without a scaler. The loss is a mean over many outputs,
# times 1e-4.


# %%
def gradient_of(weight, scaler):
    """The gradient of a small loss, by way of fp16."""
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = torch.ones(256, 4) @ weight  # (256, 64)
        loss = 1e-4 * outputs.float().mean()
    (gradient,) = torch.autograd.grad(scaler.scale(loss), weight)
    return gradient / scaler.get_scale()


weight = torch.ones(4, 64, requires_grad=True)
lost = gradient_of(weight, torch.amp.GradScaler("cpu", enabled=False))
print("largest gradient:", lost.max().item())
assert lost.count_nonzero() == 0

# %% [markdown]
# **Why.** In fp16, a gradient with a magnitude below 2^-25 (about 3e-8) becomes zero.
# <!-- tests/notebooks/test_08b_learning.py -->
#
# Here, each output has the gradient 6e-9.
#
# **The fix.** Keep the weights in fp32 and use fp16 autocast with a `GradScaler`. Or use bf16 without a scaler,
# because bf16 has nearly the range of fp32.

# %%
kept = gradient_of(weight, torch.amp.GradScaler("cpu"))
exact = torch.full_like(kept, 256 * 1e-4 / 16384)
torch.testing.assert_close(kept, exact, rtol=2e-3, atol=0)  # 11 bits
assert torch.tensor(1e-4 / 16384).bfloat16() > 0

# %% [markdown]
# **Notice the failure earlier.** `gradient_underflow` finds the smallest loss scale (1, 2, 4, …) at which at most 0.1 % of
# the nonzero gradient values become zero in fp16. The model itself can run in fp32:

# %%
model, _ = make(nn.Linear(4, 64))
report = gradient_underflow(model, 1e-4 * model(torch.ones(256, 4)).mean())
print(f"fp16 needs a loss scale of {report.smallest_scale:.0f} or more")
assert (report.outputs.lost(1.0), report.smallest_scale) == (1, 8)

# %% [markdown]
# ## Weights get no gradient after an evaluation pass
#
# `AMP0025` <!-- failure
# symptoms = [
#   "first forward in no_grad, second should train, but the weights get no gradient under fp16",
#   "element 0 of tensors does not require grad and does not have a grad_fn, only with autocast",
#   "no gradient after a torch.no_grad() pass in the same autocast block",
#   "grad_fn is None when no_grad is nested in autocast",
#   "temporarily disabling grad does not work with AMP",
#   "model called twice per iteration, first within torch.no_grad: linear layers have no gradient, batchnorm layers do",
#   "p.grad is None for some layers with --mixed-precision only",
#   "a teacher, target or self-conditioning pass breaks training with accelerate fp16",
# ]
# words = "no_grad inference_mode set_grad_enabled clear_autocast_cache cache_enabled weight cache eval self-conditioning nerfstudio"
# torch = "before the repair of December 2025, which 2.11 has"
# -->
#
# **What you see.** In older versions of PyTorch, some gradients can be `None`, or `backward()` can raise `element 0 of
# tensors does not require grad and does not have a grad_fn`.
#
# **A small example.** We run one pass without gradients and one pass with gradients,
# in the same autocast block. In this version of PyTorch, the gradient is right:

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16):
    with torch.no_grad():
        model(x)
    trained = model(x)
trained.sum().backward()
assert torch.equal(model[0].weight.grad, x.expand(2, 2))  # right, in this version

# %% [markdown]
# **Why.** By default, autocast caches its copies of the weights. Before [torch
# 2.11](https://github.com/pytorch/pytorch/pull/165068), a pass under `torch.no_grad()` cached copies that
# are not connected to the weights. A later pass in the same block used these copies, so the weights got no gradient.
#
# **The fix.** Update PyTorch. Or close the outermost autocast block after the evaluation and open a new block for
# training.

# %% [markdown]
# ## The scaler runs with bf16, or the dtype is not the one you meant
#
# `AMP0028` <!-- failure
# symptoms = [
#   "the loss scale grows and grows", "with bf16 the scale of GradScaler grows until it is inf",
#   "does bf16 need a GradScaler, should I use a loss scale with bfloat16",
#   "a run that was meant to be bf16 overflows as in fp16",
#   "autocast without a dtype is fp16 on the GPU but bf16 on the CPU",
#   "is a GradScaler in bf16 harmful",
#   "why does Accelerate or the Trainer do no gradient scaling for bfloat16, the docs seem to need a scaler",
#   "the scale doubles every 2000 steps and never comes down",
#   "profiling shows time in the scaler though the run is bf16",
# ]
# words = "growth_factor growth_interval scale overflow default dtype set_autocast_dtype enabled bfloat16 scaler reason"
# -->
#
# **What you see.** The loss scale grows and grows, or a run that was meant to be bf16 overflows.
#
# **A small example.** We use a scaler with bf16. With `growth_interval=1`, the scale grows after each
# step without overflow.


# %%
def scales_in(dtype, enabled=True):
    """The loss scale over 150 steps."""
    model, optimizer = make(lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1, enabled=enabled)
    scales = []
    for _ in range(150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


pointless, useful = scales_in(torch.bfloat16), scales_in(torch.float16)
_ = figures.loss_scales({"bf16 with a scaler": pointless, "fp16": useful})
assert max(useful) < 2.0**17
assert max(pointless) > 2.0**120
assert pointless[-1] < max(pointless)  # it skips steps, too

# %% [markdown]
# In fp16 the scale alternates between 2^14 and 2^15, because gradients overflow at 2^15. In bf16 the scale grows
# almost to the largest number of fp32. <!-- tests/notebooks/test_08b_learning.py -->
#
# **Why.** bf16 has nearly the range of fp32, so gradients rarely overflow and the scale of a `GradScaler` keeps
# growing. Without `dtype=`, autocast by default uses fp16 on a CUDA GPU and bf16 on a CPU.
#
# **The fix.** Define the dtype in one place, and pass it to autocast. Enable the scaler only for fp16:
# `GradScaler(device.type, enabled=(dtype is torch.float16))`.

# %%
assert torch.get_autocast_dtype("cuda") is torch.float16
assert torch.get_autocast_dtype("cpu") is torch.bfloat16
assert set(scales_in(torch.bfloat16, enabled=False)) == {1.0}

# %% [markdown]
# ## Half precision weights stop moving
#
# `AMP0029` <!-- failure
# symptoms = [
#   "a model loaded in torch_dtype bfloat16 trains worse, with a higher final loss, than one loaded in fp32",
#   "whole unet in bf16 slowly degrades, does the optimizer need fp32 copies of the weights",
#   "bf16 weights never move: after many Adam steps they are the same as at the start",
#   "weights of norms (RMSNorm, LayerNorm) stay exactly 1.0 in bf16",
#   "weight decay has no effect on bf16 weights, the updates are rounded away",
#   "bf16 weights or LoRA adapters do not move at a small learning rate",
#   "the loss decreases more slowly with bf16 weights than with fp32 weights",
#   "full bf16 training of the weights plateaus, stagnates or diverges late",
#   "two runs that differ in dtype only: very bad convergence with bf16",
#   "struggles to converge after all parameters were cast to bfloat16 by hand, mixed_precision=True is good",
#   "the final loss of our FSDP framework is three times that of DeepSpeed or Megatron with the same recipe",
#   "fine-tuning at lr 1e-6 barely improves, weights are resident in BF16",
#   "exp_avg and exp_avg_sq are bf16, is there an fp32 main copy of the parameters",
#   "weights are identical after 100 steps",
#   "a change smaller than a thousandth of the weight is lost in bf16",
#   "ramp-up or warmup steps make bf16 updates vanish",
#   "a model that was put entirely into bf16 by hand learns more slowly",
#   "gradients, optimizer states and updates are all in bfloat16",
# ]
# words = "Kahan summation stochastic rounding master weights pure full bf16 AdamW RMSNorm LayerNorm LoRA peft update lost rounded stuck assign load_state_dict param_dtype fp32 main parameters optimizer_dtype FusedAdam convergence torchtune"
# -->
#
# **What you see.** The loss stops falling earlier than with fp32 weights. Or some weights, such as
# the weights of norms that start at 1, never change.
#
# **A small example.** With `assign=True`, the parameters become the bf16 tensors of a checkpoint. Then we make a
# hundred small updates.


# %%
def after_updates(model):
    """The first weight after 100 updates of 1e-3, from 1 on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    for _ in range(100):
        optimizer.step()
    return next(model.parameters()).flatten()[0].item()


checkpoint = {name: value.bfloat16() for name, value in make()[0].state_dict().items()}
model, _ = make()
model.load_state_dict(checkpoint, assign=True)
print(f"weights in {model[0].weight.dtype}: 1 -> {after_updates(model):.2f}")
assert after_updates(model) == 1.0

# %% [markdown]
# **Why.** When a PyTorch optimizer updates a bf16 weight, an update smaller than about 0.2 % of the weight is rounded
# away (0.02 % in fp16). <!-- tests/notebooks/test_08b_learning.py -->
#
# **The fix.** Keep the trainable weights in fp32 and use bf16 autocast. Call `model.float()` before you create the
# optimizer. Load a bf16 checkpoint without `assign=True`.
#
# If fp32 weights do not fit into memory, use [an optimizer for bf16
# weights](16_low_precision_state.ipynb#Weights-in-bf16) that does not lose small updates.

# %%
model, _ = make()
model.load_state_dict(checkpoint)
print(f"weights in {model[0].weight.dtype}: 1 -> {after_updates(model):.2f}")
assert abs(after_updates(model) - 0.9) < 1e-4

# %% [markdown]
# ## Adam makes fp16 weights NaN
#
# `AMP0121` <!-- failure
# symptoms = [
#   "weights are NaN or inf after the first optimizer step in fp16, though the gradients are finite",
#   "AdamW in half precision gives NaN, SGD does not",
#   "Adam makes the weights NaN after the first step, in a model in float16",
#   "model.half() and Adam: the loss is NaN from the second iteration on",
#   "after the first optimizer.step() all parameters are NaN, a lower lr makes no difference",
#   "soft prompt, reward model or small extractor trained in float16 in front of a frozen half model",
#   "torch's AdamW gives NaN after the first step of a model that was loaded in fp16, the 8-bit AdamW of bitsandbytes does not",
# ]
# words = "Adam AdamW RMSprop Adagrad NAdam eps epsilon 1e-8 exp_avg_sq half fp16 first step second iteration soft prompt frozen"
# -->
#
# **What you see.** Loss and gradients are finite, but after the first step the weights are NaN or
# infinite.
#
# **A small example.** Two weights in fp16 have the gradients 0 and 1e-4.


# %%
def first_step(weight, gradient, **options):
    """The weights after one step of Adam."""
    weight = nn.Parameter(weight)
    weight.grad = torch.tensor(gradient, dtype=weight.dtype)
    torch.optim.Adam([weight], **options).step()
    return weight.tolist()


broken = first_step(torch.ones(2).half(), [0.0, 1e-4])
print(broken)
assert str(broken) == "[nan, -inf]"

# %% [markdown]
# **Why.** PyTorch's Adam keeps its moments in the dtype of the weights. In fp16, the square of a small gradient and
# Adam's epsilon of 1e-8 become 0, so by default Adam divides by 0. A gradient of 0 then gives 0/0 = NaN, and a small
# gradient gives an infinite update.
# <!-- tests/notebooks/test_08a_values.py --> <!-- tests/notebooks/test_08b_learning.py -->
#
# **The fix.** Keep the trainable weights in fp32: call `model.float()` instead of `model.half()` before you create the
# optimizer, and let autocast cast the weights.

# %%
still, moved = first_step(torch.ones(2), [0.0, 1e-4])
assert 0.998 < moved < still == 1

# %% [markdown]
# **Not this.** Do not set `eps=1e-4`. The NaN goes away, but fp16 then rounds away the tiny updates from small
# gradients: with a gradient of 1e-6, a weight of 1 does not change.

# %%
assert first_step(torch.ones(1).half(), [1e-6], eps=1e-4) == [1.0]  # nothing is learned

# %% [markdown]
# ## Positions or counts are wrong beyond 256
#
# `AMP0030` <!-- failure
# symptoms = [
#   "the rotary cache has wrong values once the model is cast to bfloat16",
#   "with bf16 the loss starts much higher the longer the samples are",
#   "results are good on short inputs and bad on long ones in bf16",
#   "RoPE in bf16 loses precision for a long context",
#   "many positions give the same embedding in bf16",
#   "inv_freq is bf16 after model.to(torch.bfloat16)",
#   "a counter in bf16 stops at 256, or in fp16 at 2048",
#   "torch.arange in fp16 or bf16 has duplicates",
#   "an index is out of range in bf16, 999 becomes 1000",
#   "terrible quality once an input is as long as the maximum sequence length, sin and cos tables are built anew",
#   "KL or logits differ between two frameworks after a bf16 checkpoint is reloaded",
#   "positional encodings are wrong for long contexts in bf16 or fp16",
#   "cos and sin of the rotary embedding differ wildly from fp32 at some positions",
#   "neighbouring positions become the same number",
# ]
# words = "RoPE rotary position embedding inv_freq cos sin cached arange index counter cumsum integer position_ids long context sin_cached cos_cached mistral"
# -->
#
# **What you see.** A model is good on short inputs, but bad on long ones. A count can also stop at 256. An index can
# be out of range because 999 became 1000.
#
# **A small example.** We compute the angles of rotary position embeddings (RoPE), positions times
# frequencies, with a matmul. Autocast runs the matmul in bf16.


# %%
def angles(length):
    """Position times frequency, (length, 1); the frequency is 1."""
    return torch.arange(length, dtype=torch.float32)[:, None] @ torch.ones(1, 1)


with torch.autocast("cpu", dtype=torch.bfloat16):
    rounded = angles(1024)
print(rounded.unique().numel(), "different angles for 1024 positions")
assert rounded.unique().numel() == 513
assert torch.tensor([998, 999]).to(torch.bfloat16).tolist() == [1000, 1000]

# %% [markdown]
# **Why.** bf16 represents every whole number only up to 256, and fp16 only up to 2048. Above these limits,
# neighbouring positions or counts can become the same number. Rounded frequencies (`inv_freq`) also make the angles
# wrong.
#
# Autocast, the code itself or `model.bfloat16()` can cast these values. `model.bfloat16()` also casts floating-point
# buffers.
#
# **The fix.** Create positions, counters and frequencies in fp32, and indices as integers. Create the frequencies after
# `model.bfloat16()`. Compute the angles of RoPE inside `torch.autocast(device_type, enabled=False)`. Afterwards cast
# the sines and cosines, but not the positions.

# %%
with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
    assert angles(1024).unique().numel() == 1024
assert torch.arange(2048, 2051, dtype=torch.float16).tolist() == [2048, 2048, 2050]

# %% [markdown]
# **Not this.** Do not call `.float()` on positions or on `inv_freq` after rounding, because the cast cannot restore the
# lost digits.

# %%
rates = nn.Module()
rates.register_buffer("inv_freq", torch.tensor([1 / 3]))
assert rates.bfloat16().float().inv_freq != torch.tensor([1 / 3])

# %% [markdown]
# ## A loss summed up in bf16 is too small
#
# `AMP0123` <!-- failure
# symptoms = [
#   "the logged loss moves in steps, stands still or falls to 0 in bf16, and `loss.item()` is right",
#   "the average loss of an epoch is too small in bf16",
#   "accuracy or another metric summed up in half precision is wrong",
#   "the running mean gets stuck at 256 or 4096 although each step's value is right",
# ]
# words = "running_loss total_loss tr_loss logging metric accumulate average epoch += sum XLA_USE_BF16 lightning on_epoch self.log"
# -->
#
# **What you see.** The logged average of the loss stands still or falls to 0, although the model trains well.
#
# **A small example.** We add up a thousand losses of 2.5.


# %%
def total_of(total):
    for _ in range(1000):
        total += torch.tensor(2.5)  # fp32
    return total.item()


print("sum in bf16:", total_of(torch.tensor(0.0, dtype=torch.bfloat16)))
assert total_of(torch.tensor(0.0, dtype=torch.bfloat16)) == 1024

# %% [markdown]
# **Why.** A sum in bf16 has 8 significant bits (11 in fp16), so a loss that is small compared with the sum does not
# change the sum. If you log the increase of the sum, the log then shows 0.
# <!-- tests/notebooks/test_08b_learning.py -->
#
# **The fix.** Add up losses and metrics in fp32: start with
# `torch.zeros((), dtype=torch.float32, device=loss.device)`, or add `loss.item()` to a Python number.

# %%
assert total_of(torch.zeros((), dtype=torch.float32)) == 2500

# %% [markdown]
# ## Weights were cast to FP8 without a scale
#
# `AMP0120` <!-- failure
# messages = [
#   "mat1 and mat2 must have the same dtype, but got Float and Float8_e4m3fn",
#   "self and mat2 must have the same dtype, but got Float and Float8_e4m3fn",
# ]
# quoted = [
#   "Input type ({any}) and bias type ({any}Float8_e4m3fn) should be the same",
# ]
# symptoms = [
#   "after model.to(torch.float8_e4m3fn) the images or texts are bad",
#   "many weights are zero, or some are NaN, after a cast to float8",
#   "which operations does torch.float8_e4m3fn support",
#   "fp8 weights without a scale lose accuracy, a scaled fp8 checkpoint does not",
#   "a LoRA looks great on the BF16 base model, bad with weight_dtype fp8_e4m3fn",
#   "grid artefacts or noise in the picture after choosing fp8 in the loader",
# ]
# words = "float8 fp8 e4m3 e5m2 fp8_e4m3fn addmm_cuda mul_cuda cat_cuda abs_cuda ComfyUI weight_dtype cast scale amax 448 torchao lora grid artefacts loader"
# -->
#
# **What you see.** Many operations on the weights raise an error. Or the model runs, but its results are bad.
#
# **A small example.** We cast small weights to FP8 without a scale. The cell prints the errors of two
# additions and three linear layers, and the share of the weights that became zero.

# %%
torch.manual_seed(0)
weight = 0.005 * torch.randn(256, 256)
stored = weight.to(torch.float8_e4m3fn)
print(message_of(lambda: stored + stored))
print(message_of(lambda: stored + weight))
for bias in (None, weight[0], stored[0]):
    print(message_of(lambda bias=bias: nn.functional.linear(weight, stored, bias)))
print(f"zeros: {(stored.float() == 0).float().mean():.0%}")
assert 0.1 < (stored.float() == 0).float().mean() < 0.2

# %% [markdown]
# **Why.** Without a scale, a weight with a magnitude below 2^-10 (0.001) becomes zero in `torch.float8_e4m3fn`, and a
# weight above 448 becomes 448 or NaN. PyTorch also lacks many operations for FP8, such as addition in eager mode.
# PyTorch does not promote an FP8 matrix to another dtype. <!-- tests/notebooks/test_08b_learning.py -->
#
# **The fix.** Use a library that stores scales with the FP8 weights, such as
# [torchao](https://github.com/pytorch/ao/blob/main/torchao/quantization/quantize_/workflows/float8/float8_tensor.py),
# or keep the weights in bf16.
#
# To scale a weight by hand, divide it by a factor before the cast to FP8. Before the matmul, cast the FP8 weight back
# and multiply it by this factor:


# %%
factor = weight.abs().max() / 448
scaled = (weight / factor).to(torch.float8_e4m3fn).float() * factor
plain_error, error = ((w - weight).norm() / weight.norm() for w in (stored.float(), scaled))
print(f"error without a scale {plain_error:.1%}, with one {error:.1%}")
assert error < 0.04 < 0.08 < plain_error

# %% [markdown]
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): where the calls of the scaler belong
#   in a training loop.
