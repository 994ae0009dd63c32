# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose your precision for a card, a task and a framework
#
# **What you'll do.** Measure what this machine does to values. Write the decision down as a function
# and ask it about cards that are not here. Look at what PyTorch's fp32 modes and the settings of
# other frameworks really do to weights, gradients and outputs.
#
# **What you'll learn.**
# - which precision to begin with, on which hardware, for training and for inference;
# - what `highest`, `high` and `medium` change, and what they leave alone;
# - what a model that was trained in bf16 needs on a card that has none;
# - what Lightning, accelerate, transformers and Keras mean by "mixed", "true" and "bf16".
#
# **What you need.** [Notebook 00](00_start_here.ipynb); for the why,
# [notebook 01](01_number_formats.ipynb). Nothing here needs a GPU.

# %% tags=["nbval-ignore-output"]
import importlib
import inspect
import logging
import warnings
from unittest import mock

import torch
from torch import nn

from amp_lab import describe_device
from amp_lab.notebook import start
from exercises.choose_your_precision import check_bits, check_cases, check_outputs, check_scale_down

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## The idea in five lines
#
# Which precision is fast is a question to the hardware, and the surest way to an answer is to ask
# it. `describe_device` times a matrix product in each precision, and it also multiplies numbers
# whose product is known. Before you run this: what do you expect of your machine?

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
# The *bits* are what is left of an input, *subnormals* are the numbers too small to have all of
# them, and the last figure is the largest error of a sum of 4,096 products, in units of the last
# place of the result (*ulp*). Half a unit means that the sum was kept in a wider format and rounded once,
# which is what 16-bit products rely on. `amp-lab doctor` prints the same with the speeds.
#
# ## The decision
#
# For machines that are not here, this is what each multiplies *fast*, with tensor cores or their
# like. What is missing from a set is still possible, but slow or emulated:

# %%
CARDS = {
    "GTX 10, GTX 16": set(),
    "V100, T4, RTX 20": {"fp16"},
    "A100, A10, RTX 30": {"fp16", "bf16", "tf32"},
    "L4, L40S, RTX 40, H100, H200": {"fp16", "bf16", "tf32", "fp8"},
    "B200, RTX 50": {"fp16", "bf16", "tf32", "fp8", "mxfp8", "nvfp4"},
    "MI210, MI250": {"fp16", "bf16"},
    "MI300": {"fp16", "bf16", "tf32", "fp8"},
    "MI350": {"fp16", "bf16", "fp8", "mxfp8"},
    "Arc": {"fp16", "bf16"},
    "Apple M": set(),  # 16 bits are hardly faster there
    "CPU with AMX, AVX-512 BF16 or Arm's BF16": {"bf16"},
    "another CPU": set(),
}


# %%
def choose(fast, task, trained_in="fp32"):
    """What to begin with on a device; the task is "train", "infer" or "exact"."""
    if task == "exact":
        return "fp32 with TF32 off"
    form = "bf16" if "bf16" in fast else "fp16" if "fp16" in fast else "fp32"
    if form == "fp16" and trained_in == "bf16":
        return "fp16 if its largest values fit, else fp32"
    if form == "fp32":
        return "fp32"
    helper = ", with GradScaler" if form == "fp16" else ""
    return f"{form} under autocast{helper}" if task == "train" else f"{form}, cast once"


# %%
for name, fast in CARDS.items():
    print(f"{name:<42} train: {choose(fast, 'train'):<38} infer: {choose(fast, 'infer')}")
assert choose(CARDS["V100, T4, RTX 20"], "train") == "fp16 under autocast, with GradScaler"

# %% [markdown]
# Read it from the top: **bf16 wherever it is fast**, because it has the range of fp32 and so needs
# no scaler; **fp16 with a scaler** on the cards that have nothing else; **fp32** where nothing is
# faster, and where digits matter more than time (solvers, statistics, small differences of large
# numbers). Training keeps fp32 weights and casts under autocast. Inference may cast the weights
# once, which halves them ([notebook 18](18_inference_and_export.ipynb)).
#
# The choice is where you *begin*. Then measure: small layers gain nothing from any format, and
# `amp-lab advise` tries all of them on your model, here ([notebook 10](10_speed_ladder.ipynb)). Go
# below 16 bits only when the products are large ([notebook 15](15_below_16_bits.ipynb)). If it does
# not *fit*, change something else first:
#
# | what takes the memory | what helps |
# |---|---|
# | activations | autocast, checkpointing ([07](07_training_recipes.ipynb)), a smaller batch with accumulation |
# | weights and optimizer state | a leaner optimizer ([16](16_low_precision_state.ipynb)), sharding ([11](11_scale_out.ipynb)), training adapters alone |
# | weights at inference | cast once, then eight bits ([18](18_inference_and_export.ipynb)) |
#
# `amp-lab memory` forecasts which of them it is.
#
# ## What to know of each kind
#
# | hardware | what surprises its users |
# |---|---|
# | GTX 16 | fp16 gives NaN in some models ([pytorch 58123](https://github.com/pytorch/pytorch/issues/58123), [77955](https://github.com/pytorch/pytorch/issues/77955)): use fp32 |
# | V100, T4, RTX 20 | bf16 runs, but is emulated; TF32 does not exist |
# | RTX 30, RTX 40 | sums of fp16 products in fp32 run at half the rate of sums in fp16 ([NVIDIA](https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf)), and PyTorch takes fp32 |
# | MI210, MI250 | products in 16 bits take subnormals as 0, which costs fp16 gradients: use bf16 ([PyTorch](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html)) |
# | MI300 | its FP8 is *fnuz*, half of what the same bits mean elsewhere ([15](15_below_16_bits.ipynb)) |
# | Arc A | has no float64, which `GradScaler` needs: use bf16 ([pytorch 147731](https://github.com/pytorch/pytorch/issues/147731)) |
# | Apple M | 16 bits save memory more than time; bf16 needs macOS 14 ([pytorch 139386](https://github.com/pytorch/pytorch/issues/139386)), and M1 and M2 emulate it ([transformers 40458](https://github.com/huggingface/transformers/pull/40458)) |
# | CPUs | fp16 can be a hundred times slower than fp32, or as fast: `amp-lab doctor` |
#
# Three of these can be looked at from here. First, PyTorch says that a Turing card supports bf16,
# since it asks whether a tensor can be made, and not whether it is fast:

# %%
turing = mock.Mock(major=7, minor=5)
with (
    mock.patch("torch.cuda.is_available", return_value=True),
    mock.patch("torch.cuda.current_device", return_value=0),
    mock.patch("torch.cuda.get_device_properties", return_value=turing),
    mock.patch("torch.cuda._check_bf16_tensor_supported", return_value=True),  # the tensor is made
    mock.patch("torch.version.hip", None),
):
    says = torch.cuda.is_bf16_supported()
    means = torch.cuda.is_bf16_supported(including_emulation=False)
print(f"Turing: is_bf16_supported() is {says}, without emulation {means}")
assert (says, means) == (True, False)

# %% [markdown]
# `including_emulation=False` is the question that you mean. Second, why subnormals matter: these
# are gradients of an ordinary size, as fp16 holds them with and without subnormal numbers, and as
# bf16 holds them:

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
# Nearly all of them would be gone; a loss scale helps, and bf16 needs no help. Third, the float64
# in `GradScaler`:

# %%
source = inspect.getsource(torch.amp.GradScaler.unscale_)
line = next(line.strip() for line in source.splitlines() if ".double()" in line)
print(line)
assert "reciprocal" in line

# %% [markdown]
# Without a scaler there is no such line: bf16 runs on Arc.
#
# ## What fp32 means
#
# Since Ampere, NVIDIA's cards can multiply fp32 tensors as **TF32**: the inputs keep 11 bits of
# their 24. Whether they do is a mode of the process, and matrix products and convolutions have one
# each:
#
# | `set_float32_matmul_precision` | matrix products of fp32 tensors on CUDA | convolutions |
# |---|---|---|
# | `"highest"`, the default | fp32 | TF32, as before |
# | `"high"` | TF32 | TF32, as before |
# | `"medium"` | TF32 (bf16 on CPUs that have it) | TF32, as before |
#
# So by default fp32 *convolutions* are TF32 on such a card, and `"highest"` does not change that.
# We can read the modes without a card:


# %%
def modes():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    return matmul.fp32_precision, conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


before = torch.get_float32_matmul_precision()
for name in ("highest", "high", "medium"):
    torch.set_float32_matmul_precision(name)
    print(f"{name:<8} CUDA's products {modes()[0]}, convolutions {modes()[1]}, CPU's {modes()[2]}")
    assert modes()[:2] == ("ieee" if name == "highest" else "tf32", "tf32")
torch.set_float32_matmul_precision(before)

# %% [markdown]
# None of it touches tensors of 16 bits, nor ops that are no product. Training in fp32 on an A100 or
# later usually wants `"high"`, and work that needs every digit wants both switched off:
# `torch.set_float32_matmul_precision("highest")` and `torch.backends.cudnn.conv.fp32_precision =
# "ieee"`.
#
# ### Old names and new ones
#
# The modes have had several names. Whoever sets a new one and reads an old one gets an error, also
# if the reader is another library (`torch.compile` reads the old one):

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
# `torch.set_float32_matmul_precision` sets old and new names alike and upsets nobody. Use it for
# products, and one line at the top of a program.
#
# ## Trained in bf16, on a card without it
#
# Most language models of today were trained in bf16, whose largest number is 3.4e38. fp16 ends at
# 65504, and a model that never had to stay below may not. Here is one with a hidden layer whose
# values reach a million. Its weights fit into fp16, and so do its inputs and outputs:

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
with torch.no_grad():
    model[0].weight.mul_(2**20)
    model[0].bias.mul_(2**20)
    model[2].weight.mul_(2**-20)
x = torch.rand(16, 32)


def largest_values(model, x):
    """The largest magnitude that each layer returns, by name, in fp32."""
    found = {}
    for name, layer in model.named_children():
        x = layer(x)
        found[name] = x.abs().max().item()
    return found


with torch.inference_mode():
    print({name: f"{value:.3g}" for name, value in largest_values(model, x).items()})
    print("in bf16:", model.bfloat16()(x.bfloat16())[0, :3].tolist())
    print("in fp16:", model.half()(x.half())[0, :3].tolist())

# %% [markdown]
# In fp16 the first layer is infinite already, and the outputs are infinite or NaN. (And the small
# weights of the last layer became subnormal or 0 on the way: a cast to fp16 loses at both ends.)
# So **look before you cast**: run some batches in fp32 with hooks, and compare the largest value of
# each layer with 65504. `amp-lab export --dtype fp16` refuses such a model.
#
# What then? Keep the layers in fp32 that exceed the range, and the rest in fp16. Or move a power of
# two from one layer into the next, which is exact, and possible wherever nothing but ReLU lies
# between them:

# %%
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
torch.manual_seed(0)
for layer in (model[0], model[2]):
    layer.reset_parameters()
with torch.inference_mode():
    wanted = model(x)
    for tensor, factor in ((model[0].weight, 20), (model[0].bias, 20), (model[2].weight, -20)):
        tensor.mul_(2.0**factor)  # the model from above
    assert torch.equal(model(x), wanted)  # computes the same
    for tensor, factor in ((model[0].weight, -20), (model[0].bias, -20), (model[2].weight, 20)):
        tensor.mul_(2.0**factor)  # and moved back
    off = (model.half()(x.half()).float() - wanted).abs().max().item()
print(f"in fp16 it is {off:.1e} off now")
assert off < 2e-3

# %% [markdown]
# ## What frameworks call it
#
# Two words decide: **mixed** means fp32 weights under autocast, and **true** means that the model
# itself is cast, with gradients and the optimizer's state. This looks at what really happens, with
# a hook and after a step:


# %%
def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def look(model, optimizer, step):
    """The dtypes of weights, products, gradients, state and outputs in a step of a model."""
    seen = {}

    def note(layer, given, output):
        seen["products"] = output.dtype

    hook = model[0].register_forward_hook(note)
    output, weight = step(), model[0].weight
    hook.remove()
    state = optimizer.state[weight]["exp_avg"]
    found = weight.dtype, seen["products"], weight.grad.dtype, state.dtype, output.dtype
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
# Under autocast only the products and what follows them are bf16. A model that is cast has nothing
# in fp32 to update, and bf16 weights can stand still
# ([notebook 16](16_low_precision_state.ipynb) has the cure). Now accelerate and Lightning's Fabric,
# if they are installed:


# %%
def accelerated(setting):
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # it keeps its first setting for ever
    accelerator = accelerate.Accelerator(mixed_precision=setting, cpu=True)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, stepping = accelerator.prepare(model, optimizer)

    def step():
        output = wrapped(batch)
        accelerator.backward(output.float().square().mean())
        stepping.step()
        return output

    return look(model, stepping.optimizer, step)


# %%
def with_fabric(setting):
    library = importlib.import_module("lightning_fabric")
    fabric = library.Fabric(accelerator="cpu", precision=setting)
    model = tiny()
    wrapped, stepping = fabric.setup(model, torch.optim.AdamW(model.parameters()))

    def step():
        output = wrapped(batch)
        fabric.backward(output.float().square().mean())
        stepping.step()
        return output

    return look(model, stepping.optimizer, step)


# %% tags=["nbval-ignore-output"]
bf, fp = "bfloat16", "float32"
expected = {
    (accelerated, "bf16"): (fp, bf, fp, fp, fp),
    (accelerated, "fp16"): (fp, fp, fp, fp, fp),  # on a CPU
    (with_fabric, "bf16-mixed"): (fp, bf, fp, fp, fp),
    (with_fabric, "16-mixed"): (fp, bf, fp, fp, fp),  # on a CPU
    (with_fabric, "bf16-true"): (bf, bf, bf, bf, fp),
}
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")  # Fabric's, of 16-mixed on a CPU: the next lines say it
for (run, setting), row in expected.items():
    try:
        found = run(setting)
    except ImportError as error:
        print(f"left out: {error}")
        continue
    print(f"{run.__name__:<12}{setting:<12}", *(f"{dtype:<10}" for dtype in found))
    assert found == row
logging.disable(logging.NOTSET)

# %% [markdown]
# Both return *fp32* from the model that they wrap, whatever it computed in. And two settings do
# something else than they say: on a CPU Fabric's `16-mixed` computes in bf16, and warns, and
# accelerate's `fp16` computes in fp32, without a word.
#
# In full, as the tests of this notebook check it with hooks on the same model, on a CPU:
#
# | setting | weights | products | gradients | state | outputs |
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
# Mind the ninth row: since version 5, `from_pretrained` of transformers loads a model in the dtype
# that it was saved in, which for most is bf16, so fine-tuning has no fp32 weights unless you ask
# with `dtype=torch.float32`. A saved Keras model keeps its policy; to change it, build the model
# anew under another and load the weights ([notebook 12](12_keras.ipynb)).
#
# What could not be run here, by their documentation:
#
# | setting | what it does |
# |---|---|
# | DeepSpeed `"bf16": {"enabled": true}` | bf16 weights and products; fp32 master weights and state in ZeRO; gradients accumulate in `grad_accum_dtype` ([settings](https://www.deepspeed.ai/docs/config-json/)) |
# | torchtitan `mixed_precision_param`, `mixed_precision_reduce` | FSDP2's policy: fp32 weights, products in the first, gradients summed in the second ([11](11_scale_out.ipynb)) |
# | torchtune `dtype: bf16` | all of it in bf16, as `model.to(torch.bfloat16)` |
# | JAX with Flax | no autocast: each layer has `dtype` for products and `param_dtype` for weights |
#
# ## Summary
#
# - Begin with bf16 wherever the hardware multiplies it fast, with fp16 and a scaler where only
#   that is fast, and with fp32 elsewhere. Then measure your own model.
# - By default fp32 products are fp32 and fp32 convolutions may be TF32. Set the mode with
#   `torch.set_float32_matmul_precision`, once.
# - Before a bf16 model goes to fp16, look at its largest values.
# - "Mixed" keeps fp32 weights, and "true" does not. Which dtype a framework returns is worth a look.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.
#
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
    "train on an MI250": ...,
    "serve on a CPU with AMX": ...,
    "train on a laptop's CPU with AVX2 alone": ...,
}
check_cases(answers)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Find the card in `CARDS`, and read the table of surprises too.
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
#     "train on an MI250": "bf16 under autocast",
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


check_bits(bits_left)

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
check_outputs(outputs)

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
# layer, ReLU and linear layer into the last one, in place, so that the hidden values for `x` stay
# at or below 1024 and the outputs remain the same. The model's own hidden values are larger.


# %%
def scale_down(model, x):
    return ...


check_scale_down(scale_down)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The largest hidden value divided by 1024 is what has to go; round its logarithm up. The bias of the
# first layer has to shrink with its weight.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def scale_down(model, x):
#     first, relu, last = model
#     with torch.no_grad():
#         factor = (relu(first(x)).max() / 1024).log2().ceil().exp2()
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
