"""The models that the package brings: torchvision's classifiers by name, and small GPTs.

Nothing is imported here: the sizes of the GPTs are read without loading torchvision.
"""
