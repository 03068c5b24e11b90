"""``fl-elastic plan``: its JSON, its files, and how it fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, call, module_here, result
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.cli import planned
from fl_elastic.groups import Mode
from fl_elastic.losses import classification_loss
from fl_elastic.planning import POLICIES, policies
from fl_elastic.planning.importance.channel_scores import FisherChannels
from fl_elastic.profiling import load_profile, profile_model
from fl_elastic.training import SelectionState, Timing, TrainerOptions
from fl_elastic.training.planner import Planner

MODELS = """
import torch
from torch import nn


def tiny():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def of_three():
    return nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))


def broken():
    raise RuntimeError("no weights\\nanywhere")


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, x):
        raise ValueError("no thanks\\nreally")


class Types(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, x):
        return self.layer(None)


class InADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.aux = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return {"out": self.layer(x), "aux": self.aux(x)}


class NoParameters(nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))
"""

KEYS = {
    "full_step_seconds", "predicted_step_seconds", "measured_step_seconds", "requested_speedup",
    "achieved_speedup", "floor_speedup", "groups",
}  # fmt: skip
GROUP_KEYS = {
    "name", "parameters", "update_seconds", "path_seconds", "importance", "selected", "mode",
}  # fmt: skip
POLICY_KEYS = {
    "policy", "groups", "depth", "recomputed", "predicted_step_seconds", "predicted_speedup",
    "step_fraction", "activation_bytes", "least_activation_bytes", "backward_bytes", "peak_bytes",
    "backward_macs", "uplink_bytes",
}  # fmt: skip
SMALL = ("--input", "3,16,16", "--batch-size", "4", "--threads", "1")

Plan = Callable[..., Ended]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Plan:
    """``fl-elastic plan`` in a folder with a module of models."""
    return partial(module_here(tmp_path, monkeypatch, capsys, MODELS), "plan")


def test_the_json_has_what_the_contract_says(plan: Plan) -> None:
    found = result(plan("mine:tiny", *SMALL, "--speedup", "1.5", "--json"))
    assert set(found) >= KEYS
    assert found["measured_step_seconds"] is None
    assert found["requested_speedup"] == 1.5
    assert found["full_step_seconds"] > 0
    assert found["achieved_speedup"] == pytest.approx(
        found["full_step_seconds"] / found["predicted_step_seconds"]
    )
    assert [group["name"] for group in found["groups"]] == ["6", "2", "0"]
    for group in found["groups"]:
        assert set(group) >= GROUP_KEYS
        assert isinstance(group["selected"], bool)
        assert group["selected"] is (group["mode"] != "frozen")
        assert group["update_seconds"] >= 0
        assert group["path_seconds"] >= 0
    assert found["groups"][0]["parameters"] == ["6.weight", "6.bias"]


def test_all_plans_that_are_timed_share_one_fisher_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    score = FisherChannels.score

    def counted(*given: Any) -> Any:
        passes.append(given)
        return score(*given)

    monkeypatch.setattr(FisherChannels, "score", counted)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    batch, policy = planned.random_batch((3, 8, 8), 4, 10), POLICIES.make("tinytrain")
    costs = profile_model(model, classification_loss, batch, optimizer_fn=planned.sgd)
    options = TrainerOptions(timing=Timing(closed_loop=False))
    planner = Planner(
        model, classification_loss, policy=policy, budget=Budget(), options=options,
        state=SelectionState(), optimizer=lambda: planned.sgd(model.parameters()),
    )  # fmt: skip
    planner.begin(costs, 1, [batch] * 2)
    planner.measure_importance([batch] * 2)
    everything = POLICIES.make("full").plan(planner.request())
    for count, share in ((2, 1 / 2), (1, 1 / 4)):
        modes = Mode.FULL, Mode.channels(share, "out")
        ready = planner.with_channels(replace(everything, modes=modes, transforms=()))
        assert len(ready.channels["0"]) == count
    assert len(passes) == 1


def test_a_model_of_few_classes_is_planned(plan: Plan) -> None:
    """It is given no class that it does not have, and its targets are drawn as for others."""
    found = result(plan("mine:of_three", "--input", "6", "--batch-size", "4", "--json"))
    assert [group["name"] for group in found["groups"]] == ["4", "2", "0"]
    assert found["full_step_seconds"] > 0
    for seed in range(3):
        found = result(plan("mine:InADict", "--input", "6", "--seed", str(seed), "--json"))
        assert {group["name"] for group in found["groups"]} == {"layer", "aux"}


def test_a_torchvision_model_is_planned(plan: Plan) -> None:
    found = result(plan(
        "squeezenet1_0", "--input", "3,64,64", "--batch-size", "2", "--threads", "1",
        "--speedup", "2", "--json",
    ))  # fmt: skip
    assert set(found) >= KEYS
    assert len(found["groups"]) == 26
    assert any(group["selected"] for group in found["groups"])
    # Everything costs a full step: it is within half of one only if steps are left out.
    assert not all(group["selected"] for group in found["groups"]) or found["step_fraction"] < 1
    assert found["achieved_speedup"] >= 2 * found["step_fraction"] * 0.99


def test_every_policy_stands_beside_the_chosen_one(plan: Plan) -> None:
    found = result(
        plan("mine:tiny", *SMALL, "--speedup", "1.3", "--policy", "last_k", "--all", "--json")
    )
    reports = {report["policy"]: report for report in found["policies"]}
    assert sorted(reports) == policies()
    for name in ("bsr", "e_vit"):
        assert "0 blocks were found" in reports.pop(name)["refused"]
    for report in reports.values():
        assert set(report) == POLICY_KEYS
    chosen = reports["last_k"]
    assert chosen["predicted_step_seconds"] == found["predicted_step_seconds"]
    assert chosen["uplink_bytes"] == found["uplink_bytes"]
    # The most at one time beyond inference, where weights and inference come on top.
    assert 0 < found["step_bytes"] < chosen["peak_bytes"]
    assert reports["full"]["groups"] == 3 and reports["head"]["groups"] == 1


def test_only_the_chosen_policy_is_asked_if_wanted(plan: Plan) -> None:
    found = result(plan("mine:tiny", *SMALL, "--policy", "head", "--json"))
    assert [report["policy"] for report in found["policies"]] == ["head"]
    text = plan("mine:tiny", *SMALL, "--policy", "head").out
    assert "head" in text and "last_k" not in text and text.count("speed-up") == 1
    assert "bytes are sent" in text
    text = plan("mine:tiny", *SMALL, "--policy", "head", "--all").out
    assert "last_k" in text and "costs of a step, predicted" in text


def test_a_policy_that_refuses_the_budget_says_why(plan: Plan) -> None:
    full = result(plan("mine:tiny", *SMALL, "--policy", "full", "--json"))
    tight = (*SMALL, "--uplink", full["uplink_bytes"] - 4)
    found = result(plan("mine:tiny", *tight, "--all", "--json"))
    refused = {r["policy"]: r["refused"] for r in found["policies"] if "refused" in r}
    assert "uplink" in refused["full"] and "elastic" not in refused
    assert "full refuses: policy 'full' sends" in " ".join(
        plan("mine:tiny", *tight, "--all").out.split()
    )
    assert plan("mine:tiny", *tight, "--policy", "full").is_one_line_of_error()


def test_a_run_of_many_rounds_by_where_the_cut_lies(plan: Plan, tmp_path: Path) -> None:
    arguments = (
        "squeezenet1_0", "--input", "3,64,64", "--batch-size", "2", "--threads", "1",
        "--policy", "head", "--profile", tmp_path / "profile.json", "--rounds", 20, "--examples", 6,
    )  # fmt: skip
    found = result(plan(*arguments, "--epochs", 2, "--json"))
    *cuts, everything = found["schedule"]
    assert everything["seconds"] == pytest.approx(20 * 2 * 3 * found["full_step_seconds"])
    assert cuts[0]["seconds"] < everything["seconds"] and cuts[0]["first_pass_seconds"] > 0
    assert "schedule" not in result(plan(*arguments[:-4], "--json"))
    shown = plan(*arguments)
    assert shown.status == 0 and "20 rounds of 5 epochs over 6 examples" in shown.out
    assert everything["deepest_group"] in shown.out


def test_a_plan_of_channels_can_be_measured(plan: Plan) -> None:
    found = result(plan("mine:tiny", *SMALL, "--policy", "tinytrain", "--measure", "--json"))
    assert any(group["mode"].startswith("out/") for group in found["groups"])
    assert found["measured_step_seconds"] > 0


def test_measuring_replaces_the_prediction(plan: Plan) -> None:
    found = result(
        plan("mine:tiny", *SMALL, "--policy", "head", "--speedup", "1.2", "--measure", "--json")
    )
    assert found["measured_step_seconds"] > 0
    assert found["achieved_speedup"] == pytest.approx(
        found["full_step_seconds"] / found["measured_step_seconds"]
    )


@pytest.mark.parametrize("measure", [(), ("--measure",)])
def test_one_plan_has_one_speed_up(measure: tuple[str, ...], plan: Plan) -> None:
    out = plan("mine:tiny", *SMALL, "--policy", "head", "--speedup", "1.2", "--all", *measure).out
    line = " ".join(out.split("full step ")[1].split())
    full, step, got = re.match(
        r"([\d.]+) ms, planned ([\d.]+) ms \((?:measured|predicted)\); speed-up requested 1.20, achieved ([\d.]+)",
        line,
    ).groups()  # type: ignore[union-attr]
    (row,) = [
        each.split()
        for each in out.split("costs of a step")[1].splitlines()
        if each.startswith("head")
    ][:1]
    assert row[3] == step and row[4] == got
    # Rounded to tenths of a millisecond.
    low, high = (
        (float(full) - 0.05) / (float(step) + 0.05),
        (float(full) + 0.05) / (float(step) - 0.05),
    )
    assert low - 0.005 <= float(got) <= high + 0.005


def test_without_json_it_is_a_table_and_a_sentence(plan: Plan) -> None:
    ended = plan("mine:tiny", *SMALL, "--speedup", "1.2")
    assert ended.status == 0
    assert "importance" in ended.out
    assert "speed-up requested 1.20" in " ".join(ended.out.split())


@pytest.mark.parametrize("speedup", ["50", "1e6"])
def test_beyond_the_floor_it_takes_fewer_steps_and_says_so(speedup: str, plan: Plan) -> None:
    found = result(plan("mine:tiny", *SMALL, "--speedup", speedup, "--json"))
    assert found["floor_speedup"] < 50
    assert 0 < found["step_fraction"] < 1
    text = " ".join(plan("mine:tiny", *SMALL, "--speedup", speedup).out.split())
    assert "below the floor: one step cannot be faster than" in text
    assert "of the steps will be taken" in text


def test_the_profile_is_written_and_read_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "profile.json"
    first = result(plan("mine:tiny", *SMALL, "--profile", path, "--json"))
    written = path.read_bytes()
    assert load_profile(path).full_step_seconds == first["full_step_seconds"]

    def again(*arguments: object, **options: object) -> None:
        raise AssertionError("measured although a profile is at hand")

    monkeypatch.setattr(planned, "profile_model", again)
    second = result(plan("mine:tiny", *SMALL, "--profile", path, "--json"))
    assert path.read_bytes() == written
    assert second["full_step_seconds"] == first["full_step_seconds"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": "other"}', b"[" * 9999])
def test_a_corrupt_profile_is_made_anew(content: bytes, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    found = result(plan("mine:tiny", *SMALL, "--profile", path, "--json"))
    assert load_profile(path).full_step_seconds == found["full_step_seconds"]


def test_a_profile_of_another_batch_is_made_anew(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result(plan("mine:tiny", *SMALL, "--profile", path, "--json"))
    result(plan("mine:tiny", *SMALL, "--batch-size", "8", "--profile", path, "--json"))
    assert load_profile(path).key.batch_shape == (8, 3, 16, 16)


FAILURES: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown model": (("resnet81",), "unknown model 'resnet81' (did you mean 'resnet"),
    "model that raises": (("mine:broken",), "no weights"),
    "forward that raises": (("mine:Raises", *SMALL), "no thanks"),
    "forward of wrong types": (("mine:Types", *SMALL), "error: "),
    "nothing to train": (("mine:NoParameters", *SMALL), "error: "),
    "shape the model rejects": (("mine:tiny", "--input", "5,16,16"), "(16, 5, 16, 16)"),
    "shape of one number": (("mine:tiny", "--input", "7"), "(16, 7)"),
    "more classes than outputs": (("mine:tiny", *SMALL, "--classes", "5000"), "error: "),
    "shape with letters": (("mine:tiny", "--input", "3,x"), "'3,x' is not a shape"),
    "shape of zero": (("mine:tiny", "--input", "3,0,8"), "'3,0,8' is not a shape"),
    "empty shape": (("mine:tiny", "--input", ""), "'' is not a shape"),
    "unknown policy": (("mine:tiny", *SMALL, "--policy", "elastik"), "did you mean 'elastic'"),
    "unknown importance": (("mine:tiny", *SMALL, "--importance", "elastik"), "did you mean"),
    "slower than full": (("mine:tiny", *SMALL, "--speedup", "0.5"), "speedup 0.5 is below 1"),
    "no uplink": (("mine:tiny", *SMALL, "--uplink", "1"), "uplink"),
    "no memory, and what would do": (
        ("mine:tiny", *SMALL, "--memory", "1"),
        "the head alone takes",
    ),
    "profile in a file": (("mine:tiny", *SMALL, "--profile", "FILE/x.json"), "cannot write"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_it_fails_with_one_line(name: str, plan: Plan) -> None:
    arguments, hint = FAILURES[name]
    ended = plan(*(each.replace("FILE", __file__) for each in arguments))
    assert ended.is_one_line_of_error(), (ended.status, ended.err, ended.out)
    assert hint in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("mine:tiny", "--batch-size", "0"),
        ("mine:tiny", "--speedup", "fast"),
        ("mine:tiny", "--spedup", "2"),
        ("mine:tiny", "--classes", "1"),
        ("mine:tiny", "--threads", "0"),
        ("mine:tiny", "--epochs", "0"),
    ],
)
def test_wrong_usage_is_explained(arguments: tuple[str, ...], plan: Plan) -> None:
    ended = plan(*arguments)
    assert ended.status == 2
    assert arguments[1] in ended.err
    assert "Traceback" not in ended.err
    assert not ended.out


def test_without_a_command_it_shows_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = call(monkeypatch, capsys)
    assert {"plan", "simulate", "bench"} <= set((ended.out + ended.err).split())


def test_an_unknown_command_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = call(monkeypatch, capsys, "plann")
    assert ended.status == 2
    assert "plann" in ended.err


def test_long_names_stay_apart_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_elastic.cli.plan import _print

    monkeypatch.setenv("COLUMNS", "80")
    names = [f"encoder.layers.encoder_layer_11.self_attention.in_projection_{n}" for n in range(3)]
    group = {
        "mode": "full", "update_seconds": 1.0, "path_seconds": 1.0, "importance": 1.0,
        "selected": True,
    }  # fmt: skip
    result = {
        "policy": "elastic", "groups": [{"name": name} | group for name in names],
        "full_step_seconds": 1.0, "predicted_step_seconds": 1.0, "requested_speedup": 1.0,
        "achieved_speedup": 1.0, "measured_step_seconds": None, "step_fraction": 1.0,
    }  # fmt: skip
    _print("vit", result)
    shown = capsys.readouterr().out
    column = "".join(
        line.split("\u2502")[1].strip() for line in shown.splitlines() if "\u2502" in line
    )
    assert all(name in column for name in names)
