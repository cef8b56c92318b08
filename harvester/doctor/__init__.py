"""Checks whether machine, PostgreSQL and Kafka meet a harvester's needs.

`examine` collects facts (`database`, `kafka`), has them judged (`judge_*`, pure), and returns a report of findings,
each with advice.
"""

from harvester.doctor.examine import examine
from harvester.doctor.facts import CheckLevel, CheckResult, DoctorReport

__all__ = ["CheckLevel", "CheckResult", "DoctorReport", "examine"]
