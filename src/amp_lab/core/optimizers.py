"""The optimizers of the memory forecast, one row for each. To forecast another, add a row.

torch is imported only when an optimizer is created, since `amp-lab memory --help` lists the names.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class QuantizedState:
    """How torchao stores the two moments of a parameter: in blocks, each with a scale in fp32."""

    bits: int  # of a value
    block: int  # how many values share a scale
    table_bytes: int  # of the look-up table of a moment
    step_bytes: int  # that a step takes for each value, as Inductor 2.15 allocates them on a CPU


@dataclass(frozen=True)
class Optimizer:
    """The facts about one optimizer.

    If it is in `torch.optim`, its memory is measured in a real step on ``meta`` tensors.
    """

    name: str  # what `forecast_memory` and ``--optimizer`` take
    class_name: str  # in `torch.optim`; in `torchao.optim` if `quantized` is given
    settings: dict[str, float] = field(default_factory=dict)  # keywords of the class
    loops: bool = False
    """Whether the step is a loop over the parameters even on a GPU. In a loop, temporaries of the
    previous parameter still exist, so the parameters cannot be counted one by one."""
    overlaps: bool = False
    """Whether this is also so on a CPU, where every step is a loop: RMSprop's last temporary of a
    parameter exists until the next parameter has its own."""
    rest: str = ""  # the optimizer of parameters that are not matrices, if this one refuses them
    takes_sparse: bool = False  # whether it takes sparse gradients
    in_eight_bits: str = ""  # the optimizer that has the same state in eight bits, if there is one
    quantized: QuantizedState | None = None  # then torchao need not be installed

    @property
    def in_torch(self) -> bool:
        """Whether the class is in `torch.optim`, so that a real step can be measured.

        For any other optimizer, the bytes are computed from the facts in this row.
        """
        return self.quantized is None

    def make(self, parameters: Iterable[Any], **options: Any) -> Any:
        """Create the optimizer for parameters; `options` are further keywords of its class."""
        import torch

        return getattr(torch.optim, self.class_name)(parameters, **self.settings, **options)


_ROWS = (
    Optimizer("sgd", "SGD", {"lr": 0.1}, takes_sparse=True),
    Optimizer("sgd-momentum", "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    Optimizer("adam", "Adam", in_eight_bits="adamw-8bit"),
    Optimizer("adamw", "AdamW", in_eight_bits="adamw-8bit"),
    Optimizer("adafactor", "Adafactor", loops=True),
    Optimizer("muon", "Muon", loops=True, rest="adamw"),
    Optimizer("adamw-8bit", "AdamW8bit", quantized=QuantizedState(8, 256, 256 * 4, 8)),
    Optimizer("adamw-4bit", "AdamW4bit", quantized=QuantizedState(4, 128, 16 * 4, 26)),
    Optimizer("adamw-fp8", "AdamWFp8", quantized=QuantizedState(8, 256, 0, 0)),
)

OPTIMIZERS = {optimizer.name: optimizer for optimizer in _ROWS}
"""All optimizers by name."""
