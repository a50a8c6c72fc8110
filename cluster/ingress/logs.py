"""Where an ingress's log lines go: into Serve's log of its replica, each with its level."""

import logging
import os
import traceback

SERVE_LOGGER = "ray.serve"
INDENT = "    "  # before each line of a traceback
_CONTROL = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))},
    **{code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\t",
}


def log_with_serve() -> None:
    """Sends what anything in this process logs to Serve's handlers. Call before vLLM is imported.

    Left alone, vLLM configures logging anew, and with that closes Serve's handlers: not a line is logged any more.
    """
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    logging.basicConfig(level=logging.INFO, handlers=logging.getLogger(SERVE_LOGGER).handlers or None)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    for handler in logging.getLogger().handlers:
        handler.addFilter(without_control_characters)


def without_control_characters(record: logging.LogRecord) -> bool:
    """A filter that makes one line of a message, so that no text of a client can look like a line of the log.

    Tracebacks keep their lines, indented. Terminal sequences are escaped in both.
    """
    message = record.getMessage()
    escaped = message.translate(_CONTROL)
    if escaped != message:
        record.msg, record.args = escaped, ()
    if record.exc_info and record.exc_info[0] is not None:
        lines = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n").split("\n")
        record.exc_text, record.exc_info = "\n".join(INDENT + line.translate(_CONTROL) for line in lines), None
    return True
