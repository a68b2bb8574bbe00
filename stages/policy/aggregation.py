"""How the tokens of one optimizer step become one number: a weight for each, over the *whole* step.

The loss of the step is the weighted sum. Since the weights are fixed before the step is cut into
micro-batches and ranks, no cut can change it; and a token that a limit takes out later leaves them alone.
"""

from typing import Literal

import numpy as np

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean"]


def token_weights(
    aggregation: Aggregation, trajectories_T: np.ndarray, groups_T: np.ndarray, constant: int | None = None
) -> np.ndarray:
    """Weight of each sampled token.

    Args:
        aggregation: ``token-mean``: every token counts alike (DAPO, arXiv:2503.14476, eq. 12).
            ``seq-mean-token-mean``: every trajectory counts alike, in it every token (GRPO, arXiv:2402.03300, eq. 3).
            ``seq-mean-token-sum``: mean over trajectories of the sum over their tokens.
            ``constant``: that sum over ``constant`` (Dr. GRPO, arXiv:2503.20783, section 3.2).
            ``prompt-mean``: every group counts alike, in it every token (arXiv:2510.13786).
        trajectories_T: number of each token's trajectory, shape ``(T,)``, integers.
        groups_T: number of each token's group, shape ``(T,)``, integers.
        constant: tokens that ``constant`` divides by, e.g. the largest response length.
    Returns:
        shape ``(T,)``, float64.
    """
    n_tokens = len(trajectories_T)
    if n_tokens == 0:
        return np.zeros(0)
    if aggregation == "token-mean":
        return np.full(n_tokens, 1 / n_tokens)
    if aggregation == "prompt-mean":
        return _mean_of_means(groups_T)
    if aggregation == "seq-mean-token-mean":
        return _mean_of_means(trajectories_T)
    n_trajectories = len(np.unique(trajectories_T))
    if aggregation == "seq-mean-token-sum":
        return np.full(n_tokens, 1 / n_trajectories)
    if constant is None:
        raise ValueError("the aggregation 'constant' needs the number that it divides by")
    return np.full(n_tokens, 1 / (n_trajectories * constant))


def _mean_of_means(units_T: np.ndarray) -> np.ndarray:
    _, unit_T, counts_U = np.unique(units_T, return_inverse=True, return_counts=True)
    return 1 / (len(counts_U) * counts_U[unit_T])
