"""What a test needs of the CPU it runs on, asked as the package asks it."""

import pytest
import torch

from amp_lab.core.cpu import lstm_error


def needs_int8_matmul() -> None:
    """Skip the test if sums of int8 products overflow on this CPU, as without VNNI instructions."""
    ones = torch.full((32, 32), 127, dtype=torch.int8)
    if not torch.equal(torch._int_mm(ones, ones), torch.full((32, 32), 32 * 127**2).int()):
        pytest.skip("int8 matmuls on a CPU without VNNI instructions: their sums overflow")


def needs_lstm(dtype: torch.dtype, *, with_gradients: bool = True) -> None:
    """Skip the test if torch has no LSTM for autocast to `dtype` on this CPU."""
    error = lstm_error(dtype, with_gradients=with_gradients)
    if error is not None:
        pytest.skip(f"an LSTM in {dtype} on a CPU with AVX-512: {error}")
