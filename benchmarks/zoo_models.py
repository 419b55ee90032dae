"""The models of the zoo, each small enough for a step within seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["SOURCES", "Example", "load_libraries", "names"]


@dataclass
class Example:
    """A model in training mode with inputs; its output carries a loss or is squared and summed."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


TIMM = [
    "resnet18", "resnetv2_50", "resnext50_32x4d", "seresnet50", "ecaresnet26t", "skresnet18", "resnest14d",
    "res2net50_26w_4s", "regnety_002", "densenet121", "dla34", "vgg11", "efficientnet_b0", "mobilenetv2_050",
    "mobilenetv3_small_050", "mobilenetv4_conv_small", "mixnet_s", "mnasnet_small", "ghostnet_050", "hardcorenas_a",
    "lcnet_035", "tinynet_e", "rexnet_100", "xception41", "inception_v4", "dpn48b", "cspresnet50",
    "hrnet_w18_small", "selecsls42", "gernet_s", "repvgg_a0", "repghostnet_050", "mobileone_s0", "fastvit_t8",
    "nf_regnet_b0", "convnext_atto", "convnextv2_atto", "edgenext_xx_small", "inception_next_atto", "starnet_s1",
    "hgnetv2_b0", "vovnet39a", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit3_small_patch16_224",
    "beit_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p16_224",
    "crossvit_tiny_240", "levit_128s", "pit_ti_224", "tnt_s_legacy_patch16_224", "twins_pcpvt_small",
    "visformer_tiny", "coat_lite_tiny", "convit_tiny", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
    "maxvit_tiny_tf_224", "coatnet_nano_rw_224", "volo_d1_224", "poolformer_s12", "mixer_s16_224", "resmlp_12_224",
    "gmlp_s16_224", "efficientformer_l1", "pvt_v2_b0", "davit_tiny", "focalnet_tiny_srf", "mvitv2_tiny",
    "hiera_tiny_224", "nest_tiny", "gcvit_xxtiny", "tiny_vit_5m_224", "mambaout_femto", "sequencer2d_s",
]  # fmt: skip


def _torchvision_names() -> list[str]:
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def _torchvision(name: str) -> Example:
    import torchvision

    side = {"inception_v3": 299, "maxvit_t": 224, "googlenet": 96}.get(name, 64)
    options: dict[str, Any] = {"num_classes": 10}
    if name.startswith("vit_"):
        side = 28 if name == "vit_h_14" else 64
        options["image_size"] = side
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    model = torchvision.models.get_model(name, weights=None, **options)
    return Example(model.train(), (torch.randn(2, 3, side, side),))


def _timm(name: str) -> Example:
    import timm

    try:
        model = timm.create_model(name, num_classes=10, drop_path_rate=0.1)
    except TypeError:
        model = timm.create_model(name, num_classes=10)
    size = model.default_cfg["input_size"]
    if not model.default_cfg.get("fixed_input_size"):
        for side in (64, 96, 128):
            small = torch.randn(2, 3, side, side)
            try:
                with torch.no_grad():
                    model.eval()(small)
            except Exception:  # some models have a size that is a multiple of something, or positions of fixed number
                continue
            return Example(model.train(), (small,))
    return Example(model.train(), (torch.randn(2, *size),))


SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
KV = {**SMALL, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _ids(length: int = 24) -> torch.Tensor:
    return torch.randint(3, 99, (2, length))


def _text(config: str, model: str, options: dict[str, Any]) -> Example:
    """A language model with labels."""
    import transformers

    settings = getattr(transformers, config)(**options)
    ids = _ids()
    return Example(getattr(transformers, model)(settings).train(), (), {"input_ids": ids, "labels": ids.clone()})


def _other(config: str, model: str, options: dict[str, Any], **inputs: Any) -> Example:
    """A model with other inputs."""
    import transformers

    settings = getattr(transformers, config)(**options)
    return Example(getattr(transformers, model)(settings).train(), (), inputs)


def _vision(config: str, model: str, options: dict[str, Any], side: int = 32) -> Example:
    labels = torch.tensor([0, 1])
    return _other(config, model, options, pixel_values=torch.randn(2, 3, side, side), labels=labels)


_VIT = {"image_size": 32, "patch_size": 8, "num_labels": 10}
_VIT.update(
    {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
)
_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, **TOKENS}
_BART = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
_AUDIO = {
    **{key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    "intermediate_size": 64, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
_MOE = {**KV, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

HF: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: _text(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 99, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS},
    ),
    "gpt_neox": lambda: _text("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, **TOKENS}),
    "opt": lambda: _text(
        "OPTConfig", "OPTForCausalLM", {**SMALL, **TOKENS, "ffn_dim": 64, "word_embed_proj_dim": 32, "hidden_size": 32}
    ),
    "bloom": lambda: _text(
        "BloomConfig", "BloomForCausalLM", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    "falcon": lambda: _text("FalconConfig", "FalconForCausalLM", {**SMALL, **TOKENS}),
    "llama": lambda: _text("LlamaConfig", "LlamaForCausalLM", {**KV, **TOKENS}),
    "mistral": lambda: _text("MistralConfig", "MistralForCausalLM", {**KV, **TOKENS, "sliding_window": 16}),
    "qwen2": lambda: _text("Qwen2Config", "Qwen2ForCausalLM", {**KV, **TOKENS}),
    "qwen3": lambda: _text("Qwen3Config", "Qwen3ForCausalLM", {**KV, **TOKENS, "head_dim": 8}),
    "gemma2": lambda: _text("Gemma2Config", "Gemma2ForCausalLM", {**KV, **TOKENS, "head_dim": 8}),
    "phi3": lambda: _text("Phi3Config", "Phi3ForCausalLM", {**KV, **TOKENS}),
    "mixtral": lambda: _text("MixtralConfig", "MixtralForCausalLM", {**_MOE, **TOKENS}),
    "qwen2_moe": lambda: _text(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**KV, **TOKENS, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "mamba": lambda: _text(
        "MambaConfig", "MambaForCausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
    ),
    "rwkv": lambda: _text(
        "RwkvConfig",
        "RwkvForCausalLM",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "num_hidden_layers": 2,
            "context_length": 64,
        },
    ),
    "bert": lambda: _text("BertConfig", "BertForMaskedLM", SMALL),
    "roberta": lambda: _text("RobertaConfig", "RobertaForMaskedLM", {**SMALL, "max_position_embeddings": 80}),
    "electra": lambda: _text("ElectraConfig", "ElectraForMaskedLM", {**SMALL, "embedding_size": 32}),
    "deberta_v2": lambda: _text(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    ),
    "distilbert": lambda: _text(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "albert": lambda: _text("AlbertConfig", "AlbertForMaskedLM", {**SMALL, "embedding_size": 16}),
    "t5": lambda: _text("T5Config", "T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 2}),
    "bart": lambda: _text("BartConfig", "BartForConditionalGeneration", _BART),
    "vit": lambda: _vision("ViTConfig", "ViTForImageClassification", _VIT),
    "dinov2": lambda: _vision("Dinov2Config", "Dinov2ForImageClassification", _VIT),
    "swin": lambda: _vision(
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "segformer": lambda: _vision(
        "SegformerConfig",
        "SegformerForImageClassification",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 32},
    ),
    "convnextv2": lambda: _vision(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    ),
    "wav2vec2": lambda: _other(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        _AUDIO,
        input_values=torch.randn(2, 1600),
        labels=torch.randint(1, 99, (2, 6)),
    ),
    "whisper": lambda: _other(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **_BART,
            **TOKENS,
            "num_mel_bins": 16,
            "max_source_positions": 30,
            "max_target_positions": 30,
            "decoder_start_token_id": 0,
        },
        input_features=torch.randn(2, 16, 60),
        labels=_ids(10),
    ),
    "clip": lambda: _other(
        "CLIPConfig",
        "CLIPModel",
        {"text_config": {**SMALL, **TOKENS}, "vision_config": {**_VIT}, "projection_dim": 16},
        input_ids=_ids(),
        pixel_values=torch.randn(2, 3, 32, 32),
        return_loss=True,
    ),
}


def _hf(name: str) -> Example:
    return HF[name]()


SOURCES: dict[str, Callable[[str], Example]] = {"torchvision": _torchvision, "timm": _timm, "hf": _hf}


def names() -> list[str]:
    """All models, as ``source/name``."""
    found = {"hf": list(HF), "timm": TIMM, "torchvision": _torchvision_names()}
    return [f"{source}/{name}" for source, entries in found.items() for name in entries]


def load_libraries() -> None:
    """Import all that builds models, once for every process that is forked later."""
    import timm  # noqa: F401
    import torchvision  # noqa: F401
    import transformers  # noqa: F401
