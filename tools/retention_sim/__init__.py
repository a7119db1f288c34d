"""Agent traffic over stores that must forget: kvtier's retention beside page and segment LRU."""
