"""Finds the artifact that a person names, and says in their terms why it cannot."""

import difflib
import re
from typing import TYPE_CHECKING

from schemas.artifacts import Manifest, Ref
from schemas.config import nearest
from schemas.errors import KindError, NotFoundError
from stages.artifacts.layout import artifact_folder, manifest_path

if TYPE_CHECKING:
    from stages.artifacts.store import Store

_FORMS = "name it as KIND/KEY (a beginning of the key will do), RUN:KIND, or RUN@ITERATION:KIND"
_OF_A_RUN = re.compile(r"(?P<run>[^:@/]+)(@(?P<iteration>\d+))?:(?P<name>[A-Za-z_]+)")
_OF_A_KEY = re.compile(r"(?P<kind>[A-Za-z_]+)/(?P<key>[0-9A-Za-z]+)")


def resolve(store: "Store", text: str, kind: str | None) -> Manifest:
    """The manifest behind ``text``; see ``Store.resolve``."""
    found = _resolve(store, text.strip())
    if kind is not None and found.kind != kind:
        raise KindError(f"{text} is an artifact of kind {found.kind}, but {kind} is needed here")
    return found


def artifact_in_run(store: "Store", run: str, iteration: int | None, name: str) -> Ref:
    """The artifact that an iteration of a run used or made.

    Args:
        iteration: None: the last one that has it.
        name: a stage's name, ``policy_in``, ``sampled_by``, or ``report`` (which belongs to the run's end).
    """
    records = store.iterations(run)
    if iteration is not None:
        chosen = [record for record in records if record.iteration == iteration]
        if not chosen:
            numbers = [str(record.iteration) for record in records]
            have = f"it has {', '.join(numbers)}" if numbers else "it has finished none"
            raise NotFoundError(f"the run {run!r} has no finished iteration {iteration}", hint=have)
        records = chosen
    for record in reversed(records):
        if name in record.artifacts:
            return record.artifacts[name]
    end = store.run_end(run)
    if iteration is None and name == "report" and end is not None and end.report is not None:
        return end.report
    if not records and end is None:
        raise NotFoundError(f"the run {run!r} has no finished iteration yet", hint="continue it with the same command")
    known = {known for record in records for known in record.artifacts}
    where = f"iteration {iteration} of the run {run!r}" if iteration is not None else f"the run {run!r}"
    raise NotFoundError(f"{where} has no {name!r}", hint=nearest(name, sorted(known)))


def _resolve(store: "Store", text: str) -> Manifest:
    marker = "/artifacts/"
    if marker in text:
        base, _, rest = text.rpartition(marker)
        from stages.artifacts.storage import open_storage

        if open_storage(base).url != store.url:
            raise NotFoundError(f"{text} lies in another store than {store.url}", hint=f"open that one: --store {base}")
        text = rest.rstrip("/").removesuffix("/manifest.json")
    elif text.startswith("artifacts/"):
        text = text.removeprefix("artifacts/").rstrip("/").removesuffix("/manifest.json")
    if match := _OF_A_KEY.fullmatch(text):
        return _by_key(store, match["kind"], match["key"].lower())
    if match := _OF_A_RUN.fullmatch(text):
        iteration = None if match["iteration"] is None else int(match["iteration"])
        return store.manifest(artifact_in_run(store, match["run"], iteration, match["name"]))
    raise NotFoundError(f"{text!r} is not a reference", hint=_FORMS)


def _by_key(store: "Store", kind: str, prefix: str) -> Manifest:
    if len(prefix) == 64 and (exact := store.find(kind, prefix)) is not None:
        return exact
    storage = store.storage
    keys = storage.names(f"artifacts/{kind}")
    matching = [key for key in keys if key.startswith(prefix)]
    finished = [key for key in matching if storage.exists(manifest_path(kind, key))]
    if len(finished) > 1:
        shown = ", ".join(f"{kind}/{key[:16]}" for key in finished[:8])
        raise NotFoundError(
            f"{kind}/{prefix} could be {len(finished)} artifacts: {shown}{', …' if len(finished) > 8 else ''}",
            hint="give more of the key",
        )
    if finished:
        return store.manifest(_ref(store, kind, finished[0]))
    if matching:
        raise NotFoundError(
            f"{kind}/{matching[0][:12]} was begun and is not finished: {artifact_folder(kind, matching[0])}",
            hint="run the command that makes it again: it continues where it stopped",
        )
    raise NotFoundError(f"the store {store.url} has no artifact {kind}/{prefix}", hint=_suggestion(store, kind, prefix))


def _ref(store: "Store", kind: str, key: str) -> Ref:
    found = store.find(kind, key)
    assert found is not None, "it was there a moment ago"
    return found.ref


def _suggestion(store: "Store", kind: str, prefix: str) -> str:
    kinds = store.storage.names("artifacts")
    if kind not in kinds:
        other = [k for k in kinds if any(key.startswith(prefix) for key in store.storage.names(f"artifacts/{k}"))]
        if other:
            return f"did you mean {other[0]}/{prefix}?"
        return nearest(kind, kinds) if kinds else "the store is empty"
    keys = store.storage.names(f"artifacts/{kind}")
    length = max(len(prefix), 12)
    close = difflib.get_close_matches(prefix, [key[: len(prefix)] for key in keys], n=3, cutoff=0.6)
    shown = [key[:length] for key in keys if key[: len(prefix)] in close] or [key[:length] for key in keys[:5]]
    return f"{'did you mean' if close else 'it has'} {', '.join(f'{kind}/{key}' for key in shown[:5])}" + (
        "?" if close else ""
    )
