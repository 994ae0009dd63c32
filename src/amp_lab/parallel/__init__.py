"""Train one model with several processes: DDP or FSDP2, and what each rank does.

This file imports nothing, so that the names of DDP and FSDP2 can be read without loading
`torch.distributed`.
"""
