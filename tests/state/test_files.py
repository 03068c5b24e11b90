"""Atomic writing: a reader sees the old content or the new, never half."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from slow_ones import slow_unless
from torch import nn

from fl_elastic import Budget, ElasticClient
from fl_elastic.flower import Checkpointed
from fl_elastic.flower.records import PACKED
from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.journal import log_to_file
from fl_elastic.state.files import only_one, private_file, remove_leftovers, write_atomically
from fl_elastic.streaming import SampleStore, StreamLearner
from fl_elastic.update import weights_of
from fl_elastic.update.model_wire import encode_weights

HOLDER = """
import sys, time
from fl_elastic.state.files import only_one
with only_one(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_content_arrives_and_folders_are_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file.bin"
    assert write_atomically(target, b"\x00\xffdata") == target
    assert target.read_bytes() == b"\x00\xffdata"


def test_a_text_path_will_do(tmp_path: Path) -> None:
    assert write_atomically(str(tmp_path / "file"), b"") == tmp_path / "file"
    assert (tmp_path / "file").read_bytes() == b""


def test_the_old_content_is_replaced_and_nothing_is_left_beside(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old and longer")
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failure_keeps_the_old_content_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_file_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    target = write_atomically(tmp_path / "file", [b"in ", b"parts"], durable=durable)
    assert target.read_bytes() == b"in parts" and len(waited) == durable


def test_until_the_last_moment_readers_see_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    seen = []
    replace = os.replace

    def look_then_replace(source: Path, destination: Path) -> None:
        seen.append((target.read_bytes(), Path(source).read_bytes(), Path(source).parent))
        replace(source, destination)

    monkeypatch.setattr(os, "replace", look_then_replace)
    write_atomically(target, b"new")
    assert seen == [(b"old", b"new", tmp_path)]


def test_what_dead_processes_left_half_written_is_deleted(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = (f".state.npz.{pid}.tmp" for pid in (ended.pid, os.getpid()))
    others = {"state.npz", f"mine.{ended.pid}.tmp", ".state.npz.x.tmp", alive}
    for name in (dead, *others):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".folder.{ended.pid}.tmp").mkdir()
    assert remove_leftovers(tmp_path) == [dead]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == others
    assert remove_leftovers(tmp_path / "none") == []


def test_the_name_that_is_written_to_is_one_that_would_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert len(remove_leftovers(tmp_path)) == 1 and not list(tmp_path.iterdir())


def test_a_lock_is_held_by_one_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    with only_one(path), pytest.raises(BlockingIOError), only_one(path):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), only_one(path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with only_one(path):
        pass


def everything_in(folder: Path) -> dict[str, str]:
    """Permissions of all that lies in a folder, and of the folder itself."""
    found = [folder, *folder.rglob("*")]
    return {
        str(each.relative_to(folder.parent)): oct(each.stat().st_mode & 0o777) for each in found
    }


def write_everything(umask: int, root: Path) -> None:
    """Keep something of each kind below a folder, in a process of its own."""
    os.umask(umask)
    stream = root / "stream"
    store = SampleStore(stream / "samples.db", 2**20)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    learner = StreamLearner(
        model, store, budget=Budget(), policy="full", state_dir=stream,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    for place in range(60):
        learner.observe(np.full(3, place, np.float32), place % 2)
    learner.save()
    # The log is there while the state is behind, and SQLite's own files while the store is open.
    learner.observe(np.zeros(3, np.float32), 1)
    assert (stream / "events.log").stat().st_size and (stream / "samples.db-wal").exists()
    journal = Journal(root / "server" / "rounds.jsonl", max_bytes=100)
    for place in range(5):
        journal.append({"round": place, "text": "x" * 30})
    log_to_file(root / "node" / "node.log", max_bytes=200)
    for _ in range(9):
        logging.getLogger("fl_elastic").warning("a line of some length %s", "x" * 40)
    kept = ArrayRecord(nn.Linear(2, 2).state_dict())
    Checkpointed(FedAvg(), root / "checkpoints")._save(1, kept)
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    client = ElasticClient(
        model, data, data, budget=Budget(), policy="full", codec="int8", state_dir=root / "client"
    )
    packed = encode_weights(weights_of(model, client.manifest), client.manifest, version=1)
    reply = client.fit([np.frombuffer(packed, np.uint8)], {PACKED: True, "server-round": 1})
    assert any("feedback" in each.name for each in (root / "client").rglob("*")), reply[2]
    os._exit(0)


@pytest.mark.parametrize("umask", slow_unless(lambda umask: not umask, [0o000, 0o777]))
def test_what_tells_of_somebodys_data_is_its_owners_alone_under_any_umask(
    umask: int, tmp_path: Path
) -> None:
    """Samples, weights, journals, residuals, checkpoints, features: by those who write them."""
    # A process of its own: the umask is one of the whole process.
    writers = get_context("fork").Process(
        target=write_everything, args=(umask, tmp_path / "made" / "state")
    )
    writers.start()
    writers.join(300)
    assert writers.exitcode == 0
    found = everything_in(tmp_path / "made")
    assert len(found) > 14, found
    wrong = {
        name: mode
        for name, mode in found.items()
        if mode != ("0o700" if (tmp_path / name).is_dir() else "0o600")
    }
    assert wrong == {}


def test_files_of_an_earlier_release_are_mended(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text("")
    path.chmod(0o644)
    os.close(private_file(path, os.O_WRONLY))
    assert path.stat().st_mode & 0o777 == 0o600
    # What is handed on is as any new file.
    before = os.umask(0o022)
    try:
        assert (
            write_atomically(tmp_path / "out" / "report.html", b"x").stat().st_mode & 0o777 == 0o644
        )
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
