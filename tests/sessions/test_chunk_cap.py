"""Whatever is written, the files never exceed the cap and the count is the sum of the files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessions.chunks import ChunkStore
from tests.sessions.chunk_support import (
    STRIPE_BYTES,
    bytes_on_disk,
    end,
    restore,
    save,
    token_ids,
)

OWNERS = ["c-0", "c-1", "c-2", "p-0"]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.sampled_from(OWNERS), st.integers(1, 300), st.integers(0, 2)),
        st.tuples(st.just("restore"), st.sampled_from(OWNERS), st.just(300), st.integers(0, 2)),
        st.tuples(st.sampled_from(["forget", "vanish"]), st.sampled_from(OWNERS)),
        st.tuples(st.sampled_from(["flush", "compact", "reopen"])),
    ),
    max_size=25,
)


def ids_of(owner: str, branch: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The first tokens of one of three branches that part inside the second stripe."""
    seed = OWNERS.index(owner)
    trunk = token_ids(seed, 90)
    return np.concatenate([trunk, token_ids(10 + 10 * seed + branch, 210)])[:count]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, stripes=st.integers(0, 12), num_dirs=st.integers(1, 2))
def test_cap_and_count_hold(actions: list[tuple[object, ...]], stripes: int, num_dirs: int) -> None:
    cap = stripes * STRIPE_BYTES
    with tempfile.TemporaryDirectory() as name:
        dirs = [Path(name) / str(n) for n in range(num_dirs)]
        over: list[str] = []

        def hook(step: str) -> None:
            if bytes_on_disk(dirs) > cap:
                over.append(step)

        store = ChunkStore(dirs, cap, hook=hook)
        for action in actions:
            match action:
                case ("save", str(owner), int(count), int(branch)):
                    save(store, owner, ids_of(owner, branch, count))
                case ("restore", str(owner), int(count), int(branch)):
                    assert 0 <= restore(store, owner, ids_of(owner, branch, count)) <= count
                case ("forget", str(owner)):
                    store.forget([owner])
                    assert restore(store, owner, ids_of(owner, 0, 300)) == 0
                case ("vanish", str(owner)):
                    assert store.flush(10.0)
                    for path in Path(name).glob("*/*.chunks"):
                        if owner.encode() in path.read_bytes()[:100]:
                            path.unlink()
                    restore(store, owner, ids_of(owner, 0, 300))
                case ("flush",):
                    assert store.flush(10.0)
                case ("compact",):
                    store.compact()
                case ("reopen",):
                    assert store.flush(10.0)
                    store.close()
                    store = ChunkStore(dirs, cap, hook=hook)
        assert store.flush(10.0)
        # a file that vanished is noticed when it is read or written, or at the next start
        store.close()
        store = ChunkStore(dirs, cap, hook=hook)
        assert store.flush(10.0)
        assert store.bytes_used <= cap
        end(store, dirs)
        assert over == []
