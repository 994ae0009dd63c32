import warnings

import pytest
import torch

from amp_lab import DeviceError, Precision
from amp_lab.core.precision import _FLOAT32_MODES, has_tf32


def modes() -> list[str]:
    return [backend.fp32_precision for backend in _FLOAT32_MODES]


def old_settings() -> list[object]:
    """The older names of the same settings; "refused" where torch does not let them be read."""
    found = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        try:
            found.append(read())
        except RuntimeError:
            found.append("refused")
    return found


@pytest.fixture(autouse=True)
def restore_modes():
    """Whatever a test does to torch's float32 settings is undone after it."""
    new, matmul, cudnn = (
        modes(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
    for backend, mode in zip(_FLOAT32_MODES, new, strict=True):
        backend.fp32_precision = mode


def enter(precision: Precision):
    """The autocast context, without the warning that a CPU has no TF32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tf32: ")
        return precision.autocast("cpu")


def test_values_are_the_names_users_type():
    assert [str(p) for p in Precision] == ["fp32", "tf32", "fp16", "bf16"]
    assert Precision("bf16") is Precision.BF16


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_half_precisions_are_torch_autocast(precision):
    context = precision.autocast("cpu")
    assert isinstance(context, torch.autocast)
    left = torch.randn(4, 4)
    with context:
        assert (left @ left).dtype is precision.dtype
        assert (left + left).dtype is torch.float32
    assert (left @ left).dtype is torch.float32


@pytest.mark.parametrize(
    ("precision", "mode"), [(Precision.FP32, "ieee"), (Precision.TF32, "tf32")]
)
def test_float32_modes_hold_in_the_block_and_are_restored(precision, mode):
    before, old = modes(), old_settings()
    with enter(precision):
        assert set(modes()) == {mode}
        assert "refused" not in old_settings()  # torch.compile reads them
    assert modes() == before
    assert old_settings() == old


def test_float32_modes_are_restored_after_an_exception():
    before = modes()
    with pytest.raises(ZeroDivisionError), enter(Precision.TF32):
        raise ZeroDivisionError
    assert modes() == before


@pytest.mark.parametrize("outer", [Precision.FP32, Precision.TF32])
def test_float32_modes_nest_and_can_be_used_again(outer):
    before = modes()
    context = enter(outer)
    for _ in range(2):
        with context, context:
            inside = modes()
            with enter(Precision.FP32):
                assert set(modes()) == {"ieee"}
            assert modes() == inside
        assert modes() == before


def set_nothing():
    pass


def set_old_matmul():
    torch.set_float32_matmul_precision("high")


def set_old_cudnn():
    torch.backends.cudnn.allow_tf32 = False


def set_new_global():
    torch.backends.fp32_precision = "tf32"


def set_new_conv():
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def set_new_against_old():
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32])
@pytest.mark.parametrize(
    "settings",
    [set_nothing, set_old_matmul, set_old_cudnn, set_new_global, set_new_conv, set_new_against_old],
)
def test_whatever_the_user_had_set_is_there_afterwards(settings, precision):
    settings()
    before, old = modes(), old_settings()
    with enter(precision):
        assert len(set(modes())) == 1
    assert modes() == before
    assert old_settings() == old
    torch.backends.fp32_precision = "none"


def test_fp32_is_an_island_in_autocast():
    left = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with Precision.FP32.autocast("cpu"):
            assert (left @ left).dtype is torch.float32
        assert (left @ left).dtype is torch.bfloat16


def test_fp32_switches_reduced_float32_products_off():
    """oneDNN may round fp32 products to bf16 when it is told to; in the block it must not."""
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    exact = left @ right
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with Precision.FP32.autocast("cpu"):
        assert torch.equal(left @ right, exact)


def test_tf32_where_there_is_none_is_said():
    if has_tf32("cpu"):
        pytest.skip("this CPU has TF32")
    with pytest.warns(UserWarning, match=r"tf32: .*'cpu' .*fp32"):
        Precision.TF32.autocast("cpu")


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps", "banana"])
def test_a_device_that_is_not_there_is_an_error(precision, device_type):
    if device_type != "banana" and torch.get_device_module(device_type).is_available():
        pytest.skip(f"{device_type} is here")
    with pytest.raises(DeviceError, match=device_type):
        precision.autocast(device_type)
    with pytest.raises(DeviceError, match=device_type):
        precision.grad_scaler(device_type)


@pytest.mark.parametrize("precision", list(Precision))
def test_scaler_is_enabled_for_fp16_alone(precision):
    assert precision.grad_scaler("cpu").is_enabled() == (precision is Precision.FP16)
    assert not precision.grad_scaler("cpu", enabled=False).is_enabled()


def test_scaler_takes_the_keywords_of_torch():
    scaler = Precision.FP16.grad_scaler("cpu", init_scale=8.0, growth_interval=3)
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_interval() == 3
    assert isinstance(scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_float32_mode_leaves_a_low_precision_alone(precision):
    before = modes()
    with precision.float32_mode("cpu"):
        assert not torch.is_autocast_enabled("cpu")
        assert modes() == before


def test_float32_mode_of_fp32_is_ieee():
    with Precision.FP32.float32_mode("cpu"):
        assert set(modes()) == {"ieee"}
