"""Public names that have moved are still found where they were, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("harvester.coordination.consumer_settings", "ConsumerSettings", "harvester.coordination.settings"),
        ("harvester.coordination.figures", "Statistics", "harvester.coordination.settings"),
        ("harvester.serializers.cloudevents", "cloud_event_headers", "harvester.serializers.records"),
    ],
)
def test_a_name_that_has_moved_is_found_with_a_warning(module: str, name: str, home: str) -> None:
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=home):
        former = importlib.import_module(module)
    assert getattr(former, name) is getattr(importlib.import_module(home), name)
