"""What notebook 17 says: of LoRA, held against peft; of models, against a small Llama."""

import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from definitions import definitions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.slow
def test_a_model_of_ones_own_is_examined(llama, tmp_path):
    examine = definitions(SOURCE, device=torch.device("cpu"), END=65504)["examine"]
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight *= 1e9
    llama.bfloat16().save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    dtypes, over = examine(tmp_path)
    assert dtypes == {torch.bfloat16}
    assert over[0] == "model.layers.0.mlp.down_proj"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a shard is missing", "pickles alone", "nothing"])
def test_a_folder_without_whole_safetensors_is_refused(llama, tmp_path, what):
    examine = definitions(SOURCE, device=torch.device("cpu"), END=65504)["examine"]
    folder = tmp_path / "model"
    llama.save_pretrained(folder, max_shard_size="20kB")
    if what == "a shard is missing":
        next(folder.glob("*.safetensors")).unlink()
    elif what == "pickles alone":
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        torch.save(llama.state_dict(), folder / "pytorch_model.bin")
    else:
        shutil.rmtree(folder)
    with pytest.raises((OSError, ValueError)):
        examine(folder)


def test_at_the_peak_of_the_loss_four_tensors_of_its_size_are_alive():
    """Those of the page's table: the output in bf16, and in fp32 what the loss makes of it."""
    watch = definitions(SOURCE.parent / "06_caltech256_resnet50.py", device=CPU)["LiveTensors"]
    loss_of = definitions(SOURCE, device=CPU)["loss_of"]
    tokens, words = 64, 5000
    with FakeTensorMode(), watch() as live:
        hidden = torch.zeros(1, tokens, 2, requires_grad=True)
        weight = torch.zeros(words, 2, requires_grad=True)
        targets = torch.zeros(1, tokens, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(hidden, weight)
            loss = loss_of(logits, targets)
        loss.backward()
    large = Counter(dtype for _, dtype, size in live.peak if size >= 2 * tokens * words)
    assert large == {torch.bfloat16: 1, torch.float32: 3}


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
    notebook = definitions(SOURCE, ["SIZES"], device=CPU, batch=1)
    steps, _ = notebook["SIZES"]["full"]
    losses = notebook["train"](nn.Embedding(1, 1), torch.float16, data, seed=0, steps=steps)
    assert len(losses) == steps >= 2000


def test_t5_keeps_one_layer_of_each_block_in_fp32(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=8
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    load = transformers.T5ForConditionalGeneration.from_pretrained
    dtypes = {name: p.dtype for name, p in load(tmp_path, dtype=torch.float16).named_parameters()}
    wide = [name for name, dtype in dtypes.items() if dtype is torch.float32]
    assert wide
    assert all(name.endswith("wo.weight") for name in wide)


def test_a_mask_in_other_16_bits_than_the_query_is_refused_and_a_boolean_one_is_taken():
    query = torch.randn(1, 1, 2, 4)
    mask = torch.zeros(2, 2, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float or"):
        attend(query, query, query, attn_mask=mask)
    for taken in (mask.bool().logical_not(), mask.to(query.dtype)):
        assert attend(query, query, query, attn_mask=taken).isfinite().all()
