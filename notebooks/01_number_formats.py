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
# **What you'll do.** Take six number formats apart, from fp32 down to fp8, and draw them in one
# picture. Then make each of them fail on purpose, apply the three techniques that make training in
# 16 bits work, and watch the gradients of a real network vanish in fp16 and come back.
#
# **What you'll learn.**
# - to read a format as two things: how far it reaches (*range*) and how close its numbers lie
#   (*spacing*);
# - to recognise overflow, underflow and swamping, and to say in advance which format suffers from
#   which;
# - why mixed precision keeps fp32 *master weights*, scales the loss, and adds up in fp32.
#
# **What you need.** PyTorch, and to have trained a network before. No GPU: a number format is the
# same on every device, so single numbers live on the CPU here. The network at the end trains on
# your device.

# %% tags=["nbval-ignore-output"]
import math
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn

from amp_lab import plots
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# ## The idea in five lines
#
# In fp32 nobody gives these three numbers a thought. In fp16, with half the bits, none of them
# comes out right.

# %%
small = torch.tensor(1e-8).half()
large = torch.tensor(70000.0).half()
total = torch.tensor(2048.0).half() + 1
print(f"1e-8 is {small:g}, 70000 is {large:g}, 2048 + 1 is {total:g}")
assert (small, large, total) == (0, math.inf, 2048)

# %% [markdown]
# These are the three failures of this notebook. The first number is too small for fp16's range and
# *underflows* to zero. The second is too large and *overflows* to infinity. The third lies well
# within the range, but between two fp16 numbers: the spacing is 2 there, so adding 1 changes
# nothing. That is *swamping*.
#
# ## What the bits mean
#
# A floating-point number is a sign, an exponent and a mantissa: $(-1)^\text{sign} \times
# 2^{\text{exponent} - \text{bias}} \times 1.\text{mantissa}$. The exponent says between which two
# powers of two the number lies, and the mantissa says where between them. `torch.finfo` knows the
# limits of every format that has a dtype, and `view` shows the bits.

# %%
FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 E5M2": torch.float8_e5m2,
    "fp8 E4M3": torch.float8_e4m3fn,  # fn: finite, it has no infinity
}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes: an integer of the same size


def fields(number):
    """The bits of a number, as text: sign, exponent, mantissa."""
    width = torch.finfo(number.dtype).bits
    mantissa = -int(math.log2(torch.finfo(number.dtype).eps))  # eps = 2^-(mantissa bits)
    bits = number.view(INTEGER[number.dtype.itemsize]).item() & (2**width - 1)
    text = f"{bits:0{width}b}"
    return text[0], text[1:-mantissa], text[-mantissa:]


# %% [markdown]
# Here is 0.1 in each format. The last column is the number that the bits really stand for, put
# together again by the formula above.

# %%
for name, dtype in FORMATS.items():
    number = torch.tensor(0.1).to(dtype)
    sign, exponent, mantissa = fields(number)
    bias = 2 ** (len(exponent) - 1) - 1
    value = 2.0 ** (int(exponent, 2) - bias) * (1 + int(mantissa, 2) / 2 ** len(mantissa))
    print(f"{name:<9} {sign} {exponent:<8} {mantissa:<23}  {value:.8f}")
    assert value == number.item()

# %% [markdown]
# No format holds 0.1 exactly; each has the nearest number it can spell. fp32 and bf16 share their 8
# exponent bits: bf16 is fp32 with 16 bits of mantissa rounded away. fp16 has the same 16 bits as
# bf16, but spends three of them on the mantissa instead of the exponent. The names of the fp8
# formats count exponent and mantissa: E5M2 is to fp16 what bf16 is to fp32.
#
# ### TF32 has no dtype
#
# TF32 is not a format to store numbers in, but a way to multiply fp32 matrices faster: some GPUs
# may read each fp32 input as if it had only 10 bits of mantissa ([NVIDIA's since
# Ampere](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices), for one).
# Whether they round or cut off the other 13 bits is up to the hardware. Rounding to nearest can be
# imitated with integers.


# %%
def to_tf32(number):
    """Round finite float32 numbers to TF32's 10 bits of mantissa: to nearest, ties to even."""
    bits = number.view(torch.int32)
    bits = bits + 0xFFF + ((bits >> 13) & 1)  # just under half a unit; half if the last bit is odd
    return (bits & ~0x1FFF).view(torch.float32)


# %% [markdown]
# TF32 has the 8-bit exponent of fp32 and the 10-bit mantissa of fp16. So where fp16 has its full
# precision, both must round alike, and beyond it TF32 goes on.

# %%
torch.manual_seed(0)
numbers = torch.randn(10_000)
numbers = numbers[numbers.abs() > 2.0**-14]  # the smallest number that fp16 holds in full precision
assert torch.equal(to_tf32(numbers), numbers.half().float())

tenth, huge = to_tf32(torch.tensor(0.1)), to_tf32(torch.tensor(1e30))
print(f"0.1 in TF32: {tenth:.8f};  1e30 in TF32: {huge:.4g}")
assert tenth == torch.tensor(0.1).half()
assert torch.tensor(1e30).half() == math.inf

# %% [markdown]
# ## Range
#
# Four numbers say all about a format's range and spacing. Below the smallest *normal* number a
# format goes on for a while with *subnormal* numbers: the exponent is stuck at its minimum, and the
# leading 1 of the mantissa becomes a 0, so there are fewer and fewer significant bits.


# %%
@dataclass(frozen=True)
class Limits:
    subnormal: float  # the smallest positive number
    normal: float  # the smallest positive number with the full mantissa
    largest: float  # the largest finite number
    eps: float  # the distance from 1 to the next larger number


def limits(dtype):
    info = torch.finfo(dtype)
    return Limits(info.smallest_normal * info.eps, info.smallest_normal, info.max, info.eps)


fp32, fp16 = limits(torch.float32), limits(torch.float16)
tf32 = Limits(fp32.normal * 2**-10, fp32.normal, (2 - 2**-10) * 2.0**127, 2**-10)
LIMITS = {"fp32": fp32, "tf32": tf32} | {name: limits(FORMATS[name]) for name in list(FORMATS)[1:]}

# %% [markdown]
# The smallest positive number is the one whose bits are 0…01, which is easily checked. For TF32 it
# is the last of its own bits that is set.

# %%
for name, it in LIMITS.items():
    reach = f"{it.subnormal:8.2g}  {it.normal:8.2g} … {it.largest:8.3g}"
    print(f"{name:<9} {reach}   eps 2^{math.log2(it.eps):.0f}")
    dtype = FORMATS.get(name, torch.float32)
    bits = torch.tensor(2**13 if name == "tf32" else 1, dtype=INTEGER[dtype.itemsize])
    assert bits.view(dtype).item() == it.subnormal
assert fp16.largest == 65504
assert to_tf32(torch.tensor(tf32.largest)) == tf32.largest

# %% [markdown]
# Read a row as: *smallest number, then from the smallest normal to the largest number, and the
# spacing at 1*. bf16 reaches as far as fp32 with a coarse spacing; fp16 is eight times finer than
# bf16 but ends at 65504.
#
# ## Spacing
#
# The bit patterns of positive numbers are in the order of the numbers. So the next larger number is
# the next larger integer, and the spacing at any magnitude can be *measured*: add 1 to the bits,
# and see by how much the number grew.


# %%
def spacing_by_magnitude(name):
    """Exponents of two over a format's range, and at each the spacing divided by the magnitude."""
    it, dtype = LIMITS[name], FORMATS.get(name, torch.float32)
    exponents = list(range(round(math.log2(it.subnormal)), math.floor(math.log2(it.largest)) + 1))
    numbers = torch.tensor([2.0**exponent for exponent in exponents]).to(dtype)
    last_bit = 2**13 if name == "tf32" else 1
    following = (numbers.view(INTEGER[dtype.itemsize]) + last_bit).view(dtype)
    spacing = (following.double() - numbers.double()) / numbers.double()
    return exponents, spacing.tolist(), round(math.log2(it.normal))


pictured = {name: spacing_by_magnitude(name) for name in LIMITS}
for name, (exponents, spacing, normal) in pictured.items():
    assert all(
        s == LIMITS[name].eps for e, s in zip(exponents, spacing, strict=True) if e >= normal
    )
    assert spacing[0] == 1  # the smallest number and the next: it, and twice it
below_two = torch.tensor(2.0).half() - 2**-10  # the last fp16 number below 2
assert 0.5 < fp16.eps / below_two / fp16.eps < 0.51  # relative to it, half of what it is at 1

# %% [markdown]
# Now both in one picture, over the same axis of magnitudes.

# %%
_ = plots.range_and_spacing(pictured)

# %% [markdown]
# Above, six bars show how far each format reaches, in powers of two; the vertical line marks 1.
# fp32, tf32 and bf16 span more than 250 powers of two, with the same exponents; fp16 and both fp8
# formats are short bars around 1, fp16 with a quarter of its length subnormal (hatched). Below,
# each format is a flat line as long as its numbers are normal: **the spacing grows with the number,
# so the relative spacing stays the same**, namely eps. (It is drawn at the powers of two, where it
# is largest; between two of them it falls to half.) To the left the lines rise when numbers become
# subnormal, until 100 % is reached and only zero is left. Lower is finer, wider reaches further.
# With 16 bits one cannot have both: fp16 is lower (its dotted line lies on that of tf32), bf16 is
# wider.
#
# ## Rounding
#
# A result that falls between two numbers goes to the nearer one. Exactly in the middle it goes to
# the one whose last bit is 0: *round to nearest, ties to even*. From 2048 on, fp16 has only even
# numbers.

# %%
numbers = torch.arange(2048.0, 2057)
print("fp32:", *(f"{n:.0f}" for n in numbers))
print("fp16:", *(f"{n:.0f}" for n in numbers.half()))
assert numbers.half().tolist() == [2048, 2048, 2050, 2052, 2052, 2052, 2054, 2056, 2056]

# %% [markdown]
# Each odd number was a tie. Going up and down in turn, ties do not push a sum in one direction. So
# one rounding errs by at most half the spacing, which is at most eps/2 relative to the number.

# %%
assert (numbers.half().float() - numbers).sum() == 0  # as many ties went up as down
numbers = torch.linspace(1, 2, 10_001, dtype=torch.float64)
for name in LIMITS:
    rounded = to_tf32(numbers.float()) if name == "tf32" else numbers.to(FORMATS[name])
    error = ((rounded.double() - numbers) / numbers).abs().max().item()
    print(f"{name:<9} largest relative error {error:8.1e}, bound eps/2 {LIMITS[name].eps / 2:8.1e}")
    assert error <= LIMITS[name].eps / 2

# %% [markdown]
# As every sum is rounded, it matters in which order one adds. Addition of floating-point numbers is
# **not associative**.

# %%
big, one = torch.tensor(2048.0).half(), torch.tensor(1.0).half()
print(f"(2048 + 1) + 1 = {(big + one) + one:g},  2048 + (1 + 1) = {big + (one + one):g}")
assert (big + one) + one == 2048
assert big + (one + one) == 2050
big, one = torch.tensor(2.0**24), torch.tensor(1.0)  # fp32
assert (big + one) + one != big + (one + one)

# %% [markdown]
# The last line shows that it holds in fp32 as well, only later, from 2^24 on. This is why two
# devices, or two runs of a parallel sum, may differ in the last digits, and why comparisons need a
# tolerance.
#
# ## Overflow
#
# Above the largest number there is nothing but infinity. As rounding comes first, 65504 is not
# quite the limit of fp16: the next number, if there were one, would be 65536, and what is nearer to
# 65504 still rounds to it.

# %%
numbers = torch.tensor([65504.0, 65519.0, 65520.0, 70000.0])
print("fp16:", numbers.half().tolist())
print("bf16:", numbers.bfloat16().tolist())
assert numbers.half().tolist() == [65504, 65504, math.inf, math.inf]
assert numbers.bfloat16().isfinite().all()
assert numbers.bfloat16()[:3].unique().numel() == 1
assert torch.tensor(fp32.largest).bfloat16() == math.inf  # bf16 ends 0.4 % before fp32 does

# %% [markdown]
# 65520 is the tie, and goes to infinity. bf16 has no trouble with any of these, but look at the
# values: with 8 significant bits all but the last have become the same. Infinity does not stay
# alone for long: the next subtraction or product with zero makes it NaN, and NaN spreads to all it
# touches.

# %%
inf = torch.tensor(70000.0).half()
print(f"inf - inf = {inf - inf:g}, inf * 0 = {inf * 0:g}, 1 / inf = {1 / inf:g}")
assert (inf - inf).isnan()
assert (inf * 0).isnan()

# %% [markdown]
# ### FP8: two formats, two ways to overflow
#
# With 8 bits there are 256 patterns, few enough to look at all of them.

# %%
for name in ("fp8 E5M2", "fp8 E4M3"):
    every = torch.arange(256, dtype=torch.uint8).view(FORMATS[name]).float()
    counts = f"{every.isinf().sum()} infinities, {every.isnan().sum()} NaNs"
    print(f"{name}: {counts}, largest {LIMITS[name].largest:g}")
    assert every[every.isfinite()].max() == LIMITS[name].largest
    assert every.isinf().any() == (name == "fp8 E5M2")

# %% [markdown]
# E5M2 follows the rules of its larger relatives. E4M3 gives up infinity, and all but one NaN of
# each sign, to reach 448. So what happens to numbers beyond 448?

# %%
numbers = torch.tensor([448.0, 464.0, 1000.0, 100_000.0, math.inf])
e5m2, e4m3 = (numbers.to(FORMATS[name]).float() for name in ("fp8 E5M2", "fp8 E4M3"))
print("E5M2:", e5m2.tolist())
print("E4M3:", e4m3.tolist())
assert e5m2.tolist() == [448, 448, 1024, math.inf, math.inf]
assert e4m3[:2].tolist() == [448, 448]
saturated, nan = e4m3[2:] == 448, e4m3[2:].isnan()
assert (saturated | nan).all()  # which of the two depends on the version of torch

# %% [markdown]
# The torch that made this page *saturates*: what is too large becomes 448, infinity included, so
# that **an overflow leaves no trace**. Older versions, 2.11 for one, return NaN for anything above
# 464. Code that should mean the same everywhere clamps first, and chooses a scale for each tensor
# so that little is clamped:

# %%
values = torch.tensor([-3000.0, 0.5, 12.0, 1000.0])
largest = LIMITS["fp8 E4M3"].largest
clamped = values.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
factor = largest / values.abs().max()
scaled = (values * factor).to(torch.float8_e4m3fn).float() / factor
for name, result in {"clamped": clamped, "scaled": scaled}.items():
    print(f"{name}:", [f"{v:.4g}" for v in result.tolist()])
assert clamped.tolist() == [-448, 0.5, 12, 448]
assert ((scaled - values).abs() <= LIMITS["fp8 E4M3"].eps / 2 * values.abs()).all()
print(f"subnormal below 1/{largest / LIMITS['fp8 E4M3'].normal:,.0f} of the largest")

# %% [markdown]
# Scaled by its largest magnitude, the whole tensor fits, and each of these values comes back within
# eps/2. Only a value that is smaller than the printed share of the largest would become subnormal
# and lose bits. We use fp8 for storing, and for matrix products made for it; ordinary arithmetic on
# it is refused, as the next cell shows. AMP as taught here stops at 16 bits; training in fp8 takes
# a library made for it, such as torchao or Transformer Engine.

# %%
share = LIMITS["fp8 E4M3"].normal / largest
assert (torch.tensor(1.01 * share) * largest).to(torch.float8_e4m3fn).float() >= 2.0**-6
assert (torch.tensor(2.0**-11 * share) * largest).to(torch.float8_e4m3fn).float() == 0
refused = False
try:
    values.to(torch.float8_e4m3fn) + values.to(torch.float8_e4m3fn)
except NotImplementedError:
    refused = True
assert refused

# %% [markdown]
# ## Underflow
#
# At the small end, precision does not stop all at once. Here is 1.7 times some powers of two, in
# fp16.

# %%
for exponent in (-10, -14, -18, -22, -24, -26):
    number = torch.tensor(1.7 * 2.0**exponent)
    rounded = number.half().float()
    error = ((rounded - number) / number).abs().item()
    print(f"1.7 x 2^{exponent}: {number:.3e} -> {rounded:.3e}   error {error:7.2%}")
assert rounded == 0
assert torch.tensor(2.0**-24).half() > 0
assert (
    torch.tensor(2.0**-25).half() == 0
)  # half the smallest number: a tie, and zero is the even side

# %% [markdown]
# Down to 2^-14 the error is what fp16 promises. Then the number is subnormal and loses a bit with
# each power of two: at 2^-24 one bit is left, and from 2^-25 down, nothing. How hardware treats
# subnormal numbers varies: the matrix units of AMD's MI200, for one, [flush them to zero in fp16 and
# bf16](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html#reduced-precision-fp16-and-bf16-gemms-and-convolutions-on-amd-instinct-mi200-devices).
#
# ## Swamping
#
# Training adds many small updates to weights that are much larger. Let a weight of 1 get an update
# of 0.0001 a thousand times: it ought to end at 1.1.


# %%
def add_many(dtype, updates=1000, update=1e-4):
    """The history of a weight of 1, kept in `dtype`, over equal updates."""
    weight = torch.ones((), dtype=dtype)
    history = [weight.item()]
    for _ in range(updates):
        weight = weight + update
        history.append(weight.item())
    return history


weights = {name: add_many(FORMATS[name]) for name in ("fp32", "bf16", "fp16")}
print({name: round(history[-1], 4) for name, history in weights.items()})
assert abs(weights["fp32"][-1] - 1.1) < 1e-4  # a thousand roundings of at most 2^-24 each
assert weights["bf16"][-1] == weights["fp16"][-1] == 1

# %%
_ = plots.weight_over_updates(weights)

# %% [markdown]
# The solid line, fp32, climbs from 1 to 1.1. The dashed and the dotted line, bf16 and fp16, lie on
# top of each other and do not move at all: a thousand updates have vanished, one at a time. Each
# was less than half the spacing at 1, and so was rounded away. The limit is easily found.

# %%
for name in ("fp32", "fp16", "bf16"):
    half_spacing = LIMITS[name].eps / 2
    one = torch.ones((), dtype=FORMATS[name])
    print(f"{name}: an update of 1 / {1 / half_spacing:.0f} of the weight, or less, is lost")
    assert one + half_spacing == one
    assert one + 1.01 * half_spacing > one
assert LIMITS["bf16"].eps == 8 * LIMITS["fp16"].eps

# %% [markdown]
# At weights that are not powers of two, the limit lies between this share and half of it. Note who
# comes last: **bf16 has the range of fp32, but not its precision**. It needs no loss scaling, but
# it swamps updates that are eight times as large.
#
# ## Three techniques that make 16 bits work
#
# In 2018, Micikevicius and others showed in *Mixed Precision Training* how to train networks in
# fp16 to the accuracy of fp32. They use three techniques: two against swamping, one against
# underflow.
#
# ### 1. Master weights in fp32, against swamping
#
# The weights stay in fp32. Forward and backward pass use a 16-bit copy, made anew for each step;
# the update goes to the fp32 weights, where small updates add up until the copy can see them.

# %%
master = torch.ones(())  # fp32
copies = []
for _ in range(1000):
    copies.append(master.half().item())  # what forward and backward pass compute with
    master = master + 1e-4  # what the optimizer does
print(f"master weight {master:.4f}, its fp16 copy {master.half():.4f}")
print(f"different copies seen: {len(set(copies))}")
assert abs(master.item() - 1.1) < 1e-4
assert 100 <= len(set(copies)) <= 104  # from 1 to 1.1 in steps of 2^-10 there are 103 numbers

# %% [markdown]
# The copy stands still for about ten steps, then moves on by one spacing. This is what autocast
# relies on: the parameters of the model stay in fp32, and casts are made where they are needed. The
# price: weights, and what the optimizer keeps for each of them, take as much memory as ever.
#
# ### 2. Loss scaling, against underflow
#
# 1024 examples with two classes, all of them right and confident: logits 12 and 0. The gradient of
# the mean loss with respect to the second logit is the probability of the wrong class, e^-12,
# divided by 1024.


# %%
def wrong_class_gradient(loss_scale):
    """That gradient, as it arrives at fp16 logits, divided by the loss scale in fp32 afterwards."""
    logits = torch.tensor([[12.0, 0.0]]).repeat(1024, 1).half().requires_grad_()
    targets = torch.zeros(1024, dtype=torch.long)
    loss = nn.functional.cross_entropy(
        logits.float(), targets
    )  # the loss itself in fp32, as under autocast
    (loss * loss_scale).backward()
    return logits.grad[0, 1].float() / loss_scale


expected = 1 / (1 + math.exp(12)) / 1024
unscaled, scaled = wrong_class_gradient(1), wrong_class_gradient(2**16)
print(f"expected {expected:.3e}, scale 1: {unscaled:.3e}, 2^16: {scaled:.3e}")
assert unscaled == 0
assert abs(scaled / expected - 1) < fp16.eps  # fp16 rounds once, by eps/2 at most; fp32 little

# %% [markdown]
# Backpropagation is linear: multiply the loss by 2^16, and every gradient is 2^16 times as large,
# on its way through fp16 too. It is divided by the same number in fp32. As 2^16 is a power of two,
# this costs no precision, unless the scaled gradients overflow. [Notebook
# 03](03_grad_scaler_step_by_step.ipynb) shows how a good scale is found.
#
# ### 3. Products added up in fp32, against swamping in sums
#
# A matrix product is a long sum of products. The product of two fp16 numbers, 11 significant bits
# each, fits into the 24 of fp32 exactly; all that is lost is lost in adding up. So that is where
# precision is spent.

# %%
torch.manual_seed(0)
a, b = torch.rand(8192).half(), torch.rand(8192).half()
exact = (a.double() * b.double()).sum().item()
assert torch.equal((a.float() * b.float()).double(), a.double() * b.double())  # exact products

in_fp16, in_fp32 = torch.zeros((), dtype=torch.float16), torch.zeros(())
for x, y in zip(a, b, strict=True):
    in_fp16 = in_fp16 + x * y
    in_fp32 = in_fp32 + x.float() * y.float()
print(f"exact {exact:.1f}, added up in fp32 {in_fp32:.1f}, in fp16 {in_fp16:.1f}")
assert abs(in_fp32.item() / exact - 1) < 1e-4
assert abs(in_fp16.item() / exact - 1) > 1e-2

# %% [markdown]
# In fp16 the sum falls behind: the larger it is, the more of the products it swamps. torch's own
# product of two fp16 vectors rounds to fp16 only at the end.

# %%
product = a @ b
spacing = fp16.eps * 2.0 ** math.floor(math.log2(product))
print(f"a @ b = {product:.0f}, {product.dtype}; spacing there {spacing:g}")
assert product.dtype is torch.float16
assert abs(product.item() / exact - 1) < fp16.eps

# %% [markdown]
# According to PyTorch's notes on [numerical
# accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) and on
# [CUDA](https://docs.pytorch.org/docs/stable/notes/cuda.html), the matrix
# units of GPUs work in the same way: 16 bits in, fp32 inside, 16 bits out. Two switches loosen this
# on CUDA: `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` lets
# *partial* sums meet in fp16 (on by default), and `allow_fp16_accumulation` adds up in fp16
# altogether (off by default). Sums over a whole tensor, norms, softmax and losses are of the same
# kind, which is why autocast on CUDA runs them in fp32 ([notebook 02](02_autocast_dtypes.ipynb)
# lists which).

# %%
assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
assert not torch.backends.cuda.matmul.allow_fp16_accumulation

# %% [markdown]
# ## The gradients of a real network
#
# Are gradients really so small? A small network learns scikit-learn's handwritten digits, in fp32
# throughout. Everything is drawn on the CPU and then moved.

# %%
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16  # (1797, 64), in [0, 1]
labels = torch.tensor(digits.target, device=device)
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
).to(device)


def train(model, steps=200, batch_size=256):
    """Plain fp32 training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (batch_size,)).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


# %% [markdown]
# Under autocast, the values that pass through fp16 in the backward pass are first of all the
# gradients with respect to the *activations* (those of the weights pass through it as well, on
# their way to fp32). `retain_grad` keeps them, for the output of every layer.


# %%
def activation_gradients(model, inputs, targets):
    """The logits, and the gradients of the mean loss for each layer's output, in fp32."""
    outputs, hidden = [], inputs
    for layer in model:
        hidden = layer(hidden)
        hidden.retain_grad()
        outputs.append(hidden)
    nn.functional.cross_entropy(hidden, targets).backward()
    return hidden.detach(), [output.grad for output in outputs]


inputs, targets = images[:1024], labels[:1024]
_, untrained = activation_gradients(model, inputs, targets)
train(model)
logits, trained = activation_gradients(model, inputs, targets)
assert (logits.argmax(dim=1) == targets).float().mean() > 0.95

# %% [markdown]
# Now take all those gradients that are not zero in fp32 already (ReLU makes many zeros), multiply
# them by a loss scale, round them to fp16, divide by the scale in fp32, and count what has become
# zero, and what has become subnormal.

# %% tags=["nbval-ignore-output"]
gradients = torch.cat([grad.flatten() for grad in trained]).cpu()
gradients = gradients[gradients != 0]
lost, subnormal = {}, {}
for loss_scale in (1, 2**8, 2**16):
    scaled = (gradients * loss_scale).half()
    assert scaled.isfinite().all()  # no overflow at any of these scales
    kept = scaled.float() / loss_scale
    lost[loss_scale] = (scaled == 0).float().mean().item()
    subnormal[loss_scale] = ((scaled != 0) & (scaled.abs() < fp16.normal)).float().mean().item()
    error = ((kept - gradients).norm() / gradients.norm()).item()
    shares = f"{lost[loss_scale]:6.2%} zero, {subnormal[loss_scale]:6.2%} subnormal"
    print(f"scale {loss_scale:>5}: {shares}, error {error:.3%}")
assert lost[1] > 0.2 > lost[2**8] > lost[2**16]
assert lost[2**16] < 0.02
assert lost[1] + subnormal[1] > 0.9
assert (gradients.bfloat16() != 0).all()  # in bf16 nothing is lost, without any scale

# %% [markdown]
# At scale 1 a large share of the gradients is gone, and nearly all the others are subnormal; at
# 2^16 (the scale that `torch.amp.GradScaler` starts with) nearly all are there. bf16 loses none, so
# it needs no scaler. The picture shows why.

# %%
_ = plots.gradients_against_fp16(gradients.abs().log2(), scales=(1, 2**16))

# %% [markdown]
# Two histograms of log2|gradient|, over the range of fp16: zero on the dark left, subnormal on the
# lighter grey, normal on white, infinite on the dark right. At scale 1 (above), the gradients fill
# the two grey areas and leave nearly all of fp16's normal range unused. Scaling by 2^16 (below)
# moves all of them 16 places to the right, and changes nothing else.
#
# The last column of the table deserves a second look: it is the length of the error, relative to
# the length of all gradients together. It is small, since the vanished gradients are the smallest
# ones, and a network like this may well train without a scale. But a weight that gets *only* small
# gradients learns nothing, and in a backward pass that really runs in fp16, zeros and rounding
# errors are handed down to all layers below. The paper reports an object detector that diverged in
# fp16 without loss scaling, and did as well as in fp32 with a scale of 8.
#
# Here an op in fp16 multiplies by 1000, and its output gets a gradient of 1e-8. The weight below it
# gets nothing at all, although its own gradient, a thousand times as large, would fit into fp16:

# %%
below = torch.ones((), requires_grad=True)
(below.half() * 1000).float().backward(torch.tensor(1e-8))
assert below.grad == 0  # lost on the way
assert torch.tensor(1000 * 1e-8).half() > 0

# %% [markdown]
# ### Why they are so small
#
# For cross-entropy the gradient with respect to the logits has a simple form: the predicted
# probability minus 1 for the right class, minus 0 for the others, divided by the size of the batch.

# %%
wanted = (logits.softmax(dim=1) - nn.functional.one_hot(targets, 10)) / len(targets)
# p - 1 cancels when p is near 1, and leaves the rounding error of 1, about 1e-7, divided by 1024.
torch.testing.assert_close(trained[-1], wanted, rtol=1e-4, atol=2e-10)

# %% [markdown]
# So there are two reasons. The mean over 1024 examples divides by 2^10, from the first step on. And
# as the network becomes confident, the probabilities of the wrong classes fall towards zero, and
# the gradients with them. Their medians, as powers of two, tell the two apart:

# %% tags=["nbval-ignore-output"]
medians = {}
for stage, grads in (("untrained", untrained), ("trained", trained)):
    of_logits = grads[-1][grads[-1] != 0].abs().cpu()
    for what, values in (
        ("mean over the batch", of_logits),
        ("sum over the batch", of_logits * len(targets)),
    ):
        medians[stage, what] = values.median().log2().item()
        print(
            f"{stage:<9}  {what:<19}  median |gradient| of the logits: 2^{medians[stage, what]:.1f}"
        )
assert medians["trained", "mean over the batch"] < medians["untrained", "mean over the batch"] - 10

# %% [markdown]
# The mean costs ten powers of two, and training costs more, and goes on to cost more the longer it
# lasts. That is why a loss scale is not chosen once and for all, but adjusted while training.
#
# ## Summary
#
# Every format is a range and a spacing. In numbers, from widest to narrowest, with the precision in
# decimal digits, which is log10(2 / eps):

# %%
USES = {
    "fp32": "master weights, optimizer state, losses, long sums",
    "tf32": "inputs of fp32 matrix products, on GPUs that have it",
    "bf16": "activations and matrix products, no loss scaling",
    "fp16": "the same, finer, with loss scaling",
    "fp8 E5M2": "gradients in many recipes, scaled by tensor or block",
    "fp8 E4M3": "weights and activations, scaled likewise",
}
print(f"{'format':<9} {'normal range':<20} {'smallest':<9} digits  used for")
for name, use in USES.items():
    it = LIMITS[name]
    reach = f"{it.normal:.1e} … {it.largest:.1e}"
    print(f"{name:<9} {reach:<20} {it.subnormal:<9.1e} {math.log10(2 / it.eps):>6.1f}  {use}")

# %% [markdown]
# | failure | what happens | who suffers | remedy |
# |---|---|---|---|
# | overflow | too large: inf, then NaN (E4M3: NaN or 448) | fp16, fp8 | bf16, or fp32 there; a scale |
# | underflow | too small: fewer bits, then zero | fp16, fp8 | loss scaling; bf16 |
# | swamping | a small number added to a large one is lost | bf16 most, then fp16 | fp32 master weights and sums |
#
# Mixed precision is the three remedies together: weights and sums in fp32, products in 16 bits, and
# for fp16 a loss scale.
#
# ## Exercises
#
# 1. Up to which whole number does each format hold *every* whole number? Predict it from eps, then
#    let a loop find the first that is missing. (fp16: 2049.)
# 2. Add 0.1 in fp16, starting from 0, ten thousand times. Where does the sum stop growing? Explain
#    the number with the picture of spacing. (256.)
# 3. Add the thousand updates of 0.0001 to a bf16 weight, with *stochastic rounding*: add a random
#    integer from 0 to 65535 to the bits of the fp32 sum, then clear the lowest 16. Why does the
#    weight now end near 1.1, and what does it cost?
# 4. Train the network for 800 steps instead of 200. Which share of its gradients is lost at 2^16
#    now, and how far could the scale be raised before the first gradient overflows?
# 5. Repeat the count for E5M2 and E4M3. Which of the two would you take for gradients? (Clamp
#    before you cast.)
#
# ## Further reading
#
# - P. Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), ICLR 2018:
#   the three techniques, with histograms like the one above.
# - P. Micikevicius et al., [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433), 2022:
#   E4M3 and E5M2.
# - D. Kalamkar et al., [A Study of BFLOAT16 for Deep Learning
#   Training](https://arxiv.org/abs/1905.12322), 2019.
# - D. Goldberg, [What every computer scientist should know about floating-point
#   arithmetic](https://doi.org/10.1145/103162.103163), ACM Computing Surveys, 1991.
# - [`torch.finfo`](https://docs.pytorch.org/docs/stable/type_info.html): the limits of every dtype.
# - [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) in
#   PyTorch: TF32, reduced precision in sums, and subnormal numbers on AMD's MI200.
# - [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html) in PyTorch: the switches
#   for sums in fp16 and bf16, and for TF32.
