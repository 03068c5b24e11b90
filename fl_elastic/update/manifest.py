"""The ordered tensors of the global model, to which every index on the wire refers; a frozen base is left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ModelError, UpdateError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fl_elastic.groups.model_state import ModelState


Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""Tensors of a model by name."""
WeightDict: TypeAlias = dict[str, NDArray[Any]]
"""Tensors of a model by name, in a dict that may be changed."""
FROZEN_BASE = "fl_elastic.frozen_base"
"""Name of the frozen base's digest among a model's weights; no tensor of a torch model can have this name."""

READ_FROM = "read_from"
"""Name of a readout's buffer that holds the places of the model that it reads."""

PROJECTION = "projection"
"""Name of a readout's module that reduces the number of its features."""

_DIGEST = 16


def travelling(model: nn.Module) -> list[str]:
    """Return the names of the tensors that a federation has to send, in the order of the model's state.

    These are all tensors, unless some floating parameters have ``requires_grad=False`` and others do not. Then they
    are the trainable parameters and the buffers that training changes: floating ones, and the counters of one
    number beside them. Not sent are the statistics of a norm whose parameters are all frozen, because it runs in
    eval mode, and buffers of modules whose weights are stored as integers.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> travelling(model) == list(model.state_dict())
    True
    >>> _ = model[:2].requires_grad_(False)
    >>> travelling(model)
    ['2.weight', '2.bias']
    """
    from fl_elastic.groups.trainable import trainable

    state = _state_of(model)
    parameters = list(state.model.parameters())
    flags = [trainable(parameter) for parameter in parameters]
    pairs = list(zip(parameters, flags, strict=True))
    frozen = any(parameter.is_floating_point() for parameter, flag in pairs if not flag)
    if not frozen or not any(flags):
        return list(state.tensors)
    moving = {id(parameter) for parameter, flag in pairs if flag} | _moving_buffers(state.model)
    # Tensors that define which places a head reads, and the directions onto which features are projected.
    reads = (READ_FROM, f"{PROJECTION}.") if READ_FROM in state.tensors else ()
    return [
        name
        for name, tensor in state.tensors.items()
        if id(tensor) in moving or name.startswith(reads)
    ]


def _moving_buffers(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that training may change."""
    from fl_elastic.groups.torch_private import NormWithStatistics
    from fl_elastic.groups.trainable import trainable

    found: set[int] = set()
    for module in model.modules():
        own = [trainable(parameter) for parameter in module.parameters(recurse=False)]
        held = isinstance(module, NormWithStatistics) and bool(own) and not any(own)
        buffers = dict(module.named_buffers(recurse=False))
        floating = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        others = [name for name in buffers if name not in floating]
        counters = [name for name in others if buffers[name].numel() == 1]
        # Scales of quantised weights are left out together with the weights.
        as_integers = len(counters) < len(others) and not any(own)
        if floating and not held and not as_integers:
            found |= {id(buffers[name]) for name in (*floating, *counters)}
    return found


def base_digest(model: nn.Module, names: Collection[str]) -> NDArray[np.uint8] | None:
    """Return a digest of names, dtypes, shapes and values of the tensors outside ``names``; None if there are none.

    Raises
    ------
    UpdateError
        If one of them has no values yet.
    """
    from fl_elastic.groups.forward import tensor_bytes

    state = _state_of(model).tensors
    others = {name: each for name, each in state.items() if name not in names}
    if not others:
        return None
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for name, tensor in others.items():
        if tensor.is_meta:
            raise UpdateError(
                f"tensor {name!r} is on the meta device, without values: load the model's weights first"
            )
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}/".encode())
        digest.update(tensor_bytes(tensor))
    return np.frombuffer(digest.digest(), np.uint8)


def hex_of(digest: NDArray[Any]) -> str:
    """Return a digest as hexadecimal text.

    Raises
    ------
    UpdateError
        If the array is not a digest.
    """
    if digest.dtype != np.uint8 or digest.shape != (_DIGEST,):
        raise UpdateError(
            f"{FROZEN_BASE!r} is {digest.dtype} of shape {digest.shape}, expected {_DIGEST} bytes: take it from "
            "weights_of(model, Manifest.of(model))"
        )
    return digest.tobytes().hex()


FLOATS = ("float16", "bfloat16", "float32", "float64")
_WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")


class Role(StrEnum):
    """Role of a tensor in aggregation."""

    PARAMETER = "parameter"
    STATISTIC = "statistic"
    COUNTER = "counter"


@dataclass(frozen=True)
class Manifest:
    """Names, shapes, dtypes and roles of a model's tensors, in a fixed order.

    Parameters are trained. Statistics are floating buffers, such as BatchNorm's running mean. Counters are integer
    and boolean tensors: the server sends them to clients, and they are never averaged. Roles are not part of the
    hash, because a server may know its model as arrays only.

    Attributes
    ----------
    names, shapes, dtypes, roles : tuple
        One entry per tensor; dtypes are numpy's names, or ``bfloat16`` (held as float32 outside torch).
    base : str
        Digest of the tensors that stay on the device, if known; not part of the hash.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    roles: tuple[Role, ...]
    base: str = ""

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.shapes), len(self.dtypes), len(self.roles)}
        if len(lengths) != 1 or len(set(self.names)) != len(self.names):
            raise UpdateError(
                "a manifest needs one shape, dtype and role for each of its unique names"
            )

    @classmethod
    def of(cls, model: nn.Module, *, whole: bool = False) -> Manifest:
        """Return the manifest of a torch model: of all its tensors, or of those outside its frozen base.

        If some floating parameters have ``requires_grad=False`` and others do not, as with adapters, the former are
        the frozen base: every device has it, and it is not sent. It includes the statistics of norms that are
        frozen completely, integer parameters, and buffers of integers. Flags that a plan has set temporarily are
        ignored.

        Parameters
        ----------
        model : nn.Module
            The model, with the ``requires_grad`` flags of its user.
        whole : bool
            Whether to include the frozen base.

        Raises
        ------
        UpdateError
            If a tensor's dtype cannot be sent (complex, quantised).
        ModelError
            If the shape of a tensor is unknown before the first batch.

        Examples
        --------
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> Manifest.of(model).names
        ('1.weight', '1.bias')
        """
        # Imported here, because a server that only has arrays does not load torch.
        from fl_elastic.groups.forward import is_sparse
        from fl_elastic.groups.model_state import refuse_unshaped

        found = _state_of(model)
        refuse_unshaped(found.model)
        trained = {id(parameter) for parameter in found.model.parameters()}
        state = found.tensors
        if not whole:
            state = {name: state[name] for name in travelling(found.model)}
        for name, tensor in state.items():
            if is_sparse(tensor):
                raise UpdateError(
                    f"tensor {name!r} is sparse, which cannot be sent: register it with persistent=False, so that "
                    "it stays on the device"
                )
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()}
        return cls(
            names=tuple(state),
            shapes=tuple(tuple(tensor.shape) for tensor in state.values()),
            dtypes=_sendable(dtypes),
            roles=tuple(
                Role.PARAMETER
                if id(tensor) in trained and dtypes[name] in FLOATS
                else _buffer_role(dtypes[name])
                for name, tensor in state.items()
            ),
        )

    @classmethod
    def fitting(cls, model: nn.Module, names: Collection[str]) -> Manifest:
        """Return the manifest of the whole model if ``names`` include its frozen base, else that of `of`."""
        whole = cls.of(model, whole=True)
        return whole if all(name in names for name in whole.names) else cls.of(model)

    def with_base(self, model: nn.Module) -> Manifest:
        """Return this manifest with the digest of the model's tensors that it does not list."""
        digest = base_digest(model, self.index)
        return self if digest is None else replace(self, base=hex_of(digest))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Manifest:
        """Return the manifest of named arrays; running statistics are recognised by BatchNorm's names for them."""
        digest = arrays.get(FROZEN_BASE)
        arrays = {name: array for name, array in arrays.items() if name != FROZEN_BASE}
        dtypes = {name: array.dtype.name for name, array in arrays.items()}
        return cls(
            names=tuple(arrays),
            shapes=tuple(tuple(array.shape) for array in arrays.values()),
            dtypes=_sendable(dtypes),
            roles=tuple(
                _buffer_role(dtype)
                if dtype in _WHOLE or name.endswith(("running_mean", "running_var"))
                else Role.PARAMETER
                for name, dtype in dtypes.items()
            ),
            base="" if digest is None else hex_of(digest),
        )

    @cached_property
    def hash(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the manifest's content.

        A bfloat16 tensor counts as the float32 that holds it outside torch: a server that knows its model as arrays
        does not see the difference.
        """
        dtypes = ["float32" if dtype == "bfloat16" else dtype for dtype in self.dtypes]
        content = [self.names, self.shapes, dtypes]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each name."""
        return {name: position for position, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor called ``name``."""
        return self.shapes[self.index[name]]

    def role(self, name: str) -> Role:
        """Return the role of the tensor called ``name``."""
        return self.roles[self.index[name]]

    def array_dtype(self, name: str) -> np.dtype[Any]:
        """Return the numpy dtype that holds the tensor outside torch."""
        dtype = self.dtypes[self.index[name]]
        return np.dtype("float32" if dtype == "bfloat16" else dtype)

    def check_base(self, base: str) -> None:
        """Raise UpdateError if the other side's frozen base differs; an unknown base is accepted."""
        if base and self.base and base != self.base:
            raise UpdateError(
                f"the frozen base of the model differs: its digest is {base[:12]} there and {self.base[:12]} here. "
                "Load the same pretrained weights, in the same dtype, on the server and on every device, or begin "
                "with initial_arrays(model, whole=True), which sends the server's"
            )

    def check_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Raise UpdateError unless ``weights`` has the manifest's names and shapes; a base digest may be added."""
        missing = [name for name in self.names if name not in weights]
        extra = [name for name in weights if name not in self.index and name != FROZEN_BASE]
        if missing or extra:
            raise UpdateError(
                f"weights do not fit the manifest {self.hash}: {len(missing)} tensors missing "
                f"{missing[:3]}, {len(extra)} unknown {extra[:3]}"
            )
        for name in self.names:
            if tuple(weights[name].shape) != self.shape(name):
                raise UpdateError(
                    f"tensor {name!r} has shape {tuple(weights[name].shape)}, "
                    f"the manifest says {self.shape(name)}"
                )


def _sendable(dtypes: Mapping[str, str]) -> tuple[str, ...]:
    for name, dtype in dtypes.items():
        if dtype not in FLOATS + _WHOLE:
            raise UpdateError(
                f"tensor {name!r} has dtype {dtype}, which cannot be sent: keep it as float32, a complex one by "
                "torch.view_as_real, or register a buffer with persistent=False, so that it stays on the device"
            )
    return tuple(dtypes.values())


def is_variance(name: str) -> bool:
    """Return whether a tensor of this name is a BatchNorm's running variance, which is never negative."""
    return name.endswith("running_var")


def _buffer_role(dtype: str) -> Role:
    return Role.STATISTIC if dtype in FLOATS else Role.COUNTER


def _state_of(model: nn.Module) -> ModelState:
    # Imported here: a process with a model has loaded torch, but a server that only has arrays has not.
    from fl_elastic.groups.model_state import ModelState

    return ModelState.of(model)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return a copy of a tensor as it is sent; bfloat16 becomes float32, because numpy does not have it.

    It is a copy because a tensor that shares memory with numpy can never be resized, as quantisation observers do.
    """
    import torch

    if tensor.dtype is torch.bfloat16:
        return tensor.detach().cpu().float().numpy()
    return tensor.detach().to("cpu", copy=True).numpy()


def weights_of(
    model: nn.Module, manifest: Manifest, names: Collection[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Return copies of the model's tensors as numpy arrays, in the manifest's order: all, or those in ``names``.

    If all tensors are requested and the manifest leaves out a frozen base, the digest of the base is added under
    `FROZEN_BASE`, and clients compare it with their own.
    """
    state = _state_of(model).tensors
    digest = None if names is not None else base_digest(model, manifest.index)
    weights = {
        name: array_of(state[name]) for name in manifest.index if names is None or name in names
    }
    return weights if digest is None else {**weights, FROZEN_BASE: digest}


def places_of(state: Mapping[str, Any]) -> str:
    """Return the name of the places that the readout with this state reads; empty for any other model's state.

    >>> places_of({"weight": np.ones(2)})
    ''
    """
    found = state.get(READ_FROM)
    if found is None:
        return ""
    # A tensor may be on an accelerator, whose memory numpy cannot read.
    array = found.cpu() if hasattr(found, "cpu") else found
    return bytes(np.asarray(array, dtype=np.uint8)).decode(errors="replace")


def refuse_other_places(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UpdateError if a state belongs to a readout of other places, even if all shapes are the same."""
    reads, wanted = places_of(own), places_of(given)
    if reads and wanted and reads != wanted:
        raise UpdateError(
            f"the weights are of a model that reads {wanted}, and this one reads {reads}: "
            "fl_elastic.readout.loaded makes the model that a state belongs to"
        )


def load_weights(model: nn.Module, manifest: Manifest, weights: Mapping[str, NDArray[Any]]) -> None:
    """Copy ``weights`` into the model.

    Raises
    ------
    UpdateError
        If the weights do not fit the manifest, include the digest of another frozen base than the model's, or
        cannot be written into the model's tensors.
    """
    import torch

    manifest.check_weights(weights)
    if FROZEN_BASE in weights:
        manifest.with_base(model).check_base(hex_of(np.asarray(weights[FROZEN_BASE])))
    values = {name: torch.as_tensor(np.array(weights[name])) for name in manifest.names}
    state = _state_of(model)
    refuse_other_places(state.tensors, values)
    try:
        state.load(values)
    except ModelError as error:
        raise UpdateError(str(error)) from error
