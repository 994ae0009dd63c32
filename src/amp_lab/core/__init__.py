"""What every folder of the package may import: errors, files, precision, backends, timing, devices.

Nothing is imported here: `errors` and `requirements` are read before torch is there.
"""
