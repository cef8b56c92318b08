"""Every statement of the outbox as text. Pure: nothing here talks to a server.

`queries` reads rows and maintains the term row, `settle` purges and quarantines, `ddl` creates the tables, `grants`
grants least privileges, `insert` and `leases` write records, `stash_function` and `adoption` are functions in the
server.
"""
