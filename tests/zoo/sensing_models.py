"""Models of transformers that see, hear, or do both; tiny, random."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from subject import Subject, classes, pairs, with_own_loss
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_elastic.losses import own_loss

_SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
_SEES: dict[str, Any] = {**_SMALL, "image_size": 16, "patch_size": 8}
_READS: dict[str, Any] = {**_SMALL, "vocab_size": 40, "max_position_embeddings": 16}


def _image(generator: torch.Generator, size: int = 16) -> Tensor:
    return torch.randn(4, 3, size, size, generator=generator)


def _of_class(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _image(generator), "labels": classes(generator)}


def _larger_of_class(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _image(generator, 32), "labels": classes(generator)}


def _with_text(generator: torch.Generator) -> dict[str, Any]:
    words = torch.randint(3, 39, (4, 6), generator=generator)
    words[:, -1] = 39
    return {"input_ids": words, "pixel_values": _image(generator)}


def vit_classifies() -> Subject:
    config = hf.ViTConfig(**_SEES, num_labels=3)
    return with_own_loss(hf.ViTForImageClassification(config), _of_class)


def deit_two_tokens() -> Subject:
    config = hf.DeiTConfig(**_SEES, num_labels=3)
    return with_own_loss(hf.DeiTForImageClassification(config), _of_class)


def beit_drop_path() -> Subject:
    config = hf.BeitConfig(
        **_SEES, num_labels=3, drop_path_rate=0.3, use_relative_position_bias=True
    )
    return with_own_loss(hf.BeitForImageClassification(config), _of_class)


def swin_windows() -> Subject:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
        num_labels=3,
    )  # fmt: skip
    return with_own_loss(hf.SwinForImageClassification(config), _larger_of_class)


def convnext_classifies() -> Subject:
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=3, drop_path_rate=0.3
    )
    return with_own_loss(hf.ConvNextForImageClassification(config), _larger_of_class)


def resnet_of_transformers() -> Subject:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return with_own_loss(hf.ResNetForImageClassification(config), _larger_of_class)


def segformer_pixels() -> Subject:
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip

    def batch(generator: torch.Generator) -> dict[str, Any]:
        return {"pixel_values": _image(generator, 32), "labels": classes(generator, 3, 32, 32)}

    return with_own_loss(hf.SegformerForSemanticSegmentation(config), batch)


def vit_masked_autoencoder() -> Subject:
    """Which draws what it hides, and has no labels: pairs of what it takes and of what it does not look at."""
    config = hf.ViTMAEConfig(
        **(_SEES | {"patch_size": 4}), decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=24,
    )  # fmt: skip

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        image = _image(generator)
        return {"pixel_values": image}, image

    return pairs(hf.ViTMAEForPreTraining(config), own_loss, batch)


def detr_detects() -> Subject:
    """Labels are a list of dicts, one an image."""
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, num_queries=5, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_labels=3,
    )  # fmt: skip

    def batch(generator: torch.Generator) -> dict[str, Any]:
        labels = [
            {
                "class_labels": torch.randint(3, (2,), generator=generator),
                "boxes": 0.3 + 0.2 * torch.rand(2, 4, generator=generator),
            }
            for _ in range(4)
        ]
        return {"pixel_values": _image(generator, 32), "labels": labels}

    return with_own_loss(hf.DetrForObjectDetection(config), batch)


def whisper_listens() -> Subject:
    config = hf.WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8,
        max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, encoder_layerdrop=0.3, decoder_layerdrop=0.3,
    )  # fmt: skip

    def batch(generator: torch.Generator) -> dict[str, Any]:
        sound = torch.randn(4, 8, 20, generator=generator)
        return {"input_features": sound, "labels": classes(generator, 40, 6)}

    return with_own_loss(hf.WhisperForConditionalGeneration(config), batch)


def wav2vec2_masks_time() -> Subject:
    """Which hides spans of time that numpy draws, and drops layers.

    As it comes it asks for a gradient of its first input, so that freezing its lower layers saves nothing;
    `hubert_listens` freezes its feature encoder by its own method, as its users do.
    """
    return with_own_loss(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_HEARS)), _speech)


def hubert_listens() -> Subject:
    model = hf.HubertForCTC(hf.HubertConfig(**_HEARS))
    model.freeze_feature_encoder()
    return with_own_loss(model, _speech)


_HEARS: dict[str, Any] = {
    **_SMALL, "vocab_size": 12, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.3, "mask_time_prob": 0.3, "mask_time_length": 2, "ctc_zero_infinity": True,
}  # fmt: skip


def _speech(generator: torch.Generator) -> dict[str, Any]:
    sound = torch.randn(4, 320, generator=generator)
    return {"input_values": sound, "labels": 1 + classes(generator, 11, 4)}


def patch_tst_forecasts() -> Subject:
    """A forecaster, whose targets have a name of its own."""
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
        prediction_length=4, d_model=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=24,
    )  # fmt: skip

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        past = torch.randn(4, 16, 2, generator=generator)
        future = torch.randn(4, 4, 2, generator=generator)
        return {"past_values": past, "future_values": future}, future

    return pairs(hf.PatchTSTForPrediction(config), own_loss, batch)


def clip_contrasts() -> Subject:
    """A loss of the user's own on the scores of pictures against texts."""
    config = hf.CLIPConfig(
        text_config={**_READS, "eos_token_id": 39}, vision_config=_SEES, projection_dim=8
    )

    def matching(outputs: Any, targets: Tensor) -> Tensor:
        scores = outputs.logits_per_image
        return (cross_entropy(scores, targets) + cross_entropy(scores.T, targets)) / 2

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        return _with_text(generator), torch.arange(4)

    return pairs(hf.CLIPModel(config), matching, batch)


def siglip_classifies() -> Subject:
    config = hf.SiglipConfig(vision_config=_SEES, text_config=_READS, num_labels=3)
    return with_own_loss(hf.SiglipForImageClassification(config), _of_class)


def image_to_text() -> Subject:
    """A ViT that a GPT-2 with cross-attention reads."""
    decoder = hf.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, add_cross_attention=True,
        is_decoder=True,
    )  # fmt: skip
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**_SEES), decoder
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = hf.VisionEncoderDecoderModel(config)

    def batch(generator: torch.Generator) -> dict[str, Any]:
        return {"pixel_values": _image(generator), "labels": classes(generator, 40, 6)}

    return with_own_loss(model, batch)
