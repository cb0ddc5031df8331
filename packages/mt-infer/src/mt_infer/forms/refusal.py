"""Requests that are not served, in OpenAI's form of errors."""

from __future__ import annotations

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_LONGEST = 500


class RefusedError(Exception):
    """A request is not served.

    Args:
        status: Status of the answer.
        message: The problem with its value, and the allowed values.
        param: Name of the field at fault.
        code: Short name of the reason.
        retry_after: Seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, object]:
        """The answer, which also is the last event of a stream that fails."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }


class FormError(RefusedError):
    """A refused field of a body.

    Args:
        param: Path of the field, such as `messages[0].role`; empty for the body as a whole.
        text: The problem with its value, and the allowed values.
        code: OpenAI's short name of the error.
    """

    def __init__(self, param: str, text: str, *, code: str = "invalid_value") -> None:
        message = _shortened(f"{param}: {text}" if param else text)
        super().__init__(400, message, param=_shortened(param) or None, code=code)


def _shortened(text: str) -> str:
    """Return a message of bounded length without characters that can't be encoded."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
