"""Everything that knows SGLang: plugin, storage adapter, host pages, identity of an engine."""
