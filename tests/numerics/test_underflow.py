"""gradient_underflow, counted against real casts."""

import json
import math
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from remedy_tests import says
from small_models import CellRnn, Cnn, Rnn, Transformer, hooks_of, images, loss_of, series, tokens
from torch import nn

from amp_lab import AmpLabError, gradient_underflow
from amp_lab.core.errors import NumericsError

mpl.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

SCALES = (2.0**-20, 1.0, 2.0**8, 2.0**16, 2.0**40)


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
        any_bits(2**17 + 5) * 1e-30,
        torch.zeros(0),
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
    assert "3 values are already inf or NaN" in str(report)


@pytest.mark.parametrize("shape", [(512, 512, 3, 3), (2**20 - 3,), (2**18,)])
def test_of_a_large_gradient_a_sample_is_counted_as_exactly_as_it_says(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2.0**-24
    values[..., -1] = 0.0  # a third of a convolution's weight, as padding leaves it
    values.view(-1)[1] = -65520.0
    report = gradient_underflow(*weighted(values), scales=SCALES)
    row, count = report.parameters, values.numel()
    assert 2**17 / 2 < row.sample < 2**18
    assert row.values == row.nonzero + row.zero == count
    off = count / row.sample**0.5
    assert row.zero == pytest.approx(int((values == 0).sum()), abs=off)
    for scale in SCALES:
        assert counted(row, scale) == pytest.approx(cast(values, scale), abs=off)
    assert (row.largest_scale, row.inf_in_fp16(1.0)) == (0.5, 1)
    assert f"off by {100 / row.sample**0.5:.2f} percentage points" in str(report)


def test_values_of_a_large_gradient_that_are_not_finite_are_all_counted():
    values = torch.full((2**18 + 3,), 1e-9)
    values[5:7] = torch.tensor([math.nan, -math.inf])
    row = gradient_underflow(*weighted(values)).parameters
    assert (row.nonfinite, row.zero_in_fp16(1.0)) == (2, 2**18 + 1)
    nothing = gradient_underflow(*weighted(torch.full((3,), math.nan))).parameters
    assert (nothing.nonfinite, nothing.nonzero) == (3, 0)


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
    with pytest.raises(NumericsError, match=r"backward pass failed \(broken backward\)"):
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


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.again, self.head = self.layer, nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):  # (T,) to (T, 7)
        x = self.embed(tokens)
        return self.head(self.again(self.layer((x @ x.T) @ x)))


def test_the_product_of_a_tied_head_is_named_after_the_head():
    model = Tied()
    report = gradient_underflow(model, model(torch.randint(7, (3,))).square().mean())
    layers = [row.layer for row in report.rows if row.what.startswith("output")]
    assert layers == ["embed", "embed", "layer", "head"]
    assert [row.layer for row in report.rows[4:]] == ["embed", "layer", "layer"]


def test_names_are_the_same_under_autocast():
    model, x = Cnn(), images()
    names = [(r.layer, r.what) for r in gradient_underflow(model, loss_of(model, x)).rows]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            report = gradient_underflow(model, loss_of(model, x))
        assert [(r.layer, r.what) for r in report.rows] == names


class Halved(nn.Module):
    """A linear layer, and a part in fp16 that has no matmul."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return (self.layer(x).half() * 1e-6).float()


def under_autocast():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 3)).float().sum()
    return model, loss * 1e-6


def with_fp16_weights():
    model = nn.Linear(3, 2).half()
    return model, model(torch.ones(4, 3).half()).float().sum() * 1e-6


def with_a_part_in_fp16():
    model = Halved()
    return model, model(torch.ones(4, 3)).sum() * 1e-3


def with_an_fp16_loss():
    model = nn.Linear(3, 2)
    return model, (model(torch.ones(4, 3)).sum() * 1e-6).half() * 1e-3


@pytest.mark.parametrize(
    "make", [under_autocast, with_fp16_weights, with_a_part_in_fp16, with_an_fp16_loss]
)
def test_what_fp16_has_flushed_is_not_counted_as_kept(make):
    report = gradient_underflow(*make())
    assert report.half
    assert report.smallest_scale is None
    assert all(math.isnan(row.lost(1.0)) for row in (*report.rows, report.total))
    text = str(report)
    assert says("underflow.fp16_already", text)
    assert "lost" not in text.partition("\n")[2]
    assert "Loss scales from" not in text
    assert "No loss scale" not in text
    assert "zero %  subn. %" in text
    content = json.loads(report.to_json())
    assert content["half"] is True
    assert content["parameters"]["lost at 1"] is None
    assert content["rows"][0]["lost at 65536"] is None
    assert says("underflow.fp16_already", report._repr_html_())


def test_zeros_and_subnormal_numbers_of_fp16_are_counted():
    model = nn.Linear(3, 1, bias=False).half()
    factors = torch.tensor([[2.0**-20, 2.0**-30, 1.0]]).half()  # the second is 0
    report = gradient_underflow(model, model(factors).float().sum())
    row = report.parameters
    assert (row.values, row.zero, row.subnormal_in_fp16(1.0)) == (3, 1, 1)
    assert "33.3" in str(report)
    assert "50" in str(report)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_loss_in_fp32_or_bf16_has_no_warning(dtype):
    model = Cnn()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        report = gradient_underflow(model, loss_of(model, images()))
    assert not report.half
    assert "computed in fp16" not in str(report)
    assert "lost % at" in str(report)


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
    assert f"20 rows that lose most at 1; .rows has all {len(report.rows)}." in text
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
        (frozen, "no parameter .*requires a gradient"),
        (used_up, "before loss.backward"),
        (lambda: (nn.Linear(2, 1), torch.ones(2, requires_grad=True).sum()), "does not depend on"),
        (lambda: (nn.Linear(2, 1), torch.tensor(1.0)), "the loss has no graph"),
        (lambda: (nn.Linear(2, 1), 1.0), "one number, not float"),
        (lambda: (m := nn.Linear(2, 1), m(torch.ones(3, 2))), r"one number, not \(3, 1\)"),
        (lambda: ("model", torch.tensor(1.0)), r"nn\.Module, not str"),
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


def test_as_json_it_has_the_counts_of_every_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    report = gradient_underflow(model, 1e-8 * model(torch.randn(3, 4)).square().mean())
    content = json.loads(report.to_json())
    assert [row["values"] for row in content["rows"]] == [row.values for row in report.rows]
    assert content["parameters"]["lost at 1"] == report.parameters.zero_in_fp16(1.0) > 0
    assert content["outputs"]["smallest_scale"] == report.outputs.smallest_scale


def numbers(row):
    """The counts and percentages in a row of the table."""
    return [float(word.replace(",", "")) for word in row.split()[4:-1]]


def test_the_table_of_the_page_is_that_of_a_small_network():
    """docs/when_it_breaks.md. Another CPU may round a few of the 2,048 gradients differently."""
    page = Path(__file__).parents[2] / "docs" / "when_it_breaks.md"
    table = page.read_text(encoding="utf-8").partition("```text\nlayer ")[2].partition("```")[0]
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    x, target = torch.randn(32, 64), torch.randint(0, 10, (32,))
    report = str(gradient_underflow(model, nn.functional.cross_entropy(model(x), target) / 1000))
    rows = zip(table.splitlines()[2:], report.splitlines()[2:7], strict=True)
    for shown, found in rows:
        assert shown.split()[0] == found.split()[0]
        assert numbers(found) == pytest.approx(numbers(shown), abs=0.5)
