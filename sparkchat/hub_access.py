"""How this machine reaches the hub: the variables that say so, in words before the hub's client stumbles over them.

The client reads some of them when it is imported, and fails there at values that it cannot read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sparkchat.errors import UsageError

_SECONDS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def hub_client() -> ModuleType:
    """``sparkchat.hub``, imported late: listing and --help must not wait for it.

    Raises UsageError for variables that it cannot be used with.
    """
    refuse_unusable(os.environ)
    from sparkchat import hub

    return hub


def refuse_unusable(environ: Mapping[str, str]) -> None:
    """Raises UsageError for a variable of the hub's client that is not of its kind."""
    for name in _SECONDS:
        text = environ.get(name)
        if text is not None and not re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII):
            raise UsageError(f"{name} is {text!r}; give a whole number of seconds, or unset it")
    address = environ.get("HF_ENDPOINT")
    if address is not None and not _is_web_address(address):
        shown = without_password(address)
        raise UsageError(f"HF_ENDPOINT is {shown!r}; give an address such as https://huggingface.co, or unset it")


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def proxy_for(address: str) -> str | None:
    """The proxy that a request there goes through, without the password that its own address may hold."""
    parts, proxies = urlsplit(address), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if not proxy or proxy_bypass(parts.hostname or "") else without_password(proxy)


def without_password(address: str) -> str:
    """Name and password of an address left out, also where it has no scheme before them."""
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1", address, flags=re.DOTALL)


def what_to_check(address: str) -> str:
    """What on this machine may keep an answer away: the end of a sentence."""
    proxy = proxy_for(address)
    lost = [f"{name} ({path} is not there)" for name, path in map(_certificates, _CERTIFICATES) if path]
    return " and ".join(["check the network", *([f"the proxy {proxy}"] if proxy else []), *lost])


def _certificates(name: str) -> tuple[str, str]:
    """The variable, and its path where nothing lies there."""
    path = os.environ.get(name, "")
    return name, "" if os.path.exists(path) else path


def why_no_client(error: Exception, address: str) -> str:
    """Why the HTTP library could not even begin, and what to do about it."""
    proxy = proxy_for(address)
    if isinstance(error, ImportError) and proxy is not None:
        return f"its client cannot speak with the proxy {proxy}; give an http:// proxy, or `pip install socksio`"
    if proxy is not None and not isinstance(error, OSError):
        # Its own words may hold a part of the password.
        return f"the proxy {proxy} is none that can be used; write it as http://host:port"
    return f"{error or type(error).__name__}; {what_to_check(address)}"
