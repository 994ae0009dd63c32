"""Speech models of torchaudio."""

import importlib

import torch

LENGTHS = 16, 12


def models():
    return importlib.import_module("torchaudio.models")


def lengths():
    return torch.tensor(LENGTHS)


def conformer():
    model = models().Conformer(
        input_dim=16, num_heads=2, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=3
    )
    return model, (torch.randn(2, 16, 16), lengths()), {}


def wav2vec2():
    model = models().wav2vec2_model(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(32, 10, 5), (32, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=16,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=10,
    )
    return model, (torch.randn(2, 1000), torch.tensor([1000, 800])), {}


def emformer():
    model = models().Emformer(
        input_dim=32,
        num_heads=4,
        ffn_dim=64,
        num_layers=2,
        segment_length=4,
        right_context_length=1,
    )
    return model, (torch.randn(2, 17, 32), lengths()), {}


def rnnt():
    model = models().rnnt.emformer_rnnt_model(
        input_dim=16,
        encoding_dim=32,
        num_symbols=20,
        segment_length=16,
        right_context_length=4,
        time_reduction_input_dim=8,
        time_reduction_stride=4,
        transformer_num_heads=2,
        transformer_ffn_dim=32,
        transformer_num_layers=2,
        transformer_dropout=0.0,
        transformer_activation="gelu",
        transformer_left_context_length=30,
        transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True,
        symbol_embedding_dim=16,
        num_lstm_layers=1,
        lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-3,
        lstm_dropout=0.0,
    )
    frames, symbols = torch.randn(2, 36, 16), torch.randint(0, 20, (2, 5))
    return model, (frames, torch.tensor([32, 24]), symbols, torch.tensor([5, 4])), {}


MODELS = {
    "torchaudio conformer": conformer,
    "torchaudio wav2vec2": wav2vec2,
    "torchaudio emformer": emformer,
    "torchaudio rnn-t": rnnt,
}
