"""Mistake: a loss of probabilities inside autocast for CUDA, which refuses this loss."""

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import CodeReader, Mistakes
from amp_lab.migrate.tree.float16_values import is_always_enabled, is_for_cuda
from amp_lab.migrate.tree.rewriter import Rewriter
from amp_lab.migrate.tree.scopes import Scope

PART = "mistakes"
TRIGGERS = ("autocast binary_cross_entropy", "autocast BCELoss")
_FUNCTION = "torch.nn.functional.binary_cross_entropy"
_CLASSES = {"torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss"}

_REFUSED_LOSS = remedy(
    "migrate.refused_loss",
    "binary_cross_entropy or BCELoss runs inside autocast for CUDA",
    "autocast refuses this loss on CUDA: return logits from the model, without its last sigmoid, "
    "and call F.binary_cross_entropy_with_logits or nn.BCEWithLogitsLoss. Use "
    "logits.float().sigmoid() where you need probabilities",
    failure="AMP0022",
)


def run(file: Rewriter) -> None:
    """Report each loss of probabilities that surely runs inside autocast for CUDA."""
    file.report("mistake", refused_losses(file.code))


def refused_losses(code: CodeReader) -> Mistakes:
    """Yield each call of such a loss in an autocast block that is surely enabled, and for CUDA."""
    for event in code.events:
        if event.place.autocast is None or not _is_bce(code, event.node, event.unit.scope):
            continue
        cast = code.autocast_of(event.place.autocast)
        if is_always_enabled(code, cast) and is_for_cuda(code, cast):
            yield event.node, _REFUSED_LOSS.text


def _is_bce(code: CodeReader, call: cst.Call, scope: Scope) -> bool:
    """Whether a call is ``F.binary_cross_entropy(…)``, or of an ``nn.BCELoss()``."""
    if code.origin(call.func, scope) == _FUNCTION:
        return True
    parts = nodes.name_parts(call.func)
    if parts is None:
        return code.called_origin(call.func) in _CLASSES  # nn.BCELoss()(p, target)
    if len(parts) == 1:
        return code.called_origin(scope.value_of(call.func)) in _CLASSES
    # self.criterion: every value that the file gives this name
    values = code.tree.assigned_values.get(parts, ())
    origins = {code.called_origin(value) for value in values}
    return bool(origins) and origins <= _CLASSES
