"""What is pinned for boards, what a fresh card gets, and what is left out in emulation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from deployed_files import DEPLOY
from packaging.requirements import Requirement

CONSTRAINTS = sorted((DEPLOY / "constraints").glob("*.txt"))
# The release of torchvision that was built against a release of torch.
PAIRS = {"2.9": "0.24", "2.10": "0.25"}
TESTS = DEPLOY.parent / "tests"


def requirements(path: Path) -> dict[str, Requirement]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in found}


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
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
    assert str(requirements(path)["flwr"].specifier) == str(
        Requirement(f"flwr{flower[1]}").specifier
    )


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
