# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Keep weights and optimizer state below 32 bits
#
# **What you'll do.** Count the bytes of a parameter. Train with weights in bf16 and see that small updates are lost.
# Try three ways to keep these updates. Round Adam's second moment to eight and four bits.
#
# **What you'll learn.**
# - how many bytes a parameter takes in each setup;
# - why small updates of a bf16 weight are lost, and how to keep them;
# - why it is dangerous to round Adam's second moment to zero.
#
# **What you need.** [Notebook 01](01_number_formats.ipynb) for bf16, and [notebook
# 15](15_below_16_bits.ipynb) for blocks of values that share a scale. You need no GPU.

# %% tags=["nbval-ignore-output"]
import functools
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from course import figures, start

from amp_lab import forecast_memory

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We add 0.001 to a weight of 1, a thousand times. The weight should become 2. Before you run this: what
# is the result in bf16?

# %%
weight = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    weight += 0.001
print(f"after a thousand updates: {weight.item()}; above 1, bf16's numbers are {2**-7:.4f} apart")
assert weight == 1

# %% [markdown]
# The weight has not changed at all. Each update is less than half of the distance to the next bf16 number, so each sum
# is rounded back to 1.
#
# To avoid losing such updates, AMP leaves fp32 weights in fp32 and [casts copies of them to 16
# bits](02_autocast_dtypes.ipynb).
#
# ## Bytes per parameter
#
# `forecast_memory` counts the bytes of weights, gradients and optimizer state:
# <!-- tests/tracing/test_training_step.py --> <!-- tests/tracing/test_memory.py -->

# %%
SETUPS = {
    "fp32, or AMP": (torch.float32, "adamw"),
    "fp32, 8-bit AdamW": (torch.float32, "adamw-8bit"),
    "bf16": (torch.bfloat16, "adamw"),
    "bf16, 8-bit AdamW": (torch.bfloat16, "adamw-8bit"),
    "bf16, 4-bit AdamW": (torch.bfloat16, "adamw-4bit"),
}


def bytes_held(dtype, optimizer):
    """The bytes of a parameter, for its weight, gradient and optimizer state."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)).to(dtype)
    x = torch.empty(8, 1024, dtype=dtype)
    # precision="fp32": no autocast, so the model runs in its own dtype.
    found = forecast_memory(model, x, precision="fp32", optimizer=optimizer)
    parameters = sum(p.numel() for p in model.parameters())
    parts = {"weight": found.weights, "gradient": found.gradients, "state": found.optimizer}
    return {part: count / parameters for part, count in parts.items()}


# %% [markdown]
# We print the bytes per parameter, and the memory for 7 billion parameters, without activations:

# %%
held = {name: bytes_held(*setup) for name, setup in SETUPS.items()}
for name, parts in held.items():
    total = sum(parts.values())
    print(f"{name:<18} {total:5.2f} bytes for each parameter; {7 * total:3.0f} GB for 7 billion")
_ = figures.bytes_per_parameter(held)
assert sum(held["fp32, or AMP"].values()) == 16
assert sum(held["bf16"].values()) == 8
assert 6 < sum(held["bf16, 8-bit AdamW"].values()) < 6.1

# %% [markdown]
# Does a model learn as well with fewer bytes?
#
# ## Weights in bf16
#
# Adam stores two moments for each weight: the *mean* (a moving average of the gradients) and the *second moment* (a
# moving average of their squares). We write our own Adam, so that we can change two things: how an update is added to
# a weight, and how the second moment is stored. In this section, the second moment stays in fp32.


# %%
def as_it_is(values):
    return values


class Adam:
    """Adam that calls `add(weight, update)`, and stores its second moment with `store`."""

    def __init__(self, weights, lr, add, store=as_it_is):
        self.weights, self.lr, self.add, self.store = list(weights), lr, add, store
        self.steps = 0
        self.means = [torch.zeros_like(w, dtype=torch.float32) for w in self.weights]
        self.squares = [torch.zeros_like(m) for m in self.means]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for i, weight in enumerate(self.weights):
            grad = weight.grad.float()
            mean, square = self.means[i].lerp(grad, 0.1), self.squares[i].lerp(grad**2, 0.001)
            self.means[i], self.squares[i] = mean, self.store(square)
            mean, square = mean / (1 - 0.9**self.steps), square / (1 - 0.999**self.steps)
            self.add(weight, -self.lr * mean / (square.sqrt() + 1e-8))


# %% [markdown]
# `weight += update` rounds the sum to the nearest number of the weight's dtype. We compare rounding to nearest with
# three other ways to add an update:
# <!-- code -->
#
# - [**Stochastic rounding**](https://arxiv.org/abs/2010.06192) rounds up or down at random. A sum that lies three
#   tenths of the way to the next number is rounded up in three of ten cases. So on average, no update is lost.
# - **Kahan summation** stores the rounding error of each update in a second bf16 number for each weight, and adds
#   this error to the next update.
# - **fp32 masters** are a copy of the weights in fp32. The optimizer updates this copy, then casts it to bf16.
#
# A bf16 number is the upper 16 bits of an fp32 number. `stochastic` adds a random number to the lower 16 bits, and
# then cuts them off. The larger the lower bits are, the more often the addition carries into the upper bits, so that
# the number is rounded away from 0.
# <!-- code -->


# %%
def nearest(weight, update):
    weight.copy_(weight.float() + update)


def stochastic(weight, update):
    bits = (weight.float() + update).view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    weight.copy_(((bits + noise) & -(1 << 16)).view(torch.float32))  # the lower 16 bits are 0


class Masters:
    """Adds updates to fp32 copies of the weights."""

    def __init__(self):
        self.masters = {}  # the copy of each weight: tensors hash by identity

    def __call__(self, weight, update):
        master = self.masters.setdefault(weight, weight.float())
        master += update
        weight.copy_(master)


# %%
class Kahan:
    """Adds the update and the error of the last rounding."""

    def __init__(self):
        self.lost = {}

    def __call__(self, weight, update):
        wanted = update + self.lost.get(weight, 0)
        new = (weight.float() + wanted).bfloat16()
        self.lost[weight] = (wanted - (new.float() - weight.float())).bfloat16()
        weight.copy_(new)


# %% [markdown]
# We will train this network on scikit-learn's handwritten digits:


# %%
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)  # (1797, 64)
labels = torch.tensor(digits.target, device=device)
steps = {"quick": 300, "full": 3000}[scale]
SEEDS = range(3)


def network():
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    )


# %% [markdown]
# The training loop takes the dtype of the model as an argument:


# %%
def train(seed, make_optimizer, steps, dtype=torch.float32):
    """Train, and return the losses and the network."""
    torch.manual_seed(seed)
    model = network().to(device, dtype)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for _ in range(steps):
        of_batch = torch.randint(0, len(images), (128,)).to(device)
        model.zero_grad()
        loss = F.cross_entropy(model(images[of_batch].to(dtype)).float(), labels[of_batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def at_the_end(runs):
    """The mean of the last 20 losses of each seed."""
    return [sum(losses[-20:]) / 20 for losses in runs]


# %%
bf16 = torch.bfloat16
WAYS = {
    "fp32": (lambda: nearest, torch.float32),
    "bf16, nearest": (lambda: nearest, bf16),
    "bf16, stochastic": (lambda: stochastic, bf16),
    "bf16, Kahan": (Kahan, bf16),
    "bf16, masters": (Masters, bf16),
}


# %% [markdown]
# We train in each way with three seeds and a small learning rate. Before you run this: in which ways will the network
# learn as fast as in fp32?

# %% tags=["nbval-ignore-output"]
losses = {}
for name, (make_add, dtype) in WAYS.items():
    adams = [functools.partial(Adam, lr=1e-4, add=make_add()) for _ in SEEDS]
    losses[name] = [train(seed, adams[seed], steps, dtype)[0] for seed in SEEDS]
    ends = at_the_end(losses[name])
    print(f"{name:<17} loss {sum(ends) / 3:.3f}   by seed", *(f"{end:.3f}" for end in ends))
_ = figures.loss_from_fp32(losses)
of_fp32 = max(at_the_end(losses["fp32"]))
assert min(at_the_end(losses["bf16, nearest"])) > 1.2 * of_fp32
for cured in ("bf16, stochastic", "bf16, Kahan", "bf16, masters"):
    lag = max(at_the_end(losses[cured])) - of_fp32
    assert lag < 0.1 * (min(at_the_end(losses["bf16, nearest"])) - of_fp32)

# %% [markdown]
# The figure shows the loss in bf16 minus the fp32 loss with the same seed. Each line is the mean over three seeds, and
# the bars show the range. The grey band shows how far the seeds differ in fp32.
#
# Here, with rounding to nearest, the network with bf16 weights learns far more slowly than in fp32. With the
# three other ways it learns about as fast as in fp32.
#
# PyTorch's AdamW rounds to nearest, so it can lose the updates of a model that you converted with `.bfloat16()`:

# %%
weight = torch.ones(8, dtype=bf16, device=device, requires_grad=True)
weight.grad = torch.ones_like(weight)
torch.optim.AdamW([weight], lr=1e-3, weight_decay=0).step()
assert (weight == 1).all()  # below 1 the spacing of bf16 is 2^-8; 0.001 is less than half of it

# %% [markdown]
# ## State in fewer bits
#
# A bf16 second moment loses small changes, as a bf16 weight does. With Adam's usual beta2 of 0.999, a step with
# a gradient of 0 should shrink the second moment by 0.1 %:

# %%
square = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    square = (0.999 * square.float()).bfloat16()
print(f"after a thousand steps without a gradient: {square.item()}; in fp32 {0.999**1000:.2f}")
assert square == 1

# %% [markdown]
# The second moment does not shrink. Adam divides by the root of the second moment, so the next updates are too small.
#
# Now we round the second moment to eight or four bits. The mean stays in fp32. As in
# [torchao](https://github.com/pytorch/ao/blob/main/torchao/optim/adam.py), each block of values has its own scale. Our
# code rounds each value to a whole number times this scale. It only rounds, so it saves no memory.


# %%
def in_blocks(smallest, largest):
    """A function that rounds each square to a whole number times the scale of its block."""

    def store(squares):
        if squares.numel() < 4096:  # small tensors stay as they are, as in torchao
            return squares
        blocks = squares.view(-1, 256)
        scale = (blocks.amax(1, keepdim=True) / largest).clamp(min=1e-30)  # for a block of zeros
        return ((blocks / scale).round().clamp(min=smallest) * scale).view_as(squares)

    return store


# %% [markdown]
# We compare fp32 with three formats. In the first, the whole numbers begin at 0. In the other two, they begin at 1, so
# no value becomes 0:
# <!-- code -->

# %%
FORMATS = {
    "fp32": as_it_is,
    "8 bits, with 0": in_blocks(0, 127),  # as in INT8
    "8 bits, no 0": in_blocks(1, 256),
    "4 bits, no 0": in_blocks(1, 16),
}

# %% [markdown]
# We train with each format. Before you run this: which format fails, and how?

# %% tags=["nbval-ignore-output"]
learned = {}
for name, store in FORMATS.items():
    adam = functools.partial(Adam, lr=1e-3, add=nearest, store=store)
    learned[name] = [train(seed, adam, steps)[0] for seed in SEEDS]
    finite = sum(math.isfinite(run[-1]) for run in learned[name])
    ends = at_the_end(learned[name])
    print(f"{name:<14} finite loss for {finite} of 3 seeds: {sum(ends) / 3:.4f} at the end")
assert not any(end < 1 for end in at_the_end(learned["8 bits, with 0"]))
for name in ("8 bits, no 0", "4 bits, no 0"):
    assert max(at_the_end(learned[name])) < max(at_the_end(learned["fp32"])) + 0.05

# %% [markdown]
# Here, the loss becomes NaN in the format with 0. In the formats without 0, the final loss is near the fp32 loss. Why?
# We square the gradient of one layer. Then we count how many squares become 0 in the format with 0:

# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
model = network().to(device)
loss = F.cross_entropy(model(images[:128]), labels[:128])
(grad,) = torch.autograd.grad(loss, [model[2].weight])
square = grad**2
stored = FORMATS["8 bits, with 0"](square)
zeros = ((stored == 0) & (square > 0)).float().mean().item()
print(f"{zeros:.1%} of the squares become 0")
assert zeros > 0.1

# %% [markdown]
# Adam divides the mean by the root of the second moment. A stored 0 makes this root too small, so the update can
# become so large that the loss becomes NaN.
#
# [torchao's low-bit optimizers](https://github.com/pytorch/ao/tree/main/torchao/optim) store the state in eight or
# four bits. If your weights are in bf16, turn on stochastic rounding:
#
# ```python
# from torchao.optim import AdamW8bit
#
# optimizer = AdamW8bit(model.parameters(), lr=1e-4, bf16_stochastic_round=True)
# ```
#
# ## Summary
#
# - With AdamW, a parameter with its gradient and state takes 16 bytes in fp32. It takes 8 bytes in bf16, and about 6
#   in bf16 with 8-bit state.
# - With rounding to nearest, a bf16 weight does not change if the update is less than half of the
#   distance to the next bf16 number.
# - Stochastic rounding, Kahan summation and fp32 masters each fixed this problem here.
# - For Adam's second moment, eight or even four bits were enough here if the format stored no square as zero.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("16_low_precision_state")

# %% [markdown]
# ### 1. Move a weight
#
# We add an update to a bf16 weight of 0.75, and round the sum to nearest. Above which size does the update change the
# weight?

# %%
bound = ...
exercises.check_smallest_update(bound)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How far apart are bf16's numbers between 0.5 and 1? The mantissa has 7 bits.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# bound = 0.5 * 2**-7 / 2
# ```
#
# </details>
#
# ### 2. Round stochastically
#
# Complete the function. It rounds each value at random to one of the two whole numbers next to it. The probability of
# rounding up is the distance from the lower number: 2.3 becomes 3 in three of ten cases.


# %%
def round_stochastically(values):
    return ...


exercises.check_round_stochastically(round_stochastically)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Add a random number between 0 and 1 (`torch.rand_like`) to the value, and use `floor`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def round_stochastically(values):
#     return (values + torch.rand_like(values)).floor()
# ```
#
# </details>
#
# ### 3. Count the bytes
#
# Weights and gradients are in bf16, and Kahan summation keeps one more bf16 number for each weight. Each of Adam's two
# moments has eight bits, with an fp32 scale for every 256 values. How many bytes does a parameter take?

# %%
bytes_each = ...
exercises.check_bytes(bytes_each)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A moment takes one byte, plus a 256th of a four-byte scale.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# bytes_each = 2 + 2 + 2 + 2 * (1 + 4 / 256)
# ```
#
# </details>
#
# ### 4. Store squares without a zero
#
# Complete the function. The *step* of a row is a 256th of the largest value in the row. The function rounds each
# positive square to the nearest multiple of this step. If the result is zero, use one step.


# %%
def store_squares(rows):
    return ...


exercises.check_store_squares(store_squares)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Divide by the step and round. Then `clamp` from below, and multiply by the step again.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def store_squares(rows):
#     step = rows.amax(1, keepdim=True) / 256
#     return (rows / step).round().clamp(min=1) * step
# ```
#
# </details>
#
# ## Further reading
#
# - P. Zamirai et al., [Revisiting BFloat16 Training](https://arxiv.org/abs/2010.06192), 2020:
#   stochastic rounding and Kahan summation.
# - T. Dettmers et al., [8-bit Optimizers via Block-wise
#   Quantization](https://arxiv.org/abs/2110.02861), 2021.
# - B. Li et al., [Memory Efficient Optimizers with 4-bit
#   States](https://arxiv.org/abs/2309.01507), 2023: why zero is a problem.
