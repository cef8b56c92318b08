"""A question to the brokers that the consumer's thread does not wait for. Thin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Generic, TypeVar

from harvester.coordination.messages import Place

T = TypeVar("T")


class Question(Generic[T]):
    """One at a time. Belongs to one thread; `ask` is called from another one."""

    def __init__(self, ask: Callable[[Collection[Place]], T]) -> None:
        self._ask = ask
        self._future: Future[T] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is one whose answer was not taken yet."""
        return self._future is not None

    def put(self, places: Collection[Place]) -> None:
        """Ask about them."""
        self._future = Future()
        threading.Thread(target=_answer, args=(self._future, self._ask, places), daemon=True).start()

    def take(self) -> T | None:
        """The answer, once; None if there is none now. Raises what `ask` raised."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        return future.result()


def _answer(future: Future[T], ask: Callable[[Collection[Place]], T], places: Collection[Place]) -> None:
    try:
        future.set_result(ask(places))
    except Exception as error:  # noqa: BLE001 - the top frame of this thread; who takes the answer raises it
        future.set_exception(error)
