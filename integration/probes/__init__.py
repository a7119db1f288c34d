"""What a served model answers, how fast, and whether a restore is right: asked from outside.

Nothing here imports torch or SGLang, and nothing needs to run on the server's machine.
"""
