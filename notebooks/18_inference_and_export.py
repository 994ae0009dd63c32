# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Serve and export a model in reduced precision
#
# **What you'll do.** Run a trained network in bf16 in three ways, count how many of its decisions
# change and find out which, then compile it, export it, and store its weights in eight bits.
#
# **What you'll learn.**
# - when to cast the weights once, and when autocast is the better choice;
# - how to tell whether a lower precision is good enough for *your* model;
# - what makes `torch.compile` compile again, and how its bf16 differs from eager's;
# - what `torch.export` keeps of autocast, and why you cast before you export.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb), on what autocast does. Nothing here
# needs a GPU.

# %% tags=["nbval-ignore-output"]
import copy
import functools
import importlib
import io
import tempfile
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from course import figures, start

from amp_lab import compare
from amp_lab.formats import quantize

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We need a network that has learned something, so that its decisions mean something: a small one
# for scikit-learn's handwritten digits, with three convolutions.

# %%
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32, device=device)[:, None]
labels = torch.tensor(digits.target, device=device)  # images: (1797, 1, 8, 8)


def block(inner, outer):
    convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU())


def network():
    features = [block(1, 32), block(32, 64), nn.MaxPool2d(2), block(64, 64)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
model = network().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range({"quick": 100, "full": 500}[scale]):
    of_batch = torch.randint(0, 1400, (128,)).to(device)  # the last 397 are for the test
    loss = F.cross_entropy(model(images[of_batch]), labels[of_batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
tests = images[1400:]  # what the model has not seen: of the others it is surer than of any new one
with torch.inference_mode():
    in_fp32 = model(tests)
right = (in_fp32.argmax(1) == labels[1400:]).float().mean().item()
print(f"{right:.1%} of the {len(tests)} test images are recognised in fp32")
assert right > 0.9

# %% [markdown]
# Now the five lines. We cast a copy of the model and its input to bf16, which has two to three
# decimal digits. Before you run this: how many of the decisions will change?

# %% tags=["nbval-ignore-output"]
served = copy.deepcopy(model).bfloat16()
with torch.inference_mode():
    logits = served(tests.bfloat16()).float()
changed = int((logits.argmax(1) != in_fp32.argmax(1)).sum())
print(f"{changed} of {len(tests)} decisions changed")
assert changed < 0.02 * len(tests)

# %% [markdown]
# Hardly any. To judge a precision for inference, count decisions (or whatever your users see), and
# not digits, and count them on inputs that the model was not trained on.
#
# ## Ways to run it
#
# **Autocast** leaves the weights in fp32 and casts what it multiplies in each call. It keeps some
# sensitive ops in fp32 by a list of its own, which [notebook 02](02_autocast_dtypes.ipynb) shows,
# and it is what you train with. **Cast once** halves the memory of the weights and saves their
# casts, and then you have to take care of inputs and of sensitive parts yourself. Either of them
# can be **compiled**, which can join the small ops between the products.


# %%
def autocast(x):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return model(x)


def cast_once(x):
    return served(x.bfloat16())


compiled = torch.compile(served)


def cast_once_compiled(x):
    return compiled(x.bfloat16())


WAYS = {
    "fp32": model,
    "fp32 compiled": torch.compile(model),
    "bf16 autocast": autocast,
    "bf16 cast once": cast_once,
    "bf16 compiled": cast_once_compiled,
}


# %%
def quality(logits):
    """How far outputs are off, and how many decisions changed."""
    off = ((logits.float() - in_fp32).norm() / in_fp32.norm()).item()
    return off, int((logits.argmax(1) != in_fp32.argmax(1)).sum())


# %% tags=["nbval-ignore-output"]
outputs = {}
for name, run in WAYS.items():
    began = time.perf_counter()
    with torch.inference_mode():
        outputs[name] = run(tests).float()
    off, changed = quality(outputs[name])  # which waits for the device
    first_s = time.perf_counter() - began
    print(f"{name:<15} {off:.2%} off, {changed} decisions changed; first call {first_s:.1f} s")
    assert off < 0.02
    assert changed < 0.02 * len(tests)
with torch.inference_mode():
    in_fp16 = copy.deepcopy(model).half()(tests.half())
off, changed = quality(in_fp16)
print(f"fp16 cast once  {off:.2%} off, {changed} decisions changed")
assert off < quality(outputs["bf16 cast once"])[0]

# %% [markdown]
# All of them are off by less than two percent, and fp16 by much less, since it has three more bits
# of mantissa than bf16. In inference there are no gradients to underflow, so fp16 is the closer
# choice wherever weights and activations fit its range. Those of a model that was trained in bf16
# may not ([notebook 19](19_choose_your_precision.ipynb)).
#
# The first call of a compiled model takes longer, because it is compiled then, or loaded [from the
# disk](https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html). How long do the
# ways take after that, for one image and for many?

# %% tags=["nbval-ignore-output"]
for batch in (1, 256):
    calls = {name: functools.partial(run, images[:batch].clone()) for name, run in WAYS.items()}
    with torch.inference_mode():
        times = compare(calls, device=device, budget_s=4, warmup=3)
    print(f"{batch} at a time\n{times}")
    # No data sheet gives bf16 products more than 32 times the rate of fp32 ones.
    assert not times.ratio("fp32 compiled", "bf16 compiled").is_above(32)

# %% [markdown]
# The ratios say how many times as fast as fp32 each way is. On our two CPU cores bf16 took longer
# than fp32 for a single image, even with no weights left to cast, so the casts of weights are not
# the only cause. With 256 images at a time it gained, and most of all when it was compiled. Compare
# the compiled bf16 with the *compiled* fp32 if you want to know what bf16 alone buys. `amp-lab advise`
# tries such ways on [a model of yours](../docs/your_model.md).
#
# ## Which decisions change?
#
# A decision can change if the gap between the two best classes is smaller than what the lower
# precision does to it. So we compare the two for each image:

# %% tags=["nbval-ignore-output"]
best = in_fp32.topk(2, dim=1)
gap = (best.values[:, 0] - best.values[:, 1]).cpu()


def moved(name):
    """How far the gap between fp32's two best classes moved."""
    first, second = (outputs[name].gather(1, best.indices[:, i : i + 1]) for i in (0, 1))
    return ((first - second)[:, 0].cpu() - gap).abs()


_ = figures.gap_and_change(gap, {name: moved(name) for name in ("bf16 autocast", "bf16 cast once")})
for name in ("bf16 autocast", "bf16 cast once"):
    flipped = outputs[name].argmax(1).cpu() != best.indices[:, 0].cpu()
    to_second = outputs[name].argmax(1).cpu() == best.indices[:, 1].cpu()
    assert (moved(name)[flipped & to_second] >= gap[flipped & to_second] * 0.99).all()

# %% [markdown]
# Each point is a test image in one of two ways: the x-axis is fp32's gap between its two best
# classes, and the y-axis how far bf16 moved that gap. Only points on the dashed line or above it
# can change their decision (unless a third class overtakes both, which takes three that are nearly
# equal). These are mostly images that fp32 itself was not sure about. Draw this picture for your
# own model and some hundred real inputs: if the cloud keeps clear of the line, the precision is
# good enough for these decisions.
#
# ## What to take care of when you cast
#
# **Inputs** have to be cast too. If they are not, a convolution tells you:

# %% tags=["nbval-ignore-output"]
refused = ""
try:
    served(tests[:2])
except RuntimeError as error:
    refused = str(error)
print(refused[:100])
assert refused

# %% [markdown]
# **Outputs** that you compare, sort or add up become fp32 first: `.float()`. And some **parts** of
# a model may need fp32 all the way. A typical case is a comparison of many scores that are nearly
# equal. Here we look for the most similar image by the features before the last layer, as a search
# does. Before you run this: how often does bf16 find another neighbour?


# %%
def neighbours(dtype, compared_in):
    """The most similar other image of each, and whether two were equally similar."""
    with torch.inference_mode():
        features = F.normalize(model[:-1](images), dim=1).to(dtype).to(compared_in)
        similar = (features @ features.T).fill_diagonal_(-1)
    two = similar.topk(2, dim=1)
    return two.indices[:, 0], two.values[:, 0] == two.values[:, 1]


# %% tags=["nbval-ignore-output"]
fp32, bf16 = torch.float32, torch.bfloat16
exact, _ = neighbours(fp32, fp32)
other = {}
for what, dtypes in (("bf16", (bf16, bf16)), ("bf16 features, compared in fp32", (bf16, fp32))):
    found, tied = neighbours(*dtypes)
    other[what] = (found != exact).float().mean().item()
    ties = tied.float().mean().item()
    print(f"{what}: another neighbour for {other[what]:.0%} of the images, {ties:.0%} are ties")
assert other["bf16"] > 2 * other["bf16 features, compared in fp32"] > 0

# %% [markdown]
# Just below 1 bf16's numbers are 1/256 apart, so that many searches end in a tie. A comparison in
# fp32 ends the ties. Some searches still find another
# neighbour, because the features themselves were rounded: compute and keep them in fp32 if such a
# difference matters to you.
#
# **Batch norm** can be folded into the convolution right before it, since in inference it is a
# factor and an offset for each channel. Fold in fp32, and cast afterwards:


# %%
def folded(model):
    """A copy in which each convolution has taken up the batch norm behind it."""
    model = copy.deepcopy(model)
    for module in model:
        if isinstance(module, nn.Sequential):
            module[0], module[1] = fuse_conv_bn_eval(module[0], module[1]), nn.Identity()
    return model


# %% tags=["nbval-ignore-output"]
with torch.inference_mode():
    exact = folded(model)(tests)
    late = folded(model).bfloat16()(tests.bfloat16())
    early = folded(copy.deepcopy(model).bfloat16())(tests.bfloat16())
for name, logits in (("fp32", exact), ("folded, then cast", late), ("cast, then folded", early)):
    off, changed = quality(logits)
    print(f"{name:<18} outputs {off:.2g} off, {changed} decisions changed")
assert quality(exact)[0] < (1e-5 if device.type == "cpu" else 1e-2)  # a GPU may use TF32
assert quality(late)[0] < quality(early)[0]

# %% [markdown]
# In fp32 folding hardly changes the outputs. If you cast first, the statistics and the weights are
# rounded before they are multiplied, and the product is rounded once more.
#
# ## What torch.compile does to it
#
# A function is compiled at its first call, and again when a call does not fit what is there. We count how often,
# with a back-end of our own that only counts:


# %%
class Counting:
    """A back-end of `torch.compile` that counts, and runs the graph as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


# %%
counting = Counting()
torch.compiler.reset()
counted = torch.compile(model, backend=counting)
seen = {}
with torch.inference_mode():
    for batch in (4, 4, 5, 6, 1):
        counted(images[:batch])
        seen[f"batch of {batch}"] = counting.count
    with torch.autocast(device.type, dtype=torch.bfloat16):
        counted(images[:7])
    seen["under autocast"] = counting.count
counted(images[:7])
seen["with gradients"] = counting.count
print(seen)
assert list(seen.values()) == [1, 2, 2, 3, 4, 5]

# %% [markdown]
# The second size of the batch compiles it once more, for any size from 2 on; a batch of 1 gets a
# program of its own. Autocast on or off is a different function, and so is one that records
# gradients. A service that mixes these pays for each of them once: decide on one, and run it once
# before the first user comes. Mark a size as changing with `torch._dynamo.mark_dynamic`, and make
# it an error to compile again with `torch.compiler.set_stance("fail_on_recompile")`. <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# Two things can differ between a compiled model and an eager one in bf16. The first is the cache of
# autocast. Outside of `inference_mode`, eager mode casts a trained weight once for each autocast
# block. A compiled layer that is called several times in a block casts it in each call. If
# gradients are recorded, the copies are kept, and so we can count them:


# %%
def copies_kept(layer):
    """bf16 copies of a 256 x 256 weight that 16 calls in one autocast block keep."""
    copies = {}

    def note(tensor):
        if tensor.dtype is torch.bfloat16 and tensor.shape == (256, 256):
            copies[tensor.untyped_storage()._cdata] = tensor  # alive, so no address comes twice
        return tensor

    x = torch.randn(4, 256, device=device, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast(device.type, dtype=torch.bfloat16):
        for _ in range(16):
            x = layer(x)
    return len(copies)


# %%
layer = nn.Linear(256, 256, device=device)
in_graph = torch.compile(layer, backend="aot_eager")
with torch.autocast(device.type, dtype=torch.bfloat16):
    in_graph(in_graph(torch.randn(4, 256, device=device, requires_grad=True)))  # compiles it
casts = {"eager": copies_kept(layer), "compiled": copies_kept(in_graph)}
print("copies of the weight:", casts)
assert casts == {"eager": 1, "compiled": 16}

# %% [markdown]
# In training, compile the loop around the 16 calls and not the layer. For a server, cast the weights
# once: under `inference_mode` eager mode casts them [in each use
# too](02_autocast_dtypes.ipynb#The-cache-of-weight-casts). <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# The second is rounding. Eager bf16 rounds after every op, and a compiled kernel mostly when it
# writes to memory, so its results can differ. Usually they are *nearer* to the exact ones:


# %%
def scaled_sum(x, y, z):
    return x * y + z


# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
values = [torch.randn(4096).bfloat16() for _ in range(3)]
x, y, z = (value.to(device) for value in values)
eager, joined = scaled_sum(x, y, z), torch.compile(scaled_sum)(x, y, z)
exact = scaled_sum(*(value.double() for value in values))
off_eager, off_joined = (
    ((v.cpu().double() - exact).norm() / exact.norm()).item() for v in (eager, joined)
)
differ = (eager != joined).float().mean().item()
print(f"{differ:.0%} differ; eager is {off_eager:.2%} off, compiled {off_joined:.2%}")
assert off_joined <= off_eager
torch.compiler.reset()
with torch._inductor.config.patch(emulate_precision_casts=True):
    assert torch.equal(torch.compile(scaled_sum)(x, y, z), eager)

# %% [markdown]
# `emulate_precision_casts` rounds where eager does, which here gives the same bits. It does not promise
# that for a whole model: the compiler also rewrites ops, such as a softmax of scaled values. <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# ## Export
#
# `torch.export` writes a model down as a graph, without Python, for AOTInductor, ONNX or a mobile
# runtime. What does the graph keep of autocast? We export a layer within an autocast block:

# %%
layer, x = nn.Linear(256, 256), torch.randn(4, 256)
with torch.autocast("cpu", dtype=torch.bfloat16):
    within = torch.export.export(layer, (x,))
print("exported within autocast, it returns", within.module()(x).dtype)
assert within.module()(x).dtype is torch.float32


class CastsItself(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


inside = torch.export.export(CastsItself(256, 256), (x,))
print("with autocast in its forward, it returns", inside.module()(x).dtype)
assert inside.module()(x).dtype is torch.bfloat16

# %% [markdown]
# Autocast *around* `torch.export.export` leaves nothing in the graph: you believe that you have a
# bf16 program, and it computes in fp32. (Around `torch.onnx.export` of a module it does leave its
# casts, and the file then computes in bf16, for which ONNX Runtime's CPU lacks operators, as we see
# below.) Autocast inside `forward` is kept, as a region (`wrap_with_autocast`) for one type
# of device, which `run_decompositions` turns into casts; the file still holds fp32 weights. The
# plain way is to **cast first**, so that the graph has bf16 weights and ops, and that is what we
# do. The program takes any batch (the example has two images, since export specialises a batch of
# 1). We save the program and load it again: <!-- tests/notebooks/test_18_inference_and_export.py -->

# %% tags=["nbval-ignore-output"]
half = copy.deepcopy(model).cpu().bfloat16()  # in evaluation mode already: call eval() first
example = torch.zeros(2, 1, 8, 8, dtype=torch.bfloat16)
program = torch.export.export(half, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
file = io.BytesIO()
torch.export.save(program, file)
file.seek(0)
loaded = torch.export.load(file).module()
with torch.inference_mode():
    from_file = loaded(images.cpu().bfloat16())
    assert torch.equal(from_file, half(images.cpu().bfloat16()))
print(f"{len(file.getvalue()) / 1024:.0f} KiB, and the same outputs for {len(from_file)} images")

# %% [markdown]
# The file has the same outputs to the bit.
# [**AOTInductor**](https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html) compiles the
# program into a library, which C++ can load without Python. Like the code of `torch.compile`, it can
# round less often than eager:

# %% tags=["nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder:
    place = f"{folder}/model.pt2"
    library = torch._inductor.aoti_compile_and_package(program, package_path=place)
    from_library = torch._inductor.aoti_load_package(library)(images.cpu().bfloat16())
alike = (from_library.argmax(1) == from_file.argmax(1)).sum().item()
off = ((from_library - from_file).abs().max() / from_file.abs().max()).item()
print(f"AOTInductor: {alike} of {len(images)} decisions as in eager bf16, outputs within {off:.1%}")
assert off < 2**-5

# %% [markdown]
# **ONNX** is what other engines read, such as ONNX Runtime. We export the model in three dtypes and
# try each file on the CPU:


# %%
def onnx_decisions(dtype):
    """What ONNX Runtime decides for the test images with the model in a dtype."""
    cast, example = copy.deepcopy(model).cpu().to(dtype), torch.zeros(2, 1, 8, 8, dtype=dtype)
    program = torch.export.export(cast, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    how = {"input_names": ["images"], "opset_version": 22, "optimize": False, "verbose": False}
    content = torch.onnx.export(program, **how).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": tests.cpu().to(dtype).numpy()})
    return torch.from_numpy(logits).argmax(1)


# %% tags=["nbval-ignore-output"]
try:
    onnxruntime = importlib.import_module("onnxruntime")
    importlib.import_module("onnxscript")  # which the exporter needs
except ImportError as error:
    print(f"left out: {error}; pip install onnxruntime onnxscript")
else:
    for dtype in (torch.float32, torch.float16):
        same = (onnx_decisions(dtype) == in_fp32.argmax(1).cpu()).sum().item()
        print(f"ONNX in {dtype}: {same} of {len(tests)} decisions as torch in fp32")
        assert same > 0.98 * len(tests)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear = torch.nn.Linear(8, 8).eval()
        inside = torch.onnx.export(linear, (torch.zeros(2, 8),), verbose=False)
    print("exported inside autocast:", [node.op_type for node in inside.model.graph])
    assert inside.model.graph.outputs[0].dtype.name == "BFLOAT16"
    try:
        onnx_decisions(torch.bfloat16)
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented as error:
        print(f"ONNX in bfloat16: {error}")

# %% [markdown]
# In fp32 and fp16 the other engine decides alike here. ONNX knows bf16, but ONNX Runtime's CPU does
# not have all operators in it, and names one. So take fp16 there. The older exporter
# (`dynamo=False`) may write an `arange` in fp16, which ONNX Runtime refuses; the new one casts it.
# <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# For a run of `amp-lab train`, one line exports the model: `amp-lab export runs/x model.onnx
# --dtype fp16` (or `.pt2`, `.safetensors`) casts a copy, says what that changed, reads the file
# again and compares decisions before the file takes its name. <!-- tests/train/test_export.py -->
#
# ## Eight bits and fewer
#
# Weights can be stored in fewer bits than they are multiplied in: a kernel reads eight bits and
# multiplies bf16. A language model that writes one token at a time for few users [spends most of its
# time](https://pytorch.org/blog/accelerating-generative-ai-2/) on reading weights. `quantize` rounds the weights to the formats of
# accelerators; the usual four bits of language models we write ourselves. Then we count what that
# does to the decisions, with products in fp32, so that the storage alone is judged:


# %%
def int4(weight, group=16):
    """Weights (rows, columns), each group of a row rounded to 16 evenly spaced numbers of its own."""
    groups = weight.unflatten(1, (-1, group))
    least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (largest - least).clamp_min(1e-30) / 15
    return (least + ((groups - least) / step).round() * step).flatten(1)


# %% tags=["nbval-ignore-output"]
far = {}
for form, bits in (("int8-rowwise", 8), ("fp8-rowwise", 8), ("int4", 6), ("nvfp4", 4.5)):
    few = copy.deepcopy(model)
    with torch.inference_mode():
        for module in few.modules():
            # NVFP4 has blocks of 16, so the first convolution, with 9 weights a row, is left out.
            if isinstance(module, (nn.Conv2d, nn.Linear)) and module.weight[0].numel() % 16 == 0:
                rows = module.weight.flatten(1)
                rows = int4(rows) if form == "int4" else quantize(rows, form)
                module.weight.copy_(rows.view_as(module.weight))
        off, changed = quality(few(tests))
    far[form] = off
    print(f"{form:<13} {bits} bits: outputs {off:.1%} off, {changed} decisions changed")
    assert changed < (0.02 if bits == 8 else 0.1) * len(tests)
assert far["int8-rowwise"] < 2 * quality(outputs["bf16 cast once"])[0] < far["fp8-rowwise"]
assert far["fp8-rowwise"] < far["int4"] < far["nvfp4"]

# %% [markdown]
# INT8 with a scale for each row is about as near as bf16 here. FP8, with three bits of mantissa, is
# farther off, and four bits farther still; even they change few decisions of this easy task.
# torchao stores and multiplies the weights of linear layers (not of convolutions) in this way, with
# `quantize_(model, Int8WeightOnlyConfig())`. For FP8 the config is `Float8WeightOnlyConfig()`. With
# `Float8DynamicActivationFloat8WeightConfig()` the activations are FP8 too, for a product in FP8;
# it needs a GPU that multiplies FP8, and passes over layers whose sizes are not multiples of 16.
# [Notebook 15](15_below_16_bits.ipynb) has the formats.
# <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# Besides four bits for each weight, a group stores what its weights share: one 8-bit number in
# NVFP4; for our `int4` we count two of 16 bits. torchao's
# [`Int4WeightOnlyConfig`](https://docs.pytorch.org/ao/main/api_reference/generated/torchao.quantization.Int4WeightOnlyConfig.html)
# has groups of 128 weights by default. [GPTQ](https://arxiv.org/abs/2210.17323) chooses the
# roundings, and [AWQ](https://arxiv.org/abs/2306.00978) scales before rounding, by what they do to
# real inputs. bitsandbytes' NF4, the base of [QLoRA](https://arxiv.org/abs/2305.14314), places its
# 16 numbers at the quantiles of a normal distribution. transformers has bitsandbytes multiply in
# fp32 unless you set another dtype
# ([`bnb_4bit_compute_dtype=torch.bfloat16`](https://huggingface.co/docs/transformers/quantization/bitsandbytes)).
#
# ## The same answer twice
#
# Does an image get the same output by itself as in a batch? We compare 64 images one by one with
# all of them at once:

# %% tags=["nbval-ignore-output"]
with torch.inference_mode():
    for name, run in (("fp32", model), ("bf16", cast_once)):
        alone = torch.cat([run(images[i : i + 1]) for i in range(64)])
        together = run(images[:64])
        apart = (alone - together).abs().max().item()
        print(f"{name}: at most {apart:.2g} apart")
        assert torch.equal(alone.argmax(1), together.argmax(1))
        assert apart < 0.1

# %% [markdown]
# A library may choose another kernel for another size of the batch, which adds in another order. So
# a service that batches requests as they come can give slightly different outputs. In bf16 one
# matmul mostly rounds such a difference away. But where it does not, a value moves by at least a
# whole step of bf16, which spreads from layer to layer: in a deep model many outputs can differ.
# <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# You can have the same bits for the same batch on the same machine, with
# [`torch.use_deterministic_algorithms`](https://docs.pytorch.org/docs/stable/notes/randomness.html); a
# fixed, padded batch; or kernels that are made to be
# [batch-invariant](https://github.com/thinking-machines-lab/batch_invariant_ops). The same bits on another device, or after an update of the libraries, are [not
# guaranteed](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html). `amp-lab diff
# --batch-sizes` says whether two batch sizes differ by more than rounding, and from which op on. <!-- tests/difference/test_first_difference.py -->
#
# ## Summary
#
# - Count decisions, not digits, and look at the gap between the two best.
# - For inference do all work on the weights, such as folding, in fp32, and then cast them once.
#   Cast the inputs too, and compare and sum the outputs in fp32.
# - A compiled model is compiled again for another kind of batch, autocast state or gradient mode.
#   Its bf16 can round less often than eager's.
# - Autocast around `torch.export.export` is lost: cast first, then export, then compare.
#
# Something is wrong with the outputs? [Notebook 08](08_when_amp_breaks.ipynb) is for looking it up.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("18_inference_and_export")

# %% [markdown]
# ### 1. How large is it?
#
# A language model has 8 billion parameters (8e9). Stored in INT8, each row of 4,096 weights shares
# a scale in fp32. How many GiB (2^30 bytes) do the weights take?

# %%
gibibytes = ...
exercises.check_gibibytes(gibibytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# One byte for each weight, and four more for every 4,096 of them.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gibibytes = 8e9 * (1 + 4 / 4096) / 2**30
# ```
#
# About 7.5 GiB, where bf16 takes 14.9.
#
# </details>
#
# ### 2. Count the decisions that changed
#
# Complete the function: it returns the share of rows in which `logits`, of any dtype, and
# `reference`, in fp32, have their largest value in different columns.


# %%
def changed_share(reference, logits):
    return ...


exercises.check_changed(changed_share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compare `argmax(1)` of both, and take the mean of what differs.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def changed_share(reference, logits):
#     return (reference.argmax(1) != logits.argmax(1)).float().mean().item()
# ```
#
# </details>
#
# ### 3. Predict with a model in bf16
#
# Complete the function: the probabilities, in fp32, that a model with bf16 weights gives for images
# in fp32.


# %%
def predict(model, images):
    return ...


exercises.check_predict(predict)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Cast the images before the model, and the logits before the softmax.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def predict(model, images):
#     return model(images.bfloat16()).float().softmax(1)
# ```
#
# </details>
#
# ### 4. Fold a batch norm by hand
#
# In inference, a batch norm computes `(x - mean) / sqrt(var + eps) * weight + bias` for each
# channel. Complete the function: it returns the pair `weight, bias` of a convolution that does the
# same as `convolution`, which has no bias, followed by `norm`.


# %%
def fold(convolution, norm):  # weight (out, in, height, width) and bias (out,)
    return ...


exercises.check_fold(fold)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The factor of each channel is `norm.weight / sqrt(norm.running_var + norm.eps)`. Write the norm
# as `factor * x + rest`: what is `rest`?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def fold(convolution, norm):
#     factor = norm.weight / (norm.running_var + norm.eps).sqrt()
#     weight = convolution.weight * factor[:, None, None, None]
#     return weight, norm.bias - norm.running_mean * factor
# ```
#
# </details>
#
# ## Further reading
#
# - [`torch.compile` and recompilation](https://docs.pytorch.org/docs/stable/torch.compiler.html).
# - [`torch.export`](https://docs.pytorch.org/docs/stable/export.html), and
#   [AOTInductor](https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html).
# - Thinking Machines, [Defeating Nondeterminism in LLM
#   Inference](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/), 2025:
#   kernels whose results do not depend on the batch.
# - [torchao's quantised inference](https://github.com/pytorch/ao/tree/main/torchao/quantization).
