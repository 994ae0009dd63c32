"""Python imports this by itself where it is on the path: the device is there from the start."""

import pretend  # noqa: F401 - importing it is what registers the device
