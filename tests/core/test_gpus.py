"""The table of GPUs: what its rows need, and how a GPU is found by name."""

import pytest

from amp_lab.core.errors import OptionError
from amp_lab.core.gpus import GPUS, absent_gpu, gpu_of
from amp_lab.formats import FORMATS

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
    ],
)
def test_a_gpu_is_found_by_the_names_that_people_write(name, key):
    assert gpu_of(name) is GPUS[key]


@pytest.mark.parametrize(
    ("name", "closest"), [("h2000", "h200"), ("rtx-4080", "rtx-4090"), ("mi300", "mi300x")]
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
