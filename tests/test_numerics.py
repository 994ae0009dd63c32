"""The numerics tools: counted against real casts, and held against faults planted in models."""

import contextlib
import functools
import math
import random

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_lab import AmpLabError, ScaleLog, find_nonfinite, gradient_underflow
from amp_lab.errors import NumericsError

mpl.use("agg")
SCALES = (2.0**-20, 1.0, 2.0**8, 2.0**16, 2.0**40)


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    plt.close("all")


def hooks_of(model: nn.Module) -> int:
    """How many hooks hang on the model, its parameters included."""
    count = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )
    return count + sum(len(p._backward_hooks or ()) for p in model.parameters())


# ------------------------------------------------------------------------------------------------
# Models


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2, padding=1)
        )
        self.head = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x):  # (B, 3, 6, 6) to (B, 3)
        return self.head(self.features(x).flatten(1))


class Transformer(nn.Module):
    """Two blocks with a causal mask of -inf, added to scores that are computed by hand."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)

    def forward(self, tokens):  # (B, T) to (B, T, 7)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.sharpness = 1.0

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * self.sharpness / math.sqrt(q.shape[-1])
        x = x + self.out((scores + self.mask).softmax(-1) @ v)
        return x + self.mlp(x)


class Rnn(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):  # (B, T, 3) to (B, 2)
        return self.head(self.rnn(x)[0][:, -1])


class CellRnn(nn.Module):
    """One GRU cell, called for each step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def images(n=2):
    return torch.randn(n, 3, 6, 6)


def tokens(n=2):
    return torch.randint(7, (n, 4))


def series(n=2):
    return torch.randn(n, 5, 3)


def loss_of(model, x):
    y = model(x)
    return F.cross_entropy(y.flatten(0, -2).float(), torch.arange(y[..., 0].numel()) % y.shape[-1])


# ------------------------------------------------------------------------------------------------
# gradient_underflow


def cast(gradient, scale):
    """Zero, subnormal and infinite values after the real cast, and those that were not zero."""
    nonzero = gradient != 0
    half = (gradient * scale).to(torch.float16)
    subnormal = (half != 0) & (half.abs() < 2.0**-14)
    return [int(c.sum()) for c in (nonzero & (half == 0), subnormal, half.isinf())]


def counted(row, scale):
    return [row.zero_in_fp16(scale), row.subnormal_in_fp16(scale), row.inf_in_fp16(scale)]


@pytest.mark.parametrize(
    ("model", "data"), [(Cnn, images), (Transformer, tokens), (Rnn, series), (CellRnn, series)]
)
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
def test_every_value_of_a_model_is_counted_as_the_cast_does(model, data, factor):
    model, arrived = model(), {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda module, args, y, name=name: (
                    y.register_hook(lambda g: arrived.setdefault(name, []).append(g)) and None
                )
            )
    loss = loss_of(model, data()) * factor
    report = gradient_underflow(model, loss, scales=SCALES)
    arrived.clear()  # those were of that call
    loss.backward()
    rows = {(row.layer, row.what): row for row in report.rows}
    expected = {tuple(n.rpartition(".")[::2]): [p.grad] for n, p in model.named_parameters()}
    for name, gradients in arrived.items():
        op = {"Conv2d": "convolution"}.get(type(model.get_submodule(name)).__name__, "addmm")
        expected[name, f"output of {op}"] = gradients
    assert set(expected) <= set(rows)
    others = {what for layer, what in set(rows) - set(expected)}
    assert all(what.startswith("output of ") for what in others)
    for key, gradients in expected.items():
        row, values = rows[key], torch.cat([g.flatten() for g in gradients])
        assert row.values == len(values), key
        assert row.zero == int((values == 0).sum()), key
        for scale in SCALES:
            assert counted(row, scale) == cast(values, scale), (key, scale)
    everything = torch.cat([p.grad.flatten() for p in model.parameters()])
    for scale in SCALES:
        assert counted(report.parameters, scale) == cast(everything, scale)
    assert report.total.values == sum(row.values for row in report.rows)


def weighted(values):
    """A model and a loss whose gradient is `values`."""
    model = nn.ParameterList([torch.zeros_like(values)])
    loss = (model[0] * values).sum()
    return model, loss.real if loss.is_complex() else loss


def edges():
    """Every number where rounding to fp16 changes, for every scale, and its neighbours."""
    values = []
    for scale in SCALES:
        for edge in (2.0**-26, 2.0**-25, 2.0**-24, 2.0**-14 - 2.0**-25, 2.0**-14, 65504, 65520):
            at = torch.tensor(edge / scale)
            values += [at, at.nextafter(torch.tensor(0.0)), at.nextafter(torch.tensor(math.inf))]
    values = torch.stack(values)
    return torch.cat([values, -values, torch.zeros(3), -torch.zeros(2)])


def any_bits(n=100_003):
    seeded = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (n,), generator=seeded)
    values = values.to(torch.int32).view(torch.float32)
    return values[values.isfinite()]


@pytest.mark.parametrize(
    "values",
    [
        edges(),
        any_bits(),
        any_bits(2**17 + 5) * 1e-30,  # more than one chunk
        any_bits(120).repeat(2)[:120].view(6, 5, 4).transpose(0, 2),
        torch.tensor(3e-8),
        edges().bfloat16(),
        any_bits().half(),
        torch.tensor([0.0, 1e-300, 2.0**-150, 2.0**-149, 1e300, -1e300], dtype=torch.float64),
        edges().double() * (1 + 2**-40),
    ],
    ids=lambda v: f"{v.dtype}-{v.numel()}",
)
def test_values_at_the_edges_are_counted_as_the_cast_does(values):
    finite = values[values.isfinite()] if values.dtype is torch.float16 else values
    model, loss = weighted(finite)
    row = gradient_underflow(model, loss, scales=SCALES).parameters
    assert (row.values, row.nonfinite) == (finite.numel(), 0)
    assert row.zero == int((finite == 0).sum())
    for scale in SCALES:
        # A float16 tensor times the scale would round before the cast that is counted.
        exact = finite.float() if finite.dtype is not torch.float64 else finite
        assert counted(row, scale) == cast(exact, scale), scale


def test_complex_gradients_count_real_and_imaginary_parts():
    values = torch.complex(torch.tensor([1e-9, 1.0, 0.0]), torch.tensor([1e6, 1e-6, 0.0]))
    model, loss = weighted(values)
    gradient = torch.view_as_real(torch.autograd.grad(loss, model[0], retain_graph=True)[0])
    row = gradient_underflow(model, loss).parameters
    assert row.values == 6
    assert row.zero == int((gradient == 0).sum())
    assert counted(row, 1.0) == cast(gradient, 1.0)


def test_of_sparse_gradients_the_stored_values_count():
    model = nn.Embedding(100, 2, sparse=True)
    factors = torch.tensor([1e-9, 1.0, 1e6])
    loss = (model(torch.tensor([3, 3, 5])) * factors[:, None]).sum()
    row = gradient_underflow(model, loss).parameters
    assert row.values == 4  # of rows 3, after its two are added, and 5
    assert counted(row, 1.0) == [0, 0, 2]


def test_values_that_are_not_finite_are_counted_apart():
    model, loss = weighted(torch.tensor([math.inf, -math.inf, math.nan, 1e-9, 2.0, 0.0, 3.4e38]))
    report = gradient_underflow(model, loss)
    row = report.parameters
    assert (row.nonfinite, row.zero, row.nonzero) == (3, 1, 3)
    assert counted(row, 1.0) == [1, 0, 1]
    assert "3 values are inf or NaN already" in str(report)


def test_scales_that_serve():
    values = torch.full((1000,), 1.0)
    values[:2] = 2.0**-30
    row = gradient_underflow(*weighted(values)).parameters
    assert row.smallest_scale == 2.0**6  # 2^-24: one of 2^-25 is zero, and both are 0.2 %
    assert row.largest_scale == 2.0**15
    assert (row.lost(1.0), row.lost(2.0**5), row.lost(2.0**6)) == (0.002, 0.002, 0.0)
    values[1] = 1.0
    assert gradient_underflow(*weighted(values)).smallest_scale == 1.0  # exactly 0.1 %
    values[0] = 65520.0
    assert gradient_underflow(*weighted(values)).largest_scale == 0.5
    zeros = gradient_underflow(*weighted(torch.zeros(3)))
    assert zeros.smallest_scale is zeros.largest_scale is None
    assert "none" in str(zeros)


def test_the_histogram_is_by_exponent():
    row = gradient_underflow(*weighted(torch.tensor([0.0, 1e-40, 1.0, 1.5, -2.0, 2.1]))).parameters
    assert row.histogram == {-127: 1, -1: 1, 0: 2, 1: 1}


def test_the_model_is_left_as_it_was_and_backward_still_works():
    model, x = Cnn(), images()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    loss = loss_of(model, x)
    before = [loss.grad_fn.name(), hooks_of(model)]
    reports = [str(gradient_underflow(model, loss)) for _ in range(2)]
    assert reports[0] == reports[1]
    assert before == [loss.grad_fn.name(), hooks_of(model)]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient + 1)


def test_no_hook_stays_behind_after_an_error():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if ctx.needs_input_grad[0] and Bad.broken:
                raise RuntimeError("broken backward")
            return g

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    loss = model[1](Bad.apply(model[0](torch.ones(1, 2)))).sum()
    Bad.broken = True
    with pytest.raises(NumericsError, match=r"from this loss \(broken backward\)"):
        gradient_underflow(model, loss)
    Bad.broken = False
    assert gradient_underflow(model, loss).parameters.values == 9


def test_products_without_parameters_are_named_after_the_nearest():
    model = Transformer()
    rows = [
        (row.layer, row.what)
        for row in gradient_underflow(model, loss_of(model, tokens())).rows
        if row.what.startswith("output")
    ]
    block = [
        ("blocks.0.qkv", "output of addmm"),
        ("blocks.0.qkv", "output of bmm 1"),
        ("blocks.0.qkv", "output of bmm 2"),
        ("blocks.0.out", "output of addmm"),
        ("blocks.0.mlp.0", "output of addmm"),
        ("blocks.0.mlp.2", "output of addmm"),
    ]
    other = [(layer.replace(".0.", ".1.", 1), what) for layer, what in block]
    assert rows == [*block, *other, ("head", "output of addmm")]


def test_names_are_the_same_under_autocast_and_fp16_says_that_it_came_too_late():
    model, x = Cnn(), images()
    names = [(r.layer, r.what) for r in gradient_underflow(model, loss_of(model, x)).rows]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            report = gradient_underflow(model, loss_of(model, x))
        assert [(r.layer, r.what) for r in report.rows] == names
        assert report.half == (dtype is torch.float16)
        assert ("fp16 already" in str(report)) == report.half


def test_unused_parameters_are_told():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    report = gradient_underflow(model, model["used"](torch.ones(1, 2)).sum())
    assert report.unused == ("idle.weight", "idle.bias")
    assert "idle.weight, idle.bias" in str(report)


def test_the_report_can_be_read_and_drawn():
    model = Transformer()
    report = gradient_underflow(model, loss_of(model, tokens()))
    text, page = str(report), report._repr_html_()
    assert "lost % at 2^16" in text
    assert f"… and {len(report.rows) - 20} that lose no more" in text
    assert page.count("<tr>") == 1 + len(report.rows) + 2
    axes = report.plot()
    assert [ax.get_title(loc="left") for ax in axes] == [
        f"loss scale $2^{{{p}}}$" for p in (0, 8, 16)
    ]
    for ax, power in zip(axes, (0, 8, 16), strict=True):
        for bars, row in zip(ax.containers, (report.outputs, report.parameters), strict=True):
            lost = sum(b.get_height() for b in bars if b.get_x() + b.get_width() <= -25)
            assert lost == pytest.approx(100 * row.lost(2.0**power))
            assert sum(b.get_height() for b in bars) == pytest.approx(100)


def frozen():
    model = nn.Linear(2, 1).requires_grad_(False)
    return model, model(torch.ones(1, 2, requires_grad=True)).sum()


def used_up():
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    return model, loss


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (frozen, "no parameter of the model requires a gradient"),
        (used_up, "call it before loss.backward"),
        (lambda: (nn.Linear(2, 1), torch.ones(2, requires_grad=True).sum()), "does not depend on"),
        (lambda: (nn.Linear(2, 1), torch.tensor(1.0)), "the loss has no graph"),
        (lambda: (nn.Linear(2, 1), 1.0), "one number, not float"),
        (lambda: (m := nn.Linear(2, 1), m(torch.ones(3, 2))), r"one number, not \(3, 1\)"),
        (lambda: ("model", torch.tensor(1.0)), "must be an nn.Module, not str"),
    ],
)
def test_what_cannot_be_counted_is_refused(make, message):
    with pytest.raises(NumericsError, match=message) as caught:
        gradient_underflow(*make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scale", [0, -1, 3, 1000.0, math.inf, math.nan, 2.0**65, 2.0**-65])
def test_scales_are_powers_of_two(scale):
    with pytest.raises(NumericsError, match="a power of two"):
        gradient_underflow(*weighted(torch.ones(2)), scales=(1.0, scale))
    with pytest.raises(NumericsError, match="scales is empty"):
        gradient_underflow(*weighted(torch.ones(2)), scales=())


def test_errors_are_of_the_package():
    assert issubclass(NumericsError, AmpLabError)


# ------------------------------------------------------------------------------------------------
# ScaleLog


def optimizer_of(*sizes, **options):
    return torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes], lr=1.0, **options)


def set_gradients(optimizer, scaler, bad=False):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = scaler.scale(torch.full_like(p, math.inf if bad else 1.0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_thousand_steps_with_random_overflows(fused, unscale):
    draw = random.Random(1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    optimizer = optimizer_of(3, 2, fused=fused)
    expected, skips, growths, good = [], [], 0, 0
    with ScaleLog(scaler) as log:
        for step in range(1000):
            expected.append(2.0**16 * 2.0**growths * 0.5 ** len(skips))
            bad = draw.random() < 0.1
            set_gradients(optimizer, scaler, bad)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if bad:
                skips.append(step)
                good = 0
            else:
                good += 1
                if good == 7:
                    growths, good = growths + 1, 0
    assert 50 < len(skips) < 150
    assert growths > 20
    assert log.scales == expected
    assert log.skipped == skips
    assert log.skipped_by == [skips]
    weight = optimizer.param_groups[0]["params"][0]
    assert weight[0].item() == len(skips) - 1000  # the optimizer stepped in all others


def test_each_of_several_optimizers_has_its_own_skips():
    scaler = torch.amp.GradScaler("cpu")
    first, second, third = (optimizer_of(2) for _ in range(3))
    log = ScaleLog(scaler)
    for step in range(6):
        for optimizer, bad in ((first, step == 1), (second, step in (1, 3)), (third, False)):
            if optimizer is third and step < 2:
                continue
            set_gradients(optimizer, scaler, bad)
            scaler.step(optimizer)
        scaler.update()
    log.close()
    assert log.skipped_by == [[1], [1, 3], []]
    assert log.skipped == [1, 3]
    assert log.scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**14]


def test_a_scale_that_is_set_by_hand_is_logged():
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), optimizer_of(1)
    with ScaleLog(scaler) as log:
        for new in (None, 32.0, None):
            set_gradients(optimizer, scaler)
            scaler.step(optimizer)
            scaler.update(new)
    assert log.scales == [8.0, 8.0, 32.0]


class Reads(TorchDispatchMode):
    """Counts how often a value is read from the device, for which the host has to wait."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_read_from_the_device_until_asked(fused):
    counts = []
    for logged in (False, True):
        scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(2, fused=fused)
        with Reads() as reads, ScaleLog(scaler) if logged else contextlib.nullcontext():
            for step in range(1100):  # past the point where what was kept is put together
                set_gradients(optimizer, scaler, bad=step % 9 == 0)
                scaler.step(optimizer)
                scaler.update()
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_a_disabled_scaler_has_scale_one_and_skips_nothing():
    scaler, optimizer = torch.amp.GradScaler("cpu", enabled=False), optimizer_of(1)
    with ScaleLog(scaler) as log:
        assert (log.scales, log.skipped, log.skipped_by) == ([], [], [])
        for _ in range(3):
            set_gradients(optimizer, scaler, bad=True)
            scaler.step(optimizer)
            scaler.update()
    assert (log.scales, log.skipped, log.skipped_by) == ([1.0] * 3, [], [[]])
    assert "the scaler is disabled" in repr(log)


def test_the_scaler_is_left_as_it_was_also_after_an_error():
    scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(1)
    before = dict(vars(scaler))
    with contextlib.suppress(ZeroDivisionError), ScaleLog(scaler) as log:
        set_gradients(optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
        raise ZeroDivisionError
    assert vars(scaler).keys() == before.keys()
    assert scaler.step.__func__ is torch.amp.GradScaler.step
    log.close()
    set_gradients(optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert log.scales == [2.0**16]
    with ScaleLog(scaler) as second:
        set_gradients(optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
    assert second.scales == [2.0**16]


def test_errors_of_the_scaler_pass_and_leave_no_trace():
    scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(1)
    with ScaleLog(scaler) as log:
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.update()
        set_gradients(optimizer, scaler)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        scaler.update()
    assert log.scales == [2.0**16]
    assert log.skipped_by == [[]]


def test_wrapping_again_on_top_is_respected():
    scaler, optimizer, calls = torch.amp.GradScaler("cpu"), optimizer_of(1), []
    log = ScaleLog(scaler)
    inner = scaler.update
    scaler.update = lambda *args: calls.append(1) or inner(*args)
    log.close()
    set_gradients(optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert (calls, log.scales) == ([1], [])
    assert scaler.step.__func__ is torch.amp.GradScaler.step


def test_a_second_log_and_what_is_no_scaler_are_refused():
    scaler = torch.amp.GradScaler("cpu")
    with ScaleLog(scaler), pytest.raises(NumericsError, match="close that first"):
        ScaleLog(scaler)
    with pytest.raises(NumericsError, match="float is no torch"):
        ScaleLog(65536.0)
    with pytest.raises(NumericsError, match="no step was logged"):
        ScaleLog(scaler).plot()


def test_the_log_can_be_read_and_drawn():
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1.0), optimizer_of(1)
    with ScaleLog(scaler) as log:
        assert repr(log) == "ScaleLog: no steps yet"
        for _ in range(2):
            set_gradients(optimizer, scaler, bad=True)
            scaler.step(optimizer)
            scaler.update()
    assert "2 steps, 2 skipped" in repr(log)
    assert "lowest 0.5. Below 1" in repr(log)
    ax = log.plot()
    assert list(ax.lines[0].get_ydata()) == [1.0, 0.5]
    assert list(ax.lines[1].get_xdata()) == [0, 1]


# ------------------------------------------------------------------------------------------------
# find_nonfinite: planted faults


class Module(nn.Module):
    """A linear layer, and `function` of its output and of the module."""

    def __init__(self, function, width=3):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.fault = Function(function)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.fault(self.first(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Overflowing(torch.autograd.Function):
    """Fine forward; its gradient overflows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e30 * 1e30


class BadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x - x) / (x - x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def run(model, x, loss_fn=lambda y: y.square().mean(), autocast=None, scaler=None):
    enabled = autocast is not None
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=enabled):
        loss = loss_fn(model(x))
    (loss if scaler is None else scaler.scale(loss)).backward()


def faulty(function, **options):
    """A fault in the module `fault` between two linear layers."""
    return lambda: (Module(function), torch.randn(2, 3), options)


def changed(model, data, change, **options):
    def make():
        net = model()
        with torch.no_grad():
            x = change(net, data())
        return net, x, options

    return make


def at(tensor, value, index=0):
    tensor.view(-1)[index] = value


def poison(name, value):
    def change(net, x):
        at(net.get_parameter(name) if name in dict(net.named_parameters()) else
           net.get_buffer(name), value)  # fmt: skip
        return x

    return change


def poison_data(value):
    def change(net, x):
        at(x, value)
        return x

    return change


def sharpen(net, x):
    """Attention scores beyond 65504, from queries and keys that fit."""
    net.blocks[1].qkv.weight.mul_(300)
    net.embed.weight.mul_(30)
    return x


def grow(name, factor):
    def change(net, x):
        net.get_parameter(name).mul_(factor)
        return x

    return change


def overflow_gates(net, x):
    """Step 1 makes the hidden state 1; in step 2 the reset gate, 0, multiplies an infinity."""
    for part in net.cell.parameters():
        part.zero_()
    reset, update, new = range(0, 4), range(4, 8), range(8, 12)
    net.cell.bias_ih[new] = 100
    net.cell.bias_ih[update] = -100
    net.cell.weight_hh[reset] = -3e38
    net.cell.weight_hh[new] = 3e38
    return x


def mask_all(net, x):
    net.blocks[0].mask.fill_(-math.inf)
    return x


def eval_poison(name, value):
    def change(net, x):
        net.eval()
        return poison(name, value)(net, x)

    return change


def zero_norm(x):
    x = x * 0
    return x / x.norm(dim=-1, keepdim=True)


def in_place(x):
    y = x.clone()
    y[0].sub_(y[0]).log_()
    return y


HALF = {"autocast": torch.float16}
BAD_TARGET = torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
FAULTS = {
    # name: (how to make it, phase, module, op, tensor)
    # What was there before
    "inf in a weight": (
        changed(Cnn, images, poison("features.0.weight", math.inf)),
        "before", "features.0", None, "parameter",
    ),
    "NaN in a bias": (
        changed(Transformer, tokens, poison("blocks.1.out.bias", math.nan)),
        "before", "blocks.1.out", None, "parameter",
    ),
    "inf in the weight of an RNN": (
        changed(Rnn, series, poison("rnn.weight_hh_l0", -math.inf)),
        "before", "rnn", None, "parameter",
    ),
    "inf in a running variance": (
        changed(Cnn, images, eval_poison("features.1.running_var", math.inf)),
        "before", "features.1", None, "buffer",
    ),
    "NaN in a running mean": (
        changed(Cnn, images, eval_poison("features.1.running_mean", math.nan)),
        "before", "features.1", None, "buffer",
    ),
    "NaN in a mask": (
        changed(Transformer, tokens, poison("blocks.0.mask", math.nan)),
        "before", "blocks.0", None, "buffer",
    ),
    "NaN in the images": (
        changed(Cnn, images, poison_data(math.nan)), "before", "", None, "input",
    ),
    "inf in a series": (
        changed(CellRnn, series, poison_data(math.inf)), "before", "", None, "input",
    ),
    "NaN in the target": (
        lambda: (Cnn(), images(), {"loss_fn": functools.partial(F.mse_loss, target=BAD_TARGET)}),
        "before", None, None, "constant",
    ),
    # Forward, in models
    "a cast to fp16 that overflows": (
        changed(Cnn, images, lambda net, x: x * 1e6, **HALF),
        "forward", "features.0", "_to_copy", "output",
    ),
    "a convolution that overflows fp16": (
        changed(Cnn, images, grow("features.0.weight", 6e4), **HALF),
        "forward", "features.0", "convolution", "output",
    ),
    "a linear layer that overflows fp16": (
        changed(Cnn, images, grow("head.weight", 3e5), **HALF),
        "forward", "head", "addmm", "output",
    ),
    "attention scores that overflow fp16": (
        changed(Transformer, tokens, sharpen, loss_fn=lambda y: y.float().mean(), **HALF),
        "forward", "blocks.1", "bmm", "output",
    ),
    "a gate of a GRU cell that overflows fp32": (
        changed(CellRnn, series, overflow_gates),
        "forward", "cell", "addmm", "output",
    ),
    "a row of attention that is masked everywhere": (
        changed(Transformer, tokens, mask_all), "forward", "blocks.0", "_softmax", "output",
    ),
    "log of zero": (faulty(lambda x: torch.log(x * 0)), "forward", "fault", "log", "output"),
    "log of a negative number": (
        faulty(lambda x: torch.log(-x.abs())), "forward", "fault", "log", "output",
    ),
    "log of a softmax that underflows": (
        faulty(lambda x: (x * 1e5).softmax(-1).log(), loss_fn=lambda y: -y.mean()),
        "forward", "fault", "log", "output",
    ),
    "division by a zero norm": (faulty(zero_norm), "forward", "fault", "div", "output"),
    "exp that overflows": (
        faulty(lambda x: (x.abs() * 1e4).exp()), "forward", "fault", "exp", "output",
    ),
    "root of a negative number": (
        faulty(lambda x: (-x.abs()).sqrt()), "forward", "fault", "sqrt", "output",
    ),
    "reciprocal of zero": (
        faulty(lambda x: (x * 0).reciprocal()), "forward", "fault", "reciprocal", "output",
    ),
    "a negative base with a fractional exponent": (
        faulty(lambda x: (-x.abs()) ** 0.5001), "forward", "fault", "pow", "output",
    ),
    "zero times inf": (
        faulty(lambda x: x * 0 * torch.tensor(3e38).mul(10)), "forward", "fault", "mul", "output",
    ),
    "inf minus inf": (
        faulty(lambda x: x.double().mul(1e308).mul(1e308).sub(1).float()),
        "forward", "fault", "mul", "output",
    ),
    "acos out of its domain": (
        faulty(lambda x: torch.acos(x.abs() + 1.5)), "forward", "fault", "acos", "output",
    ),
    "deviation of a single value": (
        faulty(lambda x: x / x[:, :1].std(-1, keepdim=True)), "forward", "fault", "std", "output",
    ),
    "the mean of no values": (
        faulty(lambda x: x + x[:0].mean()), "forward", "fault", "mean", "output",
    ),
    "a custom function": (faulty(BadForward.apply), "forward", "fault", "div", "output"),
    "an operation in place, on a view": (faulty(in_place), "forward", "fault", "log_", "output"),
    "a cast of a large constant mask": (
        faulty(lambda x: (x - 1e9).half().exp().float().log().exp().log()),
        "forward", "fault", "log", "output",
    ),
    # Forward, in the loss
    "all targets ignored": (
        lambda: (
            Cnn(), images(),
            {"loss_fn": lambda y: F.cross_entropy(y, torch.tensor([-100, -100]))},
        ),
        "forward", None, "nll_loss_forward", "output",
    ),
    "a loss that overflows fp16": (
        lambda: (Cnn(), images(), {"loss_fn": lambda y: (y * 1e3).half().square().sum()}),
        "forward", None, "pow", "output",
    ),
    "cross entropy by hand": (
        lambda: (Cnn(), images(), {"loss_fn": lambda y: -(y * 0)[:, 0].log().mean()}),
        "forward", None, "log", "output",
    ),
    # Backward
    "sqrt at zero": (
        faulty(lambda x: (x * 0).sqrt()), "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "a norm by hand at zero": (
        faulty(lambda x: (x * 0).square().sum(-1, keepdim=True).sqrt().expand(-1, 3)),
        "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "a power below one at zero": (
        faulty(lambda x: (x * 0) ** 0.5), "backward", "fault", "PowBackward0", "gradient",
    ),
    "where that discards a log of zero": (
        faulty(lambda x: torch.where(x > 99, (x * 0).log(), x)),
        "backward", "fault", "LogBackward0", "gradient",
    ),
    "acos at one": (
        faulty(lambda x: torch.acos((x * 0).cos())),
        "backward", "fault", "AcosBackward0", "gradient",
    ),
    "a custom backward": (
        faulty(Overflowing.apply), "backward", "fault", "OverflowingBackward", "gradient",
    ),
    "deviation of equal values": (
        faulty(lambda x: (x * 0).var(-1, keepdim=True).sqrt() * x),
        "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "the distance of a point to itself": (
        faulty(lambda x: ((x - x).square().sum(-1) ** 0.5)[:, None] + x),
        "backward", "fault", "PowBackward0", "gradient",
    ),
    "a gradient that overflows fp32": (
        faulty(lambda x: x * 0 * 1e30 * 1e30), "backward", "fault", "MulBackward0", "gradient",
    ),
    "the loss scale overflows fp16": (
        lambda: (
            Cnn(), images(),
            {"loss_fn": lambda y: y.float().square().sum() * 1e3, **HALF,
             "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**30)},
        ),
        "backward", None, "ToCopyBackward0", "gradient",
    ),
}  # fmt: skip


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


# ------------------------------------------------------------------------------------------------
# find_nonfinite: nothing is wrong


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


RUNS = [
    (name, autocast)
    for name in HEALTHY
    for autocast in (None, torch.bfloat16, torch.float16)
    if (name, autocast) != ("lstm", torch.float16)  # which most CPUs have no kernel for
]


@pytest.mark.parametrize(("name", "autocast"), RUNS)
def test_nothing_is_reported_where_nothing_is_wrong(name, autocast):
    model, x, options = HEALTHY[name]()
    with find_nonfinite(model) as finder:
        run(model, x, autocast=autocast, **options)
        torch.optim.Adam(model.parameters(), foreach=True).step() if name == "cnn" else None
    assert finder.report is None, finder.report
    assert all(_dense(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
    assert hooks_of(model) == 0


def _dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


# ------------------------------------------------------------------------------------------------
# find_nonfinite: what it says, and what it leaves behind


def find(model, x, **options):
    with find_nonfinite(model) as finder:
        run(model, x, **options)
    return finder.report


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
    assert value.share == pytest.approx(4 / 6)
    assert value.low == value.high == pytest.approx(math.log(2))
    (given,) = report.inputs
    assert (given.name, given.low, given.high, given.share) == ("self", -3.0, 2.0, 0.0)
    assert report.line.startswith("test_numerics.py:")
    assert "fault: return torch.log(x * torch.tensor" in report.line
    assert report.reached in ("the output of the model", "a single number outside the model")
    assert "clamp_min" in report.advice
    text = str(report)
    assert text.startswith("NaN and -inf made in forward by log: 'fault' (Function)")
    assert repr(report) == text
    for part in ("66.7 % non-finite (2 NaN, 2 -inf)", "from -3 to 2", report.line, report.advice):
        assert part in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attention scores that overflow fp16", "65504"),
        ("attention scores that overflow fp16", "scaled_dot_product_attention"),
        ("a row of attention that is masked everywhere", "masked everywhere"),
        ("division by a zero norm", "eps"),
        ("exp that overflows", "subtract the largest"),
        ("the mean of no values", "no values"),
        ("all targets ignored", "ignore_index"),
        ("inf in a weight", "last good checkpoint"),
        ("NaN in a running mean", "reset_running_stats"),
        ("NaN in the images", "Look at the data"),
        ("NaN in the target", "targets"),
        ("sqrt at zero", "sqrt(x + eps)"),
        ("where that discards a log of zero", "torch.where"),
        ("a cast to fp16 that overflows", "bf16"),
    ],
)
def test_the_advice_fits_the_fault(name, words):
    model, x, options = FAULTS[name][0]()
    report = find(model, x, **options)
    assert words in report.advice
    assert report.advice[0].isupper()


def test_a_mask_that_softmax_could_not_make_finite_is_named():
    model, x, options = FAULTS["a row of attention that is masked everywhere"][0]()
    assert find(model, x, **options).placed_by == "buffer 'blocks.0.mask'"


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


def test_the_loss_scale_is_told_and_not_called_a_fault():
    model, x, options = FAULTS["the loss scale overflows fp16"][0]()
    report = find(model, x, **options)
    assert report.loss_scale == 2.0**30
    assert "GradScaler is there for" in report.advice
    assert "loss scale" in str(report)
    assert report.kernel == "_to_copy"
    plain = FAULTS["sqrt at zero"][0]()
    report = find(*plain[:2], **plain[2])
    assert report.loss_scale is None
    assert "GradScaler" not in str(report)


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
    with pytest.raises(NumericsError, match=r"must be an nn\.Module, not function"):
        find_nonfinite(lambda x: x)
    with pytest.raises(NumericsError, match="with statement"):
        find_nonfinite(model).__exit__(None, None, None)
