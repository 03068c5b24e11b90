"""Models that people bring: each trains as a plain loop does, or is refused for the reason given here."""

from __future__ import annotations

import importlib
import re

import pytest
from subject import Case, cases_in
from zoo_checks import BUDGETS, trained, tuned

# Why `fine_tune` cannot solve for the head.
_NO_LINEAR = "scores of shape .* that no linear layer put out"
_NO_SCORES = "with no class scores"
_OTHER_TARGETS = r"needs whole-numbered classes of shape \(\d+(, \d+)*\) below \d+"
_TIED = "the last layer's weight is that of another layer as well"
_NEXT_TOKEN = "as for a model that predicts the next token"
_MODULES = {
    "language_models": {
        **dict.fromkeys(
            (
                "roberta_masked_words", "gpt2_language", "opt_layer_drop", "qwen2_tied",
                "gemma_language", "bloom_language", "mamba_state_space", "switch_experts",
                "t5_translates",
            ),
            _TIED,
        ),
        **dict.fromkeys(
            (
                "gpt_neox_parallel_residual", "llama_language", "llama_recomputes",
                "mixtral_experts", "qwen2_experts",
            ),
            _NEXT_TOKEN,
        ),
        **dict.fromkeys(
            ("bart_layer_drop", "marian_translates", "pegasus_summarises"),
            _NO_LINEAR,
        ),
    },
    "sensing_models": {
        "segformer_pixels": _OTHER_TARGETS,
        "vit_masked_autoencoder": _NO_LINEAR,
        "detr_detects": _OTHER_TARGETS,
        "whisper_listens": _TIED,
        "wav2vec2_masks_time": _OTHER_TARGETS,
        "hubert_listens": _OTHER_TARGETS,
        "patch_tst_forecasts": _NO_SCORES,
        "clip_contrasts": _NO_SCORES,
        "image_to_text": _TIED,
    },
    "vision_models": {
        "squeezenet": _NO_LINEAR,
        "lraspp_pixels": _NO_SCORES,
        "deeplab_pixels": _NO_SCORES,
        "faster_rcnn_detects": _NO_SCORES,
        "mask_rcnn_detects": _NO_SCORES,
        "retinanet_detects": _NO_SCORES,
        "fcos_detects": _NO_SCORES,
        "ssdlite_detects": _NO_SCORES,
    },
    "unusual_models": {},
    "timm_models": {"timm_deit_distilled": _NO_LINEAR, "timm_levit": _NO_LINEAR},
    "adapted_models": {
        **dict.fromkeys(
            ("lora_on_gpt2", "lora_on_t5", "prefix_on_gpt2", "prefix_projected_on_gpt2"), _TIED
        ),
        **dict.fromkeys(("lora_on_llama", "dora_on_llama", "ia3_on_llama"), _NEXT_TOKEN),
        "prompt_on_llama": _OTHER_TARGETS,
    },
}  # fmt: skip
_SAMPLE = {
    "language_models": ("bert_classifies", "t5_translates"),
    "sensing_models": ("clip_contrasts",),
    "vision_models": ("faster_rcnn_detects",),
    "timm_models": ("timm_vit",),
    "adapted_models": ("lora_on_llama",),
    "unusual_models": ("packed_sequences", "graphs_as_objects", "renamed_state"),
}


def cases_of(module: str) -> list[Case]:
    """Return the rows of a module; skips the test where a package is absent that only its models need."""
    return cases_in(importlib.import_module(module), _MODULES[module])


def wrong_with(case: Case, budgets: tuple[str, ...] = BUDGETS) -> list[str]:
    """Return all that is wrong with a row under these budgets, and with fine-tuning it."""
    found: list[str] = []

    def note(asked: str, outcome: tuple[list[str], str], expected: str) -> None:
        problems, reason = outcome
        problems = [*problems]
        if bool(reason) != bool(expected) or not re.search(expected, reason):
            problems.append(f"refused because of {reason!r}, expected {expected!r}")
        print(f"{case.name:28} {asked:16} {reason or 'equal to the plain loop'}")
        found.extend(f"{case.name}, {asked}: {each}" for each in problems)

    for asked in budgets:
        note(asked, trained(case, asked), "")
    note("fine_tune", tuned(case), case.tuned)
    return found


@pytest.mark.parametrize(("module", "names"), _SAMPLE.items(), ids=list(_SAMPLE))
def test_a_sample_trains_as_a_plain_loop_does(module: str, names: tuple[str, ...]) -> None:
    budgets = ("speedup elastic", "memory elastic")
    by_name = {case.name: case for case in cases_of(module)}
    found = [problem for name in names for problem in wrong_with(by_name[name], budgets)]
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("module", _MODULES)
def test_every_row_trains_as_a_plain_loop_does(module: str) -> None:
    found = [problem for case in cases_of(module) for problem in wrong_with(case)]
    assert not found
