"""What the comparison of two runs advises, done."""

import re

import pytest
import torch
from remedy_tests import does, says
from torch import nn

from amp_lab import first_difference
from amp_lab.errors import NumericsError

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


@does("diff.own_inputs")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cast", ["the second", "the first"])
def test_two_models_of_other_dtypes_with_inputs_of_their_own(dtype, cast):
    a = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    b = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    b.load_state_dict(a.state_dict())
    b.to(dtype)
    x = torch.randn(4, 6)
    if cast == "the first":
        a, b, x = b, a, x.to(dtype)
    with pytest.raises(NumericsError) as refused:
        first_difference(a, b, x)
    said = str(refused.value)
    assert says("diff.own_inputs", said)
    (call,) = re.findall(r"first_difference\(.*\)$", said)
    names = {"first_difference": first_difference, "a": a, "b": b, "x": x, "torch": torch}
    assert eval(call, names) is None


def test_an_error_of_another_kind_has_no_such_advice():
    a, b = nn.Linear(6, 3), nn.Linear(5, 3)
    with pytest.raises(NumericsError) as refused:
        first_difference(a, b, torch.randn(4, 6))
    assert not says("diff.own_inputs", str(refused.value))
