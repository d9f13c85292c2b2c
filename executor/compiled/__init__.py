"""Memory plans for ``torch.compile``: which forward kernels the backward recomputes, and where."""

from executor.compiled.backend import (
    CompiledStep,
    CompileError,
    Partitioner,
    allocated_peak,
    compile,
    compile_step,
    measure,
    report,
)
from executor.compiled.graph_report import CompiledReport
from executor.compiled.losses import chunked_cross_entropy
from executor.compiled.solver import ChainSolver
from executor.compiled.tags import tag

__all__ = [
    "ChainSolver",
    "CompileError",
    "CompiledReport",
    "CompiledStep",
    "Partitioner",
    "allocated_peak",
    "chunked_cross_entropy",
    "compile",
    "compile_step",
    "measure",
    "report",
    "tag",
]
