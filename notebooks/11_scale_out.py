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
# `DistributedDataParallel` (DDP), then with FSDP2 (`fully_shard`), each time with every changed
# line marked. Then count what each process sends, in which dtype, and what it has to hold.
#
# **What you'll learn.**
# - why the losses stay those of one process, and how closely;
# - which precision choices are new: in what dtype weights and gradients travel;
# - how all processes come to one decision about the loss scale, and how that goes wrong;
# - in an optional section, how to save on four processes and go on with two.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU. On a CPU the processes share
# its cores and talk through the machine's own network, so we do not time them, but what is sent and
# held can be counted. It takes a few minutes.

# %% tags=["nbval-ignore-output"]
import functools
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from course import figures, start
from course.processes import run_workers

from amp_lab import load_dataset, xray_sharding

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
torch.set_num_threads(1)  # as in every worker

# %% [markdown]
# What is new here comes from PyTorch, apart from the counter of what is sent.

# %%
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from amp_lab.train.distributed import count_communication

assert dist.is_available()

# %% [markdown]
# ## The idea in five lines
#
# Processes that share a batch compute a gradient each, and average them. Before you run this: how far is that average
# from the gradient of the whole batch, if the gradients are fp32, and if they travel in bf16?


# %%
def gradient_of(layer, x):
    """The gradient of a small loss."""
    return torch.autograd.grad(layer(x).square().mean(), layer.weight)[0]


torch.manual_seed(0)
layer, batch = nn.Linear(64, 64), torch.randn(64, 64)
whole, off = gradient_of(layer, batch), {}
for dtype, ranks in ((torch.float32, 64), (torch.bfloat16, 2), (torch.bfloat16, 64)):
    total = sum(gradient_of(layer, part).to(dtype) for part in batch.chunk(ranks))
    error = ((total.float() / ranks - whole).norm() / whole.norm()).item()
    print(f"{ranks:>2} ranks, {dtype}: off by {error:.2%}")
    off[dtype, ranks] = error
assert off[torch.float32, 64] < 1e-6
assert 1e-3 < off[torch.bfloat16, 2] < off[torch.bfloat16, 64]

# %% [markdown]
# In fp32 the average over equal parts *is* the gradient of this loss over the whole batch, up to the order of a sum,
# so training on several devices can be the same training. In bf16 it is off by 0.24 % with 2 ranks, and by 0.89 %
# with 64, because each addition rounds once more. In which dtype the gradients travel is the new choice of this
# notebook.
#
# ## The setting
#
# With four GPUs or more we start one, two and four processes, and with two or three GPUs one and
# two, each on a GPU of its own. With fewer, the processes run on the CPU. <!-- tests/notebooks/test_11_scale_out.py -->

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
# The data are handwritten digits of 8x8 pixels, which the network reads as eight rows. The network
# has no dropout and no batch normalisation. All its shapes are multiples of eight, so that two and
# four processes divide them evenly. That is why the last layer has 16 outputs, although there are
# ten digits.

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
# This is the plain loop: it trains for one epoch and returns the loss of every step. For fp32, `dtype`
# is None and autocast is off.


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
# We run it in fp32 and in bf16:

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
# In both, the loss falls from 2.81 to 0.75. After a step under autocast, the process holds weights,
# gradients and AdamW's two averages, each in fp32. The function counts what lies in *this* process,
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
# We take a single step and count:


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
# These are 16 bytes for each parameter. A step's time is no subject here, because the model is
# small and on a CPU the processes share its cores; [notebook 10](10_speed_ladder.ipynb) has the
# sizes from which AMP pays.
#
# ## Divide the batch
#
# With n processes, each takes an n-th of every batch, and the gradients are averaged. A process is
# called a *rank*, and has a number. `DistributedSampler` decides which samples a rank gets. It draws
# the permutation that `RandomSampler` draws from the same seed, and rank r takes every n-th of it. So
# the parts of a step add up to the batch that one process would have had. <!-- tests/notebooks/test_11_scale_out.py -->
#
# The sampler draws the same permutation in every epoch, until `sampler.set_epoch(epoch)` tells it which epoch it is
# ([its documentation](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler)).
# When n does not divide the samples, it repeats some of them, or drops some with `drop_last=True`.
#
# ## Start the processes
#
# [`torchrun`](https://docs.pytorch.org/docs/stable/elastic/run.html) starts n copies of one script,
# and tells each copy its number and where to find the others, in environment variables. First the
# script joins the *process group*. Its
# [backend](https://docs.pytorch.org/docs/stable/distributed.html#backends) moves the data: gloo on
# CPUs, and NCCL on NVIDIA's GPUs.


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
# In this notebook `run_workers` makes the script: it writes the source of our functions into a file,
# starts that under torchrun, and returns what each rank returned.
# <!-- tests/course/test_processes.py -->
#
# An operation of all ranks together is a *collective*, and all of them must call it. `all_reduce` leaves
# the sum of their tensors on every rank. `all_gather` leaves all of their tensors, one after another,
# on every rank. `reduce_scatter` leaves an n-th of the sum on each. So an `all_reduce` gives the same as a
# `reduce_scatter` followed by an `all_gather`.
# <!-- tests/parallel/test_collectives.py -->
#
# ## DDP
#
# With [DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) every rank has the whole model. When
# `backward` has computed a gradient, DDP averages it over all ranks. It collects many gradients in a
# *bucket*, and sends one bucket while `backward` fills the next.
# With
# [`gradient_as_bucket_view`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
# a gradient lies in its bucket and takes no memory of its own.
#
# A rank's loss is that of its part of the batch, so we report the mean over all ranks:


# %%
def mean_loss(loss):
    """The mean of a loss over all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


# %% [markdown]
# The marked lines are all that is new beside the plain loop, and autocast stays where it was. <!-- tests/notebooks/test_11_scale_out.py -->


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
# How close must the losses be? The start and the samples are the same, but sums are formed in another
# order, and are rounded to 24 bits in fp32 and to 8 in bf16. In fp32 we allow a difference of 2^-14 for
# what twelve steps make of it. In bf16 we allow 2^-6, which is four roundings, as in [notebook
# 07](07_training_recipes.ipynb).


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
        print(f"{what}, {name}: off by {off:.0e} from one process, allowed {TOLERANCES[name]:.0e}")


# %% [markdown]
# If the losses agree, scaling out changes nothing that matters here: **keep the global batch, and the
# learning rate stays right.** If you keep the batch of each process instead, the global batch grows n times.
# That is another training, which may need another learning rate.
#
# ## FSDP2
#
# With DDP every rank holds everything. By default
# [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) (`fully_shard`) cuts each
# parameter into n parts along its first dimension, and a rank keeps one, a *shard*: of the weight, here in fp32, of its
# gradient, and of what the optimizer keeps. A layer's whole weights are gathered for its forward pass
# and, unless they stay gathered, again for its backward pass. Then its gradients are reduced and
# scattered. By a layer we mean any module with a `fully_shard` of its own; the last call takes what is
# left.
#
# The precision belongs to the wrapping, in a `MixedPrecisionPolicy`. Weights are cast to `param_dtype`
# *before* they travel, and gradients travel and are summed in `reduce_dtype`. Always give both, since
# the default of the second changed in PyTorch 2.15. There is one more difference: autocast casts
# *ops*, the policy [casts *modules*](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), so
# norms run in bf16 too, and the model returns bf16. Give the outermost call `output_dtype=torch.float32`, for the loss. <!-- tests/tracing/test_sharding.py -->


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
# Beside the plain loop, autocast is gone, and the optimizer is made *after* sharding, of the shards. (The
# mesh says who shares. Without it, `fully_shard` would [take the accelerator if there is
# one](https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/_fsdp_init.py).)


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
# ## Try seven set-ups
#
# We compare seven combinations. The first dtype is that of the computation: autocast's for DDP, and
# `param_dtype` for FSDP2. The second is the one in which gradients travel. For DDP a *communication
# hook* casts each bucket before it is sent, and back.
# <!-- tests/notebooks/test_11_scale_out.py -->

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
# The next function sets up one of them. (A PyTorch built for CPU alone [refuses a hook named
# `bf16_compress_hook`](https://github.com/pytorch/pytorch/blob/v2.11.0/torch/nn/parallel/distributed.py), although gloo
# can sum bf16, so our hook has another name.)


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
# `count_communication` notes the collectives of a process with dtype and size, and adds up what a rank sends for
# them in a ring: of a payload of S bytes, 2(n-1)/n S in an `all_reduce`, and (n-1)/n S in the other two.
# <!-- tests/parallel/test_collectives.py -->


# %%
def try_setup(config, x, y, *setup):
    """Sent bytes of a step by collective and dtype, and what is held in this process."""
    model, dtype = set_up(config, x.device, *setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    step = functools.partial(train_step, model, optimizer, x, y, dtype)
    step(), step()  # DDP arranges its buckets anew after the first
    with count_communication() as sent:
        step()
    totals = {key: part.sent_bytes for key, part in sent.totals().items()}
    return {"sent": totals, "memory": local_bytes(model, optimizer)}


def my_share(config, images, targets, device):
    """This rank's part of a batch."""
    part = slice(dist.get_rank(), config["batch"], dist.get_world_size())
    return images[part].to(device), targets[part].to(device)


# %% [markdown]
# Everything runs in one launch for each number of processes: first both engines train, then each set-up
# takes three steps.


# %%
def try_all(config, images, targets, trainings, setups, device_type):
    """The losses of the engines, and what `try_setup` counts."""
    device = join(device_type)
    data, share = TensorDataset(images, targets), my_share(config, images, targets, device)
    losses = {}
    for engine, precisions in trainings.items():
        train = {"DDP": train_ddp, "FSDP2": train_fsdp}[engine]
        losses[engine] = {
            name: train(config, data, precisions[name], device) for name in precisions
        }
    found = {name: try_setup(config, *share, *setup) for name, setup in setups.items()}
    dist.destroy_process_group()
    return {"losses": losses, "setups": found}


functions = try_all, join, new_model, mean_loss, shard, train_ddp, train_fsdp, set_up, try_setup
functions += bf16_hook, my_share, train_step, local_bytes

# %% [markdown]
# Before you run this: will the losses on four processes be nearer to those of one process in fp32 or in bf16?

# %% tags=["nbval-ignore-output"]
most, tries = counts[-1], {}
given = {"config": config, "images": images, "targets": targets, "device_type": where}
trainings = dict.fromkeys(("DDP", "FSDP2"), PRECISIONS)
for n in counts[1:]:
    tries[n] = run_workers(*functions, processes=n, trainings=trainings, setups=SETUPS, **given)
    for engine in trainings:
        check_losses(f"{engine} on {n}", [rank["losses"][engine] for rank in tries[n]])
    assert all(rank["losses"].keys() == trainings.keys() for rank in tries[n])
setups = {n: tries[n][0]["setups"] for n in counts[1:]}

# %% [markdown]
# All eight trainings repeat the losses of one process: in fp32 they are off by about 1e-07 and in bf16
# by up to 2e-03, which is much less than we allow.
#
# ## What does each send?
#
# Now we look at what a rank sends in a step, with the largest number of ranks. Before you run this: does
# autocast halve what DDP sends?

# %%
names = {fp32: "fp32", bf16: "bf16", fp16: "fp16"}
bars = {
    name: [(kind, names[dtype], size) for (kind, dtype), size in found["sent"].items()]
    for name, found in setups[most].items()
}
_ = figures.sent_bytes(bars, most)
for name, parts in bars.items():
    print(f"{name:<30}{sum(size for *_, size in parts):>12,} bytes")
assert len(bars) == len(SETUPS)

# %% [markdown]
# Each set-up has a bar: its length is the bytes that a rank sends in a step, its colour and hatching the
# dtype, and the word in it the collective. From the top:
#
# - **Autocast changes nothing** in what DDP sends, 653,280 bytes. The weights are fp32, so their
#   gradients are fp32 too, and these travel.
# - A **hook** to bf16 or fp16 halves it.
# - FSDP2 in **fp32** sends nearly half as much again as DDP, since most layers are gathered twice.
# - With **`param_dtype=bf16`** it sends 639,912 bytes, about as much as DDP, though a rank holds only a
#   part of the model.
# - With **`reduce_dtype=bf16`** the reduced bytes halve as well, which leaves 476,592.
#
# All of it follows from the number of parameters. DDP reduces each gradient once. FSDP2 scatters each
# once, and gathers a parameter once or twice: the first and last layers, which the last `fully_shard` took, stay
# gathered between the passes.

# %%
sent = {name: sum(found["sent"].values()) for name, found in setups[most].items()}
share = (most - 1) / most
assert sent["DDP, fp32"] == sent["DDP, autocast bf16"] == 2 * share * 4 * parameters
assert 2 * sent["DDP, autocast bf16, bf16 hook"] == sent["DDP, fp32"]
in_fp32, in_bf16 = sent["FSDP2, bf16, reduce in fp32"], sent["FSDP2, bf16, reduce in bf16"]
assert in_fp32 - in_bf16 == (4 - 2) * share * parameters  # scattered
blocks = new_model(config)[1 : 1 + config["layers"]]
outer = parameters - sum(p.numel() for p in blocks.parameters())  # stay gathered in between
assert in_fp32 == share * (4 * parameters + 2 * (2 * parameters - outer))
assert 0.9 < in_fp32 / sent["DDP, fp32"] < 1.1

# %% [markdown]
# Is a gradient in bf16 good enough? You saw [at the beginning](#The-idea-in-five-lines) that a sum in bf16 loses more
# with 64 ranks than with 2. FSDP2 lets you choose the two dtypes apart, and bf16 weights with fp32 sums are a safe
# choice.
#
# ## What does each hold?
#
# We count the same parts as for one process, now on a rank.

# %%
memory = {
    engine: {1: memory_alone} | {n: setups[n][name]["memory"] for n in counts[1:]}
    for engine, name in (("DDP", "DDP, fp32"), ("FSDP2", "FSDP2, bf16, reduce in fp32"))
}
_ = figures.memory_per_rank(memory)
for n in counts:
    assert memory["DDP"][n] == memory_alone
    assert memory["FSDP2"][n] == {part: size // n for part, size in memory_alone.items()}

# %% [markdown]
# The picture shows the bytes that a rank holds, by the number of ranks. DDP holds on every rank what one
# process holds, and FSDP2 holds an n-th of it. The shards are fp32 in bf16 too: they *are* the master
# weights. The picture leaves out the activations and the gathered weights of the layers at work.
#
# ## One decision about the loss scale
#
# With fp16 there is a `GradScaler` on every rank, and each decides whether to skip the step.
# If they do not decide alike, the replicas are different models from then on. To see what makes them
# agree, we let one rank alone meet an overflow, in one of two places: in its batch, or in its gradient
# after all communication. A skipped step shows in the scale.


# %%
def on_last_rank():
    """Whether this is the rank that meets the overflow."""
    return dist.get_rank() == dist.get_world_size() - 1


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
    scaler.step(optimizer), scaler.update()
    return scaler.get_scale() < 1024, [(call.kind, call.elements) for call in sent.calls]


# %% [markdown]
# We run that on two ranks:


# %%
def decide(config, images, targets, device_type):
    """Who skips, for each engine and place."""
    device = join(device_type)
    share = my_share(config, images, targets, device)
    engines, places = ("DDP", "FSDP2"), ("batch", "gradient")
    found = {
        "overflow": {(e, p): overflow(config, *share, e, p) for e in engines for p in places},
    }
    dist.destroy_process_group()
    return found


functions = decide, join, new_model, shard, set_up, my_share, on_last_rank, overflow
functions += (bf16_hook,)
decided = run_workers(*functions, processes=2, **given)

# %% [markdown]
# Before you run this: in which of the four cases does the first rank not skip its step?

# %%
for engine, place in decided[0]["overflow"]:
    skips = [rank["overflow"][engine, place][0] for rank in decided]
    print(f"{engine}, inf in the last rank's {place}: skipped {skips}")
    assert skips == [place == "batch" or engine == "FSDP2", True]

# %% [markdown]
# Only one case goes wrong. With DDP the scalers agree because the *gradients* agree: the average
# passes one rank's infinity to all. The ranks do not share what happens to a gradient after that,
# so the first rank steps and the last one skips.
#
# With FSDP2 every rank sees other gradients, its shards, so agreement has to be made. `unscale_` makes it:
# the parameters are DTensors, and for these PyTorch reduces the flag, a single number, over the ranks.

# %%
for rank in decided:
    assert rank["overflow"]["DDP", "gradient"][1] == []
    assert rank["overflow"]["FSDP2", "gradient"][1] == [("all_reduce", 1)]

# %% [markdown]
# So a plain `GradScaler` is enough for both, if all ranks have the same scale, and so is
# `clip_grad_norm_` after `unscale_`, which finds the norm of the whole gradient with FSDP2 as well ([PyTorch's own
# test](https://github.com/pytorch/pytorch/blob/main/test/distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_.py)).
#
# Some people average the gradients by hand and leave out DDP. Then the order matters: **average before the scaler
# looks**, as DDP does. If `unscale_` comes first, the rank with the overflow skips, and the others get an infinite
# average and step. The third exercise lets you try it. <!-- tests/notebooks/test_exercises.py -->
#
# ## Which dtype is where (optional)
#
# `xray_sharding` lists in which dtype each parameter is stored, gathered, computed and summed. It reads a
# model that is sharded already, or shards a copy without values, as here, so it needs no other process. On the command
# line it is `amp-lab xray FILE.py:CALLABLE --input … --parallel fsdp`. <!-- tests/tracing/test_sharding.py --> <!-- tests/cli/test_tracing_commands.py -->

# %%
found = xray_sharding(new_model(config), images[:8], parallel="fsdp", precision="bf16")
print(found)
assert {p.dtypes for p in found.parameters} == {(fp32, bf16, bf16, fp32)}
assert found.inputs["0"] == (fp32, bf16)

# %% [markdown]
# All inputs are cast as well, if they are floating-point numbers. To keep one of them in fp32, such as a time or a position, give
# that unit's policy `cast_forward_inputs=False`, and cast the others in `forward`. All trained parameters of a unit must be stored in
# one dtype, or the first step fails. We convert the last layer, which the outermost unit takes: <!-- tests/tracing/test_sharding.py -->

# %%
mixed = new_model(config)
mixed[-1].to(bf16)
advice = xray_sharding(mixed, parallel="fsdp").advice
print(advice[0])
assert "fails at the first step" in advice[0]

# %% [markdown]
# Four more questions come up when people move a loop to FSDP2:
#
# - **In which dtype do gradients accumulate?** With `set_requires_gradient_sync(False)` they are [summed in
#   `reduce_dtype`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) on each rank. DeepSpeed has [two
#   settings](https://www.deepspeed.ai/docs/config-json/): `grad_accum_dtype` for this, and `communication_data_type` for what travels.
# - **Where is `ShardedGradScaler`?** [It belongs to FSDP1](https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/sharded_grad_scaler.py),
#   whose shards are plain tensors, so it asked the other ranks about overflows itself. With FSDP2 you use `GradScaler`.
# - **What if one rank has a batch more?** It [hangs or
#   fails](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join).
#   DDP has `join` for that and FSDP2 has not, so give all ranks as many steps, for example with `drop_last=True`.
# - **Who loads the scaler's state?** Every rank. If one alone does, the average mixes gradients of two scales:

# %%
loaded, fresh = 1024.0, torch.amp.GradScaler(where).get_scale()
average = (loaded + fresh) / 2  # of a gradient that is 1 on both ranks, each scaled by its own
print(f"instead of 1, rank 0 finds {average / loaded}, and rank 1 {average / fresh}")
assert average / loaded > 1 > average / fresh
assert hasattr(DistributedDataParallel, "join")
assert not hasattr(FSDPModule, "join")

# %% [markdown]
# ## On your own hardware (optional)
#
# The command `amp-lab train` of notebooks 05 and 06 trains with DDP or FSDP2 when torchrun starts it. On one machine
# with two GPUs, or on a CPU, start it like this: <!-- tests/train/test_parallel_run.py -->
#
# ```
# torchrun --standalone --nproc-per-node 2 -m amp_lab train --dataset digits --parallel ddp --out runs/ddp
# torchrun --standalone --nproc-per-node 2 -m amp_lab train --dataset digits --parallel fsdp --precision bf16 --reduce-dtype bf16 --out runs/fsdp
# ```
#
# On two machines, run the same line on both, with the address of one of them:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m amp_lab train …
# ```
#
# With `--max-restarts 3` [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) starts all processes
# again when one is lost, up to three times, and the training resumes from its last checkpoint by itself. <!-- tests/train/test_parallel_run.py -->
#
# ## Save on four, go on with two (optional)
#
# [`torch.distributed.checkpoint`](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)
# (DCP) writes a folder, with a file from each rank and an index of where each part of each tensor
# is. We train a model for three steps and save it with its optimizer.


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
# When you load, you say which parts you want, and these may be others than were saved. Here we load into a
# model that has been trained on something else. Its state dicts tell what belongs on this rank *now*, and
# are filled in place. (A new optimizer's own `state_dict()` has no moments, so `dcp.load` would fill none.)
# <!-- tests/notebooks/test_11_scale_out.py -->


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
# Four ranks save and load, and two ranks load:


# %%
def save_and_load(config, images, targets, folder, saves, device_type):
    """The losses of the saved model, if this run saves, and of the loaded one; and its steps."""
    share = my_share(config, images, targets, join(device_type))
    saved = evaluate(save_sharded(config, *share, folder), images, targets) if saves else None
    model, steps = load_sharded(config, *share, folder)
    loaded = evaluate(model, images, targets)
    dist.destroy_process_group()
    return saved, loaded, steps


temporary = tempfile.TemporaryDirectory()
folder = str(Path(temporary.name) / "checkpoint")
functions = save_and_load, join, new_model, shard, train_step, my_share
functions += save_sharded, load_sharded, evaluate
loads = {}
for n in reversed(counts[1:]):
    loads[n] = run_workers(*functions, processes=n, folder=folder, saves=(n == most), **given)

# %% [markdown]
# One process needs neither FSDP2 nor a process group, because `dcp_to_torch_save` makes a plain file of the
# folder.

# %%
plain_file = Path(temporary.name) / "plain.pt"
dcp_to_torch_save(folder, plain_file)
model = new_model(config).to(where)
model.load_state_dict(torch.load(plain_file, weights_only=True)["model"])
temporary.cleanup()
saved = loads[most][0][0]
losses = {n: ranks[0][1] for n, ranks in loads.items()} | {1: evaluate(model, images, targets)}
for n, loss in losses.items():
    print(f"saved by {most}: loss {saved:.4f}; loaded by {n}: {loss:.4f}")
    assert abs(loss - saved) < TOLERANCES["fp32"] * loss
assert all(rank[2] == {3} for ranks in loads.values() for rank in ranks)  # steps of AdamW

# %% [markdown]
# The loss is 1.8162 on four processes, on two and on one. With fp16 you also put the scaler's
# `state_dict()`, which is the same on all ranks, into the checkpoint.
#
# ## Summary
#
# - With the same global batch, DDP and FSDP2 trained as one process does, up to rounding.
# - What travels has a dtype of its own. With fp32 weights DDP sends fp32 gradients, with autocast or without,
#   unless a communication hook casts them to 16 bits, which halves the bytes. FSDP2 gathers weights in
#   `param_dtype` and reduces gradients in `reduce_dtype`.
# - FSDP2 divides weights, gradients and optimizer state among the ranks. In bf16 with fp32 sums it sends about as much
#   as DDP does in fp32.
# - A sum of gradients in bf16, one rank after another, lost more with more ranks, 0.24 % with 2 and 0.89 % with 64, so
#   reduce in fp32.
# - The scalers of all ranks must decide alike. DDP's do because the gradients are averaged before they
#   look, and FSDP2's because `unscale_` asks all ranks. If you reduce by hand, do it before `unscale_`.
# - A checkpoint that four ranks saved was loaded by four, by two and by one.
#
# Next: [notebook 12](12_keras.ipynb) does mixed precision in Keras.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each. None of them starts a process.

# %%
from course.exercises import checks_of

exercises = checks_of("11_scale_out")

# %% [markdown]
# ### 1. How much does a rank send?
#
# A model has 100 million parameters and is trained with DDP on 8 ranks, under bf16 autocast and without
# a communication hook. How many MB (10^6 bytes) does each rank send in a step?

# %%
megabytes = ...
exercises.check_megabytes(megabytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The gradients go through an `all_reduce`. In which dtype are they, when autocast is on and the weights
# are fp32?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# megabytes = 700
# ```
#
# The payload is 4 bytes for each parameter, 400 MB, and an `all_reduce` costs 2(n-1)/n of it, which is
# 1.75 times as much for 8 ranks.
#
# </details>
#
# ### 2. How much does a rank hold?
#
# A model of 7 billion parameters is trained with FSDP2 and AdamW on 8 ranks, with `param_dtype=bf16`.
# How many GB (10^9 bytes) of weights, gradients and optimizer state does a rank hold between two steps,
# before the gradients are set to None?

# %%
gigabytes_per_rank = ...
exercises.check_per_rank(gigabytes_per_rank)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `param_dtype` is the dtype in which weights travel and compute. In which dtype is the shard that a rank
# keeps?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gigabytes_per_rank = 14
# ```
#
# There are 16 bytes for each parameter, 4 of weight, 4 of gradient and 8 of AdamW's state, all in fp32.
# That is 112 GB for the model, and an eighth of it on each rank.
#
# </details>
#
# ### 3. Average the gradients yourself
#
# `average(model)` averages the gradients over all ranks, as DDP does during `backward`. Complete
# one step of fp16 training with it, clipped to a norm of 1. If any rank had an overflow, all must
# skip.


# %%
def one_step(loss, model, optimizer, scaler, average):
    return ...  # backward, average, clip, step, update


exercises.check_one_step(one_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `unscale_` looks for overflows. What has this rank then missed, if another rank had one? Clipping
# wants gradients that are not scaled any more.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def one_step(loss, model, optimizer, scaler, average):
#     scaler.scale(loss).backward()
#     average(model)
#     scaler.unscale_(optimizer)
#     nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     scaler.step(optimizer)
#     scaler.update()
# ```
#
# The average comes first, so that the scaler of every rank sees the same gradients. `unscale_` comes
# before clipping, as with one process.
#
# </details>
#
# ### 4. The loss of all, from unequal parts
#
# At the end of an evaluation the ranks have different numbers of samples. Each reports its mean loss and
# its number of samples. Return the mean loss over all samples.


# %%
def loss_of_all(mean_losses, samples):
    return ...  # sum(mean_losses) / len(mean_losses) holds for equal parts only


exercises.check_loss_of_all(loss_of_all)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What is the sum of the losses on one rank, if you know its mean and its number of samples?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def loss_of_all(mean_losses, samples):
#     sums = [loss * n for loss, n in zip(mean_losses, samples, strict=True)]
#     return sum(sums) / sum(samples)
# ```
#
# In training the same error hides in a last batch that does not divide evenly, since DDP averages the
# gradients of all ranks with equal weights.
#
# </details>
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
