"""Notebook 08a and its table: statements that no cell checks."""

import math
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course.failures import cuda_rules

ROWS = Path(__file__).parents[2] / "notebooks/course/other_failures/08a_values.toml"


def cure_of(code: str) -> str:
    rows = tomllib.loads(ROWS.read_text(encoding="utf-8"))["failure"]
    (cure,) = [row["cure"] for row in rows if row["code"] == code]
    return cure


class Fp32Linear(nn.Linear):
    """An fp32 region that is a layer itself."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def test_a_layer_that_runs_in_fp32_stays_finite_with_the_weights_of_the_original():
    layer, in_fp32 = nn.Linear(2, 2), Fp32Linear(2, 2)
    in_fp32.load_state_dict(layer.state_dict())
    with torch.no_grad():
        in_fp32.weight.fill_(60000.0)
    with torch.autocast("cpu", torch.float16):
        output = in_fp32(torch.ones(1, 2).half())
    assert output.dtype is torch.float32
    assert output.isfinite().all()


@pytest.mark.parametrize("reaches_the_norm", [False, True])
def test_an_fp32_region_has_to_reach_to_the_op_that_makes_the_values_small(reaches_the_norm):
    large = Fp32Linear(2, 2)
    with torch.no_grad():
        large.weight.fill_(60000.0)
    between = nn.LayerNorm(2) if reaches_the_norm else nn.Identity()
    with torch.autocast("cpu", torch.float16):
        output = nn.Sequential(large, between, nn.Linear(2, 2))(torch.ones(1, 2))
    assert output.isfinite().all() == reaches_the_norm


@pytest.mark.parametrize("value", [150_000.0, 1e-4 / 16384, -1e9, 1e-8, 300.0**2, 1e6, 2.0**17])
def test_what_leaves_the_range_of_fp16_stays_in_that_of_bf16(value):
    assert torch.tensor(value).half().abs() in (0, torch.inf)
    assert torch.tensor(value).bfloat16().abs() not in (0, torch.inf)


@pytest.mark.parametrize("op", ["full", "clamp", "pad", "fill_", "index_fill", "masked_fill_"])
def test_ops_with_a_constant_refuse_one_that_does_not_fit(op):
    h = torch.zeros(2).half()
    calls = {
        "full": lambda: torch.full((2,), -1e9, dtype=torch.float16),
        "clamp": lambda: h.clamp(min=-1e9),
        "pad": lambda: F.pad(h, (1, 1), value=-1e9),
        "fill_": lambda: h.fill_(-1e9),
        "index_fill": lambda: h.index_fill(0, torch.tensor([0]), -1e9),
        "masked_fill_": lambda: h.masked_fill_(h == 0, -1e9),
    }
    with pytest.raises(
        RuntimeError, match="cannot be converted to type c10::Half without overflow"
    ):
        calls[op]()


def test_an_assignment_to_one_element_stores_infinity():
    scores = torch.zeros(2, 2).half()
    scores[0, 0] = -1e9
    assert scores[0, 0] == -torch.inf
    assert (torch.zeros(2).half() + -1e9).tolist() == [-torch.inf] * 2  # AMP0004


def test_attention_that_returns_its_weights_is_nan_where_everything_is_padding():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x, padding = torch.randn(1, 2, 4), torch.ones(1, 2, dtype=torch.bool)
    assert attention(x, x, x, key_padding_mask=padding)[0].isnan().all()
    output, _ = attention(x, x, x, key_padding_mask=padding, need_weights=False)
    assert output.isfinite().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_without_weights_is_nan_on_its_fast_path_where_everything_is_padding():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x, padding = torch.randn(1, 2, 4), torch.ones(1, 2, dtype=torch.bool)
    is_nan = []
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        for fast, with_gradients in ((True, False), (True, True), (False, False)):
            torch.backends.mha.set_fastpath_enabled(fast)
            with torch.set_grad_enabled(with_gradients):
                output, _ = attention(x, x, x, key_padding_mask=padding, need_weights=False)
            is_nan.append(output.isnan().any().item())
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert is_nan == [True, False, False]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_layer_is_nan_in_evaluation_only_where_everything_is_padding():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    x, padding = torch.randn(1, 2, 4), torch.ones(1, 2, dtype=torch.bool)
    assert layer(x, src_key_padding_mask=padding).isfinite().all()
    layer.eval()
    assert layer(x, src_key_padding_mask=padding).isfinite().all()  # with gradients
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            assert layer(x, src_key_padding_mask=padding).isnan().any()
            torch.backends.mha.set_fastpath_enabled(False)
            assert layer(x, src_key_padding_mask=padding).isfinite().all()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_autocast_for_cuda_takes_a_norm_in_fp32_but_no_division_by_a_largest_value():
    with cuda_rules():
        h = torch.rand(2, 2, device="cuda").half()
        assert F.normalize(h).dtype is torch.float32
        assert (h / (h.abs().amax(-1, keepdim=True) + 1e-8)).dtype is torch.float16


def test_autocast_for_cuda_takes_a_logarithm_in_fp32_after_the_probability_is_rounded():
    with cuda_rules():
        p = torch.rand(2, device="cuda").half().sigmoid()
        assert p.clamp(1e-6, 1 - 1e-6).dtype is torch.float16
        assert p.log().dtype is torch.float32


def test_autocast_for_cuda_takes_a_power_and_a_sum_in_fp32_but_no_product():
    with cuda_rules():
        h = torch.rand(2, device="cuda").half()
        assert ((h * h).dtype, h.pow(2).dtype) == (torch.float16, torch.float32)
        assert h.sum().dtype is torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_adam_divides_by_zero_with_fp16_parameters_unless_it_is_fused(fused):
    weight = nn.Parameter(torch.ones(1).half())
    weight.grad = torch.full_like(weight, 1e-5)
    torch.optim.Adam([weight], fused=fused).step()
    assert weight.isfinite().all() == fused


def test_a_larger_epsilon_of_adam_shortens_steps_with_small_gradients():
    steps = []
    for eps in (1e-8, 1e-4):
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.full_like(weight, 1e-5)
        torch.optim.Adam([weight], lr=0.1, eps=eps).step()
        steps.append(1 - weight.item())
    assert steps[0] > 10 * steps[1]


def test_costs_of_a_matmul_need_a_region_without_autocast_or_smaller_inputs():
    """AMP0087: `.float()` alone is not enough."""
    points = torch.full((1, 1000), 10.0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert (points.float() @ points.T / 1000).isinf()
        assert (points / 1000) @ points.T == 100
        with torch.autocast("cpu", enabled=False):
            assert points @ points.T / 1000 == 100
    assert torch.tensor([1.2266, 1.2250]).bfloat16().diff() == 0  # close costs become equal
    boxes, targets = torch.rand(1, 4), torch.tensor([[torch.nan, 0.5, 0.5, 0.5]])
    assert torch.cdist(boxes, targets, p=1).isnan()  # a target that is not finite


def test_a_16_bit_image_and_a_batch_without_labels_give_inf_and_nan():
    """AMP0112, and AMP0114 on labels that are all -100."""
    image = torch.tensor([[65535.0, 1200.0]])
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    assert layer(image).isfinite().all()
    with torch.autocast("cpu", torch.float16):
        assert layer(torch.tensor([[40_000.0, 40_000.0]])).isinf().all()  # each input fits
    assert layer(torch.tensor([[torch.nan, 1.0]])).isnan().all()  # in fp32
    assert image.half().isinf().tolist() == [[True, False]]
    assert torch.tensor([65519.0, 65520.0]).half().tolist() == [65504, torch.inf]
    with torch.autocast("cpu", torch.float16):
        assert nn.Linear(2, 2)(image).dtype is torch.float16
        assert nn.Linear(2, 2).double()(image.double()).dtype is torch.float64  # is not cast
    assert (image / 65535).half().isfinite().all()
    stored = torch.tensor([0, 65535], dtype=torch.uint16)
    assert stored.isfinite().all()
    assert stored.float().abs().max() == 65535
    broken = torch.tensor([torch.nan, torch.inf]).half()
    assert torch.nan_to_num(broken).tolist() == [0, 65504]
    logits, ignored = torch.randn(2, 3), torch.tensor([-100, -100])
    assert F.cross_entropy(logits, ignored).isnan()


def test_the_ctc_loss_of_a_target_that_is_too_long_is_infinite_in_fp32():
    """AMP0115."""

    def loss(length, target, **options):
        log_probabilities = torch.zeros(length, 1, 3, requires_grad=True).log_softmax(-1)
        lengths = torch.tensor([length]), torch.tensor([len(target)])
        return F.ctc_loss(log_probabilities, torch.tensor([target]), *lengths, **options)

    assert loss(2, [1, 2]).isfinite()
    assert loss(2, [1, 1]).isinf()  # one more step for two equal labels in a row
    assert loss(3, [1, 1]).isfinite()
    assert loss(3, [1, 2, 1]).isfinite()
    assert loss(2, [1, 2, 1]).isinf()
    assert loss(2, [1, 1], zero_infinity=True) == 0
    logits = torch.full((2, 1, 3), 1e5).half().float().requires_grad_()  # infinite in fp16
    lengths = torch.tensor([2]), torch.tensor([1])
    overflowed = F.ctc_loss(
        logits.log_softmax(-1), torch.tensor([[1]]), *lengths, zero_infinity=True
    )
    assert overflowed.isnan()
    one_negative = torch.tensor([0.0, 0.0, -1e5]).half().float().expand(2, 1, 3)
    assert F.ctc_loss(one_negative.log_softmax(-1), torch.tensor([[1]]), *lengths).isfinite()
    with (
        pytest.warns(UserWarning, match="Error detected|Anomaly Detection"),
        pytest.raises(
            RuntimeError, match="'CtcLossBackward0' returned nan values in its 0th output"
        ),
        torch.autograd.set_detect_anomaly(True),
    ):
        loss(2, [1, 1]).backward()


def test_the_scale_grows_until_gradients_overflow_and_that_step_is_skipped():
    """AMP0008: the step whose NaN would stop anomaly detection."""
    weight, keep = nn.Parameter(torch.ones(2)), torch.tensor([0.0, 1.0]).half()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
    stepped = []
    for _ in range(4):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight.half() * keep).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(weight, before))
    assert stepped == [True, True, False, True]  # 2^16 is infinite in fp16
    assert weight.isfinite().all()


def test_a_scale_of_1_with_a_long_interval_does_not_grow():
    """AMP0008."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    weight = nn.Parameter(torch.ones(1))
    for _ in range(3):
        weight.grad = torch.ones(1)
        scaler.scale(weight.sum())
        scaler.step(torch.optim.SGD([weight], lr=0.1))
        scaler.update()
    assert scaler.get_scale() == 1


def test_close_numbers_are_one_number_of_bf16():
    """AMP0118: no range is involved."""

    def stretch(h):
        centred = h - h.mean()
        return centred / centred.abs().max()

    close = torch.tensor([1.0, 1.001])
    assert stretch(close).isfinite().all()
    assert stretch(close.half()).isfinite().all()
    assert stretch(close.bfloat16()).isnan().all()
    assert torch.tensor([1.004, 1.0117]).bfloat16().diff() == 0  # 0.77 % apart
    rounded = close.bfloat16()
    assert ((rounded - rounded.mean()) / rounded.std()).isnan().all()
    assert (1 / rounded.std()).isinf()


def test_a_difference_of_bf16_scores_needs_the_matmul_in_fp32_too():
    """AMP0118."""
    queries, keys = torch.ones(1, 2), torch.tensor([[1.0, 0.0], [1.0, 2e-3]])

    def stretched(scores):
        low, high = scores.aminmax()
        return (scores - low) / (high - low)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stretched((queries @ keys.T).float()).isnan().any()
        with torch.autocast("cpu", enabled=False):
            scores = queries.float() @ keys.float().T
    assert stretched(scores).isfinite().all()


def test_the_trainer_logs_a_loss_of_0_where_it_is_nan(tmp_path):
    """AMP0114."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Nan(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x, labels=None):
            return {"loss": (self.weight * x).sum() * math.nan}

    def logged(**options):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, logging_steps=1, report_to=[], use_cpu=True, **options
        )
        data = [{"x": torch.ones(1), "labels": torch.ones(1)}]
        model = Nan()
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        assert model.weight.isnan()
        return trainer.state.log_history[0]

    assert logged()["loss"] == 0
    assert math.isnan(logged()["grad_norm"])
    assert math.isnan(logged(logging_nan_inf_filter=False)["loss"])


def test_remove_invalid_values_makes_nan_a_logit_of_0():
    """AMP0065: what Transformers adds to `generate` for this option."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    logits = torch.full((1, 4), math.nan).half()
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        torch.multinomial(logits.softmax(-1), 1)
    remove = transformers.InfNanRemoveLogitsProcessor()
    repaired = remove(torch.zeros(1, 1, dtype=torch.long), logits)
    assert repaired.tolist() == [[0, 0, 0, 0]]
    torch.multinomial(repaired.softmax(-1), 1)  # no error: each token is as likely


def test_a_nan_in_the_weights_makes_the_logits_nan_in_every_dtype():
    """AMP0065."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(2, 3).to(dtype)
        with torch.no_grad():
            layer.weight[0, 0] = torch.nan
        probabilities = layer(torch.ones(1, 2, dtype=dtype)).softmax(-1)
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            torch.multinomial(probabilities, 1)


def test_an_epsilon_below_3e_8_is_zero_in_fp16():
    """AMP0005."""
    assert torch.tensor([1e-8, 1e-12, 2.9e-8]).half().tolist() == [0, 0, 0]
    assert torch.tensor(3.1e-8).half() > 0


@pytest.mark.parametrize(("eps", "is_finite"), [(1e-8, False), (1e-3, True)])
def test_a_tiny_epsilon_makes_the_gradient_of_a_row_of_zeros_huge(eps, is_finite):
    """AMP0005: in fp32, with an fp16 row."""
    row = torch.zeros(1, 2).half().requires_grad_()
    h = row.float()
    (h / (h.abs().amax(-1, keepdim=True) + eps)).sum().backward()
    assert row.grad.isfinite().all() == is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_from_logits_are_finite_where_a_probability_rounds_to_1(dtype):
    """AMP0111."""
    logits = torch.tensor([30.0, -30.0], dtype=dtype)
    assert logits.sigmoid()[0] == 1
    assert F.logsigmoid(logits).isfinite().all()
    assert F.logsigmoid(-logits).isfinite().all()
    assert F.cross_entropy(logits[None], torch.tensor([1])).isfinite()
    assert torch.tensor(1 - 1e-6).to(dtype) == 1
    p = logits.float().sigmoid().clamp(1e-7, 1 - 1e-7)
    assert torch.stack((p.log(), (1 - p).log())).isfinite().all()


def test_the_square_of_256_is_infinite_in_fp16():
    """AMP0006."""
    assert torch.tensor([255.0, 256.0]).half().square().isinf().tolist() == [False, True]


@pytest.mark.parametrize("is_finite", [False, True])
def test_the_check_before_a_checkpoint_finds_infinite_running_statistics(is_finite):
    """AMP0007: the expression of the notebook."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    if not is_finite:
        model[0].running_var[0] = torch.inf
    buffers = model.named_buffers()
    assert all(b.isfinite().all() for name, b in buffers if "running" in name) == is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_that_overflow_give_gptq_a_matrix_without_a_cholesky_decomposition(dtype):
    """AMP0207: the matrix and the damping of GPTQ."""
    inputs = torch.tensor([[7e4, 0.0, 1.0], [1.0, 2.0, 3.0]]).to(dtype).float()
    matrix = inputs.T @ inputs
    damped = matrix + 0.01 * matrix.diag().mean() * torch.eye(3)
    factor, info = torch.linalg.cholesky_ex(damped)  # `cholesky` raises an error if `info` is not 0
    overflows = dtype is torch.float16
    assert matrix.isnan().any() == overflows
    assert (info != 0 or not factor.isfinite().all()) == overflows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_is_filled_with_the_least_number_becomes_an_average(dtype):
    """AMP0110."""
    scores = torch.tensor([[1.0, 3.0]], dtype=dtype)
    masked = scores.masked_fill(torch.tensor([[True, True]]), torch.finfo(scores.dtype).min)
    assert masked.softmax(-1).tolist() == [[0.5, 0.5]]


def test_an_integer_weight_overflows_in_fp16_before_its_scale():
    """AMP0298."""
    x = torch.full((1, 64), 10.0).half()
    weight, scale = torch.full((64, 1), 127, dtype=torch.int8), torch.tensor(0.01).half()
    assert ((x @ weight.to(x.dtype)) * scale).isinf().all()
    exact = 64 * 10 * 127 * 0.01
    for one_scale in (scale, scale.float(), torch.full((1, 1), 0.01)):
        result = x @ (weight * one_scale).to(x.dtype)
        assert torch.allclose(result.float(), torch.tensor(exact), rtol=1e-2)
    b = x.bfloat16()
    assert ((b @ weight.to(b.dtype)) * scale.bfloat16()).isfinite().all()


def test_a_scale_that_is_computed_in_fp16_is_infinite_for_small_values():
    """AMP0298."""
    x = torch.tensor([0.0, 0.006]).half()
    assert (448 / torch.tensor(0.0068).half()).isinf()
    assert (448 / torch.tensor(0.0069).half()).isfinite()
    assert (448 / x.abs().max()).isinf()
    assert (x * (448 / x.abs().max()))[0].isnan()
    scale = 448 / x.float().abs().max()
    assert (x.float() * scale).tolist() == [0.0, pytest.approx(448)]


def test_a_sum_in_fp16_overflows_where_a_mean_does_not():
    """AMP0303."""
    x = torch.ones(100_000).half()
    assert (x.sum() / x.numel()).isinf()
    assert x.sum(dtype=torch.float32) == 100_000
    assert torch.tensor([65504.0, 15.0]).half().sum() == 65504
    assert torch.tensor([65504.0, 16.0]).half().sum().isinf()
    assert x.mean() == 1
    wide = torch.tensor([400.0, -400.0]).half()
    assert wide.var().isinf()
    assert wide.float().var() == 320_000
    logits = torch.zeros(1, 50_000).half()
    assert logits.log_softmax(-1).sum(-1).isinf()  # as in label smoothing
    assert logits.float().log_softmax(-1).sum(-1).isfinite()
    assert torch.full((70_000,), 1.0).half().log().add(1).sum().isinf()
    with cuda_rules():
        assert torch.ones(2, device="cuda").half().sum().dtype is torch.float32


def test_a_tensor_without_dimensions_keeps_the_result_in_fp16():
    """AMP0206."""
    low, large = torch.ones(2).half(), torch.tensor(65536.0)
    assert (low * large).dtype is torch.float16
    assert (low * large).isinf().all()
    assert (low.float() * large).tolist() == [65536, 65536]
    assert (low[0] * large).dtype is torch.float32  # neither has dimensions


def test_clipping_spreads_a_nan_to_all_gradients():
    """AMP0113."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, torch.nan])
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad.isnan().all()


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (torch.inf, "cost matrix is infeasible"),
        (torch.nan, "matrix contains invalid numeric entries"),
        (-torch.inf, "matrix contains invalid numeric entries"),
    ],
)
def test_scipy_refuses_costs_that_are_not_finite(cost, said):
    """AMP0087."""
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed")
    costs = torch.full((2, 2), cost)
    with pytest.raises(ValueError, match=said):
        optimize.linear_sum_assignment(costs)
    assert len(optimize.linear_sum_assignment(torch.nan_to_num(costs))) == 2


@pytest.mark.filterwarnings("ignore")  # of diffusers
def test_a_pipeline_in_fp16_refuses_a_vae_in_fp32_that_decodes_its_latents():
    """AMP0064: by the code of the entry. CI has no diffusers; it passed with 0.42.1."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
    )
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )
    missing = ("text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        scheduler=diffusers.DDIMScheduler(),
        requires_safety_checker=False,
        **dict.fromkeys(missing),
    ).to(torch.float16)
    prompt = torch.randn(1, 4, 32).half()
    options = {"prompt_embeds": prompt, "negative_prompt_embeds": prompt, "height": 16, "width": 16}
    latents = pipe(output_type="latent", num_inference_steps=2, **options).images
    code = re.search(r"`(pipe\.vae\.float\(\)\..*?)`", cure_of("AMP0064"))[1]
    with torch.no_grad():
        image = eval(code, {"pipe": pipe, "latents": latents}).sample
    assert image.dtype is torch.float32
    with pytest.raises(RuntimeError, match="should be the same"):
        pipe(num_inference_steps=2, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_probabilities_in_16_bits_can_fail_the_check_of_a_distribution(dtype):
    torch.manual_seed(0)
    logits = torch.randn(5000, 4)
    probabilities = logits.softmax(-1).to(dtype)
    checked = {"validate_args": True}  # torch.compile turns the check off for the whole process
    with pytest.raises(ValueError, match=re.escape("to satisfy the constraint Simplex()")):
        torch.distributions.Categorical(probs=probabilities, **checked)
    torch.distributions.Categorical(probs=probabilities.float(), **checked)
    torch.distributions.Categorical(logits=logits.to(dtype).float(), **checked)


def test_eager_attention_of_transformers_masks_with_a_finite_number():
    masking = pytest.importorskip("transformers.masking_utils")
    padding = torch.tensor([[False, True]])  # the first token is padding
    mask = masking.eager_mask(
        batch_size=1, q_length=2, kv_length=2, attention_mask=padding, dtype=torch.float16
    )
    assert mask.isfinite().all()
    assert mask[0, 0, 0].max() == torch.finfo(torch.float16).min  # masked everywhere
    assert mask[0, 0, 0].softmax(-1).isfinite().all()
