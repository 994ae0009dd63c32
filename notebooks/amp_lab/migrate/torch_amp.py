"""From ``torch.cuda.amp`` and ``torch.cpu.amp`` to ``torch.amp``, with the same behaviour.

What the old classes do is in ``torch/cuda/amp`` and ``torch/cpu/amp``: each calls the one of
``torch.amp`` with its device. Two defaults differ. The old ``autocast`` had its own dtype, where
today's takes the one in force, which an autocast around it may have changed: so the dtype is
written out, unless ``enabled=False`` makes it idle, and nothing in the file takes the one in force.
The old one also turned the cache of casts on, where today's leaves it as it is: that is written out
in a file that turns the cache off.
"""

import functools
import re
from collections import defaultdict

import libcst as cst

from amp_lab.migrate.python_tree import (
    Binding,
    Edit,
    Finding,
    Scope,
    Tree,
    Use,
    dotted,
    is_false,
    name_called,
)
from amp_lab.migrate.version_guards import is_guarded

OLD_MODULES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
_HOMES = {
    "autocast": "autocast_mode",
    "custom_fwd": "autocast_mode",
    "custom_bwd": "autocast_mode",
    "GradScaler": "grad_scaler",
}
OLD = {  # old dotted name: today's name, device
    ".".join(parts): (name, device)
    for module, device in OLD_MODULES.items()
    for name, home in _HOMES.items()
    if device == "cuda" or not name.startswith("custom")  # torch.cpu.amp never had those
    for parts in ((module, name), (module, home, name))
}
_TODAY = {
    "autocast": {"torch.autocast", "torch.amp.autocast"},
    "GradScaler": {"torch.amp.GradScaler"},
}
_DTYPES = {"cuda": "float16", "cpu": "bfloat16"}
_ATOMS = cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.Dict
_AUTOCAST_ARGUMENTS = ("enabled", "dtype", "cache_enabled")


class ByHand(Exception):
    """Why a use is not rewritten, and what to write."""


class _Rewriter:
    def __init__(self, tree: Tree):
        self.tree = tree
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        self.handled: set[cst.CSTNode] = set()  # import aliases that something was said about
        self.moved: dict[cst.CSTNode, list[cst.ImportAlias]] = defaultdict(list)  # by statement
        self.brings_torch: dict[Scope, cst.CSTNode] = {}  # before what `import torch` may be put
        self.torch_needed: set[Scope] = set()
        self.replaced = self._find_replaced()
        self.turns_cache_off = any(
            arg.keyword is not None and arg.keyword.value == "cache_enabled"
            for call in tree.calls
            for arg in call.args
        ) or any(use.parts[-1] == "set_autocast_cache_enabled" for use in tree.uses)

    @functools.cached_property
    def takes_dtype(self) -> bool:
        """Whether something in the file takes the dtype that is in force around it."""
        tree = self.tree
        calls = [
            call
            for call in tree.calls
            if tree.origin(call.func, tree.scope_of[call]) in _TODAY["autocast"]
        ]
        given = [{a.keyword.value: a.value for a in call.args if a.keyword} for call in calls]
        return any(use.parts[-1].startswith("get_autocast_") for use in tree.uses) or any(
            "dtype" not in of_it
            and sum(not arg.keyword for arg in call.args) < 2
            and not is_false(of_it.get("enabled"))
            for call, of_it in zip(calls, given, strict=True)
        )

    def say(self, node: cst.CSTNode, kind: str, message: str) -> None:
        self.findings.append(Finding(self.tree.line(node), kind, message))

    def run(self) -> None:
        for node, old in self.replaced.items():
            self.say(
                node,
                "by hand",
                f"{old} is replaced here: replace torch.amp.{OLD[old][0]}, where that is used",
            )
        alone: list[tuple[Use, str]] = []  # those through torch itself, or torch.cuda
        groups: dict[tuple[Scope, str], list[tuple[Use, str]]] = defaultdict(list)
        for use in self.tree.uses:
            origins = self.tree.origins(use)
            old = [origin for origin in origins if origin and _is_old(origin)]
            above = {parent for parent, _ in self.tree.ancestors(use.node)} if old else ()
            if not old or any(node in self.replaced for node in (use.node, *above)):
                continue
            if len(origins) > 1:
                self._say_ambiguous(use)
                continue
            scope = use.scope.find(use.parts[0])
            bindings = scope.bindings[use.parts[0]] if scope else []
            if any(_is_old(binding.origin or "") for binding in bindings):
                groups[scope, use.parts[0]].append((use, old[0]))
            else:
                alone.append((use, old[0]))
        for scope in self.tree.scopes:
            for name, bindings in scope.bindings.items():
                if any(_is_old(binding.origin or "") for binding in bindings):
                    self._rewrite_group(scope, name, bindings, groups.get((scope, name), []))
        for use, old in alone:  # last, since a name may have brought torch with it
            self._rewrite_alone(use, old)
        for scope in self.torch_needed:
            self._put_before(self.brings_torch[scope], "import torch")
        self._rewrite_imports()

    def _find_replaced(self) -> dict[cst.CSTNode, str]:
        """Where an old name of torch is given another value, and which one."""
        found = {}
        for use in self.tree.uses:
            is_target = isinstance(self.tree.parents[use.node], cst.AssignTarget | cst.Del)
            if is_target and len(use.parts) > 1:
                for old in self.tree.origins(use) & OLD.keys():
                    found[use.node] = old
        for call in self.tree.calls:
            if name_called(call) not in ("patch", "object", "setattr", "delattr"):
                continue
            names = []  # what is replaced is given in one string, or as a module and a string
            for value in (arg.value for arg in call.args[:2]):
                is_text = isinstance(value, cst.SimpleString)
                names.append(
                    value.raw_value
                    if is_text
                    else self.tree.origin(value, self.tree.scope_of[call])
                )
            for old in (*names[:1], ".".join(filter(None, names))):
                if old in OLD:
                    found[call] = old
        return found

    def _say_ambiguous(self, use: Use) -> None:
        name = use.parts[0]
        bindings = use.scope.find(name).bindings[name]
        for binding in bindings:
            self.handled.add(binding.node)
        if is_guarded(self.tree, use.node) or self._is_fallback(bindings):
            old = next((b.node for b in bindings if _is_old(b.origin or "")), use.node)
            self.say(old, "left", f"{name} depends on the version of torch: left alone")
            return
        lines = sorted({self.tree.line(binding.node) for binding in bindings})
        where = ", ".join(map(str, lines))
        self.say(
            use.node,
            "by hand",
            f"{name} is bound to different things (lines {where}): give them different names, "
            "then use torch.amp with its device",
        )

    def _is_fallback(self, bindings: list[Binding]) -> bool:
        return any(is_guarded(self.tree, binding.node) for binding in bindings)

    # One use.

    def _rewrite_alone(self, use: Use, old: str) -> None:
        """Rewrite a use that names the module through ``torch``, or another module above it."""
        if is_guarded(self.tree, use.node):
            self.say(use.node, "left", f"{'.'.join(use.parts)} depends on a version: left alone")
            return
        try:
            self._rewrite_spelled(use, old)
        except ByHand as why:
            self.say(use.node, "by hand", str(why))

    def _rewrite_spelled(self, use: Use, old: str) -> None:
        """Rewrite a use to ``torch.amp.…``, by the name under which torch is known there."""
        name, edits = self._plan(use, old)
        torch = self._torch(use)
        if torch is None:
            raise ByHand(f"write torch.amp.{name} for {'.'.join(use.parts)}, and import torch")
        start, end = self.tree.span(use.node)
        if "#" in self.tree.text[start:end]:
            raise ByHand(f"a comment stands inside the name: write torch.amp.{name}")
        self.edits += [Edit(start, end, f"{torch}.amp.{name}"), *edits]
        self._say_rewritten(use, old)

    def _say_rewritten(self, use: Use, old: str) -> None:
        name, device = OLD[old]
        module = next(module for module, its in OLD_MODULES.items() if its == device)
        self.say(use.node, "rewritten", f"{module}.{name} is torch.amp.{name} for {device!r}")

    def _torch(self, use: Use) -> str | None:
        """The name of the module torch where something is used, if it is surely bound there."""
        names, scope = {"torch": None}, use.scope
        for looked in scope.outwards():
            for name, bindings in looked.bindings.items():
                if any(binding.origin == "torch" for binding in bindings):
                    names[name] = None
        for name in names:
            bound = scope.find(name)
            if bound is None:
                if name == use.parts[0] or self._is_taken_as_given(name):
                    return name
                continue
            is_spelled = name == use.parts[0] and self.tree.origins(
                Use(use.node, (name,), scope)
            ) & {"torch"}
            if is_spelled or self._is_surely_torch(bound, name, use):
                return name
        bound = scope.find("torch")
        for looked in scope.outwards():
            if looked in self.brings_torch and bound in (None, looked):
                self.torch_needed.add(looked)
                return "torch"
            if looked is bound:
                break
        return None

    def _is_taken_as_given(self, name: str) -> bool:
        """Whether a name that nothing in the file binds is used: a star import may bring it."""
        return any(u.parts[0] == name and u.scope.find(name) is None for u in self.tree.uses)

    def _is_deleted(self, name: str) -> bool:
        return any(
            use.parts == (name,) and isinstance(self.tree.parents[use.node], cst.Del)
            for use in self.tree.uses
        )

    def _is_surely_torch(self, bound: Scope, name: str, use: Use) -> bool:
        """Whether a name is the module torch whenever a use in it, or in a function in it, runs."""
        bindings = [binding for binding in bound.bindings[name] if not binding.is_none]
        if self._is_deleted(name) or any(binding.origin != "torch" for binding in bindings):
            return False
        path = dict(self.tree.ancestors(use.node))  # block above: the statement in it
        is_later = bound.kind == "module" and use.scope is not bound
        for binding in bindings:
            statement = self.tree.statement(binding.node)
            block = self.tree.parents[statement]
            tried = self.tree.parents.get(block)
            if isinstance(tried, cst.Try) and tried.body is block:
                statement, block = tried, self.tree.parents[tried]
            if block is self.tree.module and is_later:
                return True
            if block not in path:
                continue
            earlier, later = statement, path[block]
            if earlier is later:  # a line with semicolons
                if self.tree.span(binding.node) < self.tree.span(use.node):
                    return True
            elif block.body.index(earlier) < block.body.index(later):
                return True
        return False

    def _plan(self, use: Use, old: str) -> tuple[str, list[Edit]]:
        """Today's name for a use, and the edits beside it. Raises `ByHand`."""
        if old not in OLD:
            if old in OLD_MODULES:
                raise ByHand(
                    f"{old} is used as a value: use torch.amp, and give its device "
                    f"{OLD_MODULES[old]!r} in each call"
                )
            whole = next(name for name in OLD if old.startswith(name + "."))
            raise ByHand(f"{whole} is used as a value: use torch.amp.{OLD[whole][0]}")
        name, device = OLD[old]
        node, parents = use.node, self.tree.parents
        if any(isinstance(p, cst.FormattedString) for p, _ in self.tree.ancestors(node)):
            raise ByHand(f'inside an f-string: write torch.amp.{name}, with "{device}"')
        parent = parents[node]
        if replaced := [at for at, its in self.replaced.items() if its == old]:
            lines = ", ".join(str(self.tree.line(at)) for at in replaced)
            raise ByHand(f"{old} is replaced (line {lines}): write torch.amp.{name} in both places")
        if any(isinstance(above, cst.Del) for above, _ in self.tree.ancestors(node)):
            raise ByHand(f"its name is deleted here: write torch.amp.{name}, and do not")
        if (call := self.tree.call_of(node)) is not None:
            return name, self._plan_call(name, device, call, call.args, use)
        if name.startswith("custom"):
            return name, [Edit(*[self.tree.span(node)[1]] * 2, f'(device_type="{device}")')]
        if self._names_a_type(node):
            self._check_told_apart(name, device, node)
            return name, []
        if isinstance(parent, cst.Arg):
            call = parents[parent]
            is_first = isinstance(call, cst.Call) and call.args[0] is parent
            if is_first and self.tree.origin(call.func, use.scope) == "functools.partial":
                self._check_partial(name, device, call)
                rest = call.args[1:]
                return name, self._plan_call(name, device, call, rest, use, after=parent)
            if isinstance(call, cst.ClassDef):
                raise ByHand(
                    f'a class derives from it: derive from torch.amp.{name}, and give "{device}" '
                    "first in super().__init__"
                )
        if isinstance(parent, cst.Decorator):
            raise ByHand(f'without brackets it decorates nothing: write torch.amp.{name}("cuda")')
        raise ByHand(
            f"{old} is used as a value: write functools.partial(torch.amp.{name}, "
            f'"{device}"{self._defaults(device) if name == "autocast" else ""})'
        )

    @staticmethod
    def _defaults(device: str, torch: str = "torch") -> str:
        return f", dtype={torch}.{_DTYPES[device]}"

    def _names_a_type(self, node: cst.BaseExpression) -> bool:
        for parent, child in self.tree.ancestors(node):
            if isinstance(parent, cst.Annotation):
                return True
            if isinstance(parent, cst.MatchClass):
                return parent.cls is child
            if isinstance(parent, cst.Comparison):  # type(x) is …
                return isinstance(parent.left, cst.Call) and dotted(parent.left.func) == ("type",)
            if isinstance(parent, cst.Call):
                is_check = dotted(parent.func) in (("isinstance",), ("issubclass",))
                return is_check and len(parent.args) == 2 and parent.args[1] is child
            inside = cst.Subscript | cst.SubscriptElement | cst.Index | cst.Tuple | cst.List
            inside |= cst.Element | cst.BinaryOperation | cst.Arg | cst.ComparisonTarget
            if not isinstance(parent, inside):
                return False
        return False

    def _check_told_apart(self, name: str, device: str, node: cst.BaseExpression) -> None:
        """Raise `ByHand` if a check of the type tells what will be one class of torch.amp."""
        if any(isinstance(parent, cst.Annotation) for parent, _ in self.tree.ancestors(node)):
            return
        others = {old for old, its in OLD.items() if its[0] == name and its[1] != device}
        others.update(_TODAY[name])
        if any(self.tree.origins(use) & others for use in self.tree.uses):
            raise ByHand(
                f"torch.amp.{name} is one class for all devices: ask for its "
                f'{"device" if name == "autocast" else "_device"}, here "{device}"'
            )

    def _check_partial(self, name: str, device: str, call: cst.Call) -> None:
        """Raise `ByHand` if a ``partial`` of autocast may be called with positional arguments."""
        if name != "autocast":
            return
        target = self.tree.parents[call]
        bound = target.targets[0].target if isinstance(target, cst.Assign) else None
        parts = dotted(bound) if bound is not None and len(target.targets) == 1 else None
        for use in self.tree.uses if parts else ():
            parent = self.tree.parents[use.node]
            if use.parts[-1] != parts[-1] or isinstance(parent, cst.AssignTarget):
                continue
            its = self.tree.call_of(use.node)
            if its is None or any(a.star or not a.keyword for a in its.args):
                parts = None
                break
        if parts is None:
            raise ByHand(
                "what calls it may give arguments by position, whose order is another now: write "
                f'functools.partial(torch.amp.autocast, "{device}"{self._defaults(device)}, …), '
                "and enabled=… where it is called"
            )

    def _plan_call(
        self,
        name: str,
        device: str,
        call: cst.Call,
        args: list[cst.Arg],
        use: Use,
        after: cst.Arg | None = None,
    ) -> list[Edit]:
        """The edits of the arguments `args`, which stand after the argument `after` if that is."""
        if name.startswith("custom"):
            return [self._append(call, args, f'device_type="{device}"')]
        first, edits = f'"{device}"', []
        if name == "autocast":
            defaults, edits = self._plan_autocast(device, args, use)
            first += defaults
        return [self._insert(call, args, first, after), *edits]

    def _plan_autocast(self, device: str, args: list[cst.Arg], use: Use) -> tuple[str, list[Edit]]:
        given: dict[str, cst.BaseExpression] = {}
        mappings, edits = [], []
        for arg in args:
            start, end = self.tree.span(arg)
            if arg.star == "*" or (not arg.star and not arg.keyword and len(given) == 3):
                raise ByHand(
                    "its positional arguments changed their order: write torch.amp.autocast("
                    f'"{device}", enabled=…, dtype=…, cache_enabled=…)'
                )
            if arg.star == "**":
                is_bare = not isinstance(arg.value, _ATOMS) and not arg.value.lpar
                mappings.append((start + len("**"), end, is_bare))
            elif arg.keyword is not None:
                given[arg.keyword.value] = arg.value
            else:
                keyword = _AUTOCAST_ARGUMENTS[len(given)]
                given[keyword] = arg.value
                is_bare = isinstance(arg.value, cst.NamedExpr) and not arg.value.lpar
                edits.append(Edit(start, start, f"{keyword}={'(' if is_bare else ''}"))
                if is_bare:
                    edits.append(Edit(end, end, ")"))
        defaults, enabled = {}, given.get("enabled")
        if "dtype" not in given and not (is_false(enabled) and not self.takes_dtype):
            torch = self._torch(use)
            if torch is None:
                raise ByHand(f"import torch, and give it dtype=torch.{_DTYPES[device]}")
            defaults["dtype"] = f"{torch}.{_DTYPES[device]}"
        if self.turns_cache_off and "cache_enabled" not in given:
            defaults["cache_enabled"] = "True"
        if not mappings:
            return "".join(f", {key}={value}" for key, value in defaults.items()), edits
        if len(mappings) > 1 and defaults:
            raise ByHand(f'it is called with two **: write torch.amp.autocast("{device}", …)')
        if defaults:  # what the mapping holds comes after them
            start, end, is_bare = mappings[0]
            listed = "".join(f'"{key}": {value}, ' for key, value in defaults.items())
            before, after = ("**(", ")}") if is_bare else ("**", "}")
            edits += [Edit(start, start, "{" + listed + before), Edit(end, end, after)]
        return "", edits

    def _blanks_before(self, arg: cst.Arg) -> str:
        """What separates an argument on a line of its own from the one before; else a blank."""
        start = self.tree.span(arg)[0]
        text = self.tree.text
        blanks = text[len(text[:start].rstrip()) : start]
        line = text[:start].rstrip().splitlines()[-1:]
        return blanks if ("\n" in blanks or "\r" in blanks) and "#" not in "".join(line) else " "

    def _insert(self, call: cst.Call, args, first: str, after: cst.Arg | None) -> Edit:
        if after is not None:
            at = self.tree.span(after)[1]
            return Edit(at, at, f", {first}")
        if args:
            at = self.tree.span(args[0])[0]
            return Edit(at, at, f"{first},{self._blanks_before(args[0])}")
        at = self.tree.span(call)[1] - 1
        return Edit(at, at, first)

    def _append(self, call: cst.Call, args, last: str) -> Edit:
        if args:
            at = self.tree.span(args[-1])[1]
            return Edit(at, at, f",{self._blanks_before(args[-1])}{last}")
        at = self.tree.span(call)[1] - 1
        return Edit(at, at, last)

    # A name that an import binds, with all its uses.

    def _rewrite_group(
        self, scope: Scope, name: str, bindings: list[Binding], uses: list[tuple[Use, str]]
    ) -> None:
        aliases = [binding.node for binding in bindings]
        if any(alias in self.handled for alias in aliases):
            return
        if any(is_guarded(self.tree, alias) for alias in aliases):
            old = next(b.node for b in bindings if _is_old(b.origin or ""))
            self.say(old, "left", f"{name} depends on the version of torch: left alone")
            return
        if len({binding.origin for binding in bindings}) > 1:
            self.say(aliases[0], "by hand", f"{name} is bound to different things in one scope")
            return
        origin = bindings[0].origin
        is_class = origin in OLD
        if scope.kind == "class" or (is_class and (not uses or name in self._exported)):
            device = OLD[origin][1] if is_class else OLD_MODULES[origin]
            self.say(
                aliases[0],
                "by hand",
                f"{name} is not used here, or not only: "
                f"{'import it from torch.amp' if is_class else 'use torch.amp'} where it is used, "
                f'with its device "{device}"',
            )
            return
        statement = self.tree.parents[aliases[0]]
        is_here = any(node is statement and where is scope for node, where in self.tree.imports)
        if is_here and self._may_bind_torch(scope):
            self.brings_torch.setdefault(scope, statement)
        planned, why, keeps = [], {}, False
        for use, old in uses:
            if is_guarded(self.tree, use.node):
                keeps = True
                self.say(use.node, "left", f"{name} depends on a version here: left alone")
                continue
            try:
                planned.append((use, old, self._plan(use, old)[1]))
            except ByHand as reason:
                why[use.node] = str(reason)
        kept = [u for u in self.tree.uses if u.parts[0] == name and u.scope.find(name) is scope]
        keeps |= len(kept) > len(uses)  # such as amp.common.amp_definitely_not_available
        if why or keeps:
            for use, old, _ in planned:
                self._rewrite_alone(use, old)
            for node, reason in why.items():
                self.say(node, "by hand", reason)
        elif uses:
            for use, old, edits in planned:
                self.edits += edits
                self._say_rewritten(use, old)
            for alias in aliases:
                self.moved[self.tree.parents[alias]].append(alias)
                self.say(alias, "rewritten", f"{name} is imported from torch.amp")

    def _may_bind_torch(self, scope: Scope) -> bool:
        """Whether `import torch` in a scope leaves each use of that name its meaning."""
        related = [s for s in self.tree.scopes if scope in s.outwards() or s in scope.outwards()]
        bindings = [binding for s in related for binding in s.bindings.get("torch", ())]
        return not self._is_deleted("torch") and all(b.origin == "torch" for b in bindings)

    @functools.cached_property
    def _exported(self) -> set[str]:
        """The names in ``__all__``."""
        bindings = self.tree.scopes[0].bindings.get("__all__", [])
        text = "".join(self.tree.code(b.value) for b in bindings if b.value is not None)
        return set(re.findall(r"['\"](\w+)['\"]", text))

    def _put_before(self, statement: cst.CSTNode, line: str) -> None:
        start = self.tree.span(statement)[0]
        indent = self.tree.indent(start)
        separator = "; " if indent is None else self.tree.newline + indent
        self.edits.append(Edit(start, start, line + separator))

    # Imports.

    def _rewrite_imports(self) -> None:
        for node, _ in self.tree.imports:
            if isinstance(node, cst.Import):
                for alias in node.names:
                    if ".".join(dotted(alias.name)) not in OLD_MODULES:
                        continue
                    if alias in self.moved[node] or (
                        alias.asname is None and not is_guarded(self.tree, alias)
                    ):
                        if alias.asname is None:
                            self.say(alias, "rewritten", "torch.amp is imported")
                        self.edits.append(Edit(*self.tree.span(alias.name), "torch.amp"))
            elif isinstance(node.names, cst.ImportStar):
                module = "" if node.relative else ".".join(dotted(node.module))
                if module.startswith(tuple(OLD_MODULES)) and not is_guarded(self.tree, node):
                    self.say(
                        node,
                        "by hand",
                        f"from {module} import *: import the names that are used from torch.amp, "
                        "and give each call its device",
                    )
            elif self.moved[node]:
                self._rewrite_import_from(node)

    def _rewrite_import_from(self, node: cst.ImportFrom) -> None:
        aliases, moved = list(node.names), self.moved[node]
        new = (
            "torch" if ".".join(dotted(node.module)) in ("torch.cuda", "torch.cpu") else "torch.amp"
        )
        if len(moved) == len(aliases):
            self.edits.append(Edit(*self.tree.span(node.module), new))
            return
        spans = [self._alias_span(alias) for alias in aliases]
        texts = [self.tree.text[slice(*span)] for span in spans]
        names = ", ".join(t for t, alias in zip(texts, aliases, strict=True) if alias in moved)
        self._put_before(node, f"from {new} import {names}")
        has_comments = "#" in self.tree.text[slice(*self.tree.span(node))]
        last_kept = max(i for i, alias in enumerate(aliases) if alias not in moved)
        for i, alias in enumerate(aliases):
            if alias in moved and has_comments:  # which stay where they are, in their brackets
                comma = re.match(r"\s*,?", self.tree.text[spans[i][1] :]).end()
                self.edits.append(Edit(spans[i][0], spans[i][1] + comma, ""))
            elif alias in moved:
                cut = (
                    (spans[i][0], spans[i + 1][0])
                    if i < last_kept
                    else (spans[i - 1][1], spans[i][1])
                )
                self.edits.append(Edit(*cut, ""))

    def _alias_span(self, alias: cst.ImportAlias) -> tuple[int, int]:
        last = alias.name if alias.asname is None else alias.asname.name
        return self.tree.span(alias.name)[0], self.tree.span(last)[1]


def _is_old(origin: str) -> bool:
    return origin in OLD or origin in OLD_MODULES or origin.startswith(_OLD_AND_DOT)


_OLD_AND_DOT = tuple(name + "." for name in OLD)


def rewrite(tree: Tree) -> tuple[list[Edit], list[Finding]]:
    """The edits that bring a file to ``torch.amp``, and what there is to say about its lines."""
    rewriter = _Rewriter(tree)
    rewriter.run()
    return rewriter.edits, rewriter.findings
