"""Partial updates under any linear strategy of Flower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fl_elastic.aggregation import (
    RULES,
    AggregationRule,
    MergeOptions,
    ModelAverage,
    PartialMean,
    ServerOptimizer,
)
from fl_elastic.aggregation.change_clipper import ChangeClipper
from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.flower.auxiliary_rounds import AuxiliaryRounds
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.divergence_rollback import DivergenceRollback, undo_of
from fl_elastic.flower.downlink import Downlink, MessagePacker
from fl_elastic.flower.evaluation_replies import asked_again, believed
from fl_elastic.flower.fleet_cut import FrozenConsensus
from fl_elastic.flower.incremental_grid import incremental, warned_of_a_wrapper
from fl_elastic.flower.preset import Settings, for_pretrained, for_untrained
from fl_elastic.flower.pretrained import fresh_statistics, trained_before
from fl_elastic.flower.records import as_arrays, as_record
from fl_elastic.flower.reply_merger import ReplyMerger
from fl_elastic.flower.round import (
    Round,
    RoundRecord,
    log_record,
)
from fl_elastic.flower.round_config import Deadline, RoundConfig, reply_timeout
from fl_elastic.flower.round_zero import HeadCheckpoint
from fl_elastic.flower.shown_log import show_log
from fl_elastic.flower.strategy_state import (
    EvaluateFn,
    averaged,
    own_settings,
    tested,
)
from fl_elastic.flower.tasks.evaluate import Evaluate
from fl_elastic.flower.wrapped_strategy import (
    Configure,
    chain,
    check_inner,
    chosen_messages,
    goes_by_the_change,
    handed_on,
    parameters_of,
    refuse_what_each_seen_ignores,
    refuse_wrapper,
    say_what_it_sees,
    sees_each_client,
    takes_the_mean_as_it_is,
    weight_key,
    whole_model,
)
from fl_elastic.given import of_another_kind
from fl_elastic.readout.place import BODY
from fl_elastic.update import Manifest
from fl_elastic.update.checks import Limits
from fl_elastic.update.manifest import FROZEN_BASE, Role, WeightDict, places_of

_LOG = logging.getLogger("fl_elastic")
# Seconds to wait for answers besides training if a round has no deadline.
_PATIENCE_SECONDS = 3600.0
# Deadline of the preset: the time in which a quarter of the devices can train everything.
_QUARTER = Deadline(quantile=0.25)


class PartialUpdates(Strategy):
    """Wraps an unchanged strategy of Flower, so that clients send only the tensors that they trained.

    It sends the model as one packed buffer, checks and merges packed partial updates as they arrive, and gives the
    inner strategy replies with whole models. FedAvg, FedAvgM, FedAdam and other linear strategies get the merged
    model as one reply with the summed weight, which for them is equivalent. A differential-privacy wrapper gets one
    complete reply per client, with the global value for every tensor that the client did not train. An invalid
    reply is logged and left out, and the round goes on.

    The inner strategy sees parameters only. Running statistics (BatchNorm) are averaged over the clients that
    updated them and are not changed by a server optimiser; under differential privacy they are not averaged at all,
    because its noise would not cover them. Integer buffers keep the server's value.

    Claims of clients are bounded by what the model, the fleet and earlier rounds make possible: changes many times
    larger than usual are shortened (`ChangeClipper`), a silent node is not waited for in every round
    (`ClientAvailability`), and the previous model is restored if the reported losses jump (`DivergenceRollback`). A
    server optimiser that scales the clients' change moves a model with running statistics no further than the
    clients did. Under differential privacy the sizes of changes and the losses are not used, because the noise
    would not cover decisions that are based on them.

    Replies are merged one by one as they arrive, and dropped: memory does not grow with the number of clients,
    unless a robust rule or differential privacy has to see them all, or the grid returns them together.

    Parameters
    ----------
    inner : Strategy
        A strategy from ``flwr.serverapp.strategy``, or one derived from it. Its ``aggregate_train`` gets one reply,
        with the merged model and the summed weight; under differential privacy one of each client.
    rule : str or AggregationRule, optional
        A registered name, or an object; ``contributors`` by default, always ``all`` under differential privacy.
    merge : MergeOptions, optional
        Weights, step normalisation and staleness.
    config : RoundConfig, optional
        Deadline, head in closed form, cut and other settings of the rounds.
    server_optimizer : ServerOptimizer, optional
        Applied before the inner strategy, only to tensors that were trained.
    average : ModelAverage, optional
        Mean of the global models of the last rounds, which `start` tests and returns. Clients train and evaluate
        the newest model.
    limits : Limits, optional
        Counts beyond which a reply is rejected.
    codec : str
        Codec of the model that is sent to the clients.
    on_round : callable, optional
        Called with the `RoundRecord` after each round's training. If it has a method ``evaluated``, that is called
        after each test, see `fl_elastic.flower.tracking`.

    Raises
    ------
    SettingError
        If the rule or codec is unknown, a setting is of another kind or has no effect under differential privacy,
        or the inner strategy is not linear.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = PartialUpdates(FedAdam(eta=0.1), rule="contributors")
    """

    keeps = frozenset(
        {"average", "downlink", "fleet", "guard", "server_optimizer", "sizes", "solved"}
    )
    """Attributes whose state belongs in a checkpoint."""
    not_inside = "another PartialUpdates: give it the strategy inside that one"
    """Error message: this object cannot be put inside another PartialUpdates."""

    def __init__(
        self,
        inner: Strategy,
        *,
        rule: str | AggregationRule | None = None,
        merge: MergeOptions | None = None,
        config: RoundConfig | None = None,
        server_optimizer: ServerOptimizer | None = None,
        average: ModelAverage | None = None,
        limits: Limits | None = None,
        codec: str = "fp32",
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        wrong = of_another_kind(
            merge=(merge, MergeOptions),
            config=(config, RoundConfig),
            server_optimizer=(server_optimizer, ServerOptimizer),
            average=(average, ModelAverage),
            limits=(limits, Limits),
            on_round=(on_round, Callable),
        )
        if wrong:
            raise SettingError(wrong)
        show_log()
        self.inner = inner
        self.limits = limits or Limits()
        self.on_round = on_round
        self._codec = codec
        # The deadline of `for_unequal_devices`, if the model decides its settings.
        self._preset: Deadline | None = None
        # The digest of the frozen base, which every device already has.
        self._base: WeightDict = {}
        self._round: Round | None = None
        self._evaluation: MessagePacker | None = None
        self._last_round = 0
        self._warned = False
        self._settings = Settings(rule, merge, config, server_optimizer, average)
        self._as_given = undo_of(
            [stateful for stateful in (server_optimizer, average) if stateful is not None]
        )
        self._begin(self._settings)
        say_what_it_sees(inner)

    def _begin(self, settings: Settings) -> None:
        """Begin a run with these settings, and without knowledge of the fleet."""
        self.rule = check_inner(self.inner, settings.rule)
        RULES.check(self.rule)
        # True under differential privacy. Then sizes and losses are not used either: noise would not cover them.
        self._each_seen = sees_each_client(self.inner)
        self.merge = settings.merge or MergeOptions()
        self.config = settings.config or RoundConfig()
        if self._each_seen:
            refuse_what_each_seen_ignores(self.merge, settings.server_optimizer)
            if self.config.uncovered:
                raise SettingError(self.config.uncovered)
        # For the grid: whether late updates are merged, which clients answer, and how fast.
        self.merges_late = self.merge.late == "merge"
        self.fleet = ClientRegistry(self.config)
        self.availability = self.fleet.availability
        self.downlink = Downlink(self._codec, changes_only=self.config.sends_changes)
        self.server_optimizer = settings.server_optimizer
        self.average = settings.average
        self.guard = DivergenceRollback()
        self.sizes = ChangeClipper(self.merge.size_bound)
        self.solved = HeadCheckpoint(self._undo)
        self._auxiliary = AuxiliaryRounds(
            self.fleet, self.downlink, self.limits, self.solved, self._tell
        )

    @classmethod
    def for_unequal_devices(
        cls,
        inner: Strategy,
        *,
        deadline: float | Deadline = _QUARTER,
        initial_arrays: ArrayRecord | None = None,
        pretrained: bool | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> PartialUpdates:
        """Return a strategy with settings chosen for a fleet of unequal devices, and log them.

        `docs/measured/unequal-clients.md` compares it with other methods.

        Each tensor is merged over the clients that trained it, the server takes longer steps while rounds agree,
        and the mean of its last models is tested and returned. Late updates are merged with less weight.

        A pretrained model instead gets a head in closed form, which reads at the place where it has the least error
        on the fleet's examples, and is solved for again after every fifth round; the model may then end there
        (`fl_elastic.readout.Readout`). It also gets a moving cut: nobody trains below it, clients keep the features
        there, and only what lies above travels.

        Parameters
        ----------
        inner : Strategy
            A strategy from ``flwr.serverapp.strategy``, such as ``FedAvg()``.
        deadline : float or Deadline
            Seconds of a round; by default the time in which a quarter of the devices can train all groups (with a
            cut, all groups above it).
        initial_arrays : ArrayRecord, optional
            The arrays that `start` will be given; their norms show whether the model is pretrained.
        pretrained : bool, optional
            Whether the model has learned features from other data already, and ends in a linear layer. By default
            ``initial_arrays`` decide; if they are not given here, those passed to `start` do.
        on_round : callable, optional
            Called with the `RoundRecord` after each round's training.

        Examples
        --------
        >>> from flwr.serverapp.strategy import FedAvg
        >>> PartialUpdates.for_unequal_devices(FedAvg(), deadline=60).config.deadline
        Deadline(seconds=60, quantile=None)
        >>> PartialUpdates.for_unequal_devices(FedAvg(), pretrained=True).config.cut
        'moving'
        """
        limit = deadline if isinstance(deadline, Deadline) else Deadline(seconds=deadline)
        if pretrained is None and initial_arrays is not None:
            pretrained = trained_before(initial_arrays)
        settings = for_pretrained(limit) if pretrained else for_untrained(limit)
        strategy = cls(inner, on_round=on_round, **vars(settings))
        strategy._preset = limit if pretrained is None else None
        return strategy

    def begin_with(self, arrays: ArrayRecord) -> None:
        """Choose the preset's settings by the model if this is still open, and reset what an earlier run left."""
        limit = self._preset if self._preset and trained_before(arrays) else None
        if limit is not None or self._last_round:
            self._as_given()
            self._begin(self._settings if limit is None else for_pretrained(limit))

    def patience(self) -> float | None:
        """Return the seconds to wait for this round's training; None to wait for all."""
        return None if self._round is None else reply_timeout(self._round.record.deadline)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds like Flower's own strategies, but on a grid that yields each reply as it arrives.

        With an `average`, ``evaluate_fn`` and the result get the mean; if the head is solved for repeatedly, they
        get the model of the last solve.
        """
        self.begin_with(initial_arrays)
        self.runs_until(num_rounds)
        initial_arrays = self.round_zero(grid, initial_arrays, timeout, train_config)
        with incremental(grid, self) as replies_one_by_one:
            result = super().start(
                grid=replies_one_by_one,
                initial_arrays=initial_arrays,
                num_rounds=num_rounds,
                timeout=timeout,
                train_config=own_settings(train_config),
                evaluate_config=own_settings(evaluate_config),
                evaluate_fn=tested(self, evaluate_fn),
            )
        result.arrays = averaged(self, result.arrays)
        return result

    def runs_until(self, last_round: int) -> None:
        """Set the number of the last round, after which a repeatedly solved head is solved for once more."""
        self._last_round = last_round

    def round_zero(
        self, grid: Grid, arrays: ArrayRecord, timeout: float, config: ConfigRecord | None = None
    ) -> ArrayRecord:
        """Return the model with a head in closed form if the config asks for one, else unchanged.

        The inner strategy chooses the clients, as for a round of training. ``on_round`` is called with the record.
        """
        if not self.config.solves_head:
            return arrays
        # A copy: an inner strategy may change the settings for each round, and round zero is not one of these.
        config = own_settings(config)
        manifest, record = self._remember(arrays, 0), RoundRecord(0, trains=False)
        self._check_statistics(manifest)
        messages = [*self._chosen(self.inner.configure_train, 0, config, grid).values()]
        self.fleet.serve(manifest)
        # Only a fixed deadline applies: one derived from training times says nothing about a pass for sums.
        record.deadline = None if self.config.deadline is None else self.config.deadline.seconds
        whole = self.downlink.weights
        if self.config.reads_inside and not self.fleet.read:
            asking = RoundRecord(0, deadline=record.deadline, trains=False)
            chosen = self._auxiliary.choose_places(messages, grid, asking, timeout)
            self.fleet.serve(self._keep(chosen, 0))
        solved = self._auxiliary.solve(messages, grid, record, timeout)
        if not record.head_features and self.downlink.weights is not whole:
            # Nobody sent sums for a head at the chosen places, so the model keeps its end.
            self.fleet.serve(self._keep(whole, 0))
            solved = whole
        return as_record({**solved, **self._base})

    def keep_before(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep this model, and the present state of server optimiser and average, to restore if losses jump."""
        weights = {name: array for name, array in arrays.items() if name != FROZEN_BASE}
        self.guard.keep(weights, self._undo())

    def _check_statistics(self, manifest: Manifest) -> None:
        """Warn if norms keep statistics that have never seen data."""
        fresh = (
            fresh_statistics(self.downlink.weights, manifest)
            if self.config.keeps_statistics
            else []
        )
        if fresh:
            _LOG.warning(
                "with a head in closed form or a cut, norms keep their statistics, but the statistics of %s norms "
                "have never seen data (%s): these do not normalise. Begin with a pretrained model, or with "
                "read='none' and cut='none'",
                len(fresh), fresh[0],
            )  # fmt: skip

    def summary(self) -> None:
        """Log the settings of this wrapper and of the inner strategy."""
        _LOG.info(
            "PartialUpdates: rule %s, codec %s, around:",
            RULES.name_of(self.rule),
            self.downlink.codec,
        )
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose clients and settings; pack the model and each client's task for them."""
        manifest = self._remember(arrays, server_round)
        if self._round is None:
            refuse_wrapper(self, self._start_only_settings)
        if not self._trains:
            return []
        self._round = None
        if self.average is not None and not self.average.rounds:
            self.average.add(self.downlink.weights)
        self.fleet.serve(manifest)
        if server_round == 1 and not self.config.solves_head:
            self._check_statistics(manifest)
        # Not a copy: an inner strategy may change its settings from round to round, such as a decaying rate.
        chosen = self._chosen(self.inner.configure_train, server_round, config, grid)
        if not self._each_seen:
            # Under differential privacy the noise is scaled for all sampled clients.
            due = self.availability.due(chosen)
            self.availability.passed_over(chosen.keys() - due)
            chosen = {node: message for node, message in chosen.items() if node in due}
        messages = [*chosen.values()]
        if self.config.deadline is not None or self.merges_late:
            self._warned = self._warned or warned_of_a_wrapper(grid)
        # Asked only now, because the inner strategy has waited until enough nodes are connected.
        self.fleet.meet(grid, config, chosen)
        if self.fleet.cut.due(server_round):
            asking = RoundRecord(server_round, trains=False)
            if self._auxiliary.choose_cut(messages, grid, asking):
                self.fleet.meet(grid, config, chosen)
        deadline = self.fleet.gather(chosen).deadline
        packer = MessagePacker("train", self.downlink, grid)
        packed = packer.packed(messages, self.fleet.training)
        record = RoundRecord(
            server_round, deadline, len(self.downlink.whole), cut=self.fleet.cut.group,
            asked=tuple(sorted(packer.sent_bytes)),
        )  # fmt: skip
        mean = PartialMean(manifest, self.rule, limits=self.limits, options=self.merge)
        freezes = self.config.has_cut or self.fleet.kept_head
        frozen = FrozenConsensus(manifest) if freezes else None
        self._round = Round(self.downlink.weights, mean, packer, record, frozen_consensus=frozen)
        return packed

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose clients; pack the model for them."""
        self._remember(arrays, server_round + 1)
        chosen = self._chosen(self.inner.configure_evaluate, server_round, config, grid)
        self._evaluation = packer = MessagePacker("evaluate", self.downlink, grid)
        return packer.packed([*chosen.values()], lambda _: self.fleet.task(Evaluate))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the partial updates that fit; then forget and solve for the head, if these are due.

        If losses jump, the model before the last round is restored instead.
        """
        if not self._trains:
            return self._arrays(), None
        this = self._round
        if this is None:
            raise UpdateError("aggregate_train was called before configure_train")
        self._take_in(this, replies)
        undo = None if self._each_seen else self._undo()
        reason = "" if undo is None else self.guard.jumped(this.losses, this.diverged)
        if reason:
            return self._step_back(this, reason), None
        changed, metrics = self._merge(this)
        if not changed:
            return None, metrics
        forgets = self._forget(this)
        went_back = self._solve_again(this, forgets=forgets)
        if undo is not None and not went_back:
            self.guard.keep(this.weights, undo)
        return self._arrays(), metrics

    def _take_in(self, this: Round, replies: Iterable[Message]) -> None:
        """Read, check and add up the replies of the round."""
        intake = ReplyMerger(
            this, self._each_seen, weight_key(self.inner),
            self.fleet, self.downlink, self.limits, self.sizes,
        )  # fmt: skip
        intake.take_all(replies)
        self.fleet.weigh(this.importance)
        self.fleet.closed(len(this.packer.sent_bytes), len(this.usable))

    def _merge(self, this: Round) -> tuple[bool, MetricRecord | None]:
        """Set the next model from the merged updates; return whether there is one, and the strategy's metrics."""
        # Under differential privacy the inner strategy merges the clipped replies itself.
        merged = this.weights if self._each_seen else this.merged()
        stepped = None if merged is None else this.stepped(merged, self.server_optimizer)
        # Without a merged model no optimiser steps, not even along the momentum of earlier rounds.
        aggregated, metrics = (
            (None, None) if stepped is None else handed_on(self.inner, this, stepped)
        )
        self._report(this)
        if this.usable and stepped is not None and aggregated is None:
            _LOG.warning(
                "round %s changes nothing: aggregate_train of %s returned no model",
                this.record.server_round, type(self.inner).__name__,
            )  # fmt: skip
        if merged is None or stepped is None or aggregated is None:
            self.sizes.forget()
            return False, metrics
        self._go_on(this, aggregated, merged, stepped)
        self.sizes.close()
        return True, metrics

    def _forget(self, this: Round) -> bool:
        """Make the model forget the examples of clients' requests; return whether there was anything to forget."""
        if not self.config.forget:
            return False
        alone = this.frozen_consensus
        trained = self.downlink.weights if alone is None else alone.may_train()
        forgotten = self._auxiliary.forget(this.packer, this.record, self._wait(), trained)
        if forgotten is not None:
            self.downlink.amend(forgotten)
            if self.average is not None:
                self.average.begin_anew(forgotten)
        return forgotten is not None

    def _solve_again(self, this: Round, *, forgets: bool) -> bool:
        """Solve for the head if that is due; return whether the model of the previous solve was restored."""
        if not self.fleet.kept_head:
            return False
        solved = self._auxiliary.solve_again(
            this.packer, this.record, self._wait(),
            forgets=forgets, last=this.record.server_round == self._last_round,
        )  # fmt: skip
        if solved is not None:
            self.downlink.amend(solved)
        return solved is not None and self.solved.went_back

    def _wait(self) -> float:
        """Return the seconds to wait for answers of the round's clients."""
        return self.patience() or _PATIENCE_SECONDS

    @property
    def _start_only_settings(self) -> list[str]:
        """Settings that take effect only in `start`, and not in the methods that a wrapper would call."""
        given = {
            "config.read": self.config.solves_head,
            "average": self.average is not None,
            "choice of settings by the model": self._preset is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def _trains(self) -> bool:
        """Whether rounds train: not if the plan is "none", or the solved head reads only the input."""
        body = f"{BODY}."
        alone = bool(self.fleet.read and self.fleet.kept_head) and not any(
            name.startswith(body) for name in self.downlink.weights
        )
        return self.config.plan != "none" and not alone

    def _report(self, this: Round) -> None:
        """Log the record of the round, and pass it to ``on_round``."""
        this.record.downlink_total_bytes = sum(this.packer.sent_bytes.values())
        log_record(this.record, RULES.name_of(self.rule))
        self._tell(this.record)

    def _chosen(
        self, configure: Configure, server_round: int, config: ConfigRecord, grid: Grid
    ) -> dict[int, Message]:
        """Return by node the messages to the clients that the inner strategy chooses."""
        arrays = parameters_of(self.downlink.weights, self.downlink.manifest)
        return chosen_messages(self.inner, configure, server_round, arrays, config, grid)

    def _tell(self, record: RoundRecord) -> None:
        if self.on_round is not None:
            self.on_round(record)

    def _step_back(self, this: Round, reason: str) -> ArrayRecord:
        """Restore the model before the last round; this round's updates start from a bad model and are dropped."""
        this.record.stepped_back = reason
        self._keep(self.guard.step_back(), this.record.server_round + 1)
        self.fleet.forget_requests.undone(this.record.server_round - 1)
        self.sizes.forget()
        self._report(this)
        return self._arrays()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Pass loss and metrics of the valid replies to the inner strategy."""
        packer = self._evaluation
        if packer is not None:
            replies = asked_again(replies, packer, self.downlink.stock)
        messages = believed(
            replies, weight_key(self.inner), self.limits.max_examples, self.downlink
        )
        found = self.inner.aggregate_evaluate(server_round, messages)
        evaluated = getattr(self.on_round, "evaluated", None)
        if evaluated is not None and found is not None:
            evaluated(server_round, found)
        return found

    def _remember(self, arrays: ArrayRecord, version: int) -> Manifest:
        weights = as_arrays(arrays)
        self._base = {name: weights.pop(name) for name in (FROZEN_BASE,) if name in weights}
        return self._keep(weights, version)

    def _keep(self, weights: WeightDict, version: int) -> Manifest:
        manifest = Manifest.of_arrays({**weights, **self._base})
        self.fleet.read = places_of(weights)
        self.downlink.serve(weights, manifest, version)
        return manifest

    def _arrays(self) -> ArrayRecord:
        return as_record({**self.downlink.weights, **self._base})

    def _go_on(
        self, this: Round, aggregated: ArrayRecord, merged: WeightDict, stepped: WeightDict
    ) -> None:
        """Set the next round's model: the inner strategy's parameters, and the merged model's other tensors."""
        each, before = self._each_seen, this.weights
        parameters = ArrayRecord() if takes_the_mean_as_it_is(self.inner) else aggregated
        new = whole_model(parameters, before if each else stepped, this.mean.manifest)
        if not each:
            optimizer, limit = self.server_optimizer, self.guard.rate_limit
            multiplies = goes_by_the_change(self.inner) or (optimizer and optimizer.relative)
            if multiplies and Role.STATISTIC in this.mean.manifest.roles:
                # A longer step would not move the running statistics, which would lag behind.
                limit = min(limit, 1.0)
            new = this.shortened(merged, new, limit)
        if this.frozen_consensus is not None:
            new = this.frozen_consensus.put_back(new, before)
        self._keep(new, this.record.server_round + 1)
        if self.average is not None:
            self.average.add(self.downlink.weights)

    def _undo(self) -> Callable[[], None]:
        """Return a function that restores the state that a round changes besides the model."""
        own = [
            stateful for stateful in (self.server_optimizer, self.average) if stateful is not None
        ]
        return undo_of([*chain(self.inner), *own])
