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
# **What you'll do.** Start from what you see in a run with automatic mixed precision (AMP), such as an error message
# or a NaN. Find the cause and the fix.
#
# **What you'll learn.**
# - how to look up a message or a log with `amp-lab explain`;
# - five questions to ask first;
# - where to read about each failure.
#
# **What you need.** You need no GPU and no other notebook.

# %% tags=["nbval-ignore-output"]

from course import start

from amp_lab import explain

device, scale = start()  # AMP_LAB_DEVICE and AMP_LAB_SCALE override the choice

# %% [markdown]
# ## Paste your message
#
# `explain` finds known failures by their message. Your message may have other numbers than the stored message, or
# `BFloat16` in place of `Half`. <!-- tests/failures/test_explanation.py -->

# %%
message = """
RuntimeError: mat1 and mat2 must have the same dtype, but got Half
and Float
"""
failure = explain(message)[0]
print(failure.code, failure.title)
print("Why:", failure.cause)
print("The fix:", failure.cure)
assert failure.code == "AMP0018"

# %% [markdown]
# In a terminal you can pass the whole log of a run. If there is no message, describe what you see:
#
# ```sh
# python train.py 2>&1 | pdm run amp-lab explain
# pdm run amp-lab explain "the loss scale keeps falling"
# ```

# %% [markdown]
# ## Five questions
#
# 1. **Are all trainable parameters in fp32?** If a parameter has another dtype, [convert it
#    first](08c_scaler.ipynb#The-parameters-are-fp16).
# 2. **Does each forward pass run in a separate autocast block?** If not, the [loss can stand
#    still](08d_loop_and_resume.ipynb#The-loss-stands-still-because-the-whole-loop-is-in-one-block). Convert the
#    output of the block [with `.float()`](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block).
# 3. **Does each training step call `scale`, `backward`, `step` and `update` in this order?** If not, look at [the
#    scaler](08c_scaler.ipynb). Clip gradients [only after
#    `unscale_`](08d_loop_and_resume.ipynb#Gradients-are-clipped-while-they-are-still-scaled).
# 4. **Does the failure disappear in bf16?** If so, the range of fp16 is the likely cause: look at
#    [values](08a_values.ipynb).
# 5. **Does the loss scale keep falling?** If so, [check the loss](08b_learning.ipynb#The-loss-scale-falls-towards-0).
#
# ## All failures
#
# Search this page with Ctrl+F. Dots in a message stand for text that depends on the program. To read the cause and the
# fix of a failure, pass its code to `amp-lab explain`. The links lead to pages on the subject.

# %% [markdown]
# <!-- index of failures -->
#
# ### Keep values inside the range of fp16
#
# | what goes wrong | what you see |
# |---|---|
# | [The loss is NaN because an activation exceeds 65504](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0001` | `` Loss is nan, stopping training `` |
# | [A mask value does not fit into fp16](08a_values.ipynb#A-mask-value-does-not-fit-into-fp16) `AMP0004` | `` value cannot be converted to type c10::Half without overflow `` |
# | [Attention is NaN for a row that is masked everywhere](08a_values.ipynb#Attention-is-NaN-for-a-row-that-is-masked-everywhere) `AMP0110` | sdpa in bfloat16 returns nan for shorter sentences of a padded batch, eager does not |
# | [Sampling finds inf or NaN in the probabilities](08a_values.ipynb#Sampling-finds-inf-or-NaN-in-the-probabilities) `AMP0065` | `` probability tensor contains either `inf`, `nan` or element < 0 `` |
# | [NaN because an epsilon of 1e-8 is zero in fp16](08a_values.ipynb#NaN-because-an-epsilon-of-1e-8-is-zero-in-fp16) `AMP0005` | eps is too small for half precision |
# | [The logarithm of a probability is -inf](08a_values.ipynb#The-logarithm-of-a-probability-is--inf) `AMP0111` | focal loss is NaN in mixed precision |
# | [A norm written by hand overflows above 256](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256) `AMP0006` | eval_loss is nan with fp16_full_eval and label smoothing over a large vocabulary |
# | [Training is fine but evaluation is NaN](08a_values.ipynb#Training-is-fine-but-evaluation-is-NaN) `AMP0007` | every output is a normal number in train(), but NaN after model.eval() |
# | [Anomaly detection stops at a harmless overflow](08a_values.ipynb#Anomaly-detection-stops-at-a-harmless-overflow) `AMP0008` | `` Function '…' returned nan values in its …th output. `` |
# | [The input is not normalized, contains NaN or has no valid label](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0112` | `` overflow encountered in cast `` |
# | [The image is black or the latents are NaN: the VAE can overflow in fp16](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0064` | `` invalid value encountered in cast `` |
# | [Stable Diffusion's Unet gives NaN in fp16](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0117` | `` A tensor with all NaNs was produced in Unet. `` |
# | [An attention kernel can give NaN](../docs/compile_and_kernels.md#attention-gives-nan-on-an-h100-is-it-my-model-or-the-kernel) `AMP0113` | `` Function 'ScaledDotProductCudnnAttentionBackward0' returned nan values in its 0th output. `` |
# | [The Trainer logs loss 0.0 and grad_norm nan](../docs/trainers.md#the-trainer-logs-loss-00-and-grad_norm-nan) `AMP0114` | `` {'loss': 0.0, 'grad_norm': nan `` |
# | [The CTC loss is inf or NaN](08a_values.ipynb) `AMP0115` | `` Function 'CtcLossBackward0' returned nan values in its 0th output. `` |
# | [A gradient penalty is inf or NaN under AMP](07_training_recipes.ipynb#Penalise-gradients) `AMP0116` | GAN losses are NaN after a short time with amp, fine with amp=False |
# | [NaN in bf16, although nothing overflows](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0118` | bf16 training goes well for most of an epoch, then the loss turns to nan with sampled negatives or a softmax |
# | [Attention in bf16 can give NaN on an AMD GPU](../docs/compile_and_kernels.md#how-do-i-see-which-attention-kernel-ran) `AMP0119` | NaN losses on ROCm from the first step |
# | [fp16 gives NaN on a GTX 16, or ultralytics' AMP check fails](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0077` | `` AMP checks failed `` |
# | [The cost matrix of a Hungarian matcher is inf or NaN](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256) `AMP0087` | `` cost matrix is infeasible `` |
# | [A convolution's gradients are NaN or 1e20 in bf16 on a CPU](../docs/hardware.md#wrong-gradients-in-bf16) `AMP0089` | gradients of a convolution are NaN or 1e20 in bf16, on a CPU |
# | [The text or decision differs in bf16 or in another batch](17_language_model.ipynb#The-same-prompt,-another-text) `AMP0098` | another text or decision comes out in bf16, or in another batch |
# | [A model that was trained in bf16 can give NaN in fp16](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) `AMP0100` | `` Casting torch.bfloat16 to torch.float16. `` |
# | [SageAttention gives black images or video](08a_values.ipynb#The-loss-is-NaN-because-an-activation-exceeds-65504) `AMP0205` | black image or video with sage attention, fine with sdpa |
# | [A 0-d fp32 tensor does not promote an fp16 tensor with dimensions](02_autocast_dtypes.ipynb) `AMP0206` | multiplying a half tensor by a float scalar tensor gives inf |
# | [GPTQ fails in its Cholesky decomposition or gives NaN](18_inference_and_export.ipynb) `AMP0207` | GPTQ: the input is not positive-definite |
# | [The derivatives in a physics-informed loss are inf or 0 in fp16](../docs/other_models.md#why-is-the-loss-of-my-pinn-inf-or-0-in-fp16) `AMP0274` | a PINN has an infinite or NaN loss with amp, and is fine in fp32 |
# | [MPS or an Intel GPU gives wrong values, noise or NaN, and the CPU is right](../docs/hardware.md#apple) `AMP0310` | the same model is right on the CPU and wrong on mps |
# | [FP8 of Transformer Engine fails or gives NaN if a layer runs twice, as with activation checkpointing](15_below_16_bits.ipynb) `AMP0316` | `` Same module is being invoked more than once inside an `fp8_autocast` region `` |
# | [A quantized layer overflows in fp16 before its scale is applied](15_below_16_bits.ipynb#The-values-that-share-a-scale) `AMP0298` | int8 weight-only quantization gives NaN in float16, but bfloat16 is fine |
# | [A sum over many values exceeds 65504 in fp16](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256) `AMP0303` | the sum of a half precision tensor is inf although each value is small |
#
# ### Find out why a model learns nothing
#
# | what goes wrong | what you see |
# |---|---|
# | [The loss scale falls towards 0](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0002` | `` grad_scale is too small, exiting `` |
# | [A layer does not learn because its gradients underflow](08b_learning.ipynb#A-layer-does-not-learn-because-its-gradients-underflow) `AMP0003` | in fp16 some gradients are exactly zero |
# | [Weights get no gradient after an evaluation pass](08b_learning.ipynb#Weights-get-no-gradient-after-an-evaluation-pass) `AMP0025` | first forward in no_grad, second should train, but the weights get no gradient under fp16 |
# | [The scaler runs with bf16, or the dtype is not the one you meant](08b_learning.ipynb#The-scaler-runs-with-bf16,-or-the-dtype-is-not-the-one-you-meant) `AMP0028` | the loss scale grows and grows |
# | [Half precision weights stop moving](08b_learning.ipynb#Half-precision-weights-stop-moving) `AMP0029` | a model loaded in torch_dtype bfloat16 trains worse, with a higher final loss, than one loaded in fp32 |
# | [Adam makes fp16 weights NaN](08b_learning.ipynb#Adam-makes-fp16-weights-NaN) `AMP0121` | weights are NaN or inf after the first optimizer step in fp16, though the gradients are finite |
# | [Positions or counts are wrong beyond 256](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0030` | the rotary cache has wrong values once the model is cast to bfloat16 |
# | [A loss summed up in bf16 is too small](08b_learning.ipynb#A-loss-summed-up-in-bf16-is-too-small) `AMP0123` | the logged loss moves in steps, stands still or falls to 0 in bf16, and `loss.item()` is right |
# | [Weights were cast to FP8 without a scale](08b_learning.ipynb#Weights-were-cast-to-FP8-without-a-scale) `AMP0120` | `` mat1 and mat2 must have the same dtype, but got Float and Float8_e4m3fn `` |
# | [DeepSpeed or fairseq stops because the loss scale is at its minimum](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0070` | `` Current loss scale already at minimum - cannot decrease scale anymore. `` |
# | [Apex or DeepSpeed logs an overflow and skips steps](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0071` | `` overflow detected, setting loss scale to: `` |
# | [One loss of a GAN lowers the loss scale of the other](07_training_recipes.ipynb#Use-several-losses-and-optimizers) `AMP0129` | GAN training in fp16: the scale falls because of the discriminator, and the generator learns nothing |
# | [An exponential moving average (EMA) of weights does not change in bf16](08b_learning.ipynb#Half-precision-weights-stop-moving) `AMP0122` | the EMA model stays at its initial weights in half precision |
# | [8-bit Adam gives NaN or trains worse](16_low_precision_state.ipynb#State-in-fewer-bits) `AMP0128` | 8-bit Adam gives NaN after a few steps, 32-bit Adam does not |
# | [A diffusion model gets rounded timesteps or a rounded noise schedule](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0124` | `` alphas_cumprod…index out of range `` |
# | [NMS keeps duplicate boxes, or a mask has a row too many, in half precision](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0125` | the same box is detected twice: NMS leaves duplicates in fp16 |
# | [A router (MoE) chooses different experts in bf16](../docs/other_models.md#why-does-the-router-of-a-mixture-of-experts-need-fp32) `AMP0126` | MoE tokens go to other experts in bf16 than in fp32 |
# | [Log-probabilities of the trainer and of vLLM differ](../docs/trainers.md#the-trainers-log-probabilities-differ-from-vllms) `AMP0127` | vLLM logprobs and the trainer's logprobs do not match in bf16 |
# | [A KL divergence or a ratio of probabilities is noisy in bf16](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) `AMP0090` | the KL term is not 0 for two equal models in bf16 |
# | [FP8 with a scale for each row gives NaN with LoRA](15_below_16_bits.ipynb#The-values-that-share-a-scale) `AMP0088` | FP8 with a scale for each row gives NaN with LoRA |
# | [An FP8 KV cache makes texts worse](../docs/quantized.md#how-accurate-is-an-fp8-kv-cache) `AMP0199` | vLLM with an fp8 KV cache prints garbled text for long prompts |
# | [LoRA was merged into 4-bit or 8-bit weights](../docs/quantized.md#how-do-i-merge-lora-into-a-4-bit-or-fp8-model) `AMP0200` | `` module to 4-bit linear may get different generations due to rounding errors `` |
# | [Small LoRA weights become zero when they are saved in fp16](01_number_formats.ipynb) `AMP0201` | a LoRA saved in fp16 has no effect |
# | [Gradients are summed in bf16 over many ranks](11_scale_out.ipynb) `AMP0202` | training in bf16 is unstable with many GPUs and stable with few |
# | [Static FP8 scales come from too little calibration data](15_below_16_bits.ipynb) `AMP0203` | a statically quantized FP8 model is much less accurate than with dynamic scales |
# | [The scale falls because gradients are not cleared after a skipped step](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0211` | scale halves in each step after one bad batch until it is 0, the next batches are fine |
# | [The loss or score of a 16-bit model comes in coarse steps](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) `AMP0213` | cross entropy of bf16 logits is 4.75, 5.0 or 5.0625, never between |
# | [Fine-tuning is worse since transformers 5, which loads many models in bf16](../docs/trainers.md#why-is-fine-tuning-worse-since-transformers-5) `AMP0262` | the same fine-tuning script has a higher loss after an update to transformers 5 |
# | [A trainer keeps no fp32 master weights for a bf16 model](../docs/trainers.md#which-trainer-keeps-fp32-master-weights) `AMP0269` | where are the fp32 master weights in the Trainer, TRL, torchtune, Lightning or FSDP2 |
# | [FP8 matmuls lose accuracy with use_fast_accum](15_below_16_bits.ipynb#Sums-in-14-bits-(optional)) `AMP0280` | the error of an fp8 matmul grows with K |
# | [An FP8 checkpoint was cast to bf16 without its scales](../docs/quantized.md#how-do-i-convert-an-fp8-checkpoint-to-bf16) `AMP0282` | an fp8 checkpoint converted to bf16 with .to(torch.bfloat16) prints garbage |
# | [A recurrent or state-space state in 16 bits forgets nothing, or stops changing](../docs/other_models.md#can-the-state-of-mamba-an-ssm-or-an-rnn-be-in-bf16) `AMP0273` | Mamba or another state-space model is worse or unstable in bf16 |
# | [A sampling grid in 16 bits moves pixels](../docs/other_models.md#may-boxes-and-sampling-grids-be-in-bf16) `AMP0277` | grid_sample under autocast gives a blurred or shifted image |
# | [The logit scale (temperature) of a contrastive loss does not learn in bf16, or grows too large](../docs/other_models.md#what-needs-fp32-in-clip-and-other-contrastive-losses) `AMP0278` | `logit_scale` does not change in bf16 |
# | [Batch norm's running statistics lag behind in 16 bits](16_low_precision_state.ipynb#Weights-in-bf16) `AMP0297` | evaluation is worse than training with batch norm and bf16-true |
# | [A running sum or product (cumsum, cumprod) is inaccurate in 16 bits](08b_learning.ipynb#A-loss-summed-up-in-bf16-is-too-small) `AMP0300` | cumsum of a mask in bf16 gives equal positions |
# | [Sums by index (index_add, embedding, h[index]) can stop at 256 in bf16 on a CPU](08b_learning.ipynb#A-loss-summed-up-in-bf16-is-too-small) `AMP0304` | index_add_ or index_put_ with accumulate=True in bf16 stops at 256 |
#
# ### Repair errors of the GradScaler
#
# | what goes wrong | what you see |
# |---|---|
# | [The parameters are fp16](08c_scaler.ipynb#The-parameters-are-fp16) `AMP0009` | `` Attempting to unscale FP16 gradients. `` |
# | [Gradients are unscaled twice](08c_scaler.ipynb#Gradients-are-unscaled-twice) `AMP0010` | `` unscale_() has already been called on this optimizer since the last update(). `` |
# | [An optimizer has no gradients](08c_scaler.ipynb#An-optimizer-has-no-gradients) `AMP0011` | `` No inf checks were recorded for this optimizer. `` |
# | [Scaler methods are called in the wrong order](08c_scaler.ipynb#Scaler-methods-are-called-in-the-wrong-order) `AMP0012` | `` step() has already been called since the last update(). `` |
# | [The optimizer steps without the scaler](08c_scaler.ipynb#The-optimizer-steps-without-the-scaler) `AMP0131` | optimizer.step() is called instead of scaler.step(optimizer) |
# | [The optimizer needs a closure](08c_scaler.ipynb#The-optimizer-needs-a-closure) `AMP0013` | `` Closure use is not currently supported if GradScaler is enabled. `` |
# | [The scheduler warns that it came before the optimizer](08c_scaler.ipynb#The-scheduler-warns-that-it-came-before-the-optimizer) `AMP0014` | `` Detected call of `lr_scheduler.step()` before `optimizer.step()`. `` |
# | [The scaler cannot unscale bf16 gradients on CUDA, or complex gradients](08c_scaler.ipynb#The-parameters-are-fp16) `AMP0130` | `` "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16' `` |
# | [Two optimizers share one scaler, and update is called between their steps](07_training_recipes.ipynb#Use-several-losses-and-optimizers) `AMP0132` | GAN in mixed precision with one GradScaler for generator and discriminator |
# | [The loss that the scaler gets is not one tensor](07_training_recipes.ipynb#Use-several-losses-and-optimizers) `AMP0134` | `` outputs must be a Tensor or an iterable of Tensors `` |
# | [The scaler does not support the device or layout of the gradients](08c_scaler.ipynb) `AMP0135` | `` self._scale.double()…Cannot convert a MPS Tensor to float64 `` |
# | [The scaler refuses a setting](03_grad_scaler_step_by_step.ipynb) `AMP0136` | `` The growth factor must be > 1.0. `` |
# | [Lightning clips scaled gradients in manual optimization](08d_loop_and_resume.ipynb#Gradients-are-clipped-while-they-are-still-scaled) `AMP0137` | self.clip_gradients in manual optimization with precision 16-mixed hardly trains |
# | [Lightning refuses to clip with a fused optimizer](07_training_recipes.ipynb#Clip-gradients) `AMP0074` | `` The current optimizer, …, does not allow for gradient clipping because it performs unscaling of gradients internally. `` |
# | [The ranks of FSDP need a common loss scale and a common decision to skip](11_scale_out.ipynb#One-decision-about-the-loss-scale) `AMP0138` | FSDP in fp16 hangs or the ranks diverge after an overflow |
# | [`optimizer.step` was replaced after you created the scheduler](13_from_apex.ipynb) `AMP0139` | `` Seems like `optimizer.step()` has been overridden after learning rate scheduler initialization. `` |
# | [The logged loss is thousands of times too large](03_grad_scaler_step_by_step.ipynb) `AMP0306` | the printed loss is 65536 times too large with GradScaler |
#
# ### Repair clipping, the loop and a resumed run
#
# | what goes wrong | what you see |
# |---|---|
# | [Gradients are clipped while they are still scaled](08d_loop_and_resume.ipynb#Gradients-are-clipped-while-they-are-still-scaled) `AMP0015` | the loss stops decreasing when I add clip_grad_norm_ with torch.cuda.amp |
# | [Clipping refuses a norm that is not finite](08d_loop_and_resume.ipynb#Clipping-refuses-a-norm-that-is-not-finite) `AMP0016` | `` The total norm of order … for gradients from `parameters` is non-finite, so it cannot be clipped. `` |
# | [The loss stands still because the whole loop is in one block](08d_loop_and_resume.ipynb#The-loss-stands-still-because-the-whole-loop-is-in-one-block) `AMP0026` | the loss stays exactly the same in every step, autocast is around the whole training loop |
# | [After resuming the loss jumps or is NaN](08d_loop_and_resume.ipynb#After-resuming-the-loss-jumps-or-is-NaN) `AMP0046` | the loss jumps after resuming from a checkpoint in mixed precision |
# | [Weights and optimizer state have different dtypes](08d_loop_and_resume.ipynb#Weights-and-optimizer-state-have-different-dtypes) `AMP0140` | `` expected dtype … for `end` but got dtype … `` |
# | [The state of the scaler cannot be loaded](08d_loop_and_resume.ipynb#The-state-of-the-scaler-cannot-be-loaded) `AMP0017` | `` The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. `` |
# | [torch.load refuses a checkpoint with a scaler](08d_loop_and_resume.ipynb#torch.load-refuses-a-checkpoint-with-a-scaler) `AMP0142` | `` Unsupported global: GLOBAL torch.amp.grad_scaler.GradScaler was not an allowed global by default. `` |
# | [A loop of p = p.float() over the parameters changes nothing](08d_loop_and_resume.ipynb) `AMP0093` | `` p = p.float() `` |
# | [Memory runs out only when a run is resumed](08d_loop_and_resume.ipynb) `AMP0141` | `` default_restore_location…CUDA out of memory. Tried to allocate `` |
# | [Accumulated gradients differ from the gradients of one large batch](07_training_recipes.ipynb#Accumulate-gradients) `AMP0143` | gradient accumulation gives another loss, or worse results, than one large batch |
# | [The gradient norm is inf in a few steps, and training goes on](03_grad_scaler_step_by_step.ipynb#The-scale-over-a-whole-training-run) `AMP0144` | grad_norm is inf in the first steps of training, and nothing else is wrong |
# | [Names in a state_dict contain _orig_mod](08d_loop_and_resume.ipynb) `AMP0145` | `` Unexpected key(s) in state_dict: …_orig_mod. `` |
# | [A checkpoint is in fp32 and twice as large as expected](18_inference_and_export.ipynb#Ways-to-run-it) `AMP0146` | the checkpoint of a mixed precision run is twice as large as expected |
# | [Evaluation after training gives different metrics than during training](18_inference_and_export.ipynb#Ways-to-run-it) `AMP0147` | evaluation without autocast gives another accuracy than with autocast |
# | [Weights can become infinite when the model is cast to fp16 for evaluation or saving](08d_loop_and_resume.ipynb) `AMP0148` | `` Skipping checkpoint save at epoch …: EMA contains NaN/Inf `` |
# | [The scaler already has a growth tracker when it creates its scale](08d_loop_and_resume.ipynb) `AMP0149` | `` _growth_tracker initialized before _scale `` |
# | [Clipping an infinite norm turns gradients into NaN](08d_loop_and_resume.ipynb#Clipping-refuses-a-norm-that-is-not-finite) `AMP0212` | in bf16 one bad batch makes all weights NaN although gradients are clipped |
# | [The full-eval option of the Trainer casts too much, or nothing](../docs/trainers.md#why-is-the-model-in-bf16-after-evaluate-in-the-trainer) `AMP0265` | bf16_full_eval or fp16_full_eval changes the dtype of the model |
# | [A model that was saved in bf16 is loaded in fp32, or the other way round](../docs/trainers.md#why-is-my-checkpoint-in-fp32-after-training-in-bf16) `AMP0268` | publish a bf16 checkpoint after mixed precision training |
# | [8-bit or 4-bit Adam and AdamW usually cannot use each other's state](../docs/quantized.md#can-i-switch-between-adamw-and-8-bit-adam-when-i-resume) `AMP0281` | `` KeyError: 'state1' `` |
# | [Loading an optimizer can change the dtype of its state](../docs/trainers.md#does-resuming-change-the-dtype-of-the-optimizer-state) `AMP0296` | optimizer.load_state_dict changes the dtype of exp_avg and exp_avg_sq |
#
# ### Repair dtypes that do not match
#
# | what goes wrong | what you see |
# |---|---|
# | [A half precision output leaves the block](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0018` | `` mat1 and mat2 must have the same dtype, but got Half and Float `` |
# | [The model is in half precision but its input is fp32](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0150` | `` mat1 and mat2 must have the same dtype, but got Float and Half `` |
# | [Writing into a buffer fails](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0019` | `` Index put requires the source and destination dtypes match, got Float for the destination and Half for the source. `` |
# | [A custom autograd function fails in backward](08e_dtypes.ipynb#A-custom-autograd-function-fails-in-backward) `AMP0020` | `` user_fn(self, *args)…expected scalar type Half but found Float `` |
# | [fp16 and bf16 are mixed in one model](08e_dtypes.ipynb#fp16-and-bf16-are-mixed-in-one-model) `AMP0021` | `` mat1 and mat2 must have the same dtype, but got BFloat16 and Half `` |
# | [The input is float64 or an integer](08e_dtypes.ipynb#The-input-is-float64-or-an-integer) `AMP0151` | `` mat1 and mat2 must have the same dtype, but got Double and Float `` |
# | [One tensor inside a half-precision model stays in fp32](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0060` | `` Expected tensor for argument #1 'weight' to have the same type as tensor for argument #1 'per_sample_weights' `` |
# | [A custom kernel refuses half precision or mixed dtypes](08e_dtypes.ipynb#A-custom-autograd-function-fails-in-backward) `AMP0078` | `` Both operands must be same dtype. Got … and … `` |
# | [The attention mask has another dtype than the query](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0081` | `` Expected attn_mask dtype to be bool or float or to match query dtype `` |
# | [A model from Accelerate or Fabric returns fp32](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0094` | the output of a model prepared by accelerate is float32 although mixed precision is on |
# | [Attention gets q, k and v in two dtypes](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0097` | `` Expected query, key, and value to have the same dtype `` |
# | [An integer tensor cannot take the result of an in-place op](08e_dtypes.ipynb#The-input-is-float64-or-an-integer) `AMP0152` | `` result type Float can't be cast to the desired output type Long `` |
# | [The weight and the bias, or other tensors of one layer, have two dtypes](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0153` | `` self and mat2 must have the same dtype, but got BFloat16 and Float `` |
# | [A LoRA model trains, but generate() or evaluation raises](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0154` | `` fast_lora.py…to have the same dtype `` |
# | [FP8 weights reach an op that has no FP8](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0155` | `` mat1 and mat2 must have the same dtype, but got BFloat16 and Float8_e4m3fn `` |
# | [A 4-bit or 8-bit layer computes in another dtype than the model, such as fp32](../docs/quantized.md#which-bnb_4bit_compute_dtype-should-i-set) `AMP0156` | `` Expected Tensor argument scales to have dtype torch.bfloat16, but got torch.float32 instead `` |
# | [Quantization-aware training, or a quantize op, fails under autocast](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0157` | `` fused_moving_avg_obs_fake_quant…expected scalar type Float but found Half `` |
# | [A gradient of another dtype is assigned to a weight](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0159` | `` attempting to assign a gradient with dtype '…' to a tensor with grad_dtype '…' `` |
# | [PEFT casts adapters to fp32, but not modules_to_save](../docs/trainers.md#peft-attempting-to-unscale-fp16-gradients) `AMP0267` | adapters that were saved in bf16 come back in float32 |
# | [Quantized or integer weights cannot be trained](../docs/quantized.md#can-i-fine-tune-a-4-bit-8-bit-or-fp8-checkpoint-directly) `AMP0283` | `` You cannot perform fine-tuning on purely quantized models. `` |
# | [A GPTQ or AWQ model asks for fp16](../docs/quantized.md#why-do-gptq-and-awq-models-ask-for-float16) `AMP0285` | `` torch.bfloat16 is not supported for quantization method `` |
# | [A cast to a real dtype, such as bf16, drops the imaginary part](../docs/other_models.md#does-autocast-work-with-complex-numbers-and-ffts) `AMP0279` | `` Casting complex values to real discards the imaginary part `` |
# | [A bias in fp32 makes the output of a matmul fp32](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0290` | a bias in fp32 turns every output back into float32 |
# | [A layer returns fp16 inside a bf16 autocast block](02_autocast_dtypes.ipynb#Your-own-autograd-functions) `AMP0291` | a library's layer returns float16 under bfloat16 autocast |
# | [transformers warns that torch_dtype is deprecated](../docs/trainers.md#should-i-load-a-model-in-fp32-or-bf16-for-fine-tuning) `AMP0311` | `` `torch_dtype` is deprecated! Use `dtype` instead! `` |
# | [Packed 4-bit weights are used as if they were not quantized, or without their `quant_state`](../docs/quantized.md#can-i-call-half-or-todtype-on-a-quantized-model) `AMP0312` | `` dequantize_4bit…shapes cannot be multiplied `` |
# | [The weights are in fp32 with mixed precision](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0294` | `` because mixed precision turned on in FSDP `` |
# | [An op returns fp32 inside an autocast block](02_autocast_dtypes.ipynb#Four-things-that-can-happen-to-an-op) `AMP0295` | torch.exp, softmax or log returns float32 under autocast, but I expected half |
# | [A batched backward pass (vmap of autograd.grad) finds two dtypes](../docs/compile_and_kernels.md#expected-scalar-type-half-but-found-float-under-vmap) `AMP0301` | `` Expected scalar types of X and dY are same. `` |
# | [`.float()` has no effect on a matmul inside an autocast block](02_autocast_dtypes.ipynb#Nest-and-disable-autocast) `AMP0302` | I call .float() before the matmul but the result is still float16 under autocast |
# | [A quantized model refuses `.to()`, `.half()` or `.cuda()`](../docs/quantized.md#can-i-call-half-or-todtype-on-a-quantized-model) `AMP0318` | `` `.to` is not supported for `4-bit` or `8-bit` `` |
# | [A TensorFlow op gets float16 and float32](12_keras.ipynb#Layers,-not-ops) `AMP0320` | `` cannot compute … as input #…(zero-based) was expected to be a half tensor but is `` |
#
# ### Replace ops and devices that refuse half precision
#
# | what goes wrong | what you see |
# |---|---|
# | [BCELoss is refused on a GPU](08f_ops_and_devices.ipynb#BCELoss-is-refused-on-a-GPU) `AMP0022` | `` torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. `` |
# | [An op does not exist in half precision](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0023` | `` "…" not implemented for 'half' `` |
# | [NumPy does not support bf16](08f_ops_and_devices.ipynb#NumPy-does-not-support-bf16) `AMP0024` | `` Got unsupported ScalarType BFloat16 `` |
# | [Autocast refuses the device or its dtype](08f_ops_and_devices.ipynb#Autocast-refuses-the-device-or-its-dtype) `AMP0036` | `` User specified an unsupported autocast device_type `` |
# | [The GPU has no bf16](08f_ops_and_devices.ipynb#The-GPU-has-no-bf16) `AMP0160` | `` Current CUDA Device does not support bfloat16. Please switch dtype to float16. `` |
# | [An FFT is refused in half precision](08f_ops_and_devices.ipynb#An-FFT-is-refused-in-half-precision) `AMP0038` | `` Unsupported dtype half `` |
# | [MPS has no float64](08f_ops_and_devices.ipynb#MPS-has-no-float64) `AMP0039` | `` Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. `` |
# | [Flash attention refuses fp32](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0043` | `` FlashAttention only support fp16 and bf16 data type `` |
# | [Attention finds no kernel](08f_ops_and_devices.ipynb#Attention-finds-no-kernel) `AMP0162` | `` No available kernel. Aborting execution `` |
# | [A sparse matmul has no half-precision kernel, and under autocast .float() does not help](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0061` | `` "addmm_sparse_cuda" not implemented for 'half' `` |
# | [vLLM refuses bf16 on a GPU before Ampere](08f_ops_and_devices.ipynb#The-GPU-has-no-bf16) `AMP0068` | `` Bfloat16 is only supported on GPUs with compute capability of at least 8.0. `` |
# | [vLLM refuses fp16 for a model that was trained in bf16](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) `AMP0168` | `` The model type '…' does not support float16. Reason: `` |
# | [MPS has no bf16 on this macOS, or no FP8](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0069` | `` BFloat16 is not supported on MPS `` |
# | [MPS aborts in half precision, often because one op gets two dtypes](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0167` | `` error: input types 'tensor<…f16>' and 'tensor<…f32>' are not broadcast compatible `` |
# | [xFormers has no attention kernel for these inputs](08f_ops_and_devices.ipynb#Attention-finds-no-kernel) `AMP0072` | `` No operator found for `memory_efficient_attention_forward` `` |
# | [transformers casts hidden states back for flash attention](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0073` | `` The input hidden states seems to be silently casted in float32 `` |
# | [transformers warns about the dtype when it loads a model with flash attention](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0169` | `` You are attempting to use Flash Attention … without specifying a `` |
# | [On NVIDIA, FlashAttention 2 needs Ampere or newer](08f_ops_and_devices.ipynb#Attention-finds-no-kernel) `AMP0161` | `` FlashAttention only supports Ampere GPUs or newer `` |
# | [The GPU has no FP8 matmul](15_below_16_bits.ipynb#Which-GPU-supports-which-format-(optional)) `AMP0163` | `` Rowwise scaling is not currently supported on your device `` |
# | [An FP8 tensor has almost no arithmetic](15_below_16_bits.ipynb#Formats-of-a-single-value) `AMP0164` | `` "…" not implemented for 'Float8_…' `` |
# | [torch or a package was not built for this GPU](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0165` | `` no kernel image is available for execution on the device `` |
# | [A 16-bit matmul fails inside cuBLAS, or PyTorch refuses it](08f_ops_and_devices.ipynb#The-GPU-has-no-bf16) `AMP0166` | `` CUBLAS_STATUS_EXECUTION_FAILED when calling …CUDA_R_16 `` |
# | [fp16 fails or is refused on a CPU, often with an older torch](08f_ops_and_devices.ipynb) `AMP0066` | `` "LayerNormKernelImpl" not implemented for 'half' `` |
# | [This torch is too old for float8](15_below_16_bits.ipynb#Formats-of-a-single-value) `AMP0198` | `` has no attribute 'float8_…' `` |
# | [PEFT refuses the installed torchao](../docs/trainers.md#peft-found-an-incompatible-version-of-torchao) `AMP0261` | `` Found an incompatible version of torchao. Found version …, but only versions above … are supported `` |
# | [An FP8 checkpoint is read in the fnuz format, or mixed with it](../docs/quantized.md#does-an-fp8-checkpoint-work-on-an-mi300-fnuz) `AMP0286` | `` float8_e4m3fnuz, got `` |
# | [torchvision's nms refuses bf16, or fp16 on a CPU](../docs/other_models.md#nms_kernel-not-implemented-for-bfloat16) `AMP0275` | `` "nms_kernel" not implemented for 'BFloat16' `` |
# | [The CTC loss refuses half precision](../docs/other_models.md#ctc_loss_cpu-not-implemented-for-half-or-bfloat16) `AMP0276` | `` "ctc_loss_cpu" not implemented for 'Half' `` |
# | [fp32 results differ between two GPUs](19_choose_your_precision.ipynb#What-fp32-means) `AMP0186` | logits on two GPUs differ although everything is float32 |
# | [A warning suggests TF32](19_choose_your_precision.ipynb#What-fp32-means) `AMP0187` | `` TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. `` |
# | [An int8 matmul of bitsandbytes fails inside cuBLAS](../docs/quantized.md#is-load_in_8bit-computed-in-fp16-or-in-bf16) `AMP0315` | `` cublasLt ran into an error! `` |
# | [A bf16 matmul or convolution on a CPU returns wrong values](../docs/hardware.md#cpus) `AMP0305` | bfloat16 matmul gives an incorrect result on the CPU, without mkldnn |
# | [Complex numbers in half precision (ComplexHalf)](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0319` | `` ComplexHalf support is experimental and many operators don't support it yet. `` |
#
# ### Find the speed and the memory that AMP should save
#
# | what goes wrong | what you see |
# |---|---|
# | [Autocast or the scaler is switched off](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0031` | `` CUDA is not available or torch_xla is imported. Disabling autocast. `` |
# | [A thread runs without autocast or in another dtype](08g_speed_and_memory.ipynb#A-thread-runs-without-autocast-or-in-another-dtype) `AMP0032` | autocast is off in a thread, such as that of a server, a callback or a ThreadPoolExecutor |
# | [Autocast makes the model no faster](08g_speed_and_memory.ipynb#Autocast-makes-the-model-no-faster) `AMP0033` | AMP or fp16 training is slower than fp32 |
# | [The memory is not halved](08g_speed_and_memory.ipynb#The-memory-is-not-halved) `AMP0034` | training with AMP uses as much memory as before, or more |
# | [Inference under autocast takes more memory](08g_speed_and_memory.ipynb#Inference-under-autocast-takes-more-memory) `AMP0171` | inference inside torch.autocast has a higher max memory than the float run |
# | [A size is not a multiple of 16 or 8](08g_speed_and_memory.ipynb#A-size-is-not-a-multiple-of-16-or-8) `AMP0044` | `` Expected self.size(1) to be divisible by 16, but got self.size(1)= `` |
# | [CUDA is out of memory](08g_speed_and_memory.ipynb#CUDA-is-out-of-memory) `AMP0045` | `` CUDA out of memory `` |
# | [Memory grows with each step or in evaluation](08g_speed_and_memory.ipynb#Memory-grows-with-each-step-or-in-evaluation) `AMP0170` | `` return torch.cat((tensor1, tensor2), dim=0)…out of memory `` |
# | [A trainer refuses fp16 or bf16 on this machine](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0067` | `` fp16 mixed precision requires a GPU `` |
# | [16-bit weights become fp32 when they are loaded](07_training_recipes.ipynb#Load-half-precision-weights) `AMP0092` | a resumed run takes twice the memory, in 16-bit weights |
# | [A Keras model gives NaN or is no faster under a dtype policy](12_keras.ipynb#When-compile-adds-a-loss-scale) `AMP0101` | `` Your GPU may run slowly with dtype policy mixed_… because it does not have compute capability of at least `` |
# | [The first optimizer step runs out of memory](16_low_precision_state.ipynb#Bytes-per-parameter) `AMP0172` | `` state["exp_avg"] = torch.zeros_like(…out of memory `` |
# | [nvidia-smi shows more memory than PyTorch has allocated](../docs/memory_in_practice.md#allocated-reserved-or-nvidia-smi-which-number-is-right) `AMP0174` | nvidia-smi shows more memory than `torch.cuda.memory_allocated()` |
# | [An FP8 or FP4 matmul refuses its scales, its layout or its dtypes](15_below_16_bits.ipynb#Compare-with-PyTorch's-FP8-matmul-(optional)) `AMP0175` | `` CUBLAS_STATUS_NOT_SUPPORTED when calling …cublasLtMatmulAlgoGetHeuristic `` |
# | [fp16 or bf16 is several times slower than fp32 on this GPU or CPU](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0176` | `` Requested … compute type, but the target device or backend do not support efficient `` |
# | [Selective checkpointing of a shared weight fails in backward under autocast](07_training_recipes.ipynb#Checkpoint-activations) `AMP0158` | `` encountered during backward but not found in storage `` |
# | [The precision flag of accelerate or DeepSpeed has no effect](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0178` | `` `--mixed_precision` arg cannot be set to `…` when `…` is set in the DeepSpeed config file `` |
# | [The logits of a language model do not fit into memory](17_language_model.ipynb#The-loss-over-a-large-vocabulary) `AMP0179` | `` logits = logits.float()…CUDA out of memory `` |
# | [A model quantized to 8 or 4 bits is slower than in 16 bits](18_inference_and_export.ipynb) `AMP0204` | load_in_8bit or 4-bit inference is slower than fp16 |
# | [FP8 training is slower than bf16, or takes more memory](15_below_16_bits.ipynb#Which-GPU-supports-which-format-(optional)) `AMP0230` | FP8 training is slower than bf16 or fp16 on an H100 |
# | [The longest batch so far runs out of memory](08g_speed_and_memory.ipynb#CUDA-is-out-of-memory) `AMP0232` | GPU memory rises in jumps during the fine-tuning of a language model, out of memory after hours |
# | [Lightning or accelerate refuses the name of a precision](../docs/trainers.md#lightning-refuses-a-precision-is-invalid-or-received-both) `AMP0263` | `` Precision '…' is invalid. Allowed precision values: `` |
# | [accelerate already uses a different precision in this process](../docs/trainers.md#acceleratorstate-has-already-been-initialized) `AMP0264` | `` AcceleratorState has already been initialized and cannot be changed, restart your runtime completely and pass `mixed_precision= `` |
# | [The PyTorch allocator's setting is deprecated or has no effect](../docs/memory_in_practice.md#pytorch_cuda_alloc_conf-or-pytorch_alloc_conf) `AMP0270` | `` PYTORCH_CUDA_ALLOC_CONF is deprecated, use PYTORCH_ALLOC_CONF instead `` |
# | [The retry after an OutOfMemoryError also runs out of memory](../docs/memory_in_practice.md#i-catch-the-outofmemoryerror-but-the-retry-fails-too) `AMP0271` | I catch the out of memory error, but a smaller batch fails too |
# | [Checkpointing or gradient accumulation does not lower the peak](../docs/memory_in_practice.md#checkpointing-is-on-but-the-peak-is-the-same-why) `AMP0272` | gradient checkpointing does not reduce memory |
# | [`torch.is_autocast_enabled()` is False on the CPU](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0288` | `is_autocast_enabled()` is False inside the autocast block |
# | [Autocast writes out an expanded tensor](../docs/memory_in_practice.md#why-does-amp-not-halve-the-memory) `AMP0289` | autocast takes many times more memory for a bmm with an expanded buffer |
# | [Fabric's precision has no effect, because the model from `setup` is not used](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0292` | Fabric precision has no effect, model still runs in float32 |
# | [Autocast without its cache keeps one cast of a weight for each use](../docs/memory_in_practice.md#why-does-inference-under-autocast-take-more-memory-than-fp32) `AMP0293` | out of memory after the upgrade to Lightning 2.6 with bf16-mixed |
# | [After accelerate's `unwrap_model`, the model trains without autocast](../docs/migrate.md#mistakes-that-it-reports) `AMP0299` | training is slower after generate on the unwrapped model |
# | [A memory-saving optimizer takes as much memory as AdamW](16_low_precision_state.ipynb#Bytes-per-parameter) `AMP0317` | Adam-mini or another memory-saving Adam takes more memory than AdamW with a model in bf16 |
#
# ### Repair compiled and distributed training
#
# | what goes wrong | what you see |
# |---|---|
# | [A compiled model has different gradients](08h_compile_and_processes.ipynb#A-compiled-model-has-different-gradients) `AMP0027` | `torch.compile` changes the gradients |
# | [The scaler is inside a compiled function](08h_compile_and_processes.ipynb#The-scaler-is-inside-a-compiled-function) `AMP0041` | `` Attempted to inline function marked as skipped `` |
# | [An LSTM fails under autocast on the CPU](08h_compile_and_processes.ipynb#An-LSTM-fails-under-autocast-on-the-CPU) `AMP0042` | `` could not create a primitive descriptor for the LSTM forward propagation primitive `` |
# | [TF32 is set in the old and in the new way](08h_compile_and_processes.ipynb#TF32-is-set-in-the-old-and-in-the-new-way) `AMP0037` | `` you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul. `` |
# | [torch.cuda.amp warns that it is deprecated](08h_compile_and_processes.ipynb#torch.cuda.amp-warns-that-it-is-deprecated) `AMP0035` | `` `torch.cuda.amp.autocast(args...)` is deprecated. `` |
# | [DDP waits for a parameter without a gradient](08h_compile_and_processes.ipynb#DDP-waits-for-a-parameter-without-a-gradient) `AMP0040` | `` Expected to have finished reduction in the prior iteration before starting a new one. `` |
# | [FSDP refuses parameters of two dtypes](08h_compile_and_processes.ipynb#FSDP-refuses-parameters-of-two-dtypes) `AMP0181` | `` FSDP expects uniform original parameter dtype but got `` |
# | [The ranks of a distributed run diverge](08h_compile_and_processes.ipynb#The-ranks-of-a-distributed-run-diverge) `AMP0182` | the ranks of a DDP run drift apart, have other gradient norms, or skip different steps |
# | [Compiled and eager results differ](18_inference_and_export.ipynb#What-torch.compile-changes) `AMP0095` | log-probs differ between eager and torch.compile in bfloat16, allclose fails |
# | [NaN appears only with torch.compile](../docs/compile_and_kernels.md#the-loss-is-nan-only-with-torchcompile-where-do-i-look) `AMP0183` | torch.compile with reduce-overhead or max-autotune goes to NaN, plain compile is fine |
# | [A wrapper of autocast breaks the compiled graph](08h_compile_and_processes.ipynb#The-scaler-is-inside-a-compiled-function) `AMP0180` | `` setattr() is not supported on type autocast `` |
# | [Autocast makes torch.compile recompile](18_inference_and_export.ipynb#What-torch.compile-changes) `AMP0184` | `` GLOBAL_STATE changed: autocast `` |
# | [A compiled model is no faster](10_speed_ladder.ipynb#Climb) `AMP0096` | a compiled model is no faster |
# | [A CUDA graph refuses the cache of autocast](08h_compile_and_processes.ipynb#A-compiled-model-has-different-gradients) `AMP0079` | `` make_graphed_callables does not support the autocast caching. `` |
# | [Checkpointing recomputes a tensor in another dtype](07_training_recipes.ipynb#Checkpoint-activations) `AMP0080` | `` Recomputed values for the following tensors have different metadata than during the forward pass… `` |
# | [Apex is missing, has no amp, or fails](13_from_apex.ipynb) `AMP0188` | `` cannot import name 'amp' from 'apex' `` |
# | [This torch is too old for torch.amp](13_from_apex.ipynb) `AMP0322` | `` module 'torch' has no attribute 'amp' `` |
# | [One rank waits for another that skipped a step](../docs/trainers.md#how-do-i-skip-a-bad-batch-without-a-hang) `AMP0189` | `` Watchdog caught collective operation timeout `` |
# | [A collective gets tensors of different dtypes](11_scale_out.ipynb#What-does-each-rank-send-and-hold?) `AMP0190` | `` Received data size doesn't match expected size. Is there a distributed collective mismatch in your code? `` |
# | [NCCL or Gloo cannot send a dtype such as bf16 or FP8](11_scale_out.ipynb#What-does-each-rank-send-and-hold?) `AMP0321` | `` data type is not supported for NCCL process group `` |
# | [Gradients are infinite only with several ranks](11_scale_out.ipynb#One-decision-about-the-loss-scale) `AMP0091` | gradients are infinite with several ranks only |
# | [SyncBatchNorm refuses the device or the dtype](08h_compile_and_processes.ipynb#DDP-waits-for-a-parameter-without-a-gradient) `AMP0191` | `` SyncBatchNorm layers only work with GPU modules `` |
# | [FSDP2 has gradients of two dtypes in gradient accumulation](../docs/several_machines.md#questions-about-fsdp2) `AMP0192` | `` FSDP reduce-scatter expects uniform gradient dtype but got `` |
# | [FSDP2 leaves an input or a buffer in fp32](../docs/several_machines.md#show-the-dtype-of-each-parameter) `AMP0193` | with FSDP2 and param_dtype bf16 a layer gets a Float input and BFloat16 weights |
# | [FSDP2 trains bf16 weights without fp32 master weights](../docs/several_machines.md#show-the-dtype-of-each-parameter) `AMP0194` | FSDP with a model loaded in bfloat16 has a higher loss than with fp32 parameters and mixed precision |
# | [ONNX Runtime refuses the dtypes at an operator](18_inference_and_export.ipynb#Export) `AMP0062` | `` Type parameter (T) of Optype (…) bound to different types (tensor(…) and tensor(…) `` |
# | [ONNX Runtime refuses an arange in fp16](18_inference_and_export.ipynb#Export) `AMP0063` | `` Type 'tensor(…)' of input parameter (…) of operator (Range) in node (…) is invalid `` |
# | [An ONNX model expects another input dtype](18_inference_and_export.ipynb#Export) `AMP0075` | `` Unexpected input data type. Actual: (tensor(…)) , expected: (tensor(…)) `` |
# | [ONNX finds a norm whose weights and input have different dtypes](18_inference_and_export.ipynb#Export) `AMP0083` | `` scale has inconsistent type tensor(…) `` |
# | [The export of a bf16 model fails with ComplexDouble](18_inference_and_export.ipynb#Export) `AMP0084` | `` ScalarType ComplexDouble is an unexpected tensor scalar type `` |
# | [ONNX Runtime lacks an operator in a dtype such as bf16](18_inference_and_export.ipynb#Export) `AMP0196` | `` NOT_IMPLEMENTED : Could not find an implementation for … node with name … `` |
# | [An ONNX, TensorRT or OpenVINO model in fp16 can give NaN or wrong results](18_inference_and_export.ipynb#Export) `AMP0197` | `` Detected finite FP32 values which would overflow in FP16 and converted them to the closest finite FP16 value. `` |
# | [TensorRT warns that a layer norm may overflow in fp16](18_inference_and_export.ipynb#Export) `AMP0076` | `` Running layernorm after self-attention in FP16 may cause overflow `` |
# | [torch.jit.trace fails inside an autocast block](18_inference_and_export.ipynb#Export) `AMP0082` | `` Cannot insert a Tensor that requires grad as a constant. Consider making it a parameter or input, or detaching the gradient `` |
# | [An exported model computes in another dtype than expected](18_inference_and_export.ipynb#Export) `AMP0099` | `` Parameter was initialized as DataType.… but set to DataType.… `` |
# | [Flash attention gives different results with the same seed](17_language_model.ipynb#The-same-prompt,-another-text) `AMP0208` | same seed, but the loss differs from run to run with flash attention |
# | [A matmul in 16 bits differs between two GPU models](18_inference_and_export.ipynb#Which-decisions-change?) `AMP0209` | fp16 results on an A100 differ from those on a 3090 |
# | [A Core ML conversion in fp16 fails or gives wrong outputs](18_inference_and_export.ipynb#Export) `AMP0210` | `` must have the same data type as the named input `` |
# | [An fp16 ONNX model is slower than the fp32 model on a CPU](18_inference_and_export.ipynb#Export) `AMP0231` | the fp16 ONNX model takes two to four times as long as the fp32 model on a CPU |
# | [CUDA graphs overwrite an output that you keep](../docs/compile_and_kernels.md#accessing-tensor-output-of-cudagraphs-that-has-been-overwritten) `AMP0250` | `` accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run `` |
# | [RMSNorm under autocast on CUDA returns fp32 since torch 2.12](../docs/compile_and_kernels.md#why-is-rmsnorm-in-fp32-and-slower-since-torch-212) `AMP0251` | `` Mismatch dtype between input and weight: input dtype = …, weight dtype = …, Cannot dispatch to fused implementation. `` |
# | [The GradScaler or a read of a value stops the capture of a CUDA graph](../docs/compile_and_kernels.md#what-belongs-inside-a-cuda-graph-with-autocast-and-gradscaler) `AMP0252` | `` CUDA error: operation not permitted when stream is capturing `` |
# | [A linear layer with a bias returns fp32 under vmap and autocast](../docs/compile_and_kernels.md#why-is-the-output-fp32-under-vmap-and-autocast) `AMP0253` | nn.Linear under vmap and autocast returns float32 |
# | [torch.compile recompiles in every process](../docs/compile_and_kernels.md#torchcompile-compiles-again-in-every-process-why) `AMP0254` | torch.compile compiles again at each start of the program |
# | [sdpa and eager attention differ in bf16](../docs/compile_and_kernels.md#should-sdpa-and-eager-attention-give-the-same-result) `AMP0255` | sdpa and eager attention give different logits in bf16 |
# | [DeepSpeed refuses or ignores an autocast block](../docs/trainers.md#torchautocast-is-enabled-outside-deepspeed) `AMP0260` | `` torch.autocast is enabled outside DeepSpeed, but not in the DeepSpeed config `` |
# | [FSDP2 computes a softmax or a layer norm in bf16, but autocast on CUDA in fp32](../docs/trainers.md#do-i-need-autocast-with-fsdp2) `AMP0266` | does FSDP2 need torch.autocast |
# | [torch.ao.quantization warns that it is deprecated](../docs/quantized.md#torchaoquantization-is-deprecated-what-do-i-use) `AMP0284` | `` torch.ao.quantization is deprecated and will be removed in 2.10. `` |
# | [ONNX ops on the block list can still overflow in fp16](../docs/quantized.md#how-do-i-keep-some-onnx-ops-in-fp32-op_block_list) `AMP0287` | op_block_list or node_block_list is set, and the fp16 ONNX model still gives nan or zeros |
# | [DeepSpeed refuses bf16 with this ZeRO stage](../docs/trainers.md#which-trainer-keeps-fp32-master-weights) `AMP0313` | `` bfloat16 mode is only enabled for Zero `` |
# | [A weight gets a gradient of another dtype, for example in compiled FSDP1](../docs/several_machines.md#questions-about-fsdp2) `AMP0314` | `` attempting to assign a gradient with dtype '…' to a tensor with dtype '…' `` |
# <!-- end of the index -->

# %% [markdown]
# ## Summary
#
# - `amp-lab explain` finds known failures from a message, a log or a description. <!--
#   tests/failures/test_explanation.py -->
# - If there is no message, answer the [five questions](#Five-questions).
#
# Next: [notebook 09](09_xray_your_model.ipynb) shows in which dtypes a model will run.
#
# ## Exercises
#
# Replace the dots with your answer and run the cell to check it. A hint and a solution are folded below
# each exercise. <!-- tests/notebooks/test_exercises.py -->

# %%
import torch  # noqa: F401  # for your answers

from course.exercises import checks_of

exercises = checks_of("08_when_amp_breaks")

# %% [markdown]
# ### 1. Where does a sum of squares end?
#
# You square a whole number in fp16 and add the square to itself. What is the largest whole number for which
# [this sum](08a_values.ipynb#A-norm-written-by-hand-overflows-above-256) is finite?

# %%
largest_value = ...
exercises.check_largest_value(largest_value)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The sum has to stay below 65520, which rounds to infinity. How much is left for each square?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# largest_value = 180
# ```
#
# The root of 32760 is 180.997. The square of 181 rounds up to 32768. Twice 32768 is 65536, which becomes infinite.
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
# Look for each symptom in the tables of this page.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# codes = ("AMP0026", "AMP0015", "AMP0007")
# ```
#
# In the first run, the cast weights come from the cache of an outer autocast block. In the second run, the gradients
# are clipped while they are still scaled. In the third run, one bad batch has made the buffers of batch normalisation
# inf or NaN.
#
# </details>
#
# ### 3. Mask scores in any dtype
#
# Complete `mask_scores`. A score is hidden where `mask` is True. `mask_scores` must work in fp16, bf16 and fp32. A row
# that is hidden everywhere must not become NaN in the softmax.


# %%
def mask_scores(scores, mask):
    return ...


exercises.check_masked(mask_scores)

# %% [markdown]
# <details><summary>Hint</summary>
#
# [A mask value does not fit into fp16](08a_values.ipynb#A-mask-value-does-not-fit-into-fp16) shows what works. Where
# do you get the number that you fill in?
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
# </details>
#
# ### 4. Keep the schedule with the training
#
# The loop calls `advance` after `scaler.step(optimizer)`. Complete `advance`: update the scaler, and then call
# `scheduler.step()`, except after a skipped step.


# %%
def advance(scaler, scheduler):
    return ...


exercises.check_advance(advance)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How does `update` change the scale after a skipped step and after a good step?
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
# Here, `update` lowers the scale after a skipped step. After a good step, the scale stays or grows.
#
# </details>
#
# ## Further reading
#
# - [Automatic mixed precision
#   examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the order of calls,
#   for example for clipping and accumulation.
# - [`torch.amp`](https://docs.pytorch.org/docs/stable/amp.html): what autocast casts, for example on CUDA.
