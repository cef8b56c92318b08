"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class HarvesterConfig(AppConfig):
    name = "harvester.writers.django"
    label = "harvester"
    verbose_name = "Transactional outbox"
    default_auto_field = "django.db.models.BigAutoField"
