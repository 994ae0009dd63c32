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


def test_a_loop_that_gives_a_name_another_value_casts_no_parameter():
    model = nn.Linear(2, 2).bfloat16()
    for parameter in model.parameters():
        parameter = parameter.float()
    assert model.weight.dtype is torch.bfloat16
    assert model.float().weight.dtype is torch.float32
