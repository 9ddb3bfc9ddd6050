"""Where a server is, and in which protocol it is spoken to."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from jevany_backend.protocol.json_content import shown

# scheme -> (protocol, encrypted, port). The plain ports are Triton's own; encrypted traffic meets a gateway's.
_SCHEMES = {
    "grpc": ("grpc", False, 8001),
    "grpcs": ("grpc", True, 443),
    "http": ("http", False, 8000),
    "https": ("http", True, 443),
}


@dataclass(frozen=True)
class Address:
    """A server's address.

    Attributes:
        protocol: ``grpc`` or ``http``.
        encrypted: Whether the connection uses TLS.
        target: ``host:port``, over HTTP with the path that the server's own paths start from.
    """

    protocol: str
    encrypted: bool
    target: str

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.encrypted else ''}://{self.target}"


def parse_address(url: str) -> Address:
    """Read a server's address.

    Args:
        url: ``grpc://host:8001``, ``http://host:8000``, ``grpcs://host``, ``https://host/path``; without a scheme it
            is gRPC. Without a port it is Triton's own, or 443 for an encrypted one.

    Raises:
        ValueError: Says what is wrong with the URL.
    """
    if not isinstance(url, str):
        raise ValueError(f"url: {shown(url)} is not text; use host:port")
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        scheme, rest = "grpc", scheme
    if scheme.lower() not in _SCHEMES:
        raise ValueError(f"{url!r}: unknown scheme {scheme!r}; use {', '.join(_SCHEMES)}")
    protocol, encrypted, port = _SCHEMES[scheme.lower()]
    try:
        parts = urlsplit(f"//{rest}")
        port = port if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if not parts.hostname or any(character.isspace() for character in rest):
        raise ValueError(f"{url!r}: not a server's address; use host:port")
    if port == 0:
        raise ValueError(f"{url!r}: nobody listens on port 0")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: a server's address has no user, query or fragment")
    path = parts.path.rstrip("/")
    if path and protocol == "grpc":
        raise ValueError(f"{url!r}: a gRPC address has no path")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(protocol, encrypted, f"{host}:{port}{path}")
