"""Keeps what is no HTTP out of the log: aiohttp reports each such request as an error, with a traceback.

It is answered with a 400 like other bad requests, and those are not logged either: clients must not be able
to fill the log.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger


def quiet_malformed() -> None:
    """Installs the filter; a second call changes nothing."""
    server_logger.addFilter(_is_no_malformed_request)


def _is_no_malformed_request(record: logging.LogRecord) -> bool:
    """False for aiohttp's report of bytes that it could not read as a request."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
