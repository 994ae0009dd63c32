"""Notebook 11: its loops mark all they change, and are one loop; a run that differs is refused."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from definitions import check_marks, definitions
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, RandomSampler, TensorDataset

from course import scale_out

import build_pairs
from amp_lab.train.distributed import count_communication

SOURCE = build_pairs.FOLDER / "11_scale_out.py"
CPU = torch.device("cpu")
SETTINGS = ("SETUPS", "TOLERANCES")
TOY = {"width": 16, "heads": 2, "layers": 1, "batch": 8, "lr": 1e-3}


@functools.cache
def notebook() -> dict:
    """What the notebook's imports, functions and settings define; no other cell is run."""
    return definitions(SOURCE, SETTINGS)


@pytest.mark.parametrize(("name", "mark"), [("train_ddp", "DDP"), ("train_fsdp", "FSDP2")])
def test_every_changed_line_is_marked_and_nothing_else_changed(name, mark):
    check_marks(SOURCE, "train_plain", name, mark)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def toy_data() -> TensorDataset:
    images = torch.randn(32, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(32) % 10)


def test_the_ranks_share_out_the_permutation_that_one_process_draws():
    for seed in (0, 1):
        alone = list(RandomSampler(range(32), generator=torch.Generator().manual_seed(seed)))
        for rank in range(4):
            share = DistributedSampler(range(32), num_replicas=4, rank=rank, seed=seed)
            assert list(share) == alone[rank::4]
            assert list(share) == alone[rank::4]  # the next epoch draws the same
            share.set_epoch(1)
            assert list(share) != alone[rank::4]


def test_a_batch_norm_that_sees_a_part_of_the_batch_has_another_loss():
    torch.manual_seed(0)
    batch, targets, layer = torch.randn(8, 2), torch.randn(8, 2), torch.nn.Linear(2, 2)

    def losses(model):
        parts = zip(batch.chunk(4), targets.chunk(4), strict=True)
        of_parts = [torch.nn.functional.mse_loss(model(x), y) for x, y in parts]
        return sum(of_parts) / 4, torch.nn.functional.mse_loss(model(batch), targets)

    torch.testing.assert_close(*losses(layer))
    of_parts, of_all = losses(torch.nn.Sequential(layer, torch.nn.BatchNorm1d(2)))
    assert abs(of_parts / of_all - 1) > 0.01


@pytest.mark.usefixtures("one_rank", "one_thread_and_seed")
def test_on_one_rank_the_loops_are_the_plain_one(toy_data):
    cells = notebook()
    for dtype in (None, torch.bfloat16):
        plain, _ = cells["train_plain"](TOY, toy_data, dtype, CPU)
        assert len(plain) == 4
        assert len(set(plain)) == 4
        assert cells["train_ddp"](TOY, toy_data, dtype, CPU)[0] == plain
        found, _ = cells["train_fsdp"](TOY, toy_data, dtype, CPU)
        tolerance = 1e-6 if dtype is None else cells["TOLERANCES"]["bf16"]
        assert found == pytest.approx(plain, rel=tolerance)


@pytest.mark.usefixtures("one_rank", "one_thread_and_seed")
@pytest.mark.parametrize("sums_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_gradients_are_summed_in_the_dtype_that_was_asked_for(toy_data, engine, sums_in):
    """On one rank FSDP2 copies, and DDP asks its backend all the same."""
    cells = notebook()
    train = {"DDP": cells["train_ddp"], "FSDP2": cells["train_fsdp"]}[engine]
    with count_communication() as sent:
        _, held = train(TOY, toy_data, torch.bfloat16, CPU, sums_in)
    reduced = {call.dtype for call in sent.calls if call.kind == "all_reduce" and call.elements > 1}
    assert reduced == ({sums_in} if engine == "DDP" else set())
    parameters = sum(p.numel() for p in scale_out.new_model(TOY).parameters())
    assert sum(held.values()) == 16 * parameters


@pytest.mark.usefixtures("one_rank")
def test_under_fsdp2_all_layers_compute_in_bf16_and_the_loss_gets_fp32(toy_data):
    model = scale_out.new_model(TOY)
    notebook()["shard"](model, torch.bfloat16, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    seen = set()
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    images, _ = toy_data[:4]
    assert model(images).dtype is torch.float32
    assert seen == {torch.bfloat16}


def test_the_shapes_of_the_model_are_multiples_of_eight():
    config = {"width": 64, "heads": 4, "layers": 2}
    assert all(n % 8 == 0 for p in scale_out.new_model(config).parameters() for n in p.shape)


def test_a_state_that_one_rank_alone_loads_mixes_two_scales():
    """As docs/several_machines.md says: too large on one rank, too small on the other."""
    loaded, fresh = 1024.0, torch.amp.GradScaler("cpu").get_scale()
    average = (loaded + fresh) / 2  # of a gradient that is 1 on both ranks
    assert average / loaded > 1 > average / fresh


def test_ddp_has_join_and_fsdp2_has_not():
    assert hasattr(DistributedDataParallel, "join")
    assert not hasattr(FSDPModule, "join")


@pytest.mark.parametrize(
    ("device_type", "gpus", "where", "counts"),
    [
        ("cpu", 0, "cpu", (1, 2, 4)),
        ("cpu", 8, "cpu", (1, 2, 4)),  # asked for with AMP_LAB_DEVICE
        ("cuda", 1, "cpu", (1, 2, 4)),
        ("cuda", 2, "cuda", (1, 2)),
        ("cuda", 3, "cuda", (1, 2)),
        ("cuda", 8, "cuda", (1, 2, 4)),
        ("mps", 1, "cpu", (1, 2, 4)),
    ],
)
def test_processes_run_on_gpus_if_there_is_one_for_each(
    device_type, gpus, where, counts, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    names = ("gpus", "where", "counts")
    namespace = definitions(SOURCE, names, device=torch.device(device_type))
    assert (namespace["where"], namespace["counts"]) == (where, counts)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by_dcp", [True, False])
def test_a_new_optimizer_gets_its_moments_only_through_get_state_dict(tmp_path, by_dcp):
    """Its own `state_dict` is empty, and `dcp.load` fills nothing that is not there."""
    model = torch.nn.Linear(2, 1)
    saved = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    saved.zero_grad()
    new = torch.optim.Adam(model.parameters())
    if by_dcp:
        dcp.save({"optimizer": get_optimizer_state_dict(model, saved)}, checkpoint_id=tmp_path)
        state = {"optimizer": get_optimizer_state_dict(model, new)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(model, new, state["optimizer"])
        assert all(new.state[p]["exp_avg"].all() for p in model.parameters())
    else:
        dcp.save({"optimizer": saved.state_dict()}, checkpoint_id=tmp_path)
        state = {"optimizer": new.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        new.load_state_dict(state["optimizer"])
        assert not new.state


class Timed(torch.nn.Module):
    """Notes the dtype in which a time reaches it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, time):
        self.time_dtype = time.dtype
        return self.layer(x.to(self.layer.weight.dtype)) * time


class WithTimed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Timed()

    def forward(self, x, time):
        return self.part(x, time)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("model_casts", "reaches"), [(True, "bfloat16"), (False, "float32")])
def test_an_input_stays_fp32_only_if_no_module_on_its_way_casts_it(model_casts, reaches):
    model = WithTimed()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for module, casts in ((model.part, False), (model, model_casts)):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=casts)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model(torch.ones(2, 4), torch.ones(1))
    assert model.part.time_dtype is getattr(torch, reaches)
