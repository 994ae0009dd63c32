"""The forecast as text, as a table, as JSON and as a figure."""

import json
import re

import pytest
import torch
from memory_models import images, vgg
from torch import nn

from amp_lab import forecast_inference, forecast_memory
from amp_lab.tracing import compare_memory
from amp_lab.tracing.storage_ledger import StorageLedger


def test_the_table_shows_all_precisions_side_by_side():
    table = compare_memory(vgg(), (4, 3, 64, 64), memory_bytes="1 GiB")
    assert table["fp32"].input_shapes == ((4, 3, 64, 64),)
    text = str(table)
    assert [line.split() for line in text.splitlines()[2:3]] == [
        ["in", "MiB", "fp32", "fp16", "bf16"]
    ]
    for what in ("weights", "gradients", "optimizer state", "activations", "peak of the step"):
        assert f"\n{what}" in text
        mark, tag = ("**", "th") if what.startswith("peak") else ("", "td")
        assert f"| {mark}{what}" in table.to_markdown()
        assert f"<{tag}>{what}" in table._repr_html_()
    last = next(line for line in text.splitlines() if line.startswith("largest batch"))
    assert last.split()[:5] == ["largest", "batch", "in", "1", "GiB"]
    assert last.split()[5:] == [f"{batch:,}" for batch in table.largest.values()]
    fields = json.loads(table.to_json())
    assert fields["memory_bytes"] == 2**30
    assert fields["largest_batch"] == table.largest
    assert [f["peak"] for f in fields["forecasts"]] == [f.peak for f in table.forecasts]
    single = forecast_memory(vgg(), images(64), precision="fp16")
    assert json.loads(single.to_json())["activations"] == single.activations
    assert str(single).splitlines()[0].endswith("adam on cuda")
    assert "<table>" in single._repr_html_()


def test_the_plot_has_a_line_for_each_precision_and_the_limit():
    import matplotlib.pyplot as plt

    options = {"memory_bytes": "1 GiB", "precisions": ["fp32", "fp16"]}
    ax = compare_memory(vgg(), (1, 3, 64, 64), **options).plot()
    assert [line.get_label() for line in ax.lines[:2]] == ["fp32", "fp16"]
    assert list(ax.lines[2].get_ydata()) == [1, 1]
    fp32, fp16 = (line.get_ydata()[-1] for line in ax.lines[:2])
    assert fp32 > fp16 > 1
    plt.close(ax.figure)


def test_the_table_says_what_of_the_casts_is_alive_at_the_peak():
    """Else casts of weights that are gone by then seem not to fit below the peak."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    forecast = forecast_memory(model, torch.ones(1, 512), precision="bf16")
    assert forecast.peak_phase == "optimizer"
    assert 0 == forecast.at_peak["cast_cache"] < forecast.cast_kept < forecast.cast_cache
    line = next(line for line in str(forecast).splitlines() if line.startswith("weight casts"))
    assert line.split()[-2:] == ["peak", "0"]
    assert json.loads(forecast.to_json())["at_peak"]["cast_cache"] == 0


class Language(nn.Module):
    """Logits of 4,000 tokens for each position, by far the largest of its tensors."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4000, 16), nn.Linear(16, 4000)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


LOGITS = 4 * 64 * 4000  # of 64 positions, in fp32


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_largest_tensor_at_the_peak_is_named_with_its_place(precision):
    def loss(logits):
        target = torch.zeros(64, dtype=torch.int64, device=logits.device)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target)

    tokens = torch.zeros(2, 32, dtype=torch.int64)
    model = Language()
    forecast = forecast_memory(model, tokens, precision=precision, loss_fn=loss, optimizer="sgd")
    share = f"{100 * LOGITS / forecast.peak:.0f} % of the peak"
    found = forecast.largest_at_peak
    assert found.startswith("the result of ")
    assert "in the loss" in found or "in the backward pass" in found
    assert found.endswith(f", fp32 values, {LOGITS / 2**20:.2g} MiB, {share}")
    assert re.search(rf"{precision}: .*at the peak .*{re.escape(found)}", str(forecast))
    assert json.loads(forecast.to_json())["largest_at_peak"] == found


def test_a_module_is_named_where_its_output_is_the_largest_tensor():
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    for autocast, size in ((False, LOGITS), (True, LOGITS // 2)):
        precision = "bf16" if autocast else "fp32"
        options = {"precision": precision, "autocast": autocast}
        forecast = forecast_inference(Language().eval(), tokens, **options)
        values = "16-bit" if autocast else "fp32"
        of = f"in 'head', {values} values, {size / 2**20:.2g} MiB"
        assert of in forecast.largest_at_peak
        assert forecast.largest_at_peak in str(forecast)


def test_the_size_at_the_peak_grows_with_the_batch_that_it_is_forecast_for():
    table = compare_memory(nn.Sequential(nn.Linear(8, 4000)), (64, 8), precisions=["fp32"])
    assert f", fp32 values, {LOGITS / 2**20:.2g} MiB, " in table["fp32"].largest_at_peak


def test_no_tensor_is_named_where_weights_and_the_optimizers_state_are_nearly_all():
    forecast = forecast_memory(nn.Linear(512, 512), torch.ones(1, 512), precision="fp32")
    assert forecast.largest_at_peak == ""
    assert "the largest tensor" not in str(forecast)


def test_naming_modules_leaves_a_layer_its_fast_path():
    """A module with hooks of its own takes another course."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.rand(2, 5, 16)
    forecast = forecast_inference(layer, x, device_type="cpu", precision="fp32")
    assert "_transformer_encoder_layer_fwd" in _ops(layer, x)
    assert not layer._forward_hooks
    assert forecast.peak > 0


def _ops(model, x):
    """The names of the ops of a pass while a ledger names modules."""
    ledger = StorageLedger("cpu")
    with torch.inference_mode(), ledger.naming_modules(model), ledger:
        model(x)
        ledger.mark("forward")
    return {maker.op for maker in ledger.trace().makers}


def test_what_ddp_would_add_is_said():
    forecast = forecast_memory(nn.Linear(512, 512), torch.ones(1, 512), precision="fp16")
    assert forecast.gradients == 4 * (512 * 512 + 512)
    assert re.search(r"DDP adds .* 1 MiB,", str(forecast))
    assert "gradient_as_bucket_view=True" in str(forecast)
    frozen = nn.Linear(512, 512).requires_grad_(False)
    assert "DDP" not in str(forecast_memory(frozen, torch.ones(1, 512), precision="fp16"))


def test_a_column_of_fp32_says_that_weights_stay_in_16_bits():
    model, inputs = nn.Linear(4, 4).bfloat16(), torch.rand(2, 4).bfloat16()
    said = "Weights in bf16 keep their dtype: fp32 here means this model without autocast."
    assert said in str(forecast_memory(model, inputs, precision="fp32"))
    assert "stay so" not in str(forecast_memory(model, inputs, precision="bf16"))
    assert "stay so" not in str(
        forecast_memory(nn.Linear(4, 4), torch.rand(2, 4), precision="fp32")
    )
