"""Train a model in any precision: the loop, and runs that live in a folder.

Nothing is imported here: the command line reads the settings of a run without loading torch.
"""
