"""The KV cache in what a model returns, compared with the tensors of a real pass."""

import dataclasses
import json
import re
import types
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_lab import forecast_inference
from amp_lab.model_call import ModelCall
from amp_lab.tracing.inference_memory import InferenceTable, inference_table
from amp_lab.tracing.inference_result import CacheForecast
from amp_lab.tracing.kv_cache import token_count, with_tokens

WIDTH, HEADS, VOCABULARY = 16, 2, 50
BATCH, TOKENS = 2, 8
FP32, BF16 = 4, 2
OF_A_TOKEN = 2 * WIDTH * FP32  # a key and a value in fp32
IDS = torch.zeros(BATCH, TOKENS, dtype=torch.int64)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    past_key_values: object = None
    hidden_states: object = None


class OwnCache:
    def __init__(self, key: torch.Tensor, value: torch.Tensor):
        self.stored = {"first layer": [key, value]}
        self.length = torch.tensor(key.shape[-2])


Named = namedtuple("Named", ["logits", "kv"])

# What a model returns of its logits (B, T, V), and a key and a value (B, heads, T, D).
FORMS = {
    "a pair": lambda logits, k, v: (logits, (k, v)),
    "pairs": lambda logits, k, v: (logits, ((k, v),)),
    "pairs without heads": lambda logits, k, v: (logits, [(k.flatten(0, 1), v.flatten(0, 1))]),
    "one after the other": lambda logits, k, v: (logits, k, v),
    "stacked": lambda logits, k, v: (logits, torch.stack([k, v])[None]),
    "a dict": lambda logits, k, v: {"logits": logits, "cache": {"key": k, "value": v}},
    "a dict of pairs": lambda logits, k, v: {"logits": logits, "state": [(k, v)]},
    "a dataclass": lambda logits, k, v: Output(logits, [(k, v)]),
    "a named tuple": lambda logits, k, v: Named(logits, torch.cat([k, v], -1)),
    "an object": lambda logits, k, v: (logits, OwnCache(k, v)),
    "shared by two layers": lambda logits, k, v: (logits, [(k, v), (k, v)]),
    "expanded": lambda logits, k, v: (
        logits,
        [(k[:, :, None].expand(-1, -1, 3, -1, -1), v[:, :, None].expand(-1, -1, 3, -1, -1))],
    ),
    "beside hidden states": lambda logits, k, v: Output(logits, [(k, v)], (logits, logits)),
}


class Attends(nn.Module):
    """Token ids (B, T) to what `form` makes of logits, keys and values."""

    def __init__(self, form=FORMS["pairs"]):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.form = nn.Linear(WIDTH, 3 * WIDTH), form

    def forward(self, ids):
        batch, tokens = ids.shape
        split = self.qkv(self.embed(ids)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(out.transpose(1, 2).flatten(2))
        return self.form(logits, k, v)


def cache_of(model: nn.Module, inputs: torch.Tensor = IDS, **options) -> CacheForecast | None:
    options = {"precision": "fp32", "device_type": "cpu"} | options
    return forecast_inference(model.eval(), inputs, **options).cache


def table(model: nn.Module, inputs: torch.Tensor = IDS, **options) -> InferenceTable:
    return inference_table(ModelCall(model.eval(), (inputs,)), device_type="cpu", **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_is_found_in_whatever_form_it_is_returned(form):
    cache = cache_of(Attends(FORMS[form]))
    assert cache is not None
    assert cache.nbytes == BATCH * TOKENS * OF_A_TOKEN
    assert cache.per_sequence == TOKENS * OF_A_TOKEN
    assert cache.per_token == OF_A_TOKEN
    assert (cache.sequences, cache.tokens, cache.dtype) == (BATCH, TOKENS, "fp32")


NO_CACHE = {
    "logits alone": lambda logits, k, v: logits,
    "two outputs of a shape": lambda logits, k, v: (logits, logits + 1),
    "a value of each token": lambda logits, k, v: (logits, logits[..., 0]),
    "hidden states": lambda logits, k, v: Output(logits, None, (k.flatten(2), v.flatten(2))),
    "attention weights": lambda logits, k, v: (logits, k @ v.mT),
    "cross-attention weights": lambda logits, k, v: {"logits": logits, "cross_attentions": (k, v)},
    "a state of one size": lambda logits, k, v: (logits, (k[:, :, -1], v[:, :, -1])),
    "logits of several codebooks": lambda logits, k, v: k,
}


@pytest.mark.parametrize("form", NO_CACHE)
def test_what_else_grows_with_the_tokens_is_no_cache(form):
    model = Attends(NO_CACHE[form])
    assert cache_of(model) is None
    assert "KV cache" not in str(table(model))


def test_a_model_of_images_has_no_cache():
    assert cache_of(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)) is None


def test_the_table_has_the_cache_in_the_dtype_of_each_way():
    found = table(Attends(), tokens=100)
    size = {"fp32": FP32, "bf16 autocast": BF16, "bf16 weights": BF16, "int8": BF16, "int4": BF16}
    for way, itemsize in size.items():
        cache = found[way].cache
        assert cache.dtype == ("fp32" if itemsize == FP32 else "bf16"), way
        assert cache.per_token == 2 * WIDTH * itemsize, way
        assert cache.nbytes_asked == BATCH * 100 * 2 * WIDTH * itemsize, way
        assert found[way].weights_and_cache == found[way].weights + cache.nbytes_asked, way
    rows = {line[:25].strip(): line[25:].split() for line in str(found).splitlines()}
    assert rows["cache, KiB per token"] == ["0.125", *["0.0625"] * 4]
    assert rows["dtype of the cache"] == ["fp32", *["bf16"] * 4]
    for label in ("cache, 2 x 8 tokens", "cache, 2 x 100 tokens", "weights + that cache"):
        assert len(rows[label]) == 5, label
    assert "2 tensors in output.1.0." in str(found)
    assert re.search(r"difference .* 4 and 8 tokens", str(found))
    fields = json.loads(found.to_json())["forecasts"][0]["cache"]
    assert fields["per_sequence"] == TOKENS * OF_A_TOKEN
    assert fields["nbytes_asked"] == 100 * BATCH * OF_A_TOKEN


def test_without_tokens_asked_for_there_is_no_row_for_them():
    text = str(table(Attends()))
    assert "cache, 2 x 8 tokens" in text
    assert "weights + that cache" not in text


def test_weights_and_a_cache_that_do_not_fit_are_named():
    model, memory = Attends(), 2**20
    tokens = memory // (BATCH * OF_A_TOKEN) + 1
    found = table(model, memory_bytes=memory, tokens=tokens)
    said = [line for line in str(found).splitlines() if "do not fit" in line]
    assert [line.partition(":")[0] for line in said] == ["fp32"]


def test_of_tokens_for_a_model_without_a_cache_one_line_is_said():
    found = table(Attends(NO_CACHE["logits alone"]), tokens=100)
    (said,) = [line for line in str(found).splitlines() if "KV cache" in line]
    assert re.search(r" no KV cache, .* 100 tokens", said)


def static(logits, k, v):
    return {"logits": logits, "kv_cache": [k.new_zeros(BATCH, HEADS, 64, 8) for _ in "kv"]}


def test_a_static_cache_is_told_and_not_extrapolated():
    found = table(Attends(static), tokens=100)
    cache = found["fp32"].cache
    assert cache.nbytes == 2 * BATCH * HEADS * 64 * 8 * FP32
    assert cache.per_token is None
    assert cache.nbytes_asked is None
    assert "the same size with 4 and 8 tokens" in str(found)
    assert "is not extrapolated to 100 tokens." in str(found)
    assert "per token" not in str(found)


def window(logits, k, v):
    return {"logits": logits, "cache": [(k[:, :, -6:], v[:, :, -6:]), (k + 0, v + 0)]}


def test_a_window_that_ends_between_two_passes_is_no_number_per_token():
    cache = cache_of(Attends(window))
    assert cache.nbytes == BATCH * (6 + TOKENS) * OF_A_TOKEN
    assert cache.per_token is None
    assert re.search(r"not grow linearly .*\(4 and 8 tokens\)", cache.sentences)


def test_a_window_that_is_full_leaves_the_layers_that_grow():
    cache = cache_of(Attends(window), torch.zeros(BATCH, 20, dtype=torch.int64))
    assert cache.per_token == OF_A_TOKEN
    assert "2 of the 4 tensors" in cache.sentences


def test_a_window_that_ends_before_the_tokens_asked_for_is_not_extrapolated():
    cache = table(Attends(window), IDS[:, :4], tokens=100)["fp32"].cache
    assert cache.per_token == 2 * OF_A_TOKEN
    assert cache.nbytes_asked == BATCH * (6 + 100) * OF_A_TOKEN
    assert re.search(r"With 100 tokens, .*no longer grows", cache.sentences)


class WithPlaces(Attends):
    """Has a table of as many places as the given tokens."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(TOKENS, WIDTH))

    def forward(self, ids):
        self.embed(ids) + self.places[: ids.shape[1]]
        return super().forward(ids)


def test_a_model_with_as_many_places_as_tokens_is_asked_for_fewer():
    assert cache_of(WithPlaces()).per_token == OF_A_TOKEN
    cache = table(WithPlaces(), tokens=100)["fp32"].cache
    assert cache.nbytes_asked is None
    assert re.search(r"for 100 tokens: WithPlaces with input", cache.sentences)


def test_whatever_a_model_raises_for_other_tokens_is_told_with_them():
    class KnowsItsTokens(Attends):
        def forward(self, ids):
            self.known = {TOKENS: True}[ids.shape[1]]
            return Output(*super().forward(ids))

    cache = cache_of(KnowsItsTokens())
    assert cache.nbytes == BATCH * TOKENS * OF_A_TOKEN
    assert cache.per_token is None
    reason = "KnowsItsTokens: KeyError: 4 (tried with 4 tokens)."
    assert f"because a second pass failed: {reason}" in cache.sentences


def test_more_tokens_than_the_config_has_places_for_are_named():
    model = Attends()
    model.config = types.SimpleNamespace(max_position_embeddings=64)
    said = "100 tokens are too many for the model: max_position_embeddings in its config is 64."
    assert said in str(table(model, tokens=100))
    assert "max_position_embeddings" not in str(table(model, tokens=64))


def test_one_token_is_compared_with_two():
    assert cache_of(Attends(), IDS[:, :1]).per_token == OF_A_TOKEN


@pytest.mark.parametrize("form", ["pairs", "one after the other", "a dataclass"])
def test_how_it_grows_is_not_told_if_the_course_depends_on_values(form):
    class Routed(Attends):
        def forward(self, ids):
            ids[ids > 10].sum()
            return super().forward(ids)

    cache = cache_of(Routed(FORMS[form]))
    assert cache.nbytes == BATCH * TOKENS * OF_A_TOKEN
    assert cache.per_token is None
    assert "because a second pass failed: Routed: " in cache.sentences


def test_a_cache_without_tokens_in_the_input_has_a_size_alone():
    class Caches(nn.Conv2d):
        def forward(self, x):
            return {"image": super().forward(x), "cache": x}

    cache = cache_of(Caches(3, 4, 3), torch.rand(2, 3, 8, 8))
    assert cache.nbytes == 2 * 3 * 8 * 8 * FP32
    assert cache.tokens is None
    assert "No input has the shape of tokens" in cache.sentences


def test_embeddings_masks_positions_and_labels_grow_with_the_ids():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    named = {
        "embeddings": torch.zeros(2, 8, 8),
        "attention_mask": torch.ones(2, 8),
        "mask": torch.ones(2, 8, 8, dtype=torch.bool),
        "causal": torch.zeros(1, 1, 8, 8),
        "positions": torch.arange(8),
        "labels": ids,
        "image": torch.zeros(2, 3, 8, 8),
        "one": torch.tensor(1.0),
        "flag": True,
    }
    call = ModelCall(nn.Identity(), (ids,), named)
    assert token_count(call) == 8
    longer = with_tokens(call, 100)
    kwargs = longer.kwargs
    assert longer.args[0].shape == (2, 100)
    shapes = {name: tuple(t.shape) for name, t in kwargs.items() if name != "flag"}
    assert shapes == {
        "embeddings": (2, 100, 8),
        "attention_mask": (2, 100),
        "mask": (2, 100, 100),
        "causal": (1, 1, 100, 100),
        "positions": (100,),
        "labels": (2, 100),
        "image": (2, 3, 8, 8),
        "one": (),
    }
    assert kwargs["flag"] is True


def test_of_an_encoder_and_a_decoder_the_tokens_are_those_of_the_decoder():
    kwargs = {"input_ids": IDS, "decoder_input_ids": IDS, "decoder_attention_mask": IDS}
    call = ModelCall(nn.Identity(), (), kwargs)
    assert token_count(call) == TOKENS
    kwargs = with_tokens(call, 100).kwargs
    assert kwargs["input_ids"].shape == (BATCH, TOKENS)
    assert kwargs["decoder_input_ids"].shape == (BATCH, 100)
    assert kwargs["decoder_attention_mask"].shape == (BATCH, 100)
