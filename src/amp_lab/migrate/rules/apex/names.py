"""The equivalents of Apex's names in torch, and the advice for names without an equivalent.

The behaviour, arguments and defaults of Apex's functions are from the sources of Apex
(https://github.com/NVIDIA/apex: ``apex/amp``, ``apex/optimizers``, ``apex/normalization``).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from amp_lab.core.remedies import remedy

_Entry = TypeVar("_Entry")
# apex.optimizers.fused_adam.FusedAdam is apex.optimizers.FusedAdam
_INNER_MODULE = re.compile(
    r"^(apex\.(?:optimizers|parallel|normalization|contrib\.clip_grad))\.[a-z_]+\."
)


class Equal(NamedTuple):
    """The equivalent of an Apex name in torch, and the arguments with the same meaning in both."""

    module: str
    """The module of torch to import from, such as ``torch.optim``."""
    name: str
    """The name in `module`; with a dot for a function of a class."""
    positional: int
    """How many positional arguments a call may have."""
    keywords: str = ""
    """The keywords that a call may have, with blanks between."""
    added: str = ""
    """Arguments to add unless the call has their keywords: ``"weight_decay=0.0 fused=True"``."""

    @property
    def dotted_name(self) -> str:
        """The whole name, such as ``torch.optim.AdamW``."""
        return f"{self.module}.{self.name}"


EQUALS = {
    "apex.optimizers.FusedAdam": Equal(  # AdamW's own decay is 0.01
        "torch.optim", "AdamW", 2, "params lr betas eps weight_decay", "weight_decay=0.0 fused=True"
    ),
    "apex.optimizers.FusedSGD": Equal(
        "torch.optim", "SGD", 5, "params lr momentum dampening weight_decay nesterov", "fused=True"
    ),
    "apex.optimizers.FusedAdagrad": Equal(
        "torch.optim", "Adagrad", 2, "params lr eps weight_decay"
    ),
    "apex.normalization.FusedLayerNorm": Equal(
        "torch.nn", "LayerNorm", 3, "normalized_shape eps elementwise_affine"
    ),
    "apex.parallel.convert_syncbn_model": Equal(
        "torch.nn", "SyncBatchNorm.convert_sync_batchnorm", 1
    ),
    "apex.parallel.SyncBatchNorm": Equal(
        "torch.nn", "SyncBatchNorm", 6, "eps momentum affine track_running_stats"
    ),
    # with delay_allreduce, gradients that a loss does not need are allowed: by hand
    "apex.parallel.DistributedDataParallel": Equal(
        "torch.nn.parallel", "DistributedDataParallel", 1
    ),
    "apex.contrib.clip_grad.clip_grad_norm_": Equal(
        "torch.nn.utils", "clip_grad_norm_", 4, "parameters max_norm norm_type error_if_nonfinite"
    ),
}
_AUTOCAST = 'the forward pass and the loss in torch.autocast("cuda", dtype=torch.float16)'
_SCALER = 'scaler = torch.amp.GradScaler("cuda") once'
_MASTERS = f"keep the model in float32; to train, put {_AUTOCAST}, and create {_SCALER}"
_FLOAT = 'compute on x.float() for each input, in torch.autocast("cuda", enabled=False)'
_HALF = (
    "remove this use: autocast casts the inputs of torch's matmuls to float16; for a custom "
    "kernel, cast them with .to(torch.float16)"
)
_PROMOTES = "remove this use: under autocast, most ops of torch take inputs of two dtypes"
_ADVICE = {name: f"write {equal.dotted_name}" for name, equal in EQUALS.items()}
_ADVICE |= {  # a module's advice is for all its names without an entry of their own
    "apex.amp.initialize": (
        f"delete this call; at O1 and O2 put {_AUTOCAST}, and create {_SCALER}; O0 is plain "
        "float32, and O3 is model.half(), both without a scaler"
    ),
    "apex.amp.scale_loss": (
        "write scaler.scale(loss).backward(); for optimizer.step() write scaler.step(optimizer), "
        "then scaler.update() once; call scaler.unscale_(optimizer) before clipping; "
        "at O0 and O3 write loss.backward() alone"
    ),
    "apex.amp.master_params": (
        'write (p for group in optimizer.param_groups for p in group["params"]), after '
        "scaler.unscale_(optimizer) if there is a scaler"
    ),
    "apex.amp.state_dict": "save scaler.state_dict() instead",
    "apex.amp.load_state_dict": (
        'write scaler.load_state_dict(...); from "loss_scaler0" in a checkpoint of Apex, take '
        '"loss_scale" as "scale" and "unskipped" as "_growth_tracker"'
    ),
    "apex.amp.disable_casts": 'write torch.autocast("cuda", enabled=False)',
    "apex.amp.half_function": _HALF,
    "apex.amp.float_function": _FLOAT,
    "apex.amp.promote_function": _PROMOTES,
    "apex.amp.register_half_function": _HALF,
    "apex.amp.register_float_function": _FLOAT,
    "apex.amp.register_promote_function": _PROMOTES,
    "apex.amp.init": f"delete this call: put {_AUTOCAST}, and create {_SCALER}",
    "apex.amp": "use torch.amp; its GradScaler has the state of this module",
    "apex.optimizers.FusedAdam": (
        "write torch.optim.AdamW(..., weight_decay=0.0, fused=True), or torch.optim.Adam for "
        "adam_w_mode=False; torch has no equivalent of bias_correction=False"
    ),
    "apex.optimizers.FusedSGD": "write torch.optim.SGD(..., fused=True)",
    "apex.optimizers.FP16_Optimizer": _MASTERS,
    "apex.optimizers": "torch has no equivalent: use torch.optim.AdamW, and tune its settings",
    "apex.parallel.DistributedDataParallel": (
        "write torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank]); "
        "instead of delay_allreduce=True, pass find_unused_parameters=True"
    ),
    "apex.parallel": "torch has no equivalent: check whether the code still needs this",
    "apex.normalization.FusedRMSNorm": "write torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.normalization.MixedFusedRMSNorm": "write torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.normalization": "write torch.nn.LayerNorm",
    "apex.fp16_utils": _MASTERS,
    "apex.contrib.group_norm": "write torch.nn.GroupNorm, followed by the activation",
    "apex.contrib.layer_norm": "write torch.nn.LayerNorm",
    "apex.contrib.optimizers.FP16_Optimizer": _MASTERS,
    "apex.contrib.optimizers.DistributedFusedAdam": (
        "shard with torch.distributed.fsdp.fully_shard, or torch's ZeroRedundancyOptimizer"
    ),
    "apex.contrib.xentropy": (
        'write torch.nn.functional.cross_entropy(..., ignore_index=0, reduction="none"); '
        "instead of smoothing, pass label_smoothing="
    ),
    "apex.contrib": "torch has no equivalent: keep Apex for this, or look in torch.nn",
    "apex.transformer": "torch has no equivalent: use the version in Megatron-LM",
    "apex.mlp": "write torch.nn.Sequential of Linear and ReLU; torch.compile fuses them",
    "apex.multi_tensor_apply": (
        "remove this use: torch's optimizers and clip_grad_norm_ process many tensors at once"
    ),
    "apex.pyprof": "use torch.profiler, or torch.autograd.profiler.emit_nvtx",
    "apex": "torch has no equivalent: check what the name does and whether the code needs it",
}
ADVICE = {
    name: remedy(f"migrate.{name}", f"{name} is used and not rewritten", text)
    for name, text in _ADVICE.items()
}
UNUSED = remedy(
    "migrate.apex_unused",
    "an import of Apex is left over",
    "nothing in this file uses {name}, and its import fails without Apex: delete the import, "
    "unless another file imports {name} from here",
    failure="AMP0188",
)
SECTIONS = {  # the heading in notebook 13 that explains a name, and the names inside of it
    "apex.amp.initialize": "What each level did, and what replaces it today",
    "apex.amp.init": "What each level did, and what replaces it today",
    "apex.fp16_utils": "What each level did, and what replaces it today",
    "apex.amp.scale_loss": "The loop, line by line",
    "apex.amp.master_params": "The loop, line by line",
    "apex.amp.state_dict": "Checkpoints that Apex wrote",
    "apex.amp.load_state_dict": "Checkpoints that Apex wrote",
    "apex": "The names, then and now",
}


def advice_on(origin: str) -> str:
    """The sentence on what to do about a name of Apex."""
    return _most_specific(ADVICE, public_name(origin)).sentence()


def section_of(origin: str) -> str:
    """The heading of notebook 13 under which a name of Apex is explained."""
    return _most_specific(SECTIONS, public_name(origin))


def is_apex(origin: str | None) -> bool:
    """Whether a dotted name is ``apex`` or begins with ``apex.``; false for None."""
    return origin is not None and origin.partition(".")[0] == "apex"


def public_name(origin: str) -> str:
    """The name in Apex's manual: ``apex.optimizers.FusedAdam``, without an inner module."""
    return _INNER_MODULE.sub(r"\1.", origin)


def _most_specific(table: Mapping[str, _Entry], name: str) -> _Entry:
    """The entry of a dotted name, or of the nearest module around it that has one.

    The tables have ``apex``, at which the search ends.
    """
    while name not in table:
        name = name.rpartition(".")[0]
    return table[name]
