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
# **What you'll do.** Give a ResNet-50 a new head for the 256 classes of Caltech-256; train it in
# FP32 and with AMP; find out why a 6 GB card runs out of memory at batch 512 in FP32, and does not
# with AMP; save the run and load it again.
#
# **What you'll learn.**
# - what freezing a backbone saves, and what it does not freeze;
# - how one loop serves every precision, with one scaler for the whole run;
# - how to count the memory of a training step, tensor by tensor, without having that memory;
# - why AMP nearly halves it, and what stays as it was.
#
# **What you need.** [Notebook 04](04_fp32_vs_amp.ipynb), for the AMP step and for measuring. It
# runs on a CPU, on generated pictures; with Caltech-256, pretrained weights and a GPU, the same
# cells do the real thing.
#
# The task comes from a tutorial, *Automatic mixed precision training using PyTorch*, whose
# author had a GTX 1060 with 6 GB, 26,802 training and 2,978 test images. This is its table, for ten
# epochs:
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
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import ResNet50_Weights, resnet50

from course import figures, start

from amp_lab import Precision, compare, describe_device, load_checkpoint, make_stand_in
from amp_lab.train.checkpoint import save_checkpoint
from amp_lab.train.data import batches, load_dataset

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# ## The idea in five lines
#
# The first convolution of a ResNet-50 turns each image of 224x224 pixels into 64 maps of 112x112. Before
# you run this cell: how much of a card with 6 GiB does that one tensor take at batch 512?

# %%
GIB = 2**30
CARD = 6 * GIB  # the memory of that card, in bytes
maps = torch.empty(512, 64, 112, 112, device="meta")  # has a shape, and no memory
for dtype in (torch.float32, torch.float16):
    size = maps.to(dtype).nbytes
    print(f"{dtype}: {size / GIB:.2f} GiB, {size / CARD:.0%} of the card")
assert 3 * maps.nbytes < CARD < 4 * maps.nbytes
with torch.device("meta"):
    assert resnet50().conv1(torch.empty(512, 3, 224, 224)).shape == maps.shape

# %% [markdown]
# It takes a quarter of the card in FP32. Three such tensors fit and a fourth does not, and a network has
# to hold several at a time. With half as many bytes for each number there is room for about twice as
# many images.
#
# ## Settings and data
#
# The quick scale keeps the network and takes small pictures; without Caltech-256, generated ones of four classes.

# %%
DOWNLOAD = False  # True: fetch 1.2 GB of photographs and 98 MB of weights where they are missing
config = {
    "quick": {
        "image_size": 64,  # pixels a side
        "batch_size": 16,
        "epochs": 2,
        "lr": 1e-3,  # of AdamW
        "workers": 0,  # processes that read images
        "stand_in": {"classes": 4, "images_per_class": 40},  # without Caltech-256
    },
    "full": {
        "image_size": 224,
        "batch_size": 256,
        "epochs": 10,
        "lr": 1e-3,
        "workers": 8,
        "stand_in": {"classes": 256, "images_per_class": 20},
    },
}[scale]

# %% [markdown]
# Caltech-256 is a folder of folders, one for each class, and is looked for in `data/`. If it is not
# there, we generate pictures in the same layout: the cells below then run as on the real ones, but no
# accuracy will mean anything.

# %% tags=["nbval-ignore-output"]
workspace = tempfile.TemporaryDirectory()  # for the pictures, and later a checkpoint
root = Path("data") if Path("data").is_dir() else Path("../data")  # the notebook may run in either
places = [root / "256_ObjectCategories", root / "caltech256" / "256_ObjectCategories"]
if DOWNLOAD and not any(place.is_dir() for place in places):
    load_dataset("caltech256", root)
place = next((place for place in places if place.is_dir()), None)
if place is None:
    place = make_stand_in("caltech256", workspace.name, **config["stand_in"])
data = load_dataset("caltech256", place, image_size=config["image_size"], download=False)
print("generated pictures, not Caltech-256" if data.stand_in else "the real Caltech-256")
assert place.name == "256_ObjectCategories"

# %% [markdown]
# `load_dataset` leaves out the folder `257.clutter`, which is not a class, and keeps about one image in ten
# of each class for testing. The parts are the same in each run; otherwise the accuracies of two runs would
# be of two different tests. <!-- tests/train/data/test_caltech256.py -->

# %% tags=["nbval-ignore-output"]
print(f"{len(data.train)} images for training, {len(data.test)} for testing")
again = load_dataset("caltech256", place, image_size=config["image_size"], download=False)
assert again.fingerprint == data.fingerprint  # the same images in the same parts
assert not any("clutter" in name for name in data.classes)

# %% [markdown]
# ## The network: a frozen backbone and a new head
#
# We use weights trained on ImageNet if torchvision has them in its cache, or if `DOWNLOAD` lets it fetch
# them. With random weights the features are random too, and the head learns little from them here: what
# we can compare then is precision with precision.

# %% tags=["nbval-ignore-output"]
weights = ResNet50_Weights.IMAGENET1K_V2
cached = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
if not (cached.exists() or DOWNLOAD):
    weights = None
print("pretrained weights" if weights else "random weights: the accuracy will mean little")
assert cached.name.startswith("resnet50-")

# %% [markdown]
# To freeze the backbone, we switch off the gradients of all its parameters. The new head is made
# afterwards, so it has them switched on.


# %%
def transfer_model(classes, weights=None):
    """A ResNet-50 whose backbone is frozen, with a new head for `classes` classes."""
    model = resnet50(weights=weights)
    model.requires_grad_(False)
    model.fc = nn.Linear(model.fc.in_features, classes)
    return model


# %% [markdown]
# How many parameters are left to train, for 256 classes?

# %%
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
# ## One step for every precision
#
# The marked lines are AMP. `enabled=` switches off what is not needed, so FP32 needs no branch. The
# logits become fp32 because [on CUDA](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) the
# log-softmax within `cross_entropy` returns few digits otherwise.


# %%
def train_step(model, images, targets, optimizer, scaler, dtype):
    """One training step; returns the loss, and the logits (B, classes)."""
    amp = dtype is not torch.float32
    with torch.autocast(images.device.type, dtype=dtype, enabled=amp):  # AMP
        logits = model(images)
        loss = F.cross_entropy(logits.float(), targets)
    scaler.scale(loss).backward()  # AMP: was loss.backward()
    scaler.step(optimizer)  # AMP: was optimizer.step()
    scaler.update()  # AMP
    optimizer.zero_grad()
    return loss.detach(), logits.detach()


# %% [markdown]
# The rest of the loop is the same in every precision. We sum loss and accuracy on the device and
# read them once at the end, since a read in each step would make the CPU [wait for the
# GPU](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization).


# %%
def train_epoch(model, loader, optimizer, scaler, dtype):
    """Train on each batch once; return mean loss and accuracy (0 to 1)."""
    model.train()
    loss_sum = correct = samples = 0
    for images, targets in loader:
        images = images.to(device, non_blocking=True)  # (B, 3, S, S)
        targets = targets.to(device, non_blocking=True)  # (B,)
        loss, logits = train_step(model, images, targets, optimizer, scaler, dtype)
        loss_sum += loss * len(targets)
        correct += (logits.argmax(1) == targets).sum()
        samples += len(targets)
    return loss_sum.item() / samples, correct.item() / samples


# %% [markdown]
# Evaluation has autocast and no scaler. A scaler protects gradients, and here there are none.


# %%
@torch.inference_mode()
def evaluate(model, loader, dtype):
    """Mean loss and accuracy (0 to 1) over the batches, in evaluation mode."""
    model.eval()
    loss_sum = correct = samples = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):  # AMP
            logits = model(images)
            loss = F.cross_entropy(logits.float(), targets)
        loss_sum += loss * len(targets)
        correct += (logits.argmax(1) == targets).sum()
        samples += len(targets)
    return loss_sum.item() / samples, correct.item() / samples


# %% [markdown]
# ## FP32 and AMP runs
#
# A run is a network, an optimizer and *one* scaler, made once. A new one in each epoch would forget
# the loss scale that the last one had found.


# %%
def new_run(precision):
    """Network, optimizer and scaler for a run, the same at the start in every precision."""
    torch.manual_seed(0)
    model = transfer_model(len(data.classes), weights).to(device)
    optimizer = torch.optim.AdamW(model.fc.parameters(), lr=config["lr"])
    scaler = torch.amp.GradScaler(device.type, enabled=(precision is Precision.FP16))  # AMP
    return model, optimizer, scaler


def make_loader(part, epoch=None):
    """Batches of the training images in the order of an epoch, or of the test images."""
    order = {} if epoch is None else {"epoch": epoch, "seed": 0, "drop_last": True}
    workers = config["workers"]
    return batches(part, config["batch_size"], workers=workers, device=device, **order)


# %% [markdown]
# As in notebook 04, FP32 means IEEE arithmetic, with TF32 switched off: `float32_mode` of a precision sees
# to that for the whole run. <!-- tests/core/test_precision.py -->


# %%
def train(precision):
    """Train a new network; return the run and what the table shows."""
    model, optimizer, scaler = run = new_run(precision)
    with precision.float32_mode(device.type):
        for epoch in range(config["epochs"]):
            loader = make_loader(data.train, epoch)
            train_loss, _ = train_epoch(model, loader, optimizer, scaler, precision.dtype)
        _, accuracy = evaluate(model, make_loader(data.test), precision.dtype)
    return run, {"train_loss": train_loss, "accuracy": accuracy}


# %% [markdown]
# We compare up to four precisions on a GPU, and FP32 and bf16 on a CPU, since many are [very slow in
# fp16](../docs/hardware.md). Batch size, images and first weights are the same in each.

# %% tags=["nbval-ignore-output"]
precisions = {
    "cuda": [Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16],
    "mps": [Precision.FP32, Precision.FP16],
}.get(device.type, [Precision.FP32, Precision.BF16])
report = describe_device(device)
precisions = [p for p in precisions if report.rates[p] is not None]  # not every GPU has TF32
results = {}
for precision in precisions:
    run, result = train(precision)  # only the last run is kept
    results[precision] = result
    baseline = results[Precision.FP32]
    off = result["train_loss"] / baseline["train_loss"] - 1
    print(f"{precision}: training loss {result['train_loss']:.3f} ({off:+.1%}),", end=" ")
    print(f"test accuracy {result['accuracy']:.1%}")
    assert abs(off) < 0.1
    error = (0.25 / len(data.test)) ** 0.5  # the standard error of an accuracy is at most this
    assert abs(result["accuracy"] - baseline["accuracy"]) <= 3 * 2**0.5 * error

# %% [markdown]
# One run of each cannot tell whether a few percent between two losses are precision or chance:
# [notebook 04](04_fp32_vs_amp.ipynb) takes several seeds. The accuracy says nothing about a ResNet-50
# here: with random weights and four classes of generated pictures, 25 % is what guessing gives. On the
# tutorial's test set, one image more is worth 0.03 points.
#
# ## Time: a step, and all around it
#
# How much faster is a step with AMP? The precisions take turns on a batch that is already on the device.
# `compare` watches whether the machine is busy meanwhile, as [notebook
# 04](04_fp32_vs_amp.ipynb#Time-of-a-training-step) explains, and `is_possible` checks that a speed-up is
# not far larger than the device can give.


# %%
def step_alone(precision, images, targets):
    """A function that takes a training step of a new network, on one batch."""
    model, optimizer, scaler = new_run(precision)

    def step():
        with precision.float32_mode(device.type):
            return train_step(model, images, targets, optimizer, scaler, precision.dtype)

    return step


def is_possible(times, name):
    """Whether the device can gain so much over FP32: by its rates, or 2x from half the bytes."""
    gain = times.ratio(Precision.FP32, name)
    limit = 1.5 * max(2, report.speedup(name))  # a convolution may gain more than the product
    return gain.median <= limit or not (gain.trusted and report.trusted)


# %% tags=["nbval-ignore-output"]
images, targets = (part.to(device) for part in next(iter(make_loader(data.train, epoch=0))))
steps = {precision: step_alone(precision, images, targets) for precision in precisions}
step_times = compare(steps, device=device, budget_s=6)
print(step_times)
assert all(is_possible(step_times, precision) for precision in precisions)

# %% [markdown]
# Each time but FP32's has the speed-up and its interval beside it. Here bf16 is 1.4 times as fast.
# *Too busy to tell* means that something else ran on the machine: stop it, and run the cell
# again. <!-- tests/core/test_timing.py -->
#
# An epoch also reads, decodes and augments images on the CPU, in every precision alike. If reading a batch
# takes about as long as a step, use more workers before a lower precision, since AMP cannot help there.
#
# Now read the tutorial's table again, and ask what it compares.

# %%
fp32_minutes, amp_minutes = 68.1, 61.7
steps_at = {size: -(-26_802 // size) * 10 for size in (256, 512)}  # in ten epochs, rounded up
print(f"speed-up {fp32_minutes / amp_minutes:.2f}x; optimizer steps: {steps_at}")
assert steps_at == {256: 1050, 512: 530}
assert round(100 / 2_978, 2) == 0.03  # what one test image is worth, in points

# %% [markdown]
# The accuracies, 83.1 % and 80.9 %, come from one run each, at different batch sizes, and AMP's had about half
# as many steps to learn in. The 2.2 points may be due to that, to chance, or to fp16; the table cannot tell.
# A speed-up of only 1.10x is no surprise either, since a GTX 1060 is older than [Tensor
# Cores](https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html), the units
# that multiply fp16 matrices faster. On that card AMP mostly made room for a larger batch.
#
# ## Where the memory of a step goes
#
# Why did FP32 at batch 512 not fit? We count the bytes. A dispatch mode sees the operations that
# PyTorch carries out, and what they return. Ours keeps a dictionary of the storages returned, from
# which an entry vanishes when its storage is freed, and remembers the worst
# moment. <!-- tests/notebooks/test_06_caltech256_resnet50.py -->


# %%
class LiveTensors(TorchDispatchMode):
    """Notes what memory tensors take up within its block: shape, dtype and bytes of each."""

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
# We count two steps of a new network on random images. The second step also has the state that the
# optimizer made in the first.


# %%
def two_steps(batch_size, dtype, device, *, image_size=224, freeze=True):
    """Train a new network for two steps; everything it needs is made here, and gone afterwards."""
    with torch.device(device):
        model = transfer_model(256)
        images = torch.rand(batch_size, 3, image_size, image_size)
        targets = torch.randint(256, (batch_size,))
    if not freeze:
        model.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    scaler = torch.amp.GradScaler(device.type, enabled=(dtype is torch.float16))
    for _ in range(2):
        train_step(model, images, targets, optimizer, scaler, dtype)


# %% [markdown]
# A real step at batch 512 would take gigabytes, so we let PyTorch pretend. Under `FakeTensorMode` a
# layer returns a tensor of the right shape and dtype, but takes no memory for its numbers and does not
# compute them: the cell makes a tensor of 4 TiB to show it. (Both modes live in modules with an
# underscore, so they may move.)

# %%
from torch._subclasses.fake_tensor import FakeTensorMode


@functools.cache
def peak(batch_size, dtype, **options):
    """A `LiveTensors` that has seen two training steps on fake tensors, with its peak."""
    with FakeTensorMode(), LiveTensors() as live:
        two_steps(batch_size, dtype, torch.device("cpu"), **options)
    return live


with FakeTensorMode():
    assert (torch.ones(2**40) + 1).nbytes == 2**42

# %% [markdown]
# Can we trust the pretence? On a batch small enough to run, it must count what real tensors take.

# %% tags=["nbval-ignore-output"]
for dtype in (torch.float32, torch.bfloat16):
    with LiveTensors() as real:
        two_steps(8, dtype, torch.device("cpu"), image_size=96)
    counted, fake = real.peak_bytes, peak(8, dtype, image_size=96).peak_bytes
    print(f"{dtype}: {counted / 2**20:.1f} MiB real, {fake / 2**20:.1f} MiB fake")
    assert abs(fake / counted - 1) < 0.001  # a few small buffers may differ in dtype

# %% [markdown]
# It finds the same to the last tenth of a MiB. Now the three rows of the tutorial's table, with bf16, which
# has as many bytes as fp16. Before you run this: how much will AMP need at batch 512, compared with FP32 at
# 256 and at 512?

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
# AMP needs 2.87 GiB for 512 images, little more than the 2.73 GiB of FP32 for 256. FP32 with 512
# images needs 5.36 GiB, which leaves less than 1 GiB for what our count does not see, such as [what
# CUDA and its libraries allocate](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html)
# outside of PyTorch. The tutorial's table says that its card ran out.
#
# ## Why it is not quite half
#
# Here is what was in memory at the worst moment, largest first.


# %%
def print_peak(live, least=64 * 2**20):
    """Print the tensors alive at the peak, those alike in one line; small ones are added up."""
    rest = 0
    for (shape, dtype, size), n in sorted(Counter(live.peak).items(), key=lambda kv: -kv[0][2]):
        if size >= least:
            print(f"  {n} x {size / 2**20:6.0f} MiB  {str(dtype)[6:]:8}  {shape}")
        else:
            rest += n * size
    print(f"  all others {rest / 2**20:.0f} MiB")


for name in ("FP32, batch 512", "AMP, batch 512"):
    print(name)
    print_peak(frozen[name])
    assert Counter(shape for shape, _, _ in frozen[name].peak)[512, 256, 56, 56] == 3

# %% [markdown]
# The worst moment is in the first residual block, where three tensors of 256 maps are alive: what
# its three convolutions give, and its shortcut before and after batch normalisation. The 64 maps are the
# block's input. With AMP all these maps take half the bytes, while the images and the weights,
# which make up most of the rest, stay fp32. Earlier maps are gone: no parameter of the frozen backbone
# needs a gradient, so a map is freed once no later layer needs it.
#
# ## And if the backbone is trained?
#
# Then whatever the backward pass needs is kept until it has used it, and there is optimizer state for every
# weight. Before you run this: will 512 images fit with AMP?

# %%
unfrozen = {
    "FP32, batch 512": peak(512, torch.float32, freeze=False),
    "AMP, batch 512": peak(512, torch.bfloat16, freeze=False),
}
for name, live in unfrozen.items():
    by_dtype = Counter()
    for _, dtype, size in live.peak:
        by_dtype[str(dtype)[6:]] += size
    print(f"{name}: {live.peak_bytes / GIB:.1f} GiB;", end=" ")
    print(", ".join(f"{k} {v / 2**20:.0f} MiB" for k, v in by_dtype.items() if v > 2**20))
assert all(live.peak_bytes > 3 * CARD for live in unfrozen.values())
maxima = ((512, 64, 56, 56), torch.int64, 784 * 2**20)
assert all(maxima in live.peak for live in unfrozen.values())
seen = [found[:2] for found in unfrozen["AMP, batch 512"].peak]
assert ((512, 3, 224, 224), torch.bfloat16) in seen  # a copy of the images

# %% [markdown]
# They do not: AMP brings 41.6 GiB down to 21.7 GiB. Images, weights and the two moments of AdamW
# stay fp32, and a copy of the images in bf16 comes on top. (Most gradients are not there yet:
# memory peaks as the backward pass begins.) The int64 are the places where max pooling found its
# maxima, 8 bytes each in every precision.

# %%
_ = figures.memory_by_dtype(
    {"backbone frozen": frozen, "backbone trained": unfrozen}, limit=CARD, limit_label="6 GiB"
)

# %% [markdown]
# Each bar is the memory of one step, split by dtype; the dashed line is the card. On the left, with the
# backbone frozen, the bar of AMP at batch 512 is about as long as that of FP32 at batch 256, and that of
# FP32 at 512 comes close to the line. On the right, with the backbone trained, both bars reach far beyond
# the line. Freezing brought batch 512 within reach, and AMP made it fit.
#
# ## The largest batch
#
# Memory grows in a straight line with the batch, as the next cell checks: from 256 to 512 by twice
# as much as from 128 to 256. So two counts are enough to know the rest.

# %%
small, half, whole = (peak(size, torch.float32).peak_bytes for size in (128, 256, 512))
assert abs((whole - half) - 2 * (half - small)) < 0.001 * whole


def bytes_of_step(dtype):
    """Bytes that a step takes in any case, and bytes for each image."""
    low, high = (peak(size, dtype).peak_bytes for size in (256, 512))
    each = (high - low) / 256
    return low - 256 * each, each


# %% [markdown]
# To find the largest batch, we double it until it no longer fits, then halve the interval. The caller says
# what *fits* means, so that the same search works on a real GPU.


# %%
def largest_batch(fits, multiple=32):
    """The largest multiple for which `fits(batch_size)` is true; 0 if there is none."""
    low, high = 0, multiple  # low fits, high is not known to
    while fits(high):
        low, high = high, 2 * high
    while high - low > multiple:
        middle = (low + high) // 2 // multiple * multiple
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# %% [markdown]
# By counting, a batch fits if its bytes are no more than the card has:

# %%
most = {}
for dtype in (torch.float32, torch.bfloat16):
    always, each = bytes_of_step(dtype)
    most[dtype] = largest_batch(lambda n, always=always, each=each: always + n * each <= CARD)
    print(f"{dtype}: {always / 2**20:.0f} MiB, and {each / 2**20:.2f} MiB for each image;", end=" ")
    print(f"largest batch {most[dtype]}")
assert most[torch.bfloat16] > 1.8 * most[torch.float32]

# %% [markdown]
# AMP fits 1088 images where FP32 fits 544. These are upper bounds, with every byte of the card used for
# tensors; an optional section below shows how to try it on a GPU.
#
# ## Checkpoints
#
# A run is more than its weights. To go on as if nothing had happened, it also needs the state of
# the optimizer, and that of the scaler. `save_checkpoint` takes whatever has a `state_dict`, and
# writes the file so that a crash leaves the old one or the new one, never half of one. <!-- tests/train/checkpoint/test_checkpoint_file.py -->

# %% tags=["nbval-ignore-output"]
model, optimizer, scaler = run  # of the last precision above
path = Path(workspace.name) / "checkpoint.pt"
save_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler, epochs=config["epochs"])
loss, accuracy = evaluate(model, make_loader(data.test), precision.dtype)
print(f"saved {path.stat().st_size / 2**20:.0f} MiB; test accuracy {accuracy:.1%}")
assert accuracy == results[precision]["accuracy"]

# %% [markdown]
# Then we make everything anew and load the states into it. Evaluated in the same precision, the network
# that was loaded must give what the saved one gave, to the last bit.

# %% tags=["nbval-ignore-output"]
model, optimizer, scaler = new_run(precision)
state = load_checkpoint(path)
for name, thing in {"model": model, "optimizer": optimizer, "scaler": scaler}.items():
    thing.load_state_dict(state[name])
loaded_loss, loaded_accuracy = evaluate(model, make_loader(data.test), precision.dtype)
print(f"loaded after {state['epochs']} epochs; test accuracy {loaded_accuracy:.1%}")
assert (loaded_loss, loaded_accuracy) == (loss, accuracy)

# %% [markdown]
# It does. To *go on* to the last bit takes some more, namely how far the run has come and every random
# state; [notebook 05](05_cifar10_mobilenet.ipynb) shows that. All of it together is a command:
#
#     pdm run amp-lab train --dataset caltech256 --model resnet50 --freeze --pretrained \
#         --precision bf16 --batch-size 512 --out runs/caltech
#
# It saves after each epoch and when it is told to stop, and with `--resume` [it goes
# on](../docs/train.md).
#
# ## Augmentation (optional)
#
# In each epoch a training image is moved, turned and scaled a little differently, and may be mirrored. In
# one data set, the changes depend only on the seed, the epoch and the image's index. So a run that stops
# can go on, and two precisions train on the
# very same pixels. <!-- tests/train/data/test_caltech256.py --> <!-- tests/train/data/test_images.py -->


# %%
def training_image(index, epoch):
    """A training image (3, S, S) as it looks in an epoch, normalised."""
    return data.train[epoch * len(data.train) + index][0]


first = training_image(0, epoch=0)
assert first.shape == (3, config["image_size"], config["image_size"])
assert torch.equal(first, training_image(0, epoch=0))  # the same key, the same pixels
assert not torch.equal(first, training_image(0, epoch=1))

# %% [markdown]
# Images are normalised: from each colour channel its mean is subtracted, and the rest divided by
# its standard deviation, both over ImageNet. The pretrained weights expect just that: without it, a
# frozen backbone gets inputs unlike those it was trained on.

# %%
expected = ResNet50_Weights.IMAGENET1K_V2.transforms()
mean, std = (torch.tensor(v).view(3, 1, 1) for v in (expected.mean, expected.std))
pixels = first * std + mean  # undone
assert pixels.min() > -1e-5
assert pixels.max() < 1 + 1e-5

# %% [markdown]
# Two images, each in five epochs, with the normalisation undone:

# %% tags=["nbval-ignore-output"]
shown = {}
for index in (0, len(data.train) // 2):
    name = data.classes[data.train.targets[index]]
    shown[name] = [training_image(index, epoch) * std + mean for epoch in range(5)]
_ = figures.augmentation_grid(shown)

# %% [markdown]
# A row of the picture is one image, a column an epoch. The thing shown stays the same, but its
# place, size and angle change, and it may be mirrored. What lies beside the photograph is black.

# %%
workspace.cleanup()  # deletes the generated pictures and the checkpoint
assert not path.exists()

# %% [markdown]
# ## Run out of memory on purpose (optional)
#
# On a GPU we can do better than count, and really run out of memory.
# `set_per_process_memory_fraction` limits PyTorch's allocator to 6 GiB on a larger card. A step
# that needs more [runs out of
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
        torch.cuda.empty_cache()  # the next try starts with nothing held back
    return True


# %% [markdown]
# The limit is given as a share of what the card has, and taken back at the end of the block.


# %%
@contextmanager
def memory_limit(limit):
    """Within the block, PyTorch may use only `limit` bytes of the GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device.index)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total), device.index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.index)


# %% [markdown]
# Now we run the experiment, if there is a GPU that PyTorch calls `cuda`, from NVIDIA or AMD:

# %% tags=["nbval-ignore-output"]
found = {}
if device.type == "cuda":
    with memory_limit(CARD):
        for dtype in (torch.float32, torch.float16):
            for batch_size in (256, 512):
                fits = fits_on_gpu(batch_size, dtype)
                print(f"{dtype}, batch {batch_size}: {'fits' if fits else 'out of memory'}")
            found[dtype] = largest_batch(lambda n, dtype=dtype: fits_on_gpu(n, dtype))
            print(f"{dtype}, largest batch: {found[dtype]}")
    assert fits  # fp16 at batch 512
    assert found[torch.float16] > 1.5 * found[torch.float32]
else:
    print("no such GPU here, so nothing ran out of memory: what was counted stands alone")

# %% [markdown]
# Expect less than was counted [*(not yet seen on a GPU)*](../data/results/README.md "memory-limit"). As
# [PyTorch's notes on CUDA memory](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management) explain, the
# allocator cuts its memory into blocks, and a free block that is too small for the next tensor is of
# no use to it, though its bytes are free.
#
# ## Summary
#
# One loop trained in each precision, and `enabled=` decided which parts of AMP were on. Here is
# what that gave, with the memory that we counted for batch 512 at 224x224 pixels:

# %% tags=["nbval-ignore-output"]
for precision, result in results.items():
    size = gib["FP32, batch 512" if precision.dtype is torch.float32 else "AMP, batch 512"]
    speedup = "1"  # fp32's own
    if precision is not Precision.FP32:
        speedup = step_times.ratio(Precision.FP32, precision)  # as in the table of steps
    print(f"{precision}: speed-up of a step {speedup}, {size:.2f} GiB,", end=" ")
    print(f"accuracy {result['accuracy']:.1%}")
    assert size < 6

# %% [markdown]
# - Freezing the backbone means that its activations need not be kept, and here that saves far more memory
#   than AMP does. Its running averages still move in training mode.
# - AMP halves most activations; weights, optimizer state and images stay fp32.
# - A batch that by our count nearly fills the card may not fit, so leave room for the rest.
# - Use one scaler for the whole run and none in evaluation, and save its state in the checkpoint.
# - Twice the batch means half the steps an epoch, so compare accuracies at the same batch size.
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
# ### 2. The largest batch for another card
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
# `train_epoch` would have to call this in place of `model.train()`, since that switches everything back.
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
