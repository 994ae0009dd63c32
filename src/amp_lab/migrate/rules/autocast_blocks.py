"""Mistakes with the end of an autocast block: backward in it, or a whole loop of steps."""

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
_BACKWARD_INSIDE = remedy(
    "migrate.backward_inside",
    "backward runs inside the autocast block",
    "backward runs inside autocast: end the block after the loss",
)
_LOOP_IN_ONE_BLOCK = remedy(
    "migrate.loop_in_one_block",
    "one autocast block contains a loop of training steps",
    "all steps run in this autocast block, so autocast keeps using the casts of the first weights: "
    "open a block for each forward pass, inside the loop",
    failure="AMP0026",
)


def run(file: Rewriter) -> None:
    """Note each backward inside autocast, and report each autocast around a loop of steps."""
    file.report("note", _backward_in_autocast(file.code))
    file.report("mistake", _loop_in_one_block(file.code))


def _backward_in_autocast(code: CodeReader) -> Mistakes:
    """Yield each backward inside autocast, unless `_loop_in_one_block` reports that block."""
    around_steps = _autocasts_around_steps(code)
    for event in code.events:
        if event.kind not in ("scaled", "backward"):
            continue
        if event.place.autocast not in (None, *around_steps):
            yield event.node, _BACKWARD_INSIDE.text


def _loop_in_one_block(code: CodeReader) -> Mistakes:
    """Yield each autocast around a whole training loop."""
    for call in _autocasts_around_steps(code):
        yield call, _LOOP_IN_ONE_BLOCK.text


def _autocasts_around_steps(code: CodeReader) -> list[cst.Call]:
    """The autocasts around a loop with a backward and a step.

    Without those with ``cache_enabled=False``, which keep no casts of weights that have changed.
    """
    with_backward: set[cst.Call] = set()
    with_step: set[cst.Call] = set()
    for event in code.events:
        place = event.place
        call = place.autocast
        if call is None or len(place.loops) <= place.autocast_loops:
            continue  # no loop is inside of the block
        if event.kind in ("scaled", "backward"):
            with_backward.add(call)
        elif event.kind == "scaler step" or code.is_optimizer_step(event):
            with_step.add(call)
    around = with_backward & with_step
    return [call for call in around if not _is_without_cache(code, call)]


def _is_without_cache(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call of autocast has ``cache_enabled=False``."""
    return nodes.is_false(code.arguments(call).get("cache_enabled"))
