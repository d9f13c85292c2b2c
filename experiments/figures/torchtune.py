"""Memory and speed of torchtune's README, beside captures of the same training steps."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from omegaconf import DictConfig

from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows, span
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, between
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


class Torchtune(Figure):
    """Memory and speed of torchtune's README, beside captures of the same training steps."""

    name = "torchtune"
    bars: ClassVar = {"memory": 0.1, "speed": 0.15}  # accepted errors
    colors: ClassVar = {"3b": "#1f5fa8", "rtx4090": "#238b45", "a6000": "#f16913"}
    on_demand = True

    def tasks(self, settings: DictConfig) -> Rows:
        """Returns one task per capture, with all steps that share it."""
        tasks: Rows = []
        for name in figures.choices(settings, "steps", self.published["steps"], "step "):
            step = self.published["steps"][name]
            key = {
                "model": "3b" if step["group"] == "3b" else "8b",
                "machine": step.get("machine"),
                "options": step["options"],
            }
            task = next((t for t in tasks if t["capture"] == key), None)
            if task is None:
                tasks.append(task := {"capture": key, "steps": {}})
            task["steps"][name] = {"states": step.get("states"), "offload": step.get("offload", False)}
        experiments = self.published["experiments"]
        for name in (
            figures.choices(settings, "experiments", experiments, "experiment ") if settings.experiments else ()
        ):
            of = self.published["steps"][experiments[name]["of"]]
            key = {"model": "3b", "machine": None, "options": {**of["options"], **experiments[name]["options"]}}
            if "elements_of" in experiments[name]:
                key["elements_of"] = experiments[name]["elements_of"]
            tasks.append({"capture": key, "steps": {name: {"states": None, "offload": False}}})
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        from experiments.figures import torchtune_steps as steps  # PyTorch

        capture = task["capture"]
        sizes = steps.Sizes(**self.published["models"][capture["model"]])
        options = steps.Options(**{**capture["options"], "lora": tuple(capture["options"].get("lora", ()))})
        machine = Machine.load(capture["machine"]) if capture["machine"] else machine
        if capture.get("elements_of"):
            machine = with_element_times(machine, Machine.load(capture["elements_of"]))
        program = steps.Recipe(sizes, options).capture(machine, capture["model"])
        results = {}
        for name, step in task["steps"].items():
            states = {"torchao": steps.TORCHAO, "paged": steps.PAGED, None: None}[step["states"]]
            changed = states.applied(program, machine) if states else program
            plan = steps.offloaded(changed, sizes) if step["offload"] else Plan()
            results[name] = measures(changed, plan, machine, sizes.batch_size * sizes.length)
            if states is steps.PAGED:
                results[name]["paged_s"] = states.paging_s(program, machine)
        return {"results": results}

    def template_values(self, rows: Rows) -> Row:
        results = {name: result for row in rows for name, result in row["results"].items()}
        lines = self.lines(results)
        found = {line["name"]: line for line in lines}
        tested = [line for line in lines if line["group"] == "3b"]
        compared = [line for line in lines if not line["is_first"]]
        without_attention = self.lines({name: {**r, "s": r["s"] - r["attention_s"]} for name, r in results.items()})
        return {
            "lines": lines,
            "bars": self.bars,
            "count": len(tested),
            "memory": sum(abs(line["memory_error"]) <= self.bars["memory"] for line in tested),
            "relative": len(compared),
            "speed": sum(abs(line["relative_error"]) <= self.bars["speed"] for line in compared),
            "worst": max(tested, key=lambda line: abs(line["memory_error"]), default=None),
            "worst_speed": max(compared, key=lambda line: abs(line["relative_error"]), default=None),
            "tokens": span(line["speed_error"] for line in tested),
            "others": span(line["memory_error"] for line in lines if line["group"] != "3b"),
            "slower": span(line["speed_error"] for line in lines if line["group"] != "3b"),
            "without_attention": max(
                (abs(e) for line in without_attention if (e := line["relative_error"])), default=None
            ),
            "elements": self.with_elements(results),
            "scatter": results["scatter"]["gib"] if "scatter" in results else None,
            "of_scatter": found.get("compile"),
            "paged": [line for line in lines if line["paged"]],
            "rate": self.rate() if "lora_a6000" in found else None,
        }

    def with_elements(self, results: Row) -> Row | None:
        """Returns speed and relative errors of 3B with the experiment ``elements`` as first row, or None."""
        if "elements" not in results:
            return None
        first, *lines = [
            line for line in self.lines({**results, "packed": results["elements"]}) if line["group"] == "3b"
        ]
        return {"tokens": first["tokens"], "errors": span(line["relative_error"] for line in lines)}

    def rate(self) -> float:
        """Returns the fraction of an A6000's nominal rate that the products of measured LoRA take at least.

        Each weight of a product takes part in two: forward, and in the gradient of its input.
        """
        sizes = self.published["models"]["8b"]
        step = self.published["steps"]["lora_a6000"]
        width = sizes["width"]
        narrow = width * sizes["kv_heads"] // sizes["heads"]
        layer = 2 * width * (width + narrow) + 3 * width * sizes["hidden"]
        weights = int(sizes["layers"] * layer + sizes["vocabulary"] * width)
        flops_per_s = 4 * weights * int(step["tokens_per_s"])
        return flops_per_s / Machine.load(step["machine"]).flops_per_s["bfloat16"]

    def lines(self, results: Row) -> Rows:
        """Returns memory, speed and errors of each step; relative speeds are those to a group's first step."""
        published = self.published
        first: dict[str, Row] = {}
        lines: Rows = []
        for name, step in published["steps"].items():
            if name not in results:
                continue
            ours = results[name]
            paged = paged_share(ours, Machine.load(step["machine"])) if "paged_s" in ours else 0.0
            tokens = ours["tokens"] / (ours["s"] + paged * ours.get("paged_s", 0.0))
            reference = first.setdefault(step["group"], {"tokens": tokens, "measured": step["tokens_per_s"]})
            relative = tokens / reference["tokens"]
            measured_relative = step["tokens_per_s"] / reference["measured"]
            is_first = all(line["group"] != step["group"] for line in lines)
            lines.append(
                {
                    "name": name,
                    "group": step["group"],
                    "label": f"{published['groups'][step['group']]}: {step['label']}",
                    "step": step,
                    "gib": ours["gib"],
                    "memory_error": ours["gib"] / step["gib"] - 1,
                    "tokens": tokens,
                    "speed_error": tokens / step["tokens_per_s"] - 1,
                    "relative": relative,
                    "measured_gib": step["gib"],
                    "measured_relative": measured_relative,
                    "is_first": is_first,
                    "relative_error": None if is_first else relative / measured_relative - 1,
                    "paged": paged,
                    "resident_tokens": ours["tokens"] / ours["s"],
                    "all_paged_tokens": ours["tokens"] / (ours["s"] + ours.get("paged_s", 0.0)),
                }
            )
        return lines

    def chart(self, rows: Rows) -> Chart:
        values = self.template_values(rows)
        lines = values["lines"]
        names = [line["step"]["label"] if line["group"] == "3b" else line["label"] for line in lines]
        panels = []
        for title, ours, measured, error, axis in (
            (
                "Peak memory (8B: options chosen by it)",
                "gib",
                "measured_gib",
                "memory_error",
                Axis("GiB", "{:g}", (0, None), room=1.15),
            ),
            (
                "Speed relative to the model's first row",
                "relative",
                "measured_relative",
                "relative_error",
                Axis("times", "{:g}", (0, None), room=1.15),
            ),
        ):
            values_of = {key: [line[key] for line in lines] for key in (ours, measured)}
            right = [max(pair) for pair in zip(*values_of.values(), strict=True)]
            texts = ["" if line[error] is None else f"{line[error]:+.1%}" for line in lines]
            marks: list[Mark] = [
                between(values_of[measured], values_of[ours], range(len(lines)), "#888888"),
                Line(right, range(len(lines)), line="", texts=texts),
            ]
            for group, color in self.colors.items():
                at = [i for i, line in enumerate(lines) if line["group"] == group]
                for key, kind, size in ((measured, "measured", 8.0), (ours, "ours", 5.5)):
                    label = f"{self.published['groups'][group]}: {kind}"
                    x = [lines[i][key] for i in at]
                    marks.append(Line(x, at, color, label, "o", "", size=size, hollow=key == measured))
            panels.append(Panel(title, marks, axis, Axis(names=names)))
        title = (
            f"torchtune: memory within {self.bars['memory']:.0%} at {values['memory']} of {values['count']} steps, "
            f"relative speed within {self.bars['speed']:.0%} at {values['speed']} of {values['relative']}"
        )
        return Chart(title, panels, 2, (5.0, 4.6), keys=3)


def measures(program: Program, plan: Plan, machine: Machine, tokens: int) -> Row:
    """Returns the peak in GiB and the seconds of a step, in all and of attention."""
    timeline = simulate(program, plan, machine, program.peak_bytes)
    attention_ns = sum(kernel.duration_ns for kernel in program.kernels if "attention" in kernel.name)
    return {
        "tokens": tokens,
        "gib": round(timeline.peak_bytes / 2**30, 3),
        "s": round(timeline.iteration_ns / 1e9, 5),
        "attention_s": round(attention_ns / 1e9, 5),
    }


def with_element_times(machine: Machine, source: Machine) -> Machine:
    """Returns the machine with another's arithmetic of elementwise kernels that load one element at a time."""
    assert machine.kernel_times is not None and source.kernel_times is not None
    times = replace(machine.kernel_times, element_flops=source.kernel_times.element_flops)
    return replace(machine, kernel_times=times)


def paged_share(result: Row, machine: Machine) -> float:
    """Returns the fraction of paged optimizer states that do not fit into the machine's memory beside the step."""
    seconds_per_byte = 1 / machine.h2d_bytes_per_s + 1 / machine.d2h_bytes_per_s
    states = result["paged_s"] / seconds_per_byte
    free = machine.memory_bytes - machine.context_bytes - result["gib"] * 2**30
    return min(1.0, max(0.0, float(1 - free / states)))
