"""Errors travel between processes: what a user is told of one that the elector met is what it said there."""

from __future__ import annotations

import pickle

import pytest

from harvester.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ForeignOutbox,
    HarvesterError,
    Problem,
)

ERRORS = (
    HarvesterError("it is so", hint="do that"),
    BrokerUnavailable("Kafka is away"),
    ForeignOutbox(group="group", member="other", theirs="billing", ours="orders"),
    ConfigurationError([Problem("limits.shards", "is 0", "1 to 256")], source="file", hint="change it"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_sent(error: HarvesterError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.hint, arrived.exit_code) == (str(error), error.hint, error.exit_code)
    assert vars(arrived) == vars(error)
    assert arrived.args == error.args
