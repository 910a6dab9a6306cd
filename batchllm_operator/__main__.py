"""The command `batchllm`; also `python -m batchllm_operator`."""

import os
import signal
import sys

# Python's own handler would print a traceback for a Ctrl-C during the imports below.
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.getpid() == 1:  # of a container, which drops what it doesn't handle yet; `cli` unblocks it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

from batchllm_operator.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
