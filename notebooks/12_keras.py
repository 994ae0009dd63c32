# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train with dtype policies in Keras, on PyTorch and on TensorFlow
#
# **What you'll do.** Train MobileNetV2 with Keras 3 in float32, bfloat16 and float16, on the torch
# and on the TensorFlow backend. Write a training step with a loss scale by hand for both, and compare
# it with plain `torch.amp`.
#
# **What you'll learn.**
# - which two dtypes a policy names, and how to set it for everything or for one layer;
# - how a policy differs from autocast, and why the last layer should stay in float32;
# - when `compile` adds a loss scale by itself, and when it does not although you need one;
# - what goes wrong in a `train_step` of your own;
# - how to save the loss scale, and what the names of TensorFlow 2.x have become.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast, and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. Keras and TensorFlow come with `pdm run lab`.
# TensorFlow runs on the CPU. Without it, as on Python 3.14, only torch runs. <!-- tests/course/test_processes.py -->

# %% [markdown]
# An environment variable can name Keras's backend. It has to be set [before Keras is
# imported](https://keras.io/getting_started/#configuring-your-backend). Here it is torch. To use
# both, we start a process for each.

# %% tags=["nbval-ignore-output"]
import itertools
import os
import random
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

from course import figures, start
from course.processes import run_on_backends

from amp_lab import load_dataset

device, scale = start("keras")  # AMP_LAB_DEVICE, AMP_LAB_SCALE override the choice
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ["KERAS_TORCH_DEVICE"] = str(device)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # hide TensorFlow's log messages
torch.backends.cudnn.allow_tf32 = False  # keep float32 exact, without TF32
figures.use_style()

# %% [markdown]
# Now we can import Keras:

# %%
import keras
from keras import layers, ops

assert keras.backend.backend() == os.environ["KERAS_BACKEND"]


def dtype_of(x):
    """The dtype of a tensor of any backend, by its name in Keras."""
    return keras.backend.standardize_dtype(x.dtype)


# %% [markdown]
# ## The idea in five lines
#
# Guess before you run this: a layer gets the policy `mixed_float16`. Which dtype will its weights
# have, and which its output?

# %%
dense = layers.Dense(3, dtype="mixed_float16")
result = dense(ops.ones((2, 4)))
print(f"weights {dense.kernel.dtype}, output {dtype_of(result)}")
assert (dense.kernel.dtype, dtype_of(result)) == ("float32", "float16")

# %% [markdown]
# It computes in float16 and keeps its weights in float32. Autocast is a
# block or a decorator ([notebook 02](02_autocast_dtypes.ipynb)). In Keras, the layer itself knows its dtypes.
#
# ## A policy names two dtypes
#
# A `DTypePolicy` says in which dtype a layer computes, and in which it keeps its variables, such as
# the weights. They differ only in the mixed policies:

# %%
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
for name in POLICIES:
    policy = keras.DTypePolicy(name)
    print(f"{name:<16} computes in {policy.compute_dtype:<10} keeps {policy.variable_dtype}")
    assert (policy.variable_dtype == "float32") == (name == "float32" or name.startswith("mixed"))

# %% [markdown]
# So the weights of a mixed policy are master weights: the optimizer updates float32 numbers. The
# last two policies keep no float32 weights, so they lose small updates, as [notebook
# 01](01_number_formats.ipynb) shows.
#
# `set_dtype_policy` sets the policy of the layers that you make after it; `dtype=` sets it for one:

# %%
x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).numpy()
keras.config.set_dtype_policy("mixed_bfloat16")
layer, exact = layers.Dense(3), layers.Dense(3, dtype="float32")
for each in (layer, exact):
    y = each(x)
    print(f"{each.dtype_policy.name:<16} weights {each.kernel.dtype}, output {dtype_of(y)}")
assert dtype_of(layer(x)) == layer.compute_dtype == "bfloat16"
assert layer.kernel.dtype == layer.dtype == layer.variable_dtype == "float32"

# %% [markdown]
# `layer.dtype` is the dtype of the variables, not of the output. A layer keeps the policy that it
# was made with:

# %%
keras.config.set_dtype_policy("mixed_float16")
assert layer.dtype_policy.name == "mixed_bfloat16"
assert layers.Dense(3).compute_dtype == "float16"

# %% [markdown]
# ## Layers, not ops
#
# Autocast decides for each op: [on CUDA](https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior)
# it runs a matrix product in float16 and a sum in float32. A policy decides for a whole layer, with
# the ops in its `call`. Some of Keras's own layers know what needs more range: batch normalisation
# takes the squares, too large for float16, in float32.

# %%
far = 1000 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).numpy()
normal = layers.BatchNormalization()(far, training=True)
print(f"batch normalisation: {dtype_of(normal)}, all finite: {bool(ops.all(ops.isfinite(normal)))}")
assert dtype_of(normal) == "float16"
assert ops.all(ops.isfinite(normal))

# %% [markdown]
# A layer of your own has no such care: this one overflows unless you give it float32:


# %%
class Energy(layers.Layer):
    """Inputs (B, N) to the sum of their squares (B)."""

    def call(self, x):
        return ops.sum(ops.square(x), axis=-1)


for energy in (Energy(), Energy(dtype="float32")):
    values = ops.cast(energy(far)[:2], "float32")
    print(f"{energy.dtype_policy.name:<14}", *(f"{float(value):.1e}" for value in values))
assert ops.all(ops.isinf(Energy()(far)))
assert ops.all(ops.isfinite(Energy(dtype="float32")(far)))

# %% [markdown]
# In float16 the sums are infinite, in float32 in the millions. Autocast for CUDA would
# have computed both ops in float32 ([notebook 02](02_autocast_dtypes.ipynb) has its table).
#
# ## Keep the last layer in float32
#
# On torch, a sigmoid under `mixed_float16` gives the loss a probability in float16, whose numbers just
# below 1 are 2⁻¹¹ apart, so 0.9998 becomes 1. Take a logit of 8.5 for a yes or no, once right and once
# wrong:

# %%
from_probability = keras.losses.BinaryCrossentropy()
from_logit = keras.losses.BinaryCrossentropy(from_logits=True)
logit = torch.tensor([[8.5]]).numpy()
exact = {
    "right": F.softplus(torch.tensor(-8.5)).item(),
    "wrong": F.softplus(torch.tensor(8.5)).item(),
}
losses = {}
for case, target in (("right", 1.0), ("wrong", 0.0)):
    target = ops.convert_to_tensor([[target]])
    losses[case] = {
        "sigmoid in float16": from_probability(target, layers.Activation("sigmoid")(logit)),
        "sigmoid in float32": from_probability(target, ops.sigmoid(logit)),
        "logit in float32": from_logit(target, logit),
    }
    shown = {name: f"{float(loss):.1e}" for name, loss in losses[case].items()}
    print(f"{case}: {shown}, exactly {exact[case]:.1e}")

# %% [markdown]
# In float16 the loss of the right answer is over a thousand times too small, that of the wrong one
# nearly doubled. Safe is a last layer without activation, in float32, and `from_logits=True`:

# %%
for case, found in losses.items():
    assert abs(float(found["logit in float32"]) / exact[case] - 1) < 1e-3
    assert abs(float(found["sigmoid in float32"]) / exact[case] - 1) < 1e-2
assert float(losses["right"]["sigmoid in float16"]) < exact["right"] / 1000
assert float(losses["wrong"]["sigmoid in float16"]) > 1.8 * exact["wrong"]
assert torch.tensor([0.9998, 1 - 2**-11, 1 - 2**-12]).half().tolist() == [1, 1 - 2**-11, 1]

# %% [markdown]
# ## What compile adds
#
# float16 usually needs a loss scale, so `compile` wraps the optimizer in a `LossScaleOptimizer` if the
# *model's* policy is `mixed_float16`. `bfloat16` has the range of float32 and needs none.


# %%
def new_head(policy=None):
    """Inputs (B, 8) to logits (B, 10), the last layer in float32."""
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, dtype=policy), layers.Dense(10, dtype="float32")]
    )


def optimizer_of(model, **options):
    model.compile(optimizer="adam", loss="mse", **options)
    return type(model.optimizer).__name__


found = {}
for name in POLICIES[:3]:
    keras.config.set_dtype_policy(name)
    found[name] = optimizer_of(new_head())
print(found)
assert [name for name, kind in found.items() if kind != "Adam"] == ["mixed_float16"]

# %% [markdown]
# You can train without a loss scale on purpose, with `auto_scale_loss=False`. It also happens by
# accident: you give the policy to the layers, and the model itself has the global one.

# %%
print("asked for:", optimizer_of(new_head(), auto_scale_loss=False))
keras.config.set_dtype_policy("float32")
by_layer = new_head("mixed_float16")
print("by accident:", optimizer_of(by_layer), "with the policy", by_layer.dtype_policy.name)
assert by_layer.layers[0].compute_dtype == "float16"
assert optimizer_of(by_layer) == optimizer_of(new_head(), auto_scale_loss=False) == "Adam"

# %% [markdown]
# The cure is to wrap the optimizer yourself. `compile` then leaves it as it is:

# %%
Scaled = keras.optimizers.LossScaleOptimizer
by_layer.compile(optimizer=Scaled(keras.optimizers.Adam(1e-3)), loss="mse")
assert type(by_layer.optimizer) is Scaled
print(f"starts at {by_layer.optimizer.initial_scale:g}, doubles after", end=" ")
print(f"{by_layer.optimizer.dynamic_growth_steps} steps; torch starts at 2**16")
assert by_layer.optimizer.initial_scale == 2**15
assert torch.amp.GradScaler("cpu").get_growth_interval() == by_layer.optimizer.dynamic_growth_steps

# %% [markdown]
# Clipping belongs to the inner optimizer, whose gradients are already divided by the scale. So you
# need no `unscale_`. Here the gradient (3, 4) is clipped to length 1:

# %%
clipping = Scaled(keras.optimizers.SGD(1.0, clipnorm=1.0), initial_scale=1024)
weight = keras.Variable([0.0, 0.0], dtype="float32")
clipping.apply([ops.multiply(clipping.initial_scale, [3.0, 4.0])], [weight])
assert abs(float(ops.norm(ops.convert_to_numpy(weight.value))) - 1) < 1e-6  # not 5, nor 5120
print("after a step:", [round(float(w), 3) for w in ops.convert_to_numpy(weight.value)])

# %% [markdown]
# ## Fit
#
# Now we train MobileNetV2 on handwritten digits enlarged to 32x32 pixels, with the channels last. The
# quick scale uses about a third of the channels and the first six blocks.

# %%
config = {
    "quick": {"alpha": 0.35, "last": "block_5_add", "images": 256, "batch": 32, "epochs": 5},
    "full": {"alpha": 1.0, "last": "out_relu", "images": 1438, "batch": 32, "epochs": 10},
}[scale]
digits = load_dataset("digits", image_size=32, augment=False)
images, labels = digits.train.batch(range(config["images"]))
images = images.permute(0, 2, 3, 1).contiguous()  # (N, 32, 32, 3)
print(tuple(images.shape), images.dtype)
assert images.shape[1:] == (32, 32, 3)


# %% [markdown]
# We replace the network's own last layer by one in float32, as we have just learned:


# %%
def new_mobilenet(alpha, last):
    """MobileNetV2 up to a layer: images (B, 32, 32, 3) to logits (B, 10), which are float32."""
    body = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=alpha, weights=None, include_top=False
    )
    pooled = layers.GlobalAveragePooling2D()(body.get_layer(last).output)
    return keras.Model(body.input, layers.Dense(10, dtype="float32")(pooled))


def get_weights(model):
    """Copies of all weights as tensors, in Keras's order."""
    return [torch.tensor(weight) for weight in model.get_weights()]


random.seed(0)  # Keras draws the seeds of its initialisers from here
model = new_mobilenet(config["alpha"], config["last"])
weights = get_weights(model)
print(f"{model.count_params():,} numbers in {len(weights)} weights")
assert all(weight.dtype is torch.float32 for weight in weights)

# %% [markdown]
# Both backends run this function. It calls `fit` in three policies, from the same weights, over the
# same images in the same order, and returns the loss and the time of every epoch.


# %%
def fit_in(policies, weights, images, labels, config):
    """{policy: {"loss", "accuracy", "seconds", "steps", "optimizer"}} of this backend."""
    found = {}
    for policy in policies:
        keras.config.set_dtype_policy(policy)
        model = new_mobilenet(config["alpha"], config["last"])
        model.set_weights([weight.numpy() for weight in weights])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
        clock = [time.perf_counter()]
        stamp = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, clock=clock: clock.append(time.perf_counter())
        )
        data = images.numpy(), labels.numpy(), config["batch"], config["epochs"]
        history = model.fit(*data, shuffle=False, verbose=0, callbacks=[stamp]).history
        seconds = [after - before for before, after in itertools.pairwise(clock)]
        found[policy] = {**history, "seconds": seconds, "steps": int(model.optimizer.iterations)}
        found[policy]["optimizer"] = type(model.optimizer).__name__
    return found


# %% [markdown]
# `run_on_backends` starts a process for each backend, gives it the source of these functions, and
# brings back what `fit_in` returns: <!-- tests/course/test_processes.py -->

# %% tags=["nbval-ignore-output"]
fitted = run_on_backends(
    fit_in,
    new_mobilenet,
    device=device,
    timeout_s=3600,
    policies=POLICIES[:3],
    weights=weights,
    images=images,
    labels=labels,
    config=config,
)
for backend, policies in fitted.items():
    print(backend, {name: found["optimizer"] for name, found in policies.items()})
assert all(
    (found["optimizer"] == "LossScaleOptimizer") == (name == "mixed_float16")
    for policies in fitted.values()
    for name, found in policies.items()
)

# %% [markdown]
# The picture shows the loss over the epochs, with a panel for each backend. In both, the three
# lines fall nearly alike.

# %% tags=["nbval-ignore-output"]
SHORT = {"float32": "fp32", "mixed_bfloat16": "bf16", "mixed_float16": "fp16"}
_ = figures.loss_by_backend(
    {
        backend: {SHORT[name]: found["loss"] for name, found in policies.items()}
        for backend, policies in fitted.items()
    }
)

# %% [markdown]
# Each loss falls at least 85% as far as in float32. float16 may skip steps for which the loss scale
# is too high:

# %% tags=["nbval-ignore-output"]
for backend, policies in fitted.items():
    full = policies["float32"]
    for name, found in policies.items():
        fall = (found["loss"][0] - found["loss"][-1]) / (full["loss"][0] - full["loss"][-1])
        print(f"{backend:<11}{name:<15} {found['steps']} of {full['steps']} steps, ", end="")
        print(f"{fall:.0%} of float32's fall, accuracy in training {found['accuracy'][-1]:.0%}")
        assert 0.85 < fall < 1.15
        assert found["accuracy"][-1] > 0.8
        assert found["steps"] == full["steps"] or name == "mixed_float16"
        assert found["steps"] > 0.8 * full["steps"]

# %% [markdown]
# How long does an epoch take? We leave out the first one, in which TensorFlow [traces the step into
# a graph](https://www.tensorflow.org/guide/function). Compare within a backend, not across: on a
# CPU the two processes run side by side and share the cores.

# %% tags=["nbval-ignore-output"]
for backend, policies in fitted.items():
    usual = statistics.median(policies["float32"]["seconds"][1:])
    for name, found in policies.items():
        epoch = statistics.median(found["seconds"][1:])
        print(
            f"{backend:<11}{name:<15} {epoch:6.2f} s an epoch, {usual / epoch:.2f}x as fast as float32"
        )
        assert len(found["seconds"]) == config["epochs"]

# %% [markdown]
# In so small a network bfloat16 took longer than float32 on this CPU, on both backends, and float16
# longer still. [Notebook 05](05_cifar10_mobilenet.ipynb) shows which layers of MobileNetV2 lose.
#
# ## Write the step
#
# In a step of your own, you multiply the loss by the scale, take the gradients of *that*, and hand
# them to `apply`. It skips the step if it finds inf or NaN; otherwise it divides by the scale and
# steps. In torch, this looks as follows:


# %%
def step_with_torch(self, data):
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    self.zero_grad()
    loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    self.optimizer.scale_loss(loss).backward()  # AMP: was loss.backward()
    weights = self.trainable_weights
    with torch.no_grad():
        self.optimizer.apply([weight.value.grad for weight in weights], weights)
    return {"loss": loss}


# %% [markdown]
# In TensorFlow, scale the loss while the tape still records:


# %%
def step_with_tensorflow(self, data):
    import tensorflow as tf

    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        scaled = self.optimizer.scale_loss(loss)  # AMP
    gradients = tape.gradient(scaled, self.trainable_weights)  # AMP: was tape.gradient(loss, …
    self.optimizer.apply(gradients, self.trainable_weights)
    return {"loss": loss}


# %% [markdown]
# Both steps work in all three precisions: without a `LossScaleOptimizer`, `scale_loss` returns the loss
# as it is. This small network uses them:
# <!-- tests/notebooks/test_12_keras.py -->


# %%
def new_net():
    """Digits (B, 8, 8, 1) to logits (B, 10), which are float32."""
    on_torch = keras.backend.backend() == "torch"

    class Net(keras.Sequential):
        train_step = step_with_torch if on_torch else step_with_tensorflow

    return Net(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10, dtype="float32"),
        ]
    )


# %% [markdown]
# It needs an optimizer. We will start the scale far too high, so that you see something, and let it
# double after five good steps.


# %%
def new_optimizer(policy, scale, growth):
    """SGD, for float16 with a loss scale."""
    optimizer = keras.optimizers.SGD(0.1)
    if policy == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer, scale, dynamic_growth_steps=growth)
    return optimizer


# %% [markdown]
# This function trains it, again on both backends:


# %%
def train_net(policies, weights, x, y, steps, scale, growth):
    """{policy: outputs before, loss of each step, scale after it, steps counted}."""
    torch.backends.cudnn.allow_tf32 = False
    found = {}
    for policy in policies:
        keras.config.set_dtype_policy(policy)
        net, optimizer = new_net(), new_optimizer(policy, scale, growth)
        net.set_weights([weight.numpy() for weight in weights])
        net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        found[policy] = record = {"losses": [], "scales": [], "counts": [], "weights": []}
        record["outputs"] = torch.tensor(net.predict_on_batch(x.numpy()))
        for _ in range(steps):
            record["losses"].append(float(net.train_on_batch(x.numpy(), y.numpy())))
            record["scales"].append(float(getattr(optimizer, "dynamic_scale", 1.0)))
            record["counts"].append(int(optimizer.iterations))
            record["weights"].append(torch.tensor(net.layers[0].get_weights()[0]))
    return found


# %% [markdown]
# Run it:

# %% tags=["nbval-ignore-output"]
small = load_dataset("digits", image_size=8, augment=False)
x, y = small.train.batch(range(64))
x = x[:, :1].permute(0, 2, 3, 1).contiguous()  # (64, 8, 8, 1)
keras.config.set_dtype_policy("float32")
random.seed(0)
start_weights = get_weights(new_net())
given = {"x": x, "y": y, "steps": 20, "scale": 2.0**24, "growth": 5}
steps_of_both = step_with_torch, step_with_tensorflow
functions = train_net, new_net, new_optimizer, *steps_of_both
given |= {"policies": POLICIES[:3], "weights": start_weights}
trained = run_on_backends(*functions, device=device, **given)
for backend, policies in trained.items():
    scales = [f"2^{torch.tensor(s).log2():.0f}" for s in policies["mixed_float16"]["scales"]]
    print(backend, "scale after each step:", *scales)
    assert policies["mixed_float16"]["scales"][-1] < given["scale"]

# %% [markdown]
# Every halving is a skipped step: the weights stay as they were, and `iterations` does not count
# it. A learning-rate schedule [reads
# `iterations`](https://github.com/keras-team/keras/blob/master/keras/src/optimizers/base_optimizer.py),
# so it waits too. In the picture, the scale goes down in stairs from 2^24 to 2^16, where it fits, and
# doubles after every five good steps. A cross marks each of the eight skipped steps.

# %% tags=["nbval-ignore-output"]
for backend, policies in trained.items():
    record = policies["mixed_float16"]
    scales = [given["scale"], *record["scales"]]
    counts = [0, *record["counts"]]
    kernels = [start_weights[0], *record["weights"]]
    skipped = [i for i in range(given["steps"]) if scales[i + 1] < scales[i]]
    print(f"{backend}: {len(skipped)} of {given['steps']} steps skipped: {skipped}")
    for i in range(given["steps"]):
        assert counts[i + 1] - counts[i] == (i not in skipped)
        assert torch.equal(kernels[i], kernels[i + 1]) == (i in skipped)
    assert 0 < len(skipped) < given["steps"] / 2
    assert scales[-1] > min(scales)  # and it has doubled again
ax = figures.scale_over_time(scales[:-1], skipped)
ax.set_title(backend)
ax.set_xticks(range(0, given["steps"], 2))
_ = ax.legend(loc="upper right")

# %% [markdown]
# ## The same in plain torch AMP
#
# Is that the AMP of the other notebooks? We build a twin of the network in torch, with the weights
# of the Keras model. Keras keeps convolution kernels as (H, W, in, out), matrices as (in, out), and
# flattens with the channels last.


# %%
class Twin(nn.Module):
    """The same network: digits (B, 8, 8, 1) to logits (B, 10)."""

    def __init__(self, weights):
        super().__init__()
        kernel, bias, gamma, beta, _, _, matrix, head_bias = weights
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(512, 10)
        new = [kernel.permute(3, 2, 0, 1), bias, gamma, beta, matrix.T, head_bias]
        for parameter, value in zip(self.parameters(), new, strict=True):
            parameter.data.copy_(value)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x.permute(0, 3, 1, 2))))
        x = x.permute(0, 2, 3, 1).flatten(1)
        with torch.autocast(x.device.type, enabled=False):  # the layer with dtype="float32"
            return self.head(x.float())


# %% [markdown]
# It trains with the loop of [notebook 04](04_fp32_vs_amp.ipynb). Its scaler is set as above:


# %%
def train_twin(dtype, device, weights, x, y, steps, scale, growth, **_):
    x, y = x.to(device), y.to(device)
    twin = Twin(weights).to(device)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    fp16 = dtype is torch.float16
    scaler = torch.amp.GradScaler(device.type, scale, growth_interval=growth, enabled=fp16)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)
    with torch.inference_mode(), autocast:
        record = {"outputs": twin.eval()(x).cpu(), "losses": [], "scales": []}
    twin.train()
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast:
            loss = F.cross_entropy(twin(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record["losses"].append(loss.item())
        record["scales"].append(scaler.get_scale())
    return record


# %% [markdown]
# How close should they be? In float32 each backend may add in its own order, and after twenty steps we
# allow a difference in eight of the 24 bits. In bfloat16 and float16 a library may round before or
# after it adds the bias, so we allow one rounding, 2⁻⁸ and 2⁻¹¹. We compare each run with a twin on
# its own device, up to the first step that only one of them skips. On this CPU there is none.

# %%
DTYPES = {
    "float32": torch.float32,
    "mixed_bfloat16": torch.bfloat16,
    "mixed_float16": torch.float16,
}
LIMITS = {"float32": 2.0**-16, "mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}


def distance(found, reference):
    """Largest difference, relative to the largest value."""
    found, reference = torch.as_tensor(found).double(), torch.as_tensor(reference).double()
    return ((found - reference).abs().max() / reference.abs().max()).item()


def steps_alike(found, reference):
    """The number of steps before the first that only one of the two skips; all if there is none."""
    same = [a == b for a, b in zip(found["scales"], reference["scales"], strict=True)]
    return [*same, False].index(False)


# %% [markdown]
# Now we compare each run with its twin:

# %% tags=["nbval-ignore-output"]
places = {"torch": device, "tensorflow": torch.device("cpu")}  # where each of them ran
for policy, dtype in DTYPES.items():
    for backend, policies in trained.items():
        twin = train_twin(dtype, places[backend], **given)
        found, n = policies[policy], steps_alike(policies[policy], twin)
        off = {
            "outputs": distance(found["outputs"], twin["outputs"]),
            "losses": distance(found["losses"][:n], twin["losses"][:n]),
        }
        print(f"{policy:<15}{backend:<11}", end="within ")
        print(f"2^{torch.tensor(LIMITS[policy]).log2():.0f}: outputs, losses of {n} steps")
        assert max(off.values()) < LIMITS[policy], off
        assert n == given["steps"] or (policy == "mixed_float16" and device.type != "cpu" and n > 6)

# %% [markdown]
# Within these limits, outputs and losses are those of `torch.autocast` and `torch.amp.GradScaler`.
# On this CPU, so is every loss scale.
#
# ## A mistake in a step of your own
#
# Today `apply` divides. If you still divide by hand, as you did in TensorFlow 2.x, or if you forget
# `scale_loss`, then `apply` gets gradients that are not scaled, and nothing complains:

# %%
gradient = ops.convert_to_tensor([0.5])
for kind, rate in ((keras.optimizers.SGD, 1.0), (keras.optimizers.Adam, 0.1)):
    moved = {}
    for name, factor in (("scaled", 2.0**15), ("not scaled", 1.0)):
        weight = keras.Variable([1.0], dtype="float32")
        Scaled(kind(rate)).apply([gradient * factor], [weight])
        moved[name] = 1.0 - float(ops.convert_to_numpy(weight.value)[0])
    print(kind.__name__, {name: f"moves by {by:.1g}" for name, by in moved.items()})
    ratio = moved["scaled"] / moved["not scaled"]
    assert abs(ratio / 2.0**15 - 1) < 0.01 if kind is keras.optimizers.SGD else 1 < ratio < 2

# %% [markdown]
# With SGD each step is 2¹⁵ times too short. Adam divides by the size of the gradient, so it hides
# the mistake: it moves by 0.08 instead of 0.1.
#
# ## Save and resume (optional)
#
# The scale is state, like the moments of Adam, and `model.save` keeps both. We take three steps,
# save, and take three more; then we load the file and repeat the last three.


# %%
def resume(weights, x, y):
    """Losses after the save; those again from the file; scale and steps, saved and loaded."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = x.numpy(), y.numpy()
    net = keras.Sequential(new_net().layers)
    net.set_weights([weight.numpy() for weight in weights])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**18)
    net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for _ in range(3):
        net.train_on_batch(x, y)
    saved = float(optimizer.dynamic_scale), int(optimizer.iterations)
    with tempfile.TemporaryDirectory() as folder:
        net.save(f"{folder}/net.keras")
        loaded_net = keras.saving.load_model(f"{folder}/net.keras")
    loaded = float(loaded_net.optimizer.dynamic_scale), int(loaded_net.optimizer.iterations)
    losses = [[float(n.train_on_batch(x, y)) for _ in range(3)] for n in (net, loaded_net)]
    return *losses, saved, loaded


# %% [markdown]
# On this CPU two steps are skipped, which lowers the scale to 65536, and the losses come out the same
# to the last bit:

# %% tags=["nbval-ignore-output"]
resumed = run_on_backends(
    resume, new_net, *steps_of_both, device=device, weights=start_weights, x=x, y=y
)
for backend, (went_on, resumed_losses, saved, loaded) in resumed.items():
    print(f"{backend}: saved and loaded at scale {saved[0]:.0f} after {saved[1]} of 3 steps")
    assert loaded == saved
    assert 0 < saved[1] < 3  # a step was skipped, and Adam has moments
    if device.type == "cpu":
        assert resumed_losses == went_on
    assert distance(resumed_losses, went_on) < 2.0**-9

# %% [markdown]
# ## The names of TensorFlow 2.x (optional)
#
# | TensorFlow 2.x | Keras 3 |
# |---|---|
# | `tf.keras.mixed_precision.experimental.set_policy(…)` | `keras.config.set_dtype_policy(…)` |
# | `tf.keras.mixed_precision.set_global_policy(…)` | the same; this name is kept |
# | `tf.keras.mixed_precision.Policy` | `keras.DTypePolicy`; this name is kept |
# | `Policy(…, loss_scale="dynamic")` | a policy has no scale: it is the optimizer's |
# | `LossScaleOptimizer(optimizer, loss_scale="dynamic")` | `LossScaleOptimizer(optimizer)` |
# | `LossScaleOptimizer(optimizer, dynamic=False, initial_scale=128)` | [`optimizer.loss_scale_factor = 128`](https://keras.io/api/optimizers/adam/), and [`compile(…, auto_scale_loss=False)`](https://keras.io/api/models/model_training_apis/) |
# | `optimizer.get_scaled_loss(loss)` | `optimizer.scale_loss(loss)` |
# | `optimizer.get_unscaled_gradients(g)`, then `apply_gradients(zip(g, w))` | `optimizer.apply(g, w)`, which divides |
# | `optimizer.loss_scale` | `optimizer.dynamic_scale`, once it is built |
# | `tf.train.experimental.enable_mixed_precision_graph_rewrite(optimizer)` | [set a policy](https://www.tensorflow.org/versions/r2.5/api_docs/python/tf/train/experimental/enable_mixed_precision_graph_rewrite) |
#
# We can check some of these rows ([the names of 2.x](https://www.tensorflow.org/versions/r2.5/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer)):

# %%
assert keras.mixed_precision.set_global_policy is keras.config.set_dtype_policy
assert keras.mixed_precision.Policy is keras.DTypePolicy
assert not hasattr(keras.mixed_precision, "experimental")
for gone in ("get_scaled_loss", "get_unscaled_gradients", "loss_scale"):
    assert not hasattr(Scaled, gone)
for wrong in ({"dynamic": False}, {"loss_scale": "dynamic"}):
    try:
        Scaled(keras.optimizers.SGD(), **wrong)
    except ValueError as error:
        print(wrong, "->", str(error).partition(".")[0])
    else:
        raise AssertionError(wrong)

# %% [markdown]
# ## Summary
#
# - A policy names the dtypes in which layers compute and keep their weights. The mixed ones keep
#   float32. You set a policy for new layers, or for one.
# - It holds for whole layers, while autocast decides for each op. A layer of your own that sums or
#   squares may need `dtype="float32"`.
# - Keep the last layer in float32, without activation, and use a loss with `from_logits=True`.
# - `compile` adds a loss scale if the model's policy is `mixed_float16`. If only its layers have
#   that policy, wrap the optimizer yourself.
# - In a step of your own, `scale_loss` multiplies, and `apply` checks, divides and steps, or skips.
#   Do not divide by hand. Clipping belongs to the inner optimizer.
# - On this CPU, both backends skip the steps that plain torch AMP skips, with its losses up to rounding.
# - `model.save` keeps the scale, and on this CPU the resumed run repeated its losses to the bit.
#
# Next, [notebook 13](13_from_apex.ipynb) brings old Apex scripts to `torch.amp`.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("12_keras")

# %% [markdown]
# ### 1. What a policy keeps
#
# A layer has 1000 weights. How many bytes do they take under `mixed_float16`, and how many under `float16`?

# %%
sizes = ...  # two numbers in brackets
exercises.check_variable_bytes(sizes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The list of policies at the top shows what each one keeps. A float16 number has two bytes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# sizes = (4000, 2000)
# ```
#
# The mixed policy keeps its weights in float32. It saves memory in the activations.
#
# </details>
#
# ### 2. Divided once too often
#
# The scale is 1024 and the true gradient of a weight is 0.5. You unscale the gradient by hand, and
# then give it to `apply` of a `LossScaleOptimizer` around SGD with a learning rate of 1. How far
# does the weight move?

# %%
step_length = ...
exercises.check_step_length(step_length)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `apply` cannot know that you have already divided.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# step_length = 0.5 / 1024
# ```
#
# Give `apply` the gradients of the scaled loss as they are.
#
# </details>
#
# ### 3. A safe last layer
#
# Complete `last_layer`: a layer for ten classes that is safe whatever the global policy is, for a loss
# with `from_logits=True`.


# %%
def last_layer():
    return ...


exercises.check_last_layer(last_layer)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A layer's own `dtype=` overrides the global policy.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def last_layer():
#     return layers.Dense(10, dtype="float32")
# ```
#
# A softmax would return probabilities, and on torch the loss would apply a second softmax to them.
#
# </details>
#
# ### 4. Mend the missing loss scale
#
# Only the layers of this model have `mixed_float16`, so it trains without a loss scale. Change the
# line so that Adam gets one, and return the model.


# %%
def compile_scaled(model):
    model.compile(keras.optimizers.Adam(), loss="mse")
    return ...


exercises.check_compiled(compile_scaled)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `compile` looks at the policy of the model. It leaves an optimizer that you have wrapped as it is.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def compile_scaled(model):
#     inner = keras.optimizers.Adam()
#     model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
#     return model
# ```
#
# `auto_scale_loss=True`, the default, does not help, because it looks at the model's policy.
#
# </details>
#
# ## Further reading
#
# - Keras, [Mixed precision](https://keras.io/api/mixed_precision/): policies and `LossScaleOptimizer`.
# - Keras, [Writing a custom training loop in
#   PyTorch](https://keras.io/guides/custom_train_step_in_torch/) and [in
#   TensorFlow](https://keras.io/guides/custom_train_step_in_tensorflow/).
# - TensorFlow, [Mixed precision](https://www.tensorflow.org/guide/mixed_precision): the guide to the
#   names of 2.x.
# - P. Micikevicius et al., [Mixed precision training](https://arxiv.org/abs/1710.03740), 2018.
