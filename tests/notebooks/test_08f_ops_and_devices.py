"""Notebook 08f: what it says of ops and devices and no cell shows."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course.failures import warnings_of

import build_pairs
import write_failures
from amp_lab.failures import read_explanation
from amp_lab.failures.patterns import flat, pattern
from amp_lab.failures.reference import reference_from

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@contextmanager
def rules_of(device_type: str) -> Iterator[None]:
    """Inside: fake tensors, and autocast to fp16 as on a device that need not be here."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, FP16)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def autocast_list(device_type: str) -> set[str]:
    """The ops that autocast casts on a device."""
    key = f"Autocast{device_type.upper()}"
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


@pytest.mark.parametrize(
    ("device_type", "is_refused"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)]
)
def test_the_loss_of_probabilities_is_refused_on_some_devices_alone(device_type, is_refused):
    with rules_of(device_type):
        p = torch.empty(2, device=device_type)
        if is_refused:
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(p, p)
        else:
            assert F.binary_cross_entropy(p, p).dtype is FP32
        with torch.autocast(device_type, enabled=False):
            assert F.binary_cross_entropy(p, p).dtype is FP32


def test_probabilities_as_logits_give_another_loss():
    p, target = torch.tensor([0.25, 0.75]), torch.tensor([0.0, 1.0])
    as_logits = F.binary_cross_entropy_with_logits(p, target)
    assert not torch.isclose(as_logits, F.binary_cross_entropy(p, target), rtol=0.1)


def test_logits_give_the_same_loss_as_their_probabilities():
    logits, target = torch.tensor([-2.0, 0.5, 20.0]), torch.tensor([0.0, 1.0, 1.0])
    expected = F.binary_cross_entropy(logits.sigmoid(), target)
    torch.testing.assert_close(F.binary_cross_entropy_with_logits(logits, target), expected)


def test_autocast_casts_for_other_ops_on_a_cpu_than_on_cuda():
    matrix = torch.eye(2).half()
    with torch.autocast("cpu", dtype=FP16):
        assert torch.linalg.inv(matrix).dtype is matrix.quantile(0.5).dtype is FP32
        with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
            torch.linalg.det(matrix)
    for name in ("quantile", "linalg_inv", "linalg_det", "fft"):
        assert not any(name in op for op in autocast_list("cuda"))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_what_else_ops_say_that_do_not_exist_in_16_bits(dtype):
    matrix = torch.eye(2).to(dtype)
    with pytest.raises(RuntimeError, match="expected a tensor with 2 or more dimensions of float"):
        torch.linalg.pinv(matrix)
    if dtype is BF16:
        with pytest.raises(RuntimeError, match="Expected both inputs to be Half, Float or"):
            torch.complex(matrix, matrix)


@pytest.mark.parametrize("other", ["Long", "Int", "Float", "Bool", "ComplexFloat", "Byte"])
def test_a_missing_kernel_for_another_dtype_is_no_failure_of_precision(other):
    source = build_pairs.find(["08f"])[0]
    found = {entry.code: entry for entry in write_failures.in_notebook(source)}["AMP0023"]
    regexes = [pattern(found.code, message).regex for message in found.data["messages"]]

    def is_found(dtype: str) -> bool:
        text = flat(f"RuntimeError: \"log_vml_cpu\" not implemented for '{dtype}'")
        return any(re.search(regex, text, re.IGNORECASE) for regex in regexes)

    assert is_found("Half")
    assert is_found("BFloat16")
    assert not is_found(other)


@pytest.mark.parametrize("device_type", ["cuda", "cpu", "mps", "xpu"])
def test_cuda_alone_takes_fp32_for_autocast(device_type):
    available = mock.patch.object(
        torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
    )
    with available, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autocast(device_type, dtype=FP32)
    said = [str(warning.message) for warning in caught]
    assert any("Disabling autocast" in message for message in said) == (device_type != "cuda")


class Features(nn.Module):
    """The power of a short-time Fourier transform, through filters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.ones(16))
        self.register_buffer("filters", torch.ones(2, 9))

    def forward(self, x):
        spectrum = torch.stft(x.float(), 16, window=self.window, return_complex=True)
        return self.filters @ spectrum.abs().square()


def test_the_part_that_transforms_is_cast_back_after_half():
    signal = torch.ones(100).half()
    model = nn.ModuleDict({"features": Features(), "encoder": nn.Conv1d(2, 2, 1)}).half()
    with pytest.raises(RuntimeError, match="the same dtype"):
        model["features"](signal)  # the filters
    model["features"].float()
    features = model["features"](signal).to(model["encoder"].weight.dtype)
    assert model["encoder"](features).dtype is FP16


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["fft", "rfft", "fft2"])
def test_a_cpu_has_no_transform_in_16_bits(kind, dtype):
    with pytest.raises(RuntimeError, match=r"Half|BFloat16"):
        getattr(torch.fft, kind)(torch.ones(8, 8, dtype=dtype))


def test_fp8_is_stored_and_cast_but_not_added():
    """AMP0164."""
    x = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
        x + x
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types is not supported"):
        x * torch.ones(2)
    with pytest.raises(TypeError, match="unsupported ScalarType Float8_e4m3fn"):
        x.numpy()
    assert torch.equal(torch.cat([x, x]).float(), torch.ones(4))
    assert torch.equal((x.bfloat16() + x.bfloat16()).to(x.dtype).float(), torch.full((2,), 2.0))
    assert torch.finfo(x.dtype).max == 448
    large, scale = torch.tensor(1024.0), 1024 / 448
    assert large.to(x.dtype).float() != large  # 448 or NaN
    assert (large / scale).to(x.dtype).float() * scale == large


def test_an_array_of_ml_dtypes_goes_through_fp32():
    """AMP0024."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    numpy = pytest.importorskip("numpy")
    array = numpy.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"can't convert np.ndarray of type .*bfloat16"):
        torch.from_numpy(array)
    tensor = torch.from_numpy(array.astype("float32")).bfloat16()
    assert tensor.dtype is BF16
    assert tensor.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("number", "is_finite"), [(65519.0, True), (65520.0, False)])
def test_fp16_is_infinite_from_65520_on(number, is_finite):
    """AMP0024."""
    assert torch.tensor(number).half().isfinite() == is_finite


def test_a_weight_is_initialized_in_fp32_and_then_cast():
    """AMP0023."""
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        nn.init.orthogonal_(torch.empty(2, 2, dtype=BF16))
    assert nn.init.orthogonal_(torch.empty(2, 2)).to(BF16).isfinite().all()


def test_a_backend_outside_torch_has_to_register_a_module():
    """AMP0036."""
    name = "privateuseone"
    assert torch.amp.is_autocast_available(name)
    with pytest.raises(AssertionError, match="the backend has not registered a module"):
        torch.autocast(name, dtype=BF16)
    module = SimpleNamespace(get_amp_supported_dtype=lambda: [BF16])
    with mock.patch.object(torch, name, module, create=True):
        assert torch.autocast(name, dtype=BF16).fast_dtype is BF16


@pytest.mark.parametrize("enabled", [True, False])
def test_a_matmul_on_a_spectrum_overflows_under_autocast(enabled):
    """AMP0038."""
    power = torch.fft.rfft(torch.ones(512)).abs().square()
    with torch.autocast("cpu", dtype=FP16, enabled=enabled):
        filtered = torch.ones(2, 257) @ power[:, None]
    assert filtered.isfinite().all() == (not enabled)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_a_norm_under_autocast_returns_fp32(norm):
    """AMP0043."""
    with rules_of("cuda"):
        assert norm(torch.empty(2, 4, device="cuda", dtype=FP16), (4,)).dtype is FP32


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.LayerNorm(4), (2, 4)), (nn.Linear(4, 4), (2, 4)), (nn.Conv2d(1, 1, 2), (1, 1, 4, 4))],
)
def test_usual_layers_run_in_fp16_on_a_cpu(layer, shape):
    """AMP0066."""
    assert layer.half()(torch.ones(shape, dtype=FP16)).dtype is FP16


def test_an_unknown_mode_of_fp32_matmuls_has_no_effect():
    """AMP0187."""
    before = torch.get_float32_matmul_precision()
    message = warnings_of(lambda: torch.set_float32_matmul_precision("tf32"))
    assert torch.get_float32_matmul_precision() == before
    if message:  # torch warns once in a process
        found = read_explanation(message, reference_from(write_failures.reference()))
        assert found.failures[0].code == "AMP0187"


def test_a_sum_of_ones_in_bf16_stops_at_256():
    """AMP0305: older versions of torch add up the products of a matmul in this way."""
    total = torch.zeros((), dtype=BF16)
    for _ in range(300):
        total += 1
    assert total == 256


@pytest.mark.parametrize("enabled", [True, False])
def test_a_bf16_matmul_of_ones_is_exact_with_and_without_onednn(enabled):
    """AMP0305: in this version of torch."""
    ones = torch.ones(32, 1024, dtype=torch.bfloat16)
    kernel = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    before = torch.backends.mkldnn.set_flags(enabled)
    try:
        assert (ones @ ones.mT == 1024).all()
        assert torch.conv2d(kernel, kernel) == 4
    finally:
        torch.backends.mkldnn.set_flags(before[0])
    assert (ones.float() @ ones.float().mT == 1024).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_strided_convolution_is_exact_in_fp32_or_without_onednn(dtype):
    """AMP0305: in bf16, oneDNN in torch 2.15 gives 128 on a CPU with AMX."""
    images, kernel = torch.ones(1, 16, 16, 16, dtype=dtype), torch.ones(16, 16, 4, 4, dtype=dtype)
    before = torch.backends.mkldnn.set_flags(dtype is torch.float32)
    try:
        assert (torch.conv2d(images, kernel, stride=4) == 256).all()
    finally:
        torch.backends.mkldnn.set_flags(before[0])


def test_autocast_casts_the_inputs_of_a_sparse_matmul():
    """AMP0061."""
    matrix, x = torch.eye(4).to_sparse(), torch.ones(4, 2)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.sparse.mm(matrix.float(), x.float()).dtype is BF16
        with torch.autocast("cpu", enabled=False):
            assert torch.sparse.mm(matrix.to(BF16).float(), x.to(BF16).float()).dtype is FP32


@pytest.mark.filterwarnings("ignore")  # of the packages that transformers imports
@pytest.mark.parametrize("casts", [True, False])
def test_norms_and_embeddings_in_fp32_give_attention_fp32_inputs(casts):
    """AMP0073."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()
    for name, weight in model.named_parameters():
        if "norm" in name or "embed" in name:
            weight.data = weight.data.float()
    if casts:
        model.bfloat16()
    attention = mock.patch.object(
        F, "scaled_dot_product_attention", side_effect=F.scaled_dot_product_attention
    )
    with attention as called, torch.autocast("cpu", dtype=BF16, enabled=not casts):
        model(torch.arange(8)[None])
    dtypes = {tensor.dtype for tensor in called.call_args.args[:3]}
    assert dtypes == {BF16 if casts else FP32}


@pytest.mark.parametrize("computed_in_fp32", [True, False])
def test_a_cast_of_fp16_probabilities_does_not_save_their_gradient(computed_in_fp32):
    """AMP0022."""
    logits = torch.tensor([-15.0], dtype=FP16, requires_grad=True)
    if computed_in_fp32:
        probabilities = logits.float().sigmoid()
    else:
        probabilities = logits.sigmoid().float()
    F.binary_cross_entropy(probabilities, torch.ones(1)).backward()
    assert logits.grad.isfinite().all() == computed_in_fp32


def test_a_quantile_of_rounded_values_selects_other_elements():
    """AMP0023."""
    torch.manual_seed(0)
    logits = (torch.randn(48, 1000) * 0.3).to(BF16)

    def selected(logits):
        logs = logits.log_softmax(-1)
        entropies = -(logs.exp() * logs).sum(-1)
        return entropies.float() >= entropies.float().quantile(0.8)

    assert selected(logits.float()).sum() == 10  # the highest fifth
    assert not torch.equal(selected(logits), selected(logits.float()))


def test_rotary_embeddings_in_half_precision_multiply_in_complex64():
    """AMP0319."""
    torch.manual_seed(0)
    query = torch.randn(4, 8).half()
    angles = torch.randn(4, 4)
    rotation = torch.polar(torch.ones_like(angles), angles)
    half = torch.view_as_complex(query.unflatten(-1, (-1, 2)))
    assert half.dtype is torch.complex32
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="ComplexHalf support is experimental"):
            torch.empty_like(half)
    finally:
        torch.set_warn_always(False)
    with pytest.raises(RuntimeError, match="ComplexHalf"):
        half @ half.mT
    with torch.autocast("cpu", dtype=BF16):
        for low in (query, query.bfloat16()):
            pairs = low.unflatten(-1, (-1, 2))
            assert torch.view_as_complex(pairs).dtype is torch.complex64
    with pytest.raises(RuntimeError, match="BFloat16"):
        torch.view_as_complex(query.bfloat16().unflatten(-1, (-1, 2)))
    for low in (query, query.bfloat16()):
        pairs = torch.view_as_complex(low.float().unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * rotation).flatten(-2).type_as(low)
        assert rotated.dtype is low.dtype
        assert torch.allclose(rotated.float().norm(), low.float().norm(), rtol=2**-8)
