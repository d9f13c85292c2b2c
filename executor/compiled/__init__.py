"""Plans for ``torch.compile``: which kernels of the forward run again in the backward, and where."""

from executor.compiled.backend import CompiledReport, CompileError, Partitioner, compile, report
from executor.compiled.measure import allocated_peak
from executor.compiled.solver import ChainSolver

__all__ = ["ChainSolver", "CompileError", "CompiledReport", "Partitioner", "allocated_peak", "compile", "report"]
