"""Several processes that train one model: DDP or FSDP2, and what each rank does.

Nothing is imported here: the names of both are read without loading `torch.distributed`.
"""
