"""Each mistake that migrate finds, in a program that runs, and the program after what it says."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from remedy_tests import does, says
from scaler_programs import HEAD, found, run
from torch import nn

from course.failures import cuda_rules


def moved(names: dict[str, Any]) -> float:
    """How far the program moved each of its two weights, which were 1; a step is 0.4."""
    return float((1 - names["model"].weight.detach()).mean())


class Case(NamedTuple):
    wrong: str
    right: str
    says: str  # what stands in the message, and is done in `right`
    check: Callable[[Callable[[], dict], Callable[[], dict]], bool]


def raises(message: str) -> Callable:
    """The wrong program raises an error, and the right one does not."""

    def check(wrong: Callable[[], dict], right: Callable[[], dict]) -> bool:
        with pytest.raises((RuntimeError, ValueError, AssertionError), match=message):
            wrong()
        return bool(right())

    return check


def moves(wrongly: float, rightly: float) -> Callable:
    """How far each moves the weights."""

    def check(wrong: Callable[[], dict], right: Callable[[], dict]) -> bool:
        found = moved(wrong()), moved(right())
        return found == (pytest.approx(wrongly, rel=1e-2), pytest.approx(rightly, rel=1e-2))

    return check


BACKWARD = "scaler.scale(new_loss()).backward()\n"
EPOCH = (
    "    for batch in range(4):\n        optimizer.zero_grad()\n"
    "        scaler.scale(new_loss()).backward()\n        scaler.step(optimizer)\n"
    "        scaler.update()\n"
)
CASES = {
    "clipped_scaled": Case(
        BACKWARD + "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\n"
        "scaler.update()\n",
        BACKWARD + "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)\nscaler.update()\n",
        "call scaler.unscale_(optimizer) before",
        moves(0.1 * 0.5**0.5 / 2**10, 0.1 * 0.5**0.5),
    ),
    "stepped_twice": Case(
        BACKWARD + "scaler.step(optimizer)\noptimizer.step()\nscaler.update()\n",
        BACKWARD + "scaler.step(optimizer)\nscaler.update()\n",
        "delete optimizer.step()",
        moves(0.8, 0.4),
    ),
    "stepped_past": Case(
        BACKWARD + "optimizer.step()\n",
        BACKWARD + "scaler.step(optimizer)\nscaler.update()\n",
        "write scaler.step(optimizer)",
        moves(0.4 * 2**10, 0.4),
    ),
    "backward_inside": Case(
        'with autocast("cpu", dtype=torch.float16):\n'
        "    loss = model(x).float().square().mean()\n    scaler.scale(loss).backward()\n"
        "scaler.step(optimizer)\nscaler.update()\n",
        'with autocast("cpu", dtype=torch.float16):\n'
        "    loss = model(x).float().square().mean()\nscaler.scale(loss).backward()\n"
        "scaler.step(optimizer)\nscaler.update()\n",
        "end the block after the loss",
        moves(0.4, 0.4),  # it does no harm
    ),
    "loop_in_one_block": Case(
        'with autocast("cpu", dtype=torch.float16):\n    for _ in range(2):\n'
        "        loss = model(x).float().square().mean()\n        scaler.scale(loss).backward()\n"
        "        scaler.step(optimizer)\n        scaler.update()\n"
        "        optimizer.zero_grad()\n",
        'for _ in range(2):\n    with autocast("cpu", dtype=torch.float16):\n'
        "        loss = model(x).float().square().mean()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n",
        "open a block for each forward pass, inside the loop",
        moves(0.8, 1 - 0.6**2),  # the second gradient is that of the first weights
    ),
    "made_each_epoch": Case(
        "for epoch in range(2):\n    scaler = GradScaler('cpu')\n" + EPOCH,
        "scaler = GradScaler('cpu')\nfor epoch in range(2):\n" + EPOCH,
        "create the scaler once, before the loop over epochs",
        moves(1 - 0.6**3, 1 - 0.6**5),  # a step moves by 0.4 of what is left: 1 and 2, or 1 and 4
    ),
    "never_updated": Case(
        "for _ in range(2):\n    scaler.scale(new_loss()).backward()\n    scaler.step(optimizer)\n"
        "    optimizer.zero_grad()\n",
        "for _ in range(2):\n    scaler.scale(new_loss()).backward()\n    scaler.step(optimizer)\n"
        "    scaler.update()\n    optimizer.zero_grad()\n",
        "call scaler.update() after the step",
        raises("already been called"),
    ),
    "unscaled_each_batch": Case(
        "for i in range(4):\n    scaler.scale(new_loss()).backward()\n"
        "    scaler.unscale_(optimizer)\n    if i % 2:\n        scaler.step(optimizer)\n"
        "        scaler.update()\n        optimizer.zero_grad()\n",
        "for i in range(4):\n    scaler.scale(new_loss()).backward()\n    if i % 2:\n"
        "        scaler.unscale_(optimizer)\n        clip_grad_norm_(model.parameters(), 9.0)\n"
        "        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()\n",
        "call it once, before clipping and scaler.step(optimizer)",
        raises("already been called"),
    ),
    "path_without_update": Case(
        "for i in range(4):\n    scaler.scale(new_loss()).backward()\n"
        "    scaler.unscale_(optimizer)\n    norm = clip_grad_norm_(model.parameters(), 9.0)\n"
        "    if norm > 0.5:\n        optimizer.zero_grad()\n        continue\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n",
        "for i in range(4):\n    scaler.scale(new_loss()).backward()\n"
        "    scaler.unscale_(optimizer)\n    norm = clip_grad_norm_(model.parameters(), 9.0)\n"
        "    if norm > 0.5:\n        optimizer.zero_grad()\n        scaler.update()\n"
        "        continue\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n",
        "call scaler.update() on that path too",
        raises("already been called on this optimizer since the last update"),
    ),
    "unscaled_by_another": Case(
        'other = GradScaler("cpu", init_scale=2.0**10)\nscaler.scale(new_loss()).backward()\n'
        "other.scale(new_loss() * 0).backward()\nscaler.unscale_(optimizer)\n"
        "other.step(optimizer)\nother.update()\nscaler.update()\n",
        'other = GradScaler("cpu", init_scale=2.0**10)\nother.scale(new_loss()).backward()\n'
        "other.scale(new_loss() * 0).backward()\nother.unscale_(optimizer)\n"
        "other.step(optimizer)\nother.update()\n",
        "use only other, and scale the loss with other too",
        moves(0.4 / 2**10, 0.4),
    ),
}
RESUME = """
scaler.scale(new_loss() * float("inf")).backward()  # this step is skipped, and halves the scale
scaler.step(optimizer)
scaler.update()
"""
AGAIN = """
scaler = GradScaler("cpu", init_scale=2.0**10)
state = torch.load(path)
optimizer.load_state_dict(state["optimizer"])
"""


@does(*(f"migrate.{code}" for code in CASES))
@pytest.mark.parametrize("code", CASES)
def test_the_program_that_does_as_it_says_is_right(code):
    case = CASES[code]
    said = found(HEAD + case.wrong)
    assert says(f"migrate.{code}", said)
    assert case.says in said
    assert found(HEAD + case.right) == ""
    assert case.check(lambda: run(HEAD + case.wrong), lambda: run(HEAD + case.right))


@does("migrate.without_autocast")
def test_a_scaler_where_nothing_runs_in_autocast():
    scaled = BACKWARD + "scaler.step(optimizer)\nscaler.update()\n"
    wrong = (HEAD + scaled).replace('    with autocast("cpu", dtype=torch.float16):\n    ', "")
    wrong = wrong.replace("GradScaler, autocast", "GradScaler")
    assert says("migrate.without_autocast", found(wrong))
    dropped = wrong.replace("scaler.scale(new_loss())", "new_loss()")
    dropped = dropped.replace("scaler.step(optimizer)", "optimizer.step()")
    dropped = re.sub(r"^(scaler|from torch.amp).*\n", "", dropped, flags=re.MULTILINE)
    for right in (HEAD + scaled, dropped):
        assert found(right) == ""
        assert moved(run(right)) == pytest.approx(0.4, rel=1e-2)


BRANCHES = """
if use_amp:
    scaler.scale(new_loss()).backward()
    {scaled}
else:
    model(x).float().square().mean().backward()
    {plain}
{after}
"""


def branches(scaled: str, plain: str, after: str) -> str:
    return HEAD + BRANCHES.format(scaled=scaled, plain=plain, after=after)


SCALER_STEPS = "scaler.step(optimizer); scaler.update()"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
CLIPPED = 0.1 * 0.5**0.5
EITHER = f"if use_amp:\n    {SCALER_STEPS}\nelse:\n    optimizer.step()"
IN_BRANCHES = {  # the wrong program and the right one, and how far each goes with AMP and without
    "stepped_in_both": (
        branches(SCALER_STEPS, "pass", "optimizer.step()"),
        branches(SCALER_STEPS, "optimizer.step()", ""),
        {True: (0.8, 0.4), False: (0.4, 0.4)},
    ),
    "stepped_past_in_both": (
        branches("pass", "pass", "optimizer.step()"),
        branches("scaler.step(optimizer)", "optimizer.step()", ""),
        {True: (0.4 * 2**10, 0.4), False: (0.4, 0.4)},
    ),
    "clipped_in_both": (
        branches("pass", "pass", f"{CLIP}\n{EITHER}"),
        branches("scaler.unscale_(optimizer)", "pass", f"{CLIP}\n{EITHER}"),
        {True: (CLIPPED / 2**10, CLIPPED), False: (CLIPPED, CLIPPED)},
    ),
}


@does(*(f"migrate.{code}" for code in IN_BRANCHES))
@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("code", IN_BRANCHES)
def test_the_advice_is_right_with_mixed_precision_and_without(code, use_amp):
    wrong, right, expected = IN_BRANCHES[code]
    assert says(f"migrate.{code}", found(wrong))
    assert "already steps the optimizer" not in found(right)
    moves = [moved(run(program, use_amp=use_amp)) for program in (wrong, right)]
    assert moves == pytest.approx([*expected[use_amp]], rel=1e-2)


WITHOUT_SCALER = """
import torch
from torch import nn

model = nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cpu", dtype=torch.float16):
    output = model(torch.ones(4, 2))
loss = output.float().mean() * 2.0**-26  # below half the smallest number of float16, 2**-24
loss.backward()
optimizer.step()
"""


def has_gradients(program: str) -> bool:
    return bool(run(program)["model"].weight.grad.any())


@does("migrate.without_scaler")
def test_training_in_float16_without_a_scaler():
    said = found(WITHOUT_SCALER)
    assert says("migrate.without_scaler", said)
    made = 'scaler = torch.amp.GradScaler("cpu")'
    scaled = WITHOUT_SCALER.replace("loss.backward()", "scaler.scale(loss).backward()")
    scaled = scaled.replace("optimizer.step()", "scaler.step(optimizer)\nscaler.update()")
    scaled = scaled.replace("model = ", f"{made}\nmodel = ")
    for fragment in (made, "scaler.scale(loss).backward()", "scaler.step(optimizer)"):
        assert fragment in said
        assert fragment in scaled
    wider = WITHOUT_SCALER.replace("torch.float16", "torch.bfloat16")
    assert "dtype=torch.bfloat16" in said
    assert not has_gradients(WITHOUT_SCALER)
    for right in (scaled, wider):
        assert found(right) == ""
        assert has_gradients(right)


@does("migrate.not_saved", "migrate.not_loaded", "migrate.never_loaded", "migrate.never_saved")
def test_the_scale_goes_on_where_its_state_is_saved_and_loaded(tmp_path):
    step = BACKWARD + "scaler.step(optimizer)\nscaler.update()\n"
    save = 'torch.save({"optimizer": optimizer.state_dict()}, path)\n'
    both = save.replace("()}", '(), "scaler": scaler.state_dict()}')
    load = AGAIN + 'scaler.load_state_dict(state["scaler"])\n'
    path = {"path": tmp_path / "state.pt"}

    assert says("migrate.not_saved", found(HEAD + RESUME + save + AGAIN + step))
    assert run(HEAD + RESUME + save + AGAIN, **path)["scaler"].get_scale() == 2.0**10
    assert found(HEAD + RESUME + both + load + step) == ""
    assert run(HEAD + RESUME + both + load, **path)["scaler"].get_scale() == 2.0**9

    assert says("migrate.never_loaded", found(HEAD + RESUME + both + AGAIN + step))
    assert run(HEAD + RESUME + both + AGAIN, **path)["scaler"].get_scale() == 2.0**10

    guarded = load.replace("scaler.load", 'if "scaler" in state: scaler.load')
    assert says("migrate.never_saved", found(HEAD + RESUME + save + guarded + step))
    assert run(HEAD + RESUME + save + guarded, **path)["scaler"].get_scale() == 2.0**10
    assert found(HEAD + RESUME + both + guarded + step) == ""

    assert says("migrate.not_loaded", found(HEAD + AGAIN + step))
    assert found(HEAD + load + step) == ""


def test_the_programs_are_what_their_names_say():
    """A step moves both weights by the rate times the gradient, 2 * 2."""
    assert isinstance(run(HEAD)["model"], nn.Linear)
    assert moved(run(HEAD + BACKWARD + "scaler.step(optimizer)\n")) == pytest.approx(0.4, rel=1e-2)
    assert torch.equal(run(HEAD)["x"], torch.ones(4, 2))


# A checkpoint of one's own

CHECKPOINT = """
dtypes = []

def block(x):
    y = model(x)
    dtypes.append(y.dtype)
    return y

class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        ctx.enabled = torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad(), torch.autocast("cpu", enabled=ctx.enabled):
            y = block(ctx.x)
        torch.autograd.backward(y, grad.to(y.dtype))

with torch.autocast("cpu", dtype=torch.float16):
    y = Checkpoint.apply(x.clone().requires_grad_())
y.float().sum().backward()
"""


@does("migrate.restored_without_dtype")
def test_a_checkpoint_that_keeps_the_dtype_of_autocast():
    head = HEAD + "import torch\n"
    said = found(head + CHECKPOINT)
    assert says("migrate.restored_without_dtype", said)
    assert "also save torch.get_autocast_dtype(device_type), and pass it as dtype=" in said
    right = CHECKPOINT.replace(
        '    ctx.enabled = torch.is_autocast_enabled("cpu")\n',
        '    ctx.enabled = torch.is_autocast_enabled("cpu")\n'
        '        ctx.dtype = torch.get_autocast_dtype("cpu")\n',
    ).replace("enabled=ctx.enabled)", "enabled=ctx.enabled, dtype=ctx.dtype)")
    assert not says("migrate.restored_without_dtype", found(head + right))
    assert run(head + CHECKPOINT)["dtypes"] == [torch.float16, torch.bfloat16]
    assert run(head + right)["dtypes"] == [torch.float16, torch.float16]


@does("migrate.asked_without_device")
def test_a_question_about_autocast_names_its_device():
    code = """import torch
device_type = "cpu"
with torch.autocast(device_type, dtype=torch.bfloat16):
    enabled = torch.is_autocast_enabled()
"""
    said = found(code)
    assert says("migrate.asked_without_device", said)
    right = code.replace("is_autocast_enabled()", "is_autocast_enabled(device_type)")
    assert "call torch.is_autocast_enabled(device_type)" in said
    assert not says("migrate.asked_without_device", found(right))
    assert run(code)["enabled"] is False
    assert run(right)["enabled"] is True


FABRIC = """import lightning
import torch
fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
dtypes = []
model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fabric.setup(model, optimizer)
model(torch.ones(1, 2))
"""
ACCELERATE = """import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision={precision}, gradient_accumulation_steps=2)
model = torch.nn.Linear(2, 1)
dtypes = []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
"""
SCALER = """accelerator.native_amp = True  # as with a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
model = torch"""
ACCUMULATE = """for batch in range(4):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
EPOCHS = """for epoch in range(2):
    model(torch.ones(1, 2))
    state = accelerator.unwrap_model(model, keep_fp32_wrapper=False).state_dict()
"""


@pytest.fixture
def no_accelerator():
    """accelerate keeps its precision for the whole process."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


@does("migrate.setup_unused")
def test_the_model_that_setup_returns_is_used():
    pytest.importorskip("lightning")
    said = found(FABRIC)
    assert says("migrate.setup_unused", said)
    assert "write model, optimizer = fabric.setup(model, optimizer)" in said
    right = FABRIC.replace("\nfabric.setup", "\nmodel, optimizer = fabric.setup")
    assert not says("migrate.setup_unused", found(right))
    assert run(FABRIC)["dtypes"] == [torch.float32]
    assert run(right)["dtypes"] == [torch.bfloat16]


@does("migrate.clipped_each_batch")
@pytest.mark.usefixtures("no_accelerator")
def test_accelerate_clips_only_in_the_last_micro_batch():
    wrong = ACCELERATE.format(precision='"fp16"').replace("model = torch", SCALER) + ACCUMULATE
    said = found(wrong)
    assert says("migrate.clipped_each_batch", said)
    assert "only if accelerator.sync_gradients" in said
    right = wrong.replace(
        "        accelerator.clip_grad_norm_",
        "        if accelerator.sync_gradients:\n            accelerator.clip_grad_norm_",
    )
    assert not says("migrate.clipped_each_batch", found(right))
    with pytest.raises(RuntimeError, match="has already been called on this optimizer"):
        run(wrong)
    assert run(right)["model"].weight.isfinite().all()


@does("migrate.wrapper_removed")
@pytest.mark.usefixtures("no_accelerator")
def test_unwrap_model_keeps_autocast_if_training_goes_on():
    hook = "model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))"
    layer = ACCELERATE.replace("Linear(2, 1)", "Sequential(torch.nn.Linear(2, 1))")
    wrong = layer.format(precision='"bf16"').replace(
        "optimizer = torch", hook.replace("model.", "model[0].") + "\noptimizer = torch", 1
    )
    wrong += EPOCHS
    said = found(wrong)
    assert says("migrate.wrapper_removed", said)
    assert "leave out the argument" in said
    right = wrong.replace(", keep_fp32_wrapper=False", "")
    assert not says("migrate.wrapper_removed", found(right))
    assert run(wrong)["dtypes"] == [torch.bfloat16, torch.float32]
    assert run(right)["dtypes"] == [torch.bfloat16, torch.bfloat16]


# Optimizers of two passes


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: up to the sharpest point near by, and down from the weights."""

    def __init__(self, parameters, rho=0.1, lr=0.1):
        super().__init__(parameters, {})
        self.rho, self.lr = rho, lr

    def _weights(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self):
        self.before = [p.clone() for p in self._weights()]
        norm = torch.stack([p.grad.norm() for p in self._weights()]).norm()
        for p in self._weights():
            p += self.rho * p.grad / norm
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, before in zip(self._weights(), self.before, strict=True):
            p.copy_(before - self.lr * p.grad)
        self.zero_grad()


PASSES = """
optimizer = Sam(model.parameters())
def is_finite(): return all(p.grad.isfinite().all() for p in model.parameters())
for factors in batches:
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(new_loss() * factors[0]).backward()
    {check}
    optimizer.first_step()
    scaler.scale(new_loss() * factors[1]).backward()
    {check_and_restore}
    optimizer.second_step()
"""
UNSCALED = """scaler.unscale_(optimizer)
    scaler.update()
    if not is_finite():
        {restore}
        optimizer.zero_grad()
        continue
"""
RESTORE = "for p, value in zip(model.parameters(), before): p.data.copy_(value)"
IN_BF16 = HEAD.replace("float16", "bfloat16").replace(
    'GradScaler("cpu"', 'GradScaler("cpu", enabled=False'
)


@does("migrate.stepped_in_passes")
@pytest.mark.parametrize(
    "overflow", [(float("inf"), 1.0), (1.0, float("inf"))], ids=["first", "second"]
)
def test_both_passes_of_sam_are_unscaled_and_left_out_where_they_overflow(overflow):
    wrong = HEAD + PASSES.format(check="", check_and_restore="")
    right = HEAD + PASSES.format(
        check=UNSCALED.format(restore="pass"), check_and_restore=UNSCALED.format(restore=RESTORE)
    )
    assert says("migrate.stepped_in_passes", found(wrong))
    assert found(right) == ""
    batches = [(1.0, 1.0), overflow]
    assert not run(wrong, Sam=Sam, batches=batches)["model"].weight.isfinite().all()
    once = run(right, Sam=Sam, batches=batches[:1])["model"].weight
    left = run(right, Sam=Sam, batches=batches)["model"].weight
    assert torch.equal(once, left)
    # Unscaled: 1 - lr * gradient, at the weights that the first pass has moved to.
    assert moved(run(right, Sam=Sam, batches=batches)) == pytest.approx(
        0.2 * (2 + 0.1 * 2**0.5), rel=1e-2
    )
    plain = IN_BF16 + PASSES.format(check="", check_and_restore="")
    assert found(plain) == ""
    in_bf16 = run(plain, Sam=Sam, batches=batches[:1])
    assert moved(in_bf16) == pytest.approx(
        moved(run(right, Sam=Sam, batches=batches[:1])), rel=2e-2
    )


REFUSED_LOSS = """
import torch
import torch.nn.functional as F

x = torch.ones(2, 3, device="cuda")
with torch.autocast("cuda", dtype=torch.float16):
    logits = x @ x.T
    loss = F.binary_cross_entropy(logits.sigmoid(), torch.ones_like(logits))
"""


@does("migrate.refused_loss")
def test_a_loss_of_probabilities_in_autocast_for_cuda():
    """On fake tensors, under the rules of CUDA."""
    said = found(REFUSED_LOSS)
    assert says("migrate.refused_loss", said)
    assert "F.binary_cross_entropy_with_logits" in said
    right = REFUSED_LOSS.replace("entropy(logits.sigmoid()", "entropy_with_logits(logits")
    assert "logits.float().sigmoid()" in said
    right += "probabilities = logits.float().sigmoid()\n"
    assert found(right) == ""
    with cuda_rules():
        logits = torch.ones(2, 2, device="cuda").half()
        target = torch.ones(2, 2, device="cuda")
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(logits.sigmoid(), target)
        assert F.binary_cross_entropy_with_logits(logits, target).dtype is torch.float32
