"""Cuts sequences into micro-batches, each one row of sequences laid end to end.

Sequences of like length lie together, so that attention, which pads them to the longest, wastes little.
"""

import numpy as np


def pack(lengths_S: np.ndarray, max_tokens: int, n_ranks: int = 1) -> list[list[np.ndarray]]:
    """Micro-batches of each rank; all ranks have the same number of them, the last ones possibly empty.

    Args:
        lengths_S: tokens of each sequence, shape ``(S,)``.
        max_tokens: most tokens of a micro-batch; a longer sequence has one of its own.
        n_ranks: processes that share the work.
    Returns:
        by rank, then micro-batch: numbers of the sequences in it. Every sequence is in exactly one.
    """
    share = -(-int(lengths_S.sum()) // n_ranks)
    budget = max(1, min(max_tokens, share))
    order_S = np.argsort(-lengths_S, kind="stable")
    micro_batches: list[list[int]] = []
    room = 0
    for sequence in order_S.tolist():
        length = int(lengths_S[sequence])
        if not micro_batches or length > room:
            micro_batches.append([])
            room = budget
        micro_batches[-1].append(sequence)
        room -= length
    while len(micro_batches) % n_ranks:
        micro_batches.append([])
    return [[np.array(batch, dtype=np.int64) for batch in micro_batches[rank::n_ranks]] for rank in range(n_ranks)]


def padded_layout(lengths_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the tokens of a packed row lie in a block with one padded row a sequence.

    Args:
        lengths_S: tokens of each sequence in the row, shape ``(S,)``, each at least 1.
    Returns:
        ``rows``: shape ``(S, longest)``, the packed place of each cell (0 where the cell is padding).
        ``flat``: shape ``(T,)``, the cell of each packed token, counted row by row.
    """
    longest = int(lengths_S.max())
    starts_S = np.cumsum(lengths_S) - lengths_S
    columns = np.arange(longest)
    filled = columns[None, :] < lengths_S[:, None]
    rows = np.where(filled, starts_S[:, None] + columns[None, :], 0)
    return rows, np.flatnonzero(filled.ravel())
