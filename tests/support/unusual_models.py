"""Models with what plain layers lack: flex_attention, own ops, experts, a scan, int8 weights, LoRA.

Each entry of `MODELS` builds (model, args); libraries are imported when it is built.
"""

import functools
import importlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WIDTH = 32


class FlexAttention(nn.Module):
    """Causal by a mask in blocks, or with scores that fall with the distance."""

    def __init__(self, has_block_mask, heads=2):
        super().__init__()
        self.heads, self.has_block_mask = heads, has_block_mask
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):  # (B, T, WIDTH)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        if self.has_block_mask:
            mask = create_block_mask(_is_causal, None, None, x.shape[1], x.shape[1], x.device)
            attended = flex_attention(q, k, v, block_mask=mask)
        else:
            attended = flex_attention(q, k, v, score_mod=_with_distance)
        return self.out(attended.transpose(1, 2).flatten(2))


def _is_causal(b, h, query, key):
    return query >= key


def _with_distance(score, b, h, query, key):
    return score - 0.1 * (query - key)


@torch.library.custom_op("amp_lab_tests::scaled_product", mutates_args=())
def scaled_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return 0.5 * (x @ weight.to(x.dtype).mT)


@scaled_product.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _scaled_product_backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    of_weight = 0.5 * (gradient.flatten(0, -2).mT @ x.flatten(0, -2))
    return 0.5 * (gradient @ weight.to(x.dtype)), of_weight.to(weight.dtype)


scaled_product.register_autograd(_scaled_product_backward, setup_context=_save)


@torch.library.custom_op("amp_lab_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0).square()


without_fake.register_autograd(
    lambda ctx, gradient: 2 * ctx.saved_tensors[0].clamp(min=0) * gradient, setup_context=_save
)


class OwnOp(nn.Module):
    """A linear layer, an op of its own, and another linear layer."""

    def __init__(self, has_fake):
        super().__init__()
        self.has_fake = has_fake
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if has_fake:
            self.weight = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        x = self.before(x)
        x = scaled_product(x, self.weight) if self.has_fake else without_fake(x)
        return self.after(x)


class Experts(nn.Module):
    """A router that picks two of four experts for each token, each a loop's turn or a group."""

    def __init__(self, is_grouped, experts=4, top=2):
        super().__init__()
        self.is_grouped, self.top = is_grouped, top
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(0.2 * torch.randn(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.2 * torch.randn(experts, 2 * WIDTH, WIDTH))

    def forward(self, x):  # (B, T, WIDTH)
        tokens = x.flatten(0, -2)
        shares, chosen = self.router(tokens).softmax(-1).topk(self.top)
        mix = self._in_groups if self.is_grouped else self._one_by_one
        return mix(tokens, shares, chosen).view_as(x)

    def _one_by_one(self, tokens, shares, chosen):
        out = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, rows, (hidden * shares[rows, places, None]).to(out.dtype))
        return out

    def _in_groups(self, tokens, shares, chosen):
        order = chosen.flatten().argsort()
        counts = F.one_hot(chosen.flatten(), len(self.up)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        rows = order // self.top
        hidden = F.silu(F.grouped_mm(tokens[rows], self.up, offs=ends))
        hidden = F.grouped_mm(hidden, self.down, offs=ends)
        weighted = hidden * shares.flatten()[order, None].to(hidden.dtype)
        return torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, rows, weighted)


class StateSpace(nn.Module):
    """A selective scan, in a loop or by cumsum; its states may be complex."""

    def __init__(self, scan, states=4):
        super().__init__()
        self.scan, self.states = scan, states
        self.project = nn.Linear(WIDTH, 2 * WIDTH + 2 * states)
        self.decay = nn.Parameter(torch.rand(WIDTH, states))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):  # (B, T, WIDTH)
        sizes = (WIDTH, WIDTH, self.states, self.states)
        step, value, into, out_of = self.project(x).split(sizes, -1)
        logs = -F.softplus(step)[..., None] * self.decay  # (B, T, WIDTH, states)
        given = value[..., None] * into[..., None, :]
        if self.scan == "cumsum":
            total = logs.cumsum(1)
            states = total.exp() * (given * (-total).exp()).cumsum(1)
        else:
            if self.scan == "complex":
                logs = torch.complex(logs.float(), self.decay.expand_as(logs))
            state, found = torch.zeros_like(logs[:, 0]), []
            for t in range(x.shape[1]):
                state = logs[:, t].exp() * state + given[:, t]
                found.append(state)
            states = torch.stack(found, 1)
        mixed = (states * out_of[..., None, :]).sum(-1)
        return self.out(mixed.real if mixed.is_complex() else mixed)


def _sequence():
    return (torch.randn(2, 16, WIDTH),)


def _with_sequence(build, *arguments):
    return build(*arguments), _sequence()


def quantized(config):
    """By torchao: `config` is the name of one of its configs."""
    quantization = importlib.import_module("torchao.quantization")
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)).eval()
    quantization.quantize_(model, getattr(quantization, config)())
    return model, _sequence()


def lora():
    """Adapters on a Llama of two layers."""
    peft = importlib.import_module("peft")
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    base = transformers.LlamaForCausalLM(config)
    adapted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(base, adapted), (torch.randint(64, (2, 16)),)


MODELS = {
    "flex_attention": functools.partial(_with_sequence, FlexAttention, False),
    "flex_attention, block mask": functools.partial(_with_sequence, FlexAttention, True),
    "own op": functools.partial(_with_sequence, OwnOp, True),
    "own op without fake": functools.partial(_with_sequence, OwnOp, False),
    "experts one by one": functools.partial(_with_sequence, Experts, False),
    "experts in groups": functools.partial(_with_sequence, Experts, True),
    "scan in a loop": functools.partial(_with_sequence, StateSpace, "loop"),
    "scan by cumsum": functools.partial(_with_sequence, StateSpace, "cumsum"),
    "scan of complex states": functools.partial(_with_sequence, StateSpace, "complex"),
    "torchao int8": functools.partial(quantized, "Int8WeightOnlyConfig"),
    "torchao float8": functools.partial(quantized, "Float8WeightOnlyConfig"),
    "peft lora": lora,
}
# They cannot be trained on a CPU.
FLEX = ["flex_attention", "flex_attention, block mask"]
# What fake tensors cannot run, and words of the line that says so.
REFUSED = {
    "own op without fake": "has no fake implementation: write a function",
}
LIBRARY_OF = {"torchao int8": "torchao", "torchao float8": "torchao", "peft lora": "peft"}
