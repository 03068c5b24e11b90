"""What `docs/measured.md` shows is what was measured and committed."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import DOCUMENTS

from fl_elastic.profiling import load_profile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic_simulations.benchmarks.federation import cell_name
from fl_elastic_simulations.benchmarks.federation_methods import METHODS as METHODS_OF_CLIENTS
from fl_elastic_simulations.benchmarks.federation_methods import OURS, REFERENCE
from fl_elastic_simulations.benchmarks.federation_page import (
    federation_table,
    write_federation_page,
)
from fl_elastic_simulations.benchmarks.federation_summary import cells_of, interval, sooner_than
from fl_elastic_simulations.benchmarks.federation_tables import filled
from fl_elastic_simulations.benchmarks.federation_tasks import (
    CONVERGED,
    LONGER,
    PRETRAINED,
    SEEDS,
    TASKS,
)
from fl_elastic_simulations.benchmarks.first_fits import first_fits_markdown
from fl_elastic_simulations.benchmarks.fit_peaks import fit_peaks_markdown
from fl_elastic_simulations.benchmarks.forgetting import forget_filled
from fl_elastic_simulations.benchmarks.house import house_markdown
from fl_elastic_simulations.benchmarks.liars import LIES
from fl_elastic_simulations.benchmarks.liars import RULES as LIARS_RULES
from fl_elastic_simulations.benchmarks.lora import BASE, LORA, SOLVED, lora_filled
from fl_elastic_simulations.benchmarks.lora import SEEDS as LORA_SEEDS
from fl_elastic_simulations.benchmarks.one_device import elsewhere_markdown, one_device_markdown
from fl_elastic_simulations.benchmarks.one_read import ACTS
from fl_elastic_simulations.benchmarks.online import (
    CHOSEN_ON,
    DEFAULT,
    METHODS,
    online_markdown,
    online_means,
)
from fl_elastic_simulations.benchmarks.online import STREAMS as ONLINE_STREAMS
from fl_elastic_simulations.benchmarks.poison import ATTACKS, RULES
from fl_elastic_simulations.benchmarks.server_rates import SETTINGS
from fl_elastic_simulations.benchmarks.side_by_side import BASE as SIDE_BY_SIDE_BASE
from fl_elastic_simulations.benchmarks.side_by_side import side_by_side_filled
from fl_elastic_simulations.benchmarks.side_by_side_tasks import TASKS as COMPARED
from fl_elastic_simulations.benchmarks.stream_methods import ALONG, MORE, READS
from fl_elastic_simulations.benchmarks.stream_methods import METHODS as WAYS
from fl_elastic_simulations.benchmarks.stream_methods import REFERENCE as REPLAY
from fl_elastic_simulations.benchmarks.stream_summary import stream_markdown
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS as STREAMS
from fl_elastic_simulations.benchmarks.where_to_read import TASKS as READ
from fl_elastic_simulations.benchmarks.where_to_read import read_filled, read_peaks_markdown
from fl_elastic_simulations.engine.merging_cost import MERGED
from fl_elastic_simulations.models.adapters import RANK
from fl_elastic_simulations.peers.low_rank import affordable_rank

ROOT = Path(__file__).parent.parent
MEASURED = (ROOT / "docs" / "measured.md").read_text()
RESULTS = ROOT / "simulations" / "results"
STREAMS_PAGE = (ROOT / "docs" / "streams.md").read_text()


def section(title: str) -> str:
    """Return what stands under a heading of any level, up to the next one of `##`."""
    start = re.search(f"^##+ {re.escape(title)}$", MEASURED, flags=re.MULTILINE)
    assert start is not None
    return re.split(r"^## ", MEASURED[start.end() :], flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("scenario", "document"),
    [
        ("demo", "docs/quickstart.md"),
        ("fashion_mnist", "docs/measured.md"),
        ("cifar10", "docs/measured.md"),
    ],
)
def test_tables_show_the_committed_results(scenario: str, document: str) -> None:
    methods = json.loads((RESULTS / f"{scenario}.json").read_text())["methods"]
    text, full = (ROOT / document).read_text(), methods["full"]
    for name, method in methods.items():
        row = (
            f"| {name} | {100 * method['final_accuracy']:.1f} ± {100 * method['final_accuracy_std']:.1f} "
            f"| {method['simulated_seconds'] / full['simulated_seconds']:.2f} "
            f"| {method['uplink_bytes'] / full['uplink_bytes']:.2f} |"
        )
        assert row in text


def test_the_table_of_the_buildings_is_the_committed_one() -> None:
    rows = json.loads((RESULTS / "house.json").read_text())["rows"]
    assert f"<!-- house -->\n{house_markdown(rows)}\n<!-- /house -->" in MEASURED


def rows_of(name: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def test_the_figures_in_short_are_the_committed_ones() -> None:
    lines = {
        line[4:].split(".**")[0]: line
        for line in section("In short").splitlines()
        if line.startswith("- **")
    }
    solver, budget = rows_of("solver"), rows_of("budget")
    twice = [row["achieved_speedup"] for name, row in budget.items() if name.endswith(" at 2.0")]
    exact = f"{solver['exactness']['mismatches']} of {solver['exactness']['instances']:,} random"
    assert exact in lines["Exact plans"]
    assert (
        f"{solver['time at 500 groups']['median_cpu_milliseconds']:.1f} ms" in lines["Exact plans"]
    )
    assert f"{min(twice):.2f} to {max(twice):.2f} times" in lines["Exact plans"]

    transfer, ours = rows_of("transfer"), "head first, elastic, cached prefix, at 3, 3 epochs"
    reached, full = transfer[f"summary {ours}"], transfer["summary full"]
    beside = transfer[f"paired {ours}"]["time"]
    shown = (
        f"{percent(reached['accuracy'])} % in {reached['time']:.2f} of the time ({beside:.2f} timed"
    )
    assert shown in lines["Fine-tuning"]
    assert f"gets {percent(full['accuracy'])} %" in lines["Fine-tuning"]

    for model, words in (("mobilenet_v2", "times fewer bytes"), ("resnet18", "times fewer,")):
        row = rows_of("memory")[f"{model} | joint, exact gradients | 1/8"]
        assert f"{row['times_less_than_same_groups']:.1f} {words}" in lines["Memory"]
        for when in ("lean", "full"):
            assert f" {row[f'peak_bytes_{when}'] / 1e6:.0f} MB" in lines["Memory"].replace("(", " ")

    merging = rows_of("aggregation")
    for kind in MERGED[:2]:
        row = merging[f"{kind} | 100"]
        assert f"{1000 * row['seconds_per_reply']:.1f} ms" in lines["Server"]

    theirs, whole = (merging[f"{kind} | 100"]["peak_models"] for kind in MERGED[:2])
    assert f"in {whole:.0f} models of memory ({theirs:.0f})" in lines["Server"]

    streams = rows_of("stream")
    latent, replay = (
        streams[f"summary fashion-classes | {method}"]
        for method in ("elastic, latent replay", "full, replay")
    )
    accuracies = f"{percent(latent['score'])} and {percent(replay['score'])} %"
    assert accuracies in lines["Streams"]
    assert f"{latent['adapting_seconds_ratio']:.2f} of its time" in lines["Streams"]
    assert latent["store_bytes_ratio"] < 0.1 and "a tenth of its store" in lines["Streams"]
    assert len(rows_of("faults")) == 12 and "in twelve ways" in lines["Real fleets"]


def test_the_solver_is_as_exact_and_fast_as_claimed() -> None:
    rows = json.loads((RESULTS / "solver.json").read_text())["rows"]
    exact, largest = rows["exactness"], rows["time at 500 groups"]
    claim = f"{exact['mismatches']} of {exact['instances']:,} random instances"
    assert claim in MEASURED
    assert f"{largest['median_cpu_milliseconds']:.1f} ms at 500 groups" in MEASURED
    plans = [rows[f"plans at {groups} groups"] for groups in (60, 150)]
    worst, first = (
        [f"{row[f'worst_{which}_cpu_milliseconds']:.1f}" for row in plans]
        for which in ("median", "first")
    )
    half = [f"{row['median_cpu_milliseconds']:.1f}" for row in plans]
    assert f"takes {worst[0]} ms at 60 groups and {worst[1]} ms at 150" in MEASURED
    assert f"at most {half[0]} and {half[1]} ms" in MEASURED
    assert f"up to {first[0]} and {first[1]} ms" in MEASURED


def test_budget_rows_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "budget.json").read_text())["rows"]
    models = {name.split(" at ")[0] for name in rows}
    assert len(models) == 4
    for model in models:
        cells = [rows[f"{model} at {speedup}"]["achieved_speedup"] for speedup in (1.5, 2.0, 2.5)]
        assert f"| {model} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in MEASURED


def test_first_fits_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "first_fits.json").read_text())["rows"]
    assert first_fits_markdown(rows) in section("First fits, with everything charged")


def test_transfer_rows_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "transfer.json").read_text())["rows"]
    methods = {
        name.removeprefix("summary "): row for name, row in rows.items() if "summary" in name
    }
    assert len(methods) > 10
    for name, row in methods.items():
        shown = f"{100 * row['accuracy']:.1f} ± {100 * row['spread']:.1f} | {row['time']:.2f} |"
        assert f"| {name} | {shown}" in MEASURED


def test_one_device_rows_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "one_device.json").read_text())["rows"]
    text = section("One device, with features that are kept")
    assert one_device_markdown(rows) in text and elsewhere_markdown(rows) in text
    for sentence in said_of_one_device():
        assert sentence in text
    best, full = rows["summary solved head, block 14, 2 epochs"], rows["summary full"]
    turn = rows["in turn solved head, block 14, 2 epochs"]
    said = (
        f"{100 * best['accuracy']:.1f} % in {turn['time']:.2f} of the CPU time in which full fine-tuning gets "
        f"{100 * full['accuracy']:.1f} %"
    )
    assert said in text
    taken = {
        row["cut"].split(".")[1]
        for name, row in rows.items()
        if "by worth" in name and "cut" in row
    }
    deepest, highest = (pick(map(int, taken)) for pick in (min, max))
    assert f"took places from `features.{highest}` to `features.{deepest}`" in text


def said_of_one_device() -> list[str]:
    rows = rows_of("one_device")

    def elsewhere(task: str, method: str, key: str) -> float:
        begin = f"{task}: {method} | 0.0003 | "
        return statistics.fmean(
            float(rows[f"{begin}{s}"][key]) for s in (0, 1) if f"{begin}{s}" in rows
        )

    def ends(task: str) -> str:
        ahead = 100 * (elsewhere(task, chosen, "accuracy") - elsewhere(task, "full", "accuracy"))
        further = 100 * (elsewhere(task, more, "accuracy") - elsewhere(task, chosen, "accuracy"))
        taken, whole, longer = (elsewhere(task, m, "seconds") for m in (chosen, "full", more))
        return (
            f"a head at chosen places ends {abs(ahead):.1f} points {'above' if ahead > 0 else 'below'} full "
            f"fine-tuning, after {taken:.0f} instead of {whole:.0f} seconds; an epoch above a cut adds "
            f"{further:.1f} points and takes {longer:.0f} seconds."
        )

    def birds(method: str) -> float:
        last = rows["summary solved head"]["accuracy"]
        return float(rows[f"summary {method}"]["accuracy"] - last)

    chosen, more = "chosen places", "chosen places, 1 epoch above a cut"
    return [
        f"On signs {ends('signs')}",
        f"On CIFAR-10 {ends('objects')}",
        f"On birds chosen places end {100 * birds(chosen):.1f} points above the last layer alone, and "
        f"{-100 * rows['summary chosen places']['against_full']:.1f} below full fine-tuning.",
    ]


def test_tables_of_where_a_head_reads_are_exactly_the_committed_cells() -> None:
    rows = rows_of("where_to_read")
    pretrained = [name for name, task in READ.items() if task.pretrained]
    scratch = [name for name in READ if name not in pretrained]
    marks = [*pretrained, "sizes", *scratch]
    assert re.findall(r"<!-- read ([\w-]+) -->", MEASURED) == marks
    assert read_filled(MEASURED, rows) == MEASURED
    assert read_peaks_markdown(rows) in section("Where a head in closed form reads")
    tasks = {name.split(" | ")[0] for name in rows}
    assert tasks == {*READ, "peak"}


def test_what_is_said_of_where_a_head_reads_is_what_the_rows_say() -> None:
    *said, beside, short = said_of_reading()
    for sentence in said:
        assert sentence in section("Where a head in closed form reads")
    assert beside in section("Unequal clients") and short in section("In short")
    # "No row ends higher."
    read, rounds = rows_of("where_to_read"), rows_of("federation")
    for task, there in zip(list(READ)[4:], _FROM_SCRATCH, strict=True):
        drawn = [r["accuracy"] for name, r in read.items() if f"{task} | 2,048" in name]
        ends = [r["accuracy"] for name, r in rounds.items() if f"summary {there} | " in name]
        assert len(ends) > 10 and max(ends) < statistics.fmean(drawn)


_FROM_SCRATCH = ("signs-correlated", "cifar-correlated-0.3", "har-correlated")


def said_of_reading() -> list[str]:
    rows = rows_of("where_to_read")

    def of(task: str, method: str, key: str = "accuracy") -> float:
        found = [r[key] for name, r in rows.items() if name.startswith(f"{task} | {method}")]
        return statistics.fmean(found)

    def ahead(task: str, other: str) -> float:
        return 100 * (of(task, "chosen places") - of(task, other))

    def said(task: str) -> str:
        shown = (f"{100 * of(task, method):.1f} %" for method in ("chosen places", "last layer"))
        return "{} ({} at the last layer)".format(*shown)

    signs, objects, birds, clothes, *scratch = READ
    last, block, drawn = "last layer", "features.6@grid4", "2,048 random"
    first, second, third = (
        f"{100 * of(each, 'chosen places'):.1f} % ({100 * of(each, drawn):.1f})" for each in scratch
    )
    heads = (signs, objects, birds, clothes)

    def less(most: int) -> str:
        lost = [of(each, "at most 2560") - of(each, f"at most {most}") for each in heads]
        return "{:.1f}, {:.1f}, {:.1f} and {:.1f} points".format(*(100 * each for each in lost))

    sent = [
        max(of(t, f"at most {most}", "sent_bytes") for t in heads) / 1e6 for most in (1024, 2560)
    ]
    narrow, wide, deep, choosing, _, full = (rows[f"peak | {act}"]["peak_bytes"] for act in ACTS)
    return [
        f"Chosen places are {ahead(signs, last):.1f} points ahead of the last layer on signs, "
        f"{ahead(objects, last):.1f} on CIFAR-10, {ahead(clothes, last):.1f} on Fashion-MNIST and "
        f"{ahead(birds, last):.1f} on birds.",
        f"On birds the error on held-out examples is {of(birds, last, 'error'):.3f} at the last layer and "
        f"{of(birds, 'chosen places', 'error'):.3f} at the chosen places, so choosing gains next to nothing there.",
        f"One place for all is not enough: block 6 on a grid of 4 by 4 is {ahead(signs, block):.1f}, "
        f"{ahead(objects, block):.1f}, {ahead(birds, block):.1f} and {ahead(clothes, block):.1f} points behind "
        "what is chosen.",
        "Ridge regression on 2,048 random features of the input, which knows no pretrained weights, is right on "
        f"{100 * of(signs, drawn):.1f} % of the signs and {100 * of(clothes, drawn):.1f} % of Fashion-MNIST, where "
        f"the last layer of the pretrained network is on {100 * of(signs, last):.1f} and "
        f"{100 * of(clothes, last):.1f} %; on CIFAR-10 and birds it is behind the last layer.",
        f"Chosen places (2,048 random features) are right on {first} of the signs, {second} of CIFAR-10 and "
        f"{third} of the activities.",
        f"A head at block 6 peaks at {narrow / full:.2f} of what four full steps take, and one at the last "
        f"layer at {deep / full:.2f}.",
        f"On signs, CIFAR-10, birds and Fashion-MNIST at most 1,024 features cost {less(1024)} and at most 512 "
        f"{less(512)}; with 1,024 a client sends {sent[0]:.1f} MB at most, where it was {sent[1]:.1f}.",
        f"With 2,048 features, as chosen places often have, it peaks at {wide / full:.2f}",
        f"Choosing peaks at {choosing / full:.2f} of four full steps",
        "Ridge regression on 2,048 random features of the input, from one pass without a step, is right on "
        f"{100 * of(scratch[1], drawn):.1f} % of CIFAR-10, {100 * of(scratch[2], drawn):.1f} % of the activities "
        f"and {100 * of(scratch[0], drawn):.1f} % of the signs ([From scratch](#from-scratch)), and no row of the "
        "first three columns ends higher.",
        "- **Where to read.** A head in closed form at places that it chooses by held-out errors, from one pass "
        f"and without a step, on MobileNetV2: {said(signs)} of traffic signs, {said(objects)} of CIFAR-10, "
        f"{said(clothes)} of Fashion-MNIST and {said(birds)} of birds.",
    ]


def test_memory_rows_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "memory.json").read_text())["rows"]
    shown = {name: row for name, row in rows.items() if "exact" in name or "least" in name}
    assert len(shown) == 10
    for name, row in shown.items():
        model, _, share = name.split(" | ")
        same, full = row["times_less_than_same_groups"], row["times_less_than_full"]
        assert f"| {model} | {share} | {row['groups']} | {same:.1f} | {full:.1f} |" in MEASURED
    for sentence in said_of_memory():
        assert sentence in section("Memory")


def said_of_memory() -> list[str]:
    rows = rows_of("memory")

    def saved(model: str, *shares: int) -> list[float]:
        cells = [rows[f"{model} | joint, exact gradients | 1/{share}"] for share in shares]
        return [cell["times_less_than_same_groups"] for cell in cells]

    quarter, *below = saved("mobilenet_v2", 4, 8, 16)
    resnet = saved("resnet18", 4, 8, 16)
    longer = max(row["step_time_over_vanilla"] for row in rows.values()) - 1
    return [
        f"On MobileNetV2 the lean layers save at least {min(below):.1f} times the bytes of plain autograd on the "
        f"same groups at an eighth of the memory and below, and {quarter:.1f} times at a quarter.",
        f"On ResNet-18 they save {min(resnet):.1f} to {max(resnet):.1f} times from a quarter down:",
        f"A step with lean layers takes up to {100 * longer:.0f} % more time than plain autograd",
    ]


def test_peaks_of_first_fits_are_the_committed_ones() -> None:
    rows, text = rows_of("fit_peaks"), section("Memory")
    assert fit_peaks_markdown(rows) in text
    fits = [fit for row in rows.values() for name, fit in row.items() if name != "full"]
    trained = [fit for fit in fits if "refused" not in fit]
    assert (
        f"The largest of these peaks is {max(f['peak_over_budget'] for f in trained):.2f}" in text
    )
    predicted = [f["predicted_saved_bytes"] / f["counted_saved_bytes"] for f in trained]
    assert "within 2 %" in text and all(abs(share - 1) <= 0.02 for share in predicted)


@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v2"])
def test_filter_figures_are_the_committed_ones(model: str) -> None:
    rows = json.loads((RESULTS / "filter.json").read_text())["rows"]
    mode = "wx2" if model == "resnet18" else "wx4"
    steps = [
        rows[f"step | {model} at {pixels} | all convolutions"][f"{mode}_over_exact"]
        for pixels in (32, 64, 128)
    ]
    assert f"{mode} " + ", ".join(f"{step:.2f}" for step in steps) in MEASURED


def test_times_beside_full_training_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "transfer.json").read_text())["rows"]
    paired = [row["time"] for name, row in rows.items() if name.startswith("paired ")]
    assert len(paired) == 4
    assert all(f"{time:.2f}" in MEASURED for time in paired)


def test_the_tables_side_by_side_are_exactly_the_committed_cells() -> None:
    rows = rows_of("side_by_side")
    assert re.findall(r"<!-- side-by-side (\w+) -->", MEASURED) == list(COMPARED)
    assert side_by_side_filled(MEASURED, rows) == MEASURED
    cells = set(rows) - {SIDE_BY_SIDE_BASE}
    assert cells and all(re.fullmatch(r".+ \| .+ \| \d+", name) for name in cells)
    known = {(task, method) for task, each in COMPARED.items() for method in each.methods}
    assert {tuple(name.split(" | ")[:2]) for name in cells} <= known
    accuracy = percent(rows[SIDE_BY_SIDE_BASE]["accuracy"])
    assert f"got {accuracy} % of its test images right" in section("A small vision transformer")


def test_figures_of_which_method_when_are_measured() -> None:
    """Every number with a point stands in this table or another that is held to its rows, signs included."""
    shown = set(re.findall(r"[-+]?\d+\.\d+", MEASURED))
    shown |= {each.lstrip("+-") for each in shown}
    page = (ROOT / "docs" / "how-to" / "which-method.md").read_text()
    found = set(re.findall(r"[-+]?\d+\.\d+", page))
    assert found and found <= shown, found - shown


def test_tables_of_unequal_clients_are_exactly_the_committed_cells() -> None:
    """Also where no cell or not all of them are measured: the page says what there is, and no other does."""
    path = RESULTS / "federation.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    assert re.findall(r"<!-- federation (\w+) -->", MEASURED) == ["accuracy", "charges"]
    assert filled(MEASURED, rows) == MEASURED
    others = [page for page in DOCUMENTS if "<!-- federation" in page.read_text()]
    assert others == [ROOT / "docs" / "measured.md"]
    cells = {name for name in rows if not name.startswith("summary ")}
    known = {cell_name(t, m, s) for t in TASKS for m in METHODS_OF_CLIENTS for s in SEEDS}
    assert cells <= known


def test_the_table_across_rounds_is_exactly_the_committed_cells() -> None:
    rows = json.loads((RESULTS / "across_rounds.json").read_text())["rows"]
    assert re.findall(r"<!-- across-rounds (\w+) -->", MEASURED) == [
        "accuracy",
        "ends",
        "converged",
    ]
    assert filled(MEASURED, rows, "across-rounds", PRETRAINED) == MEASURED
    cells = {name for name in rows if not name.startswith("summary ")}
    tasks = PRETRAINED | CONVERGED | LONGER
    known = {cell_name(n, m, s) for n, t in tasks.items() for m in t.methods for s in range(5)}
    assert cells and cells <= known


def test_the_table_of_adapters_is_exactly_the_committed_cells() -> None:
    rows = rows_of("lora")
    assert re.findall(r"<!-- lora (\w+) -->", MEASURED) == list(LORA)
    assert lora_filled(MEASURED, rows) == MEASURED
    cells = {name for name in rows if not name.startswith("summary ")}
    known = {cell_name(n, m, s) for n, t in LORA.items() for m in t.methods for s in LORA_SEEDS}
    assert cells <= known | {BASE, f"{BASE} clothes"}


def test_what_is_said_of_first_fits_is_what_their_rows_say() -> None:
    for sentence in said_of_first_fits():
        assert sentence in section("First fits, with everything charged")


def said_of_first_fits() -> list[str]:
    rows = rows_of("first_fits")
    found = {
        f"{name} at {asked:g}": row[f"second_{asked:g}"] / asked
        for name, row in rows.items()
        for asked in (1.5, 2.0, 3.0)
    }
    off = {name: each - 1 for name, each in found.items() if abs(each - 1) > 0.05}
    longest = max(row["deadline_15_most"] for row in rows.values()) - 1
    quick = max(row["deadline_5_most"] for row in rows.values())
    # "The median first fit holds", and "no such fit was refused".
    assert max(row["deadline_5"] for row in rows.values()) <= 1
    assert not any(row["deadline_5_refused"] for row in rows.values())
    choosing = max(rows, key=lambda name: rows[name]["choosing_share"])
    ready = max(rows, key=lambda name: rows[name].get("preparing_share", 0.0))
    over = {
        name: row["spread"]["later_choosing_share"][1]
        for name, row in rows.items()
        if "later_choosing_share" in row
    }
    most = max(over, key=lambda name: over[name])
    return [
        f"Second fits are within 5 % of what was asked in {len(found) - len(off)} of {len(found)} cases.",
        *(
            f"{name.replace(' at ', ' at a speed-up of ')} is {100 * abs(by):.0f} % "
            f"{'faster' if by > 0 else 'slower'} than asked."
            for name, by in off.items()
        ),
        "The median first fit holds a deadline of 5 full steps; the longest single one of any model took "
        f"{quick:.2f} of it.",
        "No such fit was refused.",
        f"No fit exceeds fifteen full steps by more than {100 * longest:.1f} %.",
        f"Choosing takes at most {100 * rows[choosing]['choosing_share']:.1f} % of a second fit's time "
        f"({choosing}), and making ready at most {100 * rows[ready]['preparing_share']:.1f} % ({ready}).",
        f"Over eight fits choosing takes at most {100 * over[most]:.1f} %, at whatever speed-up ({most}).",
    ]


def test_the_tables_of_forgetting_are_the_committed_cells() -> None:
    rows = rows_of("forget")
    assert rows and forget_filled(MEASURED, rows) == MEASURED
    for sentence in said_of_forgetting():
        assert sentence in section("Forgetting")


def said_of_forgetting() -> list[str]:
    rows = rows_of("forget")

    def mean(task: str, method: str, key: str) -> str:
        found = [r[key] for name, r in rows.items() if name.startswith(f"{task} | {method} | ")]
        return f"{100 * sum(found) / len(found):.1f}"

    of_class = [
        mean("digits, a class", *each)
        for each in (
            ("dampened", "forgotten"),
            ("retrained", "forgotten"),
            ("dampened", "kept"),
            ("retrained", "kept"),
        )
    ]
    some = [
        mean("digits, examples", *each)
        for each in (
            ("dampened", "kept"),
            ("retrained", "kept"),
            ("dampened", "members"),
            ("as it was", "members"),
            ("retrained", "members"),
        )
    ]
    gone, never, rest, others = of_class
    left, kept, again, after = (
        mean("cifar, a class", method, key)
        for method in ("dampened", "retrained")
        for key in ("forgotten", "kept")
    )
    right, whole, members, before, without = some
    ways = ("as it was", "one round more", "dampened")
    told = {
        key: [mean("digits, a class, federated", way, key) for way in ways]
        for key in ("forgotten", "kept")
    }
    tuned = mean("digits, a class, federated", "fine-tuned", "forgotten")
    plain = "dampened, gradients as they are"
    signs = [
        mean("signs, a class", way, key)
        for way in ("as it was", "dampened", plain, "retrained")
        for key in ("forgotten", "kept")
    ]
    of_plain = [mean("digits, a class", plain, "kept"), mean("digits, examples", plain, "kept")]
    twentieth = [
        mean(task, way, key)
        for task in ("signs, examples", "cifar, examples")
        for key in ("forgotten", "kept")
        for way in ("as it was", "dampened", "retrained")
    ]
    unknown = [
        mean(f"{task}, a class, federated", way, "kept")
        for task in ("signs", "cifar")
        for way in ("one round more", "dampened")
    ]
    return [
        "Of a twentieth of the traffic signs, one seed, it had {} % right, dampened {} and retrained {} %, and {}, "
        "{} and {} % of the test; of CIFAR-10 it is {}, {} and {} %, and {}, {} and {} %.".format(
            *twentieth
        ),
        "dampening took the rest from {} to {} % on the signs and from {} to {} % on CIFAR-10".format(
            *unknown
        ),
        "Of a class of digits, three seeds, the model knew {} %, {} % after the round, and {} % once it was "
        "dampened, of the rest {}, {} and {} %; four rounds of training on leave {} %, as nobody".format(
            *told["forgotten"], *told["kept"], tuned
        ),
        "Of a class of traffic signs, one seed, it knew {} %, and {} % of the rest; dampened {} and {} %, with "
        "gradients as they are {} and {} %, retrained {} and {} %.".format(*signs),
        f"With gradients as they are it is {of_plain[0]} % of the rest for a class of digits, and {of_plain[1]} % "
        "for the examples.",
        f"On CIFAR-10 these leave more of the rest, {mean('cifar, a class', plain, 'kept')} %, and "
        f"{mean('cifar, a class', plain, 'forgotten')} % of the class.",
        f"Of a class of digits the dampened network knows {gone} % and the retrained one {never} %, of the "
        f"rest {rest} and {others} %.",
        f"Of a class of CIFAR-10, one seed, it knows {left} % and the retrained one {again} %, of the rest "
        f"{kept} and {after} %.",
        f"Once it is to forget a twentieth of the examples, {right} instead of {whole} % are right of the test, "
        f"and {members} % of those examples still count as members, where it was {before} % before and is "
        f"{without} % for the retrained one.",
    ]


def test_what_is_said_of_windows_is_what_their_cells_say() -> None:
    ends: dict[str, list[float]] = {}
    for name, row in rows_of("windows").items():
        if not name.startswith("summary"):
            ends.setdefault(name.split(" | ")[1], []).append(row["final_accuracy"])
    assert {len(each) for each in ends.values()} == {len(SEEDS)}
    told = [
        f"{method} {percent(statistics.fmean(each))} ± {percent(interval(each) or 0.0)} %"
        for method, each in ends.items()
    ]
    assert f"{', '.join(told)}." in section("Unequal clients")


def test_the_table_of_narrow_models_is_the_committed_one() -> None:
    assert "\n".join(narrow_models_table()) in section("Narrow models, as in FedRolex")


def narrow_models_table() -> list[str]:
    """Return the rows of both splits, from the summaries that `simulate --table` wrote."""
    two, five = (
        json.loads((RESULTS / f"{name}.json").read_text())["methods"]
        for name in ("narrow_models", "narrow_models_5")
    )
    lines = [
        "| method | two classes, % | five classes, % | sent, MB |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in two.items():
        other = percent(five[name]["final_accuracy"]) if name in five else ""
        lines.append(
            f"| {name} | {percent(row['final_accuracy'])} | {other} | {row['uplink_bytes'] / 1e6:.0f} |"
        )
    return lines


def test_what_is_said_of_growing_and_freezing_is_what_their_cells_say() -> None:
    text = section("From scratch: growing and freezing")
    for sentence in said_from_scratch():
        assert sentence in text


def said_from_scratch() -> list[str]:
    """Return the rows of the table, and the sentences about them, with the figures of the committed cells."""
    rows = rows_of("from_scratch")
    steps, ours, growing, freezing = (
        "fewer full steps, our server", "fl_elastic", "growing, our server", "freezing, our server",
    )  # fmt: skip
    seeds = [0, 1]

    def cell(method: str, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = rows[cell_name("har-correlated", method, seed)]
        return found

    def each(method: str, what: Callable[[dict[str, Any]], str]) -> str:
        return ", ".join(what(cell(method, seed)) for seed in seeds)

    def megabytes(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[key] / 1e6:.0f}"

    def first_at_80(row: dict[str, Any]) -> str:
        return next(f"{point[0]:.1f}" for point in row["curve"] if point[3] >= 0.8)

    table = [
        f"| {method} | {each(method, lambda row: percent(row['final_accuracy']))} "
        f"| {each(method, lambda row: str(row['rounds']))} "
        f"| {each(method, megabytes('uplink_bytes'))} "
        f"| {each(method, megabytes('downlink_bytes'))} "
        f"| {each(method, first_at_80)} |"
        for method in (steps, ours, growing, freezing)
    ]

    def against(method: str, seed: int) -> str:
        """Return how much less, or more, accurate a method ends than fewer full steps, and its bytes."""
        one, other = cell(method, seed), cell(steps, seed)
        points = 100 * (one["final_accuracy"] - other["final_accuracy"])
        sent = sum(one[key] / other[key] for key in ("uplink_bytes", "downlink_bytes")) / 2
        return f"{abs(points):.1f} points {'above' if points > 0 else 'below'} with {100 * sent:.0f} % of the bytes"

    def last_ahead(seed: int) -> float:
        """Return the last time at which growing is as good as fewer full steps."""
        curves = zip(cell(growing, seed)["curve"], cell(steps, seed)["curve"], strict=True)
        last: float = max(one[0] for one, other in curves if one[3] >= other[3])
        return last

    cuts = [cell(freezing, seed)["cuts"] for seed in seeds]
    moves = " and ".join(
        ", ".join(f"`{group}` at {at:.1f} s" for at, group in found) for found in cuts
    )
    return [
        *table,
        f"Growing ends {against(growing, 0)}, and {against(growing, 1)}",
        f"after the first {max(map(last_ahead, seeds)):.1f} s full steps are ahead of it at every test",
        f"Freezing ends {against(freezing, 0)}, and {against(freezing, 1)}",
        f"The cut moved up to {moves}",
        f"of {cell(steps, 0)['simulated_seconds']:.1f} simulated seconds",
    ]


def test_what_is_said_of_adapters_is_what_their_cells_say() -> None:
    said = section("Adapters on unequal devices")
    for sentence in said_of_adapters():
        assert sentence in said


def said_of_adapters() -> list[str]:
    """Return the sentences about the base, a step and single cells, with the figures of the committed ones."""
    rows, profile = rows_of("lora"), load_profile(RESULTS / "federation" / "plays.json")

    def cell(method: str) -> dict[str, Any]:
        found: dict[str, Any] = rows[cell_name("plays", method, 0)]
        return found

    def ends(method: str) -> str:
        return percent(cell(method)["final_accuracy"])

    def megabytes(method: str) -> str:
        return f"{(cell(method)['uplink_bytes'] + cell(method)['downlink_bytes']) / 1e6:.0f} MB"

    def more(method: str) -> str:
        row = rows[f"summary plays | {method}"]
        return f"{100 * row['against_reference']:+.1f} ± {100 * row['against_interval']:.1f}"

    share = profile.update_seconds.sum() / profile.full_step_seconds
    most = mask_bytes(profile, np.ones(len(profile), dtype=bool))
    kept = cell("fixed cut, kept features")
    # Of a fleet of which the clients at a sixteenth of the speed are left out.
    shapes = {g.parameters[0]: g.shapes[0] for g in profile.graph.groups if "block8" in g.name}
    ranks = sum(affordable_rank(RANK, speed) for speed in (1, 1, 1 / 2, 1 / 4))
    thin = sum(max(shape) for shape in shapes.values())
    outputs = {
        name.split("lora_")[0]: shape[0] for name, shape in shapes.items() if "lora_B" in name
    }
    inputs = {
        name.split("lora_")[0]: shape[1] for name, shape in shapes.items() if "lora_A" in name
    }
    folded = sum(outputs[layer] * inputs[layer] for layer in outputs)
    clothes = {
        name.split(" | ")[1]: row
        for name, row in rows.items()
        if name.startswith("summary clothes | ")
    }
    ahead = {m: 100 * row.get("against_reference", 0.0) for m, row in clothes.items()}
    solved = [each for method, each in ahead.items() if method in SOLVED]
    once = [each for m, each in ahead.items() if m not in SOLVED and clothes[m]["seeds"] == 1]
    shallow = clothes["fixed cut, kept features"]
    inputs_alone, drawn, chosen = (
        percent(clothes[f"closed form, {each}"]["accuracy"])
        for each in ("input", "random features", "chosen places")
    )
    adapted = max(row["accuracy"] for m, row in clothes.items() if not m.startswith("closed form"))
    # Never a head, in no seed: nothing was sent.
    assert not clothes["closed form, last layer"]["uplink_bytes"]
    took = [
        (row["uplink_bytes"] + row["downlink_bytes"]) / 1e6
        for row in (clothes["solved head, fixed cut, kept features"], clothes[REFERENCE])
    ]
    return [
        f"What begins with a solved head ends {min(solved):.0f} to {max(solved):.0f} points above waiting, "
        f"the fixed cut with features that are kept {100 * shallow['against_reference']:.1f} ± "
        f"{100 * shallow['against_interval']:.1f} with three seeds, the others with one at most {max(once):.0f}",
        "take {:.0f} MB in both directions, waiting {:.0f}".format(*took),
        f"From the pixels it is right on {inputs_alone} % of the test, from 1,024 random features of them on "
        f"{drawn} %, where the best row with adapters ends at {percent(adapted)} %",
        f"are of the input in all three seeds, and end at {chosen} %",
        f"it knows {percent(rows[BASE]['accuracy'])} % of the characters of its own kind of text",
        f"of which they then name {percent(rows[f'{BASE} clothes']['accuracy'])} % of the test images",
        f"and {percent(cell(REFERENCE)['curve'][0][3])} % of the plays'",
        f"a step that trains all adapters takes {most / 1e6:.0f} MB",
        f"gradients and steps of all adapters take {100 * share:.0f} % of a step",
        f"it ends at {ends('fixed cut')} % without features and at {ends('fixed cut, kept features')} % with them",
        f"full steps end {more('fewer steps')} points higher, with products {more('fewer steps, products')}, "
        f"`fl_elastic` {more('fl_elastic')}",
        f"{kept['features_found']:,} times they were found, {kept['features_computed']:,} times computed",
        f"{megabytes('fixed cut, kept features')} in both directions, full steps {megabytes('fewer steps')}",
        f"stacks of these {ranks} ranks would be {folded / (ranks * thin):.1f} times smaller",
    ]


def test_what_is_said_of_rows_across_rounds_is_what_their_cells_say() -> None:
    text = section("Across rounds")
    for sentence in said_across_rounds():
        assert sentence in text


def said_across_rounds() -> list[str]:
    """Return the sentences about single cells, with the figures of the committed ones."""
    rows = json.loads((RESULTS / "across_rounds.json").read_text())["rows"]
    full, moving = (f"{each}, solved head" for each in ("fewer full steps", "moving cut"))
    fixed, small = "fixed cut, solved head", f"{moving}, 8 bits"
    chosen, both = f"{OURS}, solved head", f"{OURS}, {moving}"
    birds, signs, pis = "birds-pretrained", "signs-pretrained", "birds-pi-fleet"
    objects, longer, waiting = "objects-pretrained", "signs-longer", "fedavg, waiting"
    plain = "fewer full steps, our server"
    timely, fedel, anyhow, biases = (
        f"{each}, solved head" for each in ("timelyfl", "fedel", "random layers", "bias only")
    )

    def cell(task: str, method: str, seed: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = rows[cell_name(task, method, seed)]
        return found

    def steps(task: str, seconds: float) -> str:
        folder = RESULTS / "federation"
        return f"{seconds / load_profile(folder / f'{task}.json').full_step_seconds:.0f}"

    def there(method: str) -> tuple[str, str]:
        """Full steps of the fastest class, and megabytes in both directions, until 88 %."""
        curve = cell(birds, method)["curve"]
        seconds, up, down, _ = next(point for point in curve if point[3] >= 0.88)
        return steps(birds, seconds), f"{(up + down) / 1e6:,.0f}"

    def alone(task: str) -> str:
        # The first test after the untrained model's that differs from it.
        curve = cell(task, full)["curve"]
        seconds, *_, reached = next(point for point in curve if point[3] != curve[0][3])
        return f"{100 * reached:.1f} % after {steps(task, seconds)}"

    def ends(task: str, method: str, seed: int = 0) -> str:
        return f"{100 * cell(task, method, seed)['final_accuracy']:.1f} %"

    def place(task: str, method: str = moving) -> str:
        ((_, found),) = cell(task, method)["cuts"]
        return f"`{found}`"

    def seeds(task: str, *methods: str) -> list[int]:
        """The seeds that all of these methods were run with."""
        return sorted(set.intersection(*(set(cells_of(rows, task)[each]) for each in methods)))

    def how_many(task: str, *methods: str) -> str:
        return ("one", "two", "three", "four", "five")[len(seeds(task, *methods)) - 1]

    def listed(words: list[str]) -> str:
        return f"{', '.join(words[:-1])} and {words[-1]}"

    def places(task: str, method: str) -> str:
        found = (cell(task, method, seed)["cuts"][0][1] for seed in seeds(task, method))
        return listed([f"`{each}`" for each in found])

    def all_ends(task: str, method: str) -> str:
        found = (ends(task, method, seed) for seed in seeds(task, method))
        return f"{listed([each.removesuffix(' %') for each in found])} %"

    def sent(task: str, method: str) -> str:
        found = cell(task, method)
        return f"{(found['uplink_bytes'] + found['downlink_bytes']) / 1e6:,.0f}"

    def gains(task: str, method: str, rival: str = full) -> list[float]:
        """Points above the rival at the last test, seed by seed."""
        mine, other = (
            [100 * cell(task, each, seed)["curve"][-1][-1] for seed in seeds(task, method, rival)]
            for each in (method, rival)
        )
        return [each - its for each, its in zip(mine, other, strict=True)]

    def with_interval(points: list[float]) -> str:
        return f"{statistics.fmean(points):.1f} ± {interval(points):.1f}"

    def ahead(task: str, method: str, rival: str = full) -> str:
        return with_interval(gains(task, method, rival))

    def below(task: str, method: str) -> str:
        return with_interval([-each for each in gains(task, method)])

    def sooner(task: str, method: str, rival: str) -> str:
        cells = cells_of(rows, task)
        times = []
        for seed, reference in cells[rival].items():
            found = sooner_than({seed: cells[method][seed]}, {seed: reference})
            assert found is not None and found[1], "every seed reaches it"
            times.append(found[2])
        return with_interval(times)

    (cut_after, cut_sent), (full_after, full_sent) = there(moving), there(full)
    *_, (*_, reached) = (
        point
        for point in cell("signs-converged", waiting)["curve"]
        if point[0] <= cell(longer, moving)["simulated_seconds"]
    )
    by_then = f"{100 * reached:.1f} %"
    found, computed = (cell(birds, moving)[f"features_{each}"] for each in ("found", "computed"))
    return [
        f"The head in closed form alone reaches {alone(birds)} full steps of the fastest class on the birds, "
        f"and {alone(signs)} on the signs.",
        f"On the birds 88 % is reached after {cut_after} such steps with the server's cut and {full_after} without "
        f"a cut; until then all devices had sent and received {cut_sent} and {full_sent} MB. The runs end at "
        f"{ends(birds, moving)} and {ends(birds, full)}.",
        f"Where full steps end under the same server without such a head, {how_many(signs, plain)} seeds, the "
        f"server's cut is {sooner(birds, moving, plain)} times sooner on the birds and "
        f"{sooner(signs, moving, plain)} times on the signs, with `elastic` above it "
        f"{sooner(birds, both, plain)} and {sooner(signs, both, plain)}, and full steps under a solved head "
        f"{sooner(birds, full, plain)} and {sooner(signs, full, plain)}.",
        f"The server puts the cut at {place(birds)} before the first round, and leaves it there.",
        f"the server's cut ends {ahead(signs, moving)} points above full steps at the last test, with "
        f"{how_many(signs, moving, full)} seeds",
        f"With `elastic` in the place of full steps, {how_many(birds, chosen)} seeds, runs end at "
        f"{all_ends(birds, chosen)} on the birds, and at {all_ends(signs, chosen)} on the signs; at the last test "
        f"that is {ahead(birds, chosen)} and {ahead(signs, chosen)} points above full steps.",
        f"Random layers are {ahead(birds, anyhow)} and {ahead(signs, anyhow)} points above them, and biases alone "
        f"{below(birds, biases)} and {below(signs, biases)} points below.",
        f"`elastic` above the server's cut ends at {all_ends(birds, both)} on the birds with "
        f"{how_many(birds, both)} seeds, at the last test {ahead(birds, both)} points above full steps, and at "
        f"{all_ends(signs, both)} on the signs with {how_many(signs, both)}, {ahead(signs, both)} points above.",
        f"All devices together found features {found:,} times, and computed {computed:,} times.",
        f"The server puts the cut at {places(pis, moving)} with the {how_many(pis, moving, full)} seeds, and the "
        f"fleet ends at {all_ends(pis, moving)}; with full steps, which the three cannot take, at "
        f"{all_ends(pis, full)}.",
        f"At the last test that is {ahead(pis, moving)} points above full steps, and with a cut that is fixed at "
        f"{place(pis, fixed)} {ahead(pis, fixed)}.",
        f"On the signs the server puts the cut at {places(signs, moving)} with the {how_many(signs, moving)} "
        f"seeds; the runs end at {all_ends(signs, moving)}, with full steps at {all_ends(signs, full)}.",
        f"On the two seeds that it was not chosen on, the last test is {gains(signs, moving)[3]:.1f} and "
        f"{gains(signs, moving)[4]:.1f} points above full steps.",
        f"On CIFAR-10 the server's cut ends at {all_ends(objects, moving)} with {how_many(objects, moving, full)} "
        f"seeds, one that is fixed at {place(objects, fixed)} at {all_ends(objects, fixed)}, full steps at "
        f"{all_ends(objects, full)}, waiting at {all_ends(objects, waiting)}.",
        f"Under the same head, with {how_many(signs, timely)} seeds, TimelyFL ends at {all_ends(signs, timely)} on "
        f"the signs, at the last test {ahead(signs, timely)} points above full steps, and FedEL at "
        f"{all_ends(signs, fedel)}, {below(signs, fedel)} below; on the birds they end at "
        f"{all_ends(birds, timely)} and at {all_ends(birds, fedel)}.",
        f"On the signs `elastic` above the server's cut is then {ahead(signs, both, timely)} points above TimelyFL "
        f"with {how_many(signs, both, timely)} seeds, {ahead(signs, both, anyhow)} above random layers with "
        f"{how_many(signs, both, anyhow)}, and {ahead(signs, both, moving)} above full steps under the same cut.",
        f"On the signs waiting ends at {ends('signs-converged', waiting)}, far above what the others reach in the "
        "table's time.",
        f"In half of waiting's (`--task signs-longer`, one seed) the server's cut ends at "
        f"{ends(longer, moving)} and full steps at {ends(longer, full)}, and waiting has then come to {by_then}.",
        f"With {how_many(birds, fixed)} seeds a cut that is fixed at {place(birds, fixed)} ends at "
        f"{all_ends(birds, fixed)} on the birds, the server's at {all_ends(birds, moving)}, full steps at "
        f"{all_ends(birds, full)}.",
        f"On the signs a cut at {place(signs, fixed)} ends at {all_ends(signs, fixed)}.",
        f"With 8 bits the server's cut ends at {all_ends(birds, small)} on the birds, with {sent(birds, small)} MB "
        f"in both directions instead of {sent(birds, moving)}, and at {all_ends(signs, small)} on the signs, with "
        f"{sent(signs, small)} MB (bytes of the first seed).",
    ]


def said_of_converged_waiting() -> str:
    """Return the sentence about the run that waits until it has converged, with the committed figures."""
    rows = json.loads((RESULTS / "across_rounds.json").read_text())["rows"]
    waiting = cells_of(rows, "birds-converged")["fedavg, waiting"]
    cells = cells_of(rows, "birds-pretrained")
    found = [
        sooner_than(cells[f"{method}, solved head"], waiting)
        for method in ("moving cut", "fewer full steps")
    ]
    (_, here, time, both), (_, there, full_time, full_both) = [each for each in found if each]
    assert here == there == len(waiting)
    end = statistics.fmean(each["final_accuracy"] for each in waiting.values())
    full = cells["fewer full steps, solved head"]
    first, second = (
        alone[2]
        for seed in waiting
        if (alone := sooner_than({seed: full[seed]}, {seed: waiting[seed]})) is not None
    )
    return (
        f"Waiting for the slowest ends at {100 * end:.1f} % when it has converged. A head in closed form, features "
        f"kept below a cut and training above it are there {time:.0f} times sooner, with {both:.0f} times fewer "
        f"bytes; full steps under the same head {full_time:.0f} times sooner, with {full_both:.0f} times fewer. "
        f"(Full steps {first:.0f} times sooner with the first seed, {second:.0f} with the second: tenths of a "
        "point decide.)"
    )


def said_of_the_fleet_with_pis() -> str:
    """Return the sentence about devices that cannot hold a full step, with the committed figures."""
    rows = json.loads((RESULTS / "across_rounds.json").read_text())["rows"]
    cells = cells_of(rows, "birds-pi-fleet")
    full = cells["fewer full steps, solved head"]

    def ahead(method: str) -> str:
        """Points above full steps at the last test."""
        found = cells[f"{method}, solved head"]
        assert found.keys() == full.keys() and len(full) == 5
        more = [100 * (found[seed]["curve"][-1][-1] - full[seed]["curve"][-1][-1]) for seed in full]
        return f"{statistics.fmean(more):.1f} ± {interval(more):.1f}"

    return (
        "Where three of nine devices, with more than half of the photographs, cannot hold a full step, the "
        f"server's cut ends {ahead('moving cut')} points above full steps under the same head (five seeds), a cut "
        f"that is fixed at `features.14` {ahead('fixed cut')}."
    )


@pytest.mark.parametrize("said", [said_of_converged_waiting, said_of_the_fleet_with_pis])
def test_what_is_said_in_short_is_what_the_runs_say(said: Callable[[], str]) -> None:
    assert said() in section("In short")


def test_what_choosing_gains_over_fewer_full_steps_is_the_committed_difference() -> None:
    rows = json.loads((RESULTS / "federation.json").read_text())["rows"]

    def gains(task: str, other: str) -> list[float]:
        """How many points higher ours ends, seed by seed."""
        ends = [
            [rows.get(cell_name(task, method, seed), {}).get("final_accuracy") for seed in SEEDS]
            for method in ("fl_elastic", other)
        ]
        return [
            100 * (a - b) for a, b in zip(*ends, strict=True) if a is not None and b is not None
        ]

    small = [task for task in TASKS if not task.startswith("birds")]
    (birds,) = set(TASKS) - set(small)
    full = "fewer full steps, our server"
    pairs = [gain for task in small for gain in gains(task, full)]
    assert len(pairs) == 9
    half = interval(pairs)
    assert f"it ends {statistics.fmean(pairs):.1f} ± {half:.1f} points higher" in MEASURED
    assert f"`fl_elastic` ends {statistics.fmean(pairs):.1f} ± {half:.1f} points higher" in MEASURED
    others = (full, "last layers, our server", "timelyfl, our server")
    for other, words in zip(
        others, ("fewer full steps", "last layers that fit", "TimelyFL"), strict=True
    ):
        found = gains(birds, other)
        assert len(found) == 3
        mean, half = statistics.fmean(found), interval(found)
        assert re.search(
            rf"{re.escape(f'{mean:+.1f} ± {half:.1f}')} points against (the )?{words}", MEASURED
        )
    mean, half = (of(gains(birds, full)) for of in (statistics.fmean, interval))
    assert f"it ends {mean:.1f} ± {half:.1f} points higher; the last layers" in MEASURED


def test_the_page_of_unequal_clients_has_every_measured_task(tmp_path: Path) -> None:
    path = RESULTS / "federation.json"
    rows = json.loads(path.read_text())["rows"]
    measured = [name for name in TASKS if federation_table(rows, name)]
    page = write_federation_page(rows, {}, tmp_path / "federation.html").read_text()
    assert measured
    for name in measured:
        assert f"<h2>{TASKS[name].title}</h2>" in page
        for kind in ("", "-choosing"):
            assert (RESULTS / "federation" / f"{name}{kind}.json").exists()


@pytest.mark.parametrize("replies", [10, 100, 1000])
def test_merging_figures_are_the_committed_ones(replies: int) -> None:
    rows, cells = rows_of("aggregation"), [f"| {replies:,}"]
    for kind in MERGED:
        row = rows[f"{kind} | {replies}"]
        peak = f" ({row['peak_models']:.0f})" if "peak_models" in row else ""
        cells.append(f"{1000 * row['seconds_per_reply']:.1f} ms{peak}")
    assert " | ".join(cells) + " |" in section("Merging")


def test_poison_rows_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "poison.json").read_text())["rows"]
    assert len(rows) == len(RULES) * len(ATTACKS)
    for rule in RULES:
        cells = " | ".join(f"{100 * rows[f'{rule} | {a}']['accuracy']:.1f}" for a in ATTACKS)
        assert f"| {rule} | {cells} |" in MEASURED


def test_liars_rows_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "liars.json").read_text())["rows"]
    seen = 0
    for name, lie in LIES.items():
        for liars in (0,) if lie.attack is None else (1, 2):
            found = [rows.get(f"{rule} | {name} | {liars}") for rule in LIARS_RULES]
            cells = " | ".join(
                "" if row is None else f"{100 * row['accuracy']:.1f}" for row in found
            )
            assert f"| {name} | {liars} | {cells} |" in MEASURED
            seen += sum(row is not None for row in found)
    assert seen == len(rows)


def test_a_robust_rule_that_security_names_stands_each_lie() -> None:
    """Within two points of the same run without a liar, by the same rule."""
    rows = json.loads((RESULTS / "liars.json").read_text())["rows"]

    def accuracy(rule: str, lie: str, liars: int) -> float:
        return float(rows[f"{rule} | {lie} | {liars}"]["accuracy"])

    for name, lie in LIES.items():
        clean = "none"
        if lie.normalise_steps:
            clean = "steps normalised, none"
        if lie.others is not None:
            clean = "first tensor of nobody"
        for liars in () if lie.attack is None else (1, 2):
            robust = [rule for rule in lie.rules if rule != "contributors"]
            assert any(accuracy(r, name, liars) > accuracy(r, clean, 0) - 0.02 for r in robust), (
                name
            )


def test_server_rates_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "server_rates.json").read_text())["rows"]
    assert len(rows) == 2 * len(SETTINGS)
    for name, row in rows.items():
        model, setting = name.split(" | ")
        figures = f"{100 * row['accuracy']:.1f} | {100 * row['largest_fall']:.1f}"
        assert f"| {model} | {setting} | {figures} |" in MEASURED


def test_rows_of_the_real_fleet_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "fleet.json").read_text())["rows"]
    assert len(rows) == 4
    for name, row in rows.items():
        task, method = name.split(" | ")
        start = f"| {task} | {method} | {100 * row['accuracy']:.1f} | {100 * row['simulated_accuracy']:.1f} |"
        assert start in MEASURED


def test_transport_figures_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "transport.json").read_text())["rows"]
    assert len(rows) == 4
    for row in rows.values():
        figures = f"| {row['seconds_per_round']:.1f} | {row['server_cpu_seconds']:.1f} | "
        figures += f"{row['bytes_to_server'] / 1e6:.1f} | {row['bytes_to_nodes'] / 1e6:.1f} |"
        assert figures in MEASURED


def test_startup_figures_are_the_committed_ones() -> None:
    rows, startup = rows_of("startup"), section("A node's process")
    for how in ("before", "now"):
        cells = [
            f"{row['first_batch_cpu_seconds']:.1f} s ({row['peak_bytes'] / 1e6:,.0f} MB)"
            for row in (rows[f"{how}, kept"], rows[f"{how}, fresh"])
        ]
        assert f"| {' | '.join(cells)} |" in startup


def test_faults_in_the_table_are_those_that_were_tried() -> None:
    rows = json.loads((RESULTS / "faults.json").read_text())["rows"]
    assert len(rows) >= 11
    for fault, row in rows.items():
        assert f"| {fault} | {row['lost']} |" in MEASURED


def test_rows_of_the_streams_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "stream.json").read_text())["rows"]
    streams = section("Streams")
    measured = [task for task in STREAMS if f"summary {task} | {REPLAY}" in rows]
    assert len(measured) >= 6
    for task in measured:
        # Of signs, steps were taken with one seed alone.
        assert rows[f"summary {task} | {REPLAY}"]["seeds"] == (1 if task == "signs" else 3)
        for line in stream_markdown(rows, task):
            assert line in streams
    for sentence in said_of_closed_form_streams():
        assert sentence in streams
    soak = json.loads((RESULTS / "soak.json").read_text())["rows"]["whole"]
    assert soak["samples"] == 1_000_000
    assert f"{soak['samples'] / soak['seconds']:,.0f} samples per second" in streams
    assert f"{soak['store_bytes']:,} bytes" in streams
    assert soak["store_bytes"] <= soak["store_bound"]


def said_of_closed_form_streams() -> list[str]:
    rows, untrained = rows_of("stream"), "closed form, untrained body"

    def of(task: str, method: str) -> float:
        return 100 * float(rows[f"summary {task} | {method}"]["score"])

    def best(task: str) -> float:
        steps = [way for way, how in WAYS.items() if not how.closed_form]
        return max(of(task, way) for way in steps if f"summary {task} | {way}" in rows)

    def state(task: str) -> str:
        found = [r["state_bytes"] for n, r in rows.items() if n.startswith(f"{task} | {READS} | ")]
        return f"{statistics.fmean(found) / 1e6:.0f}"

    spoiled = of("birds", untrained) - of("birds", "closed form")
    helped = of("signs", "closed form") - of("signs", untrained)
    return [
        f"- On new birds a head in closed form at chosen places ends at {of('birds', READS):.1f} %, at those "
        f"chosen with at most 4,096 features at {of('birds', MORE):.1f} %, at those chosen along the stream at "
        f"{of('birds', ALONG):.1f} %, at fixed ones at "
        f"{of('birds', 'closed form, blocks 7, 14 and last'):.1f} %, and at the last layer at "
        f"{of('birds', untrained):.1f} %, where the best row with steps ends at {best('birds'):.1f} %; on new "
        f"signs chosen places end at {of('signs', READS):.1f} %, those chosen along the stream at "
        f"{of('signs', ALONG):.1f} %, and the best row with steps at {best('signs'):.1f} %.",
        "- What it learns from is sums, of which there are none in the store: they are in the learner's state, "
        f"which takes {state('birds')} MB on birds and {state('signs')} MB on signs with the model's 9 MB in it. "
        "The store is for the penalty and for forgetting.",
        "- Training at home on the first classes spoils the last layer's features for the classes that come, on "
        f"birds by {spoiled:.0f} points; on signs, which are far from what the weights were trained on, it helps "
        f"by {helped:.0f}.",
    ]


def test_rows_beside_online_learners_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "online.json").read_text())["rows"]
    table = online_markdown(rows)
    assert "| - |" not in table and table in STREAMS_PAGE
    gains, times, best = [], [], {}
    for stream in ONLINE_STREAMS:
        means = {method: online_means(rows, stream, method) for method in METHODS}
        now, before = means[DEFAULT], means["StreamLearner, every 200, 20 steps"]
        gains.append(100 * (now.accuracy - before.accuracy))
        times.append(now.seconds / before.seconds)
        best[stream] = max(means, key=lambda method: means[method].accuracy)
        if stream == "electricity":
            middle = means["StreamLearner, every 50, 20 steps"].accuracy
            assert (
                f"{100 * (middle - now.accuracy):.1f} points behind an adaptation" in STREAMS_PAGE
            )
            same = means["the last label again"].accuracy
            assert f"{100 * (same - now.accuracy):.1f} behind saying the last" in STREAMS_PAGE
    assert f"{min(gains):.1f} to {max(gains):.1f} points more often on every" in STREAMS_PAGE
    assert f"take {min(times):.1f} to {max(times):.1f} times the processor" in STREAMS_PAGE
    forest, linear = "adaptive random forest", "logistic regression"
    assert best == {
        "sea": linear, "agrawal": forest, "led": linear, "digits": linear,
        "electricity": forest, "weather": "StreamLearner, closed form on 256 random units",
    }  # fmt: skip
    # What the table is said to be of.
    assert {rows[f"{name} | {DEFAULT} | 1"]["rows"] for name in ("sea", "agrawal", "led")} == {4000}
    assert CHOSEN_ON == (("sea", 0), ("led", 0), ("digits", 0))
