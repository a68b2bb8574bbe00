"""Attention over packed rows: each sequence attends to itself alone, without a mask of tokens by tokens.

The packed tokens are laid out with one padded row a sequence, so that plain causal attention is exact;
everything else in the model works on the packed row and wastes nothing on padding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from stages.policy.packing import padded_layout

NAME = "rollmill_packed"


@dataclass(frozen=True)
class Layout:
    """Where packed tokens lie in the padded block; made by ``layout_of``."""

    rows: torch.Tensor
    """Packed place of each cell, shape ``(S * longest,)``."""
    flat: torch.Tensor
    """Cell of each packed token, shape ``(T,)``."""
    n_sequences: int
    longest: int


def layout_of(lengths_S: np.ndarray, device: torch.device) -> Layout:
    """The layout of a packed row with sequences of these lengths."""
    rows, flat = padded_layout(lengths_S)
    return Layout(
        torch.from_numpy(rows.ravel()).to(device), torch.from_numpy(flat).to(device), len(lengths_S), rows.shape[1]
    )


def register() -> None:
    """Makes the attention known to transformers under ``NAME``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers calls.

    Args:
        query: shape ``(1, heads, T, head_dim)``; key and value with as many heads or a divisor of them.
        packing: the row's layout.
        sliding_window: tokens that a token sees, itself included; None: all before it.
    Returns:
        shape ``(1, T, heads, head_dim)``, and no weights.
    """
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"packed attention knows no {', '.join(unsupported) or 'attention to later tokens'}")
    groups = query.shape[1] // key.shape[1]
    q, k, v = (_padded(states, packing) for states in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = None
    if sliding_window is not None and sliding_window < packing.longest:
        places = torch.arange(packing.longest, device=query.device)
        behind = places[:, None] - places[None, :]
        mask = (behind >= 0) & (behind < sliding_window)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, packing.flat).unsqueeze(0), None


def _padded(states: torch.Tensor, packing: Layout) -> torch.Tensor:
    """``(1, heads, T, head_dim)`` as ``(S, heads, longest, head_dim)``."""
    cells = states[0].transpose(0, 1).index_select(0, packing.rows)
    return cells.view(packing.n_sequences, packing.longest, *cells.shape[1:]).transpose(1, 2)
