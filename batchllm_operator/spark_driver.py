"""What Spark's driver runs for a task of Airflow: `batchllm` with the application's arguments."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this file's folder first: its modules must not shadow those of other packages.
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    from batchllm_operator.cli import main

    sys.exit(main())
