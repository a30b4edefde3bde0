"""Puts the parts into the application."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.plugins import InitPlugin
from litestar.types import Middleware

from app.exposure import PublicAddress, TrustedProxies
from app.security.csrf import CsrfSigner, load_csrf_secret
from app.security.entrance import Entrance
from app.security.gate import AccountGate
from app.security.headers import add_security_headers
from app.security.hosts import DEFAULT_ALLOWED_HOSTS, AllowedHosts
from app.security.middleware import RequestGuard


class SecurityPlugin(InitPlugin):
    """Headers, Host, Origin, CSRF, login and accounts for the whole application.

    `public_url` is the address that people type, "" for none: then nothing may come through a
    proxy. With it, `trusted_proxies` may say who they speak for, and under HTTPS cookies are
    Secure. Needs `app.state.repository` once the application's own lifespans have begun.
    Raises ValueError for addresses that are none.
    """

    def __init__(
        self,
        *,
        allowed_hosts: Iterable[str] = DEFAULT_ALLOWED_HOSTS,
        public_url: str = "",
        trusted_proxies: tuple[str, ...] = (),
        accounts_required: bool = False,
    ) -> None:
        self._public = PublicAddress.parse(public_url) if public_url else None
        names = [*allowed_hosts, *([self._public.host] if self._public else [])]
        self._allowed_hosts = AllowedHosts(names)
        self._proxies = TrustedProxies(trusted_proxies) if self._public else None
        self._accounts_required = accounts_required

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Add the hook, the middleware (outermost) and the lifespan that completes the rest."""
        app_config.before_send.append(add_security_headers)
        guards: list[Middleware] = [RequestGuard(self._public.origin if self._public else None)]
        if self._accounts_required:
            guards.append(AccountGate())
        app_config.middleware[:0] = guards
        app_config.lifespan.append(self._lifespan)
        return app_config

    @asynccontextmanager
    async def _lifespan(self, app: Litestar) -> AsyncGenerator[None, None]:
        secret = await load_csrf_secret(app.state.repository)
        https = self._public is not None and self._public.https
        app.state.secure_cookies = https
        app.state.accounts_required = self._accounts_required
        app.state.csrf_signer = CsrfSigner(secret, secure_cookie=https)
        routed = app.asgi_handler
        app.asgi_handler = Entrance(routed, self._allowed_hosts, self._proxies)
        try:
            yield
        finally:
            app.asgi_handler = routed
