"""The model of a client: as its owner gave it, or with a head that reads elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from fl_elastic.groups import Batch
from fl_elastic.groups.batch import CountExamples, ExampleCounter, as_pair
from fl_elastic.groups.model_state import ModelState
from fl_elastic.groups.trainable import flags_of
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.loader import first_batches
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import places_of


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A model and the manifest of what it sends.

    Attributes
    ----------
    given : nn.Module
        The owner's model.
    module : nn.Module
        The model in use: ``given``, or a `Readout` of it.
    places : str
        Places of the model that its head reads; empty for its end.
    manifest : Manifest
        The tensors that travel, and the digest of the frozen base.
    flags : tuple
        The ``requires_grad`` flags for which ``manifest`` holds.
    """

    given: nn.Module
    module: nn.Module
    places: str
    manifest: Manifest
    flags: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, model: nn.Module) -> ClientModel:
        """Return the owner's model, whose head may already read elsewhere."""
        places = places_of(ModelState.of(model).tensors)
        return cls(model, model, places, Manifest.of(model).with_base(model), flags_of(model))

    def up_to_date(self) -> ClientModel:
        """Return the model with a manifest by the present flags; itself if these have not changed."""
        flags = flags_of(self.module)
        if flags == self.flags:
            return self
        found = Manifest.of(self.module)
        base = self.manifest.base
        manifest = replace(found, base=base) if self.places else found.with_base(self.module)
        return replace(self, manifest=manifest, flags=flags)

    def reading(
        self, places: str, loader: Iterable[Batch], count_examples: CountExamples | None
    ) -> ClientModel:
        """Return the model whose head reads these places; if there are none, the model as it was given.

        Parameters
        ----------
        places : str
            See `fl_elastic.readout.place`.
        loader : iterable of batches
            Shows the shape of the inputs.
        count_examples : callable, optional
            See `fl_elastic.training.TrainerOptions`.
        """
        module = self.given
        if places:
            # Imported here: only clients whose head moves need it.
            from fl_elastic.readout.first_pass import FirstPass
            from fl_elastic.readout.readout_module import Readout

            batch = first_batches(
                loader, 1, model_device(self.module), ExampleCounter(count_examples)
            )[0]
            inputs = as_pair(batch)[0]
            module = Readout(module, places, inputs, FirstPass.of(module, (inputs, inputs)).outputs)
        # The frozen base is the same as in the given model.
        manifest = replace(Manifest.of(module), base=self.manifest.base)
        return ClientModel(self.given, module, places, manifest, flags_of(module))
