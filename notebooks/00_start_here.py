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
# **What you'll do.** Train a small network twice on your machine: once in fp32 (32-bit numbers) and once with
# automatic mixed precision (AMP). One figure compares time, memory and loss.
#
# **What you'll learn.**
# - the few lines that turn a training loop into an AMP loop;
# - how much time and activation memory AMP saves on *this* machine;
# - which notebook answers your question.
#
# **What you need.** Basic PyTorch: a model, a loss, an optimizer. You need no GPU. Run the cells from top to bottom
# with Shift+Enter.

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
# In the printed line, *quick scale* means that the notebooks use examples that are small enough for a CPU.
# <!-- tests/core/test_device.py --> <!-- tests/notebooks/test_notebooks.py -->
#
# ## The idea in five lines
#
# By default, `torch.ones` creates a tensor in fp32. Inside a `torch.autocast` block, ops such as matrix multiplications
# use 16 bits instead. We multiply two matrices outside and inside such a block.

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
# `x` and `weight` are still fp32, but the result under autocast has half as many bytes. Matrix
# multiplications can also be [much faster](https://docs.pytorch.org/docs/stable/amp.html) in 16 bits.
#
# ## A network and some data
#
# We train a network with three linear layers on the handwritten digits of scikit-learn.

# %%
digits = load_digits()
images = torch.tensor(digits.images[:1792] / 16, dtype=torch.float32)  # (N, 8, 8)
images = images.flatten(1).to(device)  # (N, 64)
labels = torch.tensor(digits.target[:1792]).to(device)  # (N,)
batches = list(zip(images.split(256), labels.split(256), strict=True))
print(f"{len(images)} images in {len(batches)} batches")
width = 512 if emulates_bf16(device) else 2048  # features of a hidden layer


def new_network():
    """Return the same initial network each time, with an optimizer."""
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
# This is an ordinary loop: forward pass, loss, backward pass, optimizer step.


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
# The lines marked `AMP` are new or changed.


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
# The marked lines use two tools:
#
# - **`torch.autocast`** runs linear layers and convolutions in 16 bits, on 16-bit copies of their inputs and
#   weights. The weights themselves stay in fp32. [Some other ops](02_autocast_dtypes.ipynb) run in fp32.
# - **[The scaler](03_grad_scaler_step_by_step.ipynb)** is for fp16, where a gradient smaller than about 3e-8 [becomes
#   zero](01_number_formats.ipynb#Underflow). `scale` multiplies the loss by a large number, the *loss scale*. All
#   gradients grow by the same factor. `step` divides the gradients by the loss scale before the optimizer uses them.
#   `update` adjusts the loss scale for the next step.
#
# Autocast uses [two 16-bit formats](01_number_formats.ipynb#Range). **bf16** has about the range of fp32 and
# usually needs no scaler. **fp16** is more precise, but its largest number is 65504. Use bf16 where it is fast. On [a
# T4, V100 or RTX 20](../docs/hardware.md#t4-v100-and-rtx-20), use fp16. `recommend_precision` times a matrix
# multiplication and recommends a precision for this device. We enable the scaler only for fp16:
# <!-- tests/core/test_device.py -->

# %% tags=["nbval-ignore-output"]
recommended = recommend_precision(device)
precision = recommended if recommended in (Precision.BF16, Precision.FP16) else Precision.BF16
print(f"recommended here: {recommended}; AMP below runs in {precision}")
scaler = torch.amp.GradScaler(device.type, enabled=(precision is Precision.FP16))
assert scaler.is_enabled() == (precision is Precision.FP16)

# %% [markdown]
# If `recommend_precision` measures no clear speed-up in 16 bits, it returns fp32 or tf32. In this case, AMP below runs
# in bf16. <!-- tests/core/test_device.py -->
#
# ## Compare loss, time and memory
#
# We train both networks for ten epochs and compare their losses. A bf16 number has [two to three decimal
# digits](01_number_formats.ipynb#Summary), but an fp32 number has about seven. Before you run this: how much worse
# will the loss of the AMP run be?

# %% tags=["nbval-ignore-output"]
fp32_model, fp32_optimizer = new_network()
amp_model, amp_optimizer = new_network()
losses = {"fp32": [], str(precision): []}
for _ in range(10):
    losses["fp32"] += train_fp32(fp32_model, fp32_optimizer, batches)
    losses[str(precision)] += train_amp(amp_model, amp_optimizer, batches, precision.dtype, scaler)
curves = {name: torch.stack(found).tolist() for name, found in losses.items()}
first, last = curves["fp32"][0], {name: curve[-1] for name, curve in curves.items()}
at_the_end = ", ".join(f"{loss:.3f} in {name}" for name, loss in last.items())
print(f"loss at the start: {first:.3f}; at the end: {at_the_end}")
assert all(loss < 0.2 * first for loss in last.values())  # both networks have learned
assert abs(last[str(precision)] - last["fp32"]) < 0.02 * first  # equally well
assert {p.dtype for p in amp_model.parameters()} == {torch.float32}

# %% [markdown]
# Both runs end at nearly the same loss. After training with AMP, the weights are still in fp32.
#
# Next we measure the time of a step. We also forecast the memory of the *saved activations*: the tensors, such as the
# inputs of layers, that the forward pass saves for the backward pass.
# <!-- tests/core/test_timing.py -->
# <!-- tests/tracing/test_memory.py -->

# %% tags=["nbval-ignore-output"]
step_fp32 = partial(train_fp32, fp32_model, fp32_optimizer, batches[:1])
step_amp = partial(train_amp, amp_model, amp_optimizer, batches[:1], precision.dtype, scaler)
times = compare({"fp32": step_fp32, str(precision): step_amp}, device=device, budget_s=4)
speedup = times.ratio("fp32", str(precision))


def kept_mib(name):
    """MiB of saved activations, forecast from the shapes."""
    model, _ = new_network()
    batch = images[:256].clone()  # without its own memory, all images would count
    forecast = forecast_memory(model, batch, device_type=device.type, precision=name)
    return forecast.activations / 2**20


memory = {name: kept_mib(name) for name in curves}
_ = figures.time_and_memory(times, memory, "saved activations", curves)
share = memory[str(precision)] / memory["fp32"]
print(f"AMP is {speedup} as fast as fp32, with {share:.0%} of its saved activations")
assert memory[str(precision)] < memory["fp32"]

# %% [markdown]
# In the left panel, the thin line on each bar shows the uncertainty of the measurement.
# <!-- tests/plots/test_plots.py --> On our two CPU cores with bf16 instructions, AMP made a step faster. Your machine
# may differ.
#
# ## Where do you want to go?
#
# | your question | where to look |
# |---|---|
# | *What are bf16 and fp16, and what do they lose?* | [01 Number formats](01_number_formats.ipynb) |
# | *Which op runs in which precision?* | [02 Autocast dtypes](02_autocast_dtypes.ipynb) |
# | *What does the scaler do, and why does it skip steps?* | [03 GradScaler](03_grad_scaler_step_by_step.ipynb) |
# | *How do I measure speed, memory and accuracy?* | [04 FP32 vs AMP](04_fp32_vs_amp.ipynb) |
# | *How does a real training script look?* | [05 CIFAR-10](05_cifar10_mobilenet.ipynb), [06 Caltech-256](06_caltech256_resnet50.ipynb) |
# | *How do I clip, accumulate, average, compile …?* | [07 Training recipes](07_training_recipes.ipynb) |
# | ***Why is my loss NaN?*** *What does this error message mean?* | [08 When AMP breaks](08_when_amp_breaks.ipynb) |
# | *Will my model fit, and in which precision do its ops run?* | [09 X-ray your model](09_xray_your_model.ipynb) |
# | ***Why is AMP no faster?*** *Which settings suit my model?* | [10 Speed ladder](10_speed_ladder.ipynb); `pdm run amp-lab advise` |
# | *I have several GPUs* | [11 Scale out](11_scale_out.ipynb) |
# | *I use Keras* | [12 Keras](12_keras.ipynb) |
# | *I have old Apex or `torch.cuda.amp` code* | [13 From Apex](13_from_apex.ipynb); `pdm run amp-lab migrate` |
# | *Is it true that one should …?* | [14 Ten practices](14_ten_practices.ipynb) |
# | *What about FP8, MXFP8 and NVFP4?* | [15 Below 16 bits](15_below_16_bits.ipynb); `pdm run amp-lab rehearse` |
# | *Can weights and Adam's state be smaller?* | [16 Low-precision state](16_low_precision_state.ipynb) |
# | *I train or fine-tune a language model* | [17 A language model](17_language_model.ipynb) |
# | *I want to cast, compile or export a model* | [18 Inference and export](18_inference_and_export.ipynb) |
# | ***Which precision on which GPU, in which framework?*** | [19 Choose your precision](19_choose_your_precision.ipynb) |
# | *What can my machine do?* | `pdm run amp-lab doctor` |
#
# ## Summary
#
# Four lines of the AMP loop are marked: an autocast block around the forward pass and the loss, and three calls of
# a scaler. The scaler is enabled only for fp16. Here AMP roughly halved the saved activations, and both runs ended at
# about the same loss.
#
# Next: [what the formats can and cannot represent](01_number_formats.ipynb).
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("00_start_here")

# %% [markdown]
# ### 1. Who needs a scaler?
#
# Write a function that returns whether training under autocast in a dtype needs a `GradScaler`.


# %%
def needs_scaler(dtype):
    return ...


exercises.check_needs_scaler(needs_scaler)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The scaler saves gradients that are too small for the format. Compare
# `torch.finfo(dtype).smallest_normal` of fp32, bf16 and fp16.
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
# </details>
#
# ### 2. Turn a loop into an AMP loop
#
# In this code, the whole step is in the autocast block:
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
# Correct the step, and use the scaler.


# %%
def amp_step(model, optimizer, scaler, images, labels):
    return ...  # one training step under autocast in bf16; return the loss


exercises.check_marked_lines(amp_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Autocast belongs around the forward pass and the loss. The backward pass [needs no
# block](02_autocast_dtypes.ipynb#Backward:-no-autocast-there).
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
#   recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html).
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018: fp32
#   weights with fp16 arithmetic.
