"""Errors as clients see them: always OpenAI's shape, never the text of an exception that was not written for them.

What may be said: messages of vLLM's deliberate client errors, of pydantic's checks, and our own. Everything else
becomes a fixed sentence, with the request id to find the log line by.
"""

import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from traceback import walk_tb
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from pengserve.cluster.ingress.vllm_openai_seam import (
    ErrorInfo,
    ErrorResponse,
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMError,
    clean_loc_for_param,
)

logger = logging.getLogger(__name__)

DROPPED_REASON_HEADER = "x-pengserve-dropped-reason"
MAX_MESSAGE_CHARS = 500
MAX_REPORTED_FIELDS = 3
MAX_READ_ERRORS = 50  # pydantic reports every item of a list against every member of a union
INTERNAL = "The server failed to process this request."
UNSUITABLE = "The request cannot be processed as it is: check its fields against the API reference."

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    421: "MisdirectedRequestError",
    422: "BadRequestError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}
_PATH = re.compile(r"(?<![\w.])/(?:[\w.\-]+/)+[\w.\-]+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class RequestRefused(Exception):
    """A request that the ingress itself refuses. The message is for the client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after_s = status, message, param, retry_after_s


class OverloadedError(GracefulHTTPError):
    """429, or 503 while draining. vLLM's layer hands it through; the handler below puts Retry-After on it."""

    def __init__(self, message: str, status: HTTPStatus, retry_after_s: int, dropped_reason: str = "") -> None:
        """`dropped_reason` is told in `x-pengserve-dropped-reason`, for programs."""
        super().__init__(message, status)
        self.retry_after_s, self.dropped_reason = retry_after_s, dropped_reason


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error answer."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": _clean(message), "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error answer."""
    return JSONResponse(error_body(status, message, param), status_code=status, headers=dict(headers or {}))


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """Status, message and parameter that a client may know of `error`."""
    match error:
        case RequestRefused():
            return error.status, error.message, error.param
        case GracefulHTTPError():
            return int(error.http_status), error.message, None
        case VLLMClientError():
            return _describe_client_error(error)
        case RetryableRequestError():
            return 503, str(error), None
        case VLLMError() | GenerationError():
            return 500, INTERNAL, None
        case RequestValidationError():
            message, param = _describe_validation(error)
            return 400, message, param
        case StarletteHTTPException():
            return _describe_http(error)
        case ValueError() | TypeError() | OverflowError() | NotImplementedError():
            return 400, UNSUITABLE, None
        case _ if any(kind.__name__ == "TemplateError" for kind in type(error).__mro__):
            return 400, "The chat template does not accept these messages.", "messages"
    return (400, UNSUITABLE, None) if _was_validating(error) else (500, INTERNAL, None)


def respond(error: BaseException) -> JSONResponse:
    """The answer for `error`."""
    status, message, param = describe(error)
    if status >= 500 and not isinstance(error, RetryableRequestError | GracefulHTTPError):
        logger.error("a request failed", exc_info=error)
    elif status == 400 and message == UNSUITABLE:
        logger.info("a request did not suit vLLM", exc_info=error)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None and status in (429, 503):
        retry_after_s = 1
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if reason := getattr(error, "dropped_reason", ""):
        headers[DROPPED_REASON_HEADER] = reason
    if not getattr(error, "is_retryable", True):
        headers["x-should-retry"] = "false"  # OpenAI's clients heed it
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, StarletteHTTPException) and error.headers and "Allow" in error.headers:
        headers["Allow"] = error.headers["Allow"]
    return error_response(status, message, param, headers)


def install(app: FastAPI) -> None:
    """Makes `app` answer every exception in this way."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return respond(error)

    for kind in (
        StarletteHTTPException,
        RequestValidationError,
        RequestRefused,
        VLLMError,
        ValueError,
        TypeError,
        OverflowError,
        NotImplementedError,
        Exception,
    ):
        app.add_exception_handler(kind, handle)


def guard_serving(serving: Any) -> None:
    """Makes one of vLLM's serving objects phrase its own errors like this module does, in streams too."""

    def create_error_response(
        message: str | Exception,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> ErrorResponse:
        if isinstance(message, Exception):
            status, text, param = describe(message)
            if status >= 500:
                logger.error("a request failed", exc_info=message)
        else:
            status, text = int(status_code), message
        return ErrorResponse(error=ErrorInfo(**error_body(status, text, param)["error"]))

    def create_streaming_error_response(
        message: str | Exception,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> str:
        return json.dumps(create_error_response(message, err_type, status_code, param).model_dump())

    serving.create_error_response = create_error_response
    if hasattr(serving, "create_streaming_error_response"):
        serving.create_streaming_error_response = create_streaming_error_response


def _was_validating(error: BaseException) -> bool:
    """Whether `error` came out of the checks of a body: vLLM's stumble over types they did not expect."""
    return any(frame.f_code.co_name == "request_body_to_args" for frame, _ in walk_tb(error.__traceback__))


def _describe_client_error(error: VLLMClientError) -> tuple[int, str, str | None]:
    # str() of vLLM's validation errors appends the rejected value, which may be megabytes.
    message = str(error.args[0]) if error.args else UNSUITABLE
    param = getattr(error, "parameter", None)
    name = type(error).__name__
    return (404 if "NotFound" in name else 400), message, param


def _describe_validation(error: RequestValidationError) -> tuple[str, str | None]:
    """One phrase per field, and the first field as the parameter. Values are not echoed: they may be huge."""
    phrases, params = [], []
    entries = error.errors()
    for entry in entries[:MAX_READ_ERRORS]:
        if not isinstance(entry, dict):
            phrases.append(str(entry))
            continue
        cause = entry.get("ctx", {}).get("error")
        location = tuple(part for part in entry.get("loc", ()) if part != "body")
        param = getattr(cause, "parameter", None) or (clean_loc_for_param(location) if location else None)
        text = str(cause.args[0]) if isinstance(cause, VLLMClientError) and cause.args else str(entry.get("msg", ""))
        phrase = f"{param}: {text}" if param else text
        if phrase not in phrases:
            phrases.append(phrase)
            params.append(param)
    message = "; ".join(phrases[:MAX_REPORTED_FIELDS]) or "The request is not valid."
    if len(phrases) > MAX_REPORTED_FIELDS:
        message += "; and more"
    return message, next((param for param in params if param), None)


def _describe_http(error: StarletteHTTPException) -> tuple[int, str, str | None]:
    if error.status_code == 404:
        return 404, "There is nothing at this path.", None
    if error.status_code == 405:
        return 405, "This path does not take that method.", None
    if error.status_code >= 500:
        return error.status_code, INTERNAL, None
    return error.status_code, HTTPStatus(error.status_code).phrase, None


def _clean(message: str) -> str:
    """Without file paths and memory addresses, and short."""
    text = _ADDRESS.sub("", _PATH.sub("<path>", message)).strip()
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
