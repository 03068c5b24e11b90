"""A digest of what kept features depend on, so that features of another model are never used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from fl_elastic.groups.forward import tensor_bytes

_DIGEST = 16


def fingerprint(
    modules: Sequence[nn.Module], place: str, others: Iterable[tuple[str, Tensor]] = ()
) -> bytes:
    """Return a digest of the tensors of ``modules``, of other named tensors, and of the place of the features."""
    digest = hashlib.blake2b(place.encode(), digest_size=_DIGEST)
    tensors = [each for module in modules for each in _tensors_of(module).items()]
    for name, tensor in (*tensors, *others):
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor))
    return digest.digest()


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module computes with, including buffers that are not saved."""
    saved = {
        name: each
        for name, each in module.state_dict(keep_vars=True).items()
        if isinstance(each, Tensor)
    }
    return saved | dict(module.named_buffers())
