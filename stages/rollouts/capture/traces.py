"""A session's calls as rLLM's gateway tells them, each with all ids of its prompt."""

from typing import Any

from stages.rollouts.capture.log import CapturedCall, read_session
from stages.rollouts.capture.sessions import CapturedSession


def traces_of(session: CapturedSession, model: str) -> list[dict[str, Any]]:
    """In the order in which they ended."""
    captured = read_session(session.path)
    assert captured is not None, "its file was begun with it"
    return [_trace(session, call, number, model) for number, call in enumerate(captured.calls)]


def _trace(session: CapturedSession, call: CapturedCall, number: int, model: str) -> dict[str, Any]:
    generation = call.generation
    message: dict[str, Any] = {"role": "assistant", "content": call.content}
    if call.reasoning is not None:
        message["reasoning"] = call.reasoning
    if call.tool_calls:
        message["tool_calls"] = [one.as_message_part() for one in call.tool_calls]
    is_tools = call.tool_calls and generation.finish_reason == "stop"
    return {
        "trace_id": f"{session.head.episode_id}-{number}",
        "session_id": session.head.session,
        "model": model,
        "messages": call.messages,
        "prompt_token_ids": call.prompt_ids.tolist(),
        "response_message": message,
        "completion_token_ids": generation.response_ids.tolist(),
        "logprobs": generation.logprobs.tolist(),
        "finish_reason": "tool_calls" if is_tools else generation.finish_reason,
        "latency_ms": 1000 * generation.latency_s,
        "token_counts": {"prompt": len(call.prompt_ids), "completion": len(generation.response_ids)},
        "timestamp": generation.started_at.timestamp() + generation.latency_s,
        "metadata": {"trajectory": call.trajectory, "policy_id": generation.policy_id, "worker": generation.worker},
    }
