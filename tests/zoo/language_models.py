"""Models of transformers that read: encoders, decoders, encoder-decoders, mixtures of experts; tiny, random."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from subject import Subject, classes, with_own_loss

_WORDS = 40
_LENGTH = 8
_SMALL: dict[str, Any] = {
    "vocab_size": _WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    **_SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2, "output_router_logits": True,
}  # fmt: skip
_PAIR: dict[str, Any] = {
    "vocab_size": _WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def _words(generator: torch.Generator) -> dict[str, Any]:
    """Return words, of which the last are padding."""
    words = torch.randint(3, _WORDS, (4, _LENGTH), generator=generator)
    mask = torch.ones_like(words)
    words[1, 6:], mask[1, 6:] = 0, 0
    return {"input_ids": words, "attention_mask": mask}


def _of_class(generator: torch.Generator) -> dict[str, Any]:
    return {**_words(generator), "labels": classes(generator)}


def _of_tokens(generator: torch.Generator) -> dict[str, Any]:
    return {**_words(generator), "labels": classes(generator, 3, _LENGTH)}


def _next_word(generator: torch.Generator) -> dict[str, Any]:
    given = _words(generator)
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def _masked_word(generator: torch.Generator) -> dict[str, Any]:
    given = _next_word(generator)
    hidden = torch.rand(given["labels"].shape, generator=generator) < 0.3
    hidden[:, 0] = True
    labels = given["labels"].masked_fill(~hidden, -100)
    return {**given, "input_ids": given["input_ids"].masked_fill(hidden, 3), "labels": labels}


def bert_classifies() -> Subject:
    return with_own_loss(hf.BertForSequenceClassification(hf.BertConfig(**_SMALL)), _of_class)


def roberta_masked_words() -> Subject:
    return with_own_loss(hf.RobertaForMaskedLM(hf.RobertaConfig(**_SMALL)), _masked_word)


def distilbert_classifies() -> Subject:
    config = hf.DistilBertConfig(
        vocab_size=_WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32,
        num_labels=3,
    )  # fmt: skip
    return with_own_loss(hf.DistilBertForSequenceClassification(config), _of_class)


def albert_shares_layers() -> Subject:
    config = hf.AlbertConfig(**_SMALL, embedding_size=8)
    return with_own_loss(hf.AlbertForSequenceClassification(config), _of_class)


def electra_tokens() -> Subject:
    config = hf.ElectraConfig(**_SMALL, embedding_size=8)
    return with_own_loss(hf.ElectraForTokenClassification(config), _of_tokens)


def deberta_relative_positions() -> Subject:
    config = hf.DebertaV2Config(
        **_SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True
    )
    return with_own_loss(hf.DebertaV2ForSequenceClassification(config), _of_class)


def mpnet_classifies() -> Subject:
    return with_own_loss(hf.MPNetForSequenceClassification(hf.MPNetConfig(**_SMALL)), _of_class)


def fnet_fourier() -> Subject:
    def batch(generator: torch.Generator) -> dict[str, Any]:
        given = _of_class(generator)
        return {name: given[name] for name in ("input_ids", "labels")}

    return with_own_loss(hf.FNetForSequenceClassification(hf.FNetConfig(**_SMALL)), batch)


def modernbert_classifies() -> Subject:
    config = hf.ModernBertConfig(
        **_SMALL, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    )
    return with_own_loss(hf.ModernBertForSequenceClassification(config), _of_class)


def xlnet_classifies() -> Subject:
    config = hf.XLNetConfig(
        vocab_size=_WORDS, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3
    )
    return with_own_loss(hf.XLNetForSequenceClassification(config), _of_class)


def gpt2_language() -> Subject:
    config = hf.GPT2Config(vocab_size=_WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return with_own_loss(hf.GPT2LMHeadModel(config), _next_word)


def gpt2_classifies() -> Subject:
    config = hf.GPT2Config(
        vocab_size=_WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    return with_own_loss(hf.GPT2ForSequenceClassification(config), _of_class)


def gpt_neox_parallel_residual() -> Subject:
    return with_own_loss(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_SMALL)), _next_word)


def opt_layer_drop() -> Subject:
    config = hf.OPTConfig(
        vocab_size=_WORDS, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=32, layerdrop=0.4, pad_token_id=0,
    )  # fmt: skip
    return with_own_loss(hf.OPTForCausalLM(config), _next_word)


def llama_language() -> Subject:
    return with_own_loss(hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL)), _next_word)


def llama_recomputes() -> Subject:
    """With gradient checkpointing of its own."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL))
    model.gradient_checkpointing_enable()
    return with_own_loss(model, _next_word)


def qwen2_tied() -> Subject:
    config = hf.Qwen2Config(**_SMALL, num_key_value_heads=1, tie_word_embeddings=True)
    return with_own_loss(hf.Qwen2ForCausalLM(config), _next_word)


def gemma_language() -> Subject:
    config = hf.GemmaConfig(**_SMALL, num_key_value_heads=1, head_dim=8)
    return with_own_loss(hf.GemmaForCausalLM(config), _next_word)


def bloom_language() -> Subject:
    config = hf.BloomConfig(vocab_size=_WORDS, hidden_size=16, n_layer=2, n_head=2)
    return with_own_loss(hf.BloomForCausalLM(config), _next_word)


def mamba_state_space() -> Subject:
    config = hf.MambaConfig(
        vocab_size=_WORDS, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=4
    )
    return with_own_loss(hf.MambaForCausalLM(config), _next_word)


def mixtral_experts() -> Subject:
    config = hf.MixtralConfig(**_EXPERTS, num_local_experts=4)
    return with_own_loss(hf.MixtralForCausalLM(config), _next_word)


def qwen2_experts() -> Subject:
    config = hf.Qwen2MoeConfig(
        **_EXPERTS, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8
    )
    return with_own_loss(hf.Qwen2MoeForCausalLM(config), _next_word)


def switch_experts() -> Subject:
    config = hf.SwitchTransformersConfig(
        vocab_size=_WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=16,
        decoder_start_token_id=0, router_jitter_noise=0.1,
    )  # fmt: skip
    return with_own_loss(hf.SwitchTransformersForConditionalGeneration(config), _next_word)


def t5_translates() -> Subject:
    config = hf.T5Config(
        vocab_size=_WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return with_own_loss(hf.T5ForConditionalGeneration(config), _next_word)


def bart_layer_drop() -> Subject:
    config = hf.BartConfig(**_PAIR, encoder_layerdrop=0.4, decoder_layerdrop=0.4)
    return with_own_loss(hf.BartForConditionalGeneration(config), _next_word)


def marian_translates() -> Subject:
    return with_own_loss(hf.MarianMTModel(hf.MarianConfig(**_PAIR)), _next_word)


def pegasus_summarises() -> Subject:
    return with_own_loss(hf.PegasusForConditionalGeneration(hf.PegasusConfig(**_PAIR)), _next_word)
