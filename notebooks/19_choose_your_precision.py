# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose your precision for a GPU, a task and a framework
#
# **What you'll do.** Measure how this machine rounds numbers. Write a function that chooses a precision
# for any GPU. Look at PyTorch's fp32 modes, and at the dtypes that other frameworks use.
#
# **What you'll learn.**
# - which precision to start with on your hardware;
# - what `highest`, `high` and `medium` change in fp32 matmuls;
# - how to run a model that was trained in bf16 on a GPU without bf16;
# - what Lightning, accelerate, transformers and Keras mean by "mixed", "true" and "bf16".
#
# **What you need.** Read [notebook 00](00_start_here.ipynb) and [notebook 01](01_number_formats.ipynb) on
# number formats first. You need no GPU.

# %% tags=["nbval-ignore-output"]
import torch
from torch import nn

from course import start

from amp_lab import describe_device
from amp_lab.core.gpus import GPUS
from amp_lab.numerics import largest_values

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## The idea
#
# `describe_device` times a matmul in each precision, checks how the device rounds, and recommends a precision. <!--
# tests/core/test_device.py --> Which precision do you expect for your machine?

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
print(f"{report.name}: start with {report.recommended}")
for precision, found in report.values.items():
    if found is not None:
        kept = "are kept" if found.subnormals else "become 0"
        print(f"{precision}: inputs keep {found.input_bits} bits, subnormals {kept}")
assert report.values["bf16"].input_bits == 8

# %% [markdown]
# After the first line, each line describes a matmul in one precision:
#
# - **bits**: how many significant bits of an input the matmul uses.
# - **subnormals**: numbers below the format's normal range. Some devices round them to 0.
#
# To see the measured speeds, run `amp-lab doctor`.
# <!-- tests/core/test_device.py --> <!-- tests/cli/test_cli.py -->
#
# ## The decision
#
# The choice depends on the formats that a GPU multiplies *fast*, with tensor cores or similar units. `GPUS` lists these
# formats [with their sources](../src/amp_lab/core/gpus.py). The next cell prints this list. The cell after it defines
# `choose`, which returns a precision:

# %%
kinds = {}
for gpu in GPUS.values():
    kinds.setdefault(gpu.architecture, []).append(gpu.name)
for kind, names in kinds.items():
    print(f"{kind.name} ({', '.join(names)}): {', '.join(kind.matmuls) or 'only fp32'}")
assert GPUS["t4"].architecture.matmuls == ("fp16",)


# %%
def choose(fast, task, trained_in="fp32"):
    """Return a precision for a GPU with these fast formats; `task`: "train", "infer" or "exact"."""
    if task == "exact":
        return "fp32 with TF32 off"
    if "bf16" in fast:
        return "bf16 under autocast" if task == "train" else "bf16, cast once"
    if "fp16" not in fast:
        return "fp32"
    condition = ", if the values fit" if trained_in == "bf16" else ""
    if task == "train":
        return "fp16 under autocast with GradScaler" + condition
    return "fp16, cast once" + condition


# %%
print(f"{'architecture':<29} {'for training':<35} for inference")
multiplies = {kind.name: kind.matmuls for kind in kinds}
multiplies["CPU with AMX or BF16"] = ("bf16",)  # AVX-512 BF16, or Arm's
multiplies["another CPU"] = ()
for name, fast in multiplies.items():
    print(f"{name:<29} {choose(fast, 'train'):<35} {choose(fast, 'infer')}")
turing = GPUS["t4"].architecture.matmuls
assert choose(turing, "train") == "fp16 under autocast with GradScaler"
print("T4, a model trained in bf16:", choose(turing, "infer", trained_in="bf16"))

# %% [markdown]
# `choose` follows three rules:
#
# - **bf16** wherever bf16 is fast. bf16 has nearly the range of fp32, so you can train without a scaler.
# - **fp16** where only fp16 is fast. To train in fp16, use a scaler. For a model that was trained in bf16, [check
#   the values first](#Trained-in-bf16,-on-a-GPU-without-it).
# - **fp32** where neither is fast.
#
# For work in which accuracy matters more than speed, such as a solver, `choose` returns fp32 with
# [TF32](#What-fp32-means) off.
#
# For training in 16 bits, use autocast and keep the weights in fp32. For inference in 16 bits, cast fp32 weights once.
#
# Start with the precision from `choose`, then measure. [`amp-lab
# advise`](../docs/your_model.md#which-precision-should-i-use-and-what-do-i-write) times the precisions on your
# model and machine.
#
# ## Known problems of each device
#
# - **GTX 16.** fp16 [can give NaN](https://github.com/pytorch/pytorch/issues/58123). Use fp32.
# - **V100, P100 and GTX 10.** PyTorch 2.15 [is not built](https://github.com/pytorch/pytorch/issues/190385) for these
#   GPUs. [Install PyTorch 2.14 for CUDA 12.6](../docs/hardware.md#install-another-build-of-torch).
# - **V100, T4 and RTX 20.** Use fp16. These GPUs [emulate bf16](../docs/hardware.md#t4-v100-and-rtx-20), so bf16 can be
#   slower than fp32.
# - **MI210 and MI250.** Use bf16. In fp16, matmuls of the forward pass on these GPUs [round subnormals to
#   0](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html).
# - **Arc A.** Use bf16. `GradScaler` needs float64, which these GPUs [do not
#   have](https://github.com/pytorch/pytorch/issues/147731).
#   <!-- tests/notebooks/test_19_choose_your_precision.py -->
# - **Apple M1 to M4.** Use fp32. In [measurements](../docs/hardware.md#apple), fp16 was hardly faster.
# - **CPUs.** Even with AMX, bf16 [can be slower than fp32](../docs/hardware.md#is-bf16-faster-on-this-cpu) for
#   small layers. Use fp16 only if `amp-lab doctor` shows that it is fast.
#
# ## What fp32 means
#
# From Ampere on, NVIDIA's GPUs can multiply fp32 tensors in
# [**TF32**](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
# TF32 can be faster than fp32, but rounds each input from 24 significant bits to 11. PyTorch has separate settings for
# convolutions and for matmuls:
#
# - **Convolutions**: PyTorch's default allows TF32. `torch.backends.cudnn.allow_tf32 = False` turns TF32 off.
# - **Matmuls**: PyTorch's default does not allow TF32. The function
#   [`torch.set_float32_matmul_precision`](https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html)
#   accepts `"highest"` (the default), `"high"` and `"medium"`. On NVIDIA GPUs, `"high"` and `"medium"` both allow
#   TF32. On a CPU, `"medium"` allows bf16.
#   <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# The next cell calls this function with each of the three, and prints what it allows for matmuls on NVIDIA GPUs.
# `ieee` means fp32:


# %%
def modes():
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


before = torch.get_float32_matmul_precision()
for name in ("highest", "high", "medium"):
    torch.set_float32_matmul_precision(name)
    print(f"{name:<8} {modes()[0]}")
    assert modes() == ("ieee" if name == "highest" else "tf32", "tf32")
torch.set_float32_matmul_precision(before)

# %% [markdown]
# If you train in fp32 on an NVIDIA GPU with TF32, usually choose `"high"`. For work that needs every digit, turn TF32
# off for matmuls and convolutions:

# %%
kept = torch.backends.cudnn.allow_tf32
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.allow_tf32 = False  # for convolutions and recurrent layers
assert modes()[0] == "ieee"
assert "tf32" not in modes()
torch.backends.cudnn.allow_tf32 = kept  # for the next cells; leave this line out in your code

# %% [markdown]
# ### Old and new settings
#
# PyTorch has old and new settings for TF32. The cells above set two old ones, `torch.set_float32_matmul_precision` and
# `torch.backends.cudnn.allow_tf32`. The names of the new ones end in `fp32_precision`. Change only the two old ones.
# If you change a new setting, libraries that read an old one [can get an
# error](08h_compile_and_processes.ipynb#TF32-is-set-in-the-old-and-in-the-new-way).
# [Lightning](https://github.com/Lightning-AI/pytorch-lightning/issues/21256) reads an old one.
# <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# ## Trained in bf16, on a GPU without it
#
# Many language models were trained in bf16, whose largest number is 3.4e38. The largest number of fp16 is only
# 65504. In the next model, some hidden values exceed 65504. `largest_values` returns the largest magnitude that each
# module computes:
# <!-- tests/numerics/test_largest_values.py -->

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
with torch.no_grad():
    model[0].weight.mul_(2**18)
    model[2].weight.mul_(2**-18)
x = torch.rand(16, 32)
for name, value in largest_values(model, x).items():
    print(f"{name or 'output'}: {value:.3g}")
with torch.inference_mode():
    in_bf16, in_fp16 = model.bfloat16()(x.bfloat16()), model.half()(x.half())
print(f"finite outputs in bf16: {in_bf16.isfinite().all()}, in fp16: {in_fp16.isfinite().all()}")
assert in_bf16.isfinite().all()
assert not in_fp16.isfinite().all()

# %% [markdown]
# In fp16, hidden values such as 2.69e+05 become infinite, so the outputs are not finite either.
#
# **Look before you cast**: call `largest_values` for your model in fp32 or bf16, with some of your inputs. As a rule of
# thumb, each value should be at most half of 65504.
#
# If a value is too large, run the model in fp32, or use one of two remedies:
#
# - **Run some layers in fp32**: those that compute large values, and those that receive them. Cast their weights to
#   fp32, cast their input to fp32, and cast their output back to fp16: `y = these_layers(x.float()).half()`. The
#   output must fit into fp16.
# - **Divide the weight and the bias of one linear layer by a factor, and multiply the weight of the next linear layer
#   by the same factor**, as in [exercise 4](#4.-Make-it-fit). This works if there is nothing but a ReLU between the
#   two layers. With a GELU, the outputs would change. The multiplied weight must still fit in fp16. <!--
#   tests/notebooks/test_19_choose_your_precision.py -->
#
# ## What other frameworks call it
#
# The name of a setting tells what it does:
#
# - With **mixed** in its name, such as `bf16-mixed`, it usually means autocast.
# - With **true** in its name, such as `bf16-true`, it means that the weights are cast.
# - With neither word, it can mean either: `bf16` in transformers usually means autocast, and `bfloat16` in Keras means
#   that the weights are in bf16.
#
# To see what a setting does, we look at the dtypes in a training step, first without a framework:


# %%
def dtypes(cast):
    """Return the dtypes in a training step, under autocast or with a model that is cast to bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    batch, seen = torch.randn(8, 16), []
    if cast:
        model, batch = model.bfloat16(), batch.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].register_forward_hook(lambda layer, given, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        output = model(batch)
    output.float().square().mean().backward()
    optimizer.step()
    weight = model[0].weight
    assert weight.grad.dtype == optimizer.state[weight]["exp_avg"].dtype == weight.dtype
    return weight.dtype, seen[0], output.dtype


# %%
rows = {"autocast": dtypes(cast=False), "model.to(bfloat16)": dtypes(cast=True)}
print(f"{'':<20} weights    matmuls    outputs")
for name, row in rows.items():
    print(f"{name:<20}", *(f"{str(dtype).removeprefix('torch.'):<10}" for dtype in row))
assert rows["autocast"] == (torch.float32, torch.bfloat16, torch.bfloat16)
assert set(rows["model.to(bfloat16)"]) == {torch.bfloat16}

# %% [markdown]
# A cast model has no fp32 weights, so rounding can remove small updates ([notebook 16](16_low_precision_state.ipynb)).
#
# We found the dtypes in other frameworks in the same way, on a CPU. In each row, the gradients and the optimizer's
# state have the dtype of the weights. *Fabric* is Lightning without its Trainer:
# <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# | setting | weights | matmuls | outputs |
# |---|---|---|---|
# | `torch.autocast(…, torch.bfloat16)` | fp32 | bf16 | bf16 |
# | `model.to(torch.bfloat16)` | bf16 | bf16 | bf16 |
# | accelerate `mixed_precision="bf16"` | fp32 | bf16 | fp32 |
# | Fabric `precision="bf16-mixed"` | fp32 | bf16 | fp32 |
# | Fabric `precision="bf16-true"` | bf16 | bf16 | fp32 |
# | Lightning `precision="bf16-mixed"` | fp32 | bf16 | bf16 |
# | Lightning `precision="bf16-true"` | bf16 | bf16 | bf16 |
# | transformers `bf16=True` | fp32 | bf16 | fp32 |
# | transformers `bf16=True`, model loaded in bf16 | bf16 | bf16 | fp32 |
# | Keras `mixed_bfloat16` | fp32 | bf16 | bf16 |
# | Keras `bfloat16` | bf16 | bf16 | bf16 |
#
# accelerate (which transformers uses) and Fabric cast the model's outputs to fp32. For Lightning, the table shows the
# outputs in `training_step`.
#
# In transformers 5, `from_pretrained` by default loads a model **in the dtype that its config names**. To fine-tune
# with fp32 weights, pass `dtype=torch.float32`.
# <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# ## Summary
#
# - Start with bf16 where bf16 is fast. Where only fp16 is fast, start with fp16. On other hardware, start with fp32.
#   Then measure your model.
# - By default, fp32 matmuls run in fp32, but on an NVIDIA GPU with TF32, fp32 convolutions can run in TF32.
# - Before you cast a bf16 model to fp16, look at its largest values.
# - In the table above, a "mixed" setting leaves fp32 weights in fp32, and a "true" setting casts them.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("19_choose_your_precision")

# %% [markdown]
# ### 1. Decide
#
# With which precision do you start in each case? Choose one of these answers:
#
# - "fp32" or "fp32 with TF32 off";
# - "fp16 with a scaler", or "fp16" (the weights are cast once);
# - "bf16 under autocast", or "bf16" (the weights are cast once).

# %%
answers = {
    "train a ResNet on a T4": ...,
    "train a GPT on an A100": ...,
    "serve a BERT, trained in fp32, on a V100": ...,
    "serve a language model on an RTX 4090": ...,
    "train a U-Net on a GTX 1660": ...,
    "solve an ill-conditioned system on an H100": ...,
    "fine-tune on an Arc A770": ...,
    "train on an MI250X": ...,
    "serve on a CPU with AMX": ...,
    "train on a laptop's CPU with AVX2 alone": ...,
}
exercises.check_cases(answers)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For a GPU, find its architecture in the first list that we printed. Then find the precision in the second list.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# answers = {
#     "train a ResNet on a T4": "fp16 with a scaler",
#     "train a GPT on an A100": "bf16 under autocast",
#     "serve a BERT, trained in fp32, on a V100": "fp16",
#     "serve a language model on an RTX 4090": "bf16",
#     "train a U-Net on a GTX 1660": "fp32",
#     "solve an ill-conditioned system on an H100": "fp32 with TF32 off",
#     "fine-tune on an Arc A770": "bf16 under autocast",
#     "train on an MI250X": "bf16 under autocast",
#     "serve on a CPU with AMX": "bf16",
#     "train on a laptop's CPU with AVX2 alone": "fp32",
# }
# ```
#
# </details>
#
# ### 2. Count the bits
#
# `product(a, b)` multiplies two fp32 tensors of shape (1, 1), and may round them first. Complete `bits_left`:
#
# 1. Multiply 1 + 2^-k by 1, for k = 1, 2, 3 and so on. Find the largest k with a product of more than 1.
# 2. Return how many significant bits an input keeps.


# %%
def bits_left(product):
    return ...


exercises.check_bits(bits_left)

# %% [markdown]
# <details><summary>Hint</summary>
#
# If k bits follow the leading 1, there are k + 1 significant bits.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def bits_left(product):
#     one = torch.ones(1, 1)
#     k = 0
#     while product(one + 2.0 ** -(k + 1), one) > 1:
#         k += 1
#     return k + 1
# ```
#
# </details>
#
# ### 3. What comes out
#
# On a CPU, in which dtype does a model return its outputs with each setting? Answer with "fp32" or "bf16".

# %%
outputs = {
    'accelerate, mixed_precision="bf16"': ...,
    'Lightning\'s Trainer, precision="bf16-mixed", in training_step': ...,
    'Fabric, precision="bf16-true"': ...,
    "torch.autocast, after a last linear layer": ...,
}
exercises.check_outputs(outputs)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Look at the last column of the table.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# outputs = {
#     'accelerate, mixed_precision="bf16"': "fp32",
#     'Lightning\'s Trainer, precision="bf16-mixed", in training_step': "bf16",
#     'Fabric, precision="bf16-true"': "fp32",
#     "torch.autocast, after a last linear layer": "bf16",
# }
# ```
#
# </details>
#
# ### 4. Make it fit
#
# The model is a `Sequential` with two linear layers and a ReLU between them. With the input `x`, the first layer
# returns values beyond ±1024. Complete `scale_down`, which changes the model in place: divide the weight and
# bias of the first layer by a power of two, and multiply the weight of the last layer by the same power. Use the
# smallest power that brings the outputs of the first layer within ±1024.


# %%
def scale_down(model, x):
    return ...


exercises.check_scale_down(scale_down)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The factor is 2^k. To find k, divide the largest magnitude that the first layer returns by 1024, take the
# base-2 logarithm, and round it up.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def scale_down(model, x):
#     first, relu, last = model
#     with torch.no_grad():
#         factor = (first(x).abs().max() / 1024).log2().ceil().exp2()
#         first.weight /= factor
#         first.bias /= factor
#         last.weight *= factor
# ```
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html).
