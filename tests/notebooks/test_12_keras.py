"""Notebook 12: its own steps are those of `fit`, and what it says of Keras holds on TensorFlow."""

import re

import nbformat
import pytest
import torch
from definitions import definitions

from course.processes import run_on_backends

import build_pairs
from amp_lab import load_dataset
from amp_lab.failures import explain
from conftest import needs_keras

pytestmark = pytest.mark.slow

SOURCE = build_pairs.FOLDER / "12_keras.py"


def steps_of_both(x, y):
    """Weights and scale after four of the notebook's steps, and of Keras's own, by policy."""
    import keras

    found = {}
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        own, fit = new_net(), keras.Sequential(new_net().layers)  # noqa: F821, sent along
        start = own.get_weights()
        for name, net in (("own", own), ("fit", fit)):
            net.set_weights(start)
            optimizer = keras.optimizers.Adam(0.01)
            if policy == "mixed_float16":
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 2.0**18)
            net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            for _ in range(4):
                net.train_on_batch(x.numpy(), y.numpy())
            scale = float(getattr(optimizer, "dynamic_scale", 1.0))
            found[policy, name] = [torch.tensor(w) for w in net.get_weights()], scale
        found[policy, "start"] = [torch.tensor(w) for w in start]
    return found


def resumed(x, y):
    """Losses of three steps after a save, and again from the file; scale and steps of both."""
    import tempfile

    import keras

    keras.config.set_dtype_policy("mixed_float16")
    net = keras.Sequential(new_net().layers)  # noqa: F821, sent along
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**18)
    net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for _ in range(3):
        net.train_on_batch(x.numpy(), y.numpy())
    with tempfile.TemporaryDirectory() as folder:
        net.save(f"{folder}/net.keras")
        loaded = keras.saving.load_model(f"{folder}/net.keras")
    found = []
    for each in (net, loaded):
        state = float(each.optimizer.dynamic_scale), int(each.optimizer.iterations)
        found.append((state, [float(each.train_on_batch(x.numpy(), y.numpy())) for _ in range(3)]))
    return found


def clipped_step():
    """A weight of 0 after a step of 1 along a scaled gradient (3, 4) that is clipped to 1."""
    import keras

    scaled = keras.optimizers.LossScaleOptimizer
    optimizer = scaled(keras.optimizers.SGD(1.0, clipnorm=1.0), initial_scale=1024)
    weight = keras.Variable([0.0, 0.0], dtype="float32")
    gradient = keras.ops.multiply(optimizer.initial_scale, [3.0, 4.0])
    optimizer.apply([gradient], [weight])
    return [float(value) for value in keras.ops.convert_to_numpy(weight.value)]


def fixed_scale():
    """A loss of 1 times a fixed scale of 128, and a weight of 1 after a gradient of inf."""
    import keras

    optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=128)
    loss = float(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0)))
    weight = keras.Variable([1.0], dtype="float32")
    optimizer.apply([keras.ops.convert_to_tensor([float("inf")])], [weight])
    return loss, float(keras.ops.convert_to_numpy(weight.value)[0])


def adam_step_without_scaling():
    """How far the first step of Adam(0.1) moves a weight for an unscaled gradient of 0.001."""
    import keras

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
    weight = keras.Variable([1.0], dtype="float32")
    optimizer.apply([keras.ops.convert_to_tensor([0.001])], [weight])
    return 1.0 - float(keras.ops.convert_to_numpy(weight.value)[0])


def tensorflow_with_two_dtypes():
    """AMP0320: what TensorFlow prints for fp16 and fp32 in one op, and the result after a cast."""
    import tensorflow as tf

    half, single = tf.ones((2, 2), tf.float16), tf.ones((2, 2))

    def multiply():
        return half * single

    def concatenate():
        return tf.concat([half, single], 0)

    def convert():
        return tf.convert_to_tensor(single, tf.float16)

    printed = []
    for op in (multiply, concatenate, convert, tf.function(multiply), tf.function(concatenate)):
        try:
            op()
        except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
            printed.append(str(error))
    return printed, (tf.cast(half, single.dtype) * single).dtype.name


def loaded_before_keras():
    """What the cells import before Keras: Triton brings an LLVM, which must be loaded first."""
    return load_dataset


def cells_and_steps(code, x, y):
    """What these cells print on TensorFlow, which the kernel has run on torch; then the steps."""
    import contextlib
    import io

    import keras

    printed = io.StringIO()
    two_dtypes = None
    if keras.backend.backend() == "tensorflow":
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
        two_dtypes = tensorflow_with_two_dtypes()
    return {
        "printed": printed.getvalue(),
        "two dtypes": two_dtypes,
        "steps": steps_of_both(x, y),
        "resumed": resumed(x, y),
        "clipped": clipped_step(),
        "fixed scale": fixed_scale(),
        "Adam without scaling": adam_step_without_scaling(),
    }


SECTIONS = {
    "",
    "A policy names two dtypes",
    "Layers, not ops",
    "Keep the last layer in float32",
    "When compile adds a loss scale",
    "A mistake in a custom step",
    "The idea in five lines",
    "The names of TensorFlow 2.x (optional)",
}


def cells_of(sections: set[str], read: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    found, section = [], ""
    for cell in read.cells:
        if cell.cell_type == "code" and section in sections:
            found.append(cell)
        for heading in re.findall(r"^## (.+)", cell.source, re.MULTILINE):
            section = heading if cell.cell_type == "markdown" else section
    return found


@pytest.fixture(scope="module")
def cells() -> list[nbformat.NotebookNode]:
    """The cells that run in no process of their own."""
    found = cells_of(SECTIONS, nbformat.read(SOURCE.with_suffix(".ipynb"), as_version=4))
    headings = re.findall(r"^# ## (.+)", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*headings, ""} >= SECTIONS
    assert len(found) > 10
    return found


@pytest.fixture(scope="module")
def on_both(cells) -> dict[str, dict]:
    """All that takes a Keras, in one process for each backend, since it takes long to start."""
    names = definitions(SOURCE)
    needed = [loaded_before_keras, steps_of_both, resumed, clipped_step, fixed_scale]
    needed += [adam_step_without_scaling, tensorflow_with_two_dtypes]
    needed += [names[name] for name in ("new_net", "step_with_torch", "step_with_tensorflow")]
    given = {"x": torch.rand(16, 8, 8, 1), "y": torch.arange(16) % 10}
    code = "\n\n".join(cell.source for cell in cells)
    return run_on_backends(cells_and_steps, *needed, code=code, **given)


@needs_keras
@pytest.mark.weekly  # as the next one: these processes import TensorFlow and train
def test_the_steps_by_hand_are_those_of_fit(on_both):
    for found in (result["steps"] for result in on_both.values()):
        for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
            (own, own_scale), (fit, fit_scale) = found[policy, "own"], found[policy, "fit"]
            assert own_scale == fit_scale
            assert all(map(torch.equal, own, fit))
            assert not any(map(torch.equal, own, found[policy, "start"]))
        assert found["mixed_float16", "own"][1] < 2.0**18  # and some were skipped


@needs_keras
@pytest.mark.weekly
def test_a_saved_model_resumes_with_its_scale(on_both):
    for result in on_both.values():
        (saved, losses), (loaded, losses_again) = result["resumed"]
        assert loaded == saved
        assert 0 < saved[1] < 3  # a step was skipped, and Adam has moments
        assert losses_again == losses  # on the CPU


@needs_keras
@pytest.mark.weekly
def test_what_the_kernel_shows_on_torch_holds_on_tensorflow(cells, on_both):
    """The same cells with the same assertions print the same."""
    outputs = "".join(output.text for cell in cells for output in cell.outputs)
    (_, here), (_, there) = (  # without the line that names the machine and the commit
        text.split("\n", 1) for text in (on_both["tensorflow"]["printed"], outputs)
    )
    assert here == there


@needs_keras
@pytest.mark.weekly
def test_the_inner_optimizer_clips_gradients_that_are_divided_by_the_scale(on_both):
    for result in on_both.values():
        assert result["clipped"] == pytest.approx([-0.6, -0.8])  # (3, 4) to length 1


@needs_keras
@pytest.mark.weekly
def test_a_fixed_scale_skips_no_step(on_both):
    for result in on_both.values():
        assert result["fixed scale"] == (128.0, -float("inf"))


@needs_keras
@pytest.mark.weekly
def test_a_small_gradient_without_scaling_makes_a_step_of_adam_100_times_too_short(on_both):
    for result in on_both.values():
        assert result["Adam without scaling"] == pytest.approx(0.1 / 100, rel=0.1)


@needs_keras
@pytest.mark.weekly
def test_an_op_of_tensorflow_refuses_two_dtypes_until_one_is_cast(on_both):
    printed, after_a_cast = on_both["tensorflow"]["two dtypes"]
    assert len(printed) == 5
    for message in printed:
        assert explain(message)[0].code == "AMP0320", message
    assert after_a_cast == "float32"


def test_a_step_without_amp_is_what_its_marks_say():
    """Each marked line scales the loss; no other line knows of the scale."""
    text = SOURCE.read_text(encoding="utf-8")
    for name in ("step_with_torch", "step_with_tensorflow"):
        body = re.search(rf"^def {name}.*?^    return", text, re.MULTILINE | re.DOTALL)[0]
        for line in body.splitlines():
            assert ("scale" in line.partition("#")[0]) == ("# AMP" in line), line
