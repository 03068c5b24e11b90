"""The memory benchmark: its ways to run a plan, and what it counts."""

from __future__ import annotations

import json

import pytest
import torch
from small_subject import small_subject
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Mode
from fl_elastic.methods.joint.policy import JointPolicy
from fl_elastic.planning import Plan
from fl_elastic.planning.lean_layers import LeanLayers
from fl_elastic.planning.recompute import Recomputation
from fl_elastic.profiling.memory import step_memory
from fl_elastic_simulations.benchmarks import memory as memory_module
from fl_elastic_simulations.benchmarks.memory import (
    FullStep,
    MemoryCell,
    cells,
    full_step,
    memory_row,
    mode_counts,
    plan_policy,
    reductions,
)
from fl_elastic_simulations.benchmarks.peak import Job, Peak, peak_of
from fl_elastic_simulations.benchmarks.steps import (
    SavedBytes,
    interleaved_seconds,
    saved_bytes,
    vanilla,
)
from fl_elastic_simulations.benchmarks.subject import Subject, subject


@pytest.fixture(scope="module")
def small() -> Subject:
    return small_subject()


def plan_of(small: Subject, **changes: object) -> Plan:
    full = small.plan("full", Budget())
    return Plan(**{**vars(full), **changes})


def test_every_cell_has_its_own_name() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) == 2 * (3 * 4 + 1)


def test_the_vanilla_way_trains_the_same_groups_whole(small: Subject) -> None:
    modes = [Mode.FROZEN] * len(small.graph.groups)
    modes[:4] = [Mode.FULL, Mode.channels(0.5), Mode.filtered(2), Mode.BIAS]
    plan = plan_of(
        small,
        modes=tuple(modes),
        transforms=(LeanLayers(everywhere=True, channels={"2.2": (0, 1)}), Recomputation(("2",))),
    )
    plain = vanilla(plan)
    assert plain.modes[:4] == (Mode.FULL, Mode.FULL, Mode.FULL, Mode.BIAS)
    assert plain.mask.tolist() == plan.mask.tolist()
    assert plain.transforms == ()


def test_saved_bytes_of_one_convolution_and_the_head_by_hand(small: Subject) -> None:
    names = [group.name for group in small.graph.groups]
    modes = [Mode.FROZEN] * len(names)
    modes[names.index("5")] = modes[names.index("2.2")] = Mode.FULL
    saved = saved_bytes(
        small.model, plan_of(small, modes=tuple(modes)), small.graph, small.batches[0]
    )
    # Inputs of the convolution and the head, and of the loss: the log probabilities and the classes.
    inputs = 4 * 8 * 16 * 8 * 8 + 4 * 8 * 16
    loss = 4 * 8 * 4 + 8 * 8
    assert inputs <= saved.stored <= inputs + loss + 64
    assert saved.largest_block == 0 and saved.total == saved.stored


def test_counting_leaves_the_model_as_it_was(small: Subject) -> None:
    before = {name: value.clone() for name, value in small.model.state_dict().items()}
    plan = small.plan("joint", Budget(memory=20_000.0))
    saved_bytes(small.model, plan, small.graph, small.batches[0])
    interleaved_seconds(
        small.model, [plan, vanilla(plan)], small.graph, small.batches[0], repeats=1
    )
    after = small.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.requires_grad and p.grad is None for p in small.model.parameters())


def test_a_recomputed_block_is_counted_while_it_runs_again(small: Subject) -> None:
    block = next(b for b in small.graph.blocks if b.module == "2")
    lean = LeanLayers(everywhere=True)
    plain = plan_of(small, transforms=(lean,))
    again = plan_of(small, transforms=(lean, Recomputation(("2",))))
    stored, recomputed = (
        saved_bytes(small.model, plan, small.graph, small.batches[0]) for plan in (plain, again)
    )
    assert recomputed.stored < stored.stored
    # The outputs of its first convolution, for the rectifier and the second one.
    assert recomputed.largest_block >= 4 * 8 * 16 * 8 * 8
    assert recomputed.total <= stored.total + recomputed.largest_block
    said = step_memory(small.profile, again.modes, lean=True, recomputed=[block])
    assert recomputed.total <= said.activations * 1.02


def test_totals_and_reductions() -> None:
    assert SavedBytes(100, 20).total == 120
    found = reductions(100, 399, 800)
    assert found["times_less_than_same_groups"] == pytest.approx(3.99)
    assert not found["target_met_for_same_groups"] and found["target_met_against_full"]


def test_exact_gradients_are_whole_ones(small: Subject) -> None:
    policy = plan_policy("joint, exact gradients")
    assert isinstance(policy, JointPolicy) and policy.needs.modes == () and JointPolicy.needs.modes
    plan = small.plan(policy, Budget(memory=30_000.0))
    assert {mode.kind for mode in plan.modes} <= {"full", "frozen"}
    assert plan_policy("elastic") == "elastic"
    assert mode_counts(()) == ""


def test_a_row_holds_all_ways_and_what_was_predicted(
    small: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []

    def peak(job: Job) -> Peak:
        asked.append(job)
        return Peak(1000 * len(asked), reset=True)

    monkeypatch.setattr(memory_module, "peak_of", peak)
    full = full_step(small)
    assert full.bytes == full.saved + 8 * sum(p.numel() for p in small.model.parameters())
    row = memory_row(MemoryCell("small", "joint", 3), small, full, repeats=1)
    assert row["budget_bytes"] == pytest.approx(full.bytes / 3)
    assert row["predicted_bytes"] <= row["budget_bytes"]
    # What lean layers save shows where they are tested; a plan of few groups here may have nothing to save. A lean
    # rectifier adds a bit per output where the next layer keeps that output anyway.
    assert 0 < row["saved_bytes_lean"] <= row["saved_bytes_vanilla"] * (1 + 1 / 32)
    assert row["saved_bytes_vanilla"] <= row["saved_bytes_full"]
    peaks = [row[f"peak_bytes_{way}"] for way in ("full", "lean", "vanilla")]
    assert peaks == [1000, 2000, 3000]
    assert [job.plan.lean for job in asked] == [False, True, False]
    assert asked[0].batch_shape == (8, 3, 16, 16)
    json.dumps(row)


def test_everything_is_trained_in_the_least_memory(
    small: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "peak_of", lambda job: Peak(1, reset=True))
    row = memory_row(MemoryCell("small", "full", 0), small, full_step(small), repeats=1)
    assert row["groups"] == len(small.graph.groups)
    assert row["predicted_bytes"] == pytest.approx(row["budget_bytes"], abs=1)
    assert row["saved_bytes_vanilla"] == row["saved_bytes_full"]
    # A lean rectifier adds a bit per output where the next layer keeps that output anyway.
    assert row["saved_bytes_lean"] <= row["saved_bytes_full"] * (1 + 1 / 32)


def test_a_refused_budget_is_a_row_of_its_own(small: Subject) -> None:
    full = FullStep(small.plan("full", Budget()), 0, 30.0, Peak(0, reset=True))
    row = memory_row(MemoryCell("small", "elastic", 16), small, full)
    assert set(row) == {"budget_bytes", "refused"} and "head" in row["refused"]


@pytest.mark.slow
def test_a_fresh_process_tells_what_a_step_takes() -> None:
    of = subject("squeezenet1_0", 96, 8)
    plan = of.plan("full", Budget())
    saved = saved_bytes(of.model, plan, of.graph, of.batches[0]).total
    job = Job(of.name, of.classes, (8, 3, 96, 96), plan, of.graph)
    peak = peak_of(job)
    weights = 8 * sum(p.numel() for p in of.model.parameters())
    assert 0.8 * (saved + weights) < peak.bytes < 3 * (saved + weights)
    with pytest.raises(TrainingError, match="no_such_model"):
        peak_of(Job("no_such_model", 10, (8, 3, 96, 96), plan, of.graph))


def test_the_small_model_has_blocks(small: Subject) -> None:
    assert isinstance(small.model, nn.Sequential)
    assert "2" in {block.module for block in small.graph.blocks}
