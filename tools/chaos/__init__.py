"""Faults on purpose: a mesh under load whose parts are killed, frozen and cut off, and every answer compared."""
