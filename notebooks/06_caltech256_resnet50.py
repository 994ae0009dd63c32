# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a ResNet-50 on twice the batch in the same memory
#
# **What you'll do.** Train a new last layer (the *head*) on a frozen ResNet-50, in FP32 and with AMP.
# Then count the memory of a training step, tensor by tensor.
#
# **What you'll learn.**
# - how much memory you save by freezing the *backbone* (all layers before the head), and which numbers
#   in a frozen backbone still change;
# - how to count the memory of a training step that does not fit into your machine;
# - how much memory AMP saves, and which tensors keep their size.
#
# **What you need.** [Notebook 04](04_fp32_vs_amp.ipynb), for the AMP step. You need no GPU and no data set.
#
# We ask whether training with 512 images in a batch fits into a GPU with 6 GiB. The network and the data set are those
# of a tutorial, *Automatic mixed precision training using PyTorch*.

# %% tags=["nbval-ignore-output"]
import functools
import tempfile
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50

from course import figures, start
from course.caltech256 import load_caltech256, pretrained_weights

from amp_lab import Precision, describe_device, evaluate
from amp_lab.train.data import batches

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# The first convolution of a ResNet-50 turns each image of 224x224 pixels into 64 feature maps of 112x112.
# Before you run this cell: how much of a 6 GiB GPU's memory do these maps take at batch 512?

# %%
GIB = 2**30
LIMIT = 6 * GIB  # the memory of that GPU, in bytes
maps = torch.empty(512, 64, 112, 112, device="meta")  # has a shape, and no memory
for dtype in (torch.float32, torch.float16):
    size = maps.to(dtype).nbytes
    print(f"{dtype}: {size / GIB:.2f} GiB, {size / LIMIT:.0%} of the GPU's memory")
assert 3 * maps.nbytes < LIMIT < 4 * maps.nbytes
with torch.device("meta"):
    assert resnet50().conv1(torch.empty(512, 3, 224, 224)).shape == maps.shape

# %% [markdown]
# In FP32 this single tensor takes about a quarter of the GPU's memory.
#
# ## A frozen backbone and a new head
#
# If Caltech-256 is not in `data/`, we generate pictures. If torchvision has no pretrained weights in its
# cache, we use random weights. To download missing pictures and weights, set `DOWNLOAD` to `True`.
# <!-- tests/train/data/test_downloads.py -->

# %% tags=["nbval-ignore-output"]
DOWNLOAD = False  # True: fetch 1.2 GB of photographs and 98 MB of weights where they are missing
config = {
    "quick": {"image_size": 64, "batch_size": 16, "epochs": 2, "lr": 1e-3, "workers": 0},
    "full": {"image_size": 224, "batch_size": 256, "epochs": 10, "lr": 1e-3, "workers": 8},
}[scale]
generated = {  # without Caltech-256
    "quick": {"classes": 4, "images_per_class": 40},
    "full": {"classes": 256, "images_per_class": 20},
}[scale]
workspace = tempfile.TemporaryDirectory()  # for generated pictures
data = load_caltech256(
    workspace.name, image_size=config["image_size"], download=DOWNLOAD, stand_in=generated
)
weights = pretrained_weights(download=DOWNLOAD)
print(f"{len(data.train)} images for training, {len(data.test)} for testing")
assert data.name == "caltech256"

# %% [markdown]
# To freeze the backbone, we set `requires_grad=False` for all parameters. Then we create the new head. For 256
# classes, how many parameters are left to train?


# %%
def transfer_model(classes, weights=None):
    """A ResNet-50 whose backbone is frozen, with a new head for `classes` classes."""
    model = resnet50(weights=weights)
    model.requires_grad_(False)
    model.fc = nn.Linear(model.fc.in_features, classes)
    return model


model = transfer_model(256)
parameters = sum(p.numel() for p in model.parameters())
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{parameters:,} parameters, {trained:,} trained")
assert trained == 2048 * 256 + 256 == 524_544  # as in the tutorial

# %% [markdown]
# A forward pass in training mode still changes some numbers in the frozen backbone. Before you run the next cell: which
# ones?

# %%
before = {key: value.clone() for key, value in model.state_dict().items()}
model.train()(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
assert not {k for k, _ in model.named_parameters()} & set(changed)
assert len(changed) == 3 * 53  # mean, variance and a counter, in each of 53 batch normalisations

# %% [markdown]
# The running averages of all 53 batch normalisations have changed. In training mode, a
# [`BatchNorm2d`](https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html) with default settings
# updates its running averages, even if its parameters have `requires_grad=False`. To keep pretrained averages, put the
# backbone into evaluation mode (exercise 3). <!-- tests/notebooks/test_exercises.py -->
#
# ## Train in each precision
#
# The same function trains in FP32 and with AMP.


# %%
def train_step(model, images, targets, optimizer, scaler, dtype):
    """One training step; returns the loss."""
    amp = dtype is not torch.float32
    with torch.autocast(images.device.type, dtype=dtype, enabled=amp):  # AMP
        logits = model(images)  # (B, classes)
        loss = F.cross_entropy(logits.float(), targets)
    scaler.scale(loss).backward()  # AMP: was loss.backward()
    scaler.step(optimizer)  # AMP: was optimizer.step()
    scaler.update()  # AMP
    optimizer.zero_grad()
    return loss.detach()


# %% [markdown]
# In the next function, `precision.float32_mode` turns TF32 off if the precision is FP32. <!--
# tests/core/test_precision.py -->


# %%
def train(precision):
    """Train a new network; return its mean loss in the last epoch, and its test accuracy."""
    torch.manual_seed(0)  # the same first weights in every precision
    model = transfer_model(len(data.classes), weights).to(device).train()
    optimizer = torch.optim.AdamW(model.fc.parameters(), lr=config["lr"])
    scaler = torch.amp.GradScaler(device.type, enabled=(precision is Precision.FP16))  # AMP
    size, common = config["batch_size"], {"workers": config["workers"], "device": device}
    with precision.float32_mode(device.type):
        for epoch in range(config["epochs"]):
            losses = []
            loader = batches(data.train, size, epoch=epoch, seed=0, drop_last=True, **common)
            for images, targets in loader:
                x, y = images.to(device), targets.to(device)  # (B, 3, S, S) and (B,)
                losses.append(train_step(model, x, y, optimizer, scaler, precision.dtype))
    test = batches(data.test, size, **common)
    _, accuracy = evaluate(model, test, precision=precision, device=device)
    return torch.stack(losses).mean().item(), accuracy


# %% [markdown]
# On a CPU we compare FP32 with bf16. On a GPU we compare FP32 with each precision that `describe_device` reports as
# accelerated. We use the same images in the same order for every precision. <!-- tests/train/data/test_images.py -->

# %% tags=["nbval-ignore-output"]
precisions = [Precision.FP32, Precision.BF16]
if device.type != "cpu":
    precisions = [Precision.FP32, *reversed(describe_device(device).accelerated)]
results = {}
for precision in precisions:
    loss, accuracy = results[precision] = train(precision)
    fp32_loss, fp32_accuracy = results[Precision.FP32]
    print(f"{precision}: loss {loss:.3f} ({loss / fp32_loss - 1:+.1%}), accuracy {accuracy:.1%}")
    assert abs(loss / fp32_loss - 1) < 0.1
    error = (0.25 / len(data.test)) ** 0.5  # the standard error of an accuracy is at most this
    assert abs(accuracy - fp32_accuracy) <= 3 * 2**0.5 * error

# %% [markdown]
# The percentage in brackets is the difference from the FP32 loss. We trained only once in each precision, so a
# difference of a few percent may be due to chance. Here the backbone has random weights, so the accuracies mean
# little.
#
# ## Count the memory of a step
#
# We count bytes with a [`TorchDispatchMode`](https://docs.pytorch.org/docs/stable/notes/extending.html). Inside its
# `with` block, PyTorch passes the operations to a method of the mode. The method runs each operation and can inspect
# the tensors that the operation returns. Our mode does two things:
#
# 1. It keeps a dictionary of the *storages* (blocks of memory) of these tensors. When a storage is
#    freed, its entry disappears.
# 2. After each operation, it adds up the bytes of all entries and remembers the largest sum.
# <!-- tests/notebooks/test_06_caltech256_resnet50.py -->


# %%
class LiveTensors(TorchDispatchMode):
    """Records shape, dtype and bytes of the tensors that ops in its `with` block return."""

    def __init__(self):
        super().__init__()
        self.live = WeakKeyDictionary()  # a storage: (shape, dtype, bytes)
        self.peak, self.peak_bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                found = (tuple(tensor.shape), tensor.dtype, storage.nbytes())
                self.live.setdefault(storage, found)  # a view brings no storage of its own
        total = sum(size for _, _, size in self.live.values())
        if total > self.peak_bytes:
            self.peak, self.peak_bytes = list(self.live.values()), total
        return result


# %% [markdown]
# AdamW creates its state at the end of the first step. So we count two steps of a new network on random images: in the
# second step, the state is in memory from the start.
# <!-- tests/notebooks/test_06_caltech256_resnet50.py -->


# %%
def two_steps(batch_size, dtype, device, *, image_size=224, freeze=True):
    """Train a new network for two steps; everything is allocated here, and freed afterwards."""
    with torch.device(device):
        model = transfer_model(256)
        images = torch.rand(batch_size, 3, image_size, image_size)
        targets = torch.randint(256, (batch_size,))
    if not freeze:
        model.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler(device.type, enabled=(dtype is torch.float16))
    for _ in range(2):
        train_step(model, images, targets, optimizer, scaler, dtype)


# %% [markdown]
# A real step at batch 512 would take gigabytes, so we use [*fake
# tensors*](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html).
# Under `FakeTensorMode`, a layer returns a tensor with the right shape and dtype but without values, so it needs no
# memory and no computation.


# %%
@functools.cache
def peak(batch_size, dtype, **options):
    """The `LiveTensors` of two training steps on fake tensors."""
    with FakeTensorMode(), LiveTensors() as live:
        two_steps(batch_size, dtype, torch.device("cpu"), **options)
    return live


# %% [markdown]
# Can we trust fake tensors? For a small batch, we count with real and with fake tensors:

# %% tags=["nbval-ignore-output"]
for dtype in (torch.float32, torch.bfloat16):
    with LiveTensors() as real:
        two_steps(8, dtype, torch.device("cpu"), image_size=96)
    counted, fake = real.peak_bytes, peak(8, dtype, image_size=96).peak_bytes
    print(f"{dtype}: {counted / 2**20:.0f} MiB real, {fake / 2**20:.0f} MiB fake")
    assert abs(fake / counted - 1) < 0.001  # a few small buffers may differ in dtype

# %% [markdown]
# Now we count steps with 256 and with 512 images. For AMP we use bf16. Before you run
# this: how much memory will AMP need at batch 512, compared with FP32 at 256 and at 512?

# %%
frozen = {
    "FP32, batch 256": peak(256, torch.float32),
    "FP32, batch 512": peak(512, torch.float32),
    "AMP, batch 512": peak(512, torch.bfloat16),
}
gib = {name: live.peak_bytes / GIB for name, live in frozen.items()}
for name, size in gib.items():
    print(f"{name}: {size:.2f} GiB")
assert gib["AMP, batch 512"] < 1.1 * gib["FP32, batch 256"]  # twice the batch, the same memory
assert 0.85 < gib["FP32, batch 512"] / 6 < 1

# %% [markdown]
# AMP needs only slightly more memory for 512 images than FP32 needs for 256. With 512 images in FP32, less than 1 GiB
# of the 6 GiB is left. This can be too little: our count does not include, for example, the memory that [CUDA and its
# libraries](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html) allocate outside of PyTorch.
#
# ## Train the backbone too
#
# For a frozen backbone, autograd saves no activations. If we train it, autograd saves them, and AdamW allocates state
# for all weights. Before you run this: will a step with AMP and 512 images fit into 6 GiB?

# %%
unfrozen = {
    "FP32, batch 512": peak(512, torch.float32, freeze=False),
    "AMP, batch 512": peak(512, torch.bfloat16, freeze=False),
}
for name, live in unfrozen.items():
    print(f"{name}: {live.peak_bytes / GIB:.1f} GiB")
    assert live.peak_bytes > 3 * LIMIT
    assert ((512, 64, 56, 56), torch.int64, 784 * 2**20) in live.peak  # max pooling
found = [(shape, dtype) for shape, dtype, _ in unfrozen["AMP, batch 512"].peak]
assert ((512, 3, 224, 224), torch.bfloat16) in found  # a copy of the images

_ = figures.memory_by_dtype(
    {"backbone frozen": frozen, "backbone trained": unfrozen}, limit=LIMIT, limit_label="6 GiB"
)

# %% [markdown]
# With 512 images, the step does not fit, even with AMP.
#
# AMP does not make these tensors smaller:
#
# - the images, which stay in fp32;
# - the weights, their gradients and the optimizer state, which stay in fp32;
# - the positions of the maxima in max pooling, which are int64.
# <!-- tests/notebooks/test_exercises.py -->

# %%
workspace.cleanup()  # deletes generated pictures

# %% [markdown]
# ## Summary
#
# - With 512 images in FP32, a frozen backbone lowers the memory of a step from 41.6 to 5.4 GiB. AMP roughly halves
#   both sizes.
# - In training mode, the running averages of a frozen backbone still change.
# - On a CPU and on CUDA, AMP halves the bytes of each layer's output in our ResNet-50. Weights, their gradients,
#   optimizer state and images stay in fp32. <!-- tests/notebooks/test_06_caltech256_resnet50.py -->
# - Under `FakeTensorMode`, our dispatch mode counts the memory of a step that does not fit into your
#   machine.
#
# Next, [notebook 07](07_training_recipes.ipynb) shows how to combine AMP with the rest of your training loop.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("06_caltech256_resnet50")

# %% [markdown]
# ### 1. The size of a tensor
#
# A batch has 256 images. For each image, a convolution returns 128 feature maps of 56x56 in bf16. How many MiB do all
# these maps take?

# %%
map_mib = ...
exercises.check_map_size(map_mib)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Multiply images, maps, height, width and the bytes of one number. A MiB is 2^20 bytes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# map_mib = 256 * 128 * 56 * 56 * 2 / 2**20
# ```
#
# That is 196 MiB.
#
# </details>
#
# ### 2. The largest batch for another GPU
#
# Suppose that a step with AMP takes 96 MiB, plus 5.55 MiB for each image. We leave 1 GiB of an 8 GiB GPU
# free for memory that we do not count. What is the largest batch that fits and is a multiple of 32?

# %%
largest = ...
exercises.check_largest_batch(largest)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many MiB are left for images? Divide them by the MiB for each image. Then round down to a multiple
# of 32.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# largest = int((7 * 1024 - 96) / 5.55) // 32 * 32
# ```
#
# 7072 MiB are left, which is room for 1274 images. The next lower multiple of 32 is 1248.
#
# </details>
#
# ### 3. Train the head alone
#
# Complete `head_mode`. It should put the head `model.fc` into training mode. A forward pass should no longer change
# the running averages of the backbone.


# %%
def head_mode(model):
    return ...  # set the modes, and return the model


exercises.check_head_mode(head_mode)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each module is in training mode or in evaluation mode. `module.eval()` also sets the mode of all modules inside
# `module`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def head_mode(model):
#     model.eval()
#     model.fc.train()
#     return model
# ```
#
# Call `head_mode(model)` where you would call `model.train()`.
#
# </details>
#
# ### 4. What AMP halves
#
# We train all layers, and the forward pass runs under autocast on CUDA. Which of these take half as many bytes as in
# FP32: `"images"`, `"activations"`, `"weights"`, `"gradients"` (of the weights), `"optimizer state"`?

# %%
halved = ...  # a set of names
exercises.check_halved(halved)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each tensor, ask whether an op under autocast returned it.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# halved = {"activations"}
# ```
#
# The images and the weights are created in fp32. By default, PyTorch gives gradients and AdamW's moments the dtype of
# their weight. Only the activations are results of ops under autocast. <!-- tests/notebooks/test_exercises.py
# -->
#
# </details>
#
# ## Further reading
#
# - [He et al., *Deep residual learning for image recognition*](https://arxiv.org/abs/1512.03385):
#   the network.
# - [CUDA memory management](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management): how
#   the caching allocator works, and how to inspect it.
