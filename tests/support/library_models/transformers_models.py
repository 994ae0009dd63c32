"""Models of transformers: for language, images, speech, and one for text and images."""

import importlib

import torch

TOKENS, IMAGE = (2, 16), (2, 3, 64, 64)
TRANSFORMER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TRANSFORMER |= {"intermediate_size": 128, "vocab_size": 100}
GROUPED = TRANSFORMER | {"num_key_value_heads": 2}
ENCODER_DECODER = {
    f"{part}_{what}": value
    for part in ("encoder", "decoder")
    for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 128))
} | {"d_model": 64, "vocab_size": 100}
AUDIO = {"num_mel_bins": 20, "max_source_positions": 50, "suppress_tokens": None}
AUDIO |= {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
AUDIO |= {"begin_suppress_tokens": None}
WAVE = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
WAVE |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


def ids(*shape):
    return torch.randint(0, 90, shape or TOKENS)


def build(name, config, **inputs):
    """A model by its class, with the config class of its family."""
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    kind = getattr(library, name)
    return kind(kind.config_class(**config)), (), {key: make() for key, make in inputs.items()}


def language_model(name, labels=TOKENS, **config):
    return lambda: build(name, config, input_ids=ids, labels=lambda: ids(*labels))


def vit():
    config = TRANSFORMER | {"image_size": 64}
    del config["vocab_size"]
    return build(
        "ViTForImageClassification",
        config,
        pixel_values=lambda: torch.randn(IMAGE),
        labels=lambda: torch.tensor([0, 1]),
    )


def whisper():
    return build(
        "WhisperForConditionalGeneration",
        ENCODER_DECODER | AUDIO,
        input_features=lambda: torch.randn(2, 20, 100),
        labels=lambda: ids(2, 8),
    )


def wav2vec2():
    return build("Wav2Vec2ForCTC", TRANSFORMER | WAVE, input_values=lambda: torch.randn(2, 2000))


def clip():
    library = importlib.import_module("transformers")
    vision = TRANSFORMER | {"image_size": 64, "patch_size": 16}
    config = library.CLIPConfig(text_config=TRANSFORMER, vision_config=vision)
    inputs = {"input_ids": ids(), "pixel_values": torch.randn(IMAGE), "return_loss": True}
    return library.CLIPModel(config), (), inputs


def llama_in_bf16():
    model, args, kwargs = MODELS["llama"]()
    return model.bfloat16(), args, kwargs


MODELS = {
    "gpt2": language_model("GPT2LMHeadModel", n_layer=2, n_embd=64, n_head=2, vocab_size=100),
    "llama": language_model("LlamaForCausalLM", **GROUPED),
    "mixtral": language_model("MixtralForCausalLM", num_local_experts=4, **GROUPED),
    "bert": language_model("BertForMaskedLM", **TRANSFORMER),
    "qwen2": language_model("Qwen2ForCausalLM", **GROUPED),
    "gemma": language_model("GemmaForCausalLM", head_dim=16, **GROUPED),
    "mamba": language_model(
        "MambaForCausalLM", hidden_size=64, num_hidden_layers=2, vocab_size=100
    ),
    "bart": language_model("BartForConditionalGeneration", (2, 8), **ENCODER_DECODER),
    "t5": language_model(
        "T5ForConditionalGeneration",
        (2, 8),
        **{"d_model": 64, "num_layers": 2, "num_heads": 2, "d_ff": 128, "d_kv": 32},
        vocab_size=100,
        decoder_start_token_id=0,
    ),
    "vit": vit,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
    "clip": clip,
    "llama, weights in bf16": llama_in_bf16,
}
