"""Attention by its definition, and that of a GPU that is not here."""

import pytest
import torch
import torch.nn.functional as F
from memory_models import MultiheadAttention, OwnAttention

from amp_lab import forecast_memory
from amp_lab.tracing.attention import Attention


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


@pytest.mark.parametrize(
    ("heads", "gqa", "dtype", "has_scores"),
    [
        (4, False, torch.float32, False),
        (4, True, torch.float32, False),  # as many heads, so that nothing is grouped
        (2, True, torch.float32, True),  # the efficient kernel has no groups
        (2, True, torch.bfloat16, False),  # and flash attention has
        (1, False, torch.bfloat16, True),  # a head that is broadcast fits none of them
    ],
)
def test_grouped_heads_take_the_kernel_that_has_them(heads, gqa, dtype, has_scores):
    class Grouped(torch.nn.Module):
        """Attention with 4 heads of queries, and fewer of keys and values."""

        def __init__(self):
            super().__init__()
            self.to_query = torch.nn.Linear(32, 32)
            self.to_rest = torch.nn.Linear(32, 8 * heads)

        def forward(self, x):
            query = self.to_query(x).unflatten(-1, (4, 8)).transpose(1, 2)
            rest = self.to_rest(x).unflatten(-1, (heads, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(query, rest, rest, enable_gqa=gqa)

    def activations(length):
        x = torch.empty(1, length, 32, device="meta")
        precision = "fp32" if dtype is torch.float32 else "bf16"
        return forecast_memory(Grouped(), x, optimizer="sgd", precision=precision).activations

    grows = activations(512) / activations(256)
    assert (grows > 3) == has_scores


@pytest.mark.usefixtures("one_thread_and_seed")
def test_attention_by_its_definition_is_torchs_own():
    query, key, value = (torch.randn(2, 4, n, 8) for n in (5, 6, 6))
    mask = torch.randn(5, 6)
    for call in (
        Attention(query, key, value),
        Attention(query, key, value, attn_mask=mask, scale=0.5),
        Attention(query, query, query, is_causal=True),
        Attention(query, key[:, :2], value[:, :2], enable_gqa=True),
    ):
        *given, scale, gqa = call
        expected = F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=gqa)
        assert torch.allclose(call.in_plain_ops(), expected, atol=1e-6)
        length = call.key.shape[-2]
        assert call.flops() == 2 * (call.query.numel() + expected.numel()) * length
