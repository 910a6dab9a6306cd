"""Run as a script: a `batchllm` command, and the MiB that its process has taken at most.

python -m support.peak_memory FILE COMMAND...
"""

import resource
import sys
from pathlib import Path

from batchllm_operator.cli import main

if __name__ == "__main__":
    code = main(sys.argv[2:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(sys.argv[1]).write_text(str(peak / 1024), encoding="utf-8")
    raise SystemExit(code)
