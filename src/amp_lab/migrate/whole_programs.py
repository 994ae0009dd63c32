"""Mistakes that only a whole program shows: a scaler without autocast, autocast without a scaler.

A part of a program says little: the model, or the loop, of another file may have the rest.
"""

import re
import sys
from collections.abc import Iterator

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import AUTOCASTS, CodeReader, Found
from amp_lab.migrate.events import Event, of_kind
from amp_lab.migrate.float16_values import FLOAT16, Float16Values

# Packages in which no model calls autocast: where all imports are of these, the file is a whole
# program. A model of another package, or of another file, may have autocast in its forward pass.
_PACKAGES = {"torch", "torchvision", "torchaudio", "numpy", "scipy", "sklearn", "matplotlib"}
_PACKAGES |= {"PIL", "cv2", "pandas", "tensorboardX", "wandb", "yaml", "einops", "albumentations"}
_PACKAGES |= {"tqdm", "timm", *sys.stdlib_module_names}
_CASTS = {"half", "float16", "bfloat16"}
_MODELS = ("torchvision.models.", "timm.", "torch.nn.Sequential", "torch.nn.Linear")
# What may scale a loss, divide gradients, or choose another dtype for autocast or the weights.
_SCALES = re.compile(
    r"(?i)scaler|loss_?scale|scale_?loss|^scale$|^grad$|register_\w*hook"
    r"|^set_autocast|^set_default_dtype$"
)

_WITHOUT_AUTOCAST = remedy(
    "migrate.without_autocast",
    "a whole program scales its loss and has no autocast",
    "{scaler} scales, but nothing runs in autocast: put the forward pass and the loss in "
    "torch.autocast, or drop the scaler",
)
_WITHOUT_SCALER = remedy(
    "migrate.without_scaler",
    "a whole program trains in float16 autocast and has no scaler",
    "the forward pass runs in float16, where small gradients become 0 without a scaler: make "
    "scaler = torch.amp.GradScaler({device}) once, and write scaler.scale(loss).backward(), "
    "scaler.step({optimizer}) and scaler.update(); or give autocast dtype=torch.bfloat16",
)


def scaled_without_autocast(code: CodeReader) -> Found:
    """A scaler in a whole program that has no autocast: everything is computed in float32."""
    names = code.scalers_used()
    if not names or not _is_whole_program(code):
        return
    parts = _names_used(code)
    if parts & _CASTS or any("autocast" in part for part in parts):
        return
    yield code.makers[names[0]], _WITHOUT_AUTOCAST.said(scaler=names[0])


def trained_without_scaler(code: CodeReader) -> Found:
    """Backward of a loss that autocast computed in float16, in a whole program without a scaler."""
    backwards = of_kind("backward", code.events)
    if not backwards or not _is_whole_program(code) or _may_scale(code):
        return
    values = Float16Values(code)
    if not values.is_any:
        return
    for backward in backwards:
        step = next(_steps_after(code, backward), None)
        if step is None:
            continue
        cast = values.behind(backward)
        if cast is not None:
            device = values.device(cast)
            yield backward.node, _WITHOUT_SCALER.said(device=device, optimizer=step.of)
            return  # the rest of the program lacks the same scaler


def _steps_after(code: CodeReader, backward: Event) -> Iterator[Event]:
    """The steps of optimizers after a backward, without a scaler."""
    for step in backward.unit.after("step", backward.order):
        if not step.place.excludes(backward.place) and _is_optimizer(code, step):
            yield step


def _is_optimizer(code: CodeReader, step: Event) -> bool:
    """Whether what steps is called an optimizer, or made by a class of ``torch.optim``."""
    if code.is_optimizer(step.of):
        return True
    for value in code.tree.assigned.get(tuple(step.of.split(".")), ()):
        if isinstance(value, cst.Call):
            made = code.origin(value.func, code.tree.calls[value]) or ""
            if made.startswith("torch.optim.") and "sched" not in made:
                return True
    return False


def _may_scale(code: CodeReader) -> bool:
    """Whether something may scale the loss or its gradients, or the weights are not float32."""
    if any(map(_SCALES.search, _names_used(code))):
        return True
    for backward in of_kind("backward", code.events):
        loss = nodes.loss_of(backward.node)
        if isinstance(loss, cst.BinaryOperation) and isinstance(loss.operator, cst.Multiply):
            return True  # (loss * 1024).backward()
    return any(_casts_to_float16(code, call) for call in code.tree.calls)


def _casts_to_float16(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call may make weights of float16, whose gradients a scaler cannot unscale."""
    scope = code.tree.calls[call]
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "half":
        return True
    given = {code.origin(scope.value_of(arg.value), scope) for arg in call.args}
    return bool(given & FLOAT16) and code.origin(call.func, scope) not in AUTOCASTS


def _names_used(code: CodeReader) -> set[str]:
    """The parts of all names that are read, and the methods that are called."""
    parts: set[str] = set()
    for use in code.tree.uses:
        parts.update(use.parts)
    for call in code.tree.calls:
        if isinstance(call.func, cst.Attribute):
            parts.add(call.func.attr.value)  # Net().half()
    return parts


def _is_whole_program(code: CodeReader) -> bool:
    """Whether a file is run, makes its model, and imports none of another project."""
    if not all(_packages(node) <= _PACKAGES for node in code.tree.imports):
        return False
    backwards = of_kind("scaled", code.events) + of_kind("backward", code.events)
    in_module = [event for event in backwards if event.unit.scope.kind == "module"]
    is_run = "__main__" in code.tree.text or bool(in_module)
    return is_run and any(_makes_model(code, call) for call in code.tree.calls)


def _makes_model(code: CodeReader, call: cst.Call) -> bool:
    scope = code.tree.calls[call]
    if any(outer.kind == "class" for outer in scope.outwards()):
        return False  # a part of a model
    made = code.origin(call.func, scope)
    if made is not None and made.startswith(_MODELS):
        return True
    if not isinstance(call.func, cst.Name):
        return False
    binding = scope.only(call.func.value)
    if binding is None or not isinstance(binding.node, cst.ClassDef):
        return False
    module = code.tree.scopes[0]
    bases = [code.origin(base.value, module) for base in binding.node.bases]
    return "torch.nn.Module" in bases


def _packages(node: cst.Import | cst.ImportFrom) -> set[str]:
    """The packages that an import is of; empty for a relative one."""
    if isinstance(node, cst.ImportFrom):
        return {nodes.module_of(node).partition(".")[0]}
    return {alias.evaluated_name.partition(".")[0] for alias in node.names}


RULES = (scaled_without_autocast, trained_without_scaler)
