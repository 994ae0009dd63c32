"""docs/other_models.md: its code runs, and PyTorch and torchvision do what the page says."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

PAGE = (Path(__file__).parents[2] / "docs" / "other_models.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


def run_code_of(words: str, **names) -> dict:
    """The names after the code of the section whose heading contains these words, in autocast."""
    (section,) = (text for heading, text in SECTIONS.items() if words in heading)
    (code,) = FENCE.findall(section)
    names |= {"torch": torch, "F": F, "math": math}
    with torch.autocast("cpu", dtype=BF16):
        exec(code, names)
    return names


def test_a_router_in_bf16_chooses_other_experts():
    x, gate = torch.randn(2048, 256), nn.Linear(256, 64, bias=False)
    expected = gate(x).topk(2).indices
    with torch.autocast("cpu", dtype=BF16):
        logits = gate(x)
    for late in (logits, logits.float().softmax(-1)):
        changed = (late.topk(2).indices.sort().values != expected.sort().values).any(1)
        assert 0.003 < changed.float().mean() < 0.03
    names = run_code_of("router", x=x, gate=gate)
    assert torch.equal(names["experts"], expected)
    assert names["weights"].dtype is torch.float32


def state_after(dtype: torch.dtype) -> float:
    """A state with decay 0.999 that gets 0.001 for 4,096 steps."""
    state, update = torch.zeros((), dtype=dtype), torch.tensor(0.001, dtype=dtype)
    for _ in range(4096):
        state = 0.999 * state + update
    return state.item()


def test_a_recurrent_state_in_16_bits_stops_too_early():
    """AMP0273."""
    assert torch.tensor(0.999).to(BF16) == 1
    assert state_after(torch.float32) == pytest.approx(0.983, abs=1e-3)
    assert state_after(BF16) == 0.5
    assert state_after(FP16) == pytest.approx(0.73, abs=0.01)
    x = torch.full((4096,), 0.001, dtype=torch.float64)
    rate = torch.tensor(-math.log(0.999)).log()  # decay = exp(-exp(A_log))
    names = run_code_of("Mamba", x=x, A_log=rate, dt=torch.ones(()), state=torch.zeros(()))
    assert names["state"].item() == pytest.approx(0.983, abs=1e-3)


def test_autocast_on_a_cpu_leaves_cumsum_in_bf16():
    ones = torch.ones(300, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert ones.cumsum(0).dtype is ones.cumprod(0).dtype is BF16
        assert ones.cumsum(0, dtype=torch.float32)[-1] == 300


@pytest.mark.parametrize("device", ["CPU", "CUDA", "XPU", "MPS"])
def test_autocast_has_no_rule_for_the_ops_of_a_scan(device):
    for op in ("aten::mul.Tensor", "aten::add.Tensor"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, f"Autocast{device}")


def second_derivatives(scale: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Those of a network whose domain is `scale` times smaller; under autocast, if with a dtype."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    with torch.no_grad():
        net[0].weight *= scale
    x = (torch.linspace(0, 1, 64) / scale)[:, None].requires_grad_()
    if dtype is None:
        return run_code_of("PINN", net=net, x=x)["u_xx"].detach()
    with torch.autocast("cpu", dtype=dtype):
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return second.detach()


def test_second_derivatives_leave_the_range_of_fp16():
    """AMP0274."""
    assert (~second_derivatives(2000, FP16).isfinite()).float().mean() == pytest.approx(
        0.62, abs=0.05
    )
    assert (second_derivatives(1e-3, FP16) == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    near_one = second_derivatives(1, FP16)
    assert near_one.isfinite().all()
    assert (near_one != 0).all()
    for scale in (1e-3, 1, 2000):
        exact = second_derivatives(scale, None)
        assert exact.dtype is torch.float32
        assert exact.isfinite().all()
        assert (exact != 0).all()
        error = (second_derivatives(scale, BF16) - exact).norm() / exact.norm()
        assert error == pytest.approx(0.01, abs=0.004)


def test_nms_wants_fp32():
    """AMP0275."""
    ops = pytest.importorskip("torchvision").ops
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 11.0, 11.0]])
    scores = torch.tensor([0.9, 0.8])
    for dtype, name in ((BF16, "BFloat16"), (FP16, "Half")):
        low = boxes.to(dtype), scores.to(dtype)
        with pytest.raises(RuntimeError, match=f"\"nms_kernel\" not implemented for '{name}'"):
            ops.nms(*low, 0.5)
        assert ops.nms(low[0].float(), low[1].float(), 0.5).tolist() == [0]
        with torch.autocast("cpu", dtype=dtype):
            assert ops.nms(*low, 0.5).tolist() == [0]


def test_batched_nms_in_16_bits_keeps_a_duplicate():
    """AMP0125: it adds a large offset to the boxes of each class."""
    ops = pytest.importorskip("torchvision").ops
    boxes = torch.tensor([[600.0, 600.0, 620.0, 620.0], [604.0, 600.0, 624.0, 620.0]])
    others = torch.tensor([0.9, 0.8]), torch.tensor([60, 60]), 0.5
    for dtype in (BF16, FP16):
        with torch.autocast("cpu", dtype=dtype):
            assert ops.batched_nms(boxes.to(dtype), *others).tolist() == [0, 1]
            assert ops.batched_nms(boxes.to(dtype).float(), *others).tolist() == [0]


def test_coordinates_in_bf16_are_rounded():
    assert torch.arange(257).to(BF16).unique().numel() == 257
    assert torch.tensor(257).to(BF16) == 256
    assert torch.tensor(2049).to(FP16) == 2048
    box_iou = pytest.importorskip("torchvision").ops.box_iou
    boxes = torch.tensor([[300.0, 300.0, 304.0, 304.0], [301.0, 300.0, 305.0, 304.0]])
    assert box_iou(boxes, boxes)[0, 1] == pytest.approx(0.6)
    rounded = boxes.to(BF16).float()
    assert box_iou(rounded, rounded)[0, 1] == 1


def test_a_sampling_grid_in_bf16_moves_samples():
    """AMP0277."""
    theta, images = torch.eye(2, 3)[None], torch.ones(1, 1, 4, 2048, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        low = F.affine_grid(theta, images.shape, align_corners=False)
        assert low.dtype is BF16
        sampled = F.grid_sample(images, low.float(), align_corners=False)
        assert sampled.dtype is torch.float32
    grid = run_code_of("grids", theta=theta, images=images)["grid"]
    assert grid.dtype is torch.float32
    pixels = (grid - low.float()).abs().max() * 1024  # from -1 to 1 are 2,048 pixels
    assert pixels == pytest.approx(1.5, abs=0.1)
    compiled = torch.compile(F.affine_grid, backend="aot_eager")
    with torch.autocast("cpu", dtype=BF16):
        assert compiled(theta, images.shape, align_corners=False).dtype is torch.float32
    cos, sin = math.cos(0.5), math.sin(0.5)
    for turned in ([[cos, -sin, 0.0], [sin, cos, 0.0]], [[1.0, 0.0, 0.1], [0.0, 1.0, -0.2]]):
        theta = torch.tensor([turned])
        exact = F.affine_grid(theta, images.shape, align_corners=False)
        with torch.autocast("cpu", dtype=BF16):
            low = F.affine_grid(theta, images.shape, align_corners=False)
        assert (exact - low.float()).abs().max() * 1024 > 2


def test_ctc_loss_wants_fp32():
    """AMP0276."""
    logits = torch.randn(20, 2, 5)
    names = {
        "targets": torch.tensor([[1, 2], [3, 4]]),
        "input_lengths": torch.tensor([20, 20]),
        "target_lengths": torch.tensor([2, 2]),
    }
    for dtype, name in ((BF16, "BFloat16"), (FP16, "Half")):
        low = logits.log_softmax(-1).to(dtype)
        with pytest.raises(NotImplementedError, match=f"ctc_loss_cpu.* for '{name}'"):
            F.ctc_loss(low, *names.values())
    with torch.autocast("cpu", dtype=BF16):
        assert logits.to(BF16).log_softmax(-1).dtype is BF16
    expected = F.ctc_loss(logits.log_softmax(-1), *names.values())
    assert run_code_of("ctc_loss", logits=logits, **names)["loss"] == expected


def test_timestep_937_becomes_936_in_bf16():
    assert torch.tensor(937).to(BF16) == 936
    assert torch.arange(512, 1025).to(BF16).diff().unique().tolist() == [0, 4]


def test_the_temperature_of_a_contrastive_loss_needs_fp32():
    """AMP0278."""
    scale = torch.tensor(math.log(100))
    assert scale.to(BF16).exp() == 99
    assert torch.tensor(4.5, dtype=BF16) - 0.01 == 4.5
    assert torch.tensor(12.0, dtype=FP16).exp().isinf()  # a scale without a limit
    images = torch.randn(64, 64)
    texts = images + 0.3 * torch.randn(64, 64)
    exact = 100 * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
    with torch.autocast("cpu", dtype=BF16):
        low = 100 * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
    assert low.dtype is BF16
    assert 0.25 < (low.float() - exact).abs().max() < 0.35
    names = run_code_of("contrastive", images=images, texts=texts, logit_scale=scale)
    torch.testing.assert_close(names["logits"], exact)


def test_a_clamp_in_the_forward_pass_stops_a_large_temperature_from_learning():
    """AMP0278."""
    largest = math.log(100)
    logit_scale = torch.tensor(largest + 1, requires_grad=True)
    logit_scale.clamp(max=largest).exp().backward()
    assert logit_scale.grad == 0
    with torch.no_grad():
        logit_scale.clamp_(max=largest)
    torch.testing.assert_close(logit_scale.exp(), torch.tensor(100.0))


def test_cross_entropy_runs_in_fp32():
    with torch.autocast("cpu", dtype=BF16):
        loss = F.cross_entropy(torch.ones(2, 5, dtype=BF16), torch.tensor([0, 1]))
    assert loss.dtype is torch.float32


@pytest.mark.usefixtures("each_warning")
def test_complex_numbers_under_autocast():
    """AMP0279."""
    layer = nn.Linear(2, 2, dtype=torch.complex64)
    with torch.autocast("cpu", dtype=BF16):
        assert layer(torch.ones(1, 2, dtype=torch.complex64)).dtype is torch.complex64
    layer.register_buffer("frequencies", torch.ones(2, dtype=torch.complex64))
    for cast in (layer.bfloat16, layer.half):
        assert cast().weight.is_complex()
        assert layer.frequencies.is_complex()
    with pytest.warns(UserWarning, match="discards the imaginary part"):
        assert layer.to(BF16).weight.dtype is layer.frequencies.dtype is BF16
    with pytest.warns(UserWarning, match="ComplexHalf support is experimental"):
        half = torch.complex(*torch.ones(2, 2, 2, dtype=FP16))
    with pytest.raises(RuntimeError, match="not implemented for 'ComplexHalf'"):
        half @ half
    with pytest.warns(UserWarning, match="ComplexHalf"), FakeTensorMode():
        assert torch.fft.fft(torch.ones(4, dtype=FP16, device="cuda")).dtype is torch.complex32
    with pytest.raises(RuntimeError, match="Unsupported dtype BFloat16"):
        torch.fft.fft(torch.ones(4, dtype=BF16))
    with torch.autocast("cpu", dtype=BF16):
        assert torch.fft.fft(torch.ones(4, dtype=BF16)).dtype is torch.complex64
