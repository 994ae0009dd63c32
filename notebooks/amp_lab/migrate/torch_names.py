"""From ``torch.cuda.amp`` and ``torch.cpu.amp`` to ``torch.amp``, with the same behaviour.

What the old classes do is in ``torch/cuda/amp`` and ``torch/cpu/amp``: each calls the one of
``torch.amp`` with its device. Two defaults differ. The old ``autocast`` had its own dtype, where
today's takes the one in force, which an autocast around it may have changed: so the dtype is
written out, unless ``enabled=False`` makes it idle. The old one also turned the cache of casts on,
where today's leaves it as it is: that is written out in a file that turns the cache off.
"""

import functools
import re
from collections import defaultdict

import libcst as cst

from amp_lab.migrate.tree import Binding, Edit, Finding, Scope, Tree, Use, dotted

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
_DTYPES = {"cuda": "float16", "cpu": "bfloat16"}
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
        self.brings_torch: set[Scope] = set()  # where `import torch` may be put
        self.torch_needed: set[Scope] = set()
        self.turns_cache_off = any(
            arg.keyword is not None and arg.keyword.value == "cache_enabled"
            for call in tree.calls
            for arg in call.args
        ) or any(use.parts[-1] == "set_autocast_cache_enabled" for use in tree.uses)

    def say(self, node: cst.CSTNode, kind: str, message: str) -> None:
        self.findings.append(Finding(self.tree.line(node), kind, message))

    def run(self) -> None:
        groups: dict[tuple[Scope, str], list[tuple[Use, str]]] = defaultdict(list)
        for use in self.tree.uses:
            origins = self.tree.origins(use)
            old = [origin for origin in origins if origin and _is_old(origin)]
            if not old:
                continue
            if len(origins) > 1:
                self._say_ambiguous(use)
                continue
            scope = use.scope.find(use.parts[0])
            bindings = scope.bindings[use.parts[0]] if scope else []
            if any(_is_old(binding.origin or "") for binding in bindings):
                groups[scope, use.parts[0]].append((use, old[0]))
            else:  # from torch itself, or from torch.cuda
                self._rewrite_alone(use, old[0])
        for scope in self.tree.scopes:
            for name, bindings in scope.bindings.items():
                if any(_is_old(binding.origin or "") for binding in bindings):
                    self._rewrite_group(scope, name, bindings, groups.get((scope, name), []))
        self._rewrite_imports()

    def _say_ambiguous(self, use: Use) -> None:
        name = use.parts[0]
        bindings = use.scope.find(name).bindings[name]
        for binding in bindings:
            self.handled.add(binding.node)
        if self.tree.is_guarded(use.node) or self._is_fallback(bindings):
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
        return any(self.tree.is_guarded(binding.node) for binding in bindings)

    # One use.

    def _rewrite_alone(self, use: Use, old: str) -> None:
        """Rewrite a use that names the module through ``torch``, or another module above it."""
        if self.tree.is_guarded(use.node):
            self.say(use.node, "left", f"{'.'.join(use.parts)} depends on a version: left alone")
            return
        try:
            self._rewrite_spelled(use, old)
        except ByHand as why:
            self.say(use.node, "by hand", str(why))

    def _rewrite_spelled(self, use: Use, old: str) -> None:
        """Rewrite a use to ``torch.amp.…``, by the name under which torch is known there."""
        name, edits = self._plan(use, old)
        torch = self._torch(use.scope)
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

    def _torch(self, scope: Scope) -> str | None:
        """The name of the module torch, as it is seen from a scope."""
        looked: Scope | None = scope
        names = {"torch": None}
        while looked is not None:
            for name, bindings in looked.bindings.items():
                if any(binding.origin == "torch" for binding in bindings):
                    names[name] = None
            looked = looked.parent
        for name in names:
            bound = scope.find(name)
            if bound is None:
                if any(use.parts[0] == name for use in self.tree.uses):
                    return name
            elif all(binding.origin == "torch" for binding in bound.bindings[name]):
                return name
        looked = scope
        while looked is not None:
            if looked in self.brings_torch:
                self.torch_needed.add(looked)
                return "torch"
            looked = looked.parent
        return None

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
        if isinstance(parent, cst.Call) and parent.func is node:
            return name, self._plan_call(name, device, parent, parent.args, use.scope)
        if name.startswith("custom"):
            return name, [Edit(*[self.tree.span(node)[1]] * 2, f'(device_type="{device}")')]
        if self._names_a_type(node):
            return name, []
        if isinstance(parent, cst.Arg):
            call = parents[parent]
            is_first = isinstance(call, cst.Call) and call.args[0] is parent
            if is_first and self.tree.origin(call.func, use.scope) == "functools.partial":
                rest = call.args[1:]
                return name, self._plan_call(name, device, call, rest, use.scope, after=parent)
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
            if isinstance(parent, cst.Call):
                is_check = dotted(parent.func) in (("isinstance",), ("issubclass",))
                return is_check and len(parent.args) == 2 and parent.args[1] is child
            inside = cst.Subscript | cst.SubscriptElement | cst.Index | cst.Tuple | cst.List
            if not isinstance(parent, inside | cst.Element | cst.BinaryOperation | cst.Arg):
                return False
        return False

    def _plan_call(
        self,
        name: str,
        device: str,
        call: cst.Call,
        args: list[cst.Arg],
        scope: Scope,
        after: cst.Arg | None = None,
    ) -> list[Edit]:
        """The edits of the arguments `args`, which stand after the argument `after` if that is."""
        if name.startswith("custom"):
            return [self._append(call, args, f'device_type="{device}"')]
        first, edits = f'"{device}"', []
        if name == "autocast":
            defaults, edits = self._plan_autocast(device, args, scope)
            first += defaults
        return [self._insert(call, args, first, after), *edits]

    def _plan_autocast(
        self, device: str, args: list[cst.Arg], scope: Scope
    ) -> tuple[str, list[Edit]]:
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
                mappings.append((start + len("**"), end))
            elif arg.keyword is not None:
                given[arg.keyword.value] = arg.value
            else:
                keyword = _AUTOCAST_ARGUMENTS[len(given)]
                given[keyword] = arg.value
                edits.append(Edit(start, start, f"{keyword}="))
        defaults, enabled = {}, given.get("enabled")
        if "dtype" not in given and not (
            isinstance(enabled, cst.Name) and enabled.value == "False"
        ):
            torch = self._torch(scope)
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
            start, end = mappings[0]
            listed = "".join(f'"{key}": {value}, ' for key, value in defaults.items())
            edits += [Edit(start, start, "{" + listed + "**"), Edit(end, end, "}")]
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
        if any(self.tree.is_guarded(alias) for alias in aliases):
            old = next(b.node for b in bindings if _is_old(b.origin or ""))
            self.say(old, "left", f"{name} depends on the version of torch: left alone")
            return
        if len({binding.origin for binding in bindings}) > 1:
            self.say(aliases[0], "by hand", f"{name} is bound to different things in one scope")
            return
        origin = bindings[0].origin
        if origin in OLD and (not uses or scope.kind == "class" or name in self._exported):
            self.say(
                aliases[0],
                "by hand",
                f"{name} is not used here, or not only: import it from torch.amp where it is used, "
                f'with its device "{OLD[origin][1]}"',
            )
            return
        statement = self.tree.parents[aliases[0]]
        is_here = any(node is statement and where is scope for node, where in self.tree.imports)
        if is_here and not any("torch" in other.bindings for other in self.tree.scopes):
            self.brings_torch.add(scope)
        planned, why, keeps = [], {}, False
        for use, old in uses:
            if self.tree.is_guarded(use.node):
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
        if scope in self.torch_needed:
            self._put_before(statement, "import torch")

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
                        alias.asname is None and not self.tree.is_guarded(alias)
                    ):
                        if alias.asname is None:
                            self.say(alias, "rewritten", "torch.amp is imported")
                        self.edits.append(Edit(*self.tree.span(alias.name), "torch.amp"))
            elif isinstance(node.names, cst.ImportStar):
                module = "" if node.relative else ".".join(dotted(node.module))
                if module.startswith(tuple(OLD_MODULES)) and not self.tree.is_guarded(node):
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
        last_kept = max(i for i, alias in enumerate(aliases) if alias not in moved)
        for i, alias in enumerate(aliases):
            if alias in moved:
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
