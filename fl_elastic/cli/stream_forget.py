"""``fl-elastic stream forget``: make a stream's model forget samples, and delete them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_elastic.cli.stream_learner import Opening
from fl_elastic.errors import StreamError
from fl_elastic.named_models import shape_of


def forget(
    model: Annotated[str, typer.Option(help="The service's model.")],
    state_dir: Annotated[Path, typer.Option(help="The service's folder; it must not run now.")],
    input_: Annotated[str, typer.Option("--input", help="Shape of one sample, such as 3,32,32.")],
    outputs: Annotated[int, typer.Option(min=1, help="Classes that the service began with.")] = 2,
    latent: Annotated[int, typer.Option(min=0, help="As given to the service.")] = 0,
    closed_form: Annotated[
        bool, typer.Option("--closed-form", help="As given to the service.")
    ] = False,
    remember: Annotated[float | None, typer.Option(help="As given to the service.")] = None,
    read: Annotated[str, typer.Option(help="As given to the service.")] = "last",
    ids: Annotated[
        str, typer.Option(help="Ids or names of samples, with commas between them.")
    ] = "",
    label: Annotated[int | None, typer.Option(help="All stored samples of this class.")] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Dampen weights that matter so many times more to these samples than to all."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shrink the weights that are far more important to these samples than to all, and erase the samples.

    A head in closed form forgets exactly: the samples are subtracted from its sums.
    """
    if not ids and label is None:
        raise StreamError("say what to forget: --ids 17,18 or --label 3")
    if not (state_dir / "samples.db").exists():
        raise StreamError(f"there is no stream's store in {state_dir}: check --state-dir")
    opening = Opening(
        model, state_dir, shape_of(input_), outputs, latent, seed,
        closed_form=closed_form, remember=remember, read=read,
    )  # fmt: skip
    with opening.learner() as (learner, _):
        wanted: list[int | str] = [_sample(number) for number in ids.split(",") if number.strip()]
        if label is not None:
            wanted += learner.ids_of(label)
        forgotten = learner.forget(wanted, alpha=alpha)
        learner.close()
    came = asdict(forgotten)
    typer.echo(json.dumps(came) if as_json else _told(came, len(wanted)))
    if forgotten.changed_nothing:
        raise StreamError(
            "the samples are erased, but the model has not forgotten them: it classifies them as well as before. "
            "Without the samples this cannot be tried again: begin anew with another --state-dir, or take a "
            "smaller --alpha the next time"
        )


def _sample(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text


def _told(came: dict[str, Any], wanted: int) -> str:
    def change(of: str) -> str:
        before, after = came[f"{of}before"], came[f"{of}after"]
        if not after["samples"]:
            return "not known"
        return (
            f"{before['accuracy']:.3f} to {after['accuracy']:.3f} "
            f"(loss {before['loss']:.3g} to {after['loss']:.3g})"
        )

    done = "subtracted, exactly" if came["exact"] else f"{came['weights']} weights are smaller"
    return (
        f"{came['deleted']} of {wanted} samples erased, {came['examples']} of them with a label; "
        f"{done}\naccuracy on what was to be forgotten: "
        f"{change('theirs_')}; on what is held out of the rest: {change('')}"
    )
