"""Which names this server answers to, compared without the port."""

from __future__ import annotations

import re
from collections.abc import Iterable

DEFAULT_ALLOWED_HOSTS = ("localhost", "127.0.0.1", "[::1]")

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)


def split_host(value: str) -> tuple[str, str] | None:
    """Return (name, port) of a Host header in lower case, "" for no port; None if malformed."""
    match = _HOST.fullmatch(value.lower())
    return (match["name"], match["port"] or "") if match else None


class AllowedHosts:
    """The server's own names. A foreign name that leads here (DNS rebinding) is refused."""

    def __init__(self, names: Iterable[str] = DEFAULT_ALLOWED_HOSTS) -> None:
        self._names = frozenset(self._canonical(name) for name in names)

    @staticmethod
    def _canonical(name: str) -> str:
        bare = name.strip().lower()
        if ":" in bare and not bare.startswith("["):
            bare = f"[{bare}]"  # an IPv6 address
        split = split_host(bare)
        if split is None or split[1]:
            raise ValueError(f"not a host name without port: {name!r}")
        return split[0]

    def allows(self, host_headers: list[str]) -> bool:
        """Tell whether a request's Host headers are exactly one, well formed and ours."""
        if len(host_headers) != 1:
            return False
        split = split_host(host_headers[0])
        return split is not None and split[0] in self._names
