"""docs/trainers.md: its code runs, and the libraries do what the page says of them."""

import re
import textwrap
import warnings
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import values_of
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import amp_lab

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


def code_of(words: str) -> str:
    """The code of the section whose heading contains these words."""
    (section,) = (text for heading, text in SECTIONS.items() if words in heading)
    (code,) = FENCE.findall(section)
    return code


def library(name: str):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def llama(dtype=FP32):
    """A language model with one small layer."""
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 8))


@pytest.fixture
def saved_in_bf16(tmp_path):
    path = tmp_path / "bf16"
    llama(BF16).save_pretrained(path)
    return path


def trainer_of(model, folder, **options):
    transformers = library("transformers")
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 8))]
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=1, save_steps=1, **quiet, **options
    )
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])


def state_dtypes(optimizer) -> set[torch.dtype]:
    """The dtypes of the first moments."""
    return {state["exp_avg"].dtype for state in optimizer.state.values()}


# Master weights


def test_an_update_below_one_512th_is_lost_in_bf16():
    """AMP0154 and AMP0267."""
    weights = torch.arange(1, 2, 2**-7).to(BF16)  # all that differ in more than their exponent
    for factor in (1 + 1 / 513, 1 - 1 / 513):
        assert torch.equal((weights.double() * factor).to(BF16), weights)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_trainer_updates_the_weights_in_the_dtype_of_the_model(dtype, saved_in_bf16, tmp_path):
    """AMP0262 and AMP0294."""
    auto = library("transformers").AutoModelForCausalLM
    chosen = {} if dtype is BF16 else {"dtype": FP32}
    model, outputs = auto.from_pretrained(saved_in_bf16, **chosen), set()
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _layer, _inputs, output: outputs.add(output.dtype)
    )
    trainer = trainer_of(model, tmp_path, bf16=True)
    trainer.train()
    assert outputs == {BF16}
    assert model.dtype is dtype
    assert state_dtypes(trainer.optimizer.optimizer) == {dtype}
    config = library("transformers").AutoConfig.from_pretrained(tmp_path / "checkpoint-1")
    assert config.dtype is dtype  # of the checkpoint


def test_the_code_loads_in_fp32(saved_in_bf16):
    auto = library("transformers").AutoModelForCausalLM
    names = {"AutoModelForCausalLM": auto, "torch": torch, "path": saved_in_bf16}
    exec(code_of("transformers 5"), names)
    assert names["model"].dtype is FP32


def test_the_old_name_of_the_dtype_still_works(saved_in_bf16):
    """AMP0311 and AMP0092."""
    auto = library("transformers").AutoModelForCausalLM
    assert auto.from_pretrained(saved_in_bf16, torch_dtype=FP32).dtype is FP32
    assert auto.from_pretrained(saved_in_bf16, dtype=FP32).dtype is FP32


def test_accelerate_keeps_the_dtype_of_the_model(accelerate):
    """AMP0269."""
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    assert accelerator.prepare(nn.Linear(2, 2).to(BF16)).weight.dtype is BF16
    assert accelerator.prepare(nn.Linear(2, 2)).weight.dtype is FP32


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fsdp2_keeps_the_dtype_of_the_model(dtype, mesh):
    """AMP0269."""
    model = nn.Linear(2, 2).to(dtype)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_the_check_prints_the_dtypes(capsys):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).half())])
    exec(code_of("master weights"), {"optimizer": optimizer})
    out = capsys.readouterr().out
    assert "torch.float32" in out
    assert "torch.float16" in out


# Autocast or an explicit dtype


def test_the_layer_computes_as_autocast_does():
    names = {"nn": nn}
    exec(code_of("explicit compute dtype"), names)
    explicit, plain = names["Linear"](16, 8), nn.Linear(16, 8)
    explicit.load_state_dict(plain.state_dict())
    x = torch.randn(4, 16).to(BF16)
    output = explicit(x)
    output.float().square().sum().backward()
    with torch.autocast("cpu", BF16):
        same = plain(x)
    same.float().square().sum().backward()
    assert output.dtype is BF16
    assert torch.equal(output, same)
    for one, other in zip(explicit.parameters(), plain.parameters(), strict=True):
        assert one.grad.dtype is FP32
        assert torch.equal(one.grad, other.grad)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Products(nn.Module):
    """A layer, a norm, softmax, and an op that autocast runs in fp32 on a CPU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        found = [self.layer(x)]
        found.append(self.norm(found[0]))
        found.append(found[1].softmax(-1))
        found.append(found[1].prod())
        self.dtypes = [tensor.dtype for tensor in found]
        return found[-1]


@pytest.mark.parametrize("with_autocast", [False, True])
def test_fsdp2_has_no_list_of_ops_in_fp32(with_autocast, mesh):
    """AMP0266."""
    model = Products()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    with torch.autocast("cpu", BF16, enabled=with_autocast):
        model(torch.randn(2, 4)).float().backward()
    assert model.dtypes == [BF16, BF16, BF16, FP32 if with_autocast else BF16]
    assert {weight.dtype for weight in model.parameters()} == {FP32}  # stored, with one process
    assert {weight.grad.dtype for weight in model.parameters()} == {FP32}


def test_fsdp1_casts_in_one_process(mesh):
    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    with pytest.warns(UserWarning, match="FSDP is switching to use `NO_SHARD`"):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), mixed_precision=policy
        )
    assert model(torch.randn(2, 4)).dtype is BF16


# Checkpoints


def test_the_code_publishes_in_bf16(tmp_path):
    """AMP0268."""
    auto = library("transformers").AutoModelForCausalLM
    checkpoint, published = tmp_path / "fp32", tmp_path / "bf16"
    model = llama()
    model.save_pretrained(checkpoint)
    names = {"AutoModelForCausalLM": auto, "torch": torch}
    exec(code_of("checkpoint in fp32"), names | {"checkpoint": checkpoint, "published": published})
    assert auto.from_pretrained(published).dtype is BF16
    assert auto.from_pretrained(checkpoint).dtype is FP32
    halved = {name: value.to(BF16) for name, value in model.state_dict().items()}
    model.save_pretrained(published, state_dict=halved)
    assert auto.from_pretrained(published).dtype is FP32  # its config says so


def test_loading_casts_the_state_to_the_dtype_of_the_weights():
    def optimizer_of(dtype):
        return torch.optim.AdamW([nn.Parameter(torch.ones(8, dtype=dtype))])

    trained = optimizer_of(FP32)
    (weight,) = trained.param_groups[0]["params"]
    weight.grad = torch.randn(8)
    trained.step()
    in_bf16, again = optimizer_of(BF16), optimizer_of(FP32)
    with warnings.catch_warnings(action="error"):  # it says nothing
        in_bf16.load_state_dict(trained.state_dict())
        again.load_state_dict(in_bf16.state_dict())
    assert state_dtypes(in_bf16) == {BF16}
    assert state_dtypes(again) == {FP32}
    (before,), (after,) = trained.state.values(), again.state.values()
    assert torch.equal(after["exp_avg"], before["exp_avg"].to(BF16).float())
    assert not torch.equal(after["exp_avg"], before["exp_avg"])


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_full_evaluation_leaves_the_model_in_16_bits(tmp_path, dtype):
    """AMP0265."""
    option = {"bf16_full_eval" if dtype is BF16 else "fp16_full_eval": True}
    trainer = trainer_of(llama(), tmp_path, eval_strategy="steps", eval_steps=1, **option)
    trainer.train()
    assert any("eval_loss" in log for log in trainer.state.log_history)
    assert trainer.model.dtype is FP32
    trainer.evaluate()
    assert trainer.model.dtype is dtype


def test_an_evaluation_with_bf16_runs_under_autocast_and_casts_no_weight(tmp_path):
    """AMP0265."""
    model, seen = llama(), set()
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _layer, _inputs, output: seen.add(output.dtype)
    )
    trainer_of(model, tmp_path, bf16=True).evaluate()
    assert seen == {BF16}
    assert model.dtype is FP32


# Refusals


@pytest.fixture
def accelerate():
    library("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library("accelerate")
    library("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)


def test_fp16_trains_in_fp32_on_a_cpu(tmp_path, accelerate):
    model, seen = llama(), set()
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _layer, _inputs, output: seen.add(output.dtype)
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer_of(model, tmp_path, fp16=True).train()
    assert seen == {FP32}
    assert not any("fp16" in str(warning.message) for warning in warned)


def test_the_trainer_takes_one_16_bit_precision(tmp_path):
    """AMP0263."""
    with pytest.raises(ValueError, match="At most one of fp16 and bf16 can be True"):
        trainer_of(llama(), tmp_path, fp16=True, bf16=True)


def test_accelerate_has_one_precision(accelerate):
    """AMP0264."""
    accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    with pytest.raises(ValueError, match="AcceleratorState has already been initialized"):
        accelerate.Accelerator(mixed_precision="no", cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.Accelerator(mixed_precision="no", cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    modes = r"Unknown mixed_precision mode: fp32. Choose between \['no', 'fp8', 'fp16', 'bf16'\]"
    with pytest.raises(ValueError, match=modes):
        accelerate.Accelerator(mixed_precision="fp32", cpu=True)


def test_lightning_refuses_names_and_two_precisions():
    """AMP0263."""
    lightning = library("lightning.pytorch")
    mixed = lightning.plugins.MixedPrecision
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    for name in ("16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true"):
        lightning.Trainer(precision=name, **options)
    with pytest.raises(ValueError, match=r"Precision 'fp16' is invalid\. Allowed precision values"):
        lightning.Trainer(precision="fp16", **options)
    with pytest.warns(UserWarning, match="bf16-mixed"):
        on_cpu = lightning.Trainer(precision="16-mixed", **options)
    assert on_cpu.precision == "bf16-mixed"
    with pytest.raises(ValueError, match=r"Received both `precision=16-mixed` and `plugins="):
        lightning.Trainer(precision="16-mixed", plugins=[mixed("bf16-mixed", "cpu")], **options)
    with pytest.raises(Exception, match="`precision='bf16-mixed'` does not use a scaler"):
        mixed("bf16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="Precision must be '16-mixed' or 'bf16-mixed'"):
        mixed("16-true", "cpu")


def test_lightning_loads_a_checkpoint_in_fp32(tmp_path):
    """Also AMP0269: `bf16-mixed` keeps the dtype of the module."""
    lightning = library("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch, _):
            return self.layer(batch).float().square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    for name, built, stored in (
        ("bf16-mixed", FP32, FP32),
        ("bf16-mixed", BF16, BF16),
        ("bf16-true", FP32, BF16),
    ):
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            accelerator="cpu", precision=name, max_steps=1, enable_checkpointing=False, **quiet
        )
        trainer.fit(
            Module().to(built), torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=4)
        )
        trainer.save_checkpoint(tmp_path / name)
        saved = torch.load(tmp_path / name, weights_only=False)
        assert saved["state_dict"]["layer.weight"].dtype is stored
        assert Module.load_from_checkpoint(tmp_path / name).layer.weight.dtype is FP32


# PEFT


def adapted(dtype, **lora):
    peft = library("peft")
    return peft.get_peft_model(llama(dtype), peft.LoraConfig(target_modules=["q_proj"], **lora))


def scaled_step(model):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, scaler = torch.optim.AdamW(trained), torch.amp.GradScaler("cpu", init_scale=1.0)
    batch = tokens()
    with torch.autocast("cpu", FP16):
        loss = model(batch, labels=batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def test_peft_casts_adapters_and_no_other_trained_modules():
    """AMP0267."""
    model = adapted(FP16, modules_to_save=["lm_head"])
    dtypes = {"lora": set(), "lm_head": set()}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            dtypes["lora" if "lora_" in name else "lm_head"].add(weight.dtype)
    assert dtypes == {"lora": {FP32}, "lm_head": {FP16}}
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled_step(model)
    model = adapted(FP16, modules_to_save=["lm_head"])
    exec(code_of("unscale FP16 gradients"), {"model": model})
    scaled_step(model)
    scaled_step(adapted(FP16))  # without modules_to_save there is nothing to cast


def test_peft_refuses_an_old_torchao():
    """AMP0261."""
    library("torchao")
    checks = library("peft").import_utils
    old = mock.patch.object(checks.importlib_metadata, "version", return_value="0.15.0")
    checks.is_torchao_available.cache_clear()
    with old, pytest.raises(ImportError, match="Found an incompatible version of torchao"):
        adapted(FP32)
    checks.is_torchao_available.cache_clear()


# Several ranks, and reinforcement learning


def steps_taken(program: str, parallel: str) -> list[int]:
    """The steps that a rank takes. Its batch is NaN in step 2 on rank 0, in step 1 on rank 1."""
    dist.init_process_group("gloo")
    model = nn.Linear(2, 2)
    if parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer, taken = torch.optim.AdamW(model.parameters()), []
    names = {"torch": torch, "optimizer": optimizer, "taken": taken, "model": model}
    loop = "for step, batch in enumerate(batches):\n    loss = model(batch).mean()\n"
    loop += textwrap.indent(program, "    ")
    loop += "    loss.backward()\n    optimizer.step()\n    taken.append(step)\n"
    batches = [torch.ones(2, 2) for _ in range(4)]
    batches[2 - dist.get_rank()][0, 0] = float("nan")
    exec(loop, names | {"batches": batches})
    assert all(weight.isfinite().all() for weight in model.parameters())
    dist.destroy_process_group()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_all_ranks_skip_the_same_batches(parallel):
    """AMP0189."""
    assert values_of(steps_taken, 2, code_of("bad batch"), parallel) == [[0, 3], [0, 3]]


def gradient_after_a_skip() -> float:
    """The gradient of a rank after its first backward pass, which is of batch 2 on rank 0."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    first, second = ((1.0, 2.0), (10.0, 20.0))[dist.get_rank()]
    loss = model(torch.full((1, 1), first)).sum()
    if dist.get_rank() == 0:  # skips its first batch
        loss = model(torch.full((1, 1), second)).sum()
    loss.backward()
    gradient = model.module.weight.grad.item()
    dist.destroy_process_group()
    return gradient


@pytest.mark.slow
def test_ddp_averages_with_another_batch_if_one_rank_skips():
    """AMP0189."""
    assert values_of(gradient_after_a_skip, 2) == [(2 + 10) / 2] * 2


class AutocastInBackward(torch.autograd.Function):
    """The identity, which notes whether its backward pass runs under autocast."""

    notes: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        AutocastInBackward.notes.append(torch.is_autocast_enabled("cpu"))
        return grad


def dtypes_in_a_pipeline(program: str, inside: bool = False) -> tuple[set, set, set]:
    """Of a rank: dtypes of its stage's inputs and gradients; is its backward under autocast?

    With `inside`, autocast is in the stage's `forward` and in the loss, and not in the program.
    """
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    part = (nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4))[rank]
    inputs = set()
    part.register_forward_pre_hook(lambda module, args: inputs.add(args[0].dtype))
    targets, losses = torch.randint(0, 4, (8,)), []

    def loss_fn(logits, target):
        return nn.functional.cross_entropy(AutocastInBackward.apply(logits.float()), target)

    if inside:
        autocast = torch.autocast("cpu", BF16)
        part.forward, loss_fn = autocast(part.forward), autocast(loss_fn)
        program = program.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)")
    stage = PipelineStage(part, rank, 2, device)
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_fn)
    batch = () if rank else (torch.randn(8, 8),)
    names = {"torch": torch, "stage": stage, "schedule": schedule, "inputs": batch}
    exec(program, names | {"targets": targets, "losses": losses})
    assert len(losses) == 4 * rank
    gradients = {weight.grad.dtype for weight in part.parameters()}
    dist.destroy_process_group()
    return inputs, gradients, set(AutocastInBackward.notes)


@pytest.mark.slow
def test_a_pipeline_sends_the_dtypes_of_autocast():
    first, last = values_of(dtypes_in_a_pipeline, 2, code_of("pipeline"))
    assert first == ({FP32}, {FP32}, set())
    assert last == ({BF16}, {FP32}, {True})
    first, last = values_of(dtypes_in_a_pipeline, 2, code_of("pipeline"), True)
    assert first == ({FP32}, {FP32}, set())
    assert last == ({BF16}, {FP32}, {False})


def test_a_backward_pass_under_autocast_runs_the_matmuls_of_an_fp32_layer_in_bf16():
    layer, x = nn.Linear(16, 16, bias=False), torch.randn(8, 16)

    def gradient(autocast_in_backward):
        layer.weight.grad = None
        with torch.autocast("cpu", BF16):
            with torch.autocast("cpu", enabled=False):
                loss = layer(x).square().sum()
            with torch.autocast("cpu", BF16, enabled=autocast_in_backward):
                loss.backward()
        return layer.weight.grad

    in_fp32, in_bf16 = gradient(False), gradient(True)
    assert in_bf16.dtype is FP32
    assert torch.equal(in_bf16, in_bf16.to(BF16).float())
    assert not torch.equal(in_fp32, in_fp32.to(BF16).float())


def test_an_output_layer_in_fp32_helps_if_both_sides_have_it():
    """AMP0127."""
    hidden, weight = torch.randn(1024, 256).to(BF16), (torch.randn(1024, 256) * 0.2).to(BF16)
    other = (hidden.float() * (1 + 2**-9 * torch.randn(1024, 256))).to(BF16)  # another kernel
    target = torch.randint(0, 1024, (1024, 1))

    def logprobs(states, dtype):
        logits = states.to(dtype) @ weight.to(dtype).T
        return logits.float().log_softmax(-1).gather(1, target)

    def difference(one, another, states=other):
        return (logprobs(hidden, one) - logprobs(states, another)).square().mean().sqrt()

    assert difference(FP32, FP32) < min(difference(BF16, BF16), difference(FP32, BF16))
    # On one side only it is worse where the two would otherwise round alike.
    assert difference(BF16, BF16, states=hidden) < difference(FP32, BF16, states=hidden)


def test_every_program_is_run():
    with_code = [heading for heading, text in SECTIONS.items() if FENCE.search(text)]
    tried = (
        "master",
        "transformers 5",
        "explicit",
        "checkpoint in",
        "unscale",
        "bad batch",
        "pipeline",
    )
    assert len(with_code) == len(tried)
    assert all(any(words in heading for heading in with_code) for words in tried)


def test_the_state_of_an_optimizer_keeps_the_saved_dtype_and_leaves_the_checkpoint_alone():
    """AMP0296."""
    (failure,) = amp_lab.explain("AMP0296")
    loop, params = re.search(r"`(for i, state .*?)`, with `(params = .*?)`", failure.cure).groups()
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(4)
    optimizer.step()
    saved = optimizer.state_dict()
    state = saved["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = state[key].to(BF16)
    optimizer.load_state_dict(saved)
    assert optimizer.state[weight]["exp_avg"].dtype is FP32
    exec(f"{params}\n{loop}", {"optimizer": optimizer, "saved": saved, "torch": torch})
    moment = optimizer.state[weight]["exp_avg"]
    assert moment.dtype is BF16
    moment.zero_()
    assert state["exp_avg"].all()
