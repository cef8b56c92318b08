"""Controls a running harvester over a Unix socket.

`protocol` says what goes over it, `sockets` where it is and who is believed, `server` what requests do, `client` how
harvesters are found and asked. The HTTP server beneath is `harvester.http.server`.
"""
