"""Checkpoints of every block: what ``gradient_checkpointing_enable`` of transformers and diffusers does.

A block is a member of a module list, such as a layer of a transformer. It keeps its inputs and outputs. Its other
feature maps are dropped, and all of them are recomputed at once, when its backward pass first needs one of them
(``torch.utils.checkpoint`` with ``use_reentrant=False``). The blocks are found by the module paths of the kernels
(``Kernel.module``). Numbered choices: checkpoint_blocks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from agents.heuristics.layers import FeatureMap, feature_maps, is_marker
from agents.planner import Infeasible, PlannerInfo, Rows, RowsPlanner
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine
from simulator.plan import Rerun
from simulator.program import Program


@dataclass(eq=False)
class CheckpointBlocks(RowsPlanner):
    """Checkpoints of every block of a model.

    Args:
        min_bytes: smaller feature maps are kept; PyTorch drops all.
    """

    facts = PlannerInfo(
        "checkpoint_blocks",
        "gradient checkpointing",
        "gradient_checkpointing_enable of transformers and diffusers",
        "recompute",
        4,
        240,
        "recompute",
    )

    _: KW_ONLY
    min_bytes: int = 0

    def choose(self, engine: Engine) -> Rows:
        """Returns the planner's only plan, without checking the limit; raises Infeasible if it finds no block."""
        program = engine.program
        found = blocks(program)
        if not found:
            is_known = any(kernel.module for kernel in program.kernels)
            reason = "no module list has members with modules" if is_known else "capture it again for its module paths"
            raise Infeasible(
                f"{self.name}: {program.name!r} cannot be planned within {engine.limit:,} bytes; it has no known "
                f"blocks: {reason}, or choose another planner"
            )
        decisions: list[Rerun] = []
        maps = feature_maps(program, self.min_bytes)
        for kernels in found.values():
            inside = set(kernels)
            inner = [m for m in maps if m.layer in inside and _is_inner(program, m, inside)]
            chains = {m: chain for m in inner if (chain := _chain(program, m.tensor, inside))}
            if chains:
                at = min(m.gap.before for m in chains)
                decisions += (Rerun(k, at) for k in sorted(set().union(*chains.values())))
        return rows_of(decisions)


def _is_inner(program: Program, m: FeatureMap, inside: set[int]) -> bool:
    """Returns whether only the forward kernels of a block read a feature map, besides references that Python holds."""
    users = [k for k in program.accesses[m.tensor] if k <= m.gap.after and not is_marker(program.kernels[k])]
    return inside.issuperset(users) and not is_marker(program.kernels[m.gap.before])


def _chain(program: Program, tensor: int, inside: set[int]) -> set[int]:
    """Returns the kernels of a block that recompute a tensor from the block's inputs; empty if one cannot run twice."""
    chain: set[int] = set()
    pending = [k for k in program.writes[tensor] if k in inside]
    while pending:
        k = pending.pop()
        if not program.kernels[k].recomputable:
            return set()
        if k not in chain:
            chain.add(k)
            pending += (w for x in program.kernels[k].inputs for w in program.writes[x] if w in inside and w < k)
    return chain


def blocks(program: Program) -> dict[str, list[int]]:
    """Returns the forward kernels of each block, by the module path of the block."""
    forward = [k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward"]
    return dict(_blocks(program, "", forward))


def _blocks(program: Program, prefix: str, kernels: Iterable[int]) -> Iterator[tuple[str, list[int]]]:
    """Yields the blocks below the module path ``prefix`` with those of the given forward kernels that are theirs.

    These are the members of the outermost module lists. A list whose members change the size of what they pass on
    holds stages (of a U-Net, of a Swin Transformer): blocks are then sought within its members, and if none has any,
    the members are the blocks.
    """
    lists: dict[str, dict[int, list[int]]] = {}
    for k in kernels:
        if not program.kernels[k].module.startswith(prefix):
            continue
        parts = program.kernels[k].module.removeprefix(prefix).split(".")
        if (i := next((i for i, part in enumerate(parts) if part.isdecimal()), None)) is not None:
            path = prefix + "".join(f"{part}." for part in parts[:i])
            lists.setdefault(path, {}).setdefault(int(parts[i]), []).append(k)
    for path, by_index in lists.items():
        members = dict(sorted(by_index.items()))
        # Members without modules of their own are no blocks, such as the layers of a Sequential.
        found = {
            f"{path}{i}": inside
            for i, inside in members.items()
            if any(program.kernels[k].module != f"{path}{i}" for k in inside)
        }
        nested: list[tuple[str, list[int]]] = []
        keeps_size = _keeps_size(program, list(members.values()))
        if not keeps_size:
            nested += (block for name, inside in found.items() for block in _blocks(program, f"{name}.", inside))
        # A single member that changes the size is a sampler between two stages.
        yield from nested or (found.items() if keeps_size or len(members) > 1 else ())


def _keeps_size(program: Program, members: list[list[int]]) -> bool:
    """Returns whether most members of a list pass on a tensor of a size that they got."""
    last = len(members)
    member_of = {k: i for i, inside in enumerate(members) for k in inside}
    writer = {t: i for k, i in member_of.items() for t in program.kernels[k].outputs}
    # Sizes that the first member gets from outside, that each passes to the next, and the last one to the outside.
    passed: list[set[int]] = [set() for _ in range(last + 1)]
    for k, kernel in enumerate(program.kernels):
        if kernel.phase == "forward":
            reader = member_of.get(k, last)
            sizes = {t: program.tensors[t].nbytes for t in kernel.inputs if not program.tensors[t].persistent}
            passed[reader].update(n for t, n in sizes.items() if writer.get(t, -1) == reader - 1)
    return 2 * sum(bool(got & given) for got, given in pairwise(passed)) >= last
