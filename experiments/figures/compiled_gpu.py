"""figure=compiled on a GPU: larger networks in bfloat16, whose copies to the host are real ones."""

from dataclasses import replace

from experiments.figures import compiled

FIGURE = replace(compiled.FIGURE, name="compiled_gpu")
