"""What cannot be trained is refused with the reason, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.errors import ElasticError, ModelError, TrainingError
from fl_elastic.flower import ElasticClient
from fl_elastic.groups import tensor_groups
from fl_elastic.profiling import profile_model
from fl_elastic.training import plan_for
from fl_elastic.update import Manifest


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(2)]


def scripted() -> Any:
    return torch.jit.script(nn.Linear(3, 2))


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 2)


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "TorchScript": (scripted, "TorchScript module, .*nn.Module that it was made from"),
    "a class": (lambda: Net, r"model Net is not a torch module but a class: give Net\(\.\.\.\)"),
    "a function": (
        lambda: torch.relu,
        "model of type builtin_function_or_method is not a torch module",
    ),
    "a state": (lambda: Net().state_dict(), "model of type OrderedDict is not a torch module"),
}
WAYS: dict[str, Callable[[Any], object]] = {
    "trainer": lambda model: ElasticTrainer(model, cross_entropy, sgd, budget=Budget()),
    "client": lambda model: ElasticClient(model, data(), data(), budget=Budget()),
    "manifest": Manifest.of,
    "groups": lambda model: tensor_groups(model, cross_entropy, data()[0]),
    "profile": lambda model: profile_model(model, cross_entropy, data()[0]),
    "own loop": lambda model: plan_for(model, cross_entropy, data(), budget=Budget()),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_module_with_parts_is_refused(kind: str, way: str) -> None:
    make, reason = MODELS[kind]
    with pytest.raises(ModelError, match=reason) as caught:
        WAYS[way](make())
    assert "\n" not in str(caught.value)


def test_weights_made_in_inference_mode_are_refused() -> None:
    model = made_for_inference()
    with pytest.raises(ModelError, match="made in inference mode"):
        ElasticTrainer(model, cross_entropy, sgd, budget=Budget()).fit(data())
    client = ElasticClient(model, data(), data(), budget=Budget())
    with pytest.raises(ElasticError, match="made in inference mode"):
        client.fit([np.zeros((2, 3), np.float32), np.zeros(2, np.float32)], {})


@pytest.mark.parametrize("epochs", [2, np.int64(2), np.uint8(2), torch.tensor(2)])
def test_epochs_are_any_whole_number(epochs: Any) -> None:
    trainer = ElasticTrainer(nn.Linear(3, 2), cross_entropy, sgd, budget=Budget(), policy="full")
    assert trainer.fit(data(), epochs).steps == 4


@pytest.mark.parametrize("epochs", [0, -1, 1.5, np.float64(2), "2", None, True])
def test_epochs_that_are_none_are_refused(epochs: Any) -> None:
    trainer = ElasticTrainer(nn.Linear(3, 2), cross_entropy, sgd, budget=Budget(), policy="full")
    with pytest.raises(TrainingError, match="must be a whole number"):
        trainer.fit(data(), epochs)


class OpenedByWorkers(Dataset[tuple[Tensor, int]]):
    """Has no file until a worker has opened it."""

    file: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.file.read(index), index % 2

    def read(self, index: int) -> Tensor:
        return torch.full((3,), float(index))


def opened(worker: int) -> None:
    del worker
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.file = info.dataset


@pytest.mark.parametrize("named", ["", "seven"])
def test_a_dataset_that_its_workers_open_trains_a_client_with_and_without_a_name(
    named: str,
) -> None:
    loader = DataLoader(OpenedByWorkers(), batch_size=4, num_workers=1, worker_init_fn=opened)
    client = ElasticClient(nn.Linear(3, 2), loader, loader, budget=Budget(), client_id=named)
    _, examples, metrics = client.fit(client.get_parameters({}), {})
    assert examples == 8 and metrics["steps"] == 2


@pytest.mark.parametrize("profiled", [False, True])
def test_a_loss_without_a_gradient_is_refused_as_torch_does(profiled: bool) -> None:
    """As where scores are detached on their way to the loss; known costs are no reason to look away."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    profile = profile_model(model, cross_entropy, data()[0], optimizer_fn=sgd) if profiled else None
    before = {name: each.clone() for name, each in model.state_dict().items()}

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(scores.detach(), targets)

    trainer = ElasticTrainer(model, loss, sgd, budget=Budget(), policy="full", profile=profile)
    with pytest.raises(ModelError, match="no trainable parameter takes part in the loss"):
        trainer.fit(data())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
