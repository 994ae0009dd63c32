"""Plans the edits beside an old name of torch at each use: of its arguments and its context."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst

from amp_lab.core.remedies import Remedy
from amp_lab.migrate.rules.torch_amp import remedies
from amp_lab.migrate.rules.torch_amp.torch_name import TorchName
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import NEW_NAMES, OLD_AUTOCAST, OLD_MODULES, OLD_NAMES
from amp_lab.migrate.tree.rewriter import Edit, Rewriter
from amp_lab.migrate.tree.scopes import Scope, Use

_DEFAULT_DTYPES = {"cuda": "float16", "cpu": "bfloat16"}


class ByHand(Exception):
    """A use cannot be rewritten; the text says how to rewrite it by hand."""


class OldUse(NamedTuple):
    """A use of an old name, of an attribute of an old name, or of a module of old names."""

    use: Use
    full_name: str
    """The full old name of the use: ``torch.cuda.amp.autocast``."""
    name: str
    """The last part of the full name; empty for a module and an attribute."""
    device: str
    """The device of the old name; empty for an attribute."""

    @classmethod
    def of(cls, use: Use, old: str) -> "OldUse":
        """The use with the parts of its full name."""
        if old in OLD_NAMES:
            return cls(use, old, OLD_NAMES[old].name, OLD_NAMES[old].device)
        return cls(use, old, name="", device=OLD_MODULES.get(old, ""))

    @property
    def dtype(self) -> str:
        """The dtype that the old autocast of the device has by default."""
        return _DEFAULT_DTYPES.get(self.device, "")

    def by_hand(self, advice: Remedy, **facts: object) -> ByHand:
        """The error to raise with a remedy; `facts` are the facts that the use does not have."""
        own = {"old": self.full_name, "name": self.name, "device": self.device, "dtype": self.dtype}
        return ByHand(advice.sentence(**(own | facts)))


def _is_device(arg: cst.Arg) -> bool:
    """Whether an argument without a keyword is a device, by its text.

    It is a string, or a name such as ``args.device``, ``device_type`` or ``x.device.type``.
    """
    if arg.keyword is not None or arg.star:
        return False
    if isinstance(arg.value, cst.SimpleString):
        return True
    parts = nodes.name_parts(arg.value) or ("",)
    return parts[-1] in ("device", "device_type") or (len(parts) > 1 and parts[-1] == "type")


class UseEdits:
    """Plans the edits of the uses in a file.

    Parameters
    ----------
    file : Rewriter
        The file.
    replaced : dict
        The nodes that replace an old name, such as ``mock.patch("…")``, each with that name.
    torch : TorchName
        The names of torch in the file.
    """

    def __init__(self, file: Rewriter, replaced: dict[cst.CSTNode, str], torch: TorchName):
        self.file = file
        self.tree = file.tree
        self.replaced_at = replaced
        self.torch = torch

    def plan(self, old: OldUse) -> list[Edit]:
        """The edits of the code around the name of a use, without the name. Raises `ByHand`."""
        node = old.use.node
        # A bare name as a statement: `magics` leaves it in the place of a magic that uses it.
        if isinstance(self.tree.parents[node], cst.Expr):
            raise old.by_hand(remedies.IN_MAGIC)
        if old.full_name in OLD_MODULES:
            raise old.by_hand(remedies.MODULE_AS_VALUE)
        if not old.name:  # an attribute of a class: torch.cuda.amp.autocast.__init__
            class_name = next(name for name in OLD_NAMES if old.full_name.startswith(f"{name}."))
            name = OLD_NAMES[class_name].name
            raise old.by_hand(remedies.ATTRIBUTE, old=class_name, name=name)
        self._check_place(old)
        call = self.tree.call_of(node)
        if call is not None:
            return self._plan_call(old, call)
        if old.name.startswith("custom"):
            # @custom_fwd becomes @custom_fwd(device_type="cuda")
            _, end = self.tree.span(node)
            return [Edit(end, end, f'(device_type="{old.device}")')]
        context = self.tree.type_context(node)
        if isinstance(context, cst.Comparison) and not nodes.is_call_of(context.left, "type"):
            raise old.by_hand(remedies.COMPARED)
        if context is None:
            return self._plan_value(old)
        if not isinstance(context, cst.Annotation):
            self._check_device_by_type(old)
        return []

    def _check_place(self, old: OldUse) -> None:
        """Raise `ByHand` if an edit of the name would break code.

        That is an f-string or a ``del`` around the name, or other code of the file that replaces
        this name, or compares scalers with the old class.
        """
        node = old.use.node
        if self.tree.is_in(node, cst.FormattedString):
            raise old.by_hand(remedies.IN_F_STRING)
        replacing_lines = []
        for replacing_node, replaced_name in self.replaced_at.items():
            if replaced_name == old.full_name:
                replacing_lines.append(str(self.tree.line(replacing_node)))
        if replacing_lines:
            raise old.by_hand(remedies.REPLACED_ELSEWHERE, lines=", ".join(replacing_lines))
        if self.tree.is_in(node, cst.Del):
            raise old.by_hand(remedies.DELETED)
        is_scaler = old.name == "GradScaler"
        if is_scaler and self._scaler_comparisons and not self.tree.is_in(node, cst.Annotation):
            line = min(map(self.tree.line, self._scaler_comparisons))
            raise old.by_hand(remedies.SCALER_COMPARED, line=line)

    @functools.cached_property
    def _scaler_comparisons(self) -> list[cst.CSTNode]:
        """The uses of an old GradScaler in an ``isinstance``, comparison or case of the file."""
        scalers = {old for old, today in OLD_NAMES.items() if today.name == "GradScaler"}
        comparisons: list[cst.CSTNode] = []
        for use in self.tree.uses:
            if use.origins & scalers:
                context = self.tree.type_context(use.node)
                if context is not None and not isinstance(context, cst.Annotation):
                    comparisons.append(use.node)
        return comparisons

    def _plan_value(self, old: OldUse) -> list[Edit]:
        """The edits of a class that is a value, as in ``partial(autocast)``. Raises `ByHand`."""
        parent = self.tree.parents[old.use.node]
        if isinstance(parent, cst.Arg):
            call = self.tree.parents[parent]
            if isinstance(call, cst.Call) and self._is_partial(call, old):
                return self._plan_call(old, call, first=1)  # argument 0 is the class itself
            if isinstance(call, cst.ClassDef):
                raise old.by_hand(remedies.SUBCLASS)
        if isinstance(parent, cst.Decorator):
            raise old.by_hand(remedies.BARE_DECORATOR)
        edits = self._plan_alias(old)
        if edits is not None:
            return edits
        defaults = ""
        if old.name == "autocast":
            defaults = f", dtype=torch.{old.dtype}"
        raise old.by_hand(remedies.CLASS_AS_VALUE, defaults=defaults)

    def _check_device_by_type(self, old: OldUse) -> None:
        """Raise `ByHand` if the file also uses this class for another device.

        Then ``isinstance`` may tell the devices apart, which today's single class cannot.
        """
        other_classes = {new for new, today in NEW_NAMES.items() if today == old.name}
        for other, today in OLD_NAMES.items():
            if today.name == old.name and today.device != old.device:
                other_classes.add(other)
        if any(use.origins & other_classes for use in self.tree.uses):
            raise old.by_hand(remedies.ONE_CLASS)

    def _plan_alias(self, old: OldUse) -> list[Edit] | None:
        """The edits of ``cast = autocast`` to a partial with the device; None if they are not safe.

        They are safe if the file only calls ``cast``, and can import functools, which this may do.
        """
        use = old.use
        value = use.node
        while isinstance(self.tree.parents[value], cst.IfExp):  # autocast if fp16 else nullcontext
            value = self.tree.parents[value]
        target = nodes.single_target(self.tree.parents[value])
        if not isinstance(target, cst.Name):
            return None
        calls = self._calls_of_name(target, use.scope)
        if not calls or not self._make_functools_available(use):
            return None
        edits: list[Edit] = []
        defaults = ""
        if old.name == "autocast":
            for call in calls:
                edits += self._name_arguments(old, call.args)
            may_be_another = value is not use.node or use.scope.only_binding(target.value) is None
            if edits and may_be_another:
                return None  # nullcontext has no argument `enabled`
            defaults = self._autocast_dtype(old, {})
        start, end = self.tree.span(use.node)
        after = f', "{old.device}"{defaults})'
        return [Edit(start, start, "functools.partial("), Edit(end, end, after), *edits]

    def _calls_of_name(self, target: cst.Name, scope: Scope) -> list[cst.Call]:
        """The calls of a name; empty if it has other uses, here or in files that import it."""
        if target.value in self.tree.exported_names:
            return []
        calls = []
        for use in self.tree.uses_of(target.value, scope):
            call = self.tree.call_of(use.node)
            if call is None:
                return []
            calls.append(call)
        return calls

    def _make_functools_available(self, use: Use) -> bool:
        """Import functools if the file does not, and return whether a use can rely on it."""
        tree = self.tree
        binding = use.scope.only_binding("functools")
        if any("functools" in scope.bindings for scope in tree.scopes):
            if binding is None or binding.origin != "functools":
                return False
            return tree.span(binding.node) < tree.span(use.node)
        for node in tree.imports:
            is_at_top_level = tree.statement_of(node) in tree.module.body
            if is_at_top_level and "__future__" not in tree.code(node):
                self.file.put_before(node, "import functools")
                return True
        return False

    def _is_partial(self, call: cst.Call, old: OldUse) -> bool:
        """Whether a call is ``functools.partial(use, …)``.

        Raises `ByHand` for an autocast whose partial may be called with positional arguments.
        """
        use = old.use
        if use.scope.origin(call.func) != "functools.partial" or call.args[0].value is not use.node:
            return False
        parts = nodes.name_parts(nodes.single_target(self.tree.parents[call]))
        if old.name != "autocast" or (parts and self._is_called_by_keyword(parts[-1])):
            return True
        raise old.by_hand(remedies.CALLED_BY_POSITION)

    def _is_called_by_keyword(self, name: str) -> bool:
        """Whether each use of a name, but its assignment, is a call with keyword arguments only."""
        for use in self.tree.uses_by_last_part[name]:
            if isinstance(self.tree.parents[use.node], cst.AssignTarget):
                continue
            call = self.tree.call_of(use.node)
            if call is None or any(arg.star or not arg.keyword for arg in call.args):
                return False
        return True

    def _plan_call(self, old: OldUse, call: cst.Call, first: int = 0) -> list[Edit]:
        """The edits that give a call its device. Raises `ByHand`.

        The arguments of the old class begin at number `first`: 1 in ``partial(autocast, …)``.
        """
        args = call.args[first:]
        _, call_end = self.tree.span(call)
        at = call_end - 1  # before the closing bracket
        if old.name.startswith("custom"):
            argument = f'device_type="{old.device}"'
            if args:
                _, at = self.tree.span(args[-1])
                argument = f",{self._blanks_before(args[-1])}{argument}"
            return [Edit(at, at, argument)]
        if old.name == "GradScaler" and args and _is_device(args[0]):
            raise old.by_hand(remedies.DEVICE_AS_SCALE, written=self.tree.code(args[0].value))
        new = f'"{old.device}"'  # the text to insert at `at`
        edits: list[Edit] = []
        if old.name == "autocast":  # GradScaler kept the order and defaults of its arguments
            edits = self._name_arguments(old, args)
            new += self._dtype_of_call(old, args)
        if first:
            _, at = self.tree.span(call.args[first - 1])
            new = f", {new}"
        elif args:
            at, _ = self.tree.span(args[0])
            new = f"{new},{self._blanks_before(args[0])}"
        return [Edit(at, at, new), *edits]

    def _dtype_of_call(self, old: OldUse, args: Sequence[cst.Arg]) -> str:
        """The text to put after the device, ``, dtype=torch.float16`` or empty. Raises `ByHand`.

        It is also empty for a ``**kwargs``, which may hold a dtype.
        """
        dtype = self._autocast_dtype(old, nodes.arguments(args, OLD_AUTOCAST))
        if not any(arg.star == "**" for arg in args):
            return dtype
        if dtype and self._sets_dtype:
            raise old.by_hand(remedies.DOUBLE_STAR)
        return ""

    def _name_arguments(self, old: OldUse, args: Sequence[cst.Arg]) -> list[Edit]:
        """The edits that turn positional arguments into keywords: their order is another today.

        Raises `ByHand` if there is a ``*args``.
        """
        positional = [arg for arg in args if arg.star != "**" and arg.keyword is None]
        if len(positional) > len(OLD_AUTOCAST) or any(arg.star for arg in positional):
            raise old.by_hand(remedies.POSITIONAL)
        edits = []
        for keyword, arg in zip(OLD_AUTOCAST, positional, strict=False):
            start, end = self.tree.span(arg)
            if isinstance(arg.value, cst.NamedExpr) and not arg.value.lpar:  # f(x := 1)
                edits.append(Edit(start, start, f"{keyword}=("))
                edits.append(Edit(end, end, ")"))
            else:
                edits.append(Edit(start, start, f"{keyword}="))
        return edits

    def _autocast_dtype(self, old: OldUse, arguments: dict[str, cst.BaseExpression]) -> str:
        """The text ``, dtype=torch.float16``, with the old default of the device.

        Empty if `arguments`, by name, have a dtype or ``enabled=False``.

        Raises `ByHand` if torch has no name at this use.
        """
        if "dtype" in arguments or nodes.is_false(arguments.get("enabled")):
            return ""
        torch = self.torch.at(old.use)
        if torch is None:
            raise old.by_hand(remedies.GIVE_DTYPE)
        return f", dtype={torch}.{old.dtype}"

    @functools.cached_property
    def _sets_dtype(self) -> bool:
        """Whether the file may change the default dtype of autocast."""
        if any(use.parts[-1].startswith("set_autocast_") for use in self.tree.uses):
            return True
        for call, scope in self.tree.calls.items():
            # `dtype` is second in all autocasts, after the device or, in the old ones, `enabled`
            origin = scope.origin(call.func) or ""
            if origin.endswith(".autocast") and "dtype" in nodes.arguments(
                call.args, ("", "dtype")
            ):
                return True
        return False

    def _blanks_before(self, arg: cst.Arg) -> str:
        """The blanks before an argument that starts a line; else a single blank.

        An argument that is put before it or after it goes on a line of its own, too.
        """
        start = self.tree.span(arg)[0]
        before = self.tree.text[:start].rstrip()
        blanks = self.tree.text[len(before) : start]
        last_line = "".join(before.splitlines()[-1:])
        is_on_its_own_line = "\n" in blanks or "\r" in blanks
        if is_on_its_own_line and "#" not in last_line:
            return blanks
        return " "
