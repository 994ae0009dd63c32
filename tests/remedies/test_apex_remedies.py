"""What migrate says of each name of Apex: a program that follows it runs, and does what Apex did.

What Apex did is from its sources, as in the module that rewrites it.
"""

import re
import sys
from typing import NamedTuple

import pytest
import torch
from remedy_tests import does, says
from torch import nn

from amp_lab.migrate import migrate_source
from amp_lab.migrate.rules.apex.names import ADVICE

HEAD = """
import torch
from torch import nn

model = nn.Linear(2, 2)
nn.init.ones_(model.weight)
x = torch.ones(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    output = model(x)
    loss = output.float().mean()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
assert output.dtype is torch.float16
assert model.weight.dtype is torch.float32
assert 0 < norm < 2  # of gradients that are not scaled
assert bool((model.weight < 1).all())
"""
FLOAT_REGION = """
def in_float(x):
    with torch.autocast("cpu", enabled=False):
        return model(x.float())

with torch.autocast("cpu", torch.bfloat16):
    assert model(x).dtype is torch.bfloat16
    assert in_float(model(x)).dtype is torch.float32
"""
MATMULS_ARE_CAST = """
with torch.autocast("cpu", torch.float16):
    assert (x @ x.T).dtype is torch.float16
"""
PROMOTES = """
with torch.autocast("cpu", torch.bfloat16):
    assert (model(x) + x[:, :2]).dtype is torch.float32
    assert torch.cat([model(x), x]).dtype is torch.float32
"""
RMS_NORM = """
norm = torch.nn.RMSNorm(2, eps=1e-5)
assert norm.eps == 1e-5  # where torch's own depends on the dtype
assert norm(x).shape == x.shape
"""
ADAMW = """
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
assert optimizer.param_groups[0]["weight_decay"] == 0
plain = torch.optim.Adam(model.parameters())
assert plain.param_groups[0]["weight_decay"] == 0
for each in (optimizer, plain):
    model(x).sum().backward()
    each.step()
assert bool((model.weight < 1).all())
"""


class Case(NamedTuple):
    fragments: tuple[str, ...]  # of the advice, which stand in the program
    program: str


CASES = {
    "apex.amp.initialize": Case(
        ('torch.autocast("cuda", dtype=torch.float16)', 'scaler = torch.amp.GradScaler("cuda")'),
        LOOP,
    ),
    "apex.amp.scale_loss": Case(
        (
            "scaler.scale(loss).backward()",
            "scaler.step(optimizer)",
            "scaler.update()",
            "scaler.unscale_(optimizer)",
        ),
        LOOP,
    ),
    "apex.amp.init": Case(('torch.autocast("cuda", dtype=torch.float16)',), LOOP),
    "apex.amp": Case(("GradScaler",), f"{LOOP}\nassert scaler.state_dict()  # the scaler\n"),
    "apex.amp.master_params": Case(
        ('(p for group in optimizer.param_groups for p in group["params"])',),
        'found = [*(p for group in optimizer.param_groups for p in group["params"])]\n'
        "assert len(found) == 2\n"
        "assert all(a is b for a, b in zip(found, model.parameters()))\n",
    ),
    "apex.amp.state_dict": Case(
        ("scaler.state_dict()",),
        f"{LOOP}\nsaved = scaler.state_dict()\nassert saved['scale'] == 65536\n",
    ),
    "apex.amp.load_state_dict": Case(
        ("scaler.load_state_dict(", '"loss_scale"', '"loss_scaler0"', '"_growth_tracker"'),
        """
theirs = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}
scaler = torch.amp.GradScaler("cpu")
ours = scaler.state_dict()
ours["scale"] = theirs["loss_scaler0"]["loss_scale"]
ours["_growth_tracker"] = theirs["loss_scaler0"]["unskipped"]
scaler.load_state_dict(ours)
assert scaler.get_scale() == 1024
assert scaler.state_dict()["_growth_tracker"] == 7
""",
    ),
    "apex.amp.disable_casts": Case(('torch.autocast("cuda", enabled=False)',), FLOAT_REGION),
    "apex.amp.float_function": Case(("x.float()",), FLOAT_REGION),
    "apex.amp.register_float_function": Case(("x.float()",), FLOAT_REGION),
    "apex.amp.half_function": Case(("float16",), MATMULS_ARE_CAST),
    "apex.amp.register_half_function": Case(("float16",), MATMULS_ARE_CAST),
    "apex.amp.promote_function": Case((), PROMOTES),
    "apex.amp.register_promote_function": Case((), PROMOTES),
    "apex.optimizers.FusedAdam": Case(
        ("weight_decay=0.0, fused=True)", "torch.optim.Adam", "torch.optim.AdamW("), ADAMW
    ),
    "apex.optimizers.FusedSGD": Case(
        ("torch.optim.SGD(", "fused=True)"),
        "torch.optim.SGD(model.parameters(), lr=0.1, fused=True)\n",
    ),
    "apex.optimizers.FusedAdagrad": Case(
        ("torch.optim.Adagrad",), "torch.optim.Adagrad(model.parameters(), lr=0.1)\n"
    ),
    "apex.optimizers": Case(("torch.optim.AdamW",), "torch.optim.AdamW(model.parameters())\n"),
    "apex.optimizers.FP16_Optimizer": Case((), LOOP),
    "apex.contrib.optimizers.FP16_Optimizer": Case((), LOOP),
    "apex.fp16_utils": Case((), LOOP),
    "apex.normalization": Case(("torch.nn.LayerNorm",), "torch.nn.LayerNorm(2)(x)\n"),
    "apex.normalization.FusedLayerNorm": Case(
        ("torch.nn.LayerNorm",), "torch.nn.LayerNorm(2)(x)\n"
    ),
    "apex.contrib.layer_norm": Case(("torch.nn.LayerNorm",), "torch.nn.LayerNorm(2)(x)\n"),
    "apex.normalization.FusedRMSNorm": Case(("torch.nn.RMSNorm(", "eps=1e-5)"), RMS_NORM),
    "apex.normalization.MixedFusedRMSNorm": Case(("torch.nn.RMSNorm(", "eps=1e-5)"), RMS_NORM),
    "apex.contrib.group_norm": Case(
        ("torch.nn.GroupNorm",),
        "net = nn.Sequential(torch.nn.GroupNorm(1, 2), nn.SiLU())\n"
        "assert net(x).shape == x.shape\n",
    ),
    "apex.contrib.xentropy": Case(
        (
            "torch.nn.functional.cross_entropy(",
            'ignore_index=0, reduction="none")',
            "label_smoothing=",
        ),
        """
labels = torch.tensor([0, 1, 1, 0])
losses = torch.nn.functional.cross_entropy(
    x, labels, label_smoothing=0.0, ignore_index=0, reduction="none")
assert losses.shape == labels.shape
assert losses[0] == losses[3] == 0  # padding
assert bool((losses[1:3] > 0).all())
""",
    ),
    "apex.contrib.clip_grad.clip_grad_norm_": Case(
        ("torch.nn.utils.clip_grad_norm_",),
        "model(x).sum().backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "assert model.weight.grad.norm() <= 1.001\n",
    ),
    "apex.parallel.convert_syncbn_model": Case(
        ("torch.nn.SyncBatchNorm.convert_sync_batchnorm",),
        "net = nn.Sequential(nn.BatchNorm1d(2))\n"
        "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)\n"
        "assert isinstance(net[0], nn.SyncBatchNorm)\n",
    ),
    "apex.parallel.SyncBatchNorm": Case(
        ("torch.nn.SyncBatchNorm",), "torch.nn.SyncBatchNorm(2).eval()(x)\n"
    ),
    "apex.parallel.DistributedDataParallel": Case(
        ("torch.nn.parallel.DistributedDataParallel(model, ", "find_unused_parameters=True"),
        """
import inspect
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    shared = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    shared(x).sum().backward()
finally:
    dist.destroy_process_group()
assert model.weight.grad is not None
assert "device_ids" in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
""",
    ),
    "apex.contrib.optimizers.DistributedFusedAdam": Case(
        ("torch.distributed.fsdp.fully_shard", "ZeroRedundancyOptimizer"),
        "import torch.distributed.fsdp, torch.distributed.optim\n"
        "assert callable(torch.distributed.fsdp.fully_shard)\n"
        "assert callable(torch.distributed.optim.ZeroRedundancyOptimizer)\n",
    ),
    "apex.mlp": Case(
        ("torch.nn.Sequential", "torch.compile"),
        "net = torch.nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))\n"
        "assert callable(torch.compile(net))\nassert net(x).shape == (4, 1)\n",
    ),
    "apex.multi_tensor_apply": Case(
        ("clip_grad_norm_",),
        "model(x).sum().backward()\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)\n"
        "torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step()\n",
    ),
    "apex.pyprof": Case(
        ("torch.profiler", "torch.autograd.profiler.emit_nvtx"),
        "assert callable(torch.profiler.profile)\n"
        "assert callable(torch.autograd.profiler.emit_nvtx)\n",
    ),
}
NO_EQUAL = {  # a name of Apex for each, whose last part is nowhere in torch
    "apex.parallel": "apex.parallel.LARC",
    "apex.contrib": "apex.contrib.bottleneck.Bottleneck",
    "apex.transformer": "apex.transformer.parallel_state",
    "apex": "apex.reparameterization",
}


def test_each_advice_has_a_case():
    assert {*CASES, *NO_EQUAL} == set(ADVICE)


@does(*(f"migrate.{name}" for name in CASES))
@pytest.mark.parametrize("name", CASES)
def test_a_program_that_follows_the_advice_runs(name):
    case = CASES[name]
    for fragment in case.fragments:
        assert fragment in ADVICE[name].text
        assert fragment.replace('"cuda"', '"cpu"') in case.program
    exec(compile(HEAD + case.program, name, "exec"), {})


@does(*(f"migrate.{name}" for name in NO_EQUAL))
@pytest.mark.parametrize("name", NO_EQUAL)
def test_what_has_no_equal_is_nowhere_in_torch(name):
    last = NO_EQUAL[name].rpartition(".")[2]
    assert "torch has no equivalent" in ADVICE[name].text
    assert not any(hasattr(home, last) for home in (torch, nn, torch.optim, nn.parallel))


@pytest.mark.parametrize("name", ADVICE)
def test_migrate_says_it_of_the_name(name):
    used = NO_EQUAL.get(name, name)
    findings = migrate_source(f"import apex\nresult = [{used}]\n")[1]
    assert any(says(f"migrate.{name}", finding.message) for finding in findings), findings


@does("migrate.apex_unused")
def test_an_import_that_is_left_over_is_deleted(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)  # as where it is not installed
    wrong = HEAD + "from apex import amp\n"
    (finding,) = migrate_source(wrong)[1]
    assert says("migrate.apex_unused", finding.message)
    assert "delete the import" in finding.message
    with pytest.raises(ImportError):
        exec(wrong, {})
    right = wrong.replace("from apex import amp\n", "")
    assert migrate_source(right)[1] == []
    exec(right, {})


def test_every_name_of_torch_in_the_advice_is_there():
    import torch.distributed.fsdp

    for advice in ADVICE.values():
        for name in re.findall(r"\btorch(?:\.[A-Za-z_]\w*)+", advice.text):
            found: object = torch
            for part in name.split(".")[1:]:
                found = getattr(found, part)
