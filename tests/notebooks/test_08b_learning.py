"""Notebook 08b and its other failures: what their sentences say, where no cell asserts it."""

import math
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from course.failures import cuda_rules

from amp_lab.difference import compare_runs
from amp_lab.failures import read_explanation
from amp_lab.numerics import find_nonfinite


def scaled_steps(loss_of, steps, scaler=None):
    """Train two weights; return them, and the loss scale at the end."""
    scaler = scaler or torch.amp.GradScaler("cpu")
    weights = nn.Parameter(torch.tensor([0.0, 2.0]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights)).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights.detach(), scaler.get_scale()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda w: w.square().sqrt().sum(),
        lambda w: w.log().sum(),
        lambda w: (w / w).sum(),
        lambda w: math.nan * w.sum(),
        lambda w: ((w + 3).half() * 30000).float().softmax(0)[0],  # both are inf in fp16
    ],
)
def test_what_is_not_finite_at_any_scale_takes_the_scale_to_0(loss_of):
    """AMP0002 and AMP0070: all steps are skipped, however small the scale is."""
    weights, scale = scaled_steps(loss_of, steps=170)
    assert scale == 0
    assert weights.tolist() == [0.0, 2.0]


def test_find_nonfinite_names_the_square_root():
    """AMP0002."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    with find_nonfinite(model) as finder:
        model(torch.ones(1, 2)).square().sqrt().sum().backward()
    assert "sqrt" in str(finder.report)


def test_gradients_whose_nan_became_0_teach_the_weight_nothing():
    weights = nn.Parameter(torch.tensor([0.0, 2.0]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        (weights - 1).square().mul(torch.tensor([math.inf, 1.0])).sum().backward()
        weights.square().sqrt().sum().backward()
        weights.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    assert weights[0] == 0
    assert weights[1] != 2


def test_fp16_has_no_number_below_2_to_minus_25_but_zero():
    """AMP0003."""
    smallest = torch.tensor(2.0**-25)
    assert (0.999 * smallest).half() == 0
    assert (1.001 * smallest).half() > 0


def test_gradients_that_became_zero_stay_zero_at_any_learning_rate():
    assert 1e6 * torch.tensor(1e-4 / 16384).half() == 0


def test_a_gradient_of_2_keeps_the_scale_of_fp16_at_2_to_14_or_15():
    """AMP0028."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    model = nn.Linear(2, 2)
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=1e-3), set()
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.tensor([[1.0, 2.0]])).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.add(scaler.get_scale())
    assert scales == {2.0**14, 2.0**15}


def test_the_cleared_cache_does_what_another_block_does():
    """AMP0025."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            model(x)
        torch.clear_autocast_cache()
        model(x).sum().backward()
    assert model.weight.grad is not None


def test_data_that_forward_casts_stays_cast():
    """A loss with weights of its own, as a library of metric losses had."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            self.W.data = self.W.to(x.dtype)
            return (x @ self.W).sum()

    loss = Loss()
    loss(torch.ones(1, 2).bfloat16())
    assert loss.W.dtype is torch.bfloat16
    loss.W.data = loss.W.float()
    loss(torch.ones(1, 2))
    assert loss.W.dtype is torch.float32


def test_the_learning_rate_that_moves_a_weight_of_1_is_too_long_for_a_small_one():
    weights = torch.tensor([1.0, 0.001]).bfloat16()
    moved = weights - 0.004
    assert moved[0] < 1
    assert moved[1].abs() > 2 * weights[1]


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 0.0019), (torch.float16, 0.00024)])
def test_a_small_update_of_a_weight_is_rounded_away(dtype, lost):
    """AMP0029: 0.2 % of the weight in bf16, 0.02 % in fp16."""
    weights = torch.arange(1, 2, torch.finfo(dtype).eps).to(dtype)  # all from 1 to 2
    for part in (lost, -lost):
        assert torch.equal((weights.double() * (1 + part)).to(dtype), weights)
    assert not torch.equal((weights.double() * (1 + 1.5 * lost)).to(dtype), weights)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "NAdam"])
def test_optimizers_that_divide_by_zero_in_fp16(name):
    """AMP0121: the averages are fp16, too."""
    for gradient, is_broken in ((0.0, torch.isnan), (1e-4, torch.isinf)):
        weight = nn.Parameter(torch.ones(1).half())
        weight.grad = torch.full_like(weight, gradient)
        optimizer = getattr(torch.optim, name)([weight])
        optimizer.step()
        assert is_broken(weight).all()
        averages = [value for value in optimizer.state[weight].values() if value.shape == (1,)]
        assert {value.dtype for value in averages} == {torch.float16}


def average_of(model, average):
    """The average of a weight that is 1, and then 2 for a thousand steps."""
    for value in [1.0] + [2.0] * 1000:
        nn.init.constant_(model.weight, value)
        average.update_parameters(model)
    return average.module.weight[0, 0].item()


def test_an_average_of_bf16_weights_needs_fp32():
    """AMP0122."""
    model = nn.Linear(2, 2).bfloat16()
    in_bf16 = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    assert average_of(model, in_bf16) == 1
    in_fp32 = AveragedModel(
        model, avg_fn=lambda average, weight, _: average.lerp(weight.float(), 1e-3)
    ).float()
    assert average_of(model, in_fp32) == pytest.approx(2 - 0.999**1000, rel=1e-3)
    one = torch.ones(1).bfloat16()
    assert one.lerp(2 * one, 0.5) == 1.5  # a decay of 0.5 is more than rounding
    one = torch.ones(1).half()
    assert one.lerp(1.2 * one, 1e-3) == 1  # 0.0002 is less than half of the distance, 2^-10


def test_timesteps_and_a_noise_schedule_in_bf16():
    """AMP0124."""
    assert torch.tensor([998.0, 999.0]).bfloat16().tolist() == [1000, 1000]
    schedule = torch.tensor([0.9999, 0.98])  # how much of an image is left after each step
    assert (1 - schedule.bfloat16()).sqrt()[0] == 0  # no noise
    assert (1 - schedule.half()).sqrt()[0] == 0
    assert (1 - schedule).sqrt().bfloat16()[0] > 0
    timestep = torch.tensor(937.0)
    embedding = timestep.sin()
    assert (embedding.bfloat16() - embedding).abs() < 0.002  # only the result is cast
    assert (timestep.bfloat16().float().sin() - embedding).abs() > 0.9  # 936 for 937
    none = 1 - schedule.bfloat16()[0]
    assert (none / none).isnan()
    assert (1 / none).isinf()


class BoxMask(nn.Module):
    """Which rows of an image lie in a box, counted from above."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype

    def forward(self, box):  # first and last row
        box = box.to(self.dtype)
        rows = torch.arange(2100, dtype=box.dtype)
        return ((rows >= box[0]) & (rows <= box[1])).float().cumsum(0)


def test_diff_names_an_arange_in_fp16_only_if_the_boxes_are_cast():
    """AMP0125: rows 2048 and 2049 are the same number of fp16, so the box gets both."""
    box = torch.tensor([10.0, 2048.0])
    exact, rounded = BoxMask(), BoxMask(torch.float16)
    assert rounded(box)[-1] == exact(box)[-1] + 1

    def under_autocast(box):
        with torch.autocast("cpu", dtype=torch.float16):
            return exact(box)

    assert compare_runs(exact, rounded, box).first.op == "arange"
    assert compare_runs(exact, under_autocast, box).first is None


def test_boxes_that_nms_shifts_have_no_width_in_half_precision():
    """AMP0125."""
    edges = torch.tensor([53000.0, 53030.0])
    assert edges.half().diff() == 32  # one spacing
    assert edges.bfloat16().diff() == 0
    assert torch.arange(52992, 53249).bfloat16().unique().tolist() == [52992, 53248]  # 256 apart


def test_a_router_in_bf16_chooses_other_experts_even_if_its_logits_are_cast():
    """AMP0126."""
    torch.manual_seed(0)
    tokens, router = torch.randn(2048, 64), torch.randn(64, 64) / 8

    def experts_of(logits):
        return logits.topk(2).indices.sort(dim=-1).values

    exact = experts_of(tokens @ router)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = experts_of((tokens @ router).float())
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(experts_of(tokens @ router), exact)
    assert not torch.equal(rounded, exact)


def test_one_scaler_for_two_losses_has_the_scale_that_the_sick_one_leaves():
    """AMP0129: the small gradient of the first loss becomes zero in fp16."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=1.0) for weight in weights)

    def small_loss(weight):
        return 1e-3 * (weight.half() * 1e-4).float().sum()  # a gradient of 1e-7 times the scale

    def after_40_steps(scaler_of_first, scaler_of_second):
        for _ in range(40):
            for optimizer in (first, second):
                optimizer.zero_grad()
            scaler_of_first.scale(small_loss(weights[0])).backward()
            scaler_of_second.scale(weights[1].sum() * math.nan).backward()
            scaler_of_first.step(first)
            scaler_of_second.step(second)
            for scaler in {scaler_of_first, scaler_of_second}:
                scaler.update()
        return weights[0].grad.item()

    shared = torch.amp.GradScaler("cpu")
    assert after_40_steps(shared, shared) == 0
    assert after_40_steps(torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")) > 0


def test_a_ratio_of_probabilities_needs_the_logits_in_fp32():
    """AMP0090: log-probabilities of -7 are 2^-5 apart in bf16."""
    torch.manual_seed(0)
    old = torch.randn(64, 1000)
    old, new = old.bfloat16(), (old + 0.01 * torch.randn(64, 1000)).bfloat16()

    def log_ratio(dtype):
        return F.log_softmax(new.to(dtype), -1).double() - F.log_softmax(old.to(dtype), -1).double()

    exact = log_ratio(torch.float64)
    assert (log_ratio(torch.float32) - exact).abs().max() < 1e-4
    assert (log_ratio(torch.bfloat16) - exact).abs().max() > 1e-2
    assert torch.tensor(-10.0).bfloat16() + 2**-6 == -10  # less than half of the distance, 2^-4
    with cuda_rules(torch.bfloat16):
        logits = torch.ones(1, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
        assert logits.dtype is torch.bfloat16
        assert logits.log_softmax(-1).dtype is torch.float32


def test_a_dequantized_weight_is_cast_to_the_dtype_of_the_input():
    """AMP0085: with a bias, as in the report."""
    x, bias = torch.ones(1, 2).bfloat16(), torch.zeros(2).bfloat16()
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn).float() * torch.ones(())
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        F.linear(x, weight, bias)
    assert F.linear(x, weight.to(x.dtype), bias).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, weight, bias).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_promoted_to_nothing_and_has_few_operations(dtype):
    """AMP0120."""
    stored = torch.ones(2, 2).to(dtype)
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        stored + torch.ones(2, 2)
    name = str(dtype).removeprefix("torch.float8_")
    with pytest.raises(NotImplementedError, match=f"not implemented for 'Float8_{name}'"):
        stored + stored


def test_fp8_without_a_scale_has_no_small_and_no_large_weights():
    """AMP0120."""
    found = torch.tensor([0.99 * 2**-10, 1.01 * 2**-10, 448.0]).to(torch.float8_e4m3fn).float()
    assert found.tolist() == [0, 2**-9, 448]
    large = torch.tensor([449.0, 1000.0]).to(torch.float8_e4m3fn).float()
    assert (large.isnan() | (large == 448)).all()


# Rows of the table


def scale_after_one_overflow(*, clear):
    """The scale after 40 steps of which the fourth overflows, with or without `zero_grad`."""
    weight, scaler = nn.Parameter(torch.ones(1)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight])
    for step in range(40):
        if clear:
            optimizer.zero_grad()
        scaler.scale(weight.sum() * (torch.inf if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.grad.isfinite().all() == clear
    return scaler.get_scale()


def test_without_zero_grad_one_overflow_lasts():
    """AMP0211."""
    assert scale_after_one_overflow(clear=True) == 2.0**15
    assert scale_after_one_overflow(clear=False) == 2.0**-21


def test_the_loss_of_bf16_logits_is_bf16_without_autocast():
    """AMP0213."""
    logits, target = torch.tensor([[0.0, 6.001]]).bfloat16(), torch.tensor([0])
    assert F.cross_entropy(logits, target).dtype is torch.bfloat16
    assert F.cross_entropy(logits.float(), target).dtype is torch.float32
    assert F.cross_entropy(logits, torch.ones(1, 2)).dtype is torch.float32  # no class indices
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.cross_entropy(logits, target).dtype is torch.float32
    assert torch.tensor(4.0).bfloat16() + 2**-5 == torch.tensor(4.0 + 2**-5)
    assert torch.tensor(4.0).bfloat16() + 2**-7 == 4
    logits = torch.tensor([8.5, 9.0, 10.0]).half()
    assert logits.sigmoid().dtype is logits.softmax(-1).dtype is torch.float16
    assert len(set(logits.sigmoid().tolist())) == 1  # three samples with the same score
    assert len(set(logits.float().sigmoid().tolist())) == 3


@pytest.mark.parametrize(("dtype", "end"), [(torch.bfloat16, 1024), (torch.float16, 8192)])
def test_a_sum_of_losses_no_longer_increases(dtype, end):
    """AMP0123."""
    total = torch.tensor(0.0, dtype=dtype)
    for _ in range(5000):
        before = total.clone()
        total += torch.tensor(2.5)
    assert total == end
    assert total - before == 0  # the increase, as a log shows it


def test_an_angle_below_2048_is_rounded_in_fp16_if_it_is_no_whole_number():
    """AMP0030."""
    assert torch.arange(2049).half().unique().numel() == 2049
    angles = torch.arange(2048) * 10000 ** (-2 / 64)  # the second frequency of 64 dimensions
    assert angles.half().unique().numel() < 2048
    assert (angles.half().float() - angles).abs().max() > 0.4


@pytest.mark.parametrize("keep_fp32", [False, True])
def test_a_running_mean_in_bf16_stops_before_the_mean(keep_fp32):
    """AMP0297."""
    assert torch.tensor(65520.0).half().isinf()
    model = nn.Sequential(nn.BatchNorm1d(4)).bfloat16()
    if keep_fp32:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()
    x = torch.full((8, 4), 5.0, dtype=torch.bfloat16)
    for _ in range(300):
        assert model(x).dtype is torch.bfloat16
    mean = model[0].running_mean
    assert (mean.float() < 4.95).all() == (not keep_fp32)
    update_bn([x], model)
    assert torch.allclose(model[0].running_mean.float(), torch.tensor(5.0))
    fp16 = nn.BatchNorm1d(1).half()
    for _ in range(100):
        fp16(torch.tensor([[-400.0], [400.0]]).half())
    assert fp16.running_var.isinf().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = nn.BatchNorm1d(4)
        layer(x)
    assert layer.running_mean.dtype is torch.float32


def test_a_running_sum_in_bf16_has_equal_neighbours_above_256():
    """AMP0300."""
    mask = torch.ones(400, dtype=torch.bfloat16)
    assert len(set(mask.cumsum(0).tolist())) < 400
    assert mask.cumsum(0, dtype=torch.float32).tolist() == list(range(1, 401))
    assert mask.long().cumsum(0).tolist() == list(range(1, 401))
    assert torch.full((700,), 100.0).half().cumsum(0)[-1].isinf()
    many = torch.ones(5000, dtype=torch.bfloat16)
    assert many.cumsum(0)[-1] == torch.tensor(5000.0).bfloat16()  # a CPU adds up in fp32


@pytest.mark.parametrize(("dtype", "end"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_sums_by_index_stop_where_the_next_integer_is_missing(dtype, end):
    """AMP0304."""
    ones, index = torch.ones(5000, dtype=dtype), torch.zeros(5000, dtype=torch.long)
    zeros = torch.zeros(1, dtype=dtype)
    assert zeros.index_add(0, index, ones) == end
    rows = torch.zeros(1, 2, dtype=dtype).index_add(0, index, ones[:, None].expand(-1, 2))
    assert (rows - 5000).abs().max() < 16  # rows are added in fp32, and rounded once
    assert zeros.index_put((index,), ones, accumulate=True) == end
    assert torch.segment_reduce(ones, "sum", lengths=torch.tensor([5000])) == end
    h = torch.zeros(2, dtype=dtype, requires_grad=True)
    h[index].sum().backward()
    assert h.grad[0] == end
    rows = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    rows[index].sum().backward()
    assert (rows.grad[0] == end).all()
    embedding = nn.Embedding(2, 1, dtype=dtype)
    embedding(index).sum().backward()
    assert embedding.weight.grad[0] == end
    assert torch.zeros(1).index_add(0, index, ones.float()) == 5000
    in_fp32 = torch.zeros(2, dtype=dtype, requires_grad=True)
    in_fp32.float()[index].sum().backward()
    assert abs(in_fp32.grad[0] - 5000) < 16  # rounded once
    embedding = nn.Embedding(2, 1)
    with torch.autocast("cpu", dtype=dtype):
        embedding(index).sum().backward()
    assert embedding.weight.grad[0] == 5000


@pytest.mark.parametrize("stored_as", [list, torch.tensor])
def test_a_rounded_timestep_is_outside_of_the_schedule(stored_as):
    """AMP0124."""
    alphas_cumprod = stored_as([0.5] * 1000)
    assert alphas_cumprod[int(torch.tensor(999.0))] == 0.5
    with pytest.raises(IndexError) as raised:
        alphas_cumprod[int(torch.tensor(999.0).bfloat16())]
    text = "".join(traceback.format_exception(raised.value))
    assert read_explanation(text).failures[0].code == "AMP0124"


@pytest.mark.filterwarnings("ignore")  # of torchao
@pytest.mark.parametrize("lower_bound", [None, 1e-12])
def test_a_row_of_zeros_needs_a_lower_bound_for_its_scale(lower_bound):
    """AMP0088: activations are quantized by this function."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=quantization.PerRow(), activation_value_lb=lower_bound
    )
    quantized = quantization.Float8Tensor.from_hp(
        torch.zeros(2, 64).bfloat16(),
        granularity=quantization.PerRow(),
        hp_value_lb=config.activation_value_lb,
    )
    assert quantized.qdata.float().isnan().any() == (lower_bound is None)


def test_torchao_has_fast_accumulation_only_for_the_output():
    """AMP0280."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from torchao.float8 import config as settings

    def fast(config):
        names = ("output", "grad_input", "grad_weight")
        return [getattr(config, f"gemm_config_{name}").use_fast_accum for name in names]

    assert fast(float8.Float8LinearConfig()) == [True, False, False]
    exact = settings.Float8GemmConfig(use_fast_accum=False)
    assert fast(float8.Float8LinearConfig(gemm_config_output=exact)) == [False, False, False]


def test_more_ranks_make_a_sum_of_gradients_in_bf16_less_exact():
    """AMP0202."""
    torch.manual_seed(0)
    errors = []
    for ranks in (8, 64, 512):
        gradients = (torch.randn(ranks, 1024) + 0.2).bfloat16()
        total = torch.zeros(1024).bfloat16()
        for gradient in gradients:
            total += gradient
        exact = gradients.double().sum(0)
        errors.append((total - exact).norm() / exact.norm())
        assert (gradients.float().sum(0) - exact).norm() / exact.norm() < 1e-5
    assert errors[0] < errors[1] < errors[2]


def test_small_weights_of_lora_are_zero_in_fp16_but_not_in_bf16():
    """AMP0201."""
    weight = torch.tensor(2e-8)
    assert weight.half() == 0
    assert weight.bfloat16() != 0


def test_a_static_scale_clips_what_is_larger_than_the_calibration_data():
    """AMP0203."""
    scale = torch.tensor([1.0, 2.0]).max() / 448
    found = (torch.tensor([1.5, 4.0]) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (found.float() * scale).tolist() == pytest.approx([1.5, 2.0], rel=0.07)
    dynamic = torch.tensor(4.0) / 448
    assert (4.0 / dynamic).to(torch.float8_e4m3fn).float() * dynamic == pytest.approx(4.0)


def test_what_accumulates_in_half_of_the_last_digit_is_lost():
    """AMP0273: every update below 1/512 of the state is rounded away."""
    state = torch.arange(1, 2, 2**-7)  # all numbers of bf16 from 1 to 2
    assert torch.equal((state * (1 + 0.0019)).bfloat16().float(), state)
    assert not torch.equal((state * (1 + 0.003)).bfloat16().float(), state)
