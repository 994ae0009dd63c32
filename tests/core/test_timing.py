import re
import statistics
import time

import numpy as np
import pytest
import torch

from amp_lab import compare, measure
from amp_lab.core import timing
from amp_lab.core.estimates import Estimate, Ratio
from amp_lab.core.timing import Rounds
from amp_lab.core.timing_result import Measurement


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch):
    monkeypatch.delenv("AMP_LAB_TIMING_S")  # of the test run


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
        (Measurement((1.5,), 2**21, 2**22), "1.5 s (IQR 0 ms, 1 repeats), peak 2 MiB"),
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


def test_a_turn_of_compare_waits_for_the_device_before_it_and_after_it(monkeypatch):
    accelerator = Accelerator(monkeypatch)
    timing._time_calls(lambda: accelerator.log.append("run"), 2, torch.device("cuda"))
    assert accelerator.log == ["sync", "clock", "run", "run", "sync", "clock"]


def test_a_device_without_memory_statistics_is_timed_all_the_same(monkeypatch):
    Accelerator(monkeypatch, counts=False)
    result = measure(lambda: None, device="mps", repeats=3)
    assert result.peak_bytes is None
    assert result.samples_s == (1.0, 1.0, 1.0)


class Simulation:
    """A machine whose functions take the time that a test gives them, and that can be busy."""

    def __init__(self, monkeypatch, seconds, is_disturbed=lambda round_: False):
        self.now, self.turns, self.rounds = 0.0, [], 0
        monkeypatch.setattr(timing, "_time_calls", self.turn)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "_Watch", lambda device: self)
        self.seconds, self.is_disturbed, self.device = seconds, is_disturbed, torch.device("cpu")

    def turn(self, fn, calls, device):
        taken = calls * self.seconds(fn(), self.now)
        self.now += taken
        self.turns.append((fn(), calls))
        return taken

    def start_round(self):
        self.rounds += 1

    def calibrate(self):
        pass

    def was_disturbed(self):
        return self.is_disturbed(self.rounds)

    def was_moved(self):
        return False

    def cores_were_apart(self):
        return False


TWO = {"one": lambda: 1.0, "other": lambda: 2.0}


def test_a_drift_of_the_machine_meets_both_functions_alike(monkeypatch):
    """Each takes 1 % longer a second: in turns of one after the other the ratio would be off."""
    Simulation(monkeypatch, lambda work, now: work * 0.1 * (1 + 0.01 * now))
    compared = compare(TWO, device="cpu", budget_s=30)
    assert compared.trusted
    assert compared.ratio("other", "one").median == pytest.approx(2, rel=1e-3)


def test_a_turn_is_long_enough_for_the_clock(monkeypatch):
    machine = Simulation(monkeypatch, lambda work, now: work * 1e-5)
    compared = compare(TWO, device="cpu")
    assert all(calls * work * 1e-5 >= 5e-3 for work, calls in machine.turns[-4:])
    assert compared.median_s("one") == pytest.approx(1e-5)


def test_a_round_in_which_the_cores_were_moved_is_noticed():
    """Some ops take twice as long when they share no cache, and others no longer."""
    watch = timing._Watch(torch.device("cpu"))
    watch.exchanges_s = [1e-3] * 9
    for seconds, moved in ((2e-3, False), (0.5e-3, False), (4e-3, True), (0.2e-3, True)):
        watch.start_round()
        watch.exchanges_s[-1] = seconds
        assert watch.was_moved() is moved


def test_it_is_said_if_the_cores_lay_apart_all_the_time(monkeypatch):
    monkeypatch.setattr(timing._Watch, "fastest_exchange_s", {})
    near, apart = (Rounds(torch.device("cpu")) for _ in range(2))
    fastest = min(near.watch.exchanges_s + apart.watch.exchanges_s)
    assert near.watch.fastest_exchange_s[torch.get_num_threads()] == fastest > 0
    with near.next() as seconds:
        seconds["one"] = 1.0
    near.watch.exchanges_s = [1e-3] * 9
    apart.watch.exchanges_s = [4e-3] * 9
    apart.watch.fastest_exchange_s[torch.get_num_threads()] = 1e-3
    for rounds in (near, apart):
        rounds.all = rounds.quiet = rounds.still = 12 * near.all[:1]
    assert not near.comparison(["one"]).apart
    found = apart.comparison(["one"])
    assert found.apart
    assert found.to_json()["apart"]
    assert str(found).endswith("some ratios may be off")
    near.still = 11 * near.all[:1]  # too few: those with the cores elsewhere count as well
    near.quiet = near.all = 4 * near.still
    assert near.comparison(["one"]).rounds == 44
    assert near.comparison(["one"]).apart


def test_disturbed_rounds_are_left_out_and_counted(monkeypatch):
    slow = {3, 4, 8}

    def seconds(work, now):
        return 0.01 * (5 if machine.rounds in slow and work == 2 else work)

    machine = Simulation(monkeypatch, seconds, lambda number: number in slow)
    compared = compare(TWO, device="cpu", precision=1e-9, budget_s=0.9)
    assert compared.trusted
    assert compared.disturbed == 3
    assert max(compared.samples_s["other"]) == pytest.approx(0.02)
    assert compared.reason == ""


def test_a_busy_machine_is_told_and_shows_its_spread(monkeypatch):
    busy = Simulation(monkeypatch, lambda work, now: work * 0.01, lambda number: number % 3 > 0)
    compared = compare(TWO, device="cpu", budget_s=1)
    assert not compared.trusted
    assert compared.rounds == busy.rounds  # all of them, since none can be told from the rest
    assert not compared.ratio("other", "one").is_above(1)
    assert "not reliable" in str(compared)
    assert re.search("not trusted: .*busy in", str(compared))


def test_too_little_time_for_twelve_rounds_is_told(monkeypatch):
    Simulation(monkeypatch, lambda work, now: work * 1.0)
    compared = compare(TWO, device="cpu", budget_s=7)
    assert compared.reason.startswith("undisturbed rounds: 3 of 3, and 12 ")


def test_the_environment_limits_the_budget(monkeypatch):
    machine = Simulation(monkeypatch, lambda result, now: 0.1 * result)
    monkeypatch.setenv("AMP_LAB_TIMING_S", "1")
    found = compare(TWO, device="cpu", budget_s=100, precision=1e-9)
    assert not found.trusted
    assert machine.now < 3  # with the calls that find out how long a turn is


def test_the_interval_holds_the_ratio_and_narrows_until_it_is_narrow_enough(monkeypatch):
    noise = np.random.default_rng(1)
    Simulation(monkeypatch, lambda work, now: work * 0.01 * noise.lognormal(sigma=0.05))
    wide = compare(TWO, device="cpu", precision=0.2)
    narrow = compare(TWO, device="cpu", precision=0.012)
    assert narrow.rounds > wide.rounds >= 12
    for ratio in (wide.ratio("other", "one"), narrow.ratio("other", "one")):
        low, high = ratio.interval
        assert low < 2 < high
        assert low <= ratio.median <= high
    assert narrow.ratio("other", "one") == narrow.ratio("other", "one")  # seeded


def test_an_interval_is_never_narrower_than_the_clock_allows(monkeypatch):
    Simulation(monkeypatch, lambda work, now: work * 0.01)
    low, high = compare(TWO, device="cpu").ratio("other", "one").interval
    assert (low, high) == (pytest.approx(1.96), pytest.approx(2.04))


def test_a_real_comparison_tells_waiting_from_work():
    """The ratio of sleeps is known; whether this machine is quiet is not."""
    naps = {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}
    compared = compare(naps, device="cpu", budget_s=2)
    assert compared.ratio("long", "short").median > 1
    assert compared.rounds >= 1


def test_compare_needs_a_function():
    with pytest.raises(ValueError, match="at least one function"):
        compare({}, device="cpu")


def test_an_error_of_a_function_comes_through():
    with pytest.raises(ZeroDivisionError):
        compare({"one": lambda: 1, "bad": lambda: 1 / 0}, device="cpu")


def test_a_wide_interval_and_a_busy_machine_cannot_tell():
    clear, wide = Ratio(1.5, (1.4, 1.6)), Ratio(1.05, (0.9, 1.2))
    assert clear.is_above(1)
    assert not clear.is_below(1)
    assert Ratio(0.5, (0.4, 0.6)).is_below(1)
    assert not wide.is_above(1)
    assert not wide.is_below(1)
    busy = Ratio(1.5, (1.4, 1.6), trusted=False)
    assert not busy.is_above(1)
    assert (str(clear), str(busy)) == (
        "1.50x (1.40x to 1.60x)",
        "1.40x to 1.60x (not reliable)",
    )


def test_one_function_alone_has_a_time_and_its_interval(monkeypatch):
    noise = np.random.default_rng(1)
    Simulation(monkeypatch, lambda work, now: work * 0.01 * noise.lognormal(sigma=0.05))
    compared = compare({"other": TWO["other"]}, device="cpu")
    low, high = compared.time_s("other").interval
    assert low < compared.median_s("other") < high
    assert low < 0.02 < high
    assert compared.to_json()["trusted"]


def test_an_estimate_in_another_unit_and_as_a_rate():
    seconds = Estimate(2.0, (1.0, 4.0), trusted=False)
    assert seconds.times(1000) == Estimate(2000.0, (1000.0, 4000.0), trusted=False)
    assert seconds.rate(8) == Estimate(4.0, (2.0, 8.0), trusted=False)
