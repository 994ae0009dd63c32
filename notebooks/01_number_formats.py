# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Read number formats as range and spacing
#
# **What you'll do.** Compare six number formats, from fp32 to fp8. Make fp16 and bf16 fail on purpose, and
# try three techniques that make training in 16 bits work.
#
# **What you'll learn.**
# - to describe a format by its *range* (how small and how large its numbers can be) and its *spacing* (how
#   close together they lie);
# - to recognise overflow, underflow and *swamping*;
# - why mixed precision uses fp32 weights, loss scaling and fp32 sums.
#
# **What you need.** PyTorch, and some experience with training a network. You need no GPU.

# %% tags=["nbval-ignore-output"]
import math

import torch
from torch import nn

from course import figures, start
from course.digits import activation_gradients, load_images, new_network, train
from course.number_formats import FORMATS, LIMITS, fields, spacing_by_magnitude

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We store 1e-8 and 70000 in fp16, which has half the bits of fp32. In fp16, we also add 1 to 2048. Before
# you run this: which of the three results will be right?

# %%
small = torch.tensor(1e-8).half()
large = torch.tensor(70000.0).half()
total = torch.tensor(2048.0).half() + 1
print(f"1e-8 is {small:g}, 70000 is {large:g}, 2048 + 1 is {total:g}")
assert (small, large, total) == (0, math.inf, 2048)
assert 2048 * torch.finfo(torch.float16).eps == 2  # the spacing at 2048

# %% [markdown]
# None of the three results is right:
#
# - **Underflow:** 1e-8 is too small for fp16 and becomes zero.
# - **Overflow:** 70000 is too large for fp16 and becomes infinity.
# - **Swamping:** there is no fp16 number between 2048 and 2050. The sum is rounded to 2048, so adding 1
#   changes nothing.
#
# ## What the bits mean
#
# A floating-point number consists of a sign, an exponent and a mantissa. It usually stands for
# $(-1)^\text{sign} \times 2^{\text{exponent} - \text{bias}} \times 1.\text{mantissa}$. The bias is a
# constant of the format. The exponent determines between which two powers of two the number lies. The mantissa
# determines the position between them.
#
# We write 0.1 in five formats. Each line shows the sign, the exponent, the mantissa, and the value that the
# formula gives.

# %%
for name, dtype in FORMATS.items():
    number = torch.tensor(0.1).to(dtype)
    sign, exponent, mantissa = fields(number)
    bias = 2 ** (len(exponent) - 1) - 1
    value = 2.0 ** (int(exponent, 2) - bias) * (1 + int(mantissa, 2) / 2 ** len(mantissa))
    print(f"{name:<9} {sign} {exponent:<8} {mantissa:<23}  {value:.8f}")
    assert value == number.item()

# %% [markdown]
# Compare the columns:
#
# - **fp32 and bf16** both have 8 exponent bits. bf16 has 16 mantissa bits fewer than fp32.
# - **fp16** has as many bits as bf16, but three more for the mantissa and three fewer for the exponent.
# - **fp8 E5M2** has 5 exponent bits and 2 mantissa bits.
#
# The sixth format, **TF32**, has no dtype. [NVIDIA's GPUs since
# Ampere](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)
# can read each fp32 input of a matmul as if its mantissa had only 10 bits.
#
# ## Range
#
# We describe a format by four numbers:
#
# - the smallest positive number;
# - the smallest *normal* number, which is the smallest positive number with a 1 before the mantissa;
# - the largest number;
# - *eps*, the distance from 1 to the next larger number.
#
# Positive numbers below the smallest normal number are called *subnormal*. Subnormal numbers have a 0 before the
# mantissa. Each leading zero costs a significant bit.
#
# The last column of the table gives the precision in decimal digits.

# %%
print(f"{'format':<10}{'smallest':<10}{'normal range':<24}{'eps':<7}digits")
for name, it in LIMITS.items():
    reach = f"{it.normal:.1e} … {it.largest:.5g}"
    print(f"{name:<10}{it.subnormal:<10.1e}{reach:<24}2^{math.log2(it.eps):<5.0f}{it.digits:.1f}")
fp32, bf16, fp16 = (LIMITS[name] for name in ("fp32", "bf16", "fp16"))
assert fp16.largest == 65504
assert (fp16.subnormal, fp16.normal, fp16.eps, bf16.eps) == (2**-24, 2**-14, 2**-10, 2**-7)
assert bf16.normal == fp32.normal

# %% [markdown]
# bf16 has about the range of fp32, but its eps is 2^-7. fp16 ends at 65504, but its eps of 2^-10 is eight
# times as fine.
#
# ## Spacing
#
# The *relative spacing* is the distance from a number to the next one, divided by the number. We draw the
# range and the relative spacing of each format. Before you look: can a 16-bit format be both as wide as
# bf16 and as fine as fp16?

# %%
pictured = {name: spacing_by_magnitude(name) for name in LIMITS}
_ = figures.range_and_spacing(pictured)

# %% [markdown]
# In the upper half, each bar shows the range of a format. The hatched part is subnormal.
#
# The lower half shows the relative spacing at each power of two. For normal numbers, each line is flat at
# eps, because **the spacing doubles with each power of two**. For subnormal numbers, the relative spacing
# grows as the numbers become smaller. <!-- tests/notebooks/test_01_number_formats.py -->
#
# With 16 bits you have to choose: fp16 is finer, but bf16 is wider. A format with both properties needs 19 bits: 8 for
# the exponent, 10 for the mantissa and 1 for the sign.
#
# ## Rounding
#
# The exact result of a cast or an addition often lies between two numbers of the format. The result is then
# rounded to the nearer number. A *tie*, a result exactly in the middle, is rounded to the number whose last bit is 0
# (*ties to even*). From 2048 to 4096, fp16 has only the even numbers, so every odd number is a tie. We round the
# integers from 2048 to 2056 to fp16.

# %%
numbers = torch.arange(2048.0, 2057)
print("fp32:", *(f"{n:.0f}" for n in numbers))
print("fp16:", *(f"{n:.0f}" for n in numbers.half()))
assert numbers.half().tolist() == [2048, 2048, 2050, 2052, 2052, 2052, 2054, 2056, 2056]

# %% [markdown]
# Within the range of a format, the error of one rounding is at most half the spacing. For normal numbers, this is at
# most eps/2 times the number: about 0.4 % in bf16 and 0.05 % in fp16.
# <!-- tests/notebooks/test_01_number_formats.py -->
#
# ## Overflow
#
# In fp16 and bf16, a number that is too large becomes infinity. Before you run this: which is the smallest whole
# number that becomes infinity in fp16, 65505 or a larger one?

# %%
numbers = torch.tensor([65504.0, 65519.0, 65520.0, 70000.0])
print("fp16:", *(f"{n:g}" for n in numbers.half()))
print("bf16:", *(f"{n:g}" for n in numbers.bfloat16()))
assert numbers.half().tolist() == [65504, 65504, math.inf, math.inf]
assert numbers.bfloat16()[:3].tolist() == [65536] * 3

inf = torch.tensor(70000.0).half()
print(f"inf - inf = {inf - inf:g}, inf * 0 = {inf * 0:g}, 1 / inf = {1 / inf:g}")
assert (inf - inf).isnan()
assert ((inf * 0) + 1).isnan()

# %% [markdown]
# In fp16, numbers from 65520 on become infinity. Numbers between 65504 and 65520 are rounded down to 65504. In bf16,
# none of the four overflows, but the first three are rounded to 65536.
#
# Infinity often becomes NaN (*not a number*) in later ops, such as infinity minus infinity.
#
# The fp8 format E4M3 [has no infinity](https://arxiv.org/abs/2209.05433). In PyTorch, a number that is too large for
# E4M3 becomes 448 or NaN. <!-- tests/notebooks/test_01_number_formats.py -->
#
# ## Underflow
#
# We round 1.7 times some powers of two to fp16, and print the relative error.

# %%
for exponent in (-10, -14, -18, -22, -24, -26):
    number = torch.tensor(1.7 * 2.0**exponent)
    rounded = number.half().float()
    error = ((rounded - number) / number).abs().item()
    print(f"1.7 x 2^{exponent}: {number:.2e} -> {rounded:.2e}   error {100 * error:.3g} %")
assert rounded == 0
assert torch.tensor(2.0**-24).half() > 0
assert torch.tensor(2.0**-25).half() == 0  # a tie between 0 and 2^-24, and zero is the even side

# %% [markdown]
# Below 2^-14 the number is subnormal and loses a bit with each power of two. A number of 2^-25 or less becomes zero.
#
# ## Swamping
#
# Training adds many small updates to much larger weights. We add 0.0001 to a weight of 1 a thousand times.
# The exact result is 1.1. Before you run this: what will the final weight be in bf16 and in fp16?


# %%
def add_many(dtype, updates=1000, update=1e-4):
    """Return a weight of 1 in `dtype` after equal updates."""
    weight = torch.ones((), dtype=dtype)
    for _ in range(updates):
        weight = weight + update
    return weight.item()


ends_at = {"fp32": 1.1, "bf16": 1, "fp16": 1}
for name, expected in ends_at.items():
    weight, half_spacing = add_many(FORMATS[name]), LIMITS[name].eps / 2
    print(f"{name}: ends at {weight:.4f}; loses updates up to 1/{1 / half_spacing:.0f}")
    assert abs(weight - expected) < 1e-4  # in fp32 a thousand roundings of at most 2^-24 each
    one = torch.ones((), dtype=FORMATS[name])
    assert one + half_spacing == one
    assert one + 1.01 * half_spacing > one

# %% [markdown]
# In bf16 and in fp16 the weight ends at 1, where it began. Each update was less than half the spacing at
# 1, so every sum was rounded back to 1.
#
# ## Three techniques that make 16 bits work
#
# The paper [*Mixed Precision Training*](https://arxiv.org/abs/1710.03740) shows how to train networks in fp16
# to the accuracy of fp32, with three techniques. We try each on a tiny example.
#
# ### 1. Master weights in fp32, against swamping
#
# The weights stay in fp32 and are called *master weights*. In each step, the forward and the backward pass
# use a new 16-bit copy. The optimizer updates the fp32 weights, where small updates add up.

# %%
master = torch.ones(())  # fp32
copies = []
for _ in range(1000):
    copies.append(master.half().item())  # used by forward and backward pass
    master = master + 1e-4  # the optimizer updates fp32
print(f"master weight {master:.4f}, its fp16 copy {master.half():.4f}")
print(f"different copies: {len(set(copies))}")
assert abs(master.item() - 1.1) < 1e-4
assert 100 <= len(set(copies)) <= 104  # from 1 to 1.1 in steps of 2^-10 there are 103 numbers

# %% [markdown]
# Now the thousand updates add up to 0.1. [Autocast](02_autocast_dtypes.ipynb#The-idea-in-five-lines) also keeps the
# parameters in fp32. It casts copies of them for the ops that run in 16 bits.
#
# ### 2. Loss scaling, against underflow
#
# For each of 1024 examples, a model gives the right class a logit of 12 and the wrong class a logit of 0. The wrong
# class therefore has a probability of about e^-12. The gradient with respect to its logit is this probability divided
# by 1024, because the loss is a mean. This gradient is too small for fp16, so we scale the loss.


# %%
def wrong_class_gradient(loss_scale):
    """The gradient of the second logit: stored in fp16, then divided by the scale in fp32."""
    logits = torch.tensor([[12.0, 0.0]]).repeat(1024, 1).half().requires_grad_()
    targets = torch.zeros(1024, dtype=torch.long)
    loss = nn.functional.cross_entropy(logits.float(), targets)  # in fp32
    (loss * loss_scale).backward()
    return logits.grad[0, 1].float() / loss_scale


expected = 1 / (1 + math.exp(12)) / 1024
unscaled, scaled = wrong_class_gradient(1), wrong_class_gradient(2**16)
print(f"expected {expected:.3e}, with scale 1 {unscaled:.3e}, with 2^16 {scaled:.3e}")
assert unscaled == 0
assert abs(scaled / expected - 1) < fp16.eps  # fp16 rounds once, by eps/2 at most; fp32 little

# %% [markdown]
# Without a scale the gradient becomes zero. With a scale of 2^16, its relative error is less than the eps of fp16.
#
# Backpropagation is linear: if the loss is 2^16 times as large, every gradient is 2^16 times as large, apart from
# rounding. Afterwards we divide the gradients by 2^16 in fp32.
#
# ### 3. Sums in fp32, against swamping in matmuls
#
# A matmul adds up products. We add up 8192 products in fp16, in fp32, and as `a @ b`.

# %%
torch.manual_seed(0)
a, b = torch.rand(8192).half(), torch.rand(8192).half()
exact = (a.double() * b.double()).sum().item()
in_fp16, in_fp32 = torch.zeros((), dtype=torch.float16), torch.zeros(())
for x, y in zip(a, b, strict=True):
    in_fp16 = in_fp16 + x * y
    in_fp32 = in_fp32 + x.float() * y.float()
print(f"exact {exact:.0f}, in fp32 {in_fp32:.0f}, in fp16 {in_fp16:.0f}, a @ b {a @ b:.0f}")
assert abs(in_fp32.item() / exact - 1) < 1e-4
assert abs(in_fp16.item() / exact - 1) > 1e-2
assert abs((a @ b).item() / exact - 1) < fp16.eps
assert not torch.backends.cuda.matmul.allow_fp16_accumulation

# %% [markdown]
# The sum in fp16 ends much too low. As the sum grows, its spacing grows too, so more and more products are
# lost. Here the relative error of `a @ b` is less than the eps of fp16. Matmuls in 16 bits [typically add up in
# fp32](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) on GPUs too.
#
# ## The gradients of a real network
#
# Are gradients really that small? We train a small network on handwritten digits in fp32
# ([`course/digits.py`](course/digits.py)). After training, we look at the gradients with respect to the
# *activations*. Under autocast in fp16, linear layers [compute such gradients in
# fp16](02_autocast_dtypes.ipynb#Backward:-no-autocast-there).

# %% tags=["nbval-ignore-output"]
images, labels = load_images(device)
model = new_network(device)
train(model, images, labels)
trained = activation_gradients(model, images[:1024], labels[:1024])
assert (model(images[:1024]).argmax(dim=1) == labels[:1024]).float().mean() > 0.95

# %% [markdown]
# We leave out the gradients that are exactly zero. We multiply the remaining gradients by a loss scale and round them
# to fp16. Then we count how many become zero or subnormal. Before you run this: which share becomes zero without a
# scale?

# %% tags=["nbval-ignore-output"]
gradients = torch.cat([grad.flatten() for grad in trained]).cpu()
gradients = gradients[gradients != 0]
lost = {}
for loss_scale in (1, 2**8, 2**16):
    scaled = (gradients * loss_scale).half()
    assert scaled.isfinite().all()  # no overflow at any of these scales
    lost[loss_scale] = (scaled == 0).float().mean().item()
    subnormal = (scaled.abs() < fp16.normal).float().mean().item() - lost[loss_scale]
    print(f"scale {loss_scale:>5}: {lost[loss_scale]:5.1%} zero, {subnormal:5.1%} subnormal")
    assert loss_scale > 1 or lost[1] + subnormal > 0.9
assert lost[1] > 0.2 > lost[2**8] > lost[2**16]
assert lost[2**16] < 0.02
assert (gradients.bfloat16() != 0).all()  # in bf16 nothing is lost, without any scale
assert torch.amp.GradScaler("cpu").get_scale() == 2**16
_ = figures.gradients_against_fp16(gradients.abs().log2(), scales=(1, 2**16))

# %% [markdown]
# The background shows what a value becomes in fp16.
#
# - **Scale 1, or 2^0 (above):** nearly all gradients lie in the two grey areas on the left, and more than
#   a fifth become zero.
# - **Scale 2^16 (below):** all gradients move 16 units to the right. Fewer than 2 % become zero. By default,
#   `torch.amp.GradScaler` starts with this scale.
#
# In bf16, none of these gradients becomes zero, even without a scale.
#
# ## Summary
#
# | format | largest | digits | used for |
# |---|---|---|---|
# | fp32 | 3.4e38 | 7 | master weights, losses, sums |
# | tf32 | 3.4e38 | 3 | inputs of fp32 matmuls |
# | bf16 | 3.4e38 | 2 to 3 | activations and matmuls |
# | fp16 | 65504 | 3 | activations and matmuls, with loss scaling |
# | fp8 E5M2 | 57344 | 1 | [gradients](https://arxiv.org/abs/2209.05433), scaled |
# | fp8 E4M3 | 448 | 1 | weights and activations, scaled |
#
# Formats fail in three ways:
#
# | failure | what happens | which 16-bit format | what helps |
# |---|---|---|---|
# | overflow | a number is too large and becomes infinity, then often NaN | mostly fp16 | bf16, or fp32 for that op |
# | underflow | a number is too small: it loses bits or becomes zero | mostly fp16 | loss scaling, or bf16 |
# | swamping | a small number is lost when it is added to a large one | both, bf16 more | fp32 master weights and fp32 sums |
#
# Next: [notebook 02](02_autocast_dtypes.ipynb) shows how autocast decides which op runs in which format.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("01_number_formats")

# %% [markdown]
# ### 1. Which whole number is missing?
#
# fp16 can represent every whole number up to 2048, but not 2049. Work out on paper the first positive
# whole number that bf16 cannot represent.

# %%
first_missing_in_bf16 = ...
exercises.check_first_missing(first_missing_in_bf16)

# %% [markdown]
# <details><summary>Hint</summary>
#
# bf16's eps is 2^-7. From which power of two on is the spacing larger than 1?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# first_missing_in_bf16 = 257
# ```
#
# From 256 to 512 the spacing is 256 times 2^-7, which is 2. So 257 is missing.
#
# </details>
#
# ### 2. Where does the sum stop?
#
# We start from 0 in fp16 and add 0.1 ten thousand times. At which number does the sum stop growing?

# %%
sum_stops_at = ...
exercises.check_sum_stops(sum_stops_at)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Adding 0.1 changes nothing once 0.1 is less than half the spacing at the sum. The spacing of fp16 at 2^n is
# 2^(n-10).
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# sum_stops_at = 256
# ```
#
# Between 128 and 256 the spacing is 0.125, so half the spacing is less than 0.1. From 256 on the spacing is
# 0.25. Half the spacing is then 0.125, so 0.1 is rounded away.
#
# </details>
#
# ### 3. Repair an overflow
#
# This function takes an fp16 vector and returns its length in fp32. For `[300, 400]` it returns infinity
# instead of 500:
#
# ```python
# def length(vector):
#     return (vector * vector).sum().sqrt().float()
# ```
#
# Rewrite it so that large and small components both give the right length.


# %%
def length(vector):
    return ...  # the length of an fp16 vector, as a number in fp32


exercises.check_length(length)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In which op does the first infinity appear?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def length(vector):
#     wide = vector.float()
#     return (wide * wide).sum().sqrt()
# ```
#
# In fp16, the square of every number from 256 on overflows. In fp32, the square of every fp16 number fits.
#
# </details>
#
# ### 4. Find the largest scale
#
# Complete `largest_scale`. It returns the largest power of two by which fp32 gradients can be multiplied so that they
# stay finite when rounded to fp16. The scale may be smaller than 1.


# %%
def largest_scale(gradients):
    return ...


exercises.check_largest_scale(largest_scale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Negative gradients overflow as well, so only the largest magnitude matters.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def largest_scale(gradients):
#     largest, scale = gradients.abs().max(), 1.0
#     while (largest * scale).half().isinf():
#         scale /= 2
#     while (largest * scale * 2).half().isfinite():
#         scale *= 2
#     return scale
# ```
#
# </details>
#
# ## Further reading
#
# - D. Goldberg, [What every computer scientist should know about floating-point
#   arithmetic](https://doi.org/10.1145/103162.103163), ACM Computing Surveys, 1991.
# - [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) and [CUDA
#   semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html) in PyTorch: TF32, and the settings for
#   sums in 16 bits.
