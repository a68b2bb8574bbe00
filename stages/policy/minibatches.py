"""Which sequences each optimizer step is computed on."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def by_group(group_ids: Sequence[str], groups_S: np.ndarray, n: int, epochs: int) -> list[np.ndarray]:
    """``n`` steps an epoch (fewer where there are fewer groups); a group's trajectories stay in one step.

    The division depends on the ids of the groups and the epoch, not on any order.

    Args:
        group_ids: id of each group.
        groups_S: number of each sequence's group.
    Returns:
        numbers of the sequences, by step.
    """
    sizes = np.bincount(groups_S, minlength=len(group_ids))
    steps = []
    for epoch in range(epochs):
        mixed = sorted(range(len(group_ids)), key=lambda g: blake2b(f"{epoch}:{group_ids[g]}".encode()).digest())
        order = np.array([group for group in mixed if sizes[group]], dtype=np.int64)
        middles = np.cumsum(sizes[order]) - sizes[order] / 2
        part_of_group = np.full(len(group_ids), -1)
        part_of_group[order] = np.minimum(n - 1, (middles / len(groups_S) * n).astype(np.int64))
        parts = part_of_group[groups_S]
        steps += [np.flatnonzero(parts == part) for part in np.unique(parts)]
    return steps


def by_tokens(lengths_S: np.ndarray, n_steps: int, tokens: int, seed: int) -> list[np.ndarray]:
    """``n_steps`` steps of about ``tokens`` tokens; all sequences are used once before any is used again.

    Args:
        lengths_S: tokens of each sequence.
        seed: of the order.
    Returns:
        numbers of the sequences, by step.
    """
    random = np.random.Generator(np.random.Philox(key=seed))
    stream = np.empty(0, dtype=np.int64)
    steps: list[np.ndarray] = []
    while len(steps) < n_steps:
        while lengths_S[stream].sum() < tokens:
            stream = np.append(stream, random.permutation(len(lengths_S)))
        count = int(np.searchsorted(np.cumsum(lengths_S[stream]), tokens)) + 1
        steps.append(stream[:count])
        stream = stream[count:]
    return steps
