"""Cases that need GPUs: real SGLang servers, kvtier and its peers, on one machine, in one call."""
