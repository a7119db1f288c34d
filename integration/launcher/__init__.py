"""`kvtier launch` and `kvtier plan`: profiles, the machine, the command line, the supervisor.

Nothing here imports torch or SGLang: a command can be looked at anywhere.
"""
