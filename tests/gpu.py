"""All tests that need a GPU, one process per file, so that an error that breaks the CUDA context stays in its file.

    python -m tests.gpu [options of pytest]

Needs only PyTorch, CuPy, Numba, NumPy, SciPy, PyYAML and pytest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 180  # time limit per file


def files() -> list[str]:
    """Returns the files with tests marked ``gpu``."""
    tests = (f for f in sorted((ROOT / "tests").rglob("test_*.py")) if f.name != "test_gpu.py")
    return [f.relative_to(ROOT).as_posix() for f in tests if "mark.gpu" in f.read_text()]


def main(options: Sequence[str]) -> int:
    """Runs the command; returns exit status 0 if no file failed or skipped a test."""
    lines = []
    for file in files():
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", file, *options]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=SECONDS, check=False, stdout=subprocess.PIPE, text=True)
            output = done.stdout
            status = done.returncode
            outcome = f"failed (exit status {status})" if status else "skipped" if " skipped" in output else "passed"
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            outcome = f"failed: stopped after {SECONDS} s"
        print(output, flush=True)
        lines.append(f"{outcome:28} {time.monotonic() - begin:6.0f} s  {file}")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    return int(not all(line.startswith("passed") for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
