"""Report a run that raises: the op, the module and the remedies."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from amp_lab.core.errors import NumericsError, with_type
from amp_lab.difference.result import location_text
from amp_lab.tracing.error_tips import tips_for
from amp_lab.tracing.operands import Operand, low_operand, remedy_for_mixed, user_line


@dataclass(frozen=True)
class Failure:
    """An error of a run, and where it arose."""

    error: Exception
    op: str = ""  # such as "addmm"; "": not known
    module: str = ""  # its qualified name; "" for the model itself
    module_type: str = ""  # its class; "": outside of all modules
    operands: tuple[Operand, ...] = ()  # the op's floating-point arguments

    def describe(self, run: str) -> str:
        """Say in one line what the run ("A" or "B") raises, and where."""
        text = f"run {run} raises {with_type(self.error)}"
        if not self.op and not self.module_type:
            return text
        where = location_text(self.op, self.module, self.module_type)
        if self.op:
            return f"{text}, at {where}"
        # Without an op, the line of the user's code helps to find the place.
        text += f", in {where}"
        line = user_line(self.error)
        if line:
            text += f", {line}"
        return text


class RunRaised(NumericsError):
    """A run raised. The message has the error, the op, the module and the remedies."""

    def __init__(self, run: str, failure: Failure, device_type: str, has_low_weights: bool):
        """`run` is "A" or "B"; `has_low_weights` says whether a weight or buffer is in 16 bits."""
        error = failure.error
        self.description = failure.describe(run)  # the message without remedies
        known_tips = tips_for(error, failure.op, device_type)
        mixed_tip = remedy_for_mixed(error, failure.op, failure.operands, has_low_weights)
        tips = [mixed_tip, *known_tips] if mixed_tip else known_tips
        super().__init__("; ".join([self.description, *dict.fromkeys(tips)]))
        mentions_dtype = "type" in str(error)  # "dtype" or "scalar type"
        may_mix_dtypes = not failure.op or low_operand(failure.operands) is not None
        self.may_come_from_inputs = mentions_dtype and may_mix_dtypes and not known_tips
        """Whether the cause may be inputs whose dtype is not that of the weights."""


def failure_above_ops(error: Exception, names: Mapping[nn.Module, str]) -> Failure:
    """Find the place of an error that autocast or the model's own code raised, not an op.

    Returns the innermost module in the traceback, and the function of `torch.nn.functional` that
    the module called; "" stands for a part that the traceback does not have. `names` are the names
    of the modules.
    """
    module = None
    op = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            module = owner
            op = ""  # an earlier one was called by an outer module
        elif frame.f_globals.get("__name__") == F.__name__:
            op = frame.f_code.co_name
    if module is None:
        return Failure(error, op)
    return Failure(error, op, module=names[module], module_type=type(module).__name__)
