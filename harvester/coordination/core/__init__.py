"""The decisions of coordinated consumers, pure: records of the log and time in, commands out (seed 003).

`messages` are what clients say, `rationalizer` and `world` what the log makes of it, `claim` one claim of a client,
`coordinator` all of them, `fair_share` who takes and gives what. `partition_buffer` holds records on their way to the
application, `offset_policy` says where a partition is begun, `stall_detector` when nothing comes that should,
`overview` shows claims to people.
"""
