"""Options that several commands share, and the ways in which they open a store."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stages.artifacts.store import Store

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="ROLLMILL_STORE",
        metavar="URL",
        help="Where artifacts lie: a folder, s3://bucket/prefix, memory://…  [dim]\\[default: ./store][/]",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]…", help="Settings that replace those of the config, as dotted keys."),
]


def opened(url: str | None, *, writable: bool) -> "Store":
    """The store of a command that only looks (``writable=False``) or writes."""
    from stages.artifacts.store import open_store

    return open_store(url, writable=writable)


def store_flag(store: "Store") -> str:
    """What a command about this store needs: nothing where it is the default one."""
    from stages.artifacts.storage import open_storage
    from stages.artifacts.store import default_store

    return "" if store.url == open_storage(default_store()).url else f" --store {store.url}"
