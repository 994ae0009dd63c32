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
# **What you'll do.** Start from what you see: an error message, a warning, a NaN, or a run that is no
# faster than before. Find it here, and follow the link to the cause and the fix.
#
# **What you'll learn.**
# - how to let `amp-lab explain` read a message or a log for you;
# - five questions that find most failures;
# - where each failure is explained: most of them with a small program that fails, and its repair.
#
# **What you need.** You need no GPU and no other notebook.

# %% tags=["nbval-ignore-output"]

from course import start

from amp_lab import explain

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## Paste your message
#
# `explain` finds the failure that a message is about. Other dtypes, numbers, names or line breaks do
# not matter.

# %%
message = """
RuntimeError: mat1 and mat2 must have the same dtype, but got Float
and BFloat16
"""
failure = explain(message)[0]
print(failure.code, failure.title)
print("Why:", failure.cause)
print("The fix:", failure.cure)
assert failure.code == "AMP0018"

# %% [markdown]
# In a terminal you can pass the whole log of a run, or describe what you see if there is no message:
#
# ```sh
# python train.py 2>&1 | pdm run amp-lab explain
# pdm run amp-lab explain "the loss is the same in every step"
# ```
#
# For a log, the command also names the last line of *your* code in the
# traceback. <!-- tests/cli/test_explain_command.py -->

# %% [markdown]
# ## Five questions
#
# These find most failures:
#
# 1. **Are the parameters fp32?** If those that you train are not, [repair that first](08c_scaler.ipynb#The-parameters-are-fp16).
# 2. **Does each forward pass have its own autocast block, and does the block end with `.float()`?** If
#    not, look at [dtypes](08e_dtypes.ipynb).
# 3. **Is the order `scale`, `backward`, `unscale_`, clip, `step`, `update`, once per step?** If not, look
#    at [the scaler](08c_scaler.ipynb).
# 4. **Does the failure disappear in bf16?** Then the range of fp16 is the likely cause: look at
#    [values](08a_values.ipynb).
# 5. **Does the loss scale stay above 1, with a skipped step now and then?** If it only falls, [check the
#    loss](08b_learning.ipynb#The-loss-scale-falls-towards-0).
#
# ## All failures
#
# Search this page with Ctrl+F. Your message may have other dtypes than those shown here. Dots stand for
# what differs from program to program.

# %% [markdown]
# <!-- index of failures -->
#
# ### Keep values inside the range of fp16
#
# | what goes wrong | what you see |
# |---|---|
# | [The loss is NaN because an activation exceeds 65504](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0001` | `` Loss is nan, stopping training ``<br>`` Loss is inf, stopping training ``<br>`` Loss became infinite or NaN at iteration=… ``<br>`` NaN or Inf found in input tensor. ``<br>the loss is NaN, in the first step or later<br>NaN loss with mixed precision |
# | [A mask value does not fit into fp16](08a_values.ipynb#A-mask-value-does-not-fit-into-fp16) `AMP0004` | `` value cannot be converted to type c10::Half without overflow ``<br>`` value cannot be converted to type c10::BFloat16 without overflow ``<br>`` value cannot be converted to type at::Half without overflow ``<br>masked_fill with -1e9 fails in half precision<br>an attention mask of -1e10 works in fp32 only |
# | [Attention is NaN for a row that is masked everywhere](08a_values.ipynb#Attention-is-NaN-for-a-row-that-is-masked-everywhere) `AMP0110` | attention gives NaN with padding<br>softmax of a row of -inf is NaN |
# | [Sampling finds inf or NaN in the probabilities](08a_values.ipynb#Sampling-finds-inf-or-NaN-in-the-probabilities) `AMP0065` | `` probability tensor contains either `inf`, `nan` or element < 0 ``<br>`` Expected parameter logits (Tensor of shape …) of distribution Categorical(logits: …) to satisfy the constraint …, but found invalid values ``<br>`` Expected parameter probs (Tensor of shape …) of distribution Categorical(probs: …) to satisfy the constraint Simplex(), but found invalid values ``<br>`` satisfy the constraint Simplex() ``<br>`` invalid multinomial distribution (encountering probability entry = infinity or NaN) ``<br>model.generate fails in float16<br>the logits of a language model are all NaN |
# | [NaN because an epsilon of 1e-8 is zero in fp16](08a_values.ipynb#NaN-because-an-epsilon-of-1e-8-is-zero-in-fp16) `AMP0005` | eps is too small for half precision<br>division by zero in fp16 although an epsilon is added |
# | [The logarithm of a probability is -inf](08a_values.ipynb#The-logarithm-of-a-probability-is--inf) `AMP0111` | focal loss is NaN in mixed precision<br>log(0) in half precision although the probability is clamped |
# | [A norm written by hand overflows above 256](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256) `AMP0006` | the gradients of all layers before a norm of my own are zero<br>the output of a norm is all zeros in half precision |
# | [Training is fine but evaluation is NaN](08a_values.ipynb#Training-is-fine-but-evaluation-is-NaN) `AMP0007` | training works, but evaluation gives NaN<br>model.eval() gives NaN, model.train() does not |
# | [Anomaly detection stops at a harmless overflow](08a_values.ipynb#Anomaly-detection-stops-at-a-harmless-overflow) `AMP0008` | `` Function '…' returned nan values in its …th output. ``<br>set_detect_anomaly raises with AMP, without it training is fine<br>anomaly detection stops in the first steps of mixed precision |
# | [The input holds NaN or numbers above 65504](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0112` | `` overflow encountered in cast ``<br>the loss is NaN in fp32 too, from the first batch of the data<br>NaN with a few samples of the data set only |
# | [The image is black because the VAE gives NaN in fp16](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0064` | `` invalid value encountered in cast ``<br>`` NaN detected in latents ``<br>`` A tensor with all NaNs was produced in VAE. ``<br>the generated image is black<br>SDXL gives a black image in float16 |
# | [Stable Diffusion's Unet gives NaN in fp16](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0117` | `` A tensor with all NaNs was produced in Unet. ``<br>`` A tensor with all NaNs was produced. ``<br>NansException in the webui, a tensor with all NaNs<br>the Unet of a diffusion model gives NaN in half precision |
# | [An attention kernel gives NaN](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0113` | `` Function 'ScaledDotProductCudnnAttentionBackward0' returned nan values in its 0th output. ``<br>`` cuDNN SDPA backward got grad_output.strides() != output.strides() ``<br>grad_norm nan and loss 0 in bf16 and in fp16, with flash attention disabled training is fine<br>after an update of torch attention gives NaN gradients in bf16 |
# | [The Trainer logs loss 0.0 and grad_norm nan](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0114` | `` {'loss': 0.0, 'grad_norm': nan ``<br>`` {'loss': '0', 'grad_norm': 'nan' ``<br>loss 0.0 and grad_norm nan with the Hugging Face Trainer<br>the loss drops to 0 and stays there, grad_norm is nan |
# | [The CTC loss is inf or NaN](08a_values.ipynb) `AMP0115` | `` Function 'CtcLossBackward0' returned nan values in its 0th output. ``<br>ctc loss is inf or NaN<br>the loss of a speech recognition model becomes infinite |
# | [A gradient penalty is inf or NaN under AMP](07_training_recipes.ipynb#Penalise-gradients) `AMP0116` | WGAN-GP goes NaN with mixed precision<br>the gradient penalty explodes under autocast |
# | [NaN in bf16, although fp16 and fp32 are fine](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0118` | NaN in bf16 only, fp16 is fine<br>bf16 gives NaN although nothing overflows |
# | [Attention in bf16 gives NaN on an AMD GPU](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0119` | NaN losses on ROCm from the first step<br>bf16 attention gives NaN on AMD, fp32 is fine |
# | [A model in fp16 runs on a CPU with an older torch](08f_ops_and_devices.ipynb) `AMP0066` | `` "LayerNormKernelImpl" not implemented for 'Half' ``<br>`` "addmm_impl_cpu_" not implemented for 'Half' ``<br>`` "slow_conv2d_cpu" not implemented for 'Half' ``<br>half precision on a CPU is not implemented<br>a float16 checkpoint does not run without a GPU |
# | [Lightning refuses to clip with a fused optimizer](08d_loop_and_resume.ipynb) `AMP0074` | `` does not allow for gradient clipping because it performs unscaling of gradients internally ``<br>gradient_clip_val fails with a fused AdamW in Lightning<br>Lightning does not clip gradients with fused=True |
# | [fp16 gives NaN on a GTX 16 or a Quadro T](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0077` | `` AMP checks failed ``<br>`` AMP: checks failed ``<br>`` Anomalies were detected with AMP on your system that may lead to NaN losses or zero-mAP results ``<br>`` AMP training on … GPU may cause NaN losses or zero-mAP results ``<br>YOLO box_loss, cls_loss and dfl_loss are nan on a GTX 1650 or 1660<br>NaN on a GTX 16 in code that runs on other GPUs |
# | [The cost matrix of a Hungarian matcher is inf or NaN](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256) `AMP0087` | `` cost matrix is infeasible ``<br>`` matrix contains invalid numeric entries ``<br>linear_sum_assignment fails with AMP<br>the matcher of DETR or Mask2Former gets NaN in fp16 |
# | [A convolution's gradients are NaN or 1e20 in bf16 on a CPU](../docs/hardware.md#wrong-gradients-in-bf16) `AMP0089` | gradients of a convolution are NaN or 1e20 in bf16, on a CPU<br>a ResNet on small images gives NaN on a CPU in bf16 |
# | [The text or decision differs in bf16 or in another batch](17_language_model.ipynb#The-same-prompt,-another-text) `AMP0098` | another text or decision comes out in bf16, or in another batch<br>generation in bf16 is not reproducible between batch sizes |
# | [A model that was trained in bf16 gives NaN in fp16](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) `AMP0100` | a model that was trained in bf16 gives NaN in fp16<br>a bf16 checkpoint cast to half gives inf |
#
# ### Find out why a model learns nothing
#
# | what goes wrong | what you see |
# |---|---|
# | [The loss scale falls towards 0](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0002` | the loss scale keeps falling, or every step is skipped<br>the weights do not change in some steps |
# | [A layer does not learn because its gradients underflow](08b_learning.ipynb#A-layer-does-not-learn-because-its-gradients-underflow) `AMP0003` | the loss does not fall, or stops falling<br>some gradients are zero |
# | [Weights get no gradient after an evaluation pass](08b_learning.ipynb#Weights-get-no-gradient-after-an-evaluation-pass) `AMP0025` | `` element 0 of tensors does not require grad and does not have a grad_fn ``<br>some gradients are `None` |
# | [The scaler runs with bf16 or the dtype is not the one you meant](08b_learning.ipynb#The-scaler-runs-with-bf16-or-the-dtype-is-not-the-one-you-meant) `AMP0028` | the loss scale grows and grows |
# | [Half precision weights stop moving](08b_learning.ipynb#Half-precision-weights-stop-moving) `AMP0029` | the loss does not fall, or stops falling<br>parameters are NaN after one step of Adam |
# | [Positions or counts are wrong beyond 256](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0030` | NaN, or a wrong result, only after another call was made, such as `add_noise` of a scheduler<br>results are good on short inputs and bad on long ones, or many positions give the same embedding |
# | [Current loss scale already at minimum - cannot decrease scale anymore.](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0070` | `` Current loss scale already at minimum - cannot decrease scale anymore. `` |
# | [Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to, then ZeroDivision](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0071` | `` Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to ``<br>`` ZeroDivisionError `` |
# | [self and mat2 must have the same dtype, with weights in FP8 or int8](08_when_amp_breaks.ipynb) `AMP0085` | `` self and mat2 must have the same dtype `` |
# | [got BFloat16 for the destination and Float for the source, with quantized weights and no a](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0086` | `` got BFloat16 for the destination and Float for the source `` |
# | [FP8 with a scale for each row gives NaN with LoRA](08_when_amp_breaks.ipynb) `AMP0088` | FP8 with a scale for each row gives NaN with LoRA |
# | [a KL divergence, or a ratio of probabilities, is noisy in bf16](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) `AMP0090` | a KL divergence, or a ratio of probabilities, is noisy in bf16 |
#
# ### Repair errors of the GradScaler
#
# | what goes wrong | what you see |
# |---|---|
# | [The parameters are fp16](08c_scaler.ipynb#The-parameters-are-fp16) `AMP0009` | `` Attempting to unscale FP16 gradients. ``<br>`` "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16' `` |
# | [Gradients are unscaled twice](08c_scaler.ipynb#Gradients-are-unscaled-twice) `AMP0010` | `` unscale_() has already been called on this optimizer since the last update(). `` |
# | [An optimizer has no gradients](08c_scaler.ipynb#An-optimizer-has-no-gradients) `AMP0011` | `` No inf checks were recorded for this optimizer. ``<br>some gradients are `None` |
# | [Scaler methods are called in the wrong order](08c_scaler.ipynb#Scaler-methods-are-called-in-the-wrong-order) `AMP0012` | `` step() has already been called since the last update(). ``<br>`` unscale_() is being called after step(). ``<br>`` No inf checks were recorded prior to update. ``<br>`` Attempted unscale_ but _scale is None. ``<br>`` Attempted step but _scale is None. ``<br>the logged loss is off by a factor of 2 at times |
# | [The optimizer needs a closure](08c_scaler.ipynb#The-optimizer-needs-a-closure) `AMP0013` | `` Closure use is not currently supported if GradScaler is enabled. ``<br>SAM, or another optimizer with two passes, gives NaN in fp16 |
# | [The scheduler warns that it came before the optimizer](08c_scaler.ipynb#The-scheduler-warns-that-it-came-before-the-optimizer) `AMP0014` | `` Detected call of `lr_scheduler.step()` before `optimizer.step()`. `` |
#
# ### Repair clipping, the loop and a resumed run
#
# | what goes wrong | what you see |
# |---|---|
# | [Clipping leaves next to nothing of the gradients](08d_loop_and_resume.ipynb#Clipping-leaves-next-to-nothing-of-the-gradients) `AMP0015` | the loss does not fall, or stops falling<br>logged gradients are 65536 times too large, or jump by a factor of 2 |
# | [Clipping refuses a norm that is not finite](08d_loop_and_resume.ipynb#Clipping-refuses-a-norm-that-is-not-finite) `AMP0016` | `` The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. `` |
# | [The state of the scaler cannot be loaded](08d_loop_and_resume.ipynb#The-state-of-the-scaler-cannot-be-loaded) `AMP0017` | `` The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. `` |
# | [The loss stands still because the whole loop is in one block](08d_loop_and_resume.ipynb#The-loss-stands-still-because-the-whole-loop-is-in-one-block) `AMP0026` | the loss does not fall, or stops falling |
# | [After resuming the loss jumps or is NaN](08d_loop_and_resume.ipynb#After-resuming-the-loss-jumps-or-is-NaN) `AMP0046` | the loss is NaN or jumps after resuming from a checkpoint<br>a resumed run deviates from one without a break, or its optimizer counts wrong steps |
# | [a loop of p = p.float() over the parameters changes nothing](08_when_amp_breaks.ipynb) `AMP0093` | `` p = p.float() `` |
#
# ### Repair dtypes that do not match
#
# | what goes wrong | what you see |
# |---|---|
# | [A half precision output leaves the block](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0018` | `` mat1 and mat2 must have the same dtype, but got Half and Float ``<br>`` expected m1 and m2 to have the same dtype, but got: c10::Half != float ``<br>`` expected scalar type Float but found Half ``<br>`` Input type (c10::Half) and bias type (float) should be the same ``<br>`` RNN input dtype (torch.float16) does not match weight dtype (torch.float32). ``<br>`` mixed dtype (CPU): expect parameter to have scalar type of Float ``<br>`` Found dtype Float but expected Half ``<br>`` expected dtype c10::Half for `end` but got dtype float ``<br>`` Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same ``<br>short inputs work, until the first longer one raises; then all raise |
# | [Writing into a buffer fails](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0019` | `` Index put requires the source and destination dtypes match, got Float for the destination and Half for the source. ``<br>`` index_add_(): self (Float) and source (Half) must have the same scalar type ``<br>`` masked_scatter: expected self and source to have same dtypes but got ``<br>`` scatter(): Expected self.dtype to be equal to src.dtype `` |
# | [A function of your own fails in backward](08e_dtypes.ipynb#A-function-of-your-own-fails-in-backward) `AMP0020` | `` expected scalar type Half but found Float ``<br>gradients of a checkpointed block are less exact, or overflow, and the loss is the same |
# | [Two dtypes are nested around one weight](08e_dtypes.ipynb#Two-dtypes-are-nested-around-one-weight) `AMP0021` | `` encountered during backward but not found in storage ``<br>`` mat1 and mat2 must have the same dtype, but got BFloat16 and Half ``<br>`` Unexpected floating ScalarType in at::autocast::prioritize `` |
# | [the same in the forward pass, often of a model in fp16](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0060` | the same in the forward pass, often of a model in fp16 |
# | [input should have the same type as rois, Expected delta.scalar_type() == input_type](08e_dtypes.ipynb#A-function-of-your-own-fails-in-backward) `AMP0078` | `` input should have the same type as rois ``<br>`` Expected delta.scalar_type() == input_type `` |
# | [Expected attn_mask dtype to be bool or float or to match query dtype](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0081` | `` Expected attn_mask dtype to be bool or float or to match query dtype `` |
# | [a model from accelerate or Fabric returns fp32](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0094` | a model from accelerate or Fabric returns fp32 |
# | [attention refuses q, k and v: Expected query, key, and value to have the same dtype](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0097` | `` Expected query, key, and value to have the same dtype `` |
#
# ### Replace ops and devices that refuse half precision
#
# | what goes wrong | what you see |
# |---|---|
# | [BCELoss is refused on a GPU](08f_ops_and_devices.ipynb#BCELoss-is-refused-on-a-GPU) `AMP0022` | `` torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. `` |
# | [An op does not exist in half precision](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0023` | `` quantile() input tensor must be either float or double dtype ``<br>`` linalg.inv: Low precision dtypes not supported. Got Half ``<br>`` "lu_cpu" not implemented for 'Half' `` |
# | [NumPy does not know bf16](08f_ops_and_devices.ipynb#NumPy-does-not-know-bf16) `AMP0024` | `` Got unsupported ScalarType BFloat16 `` |
# | [Autocast refuses the device or its dtype](08f_ops_and_devices.ipynb#Autocast-refuses-the-device-or-its-dtype) `AMP0036` | `` Current CUDA Device does not support bfloat16. Please switch dtype to float16. ``<br>`` User specified an unsupported autocast device_type ``<br>`` unsupported scalarType ``<br>`` CUBLAS_STATUS_NOT_SUPPORTED `` |
# | [An FFT is refused in half precision](08f_ops_and_devices.ipynb#An-FFT-is-refused-in-half-precision) `AMP0038` | `` Unsupported dtype Half ``<br>`` MKL FFT doesn't support tensors of type: Half`; an op that has no kernel for `ComplexHalf ``<br>`` cuFFT only supports dimensions whose sizes are powers of two when computing in half precision `` |
# | [MPS has no float64](08f_ops_and_devices.ipynb#MPS-has-no-float64) `AMP0039` | `` Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. `` |
# | [Flash attention refuses fp32](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0043` | `` FlashAttention only support fp16 and bf16 data type `` |
# | ["addmm_sparse_cuda" not implemented for 'Half', and .float() does not help](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0061` | `` "addmm_sparse_cuda" not implemented for 'Half' ``<br>`` .float() `` |
# | [Bfloat16 is only supported on GPUs with compute capability of at least 8.0.](08f_ops_and_devices.ipynb#Autocast-refuses-the-device-or-its-dtype) `AMP0068` | `` Bfloat16 is only supported on GPUs with compute capability of at least 8.0. `` |
# | [BFloat16 is not supported on MPS](19_choose_your_precision.ipynb) `AMP0069` | `` BFloat16 is not supported on MPS `` |
# | [No operator found for memory_efficient_attention_forward](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0072` | `` No operator found for memory_efficient_attention_forward `` |
# | [The input hidden states seems to be silently casted in float32](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0073` | `` The input hidden states seems to be silently casted in float32 `` |
#
# ### Find the speed and the memory that AMP should save
#
# | what goes wrong | what you see |
# |---|---|
# | [Autocast or the scaler is switched off](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0031` | `` CUDA is not available or torch_xla is imported. Disabling autocast. ``<br>`` torch.cuda.amp.GradScaler is enabled, but CUDA is not available. ``<br>`` In CPU autocast, but the target dtype is not supported. Disabling autocast. ``<br>a step is no faster than before, or even slower<br>training uses as much memory as before, or more |
# | [A thread runs without autocast or in another dtype](08g_speed_and_memory.ipynb#A-thread-runs-without-autocast-or-in-another-dtype) `AMP0032` | a step is no faster than before, or even slower |
# | [Autocast makes the model no faster](08g_speed_and_memory.ipynb#Autocast-makes-the-model-no-faster) `AMP0033` | a profile of a server or a sampler is full of casts and copies<br>a step is no faster than before, or even slower |
# | [The memory is not halved](08g_speed_and_memory.ipynb#The-memory-is-not-halved) `AMP0034` | training uses as much memory as before, or more<br>inference uses more memory with autocast than without, or memory grows under `no_grad` |
# | [A size is not a multiple of 16 or 8](08g_speed_and_memory.ipynb#A-size-is-not-a-multiple-of-16-or-8) `AMP0044` | `` Expected self.size(1) to be divisible by 16, but got self.size(1)= ``<br>`` Expected both dimensions of mat2 to be divisible by 16 ``<br>`` Expected trailing dimension of mat1 to be divisible by 16 ``<br>a step is no faster than before, or even slower |
# | [CUDA is out of memory](08g_speed_and_memory.ipynb#CUDA-is-out-of-memory) `AMP0045` | `` torch.OutOfMemoryError: CUDA out of memory. `` |
# | [fp16 mixed precision requires a GPU; Your setup doesn't support bf16/gpu.](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0067` | `` fp16 mixed precision requires a GPU ``<br>`` Your setup doesn't support bf16/gpu. `` |
# | [a resumed run takes twice the memory, in 16-bit weights](08_when_amp_breaks.ipynb) `AMP0092` | a resumed run takes twice the memory, in 16-bit weights |
# | [a model in Keras gives NaN, or is no faster](12_keras.ipynb) `AMP0101` | a model in Keras gives NaN, or is no faster |
#
# ### Repair compiled and distributed training
#
# | what goes wrong | what you see |
# |---|---|
# | [A compiled model has other gradients](08h_compile_and_processes.ipynb#A-compiled-model-has-other-gradients) `AMP0027` | `torch.compile` changes the gradients |
# | [The scaler is inside a compiled function](08h_compile_and_processes.ipynb#The-scaler-is-inside-a-compiled-function) `AMP0041` | `` Attempted to inline function marked as skipped `` |
# | [An LSTM fails under autocast on the CPU](08h_compile_and_processes.ipynb#An-LSTM-fails-under-autocast-on-the-CPU) `AMP0042` | `` could not create a primitive descriptor for the LSTM forward propagation primitive `` |
# | [TF32 is set in the old and in the new way](08h_compile_and_processes.ipynb#TF32-is-set-in-the-old-and-in-the-new-way) `AMP0037` | `` you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul. ``<br>fp32 results differ between two GPUs |
# | [Old names warn](08h_compile_and_processes.ipynb#Old-names-warn) `AMP0035` | `` `torch.cuda.amp.autocast(args...)` is deprecated. ``<br>`` `torch.cuda.amp.GradScaler(args...)` is deprecated. ``<br>`` `torch.cuda.amp.custom_fwd(args...)` is deprecated. ``<br>`` full(): argument 'fill_value' (position 2) must be Number, not str ``<br>`` ImportError: cannot import name 'amp' from 'apex' `` |
# | [DDP refuses the model or its step](08h_compile_and_processes.ipynb#DDP-refuses-the-model-or-its-step) `AMP0040` | `` SyncBatchNorm layers only work with GPU modules ``<br>`` Expected to have finished reduction in the prior iteration before starting a new one. ``<br>`` FSDP expects uniform original parameter dtype but got ``<br>`` Must flatten tensors with uniform dtype but got ``<br>the ranks of a distributed run drift apart, have other gradient norms, or skip different steps |
# | [Type parameter (T) of Optype (LayerNormalization) bound to different types](18_inference_and_export.ipynb#Export) `AMP0062` | `` Type parameter (T) of Optype (LayerNormalization) bound to different types `` |
# | [Type 'tensor(float16)' of input parameter … of operator (Range) in node … is invalid](18_inference_and_export.ipynb#Export) `AMP0063` | `` Type 'tensor(float16)' of input parameter … of operator (Range) in node … is invalid `` |
# | [Unexpected input data type. Actual: (tensor(float)) , expected: (tensor(float16))](08_when_amp_breaks.ipynb) `AMP0075` | `` Unexpected input data type. Actual: (tensor(float)) , expected: (tensor(float16)) `` |
# | [Running layernorm after self-attention in FP16 may cause overflow](08_when_amp_breaks.ipynb) `AMP0076` | `` Running layernorm after self-attention in FP16 may cause overflow `` |
# | [make_graphed_callables does not support the autocast caching.](08h_compile_and_processes.ipynb#A-compiled-model-has-other-gradients) `AMP0079` | `` make_graphed_callables does not support the autocast caching. `` |
# | [Recomputed values for the following tensors have different metadata than during the forwar](07_training_recipes.ipynb#Checkpoint-activations) `AMP0080` | `` Recomputed values for the following tensors have different metadata than during the forward pass. `` |
# | [torch.jit.trace fails, or gives another dtype, inside an autocast block](18_inference_and_export.ipynb#Export) `AMP0082` | `` torch.jit.trace `` |
# | [scale … has inconsistent type tensor(float), of a BatchNormalization](08_when_amp_breaks.ipynb) `AMP0083` | `` scale … has inconsistent type tensor(float) ``<br>`` BatchNormalization `` |
# | [ScalarType ComplexDouble in an export in bf16](08_when_amp_breaks.ipynb) `AMP0084` | `` ScalarType ComplexDouble `` |
# | [gradients are infinite with several ranks only](08_when_amp_breaks.ipynb) `AMP0091` | gradients are infinite with several ranks only |
# | [torch.compile changes the results a little](18_inference_and_export.ipynb#What-torch.compile-changes) `AMP0095` | `` torch.compile `` |
# | [a compiled model is no faster](10_speed_ladder.ipynb) `AMP0096` | a compiled model is no faster |
# | [an exported model computes in another dtype than expected](18_inference_and_export.ipynb#Export) `AMP0099` | an exported model computes in another dtype than expected |
# <!-- end of the index -->

# %% [markdown]
# ## Summary
#
# - `amp-lab explain` finds a failure by its message, by a log, or by a
#   description. <!-- tests/failures/test_explanation.py -->
# - Five questions find most failures: parameters in fp32, one block per forward pass, the order of the
#   scaler's calls, the range of fp16, and the course of the loss scale.
#
# Next: [notebook 09](09_xray_your_model.ipynb) shows in which dtypes a model runs, before you run it.
#
# ## Exercises
#
# Put your answer in place of the dots and run the cell: it says whether the answer is right, and if
# not, why. A hint and a solution are folded away below each.

# %%
from course.exercises import checks_of

exercises = checks_of("08_when_amp_breaks")

# %% [markdown]
# ### 1. Where does a sum of squares end?
#
# A sum of squares in fp16 [overflows early](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256).
# Two numbers are equal and whole. What is the largest such number whose two squares still add up to a
# finite number in fp16?

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
# ### 2. Which failure is it?
#
# Three colleagues ask for help. The first says: "My loss is 5.1042 in every step, to the last digit." The second
# says: "`clip_grad_norm_` returns about 80,000 in each step, and the model hardly learns." The third says: "The
# training loss is good, and since last night evaluation gives NaN for every image." Write down the codes of the
# three failures.

# %%
codes = ...
exercises.check_diagnosis(codes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Look for each symptom in the tables of this page, and read "What you see" in the sections that come into question.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# codes = ("AMP0026", "AMP0015", "AMP0007")
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
# [A mask value does not fit into fp16](08a_values.ipynb#A-mask-value-does-not-fit-into-fp16) has ways that fail and
# ways that do not. Which number do you fill in, and where do you get it?
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
