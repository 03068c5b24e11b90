"""What the documents refer to is there: tests, files, commands, messages, public names."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import COMMAND
from documents import DOCUMENTS, ROOT, command_lines

from fl_elastic.aggregation import RULES, SERVER_OPTIMIZERS
from fl_elastic.flower.stream_data import JOININGS
from fl_elastic.planning import POLICIES
from fl_elastic.planning.importance import CHANNEL_SCORES, IMPORTANCES
from fl_elastic.registry import Registry
from fl_elastic.update import CODECS

DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
_TEST = re.compile(r"((?:simulations/)?tests/[\w/]+\.py)(?:::(\w+))?")
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_tests_exist(document: Path) -> None:
    for file, name in _TEST.findall(document.read_text()):
        path = ROOT / file
        assert path.exists(), f"{document.name} names {file}"
        if name:
            assert f"def {name}(" in path.read_text(), f"{document.name} names {file}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_linked_files_exist(document: Path) -> None:
    for target in _LINK.findall(document.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document.name} links {target}"


def test_every_way_of_joining_is_in_the_table() -> None:
    for name in JOININGS:
        assert f"| `{name}` " in (DOCS / "streams.md").read_text()


@pytest.mark.parametrize(
    "registry", [POLICIES, IMPORTANCES, CHANNEL_SCORES, RULES, SERVER_OPTIMIZERS, CODECS]
)
def test_every_name_that_can_be_chosen_is_on_its_page(registry: Registry[Any]) -> None:
    pages = [
        (DOCS / "how-to" / f"{page}.md").read_text() for page in ("choosing", "unequal-devices")
    ]
    assert [
        name for name in registry.names() if not any(f"`{name}`" in text for text in pages)
    ] == []


def problem_of(words: list[str]) -> str:
    """Return what is wrong with the words after ``fl-elastic``; empty for an existing command and options."""
    command = COMMAND
    for word in words:
        name = word.split("=")[0]
        usual = getattr(command, "usual", "")
        if name.startswith("--") and usual and isinstance(command, click.Group):
            command = command.commands[usual]
        if name.startswith("--"):
            known = {option for parameter in command.params for option in parameter.opts}
            known |= {"--help"}.union(*(parameter.secondary_opts for parameter in command.params))
            if name not in known:
                return f"{command.name} has no option {name}"
        elif word == "...":
            break
        elif isinstance(command, click.Group):
            if word not in command.commands:
                return f"{command.name} has no command {word}"
            command = command.commands[word]
    return ""


def test_a_wrong_command_or_option_is_found() -> None:
    assert problem_of(["plan", "resnet18", "--speedup", "2"]) == ""
    assert problem_of(["fleet", "submit", "FLEET", "--scenario=x.toml", "--no-wait"]) == ""
    assert problem_of(["flea", "submit"]) and problem_of(["fleet", "submt", "FLEET"])
    assert problem_of(["plan", "resnet18", "--speed-up", "2"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_command_line_names_commands_and_options_that_exist(document: Path) -> None:
    wrong = {
        " ".join(words): found
        for words in command_lines(document.read_text(), "fl-elastic")
        if (found := problem_of(words))
    }
    assert wrong == {}


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    calls = [words for page in DOCUMENTS for words in command_lines(page.read_text(), "make")]
    assert {words[0].strip(",.") for words in calls} <= targets
    assert {"demo", "test", "docs"} <= {words[0] for words in calls}


FOREIGN = {
    # Flower's, the processor's, and those whose words come from a name in the code.
    "Failed to activate", "Illegal instruction", "flwr run", "report.forward.refused", "unknown policy",
}  # fmt: skip


def test_the_messages_under_troubleshooting_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "fl_elastic").rglob("*.py")))
    code = re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", code))
    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]*)`", page, flags=re.MULTILINE)
    assert len(messages) > 40
    parts = {part.strip() for message in messages for part in message.split("...")}
    unknown = {part for part in parts if len(part) > 5 and part not in code}
    assert unknown - FOREIGN - {"clock"} == set()


def defined_in(module: Any) -> list[Any]:
    """Return the public classes and functions that a module defines."""
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def documented() -> list[Any]:
    """Return the objects that the pages of the reference show."""
    found = []
    for page in REFERENCE:
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.MULTILINE):
            module, _, name = path.rpartition(".")
            try:
                found.append(getattr(importlib.import_module(module), name))
            except AttributeError:
                found.append(importlib.import_module(path))
            if inspect.ismodule(found[-1]):
                found += defined_in(found[-1])
    return found


@pytest.mark.parametrize("page", REFERENCE, ids=lambda path: path.stem)
def test_every_public_name_is_in_the_reference(page: Path) -> None:
    name = "fl_elastic" if page.stem == "fl_elastic" else f"fl_elastic.{page.stem}"
    package, shown = importlib.import_module(name), documented()
    names = [each for each in package.__all__ if not each.startswith("__")]
    missing = [each for each in names if not any(getattr(package, each) is one for one in shown)]
    assert missing == [], f"give them a line in {named(page)}"


def test_each_question_of_a_reader_is_answered_by_two_files_at_most() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| [^|]+\? \| `", line)]
    assert len(rows) >= 20
    for row in rows:
        answers = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert 1 <= len(answers) <= 2, row
        for answer in answers:
            assert (ROOT / "fl_elastic" / answer).is_file(), answer
