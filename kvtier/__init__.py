"""kvtier: the KV cache of long SGLang sessions, kept across restarts and power cuts."""

__version__ = "0.1.0"
