"""OpenTelemetry traces of requests, where the operator asks for them: one span a request.

Needs the extra `otel`. A span says method, route, status and times; nothing that tells who asked,
what for, or in which chat: paths hold ids of chats and links that work once, queries hold words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from litestar.enums import ScopeType
from litestar.plugins import InitPlugin
from litestar.types import Message, Scope

if TYPE_CHECKING:
    from litestar.config.app import AppConfig
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

SERVICE = "rejoinder"
TOLD = frozenset(
    {
        *("http.method", "http.request.method", "http.scheme", "url.scheme", "http.flavor"),
        *("http.status_code", "http.response.status_code", "network.protocol.version"),
    }
)
MISSING = (
    "otlp_endpoint is set, but the packages for traces are not installed: "
    "pip install 'rejoinder[otel]'"
)


class TracesUnavailable(Exception):
    """Traces were asked for, and the packages that make them are not there."""


def tracing(endpoint: str, exporter: SpanExporter | None = None) -> list[InitPlugin]:
    """The plugins that send a span of each request to `endpoint`, by OTLP over HTTP.

    None for an empty endpoint. Spans are sent by a thread of their own; what cannot be sent is
    dropped. Raises TracesUnavailable.
    """
    if not endpoint:
        return []
    try:
        from litestar.plugins.opentelemetry import OpenTelemetryConfig, OpenTelemetryPlugin
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesUnavailable(MISSING) from error
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    sends = exporter or OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(sends))
    config = OpenTelemetryConfig(
        tracer_provider=provider,
        scope_span_details_extractor=lambda scope: (str(scope.get("method", "")), {}),
        server_request_hook_handler=_keep_little,
        exclude_spans=["receive", "send"],  # an event stream would make one an event
    )
    return [_Routes(provider.shutdown), OpenTelemetryPlugin(config)]


def _keep_little(span: Span, scope: dict[str, Any]) -> None:
    """Blank every attribute that is not known to say nothing of a person."""
    attributes: Sequence[str] = list(getattr(span, "attributes", None) or ())
    for name in attributes:
        if name not in TOLD:
            span.set_attribute(name, "")


class _Routes(InitPlugin):
    """Names each span by the route that answers, once it is known; ends the sending at the end."""

    def __init__(self, shutdown: Any) -> None:
        self._shutdown = shutdown

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        app_config.before_send.append(_name_span)
        app_config.on_shutdown.append(self._shutdown)
        return app_config


async def _name_span(message: Message, scope: Scope) -> None:
    from opentelemetry.trace import get_current_span

    if message["type"] == "http.response.start" and scope["type"] == ScopeType.HTTP:
        route = scope.get("path_template") or "none"
        span = get_current_span()
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
