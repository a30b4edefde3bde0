"""Figures for Prometheus: what went through the engine, and what it says of itself.

Names are OpenTelemetry's (gen_ai, http) where it has one, else vLLM's behind our own prefix, and
our own for restoring. Labels never carry anything that a user chose or that names one.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from engine.messages import Done, EngineInfo, EngineStats, Failed, TurnStats

# As OpenTelemetry's conventions say; first tokens can wait in the queue for longer than theirs.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30),
)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_DURATION_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4)
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
PREFIX = "rejoinder"


class Metrics:
    """Owns the counters of one running server. Event loop only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._duration = self._histogram(
            "gen_ai_server_request_duration_seconds",
            "From a turn's submission to its end",
            _DURATION_S,
            (*_GEN_AI, "error_type"),
        )
        self._first_token = self._histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a turn's submission to its first token",
            _FIRST_TOKEN_S,
            _GEN_AI,
        )
        self._per_token = self._histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of each token after the first one",
            _PER_TOKEN_S,
            _GEN_AI,
        )
        self._queue = self._histogram(
            f"{PREFIX}_request_queue_time_seconds", "Time in the engine's queue", _FIRST_TOKEN_S
        )
        self._prefill = self._histogram(
            f"{PREFIX}_request_prefill_time_seconds", "Time of reading the prompt", _FIRST_TOKEN_S
        )
        self._finished = self._counter(
            f"{PREFIX}_request_success", "Turns that ended by themselves", ("finished_reason",)
        )
        self._failed = self._counter(f"{PREFIX}_request_failure", "Turns that failed", ("kind",))
        self._prompt_tokens = self._counter(
            f"{PREFIX}_prompt_tokens", "Prompt tokens of ended turns, by where they came from",
            ("source",),
        )  # fmt: skip
        self._generated = self._counter(
            f"{PREFIX}_generation_tokens", "Tokens generated in ended turns"
        )
        by_method = ("method",)
        self._restores = self._counter(f"{PREFIX}_restores", "Turns with a restore", by_method)
        self._restored_tokens = self._counter(
            f"{PREFIX}_restored_tokens", "Tokens that came back from checkpoints", by_method
        )
        self._restore_s = self._counter(
            f"{PREFIX}_restore_seconds", "Time from the first read to the last page", by_method
        )
        self._restore_io_s = self._counter(
            f"{PREFIX}_restore_io_seconds", "Time in reads and checksums", by_method
        )
        self._restore_compute_s = self._counter(
            f"{PREFIX}_restore_compute_seconds", "Time in restoring kernels", by_method
        )
        self._restore_bytes = self._counter(
            f"{PREFIX}_restore_bytes", "Bytes read from checkpoints", by_method
        )
        self._prediction = self._histogram(
            f"{PREFIX}_restore_predicted_over_measured",
            "What a restore was predicted to take, over what it took",
            _RATIO,
        )
        self._restarts = self._counter(
            f"{PREFIX}_engine_restarts", "Engine processes that died or were given up"
        )
        self._http = self._histogram(
            "http_server_request_duration_seconds",
            "From a request to the end of its response, by route",
            _DURATION_S,
            ("http_request_method", "http_route", "http_response_status_code"),
        )

    def first_token(self, model: str, took_s: float) -> None:
        self._first_token.labels("chat", PREFIX, model).observe(took_s)

    def ended(self, model: str, end: Done | Failed, took_s: float) -> None:
        """Count the end of a turn."""
        error = end.kind if isinstance(end, Failed) else ""
        self._duration.labels("chat", PREFIX, model, error).observe(took_s)
        match end:
            case Failed(kind=kind):
                self._failed.labels(kind).inc()
            case Done(finish=finish, stats=stats):
                self._finished.labels(finish).inc()
                self._count(model, stats)

    def engine_restarted(self) -> None:
        self._restarts.inc()

    def request(self, method: str, route: str, status: int, took_s: float) -> None:
        """`route` is a pattern of the application, never a path as it was asked for."""
        self._http.labels(method, route, str(status)).observe(took_s)

    def text(
        self,
        info: EngineInfo,
        stats: EngineStats | None,
        *,
        running: int,
        draining: bool,
        stores: bool,
    ) -> bytes:
        """All figures in Prometheus' text format; those of the engine when it answered.

        `stores`: the database took what was last to be stored.
        """
        now = CollectorRegistry()
        now.register(_Now(info, stats, running, draining, stores))
        return generate_latest(self.registry) + generate_latest(now)

    def _count(self, model: str, stats: TurnStats) -> None:
        self._queue.observe(stats.queue_ms / 1e3)
        self._prefill.observe(stats.prefill_ms / 1e3)
        self._generated.inc(stats.tokens_out)
        if stats.ttft_ms is not None and stats.tokens_out > 1:
            per_token_s = (stats.total_ms - stats.ttft_ms) / (stats.tokens_out - 1) / 1e3
            self._per_token.labels("chat", PREFIX, model).observe(max(0.0, per_token_s))
        own = stats.prefix_restored_tokens + stats.prefix_computed_tokens
        for source, tokens in {
            "prefix_shared": stats.prefix_tokens - own,
            "prefix_restored": stats.prefix_restored_tokens,
            "prefix_computed": stats.prefix_computed_tokens,
            "resident": stats.resident_tokens,
            "restored": stats.restored_tokens,
            "recomputed": stats.recomputed_tokens,
            "new": stats.new_tokens,
        }.items():
            self._prompt_tokens.labels(source).inc(max(0, tokens))
        if stats.restored_tokens:
            method = stats.restore_method
            self._restores.labels(method).inc()
            self._restored_tokens.labels(method).inc(stats.restored_tokens)
            self._restore_s.labels(method).inc(stats.restore_ms / 1e3)
            self._restore_io_s.labels(method).inc(stats.restore_io_ms / 1e3)
            self._restore_compute_s.labels(method).inc(stats.restore_compute_ms / 1e3)
            self._restore_bytes.labels(method).inc(stats.restore_bytes)
            if stats.restore_predicted_ms is not None and stats.restore_ms > 0:
                self._prediction.observe(stats.restore_predicted_ms / stats.restore_ms)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class _Now(Collector):
    """What the engine says of itself at this moment. Its counters begin anew when it does."""

    def __init__(
        self,
        info: EngineInfo,
        stats: EngineStats | None,
        running: int,
        draining: bool,
        stores: bool,
    ) -> None:
        self._info = info
        self._stats = stats
        self._running = running
        self._draining = draining
        self._stores = stores

    def collect(self) -> Iterator[Metric]:
        info = self._info
        yield InfoMetricFamily(
            f"{PREFIX}_model",
            "The model that answers",
            {
                "model": info.model_name,
                "family": info.family,
                "dtype": info.dtype,
                "checkpoint_method": info.checkpoint_method,
            },
        )
        yield _gauge("draining", "1 while the server takes no new turn", float(self._draining))
        yield _gauge("database_up", "1 when the database took the last commit", float(self._stores))
        yield _gauge("num_requests_open", "Turns that have not ended", self._running)
        yield _gauge("engine_up", "1 when the engine answered", float(self._stats is not None))
        found = self._stats
        if found is None:
            return
        used = found.pages_total - found.pages_free
        for name, text, value in (
            ("num_requests_running", "Turns that the engine computes", found.running),
            ("num_requests_waiting", "Turns in the engine's queue", found.waiting),
            ("num_requests_restoring", "Turns whose chat comes back from disk", found.restoring),
            ("kv_cache_usage_perc", "Part of the KV memory in use, 0 to 1",
             used / max(1, found.pages_total)),
            ("kv_cache_pages", "Pages of the KV memory", found.pages_total),
            ("kv_cache_free_pages", "Pages that are free", found.pages_free),
            ("resident_chats", "Chats whose state is in memory", found.resident_chats),
            ("prefix_nodes", "Shared prefixes in memory", found.prefix_nodes),
            ("checkpoint_disk_bytes", "Bytes of all checkpoints on disk", found.disk_bytes),
            ("checkpoint_disk_cap_bytes", "What they may take", found.disk_cap_bytes),
            ("host_cache_bytes", "Bytes of chats kept in host memory", found.host_cache_bytes),
            ("engine_last_step_age_seconds", "Since the engine's loop came round",
             found.last_step_age_ms / 1e3),
        ):  # fmt: skip
            yield _gauge(name, text, value)
        for name, text, number in (
            ("engine_steps", "Steps of the engine", found.steps),
            ("engine_tokens_decoded", "Tokens decoded", found.tokens_decoded),
            ("engine_tokens_prefilled", "Prompt tokens computed", found.tokens_prefilled),
            ("engine_tokens_restored", "Tokens restored", found.tokens_restored),
            ("engine_tokens_recomputed", "Tokens recomputed", found.tokens_recomputed),
            ("spec_decode_num_draft_tokens", "Tokens drafted by prompt lookup",
             found.tokens_drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that the model chose",
             found.tokens_accepted),
            ("prefix_cache_hits", "Prompt tokens found in a shared prefix",
             found.prefix_tokens_shared),
            ("num_preemptions", "Turns that made room for others", found.preemptions),
            ("evictions", "Idle chats that left the memory", found.evictions),
            ("checkpoint_stripes_written", "Stripes of checkpoints written", found.stripes_written),
            ("checkpoint_staging_drops", "Stripes dropped, since the disk was too slow or full",
             found.stripes_dropped),
            ("checkpoint_stripes_rejected", "Stripes missing, foreign or corrupt",
             found.stripes_rejected),
            ("checkpoint_write_refusals", "Writes of checkpoints that the system did not take",
             found.write_refusals),
            ("host_cache_tokens_restored", "Tokens that came back from host memory",
             found.tokens_from_memory),
        ):  # fmt: skip
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=number)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
