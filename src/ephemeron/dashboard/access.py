"""Who is let in: middleware around all routes of the dashboard.

- Every request needs the token: once in the address that the command prints (`/?token=…`), which is answered with a cookie and an
  address without it; then by that cookie (HttpOnly, SameSite=Strict; named after the port, because ports share cookies); programs
  send `Authorization: Bearer TOKEN`.
- `Host` must name the address that is served, so that a page of another site, whose name its owner points at this machine (DNS
  rebinding), is refused.
- A request that changes something needs, beside the cookie, a header with a value that only pages of the dashboard can read, and no
  other `Origin` than the dashboard's.
- Answers may load nothing but the dashboard's own files, run no script in a page's text, and be framed by no one.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ephemeron.communication.rpc import is_loopback

CHANGE_HEADER = "x-ephemeron-request"
"""Header of requests that change something."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; manifest-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_MAX_COOKIES = 16 << 10
"""Characters of a request's cookies that are read; browsers send up to 4 KiB of each."""
_YEAR_S = 365 * 24 * 3600


class Access:
    """The middleware.

    Args:
        app: the routes.
        token: secret of this dashboard.
        host: address that is served.
        port: port that is served.
        names: further names under which the dashboard may be addressed.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str, port: int, names: Iterable[str] = ()) -> None:
        self._app, self._token, self._port = app, token.encode(), port
        self._cookie = f"ephemeron-{port}"
        # Its own value and nothing else: the header comes from strangers, and http.cookies takes quadratic time before 3.11.10.
        self._cookie_value = re.compile(rf"(?:^|;)[ \t]*{self._cookie}=\"?([0-9a-f]{{64}})\"?[ \t]*(?:;|$)")
        self._names = {"localhost", host.lower().strip("[]"), *(name.lower() for name in names)}
        self._remote = not is_loopback(host)
        if self._remote:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def change_value(self) -> str:
        """Value of `CHANGE_HEADER`."""
        return self._derived("change")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self._token, purpose.encode(), "sha256").hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._answer(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        scope["ephemeron.change"] = self.change_value
        await (refusal or self._app)(scope, receive, guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through; None: it is."""
        headers = Headers(scope=scope)
        if not self._is_own(headers.get("host", "")):
            return _refused("refused: this dashboard is not served under that name", 421)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token") if scope["path"] == "/" else None
        if given:
            if not hmac.compare_digest(given[-1].encode(), self._token):
                return _refused("wrong token: open the address that `ephemeron serve dashboard` has printed", 401)
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(self._cookie, self._derived("cookie"), max_age=_YEAR_S, httponly=True, samesite="strict", path="/")
            return response
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        is_program = scheme.lower() == "bearer" and hmac.compare_digest(bearer.strip().encode(), self._token)
        if not (is_program or hmac.compare_digest(self._read_cookie(headers), self._derived("cookie").encode())):
            return _refused("no token: open the address that `ephemeron serve dashboard` has printed", 401)
        if scope["method"] not in ("GET", "HEAD") and not (is_program or self._is_wanted(headers)):
            return _refused("refused: the request does not come from a page of this dashboard", 403)
        return None

    def _read_cookie(self, headers: Headers) -> bytes:
        found = self._cookie_value.search(headers.get("cookie", "")[:_MAX_COOKIES])
        return found[1].encode() if found else b""

    def _is_wanted(self, headers: Headers) -> bool:
        """Whether a request that changes something was made by a page of the dashboard."""
        origin = headers.get("origin", "")
        same_site = headers.get("sec-fetch-site", "same-origin") == "same-origin"
        named = urlsplit(origin).netloc == headers.get("host") and origin.startswith(("http://", "https://"))
        value = headers.get(CHANGE_HEADER, "")
        return same_site and named and hmac.compare_digest(value.encode(), self.change_value.encode())

    def _is_own(self, host: str) -> bool:
        """Whether a `Host` header names this dashboard."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return False
        if (port or 80) != self._port and not self._remote:  # behind a forwarded port, a remote one has another number
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._remote  # no name, so nothing that can be rebound


def _refused(text: str, status: int) -> Response:
    """An answer to a stranger, whose connection ends with it; what more it sends is not read."""
    return PlainTextResponse(text, status_code=status, headers={"connection": "close"})
