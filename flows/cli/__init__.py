"""The command line: ``rollmill``. Commands import what they need when they run, so that help is immediate."""

import gc
import sys

import typer

from flows.cli import agent, evaluate, gateway, look, model, policy, stage, store, train
from schemas.errors import RollmillError

app = typer.Typer(
    name="rollmill",
    help="Train language-model agents with reinforcement learning: a batch pipeline whose every stage leaves a "
    "versioned artifact that can be traced, replayed and re-scored.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (train, evaluate, stage, policy, model, agent, gateway, look, store):
    module.register(app)


def main() -> None:
    """Runs the command line; a ``RollmillError`` is printed as one message, without a traceback."""
    # Python's own thresholds look through all that Prefect and torch have imported again and again: up to 0.3 s each.
    gc.set_threshold(50_000, 20, 20)
    try:
        app()
    except RollmillError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of an interrupt
            print("interrupted; nothing finished is lost, the same command continues", file=sys.stderr)
        raise
