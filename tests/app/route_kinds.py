"""Every route of the application, and who may use it: a new one fails the tests until it is in."""

from __future__ import annotations

from litestar import Litestar

Route = tuple[str, str]  # method and path

STATIC = "/static"

# Answered to everybody, also where accounts are required.
OPEN: set[Route] = {
    ("GET", "/favicon.ico"),
    ("GET", "/health"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/sign-in"),
    ("POST", "/sign-in"),
    ("POST", "/sign-out"),
    ("GET", "/invitations/{token}"),
    ("POST", "/invitations/{token}"),
    ("GET", "/new-password/{token}"),
    ("POST", "/new-password/{token}"),
}

# Show or change what belongs to whoever asks; their paths name nothing.
OWN: set[Route] = {
    ("GET", "/"),
    ("POST", "/chats"),
    ("GET", "/chat-list"),
    ("GET", "/search"),
    ("GET", "/history"),
    ("POST", "/history/import"),
    ("GET", "/history/export/json"),
    ("GET", "/history/export/markdown"),
    ("GET", "/assistants"),
    ("GET", "/assistants/new"),
    ("POST", "/assistants"),
    ("POST", "/assistants/check"),
    ("POST", "/assistants/preview"),
    ("POST", "/assistants/documents"),
}

# The same, of accounts.
ACCOUNT: set[Route] = {
    ("GET", "/account"),
    ("POST", "/account/claim"),
    ("POST", "/account/password"),
    ("POST", "/account/sign-out-everywhere"),
    ("POST", "/account/guest"),
    ("POST", "/account/keys"),
    ("POST", "/account/delete"),
}

# Name something in their path, and are 404 for all but its owner, operators included.
OF_OWNER: set[Route] = {
    ("GET", "/chats/{chat_id}"),
    ("POST", "/chats/{chat_id}/warm"),
    ("POST", "/chats/{chat_id}/messages"),
    ("POST", "/chats/{chat_id}/carry-over"),
    ("POST", "/chats/{chat_id}/rename"),
    ("POST", "/chats/{chat_id}/pin"),
    ("POST", "/chats/{chat_id}/delete"),
    ("POST", "/chats/{chat_id}/undo"),
    ("POST", "/chats/{chat_id}/latest-version"),
    ("POST", "/chats/{chat_id}/queued/withdraw"),
    ("POST", "/chats/{chat_id}/queued/send"),
    ("GET", "/chats/{chat_id}/export/json"),
    ("GET", "/chats/{chat_id}/export/markdown"),
    ("GET", "/chats/{chat_id}/latency"),
    ("GET", "/chats/{chat_id}/latency.json"),
    ("GET", "/chats/{chat_id}/latency/turns.csv"),
    ("GET", "/chats/{chat_id}/latency/turns.json"),
    ("POST", "/messages/{message_id}/edit"),
    ("POST", "/messages/{message_id}/again"),
    ("POST", "/messages/{message_id}/retry"),
    ("POST", "/messages/{message_id}/continue"),
    ("POST", "/messages/{message_id}/select"),
    ("GET", "/messages/{message_id}/text"),
    ("GET", "/messages/{message_id}/edit"),
    ("GET", "/messages/{message_id}/again"),
    ("GET", "/messages/{message_id}/timeline"),
    ("POST", "/turns/{turn_id}/stop"),
    ("GET", "/turns/{turn_id}/events"),
    ("GET", "/turns/{turn_id}/candidates"),
    ("GET", "/history/imports/{job_id}"),
    ("GET", "/assistants/{assistant_id}"),
    ("GET", "/assistants/{assistant_id}/edit"),
    ("POST", "/assistants/{assistant_id}"),
    ("POST", "/assistants/{assistant_id}/duplicate"),
    ("POST", "/assistants/{assistant_id}/delete"),
    ("POST", "/account/logins/{login_id}/end"),
    ("POST", "/account/keys/{key_id}/revoke"),
}

# For operators alone: 403 for other accounts.
OPERATOR: set[Route] = {
    ("GET", "/people"),
    ("POST", "/people/invitations"),
    ("POST", "/people/invitations/{link_id}/end"),
    ("POST", "/people/{user_id}/disable"),
    ("POST", "/people/{user_id}/enable"),
    ("POST", "/people/{user_id}/new-password"),
    ("GET", "/latency"),
    ("GET", "/latency.json"),
    ("GET", "/latency/turns.csv"),
    ("GET", "/latency/turns.json"),
    ("GET", "/metrics"),
    ("GET", "/operator"),
    ("POST", "/operator/collect"),
    ("GET", "/operator/check"),
    ("POST", "/operator/check"),
    ("POST", "/assistants/{assistant_id}/publish"),
}

ALL = OPEN | OWN | ACCOUNT | OF_OWNER | OPERATOR


def browser_routes(app: Litestar) -> set[Route]:
    """All routes but those of the API and the static files."""
    return {
        (method, route.path_format)
        for route in app.routes
        for method in route.methods
        if method != "OPTIONS" and not route.path_format.startswith((STATIC, "/v1/"))
    }


def api_routes(app: Litestar) -> set[Route]:
    return {
        (method, route.path_format)
        for route in app.routes
        for method in route.methods
        if method != "OPTIONS" and route.path_format.startswith("/v1/")
    }
