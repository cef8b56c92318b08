"""`harvester doctor`: is everything as a harvester needs it? Facts are collected thinly, and judged purely.

`examine` looks at this machine, PostgreSQL and Kafka, and returns a report of findings, each with what to do.
"""

from harvester.doctor.examine import examine
from harvester.doctor.facts import CheckLevel, CheckResult, DoctorReport

__all__ = ["CheckLevel", "CheckResult", "DoctorReport", "examine"]
