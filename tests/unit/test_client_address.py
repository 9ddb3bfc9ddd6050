"""Server addresses."""

from __future__ import annotations

from typing import Any

import pytest

from jevany_client.address import parse_address


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("localhost:8001", "grpc://localhost:8001"),
        ("localhost", "grpc://localhost:8001"),
        ("grpc://10.0.0.1:9", "grpc://10.0.0.1:9"),
        ("http://localhost", "http://localhost:8000"),
        ("HTTP://LocalHost:80/", "http://localhost:80"),
        ("https://models.example.com/triton/", "https://models.example.com:443/triton"),
        ("grpcs://models.example.com", "grpcs://models.example.com:443"),
        ("[::1]:8001", "grpc://[::1]:8001"),
        (" localhost:8001\n", "grpc://localhost:8001"),
    ],
)
def test_the_scheme_is_the_protocol(url: str, meant: str) -> None:
    address = parse_address(url)
    assert str(address) == meant
    assert address.encrypted == meant.partition("://")[0].endswith("s")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://host", "unknown scheme 'ftp'"),
        ("", "not a server's address"),
        ("grpc://", "not a server's address"),
        ("two words", "not a server's address"),
        (":8001", "not a server's address"),
        ("host:port", "[Pp]ort"),
        ("host:99999", "Port out of range"),
        ("host:0", "nobody listens on port 0"),
        ("grpc://host/path", "no path"),
        ("http://me:secret@host", "no user"),
        ("http://host?x=1", "no user, query or fragment"),
        (None, "url: None is not text"),
        (8001, "url: 8001 is not text"),
        (b"localhost:8001", "url: bytes is not text"),
        (["localhost"], "url: a list is not text"),
    ],
)
def test_a_bad_address_is_named(url: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_address(url)
