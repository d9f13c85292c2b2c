"""A decoder with a mixture of experts (Jiang et al., "Mixtral of Experts", 2024), from sizes.

Llama's block (llama.py) whose feed-forward layer is ``experts`` SwiGLU layers and a router: every token goes to the
``top`` experts with the largest logits, whose outputs are added with the softmax of those logits as weights (section
2.1). The defaults are Table 1's; the paper's 32 layers are 93 GB in bfloat16.

Which expert gets how many tokens depends on the data, and a program has one size for every tensor. So an expert has
room for a fixed number of tokens, as in GShard (Lepikhin et al., 2020, section 2.2) and the Switch Transformer (Fedus
et al., 2022, section 2.2): ``capacity`` times the ``top`` · tokens / ``experts`` of balanced routing, rounded up. With
1, the default, balanced routing fills every place. Tokens are dispatched by index, without a mask of tokens x experts x
places; a token that finds no place gets nothing from that expert, and what a place without a token computes is not
read. The paper gives no capacity (Mixtral drops nothing) and no auxiliary loss; there is none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from experiments.workloads import llama
from experiments.workloads.module import Parts, WorkloadError


class Experts(nn.Module):
    """A mixture of SwiGLU layers, ``[batch, length, width]`` to the same.

    Attributes:
        places: tokens that an expert has room for.
    """

    def __init__(self, width: int, hidden: int, experts: int, top: int, places: int) -> None:
        super().__init__()
        self.top, self.places = top, places
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(llama.SwiGLU(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens, count = x.flatten(0, 1), len(self.experts)
        logits, chosen = self.router(tokens).topk(self.top, dim=-1)  # [tokens, top]
        places, held = self.assign(chosen)
        weights = logits.softmax(-1, dtype=torch.float32).to(x.dtype) * held
        # One row more than there are places, for the tokens that find none.
        source = torch.zeros(count * self.places + 1, dtype=torch.int64, device=x.device)
        source.scatter_(0, places.flatten(), torch.arange(places.numel(), device=x.device) // self.top)
        inputs = tokens.index_select(0, source[:-1]).split(self.places)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, inputs, strict=True)])
        found = outputs.index_select(0, places.clamp(max=count * self.places - 1).flatten())
        return (found.unflatten(0, (-1, self.top)) * weights[:, :, None]).sum(1).view_as(x)

    def assign(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Places for the experts ``[tokens, top]`` that tokens chose, first come first served.

        Returns:
            expert · ``places`` + the number in its queue, ``experts`` · ``places`` where it is full; whether there is
            a place.
        """
        count = len(self.experts)
        flat = chosen.flatten()
        mine = flat[:, None] == torch.arange(count, device=chosen.device)
        turn = mine.cumsum(0, dtype=torch.int32).gather(1, flat[:, None])[:, 0] - 1
        held = turn < self.places
        return torch.where(held, flat * self.places + turn, count * self.places).view_as(chosen), held.view_as(chosen)


def build(
    *, layers: int = 32, width: int = 4096, heads: int = 32, kv_heads: int = 8, hidden: int = 14336,
    experts: int = 8, top: int = 2, capacity: float = 1.0, vocabulary: int = 32000, length: int = 8192,
    batch_size: int = 1,
) -> Parts:  # fmt: skip
    """``batch_size`` sequences of ``length`` tokens.

    Raises:
        WorkloadError: heads that do not fit (``llama.checked``), more of the top than experts, or no capacity.
    """
    llama.checked(width, heads, kv_heads, None)
    if top > experts:
        raise WorkloadError(f"workload.top: expected at most the number of experts ({experts}), got {top}")
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or capacity <= 0:
        raise WorkloadError(f"workload.capacity: expected a number above 0, got {capacity!r}")
    places = math.ceil(capacity * top * batch_size * length / experts)
    model = llama.Llama(layers, width, heads, kv_heads, vocabulary, length,
                        lambda: Experts(width, hidden, experts, top, places), base=1e6)  # fmt: skip
    return llama.parts(model, batch_size, length)
