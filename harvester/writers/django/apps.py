"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class HarvesterConfig(AppConfig):
    """Found by Django under the name `harvester.writers.django`."""

    name = "harvester.writers.django"
    label = "harvester"
    verbose_name = "Transactional outbox"
    default_auto_field = "django.db.models.BigAutoField"
