"""``rollmill gateway``: the gateway alone, for programs that run elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.options import Overrides, StoreOption


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("gateway", rich_help_panel="Work")(gateway)


def gateway(
    overrides: Overrides = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="policy/KEY or RUN:policy of the store, a model folder (here or s3://…), a GGUF file, or hf://org/name@COMMIT.",
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="A vLLM server that runs already; repeat it for several."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="What samples: transformers, vllm or scripted.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where it listens. Another than the loopback lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any that is free.")] = 0,
    model: Annotated[
        str | None,
        typer.Option("--model", help="What clients call the policy. [dim]\\[default: of its key][/]"),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", envvar="ROLLMILL_GATEWAY_TOKEN", help="Opens all sessions. [dim]\\[default: a new one][/]"
        ),
    ] = None,
    captures: Annotated[Path, typer.Option(help="Folder for calls that are not committed yet.")] = Path("captures"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sessions that a killed gateway has left.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is sampled.")] = 0,
    store: StoreOption = None,
) -> None:
    """Serve a policy to programs that run elsewhere, and record what they do as rollouts.

    Settings are those of the rollouts stage: sampling.max_tokens=256, agent_samples=true, max_turns=8, engine.…,
    execution.….

    Example: rollmill gateway --policy demo:policy --url http://host:8000
    """
    import secrets

    from flows.engine_block import split_engine
    from flows.gateway import Asked, serve
    from flows.loading import with_overrides
    from schemas.config import validated
    from schemas.errors import ConfigError
    from stages.artifacts.store import open_store
    from stages.rollouts.capture.config import GatewayConfig
    from stages.rollouts.config import RolloutsExecution

    if policy is None:
        raise ConfigError("gateway needs a policy", hint="give --policy policy/KEY, RUN:policy, or a model folder")
    if token is not None and len(token) < 16:
        raise ConfigError("the token is shorter than 16 characters", hint="leave it out, and one is made")
    values: dict[str, Any] = {}
    if url:
        values["engine"] = {"type": "vllm", "workers": list(url)}
    elif engine is not None:
        values["engine"] = {"type": engine}
    values = with_overrides(values, overrides or [])
    settings, how = split_engine(values, values.pop("execution", None) or {})
    config = validated(GatewayConfig, settings, "gateway")
    execution = validated(RolloutsExecution, how, "execution")
    shelf = open_store(store)
    if host not in ("127.0.0.1", "localhost", "::1"):
        _tell(
            f"note: it listens at {host}: whoever reaches it and has the token or a session's key can use it, and what "
            "is said is not encrypted"
        )
    asked = Asked(
        policy=_policy(shelf, policy),
        config=config,
        execution=execution,
        seed=seed,
        host=host,
        port=port,
        token=token or secrets.token_urlsafe(24),
        model=model,
        captures=captures.absolute(),
        resume=resume,
    )
    serve(shelf, asked, _tell)


def _policy(store: Any, named: str) -> Any:
    """The policy of the store that is named, or one that is imported now."""
    from flows.call import stage_request
    from flows.cli.evaluate import start_of
    from stages.artifacts.commit import materialise

    start = start_of(named)
    if "ref" in start:
        return store.resolve(start["ref"], kind="policy")
    importing = {"location": start["source"]}
    return materialise(store, stage_request(store, "policy_import", inputs={}, config={}, execution=importing)).manifest


def _tell(text: str) -> None:
    print(text, flush=True)
