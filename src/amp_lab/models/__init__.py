"""The models that come with the package: torchvision's classifiers by name, and small GPTs.

This file imports nothing, so that the sizes of the GPTs can be read without loading torchvision.
"""
