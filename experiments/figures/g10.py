"""Iteration times of "G10" (MICRO 2023), compared with plans for the same kernels, memory and link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Bars, Chart, Line, Panel
from experiments.plotting.palette import FAINT
from simulator import Machine, Program
from simulator.files import read_json

DATA = cli.CONFIGS.parent / "tests" / "data" / "g10"
UNBOUNDED = 2**50  # bytes of host memory
METHODS = {  # keys of ``time_ns`` in published.json: label and color
    "base_uvm_lru": ("paging, LRU", FAINT),
    "flashneuron": ("FlashNeuron", "#b8860b"),
    "deepum": ("DeepUM", "#fdae6b"),
    "g10": ("G10", "#f16913"),
}
MODES = {"swap": ("our swaps", "#cb181d"), "joint": ("our swaps and recomputation", "#238b45")}


class G10(Figure):
    """Overheads of G10's rivals, of G10 and of LP rounding, also by host memory."""

    name = "g10"
    labels: ClassVar = {"BERT_Base": "BERT-Base", "ResNet152": "ResNet152"}

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        modes = figures.choices(settings, "modes", MODES)
        tasks: Rows = []
        for network, sizes in config["host_gib"].items():
            if network not in self.labels:
                raise cli.UsageError(
                    f"figure.host_gib: unknown network {network!r}{cli.nearest(network, set(self.labels))}"
                )
            for gib in sizes:
                if gib is not None and str(gib) not in data(network)["g10_ns_by_host_gib"]:
                    valid = ", ".join(data(network)["g10_ns_by_host_gib"])
                    raise cli.UsageError(f"figure.host_gib.{network}: expected null or some of {valid}, got {gib!r}")
                tasks.append({"network": network, "host_gib": gib, "modes": modes})
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        program = Program.load(DATA / data(task["network"])["program"])
        machine = g10_machine(machine, task["host_gib"])
        limit = machine.memory_bytes
        found = {
            mode: figures.overhead(agents.make("lp_round", mode=mode), program, machine, limit)
            for mode in task["modes"]
        }
        bound = floor(program, machine, limit, "swap").overhead
        return {
            "ideal_ns": program.ideal_ns,
            "floor": round(bound, 6),
            "found": {mode: None if value is None else round(value, 6) for mode, value in found.items()},
        }

    def template_values(self, rows: Rows) -> Row:
        networks = []
        for name, lines in figures.group_by(rows).items():
            theirs = published(name)
            free = next((row for row in lines if row["host_gib"] is None), lines[-1])
            points = [row for row in lines if row["host_gib"] is not None]
            networks.append(
                {
                    "label": self.labels[name],
                    "batch": data(name)["batch"],
                    "floor": free["floor"],
                    "theirs": theirs,
                    "ours": free["found"],
                    "is_ideal": abs(free["ideal_ns"] / data(name)["ideal_ns"] - 1) < 1e-6,
                    "cells": [f"{theirs[key]:+.1%}" for key in METHODS]
                    + [_cell(free["found"].get(mode), ".2%") for mode in MODES],
                    "points": [
                        {
                            "host": row["host_gib"],
                            "theirs": by_host(name)[row["host_gib"]],
                            "found": row["found"],
                            "cells": [f"{MODES[mode][0][4:]} {_cell(value)}" for mode, value in row["found"].items()],
                        }
                        for row in sorted(points, key=lambda row: row["host_gib"])
                    ],
                }
            )
        rivals = [
            {"label": label, **_compare([(net["ours"].get("swap"), net["theirs"][key]) for net in networks])}
            for key, (label, _) in METHODS.items()
        ]
        modes = [
            {
                "label": label,
                **_compare([(point["found"][mode], point["theirs"]) for net in networks for point in net["points"]]),
            }
            for mode, (label, _) in MODES.items()
            if mode in rows[0]["modes"]
        ]
        return {
            "networks": networks,
            "methods": [label for label, _ in (*METHODS.values(), *MODES.values())],
            "ideal": sum(net["is_ideal"] for net in networks),
            "rivals": rivals,
            "modes": modes,
        }

    def chart(self, rows: Rows) -> Chart:
        bars = []
        sweeps = []
        for net in self.template_values(rows)["networks"]:
            values = [*net["theirs"].values(), *(net["ours"].get(mode) for mode in MODES)]
            looks = [*METHODS.values(), *MODES.values()]
            bars.append(
                Panel(
                    f"{net['label']}, batch {net['batch']:,}",
                    [
                        Bars([y], [value], color, thick=0.7, horizontal=True, texts=[_cell(value, ".2%")])
                        for y, (value, (_, color)) in enumerate(zip(values, looks, strict=True))
                    ],
                    Axis("overhead over the kernels alone", "%", (0, None), room=1.25),
                    Axis(names=[label for label, _ in looks]),
                )
            )
            x = [point["host"] for point in net["points"]]
            lines = [Line(x, [point["theirs"] for point in net["points"]], METHODS["g10"][1], "G10 and its SSD", "s")]
            lines += [
                Line(x, [point["found"].get(mode) for point in net["points"]], color, f"{label}, no SSD", "o")
                for mode, (label, color) in MODES.items()
            ]
            sweeps.append(
                Panel(
                    f"{net['label']} by host memory",
                    lines,
                    Axis("host memory (GiB); no point: no plan", limits=(0, None)),
                    Axis("overhead", "%", (-0.002, None), "symlog", (0, 0.01, 0.1, 1, 3)),
                )
            )
        nets = self.template_values(rows)["networks"]
        worst = [max(net["theirs"]["g10"] for net in nets), max(net["ours"].get("swap") or 0.0 for net in nets)]
        title = f"G10 loses up to {worst[0]:.0%}, our swaps with unbounded host memory {worst[1]:.0%}"
        return Chart(title, [*bars, *sweeps], 2, (4.9, 3.1))


def data(network: str) -> Row:
    """Returns G10's published times of a network."""
    return read_json(DATA / "published.json")["networks"][network]


def published(network: str) -> dict[str, float]:
    """Returns the published overheads of a network by method."""
    entry = data(network)
    return {key: entry["time_ns"][key] / entry["ideal_ns"] - 1 for key in METHODS}


def by_host(network: str) -> dict[int, float]:
    """Returns G10's published overheads of a network by host memory in GiB."""
    entry = data(network)
    return {int(gib): ns / entry["ideal_ns"] - 1 for gib, ns in entry["g10_ns_by_host_gib"].items()}


def g10_machine(machine: Machine, host_gib: int | None) -> Machine:
    """Returns a machine with the memory and link of G10's, and the given host memory (None: unbounded)."""
    theirs: dict[str, Any] = read_json(DATA / "published.json")["machine"]
    latency_ns = round(1000 * theirs["pcie_latency_us"])
    return replace(
        machine,
        memory_bytes=theirs["gpu_memory_bytes"],
        h2d_bytes_per_s=theirs["pcie_bytes_per_s"],
        d2h_bytes_per_s=theirs["pcie_bytes_per_s"],
        duplex_h2d_bytes_per_s=0,
        duplex_d2h_bytes_per_s=0,
        h2d_latency_ns=latency_ns,
        d2h_latency_ns=latency_ns,
        launch_ns=0,
        host_bytes=UNBOUNDED if host_gib is None else host_gib * 2**30,
    )


def _compare(pairs: list[tuple[float | None, float]]) -> Row:
    """Counts the pairs in which ours is less than theirs, and those in which it is more or missing."""
    ahead = sum(ours is not None and ours < theirs for ours, theirs in pairs)
    return {"ahead": ahead, "behind": sum(ours is None or ours > theirs for ours, theirs in pairs), "count": len(pairs)}


def _cell(value: float | None, spec: str = ".1%") -> str:
    return "no plan" if value is None else f"{value:+{spec}}"
