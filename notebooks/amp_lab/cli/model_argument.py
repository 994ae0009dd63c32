"""What the command line is given to work on: a model by its import path, an input by its shape."""

import argparse
import contextlib
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING

from amp_lab.cli.printing import FORMAT
from amp_lab.errors import OptionError, with_type

if TYPE_CHECKING:
    from torch import nn

DEVICE = {"metavar": "NAME", "help": "cuda (also for ROCm; the default), xpu, mps, cpu"}
"""Settings of the option ``--device`` of what need not be here."""

_FORM = "PACKAGE.MODULE:CALLABLE"


def load_model(target: str) -> "nn.Module":
    """The model that ``PACKAGE.MODULE:CALLABLE`` returns when called without arguments.

    A class, a function that builds a model, or a finished `nn.Module` will do; modules in the
    current folder are found too. Raises `OptionError` in one line for whatever goes wrong.
    """
    from torch import nn

    module_name, colon, path = target.partition(":")
    names = path.split(".")
    if not colon or not all(p.isidentifier() for p in [*module_name.split("."), *names]):
        raise OptionError(f"{target!r}: write {_FORM}, such as torchvision.models:resnet50")
    found = _imported(target, module_name)
    for name in names:
        try:
            found = getattr(found, name)  # a path, so that methods of a class can be named
        except AttributeError:
            raise OptionError(f"{target!r}: {module_name} has no {path!r}") from None
    if isinstance(found, nn.Module):  # a finished model is callable too, but with inputs
        return found
    if not callable(found):
        kind = f"{target!r} is of type {type(found).__name__}"
        raise OptionError(f"{kind}: give a callable that returns an nn.Module")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what it prints is no part of the table
            model = found()
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise OptionError(
            f"{target!r} cannot be called without arguments: {with_type(error)}; write a function "
            "without parameters that calls it"
        ) from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"{target!r} returns a {type(model).__name__}, not an nn.Module")
    return model


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that a text such as ``8,3,224,224`` gives. Raises `OptionError` for any other."""
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise OptionError(f"{text!r} is no shape: give sizes such as 8,3,224,224") from None
    if min(shape) < 1:  # nothing could be traced, and -1 is no wildcard here
        raise OptionError(f"shape {text!r}: every size must be 1 or more")
    return shape


def _imported(target: str, module_name: str) -> object:
    here = os.getcwd()
    added = [] if here in sys.path else [here]
    sys.path += added  # at the end, so that no file here hides a package
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # A module that the user's own imports is another matter: there the whole error is of use.
        if missing and f"{module_name}.".startswith(f"{missing}."):
            what = f"{target!r}: no module {missing!r} is installed, or in this folder"
            raise OptionError(what) from None
        raise OptionError(f"{target!r} cannot be imported: {with_type(error)}") from error
    finally:
        for folder in added:
            sys.path.remove(folder)


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the options that name a model, its inputs and the device."""
    option, several = command.add_argument, {"action": "append"}
    shapes = "such as 8,3,224,224; repeat it for a model with several inputs"
    dtypes = "once for all inputs or for each (default: float32; int64 for tokens)"
    option("target", metavar=_FORM, help="returns the model when it is called")
    option("--input", required=True, **several, metavar="SHAPE", help=shapes)
    option("--input-dtype", choices=("float32", "int64", "bool"), **several, help=dtypes)
    option("--device", default="cuda", **DEVICE)
    option("--format", **FORMAT)


def inputs_of(options: argparse.Namespace) -> list[tuple]:
    """Shape and dtype of each input."""
    import torch

    shapes = [parse_shape(text) for text in options.input]
    dtypes = options.input_dtype or ["float32"]
    if len(dtypes) not in (1, len(shapes)):
        given = f"--input-dtype is given {len(dtypes)} times for {len(shapes)} --input"
        raise OptionError(f"{given}: give it once, or once for each")
    if len(dtypes) == 1:
        dtypes = dtypes * len(shapes)
    return [(s, getattr(torch, dtype)) for s, dtype in zip(shapes, dtypes, strict=True)]


def dtype_of(name: str | None):
    """The dtype that a precision is named for; None for None."""
    from amp_lab.precision import Precision

    return None if name is None else Precision(name).dtype
