"""The errors that the user can put right, each told in one line."""


class AmpLabError(Exception):
    """Base of every error that says what is wrong, with which value, and what to do.

    The command line prints it as one line and exits with 2; IPython shows the line alone, since the
    stack under it would only show where in this package the value was checked.
    """

    is_of_one_rank = False
    """Of several processes that train together, this is the one to tell it."""

    def _render_traceback_(self) -> list[str]:  # IPython's own hook for such errors
        return [f"{type(self).__name__}: {self}"]


class AmpLabWarning(UserWarning):
    """Base of what the user should know, though it stops nothing; also told in one line."""


class OptionError(AmpLabError, ValueError):
    """What was asked for cannot be: an option, a model's name, a shape, a file, a package."""


class DeviceError(AmpLabError, ValueError):
    """The device asked for does not exist, is not there, or does not take the dtype asked for."""


class DataError(AmpLabError):
    """A data set, or a file of one, is not there, cannot be read, or is not what it should be."""


class CheckpointError(AmpLabError):
    """A checkpoint cannot be written, or what is there is no whole checkpoint."""


class RunError(AmpLabError, ValueError):
    """A training run cannot start, or go on, as it was asked to."""


class ParallelError(AmpLabError, RuntimeError):
    """Several processes cannot work together: not started so, lost, too late, or one failed."""


class OtherRankError(AmpLabError):
    """Another process of the same training has raised, and told, the error."""


class NumericsError(AmpLabError, ValueError):
    """A tool of `amp_lab.numerics` was given what it cannot work on, or used out of turn."""


class TraceError(AmpLabError, RuntimeError):
    """A model cannot be run on fake tensors, not followed, or its memory not be forecast."""


class RequirementError(AmpLabError, ImportError):
    """A package that is needed is not installed, or torch is too old."""


def first_line(error: BaseException) -> str:
    """What an error says in a line; the name of its type if it says nothing.

    The first line of its message, and the second too if the first ends with a colon.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[0]
    if line.endswith(":"):
        line = " ".join(lines[:2])
    return line.rstrip(".")


def with_type(error: BaseException) -> str:
    """The same after the type of the error, as at the end of a traceback."""
    kind = type(error).__name__
    line = first_line(error)
    if line == kind:
        return kind
    return f"{kind}: {line}"
