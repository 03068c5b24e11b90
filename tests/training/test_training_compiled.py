"""Models that torch.compile gave: names without its prefix, eager steps of a trainer, one compilation per plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loop import assert_weights, plain_steps
from slow_ones import slow_unless
from small_models import conv_net, images, loss_fn, sgd
from torch import nn

from fl_elastic import Budget, ElasticTrainer, fine_tune
from fl_elastic.errors import ModelError
from fl_elastic.flower import ElasticClient
from fl_elastic.groups import tensor_groups
from fl_elastic.profiling import profile_model
from fl_elastic.readout import Readout, loaded
from fl_elastic.training import apply_plan, changed, plan_for
from fl_elastic.update import Manifest, load_weights, weights_of


class Compilations:
    """A backend of torch.compile that counts, and leaves the graph as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        forward: Callable[..., Any] = graph.forward
        return forward


def pair() -> tuple[nn.Module, nn.Module, Any, Compilations]:
    """A model, a twin of it, the compiled model, and what counts."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, backend = conv_net(), Compilations()
    return model, copy.deepcopy(model), torch.compile(model, backend=backend), backend


def train(model: nn.Module, called: Any, plan: Any) -> None:
    optimizer = sgd(model.parameters())
    with apply_plan(called, plan, optimizer):
        called.train()
        plain_steps(called, optimizer, images(3), loss_fn)


def test_names_are_those_of_the_model() -> None:
    model, _, compiled, _ = pair()
    assert Manifest.of(compiled).hash == Manifest.of(model).hash
    batch = images(1)[0]
    groups = [group.parameters for group in tensor_groups(compiled, loss_fn, batch)]
    assert groups == [group.parameters for group in tensor_groups(model, loss_fn, batch)]
    assert profile_model(compiled, loss_fn, batch).group_names[0] == "11"
    manifest = Manifest.of(model)
    load_weights(compiled, manifest, weights_of(compiled, manifest))


@pytest.mark.parametrize(
    "policy",
    slow_unless(
        {"head", "tinytrain"}.__contains__,
        ["full", "head", "gradient_filter", "tinytrain", "joint"],
    ),
)
def test_a_loop_of_ones_own_compiles_once_for_a_plan_and_trains_as_without(policy: str) -> None:
    model, twin, compiled, backend = pair()
    base = {name: value.clone() for name, value in compiled.state_dict().items()}
    plan = plan_for(
        compiled, loss_fn, images(2), budget=Budget(speedup=1.6), policy=policy, optimizer_fn=sgd
    )
    train(model, compiled, plan)
    # The layers of `fl_elastic.ops` break the graph: a part on each side of each, once.
    once = backend.count
    train(model, compiled, plan)
    assert backend.count == once
    for _ in range(2):
        train(twin, twin, plan)
    assert_weights(model, twin, rtol=1e-4, atol=1e-5)
    update = changed(compiled, base, plan, steps=6, num_examples=18)
    assert set(plan.trained_parameters) <= set(update.deltas)


def test_a_trainer_and_a_client_run_without_the_compiler_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, twin, compiled, backend = pair()
    trainer = ElasticTrainer(compiled, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(images(3))
    ElasticTrainer(twin, loss_fn, sgd, budget=Budget(), policy="full").fit(images(3))
    assert backend.count == 0 and "its steps run uncompiled" in caplog.text
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    client = ElasticClient(compiled, images(2), images(1), budget=Budget(), loss_fn=loss_fn)
    assert client.manifest.hash == Manifest.of(model).hash
    client.fit(client.get_parameters({}), {})
    assert backend.count == 0


def test_what_would_be_compiled_for_ever_is_refused_with_a_sentence() -> None:
    torch._dynamo.reset()
    inside, in_place, backend = conv_net(), conv_net(), Compilations()
    inside[0] = torch.compile(inside[0], backend=backend)
    in_place.compile(backend=backend)
    for model, named in ((inside, "module '0'"), (in_place, "the model")):
        trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(speedup=2))
        with pytest.raises(ModelError, match=f"{named} runs compiled code"):
            trainer.fit(images(2))
    assert backend.count == 0


@pytest.mark.parametrize("read", ["auto", "last", "2@grid2"])
def test_a_head_reads_where_it_does_without_the_compiler(read: str) -> None:
    _, twin, compiled, backend = pair()
    expected = fine_tune(twin, loss_fn, sgd, images(12), read=read, epochs=0)
    done = fine_tune(compiled, loss_fn, sgd, images(12), read=read, epochs=0)
    assert done.reads == expected.reads and done.head_error == pytest.approx(expected.head_error)
    assert_weights(done.model, dict(expected.model.state_dict()))
    assert not backend.count


@pytest.mark.parametrize("wrapped", ["compiled", "parallel", "plain"])
def test_a_wrapped_model_takes_its_own_state_and_that_of_a_readout(wrapped: str) -> None:
    model, _, compiled, _ = pair()
    around = {"compiled": compiled, "parallel": nn.DataParallel(model), "plain": model}[wrapped]
    inputs = images(1)[0][0]
    readout = Readout(model, "2@grid2", inputs, 4)
    found = loaded(around, readout.state_dict(), inputs)
    assert list(found.state_dict()) == list(readout.state_dict())
    torch.testing.assert_close(found(inputs), readout(inputs))
    for state in (around.state_dict(), model.state_dict()):
        doubled = {name: 2 * value for name, value in state.items()}
        assert loaded(around, doubled, inputs) is around
        assert_weights(model, dict(zip(model.state_dict(), doubled.values(), strict=True)))
