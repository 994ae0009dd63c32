"""The benchmark's parts at toy size: that it computes, counts, judges and reports what it says."""

import copy
import dataclasses
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_lab.bench import (
    NAMES,
    RUNGS,
    Ceilings,
    PeerRow,
    Results,
    Row,
    classifier_workload,
    compare_results,
    convmodel_workload,
    count_step,
    gpt_workload,
    load_results,
    make_step,
    product_workload,
    rungs_of,
    runner,
    workloads,
)
from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import BLOCK, FusedStep
from amp_lab.bench.rungs import COMPILED, use_fp8
from amp_lab.bench.workloads import Problem, Workload
from amp_lab.errors import OptionError
from amp_lab.precision import Precision

CPU = torch.device("cpu")
CHEAP = ["channels-last", "fused-adam"]  # rungs that compile nothing
SIZE = 70  # 4,900 pixels: a block and a part of one
TINY = [
    convmodel_workload(8, hidden=8),
    convmodel_workload(8, hidden=8, kind="inference"),
    classifier_workload("squeezenet1_1", 2, 32),
    gpt_workload(2, 8, width=16, blocks=1, vocabulary=32),
    product_workload(16, 16, 16),
]


def autograd_step(model, inputs, target, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = F.mse_loss(model(inputs), target)
    loss.backward()
    return loss.detach()


# --- The step written by hand.


@pytest.mark.parametrize(
    # fp32: another order of summation. bf16: both round each layer to 2^-8, in their own places.
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)],
)
def test_step_by_hand_has_the_gradients_of_autograd(dtype, tolerance):
    assert BLOCK < SIZE**2 < 2 * BLOCK
    torch.manual_seed(0)
    model = ConvModel(32)
    for norm in list(model)[1::3]:  # else scale and shift would be 1 and 0
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    reference = copy.deepcopy(model)
    inputs, target = quantized_sine(SIZE)
    loss = FusedStep(model, dtype, compiled=False)(inputs, target)
    torch.testing.assert_close(
        loss, autograd_step(reference, inputs, target, dtype), rtol=tolerance, atol=0
    )
    before_norm = {f"{i}.bias" for i in (0, 3, 6)}
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name in before_norm:  # zero, but for the rounding of autograd
            assert not mine.grad.any()
            assert its.grad.norm() < 1e-2 * reference[9].weight.grad.norm()
            continue
        off = (mine.grad - its.grad).norm() / its.grad.norm()
        assert off < tolerance, name
    for (name, mine), its in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance, msg=name)


def test_step_by_hand_trains_like_autograd():
    torch.manual_seed(0)
    model = ConvModel(16)
    reference = copy.deepcopy(model)
    inputs, target = quantized_sine(16)
    step = FusedStep(model, torch.float32, compiled=False)
    mine, its = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, reference))
    losses = []
    for _ in range(5):
        its.zero_grad()
        losses.append((step(inputs, target), autograd_step(reference, inputs, target, None)))
        mine.step()
        its.step()
    first, last = losses[0], losses[-1]
    assert last[0] < 0.9 * first[0]
    torch.testing.assert_close(*last, rtol=1e-4, atol=0)


def test_compiled_step_by_hand_computes_the_same():
    torch.manual_seed(0)
    model = ConvModel(8)
    inputs, target = quantized_sine(16)
    losses, gradients = [], []
    for compiled in (False, True):
        own = copy.deepcopy(model)
        losses.append(FusedStep(own, torch.bfloat16, compiled=compiled)(inputs, target))
        gradients.append([p.grad for p in own.parameters()])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    for plain, compiled in zip(*gradients, strict=True):  # an element may round to the next bf16
        torch.testing.assert_close(plain, compiled, rtol=2e-2, atol=1e-4)


# --- Workloads and rungs.


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workloads_have_every_name(device, quick):
    found = workloads(device, quick=quick)
    assert {w.name for w in found} == set(NAMES) - ({"resnet50"} if quick else set())
    assert len({(w.name, w.size) for w in found}) == len(found)


def test_sizes_of_the_article_on_an_accelerator():
    assert "512x512" in workloads("cuda", quick=False)[0].size


def test_rungs_are_those_of_device_and_workload():
    training, inference, _, gpt, product = TINY
    cuda = torch.device("cuda")
    assert rungs_of(training, Precision.BF16, CPU) == [
        "eager", "channels-last", "fused-adam", "compile", "max-autotune", "by-hand"
    ]  # fmt: skip
    assert rungs_of(gpt, Precision.FP16, cuda) == [
        "eager", "fused-adam", "no-sync", "compile", "cuda-graphs", "max-autotune"
    ]  # fmt: skip
    assert "cast-once" in rungs_of(inference, Precision.BF16, CPU)
    assert "cast-once" not in rungs_of(inference, Precision.FP32, CPU)
    assert "by-hand" not in rungs_of(training, Precision.FP16, cuda)  # its gradients vanish
    assert rungs_of(product, Precision.FP16, cuda) == ["eager"]


@pytest.mark.parametrize("workload", TINY, ids=lambda w: w.name)
def test_every_rung_computes_what_fp32_eager_does(workload):
    reference = None
    for precision in (Precision.FP32, Precision.BF16):
        for rung in rungs_of(workload, precision, CPU):
            if rung in COMPILED or rung == "by-hand":  # those are slow to compile, and have theirs
                continue
            step = make_step(workload, precision, rung, CPU)
            calls = runner.CHECKED_STEPS if workload.kind == "training" else 1
            check = torch.stack([step.call().double() for _ in range(calls)])
            row = Row("w", "s", str(precision), rung, "ok")
            made = runner._Configuration(row, precision, step, check)
            reference = reference or made
            runner._judge(row, check, reference, precision, workload.kind == "training")
            assert row.status == "ok", row.reason
            if workload.kind == "training":
                assert check[-1] < check[0]


def test_fp8_is_a_rung_where_the_hardware_has_it(monkeypatch):
    gpt, cuda = TINY[3], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, there in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert ("fp8" in rungs_of(gpt, Precision.BF16, cuda)) is there
    assert "fp8" not in rungs_of(gpt, Precision.FP16, cuda)
    assert "fp8" not in rungs_of(TINY[0], Precision.BF16, cuda)
    assert "fp8" not in rungs_of(gpt, Precision.BF16, CPU)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of torchao's own source
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_linear_layers_in_fp8_learn_the_same():
    pytest.importorskip("torchao.float8")
    losses = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        problem = gpt_workload(2, 16, width=32, blocks=1, vocabulary=64).build(CPU)
        problem.model.extra = nn.Linear(15, 16)
        if fp8:
            use_fp8(problem.model, emulate=True)
            assert type(problem.model.head) is not nn.Linear
            assert type(problem.model.extra) is nn.Linear  # 15 is no multiple of 16
        optimizer = torch.optim.Adam(problem.model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(runner.CHECKED_STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = problem.loss_fn(problem.model(problem.inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    bf16, fp8 = map(torch.tensor, losses)
    assert 0 < (fp8 - bf16).norm() / bf16.norm() < runner.TOLERANCES[Precision.BF16]


def test_without_torchao_fp8_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(OptionError, match="float8 needs torchao"):
        use_fp8(nn.Linear(16, 16))


def test_dropout_is_off():
    problem = classifier_workload("mobilenet_v2", 1, 32).build(CPU)
    assert [m.p for m in problem.model.modules() if isinstance(m, nn.Dropout)] == [0.0]


# --- Counting.


def test_count_of_a_linear_layer():
    model, inputs = nn.Linear(8, 4, bias=False), torch.randn(16, 8)
    count = count_step(lambda: model(inputs), model, inputs, training=False)
    assert count.flops == 2 * 16 * 8 * 4
    assert count.moved_bytes == 4 * (16 * 8 + 8 * 4 + 16 * 4)
    assert count.least_bytes == 4 * (16 * 8 + 8 * 4)
    step = lambda: model(inputs).sum().backward()  # noqa: E731
    trained = count_step(step, model, inputs, training=True)
    assert trained.flops == 2 * count.flops  # the input needs no gradient
    assert trained.least_bytes == 4 * (16 * 8 + 6 * 8 * 4)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_count_of_a_grouped_convolution(groups):
    """Forward, gradient of the input and gradient of the weight take the same."""
    model = nn.Conv2d(8, 16, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 8, 5, 5, requires_grad=True)
    step = lambda: model(images).sum().backward()  # noqa: E731
    forward = 2 * 2 * 16 * 5 * 5 * (8 // groups) * 3 * 3
    assert count_step(step, model, images, training=True).flops == 3 * forward


def test_a_view_moves_nothing():
    x = torch.randn(4, 4)
    assert count_step(lambda: x.T.reshape(-1, 2).T, nn.ReLU(), x, training=False).moved_bytes == (
        2 * 64  # the transposed copy is read and written, the views are not
    )


def ceilings(**changes):
    given = {
        "flops_per_s": {"fp32": 100.0, "tf32": None, "fp16": 100.0, "bf16": 400.0},
        "stream_bytes_per_s": {64: 10.0, 1024: 20.0, 4096: 5.0},
        "trusted": True,
    }
    return Ceilings(**given | changes)


@pytest.mark.parametrize(("nbytes", "rate"), [(8, 20), (64, 20), (2000, 20), (4096, 5), (9999, 5)])
def test_what_fits_in_a_cache_may_be_copied_faster(nbytes, rate):
    assert ceilings().stream_rate(nbytes) == rate


def test_floor_is_the_longer_of_work_and_traffic():
    from amp_lab.bench import Count

    assert Count(1000, 0, 40).floor_s(ceilings(), "fp32") == 10
    assert Count(1000, 0, 4096).floor_s(ceilings(), "fp32") == 4096 / 5
    assert Count(1000, 0, 40).floor_s(ceilings(), "tf32") is None


# --- The run.


@pytest.fixture
def toy(monkeypatch):
    """`run_bench` on tiny workloads, without what compiles, and with limits that are not timed."""

    class Report:
        name, backend, trusted = "a toy", "CPU", True
        rates = dict.fromkeys(Precision, 100.0) | {Precision.TF32: None}
        accelerated = (Precision.BF16,)

    chosen = [TINY[0], TINY[4]]
    high = {
        "flops_per_s": {"fp32": 1e15, "tf32": None, "fp16": 1e15, "bf16": 4e15},
        "stream_bytes_per_s": {64: 1e18},
    }
    monkeypatch.setattr(runner, "workloads", lambda device, quick: chosen)
    monkeypatch.setattr(runner, "describe_device", lambda device: Report)
    monkeypatch.setattr(runner, "measure_ceilings", lambda device: ceilings(**high))
    monkeypatch.setattr(runner, "_TURN_S", 0.0)
    monkeypatch.setattr(runner, "_QUICK_TURN_S", 0.0)

    def run(**settings):
        return runner.run_bench(CPU, **{"rounds": 2, "rungs": CHEAP} | settings)

    run.workloads = chosen
    return run


def test_run_times_each_configuration_against_fp32_eager(toy):
    results = toy()
    assert results.complete
    assert [row.key[2:] for row in results.rows] == [
        ("fp32", "eager"), ("fp32", "channels-last"), ("fp32", "fused-adam"),
        ("bf16", "eager"), ("bf16", "channels-last"), ("bf16", "fused-adam"),
        ("fp32", "eager"), ("bf16", "eager"),
    ]  # fmt: skip
    for row in results.rows:
        assert row.status == "ok"
        assert len(row.samples_s) == 2
        base = next(r for r in results.rows if r.key == (*row.key[:2], "fp32", "eager"))
        assert row.speedup == base.median_s / row.median_s
        assert row.flops == base.flops
        assert row.share_of_limit == row.floor_s / row.median_s
        assert row.items_per_s == 1 / row.median_s
    training, product = results.rows[0], results.rows[-2]
    assert training.floor_s == training.flops / 1e15  # the work takes longer than the bytes
    assert results.rows[3].floor_s == training.flops / 4e15
    assert product.flops == 2 * 16**3
    assert "1.00x" in str(results)


def test_settings_choose(toy):
    rows = toy(names=["product"], precisions=["fp16"], rungs=["eager"]).rows
    assert [(row.workload, row.precision) for row in rows] == [
        ("product", "fp32"), ("product", "fp16")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": ["resnet"]}, r"no workload is called 'resnet'; there are convmodel, "),
        ({"precisions": ["fp8"]}, r"no precision is called 'fp8'; there are fp32, "),
        ({"precisions": ["tf32"]}, r"precision 'tf32': a toy has none"),
        ({"rounds": 0}, r"rounds=0: must be at least 1"),
        ({"names": ["gpt"]}, "workload 'gpt' is not on this device"),
        ({"names": ["gpt"], "quick": True}, "workload 'gpt' is not in a quick run on this device"),
        ({"rungs": ["cuda-graphs"]}, "rung 'cuda-graphs': none of these workloads has it on this"),
    ],
)
def test_wrong_settings_are_refused(toy, settings, message):
    with pytest.raises(OptionError, match=message):
        toy(**settings)


def test_wrong_rung_is_refused():
    with pytest.raises(OptionError, match="no rung is called 'fast'; there are eager, "):
        runner.run_bench(CPU, rungs=["fast"])


def spoil(monkeypatch, change):
    """Change the step of the rung ``fused-adam`` in bf16."""
    make = runner.make_step

    def spoiled(workload, precision, rung, device):
        step = make(workload, precision, rung, device)
        if (precision, rung) == (Precision.BF16, "fused-adam"):
            change(step)
        return step

    monkeypatch.setattr(runner, "make_step", spoiled)


def no_training(step):
    call, start = step.call, copy.deepcopy(step.model.state_dict())

    def stands_still():
        step.model.load_state_dict(start)
        return call()

    step.call = stands_still


def other_mode(step):
    step.model.eval()


def not_a_number(step):
    with torch.no_grad():
        step.model[0].weight.fill_(torch.nan)


@pytest.mark.parametrize("change", [no_training, other_mode, not_a_number])
def test_a_rung_that_computes_something_else_has_failed(toy, monkeypatch, change):
    toy.workloads[0] = convmodel_workload(32, hidden=64)  # enough that five steps learn something
    spoil(monkeypatch, change)
    rows = toy(names=["convmodel"]).rows
    assert [row.status for row in rows] == ["ok"] * 5 + ["failed"]
    assert "would pass" in rows[-1].reason
    assert rows[-1].samples_s == []
    assert "would pass" in str(Results({"device": "d", "torch": "t", "threads": 1, "date": "x"},
                                           {}, {"64": 1.0}, True, rows))  # fmt: skip


def test_a_rung_that_raises_has_failed_and_the_run_goes_on(toy, monkeypatch):
    def raises(step):
        def call():
            raise RuntimeError("no kernel for that\nand a long story")

        step.call = call

    spoil(monkeypatch, raises)
    rows = toy().rows
    assert (rows[5].status, rows[5].reason) == ("failed", "no kernel for that")
    assert rows[-1].status == "ok"


def test_a_precision_that_the_hardware_lacks_is_told_and_left_alone(toy, monkeypatch):
    monkeypatch.setattr(runner, "_is_hopeless", lambda made, ground: made.precision == "bf16")
    rows = toy(names=["convmodel"]).rows
    assert [(row.precision, row.status) for row in rows] == [("fp32", "ok")] * 3 + [
        ("bf16", "not run")
    ]
    assert "times as long as in fp32" in rows[-1].reason


@pytest.mark.parametrize(
    ("check", "precision", "reason"),
    [
        ([4.0, 3.0], "bf16", ""),
        ([4.2, 3.2], "bf16", ""),
        ([4.0, 3.3], "bf16", ""),
        ([4.0, 3.4], "bf16", "its loss falls by 60% of what it does in fp32"),
        ([4.0, 2.6], "bf16", "its loss falls by 140%"),
        ([4.3, 3.3], "bf16", "7.5e-02 off fp32, where 6e-02 would pass"),
        ([4.0, 3.1], "fp32", "its loss falls by 90%"),
        ([4.01, 3.01], "fp32", "2.5e-03 off fp32"),
        ([4.0, 4.0], "fp16", "its loss falls by 0%"),
        ([4.0, float("inf")], "fp16", "its loss falls by not a number"),
        ([float("nan"), 3.0], "bf16", "; not a number, where"),
    ],
)
def test_judgement(check, precision, reason):
    row = Row("w", "s", precision, "r", "ok")
    ground = runner._Configuration(None, None, None, torch.tensor([4.0, 3.0]))
    runner._judge(row, torch.tensor(check), ground, Precision(precision), training=True)
    assert row.status == ("failed" if reason else "ok")
    assert reason in row.reason


def test_no_row_is_faster_than_the_limit(toy, monkeypatch):
    """Limits that turn out too low, of arithmetic or of bytes, are raised to what was reached."""
    monkeypatch.setattr(runner, "measure_ceilings", lambda device: ceilings())
    results = toy(precisions=["bf16"])
    product = results.rows[-1]
    assert results.flops_per_s["bf16"] == product.flops / min(product.samples_s)
    fastest = max(product.flops / results.flops_per_s["bf16"], product.floor_s)
    assert product.floor_s == fastest
    assert product.share_of_limit <= 1
    others = [row for row in results.rows if row.workload != "product"]
    assert any(row.share_of_limit > 1 for row in others)  # in sight, not hidden


@pytest.mark.parametrize(
    ("seconds", "hopeless"), [(0.5, False), (1.9, False), (2.1, True), (42.0, True)]
)
def test_hopeless_is_twenty_times_as_long(seconds, hopeless):
    made, ground = (runner._Configuration(None, None, None, seconds=s) for s in (seconds, 0.1))
    assert runner._is_hopeless(made, ground) is hopeless


@pytest.mark.parametrize("by", ["allocator", "accelerator"])
def test_out_of_memory_is_reported_and_the_run_goes_on(toy, by):
    def build(device):
        if by == "accelerator":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return Problem(nn.Linear(1, 1), torch.empty(2**60), torch.sum, 1e-3)

    takes = frozenset({"channels-last"})
    toy.workloads[0] = Workload("convmodel", "huge", "training", "images", 1, build, takes)
    rows = toy().rows
    assert {row.status for row in rows if row.size == "huge"} == {"out of memory"}
    assert all(row.status == "ok" for row in rows if row.workload == "product")


def test_without_fp32_eager_nothing_is_judged(toy, monkeypatch):
    make = runner.make_step

    def no_room(workload, precision, rung, device):
        if (precision, rung) == (Precision.FP32, "eager"):
            raise torch.OutOfMemoryError("out of memory")
        return make(workload, precision, rung, device)

    monkeypatch.setattr(runner, "make_step", no_room)
    rows = toy(names=["convmodel"]).rows
    assert rows[0].status == "out of memory"
    assert {row.status for row in rows[1:]} == {"failed"}
    assert {row.reason for row in rows[1:]} == {"there is no fp32 eager to hold it against"}


def test_out_of_memory_while_timing_is_reported_too(toy, monkeypatch):
    time = runner._time

    def full(configuration, device, turn_s):
        if configuration.row.rung == "channels-last":
            raise torch.OutOfMemoryError("out of memory")
        time(configuration, device, turn_s)

    monkeypatch.setattr(runner, "_time", full)
    rows = toy().rows
    assert {row.status for row in rows if row.rung == "channels-last"} == {"out of memory"}
    assert all(len(row.samples_s) == 2 for row in rows if row.rung != "channels-last")


def test_an_interrupted_run_keeps_its_rows(toy, tmp_path):
    saved = []

    def after_round(results):
        results.save(tmp_path / "r.json")
        saved.append(len(results.rows))
        if len(saved) == 3:  # in the second workload
            raise KeyboardInterrupt

    results = toy(after_round=after_round)
    assert not results.complete
    assert [row.workload for row in results.rows] == ["convmodel"] * 6 + ["product"] * 2
    assert all(row.samples_s for row in results.rows)
    assert len(load_results(tmp_path / "r.json").rows) == 8
    assert "stopped before its end" in str(results)


# --- Results and their file.


def results_of(*rows, peers=(), **environment):
    made = [
        Row(*key, "ok", unit="images", items=2, samples_s=[0.5, 0.5], median_s=0.5, iqr_s=0.0,
            speedup=speedup, items_per_s=4.0, flops=100, flops_per_s=200.0, moved_bytes=50,
            bytes_per_s=100.0, least_bytes=10, floor_s=0.1, share_of_limit=0.2, error=0.0)
        for *key, speedup in rows
    ]  # fmt: skip
    about = {"device": "a toy", "torch": "2.15", "threads": 2, "date": "2026-01-01"} | environment
    return Results(about, {"fp32": 1e12, "bf16": 4e12}, {"64": 1e9}, True, made, list(peers))


EAGER = ("convmodel", "8x8", "fp32", "eager", 1.0)
COMPILED_BF16 = ("convmodel", "8x8", "bf16", "compile", 3.5)


def test_results_survive_their_file(tmp_path):
    path = tmp_path / "r.json"
    mine = results_of(
        EAGER,
        COMPILED_BF16,
        peers=[PeerRow("keras", "net", "fp32", "ok", samples_s=[1.0], ratio=1.5)],
    )
    mine.save(path)
    assert load_results(path) == mine
    assert json.loads(path.read_text())["schema"] == "amp-lab bench 1"
    assert list(tmp_path.iterdir()) == [path]
    assert "net through keras in fp32: 1.50 of the time of a bare loop." in str(mine)


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(OptionError, match=r"r\.json: cannot be written \(No such file"):
        results_of(EAGER).save(tmp_path / "none" / "r.json")


def edited(change):
    content = json.loads(results_of(EAGER).to_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged, it is no JSON"),
        (results_of(EAGER).to_json()[:-40], "damaged, it is no JSON"),
        ("[1, 2]", "no results of amp-lab bench"),
        ('{"schema": "other"}', "no results of amp-lab bench"),
        (edited(lambda c: c.update(schema="amp-lab bench 7")), "written as 'amp-lab bench 7'"),
        (edited(lambda c: c.pop("rows")), "damaged, 'rows' is missing"),
        (edited(lambda c: c.pop("trusted")), "damaged, .*'trusted'"),
        (edited(lambda c: c.update(more=1)), "damaged, 'more' is no field"),
        (edited(lambda c: c["environment"].pop("torch")), "damaged, 'torch' is missing"),
        (edited(lambda c: c.update(stream_bytes_per_s={})), "damaged, 'stream_bytes_per_s' is {}"),
        (edited(lambda c: c["rows"][0].update(median_s="fast")), "damaged, 'median_s' is 'fast'"),
        (edited(lambda c: c["rows"][0].update(samples_s=[None])), "'samples_s' is"),
        (edited(lambda c: c["rows"].append(3)), "damaged, a row is 3"),
        (edited(lambda c: c["rows"][0].update(status="fine")), "damaged, 'status' is 'fine'"),
        (edited(lambda c: c["rows"][0].update(median_s=None)), "is ok, but has no time"),
        (edited(lambda c: c["rows"][0].pop("rung")), "damaged, .*'rung'"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=rf"r\.json: .*{message}"):
        load_results(path)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(OptionError, match=r"none\.json: cannot be read \(No such file"):
        load_results(tmp_path / "none.json")
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="damaged, it is no JSON"):
        load_results(tmp_path / "r.json")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Row)])
def test_every_field_of_a_row_is_checked(tmp_path, name):
    path = tmp_path / "r.json"
    path.write_text(edited(lambda c: c["rows"][0].update({name: {"a": 1}})))
    with pytest.raises(OptionError, match=f"'{name}' is "):
        load_results(path)


def test_comparison_shows_what_all_have():
    other = results_of(
        (*COMPILED_BF16[:4], 5.0), EAGER, ("gpt", "2", "fp32", "eager", 1.0), device="b"
    )
    compared = compare_results([results_of(EAGER, COMPILED_BF16), other], ["mine", "theirs"])
    assert [key[2:] for key in compared.common()] == [("fp32", "eager"), ("bf16", "compile")]
    assert compared.best_speedups() == {
        "mine": {"convmodel 8x8": 3.5}, "theirs": {"convmodel 8x8": 5.0}
    }  # fmt: skip
    assert "3.50x" in str(compared)
    assert "5.00x" in str(compared)
    assert "gpt" not in str(compared)
    assert json.loads(compared.to_json())["rows"][1]["speedup"] == [3.5, 5.0]


def test_comparison_of_what_has_nothing_in_common_is_refused():
    one, other = results_of(EAGER), results_of(("convmodel", "9x9", "fp32", "eager", 1.0))
    with pytest.raises(OptionError, match="mine, theirs have nothing in common"):
        compare_results([one, other], ["mine", "theirs"])


def test_a_row_that_failed_is_no_common_ground():
    failed = results_of(EAGER)
    failed.rows[0].status = "failed"
    with pytest.raises(OptionError, match="nothing in common"):
        compare_results([results_of(EAGER), failed], ["a", "b"])


def test_rungs_are_described():
    assert all(RUNGS.values())
