"""Models by name: torchvision's image classifiers with a head for other classes, and our GPTs."""

import contextlib
import copy
import difflib
import functools
import io

import torch
import torchvision
from torch import nn

from amp_lab.core.errors import RunError, first_line
from amp_lab.models.gpt import SIZES, Gpt


@functools.cache
def model_names() -> tuple[str, ...]:
    """Names of torchvision's image classifiers."""
    return tuple(torchvision.models.list_models(module=torchvision.models))


def build_model(
    name: str, classes: int, *, pretrained: bool = False, freeze: bool = False
) -> nn.Module:
    """torchvision's classifier `name` with logits (N, classes), or the GPT with so many tokens.

    `pretrained` loads torchvision's default ImageNet weights into all but the head, which stays
    random. `freeze` makes only the head require gradients. Raises `RunError` for an unknown name,
    and for weights that are not there and cannot be fetched.
    """
    if name in SIZES:
        if pretrained or freeze:
            raise RunError(f"{name}: there is no pretrained one, and no head to train alone")
        return Gpt(SIZES[name], classes)
    if name not in model_names():
        raise RunError(_unknown_name(name))
    model = _build(name, classes)
    if not pretrained and not freeze:
        return model
    head = _head(name, model, classes)
    if pretrained:
        state = _fetch_weights(name)
        backbone = {key: state[key] for key in model.state_dict() if key not in head}
        model.load_state_dict(backbone, strict=False)  # all but the head is there, or KeyError
    if freeze:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key in head)
    return model


def _unknown_name(name: str) -> str:
    problem = f"no classifier of torchvision {torchvision.__version__}: {name!r}"
    near = difflib.get_close_matches(name, [*model_names(), *SIZES])
    if not near:
        return problem
    return f"{problem}; near: {', '.join(near)}"


def _build(name: str, classes: int) -> nn.Module:
    options = {}
    if name in ("googlenet", "inception_v3"):  # with a second head they return a tuple
        options = {"aux_logits": False, "init_weights": True}
    return torchvision.models.get_model(name, weights=None, num_classes=classes, **options)


def _head(name: str, model: nn.Module, classes: int) -> set[str]:
    """Names of the parameters whose shape depends on the number of classes."""
    try:
        with torch.device("meta"):
            other = _build(name, classes + 1)
    except NotImplementedError:  # RegNet computes its widths with tensors
        with torch.random.fork_rng(devices=[]):
            other = _build(name, classes + 1)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    return {key for key, value in other.state_dict().items() if value.shape != shapes[key]}


def _fetch_weights(name: str) -> dict[str, torch.Tensor]:
    weights = torchvision.models.get_model_weights(name)["DEFAULT"]
    try:
        printed = io.StringIO()  # by torch.hub, on one or the other
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; the hash does not fit
        folder = torch.hub.get_dir()
        raise RunError(
            f"pretrained weights of {name} cannot be fetched from {weights.url} ({error}); put the "
            f"file into {folder}/checkpoints, or train without pretrained weights"
        ) from error


def require_images_that_fit(model: nn.Module, count: int, image_size: int) -> None:
    """Raise `RunError` if the model cannot train on so many images of this size at a time.

    torch would refuse them in the middle of the first step. It is tried on a copy without memory.
    """
    trial = copy.deepcopy(model).to("meta")
    try:
        trial(torch.empty(count, 3, image_size, image_size, device="meta"))
    except ValueError as error:  # batch norm's, of a single value for each channel
        problem = "batch norm has 1 image to normalise in a process"
        raise RunError(f"{problem}: give a larger batch size") from error
    except (AssertionError, RuntimeError) as error:  # a vision transformer's, a convolution's
        size = f"images of {image_size}x{image_size}"
        raise RunError(
            f"the model takes no {size} ({first_line(error)}): give another image size"
        ) from error
