"""A model with its inputs and its loss, which every tool takes as one object."""

from amp_lab.model_call.call import ModelCall, arguments_of

__all__ = ["ModelCall", "arguments_of"]
