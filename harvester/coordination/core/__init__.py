"""The decisions of coordinated consumers, pure: log records and time in, commands out."""
