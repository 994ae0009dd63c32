"""Train one model with several processes: DDP or FSDP2, and the work of each rank.

This file imports nothing, so that the names of DDP and FSDP2 can be read without loading
`torch.distributed`.
"""
