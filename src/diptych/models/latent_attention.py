"""Multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), in its absorbed form.

A token's keys and values, of all heads, are made of one vector, the latent. Only the latent and one rotated key part
are kept; the matrices that would expand it to keys and values are applied to the query and to the result instead, so
that attention is that of many query heads over one KV head whose values are the first elements of its keys.

T = tokens, H = query heads, N = nope_dim, P = rope_dim, V = value_dim, R = kv_rank.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from diptych.kernels.linear import Quantization
from diptych.layers.linear import MergedLinear, RowLinear
from diptych.layers.norm import RMSNorm
from diptych.layers.parameter import fill, new_parameter
from diptych.layers.rotary import Rotation, rotate, rotate_pairs
from diptych.layers.shard import Part, even_share
from diptych.layers.weights import WeightSource
from diptych.models.config import TransformerConfig
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE

BOTTLENECK_EPS = 1e-6
"""Of the norms of the two bottlenecks, whatever rms_norm_eps says."""


class LatentAttention(nn.Module):
    """Attention of one layer. The configuration has a `latent`.

    The matrices that expand the latent lie side by side in `expansion`, a head's for keys before its for values. On a
    CPU torch copies such views before it multiplies by them, at every step, so there is a copy of each kind.

    Args: group: ranks that share the query heads; the latent, and what is kept of it, is the same on all of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        group: GroupCoordinator = ALONE,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert config.latent is not None, "latent attention needs a configuration that has it"
        heads = even_share(config.num_heads, group, "attention heads")
        self.latent, self.num_heads = config.latent, len(heads)
        self.spec = AttentionSpec(layer=layer, scale=config.attention_scale, value_dim=self.latent.kv_rank)
        hidden, bias, query_rank = config.hidden_size, config.attention_bias, self.latent.query_rank
        queries = heads.times(self.latent.nope_dim + self.latent.rope_dim)
        queried = {} if query_rank is None else {"q_a_proj": query_rank}
        parts = {**queried, "kv_a_proj_with_mqa": self.latent.row_dim}
        self.compress = MergedLinear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.query_norm = RMSNorm(query_rank, BOTTLENECK_EPS, dtype=dtype, device=device) if query_rank else None
        name = "q_b_proj" if query_rank else "q_proj"
        self.query = MergedLinear(query_rank or hidden, {name: queries}, dtype=dtype, device=device)
        self.latent_norm = RMSNorm(self.latent.kv_rank, BOTTLENECK_EPS, dtype=dtype, device=device)
        self._expanded = heads.times(self.latent.nope_dim + self.latent.value_dim)
        self._apart: tuple[torch.Tensor, torch.Tensor] | None = None
        self.expansion = new_parameter((len(self._expanded), self.latent.kv_rank), dtype=dtype, device=device)
        values = heads.times(self.latent.value_dim)
        self.o_proj = RowLinear(values, hidden, group=group, bias=bias, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, inputs: AttentionInputs, attention: AttentionBackend
    ) -> torch.Tensor:
        sizes = self.latent
        compressed = self.compress(x)
        if self.query_norm is not None:
            query_latent, compressed = compressed.split((compressed.shape[1] - sizes.row_dim, sizes.row_dim), dim=1)
            x = self.query_norm(query_latent)
        query = self.query(x).unflatten(-1, (self.num_heads, -1))
        plain, rotated = query.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        latent, key = compressed.split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        row = torch.cat((self.latent_norm(latent), self._rotate(key.unsqueeze(1), rotation).squeeze(1)), dim=-1)
        expand_key, expand_value = self._expansions()
        absorbed = torch.bmm(plain.transpose(0, 1), expand_key).transpose(0, 1)
        query = torch.cat((absorbed, self._rotate(rotated, rotation)), dim=-1)
        keys = row.unsqueeze(1)
        attended = attention.forward(query, keys, keys[..., : sizes.kv_rank], inputs, self.spec)
        values = torch.bmm(attended.transpose(0, 1), expand_value.mT).transpose(0, 1)
        return self.o_proj(values.flatten(1))

    def _expansions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes keys [H, N, R] and values [H, V, R] of a latent."""
        if self._apart is not None:
            return self._apart
        by_head = self.expansion.unflatten(0, (self.num_heads, -1))
        return by_head[:, : self.latent.nope_dim], by_head[:, self.latent.nope_dim :]

    def pack(self, quantization: Quantization = "none") -> None:
        """Copy what expands keys and what expands values apart; they are never quantised."""
        if self.expansion.device.type == "cpu":
            self._apart = None
            keys, values = self._expansions()
            self._apart = (keys.contiguous(), values.contiguous())

    def _rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, H, P], rotated in float32 and rounded once."""
        turned = rotate_pairs if self.latent.is_interleaved else rotate
        return turned(heads.float(), rotation).to(heads.dtype)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the projections, under their published names, and the norms of the bottlenecks."""
        self.compress.load(source, prefix)
        if self.query_norm is not None:
            self.query_norm.load(source, f"{prefix}.q_a_layernorm")
        self.query.load(source, prefix)
        self.latent_norm.load(source, f"{prefix}.kv_a_layernorm")
        part = None if self._expanded.is_whole else Part(self._expanded)
        fill(self.expansion, source, f"{prefix}.kv_b_proj.weight", part=part)
        self.o_proj.load(source, f"{prefix}.o_proj")
        if self._apart is not None:
            self.pack()
