"""Puts the parts into the application."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.plugins import InitPlugin

from app.security.csrf import CsrfSigner, load_csrf_secret
from app.security.entrance import Entrance
from app.security.headers import add_security_headers
from app.security.hosts import DEFAULT_ALLOWED_HOSTS, AllowedHosts
from app.security.middleware import RequestGuard


class SecurityPlugin(InitPlugin):
    """Headers, Host, Origin, CSRF and login for the whole application.

    `https` says that browsers come over HTTPS, so that cookies are marked Secure. Needs
    `app.state.repository` once the application's own lifespans have begun.
    """

    def __init__(
        self,
        *,
        allowed_hosts: Iterable[str] = DEFAULT_ALLOWED_HOSTS,
        https: bool = False,
        accounts_required: bool = False,
    ) -> None:
        self._allowed_hosts = AllowedHosts(allowed_hosts)
        self._https = https
        self._accounts_required = accounts_required

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Add the hook, the middleware (outermost) and the lifespan that completes the rest."""
        app_config.before_send.append(add_security_headers)
        app_config.middleware.insert(0, RequestGuard())
        app_config.lifespan.append(self._lifespan)
        return app_config

    @asynccontextmanager
    async def _lifespan(self, app: Litestar) -> AsyncGenerator[None, None]:
        secret = await load_csrf_secret(app.state.repository)
        app.state.secure_cookies = self._https
        app.state.accounts_required = self._accounts_required
        app.state.csrf_signer = CsrfSigner(secret, secure_cookie=self._https)
        routed = app.asgi_handler
        app.asgi_handler = Entrance(routed, self._allowed_hosts)
        try:
            yield
        finally:
            app.asgi_handler = routed
