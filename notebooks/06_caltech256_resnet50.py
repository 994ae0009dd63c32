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
# **What you'll do.** Train a new head on a frozen ResNet-50, in FP32 and with AMP. Then count the
# memory of a training step, tensor by tensor, and find out why a GPU with 6 GB runs out of memory at
# batch 512 in FP32, but not with AMP.
#
# **What you'll learn.**
# - what freezing a backbone saves, and what it does not freeze;
# - how one training step serves every precision, with one scaler for the whole run;
# - how to count the memory of a training step without having that memory;
# - why AMP nearly halves it, and what stays as it was.
#
# **What you need.** [Notebook 04](04_fp32_vs_amp.ipynb), for the AMP step. You need no GPU and no data
# set: without Caltech-256 the notebook generates pictures.
#
# The task comes from a tutorial, *Automatic mixed precision training using PyTorch*, whose author had a
# GTX 1060 with 6 GB, 26,802 training and 2,978 test images. This is its table, for ten epochs:
#
# | | time | accuracy |
# |---|---|---|
# | FP32, batch 256 | 68.1 min | 83.1 % |
# | FP32, batch 512 | out of memory | |
# | AMP, batch 512 | 61.7 min | 80.9 % |

# %% tags=["nbval-ignore-output"]
import functools
import gc
import tempfile
from collections import Counter
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
# The first convolution of a ResNet-50 turns each image of 224x224 pixels into 64 maps of 112x112. Before
# you run this cell: how much of a GPU with 6 GiB does that one tensor take at batch 512?

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
# In FP32 it takes a quarter of the memory. Three such tensors fit and a fourth does not, and a network
# holds several at a time. With half as many bytes for each number there is room for about twice as many
# images.
#
# ## A frozen backbone and a new head
#
# The quick scale keeps the network and takes smaller pictures. The notebook uses Caltech-256 if it is in
# `data/`, and pretrained weights if torchvision has them in its cache. Set `DOWNLOAD` to fetch both.

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
# With generated pictures and random weights the accuracy means nothing, but we can still compare one
# precision with another.
#
# To freeze the backbone, we switch off the gradients of all its parameters. The new head is made
# afterwards, so its gradients are on. How many parameters are left to train, for 256 classes?


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
# We train 524,544 of 24 million. But frozen *parameters* are not a frozen *network*. Before you run
# the next cell: which numbers inside the network will a forward pass in training mode still change?

# %%
before = {key: value.clone() for key, value in model.state_dict().items()}
model.train()(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
assert not {k for k, _ in model.named_parameters()} & set(changed)
assert len(changed) == 3 * 53  # mean, variance and a counter, in each of 53 batch normalisations

# %% [markdown]
# The running averages of all 53 batch normalisations have moved, whatever `requires_grad` says, because
# in training mode they [use the statistics of the
# batch](https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html). Here that is
# welcome, since the averages adapt to the new pictures. Where it is not, put the backbone into
# evaluation mode (exercise 3).
#
# ## Train in each precision
#
# The marked lines are AMP. `enabled=` switches autocast off for FP32, so one function serves every
# precision. The logits become fp32 because [on CUDA](09_xray_your_model.ipynb#The-surprise-in-cross-entropy)
# the log-softmax in `cross_entropy` is imprecise otherwise.


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
# A run makes *one* scaler, before its first epoch. A new one in each epoch would forget the loss scale
# that the last one had found. As in notebook 04, FP32 means IEEE arithmetic: `float32_mode` switches TF32
# off. <!-- tests/core/test_precision.py -->


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
# We compare up to four precisions on a GPU, and FP32 and bf16 on a CPU, since many are [very slow in
# fp16](../docs/hardware.md). Every precision gets the same images in the same order.

# %% tags=["nbval-ignore-output"]
precisions = {
    "cuda": [Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16],
    "mps": [Precision.FP32, Precision.FP16],
}.get(device.type, [Precision.FP32, Precision.BF16])
rates = describe_device(device).rates
results = {}
for precision in precisions:
    if rates[precision] is None:  # not every GPU has TF32
        continue
    loss, accuracy = results[precision] = train(precision)
    fp32_loss, fp32_accuracy = results[Precision.FP32]
    print(f"{precision}: loss {loss:.3f} ({loss / fp32_loss - 1:+.1%}), accuracy {accuracy:.1%}")
    assert abs(loss / fp32_loss - 1) < 0.1
    error = (0.25 / len(data.test)) ** 0.5  # the standard error of an accuracy is at most this
    assert abs(accuracy - fp32_accuracy) <= 3 * 2**0.5 * error

# %% [markdown]
# One run of each cannot tell whether a few percent between two losses are precision or chance:
# [notebook 04](04_fp32_vs_amp.ipynb#Do-they-learn-the-same?) takes several seeds. For checkpoints of such
# a run, and for time, see [notebook 05](05_cifar10_mobilenet.ipynb).
#
# Now read the tutorial's table again, and ask what it compares.

# %%
steps_at = {size: -(-26_802 // size) * 10 for size in (256, 512)}  # in ten epochs, rounded up
print(f"AMP is {68.1 / 61.7:.2f}x as fast; {steps_at[256]} steps in FP32, {steps_at[512]} with AMP")
assert steps_at == {256: 1050, 512: 530}

# %% [markdown]
# AMP had twice the batch, and so half as many steps to learn in. The 2.2 points between the accuracies may be due
# to that, to chance, or to fp16. The speed-up is small because a GTX 1060 is older than [Tensor
# Cores](https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html), the units
# that multiply fp16 matrices faster. What AMP gave on that GPU is room for a larger batch.
#
# ## Count the memory of a step
#
# Why did FP32 at batch 512 not fit? We count the bytes. A `TorchDispatchMode` sees each operation that
# PyTorch runs, and what it returns. Ours keeps a dictionary of the storages returned. An entry
# disappears when its storage is freed, and the mode remembers the largest
# total. <!-- tests/notebooks/test_06_caltech256_resnet50.py -->


# %%
class LiveTensors(TorchDispatchMode):
    """Records the tensors that are alive in its block: shape, dtype and bytes of each."""

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
# We count two steps of a new network on random images, because the optimizer allocates its state in the
# first one.


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
# A real step at batch 512 would take gigabytes, so we let PyTorch pretend. Under `FakeTensorMode` a
# layer returns a tensor with the right shape and dtype, but PyTorch neither allocates nor computes its
# numbers. Here it makes a tensor of 4 TiB. (Both modes live in modules with an underscore, so they may
# move.)

# %%
with FakeTensorMode():
    assert (torch.ones(2**40) + 1).nbytes == 2**42


@functools.cache
def peak(batch_size, dtype, **options):
    """A `LiveTensors` that has seen two training steps on fake tensors."""
    with FakeTensorMode(), LiveTensors() as live:
        two_steps(batch_size, dtype, torch.device("cpu"), **options)
    return live


# %% [markdown]
# Can we trust the pretence? On a batch small enough to run, it must count what real tensors take.

# %% tags=["nbval-ignore-output"]
for dtype in (torch.float32, torch.bfloat16):
    with LiveTensors() as real:
        two_steps(8, dtype, torch.device("cpu"), image_size=96)
    counted, fake = real.peak_bytes, peak(8, dtype, image_size=96).peak_bytes
    print(f"{dtype}: {counted / 2**20:.0f} MiB real, {fake / 2**20:.0f} MiB fake")
    assert abs(fake / counted - 1) < 0.001  # a few small buffers may differ in dtype

# %% [markdown]
# We can. Now the three rows of the tutorial's table, with bf16, which has as many bytes as fp16. Before
# you run this: how much will AMP need at batch 512, compared with FP32 at 256 and at 512?

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
# AMP needs little more for 512 images than FP32 for 256. FP32 with 512 images leaves less than 1 GiB for
# what our count does not see, such as [what CUDA and its libraries
# allocate](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html) outside of PyTorch. The tutorial's
# GPU ran out of memory there.
#
# ## Why it is not quite half
#
# These are the largest tensors at the peak, the moment with the most bytes:

# %%
for name in ("FP32, batch 512", "AMP, batch 512"):
    print(name)
    alike = Counter(frozen[name].peak).items()
    for (shape, dtype, size), n in sorted(alike, key=lambda item: -item[0][2]):
        if size >= 64 * 2**20:
            print(f"  {n} x {size / 2**20:6.0f} MiB  {str(dtype)[6:]:8}  {shape}")
    assert Counter(shape for shape, _, _ in frozen[name].peak)[512, 256, 56, 56] == 3

# %% [markdown]
# The peak is in the first residual block, where three tensors of 256 maps are alive: the result of its
# three convolutions, and that of the shortcut before and after batch normalisation. The 64 maps are the
# block's input. With AMP all these maps take half the bytes, while the images stay fp32. Earlier maps are
# gone: no parameter of the frozen backbone needs a gradient, so a map is freed once no later layer
# needs it.
#
# ## And if the backbone is trained?
#
# Then autograd saves what the backward pass needs, and every weight has optimizer state. Before you run
# this: will 512 images fit with AMP?

# %%
unfrozen = {
    "FP32, batch 512": peak(512, torch.float32, freeze=False),
    "AMP, batch 512": peak(512, torch.bfloat16, freeze=False),
}
for name, live in unfrozen.items():
    print(f"{name}: {live.peak_bytes / GIB:.1f} GiB")
    assert live.peak_bytes > 3 * LIMIT
    assert ((512, 64, 56, 56), torch.int64, 784 * 2**20) in live.peak  # of max pooling
found = [(shape, dtype) for shape, dtype, _ in unfrozen["AMP, batch 512"].peak]
assert ((512, 3, 224, 224), torch.bfloat16) in found  # a copy of the images

_ = figures.memory_by_dtype(
    {"backbone frozen": frozen, "backbone trained": unfrozen}, limit=LIMIT, limit_label="6 GiB"
)

# %% [markdown]
# They do not. Each bar is the memory of one step, split by dtype; the dashed line is the GPU's 6 GiB. On
# the left, with the backbone frozen, AMP at batch 512 needs about as much as FP32 at batch 256. On the
# right, with the backbone trained, both bars reach far beyond the line. Freezing brought batch 512 within
# reach, and AMP made it fit.
#
# With AMP, this is still fp32 or wider:
#
# - the images (a copy of them in bf16 comes on top), the weights, and the optimizer's state;
# - the positions of the maxima in max pooling, which are int64 in every precision.
#
# Weight gradients are fp32 too. Most of them do not exist yet at the peak, as the backward pass begins.
#
# ## The largest batch
#
# Memory grows in a straight line with the batch: from 256 to 512 by twice as much as from 128 to 256. So
# two counts are enough for the bytes that a step always takes, and the bytes for each image.

# %%
small, half, whole = (peak(size, torch.float32).peak_bytes for size in (128, 256, 512))
assert abs((whole - half) - 2 * (half - small)) < 0.001 * whole
most = {}
for dtype in (torch.float32, torch.bfloat16):
    at_256, at_512 = (peak(size, dtype).peak_bytes for size in (256, 512))
    each = (at_512 - at_256) / 256
    always = at_256 - 256 * each
    most[dtype] = int((LIMIT - always) / each) // 32 * 32  # a multiple of 32
    print(f"{dtype}: {always / 2**20:.0f} MiB, and {each / 2**20:.2f} MiB for each image;", end=" ")
    print(f"largest batch {most[dtype]}")
assert most[torch.bfloat16] > 1.8 * most[torch.float32]

# %% [markdown]
# AMP fits about twice as many images. These are upper bounds, with every byte of the GPU used for tensors.
# For your own model, [notebook 09](09_xray_your_model.ipynb#Will-it-fit?) forecasts the same from its
# shapes.

# %%
workspace.cleanup()  # deletes generated pictures

# %% [markdown]
# ## Run out of memory on purpose (optional)
#
# On a GPU we can check the count. `set_per_process_memory_fraction` limits PyTorch's allocator to 6 GiB. A
# step that needs more [runs out of
# memory](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html),
# which raises `torch.OutOfMemoryError`.


# %%
def fits_on_gpu(batch_size, dtype):
    """Whether two training steps run within the memory that the allocator may use."""
    try:
        two_steps(batch_size, dtype, device)
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # the next try starts with no memory in the cache
    return True


# %% [markdown]
# Now we try four batches in each precision, if there is a GPU that PyTorch calls `cuda`:

# %% tags=["nbval-ignore-output"]
largest_fit = {}
if device.type == "cuda":
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1, LIMIT / total), device.index)
    for dtype in (torch.float32, torch.float16):
        fitting = [size for size in (256, 512, 768, 1024) if fits_on_gpu(size, dtype)]
        print(f"{dtype} fits: {', '.join(map(str, fitting))}")
        largest_fit[dtype] = max(fitting)
    torch.cuda.set_per_process_memory_fraction(1.0, device.index)  # no limit
    assert largest_fit[torch.float16] >= 512
    assert largest_fit[torch.float16] >= 1.5 * largest_fit[torch.float32]
else:
    print("no such GPU here: what was counted stands alone")

# %% [markdown]
# Expect less than was counted [*(not yet seen on a GPU)*](../data/results/README.md "memory-limit"). As
# [PyTorch's notes on CUDA memory](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management) explain, the
# allocator cuts its memory into blocks. A free block that is too small for the next tensor cannot be used
# for it.
#
# ## Summary
#
# - With the backbone frozen, its activations need not be saved. Here that saves far more memory than AMP
#   does. Its running averages still move in training mode.
# - AMP halves most activations; weights, optimizer state and images stay fp32.
# - A dispatch mode under `FakeTensorMode` counts the memory of a step that does not fit into your machine.
# - A batch that by this count nearly fills the GPU may not fit, so leave some room.
# - Use one scaler for the whole run.
# - Twice the batch means half the steps in an epoch, so compare accuracies at the same batch size.
#
# Next, [notebook 07](07_training_recipes.ipynb) clips, accumulates, averages and compiles under AMP.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if not,
# why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("06_caltech256_resnet50")

# %% [markdown]
# ### 1. The size of a tensor
#
# A convolution returns 128 maps of 56x56 for each of 256 images, in bf16. How many MiB is that?

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
# That is 196 MiB. In FP32 it would be 392.
#
# </details>
#
# ### 2. The largest batch for another GPU
#
# By the counts above, a step with AMP takes 96 MiB in any case and 5.55 MiB for each image. What is the
# largest multiple of 32 that fits into 8 GiB, if we leave 1 GiB free for what is not counted?

# %%
largest = ...
exercises.check_largest_batch(largest)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many MiB are left for images? Divide, then go down to a multiple of 32.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# largest = int((7 * 1024 - 96) / 5.55) // 32 * 32
# ```
#
# 7072 MiB are left for images. That is room for 1274, and the next multiple of 32 below is 1248.
#
# </details>
#
# ### 3. Train the head alone
#
# Complete `head_mode`: afterwards the head `model.fc` is in training mode, and no running average of the
# backbone moves any more.


# %%
def head_mode(model):
    return ...  # set the modes, and return the model


exercises.check_head_mode(head_mode)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `requires_grad` does not help here. Every module has a mode of its own, and `eval()` of a module sets that
# of all modules inside it.
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
# `train` would have to call this in place of `model.train()`, since that switches everything back.
#
# </details>
#
# ### 4. What AMP halves
#
# Everything is trained, and the forward pass runs under autocast. Which of these take half as many bytes as
# in FP32: `"images"`, `"activations"`, `"weights"`, `"gradients"`, `"optimizer state"`?

# %%
halved = ...  # a set of names
exercises.check_halved(halved)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Ask of each which dtype it has: who made it, an op under autocast or you?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# halved = {"activations"}
# ```
#
# You made images and weights in fp32, a gradient has the dtype of its weight, and AdamW's moments have that
# of the weight too. Of these, only what ops return under autocast is narrow.
#
# </details>
#
# ## Further reading
#
# - [He et al., *Deep residual learning for image recognition*](https://arxiv.org/abs/1512.03385):
#   the network.
# - [Griffin, Holub and Perona, *Caltech-256*](https://data.caltech.edu/records/nyy15-4j048): the
#   photographs.
# - [CUDA memory management](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management):
#   what the caching allocator does, and how to look into it.
# - [Fake tensors](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_fake_tensor.html), and
#   [extending PyTorch](https://docs.pytorch.org/docs/stable/notes/extending.html): the two modes.
