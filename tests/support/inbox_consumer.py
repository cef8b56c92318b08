"""A consumer with an inbox as a process of its own, to be killed at a place: python -m tests.support.inbox_consumer.

Its one argument is JSON: dsn, bootstrap, topic, group, `until` (how many records the topic holds in all), and the
places to stop at: `hold_effect`, `hold_commit` (the value of a record). It says `effect VALUE` when the effect of that
record is done and not committed, `commit VALUE` when it is committed and Kafka does not know, and `end` when it has
read all there is. A line on its standard input lets it go on; `fenced` is its last word when another took over.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from harvester.idempotence import Inbox, InboxFenced


def say(*words: str) -> None:
    print(*words, flush=True)


def hold() -> None:
    """Until somebody writes a line."""
    sys.stdin.readline()


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    consumer = Consumer(
        {
            "bootstrap.servers": plan["bootstrap"],
            "broker.address.family": "v4",
            "group.id": plan["group"],
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 20,
        }
    )
    with psycopg.connect(plan["dsn"], autocommit=True) as connection:
        inbox = Inbox(connection, plan["group"])
        inbox.create_table()
        partitions = consumer.list_topics(plan["topic"], 10).topics[plan["topic"]].partitions
        places, ends = [], {}
        for partition in partitions:
            position = inbox.open(plan["topic"], partition)
            offset = OFFSET_BEGINNING if position.offset is None else position.offset
            end = consumer.get_watermark_offsets(TopicPartition(plan["topic"], partition), 10)[1]
            places.append(TopicPartition(plan["topic"], partition, offset))
            if end > (position.offset or 0):
                ends[partition] = end
        consumer.assign(places)
        while ends:
            message: Any = consumer.poll(1)
            if message is None:
                continue
            assert message.error() is None, message.error()
            value = message.value().decode()
            with inbox.record(message) as effect:
                if effect.is_new:
                    effect.cursor.execute("INSERT INTO effect (what) VALUES (%s)", (value,))
                if plan.get("hold_effect") == value:
                    say("effect", value)
                    hold()
            if plan.get("hold_commit") == value:
                say("commit", value)
                hold()
            consumer.commit(message=message, asynchronous=True)
            if ends.get(message.partition()) == message.offset() + 1:
                del ends[message.partition()]
        say("end")
    consumer.close()


if __name__ == "__main__":
    try:
        main()
    except InboxFenced:
        say("fenced")
