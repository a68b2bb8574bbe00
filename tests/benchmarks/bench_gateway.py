"""The gateway against ``rllm-model-gateway`` and against no gateway at all, and what many turns and many sessions cost.

Both gateways stand in front of the same server, which answers 64 tokens with ids and logprobs at once, and get the same
conversations from the same clients. Both have written a call down before they answer it, so that a killed gateway loses
the calls in flight only; the files lie in memory where that can be had, as theirs waits for the disk and ours does not.
"""

import json
import math
import os
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks import load
from tests.benchmarks.bench_vllm import SMALL_MODEL
from tests.benchmarks.bookkeeping import us_per_turn
from tests.benchmarks.gateways import Process, our_gateway, their_gateway, upstream
from tests.stages.rollouts.policies import make_policy, make_tokenizer

VOCABULARY, CONTEXT, SAMPLED = 304, 32_768, 64
LOGPROB = -math.log(VOCABULARY)
AT_ONCE, TURNS, ALONE = 256, 4, 100
CALLS, THEIR_CALLS = 16_384, 2_048
OPEN = 10_000
VLLM_CALLS, VLLM_AT_ONCE, VLLM_TOKENS = 128, 64, 32
SYSTEM = "You are a careful assistant. You answer in one sentence, and you say so where you do not know something."
QUESTION = "What is {n} + {n} * {n}, and how would you explain that to somebody who has never added numbers?"
SAID = "the answer is 19, then 12. "


def measure() -> list[dict[str, Any]]:
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as name:
        folder = Path(name)
        tokenizer = make_tokenizer(folder / "policy")
        config = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": 2}
        (folder / "policy/config.json").write_text(json.dumps(config), encoding="utf-8")
        ids = tokenizer.encode(SAID * SAMPLED)[:SAMPLED]
        texts = [str(tokenizer.decode([token])) for token in ids]
        with upstream(ids, texts, LOGPROB) as port:
            rows = [*_calls(folder, port, "".join(texts)), _memory(folder, port, "".join(texts))]
            rows.append(_with_vllm(folder))
        return [*rows, _turns(folder / "policy", [*ids[:-1], tokenizer.eos_token_id])]


def _calls(folder: Path, upstream_port: int, answer: str) -> list[dict[str, Any]]:
    talk, expected = _conversation(answer), json.dumps(answer)[:-1].encode()

    def plain(path: str) -> list[bytes]:
        return [load.request(path, {"model": "null", "messages": messages}) for messages in talk]

    direct = plain("/v1/chat/completions")
    load.measured(upstream_port, [direct] * AT_ONCE, AT_ONCE, expected)
    alone = load.measured(upstream_port, [direct] * ALONE, 1, expected)
    most = load.measured(upstream_port, [direct] * (CALLS // TURNS), AT_ONCE, expected)
    with _ours(folder, upstream_port, AT_ONCE + ALONE + CALLS // TURNS) as one:
        port, asked = _port(one), [_asked(one, session, talk) for session in one.told["sessions"]]
        load.measured(port, asked[:AT_ONCE], AT_ONCE, expected)
        our_alone = load.measured(port, asked[AT_ONCE : AT_ONCE + ALONE], 1, expected)
        ours = load.measured(port, asked[AT_ONCE + ALONE :], AT_ONCE, expected)
        _require(one.ended()["calls"], TURNS * len(asked))
    with their_gateway(folder, upstream_port) as theirs_:
        theirs_asked = [
            plain(f"/sessions/s{n}/v1/chat/completions") for n in range(AT_ONCE + ALONE + THEIR_CALLS // TURNS)
        ]
        load.measured(theirs_.port, theirs_asked[:AT_ONCE], AT_ONCE, expected)
        their_alone = load.measured(theirs_.port, theirs_asked[AT_ONCE : AT_ONCE + ALONE], 1, expected)
        theirs = load.measured(theirs_.port, theirs_asked[AT_ONCE + ALONE :], AT_ONCE, expected)
        _require(theirs_.n_stored(), TURNS * len(theirs_asked))
    ratio = ours.rate / theirs.rate
    added, their_added = (_median_ms(one) - _median_ms(alone) for one in (our_alone, their_alone))
    return [
        {
            "name": f"gateway / rllm-model-gateway, calls of {AT_ONCE} sessions at once",
            "measured": f"{ratio:.1f} ({ours.rate:,.0f} and {theirs.rate:,.0f} calls/s; without {most.rate:,.0f})",
            "budget": ">= 8",
            "ok": ratio >= 8,
        },
        {
            "name": "what the gateway adds to a call of one session alone, median",
            "measured": f"{added:.2f} ms (rllm-model-gateway: {their_added:.2f} ms)",
            "budget": "< 3 ms",
            "ok": added < 3,
        },
    ]


def _memory(folder: Path, upstream_port: int, answer: str) -> dict[str, Any]:
    """Each session that is open has had a call answered."""
    talk, expected = _conversation(answer)[:1], json.dumps(answer)[:-1].encode()
    with _ours(folder, upstream_port, OPEN) as one:
        asked = [_asked(one, session, talk) for session in one.told["sessions"]]
        load.measured(_port(one), asked, AT_ONCE, expected)
        mib = one.resident_mib()
        _require(one.ended()["calls"], OPEN)
    return {
        "name": f"memory of the gateway's process, {OPEN:,} sessions open",
        "measured": f"{mib:,.0f} MiB",
        "budget": "< 1,024 MiB",
        "ok": mib < 1024,
    }


def _with_vllm(folder: Path) -> dict[str, Any]:
    """Through the gateway and without it, in turns, with what training needs asked for on both sides."""
    shape: dict[str, Any] = {**SMALL_MODEL, "max_position_embeddings": 1024}
    policy = make_policy(folder / "small", **shape)
    vllm = {"workers": 1, "log_dir": str(folder / "logs"), "env": {"VLLM_CPU_KVCACHE_SPACE": "2"}}
    messages = _conversation("")[0]
    ours, direct = [], []
    with our_gateway(
        folder, policy=str(policy.folder), ids=[ids.tolist() for ids in policy.probe.ids],
        logprobs=[one.tolist() for one in policy.probe.logprobs], max_tokens=VLLM_TOKENS, sessions=3 * VLLM_CALLS,
        vllm=vllm,
    ) as one:  # fmt: skip
        asked = [_asked(one, session, [messages]) for session in one.told["sessions"]]
        port = int(one.told["worker"].rpartition(":")[2])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        wanted = {"logprobs": True, "return_token_ids": True, "max_tokens": VLLM_TOKENS}
        plain = [[load.request("/v1/chat/completions", {"model": model, "messages": messages, **wanted})]] * VLLM_CALLS
        for turn in range(3):
            mine = load.measured(_port(one), asked[turn * VLLM_CALLS :][:VLLM_CALLS], VLLM_AT_ONCE, b"")
            alone = load.measured(port, plain, VLLM_AT_ONCE, b"")
            ours.append(mine.n_tokens / mine.seconds)
            direct.append(alone.n_tokens / alone.seconds)
        _require(one.ended()["calls"], len(asked))
    ratio = max(ours) / max(direct)
    return {
        "name": "tokens/s through the gateway / of vLLM asked directly, 106M parameters",
        "measured": f"{ratio:.2f} ({max(ours):,.0f} and {max(direct):,.0f} tokens/s)",
        "budget": ">= 0.95",
        "ok": ratio >= 0.95,
    }


def _turns(policy: Path, ids: list[int]) -> dict[str, Any]:
    few, many = (us_per_turn(policy, ids, SYSTEM, QUESTION, n, 64) for n in (8, 128))
    return {
        "name": "bookkeeping of a turn, sessions of 128 turns / of 8",
        "measured": f"{many / few:.2f} ({many:.0f} and {few:.0f} us)",
        "budget": "<= 1.5",
        "ok": many <= 1.5 * few,
    }


def _ours(folder: Path, upstream_port: int, sessions: int) -> Any:
    return our_gateway(
        folder, policy=str(folder / "policy"), ids=[list(range(10, 30))], logprobs=[[LOGPROB] * 19],
        max_tokens=SAMPLED, sessions=sessions, vllm={"workers": [f"http://127.0.0.1:{upstream_port}"]},
    )  # fmt: skip


def _conversation(answer: str) -> list[list[dict[str, str]]]:
    """The messages of each of its calls."""
    messages, calls = [{"role": "system", "content": SYSTEM}], []
    for n in range(TURNS):
        messages = [*messages, {"role": "user", "content": QUESTION.format(n=n)}]
        calls.append(messages)
        messages = [*messages, {"role": "assistant", "content": answer}]
    return calls


def _asked(gateway: Process, session: dict[str, str], talk: list[list[dict[str, str]]]) -> list[bytes]:
    path = f"{urlsplit(session['url']).path}/chat/completions"
    return [load.request(path, {"model": gateway.told["model"], "messages": one}, session["key"]) for one in talk]


def _port(gateway: Process) -> int:
    return int(urlsplit(gateway.told["sessions"][0]["url"]).port or 0)


def _median_ms(measured: load.Load) -> float:
    return 1000 * statistics.median(measured.latencies_s)


def _require(recorded: int, made: int) -> None:
    if recorded != made:
        raise AssertionError(f"{recorded} calls are recorded of {made}")
