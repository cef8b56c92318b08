"""What the Kafka client library says, sent to our own log instead of standard error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


class ClientLog:
    """Has the one method that confluent_kafka asks of a logger.

    The client reports every broken connection as an error although it mends it by itself; what matters reaches the
    relay as a failed delivery or a trouble. So its lines are kept one level lower than it thinks.
    """

    def __init__(self, write: Callable[[int, str], None]) -> None:
        self._write = write

    def log(self, level: int, message: str, *arguments: Any) -> None:
        """Called by the client from within poll()."""
        text = message % arguments if arguments else message
        self._write(max(logging.DEBUG, level - 10), text.strip())
