"""The table of GPUs: what its rows need, and how a GPU is found by name."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import write_gpus
from amp_lab import advise, rehearse
from amp_lab.cli import main
from amp_lab.core.errors import OptionError
from amp_lab.core.gpus import BLACKWELL_RTX, GPUS, Gpu, absent_gpu, gpu_of, matmuls_of
from amp_lab.formats import FORMATS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHEATSHEET.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = ROOT / "notebooks"
NAME = re.compile(
    r"\b(?:(?:GTX|RTX|Arc) [AB]?\d+\w*(?: Ti)?|(?:A|B|H|L|P|V|GB|MI)\d{2,3}[A-Z]?|[LT]4)\b"
)
MATMULS = {form.matmul for form in FORMATS.values()} - {""} | {"tf32"}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_row_is_whole(gpu):
    assert gpu.source.startswith("https://")
    assert MATMULS.issuperset(gpu.architecture.matmuls)
    assert gpu_of(gpu.name) is gpu
    assert {4, 8, 16}.issuperset(gpu.rates)
    rates = [gpu.rates[bits] for bits in sorted(gpu.rates)]
    assert rates == sorted(rates, reverse=True)  # fewer bits are faster
    if gpu.rates:
        assert gpu.bandwidth is not None
        assert 1e11 < gpu.bandwidth < 1e13
        assert 1e13 < gpu.rates[16] < 1e16


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        ("RTX 4090", "rtx-4090"),
        ("rtx_4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        # as drivers call them
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("AMD Radeon RX 9070 XT", "rx-9070-xt"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_is_found_by_the_names_that_people_write(name, key):
    assert gpu_of(name) is GPUS[key]


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("h2000", "h200"),
        ("rtx-4080", "rtx-4090"),
        ("mi300", "mi300x"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090"),  # another GPU, with other rates
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a100"),  # a part of a GPU
    ],
)
def test_an_unknown_name_gets_the_closest(name, closest):
    with pytest.raises(OptionError, match=f"'{name}' is not in .* closest are .*{closest}"):
        gpu_of(name)
    with pytest.raises(OptionError, match=closest):
        absent_gpu(name)


def test_a_type_of_device_is_a_gpu_of_which_no_more_is_known():
    gpu = absent_gpu("cuda")
    assert gpu.architecture.device_type == "cuda"
    assert gpu.memory_bytes is None
    assert not gpu.rates
    assert absent_gpu("rocm") == gpu
    with pytest.raises(OptionError):
        gpu_of("cuda")


def test_memory_is_counted_in_gib():
    assert GPUS["rtx-4090"].memory_bytes == 24 * 2**30


@pytest.mark.parametrize(
    ("capability", "matmuls"),
    [
        ((5, 2), ()),
        ((7, 5), GPUS["t4"].architecture.matmuls),
        ((8, 6), GPUS["a10"].architecture.matmuls),
        ((8, 9), GPUS["l4"].architecture.matmuls),
        ((10, 3), GPUS["b300"].architecture.matmuls),
        ((12, 1), GPUS["gb10"].architecture.matmuls),
    ],
)
def test_a_compute_capability_has_the_formats_of_its_architecture(capability, matmuls):
    assert matmuls_of(capability) == matmuls


def named_in(text: str) -> list[str]:
    """The GPUs and, such as RTX 20, the series of them that a text names."""
    return NAME.findall(text)


def rows_of(name: str) -> list[Gpu]:
    """The rows that a name such as RTX 20 or MI300 stands for."""
    return [gpu for gpu in GPUS.values() if gpu.name.startswith(name)]


def test_each_gpu_that_a_page_names_has_a_row():
    notebooks = [NOTEBOOKS / "15_below_16_bits.py", NOTEBOOKS / "19_choose_your_precision.py"]
    found = []
    for page in [*PAGES, *notebooks]:
        for name in named_in(page.read_text(encoding="utf-8")):
            found.append(name)
            assert rows_of(name), f"{page.name} names {name}: add it to core/gpus.py"
    assert {"V100", "T4", "RTX 20", "GTX 10", "MI300", "P100", "Arc A770"} <= set(found)


def test_notebook_15_has_the_formats_of_the_table():
    text = (NOTEBOOKS / "15_below_16_bits.py").read_text(encoding="utf-8")
    table = text.partition("| FP8 | MXFP8, MXFP4, NVFP4 |")[2].partition("# Sources")[0]
    found = 0
    for line in table.splitlines():
        for name in named_in(line):
            _, fp8, blocks, _ = line[line.index("|") + 1 :].split("|")
            matmuls = rows_of(name)[0].architecture.matmuls
            assert ("fp8" in matmuls) == fp8.strip().startswith("yes"), line
            assert ("mxfp8" in matmuls) == (blocks.strip() != "no"), line
            found += 1
    assert found >= 8


def test_the_memory_playground_has_the_table():
    assert write_gpus.FILE.read_text(encoding="utf-8") == write_gpus.script()


@pytest.mark.usefixtures("one_thread_and_seed")
def test_a_row_is_enough(monkeypatch, tmp_path, capsys):
    rates = {16: 250e12, 8: 500e12, 4: 2000e12}
    new = Gpu("RTX 6090", BLACKWELL_RTX, 48, "https://example.org", rates, 2e12)
    monkeypatch.setitem(GPUS, new.key, new)
    assert '{ gb: 48, names: ["L40S", "RTX 6090"] }' in write_gpus.script()
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    assert "Linear on RTX 6090" in str(advise(model, x, gpu="rtx-6090"))
    said = str(rehearse(model, x, formats=("mxfp8",), gpu="rtx-6090"))
    assert "RTX 6090" in said
    assert "no forecast" not in said
    nets = tmp_path / "nets.py"
    nets.write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(64, 64)\n")
    assert main(["memory", f"{nets}:net", "--input", "32,64", "--for", "rtx-6090"]) == 0
    assert "largest batch in 48 GiB" in capsys.readouterr().out
