"""find_nonfinite, held against faults planted in models, and against healthy ones."""

import contextlib
import math

import matplotlib as mpl
import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import needs_lstm
from planted_faults import FAULTS, Function, Module, faulty, find, run
from small_models import CellRnn, Cnn, Rnn, Transformer, hooks_of, images, series, tokens
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from amp_lab import find_nonfinite
from amp_lab.core.errors import AmpLabWarning, NumericsError

mpl.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


@pytest.mark.filterwarnings("ignore:std")  # torch warns, and goes on
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    make, phase, module, op, tensor = FAULTS[name]
    model, x, options = make()
    with find_nonfinite(model) as finder:
        run(model, x, **options)
    report = finder.report
    assert report is not None
    found = (report.phase, report.module, report.op, report.tensor)
    assert found == (phase, module, op, tensor), report
    assert hooks_of(model) == 0
    assert len(str(report).splitlines()) < 24
    assert max(map(len, str(report).splitlines())) <= 100


# Nothing is wrong


class Attention(nn.Module):
    """torch's own attention with a mask of -inf, in one of the forms that it comes in."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):  # (B, T, 8)
        size = x.shape[1]
        bools = torch.ones(size, size).triu(1).bool()
        floats = torch.zeros(size, size).masked_fill(bools, -math.inf)
        if self.form == "scaled_dot_product_attention":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=floats.to(x.dtype))
        if self.form == "is_causal":
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)
        if self.form == "masked_fill":
            return (x @ x.mT).masked_fill(bools, -math.inf).softmax(-1) @ x
        if self.form == "where":
            return torch.where(bools, -math.inf, x @ x.mT).softmax(-1) @ x
        if self.form == "log of the mask":
            return (x @ x.mT + (~bools).float().log()).softmax(-1) @ x
        if self.form == "a large negative number":
            scores = (x @ x.mT + torch.where(bools, torch.finfo(torch.float32).min, 0.0)).half()
            return scores.float().softmax(-1) @ x
        mask = bools if self.form == "bool" else floats
        return self.layer(x, x, x, attn_mask=mask, need_weights=self.form == "weights")[0]


def attention(form):
    return lambda: (Attention(form), torch.randn(2, 4, 8, requires_grad=True), {})


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return Function2(model, mask), torch.randn(2, 4, 8), {}


class Function2(nn.Module):
    """A module called with a second argument."""

    def __init__(self, module, argument):
        super().__init__()
        self.module, self.argument = module, argument

    def forward(self, x):
        return self.module(x, self.argument)


def ctc():
    def loss_fn(y):
        logs = F.log_softmax(y.transpose(0, 1), -1)  # (T, B, C)
        return F.ctc_loss(logs, torch.tensor([[1, 2], [3, 3]]), (4, 4), (2, 2))

    return Transformer(), tokens(), {"loss_fn": loss_fn}


def uninitialised(x):
    room = torch.empty(1000, *x.shape)
    room.view(torch.int32).fill_(-1)  # NaN, as memory may happen to hold
    room = torch.empty_like(x)
    room.copy_(x)
    return room


def written_over(x):
    room = torch.full_like(x, math.nan)
    for row, values in enumerate(x):
        room[row] = values
    return room


def logsumexp(x):
    masked = x.masked_fill(torch.eye(2, 3).bool(), -math.inf)
    return x - masked.logsumexp(-1, keepdim=True)


def masked_log_softmax(x):
    logs = x.masked_fill(torch.eye(2, 3).bool(), -math.inf).log_softmax(-1)
    return torch.where(logs > -math.inf, logs, 0.0)


def smallest(x):
    """The distance to the nearest other row, with +inf where a row would meet itself."""
    distances = torch.cdist(x, x) + torch.eye(2) * 1.0
    return x + distances.masked_fill(torch.eye(2).bool(), math.inf).min(-1, keepdim=True).values


def power(x):
    return (x * 0) ** (x * 0 + 2)  # torch computes 0 * log(0) in backward, and replaces it


HEALTHY = {
    "cnn": lambda: (Cnn(), images(), {}),
    "transformer": lambda: (Transformer(), tokens(), {}),
    "lstm": lambda: (Rnn(), series(), {}),
    "gru": lambda: (Rnn(nn.GRU), series(), {}),
    "plain rnn": lambda: (Rnn(nn.RNN), series(), {}),
    "cell": lambda: (CellRnn(), series(), {}),
    **{
        f"attention, {form}": attention(form)
        for form in (
            "bool", "float", "weights", "scaled_dot_product_attention", "is_causal", "masked_fill",
            "where", "log of the mask", "a large negative number",
        )
    },
    "torch's encoder": encoder,
    "ctc loss": ctc,
    "memory that is not written": faulty(uninitialised),
    "a NaN that is written over": faulty(written_over),
    "logsumexp": faulty(logsumexp),
    "log_softmax of masked logits": faulty(masked_log_softmax),
    "a smallest distance": faulty(smallest),
    "torch.norm at zero": faulty(lambda x: x + (x * 0).norm(dim=-1, keepdim=True)),
    "deviation of equal values": faulty(lambda x: x + (x * 0).std(-1, keepdim=True)),
    "atan2 at zero": faulty(lambda x: torch.atan2(x * 0, x * 0)),
    "zero to a power that is learned": faulty(power),
    "a logarithm that is not used": faulty(
        lambda x: torch.where(x > 99, x.detach().clamp_max(0).log(), x)
    ),
    "nan_to_num": faulty(lambda x: torch.nan_to_num(torch.full_like(x, math.nan)) + x),
    "sigmoid of inf": faulty(lambda x: torch.sigmoid(x.detach().sign() * math.inf) + x),
    "large sums": faulty(lambda x: (x.sign() * 0 + 3e38).clamp_max(1.0) * x),
    "float64": lambda: (Cnn().double(), images().double(), {}),
    "complex": faulty(lambda x: torch.fft.ifft(torch.fft.fft(x) * 2j).imag),
    "sparse": lambda: (nn.Embedding(7, 3, sparse=True), tokens(), {}),
    "NaN in data that are cleaned": lambda: (
        nn.Sequential(Function(torch.nan_to_num), nn.Linear(3, 1)),
        torch.tensor([[math.nan, 1.0, 2.0]]),
        {},
    ),
    "a mask that is an argument": lambda: (
        nn.Sequential(Function(lambda x: x.softmax(-1)), nn.Linear(3, 1)),
        torch.tensor([[-math.inf, 1.0, 2.0]]),
        {},
    ),
    "masked logits as the output": lambda: (
        nn.Sequential(nn.Linear(3, 3), Function(lambda x: x + torch.tensor([0, 0, -math.inf]))),
        torch.randn(2, 3),
        {"loss_fn": lambda y: F.cross_entropy(y, torch.tensor([0, 1]))},
    ),
    "a best loss so far": lambda: (
        Cnn(), images(), {"loss_fn": lambda y: torch.minimum(torch.tensor(math.inf), y.mean())},
    ),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_reported_where_nothing_is_wrong(name, autocast):
    if name == "lstm" and autocast is not None:
        needs_lstm(autocast)
    model, x, options = HEALTHY[name]()
    with find_nonfinite(model) as finder:
        run(model, x, autocast=autocast, **options)
        torch.optim.Adam(model.parameters(), foreach=True).step() if name == "cnn" else None
    assert finder.report is None, finder.report
    assert all(_dense(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
    assert hooks_of(model) == 0


def _dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


# What it leaves behind


def test_of_a_shared_module_the_call_is_told():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Function(lambda x: (x - 1).log())
            self.b = self.a
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.b(self.a(x * self.weight))

    for x, call in ((torch.full((2,), 2.0), 2), (torch.zeros(2), 1)):
        report = find(Twice(), x)
        assert (report.module, report.op, report.call) == ("a", "log", call)
    model = CellRnn()
    model.cell = nn.RNNCell(3, 4, nonlinearity="relu")
    x = series()
    x[:, 3] = 3e38
    model.cell.weight_ih.data.fill_(100.0)
    report = find(model, x)
    assert (report.module, report.call) == ("cell", 4)
    assert "call 4" in str(report)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("fault", "phase", "op"),
    [
        (lambda x: (x * 0).log().exp().log(), "forward", "log"),
        (lambda x: (x * 0).sqrt(), "backward", "SqrtBackward0"),
        (lambda x: torch.where(x > 99, (x * 0).log(), x), "backward", "LogBackward0"),
        (lambda x: x, None, None),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activation_checkpointing_changes_nothing(reentrant, fault, phase, op, dtype):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Module(fault)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    report = find(Checkpointed(), torch.randn(2, 3, requires_grad=True), autocast=dtype)
    if phase is None:
        assert report is None
    else:
        assert (report.phase, report.module, report.op) == (phase, "inner.fault", op), report
        assert report.call == 1


def test_a_step_with_scaler_and_optimizers_that_skips_is_found_once():
    model, x, options = FAULTS["the loss scale overflows fp16"][0]()
    scaler, optimizer = options["scaler"], torch.optim.SGD(model.parameters(), lr=0.1)
    with find_nonfinite(model) as finder:
        for _ in range(2):
            run(model, x, **options)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (finder.report.phase, finder.report.op) == ("backward", "ToCopyBackward0")
    assert finder.report.loss_scale == 2.0**30  # that of the first step


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_without_the_scaler_is_told(fused):
    def steps(step, enabled=True):
        model = nn.Linear(3, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=enabled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps the method `step`
        with find_nonfinite(model) as finder:
            loss = 1e3 * model(torch.ones(1, 3)).square().sum()
            scaler.scale(loss).backward()
            step(scaler, optimizer)
        return finder.report

    assert steps(lambda scaler, optimizer: optimizer.step()).bypassed
    assert not steps(lambda scaler, optimizer: scaler.step(optimizer)).bypassed
    assert steps(lambda scaler, optimizer: optimizer.step(), enabled=False) is None
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not steps(lambda scaler, optimizer: other.step()).bypassed
    assert not _global_optimizer_pre_hooks


@pytest.mark.parametrize("overflows_in_step", [0, 1])
def test_a_step_without_the_scaler_is_told_after_an_overflow_of_the_forward_pass(overflows_in_step):
    model = nn.Linear(3, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with find_nonfinite(model) as finder:
        for step in range(2):
            x = torch.full((4, 3), 1e6 if step == overflows_in_step else 1.0)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            optimizer.step()
    assert finder.report.phase == "forward"
    assert finder.report.bypassed
    assert "AMP0131" in str(finder.report)


def test_raise_on_first_raises_in_forward_and_in_backward():
    for name in ("log of zero", "sqrt at zero", "inf in a weight", "all targets ignored"):
        model, x, options = FAULTS[name][0]()
        finder = find_nonfinite(model, raise_on_first=True)
        with pytest.raises(NumericsError, match="find_nonfinite:\n"), finder:
            run(model, x, **options)
        assert (finder.report.phase, finder.report.op) == FAULTS[name][1:4:2]
        assert hooks_of(model) == 0


def test_gradients_without_backward_are_watched_too():
    model, x, _ = FAULTS["sqrt at zero"][0]()
    with find_nonfinite(model) as finder:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert (finder.report.module, finder.report.op) == ("fault", "SqrtBackward0")
    assert finder.report.reached.startswith("the gradient of first.")
    x = torch.zeros(2, 3, requires_grad=True)
    model = Function(torch.sqrt)  # without parameters
    with find_nonfinite(model) as finder:
        model(x).sum().backward()
    assert finder.report.reached == "the gradient of argument 0"


def test_the_backward_of_a_backward_is_named_after_its_module():
    for function, module in ((lambda x: (x * 0).abs() ** 1.5, "fault"), (lambda x: x**3, None)):
        model, x = Module(function), torch.randn(2, 3, requires_grad=True)
        with find_nonfinite(model) as finder:
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            assert finder.report is None
            gradient.square().sum().backward()
        assert (finder.report and finder.report.module) == module


def test_a_lazy_module_is_watched_once_it_has_its_parameters():
    for factor in (1.0, 0.0):
        model = nn.Sequential(
            nn.LazyLinear(3), Function(lambda x, factor=factor: (x * factor).abs().sqrt())
        )
        report = find(model, torch.randn(2, 3))
        assert (report and report.op) == (None if factor else "SqrtBackward0")


def test_a_gradient_left_from_before_is_told_when_it_is_added_to():
    model, x = Cnn(), images()
    model.head.weight.grad = torch.full_like(model.head.weight, math.inf)
    report = find(model, x)
    assert (report.phase, report.tensor, report.name) == ("before", "gradient", "head.weight")
    assert "zero_grad" in report.advice
    with find_nonfinite(model) as finder:
        model.zero_grad()
        run(model, x)
    assert finder.report is None


def test_a_part_of_the_model_and_passes_without_gradients():
    model = Transformer()
    model.blocks[0].qkv.weight.data.fill_(math.nan)
    with find_nonfinite(model) as finder:
        model.blocks[0](torch.randn(2, 4, 8))
    assert finder.report.module == "blocks.0.qkv"
    for context in (torch.no_grad(), torch.inference_mode()):
        model = Module(lambda x: (x * 0).log().neg())
        with find_nonfinite(model) as finder, context:
            model(torch.randn(2, 3))
        assert (finder.report.module, finder.report.op) == ("fault", "log")


def rms_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)


def root(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


DIVIDED_AWAY = {
    # name: (function of a large x in fp16, the op that made the inf)
    "a norm by hand": (rms_norm, "pow"),
    "a division by a root": (root, "pow"),
    "a sigmoid by hand": (lambda x: 1 / (1 + x.exp()), "exp"),
    "a softmax by hand": (lambda x: x / x.exp().sum(-1, keepdim=True), "exp"),
    "a negative power": (lambda x: x.square() ** -0.5, "pow"),
    "in place": (lambda x: (x * x).reciprocal_(), "mul"),
    "div_": (lambda x: x.clone().div_(x * x), "mul"),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x * x), "mul"),
}


@pytest.mark.parametrize("name", DIVIDED_AWAY)
def test_an_inf_that_is_divided_away_is_reported_at_the_end(name):
    function, op = DIVIDED_AWAY[name]
    model = Function(function)
    x = torch.full((2, 3), 300.0, dtype=torch.float16)
    with find_nonfinite(model) as finder:
        output = model(x)
        assert finder.report is None
    assert output.isfinite().all()
    report = finder.report
    assert (report.module, report.op, report.phase) == ("", op, "forward"), report
    assert report.reached.startswith("a divisor: ")
    with pytest.raises(NumericsError, match="became 0"), find_nonfinite(model, raise_on_first=True):
        model(x)
    assert hooks_of(model) == 0
    with find_nonfinite(model) as finder:
        model(x.clamp_max(2))
    assert finder.report is None


def test_what_spreads_goes_before_what_is_divided_away():
    def both(x):
        return 1 / (1 + (x.abs() * 1e4).exp()) + (x * 0).log()

    assert find(Module(both), torch.randn(2, 3)).op == "log"


def match(x):
    """A matcher: it makes a matrix of costs, which SciPy then refuses."""
    costs = (x @ x.T) / x.shape[1]
    if not costs.isfinite().all():
        raise ValueError("matrix contains invalid numeric entries")


@pytest.mark.parametrize("module", [None, ""], ids=["a function", "a module"])
def test_what_an_error_of_another_package_met_is_reported(module):
    model = Function(match)
    matcher = match if module is None else model
    x = torch.full((2, 3), 300.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="invalid numeric"), find_nonfinite(model) as finder:
        matcher(x)
    report = finder.report
    assert (report.module, report.op, report.phase) == (module, "mm", "forward"), report
    assert report.reached == "a tensor that was still there when ValueError ended the block"
    assert "exceeds 65504" in report.advice
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(x > 0, -math.inf),
        lambda x: torch.full_like(x, math.inf),
        lambda x: (x * 0).log(),
        lambda x: (x.exp() * 1e30 * 1e30).clamp(max=1),
    ],
    ids=["a mask", "a constant", "-inf alone", "an inf that is gone"],
)
def test_an_error_that_met_no_inf_leaves_no_report(function):
    with contextlib.suppress(ValueError), find_nonfinite(nn.Linear(3, 3)) as finder:
        kept = function(torch.ones(2, 3))
        assert kept.shape == (2, 3)
        raise ValueError("unrelated")
    assert finder.report is None, finder.report


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / torch.full_like(x, math.inf),
        lambda x: x / x.masked_fill(x > 0, math.inf),
        lambda x: x / (x * 1e30 * 1e30).clamp(-1, 1).sign().add(3),
        lambda x: torch.where(x > 0, x, 1.0) / torch.cat([x.exp(), (x * 0).log()])[:2],
    ],
    ids=["a constant", "a mask", "an inf that is clamped", "a part that is finite"],
)
def test_a_divisor_of_inf_that_stands_in_the_code_is_no_finding(function):
    model = Function(function)
    with find_nonfinite(model) as finder:
        model(torch.randn(2, 3))
    assert finder.report is None, finder.report


@pytest.mark.parametrize("sign", [torch.abs, lambda x: -x.abs(), torch.tanh, torch.relu])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_product_with_inf_before_a_batch_norm_is_named(sign, calls):
    """And not the running mean, which the batch norm writes and does not read."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.norm = Function(lambda x: sign(x) * math.inf), nn.BatchNorm1d(3)

        def forward(self, x):
            bad = self.scale(x)
            for _ in range(calls):
                out = self.norm(bad)
            return out

    model = Normed()
    report = find(model, torch.randn(8, 3))
    assert (report.phase, report.module, report.op) == ("forward", "scale", "mul"), report
    assert not model.norm.running_mean.isfinite().all()


def test_a_mask_before_a_batch_norm_is_told_with_the_norm_that_makes_nan_of_it():
    mask = Function(lambda x: x.masked_fill(x > 0, -math.inf))
    report = find(nn.Sequential(mask, nn.BatchNorm1d(3)), torch.randn(8, 3))
    assert (report.module, report.op) == ("1", "native_batch_norm"), report
    assert "masked_fill" in report.placed_by
    assert [summary.name for summary in report.inputs] == ["input", "weight", "bias"]


def test_a_mask_of_ones_times_inf_is_no_finding():
    def causal(x):
        return (x + torch.triu(torch.ones(2, 3) * -math.inf, diagonal=2)).softmax(-1)

    assert find(Module(causal), torch.randn(2, 3)) is None


@pytest.mark.parametrize("data", [Cnn, Transformer, Rnn])
def test_results_are_the_same_to_the_last_bit(data):
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = data()
        x = {Cnn: images, Transformer: tokens, Rnn: series}[data]()
        with find_nonfinite(model) if watched else contextlib.nullcontext():
            run(model, x)
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_nothing_stays_behind_after_an_error():
    def broken(x):
        raise ZeroDivisionError

    model = Module(broken)
    finder = find_nonfinite(model)
    assert hooks_of(model) == 0  # nothing before it is entered
    with contextlib.suppress(ZeroDivisionError), finder:
        assert hooks_of(model) > 0
        model(torch.randn(2, 3))
    assert hooks_of(model) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert finder.report is None
    model.fault.function = torch.log
    model(torch.randn(2, 3).requires_grad_()).sum().backward()  # NaN, and nobody looks
    assert finder.report is None


def test_an_error_that_the_model_catches_does_not_confuse_the_names():
    def broken(x):
        raise ZeroDivisionError

    class Catching(Module):
        def forward(self, x):
            with contextlib.suppress(ZeroDivisionError):
                self.fault(x)
            return self.last(self.first(x).mul(0).log())

    report = find(Catching(broken), torch.randn(2, 3))
    assert (report.module, report.op) == ("", "log")
    assert report.where == "the model itself (Catching)"


def test_it_can_be_used_again_and_then_starts_anew():
    model, x, options = FAULTS["log of zero"][0]()
    finder = find_nonfinite(model)
    with finder:
        run(model, x, **options)
    assert finder.report is not None
    model.fault.function = torch.tanh
    model.zero_grad()
    with finder:
        assert finder.report is None
        run(model, x, **options)
    assert finder.report is None


def test_wrong_use_is_refused():
    model = Cnn()
    with find_nonfinite(model) as finder:
        for other in (finder, find_nonfinite(model), find_nonfinite(Cnn())):
            with pytest.raises(NumericsError, match="cannot be nested"):
                other.__enter__()
        run(model, images())
    assert finder.report is None
    assert hooks_of(model) == 0
    with pytest.raises(NumericsError, match=r"nn\.Module, not function"):
        find_nonfinite(lambda x: x)
    with pytest.raises(NumericsError, match="with statement"):
        find_nonfinite(model).__exit__(None, None, None)


class Quantised(torch.Tensor):
    """A weight of bytes with a scale for each row, which has matmuls alone, as torchao's have."""

    HAS = (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.mm.default)

    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in cls.HAS:
            raise NotImplementedError(f"{cls.__name__}: {func}")
        if func is cls.HAS[2]:
            plain = [a.data_ * a.scale if isinstance(a, cls) else a for a in args]
            return func(*plain, **(kwargs or {}))
        return cls(*(func(part) for part in (args[0].data_, args[0].scale)))


class Flattened(Quantised):
    """One that says what it is stored as."""

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["data_"], parts["scale"])


def with_quantised_weight(kind, scale=1.0):
    """A model whose second layer has such a weight, with this scale in its last row."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    scales = torch.ones(4, 4)
    scales[-1] = scale
    weight = kind(torch.ones(4, 4, dtype=torch.int8), scales)
    model[1].weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize("x", [1.0, math.inf])
def test_a_weight_that_has_no_sum_is_read_by_what_it_is_stored_as(x):
    model = with_quantised_weight(Flattened)
    with find_nonfinite(model) as finder:
        model(torch.full((2, 3), x)).sum().backward()
    assert (finder.report is None) == math.isfinite(x)


def test_a_nan_in_what_a_weight_is_stored_as_is_reported_with_its_form():
    model = with_quantised_weight(Flattened, math.nan)
    with find_nonfinite(model) as finder:
        model(torch.ones(2, 3))
    report = finder.report
    assert (report.tensor, report.name) == ("parameter", "1.weight")
    assert "stored as int8 and float32" in str(report.value)
    assert report.value.nan == 4


def test_a_fault_behind_a_weight_that_has_no_sum_is_named():
    model = with_quantised_weight(Flattened)
    model.append(Function(lambda x: (0 * x - 1).log()))
    with find_nonfinite(model) as finder:
        model(torch.ones(2, 3))
    assert (finder.report.module, finder.report.op) == ("3", "log")


def test_a_weight_that_cannot_be_read_is_left_out_and_a_warning_says_so():
    model = with_quantised_weight(Quantised)
    model.append(Function(lambda x: (0 * x - 1).log()))
    with (
        pytest.warns(AmpLabWarning, match="values of a Quantised are not"),
        find_nonfinite(model) as finder,
    ):
        model(torch.ones(2, 3))
    assert (finder.report.module, finder.report.op) == ("3", "log")
