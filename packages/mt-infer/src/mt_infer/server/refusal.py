"""Refusals: errors that a client gets, in the form of OpenAI's."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refusal(Exception):  # noqa: N818 - it is an answer, and says so in its name
    """A request that is answered with an error.

    Args:
        message: What is wrong, the value, and what is allowed.
        status: Status of the answer.
        param: Path of the field, such as `messages[0].role`; None if it is none.
        code: OpenAI's short name of the error.
        retry_s: Seconds after which the client may try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        shown = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": shown}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer beside those of its body."""
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
