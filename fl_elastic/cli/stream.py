"""``fl-elastic stream``: a service that learns from a stream."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fl_elastic.cli.stream_forget import forget
from fl_elastic.cli.stream_learner import Opening
from fl_elastic.errors import LaboratoryMissing, StreamDataError, StreamError
from fl_elastic.laboratory import from_laboratory
from fl_elastic.named_models import shape_of
from fl_elastic.state.files import OWNER_ONLY, write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fl_elastic.streaming import StreamLearner
    from fl_elastic.streaming.sources import SourceReading


_LOG = logging.getLogger("fl_elastic")

# Number of readings after which the stream ends if all were refused, and most reasons that are reported.
_ALL_REFUSED = 100
_REASONS = 3
_STATUS_SECONDS = 30.0


def stream(
    source: Annotated[
        str, typer.Option(help="csv:FILE, dir:FOLDER (of .npz) or socket:HOST:PORT.")
    ],
    model: Annotated[
        str, typer.Option(help="A model of the simulation, a torchvision name, or module:callable.")
    ],
    state_dir: Annotated[Path, typer.Option(help="Folder of the store and the learned model.")],
    input_: Annotated[str, typer.Option("--input", help="Shape of one sample, such as 3,32,32.")],
    outputs: Annotated[int, typer.Option(min=1, help="Classes at the start; more may come.")] = 2,
    speedup: Annotated[
        float | None, typer.Option(help="Full step time over allowed step time, at least 1.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds of one adaptation.")] = None,
    policy: Annotated[str, typer.Option(help="Policy that chooses what to train.")] = "elastic",
    detector: Annotated[str, typer.Option(help="Drift detector.")] = "adwin",
    every: Annotated[int, typer.Option(min=1, help="Labelled samples between adaptations.")] = 50,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of an adaptation.")] = 50,
    latent: Annotated[
        int,
        typer.Option(
            min=0, help="Store features at the cut below this many groups; 0 stores inputs."
        ),
    ] = 0,
    closed_form: Annotated[
        bool,
        typer.Option(
            "--closed-form", help="Train nothing: solve the last layer from running sums."
        ),
    ] = False,
    remember: Annotated[
        float | None,
        typer.Option(
            help="With --closed-form: samples after which a sample's weight is 1/e; by default all weigh the same."
        ),
    ] = None,
    read: Annotated[
        str,
        typer.Option(
            help="With --closed-form: where the head reads: last, or places such as features.6@grid4."
        ),
    ] = "last",
    learning_rate: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    capacity: Annotated[
        int | None,
        typer.Option(help="Bytes of the store; by default 64 MiB, or what fits on the disk."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more data at the end of a table or folder.")
    ] = False,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Rows of tables and files that are processed together, which is faster."
        ),
    ] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many readings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict, keep and learn from a stream until it ends or SIGTERM arrives, then save the state."""
    # Check what can be checked before importing torch, which takes seconds.
    if not 0 < learning_rate < math.inf:
        raise StreamError(f"learning rate {learning_rate} is invalid: give more than 0")
    shape = shape_of(input_)
    from fl_elastic.named_models import check_model_name

    check_model_name(model)
    from fl_elastic.streaming.sources import open_source, source_name
    from fl_elastic.streaming.summary import stream_summary

    opening = Opening(
        model, state_dir, shape, outputs, latent, seed, speedup, deadline, policy,
        detector, every, steps, learning_rate, capacity, closed_form, remember, read,
    )  # fmt: skip
    with opening.learner() as (learner, like):
        name = source_name(source)
        after = learner.positions.get(name, learner.positions.get(""))
        readings = open_source(source, after=after, follow=follow)
        saved, before = False, (learner.progress.observed, Counter(learner.progress.rejected))
        try:
            learner.tick()
            status = _Status(learner, state_dir)
            with _until_told_to_stop() as stopped:
                for together in _gathered(islice(readings, limit), batch):
                    _handle(learner, together, like, name)
                    if not together[0].awaits_answer:
                        _stop_if_all_refused(learner)
                    status.tell_if_due()
                    if stopped():
                        break
                else:
                    _refuse_if_nothing_fitted(learner, *before)
        finally:
            # If nothing was learned, a saved state would only force the next attempt to use the same model.
            if learner.progress.observed:
                saved = learner.close()
        result = stream_summary(learner)
        _written(result, state_dir)
        _page(result, state_dir)
        if learner.progress.observed and not saved:
            raise StreamError(
                f"the state could not be saved to {state_dir} at the end: is its disk full? Samples since the "
                "last save are learned again at the next start, from the log there or from the source"
            )
    typer.echo(json.dumps(result) if as_json else _line(result))


class _ServiceUnlessNamed(TyperGroup):
    """Runs the service if no other command is named: ``fl-elastic stream --source ...``."""

    usual = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [self.usual, *args])


stream_app = typer.Typer(
    cls=_ServiceUnlessNamed, help="Learn from a stream, or let its model forget samples."
)
stream_app.command("run", epilog="fl-elastic stream forget lets the model forget samples.")(stream)
stream_app.command("forget")(forget)


def _gathered(readings: Iterable[SourceReading], most: int) -> Iterator[list[SourceReading]]:
    """Yield readings in order: several together if no sender waits for an answer, otherwise alone."""
    together: list[SourceReading] = []
    for reading in readings:
        alone = reading.is_silence or reading.awaits_answer
        if together and alone:
            yield together
            together = []
        together.append(reading)
        # A file is moved away when the next reading is requested, so its samples must be kept before that.
        if alone or reading.ends or len(together) == most:
            yield together
            together = []
    if together:
        yield together


def _handle(
    learner: StreamLearner, readings: list[SourceReading], like: NDArray[Any], source: str
) -> None:
    from fl_elastic.streaming.sources import SourcePosition

    first = readings[0]
    if first.is_silence:
        learner.tick()
    elif first.sample_id is not None:
        first.answer(asdict(learner.label(first.sample_id, first.y)))
    else:
        xs = [_taken(each.x, like) for each in readings]
        if learner.progress.observed == 0 and not first.awaits_answer:
            # All rows of a table have the same length: if the first does not fit, none will.
            _refuse_other_sizes(readings, xs)
        ys = [each.y for each in readings]
        names, at = [each.name for each in readings], readings[-1].position
        position = None if at is None else SourcePosition(source, at)
        found = learner.observe_batch(xs, ys, names=names, position=position)
        for reading, seen in zip(readings, found, strict=True):
            reading.answer(asdict(seen))


def _stop_if_all_refused(learner: StreamLearner) -> None:
    """Raise StreamDataError if no reading has ever been valid, after enough of them."""
    refused = learner.progress.rejected
    if learner.progress.observed == 0 and sum(refused.values()) >= _ALL_REFUSED:
        raise StreamDataError(f"not one of the first readings fits: {_reasons(refused)}")


def _refuse_if_nothing_fitted(
    learner: StreamLearner, observed: int, rejected: Counter[str]
) -> None:
    """Raise StreamDataError if the source has ended and none of its readings was valid."""
    refused = Counter(learner.progress.rejected) - rejected
    if refused and learner.progress.observed == observed:
        raise StreamDataError(f"not one of {refused.total()} readings fits: {_reasons(refused)}")


def _reasons(refused: Mapping[str, int]) -> str:
    """Return the most frequent reasons, each with its count."""
    first = sorted(refused.items(), key=lambda reason: -reason[1])[:_REASONS]
    more = ", and others" if len(refused) > _REASONS else ""
    return ", ".join(f"{why} ({count} times)" for why, count in first) + more


def _taken(x: Any, like: NDArray[Any]) -> Any:
    """Return a sample in the shape and type of the model's input, which most sources do not contain."""
    import numpy as np

    from fl_elastic.streaming.intake import Unreadable

    if isinstance(x, str) or not hasattr(x, "reshape"):
        return x
    if x.size != like.size:
        return Unreadable(
            f"{x.size} numbers, and --input {','.join(map(str, like.shape))} asks for {like.size}"
        )
    x = x.reshape(like.shape)
    as_it_is = x.dtype.kind not in "biuf" or x.dtype.kind == like.dtype.kind == "f"
    if as_it_is or not np.isfinite(x).all():
        return x
    with np.errstate(invalid="ignore"):
        cast = x.astype(like.dtype)
    if cast.dtype.kind == "i" and not (cast == x).all():
        return Unreadable("a number is not whole, and the model takes whole numbers")
    return cast


def _refuse_other_sizes(readings: Iterable[SourceReading], shaped: Iterable[Any]) -> None:
    from fl_elastic.streaming.intake import Unreadable

    for reading, x in zip(readings, shaped, strict=True):
        if isinstance(x, Unreadable) and not isinstance(reading.x, str):
            raise StreamDataError(f"the first sample has {x}: give --input as the source has it")


@contextmanager
def _until_told_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM or Ctrl-C has arrived; a sample is never interrupted."""
    signals: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, lambda number, _: signals.append(number))
    try:
        yield lambda: bool(signals)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Status:
    """Reports progress every half minute, if there was any: prints a line and writes the summary."""

    def __init__(self, learner: StreamLearner, folder: Path) -> None:
        self._learner, self._folder = learner, folder
        self._due, self._told = time.monotonic() + _STATUS_SECONDS, self._count()

    def tell_if_due(self) -> None:
        """Report if it is time."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _STATUS_SECONDS
        if self._told == self._count():
            return
        from fl_elastic.streaming.summary import stream_summary

        self._told = self._count()
        summary = stream_summary(self._learner)
        typer.echo(_line(summary).replace("\n", "; "), err=True)
        _written(summary, self._folder)

    def _count(self) -> tuple[int, ...]:
        progress = self._learner.progress
        return progress.observed, progress.labelled, sum(progress.rejected.values())


def _written(summary: dict[str, Any], folder: Path) -> None:
    """Write the summary beside the state; if that fails, as on a full disk, a warning is logged."""
    try:
        write_atomically(folder / "summary.json", json.dumps(summary).encode(), OWNER_ONLY)
    except OSError as error:
        _LOG.warning("the summary could not be written to %s: %s", folder, error)


def _page(summary: dict[str, Any], folder: Path) -> None:
    """Write a page of the summary beside it, if the laboratory is installed to draw one."""
    try:
        from_laboratory("stream_page")(summary, folder / "report.html")
    except LaboratoryMissing as error:
        _LOG.info("no page was written: %s", error)
    except OSError as error:
        _LOG.warning("the page could not be written to %s: %s", folder, error)


def _line(result: dict[str, Any]) -> str:
    accuracy, gone = result["prequential_accuracy"], result["unlearned"]
    late = f" ({gone} whose label came after the store had dropped them)" if gone else ""
    return (
        f"{result['observed']} samples, {result['labelled']} labelled{late}, "
        f"{sum(result['refused'].values())} refused; "
        f"accuracy of late {'-' if accuracy is None else f'{accuracy:.3f}'}; {result['drifts']} drifts, "
        f"{result['adaptations']} adaptations, {result['rolled_back']} of them undone"
        + (f"\nrefused: {_reasons(result['refused'])}" if result["refused"] else "")
    )
