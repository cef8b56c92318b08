"""No client of Kafka goes on when nobody needs it; in processes of their own, of which all threads are counted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.client_threads import OF_CLIENTS

_BEGIN = """
import gc, sys
gc.disable()  # as long as nothing is collected, what is in a cycle stays

away = {"bootstrap.servers": "127.0.0.1:1"}
"""


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", OF_CLIENTS + _BEGIN + text], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "attempt",
    [
        "progress_topic.find_progress_topic('topic', away)",
        "progress_topic.ensure_progress_topic('topic', away, 1)",
        "topic.ask_cluster_id(away)",
    ],
)
def test_attempts_that_fail_leave_no_client(attempt: str) -> None:
    done = run(f"""
from harvester.delivery import progress_topic
from harvester.errors import BrokerError
from harvester.neli import topic

progress_topic._TIMEOUT_S = topic._TIMEOUT_S = 0.1
for _ in range(3):
    try:
        {attempt}
    except BrokerError as error:
        said = str(error)
print(said, of_clients())
""")
    assert done.stdout.endswith(" []\n"), done
    assert "does not answer" in done.stdout or "return the id" in done.stdout, done.stdout


def test_an_answer_that_is_an_error_leaves_no_client() -> None:
    done = run("""
from concurrent.futures import Future
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from harvester.bounds import SILENT, answer

def ask():
    admin, asked = AdminClient({**away, **SILENT}), Future()
    asked.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    answer(asked, 1)

try:
    ask()
except KafkaException as error:
    code = error.args[0].name()
print(code, of_clients())
""")
    assert done.stdout == "TOPIC_AUTHORIZATION_FAILED []\n", done


def test_a_command_ends_without_what_would_crash_a_client_that_is_left() -> None:
    """A handler of the C library stands for OpenSSL's, which frees what a client may still use."""
    text = """
import ctypes
import confluent_kafka
from harvester_cli.main import main

libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)
sys.argv = ["harvester", {argument!r}]
main()
"""
    assert (run(text.format(argument="--version")).returncode, run(text.format(argument="--none")).returncode) == (0, 2)


@pytest.mark.parametrize("taken", [True, False])
def test_a_question_that_failed_leaves_no_client(taken: bool) -> None:
    done = run(f"""
from harvester import ConsumerSettings
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.offsets import Question
from harvester.coordination.offsets import GroupOffsets
from harvester.errors import BrokerUnavailable

def ask():
    offsets = GroupOffsets(ConsumerSettings(kafka={{**away, "log_level": 0}}, group="g", topics=("t",)))
    question = Question(offsets.committed)
    question.put([GroupPartition("g", "t", 0)])
    question._thread.join()
    try:
        if {taken}:
            question.take()
    except BrokerUnavailable as error:
        print("unavailable")
    offsets.close()
    question.close()

ask()
print(of_clients())
""")
    assert done.stdout == ("unavailable\n" if taken else "") + "[]\n", done


def test_a_consumer_that_could_not_begin_leaves_no_client() -> None:
    done = run("""
from harvester import ConsumerSettings, CoordinatedConsumer
from harvester.coordination import consumer
from harvester.errors import BrokerError

def refuse(*_):
    raise BrokerError("no dead letters here")

consumer.ensure_coordination_topic = lambda *_: None
consumer.ensure_dead_letter_topic = refuse
try:
    CoordinatedConsumer(ConsumerSettings(kafka=away, group="g", topics=("t",), on_error="dead-letter"))
except BrokerError as error:
    print(error, of_clients())
""")
    assert done.stdout == "no dead letters here []\n", done
