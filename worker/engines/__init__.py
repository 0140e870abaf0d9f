"""Engines: adapters behind one small protocol, each run in a process of its own."""
