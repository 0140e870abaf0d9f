"""Installs the locked dependencies into `.venv`, for `tools/up` and `tools/test`.

It runs before anything is installed: standard library only, on any Python that the project supports.
"""
