"""Every figure of the notebooks, in one style that also reads in greyscale."""

from amp_lab.plots.loss_scale import (
    gradient_norm_in_step,
    loss_scales,
    scale_over_time,
    scales_by_setting,
)
from amp_lab.plots.memory import (
    bytes_per_parameter,
    memory_against_batch,
    memory_by_dtype,
    memory_per_rank,
    sent_bytes,
)
from amp_lab.plots.number_formats import (
    dtype_grid,
    dtype_track,
    dtypes_by_model,
    exponents_against_fp16,
    gradients_against_fp16,
    range_and_spacing,
    weight_over_updates,
)
from amp_lab.plots.pictures import augmentation_grid, class_pictures, picture_problem, side_by_side
from amp_lab.plots.speed import (
    best_speedups,
    flops_per_byte,
    growth,
    rate_over_size,
    roofline,
    speed_ladder,
    speedup_over_size,
    throughput_over_batch,
    time_and_memory,
    time_by_kind,
)
from amp_lab.plots.style import save, use_style
from amp_lab.plots.training import (
    loss_and_accuracy,
    loss_by_backend,
    loss_curves,
    losses_by_setting,
    save_training_curves,
    scores_by_seed,
    training_curves,
)

__all__ = [
    "augmentation_grid",
    "best_speedups",
    "bytes_per_parameter",
    "class_pictures",
    "dtype_grid",
    "dtype_track",
    "dtypes_by_model",
    "exponents_against_fp16",
    "flops_per_byte",
    "gradient_norm_in_step",
    "gradients_against_fp16",
    "growth",
    "loss_and_accuracy",
    "loss_by_backend",
    "loss_curves",
    "loss_scales",
    "losses_by_setting",
    "memory_against_batch",
    "memory_by_dtype",
    "memory_per_rank",
    "picture_problem",
    "range_and_spacing",
    "rate_over_size",
    "roofline",
    "save",
    "save_training_curves",
    "scale_over_time",
    "scales_by_setting",
    "scores_by_seed",
    "sent_bytes",
    "side_by_side",
    "speed_ladder",
    "speedup_over_size",
    "throughput_over_batch",
    "time_and_memory",
    "time_by_kind",
    "training_curves",
    "use_style",
    "weight_over_updates",
]
