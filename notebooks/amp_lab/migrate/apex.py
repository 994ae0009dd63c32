"""From NVIDIA Apex to PyTorch: rewritten where that is certain, else reported with what to do.

A name is rewritten if torch has an exact equal. A training loop is not: what `amp.initialize` and
`amp.scale_loss` do is spread over model, optimizer and loop, so each such line is reported, and
gets a comment if marks are asked for. What is chosen where Apex is installed stays whole.

What Apex's functions do, and their arguments and defaults, is from its sources
(https://github.com/NVIDIA/apex: ``apex/amp``, ``apex/optimizers``, ``apex/normalization``).
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.python_tree import Scope, Tree, Use
from amp_lab.migrate.rewriter import Rewriter
from amp_lab.migrate.version_guards import is_guarded
from amp_lab.remedies import remedy

_Entry = TypeVar("_Entry")
TRIGGERS = ("apex",)
MARK = "# amp-lab migrate: "


class Equal(NamedTuple):
    """What torch has for a name of Apex, and with which arguments the two mean the same."""

    module: str
    name: str
    positional: int
    keywords: str = ""
    added: str = ""  # keywords, where they are not given


EQUALS = {
    "apex.optimizers.FusedAdam": Equal(  # AdamW's own decay is 0.01
        "torch.optim", "AdamW", 2, "params lr betas eps weight_decay", "weight_decay=0.0 fused=True"
    ),
    "apex.optimizers.FusedSGD": Equal(
        "torch.optim", "SGD", 5, "params lr momentum dampening weight_decay nesterov", "fused=True"
    ),
    "apex.optimizers.FusedAdagrad": Equal(
        "torch.optim", "Adagrad", 2, "params lr eps weight_decay"
    ),
    "apex.normalization.FusedLayerNorm": Equal(
        "torch.nn", "LayerNorm", 3, "normalized_shape eps elementwise_affine"
    ),
    "apex.parallel.convert_syncbn_model": Equal(
        "torch.nn", "SyncBatchNorm.convert_sync_batchnorm", 1
    ),
    "apex.parallel.SyncBatchNorm": Equal(
        "torch.nn", "SyncBatchNorm", 6, "eps momentum affine track_running_stats"
    ),
    # with delay_allreduce, gradients that a loss does not need are allowed: by hand
    "apex.parallel.DistributedDataParallel": Equal(
        "torch.nn.parallel", "DistributedDataParallel", 1
    ),
    "apex.contrib.clip_grad.clip_grad_norm_": Equal(
        "torch.nn.utils", "clip_grad_norm_", 4, "parameters max_norm norm_type error_if_nonfinite"
    ),
}
# apex.optimizers.fused_adam.FusedAdam is apex.optimizers.FusedAdam
_INNER = re.compile(r"^(apex\.(?:optimizers|parallel|normalization|contrib\.clip_grad))\.[a-z_]+\.")
_AVAILABLE = re.compile(
    r"(?i)^_*(?:has|have|is|no|found|imported)_*(?:\w+_)?apex|apex_*(?:is_*)?(?:avail|install|import|found|exist)"
)
_LOOKS_FOR = re.compile(r"(?i)find|avail|install|import|exist|has_")  # find_spec("apex")
AUTOCAST = 'the forward pass and the loss in torch.autocast("cuda", dtype=torch.float16)'
SCALER = 'scaler = torch.amp.GradScaler("cuda") once'
_MASTERS = f"keep the model in float32; put {AUTOCAST}, and make {SCALER}, to train"
_FLOAT = 'compute in torch.autocast("cuda", enabled=False), on x.float() for each input'
_PROMOTES = "drop it: ops of two dtypes promote by themselves in autocast"
_ADVICE = {name: f"write {equal.module}.{equal.name}" for name, equal in EQUALS.items()}
_ADVICE |= {  # by the longest name that fits
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
    "apex.amp.half_function": "drop it: autocast casts matrix products to float16 itself",
    "apex.amp.float_function": _FLOAT,
    "apex.amp.promote_function": _PROMOTES,
    "apex.amp.register_half_function": "drop it: autocast casts matrix products to float16 itself",
    "apex.amp.register_float_function": _FLOAT,
    "apex.amp.register_promote_function": _PROMOTES,
    "apex.amp.init": f"drop it: put {AUTOCAST}, and make {SCALER}",
    "apex.amp": "torch.amp is always there; what keeps a state, as this module did, is the scaler",
    "apex.optimizers.FusedAdam": (
        "write torch.optim.AdamW(..., weight_decay=0.0, fused=True), or torch.optim.Adam if it has "
        "adam_w_mode=False; bias_correction=False has no equal"
    ),
    "apex.optimizers.FusedSGD": "write torch.optim.SGD(..., fused=True)",
    "apex.optimizers.FP16_Optimizer": _MASTERS,
    "apex.optimizers": "torch.optim has no such optimizer: take torch.optim.AdamW, and tune anew",
    "apex.parallel.DistributedDataParallel": (
        "write torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank]), for "
        "delay_allreduce=True with find_unused_parameters=True"
    ),
    "apex.parallel": "torch has no equal of it: see whether it is still needed",
    "apex.normalization.FusedRMSNorm": "write torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.normalization.MixedFusedRMSNorm": "write torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.normalization": "write torch.nn.LayerNorm",
    "apex.fp16_utils": _MASTERS,
    "apex.contrib.group_norm": "write torch.nn.GroupNorm, and its activation after it",
    "apex.contrib.layer_norm": "write torch.nn.LayerNorm",
    "apex.contrib.optimizers.FP16_Optimizer": _MASTERS,
    "apex.contrib.optimizers.DistributedFusedAdam": (
        "shard with torch.distributed.fsdp.fully_shard, or torch's ZeroRedundancyOptimizer"
    ),
    "apex.contrib.xentropy": (
        'write torch.nn.functional.cross_entropy(..., ignore_index=0, reduction="none"), and '
        "label_smoothing= for its smoothing"
    ),
    "apex.contrib": "torch has no equal of it: keep Apex for it, or see what torch.nn has",
    "apex.transformer": "torch has no equal of it: Megatron-LM has its own by now",
    "apex.mlp": "write torch.nn.Sequential of Linear and ReLU; torch.compile fuses them",
    "apex.multi_tensor_apply": "torch's optimizers and clip_grad_norm_ take many tensors at once",
    "apex.pyprof": "use torch.profiler, or torch.autograd.profiler.emit_nvtx",
    "apex": "torch has no equal of this name: see what it does, and whether it is still needed",
}
ADVICE = {
    name: remedy(f"migrate.{name}", f"{name} is used and not rewritten", text)
    for name, text in _ADVICE.items()
}
_UNUSED = remedy(
    "migrate.apex_unused",
    "an import of Apex is left over",
    "nothing in this file uses {name}, and without Apex its import fails: delete the import, "
    "unless another file imports {name} from here",
)
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

    def __init__(self, tree: Tree, mark: bool = False):
        super().__init__(tree, mark)
        self.told: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)  # by statement
        self.imported: defaultdict[cst.CSTNode, list[Use]] = defaultdict(list)  # by import alias
        self.spelled: Counter[cst.CSTNode] = Counter()  # uses rewritten to torch, by import alias

    def run(self) -> None:
        """Rewrite what is certain, and report the rest."""
        for use in self.tree.uses:
            for old in sorted(o for o in use.origins if o and o.startswith("apex."))[:1]:
                self._look_at(use, old)
        for star, module in self.tree.stars.items():
            if _is_apex(module):
                self._tell(star, module)
        for node, scope in self.tree.imports.items():
            self._rewrite_import(node, scope)
        self._put_marks()  # last: one statement may have several

    def _look_at(self, use: Use, old: str) -> None:
        choice = self._choice(use)
        if choice is not None:
            self.say(choice, "left", "a choice for where Apex is installed: left alone")
        elif self._is_torchs_elsewhere(use, EQUALS.get(_named(old))):
            self.say(use.node, "left", "the other arm is torch's own already: left alone")
        elif not self._rewrite(use, _named(old)):
            self._tell(use.node, old)

    def _choice(self, use: Use) -> cst.CSTNode | None:
        """What decides, by whether Apex is installed, if a use runs; else None."""
        others = [b for b in use.scope.bound(use.parts[0]) if not _is_apex(b.origin)]
        if not all(binding.is_none for binding in others):
            return use.node  # what it is called elsewhere is torch's, or the file's own
        above = self.tree.ancestors(use.node)
        return next((parent for parent, child in above if self._decides(parent, child)), None)

    def _decides(self, parent: cst.CSTNode, child: cst.CSTNode) -> bool:
        if isinstance(parent, cst.Try):
            return child is parent.body and not _always_ends(parent)
        if isinstance(parent, cst.With):
            called = [i.item for i in parent.items if isinstance(i.item, cst.Call)]
            return child is parent.body and any(nodes.name_called(c) == "suppress" for c in called)
        is_operator = isinstance(parent, cst.BooleanOperation)
        test = parent.left if is_operator else getattr(parent, "test", None)
        return test is not None and test is not child and self._asks_for_apex(test)

    def _asks_for_apex(self, test: cst.CSTNode) -> bool:
        if _looks_for_apex(test):
            return True
        uses = self.tree.uses_among(nodes.below(test))
        return any(_AVAILABLE.search(use.parts[-1]) or self._tells_of_apex(use) for use in uses)

    def _tells_of_apex(self, use: Use) -> bool:
        """Whether a name is of Apex, or was set where it was tried."""
        if any(map(_is_apex, use.origins)):
            return True
        bound = use.scope.bound(use.parts[-1])
        if any(b.source is not None and _looks_for_apex(b.source) for b in bound):
            return True
        above = (parent for b in bound for parent, _ in self.tree.ancestors(b.node))
        return any(isinstance(a, cst.Try) and "apex" in self.tree.code(a.body) for a in above)

    def _is_torchs_elsewhere(self, use: Use, equal: Equal | None) -> bool:
        """Whether the other arm of an `if` makes the same by torch: both would become equal."""
        call = self.tree.call_of(use.node)
        if call is None or equal is None or equal.added:
            return False
        for parent, child in self.tree.ancestors(use.node):
            if isinstance(parent, cst.If | cst.IfExp) and child in (parent.body, parent.orelse):
                other = parent.orelse if child is parent.body else parent.body
                if self._makes(other, f"{equal.module}.{equal.name}", call.args):
                    return True
        return False

    def _makes(self, arm: cst.CSTNode | None, name: str, args: Sequence[cst.Arg]) -> bool:
        """Whether something of a dotted name is called in an arm, with the same arguments."""
        given = [self.tree.code(arg.value) for arg in args]
        made = [n for n in nodes.below(arm) if isinstance(n, cst.Call)] if arm is not None else []
        same = [n for n in made if self.tree.calls[n].origin(n.func) == name]
        return any([self.tree.code(arg.value) for arg in call.args] == given for call in same)

    # What is certain.

    @functools.cached_property
    def compared(self) -> set[str]:
        """The names of Apex that stand somewhere for a type."""
        types = [use for use in self.tree.uses if self.tree.place_of_type(use.node) is not None]
        return {_named(origin) for use in types for origin in use.origins if origin}

    def _rewrite(self, use: Use, old: str) -> bool:
        """Rewrite a use, or leave it to its import, if that is certain."""
        binding = use.scope.only(use.parts[0])
        if binding is None or old not in EQUALS or is_guarded(self.tree, use.node):
            return False
        tries = [p for p, _ in self.tree.ancestors(binding.node) if isinstance(p, cst.Try)]
        if not all(map(_always_ends, tries)):
            return False  # its import stays, and what is done without Apex may be elsewhere
        if not self._is_plain_call(use, EQUALS[old]):
            return False
        if len(use.parts) == 1:  # its import has to change with it, so that decides
            self.imported[binding.node].append(use)
            return True
        is_done = self._rewrite_spelled(use, old)
        self.spelled[binding.node] += is_done
        return is_done

    def _is_plain_call(self, use: Use, equal: Equal) -> bool:
        """Whether a use, a call or the name of a type, means the same by the new name."""
        call = self.tree.call_of(use.node)
        if call is None:  # a check of the type goes with what is made, by the import of both
            return len(use.parts) == 1 and self.tree.place_of_type(use.node) is not None
        # In an f-string a quote or a comment of ours might end the string.
        if self.tree.is_in(use.node, cst.FormattedString):
            return False
        if not call.args or any(arg.star for arg in call.args):
            return False
        given = nodes.arguments(call.args)
        is_known = given.keys() <= {*equal.keywords.split()}
        return is_known and len(call.args) - len(given) <= equal.positional

    def _rewrite_to(self, use: Use, old: str, name: str) -> None:
        call, equal = self.tree.call_of(use.node), EQUALS[old]
        self.replace(use.node, name)
        if call is not None:
            given, end = nodes.arguments(call.args), self.tree.span(call.args[-1])[1]
            added = [f", {a}" for a in equal.added.split() if a.partition("=")[0] not in given]
            self.insert(end, "".join(added))
        self.say(use.node, "rewritten", f"{old} is {equal.module}.{equal.name}")

    def _rewrite_spelled(self, use: Use, old: str) -> bool:
        """Rewrite a use to a dotted name of torch, if torch is imported by that name."""
        if {binding.origin for binding in use.scope.bound("torch")} != {"torch"}:
            return False
        if old in self.compared:  # what is made has to be of the class that is asked for
            return False
        self._rewrite_to(use, old, f"{EQUALS[old].module}.{EQUALS[old].name}")
        return True

    def _rewrite_import(self, node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
        """Replace an import if each name in it can be, else the uses, and drop what is left."""
        olds = {alias: _named(self.tree.imported[alias] or "") for alias in nodes.aliases_of(node)}
        if not any(map(_is_apex, olds.values())):
            return
        count = {a: len(self.tree.uses_of(nodes.bound_name(a), scope)) for a in olds}
        if isinstance(node, cst.ImportFrom) and self._can_be_torch(node, olds, count):
            self._import_from_torch(node, olds)
            return
        for alias, old in olds.items():
            for use in self.imported[alias]:
                if self._rewrite_spelled(use, old):
                    self.spelled[alias] += 1
                else:
                    self._tell(use.node, old)
        gone = [alias for alias in olds if self.spelled[alias] == count[alias] > 0]
        if gone and not self.tree.is_in(node, cst.Try):
            self.remove_names(node, gone)
        for alias, old in olds.items():
            if count[alias] == 0 and _is_apex(old):
                self._tell_unused(alias, old, scope)

    def _can_be_torch(self, node: cst.ImportFrom, olds: dict, count: dict) -> bool:
        """Whether every name of an import has an equal in one module, by which all uses can go."""
        if not set(olds.values()) <= EQUALS.keys() or is_guarded(self.tree, node):
            return False
        if any(count[alias] != len(self.imported[alias]) for alias in olds):
            return False
        if not all(any(self.tree.call_of(u.node) for u in self.imported[a]) for a in olds):
            return False  # others make what is only asked for here, and may still have Apex
        # where an alias is kept, it is the alias that is bound
        taken = {EQUALS[old].name.partition(".")[0] for a, old in olds.items() if not a.asname}
        taken -= {nodes.bound_name(alias) for alias in olds}
        # AdamW may be another
        is_free = not any(taken & scope.bindings.keys() for scope in self.tree.scopes)
        return is_free and len({EQUALS[old].module for old in olds.values()}) == 1

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

    def _tell(self, node: cst.CSTNode, old: str) -> None:
        """Say what is to be done, and where to read more, which a comment leaves out."""
        advice = _longest(ADVICE, _named(old)).said()
        self.say(node, "by hand", f'{advice} (notebook 13, "{_longest(SECTIONS, _named(old))}")')
        self.told[self.tree.statement(node)].append(advice)

    def _tell_unused(self, alias: cst.ImportAlias, old: str, scope: Scope) -> None:
        """Say what to do with an import that nothing uses here, unless it is a choice."""
        if self._is_chosen(alias):
            return
        name = nodes.bound_name(alias)
        is_exported = name in self.tree.exported or alias.evaluated_alias == alias.evaluated_name
        if is_exported or scope.kind == "class":  # used from elsewhere
            self._tell(alias, old)
            return
        advice = _UNUSED.said(name=name)
        self.say(alias, "by hand", advice)
        self.told[self.tree.statement(alias)].append(advice)

    def _is_chosen(self, alias: cst.ImportAlias) -> bool:
        """Whether an import runs only where Apex is installed, for some versions, or for types."""
        if is_guarded(self.tree, alias):
            return True
        above = self.tree.ancestors(alias)
        return any(self._decides(parent, child) or _is_for_types(parent) for parent, child in above)

    def _put_marks(self) -> None:
        """Put each advice as a comment above its statement, unless it is there."""
        for statement, pieces in self.told.items() if self.mark else ():
            start = self.tree.span(statement)[0]
            indent = self.tree.indent(start) or ""
            above = self.tree.text[: start - len(indent)].splitlines()
            there = set()
            while above and above[-1].lstrip().startswith(MARK):  # marks of a run before
                there.add(above.pop().strip().removeprefix(MARK))
            for advice in dict.fromkeys(pieces):
                if advice not in there:
                    self.insert(start, f"{MARK}{advice}{self.tree.newline}{indent}")


def _named(origin: str) -> str:
    """The name by which Apex's manual calls something."""
    return _INNER.sub(r"\1.", origin)


def _always_ends(tried: cst.Try) -> bool:
    """Whether nothing goes on without what is tried: no choice."""
    return all(_ends_program(nodes.last_statement(handler.body)) for handler in tried.handlers)


def _ends_program(statement: cst.CSTNode) -> bool:
    """Whether a statement raises, or leaves Python, as ``sys.exit`` does."""
    if isinstance(statement, cst.Raise):
        return True
    call = statement.value if isinstance(statement, cst.Expr) else None
    return isinstance(call, cst.Call) and nodes.name_called(call) in ("exit", "_exit", "quit")


def _looks_for_apex(node: cst.CSTNode) -> bool:
    """Whether something asks if Apex is installed: ``importlib.util.find_spec("apex")``."""
    for call in nodes.below(node):
        if isinstance(call, cst.Call) and _LOOKS_FOR.search(nodes.name_called(call)):
            given = [nodes.literal(arg.value) for arg in call.args]
            if any(map(_is_apex, given)):
                return True
    return False


def _is_for_types(node: cst.CSTNode) -> bool:
    """Whether it is an ``if TYPE_CHECKING``, in which nothing runs."""
    test = nodes.dotted(node.test) if isinstance(node, cst.If) else None
    return test is not None and test[-1] == "TYPE_CHECKING"


def _is_apex(origin: str | None) -> bool:
    return origin is not None and origin.partition(".")[0] == "apex"


def _longest(table: Mapping[str, _Entry], name: str) -> _Entry:
    """What a table has for a dotted name, or for the longest part that it begins with."""
    while name not in table:
        name = name.rpartition(".")[0]
    return table[name]
