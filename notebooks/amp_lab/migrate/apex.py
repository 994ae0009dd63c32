"""From NVIDIA Apex to PyTorch: rewritten where that is certain, else marked with what to do.

A name is rewritten if torch has an exact equal. A training loop is not: what `amp.initialize` and
`amp.scale_loss` do is spread over model, optimizer and loop, so each such line gets a comment.

What Apex's functions do, and their arguments and defaults, is from its sources
(https://github.com/NVIDIA/apex: ``apex/amp``, ``apex/optimizers``, ``apex/normalization``).
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.python_tree import Scope, Tree, Use
from amp_lab.migrate.rewriter import Rewriter
from amp_lab.migrate.version_guards import is_guarded

TRIGGERS = ("apex",)
MARK = "# amp-lab migrate: "


class Equal(NamedTuple):
    """What torch has for a name of Apex, and with which arguments the two mean the same."""

    module: str
    name: str
    positional: int
    keywords: tuple[str, ...] = ()
    added: tuple[tuple[str, str], ...] = ()  # keywords, where they are not given


EQUALS = {
    "apex.optimizers.FusedAdam": Equal(
        "torch.optim",
        "AdamW",
        2,
        ("params", "lr", "betas", "eps", "weight_decay"),
        (("weight_decay", "0.0"), ("fused", "True")),  # AdamW's own decay is 0.01
    ),
    "apex.optimizers.FusedSGD": Equal(
        "torch.optim",
        "SGD",
        5,
        ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov"),
        (("fused", "True"),),
    ),
    "apex.normalization.FusedLayerNorm": Equal(
        "torch.nn", "LayerNorm", 3, ("normalized_shape", "eps", "elementwise_affine")
    ),
    "apex.parallel.convert_syncbn_model": Equal(
        "torch.nn", "SyncBatchNorm.convert_sync_batchnorm", 1
    ),
}
AUTOCAST = 'the forward pass and the loss in torch.autocast("cuda", dtype=torch.float16)'
SCALER = 'scaler = torch.amp.GradScaler("cuda") once'
ADVICE = {  # by the longest name that fits
    "apex.amp.initialize": (
        f"delete it; at O1 and O2 put {AUTOCAST}, and make {SCALER}; O0 is plain float32, and O3 "
        "is model.half(), both without a scaler"
    ),
    "apex.amp.scale_loss": (
        "write scaler.scale(loss).backward(); for optimizer.step() write scaler.step(optimizer), "
        "then scaler.update() once; call scaler.unscale_(optimizer) before clipping; "
        "at O0 and O3 write loss.backward() alone"
    ),
    "apex.amp.master_params": (
        'write (p for group in optimizer.param_groups for p in group["params"]), after '
        "scaler.unscale_(optimizer) where there is a scaler"
    ),
    "apex.amp.state_dict": "save scaler.state_dict() in its place",
    "apex.amp.load_state_dict": (
        'write scaler.load_state_dict(...); in a checkpoint of Apex, "scale" is "loss_scale" of '
        '"loss_scaler0", and "_growth_tracker" is its "unskipped"'
    ),
    "apex.amp.disable_casts": 'write torch.autocast("cuda", enabled=False)',
    "apex.amp.half_function": "drop it: autocast casts the ops inside to float16 by itself",
    "apex.amp.float_function": (
        'compute in torch.autocast("cuda", enabled=False), on x.float() for each input'
    ),
    "apex.amp.promote_function": "drop it: ops of two dtypes promote by themselves in autocast",
    "apex.amp.init": f"drop it: put {AUTOCAST}, and make {SCALER}",
    "apex.amp": "use torch.amp: autocast and GradScaler",
    "apex.optimizers.FusedAdam": (
        "write torch.optim.AdamW(..., weight_decay=0.0, fused=True), or torch.optim.Adam if it has "
        "adam_w_mode=False"
    ),
    "apex.optimizers.FusedSGD": "write torch.optim.SGD(..., fused=True)",
    "apex.optimizers.FusedAdagrad": "write torch.optim.Adagrad(...)",
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
    "apex.fp16_utils": f"keep the model in float32; put {AUTOCAST}, and make {SCALER}",
    "apex": "look for its name of today in torch.amp, torch.optim or torch.nn",
}
SECTIONS = {  # of notebook 13, where it is explained: the heading for a name, and those below it
    "apex.amp.initialize": "What each level did, and what does it today",
    "apex.amp.init": "What each level did, and what does it today",
    "apex.fp16_utils": "What each level did, and what does it today",
    "apex.amp.scale_loss": "The loop, line by line",
    "apex.amp.master_params": "The loop, line by line",
    "apex.amp.state_dict": "Checkpoints that Apex wrote",
    "apex.amp.load_state_dict": "Checkpoints that Apex wrote",
    "apex": "The names, then and now",
}


class Rule(Rewriter):
    """The names of Apex in one file."""

    def __init__(self, tree: Tree, path: Path | None = None):
        super().__init__(tree, path)
        self.marks: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)  # by statement
        self.imported: defaultdict[cst.CSTNode, list[Use]] = defaultdict(list)  # by import alias
        self.spelled: Counter[cst.CSTNode] = Counter()  # uses rewritten to torch, by import alias

    def run(self) -> None:
        """Rewrite what is certain, and mark the rest."""
        for use in self.tree.uses:
            found = sorted(o for o in use.origins if o and o.startswith("apex."))
            if found and not self._rewrite(use, found[0]):
                self._mark_use(use, found[0])
        self._mark_stars()
        for node, scope in self.tree.imports.items():
            if isinstance(node, cst.ImportFrom) and _is_apex(nodes.module_of(node)):
                self._rewrite_import(node, scope)
        self._put_marks()  # last: one statement may have several

    # What is certain.

    def _rewrite(self, use: Use, old: str) -> bool:
        """Rewrite a use, or leave it to its import, if that is certain."""
        binding = use.scope.only(use.parts[0])
        if binding is None or is_guarded(self.tree, use.node):
            return False
        if old not in EQUALS or not self._is_plain_call(use, EQUALS[old]):
            return False
        if len(use.parts) == 1:  # its import has to change with it, so that decides
            self.imported[binding.node].append(use)
            return True
        is_done = self._rewrite_spelled(use, old)
        self.spelled[binding.node] += is_done
        return is_done

    def _is_plain_call(self, use: Use, equal: Equal) -> bool:
        """Whether a use is a call whose arguments mean the same to the new name."""
        call = self.tree.call_of(use.node)
        # In an f-string a quote or a comment of ours might end the string.
        if call is None or self.tree.is_in(use.node, cst.FormattedString):
            return False
        if not call.args or any(arg.star for arg in call.args):
            return False
        given = nodes.arguments(call.args)
        return len(call.args) - len(given) <= equal.positional and given.keys() <= {*equal.keywords}

    def _rewrite_to(self, use: Use, old: str, name: str) -> None:
        call, equal = self.tree.call_of(use.node), EQUALS[old]
        assert call is not None  # asked before the use was taken on
        self.replace(use.node, name)
        given = nodes.arguments(call.args)
        for key, value in equal.added:
            if key not in given:
                self.insert(self.tree.span(call.args[-1])[1], f", {key}={value}")
        self.say(use.node, "rewritten", f"{old} is {equal.module}.{equal.name}")

    def _rewrite_spelled(self, use: Use, old: str) -> bool:
        """Rewrite a use to a dotted name of torch, if torch is imported by that name."""
        if {binding.origin for binding in use.scope.bound("torch")} != {"torch"}:
            return False
        self._rewrite_to(use, old, f"{EQUALS[old].module}.{EQUALS[old].name}")
        return True

    def _rewrite_import(self, node: cst.ImportFrom, scope: Scope) -> None:
        """Replace an import if each name in it can be, else mark the uses that could have been."""
        olds = {alias: self.tree.imported[alias] or "" for alias in nodes.aliases_of(node)}
        count = {alias: self.tree.count_uses(nodes.bound_name(alias), scope) for alias in olds}
        if self._can_be_torch(node, olds, count):
            self._import_from_torch(node, olds)
            return
        for alias, old in olds.items():
            left = count[alias] - self.spelled[alias]
            for use in self.imported[alias]:
                if self._rewrite_spelled(use, old):
                    left -= 1
                else:
                    self._mark_use(use, old)
            # It may be there to ask whether Apex is installed. Elsewhere the next run would see
            # what this one left behind.
            if left == 0 and not self.tree.is_in(node, cst.Try):
                self._mark(alias, f"nothing uses {old} here: delete it from the import")

    def _can_be_torch(self, node: cst.ImportFrom, olds: dict, count: dict) -> bool:
        """Whether every name of an import has an equal in one module, by which all uses can go."""
        if not set(olds.values()) <= EQUALS.keys() or is_guarded(self.tree, node):
            return False
        if any(count[alias] != len(self.imported[alias]) or not count[alias] for alias in olds):
            return False
        equals = [EQUALS[old] for old in olds.values()]
        taken = {equal.name.partition(".")[0] for equal in equals}
        # AdamW may be another
        is_free = not any(taken & scope.bindings.keys() for scope in self.tree.scopes)
        return is_free and len({equal.module for equal in equals}) == 1

    def _import_from_torch(self, node: cst.ImportFrom, olds: dict[cst.ImportAlias, str]) -> None:
        assert node.module is not None  # it is an absolute import
        self.replace(node.module, EQUALS[next(iter(olds.values()))].module)
        for alias, old in olds.items():
            bound, dot, rest = EQUALS[old].name.partition(".")
            self.replace(alias.name, bound)
            for use in self.imported[alias]:
                local = bound if alias.asname is None else use.parts[0]
                self._rewrite_to(use, old, local + dot + rest)

    # What is not.

    def _mark_stars(self) -> None:
        for star, module in self.tree.stars.items():
            if _is_apex(module):
                self._mark(star, f"import the names that are used: {_longest(ADVICE, module)}")

    def _mark_use(self, use: Use, old: str) -> None:
        where = f' (notebook 13, "{_longest(SECTIONS, old)}")'
        self._mark(use.node, _longest(ADVICE, old), where)

    def _mark(self, node: cst.CSTNode, advice: str, where: str = "") -> None:
        """Say what is to be done, and `where` to read more, which the comment leaves out."""
        self.say(node, "by hand", advice + where)
        self.marks[self.tree.statement(node)].append(advice)

    def _put_marks(self) -> None:
        """Put each advice as a comment above its statement, unless it is there."""
        for statement, pieces in self.marks.items():
            start = self.tree.span(statement)[0]
            indent = self.tree.indent(start) or ""
            above = self.tree.text[: start - len(indent)].splitlines()
            there = set()
            while above and above[-1].lstrip().startswith(MARK):  # marks of a run before
                there.add(above.pop().strip().removeprefix(MARK))
            for advice in dict.fromkeys(pieces):
                if advice not in there:
                    self.insert(start, f"{MARK}{advice}{self.tree.newline}{indent}")


def _is_apex(module: str) -> bool:
    return module.partition(".")[0] == "apex"


def _longest(table: dict[str, str], name: str) -> str:
    """What a table has for a dotted name, or for the longest part that it begins with."""
    while name not in table:
        name = name.rpartition(".")[0]
    return table[name]
