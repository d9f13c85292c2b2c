"""Machine: GPU memory, copy engines and a roofline model of kernel times.

Presets are YAML files (``configs/machine/*.yaml``) that cite the source of each figure.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields as dataclass_fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from simulator.files import FormatError, fields, keys_of, read_yaml
from simulator.kernel_times import KernelTimes
from simulator.limits import size_bytes

ALONE = 2**20  # full speed of a transfer in the fixed-point unit of Machine.h2d_share and d2h_share
# Keys in files that stand for both directions of a copy, and the fields that they replace.
COMBINED = {
    "duplex_bytes_per_s": ("duplex_h2d_bytes_per_s", "duplex_d2h_bytes_per_s"),  # Machine.with_shared_link
    "copy_latency_ns": ("d2h_latency_ns", "h2d_latency_ns"),
}
PRESETS = Path(__file__).resolve().parent.parent / "configs" / "machine"


@dataclass(frozen=True)
class Machine:
    """One GPU on one host link. Bandwidths are in bytes per second, times in nanoseconds, sizes in bytes.

    The simulator ignores the driver's allocation time (``driver_ns``), because its tensors come from a pool. Only
    ``simulator.pool.times``, which compares pools with plain cudaMalloc and cudaFree, uses it.

    Attributes:
        name: Name in results and messages.
        memory_bytes: Size of device memory.
        h2d_bytes_per_s: Bandwidth of copies from pinned host memory.
        d2h_bytes_per_s: Bandwidth of copies to pinned host memory.
        d2h_latency_ns: Time of a swap-out beyond its bytes.
        h2d_latency_ns: Time of a swap-in beyond its bytes.
        copy_engines: Number of copy engines; 2: full duplex, 1: one transfer at a time.
        duplex_h2d_bytes_per_s: H2D bandwidth while a D2H copy is in flight; 0: as without one.
        duplex_d2h_bytes_per_s: D2H bandwidth while an H2D copy is in flight; 0: as without one.
        host_bytes: Pinned host memory for swapped tensors.
        alignment: Alignment of addresses; the ledger counts exact bytes.
        flops_per_s: Peak rate by dtype: "float32", "bfloat16", ….
        memory_bytes_per_s: Bandwidth of device memory.
        launch_ns: Pause between two kernels of one stream.
        graph_launch_ns: Pause between two kernel nodes of a CUDA graph.
        graph_copies: Speed of copies in the CUDA graph of a training step, as a fraction of their own.
        issue_ns: Host time to issue one kernel or copy (RULES.md, choice i).
        queue_depth: Most kernels that are issued and unfinished (choice i).
        wait_ns: Time on the compute stream to wait for the event of a swap-in (choice j).
        event_ns: Time on the compute stream to record an event that a copy waits for (choice j).
        copy_contention: Fraction of a memory-bound kernel's speed lost per copy in flight (choice k).
        context_bytes: Device memory in use besides what PyTorch reserves: CUDA context, kernels and handles of
            libraries.
        cublas_workspace_bytes: Bytes that PyTorch reserves per cuBLAS handle.
        convolution_copies: Whether cuDNN converts operands and results of convolutions to channels last.
        malloc_ns: Time of a cudaMalloc call.
        free_ns: Time of a cudaFree call.
        malloc_bytes_per_s: Rate of mapping memory, in addition to the calls; 0: independent of size.
        switch_ns: Time between two kernels of different jobs that share compute by "fifo" (several jobs only).
        concurrency: Total speed of concurrent kernels relative to one kernel alone (several jobs only).
        efficiency: Fraction of the roofline that kernels reach, by kernel kind; "default" for all other kinds.
        kernel_times: Model for captured kernels; None: roofline.
        capability: CUDA compute capability, such as "9.0", by which PyTorch chooses kernels; "": unknown.

    Raises:
        FormatError: A figure is out of range.
    """

    name: str
    memory_bytes: int
    h2d_bytes_per_s: int
    d2h_bytes_per_s: int
    d2h_latency_ns: int = 10_000
    h2d_latency_ns: int = 10_000
    copy_engines: int = 2
    duplex_h2d_bytes_per_s: int = 0
    duplex_d2h_bytes_per_s: int = 0
    host_bytes: int = 64 * 2**30
    alignment: int = 512
    flops_per_s: dict[str, int] = field(default_factory=dict)
    memory_bytes_per_s: int = 1
    launch_ns: int = 5_000
    graph_launch_ns: int = 0
    graph_copies: float = 1.0
    issue_ns: int = 0
    queue_depth: int = 1024
    wait_ns: int = 0
    event_ns: int = 0
    copy_contention: float = 0.0
    context_bytes: int = 0
    cublas_workspace_bytes: int = 8_519_680
    convolution_copies: bool = False
    malloc_ns: int = 0
    free_ns: int = 0
    malloc_bytes_per_s: int = 0
    switch_ns: int = 0
    concurrency: float = 1.0
    efficiency: dict[str, float] = field(default_factory=dict)
    kernel_times: KernelTimes | None = None
    capability: str = ""

    def __post_init__(self) -> None:
        divisors = "memory_bytes h2d_bytes_per_s d2h_bytes_per_s memory_bytes_per_s alignment queue_depth".split()
        for entry in dataclass_fields(self):
            value = getattr(self, entry.name)
            minimum = int(entry.name in divisors)
            if isinstance(value, int) and value < minimum:
                expected = "a positive integer" if minimum else "an integer of at least 0"
                raise FormatError(f"machine.{entry.name}: expected {expected}, got {value}")
        if self.capability and not re.fullmatch(r"\d+\.\d+", self.capability):
            raise FormatError(f'machine.capability: expected a version such as "9.0", got {self.capability!r}')
        if self.copy_engines not in (1, 2):
            raise FormatError(f"machine.copy_engines: expected 1 or 2, got {self.copy_engines}")
        if not 0 < self.concurrency <= 1024:
            raise FormatError(f"machine.concurrency: expected a number in (0, 1024], got {self.concurrency!r}")
        if not 0 < self.graph_copies <= 1:
            raise FormatError(f"machine.graph_copies: expected a number in (0, 1], got {self.graph_copies!r}")
        if not 0 <= self.copy_contention < 0.5:
            raise FormatError(f"machine.copy_contention: expected a number in [0, 0.5), got {self.copy_contention!r}")
        for key, flops in self.flops_per_s.items():
            if isinstance(flops, bool) or not isinstance(flops, int) or flops < 1:
                raise FormatError(f"machine.flops_per_s.{key}: expected a positive integer, got {flops!r}")
        for key, efficiency in self.efficiency.items():
            if isinstance(efficiency, bool) or not isinstance(efficiency, (int, float)) or not 0 < efficiency <= 1:
                raise FormatError(f"machine.efficiency.{key}: expected a number in (0, 1], got {efficiency!r}")

    def d2h_ns(self, nbytes: int) -> int:
        """Returns the duration of a swap-out: latency + nbytes / bandwidth, rounded up."""
        return self.d2h_latency_ns - (-nbytes * 1_000_000_000 // self.d2h_bytes_per_s)

    def h2d_ns(self, nbytes: int) -> int:
        """Returns the duration of a swap-in: latency + nbytes / bandwidth, rounded up."""
        return self.h2d_latency_ns - (-nbytes * 1_000_000_000 // self.h2d_bytes_per_s)

    @property
    def h2d_share(self) -> int:
        """Fraction of H2D speed while a D2H copy is in flight, as a 20-bit fixed-point number."""
        return self._share(self.duplex_h2d_bytes_per_s, self.h2d_bytes_per_s)

    @property
    def d2h_share(self) -> int:
        """Fraction of D2H speed while an H2D copy is in flight, as a 20-bit fixed-point number."""
        return self._share(self.duplex_d2h_bytes_per_s, self.d2h_bytes_per_s)

    def _share(self, duplex_rate: int, rate: int) -> int:
        return max(1, duplex_rate * ALONE // rate) if self.copy_engines == 2 and 0 < duplex_rate < rate else ALONE

    def in_graph(self) -> Machine:
        """Returns the machine as a training step's CUDA graph sees it, with copies slower by ``graph_copies``."""
        return replace(self.with_link(self.graph_copies), graph_copies=1.0)

    def with_link(self, share: float) -> Machine:
        """Returns this machine with copies at a share of their speed, both alone and beside copies of the other way."""
        rates = ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_h2d_bytes_per_s", "duplex_d2h_bytes_per_s")
        return replace(self, **{name: round(getattr(self, name) * share) for name in rates})

    def with_shared_link(self, duplex_bytes_per_s: int) -> Machine:
        """Returns this machine with a total bandwidth for copies in both directions at once.

        Both directions then slow down to the same share, duplex_bytes_per_s / (h2d_bytes_per_s + d2h_bytes_per_s), in
        units of 2⁻²⁰. Machine files may give this figure under the same key.

        Args:
            duplex_bytes_per_s: Total bandwidth; 0: both directions keep their full bandwidth.

        Returns:
            A machine with the same figures otherwise.

        Raises:
            FormatError: The figure is negative.
        """
        if duplex_bytes_per_s < 0:
            raise FormatError(
                f"machine.duplex_bytes_per_s: expected an integer of at least 0, got {duplex_bytes_per_s}"
            )
        share = 0
        total = self.h2d_bytes_per_s + self.d2h_bytes_per_s
        if 0 < duplex_bytes_per_s < total:
            share = max(1, duplex_bytes_per_s * ALONE // total)
        # Rounded up, so that the share is exact for links of at least 1 MiB/s.
        h2d, d2h = (-(-share * rate // ALONE) for rate in (self.h2d_bytes_per_s, self.d2h_bytes_per_s))
        return replace(self, duplex_h2d_bytes_per_s=h2d, duplex_d2h_bytes_per_s=d2h)

    def with_one_copy_stream(self) -> Machine:
        """Returns this machine with one copy engine, as for an executor that issues all copies on one CUDA stream."""
        return replace(self, copy_engines=1)

    def copy_loss(self, nbytes: int, duration_ns: int) -> int:
        """Returns the speed that a kernel loses per copy in flight, in units of 2⁻²⁰ of its speed.

        Args:
            nbytes: Memory traffic of the kernel.
            duration_ns: Duration of the kernel without copies.

        Returns:
            The loss of speed, 0 if copies do not slow kernels.
        """
        max_loss = int(self.copy_contention * ALONE)
        capacity = duration_ns * self.memory_bytes_per_s
        return min(max_loss, max_loss * nbytes * 1_000_000_000 // capacity) if capacity else 0

    def compute_share(self, running: int) -> int:
        """Returns the speed of each of ``running`` concurrent kernels, in units of 2⁻²⁰ of its speed alone."""
        return ALONE if running < 2 else max(1, min(ALONE, round(self.concurrency * ALONE) // running))

    def driver_ns(self, mallocs: int, frees: int, nbytes: int) -> int:
        """Returns the time of cudaMalloc and cudaFree calls over ``nbytes`` in total, rounded up."""
        mapping_ns = -(-nbytes * 1_000_000_000 // self.malloc_bytes_per_s) if self.malloc_bytes_per_s else 0
        return mallocs * self.malloc_ns + frees * self.free_ns + mapping_ns

    def kernel_ns(self, kind: str, flops: int, nbytes: int, dtype: str = "float32") -> int:
        """Returns the roofline time max(flops / peak, bytes / bandwidth) at the kind's efficiency, plus the launch.

        Args:
            kind: Kind of the kernel.
            flops: FLOPs of the kernel.
            nbytes: Bytes that it reads and writes.
            dtype: Key of ``flops_per_s``.

        Raises:
            FormatError: The machine has no peak for ``dtype``.
        """
        efficiency = self.efficiency.get(kind, self.efficiency.get("default", 1.0))
        seconds = nbytes / self.memory_bytes_per_s
        if flops:
            if dtype not in self.flops_per_s:
                raise FormatError(
                    f"machine.flops_per_s: {self.name} has no figure for {dtype}; add it to the machine's file"
                )
            seconds = max(seconds, flops / self.flops_per_s[dtype])
        return self.launch_ns + round(seconds / efficiency * 1e9)

    def to_dict(self) -> dict[str, Any]:
        """Returns every field by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Machine:
        """Reads a dictionary of fields; fields with a default are optional.

        ``duplex_bytes_per_s`` may replace the two figures per direction (``with_shared_link``), and ``copy_latency_ns``
        the two latencies; each excludes the keys that it replaces.

        Raises:
            FormatError: An entry is malformed; the message names the first.
        """
        sizes = ("memory_bytes", "host_bytes", "context_bytes", "cublas_workspace_bytes")  # may be written as 24GiB
        if isinstance(data, dict):
            data = {
                key: size_bytes(value, f"machine.{key}") if key in sizes and isinstance(value, str) else value
                for key, value in data.items()
                if key != "kernel_times" or value is not None
            }  # `to_dict` writes null
            for combined, keys in COMBINED.items():
                conflicting = [key for key in keys if key in data]
                if combined in data and conflicting:
                    raise FormatError(f"machine: `{combined}` and `{conflicting[0]}` are mutually exclusive; give one")
        required, optional = keys_of(cls)
        values = fields(data, "machine", required, {**optional, **dict.fromkeys(COMBINED, (int, None))})
        duplex, latency = map(values.pop, COMBINED)
        if latency is not None:
            if latency < 0:
                raise FormatError(f"machine.copy_latency_ns: expected an integer of at least 0, got {latency}")
            values |= dict.fromkeys(COMBINED["copy_latency_ns"], latency)
        if values["kernel_times"] is not None:
            values["kernel_times"] = KernelTimes.from_dict(values["kernel_times"])
        machine = cls(**values)
        return machine if duplex is None else machine.with_shared_link(duplex)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Machine:
        """Reads a preset by name ("gtx1080ti") or a YAML file of the same form.

        Raises:
            FormatError: The preset or file does not exist, or an entry is malformed.
        """
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml", ".json"):
            path = PRESETS / f"{name_or_path}.yaml"
            if not path.exists():
                presets = sorted(p.stem for p in PRESETS.glob("*.yaml"))
                (closest,) = get_close_matches(str(name_or_path), presets, n=1, cutoff=0.0)
                raise FormatError(
                    f"machine: there is no preset {str(name_or_path)!r}; there are {', '.join(presets)}; the nearest "
                    f"is {closest!r}"
                )
        data = read_yaml(path)
        try:
            return cls.from_dict(data)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
