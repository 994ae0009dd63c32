"""Mistakes of loops that accumulate gradients, and of several optimizers or scalers.

As in `mistakes`, each rule yields the nodes that are wrong and what to do, and says nothing where
code that is not seen may make it right.
"""

import sys

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Event, Found, last_part, of_kind
from amp_lab.remedies import remedy

# Packages in which no model calls autocast: where all imports are of these, the file is a whole
# program. A model of another package, or of another file, may have autocast in its forward pass.
_PACKAGES = {"torch", "torchvision", "torchaudio", "numpy", "scipy", "sklearn", "matplotlib"}
_PACKAGES |= {"PIL", "cv2", "pandas", "tensorboardX", "wandb", "yaml", "einops", "albumentations"}
_PACKAGES |= {"tqdm", "timm", *sys.stdlib_module_names}
_CASTS = {"half", "float16", "bfloat16"}
_MODELS = ("torchvision.models.", "timm.", "torch.nn.Sequential", "torch.nn.Linear")

_UNSCALED_EACH_BATCH = remedy(
    "migrate.unscaled_each_batch",
    "unscale_ runs for each of several batches that one step sums",
    "{scaler}.unscale_ runs for each batch, and must run once per step: call it before clipping "
    "and {scaler}.step({optimizer})",
)
_UNSCALED_BY_ANOTHER = remedy(
    "migrate.unscaled_by_another",
    "one scaler unscales, and another one steps",
    "{scaler} unscales, and {other}.step({optimizer}) unscales again: use only {other}, and scale "
    "the loss with it too",
)
_WITHOUT_AUTOCAST = remedy(
    "migrate.without_autocast",
    "a whole program scales its loss and has no autocast",
    "{scaler} scales, but nothing runs in autocast: put the forward pass and the loss in "
    "torch.autocast, or drop the scaler",
)


def unscaled_in_each_batch(code: CodeReader) -> Found:
    """``unscale_`` for each micro-batch, where only some of them step: the second one raises."""
    for unscale in of_kind("unscale", code.events):
        updates = unscale.unit.by_scaler["update", unscale.of]
        if not _are_less_often(updates, unscale) or not _is_scaled_beside(unscale):
            continue
        steps = unscale.unit.by_scaler["scaler step", unscale.of]
        is_rare = _are_less_often([e for e in steps if e.optimizer == unscale.optimizer], unscale)
        is_either = any(a.place.excludes(b.place) for a in updates for b in updates)
        if is_rare and not is_either and not code.escapes(last_part(unscale.of)):
            names = {"scaler": unscale.of, "optimizer": unscale.optimizer}
            yield unscale.node, _UNSCALED_EACH_BATCH.said(**names)


def _is_scaled_beside(unscale: Event) -> bool:
    """Whether a loss is scaled by the same scaler in the same loop."""
    scaled = unscale.unit.by_scaler["scaled", unscale.of]
    return any(e.place.loops == unscale.place.loops for e in scaled)


def _are_less_often(events: list[Event], unscale: Event) -> bool:
    """Whether there are such events, all of them in only some turns of the loop of an unscale."""
    if not events or not unscale.place.loops:
        return False
    return all(_is_less_often(event, unscale) for event in events)


def _is_less_often(event: Event, unscale: Event) -> bool:
    """Whether an event comes after an unscale, in some turns of its loop or after the loop."""
    loops, arms = unscale.place.loops, unscale.place.arms
    if event.order < unscale.order:
        return False
    if event.place.loops != loops:  # after the loop over micro-batches
        target = getattr(loops[-1], "target", None)
        is_own = target is not None and unscale.optimizer in _names(target)
        return event.place.loops == loops[:-1] and not is_own
    own = event.place.arms[len(arms) :]
    return event.place.arms[: len(arms)] == arms and any(_goes_on(*arm) for arm in own)


def _goes_on(node: cst.CSTNode, number: int) -> bool:
    """Whether the loop goes on where a condition does not lead to this arm of it."""
    if not isinstance(node, cst.If):
        return False
    other = node.body if number == 1 else getattr(node.orelse, "body", None)
    last = nodes.last_statement(other) if isinstance(other, cst.BaseSuite) else None
    return not isinstance(last, cst.Return | cst.Raise | cst.Break)


def _names(node: cst.CSTNode) -> set[str]:
    return {part.value for part in nodes.below(node) if isinstance(part, cst.Name)}


def unscaled_by_another(code: CodeReader) -> Found:
    """``scaler_a.unscale_(o)`` with ``scaler_b.step(o)``, which unscales once more."""
    for unscale in of_kind("unscale", code.events):
        own = unscale.unit.steps_of[unscale.optimizer]  # steps of the same optimizer
        steps = (e for e in own if not e.place.excludes(unscale.place))
        if any(e.of == unscale.of for e in steps):
            continue
        later = [e for e in own if e.order > unscale.order]
        later = [e for e in later if not e.place.excludes(unscale.place)]
        if later and code.is_one(unscale.of) and code.is_one(later[0].of):
            names = {"scaler": unscale.of, "other": later[0].of}
            yield unscale.node, _UNSCALED_BY_ANOTHER.said(optimizer=unscale.optimizer, **names)


def scaled_without_autocast(code: CodeReader) -> Found:
    """A scaler in a whole program that has no autocast: everything is computed in float32."""
    names = code.scalers_used()
    if not names or not _is_whole_program(code):
        return
    parts = {part for use in code.tree.uses for part in use.parts}
    methods = (call.func for call in code.tree.calls if isinstance(call.func, cst.Attribute))
    parts |= {method.attr.value for method in methods}  # Net().half()
    if parts & _CASTS or any("autocast" in part for part in parts):
        return
    yield code.makers[names[0]], _WITHOUT_AUTOCAST.said(scaler=names[0])


def _is_whole_program(code: CodeReader) -> bool:
    """Whether a file is run, makes its model, and imports none of another project."""
    if not all(_packages(node) <= _PACKAGES for node in code.tree.imports):
        return False
    in_module = [e for e in of_kind("scaled", code.events) if e.unit.scope.kind == "module"]
    is_run = "__main__" in code.tree.text or bool(in_module)
    return is_run and any(_makes_model(code, call) for call in code.tree.calls)


def _makes_model(code: CodeReader, call: cst.Call) -> bool:
    scope = code.tree.calls[call]
    if any(outer.kind == "class" for outer in scope.outwards()):
        return False  # a part of a model
    if (code.origin(call.func, scope) or "").startswith(_MODELS):
        return True
    binding = scope.only(call.func.value) if isinstance(call.func, cst.Name) else None
    made = binding.node if binding is not None else None
    bases = made.bases if isinstance(made, cst.ClassDef) else ()
    return any(code.origin(base.value, code.tree.scopes[0]) == "torch.nn.Module" for base in bases)


def _packages(node: cst.Import | cst.ImportFrom) -> set[str]:
    """The packages that an import is of; empty for a relative one."""
    if isinstance(node, cst.ImportFrom):
        return {nodes.module_of(node).partition(".")[0]}
    return {alias.evaluated_name.partition(".")[0] for alias in node.names}


RULES = (
    unscaled_in_each_batch,
    unscaled_by_another,
    scaled_without_autocast,
)
