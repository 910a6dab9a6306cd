"""The command `batchllm`; also `python -m batchllm_operator`."""

import signal
import sys

# Python's own handler would print a traceback for a Ctrl-C during the imports below.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from batchllm_operator.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
