"""`first_difference`: planted faults are named, sound pairs are not, and what it refuses."""

import copy
import json
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import needs_lstm
from diverging_models import (
    FAULTS,
    INPUTS,
    AsCompiled,
    ConvNet,
    Fault,
    Lstm,
    ResidualMlp,
    Transformer,
    make,
    runner,
)
from remedy_tests import says
from torch import nn

from amp_lab import first_difference
from amp_lab.core.errors import NumericsError
from amp_lab.difference import compare_runs, compiled

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

QUICK = {fault: number % 4 == 0 for number, fault in enumerate(FAULTS)}


def test_there_are_enough_faults_for_the_proof():
    assert len(FAULTS) >= 50
    assert {fault.model for fault in FAULTS} == set(INPUTS)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=f"{number}-{fault.name}", marks=() if quick else pytest.mark.slow)
        for number, (fault, quick) in enumerate(QUICK.items())
    ],
)
def test_a_planted_fault_is_named(fault: Fault):
    sound, faulty = fault.models()
    ways = fault.runs.split()
    x = INPUTS[fault.model](3)
    found = first_difference(runner(sound, ways[0]), runner(faulty, ways[-1]), x)
    assert found is not None
    assert found.module == fault.module, found
    assert not fault.ops or found.op in fault.ops, found
    # All but another order of a sum are more than rounding explains; NaN: it has no counterpart.
    assert (found.size <= found.predicted) == (found.kind == "order")


def in_fp16(model):
    def run(x):
        with torch.autocast("cpu", torch.float16):
            return model(x)

    return run


def with_two_threads(model):
    def run(x):
        torch.set_num_threads(2)
        try:
            return model(x)
        finally:
            torch.set_num_threads(1)

    return run


def channels_last(model):
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    return lambda x: other(x.contiguous(memory_format=torch.channels_last))


SOUND: dict[str, tuple[Callable, Callable]] = {
    "fp32 and bf16": (lambda m: m, lambda m: runner(m, "bf16")),
    "bf16 and fp32": (lambda m: runner(m, "bf16"), lambda m: m),
    "fp32 and fp16": (lambda m: m, in_fp16),
    "bf16 and fp16": (lambda m: runner(m, "bf16"), in_fp16),
    "fp32 and bf16 weights": (
        lambda m: m,
        lambda m: runner(copy.deepcopy(m).bfloat16(), "weights"),
    ),
    "two batch sizes": (lambda m: m, lambda m: lambda x: m(x[:2])),
    "two batch sizes, in two formats": (
        lambda m: lambda x: m(x[:3]),
        lambda m: runner(m, "bf16"),
    ),
    "one thread and two": (lambda m: m, with_two_threads),
    "twice the same": (lambda m: m, copy.deepcopy),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("pair", SOUND)
def test_a_sound_pair_is_told_nothing(kind, pair):
    first, second = SOUND[pair]
    model = make(kind)
    assert first_difference(first(model), second(model), INPUTS[kind](6)) is None


class LastStates(nn.Module):
    """The last hidden and cell states of an LSTM, and not its outputs."""

    def __init__(self, layers, bidirectional):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, layers, bidirectional=bidirectional, batch_first=True)

    def forward(self, x):
        _, (hidden, cell) = self.lstm(x)
        return hidden[-1] + 0.1 * cell[-1]


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_the_last_states_of_an_lstm_differ_by_no_more_than_rounding(layers, bidirectional):
    needs_lstm(torch.bfloat16)
    model = LastStates(layers, bidirectional)
    assert first_difference(model, runner(model, "bf16"), torch.randn(3, 5, 4)) is None


@pytest.mark.parametrize("kind", [Transformer, Lstm, ResidualMlp])
def test_train_and_eval_are_the_same_without_dropout_and_batch_norm(kind):
    model = make(kind)
    training = copy.deepcopy(model).train()
    assert first_difference(model, training, INPUTS[kind](4)) is None


def test_memory_formats_and_batch_norm_in_training():
    model, x = make(ConvNet), INPUTS[ConvNet](4)
    assert first_difference(model, channels_last(model), x) is None
    model.train()
    before = copy.deepcopy(model.state_dict())
    assert first_difference(model, runner(model, "bf16"), x) is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed"
    found = first_difference(model, copy.deepcopy(model).eval(), x)
    assert found.op == "native_batch_norm"


def test_dropout_draws_the_same_in_both_and_leaves_the_generator_alone():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    state = torch.get_rng_state()
    assert first_difference(model, runner(model, "bf16"), torch.randn(4, 6)) is None
    state_after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(4, 6)
    assert torch.equal(torch.get_rng_state(), state_after)


class ByHand(nn.Module):
    """Attention as five ops, or as one."""

    def __init__(self, fused):
        super().__init__()
        self.out, self.fused = nn.Linear(8, 8), fused

    def forward(self, x):  # (B, T, 8)
        if self.fused:
            return self.out(F.scaled_dot_product_attention(x, x, x))
        return self.out((x @ x.mT * 8**-0.5).softmax(-1) @ x)


def test_logs_of_unequal_length_are_aligned_and_other_ops_to_the_same_result_are_none():
    torch.manual_seed(0)
    one, other = ByHand(fused=True), ByHand(fused=False)
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 5, 8)
    compared = compare_runs(one, other, x)
    assert compared.first is None
    assert compared.only_a < compared.only_b
    other.out.weight.data[0] += 0.01
    found = first_difference(one, other, x)
    assert (found.module, found.op, found.kind) == ("out", "addmm", "function")
    assert "the values of 'out.weight' differ" in found.reason


def test_the_reason_says_what_is_different():
    sound, faulty = make(ResidualMlp), make(ResidualMlp)
    faulty.layers[1].norm.eps = 1e-3
    found = first_difference(sound, faulty, INPUTS[ResidualMlp](4))
    assert "(12, 1e-05) and B passes (12, 0.001)" in found.reason
    assert found.module_type == "LayerNorm"
    read = json.loads(found.to_json())
    assert read["module"] == "layers.1.norm"
    assert read["dtype_a"] == "float32"


def test_an_overflow_in_fp16_is_named():
    model = make(ResidualMlp)
    model.layers[1].up.weight.data *= 3e5
    found = first_difference(model, in_fp16(model), INPUTS[ResidualMlp](4))
    assert (found.module, found.kind) == ("layers.1.up", "nonfinite")
    assert found.dtype_b is torch.float16
    assert re.search(r"NaN where fp64 .*489675, ", found.reason)  # inf - inf, in the sum
    assert re.search(r"overflows fp16 .*65504\)\.$", found.reason)


class Squares(nn.Module):
    """What overflows fp16 is no module's result."""

    def __init__(self, factor=400):
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(6, 8), nn.Linear(8, 2), factor

    def forward(self, x):
        y = self.up(x) * self.factor
        return self.down(y * y / (y * y).sum(-1, keepdim=True).sqrt())


class Ratio(nn.Module):
    """An eps that fp16 rounds to 0."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x):
        y = self.up(x).relu()
        return y / (y + 1e-9)


class Stream(nn.Module):
    """A residual stream in fp32, which fp16 does not hold, into a layer that autocast casts it for.

    All of it cancels in the layer.
    """

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(6, 2, bias=False)
        self.down.weight.data[:] = torch.tensor([1.0, -1, 1, -1, 1, -1])

    def forward(self, x):
        return self.down(x.float() * 0 + 1e5)


def in_halves(model):
    halved = copy.deepcopy(model).half()
    return lambda x: halved(x.half())


@pytest.mark.parametrize(
    ("kind", "way", "op", "said"),
    [
        (Squares, in_fp16, "mul", r" inf where fp64 .*up to \d"),
        (Squares, in_halves, "mul", r"overflows fp16 .*65504\)\."),
        (Ratio, in_halves, "div", r" NaN where fp64 .*up to 1\."),
        (Stream, in_fp16, "mm", r" NaN where fp64 .*up to 0\."),
    ],
)
def test_what_is_finite_in_one_run_alone_is_said_to_be_so(kind, way, op, said):
    torch.manual_seed(3)
    model, x = kind(), torch.randn(5, 6)
    for runs in ((model, way(model)), (way(model), model)):
        found = first_difference(*runs, x)
        assert (found.kind, found.op) == ("nonfinite", op)
        assert re.search(said, found.reason)
        assert "not finite" in str(found)
    assert first_difference(way(model), way(model), x) is None


def test_errors_grow_with_the_format():
    model = make(Transformer)
    compared = compare_runs(model, runner(model, "bf16"), INPUTS[Transformer](3))
    assert compared.growth[-1].a < 2e-6 < compared.growth[-1].b < 0.1
    assert max(step.apart for step in compared.growth) < 1e-10
    assert "The runs do not diverge" in str(compared)


class Cancels(nn.Module):
    """A mean that is much larger than what is left when it is subtracted."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        y = self.up(x) + 500
        return self.down(y - y.mean(-1, keepdim=True))


class Underflows(nn.Module):
    """A weight that fp16 rounds to 0."""

    def __init__(self):
        super().__init__()
        self.scale, self.down = nn.Parameter(torch.full((6,), 1e-8)), nn.Linear(6, 2, bias=False)

    def forward(self, x):
        return self.down(x * self.scale * 1e8)


class AddsLittle(nn.Module):
    """The same, added to what is much larger."""

    def __init__(self):
        super().__init__()
        self.small, self.large = Cancels(), nn.Linear(6, 2)

    def forward(self, x):
        return 100 * self.large(x) + self.small(x) / 1000


@pytest.mark.parametrize("low", ["A", "B"])
@pytest.mark.parametrize(("kind", "op"), [(Cancels, "sub"), (Underflows, "mul")])
def test_errors_that_grow_are_said_to_grow_and_where(kind, op, low):
    torch.manual_seed(3)
    model, x = kind(), torch.randn(5, 6)
    runs = [in_halves(model), model] if low == "A" else [model, in_halves(model)]
    compared = compare_runs(*runs, x)
    assert compared.first is None  # each op rounds as its format does
    assert max(compared.end_a, compared.end_b) > 0.1
    said = " ".join(str(compared).split())
    assert "do not diverge" not in said
    assert re.search(r"No single op .*errors grow", said)
    if kind is Underflows and low == "A":
        return  # then fp32 is the run that is off, from weights that are 0
    assert (compared.jump.run, compared.jump.op, compared.jump.module_type) == (
        low,
        op,
        kind.__name__,
    )
    assert compared.jump.before < 0.01 < 0.1 < compared.jump.after
    assert f"In {low}, the error grows most at {op} in the model itself ({kind.__name__})" in said
    assert json.loads(compared.to_json())["jump"]["op"] == op


def test_an_error_that_is_lost_again_is_not_where_errors_grow():
    torch.manual_seed(3)
    model, x = AddsLittle(), torch.randn(5, 6)
    compared = compare_runs(model, in_halves(model), x)
    assert max(step.b for step in compared.growth) > 0.1
    assert compared.end_b < 0.01
    assert "do not diverge" in str(compared)
    assert compared.jump is None or compared.jump.after < 0.01


def test_the_end_is_what_a_run_returns():
    """Not its last op, where that goes into another result."""

    def run(x):
        small = x.half() / 3 if x.dtype is torch.float64 else x / 3
        return small, (x * 0).sum()

    compared = compare_runs(lambda: run(torch.ones(4)), lambda: run(torch.ones(4).double()))
    assert compared.growth[-1].b == 0
    assert compared.end_b > 1e-5


def gelu_is_another(graph, examples):
    """A compiler that makes a mistake."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and "gelu" in str(node.target):
            node.kwargs = {"approximate": "tanh"}
    graph.recompile()
    return graph.forward


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_it_is_said_that_gradients_of_a_compiled_model_are_not_compared(first):
    model, x = make(ResidualMlp), INPUTS[ResidualMlp](4)
    runs = (model, AsCompiled(model)) if first == "eager" else (AsCompiled(model), model)
    compared = compare_runs(*runs, x)
    assert compared.first is None
    assert compared.end_a == compared.end_b < 1e-5
    assert "Gradients were not compared" in str(compared)
    assert "Gradients" not in str(compare_runs(model, model, x))


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_the_errors_of_a_compiled_model_are_those_of_its_run(first, monkeypatch):
    """Also in `growth`, which a figure draws."""
    model, x = make(ResidualMlp), INPUTS[ResidualMlp](4)
    errors = compiled._ModuleErrors(eager=1e-7, compiled=1e-3, predicted=1.0, dtype=torch.float32)
    monkeypatch.setattr(compiled, "_measure", lambda *arguments: errors)
    runs = (model, AsCompiled(model)) if first == "eager" else (AsCompiled(model), model)
    compared = compare_runs(*runs, x)
    expected = (1e-7, 1e-3) if first == "eager" else (1e-3, 1e-7)
    assert (compared.end_a, compared.end_b) == expected
    assert (compared.growth[0].a, compared.growth[0].b) == expected


@pytest.mark.slow
def test_a_compiled_model_is_compared_module_by_module():
    model, x = make(ResidualMlp), INPUTS[ResidualMlp](4)
    torch._dynamo.reset()
    compared = compare_runs(model, torch.compile(model, backend="eager"), x)
    assert compared.first is None
    assert "Gradients were not compared" in str(compared)
    torch._dynamo.reset()
    found = first_difference(model, torch.compile(model, backend=gelu_is_another), x)
    assert (found.kind, found.module, found.op) == ("module", "layers.0", None)
    assert found.size > found.predicted
    with pytest.raises(NumericsError, match="other modules"):
        first_difference(make(Lstm), torch.compile(model, backend="eager"), x)


def raises(x):
    raise ValueError("no such file")


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (nn.Linear(6, 2), nn.Sequential(nn.GELU()), "nothing to compare"),
        (nn.Linear(6, 2), raises, "B raises ValueError: no such file"),
        (nn.Linear(5, 2), nn.Linear(6, 2), "run A raises RuntimeError"),
        (nn.Identity(), nn.Linear(6, 2), "run A calls no torch op that computes"),
        (nn.Flatten(), nn.Linear(6, 2), "run A calls no torch op that computes"),
        (torch.argmax, nn.Linear(6, 2), "run A calls no torch op that computes"),
        (nn.Linear(6, 2), "model", "not a str"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(one, other, said):
    with pytest.raises(NumericsError) as error:
        first_difference(one, other, torch.randn(3, 6))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


class Part(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


FAILURES = {  # what raises in 16 bits, at which op, and the advice on it
    "no kernel": (torch.linalg.det, "at _linalg_det in", "call .float() on its inputs"),
    "none before the op": (lambda y: torch.quantile(y, 0.5), "in", "call .float()"),
    "a dtype that FFTs do not take": (torch.fft.rfft, "in", "transform x.float() instead"),
    "a number": (lambda y: y.masked_fill(y > 0, -1e9), "at masked_fill in", "torch.finfo(x.dtype)"),
    "mixed": (lambda y: torch.ones(4, 4) @ y, "at mm in", "Cast the float32 tensor before the op"),
    "mixed in place": (
        lambda y: torch.ones(4, 4).addmm_(y, y),
        "at addmm_ in",
        "a.to(target.dtype",
    ),
    "mixed in a write": (
        lambda y: torch.ones(4, 4).index_copy(0, torch.arange(4), y),
        "at index_copy in",
        "write values.to(target.dtype)",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("low", ["A", "B"])
def test_an_op_that_raises_is_named_with_its_module_and_a_remedy(name, low):
    function, where, advice = FAILURES[name]
    model, x = nn.Sequential(nn.Tanh(), Part(function)), torch.randn(4, 4)
    runs = (model, in_halves(model)) if low == "B" else (in_halves(model), model)
    with pytest.raises(NumericsError) as error:
        first_difference(*runs, x)
    said = str(error.value)
    assert said.startswith(f"run {low} raises ")
    assert f", {where} '1' (Part)" in said
    assert advice in said
    assert "\n" not in said


def test_where_an_operand_of_another_dtype_comes_from_is_said():
    model, x = Part(lambda y: y @ model.table), torch.randn(4, 4)
    model.register_buffer("table", torch.ones(4, 4))
    halved = copy.deepcopy(model).half()
    halved.function = lambda y: y @ halved.table.float()
    with pytest.raises(NumericsError) as error:
        first_difference(model, lambda x: halved(x.half()), x)
    assert says("dtype.computed_in_a_cast_model", str(error.value))
    assert re.search(r"float32 .*_to_copy .*\(Part\) and float16 ", str(error.value))
    assert re.search(r" and float16 .*addmm in 'layer' \(Linear\)", str(error.value))
    halved.function = lambda y: y @ model.table  # of another model
    with pytest.raises(NumericsError, match=r"float32 from a tensor .*makes and"):
        first_difference(model, lambda x: halved(x.half()), x)
    halved.table, halved.function = torch.ones(4, 4), lambda y: y @ halved.table
    with pytest.raises(NumericsError, match=r"float32 .*buffer table .*Cast table"):
        first_difference(model, lambda x: halved(x.half()), x)


def test_an_error_of_the_models_own_code_has_a_module_and_a_line_and_no_advice():
    model = nn.Sequential(Part(lambda y: y.tolist()["x"]))
    with pytest.raises(NumericsError) as error:
        first_difference(model, model, torch.randn(4, 4))
    said = r"run A raises TypeError: .*, in '0' \(Part\), test_first_difference\.py:\d+$"
    assert re.search(said, str(error.value))


def test_an_error_that_the_model_catches_is_not_the_one_that_ended_the_run():
    def catches(y):
        try:
            torch.linalg.det(y)
        except NotImplementedError:
            raise ValueError("no determinant") from None

    model = Part(catches)
    with pytest.raises(NumericsError) as error:
        first_difference(in_halves(model), model, torch.randn(4, 4))
    assert re.search(r"ValueError: no determinant, .*itself \(Part\)", str(error.value))
    assert "_linalg_det" not in str(error.value)


def test_an_overflow_of_fp32_is_not_taken_for_rounding():
    class Exp(nn.Module):
        def __init__(self, most):
            super().__init__()
            self.most = most

        def forward(self, x):
            return torch.exp(x.clamp(max=self.most))

    found = first_difference(Exp(120.0), Exp(80.0), torch.linspace(0, 120, 8))
    assert found.kind == "nonfinite"
    assert "In A, the result of this op has inf" in found.reason


def test_an_op_of_one_run_alone_has_no_size_and_a_weight_of_one_run_is_named():
    class Scaled(nn.Module):
        def __init__(self, name, value):
            super().__init__()
            self.name = name
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))

        def forward(self, x):
            return x * getattr(self, self.name)

    x = torch.randn(4)
    reason = first_difference(Scaled("a", 1.0), Scaled("b", 2.0), x).reason
    assert "because only A has 'a'" in reason
    shifted = nn.Sequential(nn.ReLU())
    shifted.register_forward_hook(lambda module, args, output: output + 0.5)
    assert "not measured" in str(first_difference(nn.Sequential(nn.ReLU()), shifted, x))
