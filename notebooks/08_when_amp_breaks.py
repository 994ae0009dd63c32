# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Find out why AMP broke, and repair it
#
# **What you'll do.** Start from what you see: an error message, a warning, a NaN, or a run that is
# no faster than before. Find it in one of the three tables and follow the link. Most sections
# reproduce the failure in a few lines, and all of them explain and repair it.
#
# **What you'll learn.**
# - to recognise 46 failures that people really meet, and to reproduce most of them in a few lines;
# - why each happens, so that you recognise its relatives too;
# - how to repair each of them, and how to notice it before it costs you a night.
#
# **What you need.** You need no GPU, and if you came with a message, nothing else either. This page
# is for looking things up. To read it from beginning to end, start with
# [notebook 02](02_autocast_dtypes.ipynb) and [notebook 03](03_grad_scaler_step_by_step.ipynb).
#
# ## Look up what you see
#
# **A message.** Search this page for yours (Ctrl+F), or find it in the table. Your message may have
# the dtypes the other way round, or say `BFloat16` where this page has `Half`. Of the messages that
# lead to a section, the code there produces all but those marked *quoted*, on the CPU or on tensors
# without data. The quoted ones need a GPU, another package or the older FSDP, and are from a source
# or from a user's report. The message of section 25 is from older versions. In section 36 we make
# PyTorch believe that the card is an old one. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# | message | section |
# |---|---|
# | `value cannot be converted to type c10::Half without overflow` | [section&nbsp;4](#4-A-mask-value-does-not-fit-into-fp16) |
# | `Function 'MulBackward0' returned nan values in its 0th output.` | [section&nbsp;8](#8-Anomaly-detection-stops-at-a-harmless-overflow) |
# | `Attempting to unscale FP16 gradients.` | [section&nbsp;9](#9-The-parameters-are-fp16) |
# | `unscale_() has already been called on this optimizer since the last update().` | [section&nbsp;10](#10-Gradients-are-unscaled-twice) |
# | `"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'` | [section&nbsp;9](#9-The-parameters-are-fp16), quoted |
# | `No inf checks were recorded for this optimizer.` | [section&nbsp;11](#11-An-optimizer-has-no-gradients) |
# | `step() has already been called since the last update().` | [section&nbsp;12](#12-Scaler-methods-are-called-in-the-wrong-order) |
# | `unscale_() is being called after step().` | [section&nbsp;12](#12-Scaler-methods-are-called-in-the-wrong-order) |
# | `No inf checks were recorded prior to update.` | [section&nbsp;12](#12-Scaler-methods-are-called-in-the-wrong-order) |
# | `Attempted unscale_ but _scale is None.` | [section&nbsp;12](#12-Scaler-methods-are-called-in-the-wrong-order) |
# | `Attempted step but _scale is None.` | [section&nbsp;12](#12-Scaler-methods-are-called-in-the-wrong-order) |
# | `Closure use is not currently supported if GradScaler is enabled.` | [section&nbsp;13](#13-The-optimizer-needs-a-closure) |
# | ``Detected call of `lr_scheduler.step()` before `optimizer.step()`.`` | [section&nbsp;14](#14-The-scheduler-warns-that-it-came-before-the-optimizer) |
# | ``The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.`` | [section&nbsp;16](#16-Clipping-refuses-a-norm-that-is-not-finite) |
# | `The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.` | [section&nbsp;17](#17-The-state-of-the-scaler-cannot-be-loaded) |
# | `mat1 and mat2 must have the same dtype, but got Half and Float` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `expected m1 and m2 to have the same dtype, but got: c10::Half != float` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `expected scalar type Float but found Half` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `Input type (c10::Half) and bias type (float) should be the same` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block), quoted |
# | `RNN input dtype (torch.float16) does not match weight dtype (torch.float32).` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `mixed dtype (CPU): expect parameter to have scalar type of Float` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `Found dtype Float but expected Half` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | ``expected dtype c10::Half for `end` but got dtype float`` | [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.` | [section&nbsp;19](#19-Writing-into-a-buffer-fails) |
# | `index_add_(): self (Float) and source (Half) must have the same scalar type` | [section&nbsp;19](#19-Writing-into-a-buffer-fails) |
# | `masked_scatter: expected self and source to have same dtypes but got` | [section&nbsp;19](#19-Writing-into-a-buffer-fails) |
# | `scatter(): Expected self.dtype to be equal to src.dtype` | [section&nbsp;19](#19-Writing-into-a-buffer-fails) |
# | `encountered during backward but not found in storage` | [notebook 07](07_training_recipes.ipynb#Checkpoint-activations); [section&nbsp;21](#21-Two-dtypes-are-nested-around-one-weight) says why |
# | `expected scalar type Half but found Float` | [section&nbsp;20](#20-A-function-of-your-own-fails-in-backward) |
# | the same in the forward pass, often of a model in fp16 | an input or a table in fp32: [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | `mat1 and mat2 must have the same dtype, but got BFloat16 and Half` | [section&nbsp;21](#21-Two-dtypes-are-nested-around-one-weight) |
# | `Unexpected floating ScalarType in at::autocast::prioritize` | [section&nbsp;21](#21-Two-dtypes-are-nested-around-one-weight) |
# | `torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.` | [section&nbsp;22](#22-BCELoss-is-refused-on-a-GPU) |
# | `quantile() input tensor must be either float or double dtype` | [section&nbsp;23](#23-An-op-does-not-exist-in-half-precision) |
# | `linalg.inv: Low precision dtypes not supported. Got Half` | [section&nbsp;23](#23-An-op-does-not-exist-in-half-precision) |
# | `"lu_cpu" not implemented for 'Half'` | [section&nbsp;23](#23-An-op-does-not-exist-in-half-precision) |
# | `"addmm_sparse_cuda" not implemented for 'Half'`, and `.float()` does not help | autocast casts it again, as it does for a sparse matrix: [section&nbsp;23](#23-An-op-does-not-exist-in-half-precision) |
# | `Got unsupported ScalarType BFloat16` | [section&nbsp;24](#24-NumPy-does-not-know-bf16) |
# | `element 0 of tensors does not require grad and does not have a grad_fn` | [section&nbsp;25](#25-Weights-get-no-gradient-after-an-evaluation-pass) |
# | `CUDA is not available or torch_xla is imported. Disabling autocast.` | [section&nbsp;31](#31-Autocast-or-the-scaler-is-switched-off) |
# | `torch.cuda.amp.GradScaler is enabled, but CUDA is not available.` | [section&nbsp;31](#31-Autocast-or-the-scaler-is-switched-off) |
# | `In CPU autocast, but the target dtype is not supported. Disabling autocast.` | [section&nbsp;31](#31-Autocast-or-the-scaler-is-switched-off) |
# | `` `torch.cuda.amp.autocast(args...)` is deprecated. `` | [section&nbsp;35](#35-Old-names-warn) |
# | `` `torch.cuda.amp.GradScaler(args...)` is deprecated. `` | [section&nbsp;35](#35-Old-names-warn) |
# | `` `torch.cuda.amp.custom_fwd(args...)` is deprecated. `` | [section&nbsp;35](#35-Old-names-warn) |
# | `ImportError: cannot import name 'amp' from 'apex'` | [section&nbsp;35](#35-Old-names-warn), quoted |
# | `Current CUDA Device does not support bfloat16. Please switch dtype to float16.` | [section&nbsp;36](#36-Autocast-refuses-the-device-or-its-dtype) |
# | `CUBLAS_STATUS_NOT_SUPPORTED` | [section&nbsp;36](#36-Autocast-refuses-the-device-or-its-dtype), quoted |
# | `User specified an unsupported autocast device_type` | [section&nbsp;36](#36-Autocast-refuses-the-device-or-its-dtype) |
# | `unsupported scalarType` | [section&nbsp;36](#36-Autocast-refuses-the-device-or-its-dtype) |
# | `you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.` | [section&nbsp;37](#37-TF32-is-set-in-the-old-and-in-the-new-way) |
# | `cuFFT only supports dimensions whose sizes are powers of two when computing in half precision` | [section&nbsp;38](#38-An-FFT-is-refused-in-half-precision), quoted |
# | `Unsupported dtype Half` | [section&nbsp;38](#38-An-FFT-is-refused-in-half-precision) |
# | `MKL FFT doesn't support tensors of type: Half`; an op that has no kernel for `ComplexHalf` | a spectrum in a model that was cast by `.half()`: its window and filters were cast too. [section&nbsp;38](#38-An-FFT-is-refused-in-half-precision) |
# | `Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.` | [section&nbsp;39](#39-MPS-has-no-float64), quoted |
# | `SyncBatchNorm layers only work with GPU modules` | [section&nbsp;40](#40-DDP-refuses-the-model-or-its-step) |
# | `Expected to have finished reduction in the prior iteration before starting a new one.` | [section&nbsp;40](#40-DDP-refuses-the-model-or-its-step) |
# | `FSDP expects uniform original parameter dtype but got` | [section&nbsp;40](#40-DDP-refuses-the-model-or-its-step) |
# | `Must flatten tensors with uniform dtype but got` | [section&nbsp;40](#40-DDP-refuses-the-model-or-its-step), quoted |
# | `Attempted to inline function marked as skipped` | [section&nbsp;41](#41-The-scaler-is-inside-a-compiled-function) |
# | `could not create a primitive descriptor for the LSTM forward propagation primitive` | [section&nbsp;42](#42-An-LSTM-fails-under-autocast-on-the-CPU) |
# | `FlashAttention only support fp16 and bf16 data type` | [section&nbsp;43](#43-Flash-attention-refuses-fp32), quoted |
# | `Expected self.size(1) to be divisible by 16, but got self.size(1)=` | [section&nbsp;44](#44-A-size-is-not-a-multiple-of-16-or-8) |
# | `Expected both dimensions of mat2 to be divisible by 16` | [section&nbsp;44](#44-A-size-is-not-a-multiple-of-16-or-8) |
# | `Expected trailing dimension of mat1 to be divisible by 16` | [section&nbsp;44](#44-A-size-is-not-a-multiple-of-16-or-8), quoted |
# | `full(): argument 'fill_value' (position 2) must be Number, not str` | [section&nbsp;35](#35-Old-names-warn) |
# | `torch.OutOfMemoryError: CUDA out of memory.` | [section&nbsp;45](#45-CUDA-is-out-of-memory), quoted |
# | `Type parameter (T) of Optype (LayerNormalization) bound to different types` | ONNX Runtime refuses the file: in an fp16 model the older exporter (`dynamo=False`) may [leave float32 before the norm](https://github.com/pytorch/pytorch/issues/190338), as where attention has a boolean mask. Export with `dynamo=True`, and outside of autocast: [notebook 18](18_inference_and_export.ipynb#Export) <!-- tests/notebooks/test_18_inference_and_export.py --> |
# | `Type 'tensor(float16)' of input parameter … of operator (Range) in node … is invalid` | ONNX Runtime refuses an `arange` in fp16 that the older exporter (`dynamo=False`) wrote. Export with `dynamo=True`: [notebook 18](18_inference_and_export.ipynb#Export) <!-- tests/notebooks/test_18_inference_and_export.py --> |
#
# **Other packages.** Most of these messages are quoted from reports of users.
#
# | message | what it means |
# |---|---|
# | `invalid value encountered in cast`, and the image is black; `NaN detected in latents` | the image or the latents are NaN. In a diffusion model the decoder (VAE) may be the cause: the values in SDXL's are [too large for fp16](https://huggingface.co/madebyollin/sdxl-vae-fp16-fix). Run it alone, with its input, in fp32 or bf16 ([a report](https://github.com/huanngzh/ComfyUI-MVAdapter/issues/14)), to encode as well. Inside of an autocast block fp32 weights (`--no_half_vae`) are not enough ([a report](https://github.com/kohya-ss/sd-scripts/pull/2322)): switch autocast off there. [Section&nbsp;1](#1-The-loss-is-NaN-because-an-activation-exceeds-65504) |
# | `probability tensor contains either inf, nan or element < 0`; `satisfy the constraint Simplex()` | sampling is only the first to check: the logits are NaN ([a report](https://github.com/QwenLM/Qwen-VL/issues/364)). Load a model that was [trained in bf16](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) in bf16, or see [section&nbsp;4](#4-A-mask-value-does-not-fit-into-fp16) |
# | `"LayerNormKernelImpl" not implemented for 'Half'`, `"addmm_impl_cpu_"`, `"slow_conv2d_cpu"` | a whole model in fp16 on a CPU, in an older torch, often because no GPU was found ([a report](https://github.com/facebookresearch/seamless_communication/issues/47)): load it in fp32 or bf16, or update torch |
# | `fp16 mixed precision requires a GPU`; `Your setup doesn't support bf16/gpu.` | torch sees no GPU, as where it was built without CUDA ([a report](https://github.com/bmaltais/kohya_ss/issues/639)), or, for `bf16/gpu` in older versions, the card has no bf16 ([a report](https://github.com/lm-sys/FastChat/issues/399)). `amp-lab doctor` names the device. [Section&nbsp;31](#31-Autocast-or-the-scaler-is-switched-off) |
# | `Bfloat16 is only supported on GPUs with compute capability of at least 8.0.` | vLLM, on a card before Ampere: `--dtype half` ([a report](https://github.com/vllm-project/vllm/issues/1157)). [Section&nbsp;36](#36-Autocast-refuses-the-device-or-its-dtype) |
# | `BFloat16 is not supported on MPS` | update torch, and macOS [to 14](https://github.com/pytorch/pytorch/pull/119641), or take fp16 ([a report](https://github.com/QwenLM/Qwen/issues/497)): [notebook 19](19_choose_your_precision.ipynb) |
# | `Current loss scale already at minimum - cannot decrease scale anymore.` | DeepSpeed ([a report](https://github.com/deepspeedai/DeepSpeed/issues/5426)): see [section&nbsp;2](#2-The-loss-scale-falls-towards-0). In bf16 [it does not occur](https://github.com/microsoft/LMOps/issues/280) |
# | `Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to`, then `ZeroDivisionError` | Apex, whose scale has fallen to 0 ([a report](https://github.com/facebookresearch/WSL-Images/issues/9)): [section&nbsp;2](#2-The-loss-scale-falls-towards-0) |
# | `No operator found for memory_efficient_attention_forward` | xFormers gives a reason for each of its kernels: look for `dtype=` and for `bf16 is only supported on A100+` ([a report](https://github.com/facebookresearch/xformers/issues/1143)). Cast q, k and v to one 16-bit dtype that the card has. [Section&nbsp;43](#43-Flash-attention-refuses-fp32) |
# | `The input hidden states seems to be silently casted in float32` | transformers casts back by itself. Norms or embeddings are in fp32, as PEFT leaves them ([a report](https://github.com/huggingface/transformers/issues/30019)). [Section&nbsp;43](#43-Flash-attention-refuses-fp32) |
# | `does not allow for gradient clipping because it performs unscaling of gradients internally` | Lightning refuses to clip with a fused optimizer, in 2.5 [in bf16 too](https://github.com/Lightning-AI/pytorch-lightning/issues/21435): make the optimizer with `fused=False` |
# | `Unexpected input data type. Actual: (tensor(float)) , expected: (tensor(float16))` | the ONNX file wants fp16 at its inputs ([a report](https://github.com/ultralytics/ultralytics/issues/20091)): `x.astype(np.float16)`, or export a module that casts inside |
# | `Running layernorm after self-attention in FP16 may cause overflow` | TensorRT ([a report](https://github.com/NVIDIA/TensorRT/issues/2781)): export with opset 17 or later, or let the norms stay in fp32 |
# | `AMP checks failed`, or NaN on a GTX 16 or a Quadro T in code that runs elsewhere | take fp32 there (`amp=False` in YOLO, [a report](https://github.com/ultralytics/ultralytics/pull/17977)): [notebook 19](19_choose_your_precision.ipynb) |
# | `input should have the same type as rois`, `Expected delta.scalar_type() == input_type` | a kernel of another package, for which autocast does not cast ([a report](https://github.com/state-spaces/mamba/issues/72)): cast what you give it. [Section&nbsp;20](#20-A-function-of-your-own-fails-in-backward) |
# | `make_graphed_callables does not support the autocast caching.` | open the block with `cache_enabled=False` ([a report](https://github.com/pytorch/pytorch/issues/71631)). [Section&nbsp;27](#27-A-compiled-model-has-other-gradients) |
# | `Recomputed values for the following tensors have different metadata than during the forward pass.` | if `dtype` differs, the checkpointed part keeps something that was in another dtype the second time, such as a table that `forward` casts and stores ([a report](https://github.com/pytorch/pytorch/issues/141896)): cast it where it is used. [Notebook 07](07_training_recipes.ipynb#Checkpoint-activations) |
# | `Expected attn_mask dtype to be bool or float or to match query dtype` | the mask belongs to it too: give a boolean one, or cast it to the dtype of q. [Notebook 17](17_language_model.ipynb#One-dtype-for-q,-k-and-v) <!-- tests/notebooks/test_17_language_model.py --> |
# | `torch.jit.trace` fails, or gives another dtype, inside an autocast block | trace under `cache_enabled=False`, and run the result outside ([a report](https://github.com/pytorch/pytorch/pull/63552)), or cast first and take `torch.export`: [notebook 18](18_inference_and_export.ipynb#Export) |
# | `scale … has inconsistent type tensor(float)`, of a `BatchNormalization` | exported inside of a block, it gets an input in fp16 and weights in fp32, which [ONNX takes from opset 15 on](https://onnx.ai/onnx/operators/onnx__BatchNormalization.html): `opset_version=15` or later, or export outside of the block |
# | `ScalarType ComplexDouble` in an export in bf16 | the older exporter multiplies bf16 by an fp32 number without dimensions wrongly ([a report](https://github.com/pytorch/pytorch/issues/158658)): `dynamo=True`, or `x * self.p.to(x.dtype)` <!-- tests/notebooks/test_18_inference_and_export.py --> |
# | `self and mat2 must have the same dtype`, with weights in FP8 or int8 | a weight times its scale in fp32 is fp32 ([a report](https://github.com/kohya-ss/musubi-tuner/issues/1076)): cast the product to `x.dtype`. Autocast hides it in training |
# | `got BFloat16 for the destination and Float for the source`, with quantized weights and no autocast | the layer has a dtype of its own, which `model.to(torch.bfloat16)` does not change ([a report](https://github.com/meta-pytorch/torchtune/issues/1349)). [Section&nbsp;19](#19-Writing-into-a-buffer-fails) |
# | `cost matrix is infeasible`, `matrix contains invalid numeric entries` | SciPy got inf or NaN, such as the costs of a Hungarian matcher that are summed over all pixels ([a report](https://github.com/huggingface/transformers/issues/25938)): [section&nbsp;6](#6-A-norm-written-by-hand-overflows-above-256); or of a logarithm whose epsilon is zero in fp16 ([another](https://github.com/huggingface/transformers/pull/47016)): [section&nbsp;5](#5-NaN-because-an-epsilon-of-1e-8-is-zero-in-fp16) |
# | FP8 with a scale for each row gives NaN with LoRA | in torchao a row of zeros, as LoRA's B is at first, has the scale 0 ([a report](https://github.com/pytorch/ao/issues/3356)): set `activation_value_lb=1e-12` |
#
# **No message.** If nothing was raised, look for what is wrong with the result.
#
# | symptom | section |
# |---|---|
# | the loss is NaN, in the first step or later | [section&nbsp;1](#1-The-loss-is-NaN-because-an-activation-exceeds-65504), [section&nbsp;5](#5-NaN-because-an-epsilon-of-1e-8-is-zero-in-fp16), [section&nbsp;4](#4-A-mask-value-does-not-fit-into-fp16); if the loop has a scaler, [`amp-lab migrate`](../docs/migrate.md) finds some mistakes, such as an `optimizer.step()` that bypasses the scaler |
# | the loss is NaN or jumps after resuming from a checkpoint | [section&nbsp;46](#46-After-resuming-the-loss-jumps-or-is-NaN) |
# | a resumed run deviates from one without a break, or its optimizer counts wrong steps | [section&nbsp;46](#46-After-resuming-the-loss-jumps-or-is-NaN) |
# | NaN, or a wrong result, only after another call was made, such as `add_noise` of a scheduler | it stored its table in 16 bits: [section&nbsp;30](#30-Positions-or-counts-are-wrong-beyond-256) |
# | the loss scale keeps falling, or every step is skipped | [section&nbsp;2](#2-The-loss-scale-falls-towards-0) |
# | the loss scale grows and grows | [section&nbsp;28](#28-The-scaler-runs-with-bf16-or-the-dtype-is-not-the-one-you-meant) |
# | the loss does not fall, or stops falling | [section&nbsp;3](#3-A-layer-does-not-learn-because-its-gradients-underflow), [section&nbsp;15](#15-Clipping-leaves-next-to-nothing-of-the-gradients), [section&nbsp;26](#26-The-loss-stands-still-because-the-whole-loop-is-in-one-block), [section&nbsp;29](#29-Half-precision-weights-stop-moving); [`amp-lab migrate`](../docs/migrate.md) finds clipping of scaled gradients |
# | the weights do not change in some steps | often the scaler [skipped them](03_grad_scaler_step_by_step.ipynb#An-overflow:-the-step-is-skipped,-the-scale-halves), as it should; if it goes on, [section&nbsp;2](#2-The-loss-scale-falls-towards-0) |
# | SAM, or another optimizer with two passes, gives NaN in fp16 | [section&nbsp;13](#13-The-optimizer-needs-a-closure) |
# | some gradients are zero | [section&nbsp;3](#3-A-layer-does-not-learn-because-its-gradients-underflow), [section&nbsp;6](#6-A-norm-written-by-hand-overflows-above-256) |
# | some gradients are `None` | [section&nbsp;11](#11-An-optimizer-has-no-gradients), [section&nbsp;25](#25-Weights-get-no-gradient-after-an-evaluation-pass) |
# | the output of a layer is all zeros | [section&nbsp;6](#6-A-norm-written-by-hand-overflows-above-256) |
# | training works, but evaluation gives NaN | [section&nbsp;7](#7-Training-is-fine-but-evaluation-is-NaN) |
# | gradients of a convolution are NaN or 1e20 in bf16, on a CPU | [your hardware](../docs/hardware.md#cpus) |
# | parameters are NaN after one step of Adam | [section&nbsp;29](#29-Half-precision-weights-stop-moving) |
# | results are good on short inputs and bad on long ones, or many positions give the same embedding | [section&nbsp;30](#30-Positions-or-counts-are-wrong-beyond-256) |
# | an index is out of range, or two timesteps are the same | [section&nbsp;30](#30-Positions-or-counts-are-wrong-beyond-256) |
# | the same box is detected twice: NMS leaves duplicates | [section&nbsp;30](#30-Positions-or-counts-are-wrong-beyond-256) |
# | a mask or a grid has a row or a column too many on a large image, in fp16 beyond 2048 | [section&nbsp;30](#30-Positions-or-counts-are-wrong-beyond-256) |
# | short inputs work, until the first longer one raises; then all raise | a table that was made anew in fp32: [section&nbsp;18](#18-A-half-precision-output-leaves-the-block) |
# | a KL divergence, or a ratio of probabilities, is noisy in bf16 | [notebook 09](09_xray_your_model.ipynb#The-surprise-in-cross-entropy): cast the logits, not the log-probabilities <!-- tests/notebooks/test_08_when_amp_breaks.py --> |
# | logged gradients are 65536 times too large, or jump by a factor of 2 | [section&nbsp;15](#15-Clipping-leaves-next-to-nothing-of-the-gradients) |
# | a Dice or IoU loss is NaN | [section&nbsp;6](#6-A-norm-written-by-hand-overflows-above-256) |
# | gradients are infinite with several ranks only | the *sum* over the ranks exceeds 65504 in fp16: divide before the `all_reduce`, as [PyTorch's hook](https://github.com/pytorch/pytorch/blob/main/torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py) does, or send bf16 |
# | a resumed run takes twice the memory, in 16-bit weights | loading copies *into* the model and keeps its dtype ([a report](https://github.com/pytorch/pytorch/issues/138253)): build it in 16 bits again before you load, and then make the optimizer |
# | a loop of `p = p.float()` over the parameters changes nothing | it only gives `p` another value: call `model.float()`, before the optimizer is made and before `fully_shard` <!-- tests/notebooks/test_08_when_amp_breaks.py --> |
# | the loaded model is worse than the one that was saved | [section&nbsp;46](#46-After-resuming-the-loss-jumps-or-is-NaN) |
# | the logged loss moves in steps, stands still or falls to 0 in bf16, and `loss.item()` is right | the sum of losses is in bf16: [section&nbsp;30](#30-Positions-or-counts-are-wrong-beyond-256) |
# | the logged loss is off by a factor of 2 at times | [section&nbsp;12](#12-Scaler-methods-are-called-in-the-wrong-order) |
# | weight decay, or an average of weights (EMA), does nothing in bf16 | [section&nbsp;29](#29-Half-precision-weights-stop-moving) |
# | weights of norms stay exactly 1.0, though the loss falls | [section&nbsp;29](#29-Half-precision-weights-stop-moving) |
# | gradients of a checkpointed block are less exact, or overflow, and the loss is the same | [section&nbsp;20](#20-A-function-of-your-own-fails-in-backward) |
# | a model from accelerate or Fabric returns fp32 | [notebook 19](19_choose_your_precision.ipynb#What-other-frameworks-call-it) |
# | `torch.compile` changes the gradients | [section&nbsp;27](#27-A-compiled-model-has-other-gradients) |
# | `torch.compile` changes the results a little | in 16 bits it usually rounds less often: [notebook 18](18_inference_and_export.ipynb#What-torch.compile-changes) |
# | a compiled model is no faster | [notebook 10](10_speed_ladder.ipynb) |
# | fp32 results differ between two GPUs | [section&nbsp;37](#37-TF32-is-set-in-the-old-and-in-the-new-way) |
# | the ranks of a distributed run drift apart, have other gradient norms, or skip different steps | [section&nbsp;40](#40-DDP-refuses-the-model-or-its-step), [notebook 11](11_scale_out.ipynb) |
# | attention refuses q, k and v: `Expected query, key, and value to have the same dtype` | [notebook 17](17_language_model.ipynb#One-dtype-for-q,-k-and-v) |
# | another text or decision comes out in bf16, or in another batch | [notebook 17](17_language_model.ipynb#The-same-prompt,-another-text), [notebook 18](18_inference_and_export.ipynb#Which-decisions-change?) |
# | an exported model computes in another dtype than expected | [notebook 18](18_inference_and_export.ipynb#Export) |
# | a model that was trained in bf16 gives NaN in fp16 | [notebook 19](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) |
# | a model in Keras gives NaN, or is no faster | [notebook 12](12_keras.ipynb) |
# | a profile of a server or a sampler is full of casts and copies | [section&nbsp;33](#33-Autocast-makes-the-model-no-faster) |
# | a step is no faster than before, or even slower | [section&nbsp;31](#31-Autocast-or-the-scaler-is-switched-off), [section&nbsp;32](#32-A-thread-runs-without-autocast-or-in-another-dtype), [section&nbsp;33](#33-Autocast-makes-the-model-no-faster), [section&nbsp;44](#44-A-size-is-not-a-multiple-of-16-or-8) |
# | training uses as much memory as before, or more | [section&nbsp;31](#31-Autocast-or-the-scaler-is-switched-off), [section&nbsp;34](#34-The-memory-is-not-halved) |
# | inference uses more memory with autocast than without, or memory grows under `no_grad` | [section&nbsp;34](#34-The-memory-is-not-halved) |
#
# ## Set up
#
# Nearly all failing programs run on the CPU even if you have a GPU. <!-- tests/migrate/test_mistakes.py, tests/notebooks/test_08_when_amp_breaks.py -->
# Some CPUs are slow in fp16 ([an example](../docs/hardware.md)), so what is fp16 here is tiny. If a
# failure belongs to the GPU, its section says so.

# %% tags=["nbval-ignore-output"]
import inspect
import math
import re
import threading
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from course import figures, start

from amp_lab import DeviceError, Precision, compare, forecast_memory, largest_batch
from amp_lab.numerics import ScaleLog, find_nonfinite, gradient_underflow

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice
figures.use_style()

# %% [markdown]
# Section 40 needs these imports:

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# %% [markdown]
# Two helpers return messages as text, so that they can be printed and checked: one for a call that
# must fail, one for a call that may warn.


# %%
def message_of(call):
    """The message of the error that `call()` must raise."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("this was expected to fail")


def warnings_of(call):
    """The messages of all warnings that `call()` gives, one after the other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(warning.message) for warning in caught)


# %% [markdown]
# The next helper applies the rules of CUDA's autocast without a GPU, to fake tensors, which have a
# device and a dtype but no data ([notebook 02](02_autocast_dtypes.ipynb) explains it).


# %%
@contextmanager
def cuda_rules(dtype=torch.float16):
    """Inside: fake tensors only, and the policy of CUDA's autocast. Needs no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# %% [markdown]
# The last helper makes a model with its optimizer, the same for the same layers.


# %%
def make(*layers, lr=0.1):
    """A model of `layers` (by default one linear layer), its weights drawn anew, and its SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or [nn.Linear(2, 2)]))
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


# %% [markdown]
# ## The idea in five lines
#
# Before you run this: what does PyTorch say when an fp16 tensor meets a layer with fp32 weights?

# %%
model, _ = make()
x = torch.tensor([[1.0, 2.0]])  # (1, 2), the input of most programs below
message = message_of(lambda: model(x.half()))
print(message)
assert "mat1 and mat2 must have the same dtype, but got Half and Float" in message

# %% [markdown]
# You might meet this message yourself. A search for it on this page leads to section 18. Most
# sections are made like this demo: a tiny program fails, and we explain and repair it.
#
# ## Numbers leave the range of fp16
#
# The largest finite number in fp16 is 65504, and the smallest above zero is 6e-8 ([notebook
# 01](01_number_formats.ipynb)). In most sections of this part, values cross one of these limits.
# In bf16 those values stay finite and do not become zero. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %% [markdown]
# ### 1 The loss is NaN because an activation exceeds 65504
#
# **What you see.** The loss is `nan`. In fp32 all is well.
#
# **The smallest program that does it.** We take a layer with large weights, normalise its output,
# and compute a loss. The same function computes it in fp32, fp16 and bf16.


# %%
def loss_in(dtype, model):
    """The loss of `model` under autocast to `dtype`; fp32 means no autocast."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        return F.mse_loss(model(10 * x), torch.ones(1, 2))


model, _ = make(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
with torch.no_grad():
    model[0].weight.copy_(torch.tensor([[5000.0, 5000.0], [500.0, 500.0]]))
for dtype in (torch.float32, torch.float16):
    print(f"{dtype}: loss {loss_in(dtype, model).item():.2f}")
assert loss_in(torch.float16, model).isnan()

# %% [markdown]
# **Why.** The first layer gives 150,000 (30 times 5000), which is infinite in fp16. The mean that
# the normalisation takes is then infinite too, and infinity minus infinity is NaN. Activations of
# large trained transformers can get that large; [those of
# T5](https://github.com/huggingface/transformers/issues/5651) are a well-known case.
#
# **The fix.** Use bf16, which has nearly the range of fp32. Or make an fp32 *island* of the part that
# overflows: switch autocast off there, and cast the inputs by hand. Both are needed. Weights in fp32
# are not enough, since autocast casts them: the model above has no others.
#
# An island returns fp32, and the next matmul under autocast casts that to fp16 again. So it has to
# go on until the values are small, here up to the norm. It also has to begin before the overflow: in
# T5 1.1 that was found [before the last
# layer](https://github.com/huggingface/transformers/issues/9295) of a feed-forward block.
#
# `Island` puts a module around the layer: the layer's weight is then `island.module.weight`, also in
# the `state_dict`, and code that reads `layer.weight` breaks. Where there is such code, make the
# island a subclass of the layer, with the same two lines around
# `super().forward`. <!-- tests/notebooks/test_08_when_amp_breaks.py -->


# %%
class Island(nn.Module):
    """Runs a module in fp32, whatever autocast says outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.module(x.float())


exact = loss_in(torch.float32, model)
repaired = nn.Sequential(Island(model[0]), *model[1:])
torch.testing.assert_close(loss_in(torch.bfloat16, model), exact, rtol=0.05, atol=0)  # 8 bits
torch.testing.assert_close(loss_in(torch.float16, repaired), exact, rtol=0.01, atol=0)  # 11 bits
assert "0.module.weight" in repaired.state_dict()
assert not hasattr(repaired[0], "weight")
unnormed = nn.Sequential(model[0], model[2])  # the values are still large between the two
assert not loss_in(torch.float16, nn.Sequential(Island(unnormed[0]), unnormed[1])).isfinite()
assert loss_in(torch.float16, Island(unnormed)).isfinite()

# %% [markdown]
# **Notice it earlier.** `find_nonfinite` watches a step and names the place, here `addmm` in the
# first layer. Without it, switch off the scaler and then autocast, one at a time. If the NaN is
# gone without autocast, low precision is the likely cause. Try bf16 next. If that helps, it was
# probably the range of fp16. A NaN in bf16 can come from its spacing: two numbers that differ in
# fp32 round to the same one, and something is divided by their difference, as in `stretch`.


# %%
def stretch(h):
    """Numbers with their mean subtracted, divided by the largest of what is left."""
    centred = h - h.mean()
    return centred / centred.abs().max()


with find_nonfinite(model) as finder:
    loss_in(torch.float16, model).backward()
print(f"made by {finder.report.op} in module {finder.report.where}: {finder.report.value}")
assert finder.report.module == "0"
close = torch.tensor([1.0, 1.001])  # no range is involved here
assert stretch(close).isfinite().all()
assert stretch(close.half()).isfinite().all()
assert stretch(close.bfloat16()).isnan().all()

# %% [markdown]
# ### 2 The loss scale falls towards 0
#
# **What you see.** Every step is skipped, and the scale halves each time, from 65536 down to 0. The
# loss itself may look perfectly good.
#
# **The smallest program that does it.** A parameter starts at exactly zero, and the loss takes a
# square root. `train` is an ordinary loop that notes the scale.


# %%
def train(loss_of, scaler, steps):
    """Train two weights with a scaler; return their final values and the scale after each step."""
    weights = nn.Parameter(torch.tensor([0.0, 2.0]))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights.detach(), scales


def sick_loss(weights):
    return weights.square().sqrt().sum()  # as in a distance or a standard deviation


weights, scales = train(sick_loss, torch.amp.GradScaler("cpu"), steps=170)
print(f"the loss is {sick_loss(weights):.1f}")
print("scale after 1, 17 and 166 steps:", *[scales[step - 1] for step in (1, 17, 166)])
assert weights.tolist() == [0.0, 2.0]  # nothing was learned
assert scales[164] == 2.0**-149  # the smallest number that fp32 has
assert scales[165:] == [0.0] * 5  # from where no doubling leads back

# %% [markdown]
# **Why.** The slope of the square root at 0 is infinite, and infinity times the inner slope, 0, is
# NaN at *any* scale. The scaler tries smaller scales in vain. After 166 steps the scale is 0, and it
# stays there. Anything else that makes a gradient infinite or NaN in every step and at any scale does
# the same, such as `log(0)`, 0/0, or a NaN in the data.
#
# **The fix.** Repair the loss and leave the scaler alone. Here we add a small number under the
# root, which keeps it away from 0.


# %%
def healthy_loss(weights):
    return (weights.square() + 1e-4).sqrt().sum()


scaler = torch.amp.GradScaler("cpu", growth_interval=20)  # the default is 2000
learned, healthy = train(healthy_loss, scaler, steps=60)
_ = figures.loss_scales({"NaN in every gradient": scales[:60], "healthy": healthy})
for sick in (lambda w: w.log().sum(), lambda w: (w / w).sum(), lambda w: math.nan * w.sum()):
    assert train(sick, torch.amp.GradScaler("cpu"), steps=170)[1] == scales
assert learned.abs().max() < 0.2
assert healthy == [2.0**16] * 19 + [2.0**17] * 20 + [2.0**18] * 20 + [2.0**19]

# %% [markdown]
# The picture shows the scale after each of 60 steps on a logarithmic axis. The healthy scale climbs
# in stairs. The other halves in every step, and after 17 steps it is below 1, the dotted line.
#
# **Notice it earlier.** Stop the run when `scaler.get_scale() < 1`. `ScaleLog` keeps the history:

# %%
scaler = torch.amp.GradScaler("cpu")
with ScaleLog(scaler) as log:
    train(sick_loss, scaler, steps=20)
print(f"{len(log.skipped)} of {len(log.scales)} steps skipped; lowest scale {min(log.scales):g}")
assert log.skipped == list(range(20))

# %% [markdown]
# ### 3 A layer does not learn because its gradients underflow
#
# **What you see.** There is no message. The loss falls slowly or not at all, and some gradients are
# exactly zero.
#
# **The smallest program that does it.** We use fp16 without a scaler. The loss has a small weight
# and is a mean over many outputs.


# %%
def gradient_of(weight, scaler):
    """The gradient of a small loss, by way of fp16."""
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = torch.ones(256, 4) @ weight  # (256, 64)
        loss = 1e-4 * outputs.float().mean()
    (gradient,) = torch.autograd.grad(scaler.scale(loss), weight)
    return gradient / scaler.get_scale()


weight = torch.ones(4, 64, requires_grad=True)
lost = gradient_of(weight, torch.amp.GradScaler("cpu", enabled=False))
print("largest gradient:", lost.max().item())
assert lost.count_nonzero() == 0

# %% [markdown]
# **Why.** The gradient of each of the 16,384 outputs is 1e-4 / 16384 = 6e-9. That is less than half
# of fp16's smallest number, 6e-8, so it becomes zero when it is cast to fp16 on its way back.
#
# **The fix.** Use a scaler. Here the gradient is then as in exact arithmetic, up to rounding in fp16:

# %%
kept = gradient_of(weight, torch.amp.GradScaler("cpu"))
exact = 256 * 1e-4 / 16384
print(f"with a scaler {kept.mean():.3e}, in exact arithmetic {exact:.3e}")
torch.testing.assert_close(kept, torch.full_like(kept, exact), rtol=2e-3, atol=0)  # 11 bits

# %% [markdown]
# **Notice it earlier.** `gradient_underflow` counts, layer by layer, what fp16 would lose. Here that
# is every gradient of the outputs, and a scale of 8 keeps them from vanishing:

# %%
model, _ = make(nn.Linear(4, 64))
loss = 1e-4 * model(torch.ones(256, 4)).mean()
report = gradient_underflow(model, loss)
print(f"fp16 loses {report.outputs.lost(1.0):.0%} of the gradients of the outputs")
print(f"and keeps 99.9 % of all with a scale of {report.smallest_scale:.0f} or more")
assert report.outputs.lost(1.0) == 1
assert report.smallest_scale == 8

# %% [markdown]
# ### 4 A mask value does not fit into fp16
#
# **What you see.** A call such as `masked_fill` raises
# `value cannot be converted to type c10::Half without overflow`
# ([`type at::Half`](https://github.com/NVIDIA/apex/issues/1052) in older versions). Or there is no
# message, and a row that is masked everywhere is NaN.
#
# **The smallest program that does it.** We mask attention scores in two customary ways: we fill in
# -1e9, or we add it.

# %%
with torch.autocast("cpu", dtype=torch.float16):
    scores = x.T @ x  # (2, 2), fp16
mask = torch.tensor([[True, True], [False, True]])  # True: hidden, so row 0 sees nothing
message = message_of(lambda: scores.masked_fill(mask, -1e9))
print(message)
assert "value cannot be converted to type c10::Half without overflow" in message
added = (scores + mask.half() * -1e9).softmax(-1)
print(added)
assert added[0].isnan().all()

# %% [markdown]
# **Why.** -1e9 lies outside fp16. `masked_fill` checks its number and refuses it. Arithmetic does
# not check: it gives -inf, and a softmax over nothing but -inf is 0/0.
#
# **The fix.** Fill in the lowest number of the scores' dtype, or give a boolean mask to
# `F.scaled_dot_product_attention`, which needs no such number. Do not *add* that number: in fp16,
# with a score of -16 or less the sum rounds to -inf again, and so does the sum of two such masks. If
# that happens to all scores of a row, it is NaN as before.

# %%
lowest = torch.finfo(scores.dtype).min
attention = scores.masked_fill(mask, lowest).softmax(-1)
print(attention)
assert attention.tolist() == [[0.5, 0.5], [1.0, 0.0]]
added = (-20 * scores + mask.half() * lowest).softmax(-1)
assert added[0].isnan().all()
assert (torch.tensor([-16.0, -15.0]).half() + lowest).isinf().tolist() == [True, False]
assert (-20 * scores).masked_fill(mask, lowest).softmax(-1)[0].tolist() == [0.5, 0.5]
query = scores[None]  # (1, 2, 2); for this mask, True means: not hidden
assert F.scaled_dot_product_attention(query, query, query, attn_mask=~mask).isfinite().all()

# %% [markdown]
# **Notice it earlier.** `amp-lab xray --dtype fp16` finds a fill that raises, without a GPU.
# `find_nonfinite` names the line where the added mask becomes infinite. <!-- tests/tracing/test_advice.py, tests/remedies/test_nonfinite_remedies.py -->

# %% [markdown]
# ### 5 NaN because an epsilon of 1e-8 is zero in fp16
#
# **What you see.** Some values are NaN, such as those of a row of zeros.
#
# **The smallest program that does it.** We divide each row by its own largest value, and one row is
# all zeros.


# %%
def rescale(h, eps=1e-8):
    return h / (h.abs().amax(-1, keepdim=True) + eps)


h = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
print(rescale(h.half()))
assert rescale(h).isfinite().all()
assert rescale(h.half())[1].isnan().all()
assert torch.tensor(1e-8).half() == 0

# %% [markdown]
# **Why.** 1e-8 is less than half of the smallest fp16 number, so it rounds to zero and protects
# against nothing. On the CPU the same happens in `F.normalize`, whose epsilon is 1e-12; on CUDA
# autocast takes its norm in fp32. Adam's 1e-8 is the same trap once the parameters are fp16, unless
# it is fused ([section 29](#29-Half-precision-weights-stop-moving)).
#
# **The fix.** Compute this part in fp32, on `h.float()`, with an epsilon of 1e-3 or more if you
# train. An epsilon that fp16 can hold, at least `torch.finfo(dtype).tiny`, keeps a row of zeros
# finite. In training it is too small: at a loss scale of 65536 the gradients
# often overflow. In a model that is in fp16 itself, cast the result back,
# `.to(h.dtype)`. <!-- tests/remedies/test_nonfinite_remedies.py -->

# %%
assert F.normalize(h.half())[1].isnan().all()
with cuda_rules():
    fake = torch.rand(2, 2, device="cuda").half()
    assert F.normalize(fake).dtype is torch.float32
    assert rescale(fake).dtype is torch.float16  # no help from autocast there either
tiny = torch.finfo(torch.float16).tiny
for repaired in (rescale(h.half(), eps=tiny), rescale(h.float()), F.normalize(h.half(), eps=tiny)):
    assert repaired.isfinite().all()

# %% [markdown]
# **Notice it earlier.** Feed the model one batch of zeros, and check that its output is finite.

# %% [markdown]
# ### 6 A norm written by hand overflows above 256
#
# **What you see.** There is no NaN and no message. The output of a layer is exactly zero, and no
# layer before it learns through it.
#
# **The smallest program that does it.** We write root-mean-square normalisation out.


# %%
def rms_norm(h):
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-4)


with torch.autocast("cpu", dtype=torch.float16):
    h = (150 * x) @ torch.eye(2)  # (1, 2): 150 and 300, in fp16
    print(rms_norm(h))
    assert rms_norm(h).count_nonzero() == 0
    weight = torch.eye(2, requires_grad=True)
    rms_norm((150 * x) @ weight).sum().backward()
assert weight.grad.count_nonzero() == 0

# %% [markdown]
# **Why.** 300 times 300 is 90,000, which is infinite in fp16. The root of the mean is infinite too,
# and a number divided by infinity is 0. Autocast leaves a multiplication as it is (on CUDA it runs
# `pow` in fp32), so it stays in fp16. Squares, variances and distances that are written by hand can
# overflow long before their inputs do. So can a sum over the pixels of an image, as in a Dice or
# IoU loss: 512 x 512 ones are 262,144. (Autocast for CUDA returns a sum in fp32, but a model in
# fp16 does not.) A sum that is written as a matmul, such as the costs of a matcher, overflows under
# autocast on CUDA too.
#
# **The fix.** Use the library's function, here `F.rms_norm`, which does not overflow, or call
# `.float()` on the input, such as the logits of a loss. For a matmul that is not enough, since
# autocast casts it again: make an island, as in section 1, or divide by the number before it. (In
# bf16 nothing overflows, but costs that are close may become equal.)

# %%
exact = rms_norm(150 * x)
with torch.autocast("cpu", dtype=torch.float16):
    torch.testing.assert_close(rms_norm(h.float()), exact, rtol=1e-3, atol=0)  # 11 bits
    library = F.rms_norm(h, (2,)).float()
    torch.testing.assert_close(library, exact, rtol=1e-3, atol=0)
with cuda_rules():
    fake = torch.rand(2, device="cuda").half()
    assert ((fake * fake).dtype, fake.pow(2).dtype) == (torch.float16, torch.float32)
    assert fake.sum().dtype is torch.float32
pixels = torch.ones(512, 512).half().sum()
assert pixels.isinf()
assert (2 * pixels / (pixels + pixels)).isnan()  # a Dice score

# %%
points = torch.full((1, 1000), 10.0)
with torch.autocast("cpu", dtype=torch.float16):
    assert (points @ points.T / 1000).isinf()  # fp32 points, and 100,000 in fp16
    assert (points / 1000) @ points.T == 100
    with torch.autocast("cpu", enabled=False):
        assert points @ points.T / 1000 == 100
assert torch.tensor([1.2266, 1.2250]).bfloat16().diff() == 0

# %% [markdown]
# **Notice it earlier.** Look at the gradients of a step. If a whole layer has only zeros, find out
# why. `find_nonfinite` names the op that made an infinity which something was then divided by, or
# which was still there when an error ended the block, as that of SciPy's matcher
# does. <!-- tests/numerics/test_nonfinite.py -->

# %% [markdown]
# ### 7 Training is fine but evaluation is NaN
#
# **What you see.** After one bad batch and one skipped step, training goes on as if nothing had
# happened. Later the model gives NaN in evaluation.
#
# **The smallest program that does it.** A model has batch normalisation, and one batch overflows.


# %%
def train_step(model, optimizer, scaler, batch):
    """An ordinary AMP step; returns the loss."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(batch), torch.ones(8, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


# %% [markdown]
# The second of the four batches has values that are too large for fp16.

# %%
model, optimizer = make(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
scaler = torch.amp.GradScaler("cpu")
batches = [torch.randn(8, 2) * factor for factor in (1, 1e6, 1, 1)]  # the second overflows
losses = [train_step(model, optimizer, scaler, batch) for batch in batches]
print("training, loss finite:", *[math.isfinite(loss) for loss in losses])
print("evaluation:", model.eval()(x).item())
assert [math.isfinite(loss) for loss in losses] == [True, False, True, True]
assert model(x).isnan()
assert not all(b.isfinite().all() for b in model.buffers())

# %% [markdown]
# **Why.** The scaler skips the optimizer, which protects only the *parameters*. The running mean
# and variance of batch normalisation are *buffers*, and the forward pass has already updated them.
# Training does not use them, but evaluation does.
#
# **The fix.** Let `update_bn` measure the statistics anew, on good batches. Then repair the
# overflow.

# %%
assert all(parameter.isfinite().all() for parameter in model.parameters())
good = [batches[0], batches[2], batches[3]]
torch.optim.swa_utils.update_bn(good, model)
print("evaluation, output finite:", model.eval()(x).isfinite().item())
assert model(x).isfinite()

# %% [markdown]
# **Notice it earlier.** Before each checkpoint, check
# `all(b.isfinite().all() for b in model.buffers())`.

# %% [markdown]
# ### 8 Anomaly detection stops at a harmless overflow
#
# **What you see.** `backward` raises
# `Function 'MulBackward0' returned nan values in its 0th output.`
# (or names another function). It does so only with anomaly detection switched on, in a run that
# trains well without it.
#
# **The smallest program that does it.** A gradient overflows at the present scale, and a mask
# multiplies it by 0.


# %%
def masked_step(scaler):
    """Forward and backward of a masked sum in fp16, under anomaly detection."""
    weights = torch.ones(2, requires_grad=True)
    keep = torch.tensor([0.0, 1.0]).half()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # the traceback of the forward call
        scaler.scale((weights.half() * keep).sum()).backward()
    return weights.grad


message = message_of(lambda: masked_step(torch.amp.GradScaler("cpu", init_scale=2.0**17)))
print(message)
assert "Function 'MulBackward0' returned nan values in its 0th output." in message

# %% [markdown]
# **Why.** Overflows are how the scaler finds its scale
# ([notebook 03](03_grad_scaler_step_by_step.ipynb)). Infinity times 0 is NaN, and the scaler would
# skip the step and halve the scale. Anomaly detection does not know that, and raises first.
#
# **The fix.** Use a scale that does not overflow. A NaN that you find then is not the scaler's.

# %%
calm = torch.amp.GradScaler("cpu", init_scale=1.0)  # or enabled=False, in bf16 or fp32
assert masked_step(calm).tolist() == [0.0, 1.0]

# %% [markdown]
# **Notice it earlier.** If the NaN ends once `ScaleLog` shows a halved scale, it was probably only
# the scaler at work.

# %% [markdown]
# ## The scaler raises or warns
#
# `GradScaler` refuses some calls that could not do what you meant. [Notebook
# 07](07_training_recipes.ipynb) shows the repaired loops at length.

# %% [markdown]
# ### 9 The parameters are fp16
#
# **What you see.** `scaler.step` or `scaler.unscale_` raises
# `Attempting to unscale FP16 gradients.`
#
# **The smallest program that does it.** A model is converted with `.half()`, or loaded from a
# checkpoint in half precision, and then trained with a scaler.


# %%
def step_with_parameters_in(dtype):
    model, optimizer = make()
    model.to(dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x.to(dtype)).sum()).backward()
    scaler.step(optimizer)


message = message_of(lambda: step_with_parameters_in(torch.float16))
print(message)
assert "Attempting to unscale FP16 gradients." in message

# %% [markdown]
# **Why.** By default a gradient has the dtype of its parameter. Divided by the scale *in fp16*, a
# small one would vanish again, which the scale is there to
# prevent. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# On the CPU, bf16 parameters are not refused, and may fail as in section 29. On CUDA the same step
# raises another error,
# `"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'`
# ([issue 127176](https://github.com/pytorch/pytorch/issues/127176)).
#
# **The fix.** Keep the parameters in fp32, and let autocast make the fp16 copies. `.float()`
# converts them back.

# %%
model, optimizer = make()
model.half().float()  # as after loading half-precision weights
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(x).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
step_with_parameters_in(torch.bfloat16)  # no message, on the CPU

# %% [markdown]
# **Notice it earlier.** Before each optimizer step, assert that every *trained* parameter is in fp32. A
# frozen base may be in 16 bits. A `model.half()` inside of an evaluation changes the weights for good,
# so that an assertion at the top of the program comes too early.


# %%
def check_trained(model):
    assert all(p.dtype is torch.float32 for p in model.parameters() if p.requires_grad)


adapted = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
check_trained(adapted)  # an adapter on a frozen base
try:
    check_trained(model.half())
except AssertionError:
    model.float()
else:
    raise AssertionError("fp16 parameters were not noticed")

# %% [markdown]
# ### 10 Gradients are unscaled twice
#
# **What you see.** `scaler.unscale_` raises
# `unscale_() has already been called on this optimizer since the last update().`
#
# **The smallest program that does it.** We accumulate over two batches, and clip after each of
# them.


# %%
def accumulate(clip_each):
    """Sum the gradients of two batches, clip them, and step; returns the weights."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    for i, batch in enumerate((x, -x)):
        scaler.scale(model(batch).square().mean() / 2).backward()
        if clip_each or i == 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return model[0].weight.detach()


message = message_of(lambda: accumulate(clip_each=True))
print(message)
assert "unscale_() has already been called on this optimizer since the last update()." in message

# %% [markdown]
# **Why.** `unscale_` divides in place. After the first call, the second backward pass would add
# *scaled* gradients to unscaled ones, and the second call would divide the first batch's part
# twice.
#
# The message also comes where a step is skipped after `unscale_`, and `update` with it: call
# `scaler.update()` in every iteration that called
# `unscale_`. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Accumulate scaled gradients, and unscale and clip once, before the step. Here the
# weights are then those of a loop without a scaler:

# %%
model, optimizer = make()
for batch in (x, -x):
    (model(batch).square().mean() / 2).backward()
nn.utils.clip_grad_norm_(model.parameters(), 0.5)
optimizer.step()
torch.testing.assert_close(accumulate(clip_each=False), model[0].weight.detach())

# %% [markdown]
# **Notice it earlier.** Keep `unscale_`, clipping, `step` and `update` together in the loop.

# %% [markdown]
# ### 11 An optimizer has no gradients
#
# **What you see.** `scaler.step` raises
# `No inf checks were recorded for this optimizer.`
#
# **The smallest program that does it.** Two parts have an optimizer each, but only one got a
# gradient. The other is frozen, or its turn comes in another step.


# %%
def two_parts(step_both):
    body, body_optimizer = make()
    head, head_optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    with torch.no_grad():  # the body is frozen
        features = body(x)
    scaler.scale(head(features).sum()).backward()
    for optimizer in (body_optimizer, head_optimizer):
        if step_both or any(p.grad is not None for p in optimizer.param_groups[0]["params"]):
            scaler.step(optimizer)
    scaler.update()
    return [part[0].weight.grad is not None for part in (body, head)]


message = message_of(lambda: two_parts(step_both=True))
print(message)
assert "No inf checks were recorded for this optimizer." in message

# %% [markdown]
# **Why.** `step` looks for infinities in the gradients of that optimizer, but it has none: every
# `.grad` is `None`. The same happens if you leave out `backward()`, or build the optimizer for
# another copy of the model, or if the graph is cut between the weights and the loss. It is cut by
# - `.item()`, `float()` and `.detach()`, and by `torch.tensor([loss_a, loss_b])`, which copies numbers;
# - ops without a derivative, such as `argmax`, `histc`, comparisons, and casts to whole numbers.
#
# If the loss is a tensor, `backward()` then raises the message of section 25. With `requires_grad_()`
# on it nothing is raised, and the weights still get no gradient. (`round` and `sign` do not cut the graph. Their
# derivative is 0, so the gradients are zeros.) <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** If the part is meant to be frozen, do not step its optimizer. If it is not, keep the
# losses as tensors, and put them together with `torch.stack` or `+`. In place of an op without a
# derivative take one that has a useful one, such as the cross-entropy for an accuracy.

# %%
assert two_parts(step_both=False) == [False, True]


def gradient_through(loss_of):
    """The gradient of a weight for `loss_of(outputs)`, whether or not the loss has a graph."""
    model, _ = make()
    loss = loss_of(model(x))
    if not loss.requires_grad:  # or backward() would raise
        loss.requires_grad_()
    loss.backward()
    return model[0].weight.grad


# %% [markdown]
# Seven ways to cut the graph, one to keep it, and `round` and `sign`:

# %%
cuts = (
    lambda outputs: torch.tensor(outputs.sum().item()),
    lambda outputs: outputs.sum().detach(),
    lambda outputs: torch.tensor([*outputs[0]]).sum(),
    lambda outputs: outputs.argmax().float(),
    lambda outputs: torch.histc(outputs, bins=4).sum(),
    lambda outputs: (outputs > 0).float().mean(),
    lambda outputs: outputs.long().float().mean(),
)
with warnings.catch_warnings(action="ignore"):  # torch.tensor warns that it makes numbers
    assert [gradient_through(cut) for cut in cuts] == [None] * len(cuts)
assert gradient_through(lambda outputs: torch.stack([*outputs[0]]).sum()).count_nonzero() == 4
for flat in (torch.round, torch.sign):
    assert not gradient_through(lambda outputs, flat=flat: flat(outputs).sum()).any()

# %% [markdown]
# `gradient_underflow` looks at the graph of a loss before you train with it:

# %%
model, _ = make()
copied = torch.tensor([1.0, 2.0], requires_grad=True).sum()
message = message_of(lambda: gradient_underflow(model, copied))
assert "the loss does not depend on the model" in message
message = message_of(lambda: gradient_underflow(model, model(x).sum().detach()))
assert "the loss has no graph" in message

# %% [markdown]
# **Notice it earlier.** Print the names of the parameters whose `.grad` is `None` after one step.
# Before that, `gradient_underflow(model, loss)` refuses such a loss: it has no graph, or it does
# not depend on the model. `amp-lab memory --loss` refuses a loss that has no graph. <!-- tests/tracing/test_memory.py -->

# %% [markdown]
# ### 12 Scaler methods are called in the wrong order
#
# **What you see.** The scaler raises one of these:
# - `step() has already been called since the last update().`
# - `unscale_() is being called after step().`
# - `No inf checks were recorded prior to update.`
# - `Attempted step but _scale is None.`
# - `Attempted unscale_ but _scale is None.`
#
# **The smallest program that does it.** After one backward pass, we make the calls named on the
# left.


# %%
def call(*names, scaled=True):
    """One backward pass, then methods of the scaler in this order."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    loss = model(x).sum()
    (scaler.scale(loss) if scaled else loss).backward()
    for name in names:
        getattr(scaler, name)(*([] if name == "update" else [optimizer]))


messages = {
    "step, step": message_of(lambda: call("step", "step")),
    "step, unscale_": message_of(lambda: call("step", "unscale_")),
    "update": message_of(lambda: call("update")),
    "step without scale": message_of(lambda: call("step", scaled=False)).split("  ")[0],
    "unscale_, the same": message_of(lambda: call("unscale_", scaled=False)).split("  ")[0],
}
for names, message in messages.items():
    print(f"{names:<20}{message}")

# %%
assert "step() has already been called since the last update()." in messages["step, step"]
assert "unscale_() is being called after step()." in messages["step, unscale_"]
assert "No inf checks were recorded prior to update." in messages["update"]
assert "Attempted step but _scale is None." in messages["step without scale"]
assert "Attempted unscale_ but _scale is None." in messages["unscale_, the same"]
once_more = nn.Parameter(torch.zeros(1))
once_more.grad = torch.ones(1)
plain_sgd = torch.optim.SGD([once_more], lr=1.0)
plain_sgd.step(), plain_sgd.step()  # an optimizer itself does not refuse
assert once_more.item() == -2

# %% [markdown]
# **Why.** `update` ends an iteration. Without a new scale it needs the result of at least one `step`
# or `unscale_`, and makes the scaler forget it. A second `step` would apply the same gradients once
# more. Without `scale(loss)` there is nothing to undo.
#
# In Lightning's manual optimization it is `self.manual_backward(loss)` that scales, and
# `loss.backward()` does not. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Use one order in every iteration: `unscale_` if you need it, `step`, `update`. With
# several optimizers, call `step` for each and `update` [once, after
# them](https://docs.pytorch.org/docs/stable/notes/amp_examples.html).

# %%
call("unscale_", "step", "update")  # unscale_ only for those who clip or log
call("step", "update")
assert message_of(lambda: call("update", "step")) == messages["update"]

# %% [markdown]
# `get_scale()` after `update` is the scale of the next step. A loss that is divided by it is off, by
# default by a factor of 2, wherever the scale has changed. Log the loss before it is scaled.

# %%
scaler = torch.amp.GradScaler("cpu")
parameter = nn.Parameter(torch.ones(1))
parameter.grad = torch.tensor([math.inf])
scaled_loss = scaler.scale(torch.ones(()))  # the loss is 1
scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))
scaler.update()
assert scaled_loss / scaler.get_scale() == 2
scaler.update(1024.0)  # with a new scale it needs no step

# %% [markdown]
# **Notice it earlier.** A forgotten `update` raises in the second iteration. A `scale` that is left
# out later raises nothing. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %% [markdown]
# ### 13 The optimizer needs a closure
#
# **What you see.** `scaler.step` raises
# `Closure use is not currently supported if GradScaler is enabled.`
#
# **The smallest program that does it.** L-BFGS [needs a
# closure](https://docs.pytorch.org/docs/stable/optim.html), with which it
# evaluates the loss several times in a step.


# %%
def lbfgs(scaler, dtype, by_position=False):
    """One step of L-BFGS under autocast; returns the loss before and after."""
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    losses = []

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(model(x), torch.ones(1, 2))
        losses.append(loss.item())
        scaler.scale(loss).backward()
        return loss.detach()

    closure()  # `step` of a scaler needs gradients
    if by_position:
        scaler.step(optimizer, closure)
    else:
        scaler.step(optimizer, closure=closure)
    return losses[0], closure().item()


# %% [markdown]
# An enabled scaler refuses the closure if it is passed by name:


# %%
message = message_of(lambda: lbfgs(torch.amp.GradScaler("cpu"), torch.float16))
print(message)
assert "Closure use is not currently supported if GradScaler is enabled." in message
_ = lbfgs(torch.amp.GradScaler("cpu"), torch.float16, by_position=True)  # no message

# %% [markdown]
# **Why.** The closure runs `backward` inside the optimizer, where the scaler can neither unscale the
# gradients nor look at them. It notices only a closure that is passed *by name*. With
# `scaler.step(optimizer, closure)`, once there are gradients, there is no message, and you train on
# scaled gradients that nobody checks. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# An optimizer that steps in two passes, such as SAM, has the same trouble: no scaler skips its
# first step, so a single overflow can make the weights NaN for
# good. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Use bf16 or fp32, and disable the scaler. It then hands the closure on.

# %%
before, after = lbfgs(torch.amp.GradScaler("cpu", enabled=False), torch.bfloat16)
print(f"loss {before:.1f} -> {after:.1f}")
assert after < 0.01 * before

# %% [markdown]
# **Notice it earlier.** Search your code for `closure`: it does not go together with an enabled
# scaler.

# %% [markdown]
# ### 14 The scheduler warns that it came before the optimizer
#
# **What you see.** The scheduler warns
# ``Detected call of `lr_scheduler.step()` before `optimizer.step()`.``
#
# **The smallest program that does it.** In the usual loop, the very first step is skipped.


# %%
def schedule(only_if_stepped):
    """Three steps, the first of which overflows; returns the learning rate after each."""
    model, optimizer = make(lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for factor in (torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).sum() * factor).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not only_if_stepped or scaler.get_scale() >= before:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


message = warnings_of(lambda: schedule(only_if_stepped=False)).partition(" In PyTorch")[0]
print(message)
assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`." in message

# %% [markdown]
# **Why.** The order in the loop is right, but the scaler skipped `optimizer.step()` because of an
# overflow. The schedule is then one step ahead of the training.
#
# **The fix.** With one optimizer, `update` lowers the scale if and only if the step was skipped
# (unless the scale is 0 already). So advance the schedule only if the scale did not
# fall. <!-- tests/numerics/test_scale_log.py -->

# %%
assert warnings_of(lambda: schedule(only_if_stepped=True)) == ""
assert schedule(only_if_stepped=True) == [1.0, 0.5, 0.25]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    assert schedule(only_if_stepped=False) == [0.5, 0.25, 0.125]  # one step ahead

# %% [markdown]
# **Notice it earlier.** `ScaleLog` counts the skipped steps. Each puts the schedule one step ahead,
# but PyTorch checks only at the scheduler's first call. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %% [markdown]
# ### 15 Clipping leaves next to nothing of the gradients
#
# **What you see.** There is no message. The model learns without clipping, but hardly with it.
#
# **The smallest program that does it.** We clip to a norm of 1 straight after `backward`.


# %%
def clipped_step(unscale):
    """One step with clipping; returns the norm that was found, and how far the weights moved."""
    model, optimizer = make(lr=1.0)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).square().sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - start
    return norm.item(), moved.norm().item()


norm, moved = clipped_step(unscale=False)
print(f"norm before clipping {norm:.1e}, moved by {moved:.1e}")
assert moved < 2e-5

# %% [markdown]
# **Why.** The gradients were still scaled by 65536 when they were cut to a norm of 1. They were
# divided *afterwards*, so that only 1.5e-5 is left. Adam rescales its gradients and so hides most
# of it ([notebook 05](05_cifar10_mobilenet.ipynb) shows how well), but nearly *every* step is
# clipped.
#
# **The fix.** Call `scaler.unscale_(optimizer)` before you clip.

# %%
norm, moved = clipped_step(unscale=True)
print(f"norm before clipping {norm:.1e}, moved by {moved:.1e}")
assert abs(moved - 1) < 1e-3  # the full length that clipping allows

# %% [markdown]
# What reads gradients in `backward()` sees them scaled too: a hook (`register_hook`), `wandb.watch`
# ([a report](https://github.com/wandb/wandb/issues/4369)), or [Lightning's
# `on_after_backward`](https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/core/hooks.py).
# Log them after `unscale_`.

# %%
seen = []
weight = nn.Parameter(torch.ones(1))
weight.register_hook(lambda gradient: seen.append(gradient.item()))
scaler = torch.amp.GradScaler("cpu")
scaler.scale(2 * weight.sum()).backward()
scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
assert (seen, weight.grad.item()) == ([131072.0], 2.0)

# %% [markdown]
# **Notice it earlier.** Log the norm that `clip_grad_norm_` returns: here it is 2.9e5 when it is
# still scaled, and 4.5 when it is not.

# %% [markdown]
# ### 16 Clipping refuses a norm that is not finite
#
# **What you see.** `clip_grad_norm_` raises
# ``The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.``
#
# **The smallest program that does it.** We tell clipping to be strict, in a step that overflows.


# %%
def overflowing_step(strict):
    """A step with an infinite gradient; returns whether the weights are as before."""
    model, optimizer = make()
    before = model[0].weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=strict)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(model[0].weight, before)


message = message_of(lambda: overflowing_step(strict=True))
print(message)
assert (
    "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped."
    in message
)

# %% [markdown]
# **Why.** In fp32 an infinite gradient is a fault, and strict clipping finds it. With a scaler,
# an overflow now and then is normal, and `scaler.step` deals with it in the next line.
#
# **The fix.** In fp16, leave `error_if_nonfinite=False`, the default. `unscale_` has noted the
# infinity, so `step` skips the optimizer. In bf16 the scaler is disabled and skips nothing, so keep
# the error: without it, an infinite gradient makes its weight NaN, and a NaN gradient all weights that
# are clipped with it. <!-- tests/notebooks/test_07_training_recipes.py -->

# %%
assert overflowing_step(strict=False)

# %% [markdown]
# **Notice it earlier.** Count the norms that are not finite: each skipped step has one.

# %% [markdown]
# ### 17 The state of the scaler cannot be loaded
#
# **What you see.** `scaler.load_state_dict` raises
# `The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.`
#
# **The smallest program that does it.** We load the checkpoint of a bf16 run into an fp16 run.

# %%
from_bf16 = torch.amp.GradScaler("cpu", enabled=False).state_dict()
scaler = torch.amp.GradScaler("cpu")
message = message_of(lambda: scaler.load_state_dict(from_bf16))
print(message)
assert (
    "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
    in message
)

# %% [markdown]
# **Why.** A disabled scaler has no state, and saves an empty dict. The other way round nothing is
# raised, because a disabled scaler ignores what it is told to load.
#
# **The fix.** Load the state only if there is one. A fresh scaler finds a lower scale in a few steps;
# upwards it doubles after 2000 steps without an overflow, by default ([notebook
# 03](03_grad_scaler_step_by_step.ipynb)).

# %%
for saved in (from_bf16, torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()):
    scaler = torch.amp.GradScaler("cpu")
    if saved:
        scaler.load_state_dict(saved)
    print(f"resumed with a scale of {scaler.get_scale():.0f}")
assert scaler.get_scale() == 1024
disabled = torch.amp.GradScaler("cpu", enabled=False)
disabled.load_state_dict(saved)  # nothing is raised
assert disabled.get_scale() == 1

# %% [markdown]
# **Notice it earlier.** Save the precision in the checkpoint, and compare it when you resume.

# %% [markdown]
# ## Dtypes do not match
#
# Autocast casts fp32 and 16-bit tensors for the ops on its list, inside its block and on its device
# ([notebook 02](02_autocast_dtypes.ipynb)). Most messages of this part come from ops that are not
# on the list, or from code just outside the block.

# %% [markdown]
# ### 18 A half precision output leaves the block
#
# **What you see.** An op raises one of these, with other dtypes too and in either order:
# - `mat1 and mat2 must have the same dtype, but got Half and Float`
# - `expected m1 and m2 to have the same dtype, but got: c10::Half != float`
# - `expected scalar type Float but found Half`
# - `Input type (c10::Half) and bias type (float) should be the same`
# - `Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same`
#   ([a report](https://github.com/baaivision/See3D/issues/11))
# - `RNN input dtype (torch.float16) does not match weight dtype (torch.float32).`
# - `mixed dtype (CPU): expect parameter to have scalar type of Float`
# - `Found dtype Float but expected Half`
# - ``expected dtype c10::Half for `end` but got dtype float``, where weights are averaged; from
#   `optimizer.step()` see
#   [section 46](#46-After-resuming-the-loss-jumps-or-is-NaN) <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The smallest program that does it.** We use the output of a block after the block has ended.

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.float16):
    h = model(x)  # (1, 2), fp16
messages = {
    "linear": message_of(lambda: model(h)),
    "mm": message_of(lambda: h @ torch.eye(2)),
    "bmm": message_of(lambda: torch.eye(2)[None] @ h.expand(1, 2, 2)),
    "conv2d": message_of(lambda: nn.Conv2d(1, 1, 1)(h[None, None])),
    "gru": message_of(lambda: nn.GRU(2, 2)(h[None])).partition(" Convert")[0],
    "norm": message_of(lambda: nn.LayerNorm(2).half()(h.float())),
    "huber": message_of(lambda: F.huber_loss(h, h.detach().float()).backward()),
    "lerp": message_of(lambda: h.lerp(h.float(), 0.5)),
}
for name, message in messages.items():
    print(f"{name:<8}{message}")

# %%
assert "mat1 and mat2 must have the same dtype, but got Half and Float" in messages["linear"]
assert "expected m1 and m2 to have the same dtype, but got: c10::Half != float" in messages["mm"]
assert "expected scalar type Float but found Half" in messages["bmm"]
assert "Input type (c10::Half) and bias type (float) should be the same" in messages["conv2d"]
rnn = "RNN input dtype (torch.float16) does not match weight dtype (torch.float32)."
assert rnn in messages["gru"]
assert "mixed dtype (CPU): expect parameter to have scalar type of Float" in messages["norm"]
assert "Found dtype Float but expected Half" in messages["huber"]
assert "expected dtype c10::Half for `end` but got dtype float" in messages["lerp"]

# %% [markdown]
# **Why.** Autocast stops casting at the end of the block, but results in low precision stay so. A
# model or an input that you converted by hand fails in the same way, with no autocast at all. Then
# it is often a tensor beside the weights that stayed in fp32, such as the class weights of a loss,
# a sampling grid, or the initial state of an RNN. (Another wording is [`expected mat1 and mat2 to
# have the same dtype`](https://github.com/Vaibhavs10/fast-whisper-finetuning/issues/14).) <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# Inside the block an op raises such a message where it writes in place (`addmm_`) or into `out=`:
# autocast casts neither ([notebook
# 02](02_autocast_dtypes.ipynb#What-is-eligible,-and-what-is-not)). If `backward()` raises it, see
# [section 20](#20-A-function-of-your-own-fails-in-backward). <!-- tests/remedies/test_dtype_remedies.py -->
#
# Or it is a table that `forward` makes anew for a longer input. The new one is fp32, and the module
# keeps it, so that short inputs fail from then on. Make it with the dtype and the device of the old
# one: `longer.to(self.table)`.
#
# In quantization-aware training the fused fake-quantize module takes fp32 alone, and is not on
# autocast's list. The one that is not fused is on it: make the settings with
# `get_default_qat_qconfig_mapping("fbgemm", version=0)`. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# **The fix.** Move the line into the block, or convert what leaves the block to fp32. Replace an op that
# writes in place by the one that returns a new tensor, such as `addmm_` by `addmm`.

# %%
with torch.autocast("cpu", dtype=torch.float16):
    inside = model(model(x))
outside = model(h.float())
torch.testing.assert_close(inside.float(), outside, rtol=2e-3, atol=2e-3)  # 11 bits
with torch.autocast("cpu", dtype=torch.float16):
    assert "must have the same dtype" in message_of(
        lambda: torch.zeros(1, 2).addmm_(h, torch.eye(2))
    )
    assert torch.addmm(torch.zeros(1, 2), h, torch.eye(2)).dtype is torch.float16
weighted = message_of(lambda: F.cross_entropy(h, torch.tensor([0]), weight=torch.ones(2)))
assert "expected scalar type Half but found Float" in weighted


# %%
class Table(nn.Module):
    """Adds a table, which it makes longer for an input that is longer than any before."""

    def __init__(self, keeps_dtype):
        super().__init__()
        self.keeps_dtype = keeps_dtype
        self.register_buffer("table", torch.zeros(2, 2))

    def forward(self, x):  # (T, 2)
        if len(x) > len(self.table):
            longer = torch.zeros(len(x), 2)
            self.table = longer.to(self.table) if self.keeps_dtype else longer
        return x + self.table[: len(x)]


for keeps_dtype, dtype in ((False, torch.float32), (True, torch.float16)):
    table, short = Table(keeps_dtype).half(), torch.ones(1, 2).half()
    assert table(short).dtype is torch.float16
    assert table(short.expand(3, 2)).dtype is dtype
    assert table(short).dtype is dtype  # the short one again

# %% [markdown]
# **Notice it earlier.** Let the model's `forward` end with `.float()` on what it returns.

# %% [markdown]
# ### 19 Writing into a buffer fails
#
# **What you see.** The line that writes raises one of these:
# - `Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.`
# - `index_add_(): self (Float) and source (Half) must have the same scalar type`
# - `scatter(): Expected self.dtype to be equal to src.dtype`
# - `masked_scatter: expected self and source to have same dtypes but got`
#
# **The smallest program that does it.** We collect features in a tensor that was made with
# `torch.zeros`.


# %%
def collect(write):
    """Call `write(buffer, index, features)` inside an autocast block."""
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        features = model(x)  # (1, 2), fp16
        write(torch.zeros(4, 2), torch.tensor([2]), features)


messages = [
    message_of(lambda: collect(lambda buffer, i, f: buffer.__setitem__(i, f))),  # buffer[i] = f
    message_of(lambda: collect(lambda buffer, i, f: buffer.index_add_(0, i, f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.scatter_(0, i[None].expand(1, 2), f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.masked_scatter_(buffer == 0, f))),
]
print(*messages, sep="\n")

# %%
assert (
    "Index put requires the source and destination dtypes match, got Float for the destination and Half for the source."
    in messages[0]
)
assert "index_add_(): self (Float) and source (Half) must have the same scalar type" in messages[1]
assert "scatter(): Expected self.dtype to be equal to src.dtype" in messages[2]
masked = "masked_scatter: expected self and source to have same dtypes but got"
assert masked in messages[3]

# %% [markdown]
# **Why.** Autocast leaves in-place operations alone, since it cannot change the dtype of a tensor
# that already exists. `torch.zeros` makes that tensor in fp32 by default, with or without autocast.
# (An index that is a number does not raise: `buffer[2] = f` casts.)
#
# Without the underscore, `masked_scatter`, `scatter` and `index_add` fail in the same way, since
# they are not on autocast's list either. `masked_scatter` is met where the features of an image
# [take their
# places](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llava/modeling_llava.py)
# among the embeddings of a text.
#
# The dtypes can also be the other way round: an fp32 parameter, such as the embedding of a mask, is
# written into an activation in 16 bits. Or the buffer is in bf16, the model was cast to bf16, and
# no autocast is on: then a layer computes in a dtype that it keeps as an attribute, as some layers with
# quantized weights do. `model.to()` does not change it, so give it the dtype when you quantize.
# `amp-lab xray` names the layer. <!-- tests/remedies/test_dtype_remedies.py -->
#
# **The fix.** Cast the features when you write them, or make the buffer in their dtype. A gradient goes
# back through the cast.

# %%
collect(lambda buffer, i, f: buffer.__setitem__(2, f[0]))  # buffer[2] = f[0]
out_of_place = [
    message_of(lambda: collect(lambda buffer, i, f: buffer.masked_scatter(buffer == 0, f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.scatter(0, i[None].expand(1, 2), f))),
    message_of(lambda: collect(lambda buffer, i, f: buffer.index_add(0, i, f))),
]
assert [message.split()[0] for message in out_of_place] == [
    "masked_scatter:",
    "scatter():",
    "index_add_():",
]
for key in ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS"):
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {op.partition(".")[0] for op in listed}  # without the overload
    assert not names & {"aten::masked_scatter", "aten::scatter", "aten::index_add"}
collect(lambda buffer, i, f: buffer.__setitem__(i, f.to(buffer.dtype)))
collect(lambda buffer, i, f: buffer.index_add_(0, i, f.to(buffer.dtype)))
collect(lambda _, i, f: f.new_zeros(4, 2).scatter_(0, i[None].expand(1, 2), f))
assert h.new_zeros(4, 2).dtype is torch.float16

# %%
embedding, activation = nn.Parameter(torch.ones(2)), torch.zeros(3, 2).half()
activation[torch.tensor([1])] = embedding.to(activation.dtype)
activation.sum().backward()
assert embedding.grad.tolist() == [1.0, 1.0]


class Quantized(nn.Module):
    """A layer with int8 weights that computes in a dtype of its own."""

    def __init__(self, precision=torch.float32):
        super().__init__()
        self.precision = precision
        self.register_buffer("weight", torch.ones(2, 2, dtype=torch.int8))

    def forward(self, x):
        return F.linear(x.to(self.precision), self.weight.to(self.precision))


assert Quantized().to(torch.bfloat16)(x.bfloat16()).dtype is torch.float32
assert Quantized(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16

# %% [markdown]
# **Notice it earlier.** Look for `torch.zeros` and `torch.empty` inside every `forward`.

# %% [markdown]
# ### 20 A function of your own fails in backward
#
# **What you see.** `backward()` raises
# `expected scalar type Half but found Float`
# or one of the messages of section 18.
#
# **The smallest program that does it.** We write a batched product as an `autograd.Function`.


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)  # the arguments, fp32, and not autocast's casts of them
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # fp16, like the output
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


def backward_through(function):
    weight = torch.eye(2)[None].requires_grad_()  # (1, 2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        output = function.apply(weight, weight)
    output.sum().backward()
    return weight.grad


message = message_of(lambda: backward_through(Product))
print(message)
assert "expected scalar type Half but found Float" in message

# %% [markdown]
# **Why.** `forward` runs inside the block, where autocast casts for the product. `backward` runs
# outside, and meets an fp16 gradient and fp32 tensors.
#
# **The fix.** Use the two decorators of `torch.amp`. With `cast_inputs`, both directions compute in
# that dtype, without autocast. Use this for a kernel that was written for one dtype.
#
# Without `cast_inputs` the decorators cast nothing: `backward` runs under autocast if `forward` did.
# Use that where `forward` calls layers, as in a checkpoint of your own; or take
# `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)`, which does it for you. [Notebook
# 02](02_autocast_dtypes.ipynb#Your-own-autograd-functions) shows both
# decorators. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# A checkpoint of your own that notes only whether autocast was on raises nothing. It computes the
# block again in the default dtype, which is fp16 on CUDA and bf16 on a CPU, so the gradients are less
# exact or overflow. Note `torch.get_autocast_dtype(device_type)` too, and give it as `dtype=`.
# `amp-lab migrate` finds it. <!-- tests/remedies/test_migrate_remedies.py -->


# %%
class AmpProduct(torch.autograd.Function):
    forward = staticmethod(
        torch.amp.custom_fwd(Product.forward, device_type="cpu", cast_inputs=torch.float32)
    )
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


assert torch.equal(backward_through(AmpProduct), torch.full((1, 2, 2), 2.0))


class UnderAutocast(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


assert torch.equal(backward_through(UnderAutocast), torch.full((1, 2, 2), 2.0))

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.float16):
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
with torch.autocast("cpu", enabled=enabled):
    assert model(x).dtype is torch.bfloat16
with torch.autocast("cpu", enabled=enabled, dtype=dtype):
    assert model(x).dtype is torch.float16

# %% [markdown]
# A kernel of another package, or one of your own in `torch.library`, gets what comes in, 16 bits and
# fp32 mixed: autocast casts for the ops that it knows. Cast what you give it (for a loss, to fp32), or give your
# own op a rule with `torch.library.register_autocast`. If the message comes in the forward pass of a
# model in fp16, see [section 18](#18-A-half-precision-output-leaves-the-block). Under `torch.vmap` the
# backward pass of a norm [may raise it](https://github.com/pytorch/pytorch/issues/184890).

# %%
dtypes_seen = []


@torch.library.custom_op("notebook08::doubled", mutates_args=())
def doubled(value: torch.Tensor) -> torch.Tensor:
    dtypes_seen.append(value.dtype)
    return 2 * value


with torch.autocast("cpu", dtype=torch.bfloat16):
    doubled(torch.ones(1).bfloat16())
torch.library.register_autocast("notebook08::doubled", "cpu", torch.float32)
with torch.autocast("cpu", dtype=torch.bfloat16):
    doubled(torch.ones(1).bfloat16())
assert dtypes_seen == [torch.bfloat16, torch.float32]

# %% [markdown]
# **Notice it earlier.** Test each function of your own once under autocast, with a backward pass.

# %% [markdown]
# ### 21 Two dtypes are nested around one weight
#
# **What you see.** An op raises one of these:
# - `mat1 and mat2 must have the same dtype, but got BFloat16 and Half`
# - `Unexpected floating ScalarType in at::autocast::prioritize`
#
# **The smallest program that does it.** An fp16 block contains a bf16 block for a delicate part,
# and one layer is used in both. For the second message, we pass a bf16 tensor in an fp16 block to
# an op that combines tensors: `cat` on the CPU, `addcmul` on CUDA.


# %%
def nested(**options):
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.float16):
        model(x)  # the cast of the weight goes into the cache
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            return model(x)


def concatenate(tensor):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.cat([tensor, tensor])


def add_products(tensor):
    return torch.addcmul(tensor, tensor, tensor)


message, promoted = message_of(nested), message_of(lambda: concatenate(x.bfloat16()))
with cuda_rules():
    on_cuda = message_of(lambda: add_products(torch.rand(2, device="cuda").bfloat16()))
print(message, promoted, on_cuda, sep="\n")
assert "mat1 and mat2 must have the same dtype, but got BFloat16 and Half" in message
assert "Unexpected floating ScalarType in at::autocast::prioritize" in promoted
assert on_cuda == promoted

# %% [markdown]
# **Why.** Autocast keeps the cast of a trained fp32 weight until the outermost block ends (except in
# `inference_mode`), and does not note its dtype. So the inner block casts the input to bf16, but
# finds an fp16 weight. The second message is about the policy *promote* ([notebook
# 02](02_autocast_dtypes.ipynb)). It looks for the widest of the inputs, and knows only fp32 and the
# dtype of the block, even if all inputs are bf16, as those of a model with bf16 weights in a block
# that is fp16 by default.
#
# The same cache breaks *selective* checkpointing if two regions use one weight. The first region
# casts the weight. The forward pass of the second finds that cast, and records none. In the backward
# pass the second region runs again, with an empty cache, so it does cast. That op was
# `encountered during backward but not found in storage`. With `cache_enabled=False` each region
# records a cast of its own. <!-- tests/notebooks/test_07_training_recipes.py -->
#
# **The fix.** Switch the cache off in the inner block. For the second message, use one half
# precision everywhere: give the block the dtype of the weights, or make the bf16 tensor fp32.

# %%
assert nested(cache_enabled=False).dtype is torch.bfloat16
assert concatenate(x.bfloat16().float()).dtype is torch.float32
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype is torch.bfloat16

# %% [markdown]
# **Notice it earlier.** Use one dtype for the whole model, and fp32 for a delicate part
# (section 1).

# %% [markdown]
# ### 22 BCELoss is refused on a GPU
#
# **What you see.** On CUDA and ROCm, but not on the CPU, the loss raises
# `torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.`
#
# **The smallest program that does it.** The program needs the rules of CUDA. If CUDA or ROCm is
# there, it runs on the GPU as well.


# %%
def bce():
    logits, target = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    nn.BCELoss()(logits.sigmoid(), target)


with cuda_rules():
    message = message_of(bce).splitlines()[0]
    assert torch.rand(4, device="cuda").sigmoid().dtype is torch.float32  # refused even so
print(message)
assert (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
    in message
)
if torch.cuda.is_available():  # the real thing
    with torch.autocast("cuda", dtype=torch.float16):
        assert message in message_of(bce)

# %% [markdown]
# **Why.** The loss takes the logarithm of a probability p, and the gradient of that is 1/p. For a
# small p this is more than fp16 can hold. If p is fp16, its gradient has to be fp16 too, so a cast
# to fp32 in between would not help. This is the reason that [PyTorch's
# documents](https://docs.pytorch.org/docs/stable/amp.html) give. Besides, a probability very close to 1 rounds to exactly
# 1 in fp16. Autocast refuses fp32 inputs as well. On the CPU it computes the loss in fp32.
#
# **The fix.** Leave out the sigmoid, and give the logits to the loss that has it built in. Up to
# rounding, that loss has the same value unless the sigmoid saturates, where it is the right one, and
# autocast computes it in fp32.
#
# Where there are only probabilities, as in the cost of a matching, leave autocast for that line:
# `with torch.autocast("cuda", enabled=False):`, on `p.float()`. Do not give *them* to the loss with
# logits: it would take their sigmoid once more. <!-- tests/notebooks/test_08_when_amp_breaks.py -->

# %%
with cuda_rules():
    logits = torch.rand(4, device="cuda").half()
    assert F.binary_cross_entropy_with_logits(logits, logits).dtype is torch.float32
logits, target = torch.tensor([-2.0, 0.5, 20.0]), torch.tensor([0.0, 1.0, 1.0])
expected = F.binary_cross_entropy(logits.sigmoid(), target)
torch.testing.assert_close(F.binary_cross_entropy_with_logits(logits, target), expected)
saturated = torch.tensor(200.0), torch.tensor(0.0)  # the loss is log(1 + exp(200)), which is 200
assert F.binary_cross_entropy_with_logits(*saturated) == 200
assert F.binary_cross_entropy(saturated[0].sigmoid(), saturated[1]) == 100
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert F.binary_cross_entropy(logits.sigmoid().bfloat16(), target).dtype is torch.float32
assert torch.tensor(20.0).half().sigmoid() == 1  # the log of 1 minus this is minus infinity
unlikely = torch.tensor([2.0**-24], requires_grad=True)  # a probability that fp16 can hold
F.binary_cross_entropy(unlikely, torch.ones(1)).backward()
assert unlikely.grad.isfinite()
assert unlikely.grad.half().isinf()  # its gradient is none that fp16 can hold

# %% [markdown]
# **Notice it earlier.** Test the loss under `cuda_rules` in a unit test, which needs no GPU.

# %% [markdown]
# ### 23 An op does not exist in half precision
#
# **What you see.** An op raises one of these:
# - `quantile() input tensor must be either float or double dtype`
# - `linalg.inv: Low precision dtypes not supported. Got Half`
# - `"lu_cpu" not implemented for 'Half'`, or another name in the quotes.
#
# **The smallest program that does it.** We take a quantile under the rules of CUDA, and the inverse
# and the determinant of a matrix that is already fp16.

# %%
with cuda_rules():
    a = torch.rand(2, 2, device="cuda") @ torch.rand(2, 2, device="cuda")
    quantile = message_of(lambda: a.quantile(0.5))
inverse = message_of(lambda: torch.linalg.inv(torch.eye(2).half()))
determinant = message_of(lambda: torch.linalg.det(torch.eye(2).half()))
print(quantile, inverse, determinant, sep="\n")
assert "quantile() input tensor must be either float or double dtype" in quantile
assert "linalg.inv: Low precision dtypes not supported. Got Half" in inverse
assert "\"lu_cpu\" not implemented for 'Half'" in determinant

# %% [markdown]
# **Why.** These ops have no half-precision kernel, and autocast does not help everywhere. On the
# CPU it casts for the quantile and the inverse, but on CUDA it casts for neither.
#
# **The fix.** Call `.float()` on the input of that one op. If the message stays, autocast casts it
# again, since the op is on its list, as `mm` and `addmm` are. `torch.sparse.mm` calls `addmm`, and
# has no kernel for 16 bits on some devices, such as `"addmm_sparse_cuda"`
# ([a report](https://github.com/Lightning-AI/pytorch-lightning/issues/5282)). Then switch autocast off
# *and* call `.float()`, inside:

# %%
adjacency, features = torch.eye(2).to_sparse(), torch.ones(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.sparse.mm(adjacency.float(), features.float()).dtype is torch.bfloat16
    with torch.autocast("cpu", enabled=False):
        assert torch.sparse.mm(adjacency.float(), features.float()).dtype is torch.float32

# %%
with cuda_rules():
    a = torch.rand(2, 2, device="cuda") @ torch.rand(2, 2, device="cuda")
    assert a.float().quantile(0.5).dtype is torch.float32
with torch.autocast("cpu", dtype=torch.float16):
    for op in (torch.linalg.inv, partial(torch.quantile, q=0.5)):
        assert op(torch.eye(2).half()).dtype is torch.float32
listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
assert not any("quantile" in op or "linalg_inv" in op for op in listed)
assert torch.linalg.det(torch.eye(2).half().float()) == 1

# %% [markdown]
# **Notice it earlier.** Run `amp-lab xray` on the model ([notebook 09](09_xray_your_model.ipynb)). It
# stops at an op that refuses the dtype itself, as the quantile and the inverse do. A missing kernel,
# such as that of the determinant, shows in a real run alone: `--real`. <!-- tests/remedies/test_dtype_remedies.py -->

# %% [markdown]
# ### 24 NumPy does not know bf16
#
# **What you see.** `.numpy()` raises
# `Got unsupported ScalarType BFloat16`
#
# **The smallest program that does it.** We turn a prediction into an array, for a plot or a metric.

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
    prediction = model(x)
message = message_of(prediction.numpy)
print(message)
assert "Got unsupported ScalarType BFloat16" in message

# %% [markdown]
# **Why.** NumPy has no bf16. It does have fp16, so an fp16 prediction gives no message, and
# adding 1 to it stays in fp16.
#
# **The fix.** Convert what leaves the block to fp32. A list needs no conversion.

# %%
assert prediction.float().numpy().dtype == "float32"
assert prediction.tolist() == prediction.float().tolist()
assert (prediction.half().numpy() + 1).dtype == "float16"  # and so it goes on

# %% [markdown]
# **Notice it earlier.** As in section 18, let `forward` end with `.float()`.

# %% [markdown]
# ## Wrong without a message
#
# In this part everything runs, but the result is not what it should be.

# %% [markdown]
# ### 25 Weights get no gradient after an evaluation pass
#
# **What you see.** In older versions, some gradients are `None`, or `backward()` raises
# `element 0 of tensors does not require grad and does not have a grad_fn`
#
# **The smallest program that does it.** We run one pass without gradients and one with gradients,
# in the same block.


# %%
def evaluate_then_train():
    """The gradient after an evaluation pass in the same block."""
    model, _ = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            evaluated = model(x)
        trained = model(x)
    trained.sum().backward()
    return evaluated, model[0].weight.grad


evaluated, gradient = evaluate_then_train()
message = message_of(evaluated.sum().backward)  # what older versions said of `trained`
print(message)
assert "element 0 of tensors does not require grad and does not have a grad_fn" in message
assert torch.equal(gradient, x.expand(2, 2))  # right, in this version

# %% [markdown]
# **Why.** The pass without gradients put the cast of the weight into autocast's cache. That cast
# had no history, and older versions used it again for training. This [is
# repaired](https://github.com/pytorch/pytorch/pull/165068) in the versions that this page runs on: a cached cast has its history even if
# it was made without gradients. But the cache still holds *values* (section 26), and the casts of
# the evaluation pass take up memory until the block ends.
#
# **The fix.** Give the evaluation a block of its own, which works in older versions too.

# %%
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
    model(x)
with torch.autocast("cpu", dtype=torch.bfloat16):
    trained = model(x)
trained.sum().backward()
assert torch.equal(model[0].weight.grad, x.expand(2, 2))

# %% [markdown]
# **Notice it earlier.** After one step, assert that no trained parameter's `.grad` is `None`.

# %% [markdown]
# ### 26 The loss stands still because the whole loop is in one block
#
# **What you see.** On the same batch the loss is the same in every step, if all trained weights are
# cast and nothing in the model is random. Otherwise it may fall too slowly.
#
# **The smallest program that does it.** We put a second autocast block around the whole loop.


# %%
def losses_of(outer):
    """The losses of three steps inside the context manager `outer`."""
    model, optimizer = make()
    losses = []
    with outer:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), torch.ones(1, 2))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


stuck = losses_of(torch.autocast("cpu", dtype=torch.bfloat16))
print("one block around the loop:", *[f"{loss:.1f}" for loss in stuck])
assert stuck[0] == stuck[1] == stuck[2]

# %% [markdown]
# **Why.** The casts of trained weights are kept until the outermost block ends. The optimizer changes
# the weights, but the forward pass still uses the old casts, so the loss is 0.3 in all three steps.
# An outer block with `enabled=False` has the same effect.
#
# **The fix.** Use one block for each forward pass, and none around it. The casts also go stale if
# you load other values into the weights between two forward passes, such as averaged ones (EMA). The
# second pass would then still use the first ones. End the block before you swap them.

# %%
learning = losses_of(nullcontext())
print("one block a forward pass: ", *[f"{loss:.1f}" for loss in learning])
assert learning[0] == stuck[0]
assert learning[2] < learning[1] < learning[0]
assert losses_of(torch.autocast("cpu", enabled=False)) == stuck
model, _ = make()
other = {name: 2 * value for name, value in model.state_dict().items()}
with torch.autocast("cpu", dtype=torch.bfloat16):
    before = model(x)
    model.load_state_dict(other)
    assert torch.equal(model(x), before)  # the swap is not seen
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert not torch.equal(model(x), before)

# %% [markdown]
# **Notice it earlier.** Stop and look when two losses of the same batch are equal.

# %% [markdown]
# ### 27 A compiled model has other gradients
#
# **What you see.** With `torch.compile` the gradients differ, although the outputs are the same.
#
# **The smallest program that does it.** We compile an fp32 island, and call it inside a block. (The
# backend `aot_eager` needs no C++ compiler.)


# %%
def island(x, weight):
    with torch.autocast("cpu", enabled=False):
        return x @ weight


def called_in_a_block(function):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(torch.full((1, 2), 1.001), weight)


weight = torch.full((2, 1), 1.001, requires_grad=True)
compiled = torch.compile(island, backend="aot_eager")
gradients = {}
for name, function in {"eager": island, "compiled": compiled}.items():
    output = called_in_a_block(function)
    (gradient,) = torch.autograd.grad(output.sum(), weight)
    gradients[name] = gradient[0].item()
    print(f"{name:<10}output {output.item():.3f}  gradient {gradients[name]:.3f}")
assert (gradients["eager"], gradients["compiled"]) == (torch.tensor(1.001).item(), 1.0)

# %% [markdown]
# **Why.** The compiler plans the backward pass together with the forward pass, and assumes that the
# autocast around the call is on in `backward()` too. So the island's gradient went through bf16 and
# is 1.000, while in fp32 it is 1.001. CUDA graphs made with `torch.cuda.make_graphed_callables` [do
# so too](https://github.com/pytorch/pytorch/issues/120930), and [want
# `cache_enabled=False`](https://github.com/pytorch/pytorch/issues/71631).
#
# **The fix.** Put the block *inside* the compiled function, where the compiler sees its end. Or set
# `torch._functorch.config.backward_pass_autocast = "off"`, which is not a public interface.


# %%
@torch.compile(backend="aot_eager")
def with_its_block(x, weight):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return island(x, weight)


output = with_its_block(torch.full((1, 2), 1.001), weight)
(gradient,) = torch.autograd.grad(output.sum(), weight)
assert gradient[0].item() == gradients["eager"]
torch.compiler.reset()  # or `compiled` would keep the graph that it has
with torch._functorch.config.patch(backward_pass_autocast="off"):
    output = called_in_a_block(torch.compile(island, backend="aot_eager"))
(gradient,) = torch.autograd.grad(output.sum(), weight)
assert gradient[0].item() == gradients["eager"]

# %% [markdown]
# **Notice it earlier.** Before the long run, compare the gradients of one step, compiled and not
# compiled.

# %% [markdown]
# ### 28 The scaler runs with bf16 or the dtype is not the one you meant
#
# **What you see.** The loss scale grows and grows, or a run that was meant to be bf16 overflows.
#
# **The smallest program that does it.** We use bf16 with a scaler. Its growth interval is 1 (2000
# is the default), so that 150 steps are enough.


# %%
def scales_in(dtype, enabled):
    """The loss scale over 150 steps."""
    model, optimizer = make(lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1, enabled=enabled)
    scales = []
    for _ in range(150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


pointless = scales_in(torch.bfloat16, enabled=True)
_ = figures.loss_scales({"bf16 with a scaler": pointless, "fp16": scales_in(torch.float16, True)})
assert max(scales_in(torch.float16, enabled=True)) < 2.0**17
assert max(pointless) > 2.0**120
assert any(after < before for before, after in pairwise(pointless))

# %% [markdown]
# The picture shows both scales over 150 steps on a logarithmic axis. In fp16 the scale meets fp16's
# limit at once and stays near it. In bf16 it climbs in a straight line for about 110 steps to the end
# of fp32, where it too skips steps.
#
# **Why.** Two defaults meet here. A scaler is enabled unless you say otherwise, and in bf16 hardly
# anything stops it before fp32 ends. Autocast without `dtype=` is fp16 on a GPU, but bf16 on a CPU.
#
# **The fix.** Name the dtype in one place, and let it decide whether the scaler is enabled.

# %%
assert torch.get_autocast_dtype("cuda") is torch.float16
assert torch.get_autocast_dtype("cpu") is torch.bfloat16
for dtype in (torch.bfloat16, torch.float16):
    scaler = torch.amp.GradScaler("cpu", enabled=(dtype is torch.float16))
    assert scaler.is_enabled() is (dtype is torch.float16)
assert set(scales_in(torch.bfloat16, enabled=False)) == {1.0}

# %% [markdown]
# **Notice it earlier.** `ScaleLog` shows a scale that climbs on and on, as bf16's does above.

# %% [markdown]
# ### 29 Half precision weights stop moving
#
# **What you see.** The loss stops falling, while with fp32 weights it goes on. Or the parameters
# are NaN after the first step of Adam.
#
# **The smallest program that does it.** We load weights from a bf16 checkpoint with `assign=True`,
# and make a hundred small updates.


# %%
def after_updates(model):
    """The first weight after 100 updates of 1e-3, from 1 on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    for _ in range(100):
        optimizer.step()
    return next(model.parameters()).flatten()[0].item()


checkpoint = {name: value.bfloat16() for name, value in make()[0].state_dict().items()}
model, _ = make()
model.load_state_dict(checkpoint, assign=True)
print(f"weights in {model[0].weight.dtype}: 1 -> {after_updates(model):.2f}")
assert after_updates(model) == 1.0

# %% [markdown]
# **Why.** `assign=True` took over the dtype of the checkpoint. Just below 1, bf16 numbers are 2^-8
# apart, and a change of less than half of that is rounded away. The weights of norms start at exactly
# 1, so they may stay there while the loss falls, since smaller weights still move. So it goes with a
# weight decay that changes a weight by 1e-4 of it (`lr * weight_decay`), and with a moving average in bf16.
# Code that writes `self.W.data = self.W.to(x.dtype)` in a forward pass casts a parameter for good: cast
# a copy, or what the module gets. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
# The moments of Adam have the dtype of
# the parameters. In fp16 its epsilon of 1e-8 is 0, so in the first step (unless it is fused) a weight
# whose gradient is 0 is changed by 0/0, which is NaN:

# %%
half = nn.Parameter(torch.ones(1).half())
half.grad = torch.zeros(1).half()
adam = torch.optim.Adam([half])
adam.step()
assert adam.state[half]["exp_avg_sq"].dtype is torch.float16
assert half.isnan().all()
half.data.fill_(1.0)
torch.optim.Adam([half], fused=True).step()
assert half.item() == 1

# %% [markdown]
# **The fix.** Use fp32 weights. Without `assign`, loading copies into them, and `.float()` repairs
# a model that is in half precision already. Make the optimizer after that. If you round
# stochastically instead ([notebook 16](16_low_precision_state.ipynb)), round once in a step, after the
# decay *and* the update: a small decay in bf16 before it is lost.
#
# If an average of weights never changes, even where it should take over half of each weight, the
# cause is not rounding. Look for a list of dtypes without `torch.bfloat16`
# ([a report](https://github.com/lucidrains/ema-pytorch/pull/18)), which leaves all weights out, and
# ask `is_floating_point()` instead.

# %%
model, _ = make()
model.load_state_dict(checkpoint)
print(f"weights in {model[0].weight.dtype}: 1 -> {after_updates(model):.2f}")
assert abs(after_updates(model) - 0.9) < 1e-4
ones = torch.ones(3, dtype=torch.bfloat16)
assert torch.equal(
    ones * (1 - 1e-3 * 0.1), ones
)  # lr 1e-3, weight decay 0.1: nothing is left of it
assert 0.02 * ones[0] - 1e-4 < 0.02 * ones[0]  # a small weight moves
assert ones.lerp(0 * ones, 0.5)[0] == 0.5  # half of each weight is more than rounding
assert ones.dtype not in (torch.float32, torch.float16)
assert ones.is_floating_point()
assert torch.equal(ones.lerp(2 * ones, 1e-3), ones)  # nor of a step of a moving average

# %% [markdown]
# **Notice it earlier.** Use the assertion of section 9 right before you make the optimizer.

# %% [markdown]
# ### 30 Positions or counts are wrong beyond 256
#
# **What you see.** Often there is no message. A model that is good on short inputs fails on long
# ones, a count stops at 256, two timesteps of a diffusion model are the same, or non-maximum
# suppression (NMS) keeps boxes twice. A mask has a row too many on large images. A logged loss moves in
# steps or falls to 0. Or an index is out of range: 999 becomes 1000.
#
# **The smallest program that does it.** We compute the angles of rotary position embeddings, which
# are positions times frequencies. Here we write this as a matrix product, which autocast computes
# in bf16.


# %%
def angles(length):
    """Position times frequency, (length, 1); the frequency is 1."""
    return torch.arange(length, dtype=torch.float32)[:, None] @ torch.ones(1, 1)


with torch.autocast("cpu", dtype=torch.bfloat16):
    print(f"{angles(1024).unique().numel()} different angles for 1024 positions")
    assert angles(1024).unique().numel() == 513
one = torch.ones((), dtype=torch.bfloat16)
assert sum([one] * 1000, start=0 * one) == 256  # 256 + 1 is 256

# %% [markdown]
# **Why.** bf16 has 8 significant bits. It counts in steps of 1 up to 256, of 2 up to 512, and of 4 up
# to 1024. fp16 counts in steps of 1 up to 2048, and of 2 up to 4096. Beyond 256, neighbouring
# positions get the same angle, so 1024 positions have only 513 angles. This has happened [in
# well-known models](https://github.com/huggingface/transformers/pull/29285).
#
# The same happens without autocast where the code itself casts whole numbers, with
# `.to(torch.bfloat16)` or `dtype=`, or where `model.bfloat16()` casts a buffer of rates (`inv_freq`), for
# which `.float()` afterwards comes too late ([notebook 17](17_language_model.ipynb)). Cast the sines and
# cosines, and not the timestep. And it happens to coordinates with a large offset:
# [`batched_nms`](https://github.com/pytorch/vision/blob/main/torchvision/ops/boxes.py) may shift the
# boxes of class k by k times more than the largest coordinate.
# Near 53,000, numbers in fp16 are 32 apart and in bf16 256, so the edges of a box of 30 pixels are
# one spacing apart, or none. An `arange` in the dtype of fp16 boxes has no 2049, so a mask that is
# made of it gets a row too many ([a report](https://github.com/kornia/kornia/pull/4336)). `amp-lab
# diff` names the `arange` if one of the two versions casts the boxes; `--precision fp16` does not,
# since autocast leaves boxes as they are. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# A *sum of losses* in bf16 stops when a loss is less than half of the spacing. If its growth is what is
# logged, that falls to 0. The training itself is not affected. The sum has to be fp32: with `+=` it
# keeps its own dtype, whatever is added.
#
# A *table*, such as the schedule of a diffusion model, loses what counts as well: 0.9999 is 1 in bf16,
# and 1 - 1 is 0, so a division gives NaN, or no noise is added. Some code stores its table in the dtype
# of an input ([a report](https://github.com/huggingface/diffusers/pull/3005)), and every later call
# gets the rounded one. Keep the table in fp32, compute with it, and cast the result. An epsilon would hide
# the fault.
#
# **The fix.** Make an island, as in section 1; where the code itself casts, leave out the cast. Never
# keep indices, positions, coordinates, counters or sums of losses in half precision: call `.float()`
# on boxes *before* NMS. bf16 is no repair here, since it counts less far than fp16.

# %%
with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
    assert angles(1024).unique().numel() == 1024
assert torch.tensor([998, 999]).to(torch.bfloat16).tolist() == [1000, 1000]
rates = nn.Module()
rates.register_buffer("inv_freq", torch.tensor([1 / 3]))
assert rates.bfloat16().float().inv_freq != torch.tensor([1 / 3])
boxes = torch.tensor([53000.0, 53030.0])  # two edges, 30 pixels apart
assert boxes.half().diff() == 32
assert boxes.bfloat16().diff() == 0
assert torch.tensor([2048.0, 2049.0]).half().diff() == 0  # fp16 counts to 2048
assert torch.arange(2048, 2051, dtype=torch.float16).tolist() == [2048, 2048, 2050]
assert torch.arange(2048, 2051, dtype=torch.float32).tolist() == [2048, 2049, 2050]

# %%
loss, total, sum_in_fp32 = torch.tensor(1.5), torch.tensor(512.0).bfloat16(), torch.tensor(512.0)
total += loss.float()
sum_in_fp32 += loss.bfloat16()
assert total == 512
assert sum_in_fp32 == 513.5
schedule = torch.tensor([0.9999, 0.98])  # how much of an image is left after each step
assert (1 - schedule.bfloat16()).sqrt()[0] == 0
assert (1 - schedule).sqrt().bfloat16()[0] > 0

# %% [markdown]
# **Notice it earlier.** Compare the outputs in bf16 and in fp32 on the longest input you allow. `amp-lab
# xray` says where autocast casts whole numbers. <!-- tests/remedies/test_xray_remedies.py -->

# %% [markdown]
# ## Nothing breaks and nothing is gained
#
# In this part autocast is off, in another dtype than you meant, refused, or called by an old name. Or AMP
# is on, and you gain no time or memory.

# %% [markdown]
# ### 31 Autocast or the scaler is switched off
#
# **What you see.** One of these warnings appears, and is easily lost in a log:
# - `CUDA is not available or torch_xla is imported. Disabling autocast.`
# - `torch.cuda.amp.GradScaler is enabled, but CUDA is not available.`
# - `In CPU autocast, but the target dtype is not supported. Disabling autocast.`
#
# **The smallest program that does it.** A script for a GPU runs on a machine without one, or asks
# for a dtype that autocast does not know. (Where CUDA or ROCm is there, the first two do not warn.)

# %%
warned = {
    "autocast": warnings_of(lambda: torch.autocast("cuda")),
    "scaler": " ".join(warnings_of(lambda: torch.amp.GradScaler("cuda")).split()),
    "dtype": warnings_of(lambda: torch.autocast("cpu", dtype=torch.float32)).partition("\n")[0],
}
print(*warned.values(), sep="\n")
expected = {
    "autocast": "CUDA is not available or torch_xla is imported. Disabling autocast.",
    "scaler": "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.",
    "dtype": "In CPU autocast, but the target dtype is not supported. Disabling autocast.",
}
for what, message in expected.items():
    assert (message in warned[what]) is (what == "dtype" or not torch.cuda.is_available())
with mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False):
    assert not warnings_of(lambda: (torch.autocast("cuda"), torch.amp.GradScaler("cuda")))

# %% [markdown]
# **Why.** For `"cuda"` autocast and the scaler switch themselves off, and the run goes on in fp32.
# For `"xpu"` and `"mps"` both stay on, without a warning, and products of CPU tensors are fp32
# ([notebook 02](02_autocast_dtypes.ipynb)).
#
# **The fix.** Take the name from the device that the tensors are on, and refuse a device that is
# not there. `Precision` of this collection's package raises an error.

# %%
with torch.autocast(x.device.type, dtype=torch.bfloat16):
    assert (x @ x.T).dtype is torch.bfloat16
for name in ("xpu", "mps"):
    assert not warnings_of(lambda name=name: (torch.autocast(name), torch.amp.GradScaler(name)))
    assert torch.amp.GradScaler(name).is_enabled()
    with torch.autocast(name, dtype=torch.float16):
        assert torch.is_autocast_enabled(name)
        assert (x @ x.T).dtype is torch.float32
absent = "xpu" if torch.cuda.is_available() else "cuda"
try:
    Precision.BF16.autocast(absent)
    raised = False
except DeviceError:
    raised = True
assert raised

# %% [markdown]
# **Notice it earlier.** Use `warnings.simplefilter("error")` in tests, and print the dtype of one
# output.

# %% [markdown]
# ### 32 A thread runs without autocast or in another dtype
#
# **What you see.** Code that runs a model in threads may be as slow as in fp32, or use the wrong half
# precision.
#
# **The smallest program that does it.** We start two threads, each inside an fp16 block. The second
# enters autocast again, but does not say in which dtype.


# %%
def in_a_thread(function):
    """What `function()` returns when another thread calls it inside an fp16 block."""
    results = []
    with torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        thread.join()
    return results[0]


def enter_again(**options):
    with torch.autocast("cpu", **options):
        return (x @ x.T).dtype


found = in_a_thread(lambda: (x @ x.T).dtype), in_a_thread(enter_again)
print("in the thread:", *found)
assert found == (torch.float32, torch.bfloat16)

# %% [markdown]
# **Why.** Autocast's switch and its dtype both belong to a thread, and a new thread has the
# defaults. On several GPUs `nn.DataParallel` has a thread for each. It enters autocast again there,
# but leaves out the dtype, as `enter_again()` does. What was meant to be bf16 therefore runs in fp16.
# Its source shows it:

# %%
source = inspect.getsource(nn.parallel.parallel_apply)
(block,) = re.findall(r"autocast\([^)]*enabled=autocast_enabled[^)]*\)", source)
print(block)
assert "dtype" not in block
assert torch.get_autocast_dtype("cuda") is torch.float16

# %% [markdown]
# **The fix.** Enter autocast with its dtype in the function that the thread runs, or use it as a
# decorator of `forward`. Replace `DataParallel` by DDP, which has processes
# ([notebook 11](11_scale_out.ipynb)).

# %%
assert in_a_thread(lambda: enter_again(dtype=torch.float16)) is torch.float16
decorated = torch.autocast("cpu", dtype=torch.float16)(lambda: (x @ x.T).dtype)
assert in_a_thread(decorated) is torch.float16

# %% [markdown]
# **Notice it earlier.** In `forward`, assert `torch.is_autocast_enabled(device.type)`, and the dtype
# that `torch.get_autocast_dtype(device.type)` gives.

# %% [markdown]
# ### 33 Autocast makes the model no faster
#
# **What you see.** A step takes as long as before, or longer.
#
# **The smallest program that does it.** We use a network of five small layers. `CountOps` counts
# the ops that are not views.


# %%
class CountOps(TorchDispatchMode):
    """While active, counts ops, and how many of them are casts; views do not count."""

    ops = casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += not func.is_view
        self.casts += func.overloadpacket.__name__ in ("_to_copy", "to")  # "to": in inference mode
        return func(*args, **(kwargs or {}))


small, _ = make(*[nn.Linear(16, 16) for _ in range(5)])
inputs = torch.ones(4, 16)
with CountOps() as plain:
    small(inputs)
with CountOps() as amp, torch.autocast("cpu", dtype=torch.bfloat16):
    small(inputs)
print(f"fp32: {plain.ops} ops; autocast: {amp.ops} ops, {amp.casts} of them casts")
assert (plain.ops, amp.ops, amp.casts) == (5, 16, 11)

# %% [markdown]
# **Why.** Each forward pass casts five weights, five biases and the input, so 5 ops became 16. This
# pays only from some size of the products on ([notebook
# 10](10_speed_ladder.ipynb#From-which-size-on-does-AMP-pay?)). Seven other reasons:
# - The hardware has no fast path for the dtype ([your hardware](../docs/hardware.md)).
# - The limit is the data loader or the launching of kernels, and not arithmetic ([notebook
#   10](10_speed_ladder.ipynb#Where-AMP-loses)).
# - Each use of a weight casts it anew. So it is under `torch.inference_mode()`, where a server or a
#   sampler of many steps has one block around all of them
#   ([section 34](#34-The-memory-is-not-halved) counts). Cast the weights once, and the inputs too,
#   or take `torch.no_grad()` ([notebook 18](18_inference_and_export.ipynb#Ways-to-run-it)).
# - Large ops stay in fp32. `amp-lab xray` lists them ([notebook 09](09_xray_your_model.ipynb)).
#   For one product of an island on CUDA,
#   [`torch.mm(…, out_dtype=torch.float32)`](https://github.com/pytorch/torchtitan/issues/4273) keeps
#   16-bit inputs and returns fp32, but has no backward pass of its own.
# - Sizes are not multiples of 8, or of 16 in FP8
#   ([section 44](#44-A-size-is-not-a-multiple-of-16-or-8)).
# - The "fp32" you compare with is really TF32
#   ([section 37](#37-TF32-is-set-in-the-old-and-in-the-new-way)).
# - The clock was read before the GPU had finished ([notebook
#   04](04_fp32_vs_amp.ipynb#How-not-to-measure)).
#
# **The fix.** Use large products in a dtype that the device accelerates; the command [`amp-lab
# doctor`](../docs/hardware.md) says which. We time the forward pass of a linear layer, small and
# large:


# %% tags=["nbval-ignore-output"]
def forward(layer, batch, enabled):
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
        return layer(batch)


for width in (16, 512):
    layer, batch = nn.Linear(width, width).to(device), torch.ones(width, width, device=device)
    steps = {p: partial(forward, layer, batch, p == "bf16") for p in ("fp32", "bf16")}
    timed = compare(steps, device=device, budget_s=2)
    print(f"width {width}:", timed, sep="\n")
assert forward(layer, batch, enabled=True).dtype is torch.bfloat16

# %% [markdown]
# The last column is the speed-up, with its interval. Here the small layer was slower in bf16, where
# it needs casts, and the large one was faster. Whether a large layer gains depends on the hardware.
#
# **Notice it earlier.** Measure one step in each precision before the long run.
# [Notebook 04](04_fp32_vs_amp.ipynb) shows how.

# %% [markdown]
# ### 34 The memory is not halved
#
# **What you see.** The peak memory is the same as in fp32, or higher, in training or in inference.
#
# **The smallest program that does it.** The weights are large, and the batch is a single example.
# `kept_bytes` adds up what the forward pass keeps for the backward pass, beside the parameters.


# %%
def kept_bytes(model, batch, enabled):
    """Bytes of the tensors that are kept for backward, each storage once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled),
    ):
        loss = model(batch).square().mean()
    assert loss.requires_grad  # the graph is alive, so no storage was used twice
    return sum(s.nbytes() for address, s in kept.items() if address not in parameters)


wide, _ = make(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
single = [kept_bytes(wide, torch.ones(1, 512), enabled) for enabled in (False, True)]
print(f"batch of 1: fp32 {single[0] / 1024:.0f} KiB, autocast {single[1] / 1024:.0f} KiB")
assert single[1] > 50 * single[0]

# %% [markdown]
# **Why.** Autocast narrows *activations*. The weights, the gradients and the two moments of Adam stay
# fp32 and take 16 bytes for each parameter. The casts of the weights take 2 bytes more, and those
# that a gradient needs are kept for the backward pass. With many weights and few activations, that is
# more than before: 515 KiB here in place of 6.
#
# Another cause is a parameter in fp32 that meets an activation outside of the ops that autocast
# casts, such as a gate with a number for each channel. The product is fp32, and so is what follows,
# up to the next op that autocast casts. Cast the parameter: `h * gate.to(h.dtype)`.
#
# And the cast of an *expanded* tensor is written out in full, though the tensor itself is not. Cast it
# before you expand it.
#
# **The fix.** AMP usually saves memory on a large batch, so make the batch larger. With 2048 examples
# it keeps 6.5 MiB in place of 12. Other means are gradient checkpointing, sharding, or an optimizer
# with less state. <!-- tests/remedies/test_memory_remedies.py -->

# %%
batch = torch.ones(2048, 512)
fp32, amp = (kept_bytes(wide, batch, enabled) for enabled in (False, True))
print(f"batch of 2048: fp32 {fp32 / 2**20:.1f} MiB, autocast {amp / 2**20:.1f} MiB")
assert 0.5 < amp / fp32 < 0.6
adam = torch.optim.Adam(wide.parameters())
wide(batch).sum().backward()
adam.step()
moments = [t for state in adam.state.values() for t in state.values() if t.dim() > 0]
always = [*wide.parameters(), *(p.grad for p in wide.parameters()), *moments]
assert sum(t.nbytes for t in always) == 16 * sum(p.numel() for p in wide.parameters())
h, gate = torch.ones(1, 2, dtype=torch.bfloat16), nn.Parameter(torch.ones(2))
assert (h * gate).dtype is torch.float32
assert (h * gate.to(h.dtype)).dtype is torch.bfloat16
assert gate.expand(1024, 2).to(h.dtype).untyped_storage().nbytes() == 1024 * 2 * 2
assert gate.to(h.dtype).expand(1024, 2).untyped_storage().nbytes() == 2 * 2

# %% [markdown]
# In inference under `no_grad`, the block keeps the casts of weights that require a gradient until
# it ends. If all weights are cast, that is half as much again as the fp32 weights take. Use
# `torch.inference_mode()`, which keeps none, or an autocast with `cache_enabled=False`. Or cast the model once, `model.bfloat16()`, which
# halves the weights ([notebook 18](18_inference_and_export.ipynb#Ways-to-run-it)). We count the
# casts of two passes:


# %%
def casts_of_two_passes(mode):
    """How many casts two passes through a linear layer make inside one block."""
    layer, _ = make()
    with mode, torch.autocast("cpu", dtype=torch.bfloat16), CountOps() as counted:
        layer(x)
        layer(x)
    return counted.casts


held = casts_of_two_passes(torch.no_grad())
released = casts_of_two_passes(torch.inference_mode())
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
    with CountOps() as counted:
        layer, _ = make()
        layer(x), layer(x)
    assert counted.casts == released
print(f"casts: {held} under no_grad, {released} under inference_mode")
assert held == 4  # weight and bias once, the input twice
assert released == 6  # all of them twice, since none was kept
assert all(p.dtype is torch.bfloat16 for p in make()[0].bfloat16().parameters())

# %% [markdown]
# **Notice it earlier.** Count before you run: with Adam 16 bytes a parameter, under autocast two
# more for the casts, plus the activations. `amp-lab memory` does it for your model, and for inference with `--eval`. <!-- tests/tracing/test_inference_memory.py -->

# %% [markdown]
# ### 35 Old names warn
#
# **What you see.** One of these warnings appears, or an import fails:
# - `` `torch.cuda.amp.autocast(args...)` is deprecated. ``
# - `` `torch.cuda.amp.GradScaler(args...)` is deprecated. ``
# - `` `torch.cuda.amp.custom_fwd(args...)` is deprecated. ``, or `custom_bwd`
# - `ImportError: cannot import name 'amp' from 'apex'`
# - `full(): argument 'fill_value' (position 2) must be Number, not str`, after the warning was half
#   followed
#
# **The smallest program that does it.** We use the old names. The last line gives a device to the
# old class.

# %%
old_autocast = warnings_of(lambda: torch.cuda.amp.autocast(enabled=False))
old_scaler = warnings_of(lambda: torch.cuda.amp.GradScaler(enabled=False))
old_decorator = warnings_of(lambda: torch.cuda.amp.custom_fwd(make))
print(old_autocast, old_scaler, old_decorator, sep="\n")
assert "`torch.cuda.amp.autocast(args...)` is deprecated." in old_autocast
assert "`torch.cuda.amp.GradScaler(args...)` is deprecated." in old_scaler
assert "`torch.cuda.amp.custom_fwd(args...)` is deprecated." in old_decorator
with warnings.catch_warnings(action="ignore"):
    message = message_of(lambda: torch.cpu.amp.GradScaler("cpu").scale(torch.ones(1)))
assert "full(): argument 'fill_value' (position 2) must be Number, not str" in message

# %% [markdown]
# **Why.** The functions have moved to `torch.amp`, which serves several kinds of devices. The names
# in `torch.cuda.amp` still work, for the device `"cuda"`. The first argument of the old `GradScaler`
# is the scale and not a device, so a device stands where a number should. Apex [removed its
# `amp`](https://github.com/NVIDIA/apex/pull/1896) in 2025.
#
# **The fix.** Write `torch.autocast("cuda", dtype=…)`, `torch.amp.GradScaler("cuda")` and
# `@torch.amp.custom_fwd(device_type="cuda")`, also in place of `apex.amp`. `amp-lab migrate`
# rewrites the names of torch, and says for the lines of Apex what to write ([notebook
# 13](13_from_apex.ipynb)). If a library imports `apex.amp`, as [older versions of
# transformers](https://github.com/huggingface/transformers/issues/38095) do, update the library.

# %%
assert warnings_of(lambda: torch.autocast("cuda", dtype=torch.float16, enabled=False)) == ""
assert warnings_of(lambda: torch.amp.GradScaler("cuda", enabled=False)) == ""
assert warnings_of(lambda: torch.amp.custom_fwd(make, device_type="cuda")) == ""
with warnings.catch_warnings(action="ignore"):
    assert torch.cuda.amp.autocast(enabled=False).device == "cuda"

# %% [markdown]
# **Notice it earlier.** Run the tests with `python -W error::FutureWarning`.

# %% [markdown]
# ### 36 Autocast refuses the device or its dtype
#
# **What you see.** The line that makes the block raises one of these:
# - `Current CUDA Device does not support bfloat16. Please switch dtype to float16.`
# - `User specified an unsupported autocast device_type 'meta'`, or another type in its place
# - `unsupported scalarType`
#
# Or a matmul in the block raises `CUBLAS_STATUS_NOT_SUPPORTED`
# when calling a function with `CUDA_R_16BF` among its arguments.
#
# **The smallest program that does it.** We ask for bf16 on a card for which PyTorch says that it has
# none. There may be no such card here, so we replace two functions of PyTorch. Then
# a block takes the type from its input, which is on `meta`. The island of section 1 does so without
# a dtype.


# %%
@contextmanager
def card_without_bf16():
    """Inside: PyTorch believes that CUDA is here, on a card that cannot hold bf16."""
    common = torch.cuda.amp.common
    with (
        mock.patch.object(common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=False),
    ):
        yield


with card_without_bf16():
    no_bf16 = message_of(lambda: torch.autocast("cuda", dtype=torch.bfloat16))
on_meta, meta_x = nn.Linear(2, 2, device="meta"), x.to("meta")
no_autocast = message_of(lambda: torch.autocast(meta_x.device.type, dtype=torch.bfloat16))
no_dtype = message_of(lambda: Island(on_meta)(meta_x))
print(no_bf16, no_autocast, no_dtype, sep="\n")
assert no_bf16.endswith("does not support bfloat16. Please switch dtype to float16.")
assert no_autocast == "User specified an unsupported autocast device_type 'meta'"
assert no_dtype == "unsupported scalarType"  # there is no default to look up

# %% [markdown]
# **Why.** NVIDIA's GPUs have bf16 [from capability 8
# on](https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py), which is Ampere. PyTorch
# asks whether the card can hold a bf16 tensor, which may be emulated
# ([`is_bf16_supported`](https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_bf16_supported.html)).
# So bf16 may not pay even if there is no message, and on a P100 cuBLAS [refused its
# matmuls](https://github.com/pytorch/pytorch/issues/57773). `meta`, like some other types, has no
# autocast and no dtype for it, and even a block that switches autocast off is refused. On AMD's
# GPUs the type is [`"cuda"`](https://docs.pytorch.org/docs/stable/notes/hip.html), and `"hip"` has no
# autocast.
#
# **The fix.** Use fp16 on such a card, as the message says, and train with a scaler
# ([notebook 19](19_choose_your_precision.ipynb#The-decision) has the choice for each kind of card).
# If the type comes from a tensor, ask whether it has autocast before you make a block.

# %%
with card_without_bf16():
    assert torch.autocast("cuda", dtype=torch.float16).fast_dtype is torch.float16  # no error


def fp32_block(device_type):
    """Autocast off, where there is one to be switched off."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


for inputs, layer in ((meta_x, on_meta), (x, nn.Linear(2, 2))):
    with torch.autocast("cpu", dtype=torch.bfloat16), fp32_block(inputs.device.type):
        assert layer(inputs).dtype is torch.float32
assert not torch.amp.is_autocast_available("hip")

# %% [markdown]
# **Notice it earlier.** Before the first run, `recommend_precision(device)` of this collection's
# package measures what a device is fast in. <!-- tests/core/test_device.py -->

# %% [markdown]
# ## Hardware, several devices and the compiler
#
# The messages of this part depend on the device, on the processes that share the work, or on the
# compiler.

# %% [markdown]
# ### 37 TF32 is set in the old and in the new way
#
# **What you see.** A message contains
# `you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul.`
# It may come from code that only reads the setting, such as
# [`torch.compile`](https://github.com/pytorch/pytorch/issues/166387). Or there is no message, and
# fp32 results of two GPUs differ: each product in a sum by up to a thousandth, and the sum by more
# where it cancels.
#
# **The smallest program that does it.** One line sets TF32 by the old name, another by the new one,
# and the third reads it. This happens when a library and your script each have their own.


# %%
def read_tf32_after_both():
    """Set TF32 in the old and in the new way, and read it; leaves it off."""
    matmul = torch.backends.cuda.matmul
    try:
        matmul.allow_tf32 = True
        matmul.fp32_precision = "ieee"
        return matmul.allow_tf32
    finally:
        matmul.allow_tf32 = False


message = message_of(read_tf32_after_both)
print(message)
assert (
    "you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul"
    in message
)

# %% [markdown]
# **Why.** Since Ampere, NVIDIA's GPUs can round the inputs of fp32 products to
# [TF32](https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices),
# which has the range of fp32 and 11 significant bits. PyTorch has two sets of names for that
# switch, and refuses to answer when they contradict each other.
#
# **The fix.** Set the mode of products with `torch.set_float32_matmul_precision`, and that of
# convolutions with `torch.backends.cudnn.allow_tf32`. Whoever changes the new name, `fp32_precision`,
# by itself may get this error when anyone reads an old one. [Notebook
# 19](19_choose_your_precision.ipynb#What-fp32-means) shows what each mode changes.

# %%
matmul = torch.backends.cuda.matmul
for mode, new_name, is_tf32 in (("high", "tf32", True), ("highest", "ieee", False)):
    torch.set_float32_matmul_precision(mode)
    assert (matmul.fp32_precision, matmul.allow_tf32) == (new_name, is_tf32)
assert 2 * 2**-11 < 0.001  # two factors, each rounded to 11 bits, against fp32's 24

# %% [markdown]
# **Notice it earlier.** Search your code and your libraries for `allow_tf32` and `fp32_precision`, and
# print the setting when a run starts.

# %% [markdown]
# ### 38 An FFT is refused in half precision
#
# **What you see.** The transform raises one of these:
# - `cuFFT only supports dimensions whose sizes are powers of two when computing in half precision`, on CUDA
#   ([its source](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/CuFFTPlanCache.h))
# - `Unsupported dtype Half`, on the CPU
#
# **The smallest program that does it.** We take the spectrum of 100 fp16 numbers.
# A GPU runs the same line, if one is
# here [*(not yet seen on a GPU)*](../data/results/README.md "notebooks").

# %%
signal = torch.ones(100)
message = message_of(lambda: torch.fft.rfft(signal.half()))
print(message)
assert message == "Unsupported dtype Half"
if torch.cuda.is_available():
    on_cuda = message_of(lambda: torch.fft.rfft(signal.half().cuda()))
    assert "cuFFT only supports dimensions whose sizes are powers of two" in on_cuda

# %% [markdown]
# **Why.** On CUDA no transform is on autocast's list, so it gets whatever the layer before it
# returned. cuFFT has half-precision kernels only for powers of two, and 100 is not one. The CPU has
# none at all, but autocast casts there for all but `hfft2`, `hfftn` and their inverses.
#
# `torch.stft` calls the same kernels. A CPU words it differently there: `MKL FFT doesn't support tensors
# of type: Half`, or without MKL `expected scalar type Double but found Half`. On CUDA the complex
# numbers in 16 bits (`ComplexHalf`) that come out have no matmul. <!-- tests/tracing/test_kernel_limits.py -->
#
# **The fix.** Call `.float()` before the transform. On CUDA you can also pad to a power of two. In a
# model that was cast by `.half()` the window and the filters are buffers, and were cast too: call
# `.float()` on the part that makes the features, *after* `model.half()`, give it an fp32 signal, and
# cast the features to the dtype of the next layer.
# (For bf16, older versions raise
# [`Unsupported dtype BFloat16`](https://github.com/pytorch/pytorch/issues/117844) on CUDA too, for
# any size.)

# %%
assert torch.fft.rfft(signal.half().float()).dtype is torch.complex64
with torch.autocast("cpu", dtype=torch.float16):
    assert torch.fft.rfft(signal.half()).dtype is torch.complex64
kinds = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
transforms = {f"aten::fft_{kind}{dims}" for kind in kinds for dims in ("", "2", "n")}
missing = transforms.difference(
    torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
)
assert missing == {f"aten::fft_{name}" for name in ("hfft2", "hfftn", "ihfft2", "ihfftn")}
listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
assert not any("fft" in op for op in listed)


# %%
class Features(nn.Module):
    """The power of a short-time Fourier transform, through filters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.ones(16))
        self.register_buffer("filters", torch.ones(2, 9))

    def forward(self, x):
        spectrum = torch.stft(x.float(), 16, window=self.window, return_complex=True)
        return self.filters @ spectrum.abs().square()


model = nn.ModuleDict({"features": Features(), "encoder": nn.Conv1d(2, 2, 1)}).half()
assert "the same dtype" in message_of(lambda: model["features"](signal.half()))  # the filters
model["features"].float()
features = model["features"](signal.half()).to(model["encoder"].weight.dtype)
assert model["encoder"](features).dtype is torch.float16
assert torch.fft.rfft(torch.ones(400)).abs().square().max() > 65504

# %% [markdown]
# **Notice it earlier.** Search the model for `torch.fft` and `stft`, and put these calls into an
# fp32 island, together with a matrix product that follows, such as that of a mel spectrogram: the
# power of a spectrum may exceed 65504, as that of 400 ones does.

# %% [markdown]
# ### 39 MPS has no float64
#
# **What you see.** On a Mac, moving a tensor to the device raises
# `Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.`
# It goes on with `Please use float32 instead.` We quote it from PyTorch's
# [source](https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/EmptyTensor.cpp).
#
# **The smallest program that does it.** We send a NumPy array to the device. Nobody asked for
# float64, but it is NumPy's default.

# %%
weights = torch.from_numpy(np.ones(3))
print(weights.dtype)
assert weights.dtype is torch.float64
if torch.backends.mps.is_available():
    assert "the MPS framework doesn't support float64" in message_of(lambda: weights.to("mps"))

# %% [markdown]
# **Why.** Apple's framework does not support float64. It can slip in with all that is computed with
# NumPy, such as class weights or targets. The tensor need not be yours:
# `GradScaler.unscale_` made one in older versions ([issue
# 142397](https://github.com/pytorch/pytorch/issues/142397)).
#
# **The fix.** Convert to fp32 on the host, before you move the tensor.


# %%
def to_fp32_device(tensor, device):
    """The tensor on the device, and in fp32 if it was float64."""
    return (tensor.float() if tensor.dtype is torch.float64 else tensor).to(device)


assert to_fp32_device(weights, device).dtype is torch.float32
assert to_fp32_device(torch.tensor([1]), device).dtype is torch.int64

# %% [markdown]
# **Notice it earlier.** Assert in the data set that no tensor is float64. That check runs on any
# machine.

# %% [markdown]
# ### 40 DDP refuses the model or its step
#
# **What you see.** DDP raises one of these:
# - `SyncBatchNorm layers only work with GPU modules`
# - `Expected to have finished reduction in the prior iteration before starting a new one.`
#
# FSDP2 raises `FSDP expects uniform original parameter dtype but got`, and the older FSDP
# `Must flatten tensors with uniform dtype but got`
# ([a report](https://github.com/huggingface/trl/issues/1723)).
#
# Or there is no message, but the ranks drift apart: their losses differ, or their scalers skip
# different steps.
#
# **The smallest program that does it.** A process group of one process is enough. The first model
# has synchronised batch normalisation and is on the CPU. The second has a layer that its forward
# pass does not use. The third has trained weights in two dtypes.


# %%
@contextmanager
def group_of_one():
    """Inside: a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Unused(nn.Module):
    """Two layers, of which only the first one is used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


# %% [markdown]
# The second model fails in its second step, and the third in its forward pass:


# %%
def two_steps(**options):
    model = DistributedDataParallel(Unused(), **options)
    for _ in range(2):
        model(x).sum().backward()


with group_of_one():
    norms = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    )
    messages = [message_of(lambda: DistributedDataParallel(norms)), message_of(two_steps)]
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(mixed, mesh=mesh)
    messages.append(message_of(lambda: mixed(x)).partition(" {")[0])
print(*[message.partition(" This error")[0] for message in messages], sep="\n")
assert "SyncBatchNorm layers only work with GPU modules" in messages[0]
assert (
    "Expected to have finished reduction in the prior iteration before starting a new one."
    in messages[1]
)
assert "FSDP expects uniform original parameter dtype but got" in messages[2]

# %% [markdown]
# **Why.** DDP refuses `SyncBatchNorm` on a CPU. It averages a bucket [when each of its
# gradients is ready](https://docs.pytorch.org/docs/stable/notes/ddp.html), so a parameter that
# never gets one leaves it waiting. FSDP2 wants one dtype for all
# trained weights of a `fully_shard`. (A frozen base in bf16 with adapters in fp32 is not
# refused.) Ranks drift apart without a message when a gradient changes after the average, or when
# the scaler checks it before. [Notebook 11](11_scale_out.ipynb) shows both. And they do when the
# scalers have different scales, such as after one rank alone has loaded its state: each rank divides
# the same average by its own scale. With accumulation, put
# forward *and* backward of all batches but the last one into
# [`model.no_sync()`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
#
# **The fix.** On a CPU, test with plain batch normalisation. Take unused layers out, or set
# [`find_unused_parameters=True`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
# which costs a walk through the graph in each step. For FSDP, cast the trained weights to fp32
# (in bf16 there are no [fp32 master
# weights](../docs/several_machines.md#show-the-dtype-of-each-parameter)), or call `fully_shard` on each module
# of another dtype first. Give all ranks the scaler's state of one.

# %%
with group_of_one():
    two_steps(find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (1,))
    one_dtype = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()).float()
    fully_shard(one_dtype, mesh=mesh)
    assert one_dtype(x).dtype is torch.float32
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    for module in (own[1], own):
        fully_shard(module, mesh=mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own(x).dtype is torch.bfloat16
    base = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    frozen = nn.Sequential(nn.Linear(2, 2), base)
    fully_shard(frozen, mesh=mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert frozen(x).dtype is torch.bfloat16

# %%
with group_of_one():
    states = [torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()]  # of rank 0
    dist.broadcast_object_list(states, src=0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(states[0])
    assert scaler.get_scale() == 1024

# %%
scales = torch.tensor([1024.0, 2048.0])  # of two ranks, each with a gradient of 1
assert (scales.mean() / scales).tolist() == [1.5, 0.75]
assert not dist.is_initialized()

# %% [markdown]
# **Notice it earlier.** Run two steps in a process group of one, as here, in a unit test.

# %% [markdown]
# ### 41 The scaler is inside a compiled function
#
# **What you see.** With `fullgraph=True`, the compiled function raises
# `Attempted to inline function marked as skipped`
# Without it there is no message, but the graph breaks there.
#
# **The smallest program that does it.** We compile a function that scales the loss.

# %%
scaler = torch.amp.GradScaler("cpu")
whole = torch.compile(lambda h: scaler.scale(h.sum()), backend="aot_eager", fullgraph=True)
message = message_of(lambda: whole(x))
print(message.splitlines()[0])
assert "Attempted to inline function marked as skipped" in message
assert "grad_scaler.py" in message
broken = torch._dynamo.explain(lambda h: scaler.scale(h.sum()))(x)
assert len(broken.break_reasons) == 1

# %% [markdown]
# **Why.** The compiler has been told to skip the file that defines the scaler, as the message goes on
# to say.
#
# **The fix.** Compile the model, or the function that computes the loss, including autocast. Leave
# `scale`, `step` and `update` outside.

# %%
loss_of = torch.compile(lambda h: h.sum(), backend="aot_eager", fullgraph=True)
assert scaler.scale(loss_of(x)) == 3 * scaler.get_scale()

# %% [markdown]
# **Notice it earlier.** Compile with `fullgraph=True` once, in a test, and read what it says.

# %% [markdown]
# ### 42 An LSTM fails under autocast on the CPU
#
# **What you see.** `nn.LSTM` on an fp32 input under `torch.autocast("cpu")` raises
# `could not create a primitive descriptor for the LSTM forward propagation primitive`
# The same program may run on another machine. `nn.GRU` and `nn.RNN` run. <!-- tests/core/test_cpu.py -->
#
# **The smallest program that does it.** We run an LSTM in both 16-bit formats. fp16 fails wherever
# oneDNN trains it; whether bf16 fails depends on your CPU. <!-- tests/core/test_cpu.py -->


# %% tags=["nbval-ignore-output"]
def outcome_of(dtype):
    """What becomes of an LSTM under autocast to `dtype` on this CPU."""
    layer, sequence = nn.LSTM(4, 8), torch.ones(3, 2, 4)  # (T, B, C)
    try:
        with torch.autocast("cpu", dtype=dtype):
            layer(sequence)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "runs"


for dtype in (torch.bfloat16, torch.float16):
    outcome = outcome_of(dtype)
    print(f"{dtype}: {outcome}")
    message = "could not create a primitive descriptor for the LSTM forward propagation primitive"
    assert outcome in ("runs", message)

# %% [markdown]
# **Why.** For an LSTM in fp32, torch picks the kernel of oneDNN, a library that comes with it. After
# that, autocast casts the tensors to 16 bits. On x86 oneDNN has an LSTM in bf16 from AVX-512 on, and
# none that trains in fp16 ([measured on one CPU, limited to older
# instructions](../data/results/cpu-ops-xeon-2-cores.json)). <!-- tests/core/test_cpu.py -->
#
# **The fix.** Run the layer in an fp32 region: switch autocast off around it, and give it fp32.

# %%
layer, sequence = nn.LSTM(4, 8), torch.ones(3, 2, 4)  # (T, B, C)


def in_fp32(sequence):
    with torch.autocast("cpu", enabled=False):
        return layer(sequence.float())


for dtype in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        output, _ = in_fp32(sequence)
    output.sum().backward()
    assert output.dtype is torch.float32
    assert layer.weight_ih_l0.grad.isfinite().all()

# %% [markdown]
# **Notice it earlier.** `amp-lab doctor` says where an LSTM fails on your CPU, and `amp-lab xray
# --device cpu` names the layers of your model that will. <!-- tests/core/test_cpu.py -->

# %% [markdown]
# ### 43 Flash attention refuses fp32
#
# **What you see.** The package `flash-attn`, or PyTorch's copy of its kernel, raises
# `FlashAttention only support fp16 and bf16 data type`
# We quote it from its
# [source](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp).
#
# **The smallest program that does it.** The kernel needs a GPU, but how q becomes fp32 can be seen
# anywhere. We multiply it by cosines in fp32, as a rotation does, inside an autocast block.

# %%
cosines = torch.ones(2)  # fp32, as rotary embeddings often keep them
model, _ = make()
with torch.autocast("cpu", dtype=torch.bfloat16):
    v = model(x)[None, None]  # (1, 1, 1, 2): batch, heads, tokens, features
    q = v * cosines
print(f"v is {v.dtype}, q is {q.dtype}")
assert v.dtype is torch.bfloat16
assert q.dtype is torch.float32

# %% [markdown]
# **Why.** This kernel takes 16 bits alone, and autocast casts for PyTorch's ops, not for a function of
# another package. Its inputs are fp32 if the model was loaded in fp32 and runs without
# autocast ([an example](https://github.com/QwenLM/Qwen3/issues/406)), or if a norm or a rotation
# before the kernel returns fp32.
#
# **The fix.** Cast q, k and v to 16 bits right before the call. Or call PyTorch's own attention, for
# which autocast casts. A model that only runs inference can be loaded in bf16.

# %%
q_cast = q.to(v.dtype)
assert q_cast.dtype is torch.bfloat16
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert F.scaled_dot_product_attention(q, q, v).dtype is torch.bfloat16

# %% [markdown]
# **Notice it earlier.** Assert `q.dtype is k.dtype is v.dtype` before the call, and print the dtype once.

# %% [markdown]
# ### 44 A size is not a multiple of 16 or 8
#
# **What you see.** A matrix product in FP8 raises one of these, on a GPU or when it is compiled:
# - `Expected trailing dimension of mat1 to be divisible by 16`, or `mat_a` in place of `mat1`
# - `Expected self.size(1) to be divisible by 16, but got self.size(1)=`, followed by the size
# - `Expected both dimensions of mat2 to be divisible by 16`
#
# In fp16 and bf16 there is no message, but the product may be slower than it could be.
#
# **The smallest program that does it.** We multiply in FP8 on the device `meta`, whose tensors have
# no data. PyTorch checks their sizes by the rules of CUDA. First the inner size is 100, then there
# are as many columns as GPT-2 has tokens in its vocabulary, 50257. (The first message is that of
# [the kernel itself](https://github.com/pytorch/ao/issues/571).)


# %%
def shape_in_fp8(rows, inner, columns):
    """The shape of a product of (rows, inner) and (inner, columns) in FP8, without data."""
    left = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device="meta")
    right = torch.empty(columns, inner, dtype=torch.float8_e4m3fn, device="meta")
    one = torch.ones((), device="meta")  # the scale of either
    return torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16).shape


inner_message = message_of(lambda: shape_in_fp8(32, 100, 64))
columns_message = message_of(lambda: shape_in_fp8(32, 64, 50257))
print(inner_message, columns_message, sep="\n")
assert "Expected self.size(1) to be divisible by 16, but got self.size(1)=" in inner_message
assert "Expected both dimensions of mat2 to be divisible by 16" in columns_message

# %% [markdown]
# **Why.** Tensor cores take pieces of 16 bytes: 16 numbers in FP8, 8 in fp16 and bf16, 4 in TF32.
# PyTorch's FP8 products refuse other inner sizes and numbers of columns. In 16 bits other sizes run
# too, but multiples of 16 bytes are more efficient, and on an A100 those of 128 bytes, which are 64
# numbers ([NVIDIA's
# guide](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#requirements-tc)).
# The sizes of a linear layer are its inputs, its outputs, and the rows, which are batch x tokens:
# the gradient of the weight sums over them.
#
# **The fix.** Pad. nanoGPT makes GPT-2's vocabulary of 50257 a [multiple of
# 64](https://github.com/karpathy/nanoGPT/blob/master/model.py), which is 50304. No token has the new
# numbers, and the logits of the others stay the same. Leave the new ones out before you choose a
# token. Drop the last batch if it is smaller (`drop_last=True`), and pad the tokens.


# %%
def padded(size, multiple):
    """The smallest multiple that is not below `size`."""
    return math.ceil(size / multiple) * multiple


assert padded(50257, 64) == 50304
assert shape_in_fp8(33, padded(100, 16), 50304) == (33, 50304)  # any number of rows will do
head = nn.Linear(2, 5, bias=False)  # a vocabulary of 5
larger = nn.Linear(2, padded(5, 8), bias=False)
with torch.no_grad():
    larger.weight[:5] = head.weight
torch.testing.assert_close(larger(x)[:, :5], head(x))

# %% [markdown]
# **Notice it earlier.** `amp-lab xray` names the products on a GPU whose sizes are not multiples of 8.
# `amp-lab rehearse` leaves out the layers that FP8 would refuse, and says why. <!-- tests/tracing/test_advice.py, tests/formats/test_rehearsal.py -->

# %% [markdown]
# ## Memory and checkpoints
#
# In this part the run stops for lack of memory, or does not go on as it was.

# %% [markdown]
# ### 45 CUDA is out of memory
#
# **What you see.** A step raises
# `torch.OutOfMemoryError: CUDA out of memory.`
# It goes on with `Tried to allocate` and a size. Older versions say `torch.cuda.OutOfMemoryError`, which
# is the same class. We quote it from PyTorch's
# [source](https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp).
#
# **The smallest program that does it.** We need no GPU to see that a step does not fit:
# `forecast_memory` counts its bytes without running it. The card of this example has 24 MiB.

# %%
card = 24 * 2**20  # bytes


def peak_of(batch):
    """Bytes of a training step of section 34's model with Adam, under bf16 autocast on a GPU."""
    inputs = torch.empty(batch, 512, device="meta")
    return forecast_memory(wide, inputs, precision="bf16").peak


print(f"4096 examples need {peak_of(4096) / 2**20:.0f} MiB of {card / 2**20:.0f} MiB")
assert peak_of(4096) > card
assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError

# %% [markdown]
# **Why.** Weights, gradients, optimizer state and saved activations have to fit at the same time.
# - If the *first* step fails, they are too large, or another process uses the GPU (`nvidia-smi`).
# - If memory grows in *each* step, your code probably keeps graphs: a running total of `loss` holds all
#   of them, and one of `loss.item()` none.
# - If only *evaluation* fails, check that it runs under `torch.inference_mode()` (section 34).
# - If the message says that much memory is reserved but unallocated, it may be fragmented. Set
#   `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, as the message says. (On RDNA4 it [has given
#   NaN](https://github.com/pytorch/pytorch/issues/195202).)
#
# **The fix.** Ask `amp-lab memory my_model.py:MODEL --input 8,3,224,224 --memory 24GiB` with your
# model and card: it forecasts each precision and the largest batch, and if that is too little, says
# what saves how much ([Will it fit?](../docs/your_model.md#does-training-fit-into-memory)). Then use a batch that fits,
# and add up the gradients of several, which gives the gradient of the large one, up to rounding and
# without batch normalisation.


# %%
def gradient_of_batches(batches):
    """The gradient of the mean loss over batches of one size."""
    wide.zero_grad()
    for batch in batches:
        (wide(batch).square().mean() / len(batches)).backward()
    return wide[0].weight.grad.clone()


fits = largest_batch(wide, (512,), memory_bytes=card, precision="bf16")
print(f"{fits} examples fit")
assert peak_of(fits) <= card < peak_of(fits + 1)
large = torch.randn(8, 512)
torch.testing.assert_close(gradient_of_batches(large.split(4)), gradient_of_batches([large]))
loss = wide(large).square().mean()
total = 0.0 + loss  # a running total
assert total.requires_grad  # so it holds the graph
assert isinstance(loss.item(), float)

# %% [markdown]
# **Notice it earlier.** Run `amp-lab memory` before you rent the card.

# %% [markdown]
# ### 46 After resuming the loss jumps or is NaN
#
# **What you see.** A run was fine when its checkpoint was saved. After loading it, the loss is NaN in
# the second step or much higher than before, or the first steps are skipped.
#
# **The smallest program that does it.** We save the state of Adam for an fp32 weight, and load it
# for the same weight in fp16 and in fp32.


# %%
def step_of_adam(weight, state=None):
    """One step with a gradient of 1e-5, from a saved state; returns the optimizer."""
    adam = torch.optim.Adam([weight])
    if state is not None:
        adam.load_state_dict(state)
    weight.grad = torch.full_like(weight, 1e-5)
    adam.step()
    return adam


saved = step_of_adam(nn.Parameter(torch.ones(1))).state_dict()
for dtype in (torch.float16, torch.float32):
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    moment = step_of_adam(weight, saved).state[weight]["exp_avg_sq"]
    print(f"{dtype}: second moment {moment.item():.0e}, weight {weight.item():.3f}")
    assert moment.dtype is dtype
    assert weight.isfinite().all() == (dtype is torch.float32)

# %% [markdown]
# **Why.** `load_state_dict` of an optimizer casts its state to the dtype of the weights. Adam's second
# moments are squares of gradients. In fp16 small ones become 0, and the step divides by 0 (unless Adam
# is fused). In bf16 they keep 8 bits. Five other causes: <!-- tests/notebooks/test_08_when_amp_breaks.py -->
# - The weights were saved with `.half()`. Digits are lost, and a running variance above 65504 is infinite.
#   Save what you go on from in fp32.
# - The state of the *optimizer* was saved in 16 bits. Loading casts the moments back, but not Adam's
#   `step`, which is a tensor too: in bf16 301 is 300, and 300 + 1 is 300 again. Save the state as it is.
#   In an old file, set `step` to the true number, in fp32, before you load it.
# - The state of the *scaler* was not loaded. A fresh one starts at 65536, so the gradients may overflow
#   and the first steps are skipped. That makes no weight NaN.
# - `dcp.load` filled a new optimizer's own `state_dict()`, which is empty, and so the moments are
#   missing. Use `get_state_dict` ([notebook 11](11_scale_out.ipynb#Save-on-four,-resume-on-two-(optional))).
# - The NaN is in the checkpoint, often in the buffers of batch normalisation
#   ([section 7](#7-Training-is-fine-but-evaluation-is-NaN)).
#
# **The fix.** Keep the weights in fp32, and make and load the optimizer after that. Save and load the
# state of the scaler too. If the weights are in 16 bits on purpose, and the state in fp32 (an optimizer
# of your own, as in [notebook 16](16_low_precision_state.ipynb)), put the saved tensors back after
# loading:

# %%
weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
adam = torch.optim.Adam([weight])
adam.load_state_dict(saved)
assert adam.state[weight]["exp_avg_sq"].dtype is torch.bfloat16
parameters = [weight for group in adam.param_groups for weight in group["params"]]
for number, state in saved["state"].items():  # numbered in the order of the parameters
    adam.state[parameters[number]].update(state)
assert torch.equal(adam.state[weight]["exp_avg_sq"], saved["state"][0]["exp_avg_sq"])
weight.grad = torch.ones(1, dtype=torch.bfloat16)
assert "expected dtype float for `end`" in message_of(adam.step)  # PyTorch's own Adam refuses it
assert torch.tensor(1e5).half().isinf()
saved["state"][0]["step"] = torch.tensor(301.0).bfloat16()
weight = nn.Parameter(torch.ones(1))
assert step_of_adam(weight, saved).state[weight]["step"] == 300  # 301 and one step
saved["state"][0]["step"] = torch.tensor(301.0)
assert step_of_adam(weight, saved).state[weight]["step"] == 302

# %% [markdown]
# PyTorch's own Adam refuses this state in another dtype than the weight, as it does if the model is cast
# between two steps. <!-- tests/notebooks/test_08_when_amp_breaks.py -->
#
# A scaler that was loaded does not skip the first step:


# %%
def first_step_is_skipped(scaler):
    """Whether a step with a gradient of 10 in fp16 overflows at the scaler's present scale."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((10 * weight.half()).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.item() == 1


fresh = torch.amp.GradScaler("cpu")
assert first_step_is_skipped(fresh)
loaded = torch.amp.GradScaler("cpu")
loaded.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict())
assert not first_step_is_skipped(loaded)

# %% [markdown]
# **Notice it earlier.** Before you save, check that all parameters and buffers are finite. `amp-lab
# migrate` finds a checkpoint without the state of the scaler. <!-- tests/migrate/test_mistakes.py -->

# %% [markdown]
# ## Summary
#
# We looked at 46 failures. Five questions find most of them:
#
# 1. **Are the parameters fp32?** If those that are trained are not, repair that first (9, 29), or see
#    [notebook 16](16_low_precision_state.ipynb).
# 2. **Does each forward pass have a block of its own, with its dtype, and end it with `.float()`?**
#    (18, 19, 24 to 28, 32)
# 3. **Is the order `scale`, `backward`, `unscale_`, clip, `step`, `update`, once per step?** (10 to
#    16)
# 4. **Does it go away in bf16?** Then fp16's range is the likely cause: use an island (1, 4 to 6), or
#    a scaler for small gradients (3).
# 5. **Does the scale stay above 1, with a skipped step now and then?** If it only falls, check the
#    loss (2), and look for a forward pass that overflows (1, 7). If it climbs to the end of fp32, there
#    is nothing to scale (28).
#
# Next: [notebook 09](09_xray_your_model.ipynb) shows in which dtypes a model runs, before you run it.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell. It says whether the answer is right and, if not,
# why. A hint and a solution are folded below each exercise.

# %%
from course.exercises import checks_of

exercises = checks_of("08_when_amp_breaks")

# %% [markdown]
# ### 1. Where does a sum of squares end?
#
# In section 6, replace `mean` by `sum`. For two equal inputs, what is the largest whole number whose two squares
# still add up to a finite number in fp16?

# %%
largest_value = ...
exercises.check_largest_value(largest_value)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The sum has to stay below 65520, which is the first number that rounds to infinity. How much is
# left for each square?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# largest_value = 180
# ```
#
# The root of 32760 is 180.997. The squares of 181 round up to 32768 each, and their sum, 65536, is infinite.
#
# </details>
#
# ### 2. Which section is it?
#
# Three colleagues ask for help. The first says: "My loss is 5.1042 in every step, to the last digit." The second
# says: "`clip_grad_norm_` returns about 80,000 in each step, and the model hardly learns." The third says: "The
# training loss is good, and since last night evaluation gives NaN for every image." Write down the numbers of the
# three sections.

# %%
sections = ...
exercises.check_diagnosis(sections)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Start from the third table at the top, and read "What you see" in each section that comes into question.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# sections = (26, 15, 7)
# ```
#
# The casts of the weights come from the cache of an outer block; clipping meets gradients that are still scaled;
# and one bad batch has ruined the buffers of batch normalisation.
#
# </details>
#
# ### 3. Mask scores in any dtype
#
# Complete `mask_scores`. Where `mask` is True a score is hidden. It must work in fp16, bf16 and fp32, and a row that
# is hidden everywhere must not become NaN in the softmax.


# %%
def mask_scores(scores, mask):
    return ...


exercises.check_masked(mask_scores)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Section 4 has ways that fail and ways that do not. Which number do you fill in, and where do you get
# it?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def mask_scores(scores, mask):
#     return scores.masked_fill(mask, torch.finfo(scores.dtype).min)
# ```
#
# Filling differs from adding: in fp16, the lowest number plus a score of -16 or less is minus
# infinity again.
#
# </details>
#
# ### 4. Keep the schedule with the training
#
# `advance` is called after `scaler.step(optimizer)`. It should update the scaler, and move the scheduler one step
# only if the optimizer was not skipped.


# %%
def advance(scaler, scheduler):
    return ...


exercises.check_advance(advance)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `update` changes the scale in one direction after a skipped step. What does it do after most good ones?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def advance(scaler, scheduler):
#     before = scaler.get_scale()
#     scaler.update()
#     if scaler.get_scale() >= before:
#         scheduler.step()
# ```
#
# With one optimizer the scale falls if and only if the step was skipped. After a good step it stays,
# or doubles. (A scale that has fallen to 0 cannot fall any further, but by then training has ended.)
#
# </details>
#
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the right order of calls
#   for clipping, accumulation, several losses, models and optimizers.
# - [`torch.amp`](https://docs.pytorch.org/docs/stable/amp.html): what each backend casts, and the
#   ban on `binary_cross_entropy`.
# - [Numerical accuracy](https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html): limits
#   of what any precision promises.
# - Threads where people met these: [NaN under mixed
#   precision](https://github.com/pytorch/pytorch/issues/40497), [statistics of batch normalisation
#   ruined by one batch](https://github.com/pytorch/pytorch/issues/88474), [gradients lost after
#   `no_grad`](https://github.com/pytorch/pytorch/issues/112583), [compiled gradients that
#   overflow](https://github.com/pytorch/pytorch/issues/153044), [rotary embeddings in
#   bf16](https://github.com/huggingface/transformers/pull/29285).
