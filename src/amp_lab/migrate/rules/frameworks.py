"""Mistakes with accelerate and Fabric: an unused model, clipping in each batch, a lost wrapper."""

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import CodeReader, Mistakes
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = ("abric .setup", "accumulate .clip_grad_", "keep_fp32_wrapper")
_SETUP_UNUSED = remedy(
    "migrate.setup_unused",
    "the result of fabric.setup is not used",
    "setup returns a new model that runs under autocast; the old model runs without autocast: "
    "write {model} = {call}",
    failure="AMP0292",
)
_CLIPPED_EACH_BATCH = remedy(
    "migrate.clipped_each_batch",
    "accelerate clips in each micro-batch of an accumulation",
    "this clips, and unscales, in each micro-batch: call it only if {accelerator}.sync_gradients",
    failure="AMP0010",
)
_WRAPPER_REMOVED = remedy(
    "migrate.wrapper_removed",
    "unwrap_model takes autocast out of the prepared model",
    "keep_fp32_wrapper=False takes autocast out of the prepared model too: if you train on after "
    "this line, leave out the argument",
    failure="AMP0299",
)
_SETUPS = ("setup", "setup_module")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def run(file: Rewriter) -> None:
    """Report a dropped result of ``setup`` and clipping in each batch; note a lost wrapper."""
    file.report("mistake", _setup_unused(file.code))
    file.report("mistake", _clipped_each_batch(file.code))
    file.report("note", _wrapper_removed(file.code))


def _setup_unused(code: CodeReader) -> Mistakes:
    """Yield each ``fabric.setup(model, …)`` whose result is thrown away."""
    for call in code.tree.calls:
        parts = nodes.name_parts(call.func)
        if parts is None or len(parts) < 2 or parts[-1] not in _SETUPS:
            continue
        is_dropped = isinstance(code.tree.parents[call], cst.Expr)
        if not parts[-2].lower().endswith("fabric") or not call.args or not is_dropped:
            continue
        if any(arg.star for arg in call.args):
            continue
        names = ", ".join(code.tree.code(arg.value) for arg in call.args if arg.keyword is None)
        if names:
            yield call, _SETUP_UNUSED.sentence(model=names, call=code.tree.code(call))


def _clipped_each_batch(code: CodeReader) -> Mistakes:
    """Yield each ``accelerator.clip_grad_norm_`` in ``accumulate`` without a condition."""
    for call in code.tree.calls:
        parts = nodes.name_parts(call.func)
        if parts is None or len(parts) < 2 or parts[-1] not in _CLIPS:
            continue
        owner = parts[:-1]
        for outer, child in code.tree.ancestors(call):
            if isinstance(outer, cst.If | cst.IfExp | cst.BooleanOperation | cst.FunctionDef):
                break  # a condition may ask for the last batch
            if isinstance(outer, cst.With) and child is outer.body and _accumulates(outer, owner):
                yield call, _CLIPPED_EACH_BATCH.sentence(accelerator=".".join(owner))
                break


def _accumulates(block: cst.With, owner: tuple[str, ...]) -> bool:
    """Whether a ``with`` calls ``accumulate`` of the same accelerator."""
    wanted = (*owner, "accumulate")
    calls = [item.item for item in block.items if isinstance(item.item, cst.Call)]
    return any(nodes.name_parts(call.func) == wanted for call in calls)


def _wrapper_removed(code: CodeReader) -> Mistakes:
    """Yield each ``unwrap_model(…, keep_fp32_wrapper=False)`` in a loop."""
    for call in code.tree.calls:
        if nodes.called_name(call) != "unwrap_model":
            continue
        is_in_loop = code.tree.is_in(call, cst.For) or code.tree.is_in(call, cst.While)
        if is_in_loop and nodes.is_false(code.arguments(call).get("keep_fp32_wrapper")):
            yield call, _WRAPPER_REMOVED.text
