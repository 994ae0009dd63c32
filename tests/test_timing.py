import statistics
import time

import pytest
import torch

from amp_lab import measure
from amp_lab.timing import Measurement


def test_calls_warm_up_and_repeats_and_counts_the_repeats_only():
    calls = []
    result = measure(lambda: calls.append(None), device="cpu", warmup=2, repeats=5)
    assert len(calls) == 7
    assert len(result.samples_s) == 5
    assert all(sample >= 0 for sample in result.samples_s)


def test_a_cpu_keeps_no_count_of_memory():
    result = measure(lambda: torch.zeros(1000), device=torch.device("cpu"), repeats=1)
    assert result.peak_bytes is None
    assert result.reserved_bytes is None


def test_median_and_interquartile_range_are_those_of_the_samples():
    samples = (5.0, 1.0, 2.0, 4.0, 3.0)
    result = Measurement(samples, None, None)
    assert result.median_s == statistics.median(samples) == 3.0
    assert result.iqr_s == 4.0 - 2.0  # numpy's default quantiles of 1..5
    assert Measurement((2.0,), None, None).iqr_s == 0.0


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Measurement((0.0123, 0.0123), None, None), "12.3 ms (IQR 0 ms, 2 repeats)"),
        (Measurement((1.5,), 2**21, 2**22), "1.5 s (IQR 0 s, 1 repeats), peak 2 MiB"),
    ],
)
def test_text(result, text):
    assert str(result) == text


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"repeats": -1}, {"warmup": -1}])
def test_wrong_counts_are_refused(wrong):
    with pytest.raises(ValueError, match="measure: repeats="):
        measure(lambda: None, device="cpu", **wrong)


def test_an_error_of_the_function_passes():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")


class Accelerator:
    """Stands in for `torch.accelerator`, and writes down what is asked of it, in order."""

    def __init__(self, monkeypatch, counts=True):
        self.log, self.counts, self.now = [], counts, 0.0
        for name in (
            "empty_cache",
            "synchronize",
            "reset_peak_memory_stats",
            "max_memory_allocated",
            "max_memory_reserved",
        ):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        monkeypatch.setattr(time, "perf_counter", self.clock)

    def clock(self):
        self.log.append("clock")
        self.now += 1.0
        return self.now

    def empty_cache(self):
        self.log.append("empty")

    def synchronize(self, device):
        self.log.append("sync")

    def reset_peak_memory_stats(self, device):
        if not self.counts:
            raise RuntimeError("no statistics")
        self.log.append("reset")

    def max_memory_allocated(self, device):
        return 100

    def max_memory_reserved(self, device):
        return 200


def test_the_device_is_synchronised_before_the_clock_is_read_and_peaks_reset_after_warm_up(
    monkeypatch,
):
    accelerator = Accelerator(monkeypatch)
    result = measure(lambda: accelerator.log.append("run"), device="cuda", warmup=1, repeats=2)
    once = ["sync", "clock", "run", "sync", "clock"]
    assert accelerator.log == ["empty", "run", "sync", "reset", *once, *once]
    assert (result.peak_bytes, result.reserved_bytes) == (100, 200)


def test_a_device_without_memory_statistics_is_timed_all_the_same(monkeypatch):
    Accelerator(monkeypatch, counts=False)
    result = measure(lambda: None, device="mps", repeats=3)
    assert result.peak_bytes is None
    assert result.samples_s == (1.0, 1.0, 1.0)
