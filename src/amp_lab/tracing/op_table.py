"""The op table of autocast: the policy of each op on a backend, and the dtype that a call returns.

The policies are observed, not copied from torch. The dispatcher lists the ops for which autocast
has a kernel on a backend. This module then intercepts a call of the op between the autocast kernel
and the op. The dtypes that arrive there show the policy.
"""

import dataclasses
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.backends import backend
from amp_lab.core.cpu import lstm_remarks, matrix_instructions
from amp_lab.core.errors import AmpLabWarning, first_line
from amp_lab.core.report import Printed, Table, short_name
from amp_lab.core.tensors import tensors_in
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.fake_device import (
    absent_device,
    autocast_on,
    checked_backend,
    checked_dtype,
    errors_not_logged,
)
from amp_lab.tracing.op_samples import Sample, Sizes, sizes_to_try

POLICIES = {  # what autocast does to an op
    "lower_precision": "casts fp32, fp16 and bf16 inputs to autocast's dtype",
    "fp32": "casts fp16 and bf16 inputs to float32",
    "fp32_set_opt_dtype": "returns float32, unless the call names a dtype or the input is fp64",
    "promote": "casts fp32, fp16 and bf16 inputs to the widest dtype among them",
    "banned": "raises",
}
_NO_KERNEL = (
    NotImplementedError,
    UnsupportedOperatorException,
    torch.AcceleratorError,  # of an op that asks a device that is not here
)


@dataclass(frozen=True)
class OpRule:
    """Autocast's policy for an op on one backend, and the dtype that a call of the op returned."""

    op: str  # name without "aten::"; with the overload if the overloads have different rules
    overloads: tuple[str, ...]  # names of overloads; the one without a name is "default"
    policy: str  # one of POLICIES
    given: tuple[torch.dtype, ...]  # input dtypes of the call that checked the policy
    observed: torch.dtype | None  # dtype of the result; None if the op could not be called
    reason: str  # the reason why the op could not be called; empty if it was called
    agrees: bool | None
    """Whether `observed` is the dtype that the policy promises. A complex dtype counts as the dtype
    of its parts. None if the op returns no floating-point numbers."""


class OpTable(Printed, list[OpRule]):
    """The rules of one backend; made by `op_table`."""

    def __init__(self, rules: Iterable[OpRule], device_type: str, dtype: torch.dtype, real: bool):
        super().__init__(rules)
        self.device_type = device_type
        self.dtype = dtype
        self.real = real  # whether ops were called on the device itself, not on fake tensors

    def _contents(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "device_type": self.device_type,
            "dtype": self.dtype,
            "real": self.real,
            "ops": list(self),
        }

    def _table(self) -> Table:
        """A row for each rule, with how many ops have each policy above."""
        counts = Counter(rule.policy for rule in self)
        totals = [f"{counts[policy]} {policy}" for policy in POLICIES if counts[policy]]
        where = "the device" if self.real else "fake tensors"
        facts = [f"{policy}: {meaning}" for policy, meaning in POLICIES.items()]
        if self.device_type == "cpu":
            facts += [f"this CPU: {matrix_instructions()}", *lstm_remarks()]
        return Table(
            ["policy", "op", "given", "returned", "note"],
            [_row_of(rule) for rule in self],
            caption=f"autocast on {self.device_type!r} to {short_name(self.dtype)}, "
            f"torch {torch.__version__}: {len(self)} ops ({', '.join(totals)}), called on {where}",
            facts=facts,
        )


def _row_of(rule: OpRule) -> list[str]:
    """The cells of a rule in the table; a dtype that several inputs have is shown once."""
    # The keys are the names of the dtypes, in the order of the inputs.
    input_dtypes = dict.fromkeys(map(short_name, rule.given))
    note = rule.reason
    if not note and rule.agrees is False:
        note = "not what the policy says"
    return [rule.policy, rule.op, ", ".join(input_dtypes), short_name(rule.observed), note]


class OpDifference(NamedTuple):
    """An op that autocast treats differently on two backends."""

    op: str  # with the overload, unless that is "default"
    first: str | None  # policy in the first table; None: autocast leaves the op alone
    second: str | None


class OpDifferences(Printed, list[OpDifference]):
    """The ops that have different policies in two tables; made by `differences`."""

    def __init__(self, rows: Iterable[OpDifference], names: tuple[str, str]):
        super().__init__(rows)
        self.names = names  # of the two backends, such as ("cuda", "cpu")

    def _contents(self) -> dict[str, Any]:
        rows = [{"op": row.op, "policies": [row.first, row.second]} for row in self]
        return {"device_types": self.names, "ops": rows}

    def _table(self) -> Table:
        first, second = self.names
        return Table(
            ["op", first, second],
            [[row.op, row.first or "-", row.second or "-"] for row in self],
            caption=(
                f"Autocast treats {len(self)} ops differently on {first!r} and on {second!r}. '-' "
                "means that autocast does not change the op."
            ),
        )


def op_table(device_type: str, dtype: torch.dtype | None = None) -> OpTable:
    """List the ops for which autocast on a backend has a rule, with these rules.

    An op that is not in the table runs in the dtype of its inputs, or calls ops that are in the
    table. An op that follows no policy is left out, with a warning.

    Args:
        device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".
        dtype: The dtype that autocast casts to: torch.float16 or torch.bfloat16. If None, the
            default of the backend.

    Returns:
        A list of `OpRule`, sorted by policy and then by name. Print it to see a table.

    Raises:
        DeviceError: If the device type does not exist, or if autocast does not take `dtype`.

    Source:
        The dispatcher of the installed torch lists the ops that have an autocast kernel. `op_table`
        calls each op on the device or, if the device is not in this machine, on fake tensors. The
        input dtypes after autocast show the policy of the op.

    Example:
        table = op_table("cpu", torch.bfloat16)
        print([rule.op for rule in table if rule.policy == "fp32"])
    """
    dtype = checked_dtype(device_type, dtype)
    autocast = _Autocast(device_type, dtype, real=backend(device_type).is_available())
    rules_of_op: dict[str, list[OpRule]] = {}  # a rule for each overload of the op
    for name, overload in _overloads_with_kernel(device_type):
        policy, reason = autocast.policy(overload)
        if policy is None:
            why = f"autocast on {device_type!r} follows no known policy ({reason})"
            warnings.warn(f"{overload.name()} is left out: {why}", AmpLabWarning, stacklevel=2)
            continue
        rules_of_op.setdefault(name, []).append(autocast.rule(overload, policy, reason))
    table: list[OpRule] = []
    for name, rules in rules_of_op.items():
        table += _merge_overloads(name, rules)
    order = list(POLICIES)
    table.sort(key=lambda rule: (order.index(rule.policy), rule.op))
    return OpTable(table, device_type, dtype, autocast.real)


def _overloads_with_kernel(device_type: str) -> Iterator[tuple[str, OpOverload]]:
    """Each overload of torch's ops for which autocast on a backend has a kernel, sorted by name.

    Yields the name of the op, such as ``sum``, and the overload, such as ``aten.sum.dim_IntList``.
    """
    key = f"Autocast{backend(device_type).key}"
    for full_name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)):
        namespace, _, op_and_overload = full_name.partition("::")  # such as ``aten::sum.dim``
        if namespace != "aten":  # an extension's, such as torchvision's, and only once imported
            continue
        name, _, overload_name = op_and_overload.partition(".")
        overloads = getattr(torch.ops.aten, name)
        yield name, getattr(overloads, overload_name or "default")


def policies(op: str, device_type: str, dtype: torch.dtype) -> set[str]:
    """The policies of an op's overloads on a backend; empty if autocast leaves the op alone.

    `op` is the name without "aten::" and without an overload; `dtype` is the dtype that autocast
    casts to. Only this op is called, so this takes milliseconds, while `op_table` takes seconds.

    Raises `DeviceError` for an unknown device type.
    """
    autocast = _Autocast(checked_backend(device_type), dtype, real=False)
    names = set()
    for name, overload in _overloads_with_kernel(device_type):
        if name != op:
            continue
        policy = autocast.policy(overload).name
        if policy is not None:
            names.add(policy)
    return names


def differences(first: OpTable, second: OpTable) -> OpDifferences:
    """Return the ops, by overload, that autocast treats differently on two backends."""
    first_policies = _policy_of_each_overload(first)
    second_policies = _policy_of_each_overload(second)
    rows = []
    for name in sorted(first_policies.keys() | second_policies.keys()):
        first_policy = first_policies.get(name)
        second_policy = second_policies.get(name)
        if first_policy != second_policy:
            op = name.removesuffix(".default")
            rows.append(OpDifference(op, first_policy, second_policy))
    return OpDifferences(rows, (first.device_type, second.device_type))


def _policy_of_each_overload(table: OpTable) -> dict[str, str]:
    """The policy of each overload by its full name, such as ``sum.dim`` or ``mm.default``."""
    policy_of = {}
    for rule in table:
        base = rule.op.partition(".")[0]
        for overload in rule.overloads:
            policy_of[f"{base}.{overload}"] = rule.policy
    return policy_of


class _InterceptedError(Exception):
    """Raised in place of the op, once its call has passed autocast."""


class _InterceptCall(TorchDispatchMode):
    """Keeps the arguments with which autocast calls an op, and raises `_InterceptedError`.

    The error ends the call before the op runs: it may have no kernel on this machine.
    """

    def __init__(self, op: OpOverload):
        super().__init__()
        self._name = op._schema.name  # without the overload: autocast may call another one
        self.arguments: list[Any] = []  # positional and keyword ones, with lists flattened

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name == self._name:
            self.arguments = pytree.tree_leaves((args, kwargs))
            raise _InterceptedError
        return func(*args, **kwargs)  # a cast


class _Policy(NamedTuple):
    """Autocast's policy for an op."""

    name: str | None  # one of POLICIES; None if the op follows none of them
    reason: str  # what torch says of a banned op, or why the name is None; else ""


class _Call(NamedTuple):
    """The dtypes of a call of an op under autocast, or why the op could not be called."""

    given: tuple[torch.dtype, ...]  # of the floating-point inputs
    returned: tuple[torch.dtype, ...]  # of all tensors in the result
    reason: str  # why the op could not be called; else ""


@dataclass(frozen=True)
class _Autocast:
    """Autocast on one backend to one dtype: finds its policy for an op."""

    device_type: str
    dtype: torch.dtype
    real: bool  # whether ops are called on the device itself

    def policy(self, op: OpOverload) -> _Policy:
        """Find the policy of an op, from the dtypes that autocast passes to it in two calls."""
        reasons = []
        # The kernel of cuDNN's recurrent networks knows float16 alone, which is CUDA's default. So
        # each op is tried with autocast's default dtype too, if it cannot be called with this one.
        for dtype in dict.fromkeys((self.dtype, torch.get_autocast_dtype(self.device_type))):
            from_low, reason = self._intercept(op, dtype, first=dtype)
            from_mixed, _ = self._intercept(op, dtype, first=torch.float32)
            if from_low is not None and from_mixed is not None:
                policy = _policy_of(from_low, from_mixed, dtype)
                if policy is None:
                    return _Policy(None, "it changes no dtype")
                return _Policy(policy, "")
            reasons.append(reason)
        reason = reasons[0]  # the one for `self.dtype`
        # A kernel may raise for other reasons; the one of a banned op says that it is for autocast.
        if "autocast" in reason:
            return _Policy("banned", reason)
        return _Policy(None, reason)

    def _intercept(
        self, op: OpOverload, dtype: torch.dtype, first: torch.dtype
    ) -> tuple[list[Any] | None, str]:
        """Call an op under autocast to `dtype`, and stop the call between autocast and the op.

        The first floating-point input has the dtype `first`, the others have `dtype`.

        Returns:
            The arguments with which autocast calls the op, in a flat list, and ""; or None and the
            reason, if autocast does not call the op.
        """
        intercept = _InterceptCall(op)
        shapes = itertools.repeat((2, 2))  # any shape will do, since the op never runs
        # Outside of inference mode torch may decompose the op before `intercept` has seen it.
        with self._fakes(), torch.inference_mode(), autocast_on(self.device_type, dtype):
            sample = Sample(op, self.device_type, first, dtype, Sizes(shapes))
            try:
                with intercept:
                    op(**sample.arguments)
            except _InterceptedError:
                return intercept.arguments, ""
            except RuntimeError as error:
                return None, _reason(error)
        return None, "its kernel does not call it"

    def rule(self, op: OpOverload, policy: str, reason: str) -> OpRule:
        """The rule of one overload, with the dtype that a call of it returns.

        `policy` and `reason` are those of `_Policy`. A banned op is not called.
        """
        if policy == "banned":
            call = _Call(given=(), returned=(), reason=reason)
        else:
            call = self._call(op, policy)
        # An op may return integers, such as indices, before its values or alone.
        floats = [dtype for dtype in call.returned if dtype.is_floating_point or dtype.is_complex]
        observed = None
        agrees = None
        if floats:
            observed = floats[0]
            promised = self.dtype if policy == "lower_precision" else torch.float32
            agrees = observed in (promised, promised.to_complex())
        elif call.returned:
            observed = call.returned[0]
        return OpRule(
            op=op._schema.name.removeprefix("aten::"),
            overloads=(op._overloadname,),
            policy=policy,
            given=call.given,
            observed=observed,
            reason=call.reason,
            agrees=agrees,
        )

    def _call(self, op: OpOverload, policy: str) -> _Call:
        """Call an op under autocast, with inputs of which its policy has to change one.

        The call has the first sizes that work.
        """
        # The inputs are all fp32 under "lower_precision", all low under "fp32", and under "promote"
        # the first is low and the others are fp32.
        first = torch.float32 if policy == "lower_precision" else self.dtype
        rest = self.dtype if policy.startswith("fp32") else torch.float32
        working_sizes, reason = _find_sizes(op)
        candidates: Iterable[Sizes] = ()
        if working_sizes is not None:
            candidates = [working_sizes]
        elif self.real:  # some ops have kernels for the device alone, none for meta tensors
            candidates = sizes_to_try(op)
        for sizes in candidates:
            try:
                with nullcontext() if self.real else self._fakes():
                    sample = Sample(op, self.device_type, first, rest, sizes)
                    with autocast_on(self.device_type, self.dtype):
                        returned = _returned_dtypes(op, sample)
                return _Call(tuple(sample.float_dtypes), tuple(returned), reason="")
            except Exception as error:  # kernels, and their fakes in Python, raise what they like
                reason = _reason(error)
        return _Call(given=(), returned=(), reason=reason)

    @contextmanager
    def _fakes(self) -> Iterator[None]:
        """The block in which tensors are fakes of a device that need not be here."""
        with absent_device(self.device_type), StrictFakeMode(), errors_not_logged():
            yield


def _policy_of(from_low: list[Any], from_mixed: list[Any], dtype: torch.dtype) -> str | None:
    """The policy that shows in the arguments with which autocast called an op; None if none does.

    `from_low` are those of a call with all inputs in the low-precision `dtype`, `from_mixed` those
    of a call with the first input in float32, and the others in `dtype`.
    """
    dtype_arguments = [argument for argument in from_low if isinstance(argument, torch.dtype)]
    # Autocast has set the argument `dtype`, or called the overload that takes one.
    if dtype_arguments == [torch.float32]:
        return "fp32_set_opt_dtype"
    mixed_dtypes = _float_dtypes(from_mixed)
    if set(mixed_dtypes) == {dtype}:
        return "lower_precision"
    if set(mixed_dtypes) != {torch.float32}:
        return None
    # Mixed inputs have all become float32. Inputs that are all low become float32 under "fp32", and
    # stay low under "promote".
    if set(_float_dtypes(from_low)) == {torch.float32}:
        return "fp32"
    if len(mixed_dtypes) > 1:  # a single input cannot show which dtype is the widest
        return "promote"
    return None


def _float_dtypes(arguments: list[Any]) -> list[torch.dtype]:
    """The dtypes of the floating-point tensors in a flat list of an op's arguments."""
    return [tensor.dtype for tensor in tensors_in(arguments) if tensor.is_floating_point()]


@functools.cache
def _find_sizes(op: OpOverload) -> tuple[Sizes | None, str]:
    """The first sizes with which the op runs on meta tensors, and ""; else None and the reason."""
    reason = ""
    for sizes in sizes_to_try(op):
        try:
            sample = Sample(op, "meta", first=torch.float32, rest=torch.float32, sizes=sizes)
            _returned_dtypes(op, sample)
            return sizes, ""
        except NotImplementedError as error:  # no kernel for meta tensors: no other size will do
            return None, _reason(error)
        except Exception as error:  # mostly since these sizes do not fit together
            reason = _reason(error)
    return None, reason


def _returned_dtypes(op: OpOverload, sample: Sample) -> list[torch.dtype]:
    """Call the op, and return the dtypes of the tensors that it returns."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of deprecated ops: the user did not call them
        return [tensor.dtype for tensor in tensors_in(op(**sample.arguments))]


def _reason(error: Exception) -> str:
    """Why an op could not be called, in a line."""
    if isinstance(error, _NO_KERNEL):
        return "torch has no kernel for it here, and none for fake tensors"
    return first_line(error)


def _merge_overloads(name: str, rules: list[OpRule]) -> list[OpRule]:
    """One rule for all overloads of an op if they agree in policy and returned dtype.

    Else one rule for each overload, with its full name, such as ``sum.dim``. `rules` has a rule for
    each overload, and `name` is the name of the op.
    """
    # An overload that could not be called does not differ from the others.
    observed_rules = [rule for rule in rules if rule.observed is not None]
    if not observed_rules:  # none could be called
        observed_rules = rules
    policy_names = {rule.policy for rule in rules}
    observed_dtypes = {rule.observed for rule in observed_rules}
    if len(policy_names) == 1 and len(observed_dtypes) == 1:
        overloads = tuple(rule.overloads[0] for rule in rules)
        return [dataclasses.replace(observed_rules[0], overloads=overloads)]
    return [dataclasses.replace(rule, op=f"{name}.{rule.overloads[0]}") for rule in rules]
