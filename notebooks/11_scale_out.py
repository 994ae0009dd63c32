# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train with AMP on several devices
#
# **What you'll do.** Take a plain training loop to two and to four processes, first with
# `DistributedDataParallel` (DDP), then with FSDP2 (`fully_shard`), each time with every changed line
# marked. Then count what each of them sends, in which dtype, and what a process has to hold.
#
# **What you'll learn.**
# - why the losses stay those of one process, and how closely;
# - which precision choices are new: in what dtype weights and gradients travel;
# - what DDP under autocast casts, and what FSDP2's `MixedPrecisionPolicy` casts in its place;
# - how all processes come to one decision about the loss scale, and how that goes wrong;
# - how to save on four processes, and go on with two or one.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast, [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. No GPU: on a CPU the processes share its
# cores, and talk through the machine's own network. Then nothing gets faster, but all that is sent
# and held can be counted. It takes a minute or two.

# %% tags=["nbval-ignore-output"]
import functools
import inspect
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from amp_lab import Comparison, Precision, compare, load_dataset, plots, xray
from amp_lab.notebook import start

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
plots.use_style()
torch.set_num_threads(1)  # as in every worker

# %% [markdown]
# What is new in this notebook comes from `torch.distributed`, but for tools of `amp_lab`, which count
# what is sent, start processes, and time them.

# %%
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from amp_lab.device import matrix_product
from amp_lab.distributed import count_communication
from amp_lab.notebook import run_workers
from amp_lab.timing import Rounds

assert dist.is_available()

# %% [markdown]
# ## The setting
#
# Every process needs a device of its own. With four GPUs there are runs with one, two and four
# processes, with two or three GPUs runs with one and two. With fewer, the processes run on the CPU.

# %%
gpus = 0 if device.type == "cpu" else torch.accelerator.device_count()
where = device.type if gpus >= 2 else "cpu"
counts = (1, 2) if gpus in (2, 3) else (1, 2, 4)
print(f"runs with {', '.join(map(str, counts))} processes on: {where}")
config = {
    "quick": {"width": 64, "heads": 4, "layers": 2, "batch": 64, "lr": 1e-3},
    "full": {"width": 256, "heads": 8, "layers": 4, "batch": 64, "lr": 3e-4},
}[scale if where == device.type else "quick"]
assert config["batch"] % counts[-1] == 0

# %% [markdown]
# The data are handwritten digits of 8x8 pixels. The network reads a digit as eight rows. It has no
# batch normalisation, which needs a word of its own below, and no dropout. All its shapes are
# multiples of eight, which is the common advice for Tensor Cores (notebook 05 tries it), and which
# two and four processes divide evenly: so the last layer has 16 outputs, though there are ten digits.

# %%
digits = load_dataset("digits", image_size=8, augment=False)
images, targets = digits.train.batch(range(768))
images = images[:, 0].contiguous()  # (N, 8, 8); the three channels are the same
data = TensorDataset(images, targets)


def new_model(config):
    """Digits (B, 8, 8) to logits (B, 16): a transformer over the rows, the same every time."""
    torch.manual_seed(0)
    width, heads = config["width"], config["heads"]
    layers = [
        nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(config["layers"])
    ]
    ends = nn.LayerNorm(width), nn.Flatten(), nn.Linear(8 * width, 16)
    return nn.Sequential(nn.Linear(8, width), *layers, *ends)


parameters = sum(p.numel() for p in new_model(config).parameters())
print(f"{len(data)} images, {parameters:,} parameters")
assert all(n % 8 == 0 for p in new_model(config).parameters() for n in p.shape)

# %% [markdown]
# ## One process
#
# This is the plain loop: one epoch, and the loss of every step. In fp32 `dtype` is None, and
# autocast is off.


# %%
def train_plain(config, data, dtype, device):
    model = new_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    losses = []
    for x, y in DataLoader(data, config["batch"], sampler=sampler):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# In fp32 and in bf16:

# %%
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
alone = {
    name: train_plain(config, data, dtype, torch.device(where))
    for name, dtype in PRECISIONS.items()
}
for name, losses in alone.items():
    print(f"{name}: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2

# %% [markdown]
# What does a process hold for that, apart from activations? Weights, gradients and AdamW's two
# averages, each in fp32, with autocast or without. The function counts what lies in *this* process,
# which will matter for FSDP2.


# %%
def local_bytes(model, optimizer):
    """Bytes of weights, gradients and optimizer state in this process."""

    def size(tensors):
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    weights = list(model.parameters())
    averages = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    return {
        "weights": size(weights),
        "gradients": size(p.grad for p in weights),
        "AdamW": size(averages),
    }


# %% [markdown]
# A single step, to be counted and timed.


# %%
def train_step(model, optimizer, x, y, dtype):
    """One training step, under autocast if there is a dtype for it."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


model = new_model(config).to(where)
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
x, y = (t[: config["batch"]].to(where) for t in (images, targets))
train_step(model, optimizer, x, y, torch.bfloat16)
memory_alone = local_bytes(model, optimizer)
for part, size in memory_alone.items():
    print(f"{part:<10}{size:>12,} bytes, {size / parameters:.0f} per parameter")
assert sum(memory_alone.values()) == 16 * parameters

# %% [markdown]
# And how long does it take? The two take turns with a matrix product in each precision, whose rate no
# step can beat.

# %% tags=["nbval-ignore-output"]
with FlopCounterMode(display=False) as counter:
    train_step(model, optimizer, x, y, None)
flops = counter.get_total_flops()
steps = {
    p: functools.partial(train_step, model, optimizer, x, y, PRECISIONS[p]) for p in PRECISIONS
}
products = {f"product, {p}": matrix_product(torch.device(where), Precision(p), 512) for p in steps}
timed = compare(steps | products, device=where, budget_s=3)
limits = {p: timed.time_s(f"product, {p}").rate(2 * 512**3) for p in steps}  # FLOP/s
for name in steps:
    rate = timed.time_s(name).rate(flops)
    share = f", {rate.median / limits[name].median:.0%} of the product's rate"
    print(f"{name}: {1e3 * timed.median_s(name):.3g} ms a step" + share * timed.trusted)
    assert not rate.is_above(1.1 * limits[name].median)
print("speed-up by AMP:", timed.ratio("fp32", "bf16"))
assert next(model.parameters()).dtype is torch.float32  # in both

# %% [markdown]
# The model is small, so most of its time goes into other things than products, such as calling ops and
# casting what they get. That is fine here, since this notebook is about what travels. [Notebook
# 10](10_speed_ladder.ipynb) has the sizes from which AMP pays.
#
# ## Divide the batch
#
# With n processes, each takes an n-th of every batch, and the gradients are averaged. The mean of
# the means of equal parts is the mean of the whole, so this is the same training. A process is
# called a *rank*, and has a number.
#
# Which samples a rank gets is up to `DistributedSampler`. It draws the permutation that
# `RandomSampler` draws from the same seed, and rank r takes every n-th of it. So the parts of a step
# add up to the batch that one process would have had:

# %%
whole = list(RandomSampler(data, generator=torch.Generator().manual_seed(0)))
for n in counts:
    shares = [list(DistributedSampler(data, num_replicas=n, rank=r, seed=0)) for r in range(n)]
    share = config["batch"] // n
    for first in range(0, len(data) // n, share):
        together = {i for part in shares for i in part[first : first + share]}
        assert together == set(whole[n * first : n * (first + share)])
print("every step sees the same samples")

# %% [markdown]
# Two more habits of the sampler. It draws the same permutation in every epoch, until
# `sampler.set_epoch(epoch)` tells it which one it is. And when n does not divide the samples, it
# repeats some of them, or drops some with `drop_last=True`.

# %%
sampler = DistributedSampler(data, num_replicas=2, rank=0)
first, again = list(sampler), list(sampler)
sampler.set_epoch(1)
assert first == again
assert first != list(sampler)
assert len(DistributedSampler(range(5), num_replicas=2, rank=0)) == 3  # 6 for 5 samples

# %% [markdown]
# ## Start the processes
#
# `torchrun` starts n copies of one script, and tells each its number and where to find the others,
# in environment variables. The first thing that a script does is to join the *process group*. Its
# [backend](https://docs.pytorch.org/docs/stable/distributed.html#backends) moves the data: gloo on
# CPUs, NCCL on NVIDIA GPUs, RCCL, which goes by the same name, on AMD's.


# %%
def join(device_type):
    """Join the process group; return the device of this process."""
    device = torch.device(device_type)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)  # gloo, nccl, …
    dist.init_process_group(backend, timeout=timedelta(seconds=60))  # or it may wait for 30 minutes
    return device


# %% [markdown]
# Here the script is made from the functions of this notebook: `run_workers` writes their source into
# a file, starts it under torchrun, and returns what each rank returned.
#
# What the ranks do together are *collectives*, which all of them must call. `all_reduce` leaves the
# sum of their tensors on every rank. `all_gather` leaves all of their tensors, one after another, on
# every rank. `reduce_scatter` leaves an n-th of the sum on each. So an `all_reduce` is a
# `reduce_scatter` and then an `all_gather`.
#
# ## DDP
#
# Every rank has the whole model. When `backward` has made a gradient, DDP averages it over all
# ranks; it puts many into a *bucket*, and sends a bucket while `backward` makes the next. So every
# rank takes the same step. With `gradient_as_bucket_view` a gradient lies in its bucket, and not in
# memory of its own besides.
#
# A loss is that of a rank's part, so the one to report is the mean over all ranks:


# %%
def mean_loss(loss):
    """The mean of a loss over all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


# %% [markdown]
# The marked lines are all that is new beside the plain loop. Autocast stays where it was.


# %%
def train_ddp(config, data, dtype, device):
    model = new_model(config).to(device)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    sampler = DistributedSampler(data, seed=0)  # DDP: was RandomSampler(…)
    losses = []
    share = config["batch"] // dist.get_world_size()  # DDP
    for x, y in DataLoader(data, share, sampler=sampler):  # DDP: was config["batch"]
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss))  # DDP: was loss.item()
    return losses


# %% [markdown]
# Run that on two processes, in both precisions:


# %%
def ddp_losses(config, images, targets, precisions, device_type):
    """Backend, rank and number of ranks; and the losses of `train_ddp` in each precision."""
    device = join(device_type)
    me = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    data = TensorDataset(images, targets)
    found = {name: train_ddp(config, data, dtype, device) for name, dtype in precisions.items()}
    dist.destroy_process_group()
    return me, found


given = {"config": config, "images": images, "targets": targets, "device_type": where}
given["precisions"] = PRECISIONS
functions = ddp_losses, join, new_model, mean_loss, train_ddp
pair = run_workers(*functions, processes=2, **given)
for (backend, rank, size), found in pair:
    print(f"{backend}: rank {rank} of {size}; in fp32 the loss falls to {found['fp32'][-1]:.2f}")
assert [me[1:] for me, _ in pair] == [(0, 2), (1, 2)]

# %% [markdown]
# How close must the losses be? Start and samples are the same, but sums are formed in another order,
# and rounded: to 24 bits in fp32, to 8 in bf16, in which autocast hands over the gradient of each
# rank's part. Ten bits are allowed in fp32 for what twelve steps make of such a difference. In bf16
# two are, which is four roundings, as in [notebook 07](07_training_recipes.ipynb).


# %%
def distance(found, reference):
    """Largest difference of two lists of losses, relative to the loss."""
    found, reference = torch.tensor(found), torch.tensor(reference)
    return ((found - reference).abs() / reference).max().item()


TOLERANCES = {"fp32": 2.0**-14, "bf16": 2.0**-6}


def check_losses(what, ranks):
    """Assert that on every rank the losses are those of one process."""
    assert all(found == ranks[0] for found in ranks)  # every rank reports the same mean
    for name, found in ranks[0].items():
        off = distance(found, alone[name])
        assert off < TOLERANCES[name], (what, name, off)
        print(f"{what}, {name}: the losses of one process, to within {TOLERANCES[name]:.0e}")


check_losses("DDP on 2", [found for _, found in pair])

# %% [markdown]
# Is that close? With the same images in another order, which is another training, the losses are
# far apart:

# %%
reordered = TensorDataset(images.flip(0), targets.flip(0))
off = distance(train_plain(config, reordered, None, torch.device(where)), alone["fp32"])
print(f"in another order: {off:.1f}")
assert off > 10 * max(TOLERANCES.values())

# %% [markdown]
# So scaling out by itself changes nothing that matters: **keep the global batch, and every setting
# of the training stays right**. Keep the batch of each process instead, and the global batch grows
# n times, which is another training: the learning rate has to be found anew.
#
# ## FSDP2
#
# With DDP every rank holds everything. FSDP2 (`fully_shard`) cuts each parameter into n parts along
# its first dimension, and a rank keeps one, a *shard*: of the weight in fp32, of its gradient, and of
# what the optimizer keeps. Only while a layer computes, in the forward and again in the backward
# pass, all its weights are gathered; then its gradients are reduced and scattered. A layer here is
# what gets a `fully_shard` of its own; the last call takes what is left.
#
# The precision is a property of the wrapping, a `MixedPrecisionPolicy`: weights are cast to
# `param_dtype` *before* they travel, gradients travel and are summed in `reduce_dtype`. Always give
# both: the default of the second is not the same in all versions of PyTorch.


# %%
def shard(model, param_dtype, reduce_dtype, output_dtype=torch.float32):
    """Divide weights, gradients and optimizer state among all ranks, layer by layer."""
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for layer in model:
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# %% [markdown]
# Beside the plain loop, autocast is gone, and the optimizer is made *after* sharding, of the shards.
# (The mesh says who shares. Without it, `fully_shard` would take the accelerator, if there is one.)


# %%
def train_fsdp(config, data, dtype, device):
    model = new_model(config).to(device)
    shard(model, dtype or torch.float32, torch.float32)  # FSDP2
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    sampler = DistributedSampler(data, seed=0)  # FSDP2: was RandomSampler(…)
    losses = []
    share = config["batch"] // dist.get_world_size()  # FSDP2
    for x, y in DataLoader(data, share, sampler=sampler):  # FSDP2: was config["batch"]
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)  # FSDP2: was in with torch.autocast(…)
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss))  # FSDP2: was loss.item()
    return losses


# %% [markdown]
# ## Save on four, go on with two
#
# `torch.distributed.checkpoint` (DCP) writes a folder: a file from each rank, and an index of which
# part of which tensor is where.


# %%
def save_sharded(config, x, y, folder):
    """A model trained for three steps with FSDP2, and saved with its optimizer."""
    model = new_model(config).to(x.device)
    shard(model, torch.float32, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for _ in range(3):
        train_step(model, optimizer, x, y, None)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return model


# %% [markdown]
# Whoever loads says which parts it wants, and those may be others. Here it is a model that has been
# trained on something else. Its state dicts tell what belongs on this rank *now*, and are filled in
# place.


# %%
def load_sharded(config, x, y, folder):
    """A model that was loaded, and how many steps its optimizer has done."""
    model = new_model(config).to(x.device)
    shard(model, torch.float32, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    train_step(model, optimizer, 1 - x, y, None)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return model, {int(state["step"]) for state in optimizer.state.values()}


def evaluate(model, images, targets):
    """The loss over all images, on this rank."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return F.cross_entropy(model(images.to(device)), targets.to(device)).item()


# %% [markdown]
# The largest run below will save, and all will load.
#
# ## Try seven set-ups
#
# The first dtype is that of the computation: autocast's for DDP, `param_dtype` for
# FSDP2. The second is that in which gradients travel: for DDP a *communication hook* casts each
# bucket before it is sent, and back.

# %%
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SETUPS = {
    "DDP, fp32": ("DDP", fp32, fp32),
    "DDP, autocast bf16": ("DDP", bf16, fp32),
    "DDP, autocast bf16, bf16 hook": ("DDP", bf16, bf16),
    "DDP, autocast bf16, fp16 hook": ("DDP", bf16, fp16),
    "FSDP2, fp32": ("FSDP2", fp32, fp32),
    "FSDP2, bf16, reduce in fp32": ("FSDP2", bf16, fp32),
    "FSDP2, bf16, reduce in bf16": ("FSDP2", bf16, bf16),
}

# %% [markdown]
# The function that makes one of them. (A PyTorch that was built without CUDA refuses
# `bf16_compress_hook`, by its name, although gloo can sum bf16. Hence the other name.)


# %%
def bf16_hook(group, bucket):
    """PyTorch's own hook, for every build."""
    return default_hooks.bf16_compress_hook(group, bucket)


def set_up(config, device, engine, compute, reduce):
    """A new model under DDP or FSDP2, and the dtype for autocast around it."""
    model = new_model(config).to(device)
    if engine == "FSDP2":
        shard(model, compute, reduce)
        return model, None
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if reduce is torch.bfloat16:
        model.register_comm_hook(None, bf16_hook)
    if reduce is torch.float16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, (None if compute is torch.float32 else compute)


# %% [markdown]
# `count_communication` notes every collective of a process, with its dtype and size, and adds up
# what a rank has to send for it. The payload of an `all_reduce` of S bytes goes out as 2(n-1)/n S,
# that of the other two as (n-1)/n S: no algorithm can do with less, and the usual ones, rings, need
# no more.


# %%
def try_setup(config, x, y, *setup):
    """Sent bytes of a step by collective and dtype, memory; and a function that does a step."""
    model, dtype = set_up(config, x.device, *setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    step = functools.partial(train_step, model, optimizer, x, y, dtype)
    step(), step()  # DDP arranges its buckets anew after the first
    with count_communication() as sent:
        step()
    totals = {key: part.sent_bytes for key, part in sent.totals().items()}
    return {"sent": totals, "memory": local_bytes(model, optimizer)}, step


def my_share(config, images, targets, device):
    """This rank's part of a batch."""
    part = slice(dist.get_rank(), config["batch"], dist.get_world_size())
    return images[part].to(device), targets[part].to(device)


# %% [markdown]
# The steps of all set-ups are timed in turns, as `compare` would do it. But `compare` decides by its
# own figures when it has seen enough, and a rank that stops before the others leaves them waiting. So
# all ranks do a fixed number of rounds, and each watches in them whether its core was busy.


# %%
def time_in_turns(steps, device, rounds=16):
    """Seconds of these steps on this rank, as the fields of a `Comparison`."""
    seen = Rounds(device)
    for turn in range(rounds):
        with seen.next() as seconds:
            for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
                dist.barrier()  # all ranks begin together
                begun = time.perf_counter()
                steps[name]()
                if device.type != "cpu":
                    torch.accelerator.synchronize()
                seconds[name] = time.perf_counter() - begun
    return asdict(seen.comparison(list(steps)))


# %% [markdown]
# Processes that outnumber the cores wait for each other, so they are not timed.


# %%
def try_setups(config, x, y, setups):
    """What `try_setup` counts for each, and their times if every process has a core."""
    tried = {name: try_setup(config, x, y, *setup) for name, setup in setups.items()}
    counted = {name: found for name, (found, _) in tried.items()}
    steps = {name: step for name, (_, step) in tried.items()}
    enough = x.device.type != "cpu" or dist.get_world_size() <= os.cpu_count()
    return counted, time_in_turns(steps, x.device) if enough else None


# %% [markdown]
# Now everything in one launch for each number of processes, the largest first. DDP on two has been
# trained above.


# %%
def try_all(config, images, targets, trainings, setups, folder, saves, device_type):
    """Losses of the engines, what `try_setups` finds, and the losses of saved and loaded."""
    device = join(device_type)
    data, share = TensorDataset(images, targets), my_share(config, images, targets, device)
    losses = {}
    for engine, precisions in trainings.items():
        train = {"DDP": train_ddp, "FSDP2": train_fsdp}[engine]
        losses[engine] = {
            name: train(config, data, precisions[name], device) for name in precisions
        }
    found, times = try_setups(config, *share, setups)
    saved = evaluate(save_sharded(config, *share, folder), images, targets) if saves else None
    model, steps = load_sharded(config, *share, folder)
    loaded = evaluate(model, images, targets), steps
    dist.destroy_process_group()
    return {"losses": losses, "setups": found, "times": times, "saved": saved, "loaded": loaded}


functions = try_all, join, new_model, mean_loss, shard, train_ddp, train_fsdp, set_up, try_setup
functions += try_setups, time_in_turns
functions += bf16_hook, my_share, train_step, local_bytes, save_sharded, load_sharded, evaluate

# %% [markdown]
# That takes longest. Both engines train as one process does:

# %%
temporary, most, tries = tempfile.TemporaryDirectory(), counts[-1], {}
del given["precisions"]
given |= {"setups": SETUPS, "folder": str(Path(temporary.name) / "checkpoint")}
for n in reversed(counts[1:]):
    engines = ["FSDP2"] if n == 2 else ["DDP", "FSDP2"]
    given["trainings"] = dict.fromkeys(engines, PRECISIONS)
    tries[n] = run_workers(*functions, processes=n, saves=(n == most), **given)
    for engine in engines:
        check_losses(f"{engine} on {n}", [rank["losses"][engine] for rank in tries[n]])
setups = {n: tries[n][0]["setups"] for n in counts[1:]}

# %% [markdown]
# And the checkpoint? One process needs neither FSDP2 nor a process group: `dcp_to_torch_save` makes
# a plain file of the folder.

# %%
plain_file = Path(temporary.name) / "plain.pt"
dcp_to_torch_save(given["folder"], plain_file)
model = new_model(config).to(where)
model.load_state_dict(torch.load(plain_file, weights_only=True)["model"])
print(f"loss of what {most} saved: {tries[most][0]['saved']:.4f}")
losses = {n: ranks[0]["loaded"][0] for n, ranks in tries.items()}
losses[1] = evaluate(model, images, targets)
temporary.cleanup()
for n, loss in losses.items():
    print(f"loaded by {n}: {loss:.4f}")
    assert abs(loss - tries[most][0]["saved"]) < TOLERANCES["fp32"] * loss
assert all(rank["loaded"][1] == {3} for ranks in tries.values() for rank in ranks)  # steps of AdamW

# %% [markdown]
# The same loss on all. (With fp16 the scaler's `state_dict()` goes into the checkpoint as well. It
# is the same on all ranks.)
#
# ## What does each send?
#
# Here is what a rank sends in a step, with the largest number of ranks. The dtype is the colour and
# the hatching; the collective stands in the bar.

# %%
names = {fp32: "fp32", bf16: "bf16", fp16: "fp16"}
bars = {
    name: [(kind, names[dtype], size) for (kind, dtype), size in found["sent"].items()]
    for name, found in setups[most].items()
}
_ = plots.sent_bytes(bars, most)
for name, parts in bars.items():
    print(f"{name:<30}{sum(size for *_, size in parts):>12,} bytes")
assert len(bars) == len(SETUPS)

# %% [markdown]
# Read it from the top:
#
# - **Autocast changes nothing** in what DDP sends. The weights are fp32, so their gradients are, and
#   these travel.
# - A **hook** to bf16 or fp16 halves it.
# - FSDP2 in **fp32** sends nearly half as much again as DDP, since layers are gathered twice.
# - With **`param_dtype=bf16`** it is back to about what DDP sends, though a rank holds only a part.
# - With **`reduce_dtype=bf16`** the reduced bytes halve as well.
#
# All of it follows from the number of parameters. DDP reduces each once. FSDP2 scatters each once,
# and gathers each once or twice: what the last `fully_shard` took, the first and last layers, stays
# gathered between the passes.

# %%
in_layers = sum(
    p.numel()
    for layer in new_model(config)
    if isinstance(layer, nn.TransformerEncoderLayer)
    for p in layer.parameters()
)
for n, found in setups.items():
    share = (n - 1) / n
    for name, (engine, compute, reduce) in SETUPS.items():
        expected = {("all_reduce", reduce): 2 * share * parameters * reduce.itemsize}
        if engine == "FSDP2":
            gathered = parameters + in_layers
            expected = {
                ("all_gather", compute): share * gathered * compute.itemsize,
                ("reduce_scatter", reduce): share * parameters * reduce.itemsize,
            }
        assert found[name]["sent"] == expected, (n, name)
print("counted = computed, for every set-up and number of processes")

# %% [markdown]
# Is a gradient in bf16 good enough? It is rounded to 8 bits once more, and the sum over ranks is
# formed in bf16, which loses more the more ranks there are. Here are made-up gradients of 2, 16 and
# 128 ranks, each sum formed in bf16, one rank after the other:

# %%
rounding = {}
for ranks in (2, 16, 128):
    gradients = torch.randn(ranks, 10_000, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(10_000, dtype=bf16)
    for gradient in gradients:
        total = total + gradient.bfloat16()
    rounding[ranks] = ((total.float() - gradients.sum(0)).norm() / gradients.sum(0).norm()).item()
    print(f"{ranks:>3} ranks: the sum is off by {rounding[ranks]:.2%}")
assert rounding[2] < rounding[16] < rounding[128]
assert torch.tensor(70000.0).half().isinf()

# %% [markdown]
# That is why FSDP2 offers the two dtypes apart: bf16 weights, fp32 sums is the usual choice. fp16 has
# more bits, but overflows beyond 65504.
#
# Does it save time? The picture becomes a time when a network is the bottleneck: divide the bytes by
# its rate. On one machine memory is the network, so we expect little, and each set-up adds work of its
# own, such as casting and gathering. The speed-up is over DDP in fp32:

# %% tags=["nbval-ignore-output"]
for n, ranks in tries.items():
    if ranks[0]["times"] is None:
        print(f"{n} processes share {os.cpu_count()} cores, so their times would say nothing")
        continue
    times = Comparison(**ranks[0]["times"])
    print(
        f"{n} processes:", times if times.trusted else f"cannot tell here, {times.reason}", sep="\n"
    )
    for name, (_, compute, _) in SETUPS.items():
        rate = times.time_s(name).rate(flops / n)  # of a rank
        assert not (timed.trusted and rate.is_above(1.1 * limits[names[compute]].median))
    # All begin together and wait for the slowest, so the ranks have to agree on the time.
    first, last = (Comparison(**rank["times"]) for rank in (ranks[0], ranks[-1]))
    if first.trusted and last.trusted:
        off = [last.median_s(name) / first.median_s(name) for name in SETUPS]
        assert all(0.5 < ratio < 2 for ratio in off), off

# %% [markdown]
# A line with an interval that lies below 1 is a set-up that takes longer than DDP in fp32 here. With
# FSDP2 every layer waits for its weights, which a small layer on a CPU cannot hide behind its
# arithmetic. On GPUs with a network between them, measure again: there the bytes above decide.
#
# ## What does each hold?
#
# The same parts as for one process, counted on a rank.

# %%
memory = {
    engine: {1: memory_alone} | {n: setups[n][name]["memory"] for n in counts[1:]}
    for engine, name in (("DDP", "DDP, fp32"), ("FSDP2", "FSDP2, bf16, reduce in fp32"))
}
_ = plots.memory_per_rank(memory)
for n in counts:
    assert memory["DDP"][n] == memory_alone
    assert memory["FSDP2"][n] == {part: size // n for part, size in memory_alone.items()}

# %% [markdown]
# DDP holds on every rank what one process holds. FSDP2 holds an n-th of it. The shards are fp32 in
# bf16 too: they *are* the master weights, and no low-precision copy stays. Not drawn are the
# activations, which shrink with a rank's part of the batch in both, and the gathered weights of the
# layers at work.
#
# ## What does each cast?
#
# Autocast casts *ops*: each op gets its inputs in the dtype that its list says. FSDP2 casts
# *modules*: weights and inputs become bf16 once, and every op inside computes on what it gets. So
# normalisation and loss, which autocast runs in fp32 on a GPU, run in bf16.
#
# To look at it, one process is enough: a process group of one, here in the notebook. A hook on each
# module notes the dtype of its weight, while it computes, and of its output.


# %%
def dtypes_inside(model, x, y):
    """Dtypes at the last LayerNorm and Linear while they compute, and of the loss."""
    found = {}

    def note(name, module, inputs, output):
        found[f"{name}: weight"], found[f"{name}: output"] = module.weight.dtype, output.dtype

    for name, module in (("LayerNorm", model[-3]), ("Linear", model[-1])):
        module.register_forward_hook(functools.partial(note, name))
    logits = model(x)
    return found | {"logits": logits.dtype, "loss": F.cross_entropy(logits, y).dtype}


backend = dist.get_default_backend_for_device(where)
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
columns = {}
for column, output_dtype in (("FSDP2", None), ("FSDP2, output fp32", fp32)):
    model = new_model(config).to(where)
    shard(model, bf16, fp32, output_dtype)
    columns[column] = dtypes_inside(model, x, y)
dist.destroy_process_group()

# %% [markdown]
# What autocast does on a GPU, the X-ray of [notebook 09](09_xray_your_model.ipynb) shows without
# one.


# %%
def any_loss(logits):
    """The loss with targets where the logits are."""
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


model = new_model(config)
rows = xray(model, x.cpu(), device_type="cuda", dtype=bf16, loss_fn=any_loss).rows
names_of = {str(len(model) - 3): "LayerNorm", str(len(model) - 1): "Linear"}
autocast = {}
for row in rows:
    if row.module in names_of:
        name = names_of[row.module]
        autocast[f"{name}: weight"] = model[int(row.module)].weight.dtype
        autocast[f"{name}: output"] = row.out_dtypes[0]
autocast |= {"logits": autocast["Linear: output"], "loss": rows[-1].out_dtypes[0]}

# %% [markdown]
# Side by side:

# %%
columns = {"autocast on CUDA": autocast} | columns
print(" " * 18 + "".join(f"{column:<20}" for column in columns))
for row in autocast:
    print(f"{row:<18}" + "".join(f"{names[found[row]]:<20}" for found in columns.values()))
assert list(autocast.values()) == [fp32, fp32, fp32, bf16, bf16, fp32]
assert list(columns["FSDP2"].values()) == [bf16] * 6
assert list(columns["FSDP2, output fp32"].values()) == [bf16] * 4 + [fp32] * 2

# %% [markdown]
# Under the policy everything is bf16, the loss too, unless the outermost `fully_shard` says
# `output_dtype=torch.float32`, as `shard` does. Then the loss is computed in fp32. Put `output_dtype`
# on the outermost one alone: on a layer it casts what the next layer gets.
#
# To keep a normalisation in fp32, give it a `fully_shard` of its own with `param_dtype=
# torch.float32`. That also casts what comes in to fp32, and what comes out stays so:

# %%
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
outcomes = {}
for output_dtype in (None, bf16):
    model = new_model(config).to(where)
    norm_policy = MixedPrecisionPolicy(fp32, fp32, output_dtype)
    fully_shard(model[-3], mesh=init_device_mesh(where, (1,)), mp_policy=norm_policy)
    shard(model, bf16, fp32)
    try:
        outcomes[output_dtype] = dtypes_inside(model, x, y)["LayerNorm: weight"]
    except RuntimeError as error:
        outcomes[output_dtype] = str(error)
dist.destroy_process_group()
print("no output_dtype:", outcomes[None])
assert "dtype" in outcomes[None]
assert outcomes[bf16] is fp32

# %% [markdown]
# So such a layer needs `output_dtype=torch.bfloat16`, for the sake of the next.
#
# ## One decision about the loss scale
#
# With fp16 there is a `GradScaler` on every rank, and each decides for itself whether to skip the
# step. If they do not decide alike, the replicas are different models from then on. What makes them
# agree? Let one rank alone meet an overflow, in two places: in its batch, and in its gradient, after
# all communication.


# %%
def on_last_rank():
    """Whether this is the rank that meets the overflow."""
    return dist.get_rank() == dist.get_world_size() - 1


# %% [markdown]
# A skipped step shows in the scale.


# %%
def overflow(config, x, y, engine, place):
    """Does this rank skip? And which collectives does `unscale_` call?"""
    model, dtype = set_up(config, x.device, engine, torch.float16, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0)
    if place == "batch" and on_last_rank():
        x = torch.full_like(x, torch.inf)
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if place == "gradient" and on_last_rank():
        gradient = next(model.parameters()).grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(torch.inf)
    with count_communication() as sent:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < 1024, [(call.kind, call.elements) for call in sent.calls]


# %% [markdown]
# The limit of a gradient's length is another decision that must be the same everywhere. On a rank
# of FSDP2 there is only a part of the gradient.


# %%
def gradient_norms(config, x, y, engine):
    """The length of the gradients on this rank, and what `clip_grad_norm_` returns."""
    model, _ = set_up(config, x.device, engine, torch.float32, torch.float32)
    F.cross_entropy(model(x), y).backward()
    gradients = [p.grad for p in model.parameters()]
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    here = torch.cat([part.flatten().double() for part in parts]).norm()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    return here.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


# %% [markdown]
# ## Four ways to go wrong
#
# The functions first, then one launch for all of them. **A scaler that disagrees**: here the
# gradients are averaged by hand, as people do who want to leave out DDP, before `unscale_` or after.


# %%
def average_gradients(model):
    """What DDP does, without DDP."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# %% [markdown]
# What becomes of an overflow on one rank?


# %%
def reduce_by_hand(config, x, y, first):
    """A step with an overflow on the last rank: is it skipped, and are the weights finite?"""
    model = new_model(config).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0)
    with torch.autocast(x.device.type, dtype=torch.float16):
        loss = F.cross_entropy(model(x * torch.inf if on_last_rank() else x), y)
    scaler.scale(loss).backward()
    if first == "unscale_":
        scaler.unscale_(optimizer)
    average_gradients(model)
    if first == "average":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    finite = all(p.isfinite().all().item() for p in model.parameters())
    return scaler.get_scale() < 1024, finite


# %% [markdown]
# **Accumulation**: a step from two halves of the batch. DDP averages in every backward pass, unless
# `no_sync` stops it, for all but the last.


# %%
def apart(model):
    """How far the weights of the ranks are apart."""
    low, high = (parameters_to_vector(model.parameters()).detach().clone() for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()


def accumulate(config, x, y, synced):
    """Sent bytes of a step of two halves, how far the ranks are apart, and this rank's loss."""
    model, _ = set_up(config, x.device, "DDP", torch.float32, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with count_communication() as sent:
            for half, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                with nullcontext() if half in synced else model.no_sync():
                    (F.cross_entropy(model(a), b) / 2).backward()
        optimizer.step()
    return sent.sent_bytes, apart(model), F.cross_entropy(model(x), y).item()


# %% [markdown]
# **Batch normalisation**: its mean and variance are those of the rank's part of the batch.


# %%
def batch_norm_model(device):
    """A small network with batch normalisation."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
    return nn.Sequential(nn.Flatten(), *layers).to(device)


def batch_norm(x, y, convert):
    """The mean loss, or an error; this rank's running mean; and what is broadcast for a step."""
    model = batch_norm_model(x.device)
    norm = model[2]
    if convert:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    try:
        model = DistributedDataParallel(model)
    except ValueError as error:
        return str(error)
    with count_communication() as sent:
        loss = mean_loss(F.cross_entropy(model(x), y))
    return loss, norm.running_mean.cpu(), sent.of("broadcast").payload_bytes


# %% [markdown]
# All of these on two ranks:


# %%
def go_wrong(config, images, targets, device_type):
    """What each of the functions above finds."""
    device = join(device_type)
    share = my_share(config, images, targets, device)
    engines, places = ("DDP", "FSDP2"), ("batch", "gradient")
    found = {
        "overflow": {(e, p): overflow(config, *share, e, p) for e in engines for p in places},
        "norms": {engine: gradient_norms(config, *share, engine) for engine in engines},
        "by hand": {f: reduce_by_hand(config, *share, f) for f in ("average", "unscale_")},
        "accumulate": {s: accumulate(config, *share, s) for s in ((0, 1), (1,), ())},
        "batch norm": {convert: batch_norm(*share, convert) for convert in (False, True)},
    }
    dist.destroy_process_group()
    return found


functions = go_wrong, join, new_model, shard, set_up, my_share, mean_loss, on_last_rank
functions += overflow, gradient_norms, average_gradients, reduce_by_hand, apart, accumulate
functions += batch_norm_model, batch_norm, bf16_hook
given = {"config": config, "images": images, "targets": targets, "device_type": where}
wrong = run_workers(*functions, processes=2, **given)

# %% [markdown]
# First the overflow. Which of the two ranks skips its step?

# %%
for engine, place in wrong[0]["overflow"]:
    skips = [rank["overflow"][engine, place][0] for rank in wrong]
    print(f"{engine}, inf in the last rank's {place}: skipped {skips}")
    assert skips == [place == "batch" or engine == "FSDP2", True]

# %% [markdown]
# With DDP the scalers agree because the *gradients* agree: what one rank has, the average gives to
# all. What happens to a gradient after that, on one rank, they do not share: then one steps, and the
# other skips.
#
# With FSDP2 every rank sees other gradients, its shards, so agreement must be made. `unscale_` does
# it: the parameters are DTensors, and for these PyTorch reduces the flag, a single number, with a
# maximum over the ranks.

# %%
for rank in wrong:
    assert rank["overflow"]["DDP", "gradient"][1] == []
    assert rank["overflow"]["FSDP2", "gradient"][1] == [("all_reduce", 1)]

# %% [markdown]
# So a plain `GradScaler` will do for both. And so will `clip_grad_norm_`, after `unscale_` as ever:

# %%
for number, rank in enumerate(wrong):
    for engine, (here, norm) in rank["norms"].items():
        print(f"rank {number}, {engine:<5}: length here {here:.4f}, clip_grad_norm_ {norm:.4f}")
parts, norms = zip(*(rank["norms"]["FSDP2"] for rank in wrong), strict=True)
_, norm = wrong[0]["norms"]["DDP"]
assert norms[0] == norms[1]
assert abs(norms[0] - norm) < 1e-5 * norm  # sums in another order
assert abs(sum(part**2 for part in parts) ** 0.5 - norm) < 1e-5 * norm

# %% [markdown]
# The norm is that of the whole gradient, the same on all ranks, with DDP and with FSDP2. (With
# FSDP2 it is a DTensor, a sum to be formed; `.full_tensor()` forms it.)
#
# **A scaler that disagrees.** By hand the order matters:

# %%
for first in ("average", "unscale_"):
    answers = [rank["by hand"][first] for rank in wrong]
    print(f"{first} first: skipped, weights finite: {answers}")
    assert answers == ([(True, True)] * 2 if first == "average" else [(False, False), (True, True)])

# %% [markdown]
# With `unscale_` first, the last rank finds its overflow, and skips. The first finds nothing, then
# gets the infinite average, and steps: its weights are gone, and the scales differ from now on. So
# **average before the scaler looks**, which is what DDP does. Another way to get there is local
# steps inside `no_sync`.
#
# **Accumulation.** How much is sent, and do the ranks stay together?

# %%
accumulated = {
    synced: [rank["accumulate"][synced] for rank in wrong] for synced in ((0, 1), (1,), ())
}
for synced, ranks in accumulated.items():
    sent, spread, _ = ranks[0]
    print(f"averaged in {len(synced)} of 2: {sent:>10,} bytes, ranks {spread:.0e} apart")
every, last, never = (ranks[0] for ranks in accumulated.values())
assert every[0] == 2 * last[0] == 2 * 4 * parameters
assert abs(every[2] - last[2]) < TOLERANCES["fp32"] * last[2]  # the same training
assert every[1] == last[1] == 0
assert never[0] == 0
assert never[1] > 1e-3

# %% [markdown]
# `no_sync` in all but the last pass halves the bytes, and the training is the same. Forget the last
# one, for instance at a shorter last group, and each rank goes its own way, without a word. The
# forward pass belongs inside `no_sync` too. FSDP2 has `set_requires_gradient_sync(False)` for it, at
# the price of whole gradients, not sharded ones, on every rank until the last pass.
#
# **Batch normalisation.** Two ranks against one process:

# %%
model = batch_norm_model(where)
loss = F.cross_entropy(model(x), y).item()
(found, mean, sent), (_, other_mean, _) = (rank["batch norm"][False] for rank in wrong)
print(f"one process {loss:.4f}, two {found:.4f}; {sent} bytes of buffers broadcast")
assert abs(found - loss) > 10 * TOLERANCES["fp32"] * loss
assert not torch.equal(mean, other_mean)
assert torch.allclose((mean + other_mean) / 2, model[2].running_mean.cpu(), atol=1e-6)
assert sent == 4 * 32 + 4 * 32 + 8  # running mean and variance in fp32, a counter in int64

# %% [markdown]
# The loss differs by far more than rounding. The running statistics differ between ranks; before
# each forward pass DDP broadcasts those of rank 0, and the others are lost, so evaluate and save
# after the same rank. `SyncBatchNorm` forms mean and variance over all ranks. It needs a GPU:

# %%
synced = wrong[0]["batch norm"][True]
if where == "cpu":
    print(synced)
    assert "SyncBatchNorm layers only work with GPU modules" in synced
else:
    print(f"one process {loss:.4f}, two with SyncBatchNorm {synced[0]:.4f}")
    assert abs(synced[0] - loss) < TOLERANCES["fp32"] * loss

# %% [markdown]
# **Threads.** Autocast is a state of the *thread*. A model that runs in a thread of its own, as in a
# server, does not see the block around the call:

# %%
layer = nn.Linear(8, 8).to(where)
with torch.autocast(where, dtype=bf16), ThreadPoolExecutor(1) as pool:
    dtypes = [layer(x).dtype, pool.submit(layer, x).result().dtype]
    inside = torch.autocast(where, dtype=bf16)(layer.forward)
    dtypes.append(pool.submit(inside, x).result().dtype)
print("this thread, another, another with its own block:", [names[dtype] for dtype in dtypes])
assert dtypes == [bf16, fp32, bf16]

# %% [markdown]
# The cure is to open the block where the forward pass runs, for which `torch.autocast` can be a
# decorator. The old `nn.DataParallel`, which has a thread for each GPU, does half of this by itself:
# it opens a block in each thread, but does not pass on the dtype, so that what was to be bf16 runs in
# the default, fp16. We cannot run it without a GPU, but we can read its source:

# %%
source = inspect.getsource(torch.nn.parallel.parallel_apply)
(block,) = re.findall(r"autocast\([^)]*enabled=autocast_enabled[^)]*\)", source)
print(block)
assert "dtype" not in block
assert torch.get_autocast_dtype("cuda") is fp16

# %% [markdown]
# Processes are no threads: each opens its own block anyway.
#
# ## On your own hardware
#
# The command `amp-lab train` of notebooks 05 and 06 does all this when torchrun starts it. On one
# machine with two GPUs, or on a CPU:
#
# ```
# torchrun --standalone --nproc-per-node 2 -m amp_lab train --dataset digits --parallel ddp --out runs/ddp
# torchrun --standalone --nproc-per-node 2 -m amp_lab train --dataset digits --parallel fsdp --precision bf16 --reduce-dtype bf16 --out runs/fsdp
# ```
#
# On two machines, the same line on both, with the address of one of them:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m amp_lab train …
# ```
#
# With `--max-restarts 3` torchrun starts all processes again when one is lost, up to three times.
# The training then resumes from its last checkpoint by itself.
#
# ## Summary
#
# - With the same global batch, DDP and FSDP2 train as one process does, up to the order of sums.
# - What travels has a dtype of its own. DDP sends fp32 gradients, with autocast or without, unless a
#   communication hook casts them. FSDP2 gathers weights in `param_dtype`, and reduces gradients in
#   `reduce_dtype`.
# - FSDP2 divides weights, gradients and optimizer state among the ranks. In bf16 it sends as much as
#   DDP does in fp32.
# - Autocast casts ops, `MixedPrecisionPolicy` modules. Give the outermost one `output_dtype=
#   torch.float32`, for the loss.
# - The scalers of all ranks must decide alike. DDP's do because the gradients are averaged before
#   they look, FSDP2's because `unscale_` asks all ranks. Whoever reduces by hand does it before
#   `unscale_`.
# - `no_sync` for all but the last part of an accumulated step; batch normalisation sees a rank's
#   part only; a thread needs its own autocast.
# - A DCP checkpoint fits any number of processes, and can become a plain file.
#
# ## Exercises
#
# 1. Let `run_workers` run a function of yours in which rank 1 raises an error, or waits for ever.
#    What do you get to see?
# 2. On Linux, `/proc/self/io` says in `wchar` what a process has written, to sockets too. Read it
#    before and after each collective on four CPU ranks. Which of the three does gloo make from
#    another, at twice the bytes?
# 3. Give `fully_shard` the option `reshard_after_forward=False`. What does a step send now, and what
#    does it hold between the passes?
# 4. Call only the last `fully_shard`, on the whole model. The bytes fall again: why is it still a bad
#    idea?
# 5. Accumulate with FSDP2 and `set_requires_gradient_sync(False)`. Count bytes and memory.
# 6. Start with `torch.amp.GradScaler` and `reduce_dtype=torch.float16`. How does FSDP2 divide, so
#    that the sum over many ranks does not overflow?
#
# ## Further reading
#
# - PyTorch, [Distributed Data
#   Parallel](https://docs.pytorch.org/docs/stable/notes/ddp.html): how the reducer works, and its
#   [communication hooks](https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).
# - PyTorch, [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html):
#   FSDP2 and `MixedPrecisionPolicy`.
# - PyTorch, [Distributed
#   Checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) and
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
# - S. Rajbhandari et al., [ZeRO: memory optimizations toward training trillion parameter
#   models](https://arxiv.org/abs/1910.02054), 2019: dividing weights, gradients and optimizer state.
# - P. Patarasuk and X. Yuan, [Bandwidth optimal all-reduce
#   algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002), 2009: why 2(n-1)/n.
