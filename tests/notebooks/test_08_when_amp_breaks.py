"""Notebook 08: every failure has the same parts, and every message leads to its section."""

import re
from contextlib import nullcontext

import nbformat
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import build_pairs
from amp_lab.difference import compare_runs

PAIR = nbformat.read(build_pairs.find(["08"])[0].with_suffix(".ipynb"), as_version=4)
PARTS = [
    "What you see.",
    "The smallest program that does it.",
    "Why.",
    "The fix.",
    "Notice it earlier.",
]


def sections() -> dict[str, list[nbformat.NotebookNode]]:
    """The cells of each failure, by its heading; from `## Summary` on nothing counts."""
    found, current = {}, None
    for cell in PAIR.cells:
        if cell.cell_type == "markdown":
            heading = re.match(r"(#+) (.+)", cell.source)
            if heading and heading[2] == "Summary":
                break
            if heading:
                current = heading[2] if heading[1] == "###" else None
        if current:
            found.setdefault(current, []).append(cell)
    return found


def markdown(cells) -> str:
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def code_and_output(cells) -> str:
    code = [cell for cell in cells if cell.cell_type == "code"]
    asserts = [line for cell in code for line in cell.source.splitlines()]
    return "\n".join([*asserts, *(out.get("text", "") for cell in code for out in cell.outputs)])


def index() -> list[tuple[str, str, bool]]:
    """Message, anchor, and whether it is but quoted, of every row of the first table."""
    text = markdown(PAIR.cells)
    row = r"^\| (`+)( ?)(.+?)\2\1 \| \[[^]]+\]\(#([^)]+)\)(, quoted)? \|$"
    return [(found[3], found[4], bool(found[5])) for found in re.finditer(row, text, re.MULTILINE)]


def anchors() -> dict[str, str]:
    return {heading.replace(" ", "-"): heading for heading in sections()}


def test_there_are_at_least_twenty_sections_numbered_without_a_gap():
    numbers = [int(heading.split()[0]) for heading in sections()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 20


def test_all_sections_have_the_same_parts_in_order():
    for heading, cells in sections().items():
        assert re.findall(r"^\*\*(.+?)\*\*", markdown(cells), re.MULTILINE) == PARTS, heading
        assert sum(cell.cell_type == "code" and "assert" in cell.source for cell in cells) >= 2


def test_every_link_leads_to_a_heading():
    links = re.findall(r"\]\(#([^)]+)\)", markdown(PAIR.cells))
    assert len(links) > 40
    assert set(links) <= set(anchors())
    assert set(links) == set(anchors())  # and every section is in one of the tables


def test_every_message_of_the_index_is_quoted_in_its_section_and_produced_there():
    assert len(index()) >= 30
    assert sum(quoted for *_, quoted in index()) == 10  # those that need a GPU or another package
    for message, anchor, quoted in index():
        cells = sections()[anchors()[anchor]]
        assert message in markdown(cells), message
        assert quoted or message in code_and_output(cells), message
        assert not any(message.startswith(other) and message != other for other, *_ in index()), (
            f"{message} would also find another"
        )


def test_probabilities_are_taken_in_fp32_outside_of_autocast():
    """Section 22: refused inside, computed with autocast off, and wrong as logits."""
    p, target = torch.tensor([0.25, 0.75]), torch.tensor([0.0, 1.0])
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            on_card, wanted = (torch.empty(2, device="cuda") for _ in range(2))
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(on_card, wanted)
            with torch.autocast("cuda", enabled=False):
                assert F.binary_cross_entropy(on_card, wanted).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    as_logits = F.binary_cross_entropy_with_logits(p, target)
    assert not torch.isclose(as_logits, F.binary_cross_entropy(p, target), rtol=0.1)


@pytest.mark.parametrize("updates", [True, False])
def test_an_iteration_that_unscales_updates_though_it_steps_not(updates):
    """Section 10, the other cause."""
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    expected = nullcontext() if updates else pytest.raises(RuntimeError, match="already been call")
    with expected:
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
            if updates:
                scaler.update()


@pytest.mark.parametrize(("way", "scales"), [("manual_backward", True), ("backward", False)])
def test_lightning_scales_only_in_its_manual_backward(way, scales):
    """Section 12: a loss that goes backward by itself passes the scaler by."""
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    precision = pytest.importorskip("lightning.pytorch.plugins").MixedPrecision
    accelerator = pytest.importorskip("lightning.pytorch.accelerators").CPUAccelerator()
    strategy = pytest.importorskip("lightning.pytorch.strategies").SingleDeviceStrategy
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = precision("16-mixed", "cpu", scaler=scaler)

    class Manual(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

    module = Manual()
    trainer = lightning.Trainer(
        strategy=strategy(device="cpu", accelerator=accelerator, precision_plugin=plugin),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module.trainer = trainer
    trainer.strategy._lightning_module = module
    loss = module.layer(torch.ones(1, 1)).sum()
    if way == "manual_backward":
        module.manual_backward(loss)
    else:
        loss.backward()
    assert (module.layer.weight.grad.item() == 1024) == scales


class Fp32Linear(nn.Linear):
    """An island that is a layer itself."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def test_an_island_that_is_a_subclass_keeps_the_names_of_the_layer():
    """Section 1."""
    layer, island = nn.Linear(2, 2), Fp32Linear(2, 2)
    island.load_state_dict(layer.state_dict())
    with torch.no_grad():
        island.weight.fill_(60000.0)
    with torch.autocast("cpu", torch.float16):
        output = island(torch.ones(1, 2).half())
    assert output.dtype is torch.float32
    assert output.isfinite().all()


def test_a_gradient_that_is_unscaled_in_fp16_vanishes():
    """Section 9: 2^-26 is a number of fp32 alone."""
    parameter = nn.Parameter(torch.ones(1).half())
    parameter.sum().backward()
    assert parameter.grad.dtype is torch.float16
    scaled = torch.tensor(2.0**-26).mul(4096).half()
    assert scaled > 0
    assert scaled / 4096 == 0
    assert scaled.float() / 4096 == 2.0**-26


@pytest.mark.parametrize("overflows", [False, True])
def test_nothing_skips_the_first_step_of_an_optimizer_with_two_passes(overflows):
    """Section 13: SAM climbs to a worse point, goes back, and steps with the gradient of there."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")

    def gradients(factor):
        optimizer.zero_grad()
        scaler.scale(weight.square().sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.update()

    for step in range(3):
        gradients(torch.inf if overflows and step == 0 else 1.0)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.05 * weight.grad / weight.grad.norm())  # the first step
        gradients(1.0)
        with torch.no_grad():
            weight.copy_(before)
        optimizer.step()
    assert weight.isfinite().all() != overflows


@pytest.mark.filterwarnings("ignore")  # the old quantization of torch says that it is old
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fake_quantization_that_is_fused_takes_fp32_alone_and_the_other_one_runs(dtype):
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    x = torch.randn(2, 4)

    def prepared(**version):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
        return prepare_qat_fx(model, get_default_qat_qconfig_mapping("fbgemm", **version), (x,))

    with torch.autocast("cpu", dtype=dtype):
        with pytest.raises(RuntimeError, match="expected scalar type Float but found"):
            prepared()(x)
        output = prepared(version=0)(x)
    output.float().sum().backward()
    assert output.dtype is dtype


def test_data_that_forward_casts_stays_cast():
    """Section 29: a loss with weights of its own, as a library of metric losses had."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            self.W.data = self.W.to(x.dtype)
            return (x @ self.W).sum()

    loss = Loss()
    loss(torch.ones(1, 2).bfloat16())
    assert loss.W.dtype is torch.bfloat16
    loss.W.data = loss.W.float()
    loss(torch.ones(1, 2))
    assert loss.W.dtype is torch.float32


class BoxMask(nn.Module):
    """Which rows of an image lie in a box, counted from above."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.dtype = dtype

    def forward(self, box):  # first and last row
        box = box.to(self.dtype)
        rows = torch.arange(2100, dtype=box.dtype)
        return ((rows >= box[0]) & (rows <= box[1])).float().cumsum(0)


def test_diff_names_an_arange_in_fp16_only_if_the_boxes_are_cast():
    """Section 30: rows 2048 and 2049 are the same number of fp16, so the box gets both."""
    box = torch.tensor([10.0, 2048.0])
    exact, rounded = BoxMask(), BoxMask(torch.float16)
    assert rounded(box)[-1] == exact(box)[-1] + 1

    def under_autocast(box):
        with torch.autocast("cpu", dtype=torch.float16):
            return exact(box)

    assert compare_runs(exact, rounded, box).first.op == "arange"
    assert compare_runs(exact, under_autocast, box).first is None


def test_a_loop_that_gives_a_name_another_value_casts_no_parameter():
    model = nn.Linear(2, 2).bfloat16()
    for parameter in model.parameters():
        parameter = parameter.float()
    assert model.weight.dtype is torch.bfloat16
    assert model.float().weight.dtype is torch.float32


@pytest.mark.parametrize("value", [150_000.0, 1e-4 / 16384, -1e9, 1e-8, 300.0**2, 1e6, 2.0**17])
def test_what_leaves_the_range_of_fp16_stays_in_that_of_bf16(value):
    """Sections 1 and 3 to 8: a number that fp16 makes infinite or zero."""
    assert torch.tensor(value).half().abs() in (0, torch.inf)
    assert torch.tensor(value).bfloat16().abs() not in (0, torch.inf)


@pytest.mark.parametrize(
    ("weights", "inputs", "said"),
    [
        (torch.float32, torch.float16, "Half and Float"),
        (torch.float16, torch.float32, "Float and Half"),
        (torch.float32, torch.bfloat16, "BFloat16 and Float"),
    ],
)
def test_a_message_has_the_dtypes_in_the_order_of_the_program(weights, inputs, said):
    with pytest.raises(RuntimeError, match=f"mat1 and mat2 .* but got {said}"):
        nn.Linear(2, 2, dtype=weights)(torch.ones(1, 2, dtype=inputs))


@pytest.mark.parametrize("cause", ["no backward", "another copy", "a cut graph"])
def test_an_optimizer_without_gradients_is_refused(cause):
    """Section 11, the other causes."""
    model, copy = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD((copy if cause == "another copy" else model).parameters())
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(model(torch.ones(1, 2)).sum())
    if cause == "another copy":
        loss.backward()
    if cause == "a cut graph":
        cut = scaler.scale(torch.tensor(loss.item()))
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            cut.backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_a_scale_that_is_left_out_later_raises_nothing():
    """Section 12."""
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    for scale in (scaler.scale, nn.Identity()):
        optimizer.zero_grad()
        scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert model.bias.grad.item() == 2.0**-16  # divided all the same


def test_a_closure_passed_by_position_gets_scaled_gradients_that_nobody_checks():
    """Section 13: the optimizer sees what the closure left, and steps with infinities too."""
    seen = []

    class WithClosure(torch.optim.SGD):
        def step(self, closure):
            closure()
            seen.append(weight.grad.item())
            super().step()

    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = WithClosure([weight], lr=0.1), torch.amp.GradScaler("cpu")
    for factor in (1.0, torch.inf):

        def closure(factor=factor):
            optimizer.zero_grad()
            scaler.scale(factor * weight.sum()).backward()

        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer, closure)
        scaler.update()
    assert seen == [2.0**16, torch.inf]
    assert not weight.isfinite()


@pytest.mark.parametrize("skipped", [0, 1])
def test_the_scheduler_warns_at_its_first_call_alone(skipped):
    """Section 14."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    expected = nullcontext()  # a warning would be an error here
    if skipped == 0:
        expected = pytest.warns(UserWarning, match="before `optimizer.step")
    with expected:
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.inf if step == skipped else 1.0
            scaler.scale(factor * weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert scaler.get_scale() == 2.0**15  # one step was skipped either way


@pytest.mark.parametrize("beside", ["class weights", "sampling grid", "initial state"])
def test_a_tensor_beside_the_weights_that_stayed_in_fp32_is_refused(beside):
    """Section 18, in a model that is cast as a whole."""
    x = torch.ones(1, 2).half()
    calls = {
        "class weights": lambda: F.cross_entropy(x, torch.tensor([0]), weight=torch.ones(2)),
        "sampling grid": lambda: F.grid_sample(
            x[None, None], torch.zeros(1, 1, 1, 2), align_corners=False
        ),
        "initial state": lambda: nn.GRU(2, 2).half()(x[None], torch.zeros(1, 1, 2)),
    }
    said = "expected scalar type Half but found Float|must have the same dtype"
    with pytest.raises(RuntimeError, match=said):
        calls[beside]()


def test_adam_refuses_a_model_that_was_cast_between_two_steps():
    """Section 46."""
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    model.bfloat16()
    with pytest.raises(RuntimeError, match="expected dtype float for `end`"):
        adam.step()


def test_fused_adam_loads_a_small_moment_into_fp16_and_divides_by_no_zero():
    """Section 46: it adds its epsilon in fp32."""
    weights = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).half())]
    single, fused = torch.optim.Adam(weights[:1]), torch.optim.Adam(weights[1:], fused=True)
    for adam, weight in ((single, weights[0]), (fused, weights[1])):
        weight.grad = torch.full_like(weight, 1e-5)
        if adam is fused:
            adam.load_state_dict(single.state_dict())
            adam.param_groups[0]["fused"] = True  # it was loaded too
        adam.step()
    assert fused.state[weights[1]]["exp_avg_sq"].dtype is torch.float16
    assert fused.state[weights[1]]["exp_avg_sq"] == 0
    assert weights[1].isfinite()


def test_a_ratio_of_probabilities_needs_the_logits_in_fp32():
    """The third table: log-probabilities of 7 are 2^-5 apart in bf16."""
    torch.manual_seed(0)
    old = torch.randn(64, 1000)
    old, new = old.bfloat16(), (old + 0.01 * torch.randn(64, 1000)).bfloat16()

    def log_ratio(dtype):
        return F.log_softmax(new.to(dtype), -1).double() - F.log_softmax(old.to(dtype), -1).double()

    exact = log_ratio(torch.float64)
    assert (log_ratio(torch.float32) - exact).abs().max() < 1e-4
    assert (log_ratio(torch.bfloat16) - exact).abs().max() > 1e-2
