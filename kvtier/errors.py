"""The errors a person can act on; each message is one sentence with its remedy."""


class KvtierError(Exception):
    """Base of every error kvtier raises on purpose."""


class ConfigError(KvtierError):
    """A setting is unknown or has a value that cannot be used."""


class StoreError(KvtierError):
    """The store directory cannot be used: missing, foreign, newer, unwritable or damaged."""


class UnreachableError(StoreError):
    """The store's place cannot be used now: it may be mended, mounted or given room while a server
    runs."""


class IdentityError(KvtierError):
    """What identifies the served model cannot be read, so its pages cannot be named safely."""
