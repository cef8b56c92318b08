"""Asks librdkafka itself whether it knows every option and takes every value; nothing is connected to."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from harvester.config.kafka_options import canonical, get, option_path
from harvester.config.model import Config
from harvester.config.secrets import scrub
from harvester.errors import Problem

_NAMED = re.compile(r'(?:No such configuration property: |for configuration property )"(?P<option>[^"]+)"')
# Without these, making a client starts no connection: no address, no login (SASL may fetch a token over HTTP).
_PROTOCOLS = {"sasl_ssl": "ssl", "sasl_plaintext": "plaintext"}
# Nor would it ask for a token, for which a client with `oauth_cb` waits as it is made.
_LEFT_OUT = frozenset({"bootstrap.servers", "oauth_cb"})


def check_clients(config: Config) -> list[Problem]:
    """What librdkafka refuses in the options of the producers and of the member of the leader group."""
    problems: list[Problem] = []
    for options, producer in ((config.producer_options(), True), (config.consumer_options(), False)):
        for option, message in _refusals(options, producer=producer):
            problem = Problem(_path(config, option), message)
            if problem not in problems:
                problems.append(problem)
    return problems


def _refusals(options: Mapping[str, str], *, producer: bool) -> list[tuple[str | None, str]]:
    """(option or None, message) for each refusal: the client names one at a time, so each is taken out in turn."""
    rest = {name: value for name, value in options.items() if canonical(name) not in _LEFT_OUT}
    protocol = rest.get("security.protocol", "").lower()
    if protocol in _PROTOCOLS:
        rest["security.protocol"] = _PROTOCOLS[protocol]
    found: list[tuple[str | None, str]] = []
    while (message := _refusal(rest, producer=producer)) is not None:
        named = _NAMED.search(message)
        wrong = [name for name in rest if named and canonical(name) == canonical(named["option"])]
        message = scrub(message, options)
        if not wrong:
            found.append((None, message))
            break
        unknown = "No such" in message
        found.append((wrong[0], "the Kafka client does not know this option" if unknown else message))
        for name in wrong:
            del rest[name]
    return found


def _refusal(options: Mapping[str, str], *, producer: bool) -> str | None:
    from confluent_kafka import Consumer, KafkaException, Producer

    silent = logging.Logger("harvester.config.check")  # outside the tree: its warnings are nobody's
    silent.addHandler(logging.NullHandler())
    try:
        client = (Producer if producer else Consumer)(dict(options), logger=silent)
    except KafkaException as error:
        return str(error.args[0].str())
    except (TypeError, ValueError) as error:
        return str(error)
    if not producer:
        client.close()
    return None


def _path(config: Config, option: str | None) -> str:
    if option is None:
        return "producer_kafka_config"
    in_producer = get(config.producer_kafka_config, option) is not None
    return option_path("producer_kafka_config" if in_producer else "base_kafka_config", option)
