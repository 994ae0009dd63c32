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
# runs on a CPU in about a minute, on generated pictures; with Caltech-256, pretrained weights and a
# GPU, the same cells do the real thing.
#
# The task comes from a tutorial, *Automatic mixed precision training using PyTorch*, whose
# author had a GTX 1060 with 6 GB. This is its table, for ten epochs:
#
# | | time | accuracy |
# |---|---|---|
# | FP32, batch 256 | 68.1 min | 83.1 % |
# | FP32, batch 512 | out of memory | |
# | AMP, batch 512 | 61.7 min | 80.9 % |

# %% tags=["nbval-ignore-output"]
import csv
import functools
import gc
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import ResNet50_Weights, resnet50

from amp_lab import Precision, compare, describe_device, load_checkpoint, make_stand_in, plots
from amp_lab.checkpoint import save_checkpoint
from amp_lab.data import batches, load_dataset
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()

# %% [markdown]
# The heart of the matter in a few lines. The first convolution turns each image of 224x224 pixels
# into 64 maps of 112x112. How large is that one tensor, at batch 512?

# %%
GIB = 2**30
CARD = 6 * GIB  # the memory of that card, in bytes
maps = torch.empty(512, 64, 112, 112, device="meta")  # has a shape, and no memory
for dtype in (torch.float32, torch.float16):
    size = maps.to(dtype).nbytes
    print(f"{dtype}: {size / GIB:.2f} GiB, {size / CARD:.0%} of the card")
assert 3 * maps.nbytes < CARD < 4 * maps.nbytes

# %% [markdown]
# Three such tensors fit in FP32, a fourth does not, and a network has to hold several at a time.
# With half as many bytes a number, there is room for twice as many images.
#
# ## Settings
#
# The quick scale keeps the network, and takes small pictures of few classes.

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
# ## The data: a folder becomes a table
#
# Caltech-256 is a folder of folders, one for each class, and is looked for in `data/`. If it is not
# there, we generate pictures in the same layout: everything below then works as on the real ones,
# but no accuracy will mean anything.

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
# The layout: a number and a name for each class, and JPEG files of any size. The last folder,
# `257.clutter`, holds pictures of nothing in particular.

# %% tags=["nbval-ignore-output"]
folders = sorted(path for path in place.iterdir() if path.is_dir())
for folder in [*folders[:3], folders[-1]]:
    files = sorted(folder.glob("*.jpg"))
    print(f"{folder.name}/  {len(files)} images: {files[0].name} … {files[-1].name}")
assert folders[-1].name == "257.clutter"

# %% [markdown]
# `load_dataset` has made a table of the images, with the path and the target of each. Clutter is
# not a class, so it is not in the table.

# %% tags=["nbval-ignore-output"]
table = place.parent / "caltech256.csv"
print("".join(table.read_text().splitlines(keepends=True)[:4]))
with table.open(newline="") as file:
    images = list(csv.DictReader(file))
per_class = Counter(int(image["target"]) for image in images)
print(f"{len(images)} images in {len(per_class)} classes; {len(folders)} folders")
assert not any("clutter" in image["path"] for image in images)
assert len(per_class) == len(data.classes) == len(folders) - 1

# %% [markdown]
# Every tenth image is for testing. The split is stratified, so each class gives its share, and it
# is the same in each run: otherwise the accuracies of two runs would be of two different tests. The
# tutorial reports 26,802 training and 2,978 test images in the real one.

# %% tags=["nbval-ignore-output"]
tests_per_class = data.test.targets.bincount(minlength=len(data.classes))
print(f"{len(data.train)} images for training, {len(data.test)} for testing")
assert len(data.train) + len(data.test) == len(images)
assert all(abs(tests_per_class[c] - n / 10) <= 1 for c, n in per_class.items())
again = load_dataset("caltech256", place, image_size=config["image_size"], download=False)
assert again.fingerprint == data.fingerprint  # the same images in the same parts

# %% [markdown]
# ## Augmentation
#
# In each epoch a training image is cropped, flipped, turned and scaled a little differently. How,
# depends on nothing but a seed, the epoch and the number of the image. So a run that stops can go
# on, and two precisions train on the very same pixels.


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
# its standard deviation, both over ImageNet. Pretrained weights expect just that. The tutorial left
# it out, which gives a frozen backbone inputs unlike those it was trained on.

# %%
expected = ResNet50_Weights.IMAGENET1K_V2.transforms()
mean, std = (torch.tensor(v).view(3, 1, 1) for v in (expected.mean, expected.std))
pixels = first * std + mean  # undone
assert pixels.min() > -1e-5
assert pixels.max() < 1 + 1e-5

# %% [markdown]
# Two images, each in five epochs, with the normalisation undone:

# %% tags=["nbval-ignore-output"]
rows = {}
for index in (0, len(data.train) // 2):
    name = data.classes[data.train.targets[index]]
    rows[name] = [training_image(index, epoch) * std + mean for epoch in range(5)]
_ = plots.augmentation_grid(rows)

# %% [markdown]
# A row is one image, a column an epoch. The thing in the picture stays what it is; its place, size,
# angle and side change. The corners that a turned image leaves empty are black.
#
# ## The network: a frozen backbone and a new head
#
# Weights trained on ImageNet are used if torchvision has them in its cache, or if `DOWNLOAD` lets
# it fetch them. With random weights the features are random too, and the head can learn little from
# them: what can be compared then is precision with precision.

# %% tags=["nbval-ignore-output"]
weights = ResNet50_Weights.IMAGENET1K_V2
cached = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
if not (cached.exists() or DOWNLOAD):
    weights = None
print("pretrained weights" if weights else "random weights: the accuracy will mean little")
assert cached.name.startswith("resnet50-")

# %% [markdown]
# To freeze is to switch off gradients for what is there; the new head, made afterwards, has them
# switched on.


# %%
def transfer_model(classes, weights=None):
    """A ResNet-50 whose backbone is frozen, with a new head for `classes` classes."""
    model = resnet50(weights=weights)
    model.requires_grad_(False)
    model.fc = nn.Linear(model.fc.in_features, classes)
    return model


# %% [markdown]
# Counted for 256 classes, and compared with what the tutorial printed:

# %%
model = transfer_model(256)
parameters = sum(p.numel() for p in model.parameters())
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
old_head = 2048 * 1000 + 1000  # the head for the classes of ImageNet, now gone
print(f"{parameters:,} parameters, {trained:,} trained")
assert trained == 2048 * 256 + 256 == 524_544  # as in the tutorial
assert parameters + old_head == 26_081_576  # the tutorial's number

# %% [markdown]
# The tutorial trains as many parameters, and has 2,049,000 more in all. That is the size of the old
# head, to the last parameter, so it must have kept it beside the new one, where it only takes up
# room.
#
# Frozen *parameters* are not a frozen *network*. In training mode batch normalisation uses the
# statistics of the batch, and moves its running averages towards them, whatever `requires_grad`
# says.

# %%
before = {key: value.clone() for key, value in model.state_dict().items()}
model.train()(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
assert not {k for k, _ in model.named_parameters()} & set(changed)
assert len(changed) == 3 * 53  # mean, variance and a counter, in each of 53 batch normalisations

# %% [markdown]
# Here that is welcome, since the averages adapt to the new pictures. Where it is not, put the
# backbone into evaluation mode (exercise 1).
#
# ## One step for every precision
#
# The marked lines are AMP. `enabled=` switches each part off where it is not needed, so there is no
# second branch for FP32. The logits are made fp32 before the loss, because on CUDA the log-softmax
# within `cross_entropy` would otherwise give its result in fp16 or bf16, with few digits.


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
# The rest of the loop has no precision in it. Loss and accuracy are summed up on the device, and
# read once at the end: a read in each step would make the CPU wait.


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
# Evaluation has autocast and no scaler. A scaler protects gradients, and here there are none. (The
# tutorial has one here too, with nothing to do.)


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
# A run is a network, an optimizer and *one* scaler, made once. The tutorial made a new scaler in
# each epoch, which forgets the loss scale that the last one had found.


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
# As in notebook 04, FP32 means IEEE arithmetic, with TF32 switched off. We note how long the fastest
# epoch took, reading of images included. The precisions do not take turns here, so these times are
# for a check further down, and not for a comparison.


# %%
def float32_mode(precision):
    """TF32 off for FP32, on for TF32; nothing to set for the others."""
    return precision.autocast(device.type) if precision.dtype is torch.float32 else nullcontext()


def train(precision):
    """Train a new network; return the run and what the table shows."""
    model, optimizer, scaler = run = new_run(precision)
    times = []
    with float32_mode(precision):
        for epoch in range(config["epochs"]):
            started = time.perf_counter()
            train_loss, _ = train_epoch(
                model, make_loader(data.train, epoch), optimizer, scaler, precision.dtype
            )
            times.append(time.perf_counter() - started)
        _, accuracy = evaluate(model, make_loader(data.test), precision.dtype)
    return run, {"seconds": min(times), "train_loss": train_loss, "accuracy": accuracy}


# %% [markdown]
# On a GPU four precisions run, on a CPU FP32 and bf16, which need no special hardware (fp16 is
# very slow on most CPUs). Same batch size, same images, same first weights: nothing but the
# precision differs.

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
    print(f"{precision}: training loss {result['train_loss']:.3f},", end=" ")
    print(f"test accuracy {result['accuracy']:.1%}")
    baseline = results[Precision.FP32]
    assert abs(result["train_loss"] / baseline["train_loss"] - 1) < 0.1
    error = (0.25 / len(data.test)) ** 0.5  # the standard error of an accuracy is at most this
    assert abs(result["accuracy"] - baseline["accuracy"]) <= 3 * 2**0.5 * error

# %% [markdown]
# The losses agree to a few per cent, as they should: they differ by rounding alone. Mind what you
# have run. With random weights or generated pictures, the accuracy says nothing about a ResNet-50.
# On the real test set, one image more is 0.03 points.
#
# ## Time: a step, and all around it
#
# How much faster is a step with AMP? For an answer the precisions take turns on a batch that is
# already on the device. `compare` watches whether the machine is busy meanwhile, as [notebook
# 04](04_fp32_vs_amp.ipynb#Time-of-a-training-step) explains.


# %%
def step_alone(precision, images, targets):
    """A function that takes a training step of a new network, on one batch."""
    model, optimizer, scaler = new_run(precision)

    def step():
        with float32_mode(precision):
            return train_step(model, images, targets, optimizer, scaler, precision.dtype)

    return step


# %% [markdown]
# No device is faster than its arithmetic. We count the FLOPs of a step, and ask whether the time is
# one in which the device can do them, by the rates that `describe_device` measured. Half as much
# again is allowed, since a convolution is not the square matrix product of which those rates are. A
# speed-up is at most the ratio of the rates, or 2 for what waits for memory: half the bytes.


# %%
from torch.utils.flop_counter import FlopCounterMode


def is_possible(times, precision, flops):
    """Whether the device can do so many FLOPs in the time measured, and gain so much over FP32."""
    if not (times.trusted and report.trusted):
        return True  # nothing has been claimed
    fp32_rate, own_rate = report.rates[Precision.FP32], report.rates[precision]  # FLOP/s
    rate = flops / times.median_s(precision)
    gain = times.ratio(Precision.FP32, precision).median
    within_rate = rate <= 1.5 * max(own_rate, fp32_rate)  # what is emulated is computed in FP32
    return within_rate and gain <= 1.5 * max(2, own_rate / fp32_rate)


def flops_of(function):
    """Multiplications and additions of one call, counted and not timed."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# %% [markdown]
# Here are the steps; each line ends with the speed-up over FP32 and its interval.

# %% tags=["nbval-ignore-output"]
images, targets = (part.to(device) for part in next(iter(make_loader(data.train, epoch=0))))
steps = {precision: step_alone(precision, images, targets) for precision in precisions}
step_flops = flops_of(steps[Precision.FP32])
step_times = compare(steps, device=device, budget_s=6)
print(step_times)
print(f"{step_flops / 1e9:.0f} GFLOP a step of {len(images)} images")
assert all(is_possible(step_times, precision, step_flops) for precision in precisions)

# %% [markdown]
# If an interval lies above 1x, that precision is faster on your device. *Too busy to tell* means
# that something else ran there: stop it, and run the cell again.
#
# An epoch also reads, decodes and augments images on the CPU, in every precision alike. Where that
# takes longest, AMP cannot help. So we time by itself how long the next batch takes to come:


# %%
def all_epochs():
    """The batches of one epoch after the other, without end."""
    epoch = 0
    while True:
        yield from make_loader(data.train, epoch)
        epoch += 1


# %% tags=["nbval-ignore-output"]
batch_stream = all_epochs()
reading = compare({"reading a batch": lambda: next(batch_stream)}, device=device, budget_s=2)
print(reading)
batch_stream.close()
per_epoch = len(data.train) // config["batch_size"]  # steps; the last, smaller batch is left out
for precision in precisions:
    parts = (step_times.time_s(precision), reading.time_s("reading a batch"))
    least_s = per_epoch * max(part.interval[0] for part in parts)
    seconds = results[precision]["seconds"]
    if all(part.trusted for part in parts):
        print(f"{precision}: {per_epoch} steps take at least {least_s:.2f} s,", end=" ")
        print(f"and the fastest epoch took {seconds:.2f} s")
        assert seconds > least_s / 1.2  # the processor's clock rate may have changed
    else:
        print(f"{precision}: too busy to tell how long {per_epoch} steps take at least")

# %% [markdown]
# Worker processes read while the device computes, so an epoch takes at least as long as the slower
# of the two, and on a CPU without workers, as at the quick scale, about as long as both. If reading
# a batch takes about as long as a step, it is the bottleneck: use more workers before a lower
# precision. The epochs were timed as they came, without turns, so take them as a check of the parts:
# the speed-up is that of the table of steps.
#
# Now read the tutorial's table again, and ask what it compares.

# %%
fp32_minutes, amp_minutes = 68.1, 61.7
steps_at = {size: -(-26_802 // size) * 10 for size in (256, 512)}  # in ten epochs, rounded up
print(f"speed-up {fp32_minutes / amp_minutes:.2f}x; optimizer steps: {steps_at}")
assert steps_at == {256: 1050, 512: 530}
assert round(100 / 2_978, 2) == 0.03  # what one test image is worth, in points

# %% [markdown]
# The accuracies, 83.1 % and 80.9 %, come from one run each, at different batch sizes, and AMP's had
# half as many steps to learn in. The 2.2 points may be due to that, to chance, or to fp16; the
# table cannot tell. Nor was much of a speed-up to be expected, since a GTX 1060 is older than [Tensor
# Cores](https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html), the
# units that multiply fp16 matrices faster. What AMP gave that card was memory.
#
# ## Where the memory of a step goes
#
# Why did FP32 at batch 512 not fit? Let us count. A dispatch mode sees each operation that PyTorch
# carries out, and what it returns. Ours keeps a dictionary of the storages that exist, from which
# an entry vanishes when its storage is freed, and remembers what was in it at the worst moment.


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
# What is to be counted: two steps of a new network, on random images. The second step also has the
# state that the optimizer made in the first.


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
# A real step at batch 512 would take gigabytes. So we let PyTorch pretend. Under `FakeTensorMode`
# each operation returns a tensor of the right shape and dtype that holds no numbers, and nothing is
# computed: the cell makes one of 4 TiB to show it. (Both modes live in modules with an underscore:
# well known, but they may move.)


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
# Can the pretence be trusted? For a batch small enough to run, it must find what a real step needs.

# %% tags=["nbval-ignore-output"]
for dtype in (torch.float32, torch.bfloat16):
    with LiveTensors() as real:
        two_steps(8, dtype, torch.device("cpu"), image_size=96)
    counted, fake = real.peak_bytes, peak(8, dtype, image_size=96).peak_bytes
    print(f"{dtype}: {counted / 2**20:.1f} MiB real, {fake / 2**20:.1f} MiB fake")
    assert abs(fake / counted - 1) < 0.001  # a few small buffers may differ in dtype

# %% [markdown]
# It does. Now the three rows of the tutorial's table, with bf16, which has as many bytes as fp16.

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
# There it is: AMP needs for 512 images what FP32 needs for 256. And FP32 with 512 leaves the card
# less than a GiB. That has to do for what our count does not see: the CUDA context, the scratch
# memory of convolutions, the gaps in the allocator, and often a desktop. The tutorial's table says
# that it did not: the card ran out. How large each of these was, only that card could tell.
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
# The worst moment is in the first residual block, where three tensors of 256 maps are alive: the
# block's own output, and its shortcut before and after batch normalisation. The maps are half as
# large with AMP. The images stay fp32, and so do the weights, which make up most of the rest.
# No other maps are there: since nothing in a frozen backbone needs a gradient, they are freed as
# soon as the next layers have used them.
#
# ## And if the backbone is trained?
#
# Then whatever the backward pass needs is kept until it has used it, and there is optimizer state
# for every weight. The same count, with everything trained:

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

# %% [markdown]
# What stays fp32 with AMP are images, weights and the two moments of AdamW: no gradients, because
# when they come, the activations have begun to go. What comes on top are copies of images and
# weights in bf16. And the int64 are the places where max pooling found its maxima, 8 bytes each in
# every precision.

# %%
_ = plots.memory_by_dtype(
    {"backbone frozen": frozen, "backbone trained": unfrozen}, limit=CARD, limit_label="6 GiB"
)

# %% [markdown]
# Each bar is the memory of one step, split by dtype; the dashed line is the card. On the left, with
# the backbone frozen, the bar of AMP at batch 512 is as long as that of FP32 at batch 256, and that
# of FP32 at 512 comes close to the line. On the right, with the backbone trained, both bars reach
# far beyond the line: AMP nearly halves them, but 512 images fit in neither precision. It was
# freezing that brought batch 512 within reach, and AMP that made it fit.
#
# ## The largest batch
#
# Memory grows in a straight line with the batch: from 256 to 512 by twice as much as from 128 to
# 256. So two counts are enough to know the rest.

# %%
small, half, whole = (peak(size, torch.float32).peak_bytes for size in (128, 256, 512))
assert abs((whole - half) - 2 * (half - small)) < 0.001 * whole


def bytes_of_step(dtype):
    """Bytes that a step takes in any case, and bytes for each image."""
    low, high = (peak(size, dtype).peak_bytes for size in (256, 512))
    each = (high - low) / 256
    return low - 256 * each, each


# %% [markdown]
# To find the largest batch, double it until it no longer fits, then halve the interval. What
# *fits* means is for the caller to say, so that the same search works on a real GPU.


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
# These are upper bounds, with every byte of the card used for tensors. On a GPU we can do better,
# and really run out of memory. `set_per_process_memory_fraction` limits PyTorch's allocator to
# 6 GiB, whatever the card has. By PyTorch's documents, a step that does not fit raises
# `torch.OutOfMemoryError`, and when the function that raised it is left, its tensors are free again.


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
# The experiment, on a GPU that PyTorch calls `cuda`, from NVIDIA or AMD:

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
# ## Checkpoints
#
# A run is more than its weights. To go on as if nothing had happened, it also needs the state of
# the optimizer and that of the scaler, which the tutorial did not save. Here is what is lost with
# it. The scaler of an fp16 run starts at 65,536; a gradient that overflows makes it skip the step
# and halve the scale.

# %%
scaler = torch.amp.GradScaler("cpu")
weight = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler.scale(weight.sum() * float("inf")).backward()  # an overflow, made on purpose
scaler.step(optimizer)  # skipped
scaler.update()
print(f"loss scale after an overflow: {scaler.get_scale():.0f}")
assert weight.item() == 1
assert scaler.get_scale() == 2**15
assert torch.amp.GradScaler("cpu").get_scale() == 2**16  # a new one knows nothing of it

# %% [markdown]
# A new scaler in each epoch, or after a restart, has to find its scale again, and skips steps on
# the way. So save it. `save_checkpoint` takes whatever has a `state_dict`, and writes the file so
# that a crash leaves the old one or the new one, never half of one.

# %% tags=["nbval-ignore-output"]
model, optimizer, scaler = run  # of the last precision above
path = Path(workspace.name) / "checkpoint.pt"
save_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler, epochs=config["epochs"])
loss, accuracy = evaluate(model, make_loader(data.test), precision.dtype)
print(f"saved {path.stat().st_size / 2**20:.0f} MiB; test accuracy {accuracy:.1%}")
assert accuracy == results[precision]["accuracy"]

# %% [markdown]
# Then make everything anew, and load the states into it. Evaluated in the same precision, the
# network that was loaded must give what the saved one gave, to the last bit.

# %% tags=["nbval-ignore-output"]
model, optimizer, scaler = new_run(precision)
state = load_checkpoint(path)
for name, thing in {"model": model, "optimizer": optimizer, "scaler": scaler}.items():
    thing.load_state_dict(state[name])
loaded_loss, loaded_accuracy = evaluate(model, make_loader(data.test), precision.dtype)
print(f"loaded after {state['epochs']} epochs; test accuracy {loaded_accuracy:.1%}")
assert (loaded_loss, loaded_accuracy) == (loss, accuracy)

# %% [markdown]
# To go on to the last bit takes some more: how far the run has come, and every random
# state. [Notebook 05](05_cifar10_mobilenet.ipynb) shows that. All of it together is a command:
#
#     amp-lab train --dataset caltech256 --model resnet50 --freeze --pretrained \
#         --precision bf16 --batch-size 512 --out runs/caltech
#
# It saves after each epoch and when it is told to stop, and with `--resume` it goes on.

# %%
workspace.cleanup()  # deletes the generated pictures and the checkpoint
assert not path.exists()

# %% [markdown]
# ## Summary
#
# One loop trained in every precision; `enabled=` decided what of AMP was on. What that gave, with
# the memory of batch 512 as counted for images of 224x224:

# %% tags=["nbval-ignore-output"]
for precision, result in results.items():
    size = gib["FP32, batch 512" if precision.dtype is torch.float32 else "AMP, batch 512"]
    speedup = step_times.ratio(Precision.FP32, precision)  # as in the table of steps
    print(f"{precision}: speed-up of a step {speedup}, {size:.2f} GiB,", end=" ")
    print(f"accuracy {result['accuracy']:.1%}")
    assert is_possible(step_times, precision, step_flops)
    assert size < 6

# %% [markdown]
# - Freezing the backbone means that its activations need not be kept: that saves far more memory
#   than AMP does. Its running averages still move.
# - AMP halves the activations; weights, optimizer state and images stay fp32.
# - A batch that by counting all but fills the card may not fit: count, then leave room.
# - One scaler for the whole run, none in evaluation, and its state in the checkpoint.
# - Twice the batch is half the steps. Compare accuracies at the same batch size.
#
# ## Exercises
#
# 1. Keep the backbone in evaluation mode while the head trains. Which buffers change now? Does the
#    peak of FP32 at batch 512 change?
# 2. Count the peak with only `layer4` and the head trained. How many images fit into 6 GiB?
# 3. Convert the images to bf16 before the step. How much of the peak of AMP at batch 512 goes away?
# 4. Count for `resnet18`, and for 96x96 pixels. Where is the worst moment, and is it still just
#    over half with AMP?
# 5. A frozen backbone need not be in each checkpoint. Save the head and the buffers alone, and load
#    them into a network with the same backbone. How small is the file?
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
