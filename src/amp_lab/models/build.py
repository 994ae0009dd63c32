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
    """The names of torchvision's image classifiers, such as ``resnet18``."""
    return tuple(torchvision.models.list_models(module=torchvision.models))


def build_model(
    name: str, classes: int, *, pretrained: bool = False, freeze: bool = False
) -> nn.Module:
    """Build torchvision's classifier `name` with logits (N, classes), or our GPT of that name.

    For a GPT, `classes` is the size of the vocabulary. `pretrained` loads torchvision's default
    ImageNet weights into all layers but the head, which stays random. `freeze` makes only the head
    require gradients. Raises `RunError` for an unknown name, and if the weights cannot be
    downloaded.
    """
    if name in SIZES:
        if pretrained or freeze:
            problem = f"{name} has no pretrained weights and cannot be frozen"
            raise RunError(f"{problem}: leave out --pretrained and --freeze")
        return Gpt(SIZES[name], classes)
    if name not in model_names():
        raise RunError(_unknown_name_message(name))
    model = _build_classifier(name, classes)
    if not pretrained and not freeze:
        return model
    head_names = _head_names(name, model, classes)
    if pretrained:
        state = _fetch_weights(name)
        # `strict=False` allows for the missing head; any other missing tensor is a KeyError here.
        backbone = {key: state[key] for key in model.state_dict() if key not in head_names}
        model.load_state_dict(backbone, strict=False)
    if freeze:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key in head_names)
    return model


def _unknown_name_message(name: str) -> str:
    """The message for a model that does not exist, with similar names if there are any."""
    problem = f"torchvision {torchvision.__version__} has no classifier {name!r}"
    similar_names = difflib.get_close_matches(name, [*model_names(), *SIZES])
    if not similar_names:
        return problem
    return f"{problem}; similar names: {', '.join(similar_names)}"


def _build_classifier(name: str, classes: int) -> nn.Module:
    """Build torchvision's classifier with random weights."""
    options = {}
    if name in ("googlenet", "inception_v3"):  # by default they have a second head, and return two
        options = {"aux_logits": False, "init_weights": True}
    return torchvision.models.get_model(name, weights=None, num_classes=classes, **options)


def _head_names(name: str, model: nn.Module, classes: int) -> set[str]:
    """The names of the parameters of the head: those whose shape depends on `classes`."""
    try:
        with torch.device("meta"):
            other_model = _build_classifier(name, classes + 1)
    except NotImplementedError:  # RegNet computes its widths with tensors, which meta cannot
        with torch.random.fork_rng(devices=[]):  # so that the caller's random numbers stay the same
            other_model = _build_classifier(name, classes + 1)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    other_state = other_model.state_dict()
    return {key for key, value in other_state.items() if value.shape != shapes[key]}


def _fetch_weights(name: str) -> dict[str, torch.Tensor]:
    """Download torchvision's default weights, or read them from its cache, without any output."""
    weights = torchvision.models.get_model_weights(name)["DEFAULT"]
    try:
        output = io.StringIO()  # what torch.hub prints on stdout and stderr is dropped
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network, or a wrong hash
        folder = torch.hub.get_dir()
        raise RunError(
            f"pretrained weights of {name} cannot be downloaded from {weights.url} ({error}); put "
            f"the file into {folder}/checkpoints, or train without pretrained weights"
        ) from error


def require_images_that_fit(model: nn.Module, count: int, image_size: int) -> None:
    """Raise `RunError` if the model cannot train on `count` images of this size at a time.

    A copy on the meta device computes the shapes of a forward pass, without memory. The first step
    of training would fail too, but later, and with torch's message.
    """
    meta_model = copy.deepcopy(model).to("meta")
    try:
        meta_model(torch.empty(count, 3, image_size, image_size, device="meta"))
    except ValueError as error:  # from batch norm, for a single value in each channel
        problem = "batch norm needs more than 1 image in each process"
        raise RunError(f"{problem}: give a larger batch size") from error
    # From a vision transformer for another size, or a convolution for too small an image.
    except (AssertionError, RuntimeError) as error:
        size = f"images of {image_size}x{image_size}"
        raise RunError(
            f"the model cannot take {size} ({first_line(error)}): give another image size"
        ) from error
