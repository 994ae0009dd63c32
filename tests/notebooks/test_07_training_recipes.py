"""Notebook 07: its recipes mark all they change and hold for every optimizer; its links lead on."""

import functools
import re

import pytest
import torch
from definitions import check_marks, definitions, names_defined

import build_pairs

SOURCE = build_pairs.FOLDER / "07_training_recipes.py"
SETTINGS = ("inputs", "targets", "batches", "MAX_NORM", "GROUP", "PENALTY", "scores")
RECIPES = ("train", "clip", "accumulate", "penalty", "schedule", "average", "evaluate")
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
] + [("LinearReLU", "AmpLinearReLU")]


def test_there_is_a_pair_for_each_recipe_that_changes_the_loop():
    assert len(PAIRS) == 10
    assert {f"{name}_plain" for name in (*RECIPES, "several", "save")} < {a for a, _ in PAIRS}


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


def test_links_within_the_notebook_lead_to_headings_and_every_recipe_is_linked_twice():
    """JupyterLab and GitHub make the anchor of a heading from its text, with - for spaces."""
    text = "\n".join(
        c.source for c in build_pairs.read_source(SOURCE).cells if c.cell_type == "markdown"
    )
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    first, last = headings.index("Clip gradients"), headings.index("Summary")
    recipes = headings[first:last]
    assert len(recipes) == 14
    assert all(re.fullmatch(r"[A-Za-z ]+", heading) for heading in recipes)
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert links == [heading.replace(" ", "-") for heading in recipes] * 2
