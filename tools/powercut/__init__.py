"""The lab that tries to make kvtier lose a page: power cuts, torn writes, kills, rot, bad drives.

`python -m powercut` from `tools/`, or `make crash`. Each technique is a module with a function
that returns a `Result`; `workload.py` says what is stored and what must be there afterwards.
"""
