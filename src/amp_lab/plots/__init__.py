"""The figures of commands and notebooks, in one style that is also readable in greyscale.

Write ``from amp_lab import plots``, then ``plots.roofline(…)``. Each subject has a file. `style`
contains the colours and the shared elements.
"""

from amp_lab.core import requirements

requirements.require_matplotlib("drawing")
with requirements.needed_for("drawing"):
    # Every public function of these files is a figure, and is exported without being listed here.
    from amp_lab.plots.difference import *  # noqa: F403
    from amp_lab.plots.formats import *  # noqa: F403
    from amp_lab.plots.memory import *  # noqa: F403
    from amp_lab.plots.number_formats import *  # noqa: F403
    from amp_lab.plots.speed import *  # noqa: F403
    from amp_lab.plots.style import image as image
    from amp_lab.plots.style import save as save
    from amp_lab.plots.style import use_style as use_style
    from amp_lab.plots.training import *  # noqa: F403
