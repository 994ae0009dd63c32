"""Notebook 08d: what it says of clipping, the loop and a resumed run, beyond its own assertions."""

import copy
import io
import re
import tomllib
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "notebooks/course/other_failures"
ROWS = FOLDER / "08d_loop_and_resume.toml"


def loaded(content, **options):
    """What `torch.load` returns after `content` was saved."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("unscale", [False, True])
def test_clipping_values_of_scaled_gradients_leaves_next_to_nothing(unscale):
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale((weight * torch.tensor([0.5, 0.25])).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_([weight], 1.0)
    scaler.step(optimizer)
    expected = [0.5, 0.25] if unscale else [2.0**-16, 2.0**-16]
    assert (-weight).tolist() == expected


def test_adam_hides_that_its_gradients_were_clipped_while_scaled():
    moved = []
    for unscale in (False, True):
        weight = nn.Parameter(torch.zeros(1))
        adam, scaler = torch.optim.Adam([weight], lr=0.1), torch.amp.GradScaler("cpu")
        scaler.scale(weight.sum()).backward()
        if unscale:
            scaler.unscale_(adam)
        nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(adam)
        moved.append(-weight.item())
    assert moved[0] == pytest.approx(moved[1], rel=1e-3)


def test_a_limit_for_scaled_gradients_is_another_one_after_an_overflow():
    """AMP0015: and the logged norm is halved."""
    limits, norms = [], []
    weight = nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    for factor in (1.0, torch.inf, 1.0):
        weight.data.zero_()
        optimizer.zero_grad()
        scaler.scale(factor * 10 * weight.sum()).backward()
        norms.append(nn.utils.clip_grad_norm_([weight], 65536.0).item())
        scaler.step(optimizer)
        scaler.update()
        limits.append(-weight.item())
    assert limits == pytest.approx([1.0, 0.0, 2.0])
    assert norms == [10 * 65536, torch.inf, 10 * 32768]


def test_a_hook_sees_a_scaled_gradient():
    seen = []
    weight = nn.Parameter(torch.ones(1))
    weight.register_hook(lambda gradient: seen.append(gradient.item()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(2 * weight.sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    assert (seen, weight.grad.item()) == ([131072.0], 2.0)


def test_fabric_refuses_a_norm_that_is_not_finite_unless_told_otherwise():
    """AMP0016."""
    fabric = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")
    fabric = fabric.Fabric(accelerator="cpu")
    layer = nn.Linear(1, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters()))
    fabric.backward(model(torch.ones(1, 1)).sum() * torch.inf)
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)


def test_in_one_block_around_the_loop_without_a_norm_the_loss_stands_still():
    torch.manual_seed(0)
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    for norm, still_learns in ((nn.Identity(), False), (nn.LayerNorm(8), True)):
        model = nn.Sequential(nn.Linear(8, 8), norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert (losses[0] > losses[1] > losses[2]) == still_learns
        assert (losses[0] == losses[1] == losses[2]) != still_learns


def test_in_one_block_around_the_loop_an_embedding_still_learns():
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 4)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            optimizer.zero_grad()
            loss = embedding(torch.arange(4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("in_one_block", [True, False])
def test_the_divergence_from_a_reference_is_0_if_both_use_the_same_casts(in_one_block):
    """AMP0026."""
    torch.manual_seed(0)
    model, reference = nn.Linear(4, 4), nn.Linear(4, 4).state_dict()
    x, outputs = torch.randn(2, 4), []
    with torch.autocast("cpu", dtype=torch.bfloat16) if in_one_block else nullcontext():
        for load in (False, True):
            if load:
                model.load_state_dict(reference)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(model(x).float().log_softmax(-1))
    divergence = nn.functional.kl_div(*outputs, log_target=True, reduction="batchmean")
    assert (divergence == 0) == in_one_block


def first_step_is_skipped(scaler):
    """Whether a step with a gradient of 10 in fp16 overflows at the scaler's present scale."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((10 * weight.half()).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.item() == 1


def test_a_new_scaler_skips_a_step_that_a_loaded_one_takes():
    assert first_step_is_skipped(torch.amp.GradScaler("cpu"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict())
    assert not first_step_is_skipped(scaler)


@pytest.mark.parametrize(("step", "after"), [(torch.tensor(301.0), 302), ("in bf16", 300)])
def test_the_step_of_adam_is_kept_as_it_was_saved(step, after):
    weight = nn.Parameter(torch.ones(1))
    adam = torch.optim.Adam([weight])
    weight.grad = torch.ones(1)
    adam.step()
    state = adam.state_dict()
    state["state"][0]["step"] = torch.tensor(301.0).bfloat16() if step == "in bf16" else step
    adam.load_state_dict(state)
    adam.step()
    assert adam.state[weight]["step"] == after


def test_a_new_optimizer_has_no_state_to_be_filled():
    assert torch.optim.Adam([nn.Parameter(torch.ones(1))]).state_dict()["state"] == {}


def test_the_random_state_is_part_of_a_run():
    state = torch.get_rng_state()
    mask = nn.functional.dropout(torch.ones(100))
    assert not torch.equal(nn.functional.dropout(torch.ones(100)), mask)
    torch.set_rng_state(loaded({"random": state})["random"])
    assert torch.equal(nn.functional.dropout(torch.ones(100)), mask)


def run(saved, left_out=None, steps=range(3, 6)):
    """Some steps after a checkpoint, or from the start; the state after them."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state = {name: part.state_dict() for name, part in parts.items()}
    state |= {"random": torch.get_rng_state(), "position": 0}
    saved = copy.deepcopy(saved or {})  # the optimizer changes the tensors that it loads
    state |= {name: part for name, part in saved.items() if name != left_out}
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    data = torch.linspace(-1, 1, 12).view(6, 1, 2)
    for batch in data[state["position"] :][: len(steps)]:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    state = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    return state | {"random": torch.get_rng_state(), "position": len(steps)}


@pytest.mark.parametrize(
    "left_out", [None, "model", "optimizer", "scheduler", "scaler", "random", "position"]
)
def test_a_run_resumes_exactly_if_nothing_is_left_out(left_out):
    """AMP0046."""
    torch.manual_seed(0)
    saved = loaded(run(None, steps=range(3)))
    whole = run(saved)
    torch.manual_seed(1)
    resumed = run(saved, left_out)
    same = [torch.equal(whole["model"][name], resumed["model"][name]) for name in whole["model"]]
    scales = [state["scaler"]["scale"] for state in (whole, resumed)]
    assert (all(same) and scales[0] == scales[1]) == (left_out is None)


@pytest.mark.parametrize(
    ("optimizer", "options", "said"),
    [
        ("Adam", {}, "expected dtype float for `end` but got dtype c10::BFloat16"),
        ("AdamW", {"foreach": True}, "expected dtype float for `end` but got dtype c10::BFloat16"),
        ("NAdam", {}, "expected dtype float for `end` but got dtype c10::BFloat16"),
        ("Muon", {}, "expected dtype float for `end` but got dtype c10::BFloat16"),
        ("Adam", {"fused": True}, "expected scalar type BFloat16 but found Float"),
    ],
)
def test_optimizers_refuse_a_model_that_was_cast_between_two_steps(optimizer, options, said):
    model = nn.Linear(2, 2, bias=False)
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.bfloat16()
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()


def test_without_fused_a_gradient_may_have_other_strides():
    """AMP0140."""
    weight = nn.Parameter(torch.ones(2, 1, 3))
    torch.bmm(torch.ones(2, 4, 3), weight.transpose(1, 2)).sum().backward()
    assert weight.stride() != weight.grad.stride()
    torch.optim.Adam([weight], lr=0.1).step()
    torch.testing.assert_close(weight, torch.full((2, 1, 3), 0.9))


def test_an_average_in_fp32_takes_weights_that_are_cast():
    average, weight = torch.zeros(2), torch.ones(2).bfloat16()
    with pytest.raises(RuntimeError, match="expected dtype float for `end`"):
        average.lerp_(weight, 0.1)
    average.lerp_(weight.float(), 0.1)
    assert average.tolist() == pytest.approx([0.1, 0.1])


def test_lerp_has_another_wording_if_it_is_compiled():
    with pytest.raises(RuntimeError, match=r"expected dtype torch\.float32 for `end`, but"):
        torch.ones(2, device="meta").lerp(torch.ones(2, device="meta").bfloat16(), 0.1)


def saved_adam():
    """The state of Adam after a step with a gradient of 1e-5 in fp32."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full_like(weight, 1e-5)
    adam = torch.optim.Adam([weight])
    adam.step()
    return adam.state_dict()


def test_fused_adam_loads_a_small_moment_into_fp16_and_does_not_divide_by_zero():
    """It adds its epsilon in fp32."""
    weight = nn.Parameter(torch.ones(1).half())
    weight.grad = torch.full_like(weight, 1e-5)
    adam = torch.optim.Adam([weight], fused=True)
    adam.load_state_dict(saved_adam())
    adam.param_groups[0]["fused"] = True  # it was loaded too
    adam.step()
    assert adam.state[weight]["exp_avg_sq"].dtype is torch.float16
    assert adam.state[weight]["exp_avg_sq"] == 0
    assert weight.isfinite()


def test_saved_tensors_can_be_put_back_after_loading():
    state = saved_adam()
    weight = nn.Parameter(torch.ones(1).bfloat16())
    adam = torch.optim.Adam([weight])
    adam.load_state_dict(state)
    assert adam.state[weight]["exp_avg_sq"].dtype is torch.bfloat16
    assert adam.state[weight]["exp_avg_sq"].float() != state["state"][0]["exp_avg_sq"]
    parameters = [weight for group in adam.param_groups for weight in group["params"]]
    for number, tensors in state["state"].items():
        adam.state[parameters[number]].update(tensors)
    assert torch.equal(adam.state[weight]["exp_avg_sq"], state["state"][0]["exp_avg_sq"])


def test_a_disabled_scaler_ignores_what_it_loads():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict())
    assert scaler.get_scale() == 1


@pytest.mark.filterwarnings("ignore")
def test_the_state_of_a_scaler_without_its_gpu_is_empty(monkeypatch):
    """AMP0017."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.amp.GradScaler("cuda").state_dict() == {}


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
def test_a_variable_of_the_environment_loads_what_weights_only_refuses(monkeypatch):
    """AMP0142: where the call of `torch.load` says nothing about it."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert loaded(torch.amp.GradScaler("cpu")).get_scale() == 65536


def test_allowing_the_class_of_the_scaler_is_not_enough():
    scaler = torch.amp.GradScaler("cpu")
    with (
        torch.serialization.safe_globals([torch.amp.GradScaler]),
        pytest.raises(Exception, match=r"GLOBAL collections\.defaultdict was not"),
    ):
        loaded(scaler, weights_only=True)
    assert loaded(scaler, weights_only=False).get_scale() == 65536


def test_a_loaded_checkpoint_is_a_second_copy_of_the_weights_until_it_is_deleted():
    """AMP0141."""
    model = nn.Linear(2, 2)
    checkpoint = loaded(model.state_dict(), map_location="cpu")
    model.load_state_dict(checkpoint)
    assert model.weight.data_ptr() != checkpoint["weight"].data_ptr()
    copy_of_weight = weakref.ref(checkpoint["weight"])
    del checkpoint
    assert copy_of_weight() is None


def test_a_checkpoint_can_be_mapped_into_memory(tmp_path):
    """AMP0141."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "checkpoint.pt")
    checkpoint = torch.load(tmp_path / "checkpoint.pt", map_location="cpu", mmap=True)
    assert checkpoint["weight"].tolist() == [1, 1]


def test_bf16_gradients_stop_growing_when_they_are_accumulated():
    """AMP0143."""
    for dtype, total in ((torch.bfloat16, 256), (torch.float32, 512)):
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        for _ in range(512):
            weight.sum().backward()
        assert weight.grad == total
    layer = nn.Linear(1, 1, bias=False)
    for _ in range(512):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer(torch.ones(1, 1)).sum()
        loss.backward()
    assert layer.weight.grad == 512


def test_mean_losses_of_micro_batches_add_up_if_each_has_its_share():
    """AMP0143: without shares, the sum of N equal ones is N times too large."""

    def gradient(batches, shares):
        weight = nn.Parameter(torch.ones(1))
        for batch, share in zip(batches, shares, strict=True):
            ((weight * batch).square().mean() * share).backward()
        return weight.grad.item()

    data = torch.arange(1.0, 9.0)
    expected = gradient([data], [1])
    assert gradient(data.chunk(4), [1] * 4) == pytest.approx(4 * expected)
    assert gradient(data.split([6, 2]), [6 / 8, 2 / 8]) == pytest.approx(expected)


def test_a_compiled_model_has_other_names_and_strict_false_loads_none_of_them():
    """AMP0145."""
    model = nn.Linear(2, 2)
    checkpoint = torch.compile(model).state_dict()
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r'Unexpected key\(s\) in state_dict: "_orig_mod.weight"'
    ):
        other.load_state_dict(checkpoint)
    other.load_state_dict(checkpoint, strict=False)
    assert torch.equal(other.weight, before)
    other.load_state_dict({n.replace("_orig_mod.", ""): value for n, value in checkpoint.items()})
    assert torch.equal(other.weight, model.weight)
    model.compile()
    assert list(model.state_dict()) == list(other.state_dict())


def test_saving_inside_an_autocast_block_saves_fp32():
    """AMP0146."""
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 2))
        dtypes = {value.dtype for value in loaded(model.state_dict()).values()}
    assert dtypes == {torch.float32}


def test_a_cast_copy_of_the_weights_takes_half_the_space_and_leaves_the_model():
    """AMP0146: by the code of the entry."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    rows = tomllib.loads(ROWS.read_text(encoding="utf-8"))["failure"]
    (cure,) = [row["cure"] for row in rows if row["code"] == "AMP0146"]
    code = re.search(r"`(\{name: .*\})`", cure).group(1)
    cast = loaded(eval(code, {"model": model}))
    integers = {"1.num_batches_tracked"}
    assert {name for name, value in cast.items() if value.dtype is torch.int64} == integers
    floats = {value.dtype for name, value in cast.items() if name not in integers}
    assert floats == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_half_casts_the_model_itself_and_float_restores_nothing():
    """AMP0146, AMP0148."""
    model = nn.Linear(1, 1)
    model.weight.data.fill_(1e5)
    half = copy.deepcopy(model).half()
    assert half.weight.isinf()
    assert model.weight.item() == 1e5
    model.half()
    model.float()
    assert model.weight.isinf()
    assert model.bfloat16() is model


def test_weights_of_65520_are_infinite_in_fp16_and_smaller_ones_are_rounded():
    """AMP0148: and bf16 autocast leaves the weights alone."""
    values = torch.tensor([65519.0, 65520.0, -65520.0, 0.1])
    assert values.half().isinf().tolist() == [False, True, True, False]
    assert values.half().float()[3] != values[3]
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(values)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(1, 4)).isfinite()
    assert torch.equal(model.weight[0], values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_average_never_recovers_from_one_bad_weight(bad):
    """AMP0148."""
    average = torch.ones(1)
    for weight in (bad, *[1.0] * 10):
        average.lerp_(torch.tensor([weight]), 0.1)
    assert not average.isfinite()


def test_a_nan_that_is_replaced_with_0_gives_a_wrong_output():
    """AMP0148."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(2.0)
    expected = model(torch.ones(1, 2)).item()
    model.weight.data[0, 0] = torch.nan
    model.weight.data.nan_to_num_()
    assert expected == 4
    assert model(torch.ones(1, 2)) == 2


def test_a_scaler_whose_growth_tracker_was_set_refuses_its_first_scale():
    """AMP0149."""
    scaler = torch.amp.GradScaler("cpu")
    scaler._growth_tracker = torch.zeros((), dtype=torch.int32)
    with pytest.raises(AssertionError, match="_growth_tracker initialized before _scale"):
        scaler.scale(torch.ones(1))


def test_a_scaler_creates_its_scale_only_once():
    """AMP0149: as `Accelerator.load_state` of accelerate 1.15 asks for a second time."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="_growth_tracker initialized before _scale"):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


def test_a_loop_that_gives_a_name_another_value_casts_no_parameter():
    """AMP0093."""
    model = nn.Linear(2, 2).bfloat16()
    for parameter in model.parameters():
        parameter = parameter.float()
    assert model.weight.dtype is torch.bfloat16
    assert model.float().weight.dtype is torch.float32


def test_clipping_an_infinite_norm_makes_gradients_nan():
    """AMP0212."""
    for max_norm, finite in ((1.0, 0.0), (torch.inf, torch.nan)):
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.tensor([1.0, torch.inf])
        assert nn.utils.clip_grad_norm_([weight], max_norm) == torch.inf
        expected = torch.tensor([finite, torch.nan])
        torch.testing.assert_close(weight.grad, expected, equal_nan=True)
    weight.grad = torch.tensor([3.0, 4.0])
    assert nn.utils.get_total_norm([weight.grad]) == 5
    nn.utils.clip_grad_norm_([weight], 10.0)
    assert weight.grad.tolist() == [3, 4]  # multiplied at most by 1
    weight.grad.fill_(torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("checked", [True, False])
def test_a_step_after_clipping_an_infinite_norm_makes_weights_nan_unless_it_is_skipped(checked):
    """AMP0212."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.tensor([1.0, torch.inf])
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    if not checked or norm.isfinite():
        optimizer.step()
    assert weight.isfinite().all() == checked


def stepped(dtype: torch.dtype) -> tuple[nn.Parameter, torch.optim.Adam]:
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    adam = torch.optim.Adam([weight], lr=1e-3)
    weight.grad = torch.tensor([0.1234567, 1.0], dtype=dtype)
    adam.step()
    return weight, adam


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_casts_moments_to_the_dtype_of_the_weights(dtype):
    """AMP0296."""
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
    saved = stepped(other)[1].state_dict()
    weight, optimizer = stepped(dtype)
    optimizer.load_state_dict(saved)
    assert optimizer.state[weight]["exp_avg"].dtype is dtype
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, state in saved["state"].items():
        optimizer.state[params[i]].update(
            {
                key: value.to(params[i].device, copy=True)
                for key, value in state.items()
                if torch.is_tensor(value) and value.dim()
            }
        )
    assert torch.equal(optimizer.state[weight]["exp_avg"], saved["state"][0]["exp_avg"])
    assert optimizer.state[weight]["exp_avg"].dtype is other
    with pytest.raises(RuntimeError, match="dtype"):  # AdamW of torch wants the dtype of the weight
        optimizer.step()
    # A later step must not change the checkpoint that was loaded.
    optimizer.state[weight]["exp_avg"].zero_()
    assert saved["state"][0]["exp_avg"].all()


@pytest.mark.parametrize("repaired", [False, True])
def test_a_step_counter_in_bf16_stops_at_256(repaired):
    """AMP0296."""
    weight, adam = stepped(torch.float32)
    saved = adam.state_dict()
    saved["state"][0]["step"] = torch.tensor(250.0, dtype=torch.bfloat16)
    adam.load_state_dict(saved)
    state = adam.state[weight]
    if repaired:
        state["step"] = torch.tensor(float(250))
    for _ in range(1000):
        adam.step()
    assert state["step"] == (1250 if repaired else 256)
    before = weight.detach().clone()
    adam.step()
    step_size = (weight - before).abs().max() / 1e-3  # 1 for a constant gradient
    assert (step_size > 0.9) == repaired


@pytest.mark.parametrize("init_scale", [2.0**16, 1024])
def test_the_default_scale_makes_the_gradients_of_a_sum_infinite(init_scale):
    """AMP0144."""
    a, b = (nn.Parameter(torch.full((2, 2), 0.5)) for _ in range(2))
    optimizer = torch.optim.SGD([a, b], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    finite = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (a @ b).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        finite.append(bool(a.grad.isfinite().all()))
        scaler.step(optimizer)
        scaler.update()
    assert finite[0] == (init_scale == 1024)
    assert finite[-1]
    assert a.isfinite().all()
    assert (a < 0.5).all()


@pytest.mark.parametrize("option", [None, "fused", "capturable"])
def test_only_a_fused_or_capturable_optimizer_casts_the_step_counter(option):
    """AMP0296."""
    weight = nn.Parameter(torch.ones(1))
    adam = torch.optim.Adam([weight])
    weight.grad = torch.ones(1)
    adam.step()
    saved = adam.state_dict()
    saved["state"][0]["step"] = torch.tensor(250.0).bfloat16()
    if option is not None:
        saved["param_groups"][0][option] = True
    adam.load_state_dict(saved)
    assert adam.state[weight]["step"].dtype is (torch.float32 if option else torch.bfloat16)


def test_a_checkpoint_with_the_moments_of_adam_has_12_bytes_per_parameter():
    """AMP0146."""
    weight, adam = stepped(torch.float32)
    moments = [adam.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
    assert sum(tensor.nbytes for tensor in [weight, *moments]) == 12 * weight.numel()


def test_rounding_changes_a_close_decision_and_a_metric():
    """AMP0147."""
    scores = torch.tensor([1.0, 1.001])
    assert [scores.argmax(), scores.bfloat16().argmax()] == [1, 0]
    hits = torch.ones(257).bfloat16()
    assert [hits.sum(), hits.float().sum()] == [256, 257]


def test_an_evaluation_in_the_block_of_training_uses_old_weights():
    """AMP0147."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert model(x) == 1
    assert model(x) == 0.5
