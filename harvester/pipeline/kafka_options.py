"""The configuration's Kafka options, which are librdkafka's, as Kafka's Java client names them."""

from __future__ import annotations

from collections.abc import Mapping

_SAME = ("bootstrap.servers", "security.protocol", "ssl.endpoint.identification.algorithm", "client.id")
_UPPER = "security.protocol"


def for_java(options: Mapping[str, object]) -> dict[str, str]:
    """Addresses, TLS with a CA in a PEM file, and SASL with a password; what has no counterpart is left out.

    A client's own certificate needs one PEM file with key and chain: give it as ssl.keystore.* of the Java client.
    """
    found = {name: str(options[name]) for name in _SAME if options.get(name) not in (None, "")}
    if _UPPER in found:
        found[_UPPER] = found[_UPPER].upper()
    # In librdkafka "none" turns the comparison of host names off, in Java an empty text.
    if found.get("ssl.endpoint.identification.algorithm") == "none":
        found["ssl.endpoint.identification.algorithm"] = ""
    if ca := options.get("ssl.ca.location"):
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(ca)}
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms")
    user = options.get("sasl.username")
    if mechanism and user is not None:
        found["sasl.mechanism"] = str(mechanism)
        module = "scram.Scram" if str(mechanism).startswith("SCRAM") else "plain.Plain"
        found["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module}LoginModule required"
            f" username={_quoted(user)} password={_quoted(options.get('sasl.password', ''))};"
        )
    return found


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
