"""Hooks that mend what SGLang does with any tier below it: one file each, dated by its version."""
