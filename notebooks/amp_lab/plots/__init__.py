"""Every figure of the notebooks, in one style that also reads in greyscale.

The notebooks write ``from amp_lab import plots``, then ``plots.roofline(…)``. A figure's file is
named for its subject; colours, and the parts that figures are built from, are in `style`.
"""

# `import x as x` tells linters and type checkers that x is exported.
from amp_lab.plots.loss_scale import gradient_norm_in_step as gradient_norm_in_step
from amp_lab.plots.loss_scale import loss_scales as loss_scales
from amp_lab.plots.loss_scale import scale_over_time as scale_over_time
from amp_lab.plots.loss_scale import scales_by_setting as scales_by_setting
from amp_lab.plots.memory import bytes_per_parameter as bytes_per_parameter
from amp_lab.plots.memory import memory_against_batch as memory_against_batch
from amp_lab.plots.memory import memory_by_dtype as memory_by_dtype
from amp_lab.plots.memory import memory_per_rank as memory_per_rank
from amp_lab.plots.memory import sent_bytes as sent_bytes
from amp_lab.plots.number_formats import dtype_grid as dtype_grid
from amp_lab.plots.number_formats import dtype_track as dtype_track
from amp_lab.plots.number_formats import dtypes_by_model as dtypes_by_model
from amp_lab.plots.number_formats import exponents_against_fp16 as exponents_against_fp16
from amp_lab.plots.number_formats import gradients_against_fp16 as gradients_against_fp16
from amp_lab.plots.number_formats import range_and_spacing as range_and_spacing
from amp_lab.plots.number_formats import weight_over_updates as weight_over_updates
from amp_lab.plots.pictures import augmentation_grid as augmentation_grid
from amp_lab.plots.pictures import class_pictures as class_pictures
from amp_lab.plots.pictures import picture_problem as picture_problem
from amp_lab.plots.pictures import side_by_side as side_by_side
from amp_lab.plots.speed import best_speedups as best_speedups
from amp_lab.plots.speed import flops_per_byte as flops_per_byte
from amp_lab.plots.speed import growth as growth
from amp_lab.plots.speed import rate_over_size as rate_over_size
from amp_lab.plots.speed import roofline as roofline
from amp_lab.plots.speed import speed_ladder as speed_ladder
from amp_lab.plots.speed import speedup_over_size as speedup_over_size
from amp_lab.plots.speed import throughput_over_batch as throughput_over_batch
from amp_lab.plots.speed import time_and_memory as time_and_memory
from amp_lab.plots.speed import time_by_kind as time_by_kind
from amp_lab.plots.style import save as save
from amp_lab.plots.style import use_style as use_style
from amp_lab.plots.training import loss_and_accuracy as loss_and_accuracy
from amp_lab.plots.training import loss_by_backend as loss_by_backend
from amp_lab.plots.training import loss_curves as loss_curves
from amp_lab.plots.training import losses_by_setting as losses_by_setting
from amp_lab.plots.training import save_training_curves as save_training_curves
from amp_lab.plots.training import scores_by_seed as scores_by_seed
from amp_lab.plots.training import training_curves as training_curves
