"""What is wrong with a scenario is said all at once: one line each, the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.scenario import Scenario

GOOD = """
[data]
dataset = "digits"
[model]
name = "digits_cnn"
[training]
rounds = 3
[[fleet]]
device = "pi_5"
count = 4
"""


def _message(tmp_path: Path, text: str = GOOD, overrides: tuple[str, ...] = ()) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        Scenario.load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "training.lerning_rate=1",
            "training.lerning_rate: unknown key (did you mean 'learning_rate'?)",
        ),
        ("trainig.rounds=1", "trainig: unknown key (did you mean 'training'?)"),
        ("fleet.0.speed_up=2", "fleet.0.speed_up: unknown key (did you mean 'speedup'?)"),
        ("method.elastic.codek=fp16", "method.elastic.codek: unknown key (did you mean 'codec'?)"),
        ("training.rounds=many", "training.rounds: expected a whole number, got 'many'"),
        ("training.rounds=2.5", "training.rounds: expected a whole number, got 2.5"),
        ("training.rounds=true", "training.rounds: expected a whole number, got True"),
        ("training.rounds=0", "training.rounds: 0 is below 1"),
        ("training.learning_rate=0", "training.learning_rate: 0 is not above 0"),
        ("training.learning_rate=nan", "training.learning_rate: nan is not a finite number"),
        ("training.learning_rate=inf", "training.learning_rate: inf is not a finite number"),
        ("training.momentum=1", "training.momentum: 1 is not below 1"),
        ("training.client_fraction=1.5", "training.client_fraction: 1.5 is above 1"),
        ("training.client_fraction=0", "training.client_fraction: 0 is not above 0"),
        ("training.weight_decay=-1", "training.weight_decay: -1 is below 0"),
        (
            "training.optimizer=adm",
            "training.optimizer: unknown optimizer 'adm' (did you mean 'adam'?): "
            "known are adam, adamw, sgd",
        ),
        (
            "data.dataset=digit",
            "data.dataset: unknown dataset 'digit' (did you mean 'digits'?): known are "
            "cifar10, cifar10_jpegq75, cub50, digits, fashion_mnist, gtsrb, har, "
            "or module:callable",
        ),
        (
            "data.dataset=my_project.data.read",
            "data.dataset: unknown dataset 'my_project.data.read': known are "
            "cifar10, cifar10_jpegq75, cub50, digits, fashion_mnist, gtsrb, har, "
            "or module:callable, as in 'my_project.data:read'",
        ),
        (
            "data.partition=my_project.split",
            "data.partition: unknown partition 'my_project.split': known are dirichlet, iid, natural, "
            "pathological, or module:callable, as in 'my_project:split'",
        ),
        (
            "data.partition=dirichlett",
            "data.partition: unknown partition 'dirichlett' (did you mean 'dirichlet'?): "
            "known are dirichlet, iid, natural, pathological, or module:callable",
        ),
        ("data.alpha=0", "data.alpha: 0 is not above 0"),
        ("data.alpha='0.3'", "data.alpha: expected a number, got '0.3'"),
        (
            "data.partition=natural",
            "data.partition: digits has no owners for a natural partition; gtsrb, har have",
        ),
        (
            "data.train_limit=39",
            "data.train_limit: 39 examples cannot give every client min_examples 10; 40 can",
        ),
        ("data=3", "data: expected a table, got 3"),
        ("model.name=''", "model.name: is empty; leave the key out for its default"),
        ("fleet.0.count=0", "fleet.0.count: 0 is below 1"),
        ("fleet.0.count=1000000", "fleet.0.count: 1000000 is above 10000"),
        ("fleet.0.speedup=0.5", "fleet.0.speedup: 0.5 is below 1"),
        ("fleet.0.slowdown=0", "fleet.0.slowdown: 0 is not above 0"),
        ("fleet=[]", "fleet: empty; give at least one [[fleet]] entry with a device"),
        ("methods=[]", "methods: expected a list of at least one, got an empty list"),
        ("methods=full,elastic,full", "methods: 'full' is given twice"),
        ("methods=full,../x", "methods: '../x' is not made of letters, digits and . _ - only"),
        ("seeds=1,1", "seeds: 1 is given twice"),
        ("seeds=-1", "seeds.0: -1 is below 0"),
        ("seeds=x", "seeds.0: expected a whole number, got 'x'"),
        (
            "method.elastic.policy=''",
            "method.elastic.policy: is empty; leave the key out for its default",
        ),
        (
            "method.elastic.budgeted=yes",
            "method.elastic.budgeted: expected true or false, got 'yes'",
        ),
        ("title=3", "title: expected text, got 3"),
        (
            "target.method=elastik",
            "target.method: 'elastik' is not among the methods (full, elastic): "
            "add it to them, or choose one of them",
        ),
        ("target.minus=1", "target.minus: 1 is not below 1"),
        ("rounds", "override 'rounds': expected key=value, as in training.rounds=5"),
        (
            "training..rounds=1",
            "override 'training..rounds=1': expected key=value, as in training.rounds=5",
        ),
        (
            "training.rounds=",
            "override 'training.rounds=': expected key=value, as in training.rounds=5",
        ),
        (
            "fleet.1.count=1",
            "override 'fleet.1.count=1': fleet has 1 entries, numbered from 0, and no '1'",
        ),
        (
            "fleet.x.count=1",
            "override 'fleet.x.count=1': fleet has 1 entries, numbered from 0, and no 'x'",
        ),
        (
            "training.rounds.x=1",
            "override 'training.rounds.x=1': training.rounds is a value, not a table",
        ),
    ],
)
def test_one_problem_is_one_line(tmp_path: Path, override: str, problem: str) -> None:
    assert _message(tmp_path, overrides=(override,)) == f"mine.toml: {problem}"


def test_an_unknown_model_is_answered_with_the_nearest(tmp_path: Path) -> None:
    message = _message(tmp_path, overrides=("model.name=digit_cnn",))
    assert message.startswith(
        "mine.toml: model.name: unknown model 'digit_cnn' (did you mean 'digits_cnn'?)"
    )
    assert "\n" not in message


def test_numbers_too_large_for_a_float_are_refused(tmp_path: Path) -> None:
    message = _message(tmp_path, overrides=(f"training.learning_rate=1{'0' * 400}",))
    assert message.endswith("is not a finite number")


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("rounds = 3", "round = 3").replace('"digits_cnn"', "7")
    message = _message(tmp_path, text, ("data.alpha=-1", "fleet.0.count=0", "seeds=a"))
    heading, *lines = message.splitlines()
    assert heading == "mine.toml: 6 problems"
    assert sorted(line.strip().split(":")[0] for line in lines) == [
        "data.alpha",
        "fleet.0.count",
        "model.name",
        "seeds.0",
        "training.round",
        "training.rounds",
    ]


def test_an_empty_file_is_told_what_it_needs(tmp_path: Path) -> None:
    message = _message(tmp_path, "")
    for needed in ("data.dataset: missing", "model.name: missing", "training.rounds: missing"):
        assert needed in message
    assert "fleet: empty" in message


def test_text_that_is_not_toml_is_one_line_with_its_number(tmp_path: Path) -> None:
    message = _message(tmp_path, "[data]\ndataset = \n")
    assert "mine.toml is not valid TOML" in message
    assert "line 2" in message
    assert "\n" not in message


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no scenario file .*absent\.toml: check the path"):
        Scenario.load(tmp_path / "absent.toml")


def test_a_folder_or_a_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot be read"):
        Scenario.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="it is not UTF-8 text"):
        Scenario.load(tmp_path / "binary.toml")


def test_names_of_other_registries_are_left_to_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    scenario = Scenario.load(path, ["methods=full,new_policy", "method.full.codec=new_codec"])
    assert scenario.methods[1].policy == "new_policy"
    assert scenario.methods[0].codec == "new_codec"


@pytest.mark.parametrize(
    "text", ["[" + ".".join(["a"] * 900) + "]", "a = " + "[" * 3000 + "]" * 3000]
)
def test_a_file_that_is_nested_too_deeply_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match="nested too deeply"):
        Scenario.load(path)
