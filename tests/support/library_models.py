"""Models of timm, transformers, diffusers, peft and torchvision, small and from their configs.

Each entry builds (model, args, kwargs); its library is imported when it is built.
"""

import importlib

import torch
import torchvision.models as tv

TOKENS, IMAGE, TINY_IMAGE = (2, 16), (2, 3, 64, 64), (2, 3, 32, 32)
TRANSFORMER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TRANSFORMER |= {"intermediate_size": 128, "vocab_size": 100}
ENCODER_DECODER = {
    f"{part}_{what}": value
    for part in ("encoder", "decoder")
    for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 128))
} | {"d_model": 64, "vocab_size": 100}


def ids(*shape):
    return torch.randint(0, 90, shape or TOKENS)


def _of_timm(name, size):
    return importlib.import_module("timm").create_model(name), (torch.randn(2, 3, size, size),), {}


def _of_transformers(name, config, **inputs):
    """A model by its class, with the config class of its family."""
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    kind = getattr(library, name)
    return kind(kind.config_class(**config)), (), {k: make() for k, make in inputs.items()}


def _language_model(name, labels=TOKENS, **config):
    return lambda: _of_transformers(name, config, input_ids=ids, labels=lambda: ids(*labels))


def _of_diffusers(name, *args, config, **kwargs):
    return getattr(importlib.import_module("diffusers"), name)(**config), args, kwargs


def _steps():
    return torch.tensor([1, 2])


def _clip():
    library = importlib.import_module("transformers")
    vision = TRANSFORMER | {"image_size": 64, "patch_size": 16}
    config = library.CLIPConfig(text_config=TRANSFORMER, vision_config=vision)
    inputs = {"input_ids": ids(), "pixel_values": torch.randn(IMAGE), "return_loss": True}
    return library.CLIPModel(config), (), inputs


def _cast(build, dtype):
    """The same with weights and inputs in another dtype."""
    model, args, kwargs = build()

    def cast(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return model.to(dtype), tuple(map(cast, args)), {k: cast(v) for k, v in kwargs.items()}


def _lora():
    """A frozen base in bf16, with adapters in fp32."""
    peft = importlib.import_module("peft")
    model, args, kwargs = _cast(MODELS["llama"], torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    return model, args, kwargs


_GROUPED = TRANSFORMER | {"num_key_value_heads": 2}
_UNET = {"block_out_channels": (32, 64), "norm_num_groups": 8, "attention_head_dim": 8}
_AUDIO = {"num_mel_bins": 20, "max_source_positions": 50, "suppress_tokens": None}
_AUDIO |= {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_WAVE = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
_WAVE |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

MODELS = {
    f"timm {name}": lambda name=name, size=size: _of_timm(name, size)
    for size, names in {
        64: (
            "resnet18",
            "convnext_atto",
            "efficientnet_b0",
            "mobilenetv3_small_050",
            "regnetx_002",
        ),
        224: (
            *("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s16_224"),
            *("deit_tiny_patch16_224", "maxvit_tiny_tf_224"),
        ),
    }.items()
    for name in names
}
MODELS |= {
    "gpt2": _language_model("GPT2LMHeadModel", n_layer=2, n_embd=64, n_head=2, vocab_size=100),
    "llama": _language_model("LlamaForCausalLM", **_GROUPED),
    "mixtral": _language_model("MixtralForCausalLM", num_local_experts=4, **_GROUPED),
    "bert": _language_model("BertForMaskedLM", **TRANSFORMER),
    "qwen2": _language_model("Qwen2ForCausalLM", **_GROUPED),
    "gemma": _language_model("GemmaForCausalLM", head_dim=16, **_GROUPED),
    "mamba": _language_model(
        "MambaForCausalLM", hidden_size=64, num_hidden_layers=2, vocab_size=100
    ),
    "bart": _language_model("BartForConditionalGeneration", (2, 8), **ENCODER_DECODER),
    "t5": _language_model(
        "T5ForConditionalGeneration",
        (2, 8),
        **{"d_model": 64, "num_layers": 2, "num_heads": 2, "d_ff": 128, "d_kv": 32},
        vocab_size=100,
        decoder_start_token_id=0,
    ),
    "vit": lambda: _of_transformers(
        "ViTForImageClassification",
        {k: v for k, v in TRANSFORMER.items() if k != "vocab_size"} | {"image_size": 64},
        pixel_values=lambda: torch.randn(IMAGE),
        labels=lambda: torch.tensor([0, 1]),
    ),
    "whisper": lambda: _of_transformers(
        "WhisperForConditionalGeneration",
        ENCODER_DECODER | _AUDIO | {"begin_suppress_tokens": None},
        input_features=lambda: torch.randn(2, 20, 100),
        labels=lambda: ids(2, 8),
    ),
    "wav2vec2": lambda: _of_transformers(
        "Wav2Vec2ForCTC", TRANSFORMER | _WAVE, input_values=lambda: torch.randn(2, 2000)
    ),
    "clip": _clip,
    "unet": lambda: _of_diffusers(
        "UNet2DModel",
        torch.randn(TINY_IMAGE),
        _steps(),
        config=_UNET
        | {"sample_size": 32, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    ),
    "conditional unet": lambda: _of_diffusers(
        "UNet2DConditionModel",
        torch.randn(2, 4, 16, 16),
        _steps(),
        torch.randn(2, 5, 32),
        config=_UNET
        | {"sample_size": 16, "cross_attention_dim": 32}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
    ),
    "dit": lambda: _of_diffusers(
        "DiTTransformer2DModel",
        torch.randn(2, 4, 16, 16),
        config={"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
        | {"num_layers": 2, "sample_size": 16, "num_embeds_ada_norm": 10},
        timestep=_steps(),
        class_labels=_steps(),
    ),
    "vae": lambda: _of_diffusers(
        "AutoencoderKL",
        torch.randn(TINY_IMAGE),
        config={"block_out_channels": (32, 64), "norm_num_groups": 8, "sample_size": 32}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2},
    ),
    "llama, weights in bf16": lambda: _cast(MODELS["llama"], torch.bfloat16),
    "resnet18, weights in bf16": lambda: _cast(MODELS["timm resnet18"], torch.bfloat16),
    "llama, lora": _lora,
}
MODELS |= {
    f"torchvision {name}": lambda name=name, options=options: (
        getattr(tv, name)(weights=None, **options),
        (torch.randn(IMAGE),),
        {},
    )
    for name, options in {
        "resnet50": {},
        "densenet121": {},
        "mobilenet_v2": {},
        "regnet_y_400mf": {},
        "shufflenet_v2_x0_5": {},
        "squeezenet1_1": {},
        "googlenet": {"init_weights": False, "aux_logits": False},
    }.items()
}
MODELS |= {
    "torchvision deeplab": lambda: (
        tv.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None),
        (torch.randn(IMAGE),),
        {},
    ),
    "torchvision r3d": lambda: (tv.video.r3d_18(weights=None), (torch.randn(1, 3, 4, 32, 32),), {}),
    "torchvision fasterrcnn": lambda: (
        tv.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None),
        (
            [torch.rand(3, 64, 64)],
            [{"boxes": torch.tensor([[1.0, 1, 20, 20]]), "labels": torch.tensor([1])}],
        ),
        {},
    ),
}
# What cannot be traced in training on cuda, and words of the line that says so.
REFUSED = {"torchvision fasterrcnn": "--device cpu --real"}
