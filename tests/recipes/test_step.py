"""Steps by a recipe, and the programs with their lines."""

import contextlib
import io

import pytest
import torch
from small_models import PooledCnn
from torch import nn

from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, TRAINING, Recipe, Step, program

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

CPU = torch.device("cpu")


def recipes_of(use: str):
    for precision in Precision:
        for cast in (False, True):
            is_fp16_training = use == TRAINING and precision is Precision.FP16
            if cast and (precision.dtype is torch.float32 or is_fp16_training):
                continue
            yield Recipe(use, precision, cast, channels_last=True, fused=use == TRAINING)


EVERY = [*recipes_of(TRAINING), *recipes_of(INFERENCE)]


@pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: f"{recipe.use} {recipe}")
def test_every_program_runs(recipe):
    inputs = (torch.randn(2, 3, 12, 12),)
    call = ModelCall(PooledCnn(), inputs, loss_fn=lambda output: output.float().square().mean())
    text = program(call, recipe, CPU, 1024.0)
    names = {"model": call.model, "args": inputs, "kwargs": {}, "loss_fn": call.loss_fn}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(text, names)
    assert (len(said.getvalue().splitlines()) == 3) == (recipe.use == TRAINING)
    assert torch.isfinite(names["step"]()).all()
    assert ("GradScaler" in text) == (recipe.precision is Precision.FP16 and recipe.use == TRAINING)


def test_a_name_tells_what_is_unusual():
    assert str(Recipe(TRAINING)) == "fp32"
    compiled = Recipe(INFERENCE, Precision.BF16, cast=True, compiled=True)
    assert str(compiled) == "bf16 weights, torch.compile"


def test_a_mode_of_compilation_is_in_the_name_and_in_the_lines():
    recipe = Recipe(INFERENCE, compiled=True, compile_mode="max-autotune")
    assert str(recipe) == "fp32, torch.compile (max-autotune)"
    text = program(ModelCall(nn.Linear(2, 2), (torch.ones(1, 2),)), recipe, CPU, 1024.0)
    assert 'model = torch.compile(model, mode="max-autotune")\n' in text


def test_the_lines_move_dicts_within_inputs():
    class Nested(nn.Linear):
        def forward(self, parts, *, more):
            return super().forward(parts["x"]) + super().forward(more["deep"][0]["y"])

    x, y = torch.randn(2, 8), torch.randn(2, 8)
    call = ModelCall(Nested(8, 8), ({"x": x},), {"more": {"deep": [{"y": y}]}})
    step = Step(call, Recipe(INFERENCE, Precision.BF16, cast=True))
    assert step().dtype is torch.bfloat16
