"""Each remedy of find_nonfinite, in the situation that it is printed in, done as it says.

Most faults are a function of a layer's output. Its cure is code that stands in the remedy, run in
place of the function; where a remedy is not code, the test does what it says.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_faults import find
from remedy_tests import does
from torch import nn

from amp_lab import ScaleLog, find_nonfinite
from amp_lab.core.errors import NumericsError
from amp_lab.core.remedies import REMEDIES
from amp_lab.numerics.nonfinite_report import NonfiniteReport

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def found(model: nn.Module, x: torch.Tensor, **options: Any) -> NonfiniteReport:
    report = find(model, x, **options)
    assert report is not None
    return report


def codes(report: NonfiniteReport) -> list[str]:
    return [remedy.code.removeprefix("nonfinite.") for remedy in report.remedies]


class Apply(nn.Module):
    """A weight of 1, so that gradients flow, and a function of its product with the input."""

    def __init__(self, function: Callable, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


@dataclass
class Fault:
    """An expression, for which values of x it is at fault, and the code of the remedy."""

    code: str
    fault: str
    values: list
    cure: str  # as it stands in the remedy
    whole: str = "{}"  # what the cure is put into, where it is only a part
    dtypes: tuple = DTYPES


ZERO = [0.0, 1.0, 2.0]
HALVES = (torch.bfloat16, torch.float16)
AWAY_FROM_0 = "torch.where(x < 0, x.clamp_max(-1e-2), x.clamp_min(1e-2))"
DIVISIONS = {  # each with what AWAY_FROM_0 is put into
    "torch.ones_like(x) / x": "torch.ones_like(x) / {}",
    "x.reciprocal()": "{}.reciprocal()",
    "x ** -1": "{} ** -1",
}
EQUAL = [[2.0, 0.0], [0.0, 2.0]]
TALL = [[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
OFFSETS = (
    "x + torch.eye(*x.shape[-2:], device=x.device) * "
    "torch.linspace(1e-3, 1e-2, x.shape[-1], device=x.device)"
)
FAULTS = [
    Fault("log1p", "torch.log1p(x)", [-2.0, -1.0, 1.0], "torch.log1p(x.clamp_min(-0.99))"),
    Fault("acosh", "torch.acosh(x)", [0.5, 2.0], "torch.acosh(x.clamp_min(1.01))"),
    Fault("backward.acosh", "torch.acosh(x)", [1.0, 2.0], "torch.acosh(x.clamp_min(1.01))"),
    Fault("backward.log1p", "torch.where(x > 0, torch.log1p(x), 0)", [-1.0, 1.0],
          "torch.log1p(x.clamp_min(-0.99))", "torch.where(x > 0, {}, 0)"),
    Fault("logit", "torch.logit(x)", [0.0, 0.5, 1.0], "torch.logit(x.float(), eps=1e-6)"),
    Fault("log", "torch.log(x)", [0.0, -1.0, 5e-6], "x.clamp_min(1e-4)", "torch.log({})"),
    Fault("reciprocal", "x.reciprocal()", ZERO, "x.float().clamp_min(1e-3).reciprocal()"),
    Fault("rsqrt", "torch.rsqrt(x)", [-1.0, 1.0, 0.0], "torch.rsqrt(x.clamp_min(0) + 1e-2)",
          dtypes=(torch.float32, torch.bfloat16)),
    Fault("sqrt", "torch.sqrt(x)", [-1.0, 1.0], "x.clamp_min(1e-6)", "torch.sqrt({})"),
    Fault("pow.fraction", "x ** 0.3", [-1.0, 1.0], "x.clamp_min(1e-3) ** p", "(lambda p: {})(0.3)"),
    Fault("pow.fraction", "x ** 0.3", [-1.0, 1.0], "x.sign() * x.abs().clamp_min(1e-3) ** p",
          "(lambda p: {})(0.3)"),
    Fault("pow.zero", "x ** -1.5", ZERO, "x.clamp_min(1e-3) ** p", "(lambda p: {})(-1.5)"),
    Fault("pow.fp16", "x ** 2", [-300.0, 300.0], "x.float() ** p", "(lambda p: {})(2) / 1000",
          (torch.float16,)),
    Fault("pow.range", "x ** 3", [-1e15, 300.0], "x.clamp(-1e3, 1e3) ** p", "(lambda p: {})(3)",
          (torch.float32, torch.bfloat16)),
    Fault("pow.range", "x ** 40", [0.5, 300.0], "x.clamp(-1e3, 1e3) ** p",
          "(lambda p: {})(2).detach() + x", (torch.float32, torch.bfloat16)),
    Fault("pow.exponent", "2.0 ** x", [1.0, 200.0], "a ** (x - x.max())", "(lambda a: {})(2.0)"),
    Fault("pow.exponent", "2.0 ** x", [1.0, 200.0], "a ** x.clamp_max(limit)",
          "(lambda a, limit: {})(2.0, 15.0)"),
    *(
        Fault("both_signs", fault, [-1.0, 0.0, 2.0], AWAY_FROM_0, whole)
        for fault, whole in DIVISIONS.items()
    ),
    *(
        Fault("both_signs", fault, [-1.0, 1e-3, 2.0], AWAY_FROM_0, whole, (torch.float16,))
        for fault, whole in DIVISIONS.items()
    ),
    Fault("acos", "torch.acos(x)", [1.5, 0.5], "x.clamp(-1, 1)", "torch.acos({}.detach()) + x"),
    Fault("std", "x.std(0)", [[1.0]], "correction=0", "x.detach().std(0, {}) + x"),
    Fault("var", "x.var(0)", [[1.0]], "correction=0", "x.var(0, {})"),
    Fault("backward.sqrt", "torch.sqrt(x)", ZERO, "torch.sqrt(x + 1e-6)"),
    Fault("backward.rsqrt", "torch.rsqrt(x)", [1e-30, 1.0], "torch.rsqrt(x + 1e-2)",
          dtypes=(torch.float32, torch.bfloat16)),
    Fault("backward.pow", "x ** 0.5001", ZERO, "(x + 1e-6) ** p", "(lambda p: {})(0.5001)"),
    Fault("backward.log", "torch.where(x > 0.5, torch.log(x), 0)", ZERO,
          "torch.log(x.clamp_min(1e-4))", "torch.where(x > 0.5, {}, 0)"),
    Fault("backward.div", "1 / x", [1e-30, 1.0], "a / (b + 1e-2)", "(lambda a, b: {})(1.0, x)",
          dtypes=(torch.float32, torch.bfloat16)),
    Fault("backward.linalg", "torch.linalg.eigh(x)[1]", EQUAL, OFFSETS,
          "torch.linalg.eigh({})[1]", (torch.float32,)),
    Fault("backward.linalg", "torch.linalg.svd(x, full_matrices=False)[0]", TALL, OFFSETS,
          "torch.linalg.svd({}, full_matrices=False)[0]", (torch.float32,)),
    Fault("backward.acos", "torch.acos(x)", [1.0, 0.5], "x.clamp(-0.99, 0.99)", "torch.acos({})"),
]  # fmt: skip


@does(*(f"nonfinite.{fault.code}" for fault in FAULTS))
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_its_code_in_the_place_of_the_fault_heals_it(fault):
    for dtype in fault.dtypes:
        x = torch.tensor(fault.values, dtype=dtype)

        def model(code: str, dtype: torch.dtype = dtype) -> Apply:
            return Apply(eval(f"lambda x: {code}", {"torch": torch, "F": F}), dtype)

        report = found(model(fault.fault), x, loss_fn=lambda y: y.float().sum())
        assert fault.code in codes(report), (dtype, str(report))
        assert fault.cure in report.advice
        cured = model(fault.whole.format(fault.cure))
        again = find(cured, x, loss_fn=lambda y: y.float().sum())
        assert again is None, (dtype, str(again))


@pytest.mark.parametrize("exponent", [2, 3])
def test_a_power_of_numbers_of_both_signs_keeps_them_in_fp32(exponent):
    x = torch.tensor([-300.0, -2.0, 0.0, 0.5, 300.0], dtype=torch.float16)
    advice = found(Apply(lambda x: x**exponent, torch.float16), x).advice
    assert "x.float() ** p, which keeps all values and their signs" in advice
    assert "clamp" not in advice
    assert torch.equal(x.float() ** exponent, (x.double() ** exponent).float())


def test_a_power_beyond_fp32_is_clamped_alike_on_both_sides():
    x = torch.tensor([-300.0, -2.0, 1.0, 300.0], dtype=torch.float16)
    report = found(Apply(lambda x: x**41, torch.float16), x)
    assert codes(report) == ["pow.range", "fp16_overflow.cast"]
    assert not (x.float() ** 41).isfinite().all()
    assert "x.clamp(-1e3, 1e3) ** p, with a limit that suits p" in report.advice
    assert torch.equal((x.clamp(-1.25, 1.25) ** 41).sign(), x.sign())


def test_a_power_of_tensors_is_judged_by_the_largest_of_them():
    base = torch.tensor([-300.0, 1.0], dtype=torch.float16)
    for exponent, code in ((2.0, "pow.fp16"), (40.0, "pow.range")):
        given = torch.tensor([exponent, 0.0], dtype=torch.float16)
        report = found(Apply(lambda x, given=given: x**given, torch.float16), base)
        assert codes(report)[0] == code
    inverse = torch.tensor([-1.0, 0.0])
    zeros = torch.tensor([0.0, -1.0])
    assert codes(found(Apply(lambda x: x**inverse), zeros)) == ["both_signs"]


@pytest.mark.parametrize(
    ("code", "values"), [("x ** 3", [30.0]), ("torch.sqrt(x)", [0.04]), ("torch.log(x)", [0.25])]
)
def test_a_large_gradient_is_not_blamed_on_a_finite_derivative(code, values):
    """The derivatives are 2,700, 2.5 and 4: it is the gradient that exceeds fp16."""
    x = torch.tensor(values, dtype=torch.float16)
    model = Apply(eval(f"lambda x: {code}", {"torch": torch}), torch.float16)
    report = found(model, x, loss_fn=lambda y: (y.float() * 30000).sum())
    assert report.phase == "backward"
    assert not any(code.startswith("backward.") for code in codes(report))
    assert "65504" in report.advice


def test_an_eps_or_a_clamp_is_advised_for_divisors_that_are_not_negative_alone():
    signs = torch.tensor([-0.01, 0.5])
    assert not (1 / (signs + 1e-2)).isfinite().all()  # what the remedy says of an added eps
    assert signs.clamp_min(1e-2)[0] > 0  # and of a clamp
    for values, expected in (([0.0, 1.0], "div"), ([0.0, -1.0], "both_signs")):
        report = found(Apply(lambda x: torch.ones(2) / x), torch.tensor(values))
        assert codes(report) == [expected]


def healed(model: nn.Module, x: torch.Tensor, **options: Any) -> bool:
    """Whether another step, whose gradients begin anew, is finite."""
    model.zero_grad()
    return find(model, x, **options) is None


def only(report: NonfiniteReport | None, *expected: str) -> str:
    """The advice of a report, which has these remedies and no other."""
    assert report is not None
    assert codes(report) == list(expected), str(report)
    return report.advice


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(3, 2).to(dtype)


def broken_by_a_step(guarded: Callable[[nn.Module, torch.optim.Optimizer], None]) -> nn.Module:
    """A layer after a step with infinite gradients, which `guarded` takes."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    guarded(model, optimizer)
    return model


@does("nonfinite.parameter")
def test_weights_that_a_step_broke():
    model = broken_by_a_step(lambda model, optimizer: optimizer.step())
    advice = only(find(model, torch.ones(1, 3)), "parameter")
    assert "scaler.step(optimizer), which skips such a step" in advice

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)

    assert healed(broken_by_a_step(scaled), torch.ones(1, 3))

    def unscaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)  # as in bf16: it skips nothing
        scaler.step(optimizer)

    assert find(broken_by_a_step(unscaled), torch.ones(1, 3)) is not None

    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        code = "clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)"
        assert code in advice
        names = {"clip_grad_norm_": nn.utils.clip_grad_norm_}
        eval(code, names, {"parameters": model.parameters(), "max_norm": 1.0})
        optimizer.step()

    with pytest.raises(RuntimeError, match="non-finite"):
        broken_by_a_step(clipped)


def adam_step(parameters: Any, loss: Callable, adam: type = torch.optim.Adam, **options) -> None:
    optimizer = adam(parameters, **options)
    loss().backward()
    optimizer.step()


HALF = torch.float16
WITH_EPS = ["Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"]


@does("nonfinite.step.eps")
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", WITH_EPS)
def test_an_optimizer_whose_eps_is_zero_in_fp16(name, foreach):
    adam = getattr(torch.optim, name)

    def over_a_step(parameter: nn.Parameter, **options: Any) -> find_nonfinite:
        model = linear().requires_grad_(False).half()
        with find_nonfinite(model, **options) as finder:
            adam_step([parameter], lambda: model(parameter.to(HALF)).mean() * 1e-4, adam,
                      foreach=foreach)  # fmt: skip
        return finder

    prompt = torch.ones(1, 3, dtype=HALF)
    advice = only(over_a_step(prompt.clone().requires_grad_()).report, "step.eps")
    assert "AMP0121" in advice
    assert "frozen weights may stay in fp16" in advice
    assert "tensor.float().requires_grad_()" in advice
    healthy = prompt.clone().float().requires_grad_()
    assert over_a_step(healthy).report is None
    assert healthy.isfinite().all()
    with pytest.raises(NumericsError, match="the optimizer's step by"):
        over_a_step(prompt.clone().requires_grad_(), raise_on_first=True)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_parameter_of_the_model_that_a_step_breaks_is_named(foreach):
    model = nn.Sequential(linear(), nn.Linear(2, 1)).half()
    x = torch.ones(1, 3, dtype=HALF)
    with find_nonfinite(model) as finder:
        adam_step(model.parameters(), lambda: model(x).mean() * 1e-4, foreach=foreach)
    assert finder.report.name == "0.weight"
    assert finder.report.place == "Adam.step: parameter '0.weight'"


def test_a_parameter_of_one_element_that_adam_breaks_is_not_blamed_on_a_division():
    model = Apply(lambda x: x.mean() * 1e-4, HALF)
    with find_nonfinite(model) as finder:
        adam_step(model.parameters(), lambda: model(torch.ones(2, dtype=HALF)))
    only(finder.report, "step.eps")


@does("nonfinite.half_parameter")
def test_weights_in_fp16_that_adam_broke_in_the_step_before():
    def step_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
        x = torch.ones(1, 3, dtype=dtype)
        adam_step(model.parameters(), lambda: model(x).mean() * 1e-4)
        return model

    broken = step_of(linear(HALF), HALF)
    advice = only(find(broken, torch.ones(1, 3, dtype=HALF)), "half_parameter")
    assert "model.float() before you create the optimizer" in advice
    assert "all gradients are finite" in advice
    assert healed(step_of(linear(HALF).float(), torch.float32), torch.ones(1, 3))


@does("nonfinite.step")
def test_a_learning_rate_that_is_too_high():
    def over_a_step(lr: float) -> find_nonfinite:
        model = linear()
        with find_nonfinite(model) as finder:
            loss = lambda: model(torch.ones(1, 3)).mean() * 1e10  # noqa: E731
            adam_step(model.parameters(), loss, torch.optim.SGD, lr=lr)
        return finder

    assert "lower the learning rate" in only(over_a_step(1e30).report, "step")
    assert over_a_step(0.1).report is None


def test_the_loss_in_a_closure_of_an_optimizer_is_still_watched():
    model = Apply(lambda x: x.log().mean())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2)) - math.inf * 0 * model(torch.ones(2))
        loss.backward()
        return loss

    with find_nonfinite(model) as finder:
        optimizer.step(closure)
    assert finder.report is not None
    assert finder.report.phase == "forward"


@does("nonfinite.trained_input")
def test_a_trained_input_that_a_step_broke():
    prompt = torch.full((1, 3), math.nan, requires_grad=True)
    advice = only(find(linear(), prompt), "trained_input")
    assert "run find_nonfinite over the step before" in advice
    assert "If no optimizer trains it, check the data" in advice
    only(find(linear(), prompt * 2), "input")  # not a leaf
    assert healed(linear(), torch.ones(1, 3, requires_grad=True))


def test_a_gradient_that_is_left_outside_the_model():
    outside = torch.ones(1, 3, requires_grad=True)
    for left in (math.nan, math.inf):
        outside.grad = torch.full((1, 3), left)
        assert "zero_grad()" in only(find(linear(), outside * 2), "gradient")
    outside.grad = None
    assert healed(linear(), outside * 2)


@does("nonfinite.fp16_overflow.fixed")
def test_a_layer_that_sets_fp16_in_a_bf16_block():
    def over_a_step(dtype_of: Callable) -> NonfiniteReport | None:
        model = Apply(lambda x: (x @ x.mT).to(dtype_of(x)).float())
        x = torch.full((2, 8), 300.0)
        with find_nonfinite(model) as finder, torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).mean().backward()
        return finder.report

    advice = only(over_a_step(lambda x: HALF), "cast", "fp16_overflow.fixed")
    code = "torch.get_autocast_dtype(x.device.type)"
    assert code in advice
    assert over_a_step(lambda x: eval(code, {"torch": torch, "x": x})) is None


@does("nonfinite.buffer")
def test_a_buffer_that_is_written_anew():
    model = linear()
    model.register_buffer("offset", torch.full((2,), math.nan))
    model.register_forward_hook(lambda module, inputs, output: output + module.offset)
    only(find(model, torch.ones(1, 3)), "buffer")
    model.offset.zero_()
    assert healed(model, torch.ones(1, 3))


@does("nonfinite.statistics")
def test_statistics_that_are_reset():
    model = nn.Sequential(nn.BatchNorm1d(3), linear())
    model(torch.full((4, 3), math.inf))
    model.eval()
    assert "reset_running_stats()" in only(find(model, torch.ones(4, 3)), "statistics")
    model[0].reset_running_stats()
    assert healed(model, torch.ones(4, 3))


@does("nonfinite.input")
@pytest.mark.parametrize(
    ("prepare", "repair"),
    [
        (lambda x: x.where(x != 1, math.nan), lambda x: x.nan_to_num(0.0)),
        (lambda x: (x - x.mean()) / x.std(), lambda x: x),
        (lambda x: (x * 1e5).half().float(), lambda x: x),
    ],
    ids=["missing values", "a standard deviation of 0", "a cast to fp16"],
)
def test_inputs_that_are_prepared_otherwise(prepare, repair):
    x = torch.ones(2, 3)
    advice = only(find(linear(), prepare(x)), "input")
    for cause in ("missing values", "standard deviation of 0", "cast to fp16 of values over 65504"):
        assert cause in advice
    assert healed(linear(), repair(x))


@does("nonfinite.gradient")
def test_gradients_that_are_left_from_before():
    model = linear()
    model.weight.grad = torch.full_like(model.weight, math.nan)
    assert "zero_grad()" in only(find(model, torch.ones(1, 3)), "gradient")
    model.weight.grad = torch.full_like(model.weight, math.nan)
    model.zero_grad()
    assert healed(model, torch.ones(1, 3))


@does("nonfinite.constant")
def test_a_target_that_is_not_finite():
    target = torch.tensor([[math.nan, 0.0]])
    assert "targets" in only(
        find(linear(), torch.ones(1, 3), loss_fn=lambda y: F.mse_loss(y, target)), "constant"
    )
    whole = target.nan_to_num(0.0)
    assert healed(linear(), torch.ones(1, 3), loss_fn=lambda y: F.mse_loss(y, whole))


SCORES = torch.tensor([[0.5, 1.0], [2.0, 3.0]])  # two rows of attention scores
NOTHING_SEEN = torch.tensor([[False, False], [False, True]])
LEAST = torch.finfo(torch.float32).min


@does("nonfinite.masked_softmax")
def test_a_row_of_attention_that_is_masked_everywhere():
    def attend(mask: Callable) -> Apply:
        return Apply(lambda x: mask(x).softmax(-1))

    masked = attend(lambda x: x.masked_fill(~NOTHING_SEEN, -math.inf))
    advice = only(find(masked, SCORES), "masked_softmax")
    assert "Leave at least one position of each row" in advice
    one_left = NOTHING_SEEN | torch.eye(2, dtype=torch.bool)
    assert healed(attend(lambda x: x.masked_fill(~one_left, -math.inf)), SCORES)
    assert "masked_fill with torch.finfo(dtype).min" in advice
    for dtype in DTYPES:
        least = torch.finfo(dtype).min
        filled = Apply(lambda x, v=least: x.masked_fill(~NOTHING_SEEN, v).softmax(-1), dtype)
        assert healed(filled, SCORES.to(dtype))
    assert "Do not add torch.finfo(dtype).min to the scores" in advice
    added = torch.where(NOTHING_SEEN, 0.0, torch.finfo(torch.float16).min).half()
    twice = Apply(lambda x: (x + added + added).softmax(-1), torch.float16)
    assert find(twice, SCORES.half()) is not None


def fill(x: torch.Tensor, value: Any) -> torch.Tensor:
    x = x.clone()
    x[~NOTHING_SEEN] = value
    return x


def hidden(x: torch.Tensor) -> torch.Tensor:
    return (~NOTHING_SEEN).to(x.dtype)


CONSTANTS = {
    "times a float": lambda x: x + hidden(x) * -1e9,
    "times an int": lambda x: x + hidden(x) * -(2**30),
    "minus a product": lambda x: x - 1e9 * hidden(x),
    "alpha": lambda x: x.add(hidden(x), alpha=-1e9),
    "a mask that is cast": lambda x: x + torch.where(NOTHING_SEEN, 0.0, -1e9).to(x.dtype),
    "where and a tensor": lambda x: torch.where(NOTHING_SEEN, x, torch.tensor(-1e9)),
    "where": lambda x: torch.where(NOTHING_SEEN, x, -1e9),
    "masked_fill": lambda x: x.masked_fill(~NOTHING_SEEN, -1e9),
    "masked_fill with a tensor": lambda x: x.masked_fill(~NOTHING_SEEN, torch.tensor(-1e9)),
    "an assignment": lambda x: fill(x, -(2**30)),
    "an assignment of a tensor": lambda x: fill(x, torch.tensor(-1e9)),
    "full_like": lambda x: torch.where(NOTHING_SEEN, x, torch.full_like(x, -1e9)),
}


@does("nonfinite.mask_value")
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_mask_value_that_does_not_fit(name):
    def model(mask: Callable) -> Apply:
        return Apply(lambda x: mask(x).softmax(-1), torch.float16)

    advice = ""
    x = SCORES.half()
    try:
        report = find(model(CONSTANTS[name]), x)
    except RuntimeError as error:  # some ops refuse the number instead
        (advice,) = error.__notes__
    else:
        assert report is not None
        assert codes(report)[0] == "mask_value"
        assert report.constant in (-1e9, 1e9, -(2**30))
        assert "constant" in str(report)
        advice = report.advice
    cure = "scores.masked_fill(mask, torch.finfo(scores.dtype).min)"
    assert cure in advice

    def cured(x: torch.Tensor) -> torch.Tensor:
        return eval(cure, {"torch": torch, "scores": x, "mask": ~NOTHING_SEEN})

    assert healed(model(cured), x)
    assert "Do not add it to the scores" in advice
    added = hidden(x) * torch.finfo(x.dtype).min
    assert find(model(lambda x: x - 20 * x.detach() + added + added), x) is not None


def test_numbers_that_fit_or_are_sizes_are_no_constants():
    x = torch.full((2, 3), 300.0, dtype=torch.float16)
    for overflow in (
        lambda x: x * x,
        lambda x: x * 60000.0,
        lambda x: x.expand(70_000, 2, 3)[:2].clone() * x,
    ):
        report = found(Apply(overflow, torch.float16), x)
        assert "mask_value" not in codes(report), str(report)
    report = found(Apply(lambda x: x * 1e6, torch.float16), x)  # data may overflow by it, too
    assert codes(report) == ["mask_value", "fp16_overflow.cast"]


@does("nonfinite.masked")
def test_a_mask_before_arithmetic():
    mask = torch.tensor([0.0, -math.inf])

    def model(function: Callable) -> Apply:
        return Apply(lambda x: function(x).exp())

    advice = only(find(model(lambda x: (x + mask) * 0), torch.ones(2)), "masked")
    assert "Apply the mask after the arithmetic, with torch.where or masked_fill" in advice
    hidden = mask.isinf()
    for after in (
        lambda x: torch.where(hidden, -math.inf, x * 0),
        lambda x: (x * 0).masked_fill(hidden, -math.inf),
        lambda x: x.masked_fill(hidden, LEAST) * 0,
    ):
        assert healed(model(after), torch.ones(2))


@does("nonfinite.no_values")
def test_an_empty_batch_that_is_skipped():
    batches = [torch.ones(0, 3), torch.ones(2, 3)]
    assert "Skip empty batches" in only(find(linear(), batches[0]), "no_values")
    assert all(find(linear(), batch) is None for batch in batches if len(batch))


@does("nonfinite.loss_scale")
def test_a_loss_scale_that_gradscaler_lowers():
    model, scaler = linear(), torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=999)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"autocast": torch.float16, "scaler": scaler, "loss_fn": lambda y: y.float().sum()}
    report = found(model, torch.ones(1, 3), **options)
    assert codes(report) == ["loss_scale", "fp16_overflow.autocast"]
    assert "scaler.step(optimizer) skips the step" in report.advice
    assert "scaler.update() lowers the scale" in report.advice
    skipped = 0
    while find(model, torch.ones(1, 3), **options) is not None and skipped < 20:
        before = model.weight.clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before)
        skipped += 1
    assert 1 <= skipped < 20
    assert scaler.get_scale() == 2.0 ** (24 - skipped)
    assert "A plain optimizer.step() does not skip the step" in report.advice
    model, x = linear(), torch.ones(1, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().sum()
    torch.amp.GradScaler("cpu", init_scale=2.0**24).scale(loss).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not model.weight.isfinite().all()


def scaled_steps(step: Callable, scale: float, steps: int = 2) -> tuple:
    """A model, and the report of some steps under fp16 autocast that end in `step`."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with find_nonfinite(model) as finder:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(1, 3)).float().square().sum()
            scaler.scale(loss).backward()
            step(scaler, optimizer)
    return model, finder.report


@does("nonfinite.bypassed")
@pytest.mark.parametrize("scale", [2.0**12, 2.0**24], ids=["not divided", "not skipped"])
def test_an_optimizer_that_steps_without_the_scaler(scale):
    def plain(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        scaler.update(scaler.get_scale())

    model, report = scaled_steps(plain, scale, steps=9)
    assert report is not None
    assert codes(report)[0] == "bypassed"
    assert not all(p.isfinite().all() for p in model.parameters())
    assert "scaler.step(optimizer) and scaler.update()" in report.advice

    def with_scaler(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    model, report = scaled_steps(with_scaler, scale, steps=9)
    assert all(p.isfinite().all() for p in model.parameters())
    assert report is None or not report.bypassed


@does("nonfinite.half_weights")
def test_weights_that_are_trained_in_fp16():
    model = linear().half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = {"scaler": scaler, "loss_fn": lambda y: y.float().sum()}
    report = find(model, torch.ones(1, 3).half(), **total)
    advice = only(report, "half_weights")
    refused = pytest.raises(ValueError, match="Attempting to unscale FP16 gradients")
    with refused as raised, ScaleLog(scaler):
        scaler.step(optimizer)
    assert raised.value.__notes__ == [f"ScaleLog: {REMEDIES['nonfinite.half_weights'].text}"]
    assert "dtype=torch.float32, or call model.float()" in advice
    model.float()
    report = find(model, torch.ones(1, 3), autocast=torch.float16, **total)
    assert codes(report) == ["loss_scale", "fp16_overflow.autocast"]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**23
    assert "Or use bf16 without a GradScaler: model.bfloat16() and bf16 inputs" in advice
    assert healed(linear().bfloat16(), torch.ones(1, 3).bfloat16(), loss_fn=total["loss_fn"])


def loaded_in_fp16() -> nn.Module:
    model = nn.Linear(3, 2, dtype=torch.float16)
    model.load_state_dict(linear(torch.float16).state_dict())
    return model


IN_FP16 = {
    "half": lambda: linear().half(),
    "to": lambda: linear().to(torch.float16),
    "dtype": loaded_in_fp16,
}


@pytest.mark.parametrize("made", IN_FP16)
def test_advice_on_weights_in_fp16_holds_however_they_were_made(made):
    model = IN_FP16[made]()
    x = torch.full((1, 3), 1e4, dtype=torch.float16)
    with torch.no_grad():
        model.weight.fill_(100.0)
    forward = found(model, x)
    assert codes(forward) == ["fp16_overflow.cast"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    total = {"scaler": scaler, "loss_fn": lambda y: y.float().sum()}
    backward = found(IN_FP16[made](), torch.ones(1, 3, dtype=torch.float16), **total)
    assert codes(backward) == ["half_weights"]
    for advice in (forward.advice, backward.advice):
        assert "half()" not in advice


def test_no_remedy_supposes_that_weights_were_cast_with_half():
    about = [r for code, r in REMEDIES.items() if code.startswith("nonfinite.")]
    assert [r.code for r in about if "half()" in r.text + r.when] == []


def test_an_adapter_in_fp32_on_a_frozen_model_in_fp16_can_be_unscaled():
    frozen = nn.Linear(2, 2).half().requires_grad_(False)
    model = nn.Sequential(linear(), frozen)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    options = {"autocast": torch.float16, "scaler": scaler, "loss_fn": lambda y: y.float().sum()}
    assert codes(found(model, torch.ones(1, 3), **options))[0] == "loss_scale"
    scaler.step(torch.optim.SGD(model[0].parameters(), lr=0.1))


class Overflowing(nn.Module):
    """A layer whose result exceeds 65504, made small again by a norm; then another layer."""

    def __init__(self, part: Callable = lambda self, x: self.norm(self.large(x))):
        super().__init__()
        self.large, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)
        self.part = part
        with torch.no_grad():
            self.large.weight.fill_(100.0).diagonal().mul_(2)

    def forward(self, x):
        return self.last(self.part(self, x))


LARGE = torch.tensor([[400.0, 300.0, 200.0, 100.0]])  # the sums reach 100,000


@does("nonfinite.fp16_overflow.autocast")
def test_a_layer_that_overflows_under_autocast():
    fp16 = {"autocast": torch.float16, "loss_fn": lambda y: y.float().sum()}
    advice = only(find(Overflowing(), LARGE, **fp16), "fp16_overflow.autocast")
    assert "Use bf16" in advice
    assert healed(Overflowing(), LARGE, **fp16 | {"autocast": torch.bfloat16})
    assert "torch.autocast(device_type, enabled=False) and x.float()" in advice

    def in_fp32(self: Overflowing, x: torch.Tensor, device_type: str = "cpu") -> torch.Tensor:
        with eval("torch.autocast(device_type, enabled=False)"):
            return self.norm(self.large(x.float()))

    assert healed(Overflowing(in_fp32), LARGE, **fp16)


@does("nonfinite.fp16_overflow.cast")
@pytest.mark.parametrize("mixed", [False, True], ids=["half", "mixed"])
def test_a_layer_that_overflows_in_a_model_cast_to_fp16(mixed):
    def half(*part: Callable) -> nn.Module:
        return Overflowing(*part).half()

    model = half()
    if mixed:  # a head that someone left in fp32
        model.last.float()
        model.norm.register_forward_hook(lambda module, inputs, output: output.float())
    options = {"loss_fn": lambda y: y.float().sum()}
    advice = only(find(model, LARGE.half(), **options), "fp16_overflow.cast")
    assert "model.bfloat16() and bf16 inputs" in advice
    assert healed(Overflowing().bfloat16(), LARGE.bfloat16(), **options)
    assert re.search(r"'cpu', autocast runs addmm .*fp16", advice)
    assert not healed(Overflowing(), LARGE, autocast=torch.float16, **options)
    assert "part.float() on x.float()" in advice

    def in_fp32(self: Overflowing, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.large(x.float())).to(x.dtype)

    model = half(in_fp32)
    model.large.float()
    model.norm.float()
    assert healed(model, LARGE.half(), **options)
    # The advice for autocast would raise here.
    with pytest.raises(RuntimeError, match="dtype"), torch.autocast("cpu", enabled=False):
        half().large(LARGE.float())


class Behind(nn.Module):
    """A linear layer, and an op on its output, which is fp16 under autocast to fp16."""

    def __init__(self, op: Callable):
        super().__init__()
        self.linear, self.op = nn.Linear(2, 2, bias=False), op
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(2))

    def forward(self, x):
        return self.op(self.linear(x))


OPS = {  # each with values for which it overflows in fp16
    "mul": (lambda x: x * x, 300.0),
    "exp": (torch.exp, 20.0),
    "sum": (lambda x: x.sum(), 4e4),
    "_softmax": (lambda x: x.softmax(-1), 1.0),  # asked about, and never at fault
    "mse_loss": (lambda x: F.mse_loss(x, torch.zeros_like(x)), 300.0),
    "prod": (torch.prod, 300.0),
    "exp_": (lambda x: (x * 1).exp_(), 20.0),
}
FP32_ON_CPU = ("mse_loss", "prod")
FP32_ON_CUDA = ("exp", "sum", "_softmax", "mse_loss", "prod")


@does("nonfinite.fp16_overflow.cast", "nonfinite.fp16_overflow.fp32_op")
@pytest.mark.parametrize("name", [name for name in OPS if name != "_softmax"])
def test_autocast_is_advised_where_it_runs_the_op_in_fp32_alone(name):
    op, value = OPS[name]
    x = torch.full((1, 2), value)
    total = {"loss_fn": lambda y: y.float().mean() * 1e-6}
    report = found(Behind(op).half(), x.half(), **total)
    assert report.op == name
    helps = name in FP32_ON_CPU
    assert codes(report)[-1] == f"fp16_overflow.{'fp32_op' if helps else 'cast'}"
    assert healed(Behind(op), x, autocast=torch.float16, **total) == helps
    advised = f"use torch.autocast: on 'cpu', autocast runs {name} in fp32"
    refused = f"on 'cpu', autocast leaves {name} in the dtype of its inputs"
    assert (advised in report.advice) == helps
    assert (refused in report.advice) == (not helps)
    assert "An op without weights needs only x.float()" in report.advice
    assert healed(Behind(lambda x: op(x.float())).half(), x.half(), **total)
    assert healed(Behind(op).bfloat16(), x.bfloat16(), **total)


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps"])
@pytest.mark.parametrize("name", OPS)
def test_what_autocast_does_with_an_op_is_that_of_its_device(name, device_type):
    report = found(Behind(OPS["mul"][0]).half(), torch.full((1, 2), 300.0).half())
    value = dataclasses.replace(report.value, device_type=device_type)
    there = dataclasses.replace(report, op=name, kernel=name, value=value)
    helps = name in FP32_ON_CUDA
    assert codes(there)[-1] == f"fp16_overflow.{'fp32_op' if helps else 'cast'}"
    assert f"on {device_type!r}" in there.advice


def test_autocast_on_a_device_without_a_table_is_not_advised():
    report = found(Behind(OPS["mul"][0]).half(), torch.full((1, 2), 300.0).half())
    value = dataclasses.replace(report.value, device_type="hpu")
    there = dataclasses.replace(report, op="exp", value=value)
    assert codes(there)[-1] == "fp16_overflow.cast"
    assert re.search(r"does not know .* 'hpu'", there.advice)


def test_the_advice_is_in_the_error_that_is_raised_at_the_op():
    model = Behind(OPS["mul"][0]).half()
    with pytest.raises(NumericsError, match="autocast leaves mul in"):  # noqa: SIM117
        with find_nonfinite(model, raise_on_first=True):
            model(torch.full((1, 2), 300.0).half())


@does("nonfinite.fp16_overflow.gradient")
def test_a_gradient_that_exceeds_fp16_where_the_weights_are_fp16():
    total = {"loss_fn": lambda y: y.float().sum() * 2.0**18}
    x = torch.ones(1, 3)
    report = found(linear().half(), x.half(), **total)
    advice = only(report, "fp16_overflow.gradient")
    assert "model.bfloat16() and bf16 inputs" in advice
    assert healed(linear().bfloat16(), x.bfloat16(), **total)
    assert "train under torch.autocast with a GradScaler" in advice
    model, scaler = linear(), torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-18)
    before, scales = model.weight.clone(), []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        scaler.scale(total["loss_fn"](output)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == 0.5  # the first step was skipped
    assert scales[-1] == scales[-2]  # and the last one was not
    assert not torch.equal(model.weight, before)


@does("nonfinite.attention_scores")
def test_attention_scores_that_overflow():
    q = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)  # a score is 64 * 1600

    def model(scores: Callable) -> Apply:
        return Apply(lambda x: scores(x).softmax(-1) @ x, torch.float16)

    advice = only(find(model(lambda x: x @ x.mT), q), "fp16_overflow.cast", "attention_scores")
    assert "divide the queries by sqrt(d) before the matmul" in advice
    assert healed(model(lambda x: (x / math.sqrt(64)) @ x.mT), q)
    assert "F.scaled_dot_product_attention" in advice
    fused = Apply(lambda x: F.scaled_dot_product_attention(x, x, x), torch.float16)
    assert healed(fused, q)


@does("nonfinite.range")
def test_a_result_beyond_fp32():
    total = {"loss_fn": torch.sum}
    grown = Apply(lambda x: x * torch.tensor(1e30))
    advice = only(find(grown, torch.tensor([1e10]), **total), "range")
    assert "why the inputs are so large" in advice
    assert healed(grown, torch.tensor([1e5]), **total)
    at_one = Apply(torch.atanh)
    assert "the op is infinite at an input" in only(find(at_one, torch.ones(1), **total), "range")
    assert healed(at_one, torch.tensor([0.9]), **total)


@does("nonfinite.backward.other")
def test_another_derivative_that_is_infinite():
    def model(function: Callable) -> Apply:
        return Apply(function)

    x = torch.tensor([0.0, 1.0])
    total = {"loss_fn": torch.sum}
    advice = only(find(model(torch.special.entr), x, **total), "backward.other")
    assert "Before the op" in advice
    behind = model(lambda x: torch.where(x > 0.5, torch.special.entr(x), 0.0))
    assert find(behind, x, **total) is not None
    before = model(lambda x: torch.special.entr(x.clamp_min(1e-4)))
    assert healed(before, x, **total)


@does("nonfinite.xlogy")
def test_xlogy_of_a_negative_number():
    x = torch.tensor([-1.0, 2.0])
    total = {"loss_fn": torch.sum}
    advice = only(find(Apply(lambda x: torch.xlogy(1.0, x)), x, **total), "xlogy")
    assert "Clamp the second argument" in advice
    assert healed(Apply(lambda x: torch.xlogy(1.0, x.clamp_min(1e-6))), x, **total)


@does("nonfinite.div")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_division_by_zero(dtype):
    x = torch.zeros(2, 3, dtype=dtype)

    def model(function: Callable) -> Apply:
        return Apply(function, dtype)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.detach().norm(dim=-1, keepdim=True)

    advice = only(find(model(lambda x: (x + 1) / norm(x)), x), "div")
    assert "add an eps to the divisor or clamp the divisor (F.normalize has an eps)" in advice
    assert healed(model(lambda x: (x + 1) / (norm(x) + 1e-2)), x)
    assert healed(model(lambda x: (x + 1) / norm(x).clamp_min(1e-2)), x)
    assert healed(model(lambda x: F.normalize(x, dim=-1, eps=1e-2)), x)
    assert "in fp32, on x.float(), with an eps of 1e-3 or more" in advice
    total = {"loss_fn": lambda y: y.float().sum()}
    assert healed(model(lambda x: (x + 1).float() / (norm(x.float()) + 1e-3)), x, **total)


@does("nonfinite.div")
def test_a_divisor_that_is_zero_because_it_was_rounded():
    """A noise schedule that was cast to bf16 for good: an eps would end the NaN, and be wrong."""
    schedule = torch.tensor([0.9999, 0.5])
    x = torch.ones(2)
    exact = x / (1 - schedule.double()).sqrt()

    def scaled(schedule: torch.Tensor, eps: float = 0.0) -> Apply:
        return Apply(lambda x: x / ((1 - schedule).sqrt() + eps), torch.float32)

    advice = only(find(scaled(schedule.bfloat16()), x), "div")
    assert "1 - 0.9999 is in bf16, compute it in fp32" in advice
    torch.testing.assert_close(scaled(schedule)(x).double(), exact, rtol=1e-3, atol=0)
    hidden = scaled(schedule.bfloat16(), eps=1e-3)(x)
    assert hidden.isfinite().all()
    assert hidden[0] > 5 * exact[0]


ROWS = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.5, -0.25]])  # the second is padding, say
GUARDED = {
    "a norm": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + eps),
    "F.normalize": lambda x, eps: F.normalize(x, dim=-1, eps=eps),
    "a clamped norm": lambda x, eps: x / x.norm(dim=-1, keepdim=True).clamp_min(eps),
    "a clamp": lambda x, eps: x / x.norm(dim=-1, keepdim=True).clamp(min=eps),
    "the largest": lambda x, eps: x / (x.abs().amax(-1, keepdim=True) + eps),
    "a deviation": lambda x, eps: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps),
    "a root before the division": lambda x, eps: (
        x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
    ),
    "rsqrt": lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps),
    "a reciprocal": lambda x, eps: 1 / (x.abs().amax(-1, keepdim=True) + eps),
    "in place": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) * 1).add_(eps),
    "a logarithm": lambda x, eps: torch.log(x.abs() + eps),
    "a root, backward": lambda x, eps: torch.sqrt(x.square().sum(-1) + eps),
}


def scaled_gradient(function: Callable, x: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of x, of a loss that is the mean over some thousand rows, and scaled."""
    x = x.clone().requires_grad_()
    (function(x).to(torch.float64).sum() * (1e-4 * scale)).backward()
    assert x.grad is not None
    return x.grad


@does("nonfinite.eps")
@pytest.mark.parametrize("name", GUARDED)
def test_an_eps_that_is_zero_in_fp16(name):
    function = GUARDED[name]
    model = Apply(lambda x: function(x, 1e-8), torch.float16)
    report = found(model, ROWS.half(), loss_fn=lambda y: y.float().sum())
    advice = only(report, "eps")
    assert report.eps == 1e-8
    assert "eps of 1e-08 is 0 " in advice
    assert torch.tensor(1e-8).half() == 0
    assert "in fp32, on x.float(), with an eps of 1e-3 or more" in advice
    scale = 65536.0
    cured = scaled_gradient(lambda x: function(x.float(), 1e-3), ROWS.half(), scale)
    exact = scaled_gradient(lambda x: function(x, 1e-3), ROWS.double(), 1.0)
    assert cured.dtype is torch.float16
    assert "you can keep the eps" in advice
    assert function(ROWS.float(), 1e-8).isfinite().all()
    assert "cast the result back with .to(x.dtype)" in advice
    x = ROWS.half()
    in_fp32 = function(x.float(), 1e-3)
    layer = torch.nn.Linear(in_fp32.shape[-1], 2).half()
    with pytest.raises(RuntimeError):
        layer(in_fp32)
    assert layer(in_fp32.to(x.dtype)).dtype is torch.float16
    # One cast to fp16, of 11 bits; where terms of about 0.1 cancel, what fp32 leaves of them.
    torch.testing.assert_close(cured.double() / scale, exact, rtol=2**-10, atol=1e-8)


def test_an_eps_of_1e_4_in_fp16_is_not_enough():
    def reciprocal(x: torch.Tensor) -> torch.Tensor:
        return GUARDED["a reciprocal"](x, 1e-4)

    assert reciprocal(ROWS.half()).isfinite().all()
    assert not scaled_gradient(reciprocal, ROWS.half(), 65536.0).isfinite().all()
    assert scaled_gradient(lambda x: reciprocal(x.float()), ROWS.half(), 65536.0).isfinite().all()


def test_an_eps_that_counts_is_not_blamed():
    for guarded in (
        lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8) + x.mul(0).log(),  # in fp32
        lambda x: (x + 1e-8).half().mul(0).log(),
        lambda x: (x.half() + 1e-8) * 1e4 * 1e4,
        lambda x: 1 / (x.mul(0).half() + (x.half() + 1e-8)[:1].mul(0)),
    ):
        x = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
        report = found(Apply(guarded), x, loss_fn=lambda y: y.float().sum())
        assert "eps" not in codes(report)


@does("nonfinite.exp")
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 88.8), (torch.bfloat16, 88.8), (torch.float16, 11.1)]
)
def test_an_exponential_that_overflows(dtype, limit):
    for x, is_finite in ((limit - 0.7, True), (limit + 0.8, False)):
        assert torch.tensor(x).to(dtype).exp().isfinite() == is_finite
    assert torch.tensor(limit).to(dtype).exp().isinf()
    x = torch.tensor([2 * limit, 1.0], dtype=dtype)
    total = {"loss_fn": lambda y: y.float().sum()}
    report = found(Apply(lambda x: x.exp(), dtype), x, **total)
    if dtype is torch.float16:
        assert codes(report) == ["exp", "fp16_overflow.cast"]
    else:
        assert codes(report) == ["exp"]
    assert "Subtract the largest value first" in report.advice
    for cured in (lambda x: (x - x.max()).exp(), lambda x: F.softplus(x)):
        assert healed(Apply(cured, dtype), x, **total)
    assert "1 / (1 + exp(-x)), use torch.sigmoid" in report.advice
    by_hand = Apply(lambda x: 1 / (1 + torch.exp(x)), dtype)
    assert "exp" in codes(found(by_hand, x, **total))
    assert healed(Apply(lambda x: torch.sigmoid(-x), dtype), x, **total)


@does("nonfinite.nll_loss")
def test_a_loss_over_no_targets():
    ignored = torch.tensor([-100, -100])
    x = torch.ones(2, 3)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y, ignored)

    advice = only(find(linear(), x, loss_fn=loss), "nll_loss")
    assert "reduction='sum' and divide by max(number of targets, 1)" in advice

    def summed(y: torch.Tensor) -> torch.Tensor:
        targets = (ignored != -100).sum().clamp_min(1)
        return F.cross_entropy(y, ignored, reduction="sum") / targets

    assert healed(linear(), x, loss_fn=summed)


@does("nonfinite.cast")
def test_a_cast_that_does_not_fit():
    x = torch.tensor([1e6, 1.0])
    total = {"loss_fn": lambda y: y.float().sum()}
    report = found(Apply(lambda x: x.half()), x, **total)
    assert codes(report) == ["cast", "fp16_overflow.autocast"]
    assert "Clamp the value before the cast. Instead of fp16, you can also use bf16" in (
        report.advice
    )
    assert healed(Apply(lambda x: x.clamp(-65504, 65504).half()), x, **total)
    assert healed(Apply(lambda x: x.bfloat16()), x, **total)


@does("nonfinite.other")
def test_a_product_of_zero_and_infinity():
    large = torch.tensor(3e38)
    advice = only(find(Apply(lambda x: (x * large * 10 * 0).sum()), torch.ones(1)), "range")
    assert "why the inputs are so large" in advice
    model = Apply(lambda x: torch.fmod(x, 0.0))
    assert "why an input is zero" in only(find(model, torch.ones(1)), "other")
    assert healed(Apply(lambda x: torch.fmod(x, 1.0)), torch.ones(1))


def test_the_page_shows_what_is_said_today():
    page = (Path(__file__).parents[2] / "docs" / "when_it_breaks.md").read_text()
    said = REMEDIES["nonfinite.fp16_overflow.autocast"].sentence(what="The result")
    assert f"{said} {REMEDIES['nonfinite.attention_scores'].text}" in " ".join(page.split())


@does("nonfinite.fp16_overflow.sum")
def test_a_sum_in_the_loss_that_overflows_needs_fp32():
    """bf16 has the range, but a loss such as 1 - x / y loses its digits."""

    def dice_loss(y: torch.Tensor) -> torch.Tensor:
        return 1 - 2 * y.sum() / (y + 1).sum()

    x = torch.linspace(0.96, 0.999, 2**18)[None]
    model = Apply(lambda y: y, torch.float16)
    advice = only(find(model, x.half(), loss_fn=dice_loss), "fp16_overflow.sum")
    assert "call .float() on the output of the model" in advice
    assert healed(model, x.half(), loss_fn=lambda y: dice_loss(y.float()))
    exact = dice_loss(x.double())
    assert abs(dice_loss(x.half().float()) / exact - 1) < 0.01
    assert abs(dice_loss(x.bfloat16()) / exact - 1) > 0.1


@does("nonfinite.weights_grew")
@pytest.mark.parametrize("divided", [True, False])
def test_weights_after_a_step_with_gradients_that_were_not_divided(divided):
    """In a loop with its own loss scale, as in fp16_util."""
    scale = 2.0**16
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    (layer(x).square().mean() * scale).backward()
    for parameter in layer.parameters():
        if divided:
            parameter.grad.div_(scale)
        parameter.data.sub_(0.5 * parameter.grad)
    layer.zero_grad()
    half = layer.half()
    report = find(half, x.half() * 100, loss_fn=lambda y: y.float().mean())
    if divided:
        assert report is None
    else:
        assert codes(report) == ["weights_grew", "fp16_overflow.cast"]
        assert "every gradient is divided by the loss scale" in report.advice


def test_an_eps_that_is_lost_before_a_division_and_a_logarithm():
    """The log of a width or height divided by that of the anchor, as in a box coder."""

    def encode(size: torch.Tensor) -> torch.Tensor:
        return torch.log((size + 1e-8) / (torch.full_like(size, 32.0) + 1e-8))

    sizes = torch.tensor([16.0, 0.0])
    model = nn.Linear(1, 1)
    report = find(model, torch.ones(1, 1), loss_fn=lambda y: (y - encode(sizes.half())).mean())
    advice = only(report, "eps")
    assert "such as targets, fp32 is enough" in advice
    assert encode(sizes.half().float()).isfinite().all()
