"""Modules that every folder may import: errors, files, precision, backends, timing, devices.

This file imports nothing, because `errors` and `requirements` must also work without torch.
"""
