"""What the README and the pages of docs/ show in Python runs as it stands there; the README is short."""

from __future__ import annotations

import ast
import inspect
import json
import re
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import DOCUMENTS, ROOT, code_blocks
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from in_process_grid import InProcessGrid
from torch import nn
from typer.testing import CliRunner

import fl_elastic
from fl_elastic import Budget, ElasticTrainer
from fl_elastic.cli.main import app
from fl_elastic.flower import Deadline, ElasticClient, PartialUpdates, elastic_client_app
from fl_elastic.planning import POLICIES
from fl_elastic.readout import POOLINGS
from fl_elastic.training import plan_for

README = ROOT / "README.md"
BLOCKS = {
    f"{page.relative_to(ROOT)} {number}": code
    for page in DOCUMENTS
    for number, code in enumerate(code_blocks(page, "python"))
}
SCENARIOS = [code for page in DOCUMENTS for code in code_blocks(page, "toml") if "title" in code]
_Names = dict[str, Any]
CHECKS: dict[str, Callable[[_Names], None]] = {}


def check(marker: str) -> Callable[[Callable[[_Names], None]], Callable[[_Names], None]]:
    """Register what must hold after every block that holds ``marker`` has run."""

    def add(function: Callable[[_Names], None]) -> Callable[[_Names], None]:
        CHECKS[marker] = function
        return function

    return add


@check("def client_fn(context):\n    train, test = load_data")
def _flower_example_builds_both_apps_and_a_working_client(names: _Names) -> None:
    assert isinstance(names["client_app"], ClientApp)
    assert isinstance(names["server_app"], ServerApp)
    context = types.SimpleNamespace(node_config={"partition-id": 0})
    client = names["client_fn"](context)
    weights, examples, metrics = client.fit(client.get_parameters({}), {})
    assert examples == 12
    assert len(weights) == len(client.manifest)
    assert metrics["steps"] == 3


@check("\nstrategy = PartialUpdates.for_unequal_devices(")
def _example_of_unequal_devices_is_a_strategy(names: _Names) -> None:
    strategy = names["strategy"]
    assert isinstance(strategy, PartialUpdates)
    assert strategy.rule == "contributors" and strategy.merges_late
    assert strategy.config.deadline == Deadline(seconds=60)


@check('SERVER_OPTIMIZERS.make("agreement", 1.5)')
def _the_preset_written_out_is_the_preset(names: _Names) -> None:
    mine, preset = (
        names["strategy"],
        PartialUpdates.for_unequal_devices(names["FedAvg"](), deadline=60),
    )
    assert (mine.rule, mine.config, mine.merge) == (preset.rule, preset.config, preset.merge)
    assert mine.average.decay == preset.average.decay
    assert type(mine.server_optimizer) is type(preset.server_optimizer)
    assert mine.server_optimizer.rate == preset.server_optimizer.rate


@check("trainer = ElasticTrainer(model")
def _trainer_example_trains_and_gives_an_update(names: _Names) -> None:
    assert names["report"].steps >= 1
    assert names["trainer"].update().deltas


@check("ForwardOptions(feature_bytes=500_000_000)),")
def _memory_example_trains_within_its_memory(names: _Names) -> None:
    report = names["report"]
    assert report.plan.lean and report.plan.predicted_step_bytes <= 100e6
    assert report.forward is not None


@check("changed(model, base, plan")
def _a_loop_of_ones_own_trains_by_a_plan(names: _Names) -> None:
    assert set(names["update"].deltas) == set(names["plan"].trained_parameters)
    assert names["update"].num_examples == 12


@check("def optimizer_fn(named_parameters)")
def _an_optimiser_with_a_schedule_and_clipping_takes_steps(names: _Names) -> None:
    model = nn.Sequential()
    model.body, model.classifier = nn.Linear(6, 8), nn.Linear(8, 2)
    loss_fn = nn.functional.cross_entropy
    trainer = ElasticTrainer(model, loss_fn, names["optimizer_fn"], budget=Budget())
    assert trainer.fit(_batches()).steps == 3
    assert trainer.optimizer is not None
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.99**3)


@check("from peft import LoraConfig")
def _adapters_are_trained_and_exported_in_pefts_format(names: _Names) -> None:
    contexts = {n: types.SimpleNamespace(node_config={"partition-id": n}) for n in (1, 2)}
    apps = {
        node: elastic_client_app(lambda _, node=node: names["client_fn"](contexts[node]))
        for node in contexts
    }
    grid = InProcessGrid(2, apps.__getitem__)
    names["main"](grid, None)
    (arrays,) = grid.sent[0].content.array_records.values()
    sent = sum(len(array.data) for array in arrays.values())
    trained = [each for each in names["build"]().parameters() if each.requires_grad]
    assert sent < 4 * sum(each.numel() for each in trained) + 2000
    project, peft = sys.modules["my_project"], pytest.importorskip("peft")
    again = peft.PeftModel.from_pretrained(project.load_pretrained(), "adapter")
    tokens = torch.arange(8)[None]
    merged = type(project.load_pretrained()).from_pretrained("merged")
    scores, known = again(tokens).logits, merged(tokens).logits
    torch.testing.assert_close(scores, known, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores, project.load_pretrained()(tokens).logits, atol=1e-5)


@check("from fl_elastic.fleet import node_app")
def _an_app_of_ones_own_gets_the_care_of_a_node(names: _Names) -> None:
    assert isinstance(names["client_app"], ClientApp)


@check('read="auto")\n    strategy')
def _a_fleet_chooses_where_to_read_and_its_model_can_be_used(names: _Names) -> None:
    def client(node: int) -> ElasticClient:
        return ElasticClient(
            _net(), _batches(), _batches(), budget=Budget(), loss_fn=nn.functional.cross_entropy,
            optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )  # fmt: skip

    apps = {node: elastic_client_app(lambda _, node=node: client(node)) for node in (1, 2)}
    model = names["main"](InProcessGrid(2, apps.__getitem__), None)
    assert model(names["inputs"]).shape == (4, 2)


@check("@POLICIES.register(")
def _a_policy_of_ones_own_is_found_by_name(names: _Names) -> None:
    assert "middle" in POLICIES.names()
    plan = plan_for(
        names["model"],
        names["loss_fn"],
        names["batches"],
        budget=names["Budget"](),
        policy="middle",
    )
    assert plan.trained_parameters and plan.policy == "middle"


@check("StreamLearner(")
def _the_stream_is_learned(names: _Names) -> None:
    assert names["learner"].progress.accuracy > 0.75
    assert Path("state", "learner.state").exists()


@check("def read():")
def _data_of_ones_own_are_simulated(names: _Names) -> None:
    sys.modules["my_project"].read = names["read"]  # type: ignore[attr-defined]
    output = Path("out", "readings")
    said = CliRunner().invoke(
        app, ["simulate", "readings.toml", "--engine", "local", "--output", str(output)],
        catch_exceptions=False,
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    summary = json.loads((output / "summary.json").read_text())
    assert set(summary["methods"]) == {"full", "elastic"}
    assert (output / "report.html").exists()


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 6), torch.tensor([0, 1, 1, 0])) for _ in range(3)]


def _images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 1, 0])) for _ in range(3)]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def _pretrained() -> nn.Module:
    """A language model of transformers, where that is installed; weights of a seed, as none are downloaded."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=30, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


def _texts(partition: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(partition)
    rows = [torch.randint(0, 30, (4, 9), generator=generator) for _ in range(3)]
    batches = [{"input_ids": row, "labels": row} for row in rows]
    return batches, batches[:1]


def _transformer() -> _Names:
    """A small ViT, its images, and a trainer that has not trained."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(16, 4, 4, 2, 32, 64, num_classes=2)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(0, 2, (8,))) for _ in range(4)]
    trainer = ElasticTrainer(
        model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), budget=Budget()
    )
    dataset = [(torch.randn(3, 16, 16), 0)] * 40
    return {
        "model": model, "loader": batches, "test_loader": batches, "trainer": trainer,
        "dataset": dataset,
    }  # fmt: skip


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Names]:
    """What a reader of the pages has: a project, a model, data, an empty folder."""

    project = types.ModuleType("my_project")
    project.Net, project.load_data = _net, lambda partition: (_batches(), _batches())  # type: ignore[attr-defined]
    project.load_pretrained, project.load_texts = _pretrained, _texts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_project", project)
    monkeypatch.chdir(tmp_path)
    (scenario,) = SCENARIOS
    (tmp_path / "readings.toml").write_text(scenario)
    images = _images()
    known, pooled = POLICIES.names(), POOLINGS.names()
    yield {
        "Budget": Budget,
        "model": nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
        "loss_fn": nn.functional.cross_entropy,
        "optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batches": images,
        "loader": images,
        "test_loader": images,
        "batch": images[0],
        "theirs": [(inputs[:2], targets[:2]) for inputs, targets in images[:1]],
        "everything": images,
        "client_fn": lambda context: None,
    }
    # What a block registered is forgotten after it.
    for name in set(POLICIES.names()) - set(known):
        del POLICIES._entries[name]
    for name in set(POOLINGS.names()) - set(pooled):
        del POOLINGS._entries[name]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block: str, given: _Names) -> None:
    code = BLOCKS[block]
    for package in ("peft", "transformers"):
        if f"from {package} import" in code:
            pytest.importorskip(package)
    if "tokens.md" in block:
        given |= _transformer()
    exec(compile(code, block, "exec"), given)
    for marker, holds in CHECKS.items():
        if marker in code:
            holds(given)


def test_every_check_is_of_a_block() -> None:
    for marker in CHECKS:
        assert any(marker in code for code in BLOCKS.values()), marker


def test_flower_example_is_about_twenty_lines() -> None:
    code = [line for line in BLOCKS["README.md 0"].splitlines() if line.strip()]
    assert len(code) <= 24


_SAID = [
    (page.relative_to(ROOT), code)
    for page in (*DOCUMENTS, ROOT / "CHANGELOG.md")
    for code in re.findall(r"`((?:fl_elastic\.)?[a-z_]+\(\w+, [\w, =.]+\))`", page.read_text())
]


def misfits(code: str) -> list[str]:
    """Why a public function's call in a sentence does not fit its signature; `...` leaves out the rest."""
    call = ast.parse(code.removeprefix("fl_elastic."), mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    public = (fl_elastic, fl_elastic.training, fl_elastic.update, fl_elastic.profiling)
    found = set(filter(callable, (getattr(each, call.func.id, None) for each in public)))
    given = [each for each in call.args if ast.unparse(each) != "..."]
    named = dict.fromkeys(each.arg for each in call.keywords if each.arg)
    problems = []
    for each in found:
        signature = inspect.signature(each)
        bind = signature.bind if len(given) == len(call.args) else signature.bind_partial
        try:
            bind(*given, **named)
        except TypeError as error:
            problems.append(f"{code}: {error}")
    return problems


def test_calls_in_sentences_fit_the_signatures() -> None:
    assert misfits("fl_elastic.fine_tune(model, data)") == [
        "fl_elastic.fine_tune(model, data): missing a required argument: 'optimizer_fn'"
    ]
    assert len(_SAID) > 5
    assert [(page, why) for page, code in _SAID for why in misfits(code)] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 100


RESULTS = ROOT / "simulations" / "results"


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def test_the_figures_of_the_readme_are_the_committed_ones() -> None:
    text = README.read_text()
    methods = _results("demo")["methods"]
    full, elastic = methods["full"], methods["elastic"]
    assert len(_results("demo")["seeds"]) == 3
    demo = (
        f"{_percent(elastic['final_accuracy'])} % accuracy against {_percent(full['final_accuracy'])} % of full "
        f"training, in {elastic['simulated_seconds'] / full['simulated_seconds']:.2f} of the time and with "
        f"{elastic['uplink_bytes'] / full['uplink_bytes']:.2f} of the bytes sent"
    )
    assert demo in text
    reached = (
        f"in {elastic['seconds_to_target'] / full['seconds_to_target']:.2f} of the simulated time"
    )
    assert reached in (ROOT / "docs" / "quickstart.md").read_text()

    twice = [
        row["achieved_speedup"]
        for name, row in _results("budget")["rows"].items()
        if name.endswith(" at 2.0")
    ]
    assert len(twice) == 4
    assert f"{min(twice):.2f} to {max(twice):.2f} times as fast" in text


SHOWN = {
    "signs-pretrained": "traffic signs at 64 pixels",
    "objects-pretrained": "CIFAR-10, 4,000 images",
    "birds-pretrained": "50 bird species",
    "birds-pi-fleet": "50 bird species, three of nine devices without memory for a full step",
}
COLUMNS = [
    "fedavg, waiting", "fewer full steps, solved head", "closed form, chosen places",
    "closed form, chosen places, then steps", "moving cut, solved head",
]  # fmt: skip


def test_the_table_of_the_readme_is_that_of_the_rows() -> None:
    rows = _results("across_rounds")["rows"]

    def cell(task: str, method: str) -> str:
        begin = f"{task} | {method} | "
        ends = [row["final_accuracy"] for name, row in rows.items() if name.startswith(begin)]
        return f"{_percent(statistics.fmean(ends))} ({len(ends)})" if ends else ""

    shown = README.read_text().split("<!-- across rounds, in short -->")[1].split("<!-- end -->")[0]
    lines = [
        f"| {' | '.join([title, *(cell(task, each) for each in COLUMNS)])} |"
        for task, title in SHOWN.items()
    ]
    assert shown.strip().splitlines()[2:] == lines
