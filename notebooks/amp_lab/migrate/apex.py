"""From NVIDIA Apex to PyTorch: rewritten where that is certain, else marked with what to do.

What Apex's functions do, and their arguments and defaults, is from its sources
(https://github.com/NVIDIA/apex: ``apex/amp``, ``apex/optimizers``, ``apex/normalization``).
"""

from collections import Counter

import libcst as cst

from amp_lab.migrate import apex_loop
from amp_lab.migrate.python_tree import Edit, Finding, Scope, Tree, Use, dotted
from amp_lab.migrate.version_guards import is_guarded

MARK = "# amp-lab migrate: "

_CALLS = {  # old name: new module, new name, positional arguments at most, keywords, what is added
    "apex.optimizers.FusedAdam": (
        "torch.optim",
        "AdamW",
        2,
        ("params", "lr", "betas", "eps", "weight_decay"),
        {"weight_decay": "0.0", "fused": "True"},  # AdamW's own decay is 0.01
    ),
    "apex.optimizers.FusedSGD": (
        "torch.optim",
        "SGD",
        5,
        ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov"),
        {"fused": "True"},
    ),
    "apex.normalization.FusedLayerNorm": (
        "torch.nn",
        "LayerNorm",
        3,
        ("normalized_shape", "eps", "elementwise_affine"),
        {},
    ),
    "apex.parallel.convert_syncbn_model": (
        "torch.nn",
        "SyncBatchNorm.convert_sync_batchnorm",
        1,
        (),
        {},
    ),
}
_SCALER = 'scaler = torch.amp.GradScaler("cuda") once'
_AUTOCAST = 'the forward pass and the loss in torch.autocast("cuda", dtype=torch.float16)'
_ADVICE = {
    "apex.amp.state_dict": "save scaler.state_dict(), the scaler's, in its place",
    "apex.amp.load_state_dict": (
        'scaler.load_state_dict(...); from a checkpoint of Apex, "scale" is its "loss_scale" and '
        '"_growth_tracker" its "unskipped"'
    ),
    "apex.amp.master_params": (
        'write (p for group in optimizer.param_groups for p in group["params"])'
    ),
    "apex.amp.disable_casts": 'write torch.autocast("cuda", enabled=False)',
    "apex.amp.half_function": "drop it: autocast casts the ops inside to float16 by itself",
    "apex.amp.float_function": (
        'compute in torch.autocast("cuda", enabled=False), on x.float() for each input'
    ),
    "apex.amp.promote_function": "drop it: ops of two dtypes promote by themselves in autocast",
    "apex.amp.init": f"drop it: put {_AUTOCAST}, and make {_SCALER}",
    "apex.amp": "use torch.amp: autocast and GradScaler",
    "apex.optimizers.FusedAdam": (
        "write torch.optim.AdamW(..., weight_decay=0.0, fused=True), or torch.optim.Adam if it has "
        "adam_w_mode=False"
    ),
    "apex.optimizers.FusedSGD": "write torch.optim.SGD(..., fused=True)",
    "apex.optimizers": "torch.optim has no such optimizer: take torch.optim.AdamW, and tune anew",
    "apex.parallel.DistributedDataParallel": (
        "write torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])"
    ),
    "apex.parallel.SyncBatchNorm": "write torch.nn.SyncBatchNorm",
    "apex.parallel.convert_syncbn_model": (
        "write torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    ),
    "apex.parallel": "use torch.nn.parallel",
    "apex.normalization.FusedRMSNorm": "write torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.normalization": "write torch.nn.LayerNorm",
    "apex.fp16_utils": f"keep the model in float32; put {_AUTOCAST}, and make {_SCALER}",
    "apex": "look for its name of today in torch.amp, torch.optim or torch.nn",
}
_LEVELS = {
    "O0": "O0 is plain float32: delete it, and amp.scale_loss with it",
    "O1": f"O1 casts ops: delete it, put {_AUTOCAST}, and make {_SCALER}",
    "O2": (
        f"O2 keeps float32 master weights, as torch does by itself: delete it, put {_AUTOCAST}, "
        f"and make {_SCALER}"
    ),
    "O3": "O3 is pure float16: delete it, and write model.half(), without a scaler",
}


def _is_apex(origin: str) -> bool:
    return origin.startswith("apex.")


class _Rewriter:
    def __init__(self, tree: Tree):
        self.tree = tree
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        self.marks: dict[cst.CSTNode, list[str]] = {}
        self.doubt = ""
        self.is_plain = False  # O0
        self.spelled: Counter[cst.CSTNode] = Counter()  # uses rewritten to torch, by import

    def run(self) -> None:
        by_alias: dict[cst.CSTNode, list[Use]] = {}
        uses = [
            (use, found)
            for use in self.tree.uses
            if (found := sorted(o for o in self.tree.origins(use) if o and _is_apex(o)))
        ]
        self.is_plain = any(
            self._rule_of_level(self._call(use)) == _LEVELS["O0"]
            for use, found in uses
            if found[0] == "apex.amp.initialize"
        )
        loop, is_loop = None, any(found[0] == "apex.amp.initialize" for _, found in uses)
        if is_loop:
            try:
                loop = apex_loop.rewrite(self.tree, [(use, found[0]) for use, found in uses])
                self.edits += loop.edits
                self.findings += loop.findings
            except apex_loop.Doubt as doubt:
                self.doubt = str(doubt)
        for use, found in uses:
            bound = use.scope.find(use.parts[0])
            bindings = bound.bindings[use.parts[0]] if bound else []
            certain = len(bindings) == 1 and not is_guarded(self.tree, use.node)
            alias = bindings[0].node if certain else None
            if (
                found[0] in _CALLS
                and alias is not None
                and self._has_plain_arguments(use, found[0])
            ):
                if len(use.parts) == 1:
                    by_alias.setdefault(alias, []).append(use)
                    continue
                if self._rewrite_spelled(use, found[0]):
                    self.spelled[alias] += 1
                    continue
            is_alone = found[0] == "apex.amp.master_params" and (loop is not None or not is_loop)
            if is_alone and certain and self._rewrite_parameters(use):
                continue
            if loop is not None and use.node in loop.uses:
                continue
            why = f"; not done here, as {self.doubt}" if self.doubt else ""
            is_first = found[0] == "apex.amp.initialize"
            self._mark(use.node, self._advice(use, found[0]), why if is_first else "")
        for node, scope in self.tree.imports:
            if isinstance(node, cst.ImportFrom):
                self._rewrite_import(node, scope, by_alias, loop.aliases if loop else set())
        self._put_marks()

    # What is certain.

    def _call(self, use: Use) -> cst.Call | None:
        is_inside = any(
            isinstance(p, cst.FormattedString) for p, _ in self.tree.ancestors(use.node)
        )
        return None if is_inside else self.tree.call_of(use.node)

    def _has_plain_arguments(self, use: Use, old: str) -> bool:
        """Whether it is called, with arguments that mean the same to the new one."""
        call = self._call(use)
        _, _, most, keywords, _ = _CALLS[old]
        if call is None or not call.args or any(arg.star for arg in call.args):
            return False
        given = [arg.keyword.value for arg in call.args if arg.keyword is not None]
        return len(call.args) - len(given) <= most and set(given) <= set(keywords)

    def _plan(self, use: Use, old: str, name: str) -> list[Edit]:
        call, added = self._call(use), _CALLS[old][-1]
        given = {arg.keyword.value for arg in call.args if arg.keyword is not None}
        end = self.tree.span(call.args[-1])[1]
        text = "".join(f", {key}={value}" for key, value in added.items() if key not in given)
        self._say(use.node, "rewritten", f"{old} is {_CALLS[old][0]}.{_CALLS[old][1]}")
        edits = [Edit(*self.tree.span(use.node), name)]
        return [*edits, Edit(end, end, text)] if text else edits

    def _rewrite_spelled(self, use: Use, old: str) -> bool:
        scope = use.scope.find("torch")
        if scope is None or {b.origin for b in scope.bindings["torch"]} != {"torch"}:
            return False
        self.edits += self._plan(use, old, ".".join(_CALLS[old][:2]))
        return True

    def _rewrite_parameters(self, use: Use) -> bool:
        call = self._call(use)
        if call is None or len(call.args) != 1 or not dotted(call.args[0].value):
            return False
        has_comment = "#" in self.tree.text[slice(*self.tree.span(call))]
        if call.args[0].keyword is not None or call.args[0].star or has_comment:
            return False
        optimizer = self.tree.code(call.args[0].value)
        new = f'(p for group in {optimizer}.param_groups for p in group["params"])'
        self.edits.append(Edit(*self.tree.span(call), new))
        self._say(use.node, "rewritten", "amp.master_params: the parameters are the master weights")
        return True

    def _rewrite_import(self, node: cst.ImportFrom, scope, by_alias: dict, gone: set) -> None:
        """Replace an import if each name in it can be, else mark the uses that could have been."""
        names = list(node.names) if not isinstance(node.names, cst.ImportStar) else []
        if gone.intersection(names):
            names = [alias for alias in names if alias not in gone]
            if not names:
                return
        module = "" if node.relative or node.module is None else ".".join(dotted(node.module))
        if not module.startswith("apex"):
            return
        if not names:
            self._mark(node, f"import the names that are used: {self._rule(module)}")
            return
        olds = [f"{module}.{alias.name.value}" for alias in names]
        news = [_CALLS.get(old, ("", ""))[:2] for old in olds]
        taken = {new.partition(".")[0] for _, new in news}
        is_free = not any(taken & other.bindings.keys() for other in self.tree.scopes)
        count = {alias: self._count_uses(alias, scope) for alias in names}
        if (
            len({module for module, _ in news}) == 1
            and is_free
            and all(new for _, new in news)
            and all(count[alias] == len(by_alias.get(alias, ())) > 0 for alias in names)
            and not is_guarded(self.tree, node)
            and not gone.intersection(node.names)
        ):
            self.edits.append(Edit(*self.tree.span(node.module), news[0][0]))
            for alias, old, (_, new) in zip(names, olds, news, strict=True):
                bound, dot, rest = new.partition(".")
                self.edits.append(Edit(*self.tree.span(alias.name), bound))
                for use in by_alias[alias]:
                    local = bound if alias.asname is None else use.parts[0]
                    self.edits += self._plan(use, old, local + dot + rest)
            return
        for alias, old in zip(names, olds, strict=True):
            left = count[alias] - self.spelled[alias]
            for use in by_alias.get(alias, ()):
                if self._rewrite_spelled(use, old):
                    left -= 1
                else:
                    self._mark(use.node, self._advice(use, old))
            if left == 0:
                is_tried = any(isinstance(p, cst.Try) for p, _ in self.tree.ancestors(node))
                rest = "and the try around it" if is_tried else "from the import"
                self._mark(alias, f"nothing uses {old} here: delete it {rest}")

    def _count_uses(self, alias: cst.ImportAlias, scope) -> int:
        name = alias.name.value if alias.asname is None else alias.asname.name.value
        home = scope.find(name)
        return sum(u.parts[0] == name and u.scope.find(name) is home for u in self.tree.uses)

    # What is not.

    def _say(self, node: cst.CSTNode, kind: str, message: str) -> None:
        self.findings.append(Finding(self.tree.line(node), kind, message))

    def _advice(self, use: Use, old: str) -> str:
        call = self._call(use)
        if old == "apex.amp.initialize":
            return self._rule_of_level(call)
        if old == "apex.amp.scale_loss":
            loss, optimizer = self._loss_and_optimizer(call)
            if self.is_plain:
                return f"write {loss}.backward(): O0 is plain float32"
            advice = (
                f"write scaler.scale({loss}).backward(), and scaler.step({optimizer}) and "
                f"scaler.update() for {optimizer}.step(); before clipping, "
                f"scaler.unscale_({optimizer})"
            )
            return advice + self._passed_to(use.scope)
        return self._rule(old)

    def _loss_and_optimizer(self, call: cst.Call | None) -> tuple[str, str]:
        """What stands for them in a call of ``scale_loss``, in one line."""
        given = {"loss": "loss", "optimizers": "optimizer"}
        for name, arg in zip(given, call.args if call is not None else (), strict=False):
            code = self.tree.code(arg.value)
            if not arg.star and "#" not in code:
                given[name if arg.keyword is None else arg.keyword.value] = " ".join(code.split())
        return given["loss"], given["optimizers"]

    def _passed_to(self, scope: Scope) -> str:
        """What to add where a function does not make the scaler itself."""
        if not isinstance(scope.node, cst.FunctionDef) or any(
            self.tree.origins(use) == {"apex.amp.initialize"} and use.scope is scope
            for use in self.tree.uses
        ):
            return ""
        return f"; pass scaler to {scope.node.name.value}()"

    def _rule_of_level(self, call: cst.Call | None) -> str:
        level = "O1"
        for position, arg in enumerate(call.args if call is not None else ()):
            is_it = arg.keyword is not None and arg.keyword.value == "opt_level"
            if is_it or (arg.keyword is None and position == 3):
                level = self.tree.code(arg.value).strip("\"'")
            elif arg.star:
                level = ""
        return _LEVELS.get(level, f"for O1 and O2 delete it, put {_AUTOCAST}, and make {_SCALER}")

    @staticmethod
    def _rule(old: str) -> str:
        while old not in _ADVICE:
            old = old.rpartition(".")[0]
        return _ADVICE[old]

    def _mark(self, node: cst.CSTNode, advice: str, why: str = "") -> None:
        self._say(node, "by hand", advice + why)
        self.marks.setdefault(self.tree.statement(node), []).append(advice)

    def _put_marks(self) -> None:
        """Put each advice as a comment above its statement, unless it is there."""
        for statement, pieces in self.marks.items():
            start = self.tree.span(statement)[0]
            indent = self.tree.indent(start)
            above = self.tree.text[: start - len(indent)].splitlines()
            there = set()
            while above and above[-1].lstrip().startswith(MARK):
                there.add(above.pop().strip().removeprefix(MARK))
            text = "".join(
                f"{MARK}{advice}{self.tree.newline}{indent}"
                for advice in dict.fromkeys(pieces)
                if advice not in there
            )
            if text:
                self.edits.append(Edit(start, start, text))


def rewrite(tree: Tree) -> tuple[list[Edit], list[Finding]]:
    """The edits that are certain, marks for the rest, and what there is to say about the lines."""
    rewriter = _Rewriter(tree)
    rewriter.run()
    return rewriter.edits, rewriter.findings
