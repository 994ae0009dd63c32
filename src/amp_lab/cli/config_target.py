"""A target that is a config of transformers: a config.json, its folder, or a name on the Hub."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_lab.core.errors import OptionError, RequirementError, first_line
from amp_lab.core.requirements import nothing_logged

if TYPE_CHECKING:
    from torch import nn


_NO_ARCHITECTURE = "the config names no architecture: write a function that returns the model"


def is_config(target: str) -> bool:
    """Whether a target names a config, and not ``PACKAGE.MODULE:CALLABLE``."""
    if ":" in target or target.endswith(".py"):
        return False
    return target.endswith(".json") or "/" in target or Path(target, "config.json").is_file()


def build_from_config(target: str, changes: dict[str, Any]) -> "nn.Module":
    """The model that a config describes, with random weights in float32.

    `changes` replaces values of the config. Nothing is downloaded, and no code that comes with a
    config is run. Raises `OptionError`, or `RequirementError` without transformers.
    """
    with nothing_logged():  # transformers logs which optional packages are missing
        config, architecture = _read(target, changes)
        return architecture(config)


def imports_and_call(target: str, changes: dict[str, Any]) -> tuple[list[str], str]:
    """The code for the model: a list with the line that imports its class, and an expression.

    They are such as ``from transformers import AutoConfig, GPT2LMHeadModel``, and
    ``GPT2LMHeadModel(AutoConfig.from_pretrained('gpt2', n_layer=2))``.
    """
    with nothing_logged():
        _, architecture = _read(target, changes)
    name_or_path = target
    if Path(target).exists():
        name_or_path = str(Path(target).resolve())
    arguments = [repr(name_or_path)]
    for name, value in changes.items():
        arguments.append(f"{name}={value!r}")
    config_code = f"AutoConfig.from_pretrained({', '.join(arguments)})"
    class_name = architecture.__name__
    import_line = f"from transformers import AutoConfig, {class_name}"
    return [import_line], f"{class_name}({config_code})"


def _read(target: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """The config with `changes`, and the class of the model that it names first.

    Raises `OptionError` if there is no such file, change or class.
    """
    if target.endswith(".json") and not Path(target).is_file():
        raise OptionError(f"{target!r}: this file does not exist")
    config, unknown = _load_config(target, changes)
    if unknown:
        names = ", ".join(unknown)
        config_type = type(config).__name__
        raise OptionError(f"{target!r}: --with sets {names}, but a {config_type} has no such value")
    if not config.architectures:
        raise OptionError(f"{target!r}: {_NO_ARCHITECTURE}")
    class_name = config.architectures[0]
    transformers = importlib.import_module("transformers")
    architecture = getattr(transformers, class_name, None)
    if architecture is None:
        raise OptionError(
            f"{target!r}: transformers {transformers.__version__} has no class {class_name}; "
            "install a version that has it, or write a function that returns the model"
        )
    return config, architecture


def _load_config(target: str, changes: dict[str, Any]) -> tuple[Any, list[str]]:
    """The config with `changes`, and the names of those changes that it does not know.

    Raises `OptionError` if transformers cannot read it, and `RequirementError` without
    transformers.
    """
    try:
        transformers = importlib.import_module("transformers")
        config, unused = transformers.AutoConfig.from_pretrained(
            target,
            local_files_only=True,
            trust_remote_code=False,
            return_unused_kwargs=True,
            **changes,
        )
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        message = f"{target!r} needs transformers: pip install transformers"
        raise RequirementError(message) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"transformers cannot read the config ({first_line(error)})"
        if isinstance(error, OSError) and not Path(target).exists():
            problem = (
                "the config is not on this disk, or not readable; give the path of a config.json"
            )
        raise OptionError(f"{target!r}: {problem}") from error
    return config, [name for name in changes if name in unused]
