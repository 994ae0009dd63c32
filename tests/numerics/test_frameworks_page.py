"""docs/frameworks.md: each program on it runs, and the frameworks do what it says of them."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from amp_lab import ScaleLog, find_nonfinite, gradient_underflow
from amp_lab.core.errors import NumericsError

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
FINE = r"ScaleLog: 5 steps, 0 skipped\. Scale: first 65536, last 65536"
SKIPPED = r"ScaleLog: 5 steps, 5 skipped\. Scale: first 65536, last 4096"
NOT_COUNTED = "Some gradients were computed in fp16"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore"),  # of the frameworks
]


class Net(nn.Module):
    """Overflows in fp16 with a large factor."""

    def __init__(self, factor):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.factor = factor

    def forward(self, inputs, labels=None):
        logits = self.last(torch.relu(self.first(inputs)) * self.factor)
        if labels is None:
            return logits
        return {"loss": nn.functional.mse_loss(logits.float(), labels), "logits": logits}


def program(section):
    (code,) = FENCE.findall(SECTIONS[section])
    return code


def loader(batches=5):
    pairs = torch.utils.data.TensorDataset(torch.randn(8 * batches, 8), torch.randn(8 * batches, 4))
    return torch.utils.data.DataLoader(pairs, batch_size=8)


def require_printed(text, factor):
    """The underflow, the report of the step, and the scales, in this order."""
    underflow, log = text.index("keep at"), text.index("ScaleLog:")
    assert underflow < log
    assert re.search(SKIPPED if factor > 1 else FINE, text[log:])
    if factor > 1:
        assert underflow < text.index("inf made in forward by mul") < log
        assert text.count("made in forward") == 1
    else:
        assert re.search(r"^None$", text[underflow:log], re.MULTILINE)
        assert "made in" not in text
    assert NOT_COUNTED not in text


@pytest.fixture
def accelerate_on_cpu(monkeypatch):
    """accelerate with the autocast and the scaler that fp16 has on a GPU, but not on a CPU."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    initialize = accelerate.Accelerator.__init__

    def with_scaler(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        self.state._mixed_precision = "fp16"
        self.native_amp = True
        self.scaler = torch.amp.GradScaler("cpu")

    monkeypatch.setattr(accelerate.Accelerator, "__init__", with_scaler)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def of_trainer(tmp_path, factor, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    arguments = {"max_steps": 5, "logging_steps": 1, "per_device_train_batch_size": 8} | options
    data = [{"inputs": torch.randn(8), "labels": torch.randn(4)} for _ in range(48)]
    return {
        "model": Net(factor),
        "dataset": data,
        "training_args": transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", **arguments
        ),
    }


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_transformers(factor, tmp_path, accelerate_on_cpu, capsys):
    names = of_trainer(tmp_path, factor, disable_tqdm=True)
    exec(program("transformers"), names)
    require_printed(capsys.readouterr().out, factor)
    logs = names["trainer"].state.log_history[:5]
    if factor > 1:  # the NaN is hidden
        assert [log["loss"] for log in logs] == [0.0] * 5
        assert all(log["grad_norm"] != log["grad_norm"] for log in logs)
    # The model stays under autocast.
    batch = next(iter(names["trainer"].get_train_dataloader()))
    loss = names["trainer"].compute_loss(names["model"], batch)
    assert NOT_COUNTED in str(gradient_underflow(names["model"], loss))


def test_transformers_shows_a_nan_without_its_filter(tmp_path, accelerate_on_cpu):
    names = of_trainer(tmp_path, 1e6, disable_tqdm=True, logging_nan_inf_filter=False)
    exec(program("transformers"), names)
    losses = [log["loss"] for log in names["trainer"].state.log_history[:5]]
    assert not any(torch.tensor(losses).isfinite())


def test_transformers_leaves_the_optimizer_step_outside_of_the_watch(
    tmp_path, accelerate_on_cpu, monkeypatch
):
    watched = []
    step = torch.optim.AdamW.step

    def note(self, *args, **kwargs):
        watched.append(find_nonfinite._active is not None)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    names = of_trainer(tmp_path, 1.0, disable_tqdm=True, optim="adamw_torch")
    exec(program("transformers"), names)
    assert watched == [False] * 5


def test_transformers_watches_each_batch_of_a_step(tmp_path, accelerate_on_cpu, capsys):
    names = of_trainer(
        tmp_path, 1.0, disable_tqdm=True, gradient_accumulation_steps=2, num_train_epochs=3
    )
    exec(program("transformers"), names)
    assert len(re.findall(r"^None$", capsys.readouterr().out, re.MULTILINE)) == 2


@pytest.mark.parametrize("options", [{"bf16": True}, {}])
def test_transformers_has_no_scaler_without_fp16(options, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    names = of_trainer(tmp_path, 1.0, **options)
    trainer = transformers.Trainer(names["model"], names["training_args"])
    assert trainer.accelerator.scaler is None
    with pytest.raises(NumericsError):
        ScaleLog(trainer.accelerator.scaler)


def lightning_module(lightning):
    class MyModule(lightning.LightningModule):
        factor = 1.0

        def __init__(self):
            super().__init__()
            self.net = Net(self.factor)

        def training_step(self, batch, _):
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.net(inputs).float(), targets)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return MyModule


@pytest.fixture
def lightning_on_cpu(monkeypatch):
    """Lightning, whose "16-mixed" is what it is on a GPU."""
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    trainer = lightning.Trainer

    def make(precision, **options):
        assert precision == "16-mixed"
        scaler = torch.amp.GradScaler("cpu")
        plugin = lightning.plugins.MixedPrecision(precision, "cpu", scaler=scaler)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        quiet["enable_model_summary"] = False
        return trainer(accelerator="cpu", plugins=[plugin], **quiet, **options)

    monkeypatch.setattr(lightning, "Trainer", make)
    return lightning


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_lightning(factor, lightning_on_cpu, capsys):
    names = {"MyModule": lightning_module(lightning_on_cpu), "loader": loader()}
    names["MyModule"].factor = factor
    exec(program("Lightning"), names)
    require_printed(capsys.readouterr().out, factor)
    with pytest.raises(Exception, match=r"You are trying to `self.log\(\)` but"):
        names["model"].training_step(next(iter(names["loader"])), 0)


def test_lightning_warns_of_a_log_before_fit():
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    with pytest.warns(UserWarning, match=r"You are trying to `self.log\(\)` but"):
        lightning_module(lightning)().training_step(next(iter(loader())), 0)


def test_lightning_watches_the_last_batch_of_a_step(lightning_on_cpu, monkeypatch):
    watched = []

    class MyModule(lightning_module(lightning_on_cpu)):
        def training_step(self, batch, index):
            watched.append(find_nonfinite._active is not None)
            return super().training_step(batch, index)

    make = lightning_on_cpu.Trainer
    monkeypatch.setattr(
        lightning_on_cpu, "Trainer", lambda **options: make(accumulate_grad_batches=2, **options)
    )
    exec(program("Lightning"), {"MyModule": MyModule, "loader": loader(batches=10)})
    assert watched[1:] == [False] * 5 + [True] + [False] * 4  # the first was for the underflow


def test_lightning_has_no_scaler_on_a_cpu_or_in_bf16():
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        mixed = lightning.Trainer(accelerator="cpu", precision="16-mixed", logger=False)
    bf16 = lightning.Trainer(accelerator="cpu", precision="bf16-mixed", logger=False)
    assert mixed.precision_plugin.scaler is None
    assert bf16.precision_plugin.scaler is None
    for precision in ("bf16-true", "16-true"):
        true = lightning.Trainer(accelerator="cpu", precision=precision, logger=False)
        assert not hasattr(true.precision_plugin, "scaler")


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_accelerate(factor, accelerate_on_cpu, capsys):
    model = Net(factor)
    names = {
        "accelerator": accelerate_on_cpu.Accelerator(cpu=True),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": loader(),
        "loss_fn": nn.functional.mse_loss,
    }
    exec(program("accelerate"), names)
    require_printed(capsys.readouterr().out, factor)
    # The model is under autocast after `prepare`.
    loss = names["loss_fn"](names["model"](names["inputs"]), names["targets"])
    assert NOT_COUNTED in str(gradient_underflow(names["model"], loss))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_accelerate_has_no_scaler_on_a_cpu(precision):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings(action="ignore"):
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    assert accelerator.scaler is None
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_fsdp2(factor, capsys):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Net(factor)
        names = {
            "model": model,
            "layers": [model.first, model.last],
            "mesh": dist.device_mesh.init_device_mesh("cpu", (1,)),
            "loader": loader(),
            "loss_fn": nn.functional.mse_loss,
        }
        exec(program("FSDP2"), names)
        gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert gathered == [model, model.first, model.last]
        with pytest.raises(NumericsError, match="Call gradient_underflow before fully_shard"):
            gradient_underflow(model, model(names["inputs"]).float().mean())
    finally:
        dist.destroy_process_group()
    require_printed(capsys.readouterr().out, factor)


def test_every_program_is_run():
    assert list(SECTIONS) == ["transformers", "Lightning", "accelerate", "FSDP2"]
    assert len(FENCE.findall(PAGE)) == len(SECTIONS)
