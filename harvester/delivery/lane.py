"""A lane: the transactional identity of one shard, as a producer and as a partition of the progress topic. Thin.

`Lanes` opens them. Opening fences whoever had the lane before: `init_transactions` raises the producer's epoch and ends
what was open under the old one, so that nothing of a predecessor can be committed any more. What it had committed then
stands in the lane's last progress record (rules P19, P20).

What a call to the transaction's coordinator came to is an `Outcome` (P23). librdkafka lacks KIP-890: a request that got
lost on a broken connection may still arrive, and end the *next* transaction. So a commit or an abort counts only if it
returned soon, and nothing was disturbed since the transaction began; else the lane is closed and opened anew, and the
progress topic says what was committed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from harvester.delivery.progress import Progress, decode
from harvester.errors import BrokerUnavailable

_INIT_S = 0.5  # one attempt; it is repeated
_CLEAR_S = 5.0  # below the least time after which the client gives a request up and sends it again
_FLUSH_S = 60.0
_READ_BACK_RECORDS = 64  # the last committed progress record is that near to the end, as a rule


class Outcome(Enum):
    """What became of a transaction, or of a step of it."""

    DONE = "done"  # it had its effect, for certain
    AGAIN = "again"  # not yet; the same call may be repeated (of `init` alone)
    REFUSED = "refused"  # the transaction can only be aborted
    UNCLEAR = "unclear"  # nobody knows, or the producer is of no use any more: open the lane anew


def judge(error: KafkaError) -> Outcome:
    """What an error of a transactional call means."""
    if error.txn_requires_abort() and not error.fatal():
        return Outcome.REFUSED
    return Outcome.AGAIN if error.retriable() and not error.fatal() else Outcome.UNCLEAR


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """`options` are those of the consumer and the admin client; `producer` those of a transactional producer."""

    group: str
    topic: str
    options: Mapping[str, Any]
    producer: Mapping[str, Any]

    def transactional_id(self, number: int) -> str:
        """Of this lane; the group is part of it, since ids are the whole cluster's."""
        return f"{self.group}.{number}"


class Lane:
    """An open lane. One thread only, but for `produce`'s callbacks, which run inside of its calls."""

    def __init__(self, number: int, topic: str, producer: Any) -> None:
        self.number = number
        self._topic, self._producer = topic, producer
        self._disturbed = False
        self.error = ""  # of the last call that failed
        self.produce = producer.produce

    def disturb(self) -> None:
        """The client reports trouble with a connection: what is under way may have been sent twice."""
        self._disturbed = True

    def init(self) -> Outcome:
        """Fence the predecessor."""
        return self._call(lambda: self._producer.init_transactions(_INIT_S))

    def begin(self) -> Outcome:
        """A transaction begins."""
        self._disturbed = False
        return self._call(self._producer.begin_transaction)

    def note(self, progress: bytes) -> Outcome:
        """A progress record goes into the transaction; the last one counts."""
        return self._call(lambda: self._note(progress))

    def _note(self, progress: bytes) -> None:
        self._producer.produce(self._topic, progress, str(self.number).encode(), self.number)

    def commit(self, progress: bytes, is_sound: Callable[[], bool] = lambda: True) -> Outcome:
        """Send what is left, this progress record included, and commit.

        `is_sound` is asked when every record has its report: the client would also commit a transaction of which it
        only infers that a record was appended (P45).
        """

        def send() -> None:
            self._note(progress)
            self._producer.flush(_FLUSH_S)  # each record has its delivery timeout

        sent, began = self._call(send), time.monotonic()
        if sent is not Outcome.DONE:
            return sent
        if not is_sound():
            return Outcome.REFUSED
        return self._if_clear(self._call(lambda: self._producer.commit_transaction(_CLEAR_S)), began)

    def abort(self) -> Outcome:
        """Give the transaction up."""
        began = time.monotonic()
        return self._if_clear(self._call(lambda: self._producer.abort_transaction(_CLEAR_S)), began)

    def flush(self, timeout_s: float) -> bool:
        """Send what is left; False when some of it has no answer yet."""
        return self._call(lambda: self._left(timeout_s)) is Outcome.DONE

    def _left(self, timeout_s: float) -> None:
        if self._producer.flush(timeout_s):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "some records have no answer yet"))

    def poll(self, timeout_s: float) -> Outcome:
        """Serve what the client has to report; a fatal error is raised there."""
        return self._call(lambda: self._producer.poll(timeout_s))

    def close(self) -> None:
        """End the producer; what it held is dropped, and what is open in Kafka ends with the next `init`."""
        self._call(self._drop)  # a fenced producer says so once more
        # Its `close` would wait for an answer; the client is destroyed with the last reference.
        del self._producer, self.produce

    def _drop(self) -> None:
        self._producer.purge()
        self._producer.poll(0)

    def log_in(self, user: str, password: str) -> None:
        """What to log in with from now on. Safe from any thread."""
        producer = getattr(self, "_producer", None)
        if producer is not None:
            producer.set_sasl_credentials(user, password)

    def _if_clear(self, outcome: Outcome, began: float) -> Outcome:
        if self.poll(0) is not Outcome.DONE:
            return Outcome.UNCLEAR
        late = self._disturbed or time.monotonic() - began > _CLEAR_S
        return Outcome.UNCLEAR if outcome is Outcome.AGAIN or (outcome is Outcome.DONE and late) else outcome

    def _call(self, action: Callable[[], Any]) -> Outcome:
        try:
            action()
        except KafkaException as error:
            return self._judged(error)
        except SystemError as error:
            # The client raises a fatal error after it has called back; a callback that runs meanwhile ends in this one.
            behind = error.__cause__
            if not isinstance(behind, KafkaException):
                raise
            return self._judged(behind)
        except BufferError:
            return Outcome.REFUSED
        return Outcome.DONE

    def _judged(self, error: KafkaException) -> Outcome:
        self.error = error.args[0].str()
        return judge(error.args[0])


class Lanes:
    """Opens lanes and reads their progress. One thread only, but for `log_in`."""

    def __init__(self, settings: LaneSettings, make_producer: Callable[[dict[str, Any]], Any]) -> None:
        self._settings, self._make_producer = settings, make_producer
        self._latest: Callable[[], Lane | None] = lambda: None

    def log_in(self, user: str, password: str) -> None:
        """What clients log in with from now on, that of the lane opened last included. Safe from any thread."""
        given = {"sasl.username": user, "sasl.password": password}
        settings = self._settings
        self._settings = replace(
            settings, options={**settings.options, **given}, producer={**settings.producer, **given}
        )
        lane = self._latest()
        if lane is not None:
            lane.log_in(user, password)

    def open(self, number: int) -> Lane:
        """A lane with a producer of its own, on which `init` is still to be called."""
        opened: list[Lane] = []

        def disturbed(_error: Any) -> None:
            for lane in opened:
                lane.disturb()

        options = {
            **self._settings.producer,
            "transactional.id": self._settings.transactional_id(number),
            "error_cb": disturbed,
        }
        opened.append(Lane(number, self._settings.topic, self._make_producer(options)))
        self._latest = weakref.ref(opened[0])
        return opened[0]

    def progress(self, number: int, timeout_s: float) -> Progress | None:
        """What the lane's last committed record says; None when there is none. Call it after the lane was fenced.

        Raises BrokerUnavailable when the end, as it stood for a reader of everything, was not reached in time: as long
        as a transaction is open before it, ids may be hidden that it commits.
        """
        deadline = time.monotonic() + timeout_s
        low, end = self._edges(number, timeout_s)
        back = _READ_BACK_RECORDS
        options = {**self._consumer_options(), "isolation.level": "read_committed", "enable.partition.eof": True}
        consumer = Consumer(options)
        try:
            while low < end:
                start = max(low, end - back)
                value = self._last(consumer, number, start, end, deadline)
                if value is not None or start == low:
                    return decode(value) if value is not None else None
                back *= 16
        finally:
            consumer.close()
        return None

    def _edges(self, number: int, timeout_s: float) -> tuple[int, int]:
        """The first offset, and the end as a reader of everything sees it."""
        asking = Consumer({**self._consumer_options(), "isolation.level": "read_uncommitted"})
        try:
            low, end = asking.get_watermark_offsets(TopicPartition(self._settings.topic, number), timeout_s)
        except (KafkaException, TypeError) as error:  # None, when it took too long
            raise BrokerUnavailable(
                f"the ends of {self._settings.topic}/{number} could not be read: {error}"
            ) from error
        finally:
            asking.close()
        return low, end

    def _consumer_options(self) -> dict[str, Any]:
        return {
            **self._settings.options,
            "log_level": "0",  # what fails is raised
            "group.id": self._settings.group,  # the client wants one; nothing joins or commits
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
        }

    def _last(self, consumer: Consumer, number: int, start: int, end: int, deadline: float) -> bytes | None:
        """The last committed value from `start` on; reads until `end` is reached."""
        consumer.assign([TopicPartition(self._settings.topic, number, start)])
        last: bytes | None = None
        while time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is None:
                last = message.value()
                reached = (message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                reached = message.offset() or 0
            else:
                raise BrokerUnavailable(f"the progress of lane {number} could not be read: {error.str()}")
            if reached >= end:
                return last
        raise BrokerUnavailable(
            f"the end of {self._settings.topic}/{number}, {end}, was not reached in time",
            hint="a transaction of an older harvester may still be open; it ends by itself",
        )
