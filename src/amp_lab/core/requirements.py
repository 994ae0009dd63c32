"""Check the installed packages: torch, in the version that is installed, and the extras.

`amp-lab` itself needs lunr, numpy and tqdm. If a command or function needs another package that is
missing, this module raises an error of one line.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from amp_lab.core.errors import RequirementError, with_type

OLDEST_TORCH = (2, 11)

_EXTRAS = {  # a module: the extra in pyproject.toml that brings it
    "onnxruntime": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "libcst": "migrate",
    "matplotlib": "plots",
    "PIL": "train",
    "filelock": "train",
    "sklearn": "train",
    "tokenizers": "train",
    "torchvision": "train",
}
_CORE_PACKAGES = {
    "lunr",
    "numpy",
    "tqdm",
}  # pip installs them with amp-lab; a checkout may lack them
_PACKAGE_NAMES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}  # packages that are not named like their module
_OLDEST_NAME = ".".join(map(str, OLDEST_TORCH))
_HOW_TO_GET_TORCH = (
    f"amp_lab needs {_OLDEST_NAME} or later, from "
    "https://pytorch.org/get-started/locally (in a checkout: pdm run sync)"
)


def require_torch() -> None:
    """Load torch; raise `RequirementError` if torch is missing or too old."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        if getattr(error, "name", None) == "torch":
            raise RequirementError(f"torch is not installed: {_HOW_TO_GET_TORCH}") from None
        raise RequirementError(f"torch cannot be imported: {with_type(error)}") from error
    version = str(getattr(torch, "__version__", ""))  # a folder called torch has none
    match = re.match(r"(\d+)\.(\d+)", version)  # the beginning of "2.11.0+cpu"
    if match is None:
        raise RequirementError(f"torch is not installed, or has no version: {_HOW_TO_GET_TORCH}")
    if tuple(map(int, match.groups())) < OLDEST_TORCH:
        raise RequirementError(f"torch {version} is too old: {_HOW_TO_GET_TORCH}")


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """The block that imports packages for `what`, such as ``drawing``.

    If a package is not installed, the block raises a `RequirementError` that begins with `what` and
    has the command to install the package. Any other error stays as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module == "torch":
            raise RequirementError(f"torch is not installed: {_HOW_TO_GET_TORCH}") from None
        if module in _CORE_PACKAGES:
            raise RequirementError(f"{what} needs {module}: pip install {module}") from None
        if module not in _EXTRAS:  # the user's own module, or a mistake of this package
            raise
        package = _PACKAGE_NAMES.get(module, module)
        install = f"pip install 'amp-lab[{_EXTRAS[module]}]'"
        raise RequirementError(f"{what} needs {package}: {install}") from None


@contextmanager
def nothing_logged() -> Iterator[None]:
    """The block in which packages log no warnings; their exceptions contain the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def require_matplotlib(what: str) -> None:
    """Raise `RequirementError` now, and not after minutes of work, if matplotlib is missing.

    `what` names the function or option that needs matplotlib, and begins the message.
    """
    try:
        with nothing_logged(), needed_for(what):
            import matplotlib  # noqa: F401
    except (OSError, ValueError) as error:  # a settings file of the user's that it cannot read
        raise RequirementError(f"matplotlib cannot be imported: {with_type(error)}") from error
