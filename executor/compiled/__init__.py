"""Memory plans for ``torch.compile``: which forward kernels the backward recomputes, and where."""

from executor.compiled.backend import CompiledReport, CompileError, Partitioner, allocated_peak, compile, report
from executor.compiled.solver import ChainSolver

__all__ = ["ChainSolver", "CompileError", "CompiledReport", "Partitioner", "allocated_peak", "compile", "report"]
