"""What changes beside an old name of torch where it is used: its arguments, and what holds it."""

import functools
from collections.abc import Callable, Sequence

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate import torch_amp_remedies as remedies
from amp_lab.migrate.amp_names import NEW, OLD, OLD_MODULES
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Edit
from amp_lab.migrate.scopes import Scope, Use
from amp_lab.migrate.torch_name import TorchName

_DTYPES = {"cuda": "float16", "cpu": "bfloat16"}
_AUTOCAST_ARGUMENTS = ("enabled", "dtype", "cache_enabled")


class ByHand(Exception):
    """Why a use is not rewritten, and what to write."""


def _is_device(arg: cst.Arg) -> bool:
    """Whether an argument by position is a device, which the classes of today take first."""
    if arg.keyword is not None or arg.star:
        return False
    if isinstance(arg.value, cst.SimpleString):
        return True
    parts = nodes.dotted(arg.value) or ("",)
    return parts[-1] in ("device", "device_type") or (len(parts) > 1 and parts[-1] == "type")


class UseEdits:
    """The edits of each use in a file, or why it is left to people.

    `replaced` are the nodes where the file puts something in the place of an old name. `put_before`
    puts a line before a statement.
    """

    def __init__(
        self,
        tree: Tree,
        replaced: dict[cst.CSTNode, str],
        torch: TorchName,
        put_before: Callable[[cst.CSTNode, str], None],
    ):
        self.tree = tree
        self.replaced = replaced
        self.torch = torch
        self.put_before = put_before

    def plan(self, use: Use, old: str) -> list[Edit]:
        """The edits beside the name itself. Raises `ByHand`."""
        if isinstance(self.tree.parents[use.node], cst.Expr):  # see `magics`
            raise ByHand(remedies.IN_MAGIC.said(old=old))
        if old in OLD_MODULES:
            raise ByHand(remedies.MODULE_AS_VALUE.said(old=old, device=OLD_MODULES[old]))
        if old not in OLD:
            whole = next(name for name in OLD if old.startswith(f"{name}."))
            raise ByHand(remedies.ATTRIBUTE.said(old=whole, name=OLD[whole][0]))
        name, device = OLD[old]
        node = use.node
        self._check_place(node, old)
        call = self.tree.call_of(node)
        if call is not None:
            return self._plan_call(old, call, use)
        if name.startswith("custom"):
            # without brackets it was CUDA; now it needs them to say so
            end = self.tree.span(node)[1]
            return [Edit(end, end, f'(device_type="{device}")')]
        place = self.tree.place_of_type(node)
        if isinstance(place, cst.Comparison) and not nodes.is_call_of(place.left, "type"):
            raise ByHand(remedies.COMPARED.said(name=name))
        if place is not None:
            if not isinstance(place, cst.Annotation):
                self._check_told_apart(name, device)
            return []
        return self._plan_value(use, old)

    def _check_place(self, node: cst.BaseExpression, old: str) -> None:
        """Raise `ByHand` where the name stands in something that an edit would break."""
        name, device = OLD[old]
        if self.tree.is_in(node, cst.FormattedString):
            raise ByHand(remedies.IN_F_STRING.said(name=name, device=device))
        replaced = [str(self.tree.line(at)) for at, other in self.replaced.items() if other == old]
        if replaced:
            lines = ", ".join(replaced)
            raise ByHand(remedies.REPLACED_ELSEWHERE.said(old=old, lines=lines, name=name))
        if self.tree.is_in(node, cst.Del):
            raise ByHand(remedies.DELETED.said(name=name))
        is_scaler = name == "GradScaler"
        if is_scaler and self._compared and not self.tree.is_in(node, cst.Annotation):
            line = min(map(self.tree.line, self._compared))
            raise ByHand(remedies.SCALER_COMPARED.said(name=name, line=line))

    @functools.cached_property
    def _compared(self) -> list[cst.CSTNode]:
        """Where the class GradScaler is compared with: what is made has to be of that class."""
        scalers = {old for old, (name, _) in OLD.items() if name == "GradScaler"}
        compared: list[cst.CSTNode] = []
        for use in self.tree.uses:
            if use.origins & scalers:
                place = self.tree.place_of_type(use.node)
                if place is not None and not isinstance(place, cst.Annotation):
                    compared.append(use.node)
        return compared

    def _plan_value(self, use: Use, old: str) -> list[Edit]:
        """The edits where a class is used without being called there. Raises `ByHand`."""
        name, device = OLD[old]
        parent = self.tree.parents[use.node]
        if isinstance(parent, cst.Arg):
            call = self.tree.parents[parent]
            if isinstance(call, cst.Call) and self._is_partial(call, old, use):
                return self._plan_call(old, call, use, first=1)
            if isinstance(call, cst.ClassDef):
                raise ByHand(remedies.SUBCLASS.said(name=name, device=device))
        if isinstance(parent, cst.Decorator):
            raise ByHand(remedies.BARE_DECORATOR.said(name=name))
        edits = self._plan_alias(use, old)
        if edits is not None:
            return edits
        defaults = ""
        if name == "autocast":
            defaults = f", dtype=torch.{_DTYPES[device]}"
        said = remedies.CLASS_AS_VALUE.said(old=old, name=name, device=device, defaults=defaults)
        raise ByHand(said)

    def _check_told_apart(self, name: str, device: str) -> None:
        """Raise `ByHand` if a check of the type tells what will be one class of torch.amp."""
        others = set()
        for old, (other_name, other_device) in OLD.items():
            if other_name == name and other_device != device:
                others.add(old)
        others.update(new for new, today in NEW.items() if today == name)
        if any(use.origins & others for use in self.tree.uses):
            raise ByHand(remedies.ONE_CLASS.said(name=name, device=device))

    def _plan_alias(self, use: Use, old: str) -> list[Edit] | None:
        """The edits that make a partial of a class that gets a name which is only called."""
        name, device = OLD[old]
        top = use.node
        while isinstance(self.tree.parents[top], cst.IfExp):  # autocast if fp16 else nullcontext
            top = self.tree.parents[top]
        target = self._only_target(self.tree.parents[top])
        if not isinstance(target, cst.Name):
            return None
        calls = self._calls_alone(target, use.scope)
        if not calls or not self._bring_functools(use):
            return None
        edits: list[Edit] = []
        defaults = ""
        if name == "autocast":
            for call in calls:
                edits += self._name_arguments(device, call.args)
            if edits and (top is not use.node or use.scope.only(target.value) is None):
                return None  # the other thing of that name may have other arguments
            defaults = self._autocast_dtype(device, {}, use)
        start, end = self.tree.span(use.node)
        after = f', "{device}"{defaults})'
        return [Edit(start, start, "functools.partial("), Edit(end, end, after), *edits]

    def _only_target(self, statement: cst.CSTNode) -> cst.BaseExpression | None:
        """What a statement assigns to, if it is one thing."""
        targets = [target for target, _ in nodes.assignments(statement)]
        if len(targets) != 1:
            return None
        return targets[0]

    def _calls_alone(self, target: cst.Name, scope: Scope) -> list[cst.Call]:
        """The calls of a name; none if it has other uses, in this file or by an export."""
        if target.value in self.tree.exported:
            return []
        calls = []
        for use in self.tree.uses_of(target.value, scope):
            call = self.tree.call_of(use.node)
            if call is None:
                return []
            calls.append(call)
        return calls

    def _bring_functools(self, use: Use) -> bool:
        """Whether `functools` is there where something is used, or can be imported."""
        tree = self.tree
        binding = use.scope.only("functools")
        if any("functools" in scope.bindings for scope in tree.scopes):
            if binding is None or binding.origin != "functools":
                return False
            return tree.span(binding.node) < tree.span(use.node)
        for node in tree.imports:
            is_first = tree.statement(node) in tree.module.body
            if is_first and "__future__" not in tree.code(node):
                self.put_before(node, "import functools")
                return True
        return False

    def _is_partial(self, call: cst.Call, old: str, use: Use) -> bool:
        """Whether a use is in a ``partial``. Raises `ByHand` if that may be called by position."""
        name, device = OLD[old]
        if use.scope.origin(call.func) != "functools.partial" or call.args[0].value is not use.node:
            return False
        target = self._only_target(self.tree.parents[call])
        parts = nodes.dotted(target) if target is not None else None
        if name != "autocast" or (parts and self._is_called_by_keyword(parts[-1])):
            return True
        raise ByHand(remedies.CALLED_BY_POSITION.said(device=device, dtype=_DTYPES[device]))

    def _is_called_by_keyword(self, name: str) -> bool:
        """Whether what has a name is always called, and never with an argument by position."""
        for use in self.tree.uses:
            if use.parts[-1] != name:
                continue
            if isinstance(self.tree.parents[use.node], cst.AssignTarget):
                continue
            call = self.tree.call_of(use.node)
            if call is None or any(arg.star or not arg.keyword for arg in call.args):
                return False
        return True

    def _plan_call(self, old: str, call: cst.Call, use: Use, first: int = 0) -> list[Edit]:
        """The edits of the arguments of a call, from the number `first` on."""
        name, device = OLD[old]
        args = call.args[first:]
        _, after = self.tree.span(call)
        at = after - 1  # before the closing bracket
        if name.startswith("custom"):
            argument = f'device_type="{device}"'
            if args:
                _, at = self.tree.span(args[-1])
                argument = f",{self._blanks_before(args[-1])}{argument}"
            return [Edit(at, at, argument)]
        if name == "GradScaler" and args and _is_device(args[0]):
            raise ByHand(remedies.DEVICE_AS_SCALE.said(written=self.tree.code(args[0].value)))
        new = f'"{device}"'
        edits: list[Edit] = []
        if name == "autocast":  # only its arguments changed their order, and its defaults
            defaults, edits = self._plan_autocast(device, args, use)
            new += defaults
        if first:
            _, at = self.tree.span(call.args[first - 1])
            new = f", {new}"
        elif args:
            at, _ = self.tree.span(args[0])
            new = f"{new},{self._blanks_before(args[0])}"
        return [Edit(at, at, new), *edits]

    def _plan_autocast(
        self, device: str, args: Sequence[cst.Arg], use: Use
    ) -> tuple[str, list[Edit]]:
        """What to put after the device, and the edits of the arguments. Raises `ByHand`."""
        edits = self._name_arguments(device, args)
        dtype = self._autocast_dtype(device, nodes.arguments(args, _AUTOCAST_ARGUMENTS), use)
        if any(arg.star == "**" for arg in args):  # which may hold the dtype
            if dtype and self._sets_dtype:
                raise ByHand(remedies.DOUBLE_STAR.said(device=device, dtype=_DTYPES[device]))
            return "", edits
        return dtype, edits

    def _name_arguments(self, device: str, args: Sequence[cst.Arg]) -> list[Edit]:
        """Give names to arguments by position, whose order is another now. Raises `ByHand`."""
        by_place = [arg for arg in args if arg.star != "**" and arg.keyword is None]
        if len(by_place) > len(_AUTOCAST_ARGUMENTS) or any(arg.star for arg in by_place):
            raise ByHand(remedies.POSITIONAL.said(device=device))
        edits = []
        for keyword, arg in zip(_AUTOCAST_ARGUMENTS, by_place, strict=False):
            start, end = self.tree.span(arg)
            if isinstance(arg.value, cst.NamedExpr) and not arg.value.lpar:
                edits.append(Edit(start, start, f"{keyword}=("))
                edits.append(Edit(end, end, ")"))
            else:
                edits.append(Edit(start, start, f"{keyword}="))
        return edits

    def _autocast_dtype(self, device: str, given: dict[str, cst.BaseExpression], use: Use) -> str:
        """The dtype of the old autocast, where it is to be written out. Raises `ByHand`."""
        if "dtype" in given or nodes.is_false(given.get("enabled")):
            return ""
        torch = self.torch.at(use)
        if torch is None:
            raise ByHand(remedies.GIVE_DTYPE.said(dtype=_DTYPES[device]))
        return f", dtype={torch}.{_DTYPES[device]}"

    @functools.cached_property
    def _sets_dtype(self) -> bool:
        """Whether something in the file may change the dtype in force."""
        if any(use.parts[-1].startswith("set_autocast_") for use in self.tree.uses):
            return True
        for call, scope in self.tree.calls.items():
            origin = scope.origin(call.func) or ""
            if origin.endswith(".autocast") and "dtype" in nodes.arguments(
                call.args, ("", "dtype")
            ):
                return True
        return False

    def _blanks_before(self, arg: cst.Arg) -> str:
        """What separates an argument on a line of its own from the one before; else a blank."""
        start = self.tree.span(arg)[0]
        before = self.tree.text[:start].rstrip()
        blanks = self.tree.text[len(before) : start]
        last_line = "".join(before.splitlines()[-1:])
        is_on_its_own_line = "\n" in blanks or "\r" in blanks
        if is_on_its_own_line and "#" not in last_line:
            return blanks
        return " "
