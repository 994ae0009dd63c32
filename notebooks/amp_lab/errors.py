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


class DeviceError(AmpLabError, ValueError):
    """The device asked for does not exist, or is not there."""


class ScaleError(AmpLabError, ValueError):
    """AMP_LAB_SCALE names no scale."""


class CheckpointError(AmpLabError):
    """A checkpoint cannot be written, or what is there is no whole checkpoint."""


class RunError(AmpLabError, ValueError):
    """A training run cannot start, or go on, as it was asked to."""


class DataError(AmpLabError):
    """A data set, or a file of one, is not there, cannot be read, or is not what it should be."""


class NumericsError(AmpLabError, ValueError):
    """A tool of `amp_lab.numerics` was given what it cannot work on, or used out of turn."""


class DtypeError(AmpLabError, ValueError):
    """Autocast does not take the dtype asked for."""


class TraceError(AmpLabError, RuntimeError):
    """A model cannot be run, or not followed, on fake tensors."""


class MemoryForecastError(AmpLabError, ValueError):
    """The memory of a model cannot be forecast, or an amount of memory is none."""


class XrayError(TraceError):
    """A model, or an input of it, cannot be X-rayed as it was asked."""


class TargetError(AmpLabError, ValueError):
    """``PACKAGE.MODULE:CALLABLE`` names no model, or a text is no shape."""


class OptionError(AmpLabError, ValueError):
    """Options of a command do not go together, or one has a value that it does not take."""


class PeerError(AmpLabError):
    """A library to compare with is not there, or does not do what was asked."""


class BenchError(AmpLabError, ValueError):
    """A benchmark cannot run as it was asked to, or a file holds no results of one."""


class ParallelError(AmpLabError):
    """Processes cannot train together: they were not started so, differ, or do not answer."""


class OtherRankError(AmpLabError):
    """Another process of the same training has raised, and told, the error."""


class PlotError(AmpLabError):
    """A figure cannot be written."""


class CommunicationError(AmpLabError, RuntimeError):
    """A collective of which it is not known what it sends."""


class PackageError(AmpLabError, ImportError):
    """A notebook needs a package that is not installed."""


class WorkersError(AmpLabError, RuntimeError):
    """Processes for a notebook's functions cannot be started, failed, or did not end in time."""


class MigrateError(AmpLabError, ValueError):
    """A file cannot be migrated: it is no whole Python or notebook, or cannot be changed."""


def first_line(error: BaseException) -> str:
    """What an error says in a line; the name of its type if it says nothing.

    The first line of its message, and the second too if the first ends with a colon.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")


def with_type(error: BaseException) -> str:
    """The same after the type of the error, as at the end of a traceback."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"
