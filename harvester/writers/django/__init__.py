"""A Django app: the outbox as a model, its tables by migration, and `stash()` inside `atomic`.

    INSTALLED_APPS = [..., "harvester.writers.django"]
    HARVESTER_OUTBOX_TABLE = "outbox"  # the default

    with transaction.atomic():
        Account.objects.filter(pk=42).update(balance=F("balance") - 5)
        stash(OutboxRecord("billing.paid", key="42", value="{…}"))

Nothing here loads models, so the package may be imported before Django's apps are.
"""

from __future__ import annotations

from harvester.writers.django.stashing import DjangoLeasedStasher, DjangoStasher, stash, stash_many

__all__ = ["DjangoLeasedStasher", "DjangoStasher", "stash", "stash_many"]
