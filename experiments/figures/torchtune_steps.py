"""Training steps of Llama with the modules and options of torchtune's single-device recipes, for captures.

The modules allocate what torchtune's do (torchtune/modules, v0.5: RMSNorm in float32, rotary positions from a table in
float32, keys and values repeated for their groups, output layer in bfloat16 and logits in float32). Attention is
FlashAttention's causal kernel; torchtune's packed sequences use FlexAttention with a mask of documents, which saves the
same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from executor.capture.capture import capture_step
from experiments.figures.torchtune_compile import Compiled
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Kernel, Program

CHUNKS = 8  # CEWithChunkedOutputLoss's default
BLOCK = 64  # weights that share a scale in torchao's NF4Tensor
SCALES = 256  # scales that share a float32 factor there
STATES = 256  # optimizer states of 8 bits that share a float32 scale, in torchao and bitsandbytes
QUANTIZED = 4096  # weights from which on both quantize their states


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama and its batch; ``tied``: whether the output layer has the embedding's weights."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    tied: bool
    batch_size: int
    length: int


@dataclass(frozen=True)
class Options:
    """Options of torchtune's recipes.

    Attributes:
        compile: Compiles each layer, and the loss.
        chunked_loss: Computes logits and their loss in chunks of the sequences.
        checkpoint: Checkpoints each layer.
        early_update: Updates each weight as soon as its gradient is final (optimizer_in_bwd).
        lora_rank: Rank of the trained part beside frozen weights; 0 trains all weights.
        lora: Products that have a trained part: q, v, project, gate, up, down.
        nf4: Quantizes the frozen weights of the layers to 4 bits (QLoRA).
        scatter: Writes the gradient of the loss with respect to log-probabilities to memory, as Inductor does without
            its pass ``optimize_scatter_upon_const_tensor``.
    """

    compile: bool = False
    chunked_loss: bool = False
    checkpoint: bool = False
    early_update: bool = False
    lora_rank: int = 0
    lora: tuple[str, ...] = ()
    nf4: bool = False
    scatter: bool = False


class RMSNorm(nn.Module):
    """RMSNorm of ``[..., width]``, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return unit * self.scale


class NF4Linear(nn.Module):
    """Linear layer whose frozen weights have 4 bits each, with a scale per block of them, as torchao stores them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = outputs, inputs
        self.codes: Tensor
        self.scales: Tensor
        self.factors: Tensor
        self.levels: Tensor
        blocks = inputs * outputs // BLOCK
        self.register_buffer("codes", torch.empty(blocks, BLOCK // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.int8))
        self.register_buffer("factors", torch.empty(-(-blocks // SCALES)))
        self.register_buffer("levels", torch.empty(16))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.stack([self.levels[(self.codes >> 4).int()], self.levels[(self.codes & 15).int()]], -1)
        factors = self.factors.repeat_interleave(SCALES)[: len(self.scales)]
        weight = (pairs.flatten(1) * (self.scales * factors).unsqueeze(1)).view(self.shape)
        return F.linear(x, weight.to(x.dtype))


class LoRALinear(nn.Module):
    """Frozen linear layer and, beside it, two trained ones of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x) + 2.0 * self.b(self.a(x))
        return result


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Applies rotary positions ``[batch, length, 1, size / 2, 2]`` to x ``[batch, length, heads, size]``."""
    pairs = x.float().unflatten(-1, (-1, 2))
    first = pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1]
    second = pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


class Layer(nn.Module):
    """TransformerSelfAttentionLayer on ``[batch, length, width]``."""

    def __init__(self, sizes: Sizes, options: Options) -> None:
        super().__init__()
        width = sizes.width
        self.size = width // sizes.heads
        self.groups = sizes.heads // sizes.kv_heads
        narrow = sizes.kv_heads * self.size
        self.sa_norm = RMSNorm(width)
        self.q = _linear("q", width, width, options)
        self.k = _linear("k", width, narrow, options)
        self.v = _linear("v", width, narrow, options)
        self.project = _linear("project", width, width, options)
        self.mlp_norm = RMSNorm(width)
        self.gate = _linear("gate", width, sizes.hidden, options)
        self.up = _linear("up", width, sizes.hidden, options)
        self.down = _linear("down", sizes.hidden, width, options)

    def forward(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        h = x + self.attend(self.sa_norm(x), positions, table)
        unit = self.mlp_norm(h)
        result: Tensor = h + self.down(F.silu(self.gate(unit)) * self.up(unit))
        return result

    def attend(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Returns self-attention."""
        q, k, v = (part(x).unflatten(2, (-1, self.size)) for part in (self.q, self.k, self.v))
        q, k = (rotate(part, table[positions].unsqueeze(2)) for part in (q, k))
        k, v = (part.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        result: Tensor = self.project(out.transpose(1, 2).contiguous().flatten(2))
        return result


def _linear(name: str, inputs: int, outputs: int, options: Options) -> nn.Module:
    """Returns a linear layer: trained, or frozen with or without a trained part beside it."""
    if not options.lora_rank:
        return nn.Linear(inputs, outputs, bias=False)
    plain = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    frozen = NF4Linear(inputs, outputs) if options.nf4 else plain
    return LoRALinear(inputs, outputs, options.lora_rank, frozen) if name in options.lora else frozen


class Decoder(nn.Module):
    """TransformerDecoder from tokens ``[batch, length]`` to logits, or to their chunks in bfloat16."""

    def __init__(self, sizes: Sizes, options: Options) -> None:
        super().__init__()
        is_trained = not options.lora_rank
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, options) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight
        norms = (module for module in self.modules() if isinstance(module, RMSNorm))
        for module in (self.tokens, self.head, *norms):
            module.requires_grad_(is_trained)
        self.to(torch.bfloat16)
        self.table: Tensor
        self.register_buffer("table", torch.empty(sizes.length, sizes.width // sizes.heads // 2, 2))


class Recipe:
    """One training step with its model and fused AdamW, on the meta device.

    Args:
        sizes: Sizes of model and batch.
        options: Options of the recipe.
    """

    def __init__(self, sizes: Sizes, options: Options) -> None:
        self.options = options
        with torch.device("meta"):
            self.model = Decoder(sizes, options)
            self.batch = tuple(torch.empty(sizes.batch_size, sizes.length, dtype=torch.int64) for _ in range(3))
            hidden = torch.empty(sizes.batch_size, sizes.length, sizes.width, dtype=torch.bfloat16)
            chunks = CHUNKS if options.chunked_loss else 1
            dtype = torch.bfloat16 if options.chunked_loss else torch.float32
            logits = torch.empty(sizes.batch_size * sizes.length // chunks, sizes.vocabulary, dtype=dtype)
            labels = torch.empty(len(logits), dtype=torch.int64)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)
        self.loss: Callable[..., Tensor] = cross_entropy
        self.run_layer: list[Callable[..., Tensor]] = [layer.forward for layer in self.model.layers]
        if options.compile:
            with torch._inductor.config.patch(optimize_scatter_upon_const_tensor=not options.scatter):
                self.loss = Compiled(cross_entropy, [logits.requires_grad_(), labels])
            self.run_layer = self._compiled(hidden)

    def _compiled(self, hidden: Tensor) -> list[Callable[..., Tensor]]:
        """Returns the compiled layers."""
        template = self.model.layers[-1]
        names = list(_tensors(template))

        def function(x: Tensor, positions: Tensor, table: Tensor, *tensors: Tensor) -> Tensor:
            values = dict(zip(names, tensors, strict=True))
            result: Tensor = functional_call(template, values, (x, positions, table))
            return result

        inputs = self.batch[1], self.model.table, *_tensors(template).values()
        # Frozen embeddings give the first layer an input without a gradient.
        firsts = [hidden.clone()] if self.options.lora_rank else []
        graphs = [Compiled(function, [x, *inputs]) for x in (*firsts, hidden.requires_grad_())]

        def bound(graph: Compiled, layer: nn.Module) -> Callable[..., Tensor]:
            tensors = list(_tensors(layer).values())
            return lambda x, positions, table: graph(x, positions, table, *tensors)

        return [bound(graphs[0 if i == 0 else -1], layer) for i, layer in enumerate(self.model.layers)]

    def step(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """Runs forward, loss, backward and update."""
        loss = self.losses(self.logits(tokens, positions), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def logits(self, tokens: Tensor, positions: Tensor) -> list[Tensor]:
        """Returns the chunks of logits."""
        model = self.model
        h = model.tokens(tokens)
        for run in self.run_layer:
            if self.options.checkpoint:
                h = checkpoint(run, h, positions, model.table, use_reentrant=False)
            else:
                h = run(h, positions, model.table)
        h = model.norm(h)
        if self.options.chunked_loss:
            return [model.head(chunk) for chunk in h.tensor_split(CHUNKS, dim=1)]
        return [model.head(h).float()]

    def losses(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        """Returns the mean loss."""
        targets = labels.tensor_split(len(logits), dim=1)
        total: Tensor = torch.zeros((), device=labels.device)
        for chunk, target in zip(logits, targets, strict=True):
            total = total + self.loss(chunk.reshape(-1, chunk.shape[-1]), target.reshape(-1))
        return total / labels.numel()

    def capture(self, machine: Machine, name: str) -> Program:
        """Returns the step's program with the operators and kernel times of a machine."""
        early = self.options.early_update
        return capture_step(
            self.step,
            *self.batch,
            machine=machine,
            name=name,
            as_cuda=True,
            optimizer_in_backward=early,
            bucket_bytes=1 if early else None,  # a kernel per weight, or one for all
        ).program


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the cross-entropy of ``[n, vocabulary]`` in float32."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass(frozen=True)
class StatesOf8Bits:
    """AdamW with states of 8 bits, by sizes.

    Attributes:
        traffic: Bytes that an update reads and writes per weight.
        temporary: Bytes of temporary tensors per weight.
        is_paged: Whether the states are in managed memory, which PyTorch does not count.
    """

    traffic: int
    temporary: int
    is_paged: bool

    def applied(self, program: Program, machine: Machine) -> Program:
        """Returns a program of 16-bit AdamW, one kernel per weight, with these states and updates."""
        tensors = list(program.tensors)
        kernels = list(program.kernels)
        for k, kernel in enumerate(kernels):
            states = [t for t in kernel.outputs if tensors[t].kind == "optimizer_state"]
            count = max((program.tensors[t].nbytes // 2 for t in states), default=0)
            if kernel.phase != "optimizer" or count < QUANTIZED:
                continue
            for t in states:
                if tensors[t].nbytes == 2 * count:
                    nbytes = 0 if self.is_paged else count + 4 * count // STATES
                    tensors[t] = replace(tensors[t], nbytes=nbytes)
            kernels[k] = self._update(kernel, count, machine)
        return replace(program, tensors=tuple(tensors), kernels=tuple(kernels))

    def paging_s(self, program: Program, machine: Machine) -> float:
        """Returns the seconds in which all states of a program of 16-bit AdamW are copied in and out, one by one."""
        states = (t.nbytes // 2 for t in program.tensors if t.kind == "optimizer_state")
        nbytes = sum(count + 4 * count // STATES for count in states)
        return nbytes / machine.h2d_bytes_per_s + nbytes / machine.d2h_bytes_per_s

    def _update(self, kernel: Kernel, count: int, machine: Machine) -> Kernel:
        nbytes = self.traffic * count
        duration_ns = machine.kernel_ns("optimizer", 0, nbytes, "float32")
        return replace(kernel, bytes=nbytes, duration_ns=duration_ns, workspace=self.temporary * count)


# torchao compiles its update. Inductor makes four kernels of it; two float32 tensors are between them.
TORCHAO = StatesOf8Bits(traffic=32, temporary=8, is_paged=False)
# bitsandbytes' PagedAdamW8bit: one kernel, which reads and writes a weight and its two states and reads its gradient.
PAGED = StatesOf8Bits(traffic=10, temporary=0, is_paged=True)


def offloaded(program: Program, sizes: Sizes) -> Plan:
    """Returns torchtune's activation offloading: inputs of checkpointed layers go to the host, except the last layer's.

    A layer's input is fetched when the backward pass of the layer after it begins, as the host, which runs ahead of the
    GPU, issues that copy early.
    """
    nbytes = 2 * sizes.batch_size * sizes.length * sizes.width
    gaps = []
    for t, tensor in enumerate(program.tensors):
        uses = program.accesses[t]
        for after, before in zip(uses, uses[1:], strict=False):
            phases = program.kernels[after].phase, program.kernels[before].phase
            if tensor.nbytes == nbytes and not tensor.persistent and phases == ("forward", "backward"):
                gaps.append((after, before, t))
    inputs = sorted(gaps)[: sizes.layers]
    later = zip(inputs, inputs[1:], strict=False)
    return Plan(tuple(Swap(t, after, before, prefetch=start) for (after, before, t), (_, start, _) in later))
