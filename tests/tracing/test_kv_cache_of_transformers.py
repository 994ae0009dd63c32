"""The KV cache of models of transformers, compared with the real caches on the CPU."""

import contextlib
import copy

import pytest
import torch
from cases import some_of
from torch import nn

from amp_lab import forecast_inference
from amp_lab.core.report import short_name
from amp_lab.model_call import ModelCall
from amp_lab.tracing.inference_memory import inference_table

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

BATCH, TOKENS, MORE = 2, 8, 24
WAYS = ("fp32", "bf16 autocast", "bf16 weights")
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def llama(key_value_heads: int) -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=key_value_heads, **LLAMA)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=100, use_cache=True
    )
    return transformers.GPT2LMHeadModel(config).eval()


def mistral() -> nn.Module:
    config = transformers.MistralConfig(num_key_value_heads=2, sliding_window=12, **LLAMA)
    return transformers.MistralForCausalLM(config).eval()


MODELS = {
    "grouped-query": lambda: llama(2),
    "multi-query": lambda: llama(1),
    "gpt2": gpt2,
    "sliding window": mistral,
}


def ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.zeros(BATCH, tokens, dtype=torch.int64)


def real_tensors(model: nn.Module, way: str, **inputs) -> list[torch.Tensor]:
    """Keys and values of the cache that a real pass returns."""
    if way.endswith("weights"):
        model = copy.deepcopy(model).bfloat16()
    autocast = torch.autocast("cpu", torch.bfloat16) if "autocast" in way else None
    with torch.inference_mode(), autocast or contextlib.nullcontext():
        cache = model(**inputs).past_key_values
    layers = getattr(cache, "layers", None)
    if layers is None:
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def real_bytes(model: nn.Module, way: str, **inputs) -> int:
    return sum(tensor.nbytes for tensor in real_tensors(model, way, **inputs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", some_of(*MODELS))
def test_the_cache_is_the_real_one(name, way):
    model = MODELS[name]()
    call = ModelCall(model, (), {"input_ids": ids()})
    cache = inference_table(call, device_type="cpu", tokens=MORE)[way].cache
    real = real_tensors(model, way, input_ids=ids())
    assert cache.nbytes == sum(tensor.nbytes for tensor in real)
    assert cache.tensors == len(real)
    assert cache.dtype == " + ".join(sorted({short_name(tensor.dtype) for tensor in real}))
    fewer = real_bytes(model, way, input_ids=ids(TOKENS // 2))
    assert cache.per_token == (cache.nbytes - fewer) / (TOKENS // 2) / BATCH
    assert cache.nbytes_asked == real_bytes(model, way, input_ids=ids(MORE))
    assert cache.place.startswith("output.past_key_values")
    has_window = "no longer grows" in cache.sentences
    assert has_window == (name == "sliding window")


def test_under_autocast_the_cache_of_llama_is_in_fp32_and_that_of_gpt2_in_16_bits():
    """Llama's rotary embedding makes the keys fp32, and a `DynamicCache` has their dtype."""
    for model, dtype in ((llama(2), torch.float32), (gpt2(), torch.bfloat16)):
        real = real_tensors(model, "bf16 autocast", input_ids=ids())
        assert {tensor.dtype for tensor in real} == {dtype}
        call = ModelCall(model, (), {"input_ids": ids()})
        for device_type in ("cpu", "cuda"):
            found = inference_table(call, device_type=device_type)
            assert found["bf16 autocast"].cache.dtype == short_name(dtype)


@pytest.mark.parametrize("way", WAYS)
def test_one_forecast_has_the_cache_of_the_table(way):
    autocast = "autocast" in way
    options = {"precision": way.split()[0], "autocast": autocast, "device_type": "cpu"}
    cache = forecast_inference(gpt2(), input_ids=ids(), **options).cache
    assert cache.nbytes == real_bytes(gpt2(), way, input_ids=ids())


@pytest.mark.parametrize("name", some_of(*MODELS))
def test_the_cache_is_told_of_a_device_that_is_not_here(name):
    model = MODELS[name]()
    call = ModelCall(model, (), {"input_ids": ids()})
    found = inference_table(call, device_type="cuda", tokens=MORE)
    for way in ("fp32", "bf16 weights"):
        assert found[way].cache.nbytes == real_bytes(model, way, input_ids=ids())
        assert found[way].cache.nbytes_asked == real_bytes(model, way, input_ids=ids(MORE))


def test_a_mask_grows_with_the_ids():
    inputs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    cache = forecast_inference(llama(2), **inputs, device_type="cpu", precision="fp32").cache
    assert cache.nbytes == real_bytes(llama(2), "fp32", **inputs)


def test_without_a_cache_nothing_is_said():
    forecast = forecast_inference(
        llama(2), input_ids=ids(), use_cache=False, device_type="cpu", precision="fp32"
    )
    assert forecast.cache is None
    assert "KV cache" not in str(forecast)


def test_a_decoder_with_cross_attention_grows_by_its_own_keys_and_values():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": ids(), "decoder_input_ids": ids()}
    cache = forecast_inference(model, **inputs, device_type="cpu", precision="fp32").cache
    assert cache.nbytes == real_bytes(model, "fp32", **inputs)
    inputs["decoder_input_ids"] = ids(2 * TOKENS)
    longer = real_bytes(model, "fp32", **inputs)
    assert cache.per_token == (longer - cache.nbytes) / TOKENS / BATCH
    assert "4 of the 8 tensors" in cache.sentences


def static_cache(model: nn.Module):
    return transformers.StaticCache(config=model.config, max_cache_len=32)


def test_a_static_cache_that_is_given_is_told_and_not_extrapolated():
    model = llama(2)
    given = static_cache(model)
    call = ModelCall(model, (), {"input_ids": ids(), "past_key_values": given})
    found = inference_table(call, device_type="cpu", tokens=MORE)
    for way in ("fp32", "bf16 weights"):
        real = real_bytes(model, way, input_ids=ids(), past_key_values=static_cache(model))
        assert found[way].cache.nbytes == real, way
        assert found[way].cache.per_token is None, way
        assert found[way].cache.nbytes_asked is None, way
    assert not given.layers[0].is_initialized
    assert f"is not extrapolated to {MORE} tokens." in str(found)
    # It has the dtype of the keys, which the rotary embedding makes fp32; the values are in bf16.
    assert set(found.failed) == {"bf16 autocast"}
    with pytest.raises(RuntimeError, match="dtype"):
        real_bytes(model, "bf16 autocast", input_ids=ids(), past_key_values=static_cache(model))


@pytest.mark.parametrize("autocast", [True, False])
def test_a_cache_that_is_given_is_as_it_was(autocast):
    model, cache = llama(2), transformers.DynamicCache()
    options = {"device_type": "cpu", "precision": "bf16", "autocast": autocast}
    found = forecast_inference(model, input_ids=ids(), past_key_values=cache, **options)
    assert found.cache == forecast_inference(model, input_ids=ids(), **options).cache
    assert len(cache) == 0


def test_a_past_that_is_given_counts_as_an_input_and_in_the_cache():
    model, past = llama(2), transformers.DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids(), past_key_values=past)
    given = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    token = ids(1)
    forecast = forecast_inference(
        model, input_ids=token, past_key_values=past, device_type="cpu", precision="fp32"
    )
    assert forecast.inputs == given + token.nbytes
    assert forecast.cache.nbytes == given // TOKENS * (TOKENS + 1)
    assert forecast.cache.per_token == given // TOKENS // BATCH
    assert past.get_seq_length() == TOKENS
