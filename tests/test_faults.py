"""Tests samples of ``python -m tests.faults``, outputs that cannot be written, and leftovers of killed writes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import install_handlers
from simulator import FormatError, Program
from simulator.files import ABANDONED_AFTER_S, LONGEST, write_text
from tests.faults import ROOT, Files, read
from tests.tiny import PROGRAM


@pytest.mark.nightly
def test_corrupted_files_are_read_or_reported(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert [why for seed in range(200) if (why := read(files, tmp_path, seed))] == []


def test_messages_end() -> None:
    with pytest.raises(FormatError) as caught:
        Program.from_dict({**PROGRAM.to_dict(), "x" * 10_000: 1})
    assert len(str(caught.value)) == LONGEST


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["full", "unread", "closed"])
def test_an_output_that_cannot_be_written_is_a_sentence(where: str) -> None:
    words = [sys.executable, "-m", "experiments.evaluate", "--cfg", "job"]
    if where == "full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    if where == "closed":
        words = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    reads, writes = os.pipe()
    os.close(reads)
    with open("/dev/full" if where == "full" else os.devnull, "w") as file:
        done = subprocess.run(
            words,
            stdout=writes if where == "unread" else file,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    os.close(writes)
    complete = "files written so far are complete\n"
    messages = {
        "full": f"error: the output cannot be written (No space left on device); {complete}",
        "unread": f"error: the reader of the output closed the pipe; {complete}",
        "closed": "",
    }
    assert (done.returncode, done.stderr) == (0 if where == "closed" else 2, messages[where])


def test_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    install_handlers()
    print("1 µs – 2")
    print("nothing", file=sys.stderr)
    out.flush()
    assert out.buffer.getvalue() == b"1 ?s ? 2\n"


def test_leftovers_of_killed_writes_are_removed_later(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.json.12345678", ".a.json.87654321", ".b.json.12345678"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (path.stat().st_mtime - ABANDONED_AFTER_S - 60,) * 2)
    write_text(tmp_path / "a.json", "x")
    assert sorted(tmp_path.iterdir()) == [new, other, tmp_path / "a.json"]
