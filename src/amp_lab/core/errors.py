"""The errors that the user can fix, each with a message of one line."""


class AmpLabError(Exception):
    """Base class of the errors that you can fix. The message says what is wrong and what to do.

    The command line prints only the message, in one line, and exits with code 2. IPython also shows
    only this line, because the traceback would point into this package and not to your mistake.
    """

    is_of_one_rank = False
    """Whether only one of several ranks has this error, so that this rank has to print it."""

    def _render_traceback_(self) -> list[str]:  # IPython's own hook for such errors
        return [f"{type(self).__name__}: {self}"]


class AmpLabWarning(UserWarning):
    """Base class of the warnings of this package. Each warning is printed in one line."""


class OptionError(AmpLabError, ValueError):
    """An option, a model's name, a shape, a file or a package that cannot be used as asked."""


class DeviceError(AmpLabError, ValueError):
    """The device does not exist, is not in this machine, or does not support the dtype."""


class DataError(AmpLabError):
    """A data set, or a file of it, is missing, cannot be read, or has the wrong content."""


class CheckpointError(AmpLabError):
    """A checkpoint cannot be written, or an existing file is not a complete checkpoint."""


class RunError(AmpLabError, ValueError):
    """A training run cannot start or resume with the given settings."""


class ParallelError(AmpLabError, RuntimeError):
    """Several processes cannot work together: one was not started, lost, too late, or failed."""


class OtherRankError(AmpLabError):
    """Another rank has raised and printed the error; this one only has to end."""


class NumericsError(AmpLabError, ValueError):
    """A tool of `amp_lab.numerics` got an argument that it cannot use, or was called too early."""


class TraceError(AmpLabError, RuntimeError):
    """A model cannot be run on fake tensors, or its memory cannot be forecast."""


class RequirementError(AmpLabError, ImportError):
    """A package that is needed is not installed, or torch is too old."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop at its end.

    If the first line ends with a colon, the second line follows it. If the message is empty, the
    result is the name of the error's type.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[0]
    if line.endswith(":"):
        line = " ".join(lines[:2])
    return line.rstrip(".")


def with_type(error: BaseException) -> str:
    """The error's type and its `first_line`; the type alone if there is no message."""
    kind = type(error).__name__
    line = first_line(error)
    if line == kind:
        return kind
    return f"{kind}: {line}"
