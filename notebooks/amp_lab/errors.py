"""The errors that the user can put right, each told in one line."""


class AmpLabError(Exception):
    """Base of every error that says what is wrong, with which value, and what to do.

    The command line prints it as one line and exits with 2; IPython shows the line alone, since the
    stack under it would only show where in this package the value was checked.
    """

    def _render_traceback_(self) -> list[str]:  # IPython's own hook for such errors
        return [f"{type(self).__name__}: {self}"]


class DeviceError(AmpLabError, ValueError):
    """The device asked for does not exist, or is not there."""


class ScaleError(AmpLabError, ValueError):
    """AMP_LAB_SCALE names no scale."""
