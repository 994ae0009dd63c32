"""What torch has for each name of Apex, and what to say where it has no equal.

What Apex's functions do, and their arguments and defaults, is from its sources
(https://github.com/NVIDIA/apex: ``apex/amp``, ``apex/optimizers``, ``apex/normalization``).
"""

from typing import NamedTuple


class Equal(NamedTuple):
    """What torch has for a name of Apex, and with which arguments the two mean the same."""

    module: str
    name: str
    positional: int
    keywords: tuple[str, ...] = ()
    added: tuple[tuple[str, str], ...] = ()  # keywords, where they are not given


EQUALS = {
    "apex.optimizers.FusedAdam": Equal(
        "torch.optim",
        "AdamW",
        2,
        ("params", "lr", "betas", "eps", "weight_decay"),
        (("weight_decay", "0.0"), ("fused", "True")),  # AdamW's own decay is 0.01
    ),
    "apex.optimizers.FusedSGD": Equal(
        "torch.optim",
        "SGD",
        5,
        ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov"),
        (("fused", "True"),),
    ),
    "apex.normalization.FusedLayerNorm": Equal(
        "torch.nn", "LayerNorm", 3, ("normalized_shape", "eps", "elementwise_affine")
    ),
    "apex.parallel.convert_syncbn_model": Equal(
        "torch.nn", "SyncBatchNorm.convert_sync_batchnorm", 1
    ),
}
AUTOCAST = 'the forward pass and the loss in torch.autocast("cuda", dtype=torch.float16)'
SCALER = 'scaler = torch.amp.GradScaler("cuda") once'
PARAMETERS = '(p for group in {}.param_groups for p in group["params"])'
ADVICE = {  # by the longest name that fits
    "apex.amp.initialize": f"for O1 and O2 delete it, put {AUTOCAST}, and make {SCALER}",
    "apex.amp.scale_loss": (
        "write scaler.scale(loss).backward(); for optimizer.step() write scaler.step(optimizer), "
        "then scaler.update() once; call scaler.unscale_(optimizer) before clipping"
    ),
    "apex.amp.master_params": (
        f"write {PARAMETERS.format('optimizer')}, after scaler.unscale_(optimizer)"
    ),
    "apex.amp.state_dict": "save scaler.state_dict() in its place",
    "apex.amp.load_state_dict": (
        'write scaler.load_state_dict(...); in a checkpoint of Apex, "scale" is "loss_scale" of '
        '"loss_scaler0", and "_growth_tracker" is its "unskipped"'
    ),
    "apex.amp.disable_casts": 'write torch.autocast("cuda", enabled=False)',
    "apex.amp.half_function": "drop it: autocast casts the ops inside to float16 by itself",
    "apex.amp.float_function": (
        'compute in torch.autocast("cuda", enabled=False), on x.float() for each input'
    ),
    "apex.amp.promote_function": "drop it: ops of two dtypes promote by themselves in autocast",
    "apex.amp.init": f"drop it: put {AUTOCAST}, and make {SCALER}",
    "apex.amp": "use torch.amp: autocast and GradScaler",
    "apex.optimizers.FusedAdam": (
        "write torch.optim.AdamW(..., weight_decay=0.0, fused=True), or torch.optim.Adam if it has "
        "adam_w_mode=False"
    ),
    "apex.optimizers.FusedSGD": "write torch.optim.SGD(..., fused=True)",
    "apex.optimizers.FusedAdagrad": "write torch.optim.Adagrad(...)",
    "apex.optimizers": "torch.optim has no such optimizer: take torch.optim.AdamW, and tune anew",
    "apex.parallel.DistributedDataParallel": (
        "write torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])"
    ),
    "apex.parallel.SyncBatchNorm": "write torch.nn.SyncBatchNorm",
    "apex.parallel.convert_syncbn_model": (
        "write torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    ),
    "apex.parallel": "use torch.nn.parallel",
    "apex.normalization.FusedRMSNorm": "write torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.normalization": "write torch.nn.LayerNorm",
    "apex.fp16_utils": f"keep the model in float32; put {AUTOCAST}, and make {SCALER}",
    "apex": "look for its name of today in torch.amp, torch.optim or torch.nn",
}
SECTIONS = {  # of notebook 13, where it is explained: the heading for a name, and those below it
    "apex.amp.initialize": "What each level did, and what does it today",
    "apex.amp.init": "What each level did, and what does it today",
    "apex.fp16_utils": "What each level did, and what does it today",
    "apex.amp.scale_loss": "The loop, line by line",
    "apex.amp.master_params": "The loop, line by line",
    "apex.amp.state_dict": "Checkpoints that Apex wrote",
    "apex.amp.load_state_dict": "Checkpoints that Apex wrote",
    "apex": "The names, then and now",
}
LEVELS = {
    "O0": "O0 is plain float32: delete it, and amp.scale_loss with it",
    "O1": f"O1 casts ops: delete it, put {AUTOCAST}, and make {SCALER}",
    "O2": (
        f"O2 keeps float32 master weights, as torch does by itself: delete it, put {AUTOCAST}, "
        f"and make {SCALER}"
    ),
    "O3": "O3 is pure float16: delete it, and write model.half(), without a scaler, which refuses "
    "float16 gradients",
    "off": "enabled=False is plain float32: delete it, and amp.scale_loss with it",
}
PLAIN = {  # why the gradients of these levels need no scaler
    "O0": "O0 is plain float32",
    "O3": "O3 is pure float16, and a scaler refuses float16 gradients",
    "off": "with enabled=False it is plain float32",
}


def longest(table: dict[str, str], name: str) -> str:
    """What a table has for a dotted name, or for the longest part that it begins with."""
    while name not in table:
        name = name.rpartition(".")[0]
    return table[name]
