"""What Spark's driver runs for a task of Airflow: `batchllm` with the application's arguments."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this file's folder first: its modules must not shadow those of other packages.
    here = Path(__file__).resolve().parent
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != here]
    from batchllm_operator.cli import main

    sys.exit(main())
