"""An HTTP server that answers every call at once with the same tokens, as vLLM's completions and chat APIs do.

It runs in a process of its own, and reads no more of a request than it must, so that what is measured in front of it is
not its own work. Its argument is JSON: the sampled ``ids``, their ``texts``, and the ``logprob`` of the model, which is
uniform. It writes its port, and serves until its input ends.
"""

import asyncio
import json
import sys
from typing import Any

CONTEXT = 32_768
MODEL = "null"


class Answers:
    """What the server says, made once as far as it is always the same."""

    def __init__(self, ids: list[int], texts: list[str], logprob: float):
        self._logprob = logprob
        sampled = [logprob - 0.0123456789 * place for place in range(len(ids))]
        names = [f"token_id:{token}" for token in ids]
        usage = {"prompt_tokens": 100, "completion_tokens": len(ids), "total_tokens": 100 + len(ids)}
        head = {"id": "cmpl-0", "created": 1, "model": MODEL, "usage": usage}
        logprobs = {
            "token_logprobs": sampled,
            "tokens": names,
            "top_logprobs": [None] * len(ids),
            "text_offset": [0] * len(ids),
        }
        choice = {"index": 0, "text": "".join(texts), "logprobs": logprobs, "finish_reason": "length", "token_ids": ids}
        whole = json.dumps(head | {"object": "text_completion", "choices": [choice | {"prompt_token_ids": 0}]})
        self._before, self._after = (part.encode() for part in whole.split('"prompt_token_ids": 0'))
        content = [
            {"token": text, "logprob": one, "bytes": list(text.encode()), "top_logprobs": []}
            for text, one in zip(texts, sampled, strict=True)
        ]
        said = {"role": "assistant", "content": "".join(texts)}
        choice = {
            "index": 0,
            "message": said,
            "logprobs": {"content": content},
            "finish_reason": "length",
            "token_ids": ids,
        }
        chat = head | {"object": "chat.completion", "choices": [choice], "prompt_token_ids": list(range(100))}
        self._chat = json.dumps(chat).encode()

    def answer(self, path: str, body: bytes) -> bytes | None:
        """The body of the answer; None: there is no such address."""
        if path == "/v1/chat/completions":
            return self._chat
        if path == "/v1/completions":
            if b'"prompt_logprobs"' in body or b'"allowed_token_ids"' in body:
                return json.dumps(self._probed(json.loads(body))).encode()
            prompt = body[body.index(b"[") : body.index(b"]") + 1]  # the first list of the request
            return b'%b"prompt_token_ids":%b%b' % (self._before, prompt, self._after)
        told: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": MODEL, "parent": None, "max_model_len": CONTEXT}]},
            "/metrics": "",
        }
        return json.dumps(told[path]).encode() if path in told else None

    def _probed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The proof of a policy that is uniform."""
        if "prompt_logprobs" in body:
            told = [None, *[{str(token): {"logprob": self._logprob}} for token in body["prompt"][1:]]]
            return {"choices": [{"prompt_logprobs": told, "token_ids": [0]}]}
        ids = body["allowed_token_ids"]
        logprobs = {"token_logprobs": [self._logprob], "tokens": [f"token_id:{ids[0]}"]}
        choice = {"prompt_token_ids": body["prompt"], "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
        return {"choices": [choice]}


class Connection(asyncio.Protocol):
    """Reads requests one after another, each with a length, as clients write them."""

    def __init__(self, answers: Answers):
        self._answers = answers
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:end].lower()
            place = head.find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._read) < end + 4 + length:
                return
            body, path = self._read[end + 4 : end + 4 + length], head.split(b" ", 2)[1].decode()
            self._read = self._read[end + 4 + length :]
            told = self._answers.answer(path, body)
            status, told = (b"200 OK", told) if told is not None else (b"404 Not Found", b"{}")
            self._transport.write(
                b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (status, len(told), told)
            )


async def main() -> None:
    """Serves."""
    answers, loop = Answers(**json.loads(sys.argv[1])), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", 0, backlog=4096)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
