"""The `openai` engine: a server that speaks the OpenAI API does the work, attached or started by us.

adapter.py     the story: requests in, events out, in the engine process's single thread
reach.py       loading: wait for the server, find the model, generate for real
choices.py     the choices of one request; completion.py one choice, from its request to its end
embedding.py   the vectors of one request
watch.py       whether the server is still there, and what it says of its load
client.py      the edge to HTTP; command.py and guard.py the edge to a server of our own
request.py, sse.py, chunks.py, vectors.py, refusals.py, metrics.py, address.py: decisions
"""
