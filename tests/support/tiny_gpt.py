"""A language model of a few hundred parameters, which `amp-lab train` knows once this is loaded."""

from amp_lab.models.gpt import SIZES, Size

NAME = "gpt-tiny"
SIZES[NAME] = Size(width=16, heads=2, depth=1)
