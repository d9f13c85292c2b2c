"""Commands that validate the simulator on a GPU; their parts are in experiments/measure."""

import os

# PyTorch reads these when it is imported. With expandable segments, fragmentation does not count toward a memory cap
# (the second name is for PyTorch 2.9 and later). With a fixed workspace, cuBLAS can be deterministic.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
