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
# | [The loss scale falls towards 0](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0002` | the loss scale keeps falling, or every step is skipped<br>GradScaler halves the scale at every iteration until it is 0 |
# | [A layer does not learn because its gradients underflow](08b_learning.ipynb#A-layer-does-not-learn-because-its-gradients-underflow) `AMP0003` | in fp16 some gradients are exactly zero<br>gradients vanish in fp16 and the layer does not learn |
# | [Weights get no gradient after an evaluation pass](08b_learning.ipynb#Weights-get-no-gradient-after-an-evaluation-pass) `AMP0025` | some gradients are None under autocast<br>element 0 of tensors does not require grad and does not have a grad_fn, only with autocast |
# | [The scaler runs with bf16 or the dtype is not the one you meant](08b_learning.ipynb#The-scaler-runs-with-bf16-or-the-dtype-is-not-the-one-you-meant) `AMP0028` | the loss scale grows and grows<br>with bf16 the scale of GradScaler grows until it is inf |
# | [Half precision weights stop moving](08b_learning.ipynb#Half-precision-weights-stop-moving) `AMP0029` | bf16 weights never move: after many Adam steps they are the same as at the start<br>pure bf16 training stagnates, while with fp32 weights the loss goes on falling |
# | [Adam makes fp16 weights NaN](08b_learning.ipynb#Adam-makes-fp16-weights-NaN) `AMP0121` | parameters are NaN after one step of Adam<br>weights are NaN or inf after the first optimizer step in fp16, though the gradients are finite |
# | [Positions or counts are wrong beyond 256](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0030` | results are good on short inputs and bad on long ones in bf16<br>RoPE in bf16 loses precision for a long context |
# | [A loss summed up in bf16 is too small](08b_learning.ipynb#A-loss-summed-up-in-bf16-is-too-small) `AMP0123` | the logged loss moves in steps, stands still or falls to 0 in bf16, and `loss.item()` is right<br>the average loss of an epoch is too small in bf16 |
# | [Weights were cast to FP8 without a scale](08b_learning.ipynb#Weights-were-cast-to-FP8-without-a-scale) `AMP0120` | `` not implemented for 'Float8_e4m3fn' ``<br>`` Promotion for Float8 Types is not supported, attempted to promote … and … ``<br>`` mat1 and mat2 must have the same dtype, but got Float and Float8_e4m3fn ``<br>`` self and mat2 must have the same dtype, but got Float and Float8_e4m3fn ``<br>`` expected m1 and m2 to have the same dtype, but got: …Float8_e4m3fn ``<br>`` not implemented for 'Float8_e5m2' ``<br>`` not implemented for 'Float8_e4m3fnuz' ``<br>`` Input type (…) and bias type (…Float8_e4m3fn) should be the same ``<br>after model.to(torch.float8_e4m3fn) the images or texts are bad<br>many weights are zero, or some are NaN, after a cast to float8 |
# | [DeepSpeed or fairseq stops because the loss scale is at its minimum](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0070` | `` Current loss scale already at minimum - cannot decrease scale anymore. ``<br>`` Minimum loss scale reached (0.0001). Your loss is probably exploding. ``<br>DeepSpeed exits with fp16 after many OVERFLOW lines<br>fp16 fine-tuning of a model that was pretrained in bf16 ends at the minimum loss scale |
# | [Apex or DeepSpeed logs an overflow and skips steps](08b_learning.ipynb#The-loss-scale-falls-towards-0) `AMP0071` | `` Gradient overflow.  Skipping step, loss scaler … reducing loss scale to ``<br>`` OVERFLOW! Rank … Skipping step. Attempted loss scale: … ``<br>Apex reduces the loss scale at every step, down to 0 and a ZeroDivisionError<br>is a gradient overflow message of Apex or DeepSpeed a problem |
# | [One loss of a GAN pulls down the loss scale of the other](07_training_recipes.ipynb#Use-several-losses-and-optimizers) `AMP0129` | GAN training in fp16: the scale falls because of the discriminator, and the generator learns nothing<br>one GradScaler for two losses, and the scale keeps falling |
# | [An average of weights (EMA) stands still in bf16](08b_learning.ipynb#Half-precision-weights-stop-moving) `AMP0122` | EMA weights do not change in bf16<br>the EMA model stays at its initial weights in half precision |
# | [8-bit Adam gives NaN or trains worse](16_low_precision_state.ipynb#State-in-fewer-bits) `AMP0128` | 8-bit Adam gives NaN after a few steps, 32-bit Adam does not<br>AdamW8bit makes the loss NaN after an update of bitsandbytes |
# | [A diffusion model gets rounded timesteps or a rounded noise schedule](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0124` | two timesteps of a diffusion model are the same in bf16<br>timestep 999 becomes 1000 in half precision |
# | [NMS keeps boxes twice, or a mask has a row too many, in half precision](08b_learning.ipynb#Positions-or-counts-are-wrong-beyond-256) `AMP0125` | the same box is detected twice: NMS leaves duplicates in fp16<br>batched_nms suppresses nothing in half precision |
# | [A router (MoE) chooses other experts in bf16](18_inference_and_export.ipynb#Which-decisions-change?) `AMP0126` | MoE tokens go to other experts in bf16 than in fp32<br>the router of a mixture of experts is unstable in bf16 |
# | [Log-probabilities of the trainer and of vLLM differ](17_language_model.ipynb#The-same-prompt,-another-text) `AMP0127` | vLLM logprobs and the trainer's logprobs do not match in bf16<br>with bf16, the importance sampling ratio is not 1 before the first update in GRPO or PPO |
# | [A KL divergence or a ratio of probabilities is noisy in bf16](09_xray_your_model.ipynb#The-surprise-in-cross-entropy) `AMP0090` | a KL divergence, or a ratio of probabilities, is noisy in bf16<br>the KL term is not 0 for two equal models in bf16 |
# | [FP8 with a scale for each row gives NaN with LoRA](15_below_16_bits.ipynb#The-values-that-share-a-scale) `AMP0088` | FP8 with a scale for each row gives NaN with LoRA<br>the loss is NaN from the first step with torchao float8 and LoRA |
#
# ### Repair errors of the GradScaler
#
# | what goes wrong | what you see |
# |---|---|
# | [The parameters are fp16](08c_scaler.ipynb#The-parameters-are-fp16) `AMP0009` | `` Attempting to unscale FP16 gradients. ``<br>LoRA fine-tuning with fp16 mixed precision fails in clip_grad_norm_ of accelerate<br>Trainer with fp16=True and a model loaded with torch_dtype=torch.float16 fails at the first step |
# | [Gradients are unscaled twice](08c_scaler.ipynb#Gradients-are-unscaled-twice) `AMP0010` | `` unscale_() has already been called on this optimizer since the last update(). ``<br>gradient accumulation with AMP and gradient clipping raises a RuntimeError<br>gradient_accumulation_steps above 1 fails in clip_grad_norm_ with fp16 |
# | [An optimizer has no gradients](08c_scaler.ipynb#An-optimizer-has-no-gradients) `AMP0011` | `` No inf checks were recorded for this optimizer. ``<br>some gradients are `None`<br>without the scaler the loss does not change at all, with it there is an AssertionError |
# | [Scaler methods are called in the wrong order](08c_scaler.ipynb#Scaler-methods-are-called-in-the-wrong-order) `AMP0012` | `` step() has already been called since the last update(). ``<br>`` unscale_() is being called after step(). ``<br>`` No inf checks were recorded prior to update. ``<br>`` Attempted unscale_ but _scale is None. ``<br>`` Attempted step but _scale is None. ``<br>`` Attempted update but _scale is None. ``<br>`` A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler.update(). ``<br>the loss that I log is wrong by a factor of 2 after scaler.update()<br>right order of scale, unscale_, clip, step and update of the GradScaler |
# | [The optimizer steps without the scaler](08c_scaler.ipynb#The-optimizer-steps-without-the-scaler) `AMP0131` | optimizer.step() is called instead of scaler.step(optimizer)<br>optimizer.step() and scaler.step(optimizer) are both called |
# | [The optimizer needs a closure](08c_scaler.ipynb#The-optimizer-needs-a-closure) `AMP0013` | `` Closure use is not currently supported if GradScaler is enabled. ``<br>`` AMP and the LBFGS optimizer are not compatible. ``<br>SAM, or another optimizer with two passes, gives NaN in fp16<br>how to use L-BFGS with mixed precision |
# | [The scheduler warns that it came before the optimizer](08c_scaler.ipynb#The-scheduler-warns-that-it-came-before-the-optimizer) `AMP0014` | `` Detected call of `lr_scheduler.step()` before `optimizer.step()`. ``<br>`` Detected call of `scheduler.step()` before `optimizer.step()`. ``<br>warning about the order of the scheduler and the optimizer although I call scaler.step first<br>lr_scheduler is ahead of the optimizer because scaler.step skipped steps |
# | [The scaler cannot unscale bf16 gradients](08c_scaler.ipynb#The-parameters-are-fp16) `AMP0130` | `` "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16' ``<br>`` "_amp_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16' ``<br>`` "_amp_foreach_non_finite_check_and_unscale_cpu" not implemented for 'ComplexFloat' ``<br>Trainer with fp16=True fails because the model was loaded in bfloat16<br>QLoRA with a bf16 model and fp16 mixed precision: NotImplementedError in the grad scaler |
# | [Two optimizers share one scaler, and update is called between their steps](07_training_recipes.ipynb#Use-several-losses-and-optimizers) `AMP0132` | GAN in mixed precision with one GradScaler for generator and discriminator<br>where to call scaler.update() with two optimizers |
# | [A gradient penalty is computed from scaled gradients](07_training_recipes.ipynb#Penalise-gradients) `AMP0133` | WGAN-GP with mixed precision: the gradient penalty is huge, inf or NaN<br>gradient penalty with double backward overflows at every step with the scaler |
# | [The loss that the scaler gets is not one tensor](07_training_recipes.ipynb#Use-several-losses-and-optimizers) `AMP0134` | `` outputs must be a Tensor or an iterable of Tensors ``<br>`` 'map' object has no attribute 'backward' ``<br>scaler.scale(loss) with a dict of losses<br>scaler.scale(loss.item()) raises a ValueError |
# | [The scaler does not run on the device of the gradients](08c_scaler.ipynb) `AMP0135` | `` Could not run 'aten::_amp_foreach_non_finite_check_and_unscale_' with arguments from the '…' backend ``<br>`` Could not run 'aten::_amp_non_finite_check_and_unscale_' with arguments from the '…' backend ``<br>`` Required aspect fp64 is not supported on the device ``<br>GradScaler with parameters that are offloaded to the CPU<br>GradScaler does not work on an Intel Arc GPU |
# | [The scaler refuses a setting](03_grad_scaler_step_by_step.ipynb) `AMP0136` | `` The growth factor must be > 1.0. ``<br>`` The backoff factor must be < 1.0. ``<br>`` new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False. ``<br>how to keep the loss scale constant with GradScaler<br>scaler.update(1024) raises AttributeError: 'int' object has no attribute 'device' |
# | [Lightning clips scaled gradients in manual optimization](08d_loop_and_resume.ipynb#Clipping-leaves-next-to-nothing-of-the-gradients) `AMP0137` | self.clip_gradients in manual optimization with precision 16-mixed hardly trains<br>unscale gradients before clipping in Lightning manual optimization |
# | [Lightning refuses to clip with a fused optimizer](07_training_recipes.ipynb#Clip-gradients) `AMP0074` | `` The current optimizer, …, does not allow for gradient clipping because it performs unscaling of gradients internally. ``<br>`` does not allow for gradient clipping because it performs unscaling of gradients internally ``<br>`` Gradient clipping is not implemented for optimizers handling the unscaling. ``<br>gradient_clip_val with AdamW(fused=True) and mixed precision in Lightning<br>fabric.clip_gradients with a fused optimizer in 16-mixed |
# | [The ranks of FSDP need one decision about the loss scale](11_scale_out.ipynb#One-decision-about-the-loss-scale) `AMP0138` | FSDP in fp16 hangs or the ranks diverge after an overflow<br>ShardedGradScaler or GradScaler: which one with FSDP2 and fully_shard |
# | [The optimizer's step was replaced after the scheduler was made](13_from_apex.ipynb) `AMP0139` | `` Seems like `optimizer.step()` has been overridden after learning rate scheduler initialization. ``<br>scheduler warning after amp.initialize of Apex<br>UserWarning of the learning rate scheduler that optimizer.step has been overridden in mixed precision |
#
# ### Repair clipping, the loop and a resumed run
#
# | what goes wrong | what you see |
# |---|---|
# | [Gradients are clipped while they are still scaled](08d_loop_and_resume.ipynb#Gradients-are-clipped-while-they-are-still-scaled) `AMP0015` | the loss stops decreasing when I add clip_grad_norm_ with torch.cuda.amp<br>the logged gradient norm is huge in fp16, such as 80000 |
# | [Clipping refuses a norm that is not finite](08d_loop_and_resume.ipynb#Clipping-refuses-a-norm-that-is-not-finite) `AMP0016` | `` The total norm of order … for gradients from `parameters` is non-finite, so it cannot be clipped. ``<br>clip_grad_norm_ raises because the gradient norm is inf, although the scaler would skip the step<br>error_if_nonfinite stops training in fp16 |
# | [The loss stands still because the whole loop is in one block](08d_loop_and_resume.ipynb#The-loss-stands-still-because-the-whole-loop-is-in-one-block) `AMP0026` | the loss stays exactly the same in every step, autocast is around the whole training loop<br>the KL to the reference model stays 0, or swapping in other weights (EMA, reference) has no effect |
# | [After resuming the loss jumps or is NaN](08d_loop_and_resume.ipynb#After-resuming-the-loss-jumps-or-is-NaN) `AMP0046` | the loss jumps after resuming from a checkpoint in mixed precision<br>the loss is NaN after resuming from a checkpoint |
# | [Weights and optimizer state have different dtypes](08d_loop_and_resume.ipynb#Weights-and-optimizer-state-have-different-dtypes) `AMP0140` | `` expected dtype … for `end` but got dtype … ``<br>`` expected dtype … for `end`, but got dtype … ``<br>`` params, grads, … must have same dtype, device, and layout ``<br>optimizer.step() fails with a dtype error after the model was cast or a checkpoint was loaded<br>dtype error when a moving average (EMA) in fp32 is updated with bf16 weights |
# | [The state of the scaler cannot be loaded](08d_loop_and_resume.ipynb#The-state-of-the-scaler-cannot-be-loaded) `AMP0017` | `` The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. ``<br>scaler.load_state_dict fails because the checkpoint is of a bf16 or fp32 run<br>the checkpoint was saved without AMP and I want to resume with AMP |
# | [torch.load refuses a checkpoint with a scaler](08d_loop_and_resume.ipynb#torch.load-refuses-a-checkpoint-with-a-scaler) `AMP0142` | `` Unsupported global: GLOBAL torch.amp.grad_scaler.GradScaler was not an allowed global by default. ``<br>`` Unsupported global: GLOBAL torch.cuda.amp.grad_scaler.GradScaler was not an allowed global by default. ``<br>`` Unsupported global: GLOBAL deepspeed.runtime.fp16.loss_scaler.… was not an allowed global by default. ``<br>torch.load fails with weights_only since PyTorch 2.6, the checkpoint contains the GradScaler<br>Weights only load failed when resuming, LossScaler or GradScaler is not an allowed global |
# | [A loop of p = p.float() over the parameters changes nothing](08d_loop_and_resume.ipynb) `AMP0093` | `` p = p.float() ``<br>p = p.float() for all parameters does not change the dtype of the model<br>parameters stay bf16 after I cast them in a loop |
# | [Memory runs out only when a run is resumed](08d_loop_and_resume.ipynb) `AMP0141` | `` default_restore_location…CUDA out of memory. Tried to allocate ``<br>`` CUDA out of memory when resuming training ``<br>`` resuming training…CUDA out of memory ``<br>`` resuming from…CUDA out of memory ``<br>`` resume from checkpoint…CUDA out of memory ``<br>`` resum…out of memory…from scratch ``<br>`` out of memory…resum…from scratch ``<br>out of memory only when resuming from a checkpoint, training from scratch fits<br>resuming uses more GPU memory than starting from scratch with the same batch size |
# | [Accumulated gradients differ from those of one large batch](07_training_recipes.ipynb#Accumulate-gradients) `AMP0143` | gradient accumulation gives another loss, or worse results, than one large batch<br>the gradient norm is too large by the number of accumulation steps |
# | [The gradient norm is inf in a few steps, and training goes on](03_grad_scaler_step_by_step.ipynb#The-scale-over-a-whole-training-run) `AMP0144` | grad_norm is inf in the first steps of training, and nothing else is wrong<br>the running average of grad_norm is inf or NaN, although the loss falls |
# | [Names in a checkpoint begin with _orig_mod](08d_loop_and_resume.ipynb) `AMP0145` | `` Unexpected key(s) in state_dict: …_orig_mod. ``<br>`` Missing key(s) in state_dict: …_orig_mod. ``<br>`` prefix _orig_mod ``<br>`` _orig_mod prefix ``<br>the keys of the state dict have the prefix _orig_mod after torch.compile<br>strict=False loads no weights of the checkpoint of a compiled model |
# | [A checkpoint is fp32, and so twice as large as expected](18_inference_and_export.ipynb#Ways-to-run-it) `AMP0146` | the checkpoint of a mixed precision run is twice as large as expected<br>the saved model is fp32 although I trained in fp16 or bf16 |
# | [Evaluation gives other metrics than during training](18_inference_and_export.ipynb#Ways-to-run-it) `AMP0147` | evaluation without autocast gives another accuracy than with autocast<br>validation metrics during training differ from those of the same weights afterwards |
# | [Weights become infinite because the model was cast to fp16 for evaluation or saving](08d_loop_and_resume.ipynb) `AMP0148` | `` Skipping checkpoint save at epoch …: EMA contains NaN/Inf ``<br>`` Skipping checkpoint save at epoch …: EMA and model contain NaN/Inf ``<br>the averaged weights (EMA) contain NaN or inf after validation in half precision<br>no checkpoint is saved because the EMA has inf or NaN, but the metrics are fine |
# | [The scaler's growth tracker is set before its scale](08d_loop_and_resume.ipynb) `AMP0149` | `` _growth_tracker initialized before _scale ``<br>Accelerator.load_state with FSDP2 and fp16 changes the loss scale or fails<br>the loss scale after load_state differs from the one in scaler.pt |
#
# ### Repair dtypes that do not match
#
# | what goes wrong | what you see |
# |---|---|
# | [A half precision output leaves the block](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0018` | `` mat1 and mat2 must have the same dtype, but got Half and Float ``<br>`` mat1 and mat2 must have the same dtype, but got BFloat16 and Float ``<br>`` expected m1 and m2 to have the same dtype, but got: c10::Half != float ``<br>`` expected scalar type Half but found Float ``<br>`` expected scalar type Float but found Half ``<br>`` expected scalar type BFloat16 but found Float ``<br>`` expected scalar type Float but found BFloat16 ``<br>`` Input type (c10::Half) and bias type (float) should be the same ``<br>`` RNN input dtype (torch.float16) does not match weight dtype (torch.float32). ``<br>`` prelu: Type promoting not supported. Got Half and Float ``<br>`` dot : expected both vectors to have same dtype, but found Half and Float ``<br>`` both inputs should have same dtype ``<br>`` All tensors must have the same dtype, got input1: c10::Half, input2: float, weight: float ``<br>`` Input dtypes must be the same, got: input float, batch1: c10::Half, batch2: c10::Half ``<br>`` addmv input tensors must have the same dtype, but got Float, Half, and Float ``<br>`` Found dtype Float but expected Half ``<br>`` expected dtype c10::Half for `end` but got dtype float ``<br>`` expected mat1 and mat2 to have the same dtype, but got: c10::Half != float ``<br>`` Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same ``<br>`` Input type (CUDABFloat16Type) and weight type (torch.cuda.FloatTensor) should be the same ``<br>`` Input type (CPUBFloat16Type) and weight type (torch.FloatTensor) should be the same ``<br>`` Expected object of scalar type Float but got scalar type Half ``<br>only forward runs under autocast, and the loss outside raises about half and float<br>the criterion gets a float16 output and a float32 target |
# | [The model is in half precision but its input is fp32](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0150` | `` mat1 and mat2 must have the same dtype, but got Float and Half ``<br>`` mat1 and mat2 must have the same dtype, but got Float and BFloat16 ``<br>`` expected m1 and m2 to have the same dtype, but got: float != c10::Half ``<br>`` Input type (float) and bias type (c10::Half) should be the same ``<br>`` RNN input dtype (torch.float32) does not match weight dtype (torch.float16). ``<br>`` RNN input dtype (torch.float32) does not match weight dtype (torch.bfloat16). ``<br>`` mixed dtype (CPU): expect parameter to have scalar type of Float ``<br>`` prelu: Type promoting not supported. Got Float and Half ``<br>`` expected mat1 and mat2 to have the same dtype, but got: float != c10::Half ``<br>`` Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same ``<br>`` Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same ``<br>`` Input type (torch.cuda.FloatTensor) and weight type (CUDABFloat16Type) should be the same ``<br>`` Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same ``<br>`` argument #1 'input' to have the same type as tensor for argument #2 'weight'; but type torch.cuda. ``<br>the model was loaded in float16 and its first layer refuses the input<br>model.half() and then the input does not match the weights |
# | [Writing into a buffer fails](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0019` | `` Index put requires the source and destination dtypes match, got Float for the destination and Half for the source. ``<br>`` index_add_(): self (Float) and source (Half) must have the same scalar type ``<br>`` index_reduce_(): self (Float) and source (Half) must have the same scalar type ``<br>`` index_copy_(): self and source expected to have the same dtype, but got (self) Float and (source) Half ``<br>`` put_(): self and source expected to have the same dtype, but got self.dtype = Float and source.dtype = Half ``<br>`` masked_scatter: expected self and source to have same dtypes but got ``<br>`` scatter(): Expected self.dtype to be equal to src.dtype ``<br>`` Expected out tensor to have dtype c10::Half, but got float instead ``<br>`` masked_scatter_: expected self and source to have same dtypes but got ``<br>`` Expected out tensor to have dtype float, but got c10::Half instead ``<br>assigning to a slice of a tensor by index fails under autocast<br>image features cannot be merged into the text embeddings because of their dtype |
# | [A custom autograd function fails in backward](08e_dtypes.ipynb#A-custom-autograd-function-fails-in-backward) `AMP0020` | `` user_fn(self, *args)…expected scalar type Half but found Float ``<br>`` user_fn(self, *args)…mat1 and mat2 must have the same dtype, but got Half and Float ``<br>`` user_fn(self, *args)…expected mat1 and mat2 to have the same dtype, but got: c10::Half != float ``<br>`` user_fn(self, *args)…expected mat1 and mat2 to have the same dtype, but got: float != c10::Half ``<br>the backward of my autograd.Function gets a half gradient and float tensors<br>my custom autograd.Function works without autocast and fails with it |
# | [fp16 and bf16 are mixed in one model](08e_dtypes.ipynb#fp16-and-bf16-are-mixed-in-one-model) `AMP0021` | `` mat1 and mat2 must have the same dtype, but got BFloat16 and Half ``<br>`` mat1 and mat2 must have the same dtype, but got Half and BFloat16 ``<br>`` expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Half ``<br>`` Input type (c10::BFloat16) and bias type (c10::Half) should be the same ``<br>`` expected scalar type BFloat16 but found Half ``<br>`` expected scalar type Half but found BFloat16 ``<br>`` RNN input dtype (torch.bfloat16) does not match weight dtype (torch.float16). ``<br>`` RNN input dtype (torch.float16) does not match weight dtype (torch.bfloat16). ``<br>`` Unexpected floating ScalarType in ``<br>`` expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != c10::Half ``<br>`` Input type (CUDABFloat16Type) and weight type (torch.cuda.HalfTensor) should be the same ``<br>`` Input type (torch.cuda.HalfTensor) and weight type (CUDABFloat16Type) should be the same ``<br>bfloat16 and float16 are mixed, for weights and inputs<br>bf16 autocast around a model that was loaded in fp16 |
# | [The input is float64 or an integer](08e_dtypes.ipynb#The-input-is-float64-or-an-integer) `AMP0151` | `` mat1 and mat2 must have the same dtype, but got Double and Float ``<br>`` mat1 and mat2 must have the same dtype, but got Long and Float ``<br>`` mat1 and mat2 must have the same dtype, but got Byte and Float ``<br>`` mat1 and mat2 must have the same dtype, but got Double and BFloat16 ``<br>`` expected m1 and m2 to have the same dtype, but got: double != float ``<br>`` expected m1 and m2 to have the same dtype, but got: long int != float ``<br>`` expected scalar type Double but found Float ``<br>`` expected scalar type Long but found Float ``<br>`` Input type (double) and bias type (float) should be the same ``<br>`` Input type (long int) and bias type (float) should be the same ``<br>`` Input type (unsigned char) and bias type (float) should be the same ``<br>`` RNN input dtype (torch.float64) does not match weight dtype (torch.float32). ``<br>`` mixed dtype (CPU): all inputs must share same datatype. ``<br>`` Found dtype Double but expected Float ``<br>`` Found dtype Long but expected Float ``<br>`` mat1 and mat2 must have the same dtype, but got Float and Double ``<br>`` mat1 and mat2 must have the same dtype, but got Double and Half ``<br>`` mat1 and mat2 must have the same dtype, but got BFloat16 and Double ``<br>`` mat1 and mat2 must have the same dtype, but got Int and Float ``<br>`` expected mat1 and mat2 to have the same dtype, but got: double != float ``<br>`` expected scalar type Float but found Double ``<br>`` expected scalar type Double but found Half ``<br>`` expected scalar type Float but found Long ``<br>`` expected scalar type Long but found Int ``<br>`` expected target dtype to be Long or Byte, but got ``<br>`` Expected object of scalar type Float but got scalar type Double ``<br>`` Input type (double) and bias type (c10::Half) should be the same ``<br>`` Input type (unsigned char) and bias type (c10::Half) should be the same ``<br>`` Input type (torch.cuda.DoubleTensor) and weight type (torch.cuda.FloatTensor) should be the same ``<br>`` Input type (torch.DoubleTensor) and weight type (torch.FloatTensor) should be the same ``<br>`` Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.FloatTensor) should be the same ``<br>`` Input type (torch.cuda.ByteTensor) and weight type (CUDABFloat16Type) should be the same ``<br>a tensor from a numpy array or a pandas frame is double and the model float32<br>torch.from_numpy gives float64 and the layer wants float32 |
# | [One tensor inside a half-precision model stays in fp32](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0060` | `` Expected tensor for argument #1 'weight' to have the same type as tensor for argument #1 'per_sample_weights' ``<br>a layer in the middle of a half precision model gets a float32 tensor<br>the positional embedding or the rotary table is float32 in a half precision model |
# | [A kernel of another package refuses half precision or mixed dtypes](08e_dtypes.ipynb#A-custom-autograd-function-fails-in-backward) `AMP0078` | `` input should have the same type as rois ``<br>`` Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'rois' ``<br>`` dets should have the same type as scores ``<br>`` Expected delta.scalar_type() == input_type ``<br>`` "ScaledL2_Forward_CUDA" not implemented for 'Half' ``<br>`` "ms_deform_attn_forward_cuda" not implemented for 'Half' ``<br>`` "deform_conv_forward_cuda" not implemented for 'Half' ``<br>a CUDA extension or compiled kernel has no half precision version<br>deformable attention or deformable convolution does not run with amp |
# | [The attention mask has another dtype than the query](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0081` | `` Expected attn_mask dtype to be bool or float or to match query dtype ``<br>`` Expected attn_mask dtype to be bool or to match query dtype ``<br>`` invalid dtype for bias - should match query's dtype ``<br>scaled_dot_product_attention refuses the mask<br>the attention mask is bfloat16 and the query float32 |
# | [A model from Accelerate or Fabric returns fp32](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0094` | the output of a model prepared by accelerate is float32 although mixed precision is on<br>accelerator.prepare with mixed_precision bf16 and outputs.logits is float32 |
# | [Attention gets q, k and v in two dtypes](17_language_model.ipynb#One-dtype-for-q,-k-and-v) `AMP0097` | `` Expected query, key, and value to have the same dtype ``<br>`` Query/Key/Value should either all have the same dtype ``<br>`` query and key must have the same dtype ``<br>`` query and value must have the same dtype ``<br>`` cuDNN attention expects query, key and value to have the same dtype ``<br>the query is float32 and key and value are half<br>flash attention or xformers refuses q and k after a norm or a rotary embedding |
# | [An integer tensor cannot take the result of an in-place op](08e_dtypes.ipynb#The-input-is-float64-or-an-integer) `AMP0152` | `` result type Float can't be cast to the desired output type Long ``<br>`` result type Half can't be cast to the desired output type Long ``<br>`` result type BFloat16 can't be cast to the desired output type Long ``<br>`` result type Float can't be cast to the desired output type long int ``<br>`` result type Float can't be cast to the desired output type Byte ``<br>averaging the weights of two models fails at num_batches_tracked<br>binary_cross_entropy_with_logits with integer targets: dtype error |
# | [The weight and the bias of one layer have two dtypes](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0153` | `` self and mat2 must have the same dtype, but got BFloat16 and Float ``<br>`` self and mat2 must have the same dtype, but got Float and BFloat16 ``<br>`` self and mat2 must have the same dtype, but got Half and Float ``<br>`` self and mat2 must have the same dtype, but got Float and Half ``<br>F.linear raises because weight and bias have different dtypes<br>a dequantized weight is float32 and the bias bfloat16 |
# | [A LoRA model trains, but generate() or evaluation raises](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0154` | `` fast_lora.py…to have the same dtype ``<br>QLoRA training runs and model.generate in a callback says float and bfloat16<br>LoRA adapters are float32 and the base model is bfloat16 |
# | [FP8 weights reach an op that has no FP8](08e_dtypes.ipynb#The-model-is-in-half-precision-but-its-input-is-fp32) `AMP0155` | `` mat1 and mat2 must have the same dtype, but got BFloat16 and Float8_e4m3fn ``<br>`` mat1 and mat2 must have the same dtype, but got Half and Float8_e4m3fn ``<br>`` mat1 and mat2 must have the same dtype, but got Half and Float8_e5m2 ``<br>`` self and mat2 must have the same dtype, but got BFloat16 and Float8_e4m3fn ``<br>`` expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Float8_e4m3fn ``<br>`` Input type (CPUBFloat16Type) and weight type (CPUFloat8_e4m3fnType) should be the same ``<br>`` Promotion for Float8 Types is not supported, attempted to promote BFloat16 and Float8_e4m3fn ``<br>`` Promotion for Float8 Types is not supported, attempted to promote ``<br>an fp8 checkpoint does not run because the input is bfloat16<br>fp8_e4m3fn weights in ComfyUI and a LoRA or another node fails |
# | [A quantized layer computes in another dtype than the model](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0156` | `` Expected Tensor argument scales to have dtype torch.bfloat16, but got torch.float32 instead ``<br>`` self and mat2 must have the same dtype, but got Half and Char ``<br>`` expected mat1 and mat2 to have the same dtype, but got: c10::Half != signed char ``<br>a 4 bit model of bitsandbytes fails at lm_head with half and float<br>bnb_4bit_compute_dtype is float32 and the other layers are float16 |
# | [Quantization-aware training fails under autocast](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0157` | `` fused_moving_avg_obs_fake_quant…expected scalar type Float but found Half ``<br>fake quantization raises under autocast<br>prepare_qat_fx and mixed precision do not work together |
# | [Selective checkpointing of a shared weight fails in backward](08e_dtypes.ipynb#fp16-and-bf16-are-mixed-in-one-model) `AMP0158` | `` encountered during backward but not found in storage ``<br>create_selective_checkpoint_contexts and autocast fail in the backward pass<br>selective activation checkpointing with amp fails if two blocks share a weight |
# | [A gradient of another dtype is assigned to a weight](08e_dtypes.ipynb#Writing-into-a-buffer-fails) `AMP0159` | `` attempting to assign a gradient with dtype '…' to a tensor with grad_dtype '…' ``<br>`` attempting to assign a gradient with dtype 'float' to a tensor with grad_dtype '…' ``<br>master.grad = param.grad fails because one is half and the other float<br>copying fp16 gradients to fp32 master weights raises |
#
# ### Replace ops and devices that refuse half precision
#
# | what goes wrong | what you see |
# |---|---|
# | [BCELoss is refused on a GPU](08f_ops_and_devices.ipynb#BCELoss-is-refused-on-a-GPU) `AMP0022` | `` torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. ``<br>BCELoss raises an error under mixed precision but runs in fp32<br>binary_cross_entropy is unsafe to autocast, but my model ends with a sigmoid |
# | [An op does not exist in half precision](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0023` | `` "…" not implemented for 'half' ``<br>`` "…" not implemented for 'Bfloat16' ``<br>`` quantile() input tensor must be either float or double dtype ``<br>`` …: Low precision dtypes not supported. Got … ``<br>`` This function doesn't handle types other than float and double ``<br>`` view_as_complex is only supported for half, float and double tensors, but got a tensor of ``<br>`` expected a tensor with 2 or more dimensions of float, double, cfloat or cdouble types ``<br>`` Expected both inputs to be Half, Float or Double tensors but got BFloat16 ``<br>`` ConvTranspose 3D with BF16 or FP16 types is not supported on MPS ``<br>SVD, QR, Cholesky or the inverse of a matrix fails in fp16 or bf16<br>interpolate with antialias or bicubic fails in half precision |
# | [NumPy does not know bf16](08f_ops_and_devices.ipynb#NumPy-does-not-know-bf16) `AMP0024` | `` Got unsupported ScalarType BFloat16 ``<br>`` Unsupported dtype in DLTensor. ``<br>`` can't convert np.ndarray of type …Bfloat16. The only supported types are ``<br>a bf16 tensor cannot be converted to a NumPy array<br>matplotlib, sklearn or a metric fails on a bf16 prediction |
# | [Autocast refuses the device or its dtype](08f_ops_and_devices.ipynb#Autocast-refuses-the-device-or-its-dtype) `AMP0036` | `` User specified an unsupported autocast device_type ``<br>`` unknown device type for autocast in get_autocast_dispatch_key_from_device_type ``<br>`` Expected `device_type` of type `str`, got ``<br>`` In … autocast, but the target dtype is not supported. Disabling autocast. ``<br>`` … Autocast only supports dtypes of torch.bfloat16, torch.float16 currently. ``<br>`` RuntimeError: unsupported scalarType ``<br>`` … Autocast only supports dtype of … currently. ``<br>`` User specified autocast device_type must be ``<br>`` Currently, AutocastCPU only support Bfloat16 as the autocast_cpu_dtype ``<br>`` Tried to use AMP with the `…` backend, but the backend has not registered a module ``<br>torch.autocast does not work on a Mac<br>autocast switches itself off with a warning about the target dtype |
# | [The GPU has no bf16](08f_ops_and_devices.ipynb#The-GPU-has-no-bf16) `AMP0160` | `` Current CUDA Device does not support bfloat16. Please switch dtype to float16. ``<br>`` CUBLAS_STATUS_NOT_SUPPORTED when calling …CUDA_R_16BF ``<br>`` CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemm ``<br>`` Feature ….bf16… requires .target sm_80 or higher ``<br>`` Sparse operations with CUDA tensors of BFloat16 type are not supported on GPUs with compute ``<br>`` sparse_mm: CUDA BFloat16 requires compute capability ``<br>bf16 is slower than fp32 on a T4 or V100<br>torch.cuda.is_bf16_supported returns True on a T4, although it has no bf16 |
# | [An FFT is refused in half precision](08f_ops_and_devices.ipynb#An-FFT-is-refused-in-half-precision) `AMP0038` | `` Unsupported dtype half ``<br>`` Unsupported dtype Bfloat16 ``<br>`` cuFFT only supports dimensions whose sizes are powers of two when computing in ``<br>`` cuFFT doesn't support bfloat16 with compute capability less than ``<br>`` cuFFT doesn't support signals of half type with compute capability less than ``<br>`` MKL FFT doesn't support tensors of type ``<br>`` "…" not implemented for 'Complexhalf' ``<br>`` ComplexHalf support is experimental and many operators don't support it yet. ``<br>torch.fft or rfft fails under autocast or with model.half()<br>stft or a mel spectrogram fails in fp16 |
# | [MPS has no float64](08f_ops_and_devices.ipynb#MPS-has-no-float64) `AMP0039` | `` Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. ``<br>`` Cannot convert a float64 Tensor to MPS as the MPS framework doesn't support float64. ``<br>`` Required aspect fp64 is not supported on the device ``<br>moving a tensor to the GPU of a Mac fails because of float64<br>code with .double() runs on CUDA and fails on a Mac |
# | [Flash attention refuses fp32](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0043` | `` FlashAttention only support fp16 and bf16 data type ``<br>flash_attention_2 fails because the model is in float32<br>flash attention works in training under autocast and fails in inference |
# | [Attention finds no kernel](08f_ops_and_devices.ipynb#Attention-finds-no-kernel) `AMP0162` | `` No available kernel. Aborting execution ``<br>`` No viable backend for scaled_dot_product_attention was found. ``<br>`` Expected query, key and value to all be of dtype: { ``<br>`` Flash attention kernel not used because: ``<br>`` Flash attention only supports gpu architectures in the range ``<br>scaled_dot_product_attention fails inside sdpa_kernel<br>attention runs in fp16 and fails in fp32 |
# | [A sparse matmul has no half-precision kernel, and .float() does not help](08f_ops_and_devices.ipynb#An-op-does-not-exist-in-half-precision) `AMP0061` | `` "addmm_sparse_cuda" not implemented for 'half' ``<br>`` "addmm_sparse_cuda" not implemented for 'Bfloat16' ``<br>torch.sparse.mm fails under autocast although both inputs are float32<br>a graph neural network with a sparse adjacency matrix fails in fp16 |
# | [vLLM refuses bf16 on a GPU before Ampere](08f_ops_and_devices.ipynb#The-GPU-has-no-bf16) `AMP0068` | `` Bfloat16 is only supported on GPUs with compute capability of at least 8.0. ``<br>vLLM does not start because the model is in bfloat16 and the GPU is too old |
# | [vLLM refuses fp16 for a model that was trained in bf16](19_choose_your_precision.ipynb#Trained-in-bf16,-on-a-GPU-without-it) `AMP0168` | `` The model type '…' does not support float16. Reason: ``<br>Gemma 3 cannot be served in float16 with vLLM<br>a model answers with empty text or only pad tokens in float16 |
# | [MPS has no bf16 on this macOS, and no FP8](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0069` | `` BFloat16 is not supported on MPS ``<br>`` Trying to convert BFloat16 to the MPS backend but it does not have support for that dtype ``<br>`` Trying to convert Float8_… to the MPS backend but it does not have support for that dtype ``<br>a model in bfloat16 cannot be loaded on a Mac<br>an FP8 model such as Flux or Qwen-Image fails in ComfyUI on a Mac |
# | [MPS aborts because two dtypes meet in one op](08e_dtypes.ipynb#A-half-precision-output-leaves-the-block) `AMP0167` | `` error: input types 'tensor<…f16>' and 'tensor<…f32>' are not broadcast compatible ``<br>`` error: input types 'tensor<…f32>' and 'tensor<…f16>' are not broadcast compatible ``<br>`` LLVM ERROR: Failed to infer result type(s) ``<br>Python crashes on a Mac in fp16, without a traceback<br>half precision on MPS ends with Abort trap: 6 |
# | [xFormers has no attention kernel for these inputs](08f_ops_and_devices.ipynb#Attention-finds-no-kernel) `AMP0072` | `` No operator found for `memory_efficient_attention_forward` ``<br>`` No operator found for `memory_efficient_attention_backward` ``<br>`` bf16 is only supported on A100+ GPUs ``<br>xformers fails with bf16 on an old GPU<br>xformers memory efficient attention refuses the dtype |
# | [transformers casts hidden states back for flash attention](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0073` | `` The input hidden states seems to be silently casted in float32 ``<br>warning that hidden states are silently cast to float32 with flash attention |
# | [transformers warns of the dtype when it loads a model with flash attention](08f_ops_and_devices.ipynb#Flash-attention-refuses-fp32) `AMP0169` | `` You are attempting to use Flash Attention … without specifying a ``<br>`` Flash Attention … only supports torch.float16 and torch.bfloat16 dtypes ``<br>does the Flash Attention 2 warning about float32 matter when I train under autocast |
# | [Flash attention needs Ampere or newer](08f_ops_and_devices.ipynb#Attention-finds-no-kernel) `AMP0161` | `` FlashAttention only supports Ampere GPUs or newer ``<br>flash attention 2 in fp16 on a T4, V100 or RTX 2080 |
# | [The GPU has no FP8 matmul](15_below_16_bits.ipynb#Which-GPU-supports-which-format) `AMP0163` | `` torch._scaled_mm is only supported on CUDA devices with compute capability ``<br>`` torch._scaled_mm is only supported on devices with compute capability ``<br>`` torch._scaled_grouped_mm is only supported on CUDA devices with compute capability ``<br>`` type fp8e4nv not supported in this architecture ``<br>FP8 fast mode fails on an RTX 3090 or A100<br>an FP8 checkpoint does not run in vLLM or SGLang on an A100, A10 or 3090 |
# | [An FP8 tensor has no arithmetic](15_below_16_bits.ipynb#Formats-of-a-single-value) `AMP0164` | `` "…" not implemented for 'Float8_…' ``<br>`` Promotion for Float8 Types is not supported, attempted to promote ``<br>adding or multiplying float8_e4m3fn tensors fails<br>merging FP8 models or LoRA weights fails |
# | [torch or a package was not built for this GPU](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0165` | `` no kernel image is available for execution on the device ``<br>`` with CUDA capability sm_… is not compatible with the current PyTorch installation ``<br>every CUDA op fails on a new RTX 50 or an old GTX 10, in fp32 too |
# | [A 16-bit matmul fails inside cuBLAS](08f_ops_and_devices.ipynb#The-GPU-has-no-bf16) `AMP0166` | `` CUBLAS_STATUS_EXECUTION_FAILED when calling …CUDA_R_16 ``<br>`` CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemm ``<br>`` CUBLAS_STATUS_NOT_SUPPORTED when calling …CUDA_R_16F ``<br>a cuBLAS error in fp16 training at a different line in each run<br>cublasGemmEx fails in fp16 on a GPU that has fp16 |
# | [A model in fp16 runs on a CPU with an older torch](08f_ops_and_devices.ipynb) `AMP0066` | `` "LayerNormKernelImpl" not implemented for 'half' ``<br>`` "addmm_impl_cpu_" not implemented for 'half' ``<br>`` "slow_conv2d_cpu" not implemented for 'half' ``<br>half precision on a CPU is not implemented<br>a float16 checkpoint does not run without a GPU |
#
# ### Find the speed and the memory that AMP should save
#
# | what goes wrong | what you see |
# |---|---|
# | [Autocast or the scaler is switched off](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0031` | `` CUDA is not available or torch_xla is imported. Disabling autocast. ``<br>`` torch.cuda.amp.GradScaler is enabled, but CUDA is not available. Disabling. ``<br>`` In … autocast, but the target dtype is not supported. Disabling autocast. ``<br>`` … Autocast only supports dtypes of torch.bfloat16, torch.float16 currently. ``<br>`` User provided device_type of 'cuda', but CUDA is not available. Disabling ``<br>`` CPU Autocast only supports dtype of torch.bfloat16 currently. ``<br>autocast or the GradScaler is disabled, and training goes on in fp32<br>mixed precision is ignored on the CPU or on a machine without a GPU |
# | [A thread runs without autocast or in another dtype](08g_speed_and_memory.ipynb#A-thread-runs-without-autocast-or-in-another-dtype) `AMP0032` | autocast is off in a thread, such as that of a server, a callback or a ThreadPoolExecutor<br>nn.DataParallel ignores autocast, or computes in fp16 in place of bf16 |
# | [Autocast makes the model no faster](08g_speed_and_memory.ipynb#Autocast-makes-the-model-no-faster) `AMP0033` | AMP or fp16 training is slower than fp32<br>a step is no faster than before, or even slower |
# | [The memory is not halved](08g_speed_and_memory.ipynb#The-memory-is-not-halved) `AMP0034` | training with AMP uses as much memory as before, or more<br>fp16 or bf16 does not halve the GPU memory |
# | [Inference under autocast takes more memory](08g_speed_and_memory.ipynb#Inference-under-autocast-takes-more-memory) `AMP0171` | inference uses more memory with autocast than without<br>memory grows under `no_grad` inside the autocast block |
# | [A size is not a multiple of 16 or 8](08g_speed_and_memory.ipynb#A-size-is-not-a-multiple-of-16-or-8) `AMP0044` | `` Expected self.size(1) to be divisible by 16, but got self.size(1)= ``<br>`` Expected both dimensions of mat2 to be … by 16 but got ``<br>`` stride along … dim to be multiple of 16 bytes, got ``<br>`` Expected trailing dimension of … to be divisible by 16 ``<br>`` Expected mat_b shape to be divisible by 16 ``<br>`` mat2 shape (…) must be divisible by 16 ``<br>`` FP8 execution requires the product of all dimensions except the last to be divisible by ``<br>`` FP8 execution requires 2D input matrices with height divisible by 8 ``<br>`` Tensor dimensions are not compatible for FP8 execution ``<br>`` MXFP8 requires tensor dims ``<br>`` is not divisible by weight quantization block_… = … ``<br>FP8 fails for some layers or batch sizes<br>a size is not a multiple of 8 or 16 in fp16 or FP8 |
# | [CUDA is out of memory](08g_speed_and_memory.ipynb#CUDA-is-out-of-memory) `AMP0045` | `` CUDA out of memory ``<br>`` torch.OutOfMemoryError ``<br>`` torch.cuda.OutOfMemoryError ``<br>`` HIP out of memory ``<br>`` XPU out of memory ``<br>`` MPS backend out of memory ``<br>`` CUDA error: out of memory ``<br>`` CUDA driver error: out of memory ``<br>`` cuda runtime error (2) : out of memory ``<br>`` CUDA ran out of memory outside PyTorch's allocator ``<br>`` Allocation on device … would exceed allowed memory. (out of memory) ``<br>`` DefaultCPUAllocator: can't allocate memory ``<br>`` DefaultCPUAllocator: not enough memory ``<br>out of memory (OOM) in fp16 or bf16 too<br>the largest batch that fits into GPU memory |
# | [Memory grows with each step or in evaluation](08g_speed_and_memory.ipynb#Memory-grows-with-each-step-or-in-evaluation) `AMP0170` | `` return torch.cat((tensor1, tensor2), dim=0)…out of memory ``<br>GPU memory grows with each iteration or epoch until it is full<br>memory leak in a loop |
# | [A trainer refuses fp16 or bf16 on this machine](08g_speed_and_memory.ipynb#Autocast-or-the-scaler-is-switched-off) `AMP0067` | `` fp16 mixed precision requires a GPU ``<br>`` fp16 mixed precision requires a device in ``<br>`` fp16 mixed precision with MPS device requires a Pytorch ``<br>`` bf16 mixed precision requires PyTorch >= 1.10 and a supported device. ``<br>`` bf16 mixed precision with MPS device requires a Pytorch ``<br>`` Your setup doesn't support bf16/gpu. ``<br>`` Your setup doesn't support bf16/(cpu, tpu, neuroncore) ``<br>`` Mixed precision training with AMP or APEX (`--fp16`) ``<br>`` Mixed precision training with AMP or APEX (`--fp16` or `--bf16`) ``<br>accelerate or Trainer says that this setup does not support bf16 or fp16<br>ValueError about bf16 support on a T4, a V100 or a Mac |
# | [16-bit weights become fp32 when they are loaded](07_training_recipes.ipynb#Load-half-precision-weights) `AMP0092` | a resumed run takes twice the memory, in 16-bit weights<br>a bf16 checkpoint is float32 after `load_state_dict` |
# | [A Keras model gives NaN or is no faster under a dtype policy](12_keras.ipynb#When-compile-adds-a-loss-scale) `AMP0101` | `mixed_float16` in Keras gives NaN<br>a Keras model is no faster with a mixed policy |
# | [The first optimizer step is out of memory](16_low_precision_state.ipynb#Bytes-per-parameter) `AMP0172` | `` state["exp_avg"] = torch.zeros_like(…out of memory ``<br>`` state["exp_avg_sq"] = torch.zeros_like(…out of memory ``<br>out of memory in `optimizer.step()`, forward and backward are fine<br>memory jumps after the first step of Adam or AdamW |
# | [A run is out of memory only when it is resumed](08g_speed_and_memory.ipynb#CUDA-is-out-of-memory) `AMP0173` | `` in _deserialize return obj.to(device=device)…in to return _to(self, device, non_blocking)…out of memory ``<br>out of memory when resuming, but training from scratch with the same batch fits<br>out of memory after loading a checkpoint |
# | [nvidia-smi shows more memory than PyTorch has allocated](08g_speed_and_memory.ipynb#CUDA-is-out-of-memory) `AMP0174` | nvidia-smi shows more memory than `torch.cuda.memory_allocated()`<br>reserved memory is much larger than allocated memory, fragmentation |
# | [An FP8 or FP4 matmul refuses its scales, its layout or its dtypes](15_below_16_bits.ipynb#Compare-with-PyTorch's-FP8-matmul) `AMP0175` | `` Invalid scaling configuration. ``<br>`` Invalid blockwise scaling configuration. ``<br>`` For tensorwise scaling, both scale_a and scale_b must be float (fp32) tensors ``<br>`` For rowwise scaling, both scale_a and scale_b must be float (fp32) tensors ``<br>`` For non-tensorwise scaling, scale tensors must be 2D, but got ``<br>`` Both scale_a and scale_b must be contiguous for rowwise scaling ``<br>`` self must be row_major, got stride ``<br>`` mat2 must be col_major, got stride ``<br>`` Expected both inputs to be fp8 or fp4 types but got ``<br>_scaled_mm fails with scales per row or per block<br>which shape must the scales of an NVFP4 or MXFP8 matmul have |
# | [16 bits are slow on this GPU or CPU](19_choose_your_precision.ipynb#Known-problems-of-each-device) `AMP0176` | fp16 is no faster on a P100, GTX 10 or GTX 16<br>bf16 is very slow on a T4, V100 or RTX 20 |
# | [Selective checkpointing does not find a cast](07_training_recipes.ipynb#Checkpoint-activations) `AMP0177` | `` aten._to_copy.default encountered during backward but not found in storage ``<br>`` aten._to_copy.default encountered during backward, but not found in storage ``<br>`` aten._to_copy.default invocation index … encountered during backward but not found in storage ``<br>selective activation checkpointing fails under autocast<br>gradient checkpointing with autocast fails when two parts share a weight |
# | [The precision flag of accelerate or DeepSpeed has no effect](19_choose_your_precision.ipynb#What-other-frameworks-call-it) `AMP0178` | `mixed_precision` of accelerate has no effect<br>with accelerate, fp16 takes the same time and memory as fp32 |
# | [The logits of a language model are out of memory](17_language_model.ipynb#The-loss-over-a-large-vocabulary) `AMP0179` | `` logits = logits.float()…CUDA out of memory ``<br>`` torch._C._nn.cross_entropy_loss(…out of memory ``<br>out of memory in the cross-entropy or at `logits.float()` of a language model<br>the logits need several GiB of memory with a large vocabulary |
#
# ### Repair compiled and distributed training
#
# | what goes wrong | what you see |
# |---|---|
# | [A compiled model has different gradients](08h_compile_and_processes.ipynb#A-compiled-model-has-different-gradients) `AMP0027` | `torch.compile` changes the gradients<br>gradients are different after `torch.compile`, outputs are the same |
# | [The scaler is inside a compiled function](08h_compile_and_processes.ipynb#The-scaler-is-inside-a-compiled-function) `AMP0041` | `` Attempted to inline function marked as skipped ``<br>`` Dynamo developers have intentionally marked that the function `GradScaler.…` should not be traced. ``<br>`` inline in skipfiles: GradScaler.…  ``<br>torch.compile of the whole training step has a graph break at the GradScaler<br>fullgraph=True fails at scaler.scale(loss) |
# | [An LSTM fails under autocast on the CPU](08h_compile_and_processes.ipynb#An-LSTM-fails-under-autocast-on-the-CPU) `AMP0042` | `` could not create a primitive descriptor for the LSTM forward propagation primitive ``<br>`` could not create a primitive descriptor for an LSTM forward propagation primitive ``<br>`` could not create a primitive descriptor for the LSTM backward propagation primitive ``<br>nn.LSTM crashes under torch.autocast on a CPU but runs on a GPU<br>LSTM in bf16 works on one CPU and not on another |
# | [TF32 is set in the old and in the new way](08h_compile_and_processes.ipynb#TF32-is-set-in-the-old-and-in-the-new-way) `AMP0037` | `` you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul. ``<br>`` you have used mix of the legacy and new APIs to set the matmul precision. ``<br>`` you have used a mix of the legacy and new APIs to set the TF32 flags. ``<br>`` Please use the new API settings to control TF32 behavior, such as torch.backends.cudnn.conv.fp32_precision ``<br>setting torch.backends.cuda.matmul.fp32_precision makes torch.compile fail<br>reading allow_tf32 raises a RuntimeError |
# | [torch.cuda.amp warns that it is deprecated](08h_compile_and_processes.ipynb#torch.cuda.amp-warns-that-it-is-deprecated) `AMP0035` | `` `torch.cuda.amp.autocast(args...)` is deprecated. ``<br>`` `torch.cpu.amp.autocast(args...)` is deprecated. ``<br>`` `torch.cuda.amp.GradScaler(args...)` is deprecated. ``<br>`` `torch.cpu.amp.GradScaler(args...)` is deprecated. ``<br>`` `torch.cuda.amp.custom_fwd(args...)` is deprecated. ``<br>`` `torch.cuda.amp.custom_bwd(args...)` is deprecated. ``<br>`` full(): argument 'fill_value' (position 2) must be Number, not str ``<br>`` autocast.__init__() missing 1 required positional argument: 'device_type' ``<br>`` custom_fwd() missing 1 required keyword-only argument: 'device_type' ``<br>`` full() received an invalid combination of arguments - got (tuple, str, device=torch.device, dtype=torch.dtype) ``<br>FutureWarning from torch.cuda.amp, is it harmful<br>how to get rid of the autocast deprecation warning |
# | [DDP waits for a parameter without a gradient](08h_compile_and_processes.ipynb#DDP-waits-for-a-parameter-without-a-gradient) `AMP0040` | `` Expected to have finished reduction in the prior iteration before starting a new one. ``<br>`` Your training graph has changed in this iteration ``<br>DDP fails in the second step with amp because a layer is not used<br>parameters that were not used in producing loss |
# | [FSDP refuses parameters of two dtypes](08h_compile_and_processes.ipynb#FSDP-refuses-parameters-of-two-dtypes) `AMP0181` | `` FSDP expects uniform original parameter dtype but got ``<br>`` Must flatten tensors with uniform dtype but got ``<br>`` `FlatParameter` requires uniform dtype but got ``<br>`` FSDP expects uniform reduce dtype but got ``<br>FSDP with LoRA or QLoRA fails because adapter and base model have different dtypes<br>fully_shard cannot mix bf16 and fp32 parameters |
# | [The ranks of a distributed run diverge](08h_compile_and_processes.ipynb#The-ranks-of-a-distributed-run-diverge) `AMP0182` | the ranks of a distributed run drift apart, have other gradient norms, or skip different steps<br>the GradScaler has a different scale on each GPU |
# | [Compiled and eager results differ](18_inference_and_export.ipynb#What-torch.compile-changes) `AMP0095` | torch.compile changes the results in bf16 a little<br>torch.compile and eager mode give different outputs in bf16 or fp16 |
# | [NaN appears only with torch.compile](08h_compile_and_processes.ipynb#A-compiled-model-has-different-gradients) `AMP0183` | torch.compile makes the loss NaN<br>loss is NaN only when the model is compiled, eager mode is fine |
# | [A wrapper of autocast breaks the compiled graph](08h_compile_and_processes.ipynb#The-scaler-is-inside-a-compiled-function) `AMP0180` | `` setattr() is not supported on type autocast ``<br>`` Dynamo does not know how to enter a `…autocast` context manager. ``<br>`` UserDefinedObjectVariable(…autocast) ``<br>`` call_method AutocastModeVariable() __enter__ ``<br>`` inline in skipfiles: … \| decorate_autocast ``<br>torch.compile has a graph break at a context manager around autocast<br>torch._dynamo.exc.Unsupported in a with statement with autocast |
# | [Autocast makes torch.compile compile again](18_inference_and_export.ipynb#What-torch.compile-changes) `AMP0184` | `` GLOBAL_STATE changed: autocast ``<br>torch.compile recompiles when autocast is switched on or off<br>recompile_limit is reached because training uses autocast and validation does not |
# | [A compiled model is no faster](10_speed_ladder.ipynb#Climb) `AMP0096` | a compiled model is no faster<br>torch.compile with mixed precision gives no speed-up |
# | [A CUDA graph refuses the cache of autocast](08h_compile_and_processes.ipynb#A-compiled-model-has-different-gradients) `AMP0079` | `` make_graphed_callables does not support the autocast caching. ``<br>torch.cuda.make_graphed_callables fails inside an autocast block<br>CUDA graph of a layer under amp |
# | [Checkpointing recomputes a tensor in another dtype](07_training_recipes.ipynb#Checkpoint-activations) `AMP0080` | `` Recomputed values for the following tensors have different metadata than during the forward pass. ``<br>gradient checkpointing raises CheckpointError in mixed precision<br>saved metadata is float32 and recomputed metadata bfloat16 |
# | [Selective checkpointing does not find a cast of autocast](07_training_recipes.ipynb#Checkpoint-activations) `AMP0185` | `` encountered during backward but not found in storage. ``<br>selective activation checkpointing fails when two layers share a weight under autocast |
# | [fp32 results differ between two GPUs](19_choose_your_precision.ipynb#What-fp32-means) `AMP0186` | fp32 results differ between two GPUs<br>the same fp32 model gives other numbers on an A100 than on a V100 or a CPU |
# | [A hint to use TF32](19_choose_your_precision.ipynb#What-fp32-means) `AMP0187` | `` TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. ``<br>`` that has Tensor Cores. To properly utilize them, you should set `torch.set_float32_matmul_precision('medium' \| 'high')` ``<br>`` is not one of 'highest', 'high', or 'medium' ``<br>warning about tensor cores and set_float32_matmul_precision, should I set it<br>Lightning asks to set the float32 matmul precision to medium or high |
# | [Apex is missing or has no amp](13_from_apex.ipynb) `AMP0188` | `` cannot import name 'amp' from 'apex' ``<br>`` No module named 'apex' ``<br>`` No module named 'amp_C' ``<br>`` Please install apex from https://www.github.com/nvidia/apex to use fp16 training ``<br>from apex import amp fails<br>how to run an old training script that needs NVIDIA Apex |
# | [One rank waits for another that skipped a step](../docs/several_machines.md#questions-about-fsdp2) `AMP0189` | `` Watchdog caught collective operation timeout ``<br>training hangs because one rank skips a batch with a NaN loss<br>NCCL timeout in mixed precision after one rank had an overflow |
# | [The ranks send tensors of different dtypes](11_scale_out.ipynb#What-does-each-rank-send-and-hold?) `AMP0190` | `` Received data size doesn't match expected size. Is there a distributed collective mismatch in your code? ``<br>`` Invalid usage of tensors with different dtypesFound … and … ``<br>`` invalid tensor type at index … (expected TensorOptions(dtype= ``<br>`` output tensor must have the same type as input tensor ``<br>`` Tensors must have identical type ``<br>all_reduce hangs or gives garbage because one rank has bf16 and another fp32<br>all_gather mixes fp16 and fp32 tensors |
# | [Gradients are infinite with several ranks only](11_scale_out.ipynb#One-decision-about-the-loss-scale) `AMP0091` | gradients are infinite with several ranks only<br>fp16 training overflows on many GPUs, one GPU is fine |
# | [SyncBatchNorm refuses the device or the dtype](08h_compile_and_processes.ipynb#DDP-waits-for-a-parameter-without-a-gradient) `AMP0191` | `` SyncBatchNorm layers only work with GPU modules ``<br>`` SyncBatchNorm expected input tensor to be on GPU ``<br>`` Expected counts to have type … but got … ``<br>SyncBatchNorm in fp16 or bf16 fails on several GPUs<br>convert_sync_batchnorm with amp in a DDP test on a CPU |
# | [FSDP2 has gradients of two dtypes when it accumulates](../docs/several_machines.md#questions-about-fsdp2) `AMP0192` | `` FSDP reduce-scatter expects uniform gradient dtype but got ``<br>FSDP2 gradient accumulation fails when a parameter is used in the last microbatch only |
# | [FSDP2 leaves an input or a buffer in fp32](../docs/several_machines.md#show-the-dtype-of-each-parameter) `AMP0193` | with FSDP2 and param_dtype bf16 a layer gets a Float input and BFloat16 weights<br>FSDP2 does not cast inputs in a dataclass to bf16 |
# | [FSDP2 trains bf16 weights without fp32 master weights](../docs/several_machines.md#show-the-dtype-of-each-parameter) `AMP0194` | accelerate with FSDP2 and mixed_precision bf16 trains worse than DeepSpeed or FSDP1<br>FSDP2 optimizer states are in bf16 |
# | [A gradient has another dtype than its parameter](11_scale_out.ipynb#What-does-each-rank-send-and-hold?) `AMP0195` | `` attempting to assign a gradient with dtype '…' to a tensor with grad_dtype '…' ``<br>`` attempting to assign a gradient with dtype '…' to a tensor with dtype '…' ``<br>assigning p.grad in bf16 to an fp32 parameter fails<br>FSDP with torch.compile and mixed precision cannot assign the gradient |
# | [ONNX Runtime finds two dtypes at one operator](18_inference_and_export.ipynb#Export) `AMP0062` | `` Type parameter (T) of Optype (…) bound to different types (tensor(…) and tensor(…) ``<br>`` Type parameter (T) bound to different types (tensor(…) and tensor(…) ``<br>`` Type (tensor(…)) of output arg (…) of node (…) does not match expected type (tensor(…)) ``<br>type error when ONNX Runtime loads a model that was converted to fp16<br>one input of an Add or LayerNormalization in the ONNX file is float16 and the other float |
# | [ONNX Runtime refuses an arange in fp16](18_inference_and_export.ipynb#Export) `AMP0063` | `` Type 'tensor(…)' of input parameter (…) of operator (Range) in node (…) is invalid ``<br>exported fp16 model with positions or torch.arange is an invalid graph |
# | [An ONNX model expects another input dtype](18_inference_and_export.ipynb#Export) `AMP0075` | `` Unexpected input data type. Actual: (tensor(…)) , expected: (tensor(…)) ``<br>ONNX model exported with half=True does not accept a float32 array<br>onnxruntime InvalidArgument because the input is float32 and not float16 |
# | [ONNX finds fp32 weights at a norm with an fp16 input](18_inference_and_export.ipynb#Export) `AMP0083` | `` scale has inconsistent type tensor(…) ``<br>onnx.checker reports an inconsistent type of the scale of a BatchNormalization after an export under autocast |
# | [The export of a bf16 model fails with ComplexDouble](18_inference_and_export.ipynb#Export) `AMP0084` | `` ScalarType ComplexDouble is an unexpected tensor scalar type ``<br>torch.onnx.export of a bf16 model fails at a product with a scalar parameter |
# | [ONNX Runtime has no operators in bf16](18_inference_and_export.ipynb#Export) `AMP0196` | `` NOT_IMPLEMENTED : Could not find an implementation for … node with name … ``<br>ONNX model in bfloat16 cannot be loaded by ONNX Runtime on a CPU<br>bf16 onnx export works but the session cannot be created |
# | [An ONNX or TensorRT model in fp16 gives NaN or wrong results](18_inference_and_export.ipynb#Export) `AMP0197` | `` Detected finite FP32 values which would overflow in FP16 and converted them to the closest finite FP16 value. ``<br>`` TensorRT encountered issues when converting weights between types and that could affect accuracy. ``<br>ONNX model converted to float16 outputs NaN, the fp32 file is fine<br>TensorRT engine built with --fp16 gives wrong results |
# | [TensorRT warns that a layer norm may overflow in fp16](18_inference_and_export.ipynb#Export) `AMP0076` | `` Running layernorm after self-attention in FP16 may cause overflow ``<br>`` Running layernorm after self-attention with FP16 Reduce or Pow may cause overflow ``<br>`` Detected layernorm nodes in FP16 ``<br>TensorRT engine of a transformer loses accuracy in fp16<br>trtexec --fp16 says that layernorm may overflow |
# | [torch.jit.trace fails inside an autocast block](18_inference_and_export.ipynb#Export) `AMP0082` | `` Cannot insert a Tensor that requires grad as a constant. Consider making it a parameter or input, or detaching the gradient ``<br>torch.jit.trace fails, or gives another dtype, inside an autocast block<br>tracing a model under autocast inserts the weight as a constant |
# | [An exported model computes in another dtype than expected](18_inference_and_export.ipynb#Export) `AMP0099` | an exported model computes in another dtype than expected<br>torch.export inside autocast gives an fp32 program |
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
