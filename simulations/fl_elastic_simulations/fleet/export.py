"""Export of a run's model from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_elastic.errors import CheckpointError
from fl_elastic.flower.checkpoint import load_checkpoint
from fl_elastic.flower.records import as_record
from fl_elastic.model_export import export_model
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.manifest import places_of
from fl_elastic_simulations.engine.method_model import read_at
from fl_elastic_simulations.engine.workload import first_batch, scenario_model
from fl_elastic_simulations.fleet.server import CHECKPOINTS, SCENARIO
from fl_elastic_simulations.scenario.scenario import Scenario


def export_run(
    results: Path, output: Path, *, scenario: Path | None = None, data_root: str | None = None
) -> dict[str, Any]:
    """Write the newest model that a run tested to a file; return the file, its size and the round.

    Parameters
    ----------
    results : Path
        Folder of the run.
    output : Path
        ``*.safetensors`` or ``*.onnx``.
    scenario : Path, optional
        Scenario file; by default the one in the run's folder.
    data_root : str, optional
        Folder of datasets: ONNX needs a batch of inputs.

    Raises
    ------
    CheckpointError
        If the run has no readable checkpoint, or it is of another model.
    ScenarioError
        If there is no scenario.
    ModelError
        If the format is unknown or the model cannot be exported.
    """
    if scenario is None:
        try:
            chosen = Scenario.from_json((results / SCENARIO).read_text())
        except (OSError, UnicodeDecodeError):
            if not any((results / CHECKPOINTS).glob("*")):
                raise CheckpointError(
                    f"{results} holds no {SCENARIO} and no checkpoint: give the folder of a run's results"
                ) from None
            raise CheckpointError(
                f"{results} holds no {SCENARIO}, so the run was of an app of your own, which alone knows its "
                f"model: load_checkpoint({str(results / CHECKPOINTS)!r}, ArrayRecord(model.state_dict())).tested "
                "are the newest weights, as docs/how-to/fleet.md shows; or give the scenario"
            ) from None
    else:
        chosen = Scenario.load(scenario)
    model = scenario_model(chosen, data_root, 0)
    first = as_record(weights_of(model, Manifest.of(model)))
    found = load_checkpoint(results / CHECKPOINTS, first)
    if found is None:
        raise CheckpointError(
            f"{results / CHECKPOINTS} holds no checkpoint: no round has ended yet"
        )
    model = read_at(model, places_of(found.arrays), chosen, data_root)
    inputs, _ = first_batch(chosen, data_root)
    path = export_model(model, found.tested, output, inputs)
    return {"file": str(path), "bytes": path.stat().st_size, "round": found.server_round}
