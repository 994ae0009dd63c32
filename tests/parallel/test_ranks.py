"""Several processes that train one model: what they agree on, compute and send."""

import re
import time

import pytest
import torch
from rank_processes import values_of
from torch import nn
from torch.utils.data import DistributedSampler

from amp_lab.core.errors import DataError, OtherRankError, ParallelError, RunError
from amp_lab.core.precision import Precision
from amp_lab.models.build import build_model
from amp_lab.parallel.ranks import ALONE, require_same
from amp_lab.train.data import SampleSet, batches, load_dataset
from amp_lab.train.distributed.process_group import join
from amp_lab.train.loop import fit

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = ["ddp", "fsdp"]


def joined(kind: str | None, call, *arguments, **options):
    """What `call(ranks, …)` returns, in a process of `values_of` or alone."""
    with join(kind, CPU, timeout_s=30, **options) as ranks:
        return call(ranks, *arguments)


# What the ranks agree on


def exchange(ranks):
    return {
        "gathered": ranks.gather(f"rank {ranks.rank}"),
        "first": ranks.first(lambda: 10 + ranks.rank),
        "each": ranks.each(lambda: 10 + ranks.rank),
        "total": ranks.total(torch.tensor([1.0, ranks.rank])).tolist(),
    }


def test_they_gather_broadcast_and_sum():
    ended = values_of(joined, 3, "ddp", exchange)
    for rank, one in enumerate(ended):
        assert one == {
            "gathered": ["rank 0", "rank 1", "rank 2"],
            "first": 10,
            "each": 10 + rank,
            "total": [3.0, 3.0],
        }
    alone = joined(None, exchange)
    assert alone == {"gathered": ["rank 0"], "first": 10, "each": 10, "total": [1.0, 0.0]}


def fail_on(ranks, wrong: int):
    def call() -> None:
        if ranks.rank == wrong:
            raise RunError("no such thing")

    try:
        ranks.each(call)
    except (RunError, OtherRankError) as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_of_one_is_raised_by_all_and_told_by_it():
    ended = values_of(joined, 2, "ddp", fail_on, 1)
    assert ended[0] == ("OtherRankError", "rank 1: no such thing")
    assert ended[1] == ("RunError", "rank 1: no such thing")
    ended = values_of(joined, 2, "ddp", fail_on, 0)
    assert ended[0] == ("RunError", "no such thing")
    assert ended[1] == ("OtherRankError", "rank 0: no such thing")


def wait_for_a_slow_rank():
    """The error on each rank if rank 1 is slower than the timeout."""
    try:
        with join("ddp", CPU, timeout_s=2) as ranks:
            ranks.gather("ready")
            if ranks.rank == 1:
                time.sleep(6)
            ranks.gather("done")
    except ParallelError as error:
        return str(error)


def test_a_rank_waits_for_a_slow_one_at_most_the_timeout():
    first, _ = values_of(wait_for_a_slow_rank, 2)
    assert "rank 0: no answer from another process" in first


def settings_differ(ranks):
    ranks.first(lambda: require_same([{"seed": 1}] * ranks.size))
    found = ranks.gather({"seed": 1, "batch_size": 8 + ranks.rank})
    try:
        ranks.first(lambda: require_same(found))
    except (ParallelError, OtherRankError) as error:
        return str(error)


def test_different_settings_are_told_with_both_values():
    ended = values_of(joined, 2, "ddp", settings_differ)
    assert re.match("rank 1 .*batch size 9, but rank 0 .* 8", ended[0])


def say_numbers(ranks, numbers):
    return [ranks.largest_before(n if ranks.rank == 1 else 0) for n in numbers]


def test_a_number_of_one_reaches_all_a_step_later():
    ended = values_of(joined, 2, "ddp", say_numbers, [0, 15, 0, 2])
    assert ended == [[0, 0, 15, 0]] * 2
    assert [ALONE.largest_before(n) for n in (0, 15)] == [0, 15]


# The shares of the data


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_gets_what_distributed_sampler_gives(ranks):
    digits = load_dataset("digits", "unused").train
    size, seed = 32, 5
    whole = [targets for _, targets in batches(digits, size, seed=seed, drop_last=True)]
    order = torch.cat(whole)
    for rank in range(ranks):
        sampler = DistributedSampler(order, ranks, rank, shuffle=False, drop_last=True)
        expected = order[list(sampler)].split(size // ranks)
        share = batches(digits, size, seed=seed, drop_last=True, share=(rank, ranks))
        found = [targets for _, targets in share]
        assert len(found) == len(whole)
        assert all(map(torch.equal, found, expected))


class Numbers(SampleSet):
    """A data set whose images are their own numbers."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, keys: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(keys), 1), torch.tensor(keys)


@pytest.mark.parametrize(
    ("images", "size", "ranks"), [(9, 4, 4), (10, 4, 4), (7, 4, 2), (4, 8, 4), (5, 1, 2)]
)
def test_every_test_image_goes_to_one_rank_and_all_have_as_many_batches(images, size, ranks):
    shares = [
        [numbers.tolist() for _, numbers in batches(Numbers(images), size, share=(rank, ranks))]
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    assert all(numbers for share in shares for numbers in share)
    assert sorted(n for share in shares for numbers in share for n in numbers) == [*range(images)]


# The same training


class Block(nn.Module):
    """What FSDP2 gathers at a time."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x):  # (N, 12)
        return self.linear(self.norm(x)).relu()


class Small(nn.Module):
    """Layers of the kinds that blocks are made of, and no batch norm: it would see each share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x):  # (N, 12)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def some_batches(rank: int, size: int, count: int = 6, bad: int | None = None):
    """Batches of 8; if `bad` is given, the last image of that one is infinite."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        x = torch.randn(8, 12, generator=generator)
        y = torch.randint(5, (8,), generator=generator)
        if number == bad:
            x[7] = torch.inf
        yield x[rank::size], y[rank::size]


def train_small(ranks, precision="fp32", accumulate=1, clip_norm=None, bad=None):
    model = Small()
    trained = ranks.wrap(model, Precision(precision))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = Precision(precision).grad_scaler("cpu", init_scale=2.0**10)
    metrics = fit(
        trained,
        lambda epoch, batch: some_batches(ranks.rank, ranks.size, bad=bad),
        test_batches=lambda: some_batches(ranks.rank, ranks.size),
        optimizer=optimizer,
        precision=precision,
        device=CPU,
        epochs=2,
        scaler=scaler,
        accumulate=accumulate,
        clip_norm=clip_norm,
        ranks=ranks,
    )
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {
        "losses": [loss for m in metrics for loss in (m.train_loss, m.test_loss)],
        "accuracy": metrics[-1].test_accuracy,
        "scale": scaler.get_scale(),
        "weights": torch.cat([w.detach().flatten() for w in weights]),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.weekly)])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"clip_norm": 0.05}], ids=["plain", "accumulate", "clip"]
)
def test_it_computes_what_one_process_computes(kind, size, options):
    """In fp32, but for the order in which gradients are summed."""
    expected = joined(None, _with(options))
    for ended in values_of(joined, size, kind, _with(options)):
        torch.testing.assert_close(ended["losses"], expected["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(ended["weights"], expected["weights"], rtol=1e-3, atol=1e-5)
        assert ended["accuracy"] == expected["accuracy"]


class _with:
    """`train_small` with options, as something that can be pickled."""

    def __init__(self, options):
        self._options = options

    def __call__(self, ranks):
        return train_small(ranks, **self._options)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_the_losses_are_those_of_one_process_to_its_rounding(kind):
    expected = joined(None, _with({"precision": "bf16"}))
    ended = values_of(joined, 2, kind, _with({"precision": "bf16"}))
    assert ended[0]["losses"] == ended[1]["losses"]
    # bf16 has 8 bits: each of a few layers rounds by up to 2^-9, and FSDP2 rounds norms too.
    torch.testing.assert_close(ended[0]["losses"], expected["losses"], rtol=2**-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinity_of_one_rank_makes_all_skip_the_step(kind):
    options = _with({"precision": "fp16", "bad": 3})
    alone = joined(None, options)
    ended = values_of(joined, 2, kind, options)
    assert alone["scale"] == 2.0**8  # halved once in each of the two epochs
    for one in ended:
        assert one["scale"] == alone["scale"]
        assert one["weights"].isfinite().all()
        assert torch.equal(one["weights"], ended[0]["weights"])


def skips(ranks):
    """Whether a step is skipped if one number of one rank's shard is infinite."""
    model = nn.Linear(8, 8)
    trained = ranks.wrap(model, Precision("fp16"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = Precision("fp16").grad_scaler("cpu", init_scale=4.0)
    scaler.scale(trained(torch.ones(2, 8)).sum()).backward()
    if ranks.rank == 1:
        model.weight.grad.to_local()[0, 0] = torch.inf
    before = model.weight.to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(model.weight.to_local(), before)


def test_an_infinity_in_the_shard_of_one_rank_makes_all_skip_the_step():
    assert values_of(joined, 2, "fsdp", skips) == [(2.0, True)] * 2


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    "name",
    [
        "shufflenet_v2_x0_5",
        pytest.param("squeezenet1_1", marks=pytest.mark.weekly),
        pytest.param("mobilenet_v3_small", marks=pytest.mark.weekly),
    ],
)
def test_gradients_of_torchvisions_models_are_the_same_in_shards(name):
    """Some of their blocks return views, of which FSDP2 warns: a write into one would be lost."""
    (same,) = values_of(joined, 1, "fsdp", _gradients_are_the_same(name))
    assert same


class _gradients_are_the_same:
    def __init__(self, name):
        self._name = name

    def __call__(self, ranks):
        found = []
        for wrap in (False, True):
            torch.manual_seed(0)
            model = build_model(self._name, 10).eval()  # no dropout
            trained = ranks.wrap(model, Precision("fp32")) if wrap else model
            trained(torch.randn(2, 3, 64, 64)).square().sum().backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        plain, sharded = found
        return all(torch.equal(g, sharded[name].full_tensor()) for name, g in plain.items())


class NormedBlock(nn.Module):
    """A block with a batch norm, which notes the dtypes that it sees."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):  # (N, 4, H, W)
        x = self.conv(x)
        seen = {"conv": x.dtype, "norm weight": self.norm.weight.dtype}
        x = self.norm(x)
        return x, seen | {"norm": x.dtype}


class Normed(nn.Module):
    """A layer before such a block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList([NormedBlock()])

    def forward(self, x):  # (N, 1, H, W)
        x, self.seen = self.blocks[0](self.first(x))
        return x.mean((2, 3))


def dtypes_and_buffers(ranks):
    model = Normed()
    trained = ranks.wrap(model, Precision("bf16"))
    generator = torch.Generator().manual_seed(ranks.rank)
    out = trained(torch.randn(2, 1, 8, 8, generator=generator))
    out.sum().backward()
    norm = model.blocks[0].norm
    own = norm.running_mean.clone()
    ranks.share_buffers(model)
    return {
        "dtypes": {name: str(dtype) for name, dtype in (model.seen | {"out": out.dtype}).items()},
        "own": own,
        "shared": norm.running_mean,
        "kept": sum(p.to_local().numel() for p in model.parameters()),
        "gradient": str(model.first.weight.grad.dtype),
    }


def test_fsdp_casts_the_weights_but_not_batch_norm_and_shards_them():
    ended = values_of(joined, 2, "fsdp", dtypes_and_buffers)
    for one in ended:
        assert one["dtypes"] == {
            "conv": "torch.bfloat16",
            "norm weight": "torch.float32",
            "norm": "torch.bfloat16",
            "out": "torch.float32",
        }
        assert one["gradient"] == "torch.float32"
    whole = sum(p.numel() for p in Normed().parameters())
    assert [one["kept"] for one in ended] == [whole // 2] * 2


def test_the_statistics_of_batch_norm_are_each_ranks_own_until_they_are_shared():
    own, shared = zip(
        *((one["own"], one["shared"]) for one in values_of(
            joined, 2, "fsdp", dtypes_and_buffers
        )), strict=True
    )  # fmt: skip
    assert not torch.equal(own[0], own[1])
    assert torch.equal(shared[0], own[0])
    assert torch.equal(shared[1], own[0])


def test_more_ranks_than_samples_are_refused():
    with pytest.raises(DataError, match=r"3 samples .* 4 processes"):
        batches(Numbers(3), 8, share=(0, 4))
