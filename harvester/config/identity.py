"""Defaults that depend on the process: the instance's name and the leader group's id (seeds 001/004).

Two services that share a group id would starve each other, so a name that says nothing about the service
(an interpreter, an application server) is no default.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import PurePath

_SUFFIXES = frozenset({".py", ".pyw", ".pyz", ".pyc", ".exe"})
_GENERIC = re.compile(
    r"(python|pypy|ipython|bpython|ptpython)[0-9.]*t?|"
    r"-c|-m|-|__main__|"
    r"gunicorn|uvicorn|hypercorn|daphne|granian|uwsgi|mod_wsgi.*|waitress-serve|celery|rq|dramatiq|arq|huey_consumer|"
    r"flask|django-admin|fastapi|airflow|spark-submit|"
    r"jupyter.*|ipykernel.*|colab_kernel_launcher|pydevconsole|pydevd|debugpy|"
    r"pytest|py\.test|nosetests|tox|nox|coverage|unittest|pdb|runpy|"
    r"multiprocessing.*|multiprocess.*",
    re.IGNORECASE,
)
_OWN_COMMAND = "harvester"
_OWN_PACKAGE = "harvester_cli"
_MAX_LENGTH = 200


def group_id_from(main_script: str, main_module: str | None) -> str:
    """A group id from `sys.argv[0]` and the name of the module run with `-m`; empty where neither tells anything.

    The file name without its Python suffix, everything outside `A-Za-z0-9._-` turned into `_`.
    """
    if main_module:
        name = main_module.removesuffix(".__main__").split(".")[0]
        name = _OWN_COMMAND if name == _OWN_PACKAGE else name
    else:
        path = PurePath(main_script)
        name = path.stem if path.suffix.lower() in _SUFFIXES else path.name
    name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_MAX_LENGTH]
    return "" if not name.strip("._-") or _GENERIC.fullmatch(name) else name


def default_group_id() -> str:
    """`group_id_from` this process."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return group_id_from(sys.argv[0] if sys.argv else "", getattr(spec, "name", None))


def default_name() -> str:
    """`{hostname}_{pid}_{UNIX time in seconds}`, as in the seeds."""
    return f"{socket.gethostname()}_{os.getpid()}_{int(time.time())}"
