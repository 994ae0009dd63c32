"""torch_versions: each shim does what the newest torch does by itself."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from amp_lab.core import torch_versions


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_function_node_without_its_parents_is_as_is_said():
    node = Double.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        alone = bool(node.next_functions)
    except RuntimeError:
        alone = False
    assert alone != torch_versions.function_nodes_need_their_parents()


def test_the_option_is_one_of_ddp():
    import inspect

    (name,) = torch_versions.no_buffer_broadcast()
    assert name in inspect.signature(DistributedDataParallel).parameters


def test_optimizers_count_their_steps_on_the_cpu():
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter])
    with torch.device("meta"), torch_versions.step_counters_on_host():
        optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == "cpu"


def test_checkpointing_can_run_in_the_block():
    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
    with torch_versions.one_backward_pass():
        y.backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_the_fused_gru_cell_has_its_shapes():
    gates, state = torch.ones(3, 12, device="meta"), torch.ones(3, 4, device="meta")
    bias = torch.ones(12, device="meta")
    cell = torch.ops.aten._thnn_fused_gru_cell
    with torch_versions.fused_gru_on_fakes(), FakeTensorMode(allow_non_fake_inputs=True):
        new, workspace = cell(gates, gates, state, bias, bias)
        back = torch.ops.aten._thnn_fused_gru_cell_backward(new, workspace, True)
    assert (new.shape, workspace.shape) == ((3, 4), (3, 20))
    assert [tuple(t.shape) for t in back] == [(3, 12), (3, 12), (3, 4), (12,), (12,)]


def test_fakes_of_another_gpu_need_no_such_gpu(monkeypatch):
    """On a machine with CUDA, torch 2.11 alone would initialize XPU here, and fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch_versions.other_gpus_left_alone(), FakeTensorMode():
        assert torch.ones(2, device="xpu").device.type == "xpu"
