"""Notebook 07: recipes mark all they change and hold for every optimizer; what it only says."""

import functools
import inspect
import math
import re
import types
import warnings
from contextlib import nullcontext

import pytest
import torch
from definitions import check_marks, definitions, names_defined
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import build_pairs

SOURCE = build_pairs.FOLDER / "07_training_recipes.py"
SETTINGS = ("inputs", "targets", "batches", "MAX_NORM", "GROUP", "PENALTY")
RECIPES = ("train", "clip", "accumulate", "penalty", "schedule", "average")
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2),
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}
IMPLEMENTATIONS = {
    "default": {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.fixture
def one_thread():
    """One CPU thread, as in the notebook: its tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def notebook() -> dict:
    """What the notebook's imports, functions and settings define; no other cell is run."""
    torch.manual_seed(0)
    return definitions(SOURCE, SETTINGS, device=torch.device("cpu"))


PAIRS = [
    (name, f"{name.removesuffix('_plain')}_amp")
    for name in names_defined(SOURCE)
    if name.endswith("_plain")
]


def test_there_is_a_pair_for_each_recipe_that_changes_the_loop():
    assert [plain for plain, _ in PAIRS] == [f"{name}_plain" for name in RECIPES]


@pytest.mark.parametrize(("plain", "amp"), PAIRS)
def test_every_changed_line_is_marked_and_nothing_else_changed(plain, amp):
    check_marks(SOURCE, plain, amp, "AMP")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recipes_hold_for_every_optimizer(optimizer, implementation):
    """In fp16 and bf16 the weights move as in fp32, to within 4 roundings of that dtype."""
    make = functools.partial(OPTIMIZERS[optimizer], **IMPLEMENTATIONS[implementation])
    cells = notebook()
    change = functools.partial(
        cells["change"], make_optimizer=lambda model: make(model.parameters())
    )
    for recipe in RECIPES:
        reference = change(cells[f"{recipe}_plain"])
        assert reference.norm() > 0.01
        for dtype in (torch.float16, torch.bfloat16):
            found = change(cells[f"{recipe}_amp"], dtype)
            tolerance = 4 * torch.finfo(dtype).eps / 2
            assert cells["distance"](found, reference) < tolerance, (recipe, dtype)


def test_a_gradient_that_overflows_is_clipped_to_nan_and_its_step_skipped():
    cells = notebook()
    model, optimizer, scaler = cells["new_run"]()
    before = [p.detach().clone() for p in model.parameters()]
    cells["backward"](model, scaler, weight=math.inf)
    scaler.unscale_(optimizer)
    assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite()
    scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_small_batches_add_up_to_a_large_one():
    cells = notebook()

    def large_batches(model, optimizer):
        for x, y in zip(cells["inputs"].split(32), cells["targets"].split(32), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    found = cells["change"](cells["accumulate_plain"])
    assert cells["distance"](found, cells["change"](large_batches)) < 1e-5  # the order of sums


def test_unscale_or_update_alone_after_every_batch_is_refused():
    cells = notebook()
    model, optimizer, scaler = cells["new_run"]()
    cells["backward"](model, scaler)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)


def test_a_penalty_that_overflows_is_skipped():
    cells = notebook()
    model, optimizer, scaler = cells["new_run"](init_scale=2.0**40)
    before = [p.detach().clone() for p in model.parameters()]
    cells["penalty_amp"](model, optimizer, scaler, torch.float16)
    assert scaler.get_scale() == 2.0**35
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_the_warning_of_a_careless_schedule_cannot_be_relied_on(fused):
    """A fused optimizer's `step` is called every time, and its kernel does the skipping."""
    cells = notebook()
    make = functools.partial(torch.optim.SGD, lr=0.1, fused=fused)
    run = cells["new_run"](lambda model: make(model.parameters()), init_scale=2.0**20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cells["schedule_careless"](*run)
    assert run[2].get_scale() < 2.0**20
    assert bool(caught) != fused


def test_a_checkpoint_runs_again_in_the_state_of_autocast_of_its_first_run():
    states, layer = [], torch.nn.Linear(8, 8)

    def watched(x):
        states.append(torch.is_autocast_enabled("cpu"))
        return layer(x)

    with torch.autocast("cpu", dtype=torch.float16):
        x = torch.ones(2, 8)
        loss = torch.utils.checkpoint.checkpoint(watched, x, use_reentrant=False).float().sum()
    states.append(torch.is_autocast_enabled("cpu"))
    loss.backward()
    assert states == [True, False, True]


@pytest.mark.filterwarnings("ignore")  # that asks to choose between the two kinds of checkpoint
def test_an_optimizer_that_has_other_parameters_too_hides_a_part_without_gradients():
    model, optimizer, scaler = notebook()["new_run"]()
    before = model[0].weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = checkpoint(model[:2], torch.ones(2, 8), use_reentrant=True)
        loss = model[2](hidden).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)
    assert model[2].weight.grad is not None


def test_an_optimizer_with_two_groups_steps_as_a_whole_or_not_at_all():
    cells = notebook()

    def two_groups(model):
        return torch.optim.SGD([{"params": model[i].parameters()} for i in (0, 2)], lr=0.1)

    model, optimizer, scaler = cells["new_run"](two_groups)
    before = [p.detach().clone() for p in model.parameters()]
    cells["backward"](model, scaler)
    model[0].weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_function_without_the_decorators_fails_in_the_backward_pass():
    bare = types.SimpleNamespace(save_for_backward=lambda *saved: None)
    x, weight, output = torch.ones(2, 8), torch.ones(4, 8), torch.ones(2, 4)
    bare.saved_tensors = (x, weight, output)
    backward = inspect.unwrap(notebook()["LinearReLU"].backward)
    with pytest.raises(RuntimeError, match="same dtype"):
        backward(bare, torch.ones(2, 4, dtype=torch.float16))


def test_adam_without_the_scaler_takes_the_step_that_overflowed():
    cells = notebook()
    model, optimizer, scaler = cells["new_run"](lambda m: torch.optim.Adam(m.parameters()))
    cells["backward"](model, scaler, weight=math.inf)
    optimizer.step()
    assert any(p.isnan().any() for p in model.parameters())


def test_weights_of_bf16_stand_still_in_small_steps():
    cells = notebook()
    make = functools.partial(torch.optim.SGD, lr=1e-4)
    moved = [
        cells["change"](
            cells["train_amp"],
            torch.bfloat16,
            make_model=lambda dtype=dtype: cells["new_model"]().to(dtype),
            make_optimizer=lambda model: make(model.parameters()),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    in_fp32, in_bf16 = (found.count_nonzero() / found.numel() for found in moved)
    assert in_fp32 > 0.9
    assert in_bf16 < 0.1


def test_frozen_layers_may_be_fp16():
    cells = notebook()

    def train(dtype):
        model, _, scaler = cells["new_run"]()
        model[0].requires_grad_(False).to(dtype)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        cells["train_amp"](model, optimizer, scaler, torch.float16)
        return model[2].weight

    assert torch.equal(train(torch.float16), train(torch.float32))


def one_step_with_an_infinite_gradient(dtype, **clipping):
    """The weights after a step of the loop that clips, one of whose gradients is inf."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.ones(3, 4)).sum() * torch.inf
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **clipping)
    scaler.step(optimizer)
    scaler.update()
    return model.weight


def test_an_infinite_gradient_is_skipped_in_fp16_and_has_to_be_refused_in_bf16():
    assert one_step_with_an_infinite_gradient(torch.float16).isfinite().all()
    assert one_step_with_an_infinite_gradient(torch.bfloat16).isnan().all()
    with pytest.raises(RuntimeError, match="non-finite"):
        one_step_with_an_infinite_gradient(torch.bfloat16, error_if_nonfinite=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loop_of_the_cheat_sheet_loses_no_weights(dtype):
    """As it is printed there, on a batch whose loss overflows."""
    page = (build_pairs.FOLDER.parent / "CHEATSHEET.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## The loop\n\n```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    names = {"torch": torch, "device": torch.device("cpu"), "dtype": dtype, "model": model}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for factor in (1.0, torch.inf):
        names |= {"batches": [(torch.ones(3, 4), factor)]}
        names |= {"loss_fn": lambda output, factor: output.float().mean() * factor}
        before = model.weight.detach().clone()
        refused = factor == torch.inf and dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="non-finite") if refused else nullcontext():
            exec(code, names)
        assert torch.equal(model.weight, before) == (factor == torch.inf)
    assert model.weight.isfinite().all()


def test_links_within_the_notebook_lead_to_headings_and_every_recipe_is_linked():
    """JupyterLab and GitHub make the anchor of a heading from its text, with - for spaces."""
    text = "\n".join(
        c.source for c in build_pairs.read_source(SOURCE).cells if c.cell_type == "markdown"
    )
    headings = re.findall(r"^##[#]? (\D.+)$", text, re.MULTILINE)
    first, last = headings.index("Clip gradients"), headings.index("Summary")
    anchors = [heading.replace(" ", "-") for heading in headings[first:last]]
    main = anchors.index("More-recipes-(optional)")
    assert (main, len(anchors)) == (7, 14)
    links = re.findall(r"\]\(#(\S+)\) \|", text)
    assert links == anchors[: main + 1] + anchors[:main] + anchors[main + 1 :]


def keep_matmuls(context, op, *args, **kwargs):
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("shares_a_weight", [True, False])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_selective_checkpointing_of_a_shared_weight_needs_the_cache_off(
    one_thread, shares_a_weight, cache_enabled
):
    """As the recipe on checkpointing says."""
    select = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        for region in (layer, layer if shares_a_weight else nn.Linear(8, 8)):
            x = checkpoint(region, x, use_reentrant=False, context_fn=select)
    loss = x.float().sum()
    if shares_a_weight and cache_enabled:
        with pytest.raises(RuntimeError, match="not found in storage"):
            loss.backward()
    else:
        loss.backward()
        assert layer.weight.grad is not None


@pytest.mark.parametrize(("cache_enabled", "casts"), [(True, 0), (False, 1)])
def test_the_second_region_of_a_shared_weight_finds_its_cast_in_the_cache(
    one_thread, cache_enabled, casts
):
    """Why, as section 21 of notebook 08 says: its second run finds no cast that was recorded."""
    seen = []

    def policy(context, op, *args, **kwargs):
        if op is torch.ops.aten._to_copy.default:
            seen.append(context.is_recompute)
        return keep_matmuls(context, op)

    select = functools.partial(create_selective_checkpoint_contexts, policy)
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        for _ in range(2):
            seen.clear()
            x = checkpoint(layer, x, use_reentrant=False, context_fn=select)
    assert seen == [False] * casts  # in the forward pass of the second region
