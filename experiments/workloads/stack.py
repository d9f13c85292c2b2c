"""A training step of any length that no model need make: a stack of transformer blocks, as a program.

``figure=growth`` has large programs of it. Sizes and times are those of blocks of width ``WIDTH`` on 100 TFLOPS
and 1 TB/s, so that a copy over PCIe takes as long as some ten kernels do.
"""

from __future__ import annotations

from simulator.program import Kernel, Program, Tensor

WIDTH, TOKENS = 512, 2048  # of a block; tokens in a batch
ACTIVATION = 2 * WIDTH * TOKENS  # bytes of one activation in 16 bits
OPS_PER_S, BYTES_PER_S = 100e12, 1e12
SOFTMAX, GELU = 4, 4  # activations that the scores of attention, and the wide layer, are as large as

# A kernel of the forward pass: name, kind, what it reads (steps of the block before it; 0: the block's input), the
# activations that its result is as large as, and the WIDTH² weights that it multiplies with (0: none).
_BLOCK = (
    ("norm1", "norm", (0,), 1, 0), ("qkv", "matmul", (1,), 3, 3), ("scores", "matmul", (2,), SOFTMAX, 0),
    ("softmax", "reduce", (3,), SOFTMAX, 0), ("mix", "matmul", (2, 4), 1, 0), ("project", "matmul", (5,), 1, 1),
    ("add1", "elementwise", (0, 6), 1, 0), ("norm2", "norm", (7,), 1, 0), ("wide", "matmul", (8,), GELU, 4),
    ("gelu", "activation", (9,), GELU, 0), ("narrow", "matmul", (10,), 1, 4), ("add2", "elementwise", (7, 11), 1, 0),
)  # fmt: skip
_WEIGHTS = sum(weights > 0 for *_, weights in _BLOCK)
PER_BLOCK = 2 * len(_BLOCK) + 2 * _WEIGHTS  # kernels: forward, backward, gradients of weights, their updates


def stack(kernels: int) -> Program:
    """A training step of at least so many kernels, less than a block more."""
    blocks = max(-(-(kernels - 2) // PER_BLOCK), 1)
    tensors: list[Tensor] = []
    made: list[Kernel] = []

    def tensor(name: str, nbytes: int, kind: str = "activation", persistent: bool = False) -> int:
        tensors.append(Tensor(name, nbytes, kind, persistent))  # type: ignore[arg-type]
        return len(tensors) - 1

    def kernel(name: str, kind: str, phase: str, reads: list[int], writes: list[int], weights: int = 0) -> None:
        nbytes = sum(tensors[t].nbytes for t in reads + writes)
        flops = 2 * TOKENS * WIDTH * WIDTH * weights
        ns = round(max(flops / OPS_PER_S, nbytes / BYTES_PER_S) * 1e9)
        again = phase != "optimizer"
        made.append(Kernel(name, kind, phase, tuple(reads), tuple(writes), ns, 0, flops, nbytes, again))  # type: ignore[arg-type]

    x = tensor("input", ACTIVATION, "input", True)
    results: list[list[int]] = []  # of each block, its input first
    weights_of: dict[tuple[int, int], tuple[int, int]] = {}  # (block, kernel) -> weights, optimizer state
    for b in range(blocks):
        here = [x]
        for i, (name, kind, reads, size, weights) in enumerate(_BLOCK):
            own = []
            if weights:
                of = f"{b}.{name}"
                own = [tensor(f"{of}.weight", 2 * weights * WIDTH * WIDTH, "parameter", True)]
                state = tensor(f"{of}.moment", 2 * weights * WIDTH * WIDTH, "optimizer_state", True)
                weights_of[b, i] = own[0], state
            out = tensor(f"{b}.{name}", size * ACTIVATION)
            kernel(f"{b}.{name}", kind, "forward", [*(here[r] for r in reads), *own], [out], weights)
            here.append(out)
        results.append(here)
        x = here[-1]
    grad = tensor("loss.grad", ACTIVATION, "gradient")
    kernel("loss", "reduce", "forward", [x], [grad])
    updates = []
    for b in reversed(range(blocks)):
        here = results[b]
        grads = {len(_BLOCK): grad}  # of each result of the block
        for i in reversed(range(len(_BLOCK))):
            name, kind, reads, _, weights = _BLOCK[i]
            of, mine = f"{b}.{name}.backward", grads.pop(i + 1)
            own = list(weights_of[b, i][:1]) if weights else []
            if weights:
                made_grad = tensor(f"{b}.{name}.weight.grad", tensors[own[0]].nbytes, "gradient")
                kernel(f"{of}.weight", kind, "backward", [mine, here[reads[0]]], [made_grad], weights)
                updates.append((f"{b}.{name}.update", *weights_of[b, i], made_grad))
            again = [grads[r] for r in reads if r in grads]  # summed in place
            for r in reads:
                if r not in grads:
                    grads[r] = tensor(f"{b}.{name}.grad{r}", tensors[here[r]].nbytes, "gradient")
            inputs = [mine, *(here[r] for r in reads), *own, *again]
            kernel(of, kind, "backward", inputs, [grads[r] for r in reads], weights)
        grad = grads[0]
    for name, weight, state, made_grad in updates:
        kernel(name, "optimizer", "optimizer", [made_grad, weight, state], [weight, state])
    kernel("zero", "other", "optimizer", [grad], [grad])
    return Program(f"stack_{len(made)}", tuple(tensors), tuple(made))
