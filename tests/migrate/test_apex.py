"""Apex: the certain is rewritten and gives the same; the rest is marked with what to do, once."""

import sys
import types

import pytest
import torch
from remedy_tests import says

import build_pairs
from amp_lab.cli import main
from amp_lab.migrate import migrate_source
from amp_lab.migrate.rules.apex import MARK
from amp_lab.migrate.rules.apex.names import SECTIONS

SCRIPT = """\
import torch
from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP

model, optimizer = amp.initialize(model, FusedAdam(model.parameters()), opt_level="O1")
model = DDP(model, delay_allreduce=True)
for x in loader:
    with amp.scale_loss(model(x), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
torch.save({"amp": amp.state_dict()}, "a.pt")
"""


def test_a_script_keeps_its_lines_and_gets_marks_above_them_if_they_are_asked_for():
    new, findings = migrate_source(SCRIPT, mark=True)
    lines = new.splitlines()
    rest = [line for line in lines if not line.lstrip().startswith(MARK)]
    old = SCRIPT.splitlines()
    changed = [i + 1 for i, (a, b) in enumerate(zip(old, rest, strict=True)) if a != b]
    assert changed == [3, 6]  # FusedAdam
    assert [f.line for f in findings if f.kind == "by hand"] == [6, 7, 9, 11, 13]
    for call in ("amp.initialize", "DDP(model, ", "amp.scale_loss", "amp.state_dict"):
        at = next(i for i, line in enumerate(lines) if call in line and MARK not in line)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        assert lines[at - 1].startswith(indent + MARK)


def test_without_marks_only_what_is_certain_changes():
    old, (new, findings) = SCRIPT.splitlines(), migrate_source(SCRIPT)
    changed = [i + 1 for i, (a, b) in enumerate(zip(old, new.splitlines(), strict=True)) if a != b]
    assert changed == [3, 6]
    assert findings == migrate_source(SCRIPT, mark=True)[1]


def test_a_second_time_changes_nothing():
    new, findings = migrate_source(SCRIPT, mark=True)
    again, still = migrate_source(new, mark=True)
    assert again == new
    assert {f.message for f in still} == {f.message for f in findings if f.kind == "by hand"}


@pytest.mark.parametrize("level", ['"O0"', '"O1"', "args.level"])
def test_what_replaces_each_level_is_told_in_one_sentence(level):
    code = f"from apex import amp\nm, o = amp.initialize(m, [o], opt_level={level})\n"
    (finding,) = migrate_source(code)[1]
    assert finding.line == 2
    assert says("migrate.apex.amp.initialize", finding.message)


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

    parts = {
        "apex.optimizers": {
            "FusedAdam": FusedAdam,
            "FusedSGD": torch.optim.SGD,
            "FusedAdagrad": torch.optim.Adagrad,
        },
        "apex.normalization": {"FusedLayerNorm": torch.nn.LayerNorm},
        "apex.parallel": {
            "convert_syncbn_model": torch.nn.SyncBatchNorm.convert_sync_batchnorm,
            "SyncBatchNorm": torch.nn.SyncBatchNorm,
            "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        },
        "apex.contrib.clip_grad": {"clip_grad_norm_": torch.nn.utils.clip_grad_norm_},
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
    "FusedAdagrad": "import torch\nfrom apex.optimizers import FusedAdagrad\n"
    + TRAIN.format(made="FusedAdagrad(layer.parameters(), 0.1, weight_decay=0.1)"),
    "SyncBatchNorm": "import torch\nfrom apex.parallel import SyncBatchNorm as Norm\n"
    "result = [torch.tensor(Norm(3, eps=1e-3).eps)]\n",
    "clip_grad_norm_": "import torch\nfrom apex.contrib.clip_grad import clip_grad_norm_\n"
    "p = torch.ones(2, requires_grad=True)\np.sum().backward()\n"
    "result = [clip_grad_norm_([p], max_norm=1.0), p.grad]\n",
    "DistributedDataParallel": "import torch\n"
    "from apex.parallel import DistributedDataParallel as DDP\n"
    "store = torch.distributed.HashStore()\n"
    "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
    "layer = DDP(torch.nn.Linear(2, 1))\nlayer(torch.ones(2)).backward()\n"
    "torch.distributed.destroy_process_group()\nresult = [layer.module.weight.grad]\n",
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
    new, findings = migrate_source(code, mark=True)
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


def test_an_import_that_only_asks_whether_apex_is_there_stays_as_it_is():
    code = "try:\n    from apex import amp\n    has_apex = True\nexcept ImportError:\n    pass\n"
    assert migrate_source(code) == (code, [])


def test_a_comment_among_the_arguments_stays():
    old = "from apex import amp\nfor p in amp.master_params(\n    optimizer  # both\n):\n    pass\n"
    new, findings = migrate_source(old, mark=True)
    assert [line for line in new.splitlines() if MARK not in line] == old.splitlines()
    assert [f.kind for f in findings] == ["by hand"]


# A training loop stays as it is: what becomes of it depends on more than one line shows.

LOOP = """\
import torch
from apex import amp
model, optimizer = make()
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x, y in batches:
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
LOOPS = {  # what is replaced in it, and by what
    "as it is": ("", ""),
    "O2": ('"O1"', '"O2"'),
    "O3": ('"O1"', '"O3"'),
    "a level that is no literal": ('"O1"', "level"),
    "a scale that stays": ('"O1"', '"O1", loss_scale=128.0'),
    "another cast": ('"O1"', '"O1", patch_torch_functions=False'),
    "several losses": ('"O1"', '"O1", num_losses=2'),
    "arguments as a mapping": ('opt_level="O1"', "**options"),
    "two models": ("initialize(model,", "initialize([model, other],"),
    "another name": ("model, optimizer = amp", "net, optimizer = amp"),
    "a loss of several": ("optimizer) as", "optimizer, loss_id=0) as"),
    "a list": ("(loss, optimizer)", "(loss, [optimizer])"),
    "a loss in the call": ("loss, optimizer) as", "criterion(model(x), y), optimizer) as"),
    "more in the block": (
        "    optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()",
    ),
    "the scaled loss is used": ("optimizer.step()", "optimizer.step(), scaled_loss"),
    "a closure": ("optimizer.step()", "optimizer.step(closure)"),
    "two steps": ("optimizer.step()", "optimizer.step(); optimizer.step()"),
    "no step": ("optimizer.step()", "pass"),
    "a step in each case": ("    optimizer.step()", "optimizer.step()"),
    "a step on the line of an if": ("optimizer.step()", "if x: optimizer.step()"),
    "clipped each time, stepped sometimes": (
        "    optimizer.step()",
        "    clip_grad_norm_(model.parameters(), 1.0)\n    if y:\n        optimizer.step()",
    ),
    "clipped where it does not step": (
        "    optimizer.step()",
        "    if y:\n        clip_grad_norm_(model.parameters(), 1.0)\n    else:\n"
        "        optimizer.step()\n        optimizer.zero_grad()",
    ),
    "another loss": ("optimizer.step()", "optimizer.step(), other.backward()"),
    "scaler is taken": ("import torch\n", "import torch\nscaler = Scaler()\n"),
    "torch is something else": ("import torch\n", "torch = 3\n"),
    "autocast too": ("= make()", "= make(torch.autocast)"),
    "half": ("= make()", "= make().half()"),
    "a loop around": ("model, optimizer = amp", "for _ in x:\n    model, optimizer = amp"),
    "a condition": ("model, optimizer = amp", "if fp16:\n    model, optimizer = amp"),
    "the forward pass is elsewhere": ("model(x), y", "forward(x), y"),
    "the loss is elsewhere": ("loss = criterion", "other = criterion"),
    "a forward pass that yields": ("model(x), y", "model(x), (yield y)"),
    "a forward pass of Apex": ("model(x), y", "model(amp.y(x)), y"),
    "a pass without gradients, whose casts would be kept": (
        "    loss =",
        "    with torch.no_grad():\n        model(y)\n    loss =",
    ),
    "the model by another name": (
        "for x, y in batches:\n    loss = criterion(model(x), y)",
        "net = parallel(model)\nfor x, y in batches:\n    out = net(x)\n"
        "    loss = criterion(out, model.weight)",
    ),
    "the model in a function": (
        "for x, y in batches:\n    loss = criterion(model(x), y)",
        "def encode(x): return model.encode(x)\nfor x, y in batches:\n    z = encode(x)\n"
        "    loss = model.decode(z)",
    ),
    "the model again": (
        "    optimizer.zero_grad()",
        "    after = model(x)\n    optimizer.zero_grad()",
    ),
    "gradients that stay": ("    optimizer.zero_grad()\n", ""),
    "set to zero more often than it steps": (
        "    optimizer.step()",
        "    if y:\n        optimizer.step()",
    ),
    "its state before it": (
        "model, optimizer = amp",
        "state = amp.state_dict()\nmodel, optimizer = amp",
    ),
    "clipped, and then passed over": (
        "    optimizer.step()",
        "    clip_grad_norm_(model.parameters(), 1.0)\n    if y: continue\n    optimizer.step()",
    ),
    "a third argument": ("(loss, optimizer)", "(loss, optimizer, 0)"),
    "an argument that is a list": ('"O1"', '["O1"]'),
    "a statement after backward, and a block": (
        "    optimizer.step()",
        "        if y:\n            pass\n    optimizer.step()",
    ),
    "gradients by themselves": (
        "optimizer.step()",
        "optimizer.step(), torch.autograd.grad(loss, x)",
    ),
    "more of Apex, by a star": (
        "from apex import amp",
        "from apex import amp\nfrom apex.fp16_utils import *",
    ),
    "Apex may be missing": (
        "from apex import amp",
        "try:\n    from apex import amp\nexcept ImportError:\n    amp = None",
    ),
    "an import that is all of a block": (
        "from apex import amp",
        "if True:\n    from apex import amp",
    ),
    "O0, and its state": ('opt_level="O1")', 'opt_level="O0")\nstate = amp.state_dict()'),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_each_line_of_a_loop_is_marked_and_none_is_changed(kind):
    old = LOOP.replace(*LOOPS[kind], 1)
    assert (old != LOOP) == (kind != "as it is")
    compile(old.replace("(yield y)", "y"), kind, "exec")
    assert migrate_source(old)[0] == old
    new, findings = migrate_source(old, mark=True)
    assert [line for line in new.splitlines() if MARK not in line] == old.splitlines()
    assert {f.kind for f in findings} == {"by hand"}
    lines = old.splitlines()
    told = {f.line for f in findings}
    assert told >= {i for i, line in enumerate(lines, 1) if "= amp.i" in line or "scale_l" in line}
    assert migrate_source(new, mark=True)[0] == new


def advice(old: str, name: str) -> str:
    """What is said of the line in which a name stands."""
    line = next(i for i, text in enumerate(old.splitlines(), 1) if name in text)
    (found,) = (f.message for f in migrate_source(old)[1] if f.line == line)
    return found


def test_a_loss_is_told_its_whole_replacement_in_one_sentence():
    expected = (
        "write scaler.scale(loss).backward(); for optimizer.step() write scaler.step(optimizer), "
        "then scaler.update() once; call scaler.unscale_(optimizer) before clipping; "
        "at O0 and O3 write loss.backward() alone"
    )
    where = ' (notebook 13, "The loop, line by line")'
    assert advice(LOOP, "scale_loss") == expected + where
    assert f"    {MARK}{expected}\n    with amp" in migrate_source(LOOP, mark=True)[0]


def test_parameters_are_told_with_what_comes_before():
    said = advice(LOOP + "clip(amp.master_params(self.opt))\n", "master_params")
    assert says("migrate.apex.amp.master_params", said)


def test_a_loss_over_two_lines_is_marked_in_one():
    old = LOOP.replace("(loss, optimizer)", "(loss +\n        other, optimizer, loss_id=0)")
    new, findings = migrate_source(old, mark=True)
    assert "write scaler.scale(loss).backward()" in new
    compile(new, "marked", "exec")
    assert migrate_source(new, mark=True)[0] == new
    assert {f.kind for f in findings} == {"by hand"}


def test_an_import_that_a_rewritten_use_leaves_behind_is_taken_out():
    old = LOOP.replace("import amp", "import amp, optimizers").replace(
        "= make()", "= make(), optimizers.FusedAdam(weights)"
    )
    new, _ = migrate_source(old)
    assert new == LOOP.replace(
        "make()", "make(), torch.optim.AdamW(weights, weight_decay=0.0, fused=True)"
    )
    assert migrate_source(new)[0] == new


BESIDE = {  # an import of Apex, with what becomes of it, of its lines and of the use below it
    "import apex\n": "",
    "import apex, os\n": "import os\n",
    "import apex  # fused\nimport os\n": "import os\n",
    "import apex.parallel as parallel, apex\n": "import apex.parallel as parallel\n",
    "if True:\n    import apex\n": "if True:\n    pass\n",
    "import os; import apex\n": "import os; pass\n",
    "try:\n    import apex\nexcept ImportError:\n    raise\n": None,
}


@pytest.mark.parametrize("head", BESIDE)
def test_an_import_of_apex_that_nothing_uses_any_more_is_taken_out(head):
    use = "optimizer = apex.optimizers.FusedSGD(weights, 0.1)\n"
    new, _ = migrate_source(f"import torch\n{head}{use}")
    rest = head if BESIDE[head] is None else BESIDE[head]
    assert new == f"import torch\n{rest}optimizer = torch.optim.SGD(weights, 0.1, fused=True)\n"
    assert migrate_source(new)[0] == new


def test_names_of_several_modules_of_torch_go_by_their_whole_names():
    old = (
        "import torch\nfrom apex.parallel import DistributedDataParallel as DDP, "
        "convert_syncbn_model\nmodel = DDP(convert_syncbn_model(model))\n"
    )
    convert = "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    wrap = f"torch.nn.parallel.DistributedDataParallel({convert})"
    assert migrate_source(old)[0] == f"import torch\nmodel = {wrap}\n"


DDP = "from apex.parallel import DistributedDataParallel as DDP\n"
MADE = "net = DDP(net)\n"
ASKED = "if isinstance(net, (DDP, Other)): net = net.module\n"


def test_a_check_of_the_type_goes_with_what_is_made():
    head = "import torch\n" + DDP
    new = migrate_source(head + MADE + ASKED)[0]
    assert new == head.replace("apex.parallel", "torch.nn.parallel") + MADE + ASKED
    for rest in (ASKED, MADE.replace("(net)", "(net, delay_allreduce=True)") + MADE + ASKED):
        same, findings = migrate_source(head + rest)
        assert same == head + rest
        assert {f.kind for f in findings} == {"by hand"}


CHOICES = [  # as timm, transformers and fairseq have them
    "try:\n    from apex.optimizers import FusedAdam\n    has_apex = True\n"
    "except ImportError:\n    has_apex = False\nif has_apex:\n    o = FusedAdam(p)\n"
    "else:\n    o = torch.optim.AdamW(p)\n",
    "try:\n    from apex.normalization import FusedLayerNorm as LayerNorm\n"
    "except ImportError:\n    from torch.nn import LayerNorm\nlayer = LayerNorm(4)\n",
    "if is_apex_available():\n    from apex import amp\n    amp.initialize(m, o)\n",
    "try:\n    import apex\nexcept ImportError:\n    apex = None\n"
    "o = apex.optimizers.FusedSGD(p, 0.1) if apex is not None else torch.optim.SGD(p, 0.1)\n",
    "try:\n    from apex import amp\n    APEX_AVAILABLE = True\nexcept ModuleNotFoundError:\n"
    "    APEX_AVAILABLE = False\nif args.fp16 and APEX_AVAILABLE:\n    amp.initialize(m, o)\n",
    "try:\n    from apex.parallel import convert_syncbn_model\n    m = convert_syncbn_model(m)\n"
    "except ImportError:\n    m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_for_where_apex_is_installed_stays_whole(choice):
    old = f"import torch\n{choice}"
    for mark in (False, True):
        new, findings = migrate_source(old, mark=mark)
        assert new == old
        assert {f.kind for f in findings} == {"left"}


@pytest.mark.parametrize(
    "made",
    [
        "layer = FusedLayerNorm(4, eps=e) if args.fused else nn.LayerNorm(4, eps=e)\n",
        "layer = nn.LayerNorm(4) if not args.fused else FusedLayerNorm(4)\n",
        "if args.fused:\n    layer = FusedLayerNorm(4)\nelse:\n    layer = nn.LayerNorm(4)\n",
    ],
)
def test_a_choice_whose_arms_would_become_equal_stays_whole(made):
    old = f"from torch import nn\nfrom apex.normalization import FusedLayerNorm\n{made}"
    assert (migrate_source(old)[0], migrate_source(old)[1][0].kind) == (old, "left")
    other = old.replace("nn.LayerNorm(4", "nn.LayerNorm(5")
    assert "apex" not in migrate_source(other)[0]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("normalization.fused_layer_norm.MixedFusedRMSNorm", "write torch.nn.RMSNorm("),
        ("normalization.fused_layer_norm.MixedFusedLayerNorm", "write torch.nn.LayerNorm"),
        ("contrib.optimizers.FP16_Optimizer", "keep the model in float32"),
        ("contrib.optimizers.DistributedFusedAdam", "fully_shard"),
        ("contrib.optimizers.fused_lamb.FusedLAMB", "keep Apex for this"),
        ("optimizers.FusedLAMB", "torch has no equivalent: use"),
        ("contrib.group_norm.GroupNorm", "write torch.nn.GroupNorm"),
        ("contrib.xentropy.SoftmaxCrossEntropyLoss", "torch.nn.functional.cross_entropy"),
        ("multi_tensor_apply.multi_tensor_applier", "process many tensors at once"),
        ("mlp.MLP", "write torch.nn.Sequential"),
        ("pyprof.nvtx.init", "torch.profiler"),
        ("amp.register_half_function", "remove this use"),
        ("amp.register_float_function", 'torch.autocast("cuda", enabled=False)'),
        ("amp._amp_state.loss_scalers", "GradScaler has the state"),
        ("fp16_utils.network_to_half", "keep the model in float32"),
    ],
)
def test_each_name_is_told_what_takes_its_place(name, advice):
    module, _, last = name.rpartition(".")
    (finding,) = migrate_source(f"from apex.{module} import {last}\nx = {last}(a, b=c)\n")[1]
    assert (finding.line, finding.kind) == (2, "by hand")
    assert advice in finding.message


def test_an_import_whose_failure_is_an_error_is_no_choice():
    old = (
        "import torch\ntry:\n    from apex.optimizers import FusedSGD\nexcept ImportError:\n"
        "    raise ImportError('please install apex')\no = FusedSGD(p, 0.1)\n"
    )
    new, _ = migrate_source(old)
    assert "    from torch.optim import SGD\n" in new
    assert "o = SGD(p, 0.1, fused=True)\n" in new


def test_the_command_marks_files_only_if_it_is_asked_to(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(LOOP)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == LOOP
    assert main(["migrate", "--write", "--mark", str(path)]) == 0
    assert path.read_text() == migrate_source(LOOP, mark=True)[0] != LOOP


def test_functions_with_a_dtype_of_their_own_are_rewritten_beside_a_loop_that_stays():
    old = LOOP.replace(
        "import torch\n", "import torch\n@torch.cuda.amp.custom_fwd\ndef f(x): pass\n"
    )
    new, _ = migrate_source(old)
    assert '@torch.amp.custom_fwd(device_type="cuda")' in new
    assert "model, optimizer = amp.initialize(" in new
    assert migrate_source(new)[0] == new


def test_the_scale_begins_and_changes_as_that_of_apex():
    scaler = torch.amp.GradScaler("cpu")
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert (scaler.get_scale(), *factors) == (2.0**16, 2.0, 0.5, 2000)


def test_each_section_that_is_named_stands_in_notebook_13():
    text = (build_pairs.FOLDER / "13_from_apex.py").read_text(encoding="utf-8")
    headings = {line.removeprefix("# ## ") for line in text.splitlines()}
    assert set(SECTIONS.values()) <= headings


def test_another_package_whose_name_begins_like_apex_is_not_apex():
    code = "from apexlib import parallel\n"
    assert migrate_source(code) == (code, [])
