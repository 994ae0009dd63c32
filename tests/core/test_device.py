import dataclasses
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from course import Scale, pick_scale, start

from amp_lab import (
    DeviceError,
    Precision,
    describe_device,
    pick_device,
    recommend_precision,
)
from amp_lab.core import device as device_module
from amp_lab.core import device_matmuls
from amp_lab.core.device import _recommend
from amp_lab.core.device_facts import memory_bytes
from amp_lab.core.errors import AmpLabError, OptionError
from amp_lab.core.timing_result import Comparison, Measurement

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def two_gpus(monkeypatch):
    """torch as it answers on a machine with two CUDA devices, as far as choosing one goes."""
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: CUDA
    )
    monkeypatch.delenv("AMP_LAB_DEVICE", raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    module = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delenv("AMP_LAB_DEVICE", raising=False)


def test_the_accelerator_is_the_default(two_gpus):
    assert pick_device() == CUDA


def test_the_cpu_is_the_default_without_one(no_gpu):
    assert pick_device() == CPU


def test_the_environment_decides_over_the_accelerator(two_gpus, monkeypatch):
    monkeypatch.setenv("AMP_LAB_DEVICE", "cpu")
    assert pick_device() == CPU
    monkeypatch.setenv("AMP_LAB_DEVICE", "cuda:1")
    assert pick_device() == torch.device("cuda:1")


def test_an_empty_variable_is_an_unset_one(two_gpus, monkeypatch):
    monkeypatch.setenv("AMP_LAB_DEVICE", "")
    assert pick_device() == CUDA


def test_a_name_decides_over_the_environment(two_gpus, monkeypatch):
    monkeypatch.setenv("AMP_LAB_DEVICE", "cuda")
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda", "'cuda' is not available; .*'cpu'"),
        ("cuda:1", "'cuda:1' is not available"),
        ("banana", "'banana' is not a device; .*'cpu'"),
        ("", "'' is not a device"),
        ("cuda:-1", "'cuda:-1' is not a device"),
        ("CPU", "'CPU' is not a device"),
        ("meta", "'meta' stores no values"),
        ("gpu", "'gpu': .*'cuda'; use"),
        ("rocm", "'rocm': .*'cuda'; use"),
        ("cpu:1", "'cpu:1' does not exist: .*highest"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(no_gpu, monkeypatch, name, said):
    with pytest.raises(DeviceError, match="^" + said):
        pick_device(name)
    if name:
        monkeypatch.setenv("AMP_LAB_DEVICE", name)
        with pytest.raises(DeviceError, match="^AMP_LAB_DEVICE=" + said):
            pick_device()


def test_a_gpu_beyond_the_last_is_refused(two_gpus):
    with pytest.raises(DeviceError, match=r"'cuda:2' does not exist: .* 1$"):
        pick_device("cuda:2")


def test_what_is_there_is_named_in_the_message(two_gpus):
    with pytest.raises(DeviceError, match="has 'cuda' and 'cpu'"):
        pick_device("banana")


@pytest.mark.parametrize(
    ("device", "value", "scale"),
    [
        (CPU, None, "quick"),
        (CUDA, None, "full"),
        (CPU, "", "quick"),
        (CPU, "full", "full"),
        (CUDA, "quick", "quick"),
    ],
)
def test_scale_follows_the_device_unless_it_is_set(monkeypatch, device, value, scale):
    monkeypatch.delenv("AMP_LAB_SCALE", raising=False)
    if value is not None:
        monkeypatch.setenv("AMP_LAB_SCALE", value)
    assert pick_scale(device) is Scale(scale)


def test_a_wrong_scale_is_refused(monkeypatch):
    monkeypatch.setenv("AMP_LAB_SCALE", "huge")
    with pytest.raises(OptionError, match=r"AMP_LAB_SCALE='huge' .*'quick' .*'full'"):
        pick_scale(CPU)


@pytest.mark.parametrize(
    ("name", "value"),
    [("AMP_LAB_DEVICE", "banana"), ("AMP_LAB_DEVICE", "xpu"), ("AMP_LAB_SCALE", "huge")],
)
def test_a_notebook_as_a_script_ends_with_one_line_and_in_jupyter_with_the_error(
    monkeypatch, capsys, name, value
):
    monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with pytest.raises(SystemExit) as exit_:
        start()
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"{name}='{value}'" in said
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with pytest.raises(AmpLabError, match=f"{name}='{value}'"):
        start()


def test_a_notebook_starts_by_saying_what_its_outputs_come_from(monkeypatch, capsys):
    monkeypatch.setenv("AMP_LAB_DEVICE", "cpu")
    monkeypatch.setenv("AMP_LAB_SCALE", "quick")
    start()
    line = capsys.readouterr().out.splitlines()[0]
    report = describe_device("cpu")
    begin = f"{report.name}, {report.backend}, torch {torch.__version__}, quick scale"
    assert re.fullmatch(re.escape(begin) + r", \d{4}-\d\d-\d\d(, commit [0-9a-f]+\+?)?", line)
    monkeypatch.setenv("PATH", "")  # no git, as in a container
    start()
    line = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(re.escape(begin) + r", \d{4}-\d\d-\d\d", line)


def rates(**multiples: float | None) -> dict[Precision, float | None]:
    """Rates as multiples of fp32's."""
    return {
        p: None if multiples.get(p, 1.0) is None else 50e12 * multiples.get(p, 1.0)
        for p in Precision
    }


@pytest.mark.parametrize(
    ("measured", "recommended"),
    [
        pytest.param(rates(tf32=8, fp16=16, bf16=16), "bf16", id="a recent NVIDIA GPU"),
        pytest.param(rates(tf32=None, fp16=4, bf16=0.3), "fp16", id="a V100: no bf16 units"),
        pytest.param(
            rates(tf32=None, fp16=4, bf16=1.5), "fp16", id="bf16 emulated, a little faster"
        ),
        pytest.param(
            rates(tf32=None, fp16=0.005, bf16=2.2), "bf16", id="a CPU with bf16 instructions"
        ),
        pytest.param(rates(tf32=None, fp16=0.005, bf16=0.9), "fp32", id="a CPU without"),
        pytest.param(rates(tf32=4, fp16=1, bf16=1), "tf32", id="nothing but TF32"),
        pytest.param(rates(tf32=None, fp16=1.1, bf16=1.2), "fp32", id="within the noise"),
    ],
)
def test_recommendation(measured, recommended):
    precision, why = _recommend(measured)
    assert precision == recommended
    assert "x" in why  # a measured multiple, not a platitude


SECONDS = {Precision.FP32: 1e-2, Precision.FP16: 2.0, Precision.BF16: 4e-3}


def timed(monkeypatch, seconds, disturbed=0):
    """Rates, trust and calls when a product takes `seconds(precision, n)`."""
    asked = []

    def make_matmul(device, precision, n):
        asked.append((precision, n))
        return lambda: (precision, n)

    def measure(fn, *, device, warmup=3, repeats=10):
        return Measurement((seconds(*fn()),) * repeats, None, None)

    def compare(functions, *, device, budget_s):
        samples = {name: (seconds(*fn()),) * 12 for name, fn in functions.items()}
        return Comparison(samples, disturbed, "the machine was busy" if disturbed else "")

    for name, stand_in in (
        ("make_matmul", make_matmul),
        ("measure", measure),
        ("compare", compare),
        ("has_tf32", lambda device_type: False),
    ):
        monkeypatch.setattr(device_matmuls, name, stand_in)
    return *device_matmuls.matmul_rates(CPU), asked


def test_rates_are_of_one_size_and_a_slow_precision_of_the_small_one_alone(monkeypatch):
    rates, trusted, asked = timed(monkeypatch, lambda p, n: SECONDS[p] * (n / 1024) ** 3)
    assert trusted
    assert rates[Precision.TF32] is None
    for precision, seconds in SECONDS.items():
        assert rates[precision] == pytest.approx(2 * 1024**3 / seconds)
    assert [n for precision, n in asked if precision is Precision.FP16] == [256]
    assert max(n for _, n in asked) == 1024


def test_a_fast_device_gets_larger_matrices_until_they_fill_it(monkeypatch):
    monkeypatch.setattr(device_matmuls, "measure", lambda fn, **_: Measurement((fn(),), None, None))
    monkeypatch.setattr(device_matmuls, "make_matmul", lambda device, p, n: lambda: n / 1e5)
    assert device_matmuls.filling_size(CPU, 8192, seconds=10e-3) == 1024  # the first of 10 ms
    assert device_matmuls.filling_size(CPU, 8192, seconds=1) == 8192


@pytest.mark.parametrize("has_bf16", [True, False])
def test_on_a_busy_machine_facts_decide_and_not_rates(monkeypatch, has_bf16):
    """A rate of fp16 that was measured wrongly once made notebook 00 train for an hour."""
    wrong = {Precision.FP32: 1e9, Precision.TF32: None, Precision.FP16: 1e12, Precision.BF16: 1e9}
    monkeypatch.setattr(device_module, "matmul_rates", lambda where: (wrong, False))
    monkeypatch.setattr(device_module, "has_bf16_instructions", lambda: has_bf16)
    report = device_module._describe.__wrapped__(CPU, "CPU")
    assert not report.trusted
    assert report.recommended == (Precision.BF16 if has_bf16 else Precision.FP32)
    assert "too busy to measure" in report.reason


@pytest.mark.parametrize(
    ("capability", "recommended"),
    [
        ((5, 2), "fp32"),
        ((6, 1), "fp32"),
        ((7, 0), "fp16"),
        ((7, 5), "fp16"),
        ((8, 6), "bf16"),
        ((13, 0), "bf16"),  # newer than all in the table
    ],
)
def test_on_a_busy_gpu_its_compute_capability_decides(monkeypatch, capability, recommended):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    precision, why = device_module._recommend_unmeasured(CUDA)
    assert precision == recommended
    assert f"compute capability {capability[0]}.{capability[1]}" in why


def test_rates_of_a_busy_machine_are_not_trusted(monkeypatch):
    _, trusted, _ = timed(monkeypatch, lambda p, n: SECONDS[p] * (n / 1024) ** 3, disturbed=9)
    assert not trusted


def test_a_product_is_one_in_its_precision():
    found = {
        p: device_matmuls.make_matmul(CPU, Precision(p), 8)() for p in ("fp32", "fp16", "bf16")
    }
    assert {name: matmul.dtype for name, matmul in found.items()} == {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }
    assert torch.allclose(found["bf16"].float(), found["fp32"], atol=0.2)


def test_values_of_products_on_this_cpu():
    for precision, bits in {"fp32": 24, "fp16": 11, "bf16": 8}.items():
        found = device_matmuls.measure_matmul_numerics(torch.device("cpu"), Precision(precision))
        assert found.input_bits == bits
        if precision == "fp32":  # units for bf16 take subnormals as 0, on some CPUs too
            assert found.subnormals
        assert 0.4 < found.error < (100 if precision == "fp32" else 8)


def test_an_input_that_is_rounded_is_found():
    def as_tf32(left, right):
        return (left.view(torch.int32) & ~0x1FFF).view(torch.float32) @ right

    def as_bf16(left, right):
        return (left.bfloat16() @ right.bfloat16()).float()

    cpu, fp32 = torch.device("cpu"), torch.float32
    assert device_matmuls._input_bits(cpu, fp32, as_tf32) == 11
    assert device_matmuls._input_bits(cpu, fp32, as_bf16) == 8
    assert device_matmuls._input_bits(cpu, fp32, device_matmuls._convolve) == 24


def test_a_sum_in_tf32_is_compared_with_the_sum_of_the_same_inputs(monkeypatch):
    """A device that cuts its inputs to TF32 and sums in fp32 has the error of an fp32 sum."""
    plain = torch.Tensor.__matmul__

    def cut(operand):
        if operand.dtype != torch.float32:
            return operand
        return (operand.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def in_tf32(left, right):
        return plain(cut(left), cut(right))

    monkeypatch.setattr(torch.Tensor, "__matmul__", in_tf32)
    fp32 = Precision.FP32  # a CPU cannot switch TF32 on
    monkeypatch.setattr(device_matmuls, "_without_autocast", lambda precision: fp32)
    found = device_matmuls.measure_matmul_numerics(torch.device("cpu"), Precision.TF32)
    assert found.error < 20
    assert found.subnormals


def test_sums_in_a_narrow_format_are_found(monkeypatch):
    """One after the other in fp16, as a device would that has no wider sums."""

    def narrow(left, right):
        sums = torch.zeros(len(left), right.shape[1], dtype=left.dtype)
        for k in range(left.shape[1]):
            sums += left[:, k, None] * right[None, k]
        return sums

    monkeypatch.setattr(torch.Tensor, "__matmul__", narrow)
    found = device_matmuls.measure_matmul_numerics(torch.device("cpu"), Precision.FP16)
    assert found.error > 8


def test_a_device_that_torch_cannot_use_is_said(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(DeviceError, match=r"cannot use 'cpu'.*image is available$"):
        device_module._describe.__wrapped__(CPU, "CPU")


@pytest.mark.parametrize("recommended", [Precision.FP32, Precision.BF16])
def test_rates_of_a_busy_machine_accelerate_nothing(recommended):
    """fp16 seemed to be fast, and notebook 04 would have trained in it for an hour."""
    rates = dict.fromkeys(Precision, 1.0) | {Precision.FP16: 5.0}
    report = dataclasses.replace(
        describe_device("cpu"), rates=rates, trusted=True, recommended=recommended
    )
    assert report.accelerated == (Precision.FP16,)
    busy = dataclasses.replace(report, trusted=False)
    assert busy.accelerated == (() if recommended is Precision.FP32 else (recommended,))


def test_report_of_this_cpu():
    report = describe_device("cpu")
    assert report.device == CPU
    assert report.name
    assert report.memory_bytes > 2**28
    assert report.rates[Precision.FP32] > 1e8
    assert report.speedup(Precision.FP32) == 1.0
    assert Precision.FP32 not in report.accelerated
    assert not report.trusted or all(report.speedup(p) >= 1.25 for p in report.accelerated)
    assert recommend_precision("cpu") is report.recommended
    assert describe_device(CPU) is report  # measured once


def test_with_other_threads_a_device_is_described_anew(monkeypatch):
    measured = []
    monkeypatch.setattr(
        device_module, "matmul_rates", lambda _: measured.append(1) or (rates(), True)
    )
    device_module._describe.cache_clear()
    threads = torch.get_num_threads()
    try:
        for wanted in (1, 2, 2):
            torch.set_num_threads(wanted)
            assert f"{wanted} threads" in describe_device("cpu").backend
    finally:
        torch.set_num_threads(threads)
        device_module._describe.cache_clear()
    assert len(measured) == 2


def test_report_of_a_device_that_is_not_there():
    with pytest.raises(DeviceError):
        describe_device("hpu")


def test_memory_of_a_container_is_what_it_may_use(monkeypatch):
    def limited(path):
        assert str(path) == "/sys/fs/cgroup/memory.max"
        return "1048576\n"

    monkeypatch.setattr("amp_lab.core.device_facts.Path.read_text", limited)
    assert memory_bytes(CPU) == 2**20
