"""Who may ask: the key, the web pages, and the names by which a page could reach a server of this machine only.

Knows headers and flags; knows nothing of what is asked.
"""

import argparse
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from .errors import ApiError

# Nobody can register a domain under these, so no web page can let its own name lead to this machine through them.
_LOCAL_ENDINGS = (".localhost", ".local", ".internal")


def check_access(headers: Mapping, flags: argparse.Namespace, is_local: bool) -> None:
    """Raise ApiError if a request may not be answered. is_local: whether the server listens for this machine only."""
    origin, host = headers.get("Origin"), headers.get("Host", "")
    if origin is not None and "*" not in flags.allowed_origins and origin not in flags.allowed_origins:
        raise ApiError(403, f"pages from {origin} may not ask here; --allowed-origins names those that may")
    if is_local and not _is_trusted(host, flags):
        raise ApiError(
            403,
            f"this server listens for its own machine, which the header Host calls {host}; a name for a proxy in front "
            f"of it goes into the server's --allowed-origins, as in https://{host}",
        )
    given = headers.get("Authorization", "").removeprefix("Bearer ")
    if flags.api_key is not None and not hmac.compare_digest(given.encode(), flags.api_key.encode()):
        message = "the key in the header Authorization: Bearer KEY is wrong or missing"
        raise ApiError(401, message, code="invalid_api_key")


def check_content_type(headers: Mapping) -> None:
    """Raise ApiError for a body that is said to be no JSON.

    A form is what curl says if it is told nothing; a browser says it for pages that it did not ask the server about.
    """
    given = headers.get("Content-Type", "application/json")
    kind = given.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and (kind != "application/x-www-form-urlencoded" or "Origin" in headers):
        raise ApiError(415, f"the header Content-Type must be application/json, got {given}")


def _is_trusted(host: str, flags: argparse.Namespace) -> bool:
    """Whether a Host header has an address, a local name, or a name that the flags mention. Only browsers need one."""
    name = _name(host)
    if not name or name == flags.host.lower() or f".{name}".endswith(_LOCAL_ENDINGS):
        return True
    if name in (_name(urlsplit(origin).netloc) for origin in flags.allowed_origins):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Return the host's name without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host
