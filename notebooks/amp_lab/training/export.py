"""A run as one file: its checkpoint, or its model, converted and checked, for use elsewhere."""

import copy
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.checkpoint import is_checkpoint, load_checkpoint, run_state, save_checkpoint
from amp_lab.data import TEXTS, batches
from amp_lab.data.images import PHOTOGRAPH_SIZE
from amp_lab.data.text import CONTEXT
from amp_lab.distributed.ranks import ALONE
from amp_lab.errors import AmpLabError, CheckpointError, DataError, first_line, with_type
from amp_lab.files import save, try_to_write
from amp_lab.precision import Precision
from amp_lab.report import bytes_text, dtype_name, plural
from amp_lab.requirements import needed_for, nothing_logged
from amp_lab.training import run_folder
from amp_lab.training.models import build_model
from amp_lab.training.run import load_data, make_optimizer
from amp_lab.training.train_options import RunConfig

FORMATS = ("safetensors", "onnx", "pt2")
_CHECKED = 256  # inputs
_CHECKED_FP16 = 8  # for a CPU may take hundreds of times as long in fp16
# By how much the outputs of a file may differ from those of the model it was made of, as a share of
# the largest: another library sums in another order, and may round to 16 bits less often.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}


def export_checkpoint(
    out: str | os.PathLike, file: str | os.PathLike, *, force: bool = False
) -> None:
    """Write the checkpoint of the run in the folder `out`, sharded or not, as one file.

    It is then what one process would have saved. A checkpoint that is there already is replaced,
    another file only with `force`. Raises `CheckpointError` if there is none, or it is damaged, or
    the file cannot be written.
    """
    if os.path.lexists(file) and not (force or is_checkpoint(file)):
        raise CheckpointError(f"{file}: is there, and no checkpoint; --force replaces a file")
    state = _state(Path(out))
    if "shards" in state:
        model, optimizer = _restored(Path(out), state)
        state.pop("shards")
        state |= {"model": model, "optimizer": optimizer}
    save_checkpoint(file, **state)


def export_model(
    out: str | os.PathLike,
    file: str | os.PathLike,
    form: str,
    precision: Precision | str = Precision.FP32,
    *,
    data: str | os.PathLike | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model of the run in the folder `out`, converted, in one of `FORMATS`.

    All floating-point parameters and buffers of a copy are cast to the dtype of `precision`. What
    is written as ``onnx`` or ``pt2`` takes fp32 images (B, 3, S, S) for any B and returns fp32
    logits (B, C), and casts in between; ``safetensors`` holds the weights alone. The file is
    read again and run, before it takes its name, on test images of the run from `data` (default:
    from where the run had them), or on random ones if those are not there. `say` gets each line to
    report.

    Raises `CheckpointError` for a run without a whole checkpoint, a file that is there (unless
    `force`) or cannot be written, weights beyond the dtype's range, a model that torch cannot
    export, and a file whose outputs are not the model's; then nothing is written.
    """
    path, dtype = Path(file), Precision(precision).dtype
    if form not in FORMATS:
        raise CheckpointError(f"no format {form!r}; there are {', '.join(FORMATS)}")
    _require_free(path, force)
    model, state = load_model(out)
    model.eval()
    place = data or run_folder.place_of_data(Path(out)) or "data"
    served = _Served(copy.deepcopy(model), dtype)
    say(_changes(model, served.model, dtype))
    inputs = _inputs(RunConfig(**state["config"]), state["classes"], place, dtype, say)
    with torch.no_grad(), _quiet():
        wanted = served(inputs)
        if not wanted.isfinite().all():
            what = f"outputs in {dtype_name(dtype)} are not finite"
            raise CheckpointError(f"{path}: not written, since {what}; give another --dtype")
        content, found = _made(form, served, inputs, state["config"]["model"])
        off = ((found - wanted).abs().max() / wanted.abs().max()).item()
        agree = model(inputs).argmax(-1) == found.argmax(-1)
    if not off <= _TOLERANCE[dtype]:  # NaN is not
        raise CheckpointError(
            f"{path}: not written, since outputs of the {form} file are {off:.1%} off the model's"
        )
    save(path, [content], CheckpointError)
    same = f"{int(agree.sum())} of {agree.numel()} decisions as in fp32"
    say(f"Read and run: {same}; outputs {off:.1e} from the model's in {dtype_name(dtype)}")
    say(f"Written: {path} ({bytes_text(len(content))})")


class _Served(nn.Module):
    """A model that is cast to `dtype`, and takes and returns fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(self.dtype) if images.is_floating_point() else images).float()


def _require_free(path: Path, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise CheckpointError(f"{path}: is there already; --force replaces it")
    try:
        try_to_write(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error


def _state(out: Path) -> dict[str, Any]:
    path = out / run_state.CHECKPOINT
    state = load_checkpoint(path)
    run_state.require_run(path, state)
    return state


def _restored(out: Path, state: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of a checkpoint, and the optimizer, whose state only shards are read for."""
    try:
        config = RunConfig(**state["config"])
        model = build_model(config.model, state["classes"], freeze=config.freeze)
        if "shards" not in state:
            model.load_state_dict(state["model"])
        optimizer = make_optimizer(model, config)
        if "shards" in state:
            from amp_lab.checkpoint.shards import load_shards  # torch's part of it takes a second

            # With the entries of the schedule, which would not be read into one without them.
            steps = state["scheduler"]["total_steps"]
            torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, steps)
            load_shards(out, state["shards"], model, optimizer, ALONE)
    except run_state.WRONG_CONTENT as error:
        problem = f"not of a run ({first_line(error)})"
        raise CheckpointError(f"{out / run_state.CHECKPOINT}: {problem}") from error
    return model, optimizer


def load_model(out: str | os.PathLike) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run, on the CPU, and the rest of its checkpoint.

    Raises `CheckpointError` if there is none, or it is damaged.
    """
    state = _state(Path(out))
    return _restored(Path(out), state)[0], state


def _changes(before: nn.Module, after: nn.Module, dtype: torch.dtype) -> str:
    """A line on what the cast changed; raises `CheckpointError` for what it made infinite."""
    old, new = before.state_dict(), after.state_dict()
    lost = 0
    for name, tensor in old.items():
        beyond = int((tensor.isfinite() & ~new[name].isfinite()).sum())
        if beyond:
            many = f"{plural(beyond, 'value')} of {name} beyond {torch.finfo(dtype).max:g}"
            raise CheckpointError(f"{dtype_name(dtype)}: {many}; give another --dtype")
        lost += int(((tensor != 0) & (new[name] == 0)).sum())
    cast = sum(new[name].dtype != tensor.dtype for name, tensor in old.items())
    sizes = [bytes_text(sum(t.nbytes for t in state.values())) for state in (new, old)]
    line = f"{cast} of {len(old)} tensors cast to {dtype_name(dtype)}: {sizes[0]}, were {sizes[1]}"
    return f"{line}; {plural(lost, 'value')} became 0" if lost else line


def _inputs(
    config: RunConfig,
    classes: int,
    data: str | os.PathLike,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> Tensor:
    """Images (B, 3, S, S) or tokens (B, T) to check with: the run's own, if they are there."""
    count = _CHECKED_FP16 if dtype == torch.float16 or config.dataset in TEXTS else _CHECKED
    try:
        images = load_data(replace(config, limit=None), data, augment=False, download=False).test
        return next(iter(batches(images, count)))[0]
    except DataError as error:
        kind = "tokens" if config.dataset in TEXTS else "images"
        say(f"Checked with random {kind}, since {error}")
    draws = torch.Generator().manual_seed(0)
    if config.dataset in TEXTS:
        return torch.randint(classes, (count, config.context or CONTEXT), generator=draws)
    usual = PHOTOGRAPH_SIZE if config.dataset in ("caltech256", "folder") else 32
    size = config.image_size or usual
    return torch.randn(count, 3, size, size, generator=draws)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters say of their own work."""
    with nothing_logged(), warnings.catch_warnings(action="ignore"):
        yield


def _made(form: str, served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    """The bytes of a file, and what it returns for `inputs`, read again."""
    make = {"safetensors": _safetensors, "onnx": _onnx, "pt2": _pt2}[form]
    with needed_for(form):
        try:
            return make(served, inputs, model)
        except (AmpLabError, ModuleNotFoundError):
            raise
        except Exception as error:  # whatever the exporter or the runtime has not
            what = f"{model} in {dtype_name(served.dtype)}"
            of_runtime = type(error).__module__.startswith("onnxruntime")
            if of_runtime and served.dtype is torch.bfloat16:
                raise CheckpointError(
                    f"{what} cannot be written as onnx, since ONNX Runtime's CPU cannot run it; "
                    "try --dtype fp16 or fp32, or another format"
                ) from error
            raise CheckpointError(
                f"{what} cannot be written as {form}, or not run here ({with_type(error)}); try "
                "--dtype fp32, or another format"
            ) from error


def _safetensors(served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    import safetensors.torch

    tensors: dict[str, Tensor] = {}
    for name, tensor in served.model.state_dict().items():
        if not any(tensor.is_set_to(other) for other in tensors.values()):  # tied: written once
            tensors[name] = tensor.contiguous()
    about = {"format": "pt", "model": model}
    content = safetensors.torch.save(tensors, about)
    again = copy.deepcopy(served)
    for tensor in again.state_dict().values():
        tensor.zero_()
    again.model.load_state_dict(safetensors.torch.load(content), strict=False)
    return content, again(inputs)


def _program(served: _Served, inputs: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(
        served, (inputs[:2].clone(),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )


def _pt2(served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    content = io.BytesIO()
    torch.export.save(_program(served, inputs), content)
    content.seek(0)
    return content.getvalue(), torch.export.load(content).module()(inputs)


def _onnx(served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    import onnxruntime
    import onnxscript  # noqa: F401  # which torch.onnx asks for in a message of its own

    names = {"input_names": ["images"], "output_names": ["logits"]}
    program = torch.onnx.export(_program(served, inputs), verbose=False, **names)
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": inputs.numpy()})
    return content, torch.from_numpy(found)
