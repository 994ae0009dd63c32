"""Sums of FP8 products in the 14 bits of an H100, against recorded words."""

import pytest
import torch

from amp_lab.core.errors import NumericsError
from amp_lab.formats import hopper_matmul, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What mmaemu 0.1.0 gives for these operands (accumulate with splitk=1). Its authors compared it
# with an H100 PCIe, bit for bit: https://github.com/astding/mmaemu, docs/validation.md.
WORDS = {
    (E4M3, True): "49ac6000 46c89800 c8ca3000 449ae800 49983c00 46d2ec00",
    (E4M3, False): "49ac8c80 46c89880 c8ca5600 449af140 49986ec0 46d2f200",
    (E5M2, True): "4cdac400 4a173c00 cb138800 c9240c00 4cb96c00 4a08f400",
    (E5M2, False): "4cdaee00 4a174e80 cb139380 c9241700 4cb98f00 4a090ac0",
}


def operand(rows, dtype, start):
    """FP8 numbers of all magnitudes, subnormal ones too."""
    bits = (torch.arange(rows * 300) * 37 + start) % 251
    values = bits.to(torch.uint8).view(dtype).float().nan_to_num(1.0, 2.0, -2.0)
    return values.to(dtype).view(rows, 300)


@pytest.mark.parametrize(("dtype", "fast_accum"), WORDS)
def test_the_sums_are_those_of_an_h100_bit_for_bit(dtype, fast_accum):
    found = hopper_matmul(operand(2, E4M3, 11), operand(3, dtype, 5), fast_accum=fast_accum)
    words = [f"{word & 0xFFFFFFFF:08x}" for word in found.view(torch.int32).flatten().tolist()]
    assert words == WORDS[dtype, fast_accum].split()


def test_sums_that_fit_into_14_bits_are_exact():
    left = torch.randint(-4, 5, (5, 70)).float()
    right = torch.randint(-4, 5, (6, 70)).float()
    found = hopper_matmul(left.to(E4M3), right.to(E5M2))
    assert torch.equal(found, left @ right.T)


def test_a_piece_of_the_rows_gives_the_same_sums(monkeypatch):
    left, right = operand(7, E4M3, 3), operand(4, E4M3, 8)
    whole = hopper_matmul(left, right)
    monkeypatch.setattr("amp_lab.formats.accumulation._PIECE", 1)
    assert torch.equal(hopper_matmul(left, right), whole)


def test_long_sums_of_positive_values_lose_much_more_than_rounding_does():
    left, right = torch.randn(2, 8, 4096).abs()
    rounded = [quantize(values, "fp8-rowwise") for values in (left, right)]
    operands = [(values / values.amax() * 448).to(E4M3) for values in (left, right)]
    exact = operands[0].double() @ operands[1].double().T
    loss_of_rounding = error(rounded[0] @ rounded[1].T, left @ right.T)
    assert error(hopper_matmul(*operands), exact) > 10 * loss_of_rounding
    assert error(hopper_matmul(*operands, fast_accum=False), exact) < loss_of_rounding


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (torch.ones(2, 4), torch.ones(2, 4).to(E4M3), "left is torch.float32"),
        (torch.ones(2, 4).to(E4M3), torch.ones(4).to(E4M3), "right is .* of shape .4,."),
        (
            torch.ones(2, 4).to(E4M3),
            torch.ones(2, 5).to(E4M3),
            "left have 4 values and rows of right 5",
        ),
    ],
)
def test_other_operands_are_refused(left, right, words):
    with pytest.raises(NumericsError, match=words):
        hopper_matmul(left, right)
