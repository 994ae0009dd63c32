"""What settings of other libraries do to a tiny model, each found with hooks; prints it as JSON.

Run as a program, since Lightning, transformers and Keras change the process that they are in.
"""

import json
import logging
import os
import tempfile
import warnings

os.environ["KERAS_BACKEND"] = "torch"

import accelerate
import keras
import lightning.pytorch as lightning
import lightning_fabric
import torch
import transformers
from torch import nn

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
BATCH = torch.randn(8, 16)


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def watched(model):
    """What a step does to the first layer, filled in as the step goes on."""
    seen = {}
    first = model[0]
    first.register_forward_hook(lambda layer, given, output: seen.update(matmuls=output.dtype))
    first.weight.register_post_accumulate_grad_hook(lambda p: seen.update(gradients=p.grad.dtype))
    return seen


def row(seen, weight, optimizer, output):
    (state,) = (state["exp_avg"] for key, state in optimizer.state.items() if key is weight)
    return weight.dtype, seen["matmuls"], seen["gradients"], state.dtype, output


def plain(dtype):
    model = tiny() if dtype is None else tiny().to(dtype)
    seen, optimizer = watched(model), torch.optim.AdamW(model.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        output = model(BATCH if dtype is None else BATCH.to(dtype))
    output.float().square().mean().backward()
    optimizer.step()
    return row(seen, model[0].weight, optimizer, output.dtype)


def accelerated():
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny()
    seen, optimizer = watched(model), torch.optim.AdamW(model.parameters())
    wrapped, stepping = accelerator.prepare(model, optimizer)
    output = wrapped(BATCH)
    accelerator.backward(output.float().square().mean())
    stepping.step()
    accelerate.state.AcceleratorState._reset_state(True)
    return row(seen, model[0].weight, stepping.optimizer, output.dtype)


def with_fabric(precision):
    fabric, model = lightning_fabric.Fabric(accelerator="cpu", precision=precision), tiny()
    wrapped, stepping = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    seen = watched(model)
    output = wrapped(BATCH)
    fabric.backward(output.float().square().mean())
    stepping.step()
    return row(seen, model[0].weight, stepping.optimizer, output.dtype)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = tiny()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def training_step(self, batch, index):
        output = self.net(batch[0])
        self.output = output.dtype
        return output.float().square().mean()


def with_lightning(precision):
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seen = watched(module.net)
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(BATCH)))
    return row(seen, module.net[0].weight, trainer.optimizers[0], module.output)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = tiny()

    def forward(self, x):
        return {"logits": self.net(x)}


class Trainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        output = model(inputs["x"])["logits"]
        self.output = output.dtype
        return output.float().square().mean()


def with_transformers(dtype):
    model = Net().to(dtype)
    seen = watched(model.net)
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            bf16=True,
            max_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        inputs = [{"x": one.to(dtype)} for one in BATCH]
        trainer = Trainer(model, settings, train_dataset=inputs)
        trainer.train()
    accelerate.state.AcceleratorState._reset_state(True)
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return row(seen, model.net[0].weight, optimizer, trainer.output)


def with_keras(policy):
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(16), keras.layers.LayerNormalization(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.layers.Input((16,)), *layers])
    model.compile("adam", "mse")
    model.train_on_batch(BATCH.numpy(), torch.zeros(8, 4).numpy())
    weight = layers[0].kernel.value
    (state,) = {v.dtype for v in model.optimizer.variables if "momentum" in v.path}
    gradient = weight.grad.dtype
    product = layers[0](BATCH).dtype
    return weight.dtype, product, gradient, state, model(BATCH).dtype


def main():
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    bf16 = torch.bfloat16
    found = {
        "torch.autocast(…, torch.bfloat16)": plain(None),
        "model.to(torch.bfloat16)": plain(bf16),
        'accelerate mixed_precision="bf16"': accelerated(),
        'Fabric precision="bf16-mixed"': with_fabric("bf16-mixed"),
        'Fabric precision="bf16-true"': with_fabric("bf16-true"),
        'Lightning precision="bf16-mixed"': with_lightning("bf16-mixed"),
        'Lightning precision="bf16-true"': with_lightning("bf16-true"),
        "transformers bf16=True": with_transformers(torch.float32),
        "transformers bf16=True, model loaded in bf16": with_transformers(bf16),
        "Keras mixed_bfloat16": with_keras("mixed_bfloat16"),
        "Keras bfloat16": with_keras("bfloat16"),
    }
    rows = {
        name: [SHORT[str(dtype).removeprefix("torch.")] for dtype in dtypes]
        for name, dtypes in found.items()
    }
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main()
