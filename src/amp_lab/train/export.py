"""Export a run as one file: its checkpoint, or its model in another format, with a check."""

import copy
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_lab.core.errors import AmpLabError, CheckpointError, DataError, first_line, with_type
from amp_lab.core.files import save, try_to_write
from amp_lab.core.precision import Precision
from amp_lab.core.report import bytes_text, dtype_name, plural
from amp_lab.core.requirements import needed_for, nothing_logged
from amp_lab.models.build import build_model
from amp_lab.parallel.ranks import ALONE
from amp_lab.train import run_folder, run_state
from amp_lab.train.checkpoint import is_checkpoint, load_checkpoint, save_checkpoint
from amp_lab.train.data import batches
from amp_lab.train.registry import DATASETS
from amp_lab.train.run_data import load_data
from amp_lab.train.train_options import RunConfig

_State = dict[str, Any]
"""The content of a checkpoint: see `amp_lab.train.run_state`."""
FILE_FORMATS = ("safetensors", "onnx", "pt2")
_INPUTS = 256  # images to check a file with
_FEW_INPUTS = 8  # for fp16, which may be hundreds of times as slow on a CPU, and for long texts
# Largest difference between the outputs of the file and of the model, relative to the largest
# output. Another library sums in another order, and may round to 16 bits less often.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}


def export_checkpoint(
    out: str | os.PathLike, file: str | os.PathLike, *, force: bool = False
) -> None:
    """Write the checkpoint of the run in the folder `out` as one file, even if it is sharded.

    The file is the same as the checkpoint of a run with one process. An existing `file` is replaced
    if it is a checkpoint, or with `force`. Raises `CheckpointError` if the checkpoint of the run is
    missing or damaged, or if the file cannot be written.
    """
    if os.path.lexists(file) and not force and not is_checkpoint(file):
        raise CheckpointError(
            f"{file} already exists and is not a checkpoint; --force replaces the file"
        )
    state, config = _load_state(Path(out))
    if "shards" in state:
        model, optimizer = _build_and_restore(Path(out), state, config)
        # `save_checkpoint` writes the whole state dict of each in place of the shards.
        del state["shards"]
        state["model"] = model
        state["optimizer"] = optimizer
    save_checkpoint(file, **state)


def export_model(
    out: str | os.PathLike,
    file: str | os.PathLike,
    file_format: str,
    precision: Precision | str = Precision.FP32,
    *,
    data: str | os.PathLike | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model of the run in the folder `out`, in one of `FILE_FORMATS`.

    All floating-point parameters and buffers are cast to the dtype of `precision`. A model in
    ``onnx`` or ``pt2`` takes fp32 images (B, 3, S, S) for any B, casts them, and returns fp32
    logits (B, C); a language model takes int64 tokens (B, T) and returns logits (B, T, C).
    ``safetensors`` has only the weights. Before the file is written, its content is read back
    and run on test images of the run, from `data` (default: the path that the run used), or on
    random images if the test images are missing. `say` is called with each line to report.

    Raises `CheckpointError`, and writes no file,

    - if the checkpoint of the run is missing or damaged,
    - if the file exists (unless `force`) or cannot be written,
    - if weights are outside the range of the dtype,
    - if torch cannot export the model,
    - if the outputs of the file differ from the outputs of the model.
    """
    path = Path(file)
    dtype = Precision(precision).dtype
    if file_format not in FILE_FORMATS:
        raise CheckpointError(
            f"unknown format {file_format!r}: use one of {', '.join(FILE_FORMATS)}"
        )
    _require_free(path, force=force)
    model, state, config = load_model(out)
    model.eval()
    data_path = data or run_folder.saved_data_path(Path(out)) or "data"
    cast_model = _CastModel(copy.deepcopy(model), dtype)  # a copy, since it casts in place
    say(_describe_cast(model, cast_model.model, dtype))
    inputs = _inputs_for_check(config, state["classes"], data_path, dtype, say)
    with torch.no_grad(), _quiet_exporters():
        expected = cast_model(inputs)
        if not expected.isfinite().all():
            raise CheckpointError(
                f"{path} was not written, because outputs in {dtype_name(dtype)} are not finite; "
                "give another --dtype"
            )
        converted = _convert(file_format, cast_model, inputs, config.model)
        outputs = converted.outputs
        largest_error = (outputs - expected).abs().max()
        relative_error = (largest_error / expected.abs().max()).item()
        # A decision is the class, or token, with the largest logit. `model` is still in fp32.
        fp32_decisions = model(inputs).argmax(-1)
        agrees = fp32_decisions == outputs.argmax(-1)
    if not relative_error <= _TOLERANCE[dtype]:  # true for NaN as well
        problem = f"the outputs of the {file_format} file differ by {relative_error:.1%}"
        raise CheckpointError(f"{path} was not written, because {problem} from those of the model")
    save(path, [converted.content], CheckpointError)
    agreement = f"{int(agrees.sum())} of {agrees.numel()} decisions agree with fp32"
    distance = f"outputs differ by {relative_error:.1e} from the model in {dtype_name(dtype)}"
    say(f"Checked the file: {agreement}; {distance}")
    say(f"Written: {path} ({bytes_text(len(converted.content))})")


class _CastModel(nn.Module):
    """Casts a model to `dtype` in place, and runs it on fp32 images or tokens: fp32 logits."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """Logits in fp32, for `images` (B, 3, S, S) in fp32, or for tokens int64 (B, T)."""
        if images.is_floating_point():
            images = images.to(self.dtype)
        return self.model(images).float()


def _require_free(path: Path, *, force: bool) -> None:
    """Raise `CheckpointError` if the file exists, unless `force`, or cannot be written."""
    if os.path.lexists(path) and not force:
        raise CheckpointError(f"{path} already exists; --force replaces the file")
    try:
        try_to_write(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error


def _load_state(out: Path) -> tuple[_State, RunConfig]:
    """The checkpoint of the run in `out` and its settings; `CheckpointError` if it is of no run."""
    path = out / run_state.CHECKPOINT
    state = load_checkpoint(path)
    return state, run_state.require_run(path, state)


def _build_and_restore(
    out: Path, state: _State, config: RunConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model of a checkpoint and its optimizer, and load their state.

    Without shards only the model's state is loaded: callers then use the optimizer's state dict,
    which is in `state`. Raises `CheckpointError` if `state` is not that of a run.
    """
    try:
        model = build_model(config.model, state["classes"], freeze=config.freeze)
        optimizer = run_state.make_optimizer(model, config)
        if "shards" in state:
            _restore_shards(out, state, model, optimizer, config.lr)
        else:
            model.load_state_dict(state["model"])
    except run_state.WRONG_CONTENT as error:
        problem = f"the file is not the checkpoint of a run ({first_line(error)})"
        raise CheckpointError(f"{out / run_state.CHECKPOINT}: {problem}") from error
    return model, optimizer


def _restore_shards(
    out: Path,
    state: _State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
) -> None:
    """Load the shards in `out` into a model and an optimizer of this process alone."""
    from amp_lab.train.checkpoint.shards import load_shards  # here, since it takes a second to load

    # A scheduler adds entries to the optimizer's parameter groups, such as max_lr. The shards have
    # them, so the optimizer must have them before it is loaded.
    steps = state["scheduler"]["total_steps"]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
    load_shards(out, state["shards"], model, optimizer, ALONE)


def load_model(out: str | os.PathLike) -> tuple[nn.Module, _State, RunConfig]:
    """Load the model, the checkpoint and the settings of the run in the folder `out`, on the CPU.

    Raises `CheckpointError` if the checkpoint is missing or damaged.
    """
    state, config = _load_state(Path(out))
    model, _ = _build_and_restore(Path(out), state, config)
    return model, state, config


def _describe_cast(model: nn.Module, cast_model: nn.Module, dtype: torch.dtype) -> str:
    """One line: how many tensors were cast, the size before and after, and values that became 0.

    Raises `CheckpointError` for a value that became infinite.
    """
    before = model.state_dict()
    after = cast_model.state_dict()
    cast_tensors = 0
    underflows = 0
    for name, tensor in before.items():
        cast_tensor = after[name]
        is_overflow = tensor.isfinite() & ~cast_tensor.isfinite()
        overflows = int(is_overflow.sum())
        if overflows:
            values = f"{plural(overflows, 'value')} of {name}"
            largest = torch.finfo(dtype).max
            problem = f"{values} exceed the largest number, {largest:g}"
            raise CheckpointError(f"{dtype_name(dtype)}: {problem}; give another --dtype")
        is_underflow = (tensor != 0) & (cast_tensor == 0)
        underflows += int(is_underflow.sum())
        cast_tensors += cast_tensor.dtype != tensor.dtype
    counts = f"{cast_tensors} of {len(before)} tensors cast to {dtype_name(dtype)}"
    line = f"{counts}: from {_total_size(before)} to {_total_size(after)}"
    if not underflows:
        return line
    return f"{line}; {plural(underflows, 'value')} became 0"


def _total_size(state: dict[str, Tensor]) -> str:
    """The bytes of all tensors of a state dict, as a text: ``8.6 MiB``."""
    return bytes_text(sum(tensor.nbytes for tensor in state.values()))


def _inputs_for_check(
    config: RunConfig,
    classes: int,
    data: str | os.PathLike,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> Tensor:
    """Inputs to check a file with: test images (B, 3, S, S), or tokens int64 (B, T) of a text.

    `classes` is the number of classes of the model, for a text of different tokens. `data` is the
    path of the data; if they cannot be loaded, the inputs are random, and `say` gets a line about
    it. B is `_INPUTS`, or `_FEW_INPUTS` for a text and with `dtype` fp16.
    """
    is_text = DATASETS[config.dataset].is_text
    count = _INPUTS
    if is_text or dtype == torch.float16:
        count = _FEW_INPUTS
    try:
        run_data = load_data(replace(config, limit=None), data, augment=False, download=False)
        inputs, _ = next(iter(batches(run_data.test, count)))
        return inputs
    except DataError as error:
        description = "tokens" if is_text else "images"
        say(f"Checking with random {description}, because {error}")
    generator = torch.Generator().manual_seed(0)
    if is_text:
        return torch.randint(classes, (count, config.passage_length), generator=generator)
    size = config.image_side
    return torch.randn(count, 3, size, size, generator=generator)


@contextmanager
def _quiet_exporters() -> Iterator[None]:
    """Drop the logs and warnings of torch's exporters in the block."""
    with nothing_logged(), warnings.catch_warnings(action="ignore"):
        yield


class _Converted(NamedTuple):
    """A model in the format of a file."""

    content: bytes  # of the file
    outputs: Tensor  # what the content, read back, returns for the inputs of the check


def _convert(file_format: str, model: _CastModel, inputs: Tensor, model_name: str) -> _Converted:
    """Convert a model to a file format, read the result back, and run it on `inputs`.

    `model_name` is for messages, and for the metadata of safetensors. Raises `CheckpointError` if
    the exporter or the runtime cannot do it.
    """
    convert = {"safetensors": _to_safetensors, "onnx": _to_onnx, "pt2": _to_pt2}[file_format]
    with needed_for(file_format):
        try:
            return convert(model, inputs, model_name)
        except (AmpLabError, ModuleNotFoundError):
            raise
        except Exception as error:  # an exporter may raise anything for an op that it lacks
            problem = _export_problem(file_format, model_name, model.dtype, error)
            raise CheckpointError(problem) from error


def _export_problem(file_format: str, model_name: str, dtype: torch.dtype, error: Exception) -> str:
    """The message for a model that cannot be exported, or whose file cannot be run."""
    description = f"{model_name} in {dtype_name(dtype)}"
    is_of_onnxruntime = type(error).__module__.startswith("onnxruntime")
    if is_of_onnxruntime and dtype is torch.bfloat16:
        return (
            f"{description} cannot be written as onnx: ONNX Runtime cannot run it on a CPU; "
            "try --dtype fp16 or fp32, or another format"
        )
    return (
        f"{description} cannot be exported to {file_format}, or cannot run here "
        f"({with_type(error)}); try --dtype fp32, or another format"
    )


def _to_safetensors(model: _CastModel, inputs: Tensor, model_name: str) -> _Converted:
    """The bytes of a safetensors file, and the outputs with its weights: see `_convert`."""
    import safetensors.torch

    tensors: dict[str, Tensor] = {}
    for name, tensor in model.model.state_dict().items():
        # safetensors refuses tensors that share memory, so tied weights are written once.
        is_tied = any(tensor.is_set_to(other) for other in tensors.values())
        if not is_tied:
            tensors[name] = tensor.contiguous()
    metadata = {"format": "pt", "model": model_name}
    content = safetensors.torch.save(tensors, metadata)
    reloaded = copy.deepcopy(model)
    for tensor in reloaded.state_dict().values():
        tensor.zero_()  # so that a tensor that the file lacks does not go unnoticed
    # Not strict, since of tied weights the file has only one: the other shares its memory.
    reloaded.model.load_state_dict(safetensors.torch.load(content), strict=False)
    return _Converted(content, reloaded(inputs))


def _export(model: _CastModel, inputs: Tensor) -> torch.export.ExportedProgram:
    """Export a model for any batch size; the first two of `inputs` (B, …) are the example."""
    example = inputs[:2].clone()  # torch.export would take a batch size of 1 as the only one
    any_batch_size = {0: torch.export.Dim.AUTO}
    return torch.export.export(model, (example,), dynamic_shapes=(any_batch_size,))


def _to_pt2(model: _CastModel, inputs: Tensor, model_name: str) -> _Converted:
    """The bytes of a pt2 file, and the outputs of the program read from them: see `_convert`."""
    content = io.BytesIO()
    torch.export.save(_export(model, inputs), content)
    content.seek(0)
    loaded = torch.export.load(content).module()
    return _Converted(content.getvalue(), loaded(inputs))


def _to_onnx(model: _CastModel, inputs: Tensor, model_name: str) -> _Converted:
    """The bytes of an ONNX file, and its outputs in ONNX Runtime: see `_convert`."""
    import onnxruntime
    import onnxscript  # noqa: F401  # so that a missing one is reported as other packages are

    program = torch.onnx.export(
        _export(model, inputs), verbose=False, input_names=["images"], output_names=["logits"]
    )
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"images": inputs.numpy()})
    return _Converted(content, torch.from_numpy(outputs))
