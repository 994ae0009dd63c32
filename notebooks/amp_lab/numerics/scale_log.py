"""The loss scale over time."""

from typing import Any

import torch

from amp_lab.errors import NumericsError
from amp_lab.numerics.error_notes import add_note
from amp_lab.remedies import remedy
from amp_lab.report import plural

_BELOW_ONE = remedy(
    "scale_log.below_one",
    "the loss scale fell below 1",
    "A scale below 1 means that gradients overflow unscaled: see find_nonfinite",
)


class ScaleLog:
    """Log the loss scale of every step of a `torch.amp.GradScaler`, and the steps it skipped.

        with ScaleLog(scaler) as log:
            train(…)
        log.plot()

    A step is a call of ``scaler.update()``. The scale and the found infs are copied on their
    device and read when you ask, so that the host waits for nothing more than without the log.

    Leaving the block, or `close`, leaves the scaler as it was; the log can still be read. With a
    disabled scaler every scale is 1. While it is open, save the scaler by its `state_dict` alone.
    If the scaler refuses fp16 gradients in the block, what to do is added to its error as a note.

    Raises `NumericsError` if `scaler` is no GradScaler, or has an open ScaleLog already.
    """

    def __init__(self, scaler: torch.amp.GradScaler):
        if not isinstance(scaler, torch.amp.GradScaler):
            raise NumericsError(f"ScaleLog: {type(scaler).__name__} is no torch.amp.GradScaler")
        if isinstance(getattr(vars(scaler).get("update"), "__self__", None), ScaleLog):
            raise NumericsError("ScaleLog: this scaler has an open ScaleLog; close that first")
        self._scaler = scaler
        self._steps = 0
        self._scales = _Values()  # one for each step
        # Whether an optimizer found infs, and at which steps, in the order of their first step.
        self._found: dict[torch.optim.Optimizer, tuple[list[int], _Values]] = {}
        self._stepped: list[torch.optim.Optimizer] = []  # since the last update
        self._open = True
        self._before = {name: vars(scaler).get(name) for name in ("step", "update")}
        self._step, self._update = scaler.step, scaler.update
        scaler.step, scaler.update = self._log_step, self._log_update

    def _log_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = self._step(optimizer, *args, **kwargs)
        if self._open:
            self._stepped.append(optimizer)
        return result

    def _log_update(self, *args: Any, **kwargs: Any) -> None:
        if not self._open:
            return self._update(*args, **kwargs)
        # What there is to log is gone after the update, but counts only if that succeeds.
        scale = getattr(self._scaler, "_scale", None)  # a scaler that is disabled has none
        scale = None if scale is None else scale.clone()
        found = {optimizer: self._found_inf(optimizer, scale) for optimizer in self._stepped}
        self._update(*args, **kwargs)
        if scale is not None:
            self._scales.append(scale)
        for optimizer, flag in found.items():
            steps, flags = self._found.setdefault(optimizer, ([], _Values()))
            if flag is not None:
                steps.append(self._steps)
                flags.append(flag)
        self._stepped.clear()
        self._steps += 1
        return None

    def _found_inf(self, optimizer: Any, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Above 0 if a gradient of the optimizer is not finite; None without gradient or scale."""
        if scale is None:
            return None
        flags = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        # `stack` copies them, since update adds the flags of all optimizers to the first of them.
        here = [flag.to(scale.device, non_blocking=True) for flag in flags]
        return torch.stack(here).sum() if here else None

    @property
    def scales(self) -> list[float]:
        """The scale in force at each step; the one to come after the last is not among them."""
        return self._scales.tolist() if self._scaler.is_enabled() else [1.0] * self._steps

    @property
    def skipped(self) -> list[int]:
        """Numbers of the steps, from 0, at which at least one optimizer's step was skipped."""
        return sorted({step for steps in self.skipped_by for step in steps})

    @property
    def skipped_by(self) -> list[list[int]]:
        """The same for each optimizer, in the order in which they first stepped."""
        pairs = [zip(steps, flags.tolist(), strict=True) for steps, flags in self._found.values()]
        return [[step for step, found in zipped if found] for zipped in pairs]

    def plot(self):
        """The scale at each step, with the skipped steps marked; `NumericsError` without steps."""
        from amp_lab import plots  # matplotlib only where a figure is drawn

        if not self._steps:
            raise NumericsError(
                "ScaleLog: no step was logged; call scaler.update() while it is open"
            )
        return plots.scale_over_time(self.scales, self.skipped)

    def close(self) -> None:
        """Stop logging and leave the scaler as it was; nothing happens the second time."""
        own = vars(self._scaler)
        for name, ours in (("step", self._log_step), ("update", self._log_update)):
            if not self._open or own.get(name) != ours:
                continue  # wrapped by someone else since; ours then only passes the call on
            del own[name]
            if self._before[name] is not None:
                own[name] = self._before[name]
        self._open = False

    def __enter__(self) -> "ScaleLog":
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        add_note(exc_val, "ScaleLog")
        self.close()

    def __repr__(self) -> str:
        scales = self.scales
        if not scales:
            return "ScaleLog: no steps yet"
        text = f"ScaleLog: {plural(len(scales), 'step')}, {len(self.skipped)} skipped"
        if not self._scaler.is_enabled():
            return f"{text}; the scaler is disabled"
        low = min(scales)
        text += f"; scale {scales[0]:g} at first, {scales[-1]:g} at the last, lowest {low:g}"
        if low < 1:
            text += f". {_BELOW_ONE.text}"
        return text


class _Values:
    """Numbers that stay on their device until they are read, in few pieces however many."""

    PIECE = 1024  # each single number takes 512 bytes of a GPU's memory

    def __init__(self):
        self._pieces: list[torch.Tensor] = []

    def append(self, value: torch.Tensor) -> None:
        self._pieces.append(value.reshape(1))
        if len(self._pieces) == self.PIECE:
            self._pieces = [torch.cat(self._pieces)]

    def tolist(self) -> list[float]:
        return torch.cat(self._pieces).tolist() if self._pieces else []
