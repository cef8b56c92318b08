"""Checks whether machine, PostgreSQL and Kafka are as a harvester needs them.

`examine` collects facts (`database`, `kafka`), has them judged (`judge_*`, pure), and returns a report of findings,
each with what to do.
"""

from harvester.doctor.examine import examine
from harvester.doctor.facts import CheckLevel, CheckResult, DoctorReport

__all__ = ["CheckLevel", "CheckResult", "DoctorReport", "examine"]
