"""Which tasks a batch holds: a stream in which every epoch is a new, stable shuffle of all tasks."""

import hashlib
from collections.abc import Sequence

from schemas.errors import InputError
from stages.rollouts.config import Batch


def selected(task_ids: Sequence[str], batch: Batch | None, seed: int) -> list[str]:
    """The ids of the batch's tasks, sorted; the same whatever the order in which the ids are given.

    Raises:
        InputError: there are fewer tasks than a batch holds.
    """
    if batch is None:
        return sorted(task_ids)
    per_epoch = len(task_ids) // batch.size
    if not per_epoch:
        raise InputError(
            f"a batch of {batch.size} tasks is asked for, and there are {len(task_ids)}",
            hint="lower rollouts.batch.size, or take more tasks",
        )
    epoch, place = divmod(batch.index, per_epoch)
    salt = f"{seed}/{epoch}".encode()
    shuffled = sorted(task_ids, key=lambda task_id: hashlib.blake2b(task_id.encode(), key=_key(salt)).digest())
    return sorted(shuffled[place * batch.size : (place + 1) * batch.size])


def _key(salt: bytes) -> bytes:
    return salt if len(salt) <= 64 else hashlib.blake2b(salt).digest()
