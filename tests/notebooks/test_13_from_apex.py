"""Notebook 13: the names of today, the toy Apex against torch, checkpoints, and the tool's cell."""

import ast
import builtins
import functools
import importlib.util
import inspect
import re
import sys

import pytest
import torch
from definitions import definitions
from torch import nn

from course import apex_training, toy_apex

import build_pairs

SOURCE = build_pairs.FOLDER / "13_from_apex.py"
SETTINGS = {"fp16", "SAME"}
CPU = torch.device("cpu")
BATCHES = apex_training.small_batches("cpu")
fp32, fp16 = torch.float32, torch.float16

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


@functools.cache
def tree() -> ast.Module:
    return ast.parse(SOURCE.read_text(encoding="utf-8"))


@pytest.fixture
def cells() -> dict:
    """The notebook's definitions, and the trainings that it imports."""
    given = vars(apex_training) | {"device": CPU, "batches": BATCHES, "INTERVAL": 6}
    return definitions(SOURCE, SETTINGS, **given)


def plain_losses(steps):
    """The losses of Adam in fp32, as anybody would write it."""
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = BATCHES[step % 4]
        loss = 12 * nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_model():
    return apex_training.new_model("cpu")


def train_apex(level, steps, model=None):
    return apex_training.train_apex(level, BATCHES, model or new_model(), steps)


def train_today(dtype, steps, model=None):
    return apex_training.train_today(dtype, BATCHES, model or new_model(), steps)


def train_and_save(level, path):
    return apex_training.train_and_save(level, BATCHES, new_model(), path, growth_interval=6)


class LinearLayer(nn.Linear):
    """A model without batch normalisation, whose weights stay in fp32 at O2."""

    def __init__(self):
        super().__init__(8, 1)


def held(run):
    """Bytes per parameter that a run holds: the columns of the notebook's table."""
    weights = list(run.model.parameters())
    own = {id(weight) for weight in weights}
    masters = [p for p in run.optimizer.param_groups[0]["params"] if id(p) not in own]
    states = run.optimizer.state.values()
    kinds = [
        weights,
        [p.grad for p in weights],
        masters,
        [p.grad for p in masters],
        [t for state in states for t in state.values() if t.dim()],
    ]
    count = sum(weight.numel() for weight in weights)
    return [sum(t.nbytes for t in tensors) / count for tensors in kinds]


def test_the_table_of_bytes_is_what_a_parameter_takes():
    table = {}
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"# \| (O\d[^|]*) \|([ \d|]+)\|", line)
        if match:
            numbers = [float(cell.strip() or 0) for cell in match[2].split("|")]
            table |= dict.fromkeys(match[1].split(", "), numbers)
    runs = {level: train_apex(level, 5, LinearLayer()) for level in ("O0", "O1", "O2", "O3")}
    runs["autocast"] = train_today(fp16, 5, LinearLayer())  # after the skipped ones
    found = {level: held(run) for level, run in runs.items()}
    assert table == {level: [*parts, sum(parts)] for level, parts in found.items()}


def test_each_name_of_today_is_there():
    column = [line.split(" | ")[-1] for line in SOURCE.read_text().splitlines() if " | " in line]
    named = {name for cell in column for name in re.findall(r"`torch\.([\w.]+)", cell)}
    assert {"autocast", "amp.GradScaler", "nn.LayerNorm"} <= named
    for name in named:
        assert callable(functools.reduce(getattr, name.split("."), torch)), name
    assert torch.optim.AdamW([nn.Parameter(torch.ones(1))]).defaults["weight_decay"] == 0.01


def test_levels_train_as_torch_does():
    reference = plain_losses(10)
    assert train_apex("O0", 10).losses == reference
    assert train_today(None, 10).losses == reference
    o1, o2 = train_apex("O1", 10), train_apex("O2", 10)
    autocast = train_today(fp16, 10)
    assert o1.losses == autocast.losses != reference
    assert 0 < apex_training.distance(o2.losses, autocast.losses) < 2**-9
    assert o1.scale == o2.scale == autocast.scale < 2**16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_masters_are_in_the_optimizer_at_o2_alone(level):
    run = train_apex(level, 5)
    updated = run.optimizer.param_groups[0]["params"]
    own = list(run.model.parameters())
    assert [tuple(p.shape) for p in updated] == [tuple(p.shape) for p in own]
    foreign = [p for p in updated if all(p is not q for q in own)]
    assert len(foreign) == (4 if level == "O2" else 0)  # not batch normalisation's
    for master, weight in zip(updated, own, strict=True):
        if level != "O3":  # whose weights are NaN by now
            assert torch.equal(master.to(weight.dtype), weight)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    with toy_apex.ToyApex() as amp:
        model = new_model()
        model, optimizer = amp.initialize(model, apex_training.new_adam(model), opt_level="O2")
        before = [p.clone() for p in model.parameters()]
        for factor, moves in ((1e30, False), (1e-3, True)):
            optimizer.zero_grad()
            loss = factor * model(BATCHES[0][0]).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            changed = [
                not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
            ]
            assert any(changed) is moves
            assert amp.loss_scale.scale == 2.0**15


def scale_of_torch(overflows, interval):
    """The scale after each step of a GradScaler that sees these overflows."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale(weight * (float("inf") if overflow else 1e-9)).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def test_the_loss_scale_is_that_of_grad_scaler_but_for_its_limit():
    overflows = [True, True, False, False, False, True, False, False, False, False, False, False]
    scale = toy_apex.LossScale("dynamic")
    scale.window = 3
    found = []
    for overflow in overflows:
        assert scale.update(overflow) is overflow
        found.append(scale.scale)
    assert found == list(scale_of_torch(overflows, 3))
    assert len(set(found)) == 3
    scale.scale = 2.0**24
    for _ in range(3):
        scale.update(False)
    assert scale.scale == 2.0**24  # where a GradScaler goes on
    assert list(scale_of_torch([False] * 9, 1))[-1] == 2.0**25
    fixed = toy_apex.LossScale(128.0)
    assert [fixed.update(overflow) for overflow in (True, False)] == [False, False]
    assert fixed.scale == 128


def test_patched_functions_cast_floats_alone():
    x, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    with toy_apex.PatchedFunctions():
        logits = nn.functional.linear(x, torch.randn(3, 3))
        loss = nn.functional.cross_entropy(logits, targets)
        product = x @ x.T  # not on the list: a method, as Apex had on another list
        assert (logits.dtype, loss.dtype, product.dtype) == (fp16, fp32, fp32)
    assert nn.functional.linear(x, x).dtype is fp32


def load_masters(path):
    """Put the master weights of a checkpoint in the place of its weights."""
    file = torch.load(path, weights_only=True)
    names = [f"module.{name}" for name, _ in new_model().named_parameters()]
    file["model"].update(zip(names, file["master params"], strict=True))
    torch.save(file, path)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_of_apex_goes_on_exactly(cells, tmp_path, level):
    cells["PATH"] = tmp_path / "apex.pt"
    whole = train_and_save(level, cells["PATH"])
    if level == "O2":
        load_masters(cells["PATH"])
    resumed = cells["resume"]()
    assert resumed.losses == whole.losses
    assert resumed.scale == whole.scale
    for part in ("optimizer", "amp"):  # each is needed
        file = torch.load(cells["PATH"], weights_only=True)
        fresh = apex_training.new_adam(new_model()).state_dict()
        scaler = {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}
        torch.save(file | {part: fresh if part == "optimizer" else scaler}, tmp_path / part)
        cells["PATH"] = tmp_path / part
        assert apex_training.distance(cells["resume"]().losses, whole.losses) > 0.1
        cells["PATH"] = tmp_path / "apex.pt"


def test_without_its_masters_a_checkpoint_of_o2_is_rounded(cells, tmp_path):
    cells["PATH"] = tmp_path / "apex.pt"
    whole = train_and_save("O2", cells["PATH"])
    assert 0 < apex_training.distance(cells["resume"]().losses, whole.losses) < 2**-9
    file = torch.load(cells["PATH"], weights_only=True)
    weight = file["model"]["module.0.weight"]
    assert weight.dtype is fp32
    assert torch.equal(weight, weight.half().float())
    assert not torch.equal(weight, file["master params"][0])


def grads_of(*values):
    """Weights of 1 with these gradients, which are scaled; their optimizers and their scaler."""
    weights = [nn.Parameter(torch.ones(())) for _ in values]
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for weight, value in zip(weights, values, strict=True):
        for _ in range(2):  # two micro-batches, which add up
            scaler.scale(value / 2 * weight).backward()
    return weights, [torch.optim.SGD([weight], lr=1.0) for weight in weights], scaler


def test_options_of_apex_have_the_counterparts_of_the_table():
    """Two losses and optimizers with one scaler and one update; a fixed scale; a limit."""
    weights, optimizers, scaler = grads_of(0.5, 0.25)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [weight.item() for weight in weights] == [0.5, 0.75]
    (weight,), (optimizer,), scaler = grads_of(float("inf"))
    scaler.step(optimizer)
    scaler.update(128.0)
    assert (weight.item(), scaler.get_scale()) == (1, 128)  # skipped, and not halved
    (weight,), (optimizer,), scaler = grads_of(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64
    scaler.update(float(100))
    assert scaler.get_scale() == 100


def test_a_scale_in_the_place_of_the_device_is_refused_by_autocast_alone():
    with pytest.raises(ValueError, match="device_type"):
        torch.autocast(True)
    assert torch.amp.GradScaler(1024.0).get_scale() == 65536


def test_the_old_classes_have_a_fixed_dtype():
    for old, dtype in ((torch.cuda.amp, torch.float16), (torch.cpu.amp, torch.bfloat16)):
        assert inspect.signature(old.autocast).parameters["dtype"].default is dtype


def test_the_state_of_a_scaler_is_translated(cells):
    old = {
        "loss_scaler0": {"loss_scale": 512.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0},
    }
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(cells["scaler_state"](old))
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["growth_interval"]) == (512, 7, 2000)
    assert cells["scaler_state"](old, number=1)["scale"] == 2
    with pytest.raises(KeyError, match="loss_scaler2"):
        cells["scaler_state"](old, number=2)


def guarded() -> list[ast.If]:
    """The statements of the notebook that run only where libcst is."""
    return [
        node
        for node in tree().body
        if isinstance(node, ast.If) and "find_spec('libcst')" in ast.unparse(node.test)
    ]


def test_without_libcst_the_notebook_says_so_and_goes_on(monkeypatch, capsys):
    real_import = builtins.__import__

    def no_libcst(name, *args, **kwargs):
        assert name.partition(".")[0] != "libcst"
        assert not name.startswith("amp_lab.migrate")
        return real_import(name, *args, **kwargs)

    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.setattr(builtins, "__import__", no_libcst)
    namespace = {"find_spec": importlib.util.find_spec}
    exec(compile(ast.Module(guarded(), []), SOURCE, "exec"), namespace)
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (1, "")
    assert "pip install libcst" in out


def test_nothing_outside_needs_what_the_migration_defines():
    def names_in(node, context):
        return {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)
        }

    cells = guarded()
    assert "from amp_lab.migrate import" in ast.unparse(cells[0])
    last = cells[-1].end_lineno
    later = [node for node in tree().body if node.lineno > last]
    used = set().union(*(names_in(node, ast.Load) for node in later))
    rebound = set().union(*(names_in(node, ast.Store) for node in later))
    assert (set().union(*(names_in(cell, ast.Store) for cell in cells)) & used) <= rebound
    everywhere = set().union(*(names_in(n, ast.Load) for n in tree().body if n not in cells))
    assert "migrate_source" not in everywhere
