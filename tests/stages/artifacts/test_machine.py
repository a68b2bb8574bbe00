"""Any order of working, crashing, rivals, collecting and damage: what is committed stays, or its damage is named."""

import secrets
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.artifacts import Manifest
from schemas.errors import CorruptError
from stages.artifacts.commit import finish, lookup, materialise, prepare, run_shard
from stages.artifacts.gc import collect_garbage
from stages.artifacts.layout import artifact_folder
from stages.artifacts.store import Store, open_store
from stages.artifacts.verify import verify
from tests.builders import numbers_request
from tests.stages.artifacts.faults import Crash, faulty

REQUESTS = [numbers_request(draw=draw, n_shards=2, n_rows=1, by_chance=bool(draw)) for draw in range(2)]
works = st.sampled_from(range(len(REQUESTS)))


class Shelf(RuleBasedStateMachine):
    """Two pieces of work on one shelf; the second gives other content each time that it is done."""

    store: Store

    @initialize()
    def open(self) -> None:
        self.store = open_store(f"memory://{secrets.token_hex(8)}")
        self.committed: dict[int, Manifest] = {}
        self.damaged: set[int] = set()

    @rule(work=works)
    def begin(self, work: int) -> None:
        prepare(self.store, REQUESTS[work])

    @rule(work=works, shard=st.sampled_from(["00000", "00001"]))
    def do_a_shard(self, work: int, shard: str) -> None:
        plan = prepare(self.store, REQUESTS[work])
        run_shard(self.store, REQUESTS[work], plan, shard)

    @rule(work=works)
    def do_all(self, work: int) -> None:
        self._commit(work, materialise(self.store, REQUESTS[work]).manifest)

    @rule(work=works, at=st.integers(1, 10), after=st.booleans())
    def crash(self, work: int, at: int, after: bool) -> None:
        crashing, _ = faulty(self.store, at=at, after=after)
        try:
            self._commit(work, materialise(crashing, REQUESTS[work]).manifest)
        except Crash:
            found = lookup(self.store, REQUESTS[work])
            if found is not None:
                self._commit(work, found)

    @rule(work=works, at=st.integers(1, 10))
    def rival_finishes_in_between(self, work: int, at: int) -> None:
        """Just before one of our changes another writer does all of the work."""
        racing, _ = faulty(self.store, at=at, fault=lambda: materialise(self.store, REQUESTS[work]))
        self._commit(work, materialise(racing, REQUESTS[work]).manifest)

    @rule(work=works)
    def lose_every_answer(self, work: int) -> None:
        deaf, _ = faulty(self.store, lose_answers=True)
        self._commit(work, materialise(deaf, REQUESTS[work]).manifest)

    @rule()
    def collect(self) -> None:
        """Without grace: nothing is in work between two steps."""
        collect_garbage(self.store, grace_s=0, delete=True)

    @precondition(lambda self: self.committed.keys() - self.damaged)
    @rule(data=st.data())
    def damage(self, data: Any) -> None:
        work = data.draw(st.sampled_from(sorted(self.committed.keys() - self.damaged)))
        manifest = self.committed[work]
        entry = data.draw(st.sampled_from(manifest.files))
        path = f"{artifact_folder(manifest.kind, manifest.key)}/{entry.path}"
        raw = bytearray(self.store.storage.read(path))
        raw[data.draw(st.integers(0, 10**6)) % len(raw)] ^= 1 << data.draw(st.integers(0, 7))
        self.store.storage.delete(path)
        self.store.storage.put_if_absent(path, bytes(raw))
        self.damaged.add(work)

    @invariant()
    def what_is_committed_stays_and_damage_is_named(self) -> None:
        for work, manifest in self.committed.items():
            assert lookup(self.store, REQUESTS[work]) == manifest
            try:
                verify(self.store, manifest)
                assert work not in self.damaged
            except CorruptError:
                assert work in self.damaged

    @invariant()
    def nothing_half_written_is_visible(self) -> None:
        for work, request in enumerate(REQUESTS):
            found = lookup(self.store, request)
            assert (found is not None) is (work in self.committed)

    def _commit(self, work: int, manifest: Manifest) -> None:
        assert self.committed.setdefault(work, manifest) == manifest

    def teardown(self) -> None:
        for work, request in enumerate(REQUESTS):
            plan = prepare(self.store, request)
            for shard in plan.shards:
                run_shard(self.store, request, plan, shard.id)
            if work not in self.damaged:
                self._commit(work, finish(self.store, request, plan))


TestShelf = Shelf.TestCase
TestShelf.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
