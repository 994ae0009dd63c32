"""All figures of the notebooks: those of this folder, and some of `amp_lab.plots`."""

# Every public function of these files is a figure, and is exported without being listed here.
from course.figures.difference import *  # noqa: F403
from course.figures.formats import *  # noqa: F403
from course.figures.memory import *  # noqa: F403
from course.figures.number_formats import *  # noqa: F403
from course.figures.pictures import *  # noqa: F403
from course.figures.speed import *  # noqa: F403
from course.figures.training import *  # noqa: F403

from amp_lab.plots import gradients_against_fp16 as gradients_against_fp16
from amp_lab.plots import roofline as roofline
from amp_lab.plots import scale_over_time as scale_over_time
from amp_lab.plots import speed_ladder as speed_ladder
from amp_lab.plots import use_style as use_style
