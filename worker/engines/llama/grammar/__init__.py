"""Structured output: JSON, JSON schemas, regular expressions and GBNF as grammars for llama.cpp. Pure."""

from __future__ import annotations

from worker.engines.llama.grammar.compiler import compile_grammar

__all__ = ["compile_grammar"]
