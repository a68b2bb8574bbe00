"""Concurrency adapts to what a server reports."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.workers.limit import Limit
from stages.rollouts.workers.server import Load


def settle(capacity, demand, largest=1024, rounds=30):
    """The limit after some reports of a server that can run ``capacity`` calls at once."""
    limit = Limit(largest)
    for _ in range(rounds):
        in_flight = min(demand, limit.value)
        running = min(capacity, in_flight)
        limit.observe(Load(running, in_flight - running, progress=0), in_flight)
    return limit.value


@settings(max_examples=200)
@given(st.integers(1, 900), st.integers(1, 5000))
def test_a_busy_server_is_full_and_its_queue_is_short(capacity, demand):
    limit = settle(capacity, demand)
    assert limit >= min(capacity, demand, 1024)
    assert min(limit, demand) - capacity <= max(capacity, 16)


def test_a_server_with_room_gets_all_there_is():
    assert settle(capacity=1000, demand=5000) == 1024
    assert settle(capacity=1000, demand=5000, largest=300) == 300


def test_a_server_that_loses_room_gets_less():
    limit = Limit(1024)
    for _ in range(10):
        limit.observe(Load(limit.value, 0, 0), limit.value)
    assert limit.value == 1024
    for _ in range(2):
        limit.observe(Load(20, 1004, 0), 1024)
    assert limit.value == 40


def test_the_first_moment_of_a_burst_takes_no_room_away():
    limit = Limit(1024)
    limit.observe(Load(running=1, waiting=255, progress=0), 256)
    assert limit.value == 256
    limit.observe(Load(running=250, waiting=6, progress=0), 256)
    assert limit.value == 512
    limit.observe(Load(running=0, waiting=512, progress=0), 512)
    assert limit.value == 512
