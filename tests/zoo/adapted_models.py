"""Models with adapters of peft over a frozen base."""

from __future__ import annotations

import language_models
import peft
import sensing_models
from subject import Subject


def _with(subject: Subject, config: peft.PeftConfig) -> Subject:
    model = peft.get_peft_model(subject.model, config).train()
    return Subject(model, subject.batches, subject.loss_fn, subject.loss_of)


def lora_on_gpt2() -> Subject:
    config = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM"
    )
    return _with(language_models.gpt2_language(), config)


def lora_on_llama() -> Subject:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return _with(language_models.llama_language(), config)


def lora_on_bert() -> Subject:
    """Whose classifier is trained as well."""
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return _with(language_models.bert_classifies(), config)


def lora_on_t5() -> Subject:
    config = peft.LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    return _with(language_models.t5_translates(), config)


def lora_on_vit() -> Subject:
    config = peft.LoraConfig(
        r=2, target_modules=["query", "q_proj"], modules_to_save=["classifier"]
    )
    return _with(sensing_models.vit_classifies(), config)


def dora_on_llama() -> Subject:
    config = peft.LoraConfig(
        r=2, use_dora=True, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return _with(language_models.llama_language(), config)


def ia3_on_llama() -> Subject:
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return _with(language_models.llama_language(), config)


def prefix_on_gpt2() -> Subject:
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    return _with(language_models.gpt2_language(), config)


def prefix_projected_on_gpt2() -> Subject:
    config = peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, task_type="CAUSAL_LM"
    )
    return _with(language_models.gpt2_language(), config)


def prompt_on_llama() -> Subject:
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    return _with(language_models.llama_language(), config)


def layer_norms_on_bert() -> Subject:
    config = peft.LNTuningConfig(target_modules=["LayerNorm"], task_type="SEQ_CLS")
    return _with(language_models.bert_classifies(), config)
