"""The threads of Kafka clients, for programs that a test runs in a process of their own."""

OF_CLIENTS = """
import contextlib
from pathlib import Path

def of_clients():
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError):  # one that has ended meanwhile
            names.append(path.read_text().strip())
    return [name for name in names if name.startswith("rdk:")]
"""
