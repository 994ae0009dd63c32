"""A run that raises: at which op, in which module, and what to do about it."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from amp_lab.core.errors import NumericsError, with_type
from amp_lab.difference.result import located
from amp_lab.tracing.error_tips import tips_for
from amp_lab.tracing.operands import Operand, low_operand, remedy_for_mixed, user_line


@dataclass(frozen=True)
class Failure:
    """An error of a run, and where it arose."""

    error: Exception
    op: str = ""  # "": not known
    module: str = ""
    module_type: str = ""  # "": outside of all modules
    operands: tuple[Operand, ...] = ()  # what the op got

    def text(self, run: str) -> str:
        """The error in a line."""
        text = f"run {run} raises {with_type(self.error)}"
        if not self.op and not self.module_type:
            return text
        where = located(self.op, self.module, self.module_type)
        if self.op:
            return f"{text}, at {where}"
        text += f", in {where}"
        line = user_line(self.error)
        if line:
            text += f", {line}"
        return text


class RunRaised(NumericsError):
    """A run raised; the message says what, where, and what to do about it."""

    def __init__(self, run: str, failure: Failure, device_type: str, has_low_weights: bool):
        error = failure.error
        self.description = failure.text(run)  # without what to do about it
        known = tips_for(error, failure.op, device_type)
        mixed = remedy_for_mixed(error, failure.op, failure.operands, has_low_weights)
        tips = [mixed, *known] if mixed else known
        super().__init__("; ".join([self.description, *dict.fromkeys(tips)]))
        is_of_dtypes = "type" in str(error)
        is_mixed = not failure.op or low_operand(failure.operands) is not None
        self.may_be_of_inputs = is_of_dtypes and is_mixed and not known
        """Whether inputs of another dtype than the weights may be what raised."""


def failure_above_ops(error: Exception, names: Mapping[nn.Module, str]) -> Failure:
    """Where an error arose that no op of torch raised, such as one of autocast or of the model.

    The innermost module whose code ran, and the function of `torch.nn.functional` that it called.
    """
    module = None
    op = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            module = owner
            op = ""
        elif frame.f_globals.get("__name__") == F.__name__:
            op = frame.f_code.co_name
    if module is None:
        return Failure(error, op)
    return Failure(error, op, names[module], type(module).__name__)
