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
# **What you'll do.** Set mixed precision in Keras 3 with a *dtype policy*. Write a training step with a loss scale
# for the torch and TensorFlow backends.
#
# **What you'll learn.**
# - which two dtypes a policy names, and how to set a policy globally or for one layer;
# - how a policy differs from autocast, and why the last layer should stay in float32;
# - when `compile` adds a loss scale, and when you have to add it yourself;
# - which mistake in a custom `train_step` raises no error;
# - which Keras 3 names replace those of TensorFlow 2.x.
#
# **What you need.** [Notebook 02](02_autocast_dtypes.ipynb) for autocast, and [notebook
# 03](03_grad_scaler_step_by_step.ipynb) for the scaler. TensorFlow is optional: `pdm run sync --with tensorflow`
# installs it (for Python 3.13 or earlier). <!-- tests/course/test_processes.py, tests/tools/test_sync.py -->

# %% [markdown]
# Select the Keras backend [before you import
# Keras](https://keras.io/getting_started/#configuring-your-backend). We use torch unless `KERAS_BACKEND` is set:

# %% tags=["nbval-ignore-output"]
import os

import torch
import torch.nn.functional as F

from course import start
from course.processes import run_on_backends

from amp_lab import load_dataset

device, scale = start("keras")  # AMP_LAB_DEVICE, AMP_LAB_SCALE override the choice
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ["KERAS_TORCH_DEVICE"] = str(device)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # hide TensorFlow's log messages
torch.backends.cudnn.allow_tf32 = False  # compute float32 convolutions in float32, not in TF32

# %% [markdown]
# Now we can import Keras:

# %%
import keras
from keras import layers, ops

assert keras.backend.backend() == os.environ["KERAS_BACKEND"]


def dtype_of(x):
    """The Keras name of a tensor's dtype, for any backend."""
    return keras.backend.standardize_dtype(x.dtype)


# %% [markdown]
# ## The idea in five lines
#
# We give a layer the policy `mixed_float16`. Before you run the cell: which dtypes will the weights and
# the output have?

# %%
dense = layers.Dense(3, dtype="mixed_float16")
result = dense(ops.ones((2, 4)))
print(f"weights {dense.kernel.dtype}, output {dtype_of(result)}")
assert (dense.kernel.dtype, dtype_of(result)) == ("float32", "float16")

# %% [markdown]
# The layer computes in float16 and keeps its weights in float32.
#
# ## A policy names two dtypes
#
# A `DTypePolicy` names the dtype in which a layer computes and the dtype of its variables, such as the weights:

# %%
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
for name in POLICIES:
    policy = keras.DTypePolicy(name)
    print(f"{name:<16} computes in {policy.compute_dtype:<10} weights in {policy.variable_dtype}")
    assert (policy.variable_dtype == "float32") == (name == "float32" or name.startswith("mixed"))

# %% [markdown]
# `bfloat16` and `float16` keep the weights in 16 bits, so small updates can be lost ([notebook
# 01](01_number_formats.ipynb)).
#
# `set_dtype_policy` sets the global policy: the default for layers that you create afterwards. `dtype=` sets the
# policy of one layer:

# %%
x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).numpy()
keras.config.set_dtype_policy("mixed_bfloat16")
layer, exact = layers.Dense(3), layers.Dense(3, dtype="float32")
for each in (layer, exact):
    y = each(x)
    print(f"{each.dtype_policy.name:<16} weights {each.kernel.dtype}, output {dtype_of(y)}")
assert dtype_of(layer(x)) == layer.compute_dtype == "bfloat16"
assert layer.kernel.dtype == layer.dtype == layer.variable_dtype == "float32"
keras.config.set_dtype_policy("mixed_float16")
assert layer.dtype_policy.name == "mixed_bfloat16"
assert layers.Dense(3).compute_dtype == "float16"

# %% [markdown]
# `layer.dtype` is the dtype of the variables, not of the output.
#
# ## Layers, not ops
#
# Autocast chooses a dtype for each op. A policy has one compute dtype for a layer.
#
# Under `mixed_float16`, Keras by default casts the floating-point inputs of a layer to float16. Squares of inputs above
# 256 then overflow. Batch normalization therefore [casts its input to
# float32](https://github.com/keras-team/keras/blob/master/keras/src/layers/normalization/batch_normalization.py). Our
# layer `Energy` has no such cast. We call `Energy` under `mixed_float16` and under `float32`:


# %%
class Energy(layers.Layer):
    """Sum the squares of the inputs: (B, N) to (B)."""

    def call(self, x):
        return ops.sum(ops.square(x), axis=-1)


far = 1000 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).numpy()
normal = layers.BatchNormalization()(far, training=True)
assert dtype_of(normal) == "float16"
assert ops.all(ops.isfinite(normal))
for energy in (Energy(), Energy(dtype="float32")):
    values = ops.cast(energy(far)[:2], "float32")
    print(f"{energy.dtype_policy.name:<14}", *(f"{float(value):.1e}" for value in values))
assert ops.all(ops.isinf(Energy()(far)))
assert ops.all(ops.isfinite(Energy(dtype="float32")(far)))

# %% [markdown]
# For these inputs, `Energy` needs `dtype="float32"`: in float16, its sums are infinite.
#
# ## Keep the last layer in float32
#
# A sigmoid under `mixed_float16` passes a float16 probability to the loss. For example, a logit of 8.5 has the
# probability 0.9998. In float16, this probability is rounded to 1. We compute the loss for the target 1 (a right
# prediction) and for the target 0 (a wrong prediction):

# %%
from_probability = keras.losses.BinaryCrossentropy()
from_logit = keras.losses.BinaryCrossentropy(from_logits=True)
logit = torch.tensor([[8.5]]).numpy()
probability = layers.Activation("sigmoid")(logit)  # in float16, the policy's dtype
off = {}
for case, target, exact in (("right", 1.0, -8.5), ("wrong", 0.0, 8.5)):
    exact = F.softplus(torch.tensor(exact)).item()
    target = ops.convert_to_tensor([[target]])
    in_half, safe = float(from_probability(target, probability)), float(from_logit(target, logit))
    print(
        f"{case}: loss {in_half:.1e} from float16 sigmoid, {safe:.1e} from logit, {exact:.1e} exact"
    )
    assert abs(safe / exact - 1) < 1e-3
    off[case] = in_half / exact
assert off["right"] < 1 / 1000
assert off["wrong"] > 1.8

# %% [markdown]
# With the float16 sigmoid, both losses are far from exact. So create the last layer without an activation, and use a
# loss with `from_logits=True`. Create this layer in float32, so that the logits are not rounded to 16 bits.
#
# ## When compile adds a loss scale
#
# If the *model's* policy is `mixed_float16`, `compile` by default wraps an optimizer such as Adam in a
# `LossScaleOptimizer`. We compile a small model under three policies:


# %%
def new_head(policy=None):
    """A network from (B, 8) to logits (B, 10), with the last layer in float32."""
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, dtype=policy), layers.Dense(10, dtype="float32")]
    )


def optimizer_of(model, **options):
    model.compile(optimizer="adam", loss="mse", **options)
    return type(model.optimizer).__name__


for name in POLICIES[:3]:
    keras.config.set_dtype_policy(name)
    kind = optimizer_of(new_head())
    print(f"{name:<15} {kind}")
    assert (kind == "LossScaleOptimizer") == (name == "mixed_float16")

# %% [markdown]
# We compile two more models, both without a loss scale:
#
# - The first model has the policy `mixed_float16`. We pass `auto_scale_loss=False`.
# - The second model has the policy `float32`, because we change the global policy before we create the model. Only its
#   first layer has `mixed_float16`. `compile` looks at the policy of the model, so it adds no loss scale.

# %%
print("on purpose:", optimizer_of(new_head(), auto_scale_loss=False))
keras.config.set_dtype_policy("float32")
by_layer = new_head("mixed_float16")
print("by accident:", optimizer_of(by_layer), "for model policy", by_layer.dtype_policy.name)
assert by_layer.layers[0].compute_dtype == "float16"
assert optimizer_of(by_layer) == optimizer_of(new_head(), auto_scale_loss=False) == "Adam"

# %% [markdown]
# To fix the second model, wrap the optimizer before you call `compile`:

# %%
Scaled = keras.optimizers.LossScaleOptimizer
by_layer.compile(optimizer=Scaled(keras.optimizers.Adam(1e-3)), loss="mse")
assert type(by_layer.optimizer) is Scaled
print(f"The scale starts at {by_layer.optimizer.initial_scale:g} and doubles after", end=" ")
print(f"{by_layer.optimizer.dynamic_growth_steps} good steps. GradScaler starts at 65536.")
assert by_layer.optimizer.initial_scale == 2**15
assert torch.amp.GradScaler("cpu").get_growth_interval() == by_layer.optimizer.dynamic_growth_steps

# %% [markdown]
# To clip gradients, set `clipnorm` on the *inner* optimizer, here Adam. <!-- tests/notebooks/test_12_keras.py -->
#
# ## Write the step
#
# A custom `train_step` with a `LossScaleOptimizer` has three parts:
#
# 1. Multiply the loss by the scale, with `scale_loss`.
# 2. Compute the gradients of the *scaled* loss.
# 3. Pass these gradients to `apply`. If a gradient contains inf or NaN, `apply` skips the step. Otherwise `apply`
#    divides the gradients by the scale and passes them to the inner optimizer.
#
# On torch:


# %%
def step_with_torch(self, data):
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    self.zero_grad()
    loss = self.compute_loss(y=y, y_pred=self(x, training=True))
    self.optimizer.scale_loss(loss).backward()  # AMP: was loss.backward()
    weights = self.trainable_weights
    with torch.no_grad():
        self.optimizer.apply([weight.value.grad for weight in weights], weights)
    return {"loss": loss.detach()}


# %% [markdown]
# On TensorFlow, scale the loss inside the `GradientTape` block:


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
# Both steps also work under `float32` and `mixed_bfloat16`. The optimizer then has no loss scale: its `scale_loss`
# returns the loss unchanged, and its `apply` does not divide. We use the steps in a small network:
# <!-- tests/notebooks/test_12_keras.py -->


# %%
def new_net():
    """A small network from digits (B, 8, 8, 1) to float32 logits (B, 10)."""
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
# The next function trains the network under `mixed_float16`:


# %%
def train_net(x, y, steps, scale, growth):
    """Train in float16; return the loss, the scale and the step count after each step."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    net = new_net()
    inner = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, scale, dynamic_growth_steps=growth)
    net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    record = {"losses": [], "scales": [], "counts": []}
    for _ in range(steps):
        record["losses"].append(float(net.train_on_batch(x.numpy(), y.numpy())))
        record["scales"].append(float(optimizer.dynamic_scale))
        record["counts"].append(int(optimizer.iterations))
    return record


# %% [markdown]
# We train on torch and, if it is installed, on TensorFlow. We start with a scale so high that gradients overflow:
# <!-- tests/course/test_processes.py -->

# %% tags=["nbval-ignore-output"]
small = load_dataset("digits", image_size=8, augment=False)
x, y = small.train.batch(range(64))
x = x[:, :1].permute(0, 2, 3, 1).contiguous()  # (64, 8, 8, 1)
given = {"x": x, "y": y, "steps": 20, "scale": 2.0**24, "growth": 5}
functions = train_net, new_net, step_with_torch, step_with_tensorflow
trained = run_on_backends(*functions, device=device, **given)
for backend, record in trained.items():
    scales = [given["scale"], *record["scales"]]
    counts = [0, *record["counts"]]
    skipped = [i for i in range(given["steps"]) if scales[i + 1] < scales[i]]
    print(backend, "scale:", *(f"2^{torch.tensor(scale).log2():.0f}" for scale in scales))
    print(f"{len(skipped)} of {given['steps']} steps skipped")
    assert [counts[i + 1] - counts[i] for i in range(given["steps"])] == [
        i not in skipped for i in range(given["steps"])
    ]
    assert 0 < len(skipped) < given["steps"] / 2
    assert scales[-1] > min(scales)  # the scale has doubled again
    assert record["losses"][-1] < record["losses"][0]

# %% [markdown]
# Each skipped step halves the scale. Each time that five steps in a row do not overflow, the scale doubles.
# A saved `.keras` file contains the scale. <!-- tests/notebooks/test_12_keras.py -->
#
# ## A mistake in a custom step
#
# If you forget `scale_loss`, or if you divide the gradients yourself, `apply` still divides the gradients by the scale.
# The weights can then move too little, without an error. We update a weight once correctly (*scaled*) and once without
# `scale_loss` (*not scaled*):

# %%
gradient = ops.convert_to_tensor([0.5])
for kind, rate in ((keras.optimizers.SGD, 1.0), (keras.optimizers.Adam, 0.1)):
    moved = {}
    for name, factor in (("scaled", 2.0**15), ("not scaled", 1.0)):
        weight = keras.Variable([1.0], dtype="float32")
        Scaled(kind(rate)).apply([gradient * factor], [weight])
        moved[name] = 1.0 - float(ops.convert_to_numpy(weight.value)[0])
    print(f"{kind.__name__}:", *(f"{name} moves by {by:.1g};" for name, by in moved.items()))
    ratio = moved["scaled"] / moved["not scaled"]
    assert abs(ratio / 2.0**15 - 1) < 0.01 if kind is keras.optimizers.SGD else 1 < ratio < 2

# %% [markdown]
# Without `scale_loss`, the weight moves 2¹⁵ times too little with SGD. With Adam, it moves nearly as far as it should,
# because Adam divides the gradient by an average of its magnitude. But if the gradient is so small that Adam's
# `epsilon` is much larger than this average, the weight hardly moves.
# <!-- tests/notebooks/test_12_keras.py -->
#
# ## The names of TensorFlow 2.x (optional)
#
# The table shows [the names of TensorFlow
# 2.x](https://www.tensorflow.org/versions/r2.5/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer), which you
# find in code for Keras 2, and those of Keras 3:
#
# | TensorFlow 2.x | Keras 3 |
# |---|---|
# | `tf.keras.mixed_precision.set_global_policy(…)` | `keras.config.set_dtype_policy(…)`; the old name works |
# | `tf.keras.mixed_precision.Policy` | `keras.DTypePolicy`; the old name works |
# | `experimental.LossScaleOptimizer(optimizer, loss_scale="dynamic")` | `LossScaleOptimizer(optimizer)` |
# | `optimizer.get_scaled_loss(loss)` | `optimizer.scale_loss(loss)` |
# | `optimizer.get_unscaled_gradients(g)`, then `apply_gradients(zip(g, w))` | `optimizer.apply(g, w)` |
#
# In Keras 3, `LossScaleOptimizer` raises an error for `dynamic=False` and for `loss_scale=`:

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
        print(str(error).partition(".")[0])
    else:
        raise AssertionError(wrong)

# %% [markdown]
# ## Summary
#
# - A layer with a mixed policy has float32 weights and one 16-bit compute dtype. Autocast chooses a dtype for each op.
# - In a classifier, the last layer should return float32 logits. Use a loss with `from_logits=True`.
# - If the model's policy is `mixed_float16`, `compile` adds a loss scale by default. If only the layers have that
#   policy, wrap the optimizer yourself.
# - In a custom step, call `scale_loss`, and do not divide the gradients, because `apply` divides them.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

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
# The list of policies above shows the dtype of the weights. A float16 number takes two bytes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# sizes = (4000, 2000)
# ```
#
# </details>
#
# ### 2. Divided once too often
#
# You train with a `LossScaleOptimizer` around SGD with a learning rate of 1. The scale is 1024, and the
# true gradient of a weight is 0.5. You divide the scaled gradient by 1024 by hand and pass the result
# to `apply`. How far does the weight move?

# %%
step_length = ...
exercises.check_step_length(step_length)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `apply` divides the gradient by the scale once more.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# step_length = 0.5 / 1024
# ```
#
# </details>
#
# ### 3. A safe last layer
#
# Complete `last_layer`. It must return a layer for ten classes that is safe under any global policy. The loss uses
# `from_logits=True`.


# %%
def last_layer():
    return ...


exercises.check_last_layer(last_layer)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The `dtype=` of a layer overrides the global policy.
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
# </details>
#
# ### 4. Mend the missing loss scale
#
# Only the layers of this model have the policy `mixed_float16`. Change the `compile` line so that Adam gets a loss
# scale, and return the model.


# %%
def compile_scaled(model):
    model.compile(keras.optimizers.Adam(), loss="mse")
    return ...


exercises.check_compiled(compile_scaled)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Wrap the optimizer before you pass it to `compile`.
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
# </details>
#
# ## Further reading
#
# - Keras, [Mixed precision](https://keras.io/api/mixed_precision/).
# - Keras, Customizing what happens in `fit()` [with
#   PyTorch](https://keras.io/guides/custom_train_step_in_torch/) and [with
#   TensorFlow](https://keras.io/guides/custom_train_step_in_tensorflow/).
