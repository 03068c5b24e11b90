"""Small models of transformers with adapters of peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

LAYERS = 3


def gpt2_base() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=16, n_head=2, vocab_size=50, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    found: nn.Module = transformers.GPT2LMHeadModel(config)
    return found


def gpt2() -> nn.Module:
    peft: Any = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    found: nn.Module = peft.get_peft_model(gpt2_base(), adapters)
    return found


def vit() -> nn.Module:
    """Its classifier is trained beside the adapters."""
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    base = transformers.ViTForImageClassification(config)
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    adapters = peft.LoraConfig(
        r=2, target_modules=sorted(names & {"query", "value", "q_proj", "v_proj"}),
        modules_to_save=["classifier"],
    )  # fmt: skip
    found: nn.Module = peft.get_peft_model(base, adapters)
    return found
