"""A mixture of experts: a router, gated networks of which each token uses a few, and one that all tokens use.

Owns their weights. Rows are sorted by expert, so that an expert's tokens are one GEMM: packed kernels on a CPU, torch's
grouped GEMM on a GPU. A token's result does not depend on the tokens beside it where the GEMMs' do not: its experts'
outputs are summed in the order of its own choice. Whole experts are dealt to the ranks of the expert group, slices of
each to those of the slice group; every rank sees all tokens, and the ranks of the tensor group add up what they have.

T = tokens, K = experts a token chooses, E = experts, H = hidden size, I = an expert's inner size, N = T * K rows of a
token for an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from diptych.kernels.gguf_linear import GGUFLinear, StoredBlocks
from diptych.kernels.linear import Activation, LinearKernel, PackedLinear, Quantization, can_pack
from diptych.kernels.packed_rows import PackedRows
from diptych.layers.linear import Linear
from diptych.layers.mlp import GatedMLP
from diptych.layers.parameter import fill, new_parameter, stored_blocks, without_memory
from diptych.layers.routing import Routing
from diptych.layers.shard import Part, even_share
from diptych.layers.weights import Rows, WeightSource
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE, ONE_RANK, LayerGroups

Stored = tuple[StoredBlocks, ...] | None


class Choice(NamedTuple):
    """Each token's experts: ids, int64 [T, K], and weights, float32 [T, K]."""

    experts: torch.Tensor
    weights: torch.Tensor


class Router(nn.Module):
    """Which experts each token uses: [T, H] to a `Choice`."""

    def __init__(self, hidden_size: int, routing: Routing, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.routing = routing
        self.linear = Linear(
            hidden_size, routing.num_experts, dtype=torch.float32 if routing.is_float32 else dtype, device=device
        )
        self.bias = (
            new_parameter((routing.num_experts,), dtype=torch.float32, device=device) if routing.has_bias else None
        )

    def forward(self, x: torch.Tensor) -> Choice:
        routing = self.routing
        logits = self.linear(x.float() if routing.is_float32 else x).float()
        scores = torch.softmax(logits, dim=-1) if routing.scoring == "softmax" else torch.sigmoid(logits)
        preference = scores if self.bias is None else scores + self.bias
        if routing.num_groups > 1:
            preference = self._of_best_groups(preference)
        experts = preference.topk(routing.num_chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        if routing.renormalizes:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if routing.scaling != 1.0:
            weights = weights * routing.scaling
        return Choice(experts, weights.to(x.dtype).float() if routing.rounds_weights else weights)

    def _of_best_groups(self, preference: torch.Tensor) -> torch.Tensor:
        """The same [T, E], minus infinity for experts outside the token's best groups."""
        grouped = preference.unflatten(-1, (self.routing.num_groups, -1))
        best = grouped.topk(1 if self.routing.group_score == "best" else 2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(self.routing.num_groups_kept, dim=-1).indices, True)
        return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.weight` and, with a bias, `{prefix}.e_score_correction_bias`."""
        self.linear.load(source, prefix)
        if self.bias is not None:
            fill(self.bias, source, f"{prefix}.e_score_correction_bias")


class Experts(nn.Module):
    """Gated networks of one shape, `down(activation(gate(x)) * up(x))`, each applied to the tokens that chose it.

    Args: num_experts, sizes: in all; hidden and inner size. names: of gate, up and down in the checkpoint. groups: this
    rank has `held` experts, and a slice of their inner size.
    """

    def __init__(
        self,
        num_experts: int,
        sizes: tuple[int, int],
        *,
        activation: Activation,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        groups: LayerGroups = ONE_RANK,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.held = even_share(num_experts, groups.expert, "experts")
        self.hidden_size = sizes[0]
        self.inner = even_share(sizes[1], groups.expert_slice, "elements within an expert")
        self.activation: Activation = activation
        self.names = names
        inner_size = len(self.inner)
        self.gate_up = new_parameter((len(self.held), 2 * inner_size, self.hidden_size), dtype=dtype, device=device)
        self.down = new_parameter((len(self.held), self.hidden_size, inner_size), dtype=dtype, device=device)
        self.packed: list[tuple[LinearKernel, LinearKernel]] = []
        self.stored: list[tuple[Stored, Stored]] = []

    def forward(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """[T, H], the weighted sum of those of each token's experts that are held here, summed in float32."""
        num_chosen = choice.experts.shape[1]
        experts = choice.experts.flatten() - self.held.start
        if not self.held.is_whole:  # others come last
            experts = torch.where((experts >= 0) & (experts < len(self.held)), experts, len(self.held))
        order = experts.argsort(stable=True)
        # What bincount does, without asking a GPU for the largest number.
        counts = experts.new_zeros(len(self.held) + 1).scatter_add_(0, experts, torch.ones_like(experts))[:-1]
        rows = self._sorted_outputs(x.index_select(0, order // num_chosen), counts)
        outputs = rows.index_select(0, order.argsort())
        if not self.held.is_whole:
            outputs.masked_fill_((experts == len(self.held)).unsqueeze(1), 0.0)  # they may be anything, NaN included
        return weighted_sum(outputs.unflatten(0, (-1, num_chosen)), choice.weights).to(x.dtype)

    def _sorted_outputs(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Outputs [N, H] of rows [N, H], of which each expert has as many as `counts` says, int64 [experts held].

        Rows beyond them all have no outputs: what is there is undefined.
        """
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            return self._grouped(rows, counts)
        outputs = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                outputs[start : start + count] = self._expert(expert, rows[start : start + count])
            start += count
        return outputs

    def _grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The same without asking the device how many rows each expert has."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(self._activated(gate, up), self.down.mT, offs=ends)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            gate_up, down = self.packed[expert]
            return down(gate_up(x))
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        return F.linear(self._activated(gate, up), self.down[expert])

    def _activated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (F.gelu(gate, approximate="tanh") if self.activation == "gelu_tanh" else F.silu(gate)).mul_(up)

    def pack(self, quantization: Quantization = "none") -> None:
        """Reorder every expert's weights for the CPU kernels, if there are any."""
        if self.packed or not can_pack(self.gate_up):
            return

        def kernel(expert: int, part: int, gated: Activation | None) -> LinearKernel:
            if self.stored and (blocks := self.stored[expert][part]) is not None:
                return GGUFLinear(blocks, gated=gated)
            kept: Quantization = "int8" if quantization == "int8" else "none"
            return PackedLinear(self._matrices(part)[expert], gated=gated, quantization=kept)

        self.packed = [
            (kernel(expert, 0, self.activation), kernel(expert, 1, None)) for expert in range(len(self.held))
        ]
        self.stored = []
        self.gate_up, self.down = without_memory(self.gate_up), without_memory(self.down)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read this rank's part of the three matrices of each expert held, `{prefix}.{expert}.{name}.weight`, or note
        where the file's blocks are."""
        gate, up, down = self.names
        self.stored = []
        for expert in range(len(self.held)):
            name = f"{prefix}.{self.held.start + expert}"
            first = self._load_matrix(
                source, expert, 0, {f"{name}.{part}.weight": Part(self.inner) for part in (gate, up)}
            )
            second = self._load_matrix(source, expert, 1, {f"{name}.{down}.weight": Part(self.inner, dim=1)})
            self.stored.append((first, second))
        if all(first is not None for first, _ in self.stored):
            self.gate_up = without_memory(self.gate_up)
        if all(second is not None for _, second in self.stored):
            self.down = without_memory(self.down)

    def _load_matrix(self, source: WeightSource, expert: int, matrix: int, parts: dict[str, Part]) -> Stored:
        """Fill an expert's first (0) or second (1) matrix, unless its blocks are kept."""
        stored = stored_blocks(source, parts)
        size = len(self.inner) if matrix == 0 else self.hidden_size
        for index, (name, part) in enumerate(parts.items()):
            if stored is None:
                place = self._place(expert, matrix, index * size, (index + 1) * size)
                fill(place, source, name, part=None if part.share.is_whole else part)
        return stored

    def _place(self, expert: int, matrix: int, start: int, stop: int) -> Rows:
        """Rows of a matrix, wherever they are now."""
        if self.packed:
            return PackedRows(self.packed[expert][matrix], start, stop)
        return self._matrices(matrix)[expert, start:stop]

    def _matrices(self, matrix: int) -> torch.Tensor:
        """All experts' first (0) or second (1) matrices, before they are packed."""
        return (self.gate_up if matrix == 0 else self.down).data


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of outputs [T, K, H] times weights, float32 [T, K], over K: float32 [T, H], in the order of K."""
    total = outputs[:, 0] * weights[:, :1]
    for index in range(1, outputs.shape[1]):
        total.add_(outputs[:, index] * weights[:, index : index + 1])
    return total


class MoE(nn.Module):
    """A mixture of experts in place of a gated network: [T, H] to [T, H].

    Args: shared: a network that all tokens use besides, dealt to the ranks of `group`, as the experts are.
    has_shared_gate: its output is scaled by a sigmoid of the input
    (Qwen2-MoE). shared_name: of it in the checkpoint.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: GatedMLP | None = None,
        shared_name: str = "shared_experts",
        has_shared_gate: bool = False,
        group: GroupCoordinator = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.group = group
        self.router, self.experts, self.shared, self.shared_name = router, experts, shared, shared_name
        self.shared_gate = Linear(experts.hidden_size, 1, dtype=dtype, device=device) if has_shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.experts(x, self.router(x))
        if self.shared is None:
            return self.group.all_reduce(total)
        shared = self.shared.partial(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return self.shared.down.joined(total.add_(shared))

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `{prefix}.gate`, `.experts`, and what is shared."""
        self.router.load(source, f"{prefix}.gate")
        self.experts.load(source, f"{prefix}.experts")
        if self.shared is not None:
            self.shared.load(source, f"{prefix}.{self.shared_name}")
        if self.shared_gate is not None:
            self.shared_gate.load(source, f"{prefix}.shared_expert_gate")
