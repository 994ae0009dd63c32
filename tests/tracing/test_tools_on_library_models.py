"""find_nonfinite, rehearse, first_difference and advise on 60 models of other libraries.

They run weekly, where the libraries are installed: see CONTRIBUTING.
"""

import pytest
from library_checks import layers_called, overflow_in, step_is_finite
from library_models import MODELS, built_for_test
from memory_models import cpu_autocast

from amp_lab import advise, find_nonfinite, first_difference, rehearse
from amp_lab.core.errors import AmpLabError

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.filterwarnings("ignore"),  # theirs
]
NAMES = sorted(MODELS)
ADVISED = ["timm resnet18", "bert", "torchaudio conformer", "geometric GCN", "monai unet, DiceCE"]


@pytest.fixture
def built(request):
    return built_for_test(request.param)


@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_a_planted_overflow_is_found_in_its_module(built):
    model, args, kwargs = built
    names = layers_called(model, args, kwargs)
    is_finite = True
    for name in names[len(names) // 2 :]:
        with overflow_in(model.get_submodule(name)), find_nonfinite(model) as finder:
            is_finite = step_is_finite(model, args, kwargs)
        if not is_finite:
            assert finder.report.module == name
            break
        assert finder.report is None  # ReLU6, say, has bounded it
    assert not is_finite


def ends_in_a_line(run):
    """Whether a tool returns, or refuses in one line."""
    try:
        run()
    except AmpLabError as error:
        return "\n" not in str(error).strip()
    return True


@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_a_rehearsal_ends_with_an_answer_or_a_line(built):
    model, args, kwargs = built
    assert ends_in_a_line(lambda: rehearse(model, *args, formats=("fp8",), **kwargs))


@pytest.mark.parametrize("built", NAMES, indirect=True)
def test_a_comparison_with_bf16_ends_with_an_answer_or_a_line(built):
    model, args, kwargs = built

    def in_bf16(*args, **kwargs):
        with cpu_autocast("bf16"):
            return model(*args, **kwargs)

    assert ends_in_a_line(lambda: first_difference(model, in_bf16, *args, **kwargs))


@pytest.mark.parametrize("built", ADVISED, indirect=True)
def test_advice_is_given(built):
    model, args, kwargs = built
    found = advise(model, *args, device="cpu", minutes=0.2, **kwargs)
    assert found.candidates
