"""Train one model with several processes, with DDP or FSDP2.

This file imports nothing, so that the names of DDP and FSDP2 can be read without loading
`torch.distributed`.
"""
