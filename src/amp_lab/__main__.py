"""`python -m amp_lab`, the same as the command `amp-lab` (torchrun needs the module form)."""

import sys

from amp_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
