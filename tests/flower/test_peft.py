"""LoRA of peft on a GPT-2 and a ViT of transformers, tiny and with random weights: rounds, bytes, export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lora_models
import numpy as np
import pytest
import torch
from plain_loop import plain_steps
from small_federation import as_weights, quiet, run
from torch import Tensor, nn

from fl_elastic import Budget
from fl_elastic.flower import (
    ElasticClient,
    PartialUpdates,
    elastic_client_app,
    initial_arrays,
)
from fl_elastic.groups import tensor_groups
from fl_elastic.planning.plain import GivenPolicy
from fl_elastic.update import Manifest, load_weights, weights_of

transformers: Any = pytest.importorskip("transformers")

HEADER = 1000
BATCHES = {1: 1, 2: 2, 3: 3}


class NextToken(nn.Module):
    """A causal language model as a function of its tokens: scores of every next one, (N * T, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return scores.flatten(0, 1)


class Scores(nn.Module):
    """An image classifier as a function of its pixels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.model(pixel_values=pixels).logits
        return found


def gpt2() -> NextToken:
    return NextToken(lora_models.gpt2())


def vit() -> Scores:
    return Scores(lora_models.vit())


def texts(node: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(node)
    rows = [torch.randint(0, 50, (4, 9), generator=generator) for _ in range(BATCHES[node])]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def pictures(node: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(node)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 0]))
        for _ in range(BATCHES[node])
    ]


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, targets.flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "gpt2": (gpt2, texts, next_token_loss),
    "vit": (vit, pictures, nn.functional.cross_entropy),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_unequal_depth_travel_alone_and_are_merged(kind: str) -> None:
    build, data, loss_fn = KINDS[kind]
    start = build()
    groups = [each.name for each in tensor_groups(start, loss_fn, data(1)[0])]
    parameters = {each.name: each.parameters for each in tensor_groups(start, loss_fn, data(1)[0])}
    names = {node: groups[: len(groups) * node // 3] for node in BATCHES}
    clients = {
        node: ElasticClient(
            build(), data(node), [], budget=Budget(), policy=GivenPolicy(names[node]),
            loss_fn=loss_fn, optimizer_fn=sgd,
        )
        for node in BATCHES
    }  # fmt: skip
    records: list[Any] = []
    apps = {n: elastic_client_app(lambda _, n=n: clients[n]) for n in clients}
    strategy = PartialUpdates(quiet(nodes=3), on_round=records.append)
    result, _ = run(strategy, apps, initial_arrays(start))
    trained = sum(4 * each.numel() for each in start.parameters() if each.requires_grad)
    whole = sum(4 * each.numel() for each in start.parameters())
    assert 3 * (trained + HEADER) < whole
    (record,) = records
    assert len(record.accepted) == 3 and record.downlink_bytes <= trained + HEADER
    for each in record.accepted:
        own = {name for group in names[each.node_id] for name in parameters[group]}
        assert set(each.steps) == own
        sent = sum(4 * start.get_parameter(name).numel() for name in own)
        assert each.uplink_bytes <= sent + HEADER

    ends = {node: copy.deepcopy(start) for node in BATCHES}
    for node, model in ends.items():
        own = {name for group in names[node] for name in parameters[group]}
        optimizer = sgd([each for name, each in model.named_parameters() if name in own])
        model.train()
        plain_steps(model, optimizer, data(node), loss_fn)
    found, manifest = as_weights(result.arrays), Manifest.of(start)
    moved = 0
    for name, before in weights_of(start, manifest, manifest.names).items():
        who = [n for n in BATCHES if any(name in parameters[group] for group in names[n])]
        weights = np.array([BATCHES[n] for n in who]) / sum(BATCHES[n] for n in who)
        after = [ends[n].get_parameter(name).detach().double().numpy() for n in who]
        expected = np.tensordot(weights, np.stack(after), 1)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        moved += not np.array_equal(found[name], before)
    # A is where it was after the first step, as B is zero: one of a client with one batch.
    assert moved > len(manifest) // 2
    for client in clients.values():
        state = client.model.state_dict()
        for name, each in start.state_dict().items():
            assert name in manifest.index or torch.equal(state[name], each), name


def test_what_was_trained_is_exported_in_pefts_own_format(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    clients = {
        node: ElasticClient(
            gpt2(), texts(node), [], budget=Budget(), policy="full", loss_fn=next_token_loss,
            optimizer_fn=sgd, epochs=3,
        )
        for node in BATCHES
    }  # fmt: skip
    apps = {n: elastic_client_app(lambda _, n=n: clients[n]) for n in clients}
    result, _ = run(PartialUpdates(quiet(nodes=3)), apps, initial_arrays(gpt2()), 2)
    trained = gpt2().eval()
    load_weights(trained, Manifest.of(trained), as_weights(result.arrays))
    rows = texts(3)[0][0]
    expected = trained(rows)
    assert not torch.allclose(expected, gpt2().eval()(rows), atol=1e-5)
    trained.model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 8000
    again = peft.PeftModel.from_pretrained(lora_models.gpt2_base(), tmp_path / "adapter").eval()
    assert torch.equal(NextToken(again)(rows), expected)
    merged = trained.model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(NextToken(plain)(rows), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_transformers_needs_no_wrapper_and_no_loss_function() -> None:
    """Its batches are dicts, and it computes its loss from their labels."""
    rows = {node: [batch[0] for batch in texts(node)] for node in BATCHES}
    reference, records = {}, []
    for node, batches in rows.items():
        model = gpt2().model
        optimizer = sgd([each for each in model.parameters() if each.requires_grad])
        model.train()
        for tokens in batches:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        reference[node] = {n: each.detach().clone() for n, each in model.named_parameters()}

    def metrics(outputs: Any, labels: Tensor) -> dict[str, float]:
        right = outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]
        return {"right": float(right.float().mean())}

    def client_of(node: int) -> ElasticClient:
        batches = [
            transformers.BatchEncoding({"input_ids": each, "labels": each}) for each in rows[node]
        ]
        return ElasticClient(
            gpt2().model, batches, batches, budget=Budget(), policy="full", optimizer_fn=sgd,
            metrics_fn=metrics,
        )  # fmt: skip

    apps = {n: elastic_client_app(lambda _, n=n: client_of(n)) for n in BATCHES}
    strategy = PartialUpdates(
        quiet(nodes=3, fraction_evaluate=1.0, min_evaluate_nodes=3), on_round=records.append
    )
    result, _ = run(strategy, apps, initial_arrays(gpt2().model))
    assert [each.num_examples for each in sorted(records[0].accepted, key=lambda a: a.node_id)] == [
        4 * count for count in BATCHES.values()
    ]
    said = result.evaluate_metrics_clientapp[1]
    assert "accuracy" not in said and 0 <= said["right"] <= 1
    total = sum(BATCHES.values())
    for name, each in as_weights(result.arrays).items():
        if "lora_" in name:
            mean = sum(count * reference[n][name] for n, count in BATCHES.items()) / total
            np.testing.assert_allclose(each, mean, rtol=1e-4, atol=1e-6, err_msg=name)
