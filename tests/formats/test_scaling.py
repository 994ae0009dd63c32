"""Tensors in formats with shared scales: bit for bit what torchao makes of them."""

import math
from dataclasses import replace

import pytest
import torch
from cases import some_of

from amp_lab.core.errors import NumericsError
from amp_lab.formats import ELEMENTS, FORMATS, Counts, Format, quantize
from conftest import WEEKLY

of_torchao = pytest.mark.filterwarnings("ignore")  # of its own
ROWS = 19_532 if WEEKLY else 1024  # of 512: 10^7 values
SPECIAL = [0.0, -0.0, 1e-45, 2.0**-127, 2.0**-126, 1e-38, 3e38, 448.0, 6.0, 5.0, -0.25, math.inf]
MX = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8-e5m2": torch.float8_e5m2,
    "mxfp6-e2m3": "fp6_e2m3",
    "mxfp6-e3m2": "fp6_e3m2",
    "mxfp4": torch.float4_e2m1fn_x2,
}
FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8-rowwise": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
    "fp8-e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8-e5m2fnuz": torch.float8_e5m2fnuz,
}


def kinds_of_values() -> dict[str, torch.Tensor]:
    """Values of all magnitudes, any bits there are, and what is special, with NaN and without."""
    draws = torch.Generator().manual_seed(0)
    shape = ROWS, 512
    magnitudes = torch.exp2(torch.randint(-40, 40, (ROWS, 1), generator=draws).float())
    bits = torch.randint(-(2**31), 2**31, shape, generator=draws).to(torch.int32)
    special = torch.tensor([*SPECIAL, math.nan])
    any_of = special[torch.randint(13, (512, 512), generator=draws)]
    finite = special[torch.randint(11, (512, 512), generator=draws)]
    return {
        "magnitudes": torch.randn(shape, generator=draws) * magnitudes,
        "bits": bits.view(torch.float32),
        "finite bits": bits.view(torch.float32).nan_to_num(0.0, 0.0, 0.0),
        "special": any_of,
        "special, finite": finite,
    }


VALUES = kinds_of_values()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


@of_torchao
@pytest.mark.parametrize("power", some_of("floor", "ceil", "even", "rceil"))
@pytest.mark.parametrize("name", MX)
def test_mx_is_torchaos(name, power):
    torchao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")

    mode, form = torchao.ScaleCalculationMode[power.upper()], replace(FORMATS[name], power=power)
    for kind, values in VALUES.items():
        theirs = torchao.MXTensor.to_mx(values, MX[name], 32, mode)
        assert same(quantize(values, form), theirs.dequantize(torch.float32)), kind


@of_torchao
def test_nvfp4_is_torchaos():
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

    for kind, values in VALUES.items():
        scale = torchao.per_tensor_amax_to_scale(values.abs().amax())
        theirs = torchao.NVFP4Tensor.to_nvfp4(values, per_tensor_scale=scale)
        assert same(quantize(values, "nvfp4"), theirs.dequantize(torch.float32)), kind


@of_torchao
@pytest.mark.parametrize("name", FP8)
def test_float8_is_torchaos(name):
    torchao = pytest.importorskip("torchao.float8.float8_utils")
    shared = torchao.ScalingGranularity["AXISWISE" if name == "fp8-rowwise" else "TENSORWISE"]
    rowwise = {"axiswise_dim": -1, "round_scales_to_power_of_2": True}  # as its recipe has it
    how = {"scaling_granularity": shared} | (rowwise if name == "fp8-rowwise" else {})
    for kind, values in VALUES.items():
        scale = torchao.tensor_to_scale(values, FP8[name], **how)
        theirs = torchao.to_fp8_saturated(values * scale, FP8[name]).float() / scale
        assert same(quantize(values, name), theirs), kind


@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if f.scale != "none"])
def test_each_block_has_a_scale_of_its_own(name):
    """Beside a block a million times as large it keeps its digits, if they share no scale."""
    form = FORMATS[name]
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    high, wide = form.block[0] or 256, form.block[1] or 256
    alone = quantize(values, form)
    louder = values.clone()
    louder[-high:, -wide:] *= 2.0**12 if form.scale == "e4m3" else 2.0**20
    if form.block == (0, 0):
        assert quantize(torch.cat([values, values * 2.0**40]), form)[:256].count_nonzero() == 0
        return
    found = quantize(louder, form)
    if form.scale == "e4m3":  # two levels: E4M3 reaches this far, with the digits that it has
        assert bool((found[:-high] - values[:-high]).abs().max() < values.abs().max())
    else:
        kept = torch.ones_like(values, dtype=torch.bool)
        kept[-high:, -wide:] = False
        assert torch.equal(found[kept], alone[kept])


def test_blocks_of_128_by_128_are_tensors_of_their_own():
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    found = quantize(values, "fp8-128x128")
    for row in range(0, 256, 128):
        for column in range(0, 384, 128):
            part = slice(row, row + 128), slice(column, column + 128)
            assert torch.equal(found[part], quantize(values[part].contiguous(), "fp8"))


def shares_of_zeros(name: str, factor: float, shared: int) -> tuple[float, float]:
    """The shares of values that become zero if column 100 of (128, 256) values is multiplied.

    First of the other columns among the `shared` ones that share its scale, then of all others.
    """
    values = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    values[:, 100] *= factor
    zero = (quantize(values, name) == 0).float()
    columns = torch.arange(256)
    shares_scale = columns // shared == 100 // shared
    beside = shares_scale & (columns != 100)
    return zero[:, beside].mean().item(), zero[:, ~shares_scale].mean().item()


@pytest.mark.parametrize(("name", "size"), [("mxfp4", 32), ("nvfp4", 16)])
def test_an_outlier_makes_most_of_its_four_bit_block_zero(name, size):
    """What notebook 15 says of a column that is 100 times as large, in blocks of 32 and of 16."""
    beside, elsewhere = shares_of_zeros(name, factor=100, shared=size)
    assert beside > 0.75
    assert elsewhere < 0.15


SHARED = {"fp8": 256, "fp8-rowwise": 256, "fp8-1x128": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 256}


@pytest.mark.parametrize(("name", "shared"), SHARED.items())
def test_a_huge_outlier_makes_most_values_that_share_its_scale_zero(name, shared):
    """If a column is a million times as large, most values that share its scale become zero."""
    beside, elsewhere = shares_of_zeros(name, factor=1e6, shared=shared)
    assert beside > 0.6
    if shared < 256:
        assert elsewhere < 0.15


def test_a_block_of_int8_shrinks_with_its_scale():
    """By a thousandth, in a thousand steps, as in notebook 16: the scale is in fp32."""
    form = Format("int8 in blocks", ELEMENTS["int8"], (1, 256))
    values = quantize(torch.rand(16, 256, generator=torch.Generator().manual_seed(0)), form)
    found = values
    for _ in range(1000):
        found = quantize(0.999 * found, form)
    torch.testing.assert_close(found, values * 0.999**1000, rtol=1e-3, atol=0)


def test_a_value_of_int8_does_not_shrink_alone():
    """The largest value of its block keeps the scale, and a thousandth is less than half a step."""
    form = Format("int8 in blocks", ELEMENTS["int8"], (1, 256))
    values = torch.rand(1, 256, generator=torch.Generator().manual_seed(0))
    values[0, 0] = 1
    found = values = quantize(values, form)
    for _ in range(1000):
        shrunk = 0.999 * found
        shrunk[0, 0] = 1
        found = quantize(shrunk, form)
    assert torch.equal(found, values)


def test_a_delayed_scale_clips_what_has_grown_since():
    values = torch.tensor([1.0, 2.0, 100.0])
    assert torch.equal(quantize(values, "fp8", amax=2.0), torch.tensor([1.0, 2.0, 2.0]))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_and_nothing_stays_nothing(name):
    assert quantize(torch.zeros(128, 128), name).abs().sum() == 0
    assert quantize(torch.zeros(0, 128), name).shape == (0, 128)


def test_any_layout_and_dtype_gives_the_same_and_leaves_its_values_alone():
    values = torch.randn(64, 32, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = values.clone()
    found = quantize(values.transpose(0, 1), "nvfp4")
    assert torch.equal(found, quantize(values.float().transpose(0, 1).contiguous(), "nvfp4"))
    assert torch.equal(values, before)
    assert (found.dtype, found.shape) == (torch.float32, (32, 64, 96))


def test_stochastic_rounding_is_right_on_average():
    values = torch.full((4096, 32), 0.3)
    values[:, 0] = 6.0  # the largest of each block: the scale is 1
    found = quantize(values, "mxfp4", generator=torch.Generator().manual_seed(0))
    assert abs(found[:, 1:].mean() - 0.3) < 5 * 0.25 / (4096 * 31) ** 0.5
    assert quantize(values, "mxfp4")[:, 1:].unique().tolist() == [0.5]


def test_what_cannot_be_is_told_in_a_line():
    values = torch.ones(4, 48)
    with pytest.raises(NumericsError, match="'mxfp5' is unknown; give one of bf16, "):
        quantize(values, "mxfp5")
    with pytest.raises(NumericsError, match=r"4x48 .* is not a multiple of the 1x32 blocks"):
        quantize(values, "mxfp4")
    with pytest.raises(NumericsError, match=r"power 'up' .*floor"):
        replace(FORMATS["mxfp4"], power="up")
    with pytest.raises(NumericsError, match="amax applies only to formats with one scale"):
        quantize(torch.ones(32), "mxfp4", amax=1.0)
    for wrong in (torch.ones(32, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(NumericsError, match="tensor with at least one dimension"):
            quantize(wrong, "mxfp4")


def test_bits_for_a_value():
    found = {name: FORMATS[name].bits for name in ("fp8", "mxfp8", "mxfp6-e2m3", "mxfp4", "nvfp4")}
    expected = {"fp8": 8, "mxfp8": 8.25, "mxfp6-e2m3": 6.25, "mxfp4": 4.25, "nvfp4": 4.5}
    assert found == expected


def test_what_is_clipped_and_flushed_is_counted_and_adds_up():
    counts = Counts()
    values = torch.zeros(2, 32)
    values[0, :5] = torch.tensor(
        [6.0, 0.2, 0.5, 3.0, -1e-6]
    )  # a scale of 1: 2 flushed, 1 subnormal
    quantize(values, "mxfp4", counts=counts)
    assert counts == Counts(values=64, flushed=2, subnormal=1)
    values[1, :3] = torch.tensor([math.inf, math.nan, 1.0])
    quantize(values, "bf16", counts=counts)
    assert (counts.values, counts.nonfinite) == (128, 2)
    floor = Counts()
    quantize(torch.full((32,), 7.9), replace(FORMATS["mxfp4"], power="floor"), counts=floor)
    assert floor.clipped == 32  # 7.9 becomes 6, as the OCP's scale has it
    late = Counts()  # delayed scaling whose largest magnitude is that of an earlier step
    quantize(torch.tensor([1.0, 4.0]), "fp8", amax=2.0, counts=late)
    assert late.clipped == 1


@pytest.mark.weekly
def test_compiled_it_gives_the_same_bits():
    values = torch.randn(8, 64) * torch.exp2(torch.randint(-40, 40, (8, 1)).float())
    compiled = torch.compile(quantize, fullgraph=True)
    assert torch.equal(compiled(values, "mxfp4"), quantize(values, "mxfp4"))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_formats_of_16_bits_are_casts(name, dtype):
    values = torch.tensor([1e-8, 0.1, 65519.0, 65520.0, 3.4e38, -math.inf, math.nan])
    counts = Counts()
    assert same(quantize(values, name, counts=counts), values.to(dtype).float())
    assert counts.clipped == {"bf16": 1, "fp16": 2}[name]
    assert counts.nonfinite == 2
