"""The small language model: causal, pretrained by a recipe, adapted beside a base that stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fl_elastic.groups.trace import trace_step
from fl_elastic.losses import classification_loss
from fl_elastic_simulations.data.plays import CHARACTERS, LENGTH
from fl_elastic_simulations.models.adapters import low_rank_layers
from fl_elastic_simulations.models.language import BLOCKS, adapted_language_model, language_model
from fl_elastic_simulations.models.pretrained import load_pretrained
from fl_elastic_simulations.models.pretraining import (
    Recipe,
    of_documentation,
    pretrained_file,
    pretraining,
)


def codes(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, CHARACTERS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def test_no_place_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model, rows = language_model().eval(), codes()
    other = rows.clone()
    other[:, LENGTH // 2 :] = (other[:, LENGTH // 2 :] + 1) % CHARACTERS
    with torch.no_grad():
        one, two = model(rows), model(other)
    assert one.shape == (2, CHARACTERS, LENGTH)
    torch.testing.assert_close(one[..., : LENGTH // 2], two[..., : LENGTH // 2])
    assert not torch.allclose(one[..., LENGTH // 2 :], two[..., LENGTH // 2 :])


def test_adapters_change_nothing_at_first_and_lie_between_cuts() -> None:
    torch.manual_seed(0)
    plain = language_model()
    torch.manual_seed(0)
    adapted = adapted_language_model()
    names = set(plain.state_dict())
    assert names < set(adapted.state_dict())
    adapted.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(adapted(codes()), plain(codes()))
    trained = {name for name, each in adapted.named_parameters() if each.requires_grad}
    assert all("lora_" in name for name in trained) and len(trained) == 2 * len(
        low_rank_layers(adapted)
    )
    graph = trace_step(adapted, classification_loss, (codes(), codes())).graph
    assert [cut.module for cut in graph.cuts] == [f"block{n}" for n in range(BLOCKS - 1, 0, -1)]


def test_what_is_folded_into_a_layer_is_added() -> None:
    torch.manual_seed(0)
    model = adapted_language_model()
    layer = next(iter(low_rank_layers(model).values()))
    layer.add_merged()
    assert "merged" in dict(layer.named_buffers(recurse=False))
    x, before = torch.randn(3, layer.in_features), None
    with torch.no_grad():
        before = layer(x)
        assert layer.merged is not None
        layer.merged += 0.1
        expected = before + layer.scale * 0.1 * x.sum(1, keepdim=True)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_recipe_is_kept_once_and_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    recipe = Recipe(steps=2, batch_size=2, warm_up=1)
    for folder in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        row = pretraining(recipe, of_documentation(), pretrained_file(recipe, "plays"))
        assert row["parameters"] > 2e6 and 0 <= row["accuracy"] <= 1 and row["loss"] > 0
        assert pretrained_file(recipe, "plays").is_relative_to(tmp_path / folder)
        model = adapted_language_model()
        fresh = load_pretrained(model, pretrained_file(recipe, "plays"))
        assert fresh and all("lora_" in name for name in fresh)
        found.append(model.get_parameter("block1.query_key_value.weight"))
    assert torch.equal(*found)
    assert pretrained_file(recipe, "plays") != pretrained_file(
        Recipe(steps=3, batch_size=2, warm_up=1), "plays"
    )
    assert isinstance(model, nn.Module)
