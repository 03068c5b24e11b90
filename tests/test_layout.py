"""The plan of the house: nothing imports against the flow, and what is exported exists."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import fl_elastic
import fl_elastic_simulations

ROOT = Path(fl_elastic.__file__).parent
LABORATORY = Path(fl_elastic_simulations.__file__).parent
# Data flows from the first to the last; what shares a line may not import each other.
FLOW = [
    ["errors", "lazy_names", "given", "claims"],
    ["state"],
    ["registry", "budget", "losses", "environment", "laboratory"],
    ["settings"],
    ["named_models"],
    ["groups"],
    ["optimizers"],
    ["ops"],
    ["profiling"],
    ["planning"],
    ["update"],
    ["model_export"],
    ["closed_form"],
    ["readout"],
    ["training"],
    ["methods"],
    ["aggregation"],
    ["testing"],
    ["devices"],
    ["streaming"],
    ["monitoring"],
    ["flower"],
    ["fleet"],
    ["cli"],
]
LABORATORY_FLOW = [
    ["data"], ["models"], ["unequal"], ["scenario"], ["peers"], ["report"], ["engine"],
    ["fleet"], ["benchmarks"], ["cli"], ["app"],
]  # fmt: skip
PLACE = {
    (building, name): place
    for building, flow in (("fl_elastic", FLOW), ("fl_elastic_simulations", LABORATORY_FLOW))
    for place, names in enumerate(flow)
    for name in names
}
LIBRARY_MODULES = sorted(ROOT.rglob("*.py"))
MODULES = LIBRARY_MODULES + sorted(LABORATORY.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    base = ROOT if path.is_relative_to(ROOT) else LABORATORY
    parts = path.relative_to(base.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The folder or file of its building that a module belongs to; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def place_of(module: str) -> tuple[str, str]:
    """The building and part of a module."""
    return module.split(".")[0], part_of(module)


@cache
def imports_of(path: Path, *, at_run_time: bool = False) -> tuple[str, ...]:
    """Names of all modules that a file imports, also inside functions and by name."""
    return tuple(_imports_of(path, at_run_time))


def _imports_of(path: Path, at_run_time: bool) -> Iterator[str]:
    tree = parsed(path)
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types |= {inner for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            yield node.module or ""
            # "from fl_elastic import planning" imports a module, "from x import Name" only looks so.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def breaking(rule: Callable[[Path], object], modules: list[Path]) -> dict[str, object]:
    """By module, what a rule finds wrong with it; a rule returns nothing where all is well."""
    assert len(modules) > 10
    return {module_name(path): wrong for path in modules if (wrong := rule(path))}


def test_scripts_of_deployment_import_what_there_is() -> None:
    scripts = (ROOT.parent / "deploy").rglob("*.py")
    named = {
        name
        for path in scripts
        for name in imports_of(path)
        if is_inside(name, "fl_elastic", "fl_elastic_simulations")
    }
    assert len(named) > 20
    missing = [name for name in sorted(named) if not _exists(name)]
    assert missing == []


def _exists(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    with suppress(ImportError):
        importlib.import_module(name)
        return True
    module, _, own = name.rpartition(".")
    return hasattr(importlib.import_module(module), own)


def test_no_module_imports_itself() -> None:
    assert breaking(lambda path: module_name(path) in imports_of(path), MODULES) == {}


def test_imports_are_found_wherever_they_hide(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import flwr.client\n"
        "def late():\n    from fl_elastic import cli\n    import fl_elastic.fleet.up as up\n"
    )
    found = list(imports_of(path))
    assert {"flwr.client", "fl_elastic.cli", "fl_elastic.fleet.up"} <= set(found)
    assert "flwr.client" not in list(imports_of(path, at_run_time=True))
    assert part_of("fl_elastic.fleet.up") == "fleet" and part_of("fl_elastic") == ""


def test_every_part_has_its_place_in_the_flow() -> None:
    parts = {place_of(module_name(path)) for path in MODULES if part_of(module_name(path))}
    assert parts <= set(PLACE), f"give {sorted(parts - set(PLACE))} a place in the flow"
    assert len(MODULES) > 60


def against_the_flow(path: Path) -> list[str]:
    building, part = place_of(module_name(path))
    if not part:
        # The package itself names its parts only to load them when they are asked for.
        return [name for name in imports_of(path, at_run_time=True) if is_inside(name, building)]
    here = PLACE[building, part]
    others = [name for name in imports_of(path) if is_inside(name, building)]
    return [n for n in others if part_of(n) != part and PLACE.get(place_of(n), -1) >= here]


def test_nothing_imports_against_the_flow() -> None:
    assert breaking(against_the_flow, MODULES) == {}


def test_an_import_against_the_flow_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "groups").mkdir()
    path = tmp_path / "groups" / "wrong.py"
    path.write_text(
        "from fl_elastic.training import fit\nfrom fl_elastic.errors import PlanError\n"
    )
    monkeypatch.setitem(globals(), "module_name", lambda _: "fl_elastic.groups.wrong")
    assert set(against_the_flow(path)) == {"fl_elastic.training", "fl_elastic.training.fit"}


def another_method(path: Path) -> list[str]:
    """What a method's folder imports of another one's."""
    own = ".".join(module_name(path).split(".")[:3])
    methods = [name for name in imports_of(path) if is_inside(name, "fl_elastic.methods")]
    return [name for name in methods if name != "fl_elastic.methods" and not is_inside(name, own)]


def test_no_method_imports_another() -> None:
    inside = [path for path in LIBRARY_MODULES if "methods" in path.parts]
    assert {module_name(path): found for path in inside if (found := another_method(path))} == {}


def test_the_core_imports_no_method() -> None:
    core = (
        "groups",
        "ops",
        "profiling",
        "planning",
        "update",
        "closed_form",
        "readout",
        "training",
    )
    inside = [path for path in LIBRARY_MODULES if part_of(module_name(path)) in core]
    assert breaking(lambda path: imported(path, "fl_elastic.methods"), inside) == {}


def imported(path: Path, *packages: str) -> list[str]:
    return [name for name in imports_of(path) if is_inside(name, *packages)]


def test_the_library_does_not_know_the_laboratory() -> None:
    found = breaking(lambda path: imported(path, "fl_elastic_simulations"), LIBRARY_MODULES)
    assert found == {}


def test_flower_stands_only_at_the_edge() -> None:
    edge = [("fl_elastic", "flower")]
    edge += [("fl_elastic_simulations", part) for part in ("unequal", "engine", "fleet", "app")]
    inside = [path for path in MODULES if place_of(module_name(path)) not in edge]
    assert breaking(lambda path: imported(path, "flwr"), inside) == {}
    assert any(imported(path, "flwr") for path in MODULES)


def test_flowers_legacy_names_are_in_one_file() -> None:
    found = breaking(lambda path: imported(path, "flwr.client", "flwr.compat"), MODULES)
    assert set(found) == {"fl_elastic.flower._compat"}


# Private attributes of torch's objects that the library has used; `_dynamo` is what `lean_start` is about.
TORCHS_OWN = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks", "_sequence_nr", "_version", "_C", "_input_metadata", "_unsafe_view",
}  # fmt: skip


def torchs_own_names(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            found += [name for name in names if name.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr in TORCHS_OWN:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [] if own else [node.attr]
    return found


def test_torchs_private_names_are_in_one_file() -> None:
    assert set(breaking(torchs_own_names, LIBRARY_MODULES)) == {"fl_elastic.groups.torch_private"}


@pytest.mark.parametrize(
    "part", ["groups", "profiling", "planning", "update", "training", "methods", "testing"]
)
def test_the_core_needs_only_torch_and_numpy(part: str) -> None:
    allowed = ("fl_elastic", "torch", "numpy", "__future__")
    for path in (ROOT / part).rglob("*.py"):
        others = {name.split(".")[0] for name in imports_of(path) if name} - set(allowed)
        assert others <= sys.stdlib_module_names, (
            f"{path} imports {others - sys.stdlib_module_names}"
        )


def test_aggregation_needs_only_numpy() -> None:
    files = sorted((ROOT / "aggregation").glob("*.py"))
    assert len(files) >= 3
    for path in files:
        others = {name.split(".")[0] for name in imports_of(path) if name}
        assert others - {"fl_elastic", "numpy", "__future__"} <= sys.stdlib_module_names


def without_a_sentence(path: Path) -> str:
    docstring = ast.get_docstring(parsed(path)) or ""
    first = docstring.split("\n")[0]
    says = len(first) > 10 and (first.endswith((".", "?")) or ":" in docstring)
    return "" if says else f"begins with {first!r}"


def test_every_module_says_what_it_is() -> None:
    assert breaking(without_a_sentence, MODULES) == {}


def exported(path: Path) -> list[str]:
    """The names in a file's ``__all__``, without importing it."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def with_exports() -> list[Path]:
    return [path for path in MODULES if exported(path)]


def exported_in_vain(path: Path) -> list[str]:
    module, names = importlib.import_module(module_name(path)), exported(path)
    star: dict[str, object] = {}
    exec(f"from {module_name(path)} import *", star)
    missing = [name for name in names if not hasattr(module, name) or name not in star]
    return missing + [name for name in set(names) if names.count(name) > 1]


def test_everything_exported_exists() -> None:
    assert breaking(exported_in_vain, with_exports()) == {}


def test_exports_are_checked_at_all() -> None:
    assert ROOT / "__init__.py" in with_exports()


def test_what_the_package_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fl_elastic.nonsense
    assert fl_elastic.groups is importlib.import_module("fl_elastic.groups")


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def test_every_full_name_in_docstrings_and_comments_exists() -> None:
    groups = entry_points().groups
    said = {
        (path.name, name)
        for path in MODULES
        for name in re.findall(r"`(fl_elastic(?:_simulations)?(?:\.\w+)+)`", path.read_text())
    }
    assert len(said) > 80
    assert [each for each in sorted(said) if each[1] not in groups and not _exists(each[1])] == []


def test_no_two_test_files_share_a_name() -> None:
    tests = Path(__file__).parent
    folders = [tests, tests.parent / "simulations" / "tests"]
    found = [path.name for folder in folders for path in folder.rglob("*.py")]
    names = [name for name in found if name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
