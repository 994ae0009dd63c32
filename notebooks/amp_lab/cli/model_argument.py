"""What the command line is given to work on: a model by its import path, an input by its shape."""

import contextlib
import importlib
import io
import os
import sys

from torch import nn

from amp_lab.errors import TargetError, with_type

_FORM = "PACKAGE.MODULE:CALLABLE, such as torchvision.models:resnet50"


def load_model(target: str) -> nn.Module:
    """The model that ``PACKAGE.MODULE:CALLABLE`` returns when called without arguments.

    A class, a function that builds a model, or a finished `nn.Module` will do; modules in the
    current folder are found too. Raises `TargetError` in one line for whatever goes wrong.
    """
    module_name, colon, path = target.partition(":")
    names = path.split(".")
    if not colon or not all(p.isidentifier() for p in [*module_name.split("."), *names]):
        raise TargetError(f"{target!r}: write {_FORM}")
    found = _imported(target, module_name)
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            raise TargetError(f"{target!r}: {module_name} has no {path!r}") from None
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        kind = type(found).__name__
        raise TargetError(
            f"{target!r} is of type {kind}: give a callable that returns an nn.Module"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what it prints is no part of the table
            model = found()
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise TargetError(
            f"{target!r} cannot be called without arguments: {with_type(error)}; write a function "
            "without parameters that calls it"
        ) from error
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target!r} returns a {type(model).__name__}, not an nn.Module")
    return model


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that a text such as ``8,3,224,224`` gives. Raises `TargetError` for any other."""
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise TargetError(f"{text!r} is no shape: give sizes such as 8,3,224,224") from None
    if min(shape) < 1:
        raise TargetError(f"shape {text!r}: every size must be 1 or more")
    return shape


def _imported(target: str, module_name: str) -> object:
    here = os.getcwd()
    added = here not in sys.path
    if added:  # at the end, so that no file here hides a package
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise TargetError(
                f"{target!r}: no module {error.name!r} is installed, or in this folder"
            ) from None
        raise TargetError(f"{target!r} cannot be imported: {with_type(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise TargetError(f"{target!r} cannot be imported: {with_type(error)}") from error
    finally:
        if added:
            sys.path.remove(here)
