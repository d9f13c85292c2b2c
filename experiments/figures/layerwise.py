"""Networks as SuperNeurons counts them (sections 3.1, 3.2, 4.1): one forward and one backward kernel per layer.

Kernels read and write the tensors of cuDNN's calls; images, parameters and workspaces are not counted. The tensors of
a layer's backward step determine every number of Table 1 and section 4.1.1. They follow the authors' code
(github.com/linnanwang/superneurons-release, src/layer); only this gives the paper's 36 tensors and 2189.437 MB.
"""

# Tensors of a layer's backward step:
# - convolution, fully connected: input, output's gradient, and a new gradient of the input (also of the images);
# - pooling: input, output, output's gradient, and a new gradient of the input;
# - activation, LRN: input, output, and one gradient, updated in place;
# - batch-norm: input, output's gradient, and a new gradient of the input; the output is not read;
# - dropout: output's gradient and a new gradient of the input; neither input nor output is read;
# - softmax: input and output, which becomes the gradient in place; the loss is not a tensor;
# - fork: forward a copy per branch; backward the first branch's gradient, to which the others are added;
# - join: forward a new sum; backward the gradient, and a copy for every branch but the first.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from agents.heuristics.superneurons import STRATEGIES, evictable_gaps, layer_bytes, segment_bytes, segments
from experiments.figures import published
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.modes import Choice
from simulator.plan import Decision, Plan, Recompute, Swap
from simulator.program import Gap, Kernel, KernelKind, Phase, Program, Tensor, TensorKind

Part = tuple[str, KernelKind, int]  # name, kind, numbers in the output for one image
FREE = Machine("copies that take no time", 2**60, 10**18, 10**18, d2h_latency_ns=0, h2d_latency_ns=0, host_bytes=2**60)


class Layer(NamedTuple):
    """Layer whose output has ``floats`` numbers per image; ``inputs`` are indices of earlier layers."""

    name: str
    kind: KernelKind  # copy: fork; elementwise: join; other: softmax
    floats: int
    inputs: tuple[int, ...]


class MemoryStep(NamedTuple):
    """Memory contents during one kernel."""

    name: str
    phase: Phase
    nbytes: int
    tensors: tuple[int, ...]  # indices of those in memory


def alexnet() -> list[Layer]:
    """Returns AlexNet's 23 layers, for images of 3 x 227 x 227 (section 4.1.1, footnote)."""
    table = published("superneurons_layers")
    return _chain([(name, kind, prod(size) if size else 0) for name, (kind, *size) in table.items()], [])


def resnet(*blocks: int) -> list[Layer]:
    """Returns a ResNet with the given bottleneck blocks per stage, for images of 3 x 227 x 227.

    As in the authors' code, CONV1's output is 114 x 114, and pooled without padding 56 x 56. A block begins with a fork
    and ends with a join and a ReLU.
    """
    pixels = 56 * 56
    layers = _chain(
        [
            ("CONV1", "conv", 64 * 114 * 114),
            ("BN1", "norm", 0),
            ("ACT1", "activation", 0),
            ("POOL1", "pool", 64 * pixels),
        ],
        [],
    )
    for stage, count in enumerate(blocks, 2):
        width = 64 * 2 ** (stage - 2)
        for i in range(count):
            label = f"{stage}.{i + 1}"
            fork = len(layers)
            layers.append(Layer(f"FORK{label}", "copy", layers[-1].floats, (fork - 1,)))
            if i == 0 and stage > 2:
                pixels //= 4
            parts: list[Part] = []
            for j, channels in enumerate((width, width, 4 * width), 1):
                parts += [(f"CONV{label}.{j}", "conv", channels * pixels), (f"BN{label}.{j}", "norm", 0)]
                parts += [(f"ACT{label}.{j}", "activation", 0)] if j < 3 else []
            layers = _chain(parts, layers)
            main = len(layers) - 1
            shortcut = fork
            if i == 0:
                projection: list[Part] = [(f"CONV{label}.0", "conv", 4 * width * pixels), (f"BN{label}.0", "norm", 0)]
                layers = _chain(projection, layers, fork)
                shortcut = len(layers) - 1
            layers.append(Layer(f"JOIN{label}", "elementwise", 4 * width * pixels, (shortcut, main)))
            layers = _chain([(f"ACT{label}", "activation", 0)], layers)
    return _chain(
        [("POOL2", "pool", layers[-1].floats // pixels), ("FC1", "matmul", 1000), ("SOFTMAX", "other", 0)], layers
    )


def _chain(parts: Sequence[Part], head: list[Layer], start: int = -1) -> list[Layer]:
    """Appends a chain of layers after layer ``start`` to ``head``; 0 floats copies the input's size."""
    layers = list(head)
    previous = len(layers) - 1 if start < 0 else start
    for name, kind, floats in parts:
        inputs = (previous,) if previous >= 0 else ()
        layers.append(Layer(name, kind, floats or layers[previous].floats, inputs))
        previous = len(layers) - 1
    return layers


def backward_order(layers: Sequence[Layer]) -> list[int]:
    """Returns the order of the paper's Algorithm 1: depth first from the last layer.

    A layer follows once all its readers are done; the first branch of a join comes last.
    """
    readers = [0] * len(layers)
    for layer in layers:
        for i in layer.inputs:
            readers[i] += 1
    order = []
    stack = [len(layers) - 1]
    while stack:
        i = stack.pop()
        readers[i] -= 1
        if readers[i] <= 0:
            order.append(i)
            stack += [layers[i].inputs[0], *reversed(layers[i].inputs[1:])] if layers[i].inputs else []
    return order


def program(name: str, layers: Sequence[Layer], batch_size: int, image: int = 3 * 227 * 227) -> Program:
    """Returns the layers' forward and backward steps as a program.

    Args:
        name: Name of the program.
        layers: Layers in order.
        batch_size: Images per batch.
        image: Numbers in one image, the size of the gradient of the first layer's input.
    """
    tensors: list[Tensor] = []
    kernels: list[Kernel] = []

    def add_tensor(label: str, floats: int, kind: TensorKind) -> int:
        tensors.append(Tensor(label, 4 * batch_size * floats, kind))
        return len(tensors) - 1

    def add_kernel(layer: Layer, phase: Phase, inputs: list[int], outputs: list[int]) -> None:
        kernels.append(Kernel(layer.name, layer.kind, phase, tuple(inputs), tuple(outputs), 1000))

    readers: list[list[int]] = [[] for _ in layers]
    for i, layer in enumerate(layers):
        for source in layer.inputs:
            readers[source].append(i)
    outputs: list[dict[int, int]] = []  # per layer, the tensor for each reader; a fork has several
    for i, layer in enumerate(layers):
        names = [f"{layer.name} for {layers[r].name}" for r in readers[i]] if layer.kind == "copy" else [layer.name]
        produced = [add_tensor(label, layer.floats, "activation") for label in names]
        outputs.append({r: produced[b % len(produced)] for b, r in enumerate(readers[i] or [-1])})
        add_kernel(layer, "forward", [outputs[s][i] for s in layer.inputs], produced)

    gradients: list[dict[int, int]] = [{} for _ in layers]  # of each layer's output, by the reader that it comes from
    for i in backward_order(layers):
        layer = layers[i]
        x = [outputs[s][i] for s in layer.inputs]
        y = next(iter(outputs[i].values()))
        dy = list(gradients[i].values())
        label = f"gradient of {layer.name}'s input"
        floats = layers[layer.inputs[0]].floats if layer.inputs else image
        if layer.kind == "other":
            dx = [y]
            add_kernel(layer, "backward", [*x, y], dx)
        elif layer.kind in ("activation", "lrn"):  # in place
            dx = dy
            add_kernel(layer, "backward", [*x, y, *dy], dx)
        elif layer.kind == "copy":
            dx = dy[:1]
            add_kernel(layer, "backward", dy, dx)
        elif layer.kind == "elementwise":
            copies = [add_tensor(f"{label} {b}", layer.floats, "gradient") for b in range(1, len(x))]
            dx = [*dy, *copies]
            add_kernel(layer, "backward", dy, copies)
        else:
            dx = [add_tensor(label, floats, "gradient")]
            add_kernel(layer, "backward", {"pool": [*x, y, *dy], "dropout": dy}.get(layer.kind, [*x, *dy]), dx)
        for source, tensor in zip(layer.inputs, dx, strict=False):
            gradients[source][i] = tensor
    return Program(name, tuple(tensors), tuple(kernels))


def plan(program: Program, offload: bool = True, strategy: str | None = None, branches: bool = False) -> Plan:
    """Applies the paper's techniques wherever allowed, whether or not memory is short.

    Args:
        program: Result of ``program``.
        offload: Section 3.3.1: outputs of convolutions are swapped out, and swapped in when the backward step of the
            last checkpoint before their use begins. Fully connected layers count as checkpoints, since CONV5 of AlexNet
            has no other.
        strategy: "speed", "memory" or "cost" (section 3.4); None recomputes nothing.
        branches: Forks and joins are checkpoints that are swapped out too, as in the authors' code, and swapped-out
            tensors return only when used. Table 1's ResNets need both.

    Returns:
        The plan with every allowed technique.

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy not in (None, *STRATEGIES):
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    kinds = evictable_gaps(program, "joint", 1, joins=branches)
    decisions: list[Decision] = [
        Swap(*gap, prefetch=gap.before - 1 if branches else _prefetch(program, gap), sync=True)
        for gap, kind in kinds.items()
        if kind == Choice.SWAPPED and offload and program.kernels[gap.before].phase == "backward"
    ]
    recomputed: dict[int, list[Gap]] = {}
    segment = segments(program)
    for gap, kind in kinds.items():
        if kind == Choice.RECOMPUTED and strategy:
            recomputed.setdefault(segment[gap.tensor], []).append(gap)
    l_peak = max(layer_bytes(program, k) for k in range(len(program.kernels)))
    for gaps in recomputed.values():
        keep = strategy == "speed" or (strategy == "cost" and segment_bytes(program, gaps) <= l_peak)
        decisions += [Recompute(*gap, keep=keep) for gap in gaps]
    return Plan(tuple(decisions), program.fingerprint)


def _prefetch(program: Program, gap: Gap) -> int:
    """Returns the kernel before the last checkpoint's backward step within the gap."""
    for k in range(gap.before - 1, gap.after, -1):
        if program.kernels[k].kind in ("conv", "matmul") and program.kernels[k].phase == "backward":
            return k - 1
    return gap.before - 1


def memory_steps(program: Program, plan: Plan) -> tuple[list[MemoryStep], int, int]:
    """Simulates a program under a plan, with copies that take no time.

    Returns:
        Memory contents during each kernel; number of recomputed kernels; peak in bytes, including the inputs that a
        recomputation needs before its kernel.
    """
    timeline = simulate(program, plan, FREE, FREE.memory_bytes)
    in_memory: Counter[int] = Counter()
    events = iter(timeline.events)
    steps = []
    recomputed = 0
    event = next(events, None)
    for span in timeline.spans:
        while event is not None and event.time_ns <= span.start_ns:
            in_memory[event.owner] += event.nbytes
            event = next(events, None)
        if span.start_ns < timeline.last_start_ns:
            continue
        recomputed += span.kind == "recompute"
        if span.kind == "kernel":
            kernel = program.kernels[span.index]
            resident = tuple(sorted(+in_memory))
            steps.append(MemoryStep(kernel.name, kernel.phase, sum(in_memory.values()), resident))
    return steps, recomputed, timeline.peak_bytes
