"""What the tools that trace, compare or watch a model refuse, and the advice in the error."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from amp_lab import first_difference, xray, xray_sharding
from amp_lab.core.errors import AmpLabError
from amp_lab.numerics import find_nonfinite
from amp_lab.tracing.sharded_step import group_of

X = torch.empty(2, 4)


def layer():
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: xray_sharding(layer(), X), "Linear is neither sharded nor in DDP: give parallel="),
        (lambda: xray(nn.DataParallel(layer()), X), "DataParallel wraps the model: give its .modu"),
        (lambda: xray(layer(), X).by_module(0), "depth 0: give an integer of at least 1, or None"),
        (lambda: first_difference([], layer(), X), "a model or a function, not a list"),
        (lambda: find_nonfinite([layer()]), "the model must be an nn.Module, not list"),
        (lambda: find_nonfinite(layer()).__exit__(None, None, None), "called without __enter__"),
    ],
)
def test_what_is_no_model_or_no_setting_is_refused_with_advice(call, said):
    with pytest.raises(AmpLabError, match=re.escape(said)):
        call()
    assert xray_sharding(layer(), X, parallel="fsdp")
    assert xray(layer(), X).by_module(1)
    assert xray(nn.DataParallel(layer()).module, X)


@pytest.mark.filterwarnings("ignore")  # FSDP1 has nothing to shard in one process
def test_fsdp1_and_the_mixed_precision_of_ddp_are_refused():
    with group_of(1):
        old = FullyShardedDataParallel(layer(), device_id=torch.device("cpu"))
        with pytest.raises(AmpLabError, match=r"FSDP1.* shard the model with fully_shard"):
            xray_sharding(old, X)
        ddp = DistributedDataParallel(layer())
        assert xray_sharding(ddp, X)
        ddp.mixed_precision = "of DDP"  # as its argument of this name, which needs a GPU
        with pytest.raises(AmpLabError, match="use autocast instead"):
            xray_sharding(ddp, X)
