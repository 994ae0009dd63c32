"""The forecast as text, as a table, as JSON and as a figure."""

import json

from memory_models import images, vgg

from amp_lab import forecast_memory
from amp_lab.tracing import compare_memory


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
    assert str(single).splitlines()[0].endswith("one training step with adam on cuda")
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
