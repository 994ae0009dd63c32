"""The GPT of the package, for notebooks."""

from amp_lab.models.gpt import SIZES as SIZES
from amp_lab.models.gpt import Gpt as Gpt
from amp_lab.models.gpt import Size as Size
