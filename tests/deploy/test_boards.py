"""What is pinned for boards, what a fresh card gets, and what is left out in emulation."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from deployed_files import DEPLOY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = sorted((DEPLOY / "constraints").glob("*.txt"))
BOARDS = [path for path in CONSTRAINTS if path.name.startswith("aarch64")]
# The release of torchvision that was built against a release of torch.
PAIRS = {"2.9": "0.24", "2.10": "0.25"}
TESTS = DEPLOY.parent / "tests"


def requirements(path: Path) -> dict[str, Requirement]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in found}


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.name)
def test_torch_and_torchvision_belong_together(path: Path) -> None:
    pinned = requirements(path)
    torch, vision = (str(pinned[name].specifier) for name in ("torch", "torchvision"))
    release = torch.removeprefix("==").removesuffix(".*")
    assert vision == f"=={PAIRS[release]}.*"
    # Later wheels for aarch64 depend on CUDA.
    assert pinned["torch"].specifier.contains(f"{release}.0")
    assert not pinned["torch"].specifier.contains("2.11.0")


def test_every_board_gets_a_torch_that_its_processor_can_run() -> None:
    # The wheel of 2.10.0 ends with "illegal instruction" on ARMv8.0: Pi 3, Pi 4, Pi Zero 2 W.
    assert not requirements(DEPLOY / "constraints/aarch64.txt")["torch"].specifier.contains(
        "2.10.0"
    )
    assert requirements(DEPLOY / "constraints/aarch64-pi5.txt")["torch"].specifier.contains(
        "2.10.0"
    )


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_constraints_fit_the_project(path: Path) -> None:
    text = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    flower = re.search(r'"flwr(>=[^"]+)"', text)
    assert flower is not None
    # One minor release, among those that the project takes: a server's database cannot go back.
    (pinned,) = requirements(path)["flwr"].specifier
    assert pinned.operator == "==" and re.fullmatch(r"1\.\d+\.\*", pinned.version)
    assert Requirement(f"flwr{flower[1]}").specifier.contains(pinned.version.replace("*", "0"))


def test_one_fleet_has_one_minor_release_of_flower() -> None:
    assert len(CONSTRAINTS) == 3
    assert len({str(requirements(path)["flwr"].specifier) for path in CONSTRAINTS}) == 1


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.name)
def test_a_board_installs_what_is_locked_by_digest(path: Path) -> None:
    """Everything that the constraints and the project ask for is in the lock, in a release that they take."""
    text = (DEPLOY / "locks" / path.name).read_text(encoding="utf-8").replace("\\\n", " ")
    locked = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, *digests = line.split()
            assert digests and all(
                re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in digests
            )
            wanted = Requirement(name)
            (pin,) = wanted.specifier
            assert pin.operator == "==" and "*" not in pin.version
            locked[canonicalize_name(wanted.name)] = pin.version
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    needs = [*project["dependencies"], *project["optional-dependencies"]["fleet"]]
    needs += [*project["optional-dependencies"]["vision"], *map(str, requirements(path).values())]
    for need in map(Requirement, needs):
        assert need.specifier.contains(locked[canonicalize_name(need.name)]), need
    # Whatever those need in turn.
    for name in ("flwr", "pydantic", "jinja2"):
        for text in distribution(name).requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate(
                {"extra": "", "platform_machine": "aarch64"}
            ):
                assert canonicalize_name(need.name) in locked, (name, text)


def test_no_password_opens_a_fresh_card() -> None:
    text = (DEPLOY / "cloud-init/user-data").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "#cloud-config"
    data = yaml.safe_load(text)
    assert data["ssh_pwauth"] is False and data["disable_root"] is True
    (user,) = data["users"]
    assert user["lock_passwd"] is True and "passwd" not in user
    assert "PUT-YOUR-OWN" in user["ssh_authorized_keys"][0]


def test_the_script_of_a_first_start_is_shell(tmp_path: Path) -> None:
    data = yaml.safe_load((DEPLOY / "cloud-init/user-data").read_text(encoding="utf-8"))
    (script,) = [file for file in data["write_files"] if file["path"].endswith("first-boot")]
    path = tmp_path / "first-boot"
    path.write_text(script["content"], encoding="utf-8")
    subprocess.run(["sh", "-n", str(path)], check=True)
    assert [script["path"]] in data["runcmd"]


def test_what_is_left_out_in_emulation_exists() -> None:
    lines = (DEPLOY / "aarch64/deselected.txt").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if line and not line.startswith("#")]
    assert chosen
    for line in chosen:
        path, _, test = line.partition("::")
        function = test.partition("[")[0]
        assert f"def {function}(" in (TESTS.parent / path).read_text(encoding="utf-8"), line


@pytest.mark.parametrize("board", ["pi6", ""])
def test_an_unknown_board_is_one_clear_line(board: str) -> None:
    script = DEPLOY / "aarch64/emulation.sh"
    ended = subprocess.run(
        ["bash", "-c", f'source "{script}"'],
        env={"BOARD": board, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    if board:
        assert ended.returncode == 2
        assert ended.stderr == f"aarch64: error: BOARD is {board}; expected pi3, pi4 or pi5\n"
    else:
        assert ended.returncode == 0


def test_the_container_is_shut_in_and_keeps_nothing_but_the_fleet() -> None:
    compose = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text(encoding="utf-8"))
    server = compose["services"]["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    text = (DEPLOY / "container/Containerfile").read_text(encoding="utf-8")
    assert f"USER {server['user']}" in text
    assert "HEALTHCHECK" in text
    assert not re.search(r"COPY .*(fleet|\.key)\b", text)
