"""The manifest: names, shapes, dtypes and roles of any model, and the weights that fit it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_models import TiedEmbedding, TiedLinears, chain, conv_net
from torch import nn

from fl_elastic.errors import ModelError, UpdateError
from fl_elastic.update import Manifest, PartialUpdate, decode, encode, load_weights, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import decode_weights, encode_weights


def in_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: conv_net().to(dtype)


class ManyBuffers(nn.Module):
    """Buffers of every kind that can travel, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.packed = nn.Parameter(torch.tensor([2**24 + 1, -5]), requires_grad=False)
        self.register_buffer("mean", torch.tensor([0.25, -7.0]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("bytes", torch.tensor([0, 255], dtype=torch.uint8))
        self.register_buffer("small", torch.tensor([-128, 127], dtype=torch.int8))
        self.register_buffer("private", torch.zeros(3), persistent=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "batch norm": conv_net,
    "tied linears": TiedLinears,
    "tied embedding": TiedEmbedding,
    "many buffers": ManyBuffers,
    "float64": in_dtype(torch.float64),
    "float16": in_dtype(torch.float16),
    "bfloat16": in_dtype(torch.bfloat16),
}
every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_the_manifest_lists_the_state_in_order(name: str) -> None:
    model = MODELS[name]()
    manifest = Manifest.of(model)
    state = model.state_dict()
    assert list(manifest.names) == list(state)
    assert list(manifest.shapes) == [tuple(tensor.shape) for tensor in state.values()]
    assert list(manifest.dtypes) == [str(t.dtype).removeprefix("torch.") for t in state.values()]
    assert len(manifest) == len(state)
    for position, tensor_name in enumerate(manifest.names):
        assert manifest.index[tensor_name] == position
        assert manifest.shape(tensor_name) == tuple(state[tensor_name].shape)


@every_model
def test_weights_come_back_bit_for_bit(name: str) -> None:
    torch.manual_seed(1)
    source, target = MODELS[name](), MODELS[name]()
    for tensor in source.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape))
    manifest = Manifest.of(source)
    load_weights(target, manifest, weights_of(source, manifest))
    for key, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[key]), key


@every_model
def test_weights_are_copies_in_the_manifests_dtypes(name: str) -> None:
    model = MODELS[name]()
    manifest = Manifest.of(model)
    weights = weights_of(model, manifest)
    assert list(weights) == list(manifest.names)
    for key, array in weights.items():
        assert array.dtype == manifest.array_dtype(key)
        assert array.shape == manifest.shape(key)
        array[...] = 1
    again = weights_of(model, manifest)
    assert any((again[key] != weights[key]).any() for key in weights)


def test_roles_tell_parameters_statistics_and_counters() -> None:
    manifest = Manifest.of(conv_net())
    assert manifest.role("0.weight") is manifest.role("1.bias") is Role.PARAMETER
    assert manifest.role("1.running_mean") is manifest.role("1.running_var") is Role.STATISTIC
    assert manifest.role("1.num_batches_tracked") is Role.COUNTER
    many = Manifest.of(ManyBuffers())
    assert many.role("scale") is many.role("nothing") is Role.PARAMETER
    assert many.role("mean") is Role.STATISTIC
    assert {many.role(n) for n in ("flags", "count", "bytes", "small")} == {Role.COUNTER}
    assert "private" not in many.names


def test_parameters_of_integers_are_counters() -> None:
    assert Manifest.of(ManyBuffers()).role("packed") is Role.COUNTER


def test_tied_tensors_are_listed_under_each_name() -> None:
    manifest = Manifest.of(TiedLinears())
    assert {"first.weight", "second.weight"} <= set(manifest.names)
    assert manifest.role("second.weight") is Role.PARAMETER


def test_the_hash_knows_names_order_shapes_and_dtypes() -> None:
    base = Manifest(("a", "b"), ((2,), (3,)), ("float32",) * 2, (Role.PARAMETER,) * 2)
    others = [
        Manifest(("a", "c"), ((2,), (3,)), ("float32",) * 2, (Role.PARAMETER,) * 2),
        Manifest(("b", "a"), ((3,), (2,)), ("float32",) * 2, (Role.PARAMETER,) * 2),
        Manifest(("a", "b"), ((2,), (4,)), ("float32",) * 2, (Role.PARAMETER,) * 2),
        Manifest(("a", "b"), ((2,), (3,)), ("float32", "float64"), (Role.PARAMETER,) * 2),
        Manifest(("a",), ((2,),), ("float32",), (Role.PARAMETER,)),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 6
    assert len(base.hash) == 16 and int(base.hash, 16) >= 0
    assert Manifest.of(chain()).hash == Manifest.of(chain()).hash


def test_roles_do_not_enter_the_hash() -> None:
    one = Manifest(("a",), ((2,),), ("float32",), (Role.PARAMETER,))
    two = Manifest(("a",), ((2,),), ("float32",), (Role.STATISTIC,))
    assert one.hash == two.hash


def test_a_server_that_knows_only_arrays_has_the_same_manifest() -> None:
    model = conv_net()
    manifest = Manifest.of(model)
    arrays = Manifest.of_arrays(weights_of(model, manifest))
    assert arrays.hash == manifest.hash
    assert arrays.roles == manifest.roles


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_cannot_travel_are_named(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("odd", torch.zeros(2).to(dtype))
    with pytest.raises(UpdateError, match="'odd' has dtype"):
        Manifest.of(model)


def test_a_manifest_must_be_consistent() -> None:
    with pytest.raises(UpdateError, match="unique names"):
        Manifest(("a", "a"), ((), ()), ("float32",) * 2, (Role.PARAMETER,) * 2)
    with pytest.raises(UpdateError, match="one shape"):
        Manifest(("a",), (), ("float32",), (Role.PARAMETER,))


def test_weights_that_do_not_fit_are_explained() -> None:
    model = chain()
    manifest = Manifest.of(model)
    weights = weights_of(model, manifest)
    fewer = {name: array for name, array in weights.items() if name != "2.bias"}
    with pytest.raises(UpdateError, match=r"1 tensors missing \['2.bias'\]"):
        load_weights(model, manifest, fewer)
    with pytest.raises(UpdateError, match=r"1 unknown \['extra'\]"):
        load_weights(model, manifest, weights | {"extra": np.zeros(2)})
    with pytest.raises(UpdateError, match=r"'0.bias' has shape \(5,\)"):
        load_weights(model, manifest, weights | {"0.bias": np.zeros(5)})


def test_nothing_is_loaded_when_one_tensor_does_not_fit() -> None:
    model = chain()
    manifest = Manifest.of(model)
    before = weights_of(model, manifest)
    wrong = {name: array + 1 for name, array in before.items()} | {"6.bias": np.zeros(99)}
    with pytest.raises(UpdateError):
        load_weights(model, manifest, wrong)
    after = weights_of(model, manifest)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_bfloat16_model_has_one_hash_on_both_sides() -> None:
    """A server knows it as arrays, in which there is no bfloat16."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    client = Manifest.of(model)
    server = Manifest.of_arrays(weights_of(model, client))
    assert "bfloat16" in client.dtypes and "bfloat16" not in server.dtypes
    assert client.hash == server.hash
    packed = encode_weights(weights_of(model, client), server, version=3)
    weights, version = decode_weights(packed, client)
    load_weights(model, client, weights)
    assert version == 3
    deltas = {"0.weight": np.full((2, 3), 0.25, np.float32)}
    update = PartialUpdate(deltas, {"0.weight": 2}, 5)
    assert decode(encode(update, client), server).deltas["0.weight"].tolist() == [[0.25] * 3] * 2
    # A model of halves is another one.
    assert Manifest.of(model.to(torch.float16)).hash != client.hash


def test_a_lazy_model_is_asked_to_see_a_batch_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ModelError, match=r"'0\.weight' has no shape yet: run the model on a batch"):
        Manifest.of(model)
    model(torch.zeros(1, 3))
    assert Manifest.of(model).shapes[0] == (4, 3)
