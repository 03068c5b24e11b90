"""The playbooks name only files and variables that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from deployed_files import DEPLOY

ANSIBLE = DEPLOY / "ansible"
FILES = sorted(
    path
    for path in ANSIBLE.rglob("*.yml")
    if "inventory" not in path.parts and not path.name.startswith(".")
)
ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
# Variables that Ansible itself gives, and what templates call.
GIVEN = {"playbook_dir", "inventory_hostname", "inventory_hostname_short", "item"} | {
    "ansible_facts", "ansible_check_mode", "ansible_failed_result",
}  # fmt: skip
NAME = re.compile(rf"\b((?:{'|'.join(ROLES)}|site|rollback)_[a-z_]+|ansible_[a-z_]+)\b")


def named(path: Path) -> str:
    return path.relative_to(ANSIBLE).as_posix()


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def mappings(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from mappings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from mappings(inner)


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


def defined() -> set[str]:
    """Defaults of roles, registered results, facts and variables of tasks."""
    found: set[str] = set()
    for path in FILES:
        content = loaded(path)
        if path.parent.name == "defaults":
            found |= set(content)
        for mapping in mappings(content):
            if isinstance(mapping.get("register"), str):
                found.add(mapping["register"])
            for key in ("vars", "ansible.builtin.set_fact"):
                found |= set(mapping.get(key) or ())
    return found


def test_there_are_playbooks() -> None:
    assert len(FILES) > 15
    assert {"fl_elastic", "board", "release", "server", "node", "watch"} == set(ROLES)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_variable_is_defined_somewhere(path: Path) -> None:
    expressions = []
    for mapping in mappings(loaded(path)):
        for key, value in mapping.items():
            for text in texts(value):
                if key in ("when", "that", "until", "failed_when", "changed_when"):
                    expressions.append(text)
                expressions += re.findall(r"\{\{(.*?)\}\}|\{%(.*?)%\}", text, re.DOTALL)
    used: set[str] = set()
    for expression in expressions:
        flat = expression if isinstance(expression, str) else " ".join(expression)
        without_text = re.sub(r"\"[^\"]*\"|'[^']*'", "''", flat)
        for match in NAME.finditer(without_text):
            rest = without_text[match.end() :].lstrip()
            before = without_text[: match.start()].rstrip()
            if not before.endswith(".") and not rest.startswith("| default"):
                used.add(match[1])
    unknown = used - defined() - GIVEN
    assert not unknown, f"{named(path)} uses {sorted(unknown)}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_that_are_copied_exist(path: Path) -> None:
    for text in texts(loaded(path)):
        for name in re.findall(r"\{\{ playbook_dir \}\}/\.\./(?:\.\./)?([\w./@-]+)", text):
            if name.startswith(("dist/", "fleet")) or name.endswith("/"):
                continue
            base = DEPLOY if not name.startswith("docs/") else DEPLOY.parent
            assert (base / name).exists(), f"{named(path)} copies {name}"


def test_the_units_of_a_loop_exist() -> None:
    (task,) = [
        task for task in loaded(ANSIBLE / "roles/watch/tasks/main.yml") if task["name"] == "Units"
    ]
    assert all((DEPLOY / "systemd" / unit).is_file() for unit in task["loop"])


def test_the_rollout_stops_at_the_first_node_that_is_not_well() -> None:
    for name in ("site.yml", "rollback.yml"):
        nodes = [play for play in loaded(ANSIBLE / name) if play["hosts"] == "nodes"]
        assert [play["max_fail_percentage"] for play in nodes] == [0]
        assert all("25%" in play["serial"] for play in nodes)


def test_no_private_key_but_the_machines_own_is_copied() -> None:
    sources = [
        (path.parent.parent.name, text)
        for path in FILES
        for mapping in mappings(loaded(path))
        for text in [str((mapping.get("ansible.builtin.copy") or {}).get("src", ""))]
        if "fl_elastic_fleet" in text
    ]
    assert sorted(sources) == [
        ("deploy", "{{ fl_elastic_fleet }}/fleet.toml"),
        ("node", "{{ fl_elastic_fleet }}/nodes/{{ node_name }}/{{ item.name }}"),
        ("server", "{{ fl_elastic_fleet }}/fleet.toml"),
        ("server", "{{ fl_elastic_fleet }}/server/{{ item.name }}"),
    ]


@pytest.mark.parametrize("role", ["server", "node"])
def test_keys_are_for_their_service_only(role: str) -> None:
    for mapping in mappings(loaded(ANSIBLE / f"roles/{role}/tasks/main.yml")):
        for entry in mapping.get("loop") or ():
            if isinstance(entry, dict) and str(entry["name"]).endswith(".key"):
                assert entry["mode"] == "0600"
