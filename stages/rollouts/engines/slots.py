"""Keys and values of the sequences being sampled, one slot a sequence, and the attention over them.

Every sequence starts at place 0 of its slot, so rows of any length share a batch without padding and
leave it without moving the others. A forward pass either *prefills* new slots or *decodes* one token
for each of the first slots; the pass that runs is announced through ``SlotCache``.
"""

import threading
from typing import Any

import torch
from transformers import AttentionInterface, Cache

from schemas.errors import InputError

ATTENTION = "rollmill_slots"
_REFUSED = ("softcap", "s_aux", "position_bias")

_pass = threading.local()


class SlotCache(Cache):
    """The store of keys and values, as a transformers cache."""

    def __init__(self, n_slots: int):
        super().__init__(layers=[])
        self._n_slots = n_slots
        self._capacity = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows: torch.Tensor | None = None
        self._first = 0
        self._positions: torch.Tensor | None = None
        self._length = 0

    def start_prefill(self, rows: torch.Tensor, first_slot: int, length: int) -> None:
        """The next pass computes whole prompts from place 0.

        Args:
            rows: for each new slot, the row of the batch that holds its prompt (several slots may share one).
            first_slot: the new slots are this one and those after it.
            length: of the batch, the shorter prompts being padded on the right.
        """
        self._rows, self._first, self._positions, self._length = rows, first_slot, None, length
        self._grow(length)
        _pass.mask = None
        _pass.masks = {}

    def start_decode(self, positions: torch.Tensor, longest: int) -> None:
        """The next pass computes one token for each of the first slots.

        Args:
            positions: the place of that token in each slot.
            longest: the largest of them, plus one.
        """
        self._rows, self._positions, self._length = None, positions, longest
        self._grow(longest)
        _pass.mask = positions
        _pass.masks = {}

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first places of one slot over those of another."""
        for buffer in (*self._keys, *self._values):
            buffer[target, :, :length] = buffer[source, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx >= len(self._keys):
            self._keys.append(self._buffer(key_states))
            self._values.append(self._buffer(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._rows is not None:
            slots = slice(self._first, self._first + len(self._rows))
            keys[slots, :, : self._length] = key_states[self._rows]
            values[slots, :, : self._length] = value_states[self._rows]
            return key_states, value_states
        assert self._positions is not None
        n = len(self._positions)
        slots_n = torch.arange(n, device=keys.device)
        keys[slots_n, :, self._positions] = key_states[:, :, 0]
        values[slots_n, :, self._positions] = value_states[:, :, 0]
        return keys[:n, :, : self._length], values[:n, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._positions is None else self._length - 1

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because a value that attention weighs with 0 must still be a number.
        return like.new_zeros((self._n_slots, like.shape[1], self._capacity, like.shape[3]))

    def _grow(self, length: int) -> None:
        if length <= self._capacity:
            return
        old = self._capacity
        self._capacity = max(length, 2 * old, 64)
        for buffers in (self._keys, self._values):
            for n, buffer in enumerate(buffers):
                buffers[n] = self._buffer(buffer)
                buffers[n][:, :, :old] = buffer


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the pass that was announced; registered with transformers under ``ATTENTION``."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise InputError(f"the transformers engine cannot serve a model whose attention uses {name}")
    batch, heads, n_queries, size = query.shape
    mask = _mask(key.shape[2], sliding_window, query.device)
    if _pass.mask is not None:
        query = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
    found = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None and n_queries > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.reshape(batch, heads, n_queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def _mask(n_keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys each query may see; None: all before it (a prefill without a window that matters)."""
    positions: torch.Tensor | None = _pass.mask
    if positions is None and (window is None or n_keys <= window):
        return None
    if window not in _pass.masks:
        places = torch.arange(n_keys, device=device)
        queries = (places[None] if positions is None else positions[:, None])[:, None, :, None]
        seen = places <= queries
        _pass.masks[window] = seen if window is None else seen & (places > queries - window)
    found: torch.Tensor = _pass.masks[window]
    return found


AttentionInterface.register(ATTENTION, attend)
