"""What the scheduler needs of checkpoint and restore: begin one, flush one, drop one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.memory.kv_cache import KVCache
from engine.memory.prefix_tree import PrefixNode
from engine.memory.sequence import Sequence
from engine.restoration.checkpoint import Recorder
from engine.restoration.chunk_store import ChunkStore
from engine.restoration.host_tier import HostTier
from engine.restoration.leading import LeadingLayers
from engine.restoration.restore import RestoreJob
from engine.restoration.stripes import find_stripes


class Restorer:
    """Binds a store, its recorder and the model; without both nothing is saved or found."""

    def __init__(
        self,
        store: ChunkStore | None,
        recorder: Recorder | None,
        cache: KVCache,
        leading: LeadingLayers,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._cache = cache
        self._leading = leading

    def begin(
        self, seq: Sequence, path: Seq[PrefixNode], start: int, end: int
    ) -> RestoreJob | None:
        """Read back what is on disk of tokens [start, end); None when there is nothing.

        `path` are the nodes before the sequence, which layers that are not stored attend to.
        """
        if self._store is None or self._recorder is None:
            return None
        fingerprint = self._leading.decoder.weights.fingerprint
        refs = find_stripes(self._store, seq, fingerprint, start, end)
        if not refs:
            return None
        return RestoreJob(self._store, seq, path, refs, self._cache, self._leading, self._recorder)

    def flush(self, seq: Sequence) -> None:
        """Hand the sequence's unsaved tokens to the writer."""
        if self._recorder is not None:
            self._recorder.flush(seq)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """The sequence was cut: what was staged beyond is void."""
        if self._recorder is not None:
            self._recorder.truncate(seq, num_tokens)

    def keep(self, seq: Sequence) -> None:
        """The sequence is about to give its memory back: its K/V may be kept in host memory."""
        if isinstance(self._store, HostTier):
            fingerprint = self._leading.decoder.weights.fingerprint
            self._store.keep(seq, fingerprint, self._cache.kv)

    def drop(self, seq: Sequence) -> None:
        """The sequence gives its memory back."""
        if self._recorder is not None:
            self._recorder.drop(seq)
