"""Finds the losses that autocast computed in float16, by following the names of their values.

Here a `cast` is a call of autocast.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import AUTOCASTS, OLD_NAMES
from amp_lab.migrate.tree.code_reader import CodeReader
from amp_lab.migrate.tree.events import CodeUnit, Event, last_part
from amp_lab.migrate.tree.scopes import Scope

_Name = tuple[str, ...]
"""The parts of a dotted name: ``("out", "loss")`` for ``out.loss``."""
_FLOAT16 = {"torch.float16", "torch.half"}
_NO_GRADIENTS = re.compile(r"\b(?:no_grad|inference_mode|set_grad_enabled\(\s*False)\b")
_DETACHED = re.compile(r"\.(?:detach|item|tolist|numpy|argmax)\(")
_MODEL_NAME = re.compile(r"(?i)(?:model|net|network)$")
_AMP_SWITCH_NAME = re.compile(r"(?i)(?<![a-z])amp|fp16|half|mixed|float16")


@dataclass
class _Casts:
    """The autocasts that computed values in float16: results of calls, and names."""

    by_call: dict[cst.CSTNode, cst.Call] = field(default_factory=dict)
    by_name: dict[_Name, cst.Call] = field(default_factory=dict)

    def first_in(self, value: cst.CSTNode) -> cst.Call | None:
        """The autocast of the first name or call in a value that has one, if any does.

        ``out.loss`` also has that of ``out``.
        """
        if value in self.by_call:
            return self.by_call[value]
        parts = nodes.name_parts(value)
        if parts is None:
            casts = map(self.first_in, nodes.children(value))
            return next((cast for cast in casts if cast is not None), None)
        for length in range(len(parts), 0, -1):
            owner = parts[:length]
            if owner in self.by_name:
                return self.by_name[owner]
        return None


class Float16Values:
    """The values of a file that autocast computes in float16, with gradients.

    A region of autocast counts only if it is surely turned on and surely for float16.
    """

    def __init__(self, code: CodeReader):
        self._code = code

    @functools.cached_property
    def has_any(self) -> bool:
        """Whether anything is computed in float16, with gradients."""
        return any(self._cast_around(event) is not None for event in self._code.events)

    def cast_of_loss(self, backward: Event) -> cst.Call | None:
        """The autocast that computed the loss of a backward in float16; None if none surely did."""
        loss = nodes.loss_of(backward.node)
        if loss is None:
            return None
        casts = _Casts()
        for event in self._events_before(backward):
            cast = self._cast_of(event)
            if cast is not None:
                casts.by_call[event.node] = cast
        values = self._values(backward.unit)
        size = -1  # below any size, so that the loop runs at least once
        while len(casts.by_name) > size:  # until no more name is computed from one of them
            size = len(casts.by_name)
            for name, value in values:
                cast = casts.first_in(value)
                if cast is not None:
                    casts.by_name.setdefault(name, cast)
        return casts.first_in(loss)

    def device(self, cast: cst.Call) -> str:
        """The code of an autocast's device argument; if there is none, ``"cuda"`` with quotes."""
        device = self._code.arguments(cast).get("device_type")
        return '"cuda"' if device is None else self._code.tree.code(device)

    def _events_before(self, backward: Event) -> Iterator[Event]:
        """Yield the events that can lead to a backward, but none of a loop beside the backward."""
        for event in backward.unit.events[: backward.order]:
            place = event.place
            if place.shares_loops(backward.place) and not place.excludes(backward.place):
                yield event

    def _values(self, unit: CodeUnit) -> list[tuple[_Name, cst.CSTNode]]:
        """Each (assigned name, its value) of a function, without values that have no gradients."""
        values = []
        for part in nodes.walk(unit.scope.node):
            for target, value in _assignments_in(part):
                if not _DETACHED.search(self._code.tree.code(value)):
                    values += [(name, value) for name in nodes.bound_names(target)]
        return values

    # Which autocast a call runs in.

    def _cast_of(self, event: Event) -> cst.Call | None:
        """The autocast for float16 around a call, or inside the function or model that it calls."""
        if event.place.autocast is not None:
            return self._cast_around(event)
        parts = nodes.name_parts(event.node.func) or ("",)  # no name: a call such as f()()
        if len(parts) > 1 and parts[0] != "self":  # a method of an object that is not known
            return None
        name = parts[-1]
        if name not in self._casts_by_function and is_model(self._code, parts, event.unit.scope):
            name = "forward"  # which a call of a model runs
        return self._casts_by_function.get(name)

    def _cast_around(self, event: Event) -> cst.Call | None:
        """The autocast for float16 around a call; None without one, or under ``no_grad``."""
        if event.place.autocast is None:
            return None
        cast = self._code.autocast_of(event.place.autocast)
        if not self._is_float16(cast) or is_under_no_grad(self._code, event):
            return None
        return cast

    @functools.cached_property
    def _casts_by_function(self) -> dict[str, cst.Call]:
        """The autocast for float16 in each function that has one, by the function's name."""
        casts: dict[str, cst.Call] = {}
        for event in self._code.events:
            function = event.unit.scope.node
            if not isinstance(function, cst.FunctionDef):
                continue
            cast = self._cast_around(event)
            if cast is not None:
                casts.setdefault(function.name.value, cast)
        return casts

    # The arguments of autocast.

    def _is_float16(self, cast: cst.Call) -> bool:
        """Whether an autocast is surely enabled and for float16, the default dtype on CUDA."""
        if not _is_enabled(self._code, cast):
            return False
        scope = self._code.tree.calls[cast]
        arguments = self._code.arguments(cast)
        if "dtype" in arguments:
            dtype = scope.value_of(arguments["dtype"])
            return self._code.origin(dtype, scope) in _FLOAT16
        return is_for_cuda(self._code, cast)


# Questions that other rules ask too.


def casts_to_float16(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call is ``model.half()`` or ``model.to(torch.float16)``.

    The gradients of such weights are float16 too, which a scaler refuses to unscale.
    """
    scope = code.tree.calls[call]
    if nodes.receiver_of(call, "half") is not None:
        return True
    arguments = {code.origin(scope.value_of(arg.value), scope) for arg in call.args}
    return bool(arguments & _FLOAT16) and code.origin(call.func, scope) not in AUTOCASTS


def is_under_no_grad(code: CodeReader, event: Event) -> bool:
    """Whether ``no_grad`` is around a call, as a block or as a decorator of its function."""
    parts: list[cst.CSTNode] = []
    for parent, _ in code.tree.ancestors(event.node):
        if isinstance(parent, cst.With):
            parts += parent.items
        if isinstance(parent, cst.FunctionDef):
            parts += parent.decorators
            break
    return any(_NO_GRADIENTS.search(code.tree.code(part)) for part in parts)


def is_model(code: CodeReader, parts: _Name, scope: Scope) -> bool:
    """Whether a name holds a model of this file, by its value, or else by how it sounds.

    `parts` are those of the dotted name: ``("self", "model")``. `scope` is that of the use.
    """
    binding = scope.only_binding(parts[0])
    if len(parts) > 1 or binding is None or isinstance(binding.node, cst.Param):
        return _MODEL_NAME.search(parts[-1]) is not None
    if binding.value is None:
        return False
    for use in code.tree.uses_in(nodes.walk(binding.value)):
        name_binding = use.scope.only_binding(use.parts[0])
        if name_binding is not None and isinstance(name_binding.node, cst.ClassDef):
            return True  # Net, of model = Net().cuda()
    return False


def _assignments_in(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield each (target, value) of an assignment, ``+=``, ``for`` loop or ``list.append``."""
    yield from nodes.assignments(node)
    if isinstance(node, cst.AugAssign):
        yield node.target, node.value
    elif isinstance(node, cst.For):
        yield node.target, node.iter
    elif isinstance(node, cst.Call) and node.args:
        appended_to = nodes.receiver_of(node, "append")
        if appended_to is not None:
            yield appended_to, node.args[0].value


def is_always_enabled(code: CodeReader, cast: cst.Call) -> bool:
    """Whether an autocast is enabled in each run: without `enabled`, or with True."""
    if any(argument.star for argument in cast.args):
        return False
    enabled = code.arguments(cast).get("enabled")
    if enabled is None:
        return True
    value = code.tree.calls[cast].value_of(enabled)
    return nodes.name_parts(value) == ("True",)


def _is_enabled(code: CodeReader, cast: cst.Call) -> bool:
    """Whether an autocast is enabled in each run, or by a switch for AMP.

    The switch has a name such as ``args.use_amp``.
    """
    if is_always_enabled(code, cast):
        return True
    enabled = code.arguments(cast).get("enabled")
    if enabled is None:  # the arguments are not known
        return False
    value = code.tree.calls[cast].value_of(enabled)
    if nodes.is_false(value):
        return False
    name = last_part(code.key(enabled))
    return _AMP_SWITCH_NAME.search(name) is not None


def is_for_cuda(code: CodeReader, cast: cst.Call) -> bool:
    """Whether an autocast is surely for CUDA, by its device or by its old name."""
    old = OLD_NAMES.get(code.called_origin(cast) or "")
    if old is not None:
        return old.device == "cuda"
    device_type = code.arguments(cast).get("device_type")
    if device_type is None:
        return False
    value = code.tree.calls[cast].value_of(device_type)
    return nodes.string_value(value) == "cuda"
