"""A program small enough to plan by hand: four activations forward, the same four backward."""

# One byte takes one nanosecond to copy. ``w`` (10 bytes) is persistent, every activation has 40 bytes, every
# gradient 10. Without a limit:
#
#     time      0   10   20   30   40      60      80      100     120
#     compute   |f1  |f2  |f3  |f4  |b4     |b3     |b2     |b1     |      ideal_ns = 120
#     writes     a1   a2   a3   a4   g4      g3      g2      w
#     reads      w    a1   a2   a3   a3 a4   a2 a3   a1 a2   w a1
#                                            g4      g3      g2
#     load       50   90  130  170  180     150     110      60            peak_bytes = 180
#
# ``a1`` is not used from kernel 2 to 5, ``a2`` in kernels 3 and 4, ``w`` from kernel 1 to 6; the rest has no gap.
# Under LIMIT = 150 bytes a1 or a2 must be evicted in kernels 3 and 4.
#
# SWAP_PLAN swaps a1. f4 does not fit beside it and waits for the swap-out; a1 does not fit beside a4 and is
# swapped in while b3 runs:
#
#     time      0   10   20   30        60   70      90      110  130     150     170
#     compute   |f1  |f2  |f3  |  wait  |f4  |b4     |b3     |wait|b2     |b1     |   30 ns for memory
#     d2h                 |  a1 (40)    |                                             20 ns for data
#     h2d                                            |  a1 (40)   |
#     used       50   90  130  130      130  140     150     100  110     60          170 - 120 = 50 ns overhead
#
# No plan of swaps is faster: a1's swap-out cannot end before 60, nor its swap-in start before b4 has ended
# (90 + 40 = 130); a2 can be swapped no earlier than 30, which makes f4 start at 70 and b3 at 140.
#
# RECOMPUTE_PLAN drops a1 and recomputes f1 (10 ns) for b2; nothing waits. Every plan that fits either swaps
# (50 ns at least) or recomputes a kernel (10 ns at least): 10 ns is the optimum.

from simulator import Kernel, Machine, Plan, Program, Recompute, Swap, Tensor

MACHINE = Machine("tiny", 1000, 10**9, 10**9, d2h_latency_ns=0, h2d_latency_ns=0, copy_engines=2)

W, A1, A2, A3, A4, G4, G3, G2 = range(8)
PROGRAM = Program(
    "tiny",
    (
        Tensor("w", 10, "parameter", True),
        *(Tensor(f"a{i}", 40) for i in (1, 2, 3, 4)),
        *(Tensor(f"g{i}", 10, "gradient") for i in (4, 3, 2)),
    ),
    (
        Kernel("f1", "matmul", "forward", (W,), (A1,), 10),
        Kernel("f2", "activation", "forward", (A1,), (A2,), 10),
        Kernel("f3", "activation", "forward", (A2,), (A3,), 10),
        Kernel("f4", "activation", "forward", (A3,), (A4,), 10),
        Kernel("b4", "activation", "backward", (A3, A4), (G4,), 20),
        Kernel("b3", "activation", "backward", (A2, A3, G4), (G3,), 20),
        Kernel("b2", "activation", "backward", (A1, A2, G3), (G2,), 20),
        Kernel("b1", "matmul", "backward", (W, A1, G2), (W,), 20),
    ),
)
LIMIT = 150
SWAP_PLAN = Plan((Swap(A1, 1, 6),), PROGRAM.fingerprint, "by hand", LIMIT, "tiny")
RECOMPUTE_PLAN = Plan((Recompute(A1, 1, 6),), PROGRAM.fingerprint, "by hand", LIMIT, "tiny")


def just_hidden() -> tuple[Program, Machine, int]:
    """Returns a task in which kernels just hide the swap of ``a``, and recomputing ``c`` takes less time."""
    x, a, c, e = range(4)
    tensors = (Tensor("x", 100, "parameter", True), *(Tensor(name, 10**8) for name in "ace"))
    kernels = (
        Kernel("a", "other", "forward", (x,), (a,), 10**7),
        Kernel("c", "other", "forward", (x,), (c,), 2 * 10**6),
        Kernel("while a is swapped out", "other", "forward", (x,), (), 105 * 10**6),
        Kernel("large", "other", "forward", (x,), (), 10**6, workspace=2 * 10**8),
        Kernel("while a is swapped in", "other", "forward", (x,), (), 105 * 10**6),
        Kernel("e", "other", "forward", (a, c), (e,), 10**7),
    )
    program = Program("just hidden", tensors, kernels)
    return program, MACHINE, program.peak_bytes - 10**8
