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
# **What you'll do.** Run a plain training loop in several processes, with `DistributedDataParallel` (DDP) and with
# FSDP2 (`fully_shard`). Count the bytes that each process sends and holds.
#
# **What you'll learn.**
# - how closely training in several processes agrees with training in one;
# - which dtypes you choose for sending weights and gradients;
# - how all processes agree on the loss scale, and when they do not.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU.

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
# Several processes, called *ranks*, divide a batch. Each rank computes the gradient of its part, and the ranks
# average these gradients. Before you run this: how far is the average from the gradient of the whole batch, in
# fp32 and in bf16?


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
# In fp32, the average equals the gradient of the whole batch up to rounding. In bf16, each addition rounds the sum. The
# dtype in which gradients are sent and added up therefore matters.
#
# ## One process
#
# We train a small transformer on handwritten digits ([`course/scale_out.py`](course/scale_out.py)).

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
# The plain loop trains for one epoch.


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
# With n processes, each rank takes an n-th of every batch. `DistributedSampler` gives each rank its samples. It has
# the same seed as the plain loop, so the ranks together get the same batches as the plain loop. If you train for
# several epochs, call `sampler.set_epoch(epoch)` before each epoch. Otherwise, all epochs have the same order.
# <!-- tests/notebooks/test_11_scale_out.py -->
#
# [`torchrun`](https://docs.pytorch.org/docs/stable/elastic/run.html) starts several copies of one script. Each copy
# is a rank and first joins the *process group*, in which the ranks exchange data.


# %%
def join(device_type):
    """Join the process group; return the device of this process."""
    device = torch.device(device_type)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)  # gloo, nccl, …
    dist.init_process_group(backend, timeout=timedelta(seconds=60))  # the default may be 30 minutes
    return device


# %% [markdown]
# Our helper `run_workers` runs functions of this notebook under torchrun. <!-- tests/course/test_processes.py -->
#
# ## DDP
#
# With [DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html), every rank has the whole model. During `backward`,
# DDP averages the gradients with an *all-reduce*, which gives every rank the same result.
# <!-- tests/notebooks/test_11_scale_out.py -->
#
# Our weights and their gradients are fp32, so DDP sends the gradients in fp32. A [communication
# hook](https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html) can cast them before they are sent, here to bf16.


# %%
def mean_loss(loss):
    """The mean of a loss over all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def bf16_hook(group, bucket):
    """PyTorch's hook under another name: CPU-only builds refuse the name `bf16_compress_hook`."""
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
# [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) divides the model. Each rank holds
# one *shard* of each weight, with the shard's gradient and optimizer state. With a
# [`MixedPrecisionPolicy`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), you choose
# `param_dtype` and `reduce_dtype`. In a training step, FSDP2 sends the following for each encoder layer:
#
# | when | what FSDP2 sends | dtype |
# |---|---|---|
# | before the layer's forward pass | *all-gather*: every rank gets all shards of the layer's weights | `param_dtype` |
# | before the layer's backward pass | all-gather | `param_dtype` |
# | after the layer's backward pass | *reduce-scatter*: every rank gets its shard of the averaged gradients | `reduce_dtype` |
#
# The shards keep their dtype, here fp32. The loop has no autocast block, because this policy chooses the dtypes: all
# our layers compute in `param_dtype`, even the norms. For the outermost module, set `output_dtype` to fp32, so that
# the loss is computed in fp32.
# <!-- tests/tracing/test_sharding.py --> <!-- tests/notebooks/test_11_scale_out.py -->


# %%
def shard(model, param_dtype, reduce_dtype):
    """Divide weights, gradients and optimizer state among all ranks, layer by layer."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for layer in model:
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the remaining layers


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
# Each set-up has three settings:
#
# - the engine: DDP or FSDP2;
# - the dtype of the matmuls;
# - the dtype in which gradients are summed. <!-- code -->
#
# `count_communication` computes how many bytes a rank sends. It assumes that the ranks form a ring, in which each rank
# sends only to the next one.
# <!-- tests/parallel/test_collectives.py -->


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
# We compare each set-up with one process in the same precision. Before you run this: will the losses be closer in fp32
# or in bf16?

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
        print(f"{n} processes, {name:<30} losses off by {difference:.0e} from one process")
        assert difference < TOLERANCES[compute]

# %% [markdown]
# All set-ups have nearly the same losses as one process. In fp32, the losses are far closer than in bf16.
#
# The *global batch* is the batch of all ranks together. **If you keep its size, you can keep the learning rate**: the
# average of the ranks' gradients is the gradient of the global batch. The loss must be a mean over samples, and all
# ranks must have equally many samples. On GPUs, replace batch norm with
# [`nn.SyncBatchNorm`](https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html), because plain batch
# norm sees only the batch of its rank.
# <!-- tests/notebooks/test_11_scale_out.py -->
#
# ## What does each rank send and hold?
#
# Before you look at the bytes: does autocast halve what DDP sends?

# %%
names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
steps = len(data) // config["batch"]
bars = {name: [] for name in SETUPS}
for name, found in tries[most].items():
    for (kind, dtype), size in found["sent"].items():
        is_gradient_or_weight = dtype in names and size / steps > 100  # not the loss
        if is_gradient_or_weight and kind != "broadcast":  # sent once, when DDP starts
            bars[name].append((kind, names[dtype], size / steps))
_ = figures.sent_bytes(bars, most)

# %% [markdown]
# The next cell checks these ratios:
#
# | set-up | bytes, relative to DDP in fp32 | why |
# |---|---|---|
# | DDP, autocast bf16 | 1 | fp32 weights have fp32 gradients |
# | DDP, autocast bf16, bf16 hook | 1/2 | gradients in bf16 |
# | FSDP2, fp32 | about 3 x 1/2 | two all-gathers and a reduce-scatter, each half as large as an all-reduce |
# | FSDP2, bf16, reduce in fp32 | about 1/4 + 1/4 + 1/2 | bf16 halves the two all-gathers |
# | FSDP2, bf16, reduce in bf16 | about 3 x 1/4 | bf16 halves the reduce-scatter too |
#
# **Send weights in bf16, and sum gradients in fp32.** The layers compute with bf16 weights anyway, so sending the
# weights in bf16 loses no more precision. But in [the first cell](#The-idea-in-five-lines), a sum in bf16 lost more
# precision with more ranks.

# %%
sent = {name: sum(size for *_, size in parts) for name, parts in bars.items()}
held = {name: sum(found["held"].values()) for name, found in tries[most].items()}
assert sent["DDP, fp32"] == sent["DDP, autocast bf16"]
assert 0.99 < 2 * sent["DDP, autocast bf16, bf16 hook"] / sent["DDP, fp32"] < 1.01
assert 1.4 < sent["FSDP2, fp32"] / sent["DDP, fp32"] < 1.5
assert 0.9 < sent["FSDP2, bf16, reduce in fp32"] / sent["DDP, fp32"] < 1.1
assert 0.7 < sent["FSDP2, bf16, reduce in bf16"] / sent["DDP, fp32"] < 0.8
print(f"DDP: each rank holds {held['DDP, fp32'] / parameters:.0f} bytes for each parameter")
fsdp_bytes = held["FSDP2, bf16, reduce in fp32"] / parameters
print(f"FSDP2: each of {most} ranks holds {fsdp_bytes:.0f} bytes for each parameter")
assert fsdp_bytes == 16 / most

# %% [markdown]
# Each parameter has a weight, a gradient and AdamW's two averages. With DDP, every rank holds all four in fp32. With
# FSDP2, each of n ranks holds an n-th of these bytes between two steps.
#
# ## One decision about the loss scale
#
# With fp16, every rank has its own `GradScaler`, which decides whether to skip the step. If only some
# ranks of DDP skip, the ranks train different models from then on. We try DDP and FSDP2. On rank 1 only, we put
# infinities in one of two places:
#
# - the batch;
# - a gradient, after the ranks have averaged their gradients.
#
# Before you run this: in which of the four cases does rank 0 *not* skip, although rank 1 does?


# %%
def decide(config, device_type):
    """Whether this rank skips, for each engine and each place of the overflow."""
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
    print(f"{engine}, inf in rank 1's {place}: rank 0 skipped: {skips[0]}, rank 1: {skips[1]}")
    assert skips == [place == "batch" or engine == "FSDP2", True]
assert decided[0]["FSDP2", "gradient"][1] == [("all_reduce", 1)]  # what `unscale_` sends
assert decided[0]["DDP", "gradient"][1] == []

# %% [markdown]
# With DDP and FSDP2, all ranks skip the step after an infinity in rank 1's batch:
#
# - **DDP** averages the gradients. If one rank's gradients have inf or NaN, the average has inf or NaN on all ranks.
# - **FSDP2**: `unscale_` combines the overflow flags of all ranks, so all scalers make the same decision.
#
# The ranks disagree only in one case: under DDP, if we change rank 1's gradient after the average. If your loop does
# not do this, the ordinary `GradScaler` works with DDP and FSDP2.
#
# If you average gradients yourself, **average them before `unscale_`**. Otherwise, only the rank with the overflow
# skips its step, and the other ranks update their weights with an average that has inf or NaN. <!--
# tests/notebooks/test_exercises.py -->
#
# ## On your own hardware
#
# `amp-lab xray … --parallel fsdp` lists the dtypes in which each parameter is stored, sent and used. The page [Train
# in several processes and on several machines](../docs/several_machines.md) explains this command and `amp-lab train`
# under torchrun.
# <!-- tests/cli/test_tracing_commands.py -->
#
# With [`torch.distributed.checkpoint`](https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html),
# you can save a sharded model on four ranks and resume it on two. With fp16, also save the scaler's `state_dict()`,
# and load it on every rank.
# <!-- tests/train/test_parallel_run.py, tests/notebooks/test_11_scale_out.py -->
#
# ## Summary
#
# - With the same global batch, DDP and FSDP2 had the losses of one process, up to rounding.
# - By default, DDP sends the gradients of fp32 weights in fp32, even under autocast. A communication hook can cast the
#   gradients.
# - FSDP2 divides weights, gradients and optimizer state among the ranks. It gathers weights in `param_dtype` and sums
#   gradients in `reduce_dtype`. Set `reduce_dtype` to fp32.
# - The scalers of all ranks must make the same decision. If you average gradients yourself, average them before
#   `unscale_`.
#
# Next, [notebook 12](12_keras.ipynb) shows mixed precision in Keras.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("11_scale_out")

# %% [markdown]
# ### 1. How much does a rank send?
#
# An fp32 model has 100 million parameters. We train it with DDP and bf16 autocast on a ring of 8 ranks, without a
# communication hook. How many MB (10^6 bytes) does each rank send in a step?

# %%
megabytes = ...
exercises.check_megabytes(megabytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# DDP averages the gradients with an `all_reduce`. In a ring of n ranks, each rank sends 2(n-1)/n times the bytes of
# the gradients. Which dtype do gradients have under autocast if the weights are fp32?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# megabytes = 700
# ```
#
# The gradients take 4 bytes for each parameter, which is 400 MB. For 8 ranks, 2(n-1)/n is 1.75.
#
# </details>
#
# ### 2. How much does a rank hold?
#
# An fp32 model has 7 billion parameters. We train it with FSDP2 and AdamW on 8 ranks, with `param_dtype=torch.bfloat16`.
# After a step, before `zero_grad`, how many GB (10^9 bytes) of weights, gradients and optimizer state does a rank hold?

# %%
gigabytes_per_rank = ...
exercises.check_per_rank(gigabytes_per_rank)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `param_dtype` is the dtype in which weights are sent and used. Which dtype does a rank's shard have?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# gigabytes_per_rank = 14
# ```
#
# Each parameter takes 16 bytes: 4 for the weight, 4 for the gradient and 8 for AdamW's state, all in
# fp32. All parameters take 112 GB, and each rank holds an eighth.
#
# </details>
#
# ### 3. Average the gradients yourself
#
# `average(model)` averages the gradients over all ranks, as DDP does during `backward`. Use it to
# complete one step of fp16 training that clips the gradients to a norm of 1. If any rank had an overflow,
# all ranks must skip.


# %%
def one_step(loss, model, optimizer, scaler, average):
    return ...  # backward, average, clip, step, update


exercises.check_one_step(one_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `unscale_` checks for overflows. If `unscale_` runs before the average, which overflows does it miss? Clipping needs
# gradients that are no longer scaled.
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
# </details>
#
# ### 4. Average the loss over unequal parts
#
# At the end of an evaluation, the ranks have different numbers of samples. Each rank reports its mean
# loss and its number of samples. Return the mean loss over all samples.


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
# </details>
#
# ## Further reading
#
# - S. Rajbhandari et al., [ZeRO: memory optimizations toward training trillion parameter
#   models](https://arxiv.org/abs/1910.02054), 2019: dividing weights, gradients and optimizer state.
# - P. Patarasuk and X. Yuan, [Bandwidth optimal all-reduce
#   algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002), 2009: why 2(n-1)/n.
