"""What notebook 17 says: of LoRA, held against peft; of models, against a small Llama."""

import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from definitions import definitions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from course.language_model import loss_of, train

CPU = torch.device("cpu")
SOURCE = Path(__file__).parents[2] / "notebooks" / "17_language_model.py"
PLACE = "base_model.model.0.lora_{}.default.weight"


def both(base):
    """The notebook's LoRA and peft's on a linear layer, with the same numbers."""
    peft = pytest.importorskip("peft")
    lora = definitions(SOURCE, device=torch.device("cpu"))["LoRA"]
    torch.manual_seed(0)
    ours = lora(base, rank=4, alpha=8)
    with torch.no_grad():
        ours.up.normal_()
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"])
    theirs = peft.get_peft_model(nn.Sequential(base), settings)
    state = {PLACE.format("A"): ours.down, PLACE.format("B"): ours.up}
    assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    return ours, theirs


@pytest.mark.slow
def test_lora_is_that_of_peft():
    base = nn.Linear(24, 16)
    ours, theirs = both(base)
    x = torch.randn(32, 24)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-6, atol=1e-5)
    weight = base.weight.clone()
    merged = theirs.merge_and_unload()[0].weight
    torch.testing.assert_close(merged, weight + ours.update(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lora_returns_has_the_dtype_that_pefts_has(autocast, dtype):
    ours, theirs = both(nn.Linear(24, 16).bfloat16())
    x = torch.randn(2, 24).to(dtype if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert ours(x).dtype == theirs(x).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("safe", [False, True])
def test_peft_merges_with_one_rounding_and_safely_with_two(safe):
    base = nn.Linear(64, 64).bfloat16()
    weight = base.weight.detach().clone()
    ours, theirs = both(base)
    update = ours.update()
    once = (weight.float() + update).bfloat16()
    twice = weight + update.bfloat16()
    assert not torch.equal(once, twice)
    merged = theirs.merge_and_unload(safe_merge=safe)[0].weight
    assert torch.equal(merged, twice if safe else once)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_peft_keeps_adapters_in_fp32_unless_told_otherwise(kept, dtype):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    settings = peft.LoraConfig(r=4, target_modules=["0"])
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=kept)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


TOKENS = torch.arange(8)[None]


@pytest.mark.slow
def test_the_cache_of_a_llama_is_fp32_under_autocast_and_bf16_in_a_cast_model(llama):
    def dtypes(model):
        with torch.no_grad():
            layer = model(TOKENS, use_cache=True).past_key_values.layers[0]
        return {layer.keys.dtype, layer.values.dtype}

    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes(llama) == {torch.float32}
    assert dtypes(llama.bfloat16()) == {torch.bfloat16}


@pytest.mark.slow
def test_a_cast_llama_loses_its_rates_and_a_loaded_one_keeps_them(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    loaded = type(llama).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype is torch.bfloat16
    assert loaded.model.rotary_emb.inv_freq.dtype is torch.float32
    assert llama.bfloat16().model.rotary_emb.inv_freq.dtype is torch.bfloat16


@pytest.mark.parametrize("kept", [True, False])
def test_the_tensors_of_the_size_of_the_logits_at_the_peak_of_the_loss(kept):
    """Those that the page names: the output in bf16 if it is kept, and three in fp32."""
    watch = definitions(SOURCE.parent / "06_caltech256_resnet50.py", device=CPU)["LiveTensors"]
    tokens, words = 64, 5000
    with FakeTensorMode(), watch() as live:
        hidden = torch.zeros(1, tokens, 2, requires_grad=True)
        weight = torch.zeros(words, 2, requires_grad=True)
        targets = torch.zeros(1, tokens, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(hidden, weight)
            loss = loss_of(logits, targets)
        if not kept:
            del logits
        loss.backward()
    large = Counter(dtype for _, dtype, size in live.peak if size >= 2 * tokens * words)
    assert large[torch.bfloat16] == kept
    assert large[torch.float32] == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_reentrant_checkpoint_gives_a_part_with_frozen_inputs_no_gradients(reentrant):
    adapter = nn.Linear(2, 2)
    frozen = torch.ones(1, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        output = checkpoint(adapter, frozen, use_reentrant=reentrant)
    assert output.requires_grad == (not reentrant)
    assert any("Gradients will be None" in str(one.message) for one in told) == reentrant


@pytest.mark.weekly
def test_a_run_of_the_full_scale_ends_with_the_scale_that_it_began_with():
    """Any other scale means a skipped step to its assertion; one grows after 2000 good steps."""
    data = torch.zeros(80, dtype=torch.int64)
    steps, _ = definitions(SOURCE, ["SIZES"], device=CPU)["SIZES"]["full"]
    assert steps >= 2000
    train(nn.Embedding(1, 1), torch.float16, data, seed=0, steps=steps, batch=1)


def test_only_the_cosines_of_a_rotation_may_be_bf16():
    rates = 10_000 ** (-torch.arange(0, 64, 2) / 64)
    positions = torch.arange(4096.0)[:, None]
    exact = (positions * rates).cos()

    def off(cosines):
        return (cosines - exact).abs().max()

    assert off(exact.bfloat16().float()) < 2**-8
    assert off((positions * rates.bfloat16().float()).cos()) > 1
    assert off((positions.bfloat16().float() * rates).cos()) > 1


def test_a_kernel_that_is_selected_raises_if_it_cannot_run_and_warns_why():
    q = torch.randn(1, 2, 8, 16)
    narrow = torch.randn(1, 2, 8, 12)  # v with another head size than q and k
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        warnings.catch_warnings(record=True) as reasons,
    ):
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(q, q, narrow)
    assert any("same last dimension" in str(reason.message) for reason in reasons)


def test_a_loss_in_chunks_keeps_no_logits_between_the_passes():
    chunked_loss = definitions(SOURCE, device=CPU)["chunked_loss"]
    hidden, weight = torch.randn(64, 4), torch.randn(500, 4, requires_grad=True)
    targets = torch.randint(500, (64,))
    kept = []

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.cross_entropy(F.linear(hidden, weight), targets)
        direct, kept = max(kept), []
        chunked_loss(hidden, weight, targets, chunks=4)
    assert direct >= 64 * 500
    assert max(kept) <= weight.numel()


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="comes with torch 2.13")
def test_linear_cross_entropy_with_options_ignores_autocast_and_returns_bf16_for_bf16():
    options = nn.LinearCrossEntropyOptions()
    hidden, weight, words = torch.randn(64, 8), torch.randn(90, 8), torch.randint(90, (64,))
    plain = F.linear_cross_entropy(hidden, weight, words, options=options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = F.linear_cross_entropy(hidden, weight, words, options=options)
    assert torch.equal(plain, again)
    halves = hidden.bfloat16(), weight.bfloat16()
    assert F.linear_cross_entropy(*halves, words, options=options).dtype is torch.bfloat16


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="comes with torch 2.13")
def test_linear_cross_entropy_keeps_the_logits_unless_it_gets_options():
    """AMP0179."""
    hidden, weight = torch.randn(64, 4), torch.randn(500, 4, requires_grad=True)
    words, kept = torch.randint(500, (64,)), []

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.linear_cross_entropy(hidden, weight, words)
        plain, kept = max(kept), []
        F.linear_cross_entropy(hidden, weight, words, options=nn.LinearCrossEntropyOptions())
    assert plain >= 64 * 500
    assert max(kept, default=0) <= weight.numel()


def test_a_mask_in_other_16_bits_than_the_query_is_refused_and_a_boolean_one_is_taken():
    query = torch.randn(1, 1, 2, 4)
    mask = torch.zeros(2, 2, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float or"):
        attend(query, query, query, attn_mask=mask)
    for taken in (mask.bool().logical_not(), mask.to(query.dtype)):
        assert attend(query, query, query, attn_mask=taken).isfinite().all()
