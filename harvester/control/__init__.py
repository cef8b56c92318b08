"""Controls a running harvester over a Unix socket.

`protocol` defines the messages, `sockets` the socket's location and who is trusted, `server` the effect of requests,
`client` how to find and ask harvesters. The HTTP server underneath is `harvester.http.server`.
"""
