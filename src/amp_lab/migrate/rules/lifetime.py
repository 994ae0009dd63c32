"""Find scalers that are created again in each epoch, which loses the loss scale."""

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import SCALERS
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.events import Event, last_part
from amp_lab.migrate.tree.python_tree import Tree, cached_in_tree
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
_MADE_EACH_EPOCH = remedy(
    "migrate.made_each_epoch",
    "each epoch creates a new scaler",
    "each epoch creates a new {scaler}, so the scale starts over: create the scaler once, before "
    "the loop over epochs",
    failure="AMP0046",
)


def run(file: Rewriter) -> None:
    """Report scalers that are created again in each epoch."""
    file.report("mistake", made_each_epoch(file.code))


def made_each_epoch(code: CodeReader) -> Mistakes:
    """Yield each scaler that a loop over epochs creates, directly or in a function that it calls.

    A scaler is left out if its state is loaded, if its first scale is computed, or if the loop also
    creates a new optimizer, as for each fold of a cross-validation.
    """
    for event in code.by_kind["call"]:
        scaler = _name_of_new_scaler(code, event)
        if scaler is None or _keeps_its_scale(code, event, scaler):
            continue
        steps = event.unit.by_loop["scaler step", scaler, ()]  # (): in the whole function
        if not steps or not event.unit.by_loop["scaled", scaler, ()]:
            continue
        if _runs_each_epoch(code, event, steps[0].optimizer):
            yield event.node, _MADE_EACH_EPOCH.sentence(scaler=scaler)


def _runs_each_epoch(code: CodeReader, event: Event, optimizer: str) -> bool:
    """Whether an event runs in each epoch of training with one optimizer.

    A loop over epochs counts only if no `if` or `try` inside it decides whether the event runs.
    """
    statements = [node for node, _ in event.place.arms]
    for loop in _epoch_loops(code, event, optimizer):
        if not any(code.tree.is_in(statement, loop) for statement in statements):
            return True
    return _is_called_each_epoch(code, event, optimizer)


def _name_of_new_scaler(code: CodeReader, event: Event) -> str | None:
    """``scaler`` for the call in ``scaler = GradScaler()``; None for other calls."""
    if code.origin(event.node.func, event.unit.scope) not in SCALERS:
        return None
    target = nodes.single_target(code.tree.parents[event.node])
    if target is None:
        return None
    return code.key(target)


def _keeps_its_scale(code: CodeReader, event: Event, scaler: str) -> bool:
    """Whether a new scaler starts with the scale of an earlier one, or is disabled."""
    name = last_part(scaler)
    if name in code.disabled_scalers or code.tree.has_attribute(name, "load_state_dict"):
        return True
    first_scale = nodes.arguments(event.node.args).get("init_scale")
    if first_scale is None:
        return False
    # init_scale=old.get_scale() is computed; init_scale=2.0**16 is not
    return any(isinstance(part, cst.Name | cst.Call) for part in nodes.walk(first_scale))


def _is_called_each_epoch(code: CodeReader, event: Event, optimizer: str) -> bool:
    """Whether a loop over epochs calls the function of an event.

    Not if the function does not always run the event, or assigns the optimizer itself.
    """
    is_assigned = optimizer in _assigned_in(code.tree, event.unit.scope.node)
    if event.place.loops or event.place.arms or is_assigned:
        return False
    for call in code.calls_of(event.unit):
        if any(arg.star for arg in call.node.args):  # *args may hold another optimizer each time
            continue
        argument = code.passed(call.node).get(optimizer)
        optimizer_there = optimizer if argument is None else code.key(argument)
        if _epoch_loops(code, call, optimizer_there):
            return True
    return False


def _epoch_loops(code: CodeReader, event: Event, optimizer: str) -> list[cst.CSTNode]:
    """The loops over epochs around an event, without those that assign the optimizer."""
    loops = [loop for loop in event.place.loops if _is_epoch_loop(loop)]
    return [loop for loop in loops if optimizer not in _assigned_in(code.tree, loop)]


def _is_epoch_loop(loop: cst.CSTNode) -> bool:
    """Whether a loop is ``for epoch in …``, or assigns another name with "epoch" in it."""
    if not isinstance(loop, cst.For):
        return False
    names = nodes.bound_names(loop.target)
    return any("epoch" in parts[-1].lower() for parts in names)


@cached_in_tree
def _assigned_in(tree: Tree, node: cst.CSTNode) -> set[str]:
    """The names and attributes that a node assigns, such as ``self.optimizer``."""
    names: set[str] = set()
    for part in nodes.walk(node):
        for target, _ in nodes.assignments(part):
            names.update(map(".".join, nodes.bound_names(target)))
    return names
