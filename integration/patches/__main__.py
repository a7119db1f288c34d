"""Print as JSON what each patch needs and this SGLang lacks; `kvtier patches --check` reads it."""

import json

from sglang.srt.plugins import load_plugins

from kvtier.integration import plugin
from kvtier.patches import PATCHES

if __name__ == "__main__":
    load_plugins()
    print(json.dumps({patch.name: plugin.patch_problems(patch.name) for patch in PATCHES}))
