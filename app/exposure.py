"""How far the server can be reached, and what follows from that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from socket import SOCK_STREAM, getaddrinfo

_ORIGIN = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?/?",
    re.ASCII,
)


@dataclass(frozen=True)
class PublicAddress:
    """The address that people type: scheme, host, maybe a port, no path."""

    origin: str  # as browsers send it
    host: str  # without port

    @property
    def https(self) -> bool:
        return self.origin.startswith("https://")

    @classmethod
    def parse(cls, url: str) -> PublicAddress:
        """Raises ValueError."""
        match = _ORIGIN.fullmatch(url.strip().lower())
        if match is None:
            raise ValueError(f"not an address like https://chat.example.org: {url!r}")
        scheme, host = match["scheme"], match["host"]
        port = int(match["port"] or (443 if scheme == "https" else 80))
        if not 1 <= port <= 65535:
            raise ValueError(f"not a port: {port}")
        usual = port == (443 if scheme == "https" else 80)
        shown = host if usual else f"{host}:{port}"
        return cls(origin=f"{scheme}://{shown}", host=host)


def needs_accounts(host: str, public_url: str) -> bool:
    """Tell whether people must sign in: unless only this machine reaches the server."""
    return bool(public_url) or not is_loopback(host)


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on is reached from this machine only."""
    try:
        found = getaddrinfo(host, None, type=SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ip_address(str(one[4][0])).is_loopback for one in found)


class TrustedProxies:
    """The addresses whose word about the browser behind them counts."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        """Raises ValueError for what is neither an address nor a network."""
        self._networks = [ip_network(one.strip(), strict=False) for one in addresses]

    def trusts(self, address: str) -> bool:
        try:
            found = ip_address(address)
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)
        return any((mapped or found) in network for network in self._networks)

    def client(self, peer: str, forwarded_for: list[str]) -> str:
        """The nearest address that is no proxy of ours; `peer` when nobody else is named."""
        client = peer
        for named in reversed([part.strip() for part in ",".join(forwarded_for).split(",")]):
            if not self.trusts(client):
                break
            try:
                client = str(ip_address(named.strip("[]")))
            except ValueError:
                break
        return client
