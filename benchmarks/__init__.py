"""Benchmarks: `python -m benchmarks.<name>`; the last line printed is one JSON object."""

import sys
from pathlib import Path

# Tools that benchmarks share with tests: the demo's documents, the tuner's workloads.
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
