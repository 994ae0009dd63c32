"""Mistakes that only a whole program proves: a scaler without autocast, or the reverse.

In a file that is only a part of a program, the model or the loop of another file may have the rest.
"""

import re
import sys

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.events import Event
from amp_lab.migrate.tree.float16_values import Float16Values, casts_to_float16
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
# Packages whose models do not call autocast. A file that imports only these can be a whole program;
# a model of another package, or of another file, may have autocast in its forward pass.
_WITHOUT_AUTOCAST_IN_MODELS = re.compile(
    "torch(?:vision|audio)?|numpy|scipy|sklearn|matplotlib|PIL|cv2|pandas|tensorboardX|wandb|yaml"
    "|einops|albumentations|tqdm|timm"
)
_DTYPE_METHODS = {"half", "float16", "bfloat16"}
_MODEL_ORIGINS = ("torchvision.models.", "timm.", "torch.nn.Sequential", "torch.nn.Linear")
# Names that may scale a loss or gradients, or set another dtype: loss_scale, register_hook
_MAY_SCALE = re.compile(
    r"(?i)scaler|loss_?scale|scale_?loss|^scale$|^grad$|register_\w*hook"
    r"|^set_autocast|^set_default_dtype$"
)

_WITHOUT_AUTOCAST = remedy(
    "migrate.without_autocast",
    "a whole program scales its loss and has no autocast",
    "{scaler} scales the loss, but nothing runs in autocast: put the forward pass and the loss in "
    "torch.autocast, or drop the scaler",
)
_WITHOUT_SCALER = remedy(
    "migrate.without_scaler",
    "a whole program trains in float16 autocast and has no scaler",
    "the forward pass runs in float16, where small gradients become 0 without a scaler: create "
    "scaler = torch.amp.GradScaler({device}) once, and write scaler.scale(loss).backward(), "
    "scaler.step({optimizer}) and scaler.update(); or give autocast dtype=torch.bfloat16",
    failure="AMP0003",
)


def run(file: Rewriter) -> None:
    """Report a scaler without autocast, and float16 autocast without a scaler."""
    file.report("mistake", scaled_without_autocast(file.code))
    file.report("mistake", trained_without_scaler(file.code))


def scaled_without_autocast(code: CodeReader) -> Mistakes:
    """Yield the call that makes the scaler of a whole program without autocast.

    Such a program computes everything in float32, which needs no scaler.
    """
    names = code.scalers_used()
    if not names or not _is_whole_program(code):
        return
    parts = _all_names(code)
    if parts & _DTYPE_METHODS or any("autocast" in part for part in parts):
        return
    yield code.scaler_calls[names[0]], _WITHOUT_AUTOCAST.sentence(scaler=names[0])


def trained_without_scaler(code: CodeReader) -> Mistakes:
    """Yield the first backward of a float16 loss that an optimizer's step follows.

    Yields nothing for a file that is no whole program, or that may scale its loss.
    """
    backwards = code.by_kind["backward"]
    if not backwards or not _is_whole_program(code) or _may_scale(code):
        return
    values = Float16Values(code)
    if not values.has_any:
        return
    for backward in backwards:
        steps = backward.unit.after("step", backward)
        step = next((step for step in steps if _is_optimizer(code, step)), None)
        if step is None:
            continue
        cast = values.cast_of_loss(backward)
        if cast is not None:
            device = values.device(cast)
            yield backward.node, _WITHOUT_SCALER.sentence(device=device, optimizer=step.owner)
            return  # the rest of the program lacks the same scaler


def _is_optimizer(code: CodeReader, step: Event) -> bool:
    """Whether the owner of a step is named as an optimizer, or made by ``torch.optim``."""
    if code.is_optimizer(step.owner):
        return True
    for value in code.tree.assigned_values.get(tuple(step.owner.split(".")), ()):
        origin = code.called_origin(value) or ""
        if origin.startswith("torch.optim.") and "sched" not in origin:
            return True
    return False


def _may_scale(code: CodeReader) -> bool:
    """Whether the program may scale its loss or gradients by itself, or have float16 weights."""
    if any(map(_MAY_SCALE.search, _all_names(code))):
        return True
    for backward in code.by_kind["backward"]:
        loss = nodes.loss_of(backward.node)
        if isinstance(loss, cst.BinaryOperation) and isinstance(loss.operator, cst.Multiply):
            return True  # (loss * 1024).backward()
    return any(casts_to_float16(code, call) for call in code.tree.calls)


def _all_names(code: CodeReader) -> set[str]:
    """Each part of each dotted name in the file, and the names of the methods that it calls.

    A method may be called on no name: ``half`` of ``Net().half()``.
    """
    parts: set[str] = set()
    for use in code.tree.uses:
        parts.update(use.parts)
    for call in code.tree.calls:
        if isinstance(call.func, cst.Attribute):
            parts.add(call.func.attr.value)
    return parts


def _is_whole_program(code: CodeReader) -> bool:
    """Whether a file is run as a script, makes its model, and imports no unknown package."""
    if not all(map(_is_known_package, _packages(code))):
        return False
    backwards = code.by_kind["scaled"] + code.by_kind["backward"]
    trains_at_import = any(event.unit.scope.kind == "module" for event in backwards)
    is_script = "__main__" in code.tree.text or trains_at_import
    return is_script and any(_makes_model(code, call) for call in code.tree.calls)


def _makes_model(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call, outside of a class, makes a model of torchvision, timm or this file.

    A model of this file is of a subclass of ``nn.Module``, an ``nn.Sequential`` or ``nn.Linear``.
    """
    scope = code.tree.calls[call]
    if any(outer.kind == "class" for outer in scope.enclosing_scopes()):
        return False  # a layer of a larger model
    origin = code.origin(call.func, scope)
    if origin is not None and origin.startswith(_MODEL_ORIGINS):
        return True
    if not isinstance(call.func, cst.Name):
        return False
    binding = scope.only_binding(call.func.value)
    if binding is None or not isinstance(binding.node, cst.ClassDef):
        return False
    return "torch.nn.Module" in code.base_origins(binding.node)


def _packages(code: CodeReader) -> set[str]:
    """The top-level packages of all imports; empty text, which is no known one, if relative."""
    modules: list[str] = []
    for node in code.tree.imports:
        if isinstance(node, cst.ImportFrom):
            modules.append(nodes.module_of(node))
        else:
            modules += [alias.evaluated_name for alias in node.names]
    return {module.partition(".")[0] for module in modules}


def _is_known_package(name: str) -> bool:
    """Whether no model of a package calls autocast."""
    return name in sys.stdlib_module_names or bool(_WITHOUT_AUTOCAST_IN_MODELS.fullmatch(name))
