"""Each remedy of `xray --parallel`, done to the model that it was said of, in two processes."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import sharded_setups as s
import torch
import torch.distributed as dist
from rank_processes import values_of
from remedy_tests import does, says

from amp_lab import xray_sharding

pytestmark = pytest.mark.slow
BOTH_WAYS = (s.norm_in_a_unit_of_its_own, *([s.norm_by_override] if s.HAS_OVERRIDE else []))


class Case(NamedTuple):
    """A model that a remedy is said of, and models after what it says."""

    broken: Callable
    cured: tuple[Callable, ...]
    stays: bool = False  # whether it is said of the cured model too, since only forward changed


CASES = {
    "two_dtypes": Case(s.two_stored_dtypes_in_a_unit, (s.two_dtypes_in_units_of_their_own,)),
    "in_no_unit": Case(s.root_left_out, (s.first_in_a_unit_of_its_own,)),
    "no_master_weights": Case(s.policy_on_top_of_bf16, (s.fp32_under_a_policy,)),
    "upcast": Case(s.upcast_of_bf16, (s.fp32_stored_and_computed, s.bf16_without_param_dtype)),
    "low_norms": Case(s.norm_in_bf16, BOTH_WAYS),
    "low_sum.fsdp": Case(s.summed_in_bf16, (s.fp32_under_a_policy,)),
    "low_sum.ddp": Case(s.ddp_that_compresses, (s.plain_ddp,)),
    "buffers": Case(s.buffer_in_fp32, (s.buffer_that_forward_casts,), stays=True),
    "inputs_not_cast": Case(s.inputs_not_cast, (s.inputs_that_forward_casts,), stays=True),
}


def observe():
    """What is said of each model, and what hooks see in a step of it, or the error it raises."""
    dist.init_process_group("gloo")
    found = {}
    # In one order for both ranks.
    tried = [make for case in CASES.values() for make in (case.broken, *case.cured)]
    tried += [s.buffer_that_a_unit_casts, s.buffer_that_a_unit_leaves_in_fp32]
    for make in dict.fromkeys(tried):
        torch.manual_seed(0)
        model = make()
        advice = xray_sharding(model, torch.ones(2, 8)).advice
        try:
            seen = s.seen_by_hooks(model, None)
        except (AssertionError, RuntimeError) as error:
            seen = type(error).__name__
        found[make.__name__] = "\n".join(advice), seen, getattr(model, "met", None)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def observed():
    return values_of(observe, 2)[0]


@does(*(f"sharding.{code}" for code in CASES))
@pytest.mark.parametrize("code", CASES)
def test_done_as_it_says_there_is_no_more_to_say(observed, code):
    broken, cured, stays = CASES[code]
    assert says(f"sharding.{code}", observed[broken.__name__][0])
    for make in cured:
        advice, seen, _ = observed[make.__name__]
        assert isinstance(seen, dict), seen  # the step ran
        assert says(f"sharding.{code}", advice) == stays, advice


def test_the_steps_are_what_the_sentences_say(observed):
    """What hooks see of each mistake, and of its cure."""

    def seen(make: Callable) -> dict:
        return observed[make.__name__][1]

    assert seen(s.two_stored_dtypes_in_a_unit) == "AssertionError"
    assert seen(s.inputs_not_cast) == "RuntimeError"
    for make in BOTH_WAYS:
        assert seen(make)["computed"]["norm.weight"] is torch.float32
    assert {dtype for dtype, _ in seen(s.summed_in_bf16)["reduced"]} == {"torch.bfloat16"}
    assert {dtype for dtype, _ in seen(s.fp32_under_a_policy)["reduced"]} == {"torch.float32"}
    assert observed[s.buffer_in_fp32.__name__][2] is torch.float32
    assert observed[s.buffer_that_forward_casts.__name__][2] is torch.bfloat16
    assert observed[s.buffer_that_a_unit_casts.__name__][2] is torch.bfloat16
    assert observed[s.buffer_that_a_unit_leaves_in_fp32.__name__][2] is torch.float32


def test_a_convolution_with_a_buffer_in_fp32_raises():
    """So the remedy for buffers says, and that a cast in forward helps."""
    x, kernel = torch.ones(1, 1, 4, 4, dtype=torch.bfloat16), torch.ones(1, 1, 2, 2)
    with pytest.raises(RuntimeError):  # in other words on other CPUs
        torch.nn.functional.conv2d(x, kernel)
    assert torch.nn.functional.conv2d(x, kernel.to(x.dtype)).dtype is torch.bfloat16
    assert (x * kernel[0, 0, 0, 0].expand(4, 4)).dtype is torch.float32
