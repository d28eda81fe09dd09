"""Control requests to one server, an engine or a router: blocking, each with a deadline, standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

CONTROL_SECONDS = 60.0  # deadline of a request that only changes a server's state
_BODY_IN_MESSAGE = 2000


class ControlError(RuntimeError):
    """A control request was refused or not answered.

    Attributes:
        status: the HTTP status, or None when no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ControlClient:
    """Sends JSON to `base_url`; a proxy in the environment is ignored.

    Args:
        base_url: such as http://[::1]:15000.
        api_key: sent as a bearer token.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def request(self, method: str, path: str, payload: Any = None, *, timeout: float) -> Any:
        """The decoded answer; None when it is empty, text when it is not JSON.

        Raises:
            ControlError: a status that is no success, or no answer within `timeout` seconds.
        """
        url = f"{self.base_url}{path}"
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(url, data=data, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout) as response:
                return _decode(response.read())
        except urllib.error.HTTPError as error:
            body = error.read().decode(errors="replace")
            message = f"{method} {url}: status {error.code}: {body[:_BODY_IN_MESSAGE]}"
            raise ControlError(message, error.code) from None
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out
            raise ControlError(f"{method} {url}: no answer: {type(error).__name__}: {error}") from error

    def get(self, path: str, *, timeout: float) -> Any:
        return self.request("GET", path, timeout=timeout)

    def post(self, path: str, payload: Any = None, *, timeout: float) -> Any:
        return self.request("POST", path, {} if payload is None else payload, timeout=timeout)

    def answers(self, path: str, *, timeout: float) -> bool:
        """Whether a GET succeeds."""
        try:
            self.get(path, timeout=timeout)
        except ControlError:
            return False
        return True


def _decode(body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
