"""What stands between a browser and the routes: Host, Origin, CSRF, login cookie, headers.

Wiring: give `SecurityPlugin` to Litestar, and set `app.state.repository` in a lifespan of the
app's own (those run before the plugin's). Handlers and templates use `current_user`,
`ensure_user`, `csrf_token`.
"""

from app.security.csrf import csrf_token
from app.security.gate import OPEN, SignInRequired
from app.security.login import current_user, ensure_user, known_user, login_digest
from app.security.plugin import SecurityPlugin
from app.security.roles import is_operator, require_operator

__all__ = [
    "OPEN",
    "SecurityPlugin",
    "SignInRequired",
    "csrf_token",
    "current_user",
    "ensure_user",
    "is_operator",
    "known_user",
    "login_digest",
    "require_operator",
]
