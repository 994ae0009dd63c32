"""Advice for a training step that does not fit into memory, with the bytes that it saves."""

from collections.abc import Iterator, Mapping

from amp_lab.core.optimizers import OPTIMIZERS
from amp_lab.core.remedies import Remedy, remedy
from amp_lab.tracing.memory_by_batch import MemoryByBatch
from amp_lab.tracing.memory_result import MemoryForecast, MemoryTable, amount

_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_EIGHT_BIT_STATE = remedy(
    "memory.eight_bit_state",
    "a step with Adam does not fit",
    "Adam with 8-bit state (torchao.optim.AdamW8bit, --optimizer adamw-8bit) {saves}",
    failure="AMP0172",
)
_SHARD = remedy(
    "memory.shard",
    "a step does not fit on one device",
    "FSDP2 on {ranks} ranks (--fsdp-ranks {ranks}) {saves}",
)
_LOW_WEIGHTS = remedy(
    "memory.low_weights",
    "a step with fp32 weights does not fit",
    "A model in bf16, weights and state included (a function that returns model.bfloat16()), "
    "{saves}. Without stochastic rounding (notebook 16), small updates are then lost",
    failure="AMP0029",
)
_ADAPTERS = remedy(
    "memory.adapters",
    "a step that trains all weights does not fit",
    "LoRA, which trains small adapters on frozen weights, {saves}",
)
_CHECKPOINT = remedy(
    "memory.checkpoint",
    "activations take much of a step that does not fit",
    "torch.utils.checkpoint around each block (use_reentrant=False) saves only the inputs of the "
    "blocks, instead of {activations} of activations, and recomputes the rest",
    failure="AMP0045",
)


def ways_out(
    table: MemoryTable, by_batch: Mapping[str, MemoryByBatch], batch: int
) -> Iterator[str]:
    """Sentences on how to make a step smaller, if it does not fit in any precision of the table.

    `by_batch` has the memory as a function of the batch, by precision, where it could be computed;
    `batch` is the one of the table. Yields nothing if the step fits, or if no memory was given.
    """
    spare = table.spare
    if table.memory_bytes is None or max(spare.values()) >= 0:
        return
    # Each saving is counted from the forecast that is nearest to fitting.
    smallest = min(table.forecasts, key=lambda forecast: forecast.peak)
    limit = smallest.peak + spare[smallest.column]  # the usable memory in bytes
    # The name of the same optimizer with its state in 8 bits, if there is one.
    in_eight_bits = OPTIMIZERS[smallest.optimizer_name].in_eight_bits
    if in_eight_bits and smallest.column in by_batch:
        eight_bit = by_batch[smallest.column].forecast(batch, optimizer=in_eight_bits)
        if eight_bit.peak < smallest.peak:
            yield _with_saving(_EIGHT_BIT_STATE, smallest, eight_bit.peak, limit)
    if smallest.fsdp_ranks == 1:
        yield _advise_sharding(smallest, limit)
    if smallest.gradients:  # else no weight is trained
        # Autocast casts only weights that are in fp32.
        if any(forecast.cast_cache for forecast in table.forecasts):
            halved = _peak_with(smallest, weights=0.5, gradients=0.5, state=0.5)
            yield _with_saving(_LOW_WEIGHTS, smallest, halved, limit)
        frozen = _peak_with(smallest, gradients=0.0, state=0.0)
        yield _with_saving(_ADAPTERS, smallest, frozen, limit)
    if smallest.activations > smallest.peak // 4:  # they take much of the peak
        yield _CHECKPOINT.sentence(activations=amount(smallest.activations))


def _advise_sharding(forecast: MemoryForecast, limit: int) -> str:
    """Advise FSDP2 on as few of `_RANKS` as make the step fit; on the most if it never does."""
    peaks = {}  # bytes on each rank, by the number of ranks
    for count in _RANKS:
        peaks[count] = _peak_with(forecast, weights=1 / count, gradients=1 / count, state=1 / count)
    enough = [count for count in _RANKS if peaks[count] <= limit]
    ranks = enough[0] if enough else _RANKS[-1]
    return _with_saving(_SHARD, forecast, peaks[ranks], limit, ranks=ranks)


def _peak_with(
    forecast: MemoryForecast, *, weights: float = 1.0, gradients: float = 1.0, state: float = 1.0
) -> int:
    """The peak in bytes if weights, gradients and optimizer state were scaled by these factors.

    It is an upper bound: all other tensors are taken to stay as they are, and gradients count as
    smaller only where the forecast says how large they are.
    """
    # Weights and state are in memory all the time.
    saved_always = (1 - weights) * forecast.weights + (1 - state) * forecast.optimizer
    # Bytes of gradients when the most is in use in each phase. The forecast has them for the phase
    # of the peak and for the optimizer's step; elsewhere they count as 0.
    gradients_in = {"forward": 0, "backward": 0, "optimizer": forecast.gradients}
    gradients_in[forecast.peak_phase] = forecast.at_peak["gradients"]
    if forecast.peak_phase == "optimizer":  # its temporaries are of the size of the gradients
        gradients_in["optimizer"] += forecast.at_peak["temporaries"]
    peaks = []
    for phase, gradient_bytes in gradients_in.items():
        saved_gradients = (1 - gradients) * gradient_bytes
        peaks.append(forecast.phases[phase] - saved_always - saved_gradients)
    return int(max(peaks))


def _with_saving(
    advice: Remedy, forecast: MemoryForecast, peak: int, limit: int, **facts: object
) -> str:
    """The sentence of a remedy, with the bytes that it saves and whether the step then fits.

    `peak` is the peak in bytes with the remedy, and `limit` the usable memory in bytes. `facts` are
    further values to fill into the text.
    """
    saves = f"saves about {amount(forecast.peak - peak)}"
    if peak <= limit:
        saves += ", and the step then fits"
    else:
        saves += f", but {amount(peak - limit)} are still missing"
    return advice.sentence(saves=saves, **facts)
