"""What a test needs of the CPU it runs on, asked as the package asks it."""

import pytest
import torch

from amp_lab.core.cpu import lstm_error


def needs_lstm(dtype: torch.dtype, *, with_gradients: bool = True) -> None:
    """Skip the test if torch has no LSTM for autocast to `dtype` on this CPU."""
    error = lstm_error(dtype, with_gradients=with_gradients)
    if error is not None:
        pytest.skip(f"an LSTM in {dtype} on a CPU with AVX-512: {error}")
