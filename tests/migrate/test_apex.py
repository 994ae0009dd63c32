"""Apex: the certain is rewritten and gives the same; the rest is marked with what to do, once."""

import sys
import types

import pytest
import torch

from amp_lab.migrate import migrate_source
from amp_lab.migrate.apex import MARK

SCRIPT = """\
import torch
from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP

model, optimizer = amp.initialize(model, FusedAdam(model.parameters()), opt_level="O1")
model = DDP(model)
for x in loader:
    with amp.scale_loss(model(x), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
torch.save({"amp": amp.state_dict()}, "a.pt")
"""


def test_a_script_keeps_its_lines_and_gets_marks_above_them():
    new, findings = migrate_source(SCRIPT)
    lines = new.splitlines()
    rest = [line for line in lines if not line.lstrip().startswith(MARK)]
    old = SCRIPT.splitlines()
    changed = [i + 1 for i, (a, b) in enumerate(zip(old, rest, strict=True)) if a != b]
    assert changed == [3, 6]  # FusedAdam
    assert [f.line for f in findings if f.kind == "by hand"] == [6, 7, 9, 11, 13]
    for call in ("amp.initialize", "DDP(model)", "amp.scale_loss", "amp.state_dict"):
        at = next(i for i, line in enumerate(lines) if call in line and MARK not in line)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        assert lines[at - 1].startswith(indent + MARK)


def test_a_second_time_changes_nothing():
    new, findings = migrate_source(SCRIPT)
    again, still = migrate_source(new)
    assert again == new
    assert {f.message for f in still} == {f.message for f in findings if f.kind == "by hand"}


@pytest.mark.parametrize(
    ("level", "said"),
    [("O0", "plain float32"), ("O1", "torch.autocast"), ("O2", "master"), ("O3", "model.half()")],
)
def test_each_level_is_told_what_replaces_it(level, said):
    code = f'from apex import amp\nm, o = amp.initialize(m, [o], opt_level="{level}")\n'
    (finding,) = migrate_source(code)[1]
    assert finding.line == 2
    assert said in finding.message


@pytest.fixture
def apex(monkeypatch):
    """A stand-in for Apex, with the definitions of its sources, in float32 on the CPU."""

    class FusedAdam(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
            settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            super().__init__(params, settings)

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for p in group["params"]:
                    kept = self.state[p]
                    b1, b2 = group["betas"]
                    kept["m"] = b1 * kept.get("m", 0) + (1 - b1) * p.grad
                    kept["v"] = b2 * kept.get("v", 0) + (1 - b2) * p.grad**2
                    m = kept["m"] / (1 - b1 ** group["step"])
                    v = kept["v"] / (1 - b2 ** group["step"])
                    p -= group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p)

    def master_params(optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]

    parts = {
        "apex.amp": {"master_params": master_params},
        "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.normalization": {"FusedLayerNorm": torch.nn.LayerNorm},
        "apex.parallel": {
            "convert_syncbn_model": torch.nn.SyncBatchNorm.convert_sync_batchnorm,
        },
    }
    package = types.ModuleType("apex")
    monkeypatch.setitem(sys.modules, "apex", package)
    for name, holds in parts.items():
        module = types.ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)
        setattr(package, name.partition(".")[2], module)


TRAIN = """
torch.manual_seed(0)
layer = torch.nn.Linear(3, 2)
optimizer = {made}
for _ in range(5):
    optimizer.zero_grad()
    layer(torch.ones(4, 3)).pow(2).mean().backward()
    optimizer.step()
result = [layer.weight.detach()]
"""
CERTAIN = {
    "FusedAdam, imported": "import torch\nfrom apex.optimizers import FusedAdam\n"
    + TRAIN.format(made="FusedAdam(layer.parameters(), 0.1)"),
    "FusedAdam with decay": "import torch\nfrom apex.optimizers import FusedAdam as Adam\n"
    + TRAIN.format(made="Adam(layer.parameters(), lr=0.1, weight_decay=0.1, eps=1e-6)"),
    "FusedAdam by its whole name": "import torch\nimport apex\n"
    + TRAIN.format(made="apex.optimizers.FusedAdam(layer.parameters(), betas=(0.8, 0.9))"),
    "FusedSGD": "import torch\nfrom apex import optimizers\n"
    + TRAIN.format(made="optimizers.FusedSGD(layer.parameters(), 0.1, momentum=0.9)"),
    "FusedLayerNorm": "import torch\nfrom apex.normalization import FusedLayerNorm\n"
    "result = [FusedLayerNorm(4, eps=1e-3)(torch.arange(4.0))]\n",
    "master_params": "import torch\nfrom apex import amp\n"
    "optimizer = torch.optim.SGD([{'params': [torch.ones(2)]}, {'params': [torch.zeros(3)]}])\n"
    "result = list(amp.master_params(optimizer))\n",
    "convert_syncbn_model": "import torch\nfrom apex.parallel import convert_syncbn_model\n"
    "model = convert_syncbn_model(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))\n"
    "result = [torch.tensor(isinstance(model[0], torch.nn.SyncBatchNorm))]\n",
}


@pytest.mark.parametrize("title", CERTAIN)
def test_what_is_certain_gives_the_same_without_apex(apex, monkeypatch, title):
    before: dict = {}
    exec(CERTAIN[title], before)
    new, findings = migrate_source(CERTAIN[title])
    assert [f.kind for f in findings if f.line > 2] == ["rewritten"]
    for name in [name for name in sys.modules if name.startswith("apex.")]:
        for attribute in [a for a in vars(sys.modules[name]) if not a.startswith("__")]:
            monkeypatch.delattr(sys.modules[name], attribute)
    after: dict = {}
    exec(new, after)
    torch.testing.assert_close(after["result"], before["result"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "made",
    [
        "FusedAdam(layer.parameters(), adam_w_mode=False)",
        "FusedAdam(layer.parameters(), 0.1, True)",
        "FusedAdam(*arguments)",
        "FusedAdam",
    ],
)
def test_other_arguments_are_marked(made):
    code = f"import torch\nfrom apex.optimizers import FusedAdam\noptimizer = {made}\n"
    new, findings = migrate_source(code)
    assert [(f.line, f.kind) for f in findings] == [(3, "by hand")]
    assert f"{MARK}write torch.optim.AdamW" in new
    assert f"\noptimizer = {made}\n" in new


def test_a_name_that_is_taken_is_not_imported_again():
    code = (
        "import torch\nfrom torch.optim import AdamW\nfrom apex.optimizers import FusedAdam\n"
        "a, b = AdamW(p), FusedAdam(p)\n"
    )
    assert (
        "b = AdamW(p), torch.optim.AdamW(p, weight_decay=0.0, fused=True)"
        in migrate_source(code)[0]
    )


def test_other_things_named_apex_or_amp_stay():
    code = "from mine.apex import amp\nimport apexlib\namp.initialize(apexlib.x)\n"
    assert migrate_source(code) == (code, [])


def test_an_import_that_only_asks_whether_apex_is_there_is_marked_with_its_try():
    code = "try:\n    from apex import amp\n    has_apex = True\nexcept ImportError:\n    pass\n"
    new, (finding,) = migrate_source(code)
    assert finding[:2] == (2, "by hand")
    assert "delete it and the try around it" in finding.message
    assert new.replace(f"    {MARK}{finding.message}\n", "") == code


def test_a_comment_among_the_arguments_stays():
    old = "from apex import amp\nfor p in amp.master_params(\n    optimizer  # both\n):\n    pass\n"
    new, findings = migrate_source(old)
    assert [line for line in new.splitlines() if MARK not in line] == old.splitlines()
    assert [f.kind for f in findings] == ["by hand"]
