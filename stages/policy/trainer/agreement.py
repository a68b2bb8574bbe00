"""How far sampler and trainer agree on the sampled tokens, before anything was learnt; and the gate on it.

Both logprobs are of the same tokens under the same policy, so any difference is one of engines, number formats or
weights that were not the right ones.
"""

from schemas.errors import StageFailed
from stages.policy.settings import GateConfig

_LIMITS = {
    "max_kl": "sampler_trainer_kl",
    "max_difference": "sampler_trainer_logprob_diff_max",
    "max_off_share": "sampler_trainer_off_fraction",
}


def agreement(sums: dict[str, float]) -> dict[str, float]:
    """The measurements of the tokens whose sampling logprob is known; none where there is no such token.

    With ``d = trainer's logprob - sampler's`` of each sampled token, at the temperature that the stored logprobs have:
    ``sampler_trainer_kl`` is the mean of ``exp(d) - 1 - d`` and ``sampler_trainer_kl_k1`` that of ``-d``, both
    estimates of KL(sampler || trainer) (k3 and k1, http://joschu.net/blog/kl-approx.html);
    ``sampler_trainer_logprob_diff_max`` is the largest ``|d|``; ``sampler_trainer_off_fraction`` the share of tokens
    with ``|d| > logprob_tolerance``; ``sampler_trainer_tokens`` how many tokens were compared.

    Args:
        sums: of ``Sums``, over all processes.
    """
    known = sums["known"]
    if not known:
        return {}
    return {
        "sampler_trainer_tokens": known,
        "sampler_trainer_kl": sums["k3"] / known,
        "sampler_trainer_kl_k1": sums["k1"] / known,
        "sampler_trainer_logprob_diff_max": sums["largest"],
        "sampler_trainer_off_fraction": sums["off"] / known,
    }


def refuse_beyond(gate: GateConfig, measured: dict[str, float]) -> None:
    """Raises StageFailed, with the numbers, where a limit is passed or nothing could be compared."""
    if not measured:
        raise StageFailed(
            "the gate cannot be checked: the rollouts hold no logprobs; nothing was learnt or stored",
            hint="let the engine store logprobs, or leave update.gate out",
        )
    limits = {name: limit for name in _LIMITS if (limit := getattr(gate, name)) is not None}
    passed = [
        f"{_LIMITS[name]} is {measured[_LIMITS[name]]:.4g}, and {name} allows {limit:g}"
        for name, limit in limits.items()
        if not measured[_LIMITS[name]] <= limit
    ]
    if passed:
        others = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
        raise StageFailed(
            f"sampler and trainer do not agree: {'; '.join(passed)}. No step was taken and nothing was stored "
            f"(measured: {others})",
            hint="the rollouts stay on the shelf. Sample in the number format that the update computes in "
            "(rollouts.engine.dtype, update.dtype), look at the rollouts' engine, or raise the limit in update.gate",
        )
