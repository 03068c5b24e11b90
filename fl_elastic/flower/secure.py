"""Partial training under secure aggregation: clients of a round send the same tensors; the server sees their sum.

Flower's secure aggregation works with its legacy strategies, and sums lists of arrays of equal shapes. So the
server chooses one set of tensor groups for all clients, and clients send only the tensors of these groups, as
unpacked arrays.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.closed_form.secret_sums import FixedPoint
from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.flower._compat import (
    ClientManager,
    ClientProxy,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    LegacyStrategy,
    Parameters,
    SecAggPlusWorkflow,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from fl_elastic.flower.capabilities import read_importance
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.records import IMPORTANCE, TENSORS
from fl_elastic.flower.round import one_line
from fl_elastic.flower.round_config import GIVEN_PLACES, RoundConfig
from fl_elastic.flower.tasks.describe import Describe
from fl_elastic.flower.tasks.solve_head import SolveHead

_LOG = logging.getLogger("fl_elastic")
_PATIENCE_SECONDS = 120.0
_ROUNDING = 1e-3
_Fitted = tuple[ClientProxy, FitRes]


class SecurePartialUpdates(LegacyStrategy):
    """Lets clients under ``SecAggPlusWorkflow`` train and send one part of the model, the same for all clients.

    The server learns the weighted mean of the tensors that it chose, and the clients' metrics, such as the loss and
    the importance of groups.

    The workflow rounds weights to steps of ``2 * clipping_range / quantization_range``, times ``max_weight`` over
    the client's number of examples: choose a ``max_weight`` not far above that number. It also clips them, without
    a warning, to ``clipping_range`` times the same ratio: choose a ``clipping_range`` above the largest weight and
    running variance. A round with clipped weights, or with more clients than the workflow's modulus allows, changes
    nothing, and a warning names the setting to change.

    Parameters
    ----------
    inner : flwr.server.strategy.Strategy
        Samples clients and takes the mean, as a legacy strategy does; it sees whole models.
    config : RoundConfig, optional
        Deadline and head; the server always makes the plan. With ``read="last"`` clients send sums instead of
        training in the first successful round. The server gets their total over all examples, and that over a fifth
        of the examples, which is held out to choose the penalty; from these it solves for the head. With
        ``sums_privacy`` the server gets only the first total and adds noise to it.
    workflow : SecAggPlusWorkflow
        The workflow that runs the strategy: its settings bound the sums, and determine the fixed-point format of
        the sums for the head.

    Raises
    ------
    SettingError
        If the config asks for what is impossible under secure aggregation.
    """

    def __init__(
        self,
        inner: LegacyStrategy,
        *,
        workflow: SecAggPlusWorkflow,
        config: RoundConfig | None = None,
    ) -> None:
        self.inner = inner
        self._workflow = workflow
        self.fleet = ClientRegistry(replace(config or RoundConfig(), plan="server"))
        if self.fleet.config.sends_changes:
            raise SettingError(
                "under secure aggregation clients are sent the whole model: leave out delta_downlink and cut"
            )
        if self.fleet.config.forget:
            raise SettingError(
                "forgetting takes squared gradients of each client, which secure aggregation hides: forget=False"
            )
        if self.fleet.config.reads_inside:
            raise SettingError(
                f"read {self.fleet.config.read!r} is chosen from features that the server sees: {GIVEN_PLACES}"
            )
        self._arrays: list[NDArray[Any]] = []
        self._fixed: FixedPoint | None = None
        if self.fleet.config.solves_head:
            if self.fleet.config.solve_every:
                raise SettingError(
                    "under secure aggregation the head is solved for once: give solve_every=0 in the config"
                )
            self._fixed = FixedPoint(
                workflow.quantization_range, workflow.clipping_range, workflow.max_weight
            )

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Delegate to the inner strategy."""
        return self.inner.initialize_parameters(client_manager)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Let the inner strategy choose clients, and add the groups that all of them train."""
        self._arrays = parameters_to_ndarrays(parameters)
        chosen = self.inner.configure_fit(
            server_round=server_round, parameters=parameters, client_manager=client_manager
        )
        if self._fixed is not None:
            zero = self._sums_task(self._fixed).to_config()
            return [
                (proxy, FitIns(ins.parameters, {**ins.config, **zero})) for proxy, ins in chosen
            ]
        for proxy, _ in chosen:
            self._ask(proxy, server_round)
        self.fleet.gather(proxy.node_id for proxy, _ in chosen)
        config = self.fleet.training(chosen[0][0].node_id).to_config() if chosen else {}
        return [
            (proxy, FitIns(instruction.parameters, {**instruction.config, **config}))
            for proxy, instruction in chosen
        ]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[_Fitted],
        failures: list[_Fitted | BaseException],
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Put the trained tensors into the global model, and let the inner strategy aggregate.

        A tensor that was not trained keeps its value, whatever the inner strategy does with it.
        """
        if self._fixed is not None:
            return self._solved(server_round, self._fixed, results), {}
        try:
            trained = self._trained(results)
            self._refuse_clipped(results, trained)
        except UpdateError as error:
            _LOG.warning("round %s changes nothing: %s", server_round, one_line(str(error)))
            return None, {}
        self.fleet.weigh(read_importance(fit.metrics.get(IMPORTANCE)) for _, fit in results)
        whole = [trained.get(index, array) for index, array in enumerate(self._arrays)]
        for _, fit in results:
            fit.parameters = ndarrays_to_parameters(whole)
            # Flower passes metrics to the user's merging function, which does not expect these.
            fit.metrics = {k: v for k, v in fit.metrics.items() if k not in (IMPORTANCE, TENSORS)}
        merged, metrics = self.inner.aggregate_fit(
            server_round=server_round, results=results, failures=failures
        )
        if merged is None:
            return None, metrics
        # Legacy strategies round even the mean of equal numbers, and also average integers.
        new = [
            array.astype(old.dtype) if index in trained and old.dtype.kind == "f" else old
            for index, (array, old) in enumerate(
                zip(parameters_to_ndarrays(merged), self._arrays, strict=True)
            )
        ]
        return ndarrays_to_parameters(new), metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Delegate to the inner strategy."""
        return self.inner.configure_evaluate(
            server_round=server_round, parameters=parameters, client_manager=client_manager
        )

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Any]]:
        """Delegate to the inner strategy."""
        return self.inner.aggregate_evaluate(
            server_round=server_round, results=results, failures=failures
        )

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        """Delegate to the inner strategy."""
        return self.inner.evaluate(server_round, parameters)

    def _sums_task(self, fixed: FixedPoint) -> SolveHead:
        """Return the task that replaces training in the first round."""
        privacy = self.fleet.config.sums_privacy
        clip = None if privacy is None else privacy.clip
        return SolveHead(fixed_point=fixed.to_text(), clip=clip)

    def _solved(
        self, server_round: int, fixed: FixedPoint, results: list[_Fitted]
    ) -> Parameters | None:
        """Return the model with the head solved from the total of all sums; None if the total is invalid."""
        from fl_elastic.flower.private_round_zero import SUMS_OF, secret_head

        # Rounds go on in any case: without a head they train as usual.
        self._fixed = None
        try:
            if not results:
                raise UpdateError("no client sent sums")
            self._refuse_too_many(results)
            (means,) = parameters_to_ndarrays(results[0][1].parameters)
            found, head, _ = secret_head(
                (fit.metrics.get(SUMS_OF) for _, fit in results), means, len(results), fixed,
                self._arrays, self.fleet.config.sums_privacy,
            )  # fmt: skip
        except (UpdateError, ValueError) as error:
            _LOG.warning(
                "round %s: the head is not solved for and stays as it is: %s",
                server_round, one_line(str(error)),
            )  # fmt: skip
            return None
        _LOG.info(
            "round %s: a head in closed form from the total of %d clients; its squared error is %.2f of the mean's",
            server_round, len(results), head.error,
        )  # fmt: skip
        return ndarrays_to_parameters(
            [found.get(index, array) for index, array in enumerate(self._arrays)]
        )

    def _ask(self, proxy: ClientProxy, server_round: int) -> None:
        """Ask a client for its capabilities; one that does not answer is asked less and less often."""
        if proxy.node_id in self.fleet.capabilities or not self.fleet.try_to_ask(proxy.node_id):
            return
        question = EvaluateIns(ndarrays_to_parameters([]), Describe().to_config())
        try:
            answer = proxy.evaluate(question, timeout=_PATIENCE_SECONDS, group_id=server_round)
        # The proxy raises if a client fails; the round goes on without its answer.
        except Exception as error:
            self.fleet.learn(proxy.node_id, {}, one_line(repr(error)))
            return
        self.fleet.learn(proxy.node_id, answer.metrics)

    def _refuse_too_many(self, results: list[_Fitted]) -> None:
        """Raise UpdateError if the workflow's total may have overflowed its modulus."""
        flow = self._workflow
        weight = sum(fit.num_examples for _, fit in results) / flow.max_weight
        if max(len(results), weight) * flow.quantization_range > flow.modulus_range:
            raise UpdateError(
                f"the sum of {len(results)} clients does not fit the workflow's modulus_range of "
                f"{flow.modulus_range}: lower its quantization_range, or ask fewer clients"
            )

    def _refuse_clipped(self, results: list[_Fitted], trained: dict[int, NDArray[Any]]) -> None:
        """Raise UpdateError if the workflow clipped weights of a client, judged by the model before and after."""
        flow = self._workflow
        self._refuse_too_many(results)
        most = max(fit.num_examples for _, fit in results)
        floats = [
            array
            for index, mean in trained.items()
            for array in (self._arrays[index], mean)
            if array.dtype.kind == "f" and array.size
        ]
        largest = max((float(np.abs(array).max()) for array in floats), default=0.0)
        # If all clients' numbers were clipped, their mean equals the bound up to rounding.
        if largest * most / flow.max_weight >= flow.clipping_range * (1 - _ROUNDING):
            raise UpdateError(
                f"for a client with {most} examples the workflow clips weights to "
                f"{flow.clipping_range * flow.max_weight / most:.3g}, and the model has some up to {largest:.3g}: "
                "give the workflow a larger max_weight or clipping_range"
            )

    def _trained(self, results: list[_Fitted]) -> dict[int, NDArray[Any]]:
        """Return the trained tensors' means by tensor index; they are the same in every result."""
        said = {str(fit.metrics.get(TENSORS)) for _, fit in results}
        if len(said) != 1:
            raise UpdateError(f"clients trained {len(said)} different sets of tensors")
        try:
            indices = [int(index) for index in json.loads(said.pop())]
        except (ValueError, TypeError, RecursionError) as error:
            raise UpdateError(f"clients do not say what they trained: {error}") from None
        arrays = parameters_to_ndarrays(results[0][1].parameters)
        if len(indices) != len(arrays) or len(set(indices)) != len(indices):
            raise UpdateError(f"clients name {len(indices)} tensors and sent {len(arrays)}")
        known = self._arrays
        for index, array in zip(indices, arrays, strict=True):
            # A zero-dimensional array travels as an array of one number.
            if not 0 <= index < len(known) or array.shape != np.atleast_1d(known[index]).shape:
                raise UpdateError(f"tensor {index} does not fit the model")
            if not np.isfinite(array).all():
                raise UpdateError(f"tensor {index} holds NaN or infinite values")
        return {
            i: a.astype(known[i].dtype).reshape(known[i].shape)
            for i, a in zip(indices, arrays, strict=True)
        }
