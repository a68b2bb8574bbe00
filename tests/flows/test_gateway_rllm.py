"""rLLM's own gateway client, from its package, runs its flow against the gateway."""

import asyncio
import json
import signal

import pytest
from httpx import HTTPStatusError
from openai import OpenAI
from rllm_model_gateway import AsyncGatewayClient, GatewayClient

from tests.flows.gateways import TOKEN, committed, gateway, says
from tests.stages.rollouts.conversations import whole_sequences
from tests.stages.rollouts.policies import make_policy
from tests.stages.rollouts.stored import frame, stored_policy


def test_rllms_client_opens_sessions_and_gets_traces_whose_calls_become_rollouts(store, tmp_path):
    policy = stored_policy(store, make_policy(tmp_path / "policy"))
    with gateway(store, policy, tmp_path, "--engine", "scripted", "engine.n_tokens=6") as running:
        address = f"{running.url}/rllm/{TOKEN}"
        assert address in running.output
        with pytest.raises(HTTPStatusError, match="401"):
            GatewayClient(address + "-wrong").create_session()
        with GatewayClient(address) as client:
            session = client.create_session("task:0", metadata={"step": 3})
            messages = [{"role": "user", "content": "One?"}]
            agent = OpenAI(base_url=client.get_session_url(session), api_key="EMPTY", max_retries=0)
            for _ in range(2):
                answer = says(agent, messages)
                messages.append({"role": "user", "content": "And then?"})
            first, second = client.get_session_traces(session)
            assert second.response_message["content"] == answer.choices[0].message.content
            assert second.messages == messages[:-2]
            known = len(first.prompt_token_ids) + len(first.completion_token_ids)
            assert second.prompt_token_ids[:known] == first.prompt_token_ids + first.completion_token_ids
            assert second.logprobs is not None
            assert len(second.logprobs) == len(second.completion_token_ids) == second.token_counts["completion"]
            assert client.get_trace(second.trace_id) == second
            assert client.get_session_traces(session, since=second.timestamp) == [second]
            assert client.get_session_traces(session, limit=1) == [first]
            (listed,) = client.list_sessions()
            assert (listed["session_id"], listed["trace_count"], listed["metadata"]) == (session, 2, {"step": 3})
            assert client.get_session_info(session) == listed
            assert [worker.healthy for worker in client.list_workers()] == [True]
            assert client.health()["status"] == "ok"
            assert client.flush()
            with pytest.raises(HTTPStatusError, match="405"):
                client.add_worker("http://localhost:8000/v1")
            assert client.delete_session(session) == 2
            with pytest.raises(HTTPStatusError, match="404"):
                client.get_session_traces(session)

        async def again() -> list[object]:
            async with AsyncGatewayClient(address) as client:
                return list(await client.get_session_traces(await client.create_session("task:0")))

        assert asyncio.run(again()) == []
        assert running.process.ended_by(signal.SIGTERM) == 0
        (rollouts,) = committed(store, running.output)
    steps = frame(store, rollouts, "steps").sort("step_index")
    assert whole_sequences(steps) == [(one.prompt_token_ids, one.completion_token_ids) for one in (first, second)]
    (artifacts,) = frame(store, rollouts, "episodes")["artifacts"]
    assert json.loads(artifacts) == {"metadata": {"step": 3}}
