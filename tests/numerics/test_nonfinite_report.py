"""What find_nonfinite says of what it found."""

import math
import re

import pytest
import torch
from planted_faults import FAULTS, Module, find

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


def test_the_report_has_what_one_needs():
    def fault(x):
        return torch.log(x * torch.tensor([0.0, 1.0, -1.0])).nan_to_num(nan=0.0, neginf=-math.inf)

    model = Module(fault)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.copy_(torch.tensor([5.0, 2.0, 3.0]))
    report = find(model, torch.randn(2, 3))
    assert (report.phase, report.module, report.module_type) == ("forward", "fault", "Function")
    assert (report.call, report.op, report.kernel, report.tensor) == (1, "log", "log", "output")
    value = report.value
    assert (value.dtype, value.shape, value.values) == (torch.float32, (2, 3), 6)
    assert (value.nan, value.inf, value.neg_inf) == (2, 0, 2)
    assert value.low == value.high == pytest.approx(math.log(2))
    (given,) = report.inputs
    assert (given.name, given.low, given.high) == ("self", -3.0, 2.0)
    assert not given.kinds
    assert report.line.startswith("test_nonfinite_report.py:")
    assert "fault: return torch.log(x * torch.tensor" in report.line
    assert report.reached in ("the output of the model", "a single number outside the model")
    assert "clamp_min" in report.advice
    text = str(report)
    assert text.startswith("NaN and -inf ")
    assert "forward by log: 'fault' (Function)" in text.partition("\n")[0]
    assert repr(report) == text
    for part in ("66.7 % non-finite (2 NaN, 2 -inf)", "from -3 to 2", report.line, report.advice):
        assert part in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attention scores that overflow fp16", "65504"),
        ("attention scores that overflow fp16", "scaled_dot_product_attention"),
        ("a row of attention that is masked everywhere", "so softmax gets no finite value"),
        ("division by a zero norm", "eps"),
        ("exp that overflows", "Subtract the largest"),
        ("the mean of no values", "no values"),
        ("all targets ignored", "ignore_index"),
        ("inf in a weight", "last good checkpoint"),
        ("NaN in a running mean", "reset_running_stats"),
        ("NaN in the images", "Check the data"),
        ("NaN in the target", "targets"),
        ("sqrt at zero", "sqrt(x + 1e-6)"),
        ("where that discards a log of zero", "torch.where"),
        ("a cast to fp16 that overflows", "bf16"),
    ],
)
def test_the_advice_fits_the_fault(name, words):
    model, x, options = FAULTS[name][0]()
    report = find(model, x, **options)
    assert words in report.advice
    assert report.advice[0].isupper()


def full(value, dtype=torch.float32):
    """A function that turns any tensor into one of this value and dtype."""
    return lambda x: (x * 0 + value).to(dtype)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda x: full(1e30)(x) / full(1e-30)(x), "exceeds the range of float32"),
        (lambda x: full(1e38)(x) / full(-0.1)(x), "exceeds the range of float32"),
        (lambda x: full(1e30)(x) / full(0.0)(x), "The divisor is 0"),
        (lambda x: full(1e-39)(x).reciprocal(), "exceeds the range of float32"),
        (lambda x: (1e30 * x.sign()).var(0, keepdim=True), "exceeds the range of float32"),
        (lambda x: torch.exp2(full(129.0)(x)), "in fp32 and bf16 from x = 128 on"),
        (lambda x: torch.atanh(full(1.0, torch.float16)(x)), "or the op is infinite at an input"),
        (lambda x: torch.logit(full(1.0, torch.float16)(x)), "logit is infinite at 0 and 1"),
        (lambda x: torch.atanh(full(2.0)(x)), "is not defined at an input"),
        (lambda x: torch.xlogy(full(2.0)(x), full(0.0)(x)), "xlogy is 0 or negative"),
        (lambda x: full(3.4e38)(x).to(torch.bfloat16), "Clamp the value before the cast"),
    ],
)
def test_the_advice_fits_the_inputs_of_the_op(fault, words):
    report = find(Module(lambda x: fault(x).float()), torch.randn(4, 3))
    assert report.phase == "forward"
    assert words in report.advice
    assert "exceeds 65504" not in report.advice


@pytest.mark.parametrize(
    ("fault", "absent"),
    [
        (lambda x: torch.log_softmax(full(1.0)(x), -1), "derivative of log"),
        (lambda x: torch.linalg.inv(full(1e-10)(x.mean()) * torch.eye(3)), "eigenvalues"),
    ],
)
def test_a_derivative_is_not_taken_for_that_of_a_similar_name(fault, absent):
    def fault_of_large_gradient(x):
        result = fault(x)
        result.register_hook(lambda gradient: gradient.sign() * 3e38)
        return result

    report = find(Module(fault_of_large_gradient), torch.randn(3, 3))
    assert report.phase == "backward"
    assert "its product with the gradient is too large" in report.advice
    assert absent not in report.advice


def test_a_mask_that_softmax_could_not_make_finite_is_named():
    model, x, options = FAULTS["a row of attention that is masked everywhere"][0]()
    assert find(model, x, **options).placed_by == "buffer 'blocks.0.mask'"


def test_the_loss_scale_is_told_and_not_called_a_fault():
    model, x, options = FAULTS["the loss scale overflows fp16"][0]()
    report = find(model, x, **options)
    assert report.loss_scale == 2.0**30
    assert "GradScaler handles this" in report.advice
    assert "loss scale" in str(report)
    assert report.kernel == "_to_copy"
    plain = FAULTS["sqrt at zero"][0]()
    report = find(*plain[:2], **plain[2])
    assert report.loss_scale is None
    assert "GradScaler" not in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_remedy_for_a_logit_helps_in_every_dtype(dtype):
    report = find(Module(lambda x: torch.logit(x.sign().clamp(0, 1))), torch.randn(4, 3))
    (code,) = re.findall(r"torch\.logit\(.*?\)(?=\.)", report.advice)
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    assert not torch.logit(ends, eps=0.0).isfinite().any()
    assert eval(code, {"torch": torch, "x": ends}).isfinite().all()
