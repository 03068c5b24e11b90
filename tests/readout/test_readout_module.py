"""A readout is the first part of its model, whatever the model is, and an ordinary module."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from plain_loop import assert_weights, plain_steps
from readouts import ODD, hooked_features, of_zoo, ran_before
from slow_ones import slow_unless
from torch import Tensor, nn

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.errors import ElasticError, ModelError, PlanError, UpdateError
from fl_elastic.groups import tensor_groups
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.untouched import untouched
from fl_elastic.profiling import profile_model
from fl_elastic.readout import loaded
from fl_elastic.readout.candidates import candidate_places
from fl_elastic.readout.place import INPUT, Place, parse_places
from fl_elastic.readout.readout_module import Readout, _PassedBy, kept_tensors
from fl_elastic.testing.probes import Snapshot
from fl_elastic.update.manifest import Manifest, load_weights, places_of, weights_of

ZOO = {
    "vision_models": (
        "resnet18", "shufflenet", "densenet", "swin_v2", "vision_transformer",
    ),
    "language_models": ("bert_classifies", "fnet_fourier"),
    "sensing_models": ("convnext_classifies",),
    "unusual_models": (
        "checkpoint_wrapper", "extra_state", "target_that_follows", "graphs_as_objects",
    ),
}  # fmt: skip
ROWS = [(module, name) for module, names in ZOO.items() for name in names]


def check(model: nn.Module, places: tuple[Place, ...], inputs: Any) -> Readout:
    """The readout is what the hooked model gives, and nothing of the model is changed."""
    before = Snapshot(model)
    readout = Readout(model, places, inputs, 3)
    assert before.differences() == []
    assert not readout.head.weight.any() and not readout.head.bias.any()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        readout.head.weight.copy_(torch.randn(readout.head.weight.shape, generator=generator))
        readout.head.bias.copy_(torch.randn(3, generator=generator))
    expected = nn.functional.linear(
        hooked_features(model, places, inputs), readout.head.weight, readout.head.bias
    )
    modes = [(module, module.training) for module in readout.modules()]
    readout.eval()
    with torch.no_grad():
        found = called(readout, inputs)
    for module, mode in modes:
        module.training = mode
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    tensors = ModelState.of(readout).tensors
    own = {name.removeprefix("body.") for name in tensors if name.startswith("body.")}
    kept = kept_tensors_of(model, places, inputs)
    assert own == kept, (own ^ kept, places)
    return readout


def called(model: nn.Module, inputs: Any) -> Tensor:
    found: Tensor = (
        model(**inputs) if isinstance(inputs, dict)
        else model(*inputs) if isinstance(inputs, tuple)
        else model(inputs)
    )  # fmt: skip
    return found


def kept_tensors_of(model: nn.Module, places: tuple[Place, ...], inputs: Any) -> set[str]:
    with untouched(model):
        # In any mode: with dropout no two passes are equal.
        model.train()
        kept = kept_tensors(model, places, inputs)
        assert model.training
    return {name for names in kept.values() for name in names}


@pytest.mark.parametrize(("name", "places"), [(n, p) for n, (_, all_) in ODD.items() for p in all_])
def test_an_odd_model_is_read_as_hooks_see_it(name: str, places: str) -> None:
    torch.manual_seed(0)
    model, inputs = ODD[name][0]()
    check(model, parse_places(places), inputs)


@pytest.mark.parametrize(("module", "name"), slow_unless(lambda *row: row in ROWS[::3], ROWS))
def test_models_that_people_bring_are_read_as_hooks_see_them(module: str, name: str) -> None:
    model, inputs = of_zoo(module, name)
    places = candidate_places(model, (inputs, torch.zeros(4, dtype=torch.long)), 4000)
    assert places
    inner = [place for place in places if place.module != INPUT]
    some = {places[0], places[-1], inner[len(inner) // 2], inner[len(inner) // 4]}
    for place in sorted(some):
        check(model, (place,), inputs)
    check(model, tuple(sorted({places[0], inner[0], inner[-1]})), inputs)


CUT = [
    ("vision_models", "resnet18", "layer2@grid2"),
    ("vision_models", "mobilenet_v3_small", "features.4@grid2"),
    ("vision_models", "vision_transformer", "encoder.layers.encoder_layer_0@tokens1"),
]


@pytest.mark.parametrize(("module", "name", "place"), CUT)
def test_no_module_runs_that_stands_after_the_place(module: str, name: str, place: str) -> None:
    model, inputs = of_zoo(module, name)
    before = ran_before(model, Place.parse(place), inputs)
    readout = Readout(model, place, inputs, 3).eval()
    whole = [each for each, inner in model.named_modules() if not list(inner.children())]
    assert 0 < len(set(before)) < len(whole)
    ran: list[str] = []
    for each, inner in readout.body.named_modules():
        if not list(inner.children()) and not isinstance(inner, _PassedBy):
            inner.register_forward_pre_hook(lambda *_, each=each: ran.append(each))
    readout(inputs)
    assert ran == before
    late = set(whole) & ran_in(model, inputs) - set(before)
    kept = {name.rpartition(".")[0] for name, _ in readout.body.named_parameters()}
    assert late and not kept & late
    numbers = sum(each.numel() for each in readout.body.parameters())
    assert numbers < sum(each.numel() for each in model.parameters())


def ran_in(model: nn.Module, inputs: Any) -> set[str]:
    """The modules that run in a whole pass, but for the last one's own end."""
    last = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)][-1]
    return {*ran_before(model, Place(last, "flat", at_input=True), inputs), last}


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    return model, torch.randn(5, 1, 10, 10)


PLACES = [
    "0@grid2",
    "2@grid4",
    "3@grid1",
    "0@grid2+3@grid2",
    "input@grid2+2@grid2",
    "mirrored:input@grid2+2@grid2",
    "input@random64",
]


def readout_of(places: str) -> tuple[Readout, Tensor]:
    model, inputs = small()
    readout = Readout(model, places, inputs, 3).eval()
    nn.init.normal_(readout.head.weight)
    return readout, inputs


@pytest.mark.parametrize("places", PLACES)
def test_copies_and_pickles_are_the_same(places: str) -> None:
    readout, inputs = readout_of(places)
    for other in (deepcopy(readout), pickle.loads(pickle.dumps(readout))):
        assert torch.equal(other(inputs), readout(inputs))
        assert list(other.state_dict()) == list(readout.state_dict())
        assert not {id(p) for p in other.parameters()} & {id(p) for p in readout.parameters()}


@pytest.mark.parametrize("places", PLACES[3:])
def test_tracers_can_follow_it(places: str) -> None:
    readout, inputs = readout_of(places)
    exported = torch.export.export(readout, (inputs,), strict=False).module()
    traced = torch.jit.trace(readout, (inputs,))  # type: ignore[no-untyped-call]
    other = torch.randn_like(inputs)
    for one in (exported, traced):
        torch.testing.assert_close(one(other), readout(other))


class Tokens(nn.Module):
    """Rows of an image of two channels as tokens, in place of channels-first maps."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(2).movedim(1, -1)


def tokens_of(places: str) -> tuple[Readout, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Tokens(), nn.Linear(4, 5), nn.Flatten())
    inputs = torch.randn(4, 3, 8, 8)
    readout = Readout(model, places, inputs, 3).eval()
    nn.init.normal_(readout.head.weight)
    return readout, inputs


@pytest.mark.parametrize("places", [*PLACES[3:], "2@tokens2", "mirrored:2@tokens3>6"])
@pytest.mark.parametrize("way", ["export", "trace"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_tracers_give_takes_any_number_of_examples(places: str, way: str) -> None:
    readout, inputs = (tokens_of if "tokens" in places else readout_of)(places)
    if readout.projection is not None:
        readout.projection.matrix.random_(-100, 100)
    batch = torch.export.Dim("batch")
    found = (
        torch.export.export(
            readout, (inputs,), dynamic_shapes=(({0: batch},),), strict=False
        ).module()
        if way == "export"
        else torch.jit.trace(readout, (inputs,), check_trace=False)  # type: ignore[no-untyped-call]
    )
    for examples in (1, 3, 7):
        other = torch.randn(examples, *inputs.shape[1:])
        torch.testing.assert_close(found(other), readout(other))


@pytest.mark.parametrize("places", slow_unless(PLACES[-1].__eq__, PLACES[3:]))
def test_it_is_a_model_of_onnx(places: str, tmp_path: Any) -> None:
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    readout, inputs = readout_of(places)
    path = tmp_path / "model.onnx"
    torch.onnx.export(readout, (inputs,), path, dynamo=True, verbose=False)
    onnx.checker.check_model(str(path))
    session = reference.ReferenceEvaluator(str(path))
    (found,) = session.run(None, {session.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found), readout(inputs).detach(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("as_arrays", [True, False])
def test_a_state_alone_tells_where_it_reads(places: str, as_arrays: bool) -> None:
    readout, inputs = readout_of(places)
    state: Any = {name: each.clone() for name, each in readout.state_dict().items()}
    assert places_of(state) == places
    if as_arrays:
        state = {name: each.numpy() for name, each in state.items()}
    torch.manual_seed(7)
    fresh = nn.Sequential(*[deepcopy(each) for each in small()[0]])
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    found = loaded(fresh, state, inputs).eval()
    assert isinstance(found, Readout)
    assert torch.equal(found(inputs), readout(inputs))


def test_the_state_of_any_other_model_is_loaded_into_it() -> None:
    model, inputs = small()
    state = {name: each + 1 for name, each in model.state_dict().items()}
    found = loaded(model, state, inputs)
    assert found is model
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("places", ["", "2@grid2"])
@pytest.mark.parametrize("damage", ["missing", "more", "shape"])
def test_a_state_that_does_not_fit_changes_nothing(places: str, damage: str) -> None:
    model, inputs = small()
    readout = Readout(model, places, inputs, 3) if places else model
    state: Any = {name: each.clone() + 1 for name, each in readout.state_dict().items()}
    if places:
        state["read_from"] -= 1
    name = next(name for name in state if name.endswith("weight"))
    if damage == "missing":
        del state[name]
    elif damage == "more":
        state["nobody's"] = torch.ones(3)
    else:
        state[name] = torch.ones(2, 2)
    before = Snapshot(model)
    with pytest.raises(ElasticError):
        loaded(model, state, inputs)
    assert before.differences() == []


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ("nowhere@grid2", "no module 'nowhere'"),
        ("0@grid40", "does not fit"),
        ("7@tokens1", "token pooling needs"),
        ("0@random7", "at least 16"),
        ("0@nothing", "unknown pooling"),
        ("auto", "names no place"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_read_says_why_and_changes_nothing(places: str, words: str) -> None:
    model, inputs = small()
    before = Snapshot(model)
    with pytest.raises(ElasticError, match=words):
        Readout(model, places, inputs, 3)
    assert before.differences() == []


def test_a_module_that_the_pass_does_not_come_by_and_one_without_a_tensor_are_refused() -> None:
    model, inputs = small()
    model[2].add_module("aside", nn.Linear(2, 2))
    with pytest.raises(PlanError, match="does not run"):
        Readout(model, "2.aside@flat", inputs, 3)
    recurrent, given = ODD["recurrent"][0]()
    with pytest.raises(ModelError, match="output is a tuple"):
        Readout(recurrent, "rnn@flat", given, 3)


def test_inputs_of_another_size_are_refused_where_they_give_other_features() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Tanh())
    for places in ("1@flat", "1@flat>2"):
        readout = Readout(model, places, torch.zeros(2, 12, dtype=torch.long), 3)
        assert readout(torch.zeros(3, 12, dtype=torch.long)).shape == (3, 3)
        with pytest.raises(
            PlanError, match=r"gives 60 features per example for these inputs, and 48 .*on a grid"
        ):
            readout(torch.zeros(3, 15, dtype=torch.long))


def test_a_fleet_cannot_read_inside_a_model_that_renames_its_state_and_is_told() -> None:
    model, inputs = of_zoo("unusual_models", "renamed_state")
    with pytest.raises(ModelError, match="has other names"):
        kept_tensors_of(model, (Place("hidden", "flat"),), inputs)
    assert Readout(model, "hidden@flat", inputs, 3)(inputs).shape == (4, 3)


def test_a_model_that_raises_on_the_way_is_left_as_it_was() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not today")

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.5), Raises(), nn.Conv2d(2, 2, 3))
    inputs = torch.randn(2, 1, 8, 8)
    before = Snapshot(model)
    with pytest.raises(RuntimeError, match="not today"):
        Readout(model, "3@grid1", inputs, 3)
    assert before.differences() == []


@pytest.mark.parametrize("places", PLACES[:6])
def test_it_is_trained_planned_and_grouped_like_any_model(places: str) -> None:
    readout, inputs = readout_of(places)
    batches = [(torch.randn_like(inputs), torch.randint(0, 3, (5,))) for _ in range(3)]
    loss = nn.functional.cross_entropy
    groups = tensor_groups(readout, loss, batches[0])
    named = [name for group in groups for name in group.parameters]
    assert groups[0].name == "head"
    assert sorted(named) == sorted(name for name, _ in readout.named_parameters())
    assert profile_model(readout, loss, batches[0]).full_step_seconds > 0
    plain = deepcopy(readout).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_steps(plain, optimizer, batches, loss)
    trainer = ElasticTrainer(
        readout.train(), loss, lambda p: torch.optim.SGD(p, lr=0.1), budget=Budget(), policy="full"
    )
    assert trainer.fit(batches).steps == 3
    assert_weights(readout, plain)
    assert "read_from" not in trainer.update().deltas


@pytest.mark.parametrize("way", ["state dict", "not strict", "inside another", "weights"])
def test_a_state_of_other_places_with_the_same_shapes_is_refused(way: str) -> None:
    """The outputs of the norm and of the function after it differ, and no tensor's name or shape tells."""
    given, inputs = readout_of("1@grid2")
    readout, _ = readout_of("2@grid2")
    nn.init.normal_(given.head.weight)
    before = readout(inputs)
    with pytest.raises(UpdateError, match=r"reads 1@grid2, and this one reads 2@grid2.*loaded"):
        if way == "weights":
            load_weights(readout, Manifest.of(readout), weights_of(given, Manifest.of(given)))
        elif way == "inside another":
            whole = nn.ModuleDict({"part": readout})
            whole.load_state_dict(nn.ModuleDict({"part": given}).state_dict())
        else:
            readout.load_state_dict(given.state_dict(), strict=way != "not strict")
    assert torch.equal(readout(inputs), before)
    readout.load_state_dict({"head.bias": torch.ones(3)}, strict=False)
    assert not torch.equal(readout(inputs), before)


def test_places_are_read_from_a_tensor_on_another_device() -> None:
    class Elsewhere(Tensor):
        """As on an accelerator, whose memory numpy does not read."""

        def __array__(self, *_: Any) -> Any:  # type: ignore[override]
            raise TypeError("can't convert a device type tensor to numpy: use Tensor.cpu()")

        def cpu(self) -> Tensor:  # type: ignore[override]
            return self.as_subclass(Tensor)

    readout, _ = readout_of("2@grid2")
    readout.read_from = readout.read_from.as_subclass(Elsewhere)
    assert places_of(ModelState.of(readout).tensors) == "2@grid2"
