"""The edge: HTTP in, jobs out, frames in, SSE out. Never imports `worker`."""
