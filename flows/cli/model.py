"""``rollmill model``: other people's models, stored under names for ``rollmill eval --model``."""

from typing import Annotated

import typer

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="What the model is stored as.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    group = typer.Typer(no_args_is_help=True, help="Models that others serve, for rollmill eval --model.")
    for command in (setup, test, remove):
        group.command(command.__name__)(command)
    group.command("list")(list_)
    app.add_typer(group, name="model", rich_help_panel="Work")


def setup(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="What to store the model as.")] = None,
    base_url: Annotated[str | None, typer.Option(metavar="URL", help="Of its API, such as https://host/v1.")] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Its name there.")] = None,
    key_env: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Environment variable that holds the key; the key is never stored."),
    ] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Calls in a minute at most.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Calls at once at most.")] = None,
    omit: Annotated[
        list[str] | None, typer.Option(metavar="SETTING", help="temperature, top_p, max_tokens or seed: is not sent.")
    ] = None,
    token_limit: Annotated[
        str | None, typer.Option(help="What it calls the limit of an answer: max_tokens, max_completion_tokens.")
    ] = None,
) -> None:
    """Store a model that others serve behind an OpenAI-compatible API. Asks for what is not given.

    Example: rollmill model setup big --base-url https://host/v1 --model big-1 --key-env BIG_API_KEY
    """
    import os

    from flows.models import models_file, new_model, store_model

    if name is None or base_url is None or model is None:
        name = name or typer.prompt("Name to store it as")
        base_url = base_url or typer.prompt("Base URL (such as https://host/v1)")
        model = model or typer.prompt("Name of the model there")
        if key_env is None:
            key_env = typer.prompt("Environment variable that holds the key (empty: none)", default="") or None
        if requests_per_minute is None:
            given = typer.prompt("Requests per minute at most (empty: no limit)", default="")
            requests_per_minute = given or None
    stored = new_model(
        {
            "base_url": base_url,
            "model": model,
            "key_env": key_env,
            "requests_per_minute": requests_per_minute,
            "max_concurrency": max_concurrency,
            "omit": omit or None,
            "token_limit": token_limit,
        }
    )
    store_model(name, stored)
    print(f"stored {name} in {models_file()}: {stored.model} at {stored.base_url}")
    if stored.key_env is not None and not os.environ.get(stored.key_env):
        print(f"note: {stored.key_env} is not set here; set it before the model is used")
    print(f"Try it: rollmill model test {name}")


def list_() -> None:
    """List the stored models."""
    import os

    from rich.console import Console
    from rich.table import Table

    from flows.display import cell
    from flows.models import stored_models

    models = stored_models()
    if not models:
        print("no models are stored yet; store one: rollmill model setup")
        return
    table = Table("name", "model", "base URL", "key", "requests a minute", "at once", box=None)
    for name, model in models.items():
        key = "none"
        if model.key_env is not None:
            key = f"{model.key_env}{'' if os.environ.get(model.key_env) else ' (not set)'}"
        limit = model.requests_per_minute
        asked = "no limit" if limit is None else f"{limit:g}"
        table.add_row(*map(cell, (name, model.model, model.base_url, key, asked)), str(model.max_concurrency))
    Console().print(table)


def test(name: NameArgument) -> None:
    """Ask a stored model one thing, and show what it answers."""
    import asyncio

    from flows.models import stored_model
    from stages.rollouts.endpoints.client import opened
    from stages.rollouts.endpoints.session import EndpointSession
    from stages.rollouts.engines.base import SamplingParams

    config, execution = stored_model(name).parts()
    with opened(config, execution) as endpoint:
        session = EndpointSession(
            "test",
            ask=lambda call_id, *call: endpoint.ask(*call),
            config=config,
            sampling=SamplingParams(),
            max_turns=None,
            seed=0,
            uid="test",
        )
        asyncio.run(session.chat([{"role": "user", "content": "Say hello in one word."}]))
    (step,) = session.steps()
    said = step.response or step.reasoning or ""
    tokens = "tokens not told" if step.response_tokens is None else f"{step.response_tokens} tokens"
    shown = said if len(said) <= 200 else f"{said[:200]}…"
    print(f"{config.model} at {config.base_url} answers in {step.generation.latency_s:.2f} s ({tokens}): {shown}")


def remove(name: NameArgument) -> None:
    """Forget a stored model."""
    from flows.models import remove_model

    remove_model(name)
    print(f"removed {name}")
