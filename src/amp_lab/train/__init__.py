"""Train a model in any precision: the training loop, and runs that are stored in a folder.

This file imports nothing, so that the command line can read the settings of a run without loading
torch.
"""
