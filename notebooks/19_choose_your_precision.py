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
# **What you'll do.** Measure how this machine rounds numbers. Write the decision down as a function
# and ask it about GPUs that are not here. Look at what PyTorch's fp32 modes and the settings of
# other frameworks really do to weights, gradients and outputs.
#
# **What you'll learn.**
# - which precision to begin with, on which hardware, for training and for inference;
# - what `highest`, `high` and `medium` change, and what they leave alone;
# - what a model that was trained in bf16 needs on a GPU without bf16;
# - what Lightning, accelerate, transformers and Keras mean by "mixed", "true" and "bf16".
#
# **What you need.** [Notebook 00](00_start_here.ipynb); for the why,
# [notebook 01](01_number_formats.ipynb). Nothing here needs a GPU.

# %% tags=["nbval-ignore-output"]
import torch
from torch import nn

from course import start

from amp_lab import describe_device
from amp_lab.core.gpus import GPUS
from amp_lab.numerics import largest_values

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## The idea in five lines
#
# Which precision is fast depends on the hardware, and the surest way to know is to measure it.
# `describe_device` times a matmul in several precisions, and multiplies numbers whose result is known.
# Before you run this: what do you expect of your machine? <!-- tests/core/test_device.py -->

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
print(f"{report.name}: begin with {report.recommended}")
for precision, found in report.values.items():
    if found is not None:
        kept = "kept" if found.subnormals else "made 0"
        print(
            f"{precision}: {found.input_bits} bits, subnormals {kept}, sums {found.error:.1f} ulp off"
        )
assert report.values["bf16"].input_bits == 8

# %% [markdown]
# The *bits* are what is left of an input's significand: 24 in fp32, 11 in fp16 and TF32, 8 in bf16.
# *Subnormals* are the numbers below a format's normal range; some devices make them 0. The last figure
# is the largest error of a sum of 4,096 products, in units of the last place of the result (*ulp*). In
# 16 bits half a unit is the best possible. Several units may mean that sums are kept in 16 bits.
# `amp-lab doctor` prints the same with the speeds. <!-- tests/core/test_device.py -->
#
# ## The decision
#
# `GPUS` has a row for each GPU that `amp-lab advise --for` knows, with the formats that its architecture
# multiplies *fast*, with tensor cores or their like
# ([NVIDIA](https://nvidia.github.io/TransformerEngine/support_matrix.html),
# [AMD](https://rocm.docs.amd.com/en/latest/reference/precision-support.html)). If your GPU has no row,
# look for another one of its architecture. All RTX 30, for example, are Ampere, like the RTX 3090.

# %%
kinds = {}
for gpu in GPUS.values():
    kinds.setdefault(gpu.architecture, []).append(gpu.name)
for kind, names in kinds.items():
    print(f"{', '.join(names):<22} {kind.name:<28} {', '.join(kind.matmuls) or 'fp32 alone'}")
assert GPUS["t4"].architecture.matmuls == ("fp16",)


# %%
def choose(fast, task, trained_in="fp32"):
    """What to begin with on a device; the task is "train", "infer" or "exact"."""
    if task == "exact":
        return "fp32 with TF32 off"
    form = "bf16" if "bf16" in fast else "fp16" if "fp16" in fast else "fp32"
    if form == "fp32":
        return "fp32"
    scaler = " with GradScaler" if form == "fp16" else ""
    how = f"{form} under autocast{scaler}" if task == "train" else f"{form}, cast once"
    return f"{how}, if its values fit" if (form, trained_in) == ("fp16", "bf16") else how


# %%
print(f"{'':<29} {'train':<35} infer")
multiplies = {", ".join(names): kind.matmuls for kind, names in kinds.items()}
multiplies["CPU with AMX or BF16"] = ("bf16",)  # AVX-512 BF16, or Arm's
multiplies["another CPU"] = ()
for name, fast in multiplies.items():
    print(f"{name:<29} {choose(fast, 'train'):<35} {choose(fast, 'infer')}")
turing = GPUS["t4"].architecture.matmuls
assert choose(turing, "train") == "fp16 under autocast with GradScaler"
print("V100, a model trained in bf16:", choose(turing, "infer", trained_in="bf16"))

# %% [markdown]
# So the rule is:
#
# - **bf16 wherever it is fast.** It has the range of fp32 and needs no scaler.
# - **fp16** on the GPUs that have nothing else, with a scaler for training. If you know that a model's
#   values stay far below 65504, fp16 is usually more accurate than bf16 for inference, with three bits
#   more ([notebook 18](18_inference_and_export.ipynb)).
# - **fp32** where nothing is faster, and where digits matter more than time: solvers, statistics, small
#   differences of large numbers.
#
# Training keeps fp32 weights and casts under autocast. For inference you can cast the weights once, to half
# their size.
#
# The choice is where you *begin*. Then measure it: `amp-lab advise` times each precision on your own model
# and machine ([notebook 10](10_speed_ladder.ipynb)). Try FP8 for training only after bf16 works
# ([notebook 15](15_below_16_bits.ipynb)). Whether a model *fits* is another question, with other answers:
#
# | what takes the memory | what helps |
# |---|---|
# | activations | autocast, checkpointing ([07](07_training_recipes.ipynb)), a smaller batch with accumulation |
# | weights and optimizer state | a leaner optimizer ([16](16_low_precision_state.ipynb)), sharding ([11](11_scale_out.ipynb)), training adapters alone ([17](17_language_model.ipynb)) |
# | weights at inference | cast once, then eight bits ([18](18_inference_and_export.ipynb)) |
#
# `amp-lab memory` forecasts [which of them it is](../docs/your_model.md).
#
# ## What to know of each kind
#
# | hardware | what surprises its users |
# |---|---|
# | GTX 16 | fp16 gives NaN in some models ([pytorch 58123](https://github.com/pytorch/pytorch/issues/58123), [77955](https://github.com/pytorch/pytorch/issues/77955)): use fp32 |
# | V100, GTX 10 | the last builds of PyTorch with kernels for them are those of 2.14 for CUDA 12.6 ([pytorch 190385](https://github.com/pytorch/pytorch/issues/190385)) |
# | V100, T4, RTX 20 | bf16 runs, but is emulated; TF32 does not exist |
# | RTX 30, RTX 40 | a data sheet has two rates for fp16; the higher is that of sums in fp16, and PyTorch sums in fp32, at half of it ([NVIDIA](https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf)). `torch.backends.cuda.matmul.allow_fp16_accumulation` lets it sum in fp16, where sums can overflow and small summands get lost ([01](01_number_formats.ipynb)): for inference at most |
# | MI210, MI250 | products in 16 bits take subnormals as 0, which fp16 has many of in its gradients; PyTorch therefore computes fp16's backward products with bf16 inputs ([PyTorch](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html)): use bf16 |
# | MI300 | its FP8 is *fnuz*: the same bits stand for half the value that they have elsewhere ([15](15_below_16_bits.ipynb)) |
# | Arc A | has no float64, which `GradScaler` needs: use bf16. Arc B has it ([pytorch 147731](https://github.com/pytorch/pytorch/issues/147731)). The device is called `xpu` |
# | Apple M | bf16 needs macOS 14 ([pytorch 139386](https://github.com/pytorch/pytorch/issues/139386)), and M1 and M2 emulate it ([transformers 40458](https://github.com/huggingface/transformers/pull/40458)) |
# | CPUs | fp16 can be 60 times slower than fp32, or as fast ([measured](../data/results/README.md)): take bf16 or fp32, unless `amp-lab doctor` shows fp16 to be fast |
#
# On a V100, a T4 or an RTX 20, `torch.cuda.is_bf16_supported()` is true all the same: it asks whether a
# tensor can be made, and not whether it is fast. Ask
# `torch.cuda.is_bf16_supported(including_emulation=False)`. <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# Why do subnormals matter? These are gradients of an ordinary size:

# %%
torch.manual_seed(0)
gradients = torch.randn(100_000) * 1e-5
smallest = torch.finfo(torch.float16).smallest_normal
flushed = (gradients.half().abs() < smallest).float().mean().item()
lost = (gradients.half() == 0).float().mean().item()
print(f"0 in fp16: {lost:.1%}; where subnormals are 0: {flushed:.1%}")
print(f"0 in bf16: {(gradients.bfloat16() == 0).float().mean():.1%}")
assert lost < 0.01 < 0.99 < flushed
assert not (gradients.bfloat16() == 0).any()

# %% [markdown]
# Where subnormals are 0, nearly all of these gradients are gone without a loss scale. bf16 needs no loss scale.
#
# ## What fp32 means
#
# Since Ampere, NVIDIA's GPUs can multiply fp32 tensors as
# [**TF32**](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices):
# the inputs keep 11 bits of their 24. Two settings of the process choose this, one for matmuls and one
# for convolutions:
#
# | `set_float32_matmul_precision` | matmuls on CUDA | matmuls on a CPU | convolutions on CUDA |
# |---|---|---|---|
# | `"highest"`, the default | fp32 | fp32 | TF32 |
# | `"high"` | TF32 | TF32, where the CPU has it | TF32 |
# | `"medium"` | TF32 | bf16, where the CPU has it | TF32 |
#
# So fp32 *convolutions* are TF32 on such a GPU by default, and this function does not change that. We can
# read the modes without a GPU:


# %%
def modes():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    return matmul.fp32_precision, conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


before = torch.get_float32_matmul_precision()
for name in ("highest", "high", "medium"):
    torch.set_float32_matmul_precision(name)
    print(f"{name:<8} CUDA's matmuls {modes()[0]}, convolutions {modes()[1]}, CPU's {modes()[2]}")
    assert modes()[:2] == ("ieee" if name == "highest" else "tf32", "tf32")
torch.set_float32_matmul_precision(before)

# %% [markdown]
# These modes are for [matmuls of fp32
# tensors](https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html). As a
# rule of thumb, use `"high"` whenever you train in fp32 on an RTX 30, an A100 or a later GPU. If a
# result differs from a CPU's in the fourth digit, look here first: 11 bits are three to four digits.
# Work that needs every digit needs TF32 off for matmuls and convolutions:

# %%
kept = torch.backends.cudnn.allow_tf32
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.allow_tf32 = False  # convolutions, and recurrent layers
assert modes()[0] == "ieee"
assert "tf32" not in modes()
torch.backends.cudnn.allow_tf32 = kept

# %% [markdown]
# ### Old names and new ones
#
# The modes have old names (`allow_tf32`) and new ones (`fp32_precision`). If you set a new name to a
# value that contradicts the old one, the next read of the old name raises an error. The code that reads
# it may be a library, such as
# [Lightning](https://github.com/Lightning-AI/pytorch-lightning/issues/21256) or, in some versions,
# [`torch.compile`](https://github.com/pytorch/pytorch/pull/189955).

# %%
matmul = torch.backends.cuda.matmul
kept, mixed = matmul.fp32_precision, False
matmul.fp32_precision = "tf32"
try:
    torch.get_float32_matmul_precision()
except RuntimeError as error:
    print(str(error).partition(".")[0])
    mixed = True
matmul.fp32_precision = kept
torch.set_float32_matmul_precision(before)
assert mixed
assert torch.get_float32_matmul_precision() == before

# %% [markdown]
# `torch.set_float32_matmul_precision` and `torch.backends.cudnn.allow_tf32` set both names, so these two alone
# do not cause this error. <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# ## Trained in bf16, on a GPU without it
#
# Many language models were trained in bf16, whose largest number is 3.4e38. fp16 ends at 65504. Here is a
# model whose weights, inputs and outputs all fit into fp16, but whose hidden values do not. `largest_values`
# shows the largest magnitude that each module computes: <!-- tests/numerics/test_largest_values.py -->

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
print(f"finite: in bf16 {in_bf16.isfinite().all()}, in fp16 {in_fp16.isfinite().all()}")
assert in_bf16.isfinite().all()
assert not in_fp16.isfinite().all()

# %% [markdown]
# So **look before you cast**: run some of your own inputs through the model with `largest_values`, in
# fp32 or bf16. A CPU is enough. Each value should be at most half of 65504. `amp-lab export --dtype
# fp16` refuses a model whose outputs are not finite. <!-- tests/train/test_export.py -->
#
# What then? Keep the layers that exceed the range in fp32, and the rest in fp16. Models of transformers
# can name such layers in `_keep_in_fp32_modules`, as T5 does. Or divide the weights of one layer by a
# power of two, and multiply those of the next layer by it, as in exercise 4. The result is exactly the
# same if the function between the two layers returns twice the output for twice the input. ReLU does,
# and GELU does not. <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# ## What frameworks call it
#
# Three words decide:
#
# - **Mixed** usually means fp32 weights under autocast.
# - **True** means that the model itself is cast. Gradients and the optimizer's state are in 16 bits as well.
# - A plain **bf16** is ambiguous: mixed in accelerate and transformers, true in torchtune, and something
#   between the two in DeepSpeed.
#
# So we look at what really happens, with a hook and after a step:


# %%
def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def look(model, optimizer, step):
    """The dtypes of weights, matmuls, gradients, state and outputs in a step of a model."""
    seen = {}

    def note(layer, given, output):
        seen["matmuls"] = output.dtype

    hook = model[0].register_forward_hook(note)
    output, weight = step(), model[0].weight
    hook.remove()
    state = optimizer.state[weight]["exp_avg"]
    found = weight.dtype, seen["matmuls"], weight.grad.dtype, state.dtype, output.dtype
    return tuple(str(dtype).removeprefix("torch.") for dtype in found)


batch = torch.randn(8, 16)


# %%
def plain(dtype=None):
    """PyTorch by itself: autocast, or a model that is cast."""
    model = tiny() if dtype is None else tiny().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            output = model(batch if dtype is None else batch.to(dtype))
        output.float().square().mean().backward()
        optimizer.step()
        return output

    return look(model, optimizer, step)


rows = {"autocast": plain(), "model.to(bfloat16)": plain(torch.bfloat16)}
rows |= {"model.to(float16)": plain(torch.float16)}
for name, row in rows.items():
    print(f"{name:<20}", *(f"{dtype:<10}" for dtype in row))
assert rows["autocast"] == ("float32", "bfloat16", "float32", "float32", "bfloat16")
assert set(rows["model.to(bfloat16)"]) == {"bfloat16"}

# %% [markdown]
# Under autocast weights, gradients and state stay in fp32. A model that is cast has nothing in fp32 to
# update, and bf16 weights can stand still ([notebook 16](16_low_precision_state.ipynb)).
#
# The tests of this notebook look at other libraries in the same way, on a tiny model on a CPU:
#
# | setting | weights | matmuls | gradients | state | outputs |
# |---|---|---|---|---|---|
# | `torch.autocast(…, torch.bfloat16)` | fp32 | bf16 | fp32 | fp32 | bf16 |
# | `model.to(torch.bfloat16)` | bf16 | bf16 | bf16 | bf16 | bf16 |
# | accelerate `mixed_precision="bf16"` | fp32 | bf16 | fp32 | fp32 | fp32 |
# | Fabric `precision="bf16-mixed"` | fp32 | bf16 | fp32 | fp32 | fp32 |
# | Fabric `precision="bf16-true"` | bf16 | bf16 | bf16 | bf16 | fp32 |
# | Lightning `precision="bf16-mixed"` | fp32 | bf16 | fp32 | fp32 | bf16 |
# | Lightning `precision="bf16-true"` | bf16 | bf16 | bf16 | bf16 | bf16 |
# | transformers `bf16=True` | fp32 | bf16 | fp32 | fp32 | fp32 |
# | transformers `bf16=True`, model loaded in bf16 | bf16 | bf16 | bf16 | bf16 | fp32 |
# | Keras `mixed_bfloat16` | fp32 | bf16 | fp32 | fp32 | bf16 |
# | Keras `bfloat16` | bf16 | bf16 | bf16 | bf16 | bf16 |
#
# accelerate and Fabric wrap the model, and the wrapper returns *fp32*, whatever dtype the model computed
# in. To keep accelerate's outputs in 16 bits, take the model out of the wrapper with
# `accelerator.unwrap_model(model, keep_fp32_wrapper=False)`, and call it inside `with
# accelerator.autocast():`. On a CPU two settings differ from their name: Fabric's `16-mixed` computes in
# bf16, and accelerate's `fp16` in fp32. <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# By their documentation the settings for fp16
# ([`16-mixed`](https://lightning.ai/docs/fabric/latest/fundamentals/precision.html),
# [`fp16=True`](https://huggingface.co/docs/transformers/en/mixed_precision_training),
# [`mixed_float16`](https://keras.io/api/mixed_precision/)) do the same on a GPU, with fp16 in place of bf16
# and a scaler of their own.
#
# Since version 5, transformers' `from_pretrained` loads a model **in the dtype that it was saved in**, which
# for many language models is bf16. Fine-tuning then has no fp32 weights. Ask for `dtype=torch.float32`. A
# saved Keras model keeps its policy ([notebook
# 12](12_keras.ipynb)). <!-- tests/notebooks/test_19_choose_your_precision.py -->
#
# These frameworks could not be run here. The table follows their documentation:
#
# | setting | what it does |
# |---|---|
# | DeepSpeed `"bf16": {"enabled": true}` | bf16 weights and matmuls; fp32 master weights and state in ZeRO; gradients accumulate in `grad_accum_dtype` ([settings](https://www.deepspeed.ai/docs/config-json/)) |
# | torchtitan `mixed_precision_param`, `mixed_precision_reduce` | fp32 weights; with FSDP2 its policy: matmuls in the first, gradients summed in the second ([11](11_scale_out.ipynb)); with DDP or on one GPU autocast in the first ([settings](https://github.com/pytorch/torchtitan/tree/main/torchtitan/config)) |
# | torchtune `dtype: bf16` | all of it in bf16, as `model.to(torch.bfloat16)` ([precision](https://docs.pytorch.org/torchtune/stable/tutorials/memory_optimizations.html)) |
# | JAX with Flax | no autocast: layers have `dtype` for matmuls and `param_dtype` for weights ([layers](https://flax.readthedocs.io/en/stable/api_reference/flax.nnx/nn/linear.html)) |
#
# ## Summary
#
# - Begin with bf16 wherever the hardware multiplies it fast, with fp16 and a scaler where only
#   that is fast, and with fp32 elsewhere. Then measure your own model.
# - By default fp32 matmuls are fp32 and fp32 convolutions may be TF32. Set each mode once:
#   `torch.set_float32_matmul_precision` for matmuls, `torch.backends.cudnn.allow_tf32` for convolutions.
# - Before a bf16 model goes to fp16, look at its largest values.
# - "Mixed" keeps fp32 weights, and "true" in 16 bits does not.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("19_choose_your_precision")

# %% [markdown]
# ### 1. Decide
#
# What do you begin with? Choose for each case one of "fp32", "fp16 with a scaler", "fp16" (cast
# once), "bf16 under autocast", "bf16" (cast once), or "fp32 with TF32 off".

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
# Find the GPU in `GPUS`, and read the table of surprises too.
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
# Complete `bits_left`: how many bits of significand does an input of `product(a, b)` keep? Find the
# largest k for which the product of 1 + 2^-k and 1 is still more than 1. `product` takes and
# returns fp32 tensors of the shape (1, 1).


# %%
def bits_left(product):
    return ...


exercises.check_bits(bits_left)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Where k bits follow the leading 1, the significand has k + 1.
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
# In which dtype do these return their outputs, on a CPU? Answer with "fp32" or "bf16".

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
# Fabric and accelerate wrap the model; the Trainer calls your own.
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
# Complete `scale_down`: move a power of two from the first linear layer of a `Sequential` of linear
# layer, ReLU and linear layer into the last one, in place, so that the first layer's outputs for
# `x` stay within ±1024 and the model's outputs remain the same. As it comes, they are larger.


# %%
def scale_down(model, x):
    return ...


exercises.check_scale_down(scale_down)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The largest magnitude that the first layer returns, divided by 1024, is what has to go; round its
# logarithm up. The bias of the first layer has to shrink with its weight.
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
# - PyTorch, [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html)
#   and [TF32 on NVIDIA GPUs](https://docs.pytorch.org/docs/stable/notes/cuda.html).
# - [Lightning's precisions](https://lightning.ai/docs/fabric/latest/fundamentals/precision.html).
# - transformers, [Mixed precision
#   training](https://huggingface.co/docs/transformers/en/mixed_precision_training).
