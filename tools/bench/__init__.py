"""The load generator: streams chat completions from a gateway, says what they cost and whether every stream was whole.

Read in this order: `load` (the story), `arrivals` and `target` (what is sent when), `client` (the socket), `answer`,
`http1`, `sse` and `transcript` (bytes to facts), `verdict` (facts to an outcome), `tally` and `stats` (outcomes to
figures), `cpu` and `mesh_file` (whose processor time), `environment` and `report` (what is printed and written).
"""
