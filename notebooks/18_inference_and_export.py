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
# **What you'll do.** Run a trained classifier in bf16: under autocast, with cast weights, and compiled. Count how
# many of its *decisions* (the predicted classes) change. Then export the classifier, and round its weights to eight
# and four bits.
#
# **What you'll learn.**
# - when to cast the weights once, and when to use autocast;
# - how to tell whether a lower precision is accurate enough for *your* model;
# - when `torch.compile` compiles again;
# - why you cast a model before you export it.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb), on what autocast does. You need no GPU.

# %% tags=["nbval-ignore-output"]
import copy
import functools
import importlib
import io

import torch
from torch import nn

from course import figures, start
from course.digits_network import TRAINED, trained_network

from amp_lab import compare
from amp_lab.formats import quantize

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# We train [a small network](course/digits_network.py) with three convolutions to recognise handwritten digits.
# Then we test it on images that it was not trained on:

# %% tags=["nbval-ignore-output"]
model, images, labels = trained_network(device, steps={"quick": 100, "full": 500}[scale])
tests = images[TRAINED:]  # (397, 1, 8, 8)
with torch.inference_mode():
    in_fp32 = model(tests)
right = (in_fp32.argmax(1) == labels[TRAINED:]).float().mean().item()
print(f"{right:.1%} of the {len(tests)} test images are recognised in fp32")
assert right > 0.9

# %% [markdown]
# We cast a copy of the model and its input to bf16, which has two to three decimal digits. Before you run this: how
# many of the decisions will change?

# %% tags=["nbval-ignore-output"]
served = copy.deepcopy(model).bfloat16()
with torch.inference_mode():
    logits = served(tests.bfloat16()).float()
changed = int((logits.argmax(1) != in_fp32.argmax(1)).sum())
print(f"{changed} of {len(tests)} decisions changed")
assert changed < 0.02 * len(tests)

# %% [markdown]
# To judge a precision for inference, compare the results that your users see: here the decisions.
#
# ## Ways to run it
#
# - **Autocast** keeps the weights in fp32, and uses copies in 16 bits for matmuls and convolutions. It runs
#   [some sensitive ops](02_autocast_dtypes.ipynb) in fp32. Use autocast to evaluate a model between training epochs,
#   or if you do not know which parts need fp32.
# - **Cast once**: cast the weights to 16 bits before the first call. This halves the memory of the weights. Use this
#   if the model only runs inference.
# - **Compile**: `torch.compile` fuses small ops.
#
# The next cell defines a function for each of the first two ways:


# %%
def autocast(x):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return model(x)


def cast_once(x):
    return served(x.bfloat16())


def quality(logits):
    """How far outputs are from fp32's, and how many decisions changed."""
    off = ((logits.float() - in_fp32).norm() / in_fp32.norm()).item()
    return off, int((logits.argmax(1) != in_fp32.argmax(1)).sum())


# %% [markdown]
# The next cell compiles the model in fp32 and in bf16, and casts a copy to fp16. For each way, the cell prints the
# relative error of the outputs (*off*) and the number of changed decisions:

# %% tags=["nbval-ignore-output"]
compiled = {"fp32 compiled": torch.compile(model), "bf16 compiled": torch.compile(cast_once)}
WAYS = {"fp32": model, "bf16 autocast": autocast, "bf16 cast once": cast_once, **compiled}
half = copy.deepcopy(model).half()
outputs = {}
for name, run in {**WAYS, "fp16 cast once": lambda x: half(x.half())}.items():
    with torch.inference_mode():
        outputs[name] = run(tests).float()
    off, changed = quality(outputs[name])
    print(f"{name:<15} outputs {off:.2%} off, {changed} decisions changed")
    assert off < 0.02
    assert changed < 0.02 * len(tests)
assert quality(outputs["fp16 cast once"])[0] < quality(outputs["bf16 cast once"])[0]

# %% [markdown]
# Here fp16 is more accurate than bf16. But the range of fp16 is smaller: the values of a model that was trained in
# bf16 [may not fit](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it).
#
# How fast is each way? We leave out fp16, and time a call with one image and a call with 256 images:

# %% tags=["nbval-ignore-output"]
for batch in (1, 256):
    calls = {name: functools.partial(run, images[:batch].clone()) for name, run in WAYS.items()}
    with torch.inference_mode():
        times = compare(calls, device=device, budget_s=4, warmup=3)
    print(f"{batch} at a time\n{times}")
    # A larger speed-up would mean that the measurement is wrong.
    assert not times.ratio("fp32 compiled", "bf16 compiled").is_above(40)

# %% [markdown]
# The columns are the time of a call and its speed-up over the first row. On our two CPU cores, bf16 was slower than
# fp32 for a single image. With 256 images, bf16 was faster than fp32.
#
# ## Which decisions change?
#
# The *gap* of an image is the difference between its two largest logits in fp32. bf16 changes this difference.
# The second-best class can overtake the best class only if the change is at least as large as the gap. For each
# image, we draw the gap and the change:

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
# Below the dashed line, the second-best class cannot overtake the best class.
#
# Draw this figure for your model and a few hundred real inputs, and count the changed decisions. If no decision
# changes, the precision is accurate enough for the decisions on these inputs.
#
# ## Cast inputs, outputs and weights
#
# **Inputs**: cast fp32 inputs to the dtype of the model. Without the cast, the convolution raises an error:

# %% tags=["nbval-ignore-output"]
refused = ""
try:
    served(tests[:2])
except RuntimeError as error:
    refused = str(error)
print(refused[:100])
assert refused

# %% [markdown]
# **Outputs**: cast them to fp32 with `.float()` before you compute with them.
# <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# **Weights**: before you cast the weights, make all other changes to them, such as folding a batch norm (exercise 4).
# The weights are then rounded only once.
# <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# ## What torch.compile changes
#
# `torch.compile` compiles a function at its first call. At a later call it may compile the function again, for
# example if the inputs have another shape. To count the compilations, we write a *backend*: a function that
# `torch.compile` calls in each compilation.


# %%
def counting(graph, inputs):
    """A backend of `torch.compile` that runs the graph as it is."""
    graphs.append(graph)
    return graph.forward


graphs, compilations = [], {}
torch.compiler.reset()
counted = torch.compile(model, backend=counting)
with torch.inference_mode():
    for batch in (4, 5, 6, 1):
        counted(images[:batch])
        compilations[f"a batch of {batch}"] = len(graphs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        counted(images[:7])
    compilations["under autocast"] = len(graphs)
counted(images[:7])
compilations["with gradients"] = len(graphs)

# %% [markdown]
# Before you run the next cell: which of the calls above caused a compilation?

# %%
for call, count in compilations.items():
    print(f"{call:<15} compilations so far: {count}")
assert list(compilations.values()) == [1, 2, 2, 3, 4, 5]

# %% [markdown]
# The second compilation treats the batch size as variable, so a batch of 6 needs no compilation. A batch of 1,
# autocast and gradients each cause another compilation. To avoid compilations while you serve requests:
#
# - Always use the same gradient mode and autocast state.
# - Before the first request, make one call with each batch size that you will serve.
#
# Then call `torch.compiler.set_stance("fail_on_recompile")`. From then on, another compilation is an error.
# <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# ## Export
#
# `torch.export` turns a model into a *program*: a graph of ops with the weights. If we export a layer inside an
# autocast block, does the program return bf16?

# %%
layer, x = nn.Linear(256, 256), torch.randn(4, 256)
with torch.autocast("cpu", dtype=torch.bfloat16):
    program = torch.export.export(layer, (x,))
print("exported inside autocast, it returns", program.module()(x).dtype)
assert program.module()(x).dtype is torch.float32

# %% [markdown]
# The program computes in fp32, because `torch.export` does not record an autocast block around the call. For a program
# in bf16, **cast the model first**. We export our bf16 model, save the program and load it again. `Dim.AUTO` lets the
# program accept any batch size. For this, the example must contain at least two images:
# <!-- tests/notebooks/test_18_inference_and_export.py -->

# %% tags=["nbval-ignore-output"]
ANY_BATCH = ({0: torch.export.Dim.AUTO},)
on_cpu = copy.deepcopy(served).cpu()  # call eval() on yours; this one is in evaluation mode
example = torch.zeros(2, 1, 8, 8, dtype=torch.bfloat16)
file = io.BytesIO()
torch.export.save(torch.export.export(on_cpu, (example,), dynamic_shapes=ANY_BATCH), file)
file.seek(0)
loaded = torch.export.load(file).module()
with torch.inference_mode():
    from_file = loaded(tests.cpu().bfloat16())
    assert torch.equal(from_file, on_cpu(tests.cpu().bfloat16()))
print(f"{len(file.getvalue()) / 1024:.0f} KiB, and the same outputs for {len(from_file)} images")

# %% [markdown]
# To run the model without torch, export it to **ONNX**. On a CPU, ONNX Runtime refuses convolutions in bf16, so we
# export in fp16: <!-- tests/train/test_export.py -->

# %% tags=["nbval-ignore-output"]
try:
    onnxruntime = importlib.import_module("onnxruntime")
    importlib.import_module("onnxscript")  # which the exporter needs
except ImportError as error:
    print(f"left out: {error}; pip install onnxruntime onnxscript")
else:
    how = {"input_names": ["images"], "dynamic_shapes": ANY_BATCH, "verbose": False}
    written = torch.onnx.export(half.cpu(), (example.half(),), **how).model_proto
    session = onnxruntime.InferenceSession(written.SerializeToString())
    (logits,) = session.run(None, {"images": tests.cpu().half().numpy()})
    same = (torch.from_numpy(logits).argmax(1) == in_fp32.argmax(1).cpu()).sum().item()
    print(f"ONNX in fp16: {same} of {len(tests)} decisions are the same as in torch in fp32")
    assert same > 0.98 * len(tests)

# %% [markdown]
# ## Eight bits and fewer
#
# Weights in eight bits take about half the memory of weights in bf16. Here `quantize` rounds the weights and returns
# them in fp32, so we see only the effect of the rounding. In a *rowwise* format, all weights of one output share a
# [scale](15_below_16_bits.ipynb#The-idea-in-five-lines):

# %% tags=["nbval-ignore-output"]
far = {}
for form, bits in (("int8-rowwise", 8), ("fp8-rowwise", 8), ("nvfp4", 4)):
    few = copy.deepcopy(model)
    with torch.inference_mode():
        for module in few.modules():
            # NVFP4 has blocks of 16, so the first convolution, with 9 weights a row, is left out.
            if isinstance(module, (nn.Conv2d, nn.Linear)) and module.weight[0].numel() % 16 == 0:
                rows = quantize(module.weight.flatten(1), form)
                module.weight.copy_(rows.view_as(module.weight))
        far[form], changed = quality(few(tests))
    print(f"{form:<13} outputs {far[form]:.1%} off, {changed} decisions changed")
    assert changed < (0.02 if bits == 8 else 0.1) * len(tests)
assert far["int8-rowwise"] < 2 * quality(outputs["bf16 cast once"])[0] < far["fp8-rowwise"]
assert far["fp8-rowwise"] < far["nvfp4"]

# %% [markdown]
# Here, with INT8 weights, the outputs have about the same error as those of *bf16 cast once* above. FP8 is less
# accurate. NVFP4 is the least accurate.
#
# [torchao](https://github.com/pytorch/ao/tree/main/torchao/quantization) stores the weights of a model's
# linear layers in fewer bits: <!-- tests/notebooks/test_18_inference_and_export.py -->
#
# - `quantize_(model, Int8WeightOnlyConfig())` stores the weights in INT8.
# - `Float8WeightOnlyConfig()` stores them in FP8.
# - `Float8DynamicActivationFloat8WeightConfig()` stores the weights in FP8 and also casts the activations, so that the
#   matmul runs in FP8. This config needs a GPU that supports FP8.
#
# [Notebook 15](15_below_16_bits.ipynb) explains the formats.
#
# ## Summary
#
# - Count changed decisions, and look at the gap between the two best classes.
# - For inference, cast the weights once, and cast fp32 inputs at each call. Cast the outputs to fp32 before you
#   compute with them.
# - `torch.compile` can compile again if the batch size, the autocast state or the gradient mode changes.
# - `torch.export.export` does not record autocast around the call, so cast first, then export.
#
# If the outputs are wrong, look up the symptom in [notebook 08](08_when_amp_breaks.ipynb).
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("18_inference_and_export")

# %% [markdown]
# ### 1. How large is it?
#
# A language model has 8 billion weights (8e9) in INT8. Each row of 4,096 weights shares a scale in fp32. How many GiB
# (2^30 bytes) do the weights and scales take?

# %%
gibibytes = ...
exercises.check_gibibytes(gibibytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each weight takes one byte, and every 4,096 weights share a scale of four bytes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gibibytes = 8e9 * (1 + 4 / 4096) / 2**30
# ```
#
# </details>
#
# ### 2. Count the decisions that changed
#
# Complete the function. It returns the share of rows whose `argmax` differs between `reference` and `logits`.


# %%
def changed_share(reference, logits):
    return ...


exercises.check_changed(changed_share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compare `argmax(1)` of both, and take the mean of the comparison.
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
# Complete the function. Its inputs are a bf16 model and fp32 images. It returns the probabilities of the classes in
# fp32.


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
# In inference, a batch norm computes `(x - mean) / sqrt(var + eps) * weight + bias` for each channel. The
# `convolution` before it has no bias. Complete the function: it returns the `weight, bias` of a single convolution
# that replaces both.


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
