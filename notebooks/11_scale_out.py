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
# line marked. Count what each process sends, in which dtype, and what it holds.
#
# **What you'll learn.**
# - why the losses are the same as with one process, and how closely they agree;
# - which precision choices are new: in which dtype weights and gradients travel;
# - how all processes come to one decision about the loss scale, and how that goes wrong;
# - in an optional section, how to save on four processes and resume on two.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU. On a CPU the processes share
# its cores, so we do not time them. What is sent and held can be counted. It takes a few minutes.

# %% tags=["nbval-ignore-output"]
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from course import figures, start
from course.processes import run_workers
from course.scale_out import digits_by_row, local_bytes, new_model, skips_after_overflow

from amp_lab.train.distributed import count_communication

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()
torch.set_num_threads(1)  # as in every worker

# %% [markdown]
# ## The idea in five lines
#
# Processes that share a batch compute a gradient each, and average them. Before you run this: how far
# is that average from the gradient of the whole batch, if the gradients are fp32, and if they travel in
# bf16?


# %%
def gradient_of(layer, x):
    """The gradient of a small loss."""
    return torch.autograd.grad(layer(x).square().mean(), layer.weight)[0]


torch.manual_seed(0)
layer, batch = nn.Linear(64, 64), torch.randn(64, 64)
whole, off = gradient_of(layer, batch), {}
for dtype, ranks in ((torch.float32, 64), (torch.bfloat16, 2), (torch.bfloat16, 64)):
    total = sum(gradient_of(layer, part).to(dtype) for part in batch.chunk(ranks))
    off[dtype, ranks] = ((total.float() / ranks - whole).norm() / whole.norm()).item()
    print(f"{ranks:>2} ranks, {dtype}: off by {off[dtype, ranks]:.2%}")
assert off[torch.float32, 64] < 1e-6
assert 1e-3 < off[torch.bfloat16, 2] < off[torch.bfloat16, 64]

# %% [markdown]
# In fp32 the average over equal parts *is* the gradient over the whole batch, up to the order of a sum.
# So training on several devices can be the same training. In bf16 each addition rounds once more, so
# the error grows with the number of ranks. The dtype in which the gradients travel is the new choice of
# this notebook.
#
# ## One process
#
# We train a small transformer on handwritten digits ([`course/scale_out.py`](course/scale_out.py)). With
# four or more GPUs we start one, two and four processes. With two or three GPUs we start one and two.
# Each process has its own GPU. With fewer GPUs, the processes run on the CPU. <!-- tests/notebooks/test_11_scale_out.py -->

# %%
gpus = 0 if device.type == "cpu" else torch.accelerator.device_count()
where = device.type if gpus >= 2 else "cpu"
counts = (1, 2) if gpus in (2, 3) else (1, 2, 4)
print(f"runs with {', '.join(map(str, counts))} processes on: {where}")
config = {
    "quick": {"width": 64, "heads": 4, "layers": 2, "batch": 64, "lr": 1e-3},
    "full": {"width": 256, "heads": 8, "layers": 4, "batch": 64, "lr": 3e-4},
}[scale if where == device.type else "quick"]
data = digits_by_row()
assert config["batch"] % counts[-1] == 0
parameters = sum(p.numel() for p in new_model(config).parameters())

# %% [markdown]
# This is the plain loop. It trains for one epoch. It returns the loss of every step, and the bytes of
# weights, gradients and optimizer state that this process holds at the end.


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
    return losses, local_bytes(model, optimizer)


# %%
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
alone = {}
for name, dtype in PRECISIONS.items():
    alone[name], memory_alone = train_plain(config, data, dtype, torch.device(where))
    print(f"{name}: the loss falls from {alone[name][0]:.2f} to {alone[name][-1]:.2f}")
    assert alone[name][-1] < alone[name][0] / 2
    assert sum(memory_alone.values()) == 16 * parameters  # all in fp32, under autocast too

# %% [markdown]
# ## Divide the batch
#
# With n processes, each takes an n-th of every batch, and the gradients are averaged. A process is
# called a *rank*, and has a number. `DistributedSampler` decides which samples a rank gets: it draws the
# permutation that `RandomSampler` draws from the same seed, and rank r takes every n-th sample of it. So
# the parts of a step add up to the batch of one process. <!-- tests/notebooks/test_11_scale_out.py -->
#
# [`torchrun`](https://docs.pytorch.org/docs/stable/elastic/run.html) starts n copies of one script. Each
# copy first joins the *process group*. Its
# [backend](https://docs.pytorch.org/docs/stable/distributed.html#backends) moves the data: gloo on CPUs,
# NCCL on NVIDIA's GPUs.


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
# In this notebook `run_workers` writes the source of our functions into such a script and starts it
# under torchrun. <!-- tests/course/test_processes.py -->
#
# ## DDP
#
# With [DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) every rank has the whole model. DDP
# averages each gradient over all ranks while `backward` computes the next ones. The marked lines are all
# that is new; autocast stays where it was. <!-- tests/notebooks/test_11_scale_out.py -->
#
# The gradients are fp32, so they travel in fp32. A [communication
# hook](https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html) casts them before they are sent, here to bf16.


# %%
def mean_loss(loss):
    """The mean of a loss over all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def bf16_hook(group, bucket):
    """PyTorch's own hook; a build for CPU alone refuses it by its name."""
    return default_hooks.bf16_compress_hook(group, bucket)


# %%
def train_ddp(config, data, dtype, device, sums_in=torch.float32):
    model = new_model(config).to(device)
    model = DistributedDataParallel(model)  # DDP
    if sums_in is torch.bfloat16:  # DDP
        model.register_comm_hook(None, bf16_hook)  # DDP
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
    return losses, local_bytes(model, optimizer)


# %% [markdown]
# ## FSDP2
#
# With DDP every rank holds everything.
# [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) cuts each parameter into
# n parts, and a rank holds one, a *shard*: of the weight, of its gradient and of the optimizer state. The
# whole weights of a layer are gathered for its forward pass and again for its backward pass. Then its
# gradients are summed and scattered.
#
# You choose the precision when you call `fully_shard`, with a
# [`MixedPrecisionPolicy`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html):
#
# - `param_dtype`: FSDP2 casts the weights to it *before* it sends them, and the layers compute in it.
#   The shards stay fp32.
# - `reduce_dtype`: gradients travel and are summed in it. Always give it, since its default changed in
#   PyTorch 2.15.
# - `output_dtype`: the dtype of the output. Give fp32 to the outermost call, for the
#   loss. <!-- tests/tracing/test_sharding.py -->
#
# Autocast casts *ops*; the policy casts *modules*, so norms run in bf16
# too. <!-- tests/tracing/test_sharding.py -->


# %%
def shard(model, param_dtype, reduce_dtype):
    """Divide weights, gradients and optimizer state among all ranks, layer by layer."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for layer in model:
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # takes the layers that are left


# %%
def train_fsdp(config, data, dtype, device, sums_in=torch.float32):
    model = new_model(config).to(device)
    shard(model, dtype or torch.float32, sums_in)  # FSDP2: before the optimizer
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
    return losses, local_bytes(model, optimizer)


# %% [markdown]
# ## Try six set-ups
#
# For each set-up: the engine, the dtype of the computation (autocast's, or `param_dtype`), and the dtype
# in which gradients are summed. `count_communication` records the collectives of a process. It adds up
# what a rank sends for them in a ring. <!-- tests/parallel/test_collectives.py -->


# %%
SETUPS = {
    "DDP, fp32": ("DDP", "fp32", "fp32"),
    "DDP, autocast bf16": ("DDP", "bf16", "fp32"),
    "DDP, autocast bf16, bf16 hook": ("DDP", "bf16", "bf16"),
    "FSDP2, fp32": ("FSDP2", "fp32", "fp32"),
    "FSDP2, bf16, reduce in fp32": ("FSDP2", "bf16", "fp32"),
    "FSDP2, bf16, reduce in bf16": ("FSDP2", "bf16", "bf16"),
}


# %%
def try_all(config, setups, device_type):
    """For each set-up: the losses, what this rank holds, and the bytes that it sends in an epoch."""
    device, data, found = join(device_type), digits_by_row(), {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, (engine, compute, sums_in) in setups.items():
        train = {"DDP": train_ddp, "FSDP2": train_fsdp}[engine]
        dtype = None if compute == "fp32" else dtypes[compute]
        with count_communication() as sent:
            losses, held = train(config, data, dtype, device, dtypes[sums_in])
        totals = {key: part.sent_bytes for key, part in sent.totals().items()}
        found[name] = {"losses": losses, "held": held, "sent": totals}
    dist.destroy_process_group()
    return found


# %% [markdown]
# Before you run this: will the losses on four processes be nearer to those of one process in fp32 or in
# bf16? In fp32 we allow a difference of 2^-14, because other orders of summation change the result a
# little over twelve steps. In bf16 we allow 2^-6, which is four roundings.

# %% tags=["nbval-ignore-output"]
TOLERANCES = {"fp32": 2.0**-14, "bf16": 2.0**-6}
most, tries = counts[-1], {}
functions = try_all, join, mean_loss, bf16_hook, train_ddp, shard, train_fsdp
for n in counts[1:]:
    ranks = run_workers(*functions, processes=n, config=config, setups=SETUPS, device_type=where)
    tries[n] = ranks[0]
    for name, (_, compute, _) in SETUPS.items():
        assert all(rank[name]["losses"] == tries[n][name]["losses"] for rank in ranks)
        found, wanted = map(torch.tensor, (tries[n][name]["losses"], alone[compute]))
        difference = ((found - wanted).abs() / wanted).max().item()
        print(f"{n} processes, {name:<30} off by {difference:.0e} from one process")
        assert difference < TOLERANCES[compute]

# %% [markdown]
# All of them repeat the losses of one process, fp32 far more closely than bf16. **Keep the global batch,
# and the learning rate stays right.** If you keep the batch of each process instead, the global batch
# grows n times. That is another training, which may need another learning rate.
#
# ## What does each send and hold?
#
# Before you look: does autocast halve what DDP sends?

# %%
names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
steps = len(data) // config["batch"]
bars = {name: [] for name in SETUPS}
for name, found in tries[most].items():
    for (kind, dtype), size in found["sent"].items():
        is_gradient_or_weight = dtype in names and size / steps > 100  # and not the loss
        if is_gradient_or_weight and kind != "broadcast":  # once, when DDP begins
            bars[name].append((kind, names[dtype], size / steps))
_ = figures.sent_bytes(bars, most)

# %% [markdown]
# Each bar is the bytes that a rank sends in a step. The colour of a bar shows the dtype, and the word in
# it names the collective.
#
# - **Autocast changes nothing** in what DDP sends: the weights are fp32, so their gradients are too.
# - A **hook** to bf16 halves it.
# - FSDP2 in **fp32** sends nearly 1.5 times as much as DDP, since it gathers most layers twice.
# - With **`param_dtype=bf16`** it sends about as much as DDP, though a rank holds only a part of the model.
# - With **`reduce_dtype=bf16`** the gradients halve as well.
#
# Is a gradient in bf16 good enough? You saw [at the beginning](#The-idea-in-five-lines) that a sum in
# bf16 loses more with more ranks. bf16 weights with fp32 sums are a safe choice.

# %%
sent = {name: sum(size for *_, size in parts) for name, parts in bars.items()}
held = {name: sum(found["held"].values()) for name, found in tries[most].items()}
assert sent["DDP, fp32"] == sent["DDP, autocast bf16"]
assert 0.99 < 2 * sent["DDP, autocast bf16, bf16 hook"] / sent["DDP, fp32"] < 1.01
assert 1.4 < sent["FSDP2, fp32"] / sent["DDP, fp32"] < 1.5
assert 0.9 < sent["FSDP2, bf16, reduce in fp32"] / sent["DDP, fp32"] < 1.1
assert sent["FSDP2, bf16, reduce in bf16"] < 0.8 * sent["FSDP2, bf16, reduce in fp32"]
print(f"DDP: each rank holds {held['DDP, fp32'] / parameters:.0f} bytes for each parameter")
fsdp_bytes = held["FSDP2, bf16, reduce in fp32"] / parameters
print(f"FSDP2 on {most} ranks: {fsdp_bytes:.0f} bytes")
assert fsdp_bytes == 16 / most

# %% [markdown]
# DDP holds on every rank what one process holds: weights, gradients and AdamW's two averages in fp32.
# FSDP2 holds an n-th of it. Activations, and the gathered weights of the layer at work, come on top.
#
# ## One decision about the loss scale
#
# With fp16 there is a `GradScaler` on every rank, and each decides whether to skip the step. If they
# decide differently, the ranks train different models from then on. To see what makes them agree, we let
# one rank alone overflow, in one of two places: in its batch, or in its gradient after all
# communication. Before you run this: in which of the four cases does the first rank *not* skip?


# %%
def decide(config, device_type):
    """Who skips, for each engine and place."""
    device = join(device_type)
    x, y = (t.to(device) for t in digits_by_row()[:8])
    found = {}
    for engine in ("DDP", "FSDP2"):
        for place in ("batch", "gradient"):
            found[engine, place] = skips_after_overflow(engine, place, config, x, y)
    dist.destroy_process_group()
    return found


decided = run_workers(decide, join, processes=2, config=config, device_type=where)
for engine, place in decided[0]:
    skips = [rank[engine, place][0] for rank in decided]
    print(f"{engine}, inf in the last rank's {place}: skipped {skips}")
    assert skips == [place == "batch" or engine == "FSDP2", True]
assert decided[0]["FSDP2", "gradient"][1] == [("all_reduce", 1)]  # what `unscale_` sends
assert decided[0]["DDP", "gradient"][1] == []

# %% [markdown]
# Only one case goes wrong. With DDP the scalers agree because the *gradients* agree: the average hands
# one rank's infinity to all. What happens to a gradient after that stays on its rank. With FSDP2 each
# rank has its own shard of the gradients. So `unscale_` lets the ranks agree: it reduces one number, the
# flag for an overflow, over all ranks.
#
# So a plain `GradScaler` is enough for both, and `clip_grad_norm_` after `unscale_` finds the norm of
# the whole gradient with FSDP2 as well ([PyTorch's own
# test](https://github.com/pytorch/pytorch/blob/main/test/distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_.py)).
# If you average gradients by hand, **average before the scaler looks**. Otherwise the rank with the
# overflow skips, and the others step with an infinite average. The third exercise lets you try it. <!-- tests/notebooks/test_exercises.py -->
#
# ## On your own hardware
#
# [Several machines](../docs/several_machines.md) has the commands: `amp-lab train` under torchrun, on one
# machine or several, and `amp-lab xray … --parallel fsdp`, which lists the dtype of each parameter as it
# is stored, gathered, computed and summed.
#
# ## Save on four, resume on two (optional)
#
# [`torch.distributed.checkpoint`](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)
# writes a folder, with a file from each rank. To load, you say which parts you want. They may differ
# from those that were saved. `get_state_dict` returns what belongs on this rank *now*, and `dcp.load`
# fills these tensors in place. <!-- tests/notebooks/test_11_scale_out.py -->


# %%
import tempfile

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def trained(config, x, y, steps):
    """A sharded model and its optimizer, trained for some steps."""
    model = new_model(config).to(x.device)
    shard(model, torch.float32, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


# %%
def save_or_load(config, folder, saves, device_type):
    """Save after three steps, or load after one; return the loss before and after."""
    device, data = join(device_type), digits_by_row()
    x, y = (t.to(device) for t in data[:])
    model, optimizer = trained(config, x, y, steps=3 if saves else 1)
    before = F.cross_entropy(model(x), y).item()
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optim_state}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    after = F.cross_entropy(model(x), y).item()
    dist.destroy_process_group()
    return before, after


# %%
found = {}
with tempfile.TemporaryDirectory() as folder:
    needed = join, shard, trained
    given = {"config": config, "folder": folder, "device_type": where}
    for n, saves in ((most, True), (counts[1], False)):
        ranks = run_workers(save_or_load, *needed, processes=n, saves=saves, **given)
        before, found[saves] = ranks[0]
        print(f"{n} processes: loss {before:.4f}, then {found[saves]:.4f}")
assert abs(found[False] - found[True]) < TOLERANCES["fp32"] * found[True]
assert abs(before - found[False]) > 0.1  # it had another model before it loaded

# %% [markdown]
# The second launch had another model before it loaded the saved one. With fp16, also save the
# scaler's `state_dict()`, which is the same on all ranks, and load it on every rank. For one process,
# [`dcp_to_torch_save`](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) makes a plain file
# of the folder.
#
# ## Summary
#
# - With the same global batch, DDP and FSDP2 train as one process does, up to rounding.
# - What travels has its own dtype. DDP sends the gradients of fp32 weights in fp32, with autocast or
#   without, unless a communication hook casts them. FSDP2 gathers weights in `param_dtype` and sums
#   gradients in `reduce_dtype`.
# - FSDP2 divides weights, gradients and optimizer state among the ranks. In bf16 with fp32 sums it sends
#   about as much as DDP in fp32.
# - A sum of gradients in bf16 loses more with more ranks, so reduce in fp32.
# - The scalers of all ranks must decide alike. DDP's do because the gradients are averaged first, and
#   FSDP2's because `unscale_` asks all ranks. If you reduce by hand, do it before `unscale_`.
# - A checkpoint can be loaded by another number of ranks.
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
