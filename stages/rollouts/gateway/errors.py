"""Refusals in the chat API's own form, which its client libraries turn into their exceptions."""

from typing import Any

from aiohttp import web


class ApiError(Exception):
    """A call that is not answered.

    Args:
        status: of HTTP. Clients try 408, 409, 429 and 5xx again, and no others.
        code: what kind of refusal it is, for programs; None: none in particular.
        param: the field of the request that is wrong; None: none in particular.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def response(self) -> web.Response:
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return web.json_response({"error": error}, status=self.status)
