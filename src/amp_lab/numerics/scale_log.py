"""The loss scale over time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_lab.core.errors import NumericsError
from amp_lab.core.remedies import remedy
from amp_lab.core.report import plural
from amp_lab.numerics.error_notes import add_note

_BELOW_ONE = remedy(
    "scale_log.below_one",
    "a step was skipped at a loss scale of 1 or less",
    "A step was skipped at a scale of 1 or less, so gradients are inf or NaN even without scaling. "
    "Use find_nonfinite to find the op",
    failure="AMP0002",
)


class ScaleLog:
    """Log the loss scale of each step of a `torch.amp.GradScaler`, and the steps that it skipped.

    A step is a call of ``scaler.update()``. Values stay on the device until you read them, so the
    log adds no waits for the device. The end of the block, or `close`, restores the scaler. You can
    still read the log afterwards. While the log is open, save only the `state_dict` of the scaler.
    If the scaler raises an error about fp16 gradients in the block, a note on the error explains
    the remedy.

    Args:
        scaler: The scaler. If it is disabled, every scale is 1.

    Raises:
        NumericsError: If `scaler` is not a GradScaler, or if another ScaleLog is open for it.

    Example:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        with ScaleLog(scaler) as log:
            for _ in range(3):
                scaler.scale(model(torch.ones(2, 4)).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        print(log.scales, log.skipped)
    """

    def __init__(self, scaler: torch.amp.GradScaler):
        if not isinstance(scaler, torch.amp.GradScaler):
            raise NumericsError(
                f"ScaleLog: the scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}"
            )
        # An open ScaleLog has put its own method in place of `update`; see the end of this method.
        method_of_scaler = vars(scaler).get("update")
        if isinstance(getattr(method_of_scaler, "__self__", None), ScaleLog):
            raise NumericsError(
                "ScaleLog: this scaler already has an open ScaleLog. Close that ScaleLog first."
            )
        self._scaler = scaler
        self._steps = 0
        self._scales = _Values()  # one for each step
        self._flags: dict[torch.optim.Optimizer, _Flags] = {}
        # The optimizers that called `scaler.step` since the last update.
        self._stepped: list[torch.optim.Optimizer] = []
        self._open = True
        # What `close` puts back: other code may have set these attributes of the scaler, too. None
        # if they are only methods of its class.
        self._attributes_before = {name: vars(scaler).get(name) for name in ("step", "update")}
        self._step = scaler.step
        self._update = scaler.update
        scaler.step = self._log_step
        scaler.update = self._log_update

    def _log_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Stands in for `GradScaler.step`: call it, and note that the optimizer stepped."""
        result = self._step(optimizer, *args, **kwargs)
        if self._open:
            self._stepped.append(optimizer)
        return result

    def _log_update(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for `GradScaler.update`: call it, and log the step that it ends."""
        if not self._open:
            return self._update(*args, **kwargs)
        # The scale and the flags are read before the update, which replaces the scale and deletes
        # the flags, and logged after it, if it succeeds.
        scale = getattr(self._scaler, "_scale", None)  # a scaler that is disabled has none
        if scale is not None:
            scale = scale.clone()
        found_inf = {optimizer: self._found_inf(optimizer, scale) for optimizer in self._stepped}
        self._update(*args, **kwargs)
        if scale is not None:
            self._scales.append(scale)
        for optimizer, flag in found_inf.items():
            optimizer_flags = self._flags.setdefault(optimizer, _Flags([], _Values()))
            if flag is not None:
                optimizer_flags.steps.append(self._steps)
                optimizer_flags.found_inf.append(flag)
        self._stepped.clear()
        self._steps += 1
        return None

    def _found_inf(self, optimizer: Any, scale: Tensor | None) -> Tensor | None:
        """A scalar that is above 0 if a gradient of the optimizer is not finite.

        It stays on the device of `scale`. None without gradients or scale.
        """
        if scale is None:
            return None
        state = self._scaler._per_optimizer_states[id(optimizer)]
        by_device = state["found_inf_per_device"]
        if not by_device:
            return None
        flags = [flag.to(scale.device, non_blocking=True) for flag in by_device.values()]
        # `stack` copies them, since update adds the flags of all optimizers to the first of them.
        return torch.stack(flags).sum()

    @property
    def scales(self) -> list[float]:
        """The loss scale of each step."""
        if not self._scaler.is_enabled():
            return [1.0] * self._steps
        return self._scales.tolist()

    @property
    def skipped(self) -> list[int]:
        """Numbers of the steps, from 0, in which the scaler skipped an optimizer's step."""
        return sorted(set().union(*self.skipped_by))

    @property
    def skipped_by(self) -> list[list[int]]:
        """The skipped steps of each optimizer, in the order of the optimizers' first steps."""
        skipped = []
        for flags in self._flags.values():
            steps_and_flags = zip(flags.steps, flags.found_inf.tolist(), strict=True)
            skipped.append([step for step, found_inf in steps_and_flags if found_inf])
        return skipped

    def plot(self):
        """Draw the scale of each step, mark the skipped steps, and return the matplotlib axes.

        Raises `NumericsError` if no step was logged.
        """
        from amp_lab import plots  # matplotlib only where a figure is drawn

        if not self._steps:
            raise NumericsError(
                "ScaleLog: no step was logged. Call scaler.update() while the ScaleLog is open."
            )
        return plots.scale_over_time(self.scales, self.skipped)

    def close(self) -> None:
        """Stop logging and restore the scaler. A second call does nothing."""
        if self._open:
            self._restore("step", self._log_step)
            self._restore("update", self._log_update)
        self._open = False

    def _restore(self, name: str, log_method: Callable) -> None:
        """Put back what the scaler had as its method `name`, in place of `log_method`."""
        attributes = vars(self._scaler)
        if attributes.get(name) != log_method:
            return  # other code wraps our method, which now only passes calls on
        del attributes[name]
        if self._attributes_before[name] is not None:
            attributes[name] = self._attributes_before[name]

    def __enter__(self) -> "ScaleLog":
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        add_note(exc_val, "ScaleLog")
        self.close()

    def __repr__(self) -> str:
        scales = self.scales
        if not scales:
            return "ScaleLog: no steps yet"
        skipped = self.skipped
        text = f"ScaleLog: {plural(len(scales), 'step')}, {len(skipped)} skipped"
        if not self._scaler.is_enabled():
            return f"{text}. The scaler is disabled"
        low = min(scales)
        text += f". Scale: first {scales[0]:g}, last {scales[-1]:g}, lowest {low:g}"
        if any(scales[step] <= 1 for step in skipped):
            text += f". {_BELOW_ONE.text}"
        return text


class _Flags(NamedTuple):
    """The steps of one optimizer, and for each of them whether it found an inf."""

    steps: list[int]  # their numbers, as in `skipped`
    found_inf: "_Values"  # a number above 0 means yes


class _Values:
    """Numbers that stay on their device until they are read, joined into few tensors."""

    PIECE = 1024  # tensors that are joined into one: each takes 512 bytes or more on a GPU

    def __init__(self):
        self._pieces: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        """Add a number, a tensor with one value."""
        self._pieces.append(value.reshape(1))
        if len(self._pieces) == self.PIECE:
            self._pieces = [torch.cat(self._pieces)]

    def tolist(self) -> list[float]:
        """All numbers, in the order in which they were added; on a GPU the host waits for them."""
        if not self._pieces:
            return []
        return torch.cat(self._pieces).tolist()
