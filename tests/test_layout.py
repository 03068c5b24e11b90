"""The plan of the house: nothing imports against the flow, and what is exported exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fl_elastic
import fl_elastic_simulations

ROOT = Path(fl_elastic.__file__).parent
LABORATORY = Path(fl_elastic_simulations.__file__).parent
# Data flows from the first to the last; what shares a line may not import each other.
FLOW = [
    ["errors", "late"],
    ["registry", "budget", "storage", "losses", "environment", "laboratory"],
    ["archive", "settings"],
    ["old_state"],
    ["named_models"],
    ["groups"],
    ["ops"],
    ["profiling"],
    ["importance"],
    ["planning"],
    ["policies"],
    ["update"],
    ["training"],
    ["aggregation"],
    ["testing"],
    ["devices"],
    ["streaming"],
    ["operations"],
    ["flower"],
    ["fleet"],
    ["cli"],
]
LABORATORY_FLOW = [
    ["conventions"], ["data"], ["models"], ["scenario"], ["peers"], ["report"], ["engine"],
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


def imports_of(path: Path, *, at_run_time: bool = False) -> Iterator[str]:
    """Names of all modules that a file imports, also inside functions and by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and at_run_time:
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


def every(modules: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", modules, ids=module_name)


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


@every(MODULES)
def test_nothing_imports_against_the_flow(path: Path) -> None:
    building, part = place_of(module_name(path))
    if not part:
        # The package itself names its parts only to load them when they are asked for.
        eager = [name for name in imports_of(path, at_run_time=True) if is_inside(name, building)]
        assert eager == []
        return
    here = PLACE[building, part]
    others = [name for name in imports_of(path) if is_inside(name, building)]
    wrong = [n for n in others if part_of(n) != part and PLACE.get(place_of(n), -1) >= here]
    assert wrong == []


@every(LIBRARY_MODULES)
def test_the_library_does_not_know_the_laboratory(path: Path) -> None:
    assert [n for n in imports_of(path) if is_inside(n, "fl_elastic_simulations")] == []


@every(MODULES)
def test_flower_stands_only_at_the_edge(path: Path) -> None:
    used = [name for name in imports_of(path) if is_inside(name, "flwr")]
    edge = [("fl_elastic", "flower")]
    edge += [("fl_elastic_simulations", part) for part in ("engine", "fleet", "app")]
    assert used == [] or place_of(module_name(path)) in edge


@every(MODULES)
def test_flowers_legacy_names_are_in_one_file(path: Path) -> None:
    legacy = [name for name in imports_of(path) if is_inside(name, "flwr.client", "flwr.compat")]
    assert legacy == [] or path == ROOT / "flower" / "_compat.py"


# Private attributes of torch's objects that the library has used; `_dynamo` is what `lean_start` is about.
TORCHS_OWN = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks", "_sequence_nr", "_version", "_C", "_input_metadata", "_unsafe_view",
}  # fmt: skip


@every(LIBRARY_MODULES)
def test_torchs_private_names_are_in_one_file(path: Path) -> None:
    if path == ROOT / "groups" / "torch_private.py":
        return
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            found += [name for name in names if name.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr in TORCHS_OWN:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [] if own else [node.attr]
    assert found == []


@pytest.mark.parametrize(
    "part", ["groups", "profiling", "importance", "planning", "update", "training", "testing"]
)
def test_the_core_needs_only_torch_and_numpy(part: str) -> None:
    allowed = ("fl_elastic", "torch", "numpy", "__future__")
    for path in (ROOT / part).rglob("*.py"):
        others = {name.split(".")[0] for name in imports_of(path) if name} - set(allowed)
        assert others <= STANDARD_LIBRARY, f"{path} imports {others - STANDARD_LIBRARY}"


def test_aggregation_needs_only_numpy() -> None:
    files = sorted((ROOT / "aggregation").glob("*.py"))
    assert len(files) >= 3
    for path in files:
        others = {name.split(".")[0] for name in imports_of(path) if name}
        assert others - {"fl_elastic", "numpy", "__future__"} <= STANDARD_LIBRARY


STANDARD_LIBRARY = {
    "abc", "base64", "bisect", "ctypes", "collections", "contextlib", "copy", "dataclasses", "difflib", "enum",
    "functools", "hashlib", "importlib", "inspect", "io", "itertools", "json", "logging", "math", "numbers", "os",
    "pathlib", "platform", "random",
    "re", "statistics", "tempfile", "struct", "sys", "time", "types", "typing", "weakref", "zipfile", "zlib",
}  # fmt: skip


@every(MODULES)
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring is not None
    first = docstring.splitlines()[0]
    assert first.endswith((".", "?")) or ":" in docstring
    assert len(first) > 10


def exported(path: Path) -> list[str]:
    """The names in a file's ``__all__``, without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


WITH_EXPORTS = [path for path in MODULES if exported(path)]


@every([path for path in MODULES if path.name not in ("__main__.py",)])
def test_modules_say_what_they_export(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defines = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    public = [node.name for node in defines if not node.name.startswith("_")]
    assert exported(path) or not public


@every(WITH_EXPORTS)
def test_everything_exported_exists(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    names = exported(path)
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(set(names)) == len(names)
    star: dict[str, object] = {}
    exec(f"from {module_name(path)} import *", star)
    assert set(names) <= set(star)


def test_exports_are_checked_at_all() -> None:
    assert len(WITH_EXPORTS) > 50
    assert ROOT / "__init__.py" in WITH_EXPORTS


def test_what_the_package_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fl_elastic.nonsense
    assert fl_elastic.groups is importlib.import_module("fl_elastic.groups")


def test_no_two_test_files_share_a_name() -> None:
    tests = Path(__file__).parent
    folders = [tests, tests.parent / "simulations" / "tests"]
    found = [path.name for folder in folders for path in folder.rglob("*.py")]
    names = [name for name in found if name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
