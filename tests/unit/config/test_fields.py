"""Defaults that depend on the process."""

from __future__ import annotations

import pytest

from harvester.config.fields import group_id_from


@pytest.mark.parametrize(
    ("script", "module", "group"),
    [
        ("/usr/local/bin/harvester", None, "harvester"),
        ("/srv/billing-api.py", None, "billing-api"),
        ("/srv/my app (1)", None, "my_app__1_"),
        ("/x/__main__.py", "harvester_cli.__main__", "harvester"),
        ("/x/__main__.py", "orders.relay.__main__", "orders"),
        ("/x/orders.v2", None, "orders.v2"),
        ("/venv/bin/gunicorn", None, ""),
        ("/venv/bin/python3.12", None, ""),
        ("python", None, ""),
        ("-c", None, ""),
        ("", None, ""),
        ("/x/pytest/__main__.py", "pytest.__main__", ""),
        ("uvicorn", None, ""),
        ("/venv/bin/celery", None, ""),
        ("ipython3", None, ""),
        ("/x/uwsgi", None, ""),
        ("...", None, ""),
    ],
)
def test_the_group_id_comes_from_the_main_script(script: str, module: str | None, group: str) -> None:
    assert group_id_from(script, module) == group
