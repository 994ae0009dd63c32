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
# picture. Then make them fail on purpose, try the three techniques that make training in 16 bits
# work, and watch the gradients of a real network vanish in fp16 and come back.
#
# **What you'll learn.**
# - to read a format as two things: how far it reaches (*range*) and how close its numbers lie
#   (*spacing*);
# - to recognise overflow, underflow and swamping, and to say in advance which format suffers from
#   which;
# - why mixed precision keeps fp32 *master weights*, scales the loss, and adds up in fp32.
#
# **What you need.** PyTorch, and to have trained a network before. You need no GPU: the single numbers
# here live on the CPU. Only the network at the end trains on your device.

# %% tags=["nbval-ignore-output"]
import math
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn

from course import figures, start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We store two numbers in fp16, which has half the bits of fp32, and do one addition in it. Before
# you run this: which of the three will come out right?

# %%
small = torch.tensor(1e-8).half()
large = torch.tensor(70000.0).half()
total = torch.tensor(2048.0).half() + 1
print(f"1e-8 is {small:g}, 70000 is {large:g}, 2048 + 1 is {total:g}")
assert (small, large, total) == (0, math.inf, 2048)
assert 2048 * torch.finfo(torch.float16).eps == 2  # from 2048 to the next number

# %% [markdown]
# None of them does, and each fails for a reason of its own. The first number is too small for the
# range of fp16 and *underflows* to zero. The second is too large and *overflows* to infinity. The
# third lies well within the range, but there is no fp16 number between 2048 and 2050, so adding 1
# changes nothing. That is called *swamping*. The rest of this notebook explains these three
# failures and what we do about them.
#
# ## What the bits mean
#
# A floating-point number consists of a sign, an exponent and a mantissa, and usually stands for
# $(-1)^\text{sign} \times 2^{\text{exponent} - \text{bias}} \times 1.\text{mantissa}$. The exponent
# says between which two powers of two the number lies, and the mantissa says where between them.
# `torch.finfo` knows the limits of these formats, and `view` lets us look at the bits.

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
# We write 0.1 in each format. The last column is the number that the bits really stand for, put
# together again with the formula above.

# %%
for name, dtype in FORMATS.items():
    number = torch.tensor(0.1).to(dtype)
    sign, exponent, mantissa = fields(number)
    bias = 2 ** (len(exponent) - 1) - 1
    value = 2.0 ** (int(exponent, 2) - bias) * (1 + int(mantissa, 2) / 2 ** len(mantissa))
    print(f"{name:<9} {sign} {exponent:<8} {mantissa:<23}  {value:.8f}")
    assert value == number.item()
    spacing = torch.finfo(dtype).eps * 2**-4  # 0.1 lies between 2^-4 and 2^-3
    assert 0 < abs(value - 0.1) <= spacing / 2

# %% [markdown]
# None of them holds 0.1 exactly; each stores the nearest number that it has, which is 0.10009766 in
# bf16 and 0.09997559 in fp16. Compare the columns: fp32 and bf16 have the same 8 exponent bits, so
# bf16 is fp32 with 16 bits of its mantissa rounded away. fp16 has as many bits as bf16, but gives
# three of them to the mantissa instead of the exponent. The names of the fp8 formats count the
# bits: E5M2 has 5 for the exponent and 2 for the mantissa, so it is to fp16 what bf16 is to fp32.
#
# ### TF32 has no dtype
#
# TF32 is no format to store numbers in. It is a way to multiply fp32 matrices faster: some GPUs
# ([NVIDIA's since
# Ampere](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices),
# for one) may read each fp32 input as if its mantissa had only 10 bits. Some kernels
# round the other 13 bits, and some cut them off, such as
# [Triton's](https://github.com/triton-lang/triton/issues/4574). We can imitate rounding with integers.


# %%
def to_tf32(number):
    """Round finite float32 numbers to TF32's 10 bits of mantissa: to nearest, ties to even."""
    bits = number.view(torch.int32)
    bits = bits + 0xFFF + ((bits >> 13) & 1)  # just under half a unit; half if the last bit is odd
    return (bits & ~0x1FFF).view(torch.float32)


# %% [markdown]
# TF32 has the exponent of fp32 and the mantissa of fp16. So where fp16 has its full precision, the
# two must round alike, and TF32 must go on where fp16 ends. The cell checks both.

# %%
torch.manual_seed(0)
numbers = torch.randn(10_000)
numbers = numbers[numbers.abs() > 2.0**-14]  # the smallest number that fp16 holds in full precision
assert torch.equal(to_tf32(numbers), numbers.half().float())

tenth, huge = to_tf32(torch.tensor(0.1)), to_tf32(torch.tensor(1e30))
print(f"0.1 in TF32: {tenth:.8f};  1e30 in TF32: {huge:.4g}")
assert torch.tensor(1e30).half() == math.inf

# %% [markdown]
# ## Range
#
# Four numbers describe a format: its smallest positive number, its smallest *normal* number, its
# largest number, and the spacing at 1, called eps. What does *normal* mean? Below a certain size
# the exponent cannot get smaller. From there on the leading 1 of the mantissa becomes a 0, so that
# fewer and fewer significant bits are left. Those numbers are called *subnormal*.


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
# A row of the table gives the smallest number, the normal range, and eps as a power of two. The
# cell checks each row: if we set only the last bit of the mantissa and no other, we must get the
# smallest number.

# %%
for name, it in LIMITS.items():
    reach = f"{it.subnormal:8.2g}  {it.normal:8.2g} … {it.largest:8.3g}"
    print(f"{name:<9} {reach}   eps 2^{math.log2(it.eps):.0f}")
    dtype = FORMATS.get(name, torch.float32)
    bits = torch.tensor(2**13 if name == "tf32" else 1, dtype=INTEGER[dtype.itemsize])
    assert bits.view(dtype).item() == it.subnormal
assert fp16.largest == 65504

# %% [markdown]
# bf16 reaches about as far as fp32, up to 3.4e+38, but its numbers just above 1 lie 2^-7 apart. fp16
# is eight times as fine, with an eps of 2^-10, but it ends at 65504.
#
# ## Spacing
#
# We find the number that follows a positive one by adding 1 to its last bit. So we can *measure* the
# spacing at any magnitude: we see by how much the number grew.


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
    of_normal = [s for e, s in zip(exponents, spacing, strict=True) if e >= normal]
    assert set(of_normal) == {LIMITS[name].eps}
    assert spacing[0] == 1  # the smallest number and the next: it, and twice it
below_2 = (torch.tensor(2.0).half().view(torch.int16) - 1).view(torch.float16).double()
assert 0.5 < (2 - below_2) / below_2 / LIMITS["fp16"].eps < 0.51  # just below a power of two

# %% [markdown]
# Now we draw range and spacing over the same axis of magnitudes. Before you look: can a format with
# 16 bits be both as wide as bf16 and as fine as fp16?

# %%
_ = figures.range_and_spacing(pictured)

# %% [markdown]
# In the upper half, six bars show how far each format reaches, in powers of two, and a vertical
# line marks 1. The bars of fp32, tf32 and bf16 are more than 250 powers of two long. fp16 and both
# fp8 formats are short bars around 1, and a quarter of fp16's is subnormal (hatched).
#
# In the lower half, each format is a line that is flat as long as its numbers are normal: **the
# spacing grows with the number, so the relative spacing stays the same**, namely eps. (It is drawn
# at the powers of two, where it is largest. Between two of them it falls to half.) On the left a
# line rises where its numbers become subnormal, up to 100 %, after which only zero is left. A lower
# line is finer and a longer one reaches further. With 16 bits you have to choose: fp16 is lower
# (its dotted line lies on that of tf32), and bf16 is wider.
#
# ## Rounding
#
# The result of a cast, an addition or a multiplication that falls between two numbers is rounded to
# the nearer one. If it lies exactly in the middle, it goes to the one whose last bit is 0, which is called
# *round to nearest, ties to even*. From 2048 to 4096 fp16 has only the even numbers, so that every
# odd number is such a tie.

# %%
numbers = torch.arange(2048.0, 2057)
print("fp32:", *(f"{n:.0f}" for n in numbers))
print("fp16:", *(f"{n:.0f}" for n in numbers.half()))
assert numbers.half().tolist() == [2048, 2048, 2050, 2052, 2052, 2052, 2054, 2056, 2056]
assert (numbers.half().float() - numbers).sum() == 0  # as many ties went up as down
of_683 = torch.tensor(683.0).half()
assert numbers[0].half() + 1 == of_683 * 3 == 2048  # both would be 2049

# %% [markdown]
# 2049 was rounded down to 2048 and 2051 up to 2052. Ties go up and down in turn, so the errors of these
# numbers cancel. And because we get the nearer number, one rounding errs by at most half the spacing,
# which is at most eps/2 relative to a normal number. We measure this for 10,001 numbers from 1 to 2.

# %%
numbers = torch.linspace(1, 2, 10_001, dtype=torch.float64)
for name in LIMITS:
    rounded = to_tf32(numbers.float()) if name == "tf32" else numbers.to(FORMATS[name])
    error = ((rounded.double() - numbers) / numbers).abs().max().item()
    print(f"{name:<9} largest relative error {error:8.1e}, bound eps/2 {LIMITS[name].eps / 2:8.1e}")
    assert error <= LIMITS[name].eps / 2

# %% [markdown]
# The bound holds for all six, and is nearly reached: 0.39 % for bf16, 0.048 % for fp16. Since sums
# are rounded, the order in which we add can matter. We add 1 twice to 2048, in both orders.

# %%
big, one = torch.tensor(2048.0).half(), torch.tensor(1.0).half()
print(f"(2048 + 1) + 1 = {(big + one) + one:g},  2048 + (1 + 1) = {big + (one + one):g}")
assert (big + one) + one == 2048
assert big + (one + one) == 2050
big, one = torch.tensor(2.0**24), torch.tensor(1.0)  # the same in fp32 at 2^24
assert (big + one) + one != big + (one + one)

# %% [markdown]
# One order gives 2048 and the other 2050. The same happens in fp32 at 2^24. This is one reason
# why [two devices](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) may differ in the
# last digits, and why you compare floating-point results with a tolerance.
#
# ## Overflow
#
# In fp32, fp16 and bf16 there is nothing beyond the largest number but infinity. Before you run this:
# from which number on does fp16 return infinity, 65505 or a later one?

# %%
numbers = torch.tensor([65504.0, 65519.0, 65520.0, 70000.0])
print("fp16:", numbers.half().tolist())
print("bf16:", numbers.bfloat16().tolist())
assert numbers.half().tolist() == [65504, 65504, math.inf, math.inf]
assert numbers.bfloat16()[:3].unique().numel() == 1
assert torch.tensor(fp32.largest).bfloat16() == math.inf  # bf16 ends 0.4 % before fp32 does

# %% [markdown]
# It is 65520. The next number after 65504 would be 65536 if there were one, and whatever is nearer
# to 65504 still rounds to it; 65520 lies exactly in the middle and goes to infinity. bf16 has no
# trouble with the range here, but look at its values: with 8 significant bits, the first three
# numbers have all become 65536.
#
# Subtract infinity from infinity, or multiply infinity by zero, and you get NaN, which usually spreads
# to what is computed with it.

# %%
inf = torch.tensor(70000.0).half()
print(f"inf - inf = {inf - inf:g}, inf * 0 = {inf * 0:g}, 1 / inf = {1 / inf:g}")
assert (inf - inf).isnan()
assert (inf * 0).isnan()
assert ((inf - inf) * 0 + 1).isnan()

# %% [markdown]
# ## Underflow
#
# At the small end, precision does not end all at once. We round 1.7 times some powers of two to
# fp16, and print the relative error.

# %%
for exponent in (-10, -14, -18, -22, -24, -26):
    number = torch.tensor(1.7 * 2.0**exponent)
    rounded = number.half().float()
    error = ((rounded - number) / number).abs().item()
    print(f"1.7 x 2^{exponent}: {number:.3e} -> {rounded:.3e}   error {error:7.2%}")
assert rounded == 0
assert torch.tensor(2.0**-24).half() > 0
assert torch.tensor(2.0**-25).half() == 0  # a tie between 0 and 2^-24, and zero is the even side

# %% [markdown]
# Down to 2^-14 the error is 0.01 %, less than fp16's eps/2. Below, the number is subnormal and loses a
# bit with each power of two. At 2^-24 a single bit is left and the error is 17.65 %, and the last
# number has become zero. Some hardware gives up earlier: the matrix units of AMD's MI200,
# for one, [flush subnormal fp16 and bf16 numbers to
# zero](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html#reduced-precision-fp16-and-bf16-gemms-and-convolutions-on-amd-instinct-mi200-devices).
#
# ## Swamping
#
# Training adds many small updates to weights that are much larger. Suppose that a weight of 1 gets
# an update of 0.0001 a thousand times. It ought to end at 1.1. Before you run this: where does it
# end in bf16 and in fp16?


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

# %% [markdown]
# In both it ends at 1, where it began. The whole history makes a picture:

# %%
_ = figures.weight_over_updates(weights)

# %% [markdown]
# The solid line, fp32, climbs from 1 to 1.1. The dashed line of bf16 and the dotted line of fp16
# lie on top of each other and do not move at all. Each update was less than half the spacing at 1,
# so each was rounded away, a thousand times in a row. The next cell finds the limit.

# %%
for name in ("fp32", "fp16", "bf16"):
    half_spacing = LIMITS[name].eps / 2
    one = torch.ones((), dtype=FORMATS[name])
    print(f"{name}: an update of 1 / {1 / half_spacing:.0f} of the weight, or less, is lost")
    assert one + half_spacing == one
    assert one + 1.01 * half_spacing > one
    assert one - half_spacing / 2 == one  # below 1 the numbers lie half as far apart
    assert one - 1.01 * half_spacing / 2 < one

# %% [markdown]
# Added to 1, an update of 1/2048 is lost in fp16, and one of 1/256 is lost in bf16. (Downwards from 1
# the limit is half of that.) So **bf16 has about the
# range of fp32, but not its precision**: it usually needs no loss scaling, but it loses updates that
# are up to eight times as large as those that fp16 loses.
#
# ## Three techniques that make 16 bits work
#
# In 2018 Micikevicius and others showed in [*Mixed Precision
# Training*](https://arxiv.org/abs/1710.03740) how to train networks in fp16 to the accuracy of fp32. They
# use three techniques, two against swamping and one against underflow. We try each on a tiny example.
#
# ### 1. Master weights in fp32, against swamping
#
# The weights stay in fp32. The forward and the backward pass use a 16-bit copy, made anew for each
# step. The update goes to the fp32 weight, where small updates add up until the copy can see them.

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
# The same thousand updates now arrive. The copy stands still for about ten steps and then moves on
# by one spacing, so the steps saw 103 different copies. Autocast [works in this
# way](02_autocast_dtypes.ipynb#The-idea-in-five-lines): the parameters of the model stay
# in fp32, and are cast where they are needed. The price is that the weights take as much memory as before.
#
# ### 2. Loss scaling, against underflow
#
# We take 1024 examples with two classes, and a model that is right and confident about each, with
# logits 12 and 0. The gradient of the mean loss with respect to the second logit is the probability
# of the wrong class, about e^-12, divided by 1024. That is too small for fp16.


# %%
def wrong_class_gradient(loss_scale):
    """That gradient, as it arrives at fp16 logits, divided by the loss scale in fp32 afterwards."""
    logits = torch.tensor([[12.0, 0.0]]).repeat(1024, 1).half().requires_grad_()
    targets = torch.zeros(1024, dtype=torch.long)
    loss = nn.functional.cross_entropy(
        logits.float(), targets
    )  # in fp32, as a CPU's autocast has it
    (loss * loss_scale).backward()
    return logits.grad[0, 1].float() / loss_scale


expected = 1 / (1 + math.exp(12)) / 1024
unscaled, scaled = wrong_class_gradient(1), wrong_class_gradient(2**16)
print(f"expected {expected:.3e}, scale 1: {unscaled:.3e}, 2^16: {scaled:.3e}")
assert unscaled == 0
assert abs(scaled / expected - 1) < fp16.eps  # fp16 rounds once, by eps/2 at most; fp32 little

# %% [markdown]
# Without a scale the gradient becomes zero; with 2^16 it arrives as 5.999e-09, which is right to
# the precision of fp16. Backpropagation is linear: if we multiply the loss by 2^16, every gradient
# is 2^16 times as large on its way through fp16, and we divide by the same number in fp32
# afterwards. As 2^16 is a power of two, this costs no precision unless a scaled gradient overflows.
# [Notebook 03](03_grad_scaler_step_by_step.ipynb) shows how a good scale is found.
#
# ### 3. Products added up in fp32, against swamping in sums
#
# An element of a matrix product is a sum of products. The product of two fp16 numbers, with 11
# significant bits each, fits exactly into the 24 bits of fp32, so nothing is lost in multiplying there.
# Precision is lost in adding up, so that is the part to do in fp32. We add up 8192 products in fp16 and
# in fp32.

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
# The sum in fp32 is 2060.4, as it should be. The one in fp16 ends at 1626.0: the larger it gets,
# the more of the products it swamps. Does PyTorch's own product in fp16 have this problem?

# %%
product = a @ b
spacing = fp16.eps * 2.0 ** math.floor(math.log2(product))
print(f"a @ b = {product:.0f}, {product.dtype}; spacing there {spacing:g}")
assert product.dtype is torch.float16
assert abs(product.item() / exact - 1) < fp16.eps
assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
assert not torch.backends.cuda.matmul.allow_fp16_accumulation

# %% [markdown]
# Not here: 2060 is the exact sum, rounded to fp16 once at the end. According to PyTorch's notes on
# [numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) and on
# [CUDA](https://docs.pytorch.org/docs/stable/notes/cuda.html), the matrix units of GPUs usually work
# in the same way, with 16 bits coming in, fp32 inside, and 16 bits going out. For fp16 two switches loosen
# this on CUDA, and the cell asserts their defaults: `allow_fp16_reduced_precision_reduction`, which
# is on, lets *partial* sums be combined in fp16, and `allow_fp16_accumulation`, which is off, adds up
# in fp16 altogether. (bf16 has one of its own, `allow_bf16_reduced_precision_reduction`.) Sums, layer
# norms, softmax and most losses may leave fp16's range on the way, and autocast on CUDA runs them in
# fp32 ([notebook 02](02_autocast_dtypes.ipynb) shows how to ask for an op).
#
# ## The gradients of a real network
#
# Are gradients really that small? We let a small network learn scikit-learn's handwritten digits,
# in fp32 throughout, and look. Everything is drawn on the CPU and then moved to the device.

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
# Under autocast in fp16, most gradients with respect to the *activations* [pass through
# fp16](02_autocast_dtypes.ipynb#Backward:-no-autocast-there) in the backward pass, and what is lost in
# one layer is missing in the layers below it. So we look at those gradients. `retain_grad` keeps them
# for the output of every layer.


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
# We take all gradients that are not zero in fp32 already (ReLU makes many zeros), multiply them by
# a loss scale, round them to fp16, and count how many have become zero or subnormal. Before you run
# this: which share do you expect to lose without a scale?

# %% tags=["nbval-ignore-output"]
gradients = torch.cat([grad.flatten() for grad in trained]).cpu()
gradients = gradients[gradients != 0]
lost, subnormal = {}, {}
for loss_scale in (1, 2**8, 2**16):
    scaled = (gradients * loss_scale).half()
    assert scaled.isfinite().all()  # no overflow at any of these scales
    lost[loss_scale] = (scaled == 0).float().mean().item()
    subnormal[loss_scale] = ((scaled != 0) & (scaled.abs() < fp16.normal)).float().mean().item()
    error = ((scaled.float() / loss_scale - gradients).norm() / gradients.norm()).item()
    shares = f"{lost[loss_scale]:6.2%} zero, {subnormal[loss_scale]:6.2%} subnormal"
    print(f"scale {loss_scale:>5}: {shares}, error {error:.3%}")
assert lost[1] > 0.2 > lost[2**8] > lost[2**16]
assert lost[2**16] < 0.02
assert lost[1] + subnormal[1] > 0.9
assert (gradients.bfloat16() != 0).all()  # in bf16 nothing is lost, without any scale
assert torch.amp.GradScaler("cpu").get_scale() == 2**16

# %% [markdown]
# At scale 1 more than a third of the gradients are gone, and nearly all the others are subnormal. At
# 2^16, the scale that `torch.amp.GradScaler` starts with, fewer than two in a hundred are lost. The
# exact shares may differ between devices; the asserts leave room for that. bf16 loses none, so it
# needs no scaler here. The picture shows why.

# %%
_ = figures.gradients_against_fp16(gradients.abs().log2(), scales=(1, 2**16))

# %% [markdown]
# These are two histograms of log2|gradient|, drawn over the range of fp16: what lies in the dark
# area on the left becomes zero, the lighter grey is subnormal, white is normal, and the dark area
# on the right is infinite. At scale 1 (above), nearly all gradients lie in the two grey areas on
# the left. Scaling by 2^16 (below) moves all of them 16 places to the
# right and changes nothing else.
#
# The last column printed above the picture is the error: the norm of all differences, divided by
# the norm of all gradients. It stays below a tenth of a percent even at scale 1, since the
# gradients that vanish are the smallest ones. So a network like this may well train without a
# scale. But a weight that gets *only* gradients that vanish learns nothing then, and what becomes zero
# in one layer is lost for the layers below. [The paper](https://arxiv.org/abs/1710.03740) reports
# an object detector that diverged in fp16 without loss scaling, and did as well as in fp32 with a scale of 8.
#
# ### Why they are so small
#
# For the mean cross-entropy, the gradient with respect to the logits is simple. It is the predicted
# probability, minus 1 for the right class, divided by the size of the batch.

# %%
wanted = (logits.softmax(dim=1) - nn.functional.one_hot(targets, 10)) / len(targets)
# p - 1 cancels when p is near 1, and leaves the rounding error of 1, about 1e-7, divided by 1024.
torch.testing.assert_close(trained[-1], wanted, rtol=1e-4, atol=2e-10)

# %% [markdown]
# So there are two reasons. The mean over 1024 examples divides by 2^10, before training as well. And
# as the network becomes confident, the probabilities of the wrong classes fall towards zero, and
# the gradients with them. To see how much each contributes, we print the median gradient before and
# after training, as a power of two.

# %% tags=["nbval-ignore-output"]
medians = {}
for stage, grads in (("untrained", untrained), ("trained", trained)):
    of_mean = grads[-1][grads[-1] != 0].abs().cpu()
    for what, values in (("mean", of_mean), ("sum", of_mean * len(targets))):
        medians[stage, what] = values.median().log2().item()
        print(f"{stage:<9}  {what:<4} over the batch: median 2^{medians[stage, what]:.1f}")
assert medians["trained", "mean"] < medians["untrained", "mean"] - 10

# %% [markdown]
# The mean costs ten powers of two. Training cost about seventeen more here, from 2^-13.3 to 2^-30.0.
# That is one reason why a loss scale is not chosen once and for all, but adjusted while training.
#
# ## FP8 overflows in two ways (optional)
#
# AMP stops at 16 bits; for training in fp8 you take a library that was made for it, such as
# [torchao](15_below_16_bits.ipynb). But since you will meet both fp8 formats, it is worth knowing how they
# overflow. With 8 bits there are 256 patterns, few enough to look at all of them.

# %%
for name in ("fp8 E5M2", "fp8 E4M3"):
    every = torch.arange(256, dtype=torch.uint8).view(FORMATS[name]).float()
    counts = f"{every.isinf().sum()} infinities, {every.isnan().sum()} NaNs"
    print(f"{name}: {counts}, largest {LIMITS[name].largest:g}")
    assert every[every.isfinite()].max() == LIMITS[name].largest
    assert every.isinf().any() == (name == "fp8 E5M2")

# %% [markdown]
# E5M2 has infinities, like its larger relatives. E4M3 [gives up](https://arxiv.org/abs/2209.05433)
# infinity, and all but one NaN of each sign, in order to reach 448. So what happens to numbers beyond
# 448?

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
# The torch that made this page *saturates*: everything that is too large becomes 448, infinity
# included, so that **an overflow leaves no trace**. Up to 2.12 such a cast in eager mode gave [NaN for
# anything above 464](https://github.com/pytorch/pytorch/pull/178817). If your code should mean the same
# everywhere, clamp first. Better still, choose a scale for each tensor so that nothing has to be clamped:

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

# %% [markdown]
# Clamping turned -3000 into -448. Scaled by its largest magnitude, the whole tensor fits, and each
# value comes back within eps/2.
#
# ## Summary
#
# We took six formats apart, and each is a range and a spacing. From widest to narrowest, with the
# precision in decimal digits, which is log10(2 / eps), they are:

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
# They fail in three ways, and you can now say in advance which format fails in which:
#
# | failure | what happens | who suffers most | what helps |
# |---|---|---|---|
# | overflow | a number is too large and becomes infinite, and often NaN later (in E4M3: 448 or NaN) | fp16, fp8 | bf16, or fp32 for that op |
# | underflow | a number is too small, loses bits and then becomes zero | fp16, fp8 | loss scaling, or bf16 |
# | swamping | a small number is lost when it is added to a large one | bf16 more than fp16, and fp8 most of all | fp32 master weights and fp32 sums |
#
# Mixed precision puts the remedies together: weights and sums in fp32, products in 16 bits, and a
# loss scale for fp16. Of the [gradients of our network](#The-gradients-of-a-real-network) that were not zero, fp16 without a scale lost
# more than a third, with a scale of 2^16 fewer than two in a hundred, and bf16 lost none.
#
# Next: [notebook 02](02_autocast_dtypes.ipynb) shows how autocast decides which op runs in which
# format.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("01_number_formats")

# %% [markdown]
# ### 1. Which whole number is missing?
#
# fp16 holds every whole number up to 2048, and 2049 is the first that it does not have. Work out on
# paper which is the first positive whole number that bf16 does not have.

# %%
first_missing_in_bf16 = ...
exercises.check_first_missing(first_missing_in_bf16)

# %% [markdown]
# <details><summary>Hint</summary>
#
# bf16's eps is 2^-7, and the spacing doubles at each power of two. From which power of two on is it
# larger than 1?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# first_missing_in_bf16 = 257
# ```
#
# From 128 to 256 the spacing is 128 times 2^-7, which is 1. From 256 on it is 2, so 257 is missing.
# In fp16 the same happens at 2048, with an eps of 2^-10.
#
# </details>
#
# ### 2. Where does the sum stop?
#
# We start from 0 in fp16 and add 0.1 ten thousand times, rounding each sum to fp16. The sum stops
# growing long before it reaches 1000. At which number does it stop?

# %%
sum_stops_at = ...
exercises.check_sum_stops(sum_stops_at)

# %% [markdown]
# <details><summary>Hint</summary>
#
# 0.1 is lost as soon as it is less than half the spacing. The spacing of fp16 at 2^n is 2^(n-10).
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# sum_stops_at = 256
# ```
#
# Between 128 and 256 the spacing is 0.125, and half of it is less than 0.1, so the sum still grows.
# From 256 on the spacing is 0.25, half of it is 0.125, and 0.1 is rounded away.
#
# </details>
#
# ### 3. Repair a length
#
# This function takes an fp16 vector and returns its length in fp32. For `[300, 400]` it returns
# infinity instead of 500:
#
# ```python
# def length(vector):
#     return (vector * vector).sum().sqrt().float()
# ```
#
# Write it so that neither large nor small components go wrong.


# %%
def length(vector):
    return ...  # the length of an fp16 vector, as a number in fp32


exercises.check_length(length)

# %% [markdown]
# <details><summary>Hint</summary>
#
# 300 times 300 is 90000, which is more than 65504. In which op does the first infinity appear, and
# which dtype does that op compute in?
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
# Squaring doubles the exponent, so the squares overflow from 256 on and become zero below about
# 2^-12.5. In fp32 the square of every fp16 number fits.
#
# </details>
#
# ### 4. Find the largest scale
#
# Complete `largest_scale`: the largest power of two by which you can multiply these fp32 gradients
# so that none of them overflows when they are rounded to fp16. It may be smaller than 1.


# %%
def largest_scale(gradients):
    return ...


exercises.check_largest_scale(largest_scale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Only the largest magnitude matters, and negative gradients overflow as well. Double the scale, or
# take a logarithm and round it down.
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
# A `GradScaler` searches in the same way, but by trying: it doubles the scale from time to time,
# and halves it when something overflowed.
#
# </details>
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
# - [`torch.finfo`](https://docs.pytorch.org/docs/stable/type_info.html): the limits of a dtype.
# - [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html) in
#   PyTorch: TF32, reduced precision in sums, and subnormal numbers on AMD's MI200.
# - [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html) in PyTorch: the switches
#   for sums in fp16 and bf16, and for TF32.
