"""A training loop with Apex: rewritten as a whole, to the same numbers, or marked as a whole."""

import sys
import types
from contextlib import contextmanager

import pytest
import torch
from test_migrate import snippets

from amp_lab.migrate import migrate_source
from amp_lab.migrate.apex import MARK

LOOPS = {title: text.split("--- becomes\n") for title, text in snippets("apex_loops").items()}


class StandIn:
    """What `apex.amp` does in O1 and O0, after its sources, on the CPU and in bfloat16.

    O1 patches functions to cast, from `initialize` on; here that is ``linear``, and the two losses.
    """

    def __init__(self, patch):
        self.patch = patch
        self.scale, self.unskipped, self.enabled = 1.0, 0, None
        self.casts = {}  # of weights, once for each backward

    def initialize(
        self, models, optimizers, enabled=True, opt_level="O1", loss_scale=None, **others
    ):
        self.enabled = enabled and opt_level == "O1"
        if self.enabled:
            self.scale = 2.0**16
            functional, linear = torch.nn.functional, torch.nn.functional.linear
            self.patch(functional, "linear", lambda *args: linear(*map(self.cast, args)))
            for name in ("cross_entropy", "mse_loss"):
                self.patch(functional, name, in_float32(getattr(functional, name)))
        return models, optimizers

    def cast(self, tensor):
        if not (tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()):
            return tensor.bfloat16()
        if tensor not in self.casts:
            self.casts[tensor] = tensor.bfloat16()
        return self.casts[tensor]

    def master_params(self, optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]

    @contextmanager
    def scale_loss(self, loss, optimizer):
        if self.enabled is None:
            raise RuntimeError("internal Amp state has not been initialized")
        if not self.enabled:
            yield loss
            return
        params = list(self.master_params(optimizer))
        kept = [p.grad for p in params]
        for p in params:
            p.grad = None
        yield loss.float() * self.scale
        self.casts.clear()
        overflow = any(not p.grad.isfinite().all() for p in params)
        for p, before in zip(params, kept, strict=True):
            p.grad = p.grad / self.scale + (0 if before is None else before)
        if overflow:
            self.scale, self.unskipped = self.scale / 2, 0
            self.skip_once(optimizer)
        else:
            self.unskipped += 1

    def skip_once(self, optimizer):
        def skip():
            optimizer.step = step

        step, optimizer.step = optimizer.step, skip

    def state_dict(self):
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.unskipped}}


def in_float32(function):
    return lambda output, *args, **kw: function(output.float(), *args, **kw)


def make():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def run(code: str, largest: float) -> tuple[list, list, dict]:
    """The losses, the weights after, and the rest of what a program with a loop left.

    The third batch is made `largest` times as large.
    """
    random = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 4, generator=random), torch.randint(3, (8,), generator=random))
        for _ in range(8)
    ]
    batches[2][0].mul_(largest)
    names = {
        "make": lambda: made.append(make()) or made[-1],
        "batches": batches,
        "criterion": torch.nn.CrossEntropyLoss(),
        "losses": [],
        "kept": {},
        "notes": [],
        "__name__": "__main__",
    }
    made: list = []
    exec(compile(code, "loop", "exec"), names)
    weights = [p.detach() for p in made[0][0].parameters()]
    return names["losses"], weights, names["kept"]


def on_cpu(code: str) -> str:
    return code.replace('"cuda"', '"cpu"').replace("torch.float16", "torch.bfloat16")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("title", LOOPS)
def test_a_loop_that_is_certain_is_rewritten_as_a_whole(title, ending):
    old, expected = (text.replace("\n", ending) for text in LOOPS[title])
    new, findings = migrate_source(old)
    assert new == expected
    by_hand = [f.message for f in findings if f.kind != "rewritten"]
    assert by_hand == ["nothing uses apex.optimizers here: delete it from the import"] * (
        "optimizers" in expected.partition("import optimizers")[0]
    )
    again, _ = migrate_source(new)
    assert again == new


@pytest.mark.parametrize("title", LOOPS)
def test_it_gives_the_same_losses_weights_and_scale(title, monkeypatch):
    package = types.ModuleType("apex")
    package.optimizers = None
    monkeypatch.setitem(sys.modules, "constants", types.ModuleType("constants"))
    old, new = LOOPS[title]
    is_scaled = "GradScaler" in new
    largest = 1e38 if is_scaled else 1.0  # overflows, so that a step is skipped
    with monkeypatch.context() as patch:
        stand_in = package.amp = StandIn(patch.setattr)
        patch.setitem(sys.modules, "apex", package)
        losses, weights, kept = run(old, largest)
    scalers = []
    grad_scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        "torch.amp.GradScaler", lambda device: scalers.append(grad_scaler(device)) or scalers[-1]
    )
    monkeypatch.setitem(sys.modules, "apex", package)
    package.amp = None
    now = run(on_cpu(new), largest)
    torch.testing.assert_close(now[0], losses, rtol=0, atol=0, equal_nan=True)
    assert [scaler.get_scale() for scaler in scalers] == [stand_in.scale] * is_scaled
    assert stand_in.scale < 2.0**16
    for after, before in zip(now[1], weights, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    if "amp" in kept:
        state = kept["amp"]["loss_scaler0"]
        assert now[2]["amp"]["scale"] == state["loss_scale"] < 2.0**16
        assert now[2]["amp"]["_growth_tracker"] == state["unskipped"]


# What is in doubt.

SURE = """\
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
DOUBTS = {  # what is replaced, by what, and what is said of it
    "O2": ('"O1"', '"O2"', "float32 master weights"),
    "O3": ('"O1"', '"O3"', "model.half()"),
    "a level that is no literal": ('"O1"', "level", "no literal"),
    "a scale that stays": ('"O1"', '"O1", loss_scale=128.0', "skips no step"),
    "another cast": ('"O1"', '"O1", patch_torch_functions=False', "what the level does"),
    "several losses": ('"O1"', '"O1", num_losses=2', "what the level does"),
    "arguments as a mapping": ('opt_level="O1"', "**options", "an argument"),
    "two models": ("initialize(model,", "initialize([model, other],", "one model and one"),
    "another name": ("model, optimizer = amp", "net, optimizer = amp", "other names"),
    "a loss of several": ("optimizer) as", "optimizer, loss_id=0) as", "loss_id"),
    "a list": ("(loss, optimizer)", "(loss, [optimizer])", "another optimizer"),
    "a loss in the call": (
        "loss, optimizer) as",
        "criterion(model(x), y), optimizer) as",
        "inside amp.scale_loss",
    ),
    "more in the block": (
        "    optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()",
        "more than one backward",
    ),
    "the scaled loss is used": ("optimizer.step()", "optimizer.step(), scaled_loss", "elsewhere"),
    "a closure": ("optimizer.step()", "optimizer.step(closure)", "an argument or a result"),
    "two steps": ("optimizer.step()", "optimizer.step(); optimizer.step()", "2 times"),
    "no step": ("optimizer.step()", "pass", "0 times"),
    "a step in each case": ("    optimizer.step()", "optimizer.step()", "does not step"),
    "a step on the line of an if": ("optimizer.step()", "if x: optimizer.step()", "its line"),
    "clipped each time, stepped sometimes": (
        "    optimizer.step()",
        "    clip_grad_norm_(model.parameters(), 1.0)\n    if y:\n        optimizer.step()",
        "also where",
    ),
    "clipped where it does not step": (
        "    optimizer.step()",
        "    if y:\n        clip_grad_norm_(model.parameters(), 1.0)\n"
        "    else:\n        optimizer.step()\n        optimizer.zero_grad()",
        "also where",
    ),
    "another loss": ("optimizer.step()", "optimizer.step(), other.backward()", "a backward"),
    "scaler is taken": ("import torch\n", "import torch\nscaler = Scaler()\n", "something else"),
    "torch is something else": ("import torch\n", "torch = 3\n", "not imported"),
    "autocast too": ("= make()", "= make(torch.autocast)", "already"),
    "half": ("= make()", "= make().half()", "float16 by half"),
    "a loop around": (
        "model, optimizer = amp",
        "for _ in x:\n    model, optimizer = amp",
        "in a loop",
    ),
    "a condition": (
        "model, optimizer = amp",
        "if fp16:\n    model, optimizer = amp",
        "a condition",
    ),
    "the forward pass is elsewhere": ("model(x), y", "forward(x), y", "not called in"),
    "the loss is elsewhere": ("loss = criterion", "other = criterion", "not assigned"),
    "a forward pass that yields": ("model(x), y", "model(x), (yield y)", "a yield"),
    "a forward pass of Apex": ("model(x), y", "model(amp.y(x)), y", "apex.amp.y is used too"),
    "a pass without gradients, whose casts would be kept": (
        "    loss =",
        "    with torch.no_grad():\n        model(y)\n    loss =",
        "no_grad stands",
    ),
    "the model by another name": (
        "for x, y in batches:\n    loss = criterion(model(x), y)",
        "net = parallel(model)\nfor x, y in batches:\n    out = net(x)\n"
        "    loss = criterion(out, model.weight)",
        "by another name",
    ),
    "the model in a function": (
        "for x, y in batches:\n    loss = criterion(model(x), y)",
        "def encode(x): return model.encode(x)\nfor x, y in batches:\n    z = encode(x)\n"
        "    loss = model.decode(z)",
        "in a function",
    ),
    "the model again": (
        "    optimizer.zero_grad()",
        "    after = model(x)\n    optimizer.zero_grad()",
        "called again",
    ),
    "gradients that stay": ("    optimizer.zero_grad()\n", "", "set to zero once"),
    "set to zero more often than it steps": (
        "    optimizer.step()",
        "    if y:\n        optimizer.step()",
        "set to zero once",
    ),
    "its state before it": (
        "model, optimizer = amp",
        "state = amp.state_dict()\nmodel, optimizer = amp",
        "used before it",
    ),
    "clipped, and then passed over": (
        "    optimizer.step()",
        "    clip_grad_norm_(model.parameters(), 1.0)\n    if y: continue\n    optimizer.step()",
        "passed over",
    ),
    "a third argument": ("(loss, optimizer)", "(loss, optimizer, 0)", "no equal of"),
    "an argument that is a list": ('"O1"', '["O1"]', "no literal"),
    "a statement after backward, and a block": (
        "    optimizer.step()",
        "        if y:\n            pass\n    optimizer.step()",
        "more than one backward",
    ),
    "gradients by themselves": (
        "optimizer.step()",
        "optimizer.step(), torch.autograd.grad(loss, x)",
        "autograd.grad",
    ),
    "more of Apex, by a star": (
        "from apex import amp",
        "from apex import amp\nfrom apex.fp16_utils import *",
        "with a star",
    ),
    "Apex may be missing": (
        "from apex import amp",
        "try:\n    from apex import amp\nexcept ImportError:\n    amp = None",
        "more than this import",
    ),
    "an import that is all of a block": (
        "from apex import amp",
        "if True:\n    from apex import amp",
        "nothing would be left",
    ),
    "O0, and its state": (
        'opt_level="O1")',
        'opt_level="O0")\nstate = amp.state_dict()',
        "float32 has none",
    ),
}


@pytest.mark.parametrize("kind", DOUBTS)
def test_what_is_in_doubt_is_marked_and_nothing_is_changed(kind):
    before, after, said = DOUBTS[kind]
    old = SURE.replace(before, after, 1)
    assert old != SURE
    compile(old.replace("(yield y)", "y"), kind, "exec")
    new, findings = migrate_source(old)
    left = [line for line in new.splitlines() if not line.lstrip().startswith(MARK)]
    assert left == old.splitlines()
    assert {f.kind for f in findings} == {"by hand"}
    at = next(f for f in findings if "amp.initialize" in old.splitlines()[f.line - 1])
    assert said in at.message
    assert MARK in new
    assert migrate_source(new)[0] == new


def test_a_loop_in_a_function_that_is_given_model_and_optimizer_is_marked():
    old = """\
from apex import amp
def train(model, optimizer):
    for x in batches:
        loss = model(x)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
def main():
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    train(model, optimizer)
"""
    new, findings = migrate_source(old)
    assert [f.line for f in findings] == [5, 10]
    assert "pass scaler to train()" in findings[0].message
    assert "passed to this function" in findings[1].message
    assert new.count(MARK) == 2


BESIDE = {  # what stands between backward and step; whether gradients have to be unscaled for it
    "a meter": ("meter.update(loss.item(), x.size(0))", False),
    "a sum": ("total += loss.item()", False),
    "a list of parameters": ("adapt_(parameters, 0.01)", True),
    "an object that has the model": ("average.update()", True),
    "a method that is not seen": ("self.after_backward()", True),
    "a function of this file": ("add_noise()", True),
    "a function that prints": ("show(loss)", False),
}
HELPERS = """\
parameters = list(model.parameters())
average = make_average(model)
def add_noise():
    for p in parameters:
        p.grad.add_(0.1)
def show(loss):
    print(loss.item())
"""


@pytest.mark.parametrize("kind", BESIDE)
def test_what_may_see_gradients_sees_them_unscaled_as_with_apex(kind):
    statement, unscales = BESIDE[kind]
    is_seen = "add_noise" in statement  # else no .grad may stand anywhere: that is enough by itself
    helpers = HELPERS if is_seen else HELPERS.replace("p.grad.add_(0.1)", "print(p)")
    old = SURE.replace("model, optimizer = amp", f"{helpers}model, optimizer = amp")
    old = old.replace("    optimizer.step()", f"    {statement}\n    optimizer.step()")
    new, findings = migrate_source(old)
    assert {f.kind for f in findings} == {"rewritten"}
    before = "scaler.unscale_(optimizer)\n    " if unscales else ""
    assert f".backward()\n    {before}{statement}\n    scaler.step" in new


def test_gradients_that_are_shown_after_steps_that_may_not_be_made_are_in_doubt():
    step = "    if y:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    old = SURE.replace("    optimizer.zero_grad()\n", "").replace("    optimizer.step()\n", step)
    assert {f.kind for f in migrate_source(old)[1]} == {"rewritten"}
    _, findings = migrate_source(old + "    print(parameter.grad.norm())\n")
    assert {f.kind for f in findings} == {"by hand"}
    assert "where the optimizer does not step" in findings[0].message


def test_a_model_of_another_scope_is_in_doubt():
    lines = SURE.splitlines()
    body = "".join(f"    {line}\n" for line in lines[2:4])
    loop = "".join(f"    {line}\n" for line in lines[4:])
    old = "\n".join([*lines[:2], "def main():", "    global model, optimizer", body])
    _, findings = migrate_source(f"{old}def train():\n{loop}")
    assert {f.kind for f in findings} == {"by hand"}
    assert "of another scope" in findings[0].message


def test_o0_is_told_as_plain_float32_in_another_function_too():
    old = SURE.replace('"O1"', '"O0"').replace("(loss, optimizer)", "(loss, other)")
    _, findings = migrate_source(old)
    assert "write loss.backward(): O0 is plain" in findings[1].message


def test_an_import_that_a_rewritten_use_leaves_behind_is_told_at_once():
    old = SURE.replace("import amp", "import amp, optimizers").replace(
        "= make()", "= make(), optimizers.FusedAdam(weights)"
    )
    new, _ = migrate_source(old)
    assert "nothing uses apex.optimizers here" in new
    assert migrate_source(new)[0] == new


def test_a_loss_over_two_lines_is_marked_in_one():
    old = SURE.replace("(loss, optimizer)", "(loss +\n        other, optimizer, loss_id=0)")
    new, findings = migrate_source(old)
    assert "write scaler.scale(loss + other).backward()" in new
    compile(new, "marked", "exec")
    assert migrate_source(new)[0] == new
    assert {f.kind for f in findings} == {"by hand"}


def test_functions_with_a_dtype_of_their_own_leave_a_loop_in_doubt_both_times():
    old = SURE.replace(
        "import torch\n", "import torch\n@torch.cuda.amp.custom_fwd\ndef f(x): pass\n"
    )
    new, _ = migrate_source(old)
    assert '@torch.amp.custom_fwd(device_type="cuda")' in new
    assert "GradScaler(" not in new.replace('scaler = torch.amp.GradScaler("cuda") once', "")
    assert migrate_source(new)[0] == new


def test_the_scale_begins_and_changes_as_that_of_apex():
    scaler = torch.amp.GradScaler("cpu")
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert (scaler.get_scale(), *factors) == (2.0**16, 2.0, 0.5, 2000)


def test_gradients_that_may_stay_are_in_doubt():
    old = SURE.replace("    optimizer.zero_grad()\n", "")
    for end, kind in (
        ("    if y: continue\n    optimizer.zero_grad()\n", "by hand"),
        ("    optimizer.zero_grad()\n    if y: continue\n", "rewritten"),
    ):
        assert {f.kind for f in migrate_source(old + end)[1]} == {kind}
