"""Train a model in any precision: the training loop, and runs that are saved in a folder.

This file imports nothing, so the command line can read the settings of a run without torch.
"""
