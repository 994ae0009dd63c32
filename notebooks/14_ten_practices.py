# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Review ten common practices
#
# **What you'll do.** Review ten common pieces of advice for mixed precision, and test three of them.
#
# **What you'll learn.**
# - which of the ten practices are right;
# - what goes wrong if the backward pass runs inside the autocast block;
# - how to read dtypes and casts from a profile of your training step.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. You need no GPU.

# %% tags=["nbval-ignore-output"]
import json
import os
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from course import figures, start

from amp_lab import Precision

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# We also need these imports:

# %%
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import describe_device

figures.use_style()
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
names = {fp32: "fp32", fp16: "fp16", bf16: "bf16"}

# %% [markdown]
# ## The idea in five lines
#
# We test the advice "always use a `GradScaler`". We round 1000 small gradients to 16 bits. Then we multiply the
# same gradients by 65536, round them, and divide by 65536. In which format do you expect different results, fp16
# or bf16?

# %%
torch.manual_seed(0)
small = 1e-6 * torch.randn(1000)
for dtype in (fp16, bf16):
    plain, scaled = small.to(dtype).float(), (65536 * small).to(dtype).float() / 65536
    print(f"{names[dtype]}: scaling changes {(plain != scaled).sum()} of 1000 gradients")
    assert (plain != scaled).any() == (dtype is fp16)

# %% [markdown]
# In fp16, such small numbers lose digits without scaling. In bf16, scaling changes nothing here, so the advice is for
# fp16.
#
# ## The ten practices
#
# A number in brackets links to a notebook about the practice.
#
# | practice | verdict | why |
# |---|---|---|
# | 1. Know the hardware | right | the speed of bf16 and fp16 depends on the machine ([10](10_speed_ladder.ipynb)) |
# | 2. Start with the scaler's defaults | right | if the scale is too high, the scaler skips a step and halves the scale ([03](03_grad_scaler_step_by_step.ipynb)) |
# | 3. Watch the accuracy | right, with several seeds | two fp32 runs with different seeds differ too ([04](04_fp32_vs_amp.ipynb)) |
# | 4. Only the forward pass in autocast | right | see [below](#Only-the-forward-pass-in-autocast) |
# | 5. No casts by hand | right, with [exceptions](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) | autocast casts for you, but cannot undo the rounding of a `.half()` ([02](02_autocast_dtypes.ipynb)) |
# | 6. Always use the scaler | only for fp16 | bf16 has about the range of fp32 ([01](01_number_formats.ipynb)) |
# | 7. Tune the initial scale and the growth interval | rarely needed | see 2 |
# | 8. Stay current with PyTorch | right | `torch.cuda.amp.autocast()` raises a warning ([13](13_from_apex.ipynb)) |
# | 9. Try larger batches | right for memory | AMP makes many activations smaller ([09](09_xray_your_model.ipynb)); measure whether a larger batch is faster ([10](10_speed_ladder.ipynb)) |
# | 10. Profile before and after | right | see [below](#Profile-before-and-after) |
#
# ## Only the forward pass in autocast
#
# What happens if `backward` runs in the autocast block too? We record each op with the dtypes of its inputs:


# %%
class OpLog(TorchDispatchMode):
    """Records every op in a block, with the dtypes of its inputs."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [names.get(a.dtype) for a in args if isinstance(a, torch.Tensor)]
        self.ops.append((func._schema.name.removeprefix("aten::"), dtypes))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(op == name for op, _ in self.ops)

    def matmuls(self):
        return [dtypes[0] for op, dtypes in self.ops if op in ("mm", "addmm")]


# %% [markdown]
# Our model has two linear layers. The second is an *fp32 island*: it runs in an `autocast(enabled=False)`
# region. If autocast is on during the backward pass, will the island's ops stay in fp32?


# %%
def island_gradient(inside, width=32, log=None):
    """The gradient of the island's weight; `inside`: backward runs with autocast on."""
    torch.manual_seed(0)
    first, island = nn.Linear(width, width), nn.Linear(width, width)
    x = torch.randn(2 * width, width)
    with torch.autocast("cpu", dtype=bf16):
        hidden = first(x)
        with torch.autocast("cpu", enabled=False):
            loss = island(hidden.float()).square().mean()
    with torch.autocast("cpu", dtype=bf16, enabled=inside), log or nullcontext():
        loss.backward()
    return island.weight.grad


# %%
after, within = OpLog(), OpLog()
exact, blurred = island_gradient(False, log=after), island_gradient(True, log=within)
for what, log in {"after the block": after, "inside the block": within}.items():
    print(f"backward {what}: matmuls {' '.join(log.matmuls())}, casts {log.count('_to_copy')}")
error = ((blurred - exact).norm() / exact.norm()).item()
print(f"inside the block, the island's gradient is off by {error:.0e}")
assert after.matmuls() == ["fp32", "fp32", "bf16"]
assert set(within.matmuls()) == {"bf16"}
assert after.count("_to_copy") < within.count("_to_copy")
assert 2**-12 < error < 2**-7  # roundings of bf16
assert exact.dtype is blurred.dtype is fp32

# %% [markdown]
# - **After the autocast block**, the two matmuls of the fp32 layer run in fp32, as they should. The third matmul
#   belongs to the first layer.
# - **Inside the autocast block**, the matmuls of the fp32 layer run in bf16. The gradient of its weight is less exact.
#   This gradient is still an fp32 tensor, so its dtype does not show the mistake.
#
# ## Profile before and after
#
# We choose a 16-bit dtype for your device: <!-- tests/core/test_device.py -->

# %% tags=["nbval-ignore-output"]
report = describe_device(device)
low = fp16 if report.recommended == "fp16" else bf16
print(f"{device}, {scale} scale, low precision: {names[low]}")
assert low is bf16 or report.speedup("fp16") >= 1.25  # what `amp-lab doctor` calls faster

# %% [markdown]
# We profile the forward and backward pass of three convolutions in fp32 and in low precision. With
# `record_shapes=True`, the profiler's JSON file (the *trace*) contains the dtype of each input tensor of an op, except
# for tensors in a list.
# <!-- tests/notebooks/test_14_ten_practices.py -->

# %%
os.environ["KINETO_LOG_LEVEL"] = "99"  # hide the profiler's log messages


def profile_once(step):
    """The profile of a step, and the events of its trace."""
    step()  # warm-up: the first step makes and loads kernels
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        return found, json.loads(Path(folder, "trace.json").read_text())["traceEvents"]


# %% [markdown]
# We count the casts in the trace. We also count the ops, grouped by the dtype of their first input.
# <!-- tests/notebooks/test_14_ten_practices.py -->

# %%
SHORT = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}


def count_ops(events):
    """How often each op, or "cast", ran with a first input of each dtype."""
    ops = Counter()
    for event in events:
        kinds = [SHORT.get(kind) for kind in event.get("args", {}).get("Input type", [])]
        if kinds:
            ops[event["name"].removeprefix("aten::"), kinds[0]] += 1
        if event["name"] == "aten::copy_" and None not in kinds[:2] and kinds[0] != kinds[1]:
            ops["cast", kinds[0]] += 1
    return ops


# %% [markdown]
# Now we profile the step in both precisions. Will the backward pass run in low precision too?


# %% tags=["nbval-ignore-output"]
def convolutional_step(dtype):
    """A training step of three convolutions in a dtype; fp32 runs without autocast."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(16, 64, 32, 32, device=device)

    def step():
        model.zero_grad()
        with Precision(names[dtype]).float32_mode(device.type):
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not fp32):
                loss = model(x).square().mean()
            loss.backward()

    return step


profiles = {names[dtype]: profile_once(convolutional_step(dtype)) for dtype in (fp32, low)}
for precision, (_, events) in profiles.items():
    used = {op: p for op, p in count_ops(events) if op.startswith("convolution") and p}
    print(f"{precision}:", ", ".join(f"{op} in {dtype}" for op, dtype in used.items()))
    assert used == {"convolution": precision, "convolution_backward": precision}

# %% [markdown]
# The forward and the backward pass ran in the same dtype, although the autocast block ended before `backward`. Next we
# list the four most expensive ops and count the casts:

# %% tags=["nbval-ignore-output"]
self_time = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
for precision, (found, events) in profiles.items():
    averages = [e for e in found.key_averages() if e.key.startswith("aten::")]
    own = {e.key.removeprefix("aten::"): getattr(e, self_time) / 1e3 for e in averages}  # ms
    casts = sum(count for (op, _), count in count_ops(events).items() if op == "cast")
    print(f"{precision}: {sum(own.values()):.1f} ms, {casts} casts")
    for op in sorted(own, key=own.get, reverse=True)[:4]:
        print(f"    {op:<30}{own[op]:8.2f} ms")
    assert (casts == 0) == (precision == "fp32")

# %% [markdown]
# Autocast adds the casts. Compare profiles without and with AMP to see where AMP saves time.
#
# ## Summary
#
# - Eight of the ten practices are right. Use the scaler for fp16. You rarely need to change its settings.
# - End the autocast block before `backward`.
# - A trace with `record_shapes=True` shows dtypes and casts.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
from course.exercises import checks_of

exercises = checks_of("14_ten_practices")

# %% [markdown]
# ### 1. How many steps are lost?
#
# A training run starts with the default scale of 65536. Its gradients overflow at every scale above
# 3000. How many steps does the scaler skip at the start?

# %%
lost_steps = ...
exercises.check_lost_steps(lost_steps)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each lost step halves the scale. Write down the scales until you reach one that is small enough.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# lost_steps = 5
# ```
#
# 65536, 32768, 16384, 8192 and 4096 are too large. 2048 is small enough.
#
# </details>
#
# ### 2. Count the casts
#
# Under autocast to fp16, an fp32 input goes through three linear layers with bias. A ReLU follows each of
# the first two layers. The code contains no explicit casts. How many casts does the forward pass have?

# %%
casts_in_forward = ...
exercises.check_casts(casts_in_forward)

# %% [markdown]
# <details><summary>Hint</summary>
#
# With two layers there are 5 casts: two weights, two biases and the input.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# casts_in_forward = 3 + 3 + 1  # weights, biases and the input
# ```
#
# Autocast casts only the first layer's input, because the other two inputs are already fp16.
#
# </details>
#
# ### 3. Mend this step
#
# This step violates three of the practices. Rewrite the step so that it is right in fp16, bf16 and fp32.
# For bf16 and fp32, `scaler` is disabled.
#
# ```python
# def mended_step(model, x, y, optimizer, scaler, dtype):
#     optimizer.zero_grad()
#     with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
#         loss = nn.functional.mse_loss(model(x.half()), y)
#         loss.backward()
#         optimizer.step()
# ```


# %%
def mended_step(model, x, y, optimizer, scaler, dtype):
    return ...  # zero_grad, forward pass, backward, step, update


exercises.check_mended_step(mended_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which calls belong inside the autocast block? Which dtype should the input have? Which call divides the gradients
# by the scale?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def mended_step(model, x, y, optimizer, scaler, dtype):
#     optimizer.zero_grad()
#     with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
#         loss = nn.functional.mse_loss(model(x), y)
#     scaler.scale(loss).backward()
#     scaler.step(optimizer)
#     scaler.update()
# ```
#
# </details>
#
# ### 4. Compare two speed-ups
#
# You have measured two speed-ups, each with an interval `(low, high)`. Complete `verdict`. It returns
# "more" if the second speed-up is higher than the first, "less" if it is lower, and otherwise "cannot tell".


# %%
def verdict(first, second):
    return ...


exercises.check_verdict(verdict)

# %% [markdown]
# <details><summary>Hint</summary>
#
# If the two intervals overlap, the two speed-ups may be equal.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def verdict(first, second):
#     if second[0] > first[1]:
#         return "more"
#     if second[1] < first[0]:
#         return "less"
#     return "cannot tell"
# ```
#
# </details>
#
# ## Further reading
#
# - PyTorch, [Automatic Mixed Precision
#   recipe](https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html).
# - PyTorch, [Performance tuning
#   guide](https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
# - PyTorch, [`torch.profiler`](https://docs.pytorch.org/docs/stable/profiler.html).
