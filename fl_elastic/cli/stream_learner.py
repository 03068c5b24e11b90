"""The learner of a stream's state folder, as the commands of ``fl-elastic stream`` open it."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_elastic.errors import StreamDataError, StreamError
from fl_elastic.registry import first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fl_elastic.streaming import StreamLearner


@dataclass(frozen=True)
class Opening:
    """Settings with which a learner is opened.

    Parameters
    ----------
    model : str
        A model of the simulation, a torchvision name, or ``module:callable``.
    state_dir : Path
        Folder of the store and the learned model.
    shape : tuple of int
        Shape of one sample.
    outputs : int
        Number of classes at the beginning.
    latent : int
        Number of tensor groups below which features are kept; 0 keeps inputs.
    seed : int
        Seed of random choices.
    closed_form : bool
        Whether the last layer is solved from running sums and nothing is trained by steps.
    remember : float, optional
        With a head in closed form: number of further samples after which one's weight is 1/e; by default all have
        equal weight.
    read : str
        Where a head in closed form reads: ``last`` for the last layer's input, or names of places.
    """

    model: str
    state_dir: Path
    shape: tuple[int, ...]
    outputs: int = 2
    latent: int = 0
    seed: int = 0
    speedup: float | None = None
    deadline: float | None = None
    policy: str = "elastic"
    detector: str = "adwin"
    every: int = 50
    steps: int = 50
    learning_rate: float = 1e-3
    capacity: int | None = None
    closed_form: bool = False
    remember: float | None = None
    read: str = "last"

    def __post_init__(self) -> None:
        if self.read != "last" and not self.closed_form:
            raise StreamError("--read needs a head in closed form: give --closed-form, too")
        from fl_elastic.readout.place import Reading

        if self.read != "last" and not Reading.parse(self.read).places:
            raise StreamError(
                "--read takes places chosen beforehand: fl-elastic plan MODEL --read --data DATA names them"
            )
        if self.remember is not None and not self.closed_form:
            raise StreamError("--remember needs a head in closed form: give --closed-form, too")
        if self.latent and self.closed_form:
            raise StreamError(
                "--closed-form stores the inputs of the last layer: leave --latent out, or train by steps"
            )

    @property
    def _store(self) -> Path:
        return self.state_dir / "samples.db"

    @property
    def _encoding(self) -> str:
        return "int8" if self.latent else "raw"

    def _refuse_other_latent(self) -> None:
        """Raise StreamDataError if the store was made with --latent and is to be used without it, or vice versa."""
        from fl_elastic.streaming.store.sample_store import settings_of

        if not self._store.is_file():
            return
        # A damaged file is renamed later.
        with suppress(sqlite3.Error):
            if settings_of(self._store).get("encoding_name", self._encoding) != self._encoding:
                before, do = (
                    ("without", "leave it out") if self.latent else ("with", "give it as before")
                )
                raise StreamDataError(
                    f"samples were kept in {self.state_dir} {before} --latent so far: {do}, or give another "
                    "--state-dir"
                )

    @contextmanager
    def learner(self) -> Iterator[tuple[StreamLearner, NDArray[Any]]]:
        """Lock the state folder; yield the learner and a sample of zeros. The caller saves the state."""
        import torch

        from fl_elastic.budget import Budget
        from fl_elastic.named_models import build_model
        from fl_elastic.planning import POLICIES
        from fl_elastic.streaming import (
            ClosedForm,
            Latent,
            SampleStore,
            StreamLearner,
            StreamOptions,
            Trigger,
        )
        from fl_elastic.streaming.disk_room import fitting_capacity, saved_sums_bytes, state_bytes
        from fl_elastic.streaming.growing_head import last_linear
        from fl_elastic.training.lean_start import without_compiler

        # The process serves this learner only.
        without_compiler()
        POLICIES.make(self.policy)
        network = build_model(self.model, self.shape, self.outputs, self.seed)
        example = check_input(network, self.model, self.shape)
        if self.read != "last":
            # Imported here: only learners whose head reads other places need it.
            from fl_elastic.readout.readout_module import Readout

            network = Readout(network, self.read, example, last_linear(network).out_features)
        head = ClosedForm(self.remember) if self.closed_form else None
        tensors = [
            tensor.numel() * tensor.element_size() for tensor in network.state_dict().values()
        ]
        state = state_bytes(tensors, 4 * math.prod(self.shape))
        if self.closed_form:
            layer = last_linear(network)
            state += saved_sums_bytes(layer.in_features, layer.out_features)
        self._refuse_other_latent()
        with SampleStore(
            self._store, fitting_capacity(self.state_dir, self.capacity, state),
            encoding=self._encoding, seed=self.seed,
        ) as store:  # fmt: skip
            learner = StreamLearner(
                network, store, budget=Budget(speedup=self.speedup, deadline=self.deadline),
                policy=self.policy,
                optimizer_fn=lambda parameters: torch.optim.Adam(parameters, lr=self.learning_rate),
                trigger=Trigger(self.every), detector=self.detector,
                state_dir=self.state_dir, seed=self.seed,
                latent=Latent(self.latent) if self.latent else None, head=head,
                options=StreamOptions(steps=self.steps),
            )  # fmt: skip
            try:
                yield learner, example.numpy()[0]
            finally:
                learner.close(save=False)


def check_input(network: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a zero sample in the model's input type; raise StreamError if shape or outputs do not fit a stream."""
    import numpy as np
    import torch

    from fl_elastic.errors import ModelError
    from fl_elastic.groups.untouched import untouched
    from fl_elastic.streaming.body import WholeModel, as_floats

    reasons = []
    # Token ids are integers.
    for kind in (np.float32, np.int64):
        try:
            sample = np.zeros((1, *shape), kind)
            with untouched(network):
                WholeModel(network.eval(), as_floats).looks(sample)
            return as_floats(torch.from_numpy(sample))
        except ModelError as error:
            raise StreamError(f"model {name}: {error}") from None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reasons.append(first_line(error))
    raise StreamError(
        f"model {name} does not take a sample of shape {','.join(map(str, shape))} ({reasons[0]}): give with "
        "--input the shape that it is made for"
    )
