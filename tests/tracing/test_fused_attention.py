"""The attention of a GPU that is not here."""

import pytest
import torch
from memory_models import MultiheadAttention, OwnAttention

from amp_lab import forecast_memory


@pytest.mark.parametrize(
    "model",
    [MultiheadAttention(64, 4, batch_first=True), OwnAttention(64, 192)],
    ids=["torch", "own"],
)
def test_attention_on_a_gpu_keeps_no_matrix_of_scores(model):
    def activations(length, **kw):
        x = torch.empty(1, length, 64, device="meta")
        return forecast_memory(model, x, optimizer="sgd", **kw).activations

    for precision in ("fp32", "fp16"):
        short, long = (activations(n, precision=precision) for n in (256, 512))
        assert long <= 2.01 * short
    scores = 4 * 512 * 512 * 2  # heads, T x T in fp16
    assert activations(512, precision="fp16", device_type="mps") > long + scores
