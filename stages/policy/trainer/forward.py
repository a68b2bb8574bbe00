"""The forward pass on packed rows: logprobs of the sampled tokens under the policy in training."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.policy.sequences import Sequences, ranges
from stages.policy.trainer.attention import Layout, layout_of


@dataclass(frozen=True)
class Row:
    """One packed row as tensors. ``N`` sampled tokens are predicted."""

    ids: torch.Tensor
    """shape ``(1, T)``."""
    positions: torch.Tensor
    """shape ``(1, T)``, from 0 in each sequence."""
    packing: Layout
    predicting_N: torch.Tensor
    """Place in the row from which each sampled token is predicted."""
    labels_N: torch.Tensor
    temperatures_N: torch.Tensor | None
    """None: 1 everywhere."""


def row_of(sequences: Sequences, device: torch.device) -> Row:
    """Sequences, each with at least one sampled token, laid end to end."""
    places = np.flatnonzero(sequences.sampled_T)
    temperatures = sequences.temperatures_T[places]
    return Row(
        ids=torch.from_numpy(sequences.ids_T.astype(np.int64)[None]).to(device),
        positions=torch.from_numpy(ranges(np.zeros_like(sequences.lengths_S), sequences.lengths_S)[None]).to(device),
        packing=layout_of(sequences.lengths_S, device),
        predicting_N=torch.from_numpy(places - 1).to(device),
        labels_N=torch.from_numpy(sequences.ids_T[places].astype(np.int64)).to(device),
        temperatures_N=None if (temperatures == 1).all() else torch.from_numpy(temperatures).to(device),
    )


def sampled_logits(model: Any, row: Row) -> torch.Tensor:
    """Logits that the sampled tokens were drawn from, over their temperature; shape ``(N, vocabulary)``, float32."""
    output = model(
        input_ids=row.ids,
        position_ids=row.positions,
        packing=row.packing,
        logits_to_keep=row.predicting_N,
        use_cache=False,
    )
    logits = output.logits[0].float()
    return logits if row.temperatures_N is None else logits / row.temperatures_N[:, None]


def logprobs_of(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Natural-log probability of each sampled token, shape ``(N,)``."""
    return -torch.nn.functional.cross_entropy(logits, row.labels_N, reduction="none")


def entropies_of(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each distribution in nats, shape ``(N,)``."""
    logs = torch.log_softmax(logits, dim=-1)
    return -(logs.exp() * logs).sum(-1)
