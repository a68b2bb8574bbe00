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
    present = set(groups_S.tolist())
    steps: list[np.ndarray] = []
    for epoch in range(epochs):
        mixed = sorted(present, key=lambda group: blake2b(f"{epoch}:{group_ids[group]}".encode()).digest())
        parts = np.array_split(np.array(mixed), min(n, len(mixed)))
        steps += [np.flatnonzero(np.isin(groups_S, part)) for part in parts]
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
