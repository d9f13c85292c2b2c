"""Structural overlap of test networks with training programs: the share of neighborhoods of kernels in both.

A kernel's label begins as its kind and phase. A round of the Weisfeiler-Lehman refinement (Shervashidze et al., 2011)
adds the sorted labels of the kernels that produce its inputs and of those that read its outputs, so that after r rounds
two kernels have equal labels only if their neighborhoods of radius r look alike. Sizes and times do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any

import yaml
from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Panel, groups
from simulator import Machine, Program

INKS = ("#c6dbef", "#6baed6", "#1f5fa8")


class SplitOverlap(Figure):
    """Share of a test network's kernels whose neighborhood occurs in a training program, by radius."""

    name = "split_overlap"
    simulated = False

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        shared = {"rounds": config["rounds"], "training": config["training"]}
        return [
            {"network": figures.network(name, "splits"), "split": split, "changes": changes, **shared}
            for split, members in config["splits"].items()
            for name, changes in members.items()
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        tested = figures.program(task["network"], machine, **task["changes"])
        known = training_labels(task["rounds"], task["training"])
        shares = [
            round(share(labels, labels_known), 4)
            for labels, labels_known in zip(neighborhoods(tested, task["rounds"]), known, strict=True)
        ]
        return {
            "kernels": len(tested.kernels),
            "shares": shares,
            "training_programs": len(training_settings()[: task["training"]]),
        }

    def template_values(self, rows: Rows) -> Row:
        lines = [{**row, "label": name_of(row), "cells": [f"{value:.0%}" for value in row["shares"]]} for row in rows]
        heads = [f"radius {r}" for r in range(len(rows[0]["shares"]))]
        by_split = [
            {"split": split, "mean": fmean(row["shares"][-1] for row in members)}
            for split, members in figures.group_by(rows, "split").items()
        ]
        return {"lines": lines, "heads": heads, "programs": rows[0]["training_programs"], "splits": by_split}

    def chart(self, rows: Rows) -> Chart:
        by_radius = list(zip(*(row["shares"] for row in rows), strict=True))
        series = [
            (f"radius {r}", INKS[r % len(INKS)], values, [f"{value:.0%}" if r else "" for value in values])
            for r, values in enumerate(by_radius)
        ]
        names = [name_of(row) for row in rows]
        x = Axis("kernels whose neighborhood is in a training program", "%", (0, 1), room=1.1)
        last = by_radius[-1]
        title = (
            f"{min(last):.0%} to {max(last):.0%} of a network's kernels are in a training program with their neighbors"
        )
        return Chart(title, [Panel("", groups(series, horizontal=True), x, Axis(names=names))], 1, (8.6, 5.6), keys=3)


def name_of(row: Row) -> str:
    """Returns the display name of a row's network."""
    return str(row["changes"].get("model") or figures.label(row["network"]))


def neighborhoods(program: Program, rounds: int) -> list[list[str]]:
    """Returns the labels of all kernels by radius, from 0 to ``rounds``."""
    producers: list[list[int]] = []
    consumers: list[list[int]] = [[] for _ in program.kernels]
    writer: dict[int, int] = {}  # last kernel that wrote a tensor
    for i, kernel in enumerate(program.kernels):
        producers.append(sorted({writer[tensor] for tensor in kernel.inputs if tensor in writer}))
        for j in producers[i]:
            consumers[j].append(i)
        writer |= dict.fromkeys(kernel.outputs, i)
    labels = [digest(kernel.kind, kernel.phase) for kernel in program.kernels]
    by_radius = [labels]
    for _ in range(rounds):
        labels = [
            digest(
                labels[i], "<", *sorted(labels[j] for j in producers[i]), ">", *sorted(labels[j] for j in consumers[i])
            )
            for i in range(len(labels))
        ]
        by_radius.append(labels)
    return by_radius


def digest(*parts: str) -> str:
    """Returns a digest of strings that is the same in every process."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def share(labels: Sequence[str], known: set[str]) -> float:
    """Returns the share of the labels that are known."""
    return sum(label in known for label in labels) / len(labels)


@cache
def training_settings() -> list[dict[str, Any]]:
    """Returns settings of training programs: per entry of configs/pretrain.yaml the first value of each list."""
    sets = yaml.safe_load((cli.CONFIGS / "pretrain.yaml").read_text())["sets"]
    networks = [network for entry in sets for network in entry["networks"]]
    return [{k: v[0] if isinstance(v, list) else v for k, v in network.items()} for network in networks]


@cache
def training_labels(rounds: int, count: int | None) -> list[set[str]]:
    """Returns the labels of all kernels of the first training programs (None: of all), by radius."""
    from experiments import workloads  # captures need PyTorch

    known: list[set[str]] = [set() for _ in range(rounds + 1)]
    machine = Machine.load("v100")  # durations do not count
    for settings in training_settings()[:count]:
        captured = workloads.load({"name": settings["family"], **settings}, machine).program
        for labels, found in zip(known, neighborhoods(captured, rounds), strict=True):
            labels |= set(found)
    return known
