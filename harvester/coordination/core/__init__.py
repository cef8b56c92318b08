"""The decisions of coordinated consumers, pure: records of the log and time in, commands out (seed 003)."""
