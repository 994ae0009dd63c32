"""A model with its inputs and its loss, as one object for all tools."""

from amp_lab.model_call.call import ModelCall, arguments_of

__all__ = ["ModelCall", "arguments_of"]
