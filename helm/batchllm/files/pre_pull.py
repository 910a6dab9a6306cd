"""Downloads models into HF_HOME. The argument is a JSON list of {repo, revision, allow}."""

import json
import sys

from huggingface_hub import snapshot_download

for model in json.loads(sys.argv[1]):
    path = snapshot_download(
        model["repo"], revision=model["revision"], allow_patterns=model.get("allow")
    )
    print(f"{model['repo']} at {model['revision']}: {path}", flush=True)
