"""Composition root of the web application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.di import Provide
from litestar.static_files import create_static_files_router

from app.accounts.service import Accounts
from app.api.service import Api
from app.assets import STATIC, AssetUrls, keep_versioned_assets
from app.assistants.costs import Costs
from app.assistants.loader import builtin_assistants
from app.assistants.service import AssistantService
from app.assistants.shared_text import AssistantPrefixes
from app.chat import ChatService
from app.drain import Drain
from app.engine_gate import EngineGate
from app.engine_start import EngineStart
from app.errors import EXCEPTION_HANDLERS
from app.finished_answers import FinishedAnswers
from app.history.importer import Importer
from app.history.purger import Purger
from app.metrics import Metrics
from app.operating.checks import Checks
from app.request_log import RequestLog, add_request_id
from app.routes import ROUTE_HANDLERS
from app.routes.v1 import API_ROUTER
from app.routes.v1.description import describe
from app.security import OPEN, SecurityPlugin
from app.services import Services, provide_services, stamp_receipt
from app.settings import Settings
from app.streams import TurnHub
from app.submissions import Submissions
from app.tracing import tracing
from app.upkeep import Upkeep
from app.views import Views
from engine.client import Engine
from engine.model.source import resolve_model
from engine.model.tokenizer import ChatTokenizer
from sessions.database import Database
from sessions.repository import Repository

logger = logging.getLogger(__name__)

FORM_BYTES_PER_CHAR = 12  # four bytes of UTF-8, each as %XX
FORM_BYTES = 1 << 20  # of all other fields


def create_app(
    settings: Settings, *, engine: Engine | None = None, start: EngineStart | None = None
) -> Litestar:
    """The application; its lifespan opens the database and closes the engine at its end.

    engine: one that can serve, or else start: one that will; without either the lifespan starts
    one. The lifespan raises SchemaOutdated, SchemaTooNew, DatabaseDamaged, ModelError and
    EngineUnavailable, each before the server listens.
    """
    assets = AssetUrls()

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncGenerator[None, None]:
        database = await Database.open(settings.database_path)
        try:
            async with _running(app, settings, database, assets, engine, start):
                yield
        finally:
            await database.close()

    return Litestar(
        route_handlers=[
            *ROUTE_HANDLERS,
            API_ROUTER,
            describe,
            create_static_files_router(path="/static", directories=[STATIC], opt=OPEN),
        ],
        dependencies={"services": Provide(provide_services, sync_to_thread=False)},
        exception_handlers=EXCEPTION_HANDLERS,
        middleware=[stamp_receipt],
        plugins=[
            SecurityPlugin(
                allowed_hosts=settings.allowed_hosts,
                public_url=settings.public_url,
                trusted_proxies=settings.trusted_proxies,
                accounts_required=settings.accounts_required,
            ),
            *tracing(settings.otlp_endpoint),
        ],
        lifespan=[lifespan],
        before_send=[keep_versioned_assets, add_request_id],
        openapi_config=None,
        request_max_body_size=settings.max_message_chars * FORM_BYTES_PER_CHAR + FORM_BYTES,
        logging_config=None,  # the command line decides what is logged
    )


@asynccontextmanager
async def _running(
    app: Litestar,
    settings: Settings,
    database: Database,
    assets: AssetUrls,
    engine: Engine | None,
    start: EngineStart | None,
) -> AsyncGenerator[None, None]:
    """Put the parts together, and take them apart: turns first, then the engine."""
    repository = Repository(database)
    if engine is not None:
        model_dir = await asyncio.to_thread(
            resolve_model, settings.model, settings.data_dir, logger.info
        )
        await _recover(repository)
        tokenizer = await asyncio.to_thread(ChatTokenizer, model_dir)
    else:
        start = start or EngineStart(settings)
        try:
            await _recover(repository)
            tokenizer = await asyncio.to_thread(ChatTokenizer, await start.model_dir())
            engine = await start.engine()
        except BaseException:
            await start.close()
            raise
    metrics = Metrics()
    engine = gate = EngineGate(engine, metrics)
    drain = Drain(gate, limit_s=settings.drain_s)
    app.asgi_handler = RequestLog(app.asgi_handler, metrics)
    try:
        views = Views(assets)
        finished = FinishedAnswers(repository)
        hub = TurnHub(views.frame)
        upkeep = Upkeep(repository=repository, engine=engine, hub=hub)
        chat = ChatService(
            repository=repository,
            engine=engine,
            tokenizer=tokenizer,
            hub=hub,
            upkeep=upkeep,
            max_message_chars=settings.max_message_chars,
        )
        purger = Purger(
            repository=repository, forget=upkeep.forget_deleted, backup_dir=settings.backup_dir
        )
        importer = Importer(
            repository=repository, tokenizer=tokenizer, context_limit=lambda: chat.context_limit
        )
        api = Api(
            settings=settings,
            repository=repository,
            engine=engine,
            tokenizer=tokenizer,
            forget_deleted=upkeep.forget_deleted,
        )
        accounts = Accounts(repository, chat.delete)
        assistants = AssistantService(
            repository=repository,
            prefixes=AssistantPrefixes(repository, tokenizer),
            costs=Costs(settings=settings, engine=engine, repository=repository),
        )
        checks = Checks(settings, engine)
        await api.begin()
        app.state.repository = repository
        app.state.views = views
        app.state.services = Services(
            settings=settings,
            repository=repository,
            engine=engine,
            gate=gate,
            metrics=metrics,
            hub=hub,
            upkeep=upkeep,
            chat=chat,
            views=views,
            finished=finished,
            accounts=accounts,
            submissions=Submissions(),
            importer=importer,
            api=api,
            assistants=assistants,
            checks=checks,
        )
        chat.queued.begin()
        try:
            streams = (hub.end_streams, api.end_streams)
            with drain.on_signals(streams, shown=lambda: not hub.running()):
                yield
        finally:
            hub.end_streams()
            await api.close()
            accounts.close()
            await importer.close()
            await checks.close()
            await chat.close()
            await finished.close()
            await purger.close()
            await upkeep.close()
    finally:
        await drain.close_engine()


async def _recover(repository: Repository) -> None:
    """After a crash: what ran is marked interrupted. Then the shipped assistants."""
    interrupted = await repository.interrupt_running()
    if interrupted:
        logger.warning("answers that the last end cut off: %d", len(interrupted))
    await repository.sync_builtin_assistants(builtin_assistants())
