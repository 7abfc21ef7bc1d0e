"""A local S3 server (moto) with a bucket of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "pulse-tests"
_prefixes = itertools.count()


def options_for(endpoint: str) -> dict[str, Any]:
    """What ``open_store`` needs beside the URL. The credentials are as false as the server."""
    return {
        "config": {
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": "AKIAFALSEFALSEFALSE0",
            "secret_access_key": "false-secret-of-a-false-server",
            "virtual_hosted_style_request": False,
        }
    }


@contextmanager
def s3_endpoint(host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a running server that has the bucket."""
    moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    server = moto_server.ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    try:
        address, port = server.get_host_and_port()
        endpoint = f"http://{address}:{port}"
        make_bucket(endpoint)
        yield endpoint
    finally:
        server.stop()


def make_bucket(endpoint: str) -> None:
    import urllib.request

    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[str, dict[str, Any]]]:
    """(endpoint, options for ``open_store``)."""
    with s3_endpoint() as endpoint:
        yield endpoint, options_for(endpoint)


@pytest.fixture
def s3_url(s3: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """(URL of a prefix nobody used, options for ``open_store``)."""
    return f"s3://{BUCKET}/run-{next(_prefixes)}", s3[1]


__all__ = ["BUCKET", "options_for", "s3", "s3_endpoint", "s3_url"]
