"""``rollmill policy``: models in and out of the store."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import Overrides, StoreOption, opened


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    policy = typer.Typer(
        help="Import a model as a policy artifact, or export one as a model folder.", no_args_is_help=True
    )
    policy.command("import")(import_)
    policy.command("export")(export)
    app.add_typer(policy, name="policy", rich_help_panel="Work")


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A model folder (here or s3://…), a GGUF file, or hf://org/name@COMMIT."),
    ],
    overrides: Overrides = None,
    store: StoreOption = None,
) -> None:
    """Turn a model into a policy artifact: safetensors, tokenizer, chat template, and a probe.

    Example: rollmill policy import ./my-model dtype=float32
    """
    from flows.cli.stage import stage

    stage("policy_import", [*(overrides or []), f"execution.location={source}"], None, 0, 0, False, store)


def export(
    ref: Annotated[str, typer.Argument(metavar="REF", help="policy/KEY, RUN:policy or RUN@ITERATION:policy.")],
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, as PEFT and vLLM read it, without its base.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Copy a policy's checkpoint into a folder that transformers and vLLM load; an adapter is merged with its base."""
    import shutil

    from schemas.errors import InputError
    from stages.artifacts.adapters import ADAPTER, base_of

    shelf = opened(store, writable=False)
    manifest = shelf.resolve(ref, kind="policy")
    if folder.exists():
        raise InputError(f"{folder} exists already", hint="name a folder that does not, nothing is overwritten")
    base = base_of(manifest)
    if adapter and base is None:
        raise InputError(f"{manifest.ref} has its own weights: it is no adapter", hint="leave --adapter out")
    if base is not None and not adapter:
        from stages.policy.lora import merge

        merge(shelf.folder(shelf.manifest(base), "checkpoint"), shelf.folder(manifest, ADAPTER), folder)
    else:
        part = ADAPTER if adapter else "checkpoint"
        shutil.copytree(shelf.folder(manifest, part), folder, copy_function=shutil.copyfile)
    print(f"{manifest.ref} is in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
