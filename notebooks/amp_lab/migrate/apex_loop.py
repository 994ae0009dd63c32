"""A training loop with Apex, rewritten as a whole, or not at all.

The pattern is that of Apex's own documentation: one ``amp.initialize`` with the level O1, one
``amp.scale_loss`` around one ``backward``, and one ``optimizer.step()``, where the same model and
optimizer are seen by all of them. O1 and O0 leave the weights in float32, as autocast does. O2 and
O3 change what the weights are, so they are not rewritten.

Under O1 every op after ``initialize`` was cast, also in validation; autocast casts in its block.
Apex's own dynamic scale is that of GradScaler's defaults, but for a limit of 2^24.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate.python_tree import Binding, Edit, Finding, Scope, Tree, Use, below, dotted
from amp_lab.migrate.torch_amp import OLD
from amp_lab.migrate.version_guards import is_guarded

_INITIALIZE = (
    *("models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses"),
    *("verbosity", "min_loss_scale", "max_loss_scale"),
)
_FUNCTIONS = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
_HARMLESS = {  # what of these an argument says, if it is there, does not change the rewriting
    "cast_model_type": {None},
    "patch_torch_functions": {None},
    "keep_batchnorm_fp32": {None},
    "master_weights": {None},
    "cast_model_outputs": {None},
    "num_losses": {1},
    "verbosity": {0, 1, 2},
    "min_loss_scale": {None},
    "max_loss_scale": {2.0**24},
}
_LOSS_SCALE = {"O1": {None, "dynamic"}, "O0": {None, 1.0, "1.0"}}
_NO_FORWARD = {"train", "eval", "zero_grad", "parameters", "named_parameters", "to", "cuda"}
_NO_FORWARD |= {"state_dict", "load_state_dict", "modules", "named_modules", "requires_grad_"}
_NO_GRAPH = {"no_grad", "inference_mode", "set_grad_enabled", "enable_grad"}
_NO_GRADIENT = {"train", "eval", "state_dict"}
_HOLDS_WEIGHTS = {"parameters", "named_parameters", "param_groups", "state_dict", "module"}
_HOLDS_WEIGHTS |= {"modules", "named_modules", "children", "named_children"}
_TORCH_AMP = {*OLD, "torch.autocast", *(f"torch.amp.{name}" for name, _ in OLD.values())}
_AUTOCAST = 'with torch.autocast("cuda", dtype=torch.float16):'


class Doubt(Exception):
    """Why a loop is not rewritten; empty where there is nothing to add to the advice."""


class Rewritten(NamedTuple):
    """What becomes of a loop."""

    edits: list[Edit]
    findings: list[Finding]
    uses: set[cst.CSTNode]
    """The uses of Apex that are no more."""
    aliases: set[cst.CSTNode]
    """The imports that are no more."""


def rewrite(tree: Tree, uses: list[tuple[Use, str]]) -> Rewritten:
    """Rewrite the one loop of a file. Raises `Doubt` where anything about it is not certain.

    `uses` are all that stand for something of Apex, each with its dotted name there.
    """
    return _Loop(tree, uses).run()


class _Loop:
    def __init__(self, tree: Tree, uses: list[tuple[Use, str]]):
        self.tree = tree
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        self.of_amp: dict[str, list[Use]] = {name: [] for name in _FUNCTIONS}
        for use, origin in uses:
            head, _, name = origin.rpartition(".")
            if head == "apex.amp" and name in self.of_amp:
                self.of_amp[name].append(use)
            elif origin.startswith(("apex.amp", "apex.fp16_utils")):
                raise Doubt(f"{origin} is used too")
        self.all = {use.node for use, _ in uses}
        self.done = [use for same in self.of_amp.values() for use in same]

    def run(self) -> Rewritten:
        tree, of_amp = self.tree, self.of_amp
        for node, _ in tree.imports:
            is_star = isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar)
            if is_star and not node.relative and dotted(node.module)[0] == "apex":
                raise Doubt("apex is imported with a star")
        for use in self.done:
            if is_guarded(tree, use.node) or len(tree.origins(use)) > 1:
                raise Doubt("what amp is depends on more than this import")
        (use,) = self._one(of_amp["initialize"], "amp.initialize")
        call = self._call(use)
        given = self._arguments(call, _INITIALIZE)
        level = self._level(given)
        self.model = self._identity(given["models"], use.scope)
        self.optimizer = self._identity(given["optimizers"], use.scope)
        if self.model is None or self.optimizer is None or self.model[0] is not self.optimizer[0]:
            raise Doubt("there is not one model and one optimizer, each with a name")
        self.made = self._assignment(call, given)
        self._check_always_made()
        for other in of_amp["master_params"]:
            self._check_parameters(other)
        if level == "O0":
            if of_amp["state_dict"] or of_amp["load_state_dict"]:
                raise Doubt("amp.state_dict is saved, and float32 has none")
            self._delete(self.made)
            self._say(use.node, "amp.initialize is gone: O0, or enabled=False, is plain float32")
            for other in of_amp["scale_loss"]:
                self._unwrap(other, level)
        else:
            self._rewrite_o1(use)
        aliases = self._drop_imports(needs_torch=level != "O0")
        return Rewritten(self.edits, self.findings, {use.node for use in self.done}, aliases)

    def _rewrite_o1(self, use: Use) -> None:
        tree = self.tree
        self._check_free()
        if self.model[0].kind != "class" and self.model[0] is not use.scope:
            raise Doubt(
                "model is a variable of another scope, so the scaler would have to be one too"
            )
        start, end = tree.span(self.made.body[0])
        scaler = self._scaler(use.scope)
        self.edits.append(Edit(start, end, f'{scaler} = torch.amp.GradScaler("cuda")'))
        self._say(
            use.node,
            "amp.initialize is GradScaler, which starts and changes as Apex's did, but has no "
            "limit of 2^24; outside autocast, as in validation, nothing is cast any more",
        )
        (scaled,) = self._one(self.of_amp["scale_loss"], "amp.scale_loss")
        statement, loss = self._unwrap(scaled, "O1")
        self._wrap_forward(statement, loss, scaled.scope)
        self._rewrite_step(statement, scaled.scope)
        for name in ("state_dict", "load_state_dict"):
            for other in self.of_amp[name]:
                self._rewrite_state(other, name)

    # Asking.

    @staticmethod
    def _one(found: list, what: str) -> list:
        if len(found) != 1:
            raise Doubt(f"{what} stands in this file {len(found)} times, not once")
        return found

    def _say(self, node: cst.CSTNode, message: str) -> None:
        self.findings.append(Finding(self.tree.line(node), "rewritten", message))

    def _call(self, use: Use) -> cst.Call:
        call = self.tree.call_of(use.node)
        if call is None:
            raise Doubt("a function of amp is used as a value")
        return call

    @staticmethod
    def _arguments(call: cst.Call, names: tuple[str, ...]) -> dict[str, cst.BaseExpression]:
        given: dict[str, cst.BaseExpression] = {}
        for position, arg in enumerate(call.args):
            name = names[position] if position < len(names) else "the last"
            name = name if arg.keyword is None else arg.keyword.value
            if arg.star or name not in names:
                raise Doubt(f"{name} is an argument that torch knows no equal of")
            given[name] = arg.value
        if not {*names[:2]} <= given.keys():
            raise Doubt("model or optimizer is missing in a call")
        return given

    def _literal(self, node: cst.BaseExpression) -> object:
        try:
            value = ast.literal_eval(self.tree.code(node))
        except (ValueError, SyntaxError):
            value = ()
        if not isinstance(value, str | int | float | None):
            raise Doubt("the level, or another argument, is no literal")
        return value

    def _level(self, given: dict[str, cst.BaseExpression]) -> str:
        said = {
            name: self._literal(value)
            for name, value in given.items()
            if name not in ("models", "optimizers")
        }
        level = said.pop("opt_level", "O1")
        if said.pop("enabled", True) is False:
            return "O0"
        if level not in _LOSS_SCALE:
            raise Doubt("")  # the advice is by the level
        if said.pop("loss_scale", None) not in _LOSS_SCALE[level]:
            raise Doubt("a scale that stays skips no step in Apex, and does in GradScaler")
        if any(name not in _HARMLESS or said[name] not in _HARMLESS[name] for name in said):
            raise Doubt("an argument changes what the level does")
        return level

    def _identity(self, node: cst.BaseExpression, scope: Scope) -> tuple[Scope, str] | None:
        parts = dotted(node)
        return None if parts is None else self._identity_of(parts, scope)

    @staticmethod
    def _identity_of(parts: tuple[str, ...], scope: Scope) -> tuple[Scope, str] | None:
        """The scope and name of a variable; of ``self.name`` the class."""
        home = scope.find(parts[0])
        if home is None:
            return None
        function = home.node
        if isinstance(function, cst.FunctionDef) and home.parent.kind == "class":
            params = (*function.params.posonly_params, *function.params.params)
            if params and params[0].name.value == parts[0]:
                return (home.parent, parts[1]) if len(parts) == 2 else None
        return (home, parts[0]) if len(parts) == 1 else None

    def _rest(self, use: Use, identity: tuple[Scope, str]) -> tuple[str, ...] | None:
        """What a use says after a variable, such as ``step``; None if it is of another one."""
        length = 2 if identity[0].kind == "class" else 1
        if self._identity_of(use.parts[:length], use.scope) != identity:
            return None
        return use.parts[length:]

    def _uses_of(self, identity: tuple[Scope, str], node: cst.CSTNode) -> Iterator[tuple]:
        """Each use of a variable below a node, and what it says after its name."""
        for use in self.tree.uses_below(node):
            rest = self._rest(use, identity)
            if rest is not None:
                yield use, rest

    def _path(self, node: cst.CSTNode) -> list[tuple[cst.CSTNode, cst.CSTNode]]:
        """The ancestors, with the child of each, up to the function or module."""
        path = []
        for parent, child in self.tree.ancestors(node):
            path.append((parent, child))
            if isinstance(parent, cst.FunctionDef | cst.Lambda | cst.ClassDef):
                break
        return path

    def _line(self, node: cst.CSTNode) -> cst.SimpleStatementLine:
        """The line that a node's statement has for itself."""
        line = self.tree.statement(node)
        if not isinstance(line, cst.SimpleStatementLine):
            raise Doubt("a statement shares its line with another")
        return line

    def _text(self, node: cst.CSTNode) -> str:
        return self.tree.text[slice(*self.tree.span(node))]

    def _scaler(self, scope: Scope) -> str:
        """The scaler's name as it is seen from a scope."""
        home = self.model[0]
        if home.kind != "class":
            seen: Scope | None = scope
            while seen is not None and seen is not home:
                seen = seen.parent
            if seen is None:
                raise Doubt("the scaler would have to be passed to a function")
            return "scaler"
        while scope is not None and scope.parent is not home:
            scope = scope.parent
        params = scope.node.params.params if scope is not None else ()
        if not params:
            raise Doubt("the scaler would have to be passed to a function")
        return f"{params[0].name.value}.scaler"

    # What makes it certain.

    def _assignment(self, call: cst.Call, given: dict) -> cst.SimpleStatementLine:
        """The statement ``model, optimizer = amp.initialize(model, optimizer, …)``."""
        assign = self.tree.parents[call]
        if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
            raise Doubt(
                "it is not written as model, optimizer = amp.initialize(model, optimizer, …)"
            )
        target = assign.targets[0].target
        line = self._line(call)
        if not isinstance(target, cst.Tuple) or len(line.body) != 1 or "#" in self._text(assign):
            raise Doubt(
                "it is not written as model, optimizer = amp.initialize(model, optimizer, …)"
            )
        names = [dotted(element.value) for element in target.elements]
        if names != [dotted(given["models"]), dotted(given["optimizers"])]:
            raise Doubt("model and optimizer get other names")
        return line

    def _check_always_made(self) -> None:
        """Raise `Doubt` if the loop may run without ``initialize``, or that more than once."""
        path = self._path(self.made)
        for parent, child in path:
            if isinstance(parent, cst.For | cst.While | cst.Try | cst.ExceptHandler):
                raise Doubt("it stands in a loop or a try")
            if isinstance(parent, cst.If) and "__name__" not in self.tree.code(parent.test):
                for use in self.done:
                    if not any(above is child for above, _ in self.tree.ancestors(use.node)):
                        raise Doubt("it stands under a condition, and amp is used outside it")
        for parent, child in path:
            if isinstance(parent, cst.Module | cst.IndentedBlock):
                for statement in parent.body[: parent.body.index(child)]:
                    names = [u for u in self.done if u not in self.of_amp["master_params"]]
                    here = {use.node for use in self.tree.uses_below(statement)}
                    is_later = isinstance(statement, cst.FunctionDef | cst.ClassDef)
                    if not is_later and any(use.node in here for use in names):
                        raise Doubt("amp is used before it")

    def _check_parameters(self, use: Use) -> None:
        call = self._call(use)
        if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
            raise Doubt("amp.master_params has other arguments")
        if self._identity(call.args[0].value, use.scope) != self.optimizer:
            raise Doubt("amp.master_params is of another optimizer")

    def _check_free(self) -> None:
        tree = self.tree
        if any("scaler" in scope.bindings for scope in tree.scopes) or any(
            "scaler" in use.parts for use in tree.uses
        ):
            raise Doubt("scaler is the name of something else here")
        if any(tree.origins(use) & _TORCH_AMP for use in tree.uses):
            raise Doubt("torch's own mixed precision is used here already")
        if re.search(r"\.half\(\)", tree.text):
            raise Doubt("something is made float16 by half()")
        backward = [use for use in tree.uses if use.parts[-1] == "backward"]
        if len(backward) != len(self.of_amp["scale_loss"]):
            raise Doubt("there is a backward without amp.scale_loss")
        if any("torch.autograd.grad" in tree.origins(use) for use in tree.uses):
            raise Doubt("torch.autograd.grad is used")

    # The parts of the loop.

    def _unwrap(self, use: Use, level: str) -> tuple[cst.With, cst.BaseExpression]:
        """Write ``with amp.scale_loss(…) as scaled_loss: scaled_loss.backward()`` as one line."""
        tree = self.tree
        call = self._call(use)
        given = self._arguments(call, ("loss", "optimizers"))
        item = tree.parents[call]
        block = tree.parents[item]
        if not isinstance(item, cst.WithItem) or len(block.items) != 1 or item.asname is None:
            raise Doubt("amp.scale_loss does not stand alone in a with … as …")
        if self._identity(given["optimizers"], use.scope) != self.optimizer:
            raise Doubt(
                "amp.scale_loss is given another optimizer, or it is passed to this function"
            )
        name = item.asname.name
        statements = list(block.body.body)
        if len(statements) == 1 and isinstance(statements[0], cst.SimpleStatementLine):
            statements = list(statements[0].body)
        if len(statements) != 1 or not isinstance(statements[0], cst.Expr):
            raise Doubt("more than one backward stands in amp.scale_loss")
        backward = statements[0].value
        if not isinstance(backward, cst.Call) or not isinstance(name, cst.Name):
            raise Doubt("more than one backward stands in amp.scale_loss")
        if dotted(backward.func) != (name.value, "backward"):
            raise Doubt("more than one backward stands in amp.scale_loss")
        seen = [u for u in tree.uses if u.parts[0] == name.value]
        made = [s for s in tree.scopes for b in s.bindings.get(name.value, ()) if b]
        if len(seen) != len(made) or len(seen) > len(self.of_amp["scale_loss"]):
            raise Doubt("the scaled loss is used elsewhere too")
        loss = self._text(given["loss"])
        if not isinstance(given["loss"], cst.Name | cst.Attribute | cst.Call) and level == "O0":
            loss = f"({loss})"
        new = loss if level == "O0" else f"{self._scaler(use.scope)}.scale({loss})"

        start, receiver = tree.span(block)[0], tree.span(backward.func.value)
        before = tree.text[start : tree.span(name)[1]]
        indent = tree.indent(start)
        if "#" in before or indent is None:
            raise Doubt("a comment stands inside a call")
        comments = re.findall(r"#[^\r\n]*", tree.text[tree.span(name)[1] : receiver[0]])
        kept = "".join(f"{comment}{tree.newline}{indent}" for comment in comments)
        self.edits.append(Edit(start, receiver[1], kept + new))
        self._say(
            use.node,
            f"amp.scale_loss is {new}.backward()",
        )
        return block, given["loss"]

    def _wrap_forward(self, scaled: cst.With, loss: cst.BaseExpression, scope: Scope) -> None:
        """Put autocast around the statements from the model's call to the loss."""
        names = self._names_of_loss(loss, scope)
        for parent, child in self._path(scaled):
            if isinstance(parent, cst.For | cst.While | cst.Module | cst.FunctionDef):
                raise Doubt("the model is not called in the same loop as amp.scale_loss")
            if not isinstance(parent, cst.IndentedBlock):
                continue
            before = parent.body[: parent.body.index(child)]
            first = next((i for i, s in enumerate(before) if self._runs_model(s)), None)
            if first is None:
                continue
            last = [i for i, s in enumerate(before) if self._binds(s, names)]
            if not last or last[-1] < first:
                raise Doubt("the loss is not assigned after the model is called")
            if any(map(self._may_run_model, before[:first])):
                raise Doubt("the model may be called by another name, or in a function, before")
            forward = before[first : last[-1] + 1]
            for statement in parent.body:
                if statement not in forward and self._calls_model(statement):
                    raise Doubt("the model is called again beside the loss")
            self._indent(forward, parent)
            return

    def _names_of_loss(self, loss: cst.BaseExpression, scope: Scope) -> list[Binding]:
        """The places that give the loss its value."""
        for part in below(loss):
            if isinstance(part, cst.Call):
                is_mean = isinstance(part.func, cst.Attribute) and not part.args
                if not is_mean or part.func.attr.value not in ("mean", "sum"):
                    raise Doubt("the loss is computed inside amp.scale_loss(…)")
        return [
            binding
            for use in self.tree.uses_below(loss)
            if (home := use.scope.find(use.parts[0])) is scope
            for binding in home.bindings[use.parts[0]]
        ]

    def _runs_model(self, statement: cst.CSTNode) -> bool:
        return any(
            (not rest or rest[0] not in _NO_FORWARD)
            and not isinstance(self.tree.parents[use.node], cst.AssignTarget)
            for use, rest in self._uses_of(self.model, statement)
        )

    def _may_run_model(self, statement: cst.CSTNode) -> bool:
        """Whether a statement calls what was made of the model, or a function that uses it."""
        for use in self.tree.uses_below(statement):
            if self.tree.call_of(use.node) is None:
                continue
            parts = use.parts[:-1] if use.parts[-1] == "forward" else use.parts
            for value in self.tree.assigned.get(parts, ()):
                if any(rest in ((), ("module",)) for _, rest in self._uses_of(self.model, value)):
                    return True
            if any(map(self._runs_model, self._functions(use.parts[-1]))):
                return True
        return False

    def _functions(self, name: str) -> list[cst.FunctionDef]:
        """The functions and methods of the file that have a name."""
        nodes = (scope.node for scope in self.tree.scopes)
        return [f for f in nodes if isinstance(f, cst.FunctionDef) and f.name.value == name]

    def _calls_model(self, statement: cst.CSTNode) -> bool:
        return any(
            rest in ((), ("forward",)) and isinstance(self.tree.parents[use.node], cst.Call)
            for use, rest in self._uses_of(self.model, statement)
        )

    def _binds(self, statement: cst.CSTNode, bindings: Iterable[Binding]) -> bool:
        return any(
            any(above is statement for above, _ in self.tree.ancestors(binding.node))
            for binding in bindings
        )

    def _indent(self, statements: list[cst.CSTNode], block: cst.IndentedBlock) -> None:
        tree = self.tree
        never = cst.FunctionDef | cst.ClassDef | cst.Yield | cst.Await | cst.Lambda
        strings = []
        for statement in statements:
            for part in below(statement):
                if isinstance(part, never) or part in self.all:
                    raise Doubt("the forward pass holds a definition, a yield, or more of Apex")
                if isinstance(part, cst.SimpleString | cst.FormattedString):
                    strings.append(tree.span(part))
                if isinstance(part, cst.Name) and part.value in _NO_GRAPH:
                    # autocast would keep casts of weights without a graph, for the rest to use
                    raise Doubt(f"{part.value} stands in the forward pass")
        start = tree.span(statements[0])[0]
        end = start + len(tree.text[start : tree.span(statements[-1])[1]].rstrip())
        indent = tree.indent(start)
        unit = block.indent or tree.module.default_indent
        head = f"{_AUTOCAST}{tree.newline}{indent}{unit}"
        self.edits.append(Edit(start, start, head))
        for at in tree.line_starts:
            line = tree.text[at:end].splitlines()[:1] if start < at < end else []
            is_inside = any(first < at < last for first, last in strings)
            if line and line[0].startswith(indent) and line[0].strip() and not is_inside:
                self.edits.append(Edit(at + len(indent), at + len(indent), unit))
        self._say(statements[0], "the forward pass and the loss are in autocast")

    def _rewrite_step(self, scaled: cst.With, scope: Scope) -> None:
        tree = self.tree
        steps = [u for u, rest in self._uses_of(self.optimizer, tree.module) if rest == ("step",)]
        (step,) = self._one(steps, "a step of this optimizer")
        call = self._call(step)
        line = self._line(call)
        if call.args or not isinstance(tree.parents[call], cst.Expr):
            raise Doubt("optimizer.step has an argument or a result")
        here = tree.parents[scaled]
        between, touching = [], []
        for parent, child in self._path(call):
            if isinstance(parent, cst.IndentedBlock):
                body = list(parent.body)
                first = body.index(scaled) + 1 if parent is here else 0
                between = body[first : body.index(child)]
                found = [s for s in between if self._touches_gradients(s)]
                if found and child is not line:
                    raise Doubt("gradients are used also where the optimizer does not step")
                touching += found
                if parent is here:
                    break
            elif isinstance(parent, cst.If):
                others = [arm for arm in (parent.body, parent.orelse) if arm not in (None, child)]
                if any(map(self._touches_gradients, others)):
                    raise Doubt("gradients are used also where the optimizer does not step")
            elif isinstance(parent, cst.For | cst.While | cst.FunctionDef | cst.Module | cst.Try):
                raise Doubt("the optimizer does not step in the block of amp.scale_loss")
        later = next(child for parent, child in self._path(call) if parent is here)
        after = here.body[here.body.index(later) + 1 :]
        if later is not line and any(re.search(r"\.grad\b|grad_norm", tree.code(s)) for s in after):
            raise Doubt("gradients are used also where the optimizer does not step")
        if here.body.index(scaled) > here.body.index(later):
            raise Doubt("the optimizer steps before amp.scale_loss")
        self._check_zero(call, here)
        if touching and self._may_leave(touching[0], line):
            raise Doubt("a step may be passed over after gradients are used")
        scaler = self._scaler(scope)
        optimizer = self._text(call.func.value)
        if touching or re.search(r"\.grad\b", tree.text):
            at = tree.span((touching or [line])[0])[0]
            new = f"{scaler}.unscale_({optimizer}){tree.newline}{tree.indent(at)}"
            self.edits.append(Edit(at, at, new))
        start, end = tree.span(call)
        self.edits.append(Edit(start, end, f"{scaler}.step({optimizer})"))
        at = start + len(re.match(r"[^\r\n]*", tree.text[start:]).group())
        indent = tree.indent(tree.span(line)[0])
        self.edits.append(Edit(at, at, f"{tree.newline}{indent}{scaler}.update()"))
        self._say(step.node, f"{optimizer}.step() is {scaler}.step({optimizer}), then update()")

    def _check_zero(self, step: cst.Call, here: cst.IndentedBlock) -> None:
        """Raise `Doubt` unless gradients are set to zero once for each step.

        Those of Apex were never scaled between two backward passes, so they could stay.
        """
        blocks = [p for p, _ in self._path(step) if isinstance(p, cst.IndentedBlock)]
        inner = blocks[: blocks.index(here)]  # where it steps only after some backward passes
        zeros = [
            (use.node, [p for p, _ in self._path(use.node) if isinstance(p, cst.IndentedBlock)])
            for identity in (self.model, self.optimizer)
            for use, rest in self._uses_of(identity, self.tree.module)
            if rest == ("zero_grad",)
        ]
        often = any(here in path and not (inner and inner[0] in path) for _, path in zeros)
        always = any(
            path[:1] == blocks[:1]
            and not self._may_leave(self._line(step), self.tree.statement(zero))
            for zero, path in zeros
        )
        loop = next((p for p, _ in self._path(here) if isinstance(p, cst.For | cst.While)), None)
        around = [p for p in blocks[1:] if loop is None or loop in self._above(p)]
        before = any(path and path[0] in around for _, path in zeros)
        if (inner and often) or not (always or (not inner and before)):
            raise Doubt("gradients are not set to zero once for each step")

    def _may_leave(self, first: cst.CSTNode, last: cst.CSTNode) -> bool:
        """Whether a statement of a block may be reached without a later one."""
        body = list(self.tree.parents[first].body)
        leaving = cst.Continue | cst.Break | cst.Return
        between = body[body.index(first) : body.index(last)]
        return any(isinstance(part, leaving) for s in between for part in below(s))

    def _above(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        return [parent for parent, _ in self._path(node)]

    def _touches_gradients(self, statement: cst.CSTNode) -> bool:
        """Whether a statement may read or change gradients, as far as names tell."""
        tree = self.tree
        if re.search(r"\.grad\b|clip|norm|master_params", tree.code(statement)):
            return True
        if any(
            not rest or rest[0] not in _NO_GRADIENT
            for identity in (self.model, self.optimizer)
            for _, rest in self._uses_of(identity, statement)
        ):
            return True
        for use in tree.uses_below(statement):
            is_called = tree.call_of(use.node) is not None
            if self._holds_weights(use.parts) or (is_called and self._may_use_weights(use.parts)):
                return True
        return False

    def _holds_weights(self, parts: tuple[str, ...], depth: int = 0) -> bool:
        """Whether what a name stands for was made of the model or optimizer, not by calling it."""
        names = (parts[:n] for n in range(1, len(parts) + 1))
        for value in (v for name in names for v in self.tree.assigned.get(name, ())):
            for use in self.tree.uses_below(value):
                is_called = self.tree.call_of(use.node) is not None
                for identity in (self.model, self.optimizer):
                    rest = self._rest(use, identity)
                    if (rest == () and not is_called) or (rest and rest[0] in _HOLDS_WEIGHTS):
                        return True
                if depth < 2 and use.parts != parts and self._holds_weights(use.parts, depth + 1):
                    return True
        return False

    def _may_use_weights(self, parts: tuple[str, ...]) -> bool:
        """Whether a function, of this file or inherited, may get hold of weights by itself."""
        own = self._functions(parts[-1])
        if not own:
            return len(parts) == 2 and parts[0] == "self"
        about_weights = r"\.grad\b|clip|norm|param|optim|model"
        return any(re.search(about_weights, self.tree.code(function)) for function in own)

    def _rewrite_state(self, use: Use, name: str) -> None:
        call = self._call(use)
        if len(call.args) != (name == "load_state_dict"):
            raise Doubt(f"amp.{name} has other arguments")
        scaler = self._scaler(use.scope)
        self.edits.append(Edit(*self.tree.span(use.node), f"{scaler}.{name}"))
        what = f"amp.{name} is the scaler's"
        if name == "load_state_dict":
            what += (
                '; in a checkpoint of Apex, its "scale" is "loss_scale" of "loss_scaler0", and its '
                '"_growth_tracker" "unskipped"'
            )
        self._say(use.node, what)

    # Imports.

    def _drop_imports(self, needs_torch: bool) -> set[cst.CSTNode]:
        tree = self.tree
        dropped, done = set(), {use.node for use in self.done}
        for use in self.done:
            home = use.scope.find(use.parts[0])
            if home is None:
                raise Doubt("amp comes from a star import")
            (binding,) = self._one(home.bindings[use.parts[0]], f"an import of {use.parts[0]}")
            same = [u for u in tree.uses if u.parts[0] == use.parts[0]]
            if all(u.node in done for u in same if u.scope.find(u.parts[0]) is home):
                dropped.add(binding.node)
        missing = {
            tuple(b.origin for b in home.bindings["torch"]) if home else ()
            for use in self.done
            if needs_torch
            for home in [use.scope.find("torch")]
        }
        missing = {origins for origins in missing if set(origins) != {"torch"}}
        if missing not in (set(), {()}) or (missing and len(dropped) != 1):
            raise Doubt("torch is not imported by that name")
        for alias in dropped:
            self._drop_import(alias, instead="import torch" if missing else "")
        return dropped

    def _drop_import(self, alias: cst.ImportAlias, instead: str) -> None:
        tree = self.tree
        node = tree.parents[alias]
        aliases = list(node.names)
        self._say(alias, f"{tree.code(alias).rstrip(', ')} is not imported any more")
        if len(aliases) == 1:
            line = self._line(node)
            if instead:
                self.edits.append(Edit(*tree.span(node), instead))
            else:
                self._delete(line)
            return
        if instead:
            raise Doubt("torch is not imported")
        spans = [tree.span(alias) for alias in aliases]
        ends = [len(tree.text[:end].rstrip(", \t")) for _, end in spans]
        i = aliases.index(alias)
        cut = (spans[i][0], spans[i + 1][0]) if i + 1 < len(aliases) else (ends[i - 1], ends[i])
        if "#" in tree.text[slice(*cut)]:
            raise Doubt("a comment stands inside a call")
        self.edits.append(Edit(*cut, ""))

    def _delete(self, line: cst.SimpleStatementLine) -> None:
        """Delete a line, but not a comment at its end."""
        tree = self.tree
        block = tree.parents[line]
        target: cst.CSTNode = line
        if len(line.body) != 1:
            raise Doubt("a statement shares its line with another")
        if len(block.body) == 1:
            target = tree.parents[block]
            if not isinstance(target, cst.Try) or not self._only_complains(target):
                raise Doubt("nothing would be left of the block around a statement")
        start, end = tree.span(target)
        end = start + len(tree.text[start:end].rstrip())
        begin = start - len(tree.indent(start))
        rest = re.match(r"[ \t\f]*(#)?", tree.text[end:])
        if rest.group(1):
            self.edits.append(Edit(start, end + rest.end() - 1, ""))
        else:
            after = re.match(r"[ \t\f;]*(\r\n?|\n)?", tree.text[end:]).end()
            self.edits.append(Edit(begin, end + after, ""))

    def _only_complains(self, node: cst.Try) -> bool:
        """Whether a try does nothing but tell that the import in it fails."""
        statements = [s for handler in node.handlers for s in handler.body.body]
        raises = [
            isinstance(s, cst.SimpleStatementLine)
            and len(s.body) == 1
            and isinstance(s.body[0], cst.Raise)
            for s in statements
        ]
        is_plain = node.orelse is None and node.finalbody is None
        return is_plain and all(raises) and "#" not in self.tree.code(node)
