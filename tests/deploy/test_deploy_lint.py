"""The tools made for these files find nothing; and the script that runs them finds what is there to find."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from deployed_files import DEPLOY


def lint(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "lint.sh"), *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEPLOY, tmp_path / "deploy"))


@pytest.mark.slow
def test_nothing_is_found() -> None:
    ended = lint(DEPLOY)
    assert ended.returncode == 0, ended.stdout
    assert "passed:" in ended.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is missing")
@pytest.mark.slow
def test_a_finding_is_a_failure(copy: Path) -> None:
    with (copy / "systemd/fl-elastic-health").open("a") as script:
        script.write("rm -rf $undefined/*\n")
    ended = lint(copy)
    assert ended.returncode == 1
    assert "FAILED:  shellcheck" in ended.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.slow
def test_an_unknown_setting_of_a_unit_is_a_failure(copy: Path) -> None:
    unit = copy / "systemd/fl-elastic-node.service"
    unit.write_text(unit.read_text().replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    ended = lint(copy)
    assert ended.returncode == 1
    assert "FAILED:  systemd-analyze verify" in ended.stdout


def test_missing_tools_are_named_and_only_strictly_a_failure(copy: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "grep", "sort"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    for arguments, wanted in (((), 0), (("--strict",), 1)):
        ended = subprocess.run(
            [str(copy / "lint.sh"), *arguments],
            env={"PATH": str(tools)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == wanted, ended.stdout + ended.stderr
        assert "skipped: shellcheck: shellcheck is not installed" in ended.stdout
        assert "passed:  nothing" in ended.stdout


def test_no_address_of_a_package_registry_is_written_down() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8")
            for word in ("index-url", "py" + "pi.org", "://deb.", "download.pytorch"):
                assert word not in text, f"{path.name} names {word}"
