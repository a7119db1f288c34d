"""Everything that knows SGLang: plugin, storage adapter, host-page access, identity of an engine."""
