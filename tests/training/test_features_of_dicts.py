"""Features of batches that are dicts, as models of transformers take them: kept where they are an example's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lora_models import LAYERS, gpt2, vit
from plain_loop import assert_weights
from small_models import Chosen, same_weights, sgd
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.groups import LossFn, tensor_groups
from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.losses import own_loss
from fl_elastic.training import ElasticTrainer, FitReport, ForwardOptions, Timing, TrainerOptions
from fl_elastic.training.fine_tune import fine_tune

transformers: Any = pytest.importorskip("transformers")

_EXAMPLES = 10
_Batch = dict[str, Any]


def texts(padded: bool = True) -> list[_Batch]:
    """Three batches of four, four and two rows, of which some end in padding."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, 50, (_EXAMPLES, 9), generator=generator)
    mask = torch.ones_like(rows)
    if padded:
        mask[1, 6:] = mask[7, 4:] = 0
    whole = {"input_ids": rows, "attention_mask": mask, "labels": rows.masked_fill(mask == 0, -100)}
    return [{name: each[i : i + 4] for name, each in whole.items()} for i in range(0, 10, 4)]


def pictures() -> list[_Batch]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(_EXAMPLES, 3, 8, 8, generator=generator)
    whole = {"pixel_values": images, "labels": torch.arange(_EXAMPLES) % 3}
    return [{name: each[i : i + 4] for name, each in whole.items()} for i in range(0, 10, 4)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[_Batch]]]] = {
    "gpt2": (gpt2, texts), "gpt2 without padding": (gpt2, lambda: texts(padded=False)),
    "vit": (vit, pictures),
}  # fmt: skip


def fitted(
    model: nn.Module,
    batches: Any,
    names: set[str],
    forward: ForwardOptions | None,
    epochs: int = 3,
    loss_fn: LossFn = own_loss,
) -> FitReport:
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(),
        options=TrainerOptions(forward=forward, timing=Timing(closed_loop=False, clock="cpu")),
    )  # fmt: skip
    trainer.planner.policy = Chosen(names)
    return trainer.fit(batches, epochs=epochs)


def of_last_block(model: nn.Module, batch: _Batch) -> set[str]:
    names = [each.name for each in tensor_groups(model, own_loss, batch)]
    found = {name for name in names if f".{LAYERS - 1}." in name or "classifier" in name}
    assert 0 < len(found) < len(names)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_are_trained_on_kept_features_as_ever(kind: str) -> None:
    build, data = MODELS[kind]
    batches, start = data(), build()
    names = of_last_block(start, batches[0])
    plain, kept = copy.deepcopy(start), copy.deepcopy(start)
    fitted(plain, batches, names, None)
    report = fitted(kept, batches, names, ForwardOptions(1 << 22, "fp32")).forward
    assert report is not None and report.refused == ""
    assert (report.computed, report.found) == (_EXAMPLES, 2 * _EXAMPLES)
    assert_weights(kept, plain, rtol=1e-4, atol=1e-5)
    assert not same_weights(start.state_dict(), plain)


def test_rows_under_another_mask_are_other_examples() -> None:
    """As where the same text is cut off earlier: its features are not those of the whole."""
    batches, start = texts(), gpt2()
    names = of_last_block(start, batches[0])
    (first, *_) = batches
    other = {**first, "attention_mask": first["attention_mask"].clone()}
    other["attention_mask"][:, 5:] = 0
    report = fitted(start, [first, other], names, ForwardOptions(1 << 22, "fp32"), epochs=2).forward
    assert report is not None
    # One row of the first ends earlier than that already.
    assert (report.computed, report.found) == (8, 8)


def test_what_all_examples_share_is_handed_through() -> None:
    batches = [{**each, "position_ids": torch.arange(9)[None]} for each in texts()]
    start = gpt2()
    names = of_last_block(start, batches[0])
    plain, kept = copy.deepcopy(start), copy.deepcopy(start)
    fitted(plain, batches, names, None)
    report = fitted(kept, batches, names, ForwardOptions(1 << 22, "fp32")).forward
    assert report is not None and report.found == 2 * _EXAMPLES
    assert_weights(kept, plain, rtol=1e-4, atol=1e-5)


def test_a_batch_of_another_layout_is_computed() -> None:
    """What looks shared in one batch looks like a row per example in another, of as many examples."""
    first, _, last = texts()
    given = [
        {**each, "position_ids": torch.arange(9).expand(rows, 9)}
        for each, rows in ((first, 1), (last, 2))
    ]
    start = gpt2()
    report = fitted(
        start, given, of_last_block(start, given[0]), ForwardOptions(1 << 22, "fp32"), epochs=2
    ).forward
    assert report is not None and report.refused == ""
    assert (report.computed, report.found) == (4 + 2 + 2, 4)


class ReadsMasks(nn.Module):
    """Doubles its features where nobody in the batch is masked."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.first(x))
        if bool(mask.all()):
            y = self.factor * y
        scores = self.head(torch.relu(self.second(y * mask)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


@pytest.mark.parametrize(("factor", "refused"), [(1.0, ""), (2.0, "branches on the masks")])
def test_a_mask_may_be_read_where_it_decides_nothing(factor: float, refused: str) -> None:
    torch.manual_seed(0)
    whole = {"x": torch.randn(8, 4), "mask": torch.ones(8, 4).long(), "labels": torch.arange(8) % 3}
    batches = [{name: each[i : i + 4] for name, each in whole.items()} for i in (0, 4)]
    report = fitted(
        ReadsMasks(factor), batches, {"head", "second"}, ForwardOptions(1 << 20, "fp32")
    ).forward
    assert report is not None and refused in report.refused
    assert report.found == (0 if refused else 16)


class CutsToTheLongest(ReadsMasks):
    """Looks at no place behind the last one that anybody in the batch has."""

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        longest = int(mask.sum(1).max())
        y = torch.relu(self.first(x[:, :longest]))
        scores = self.head(torch.relu(self.second(y)).mean(1))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_what_is_cut_to_the_longest_of_a_batch_is_not_kept() -> None:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(4, 6, 4),
        "mask": torch.ones(4, 6).long(),
        "labels": torch.arange(4) % 3,
    }
    report = fitted(
        CutsToTheLongest(1.0), [batch], {"head", "second"}, ForwardOptions(1 << 20, "fp32")
    ).forward
    assert report is not None and "branches on the masks" in report.refused
    assert report.found == 0


class Scaled(nn.Module):
    """Takes one number beside its examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.relu(self.first(scale * x))
        found: Tensor = self.head(torch.relu(self.second(y)))
        return found


def test_a_number_beside_the_examples_belongs_to_each() -> None:
    torch.manual_seed(0)
    x, classes = torch.randn(4, 4), torch.arange(4) % 3
    batches = [({"x": x, "scale": torch.tensor(each)}, classes) for each in (1.0, 2.0)]
    model = Scaled()
    report = fitted(
        model, batches, {"head", "second"}, ForwardOptions(1 << 20, "fp32"), epochs=2,
        loss_fn=nn.functional.cross_entropy,
    ).forward  # fmt: skip
    assert report is not None and report.refused == ""
    assert (report.computed, report.found) == (8, 8)


def test_a_vision_transformer_is_fine_tuned_on_kept_features() -> None:
    model = vit()
    place = next(
        name for name, _ in model.named_modules()
        if name.endswith((f"layer.{LAYERS - 1}", f"layers.{LAYERS - 1}"))
    )  # fmt: skip
    done = fine_tune(
        model,
        own_loss,
        lambda p: torch.optim.AdamW(p, 1e-4),
        pictures(),
        epochs=2,
        cut=place,
        read="last",
    )
    assert done.report.forward is not None
    assert (done.report.forward.computed, done.report.forward.found) == (0, 2 * _EXAMPLES)


def test_entries_are_told_apart_by_their_names_and_content() -> None:
    one, two = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    ids = [
        sample_ids(each)
        for each in (
            {"a": one, "b": two}, {"b": one, "a": two}, {"a": one, "b": two, "c": None}, {"a": one},
            (one, two), one, {"a": one, "b": two, "c": torch.tensor(1.0)}, {"a": one, "b": two, "c": True},
        )
    ]  # fmt: skip
    assert len({one for each in ids for one in each}) == 2 * len(ids)
    assert sample_ids({"a": one[1:], "b": two[1:]}) == ids[0][1:]
