# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train with AMP in five minutes
#
# **What you'll do.** Train a small network twice on your own machine, once in plain fp32 and once
# with automatic mixed precision (AMP), and see in one picture what that buys: time, memory, and what
# it does to the loss.
#
# **What you'll learn.**
# - the few lines that turn a training loop into an AMP loop, and what each is for;
# - what they buy on *this* machine;
# - which notebook answers the question that brought you here.
#
# **What you need.** Basic PyTorch: a model, a loss, an optimizer. No GPU is needed, and nothing is
# downloaded. Run the cells from top to bottom, with Shift+Enter.

# %% tags=["nbval-ignore-output"]
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

from course import emulates_bf16, figures, start

from amp_lab import Precision, compare, forecast_memory, recommend_precision

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# The line above says where you are: the device, its instructions or driver, and the version of torch.
# Every notebook starts with it, so that you know what the figures below it come
# from. <!-- tests/core/test_device.py --> <!-- tests/notebooks/test_notebooks.py -->
#
# ## The idea in five lines
#
# By default PyTorch makes floating-point tensors in fp32: a number takes 32 bits. Inside a
# `torch.autocast` block, ops that can do with less, such as matrix products, take numbers of 16
# bits instead.

# %%
x, weight = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)
full = x @ weight
with torch.autocast(device.type, dtype=torch.bfloat16):
    half = x @ weight
print(f"{full.dtype}: {full.nbytes} bytes;  under autocast {half.dtype}: {half.nbytes} bytes")
assert x.dtype is weight.dtype is torch.float32
assert half.dtype is torch.bfloat16
assert 2 * half.nbytes == full.nbytes

# %% [markdown]
# `x` and `weight` are still fp32, and the result has half the bytes. That is half the memory and, as a
# rule of thumb, half the time to move. Matrix products can also be [much
# faster](https://docs.pytorch.org/docs/stable/amp.html) in 16 bits. That is what AMP is about. The rest
# is care about what gets lost when a number has fewer bits.
#
# ## A network and some data
#
# We take the handwritten digits that come with scikit-learn, 8 by 8 pixels each, and a network of
# three linear layers. We make it wide, so that there is something to speed up.

# %%
digits = load_digits()
images = torch.tensor(digits.images[:1792] / 16, dtype=torch.float32)  # (N, 8, 8)
images = images.flatten(1).to(device)  # (N, 64)
labels = torch.tensor(digits.target[:1792]).to(device)  # (N,)
batches = list(zip(images.split(256), labels.split(256), strict=True))
print(f"{len(images)} images in {len(batches)} batches")
width = 512 if emulates_bf16(device) else 2048  # of a hidden layer


def new_network():
    """The same network, and its optimizer, each time."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4 * 2048 / width)


assert sum(p.numel() for p in new_network()[0].parameters()) > width**2

# %% [markdown]
# ## The plain loop
#
# You have written this one before: forward pass, loss, backward pass, step.


# %%
def train_fp32(model, optimizer, batches):
    """Train for one epoch in fp32; returns the loss of each step."""
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        outputs = model(images)
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


# %% [markdown]
# ## The same loop with AMP
#
# In the loop, the marked lines are new or changed. The model, the data and the optimizer stay as they
# were.


# %%
def train_amp(model, optimizer, batches, dtype, scaler):
    """Train for one epoch under autocast; returns the loss of each step."""
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):  # AMP: the forward pass and the loss
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
        scaler.scale(loss).backward()  # AMP: was loss.backward()
        scaler.step(optimizer)  # AMP: was optimizer.step()
        scaler.update()  # AMP
        losses.append(loss.detach())
    return losses


# %% [markdown]
# What are they for?
#
# - **`torch.autocast`** picks the precision of ops in its block: 16 bits for linear layers and
#   convolutions, fp32 for what needs it, such as most losses. The weights stay in fp32.
#   [Notebook 02](02_autocast_dtypes.ipynb) shows which op gets what.
# - **The scaler** is there for fp16 alone. In fp16 a gradient smaller than about 3e-8 [becomes
#   zero](01_number_formats.ipynb#Underflow).
#   So `scale` multiplies the loss, and with it all gradients, by a large number, and `step` divides
#   them again before the optimizer uses them. `update` adjusts that number for the next step. For
#   bf16 we make the scaler with `enabled=False`, and then it scales nothing. [Notebook
#   03](03_grad_scaler_step_by_step.ipynb) follows it step by step.
#
# There are [two 16-bit formats](01_number_formats.ipynb#Range) to choose from. **bf16** has about the
# range of fp32 and usually needs no scaler; **fp16** is more precise, but its largest number is 65504. As
# a rule of thumb, take bf16 wherever the hardware has it. `recommend_precision` times a matrix product
# in each and tells you which one pays on this device: <!-- tests/core/test_device.py -->

# %% tags=["nbval-ignore-output"]
recommended = recommend_precision(device)
precision = recommended if recommended in (Precision.BF16, Precision.FP16) else Precision.BF16
print(f"recommended here: {recommended}; AMP below runs in {precision}")
scaler = torch.amp.GradScaler(device.type, enabled=(precision is Precision.FP16))
assert scaler.is_enabled() == (precision is Precision.FP16)

# %% [markdown]
# If that line recommends fp32, either this device has no fast 16-bit products, or the machine was
# too busy to measure them. AMP runs in either case, but on a device without such products do not
# expect it to be faster. <!-- tests/core/test_device.py -->
#
# ## What does it buy?
#
# Before you run the next cells: the AMP run stores activations with [two to three decimal
# digits](01_number_formats.ipynb#Summary) (three in fp16), where fp32 has seven. How much worse do you
# think its loss will be after ten epochs?

# %% tags=["nbval-ignore-output"]
fp32_model, fp32_optimizer = new_network()
amp_model, amp_optimizer = new_network()
losses = {"fp32": [], str(precision): []}
for _ in range(10):
    losses["fp32"] += train_fp32(fp32_model, fp32_optimizer, batches)
    losses[str(precision)] += train_amp(amp_model, amp_optimizer, batches, precision.dtype, scaler)
curves = {name: torch.stack(found).tolist() for name, found in losses.items()}
first, last = curves["fp32"][0], {name: curve[-1] for name, curve in curves.items()}
print(f"loss {first:.3f} at the start, at the end", {n: round(x, 3) for n, x in last.items()})
assert all(loss < 0.2 * first for loss in last.values())  # both have learned
assert abs(last[str(precision)] - last["fp32"]) < 0.02 * first  # and the same
assert {p.dtype for p in amp_model.parameters()} == {torch.float32}

# %% [markdown]
# Both losses fell by nearly the same amount, as the assertion checks: what the format rounds away makes
# little difference here.
#
# Next we measure the time of a step. The two loops take turns, so that whatever else your machine
# does affects both alike. We also look at the memory that the forward pass keeps for the backward
# pass, which the package forecasts from the shapes.

# %% tags=["nbval-ignore-output"]
step_fp32 = partial(train_fp32, fp32_model, fp32_optimizer, batches[:1])
step_amp = partial(train_amp, amp_model, amp_optimizer, batches[:1], precision.dtype, scaler)
times = compare({"fp32": step_fp32, str(precision): step_amp}, device=device, budget_s=4)
speedup = times.ratio("fp32", str(precision))


def kept_mib(name):
    """MiB that the forward pass keeps for the backward pass, as forecast from the shapes."""
    model, _ = new_network()
    forecast = forecast_memory(model, images[:256], device_type=device.type, precision=name)
    return forecast.activations / 2**20


memory = {name: kept_mib(name) for name in curves}
_ = figures.time_and_memory(times, memory, "kept for backward", curves)
print(
    f"with AMP {speedup} as fast, with {memory[str(precision)] / memory['fp32']:.0%} of the memory"
)
assert memory[str(precision)] < memory["fp32"]

# %% [markdown]
# The picture has three parts. On the left is the time of one step, with a thin line for how sure
# the measurement is; in the middle the memory that the forward pass keeps for the backward pass; on
# the right the loss over the 70 steps, where the two curves lie on top of each other. Two or three
# digits were enough to learn from. The weights themselves are still fp32.
#
# On the machine that made the outputs you see here, two CPU cores with bf16 instructions, AMP made a
# step faster. Yours may differ in both directions. As a rule of thumb, GPUs with tensor cores (AMD:
# matrix cores) gain more, and a CPU without such instructions loses time.
#
# ## Where do you want to go?
#
# | what brought you here | where to look |
# |---|---|
# | *What are bf16 and fp16, and what do they lose?* | [01 Number formats](01_number_formats.ipynb) |
# | *Which op runs in which precision?* | [02 Autocast dtypes](02_autocast_dtypes.ipynb) |
# | *What does the scaler do, and why does it skip steps?* | [03 GradScaler](03_grad_scaler_step_by_step.ipynb) |
# | *How do I measure this properly, also the accuracy?* | [04 FP32 vs AMP](04_fp32_vs_amp.ipynb) |
# | *How does a real training script look?* | [05 CIFAR-10](05_cifar10_mobilenet.ipynb), [06 Caltech-256](06_caltech256_resnet50.ipynb) |
# | *I clip, accumulate, average, compile …* | [07 Training recipes](07_training_recipes.ipynb) |
# | ***It is NaN***, or there is an error message | [08 When AMP breaks](08_when_amp_breaks.ipynb) |
# | *Will my model fit, and which op of it runs in what?* | [09 X-ray your model](09_xray_your_model.ipynb) |
# | ***It is no faster.*** *What should I write for my model?* | [10 Speed ladder](10_speed_ladder.ipynb); `pdm run amp-lab advise` |
# | *I have several GPUs* | [11 Scale out](11_scale_out.ipynb) |
# | *I use Keras* | [12 Keras](12_keras.ipynb) |
# | *I have old code: Apex, or `torch.cuda.amp`* | [13 From Apex](13_from_apex.ipynb); `pdm run amp-lab migrate` |
# | *Is it true that one should …?* | [14 Ten practices](14_ten_practices.ipynb) |
# | *What about FP8, MXFP8 and NVFP4?* | [15 Below 16 bits](15_below_16_bits.ipynb); `pdm run amp-lab rehearse` |
# | *Can weights and Adam's state be smaller?* | [16 Low-precision state](16_low_precision_state.ipynb) |
# | *I train or fine-tune a language model* | [17 A language model](17_language_model.ipynb) |
# | *I want to use the model: cast, compile, export* | [18 Inference and export](18_inference_and_export.ipynb) |
# | ***Which precision on which card, in which framework?*** | [19 Choose your precision](19_choose_your_precision.ipynb) |
# | *What can my machine do?* | `pdm run amp-lab doctor` |
#
# ## Summary
#
# Four lines of the loop changed: an autocast block around the forward pass and the loss, and three
# calls of a scaler. Unless we train in fp16 it is disabled, and its `step` [is
# plain](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler) `optimizer.step()`. These
# changes about halved the memory that the forward pass keeps, left the loss about where it was, and
# changed the time by the factor that you measured above.
#
# Next, if you want to go through it all in order: [what the formats can and cannot
# hold](01_number_formats.ipynb).
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("00_start_here")

# %% [markdown]
# ### 1. Who needs a scaler?
#
# Write a function that says whether training under autocast in a dtype needs a `GradScaler`.


# %%
def needs_scaler(dtype):
    return ...


exercises.check_needs_scaler(needs_scaler)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The scaler saves gradients that are too small for the format. Compare
# `torch.finfo(dtype).smallest_normal` of the three dtypes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def needs_scaler(dtype):
#     return dtype is torch.float16
# ```
#
# bf16 has the exponent of fp32, so its smallest normal number is the same, and a gradient that
# vanishes in bf16 lies at the very end of fp32's range too.
#
# </details>
#
# ### 2. Turn a loop into an AMP loop
#
# Somebody put the whole step into the autocast block:
#
# ```python
# def amp_step(model, optimizer, scaler, images, labels):
#     with torch.autocast(device.type, dtype=torch.bfloat16):
#         optimizer.zero_grad()
#         loss = nn.functional.cross_entropy(model(images), labels)
#         loss.backward()
#         optimizer.step()
#     return loss.detach()
# ```
#
# Write it as it should be, and use the scaler, so that the same step would also work in fp16.


# %%
def amp_step(model, optimizer, scaler, images, labels):
    return ...  # one training step under autocast in bf16; return the loss


exercises.check_marked_lines(amp_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Autocast belongs around the forward pass and the loss. The backward pass follows the dtypes of the
# forward pass, without any block.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def amp_step(model, optimizer, scaler, images, labels):
#     optimizer.zero_grad()
#     with torch.autocast(device.type, dtype=torch.bfloat16):
#         loss = nn.functional.cross_entropy(model(images), labels)
#     scaler.scale(loss).backward()
#     scaler.step(optimizer)
#     scaler.update()
#     return loss.detach()
# ```
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic mixed precision
#   recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html): the same loop, on an
#   NVIDIA GPU.
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018:
#   where the idea of fp32 weights with fp16 arithmetic comes from.
