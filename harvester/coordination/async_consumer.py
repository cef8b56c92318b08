"""A coordinated consumer for asyncio.

    async with AsyncCoordinatedConsumer(settings) as consumer:
        async for record in consumer:
            …
            await consumer.commit(record)

Everything that waits for Kafka runs in a separate thread; records that have arrived are handed out in the event loop,
so handing them out involves no thread switch, and a whole batch costs one wait.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from harvester.clock import clock_s
from harvester.coordination.consumer import CoordinatedConsumer, at_least_one
from harvester.coordination.core.messages import Client
from harvester.coordination.events import Claimed, Event, Lost, Released
from harvester.coordination.handling import AHEAD, IDLE_S, TURN_S, as_records
from harvester.coordination.settings import ConsumerSettings, Open, Statistics
from harvester.errors import ClaimCheckError, InboxError

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
AsyncEventHandler = Callable[[Event], Awaitable[object] | object]


class AsyncCoordinatedConsumer:
    """`CoordinatedConsumer` in an event loop: `async with` starts and ends it. One task reads; any task may commit.

    `on_event` may be a coroutine function; it is called in the task that reads. With `workers`, `run` handles that many
    records at once in tasks.
    """

    def __init__(
        self, settings: ConsumerSettings | None = None, *, on_event: AsyncEventHandler | None = None, **given: Any
    ) -> None:
        self._begin = lambda: CoordinatedConsumer(settings, on_event=self._events.append, **given)
        self._events: deque[Event] = deque()
        self._untold = set[tuple[str, int, int]]()  # claims that ended before they were announced
        self._on_event = on_event
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="consumer")
        self._consumer: CoordinatedConsumer | None = None
        self._filling: asyncio.Future[None] | None = None  # the thread is opening a batch
        self._stopping = False
        self._closing: Future[None] | None = None

    async def __aenter__(self) -> AsyncCoordinatedConsumer:
        begun = self._executor.submit(self._begin)
        try:
            self._consumer = await _finished(begun)
        except asyncio.CancelledError:  # what the thread may still start has no owner
            self._executor.submit(lambda: begun.result().close())
            self._executor.shutdown(wait=False)
            raise
        if self._stopping:
            self._consumer.stop()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def settings(self) -> ConsumerSettings:
        """The settings as given."""
        return self._started.settings

    @property
    def client(self) -> Client:
        """The client's identity in the coordination topic."""
        return self._started.client

    # -- records

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Records, until the consumer is stopped or closed."""
        consumer = self._started
        while not consumer._is_over:
            record = await self.poll(IDLE_S)
            if record is not None:
                yield record
                for another in consumer._batch.handed_out(clock_s) if consumer._claim_checks is None else ():
                    yield another

    async def poll(self, timeout_s: float) -> Any:
        """The next record that may be processed, or None. Raises the error that ended the coordination."""
        if self._started._claim_checks is None:
            return await self._next(timeout_s)
        return next(iter(await self._resolved(1, timeout_s)), None)

    async def consume(self, most: int, timeout_s: float) -> list[Any]:
        """Up to `most` records of one partition; waits for the first one, and returns those that have arrived with it.

        Raises ValueError if `most` is less than 1.
        """
        at_least_one(most)
        if self._started._claim_checks is not None:
            return await self._resolved(most, timeout_s)
        first = await self._next(timeout_s)
        return [] if first is None else [first, *self._started._batch.take_some(most - 1, clock_s())]

    async def consume_arrow(self, most: int, timeout_s: float) -> pyarrow.RecordBatch:
        """Like `consume`, but returns a `pyarrow.RecordBatch`: see `CoordinatedConsumer.consume_arrow`."""
        from harvester.arrow import record_batch

        return record_batch(await self.consume(most, timeout_s))

    async def _next(self, timeout_s: float) -> Any:
        async def take() -> Any:
            return self._take()

        return await self._until_taken(take, timeout_s)

    async def _resolved(self, most: int, timeout_s: float) -> list[Any]:
        """Like `consume`, for records whose values may be in a store.

        Values are resolved before their records are taken: a call that is cancelled in between has taken none. Raises
        ClaimCheckError for the first record; for a later one, the list ends before it.
        """

        async def take() -> list[Any] | None:
            return await self._take_resolved(most) or None

        return await self._until_taken(take, timeout_s) or []

    async def _until_taken(self, take: Callable[[], Awaitable[T | None]], timeout_s: float) -> T | None:
        """Take from batches as they arrive; None if nothing arrives in time."""
        deadline = clock_s() + timeout_s
        await self._tell()  # the remaining events, if the handler has raised
        taken = await take()
        while taken is None and not (self._filling is None and self._started._is_over):
            await self._filled(max(0.0, deadline - clock_s()))
            taken = await take()
            if clock_s() >= deadline:
                break
        return taken

    async def _take_resolved(self, most: int) -> list[Any]:
        batch, found, failure = self._started._batch, list[Any](), None
        for record in batch.rest[:most] if not self._filling and batch.is_open(clock_s()) else ():
            try:
                found.append(await self._resolve(record))
            except ClaimCheckError as error:
                failure = error
                break
        if self._filling or batch is not self._started._batch:
            return []  # another task is reading, too
        return self._started._take_resolved(found, failure)

    def _take(self) -> Any:
        """The next record of the current batch; the claim is checked here, with nothing in between."""
        return None if self._filling else self._started._batch.take(clock_s())

    async def _filled(self, timeout_s: float) -> None:
        """Let the thread open a batch, which continues if we are cancelled; then deliver the events that have
        occurred.
        """
        await asyncio.shield(self._fill(timeout_s))
        self._filling = None
        await self._tell()
        self._started._begin_batch()

    async def commit(self, record: Any) -> None:
        """Mark as processed a record, each record of a list, or an Arrow batch or part of one; in any order."""
        self._commit(record)

    async def run(self, handler: Callable[[Any], Awaitable[object]]) -> None:
        """Like `CoordinatedConsumer.run`, with a coroutine function; starts and closes the consumer."""
        async with self:
            await _Run(self, handler, handler).run()

    async def run_batches(self, handler: Callable[[list[Any]], Awaitable[object]], most: int = 500) -> None:
        """Like `CoordinatedConsumer.run_batches`, with a coroutine function; starts and closes the consumer."""
        async with self:
            self._started._refuse_batches(most)
            await _Run(self, handler, lambda record: handler([record]), most).run()

    # -- positions and claims, as in CoordinatedConsumer

    async def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Hand out nothing of a partition, of a topic, or at all."""
        await self._call(self._started.pause, topic, partition)

    async def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """End a `pause` with the same arguments; without arguments, end all."""
        await self._call(self._started.resume, topic, partition)

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        """Permanently set the group's position in a held partition."""
        await self._call(self._started.seek, topic, partition, offset)

    async def offsets_for_times(self, times: Mapping[tuple[str, int], datetime]) -> dict[tuple[str, int], int]:
        """For each partition, the offset of the first record from that time on, or the end if there is none."""
        return await self._call(self._started.offsets_for_times, times)

    def position(self, topic: str, partition: int) -> int | None:
        """The offset that is handed out next."""
        return self._started.position(topic, partition)

    def claims(self) -> dict[tuple[str, int], int]:
        """The held partitions, with the fencing token of each claim."""
        return self._started.claims()

    def release(self, topic: str, partition: int) -> None:
        """Give up a partition for others to claim."""
        self._started.release(topic, partition)

    def lag(self) -> dict[tuple[str, int], int]:
        """The number of waiting records in each held partition."""
        return self._started.lag()

    def ages(self) -> dict[tuple[str, int], float]:
        """For each held partition, how many seconds ago the next record to be handed out was written."""
        return self._started.ages()

    def open_records(self) -> dict[tuple[str, int], Open]:
        """For each held partition, what is handed out and not committed."""
        return self._started.open_records()

    def statistics(self) -> Statistics:
        """Statistics since the start."""
        return self._started.statistics()

    # -- the end

    def stop(self) -> None:
        """Let `run`, or a loop over the consumer, end after the current record. From any thread or signal handler."""
        self._stopping = True
        if self._consumer is not None:
            self._consumer.stop()

    async def close(self, *, release: bool = True) -> None:
        """Like `CoordinatedConsumer.close`."""
        consumer = self._consumer
        if consumer is not None:
            consumer.stop()
            if self._closing is None:  # from now on the thread does this, whatever is cancelled
                self._closing = self._executor.submit(lambda: consumer.close(release=release))
                self._closing.add_done_callback(lambda _: self._executor.shutdown(wait=False))
            await _finished(self._closing)
            await self._tell()
        else:
            self._executor.shutdown(wait=False)

    # -- parts

    async def _resolve(self, record: Any) -> Any:
        """The record with its value, which another thread fetches."""
        checks = self._started._claim_checks
        if checks is None or not checks.applies_to(record):
            return record
        return await asyncio.to_thread(checks.resolve, record)

    @property
    def _started(self) -> CoordinatedConsumer:
        if self._consumer is None:
            raise RuntimeError("the consumer has not been started: use `async with`")
        return self._consumer

    def _fill(self, timeout_s: float) -> asyncio.Future[None]:
        """Let the thread wait for records and open a batch, which belongs to the thread until done."""
        if self._filling is None:
            loop = asyncio.get_running_loop()  # right now: the consumer may be closed next
            self._filling = loop.run_in_executor(self._executor, self._started._open_batch, timeout_s)
        return self._filling

    def _commit(self, record: Any) -> None:
        if self._filling is None:
            self._started.commit(record)
        else:  # the current batch belongs to the thread now
            self._started._finish(record)

    async def _call(self, function: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *given)

    async def _tell(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Claimed) and self._has_ended(event):
                self._untold.add((event.topic, event.partition, event.generation))
                continue
            if isinstance(event, Lost | Released) and self._was_untold(event):
                continue
            await self._announce(event)

    async def _announce(self, event: Event) -> None:
        told = None if self._on_event is None else self._on_event(event)
        if inspect.isawaitable(told):
            await told

    def _has_ended(self, claim: Claimed) -> bool:
        """True if the claim ended before it could be announced; its end is not announced either.

        That end may not have been heard yet, while `on_event` was awaited for an earlier event.
        """
        known = claim.topic, claim.partition, claim.generation
        heard = tuple(self._events)  # threads add to it
        ends = (each for each in heard if isinstance(each, Lost | Released))
        return any((each.topic, each.partition, each.generation) == known for each in ends) or (
            self._consumer is not None and not self._consumer._session.has(*known)
        )

    def _was_untold(self, end: Lost | Released) -> bool:
        known = end.topic, end.partition, end.generation
        if known not in self._untold:
            return False
        self._untold.remove(known)
        return True


@contextmanager
def _cancelled_elsewhere() -> Iterator[None]:
    """A handler that awaits a task which somebody has cancelled fails like any other: we are not cancelled."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the handler awaited what was cancelled") from error


async def _finished(future: Future[T]) -> T:
    """Wait for a thread's result; the thread continues if we are cancelled."""
    return await asyncio.shield(asyncio.wrap_future(future))


class _Run:
    """One run: gives records to a coroutine function, `workers` at once, or lists of up to `most`. See
    `handling.ConsumerRun`.
    """

    def __init__(
        self,
        consumer: AsyncCoordinatedConsumer,
        handler: Callable[[Any], Awaitable[object]],
        single: Callable[[Any], Awaitable[object]],
        most: int | None = None,
    ) -> None:
        self._consumer, self._handler, self._single, self._most = consumer, handler, single, most
        self._handling, self._workers = consumer._started._handling, consumer._started.settings.workers
        self._running: set[asyncio.Task[None]] = set()
        self._fill_at = 0.0

    async def run(self) -> None:
        try:
            try:
                await self._offer_all()
            except Exception:  # the consumer's, or of `on_event`: what is in hand is finished all the same
                await self._finish()
                raise
            await self._finish()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        if self._handling.error is not None:
            raise self._handling.error

    async def _finish(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        await self._flush()

    async def _offer_all(self) -> None:
        handling = self._handling
        while not self._is_over:
            offered = self._next()
            if offered is None or self._workers > 1 or self._running or not handling.may_pass(offered):
                await self._turn(offered)
                continue
            began = clock_s()
            try:
                with _cancelled_elsewhere():
                    await self._handler(await self._resolved(offered))
            except Exception as error:  # noqa: BLE001 - the application's; on_error decides what follows
                handling.took(began)
                await asyncio.to_thread(handling.fail_offered, offered, error)
            else:
                handling.took(began)
                self._consumer._commit(offered)
            if handling.is_due:
                await self._turn(None)

    @property
    def _is_over(self) -> bool:
        return self._consumer._started._is_over or self._handling.error is not None

    def _next(self) -> Any:
        if self._handling.queues.ready >= AHEAD * self._workers:
            return None
        first = self._consumer._take()
        if self._most is None or first is None:
            return first
        return [first, *self._consumer._started._batch.take_some(self._most - 1, clock_s())]

    async def _resolved(self, offered: Any) -> Any:
        resolve = self._consumer._resolve
        return [await resolve(each) for each in offered] if isinstance(offered, list) else await resolve(offered)

    async def _turn(self, offered: Any) -> None:
        handling = self._handling
        for record in () if offered is None else as_records(offered):
            handling.admit(record)
        await self._flush()
        if self._workers == 1:  # in this task: `on_event` and the handler may share a connection
            until = clock_s() + TURN_S
            while clock_s() < until and not self._is_over and (queued := handling.take()) is not None:
                await self._attempt(queued)
                await self._flush()
        else:
            while len(self._running) < self._workers and (queued := handling.take()) is not None:
                task = asyncio.create_task(self._attempt_beside_others(queued))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        if offered is not None:
            return
        wait_s = handling.wait_s()
        waiting: set[asyncio.Future[Any]] = {*self._running}
        now = clock_s()
        has_room = handling.queues.ready < AHEAD * self._workers
        # Sometimes even without room, to look after the claims.
        if (has_room or now >= self._fill_at) and not self._consumer._started._is_over:
            self._fill_at = now + IDLE_S
            waiting.add(self._consumer._fill(wait_s))
        if waiting:
            await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(wait_s)  # everything ready is paused
        if self._consumer._filling is not None and self._consumer._filling.done():
            await self._consumer._filled(0)
            handling.tidy()

    async def _attempt(self, queued: Any) -> None:
        began = clock_s()
        try:
            with _cancelled_elsewhere():
                await self._single(await self._consumer._resolve(queued.record))
        except Exception as error:  # noqa: BLE001 - the application's; on_error decides what follows
            self._handling.took(began)
            await asyncio.to_thread(self._handling.fail, queued, error)
        else:
            self._handling.took(began)
            self._handling.finish(queued)

    async def _attempt_beside_others(self, queued: Any) -> None:
        try:
            await self._attempt(queued)
        except BaseException as error:  # noqa: BLE001 - it ends the consumer: a task's error would be lost
            self._handling.end(error)

    async def _flush(self) -> None:
        while (done := self._handling.next_done()) is not None:
            queued, given_up = done
            if given_up is not None:
                await self._consumer._tell()
                try:
                    await self._consumer._announce(given_up)
                except InboxError as error:
                    self._handling.postpone(queued, given_up, error)
                    continue
            self._consumer._commit(queued.record)
