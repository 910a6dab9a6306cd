"""The chart's checks are scripts, not a package of ours: put them where imports look."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
