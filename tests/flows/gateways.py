"""``rollmill gateway`` as a process beside a test, and a small way to its own addresses."""

import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI

from schemas.artifacts import Manifest
from stages.artifacts.store import Store
from tests.flows.background import Background, background
from tests.flows.commands import command, rollmill

TOKEN = "the-token-of-the-tests"


class RunningGateway:
    """A gateway that serves."""

    def __init__(self, process: Background, url: str):
        self.process = process
        self.url = url

    @property
    def output(self) -> str:
        return self.process.output

    def ask(self, method: str, path: str, body: Any = None, key: str = TOKEN) -> tuple[int, Any]:
        """Status and JSON; a body of bytes is sent as it is."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def opened(self, **body: Any) -> dict[str, Any]:
        status, told = self.ask("POST", "/sessions", body)
        assert status == 200, told
        found: dict[str, Any] = told
        return found

    def client(self, session: str, key: str = TOKEN) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/sessions/{session}/v1", api_key=key, max_retries=0)


@contextmanager
def gateway(store: Store, policy: Manifest, folder: Path, *words: str) -> Iterator[RunningGateway]:
    """One over a store, whose captures lie in ``folder``; it serves when the block begins."""
    given = ["--policy", str(policy.ref), "--token", TOKEN, "--store", store.url, "--model", "tiny"]
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    with background(command("gateway", *words, *given), log, {}, folder) as process:
        process.wait_until(lambda: "Ctrl-C" in process.output)
        (url,) = re.findall(r"is served at (\S+)", process.output)
        yield RunningGateway(process, url)


def gateway_for_a_moment(store: Store, policy: Manifest, captures: Path, *words: str) -> str:
    """What one says that runs in this process, and is asked to end as soon as it serves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    is_over = threading.Event()

    def end() -> None:
        while not is_over.wait(0.05):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60).close()
                os.kill(os.getpid(), signal.SIGTERM)  # which it handles from before it serves
                return

    ending = threading.Thread(target=end)
    ending.start()
    given = ["--policy", str(policy.ref), "--token", TOKEN, "--store", store.url, "--captures", str(captures)]
    done = rollmill("gateway", *words, *given, "--port", str(port))
    is_over.set()
    ending.join()
    assert done.code == 0, done.text
    return done.out


def committed(store: Store, output: str) -> list[Manifest]:
    """The rollouts that a gateway says it has made."""
    return [store.resolve(ref) for ref in re.findall(r"captured episodes are (rollouts/\w+)", output)]


def says(client: OpenAI, messages: Any, **more: Any) -> Any:
    """The policy's next message, which is added to the list."""
    answer = client.chat.completions.create(model="tiny", messages=messages, **more)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return answer
