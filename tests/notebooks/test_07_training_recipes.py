"""Notebook 07: recipes mark all they change and hold for every optimizer; what it only says."""

import functools
import math
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from definitions import check_marks, definitions, names_defined
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from course import recipes

import build_pairs

SOURCE = build_pairs.FOLDER / "07_training_recipes.py"
RECIPES = ("train", "clip", "accumulate", "penalty", "schedule")
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
    problem = recipes.SmallProblem(torch.device("cpu"))
    given = {
        "device": problem.device,
        "problem": problem,
        "batches": problem.batches,
        "new_model": problem.new_model,
    }
    return definitions(SOURCE, **given)


PLAIN = [name for name in names_defined(Path(recipes.__file__)) if name.endswith("_plain")]


def test_there_is_a_pair_for_each_recipe_that_changes_the_loop():
    assert [f"{name}_plain" for name in RECIPES] == PLAIN


@pytest.mark.parametrize("name", RECIPES)
def test_every_changed_line_is_marked_and_nothing_else_changed(name):
    plain_source = Path(recipes.__file__)
    check_marks(SOURCE, f"{name}_plain", f"{name}_amp", "AMP", plain_source)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recipes_hold_for_every_optimizer(optimizer, implementation):
    """In fp16 and bf16 the weights move as in fp32, to within 4 roundings of that dtype."""
    make = functools.partial(OPTIMIZERS[optimizer], **IMPLEMENTATIONS[implementation])
    cells = notebook()
    change = functools.partial(
        cells["problem"].change, make_optimizer=lambda model: make(model.parameters())
    )
    for recipe in RECIPES:
        reference = change(getattr(recipes, f"{recipe}_plain"))
        assert reference.norm() > 0.01
        for dtype in (torch.float16, torch.bfloat16):
            found = change(cells[f"{recipe}_amp"], dtype)
            tolerance = 4 * torch.finfo(dtype).eps / 2
            assert recipes.distance(found, reference) < tolerance, (recipe, dtype)


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
    problem = notebook()["problem"]

    def large_batches(model, optimizer, batches):
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        for x, y in zip(inputs.split(32), targets.split(32), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    found = problem.change(recipes.accumulate_plain)
    assert recipes.distance(found, problem.change(large_batches)) < 1e-5  # the order of sums


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
    model, optimizer, _ = cells["new_run"]()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [p.detach().clone() for p in model.parameters()]
    cells["penalty_amp"](model, optimizer, scaler, torch.float16)
    assert scaler.get_scale() == 2.0**35
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_penalty_of_scaled_gradients_is_too_large_by_the_square_of_the_scale():
    cells = notebook()
    model, _, scaler = cells["new_run"]()
    x, y = cells["batches"][0]
    loss = torch.nn.functional.mse_loss(model(x), y)
    penalties = [
        sum(
            g.square().sum()
            for g in torch.autograd.grad(part, model.parameters(), retain_graph=True)
        )
        for part in (scaler.scale(loss), loss)
    ]
    assert math.isclose(penalties[0] / penalties[1], 2.0**32, rel_tol=1e-3)


def careless_schedule(model, optimizer, scaler):
    """The loop that moves the schedule on after each step, taken or not."""
    scheduler = recipes.decay(optimizer)
    for batch in range(5):
        optimizer.zero_grad()
        notebook()["backward"](model, scaler, batch)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@pytest.mark.parametrize("fused", [False, True])
def test_the_warning_of_a_careless_schedule_cannot_be_relied_on(fused):
    """A fused optimizer's `step` is called every time, and its kernel does the skipping."""
    cells = notebook()
    make = functools.partial(torch.optim.SGD, lr=0.1, fused=fused)
    model, optimizer, _ = cells["new_run"](lambda model: make(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        careless_schedule(model, optimizer, scaler)
    assert scaler.get_scale() < 2.0**20
    assert bool(caught) != fused


@pytest.mark.filterwarnings("ignore")  # the warning of the careless schedule
def test_skipped_steps_use_up_a_careless_schedule():
    cells = notebook()
    rates = []
    for loop in (careless_schedule, functools.partial(cells["schedule_amp"], dtype=torch.float16)):
        model, optimizer, _ = cells["new_run"]()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        loop(model, optimizer, scaler)
        rates.append(optimizer.param_groups[0]["lr"])
    skipped = round(20 - math.log2(scaler.get_scale()))
    assert skipped > 0
    assert math.isclose(rates[0], 0.01)
    assert math.isclose(rates[1], 0.1 * (1 - 0.9 * (5 - skipped) / 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_in_half_precision_may_never_move(dtype):
    """As "More recipes" says: each update is less than half the distance to the next number."""
    ends = []
    for kind in (torch.float32, dtype):
        weight = nn.ParameterList([nn.Parameter(torch.tensor(1.0, dtype=kind))])
        average = AveragedModel(weight, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        average.update_parameters(weight)  # the first call copies
        weight[0].data.fill_(1.2)
        for _ in range(500):
            average.update_parameters(weight)
        ends.append(average.module[0].item())
    assert ends[0] > 1.05
    assert ends[1] == 1


def test_an_average_of_an_amp_run_is_that_of_an_fp32_run():
    """As "More recipes" says."""
    problem = notebook()["problem"]
    averages = []
    for dtype in (None, torch.bfloat16):
        model = problem.new_model()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        optimizer = recipes.sgd(model)
        for x, y in problem.batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
        averages.append(parameters_to_vector(average.module.parameters()).detach())
    assert recipes.distance(averages[1], averages[0]) < 2.0**-6


def test_a_compiled_model_trains_as_in_fp32_and_is_compiled_again_without_its_autocast():
    problem = notebook()["problem"]

    def compiled():
        return torch.compile(problem.new_model(), backend="aot_eager")

    problem.check_same(recipes.train_plain, notebook()["train_amp"], make_model=compiled)
    torch.compiler.reset()
    model, x = compiled(), problem.batches[0][0]
    with torch.autocast("cpu", dtype=torch.float16):
        model(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.autocast("cpu", dtype=torch.float16):
            assert model(x).dtype is torch.float16  # the same state: nothing to compile
        with pytest.raises(RuntimeError, match="recompile"):
            model(x)  # no autocast


@pytest.mark.parametrize(
    ("outer_block", "sees_the_step"),
    [
        (nullcontext(), True),
        (torch.autocast("cpu", dtype=torch.float16), False),
        (torch.autocast("cpu", enabled=False), False),  # not even this
    ],
)
def test_an_evaluation_inside_the_block_of_training_uses_the_weights_before_the_step(
    outer_block, sees_the_step
):
    cells = notebook()
    model, optimizer, scaler = cells["new_run"]()
    x, y = cells["batches"][0]
    with outer_block:
        before = cells["backward"](model, scaler)
        scaler.step(optimizer)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            after = nn.functional.mse_loss(model(x), y)
    assert torch.equal(before, after) != sees_the_step


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


def test_an_optimizer_that_has_other_parameters_too_hides_a_part_without_gradients():
    """Without `use_reentrant`, which a warning asks for, `checkpoint` is of the older kind."""
    model, optimizer, scaler = notebook()["new_run"]()
    before = model[0].weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hidden = checkpoint(model[:2], torch.ones(2, 8))
        loss = model[2](hidden).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any("use_reentrant" in str(warning.message) for warning in caught)
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
        cells["problem"].change(
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


def test_a_scaler_on_a_cpu_takes_bf16_parameters():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=0.001)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.grad == 1
    assert weight == 1  # the update is rounded away


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


@pytest.mark.parametrize(
    ("dtype", "is_for_bf16"),
    [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_the_loops_of_the_cheat_sheet_lose_no_weights(dtype, is_for_bf16):
    """As it is printed there, on a batch whose loss overflows."""
    page = (build_pairs.FOLDER.parent / "CHEATSHEET.md").read_text(encoding="utf-8")
    for_both, for_bf16 = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = for_bf16 if is_for_bf16 else for_both
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
    assert anchors[-1] == "More-recipes"
    links = re.findall(r"\]\(#(\S+)\) \|", text)
    assert links == anchors + anchors[:-1]


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
