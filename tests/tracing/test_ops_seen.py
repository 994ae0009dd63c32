"""ops_seen: storages, views, FLOPs and attention, against what torch itself says or computes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from amp_lab.core.tensors import storage_key, stored_values
from amp_lab.tracing.ops_seen import FLOP_FORMULAS, computes_nothing, flops

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


class Counted(TorchDispatchMode):
    """FLOPs by `flops`, op by op."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, out)
        return out


def counted(call):
    with Counted() as own:
        call()
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as torchs:
        call()
    assert own.total == torchs.get_total_flops()  # so that no two tools can disagree
    return own.total


def test_products_and_convolutions_count_what_they_multiply():
    a, b, batch = torch.ones(4, 5), torch.ones(5, 6), torch.ones(3, 4, 5)
    assert counted(lambda: a @ b) == 2 * 4 * 5 * 6
    assert counted(lambda: a @ b[:, 0]) == 2 * 4 * 5
    assert counted(lambda: a[0] @ b[:, 0]) == 2 * 5
    assert counted(lambda: torch.addmv(a[:, 0], a, a[0])) == 2 * 4 * 5
    assert counted(lambda: torch.addbmm(a @ a.mT, batch, batch.mT)) == 2 * 4 * (3 + 1) * 5 * 4
    images, weight = torch.ones(2, 4, 8, 8), torch.ones(6, 2, 3, 3)
    assert counted(lambda: F.conv2d(images, weight, groups=2)) == 2 * 2 * 36 * 6 * 2 * 9
    transposed = torch.ones(4, 6, 3, 3)
    assert counted(lambda: F.conv_transpose2d(images, transposed)) == 2 * 2 * 64 * 4 * 6 * 9
    assert counted(lambda: a.relu() + 1) == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_the_backward_pass_of_a_convolution_counts_the_groups(groups):
    images = torch.ones(2, 4, 8, 8, requires_grad=True)
    weight = torch.ones(6, 4 // groups, 3, 3, requires_grad=True)
    forward = counted(lambda: F.conv2d(images, weight, groups=groups))
    both = counted(lambda: F.conv2d(images, weight, groups=groups).sum().backward())
    assert both == 3 * forward


def test_views_and_unwritten_memory_compute_nothing():
    for op in (aten.view, aten.detach, aten.expand, aten.empty.memory_format, aten._unsafe_view):
        assert computes_nothing(getattr(op, "default", op))
    for op in (aten.add.Tensor, aten.clone.default, aten.add_.Tensor, aten.zeros.default):
        assert not computes_nothing(op)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_storage_is_known_by_each_tensor_on_it():
    with FakeTensorMode():
        fake = torch.ones(4, 4)
    for tensor in (torch.ones(4, 4), torch.ones(4, 4, device="meta"), fake):
        assert storage_key(tensor) == storage_key(tensor[1:].mT)
        assert storage_key(tensor) != storage_key(tensor.clone())
    for sparse in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert storage_key(sparse) == storage_key(stored_values(sparse))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch with oneDNN")
def test_a_tensor_of_onednn_has_no_storage():
    assert storage_key(torch.ones(3).to_mkldnn()) is None
