"""Checks for notebook 04, Train in FP32 and with AMP, and measure both."""

import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from course.exercises import call, exercise, need


@exercise
def check_speedup(speedup: float) -> str:
    """The speed-up of a step that takes 40 % less time."""
    before = 100.0  # ms
    after = 60.0
    right = before / after
    is_number = isinstance(speedup, int | float)
    need(is_number, f"A speed-up is a number, but you gave {speedup!r}.")
    need(
        speedup > 1,
        f"{speedup:g}x would mean that the step became slower. Divide the time in FP32 by the "
        "new time.",
    )
    is_40_percent_faster = abs(speedup - 1.4) <= 0.005
    need(
        not is_40_percent_faster,
        "1.4x is 40 % more speed, not 40 % less time. With 1.4x, a step would take 71 ms "
        "instead of 100 ms.",
    )
    milliseconds = before / speedup
    error = abs(speedup - right)
    need(
        error < 0.01,
        f"With a speed-up of {speedup:g}x, a step of 100 ms would take {milliseconds:.0f} ms."
        " How long does it take with 40 % less time?",
    )
    return f"100 ms become 60 ms. Half the time would be 2x, so {right:.2f}x is plausible."


class _Device:
    """A device that works through a queue, and a clock that only its work moves."""

    def __init__(self, older: float) -> None:
        self.now = 0.0
        self.queued = older

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += 1e-4  # what it takes to queue
        self.queued += 0.025

    def wait(self) -> None:
        self.now += self.queued
        self.queued = 0.0


@exercise
def check_seconds_of(seconds_of: Callable[..., Any]) -> str:
    """A stopwatch for work that is queued, with older work in the queue and without."""
    for older in (0.0, 0.1):
        device = _Device(older)
        with (
            mock.patch.object(time, "perf_counter", device.clock),
            mock.patch.object(time, "time", device.clock),
            mock.patch.object(time, "monotonic", device.clock),
        ):
            seconds = float(call(seconds_of, device.step, device.wait))
        milliseconds = 1e3 * seconds
        took = f"The step takes 25.1 ms, but your stopwatch returns {milliseconds:.1f} ms"
        need(
            seconds > 0.02,
            f"{took}. It stops before the device has finished.",
        )
        need(
            seconds < 0.05,
            f"{took}. The device was still busy with 100 ms of older work, and you timed this too.",
        )
        is_one_step = 0.0245 < seconds < 0.0255
        need(is_one_step, f"{took}. Call `step` once.")
        has_finished = device.queued == 0
        need(has_finished, "The device has not finished when you read the clock.")
    return "Your stopwatch returns 25.1 ms, even if the device was busy before."


@exercise
def check_paired(paired: Callable[..., Any]) -> str:
    """The mean difference of pairs, and its standard error."""
    seeds = torch.Generator().manual_seed(0)
    fp32 = 1 + 0.1 * torch.randn(20, generator=seeds)
    noise = 0.005 * torch.randn(20, generator=seeds)
    bf16 = fp32 + 0.02 + noise
    differences = bf16 - fp32
    mean = differences.mean().item()
    deviation = differences.std().item()
    error = deviation / math.sqrt(20)
    sum_of_variances = fp32.var().item() + bf16.var().item()
    unpaired_error = math.sqrt(sum_of_variances / 20)
    found = call(paired, fp32.clone(), bf16.clone())
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    need(
        is_pair,
        "Return two numbers: the mean difference and its standard error.",
    )
    mean_found = float(found[0])
    error_found = float(found[1])
    has_wrong_sign = math.isclose(mean_found, -mean, rel_tol=1e-4)
    need(
        not has_wrong_sign,
        "The mean difference has the wrong sign. It is positive if the loss is higher in bf16.",
    )
    has_right_mean = math.isclose(mean_found, mean, rel_tol=1e-4)
    need(
        has_right_mean,
        f"The mean difference is {mean:.4g}, but you returned {mean_found:.4g}.",
    )
    is_unpaired = math.isclose(error_found, unpaired_error, rel_tol=0.1)
    need(
        not is_unpaired,
        f"{error_found:.2g} is the standard error for two separate groups. It includes the "
        "differences between seeds. Compute the standard error from the differences of each "
        "seed.",
    )
    is_deviation = math.isclose(error_found, deviation, rel_tol=0.06)
    need(
        not is_deviation,
        f"{error_found:.2g} is the standard deviation of a single difference. The mean of "
        "twenty differences is more precise.",
    )
    has_right_error = math.isclose(error_found, error, rel_tol=0.06)
    need(
        has_right_error,
        f"{error_found:.2g} is not the standard error of the mean difference.",
    )
    return (
        f"The mean difference is {mean:.3f}, with a standard error of {error:.4f}. It is "
        f"clearly not zero, although the losses of the seeds differ by {fp32.std():.2f}."
    )


@exercise
def check_memory_share(share: float) -> str:
    """The share of FP32's memory that a step with AMP needs."""
    states = 100 * (4 + 4 + 8)  # MB
    activations = 400
    fp32_total = states + activations
    amp_total = states + activations / 2
    right = amp_total / fp32_total
    is_number = isinstance(share, int | float)
    need(is_number, f"A share is a number, but you gave {share!r}.")
    is_fraction = 0 < share < 1
    need(is_fraction, f"A share lies between 0 and 1, but you gave {share:g}.")
    is_half = abs(share - 0.5) <= 0.01
    need(
        not is_half,
        "Half would be right if autocast stored everything in 16 bits. What stays in fp32?",
    )
    error = abs(share - right)
    megabytes = share * fp32_total
    need(
        error < 0.005,
        f"With {share:g}, a step would need {megabytes:.0f} MB instead of {fp32_total} MB. Write "
        "down the four parts in both precisions. Only one of them changes.",
    )
    return "Only the activations become smaller, and they are a fifth of the memory here."
