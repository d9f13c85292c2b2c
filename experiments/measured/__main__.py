"""Fits the kernel-time model and measures a network's training step on your GPU.

    python -m experiments.measured fit                        # coefficients of the kernel-time model and their errors
    python -m experiments.measured replays                    # plans replayed on an H200: predicted and measured
    python -m experiments.measured profile resnet50 step.json --machine h200 --source "…" --license CC0-1.0
    python -m experiments.measured profile my.module:factory step.json --machine a40 --source "…" --license CC0-1.0

`profile` writes the device, software versions, and each kernel's time, shapes and types, but no module names, paths or
host names. figure=measured plots all such files in tests/data/measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from simulator.files import FormatError, write_text


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser."""
    out = argparse.ArgumentParser(
        "experiments.measured", description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = out.add_subparsers(dest="command", required=True)
    commands.add_parser("fit", help="refit the coefficients in configs/machine and print their errors")
    commands.add_parser("replays", help="compare predicted and measured times of plans replayed on an H200")
    profile = commands.add_parser("profile", help="measure a network's training step")
    profile.add_argument("network", help="name in experiments/measure/networks.py, or pkg.mod:factory")
    profile.add_argument("out", type=Path, help="JSON file to write")
    profile.add_argument("--machine", required=True, help="preset of configs/machine to compare with")
    profile.add_argument("--source", required=True, help="author or publication of the measurement, in one line")
    profile.add_argument("--license", "--licence", required=True, help="license of the measurement, e.g. CC0-1.0")
    profile.add_argument("--name", default="", help="name of the workload (default: the network's)")
    profile.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    profile.add_argument("--rates", type=Path, help="YAML file written by executor.calibrate")
    profile.add_argument("--cache", default="cold", help="state of the L2 cache before each kernel: cold, hot or step")
    profile.add_argument("--repeats", type=int, default=7, help="runs of each kernel")
    profile.add_argument("--steps", type=int, default=10, help="timed eager steps")
    return out


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = parser().parse_args(words)
    from executor import CaptureError
    from executor.capture.profile import ProfileError
    from executor.memory.context import ContextError
    from experiments.workloads import WorkloadError  # imports PyTorch, which --help does not need

    try:
        {"fit": _fit, "replays": _replays, "profile": _profile}[options.command](options)
    except (FormatError, WorkloadError, CaptureError, ProfileError, ContextError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _fit(options: argparse.Namespace) -> None:
    from experiments.measure.published import fit

    for fitted in (fit.h100(), fit.fit_v100(), fit.h200()):
        _print_table(*fit.table(fitted), title=fitted.machine)
        errors = fitted.errors
        print(f"{fitted.machine}: error of the step {errors.total:+.1%}")
        if errors.spread is not None:
            print(f"standard deviation of ln(measured / modeled): {errors.spread:.3f}")
            print(f"kernels of at least 20 us: median error {errors.median:.1%}")
        if held_out := fitted.held_out:
            print(
                f"held-out kernels: standard deviation {held_out.spread:.3f}, median {held_out.median:.1%}, "
                f"sum {held_out.total:+.1%}, {held_out.kernels} kernels"
            )
        for net in fitted.networks:
            print(
                f"{net.workload}: sum {net.fitted:+.1%}, held out {net.left_out:+.1%}; median {net.middle:.1%}, "
                f"held out {net.left_middle:.1%}"
            )


def _replays(options: argparse.Namespace) -> None:
    from experiments.measure.published.replays import replays

    rows = replays()
    heads = ("network", "limit", "planner", "predicted", "measured", "error", "without executor costs")
    _print_table(
        heads,
        [
            (
                row.workload,
                f"{row.fraction:.0%}",
                row.planner + (" (recomputed)" if row.remade else ""),
                f"{row.predicted_ns / 1e6:.2f} ms",
                f"{row.measured_ns / 1e6:.2f}",
                f"{row.error:+.1%}",
                f"{row.before_ns / row.measured_ns - 1:+.1%}",
            )
            for row in rows
        ],
    )
    errors = [abs(row.error) for row in rows]
    print(f"|error|: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%} over {len(rows)} plans")


def _print_table(heads: Sequence[str], lines: Iterable[Sequence[str]], title: str | None = None) -> None:
    from rich.table import Table

    from experiments.common import report

    table = Table(*heads, title=title, title_justify="left")
    for line in lines:
        table.add_row(*line)
    report.console().print(table)


def _profile(options: argparse.Namespace) -> None:
    from executor.capture.profile import Cache
    from experiments.measure.profile import profiled

    if options.cache not in get_args(Cache):
        raise FormatError(f"--cache: expected one of {', '.join(get_args(Cache))}, got {options.cache!r}")
    for key in ("repeats", "steps"):
        if getattr(options, key) < 1:
            raise FormatError(f"--{key}: expected at least 1, got {getattr(options, key)}")
    settings = {key: value for key, value in vars(options).items() if key not in ("command", "out")}
    step = profiled(**settings, log=lambda text: print(f"measuring {text} …", file=sys.stderr))
    write_text(options.out, step.to_json())
    print(options.out)


if __name__ == "__main__":
    sys.exit(main())
