# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Go below 16 bits with FP8, MX and NVFP4
#
# **What you'll do.** Round tensors to eight and four bits, with scales. Train a small GPT with rounded matmuls.
# Measure the error of a model in two formats.
#
# **What you'll learn.**
# - which numbers an eight-bit or four-bit format can represent, and why it needs a scale;
# - which values lose accuracy if one value, an *outlier*, is much larger than the others;
# - what MX and NVFP4 are;
# - which layers to keep in 16 bits.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb) for number formats. You need no GPU.

# %% tags=["nbval-ignore-output"]
import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional as F

from course import figures, start
from course.gpt import Gpt, Size

from amp_lab import rehearse
from amp_lab.formats import ELEMENTS, FORMATS, Format, hopper_matmul, quantize

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# E4M3 is an FP8 (eight-bit) format with 4 exponent bits and 3 mantissa bits. We round a gradient to E4M3, first
# directly, then with a *scale*: we divide the gradient by the scale, round, and multiply by the scale. In the code,
# `factor` is 1 / scale. Before you run this: what are the two results?

# %%
gradient = torch.tensor([1e-4, -3e-4, 2e-5])
unscaled = gradient.to(torch.float8_e4m3fn).float()
factor = 448 / gradient.abs().max()  # the largest value becomes the largest number of E4M3
scaled = (gradient * factor).to(torch.float8_e4m3fn).float() / factor
print("without scale", unscaled.tolist(), " scaled", [f"{value:.3g}" for value in scaled.tolist()])
assert not unscaled.any()
assert (scaled / gradient - 1).abs().max() < 2**-4

# %% [markdown]
# The smallest positive number of E4M3 is 0.002. Without a scale, all three values become zero. With a scale, no
# value becomes zero, and the relative error is below 1/16.
#
# ## Formats of a single value
#
# A single value of a tensor is called an *element*. For four formats of elements, we print the largest and the
# smallest positive number: <!-- tests/formats/test_elements.py -->

# %%
for name in ("fp16", "e4m3", "e5m2", "e2m1"):
    element = ELEMENTS[name]
    numbers = f"{len(element.numbers()):>6} numbers" if element.bits < 16 else ""
    print(f"{name:<5}{element.bits:>3} bits  largest {element.largest:>7g}", end="  ")
    print(f"smallest {element.smallest:<8.3g}{numbers}")
halves = ELEMENTS["e2m1"].numbers()
print("E2M1 without its negative numbers:", halves[halves >= 0].tolist())
assert halves[halves >= 0].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]

# %% [markdown]
# [Many ops](https://docs.pytorch.org/docs/stable/tensor_attributes.html), such as `+`, do not support FP8. So we round
# to FP8 and compute in fp32.
# <!-- tests/notebooks/test_08b_learning.py -->
#
# ## The values that share a scale
#
# A scale depends on the largest magnitude of the values that share it. If one of these values is much larger than the
# others, the others may become zero. So it matters which values share a scale: a whole tensor, a row, or a *block*
# (neighbours in a row). The formats `mxfp8` and `mxfp4` belong to *MX* (microscaling), an [open
# standard](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). The format `nvfp4`
# is [from NVIDIA](https://arxiv.org/abs/2509.25149):
#
# | format | element | values that share a scale | number format of the scale |
# |---|---|---|---|
# | `fp8` | E4M3 | the whole tensor | fp32 |
# | `fp8-rowwise` | E4M3 | a row | fp32 |
# | `fp8-1x128` | E4M3 | 128 neighbours in a row | fp32 |
# | `mxfp8` | E4M3 | 32 neighbours in a row | E8M0: eight bits, a power of two |
# | `mxfp4` | E2M1 | 32 neighbours in a row | E8M0: eight bits, a power of two |
# | `nvfp4` | E2M1 | 16 neighbours in a row | E4M3, and one more scale in fp32 for the whole tensor |
#
# `quantize` scales a tensor, rounds it to one of these formats, and undoes the scaling. We measure the *signal to
# quantisation noise ratio* (SQNR): 0 dB is an error of 100 %, and every further 20 dB divide the error by 10.
# <!-- tests/formats/test_scaling.py -->
#
# We round random numbers, and a copy in which one column (an *outlier channel*) is 100,000 times as large. Before you
# run this: in which formats will the other columns of the copy lose the most accuracy?


# %%
def sqnr(values, form):
    """The signal to quantisation noise ratio in dB, over all columns but the outlier channel."""
    rest = torch.arange(256) != 100
    noise = (values - quantize(values, form))[:, rest].square().mean()
    return 10 * torch.log10(values[:, rest].square().mean() / noise).item()


torch.manual_seed(0)
normal = torch.randn(128, 256)
outliers = normal.clone()
outliers[:, 100] *= 1e5  # one channel of 256
NAMES = ("fp8", "fp8-rowwise", "fp8-1x128", "mxfp8", "mxfp4", "nvfp4")
errors = {
    kind: {name: sqnr(values, name) for name in NAMES}
    for kind, values in {"normal": normal, "one outlier channel": outliers}.items()
}
_ = figures.sqnr_by_format(errors)

# %% [markdown]
# Without outliers, the SQNR is about 32 dB in formats with E4M3 elements (an error of 3 %), and 19 to 20 dB in formats
# with E2M1 elements (about 10 %).
#
# With the outlier channel, all formats lose accuracy, and some values become zero. `fp8`, with one scale for the whole
# tensor, loses the most: about 22 dB.
#
# The scales take memory, too. We print the bits per value, including the scales of the blocks:

# %% tags=["nbval-ignore-output"]
alone, beside = errors["normal"], errors["one outlier channel"]
assert min(alone[name] for name in NAMES[:4]) > 29
assert all(17 < alone[name] < 22 for name in ("mxfp4", "nvfp4"))
assert all(beside[name] < alone[name] - 5 for name in NAMES)
assert beside["fp8"] < beside["fp8-rowwise"] < beside["fp8-1x128"] < beside["mxfp8"]
for name in NAMES:
    print(f"{name:<12} {FORMATS[name].bits:>5.2f} bits a value")

# %% [markdown]
# A factor of 100,000 is extreme. We now multiply the column by 100. Which formats still lose accuracy?

# %% tags=["nbval-ignore-output"]
usual = normal.clone()
usual[:, 100] *= 100
at_100 = {name: sqnr(usual, name) for name in NAMES}
print("  ".join(f"{name} {value:.1f} dB" for name, value in at_100.items()))
assert all(at_100[name] > 29 for name in NAMES[:4])
assert at_100["mxfp4"] < at_100["nvfp4"] < alone["nvfp4"] - 5

# %% [markdown]
# The formats with E4M3 elements lose almost no accuracy, because the range of E4M3 covers both the outlier and the
# other values. In the four-bit formats, most values in the blocks with an outlier become zero.
# <!-- tests/formats/test_scaling.py -->
#
# ## Train with rounded matmuls
#
# A linear layer has up to three matmuls in a training step. In the table, `grad` is the gradient of the layer's output:
#
# | matmul | computes | shapes |
# |---|---|---|
# | forward | `x @ weight.T` | (rows, in) @ (in, out) |
# | `grad_input` (*dgrad*), the gradient of `x` | `grad @ weight` | (rows, out) @ (out, in) |
# | `grad_weight` (*wgrad*), the gradient of `weight` | `grad.T @ x` | (out, rows) @ (rows, in) |
#
# We round the two matrices of each matmul, and compute the rest in fp32.


# %%
def rounded_matmul(left, right, form):
    """`left @ right`, with blocks in the rows of `left` and in the columns of `right`."""
    return quantize(left, form) @ quantize(right.T, form).T


class RoundedProduct(torch.autograd.Function):
    """`x @ weight.T` of (rows, in) and (out, in), with its operands rounded to a format."""

    @staticmethod
    def forward(ctx, x, weight, form):
        ctx.save_for_backward(x, weight)
        ctx.form = form
        return rounded_matmul(x, weight.T, form)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dgrad = rounded_matmul(grad, weight, ctx.form)
        wgrad = rounded_matmul(grad.T, x, ctx.form)
        return dgrad, wgrad, None


# %% [markdown]
# The next function makes the `nn.Linear` layers of a model use these matmuls:


# %%
def round_matmuls(model, form):
    """Make the linear layers of the model round their operands to `form`."""

    def forward(layer, x):
        rows = RoundedProduct.apply(x.flatten(0, -2), layer.weight, form)
        return rows.unflatten(0, x.shape[:-1])

    for module in model.modules():
        if isinstance(module, nn.Linear):  # not the embedding and the head
            module.forward = forward.__get__(module)


# %% [markdown]
# The model is a [GPT](17_language_model.ipynb#A-small-GPT) of two transformer blocks. It predicts the next character in
# the source code of Python's `argparse`. <!-- code -->


# %%
text = inspect.getsource(argparse)
characters = sorted(set(text))
tokens = torch.tensor([characters.index(c) for c in text], device=device)
steps = 100


def new_gpt():
    """Characters (B, T) to logits (B, T, characters)."""
    return Gpt(Size(width=64, heads=2, depth=2), vocabulary=len(characters))


# %% [markdown]
# The next function trains the model:


# %%
def train(form, seed, steps):
    """The losses of a training with matmuls rounded to `form`; None means fp32."""
    torch.manual_seed(seed)
    model = new_gpt().to(device)
    if form:
        round_matmuls(model, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, draws = [], torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - 33, (8,), generator=draws)
        batch = torch.stack([tokens[i : i + 33] for i in starts])  # (8, 33)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# We train in fp32, in E4M3 without a scale, and in four formats with scales, with three seeds each.
# In which formats will the model learn as well as in fp32?

# %% tags=["nbval-ignore-output"]
no_scale = Format("fp8, no scale", ELEMENTS["e4m3"], (0, 0), scale="none")
runs = {"fp32": None, "fp8, no scale": no_scale}
runs |= {name: FORMATS[name] for name in ("fp8", "mxfp8", "mxfp4", "nvfp4")}
losses = {name: [train(form, seed, steps) for seed in range(3)] for name, form in runs.items()}
last = {  # the mean of the last 20 steps
    name: [sum(run[-20:]) / 20 for run in of_seeds] for name, of_seeds in losses.items()
}
mean = {name: sum(values) / len(values) for name, values in last.items()}
for name, values in last.items():
    print(f"{name:<15} loss {mean[name]:.3f}   by seed", *(f"{value:.3f}" for value in values))
_ = figures.loss_from_fp32(losses)

# %% [markdown]
# The figure shows the smoothed difference between the loss in each format and the fp32 loss with the same seed. Each
# line is the mean over three seeds, and the bars show their range. The grey band shows how far the seeds differ in
# fp32.
#
# In `fp8` and `mxfp8`, the model learns as well as in fp32. In the four-bit formats, the loss is slightly higher.
# Without a scale, the loss is much higher, as the next cell asserts:

# %%
between_seeds = max(last["fp32"]) - min(last["fp32"])
assert mean["fp8, no scale"] > mean["fp32"] + 0.2
for name in ("fp8", "mxfp8"):
    assert abs(mean[name] - mean["fp32"]) < max(between_seeds, 0.05)
for name in ("mxfp4", "nvfp4"):
    assert mean["fp32"] - max(between_seeds, 0.05) < mean[name] < mean["fp8, no scale"] - 0.1

# %% [markdown]
# **Test a format in a short run before you start a large run.** But a format that passes the short run can
# still [fail in a long training run of a large model](https://arxiv.org/abs/2409.12517).
#
# **Keep some layers in 16 bits**: [embeddings, the head and norms](https://arxiv.org/abs/2412.19437), and layers
# with a large error.
#
# ## Test your own model
#
# Our function `rehearse` finds layers with a large error. In each format, it measures the errors of each layer and
# of the whole model. <!-- tests/formats/test_rehearsal.py -->
#
# Before we call `rehearse` on our GPT, we make one hidden feature of the second MLP an outlier:

# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
gpt = new_gpt()
with torch.no_grad():
    gpt.blocks[1].up.weight[5] *= 1e6
    gpt.blocks[1].down.weight[:, 5] /= 1e6  # so the next layers get normal values
batch = torch.stack([tokens[i : i + 32] for i in range(0, 256, 32)]).cpu()


def loss_of(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


report = rehearse(gpt, batch, formats=("fp8-rowwise", "mxfp8"), loss_fn=loss_of)
assert all(found.verdict == "accurate enough in one step" for found in report.formats)
report

# %% [markdown]
# A star marks a layer that you should leave in 16 bits. `token.weight` is the head, which uses the weight of the
# embedding. The list under *Look at* gives the reasons, such as an outlier or the [output
# size](08g_speed_and_memory.ipynb#A-size-is-not-a-multiple-of-16-or-8) of the layer.
# <!-- tests/formats/test_rehearsal.py -->
#
# The two *error* rows compare one step of the whole model with fp32. In this step, only the layers without a star are
# rounded. To test learning, run `amp-lab rehearse` with `--steps 20`.
# <!-- tests/cli/test_rehearse_command.py -->

# %%
for layer in ("blocks.1.up", "blocks.1.down"):
    for form in ("fp8-rowwise", "mxfp8"):
        assert report.of(layer, form).left_out

# %% [markdown]
# ## Train in FP8 on a GPU
#
# Our report ends with code that converts the model with torchao. Before you run this code, check [whether your GPU
# supports the format](#Which-GPU-supports-which-format-(optional)). <!-- tests/formats/test_rehearsal.py -->
# Compile the converted model: without `torch.compile`, FP8 can be [slower than 16
# bits](https://github.com/pytorch/ao/issues/685). FP8 speeds up [large layers
# most](https://github.com/pytorch/ao/tree/main/torchao/float8#performance).
#
# ## Compare with PyTorch's FP8 matmul (optional)
#
# PyTorch's FP8 matmul takes the rounded operands and their scales. We compare its result with our simulation:

# %% tags=["nbval-ignore-output"]
a, b = torch.randn(32, 64), torch.randn(48, 64)


def to_fp8(values):
    """E4M3 numbers, and the scale that they must be multiplied by."""
    factor = 448 / values.abs().max()
    return (values * factor).clamp(-448, 448).to(torch.float8_e4m3fn), 1 / factor


(a8, scale_a), (b8, scale_b) = to_fp8(a), to_fp8(b)
# The public function, `F.scaled_mm`, does not run on a CPU in torch 2.11.
real = torch._scaled_mm(a8, b8.T, scale_a, scale_b, out_dtype=torch.bfloat16)
simulated = quantize(a, "fp8") @ quantize(b, "fp8").T
off = ((real.float() - simulated).norm() / simulated.norm()).item()
print(f"the real result, in bf16, is {off:.2%} off the simulated one")
assert off < 2**-8  # the rounding of the result to bf16

# %% [markdown]
# ## Sums in 14 bits (optional)
#
# Our simulation adds the products in fp32, with 24 significant bits. A Hopper GPU adds FP8 products with [about 14
# significant bits](https://arxiv.org/abs/2412.19437). Our `hopper_matmul` imitates the two modes of PyTorch's FP8
# matmul:
# <!-- tests/formats/test_hopper_sums.py -->
#
# - `use_fast_accum=True`: the whole sum is in 14 bits.
# - `use_fast_accum=False`: short parts of the sum are in 14 bits, and the parts are added in fp32.
#
# We sum 4096 positive products. Which mode will lose more accuracy?

# %%
left, right = torch.randn(2, 16, 4096).abs()
(a8, _), (b8, _) = to_fp8(left), to_fp8(right)
exact = a8.double() @ b8.double().T
for fast in (True, False):
    lost = hopper_matmul(a8, b8, fast_accum=fast) - exact
    share = (lost.norm() / exact.norm()).item()
    print(f"use_fast_accum={fast!s:<5}  the sums are {share:.2%} off")
    assert fast or share < 0.01

# %% [markdown]
# The sums of positive products keep growing. The larger a sum is, the more bits of a new product are cut off.
#
# ## Which GPU supports which format (optional)
#
# The table shows which formats the matmul units support:
#
# | GPU (compute capability) | FP8 | MXFP8, MXFP4, NVFP4 |
# |---|---|---|
# | NVIDIA Ampere and before (A100, RTX 30) | no | no |
# | Ada, Hopper (8.9, 9.0: RTX 40, L40S, H100) | yes | no |
# | Blackwell for data centers (10.x: B200, B300) | yes | yes |
# | Blackwell RTX (12.x: RTX 50, RTX PRO) | yes | yes, but [some](https://github.com/pytorch/pytorch/issues/198126) [kernels](https://github.com/NVIDIA/TransformerEngine/issues/3062) failed in 2026 |
# | AMD MI300 | yes, as *fnuz* | no |
# | AMD MI350 | yes | MXFP8, MXFP4 |
#
# Sources: [NVIDIA](https://nvidia.github.io/TransformerEngine/support_matrix.html),
# [CUTLASS](https://github.com/NVIDIA/cutlass/blob/main/media/docs/cpp/blackwell_functionality.md),
# and [AMD](https://rocm.docs.amd.com/en/latest/reference/precision-support.html).
#
# MI300 uses *fnuz*, other variants of E4M3 and E5M2, so [convert FP8
# checkpoints](../docs/quantized.md#does-an-fp8-checkpoint-work-on-an-mi300-fnuz).
#
# ## Summary
#
# - Without outliers, the error depends mostly on the format of the elements. An outlier can make the values that share
#   its scale less accurate.
# - With outliers 100 times as large as other values, one scale for the tensor was enough in FP8. In four bits, most
#   values in the blocks with an outlier became zero.
# - Do not start a large run in a format that fails in a short test.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("15_below_16_bits")

# %% [markdown]
# ### 1. Count the bits
#
# A layer has 4096 x 4096 weights. How many MiB do they take in NVFP4, with the scales of the blocks? Ignore the scale
# of the whole tensor.

# %%
mebibytes = ...
exercises.check_bits(mebibytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Every 16 values share one scale of eight bits. How many bits does the scale add to each value?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# mebibytes = 4096 * 4096 * (4 + 8 / 16) / 8 / 2**20
# ```
#
# </details>
#
# ### 2. Find the factor
#
# Complete `factor_of`. It returns the factor by which `values` is multiplied before the rounding to E4M3, so that the
# largest magnitude becomes 448. For a tensor of zeros, the factor must be finite.


# %%
def factor_of(values):
    return ...


exercises.check_scale_of(factor_of)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The largest magnitude may belong to a negative value. To handle zeros, never divide by less than 1e-12.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def factor_of(values):
#     return 448 / values.abs().max().clamp(min=1e-12)
# ```
#
# </details>
#
# ### 3. Scale a block by a power of two
#
# Complete `block_scales` for MXFP4. For each row of 32 values it returns the smallest power of two for which all
# magnitudes, divided by this power, are at most 6. No row is all zeros.


# %%
def block_scales(rows):  # (blocks, 32) to (blocks, 1)
    return ...


exercises.check_block_scales(block_scales)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Divide each row's largest magnitude by 6, and round the result up to a power of two: `log2`, `ceil`,
# `exp2`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def block_scales(rows):
#     return (rows.abs().amax(1, keepdim=True) / 6).log2().ceil().exp2()
# ```
#
# </details>
#
# ### 4. Read a report
#
# Complete `left_out`. `report` is a result of `rehearse`, and `form` is the name of a format, such as `"mxfp8"`. The
# function returns a list with the names of the layers that should stay in 16 bits in this format. Keep the order of
# `report.layers`.


# %%
def left_out(report, form):
    return ...


exercises.check_left_out(left_out)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `report.layers` has an entry for each layer and format, with `layer.name`, `format` and `left_out`. If
# the layer is converted, `left_out` is empty.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def left_out(report, form):
#     return [r.layer.name for r in report.layers if r.format == form and r.left_out]
# ```
#
# </details>
#
# ## Further reading
#
# - P. Micikevicius et al., [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433), 2022.
# - NVIDIA, [Pretraining Large Language Models with NVFP4](https://arxiv.org/abs/2509.25149), 2025.
