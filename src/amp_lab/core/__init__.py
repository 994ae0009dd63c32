"""What every folder of the package may import: errors, files, precision, backends, timing, devices.

This file imports nothing, because `errors` and `requirements` must also work without torch.
"""
