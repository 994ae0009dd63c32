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

from amp_lab.core.errors import AmpLabError, CheckpointError, DataError, first_line, with_type
from amp_lab.core.files import save, try_to_write
from amp_lab.core.precision import Precision
from amp_lab.core.report import bytes_text, dtype_name, plural
from amp_lab.core.requirements import needed_for, nothing_logged
from amp_lab.models.build import build_model
from amp_lab.parallel.ranks import ALONE
from amp_lab.train import run_folder
from amp_lab.train.checkpoint import is_checkpoint, load_checkpoint, run_state, save_checkpoint
from amp_lab.train.data import TEXTS, batches
from amp_lab.train.data.images import PHOTOGRAPH_SIZE
from amp_lab.train.data.text import CONTEXT
from amp_lab.train.run import make_optimizer
from amp_lab.train.run_data import load_data
from amp_lab.train.train_options import RunConfig

_State = dict[str, Any]
FORMATS = ("safetensors", "onnx", "pt2")
_INPUTS = 256  # that a file is checked with
_FEW_INPUTS = 8  # for a CPU may take hundreds of times as long in fp16, and a text has many tokens
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
    if os.path.lexists(file) and not force and not is_checkpoint(file):
        raise CheckpointError(f"{file}: is there, and no checkpoint; --force replaces a file")
    state = _load_state(Path(out))
    if "shards" in state:
        model, optimizer = _restore(Path(out), state)
        del state["shards"]
        state["model"] = model
        state["optimizer"] = optimizer
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
    path = Path(file)
    dtype = Precision(precision).dtype
    if form not in FORMATS:
        raise CheckpointError(f"no format {form!r}; there are {', '.join(FORMATS)}")
    _require_free(path, force)
    model, state = load_model(out)
    model.eval()
    place = data or run_folder.place_of_data(Path(out)) or "data"
    served = _Served(copy.deepcopy(model), dtype)
    say(_describe_cast(model, served.model, dtype))
    config = RunConfig(**state["config"])
    inputs = _inputs(config, state["classes"], place, dtype, say)
    with torch.no_grad(), _quiet():
        expected = served(inputs)
        if not expected.isfinite().all():
            raise CheckpointError(
                f"{path}: not written, since outputs in {dtype_name(dtype)} are not finite; give "
                "another --dtype"
            )
        content, outputs = _convert(form, served, inputs, config.model)
        largest_error = (outputs - expected).abs().max()
        relative_error = (largest_error / expected.abs().max()).item()
        decisions = model(inputs).argmax(-1)
        agree = decisions == outputs.argmax(-1)
    if not relative_error <= _TOLERANCE[dtype]:  # NaN is not
        problem = f"outputs of the {form} file are {relative_error:.1%} off the model's"
        raise CheckpointError(f"{path}: not written, since {problem}")
    save(path, [content], CheckpointError)
    same = f"{int(agree.sum())} of {agree.numel()} decisions as in fp32"
    distance = f"outputs {relative_error:.1e} from the model's in {dtype_name(dtype)}"
    say(f"Read and run: {same}; {distance}")
    say(f"Written: {path} ({bytes_text(len(content))})")


class _Served(nn.Module):
    """A model that is cast to `dtype`, and takes and returns fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        if images.is_floating_point():  # and not tokens
            images = images.to(self.dtype)
        return self.model(images).float()


def _require_free(path: Path, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise CheckpointError(f"{path}: is there already; --force replaces it")
    try:
        try_to_write(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error


def _load_state(out: Path) -> _State:
    path = out / run_state.CHECKPOINT
    state = load_checkpoint(path)
    run_state.require_run(path, state)
    return state


def _restore(out: Path, state: _State) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of a checkpoint, and the optimizer, whose state only shards are read for."""
    try:
        config = RunConfig(**state["config"])
        model = build_model(config.model, state["classes"], freeze=config.freeze)
        optimizer = make_optimizer(model, config)
        if "shards" in state:
            _restore_shards(out, state, model, optimizer, config.lr)
        else:
            model.load_state_dict(state["model"])
    except run_state.WRONG_CONTENT as error:
        problem = f"not of a run ({first_line(error)})"
        raise CheckpointError(f"{out / run_state.CHECKPOINT}: {problem}") from error
    return model, optimizer


def _restore_shards(
    out: Path,
    state: _State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
) -> None:
    from amp_lab.train.checkpoint.shards import load_shards  # torch's part of it takes a second

    # With the entries of the schedule, which would not be read into one without them.
    steps = state["scheduler"]["total_steps"]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
    load_shards(out, state["shards"], model, optimizer, ALONE)


def load_model(out: str | os.PathLike) -> tuple[nn.Module, _State]:
    """The model of a run, on the CPU, and the rest of its checkpoint.

    Raises `CheckpointError` if there is none, or it is damaged.
    """
    state = _load_state(Path(out))
    model, _ = _restore(Path(out), state)
    return model, state


def _describe_cast(model: nn.Module, cast_model: nn.Module, dtype: torch.dtype) -> str:
    """A line on what the cast changed; raises `CheckpointError` for what it made infinite."""
    before = model.state_dict()
    after = cast_model.state_dict()
    cast = 0
    underflowed = 0
    for name, tensor in before.items():
        cast_tensor = after[name]
        is_overflowed = tensor.isfinite() & ~cast_tensor.isfinite()
        overflowed = int(is_overflowed.sum())
        if overflowed:
            values = f"{plural(overflowed, 'value')} of {name}"
            largest = torch.finfo(dtype).max
            problem = f"{values} beyond {largest:g}"
            raise CheckpointError(f"{dtype_name(dtype)}: {problem}; give another --dtype")
        is_underflowed = (tensor != 0) & (cast_tensor == 0)
        underflowed += int(is_underflowed.sum())
        cast += cast_tensor.dtype != tensor.dtype
    tensors = f"{cast} of {len(before)} tensors cast to {dtype_name(dtype)}"
    line = f"{tensors}: {_size(after)}, were {_size(before)}"
    if not underflowed:
        return line
    return f"{line}; {plural(underflowed, 'value')} became 0"


def _size(state: dict[str, Tensor]) -> str:
    return bytes_text(sum(tensor.nbytes for tensor in state.values()))


def _inputs(
    config: RunConfig,
    classes: int,
    data: str | os.PathLike,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> Tensor:
    """Images (B, 3, S, S) or tokens (B, T) to check with: the run's own, if they are there."""
    is_text = config.dataset in TEXTS
    count = _INPUTS
    if is_text or dtype == torch.float16:
        count = _FEW_INPUTS
    try:
        run_data = load_data(replace(config, limit=None), data, augment=False, download=False)
        first_batch = next(iter(batches(run_data.test, count)))
        return first_batch[0]
    except DataError as error:
        kind = "tokens" if is_text else "images"
        say(f"Checked with random {kind}, since {error}")
    draws = torch.Generator().manual_seed(0)
    if is_text:
        length = config.context or CONTEXT
        return torch.randint(classes, (count, length), generator=draws)
    default_size = 32
    if config.dataset in ("caltech256", "folder"):
        default_size = PHOTOGRAPH_SIZE
    size = config.image_size or default_size
    return torch.randn(count, 3, size, size, generator=draws)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters say of their own work."""
    with nothing_logged(), warnings.catch_warnings(action="ignore"):
        yield


def _convert(form: str, served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    """The bytes of a file, and what it returns for `inputs`, read again."""
    convert = {"safetensors": _to_safetensors, "onnx": _to_onnx, "pt2": _to_pt2}[form]
    with needed_for(form):
        try:
            return convert(served, inputs, model)
        except (AmpLabError, ModuleNotFoundError):
            raise
        except Exception as error:  # whatever the exporter or the runtime has not
            problem = _export_problem(form, model, served.dtype, error)
            raise CheckpointError(problem) from error


def _export_problem(form: str, model: str, dtype: torch.dtype, error: Exception) -> str:
    what = f"{model} in {dtype_name(dtype)}"
    is_of_onnxruntime = type(error).__module__.startswith("onnxruntime")
    if is_of_onnxruntime and dtype is torch.bfloat16:
        return (
            f"{what} cannot be written as onnx, since ONNX Runtime's CPU cannot run it; "
            "try --dtype fp16 or fp32, or another format"
        )
    return (
        f"{what} cannot be written as {form}, or not run here ({with_type(error)}); try "
        "--dtype fp32, or another format"
    )


def _to_safetensors(served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    import safetensors.torch

    tensors: dict[str, Tensor] = {}
    for name, tensor in served.model.state_dict().items():
        is_tied = any(tensor.is_set_to(other) for other in tensors.values())
        if not is_tied:  # else it is written once
            tensors[name] = tensor.contiguous()
    about = {"format": "pt", "model": model}
    content = safetensors.torch.save(tensors, about)
    loaded = copy.deepcopy(served)
    for tensor in loaded.state_dict().values():
        tensor.zero_()
    loaded.model.load_state_dict(safetensors.torch.load(content), strict=False)
    return content, loaded(inputs)


def _export(served: _Served, inputs: Tensor) -> torch.export.ExportedProgram:
    """The program for any number of inputs."""
    example = inputs[:2].clone()
    any_batch = {0: torch.export.Dim.AUTO}
    return torch.export.export(served, (example,), dynamic_shapes=(any_batch,))


def _to_pt2(served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    content = io.BytesIO()
    torch.export.save(_export(served, inputs), content)
    content.seek(0)
    loaded = torch.export.load(content).module()
    return content.getvalue(), loaded(inputs)


def _to_onnx(served: _Served, inputs: Tensor, model: str) -> tuple[bytes, Tensor]:
    import onnxruntime
    import onnxscript  # noqa: F401  # which torch.onnx asks for in a message of its own

    program = torch.onnx.export(
        _export(served, inputs), verbose=False, input_names=["images"], output_names=["logits"]
    )
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"images": inputs.numpy()})
    return content, torch.from_numpy(outputs)
